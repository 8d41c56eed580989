"""Names of verl and Search-R1 are renamed, converted, fixed, refused or ignored, with one note."""

import pytest

from tests.config.conftest import texts, write_prompts
from verlite.config import ConfigError, translation
from verlite.config.commands import PPO
from verlite.config.problems import notes_text
from verlite.config.rules import declared

ACTOR = "actor_rollout_ref.actor."
REF = "actor_rollout_ref.ref."
ROLLOUT = "actor_rollout_ref.rollout."
VAL_TEMPERATURE = f"{ROLLOUT}val_kwargs.temperature"


def value_of(config, name):
    for part in name.split("."):
        config = getattr(config, part) if not isinstance(config, dict) else config[part]
    return config


RENAMES = [
    ("data.train_data_num=1500", "data.train_max_samples", 1500),
    ("data.train_data_num=null", "data.train_max_samples", -1),
    ("data.shuffle_train_dataloader=False", "data.shuffle", False),
    ("data.trust_remote_code=true", "actor_rollout_ref.model.trust_remote_code", True),
    (f"{ROLLOUT}n_agent=5", f"{ROLLOUT}n", 5),
    (f"{ROLLOUT}response_length=64", "data.max_response_length", 64),
    (
        f"{ROLLOUT}checkpoint_engine.update_weights_bucket_megabytes=64",
        f"{ROLLOUT}sync_bucket_mb",
        64,
    ),
    (f"{ACTOR}optim.clip_grad=0.5", f"{ACTOR}grad_clip", 0.5),
    (f"{ACTOR}optim.warmup_style=cosine", f"{ACTOR}optim.lr_scheduler_type", "cosine"),
    (f"{ACTOR}optim.warmup_style=null", f"{ACTOR}optim.lr_scheduler_type", "constant"),
    ("critic.optim.clip_grad=2", "critic.grad_clip", 2.0),
    ("critic.fsdp.param_offload=true", "critic.model.fsdp_config.param_offload", True),
    ("critic.fsdp={optimizer_offload:true}", "critic.model.fsdp_config.optimizer_offload", True),
    ("+reward.custom_reward_function.name=f", "custom_reward_function.name", "f"),
    (
        "reward.reward_kwargs.method=flexible",
        "custom_reward_function.reward_kwargs",
        {"method": "flexible"},
    ),
    (
        "reward.reward_kwargs={method:flexible}",
        "custom_reward_function.reward_kwargs",
        {"method": "flexible"},
    ),
    ("ray_init.num_cpus=8", "ray_kwargs.ray_init.num_cpus", 8),
    ("cluster.num_nodes=2", "trainer.nnodes", 2),
    ("+cluster.num_gpus_per_node=8", "trainer.n_gpus_per_node", 8),
    (f"{ACTOR}policy_loss.tau_pos=2", f"{ACTOR}tau_pos", 2.0),
    ("+actor_rollout_ref.model.lora.rank=8", "actor_rollout_ref.model.lora_rank", 8),
    (
        f"{ACTOR}fsdp_config.mixed_precision.param_dtype=fp32",
        f"{ACTOR}fsdp_config.dtype",
        "float32",
    ),
    (f"{ROLLOUT}n_val=3", f"{ROLLOUT}val_kwargs.n", 3),
    (f"{ACTOR}loss_mode=clip_cov", f"{ACTOR}policy_loss.loss_mode", "clip_cov"),
    (f"{ACTOR}clip_cov_ub=4", f"{ACTOR}policy_loss.clip_cov_ub", 4.0),
    (
        "actor_rollout_ref.model.lora.target_modules=[q_proj]",
        "actor_rollout_ref.model.target_modules",
        ["q_proj"],
    ),
    ("reward.reward_kwargs.max_resp_len=900", "reward.overlong_buffer.max_resp_len", 900),
]


@pytest.mark.parametrize(("typed", "new", "value"), RENAMES, ids=[typed for typed, _, _ in RENAMES])
def test_renamed(material, typed, new, value):
    loaded = material.load(typed)
    assert value_of(loaded.config, new) == value
    assert loaded.provenance[new] == "command line"
    old = typed.lstrip("+").split("=")[0]
    about = [note for note in texts(loaded) if note.startswith((old, "custom_reward_function"))]
    assert len(about) == 1 and about[0].startswith((f"{old} ", f"{old}.")), texts(loaded)


def test_search_r1_format_scores_become_reward_kwargs(material, tmp_path):
    typed = {"structure_format_score": 0.2, "final_format_score": 0.1, "retrieval_score": 0}
    line = [f"reward_model.{name}={value}" for name, value in typed.items()]
    questions = write_prompts(tmp_path / "questions.parquet", 2048, data_source="nq")
    loaded = material.load("~data.train_files", f"data.train_files={questions}", *line)
    assert loaded.config.custom_reward_function.reward_kwargs == typed
    renamed = [
        f"reward_model.{name} is now called custom_reward_function.reward_kwargs.{name}"
        for name in typed
    ]
    assert [note for note in texts(loaded) if "reward_model" in note] == renamed
    with pytest.raises(ConfigError) as error:
        material.load(*line[:1])  # GSM8K's scorer has no such parameter
    (problem,) = error.value.problems
    assert (
        problem.key == "reward_model.structure_format_score"
        and "gsm8k:compute_score does not take this argument" in problem.rule
    )


def test_other_spellings_of_a_value(material):
    loaded = material.load(
        f"{ACTOR}fsdp_config.model_dtype=bf16",
        "algorithm.adv_estimator=rloo_vectorized",
        f"{ROLLOUT}n=2",
        "custom_reward_function.name=null",
    )
    assert loaded.config.actor_rollout_ref.actor.fsdp_config.model_dtype == "bfloat16"
    assert loaded.config.algorithm.adv_estimator == "rloo"
    assert loaded.config.custom_reward_function.name == "compute_score"
    for old, name in (
        ("token", "token_k1"),
        ("sequence", "seq_sum_k1"),
        ("geometric", "seq_mean_k1"),
    ):
        correction = "algorithm.rollout_correction.rollout_rs"
        loaded = material.load(f"{correction}={old}", f"{correction}_threshold=1.01")
        assert loaded.config.algorithm.rollout_correction.rollout_rs == name
    merge = ["actor_rollout_ref.model.lora_rank=4", "+actor_rollout_ref.model.lora.merge="]
    rollout = material.load(merge[0], merge[1] + "True").config.actor_rollout_ref.rollout
    assert rollout.lora_sync == "merged"


def test_one_key_that_stands_for_two(material):
    loaded = material.load(f"{ACTOR}fsdp_config.offload_policy=True")
    fsdp = loaded.config.actor_rollout_ref.actor.fsdp_config
    assert (fsdp.param_offload, fsdp.optimizer_offload) == (True, True)
    assert f"{ACTOR}fsdp_config.offload_policy=true sets " in texts(loaded)[0]
    critic = material.load("critic.fsdp.offload_policy=True").config.critic.model.fsdp_config
    assert (critic.param_offload, critic.optimizer_offload) == (True, True)
    with pytest.raises(ConfigError, match="param_offload"):
        material.load(f"{ACTOR}fsdp_config.offload_policy=maybe")


def test_verls_asynchronous_trainer(material):
    v1 = "trainer.v1."
    depth = f"{v1}separate_async.num_warmup_batches=0"
    assert material.load(depth).config.async_training.depth == 0
    # Keys of the other mode, and those with an effect on what is trained.
    refused = {
        f"{v1}colocate_async.num_warmup_batches=0": "Use async_training.depth",
        f"{v1}sampler.max_off_policy_threshold=3": "Use async_training.max_age, with one less",
        f"{v1}sampler.custom_sampler.path=mine.py": "every prompt is trained once",
        f"{v1}sampler.custom_sampler.name=Mine": "every prompt is trained once",
        f"{v1}sampler.sync_refill_failed_groups=true": "max_error_rate",
        f"{v1}separate_async.hybrid_rollout.enable_switch=true": "cluster.component_placement",
        "actor_rollout_ref.hybrid_engine=false": "cluster.component_placement; trainer.mode=async",
        f"{v1}separate_async.parameter_sync_step=4": "as many times ppo_mini_batch_size",
        f"{v1}separate_async.parameter_sync_step=8": "as many times ppo_mini_batch_size",
    }
    for typed, remedy in refused.items():
        with pytest.raises(ConfigError) as error:
            material.load(typed)
        (problem,) = error.value.problems
        assert typed.split("=")[0] in str(problem) and remedy in str(problem)
    (note,) = texts(material.load(f"{v1}sampler.max_off_policy_threshold=8"))
    assert "async_training.max_age is the limit" in note
    (note,) = texts(material.load(f"{v1}separate_async.parameter_sync_step=1"))
    assert "engines get the weights after each step" in note


@pytest.mark.parametrize("in_yaml", [False, True])
def test_keys_of_verls_other_asynchronous_trainer_have_no_effect(material, tmp_path, in_yaml):
    """verl reads trainer.v1.MODE.* in its mode only."""
    others = {"colocate_async": "separate_async", "separate_async": "colocate_async"}
    for mode, other in others.items():
        given = {"trainer_mode": mode, other: {"num_warmup_batches": 0}}
        if in_yaml:
            file = tmp_path / f"{mode}.yaml"
            file.write_text(f"defaults: [ppo_trainer, _self_]\ntrainer: {{v1: {given}}}\n")
            loaded = material.load(config_name=mode, config_dir=tmp_path, check=False)
        else:
            typed = f"trainer.v1.{other}.num_warmup_batches=0"
            loaded = material.load(typed, f"trainer.v1.trainer_mode={mode}", check=False)
        assert loaded.config.async_training.depth is None and loaded.config.trainer.mode == "async"
        assert f"verl reads it with trainer.v1.trainer_mode={other}" in " ".join(texts(loaded))


def test_keeping_no_earlier_checkpoint_is_keeping_one(material):
    key = "trainer.remove_previous_ckpt_in_save"
    kept = "trainer.max_actor_ckpt_to_keep"
    saves = "trainer.save_freq=5"
    for pair in ((f"{key}=true", f"{kept}=3"), (f"{kept}=3", f"{key}=true")):
        loaded = material.load(saves, *pair)
        assert loaded.config.trainer.max_actor_ckpt_to_keep == 1
        assert f"{key}=true sets {kept}=1 in place of 3" in texts(loaded)
    last_counts = material.load(saves, f"{key}=true", f"{kept}=3", f"{key}=false")
    assert last_counts.config.trainer.max_actor_ckpt_to_keep == 3
    loaded = material.load(f"{key}=True", "trainer.save_freq=5")
    assert loaded.config.trainer.max_actor_ckpt_to_keep == 1
    assert texts(loaded) == [f"{key}=true sets trainer.max_actor_ckpt_to_keep=1"]
    assert material.load(f"{key}=False").config.trainer.max_actor_ckpt_to_keep is None


@pytest.mark.parametrize("temperature", [f"{ROLLOUT}val_temperature", VAL_TEMPERATURE])
def test_a_validation_temperature_samples(material, temperature):
    """verl samples at it, whatever do_sample is."""
    files = f"data.val_files={material.folder}/test.parquet"
    loaded = material.load(files, f"{temperature}=0.5", f"{ROLLOUT}n_val=3")
    sampling = loaded.config.actor_rollout_ref.rollout.val_kwargs
    assert (sampling.temperature, sampling.do_sample, sampling.n) == (0.5, True, 3)
    assert any(f"{temperature}=0.5 sets {ROLLOUT}val_kwargs.do_sample" in x for x in texts(loaded))
    greedy = material.load(files, f"{temperature}=0.5", f"{ROLLOUT}val_kwargs.do_sample=False")
    assert not greedy.config.actor_rollout_ref.rollout.val_kwargs.do_sample
    assert any("temperature has no effect" in note for note in texts(greedy))
    for zero in ([f"{temperature}=0"], [f"{ROLLOUT}n_val=3"]):
        chosen = material.load(files, *zero).config.actor_rollout_ref.rollout.val_kwargs
        assert not chosen.do_sample


@pytest.mark.parametrize("value", ["0", "-1"])
def test_never_in_both_spellings(material, value):
    trainer = material.load(f"trainer.test_freq={value}", f"trainer.save_freq={value}").config
    assert (trainer.trainer.test_freq, trainer.trainer.save_freq) == (-1, -1)


def test_the_advice_for_a_reward_manager_keeps_the_reward(material):
    for key in ("reward_model.reward_manager", "reward.reward_manager.name"):
        with pytest.raises(ConfigError) as error:
            material.load(f"{key}=mine")
        (problem,) = error.value.problems
        assert "Remove" not in problem.remedy and "custom_reward_function.path" in problem.remedy


def test_items_that_are_implied_leave_the_list(material):
    loaded = material.load("trainer.logger=[console,file]")
    assert loaded.config.trainer.logger == ["console"]
    assert texts(loaded) == ["trainer.logger=file has no effect: metrics.jsonl is always written"]


def test_unsupported_keys_at_verls_default_are_accepted(material, untouched):
    at_default = [
        "distillation.distillation_loss.topk=32",
        "transfer_queue.enable=False",
        "reward_model.enable=null",
        f"{ACTOR}router_replay.mode=disabled",
        "data.image_patch_size=14",
    ]
    loaded = material.load(*at_default)
    (note,) = texts(loaded)
    names = ", ".join(typed.split("=")[0] for typed in at_default)
    assert note == (
        f"{names} have no effect: this is verl's default, and verlite has no such choice"
    )
    assert loaded.config == untouched
    for other in (
        "distillation.distillation_loss.topk=8",
        f"{ACTOR}router_replay.mode=R2",
        "distillation.x=1",
    ):
        with pytest.raises(ConfigError):
            material.load(other)


def test_unsupported_keys_of_one_section_are_one_problem(material):
    megatron = f"{ACTOR}megatron."
    with pytest.raises(ConfigError) as error:
        material.load(*(f"{megatron}{name}=2" for name in ("tp", "pp", "ep")), "data.sede=1")
    together, other = error.value.problems
    assert str(together) == (
        f"{megatron}tp and 2 more of *.megatron.*: these keys are not supported. "
        "Training engines use FSDP2; set fsdp_config instead."
    )
    assert other.key == "data.sede"


def test_files_of_verls_own_configuration(material):
    loaded = material.load(config_name="ppo_trainer.yaml", config_dir="config")
    assert texts(loaded) == [
        "--config-path=config --config-name=ppo_trainer.yaml names a file of verl's; verlite's own "
        "ppo_trainer is used"
    ]
    with pytest.raises(ConfigError) as error:
        material.load("data.sede=1", config_name="ppo_megatron_trainer", config_dir="./config")
    first, second = error.value.problems
    assert "trains with FSDP2" in first.rule and second.key == "data.sede"
    with pytest.raises(ConfigError, match="does not exist"):
        material.load(config_name="mine", config_dir="config")


def test_notes_of_one_kind_are_one_line(material):
    loaded = material.load(
        f"{ROLLOUT}n_val=1",
        "data.train_data_num=2048",
        f"{ROLLOUT}load_format=auto",
        "data.return_raw_chat=True",
        "algorithm.kl_ctrl.kl_coef=0.1",
        "algorithm.kl_ctrl.horizon=7",
    )
    lines = str(notes_text(loaded.notes)).splitlines()
    assert lines[:2] == [
        "note: renamed keys: data.train_data_num -> data.train_max_samples",
        "note: accepted without effect: rollout.load_format; data.return_raw_chat "
        "(verlite explain KEY says why)",
    ]
    assert lines[2].startswith("note: no effect in this run: ") and len(lines) == 3


def test_every_new_name_exists():
    for new in [
        *PPO.tables.renamed.values(),
        *PPO.tables.per_device.values(),
        *PPO.tables.null_means,
    ]:
        assert (
            PPO.find(new.replace(".*", ".param_offload"))
            or PPO.find(new.replace("*", "actor_rollout_ref.actor"))
            or PPO.find(new.replace("*", "actor_rollout_ref"))
            or PPO.find(new.removesuffix(".*"))
            or translation.lookup(PPO.tables.ignored, new)
        )
    for old in [*PPO.tables.renamed, *PPO.tables.per_device]:
        assert "*" in old or PPO.find(old) is None, (
            f"{old} is in the schema, so it is not an old name"
        )


def test_reasons_name_keys_that_exist():
    """Keys in reasons must exist."""
    import re

    endings = [key for key in PPO.keys]
    reasons = [
        *PPO.tables.ignored.values(),
        *(fixed.why for fixed in PPO.tables.fixed.values()),
        *PPO.tables.refused.values(),
        *(c.note for key in PPO.keys.values() for c in key.conditions),
        *(declared.words(c.text) for key in PPO.keys.values() for c in key.conditions),
    ]
    for reason in reasons:
        for word in re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", reason):
            if word.split(".")[0] in ("metrics", "torch", "agents", "algorithms"):
                continue
            found = (
                any(key == word or key.endswith("." + word) for key in endings)
                or PPO.find(word)
                or "engine_kwargs" in word
            )
            assert found, f"{word!r} in {reason!r}"


@pytest.mark.parametrize(
    ("key", "devices", "value", "size", "words"),
    [
        (f"{ACTOR}ppo_micro_batch_size", 8, 64, 8, "64 / 8 devices gives"),
        (f"{ACTOR}ppo_micro_batch_size", 6, 64, 10, "64 / 6 devices (rounded) gives"),
        (f"{ACTOR}ppo_micro_batch_size", 8, 4, 1, "4 / 8 devices (rounded) gives"),
        (f"{ROLLOUT}log_prob_micro_batch_size", 8, 128, 16, "128 / 8 devices gives"),
        ("critic.ppo_micro_batch_size", 8, 16, 2, "16 / 8 devices gives"),
        ("critic.forward_micro_batch_size", 8, 16, 2, "16 / 8 devices gives"),
    ],
)
def test_sizes_over_all_devices_are_divided_by_them(material, key, devices, value, size, words):
    line = [f"{key}={value}", f"trainer.n_gpus_per_node={devices}"]
    if key.startswith(ACTOR):
        line = [f"~{ACTOR}ppo_micro_batch_size_per_gpu", *line]
    loaded = material.load(*line)
    assert value_of(loaded.config, f"{key}_per_gpu") == size
    (note,) = (note for note in texts(loaded) if "given 2 times" not in note)
    assert note == f"{key} counts all devices; {words} {key}_per_gpu={size}"


def test_size_is_divided_by_actor_devices(material):
    loaded = material.load(
        f"~{ACTOR}ppo_micro_batch_size_per_gpu",
        f"{ACTOR}ppo_micro_batch_size=64",
        "cluster.component_placement={actor:0-3,rollout:4-7}",
    )
    assert loaded.config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 16


def test_role_names_of_rlinf(material):
    roles = '{"actor,rollout,reward": 0-7, actor_inference: 7}'
    where = "cluster.component_placement"
    assert material.notes(f"{where}={roles}") == [
        f"{where}: actor_inference is called inference here",
        f"{where}: reward has no effect: rewards are computed by processes without devices",
    ]


def test_old_size_null_has_no_note(material):
    assert material.notes(f"{ACTOR}ppo_micro_batch_size=null") == []


def test_old_size_must_be_a_number(material):
    with pytest.raises(ConfigError) as error:
        material.load(f"{ROLLOUT}log_prob_micro_batch_size=big")
    (problem,) = error.value.problems
    assert (problem.key, problem.rule) == (
        f"{ROLLOUT}log_prob_micro_batch_size",
        "expected a whole number >= 1, got text",
    )


ACCEPTED = [
    f"{ACTOR}strategy=fsdp",
    f"{ACTOR}strategy=fsdp2",
    f"{REF}strategy=fsdp",
    "critic.strategy=fsdp2",
    f"{ROLLOUT}mode=async",
    f"{ROLLOUT}mode=sync",
    f"{ROLLOUT}load_format=dummy_dtensor",
    f"{ROLLOUT}do_sample=True",
    f"{ROLLOUT}calculate_log_probs=True",
    "data.return_raw_chat=True",
    "data.return_raw_input_ids=True",
    "data.return_full_prompt=True",
    "data.filter_overlong_prompts_workers=8",
    "reward_model.enable=False",
    "reward_model.reward_manager=naive",
    "reward_manager.name=dapo",
    "reward_model.reward_manager=batch",
    "reward.reward_kwargs.overlong_buffer_cfg.log=True",
    "algorithm.filter_groups.max_inflight_gen_batches=2",
    "reward_model.strategy=fsdp",
    "trainer.del_local_ckpt_after_load=True",
    "model_engine=dp",
    "trainer.ray_wait_register_center_timeout=300",
    "trainer.max_critic_ckpt_to_keep=2",
    "trainer.rollout_data_dir=/x",
    "trainer.validation_data_dir=/x",
    "actor_rollout_ref.hybrid_engine=True",
    f"{ACTOR}fsdp_config.grad_offload=True",
    "critic.model.fsdp_config.grad_offload=False",
    "critic.fsdp.grad_offload=False",
    f"{ACTOR}fsdp_config.wrap_policy.min_num_params=0",
    "actor_rollout_ref.model.use_shm=False",
    f"{ROLLOUT}multi_turn.enable=False",
    "algorithm.use_pf_ppo=False",
    "trainer.use_legacy_worker_impl=disable",
    "hydra.run.dir=/x",
    "global_profiler.steps=[1]",
    "algorithm.state_masking.start_state_marker=x",
]


@pytest.fixture(scope="module")
def untouched(material):
    return material.load().config


@pytest.mark.parametrize("typed", ACCEPTED)
def test_accepted_without_effect(material, untouched, typed):
    loaded = material.load(typed)
    (note,) = texts(loaded)
    assert note.startswith(f"{typed.split('=')[0]} has no effect: ")
    assert loaded.config == untouched


REFUSED = [
    (f"{ROLLOUT}mode=batch", "only sync or async is accepted"),
    (f"{ROLLOUT}do_sample=False", "only true is accepted"),
    (f"{ROLLOUT}multi_turn.max_assistant_turns=3", "max_turns"),
    ("reward_model.enable=True", "custom_reward_function.path"),
    ("reward_model.reward_manager=limited", "naive or dapo or prime or batch or gdpo is accepted"),
    ("data.image_key=pictures", "text only"),
    ("reward.reward_manager.name=remote", "lists of one sample"),
    (f"{ROLLOUT}data_parallel_size=2", "only 1 is accepted"),
    ("+reward_model.reward_kwargs.weight=2", "does not take this argument"),
    (f"{ACTOR}policy_loss.dro_beta=0.1", "not supported"),
    (f"{ROLLOUT}hybrid=1", "unknown key"),
]


@pytest.mark.parametrize(("typed", "words"), REFUSED, ids=[typed for typed, _ in REFUSED])
def test_refused_key_names_the_alternative(material, typed, words):
    with pytest.raises(ConfigError) as error:
        material.load(typed)
    (problem,) = error.value.problems
    assert problem.key == typed.lstrip("+").split("=")[0]
    assert words in str(problem)


@pytest.mark.parametrize(
    "typed",
    [
        "data.train_data_num=0",
        f"{ROLLOUT}n_agent=0",
        "reward.reward_kwargs.methd=flexible",
        "reward.reward_kwargs={methd:flexible}",
    ],
)
def test_problem_uses_the_name_that_was_typed(material, typed):
    with pytest.raises(ConfigError) as error:
        material.load(typed)
    (problem,) = error.value.problems
    assert problem.key.startswith(typed.split("=")[0])


def test_both_names_of_one_key(material):
    with pytest.raises(ConfigError) as error:
        material.load("data.train_max_samples=1500", "data.train_data_num=1600")
    (problem,) = error.value.problems
    assert problem.key == "data.train_data_num"
    assert "data.train_max_samples=1500 is set too" in problem.rule
    assert (
        material.load(
            "data.train_max_samples=1500", "data.train_data_num=1500"
        ).config.data.train_max_samples
        == 1500
    )


@pytest.mark.parametrize(
    "line", [("n=1", "n_agent=5"), ("n_agent=5", "n=1"), ("n=5", "n_agent=1"), ("n_agent=1", "n=5")]
)
def test_search_r1_n_and_n_agent_multiply(material, line):
    loaded = material.load(*(ROLLOUT + text for text in line), "algorithm.adv_estimator=grpo")
    assert loaded.config.actor_rollout_ref.rollout.n == 5


def test_search_r1_mini_batch_note(material):
    notes = material.notes(f"{ROLLOUT}n_agent=5", "algorithm.adv_estimator=grpo")
    assert any("ppo_mini_batch_size counts prompts here, 5 samples each" in note for note in notes)


def test_old_name_without_effect_has_one_note(material):
    old = f"{REF}log_prob_micro_batch_size"
    (note,) = material.notes(f"{old}=16")
    reason = "used only when a KL term is on (algorithm.use_kl_in_reward or actor.use_kl_loss)"
    assert note == f"{old} has no effect: {reason}"
