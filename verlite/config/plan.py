"""Derive every number and choice that follows from a configuration, in one typed object.

The configuration keeps verl's units. All other packages read the plan, so values are never rescaled
in place and the meaning of null is resolved in one place.
"""

import functools
import importlib.util
import math
import os
import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from verlite import machine, tables
from verlite.config.placement import Shape, draw, parse, ranges, read_groups, role_names
from verlite.config.schema import (
    ActorConfig,
    Config,
    CriticConfig,
    FSDPConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
)
from verlite.hub import HubError, local_file
from verlite.importing import is_function
from verlite.masking import display
from verlite.spec import catalog, correction
from verlite.spec.correction import RolloutCorrection
from verlite.spec.roles import Micro, Updates
from verlite.spec.weight_routes import WeightRoutes, weight_routes
from verlite.terminal import counted, facts_table

if TYPE_CHECKING:
    from rich.table import Table

ROLLOUT = "actor_rollout_ref.rollout."
REF = "actor_rollout_ref.ref."
TEACHER = "distillation.teacher_models.teacher_model."


@dataclass(frozen=True)
class Plan:
    """All sizes and choices derived from a configuration.

    Letters as in the design: G prompts, N samples each, B = G*N rows.
    """

    nnodes: int
    devices_per_node: int
    device: str
    """cuda or cpu."""
    roles: tuple[str, ...]
    """Roles of this run: actor and rollout always, inference if it is placed, ref and critic if
    something uses them."""
    placement: dict[str, list[int]]
    """Devices of each role, in rank order, numbered over the cluster."""
    drawing: str
    """The placement as a picture; "" for one node whose devices all roles share."""
    env_vars: dict[int, dict[str, str]]
    """Environment variables of the workers on each node, by node rank."""
    python: dict[int, str]
    """Python interpreter of the workers on each node, by node rank."""
    sequence_parallel: dict[str, int]
    """For each role with a training engine: the adjacent ranks that share each sequence."""

    prompts: int
    """G: prompts per step."""
    samples_per_prompt: int
    """N."""
    batch_size: int
    """B = G*N: samples per step."""
    actor: Updates
    critic: Updates | None
    log_prob_micro: Micro
    """Old log-probs."""
    ref_micro: Micro | None
    """Log-probs of reference and teacher."""
    value_micro: Micro | None
    """Values."""

    needs_reference: bool
    reference_is_actor: bool
    """With LoRA: the policy without its adapters is the reference. `inference` computes it if that
    role is placed, otherwise the actor."""
    reference_urls: list[str]
    """Addresses of the service that computes reference log-probs; [] if the run does."""
    teacher: str | None
    """The teacher's model, as the run loads it. None: a service has it, or there is no teacher."""
    teacher_urls: list[str]
    """Addresses of the service with the teacher."""
    needs_greedy_baseline: bool
    """remax: one additional greedy sample per prompt."""
    needs_old_log_probs: bool
    """Compute old log-probs before the updates. False: the step has a single update, whose own
    log-probs are the old ones, nothing else reads them, and no role `inference` is placed.
    """
    needs_sum_pi_squared: bool
    """optimal_token_baseline: computed together with old log-probs."""
    loss_mode: str
    """The policy loss: policy_loss.loss_mode, or the loss of bypass mode."""
    correction: RolloutCorrection
    """Settings of algorithm.rollout_correction, with its preset expanded."""
    overlaps_gradients: bool
    """trainer.mode=pipelined: gradients of the first optimizer step are computed while the step's
    other prompts are sampled. False: only log-probs and values are."""
    gen_prompts: int
    """Prompts per generation."""
    gen_prompts_key: str
    """Key that sets gen_prompts, for error messages."""
    overlong_buffer: int
    """Tokens before the longest length over which the length penalty grows."""
    filters_groups: bool
    """Dynamic sampling: prompts whose samples all have the same metric are dropped, and a step
    generates until it has enough prompts.
    """
    critic_warmup: int
    """The first step that updates the policy; those before it update only the critic.

    0 without a critic.
    """
    clip_low: float
    clip_high: float
    loss_scale: float
    """Divisor of seq-mean-token-sum-norm."""
    critic_model_path: str | None

    max_turns: int
    """Tool calls allowed per sample. 0: single turn."""
    longest_prompt: int
    """Largest number of tokens of the first prompt."""
    longest_prompt_key: str
    """Key that sets longest_prompt, for error messages."""
    longest_response: int
    """Largest number of tokens after the prompt, observations included."""
    longest_sequence: int
    """Largest number of tokens of a whole sample."""

    rollout_name: str
    """"vllm", "hf" or "server"."""
    servers: tuple[str, ...]
    """Addresses of the servers that generate. Then the role rollout is one process without a
    device, beside the actor's first rank. () without servers."""
    tensor_parallel: int
    """Devices per engine. 1 for hf and server."""
    weights: WeightRoutes
    """How each engine, and each rank of `inference`, gets the trainer's weights."""
    max_model_len: int
    """Longest sequence in tokens."""
    train_dtype: str
    """Compute dtype of the actor."""
    rollout_dtype: str
    """Dtype of the engine's weights."""
    syncs_adapters: bool
    """rollout.lora_sync=adapter: engines get the adapters separately from the base model."""

    train_rows: int | None
    """Rows in the training files, after train_max_samples, before length filtering.

    None: not counted.
    """
    val_rows: int | None
    steps_per_epoch: int | None
    total_steps: int | None
    """Training steps of the whole run. None: unknown until the data are counted."""
    total_epochs: int | None
    """Passes over the data after which the run ends. None: without limit."""
    total_training_steps: int | None
    """trainer.total_training_steps: the run ends after them, and schedules are this long."""
    validates_first: bool
    """Validate before step 1. val_only implies it."""
    choices: list[tuple[str, str]]
    """Rows of the table about model, algorithm and run, as (name, text)."""
    turns: str
    """Largest length of an agent's samples, in words; "" for single turns."""

    @property
    def n_devices(self) -> int:
        """Devices of the whole run."""
        return self.nnodes * self.devices_per_node

    @property
    def rows_per_rank(self) -> tuple[int, int]:
        """Fewest and most rows of a step per actor rank, or per sequence-parallel group of
        ranks."""
        groups = len(self.placement["actor"]) // self.sequence_parallel["actor"]
        return self.batch_size // groups, math.ceil(self.batch_size / groups)

    @property
    def engines(self) -> int:
        """Rollout processes: copies of the model that generate, or 1 for all servers."""
        return len(self.placement["rollout"]) // self.tensor_parallel

    @property
    def device_roles(self) -> tuple[str, ...]:
        """Roles that compute on devices of the run: all, but rollout if servers generate."""
        return tuple(role for role in self.roles if role != "rollout" or not self.servers)

    @property
    def sync_dtype(self) -> str:
        """Dtype in which a weight sync sends the weights: the engines', unless that would round
        what `inference` computes with. Engines round float32 themselves, to the same values."""
        loses_nothing = self.rollout_dtype in (self.train_dtype, "float32")
        return self.rollout_dtype if "inference" not in self.roles or loses_nothing else "float32"

    def steps(self, train_rows: int) -> tuple[int, int]:
        """Return the training steps (per epoch, of the whole run) for a number of training rows."""
        epochs, steps = self.total_epochs, self.total_training_steps
        return run_length(train_rows, self.prompts, epochs, steps)

    def with_rows(self, train_rows: int) -> "Plan":
        """Return the plan for a number of training rows."""
        per_epoch, total = self.steps(train_rows)
        return replace(self, train_rows=train_rows, steps_per_epoch=per_epoch, total_steps=total)

    def sentence(self) -> str:
        """Return the batch arithmetic in one line."""
        low, high = self.rows_per_rank
        n_ranks = len(self.placement["actor"])
        shared = self.sequence_parallel["actor"]
        each = f"{high} each" if low == high else f"{low} or {high} each"
        passes = f", {self.actor.epochs} passes" if self.actor.epochs > 1 else ""
        devices = counted(n_ranks, "device")
        if shared > 1:
            devices = f"{counted(n_ranks // shared, 'group')} of {shared} devices"
        return (
            f"{self.prompts} prompts x {self.samples_per_prompt} = {self.batch_size} samples / "
            f"{devices} = {each}; "
            f"{counted(self.actor.per_epoch, 'update')} of {self.actor.mini_rows}{passes}; "
            f"micro-batches of {self.actor.micro}"
        )

    def table(self) -> "Table":
        """Return the plan as a rich Table."""
        return facts_table("plan", self.lines())

    def lines(self) -> list[tuple[str, str]]:
        """Return the rows of the table, as (name, text)."""
        lines = [*self.choices, ("step", self.sentence())]
        if self.critic:
            updates = f"{counted(self.critic.per_step, 'update')} of {self.critic.mini_rows}"
            lines.append(("critic", f"{updates}; micro-batches of {self.critic.micro}"))
        passes = [f"old log-probs {self.log_prob_micro}"]
        own = {"reference": self.needs_reference and not self.reference_urls}
        own["teacher"] = self.teacher is not None
        passes += [f"{name} {self.ref_micro}" for name, is_own in own.items() if is_own]
        remote = {"reference": (f"{REF}url", self.reference_urls)}
        remote["teacher"] = (f"{TEACHER}url", self.teacher_urls)
        for name, (key, addresses) in remote.items():
            if addresses:
                urls = display(key, addresses, known=True)
                passes.append(f"{name} by the service at {urls[1:-1]}")
        if self.value_micro:
            passes.append(f"values {self.value_micro}")
        lines.append(("forward passes", "micro-batches: " + ", ".join(passes)))
        per_engine = "one per device"
        if self.tensor_parallel > 1:
            per_engine = f"{self.tensor_parallel} devices each"
        engines = f"{counted(self.engines, 'engine')}, {per_engine}"
        if self.servers:
            shown = display(f"{ROLLOUT}servers", ", ".join(self.servers), known=True)
            engines = (
                f"{counted(len(self.servers), 'vLLM server')} with devices of their own: {shown}"
            )
        text = f"{self.rollout_name}, {engines}, {self.rollout_dtype}"
        lines.append(("rollout", f"{text}, sequences up to {self.max_model_len} tokens"))
        sync = str(self.weights)
        if self.servers and not self.weights.uses("files"):
            sync += "; collective to each server"
        lines.append(("weight sync", sync))
        if self.turns:
            lines.append(("turns", self.turns))
        lines.append(("training", f"{self.device}, FSDP2, compute in {self.train_dtype}"))
        roles_on: dict[str, list[str]] = {}
        for role in self.device_roles:
            roles_on.setdefault(ranges(self.placement[role]), []).append(role)
        placed = [f"{', '.join(roles)} on {devices}" for devices, roles in roles_on.items()]
        cluster = f"{self.nnodes} x {self.devices_per_node}"
        lines.append(("devices", f"{cluster}: {'; '.join(placed)}"))
        if self.drawing:
            lines.append(("placement", self.drawing))
        if self.total_steps is not None:
            rows = ""
            if self.steps_per_epoch is not None:
                rows = f" ({self.train_rows} prompts, {self.steps_per_epoch} steps per epoch)"
                end = which_ends(self.steps_per_epoch, self.total_epochs, self.total_training_steps)
                rows += f"; {end}" if end else ""
            lines.append(("length", f"{self.total_steps} steps{rows}"))
        if self.val_rows is not None:
            lines.append(("validation", f"{self.val_rows} prompts"))
        return lines


def make_plan(config: Config, device: str | None = None, count_rows: bool = True) -> Plan:
    """Derive the plan of a configuration that has passed the rules.

    Args:
        config: the whole configuration.
        device: "cuda" or "cpu" if the cluster's device kind is known. None: from trainer.device,
            or from this machine if that is auto.
        count_rows: read the number of rows from the footers of the parquet files.
    """
    device = device or resolve_device(config.trainer.device)
    where = _placement(config, device)
    passes = _passes(config)
    algorithm = _algorithm(config, passes["actor"])
    plan = Plan(
        **where,
        **_step(config),
        **passes,
        **algorithm,
        **_lengths(config),
        **_engine(config, device, where["placement"]),
        **_run(config, count_rows),
        choices=_words(config, algorithm),
    )
    return plan if plan.train_rows is None else plan.with_rows(plan.train_rows)


def _placement(config: Config, device: str) -> dict[str, Any]:
    """Return the fields about devices and roles."""
    trainer = config.trainer
    groups = read_groups(config.cluster.node_groups, trainer.nnodes)
    everywhere = placed(config)
    placement = {role: everywhere[role] for role in roles(config)}
    drawing = ""
    if config.cluster.component_placement is not None or trainer.nnodes > 1:
        drawn = dict(placement)
        if servers(config):
            del drawn["rollout"]
        drawing = draw(drawn, trainer.nnodes, trainer.n_gpus_per_node, groups.nodes)
    return {
        "nnodes": trainer.nnodes,
        "devices_per_node": trainer.n_gpus_per_node,
        "device": device,
        "roles": roles(config),
        "placement": placement,
        "drawing": drawing,
        "env_vars": groups.env_vars,
        "python": groups.python,
        "sequence_parallel": sequence_parallel(config),
        "needs_reference": needs_reference(config),
        "reference_is_actor": reference_is_actor(config),
        "reference_urls": reference_urls(config),
        "teacher": config.distillation.teacher_models.teacher_model.model_path
        if computes_teacher(config)
        else None,
        "teacher_urls": teacher_urls(config),
    }


def _step(config: Config) -> dict[str, Any]:
    """Return the fields about the batch of a step."""
    prompts = config.data.train_batch_size
    samples = config.actor_rollout_ref.rollout.n
    key, drawn = prompts_drawn(config)
    return {
        "prompts": prompts,
        "samples_per_prompt": samples,
        "batch_size": prompts * samples,
        "gen_prompts": drawn,
        "gen_prompts_key": key,
        "filters_groups": config.algorithm.filter_groups.enable,
    }


def _updates(config: Config, section: ActorConfig | CriticConfig, micro: Micro) -> Updates:
    """Return the updates of actor or critic. null in the critic's section means the actor's value.

    micro: the micro-batches of their passes.
    """
    actor = config.actor_rollout_ref.actor
    mini, epochs, shuffle, aggregation = (
        _first(getattr(section, name), getattr(actor, name))
        for name in ("ppo_mini_batch_size", "ppo_epochs", "shuffle", "loss_agg_mode")
    )
    mini = min(mini, config.data.train_batch_size)
    return Updates(
        mini_prompts=mini,
        mini_rows=mini * config.actor_rollout_ref.rollout.n,
        epochs=epochs,
        per_epoch=config.data.train_batch_size // mini,
        micro=micro,
        shuffle=shuffle,
        loss_agg_mode=aggregation,
    )


def _micro(config: Config, role: str, size: int | None, tokens: int | None) -> Micro:
    """Return the micro-batches of the passes of "actor", "rollout", "ref" or "critic".

    size, tokens: limits on one device. None: the actor's in updates.
    """
    actor = config.actor_rollout_ref.actor
    if not uses_dynamic_batches(config, role):
        return Micro(_first(size, actor.ppo_micro_batch_size_per_gpu), None)
    devices = sequence_parallel(config)["actor" if role == "rollout" else role]
    return Micro(None, _first(tokens, actor.ppo_max_token_len_per_gpu) * devices)


def _passes(config: Config) -> dict[str, Any]:
    """Return the fields about updates, and about the passes that compute log-probs and values."""
    policy, critic = config.actor_rollout_ref, config.critic
    log_probs = {
        role: _micro(
            config,
            role,
            section.log_prob_micro_batch_size_per_gpu,
            section.log_prob_max_token_len_per_gpu,
        )
        for role, section in (("rollout", policy.rollout), ("ref", policy.ref))
    }
    found: dict[str, Any] = {
        "actor": _updates(config, policy.actor, _micro(config, "actor", None, None)),
        "log_prob_micro": log_probs["rollout"],
        "ref_micro": None,
        "critic": None,
        "value_micro": None,
        "critic_warmup": 0,
        "critic_model_path": None,
    }
    if computes_reference(config) or computes_teacher(config):
        found["ref_micro"] = log_probs["ref"]
    if needs_critic(config):
        size, tokens = critic.ppo_micro_batch_size_per_gpu, critic.ppo_max_token_len_per_gpu
        forward = _first(critic.forward_micro_batch_size_per_gpu, size)
        found |= {
            "critic": _updates(config, critic, _micro(config, "critic", size, tokens)),
            "value_micro": _micro(config, "critic", forward, tokens),
            "critic_warmup": config.trainer.critic_warmup,
            "critic_model_path": _first(critic.model.path, policy.model.path),
        }
    return found


def _algorithm(config: Config, updates: Updates) -> dict[str, Any]:
    """Return the fields about estimator, loss and rollout correction."""
    actor = config.actor_rollout_ref.actor
    corrected = correction.settings(config.algorithm.rollout_correction)
    measured = catalog.estimator(config.algorithm.adv_estimator).measured
    loss = catalog.BYPASS_LOSS if corrected.bypass_mode else actor.policy_loss.loss_mode
    divisor = float(_longest_response(config))
    buffer = max(1, config.data.max_response_length // 5)
    low, high = clip_range(actor)
    return {
        "needs_greedy_baseline": "reward_baselines" in measured,
        "needs_sum_pi_squared": "sum_pi_squared" in measured,
        "needs_old_log_probs": _needs_old_log_probs(config, updates, corrected),
        "loss_mode": loss,
        "correction": corrected,
        "overlaps_gradients": (
            config.trainer.mode == "pipelined" and gradients_wait_for(config) is None
        ),
        "clip_low": low,
        "clip_high": high,
        "loss_scale": _first(actor.loss_scale_factor, divisor),
        "overlong_buffer": _first(config.reward.overlong_buffer.len, buffer),
    }


def _lengths(config: Config) -> dict[str, Any]:
    """Return the fields about turns and lengths."""
    turns = max_turns(config)
    key, prompt = longest_prompt(config)
    longest = longest_sequence(config)
    return {
        "max_turns": turns,
        "longest_prompt": prompt,
        "longest_prompt_key": key,
        "longest_response": _longest_response(config),
        "longest_sequence": longest,
        "max_model_len": _first(config.actor_rollout_ref.rollout.max_model_len, longest),
        "turns": length_arithmetic(config) if turns or program(config) else "",
    }


def _engine(config: Config, device: str, placement: dict[str, list[int]]) -> dict[str, Any]:
    """Return the fields about the rollout engines and dtypes."""
    rollout = config.actor_rollout_ref.rollout
    name = resolve_rollout(rollout.name)
    size = tensor_parallel(config)
    weights = weight_routes(
        placement["actor"],
        placement["rollout"],
        size,
        config.trainer.n_gpus_per_node,
        device,
        weight_transport(config),
        placement.get("inference", ()),
    )
    # In other modes engines keep their cache during a sync, which a trial would not see. A user's
    # own engine may not be able to read weights on a GPU.
    if config.trainer.mode != "sync" or name not in catalog.ENGINES:
        weights = weights.fallback or weights
    return {
        "rollout_name": name,
        "servers": servers(config),
        "tensor_parallel": size,
        "weights": weights,
        "syncs_adapters": syncs_adapters(config.actor_rollout_ref.model, rollout),
        "train_dtype": resolve_dtype(config.actor_rollout_ref.actor.fsdp_config.dtype, device),
        "rollout_dtype": resolve_dtype(rollout.dtype, device),
    }


def _run(config: Config, count_rows: bool) -> dict[str, Any]:
    """Return the fields about files, steps and validation."""
    data = config.data
    trainer = config.trainer
    val_files = files_of(data.val_files)
    train_rows = val_rows = None
    if count_rows and data.custom_cls.path is None:
        train_rows = _limited(count(files_of(data.train_files)), data.train_max_samples)
        val_rows = _limited(count(val_files), data.val_max_samples) if val_files else None
    return {
        "train_rows": train_rows,
        "val_rows": val_rows,
        "steps_per_epoch": None,
        "total_steps": None if trainer.epochs() else trainer.total_training_steps,
        "total_epochs": trainer.epochs(),
        "total_training_steps": trainer.total_training_steps,
        "validates_first": bool(val_files) and (trainer.val_before_train or trainer.val_only),
    }


def run_length(rows: int, batch: int, epochs: int | None, steps: int | None) -> tuple[int, int]:
    """Return the training steps (per epoch, of the whole run).

    The run has those of its epochs, or `steps` if they end first. One of the two must be given.

    Args:
        rows: training rows, of which each step takes `batch`.
    """
    per_epoch = rows // batch
    limits = [epochs and epochs * per_epoch, steps]
    return per_epoch, min(limit for limit in limits if limit is not None)


def which_ends(per_epoch: int, epochs: int | None, steps: int | None) -> str:
    """Return which of epochs and steps ends the run, in words; "" unless both are given."""
    if epochs is None or steps is None:
        return ""
    passes = f"trainer.total_epochs={epochs} ({epochs * per_epoch} steps)"
    exact = f"trainer.total_training_steps={steps}"
    if steps <= epochs * per_epoch:
        return f"{exact} ends the run, not {passes}"
    return f"{passes} ends the run, not {exact}, the length of learning-rate schedules"


def _words(config: Config, fields: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the table about model, algorithm and run."""
    trainer = config.trainer
    resume = trainer.resume_mode
    if resume == "resume_path":
        resume = str(trainer.resume_from_path)
    run = [trainer.default_local_dir, f"resume: {resume}"]
    if trainer.test_freq > 0:
        run.append(f"validate every {trainer.test_freq} steps")
    if trainer.save_freq > 0:
        run.append(f"save every {trainer.save_freq} steps")
    else:
        run.append("only a stop saves a checkpoint (trainer.save_freq=-1)")
    if trainer.mode == "async":
        settings = config.async_training
        ahead = steps_ahead(config)
        age = f"tokens at most {counted(settings.max_age, 'version')} old"
        run.insert(0, f"asynchronous: {age}, sampled up to {counted(ahead, 'step')} ahead")
    if trainer.mode == "pipelined":
        waits = gradients_wait_for(config)
        what = "inference and first gradients" if waits is None else f"inference ({waits})"
        run.insert(0, f"pipelined: {what} while prompts are sampled")
    return [
        ("model", _model(config.actor_rollout_ref.model)),
        ("algorithm", ", ".join(_algorithm_words(config, fields))),
        ("run", ", ".join(run)),
    ]


def steps_ahead(config: Config) -> int:
    """Return async_training.depth, or what null means."""
    settings = config.async_training
    return min(1, settings.max_age) if settings.depth is None else settings.depth


def _algorithm_words(config: Config, fields: dict[str, Any]) -> list[str]:
    algorithm = config.algorithm
    actor = config.actor_rollout_ref.actor
    corrected, loss = fields["correction"], fields["loss_mode"]
    low, high = fields["clip_low"], fields["clip_high"]
    clip = f"clip {low:g}" if low == high else f"clip {low:g} and {high:g}"
    words = [algorithm.adv_estimator, f"{loss} loss", actor.loss_agg_mode, clip]
    if algorithm.filter_groups.enable:
        words.append("dynamic sampling")
    if config.reward.overlong_buffer.enable:
        words.append("overlong penalty")
    if algorithm.mask_truncated:
        words.append("truncated samples masked")
    if corrected.rollout_is:
        words.append(f"rollout weights by {corrected.rollout_is}")
    if corrected.rollout_rs:
        words.append(f"rejection by {corrected.rollout_rs}")
    if algorithm.use_kl_in_reward:
        control = algorithm.kl_ctrl
        weight = f"{algorithm.kl_penalty} x {control.kl_coef:g}"
        words.append(f"{control.type} KL in the reward, {weight}")
    if actor.use_kl_loss:
        words.append(f"KL in the loss, {actor.kl_loss_type} x {actor.kl_loss_coef:g}")
    if not needs_reference(config):
        words.append("no KL term")
    if config.distillation.enabled:
        words.append(_distillation_words(config))
    return [*words, f"learning rate {actor.optim.lr:g}"]


def _distillation_words(config: Config) -> str:
    teacher = config.distillation.teacher_models.teacher_model
    loss = config.distillation.distillation_loss
    name = teacher.model_path if computes_teacher(config) else "a service"
    form = "policy gradient" if loss.use_policy_gradient else "loss"
    weight = f" x {loss.distillation_loss_coef:g}" if loss.use_task_rewards else ", no task rewards"
    return f"distillation from {name}, {loss.loss_mode} as {form}{weight}"


def _model(model: ModelConfig) -> str:
    if model.lora_adapter_path:
        return f"{model.path}, LoRA from {model.lora_adapter_path}"
    if model.lora_rank:
        return f"{model.path}, LoRA of rank {model.lora_rank} (alpha {model.lora_alpha:g})"
    return model.path


def clip_range(actor: ActorConfig) -> tuple[float, float]:
    """Return how far the ratio may be below and above 1."""
    low, high = actor.clip_ratio_low, actor.clip_ratio_high
    return _first(low, actor.clip_ratio), _first(high, actor.clip_ratio)


LOOPS = "verlite.compat.loops:VerlLoops"
"""env.name of verl's agent loops."""
OPENENV = "openenv"
"""The environment of `env.openenv`."""
EPISODE = 32
"""Actions of an episode of `env.openenv` with max_turns=0, at most."""


def env_name(config: Config) -> str:
    """Return the environment of a multi-turn run."""
    return config.env.name if config.env.openenv is None else OPENENV


def max_turns(config: Config) -> int:
    """Return the tool calls, or actions, allowed per sample; 0 without do_search."""
    if not config.do_search:
        return 0
    return config.max_turns or (0 if config.env.openenv is None else EPISODE)


def program_words(command: str | None) -> list[str]:
    """Return the words of agent.command; [] if it is null, empty or has an open quote."""
    try:
        return shlex.split(command or "")
    except ValueError:
        return []


def program_code(config: Config) -> str | None:
    """Return the Python file that agent.command names, or the module of its function."""
    words = program_words(config.agent.command)
    if is_function(words):
        return words[0].rpartition(":")[0]
    return next((word for word in words if word.endswith(".py")), None)


def can_fork(command: str) -> bool:
    """Return whether agent.command is an interpreter and its file, or a function."""
    words = program_words(command)
    return is_function(words) or len(words) > 1 and words[1].endswith(".py")


def is_credit(rule: str) -> bool:
    """Return whether agent.credit is legal."""
    if rule in ("graph", "branch"):
        return True
    try:
        return 0 < float(rule) <= 1
    except ValueError:
        return False


def program(config: Config) -> str | None:
    """Return the setting that names what runs each sample beside the gateway, None without one."""
    agent = config.agent
    if agent.command is not None:
        return f"agent.command={agent.command}"
    return None if agent.verifiers is None else f"agent.verifiers={agent.verifiers}"


def scores_itself(config: Config) -> bool:
    """Return whether agent programs, or episodes of OpenEnv, score their samples."""
    if max_turns(config) and config.env.openenv is not None:
        return config.custom_reward_function.path is None and not scores_remotely(config.reward)
    return program(config) is not None and config.agent.reward == "program"


def decides_turns(config: Config) -> str:
    """Return the code that asks the model as often as it likes, in words; "" if there is none."""
    if max_turns(config) and config.env.openenv is not None:
        return f"{config.env.openenv}, episodes of up to {counted(max_turns(config), 'action')}"
    if max_turns(config) and config.env.name == LOOPS:
        return f"the agent loop of {config.env.kwargs.get('agent_loop_config_path')}"
    return program(config) or ""


def longest_prompt(config: Config) -> tuple[str, int]:
    """Return the key that limits the first prompt, and its value in tokens."""
    if max_turns(config) and config.data.max_start_length is not None:
        return "data.max_start_length", config.data.max_start_length
    return "data.max_prompt_length", config.data.max_prompt_length


def longest_sequence(config: Config) -> int:
    """Return the largest number of tokens of a whole sample."""
    return config.data.max_prompt_length + config.data.max_response_length


def worst_case(config: Config) -> int:
    """Return the tokens of a sample with the longest prompt, turns and observations."""
    data = config.data
    each_turn = data.max_response_length + data.max_obs_length
    _, prompt = longest_prompt(config)
    return prompt + max_turns(config) * each_turn + data.max_response_length


def _longest_response(config: Config) -> int:
    data = config.data
    if decides_turns(config):
        return longest_sequence(config) - 1
    if not max_turns(config):
        return data.max_response_length
    return min(worst_case(config) - longest_prompt(config)[1], longest_sequence(config) - 1)


def length_arithmetic(config: Config) -> str:
    """Return the arithmetic of the longest sample, and what happens to samples that do not fit."""
    data = config.data
    code = decides_turns(config)
    if code:
        return (
            f"{code}: answers of up to {data.max_response_length} "
            f"tokens, conversations of up to {longest_sequence(config)} "
            "(data.max_prompt_length + data.max_response_length)"
        )
    turns = max_turns(config)
    worst = worst_case(config)
    fits = longest_sequence(config)
    _, start = longest_prompt(config)
    turn = data.max_response_length
    obs = data.max_obs_length
    text = f"{config.env.name}, up to {counted(turns, 'tool call')} and a last turn; at most "
    text += (
        f"{start} prompt + {turns} x ({turn} turn + {obs} observation) + {turn} = {worst} tokens"
    )
    if worst <= fits:
        return text
    return (
        f"{text}, but {fits} fit (data.max_prompt_length + data.max_response_length): "
        "a sample that gets there ends, status length"
    )


def prompts_drawn(config: Config) -> tuple[str, int]:
    """Return the key that sets the prompts per generation, and its value."""
    data = config.data
    if config.algorithm.filter_groups.enable and data.gen_batch_size is not None:
        return "data.gen_batch_size", data.gen_batch_size
    return "data.train_batch_size", data.train_batch_size


def _needs_old_log_probs(config: Config, updates: Updates, corrected: RolloutCorrection) -> bool:
    if corrected.bypass_mode:
        return False
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    estimator = config.algorithm.adv_estimator
    return (
        places_inference(config)
        or updates.per_step > 1
        or config.algorithm.use_kl_in_reward
        or corrected.acts_on_batch
        or (loss in catalog.LOSSES and catalog.LOSSES[loss].selector is not None)
        or catalog.reads(catalog.ESTIMATORS, estimator, "old_log_probs")
    )


def gradients_wait_for(config: Config) -> str | None:
    """Return the setting, as KEY=VALUE, with which a sample's loss depends on samples of other
    prompts, so that gradients wait for the whole step. None: there is none. A user's own functions
    may read everything.

    Raises:
        ValueError: rollout correction has an invalid setting.
    """
    algorithm = config.algorithm
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    corrected = correction.settings(algorithm.rollout_correction)
    if not catalog.estimator(algorithm.adv_estimator).by_group:
        return f"algorithm.adv_estimator={algorithm.adv_estimator}"
    if algorithm.whiten_advantages:
        return "algorithm.whiten_advantages=true"
    if not corrected.bypass_mode and (
        loss not in catalog.POLICY_LOSSES or catalog.POLICY_LOSSES[loss].selector
    ):
        return f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}"
    if corrected.acts_on_batch:
        name = "rollout_is" if corrected.rollout_is else "rollout_rs"
        return f"algorithm.rollout_correction.{name}={getattr(corrected, name)}"
    if algorithm.filter_groups.enable:
        return "algorithm.filter_groups.enable=true"
    return None


def places_inference(config: Config) -> bool:
    """Return whether the role `inference` is placed, which computes log-probs under the policy."""
    spec = config.cluster.component_placement or {}
    return any("inference" in role_names(names) for names in spec)


def roles(config: Config) -> tuple[str, ...]:
    """Return the roles of a run."""
    names = ["actor", "rollout"]
    if places_inference(config):
        names.append("inference")
    if computes_reference(config) and not reference_is_actor(config):
        names.append("ref")
    if computes_teacher(config):
        names.append("teacher")
    if needs_critic(config):
        names.append("critic")
    return tuple(names)


def servers(config: Config) -> tuple[str, ...]:
    """Return the addresses of the servers that generate; () if the engines are in the cluster."""
    rollout = config.actor_rollout_ref.rollout
    return tuple(files_of(rollout.servers)) if rollout.name == "server" else ()


def weight_transport(config: Config) -> str:
    """Return how the rollout processes get weights: rollout.weight_transport, but with servers
    files for auto, and shared_memory for collective, by which that process sends them on."""
    transport = config.actor_rollout_ref.rollout.weight_transport
    with_servers = {"auto": "files", "collective": "shared_memory"}
    return with_servers.get(transport, transport) if servers(config) else transport


def placed(config: Config) -> dict[str, list[int]]:
    """Return the devices of each role. With servers the rollout process is beside the actor's first
    rank and uses no device.

    Raises:
        ValueError: cluster.component_placement has problems.
    """
    found = parse(config.cluster.component_placement, shape(config))
    return found | {"rollout": found["actor"][:1]} if servers(config) else found


def shape(config: Config) -> Shape:
    """Return the nodes and devices that the placement is parsed against.

    Raises:
        ValueError: cluster.node_groups has problems.
    """
    trainer = config.trainer
    groups = read_groups(config.cluster.node_groups, trainer.nnodes)
    engine = max(1, tensor_parallel(config))
    return Shape(trainer.nnodes, trainer.n_gpus_per_node, engine, groups.nodes)


def needs_critic(config: Config) -> bool:
    """Return critic.enable; if it is null, whether the advantage estimator reads values."""
    return _first(
        config.critic.enable, "values" in catalog.estimator(config.algorithm.adv_estimator).measured
    )


def needs_reference(config: Config) -> bool:
    """Return whether a KL term compares with the reference."""
    return config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss


def sequence_parallel(config: Config) -> dict[str, int]:
    """Return the sequence-parallel size of each role with a training engine."""
    actor = config.actor_rollout_ref.actor.ulysses_sequence_parallel_size
    ref = _first(config.actor_rollout_ref.ref.ulysses_sequence_parallel_size, actor)
    return {
        "actor": actor,
        "inference": actor,
        "ref": ref,
        "teacher": ref,
        "critic": config.critic.ulysses_sequence_parallel_size,
    }


def engine_settings(config: Config, role: str, device: str) -> FSDPConfig:
    """Return the settings of a role's training engine.

    `inference` has those of the actor, because it computes what the actor would. It is sharded over
    all of its own devices, and holds its weights in the dtype in which it computes: rounding them
    once gives the numbers that the actor computes from its float32 copy.

    device: "cuda" or "cpu".
    """
    policy = config.actor_rollout_ref
    if role != "inference":
        sections = {
            "actor": policy.actor.fsdp_config,
            "ref": policy.ref.fsdp_config,
            "teacher": policy.ref.fsdp_config,
            "critic": config.critic.model.fsdp_config,
        }
        return sections[role]
    fsdp = policy.actor.fsdp_config
    dtype = resolve_dtype(fsdp.dtype, device)
    return replace(fsdp, model_dtype=dtype, fsdp_size=-1, optimizer_offload=False)


def uses_dynamic_batches(config: Config, section: str) -> bool:
    """Return whether the passes of "actor", "rollout", "ref" or "critic" fill micro-batches by
    tokens.
    """
    actor = config.actor_rollout_ref.actor.use_dynamic_bsz
    own = {
        "actor": actor,
        "rollout": config.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz,
        "ref": config.actor_rollout_ref.ref.log_prob_use_dynamic_bsz,
        "critic": config.critic.use_dynamic_bsz,
    }
    return _first(own[section], actor)


def uses_lora(model: ModelConfig) -> bool:
    """Return whether adapters are trained instead of the model's own weights."""
    return model.lora_rank > 0 or model.lora_adapter_path is not None


def syncs_adapters(model: ModelConfig, rollout: RolloutConfig) -> bool:
    """Return whether engines get adapters separately from the base model."""
    return uses_lora(model) and rollout.lora_sync == "adapter"


def reference_is_actor(config: Config) -> bool:
    """Return whether the actor without its adapters serves as the reference."""
    return needs_reference(config) and uses_lora(config.actor_rollout_ref.model)


def reference_urls(config: Config) -> list[str]:
    """Return the addresses of the service that computes reference log-probs; [] if the run does."""
    if not needs_reference(config) or reference_is_actor(config):
        return []
    return [str(url) for url in files_of(config.actor_rollout_ref.ref.url)]


def computes_reference(config: Config) -> bool:
    """Return whether the run computes reference log-probs on its own devices."""
    return needs_reference(config) and not reference_urls(config)


def teacher_urls(config: Config) -> list[str]:
    """Return the addresses of the service with the teacher; [] if the run computes it, or has
    none."""
    distillation = config.distillation
    url = distillation.teacher_models.teacher_model.url
    return [str(one) for one in files_of(url)] if distillation.enabled else []


def computes_teacher(config: Config) -> bool:
    """Return whether the run computes a teacher's log-probs on its own devices."""
    return config.distillation.enabled and not teacher_urls(config)


def resolve_device(name: str) -> str:
    """Return "cuda" or "cpu" for trainer.device; auto checks for a GPU without importing torch."""
    if name != "auto":
        return name
    return "cuda" if machine.visible_gpus() else "cpu"


def joins_cluster(config: Config) -> bool:
    """Return whether the configuration or RAY_ADDRESS names a Ray cluster to join."""
    address = config.ray_kwargs.ray_init.address or os.environ.get("RAY_ADDRESS")
    return bool(address) and address != "local"


def tensor_parallel(config: Config) -> int:
    """Return the devices per rollout engine. The hf engine uses one."""
    rollout = config.actor_rollout_ref.rollout
    is_vllm = resolve_rollout(rollout.name) == "vllm"
    return rollout.tensor_model_parallel_size if is_vllm else 1


def resolve_rollout(name: str) -> str:
    """Return the engine for rollout.name: auto is vllm if it is installed, otherwise hf."""
    if name != "auto":
        return name
    return "vllm" if installed("vllm") else "hf"


@functools.cache
def installed(package: str) -> bool:
    """Return whether a package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def resolve_dtype(name: str, device: str) -> str:
    """Return the dtype for a dtype key; auto: bfloat16 on GPUs, float32 on CPUs."""
    if name != "auto":
        return name
    return "bfloat16" if device == "cuda" else "float32"


def files_of(value: Any) -> list[str]:
    """Return data.train_files or val_files as a list."""
    if value is None or value == "":
        return []
    return [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]


def scores_remotely(reward: RewardConfig) -> bool:
    """Return whether a reward service scores the samples."""
    return bool(files_of(reward.remote.url))


def count(files: list[str]) -> int | None:
    """Return the number of rows of data files; None if one cannot be read."""
    try:
        return sum(tables.outline(local_file(file))[1] for file in files)
    except (tables.TableError, HubError):
        return None


def _limited(rows: int | None, limit: int) -> int | None:
    return rows if rows is None or limit < 0 else min(rows, limit)


def _first(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value
