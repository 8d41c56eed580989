"""OpenRLHF's command lines: every flag in three spellings, guide 000, and OpenRLHF's examples."""

import re
import shlex

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.convert.conftest import SAMPLES, check_changes
from verlite.config.commands import DPO, PPO, SFT
from verlite.config.problems import ConfigError
from verlite.convert import openrlhf, text
from verlite.convert.formulas import VERBATIM
from verlite.convert.openrlhf import FLAGS, TABLES

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
NAMES = [
    line
    for line in (SAMPLES / "convert/openrlhf_flags.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
SMALLEST = (
    "--pretrain /m --prompt_data /d/x.jsonl --prompt_max_len 1024 --generate_max_len 512 "
    "--remote_rm_url r.py --colocate_all_models"
)


def convert(line: str):
    return openrlhf.convert(shlex.split(line))


def values(line: str) -> dict:
    conversion = convert(line)
    assert conversion.problems == []
    return conversion.values


def problems(line: str) -> str:
    try:
        return "\n".join(map(str, convert(line).problems))
    except ConfigError as error:
        return "\n".join(map(str, error.problems))


def guide_000() -> str:
    """Return guide 000's command with its variables."""
    text = (SAMPLES / "guides/000.sh").read_text().replace("\\\n", " ")
    line = next(line for line in text.splitlines() if "train_ppo_ray" in line)
    for name, value in {
        "REF_NUM_NODES": 2, "REF_GPUS_PER_NODE": 4, "ACTOR_NUM_NODES": 2,
        "ACTOR_GPUS_PER_NODE": 4, "VLLM_NUM_ENGINES": 2, "VLLM_TP_SIZE": 4,
        "VLLM_MEM_UTIL": 0.85, "MICRO_TRAIN_BATCH": 2, "TRAIN_BATCH": 128,
        "MICRO_ROLLOUT_BATCH": 4, "ROLLOUT_BATCH": 256, "MAX_EPOCHS": 1, "NUM_EPISODES": 30,
        "PROMPT_MAX_LEN": 4096, "MAX_SAMPLES": 100000, "GEN_MAX_LEN": 4096, "TEMPERATURE": 1,
        "N_SAMPLES_PER_PROMPT": 8, "ACTOR_LR": "5e-7", "INIT_KL_COEF": 0.02,
        "PRETRAIN": "/models/x", "DATASET": "/data/chatml.json", "MODEL_NAME": "rl-32b",
        "REWARD_MODEL_PORT": 5001, "RAY_DASHBOARD_PORT": 8101,
    }.items():  # fmt: skip
        line = re.sub(rf"\${name}\b", str(value), line)
    return line


# The command line


def test_every_flag_is_known_in_every_spelling():
    known = openrlhf.spellings(FLAGS)
    for name in NAMES:
        for old, new in (("_", "-"), (".", "_"), (".", "-"), ("", "")):
            assert openrlhf._plain(name.replace(old, new)) in known, name


def test_no_spelling_has_two_meanings():
    names = [openrlhf._plain(name) for row in FLAGS for name in {row.name, *row.also}]
    distinct = {(openrlhf._plain(n), row.name) for row in FLAGS for n in (row.name, *row.also)}
    assert len(distinct) == len({name for name, _ in distinct}), sorted(names)


def test_every_target_is_a_key():
    for row in FLAGS:
        for key in row.to.split():
            assert key in PPO.keys, (row.name, key)
        assert row.to or row.note or row.act == "derived", row.name


def test_three_spellings_of_one_command():
    flat = values(f"{SMALLEST} --zero_stage 3 --actor_learning_rate 5e-7 --seed 7")
    dotted = values(
        "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path /m --ds.zero_stage=3 "
        "--data.prompt_dataset /d/x.jsonl --prompt_max_len 1024 --rollout.max_new_tokens 512 "
        "--reward.remote_url r.py --train.colocate_all --actor.adam.lr 5e-7 --train.seed 7"
    )
    hyphens = values(
        "--pretrain=/m --prompt-data=/d/x.jsonl --prompt-max-len=1024 --generate-max-len=512 "
        "--remote-rm-url=r.py --colocate-all-models --zero-stage=3 --actor-learning-rate=5e-7 "
        "--train-seed=7"
    )
    assert flat == dotted == hyphens
    assert flat[f"{ACTOR}optim.lr"] == 5e-7
    assert (flat["data.seed"], flat[f"{ROLLOUT}seed"]) == (7, 7)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (
            "--zero_stge 3",
            "--zero_stge: is not a flag of train_ppo_ray. Did you mean --zero_stage?",
        ),
        ("--zero_st 3", "is an abbreviation, or not a flag. Write it in full: --zero_stage."),
        ("--zero_stage", "--zero_stage: needs a value"),
        ("--zero_stage 3 4", "--zero_stage=3 4: takes one value"),
        ("--zero_stage three", "--zero_stage=three: must be a number (int)"),
        ("--adam_offload true", "--adam_offload=true: takes no value"),
        ("--adam_offload=true", "--adam_offload=true: takes no value"),
        ("--pretrain '$MODEL'", "the shell has not replaced $MODEL"),
        ("zero_stage 3", "zero_stage: is not a flag. Flags begin with --."),
        ("run.sh", "run.sh: is not a flag. Give the command that the script starts, behind --: "),
        ("--eps_clip_low_high", "needs two numbers"),
        ("--eps_clip_low_high 0.2", "--eps_clip_low_high=0.2: needs two numbers"),
        ("--n_samples_per_prompt 0", "must be at least 1"),
        ("--train_batch_size 0", "must be at least 1"),
        ("--init_kl_coef nan", "--init_kl_coef=nan: must be a number"),
        ("--remote_rm_url a.py,http://rm:1", "has a Python file beside other addresses"),
    ],
)
def test_wrong_flags(typed, words):
    assert words in problems(typed)


# Versions


@pytest.mark.parametrize(
    ("version", "clip", "lam", "micro"),
    [
        # Read off the parser of each tag.
        ("0.5.6", 0.2, 0.95, 4),
        ("0.5.9.post1", 0.2, 1.0, 4),
        ("0.6.1", 0.2, 0.95, 4),
        ("v0.8.1", 0.2, 1.0, 4),
        ("0.9.10", 0.5, 1.0, 4),
        ("0.10.0", 0.5, 1.0, 1),
    ],
)
def test_defaults_of_a_version(version, clip, lam, micro):
    done = openrlhf.convert(shlex.split(SMALLEST), version)
    assert done.values["critic.cliprange_value"] == clip
    assert done.values.get("algorithm.lam", 1.0) == lam
    assert done.values[f"{ACTOR}ppo_micro_batch_size_per_gpu"] == micro
    assert done.defaults.startswith(f"Defaults of OpenRLHF {version} (--source-version).")
    assert "value_clip (0.2 before 0.8.2)" in done.defaults


def test_changed_defaults_lead_to_those_of_the_table():
    check_changes(TABLES["train_ppo_ray"])


# Guide 000


def test_guide_000(files):
    line = guide_000()
    assert "$" not in line
    conversion = openrlhf.convert(shlex.split(line))
    files.check(conversion)
    got = conversion.values
    # Every fact of the reference by hand: 128 responses of 8 per prompt are 16 prompts, and so on.
    expected = {
        "data.train_batch_size": 256,
        f"{ACTOR}ppo_mini_batch_size": 16,
        f"{ROLLOUT}n": 8,
        f"{ACTOR}ppo_micro_batch_size_per_gpu": 2,
        f"{ROLLOUT}log_prob_micro_batch_size_per_gpu": 4,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 4,
        "data.max_prompt_length": 4096,
        "data.max_response_length": 4096,
        "data.truncation": "right",
        "data.train_max_samples": 100000,
        "algorithm.adv_estimator": "rloo_token_kl",
        "algorithm.whiten_advantages": False,
        "reward.clip_range": [-10, 10],
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl.kl_coef": 0.02,
        "algorithm.kl_penalty": "kl",
        f"{ACTOR}clip_ratio_c": 1e6,
        f"{ACTOR}shuffle": True,
        f"{ACTOR}optim.lr": 5e-7,
        f"{ACTOR}optim.betas": [0.9, 0.95],
        f"{ACTOR}optim.weight_decay": 0,
        f"{ACTOR}optim.lr_scheduler_type": "cosine",
        f"{ACTOR}optim.lr_warmup_steps_ratio": 0.03,
        f"{ACTOR}optim.min_lr_ratio": 0.1,
        f"{ACTOR}fsdp_config.reshard_after_forward": True,
        f"{ACTOR}fsdp_config.optimizer_offload": True,
        f"{ROLLOUT}tensor_model_parallel_size": 4,
        f"{ROLLOUT}gpu_memory_utilization": 0.85,
        f"{ROLLOUT}free_cache_engine": True,
        f"{ROLLOUT}enable_prefix_caching": True,
        "trainer.nnodes": 2,
        "trainer.n_gpus_per_node": 4,
        "trainer.total_epochs": 30,
        "trainer.save_freq": 10,
        "trainer.max_actor_ckpt_to_keep": 3,
        f"{ACTOR}checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
        "trainer.default_local_dir": "./ckpts/rl-32b/ckpt",
        "trainer.resume_mode": "disable",
        "data.train_files": "/data/chatml.parquet",
        "reward.remote.url": "http://127.0.0.1:5001/get_reward",
    }
    assert {key: got.get(key) for key in expected} == expected
    assert "algorithm.gamma" not in got and "cluster.component_placement" not in got
    comments = conversion.comments
    assert "train_batch_size 128 responses -> ppo_mini_batch_size 16 prompts" in str(comments)
    assert "16 updates" in comments[f"{ACTOR}optim.lr_scheduler_type"]
    assert "every node asks its own 127.0.0.1" in comments["reward.remote.url"]
    assert "LMM-R1" in comments["algorithm.whiten_advantages"]
    assert [warning.typed for warning in conversion.warnings] == [
        "--vllm_sync_backend=gloo",
        "--normalize_reward",
        "--flash_attn",
    ]
    assert conversion.before == [
        "python data_preprocess/chat_json.py --dataset /data/chatml.json --input_key message "
        "--output /data/chatml.parquet"
    ]


# Semantics


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("gae", {"algorithm.adv_estimator": "gae", "reward.clip_range": [-10, 10]}),
        ("reinforce", {"algorithm.adv_estimator": "reinforce_plus_plus"}),
        ("rloo", {"algorithm.adv_estimator": "rloo_token_kl", "algorithm.use_kl_in_reward": True}),
        (
            "reinforce_baseline",
            {
                "algorithm.adv_estimator": "grpo",
                "algorithm.norm_adv_by_std_in_grpo": False,
                "algorithm.kl_in_reward_mode": "token",
                "algorithm.whiten_advantages": True,
            },
        ),
        (
            "reinforce_baseline --use_kl_loss",
            {
                "algorithm.adv_estimator": "reinforce_plus_plus_baseline",
                f"{ACTOR}use_kl_loss": True,
            },
        ),
        (
            "group_norm --init_kl_coef 0",
            {"algorithm.adv_estimator": "grpo", "algorithm.kl_in_reward_mode": None},
        ),
        (
            "group_norm",
            {
                "algorithm.adv_estimator": "grpo",
                "algorithm.kl_in_reward_mode": "token",
                "algorithm.whiten_advantages": None,
                "algorithm.norm_adv_by_std_in_grpo": None,
                "reward.clip_range": None,
            },
        ),
        (
            "dr_grpo",
            {"algorithm.norm_adv_by_std_in_grpo": False, "algorithm.kl_in_reward_mode": "token"},
        ),
    ],
)
def test_estimators(files, flags, expected):
    conversion = convert(f"{SMALLEST} --n_samples_per_prompt 4 --advantage_estimator {flags}")
    files.check(conversion)
    assert {key: conversion.values.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--use_kl_loss --kl_estimator k3", {f"{ACTOR}kl_loss_type": "low_var_kl"}),
        ("--kl_estimator k2", {"algorithm.kl_penalty": "mse"}),
        ("--use_kl_estimator_k3", {"algorithm.kl_penalty": "low_var_kl"}),
        ("--kl_target 0.1", {"algorithm.kl_ctrl.type": "adaptive"}),
        ("--init_kl_coef 0", {"algorithm.use_kl_in_reward": None, f"{ACTOR}use_kl_loss": None}),
        (
            "--eps_clip_low_high 0.2 0.28",
            {f"{ACTOR}clip_ratio_low": 0.2, f"{ACTOR}clip_ratio_high": 0.28},
        ),
        ("--dual_clip 3", {f"{ACTOR}clip_ratio_c": 3.0}),
        ("--policy_loss_type gspo", {f"{ACTOR}loss_agg_mode": "seq-mean-token-mean"}),
        (
            "--entropy_loss_coef 0",
            {f"{ACTOR}calculate_entropy": True, f"{ACTOR}entropy_coeff": None},
        ),
        ("--lr_scheduler constant", {f"{ACTOR}optim.lr_warmup_steps_ratio": None}),
        ("--lr_scheduler linear", {f"{ACTOR}optim.lr_scheduler_type": "linear"}),
        ("--freezing_actor_steps 3", {"trainer.critic_warmup": 5}),
        ("--freezing_actor_steps -1", {"trainer.critic_warmup": None}),
        ("--value_clip 0.2", {"critic.cliprange_value": 0.2}),
        ("--critic.lr_scheduler constant", {"critic.optim.lr_scheduler_type": "constant"}),
        ("", {"critic.optim.lr": 9e-6, "critic.optim.betas": [0.9, 0.95]}),
        ("--zero_stage 2", {f"{ACTOR}fsdp_config.reshard_after_forward": False}),
        ("--load_checkpoint", {"trainer.resume_mode": "auto"}),
        (
            "--use_dynamic_batch",
            {f"{ACTOR}ppo_max_token_len_per_gpu": 16192, f"{ACTOR}shuffle": None},
        ),
        (
            "--lora_rank 8 --target_modules q_proj v_proj",
            {"actor_rollout_ref.model.target_modules": ["q_proj", "v_proj"]},
        ),
        ("--overlong_buffer_len 100", {"reward.overlong_buffer.len": 100}),
        ("--input_key question", {"actor_rollout_ref.model.custom_chat_template": VERBATIM}),
        ("--apply_chat_template", {"actor_rollout_ref.model.custom_chat_template": None}),
        (
            "--eval_dataset /d/v.json --eval_steps 5",
            {
                f"{ROLLOUT}val_kwargs.n": 4,
                f"{ROLLOUT}val_kwargs.temperature": 0.6,
                "trainer.test_freq": 5,
            },
        ),
        (
            "--use_wandb KEY --use_tensorboard t",
            {"trainer.logger": ["console", "wandb", "tensorboard"]},
        ),
    ],
)
def test_settings(files, flags, expected):
    flags = flags if "input_key" in flags or "apply" in flags else f"--input_key message {flags}"
    conversion = convert(f"{SMALLEST} {flags}")
    files.check(conversion)
    assert {key: conversion.values.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--enable_vllm_is_correction", ("token", 5.0, None, None)),
        (
            "--enable_vllm_is_correction --vllm_is_correction_type icepop",
            ("token", "0.5_5", None, None),
        ),
        (
            "--algo.advantage.is_correction_level seq "
            "--algo.advantage.is_correction_threshold 0.9 1.1",
            ("token", 1e6, "seq_mean_k1", "0.9_1.1"),
        ),
        (
            "--algo.advantage.is_correction_level token --algo.advantage.is_correction_mode clip "
            "--algo.advantage.is_correction_threshold 2",
            ("token", 2.0, None, None),
        ),
    ],
)
def test_correction(files, flags, expected):
    conversion = convert(f"{SMALLEST} {flags}")
    files.check(conversion)
    names = ("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold")
    got = [conversion.values.get(f"algorithm.rollout_correction.{name}") for name in names]
    assert tuple(got) == expected


def test_a_secret_is_not_repeated():
    conversion = convert(f"{SMALLEST} --use_wandb 0123secret")
    assert "0123secret" not in repr(conversion)


def test_several_reward_services(files):
    conversion = convert(SMALLEST.replace("r.py", "http://a:1/get_reward,http://b:1/get_reward"))
    files.check(conversion)
    urls = ["http://a:1/get_reward", "http://b:1/get_reward"]
    assert conversion.values["reward.remote.url"] == urls
    assert "reward.remote.url" not in conversion.comments


def test_separate_devices(files):
    conversion = convert(
        SMALLEST.replace("--colocate_all_models", "")
        + " --actor_num_gpus_per_node 4 --ref_num_gpus_per_node 4 --critic_num_gpus_per_node 4 "
        "--vllm_num_engines 2 --vllm_tensor_parallel_size 2 --colocate_actor_ref"
    )
    files.check(conversion)
    assert conversion.values["cluster.component_placement"] == {
        "actor,ref": "0-3",
        "critic": "4-7",
        "rollout": "8-11",
    }
    assert conversion.values["trainer.nnodes"] * conversion.values["trainer.n_gpus_per_node"] == 12


ASYNC = (
    f"{SMALLEST} --actor_num_gpus_per_node 4 --async_train --enable_vllm_is_correction "
    "--vllm_num_engines 2 --vllm_tensor_parallel_size 2"
)
APART = (
    ASYNC.replace("--colocate_all_models", "--colocate_actor_ref")
    + " --critic_num_gpus_per_node 2 --ref_num_gpus_per_node 4"
)


@pytest.mark.parametrize(
    ("line", "placement", "ahead", "swaps"),
    [
        (ASYNC, {"actor,ref,critic": "0-3", "rollout": "4-7"}, 1, False),
        (
            f"{ASYNC} --init_kl_coef 0 --advantage_estimator reinforce --partial_rollout "
            "--async_queue_size 3 --vllm_enable_sleep",
            {"actor": "0-3", "rollout": "4-7"},
            3,
            True,
        ),
        (
            f"{ASYNC.replace('async_train', 'train.async_enable')} --train.async_queue_size 2 "
            "--train.partial_rollout_enable --algo.advantage.is_correction_level seq "
            "--vllm_num_engines 1",
            {"actor,ref,critic": "0-3", "rollout": "4-5"},
            2,
            True,
        ),
        (APART, {"actor,ref": "0-3", "critic": "4-5", "rollout": "6-9"}, 1, False),
    ],
)
def test_asynchronous_training(files, line, placement, ahead, swaps):
    """Engines have devices of their own, and need not have as many as the actor. The queue's size
    is the batches that are sampled while one is trained."""
    conversion = convert(line)
    files.check(conversion)
    got = conversion.values
    expected = {
        "trainer.mode": "async",
        "async_training.depth": ahead,
        "async_training.max_age": ahead,
        "async_training.partial_rollout": swaps,
        "algorithm.rollout_correction.rollout_is": "token",
        "cluster.component_placement": placement,
        f"{ROLLOUT}free_cache_engine": False,
    }
    assert {key: got.get(key) for key in expected} == expected
    devices = sum(
        int(last or first) - int(first) + 1
        for first, _, last in (places.partition("-") for places in placement.values())
    )
    assert got["trainer.nnodes"] * got["trainer.n_gpus_per_node"] == devices
    assert "limits the queue, not the age" in conversion.comments["async_training.max_age"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            ASYNC.replace("--enable_vllm_is_correction", ""),
            "older weights, for which verlite needs a correction. Add --enable_vllm_is_correction",
        ),
        (
            ASYNC.replace("--vllm_num_engines 2", ""),
            "--vllm_num_engines: is missing. With --async_train it is needed",
        ),
        (f"{ASYNC} --async_queue_size 0", "--async_queue_size=0: must be at least 1"),
        (f"{ASYNC} --vllm_generate_batch_size 4096", "--async_queue_size says how many steps'"),
        (f"{ASYNC} --ref_num_nodes 2", "colocated models share devices: 16 here, 4 for the actor"),
    ],
)
def test_asynchronous_training_that_is_refused(line, words):
    assert words in problems(line)


def test_settings_of_asynchronous_training_without_it():
    conversion = convert(f"{SMALLEST} --partial_rollout --async_queue_size 2")
    assert [(warning.typed, warning.text) for warning in conversion.warnings] == [
        ("--async_queue_size=2", "it has no effect without --async_train"),
        ("--partial_rollout", "it has no effect without --async_train"),
    ]
    assert "trainer.mode" not in conversion.values


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--reward_pretrain r", "--reward_pretrain=r: has no counterpart in verlite"),
        ("--agent_func_path a.py", "env.name=package.module:EnvFactory"),
        ("--enable_ema", "moving average"),
        (
            "--train_batch_size 100 --n_samples_per_prompt 8",
            "must be divisible by n_samples_per_prompt=8",
        ),
        ("--advantage_estimator flash_reinforce", "has no counterpart"),
        ("--advantage_estimator rloo", "n_samples_per_prompt must be at least 2"),
        ("--lr_scheduler polynomial", "has no counterpart"),
        ("--actor.optim muon", "--actor.optim=muon"),
        ("--no_advantage_std_norm", "divides by the standard deviation"),
        (
            "--advantage_estimator group_norm --n_samples_per_prompt 2 --reward_clip_range -1 1",
            "after the baseline",
        ),
        (
            "--dynamic_filtering --dynamic_filtering_reward_range 0.1 0.9 "
            "--n_samples_per_prompt 2 --advantage_estimator rloo",
            "Only 0 1 has a counterpart",
        ),
        ("--vllm_num_engines 3", "3 engines x 1 GPUs are not the 8 GPUs"),
        ("--ref_num_nodes 2", "16 here, 8 for the actor"),
        ("--param_dtype fp16", "--param_dtype=fp16: verlite has no such value"),
        ("--stop_properly_penalty_coef 0", "algorithm.mask_truncated"),
        ("--vllm_generate_batch_size 4096", "prompts of one step at a time"),
        ("--is_correction_gating tv", "ratio"),
        ("--lora_dropout 0.1", "without dropout"),
    ],
)
def test_what_would_change_training_is_refused(flags, words):
    assert words in problems(f"{SMALLEST} {flags}")


@pytest.mark.parametrize(
    ("left_out", "words"),
    [
        ("--remote_rm_url r.py", "no reward is given"),
        ("--prompt_data /d/x.jsonl", "--prompt_data: is missing"),
        ("--pretrain /m", "--pretrain: is missing"),
        ("--prompt_max_len 1024 --generate_max_len 512", "Add --prompt_max_len N"),
        ("--colocate_all_models", "--vllm_num_engines: is missing"),
    ],
)
def test_what_is_missing(left_out, words):
    assert words in problems(SMALLEST.replace(left_out, ""))


@pytest.mark.parametrize(
    ("flags", "lengths"),
    [
        ("--max_len 2048 --max_new_tokens 1500", (548, 1500, "left")),
        ("--max_len 2048 --prompt_max_len 500", (500, 1548, "right")),
        ("--generate_max_len 800", (1024, 800, "right")),
        ("--prompt_max_len 800", (800, 1024, "right")),
    ],
)
def test_lengths(flags, lengths):
    got = values(SMALLEST.replace("--prompt_max_len 1024 --generate_max_len 512", flags))
    names = ("max_prompt_length", "max_response_length", "truncation")
    assert tuple(got[f"data.{name}"] for name in names) == lengths


def test_a_folder_of_a_data_set():
    """OpenRLHF's NAME@FOLDER. A local folder is not downloaded."""
    conversion = convert(SMALLEST.replace("/d/x.jsonl", "o/prompts@a/b,/d/all@test,./own"))
    written = ["data/prompts-a-b.parquet", "data/all-test.parquet", "data/own.parquet"]
    assert conversion.values["data.train_files"] == written
    assert conversion.before == [
        "hf download --repo-type dataset o/prompts --include 'a/b/*' --local-dir data/prompts-a-b",
        *(
            f"python data_preprocess/chat_json.py --dataset {source} --input_key input "
            f"--output {output}"
            for source, output in zip(
                ("data/prompts-a-b/a/b", "/d/all/test", "./own"), written, strict=True
            )
        ),
    ]


def test_probabilities_of_data_sets():
    several = SMALLEST.replace("/d/x.jsonl", "/d/x.jsonl,/d/y.jsonl")
    assert "verlite concatenates its files" in problems(f"{several} --prompt_data_probs 0.5,0.5")
    (warning,) = convert(f"{SMALLEST} --prompt_data_probs 1.0").warnings
    assert warning.typed.startswith("--prompt_data_probs")
    assert warning.text == "it has no effect with a single data set"


def test_a_data_set_of_the_hub_is_downloaded_first():
    conversion = convert(
        SMALLEST.replace("/d/x.jsonl", "OpenRLHF/prompts,/d/y.parquet") + " --label_key 'the label'"
    )
    assert conversion.values["data.train_files"] == ["data/prompts.parquet", "/d/y.chat.parquet"]
    assert conversion.before == [
        "hf download --repo-type dataset OpenRLHF/prompts --local-dir data/prompts",
        "python data_preprocess/chat_json.py --dataset data/prompts --input_key input "
        "--label_key 'the label' --output data/prompts.parquet",
        "python data_preprocess/chat_json.py --dataset /d/y.parquet --input_key input "
        "--label_key 'the label' --output /d/y.chat.parquet",
    ]


# train_sft and train_dpo

SFT_LINE = (
    "deepspeed --module openrlhf.cli.train_sft --model.model_name_or_path /m --data.dataset o/d "
    "--data.max_len 2048 --data.input_key question --data.output_key answer --data.max_samples 500 "
    "--train.batch_size 64 --train.micro_batch_size 2 --ckpt.output_dir ./out --ckpt.save_steps -1 "
    "--eval.steps -1 --ds.zero_stage 3 --train.max_epochs 1 --ds.param_dtype bf16 --adam.lr 4e-6 "
    "--ckpt.load_enable --ds.packing_samples --model.gradient_checkpointing_enable"
)
DPO_LINE = (
    "torchrun --nproc_per_node 4 -m openrlhf.cli.train_dpo --pretrain /m --dataset /d/x.jsonl "
    "--max_len 8192 --beta 0.2 --train_batch_size 128 --micro_train_batch_size 1 --bf16 "
    "--learning_rate 5e-7 --apply_chat_template --chosen_key chosen --rejected_key rejected "
    "--zero_stage 3 --adam_offload --flash_attn --ring_attn_size 2 --ref_offload"
)
PAIR = DPO_LINE.replace("--apply_chat_template", "--prompt_key question")


@pytest.mark.parametrize("program", ["sft", "dpo"])
def test_every_flag_of_tuning_is_known(program):
    known = openrlhf.spellings(TABLES[f"train_{program}"].rows)
    lines = (SAMPLES / "convert/openrlhf_tuning_flags.txt").read_text().splitlines()[1:]
    names = [name for name, *programs in map(str.split, lines) if program in programs]
    assert len(names) > 100
    assert [name for name in names if openrlhf._plain(name) not in known] == []


@pytest.mark.parametrize(("program", "command"), [("train_sft", SFT), ("train_dpo", DPO)])
def test_every_target_of_tuning_is_a_key_and_no_spelling_has_two_meanings(program, command):
    table = TABLES[program].rows
    assert [key for row in table for key in row.to.split() if key not in command.keys] == []
    names = [openrlhf._plain(name) for row in table for name in {row.name, *row.also}]
    distinct = {(openrlhf._plain(n), row.name) for row in table for n in (row.name, *row.also)}
    assert len(distinct) == len({name for name, _ in distinct}), sorted(names)


def test_changed_defaults_of_tuning_lead_to_those_of_the_table():
    check_changes(TABLES["train_sft"])


def test_sft(files):
    conversion = convert(SFT_LINE)
    template = '{% for m in messages %}{{ "User: " + m.content + "\\nAssistant: " }}{% endfor %}'
    assert conversion.values == {
        "data.train_files": "data/d-train.parquet",
        "data.prompt_key": "question",
        "data.response_key": "answer",
        "data.train_batch_size": 64,
        "data.micro_batch_size_per_gpu": 2,
        "data.max_length": 2048,
        "data.truncation": "right",
        "data.train_max_samples": 500,
        "model.path": "/m",
        "model.enable_gradient_checkpointing": True,
        "model.custom_chat_template": template,
        "optim.lr": 4e-6,
        "optim.betas": [0.9, 0.95],
        "optim.weight_decay": 0.0,
        "optim.lr_scheduler_type": "cosine",
        "optim.lr_warmup_steps_ratio": 0.03,
        "optim.min_lr_ratio": 0.1,
        "fsdp_config.reshard_after_forward": True,
        "fsdp_config.dtype": "bfloat16",
        "trainer.total_epochs": 1,
        "trainer.save_freq": -1,
        "trainer.default_local_dir": "./ckpt/checkpoints_sft",
        "trainer.resume_mode": "auto",
        "trainer.project_name": "openrlhf_train_sft",
    }
    assert (
        "load_dataset" in conversion.before[0]
        and "split='train'" in shlex.split(conversion.before[0])[-1]
    )
    assert "./out -> ./ckpt/checkpoints_sft/huggingface" in str(conversion.comments)
    script = text.command(conversion)
    assert "\ntorchrun --nproc_per_node gpu -m verlite.main_sft " in script
    plain = SFT_LINE.replace("question", "input").replace("answer", "output")
    files.check(convert(plain))


def test_the_template_writes_what_openrlhf_writes():
    """By jinja as transformers configures it, against Python's str.format."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    for template in ("User: {}\nAssistant: ", "\n  {} '\"\\ü{{\n", "{}"):
        line = SFT_LINE + f" --input_template {shlex.quote(template)}"
        chat = environment.from_string(values(line)["model.custom_chat_template"])
        expected = template.replace("{}", "2 < 3?", 1)
        assert chat.render(messages=[{"role": "user", "content": "2 < 3?"}]) == expected


def test_dpo(files):
    conversion = convert(DPO_LINE)
    files.check(conversion)
    expected = {
        "beta": 0.2,
        "data.train_files": "/d/x.jsonl",
        "data.max_length": 8192,
        "data.train_batch_size": 128,
        "data.prompt_key": None,
        "model.custom_chat_template": None,
        "optim.lr": 5e-7,
        "ulysses_sequence_parallel_size": 2,
        "fsdp_config.optimizer_offload": True,
        "trainer.default_local_dir": "./ckpt/checkpoints_dpo",
        "trainer.export_hf": None,
    }
    assert {key: conversion.values.get(key) for key in expected} == expected
    assert [warning.typed for warning in conversion.warnings] == ["--ref_offload", "--flash_attn"]
    assert "\ntorchrun --nproc_per_node 4 -m verlite.main_dpo " in text.command(conversion)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"{PAIR} --input_template ''", {"model.custom_chat_template": VERBATIM}),
        (f"{PAIR} --ref_pretrain /m", {"data.prompt_key": "question"}),
        (
            f"{SFT_LINE.replace('--data.output_key answer', '')} --apply_chat_template --multiturn",
            {"data.messages_key": "question", "model.custom_chat_template": None},
        ),
        (
            f"{SFT_LINE} --apply_chat_template --data.tokenizer_chat_template {{{{m}}}}",
            {"model.custom_chat_template": "{{m}}", "data.response_key": "answer"},
        ),
        (
            f"{SFT_LINE} --eval_dataset o/v@b/c --eval_steps 7",
            {"data.val_files": "data/v-b-c-train.parquet", "trainer.test_freq": 7},
        ),
        (f"{SFT_LINE} --lora_rank 8", {"model.lora_alpha": 16, "model.lora_rank": 8}),
        (f"{SFT_LINE} --wandb K", None),
    ],
)
def test_settings_of_tuning(line, expected):
    if expected is None:
        assert "is an abbreviation, or not a flag" in problems(line)
        return
    got = values(line)
    assert {key: got.get(key) for key in expected} == expected


def test_the_split_of_an_older_version():
    line = shlex.split(f"{SFT_LINE} --eval_dataset o/v")
    for version, split in (("0.7.3", "test"), ("0.7.4", "train"), (None, "train")):
        got = openrlhf.convert(line, version).values
        assert got["data.val_files"] == f"data/v-{split}.parquet"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"{SFT_LINE} --model.aux_loss_coef 0.001", "load-balancing loss is not supported"),
        (f"{SFT_LINE} --pretrain_mode", "trains on responses, not on text alone"),
        (f"{SFT_LINE} --optim muon", "use --optim adam"),
        (f"{SFT_LINE} --data.dataset o/a,o/b --dataset_probs 0.5,0.5", "concatenates its files"),
        (f"{SFT_LINE} --beta 1", "--beta: is not a flag of train_sft"),
        (f"{SFT_LINE} --multiturn", "--multiturn: needs --apply_chat_template"),
        (f"{SFT_LINE} --multiturn --apply_chat_template", "is another column of a conversation"),
        (SFT_LINE.replace("--data.output_key answer", ""), "--output_key: is missing"),
        (SFT_LINE.replace("--data.dataset o/d", ""), "--dataset: is missing"),
        (SFT_LINE.replace("train_sft", "train_rm"), "train_rm: has no counterpart in verlite"),
        (f"{DPO_LINE} --model.ipo_enable", "verlite has the loss of the paper"),
        (f"{DPO_LINE} --label_smoothing 0.1", "verlite has the loss of the paper"),
        (f"{DPO_LINE} --nll_loss_coef 0.2", "verlite has the loss of the paper"),
        (f"{DPO_LINE} --ref_pretrain /other", "reference is the model at the start"),
        (f"{DPO_LINE} --beta 0", "beta=0.0: must be > 0"),
        (DPO_LINE.replace("--apply_chat_template", ""), "--prompt_key: is missing"),
        (f"{DPO_LINE} --param_dtype fp16", "verlite has no such value"),
    ],
)
def test_what_would_change_tuning_is_refused(line, words):
    assert words in problems(line)


@pytest.mark.parametrize(
    ("start", "launch"),
    [
        ("openrlhf.cli.train_sft", "torchrun --nproc_per_node gpu -m"),
        (
            "deepspeed --num_gpus 2 --module openrlhf.cli.train_sft",
            "torchrun --nproc_per_node 2 -m",
        ),
        ("python openrlhf/cli/train_sft.py", "python -m"),
        ("torchrun --nnodes 2 openrlhf/cli/train_sft.py", "torchrun --nnodes 2 -m"),
        (
            "deepspeed --num_nodes 2 --num_gpus 4 --module openrlhf.cli.train_sft",
            "torchrun --nnodes 2 --rdzv_backend c10d --rdzv_endpoint FIRST_HOST:29500 "
            "--nproc_per_node 4 -m",
        ),
    ],
)
def test_how_tuning_is_started(start, launch):
    line = SFT_LINE.replace("deepspeed --module openrlhf.cli.train_sft", start)
    assert convert(line).launch == launch
    assert ("FIRST_HOST is the address" in convert(line).defaults) == ("FIRST_HOST" in launch)


def test_a_hostfile_that_cannot_be_read_is_named():
    start = "deepspeed --hostfile /missing/hosts --module openrlhf.cli.train_sft"
    line = SFT_LINE.replace("deepspeed --module openrlhf.cli.train_sft", start)
    assert "/missing/hosts is not read" in convert(line).defaults
