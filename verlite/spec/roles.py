"""What the roles of a run need to know: one frozen class per role, the parts that they share, and
how prompts are read.

`verlite.config.compile` makes them from the configuration. A worker gets its own role's and nothing
else, so a test or a simulation of a worker starts from it alone. Every value is final: null and
auto are resolved, numbers of one step are derived. Names are those of the configuration's keys.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verlite.files import JSON_VALUES
from verlite.spec.correction import RolloutCorrection


@dataclass(frozen=True)
class Micro:
    """How one pass splits the rows of a device: by count (`size` rows), or by tokens (`max_tokens`)
    where that is not None.
    """

    size: int | None
    max_tokens: int | None

    def __str__(self) -> str:
        return f"up to {self.max_tokens} tokens" if self.max_tokens is not None else f"{self.size}"


@dataclass(frozen=True)
class Updates:
    """Optimizer steps of one model in one training step."""

    mini_prompts: int
    """Prompts per optimizer step, over all devices."""
    mini_rows: int
    """Samples per optimizer step, over all devices."""
    epochs: int
    """Passes over the step's samples."""
    per_epoch: int
    """Optimizer steps in one pass."""
    micro: Micro
    """Micro-batches of the update."""
    shuffle: bool
    """Shuffle rows between the mini-batches of each pass."""
    loss_agg_mode: str
    """How token losses become one number."""

    @property
    def per_step(self) -> int:
        """Optimizer steps in one training step."""
        return self.epochs * self.per_epoch


# Parts of a training engine.


@dataclass(frozen=True)
class ModelSpec:
    """A model: where its files are, and how it is loaded and run."""

    path: str
    tokenizer_path: str | None = None
    trust_remote_code: bool = False
    override_config: Mapping[str, Any] = field(default_factory=dict)
    custom_chat_template: str | None = None
    use_remove_padding: bool = True
    share_prefixes: bool = True
    enable_gradient_checkpointing: bool | str = True
    enable_activation_offload: bool = False
    lora_rank: int = 0
    lora_alpha: int = 16
    target_modules: Any = "all-linear"
    exclude_modules: Any = None
    lora_adapter_path: str | None = None

    @property
    def trains_adapters(self) -> bool:
        """Whether adapters are trained instead of the model's own weights."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None


@dataclass(frozen=True)
class OptimSpec:
    """AdamW and the schedule of its learning rate."""

    lr: float = 1e-06
    lr_warmup_steps: int = -1
    lr_warmup_steps_ratio: float = 0.0
    lr_scheduler_type: str = "constant"
    min_lr_ratio: float = 0.0
    num_cycles: float = 0.5
    weight_decay: float = 0.01
    betas: Sequence[float] = (0.9, 0.999)
    eps: float = 1e-08


@dataclass(frozen=True)
class FSDPSpec:
    """How a model is sharded over its ranks, in which dtypes, and what leaves the device."""

    param_offload: bool = False
    optimizer_offload: bool = False
    reshard_after_forward: bool = True
    model_dtype: str = "float32"
    dtype: str = "auto"
    fsdp_size: int = -1
    use_torch_compile: bool = False


@dataclass(frozen=True)
class EngineSpec:
    """A training engine."""

    model: ModelSpec
    fsdp: FSDPSpec
    optim: OptimSpec | None
    """None: the weights are frozen."""
    grad_clip: float
    max_nonfinite_updates: int
    seed: int
    sequence_parallel: int
    """Adjacent ranks that share each sequence."""


# Services that a worker calls.


@dataclass(frozen=True)
class ServiceSpec:
    """A remote service on one or several servers, as `verlite.http.client.Client` calls it."""

    name: str
    """What messages call it: "retriever", "reward service"."""
    section: str
    """Section of the configuration with its keys, for messages."""
    url: Sequence[str]
    """One address per server."""
    timeout_s: float
    """Seconds of one attempt."""
    deadline_s: float
    """Seconds of a call with all its attempts."""
    token_env: str | None = None
    """Environment variable with the bearer token. None: the service needs none."""
    token_key: str = "token_env"
    """Name of that key in the section."""
    max_in_flight: int = 64
    """Requests that one server gets at the same time."""
    batch_size: int = 64
    """Items in one request at most."""
    batch_window_ms: float = 0.0
    """How long an item waits for others to share its request."""
    max_answer: int = 1 << 26
    """Bytes of one answer. A longer one is a failed attempt."""
    max_values: int = JSON_VALUES
    """JSON values of one answer, likewise."""


@dataclass(frozen=True)
class ReferenceServiceSpec(ServiceSpec):
    """A reference service."""

    name: str = "reference service"
    section: str = "actor_rollout_ref.ref"
    url: Sequence[str] = ()
    timeout_s: float = 300.0
    deadline_s: float = 900.0
    max_in_flight: int = 2
    """One request is computed while another travels."""


@dataclass(frozen=True)
class RewardServiceSpec(ServiceSpec):
    """A reward service."""

    name: str = "reward service"
    section: str = "reward.remote"
    url: Sequence[str] = ()
    timeout_s: float = 60.0
    deadline_s: float = 300.0
    max_in_flight: int = 4
    batch_window_ms: float = 50.0


@dataclass(frozen=True)
class RetrieverSpec(ServiceSpec):
    """A retriever."""

    name: str = "retriever"
    section: str = "retriever"
    url: Sequence[str] = ("http://127.0.0.1:8000/retrieve",)
    timeout_s: float = 15.0
    deadline_s: float = 60.0
    max_in_flight: int = 4
    batch_window_ms: float = 5.0
    topk: int = 3
    cache_size: int = 10000
    on_error: str = "mask"


# The parts of a training step that a worker computes.


@dataclass(frozen=True)
class DistillationSpec:
    """The term that distils a teacher. Names are those of distillation.distillation_loss."""

    loss_mode: str
    use_policy_gradient: bool
    use_task_rewards: bool
    distillation_loss_coef: float
    log_prob_min_clamp: float | None
    loss_max_clamp: float | None


@dataclass(frozen=True)
class PolicyLossSpec:
    """The actor's loss: policy loss, entropy, KL, distillation."""

    loss_mode: str
    loss_agg_mode: str
    loss_scale: float
    """Divisor of seq-mean-token-sum-norm."""
    clip_low: float
    clip_high: float
    clip_c: float
    entropy_coeff: float
    use_kl_loss: bool
    kl_loss_coef: float
    kl_loss_type: str
    kl_loss_importance_weighted: bool
    extra: Mapping[str, Any]
    """Settings of single losses, by their names."""
    distillation: DistillationSpec | None = None


@dataclass(frozen=True)
class AdvantageSpec:
    """From scores to advantages."""

    adv_estimator: str
    gamma: float
    lam: float
    norm_adv_by_std_in_grpo: bool
    use_kl_in_reward: bool
    kl_in_reward_mode: str
    kl_penalty: str
    whiten_advantages: bool
    adv_kwargs: Mapping[str, Any]
    gdpo_reward_weights: tuple[float, ...] | None
    """Weights of the batch field gdpo_rewards. None: 1 each."""
    reward_clip_range: tuple[float, float]
    single_samples: bool
    """A prompt has one sample."""


@dataclass(frozen=True)
class LogProbSpec:
    """Passes that compute log-probs of the step's samples."""

    micro: Micro
    needs_sum_pi_squared: bool
    reference_micro: Micro | None
    """Of the reference, where the policy without its adapters is the reference."""


@dataclass(frozen=True)
class PublishSpec:
    """What a weight sync sends, and to whom."""

    train_dtype: str
    rollout_dtype: str
    sync_dtype: str
    """Dtype in which the weights are sent."""
    sync_bucket_mb: int
    engine_share: float
    """Of all weights, what an engine allocates on a device in a sync."""
    syncs_adapters: bool
    """Engines get the adapters separately from the base model."""
    has_inference: bool
    """The role `inference` gets the weights, too."""
    nodes: tuple[int, ...]
    """Node of each actor rank."""
    max_model_len: int
    """Longest sequence of the engines, in tokens."""


# The roles.


@dataclass(frozen=True)
class TrainingRole:
    """What every role with a training engine needs."""

    engine: EngineSpec
    run_dir: str
    phase_timeout_s: float
    total_steps: int
    """Training steps of the whole run, which learning-rate schedules need."""
    temperature: float
    """Of the rollout, by which logits are divided."""


@dataclass(frozen=True)
class ActorSpec(TrainingRole):
    log_probs: LogProbSpec
    updates: Updates
    loss: PolicyLossSpec
    calculate_entropy: bool
    token_selection: Mapping[str, Any]
    """Settings of the losses that select tokens of the whole step."""
    advantage: AdvantageSpec
    correction: RolloutCorrection
    publish: PublishSpec
    saves_hf: bool
    """Checkpoints have the model in Hugging Face format, too."""


@dataclass(frozen=True)
class InferenceSpec(TrainingRole):
    log_probs: LogProbSpec
    dtype: str
    """In which it computes."""
    max_model_len: int


@dataclass(frozen=True)
class ReferenceSpec(TrainingRole):
    micro: Micro


@dataclass(frozen=True)
class CriticSpec(TrainingRole):
    micro: Micro
    """Of the pass that computes values."""
    updates: Updates
    loss_scale: float
    """Divisor of seq-mean-token-sum-norm."""
    cliprange_value: float


@dataclass(frozen=True)
class GenerationSpec:
    """A generation engine."""

    servers: tuple[str, ...] = ()
    """Addresses of vLLM servers. (): the engine computes itself."""
    server_token_env: str | None = None
    server_timeout_s: float = 60.0
    server_wait_s: float = 300.0
    dtype: str = "auto"
    tensor_model_parallel_size: int = 1
    gpu_memory_utilization: float = 0.5
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    free_cache_engine: bool = True
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    kv_cache_gb: float = 1.0
    weight_transport: str = "auto"
    syncs_adapters: bool = False
    sync_bucket_mb: int = 512
    request_timeout_s: float = 1800.0
    kv_at_update: str = ""
    """What happens to the keys and values of running requests when weights are loaded: "fresh",
    "salted" or "mixed". "": no weights are loaded while requests run."""


@dataclass(frozen=True)
class ScorerSpec:
    """Who scores samples, and within which limits."""

    path: str | None = None
    """The user's own function: its file or module. None: `remote`, or the data source decides."""
    name: str = "compute_score"
    reward_kwargs: Mapping[str, Any] = field(default_factory=dict)
    secret_env_vars: Sequence[str] = ()
    remote: RewardServiceSpec | None = None
    """The reward service."""
    score_scale: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 300.0
    item_timeout_s: float = 30.0
    process_memory_gb: float | None = None


@dataclass(frozen=True)
class EnvSpec:
    """The environment of multi-turn samples."""

    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    retriever: RetrieverSpec = RetrieverSpec()
    """Of the environment `search`."""


@dataclass(frozen=True)
class AgentSpec:
    """The agent program of each sample: a command, or a verifiers environment."""

    command: str | None
    verifiers: str | None = None
    python: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    renderer: Mapping[str, Any] | None = None
    timeout_s: float = 600.0
    memory_gb: float = 4.0
    max_processes: int = 64
    secret_env_vars: Sequence[str] = ()
    reward: str = "program"
    credit: str = "graph"
    preload: Sequence[str] = ()


@dataclass(frozen=True)
class RolloutSpec:
    """A rollout worker: one engine with the environments and the scorer of its samples."""

    model: ModelSpec
    engine: str
    """rollout.name: "vllm", "hf", "server", or the user's own."""
    generation: GenerationSpec
    seed: int
    max_model_len: int
    run_dir: str
    engines: int
    """Rollout workers of the run."""
    scorer: ScorerSpec
    env: EnvSpec | None
    """None: single turns, or `agent`."""
    agent: AgentSpec | None
    """None: the samples are sampled here."""
    template_kwargs: Mapping[str, Any]
    max_turns: int
    max_obs_length: int
    longest_sequence: int
    phase_timeout_s: float
    """Longest time without progress of background samples."""
    debug: bool
    folder: str
    """Working directory of the user's reward functions and agent programs."""


@dataclass(frozen=True)
class OwnClass:
    """A class or function of the user. Without a path there is none."""

    path: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class DataSpec:
    """How rows become prompts, and in which order. Names are those of the keys under `data`."""

    prompt_key: str = "prompt"
    teacher_prompt_key: str | None = None
    """Column of the prompts that the teacher of distillation reads. None: the policy's."""
    reward_fn_key: str = "data_source"
    max_prompt_length: int = 512
    train_max_samples: int = -1
    val_max_samples: int = -1
    shuffle: bool = True
    seed: int = 42
    filter_overlong_prompts: bool = False
    truncation: str = "error"
    apply_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    custom_cls: OwnClass = OwnClass()
    sampler: OwnClass = OwnClass()
    section: Any = None
    """The section `data`, which the user's own classes get as their configuration."""
