"""Keys that the user set and that have no effect are reported. Keys with an effect are not."""

import pytest

from verlite.config.plan import installed

CORRECTION = "algorithm.rollout_correction."
ACTOR = "actor_rollout_ref.actor."
REF = "actor_rollout_ref.ref."
ROLLOUT = "actor_rollout_ref.rollout."
GRPO = f"algorithm.adv_estimator=grpo {ROLLOUT}n=4"
VLLM = (f"~{ROLLOUT}name", f"{ROLLOUT}name=vllm")
KL = f"{ACTOR}use_kl_loss=true"
REWARD_KL = "algorithm.use_kl_in_reward=true"
DYNAMIC = f"{ACTOR}use_dynamic_bsz=true"
MODEL = "actor_rollout_ref.model."
LORA = f"{MODEL}lora_rank=4"
ADAPTER = f"{MODEL}lora_adapter_path={{folder}}/adapter"
REWARD = "{folder}/reward.py custom_reward_function.name=score"
VAL = "data.val_files={folder}/test.parquet"

# (the key, settings under which it has no effect, settings under which it has one)
CASES = [
    ("algorithm.kl_ctrl.kl_coef=0.1", "", REWARD_KL),
    ("algorithm.kl_ctrl.kl_coef=0.1", KL, f"{KL} {REWARD_KL}"),
    ("algorithm.kl_penalty=k2", "", REWARD_KL),
    ("algorithm.kl_ctrl.horizon=5", REWARD_KL, f"{REWARD_KL} algorithm.kl_ctrl.type=adaptive"),
    ("algorithm.kl_ctrl.target_kl=5", REWARD_KL, f"{REWARD_KL} algorithm.kl_ctrl.type=adaptive"),
    (f"{ACTOR}kl_loss_coef=0.1", "", KL),
    (f"{ACTOR}kl_loss_type=k1", REWARD_KL, KL),
    (f"{REF}fsdp_config.param_offload=true", "", KL),
    (f"{REF}log_prob_micro_batch_size_per_gpu=3", "", REWARD_KL),
    (f"{REF}log_prob_micro_batch_size_per_gpu=3", LORA, f"{KL} {LORA}"),
    (f"{REF}fsdp_config.reshard_after_forward=false", f"{KL} {LORA}", KL),
    (f"{MODEL}lora_alpha=32", "", LORA),
    (f"{MODEL}target_modules=[q_proj]", "", LORA),
    (f"{MODEL}exclude_modules=[q_proj]", "", LORA),
    ("critic.model.lora_alpha=32", LORA, "critic.model.lora_rank=4"),
    ("critic.model.lora_rank=4", GRPO, ""),
    (f"{MODEL}lora_alpha=32", f"{LORA} {ADAPTER}", LORA),
    (f"{MODEL}lora_rank=8", ADAPTER, ""),
    (f"{MODEL}enable_activation_offload=true", "", None),
    ("critic.model.enable_activation_offload=true", "", None),
    ("critic.optim.lr=1e-4", GRPO, ""),
    ("critic.cliprange_value=0.1", GRPO, f"{GRPO} critic.enable=true"),
    ("algorithm.lam=0.9", GRPO, ""),
    ("algorithm.gamma=0.9", GRPO, "algorithm.adv_estimator=remax"),
    (
        "algorithm.gamma=0.9",
        f"algorithm.adv_estimator=rloo {ROLLOUT}n=4",
        "algorithm.adv_estimator=mine:f",
    ),
    ("algorithm.norm_adv_by_std_in_grpo=false", "", GRPO),
    (
        "algorithm.norm_adv_by_std_in_grpo=false",
        f"algorithm.adv_estimator=opo {ROLLOUT}n=4",
        f"algorithm.adv_estimator=grpo_passk {ROLLOUT}n=4",
    ),
    (
        f"{ACTOR}clip_ratio=0.1",
        f"{ACTOR}clip_ratio_low=0.2 {ACTOR}clip_ratio_high=0.3",
        f"{ACTOR}clip_ratio_high=0.3",
    ),
    (f"{ACTOR}loss_scale_factor=100", "", f"{ACTOR}loss_agg_mode=seq-mean-token-sum-norm"),
    (f"{ACTOR}loss_scale_factor=100", "", "critic.loss_agg_mode=seq-mean-token-sum-norm"),
    (f"{ACTOR}loss_scale_factor=100", f"{GRPO} critic.loss_agg_mode=seq-mean-token-sum-norm", None),
    (
        f"{ACTOR}clip_ratio=0.1",
        f"{ACTOR}policy_loss.loss_mode=gpg",
        f"{ACTOR}policy_loss.loss_mode=cispo",
    ),
    (
        f"{ACTOR}clip_ratio_low=0.1",
        f"{ACTOR}policy_loss.loss_mode=gpg",
        f"{ACTOR}policy_loss.loss_mode=mine:f",
    ),
    (f"{ACTOR}clip_ratio_high=0.1", f"{ACTOR}policy_loss.loss_mode=gpg", ""),
    (
        f"{ACTOR}clip_ratio_c=4",
        f"{ACTOR}policy_loss.loss_mode=gspo",
        f"{ACTOR}policy_loss.loss_mode=dppo_kl",
    ),
    (f"{ACTOR}tau_pos=2", "", f"{ACTOR}policy_loss.loss_mode=sapo"),
    (
        f"{ACTOR}tau_neg=2",
        f"{ACTOR}policy_loss.loss_mode=gspo",
        f"{ACTOR}policy_loss.loss_mode=mine:f",
    ),
    (
        f"{ACTOR}policy_loss.clip_cov_ratio=0.1",
        f"{ACTOR}policy_loss.loss_mode=kl_cov",
        f"{ACTOR}policy_loss.loss_mode=clip_cov",
    ),
    (
        f"{ACTOR}policy_loss.kl_cov_ratio=0.1",
        f"{ACTOR}policy_loss.loss_mode=clip_cov",
        f"{ACTOR}policy_loss.loss_mode=kl_cov",
    ),
    (f"{ACTOR}policy_loss.ppo_kl_coef=0.2", "", f"{ACTOR}policy_loss.loss_mode=kl_cov"),
    (f"{ACTOR}policy_loss.kwargs.a=1", "", f"{ACTOR}policy_loss.loss_mode=mine:f"),
    ("algorithm.gdpo_reward_keys=[a]", GRPO, f"algorithm.adv_estimator=gdpo {ROLLOUT}n=4"),
    (
        "algorithm.gdpo_reward_weights=[2]",
        "algorithm.adv_estimator=mine:f",
        f"algorithm.adv_estimator=gdpo algorithm.gdpo_reward_keys=[a] {ROLLOUT}n=4",
    ),
    (
        "algorithm.norm_adv_by_std_in_grpo=false",
        f"algorithm.adv_estimator=gdpo algorithm.gdpo_reward_keys=[a] {ROLLOUT}n=4",
        None,
    ),
    ("algorithm.adv_kwargs.a=1", "", "algorithm.adv_estimator=mine:f"),
    (
        "algorithm.filter_groups.metric=acc",
        f"{ROLLOUT}n=2",
        f"{ROLLOUT}n=2 algorithm.filter_groups.enable=true",
    ),
    (
        "data.gen_batch_size=1500",
        f"{ROLLOUT}n=2",
        f"{ROLLOUT}n=2 algorithm.filter_groups.enable=true",
    ),
    ("reward.score_scale.math_dapo=zero_one", f"custom_reward_function.path={REWARD}", ""),
    ("reward.overlong_buffer.len=100", "", "reward.overlong_buffer.enable=true"),
    (f"{CORRECTION}rollout_is_threshold=3", "", f"{CORRECTION}rollout_is=token"),
    (
        f"{CORRECTION}rollout_is=token",
        f"{CORRECTION}bypass_mode=true",
        f"{CORRECTION}bypass_mode=true {CORRECTION}loss_type=reinforce",
    ),
    (f"{CORRECTION}rollout_rs_threshold=2", "", f"{CORRECTION}rollout_rs=token_k1"),
    (f"{CORRECTION}loss_type=reinforce", "", f"{CORRECTION}bypass_mode=true"),
    (f"{ACTOR}ppo_micro_batch_size_per_gpu=2", DYNAMIC, f"{DYNAMIC} critic.use_dynamic_bsz=false"),
    (f"{ACTOR}ppo_max_token_len_per_gpu=9999", "", f"{ROLLOUT}log_prob_use_dynamic_bsz=true"),
    (
        f"{ROLLOUT}log_prob_micro_batch_size_per_gpu=2",
        f"{ROLLOUT}log_prob_use_dynamic_bsz=true",
        "",
    ),
    (
        f"{ROLLOUT}log_prob_max_token_len_per_gpu=9999",
        "",
        f"{ROLLOUT}log_prob_use_dynamic_bsz=true",
    ),
    (f"{REF}log_prob_max_token_len_per_gpu=9999", KL, f"{KL} {REF}log_prob_use_dynamic_bsz=true"),
    ("critic.ppo_max_token_len_per_gpu=9999", "", "critic.use_dynamic_bsz=true"),
    ("critic.forward_micro_batch_size_per_gpu=2", "critic.use_dynamic_bsz=true", ""),
    (f"{ACTOR}data_loader_seed=1", "", f"{ACTOR}shuffle=true"),
    (f"{ACTOR}data_loader_seed=1", "", "critic.shuffle=true"),
    (f"{ACTOR}optim.lr_warmup_steps_ratio=0.1", f"{ACTOR}optim.lr_warmup_steps=5", ""),
    ("critic.optim.lr_warmup_steps_ratio=0.1", "critic.optim.lr_warmup_steps=5", ""),
    (f"{ACTOR}optim.min_lr_ratio=0.1", "", f"{ACTOR}optim.lr_scheduler_type=cosine"),
    (f"{ACTOR}optim.min_lr_ratio=0.1", "", f"{ACTOR}optim.lr_scheduler_type=linear"),
    ("algorithm.kl_in_reward_mode=token", GRPO, f"{GRPO} algorithm.use_kl_in_reward=true"),
    (
        "algorithm.kl_in_reward_mode=token",
        "algorithm.use_kl_in_reward=true",
        f"{GRPO} algorithm.use_kl_in_reward=true",
    ),
    ("algorithm.whiten_advantages=true", "", GRPO),
    ("critic.optim.num_cycles=1", "", "critic.optim.lr_scheduler_type=cosine"),
    (f"{ROLLOUT}tensor_model_parallel_size=1", "", None),
    (f"{ROLLOUT}enforce_eager=true", "", None),
    (f"{ROLLOUT}engine_kwargs.vllm.x=1", "", None),
    ("data.seed=1", "data.shuffle=false", ""),
    ("data.truncation=left", "data.filter_overlong_prompts=true", ""),
    ("data.val_batch_size=8", "", VAL),
    (f"{ROLLOUT}val_kwargs.n=1", "", VAL),
    (
        f"{ROLLOUT}val_kwargs.temperature=1",
        f"{VAL} {ROLLOUT}val_kwargs.do_sample=false",
        f"{VAL} {ROLLOUT}val_kwargs.do_sample=true",
    ),
    ("trainer.val_before_train=false", f"{VAL} trainer.val_only=true", VAL),
    ("trainer.critic_warmup=3", GRPO, ""),
    ("trainer.resume_from_path=/x/global_step_3", "", None),
    (f"{ROLLOUT}engine_kwargs.sglang.a=1", "", None),
    ("ray_kwargs.ray_init.num_cpus=8", "ray_kwargs.ray_init.address=auto", ""),
    ("max_turns=4", "do_search=false", ""),
    ("do_search=false", "", "max_turns=4"),
    ("retriever.topk=4", "", "max_turns=4"),
    ("retriever.topk=4", "max_turns=4 env.name=calculator", "max_turns=4"),
    ("env.name=calculator", "", "max_turns=4"),
    ("env.kwargs.depth=4", "max_turns=4", "max_turns=4 env.name=os:path"),
    ("data.max_obs_length=4", "max_turns=4 do_search=false", "max_turns=4"),
    ("data.max_start_length=4", "", "max_turns=4"),
    ("agent.timeout_s=4", "", "agent.command=ls"),
    ("agent.reward=function", "", "agent.command=ls"),
]


@pytest.mark.parametrize(("key", "off", "on"), CASES, ids=[f"{key} {off}" for key, off, _ in CASES])
def test_key_without_effect_has_one_note(material, key, off, on):
    def has_note(rest: str) -> bool:
        line = [
            text.replace("{folder}", str(material.folder)) for text in (rest + " " + key).split()
        ]
        notes = [note for note in material.notes(*line) if " no effect: " in note]
        return sum(key.split("=")[0] in note.split(" ha")[0].split(", ") for note in notes) == 1

    assert has_note(off)
    if on is not None:
        assert not has_note(on)


@pytest.mark.parametrize(
    "key",
    [
        f"{ACTOR}checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        "trainer.max_actor_ckpt_to_keep=3",
        "trainer.max_failed_saves=5",
    ],
)
def test_settings_of_a_save_count_for_the_save_of_a_stop(material, key):
    """Without trainer.save_freq only a stop saves."""
    assert material.notes(*GRPO.split(), key) == []


def test_zero_critic_warmup_has_no_note(material):
    assert material.notes(*GRPO.split(), "trainer.critic_warmup=0") == []


def test_defaults_have_no_notes(material):
    assert material.notes(*GRPO.split()) == []


def test_reward_kwargs_apply_to_built_in_scorer(material):
    assert material.notes("custom_reward_function.reward_kwargs.method=flexible") == []


@pytest.mark.skipif(not installed("vllm"), reason="needs vllm")
def test_vllm_memory_keys_depend_on_device(material):
    on_cpu = material.notes(
        *VLLM, f"{ROLLOUT}gpu_memory_utilization=0.4", f"{ROLLOUT}kv_cache_gb=2"
    )
    assert on_cpu == [
        f"{ROLLOUT}gpu_memory_utilization has no effect: used only when the run is on GPUs "
        "(on CPUs rollout.kv_cache_gb sets the size of vLLM's cache)"
    ]
    on_gpu = material.notes(
        *VLLM,
        f"{ROLLOUT}gpu_memory_utilization=0.4",
        f"{ROLLOUT}kv_cache_gb=2",
        "trainer.device=cuda",
        "trainer.nnodes=2",
    )
    assert on_gpu == [
        f"{ROLLOUT}kv_cache_gb has no effect: used only when the run is on CPUs "
        "(on GPUs rollout.gpu_memory_utilization sets the size of the cache)"
    ]


@pytest.mark.skipif(not installed("vllm"), reason="needs vllm")
@pytest.mark.parametrize(
    ("address", "is_known"), [("10.0.0.1:6379", False), ("auto", False), ("local", True)]
)
def test_a_clusters_devices_are_not_known_before_it_is_joined(material, address, is_known):
    """A driver without a GPU, with trainer.device=auto."""
    notes = material.notes(
        *VLLM, f"{ROLLOUT}gpu_memory_utilization=0.4", f"ray_kwargs.ray_init.address={address}"
    )
    assert len(notes) == is_known


def test_unusual_sampling_and_loss_settings_have_notes(material):
    (note,) = material.notes(f"{ROLLOUT}top_p=0.9", f"{ROLLOUT}top_k=50")
    assert f"{ROLLOUT}top_p=0.9 and {ROLLOUT}top_k=50" in note and "log-probs will differ" in note
    for alone in (f"{ROLLOUT}top_p=0.9", f"{ROLLOUT}top_k=50"):
        (note,) = material.notes(alone)
        assert note.startswith(f"{alone}: samples come from a truncated distribution")
    val = f"data.val_files={material.folder}/test.parquet"
    assert (
        "all samples of a prompt are the same" in material.notes(val, f"{ROLLOUT}val_kwargs.n=4")[0]
    )
    assert "is greedy although" in material.notes(val, f"{ROLLOUT}val_kwargs.do_sample=true")[0]
    (note,) = material.notes(f"{ACTOR}policy_loss.loss_mode=gspo")
    assert (
        note == f"{ACTOR}loss_agg_mode=token-mean: the paper of policy_loss.loss_mode=gspo uses "
        "seq-mean-token-mean"
    )
    assert (
        material.notes(
            f"{ACTOR}policy_loss.loss_mode=gspo", f"{ACTOR}loss_agg_mode=seq-mean-token-mean"
        )
        == []
    )
    assert "auto chose" in material.notes(f"~{ROLLOUT}name")[0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (f"{REWARD_KL} algorithm.kl_penalty=k1+", "a reward has no gradient"),
        (f"algorithm.adv_estimator=rloo_token_kl {ROLLOUT}n=2", "is rloo with clipped advantages"),
        (
            f"{ROLLOUT}n=2 algorithm.filter_groups.enable=true trainer.total_training_steps=9",
            "the critic never learns their values",
        ),
    ],
)
def test_unusual_algorithm_settings_have_notes(material, settings, words):
    (note,) = material.notes(*settings.split())
    assert words in note


@pytest.mark.parametrize(
    "settings",
    [
        KL,
        REWARD_KL,
        f"{KL} {ACTOR}kl_loss_type=k1+",
        f"{REWARD_KL} algorithm.kl_penalty=k2",
        f"{REWARD_KL} algorithm.adv_estimator=rloo_token_kl {ROLLOUT}n=2",
    ],
)
def test_usual_algorithm_settings_have_no_notes(material, settings):
    assert material.notes(*settings.split()) == []


def test_token_budget_may_equal_longest_sequence(material):
    # 512 prompt and 512 response tokens
    material.load(DYNAMIC, f"{ACTOR}ppo_max_token_len_per_gpu=1024")
