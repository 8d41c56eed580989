"""The fields of TRL's GRPOConfig, RLOOConfig and PPOConfig, and of what stands around them.

Around them: transformers' TrainingArguments, TRL's ModelConfig and ScriptArguments (in YAML files),
and the arguments of the trainer and of peft's LoraConfig (in scripts). Source: trl/trainer,
trl/experimental/ppo and trl/scripts of version 1.16, transformers 5.19. Changed defaults: the tags
from 0.12 on.
"""

from dataclasses import replace

from verlite.convert.rows import (
    ACTOR,
    MODEL,
    NOT_SET,
    ROLLOUT,
    Row,
    derived,
    dropped,
    needless,
    refused,
    same,
)
from verlite.convert.versions import Change, Versions

_LENGTHS = "verlite packs samples of any length"
_LOGS = "metrics.jsonl and rollouts/ of the run directory have them"
_LAUNCH = "verlite starts its own processes with FSDP2"
_HUB = "upload huggingface/ of the run directory: hf upload"
_REF_IS_FIXED = "the reference is the initial policy: leave it out"
_DISTRIBUTION = "training needs the policy's own distribution: leave it out"
_DATA = "data_preprocess/chat_json.py writes one file per split"
_QUANTIZED = "training of quantized models is not supported: leave it out"
_SCHEDULE = "verlite has constant, cosine and linear"
_REWARD_MODEL = "verlite has no reward models: serve it, and set reward.remote.url"
_REMOTE_CODE = (
    "set model.trust_remote_code=true if the model brings code of its own, and you have read it"
)

COMMON: tuple[Row, ...] = (
    # Model and adapters
    derived("model_name_or_path model", MODEL + "path", str),
    derived("model_init_kwargs", "", None, "parameters are float32: fsdp_config.model_dtype"),
    dropped("dtype torch_dtype", None, "parameters are float32: fsdp_config.model_dtype"),
    dropped("model_revision", "main", "download the revision, and give its folder"),
    dropped("trust_remote_code", False, _REMOTE_CODE),
    needless("attn_implementation", None, "torch's attention for packed sequences"),
    derived("use_peft", MODEL + "lora_rank", False),
    derived("lora_r LoraConfig.r", MODEL + "lora_rank", int),
    derived("lora_alpha LoraConfig.lora_alpha", MODEL + "lora_alpha", int),
    derived("lora_target_modules LoraConfig.target_modules", MODEL + "target_modules", None),
    derived("lora_dropout LoraConfig.lora_dropout", "", float, "no dropout in adapters"),
    derived("peft_config", MODEL + "lora_rank", str),
    refused("lora_target_parameters", None, "adapters are on linear layers: leave it out"),
    refused("lora_modules_to_save LoraConfig.modules_to_save", None, "train adapters only"),
    refused("use_rslora LoraConfig.use_rslora", False, "the scale is lora_alpha / lora_rank"),
    refused("use_dora LoraConfig.use_dora", False, "verlite has plain LoRA"),
    needless("lora_task_type LoraConfig.task_type", str, "the policy is a language model"),
    dropped("LoraConfig.bias", "none", "biases are not trained"),
    refused("load_in_8bit", False, _QUANTIZED),
    refused("load_in_4bit", False, _QUANTIZED),
    needless("bnb_4bit_*", object, _QUANTIZED),
    needless("use_bnb_nested_quant", bool, _QUANTIZED),
    refused("quantization_config", None, _QUANTIZED),
    needless("disable_dropout", bool, "set dropout to 0 in model.override_config if it is not"),
    # Data
    derived("dataset_name train_dataset", "data.train_files", str),
    derived("eval_dataset", "data.val_files", str),
    dropped("dataset_config", None, "download that part of the data set"),
    derived("dataset_train_split", "", "train", _DATA),
    derived("dataset_test_split", "", "test", _DATA),
    needless("dataset_streaming", bool, _DATA),
    needless("dataset_num_proc", None, _DATA),
    needless("processing_class", str, "it is the model's tokenizer"),
    needless("remove_unused_columns", bool, _DATA),
    # Batches and length
    derived("per_device_train_batch_size", ACTOR + "ppo_micro_batch_size_per_gpu", 8, least=1),
    derived("gradient_accumulation_steps", ACTOR + "ppo_mini_batch_size", 1, least=1),
    derived("num_train_epochs", "trainer.total_epochs", 3.0),
    derived("max_steps", "trainer.total_training_steps", -1, "in training steps, not updates"),
    needless("per_device_eval_batch_size", int, "rollout.max_num_seqs limits it"),
    needless("auto_find_batch_size", False, "verlite plan shows what fits"),
    # Optimizer
    derived("learning_rate", ACTOR + "optim.lr", 1e-6),
    derived("lr_scheduler_type", ACTOR + "optim.lr_scheduler_type", "linear", _SCHEDULE),
    derived("lr_scheduler_kwargs", ACTOR + "optim.min_lr_ratio", None),
    derived("warmup_steps", ACTOR + "optim.lr_warmup_steps", 0),
    derived("warmup_ratio", ACTOR + "optim.lr_warmup_steps_ratio", float),
    same("weight_decay", ACTOR + "optim.weight_decay", 0.0),
    derived("adam_beta1", ACTOR + "optim.betas", 0.9),
    derived("adam_beta2", ACTOR + "optim.betas", 0.999),
    same("adam_epsilon", ACTOR + "optim.eps", 1e-8),
    same("max_grad_norm", ACTOR + "grad_clip", 1.0),
    derived("optim", "", "adamw_torch_fused", "the optimizer is AdamW"),
    refused("optim_args", None, "the optimizer is AdamW"),
    refused("optim_target_modules", None, "all weights are trained"),
    refused("neftune_noise_alpha", None, "leave it out"),
    refused("label_smoothing_factor", 0.0, "leave it out"),
    # Precision and memory
    derived("bf16", f"{ACTOR}fsdp_config.dtype", True),
    derived("fp16", f"{ACTOR}fsdp_config.dtype", False),
    same("gradient_checkpointing", MODEL + "enable_gradient_checkpointing", True),
    needless("gradient_checkpointing_kwargs", None, "the result is the same"),
    needless("use_liger_kernel", False, "attention and log-probs already save memory"),
    needless("liger_kernel_config", None, "attention and log-probs already save memory"),
    same("torch_compile", ACTOR + "fsdp_config.use_torch_compile", False),
    needless("torch_compile_*", object, "torch's defaults"),
    needless("tf32", None, "passes are in bfloat16"),
    needless("bf16_full_eval", bool, "generation has the dtype of the engine"),
    needless("fp16_full_eval", bool, "generation has the dtype of the engine"),
    needless("torch_empty_cache_steps", None, "memory is freed between phases"),
    needless("use_cache", bool, "passes of training have no cache"),
    needless("use_cpu", False, "trainer.device=cpu"),
    dropped("deepspeed", None, _LAUNCH),
    dropped("fsdp*", object, _LAUNCH),
    needless("ddp_*", object, _LAUNCH),
    needless("accelerator_config", None, _LAUNCH),
    refused("parallelism_config", None, "use actor.ulysses_sequence_parallel_size"),
    needless("local_rank", int, _LAUNCH),
    needless("average_tokens_across_devices", True, "means are over the whole update"),
    # Seeds
    same("seed", f"data.seed {ROLLOUT}seed", 42),
    derived("data_seed", "data.seed", int),
    needless("full_determinism", False, "equal seeds and placement give equal results"),
    # Checkpoints, validation, logs
    derived("output_dir", "trainer.default_local_dir", str),
    derived("save_strategy", "trainer.save_freq", "steps"),
    derived("save_steps", "trainer.save_freq", 500, "in training steps, not updates"),
    derived("save_total_limit", "trainer.max_actor_ckpt_to_keep", int),
    dropped("save_only_model", False, "checkpoints contain what a resume needs"),
    needless("save_on_each_node", False, "all ranks write into one folder"),
    needless("enable_jit_checkpoint", False, "a stopped run saves a checkpoint"),
    dropped("load_best_model_at_end", False, "the final policy is exported"),
    needless("metric_for_best_model", None, "the final policy is exported"),
    needless("greater_is_better", None, "the final policy is exported"),
    derived("resume_from_checkpoint", "trainer.resume_mode", None),
    needless("ignore_data_skip", False, "a resume continues with the next prompts"),
    needless("restore_callback_states_from_checkpoint", False, "callbacks are not supported"),
    dropped("callbacks", None, "callbacks are not supported: docs/extending.md"),
    refused("optimizers", None, "the optimizer is AdamW"),
    derived("eval_strategy", "trainer.test_freq", "no"),
    derived("eval_steps", "trainer.test_freq", float, "in training steps, not updates"),
    derived("eval_on_start", "trainer.val_before_train", False),
    derived("do_eval", "trainer.test_freq", bool),
    needless("eval_*", object, "trainer.test_freq"),
    needless("do_train", bool, "main_ppo trains"),
    needless("do_predict", bool, "trainer.val_only"),
    needless("prediction_loss_only", bool, "validation samples and scores"),
    needless("include_for_metrics", None, _LOGS),
    needless("batch_eval_metrics", bool, _LOGS),
    needless("label_names", None, _LOGS),
    derived("report_to", "trainer.logger", ["none"]),
    derived("run_name", "trainer.experiment_name", str),
    derived("project", "trainer.project_name", str),
    needless("trackio_*", object, "Trackio is not supported"),
    needless("logging_*", object, "every step is logged"),
    needless("log_level*", object, _LOGS),
    needless("log_on_each_node", bool, _LOGS),
    needless("include_num_input_tokens_seen", object, _LOGS),
    needless("disable_tqdm", None, _LOGS),
    needless("debug", "", "trainer.debug"),
    needless("skip_memory_metrics", bool, _LOGS),
    dropped("push_to_hub*", object, _HUB),
    needless("hub_*", object, _HUB),
    needless("dataloader_*", object, "prompts are read in one process"),
    needless("train_sampling_strategy", "random", _LENGTHS),
    needless("length_column_name", str, _LENGTHS),
)

ONLINE: tuple[Row, ...] = (
    # GRPO and RLOO
    derived("num_generations", ROLLOUT + "n", 8, least=1),
    derived("num_generations_eval", ROLLOUT + "val_kwargs.n", int),
    derived("generation_batch_size", "data.train_batch_size", int, "in prompts, not samples"),
    derived("steps_per_generation", "data.train_batch_size", int),
    same("num_iterations", ACTOR + "ppo_epochs", 1, least=1),
    same("max_completion_length", "data.max_response_length", 512),
    derived("max_prompt_length", "data.max_prompt_length data.truncation", int),
    same("shuffle_dataset", "data.shuffle", True),
    needless("pad_to_multiple_of", None, _LENGTHS),
    needless("ds3_gather_for_generation", bool, "weights are sent to engines in buckets"),
    same("temperature", ROLLOUT + "temperature", 1.0),
    same("top_p", ROLLOUT + "top_p", 1.0),
    derived("top_k", ROLLOUT + "top_k", 0),
    refused("min_p", None, _DISTRIBUTION),
    refused("repetition_penalty", 1.0, _DISTRIBUTION),
    refused("generation_kwargs", None, _DISTRIBUTION),
    same("chat_template_kwargs", "data.apply_chat_template_kwargs", dict),
    needless("cache_implementation", None, "engines manage their cache"),
    needless("use_transformers_*", object, "rollout.name=hf generates with transformers"),
    needless("transformers_continuous_batching_config", None, "rollout.max_num_seqs"),
    derived("use_vllm", ROLLOUT + "name", False),
    derived("vllm_mode", f"{ROLLOUT}name {ROLLOUT}servers", "colocate"),
    needless("vllm_model_impl", "vllm", "vLLM chooses it"),
    derived("vllm_enable_sleep_mode", ROLLOUT + "free_cache_engine", False),
    refused("vllm_structured_outputs_regex", None, _DISTRIBUTION),
    refused("vllm_guided_decoding_regex", None, _DISTRIBUTION),
    derived("vllm_server_base_url", ROLLOUT + "servers", None),
    derived("vllm_server_host", ROLLOUT + "servers", "0.0.0.0"),
    derived("vllm_server_port", ROLLOUT + "servers", 8000),
    needless("vllm_server_timeout", float, "rollout.request_timeout_s"),
    needless("vllm_group_port", int, "rollout.weight_transport chooses how weights are sent"),
    derived("vllm_gpu_memory_utilization", ROLLOUT + "gpu_memory_utilization", 0.3),
    derived("vllm_max_model_length vllm_max_model_len", ROLLOUT + "max_model_len", int),
    derived("vllm_tensor_parallel_size", ROLLOUT + "tensor_model_parallel_size", 1),
    derived("beta", f"{ACTOR}use_kl_loss {ACTOR}kl_loss_coef", 0.0),
    derived("epsilon", ACTOR + "clip_ratio", 0.2),
    derived("epsilon_high", ACTOR + "clip_ratio_high", float),
    derived("reward_funcs", "custom_reward_function.path", None),
    derived("reward_weights", "", None, "write the weights into your reward function"),
    refused("reward_model_name_or_path", None, _REWARD_MODEL),
    needless("reward_processing_classes", None, "rewards read text"),
    same("mask_truncated_completions", "algorithm.mask_truncated", False),
    refused("sync_ref_model", False, _REF_IS_FIXED),
    needless("ref_model_*", object, _REF_IS_FIXED),
    needless("log_completions*", object, _LOGS),
    needless("log_multimodal", bool, _LOGS),
    needless("num_completions_to_print", None, _LOGS),
    needless("log_unique_prompts", bool, _LOGS),
    needless("wandb_log_unique_prompts", bool, _LOGS),
)

GRPO: tuple[Row, ...] = (
    derived("delta", ACTOR + "clip_ratio_c", float, "no bound in TRL unless it is given, 3 here"),
    derived("loss_type", f"{ACTOR}loss_agg_mode {ACTOR}policy_loss.loss_mode", "dapo"),
    derived(
        "importance_sampling_level", f"{ACTOR}policy_loss.loss_mode", "token", "sequence: GSPO"
    ),
    derived("sapo_temperature_pos", ACTOR + "tau_pos", 1.0),
    derived("sapo_temperature_neg", ACTOR + "tau_neg", 1.05),
    needless("vespo_*", object, "VESPO is refused"),
    refused(
        "multi_objective_aggregation", "sum_then_normalize", "rewards of a sample are one number"
    ),
    derived("scale_rewards", "algorithm.norm_adv_by_std_in_grpo", "group"),
    refused("top_entropy_quantile", 1.0, "all tokens are trained: use 1"),
    same("entropy_coef", ACTOR + "entropy_coeff", 0.0),
    refused("use_adaptive_entropy", False, "actor.entropy_coeff is constant"),
    needless("entropy_coef_*", object, "actor.entropy_coeff is constant"),
    needless("entropy_target", float, "actor.entropy_coeff is constant"),
    refused("max_tool_calling_iterations", None, "set max_turns and env.name: docs/agents.md"),
    refused("tools", None, "set max_turns and env.name: docs/agents.md"),
    refused("environment_factory", None, "set max_turns and env.name: docs/agents.md"),
    refused("rollout_func", None, "set max_turns and env.name: docs/agents.md"),
    derived("vllm_importance_sampling_correction", "algorithm.rollout_correction.rollout_is", True),
    derived(
        "vllm_importance_sampling_mode",
        "algorithm.rollout_correction.rollout_is",
        "sequence_mask",
    ),
    derived(
        "vllm_importance_sampling_clip_max vllm_importance_sampling_cap",
        "algorithm.rollout_correction.rollout_is_threshold",
        3.0,
    ),
    derived(
        "vllm_importance_sampling_clip_min",
        "algorithm.rollout_correction.rollout_is_threshold",
        float,
    ),
    needless("cast_lm_head_to_fp32", bool, "log-probs are computed in float32"),
    refused("off_policy_mask_threshold", None, "see algorithm.rollout_correction.rollout_rs"),
    derived(
        "use_bias_correction_kl",
        f"{ACTOR}kl_loss_type {ACTOR}kl_loss_importance_weighted",
        True,
        "low_var_kl+ has the gradient of k3 times the ratio",
    ),
    needless("router_aux_loss_coef", float, "verlite has no load-balancing loss"),
)

RLOO: tuple[Row, ...] = (
    refused("normalize_advantages", False, "algorithm.whiten_advantages is over tokens"),
    same("reward_clip_range", "reward.clip_range", None),
    needless("router_aux_loss_coef", float, "verlite has no load-balancing loss"),
)

PPO: tuple[Row, ...] = (
    same("num_ppo_epochs", ACTOR + "ppo_epochs", 4, least=1),
    derived("num_mini_batches", ACTOR + "ppo_mini_batch_size", 1, least=1),
    derived("total_episodes", "trainer.total_training_steps", int),
    needless("local_rollout_forward_batch_size", int, "ppo_micro_batch_size_per_gpu"),
    needless("num_sample_generations", int, _LOGS),
    same("response_length", "data.max_response_length", 53),
    derived("max_prompt_length", "data.max_prompt_length data.truncation", int),
    needless("stop_token", None, "a response ends with the end-of-sequence token"),
    refused("stop_token_id", None, "a response ends with the end-of-sequence token"),
    same("temperature", ROLLOUT + "temperature", 0.7),
    derived(
        "missing_eos_penalty", "", None, "your reward function sees whether the text is complete"
    ),
    derived("sft_model_path", MODEL + "path", str),
    derived("reward_model_path", "custom_reward_function.path", str, _REWARD_MODEL),
    derived("reward_model", "custom_reward_function.path", str, _REWARD_MODEL),
    needless("ref_model", str, "it is the initial policy"),
    needless("value_model", str, "critic.model.path"),
    needless("data_collator", str, _LENGTHS),
    needless("world_size", None, "trainer.n_gpus_per_node"),
    needless("num_total_batches", None, "TRL computes it"),
    needless("micro_batch_size", None, "TRL computes it"),
    needless("local_batch_size", None, "TRL computes it"),
    needless("batch_size", None, "TRL computes it"),
    needless("local_mini_batch_size", None, "TRL computes it"),
    needless("mini_batch_size", None, "TRL computes it"),
    refused("model_adapter_name", None, "verlite trains one adapter"),
    refused("ref_adapter_name", None, "the reference is the model without the adapter"),
    refused("whiten_rewards", False, "advantages are whitened"),
    derived("kl_coef", "algorithm.use_kl_in_reward algorithm.kl_ctrl.kl_coef", 0.05),
    derived("kl_estimator", "algorithm.kl_penalty", "k1"),
    same("cliprange", ACTOR + "clip_ratio", 0.2),
    dropped(
        "vf_coef", 0.1, "the critic has its own optimizer, whose AdamW cancels a constant factor"
    ),
    same("cliprange_value", "critic.cliprange_value", 0.2),
    same("gamma", "algorithm.gamma", 1.0),
    same("lam", "algorithm.lam", 0.95),
    needless("ds3_gather_for_generation", bool, "weights are sent to engines in buckets"),
)

_ROWS = "main_sft takes rows of a prompt and a response, or of messages: docs/sft.md"
_REFERENCE = "the reference is the model at the start: leave it out if it is the same model"
_DPO_LOSS = "verlite has the loss of the paper: loss_type sigmoid, without additions"

TUNING: tuple[Row, ...] = (
    replace(
        derived("max_length max_seq_length", "data.max_length data.truncation", 1024), null=True
    ),
    derived("truncation_mode", "data.truncation", "keep_start"),
    refused("datasets", None, "write one file, and give it as dataset_name"),
    needless("padding_free", bool, _LENGTHS),
    needless("pad_token", str, _LENGTHS),
    needless("pad_to_multiple_of", None, _LENGTHS),
    needless("padding_value", int, _LENGTHS),
    needless("data_collator", str, _LENGTHS),
    needless("activation_offloading", bool, "see fsdp_config"),
    needless("router_aux_loss_coef", float, "verlite has no load-balancing loss"),
    refused("compute_loss_func", None, "verlite has one loss for each command"),
    needless("compute_metrics", str, _LOGS),
    needless("preprocess_logits_for_metrics", str, _LOGS),
)

SFT: tuple[Row, ...] = (
    derived("packing", "data.train_batch_size", False, "batch sizes then count packed sequences"),
    needless("packing_strategy", str, "verlite packs passes, not batches"),
    needless("eval_packing", bool, "the validation loss is over tokens"),
    refused("completion_only_loss", None, "verlite trains on responses: True, or leave it out"),
    derived("assistant_only_loss", "", False, "verlite trains on the assistant's turns only"),
    derived("dataset_text_field", "", str, _ROWS),
    dropped("dataset_kwargs", None, _ROWS),
    needless("dataset_batch_size", int, _ROWS),
    dropped("formatting_func", None, _ROWS),
    derived("loss_type", "", "nll", "nll or chunked_nll"),
    dropped("eos_token", None, "the token is the tokenizer's, or the one that ends a turn"),
    refused("chat_template_path", None, "set model.custom_chat_template to its text"),
    needless("shuffle_dataset", bool, "data.shuffle"),
)

DPO: tuple[Row, ...] = (
    same("beta", "beta", 0.1),
    derived("loss_type", "", ["sigmoid"], "sigmoid"),
    refused("loss_weights", None, _DPO_LOSS),
    refused("label_smoothing", 0.0, _DPO_LOSS),
    refused("f_divergence_type", "reverse_kl", _DPO_LOSS),
    needless("f_alpha_divergence_coef", float, _DPO_LOSS),
    needless("discopop_tau", float, _DPO_LOSS),
    refused("use_weighting", False, _DPO_LOSS),
    refused("ld_alpha", None, _DPO_LOSS),
    refused("rpo_alpha", None, _DPO_LOSS),
    refused("reference_free", False, _REFERENCE),
    derived("ref_model", "", None, _REFERENCE),
    refused("sync_ref_model", False, _REFERENCE),
    needless("ref_model_*", object, _REFERENCE),
    needless("force_use_ref_model", bool, _REFERENCE),
    refused("model_adapter_name", None, "verlite trains one adapter"),
    refused("ref_adapter_name", None, "the reference is the model without the adapter"),
    needless("precompute_ref_*", object, "reference log-probs are computed once"),
    dropped("max_prompt_length", None, "data.max_length limits prompt and response together"),
    dropped("max_completion_length", None, "data.max_length limits prompt and response together"),
    dropped("generate_during_eval", False, "validation computes the loss and the rewards"),
    refused("tools", None, "write them into the prompts"),
    needless("is_encoder_decoder", None, "verlite trains decoders"),
    needless("label_pad_token_id", int, _LENGTHS),
    needless("use_logits_to_keep", bool, "logits are computed for responses only"),
    needless("use_liger_loss", None, "attention and log-probs already save memory"),
    needless("base_model_attribute_name", str, "attention and log-probs already save memory"),
)

DEFAULTS = {
    "rloo": {"num_generations": 2, "beta": 0.05},
    "ppo": {"learning_rate": 3e-6},
    "sft": {"learning_rate": 2e-5},
}
"""Trainer -> fields whose default differs from that of the rows above."""

TABLES = {
    trainer: tuple(
        replace(row, default=DEFAULTS.get(trainer, {}).get(row.name, row.default)) for row in rows
    )
    for trainer, rows in {
        "grpo": (*GRPO, *ONLINE, *COMMON),
        "rloo": (*RLOO, *ONLINE, *COMMON),
        "ppo": (*PPO, *COMMON),
        "sft": (*SFT, *TUNING, *COMMON),
        "dpo": (*DPO, *TUNING, *COMMON),
    }.items()
}
"""Trainer -> its fields. The first row that matches a name counts."""

_ONLINE = (
    Change("max_completion_length", "1.10", 256, 512),
    Change("vllm_mode", "1.0", "server", "colocate"),
)
_GRPO = (
    Change("use_bias_correction_kl", "1.10", False, True),
    *_ONLINE,
    Change("max_prompt_length", "0.26", 512, NOT_SET),
    Change("vllm_importance_sampling_mode", "0.26", "token_truncate", "sequence_mask"),
    Change("vllm_importance_sampling_clip_max", "0.26", 2.0, 3.0),
    Change("vllm_importance_sampling_correction", "0.23", False, True),
    Change("loss_type", "0.22", "bnpo", "dapo"),
    Change("gradient_checkpointing", "0.22", False, True),
    Change("beta", "0.19", 0.04, 0.0),
    Change("bf16", "0.19", False, True),
    Change("temperature", "0.18", 0.9, 1.0),
    Change("top_k", "0.18", 50, 0),
    Change("loss_type", "0.17", "grpo", "bnpo"),
    Change("per_device_train_batch_size", "0.15", 1, 8),
    Change("gradient_accumulation_steps", "0.15", 8, 1),
)
_RLOO = (*_ONLINE, Change("max_prompt_length", "0.27", 512, NOT_SET))
_PPO = (
    Change("learning_rate", "0.29", 5e-5, 3e-6),
    Change("gradient_checkpointing", "0.22", False, True),
    Change("bf16", "0.19", False, True),
)
_SFT = (
    Change("gradient_checkpointing", "0.22", False, True),
    Change("bf16", "0.19", False, True),
)
_DPO = (Change("truncation_mode", "0.29", "keep_end", "keep_start"), *_SFT)
VERSIONS = {
    "grpo": Versions("TRL", "0.15", "1.16", _GRPO),
    "rloo": Versions("TRL", "0.22", "1.16", _RLOO),
    "ppo": Versions("TRL", "0.12", "1.16", _PPO),
    "sft": Versions("TRL", "0.12", "1.16", _SFT),
    "dpo": Versions("TRL", "0.14", "1.16", _DPO),
}
"""Trainer -> its changed defaults. Older versions have other trainers of the same name."""
