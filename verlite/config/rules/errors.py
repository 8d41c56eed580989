"""Rules between keys, as rows: what may not be, and what to say about it.

Rules that compute their message, or read files, are functions in the other modules.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from verlite.config import plan
from verlite.config.keys import get
from verlite.config.problems import Problem
from verlite.config.rules.context import Context

MOST_LORA_RANK = 512
"""Of vLLM 0.29 to 0.32."""
CHANGES_SCORE = (
    "changes the score, and algorithm.adv_estimator=gdpo compares the parts of the reward",
    "Leave it out; let the reward function return such a part.",
)
ENVIRONMENT = "verlite.rewards.environment"
"""custom_reward_function.path that adds up the rewards of an environment."""
BUILT_IN_METRICS = (None, "score", "acc", "seq_reward", "seq_final_reward")


class Row(NamedTuple):
    """One rule. In its texts, {c...} is a part of the context, or of a section of the schema."""

    key: str
    """The key that is reported, with its value."""
    is_violated: Callable[[Any], Any]
    rule: str
    remedy: str
    needs: tuple[str, ...] = ()
    """Other keys in the condition. It is not checked if one of them has a reported problem."""


def violations(
    rows: Sequence[Row], config: Any, context: Any = None, section: str = ""
) -> Iterator[Problem]:
    """Yield a problem for each row that is violated.

    Args:
        rows: the rules.
        config: what has the rows' keys: the whole configuration, or a section of it.
        context: what the conditions are asked of. None: `config`.
        section: name of the section with a dot after it.
    """
    c = config if context is None else context
    for key, is_violated, rule, remedy, needs in rows:
        if (not needs or c.ok(*needs)) and is_violated(c):
            names = {"c": c, "section": section}
            yield Problem(
                section + key, get(config, key), rule.format(**names), remedy.format(**names)
            )


def between_keys(c: Context) -> Iterator[Problem]:
    """The rows of ERRORS."""
    for problem in violations(ERRORS, c.config, c):
        yield problem
        c.broken.add(problem.key)  # rows below ask nothing more of it


# fmt: off
ERRORS: tuple[Row, ...] = (
    # Estimators, losses and KL terms
    Row("actor_rollout_ref.rollout.n", lambda c: c.n == 1 and c.needs_several,
        "algorithm.adv_estimator={c.estimator} compares the samples of one prompt, so it needs at "
        "least 2", "Use 4 to 16."),
    Row("critic.enable", lambda c: c.critic.enable is False and "values" in c.measured,
        "algorithm.adv_estimator={c.estimator} needs a critic",
        "Leave critic.enable out, or use grpo."),
    Row("actor_rollout_ref.actor.clip_ratio_low",
        lambda c: c.clips_ratio and (c.actor.clip_ratio_low or 0) > 1,
        "must be at most 1: a ratio is never below 0", "Usual: 0.2."),
    Row("actor_rollout_ref.actor.clip_ratio",
        lambda c: c.clips_ratio and c.actor.clip_ratio_low is None and c.actor.clip_ratio > 1,
        "must be at most 1: a ratio is never below 0", "Usual: 0.2."),
    Row("actor_rollout_ref.actor.clip_ratio_c",
        lambda c: c.loss_mode == "vanilla" and c.actor.clip_ratio_c <= c.clip_above,
        "must be more than 1 + the upper clip range = {c.clip_above:g}, otherwise it replaces the "
        "clip", "Usual: 3.", needs=("actor_rollout_ref.actor.clip_ratio_high",)),
    Row("actor_rollout_ref.actor.policy_loss.clip_cov_ub",
        lambda c: (c.loss_mode == "clip_cov"
            and c.actor.policy_loss.clip_cov_lb >= c.actor.policy_loss.clip_cov_ub),
        "must be above clip_cov_lb={c.actor.policy_loss.clip_cov_lb:g}: no token has a covariance "
        "between them", "Usual: 1 and 5."),
    Row("algorithm.kl_ctrl.kl_coef",
        lambda c: (c.algorithm.use_kl_in_reward and c.algorithm.kl_ctrl.type == "adaptive"
            and c.algorithm.kl_ctrl.kl_coef == 0),
        "algorithm.kl_ctrl.type=adaptive multiplies this weight to follow the KL, so 0 stays 0",
        "Start from 0.001, or use algorithm.use_kl_in_reward=false for no KL."),
    Row("distillation.teacher_models.teacher_model.model_path",
        lambda c: c.config.distillation.enabled and not (c.teacher.model_path or c.teacher.url),
        "distillation.enabled=true, but no teacher is named",
        "Give its folder or its name on the hub, or teacher_model.url of `verlite serve "
        "reference`."),
    Row("data.teacher_prompt_key",
        lambda c: (c.config.distillation.enabled and c.config.data.teacher_prompt_key
            and c.agent.command),
        "a teacher reads other prompts only where a sample has one prompt and one response; "
        "agent programs make conversations",
        "Leave out one of data.teacher_prompt_key and agent.command."),
    Row("algorithm.no_think_rl", lambda c: c.algorithm.no_think_rl,
        "only false is supported: the whole response is trained", "Leave it out."),
    Row("actor_rollout_ref.actor.state_masking", lambda c: not c.actor.state_masking,
        "tool output is always left out of the loss", "Leave it out, or use true."),
    # gdpo
    Row("algorithm.gdpo_reward_keys",
        lambda c: c.estimator == "gdpo" and not c.algorithm.gdpo_reward_keys,
        "does not name the reward parts that algorithm.adv_estimator=gdpo compares",
        "Such as [accuracy_reward,format_reward]: numbers that the reward function returns."),
    Row("algorithm.use_kl_in_reward",
        lambda c: c.estimator == "gdpo" and c.algorithm.use_kl_in_reward,
        "algorithm.adv_estimator=gdpo compares the parts of the reward, which have no KL",
        "Use actor_rollout_ref.actor.use_kl_loss=true."),
    Row("reward.mean", lambda c: c.estimator == "gdpo" and c.reward.mean != 0, *CHANGES_SCORE),
    Row("reward.std", lambda c: c.estimator == "gdpo" and c.reward.std != 1, *CHANGES_SCORE),
    Row("reward.clip_range", lambda c: c.estimator == "gdpo" and c.reward.clip_range is not None,
        *CHANGES_SCORE),
    Row("reward.overlong_buffer.enable", lambda c: c.estimator == "gdpo" and c.buffer.enable,
        *CHANGES_SCORE),
    # Asynchronous and pipelined training
    Row("actor_rollout_ref.rollout.name", lambda c: c.overlaps and c.engine == "server",
        "trainer.mode={c.trainer.mode} needs engines that take weights while they generate",
        "Use vllm or hf, or trainer.mode=sync."),
    Row("actor_rollout_ref.rollout.lora_sync",
        lambda c: c.overlaps and c.rollout.lora_sync == "adapter",
        "a running sample keeps its adapter, so no newer one can be loaded under it",
        "Use merged, or trainer.mode=sync."),
    Row("trainer.mode", lambda c: c.overlaps and c.shares_gpus,
        "needs GPUs for the engines alone: they sample while the others train",
        "Such as cluster.component_placement.rollout=4-7 and the other roles on 0-3."),
    Row("async_training.max_age",
        lambda c: c.is_async and c.async_training.max_age and not c.corrects_age,
        "samples of older weights need a correction, or the policy learns from the wrong ratio",
        "Use algorithm.rollout_correction.bypass_mode=true (the clip's ratio is against the "
        "weights that sampled) or algorithm.rollout_correction.rollout_is=token; or 0."),
    Row("async_training.depth",
        lambda c: c.is_async and (c.async_training.depth or 0) > c.async_training.max_age,
        "is more than async_training.max_age={c.async_training.max_age}, which is the limit before "
        "it", "Use null, or raise max_age."),
    # Training scores
    Row("reward.clip_range", lambda c: not _is_range(c.reward.clip_range),
        "must be two numbers, the lower one first", "Such as [-10,10]."),
    Row("reward.overlong_buffer.max_resp_len",
        lambda c: c.buffer.enable and c.full_penalty < c.data.max_response_length,
        "is less than data.max_response_length={c.data.max_response_length}: responses would be "
        "longer than the length of the full penalty",
        "Leave it out, or lower data.max_response_length.", needs=("data.max_response_length",)),
    Row("reward.overlong_buffer.len", lambda c: c.buffer.enable and c.buffer.len == 0,
        "must be >= 1", "Usual: a fifth of the longest response.",
        needs=("data.max_response_length",)),
    Row("reward.overlong_buffer.len",
        lambda c: c.buffer.enable and (c.buffer.len or 0) > c.full_penalty,
        "is more than {c.full_penalty_key}={c.full_penalty}: even an empty response would be "
        "penalized", "Usual: a fifth of it.", needs=("data.max_response_length",)),
    # Agents
    Row("data.max_start_length",
        lambda c: c.turns and (c.data.max_start_length or 0) > c.data.max_prompt_length,
        "is more than data.max_prompt_length={c.data.max_prompt_length}, which covers the first "
        "prompt and all turns before the last one", "Usual: half of it.",
        needs=("data.max_prompt_length",)),
    Row("reward.overlong_buffer.enable",
        lambda c: (c.turns or c.program) and c.buffer.enable,
        "is for single turns: the length of an agent's sample depends on its tools",
        "Leave it out, or use algorithm.mask_truncated=true."),
    Row("retriever.url",
        lambda c: (c.turns and plan.env_name(c.config) == "search"
            and not plan.files_of(c.config.retriever.url)),
        "is empty; env.name=search needs a retriever", "Such as http://127.0.0.1:8000/retrieve."),
    Row("agent.command",
        lambda c: c.agent.command is not None and not plan.program_words(c.agent.command),
        "is empty or has an open quote", "Such as 'python my_agent.py'."),
    Row("agent.preload", lambda c: c.agent.preload and c.agent.command is not None
            and not plan.can_fork(c.agent.command),
        "is for Python: for a file, or a function; agent.command={c.agent.command} is neither",
        "Leave it out, or set agent.command, such as 'python my_agent.py'."),
    Row("agent.credit", lambda c: c.program and not plan.is_credit(c.agent.credit),
        "is not graph, branch or a number above 0 and at most 1", "Such as 0.9."),
    Row("agent.verifiers", lambda c: c.agent.verifiers is not None and c.agent.command is not None,
        "runs in place of the program agent.command={c.agent.command}", "Leave one of them out."),
    Row("agent.verifiers", lambda c: c.agent.verifiers is not None
            and not c.agent.verifiers.rpartition("+")[2],
        "is not TASKSET or ENVIRONMENT+TASKSET", "Such as gsm8k-v1."),
    Row("agent.python", lambda c: c.agent.verifiers is not None and not c.agent.python,
        "must name the Python interpreter that has verifiers, whose dependencies differ from those "
        "of training", "uv venv envs/verifiers; uv pip install --python envs/verifiers "
        "'verifiers==0.4.*'; then agent.python=envs/verifiers/bin/python."),
    Row("max_turns", lambda c: c.turns and c.program,
        "asks for an environment, but {c.program} runs in its place",
        "Leave one of them out."),
    Row("agent.timeout_s",
        lambda c: c.program and c.agent.timeout_s >= c.trainer.phase_timeout_s,
        "must be less than trainer.phase_timeout_s={c.trainer.phase_timeout_s:g}, after which a "
        "step without progress ends", "Raise that key, too.", needs=("trainer.phase_timeout_s",)),
    Row("custom_reward_function.path",
        lambda c: c.scores_itself and c.config.custom_reward_function.path is not None,
        "does not score samples that {c.program} scores itself",
        "Use agent.reward=function, or leave the function out."),
    Row("reward.remote.url", lambda c: c.scores_itself and plan.scores_remotely(c.reward),
        "does not score samples that {c.program} scores itself",
        "Use agent.reward=function, or leave the service out."),
    Row("custom_reward_function.path",
        lambda c: c.program and c.config.custom_reward_function.path == ENVIRONMENT,
        "adds up rewards of an environment of verlite, and {c.program} has none",
        "Use agent.reward=program, or another function."),
    # Dynamic sampling
    Row("actor_rollout_ref.rollout.n", lambda c: c.groups.enable and c.n == 1,
        "the single sample of a prompt never differs, so algorithm.filter_groups.enable=true "
        "leaves no prompt to train on", "Use 4 to 16."),
    Row("algorithm.filter_groups.metric",
        lambda c: (c.groups.enable and c.groups.metric not in BUILT_IN_METRICS
            and c.config.custom_reward_function.path is None
            and not (plan.scores_remotely(c.reward) or c.scores_itself)),
        "the built-in reward functions return only a score", "Use score or seq_reward."),
    Row("algorithm.filter_groups.metric",
        lambda c: c.groups.enable and c.groups.metric == "seq_final_reward",
        "contains the KL penalty, which is known only after prompts are selected",
        "Use seq_reward or score."),
    # Engines
    Row("actor_rollout_ref.rollout.max_model_len", lambda c: c.max_model_len < c.longest,
        "is less than data.max_prompt_length + data.max_response_length = {c.longest}",
        "Leave it out, or use at least {c.longest}."),
    Row("actor_rollout_ref.rollout.max_num_batched_tokens",
        lambda c: (c.engine == "vllm" and not c.rollout.enable_chunked_prefill
            and c.rollout.max_num_batched_tokens < c.max_model_len),
        "is less than the longest sequence, {c.max_model_len} tokens, while "
        "enable_chunked_prefill=false",
        "Use at least {c.max_model_len}, or "
        "actor_rollout_ref.rollout.enable_chunked_prefill=true."),
    Row("actor_rollout_ref.rollout.servers",
        lambda c: c.engine == "server" and not plan.servers(c.config),
        "actor_rollout_ref.rollout.name=server needs addresses",
        "Such as http://127.0.0.1:8000; `verlite serve generation` starts a server."),
    Row("actor_rollout_ref.rollout.lora_sync",
        lambda c: c.rollout.lora_sync == "adapter" and not plan.uses_lora(c.model),
        "the policy has no adapters", "Set actor_rollout_ref.model.lora_rank, or leave it out."),
    Row("actor_rollout_ref.rollout.lora_sync",
        lambda c: c.rollout.lora_sync == "adapter" and c.engine != "vllm",
        "the engine {c.engine} takes only merged weights", "Use rollout.name=vllm."),
    Row("actor_rollout_ref.rollout.lora_sync",
        lambda c: c.rollout.lora_sync == "adapter" and c.model.lora_rank > MOST_LORA_RANK,
        f"vLLM applies adapters up to rank {MOST_LORA_RANK}, and "
        "actor_rollout_ref.model.lora_rank={c.model.lora_rank}", "Use merged."),
    # Validation and checkpoints
    Row("trainer.default_hdfs_dir", lambda c: c.trainer.default_hdfs_dir is not None,
        "remote file systems are not supported",
        "Use null, and trainer.default_local_dir on a shared folder."),
    Row("trainer.test_freq", lambda c: c.trainer.test_freq > 0 and not c.val_files,
        "needs validation files", "Give data.val_files."),
    Row("trainer.val_only", lambda c: c.trainer.val_only and not c.val_files,
        "needs validation files", "Give data.val_files."),
    Row("trainer.val_before_train",
        lambda c: (c.trainer.val_before_train and "trainer.val_before_train" in c.user_keys
            and not c.val_files), "needs validation files", "Give data.val_files."),
)
"""Rules of main_ppo. docs/rules.md has an example of each."""

OPTIMIZER = (
    Row("betas", lambda c: len(c.betas) != 2, "must be two numbers", "Usual: [0.9,0.999]."),
)
"""Rules of each section `optim`."""

MODEL = (
    Row("target_modules", lambda c: not _names_modules(c.target_modules),
        "must be a list of module names, or a regular expression", "Such as [q_proj,v_proj]."),
    Row("exclude_modules", lambda c: not _names_modules(c.exclude_modules),
        "must be a list of module names, or a regular expression", "Such as [q_proj,v_proj]."),
    Row("lora_alpha",
        lambda c: c.lora_rank > 0 and not c.lora_adapter_path and c.lora_alpha == 0,
        "multiplies the output of every adapter by 0", "Usual: lora_rank, or twice that."),
    Row("target_modules", lambda c: plan.uses_lora(c) and not c.target_modules,
        "names no layer to adapt", "Usual: all-linear."),
    Row("enable_activation_offload",
        lambda c: c.enable_activation_offload and c.enable_gradient_checkpointing is not True,
        "offloads the inputs of layers, which is all that is stored with "
        "{section}enable_gradient_checkpointing=true only",
        "Turn both on, or this off."),
)
# fmt: on
"""Rules of each section `model` that is trained."""


def _is_range(value: list[float] | None) -> bool:
    return value is None or (len(value) == 2 and value[0] < value[1])


def _names_modules(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, str) for item in value)
    return value is None or isinstance(value, str)
