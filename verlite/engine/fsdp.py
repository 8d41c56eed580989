"""TrainEngine: one model, sharded over all ranks with FSDP2, that computes log-probs or values and
takes optimizer steps.

The engine knows no RL algorithm: the caller passes the loss as a function. torch.distributed must
be initialized.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verlite import progress
from verlite.engine import NonFiniteError, checkpoint, export, loading, lora, sharding, ulysses
from verlite.engine.export import Part, Sizes
from verlite.engine.folder import experts_of, load_config
from verlite.engine.micro import (
    MicroBatch,
    MicroBatching,
    ModelInputs,
    dummy_inputs,
    model_inputs,
)
from verlite.engine.model import HeadedModel
from verlite.engine.offload import HostMemory, has_own_memory
from verlite.engine.optim import build_adamw, clip_gradients, learning_rate
from verlite.engine.sharding import checkpoint_layers
from verlite.files import refused_by_disk
from verlite.protocol.data import DataProto
from verlite.spec.roles import FSDPSpec, ModelSpec, OptimSpec
from verlite.weights.fingerprint import combine, fingerprint
from verlite.weights.probe import Probe, probe_ids, probe_length, probe_rows


@dataclass(frozen=True)
class Counts:
    """Totals over all rows of all ranks in one optimizer step.

    tokens: trainable tokens.
    sequences: samples with at least one trainable token.
    """

    tokens: int
    sequences: int


LossFn = Callable[[TensorDict, dict[str, Tensor], Counts], tuple[Tensor, dict[str, Tensor]]]
"""(rows of a micro-batch, the model's outputs [b, R], counts) -> (loss, metrics).

Loss and metrics are sums: added over micro-batches and ranks, they give those of the step. Metrics
whose name ends in _max are combined by their maximum instead.
"""


_UNIT = Counts(1, 1)
"""Counts of rows whose optimizer step is not complete: their losses are sums, not means."""

_FROZEN = "frozen_weights"
"""Key of the frozen weights' fingerprint in a checkpoint. Older checkpoints have one of another
hash under "frozen", which cannot be compared."""


_Move = Callable[[Mapping[Any, Tensor]], dict[Any, Tensor]]


class TrainEngine:
    """A sharded model with its optimizer. All ranks build it and call its methods together.

    Args:
        model: the model to load.
        fsdp: sharding, dtypes and offload.
        optim: the optimizer; None for a frozen model that only runs forward passes.
        head: "lm" for log-probs, "value" for values.
        total_training_steps: needed by learning-rate schedules that end.
        grad_clip: maximum gradient norm.
        max_nonfinite_updates: consecutive dropped updates after which `update` raises.
        device: this rank's device; None chooses cuda if available.
        seed: seed of torch's generator.
        sequence_parallel: number of neighboring ranks that compute their rows together, each a
            slice of every row (see ulysses.py).
    """

    def __init__(
        self,
        model: ModelSpec,
        fsdp: FSDPSpec,
        optim: OptimSpec | None = None,
        *,
        head: str = "lm",
        total_training_steps: int | None = None,
        grad_clip: float = 1.0,
        max_nonfinite_updates: int = 3,
        device: torch.device | str | None = None,
        seed: int = 0,
        sequence_parallel: int = 1,
    ):
        torch.manual_seed(seed)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.sequence_group = ulysses.sp_group(sequence_parallel, model.use_remove_padding)
        self.model_config = model
        self.unproven: str | None = None  # warning of the check of the model's architecture
        self.fsdp_config = fsdp
        self.optim_config = optim
        self.total_training_steps = total_training_steps
        self.grad_clip = grad_clip
        self.max_nonfinite_updates = max_nonfinite_updates
        self.model = self._build_model(head)
        self._require_finite(f"refusing model.path={model.path}")
        self._self_check()
        self.parameters = [parameter for _, parameter in lora.trained(self.model.model)]
        self.optimizer = None if optim is None else build_adamw(self.parameters, optim)
        self._host_parameters = HostMemory(self.device)
        self._host_optimizer = HostMemory(self.device)
        self._frozen_fingerprints: dict[torch.dtype, int] = {}
        self.schedule_step = 0
        self._has_updated = False  # since the last step of the schedule
        self._nonfinite_in_a_row = 0
        # Rows and outputs of each micro-batch of an optimizer step that is not complete.
        self._held: list[tuple[TensorDict, dict[str, Tensor]]] | None = None
        self._tokens_computed = 0  # of that step, as this rank counts them
        self._set_learning_rate()

    def _build_model(self, head: str) -> HeadedModel:
        """Load and shard the model."""
        config = self.model_config
        is_trained = self.optim_config is not None
        storage_dtype = sharding.parse_dtype("model_dtype", self.fsdp_config.model_dtype)
        hf_model, weights = self._read(head, storage_dtype)
        if is_trained and config.enable_gradient_checkpointing:
            is_cuda = self.device.type == "cuda"
            checkpoint_layers(
                hf_model,
                config.enable_gradient_checkpointing,
                offload=config.enable_activation_offload and is_cuda,
            )
        headed = HeadedModel(hf_model, head)
        headed.requires_grad_(False)
        for _, parameter in lora.trained(hf_model):
            parameter.requires_grad_(is_trained)
        dtype = sharding.compute_dtype(self.fsdp_config, self.device, is_trained)
        self.mesh = self._build_mesh()
        sharding.shard(headed, self.mesh, self.fsdp_config, dtype)
        self._fill(hf_model, weights)
        return headed

    def _read(self, head: str, dtype: torch.dtype) -> tuple[PreTrainedModel, loading.Weights]:
        self.model_config, self.unproven = loading.proven(self.model_config, head)
        return loading.read_on_rank_zero(self.model_config, head, dtype)

    def _fill(self, model: PreTrainedModel, weights: loading.Weights) -> None:
        loading.fill(model, weights, self.device)

    def _build_mesh(self) -> DeviceMesh:
        return sharding.build_mesh(self.device, self.fsdp_config.fsdp_size)

    def _self_check(self) -> None:
        register_fsdp_forward_method(self.model, "self_check")
        self.model.eval()
        self.model.self_check(self.device, self.sequence_group, self._shares_prefixes)
        self._reshard()

    @property
    def _shares_prefixes(self) -> bool:
        return self.model_config.use_remove_padding and self.model_config.share_prefixes

    # Passes

    @torch.no_grad()
    def forward(
        self,
        batch: DataProto,
        micro: MicroBatching,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_sum_pi_squared: bool = False,
    ) -> dict[str, Tensor]:
        """Compute log-probs or values without gradients. All ranks must call it, each with its own
        rows (possibly none).

        Returns:
            {"values"}, or {"log_probs"} plus the requested "entropy" and "sum_pi_squared". Each is
            [b, R] float32 on the CPU, in the order of the rows, and 0 where response_mask is 0.
        """
        own = batch.batch
        rows, own_rows = self._gather_rows(own)
        self.model.eval()
        parts = micro.split(rows, self._shares_prefixes)
        out: dict[str, Tensor] = {}
        _, passes = self._sum_and_max([], len(parts))
        for i in range(passes):
            progress.tick(f"micro-batch {i + 1} of {passes}")
            part = parts[i] if i < len(parts) else None
            inputs, _ = self._inputs(rows, part)
            outputs = self.model(inputs, temperature, with_entropy, with_sum_pi_squared)
            if part is None:
                continue
            for name, values in outputs.items():
                zeros = torch.zeros(rows["response_mask"].shape)
                out.setdefault(name, zeros)[part.rows] = inputs.scatter(values).cpu()
        self._reshard()
        names = ["log_probs"]
        if with_entropy:
            names.append("entropy")
        if with_sum_pi_squared:
            names.append("sum_pi_squared")
        if self.model.kind == "value":
            names = ["values"]
        width = own["response_mask"].shape[1]
        zeros = torch.zeros(rows["response_mask"].shape)
        return {name: out.get(name, zeros)[own_rows, :width] for name in names}

    def probe(self, limit: float, max_length: int) -> Probe:
        """Compute the log-prob probe of the present weights. All ranks must call it.

        limit: largest relative gap that the probe allows. max_length: of a sequence of the engine.
        """
        began = time.perf_counter()
        config = self.model.model.config
        length = min(probe_length(*experts_of(config)), max_length - 1)
        ids = probe_ids(config.get_text_config().vocab_size, length)
        log_probs = self.forward(probe_rows(ids), MicroBatching(size=1))["log_probs"][0].tolist()
        return Probe(tuple(ids), tuple(log_probs), limit, time.perf_counter() - began)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Disable LoRA within the context: forward passes are those of the base model, which serves
        as the reference."""
        with lora.disabled(self.model):
            yield

    def accumulate(
        self,
        batch: DataProto,
        micro: MicroBatching,
        temperature: float,
        loss_fn: LossFn,
        with_entropy: bool = False,
    ) -> None:
        """Add the gradients of some rows of an optimizer step whose other rows do not exist yet.
        All ranks must call it, each with its own rows (possibly none).

        It may be called several times. Then `update` takes the step, or `drop_gradients` gives it
        up. Meanwhile parameters stay on the device. The arguments are those of `update`.
        """
        self._held = self._held or []
        self.model.train()
        rows, _ = self._gather_rows(batch.batch)
        parts = micro.split(rows, self._shares_prefixes)
        _, passes = self._sum_and_max([], len(parts))
        for i, part in self._passes(parts, passes):
            progress.tick(f"micro-batch {i + 1} of {passes}")
            self._backward(rows, part, temperature, loss_fn, with_entropy, _UNIT, self._held)

    def drop_gradients(self) -> None:
        """Forget what `accumulate` has added."""
        self._held = None
        self._tokens_computed = 0
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)

    def update(
        self,
        batch: DataProto,
        micro: MicroBatching,
        temperature: float,
        loss_fn: LossFn,
        with_entropy: bool = False,
        dump_dir: Path | None = None,
        unit_factor: Callable[[Counts], float] | None = None,
    ) -> dict[str, float]:
        """Take one optimizer step over all rows of all ranks. All ranks must call it, each with its
        own rows (possibly none).

        If loss or gradient norm is not finite on any rank, parameters and optimizer stay unchanged
        on all ranks, and each rank's rows are saved below `dump_dir`. A step without any trainable
        token changes nothing.

        Args:
            batch: this rank's rows.
            micro: how rows are split into micro-batches.
            temperature: sampling temperature, by which logits are divided.
            loss_fn: the loss; see `LossFn`.
            with_entropy: also give the loss the entropy of each token.
            dump_dir: where to save the rows of a dropped update; None saves nothing.
            unit_factor: what the loss of Counts(1, 1) is multiplied by to be that of these counts.
                After `accumulate`, which must have had the same rows, on any ranks.

        Returns:
            The sums of loss_fn's metrics plus loss, grad_norm (before clipping), lr, nonfinite (1
            if the update was dropped), tokens_trained and tokens_computed (prefixes that rows of a
            micro-batch share count once). Equal on all ranks.

        Raises:
            NonFiniteError: max_nonfinite_updates consecutive updates were dropped.
            RuntimeError: `accumulate` had other rows.
        """
        if self.optimizer is None:
            raise RuntimeError(
                "this engine was built without an optimizer; it can only run forward passes"
            )
        self.model.train()
        own = batch.batch
        rows, _ = self._gather_rows(own)
        held = self._held
        parts = micro.split(rows, self._shares_prefixes) if held is None else []
        (tokens, sequences), passes = self._sum_and_max(
            self._count(own), len(parts if held is None else held)
        )
        counts = Counts(tokens, sequences)
        sums: dict[str, Tensor] = {}
        if held is not None:
            assert unit_factor is not None
            sums = self._complete(held, loss_fn, counts, unit_factor(counts))
        else:
            for i, part in self._passes(parts, passes):
                progress.tick(f"micro-batch {i + 1} of {passes}")
                results = self._backward(rows, part, temperature, loss_fn, with_entropy, counts)
                _add(sums, results)
        sums["tokens_computed"] = torch.tensor(self._tokens_computed, device=self.device)
        metrics = self._sum_metrics(sums) | {"tokens_trained": float(counts.tokens)}
        norm = self._clip()
        is_finite = math.isfinite(norm) and math.isfinite(metrics.get("loss", 0.0))
        lr = self.optimizer.param_groups[0]["lr"]
        if is_finite and passes:
            self.optimizer.step()
            self._has_updated = True
        self.drop_gradients()
        self._handle_nonfinite(is_finite, batch, dump_dir)
        return metrics | {"grad_norm": norm, "lr": lr, "nonfinite": float(not is_finite)}

    def _passes(
        self, parts: list[MicroBatch], passes: int
    ) -> Iterator[tuple[int, MicroBatch | None]]:
        """Yield the number and the rows of each pass; None where only other ranks have rows left.

        Unsharded gradients until the last pass save communication and cost memory, like unsharded
        parameters.
        """
        for i in range(passes):
            needs_sync = self.fsdp_config.reshard_after_forward or i == passes - 1
            self.model.set_requires_gradient_sync(needs_sync)  # type: ignore[operator]
            yield i, parts[i] if i < len(parts) else None

    def _complete(
        self,
        held: list[tuple[TensorDict, dict[str, Tensor]]],
        loss_fn: LossFn,
        counts: Counts,
        factor: float,
    ) -> dict[str, Tensor]:
        """Turn the gradients of `accumulate` into those of the whole step. Return the loss and the
        metrics that this rank counts, of the outputs that the gradients were computed from."""
        is_counted = self.sequence_group is None or self.sequence_group.rank() == 0
        sums: dict[str, Tensor] = {}
        own = [0, 0]
        if is_counted:
            for rows, outputs in held:
                own = [a + b for a, b in zip(own, self._count(rows), strict=True)]
                given = {name: values.to(self.device) for name, values in outputs.items()}
                with torch.no_grad():
                    loss, metrics = loss_fn(rows.to(self.device), given, counts)
                _add(sums, {"loss": loss} | metrics)
        found, _ = self._sum_and_max(own, 0)
        if found != [counts.tokens, counts.sequences]:
            raise RuntimeError(
                f"gradients of {found[0]} tokens in {found[1]} rows were accumulated, but the "
                f"optimizer step has {counts.tokens} in {counts.sequences}"
            )
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        return sums

    def _backward(
        self,
        rows: TensorDict,
        part: MicroBatch | None,
        temperature: float,
        loss_fn: LossFn,
        with_entropy: bool,
        counts: Counts,
        held: list[tuple[TensorDict, dict[str, Tensor]]] | None = None,
    ) -> dict[str, Tensor]:
        """Run forward and backward passes of one micro-batch; return loss and metrics that this
        rank counts.

        held: list to which rows and outputs are added.
        """
        inputs, micro_rows = self._inputs(rows, part)
        outputs = self.model(inputs, temperature, with_entropy)
        if micro_rows is None:  # only takes part in the other ranks' collectives
            total = sum(values.sum() for values in outputs.values())
            total.mul(0).backward()
            return {}
        scattered = {name: inputs.scatter(values) for name, values in outputs.items()}
        loss, metrics = loss_fn(micro_rows, scattered, counts)
        # FSDP averages gradients over ranks, but the loss is a sum over ranks.
        (loss * self.world_size).backward()
        if held is not None:
            kept = {name: values.detach().cpu() for name, values in scattered.items()}
            held.append((micro_rows.cpu(), kept))
        if self.sequence_group is not None and self.sequence_group.rank() > 0:
            return {}  # the group's first rank counts the rows that the group shares
        self._tokens_computed += inputs.tokens
        return {name: value.detach() for name, value in ({"loss": loss} | metrics).items()}

    def _count(self, rows: TensorDict) -> list[int]:
        """Return the trainable tokens, and the samples that have one."""
        mask = rows["response_mask"]
        return [int(mask.sum()), int(rows.get("first_branch", mask.any(-1)).sum())]

    def _clip(self) -> float:
        """Clip the gradients; return their norm before."""
        return float(clip_gradients(self.parameters, self.grad_clip))

    def _inputs(
        self, rows: TensorDict, part: MicroBatch | None
    ) -> tuple[ModelInputs, TensorDict | None]:
        """Return the model's inputs and the rows of a micro-batch; a dummy pass and None if there
        is no micro-batch."""
        is_packed = self.model_config.use_remove_padding
        if part is None:
            return dummy_inputs(is_packed).rank_slice(self.sequence_group).to(self.device)
        micro_rows = rows[part.rows]
        inputs = model_inputs(micro_rows, is_packed, part.share_prefixes)
        return inputs.rank_slice(self.sequence_group).to(self.device, micro_rows)

    def _gather_rows(self, rows: TensorDict) -> tuple[TensorDict, slice]:
        """Return the rows that this rank computes (with sequence parallelism its group's) and the
        slice of its own rows."""
        if self.sequence_group is None:
            return rows, slice(None)
        return ulysses.all_gather_rows(rows, self.sequence_group)

    def _handle_nonfinite(self, is_finite: bool, batch: DataProto, dump_dir: Path | None) -> None:
        """Count consecutive dropped updates, save the batch, and raise NonFiniteError if there are
        too many."""
        if is_finite:
            self._nonfinite_in_a_row = 0
            return
        self._nonfinite_in_a_row += 1
        saved = "its batch was not saved"
        if dump_dir is not None:
            folder = Path(dump_dir) / f"rank_{self.rank}"
            saved = f"its batch is in {folder.parent}"
            try:
                batch.save_to_disk(folder)
            except (OSError, SafetensorError) as error:
                saved = f"its batch was not saved: {error}"
        if self._nonfinite_in_a_row >= self.max_nonfinite_updates:
            raise NonFiniteError(
                f"{self._nonfinite_in_a_row} updates in a row had a loss or gradient that is not "
                f"finite and were dropped (training step {self.schedule_step + 1} of this model; "
                f"{saved}). Inspect the batch, lower optim.lr, or raise max_nonfinite_updates"
            )

    def _sum_and_max(self, numbers: list[int], largest: int) -> tuple[list[int], int]:
        """Return the sums of `numbers` and the maximum of `largest` over all ranks."""
        if self.world_size == 1:
            return numbers, largest
        table = torch.zeros(
            self.world_size, len(numbers) + 1, dtype=torch.int64, device=self.device
        )
        table[self.rank] = torch.tensor([*numbers, largest])
        dist.all_reduce(table)
        return table[:, :-1].sum(0).tolist(), int(table[:, -1].max())

    def _sum_metrics(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Combine metrics over ranks. Ranks without rows have none, so names may differ between
        ranks."""
        values = torch.stack([v.double() for v in sums.values()]).tolist() if sums else []
        own = dict(zip(sums, values, strict=True))
        by_rank: list[Any] = [own]
        if self.world_size > 1:
            by_rank = [None] * self.world_size
            dist.all_gather_object(by_rank, own)
        combined = {}
        for name in dict.fromkeys(name for metrics in by_rank for name in metrics):
            found = [metrics[name] for metrics in by_rank if name in metrics]
            combined[name] = max(found) if name.endswith("_max") else math.fsum(found)
        return combined

    def _reshard(self) -> None:
        """Free parameters that forward passes left gathered. Otherwise stale copies would survive a
        load."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    # Schedule

    def step_schedule(self) -> float:
        """Set the next learning rate and return it. To be called once per training step, after its
        updates.

        The schedule counts training steps with at least one applied update.
        """
        if self._has_updated:
            self.schedule_step += 1
            self._has_updated = False
            self._set_learning_rate()
        if self.optimizer is None:
            return 0.0
        return float(self.optimizer.param_groups[0]["lr"])

    def _set_learning_rate(self) -> None:
        if self.optimizer is not None and self.optim_config is not None:
            self.optimizer.param_groups[0]["lr"] = learning_rate(
                self.optim_config, self.schedule_step, self.total_training_steps
            )

    # Export, checkpoints

    def export(
        self,
        dtype: torch.dtype | None = None,
        snapshot: bool = True,
        target: torch.device | None = export.CPU,
        part: Part = "merged",
    ) -> Iterator[tuple[str, Tensor]]:
        """Iterate over (Hugging Face name, whole tensor) of each weight; tied weights once.

        All ranks must iterate to the end. One layer is in memory at a time. Works while parameters
        are offloaded.

        Args:
            dtype: dtype of the yielded tensors; None keeps the model's.
            snapshot: False allows yielding the model's own tensors, for callers that copy each
                tensor at once.
            target: where the yielded tensors are: the CPU or this rank's device. None: this rank
                only helps to gather; it yields nothing.
            part: what to export of a model with LoRA.
        """
        return export.full_weights(self.model.model, dtype, self.device, snapshot, target, part)

    def save_pretrained(
        self,
        folder: Path | str,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write a Hugging Face folder: rank 0 writes, all ranks must call it.

        A value model is written as a token classification model. With LoRA the weights are merged,
        and for a policy lora_adapter/ contains the adapter in peft's format.

        Raises:
            OSError: rank 0 cannot write. The other ranks return.
        """
        folder = Path(folder)
        is_writer = self.rank == 0
        hf_model = self.model.model
        config = load_config(self.model_config)
        if self.model.kind == "value":
            config.num_labels = 1
        target = export.CPU if is_writer else None
        weights = self.export(dtype, target=target)
        failure: Exception | None = None
        try:
            export.save_pretrained(folder, weights, hf_model, config, tokenizer, write=is_writer)
        except Exception as error:  # raised at the end: the other ranks wait for this one
            failure = error
        if self.model.kind == "lm" and lora.layers(self.model):
            base = self.model_config.path
            writes = is_writer and failure is None
            try:
                lora.save(folder / lora.FOLDER, hf_model, base, self.device, write=writes)
            except Exception as error:
                failure = error
        dist.barrier()
        if failure is not None and refused_by_disk(failure):
            raise OSError(f"cannot write {folder}: {failure}") from failure
        if failure is not None:
            raise failure

    def sizes(self) -> Sizes:
        """Return the elements of all weights, of the largest layer and of the largest weight."""
        return export.sizes(self.model.model)

    def fingerprint(self, dtype: torch.dtype | None = None, part: Part = "merged") -> int:
        """Return weights.fingerprint.fingerprint of the weights in `dtype`, equal to that of what
        export(dtype, part=part) yields.

        All ranks must call it. Each rank hashes its own shards; nothing is gathered.
        """
        named = export.named_weights(self.model.model, dtype, self.device, part)
        return self._fingerprint(named, dtype)

    def own_fingerprint(self, dtype: torch.dtype) -> int:
        """Return the fingerprint in `dtype` of everything that passes compute with: frozen
        weights, adapters and buffers as they are stored, with nothing merged.

        All ranks must call it. What training does not change is hashed once.
        """
        if dtype not in self._frozen_fingerprints:
            buffers = checkpoint.persistent_buffers(self.model.model)
            frozen = [*lora.frozen(self.model.model), *buffers]
            self._frozen_fingerprints[dtype] = self._fingerprint(frozen, dtype)
        trained = self._fingerprint(lora.trained(self.model.model), dtype)
        return combine(self._frozen_fingerprints[dtype], trained)

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Replace what training changes by another engine's weights (see loading.refill). Each rank
        reads `named` and keeps its part; nothing is sent.

        Raises:
            ValueError: a weight is unknown, has another shape, or is missing.
        """
        loading.refill(self.model.model, named)

    def _fingerprint(self, named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> int:
        replica = self.mesh.get_local_rank(0) if self.mesh.ndim == 2 else 0

        def counted() -> Iterator[tuple[str, Tensor]]:
            """The local part of each weight of which this rank has the first copy."""
            for name, tensor in named:
                copy = replica if isinstance(tensor, DTensor) else self.rank
                if copy == 0:
                    yield name, checkpoint.local_part(tensor)

        sums, _ = self._sum_and_max([fingerprint(counted(), dtype)], 0)
        return combine(*sums)

    def save(self, folder: Path | str) -> None:
        """Write parameters, optimizer, schedule and random generators (see checkpoint.py). All
        ranks must call it.

        Raises:
            NonFiniteError: a weight is NaN or infinite. Nothing is written.
            OSError: a rank cannot write.
        """
        self._require_finite("refusing to save")
        self.drop_gradients()  # of a step that was given up
        schedule = {
            "step": self.schedule_step,
            "updated": self._has_updated,
            "nonfinite_in_a_row": self._nonfinite_in_a_row,
            _FROZEN: self._fingerprint(lora.frozen(self.model.model), None),
        }
        checkpoint.save(Path(folder), self.model.model, self.optimizer, schedule)

    def load(self, folder: Path | str, files: Collection[str] | None = None) -> None:
        """Continue from what `save` wrote with any number of ranks; exactly, if the number is the
        same. All ranks must call it.

        After an error the engine must not be used.

        Args:
            folder: where `save` wrote.
            files: names of the files that may be read, relative to `folder`. None: all.

        Raises:
            ValueError: the folder is incomplete or belongs to another model.
            NonFiniteError: its weights are not finite.
        """
        schedule = checkpoint.load(Path(folder), self.model.model, self.optimizer, files)
        self._require_finite(f"refusing the checkpoint {folder}")
        frozen = schedule.get(_FROZEN)
        if frozen not in (None, self._fingerprint(lora.frozen(self.model.model), None)):
            raise ValueError(
                f"the checkpoint {folder} has adapters of another base model than "
                f"model.path={self.model_config.path}"
            )
        self.schedule_step = schedule["step"]
        self._has_updated = schedule["updated"]
        self._nonfinite_in_a_row = schedule["nonfinite_in_a_row"]
        self._set_learning_rate()

    def _require_finite(self, action: str) -> None:
        names = checkpoint.nonfinite(self.model.model)
        if names:
            raise NonFiniteError(
                f"{action}: {len(names)} weights are NaN or infinite, the first is {names[0]}"
            )

    # Memory

    def onload(self, parameters: bool = True, optimizer: bool = False) -> None:
        """Move parameters and/or optimizer state to the device, if they are not there already."""
        if parameters and self._host_parameters.is_holding:
            self._replace_parameters(self._host_parameters.onload)
        if optimizer and self._host_optimizer.is_holding:
            self._replace_optimizer_state(self._host_optimizer.onload)

    def offload(self) -> None:
        """Move what fsdp_config.param_offload and optimizer_offload select to page-locked host
        memory, and free it on the device. On a CPU it does nothing, and not between `accumulate`
        and `update`, because gradients are where their parameters are.

        Passes leave no gathered parameters or gradients, so nothing else of the model but its
        buffers is on the device then.
        """
        if not has_own_memory(self.device) or self._held is not None:
            return
        if self.fsdp_config.param_offload and not self._host_parameters.is_holding:
            self._replace_parameters(self._host_parameters.offload)
        if self.fsdp_config.optimizer_offload and not self._host_optimizer.is_holding:
            self._replace_optimizer_state(self._host_optimizer.offload)
        if self.device.type == "cuda":
            # Unmapping a segment waits for the stream that allocated it, and no other. FSDP's
            # gradients are allocated by one stream and read by another.
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def _replace_parameters(self, move: _Move) -> None:
        moved = move({id(p): p for p in self.model.parameters()})
        # What Module.to calls. FSDP's version makes its groups use the new shards.
        self.model._apply(lambda tensor: moved.get(id(tensor), tensor))

    def _replace_optimizer_state(self, move: _Move) -> None:
        states = self.optimizer.state.values() if self.optimizer else ()
        moved = move({(i, name): t for i, s in enumerate(states) for name, t in s.items()})
        for i, state in enumerate(states):
            for name in state:
                state[name] = moved[i, name]


def _add(sums: dict[str, Tensor], results: Mapping[str, Tensor]) -> None:
    """Add a micro-batch's metrics to those of others."""
    for name, value in results.items():
        sums[name] = _combine(name, sums[name], value) if name in sums else value


def _combine(name: str, a: Tensor, b: Tensor) -> Tensor:
    """Combine a metric of two micro-batches; see LossFn."""
    return torch.maximum(a, b) if name.endswith("_max") else a + b
