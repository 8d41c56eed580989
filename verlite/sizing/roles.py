"""What each role of a plan runs at most: its engine, and the largest micro-batch of each pass."""

from collections.abc import Sequence
from dataclasses import dataclass

from verlite.config.compile import engine_spec as compiled_engine
from verlite.config.plan import Micro, Plan, resolve_dtype
from verlite.config.schema import Config
from verlite.sizing.dry_engine import EngineSpec
from verlite.sizing.measure import Passes, Rows

TRAINING_ROLES = ("actor", "inference", "ref", "critic")

SECTIONS = {
    "actor": "actor_rollout_ref.actor",
    "ref": "actor_rollout_ref.ref",
    "critic": "critic",
}


@dataclass(frozen=True)
class Role:
    """One training role.

    name: one of TRAINING_ROLES.
    spec: its engine.
    passes: what it runs.
    """

    name: str
    spec: EngineSpec
    passes: Passes


def training_roles(config: Config, plan: Plan) -> list[Role]:
    """Return the roles of a run that have a training engine."""
    return [
        Role(name, engine_spec(config, plan, name), role_passes(config, plan, name))
        for name in TRAINING_ROLES
        if name in plan.roles
    ]


def engine_spec(config: Config, plan: Plan, role: str) -> EngineSpec:
    """Return the engine of a role, as its worker builds it."""
    engine = compiled_engine(config, plan, role)
    return EngineSpec(
        model=engine.model,
        fsdp=engine.fsdp,
        optim=engine.optim,
        head="value" if role == "critic" else "lm",
        ranks=len(plan.placement[role]),
        sequence_parallel=engine.sequence_parallel,
        kind=plan.device,
        dtype=resolve_dtype(engine.fsdp.dtype, plan.device),
    )


def role_passes(config: Config, plan: Plan, role: str) -> Passes:
    """Return what a role runs, if every sample has the longest length."""
    groups = len(plan.placement[role]) // plan.sequence_parallel[role]
    step_rows = -(-plan.batch_size // groups)
    if role == "ref":
        return Passes(largest(plan, plan.ref_micro, step_rows), None)
    if role == "critic":
        assert plan.critic is not None
        update_rows = -(-plan.critic.mini_rows // groups)
        return Passes(
            largest(plan, plan.value_micro, step_rows),
            largest(plan, plan.critic.micro, update_rows),
        )
    log_probs = largest(plan, plan.log_prob_micro, step_rows)
    if role == "inference":
        return Passes(
            log_probs, None, forward_entropy=True, sum_pi_squared=plan.needs_sum_pi_squared
        )
    actor = config.actor_rollout_ref.actor
    entropy = "loss" if actor.entropy_coeff else ""
    if actor.calculate_entropy or not plan.needs_old_log_probs:
        entropy = entropy or "metric"
    return Passes(
        # The start-up check runs this pass in the first step even if no other step does.
        None if "inference" in plan.roles else log_probs,
        largest(plan, plan.actor.micro, -(-plan.actor.mini_rows // groups)),
        forward_entropy=True,
        sum_pi_squared=plan.needs_sum_pi_squared,
        update_entropy=entropy,
    )


def largest(plan: Plan, micro: Micro | None, rows: int) -> Rows:
    """Return the largest micro-batch of a pass over `rows` samples of the longest length."""
    assert micro is not None
    longest = plan.longest_sequence
    if micro.max_tokens is None:
        assert micro.size is not None
        lengths: Sequence[int] = (longest,) * min(micro.size, rows)
        several = rows > micro.size
    else:
        whole, rest = divmod(min(micro.max_tokens, rows * longest), longest)
        lengths = (longest,) * whole + ((rest,) if rest > 1 else ())
        several = rows * longest > micro.max_tokens
    return Rows(tuple(lengths), plan.longest_response, several)
