"""The configuration schema. Each field declares a key's type, default, help, legal values, and when
it is used.

Key names and units are verl's. `data.train_batch_size` and `ppo_mini_batch_size` count prompts
(times `rollout.n` samples); `*_micro_batch_size_per_gpu` counts samples on one device. Values are
never rescaled in place: `verlite.config.plan` derives all other numbers. Rules that involve several
keys are in `verlite.config.rules`.
"""

import functools
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Optional, Union

from omegaconf import MISSING

from verlite.config.keys import key, section
from verlite.spec import catalog
from verlite.spec.correction import PRESETS
from verlite.spec.weight_routes import TRANSPORTS

Files = Annotated[Any, "a file or a list of files"]
Modules = Annotated[Any, "a list of module names, or a regular expression"]
Threshold = Annotated[Any, "a number, or low_high"]
Names = Annotated[Any, "the name of a statistic, or several with commas between them"]
Thresholds = Annotated[Any, "a number, low_high, or several with commas between them"]
NodeGroups = Annotated[Any, "a list of node groups"]
Addresses = Annotated[Any, "an address or a list of addresses"]

DTYPES = ("float32", "bfloat16", "float16")

GIVEN_VALIDATION = "data.val_files is given"
NOT_THE_ACTOR = "the model has no LoRA adapters, without which it is the reference itself"
OWN_REFERENCE = "the run computes log-probs of a reference or teacher itself (url=null)"
KL_TERM = "a KL term is on (algorithm.use_kl_in_reward or actor.use_kl_loss)"
REFERENCE = "a KL term compares with the reference"
CRITIC = "the run has a critic"
VLLM = "the rollout engine is vllm"
SERVER = "actor_rollout_ref.rollout.name=server"
OWN_ENGINES = "the engines run in this cluster"
GPU = "the run is on GPUs"
OWN_ROWS = "data.custom_cls.path or data.sampler.class_path is given"
AGENT = ("max_turns>0", "do_search=true")
PROGRAM = "agent.command or agent.verifiers is given"
VERIFIERS = "agent.verifiers!=null"
ROW_ESTIMATOR = "the estimator compares whole responses (grpo, grpo_passk, rloo, gpg)"
UNWHITENED = "the estimator does not whiten its advantages"
GDPO = "algorithm.adv_estimator=gdpo"
ASYNC = "trainer.mode=async"
OWN_LORA = "lora_adapter_path determines it"
DISTILLS = "distillation.enabled=true"
DEVICE_HINTS = {
    "npu": "Ascend NPUs are not supported.",
    "gpu": "A GPU is called cuda.",
    "rocm": "An AMD GPU is called cuda too.",
    "hip": "An AMD GPU is called cuda too.",
    "tpu": "TPUs are not supported.",
    "mps": "Apple GPUs are not supported.",
}
"""What to say about devices that are not legal values of trainer.device."""
TRACKER_HINTS = dict.fromkeys(
    ("clearml", "vemlp_wandb"),
    "A class with the methods of verlite.trainer.tracking:Tracker can send metrics anywhere "
    "(docs/trackers.md).",
)
"""What to say about verl's other trackers."""


# fmt: off
# Tables: a key's name, type, default and help; below it what is legal, and when it is used.
@dataclass
class CustomClsConfig:
    """Your own data set in place of files with rows."""

    path: Optional[str] = key(None,
        "Python file, or a module's dotted name. null: rows come from the files themselves.")
    name: Optional[str] = key(None,
        "Name of a class or function: (data_files, config, split) -> a sequence of rows, or a "
        "class written for verl: (data_files, tokenizer, config, ...) (docs/data.md).",
        used_when=".path!=null")


@dataclass
class SamplerConfig:
    """Your own order of the training prompts."""

    class_path: Optional[str] = key(None,
        "Python file, or a module's dotted name. null: data.shuffle and data.seed decide.")
    class_name: Optional[str] = key(None,
        "Name of a class: (data_source, data_config), with the method order(epoch) -> row "
        "numbers, or written for verl, with __iter__ (docs/data.md).",
        used_when=".class_path!=null")


@dataclass
class DataConfig:
    """Where prompts come from and how long they may be."""

    train_files: Files = key(MISSING,
        "File, or list of files, of training prompts: parquet, jsonl or json, here or on the hub "
        "as hf://datasets/OWNER/NAME/FILE (docs/data.md).")
    val_files: Files = key(None,
        "File, or list of files, of validation prompts. null: no validation.")
    prompt_key: str = key("prompt", "Column of the chat messages (a list of role and content).")
    teacher_prompt_key: Optional[str] = key(None,
        "Column of train_files with the chat messages that the teacher of distillation reads in "
        "place of prompt_key's, such as the question with its solution. It judges the same "
        "responses. null: the policy's prompt.",
        used_when=DISTILLS)
    reward_fn_key: str = key("data_source",
        "Column of the data source, which selects the built-in reward function.")
    train_batch_size: int = key(1024,
        "Prompts per training step, over all devices. Each is sampled rollout.n times.",
        bound=">= 1")
    gen_batch_size: Optional[int] = key(None,
        "Prompts per generation while algorithm.filter_groups collects the prompts of a step. "
        "null: train_batch_size.",
        bound=">= 1", used_when="algorithm.filter_groups.enable=true",
        note="otherwise a step generates once")
    val_batch_size: Optional[int] = key(None,
        "Validation prompts per generation call. null: the whole validation set at once.",
        bound=">= 1", used_when=GIVEN_VALIDATION)
    max_prompt_length: int = key(512,
        "Longest prompt in tokens, after the chat template. Agent: longest context before the "
        "last turn.",
        bound=">= 1")
    max_response_length: int = key(512,
        "Longest response in tokens. Agent: longest turn; a whole sample has at most "
        "max_prompt_length + max_response_length tokens.",
        bound=">= 1")
    train_max_samples: int = key(-1,
        "Use at most this many training rows: a random choice with data.seed if data.shuffle is "
        "on, otherwise the first ones. -1: all.",
        bound=">= 1 or -1", remedy="-1 uses all rows.")
    val_max_samples: int = key(-1,
        "Use at most this many validation rows, the first ones. -1: all.",
        bound=">= 1 or -1", remedy="-1 uses all rows.", used_when=GIVEN_VALIDATION)
    shuffle: bool = key(True, "Shuffle the training prompts in each epoch.")
    seed: int = key(42,
        "Seed of the data order and of the choice for train_max_samples. verl's default is null.",
        bound=">= 0", used_when="data.shuffle=true")
    filter_overlong_prompts: bool = key(False,
        "Drop prompts longer than max_prompt_length while loading. False: data.truncation "
        "determines what happens to them.")
    truncation: str = key("error",
        "What happens to a prompt longer than max_prompt_length: error, left (keep the end), "
        "right (keep the start), middle (keep both ends).",
        choices=("error", "left", "right", "middle"),
        used_when="data.filter_overlong_prompts=false",
        note="filter_overlong_prompts drops these prompts")
    apply_chat_template_kwargs: dict[str, Any] = key({},
        "Extra arguments of the tokenizer's chat template, such as enable_thinking.")
    custom_cls: CustomClsConfig = section(CustomClsConfig,
        "Your own data set in place of files with rows.")
    sampler: SamplerConfig = section(SamplerConfig, "Your own order of the training prompts.")
    extra: dict[str, Any] = key({},
        "Settings of your own data set or sampler: it reads them in its config, and "
        "+data.KEY=value sets data.extra.KEY.",
        used_when=OWN_ROWS)
    max_start_length: Optional[int] = key(None,
        "Agent: longest first prompt in tokens. null: max_prompt_length.",
        bound=">= 1", used_when=AGENT)
    max_obs_length: int = key(512,
        "Agent: longest observation in tokens. Longer ones are truncated inside their tags.",
        bound=">= 1", used_when=AGENT)


@dataclass
class ModelConfig:
    """Which pretrained model to use, and how its forward pass runs."""

    path: str = key(MISSING, "Folder with a Hugging Face model, or a model name on the hub.")
    tokenizer_path: Optional[str] = key(None,
        "Folder or hub name of the tokenizer. null: the model's.")
    trust_remote_code: bool = key(False,
        "Run Python code that comes with the model. Only for models whose code you have read.")
    enable_gradient_checkpointing: Union[bool, str] = key(True,
        "Recompute activations in the backward pass. true: all of each layer: least memory, about "
        "a third more computation. attention: keep attention's outputs, which pays for long "
        "samples. products: keep also those of matrix products, half of all activations. false: "
        "keep everything. Results are the same, bit for bit.",
        choices=("attention", "products"),
        hints=dict.fromkeys(("True", "true", "False", "false", "yes", "no"),
            "true and false have no quotes."))
    use_remove_padding: bool = key(True,
        "Packed forward pass without padding tokens. False: padded micro-batches.")
    share_prefixes: bool = key(True,
        "Compute tokens that samples have in common at their start, such as a prompt, once per "
        "micro-batch where that saves time. Results are the same up to rounding.",
        used_when=".use_remove_padding=true")
    override_config: dict[str, Any] = key({},
        "Values that replace those of the model's config.json.")
    custom_chat_template: Optional[str] = key(None,
        "Jinja chat template that replaces the tokenizer's.")
    enable_activation_offload: bool = key(False,
        "GPU: keep the saved input of each layer in host memory between the forward and the "
        "backward pass. Requires enable_gradient_checkpointing=true.",
        used_when=GPU, note="on CPUs activations are in host memory already")
    lora_rank: int = key(0,
        "Train LoRA adapters of this rank and freeze the model's own weights. 0: train all "
        "weights. Usual: 16 to 64, with about ten times the learning rate of full training.",
        bound=">= 0", used_when=".lora_adapter_path=null", note=OWN_LORA)
    lora_alpha: int = key(16,
        "LoRA: the output of an adapter is multiplied by lora_alpha / lora_rank.",
        bound=">= 0", used_when=(".lora_adapter_path=null", ".lora_rank>0"))
    target_modules: Annotated[
        Any, "all-linear, a list of module names, or a regular expression"
    ] = key(
        "all-linear",
        "LoRA: layers with adapters. all-linear: every linear layer except the output head.",
        used_when=(".lora_adapter_path=null", ".lora_rank>0"),
    )
    exclude_modules: Modules = key(None,
        "LoRA: layers without adapters among those that target_modules names.",
        used_when=(".lora_adapter_path=null", ".lora_rank>0"))
    lora_adapter_path: Optional[str] = key(None,
        "LoRA: folder with an adapter in peft's format to start from. It determines rank, alpha "
        "and layers. A KL term compares with the model without the adapter.")


@dataclass
class OptimConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = key(1e-6, "Peak learning rate.", bound=">= 0")
    lr_warmup_steps: int = key(-1,
        "Linear warm-up over this many training steps: step i, counted from 0, uses lr * (i + 1) "
        "/ lr_warmup_steps. -1: lr_warmup_steps_ratio determines the number.",
        bound=">= 0 or -1")
    lr_warmup_steps_ratio: float = key(0.0, "Warm-up steps as a fraction of all training steps.",
        bound=">= 0 and <= 1", used_when=".lr_warmup_steps=-1")
    lr_scheduler_type: str = key("constant",
        "Schedule after the warm-up. cosine and linear end at lr * min_lr_ratio.",
        choices=("constant", "cosine", "linear"))
    min_lr_ratio: float = key(0.0,
        "Cosine and linear: the lowest learning rate as a fraction of lr.",
        bound=">= 0 and <= 1", used_when=".lr_scheduler_type!=constant")
    num_cycles: float = key(0.5, "Cosine: number of waves. 0.5 decays once.", bound="> 0",
        used_when=".lr_scheduler_type=cosine")
    weight_decay: float = key(0.01,
        "Decoupled weight decay of every parameter, as in torch.optim.AdamW.",
        bound=">= 0")
    betas: list[float] = key([0.9, 0.999], "Adam's averaging coefficients.", bound=">= 0 and < 1")
    eps: float = key(1e-8, "Adam's denominator offset.", bound="> 0")


@dataclass
class FSDPConfig:
    """Sharding, precision and offload of one training engine."""

    param_offload: bool = key(False,
        "Keep parameters in host memory outside the phases that need them.")
    optimizer_offload: bool = key(False, "Keep optimizer state in host memory outside updates.")
    reshard_after_forward: bool = key(True,
        "Free gathered parameters after the forward pass (ZeRO-3). False: keep them until the "
        "backward pass (ZeRO-2) and reduce gradients once per update instead of once per "
        "micro-batch: less communication, more memory.")
    model_dtype: str = key("float32",
        "Dtype of the parameters that the optimizer updates. With LoRA: of the frozen ones; "
        "adapters are float32.",
        choices=DTYPES)
    dtype: str = key(
        "auto",
        "Compute dtype of both passes: auto (bfloat16 on GPU, float32 on CPU), bfloat16 or "
        "float32. Gradient reduction is float32.",
        choices=("auto", "float32", "bfloat16"),
        hints={
            "float16": "Gradients in float16 need a loss scaler, which verlite does not have; "
            "bfloat16 needs none."
        },
    )
    fsdp_size: int = key(-1, "Devices of one sharding group. -1: all.", bound=">= 1 or -1")
    use_torch_compile: bool = key(False,
        "Compile each layer with torch.compile; in verl, true compiles only the entropy. The "
        "first passes take a minute longer. On CPUs it does not gain speed, and on the one GPU "
        "that measured it layers were slower than without.")


@dataclass
class RefFSDPConfig(FSDPConfig):
    """Sharding, precision and offload of the reference, which is never trained."""

    optimizer_offload: bool = key(False, "The reference has no optimizer.",
        unused="the reference has no optimizer")
    dtype: str = key("auto",
        "Compute dtype: auto (bfloat16 on GPU, float32 on CPU), bfloat16, float16 or float32.",
        choices=("auto", *DTYPES))


@dataclass
class PolicyLossConfig:
    """Which policy loss, and its own settings."""

    loss_mode: str = key("vanilla",
        "Policy loss: one of catalog.POLICY_LOSSES, or your own package.module:function.",
        choices=tuple(catalog.POLICY_LOSSES), own="function",
        hints={"bypass_mode": "algorithm.rollout_correction.bypass_mode=true selects it."})
    clip_cov_ratio: float = key(0.0002,
        "clip_cov: fraction of the step's tokens that are left out of the loss.",
        bound="> 0 and <= 1", used_when="loss reads clip_cov_ratio")
    clip_cov_lb: float = key(1.0,
        "clip_cov: lower bound of the covariance of the tokens to choose from.",
        bound="finite", used_when="loss reads clip_cov_lb")
    clip_cov_ub: float = key(5.0,
        "clip_cov: upper bound of the covariance of the tokens to choose from.",
        bound="finite", used_when="loss reads clip_cov_ub")
    kl_cov_ratio: float = key(0.0002,
        "kl_cov: fraction of the step's tokens, those of the highest covariance, that get a KL "
        "term.",
        bound="> 0 and <= 1", used_when="loss reads kl_cov_ratio")
    ppo_kl_coef: float = key(0.1, "kl_cov: coefficient of the KL term on the selected tokens.",
        bound=">= 0", used_when="loss reads ppo_kl_coef")
    kwargs: dict[str, Any] = key({}, "Settings of your own loss: inputs.extra.",
        used_when="policy_loss.loss_mode names your own function")


@dataclass
class CheckpointConfig:
    """What a checkpoint of the policy contains."""

    save_contents: list[str] = key(["model", "optimizer", "extra"],
        "model, optimizer and extra are in every checkpoint, because a resume needs them. Add "
        "hf_model for the weights as a Hugging Face folder: global_step_N/actor/huggingface.",
        choices=("model", "optimizer", "extra", "hf_model"))


@dataclass
class ActorConfig:
    """The policy's updates."""

    ppo_mini_batch_size: int = key(256,
        "Prompts per optimizer step (times rollout.n samples), over all devices.",
        bound=">= 1")
    ppo_micro_batch_size_per_gpu: Optional[int] = key(None,
        "Samples per forward and backward pass on one device. Required unless use_dynamic_bsz is "
        "on.",
        bound=">= 1", used_when="a pass counts samples (use_dynamic_bsz=false)")
    use_dynamic_bsz: bool = key(False,
        "Fill micro-batches by tokens (ppo_max_token_len_per_gpu) instead of counting samples.")
    ppo_max_token_len_per_gpu: int = key(16384, "Tokens per micro-batch on one device.",
        bound=">= 1", used_when="a pass fills micro-batches by tokens (use_dynamic_bsz=true)")
    ppo_epochs: int = key(1, "Passes over the samples of each step.", bound=">= 1")
    shuffle: bool = key(False, "Shuffle samples between mini-batches in each pass.")
    data_loader_seed: int = key(42,
        "Seed of the shuffle of samples between mini-batches, and of the tokens that clip_cov "
        "selects.",
        bound=">= 0", used_when="actor.shuffle or critic.shuffle is on, or the loss is clip_cov")
    policy_loss: PolicyLossConfig = section(PolicyLossConfig, "Which policy loss.")
    clip_ratio: float = key(0.2,
        "PPO clip range on both sides, unless clip_ratio_low or clip_ratio_high is set.",
        bound="> 0", used_when=("clip_ratio_low or clip_ratio_high is null", "loss reads clip_low"))
    clip_ratio_low: Optional[float] = key(None, "Clip range below 1. null: clip_ratio.",
        bound="> 0", used_when="loss reads clip_low")
    clip_ratio_high: Optional[float] = key(None,
        "Clip range above 1 (DAPO's clip-higher). null: clip_ratio.",
        bound="> 0", used_when="loss reads clip_high")
    clip_ratio_c: float = key(3.0, "Dual-clip bound of the ratio for negative advantages.",
        bound="> 1", used_when="loss reads clip_c")
    tau_pos: float = key(1.0, "sapo: temperature of the soft clip for positive advantages.",
        bound="> 0", used_when="loss reads tau_pos")
    tau_neg: float = key(1.05, "sapo: temperature of the soft clip for the other advantages.",
        bound="> 0", used_when="loss reads tau_neg")
    loss_agg_mode: str = key("token-mean", "How token losses are aggregated to one number.",
        choices=catalog.AGGREGATION_MODES)
    loss_scale_factor: Optional[float] = key(None,
        "Divisor of seq-mean-token-sum-norm. null: data.max_response_length.",
        bound="> 0", used_when="a loss uses loss_agg_mode=seq-mean-token-sum-norm")
    entropy_coeff: float = key(0.0,
        "Weight of the entropy bonus in the loss. The default was 0.001 in verl up to 0.3 and in "
        "Search-R1.",
        bound="finite")
    calculate_entropy: bool = key(False, "Measure entropy in updates even with entropy_coeff=0.")
    use_kl_loss: bool = key(False,
        "Add KL(policy || reference) to the loss. It starts a reference worker, except with "
        "LoRA: there the model without its adapters is the reference.")
    kl_loss_coef: float = key(0.001,
        "Coefficient of the KL term that use_kl_loss adds to the loss.",
        bound=">= 0", used_when=".use_kl_loss=true")
    kl_loss_type: str = key("low_var_kl",
        "Estimator of the KL term in the loss: kl/k1, abs, mse/k2, low_var_kl/k3. A trailing + "
        "uses k2's gradient with the estimator's value.",
        choices=catalog.KL_KINDS, used_when=".use_kl_loss=true")
    kl_loss_importance_weighted: bool = key(False,
        "Multiply the KL term of each token by pi / pi_old, without gradient through the ratio. "
        "With low_var_kl+, the gradient is then that of KL(policy || reference) also in later "
        "updates on the same samples (DeepSeek-V3.2, arXiv:2512.02556; TRL's "
        "use_bias_correction_kl). A first update has ratio 1.",
        used_when=".use_kl_loss=true")
    grad_clip: float = key(1.0, "Largest gradient norm. Larger gradients are scaled down to it.",
        bound="> 0")
    max_nonfinite_updates: int = key(3,
        "Stop the run after this many consecutive updates were skipped because the loss or the "
        "gradient was not finite.",
        bound=">= 1")
    optim: OptimConfig = section(OptimConfig, "Optimizer of the policy.")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "What a checkpoint contains.")
    fsdp_config: FSDPConfig = section(FSDPConfig, "Sharding, precision and offload of the policy.")
    ulysses_sequence_parallel_size: int = key(1,
        "Adjacent devices that share each micro-batch, each with an equal part of its tokens, "
        "for sequences whose activations are too large for one device. It must divide the "
        "devices and the model's attention heads. A micro-batch size is then per group; the "
        "token limit is ppo_max_token_len_per_gpu x group size.",
        bound=">= 1")
    state_masking: bool = key(True,
        "Agent: leave tool output out of the loss. Always on; false is refused.")


@dataclass
class LogProbServiceConfig:
    """A service that computes log-probs (`verlite serve reference`), if it has a url."""

    url: Addresses = key(None, "Address, or list of addresses, of the service.")
    token_env: Optional[str] = key(None,
        "Environment variable with the bearer token that the service asks for. null: it needs "
        "none.",
        used_when=".url!=null")
    timeout_s: float = key(300.0,
        "Longest time for one request to the service. A slower one is retried.",
        bound="> 0", used_when=".url!=null")
    deadline_s: float = key(900.0,
        "Longest time for one request with all its retries. After that the run stops.",
        bound="> 0", used_when=".url!=null")


@dataclass
class RefConfig(LogProbServiceConfig):
    """The frozen reference policy. It exists if a KL term uses it.

    A distillation teacher that the run computes itself has the same micro-batches and fsdp_config.
    """

    url: Addresses = key(None,
        "Address, or list of addresses, of a reference service (`verlite serve reference`), such "
        "as http://host:8001. null: the run computes reference log-probs on its own devices.",
        used_when=(REFERENCE, NOT_THE_ACTOR))
    log_prob_micro_batch_size_per_gpu: Optional[int] = key(None,
        "Samples per forward pass on one device. null: the actor's ppo_micro_batch_size_per_gpu.",
        bound=">= 1", used_when="reference passes count samples (log_prob_use_dynamic_bsz=false)")
    log_prob_use_dynamic_bsz: Optional[bool] = key(None,
        "Fill the micro-batches of reference passes by tokens. null: as actor.use_dynamic_bsz.",
        used_when=OWN_REFERENCE)
    log_prob_max_token_len_per_gpu: Optional[int] = key(None,
        "Tokens per micro-batch of reference passes. null: as actor.ppo_max_token_len_per_gpu.",
        bound=">= 1",
        used_when="reference passes fill micro-batches by tokens (log_prob_use_dynamic_bsz=true)")
    fsdp_config: RefFSDPConfig = section(RefFSDPConfig,
        "Sharding, precision and offload of the reference.",
        used_when="a reference or teacher has its own worker",
        note="with LoRA the actor without its adapters is the reference, with a url a service")
    ulysses_sequence_parallel_size: Optional[int] = key(None,
        "Devices that share each micro-batch. null: as the actor's.",
        bound=">= 1", used_when=OWN_REFERENCE)


NOT_GREEDY = "otherwise validation is greedy"


@dataclass
class ValKwargs:
    """Sampling during validation."""

    temperature: float = key(0.0, "Sampling temperature in validation. 0: greedy decoding.",
        bound=">= 0", used_when=".do_sample=true", note=NOT_GREEDY)
    top_p: float = key(1.0, "Nucleus sampling: probability mass to sample from.",
        bound="> 0 and <= 1", used_when=".do_sample=true", note=NOT_GREEDY)
    top_k: int = key(-1, "Number of most likely tokens to sample from. -1: all.",
        bound=">= 1 or -1", used_when=".do_sample=true", note=NOT_GREEDY)
    n: int = key(1, "Samples per validation prompt.", bound=">= 1")
    do_sample: bool = key(False, "False: greedy decoding, whatever the temperature.")


@dataclass
class RolloutConfig:
    """Generation."""

    name: str = key("auto",
        "Engine: vllm, hf (transformers, nothing to install), or auto (vllm if it is installed, "
        "otherwise hf; the choice is printed), server (vLLM servers of your own, at "
        "rollout.servers), or your own package.module:Core.",
        choices=("auto", *catalog.ENGINES), own="class",
        hints={"sglang": "SGLang is not supported."})
    servers: Addresses = key(None,
        "Address, or list of addresses, of the vLLM servers that generate, such as "
        "http://host:8000. `verlite serve generation` starts one.",
        used_when=SERVER)
    server_token_env: Optional[str] = key(None,
        "Environment variable of the rollout worker with the token that the servers ask for. "
        "null: none.",
        used_when=SERVER)
    server_timeout_s: float = key(60.0,
        "A server that does not answer a question about its state within this many seconds gets "
        "no more requests, and the other servers get those that it had.",
        bound="> 0", used_when=SERVER)
    server_wait_s: float = key(300.0,
        "The run stops if no server can be used for this many seconds. -1: it waits without end.",
        bound=">= 0 or -1", used_when=SERVER)
    n: int = key(1, "Samples per prompt. Group estimators (grpo, rloo, ...) need at least 2.",
        bound=">= 1")
    temperature: float = key(1.0,
        "Sampling temperature in training. Log-probs are computed at the same temperature.",
        bound="> 0",
        remedy="Training needs temperature > 0. For greedy validation set "
        "actor_rollout_ref.rollout.val_kwargs.")
    top_p: float = key(1.0,
        "Nucleus sampling in training: probability mass to sample from. Below 1 the sampling "
        "distribution differs from the trained policy (a note says so).",
        bound="> 0 and <= 1")
    top_k: int = key(-1,
        "Number of most likely tokens to sample from in training. -1: all. Otherwise the "
        "sampling distribution differs from the trained policy (a note says so).",
        bound=">= 1 or -1")
    seed: int = key(42, "Seed of sampling. The seed of every request is derived from it.",
        bound=">= 0")
    ignore_eos: bool = key(False,
        "Continue after the end-of-sequence token, for speed measurements.")
    dtype: str = key("auto",
        "Dtype of the engine's weights: auto (bfloat16 on GPU, float32 on CPU), bfloat16, "
        "float16 or float32.",
        choices=("auto", *DTYPES))
    tensor_model_parallel_size: int = key(1,
        "vLLM: devices that share one copy of the model. On CPUs a process for each slot.",
        bound=">= 1", used_when=VLLM)
    gpu_memory_utilization: float = key(0.5,
        "vLLM: fraction of GPU memory for weights and KV cache. hf: fraction of the memory that "
        "is free beside its weights, for the KV cache.",
        bound="> 0 and < 1", remedy="It is a fraction: 0.9 is 90%.", used_when=(OWN_ENGINES, GPU),
        note="on CPUs rollout.kv_cache_gb sets the size of vLLM's cache")
    max_num_seqs: int = key(256, "Sequences that one engine generates at the same time.",
        bound=">= 1", used_when=OWN_ENGINES)
    max_num_batched_tokens: int = key(8192, "vLLM: tokens per engine step.", bound=">= 1",
        used_when=VLLM)
    max_model_len: Optional[int] = key(None,
        "vLLM: longest sequence. null: max_prompt_length + max_response_length.",
        bound=">= 1")
    enforce_eager: bool = key(False,
        "vLLM: no compilation and no CUDA graphs: starts faster, runs slower.",
        used_when=VLLM)
    enable_prefix_caching: bool = key(True,
        "vLLM: reuse the KV cache of equal prefixes. It is reset at every weight sync.",
        used_when=VLLM)
    enable_chunked_prefill: bool = key(True,
        "vLLM: split long prompts over several engine steps. Not on CPUs.",
        used_when=VLLM)
    free_cache_engine: bool = key(True,
        "On a GPU: free the engine's weights and KV cache during training (vLLM's sleep mode).",
        used_when=(OWN_ENGINES, GPU),
        note="only engines on this cluster's GPUs have memory to free")
    engine_kwargs: dict[str, Any] = key({},
        "Extra arguments of the engine, by engine name: engine_kwargs.vllm.swap_space=8.")
    kv_cache_gb: float = key(1.0, "vLLM on CPU: size of the KV cache in GiB.", bound="> 0",
        used_when=(VLLM, "the run is on CPUs"),
        note="on GPUs rollout.gpu_memory_utilization sets the size of the cache")
    log_prob_micro_batch_size_per_gpu: Optional[int] = key(None,
        "Samples per forward pass when old log-probs are computed. null: the actor's "
        "ppo_micro_batch_size_per_gpu.",
        bound=">= 1",
        used_when="old log-prob passes count samples (log_prob_use_dynamic_bsz=false)")
    log_prob_use_dynamic_bsz: Optional[bool] = key(None,
        "Fill the micro-batches of old log-prob passes by tokens. null: as actor.use_dynamic_bsz.")
    log_prob_max_token_len_per_gpu: Optional[int] = key(None,
        "Tokens per micro-batch when old log-probs are computed. null: as "
        "actor.ppo_max_token_len_per_gpu.",
        bound=">= 1",
        used_when="old log-prob passes fill batches by tokens (log_prob_use_dynamic_bsz=true)")
    max_error_rate: float = key(0.05,
        "Stop the run if generation fails for a larger fraction of the samples of a step. A "
        "failed sample is excluded from the loss and from all statistics.",
        bound=">= 0 and <= 1")
    log_prob_gap_limit: float | None = key(None,
        "Start-up log-prob check: the run stops if mean |log p_train - log p_rollout| before the "
        "first update is above this. null: 0.05; 0.15 for a mixture of experts in half "
        "precision, where rounding changes which experts a token visits. The limit of "
        "weight_probe is proportional to it.",
        bound="> 0")
    val_kwargs: ValKwargs = section(ValKwargs, "Sampling during validation.",
        used_when=GIVEN_VALIDATION)
    weight_transport: str = key("auto",
        "Weight sync: how engines get the weights. auto: ipc between processes of one device, on "
        "GPUs with trainer.mode=sync and if a trial succeeds; else shared_memory on nodes with an "
        "actor rank, collective on others. shared_memory: one copy in the memory of each host. "
        "ipc: bucket by bucket from the memory of the actor on the same device. collective: "
        "broadcast to one engine of each host (NCCL or gloo). files: safetensors in "
        "trainer.default_local_dir/weights, a folder that all hosts share. Servers get files, or "
        "collective (gloo, without a folder).",
        choices=("auto", *TRANSPORTS))
    weight_probe: str = key("auto",
        "Weight sync: whether trainer and engine also compare their log-probs of fixed tokens. "
        "That shows most weights in a wrong place or layout, which a fingerprint does not. auto: "
        "until it takes 2% of a step or more. always. never.",
        choices=("auto", "always", "never"))
    lora_sync: str = key("merged",
        "Weight sync with LoRA. merged: all weights, with the adapters merged into them. "
        "adapter: the base model at the first sync, then only the adapters, which vLLM applies "
        "beside its weights. Saves transport and loading; generation is slower, and on a GPU "
        "with free_cache_engine the base model stays in host memory while the engine sleeps.",
        choices=("merged", "adapter"))
    sync_bucket_mb: int = key(512,
        "Weight sync: size of one bucket in MiB. ipc on CPUs takes at most 4.", bound=">= 1")
    max_restarts: int = key(3,
        "Times per training step that an engine whose process died (killed, crashed, out of "
        "memory) is started again within the run. It gets the current weights, and its samples "
        "are drawn again with the same seeds, so the numbers are those of an undisturbed run. 0: "
        "the run ends.",
        bound=">= 0", used_when=OWN_ENGINES)
    request_timeout_s: float = key(1800.0,
        "An engine with waiting requests that finishes no generation step for this many seconds "
        "has died: it is started again (see max_restarts).",
        bound="> 0")


@dataclass
class ActorRolloutRefConfig:
    """The policy: its model, updates, reference and generation."""

    model: ModelConfig = section(ModelConfig, "The policy's model.")
    actor: ActorConfig = section(ActorConfig, "The policy's updates.")
    ref: RefConfig = section(RefConfig, "The reference policy.", used_when=KL_TERM)
    rollout: RolloutConfig = section(RolloutConfig, "Generation.")


@dataclass
class CriticModelConfig(ModelConfig):
    """The critic's model: a causal language model with a scalar head."""

    path: Optional[str] = key(None, "Folder or hub name. null: the policy's model.")  # type: ignore[assignment]
    tokenizer_path: Optional[str] = key(None, "The critic has no tokenizer.",
        unused="the critic reads the policy's token ids")
    custom_chat_template: Optional[str] = key(None, "The critic has no chat template.",
        unused="the critic reads the policy's token ids")
    fsdp_config: FSDPConfig = section(FSDPConfig, "Sharding, precision and offload of the critic.")


@dataclass
class CriticConfig:
    """The value function, for adv_estimator=gae."""

    enable: Optional[bool] = key(None, "null: on if algorithm.adv_estimator=gae.")
    model: CriticModelConfig = section(CriticModelConfig, "The critic's model.")
    optim: OptimConfig = section(OptimConfig, "Optimizer of the critic.", lr=1e-5)
    ppo_mini_batch_size: Optional[int] = key(None, "Prompts per optimizer step. null: the actor's.",
        bound=">= 1")
    ppo_micro_batch_size_per_gpu: Optional[int] = key(None,
        "Samples per forward and backward pass on one device. null: the actor's.",
        bound=">= 1", used_when="critic passes count samples (critic.use_dynamic_bsz=false)")
    forward_micro_batch_size_per_gpu: Optional[int] = key(None,
        "Samples per forward pass when values are computed. null: ppo_micro_batch_size_per_gpu.",
        bound=">= 1", used_when="critic passes count samples (critic.use_dynamic_bsz=false)")
    use_dynamic_bsz: Optional[bool] = key(None,
        "Fill micro-batches by tokens. null: as the actor's.")
    ppo_max_token_len_per_gpu: Optional[int] = key(None,
        "Tokens per micro-batch. null: the actor's.",
        bound=">= 1",
        used_when="critic passes fill micro-batches by tokens (critic.use_dynamic_bsz=true)")
    ppo_epochs: Optional[int] = key(None,
        "Passes over the samples of each step. null: the actor's.",
        bound=">= 1")
    shuffle: Optional[bool] = key(None,
        "Shuffle samples between mini-batches. null: as the actor's.")
    cliprange_value: float = key(0.5, "Clip range of the value around its old value.", bound="> 0")
    loss_agg_mode: Optional[str] = key(None, "How token losses are aggregated. null: the actor's.",
        choices=catalog.AGGREGATION_MODES)
    grad_clip: float = key(1.0, "Largest gradient norm.", bound="> 0")
    max_nonfinite_updates: int = key(3,
        "Stop the run after this many consecutive critic updates were skipped because the loss "
        "or the gradient was not finite.",
        bound=">= 1")
    ulysses_sequence_parallel_size: int = key(1,
        "Devices that share each micro-batch of the critic. It does not depend on the actor's.",
        bound=">= 1")


@dataclass
class KLCtrlConfig:
    """Coefficient of the KL penalty in the reward."""

    type: str = key("fixed", "fixed, or adaptive (Ziegler et al. 2019, section 2.2).",
        choices=("fixed", "adaptive"))
    kl_coef: float = key(0.001,
        "Coefficient of the KL penalty in the reward. With type=adaptive: its first value.",
        bound=">= 0")
    horizon: int = key(10000, "Adaptive: number of samples over which kl_coef follows the error.",
        bound="> 0", used_when=".type=adaptive")
    target_kl: float = key(0.1, "Adaptive: target of the KL per token.", bound="> 0",
        used_when=".type=adaptive")


@dataclass
class FilterGroupsConfig:
    """Dynamic sampling (DAPO): train only on prompts whose samples differ."""

    enable: bool = key(False,
        "Leave out prompts whose samples all have the same metric, and generate more until "
        "data.train_batch_size prompts are left.")
    metric: Optional[str] = key(None,
        "What must differ between the samples of a prompt: score (of the reward function), "
        "seq_reward (the score after normalization, clipping and length penalty), or a number "
        "that the reward function returns beside the score, such as acc (the score if it returns "
        "none). null: score.")
    max_num_gen_batches: int = key(0,
        "Stop the run if this many generations do not fill a step. 0: as many as one pass over "
        "the training data takes.",
        bound=">= 0")


RATIO_CORRECTS = "the ratio of that loss already corrects for the rollout engine"


@dataclass
class RolloutCorrectionConfig:
    """Correction of the difference between the engine that samples and the trainer that learns."""

    preset: Optional[str] = key(None,
        "Name of a set of the values below, such as icepop, decoupled_token_is or "
        "bypass_ppo_clip. null: the values below.",
        choices=tuple(PRESETS))
    rollout_is: Optional[str] = key(None,
        "Weight the loss by pi_train / pi_rollout: token (of each token) or sequence (the "
        "product over the response). null: no weights.",
        choices=("token", "sequence"), used_when="the loss is not bypass mode's ppo_clip",
        note=RATIO_CORRECTS)
    rollout_is_threshold: Threshold = key(2.0,
        "rollout_is weights are truncated to at most this number (TIS). With low_high (0.5_5.0), "
        "weights outside the band become 0 (IcePop).",
        used_when=("the loss has rollout_is weights", "the loss is not bypass mode's ppo_clip"))
    rollout_is_batch_normalize: bool = key(False,
        "Divide the rollout_is weights by their mean over the batch.",
        used_when=("the loss has rollout_is weights", "the loss is not bypass mode's ppo_clip"))
    rollout_rs: Names = key(None,
        "Mask tokens or responses whose trainer/rollout ratio is out of bounds: token_k1, "
        "token_k2, token_k3 reject tokens; seq_sum_*, seq_mean_*, seq_max_* reject responses.")
    rollout_rs_threshold: Thresholds = key(None,
        "One threshold for each entry of rollout_rs, or one for all. k1: bounds low_high of the "
        "ratio; k2, k3: an upper bound.",
        used_when="rollout_rs rejects tokens or responses")
    bypass_mode: bool = key(False,
        "Use the rollout's log-probs as old log-probs, which saves a forward pass.")
    loss_type: str = key("ppo_clip",
        "Loss of bypass mode: ppo_clip, or reinforce (no ratio and no clip; weighted by "
        "rollout_is).",
        choices=("ppo_clip", "reinforce"), used_when="bypass mode is on")


@dataclass
class AlgorithmConfig:
    """From rewards to advantages."""

    adv_estimator: str = key(
        "gae",
        "Advantage estimator: one of catalog.ESTIMATORS, or your own package.module:function.",
        choices=tuple(catalog.ESTIMATORS),
        own="function",
        hints={
            "ppo": "PPO with a critic is gae.",
            "tir_optimal_token_baseline": "optimal_token_baseline skips tool text.",
        },
    )
    gamma: float = key(1.0, "Discount per token.", bound=">= 0 and <= 1",
        used_when="estimator reads gamma")
    lam: float = key(1.0, "GAE's lambda.", bound=">= 0 and <= 1", used_when="estimator reads lam")
    norm_adv_by_std_in_grpo: bool = key(True,
        "grpo: divide by the standard deviation of the group. False: Dr.GRPO.",
        used_when="estimator reads norm_adv_by_std_in_grpo")
    gdpo_reward_keys: Optional[list[str]] = key(None,
        "gdpo: names of the reward parts that it normalizes separately, such as "
        "[accuracy_reward,format_reward]: numbers that the reward function returns beside the "
        "score, or score itself.",
        used_when=GDPO)
    gdpo_reward_weights: Optional[list[float]] = key(None,
        "gdpo: weight of each part of gdpo_reward_keys, in their order. null: 1 each.",
        bound="finite", used_when=GDPO)
    use_kl_in_reward: bool = key(False,
        "Subtract kl_ctrl.kl_coef * KL(policy || reference) from the reward of each token. The "
        "reference is the same as for actor.use_kl_loss.")
    kl_in_reward_mode: str = key("sequence",
        "How the KL penalty enters the advantage of an estimator that compares whole responses. "
        "sequence: the KL of the whole response is part of its reward, so it also enters the "
        "baseline (verl). token: the estimator compares the scores; then each token pays for its "
        "own and later KL (OpenRLHF). The other estimators work with rewards per token.",
        choices=("sequence", "token"), used_when=("algorithm.use_kl_in_reward=true", ROW_ESTIMATOR))
    whiten_advantages: bool = key(False,
        "Whiten the advantages over all sampled tokens of the step, after everything else: mean "
        "0, standard deviation 1.",
        used_when=UNWHITENED, note="this estimator whitens its advantages by itself")
    kl_penalty: str = key("kl",
        "Estimator of the KL penalty in the reward: kl/k1, abs, mse/k2, low_var_kl/k3.",
        choices=catalog.KL_KINDS, used_when="algorithm.use_kl_in_reward=true")
    kl_ctrl: KLCtrlConfig = section(KLCtrlConfig, "Coefficient of the KL penalty in the reward.",
        used_when="algorithm.use_kl_in_reward=true",
        note="older verl and Search-R1 subtract this penalty unless actor.use_kl_loss is on, and "
        "so does --config-name search_r1; the KL in the loss has its own coefficient, "
        "actor.kl_loss_coef")
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig, "Dynamic sampling.",
        used_when="algorithm.filter_groups.enable=true")
    mask_truncated: bool = key(False,
        "Leave responses that reached data.max_response_length out of the loss (DAPO's overlong "
        "filtering). Their scores still count in the baseline of their group.")
    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig,
        "Importance weights and rejection between rollout engine and trainer.")
    adv_kwargs: dict[str, Any] = key({}, "Settings of your own estimator: inputs.extra.",
        used_when="algorithm.adv_estimator names your own function")
    no_think_rl: bool = key(False, "Search-R1's key. Only false is supported.")


@dataclass
class CustomRewardConfig:
    """Your own reward function."""

    path: Optional[str] = key(None,
        "Python file, or a module's dotted name. null: the built-in reward function for the data "
        "source of each row.")
    name: str = key("compute_score",
        "Name of the reward function: (data_source, solution_str, ground_truth, extra_info, "
        "**reward_kwargs) -> float or dict with \"score\". It may be async. A function that "
        "names `queries` gets OpenRLHF's arguments: (queries, prompts, labels), lists of one "
        "entry. One that names `solution_strs` gets those of verl's batch reward manager, lists "
        "of one entry.",
        used_when="custom_reward_function.path!=null")
    reward_kwargs: dict[str, Any] = key({},
        "Extra keyword arguments of the reward function. Without path they go to the built-in "
        "function, such as method=flexible for GSM8K.")
    secret_env_vars: list[str] = key([],
        "Environment variables that the reward function needs although their names look like "
        "those of secrets: [OPENAI_API_KEY]. Its processes get no other variable whose name ends "
        "in key, token, secret, password, credentials, pass, auth, pat or cookie, with or "
        "without a number behind it.",
        used_when="custom_reward_function.path!=null")


@dataclass
class OverlongBufferConfig:
    """A penalty for responses close to the longest length.

    It is equation 13 of DAPO (arXiv:2503.14476).
    """

    enable: bool = key(False, "Add the length penalty to the scores of training samples.")
    len: Optional[int] = key(None,
        "Tokens before max_resp_len over which the penalty grows from 0 to its full size. null: "
        "a fifth of data.max_response_length.",
        bound=">= 0")
    max_resp_len: Optional[int] = key(None,
        "Length at which the penalty has its full size. null: data.max_response_length.",
        bound=">= 1")
    penalty_factor: float = key(1.0, "Size of the length penalty at max_resp_len. 0: none.",
        bound=">= 0")


remote_key = functools.partial(key, used_when="reward.remote.url!=null")


@dataclass
class RemoteRewardConfig:
    """A service that scores the samples, in OpenRLHF's wire format."""

    url: Addresses = key(None,
        "Address, or list of addresses, of a reward service: POST {query, prompts, labels}, as "
        "OpenRLHF's remote_rm_url. /get_reward is added to an address without a path. It scores "
        "all samples, in place of built-in scorers and custom_reward_function. null: none.")
    timeout_s: float = remote_key(60.0,
        "Longest time for one request. A slower one is retried in halves.",
        bound="> 0")
    deadline_s: float = remote_key(300.0,
        "Longest time for the reward of one sample with all its retries. After that it counts as "
        "failed.",
        bound="> 0")
    max_in_flight: int = remote_key(4,
        "Requests that one worker sends to one server at the same time.",
        bound=">= 1")
    batch_size: int = remote_key(64, "Largest number of samples in one request.", bound=">= 1")
    batch_window_ms: float = remote_key(50.0,
        "How long a sample waits for others to share its request.",
        bound=">= 0")
    token_env: Optional[str] = remote_key(None,
        "Environment variable with the bearer token that the service asks for. null: it needs "
        "none.")
    outage_wait_s: float = remote_key(0.0,
        "If more rewards of a step failed than reward.max_error_rate allows, and the service did "
        "not answer: how long to wait until it answers again before the step is sampled again. "
        "0: the run stops at once.",
        bound=">= 0")


@dataclass
class RewardConfig:
    """How scoring runs, what failures mean, and how scores of training samples are transformed.

    A training score becomes (score - mean) / std, clipped, minus the length penalty. Validation
    reports the reward function's own scores.
    """

    mean: float = key(0.0,
        "Constant that is subtracted from each training score, such as the mean on reference "
        "answers.",
        bound="finite")
    std: float = key(1.0,
        "Constant that divides each training score after reward.mean is subtracted (OpenRLHF's "
        "normalize_reward).",
        bound="> 0")
    clip_range: Optional[list[float]] = key(None,
        "Bounds [low,high] of a training score. With adv_estimator=rloo_token_kl: of the score "
        "minus its baseline, where null means [-10,10].",
        bound="finite")
    score_scale: dict[str, str] = key({},
        "Range of the built-in scores, by data source: signed (+1 right, -1 wrong, with an entry "
        "acc of 1 or 0) or zero_one (1 or 0). `default` applies to all other sources; a name "
        "that ends in * matches every source that begins with it. Without an entry math_dapo, "
        "math and aime* are signed, as in verl.",
        used_when=("custom_reward_function.path=null", "reward.remote.url=null"),
        note="the score of your own function or service is never rescaled")
    overlong_buffer: OverlongBufferConfig = section(OverlongBufferConfig, "Length penalty.",
        used_when="reward.overlong_buffer.enable=true")
    remote: RemoteRewardConfig = section(RemoteRewardConfig,
        "A reward service, in place of functions.")
    max_error_rate: float = key(0.05,
        "Stop the run if a larger fraction of the rewards of a step failed. A failed reward "
        "never counts as 0: its sample is excluded from the loss and from all statistics.",
        bound=">= 0 and <= 1")
    timeout_s: float = key(300.0,
        "Longest wait for the rewards of a step after its last sample. Later rewards count as "
        "failed.",
        bound="> 0")
    item_timeout_s: float = key(30.0,
        "Longest time for the reward of one sample. A slower one is stopped and counts as failed.",
        bound="> 0", used_when="reward.remote.url=null")
    process_memory_gb: Optional[float] = key(None,
        "Memory in GiB that one process of a reward function may allocate for itself; more is a "
        "MemoryError of that sample. null: half of the machine's memory divided by the number of "
        "these processes, at least 4.",
        bound="> 0", used_when="reward.remote.url=null")
    check_ground_truth: bool = key(True,
        "Before step 1, score some ground-truth answers and warn if they do not score above 0.",
        used_when="reward.remote.url=null")


def limit_key(default: float, help: str) -> Any:
    """Declare the threshold of a detector."""
    return key(default, f"{help} null: not looked for.", bound=">= 0")


@dataclass
class DetectConfig:
    """Warnings about a run that does not learn or drifts (docs/not_learning.md)."""

    enable: bool = key(True, "Look for signs of trouble after each step.")
    patience: int = key(5, "Steps in a row with a sign before the warning is given.", bound=">= 1")
    no_signal: Optional[float] = limit_key(0.95,
        "Share of prompts whose samples all have the same score.")
    cut_share: Optional[float] = limit_key(0.5,
        "Share of responses that are cut at data.max_response_length.")
    prompts_cut: Optional[float] = limit_key(0.1,
        "Share of prompts that are cut at data.max_prompt_length.")
    entropy_low: Optional[float] = limit_key(0.1, "Entropy as a share of that of the first steps.")
    entropy_floor: Optional[float] = limit_key(0.005, "Entropy in nats per token.")
    entropy_high: Optional[float] = limit_key(2.0,
        "Rise of the entropy over that of the first steps, in nats per token.")
    kl: Optional[float] = limit_key(1.0,
        "KL divergence from the old or the reference policy, in nats per token.")
    gap: Optional[float] = limit_key(5.0,
        "Log-prob gap of trainer and rollout engine, as a multiple of that of the first steps.")
    eff_sample_size: Optional[float] = limit_key(0.5,
        "trainer.mode=async: effective sample size of a step, as a share of its tokens.")
    length_bias: Optional[float] = limit_key(0.1,
        "trainer.mode=async: Kolmogorov-Smirnov distance between the lengths of trained and of "
        "sampled responses, over 20 steps.")
    idle: Optional[float] = limit_key(0.5,
        "trainer.mode=async: share of a step in which the trainer waits for samples, or the "
        "engines have none to generate.")
    hacking: Optional[float] = limit_key(0.1,
        "Rise of the training score while the held-out score falls by as much, as a share of the "
        "range of scores.")
    hacking_length: Optional[float] = limit_key(3.0,
        "Growth of responses within 20 steps in which the score rises, as a factor.")
    hacking_format: Optional[float] = limit_key(0.2,
        "Fall of the share of well-formed samples within 20 steps in which the score rises.")
    reward_errors: Optional[float] = limit_key(0.01, "Share of samples whose reward failed.")
    nonfinite: Optional[float] = limit_key(0.0, "Share of updates skipped as not finite.")
    waiting: Optional[float] = limit_key(0.5,
        "Share of a step's time that is spent waiting for rewards, or for one sample's tools.")
    straggler: Optional[float] = limit_key(0.3,
        "Time by which the slowest rank of a role exceeds the median of the others, as a share "
        "of the step's.")
    memory: Optional[float] = limit_key(2.0,
        "Memory of a process, as a multiple of that of its eleventh step.")


@dataclass
class RunConfig:
    """Keys of the section `trainer` that all training commands have: where a run is, how long it
    may take, and where it goes on."""

    usual_epochs: ClassVar[int] = 30
    """Passes over the data if no length is given."""

    device: str = key("auto", "auto: a GPU if there is one.", choices=("auto", "cuda", "cpu"),
        hints=DEVICE_HINTS)
    total_epochs: Optional[int] = key(None,
        "Passes over the training data. null: 30 (main_sft 4, main_dpo 1), or as many as "
        "total_training_steps takes.",
        bound=">= 1")
    total_training_steps: Optional[int] = key(None,
        "End after this many steps, or after total_epochs if that is given and earlier. "
        "Learning-rate schedules are this long.",
        bound=">= 1")
    logger: list[str] = key(["console"],
        "Trackers: console, wandb, tensorboard, mlflow, swanlab, trackio, or your own "
        "package.module:class (docs/trackers.md). metrics.jsonl is always written.",
        choices=("console", *catalog.TRACKERS), own="class",
        hints={"jsonl": "metrics.jsonl is always written."} | TRACKER_HINTS)
    default_local_dir: str = key("checkpoints/${trainer.project_name}/${trainer.experiment_name}",
        "The run directory. Give each run its own project_name and experiment_name: a run that "
        "starts from the beginning renames the metrics.jsonl and huggingface/ of an earlier one.")
    resume_mode: str = key("auto",
        "auto (from the newest complete checkpoint of the run directory, otherwise from "
        "scratch), disable, or resume_path.",
        choices=("auto", "disable", "resume_path"))
    resume_from_path: Optional[str] = key(None, "The global_step_N folder to resume from.",
        used_when="trainer.resume_mode=resume_path")
    max_runtime: Optional[str] = key(None,
        "Stop by itself, with a checkpoint and exit code 75, before this wall time is over: "
        "14400 (seconds), 90m, 4h, 2d or Slurm's 2-12:00:00. It counts from the start of the "
        "Slurm allocation, else of `verlite supervise`, else of the process. The run leaves as "
        "much time as its longest save took.")
    stop_grace_s: float = key(30.0,
        "After a stop signal, this many seconds until a message says that a finished step is not "
        "saved yet. The run goes on to save it; a second signal gives it this long once more.",
        bound="> 0")

    def epochs(self) -> int | None:
        """Return the passes after which the run ends. None: without limit."""
        given = self.total_epochs is not None or self.total_training_steps is not None
        return self.total_epochs if given else self.usual_epochs


@dataclass
class TrainerConfig(RunConfig):
    """The training loop: how long it runs, how often it validates and saves, where it writes."""

    mode: str = key("sync",
        "sync: sample, then update, with the newest weights. pipelined: the same, but log-probs "
        "and gradients of finished prompts are computed while the others are sampled. async: the "
        "engines sample the next steps' prompts while the policy is updated (section "
        "async_training).",
        choices=("sync", "pipelined", "async"))
    nnodes: int = key(1, "Machines.", bound=">= 1")
    n_gpus_per_node: int = key(8,
        "Devices per machine: GPUs, or CPU slots on machines without one.",
        bound=">= 1")
    project_name: str = key("verlite_examples", "First part of the run's name.")
    experiment_name: str = key("gsm8k", "Second part of the run's name.")
    val_before_train: bool = key(True, "Validate before the first step.",
        used_when="trainer.val_only is off or trainer.val_before_train is on",
        note="val_only validates at once")
    val_only: bool = key(False, "Validate once and stop.")
    test_freq: int = key(-1, "Validate every this many steps and at the end. -1: never.",
        bound=">= 1 or -1", remedy="Use -1 for never.")
    save_freq: int = key(-1,
        "Save a checkpoint every this many steps and at the end. -1: only if a signal or "
        "trainer.max_runtime stops the run, so a run that is killed starts over.",
        bound=">= 1 or -1", remedy="Use -1 to save only if the run is stopped.")
    critic_warmup: int = key(0,
        "The policy is updated from this step on; earlier steps update only the critic. 0 and 1: "
        "from the first step on.",
        bound=">= 0", used_when="the run has a critic, or trainer.critic_warmup is 0")
    default_hdfs_dir: Optional[str] = key(None, "Not supported: must be null.")
    max_actor_ckpt_to_keep: Optional[int] = key(None,
        "Keep this many newest checkpoints. null: all.",
        bound=">= 1")
    export_hf: bool = key(True,
        "Write the final policy as a Hugging Face folder (huggingface/) at the end of the run.")
    balance_batch: bool = key(True,
        "Distribute samples over devices by length, so that all finish together.")
    rollouts_per_step: int = key(8,
        "Samples per step that are written to rollouts/step_N.jsonl, with their tokens: the "
        "worst, the best and random ones of each data source. -1: all.",
        bound=">= 0 or -1")
    rollouts_parquet: bool = key(False,
        "Also write all samples of a step to rollouts/step_N.parquet, with the ids, masks, "
        "log-probs and advantages of their tokens.")
    log_val_generations: int = key(0,
        "Print this many validation samples to the console at each validation.",
        bound=">= 0", used_when=GIVEN_VALIDATION)
    detect: DetectConfig = section(DetectConfig, "Warnings about a run that does not learn.")
    resource_wait_s: float = key(300.0,
        "How long to wait for devices to join the cluster before the run fails with a table of "
        "what is missing.",
        bound="> 0")
    phase_timeout_s: float = key(3600.0,
        "A worker call that makes no progress for so long is reported as stuck. A rollout engine "
        "that generates is then started again (see rollout.max_restarts); any other worker ends "
        "the run with exit code 76. A call that has been made before is ended earlier: after 4 x "
        "heartbeat_timeout_s or 10 times its longest earlier pause, whichever is more. With "
        "trainer.mode=async also the limit for samples of which none makes progress.",
        bound="> 0")
    heartbeat_timeout_s: float = key(45.0,
        "A worker that sends no heartbeat for so long and does not answer a signal is frozen: it "
        "is named with the stacks of the others. A rollout engine is then started again (see "
        "rollout.max_restarts); any other worker ends the run with exit code 76. A call that "
        "makes no progress for so long is named in a warning.",
        bound=">= 5")
    debug: bool = key(False,
        "Stop at breakpoint() in workers, environments and reward functions, and wait for a "
        "debugger: debugpy (VS Code), or `ray debug` with RAY_DEBUG=legacy in the environment. "
        "Time limits are lifted.")
    max_failed_saves: int = key(3,
        "Stop the run after this many consecutive failed saves, but not within two minutes of "
        "the first.",
        bound=">= 1")


@dataclass
class AsyncConfig:
    """Sampling while the policy is updated. Every prompt that is drawn is trained: none is dropped
    because its samples took long."""

    max_age: int = key(1,
        "A token is trained at most so many weight versions after the one that sampled it. "
        "Prompts are started so late that this holds. 0: each step waits for its own samples, as "
        "trainer.mode=sync does.",
        bound=">= 0")
    depth: Optional[int] = key(None,
        "Steps' worth of prompts that are sampled, or wait, ahead of the current step. The age "
        "of most tokens is this number; those of slow samples may be older, up to max_age. null: "
        "1, or 0 with max_age=0.",
        bound=">= 0")
    partial_rollout: bool = key(True,
        "Load new weights while samples are generated, which go on with them. Off: a weight sync "
        "waits until all running samples are finished.")
    kv_cache: str = key("fresh",
        "Keys and values of running samples after a weight sync. fresh: computed again with the "
        "new weights. salted: kept, and new samples never reuse those of older weights. mixed: "
        "kept, and reused.",
        choices=("fresh", "salted", "mixed"), used_when=".partial_rollout=true")
    min_eff_sample_size: Optional[float] = key(None,
        "The run ends if the effective sample size of a step is less, as a share of its tokens "
        "(with rollout_correction.rollout_is=sequence: of its samples): the weights that sampled "
        "differ so much from those that train that few tokens decide the update. null: only the "
        "warning of trainer.detect.eff_sample_size.",
        bound="> 0 and < 1")


@dataclass
class RuntimeEnvConfig:
    """What Ray sets up for the processes of the run."""

    env_vars: dict[str, str] = key({},
        "Environment variables of the driver and of every worker: env_vars.NCCL_DEBUG=WARN. A "
        "secret is masked in files and messages; give it as "
        "env_vars.HF_TOKEN='${oc.env:HF_TOKEN}', because other users can read command lines.")
    py_executable: Optional[str] = key(None,
        "Command that starts the Python of the workers, such as a path or 'uv run --no-sync'. It "
        "must find the driver's packages. null: the Python that started Ray on each node.")


@dataclass
class RayInitConfig:
    """Arguments of ray.init."""

    address: Optional[str] = key(None,
        "Cluster to join. null: RAY_ADDRESS or the job's cluster if there is one, otherwise a "
        "local one.")
    num_cpus: Optional[int] = key(None,
        "CPU slots of a local cluster. null: all cores, and enough for the plan.",
        bound=">= 1", used_when="ray_kwargs.ray_init.address=null")
    runtime_env: RuntimeEnvConfig = section(RuntimeEnvConfig, "Environment of the processes.")


@dataclass
class RayKwargs:
    """How Ray is started."""

    ray_init: RayInitConfig = section(RayInitConfig, "Arguments of ray.init.")
    wait_s: Optional[float] = key(None,
        "How long to wait for a named cluster that does not answer yet, in seconds. null: "
        "trainer.resource_wait_s.",
        bound=">= 0")


@dataclass
class ClusterConfig:
    """Which role runs on which devices."""

    component_placement: Optional[dict[str, Any]] = key(None,
        "Roles to device ranges, such as {\"actor,critic\": \"0-3\", rollout: \"4-7\"}. The "
        "roles are actor, rollout, inference (old log-probs on devices of its own), ref and "
        "critic. null: all roles share all devices.")
    node_groups: NodeGroups = key(None,
        "Named groups of nodes, [{label, node_ranks, env_configs}], for placements such as "
        "{node_group: LABEL, placement: 0-7} and for environment variables of the workers on "
        "them.")


@dataclass
class EnvConfig:
    """Agent: the environment that it acts in."""

    name: str = key("search",
        "search (tags and passages as in Search-R1), calculator (JSON tool calls in the chat "
        "format), or your own package.module:EnvFactory.",
        choices=("search", "calculator"), own="class")
    openenv: Optional[str] = key(None,
        "OpenEnv server that plays an episode for each sample: its URL, or a command with {port} "
        "that each rollout worker starts. It takes the place of env.name. null: none.")
    kwargs: dict[str, Any] = key({},
        "Settings of your own environment, or of env.openenv: action, observation, timeout_s ...",
        used_when="env.name names your own class, or env.openenv is given")


program_key = functools.partial(key, used_when=PROGRAM)
verifiers_key = functools.partial(key, used_when=VERIFIERS)


@dataclass
class AgentConfig:
    """Agent: a program of your own, which asks the model over HTTP."""

    command: Optional[str] = key(None,
        "Agent: command that is run for each sample, such as 'python my_agent.py'. It talks to "
        "the model at OPENAI_BASE_URL, as to any server of OpenAI's protocol. Or a Python "
        "function, my_agent.py:agent, that is called with task, base URL and key. null: no "
        "program.")
    preload: list[str] = key([],
        "Modules that programs import, such as [openai]: imported once by each engine, in a "
        "process that forks for each sample; in synchronous training once in each generation "
        "phase. It takes most of the CPU time out of a short program in Python. The modules must "
        "not read the address of the session when they are imported. Random generators that they "
        "keep, such as numpy.random.default_rng(), draw the same in all forks of a process; those "
        "of the modules random and numpy.random do not.",
        used_when=".command!=null")
    verifiers: Optional[str] = key(None,
        "Agent: taskset of the verifiers package, such as gsm8k-v1, that is run for each sample "
        "with its harness and rewards; or ENVIRONMENT+TASKSET. `verlite tasks` writes its rows. "
        "null: none.")
    python: Optional[str] = verifiers_key(None,
        "Python interpreter that has the package verifiers and the taskset. Its dependencies are "
        "not those of training, so it is one of a virtual environment of its own.")
    kwargs: dict[str, Any] = verifiers_key({},
        "Configuration of the environment, as under [env] in a configuration of verifiers: "
        "{agent: {harness: {id: bash}, runtime: {type: subprocess}}}.")
    renderer: Optional[dict[str, Any]] = verifiers_key(None,
        "Who turns messages into tokens. null: the model's chat template, here. {name: qwen3}: "
        "this renderer of verifiers' training client, which knows OpenAI's chat dialect only.")
    reward: str = program_key("program",
        "Who scores a sample. program: the last line that it prints, a number or a JSON object "
        "with score; the rewards of verifiers. function: the reward function, from the model's "
        "texts.",
        choices=("program", "function"))
    credit: str = program_key("graph",
        "Advantage of the model's tokens. graph: that of the sample. branch: the branches of a "
        "sample (sub-agents, retries) weigh the same, whatever their length. A number above 0, "
        "such as 0.9: the sample's advantage times this number for each later answer.")
    timeout_s: float = program_key(600.0,
        "Longest time for one sample, in seconds. After that its program is killed, and the "
        "sample fails: status error, excluded from the loss and from all statistics.",
        bound="> 0")
    memory_gb: float = program_key(4.0, "Largest memory of each process of a program, in GiB.",
        bound="> 0")
    max_processes: int = program_key(64, "Programs of one engine that run at the same time.",
        bound=">= 1")
    secret_env_vars: list[str] = program_key([],
        "Environment variables that a program needs although their names look like those of "
        "secrets: [SEARCH_API_KEY]. It gets no other such variable.")


search_key = functools.partial(key, used_when="env.name=search")


@dataclass
class RetrieverConfig:
    """Search agent: the retriever service."""

    url: Addresses = search_key("http://127.0.0.1:8000/retrieve",
        "Address, or list of addresses, of the retriever.")
    topk: int = search_key(3, "Passages per query.", bound=">= 1")
    timeout_s: float = search_key(15.0, "Longest time for one request. A slower one is retried.",
        bound="> 0")
    deadline_s: float = search_key(60.0,
        "Longest time for one search with all its retries. After that its sample fails: status "
        "error, excluded from the loss and from all statistics.",
        bound="> 0")
    max_in_flight: int = search_key(4,
        "Requests that one worker sends to one server at the same time.",
        bound=">= 1")
    batch_size: int = search_key(64, "Largest number of queries in one request.", bound=">= 1")
    batch_window_ms: float = search_key(5.0,
        "How long a query waits for others to share its request.",
        bound=">= 0")
    token_env: Optional[str] = search_key(None,
        "Environment variable with the bearer token that the retriever asks for. null: it needs "
        "none.")
    cache_size: int = search_key(10000, "Queries whose passages a worker caches. 0: none.",
        bound=">= 0")
    on_error: str = search_key("mask",
        "What a failed search does to its sample: mask (status error, excluded from the loss), "
        "or observe (the model gets an error message and continues).",
        choices=("mask", "observe"))
    outage_wait_s: float = key(0.0,
        "If more samples of a step failed than rollout.max_error_rate allows: how long to wait "
        "for the tools to answer again before the step is sampled again. 0: the run stops at "
        "once.",
        bound=">= 0")


@dataclass
class TeacherConfig(LogProbServiceConfig):
    """The teacher of on-policy distillation."""

    model_path: Optional[str] = key(None,
        "Folder of the teacher, or its name on the hub. The run computes its log-probs as it does "
        "those of a reference. The tokenizer must be the policy's. null: url.",
        used_when=".url=null")
    url: Addresses = key(None,
        "Address, or list of addresses, of a service with the teacher (`verlite serve "
        "reference`), such as http://host:8001. null: model_path.")


@dataclass
class TeacherModelsConfig:
    """The teachers. There is one."""

    teacher_model: TeacherConfig = section(TeacherConfig, "The teacher.")


@dataclass
class DistillationLossConfig:
    """The distillation term, aggregated by actor.loss_agg_mode over the tokens that are trained."""

    loss_mode: str = key("k3",
        "Estimator of KL(policy || teacher) per token: kl/k1, abs, mse/k2, low_var_kl/k3. A "
        "trailing + uses k2's gradient with the estimator's value. The reverse KL is trained by "
        "k1 with use_policy_gradient, and by k2 or a + without it; k3's own gradient is that of "
        "KL(teacher || policy).",
        choices=catalog.KL_KINDS,
        hints={name: "The teacher gives the log-probs of the sampled tokens alone: use k1 with "
               "use_policy_gradient=true, or k2." for name in
               ("forward_kl_topk", "forward_kl_topk_tail")})
    use_policy_gradient: bool = key(False,
        "Train the negative estimate as the advantage of each token, by the actor's policy loss "
        "and clip range. false: the estimate itself is the loss.")
    use_task_rewards: bool = key(True,
        "Add the distillation term to the policy loss of the task's rewards. false: it takes its "
        "place; scores are only measured.")
    distillation_loss_coef: float = key(1.0,
        "Weight of the distillation term beside that of the task's rewards.",
        bound=">= 0", used_when=".use_task_rewards=true")
    log_prob_min_clamp: Optional[float] = key(None,
        "Raise log-probs of policy and teacher to at least this before they are compared. null: "
        "they are taken as they are.",
        bound="finite")
    loss_max_clamp: Optional[float] = key(None,
        "Limit the estimate of a token to this on both sides, without gradient beyond. null: no "
        "limit.",
        bound="> 0")


@dataclass
class DistillationConfig:
    """On-policy distillation: a teacher judges each token that the policy has sampled."""

    enabled: bool = key(False, "Train the policy towards a teacher, on its own samples.")
    teacher_models: TeacherModelsConfig = section(TeacherModelsConfig, "Who the teacher is.",
        used_when=DISTILLS)
    distillation_loss: DistillationLossConfig = section(DistillationLossConfig,
        "What is trained.", used_when=DISTILLS)


@dataclass
class Config:
    """The whole configuration of a training run."""

    data: DataConfig = section(DataConfig, "Prompts.")
    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig, "The policy.")
    critic: CriticConfig = section(CriticConfig, "The value function.", used_when=CRITIC)
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "From rewards to advantages.")
    distillation: DistillationConfig = section(DistillationConfig, "On-policy distillation.")
    custom_reward_function: CustomRewardConfig = section(CustomRewardConfig,
        "Your own reward function.")
    reward: RewardConfig = section(RewardConfig, "How scoring runs.")
    trainer: TrainerConfig = section(TrainerConfig, "The training loop.")
    async_training: AsyncConfig = section(AsyncConfig, "Sampling while the policy is updated.",
        used_when=ASYNC)
    ray_kwargs: RayKwargs = section(RayKwargs, "How Ray is started.")
    cluster: ClusterConfig = section(ClusterConfig, "Which role runs where.")
    max_turns: int = key(0,
        "Agent: tool calls allowed per sample. The model writes one more turn after the last "
        "call. 0: single turn.",
        bound=">= 0", used_when="do_search=true")
    do_search: bool = key(True,
        "Agent: false generates a single turn even if max_turns is above 0.",
        used_when="max_turns>0")
    agent: AgentConfig = section(AgentConfig, "Agent: a program that asks the model over HTTP.")
    env: EnvConfig = section(EnvConfig, "Agent: the environment that it acts in.", used_when=AGENT)
    retriever: RetrieverConfig = section(RetrieverConfig, "Search agent: the retriever service.",
        used_when=AGENT)
# fmt: on
