"""Names of verl and Search-R1 are renamed, converted, fixed, refused or ignored, with one note."""

import pytest

from tests.config.conftest import write_prompts
from verlite.config import ConfigError, aliases, conditions, keys

ACTOR = "actor_rollout_ref.actor."
REF = "actor_rollout_ref.ref."
ROLLOUT = "actor_rollout_ref.rollout."


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
    (f"{ACTOR}use_torch_compile=true", f"{ACTOR}fsdp_config.use_torch_compile", True),
    (f"{REF}use_torch_compile=true", f"{REF}fsdp_config.use_torch_compile", True),
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
]


@pytest.mark.parametrize(("typed", "new", "value"), RENAMES, ids=[typed for typed, _, _ in RENAMES])
def test_renamed(material, typed, new, value):
    loaded = material.load(typed)
    assert value_of(loaded.config, new) == value
    assert loaded.provenance[new] == "command line"
    old = typed.lstrip("+").split("=")[0]
    about = [note for note in loaded.notes if note.startswith((old, "custom_reward_function"))]
    assert len(about) == 1 and about[0].startswith((f"{old} ", f"{old}.")), loaded.notes


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
    assert [note for note in loaded.notes if "reward_model" in note] == renamed
    with pytest.raises(ConfigError) as error:
        material.load(*line[:1])  # GSM8K's scorer has no such parameter
    (problem,) = error.value.problems
    assert (
        problem.key == "reward_model.structure_format_score"
        and "gsm8k:compute_score does not take this argument" in problem.rule
    )


def test_every_new_name_exists():
    for new in [*aliases.RENAMED.values(), *aliases.PER_DEVICE.values(), *aliases.NULL_MEANS]:
        assert (
            keys.find(new.replace("*", "param_offload"))
            or keys.find(new.removesuffix(".*"))
            or aliases.lookup(aliases.IGNORED, new)
        )
    for old in [*aliases.RENAMED, *aliases.PER_DEVICE]:
        assert "*" in old or keys.find(old) is None, (
            f"{old} is in the schema, so it is not an old name"
        )


def test_reasons_name_keys_that_exist():
    """Keys in reasons must exist."""
    import re

    endings = [key for key in keys.keys()]
    reasons = [
        *aliases.IGNORED.values(),
        *(why for _, why in aliases.FIXED.values()),
        *aliases.REFUSED.values(),
        *(c.note for key in keys.keys().values() for c in key.conditions),
        *(conditions.words(c.text) for key in keys.keys().values() for c in key.conditions),
    ]
    for reason in reasons:
        for word in re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", reason):
            if word.split(".")[0] in ("metrics", "torch", "agents"):
                continue
            found = (
                any(key == word or key.endswith("." + word) for key in endings)
                or keys.find(word)
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
    (note,) = (note for note in loaded.notes if "given 2 times" not in note)
    assert note == f"{key} counts all devices; {words} {key}_per_gpu={size}"


def test_size_is_divided_by_actor_devices(material):
    loaded = material.load(
        f"~{ACTOR}ppo_micro_batch_size_per_gpu",
        f"{ACTOR}ppo_micro_batch_size=64",
        "cluster.component_placement={actor:0-3,rollout:4-7}",
    )
    assert loaded.config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 16


def test_old_size_null_has_no_note(material):
    assert material.load(f"{ACTOR}ppo_micro_batch_size=null").notes == []


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
    "reward.reward_kwargs.overlong_buffer_cfg.log=True",
    "reward_model.reward_kwargs.max_resp_len=512",
    "algorithm.filter_groups.max_inflight_gen_batches=2",
    "reward_model.strategy=fsdp",
    "trainer.ray_wait_register_center_timeout=300",
    "trainer.max_critic_ckpt_to_keep=2",
    "trainer.rollout_data_dir=/x",
    "trainer.validation_data_dir=/x",
    "actor_rollout_ref.hybrid_engine=True",
    f"{ACTOR}fsdp_config.grad_offload=True",
    "critic.model.fsdp_config.grad_offload=False",
    "critic.fsdp.grad_offload=False",
    f"{ACTOR}fsdp_config.wrap_policy.min_num_params=0",
    f"{ACTOR}checkpoint.save_contents=[model]",
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
    (note,) = loaded.notes
    assert note.startswith(f"{typed.split('=')[0]} has no effect: ")
    assert loaded.config == untouched


REFUSED = [
    (f"{ACTOR}strategy=megatron", "only fsdp or fsdp2 is accepted"),
    (f"{ROLLOUT}mode=batch", "only sync or async is accepted"),
    (f"{ROLLOUT}do_sample=False", "only true is accepted"),
    (f"{ROLLOUT}multi_turn.enable=True", "max_turns"),
    (f"{ROLLOUT}multi_turn.max_assistant_turns=3", "max_turns"),
    ("reward_model.enable=True", "custom_reward_function.path"),
    ("reward_model.reward_manager=prime", "only naive or dapo is accepted"),
    (f"{ACTOR}fsdp_config.offload_policy=True", "param_offload"),
    (f"{ACTOR}fsdp_config.mixed_precision.param_dtype=bf16", "fsdp_config.dtype"),
    (f"{ACTOR}megatron.tensor_model_parallel_size=2", "FSDP2"),
    ("data.image_key=images", "text only"),
    ("data.custom_cls.path=x.py", "parquet"),
    (f"{ROLLOUT}data_parallel_size=2", "only 1 is accepted"),
    ("+reward_model.reward_kwargs.weight=2", "custom_reward_function.path"),
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
    notes = material.load(f"{ROLLOUT}n_agent=5", "algorithm.adv_estimator=grpo").notes
    assert any("ppo_mini_batch_size counts prompts here, 5 samples each" in note for note in notes)


def test_old_name_without_effect_has_one_note(material):
    old = f"{REF}log_prob_micro_batch_size"
    (note,) = material.load(f"{old}=16").notes
    reason = "used only when a KL term is on (algorithm.use_kl_in_reward or actor.use_kl_loss)"
    assert note == f"{old} has no effect: {reason}"
