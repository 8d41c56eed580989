"""The configuration schema: the one home of every key's name, type, default and meaning.

Key names and units are verl's, because users know them. The docstring under a field is what `verlite explain` prints.
Sizes keep verl's meaning: `data.train_batch_size` and `ppo_mini_batch_size` count prompts (times `rollout.n` samples),
`*_micro_batch_size_per_gpu` counts samples on one device. Nothing ever rescales a value in place; `config.plan` derives.
Rules that span several keys live in `config.rules`.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Optional

from omegaconf import MISSING

Files = Annotated[Any, "a file or a list of files"]


@dataclass
class DataConfig:
    """Where prompts come from and how long they may be."""

    train_files: Files = MISSING
    """Parquet file, or list of files, of training prompts."""
    val_files: Files = None
    """Parquet file, or list of files, of validation prompts. null: no validation."""
    prompt_key: str = "prompt"
    """Column that holds the chat messages (a list of role and content)."""
    reward_fn_key: str = "data_source"
    """Column that names the data source, which chooses the scorer."""
    train_batch_size: int = 1024
    """Prompts per training step, over all devices. Each is sampled rollout.n times."""
    gen_batch_size: Optional[int] = None
    """Prompts per generation while algorithm.filter_groups collects a step's prompts. null: train_batch_size."""
    val_batch_size: Optional[int] = None
    """Validation prompts per generation call. null: the whole validation set at once."""
    max_prompt_length: int = 512
    """Longest prompt in tokens, after the chat template. Agent: of everything before the last turn."""
    max_response_length: int = 512
    """Longest response in tokens. Agent: of one turn; a whole sample has at most max_prompt_length + max_response_length tokens."""
    train_max_samples: int = -1
    """Use at most this many training rows (a random choice with data.seed if data.shuffle, else the first). -1: all."""
    val_max_samples: int = -1
    """Use at most this many validation rows, the first ones. -1: all."""
    shuffle: bool = True
    """Shuffle the training prompts anew in each epoch."""
    seed: int = 42
    """Seed of the data order and of train_max_samples."""
    filter_overlong_prompts: bool = False
    """Drop prompts longer than max_prompt_length when loading. False: data.truncation decides."""
    truncation: str = "error"
    """What happens to a prompt over max_prompt_length: error, left (keep the end), right (keep the start), middle (keep both ends)."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments for the tokenizer's chat template, such as enable_thinking."""
    max_start_length: Optional[int] = None
    """Agent: longest first prompt in tokens. null: max_prompt_length."""
    max_obs_length: int = 512
    """Agent: longest observation in tokens; what is longer is cut inside its tags."""


@dataclass
class ModelConfig:
    """Which pretrained model, and how its forward pass runs."""

    path: str = MISSING
    """Folder with a Hugging Face model, or its name on the hub."""
    tokenizer_path: Optional[str] = None
    """Tokenizer folder or name. null: the model's."""
    trust_remote_code: bool = False
    """Let the model's own Python code run. Only for models whose code you have read."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    use_remove_padding: bool = True
    """Packed forward pass without padding tokens. False: padded micro-batches, for comparison."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Values that replace those of the model's config.json."""
    custom_chat_template: Optional[str] = None
    """Jinja chat template that replaces the tokenizer's."""
    enable_activation_offload: bool = False
    """GPU: keep each layer's saved input in host memory from the forward to the backward pass. Needs enable_gradient_checkpointing."""
    lora_rank: int = 0
    """Train low-rank adapters of this rank, and leave the model's weights as they are. 0: train all weights. Usual: 16 to 64, with a
    learning rate about ten times that of full training."""
    lora_alpha: int = 16
    """LoRA: an adapter's output is multiplied by lora_alpha / lora_rank."""
    target_modules: Annotated[
        Any, "all-linear, a list of module names, or a regular expression"
    ] = "all-linear"
    """LoRA: the layers with adapters. all-linear: every linear layer but the output head."""
    exclude_modules: Annotated[Any, "a list of module names, or a regular expression"] = None
    """LoRA: layers without, of those that target_modules names."""
    lora_adapter_path: Optional[str] = None
    """LoRA: folder with an adapter in peft's format to start from; it says rank, alpha and layers itself. A KL term compares with the model
    without it."""


@dataclass
class OptimConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = 1e-6
    """Peak learning rate."""
    lr_warmup_steps: int = -1
    """Linear warm-up from 0 over this many training steps. -1: lr_warmup_steps_ratio decides."""
    lr_warmup_steps_ratio: float = 0.0
    """Warm-up as a share of all training steps, used while lr_warmup_steps is -1."""
    lr_scheduler_type: str = "constant"
    """After the warm-up: constant or cosine."""
    min_lr_ratio: float = 0.0
    """Cosine: the lowest learning rate as a share of lr."""
    num_cycles: float = 0.5
    """Cosine: number of waves; 0.5 goes down once."""
    weight_decay: float = 0.01
    """Decoupled weight decay, applied to every parameter as in torch.optim.AdamW."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Adam's averaging coefficients."""
    eps: float = 1e-8
    """Adam's denominator offset."""


@dataclass
class FSDPConfig:
    """Sharding, precision and offload of one training engine."""

    param_offload: bool = False
    """Keep parameters in host memory outside the phases that need them."""
    optimizer_offload: bool = False
    """Keep optimizer state in host memory outside updates."""
    reshard_after_forward: bool = True
    """Free gathered parameters after the forward pass (ZeRO-3). False: keep them until the backward pass (ZeRO-2), and reduce gradients
    once per update instead of once per micro-batch: less communication, more memory."""
    model_dtype: str = "float32"
    """Dtype of the parameters that the optimizer updates. With LoRA: of the frozen ones; adapters are float32."""
    dtype: str = "auto"
    """Compute dtype of both passes: auto (bfloat16 on GPU, float32 on CPU), bfloat16 or float32; for the reference float16 too, which
    training cannot use without loss scaling. Reductions stay float32."""
    fsdp_size: int = -1
    """Devices of one sharding group. -1: all."""
    use_torch_compile: bool = False
    """Compile each layer with torch.compile: the first passes take a minute longer. On CPUs it was measured to gain nothing."""


@dataclass
class PolicyLossConfig:
    """Which policy loss."""

    loss_mode: str = "vanilla"
    """Name in algorithms.losses.POLICY_LOSSES, or package.module:function of your own."""
    clip_cov_ratio: float = 0.0002
    """clip_cov: share of the step's tokens that are taken out of the loss."""
    clip_cov_lb: float = 1.0
    """clip_cov: they are chosen among tokens whose covariance is above this,"""
    clip_cov_ub: float = 5.0
    """clip_cov: and below this."""
    kl_cov_ratio: float = 0.0002
    """kl_cov: share of the step's tokens that are held back, those of the highest covariance."""
    ppo_kl_coef: float = 0.1
    """kl_cov: weight of the KL that holds them back."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Settings for a loss of your own: its inputs.extra."""


@dataclass
class ActorConfig:
    """The policy's updates."""

    ppo_mini_batch_size: int = 256
    """Prompts per optimizer step (times rollout.n samples), over all devices."""
    ppo_micro_batch_size_per_gpu: Optional[int] = None
    """Samples per forward and backward pass on one device. Needed unless use_dynamic_bsz."""
    use_dynamic_bsz: bool = False
    """Fill micro-batches by tokens (ppo_max_token_len_per_gpu) in place of counting samples."""
    ppo_max_token_len_per_gpu: int = 16384
    """Tokens per micro-batch on one device, with use_dynamic_bsz."""
    ppo_epochs: int = 1
    """Passes over each step's samples."""
    shuffle: bool = False
    """Shuffle samples between mini-batches in each pass."""
    data_loader_seed: int = 42
    """Seed of that shuffle, and of clip_cov's choice."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    """Which policy loss."""
    clip_ratio: float = 0.2
    """PPO clip range, for both sides unless clip_ratio_low or clip_ratio_high says otherwise."""
    clip_ratio_low: Optional[float] = None
    """Clip range below 1. null: clip_ratio."""
    clip_ratio_high: Optional[float] = None
    """Clip range above 1 (DAPO's clip-higher). null: clip_ratio."""
    clip_ratio_c: float = 3.0
    """Dual-clip bound on the ratio for negative advantages."""
    tau_pos: float = 1.0
    """sapo: steepness of the gate for positive advantages."""
    tau_neg: float = 1.05
    """sapo: steepness of the gate for the others."""
    loss_agg_mode: str = "token-mean"
    """How token losses become one number: token-mean, token-sum, seq-mean-token-sum, seq-mean-token-mean, seq-mean-token-sum-norm."""
    loss_scale_factor: Optional[float] = None
    """Divisor of seq-mean-token-sum-norm. null: data.max_response_length."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus in the loss."""
    calculate_entropy: bool = False
    """Measure entropy in updates even with entropy_coeff=0."""
    use_kl_loss: bool = False
    """Add KL(policy || reference) to the loss; starts a reference worker, except with LoRA, where the policy without its adapters is it."""
    kl_loss_coef: float = 0.001
    """Weight of that KL."""
    kl_loss_type: str = "low_var_kl"
    """Its estimator: kl/k1, abs, mse/k2, low_var_kl/k3; a + at the end takes k2's gradient with the estimator's value."""
    grad_clip: float = 1.0
    """Largest gradient norm; larger gradients are scaled down to it."""
    max_nonfinite_updates: int = 3
    """Stop the run after this many updates in a row were dropped for a non-finite loss or gradient."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer of the policy."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding, precision and offload of the policy."""
    ulysses_sequence_parallel_size: int = 1
    """Neighbouring devices that run each micro-batch together, an equal part of its tokens on each, for sequences whose activations
    are too large for one. It divides the devices and the model's attention heads. Micro-batch sizes are then those of such a group:
    use_dynamic_bsz allows it ppo_max_token_len_per_gpu for each of its devices."""
    state_masking: bool = True
    """Agent: keep tool output out of the loss. verlite always does; False is refused."""


@dataclass
class RefConfig:
    """The frozen reference policy. It exists when a KL term uses it."""

    log_prob_micro_batch_size_per_gpu: Optional[int] = None
    """Samples per forward pass on one device. null: the actor's ppo_micro_batch_size_per_gpu."""
    log_prob_use_dynamic_bsz: Optional[bool] = None
    """Micro-batches by tokens. null: as actor.use_dynamic_bsz."""
    log_prob_max_token_len_per_gpu: Optional[int] = None
    """Tokens per micro-batch. null: as actor.ppo_max_token_len_per_gpu."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding, precision and offload of the reference."""
    ulysses_sequence_parallel_size: Optional[int] = None
    """Devices that run each micro-batch together. null: as the actor's."""


@dataclass
class ValKwargs:
    """Sampling during validation."""

    temperature: float = 0.0
    """0: greedy."""
    top_p: float = 1.0
    """Nucleus share."""
    top_k: int = -1
    """Most likely tokens to choose from. -1: all."""
    n: int = 1
    """Samples per validation prompt."""
    do_sample: bool = False
    """False: greedy, whatever the temperature."""


@dataclass
class RolloutConfig:
    """Generation."""

    name: str = "auto"
    """Engine: vllm, hf (transformers, nothing to install), or auto (vllm where it is installed, else hf; the choice is printed)."""
    n: int = 1
    """Samples per prompt. Group estimators (grpo, rloo, ...) need at least 2."""
    temperature: float = 1.0
    """Sampling temperature in training; log-probs are taken at the same temperature."""
    top_p: float = 1.0
    """Nucleus share in training. Below 1 the trained distribution is not the sampled one: a warning says so."""
    top_k: int = -1
    """Most likely tokens to choose from in training. -1: all. Otherwise as top_p."""
    seed: int = 42
    """Seed of sampling; every request's seed is derived from it."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token, for speed measurements."""
    dtype: str = "auto"
    """Dtype of the engine's weights: auto (bfloat16 on GPU, float32 on CPU), bfloat16, float16 or float32."""
    tensor_model_parallel_size: int = 1
    """vLLM: devices that share one copy of the model."""
    gpu_memory_utilization: float = 0.5
    """vLLM: share of GPU memory for weights and KV cache."""
    max_num_seqs: int = 256
    """Sequences generated at the same time by one engine."""
    max_num_batched_tokens: int = 8192
    """vLLM: tokens per engine step."""
    max_model_len: Optional[int] = None
    """vLLM: longest sequence. null: max_prompt_length + max_response_length."""
    enforce_eager: bool = False
    """vLLM: no compilation and no CUDA graphs: starts faster, runs slower."""
    enable_prefix_caching: bool = True
    """vLLM: reuse the KV cache of equal prefixes. Reset at every weight sync."""
    enable_chunked_prefill: bool = True
    """vLLM: split long prompts over engine steps."""
    free_cache_engine: bool = True
    """vLLM on GPU: free weights and KV cache while training (sleep mode)."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments for the engine, by engine name: engine_kwargs.vllm.swap_space=8."""
    kv_cache_gb: float = 1.0
    """vLLM on CPU: size of the KV cache in GiB."""
    log_prob_micro_batch_size_per_gpu: Optional[int] = None
    """Samples per forward pass when old log-probs are computed. null: the actor's ppo_micro_batch_size_per_gpu."""
    log_prob_use_dynamic_bsz: Optional[bool] = None
    """Micro-batches by tokens there. null: as actor.use_dynamic_bsz."""
    log_prob_max_token_len_per_gpu: Optional[int] = None
    """Tokens per micro-batch there. null: as actor.ppo_max_token_len_per_gpu."""
    max_error_rate: float = 0.05
    """Stop the run when a larger share of a step's samples could not be generated. A failed sample has no vote."""
    log_prob_gap_limit: float = 0.05
    """Start-up gate: the run stops when mean |log p_train - log p_rollout| before the first update is above this."""
    val_kwargs: ValKwargs = field(default_factory=ValKwargs)
    """Sampling during validation."""
    sync_bucket_mb: int = 512
    """Weight sync: size of one bucket in MiB."""
    request_timeout_s: float = 1800.0
    """An engine that finishes no generation step for this long, while requests wait, hangs: the run stops with a report."""


@dataclass
class ActorRolloutRefConfig:
    """The policy: its model, updates, reference and generation."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The policy's model."""
    actor: ActorConfig = field(default_factory=ActorConfig)
    """The policy's updates."""
    ref: RefConfig = field(default_factory=RefConfig)
    """The reference policy."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Generation."""


@dataclass
class CriticModelConfig(ModelConfig):
    """The critic's model: a causal LM's body with a scalar head."""

    path: Optional[str] = None  # type: ignore[assignment]
    """Folder or hub name. null: the policy's model."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding, precision and offload of the critic."""


@dataclass
class CriticConfig:
    """The value function, for adv_estimator=gae."""

    enable: Optional[bool] = None
    """null: on exactly when algorithm.adv_estimator=gae."""
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    """The critic's model."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    """Optimizer of the critic."""
    ppo_mini_batch_size: Optional[int] = None
    """Prompts per optimizer step. null: the actor's."""
    ppo_micro_batch_size_per_gpu: Optional[int] = None
    """Samples per forward and backward pass on one device. null: the actor's."""
    forward_micro_batch_size_per_gpu: Optional[int] = None
    """Samples per forward pass when values are computed. null: ppo_micro_batch_size_per_gpu."""
    use_dynamic_bsz: Optional[bool] = None
    """Micro-batches by tokens. null: the actor's."""
    ppo_max_token_len_per_gpu: Optional[int] = None
    """Tokens per micro-batch. null: the actor's."""
    ppo_epochs: Optional[int] = None
    """Passes over each step's samples. null: the actor's."""
    shuffle: Optional[bool] = None
    """Shuffle samples between mini-batches. null: the actor's."""
    cliprange_value: float = 0.5
    """Clip range of the value around its old value."""
    loss_agg_mode: Optional[str] = None
    """As the actor's. null: the actor's."""
    grad_clip: float = 1.0
    """Largest gradient norm."""
    max_nonfinite_updates: int = 3
    """As the actor's."""
    ulysses_sequence_parallel_size: int = 1
    """Devices that run each of the critic's micro-batches together; the actor's says nothing about it."""


@dataclass
class KLCtrlConfig:
    """Weight of the KL penalty in the reward."""

    type: str = "fixed"
    """fixed, or adaptive (Ziegler et al. 2019, section 2.2)."""
    kl_coef: float = 0.001
    """The weight; adaptive starts from it."""
    horizon: int = 10000
    """Adaptive: samples over which the weight follows the error."""
    target_kl: float = 0.1
    """Adaptive: the KL per token to hold."""


@dataclass
class FilterGroupsConfig:
    """Dynamic sampling (DAPO): train only on prompts whose samples differ."""

    enable: bool = False
    """Leave out prompts whose samples all have the same metric, and generate more until data.train_batch_size prompts are left."""
    metric: Optional[str] = None
    """What must differ: score (of the reward function), seq_reward (that with normalisation, clipping and length penalty), or a number
    that the reward function returns beside the score, such as acc (the score where it returns none). null: score."""
    max_num_gen_batches: int = 0
    """Stop the run when this many generations do not fill a step. 0: as many as one pass over the training data takes."""


@dataclass
class RolloutCorrectionConfig:
    """Correcting for the difference between the engine that sampled and the trainer that learns."""

    preset: Optional[str] = None
    """A name for a whole set of the values below: icepop, decoupled_token_is, bypass_ppo_clip, ... null: the values below count."""
    rollout_is: Optional[str] = None
    """Weigh the loss by pi_train / pi_rollout: token (of each token) or sequence (the product over the response). null: do not."""
    rollout_is_threshold: Annotated[Any, "a number, or low_high"] = 2.0
    """Weights are cut to at most this number (TIS); written low_high (0.5_5.0), those outside the band become 0 (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch."""
    rollout_rs: Annotated[Any, "the name of a statistic, or several with commas between them"] = (
        None
    )
    """Take out of the loss what is too far off: token_k1, token_k2, token_k3 by token; seq_sum_*, seq_mean_*, seq_max_* by response."""
    rollout_rs_threshold: Annotated[
        Any, "a number, low_high, or several with commas between them"
    ] = None
    """One for each entry of rollout_rs, or one for all. k1: bounds low_high of the ratio; k2, k3: an upper bound."""
    bypass_mode: bool = False
    """Take the rollout's log-probs as old log-probs, which saves a forward pass."""
    loss_type: str = "ppo_clip"
    """In bypass mode: ppo_clip, or reinforce (no ratio and no clip; weighted by rollout_is)."""


@dataclass
class AlgorithmConfig:
    """From rewards to advantages."""

    adv_estimator: str = "gae"
    """Name in algorithms.advantages.ESTIMATORS (gae, grpo, rloo, ...), or package.module:function of your own."""
    gamma: float = 1.0
    """Discount per token."""
    lam: float = 1.0
    """GAE's lambda."""
    norm_adv_by_std_in_grpo: bool = True
    """grpo: divide by the group's standard deviation. False: Dr.GRPO."""
    use_kl_in_reward: bool = False
    """Subtract kl_ctrl.kl_coef * KL(policy || reference) from each token's reward; the reference is as for actor.use_kl_loss."""
    kl_penalty: str = "kl"
    """Estimator of that KL: kl/k1, abs, mse/k2, low_var_kl/k3."""
    kl_ctrl: KLCtrlConfig = field(default_factory=KLCtrlConfig)
    """Weight of that KL."""
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    """Dynamic sampling."""
    mask_truncated: bool = False
    """Leave responses that were cut off at data.max_response_length out of the loss (DAPO's overlong filtering). Their scores still
    count in their group's baseline."""
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    """Importance weights and rejection between rollout engine and trainer."""
    adv_kwargs: dict[str, Any] = field(default_factory=dict)
    """Settings for an estimator of your own: its inputs.extra."""
    no_think_rl: bool = False
    """Search-R1's key; only false is supported."""


@dataclass
class CustomRewardConfig:
    """Your own reward function."""

    path: Optional[str] = None
    """Python file, or a module's dotted name. null: the scorer that belongs to each row's data source."""
    name: str = "compute_score"
    """Its function: (data_source, solution_str, ground_truth, extra_info, **reward_kwargs) -> float or dict with "score"; may be async."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra keyword arguments for it; without path for the built-in scorer, such as method=flexible for GSM8K."""


@dataclass
class OverlongBufferConfig:
    """A penalty for responses that come near data.max_response_length (DAPO, arXiv:2503.14476, eq. 13)."""

    enable: bool = False
    """Add the penalty to the scores of training samples."""
    len: Optional[int] = None
    """Tokens before data.max_response_length over which it grows from 0 to its whole size. null: a fifth of data.max_response_length."""
    penalty_factor: float = 1.0
    """Its size at data.max_response_length."""


@dataclass
class RewardConfig:
    """How scoring runs, what its failures mean, and what becomes of a training sample's score: ((score - mean) / std, clipped) less
    the length penalty. Validation reports the reward function's own scores."""

    mean: float = 0.0
    """Subtracted from each training score; a constant of the reward function, such as its mean on reference answers."""
    std: float = 1.0
    """Then it is divided by this, another constant (OpenRLHF's normalize_reward)."""
    clip_range: Optional[list[float]] = None
    """Bounds [low,high] of a training score. With adv_estimator=rloo_token_kl, of the score less its baseline; there null is [-10,10]."""
    score_scale: dict[str, str] = field(default_factory=dict)
    """Range of the built-in scorers' scores, by data source: signed (+1 right, -1 wrong, and the part acc with 1 and 0) or zero_one (1 and
    0). `default` is for all other sources, `aime*` for a beginning. Without an entry math_dapo, math and aime* are signed, as in verl."""
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
    """Length penalty."""

    max_error_rate: float = 0.05
    """Stop the run when a larger share of a step's rewards failed. A failed reward is never a 0: its sample has no vote."""
    timeout_s: float = 300.0
    """Longest wait for a step's rewards after its last sample; what is not scored by then counts as failed."""
    item_timeout_s: float = 30.0
    """Longest time for one sample's reward. What takes longer is killed and counts as failed; the others go on."""
    check_ground_truth: bool = True
    """Before step 1, score some ground-truth answers with the reward function and warn when they do not score above 0."""


@dataclass
class TrainerConfig:
    """The loop: how long, how often, where to."""

    nnodes: int = 1
    """Machines."""
    n_gpus_per_node: int = 8
    """Devices per machine; CPU slots where there is no GPU."""
    device: str = "auto"
    """auto (GPU where there is one), cuda or cpu."""
    total_epochs: int = 30
    """Passes over the training data; with algorithm.filter_groups as many steps as that would be, which draw more than they train on."""
    total_training_steps: Optional[int] = None
    """Exactly this many steps, in place of total_epochs."""
    project_name: str = "verlite_examples"
    """First part of the run's name."""
    experiment_name: str = "gsm8k"
    """Second part of the run's name."""
    logger: list[str] = field(default_factory=lambda: ["console"])
    """Trackers: console, wandb, tensorboard. metrics.jsonl is always written."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate once and stop."""
    test_freq: int = -1
    """Validate every this many steps and at the end. -1: never."""
    save_freq: int = -1
    """Save a checkpoint every this many steps and at the end. -1: never."""
    critic_warmup: int = 0
    """The policy is updated from this step on; the steps before it update only the critic. 0 and 1: from the first step on."""
    default_local_dir: str = "checkpoints/${trainer.project_name}/${trainer.experiment_name}"
    """The run directory."""
    default_hdfs_dir: Optional[str] = None
    """Not supported; must be null."""
    resume_mode: str = "auto"
    """auto (from the newest complete checkpoint of the run directory, else from scratch), disable, or resume_path."""
    resume_from_path: Optional[str] = None
    """The global_step_N folder for resume_mode=resume_path."""
    max_actor_ckpt_to_keep: Optional[int] = None
    """Keep this many newest checkpoints. null: all."""
    export_hf: bool = True
    """Write the final policy as a Hugging Face folder (huggingface/) at the end of the run."""
    balance_batch: bool = True
    """Spread samples over devices by length, so that all finish together."""
    rollouts_per_step: int = 8
    """Samples per step written to rollouts/step_N.jsonl. -1: all."""
    log_val_generations: int = 0
    """Print this many validation samples to the console at each validation."""
    resource_wait_s: float = 300.0
    """How long to wait for devices to join the cluster, before failing with a table of what is missing."""
    phase_timeout_s: float = 3600.0
    """A worker call that takes longer than this is reported as stuck, and the run stops."""
    max_failed_saves: int = 3
    """Stop the run after this many failed saves in a row."""


@dataclass
class RayInitConfig:
    """Arguments of ray.init."""

    address: Optional[str] = None
    """Cluster to join. null: RAY_ADDRESS or the job's cluster if there is one, else a local one."""
    num_cpus: Optional[int] = None
    """CPU slots of a local cluster. null: all cores, and enough for the plan."""


@dataclass
class RayKwargs:
    """How Ray is started."""

    ray_init: RayInitConfig = field(default_factory=RayInitConfig)
    """Arguments of ray.init."""


@dataclass
class ClusterConfig:
    """Which role runs on which devices."""

    component_placement: Optional[dict[str, str]] = None
    """Roles to device ranges, such as {"actor,critic": "0-3", rollout: "4-7"}. null: all roles share all devices."""


@dataclass
class EnvConfig:
    """Agent: the world that it acts in."""

    name: str = "search"
    """search (tags and passages as Search-R1), calculator (JSON tool calls in the chat format), or package.module:EnvFactory of your own."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Settings for a world of your own."""


@dataclass
class RetrieverConfig:
    """Search agent: the retriever service."""

    url: Annotated[Any, "an address or a list of addresses"] = "http://127.0.0.1:8000/retrieve"
    """Address, or list of addresses, of the retriever."""
    topk: int = 3
    """Passages per query."""
    timeout_s: float = 15.0
    """Longest time for one request. What takes longer is tried again."""
    deadline_s: float = 60.0
    """Longest time for one search, with all its tries. Then its sample fails: status error, no vote anywhere."""
    max_in_flight: int = 4
    """Requests that one worker sends to one server at the same time."""
    batch_size: int = 64
    """Queries in one request at most."""
    batch_window_ms: float = 5.0
    """How long a query waits for others to share its request."""
    cache_size: int = 10000
    """Queries whose passages a worker remembers. 0: none."""
    on_error: str = "mask"
    """What a failed search does to its sample: mask (status error, trained on nowhere), or observe (the model is told, and goes on)."""
    outage_wait_s: float = 0.0
    """When more samples of a step failed than rollout.max_error_rate allows: how long to wait for the retriever to answer again, before
    the step is sampled anew. 0: the run stops at once."""


@dataclass
class Config:
    """Everything."""

    data: DataConfig = field(default_factory=DataConfig)
    """Prompts."""
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    """The policy."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The value function."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """From rewards to advantages."""
    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)
    """Your own reward function."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """How scoring runs."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The loop."""
    ray_kwargs: RayKwargs = field(default_factory=RayKwargs)
    """How Ray is started."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Which role runs where."""
    max_turns: int = 0
    """Agent: tool calls allowed per sample; the model speaks at most once more than that. 0: single turn."""
    do_search: bool = True
    """Agent: false generates a single turn even when max_turns is above 0."""
    env: EnvConfig = field(default_factory=EnvConfig)
    """Agent: the world that it acts in."""
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    """Search agent: the retriever service."""
