"""The models of a run in words: parameters, multiplications of a step, KV cache."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from verlite.config.compile import model_spec
from verlite.config.plan import Plan
from verlite.config.schema import Config
from verlite.sizing.facts import ModelFacts, model_facts
from verlite.sizing.words import amount, facts_table, flops, size

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class RunModels:
    """The policy and, with a critic, its model."""

    policy: ModelFacts
    critic: ModelFacts | None


def run_models(config: Config, plan: Plan) -> RunModels:
    """Count the models of a run.

    Raises:
        ModelError: a model has no usable config.json.
    """
    policy, critic = config.actor_rollout_ref.model, None
    if plan.critic:
        critic = model_facts(model_spec(config.critic.model, path=plan.critic_model_path), "value")
    return RunModels(model_facts(model_spec(policy)), critic)


def model_table(config: Config, plan: Plan, models: RunModels) -> "Table":
    """Return the table."""
    rows = [("policy", _model(models.policy))]
    if models.critic is not None:
        rows.append(("critic", _model(models.critic)))
    length = plan.longest_sequence
    policy = models.policy
    recomputes = config.actor_rollout_ref.model.enable_gradient_checkpointing
    forward = flops(policy.forward_flops(length))
    update = flops(policy.update_flops(length, recomputes))
    rows.append(("one token", f"forward {forward}, update {update}, in samples of {length} tokens"))
    passes = step_flops(config, plan, models)
    parts = ", ".join(f"{name} {flops(number)}" for name, number in passes.items())
    total = flops(sum(passes.values()))
    rows.append(("one step", f"at most {total} ({parts}), if every sample is that long"))
    dtype = plan.rollout_dtype
    per_token = policy.kv_bytes(dtype)
    sample = size(per_token * plan.max_model_len)
    rows.append(
        (
            "KV cache",
            f"{size(per_token)} per token in {dtype}; {sample} for a sample of "
            f"{plan.max_model_len} tokens",
        )
    )
    return facts_table("model, counted from config.json", rows)


def step_flops(config: Config, plan: Plan, models: RunModels) -> dict[str, int]:
    """Return the floating-point operations of each part of a step whose samples all have the
    longest length. Generation is one forward pass per token."""
    length = plan.longest_sequence
    tokens = plan.batch_size * length
    forward = tokens * models.policy.forward_flops(length)
    recomputes = config.actor_rollout_ref.model.enable_gradient_checkpointing
    update = tokens * models.policy.update_flops(length, recomputes)
    parts = {"generation": forward}
    if plan.needs_old_log_probs:
        parts["old log-probs"] = forward
    if plan.needs_reference and not plan.reference_urls:
        parts["reference"] = forward
    if plan.critic is not None and models.critic is not None:
        recomputes = config.critic.model.enable_gradient_checkpointing
        critic_update = models.critic.update_flops(length, recomputes)
        parts["values"] = tokens * models.critic.forward_flops(length)
        parts["critic"] = tokens * plan.critic.epochs * critic_update
    return parts | {"actor": update * plan.actor.epochs}


def _model(facts: ModelFacts) -> str:
    kinds = ", ".join(f"{kind} {amount(count)}" for kind, count in facts.kinds.items())
    text = f"{facts.architecture}, {facts.layers} layers, {amount(facts.parameters)} parameters"
    if facts.trained != facts.parameters:
        text += f", {amount(facts.trained)} trained"
    return f"{text}: {kinds}"
