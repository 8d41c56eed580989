"""Functions that run on every rank, or in the test process as the only rank."""

import functools
import math
import resource
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn

from tests.engine.batches import engine, ragged_batch
from verlite.algorithms.aggregation import token_weights
from verlite.config.compile import policy_loss_spec
from verlite.config.schema import (
    ActorConfig,
    Config,
    DistillationConfig,
    DistillationLossConfig,
)
from verlite.engine import loading, ulysses
from verlite.engine.attention import Sequences, packed_attention
from verlite.engine.checkpoint import local_part
from verlite.engine.fsdp import Counts, NonFiniteError, TrainEngine
from verlite.engine.lora import trained
from verlite.engine.micro import MicroBatching
from verlite.protocol.data import DataProto
from verlite.spec.catalog import BYPASS_LOSS
from verlite.spec.correction import RolloutCorrection
from verlite.spec.roles import Micro, PolicyLossSpec, Updates
from verlite.weights.probe import gap
from verlite.workers.actor import ActorWorker, policy_objective, unit_factor
from verlite.workers.training import StepRows

SCALE = 9.0
TEMPERATURE = 0.8
POLICY = {
    "clip_low": 0.2,
    "clip_high": 0.3,
    "clip_c": 3.0,
    "entropy_coeff": 0.01,
    "kl_loss_coef": 0.1,
}


def weighted_loss(mode: str) -> Any:
    """Return a loss function: -(advantage * log-prob), aggregated, and two metrics."""

    def loss_fn(
        rows: TensorDict, outputs: dict[str, Tensor], counts: Counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mask = rows["response_mask"]
        weights = token_weights(
            mask, mode, tokens=counts.tokens, sequences=counts.sequences, scale=SCALE
        )
        loss = -(outputs["log_probs"] * rows["advantages"] * weights).sum()
        return loss, {"tokens": mask.sum(), "share": mask.sum() / counts.tokens}

    return loss_fn


def actors_spec(mode: str, loss_mode: str = "vanilla") -> PolicyLossSpec:
    """Return the actor's loss with all of its terms: clipped PPO, entropy bonus, KL."""
    config = Config()
    coefficients = {
        "entropy_coeff": POLICY["entropy_coeff"],
        "kl_loss_coef": POLICY["kl_loss_coef"],
        "clip_ratio_c": POLICY["clip_c"],
    }
    config.actor_rollout_ref.actor = ActorConfig(
        loss_agg_mode=mode, use_kl_loss=True, kl_loss_type="k3", **coefficients
    )
    plan: Any = SimpleNamespace(
        clip_low=POLICY["clip_low"],
        clip_high=POLICY["clip_high"],
        loss_scale=SCALE,
        loss_mode=loss_mode,
        correction=RolloutCorrection(bypass_mode=True) if loss_mode == BYPASS_LOSS else None,
    )
    return policy_loss_spec(config, plan)


def actors_loss(mode: str, loss_mode: str = "vanilla") -> Any:
    """Return the actor's loss; see `actors_spec`."""
    return policy_objective(actors_spec(mode, loss_mode))


def distillation(mode: str, settings: dict[str, Any]) -> Any:
    """Return the actor's loss with the distillation term alone."""
    config = Config()
    config.actor_rollout_ref.actor = ActorConfig(loss_agg_mode=mode)
    config.distillation = DistillationConfig(
        enabled=True,
        distillation_loss=DistillationLossConfig(use_task_rewards=False, **settings),
    )
    plan: Any = SimpleNamespace(
        clip_low=0.2, clip_high=0.2, loss_scale=SCALE, loss_mode="vanilla", correction=None
    )
    return policy_objective(policy_loss_spec(config, plan))


def actors_factor(mode: str) -> Any:
    """Return what sums of the actor's loss are multiplied by, from the counts of a step."""
    return functools.partial(unit_factor, actors_spec(mode))


def my_rows(rows: list[int]) -> list[int]:
    """Return this rank's rows: two thirds of the remaining ones, and on the last rank all."""
    for _ in range(dist.get_rank()):
        rows = rows[len(rows) * 2 // 3 :]
    return rows if dist.get_rank() == dist.get_world_size() - 1 else rows[: len(rows) * 2 // 3]


def catch_gradients(subject: TrainEngine) -> dict[str, Tensor]:
    """Return a dict that each optimizer step fills with its whole gradients."""
    caught: dict[str, Tensor] = {}

    def hook(*_: Any) -> None:
        named = subject.model.model.named_parameters()
        caught.update({name: p.grad.full_tensor().clone() for name, p in named if p.requires_grad})

    subject.optimizer.register_step_pre_hook(hook)
    return caught


def gradients(
    path: str, cases: list[dict[str, Any]], **settings: Any
) -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
    """Return (metrics, gradients) of one update per case.

    A case has a mode, rows in order, and size or max_tokens of micro-batches. With `columns` the
    loss is the actor's, and `loss` names its policy loss. With `distillation` it is that term.
    """
    defaults = {"grad_clip": math.inf, "enable_gradient_checkpointing": False}
    subject = engine(path, train=True, lr=0.0, **(defaults | settings))
    caught = catch_gradients(subject)
    results = []
    for case in cases:
        columns = case.get("columns", {})
        batch = ragged_batch().with_batch(**columns)[my_rows(case["rows"])]
        micro = MicroBatching(size=case.get("size"), max_tokens=case.get("max_tokens"))
        if "distillation" in case:
            loss_fn = distillation(case["mode"], case["distillation"])
        elif columns:
            loss_fn = actors_loss(case["mode"], case.get("loss", "vanilla"))
        else:
            loss_fn = weighted_loss(case["mode"])
        metrics = subject.update(batch, micro, TEMPERATURE, loss_fn, with_entropy=bool(columns))
        results.append((metrics, dict(caught)))
    return results


def padded_gradients(path: str, cases: list[dict[str, Any]]) -> Any:
    return gradients(path, cases, use_remove_padding=False)


def half_precision_gradients(path: str, cases: list[dict[str, Any]]) -> Any:
    return gradients(path, cases, dtype="bfloat16")


def gradients_with(path: str, cases: list[dict[str, Any]], settings: dict[str, Any]) -> Any:
    return gradients(path, cases, **settings)


def shared_attention(
    tensors: list[Tensor], direction: Tensor, lengths: tuple[int, ...], window: int | None
) -> tuple[Tensor, list[Tensor]]:
    """Return this rank's slice of attention's output and of the gradients of query, key, value."""
    n = dist.get_world_size()
    rank = dist.get_rank()
    query, key, value = (tensor.chunk(n, 2)[rank].clone().requires_grad_() for tensor in tensors)
    sequences = Sequences(
        lengths, torch.tensor([0, *lengths]).cumsum(0).int(), ulysses.sp_group(n, packed=True)
    )
    out, _ = packed_attention(
        nn.Module(),
        query,
        key,
        value,
        None,
        scaling=0.3,
        sliding_window=window,
        sequences=sequences,
    )
    gradients = torch.autograd.grad((out * direction.chunk(n, 1)[rank]).sum(), (query, key, value))
    return out.detach(), list(gradients)


def passes(
    path: str,
    batch: DataProto,
    shares: list[list[int]],
    micro: MicroBatching,
    head: str,
    settings: dict[str, Any],
) -> Any:
    """Return all outputs of `forward` for this rank's rows."""
    subject = engine(path, head=head, **settings)
    return subject.forward(
        batch[shares[dist.get_rank()]],
        micro,
        TEMPERATURE,
        with_entropy=True,
        with_sum_pi_squared=True,
    )


def narrow_passes(path: str, shares: list[list[int]], settings: dict[str, Any]) -> Any:
    """Return `passes` for rows that are padded to this rank's width."""
    t = ragged_batch()[shares[dist.get_rank()]].batch
    real = t["attention_mask"].any(0).nonzero().flatten()
    first = int(real[0])
    last = int(real[-1]) + 1
    prompts = t["prompts"].shape[1]
    cut = {name: t[name][:, first:last] for name in ("input_ids", "attention_mask", "position_ids")}
    cut["response_mask"] = t["response_mask"][:, : last - prompts]
    return engine(path, **settings).forward(
        DataProto.from_dict(cut), MicroBatching(size=3), TEMPERATURE
    )


def one_update(path: str, head: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return metrics, weights and moments of one update on this rank's rows.

    Adam's epsilon is large: with a small one its first step is a gradient's sign, and rounding
    decides where a gradient is almost 0.
    """
    subject = engine(path, train=True, head=head, lr=1e-2, eps=1e-2, grad_clip=0.5, **settings)
    loss_fn = weighted_loss("token-mean") if head == "lm" else squared_error
    metrics = subject.update(
        ragged_batch()[my_rows(list(range(8)))], MicroBatching(size=3), TEMPERATURE, loss_fn
    )
    return {"metrics": metrics, "state": weights_and_moments(subject)}


def everything(path: str, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return log-probs, and the state after an update, export, fingerprint and checkpoint."""
    subject = engine(path, train=True, lr=1e-2, eps=1e-2, grad_clip=0.5, **settings)
    log_probs = subject.forward(ragged_batch(), MicroBatching(size=3), TEMPERATURE)["log_probs"]
    caught = catch_gradients(subject)
    metrics = subject.update(
        ragged_batch()[my_rows(list(range(8)))],
        MicroBatching(size=3),
        TEMPERATURE,
        weighted_loss("token-mean"),
    )
    subject.save(f"{folder}/checkpoint")
    subject.save_pretrained(f"{folder}/huggingface")
    return {
        "log_probs": log_probs,
        "metrics": metrics,
        "gradients": caught,
        "state": weights_and_moments(subject),
        "export": dict(subject.export()),
        "fingerprint": subject.fingerprint(),
        "held": sum(local_part(p).numel() for p in subject.parameters),
    }


def _gradients_again(path: str, case: dict[str, Any], settings: dict[str, Any]) -> Any:
    return gradients(path, [case, case], **settings)


def _clipped(path: str, case: dict[str, Any]) -> Any:
    return gradients(path, [case], grad_clip=0.5)


def weights_and_moments(subject: TrainEngine) -> dict[str, Tensor]:
    """Return all whole tensors of the training state, by name."""
    state = {}
    for name, parameter in subject.model.model.named_parameters():
        state[name] = parameter.detach().full_tensor().clone()
        for key, value in (
            subject.optimizer.state[parameter].items() if parameter.requires_grad else ()
        ):
            state[f"{name}.{key}"] = (
                value.full_tensor().clone() if hasattr(value, "full_tensor") else value.clone()
            )
    return state


def squared_error(
    rows: TensorDict, outputs: dict[str, Tensor], counts: Counts
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a loss for values."""
    return (
        (outputs["values"] - rows["advantages"]) * rows["response_mask"]
    ).square().sum() / counts.tokens, {}


def train(
    path: str,
    steps: int,
    *,
    save: str | None = None,
    load: str | None = None,
    head: str = "lm",
    **settings: Any,
) -> dict[str, Any]:
    """Run training steps of two updates each, on rows drawn with torch's global generator."""
    subject = engine(path, train=True, head=head, lr=1e-2, lr_warmup_steps=3, seed=5, **settings)
    loss_fn = weighted_loss("token-mean") if head == "lm" else squared_error
    if load is not None:
        subject.load(load)
    history = []
    for _ in range(steps):
        for _ in range(2):
            rows = [
                row
                for row in torch.randperm(8).tolist()
                if row % dist.get_world_size() == dist.get_rank()
            ]
            history.append(
                subject.update(ragged_batch()[rows], MicroBatching(size=2), 1.0, loss_fn)
            )
        subject.step_schedule()
    if save is not None:
        subject.save(save)
    return {
        "history": history,
        "state": weights_and_moments(subject),
        "fingerprint": subject.fingerprint(),
        "step": subject.schedule_step,
    }


def train_and_save(path: str, steps: int, folder: str) -> dict[str, Any]:
    return train(path, steps, save=folder)


def load_and_train(path: str, steps: int, folder: str) -> dict[str, Any]:
    return train(path, steps, load=folder)


def load_state(path: str, folder: str, head: str = "lm", fsdp_size: int = -1) -> dict[str, Any]:
    """Return the state after loading, without training."""
    subject = engine(path, train=True, head=head, fsdp_size=fsdp_size)
    subject.load(folder)
    return {
        "state": weights_and_moments(subject),
        "fingerprint": subject.fingerprint(),
        "step": subject.schedule_step,
    }


def nonfinite_updates(path: str, dump_dir: str) -> dict[str, Any]:
    """Run a good update and updates with a NaN loss on the last rank; return the states around."""
    subject = engine(path, train=True, lr=1e-2, lr_warmup_steps=5, max_nonfinite_updates=3)
    batch = ragged_batch()[my_rows(list(range(8)))]
    good = weighted_loss("token-mean")

    def bad(
        rows: TensorDict, outputs: dict[str, Tensor], counts: Counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = good(rows, outputs, counts)
        return loss * (
            float("nan") if dist.get_rank() == dist.get_world_size() - 1 else 1.0
        ), metrics

    subject.update(batch, MicroBatching(size=2), 1.0, good)
    subject.step_schedule()
    before = weights_and_moments(subject)
    metrics = []
    error = ""
    try:
        for i in range(4):
            metrics.append(
                subject.update(
                    batch, MicroBatching(size=2), 1.0, bad, dump_dir=Path(dump_dir) / str(i)
                )
            )
    except NonFiniteError as caught:
        error = str(caught)
    lr_before = subject.optimizer.param_groups[0]["lr"]
    lr_after = subject.step_schedule()
    after = weights_and_moments(subject)
    recovered = subject.update(batch, MicroBatching(size=2), 1.0, good)
    return {
        "before": before,
        "after": after,
        "metrics": metrics,
        "error": error,
        "lr": (lr_before, lr_after),
        "recovered": recovered,
    }


def uneven_ranks(path: str, settings: dict[str, Any] | None = None) -> list[Any]:
    """Run passes in which rank 0 has all rows, then an update without trainable tokens."""
    subject = engine(path, train=True, lr=0.0, grad_clip=math.inf, **(settings or {}))
    caught = catch_gradients(subject)
    batch = ragged_batch()
    mine = batch if dist.get_rank() == 0 else batch[[]]
    metrics = subject.update(mine, MicroBatching(size=3), 0.8, weighted_loss("token-mean"))
    out = subject.forward(mine, MicroBatching(size=3))
    untrained = subject.update(
        mine.select_idxs([4] if len(mine) else []),
        MicroBatching(size=3),
        0.8,
        weighted_loss("token-mean"),
    )
    return [metrics, caught, out["log_probs"], untrained]


def build(paths: list[str], head: str) -> int | str:
    """Build an engine from this rank's path; return its fingerprint, or the error message."""
    try:
        return engine(paths[dist.get_rank()], head=head).fingerprint()
    except ValueError as error:
        return str(error)


def refusal(path: str, settings: dict[str, Any]) -> str:
    """Return why an engine cannot be built with these settings."""
    try:
        engine(path, **settings)
    except ValueError as error:
        return str(error)
    return "nothing"


def reads(path: str, head: str) -> int:
    """Return how often this rank reads the checkpoint while it builds an engine."""
    count = 0
    load_model = loading.load_model

    def counted(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        return load_model(*arguments)

    loading.load_model = counted
    try:
        engine(path, head=head)
    finally:
        loading.load_model = load_model
    return count


def export(path: str, folder: str, **settings: Any) -> dict[str, Any]:
    """Return the exported weights and their fingerprints."""
    subject = engine(path, **settings)
    subject.save_pretrained(folder)
    return {
        "weights": dict(subject.export()),
        "fingerprint": subject.fingerprint(),
        "bf16": subject.fingerprint(torch.bfloat16),
    }


def export_replicas(path: str, folder: str) -> dict[str, Any]:
    subject = engine(path, fsdp_size=1)
    subject.save(f"{folder}/checkpoint")
    return {"weights": dict(subject.export()), "fingerprint": subject.fingerprint()}


def save_with_a_full_disk_on_one_rank(path: str, folder: str) -> str:
    """Return what saving raises on this rank if the last rank cannot write files over 4 KiB."""
    subject = engine(path, train=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if dist.get_rank() == dist.get_world_size() - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        subject.save(folder)
        return "nothing"
    except OSError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def export_to_a_full_disk(path: str, folder: str) -> str:
    """Return what save_pretrained raises on this rank if rank 0 cannot write files over 4 KiB."""
    subject = engine(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        subject.save_pretrained(folder)
        return "nothing"
    except OSError as error:
        return type(error).__name__
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def unwritable_generators(path: str, folder: str) -> str:
    """Return what saving raises on this rank if the last rank cannot write its small file."""
    subject = engine(path, train=True)
    if dist.get_rank() == dist.get_world_size() - 1:
        (Path(folder) / f"rng_rank_{dist.get_rank()}.json").mkdir(parents=True)
    try:
        subject.save(folder)
        return "nothing"
    except OSError as error:
        return str(error)


def save_with_a_nan_on_one_rank(path: str, folder: str) -> str:
    """Return what saving raises on this rank if the last rank's shard of a weight has a NaN."""
    subject = engine(path, train=True)
    if dist.get_rank() == dist.get_world_size() - 1:
        local_part(dict(subject.model.model.named_parameters())["model.norm.weight"])[-1] = float(
            "nan"
        )
    try:
        subject.save(folder)
        return "nothing"
    except NonFiniteError as error:
        return str(error)


def largest_of_rows(path: str) -> dict[str, float]:
    """Return metrics of an update over the rows' uid numbers: their sum and maximum."""

    def loss(
        rows: TensorDict, outputs: dict[str, Tensor], counts: Counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        numbers = rows["number"].double()
        return (outputs["log_probs"] * 0).sum(), {
            "number": numbers.sum(),
            "number_max": numbers.max(),
        }

    batch = ragged_batch()
    batch = batch.with_batch(number=torch.arange(len(batch)) * 10)
    rows = [row for row in range(len(batch)) if row % dist.get_world_size() == dist.get_rank()]
    return engine(path, train=True).update(batch[rows], MicroBatching(size=2), 1.0, loss)


LORA = {"lora_rank": 4, "lora_alpha": 12}


def lora_updates(path: str, folder: str, **settings: Any) -> dict[str, Any]:
    """Run four updates with adapters and a checkpoint after two; return everything observable."""
    subject = engine(path, train=True, lr=3e-3, grad_clip=math.inf, **LORA, **settings)
    caught = catch_gradients(subject)
    batch = ragged_batch()[my_rows(list(range(8)))]
    start = {
        name: p.detach().full_tensor().clone() for name, p in subject.model.model.named_parameters()
    }
    history = []
    gradients = []
    for step in range(4):
        if step == 2:
            subject.save(f"{folder}/checkpoint")
        history.append(
            subject.update(batch, MicroBatching(size=3), TEMPERATURE, weighted_loss("token-mean"))
        )
        gradients.append(dict(caught))
    log_probs = subject.forward(batch, MicroBatching(size=3))["log_probs"]
    with subject.without_adapters():
        reference = subject.forward(batch, MicroBatching(size=3))["log_probs"]
    subject.save_pretrained(f"{folder}/hf")
    resumed = engine(path, train=True, lr=3e-3, grad_clip=math.inf, **LORA, **settings)
    resumed.load(f"{folder}/checkpoint")
    again = [
        resumed.update(batch, MicroBatching(size=3), TEMPERATURE, weighted_loss("token-mean"))
        for _ in range(2)
    ]
    return {
        "start": start,
        "end": {
            name: p.detach().full_tensor().clone()
            for name, p in subject.model.model.named_parameters()
        },
        "history": history,
        "gradients": gradients,
        "log_probs": log_probs,
        "reference": reference,
        "weights": dict(subject.export()),
        "fingerprints": [subject.fingerprint(), subject.fingerprint(torch.bfloat16)],
        "bf16": dict(subject.export(torch.bfloat16)),
        "parts": {part: dict(subject.export(part=part)) for part in ("base", "adapters")},
        "part_fingerprints": {
            part: subject.fingerprint(part=part) for part in ("base", "adapters")
        },
        "again": again,
        "resumed": weights_and_moments(resumed),
        "state": weights_and_moments(subject),
    }


def lora_updates_on_replicas(path: str, folder: str) -> dict[str, Any]:
    return lora_updates(path, folder, fsdp_size=1)


def probe(path: str, max_length: int) -> Any:
    return engine(path).probe(1.0, max_length)


def refilled(path: str, compute: str, sent: str, **lora: int) -> dict[str, Any]:
    """Give an engine without optimizer the weights of a trained engine, sent in a dtype.

    Both compute in `compute`; the trained engine holds float32.

    Returns:
        Fingerprints of both; pairs of their log-probs, with LoRA also without the adapters; and
        the second engine's log-probs and fingerprint before.
    """
    dtype = getattr(torch, compute)
    trainer = engine(path, train=True, dtype=compute, **lora)
    other = engine(path, dtype=compute, model_dtype=compute, **lora)
    torch.manual_seed(1 + dist.get_rank())
    for _, parameter in trained(trainer.model.model):
        local = local_part(parameter)
        local += 0.05 * torch.randn_like(local)
    rows, micro = ragged_batch(), MicroBatching(size=3)
    part: Any = "trained" if lora else "merged"
    before = other.own_fingerprint(dtype)
    log_probs_before = other.forward(rows, micro)["log_probs"]
    other.load_weights(trainer.export(getattr(torch, sent), part=part))
    pairs = [(trainer.forward(rows, micro)["log_probs"], other.forward(rows, micro)["log_probs"])]
    if lora:
        with trainer.without_adapters(), other.without_adapters():
            reference = [one.forward(rows, micro)["log_probs"] for one in (trainer, other)]
        pairs.append((reference[0], reference[1]))
    return {
        "fingerprints": (trainer.own_fingerprint(dtype), other.own_fingerprint(dtype)),
        "log_probs": pairs,
        "before": before,
        "log_probs_before": log_probs_before,
    }


def refilled_with(path: str, fault: str | None) -> dict[str, Any]:
    """Do what `refilled` does while ranks copy a wrong part; return fingerprints and the gap of
    the log-prob probe."""
    trainer, other = engine(path, train=True), engine(path)
    ranks = dist.get_world_size()
    for _, parameter in trained(trainer.model.model):
        local = local_part(parameter)
        local += 0.05 * torch.randn_like(local)
    own_part = loading.compute_local_shape_and_global_offset

    def wrong_part(shape: Any, mesh: Any, placements: Any) -> Any:
        sizes, offsets = own_part(shape, mesh, placements)
        first = 0 if fault == "one shard" else (ranks - 1 - dist.get_rank()) * sizes[0]
        return sizes, (first, *offsets[1:])

    with pytest.MonkeyPatch.context() as patch:
        if fault:
            patch.setattr(loading, "compute_local_shape_and_global_offset", wrong_part)
        other.load_weights(trainer.export())
    expected, found = trainer.probe(1.0, 64), other.probe(1.0, 64)
    return {
        "fingerprints": [one.own_fingerprint(torch.float32) for one in (trainer, other)],
        "gap": gap(expected, found.log_probs).relative,
    }


def accumulated_gradients(
    path: str, cases: list[dict[str, Any]], **settings: Any
) -> list[list[tuple[dict[str, Any], dict[str, Tensor]]]]:
    """Return (metrics, gradients) of one update per case, taken at once and after `accumulate`.

    A case has the arguments of `gradients`, and `parts`: the rows of each call of `accumulate`. In
    between come what other calls of a step do: a pass without gradients, and memory moves.
    """
    defaults = {"grad_clip": math.inf, "enable_gradient_checkpointing": False}
    subject = engine(path, train=True, lr=0.0, **(defaults | settings))
    caught = catch_gradients(subject)
    results = []
    for case in cases:
        whole = ragged_batch().with_batch(**case["columns"])
        micro = MicroBatching(size=case.get("size"), max_tokens=case.get("max_tokens"))
        loss_fn = actors_loss(case["mode"], case.get("loss", "vanilla"))
        factor = actors_factor(case["mode"])
        batch = whole[my_rows(list(range(8)))]
        found = []
        for parts in ([], case["parts"]):
            for part in parts:
                mine = whole[my_rows(part)]
                subject.accumulate(mine, micro, TEMPERATURE, loss_fn, with_entropy=True)
                subject.forward(mine, micro, TEMPERATURE)
                subject.offload()
                subject.onload()
            metrics = subject.update(
                batch, micro, TEMPERATURE, loss_fn, with_entropy=True, unit_factor=factor
            )
            found.append((metrics, dict(caught)))
        results.append(found)
    return results


def accumulated_gradients_with(path: str, cases: list[dict[str, Any]], settings: Any) -> Any:
    return accumulated_gradients(path, cases, **settings)


def interrupted_accumulation(path: str, columns: dict[str, Tensor]) -> dict[str, Any]:
    """Return the gradients of updates after a step that was given up, and the error of one whose
    rows were not all accumulated."""
    subject = engine(path, train=True, lr=0.0, grad_clip=math.inf)
    caught = catch_gradients(subject)
    batch = ragged_batch().with_batch(**columns)[my_rows(list(range(8)))]
    micro, loss_fn = MicroBatching(size=2), actors_loss("token-mean")
    options: dict[str, Any] = {"with_entropy": True, "unit_factor": actors_factor("token-mean")}
    found: dict[str, Any] = {}
    for name in ("undisturbed", "given up"):
        if name == "given up":
            subject.accumulate(batch, micro, TEMPERATURE, loss_fn, with_entropy=True)
            subject.drop_gradients()
        subject.update(batch, micro, TEMPERATURE, loss_fn, **options)
        found[name] = dict(caught)
    subject.accumulate(batch[[0]], micro, TEMPERATURE, loss_fn, with_entropy=True)
    try:
        subject.update(batch, micro, TEMPERATURE, loss_fn, **options)
    except RuntimeError as error:
        found["error"] = str(error)
    return found


def worker_updates(path: str, columns: dict[str, Tensor], parts: list[list[int]]) -> list[Any]:
    """Return metrics and weights after a step of two mini-batches and two epochs: all at once, and
    with the first mini-batch accumulated in parts."""
    loss = actors_spec("token-mean")
    index = torch.tensor([[0, 1], [1, 0], [0, 0], [1, 1], [0, 1], [1, 0], [0, 0], [1, 1]])
    whole = ragged_batch().with_batch(**columns, mini_batch_index=index)
    loss_mask = whole.batch["response_mask"].clone()
    loss_mask[2, 0] = 0  # rejected
    whole = whole.with_batch(loss_mask=loss_mask, entropy_sums=torch.zeros(8)).with_meta(updates=2)
    results = []
    for given in ([], parts):
        worker = ActorWorker.__new__(ActorWorker)
        worker.engine = engine(path, train=True, lr=0.1, grad_clip=math.inf, betas=(0.0, 0.0))
        for group in worker.engine.optimizer.param_groups:
            group["eps"] = 1.0  # updates are about linear in the gradient
        micro = Micro(2, None)
        worker.spec = SimpleNamespace(
            loss=loss,
            updates=Updates(4, 4, 2, 2, micro, False, "token-mean"),
            temperature=TEMPERATURE,
            calculate_entropy=False,
            run_dir="run",
        )
        worker._spec = SimpleNamespace(device_kind="cpu")
        worker._objective = policy_objective(loss)
        worker.rank_rows, worker.all_rows = StepRows(), StepRows()
        for number, part in enumerate(given):
            worker.accumulate(whole[my_rows(part)].with_meta(step=1, part=number))
        metrics = worker.update(whole[my_rows(list(range(8)))].with_meta(step=1))
        named = trained(worker.engine.model.model)
        weights = {name: parameter.full_tensor().detach().clone() for name, parameter in named}
        results.append((metrics, weights))
    return results


def initial_weights(path: str) -> dict[str, Tensor]:
    named = trained(engine(path, train=True).model.model)
    return {name: parameter.full_tensor().detach().clone() for name, parameter in named}
