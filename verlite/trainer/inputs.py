"""What a run reads before its workers start: functions of the algorithm, tokenizer, environment,
prompts and their order.

torch and transformers are imported in functions, because `verlite check` uses this file too.
"""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verlite.chat_template import limited
from verlite.config.compile import data_spec, env_spec, model_spec
from verlite.config.plan import Plan
from verlite.config.schema import Config, ModelConfig
from verlite.data.dataset import PromptDataset, RowFiles, overlap_note, refuse_foreign_tokens
from verlite.data.sampler import PromptSampler, own_order
from verlite.envs.chat import TemplateError
from verlite.envs.factory import EnvFactory, build_env_factory, encoder
from verlite.envs.step import Step
from verlite.spec.catalog import ESTIMATORS, POLICY_LOSSES, resolve
from verlite.trainer.errors import RunRefused

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


class HubMissing(RunRefused):
    """The model is a name on the hub, which cannot be reached from here."""


def load_policy_tokenizer(
    model: ModelConfig,
) -> tuple["PreTrainedTokenizerBase", "PretrainedConfig"]:
    """Load the policy's tokenizer and its config.json.

    A broken config.json fails here in a second; in the workers it would take many.

    Raises:
        RunRefused: either cannot be loaded. HubMissing: because the hub cannot be reached.
    """
    from verlite.engine.folder import HubUnreachable, ModelError, load_config, load_tokenizer

    try:
        spec = model_spec(model)
        described = load_config(spec)
        return load_tokenizer(spec), described
    except HubUnreachable as error:
        raise HubMissing(f"actor_rollout_ref.{error}") from error
    except ModelError as error:
        raise RunRefused(f"actor_rollout_ref.{error}") from error


def prove_models(config: Config, plan: Plan) -> list[str]:
    """Compare small copies of the policy and the critic with transformers, as workers do when they
    load them. Return warnings.

    Raises:
        RunRefused: the engine cannot train such a model.
    """
    from verlite.engine import family
    from verlite.engine.folder import HubUnreachable, ModelError

    models = [("actor_rollout_ref", model_spec(config.actor_rollout_ref.model), "lm")]
    if "critic" in plan.roles:
        critic = model_spec(config.critic.model, path=plan.critic_model_path)
        models.append(("critic", critic, "value"))
    warnings = []
    for section, model, kind in models:
        try:
            unproven = family.check(model, kind)
            warnings += [f"{section}.{unproven}"] if unproven else []
        except HubUnreachable as error:
            warnings.append(f"{section}.{error}. So the model was not tried")
        except ModelError as error:
            raise RunRefused(f"{section}.{error}") from error
    return warnings


def read_rows(config: Config, first: int | None = None) -> tuple[RowFiles, RowFiles | None]:
    """Read the first rows (None: all) of the files of training and validation.

    Raises:
        DataError: they cannot be used. RunRefused: a data set written for verl needs the tokenizer,
        which cannot be loaded.
    """
    data, spec = config.data, data_spec(config.data)
    tokenizer = functools.cache(lambda: load_policy_tokenizer(config.actor_rollout_ref.model)[0])
    train = RowFiles(data.train_files, spec, "train", first, tokenizer)
    val = RowFiles(data.val_files, spec, "val", first, tokenizer) if data.val_files else None
    return train, val


def check_functions(config: Config) -> None:
    """Look up the estimator and the policy loss, which may be the user's own, before workers start.

    Raises:
        RunRefused: one of them does not exist.
    """
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    try:
        resolve(config.algorithm.adv_estimator, ESTIMATORS, "algorithm.adv_estimator")
        resolve(loss_mode, POLICY_LOSSES, "actor_rollout_ref.actor.policy_loss.loss_mode")
    except ValueError as error:
        raise RunRefused(str(error)) from error


def load_environment(
    config: Config, plan: Plan, tokenizer: "PreTrainedTokenizerBase"
) -> EnvFactory | None:
    """Build the environment factory and encode one observation. None for single-turn runs.

    Raises:
        RunRefused: the environment does not exist, the chat template does not support its tools, or
            `data.max_obs_length` leaves no room for an observation.
    """
    if not plan.max_turns:
        return None
    limit = config.data.max_obs_length
    try:
        factory = build_env_factory(env_spec(config))
        encode = encoder(factory, tokenizer, config.data.apply_chat_template_kwargs)
        before, after = factory.around
        encode(Step("gizmo " * limit, before, after), [], limit)
    except (TemplateError, ValueError) as error:
        raise RunRefused(str(error)) from error
    return factory


def load_datasets(
    config: Config,
    plan: Plan,
    rows: tuple[RowFiles, RowFiles | None],
    tokenizer: "PreTrainedTokenizerBase",
    described: "PretrainedConfig",
    env_factory: EnvFactory | None,
) -> tuple[PromptDataset, PromptDataset | None]:
    """Tokenize and measure the prompts of training and validation.

    Args:
        described: the model's config.json.

    Raises:
        DataError: a prompt cannot be used, or has tokens that the model does not have.
    """
    from verlite.engine.folder import vocab_size

    limit = (plan.longest_prompt_key, plan.longest_prompt)
    tools = env_factory.tools if env_factory else ()
    tokens = vocab_size(described)

    def load(files: RowFiles, split: str) -> PromptDataset:
        data = PromptDataset(files, tokenizer, data_spec(config.data), split, limit, tools)
        if tokens is not None:
            refuse_foreign_tokens(data, tokens)
        return data

    train, val = rows
    return load(train, "train"), load(val, "val") if val else None


def make_sampler(config: Config, plan: Plan, train: PromptDataset) -> PromptSampler:
    """Return the order of the training prompts, the user's own (data.sampler) or a permutation.

    If only the first rows were read, a batch may be as large as them: the run has more.

    Raises:
        DataError: data.sampler cannot be used, or there is not one full batch.
    """
    order = own_order(data_spec(config.data), train)
    size = len(train) if order is None else len(order(0))
    batch = plan.gen_prompts
    if train.report().in_files:
        batch = min(batch, size)
    data = config.data
    return PromptSampler(size, batch, data.seed, data.shuffle, plan.gen_prompts_key, order)


def data_lines(
    tokenizer: Any,
    train: PromptDataset,
    val: PromptDataset | None,
    options: Mapping[str, Any],
) -> list[str]:
    """Return lines about the prompts: how many, how long, in both splits, and what the chat
    template lacks.

    Args:
        options: data.apply_chat_template_kwargs.
    """
    lines = [str(train.report())]
    if val is not None:
        overlap = overlap_note(train, val)
        lines += [str(val.report()), *([overlap] if overlap else [])]
    if tokenizer.chat_template is None:
        lines.append(
            "the tokenizer has no chat template, so a prompt is the text of its messages, joined "
            "by newlines. For a chat model set actor_rollout_ref.model.custom_chat_template"
        )
    elif header := missing_header(tokenizer, options):
        lines.append(
            f"the chat template begins a message of the assistant with {header!r}, but "
            "add_generation_prompt does not add it: the model is asked without it. Correct the "
            "template (actor_rollout_ref.model.custom_chat_template)"
        )
    return lines


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
