"""Published command lines are valid. Each renamed or ineffective key has exactly one note."""

import re
import shlex
from pathlib import Path

import pytest

from tests.config.conftest import texts
from verlite.config import compose, make_plan
from verlite.config.plan import installed

GUIDES = Path(__file__).parents[1] / "samples" / "guides"
COMMANDS = {"search_r1": ("002", 0), "dstack": ("003", 0), "slurm": ("003", 1)}
"""Name of a training command -> its guide, and its number there."""
needs_vllm = pytest.mark.skipif(not installed("vllm"), reason="the command names rollout.name=vllm")


def arguments(name: str, material, nodes: int = 1, devices: int = 2) -> list[str]:
    """Return the overrides of a guide's training command as a shell passes them.

    Only paths and numbers of devices are changed.
    """
    guide, number = COMMANDS[name]
    text = (GUIDES / f"{guide}.sh").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if "data.train_files" in line]
    line = lines[number].split("verl.trainer.main_ppo")[1].split("2>&1")[0]
    variables = {
        "WAND_PROJECT": "Search-R1-release",
        # The script does not set its variables, so the shell leaves this text.
        "EXPERIMENT_NAME": "--search-r1-ppo-qwen2.5-7b-em-multinode-2",
    }
    line = re.sub(r"\$\{?(\w+)\}?", lambda match: variables.get(match[1], "here"), line)
    changed = {
        "data.train_files": material.folder / "train.parquet",
        "data.val_files": material.folder / "test.parquet",
        "actor_rollout_ref.model.path": material.folder / "model",
        "critic.model.path": material.folder / "model",
        "trainer.default_local_dir": material.folder / "run",
        "trainer.nnodes": nodes,
        "trainer.n_gpus_per_node": devices,
    }
    pairs = [word.split("=", 1) for word in shlex.split(line)]
    return [f"{key}={changed.get(key.lstrip('+'), value)}" for key, value in pairs]


NO_KL = (
    "algorithm.kl_ctrl.kl_coef has no effect: used only with algorithm.use_kl_in_reward=true "
    "(older verl and "
    "Search-R1 subtract this penalty unless actor.use_kl_loss is on, and so does --config-name "
    "search_r1; the KL in the loss has its own coefficient, actor.kl_loss_coef)"
)
NO_REFERENCE = "used only when a KL term is on (algorithm.use_kl_in_reward or actor.use_kl_loss)"
ON_CPU = (
    "actor_rollout_ref.rollout.gpu_memory_utilization has no effect: used only when the run is on "
    "GPUs "
    "(on CPUs rollout.kv_cache_gb sets the size of vLLM's cache)"
)


@needs_vllm
def test_search_r1(material):
    loaded = compose(None, arguments("search_r1", material))
    actor, rollout = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
    assert texts(loaded) == [
        "data.train_data_num is now called data.train_max_samples",
        "data.val_data_num is now called data.val_max_samples",
        "data.shuffle_train_dataloader is now called data.shuffle",
        f"{rollout}n_agent is now called {rollout}n",
        f"{actor}ppo_micro_batch_size counts all devices; 64 / 2 devices gives "
        f"{actor}ppo_micro_batch_size_per_gpu=32",
        f"{rollout}log_prob_micro_batch_size counts all devices; 128 / 2 devices gives "
        f"{rollout}log_prob_micro_batch_size_per_gpu=64",
        "critic.ppo_micro_batch_size counts all devices; 16 / 2 devices gives "
        "critic.ppo_micro_batch_size_per_gpu=8",
        f"{actor}fsdp_config.grad_offload, critic.model.fsdp_config.grad_offload have no effect: "
        "FSDP2 frees gradients after each update",
        "actor_rollout_ref.ref.fsdp_config.param_offload, "
        "actor_rollout_ref.ref.log_prob_micro_batch_size have no effect: " + NO_REFERENCE,
        ON_CPU,
        NO_KL,
        "samples may not fit: search, up to 4 tool calls and a last turn; at most 2048 prompt + 4 "
        "x (500 turn + 500 observation) + 500 = "
        "6548 tokens, but 4596 fit (data.max_prompt_length + data.max_response_length): a sample "
        "that gets there ends, status length",
    ]
    plan = make_plan(loaded.config)
    assert (plan.max_turns, plan.longest_prompt, plan.longest_sequence, plan.max_model_len) == (
        4,
        2048,
        4596,
        4596,
    )
    assert loaded.config.trainer.experiment_name == "--search-r1-ppo-qwen2.5-7b-em-multinode-2"
    assert (
        loaded.config.data.train_max_samples,
        loaded.config.data.shuffle,
        loaded.config.trainer.val_before_train,
    ) == (-1, True, False)
    # 332 steps per epoch, so 15 epochs are longer; this file has 2048 rows: 4 steps per epoch.
    assert (plan.steps(170_000), plan.total_steps) == ((332, 1005), 60)


TRAIN_GRPO = [
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.rollout.n_agent=5",
]
"""What Search-R1's train_grpo.sh sets other than its train_ppo.sh."""


@needs_vllm
@pytest.mark.parametrize(
    ("more", "in_reward", "in_loss", "roles"),
    [
        ([], True, False, ("actor", "rollout", "critic", "ref")),
        (TRAIN_GRPO, False, True, ("actor", "rollout", "ref")),
    ],
)
def test_search_r1_has_search_r1s_objective(material, more, in_reward, in_loss, roles):
    """Search-R1 subtracts the KL from the reward unless actor.use_kl_loss (its ray_trainer.py)."""
    command = arguments("search_r1", material)
    loaded = compose("search_r1", [word for word in command if "n_agent" not in word] + more)
    algorithm, actor = loaded.config.algorithm, loaded.config.actor_rollout_ref.actor
    assert (algorithm.use_kl_in_reward, actor.use_kl_loss) == (in_reward, in_loss)
    assert (algorithm.kl_ctrl.kl_coef, actor.kl_loss_coef, actor.entropy_coeff) == (0.001,) * 3
    assert (algorithm.kl_penalty, actor.kl_loss_type) == ("kl", "low_var_kl")
    assert set(make_plan(loaded.config).roles) == set(roles)
    assert not [note for note in texts(loaded) if "counts twice" in note]
    assert [note for note in texts(loaded) if "kl_ctrl.kl_coef has no effect" in note] == (
        [] if in_reward else [NO_KL]
    )


@needs_vllm
@pytest.mark.parametrize(("name", "micro"), [("search_r1", 4), ("dstack", 4), ("slurm", 8)])
def test_sixteen_devices_as_in_the_guides(material, name, micro):
    plan = make_plan(compose(None, arguments(name, material, nodes=2, devices=8)).config)
    assert plan.n_devices == 16
    assert plan.actor.micro.size == micro
    if name == "search_r1":
        assert (plan.log_prob_micro.size, plan.critic.micro.size) == (8, 1)


def test_dstack(material):
    loaded = compose(None, arguments("dstack", material))
    unused = (
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu has no effect: " + NO_REFERENCE
    )
    if installed("vllm"):
        assert texts(loaded) == [
            unused,
            ON_CPU,
            NO_KL,
            "actor_rollout_ref.rollout.name=auto chose vllm",
        ]
    else:
        assert texts(loaded) == [
            unused,
            ON_CPU,
            "actor_rollout_ref.rollout.tensor_model_parallel_size has no effect: "
            "used only when the rollout engine is vllm",
            NO_KL,
            "actor_rollout_ref.rollout.name=auto chose hf: vLLM is not installed here",
        ]


@needs_vllm
def test_slurm(material):
    loaded = compose(None, arguments("slurm", material))
    assert texts(loaded) == [
        "actor_rollout_ref.model.enable_gradient_checkpointing is given 2 times (command line): "
        "false, true; the last one is used",
        "actor_rollout_ref.ref.fsdp_config.param_offload, "
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu have no effect: " + NO_REFERENCE,
        ON_CPU,
        NO_KL,
    ]
    assert loaded.config.actor_rollout_ref.model.enable_gradient_checkpointing is True


@pytest.mark.parametrize("name", ["search_r1", "dstack", "slurm"])
@needs_vllm
def test_each_key_has_one_note(name, material):
    notes = texts(compose(None, arguments(name, material)))
    noted = [key for note in notes for key in re.match(r"(?:[\w.]+, )*[\w.]+", note)[0].split(", ")]
    assert len(noted) == len(set(noted))


def test_typical_verl_grpo_command(material):
    """A quoted logger list, KL in the loss, and `+` before an existing key give one note only."""
    line = [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={material.folder}/train.parquet",
        f"data.val_files={material.folder}/test.parquet",
        "data.train_batch_size=1024",
        "data.filter_overlong_prompts=True",
        "data.truncation='error'",
        f"actor_rollout_ref.model.path={material.folder}/model",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=80",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_coef=0.001",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=5",
        "actor_rollout_ref.ref.fsdp_config.param_offload=True",
        "algorithm.use_kl_in_reward=False",
        "trainer.critic_warmup=0",
        'trainer.logger=["console","wandb"]',
        "+trainer.val_before_train=True",
        f"trainer.default_local_dir={material.folder}/run",
    ]
    loaded = compose(None, line)
    assert texts(loaded) == [
        "data.truncation has no effect: used only with data.filter_overlong_prompts=false "
        "(filter_overlong_prompts drops these prompts)"
    ]
    assert loaded.config.trainer.logger == ["console", "wandb"]
    assert make_plan(loaded.config).roles == ("actor", "rollout", "ref")
