"""Published command lines are valid. Each renamed or ineffective key has exactly one note."""

import re
import shlex
from pathlib import Path

import pytest

from verlite.config import compose, make_plan
from verlite.config.plan import installed

COMMANDS = Path(__file__).parent / "commands"
needs_vllm = pytest.mark.skipif(not installed("vllm"), reason="the command names rollout.name=vllm")


def arguments(name: str, material, nodes: int = 1, devices: int = 2) -> list[str]:
    """Return the overrides of a command file as a shell passes them."""
    values = {
        "DATA_DIR": material.folder,
        "BASE_MODEL": material.folder / "model",
        "RUN_DIR": material.folder / "run",
        "N_NODES": nodes,
        "N_DEVICES": devices,
        "WAND_PROJECT": "Search-R1-release",
        # The script does not set its variables, so the shell leaves this text.
        "EXPERIMENT_NAME": "--search-r1-ppo-qwen2.5-7b-em-multinode-2",
    }
    text = re.sub(r"\$(\w+)", lambda match: str(values[match[1]]), (COMMANDS / name).read_text())
    return shlex.split(text.replace("\\\n", " "))[3:]


NO_KL = (
    "algorithm.kl_ctrl.kl_coef has no effect: used only with algorithm.use_kl_in_reward=true "
    "(older verl and "
    "Search-R1 always subtract this penalty; the KL in the loss has its own coefficient, "
    "actor.kl_loss_coef)"
)
NO_REFERENCE = "used only when a KL term is on (algorithm.use_kl_in_reward or actor.use_kl_loss)"
ON_CPU = (
    "actor_rollout_ref.rollout.gpu_memory_utilization has no effect: used only when the run is on "
    "GPUs "
    "(on CPUs rollout.kv_cache_gb sets the size of vLLM's cache)"
)


@needs_vllm
def test_search_r1(material):
    loaded = compose(None, arguments("search_r1.sh", material))
    actor, rollout = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
    assert loaded.notes == [
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
        "trainer.total_epochs has no effect: used only with trainer.total_training_steps=null",
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
    assert make_plan(loaded.config).total_steps == 1005


@needs_vllm
def test_search_r1_on_sixteen_devices(material):
    loaded = compose(None, arguments("search_r1.sh", material, nodes=2, devices=8))
    plan = make_plan(loaded.config)
    assert (plan.actor.micro.size, plan.log_prob_micro.size, plan.critic.micro.size) == (4, 8, 1)


def test_dstack(material):
    loaded = compose(None, arguments("dstack.sh", material))
    unused = (
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu has no effect: " + NO_REFERENCE
    )
    if installed("vllm"):
        assert loaded.notes == [
            unused,
            ON_CPU,
            NO_KL,
            "actor_rollout_ref.rollout.name=auto chose vllm",
        ]
    else:
        assert loaded.notes == [
            unused,
            ON_CPU,
            "actor_rollout_ref.rollout.tensor_model_parallel_size has no effect: "
            "used only when the rollout engine is vllm",
            NO_KL,
            "actor_rollout_ref.rollout.name=auto chose hf: vLLM is not installed here",
        ]


@needs_vllm
def test_slurm(material):
    loaded = compose(None, arguments("slurm.sh", material))
    assert loaded.notes == [
        "actor_rollout_ref.model.enable_gradient_checkpointing is given 2 times (command line): "
        "false, true; the last one is used",
        "actor_rollout_ref.ref.fsdp_config.param_offload, "
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu have no effect: " + NO_REFERENCE,
        ON_CPU,
        NO_KL,
    ]
    assert loaded.config.actor_rollout_ref.model.enable_gradient_checkpointing is True


@pytest.mark.parametrize("name", ["search_r1.sh", "dstack.sh", "slurm.sh"])
@needs_vllm
def test_each_key_has_one_note(name, material):
    notes = compose(None, arguments(name, material)).notes
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
    assert loaded.notes == [
        "data.truncation has no effect: used only with data.filter_overlong_prompts=false "
        "(filter_overlong_prompts drops these prompts)"
    ]
    assert loaded.config.trainer.logger == ["console", "wandb"]
    assert make_plan(loaded.config).roles == ("actor", "rollout", "ref")
