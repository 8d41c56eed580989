"""The policy in training: log-probs, advantages, updates, and the weights that others read."""

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict

from verlite.algorithms.aggregation import token_weights
from verlite.algorithms.distillation import distillation_loss
from verlite.algorithms.gap import gap_metrics, gap_sums
from verlite.algorithms.kl import kl_loss
from verlite.algorithms.losses import PolicyLossInputs, entropy_sum, policy_loss
from verlite.controller.dispatch import register
from verlite.engine.folder import load_tokenizer
from verlite.protocol.data import DataProto
from verlite.protocol.metrics import Metrics
from verlite.protocol.ragged import ragged
from verlite.spec.catalog import BYPASS_LOSS, ESTIMATORS, LOSSES, resolve
from verlite.spec.roles import ActorSpec, PolicyLossSpec
from verlite.spec.weight_routes import WeightRoutes
from verlite.weights.buckets import TRAINED
from verlite.weights.collective import WeightSender
from verlite.weights.files import FolderWriter
from verlite.weights.fingerprint import combine
from verlite.weights.ipc import TRIAL_S, Publisher, publish_trial
from verlite.weights.probe import Probe
from verlite.weights.shared_memory import MemoryFiles
from verlite.weights.transport import Export, Offer, Sink, cleanup_after_failure, publish
from verlite.workers.advantage import (
    apply_rollout_correction,
    estimate_advantages,
    select_loss_tokens,
)
from verlite.workers.log_probs import LogProbWorker
from verlite.workers.training import StepRows, credited, micro_batching, trained_rows

if TYPE_CHECKING:
    from verlite.engine.export import Part
    from verlite.engine.fsdp import Counts, LossFn

UNPLANNED = 0.05
"""Share of a GPU's memory that auto wants free beside what a sync by ipc needs."""


# Which parts of a policy with LoRA the next weight sync carries


class SyncedParts:
    """What a weight sync carries.

    With rollout.lora_sync=merged it is always the merged weights. With adapter the first sync
    carries the base model and the adapters, and later ones the adapters alone. After a sync that
    did not succeed the base model is sent again, because an engine may have loaded only a part of
    it.

    Args:
        separate: rollout.lora_sync=adapter.

    Attributes:
        parts: of the sync under way, in the order in which they are sent.
    """

    def __init__(self, separate: bool) -> None:
        self.parts: tuple[Part, ...] = ("merged",)
        self._separate = separate
        self._engines_have_base = False
        self._base_fingerprint: int | None = None

    def start(self) -> None:
        """Choose the parts of the next sync."""
        if self._separate:
            self.parts = ("adapters",) if self._engines_have_base else ("adapters", "base")
        self._engines_have_base = False

    def forget(self) -> None:
        """Take note that an engine was restarted, so it lacks the base model."""
        self._engines_have_base = False

    def succeeded(self) -> None:
        """Take note that all engines have the version."""
        self._engines_have_base = True

    def fingerprint(self, measure: "Callable[[Part], int]") -> int:
        """Return the fingerprint of all weights that the engines will have.

        The base model is frozen, so it is measured once.

        Args:
            measure: returns the fingerprint of a part.
        """
        if not self._separate:
            return measure("merged")
        if self._base_fingerprint is None:
            self._base_fingerprint = measure("base")
        return combine(self._base_fingerprint, measure("adapters"))


class ActorWorker(LogProbWorker):
    """One rank of the policy.

    all_rows: all rows of the current training step, on the rank that estimates advantages.
    """

    spec: ActorSpec

    def __init__(self, spec: ActorSpec) -> None:
        # The driver has found the user's own functions on its machine. Another may lack them.
        self._objective = policy_objective(spec.loss)
        resolve(spec.advantage.adv_estimator, ESTIMATORS, "algorithm.adv_estimator")
        super().__init__(spec)
        self.all_rows = StepRows()
        self._sync = SyncedParts(spec.publish.syncs_adapters)
        self._memory_files: MemoryFiles | None = None
        self._publisher: Publisher | None = None
        self._sender: WeightSender | None = None

    @register("split", keep_remote=("loss_mask", "rollout_is_weights"), fetch=False)
    def rollout_correction(self, batch: DataProto) -> DataProto:
        """Apply rollout correction to all rows of the step, on one rank."""
        if not len(batch):
            return DataProto()
        return apply_rollout_correction(self.all_rows.padded(batch).batch, self.spec.correction)

    @register("split", keep_remote=("advantages", "returns"), fetch=False)
    def advantages(self, batch: DataProto, kl_coefficient: float) -> DataProto:
        """Estimate advantages from all tokens of the step, on one rank.

        Returns:
            rewards [B]; ragged advantages and returns, 0 outside loss_mask;
            meta_info["stage_metrics"].
        """
        if not len(batch):
            return DataProto()
        t = self.all_rows.padded(batch).batch
        uid = batch.non_tensor_batch["uid"]
        result, metrics = estimate_advantages(self.spec.advantage, t, uid, kl_coefficient)
        columns = {
            name: ragged(result.batch[name] * t["loss_mask"], t["response_length"])
            for name in ("advantages", "returns")
        }
        rewards = {"rewards": result.batch["rewards"]}
        return DataProto.from_dict(rewards, columns, {"stage_metrics": metrics})

    @register("split", keep_remote=("selected_tokens",), fetch=False)
    def select_tokens(self, batch: DataProto, seed: int) -> DataProto:
        """Select the step's tokens for the loss clip_cov or kl_cov, on one rank."""
        if not len(batch):
            return DataProto()
        t = credited(self.all_rows.padded(batch)).batch
        tokens = select_loss_tokens(t, self.spec.loss.loss_mode, self.spec.token_selection, seed)
        return DataProto.from_dict({}, {"selected_tokens": ragged(tokens, t["response_length"])})

    @register("all")
    def drop_gradients(self) -> None:
        """Forget what `accumulate` has added."""
        self.engine.drop_gradients()

    @register("split", fetch=False)
    def accumulate(self, batch: DataProto) -> None:
        """Add the gradients of some rows of the step's first optimizer step, while the other rows
        are sampled. `update` then takes it."""
        self.engine.onload()
        self.engine.accumulate(
            trained_rows(StepRows().padded(batch)),
            micro_batching(self.spec.updates.micro),
            self.spec.temperature,
            self._objective,
            with_entropy=self._needs_entropy(batch),
        )

    @register("split", fetch=False)
    def update(self, batch: DataProto) -> Metrics:
        """Do the step's policy updates; return verl's actor/ metrics, equal on every rank."""
        self.all_rows.clear()
        loss = self.spec.loss
        metrics = self.update_in_mini_batches(
            "actor",
            self.rank_rows.padded(batch),
            self.spec.updates,
            self._objective,
            with_entropy=self._needs_entropy(batch),
            unit_factor=functools.partial(unit_factor, loss),
        )
        sums = {key: metrics.pop(key) for key in list(metrics) if key.startswith("gap/")}
        metrics |= gap_metrics(sums)
        if loss.use_kl_loss:
            metrics["actor/kl_coef"] = loss.kl_loss_coef
        return metrics

    def _needs_entropy(self, batch: DataProto) -> bool:
        """Return whether an update measures the entropy, or has it in its loss."""
        is_measured = "entropy_sums" in batch.batch.keys()
        return self.spec.calculate_entropy or self.spec.loss.entropy_coeff != 0 or not is_measured

    @register("all")
    def describe(self, dtypes: Sequence[str]) -> tuple[str, int, Probe]:
        """Describe the present weights, to compare them with those of another process.

        dtypes: names, finest first.

        Returns:
            (the first of them that is not finer than the weights are held, the fingerprint of the
            weights in it, the log-prob probe). The name is "" if there is none.
        """
        held = self.spec.engine.fsdp.model_dtype
        name = next((one for one in dtypes if held in ("float32", one)), "")
        self.engine.onload()
        fingerprint = self.engine.fingerprint(getattr(torch, name)) if name else 0
        probe = self.engine.probe(float("inf"), self.spec.publish.max_model_len)
        self.engine.offload()
        return name, fingerprint, probe

    @register("all")
    def engine_restarted(self) -> None:
        """Before the next sync: a new engine needs the base model too, and the process group of the
        transport `collective` has lost a member."""
        self._sync.forget()
        if self._sender is not None:
            self._sender.abort("a rollout engine was started again")

    @register("all")
    def open_trial(self, routes: WeightRoutes) -> str:
        """Return the address from which an engine reads this rank's trial of the transport ipc; ""
        if none does.

        routes: by which engines would get their weights.
        """
        if self.rank not in routes.publishers.values():
            return ""
        self._publisher = Publisher(self.device, TRIAL_S)
        return self._publisher.address

    @register("all")
    def publish_trial(self) -> str:
        """Publish the trial's tensors. Return why that failed; "" if the engine read them."""
        publisher, self._publisher = self._publisher, None
        return publish_trial(publisher) if publisher is not None else ""

    @register("all")
    def offer_weights(self, version: int, probe_limit: float | None, routes: WeightRoutes) -> Offer:
        """Prepare to publish `version`: bring the weights to the device and hash them. Adapters
        alone are hashed and gathered from where they are.

        Args:
            version: of the weights.
            probe_limit: largest relative gap of the log-prob probe; None: no probe.
            routes: by which readers get the weights. A fallback has the same receivers.
        """
        self._sync.start()
        if self._sync.parts != ("adapters",) or probe_limit is not None:
            self.engine.onload()
        fingerprint = self._sync.fingerprint(
            lambda part: self.engine.fingerprint(self._rollout_dtype, part)
        )
        publishes = self.rank in routes.publishers.values()
        lack = self._lack_of_memory() if publishes and routes.fallback is not None else ""
        self._publisher = Publisher(self.device) if publishes and not lack else None
        if self.rank == 0 and routes.receivers and self._sender is None:
            self._sender = WeightSender(self._spec.address, len(routes.receivers), self.device)
        return Offer(
            version,
            routes,
            fingerprint,
            lack=lack,
            own_fingerprint=self._own_fingerprint(fingerprint),
            rendezvous=self._sender.offer() if self._sender else None,
            stream=self._publisher.address if self._publisher else None,
            probe=None
            if probe_limit is None
            else self.engine.probe(probe_limit, self.spec.publish.max_model_len),
        )

    def _lack_of_memory(self) -> str:
        """Return why the device has too little memory for a sync by ipc; "" if it has enough."""
        if self.device.type != "cuda":
            return ""
        spec = self.spec.publish
        sizes, sent = self.engine.sizes(), getattr(torch, spec.sync_dtype).itemsize
        bucket = max(spec.sync_bucket_mb << 20, sizes.tensor * sent)
        # The actor fills two buckets from one that it has gathered and the next layer; the engine
        # may copy a layer before it loads it.
        needed = int(spec.engine_share * sizes.all * self._rollout_dtype.itemsize)
        needed += 3 * min(bucket, sizes.all * sent) + 2 * sizes.layer * sent
        free, total = torch.cuda.mem_get_info(self.device)
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        needed += int(UNPLANNED * total)
        if needed <= free:
            return ""
        return (
            f"The GPU of actor rank {self.rank} has {free / 2**30:.1f} GiB free, and ipc needs "
            f"{needed / 2**30:.1f} GiB"
        )

    def _own_fingerprint(self, engines: int) -> int | None:
        """Return the fingerprint that `inference` must have; None without that role.

        engines: fingerprint of the weights for the rollout engines.
        """
        if not self.spec.publish.has_inference:
            return None
        trained = self.spec.publish.train_dtype
        if trained == self.spec.publish.rollout_dtype and not self._has_adapters:
            return engines
        return self.engine.own_fingerprint(getattr(torch, trained))

    @register("all")
    def publish_weights(self, offer: Offer) -> Export:
        """Publish the weights through the transports that readers use, and free device memory.

        With rollout.lora_sync=adapter, the base model is published only until a sync succeeds. With
        LoRA and the role `inference` the adapters are published for it too.

        All ranks take part in gathering the weights. Device memory is freed also if a reader dies
        meanwhile: its successor needs it.

        Returns:
            The memory files that this rank wrote for its node, if any, and the bytes it published.
        """
        sinks = self._sinks(offer)
        target = None
        if sinks:
            target = torch.device("cpu") if self.device.type == "cpu" else self.device
        spec = self.spec.publish
        dtype = getattr(torch, spec.sync_dtype)
        parts = [
            self.engine.export(dtype, snapshot=False, target=target, part=part)
            for part in self._sync.parts
        ]
        if spec.has_inference and self._has_adapters:
            trained = self.engine.export(dtype, snapshot=False, target=target, part="trained")
            parts.append((TRAINED + name, tensor) for name, tensor in trained)
        weights = itertools.chain.from_iterable(parts)
        # Gathering is collective, so ranks without a sink iterate too.
        bucket_bytes = offer.routes.bucket_bytes(self.device.type, spec.sync_bucket_mb)
        try:
            size = publish(weights, sinks, bucket_bytes)
        except BaseException:
            with cleanup_after_failure("device memory could not be freed"):
                self.engine.offload()
            raise
        self.engine.offload()
        paths = self._memory_files.paths if self._memory_files else []
        return Export(spec.nodes[self.rank], tuple(paths), size)

    def _sinks(self, offer: Offer) -> list[Sink]:
        """Return what this rank publishes to."""
        sinks: list[Sink] = []
        if self.rank in offer.routes.writers:
            self._memory_files = MemoryFiles()
            sinks.append(self._memory_files)
        if self._publisher is not None and self.rank in offer.routes.publishers.values():
            sinks.append(self._publisher)
        if self._sender is not None:
            sinks.append(self._sender)
        if self.rank == 0 and offer.routes.uses("files"):
            folder = Path(self.spec.run_dir, "weights")
            sinks.append(FolderWriter(folder, offer.version, offer.fingerprint))
        return sinks

    @property
    def _has_adapters(self) -> bool:
        return self.spec.engine.model.trains_adapters

    @property
    def _rollout_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.spec.publish.rollout_dtype)
        return dtype

    @register("all")
    def release_weights(self) -> None:
        """Free what readers have read. Called after all of them have the version."""
        self._sync.succeeded()
        if self._memory_files is not None:
            self._memory_files.close()
            self._memory_files = None
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def save_parts(self, folder: str) -> None:
        """Write the shards and, with hf_model in actor.checkpoint.save_contents, huggingface/."""
        super().save_parts(folder)
        if self.spec.saves_hf:
            tokenizer = load_tokenizer(self.spec.engine.model)
            self.engine.save_pretrained(Path(folder, "huggingface"), tokenizer)

    @register("all")
    def export_hf(self, folder: str) -> str | None:
        """Write the policy and its tokenizer as a Hugging Face folder. Return an I/O error, None if
        it worked."""
        self.engine.onload()
        try:
            self.engine.save_pretrained(folder, load_tokenizer(self.spec.engine.model))
        except OSError as error:
            return str(error)
        finally:
            self.engine.offload()
        return None


def unit_factor(spec: PolicyLossSpec, counts: "Counts") -> float:
    """Return what the objective of Counts(1, 1) is multiplied by to be that of `counts`: it is
    linear in the weights of its tokens."""

    def weight(tokens: int, sequences: int) -> float:
        token = torch.ones(1, 1)
        return token_weights(
            token, spec.loss_agg_mode, tokens=tokens, sequences=sequences, scale=spec.loss_scale
        ).item()

    return weight(counts.tokens, counts.sequences) / weight(1, 1)


def policy_objective(spec: PolicyLossSpec) -> "LossFn":
    """Return the actor's loss: pg_loss - entropy_coeff * entropy + kl_loss_coef * KL.

    The distillation term of a teacher is added to pg_loss, or takes its place.

    Each term is aggregated by loss_agg_mode over the whole optimizer step: `counts` has the tokens
    and sequences of all micro-batches on all ranks, so the losses of micro-batches add up to it.

    Raises:
        ValueError: the policy loss cannot be imported here.
    """
    function = resolve(spec.loss_mode, LOSSES, "actor_rollout_ref.actor.policy_loss.loss_mode")

    def objective(
        rows: TensorDict, outputs: dict[str, torch.Tensor], counts: "Counts"
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        log_probs = outputs["log_probs"]
        mask = rows["response_mask"]  # holds loss_mask, see update_in_mini_batches
        weights = token_weights(
            mask,
            spec.loss_agg_mode,
            tokens=counts.tokens,
            sequences=counts.sequences,
            scale=spec.loss_scale,
            row_tokens=rows.get("trained_tokens"),
        )
        old = rows.get("old_log_probs", log_probs.detach())
        inputs = PolicyLossInputs(
            log_prob=log_probs,
            old_log_prob=old,
            advantages=rows["advantages"],
            response_mask=mask,
            weights=weights,
            tokens=counts.tokens,
            clip_low=spec.clip_low,
            clip_high=spec.clip_high,
            clip_c=spec.clip_c,
            loss_agg_mode=spec.loss_agg_mode,
            rollout_is_weights=rows.get("rollout_is_weights"),
            extra={**spec.extra} | {"selected": rows.get("selected_tokens")},
        )
        loss, metrics = policy_loss(function, inputs)
        metrics["actor/pg_loss"] = loss.detach()
        if spec.distillation is not None:
            teacher = rows["teacher_log_prob"]
            distilled, found = distillation_loss(spec.distillation, inputs, teacher, function)
            metrics |= found
            if spec.distillation.use_task_rewards:
                loss = loss + spec.distillation.distillation_loss_coef * distilled
            else:
                loss = distilled
        if "old_log_probs" not in rows.keys() or spec.loss_mode == BYPASS_LOSS:
            # No earlier pass measured the gap. With one update these are the old log-probs.
            metrics |= gap_sums(log_probs, rows["rollout_log_probs"], mask)
        if "entropy" in outputs:
            metrics["actor/entropy"] = inputs.token_mean(outputs["entropy"].detach())
            if spec.entropy_coeff:
                loss = loss - spec.entropy_coeff * entropy_sum(outputs["entropy"], mask, weights)
        if spec.use_kl_loss:
            if spec.kl_loss_importance_weighted:
                ratio = torch.where(inputs.mask, inputs.log_ratio.detach(), 0).exp()
                weights = weights * ratio
            kl = kl_loss(log_probs, rows["ref_log_prob"], mask, weights, spec.kl_loss_type)
            metrics["actor/kl_loss"] = kl.detach()
            loss = loss + spec.kl_loss_coef * kl
        return loss, metrics

    return objective
