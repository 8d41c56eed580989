"""The policy in training: log-probs, advantages, updates, and weights for the rollout engine."""

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict

from verlite.algorithms.aggregation import token_weights
from verlite.algorithms.gap import gap_metrics, gap_rows, gap_sums
from verlite.algorithms.kl import kl_loss
from verlite.algorithms.losses import PolicyLossInputs, entropy_sum, policy_loss
from verlite.config.catalog import BYPASS_LOSS
from verlite.config.plan import Plan
from verlite.config.schema import Config
from verlite.controller.dispatch import register
from verlite.engine.folder import load_tokenizer
from verlite.protocol.data import DataProto
from verlite.protocol.metrics import Metrics
from verlite.protocol.ragged import ragged
from verlite.weights.collective import Sender
from verlite.weights.cuda_ipc import Publisher
from verlite.weights.files import FolderWriter
from verlite.weights.shared_memory import MemoryFiles
from verlite.weights.transport import Export, Offer, Sink, publish
from verlite.workers.adapters import SyncedParts
from verlite.workers.advantage import (
    apply_rollout_correction,
    estimate_advantages,
    select_loss_tokens,
)
from verlite.workers.rows import StepRows
from verlite.workers.training import TrainingWorker, micro_batching

if TYPE_CHECKING:
    from verlite.engine.fsdp import Counts, LossFn


class ActorWorker(TrainingWorker):
    """One rank of the policy.

    all_rows: all rows of the current training step, on the rank that estimates advantages.
    """

    def __init__(self, config: Config, plan: Plan, total_steps: int) -> None:
        # Imported here: these libraries take seconds, and the driver only names this class.
        from verlite.engine.fsdp import TrainEngine

        super().__init__(config, plan, total_steps)
        policy = config.actor_rollout_ref
        self.all_rows = StepRows()
        self.engine = TrainEngine(
            policy.model,
            policy.actor.fsdp_config,
            policy.actor.optim,
            head="lm",
            total_training_steps=total_steps,
            grad_clip=policy.actor.grad_clip,
            max_nonfinite_updates=policy.actor.max_nonfinite_updates,
            device=self.device,
            seed=config.data.seed,
            sequence_parallel=plan.sequence_parallel["actor"],
        )
        self.engine.offload()
        self._sync = SyncedParts(plan.syncs_adapters)
        self._memory_files: MemoryFiles | None = None
        self._publisher: Publisher | None = None
        self._sender: Sender | None = None
        if self.rank == 0 and plan.weights.receivers:
            receivers = len(plan.weights.receivers)
            self._sender = Sender(self._spec.address, receivers, self.device)

    @register("split", keep_remote=("old_log_probs", "sum_pi_squared"), fetch=False)
    def log_probs(self, batch: DataProto) -> DataProto:
        """Compute log-probs of the responses under the current policy.

        Returns:
            Ragged old_log_probs and, if the plan needs it, sum_pi_squared; entropy_sums [b], and
            gap_sums [b, G] between these log-probs and those of the rollout engine.
        """
        rows = self.rank_rows.padded(batch)
        self.engine.onload()
        out = self.engine.forward(
            rows,
            micro_batching(self.plan.log_prob_micro),
            self.config.actor_rollout_ref.rollout.temperature,
            with_entropy=True,
            with_sum_pi_squared=self.plan.needs_sum_pi_squared,
        )
        self.engine.offload()
        t = rows.batch
        sums = {
            "entropy_sums": out["entropy"].double().sum(1),
            "gap_sums": gap_rows(out["log_probs"], t["rollout_log_probs"], t["response_mask"]),
        }
        columns = {"old_log_probs": ragged(out["log_probs"], t["response_length"])}
        if self.plan.needs_sum_pi_squared:
            columns["sum_pi_squared"] = ragged(out["sum_pi_squared"], t["response_length"])
        return DataProto.from_dict(sums, columns)

    @register("split", keep_remote=("ref_log_prob",), fetch=False)
    def reference_log_probs(self, batch: DataProto) -> DataProto:
        """Return ragged ref_log_prob of the responses under the policy without its adapters."""
        rows = self.rank_rows.padded(batch)
        temperature = self.config.actor_rollout_ref.rollout.temperature
        self.engine.onload()
        with self.engine.without_adapters():
            out = self.engine.forward(rows, micro_batching(self.plan.ref_micro), temperature)
        self.engine.offload()
        log_probs = ragged(out["log_probs"], rows.batch["response_length"])
        return DataProto.from_dict({}, {"ref_log_prob": log_probs})

    @register("split", keep_remote=("loss_mask", "rollout_is_weights"), fetch=False)
    def rollout_correction(self, batch: DataProto) -> DataProto:
        """Apply rollout correction to all rows of the step, on one rank."""
        if not len(batch):
            return DataProto()
        return apply_rollout_correction(self.all_rows.padded(batch).batch, self.plan.correction)

    @register("split", keep_remote=("advantages", "returns"), fetch=False)
    def advantages(self, batch: DataProto, kl_coefficient: float) -> DataProto:
        """Estimate advantages from all tokens of the step, on one rank.

        Returns:
            rewards [B]; ragged advantages and returns, 0 outside loss_mask; meta_info["metrics"].
        """
        if not len(batch):
            return DataProto()
        t = self.all_rows.padded(batch).batch
        uid = batch.non_tensor_batch["uid"]
        result, metrics = estimate_advantages(self.config, t, uid, kl_coefficient)
        columns = {
            name: ragged(result.batch[name] * t["loss_mask"], t["response_length"])
            for name in ("advantages", "returns")
        }
        rewards = {"rewards": result.batch["rewards"]}
        return DataProto.from_dict(rewards, columns, {"metrics": metrics})

    @register("split", keep_remote=("selected_tokens",), fetch=False)
    def select_tokens(self, batch: DataProto, seed: int) -> DataProto:
        """Select the step's tokens for the loss clip_cov or kl_cov, on one rank."""
        if not len(batch):
            return DataProto()
        t = self.all_rows.padded(batch).batch
        settings = vars(self.config.actor_rollout_ref.actor.policy_loss)
        tokens = select_loss_tokens(t, self.plan.loss_mode, settings, seed)
        return DataProto.from_dict({}, {"selected_tokens": ragged(tokens, t["response_length"])})

    @register("split", fetch=False)
    def update(self, batch: DataProto) -> Metrics:
        """Do the step's policy updates; return verl's actor/ metrics, equal on every rank."""
        self.all_rows.clear()
        actor = self.config.actor_rollout_ref.actor
        measured = "entropy_sums" in batch.batch.keys()
        metrics = self.update_in_mini_batches(
            "actor",
            self.rank_rows.padded(batch),
            self.plan.actor,
            policy_objective(self.config, self.plan),
            with_entropy=actor.calculate_entropy or actor.entropy_coeff != 0 or not measured,
        )
        sums = {key: metrics.pop(key) for key in list(metrics) if key.startswith("gap/")}
        metrics |= gap_metrics(sums)
        if actor.use_kl_loss:
            metrics["actor/kl_coef"] = actor.kl_loss_coef
        return metrics

    @register("all")
    def offer_weights(self, version: int, probe_limit: float | None) -> Offer:
        """Prepare to publish `version`: bring the weights to the device and hash them. Adapters
        alone are hashed and gathered from where they are.

        probe_limit: largest relative gap of the log-prob probe; None: no probe.
        """
        self._sync.start()
        if self._sync.parts != ("adapters",) or probe_limit is not None:
            self.engine.onload()
        fingerprint = self._sync.fingerprint(
            lambda part: self.engine.fingerprint(self._rollout_dtype, part)
        )
        if self.rank in self.plan.weights.publishers.values():
            self._publisher = Publisher(self.device)
        return Offer(
            version,
            fingerprint,
            rendezvous=self._sender.offer() if self._sender else None,
            stream=self._publisher.address if self._publisher else None,
            probe=None
            if probe_limit is None
            else self.engine.probe(probe_limit, self.plan.max_model_len),
        )

    @register("all")
    def publish_weights(self, offer: Offer) -> Export:
        """Publish the weights through the transports that the engines use, and free device memory.

        With rollout.lora_sync=adapter, the base model is published only until a sync succeeds.

        All ranks take part in gathering the weights.

        Returns:
            The memory files that this rank wrote for its node, if any, and the bytes it published.
        """
        sinks = self._sinks(offer)
        target = None
        if sinks:
            target = torch.device("cpu") if self.device.type == "cpu" else self.device
        weights = itertools.chain.from_iterable(
            self.engine.export(self._rollout_dtype, snapshot=False, target=target, part=part)
            for part in self._sync.parts
        )
        # Gathering is collective, so ranks without a sink iterate too.
        bucket_bytes = self.config.actor_rollout_ref.rollout.sync_bucket_mb << 20
        size = publish(weights, sinks, bucket_bytes)
        self.engine.offload()
        node = self.plan.placement["actor"][self.rank] // self.plan.devices_per_node
        paths = self._memory_files.paths if self._memory_files else []
        return Export(node, tuple(paths), size)

    def _sinks(self, offer: Offer) -> list[Sink]:
        """Return what this rank publishes to."""
        sinks: list[Sink] = []
        if self.rank in self.plan.weights.writers:
            self._memory_files = MemoryFiles()
            sinks.append(self._memory_files)
        if self._publisher is not None:
            sinks.append(self._publisher)
        if self._sender is not None:
            sinks.append(self._sender)
        if self.rank == 0 and self.plan.weights.uses("files"):
            folder = Path(self.config.trainer.default_local_dir, "weights")
            sinks.append(FolderWriter(folder, offer.version, offer.fingerprint))
        return sinks

    @property
    def _rollout_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.plan.rollout_dtype)
        return dtype

    @register("all")
    def release_weights(self) -> None:
        """Free what engines have read. Called after all of them have the version."""
        self._sync.succeeded()
        if self._memory_files is not None:
            self._memory_files.close()
            self._memory_files = None
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    @register("all")
    def export_hf(self, folder: str) -> None:
        """Write the policy and its tokenizer as a Hugging Face folder."""
        self.engine.onload()
        self.engine.save_pretrained(folder, load_tokenizer(self.config.actor_rollout_ref.model))
        self.engine.offload()


def policy_objective(config: Config, plan: Plan) -> "LossFn":
    """Return the actor's loss: pg_loss - entropy_coeff * entropy + kl_loss_coef * KL.

    Each term is aggregated by loss_agg_mode over the whole optimizer step: `counts` has the tokens
    and sequences of all micro-batches on all ranks, so the losses of micro-batches add up to it.
    """
    actor = config.actor_rollout_ref.actor
    chosen = actor.policy_loss
    extra = {
        "tau_pos": actor.tau_pos,
        "tau_neg": actor.tau_neg,
        "ppo_kl_coef": chosen.ppo_kl_coef,
        "rollout_correction": plan.correction,
        **chosen.kwargs,
    }

    def objective(
        rows: TensorDict, outputs: dict[str, torch.Tensor], counts: "Counts"
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        log_probs = outputs["log_probs"]
        mask = rows["response_mask"]  # holds loss_mask, see update_in_mini_batches
        weights = token_weights(
            mask,
            actor.loss_agg_mode,
            tokens=counts.tokens,
            sequences=counts.sequences,
            scale=plan.loss_scale,
        )
        old = rows.get("old_log_probs", log_probs.detach())
        inputs = PolicyLossInputs(
            log_prob=log_probs,
            old_log_prob=old,
            advantages=rows["advantages"],
            response_mask=mask,
            weights=weights,
            tokens=counts.tokens,
            clip_low=plan.clip_low,
            clip_high=plan.clip_high,
            clip_c=actor.clip_ratio_c,
            loss_agg_mode=actor.loss_agg_mode,
            rollout_is_weights=rows.get("rollout_is_weights"),
            extra=extra | {"selected": rows.get("selected_tokens")},
        )
        loss, metrics = policy_loss(plan.loss_mode, inputs)
        metrics["actor/pg_loss"] = loss.detach()
        if "old_log_probs" not in rows.keys() or plan.loss_mode == BYPASS_LOSS:
            # No earlier pass measured the gap. With one update these are the old log-probs.
            metrics |= gap_sums(log_probs, rows["rollout_log_probs"], mask)
        if "entropy" in outputs:
            metrics["actor/entropy"] = inputs.token_mean(outputs["entropy"].detach())
            if actor.entropy_coeff:
                loss = loss - actor.entropy_coeff * entropy_sum(outputs["entropy"], mask, weights)
        if actor.use_kl_loss:
            kl = kl_loss(log_probs, rows["ref_log_prob"], mask, weights, actor.kl_loss_type)
            metrics["actor/kl_loss"] = kl.detach()
            loss = loss + actor.kl_loss_coef * kl
        return loss, metrics

    return objective
