"""Key names of verl and Search-R1, and how verlite treats them. Data only; `load` applies it.

The tables are searched in the order of this file, and the first match wins. A `*` in a name matches
any text; in a new name it stands for the same text. A name that is in neither the schema nor these
tables is an error that suggests the nearest names.
"""

import re
from collections.abc import Iterator
from typing import Any

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
    f"{ROLLOUT}prompt_length": "data.max_prompt_length",
    f"{ROLLOUT}response_length": "data.max_response_length",
    f"{ROLLOUT}update_weights_bucket_megabytes": f"{ROLLOUT}sync_bucket_mb",
    f"{ROLLOUT}checkpoint_engine.update_weights_bucket_megabytes": f"{ROLLOUT}sync_bucket_mb",
    f"{ACTOR}optim.clip_grad": f"{ACTOR}grad_clip",
    f"{ACTOR}optim.warmup_style": f"{ACTOR}optim.lr_scheduler_type",
    f"{ACTOR}use_torch_compile": f"{ACTOR}fsdp_config.use_torch_compile",
    f"{REF}use_torch_compile": f"{REF}fsdp_config.use_torch_compile",
    "critic.optim.clip_grad": "critic.grad_clip",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    f"{ACTOR}fsdp_config.ulysses_sequence_parallel_size": f"{ACTOR}ulysses_sequence_parallel_size",
    f"{REF}fsdp_config.ulysses_sequence_parallel_size": f"{REF}ulysses_sequence_parallel_size",
    "critic.fsdp.ulysses_sequence_parallel_size": "critic.ulysses_sequence_parallel_size",
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
    "ray_init.num_cpus": "ray_kwargs.ray_init.num_cpus",
}
"""Old name -> new name with the same unit."""

NULL_MEANS: dict[str, Any] = {
    "data.train_max_samples": -1,
    "data.val_max_samples": -1,
    f"{ACTOR}optim.lr_scheduler_type": "constant",
    "critic.optim.lr_scheduler_type": "constant",
}
"""New name -> the value that null under an old name means."""

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
_ALWAYS_WRITTEN = "samples are saved in rollouts/ of the run directory: trainer.rollouts_per_step"
_TEXT_ONLY = "this version trains on text only"
_ONE_PATH = "verlite has one rollout path, which trains on the sampled token ids"
_CHUNKED = "log-probs and entropy are always computed in chunks, without storing the logits"
_TOOLS = "tools belong to the environment: env.name"
_CHECKPOINT = (
    "a checkpoint always contains everything that a resume needs; "
    "trainer.export_hf writes the Hugging Face folder"
)

FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
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
    "data.custom_cls.*": ((None,), "write a parquet file with the documented columns"),
    "data.sampler.*": ((None,), "use data.shuffle"),
    "data.datagen.*": ((None,), "prompts come from data.train_files"),
    "data.tool_config_path": ((None,), _TOOLS),
    "data.function_tool_path": ((None,), _TOOLS),
    "reward_model.enable": ((False,), _NO_REWARD_MODEL),
    "reward.reward_model.enable": ((False,), _NO_REWARD_MODEL),
    "reward_model.reward_manager": (("naive", "dapo"), _NO_REWARD_MODEL),
    "reward_manager.name": (("naive", "dapo"), _NO_REWARD_MODEL),
    "reward.reward_manager.name": (("naive", "dapo"), _NO_REWARD_MODEL),
    "algorithm.use_pf_ppo": ((False,), "PF-PPO is not supported"),
    "trainer.del_local_ckpt_after_load": (
        (False,),
        "trainer.max_actor_ckpt_to_keep removes old checkpoints",
    ),
    "trainer.profile_steps": ((None,), "timings per phase are in metrics.jsonl"),
    "trainer.remove_previous_ckpt_in_save": ((False,), "use trainer.max_actor_ckpt_to_keep=1"),
}
"""Key without a choice in verlite -> (accepted values, reason). Other values are errors."""

REFUSED: dict[str, str] = {
    "data.image_key": _TEXT_ONLY,
    "data.video_key": _TEXT_ONLY,
    "data.audio_key": _TEXT_ONLY,
    "*.fsdp_config.mixed_precision.*": "Use fsdp_config.dtype. Reductions are always float32.",
    "*.megatron.*": "Training engines use FSDP2; set fsdp_config instead.",
    f"{ACTOR}policy_loss.*": "Its loss is not supported.",
    "reward_model.reward_kwargs.*": "Use your own reward function: custom_reward_function.path.",
    f"{REF}model.*": "The reference is the initial policy: actor_rollout_ref.model.path.",
    f"{MODEL}lora.merge": f"Use {ROLLOUT}lora_sync: merged (true) or adapter (false).",
    f"{ROLLOUT}multi_turn.*": "Configure multi-turn rollouts with max_turns and env.name.",
    f"{ROLLOUT}skip_rollout": "Samples are always generated.",
    "reward_manager.*": "Use custom_reward_function.path and name.",
    "reward.reward_manager.*": "Use custom_reward_function.path and name.",
    "distillation.*": "Distillation is not supported.",
    "transfer_queue.*": "Batches travel through Ray's object store.",
}
"""Unsupported key -> what to use instead. These keys are errors."""


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
    "*.entropy_from_logits_with_chunking": _CHUNKED,
    "*.entropy_checkpointing": _CHUNKED,
    "*.checkpoint.save_contents": _CHECKPOINT,
    "*.checkpoint.load_contents": _CHECKPOINT,
    "*.checkpoint.contents": _CHECKPOINT,
    "actor_rollout_ref.nccl_timeout": "use trainer.phase_timeout_s, the limit of every worker call",
    "*.profiler.*": "timings per phase are in metrics.jsonl",
    f"{ROLLOUT}trace.*": "samples and timings are saved in the run directory",
    f"{ROLLOUT}prometheus.*": "timings per phase are in metrics.jsonl",
    f"{ROLLOUT}load_format": "the engine always loads the model's files first",
    f"{ROLLOUT}disable_log_stats": "the engine's own statistics are always off",
    f"{ROLLOUT}layered_summon": "weights are always sent in buckets: rollout.sync_bucket_mb",
    f"{ROLLOUT}checkpoint_engine.backend": "rollout.weight_transport chooses how weights are sent",
    f"{ROLLOUT}agent.num_workers": "one loop runs all samples of an engine",
    f"{ROLLOUT}micro_batch_size": "use rollout.max_num_seqs",
    "critic.forward_max_token_len_per_gpu": "critic.ppo_max_token_len_per_gpu applies to both",
    "critic.data_loader_seed": "actor.data_loader_seed applies to both",
    "critic.rollout_n": "rollout.n applies everywhere",
    "reward.overlong_buffer.log": "the penalty is always logged",
    "reward.overlong_buffer.max_resp_len": "use data.max_response_length",
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
    "trainer.esi_redundant_time": "use trainer.save_freq",
    "trainer.use_legacy_worker_impl": "verlite has one worker implementation",
    "trainer.use_v1": "verlite has one trainer",
    "trainer.v1.*": "verlite has one trainer",
    "ray_kwargs.timeline_json_file": "timings per phase are in metrics.jsonl",
    "global_profiler.*": "timings per phase are in metrics.jsonl",
    "*._target_": "sections are typed by the schema",
    "hydra.*": "the run directory is trainer.default_local_dir",
}
"""Key that is accepted without effect -> reason."""


def lookup(table: dict[str, Any], name: str) -> Any:
    """Return the table's entry for a key, else for the first matching pattern, else None."""
    if name in table:
        return table[name]
    for pattern, entry in table.items():
        if "*" in pattern and _regex(pattern).fullmatch(name):
            return entry
    return None


def renamed(name: str) -> str | None:
    """Return the new name of a renamed key, or None."""
    if name in RENAMED:
        return RENAMED[name]
    for old, new in RENAMED.items():
        match = _regex(old).fullmatch(name) if "*" in old else None
        if match:
            return new.replace("*", match[1])
    return None


def all_names() -> Iterator[str]:
    """Yield every old name, for suggestions and `verlite explain`."""
    for table in (RENAMED, PER_DEVICE, FIXED, REFUSED, IGNORED):
        yield from table


def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", "(.+)"))
