"""Keys that have no effect in the given configuration, and other things a user should be told. Said only for keys they set."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from fnmatch import fnmatchcase

from verlite.config import catalog, correction, plan, rules
from verlite.config.schema import Config, ModelConfig, RetrieverConfig

ACTOR, REF, ROLLOUT = (
    "actor_rollout_ref.actor.",
    "actor_rollout_ref.ref.",
    "actor_rollout_ref.rollout.",
)
CORRECTION, MODEL = "algorithm.rollout_correction.", "actor_rollout_ref.model."
Condition = Callable[[Config], bool]


def _no_reference(config: Config) -> bool:
    return not plan.needs_reference(config)


def _no_critic(config: Config) -> bool:
    return not plan.needs_critic(config)


def _estimator_ignores(setting: str) -> Condition:
    """The estimator is one of ours, and does not read it: one's own function sees all keys."""
    return lambda c: not catalog.reads(catalog.ESTIMATORS, c.algorithm.adv_estimator, setting)


def _loss_ignores(setting: str) -> Condition:
    """As `_estimator_ignores`, for the policy loss."""
    return lambda c: (
        not catalog.reads(
            catalog.POLICY_LOSSES, c.actor_rollout_ref.actor.policy_loss.loss_mode, setting
        )
    )


def _loss_is_not(*names: str) -> Condition:
    """The policy loss is one of ours, and none of these."""
    return lambda c: (
        c.actor_rollout_ref.actor.policy_loss.loss_mode in set(catalog.POLICY_LOSSES) - set(names)
    )


def _bypassed(config: Config) -> bool:
    """The bypass mode's clipped loss: its ratio is the correction."""
    settings = correction.settings(config.algorithm.rollout_correction)
    return settings.bypass_mode and settings.loss_type == "ppo_clip"


def _no_fixed_divisor(config: Config) -> bool:
    """Neither the policy's losses nor the critic's are divided by a constant."""
    actor = config.actor_rollout_ref.actor.loss_agg_mode
    modes = [actor, *([config.critic.loss_agg_mode or actor] if plan.needs_critic(config) else [])]
    return "seq-mean-token-sum-norm" not in modes


def _hf(config: Config) -> bool:
    return plan.resolve_rollout(config.actor_rollout_ref.rollout.name) == "hf"


def _on(device: str) -> Condition:
    return lambda c: plan.resolve_device(c.trainer.device) == device


def _by_tokens(section: str) -> Condition:
    """Whether the passes of actor, rollout, ref or critic fill micro-batches by tokens."""

    def condition(config: Config) -> bool:
        own = {
            "actor": config.actor_rollout_ref.actor.use_dynamic_bsz,
            "rollout": config.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz,
            "ref": config.actor_rollout_ref.ref.log_prob_use_dynamic_bsz,
            "critic": config.critic.use_dynamic_bsz,
        }[section]
        return config.actor_rollout_ref.actor.use_dynamic_bsz if own is None else own

    return condition


def _not(condition: Condition) -> Condition:
    return lambda c: not condition(c)


def _actor_size_unused(config: Config) -> bool:
    """No pass counts samples, not even one that inherits the actor's size."""
    return all(_by_tokens(section)(config) for section in ("actor", "rollout", "ref", "critic"))


def _actor_tokens_unused(config: Config) -> bool:
    return not any(_by_tokens(section)(config) for section in ("actor", "rollout", "ref", "critic"))


def _no_validation(config: Config) -> bool:
    return not plan.files_of(config.data.val_files)


def _of_models(
    name: str, of: Callable[[ModelConfig], bool], why: str
) -> tuple[tuple[str, Condition, str], ...]:
    """A row for each of the models that are trained."""
    return (MODEL + name, lambda c: of(c.actor_rollout_ref.model), why), (
        "critic.model." + name,
        lambda c: of(c.critic.model),
        why,
    )


def _brings_its_own(model: ModelConfig) -> bool:
    return model.lora_adapter_path is not None


TABLE: tuple[tuple[str, Condition, str], ...] = (
    (
        "algorithm.kl_ctrl.kl_coef",
        _no_reference,
        "neither algorithm.use_kl_in_reward nor actor_rollout_ref.actor.use_kl_loss is on: this run has no KL term. "
        "algorithm.use_kl_in_reward=true turns this penalty on (older verl and Search-R1 always had it)",
    ),
    (
        "algorithm.kl_ctrl.*",
        lambda c: not c.algorithm.use_kl_in_reward,
        "algorithm.use_kl_in_reward is off; the KL in the loss has its own coefficient, "
        + ACTOR
        + "kl_loss_coef",
    ),
    (
        "algorithm.kl_penalty",
        lambda c: not c.algorithm.use_kl_in_reward,
        "algorithm.use_kl_in_reward is off",
    ),
    (
        "algorithm.kl_ctrl.horizon",
        lambda c: c.algorithm.kl_ctrl.type == "fixed",
        "algorithm.kl_ctrl.type is fixed",
    ),
    (
        "algorithm.kl_ctrl.target_kl",
        lambda c: c.algorithm.kl_ctrl.type == "fixed",
        "algorithm.kl_ctrl.type is fixed",
    ),
    (
        ACTOR + "kl_loss_*",
        lambda c: not c.actor_rollout_ref.actor.use_kl_loss,
        ACTOR + "use_kl_loss is off",
    ),
    (REF + "*", _no_reference, "no KL term is on, so there is no reference"),
    (
        REF + "fsdp_config.*",
        plan.reference_is_actor,
        "with LoRA the reference is the actor with its adapters off",
    ),
    (REF + "fsdp_config.optimizer_offload", lambda c: True, "the reference has no optimizer"),
    ("critic.[!e]*", _no_critic, "nothing uses a critic: algorithm.adv_estimator is not gae"),
    ("critic.model.tokenizer_path", lambda c: True, "the critic reads the policy's token ids"),
    (
        "critic.model.custom_chat_template",
        lambda c: True,
        "the critic reads the policy's token ids",
    ),
    *_of_models(
        "lora_alpha",
        lambda model: not plan.uses_lora(model),
        "lora_rank is 0: all weights are trained",
    ),
    *_of_models(
        "*_modules",
        lambda model: not plan.uses_lora(model),
        "lora_rank is 0: all weights are trained",
    ),
    *_of_models("lora_rank", _brings_its_own, "lora_adapter_path brings its own"),
    *_of_models("lora_alpha", _brings_its_own, "lora_adapter_path brings its own"),
    *_of_models("*_modules", _brings_its_own, "lora_adapter_path brings its own"),
    (
        MODEL + "enable_activation_offload",
        _on("cpu"),
        "this run is on CPUs: activations lie in host memory anyway",
    ),
    (
        "critic.model.enable_activation_offload",
        _on("cpu"),
        "this run is on CPUs: activations lie in host memory anyway",
    ),
    ("algorithm.lam", _estimator_ignores("lam"), "this algorithm.adv_estimator does not use it"),
    (
        "algorithm.gamma",
        _estimator_ignores("gamma"),
        "this estimator gives all tokens of a response one advantage",
    ),
    (
        "algorithm.norm_adv_by_std_in_grpo",
        _estimator_ignores("norm_adv_by_std_in_grpo"),
        "this algorithm.adv_estimator does not divide by the standard deviation of a group",
    ),
    (
        ACTOR + "clip_ratio",
        lambda c: (
            c.actor_rollout_ref.actor.clip_ratio_low is not None
            and c.actor_rollout_ref.actor.clip_ratio_high is not None
        ),
        "clip_ratio_low and clip_ratio_high replace it",
    ),
    *(
        (ACTOR + name, _loss_ignores("clip_low"), "this loss has no clip range")
        for name in ("clip_ratio", "clip_ratio_low")
    ),
    (ACTOR + "clip_ratio_high", _loss_ignores("clip_high"), "this loss has no clip range"),
    (ACTOR + "clip_ratio_c", _loss_ignores("clip_c"), "this loss has no dual clip"),
    *(
        (ACTOR + name, _loss_is_not("sapo"), "only policy_loss.loss_mode=sapo uses it")
        for name in ("tau_pos", "tau_neg")
    ),
    (
        ACTOR + "policy_loss.clip_cov_*",
        _loss_is_not("clip_cov"),
        "only policy_loss.loss_mode=clip_cov uses it",
    ),
    *(
        (
            ACTOR + "policy_loss." + name,
            _loss_is_not("kl_cov"),
            "only policy_loss.loss_mode=kl_cov uses it",
        )
        for name in ("kl_cov_ratio", "ppo_kl_coef")
    ),
    (ACTOR + "policy_loss.kwargs*", _loss_is_not(), "it is for a policy loss of your own"),
    (
        "algorithm.adv_kwargs*",
        lambda c: c.algorithm.adv_estimator in catalog.ESTIMATORS,
        "it is for an advantage estimator of your own",
    ),
    (
        "algorithm.filter_groups.[!e]*",
        lambda c: not c.algorithm.filter_groups.enable,
        "algorithm.filter_groups.enable is off",
    ),
    (
        "data.gen_batch_size",
        lambda c: not c.algorithm.filter_groups.enable,
        "algorithm.filter_groups.enable is off: a step generates once",
    ),
    (
        "reward.overlong_buffer.[!e]*",
        lambda c: not c.reward.overlong_buffer.enable,
        "reward.overlong_buffer.enable is off",
    ),
    (
        CORRECTION + "rollout_is_*",
        lambda c: not correction.settings(c.algorithm.rollout_correction).rollout_is,
        CORRECTION + "rollout_is is null: there are no weights",
    ),
    (
        CORRECTION + "rollout_is*",
        _bypassed,
        "the ratio to the rollout's log-probs corrects by itself in this loss",
    ),
    (
        CORRECTION + "rollout_rs_threshold",
        lambda c: not correction.settings(c.algorithm.rollout_correction).rollout_rs,
        CORRECTION + "rollout_rs is null: nothing is rejected",
    ),
    (
        CORRECTION + "loss_type",
        lambda c: not correction.settings(c.algorithm.rollout_correction).bypass_mode,
        CORRECTION + "bypass_mode is off",
    ),
    (
        ACTOR + "loss_scale_factor",
        _no_fixed_divisor,
        "only loss_agg_mode=seq-mean-token-sum-norm uses it",
    ),
    (
        ACTOR + "ppo_micro_batch_size_per_gpu",
        _actor_size_unused,
        "use_dynamic_bsz fills micro-batches by tokens: ppo_max_token_len_per_gpu",
    ),
    (ACTOR + "ppo_max_token_len_per_gpu", _actor_tokens_unused, "use_dynamic_bsz is off"),
    (
        ROLLOUT + "log_prob_micro_batch_size_per_gpu",
        _by_tokens("rollout"),
        "log_prob_use_dynamic_bsz fills micro-batches by tokens",
    ),
    (
        ROLLOUT + "log_prob_max_token_len_per_gpu",
        _not(_by_tokens("rollout")),
        "log_prob_use_dynamic_bsz is off",
    ),
    (
        REF + "log_prob_micro_batch_size_per_gpu",
        _by_tokens("ref"),
        "log_prob_use_dynamic_bsz fills micro-batches by tokens",
    ),
    (
        REF + "log_prob_max_token_len_per_gpu",
        _not(_by_tokens("ref")),
        "log_prob_use_dynamic_bsz is off",
    ),
    (
        "critic.ppo_micro_batch_size_per_gpu",
        _by_tokens("critic"),
        "use_dynamic_bsz fills micro-batches by tokens",
    ),
    (
        "critic.forward_micro_batch_size_per_gpu",
        _by_tokens("critic"),
        "use_dynamic_bsz fills micro-batches by tokens",
    ),
    ("critic.ppo_max_token_len_per_gpu", _not(_by_tokens("critic")), "use_dynamic_bsz is off"),
    (
        ACTOR + "data_loader_seed",
        lambda c: (
            _loss_is_not("clip_cov")(c)
            and not c.actor_rollout_ref.actor.shuffle
            and not c.critic.shuffle
        ),
        ACTOR + "shuffle is off",
    ),
    (
        ACTOR + "optim.lr_warmup_steps_ratio",
        lambda c: c.actor_rollout_ref.actor.optim.lr_warmup_steps >= 0,
        "lr_warmup_steps replaces it",
    ),
    (
        "critic.optim.lr_warmup_steps_ratio",
        lambda c: c.critic.optim.lr_warmup_steps >= 0,
        "lr_warmup_steps replaces it",
    ),
    (
        ACTOR + "optim.min_lr_ratio",
        lambda c: c.actor_rollout_ref.actor.optim.lr_scheduler_type != "cosine",
        "lr_scheduler_type is constant",
    ),
    (
        ACTOR + "optim.num_cycles",
        lambda c: c.actor_rollout_ref.actor.optim.lr_scheduler_type != "cosine",
        "lr_scheduler_type is constant",
    ),
    (
        "critic.optim.min_lr_ratio",
        lambda c: c.critic.optim.lr_scheduler_type != "cosine",
        "lr_scheduler_type is constant",
    ),
    (
        "critic.optim.num_cycles",
        lambda c: c.critic.optim.lr_scheduler_type != "cosine",
        "lr_scheduler_type is constant",
    ),
    *(
        (ROLLOUT + name, _hf, "the rollout engine is hf; only vllm uses it")
        for name in (
            "tensor_model_parallel_size",
            "gpu_memory_utilization",
            "max_num_batched_tokens",
            "enforce_eager",
            "enable_prefix_caching",
            "enable_chunked_prefill",
            "free_cache_engine",
            "kv_cache_gb",
        )
    ),
    (ROLLOUT + "engine_kwargs.vllm.*", _hf, "the rollout engine is hf"),
    (ROLLOUT + "engine_kwargs.sglang*", lambda c: True, "SGLang is not part of verlite"),
    (ROLLOUT + "engine_kwargs.hf.*", _not(_hf), "the rollout engine is vllm"),
    (
        ROLLOUT + "tensor_model_parallel_size",
        lambda c: _on("cpu")(c) and c.actor_rollout_ref.rollout.tensor_model_parallel_size > 1,
        "on CPUs each slot has an engine of its own",
    ),
    (
        ROLLOUT + "gpu_memory_utilization",
        _on("cpu"),
        "this run is on CPUs; the cache's size there is " + ROLLOUT + "kv_cache_gb",
    ),
    (
        ROLLOUT + "free_cache_engine",
        _on("cpu"),
        "this run is on CPUs, where the engine keeps its memory",
    ),
    (
        ROLLOUT + "kv_cache_gb",
        _on("cuda"),
        "this run is on GPUs; the cache's size there follows from "
        + ROLLOUT
        + "gpu_memory_utilization",
    ),
    ("data.seed", lambda c: not c.data.shuffle, "data.shuffle is off"),
    (
        "data.truncation",
        lambda c: c.data.filter_overlong_prompts,
        "data.filter_overlong_prompts drops what would be truncated",
    ),
    ("data.val_batch_size", _no_validation, "there are no data.val_files"),
    ("data.val_max_samples", _no_validation, "there are no data.val_files"),
    (ROLLOUT + "val_kwargs.*", _no_validation, "there are no data.val_files"),
    ("trainer.log_val_generations", _no_validation, "there are no data.val_files"),
    *(
        (
            ROLLOUT + "val_kwargs." + name,
            lambda c: not c.actor_rollout_ref.rollout.val_kwargs.do_sample,
            "validation is greedy while " + ROLLOUT + "val_kwargs.do_sample is off",
        )
        for name in ("temperature", "top_p", "top_k")
    ),
    (
        "trainer.val_before_train",
        lambda c: c.trainer.val_only and not c.trainer.val_before_train,
        "trainer.val_only validates at once",
    ),
    (
        "trainer.total_epochs",
        lambda c: c.trainer.total_training_steps is not None,
        "trainer.total_training_steps says how long the run is",
    ),
    (
        "trainer.critic_warmup",
        lambda c: _no_critic(c) and c.trainer.critic_warmup > 0,
        "this run has no critic",
    ),
    (
        "trainer.resume_from_path",
        lambda c: c.trainer.resume_mode != "resume_path",
        "trainer.resume_mode is not resume_path",
    ),
    (
        "trainer.max_actor_ckpt_to_keep",
        lambda c: c.trainer.save_freq < 1,
        "trainer.save_freq is -1: no checkpoint is saved",
    ),
    (
        "trainer.max_failed_saves",
        lambda c: c.trainer.save_freq < 1,
        "trainer.save_freq is -1: no checkpoint is saved",
    ),
    (
        "custom_reward_function.name",
        lambda c: c.custom_reward_function.path is None,
        "custom_reward_function.path is null",
    ),
    (
        "ray_kwargs.ray_init.num_cpus",
        lambda c: c.ray_kwargs.ray_init.address is not None,
        "a cluster that is joined has its own number",
    ),
    *(
        (name, lambda c: c.max_turns == 0, "max_turns is 0: every sample is a single turn")
        for name in (
            "do_search",
            "env.*",
            "retriever.*",
            "data.max_start_length",
            "data.max_obs_length",
        )
    ),
    *(
        (name, lambda c: not c.do_search, "do_search is off: every sample is a single turn")
        for name in (
            "max_turns",
            "env.*",
            "retriever.*",
            "data.max_start_length",
            "data.max_obs_length",
        )
    ),
    *(
        (f"retriever.{field.name}", lambda c: c.env.name != "search", "env.name is not search")
        for field in fields(RetrieverConfig)
        if field.name != "outage_wait_s"  # whose tools they are does not matter
    ),
    (
        "env.kwargs*",
        lambda c: c.env.name in rules.CHOICES["env.name"],
        "they are for a world of your own",
    ),
)
"""(key or pattern, when it has no effect, why). The first row that applies to a key is the one that is said."""


def keys_without_effect(config: Config, user_keys: Collection[str]) -> dict[str, str]:
    """Each key that the user set in vain, with the reason."""
    said: dict[str, str] = {}
    for pattern, condition, why in TABLE:
        for key in sorted(user_keys):
            if key not in said and fnmatchcase(key, pattern) and condition(config):
                said[key] = why
    # A mapping that was set by its entries is said by its entries.
    return {
        key: why
        for key, why in said.items()
        if not any(other.startswith(key + ".") for other in said)
    }


def remarks(config: Config, old_names: Mapping[str, str]) -> list[str]:
    """What is legal but may not be what the user thinks."""
    said = []
    rollout = config.actor_rollout_ref.rollout
    if rollout.top_p < 1 or rollout.top_k > 0:
        which = " and ".join(
            f"{ROLLOUT}{name}={value}"
            for name, value, on in (
                ("top_p", rollout.top_p, rollout.top_p < 1),
                ("top_k", rollout.top_k, rollout.top_k > 0),
            )
            if on
        )
        said.append(
            f"{which}: samples come from a cut distribution, but training uses the full one; rollout and training log-probs will differ"
        )
    if rollout.name == "auto":
        chosen = plan.resolve_rollout("auto")
        said.append(
            f"{ROLLOUT}name=auto chose {chosen}"
            + ("" if chosen == "vllm" else ": vLLM is not installed here")
        )
    loss, mode = (
        config.actor_rollout_ref.actor.policy_loss.loss_mode,
        config.actor_rollout_ref.actor.loss_agg_mode,
    )
    usual = catalog.POLICY_LOSSES[loss].aggregation if loss in catalog.POLICY_LOSSES else None
    if usual is not None and mode != usual:
        said.append(
            f"{ACTOR}loss_agg_mode={mode}: the paper of policy_loss.loss_mode={loss} uses {usual}"
        )
    said += _kl_remarks(config)
    if config.algorithm.filter_groups.enable and config.trainer.total_training_steps is None:
        said.append(
            "trainer.total_epochs counts steps as if each took data.train_batch_size prompts, but algorithm.filter_groups draws more: "
            "trainer.total_training_steps says how long the run is"
        )
    if (
        rollout.n > 1
        and config.algorithm.filter_groups.enable
        and "values" in catalog.measured(config.algorithm.adv_estimator)
    ):
        said.append(
            "algorithm.filter_groups leaves out prompts whose samples agree: the critic never learns their values"
        )
    if (
        plan.max_turns(config)
        and plan.worst_case(config)
        > config.data.max_prompt_length + config.data.max_response_length
    ):
        said.append(f"samples may not fit: {plan.length_arithmetic(config)}")
    if "actor_rollout_ref.rollout.n_agent" in old_names and rollout.n > 1:
        said.append(
            f"{ACTOR}ppo_mini_batch_size counts prompts here, {rollout.n} samples each; Search-R1 counted samples, so its run made "
            f"{rollout.n} times as many updates"
        )
    if (
        rollout.val_kwargs.n > 1
        and not (rollout.val_kwargs.do_sample and rollout.val_kwargs.temperature > 0)
        and not _no_validation(config)
    ):
        said.append(
            f"{ROLLOUT}val_kwargs.n={rollout.val_kwargs.n}: validation is greedy, so the samples of a prompt are all the same"
        )
    elif (
        rollout.val_kwargs.do_sample
        and rollout.val_kwargs.temperature == 0
        and not _no_validation(config)
    ):
        said.append(f"{ROLLOUT}val_kwargs.temperature=0 is greedy although do_sample is on")
    return said


def _kl_remarks(config: Config) -> list[str]:
    """KL settings that are legal and rarely meant."""
    actor, algorithm, said = config.actor_rollout_ref.actor, config.algorithm, []
    if algorithm.use_kl_in_reward and actor.use_kl_loss:
        said.append(
            f"the KL to the reference counts twice: algorithm.use_kl_in_reward and {ACTOR}use_kl_loss are both on"
        )
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        said.append(
            f"{ACTOR}kl_loss_coef=0: the KL to the reference is measured, for the price of a reference, and changes nothing"
        )
    if actor.use_kl_loss and actor.kl_loss_type in ("kl", "k1"):
        said.append(
            f"{ACTOR}kl_loss_type={actor.kl_loss_type}: the expected gradient of this estimator is 0, so it adds noise and holds nothing; "
            f"{actor.kl_loss_type}+ or low_var_kl do"
        )
    if (
        algorithm.use_kl_in_reward
        and algorithm.kl_ctrl.type == "fixed"
        and algorithm.kl_ctrl.kl_coef == 0
    ):
        said.append(
            "algorithm.kl_ctrl.kl_coef=0: the KL to the reference is measured, for the price of a reference, and changes nothing"
        )
    if algorithm.use_kl_in_reward and algorithm.kl_penalty.endswith("+"):
        said.append(
            f"algorithm.kl_penalty={algorithm.kl_penalty}: a reward has no gradient, so the + changes nothing"
        )
    if algorithm.adv_estimator == "rloo_token_kl" and not algorithm.use_kl_in_reward:
        said.append(
            "algorithm.adv_estimator=rloo_token_kl is rloo with clipped advantages while algorithm.use_kl_in_reward is off"
        )
    return said
