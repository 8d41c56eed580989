"""Compile a configuration and its plan into what each role needs (`verlite.spec.roles`)."""

import os
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any, TypeVar

from verlite.config import schema
from verlite.config.plan import (
    OPENENV,
    TEACHER,
    Plan,
    engine_settings,
    env_name,
    files_of,
    max_turns,
    program,
    scores_itself,
    scores_remotely,
    syncs_adapters,
)
from verlite.config.schema import Config
from verlite.spec import roles

S = TypeVar("S", bound=roles.ServiceSpec)
T = TypeVar("T")


def role_spec(role: str, config: Config, plan: Plan, total_steps: int) -> Any:
    """Return what a role of the run needs.

    total_steps: training steps of the whole run.
    """
    make: dict[str, Callable[..., Any]] = {
        "actor": actor_spec,
        "inference": inference_spec,
        "ref": partial(reference_spec, "ref"),
        "teacher": partial(reference_spec, "teacher"),
        "critic": critic_spec,
        "rollout": lambda config, plan, _: rollout_spec(config, plan),
    }
    return make[role](config, plan, total_steps)


def actor_spec(config: Config, plan: Plan, total_steps: int) -> roles.ActorSpec:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    return roles.ActorSpec(
        **_training(config, plan, total_steps, "actor"),
        log_probs=_log_probs(config, plan),
        updates=plan.actor,
        loss=policy_loss_spec(config, plan),
        calculate_entropy=actor.calculate_entropy,
        token_selection=vars(actor.policy_loss),
        advantage=advantage_spec(config),
        correction=plan.correction,
        publish=roles.PublishSpec(
            train_dtype=plan.train_dtype,
            rollout_dtype=plan.rollout_dtype,
            sync_dtype=plan.sync_dtype,
            sync_bucket_mb=rollout.sync_bucket_mb,
            engine_share=1 / plan.tensor_parallel if rollout.free_cache_engine else 0.0,
            syncs_adapters=plan.syncs_adapters,
            has_inference="inference" in plan.roles,
            nodes=tuple(device // plan.devices_per_node for device in plan.placement["actor"]),
            max_model_len=plan.max_model_len,
        ),
        saves_hf="hf_model" in actor.checkpoint.save_contents,
    )


def inference_spec(config: Config, plan: Plan, total_steps: int) -> roles.InferenceSpec:
    return roles.InferenceSpec(
        **_training(config, plan, total_steps, "inference"),
        log_probs=_log_probs(config, plan),
        dtype=plan.train_dtype,
        max_model_len=plan.max_model_len,
    )


def reference_spec(role: str, config: Config, plan: Plan, total_steps: int) -> roles.ReferenceSpec:
    assert plan.ref_micro is not None
    return roles.ReferenceSpec(**_training(config, plan, total_steps, role), micro=plan.ref_micro)


def critic_spec(config: Config, plan: Plan, total_steps: int) -> roles.CriticSpec:
    assert plan.critic is not None and plan.value_micro is not None
    return roles.CriticSpec(
        **_training(config, plan, total_steps, "critic"),
        micro=plan.value_micro,
        updates=plan.critic,
        loss_scale=plan.loss_scale,
        cliprange_value=config.critic.cliprange_value,
    )


def rollout_spec(config: Config, plan: Plan) -> roles.RolloutSpec:
    policy = config.actor_rollout_ref
    return roles.RolloutSpec(
        model=model_spec(policy.model),
        engine=plan.rollout_name,
        generation=generation_spec(policy.rollout, policy.model, kv_at_update(config)),
        seed=policy.rollout.seed,
        max_model_len=plan.max_model_len,
        run_dir=config.trainer.default_local_dir,
        engines=plan.engines,
        scorer=scorer_spec(config.custom_reward_function, config.reward),
        env=env_spec(config) if plan.max_turns else None,
        agent=take(roles.AgentSpec, config.agent) if program(config) else None,
        template_kwargs=config.data.apply_chat_template_kwargs,
        max_turns=plan.max_turns,
        max_obs_length=config.data.max_obs_length,
        longest_sequence=plan.longest_sequence,
        phase_timeout_s=config.trainer.phase_timeout_s,
        debug=config.trainer.debug,
        folder=os.getcwd(),
    )


def policy_loss_spec(config: Config, plan: Plan) -> roles.PolicyLossSpec:
    actor = config.actor_rollout_ref.actor
    distillation = config.distillation
    return take(
        roles.PolicyLossSpec,
        actor,
        loss_mode=plan.loss_mode,
        loss_scale=plan.loss_scale,
        clip_low=plan.clip_low,
        clip_high=plan.clip_high,
        clip_c=actor.clip_ratio_c,
        extra={
            "tau_pos": actor.tau_pos,
            "tau_neg": actor.tau_neg,
            "ppo_kl_coef": actor.policy_loss.ppo_kl_coef,
            "rollout_correction": plan.correction,
            **actor.policy_loss.kwargs,
        },
        distillation=take(roles.DistillationSpec, distillation.distillation_loss)
        if distillation.enabled
        else None,
    )


def advantage_spec(config: Config) -> roles.AdvantageSpec:
    algorithm: schema.AlgorithmConfig = config.algorithm
    low, high = config.reward.clip_range or (-10.0, 10.0)
    return take(
        roles.AdvantageSpec,
        algorithm,
        gdpo_reward_weights=tuple(algorithm.gdpo_reward_weights or ()) or None,
        reward_clip_range=(low, high),
        single_samples=config.actor_rollout_ref.rollout.n == 1,
    )


def model_spec(model: schema.ModelConfig, **values: Any) -> roles.ModelSpec:
    """Return a section `model`; `values` take the place of its own."""
    return take(roles.ModelSpec, model, **values)


def teacher_model_spec(config: Config) -> roles.ModelSpec:
    """Return the teacher that the run loads. How it runs is as the policy's model says."""
    model = config.actor_rollout_ref.model
    return roles.ModelSpec(
        path=config.distillation.teacher_models.teacher_model.model_path or "",
        trust_remote_code=model.trust_remote_code,
        use_remove_padding=model.use_remove_padding,
        share_prefixes=model.share_prefixes,
    )


def reference_service_spec(config: Config) -> roles.ReferenceServiceSpec:
    return service_spec(roles.ReferenceServiceSpec, config.actor_rollout_ref.ref)


def teacher_service_spec(config: Config) -> roles.ReferenceServiceSpec:
    teacher = config.distillation.teacher_models.teacher_model
    spec = service_spec(roles.ReferenceServiceSpec, teacher)
    return replace(spec, name="teacher service", section=TEACHER.removesuffix("."))


def generation_spec(
    rollout: schema.RolloutConfig, model: schema.ModelConfig, kv_at_update: str = ""
) -> roles.GenerationSpec:
    return take(
        roles.GenerationSpec,
        rollout,
        servers=tuple(files_of(rollout.servers)),
        syncs_adapters=syncs_adapters(model, rollout),
        kv_at_update=kv_at_update,
    )


def kv_at_update(config: Config) -> str:
    """Return what becomes of running samples' keys and values at a weight sync; "": none run.

    Without partial_rollout, and with trainer.mode=pipelined, some run only where an engine was
    replaced, and all get their weights once more.
    """
    if config.trainer.mode == "sync":
        return ""
    settings = config.async_training
    is_async = config.trainer.mode == "async"
    return settings.kv_cache if is_async and settings.partial_rollout else "fresh"


def scorer_spec(custom: schema.CustomRewardConfig, reward: schema.RewardConfig) -> roles.ScorerSpec:
    remote = service_spec(roles.RewardServiceSpec, reward.remote)
    return roles.ScorerSpec(
        path=custom.path,
        name=custom.name,
        reward_kwargs=custom.reward_kwargs,
        secret_env_vars=custom.secret_env_vars,
        remote=remote if scores_remotely(reward) else None,
        score_scale=reward.score_scale,
        timeout_s=reward.timeout_s,
        item_timeout_s=reward.item_timeout_s,
        process_memory_gb=reward.process_memory_gb,
    )


def data_spec(config: Config) -> roles.DataSpec:
    data = config.data
    return take(
        roles.DataSpec,
        data,
        teacher_prompt_key=data.teacher_prompt_key if config.distillation.enabled else None,
        custom_cls=roles.OwnClass(data.custom_cls.path, data.custom_cls.name),
        sampler=roles.OwnClass(data.sampler.class_path, data.sampler.class_name),
        section=data,
    )


def env_spec(config: Config) -> roles.EnvSpec:
    name, kwargs = env_name(config), dict(config.env.kwargs)
    if name == OPENENV:
        kwargs = {
            "server": config.env.openenv,
            "max_turns": max_turns(config),
            "max_obs_length": config.data.max_obs_length,
            "scores": scores_itself(config),
            "template_kwargs": config.data.apply_chat_template_kwargs,
            **kwargs,
        }
    return roles.EnvSpec(name, kwargs, service_spec(roles.RetrieverSpec, config.retriever))


def service_spec(made: type[S], section: Any) -> S:
    """Return a service's spec from its section. What is not a key there is the service's own."""
    names = {field.name for field in fields(made)} & set(vars(section))
    values = {name: getattr(section, name) for name in names}
    return made(**values | {"url": tuple(files_of(section.url))})


def engine_spec(config: Config, plan: Plan, role: str) -> roles.EngineSpec:
    """Return the training engine of a role."""
    policy = config.actor_rollout_ref
    actor = policy.actor
    model = model_spec(policy.model)
    optim = None
    if role == "teacher":
        model = teacher_model_spec(config)
    elif role == "actor":
        optim = take(roles.OptimSpec, actor.optim)
    elif role == "critic":
        model = model_spec(config.critic.model, path=plan.critic_model_path)
        optim = take(roles.OptimSpec, config.critic.optim)
    limits = config.critic if role == "critic" else actor
    return roles.EngineSpec(
        model=model,
        fsdp=take(roles.FSDPSpec, engine_settings(config, role, plan.device)),
        optim=optim,
        grad_clip=limits.grad_clip,
        max_nonfinite_updates=limits.max_nonfinite_updates,
        seed=config.data.seed,
        sequence_parallel=plan.sequence_parallel[role],
    )


def _training(config: Config, plan: Plan, total_steps: int, role: str) -> dict[str, Any]:
    """Return the fields of TrainingRole."""
    return {
        "engine": engine_spec(config, plan, role),
        "run_dir": config.trainer.default_local_dir,
        "phase_timeout_s": config.trainer.phase_timeout_s,
        "total_steps": total_steps,
        "temperature": config.actor_rollout_ref.rollout.temperature,
    }


def _log_probs(config: Config, plan: Plan) -> roles.LogProbSpec:
    return roles.LogProbSpec(
        micro=plan.log_prob_micro,
        needs_sum_pi_squared=plan.needs_sum_pi_squared,
        reference_micro=plan.ref_micro,
    )


def take(_made: type[T], _section: Any, **values: Any) -> T:
    """Return a spec with the values of a section by their names, except those that are given."""
    names = [field.name for field in fields(_made) if field.name not in values]  # type: ignore[arg-type]
    return _made(**{name: getattr(_section, name) for name in names}, **values)
