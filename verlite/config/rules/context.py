"""What rules and notes get: the configuration, its sections, and what follows from them."""

import itertools
from collections.abc import Iterable, Mapping

from verlite.config import plan
from verlite.config.keys import table
from verlite.config.schema import Config, DistillationLossConfig, TeacherConfig
from verlite.spec import catalog, correction

KEYS = table(Config())
"""Every key of main_ppo, sections included."""


class Context:
    """The configuration under check, and what is known about it so far."""

    def __init__(
        self,
        config: Config,
        user_keys: Iterable[str] = (),
        broken: Iterable[str] = (),
        old_names: Mapping[str, str] | None = None,
    ) -> None:
        policy = config.actor_rollout_ref
        self.config = config
        self.user_keys = frozenset(user_keys)
        """Keys that the user set."""
        self.broken = set(broken)
        """Keys with a reported problem. A rule does not compute with their values, and reports no
        second problem."""
        self.old_names = old_names or {}
        """Names that the user typed, to the keys they are called now."""

        self.data, self.algorithm, self.reward = config.data, config.algorithm, config.reward
        self.trainer, self.critic = config.trainer, config.critic
        self.async_training = config.async_training
        self.model, self.actor, self.ref = policy.model, policy.actor, policy.ref
        self.rollout = policy.rollout

        self.prompts = config.data.train_batch_size
        self.n = policy.rollout.n
        self.longest = plan.longest_sequence(config)
        """Tokens of the longest sequence."""
        self.turns = plan.max_turns(config)
        self.agent = config.agent
        self.program = plan.program(config)
        """The setting that names the agent program; None without one."""
        self.scores_itself = plan.scores_itself(config)
        """Agent programs score their samples."""
        self.estimator = config.algorithm.adv_estimator
        self.needs_several = catalog.estimator(self.estimator).needs_several
        """The estimator has no advantage for a prompt with one sample."""
        self.measured = catalog.estimator(self.estimator).measured
        """What the estimator reads from forward passes."""
        self.loss_mode = policy.actor.policy_loss.loss_mode
        self.loss = catalog.POLICY_LOSSES.get(self.loss_mode)
        """None: the user's own."""
        self.clips_ratio = bool(self.loss and self.loss.ratio_clip)
        self.clip_above = 1 + plan.clip_range(policy.actor)[1]
        """The largest ratio that is not clipped."""
        self.groups = config.algorithm.filter_groups
        self.buffer = config.reward.overlong_buffer
        self.engine = plan.resolve_rollout(policy.rollout.name)
        self.max_model_len = policy.rollout.max_model_len or self.longest
        self.val_files = plan.files_of(config.data.val_files)

    @property
    def lone_advantage(self) -> str:
        """The advantage of a prompt's only sample, in words."""
        if self.estimator == "gdpo":
            return "the weighted sum of its reward parts, whitened over the step"
        return "the score itself"

    @property
    def needs_critic(self) -> bool:
        return plan.needs_critic(self.config)

    @property
    def own_reference(self) -> bool:
        """No service computes all of reference and teacher."""
        return not plan.reference_urls(self.config) or plan.computes_teacher(self.config)

    @property
    def teacher(self) -> TeacherConfig:
        """The teacher of distillation."""
        return self.config.distillation.teacher_models.teacher_model

    @property
    def distilled(self) -> DistillationLossConfig | None:
        """The distillation term, if it is on."""
        distillation = self.config.distillation
        return distillation.distillation_loss if distillation.enabled else None

    @property
    def correction(self) -> correction.RolloutCorrection:
        """Settings of algorithm.rollout_correction. Raises ValueError if they are inconsistent."""
        return correction.settings(self.algorithm.rollout_correction)

    @property
    def is_async(self) -> bool:
        return self.trainer.mode == "async"

    @property
    def overlaps(self) -> bool:
        """The engines sample while other roles compute."""
        return self.trainer.mode != "sync"

    @property
    def gradients_wait_for(self) -> str | None:
        """With trainer.mode=pipelined, see `plan.gradients_wait_for`."""
        return plan.gradients_wait_for(self.config) if self.trainer.mode == "pipelined" else None

    @property
    def corrects_age(self) -> bool:
        """Rollout correction weights or clips the ratio to the weights that sampled. Its own
        settings are checked elsewhere."""
        try:
            found = self.correction
            clips = found.bypass_mode and found.loss_type == "ppo_clip"
            return clips or bool(found.rollout_is)
        except ValueError:
            return True

    @property
    def shares_gpus(self) -> bool:
        """A device is a GPU, and has an engine and another role."""
        if plan.resolve_device(self.trainer.device) != "cuda":
            return False
        try:
            placed = plan.placed(self.config)
        except ValueError:  # reported elsewhere
            return False
        others = [placed[role] for role in plan.roles(self.config) if role != "rollout"]
        return not set(placed["rollout"]).isdisjoint(itertools.chain(*others))

    @property
    def length_arithmetic(self) -> str:
        return plan.length_arithmetic(self.config)

    @property
    def full_penalty_key(self) -> str:
        """The key of the response length with the full length penalty."""
        own = self.buffer.max_resp_len is not None
        return "max_resp_len" if own else "data.max_response_length"

    @property
    def full_penalty(self) -> int:
        own = self.buffer.max_resp_len
        return self.data.max_response_length if own is None else own

    def by_tokens(self, section: str) -> bool:
        """Return whether passes of actor, rollout, ref or critic fill micro-batches by tokens."""
        return plan.uses_dynamic_batches(self.config, section)

    def ok(self, *keys: str) -> bool:
        """Return whether none of these keys has a reported problem."""
        return self.broken.isdisjoint(keys)


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """Return the largest divisor of `number` below `wanted` and the smallest above it."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d < wanted]
    above = [d for d in divisors if d > wanted]
    return [*below[-1:], *above[:1]]


def nearest_legal(number: int, wanted: int) -> str:
    """Return a remedy that names the nearest divisors."""
    return f"Nearest legal values: {' or '.join(map(str, nearest_divisors(number, wanted)))}."
