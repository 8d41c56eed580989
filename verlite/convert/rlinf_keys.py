"""Every key of RLinf's reasoning YAMLs (examples/reasoning/config/math, formerly examples/math).

Source: those files and rlinf/config.py, rlinf/algorithms, rlinf/workers/actor/fsdp_actor_worker.py
of August 2026. The first row that matches a key counts.
"""

from dataclasses import replace

from verlite.convert.rows import (
    ACTOR,
    MODEL,
    REF,
    ROLLOUT,
    Row,
    derived,
    dropped,
    needless,
    refused,
    same,
)

_FSDP = "verlite trains with FSDP2, which shards every weight over the actor's devices"
_MICRO = "the gradient does not depend on micro-batches"
_PLACEMENT = "placement is fixed: cluster.component_placement"
_VLLM = "the rollout engine is vLLM"
_SETTINGS_OF_ACTOR = "inference has the actor's settings"
_LOSS_SCALE = "passes in bfloat16 need no loss scale"
_TOKENIZER = "it is that of the model: actor_rollout_ref.model.path"
_TIMINGS = "timings are in metrics.jsonl"
_CHECKED = "every weight sync is verified"
_NAMES = "names a worker group"
_REMOTE_CODE = (
    "set model.trust_remote_code=true if the model brings code of its own, and you have read it"
)
_ONE_SCHEDULE = "schedules begin at 0 and last for the whole run"

PRECISIONS = {"fp16": "bfloat16", "bf16": "bfloat16", "fp32": "float32"}
_FP16 = "verlite trains in bfloat16 or float32; fp16 becomes bfloat16"
AGGREGATIONS = {name: name for name in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")}


def _model(role: str, section: str) -> tuple[Row, ...]:
    """Return the rows of a trained model: its optimizer, schedule and memory."""
    optim = section + "optim."
    fsdp = "critic.model.fsdp_config." if role == "critic" else ACTOR + "fsdp_config."
    model = "critic.model." if role == "critic" else MODEL
    return (
        needless(f"{role}.group_name", str, _NAMES),
        dropped(f"{role}.training_backend", "fsdp", _FSDP),
        needless(f"{role}.mcore_gpt", bool, _FSDP),
        needless(f"{role}.spec_name", str, _FSDP),
        same(f"{role}.offload_optimizer", fsdp + "optimizer_offload", bool),
        same(f"{role}.offload_weight", fsdp + "param_offload", bool),
        same(f"{role}.enable_offload", f"{fsdp}param_offload {fsdp}optimizer_offload", bool),
        needless(f"{role}.offload_grad", bool, "FSDP2 frees gradients after each update"),
        needless(f"{role}.calculate_flops", False, "verlite plan computes them"),
        needless(f"{role}.global_batch_size", int, "algorithm.n_minibatches determines it"),
        needless(f"{role}.micro_batch_size", int, "algorithm.training_batch_size_per_gpu"),
        needless(f"{role}.model.model_path", str, "the model is rollout.model.model_path"),
        derived(f"{role}.model.precision", fsdp + "dtype", str, _FP16),
        derived(
            f"{role}.model.recompute_granularity", model + "enable_gradient_checkpointing", str
        ),
        refused(f"{role}.model.is_lora", False, "set actor_rollout_ref.model.lora_rank yourself"),
        refused(
            f"{role}.model.moe_aux_loss_coeff", 0.0, "verlite has no load-balancing loss: use 0"
        ),
        needless(f"{role}.model.*", object, _FSDP),
        refused(f"{role}.optim.optimizer", "adam", "the optimizer is AdamW"),
        same(f"{role}.optim.lr", optim + "lr", float),
        derived(f"{role}.optim.adam_beta1", optim + "betas", 0.9),
        derived(f"{role}.optim.adam_beta2", optim + "betas", 0.999),
        same(f"{role}.optim.adam_eps", optim + "eps", float),
        same(f"{role}.optim.weight_decay", optim + "weight_decay", float),
        same(f"{role}.optim.clip_grad", section + "grad_clip", float),
        needless(f"{role}.optim.min_lr", float, f"{role}.lr_sched.min_lr counts"),
        needless(f"{role}.optim.loss_scale*", object, _LOSS_SCALE),
        needless(f"{role}.optim.*", object, _FSDP),
        derived(f"{role}.lr_sched.lr_decay_style", optim + "lr_scheduler_type", "constant"),
        derived(f"{role}.lr_sched.lr_warmup_fraction", optim + "lr_warmup_steps_ratio", 0.0),
        derived(f"{role}.lr_sched.lr_warmup_iters", optim + "lr_warmup_steps", 0),
        derived(f"{role}.lr_sched.min_lr", optim + "min_lr_ratio", 0.0),
        derived(f"{role}.lr_sched.max_lr", optim + "lr", float),
        derived(f"{role}.lr_sched.lr_decay_iters", "", int, _ONE_SCHEDULE),
        refused(f"{role}.lr_sched.lr_warmup_init", 0.0, _ONE_SCHEDULE),
        derived(f"{role}.lr_sched.start_weight_decay", optim + "weight_decay", float),
        derived(f"{role}.lr_sched.end_weight_decay", optim + "weight_decay", float),
        needless(f"{role}.tokenizer.use_fast", bool, "transformers has fast tokenizers only"),
        dropped(f"{role}.tokenizer.trust_remote_code", False, _REMOTE_CODE),
        needless(f"{role}.tokenizer.padding_side", str, "batches are packed without padding"),
        needless(f"{role}.megatron.*", object, _FSDP),
        derived(f"{role}.fsdp_config.sharding_strategy", fsdp + "reshard_after_forward", str),
        derived(f"{role}.fsdp_config.reshard_after_forward", fsdp + "reshard_after_forward", bool),
        same(
            f"{role}.fsdp_config.gradient_checkpointing",
            model + "enable_gradient_checkpointing",
            bool,
        ),
        same(
            f"{role}.fsdp_config.cpu_offload",
            f"{fsdp}param_offload {fsdp}optimizer_offload",
            bool,
        ),
        derived(f"{role}.fsdp_config.mixed_precision.param_dtype", fsdp + "dtype", str, _FP16),
        derived(f"{role}.fsdp_config.amp_autocast.enabled", fsdp + "dtype", False),
        derived(f"{role}.fsdp_config.amp_autocast.precision", fsdp + "dtype", "bf16", _FP16),
        needless(f"{role}.fsdp_config.*", object, "FSDP2 has one way, with the same results"),
    )


KEYS: tuple[Row, ...] = (
    needless("hydra.*", object, "the run directory is trainer.default_local_dir"),
    # cluster
    same("cluster.num_nodes", "trainer.nnodes", 1),
    derived("cluster.num_gpus_per_node", "trainer.n_gpus_per_node", int),
    derived("cluster.component_placement", "cluster.component_placement", dict),
    same("cluster.node_groups", "cluster.node_groups", list),
    dropped("cluster.auto_scheduler", False, _PLACEMENT),
    needless("cluster.use_pre_process_policy", False, _PLACEMENT),
    needless("cluster.use_wait_before_last_iter_policy", False, _PLACEMENT),
    needless("cluster.recreate_nccl_groups", False, _PLACEMENT),
    # runner
    derived("runner.task_type", "", "reasoning", "math and reasoning tasks only"),
    derived("runner.max_epochs", "trainer.total_epochs", 1),
    derived("runner.max_steps", "trainer.total_training_steps", -1),
    derived("runner.val_check_interval", "trainer.test_freq", -1),
    same("runner.save_interval", "trainer.save_freq", -1),
    derived(
        "runner.seq_length",
        "data.max_response_length",
        int,
        "tokens of prompt and response together",
    ),
    same("runner.enable_dynamic_batch_size", ACTOR + "use_dynamic_bsz", False),
    derived("runner.max_tokens_per_mbs", ACTOR + "ppo_max_token_len_per_gpu", int),
    derived("runner.resume_dir", "trainer.resume_mode trainer.resume_from_path", str),
    derived("runner.experiment_name", "trainer.experiment_name trainer.default_local_dir", str),
    derived("runner.output_dir", "trainer.default_local_dir", "../results"),
    same("runner.logger.project_name", "trainer.project_name", str),
    derived("runner.logger.logger_backends", "trainer.logger", list),
    needless("runner.logger.experiment_name", str, "runner.experiment_name counts"),
    needless("runner.logger.log_path", str, "logs are in the run directory"),
    # algorithm
    same("algorithm.group_size", ROLLOUT + "n", 1),
    derived(
        "algorithm.n_minibatches",
        ACTOR + "ppo_mini_batch_size",
        1,
        "data.rollout_batch_size / n_minibatches prompts",
    ),
    derived("algorithm.training_batch_size_per_gpu", ACTOR + "ppo_micro_batch_size_per_gpu", 1),
    derived(
        "algorithm.logprob_forward_micro_batch_size",
        f"{ROLLOUT}log_prob_micro_batch_size_per_gpu {REF}log_prob_micro_batch_size_per_gpu",
        int,
    ),
    needless("algorithm.rollout_batch_size_per_gpu", None, "rollout.max_num_seqs limits it"),
    dropped("algorithm.val_rollout_batch_size_per_gpu", int, "rollout.max_num_seqs limits it"),
    derived("algorithm.recompute_logprobs", "algorithm.rollout_correction.bypass_mode", True),
    same("algorithm.shuffle_rollout", ACTOR + "shuffle", True),
    refused("algorithm.loss_type", "actor", "verlite has the PPO loss and others: policy_loss"),
    same("algorithm.loss_agg_func", ACTOR + "loss_agg_mode", "token-mean", values=AGGREGATIONS),
    derived("algorithm.kl_beta", f"{ACTOR}use_kl_loss {ACTOR}kl_loss_coef", 0.0),
    derived("algorithm.kl_penalty_type", f"{ACTOR}kl_loss_type algorithm.kl_penalty", "low_var_kl"),
    same("algorithm.ratio_clip_eps", ACTOR + "clip_ratio", 0.2),
    same("algorithm.clip_ratio_low", ACTOR + "clip_ratio_low", None),
    same("algorithm.clip_ratio_high", ACTOR + "clip_ratio_high", None),
    replace(
        derived(
            "algorithm.clip_ratio_c",
            ACTOR + "clip_ratio_c",
            3.0,
            "null turns dual clip off in RLinf",
        ),
        null=True,
    ),
    same("algorithm.entropy_bonus", ACTOR + "entropy_coeff", 0.0),
    same("algorithm.calculate_entropy", ACTOR + "calculate_entropy", False),
    derived(
        "algorithm.adv_type",
        "algorithm.adv_estimator algorithm.norm_adv_by_std_in_grpo algorithm.kl_in_reward_mode",
        "grpo",
    ),
    derived(
        "algorithm.normalize_advantages",
        "algorithm.whiten_advantages",
        True,
        "RLinf whitens over the tokens of an optimizer step, verlite over those of the step",
    ),
    derived("algorithm.use_reinpp_baseline", "algorithm.adv_estimator", False),
    derived(
        "algorithm.reinpp_kl_beta", "algorithm.use_kl_in_reward algorithm.kl_ctrl.kl_coef", 0.0
    ),
    dropped(
        "algorithm.early_stop_imp_ratio",
        None,
        "RLinf's Megatron actor leaves out a micro-batch whose mean ratio is above it; verlite "
        "clips ratios only",
    ),
    needless("algorithm.use_valid_token_scale", False, _MICRO),
    derived("algorithm.importance_sampling_fix", "algorithm.rollout_correction.rollout_is", False),
    derived(
        "algorithm.importance_sampling_clip",
        "algorithm.rollout_correction.rollout_is_threshold",
        float,
    ),
    derived(
        "algorithm.max_num_gen_batches",
        "algorithm.filter_groups.enable algorithm.filter_groups.max_num_gen_batches",
        1,
    ),
    derived("algorithm.gamma", "algorithm.gamma", 1.0),
    derived("algorithm.gae_lambda", "algorithm.lam", 1.0),
    derived("algorithm.value_cliprange", "critic.cliprange_value", 0.5),
    derived("algorithm.critic_warmup_steps", "trainer.critic_warmup", 0),
    refused(
        "algorithm.sampling_params.do_sample", True, "training always samples: use temperature"
    ),
    same("algorithm.sampling_params.temperature", ROLLOUT + "temperature", 1.0),
    same("algorithm.sampling_params.top_p", ROLLOUT + "top_p", 1.0),
    derived("algorithm.sampling_params.top_k", ROLLOUT + "top_k", -1),
    refused(
        "algorithm.sampling_params.repetition_penalty",
        1.0,
        "training needs the policy's own distribution: use 1",
    ),
    derived("algorithm.sampling_params.max_new_tokens", "data.max_response_length", int),
    needless("algorithm.sampling_params.min_new_tokens", int, "a response may be empty"),
    # rollout
    needless("rollout.group_name", str, _NAMES),
    same("rollout.gpu_memory_utilization", ROLLOUT + "gpu_memory_utilization", float),
    same("rollout.model.model_path rollout.model_dir", MODEL + "path", str),
    needless("rollout.model.model_type", str, "it is in the model's config.json"),
    needless("rollout.model.precision", str, "the engine has the actor's precision"),
    same("rollout.enforce_eager", ROLLOUT + "enforce_eager", bool),
    same("rollout.tensor_parallel_size", ROLLOUT + "tensor_model_parallel_size", 1),
    dropped("rollout.pipeline_parallel_size", 1, "use rollout.tensor_parallel_size"),
    same("rollout.max_running_requests", ROLLOUT + "max_num_seqs", int),
    dropped("rollout.rollout_backend", "vllm", _VLLM),
    needless("rollout.sglang.*", object, _VLLM),
    same("rollout.vllm.enable_chunked_prefill", ROLLOUT + "enable_chunked_prefill", bool),
    same("rollout.vllm.enable_prefix_caching", ROLLOUT + "enable_prefix_caching", bool),
    derived("rollout.vllm.max_num_batched_tokens", ROLLOUT + "max_num_batched_tokens", int),
    needless("rollout.vllm.*", object, "vLLM chooses it; rollout.engine_kwargs.vllm sets more"),
    needless("rollout.cuda_graph_max_bs", int, "vLLM chooses it"),
    needless("rollout.return_logprobs", bool, "they are always returned"),
    needless("rollout.validate_weight", False, _CHECKED),
    needless("rollout.validate_save_dir", None, _CHECKED),
    needless("rollout.weight_reload", str, "weights are sent before each step"),
    needless("rollout.print_outputs", False, "samples are saved in rollouts/ of the run directory"),
    needless("rollout.detokenize", False, "responses are always saved as text"),
    needless("rollout.disable_log_stats", bool, _TIMINGS),
    needless("rollout.distributed_executor_backend", str, "each engine has its own processes"),
    needless("rollout.padding", None, "batches are packed without padding"),
    needless("rollout.eos", None, _TOKENIZER),
    # inference
    needless("inference.*", object, _SETTINGS_OF_ACTOR),
    # data
    derived("data.type", "", "math", "math data only"),
    needless("data.dataset_name", str, "data.train_data_paths names the files"),
    derived("data.max_prompt_length", "data.max_prompt_length", int),
    same("data.filter_prompt_by_length", "data.filter_overlong_prompts", False),
    same("data.rollout_batch_size", "data.train_batch_size", int),
    same("data.val_rollout_batch_size", "data.val_batch_size", None),
    needless("data.num_workers", int, "prompts are read in one process"),
    derived("data.prompt_key", "data.prompt_key", "prompt"),
    derived("data.answer_key", "", "answer", "the column reward_model.ground_truth"),
    derived(
        "data.apply_chat_template",
        MODEL + "custom_chat_template",
        False,
        "false: the text of a prompt is sent as it is",
    ),
    same("data.shuffle", "data.shuffle", True),
    needless("data.validation_shuffle", bool, "validation rows keep their order"),
    same("data.seed", f"data.seed {ROLLOUT}seed", int),
    derived("data.train_data_paths", "data.train_files", list),
    derived("data.val_data_paths", "data.val_files", list),
    # actor and critic
    same("actor.enable_dp_load_balance", "trainer.balance_batch", bool),
    same("actor.seed", ACTOR + "data_loader_seed", int),
    derived("actor.tokenizer.tokenizer_model", MODEL + "tokenizer_path", str),
    *_model("actor", ACTOR),
    derived("critic.use_critic_model", "critic.enable", False),
    needless("critic.enable_dp_load_balance", False, "trainer.balance_batch is for both"),
    needless("critic.seed", int, "actor.seed is for both"),
    needless("critic.tokenizer.tokenizer_model", str, "the critic reads the policy's token ids"),
    *_model("critic", "critic."),
    # reward
    needless("reward.group_name", str, _NAMES),
    refused(
        "reward.use_reward_model",
        False,
        "verlite has no reward models: serve it, and set reward.remote.url",
    ),
    derived("reward.reward_type", "", "math", "scored by the data source: math"),
    derived("reward.reward_scale", "reward.std", 1.0),
    needless("reward.tokenizer.*", object, "rewards read text"),
)
"""Every key of RLinf's math YAMLs."""
