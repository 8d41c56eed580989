"""Each invalid command line is reported with its key, the rule and the remedy."""

import json
import math
import os
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tensordict import TensorDict

from tests.config.conftest import NO_WEIGHTS, write_prompts
from tests.trainer.test_batch import generated_batch
from tests.trainer.test_stages import fake_run
from verlite.config import ConfigError, make_plan, plan
from verlite.config.commands import PPO
from verlite.config.compile import policy_loss_spec
from verlite.config.keys import get
from verlite.config.plan import installed
from verlite.config.problems import nearest
from verlite.config.rules import declared
from verlite.config.rules.context import Context, nearest_divisors
from verlite.engine.fsdp import Counts
from verlite.masking import display, is_secret
from verlite.spec import catalog
from verlite.trainer.batch import fetch_padded
from verlite.trainer.stages import advantage
from verlite.workers.actor import policy_objective

ACTOR = "actor_rollout_ref.actor."
REF = "actor_rollout_ref.ref."
ROLLOUT = "actor_rollout_ref.rollout."
CORRECTION = "algorithm.rollout_correction."
FILTER = "algorithm.filter_groups"
DYNAMIC = f"{ACTOR}use_dynamic_bsz=true"
KL = f"{ACTOR}use_kl_loss=true"
GDPO = "algorithm.adv_estimator=gdpo"
GDPO_KEYS = "algorithm.gdpo_reward_keys"
GDPO_WEIGHTS = "algorithm.gdpo_reward_weights"
GDPO_PARTS = f"{GDPO} {GDPO_KEYS}=[a,b]"
SP = f"{ACTOR}ulysses_sequence_parallel_size"

WRONG = [
    # single values
    (
        f"{ROLLOUT}engine_kwargs.vlm.foo=1",
        f"{ROLLOUT}engine_kwargs.vlm",
        "is not an engine; Did you mean vllm; Legal: vllm, hf",
    ),
    (f"{ROLLOUT}engine_kwargs.vllm=3", f"{ROLLOUT}engine_kwargs.vllm", "must be a mapping"),
    (f"{GDPO} {GDPO_KEYS}=[]", GDPO_KEYS, "does not name the reward parts"),
    (f"{GDPO} {GDPO_KEYS}=[a,b,a]", GDPO_KEYS, "names a more than once"),
    (
        f"{GDPO_PARTS} {GDPO_WEIGHTS}=[1]",
        GDPO_WEIGHTS,
        f"has 1 weight for 2 parts in {GDPO_KEYS}; 1 each",
    ),
    (
        f"{GDPO} {GDPO_KEYS}=[a] {GDPO_WEIGHTS}=[1,2]",
        GDPO_WEIGHTS,
        f"has 2 weights for 1 part in {GDPO_KEYS}",
    ),
    (f"{GDPO_PARTS} {GDPO_WEIGHTS}=[1,0]", GDPO_WEIGHTS, "the weight 0 has no influence"),
    (
        f"{GDPO_PARTS} algorithm.use_kl_in_reward=true",
        "algorithm.use_kl_in_reward",
        "which have no KL; use_kl_loss=true",
    ),
    (f"{GDPO_PARTS} reward.mean=1", "reward.mean", "compares the parts of the reward"),
    (f"{GDPO_PARTS} reward.std=2", "reward.std", "compares the parts of the reward"),
    (f"{GDPO_PARTS} reward.clip_range=[0,1]", "reward.clip_range", "compares the parts"),
    (
        f"{GDPO_PARTS} reward.overlong_buffer.enable=true",
        "reward.overlong_buffer.enable",
        "changes the score; let the reward function return such a part",
    ),
    (
        f"{GDPO_PARTS} {FILTER}.enable=true {ROLLOUT}n=2",
        f"{FILTER}.metric",
        "algorithm.adv_estimator=gdpo compares only a, b; Use one of these",
    ),
    (
        f"{GDPO_PARTS} {FILTER}.enable=true {FILTER}.metric=seq_reward {ROLLOUT}n=2",
        f"{FILTER}.metric",
        "compares only a, b",
    ),
    ("reward.clip_range=[1]", "reward.clip_range", "must be two numbers"),
    (
        f"{FILTER}.enable=true {ROLLOUT}n=4 data.gen_batch_size=4096",
        "data.gen_batch_size",
        "only 2048 rows; at most 2048",
    ),
    (
        f"{CORRECTION}rollout_is=token {CORRECTION}rollout_is_threshold=5.0_0.5",
        f"{CORRECTION}rollout_is_threshold",
        "low below high",
    ),
    (
        f"{CORRECTION}rollout_is=token {CORRECTION}rollout_is_threshold=0.55",
        f"{CORRECTION}rollout_is_threshold",
        "excludes 1",
    ),
    (
        f"{CORRECTION}rollout_is=token {CORRECTION}rollout_is_threshold=0.5_0.9",
        f"{CORRECTION}rollout_is_threshold",
        "excludes 1",
    ),
    (
        f"{FILTER}.enable=true {ROLLOUT}n=4 {FILTER}.metric=accuracy",
        f"{FILTER}.metric",
        "return only a score",
    ),
    (
        f"{FILTER}.enable=true {ROLLOUT}n=4 data.train_batch_size=4096 data.gen_batch_size=64",
        "data.train_batch_size",
        "only 2048 rows",
    ),
    (
        f"{CORRECTION}rollout_rs=seq_mean_k9 {CORRECTION}rollout_rs_threshold=1",
        f"{CORRECTION}rollout_rs",
        "choose from; seq_mean_k3",
    ),
    (
        f"{CORRECTION}rollout_rs=[token_k2,token_k3] {CORRECTION}rollout_rs_threshold=[1,2,3]",
        f"{CORRECTION}rollout_rs_threshold",
        "3 for the 2 entries",
    ),
    # batch arithmetic
    ("critic.ppo_mini_batch_size=3", "critic.ppo_mini_batch_size", "does not divide; 2 or 4"),
    (
        f"~{ACTOR}ppo_micro_batch_size_per_gpu {DYNAMIC} {ROLLOUT}log_prob_use_dynamic_bsz=false",
        f"{ROLLOUT}log_prob_micro_batch_size_per_gpu",
        "must be given",
    ),
    (
        f"~{ACTOR}ppo_micro_batch_size_per_gpu {DYNAMIC} {KL} {REF}log_prob_use_dynamic_bsz=false",
        f"{REF}log_prob_micro_batch_size_per_gpu",
        "must be given; log_prob_use_dynamic_bsz=true",
    ),
    (
        f"~{ACTOR}ppo_micro_batch_size_per_gpu {DYNAMIC} critic.use_dynamic_bsz=false",
        "critic.ppo_micro_batch_size_per_gpu",
        "must be given",
    ),
    (
        f"{DYNAMIC} critic.ppo_max_token_len_per_gpu=1023",
        "critic.ppo_max_token_len_per_gpu",
        "= 1024",
    ),
    (
        f"{ROLLOUT}log_prob_use_dynamic_bsz=true {ACTOR}ppo_max_token_len_per_gpu=9",
        f"{ROLLOUT}log_prob_max_token_len_per_gpu",
        "is less than; at least 1024",
    ),
    # algorithm
    # devices
    (
        "cluster.component_placement={actor:all,judge:0}",
        "cluster.component_placement",
        "'judge' is not a role",
    ),
    (
        "cluster.component_placement={actor:0-3,rollout:all,critic:0-2} "
        "critic.model.fsdp_config.fsdp_size=2",
        "critic.model.fsdp_config.fsdp_size",
        "must divide the 3 devices",
    ),
    (
        f"{SP}=2 {KL} cluster.component_placement={{actor:0-3,rollout:all,critic:all,ref:0-2}}",
        SP,
        "must divide the 3 devices",
    ),
    (
        f"{KL} {REF}ulysses_sequence_parallel_size=3",
        f"{REF}ulysses_sequence_parallel_size",
        "must divide the 8 devices",
    ),
    (
        "critic.ulysses_sequence_parallel_size=5",
        "critic.ulysses_sequence_parallel_size",
        "must divide the 8 devices",
    ),
    (
        "critic.ulysses_sequence_parallel_size=2 critic.model.use_remove_padding=false",
        "critic.ulysses_sequence_parallel_size",
        "needs packed rows; critic.model.use_remove_padding=false",
    ),
    (
        "critic.ulysses_sequence_parallel_size=8",
        "critic.ulysses_sequence_parallel_size",
        "must divide the model's 4 attention heads",
    ),
    (
        f"{DYNAMIC} {SP}=2 {ACTOR}ppo_max_token_len_per_gpu=511 "
        "critic.ppo_max_token_len_per_gpu=1024",
        f"{ACTOR}ppo_max_token_len_per_gpu",
        "= 1024; at least 512",
    ),
    (
        f"{DYNAMIC} {SP}=2 {ACTOR}ppo_max_token_len_per_gpu=512",
        "critic.ppo_max_token_len_per_gpu",
        "= 1024; at least 1024",
    ),
    # trainer
    ("trainer.default_hdfs_dir=hdfs://x", "trainer.default_hdfs_dir", "not supported; Use null"),
    (
        "ray_kwargs.ray_init.address=head:0",
        "ray_kwargs.ray_init.address",
        "0 is not a port; 1-65535",
    ),
    (
        "ray_kwargs.ray_init.address=ray://head:123456",
        "ray_kwargs.ray_init.address",
        "123456 is not a port",
    ),
    (
        "agent.command=ls reward.overlong_buffer.enable=true",
        "reward.overlong_buffer.enable",
        "is for single turns",
    ),
    ('agent.command="\'"', "agent.command", "has an open quote"),
    ("agent.command=ls agent.preload=[openai]", "agent.preload", "agent.command=ls is neither"),
    ("max_turns=2 env.name=no.module:EnvFactory", "env.name", "was not found on the Python path"),
    (
        "algorithm.adv_estimator=pk/mine.py:centered",
        "algorithm.adv_estimator",
        "names a file, but must name a module; Write mine:centered",
    ),
    (f"{KL} {REF}url=gpu008:8001", f"{REF}url", "is not the http address of a service"),
    (f"{KL} {REF}url=http://a:80000", f"{REF}url", "80000 is not a port"),
    ("retriever.url=http://127.0.0.1:80000/retrieve", "retriever.url", "80000 is not a port"),
    ("reward.remote.url=[http://a:5000,b]", "reward.remote.url", "is not an http address"),
    # files
    ("data.train_files=null", "data.train_files", "must name at least one file"),
    ("data.train_files=", "data.train_files", "must name at least one file"),
    ("data.train_files=''", "data.train_files", "must name at least one file"),
    ("data.train_files=['']", "data.train_files", "must name at least one file"),
    ("data.val_files=['']", "data.val_files", "must name at least one file"),
    (
        "actor_rollout_ref.model.tokenizer_path=/nope",
        "actor_rollout_ref.model.tokenizer_path",
        "does not exist; on the hub",
    ),
    (
        "actor_rollout_ref.model.tokenizer_path={folder}",
        "actor_rollout_ref.model.tokenizer_path",
        "has no tokenizer; tokenizer.json",
    ),
    (
        "custom_reward_function.path={folder}/reward.py custom_reward_function.name=score "
        "custom_reward_function.reward_kwargs.zzz=1",
        "custom_reward_function.reward_kwargs.zzz",
        "score in; does not take this argument, and has no **kwargs",
    ),
    ("data.train_files=/nowhere/train.parquet", "data.train_files", "does not exist; / exists"),
    (
        "data.val_files=[{folder}/test.parquet,{folder}/no.parquet]",
        "data.val_files",
        "does not exist",
    ),
    ("data.val_files={folder}/model", "data.val_files", "is a folder, not a file"),
    ("data.train_files={folder}/odd", "data.train_files", "is a folder; Name its files: un"),
    (
        "data.train_files={folder}/t*.parquet",
        "data.train_files",
        "patterns are not expanded; test.parquet",
    ),
    (
        "actor_rollout_ref.model.path={folder}/reward.py",
        "actor_rollout_ref.model.path",
        "is a file, not a folder",
    ),
    (
        "actor_rollout_ref.model.tokenizer_path={folder}/reward.py",
        "actor_rollout_ref.model.tokenizer_path",
        "is a file, not a folder",
    ),
    (
        "actor_rollout_ref.model.lora_adapter_path={folder}/reward.py",
        "actor_rollout_ref.model.lora_adapter_path",
        "is a file, not a folder",
    ),
    (
        "custom_reward_function.path={folder}/model",
        "custom_reward_function.path",
        "is a folder, not a Python file",
    ),
    (
        "data.train_max_samples=100",
        "data.train_batch_size",
        "only 100 rows (data.train_max_samples=100)",
    ),
    ("critic.model.path={folder}/nowhere", "critic.model.path", "does not exist"),
    (
        "critic.model.fsdp_config.use_torch_compile=true "
        "critic.model.enable_gradient_checkpointing=attention",
        "critic.model.enable_gradient_checkpointing",
        "layers that critic.model.fsdp_config.use_torch_compile=true compiles cannot keep a part",
    ),
    (
        "critic.model.enable_gradient_checkpointing=null",
        "critic.model.enable_gradient_checkpointing",
        "expected true/false or text; Legal: true, false, attention, products",
    ),
]


def test_layers_that_are_not_compiled_keep_a_part(material) -> None:
    material.load(
        "actor_rollout_ref.model.enable_gradient_checkpointing=products",
        "critic.model.fsdp_config.use_torch_compile=true",
    )


def test_a_key_is_reported_once(material) -> None:
    """A row of the table says nothing of a key that an earlier row has reported."""
    typed = f"algorithm.adv_estimator=grpo_passk {ROLLOUT}n=1 algorithm.filter_groups.enable=true"
    with pytest.raises(ConfigError) as error:
        material.load(*typed.split(" "))
    keys = [problem.key for problem in error.value.problems]
    assert keys.count(f"{ROLLOUT}n") == 1


@pytest.mark.parametrize(("typed", "key", "words"), WRONG, ids=[typed for typed, _, _ in WRONG])
def test_invalid_command_line_is_reported(material, typed, key, words):
    with pytest.raises(ConfigError) as error:
        material.load(*typed.replace("{folder}", str(material.folder)).split(" "))
    (problem,) = error.value.problems
    assert problem.key == key
    for part in words.split("; "):
        assert part in str(problem)


def test_valid_command_line_has_no_notes(material):
    assert material.notes() == []


def test_an_address_needs_no_port(material):
    material.load("retriever.url=http://search/retrieve")
    material.load("reward.remote.url=[https://rm.example.com/get_reward,http://rm:5001]")


def test_gpu_check_is_skipped_for_existing_cluster(material, monkeypatch):
    """This machine has no GPU, but an existing cluster may have some."""
    with pytest.raises(ConfigError, match="has 0 visible GPUs"):
        material.load("trainer.device=cuda")
    material.load("trainer.device=cuda", "ray_kwargs.ray_init.address=auto")
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    material.load("trainer.device=cuda")


@pytest.mark.skipif(not installed("vllm"), reason="needs vllm")
@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("tensor_model_parallel_size=3", "must divide the 8 rollout devices; Legal: 1, 2, 4, 8"),
        (
            "tensor_model_parallel_size=8 trainer.n_gpus_per_node=4 trainer.nnodes=2",
            "would span two machines of 4; Legal: 1, 2, 4",
        ),
        (
            "tensor_model_parallel_size=2 cluster.component_placement={actor:[0-3,7],rollout:4-6}",
            "must divide the 3 rollout devices; Legal: 1, 3",
        ),
        (
            "tensor_model_parallel_size=2 trainer.n_gpus_per_node=3 trainer.nnodes=2 "
            "cluster.component_placement={actor:all,rollout:0-3}",
            "devices 2-3 would span two machines of 3; Legal: 1",
        ),
        (
            "tensor_model_parallel_size=8",
            "must divide the model's 4 attention heads; Nearest legal values: 4",
        ),
    ],
)
def test_tensor_parallel_size_must_fit_devices_and_model(material, typed, words):
    first, *rest = typed.split(" ")
    with pytest.raises(ConfigError) as error:
        material.load(f"{ROLLOUT}name=vllm", ROLLOUT + first, *rest)
    (problem,) = error.value.problems
    assert problem.key == f"{ROLLOUT}tensor_model_parallel_size"
    for part in words.split("; "):
        assert part in str(problem)


def problems(material, overrides):
    try:
        material.load(*overrides)
    except ConfigError as error:
        return error.problems
    return []


def test_vllm_has_no_kernels_for_some_heads_on_cpus(material):
    narrow = ["+actor_rollout_ref.model.override_config.head_dim=72", "trainer.device=cpu"]
    vllm = [f"{ROLLOUT}name=vllm", "+actor_rollout_ref.model.override_config.head_dim=64"]
    for works in (narrow, [*vllm, "trainer.device=cpu"]):
        assert not [p for p in problems(material, works) if p.key == f"{ROLLOUT}name"]
    found = [p for p in problems(material, [vllm[0], *narrow]) if p.rule.endswith("have 72")]
    assert [(p.key, p.remedy) for p in found] == [(f"{ROLLOUT}name", f"Use {ROLLOUT}name=hf.")]


@pytest.mark.skipif(installed("vllm"), reason="vllm is installed")
def test_vllm_must_be_installed(material):
    with pytest.raises(ConfigError) as error:
        material.load(f"{ROLLOUT}name=vllm")
    (problem,) = error.value.problems
    assert (problem.key, problem.rule) == (f"{ROLLOUT}name", "vLLM is not installed here")


@pytest.mark.skipif(not installed("vllm"), reason="needs vllm")
def test_longest_sequence_must_fit_unchunked_prefill(material):
    lines = (
        f"{ROLLOUT}name=vllm",
        f"{ROLLOUT}enable_chunked_prefill=false",
        f"{ROLLOUT}max_num_batched_tokens=1000",
    )
    with pytest.raises(ConfigError) as error:
        material.load(*lines)
    assert [p.key for p in error.value.problems] == [f"{ROLLOUT}max_num_batched_tokens"]
    material.load(*lines[:1], lines[2])
    with pytest.raises(ConfigError, match="is less than the longest sequence, 2000 tokens"):
        material.load(
            *lines[:2], f"{ROLLOUT}max_num_batched_tokens=1500", f"{ROLLOUT}max_model_len=2000"
        )


def test_empty_file_and_missing_columns_are_reported(material, tmp_path):
    empty = write_prompts(tmp_path / "empty.parquet", 0)
    unlabelled = write_prompts(
        tmp_path / "unlabelled.parquet", 2, data_source=None, reward_model=None
    )
    with pytest.raises(ConfigError) as error:
        material.load(
            f"data.train_files=[{material.folder}/train.parquet,{empty}]",
            f"data.val_files={unlabelled}",
        )
    assert [(p.key, p.value, p.rule) for p in error.value.problems] == [
        ("data.train_files", str(empty), "has no rows"),
        ("data.val_files", str(unlabelled), "has no column 'data_source'; it has prompt, ability"),
        ("data.val_files", str(unlabelled), "has no column 'reward_model'; it has prompt, ability"),
    ]


def test_unknown_data_source_is_reported(material, tmp_path):
    strange = write_prompts(tmp_path / "strange.parquet", 2, data_source="my/sums")
    with pytest.raises(ConfigError) as error:
        material.load(f"data.val_files={strange}")
    (problem,) = error.value.problems
    assert (problem.key, problem.value, problem.rule) == (
        "data.val_files",
        str(strange),
        "no built-in reward function for data source 'my/sums'",
    )
    assert "custom_reward_function.path" in problem.remedy and "openai/gsm8k" in problem.remedy
    for kind in (pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        table = pq.read_table(strange)
        pq.write_table(
            table.set_column(0, "data_source", pa.array(["my/sums"] * 2).cast(kind)),
            tmp_path / "other.parquet",
        )
        with pytest.raises(
            ConfigError, match="no built-in reward function for data source 'my/sums'"
        ):
            material.load(f"data.val_files={tmp_path}/other.parquet")
    own = [
        f"custom_reward_function.path={material.folder}/reward.py",
        "custom_reward_function.name=score",
    ]
    material.load(f"data.val_files={strange}", *own)
    for source in ("aime2024", "math_dapo_reasoning"):
        material.load(
            f"data.val_files={write_prompts(tmp_path / 'known.parquet', 2, data_source=source)}"
        )


@pytest.mark.parametrize("column", [{"style": "rule"}, "4"])
def test_reward_model_column_needs_ground_truth(material, tmp_path, column):
    bare = write_prompts(tmp_path / "bare.parquet", 2, reward_model=column)
    with pytest.raises(ConfigError) as error:
        material.load(f"data.val_files={bare}")
    (problem,) = error.value.problems
    assert (problem.key, problem.value) == ("data.val_files", str(bare))
    assert (
        "column 'reward_model' has type s" in problem.rule
        and "expected {style, ground_truth}" in problem.rule
    )


def test_parquet_file_may_have_any_name(material, tmp_path):
    material.load(f"data.val_files={write_prompts(tmp_path / 'part-00000', 2)}")


def test_model_folder_needs_tokenizer_unless_path_is_set(material, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((material.folder / "model" / name).read_bytes())
    with pytest.raises(ConfigError) as error:
        material.load(f"actor_rollout_ref.model.path={tmp_path}")
    (problem,) = error.value.problems
    assert (problem.key, problem.value) == ("actor_rollout_ref.model.path", str(tmp_path))
    assert (
        "has no tokenizer" in problem.rule
        and "actor_rollout_ref.model.tokenizer_path" in problem.remedy
    )
    for elsewhere in (material.folder / "model", "Qwen/Qwen2.5-0.5B"):
        material.load(
            f"actor_rollout_ref.model.path={tmp_path}",
            f"actor_rollout_ref.model.tokenizer_path={elsewhere}",
        )
    (tmp_path / "vocab.json").touch()
    material.load(f"actor_rollout_ref.model.path={tmp_path}")


def test_reward_kwargs_fit_reward_function(material, tmp_path):
    file = tmp_path / "reward.py"
    kwargs = [f"custom_reward_function.path={file}", "custom_reward_function.reward_kwargs.bonus=1"]
    for parameters in (
        "**row",
        "data_source, solution_str, ground_truth, extra_info, bonus",
        "data_source, *, bonus=0",
    ):
        file.write_text(f"def compute_score({parameters}): pass\n")
        material.load(*kwargs)


def test_unreadable_model_config_is_reported(material, tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json cannot be read"):
        material.load(f"actor_rollout_ref.model.path={tmp_path}")


def test_weights_in_several_files_are_all_there(material):
    def told(name: str) -> str:
        try:
            material.load(f"actor_rollout_ref.model.path={material.folder}/odd/{name}")
        except ConfigError as error:
            return str(error)
        return ""

    assert "is missing" not in told("left")
    assert "gone.bin is missing, and its pytorch_model.bin.index.json names it" in told("bins")


def test_rope_scaling_extends_context(material, tmp_path):
    described = json.loads((material.folder / "model" / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(NO_WEIGHTS)
    (tmp_path / "tokenizer.json").touch()
    (tmp_path / "config.json").write_text(
        json.dumps(described | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    )
    material.load(f"actor_rollout_ref.model.path={tmp_path}", "data.max_prompt_length=8000")
    material.load(
        "data.max_prompt_length=8000",
        "actor_rollout_ref.model.override_config.max_position_embeddings=16384",
    )


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_embeddings_that_depend_on_the_longest_sequence_limit_the_length(material, tmp_path, kind):
    described = json.loads((material.folder / "model" / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(NO_WEIGHTS)
    (tmp_path / "tokenizer.json").touch()
    rope = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps(described | {"rope_scaling": rope}))
    model = f"actor_rollout_ref.model.path={tmp_path}"
    material.load(model)
    longer = "actor_rollout_ref.rollout.max_model_len=9000"
    for more, key in (
        (("data.max_prompt_length=8000",), "data.max_response_length"),
        ((longer,), "actor_rollout_ref.rollout.max_model_len"),
    ):
        with pytest.raises(ConfigError, match=f"{key}=.*rope_type={kind}.* to 8192") as error:
            material.load(model, *more)
        assert len(error.value.problems) == 1
    critic = ("algorithm.adv_estimator=gae", f"critic.model.path={tmp_path}")
    with pytest.raises(ConfigError, match=f"rope_type={kind}.* to 8192"):
        material.load(*critic, "critic.ppo_micro_batch_size_per_gpu=1", longer)


def test_hub_model_needs_no_folder(material):
    material.load("actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct", "critic.model.path=gpt2")


@pytest.mark.parametrize(
    ("source", "key", "words"),
    [
        ("def other(): pass\n", "name", "does not define it. It defines other"),
        ("x = 1\n", "name", "It defines no function"),
        ("def compute_score(:\n", "path", "is not valid Python"),
    ],
)
def test_reward_file_is_checked_without_running_it(material, tmp_path, source, key, words):
    file = tmp_path / "reward.py"
    file.write_text(source + "raise SystemExit('this file was run')\n")
    with pytest.raises(ConfigError) as error:
        material.load(f"custom_reward_function.path={file}")
    (problem,) = error.value.problems
    assert problem.key == f"custom_reward_function.{key}"
    assert words in str(problem)


@pytest.mark.parametrize(
    "source",
    [
        "async def compute_score(**k): pass",
        "from x import compute_score",
        "compute_score = print",
        "from x import *",
    ],
)
def test_reward_function_may_be_imported_or_assigned(material, tmp_path, source):
    file = tmp_path / "reward.py"
    file.write_text(source)
    material.load(f"custom_reward_function.path={file}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_run_directory_is_reported(material, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="is not writable"):
        material.load(f"trainer.default_local_dir={tmp_path}/run")


def test_own_function_must_exist(material, tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "module.py").write_text(
        "raise SystemExit('is not imported')\ndef estimator(inputs): ...\n"
    )
    (tmp_path / "my_loss.py").write_text("from somewhere import f\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    material.load(
        "algorithm.adv_estimator=own.module:estimator", f"{ACTOR}policy_loss.loss_mode=my_loss:f"
    )
    wrong = {
        "broken:f": "broken is not valid Python: invalid syntax",
        "own.modul:estimator": "module own.modul was not found",
        "own.module:f": "own.module does not define f. It defines estimator",
    }
    for name, message in wrong.items():
        with pytest.raises(ConfigError, match=message):
            material.load(f"algorithm.adv_estimator={name}")


def test_an_own_engine_tells_the_tokens_of_running_requests(material, tmp_path, monkeypatch):
    """Else a run with trainer.mode=async or pipelined would end with its first checkpoint."""
    (tmp_path / "my_engines.py").write_text(
        "class Old:\n    def step(self): ...\n"
        "class Counts:\n    def progress(self): ...\n"
        "class New:\n    def progress(self): ...\n    def so_far(self): ...\n"
        "class Refuses:\n    def progress(self): ...\n    def so_far(self): ...\n"
        "    def add(self, request_id, prompt_ids, sampling): ...\n"
        "class Goes:\n    def progress(self): ...\n    def so_far(self): ...\n"
        "    def add(self, request_id, prompt_ids, sampling, so_far=None): ...\n"
        "class Heir(Old): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    run = ["trainer.mode=async", "async_training.max_age=0", "trainer.device=cpu"]
    for name in ("New", "Heir", "Goes"):
        material.load(*run, f"{ROLLOUT}name=my_engines:{name}")
    material.load(f"{ROLLOUT}name=my_engines:Old")
    for name, missing in (
        ("Old", "no method progress and no method so_far"),
        ("Counts", "no method so_far"),
        ("Refuses", "an add without the argument so_far"),
    ):
        with pytest.raises(ConfigError, match=f"my_engines:{name}: .*{name} has {missing}"):
            material.load(*run, f"{ROLLOUT}name=my_engines:{name}")


def test_own_engines_and_trackers_are_legal_names(material, tmp_path, monkeypatch):
    (tmp_path / "my_classes.py").write_text("class Core: ...\nclass Tracker: ...\n")
    monkeypatch.chdir(tmp_path)
    loaded = material.load(
        f"{ROLLOUT}name=my_classes:Core", "trainer.logger=[console,my_classes:Tracker]"
    )
    assert make_plan(loaded.config).rollout_name == "my_classes:Core"
    for setting in (
        f"{ROLLOUT}name=my_classes:Missing",
        "trainer.logger=[console,my_classes:Missing]",
    ):
        with pytest.raises(ConfigError, match="my_classes does not define Missing"):
            material.load(setting)


def test_reward_function_by_module_name(material):
    material.load("custom_reward_function.path=verlite.rewards.gsm8k")
    with pytest.raises(ConfigError, match="does not exist. Give a Python file, or a module"):
        material.load("custom_reward_function.path=verlite.rewards.gsm9k")


@pytest.mark.parametrize(
    "settings",
    [
        f"{ACTOR}policy_loss.loss_mode=cispo {ACTOR}clip_ratio_low=10 {ACTOR}clip_ratio_high=0.2",
        f"{ACTOR}policy_loss.loss_mode=cispo {ACTOR}clip_ratio_low=1 {ACTOR}clip_ratio_high=4",
        "algorithm.filter_groups.metric=null",
    ],
)
def test_unusual_settings_are_legal(material, settings):
    material.load(*settings.split())


@pytest.mark.parametrize("name", catalog.ESTIMATORS)
def test_trainer_provides_inputs_of_every_estimator(material, name):
    more = ["algorithm.gdpo_reward_keys=[a,b]"] if name == "gdpo" else []
    loaded = material.load(f"algorithm.adv_estimator={name}", f"{ROLLOUT}n=2", *more)
    plan = make_plan(loaded.config)
    batch = generated_batch(
        [[5]] * 4, ["a", "a", "b", "b"], [([6, 7, 8], [1] * 3, [-0.5] * 3, "done")] * 4
    ).with_batch(scores=torch.rand(4))
    measured = {
        "values": "values" in catalog.estimator(name).measured,
        "sum_pi_squared": plan.needs_sum_pi_squared,
        "old_log_probs": plan.needs_old_log_probs,
    }
    batch = batch.with_non_tensor(
        **{column: list(-torch.rand(4, 3).numpy()) for column, wanted in measured.items() if wanted}
    )
    if plan.needs_greedy_baseline:
        batch = batch.with_batch(reward_baselines=torch.rand(4))
    if name == "gdpo":
        batch = batch.with_batch(gdpo_rewards=torch.rand(4, 2).double())
    run = fake_run(config=loaded.config, plan=plan)
    batch = advantage.advantages(run, advantage.loss_mask(run, batch))
    result = fetch_padded(batch, "loss_mask", "advantages")["advantages"]
    assert result.shape == (4, 3) and result.isfinite().all() and result.any()


@pytest.mark.parametrize("name", catalog.POLICY_LOSSES)
def test_trainer_provides_inputs_of_every_policy_loss(material, name):
    config = material.load(f"{ACTOR}policy_loss.loss_mode={name}").config
    mask = torch.ones(2, 3, dtype=torch.int64)
    log_probs = torch.full((2, 3), -1.0, requires_grad=True)
    rows = TensorDict(
        {
            "response_mask": mask,
            "old_log_probs": log_probs.detach() - 0.1,
            "advantages": torch.ones(2, 3),
        },
        [2],
    )
    counts = Counts(tokens=6, sequences=2)
    loss, _ = policy_objective(policy_loss_spec(config, make_plan(config)))(
        rows, {"log_probs": log_probs}, counts
    )
    loss.backward()
    assert loss.isfinite() and log_probs.grad.isfinite().all() and log_probs.grad.any()


def test_every_number_has_a_bound():
    numeric = {key.name for key in PPO.keys.values() if "number" in key.type}
    thresholds = {
        f"{CORRECTION}rollout_is_threshold",
        f"{CORRECTION}rollout_rs_threshold",
    }  # rules/algorithm.py checks these
    assert {name for name in numeric if not PPO.keys[name].facts.bound} == thresholds


def outside(config, key, value):
    """Return what is reported of a key with another value."""
    parent, _, last = key.name.rpartition(".")
    section = get(config, parent) if parent else config
    before = getattr(section, last)
    setattr(section, last, [value] if isinstance(before, list) else value)
    reports = declared.names if isinstance(value, str) else declared.numbers
    found = list(reports(config, {key.name: key}))
    setattr(section, last, before)
    return found


def test_every_bound_is_enforced(material):
    """At, below and above each number of the bound, as Python reads the bound."""
    config = material.load().config
    for key in PPO.keys.values():
        bound = key.facts.bound
        if not bound:
            continue
        ends = [float(end) for end in re.findall(r"-?[\d.]+", bound)]
        rule = re.sub(r"(^|and |or )(?=-?\d)", r"\1== ", bound)
        rule = re.sub(r"[=<>]=|[<>]", r"x \g<0>", rule)
        for x in [
            math.nan,
            math.inf,
            *(end + by for end in ends for by in (-1, -1e-6, 0, 1e-6, 1)),
        ]:
            legal = math.isfinite(x) and (bound == "finite" or eval(rule))
            found = outside(config, key, x)
            assert bool(found) is not legal, (key.name, bound, x)
            if found:
                (problem,) = found
                said = (
                    bound if math.isfinite(x) or bound == "finite" else f"a finite number, {bound}"
                )
                assert problem.key == key.name and f"must be {said}." in str(problem)
                assert key.facts.remedy in str(problem)


def test_every_list_of_names_is_enforced(material):
    config = material.load().config
    for key in PPO.keys.values():
        if not key.facts.choices:
            continue
        for name in key.facts.choices:
            assert outside(config, key, name) == [], key.name
        for name in ("zzz", f"{key.facts.choices[0]}_", *key.facts.hints):
            (problem,) = outside(config, key, name)
            assert problem.key == key.name and "is not a legal name" in str(problem)
            assert key.legal_names() in str(problem)
            assert key.facts.hints.get(name, "") in str(problem)


def test_every_condition_names_existing_keys():
    known = PPO.keys
    used = set()
    for key in known.values():
        for condition in key.conditions:
            comparison = declared.COMPARISON.fullmatch(condition.text)
            reads = declared.READS.fullmatch(condition.text)
            used.add(condition.text)
            assert not comparison or comparison[1] in known
            assert not reads or reads[2] in FIELDS_READ
            assert comparison or reads or condition.text in declared.PREDICATES
    assert set(declared.PREDICATES) <= used


FIELDS_READ = {
    field
    for entry in (*catalog.ESTIMATORS.values(), *catalog.POLICY_LOSSES.values())
    for field in entry.reads
}


@pytest.mark.parametrize("sets", [(), ("critic.enable=true",)])
def test_every_condition_can_be_evaluated(material, sets):
    context = Context(material.load(*sets).config)
    for key in PPO.keys.values():
        for condition in key.conditions:
            assert declared.holds(condition.text, context) in (True, False)
            assert declared.words(condition.text).startswith(("with ", "when "))


def test_nearest_divisors():
    assert nearest_divisors(1024, 300) == [256, 512]
    assert nearest_divisors(7, 3) == [1, 7]
    assert nearest_divisors(8, 1) == [2]


def test_suggestions_prefer_same_last_part():
    known = ["a.optim.lr", "b.optim.lr", "a.lr_warmup", "c.unrelated"]
    assert nearest("a.lr", known)[0] == "a.optim.lr"
    assert nearest("zzz", known) == []


@pytest.mark.parametrize(
    "key",
    """
    hf_token reward_kwargs.api_key AWS_SECRET_ACCESS_KEY apiKey key password client_secret
    auth_tokens wandb_api_key credentials serper_key openai_key hf_tokens access_key_id
    Authorization pwd DB_PASS REDIS_AUTH GITHUB_PAT OPENAI_API_KEY_2 TOKEN2 env.kwargs.token-3
    DBPASS PGPASS X_API_KEY_PROD SECRET_KEY_BASE apiKeyProd HF_TOKEN_STAGING DJANGO_SECRET_OLD
    PASS_FOR_DB reward_kwargs.judge_api_key_backup OPENAI_API_KEYS_EU ADMIN_PASSWORD_V2
    API_KEY_VALUE
    """.split(),
)
def test_secrets_are_masked(key):
    assert is_secret(key, "abc") and display(key, "abc") == "***"


def test_numbers_are_masked_only_under_the_name_of_a_password():
    assert display("env.kwargs.password", 12345) == "***"
    assert display("env.kwargs.max_tokens", 512) == "512"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://me:hunter2@host/retrieve", "http://me:***@host/retrieve"),
        ("http://hunter2@host/retrieve", "http://***@host/retrieve"),
        ("https://host/?a=1&access_token=hunter2&b=2", "https://host/?a=1&access_token=***&b=2"),
        ("https://host/?sig=hunter2", "https://host/?sig=***"),
        ("https://host/?api-key=hunter2&b=2", "https://host/?api-key=***&b=2"),
        ("https://host/?X-Amz-Signature=hunter2", "https://host/?X-Amz-Signature=***"),
        ("https://host/?X-Amz-Credential=hunter2/a", "https://host/?X-Amz-Credential=***"),
        ("https://host/#access_token=hunter2", "https://host/#access_token=***"),
        (
            "https://host/?monkey=1&author=2&page_size=3",
            "https://host/?monkey=1&author=2&page_size=3",
        ),
        ("http://host:8000/retrieve", "http://host:8000/retrieve"),
    ],
)
def test_secrets_in_urls_are_masked(url, shown):
    assert display("retriever.url", url, known=True) == shown


@pytest.mark.parametrize(
    "key",
    """
    data.image_key gdpo_reward_keys teacher_key data.prompt_key reward_fn_key max_tokens
    pad_token stop_token monkey PATH author bypass compass_2 image_key_2 tokenizer
    tokenizer_name TOKENIZERS_PARALLELISM keyboard KEYCLOAK_URL key_dim num_key_value_heads
    passes passenger_name forward_pass pass_at_k token_ids tokens_per_step token_level_scores
    SSH_AUTH_SOCK PWD OLDPWD secretary token_env
    """.split(),
)
def test_column_and_token_names_are_not_masked(key):
    assert not is_secret(key, "images") and display(key, "images") == "images"


def test_value_of_unknown_key_is_shown(material):
    with pytest.raises(ConfigError, match=r"data\.image_key=pictures"):
        material.load("data.image_key=pictures")


def test_a_tracker_needs_its_package(material, monkeypatch):
    installed_here = plan.installed
    monkeypatch.setattr(plan, "installed", lambda name: name != "trackio" and installed_here(name))
    with pytest.raises(ConfigError, match="trackio is not installed here") as raised:
        material.load("trainer.logger=[console,trackio]")
    assert "pip install trackio" in str(raised.value)
