"""The policy in training: log-probs, advantages, updates, and the weights that others read."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict

from verlite.algorithms.aggregation import token_weights
from verlite.algorithms.gap import gap_metrics, gap_sums
from verlite.algorithms.kl import kl_loss
from verlite.algorithms.losses import PolicyLossInputs, entropy_sum, policy_loss
from verlite.config.catalog import BYPASS_LOSS, ESTIMATORS, LOSSES, resolve
from verlite.config.plan import Plan, uses_lora
from verlite.config.schema import Config
from verlite.controller.dispatch import register
from verlite.engine.folder import load_tokenizer
from verlite.protocol.data import DataProto
from verlite.protocol.metrics import Metrics
from verlite.protocol.ragged import ragged
from verlite.weights.buckets import TRAINED
from verlite.weights.collective import Sender
from verlite.weights.cuda_ipc import Publisher
from verlite.weights.files import FolderWriter
from verlite.weights.probe import Probe
from verlite.weights.shared_memory import MemoryFiles
from verlite.weights.transport import Export, Offer, Sink, cleanup_after_failure, publish
from verlite.workers.adapters import SyncedParts
from verlite.workers.advantage import (
    apply_rollout_correction,
    estimate_advantages,
    select_loss_tokens,
)
from verlite.workers.log_probs import LogProbWorker
from verlite.workers.rows import StepRows

if TYPE_CHECKING:
    from verlite.engine.fsdp import Counts, LossFn


class ActorWorker(LogProbWorker):
    """One rank of the policy.

    all_rows: all rows of the current training step, on the rank that estimates advantages.
    """

    def __init__(self, config: Config, plan: Plan, total_steps: int) -> None:
        # Imported here: these libraries take seconds, and the driver only names this class.
        from verlite.engine.fsdp import TrainEngine

        # The driver has found the user's own functions on its machine. Another may lack them.
        self._objective = policy_objective(config, plan)
        resolve(config.algorithm.adv_estimator, ESTIMATORS, "algorithm.adv_estimator")
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
            rewards [B]; ragged advantages and returns, 0 outside loss_mask;
            meta_info["stage_metrics"].
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
        return DataProto.from_dict(rewards, columns, {"stage_metrics": metrics})

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
            self._objective,
            with_entropy=actor.calculate_entropy or actor.entropy_coeff != 0 or not measured,
        )
        sums = {key: metrics.pop(key) for key in list(metrics) if key.startswith("gap/")}
        metrics |= gap_metrics(sums)
        if actor.use_kl_loss:
            metrics["actor/kl_coef"] = actor.kl_loss_coef
        return metrics

    @register("all")
    def describe(self, dtypes: Sequence[str]) -> tuple[str, int, Probe]:
        """Describe the present weights, to compare them with those of another process.

        dtypes: names, finest first.

        Returns:
            (the first of them that is not finer than the weights are held, the fingerprint of the
            weights in it, the log-prob probe). The name is "" if there is none.
        """
        held = self.config.actor_rollout_ref.actor.fsdp_config.model_dtype
        name = next((one for one in dtypes if held in ("float32", one)), "")
        self.engine.onload()
        fingerprint = self.engine.fingerprint(getattr(torch, name)) if name else 0
        probe = self.engine.probe(float("inf"), self.plan.max_model_len)
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
            own_fingerprint=self._own_fingerprint(fingerprint),
            rendezvous=self._sender.offer() if self._sender else None,
            stream=self._publisher.address if self._publisher else None,
            probe=None
            if probe_limit is None
            else self.engine.probe(probe_limit, self.plan.max_model_len),
        )

    def _own_fingerprint(self, engines: int) -> int | None:
        """Return the fingerprint that `inference` must have; None without that role.

        engines: fingerprint of the weights for the rollout engines.
        """
        if "inference" not in self.plan.roles:
            return None
        if self.plan.train_dtype == self.plan.rollout_dtype and not self._has_adapters:
            return engines
        return self.engine.own_fingerprint(getattr(torch, self.plan.train_dtype))

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
        dtype = getattr(torch, self.plan.sync_dtype)
        parts = [
            self.engine.export(dtype, snapshot=False, target=target, part=part)
            for part in self._sync.parts
        ]
        if "inference" in self.plan.roles and self._has_adapters:
            trained = self.engine.export(dtype, snapshot=False, target=target, part="trained")
            parts.append((TRAINED + name, tensor) for name, tensor in trained)
        weights = itertools.chain.from_iterable(parts)
        # Gathering is collective, so ranks without a sink iterate too.
        bucket_bytes = self.config.actor_rollout_ref.rollout.sync_bucket_mb << 20
        try:
            size = publish(weights, sinks, bucket_bytes)
        except BaseException:
            with cleanup_after_failure("device memory could not be freed"):
                self.engine.offload()
            raise
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
    def _has_adapters(self) -> bool:
        return uses_lora(self.config.actor_rollout_ref.model)

    @property
    def _rollout_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.plan.rollout_dtype)
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
        if "hf_model" in self.config.actor_rollout_ref.actor.checkpoint.save_contents:
            tokenizer = load_tokenizer(self.config.actor_rollout_ref.model)
            self.engine.save_pretrained(Path(folder, "huggingface"), tokenizer)

    @register("all")
    def export_hf(self, folder: str) -> str | None:
        """Write the policy and its tokenizer as a Hugging Face folder. Return an I/O error, None if
        it worked."""
        self.engine.onload()
        try:
            self.engine.save_pretrained(folder, load_tokenizer(self.config.actor_rollout_ref.model))
        except OSError as error:
            return str(error)
        finally:
            self.engine.offload()
        return None


def policy_objective(config: Config, plan: Plan) -> "LossFn":
    """Return the actor's loss: pg_loss - entropy_coeff * entropy + kl_loss_coef * KL.

    Each term is aggregated by loss_agg_mode over the whole optimizer step: `counts` has the tokens
    and sequences of all micro-batches on all ranks, so the losses of micro-batches add up to it.

    Raises:
        ValueError: the policy loss cannot be imported here.
    """
    actor = config.actor_rollout_ref.actor
    chosen = actor.policy_loss
    function = resolve(plan.loss_mode, LOSSES, "actor_rollout_ref.actor.policy_loss.loss_mode")
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
        loss, metrics = policy_loss(function, inputs)
        metrics["actor/pg_loss"] = loss.detach()
        if "old_log_probs" not in rows.keys() or plan.loss_mode == BYPASS_LOSS:
            # No earlier pass measured the gap. With one update these are the old log-probs.
            metrics |= gap_sums(log_probs, rows["rollout_log_probs"], mask)
        if "entropy" in outputs:
            metrics["actor/entropy"] = inputs.token_mean(outputs["entropy"].detach())
            if actor.entropy_coeff:
                loss = loss - actor.entropy_coeff * entropy_sum(outputs["entropy"], mask, weights)
        if actor.use_kl_loss:
            if actor.kl_loss_importance_weighted:
                ratio = torch.where(inputs.mask, inputs.log_ratio.detach(), 0).exp()
                weights = weights * ratio
            kl = kl_loss(log_probs, rows["ref_log_prob"], mask, weights, actor.kl_loss_type)
            metrics["actor/kl_loss"] = kl.detach()
            loss = loss + actor.kl_loss_coef * kl
        return loss, metrics

    return objective
