"""Every flag of OpenRLHF's train_ppo_ray, train_sft and train_dpo, and what becomes of it.

A flag has its underscore name of versions up to 0.9 first, then its dotted name of 0.10 and later.
Source: openrlhf/cli/train_ppo_ray.py of versions 0.5.9, 0.6.1, 0.9.5, 0.10, 0.11.0 and 0.11.2;
train_sft.py and train_dpo.py of 0.4.6 to 0.11.0. Changed defaults: the tags from 0.4.6 on.
"""

import re
from dataclasses import replace

from verlite.convert.rows import ACTOR, MODEL, REF, ROLLOUT, Row, derived, dropped, refused, same
from verlite.convert.tuning import own_key
from verlite.convert.versions import Change, Versions

_DEEPSPEED = "verlite trains with FSDP2, not with DeepSpeed"
_REF_POOL = "the reference uses the actor's devices"
_NO_REWARD_MODEL = (
    "verlite has no reward models: serve it (python -m openrlhf.cli.serve_rm) and give its "
    "address with --remote_rm_url"
)
_NO_REWARD_ROLE = "a reward model inside the run is not supported"
_NO_PTX = "a pretraining loss is not supported"
_ASYNC = "verlite generates and trains in turns; leave it out to train on fresh samples"
_NO_MUON = "the optimizer is AdamW: use --actor.optim adam"
_TEXT_ONLY = "verlite trains on text only"
_WANDB = "wandb reads it from the environment"

FLAGS: tuple[Row, ...] = (
    # Models
    same("pretrain actor.model_name_or_path", MODEL + "path", str),
    derived("critic_pretrain critic.model_name_or_path", "critic.model.path", str),
    refused("reward_pretrain reward.model_name_or_path", str, _NO_REWARD_MODEL),
    dropped(
        "value_head_prefix ds.value_head_prefix", str, "the critic's value head has a fixed name"
    ),
    derived(
        "remote_rm_url reward.remote_url",
        "reward.remote.url custom_reward_function.path",
        str,
        "a Python file is called with one response at a time",
    ),
    # Devices
    derived("actor_num_nodes actor.num_nodes", "trainer.nnodes", 1),
    derived("actor_num_gpus_per_node actor.num_gpus_per_node", "trainer.n_gpus_per_node", 8),
    derived("ref_num_nodes ref.num_nodes", "", 1, _REF_POOL),
    derived("ref_num_gpus_per_node ref.num_gpus_per_node", "", 8, _REF_POOL),
    derived("critic_num_nodes critic.num_nodes", "cluster.component_placement", 1),
    derived("critic_num_gpus_per_node critic.num_gpus_per_node", "cluster.component_placement", 8),
    dropped("reward_num_nodes reward.num_nodes", int, _NO_REWARD_ROLE),
    dropped("reward_num_gpus_per_node reward.num_gpus_per_node", int, _NO_REWARD_ROLE),
    derived("colocate_all_models train.colocate_all", "cluster.component_placement", False),
    derived(
        "colocate_actor_ref train.colocate_actor_ref",
        "cluster.component_placement",
        False,
        _REF_POOL,
    ),
    dropped("colocate_critic_reward train.colocate_critic_reward", False, _NO_REWARD_ROLE),
    # vLLM
    derived(
        "vllm_num_engines vllm.num_engines",
        "cluster.component_placement",
        int,
        "every free group of devices gets an engine",
    ),
    same(
        "vllm_tensor_parallel_size vllm.tensor_parallel_size",
        ROLLOUT + "tensor_model_parallel_size",
        1,
    ),
    same(
        "vllm_gpu_memory_utilization vllm.gpu_memory_utilization",
        ROLLOUT + "gpu_memory_utilization",
        0.95,
    ),
    same("vllm_enable_sleep vllm.enable_sleep", ROLLOUT + "free_cache_engine", False),
    dropped(
        "vllm_sync_backend vllm.sync_backend",
        "nccl",
        "rollout.weight_transport chooses how weights are sent",
    ),
    dropped(
        "vllm_sync_with_ray vllm.sync_with_ray",
        False,
        "rollout.weight_transport chooses how weights are sent",
    ),
    same(
        "enable_prefix_caching vllm.enable_prefix_caching", ROLLOUT + "enable_prefix_caching", False
    ),
    same("enforce_eager vllm.enforce_eager", ROLLOUT + "enforce_eager", False),
    derived(
        "vllm_generate_batch_size rollout.vllm_generate_batch_size",
        "",
        int,
        "more prompts than rollout_batch_size need asynchronous training, which verlite lacks",
    ),
    refused("async_train train.async_enable", False, _ASYNC),
    dropped("async_queue_size train.async_queue_size", 1, _ASYNC),
    refused("partial_rollout train.partial_rollout_enable", False, _ASYNC),
    refused(
        "agent_func_path train.agent_func_path",
        str,
        "write an environment: env.name=package.module:EnvFactory (docs/agents.md)",
    ),
    # Batches
    same("rollout_batch_size rollout.batch_size", "data.train_batch_size", 1024),
    derived(
        "train_batch_size train.batch_size",
        ACTOR + "ppo_mini_batch_size",
        128,
        "divided by n_samples_per_prompt: OpenRLHF counts responses, verlite prompts",
    ),
    same("n_samples_per_prompt rollout.n_samples_per_prompt", ROLLOUT + "n", 1),
    derived(
        "micro_train_batch_size train.micro_batch_size", ACTOR + "ppo_micro_batch_size_per_gpu", 1
    ),
    derived(
        "micro_rollout_batch_size rollout.micro_batch_size",
        f"{ROLLOUT}log_prob_micro_batch_size_per_gpu {REF}log_prob_micro_batch_size_per_gpu",
        1,
    ),
    same("use_dynamic_batch train.dynamic_batch_enable", ACTOR + "use_dynamic_bsz", False),
    derived(
        "train_max_tokens_per_gpu train.max_tokens_per_gpu",
        ACTOR + "ppo_max_token_len_per_gpu",
        16192,
    ),
    derived(
        "rollout_max_tokens_per_gpu rollout.max_tokens_per_gpu",
        f"{ROLLOUT}log_prob_max_token_len_per_gpu {REF}log_prob_max_token_len_per_gpu",
        int,
    ),
    same("max_epochs train.max_epochs", ACTOR + "ppo_epochs", 1),
    same("num_episodes train.num_episodes", "trainer.total_epochs", 1),
    derived("max_samples data.max_samples", "data.train_max_samples", int),
    derived("prompt_max_len", "data.max_prompt_length data.truncation", int),
    derived("generate_max_len", "data.max_response_length", int),
    derived("max_new_tokens rollout.max_new_tokens", "data.max_response_length", int),
    derived(
        "max_len data.max_len",
        "data.max_prompt_length data.max_response_length data.truncation",
        int,
        "tokens of prompt and response together",
    ),
    same("temperature rollout.temperature", ROLLOUT + "temperature", 1.0),
    same("top_p rollout.top_p", ROLLOUT + "top_p", 1.0),
    same("seed train.seed", f"data.seed {ROLLOUT}seed {ACTOR}data_loader_seed", 42),
    dropped(
        "full_determinism train.full_determinism_enable",
        False,
        "runs with the same seed and placement always give the same results",
    ),
    # Algorithm
    derived(
        "advantage_estimator algo.advantage.estimator",
        "algorithm.adv_estimator algorithm.norm_adv_by_std_in_grpo "
        "algorithm.kl_in_reward_mode algorithm.whiten_advantages",
        "gae",
    ),
    derived("gamma algo.advantage.gamma", "algorithm.gamma", 1.0),
    derived("lambd algo.advantage.lambd", "algorithm.lam", 1.0),
    derived(
        "no_advantage_std_norm algo.advantage.no_std_norm",
        "",
        False,
        "verlite whitens with mean and standard deviation, or not at all",
    ),
    dropped(
        "normalize_reward reward.normalize_enable",
        False,
        "it has no effect on remote rewards in OpenRLHF; for constants of your "
        "own use reward.mean and reward.std",
    ),
    derived("reward_clip_range reward.clip_range", "reward.clip_range", [-10.0, 10.0]),
    derived(
        "init_kl_coef algo.kl.init_coef",
        f"algorithm.use_kl_in_reward algorithm.kl_ctrl.kl_coef "
        f"{ACTOR}use_kl_loss {ACTOR}kl_loss_coef",
        0.01,
        "0 or less: no KL and no reference",
    ),
    derived("use_kl_loss algo.kl.use_loss", ACTOR + "use_kl_loss", False),
    derived("kl_estimator algo.kl.estimator", f"algorithm.kl_penalty {ACTOR}kl_loss_type", "k1"),
    derived("use_kl_estimator_k3", f"algorithm.kl_penalty {ACTOR}kl_loss_type", False),
    refused(
        "kl_unbiased_gradient algo.kl.unbiased_gradient",
        False,
        "the nearest is actor.kl_loss_type=low_var_kl+, which uses k2's gradient",
    ),
    derived(
        "kl_target algo.kl.target", "algorithm.kl_ctrl.type algorithm.kl_ctrl.target_kl", float
    ),
    derived("kl_horizon algo.kl.horizon", "algorithm.kl_ctrl.horizon", 10000),
    derived("eps_clip actor.eps_clip", ACTOR + "clip_ratio", 0.2),
    derived(
        "eps_clip_low_high actor.eps_clip_low_high",
        f"{ACTOR}clip_ratio_low {ACTOR}clip_ratio_high",
        list,
    ),
    derived(
        "dual_clip actor.dual_clip",
        ACTOR + "clip_ratio_c",
        float,
        "off in OpenRLHF unless it is given, 3 in verlite",
    ),
    derived("value_clip critic.value_clip", "critic.cliprange_value", 0.5),
    derived(
        "policy_loss_type actor.policy_loss_type",
        f"{ACTOR}policy_loss.loss_mode {ACTOR}loss_agg_mode",
        "ppo",
    ),
    derived("loss_agg_mode actor.loss_agg_mode", ACTOR + "loss_agg_mode", "token-mean"),
    derived(
        "entropy_loss_coef actor.entropy_coef",
        f"{ACTOR}entropy_coeff {ACTOR}calculate_entropy",
        float,
    ),
    refused(
        "aux_loss_coef actor.aux_loss_coef",
        0.0,
        "a load-balancing loss is not supported: leave it out",
    ),
    dropped("ptx_coef", 0.05, _NO_PTX),
    refused("pretrain_data", str, f"{_NO_PTX}: leave it out"),
    dropped("pretrain_data_probs", str, _NO_PTX),
    dropped("pretrain_split", str, _NO_PTX),
    derived("freezing_actor_steps critic.freezing_steps", "trainer.critic_warmup", -1),
    derived(
        "enable_vllm_is_correction algo.advantage.is_correction_enable",
        "algorithm.rollout_correction.rollout_is",
        False,
    ),
    derived(
        "vllm_is_correction_type algo.advantage.is_correction_type",
        "algorithm.rollout_correction.rollout_is algorithm.rollout_correction.rollout_rs",
        "tis",
    ),
    derived(
        "vllm_is_truncated_threshold algo.advantage.is_correction_threshold",
        "algorithm.rollout_correction.rollout_is_threshold",
        [0.5, 5.0],
    ),
    derived(
        "is_correction_level algo.advantage.is_correction_level",
        "algorithm.rollout_correction.rollout_is algorithm.rollout_correction.rollout_rs",
        "off",
    ),
    derived(
        "is_correction_mode algo.advantage.is_correction_mode",
        "algorithm.rollout_correction.rollout_is_threshold",
        "mask",
    ),
    refused(
        "is_correction_gating algo.advantage.is_correction_gating",
        "ratio",
        "verlite gates by the ratio: use --algo.advantage.is_correction_gating ratio",
    ),
    derived(
        "dynamic_filtering algo.dynamic_filtering_enable", "algorithm.filter_groups.enable", False
    ),
    derived(
        "dynamic_filtering_reward_range algo.dynamic_filtering_range",
        "algorithm.filter_groups.metric",
        [0.0, 1.0],
    ),
    derived(
        "overlong_buffer_len reward.overlong_buffer_len",
        "reward.overlong_buffer.enable reward.overlong_buffer.len",
        int,
    ),
    derived(
        "overlong_penalty_factor reward.overlong_penalty_factor",
        "reward.overlong_buffer.penalty_factor",
        1.0,
    ),
    refused(
        "stop_properly_penalty_coef reward.stop_properly_penalty_coef",
        float,
        "use --overlong_buffer_len, or algorithm.mask_truncated=true",
    ),
    # Optimizers
    same("actor_learning_rate actor.adam.lr", ACTOR + "optim.lr", 1e-06),
    derived("critic_learning_rate critic.adam.lr", "critic.optim.lr", 9e-06),
    same("adam_betas actor.adam.betas", ACTOR + "optim.betas", [0.9, 0.95]),
    same("adam_eps actor.adam.eps", ACTOR + "optim.eps", 1e-08),
    derived("l2 actor.adam.weight_decay", ACTOR + "optim.weight_decay", 0.0),
    same("max_norm actor.max_norm", ACTOR + "grad_clip", 1.0),
    derived(
        "lr_scheduler actor.lr_scheduler", ACTOR + "optim.lr_scheduler_type", "cosine_with_min_lr"
    ),
    derived("lr_warmup_ratio actor.lr_warmup_ratio", ACTOR + "optim.lr_warmup_steps_ratio", 0.03),
    derived("min_lr_ratio actor.min_lr_ratio", ACTOR + "optim.min_lr_ratio", 0.1),
    refused("actor_optim actor.optim", "adam", _NO_MUON),
    refused("critic_optim critic.optim", "adam", _NO_MUON),
    derived("critic_adam_betas critic.adam.betas", "critic.optim.betas", list),
    derived("critic_adam_eps critic.adam.eps", "critic.optim.eps", float),
    derived("critic_l2 critic.adam.weight_decay", "critic.optim.weight_decay", float),
    derived("critic_max_norm critic.max_norm", "critic.grad_clip", float),
    derived("critic_lr_scheduler critic.lr_scheduler", "critic.optim.lr_scheduler_type", str),
    derived(
        "critic_lr_warmup_ratio critic.lr_warmup_ratio", "critic.optim.lr_warmup_steps_ratio", float
    ),
    derived("critic_min_lr_ratio critic.min_lr_ratio", "critic.optim.min_lr_ratio", float),
    *(
        dropped(f"{role}_muon_{name} {role}.muon.{name}", default, "Muon is off")
        for role in ("actor", "critic")
        for name, default in (
            ("lr", float),
            ("momentum", float),
            ("ns_steps", int),
            ("nesterov", True),
            ("no_nesterov", False),
        )
    ),
    # DeepSpeed and memory
    derived(
        "zero_stage ds.zero_stage",
        ACTOR + "fsdp_config.reshard_after_forward",
        2,
        "3: parameters are sharded after the forward pass. 2: until the backward pass",
    ),
    same(
        "adam_offload ds.adam_offload",
        ACTOR + "fsdp_config.optimizer_offload",
        False,
        "optimizer state waits in host memory and is updated on the GPU; "
        "DeepSpeed updates on the CPU",
    ),
    derived(
        "deepspeed_enable_sleep ds.enable_sleep",
        f"{ACTOR}fsdp_config.param_offload {ACTOR}fsdp_config.optimizer_offload",
        False,
    ),
    same("ref_reward_offload ref.offload", REF + "fsdp_config.param_offload", False),
    dropped("reward_offload reward.offload", False, _NO_REWARD_ROLE),
    same(
        "param_dtype ds.param_dtype",
        f"{ACTOR}fsdp_config.dtype {ROLLOUT}dtype",
        "bf16",
        "passes compute in bfloat16; the parameters that the optimizer updates "
        "are float32, as in DeepSpeed",
        values={"bf16": "bfloat16"},
    ),
    derived("bf16", f"{ACTOR}fsdp_config.dtype {ROLLOUT}dtype", False),
    dropped(
        "flash_attn", False, "verlite uses torch's attention for sequences of different lengths"
    ),
    dropped(
        "attn_implementation ds.attn_implementation",
        "flash_attention_2",
        "verlite uses torch's attention for sequences of different lengths",
    ),
    dropped("experts_implementation ds.experts_implementation", str, "transformers chooses it"),
    same(
        "gradient_checkpointing actor.gradient_checkpointing_enable",
        MODEL + "enable_gradient_checkpointing",
        False,
    ),
    dropped(
        "gradient_checkpointing_use_reentrant actor.gradient_checkpointing_reentrant",
        False,
        "the result is the same",
    ),
    derived(
        "packing_samples ds.packing_samples",
        MODEL + "use_remove_padding",
        False,
        "verlite always packs; the result is the same",
    ),
    same(
        "ring_attn_size ds.ring_attn_size",
        ACTOR + "ulysses_sequence_parallel_size",
        1,
        "ring attention becomes Ulysses: it must divide the model's attention heads",
    ),
    dropped("ring_head_stride ds.ring_attn_head_stride", 1, "Ulysses has no such setting"),
    dropped(
        "ds_tensor_parallel_size ds.tensor_parallel_size",
        1,
        _DEEPSPEED + ": FSDP2 shards every weight over all devices",
    ),
    dropped("zpg ds.zpg", 1, _DEEPSPEED),
    dropped("overlap_comm ds.overlap_comm", False, _DEEPSPEED),
    dropped("grad_accum_dtype ds.grad_accum_dtype", str, "gradients are float32"),
    dropped("deepcompile ds.deepcompile", False, _DEEPSPEED),
    dropped("local_rank", -1, _DEEPSPEED),
    dropped(
        "use_ds_universal_ckpt ds.use_universal_ckpt",
        False,
        "checkpoints load with any number of devices",
    ),
    dropped(
        "use_liger_kernel ds.use_liger_kernel", False, "attention and log-probs already save memory"
    ),
    dropped("actor_init_on_gpu", False, "weights are loaded shard by shard"),
    dropped("perf", False, "timings are in metrics.jsonl"),
    same("lora_rank ds.lora.rank", MODEL + "lora_rank", 0),
    derived("lora_alpha ds.lora.alpha", MODEL + "lora_alpha", 16),
    derived("target_modules ds.lora.target_modules", MODEL + "target_modules", list),
    refused("lora_dropout ds.lora.dropout", 0.0, "verlite trains adapters without dropout: use 0"),
    refused(
        "load_in_4bit ds.load_in_4bit",
        False,
        "training of quantized models is not supported: leave it out",
    ),
    refused(
        "enable_ema train.enable_ema",
        False,
        "OpenRLHF saves the moving average of the weights; verlite saves the "
        "last ones: leave it out",
    ),
    dropped(
        "ema_beta train.ema_beta", 0.992, "a moving average of the weights (EMA) is not supported"
    ),
    dropped("freeze_visual_encoder actor.freeze_visual_encoder", False, _TEXT_ONLY),
    # Data
    derived("prompt_data data.prompt_dataset", "data.train_files", str),
    derived(
        "prompt_data_probs data.prompt_probs",
        "",
        str,
        "refused with several data sets: verlite concatenates its files",
    ),
    dropped("prompt_split data.prompt_split", str, "files name the split"),
    derived("input_key data.input_key", "data.prompt_key", "input"),
    derived("label_key data.label_key", "", str, "the column reward_model.ground_truth"),
    derived("input_template data.input_template", "", str, "written into the prompts"),
    derived(
        "apply_chat_template data.apply_chat_template",
        "",
        False,
        "verlite always applies the model's chat template",
    ),
    dropped(
        "dataloader_num_workers data.dataloader_num_workers", 0, "prompts are read in one process"
    ),
    dropped(
        "disable_fast_tokenizer data.disable_fast_tokenizer",
        False,
        "transformers has fast tokenizers only",
    ),
    dropped("image_key data.image_key", "images", _TEXT_ONLY),
    refused("max_images_per_prompt data.max_images_per_prompt", 0, _TEXT_ONLY),
    dropped("use_ms", False, "download the model, and give its folder"),
    derived("eval_dataset eval.dataset", "data.val_files", str),
    dropped("eval_split eval.split", str, "files name the split"),
    derived("eval_steps eval.steps", "trainer.test_freq", -1),
    derived(
        "eval_temperature eval.temperature",
        f"{ROLLOUT}val_kwargs.temperature {ROLLOUT}val_kwargs.do_sample",
        0.6,
    ),
    derived("eval_n_samples_per_prompt eval.n_samples_per_prompt", ROLLOUT + "val_kwargs.n", 4),
    # Checkpoints and logs
    same(
        "ckpt_path ckpt.path",
        "trainer.default_local_dir",
        "./ckpt/checkpoints_ppo_ray",
        "the run directory: also metrics, samples, logs and, at the end, huggingface/",
    ),
    derived(
        "save_path ckpt.output_dir",
        "trainer.export_hf",
        "./ckpt",
        "the final weights are in huggingface/ of the run directory",
    ),
    same("save_steps ckpt.save_steps", "trainer.save_freq", -1),
    derived(
        "save_hf_ckpt ckpt.save_hf",
        ACTOR + "checkpoint.save_contents",
        False,
        "each checkpoint also has the weights as a Hugging Face folder",
    ),
    derived(
        "disable_ds_ckpt ckpt.disable_ds",
        "",
        False,
        "a checkpoint always contains what a resume needs",
    ),
    derived("max_ckpt_num ckpt.max_num", "trainer.max_actor_ckpt_to_keep", 3),
    dropped("max_ckpt_mem ckpt.max_mem", float("inf"), "use max_ckpt_num"),
    dropped(
        "best_metric_key ckpt.best_metric_key",
        "",
        "the newest checkpoints are kept, not the best ones",
    ),
    same(
        "load_checkpoint ckpt.load_enable",
        "trainer.resume_mode",
        False,
        values={True: "auto", False: "disable"},
    ),
    dropped(
        "save_value_network critic.save_value_network",
        False,
        "checkpoints contain the critic; the final export has only the policy",
    ),
    dropped("logging_steps logger.logging_steps", 1, "every step is logged"),
    derived("use_wandb logger.wandb.key", "trainer.logger", str),
    dropped("wandb_org logger.wandb.org", str, _WANDB + ": WANDB_ENTITY"),
    dropped("wandb_group logger.wandb.group", str, _WANDB + ": WANDB_RUN_GROUP"),
    same("wandb_project logger.wandb.project", "trainer.project_name", "openrlhf_train_ppo"),
    same("wandb_run_name logger.wandb.run_name", "trainer.experiment_name", str),
    derived("use_tensorboard logger.tensorboard_dir", "trainer.logger", str),
)
"""Every flag of train_ppo_ray."""

VERSIONS = Versions(
    "OpenRLHF",
    "0.4.6",
    "0.11.2",
    (
        Change("micro_rollout_batch_size", "0.10", 8, 1),
        Change("micro_train_batch_size", "0.10", 4, 1),
        Change("vllm_is_truncated_threshold", "0.9.1", [2.0], [0.5, 5.0]),
        Change("value_clip", "0.8.2", 0.2, 0.5),
        Change("lambd", "0.6.4", 0.95, 1.0),
        Change("vllm_gpu_memory_utilization", "0.6.4", 0.9, 0.95),
        Change("lambd", "0.6.0", 1.0, 0.95),
        Change("lambd", "0.5.7", 0.95, 1.0),
    ),
)

# train_sft and train_dpo

_SHARED = (
    "pretrain aux_loss_coef seed full_determinism adam_betas adam_eps l2 max_norm lr_scheduler "
    "lr_warmup_ratio min_lr_ratio zero_stage adam_offload param_dtype bf16 flash_attn "
    "attn_implementation experts_implementation gradient_checkpointing "
    "gradient_checkpointing_use_reentrant packing_samples ring_attn_size ring_head_stride "
    "ds_tensor_parallel_size zpg overlap_comm grad_accum_dtype deepcompile local_rank "
    "use_ds_universal_ckpt use_liger_kernel lora_rank lora_alpha target_modules lora_dropout "
    "load_in_4bit dataloader_num_workers disable_fast_tokenizer use_ms save_path save_steps "
    "disable_ds_ckpt max_ckpt_num max_ckpt_mem load_checkpoint logging_steps use_wandb wandb_org "
    "wandb_group wandb_run_name use_tensorboard"
)
_DPO_LOSS = "verlite has the loss of the paper, without additions: leave it out"


def _tuned(row: Row) -> Row:
    """Return a row of train_ppo_ray as train_sft and train_dpo have it."""
    also = [re.sub(r"^actor\.(?=adam|max_norm|lr_|min_lr)", "", name) for name in row.also]
    keys = " ".join(filter(None, map(own_key, row.to.split())))
    return replace(row, to=keys, also=tuple(re.sub(r"^actor\.", "model.", name) for name in also))


TUNING_FLAGS: tuple[Row, ...] = (
    *(_tuned(row) for row in FLAGS if row.name in _SHARED.split()),
    same("train_batch_size train.batch_size", "data.train_batch_size", 128),
    same("micro_train_batch_size train.micro_batch_size", "data.micro_batch_size_per_gpu", 8),
    same("max_samples data.max_samples", "data.train_max_samples", int),
    refused("optim", "adam", "the optimizer is AdamW: use --optim adam"),
    dropped("muon.lr", float, "Muon is off"),
    dropped("muon.momentum", float, "Muon is off"),
    dropped("muon.ns_steps", int, "Muon is off"),
    dropped("muon.nesterov", True, "Muon is off"),
    dropped("muon.no_nesterov", False, "Muon is off"),
    dropped("disable_trace_cache", False, _DEEPSPEED),
    dropped("torch_compile", False, "see fsdp_config.use_torch_compile"),
    derived("dataset data.dataset", "data.train_files", str),
    derived(
        "dataset_probs data.dataset_probs",
        "",
        str,
        "refused with several data sets: verlite concatenates its files",
    ),
    derived("dataset_split train_split data.dataset_split", "data.train_files", "train"),
    derived("eval_dataset eval.dataset", "data.val_files", str),
    derived("eval_steps eval.steps", "trainer.test_freq", -1, "-1: once per epoch in OpenRLHF"),
    derived(
        "apply_chat_template data.apply_chat_template",
        "model.custom_chat_template",
        False,
        "without it, a template that writes input_template",
    ),
    derived(
        "tokenizer_chat_template data.tokenizer_chat_template", "model.custom_chat_template", str
    ),
    dropped("save_hf_ckpt ckpt.save_hf", False, "`verlite export` reads every checkpoint"),
)

SFT_FLAGS: tuple[Row, ...] = (
    same("learning_rate adam.lr", "optim.lr", 5e-06),
    same("max_epochs train.max_epochs", "trainer.total_epochs", 2),
    derived("max_len data.max_len", "data.max_length data.truncation", 2048),
    derived("eval_split eval.split", "data.val_files", "train"),
    derived("input_key data.input_key", "data.prompt_key data.messages_key", "input"),
    derived("output_key data.output_key", "data.response_key", str),
    derived(
        "input_template data.input_template",
        "model.custom_chat_template",
        "User: {}\nAssistant: ",
        "without apply_chat_template",
    ),
    derived("multiturn data.multiturn", "data.messages_key", False),
    refused(
        "pretrain_mode model.pretrain_mode_enable",
        False,
        "main_sft trains on responses, not on text alone",
    ),
    same("ckpt_path ckpt.path", "trainer.default_local_dir", "./ckpt/checkpoints_sft"),
    same("wandb_project logger.wandb.project", "trainer.project_name", "openrlhf_train_sft"),
)

DPO_FLAGS: tuple[Row, ...] = (
    same("learning_rate adam.lr", "optim.lr", 1e-05),
    same("max_epochs train.max_epochs", "trainer.total_epochs", 1),
    same("beta model.beta", "beta", 0.1),
    refused("ipo model.ipo_enable", False, _DPO_LOSS),
    refused("label_smoothing model.label_smoothing", 0.0, _DPO_LOSS),
    refused("nll_loss_coef model.nll_loss_coef", 0.0, _DPO_LOSS),
    derived("ref_pretrain ref.model_name_or_path", "", str, "the reference is the model itself"),
    dropped("ref_offload ref.offload", False, "the reference's log-probs are computed once"),
    derived("max_len data.max_len", "data.max_length data.truncation", 512),
    derived("eval_split eval.split", "data.val_files", "test"),
    derived("prompt_key data.prompt_key", "data.prompt_key", str),
    same("chosen_key data.chosen_key", "data.chosen_key", "chosen"),
    same("rejected_key data.rejected_key", "data.rejected_key", "rejected"),
    derived(
        "input_template data.input_template",
        "model.custom_chat_template",
        str,
        "without apply_chat_template",
    ),
    same("ckpt_path ckpt.path", "trainer.default_local_dir", "./ckpt/checkpoints_dpo"),
    same("wandb_project logger.wandb.project", "trainer.project_name", "openrlhf_train_dpo"),
)

TABLES: dict[str, tuple[Row, ...]] = {
    "train_ppo_ray": FLAGS,
    "train_sft": (*SFT_FLAGS, *TUNING_FLAGS),
    "train_dpo": (*DPO_FLAGS, *TUNING_FLAGS),
}
"""Program -> its flags."""
TUNING_VERSIONS = Versions(
    "OpenRLHF", "0.4.6", "0.11.2", (Change("eval_split", "0.7.4", "test", "train"),)
)
"""Of train_sft. train_dpo's defaults are the same in all."""
