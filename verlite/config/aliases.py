"""Names that users of verl and Search-R1 type, and what becomes of them here. Data only; `load` applies it.

The tables are asked in the order in which they stand; one that holds a name wins over those below it.
A `*` in a name stands for any text, and in a new name for the same text. Every name that is neither in the schema nor here
is an error with the nearest names.
"""

import re
from collections.abc import Iterator
from typing import Any

RENAMED: dict[str, str] = {
    "data.train_data_num": "data.train_max_samples",
    "data.val_data_num": "data.val_max_samples",
    "data.shuffle_train_dataloader": "data.shuffle",
    "data.trust_remote_code": "actor_rollout_ref.model.trust_remote_code",
    "data.tokenizer": "actor_rollout_ref.model.tokenizer_path",
    "actor_rollout_ref.rollout.n_agent": "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.prompt_length": "data.max_prompt_length",
    "actor_rollout_ref.rollout.response_length": "data.max_response_length",
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes": "actor_rollout_ref.rollout.sync_bucket_mb",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes": "actor_rollout_ref.rollout.sync_bucket_mb",
    "actor_rollout_ref.actor.optim.clip_grad": "actor_rollout_ref.actor.grad_clip",
    "actor_rollout_ref.actor.optim.warmup_style": "actor_rollout_ref.actor.optim.lr_scheduler_type",
    "actor_rollout_ref.actor.use_torch_compile": "actor_rollout_ref.actor.fsdp_config.use_torch_compile",
    "actor_rollout_ref.ref.use_torch_compile": "actor_rollout_ref.ref.fsdp_config.use_torch_compile",
    "critic.optim.clip_grad": "critic.grad_clip",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size": "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    "actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size": "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
    "critic.fsdp.ulysses_sequence_parallel_size": "critic.ulysses_sequence_parallel_size",
    "critic.fsdp.*": "critic.model.fsdp_config.*",
    "reward.custom_reward_function.*": "custom_reward_function.*",
    "reward_model.overlong_buffer.*": "reward.overlong_buffer.*",
    "reward_model.reward_kwargs.overlong_buffer_cfg.*": "reward.overlong_buffer.*",
    "reward.reward_kwargs.overlong_buffer_cfg.*": "reward.overlong_buffer.*",
    "reward_model.reward_kwargs.max_resp_len": "reward.overlong_buffer.max_resp_len",
    "reward.reward_kwargs.max_resp_len": "reward.overlong_buffer.max_resp_len",
    "reward.reward_kwargs": "custom_reward_function.reward_kwargs",
    "reward.reward_kwargs.*": "custom_reward_function.reward_kwargs.*",
    "reward_model.structure_format_score": "custom_reward_function.reward_kwargs.structure_format_score",
    "reward_model.final_format_score": "custom_reward_function.reward_kwargs.final_format_score",
    "reward_model.retrieval_score": "custom_reward_function.reward_kwargs.retrieval_score",
    "trainer.val_generations_to_log_to_wandb": "trainer.log_val_generations",
    "ray_init.num_cpus": "ray_kwargs.ray_init.num_cpus",
}
"""Old name -> new name, same unit."""

NULL_MEANS: dict[str, Any] = {
    "data.train_max_samples": -1,
    "data.val_max_samples": -1,
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "constant",
    "critic.optim.lr_scheduler_type": "constant",
}
"""What null meant under an old name whose new one has another way to say it."""

PER_DEVICE: dict[str, str] = {
    "actor_rollout_ref.actor.ppo_micro_batch_size": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size": "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref.log_prob_micro_batch_size": "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size": "critic.ppo_micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size": "critic.forward_micro_batch_size_per_gpu",
}
"""Old sizes over all devices -> new sizes on one: the value is divided by the number of devices."""

_NO_REWARD_MODEL = "rewards come from functions in this version: custom_reward_function.path, or the scorer of the data source"
_WRITTEN_ANYWAY = (
    "samples go to rollouts/ in the run directory; trainer.rollouts_per_step says how many"
)
_TEXT_ONLY = "this version trains on text only"
_ONE_PATH = "there is one rollout path: the sampled token ids are the trained ones"
_CHUNKED = "log-probs and entropy are always computed in chunks, without holding the logits"
_WORLDS = "tools belong to a world, which env.name chooses"
_CHECKPOINT = "a checkpoint always holds everything that a resume needs; trainer.export_hf writes the Hugging Face folder"

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
        "the model's folder holds its config; use model.override_config for single values",
    ),
    "*.model.external_lib": ((None,), "use model.trust_remote_code for a model with its own code"),
    "*.full_determinism": (
        (False,),
        "runs with one seed and one placement repeat; that is tested, not switched on",
    ),
    "*.model.mtp.enable": ((False,), "multi-token prediction is not part of this version"),
    "actor_rollout_ref.actor.freeze_vision_tower": ((False,), _TEXT_ONLY),
    "actor_rollout_ref.actor.use_rollout_log_probs": (
        (False,),
        "algorithm.rollout_correction.bypass_mode takes the rollout's log-probs",
    ),
    "actor_rollout_ref.rollout.do_sample": (
        (True,),
        "training always samples; rollout.val_kwargs.do_sample is for validation",
    ),
    "actor_rollout_ref.rollout.calculate_log_probs": (
        (True, False),
        "rollout log-probs are always kept and compared with the trainer's",
    ),
    "actor_rollout_ref.rollout.mode": (("sync", "async"), _ONE_PATH),
    "actor_rollout_ref.rollout.data_parallel_size": (
        (1,),
        "every free device group gets an engine of its own",
    ),
    "actor_rollout_ref.rollout.expert_parallel_size": (
        (1,),
        "expert parallelism is not part of this version",
    ),
    "actor_rollout_ref.rollout.pipeline_model_parallel_size": (
        (1,),
        "use rollout.tensor_model_parallel_size",
    ),
    "actor_rollout_ref.rollout.multi_turn.enable": (
        (False,),
        "multi-turn rollouts are set by max_turns",
    ),
    "actor_rollout_ref.rollout.agent.default_agent_loop": (("single_turn_agent",), _ONE_PATH),
    "actor_rollout_ref.rollout.quantization": (
        (None,),
        "set it as rollout.engine_kwargs.vllm.quantization",
    ),
    "actor_rollout_ref.rollout.nnodes": (
        (0, None),
        "give rollout its own devices with cluster.component_placement",
    ),
    "actor_rollout_ref.rollout.n_gpus_per_node": (
        (0, None),
        "give rollout its own devices with cluster.component_placement",
    ),
    "actor_rollout_ref.rollout.limit_images": ((None,), _TEXT_ONLY),
    "actor_rollout_ref.rollout.use_fire_sampling": (
        (False,),
        "use rollout.temperature, top_p and top_k",
    ),
    "data.validation_shuffle": ((False,), "validation rows keep their order, so that runs compare"),
    "data.custom_cls.*": ((None,), "write a parquet file with the columns of the docs instead"),
    "data.sampler.*": ((None,), "prompts come in shuffled or file order: data.shuffle"),
    "data.datagen.*": ((None,), "prompts come from data.train_files"),
    "data.tool_config_path": ((None,), _WORLDS),
    "data.function_tool_path": ((None,), _WORLDS),
    "reward_model.enable": ((False,), _NO_REWARD_MODEL),
    "reward.reward_model.enable": ((False,), _NO_REWARD_MODEL),
    "reward_model.reward_manager": (("naive", "dapo"), _NO_REWARD_MODEL),
    "reward_manager.name": (("naive", "dapo"), _NO_REWARD_MODEL),
    "reward.reward_manager.name": (("naive", "dapo"), _NO_REWARD_MODEL),
    "algorithm.use_pf_ppo": ((False,), "PF-PPO is not part of this version"),
    "trainer.del_local_ckpt_after_load": (
        (False,),
        "trainer.max_actor_ckpt_to_keep removes old checkpoints",
    ),
    "trainer.profile_steps": ((None,), "timings per phase are in metrics.jsonl"),
    "trainer.remove_previous_ckpt_in_save": ((False,), "use trainer.max_actor_ckpt_to_keep=1"),
}
"""Keys that exist elsewhere and have only one meaning here: (accepted values, why). Other values are errors."""

REFUSED: dict[str, str] = {
    "data.image_key": _TEXT_ONLY,
    "data.video_key": _TEXT_ONLY,
    "data.audio_key": _TEXT_ONLY,
    "*.fsdp_config.mixed_precision.*": "Use fsdp_config.dtype (bfloat16, float16, float32); reductions stay float32.",
    "*.megatron.*": "Training engines use FSDP2; set fsdp_config instead.",
    "actor_rollout_ref.actor.policy_loss.*": "It belongs to a loss that is not part of this version.",
    "reward_model.reward_kwargs.*": "Shape the score in a reward function of your own: custom_reward_function.path.",
    "actor_rollout_ref.ref.model.*": "The reference is the policy's starting model: actor_rollout_ref.model.path.",
    "actor_rollout_ref.rollout.multi_turn.*": "Multi-turn rollouts are set by max_turns.",
    "actor_rollout_ref.rollout.skip_rollout": "Samples are always generated.",
    "reward_manager.*": "Use custom_reward_function.path and name.",
    "reward.reward_manager.*": "Use custom_reward_function.path and name.",
    "distillation.*": "Distillation is not part of this version.",
    "transfer_queue.*": "Batches travel through Ray's object store.",
}
"""Keys whose meaning is gone: an error that says what to use."""


IGNORED: dict[str, str] = {
    "data.return_raw_chat": "the prompt messages are always kept",
    "data.return_raw_input_ids": "the prompt's token ids are always kept",
    "data.return_full_prompt": "the prompt is always written with the samples",
    "data.filter_overlong_prompts_workers": "prompts are measured in one process",
    "data.dataloader_num_workers": "prompts are read in one process",
    "data.return_multi_modal_inputs": _TEXT_ONLY,
    "data.use_shm": "files are read where they are",
    "*.model.use_shm": "files are read where they are",
    "*.model.use_liger": "attention and log-probs have their own memory-saving path",
    "*.model.use_fused_kernels": _CHUNKED,
    "*.model.fused_kernel_options.*": _CHUNKED,
    "*.fsdp_config.grad_offload": "FSDP2 frees gradients after each update, so there is nothing to offload",
    "*.fsdp_config.forward_prefetch": "FSDP2 prefetches by itself",
    "*.fsdp_config.use_orig_params": "FSDP2 always keeps the original parameters",
    "*.fsdp_config.wrap_policy.*": "each transformer block is one sharding unit",
    "*.fsdp_config.seed": "training draws no random numbers beyond data.seed, rollout.seed and actor.data_loader_seed",
    "*.entropy_from_logits_with_chunking": _CHUNKED,
    "*.entropy_checkpointing": _CHUNKED,
    "*.checkpoint.save_contents": _CHECKPOINT,
    "*.checkpoint.load_contents": _CHECKPOINT,
    "*.checkpoint.contents": _CHECKPOINT,
    "actor_rollout_ref.nccl_timeout": "trainer.phase_timeout_s bounds every worker call",
    "*.profiler.*": "timings per phase are in metrics.jsonl",
    "actor_rollout_ref.rollout.trace.*": "samples and timings are in the run directory",
    "actor_rollout_ref.rollout.prometheus.*": "timings per phase are in metrics.jsonl",
    "actor_rollout_ref.rollout.load_format": "the engine always starts from the model's files and is then synced",
    "actor_rollout_ref.rollout.disable_log_stats": "the engine's own statistics are off",
    "actor_rollout_ref.rollout.layered_summon": "weights are always synced in buckets: rollout.sync_bucket_mb",
    "actor_rollout_ref.rollout.checkpoint_engine.backend": "the sync transport follows from the placement",
    "actor_rollout_ref.rollout.agent.num_workers": "one loop serves all samples of an engine",
    "actor_rollout_ref.rollout.micro_batch_size": "rollout.max_num_seqs bounds the sequences at one time",
    "critic.forward_max_token_len_per_gpu": "critic.ppo_max_token_len_per_gpu holds for both passes",
    "critic.data_loader_seed": "actor.data_loader_seed holds for both",
    "critic.rollout_n": "rollout.n holds everywhere",
    "reward.overlong_buffer.log": "the penalty is always in the metrics",
    "reward.overlong_buffer.max_resp_len": "the longest response is data.max_response_length",
    "algorithm.filter_groups.max_inflight_gen_batches": "generations of a step follow one another",
    "reward_model.launch_reward_fn_async": "scoring always runs beside generation",
    "reward_model.*": _NO_REWARD_MODEL,
    "reward.reward_model.*": _NO_REWARD_MODEL,
    "reward.num_workers": "scoring processes follow from the number of cores",
    "algorithm.state_masking.*": "tool output is known by its place, not by markers in the text",
    "algorithm.pf_ppo.*": "PF-PPO is not part of this version",
    "trainer.max_critic_ckpt_to_keep": "a checkpoint holds actor and critic; trainer.max_actor_ckpt_to_keep counts both",
    "trainer.rollout_data_dir": _WRITTEN_ANYWAY,
    "trainer.validation_data_dir": _WRITTEN_ANYWAY,
    "trainer.ray_wait_register_center_timeout": "trainer.resource_wait_s bounds the wait for devices",
    "trainer.esi_redundant_time": "checkpoints follow trainer.save_freq",
    "trainer.use_legacy_worker_impl": "there is one worker implementation",
    "trainer.use_v1": "there is one trainer",
    "trainer.v1.*": "there is one trainer",
    "ray_kwargs.timeline_json_file": "timings per phase are in metrics.jsonl",
    "global_profiler.*": "timings per phase are in metrics.jsonl",
    "*._target_": "sections are typed by the schema",
    "hydra.*": "the run directory is trainer.default_local_dir",
}
"""Accepted, with no effect, and why."""


def lookup(table: dict[str, Any], name: str) -> Any:
    """The table's entry for a key: its own, else that of the first pattern that matches, else None."""
    if name in table:
        return table[name]
    for pattern, entry in table.items():
        if "*" in pattern and _regex(pattern).fullmatch(name):
            return entry
    return None


def renamed(name: str) -> str | None:
    """The new name of a renamed key."""
    if name in RENAMED:
        return RENAMED[name]
    for old, new in RENAMED.items():
        match = _regex(old).fullmatch(name) if "*" in old else None
        if match:
            return new.replace("*", match[1])
    return None


def all_names() -> Iterator[str]:
    """Every old name, for suggestions and for `verlite explain`."""
    for table in (RENAMED, PER_DEVICE, FIXED, REFUSED, IGNORED):
        yield from table


def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", "(.+)"))
