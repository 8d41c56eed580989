"""Checks of RL training alone (rows of `preflight.CHECKS`).

torch is imported in functions: the first of them run before it is loaded.
"""

import functools
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from verlite.chat_template import limited
from verlite.config.compile import (
    data_spec,
    env_spec,
    generation_spec,
    model_spec,
    reference_service_spec,
    scorer_spec,
    take,
    teacher_model_spec,
    teacher_service_spec,
)
from verlite.config.plan import (
    TEACHER,
    program,
    program_words,
    scores_itself,
    scores_remotely,
)
from verlite.config.rules.models import rotary_limit
from verlite.config.schema import ModelConfig
from verlite.controller import head
from verlite.data.dataset import (
    DataError,
    PromptDataset,
    RowFiles,
    overlap_note,
    refuse_foreign_tokens,
)
from verlite.data.sampler import PromptSampler, own_order
from verlite.engine import reference_client
from verlite.engine.reference_client import ReferenceUnavailable, WrongReference
from verlite.engine.reference_wire import ModelInfo
from verlite.envs.chat import TemplateError
from verlite.envs.factory import build_env_factory, check_env_factory, encoder
from verlite.envs.step import Step, ToolError
from verlite.files import read_json
from verlite.http.client import TokenError
from verlite.importing import is_function
from verlite.rewards import environment as environment_reward
from verlite.rewards.process import FunctionError
from verlite.rewards.scorer import Scorer
from verlite.rollout.servers import fit
from verlite.rollout.servers.fit import Needs, NoServer
from verlite.spec.catalog import ESTIMATORS, POLICY_LOSSES, resolve
from verlite.spec.roles import AgentSpec, ReferenceServiceSpec
from verlite.trainer.common_checks import compare_small_copy, fit_adapters, reading, tokenizer_of
from verlite.trainer.errors import RunRefused, ServiceMissing
from verlite.trainer.preflight import Preflight
from verlite.trainer.reference import URL

ANSWERS_TO_CHECK = 8
"""Ground-truth answers on which the reward function is tried before the run."""


@contextmanager
def refused(*wrong: type[Exception], missing: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Turn errors of the classes `wrong` into RunRefused, and of `missing` into ServiceMissing."""
    try:
        yield
    except missing as error:
        raise ServiceMissing(str(error)) from error
    except wrong as error:
        raise RunRefused(str(error)) from error


def rows(found: Preflight, split: str) -> None:
    """Read the files of a split. A data set written for verl needs the tokenizer."""
    data = found.config.data
    files = data.train_files if split == "train" else data.val_files
    if split == "train" or files:
        needed = functools.partial(tokenizer_of, found)
        found.rows[split] = RowFiles(files, data_spec(found.config), split, found.first, needed)


def reward_function(found: Preflight) -> None:
    """Load the reward function and try it on ground-truth answers, or ask the reward service.

    With trainer.debug it is only loaded: breakpoint() must not stop in it here. This scorer is only
    for the check; each rollout worker has its own.

    Raises:
        UnknownDataSource: a data source has no scorer.
        DataError: a row for a built-in scorer has no ground truth.
        FunctionError: the user's function cannot be loaded, or has the wrong parameters.
        ServiceMissing: the reward service does not answer.
        RunRefused: the variable with the service's token is not set.
    """
    config = found.config
    if scores_itself(config):
        return
    sources = [source for files in found.rows.values() for source in files.data_sources()]
    with refused(TokenError):
        scorer = Scorer(scorer_spec(config.custom_reward_function, config.reward))
    with closing(scorer):
        if scores_remotely(config.reward):
            with refused(missing=FunctionError):
                warning = scorer.check_service()
            found.findings.warnings += [warning] if warning else []
            return
        scorer.check_signature(sources)
        if config.custom_reward_function.path is None:
            refuse_missing_answers(*found.rows.values())
        by_environment = config.custom_reward_function.path == environment_reward.NAME
        if config.trainer.debug or by_environment or not config.reward.check_ground_truth:
            return
        warning = scorer.self_check(found.rows["train"].answers(ANSWERS_TO_CHECK)).warning()
        found.findings.warnings += [warning] if warning else []


def refuse_missing_answers(*splits: RowFiles) -> None:
    """Raise DataError if a row has no ground truth, which built-in scorers compare with."""
    for files in splits:
        name = files.without_answer()
        if name:
            raise DataError(
                f"{name}: reward_model.ground_truth is null, and the built-in scorers compare "
                "responses with it. Give the answer, drop the row, or score with "
                "custom_reward_function.path"
            )


def tools(found: Preflight) -> None:
    """Ask the environment whether its tools answer. Raises ServiceMissing, RunRefused."""
    if not found.plan.max_turns:
        return
    with refused(ValueError, missing=ToolError):
        warning = check_env_factory(build_env_factory(env_spec(found.config)))
    found.findings.warnings += [warning] if warning else []


def reference_service(found: Preflight) -> None:
    """Ask the reference service for its model.

    Raises:
        ServiceMissing: it does not answer.
        RunRefused: it cannot take the run's longest sequence.
    """
    if found.plan.reference_urls:
        found.service = _model_of(found, reference_service_spec(found.config))


def teacher_service(found: Preflight) -> None:
    """Ask the service with the teacher for its model. Raises as `reference_service`."""
    if found.plan.teacher_urls:
        found.teacher_service = _model_of(found, teacher_service_spec(found.config))


def _model_of(found: Preflight, service: ReferenceServiceSpec) -> ModelInfo:
    with refused(WrongReference, missing=ReferenceUnavailable):
        info, warning = reference_client.check(service)
    found.findings.warnings += [warning] if warning else []
    longest = found.plan.longest_sequence
    if info.max_length < longest:
        raise RunRefused(
            f"{service.section}.url: the service's model {info.name} takes sequences of up to "
            f"{info.max_length} tokens; samples of this run may have {longest}"
        )
    return info


def teacher(found: Preflight) -> None:
    """Compare the teacher's tokens with the policy's, whose samples it judges, and a small copy of
    it with transformers. Raises RunRefused, HubMissing."""
    if not found.config.distillation.enabled:
        return
    from verlite.engine import folder

    info = found.teacher_service
    if info is not None:
        key, name = f"{TEACHER}url", info.name
        size, digest, differences = info.vocab_size, info.vocabulary, ""
    else:
        spec = teacher_model_spec(found.config)
        key, name = f"{TEACHER}model_path", spec.path
        with reading(spec, f"{key}: "):
            tokenizer = folder.load_tokenizer(spec)
            described = folder.load_config(spec)
        size, digest = folder.vocab_size(described), folder.vocabulary_digest(tokenizer)
        differences = _differences(found.tokenizer.get_vocab(), tokenizer.get_vocab())
        positions = getattr(described.get_text_config(), "max_position_embeddings", None)
        if positions and positions < found.plan.longest_sequence:
            raise RunRefused(
                f"{key}={name}: the teacher has {positions} positions; samples of this run may "
                f"have {found.plan.longest_sequence} tokens"
            )
        compare_small_copy(found, spec, f"{key}: ", "lm")
    if not digest:
        raise RunRefused(
            f"{key}: the service has the teacher {name} without a tokenizer, so it cannot be "
            "compared with the policy's. Put tokenizer.json and tokenizer_config.json beside the "
            "model, and start the service again"
        )
    if digest != folder.vocabulary_digest(found.tokenizer):
        raise RunRefused(
            f"{key}: the teacher {name} has another tokenizer than "
            f"actor_rollout_ref.model.path={found.model.path}{differences}. It gets the policy's "
            "token ids, so both need the same. Use a teacher of the policy's family"
        )
    own = folder.vocab_size(found.described)
    if size and own and size < own:
        raise RunRefused(
            f"{key}: the teacher {name} has {size} token ids, and the policy may sample {own}. Use "
            "a teacher with at least as many"
        )


def _differences(own: Mapping[str, int], others: Mapping[str, int]) -> str:
    """Return how many tokens have other ids, and the first of them, in words."""
    found = sorted(t for t in own.keys() | others.keys() if own.get(t) != others.get(t))
    if not found:
        return ""
    first = found[0]
    return (
        f": {len(found)} tokens differ, the first is {first!r} with id {others.get(first)} instead "
        f"of {own.get(first)}"
    )


def reference_model(found: Preflight) -> None:
    """Compare the reference service's model with the run's config.json. Raises RunRefused:
    vocabulary, layers or another size differ."""
    info, path = found.service, found.model.path
    if info is None:
        return
    text = found.described.get_text_config()
    different = [
        f"{name} {value} instead of {getattr(text, name)}"
        for name, value in info.shape.items()
        if hasattr(text, name) and getattr(text, name) != value
    ]
    if different:
        raise RunRefused(
            f"{URL}: the service has another model, {info.name}, than "
            f"actor_rollout_ref.model.path={path}: {', '.join(different)}. Start it with "
            f"--model_path {path}"
        )


def generation_servers(found: Preflight) -> None:
    """Ask the generation servers, if the run has any, whether they fit the run. A run waits for
    them.

    Raises:
        ServiceMissing: none answers within rollout.server_wait_s.
        RunRefused: one cannot be used.
    """
    config, plan = found.config, found.plan
    if not plan.servers:
        return
    # With device=auto a joined cluster decides the device, and that the default of the dtype.
    dtype = None if config.trainer.device == "auto" else plan.rollout_dtype
    policy = config.actor_rollout_ref
    needs = Needs(plan.max_model_len, vocab_size(policy.model), dtype)
    with refused(ValueError, missing=NoServer):
        spec = generation_spec(policy.rollout, policy.model)
        warning = fit.check(spec, needs, found.say, waits=found.is_run)
    found.findings.warnings += [warning] if warning else []


def ray_cluster(found: Preflight) -> None:
    """Find the Ray cluster to join. A run waits for it once all checks are done.

    Raises:
        NoCluster: what answers there cannot be joined. ServiceMissing: it does not answer.
    """
    address = found.config.ray_kwargs.ray_init.address
    found.ray_address = head.find(address)
    if found.ray_address and not found.is_run:
        missing = head.missing(found.ray_address, address, cluster_wait_s(found.config))
        if missing:
            raise ServiceMissing(missing)


def cluster_wait_s(config: Any) -> float:
    """Return how long a run waits for the cluster, in seconds."""
    wait_s: float | None = config.ray_kwargs.wait_s
    return config.trainer.resource_wait_s if wait_s is None else wait_s


def estimator(found: Preflight) -> None:
    """Look up the advantage estimator, which may be the user's own. Raises RunRefused."""
    _resolve(found.config.algorithm.adv_estimator, ESTIMATORS, "algorithm.adv_estimator")


def policy_loss(found: Preflight) -> None:
    """Look up the policy loss, which may be the user's own. Raises RunRefused."""
    loss_mode = found.config.actor_rollout_ref.actor.policy_loss.loss_mode
    _resolve(loss_mode, POLICY_LOSSES, "actor_rollout_ref.actor.policy_loss.loss_mode")


def _resolve(name: str, table: Mapping[str, Any], key: str) -> None:
    if name not in table:  # the user's own
        with refused(ValueError):
            resolve(name, table, key)


def positions(found: Preflight) -> None:
    """Refuse sequences that are longer than the model's rotary embedding allows, as transformers
    reads its config.json: the rules know neither a model from the hub nor all names of old files.
    Raises RunRefused."""
    for problem in rotary_limit(found.config, found.described.get_text_config().to_dict()):
        raise RunRefused(str(problem))


def trainable_critic(found: Preflight) -> None:
    """Compare a small copy of the critic with transformers, and fit its adapters. Raises
    RunRefused."""
    if "critic" in found.plan.roles:
        critic = model_spec(found.config.critic.model, path=found.plan.critic_model_path)
        compare_small_copy(found, critic, "critic.", "value")
        fit_adapters(critic, "critic.", "value")


def verifiers_environment(found: Preflight) -> None:
    """Start the process of a verifiers environment, and end it. Raises RunRefused."""
    agent = found.config.agent
    if agent.verifiers is None:
        return
    from verlite.gateway import verifiers
    from verlite.gateway.program import ProgramError

    try:
        version = verifiers.check(take(AgentSpec, agent), "")
    except ProgramError as error:
        raise RunRefused(f"agent.verifiers={agent.verifiers}: {error}") from error
    found.findings.seen.append(f"{agent.verifiers}: served by verifiers {version}")


def agent_imports(found: Preflight) -> None:
    """Import agent.preload in the Python of agent programs, as each engine does. Raises
    RunRefused."""
    agent = found.config.agent
    if not agent.preload:
        return
    from verlite.gateway import forks
    from verlite.own_process import ProcessEnded

    plan, own = found.plan, found.config.ray_kwargs.ray_init.runtime_env.py_executable
    other = []
    for node in sorted({device // plan.devices_per_node for device in plan.placement["rollout"]}):
        if is_function(program_words(agent.command)) and node in plan.python:
            other.append(f"python_interpreter_path={plan.python[node]} (cluster.node_groups)")
        elif is_function(program_words(agent.command)) and own:
            other.append(f"ray_kwargs.ray_init.runtime_env.py_executable={own}")
        if plan.env_vars.get(node):
            other.append(f"env_vars {', '.join(plan.env_vars[node])} (cluster.node_groups)")
    if other:
        found.findings.warnings.append(
            f"agent.preload={agent.preload} was not tried: the engines start programs with "
            f"{', '.join(dict.fromkeys(other))}"
        )
        return
    with refused(ProcessEnded):
        found.findings.seen.append(forks.check(take(AgentSpec, agent), found.say))


def environment(found: Preflight) -> None:
    """Build the environment factory of multi-turn runs, and encode one observation.

    Raises:
        RunRefused: the environment does not exist, the chat template does not support its tools, or
            `data.max_obs_length` leaves no room for an observation.
    """
    if not found.plan.max_turns:
        return
    config = found.config
    limit = config.data.max_obs_length
    with refused(TemplateError, ValueError):
        factory = build_env_factory(env_spec(config))
        encode = encoder(factory, found.tokenizer, config.data.apply_chat_template_kwargs)
        before, after = factory.around
        encode(Step("gizmo " * limit, before, after), [], limit)
    found.env_factory = factory


def prompts(found: Preflight, split: str) -> None:
    """Tokenize and measure the prompts. Say how many, how long, in both splits, and what the chat
    template lacks. Raises DataError."""
    if split not in found.rows:
        return
    config, plan = found.config, found.plan
    limit = (plan.longest_prompt_key, plan.longest_prompt)
    tools = found.env_factory.tools if found.env_factory else ()
    spec = data_spec(config)
    data = PromptDataset(found.rows[split], found.tokenizer, spec, split, limit, tools)
    found.data[split] = data
    lines: list[str | None] = [str(data.report)]
    if split == "train":
        lines.append(template_remark(found.tokenizer, config.data.apply_chat_template_kwargs))
        asks_in_messages = program(config) and config.agent.renderer is None
        if asks_in_messages and found.tokenizer.chat_template is None:
            lines.append("without a chat template the program's chat/completions are refused")
    elif "train" in found.data:
        lines.append(overlap_note(found.data["train"], data))
    found.findings.seen += filter(None, lines)


def tokens(found: Preflight, split: str) -> None:
    """Refuse prompts with tokens that the model does not have. Raises DataError."""
    from verlite.engine import folder

    count = folder.vocab_size(found.described)
    if split in found.data and count is not None:
        refuse_foreign_tokens(found.data[split], count)


def order(found: Preflight) -> None:
    """Make the order of the training prompts, the user's own (data.sampler) or a permutation.

    If only the first rows were read, a batch may be as large as them: the run has more.

    Raises:
        DataError: data.sampler cannot be used, or there is not one full batch.
    """
    data, plan, train = found.config.data, found.plan, found.data["train"]
    own = own_order(data_spec(found.config), train)
    size = len(train) if own is None else len(own(0))
    batch = plan.gen_prompts
    found.is_whole = not train.report.in_files
    if not found.is_whole:
        batch = min(batch, size)
    found.sampler = PromptSampler(size, batch, data.seed, data.shuffle, plan.gen_prompts_key, own)


def template_remark(tokenizer: Any, options: Mapping[str, Any]) -> str | None:
    """Return what the chat template lacks. options: data.apply_chat_template_kwargs."""
    if tokenizer.chat_template is None:
        return (
            "the tokenizer has no chat template, so a prompt is the text of its messages, joined "
            "by newlines. For a chat model set actor_rollout_ref.model.custom_chat_template"
        )
    header = missing_header(tokenizer, options)
    if not header:
        return None
    return (
        f"the chat template begins a message of the assistant with {header!r}, but "
        "add_generation_prompt does not add it: the model is asked without it. Correct the "
        "template (actor_rollout_ref.model.custom_chat_template)"
    )


def missing_header(tokenizer: Any, options: Mapping[str, Any]) -> str:
    """Return what the chat template writes before a message of the assistant and the prompts lack.

    "" if there is nothing, or if the template cannot show it.

    Args:
        options: data.apply_chat_template_kwargs.
    """
    question = {"role": "user", "content": "gizmo"}
    answer = {"role": "assistant", "content": "widget"}

    def rendered(*messages: Mapping[str, str], prompt: bool = False) -> str:
        with limited(tokenizer):
            text: str = tokenizer.apply_chat_template(
                list(messages), tokenize=False, **{**options, "add_generation_prompt": prompt}
            )
        return text

    try:
        asked = rendered(question)
        header, found, _ = rendered(question, answer).removeprefix(asked).partition("widget")
        missing = found and header.strip() and rendered(question, prompt=True) == asked
    except Exception:  # what is wrong with the template is said where the prompts are made
        return ""
    return header if missing else ""


def vocab_size(model: ModelConfig) -> int | None:
    """Return the vocabulary's size by the model's config.json; None if that does not say it."""
    try:
        values = read_json(Path(model.path) / "config.json")
        size = values.get("text_config", values)["vocab_size"]
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return None
    return size if isinstance(size, int) else None
