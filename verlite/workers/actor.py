"""The policy in training: log-probs, updates, weights for the rollout engine."""

from dataclasses import dataclass, replace
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
from verlite.protocol.ragged import padded, ragged
from verlite.protocol.weights import Buckets, write_buckets
from verlite.workers.training import TrainingWorker, cut

if TYPE_CHECKING:
    from verlite.engine.fsdp import Counts


@dataclass(frozen=True)
class Export:
    """The trainer's weights as one rank left them for the engines of its node; empty paths on ranks that wrote none."""

    node_id: str
    paths: list[str]
    bytes: int
    fingerprint: int


class ActorWorker(TrainingWorker):
    """One rank of the policy."""

    def __init__(self, config: Config, plan: Plan, total_steps: int):
        from verlite.engine.fsdp import (
            TrainEngine,
        )  # its libraries take seconds, and the driver only names this class

        super().__init__(config, plan, total_steps)
        policy = config.actor_rollout_ref
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
        self._exported: Buckets | None = None

    @register("split", keep_remote=("old_log_probs", "sum_pi_squared"))
    def log_probs(self, batch: DataProto) -> DataProto:
        """Of the responses under the current policy: ragged old_log_probs, and sum_pi_squared where the plan needs it; and each row's
        entropy_sums [b] and gap_sums [b, G] to what the rollout engine said."""
        rows = padded(batch)
        self.engine.onload()
        out = self.engine.forward(
            rows,
            cut(self.plan.log_prob_micro),
            self.config.actor_rollout_ref.rollout.temperature,
            with_entropy=True,
            with_sum_pi_squared=self.plan.needs_sum_pi_squared,
        )
        self.engine.offload()
        t = rows.batch
        sums = {
            "entropy_sums": out.pop("entropy").double().sum(1),
            "gap_sums": gap_rows(out["log_probs"], t["rollout_log_probs"], t["response_mask"]),
        }
        out["old_log_probs"] = out.pop("log_probs")
        return DataProto.from_dict(
            sums, {name: ragged(values, t["response_length"]) for name, values in out.items()}
        )

    @register("split", keep_remote=("ref_log_prob",))
    def reference_log_probs(self, batch: DataProto) -> DataProto:
        """Ragged ref_log_prob of the responses under the policy without its adapters."""
        rows = padded(batch)
        self.engine.onload()
        with self.engine.without_adapters():
            out = self.engine.forward(
                rows, cut(self.plan.ref_micro), self.config.actor_rollout_ref.rollout.temperature
            )
        self.engine.offload()
        return DataProto.from_dict(
            {}, {"ref_log_prob": ragged(out["log_probs"], rows.batch["response_length"])}
        )

    @register("split")
    def update(self, batch: DataProto) -> dict[str, float]:
        """All of the step's policy updates; returns verl's actor/ metrics, equal on every rank."""
        actor = self.config.actor_rollout_ref.actor
        unmeasured = "entropy_sums" not in batch.batch.keys()
        with_entropy = actor.calculate_entropy or actor.entropy_coeff != 0 or unmeasured
        metrics = self.update_in_mini_batches(
            "actor",
            padded(batch),
            self.plan.actor,
            policy_objective(self.config, self.plan),
            with_entropy=with_entropy,
        )
        sums = {key: metrics.pop(key) for key in list(metrics) if key.startswith("gap/")}
        return (
            metrics
            | gap_metrics(sums)
            | ({"actor/kl_coef": actor.kl_loss_coef} if actor.use_kl_loss else {})
        )

    @register("all")
    def export_weights(self) -> Export:
        """Stream the full weights, which every rank helps to gather, into memory files, one copy per node; then free device memory."""
        self.engine.onload()
        rollout = self.config.actor_rollout_ref.rollout
        dtype = getattr(torch, self.plan.rollout_dtype)
        weights = self.engine.export(dtype, snapshot=False)
        fingerprint = self.engine.fingerprint(dtype)
        export = Export(self.node_id, [], 0, fingerprint)
        if self.local_rank:
            for _ in weights:
                pass
        else:
            self._exported = write_buckets(weights, rollout.sync_bucket_mb * 2**20)
            export = replace(export, paths=self._exported.paths, bytes=self._exported.bytes)
        self.engine.offload()
        return export

    @register("all")
    def release_export(self) -> None:
        """Free the exported copy."""
        if self._exported is not None:
            self._exported.close()
            self._exported = None

    @register("all")
    def export_hf(self, folder: str) -> None:
        """Write the policy and its tokenizer as a Hugging Face folder."""
        self.engine.onload()
        self.engine.save_pretrained(folder, load_tokenizer(self.config.actor_rollout_ref.model))
        self.engine.offload()


def policy_objective(config: Config, plan: Plan):
    """The actor's loss as the engine calls it: loss(rows, outputs, counts) -> (scalar, additive metrics).

    pg_loss - entropy_coeff * entropy + kl_loss_coef * KL, each aggregated by loss_agg_mode over the whole optimizer step:
    `counts` has the tokens and sequences of all micro-batches on all ranks, so the sum of the parts is the loss of the whole.
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
        mask = rows["response_mask"]
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
            # No pass before the updates has measured the gap. In a step's only update these log-probs are the old ones.
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
