"""Key names of verl, Search-R1 and RLinf, and what happens to them. Data only; `load` applies it.

A `*` in a name matches any text; in a new name it stands for the same text. A name that is in
neither the schema nor these tables is an error that suggests the nearest names. `sft_aliases` has
the tables of main_sft.
"""

from typing import Any

from verlite.config.translation import Fixed, Tables
from verlite.importing import VERL_VARIABLE

ACTOR = "actor_rollout_ref.actor."
MODEL = "actor_rollout_ref.model."
REF = "actor_rollout_ref.ref."
REWARD_KWARGS = "custom_reward_function.reward_kwargs"
ROLLOUT = "actor_rollout_ref.rollout."

RENAMED: dict[str, str] = {
    "data.train_data_num": "data.train_max_samples",
    "data.val_data_num": "data.val_max_samples",
    "data.shuffle_train_dataloader": "data.shuffle",
    "data.trust_remote_code": f"{MODEL}trust_remote_code",
    "data.tokenizer": f"{MODEL}tokenizer_path",
    f"{ROLLOUT}n_agent": f"{ROLLOUT}n",
    f"{ROLLOUT}n_val": f"{ROLLOUT}val_kwargs.n",
    f"{ROLLOUT}val_temperature": f"{ROLLOUT}val_kwargs.temperature",
    f"{ROLLOUT}enable_sleep_mode": f"{ROLLOUT}free_cache_engine",
    f"{ROLLOUT}prompt_length": "data.max_prompt_length",
    f"{ROLLOUT}response_length": "data.max_response_length",
    f"{ROLLOUT}update_weights_bucket_megabytes": f"{ROLLOUT}sync_bucket_mb",
    f"{ROLLOUT}checkpoint_engine.update_weights_bucket_megabytes": f"{ROLLOUT}sync_bucket_mb",
    f"{ACTOR}checkpoint.contents": f"{ACTOR}checkpoint.save_contents",
    f"{ACTOR}optim.clip_grad": f"{ACTOR}grad_clip",
    f"{ACTOR}optim.warmup_style": f"{ACTOR}optim.lr_scheduler_type",
    f"{ACTOR}use_remove_padding": f"{MODEL}use_remove_padding",
    **{
        f"{ACTOR}{name}": f"{ACTOR}policy_loss.{name}"
        for name in (
            "loss_mode",
            "clip_cov_ratio",
            "clip_cov_lb",
            "clip_cov_ub",
            "kl_cov_ratio",
            "ppo_kl_coef",
        )
    },
    f"{ACTOR}policy_loss.tau_pos": f"{ACTOR}tau_pos",
    f"{ACTOR}policy_loss.tau_neg": f"{ACTOR}tau_neg",
    "*.fsdp_config.mixed_precision.param_dtype": "*.fsdp_config.dtype",
    "*.model.lora.rank": "*.model.lora_rank",
    "*.model.lora.alpha": "*.model.lora_alpha",
    "*.model.lora.adapter_path": "*.model.lora_adapter_path",
    "*.model.lora.target_modules": "*.model.target_modules",
    "*.model.lora.exclude_modules": "*.model.exclude_modules",
    f"{MODEL}lora.merge": f"{ROLLOUT}lora_sync",
    "critic.optim.clip_grad": "critic.grad_clip",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    f"{ACTOR}fsdp_config.ulysses_sequence_parallel_size": f"{ACTOR}ulysses_sequence_parallel_size",
    f"{REF}fsdp_config.ulysses_sequence_parallel_size": f"{REF}ulysses_sequence_parallel_size",
    "critic.fsdp.ulysses_sequence_parallel_size": "critic.ulysses_sequence_parallel_size",
    "critic.model.fsdp_config.ulysses_sequence_parallel_size": (
        "critic.ulysses_sequence_parallel_size"
    ),
    "critic.fsdp.*": "critic.model.fsdp_config.*",
    "reward.custom_reward_function.*": "custom_reward_function.*",
    "reward_model.overlong_buffer.*": "reward.overlong_buffer.*",
    "reward_model.reward_kwargs.overlong_buffer_cfg.*": "reward.overlong_buffer.*",
    "reward.reward_kwargs.overlong_buffer_cfg.*": "reward.overlong_buffer.*",
    "reward_model.reward_kwargs.max_resp_len": "reward.overlong_buffer.max_resp_len",
    "reward.reward_kwargs.max_resp_len": "reward.overlong_buffer.max_resp_len",
    "reward.reward_kwargs": REWARD_KWARGS,
    "reward.reward_kwargs.*": f"{REWARD_KWARGS}.*",
    "reward_model.structure_format_score": f"{REWARD_KWARGS}.structure_format_score",
    "reward_model.final_format_score": f"{REWARD_KWARGS}.final_format_score",
    "reward_model.retrieval_score": f"{REWARD_KWARGS}.retrieval_score",
    "trainer.val_generations_to_log_to_wandb": "trainer.log_val_generations",
    "trainer.checkpoints_dir": "trainer.default_local_dir",
    "ray_init.num_cpus": "ray_kwargs.ray_init.num_cpus",
    "cluster.num_nodes": "trainer.nnodes",
    "cluster.num_gpus_per_node": "trainer.n_gpus_per_node",
}
"""Old name -> new name with the same unit."""

NULL_MEANS: dict[str, Any] = {
    "data.train_max_samples": -1,
    "data.val_max_samples": -1,
    f"{ACTOR}optim.lr_scheduler_type": "constant",
    "critic.optim.lr_scheduler_type": "constant",
}
"""New name -> the value that null under an old name means."""

SPELLINGS: dict[str, dict[str, Any]] = {
    f"{ROLLOUT}lora_sync": {"true": "merged", "false": "adapter"},
    "*.fsdp_config.model_dtype": {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"},
    "*.fsdp_config.dtype": {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"},
    "algorithm.adv_estimator": {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"},
    "algorithm.rollout_correction.rollout_rs": {
        "token": "token_k1",
        "sequence": "seq_sum_k1",
        "geometric": "seq_mean_k1",
    },
    "custom_reward_function.name": {"null": "compute_score"},
    "trainer.test_freq": {"0": -1},
    "trainer.save_freq": {"0": -1},
}
"""New name -> {another spelling of a value, in lower case: the value}."""

SETS: dict[str, tuple[Any, dict[str, Any]]] = {
    "*.fsdp_config.offload_policy": (
        True,
        {"*.fsdp_config.param_offload": True, "*.fsdp_config.optimizer_offload": True},
    ),
    "trainer.remove_previous_ckpt_in_save": (True, {"trainer.max_actor_ckpt_to_keep": 1}),
}
"""Old key -> (its value, {key: the value that it then gets})."""

TURNS_ON: dict[str, tuple[str, Any]] = {
    f"{ROLLOUT}val_kwargs.temperature": (f"{ROLLOUT}val_kwargs.do_sample", True),
}
"""Key -> (another key, the value that it gets if the first one is more than 0 and the other one is
not given)."""

IMPLIED: dict[str, dict[str, str]] = {
    "trainer.logger": {"file": "metrics.jsonl is always written"},
}
"""Key with a list -> {item that is left out: reason}."""

PER_DEVICE: dict[str, str] = {
    f"{ACTOR}ppo_micro_batch_size": f"{ACTOR}ppo_micro_batch_size_per_gpu",
    f"{ROLLOUT}log_prob_micro_batch_size": f"{ROLLOUT}log_prob_micro_batch_size_per_gpu",
    f"{REF}log_prob_micro_batch_size": f"{REF}log_prob_micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size": "critic.ppo_micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size": "critic.forward_micro_batch_size_per_gpu",
}
"""Old size over all devices -> new size per device. The value is divided by the devices."""

_NO_REWARD_MODEL = (
    "rewards come from functions: custom_reward_function.path, or the scorer of the data source"
)
_OWN_MANAGER = (
    f"A manager class of your own is used with {VERL_VARIABLE}=1, or as "
    "custom_reward_function.path=FILE.py custom_reward_function.name=CLASS "
    "custom_reward_function.reward_kwargs.tokenizer=MODEL (docs/migration, From verl)."
)
_KEEP_REWARD = (
    "Give what it computes as custom_reward_function.path: without the key the reward would be "
    f"another one. {_OWN_MANAGER}"
)
_REWARD_MANAGER = (
    "each sample is scored by itself, many at a time, as soon as it is finished; a length penalty "
    "is set by reward.overlong_buffer, and a function of lists (it names solution_strs) is called "
    "with lists of one sample. custom_reward_function.path and name may name a manager class"
)
_ALWAYS_WRITTEN = (
    "samples are saved in rollouts/ of the run directory: trainer.rollouts_per_step, and all of "
    "them with trainer.rollouts_parquet=true"
)
_TEXT_ONLY = "this version trains on text only"
_TEXT_ROWS = "This version trains on text only. Leave the key out if the rows have text only."
_ONE_PATH = "verlite has one rollout path, which trains on the sampled token ids"
_CHUNKED = "log-probs and entropy are always computed in chunks, without storing the logits"
RAY_INIT = "ray_kwargs.ray_init."
RUNTIME_ENV = f"{RAY_INIT}runtime_env."
_RAY_LOGS = "workers write into logs/ of the run directory"
_NO_DASHBOARD = "a local cluster has no dashboard; `ray start --head` starts one"
_RAY_START = (
    "It is an option of `ray start`: start the cluster with it, then run this command there."
)
_WHOLE_JOB = (
    "The driver and its workers must have the same: submit the command with "
    "`ray job submit --runtime-env-json`."
)
_TOOLS = (
    "tools belong to the environment: env.name, which is VerlTools for the tools of a verl YAML "
    "file (docs/migration, From verl)"
)
_VERL_TOOLS = (
    f"With {VERL_VARIABLE}=1 the key works as it is. Or write "
    "env.name=verlite.compat.tools:VerlTools env.kwargs.tool_config_path=FILE max_turns=N, with N "
    "tool calls."
)
_PACKED = "batches are packed without padding"
_NO_NPU = "Ascend NPUs are not supported"
_NO_SANDBOX = "Run generated code in your own reward function: custom_reward_function.path."
_NO_REPLAY = "Router replay is not supported."
_NO_QAT = "Quantization-aware training is not supported."
_FSDP2 = "Training engines use FSDP2; set fsdp_config instead."
_ADAMW = (
    "The optimizer is AdamW of torch: set optim.lr, betas, eps, weight_decay, lr_scheduler_type, "
    "lr_warmup_steps and min_lr_ratio."
)
OTHER_OPTIMIZERS = (
    "decay_type",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "init_lr_ratio",
    "lr_decay_ratio",
    "lr_decay_steps",
    "lr_decay_style",
    "lr_min",
    "lr_start",
    "lr_warmup_init",
    "lr_wsd_decay_*",
    "main_grads_dtype",
    "main_params_dtype",
    "master_weights",
    "min_lr",
    "min_lr_factor",
    "muon_*",
    "name",
    "override_optimizer_config.*",
    "store_param_remainders",
    "use_checkpoint_opt_param_scheduler",
    "use_layer_wise_distributed_optimizer",
    "use_precision_aware_optimizer",
    "weight_decay_incr_style",
)
"""Keys of the optimizers of verl's other training engines."""
ENTROPY_ONLY = (
    "verl compiles the entropy with it; fsdp_config.use_torch_compile compiles the model's layers"
)
_TIMINGS = "timings per phase are in metrics.jsonl"
_CHECKPOINT = (
    "a checkpoint always contains everything that a resume needs; "
    "trainer.export_hf writes the Hugging Face folder"
)

FIXED: dict[str, Fixed] = {
    "*.strategy": (("fsdp", "fsdp2"), "training engines always use FSDP2"),
    "actor_rollout_ref.hybrid_engine": (
        (True,),
        "placement comes from cluster.component_placement",
    ),
    "*.optim.optimizer": (("AdamW",), "the optimizer is AdamW"),
    "*.optim.optimizer_impl": (("torch.optim",), "the optimizer is torch.optim.AdamW"),
    "*.optim.override_optimizer_config": ((None,), "set optim.lr, betas, eps and weight_decay"),
    "*.optim.total_training_steps": (
        (-1, None),
        "schedules follow trainer.total_training_steps or trainer.total_epochs",
    ),
    "*.fsdp_config.offload_policy": (
        (False,),
        "use fsdp_config.param_offload and optimizer_offload",
    ),
    "*.checkpoint.async_save": ((False,), "checkpoints are written before the next step"),
    "*.model.hf_config_path": (
        (None,),
        "the model folder contains its config; use model.override_config to change values",
    ),
    "*.model.external_lib": ((None,), "for models with custom code use model.trust_remote_code"),
    "*.full_determinism": (
        (False,),
        "runs with the same seed and placement always give the same results",
    ),
    "*.model.mtp.enable": ((False,), "multi-token prediction is not supported"),
    f"{ACTOR}freeze_vision_tower": ((False,), _TEXT_ONLY),
    f"{ACTOR}use_rollout_log_probs": ((False,), "use algorithm.rollout_correction.bypass_mode"),
    f"{ROLLOUT}do_sample": (
        (True,),
        "training always samples; rollout.val_kwargs.do_sample is for validation",
    ),
    f"{ROLLOUT}calculate_log_probs": (
        (True, False),
        "rollout log-probs are always stored and compared with the trainer's",
    ),
    f"{ROLLOUT}mode": (("sync", "async"), _ONE_PATH),
    f"{ROLLOUT}data_parallel_size": ((1,), "every free device group gets its own engine"),
    f"{ROLLOUT}expert_parallel_size": ((1,), "expert parallelism is not supported"),
    f"{ROLLOUT}pipeline_model_parallel_size": ((1,), "use rollout.tensor_model_parallel_size"),
    f"{ROLLOUT}multi_turn.enable": (
        (False,),
        "multi-turn rollouts are configured by max_turns and env.name (docs/agents.md)",
    ),
    f"{ROLLOUT}agent.default_agent_loop": (("single_turn_agent",), _ONE_PATH),
    f"{ROLLOUT}quantization": (
        (None,),
        "quantized weights have another fingerprint than the trainer's, so no weight sync could be "
        "verified",
    ),
    f"{ROLLOUT}nnodes": (
        (0, None),
        "give rollout its own devices with cluster.component_placement",
    ),
    f"{ROLLOUT}n_gpus_per_node": (
        (0, None),
        "give rollout its own devices with cluster.component_placement",
    ),
    f"{ROLLOUT}limit_images": ((None,), _TEXT_ONLY),
    f"{ROLLOUT}use_fire_sampling": ((False,), "use rollout.temperature, top_p and top_k"),
    "data.validation_shuffle": ((False,), "validation rows keep their order"),
    "data.datagen.*": ((None,), "prompts come from data.train_files"),
    "data.tool_config_path": ((None,), _TOOLS, _VERL_TOOLS),
    f"{ROLLOUT}multi_turn.tool_config_path": ((None,), _TOOLS, _VERL_TOOLS),
    "data.function_tool_path": ((None,), _TOOLS),
    "reward_model.enable": ((False,), _NO_REWARD_MODEL),
    "reward.reward_model.enable": ((False,), _NO_REWARD_MODEL),
    **dict.fromkeys(
        ("reward_model.reward_manager", "reward_manager.name", "reward.reward_manager.name"),
        (("naive", "dapo", "prime", "batch", "gdpo"), _REWARD_MANAGER, _KEEP_REWARD),
    ),
    "model_engine": (("dp", "fsdp"), "training engines always use FSDP2"),
    "data.continuous_token.enable": ((True, False), _ONE_PATH),
    f"{ROLLOUT}logprobs_mode": (
        ("processed_logprobs",),
        "rollout log-probs are those of the distribution that was sampled from",
    ),
    f"{ROLLOUT}scheduling_policy": (("fcfs",), "requests are served in order"),
    f"{ROLLOUT}over_sample_rate": ((0,), "use data.gen_batch_size with algorithm.filter_groups"),
    f"{ROLLOUT}moe_load_balance_metrics_interval": ((0,), "the load of experts is not logged"),
    "algorithm.use_pf_ppo": ((False,), "PF-PPO is not supported"),
    "trainer.profile_steps": ((None,), _TIMINGS),
    f"{RUNTIME_ENV}working_dir": (
        (None,),
        "workers run in the driver's folder. `ray job submit --working-dir` copies a folder to "
        "every node",
    ),
    f"{RAY_INIT}local_mode": ((False,), "workers are processes; trainer.device=cpu needs no GPU"),
    "trainer.remove_previous_ckpt_in_save": ((False,), "use trainer.max_actor_ckpt_to_keep=1"),
}
"""Key without a choice in verlite -> (accepted values, reason). Other values are errors, whose
remedy may be a third item; otherwise it is to remove the key."""

REFUSED: dict[str, str] = {
    "data.image_key": _TEXT_ROWS,
    "data.video_key": _TEXT_ROWS,
    "data.audio_key": _TEXT_ROWS,
    **{f"*.{engine}.*": _FSDP2 for engine in ("megatron", "veomni", "torchtitan", "mindspeed")},
    f"{REF}optim.*": "The reference is not trained.",
    **{f"*.optim.{name}": _ADAMW for name in OTHER_OPTIMIZERS},
    f"{ACTOR}policy_loss.*": "Its loss is not supported.",
    "reward_model.reward_kwargs.*": "Use your own reward function: custom_reward_function.path.",
    f"{REF}model.*": "The reference is the initial policy: actor_rollout_ref.model.path.",
    "*.model.lora.*": "Use model.lora_rank, lora_alpha and target_modules.",
    "*.model.mtp.*": "Multi-token prediction is not supported.",
    f"{ROLLOUT}mtp": "Multi-token prediction is not supported.",
    "*.qat.*": _NO_QAT,
    f"{ROLLOUT}qat": _NO_QAT,
    f"{ROLLOUT}quantization_config_file": "Quantized engines are not supported.",
    "*.router_replay.*": _NO_REPLAY,
    f"{ROLLOUT}enable_rollout_routing_replay": _NO_REPLAY,
    f"{ROLLOUT}disaggregation.*": "An engine computes prompts and answers on the same devices.",
    f"{ROLLOUT}agent.*": "Write an environment: env.name (docs/agents.md).",
    f"{ROLLOUT}checkpoint_engine.*": "rollout.weight_transport chooses how weights are sent.",
    f"{REF}model": "The reference is the initial policy: actor_rollout_ref.model.path.",
    "*.turbo_config.*": _NO_NPU,
    "data.image_patch_size": _TEXT_ONLY,
    "data.mm_processor_kwargs": _TEXT_ONLY,
    "data.continuous_token.model_family": _ONE_PATH,
    "reward.sandbox_fusion.*": _NO_SANDBOX,
    "reward_model.sandbox_fusion.*": _NO_SANDBOX,
    "sandbox_fusion.*": _NO_SANDBOX,
    "algorithm.rollout_correction.rollout_rs_threshold_lower": (
        'Write both bounds in rollout_rs_threshold: "0.5_2.0" (docs/algorithms.md).'
    ),
    "algorithm.rollout_correction.rollout_token_veto_threshold": (
        "Use rollout_rs=token_k1, which rejects tokens, or seq_max_k2, which rejects responses "
        "with such a token."
    ),
    "algorithm.rollout_correction.use_policy_gradient": (
        "Use rollout_correction.bypass_mode=true with loss_type=reinforce."
    ),
    f"{ROLLOUT}multi_turn.*": "Configure multi-turn rollouts with max_turns and env.name.",
    f"{ROLLOUT}skip_rollout": "Samples are always generated.",
    f"{ROLLOUT}skip_dump_dir": "Samples are always generated.",
    f"{ROLLOUT}skip.*": "Samples are always generated.",
    "skip.*": "Samples are always generated.",
    "reward_manager.*": _OWN_MANAGER,
    "reward.reward_manager.*": _OWN_MANAGER,
    f"{RUNTIME_ENV}*": _WHOLE_JOB,
    **{
        f"{RAY_INIT}{name}": _RAY_START
        for name in (
            "resources",
            "resources.*",
            "labels",
            "labels.*",
            "enable_resource_isolation",
            "cgroup_path",
            "system_reserved_cpu",
            "system_reserved_memory",
            "_system_config",
            "_system_config.*",
        )
    },
    f"{RAY_INIT}job_config": _WHOLE_JOB,
    "distillation.*": "Distillation is not supported.",
    "transfer_queue.*": "Batches travel through Ray's object store.",
}
"""Unsupported key -> what to use instead. These keys are errors."""

TYPED = ("data.image_key", "data.video_key", "data.audio_key")
"""Keys that are errors on a command line even at verl's default: who types one has such data."""


IGNORED: dict[str, str] = {
    "data.return_raw_chat": "prompt messages are always stored",
    "data.return_raw_input_ids": "prompt token ids are always stored",
    "data.return_full_prompt": "the prompt is always saved with the samples",
    "data.filter_overlong_prompts_workers": "prompts are measured in one process",
    "data.dataloader_num_workers": "prompts are read in one process",
    "data.return_multi_modal_inputs": _TEXT_ONLY,
    "data.use_shm": "files are read in place",
    "*.model.use_shm": "files are read in place",
    "*.model.use_liger": "attention and log-probs already save memory",
    "*.model.use_fused_kernels": _CHUNKED,
    "*.model.fused_kernel_options.*": _CHUNKED,
    "*.fsdp_config.grad_offload": "FSDP2 frees gradients after each update",
    "*.fsdp_config.forward_prefetch": "FSDP2 prefetches automatically",
    "*.fsdp_config.use_orig_params": "FSDP2 always uses the original parameters",
    "*.fsdp_config.wrap_policy.*": "each transformer block is a sharding unit",
    "*.fsdp_config.seed": "use data.seed, rollout.seed and actor.data_loader_seed",
    "*.fsdp_config.mixed_precision.reduce_dtype": "gradients are reduced in float32",
    "*.fsdp_config.mixed_precision.buffer_dtype": "buffers keep their dtype",
    "*.fsdp_config.forward_only": "each role knows whether it trains",
    "*.use_fused_kernels": _CHUNKED,
    "*.entropy_from_logits_chunk_size": _CHUNKED,
    "*.pad_to_length": _PACKED,
    "*.pad_to_length_bucket": _PACKED,
    "*.tiled_mlp.*": "use model.enable_gradient_checkpointing, or more devices per sequence",
    "*.optim.zero_indexed_step": "the first warm-up step already learns",
    "*.entropy_from_logits_with_chunking": _CHUNKED,
    "*.entropy_checkpointing": _CHUNKED,
    "*.checkpoint.save_contents": _CHECKPOINT,
    "*.checkpoint.load_contents": _CHECKPOINT,
    "*.checkpoint.contents": _CHECKPOINT,
    "*.checkpoint.strict": _CHECKPOINT,
    "*.checkpoint.mbridge_config": "checkpoints are those of FSDP2",
    **dict.fromkeys((f"{ACTOR}use_torch_compile", f"{REF}use_torch_compile"), ENTROPY_ONLY),
    f"{ACTOR}calculate_sum_pi_squared": "it is computed when the estimator reads it",
    f"{ACTOR}sum_pi_squared_checkpointing": _CHUNKED,
    f"{ACTOR}use_prefix_grouper": "each sample is computed with its own prompt",
    f"{ACTOR}rollout_n": "rollout.n applies everywhere",
    f"{REF}rollout_n": "rollout.n applies everywhere",
    "actor_rollout_ref.nccl_timeout": "use trainer.phase_timeout_s, the limit of every worker call",
    "critic.nccl_timeout": "use trainer.phase_timeout_s, the limit of every worker call",
    "*.profiler.*": _TIMINGS,
    f"{ROLLOUT}trace.*": "samples and timings are saved in the run directory",
    f"{ROLLOUT}prometheus.*": _TIMINGS,
    f"{ROLLOUT}load_format": "the engine always loads the model's files first",
    f"{ROLLOUT}disable_log_stats": "the engine's own statistics are always off",
    f"{ROLLOUT}layered_summon": "weights are always sent in buckets: rollout.sync_bucket_mb",
    f"{ROLLOUT}checkpoint_engine.backend": "rollout.weight_transport chooses how weights are sent",
    f"{ROLLOUT}agent.num_workers": "one loop runs all samples of an engine",
    f"{ROLLOUT}micro_batch_size": "use rollout.max_num_seqs",
    f"{ROLLOUT}multi_stage_wake_up": "engines wake in two stages: weights, then the KV cache",
    f"{ROLLOUT}skip_tokenizer_init": "engines take and return token ids",
    f"{ROLLOUT}cudagraph_capture_sizes": "vLLM chooses the sizes",
    "critic.loss_scale_factor": "actor.loss_scale_factor applies to both",
    "critic.forward_max_token_len_per_gpu": "critic.ppo_max_token_len_per_gpu applies to both",
    "critic.data_loader_seed": "actor.data_loader_seed applies to both",
    "critic.rollout_n": "rollout.n applies everywhere",
    "reward.overlong_buffer.log": "the penalty is always logged",
    "algorithm.filter_groups.max_inflight_gen_batches": "a step generates one batch at a time",
    "reward_model.launch_reward_fn_async": "scoring always runs in parallel with generation",
    "reward_model.*": _NO_REWARD_MODEL,
    "reward.reward_model.*": _NO_REWARD_MODEL,
    "reward.num_workers": "the number of CPU cores determines it",
    "algorithm.state_masking.*": "tool output is masked by position, not by markers in the text",
    "algorithm.pf_ppo.*": "PF-PPO is not supported",
    "trainer.max_critic_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep counts both",
    "trainer.rollout_data_dir": _ALWAYS_WRITTEN,
    "trainer.validation_data_dir": _ALWAYS_WRITTEN,
    "trainer.ray_wait_register_center_timeout": "use trainer.resource_wait_s",
    "trainer.del_local_ckpt_after_load": "a checkpoint stays after a resume; "
    "trainer.max_actor_ckpt_to_keep removes old ones",
    "trainer.esi_redundant_time": "use trainer.save_freq",
    "trainer.use_legacy_worker_impl": "verlite has one worker implementation",
    "trainer.use_v1": "verlite has one trainer",
    "trainer.v1.*": "verlite has one trainer",
    f"{RAY_INIT}num_gpus": "a local cluster has all GPUs that CUDA_VISIBLE_DEVICES leaves",
    f"{RAY_INIT}object_store_memory": "a local cluster's object store grows as it is used, up to a "
    "tenth of memory",
    f"{RAY_INIT}_temp_dir": "a local cluster's files are in a folder in /tmp that is removed",
    f"{RAY_INIT}_node_ip_address": "a local cluster listens on loopback only",
    f"{RAY_INIT}namespace": "workers have no names in Ray, so those of two runs cannot be confused",
    f"{RAY_INIT}ignore_reinit_error": "a run connects to Ray once",
    f"{RAY_INIT}include_dashboard": _NO_DASHBOARD,
    f"{RAY_INIT}dashboard_host": _NO_DASHBOARD,
    f"{RAY_INIT}dashboard_port": _NO_DASHBOARD,
    f"{RAY_INIT}proxy_server_url": _NO_DASHBOARD,
    f"{RAY_INIT}configure_logging": _RAY_LOGS,
    f"{RAY_INIT}logging_level": _RAY_LOGS,
    f"{RAY_INIT}logging_format": _RAY_LOGS,
    f"{RAY_INIT}logging_config": _RAY_LOGS,
    f"{RAY_INIT}log_to_driver": _RAY_LOGS,
    "global_profiler.*": _TIMINGS,
    "trainer.npu_profile.*": _TIMINGS,
    "trainer.controller_nsight_options.*": _TIMINGS,
    "trainer.worker_nsight_options.*": _TIMINGS,
    "ray_init.timeline_json_file": _TIMINGS,
    "ray_kwargs.timeline_json_file": _TIMINGS,
    "*._target_": "sections are typed by the schema",
    "hydra.*": "the run directory is trainer.default_local_dir",
}
"""Key that is accepted without effect -> reason."""

TABLES = Tables(
    renamed=RENAMED,
    per_device=PER_DEVICE,
    fixed=FIXED,
    refused=REFUSED,
    ignored=IGNORED,
    null_means=NULL_MEANS,
    spellings=SPELLINGS,
    sets=SETS,
    turns_on=TURNS_ON,
    typed=TYPED,
    implied=IMPLIED,
)
"""The tables of main_ppo."""


def renamed(name: str) -> str | None:
    """Return the new name of a renamed key of main_ppo, or None."""
    return TABLES.new_name(name)
