"""RLinf's math YAMLs: every key, guide 004, and what a value becomes."""

from pathlib import Path

import pytest

from tests.convert.conftest import BOMB, SAMPLES
from verlite.config import plan
from verlite.config.commands import PPO
from verlite.config.problems import ConfigError
from verlite.convert import rlinf, rows
from verlite.convert.rlinf import KEYS

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
NAMES = [
    line
    for line in (SAMPLES / "convert/rlinf_keys.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
SAMPLE = (SAMPLES / "convert/rlinf.yaml").read_text()


@pytest.fixture
def convert(tmp_path, monkeypatch):
    known = plan.installed  # the sample's tracker need not be installed
    monkeypatch.setattr(plan, "installed", lambda name: name == "swanlab" or known(name))

    def converted(*changes: tuple[str, str]):
        text = SAMPLE
        for old, new in changes:
            assert old in text, old
            text = text.replace(old, new)
        (tmp_path / "rlinf.yaml").write_text(text)
        return rlinf.convert(tmp_path / "rlinf.yaml")

    return converted


def test_every_key_has_a_row():
    assert [name for name in NAMES if rows.find(KEYS, name) is None] == []


def test_every_target_is_a_key():
    for row in KEYS:
        for key in row.to.split():
            assert key in PPO.keys, (row.name, key)


def test_guide_004(convert, files):
    """As in recipes/math/config, which was written by hand."""
    conversion = convert()
    files.check(conversion)
    expected = {
        "data.train_files": "/data/boba.parquet",
        "data.train_batch_size": 512,
        "data.max_prompt_length": 1024,
        "data.max_response_length": 27648,
        "data.filter_overlong_prompts": True,
        "data.seed": 1234,
        f"{ACTOR}ppo_mini_batch_size": 128,
        f"{ACTOR}ppo_micro_batch_size_per_gpu": 1,
        f"{ROLLOUT}log_prob_micro_batch_size_per_gpu": 2,
        f"{ROLLOUT}n": 16,
        f"{ACTOR}grad_clip": 0.8,
        f"{ACTOR}optim.lr": 2e-5,
        f"{ACTOR}optim.lr_warmup_steps_ratio": 0.01,
        f"{ACTOR}optim.weight_decay": 0.05,
        f"{ACTOR}optim.betas": [0.9, 0.95],
        f"{ACTOR}optim.eps": 1e-5,
        f"{ACTOR}clip_ratio_c": 1e6,
        f"{ACTOR}fsdp_config.dtype": "bfloat16",
        f"{ACTOR}fsdp_config.param_offload": True,
        f"{ROLLOUT}gpu_memory_utilization": 0.55,
        f"{ROLLOUT}max_num_seqs": 64,
        "algorithm.adv_estimator": "grpo",
        "algorithm.whiten_advantages": True,
        "cluster.component_placement": {"actor,rollout": "all"},
        "trainer.mode": None,
        "trainer.nnodes": 4,
        "trainer.n_gpus_per_node": 8,
        "trainer.total_epochs": 5,
        "trainer.save_freq": 50,
        "trainer.test_freq": 1,
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": "../results/grpo-1.5b",
    }
    assert {key: conversion.values.get(key) for key in expected} == expected
    warned = [warning.typed for warning in conversion.warnings]
    assert conversion.values["trainer.logger"] == ["console", "tensorboard", "swanlab"]
    assert "algorithm.early_stop_imp_ratio=5.0" in warned
    assert "reward.reward_scale=5.0" in warned
    assert conversion.before == [
        "python data_preprocess/chat_json.py --dataset /data/boba.jsonl --input_key prompt "
        "--label_key solutions --data_source math --output /data/boba.parquet"
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            [
                (
                    "actor,rollout,reward: all",
                    "rollout,reward: 0-19\n    actor_inference: 20-23\n    actor: 24-31",
                )
            ],
            {
                "cluster.component_placement": {
                    "rollout": "0-19",
                    "inference": "20-23",
                    "actor": "24-31",
                },
                "trainer.mode": "pipelined",
            },
        ),
        (
            [
                ("  num_gpus_per_node: 8\n", ""),
                ("num_nodes: 4", "num_nodes: 1"),
                ("reward: all", "reward: 0-1"),
            ],
            {"trainer.n_gpus_per_node": 2},
        ),
        (
            [("recompute_logprobs: true", "recompute_logprobs: false")],
            {"algorithm.rollout_correction.bypass_mode": True},
        ),
        (
            [
                (
                    "  use_valid_token_scale: false",
                    "  importance_sampling_fix: true\n  importance_sampling_clip: 1.5",
                )
            ],
            {
                "algorithm.rollout_correction.rollout_is": "token",
                "algorithm.rollout_correction.rollout_is_threshold": 1.5,
            },
        ),
        (
            [("kl_beta: 0.0", "kl_beta: 0.001")],
            {f"{ACTOR}use_kl_loss": True, f"{ACTOR}kl_loss_coef": 0.001},
        ),
        ([("clip_ratio_c: null", "clip_ratio_c: 5.0")], {f"{ACTOR}clip_ratio_c": 5.0}),
        ([("clip_ratio_high: null", "clip_ratio_high: 0.28")], {f"{ACTOR}clip_ratio_high": 0.28}),
        (
            [("normalize_advantages: true", "normalize_advantages: false")],
            {"algorithm.whiten_advantages": None},
        ),
        (
            [
                ("adv_type: grpo", "adv_type: gae"),
                ("use_critic_model: false", "use_critic_model: true"),
            ],
            {
                "algorithm.adv_estimator": "gae",
                "reward.std": 0.2,
                "reward.score_scale": {"default": "signed"},
            },
        ),
        (
            [("adv_type: grpo", "adv_type: reinpp\n  reinpp_kl_beta: 0.001")],
            {
                "algorithm.adv_estimator": "reinforce_plus_plus",
                "algorithm.kl_ctrl.kl_coef": 0.001,
                "algorithm.kl_penalty": "low_var_kl",
            },
        ),
        (
            [
                (
                    "adv_type: grpo",
                    "adv_type: reinpp\n  reinpp_kl_beta: 0.01\n  use_reinpp_baseline: true",
                )
            ],
            {
                "algorithm.adv_estimator": "grpo",
                "algorithm.kl_in_reward_mode": "token",
                "algorithm.whiten_advantages": True,
            },
        ),
        (
            [("enable_dynamic_batch_size: false", "enable_dynamic_batch_size: true")],
            {f"{ACTOR}ppo_max_token_len_per_gpu": 28672},
        ),
        ([("top_k: 1000000", "top_k: 50")], {f"{ROLLOUT}top_k": 50}),
        (
            [("apply_chat_template: false", "apply_chat_template: true")],
            {"actor_rollout_ref.model.custom_chat_template": None},
        ),
        (
            [("max_steps: -1", "max_steps: 10")],
            {"trainer.total_training_steps": 10, "trainer.total_epochs": None},
        ),
        (
            [("lr_decay_style: constant", "lr_decay_style: linear\n    min_lr: 2e-6")],
            {f"{ACTOR}optim.lr_scheduler_type": "linear", f"{ACTOR}optim.min_lr_ratio": 0.1},
        ),
        (
            [("lr_warmup_fraction: 0.01", "lr_warmup_iters: 20")],
            {f"{ACTOR}optim.lr_warmup_steps": 20},
        ),
        ([("resume_dir: null", "resume_dir: auto")], {"trainer.resume_mode": None}),
    ],
)
def test_values(convert, files, changes, expected):
    conversion = convert(*changes)
    files.check(conversion)
    assert {key: conversion.values.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("group_size: 16", "grup_size: 16", "algorithm.grup_size=16: is not a key"),
        ("use_reward_model: false", "use_reward_model: true", "no reward models"),
        ("adv_type: grpo", "adv_type: raw", "has gae, grpo, reinpp"),
        ("adv_type: grpo", "adv_type: gae", "gae without a critic"),
        ("n_minibatches: 4", "n_minibatches: 5", "data.rollout_batch_size=512 must be divisible"),
        ("type: math\n  max", "type: vision\n  max", "only math is converted"),
        ("optimizer: adam", "optimizer: sgd", "optimizer is AdamW"),
        (
            "lr_decay_style: constant",
            "lr_decay_style: wsd",
            "lr_decay_style=wsd: has no counterpart",
        ),
        ("group_size: 16", "group_size: ${algorithm.gone}", "algorithm.gone"),
        ("top_p: 1.0", "top_p: 1.0\n    repetition_penalty: 1.2", "use 1"),
    ],
)
def test_what_would_change_training_is_refused(convert, old, new, words):
    try:
        problems = convert((old, new)).problems
    except ConfigError as error:
        problems = error.problems
    assert words in "\n".join(map(str, problems))


@pytest.mark.parametrize(
    ("fsdp", "dtype"),
    [
        ("mixed_precision: {param_dtype: fp16}", "bfloat16"),
        ("amp_autocast: {enabled: true, precision: fp16}", "bfloat16"),
        ("amp_autocast: {enabled: false, precision: fp16}", "float32"),
    ],
)
def test_passes_in_fp16_with_parameters_in_fp32(convert, fsdp, dtype):
    """RLinf's FSDP examples. The precision of passes counts, and the change is named."""
    conversion = convert(
        ("precision: fp16", "precision: fp32"),
        ("\nactor:\n", f"\nactor:\n  fsdp_config:\n    {fsdp}\n"),
    )
    assert conversion.values[f"{ACTOR}fsdp_config.dtype"] == dtype
    assert conversion.values[f"{ROLLOUT}dtype"] == dtype
    note = conversion.comments.get(f"{ACTOR}fsdp_config.dtype", "")
    assert note.startswith("fp16 in RLinf") == (dtype == "bfloat16")


def test_files_of_the_defaults_list_are_read(convert, tmp_path):
    (tmp_path / "fsdp.yaml").write_text("sharding_strategy: shard_grad_op\n")
    conversion = convert(("hydra:\n", "defaults:\n  - fsdp@actor.fsdp_config\nhydra:\n"))
    assert conversion.values[f"{ACTOR}fsdp_config.reshard_after_forward"] is False


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "cannot be read"),
        ("- 1", "must contain keys and values"),
        (None, "No such file"),
        (b"a: \xe9", "cannot be read: 'utf-8' codec"),
        ("a: &a [*a]", "cannot be read: it has an alias of itself"),
        (BOMB, "cannot be read: it has more than 100,000 values, aliases included"),
        ("defaults:\n  - model: qwen\n", "defaults=.*is not read: write the keys"),
        ("cluster: {component_placement: [actor]}", "component_placement=actor: must be a mapping"),
        ("data: {train_data_paths: [[a]]}", "train_data_paths=.*must be a list of texts"),
        ("algorithm: {group_size: x}", "algorithm.group_size=x: must be a number"),
    ],
)
def test_unreadable_files(tmp_path, text, words):
    path = Path(tmp_path / "x.yaml")
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=words):
        rlinf.convert(path)
