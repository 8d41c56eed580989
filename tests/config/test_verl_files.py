"""Copies of verl's own YAML files, given with --config-path, mean what they mean in verl.

The trees here are small ones of our own with the structure and the keys of verl's.
"""

import pytest
import yaml

from tests.config.conftest import texts
from verlite.config import compose
from verlite.config.commands import SFT
from verlite.config.problems import ConfigError

ENGINE = {
    "_target_": "verl.workers.config.FSDPEngineConfig",
    "wrap_policy": {"min_num_params": 0},
    "param_offload": False,
    "model_dtype": "fp32",
    "dtype": "bfloat16",
    "use_torch_compile": True,
    "forward_only": False,
    "ulysses_sequence_parallel_size": 1,
    "strategy": "fsdp",
    "qat": {"enable": False, "mode": "w4a16"},
}
NEWEST = {
    "ppo_trainer": {
        "defaults": [
            {"actor@actor_rollout_ref.actor": "dp_actor"},
            {"data@data": "legacy_data"},
            {"critic@critic": "dp_critic"},
            "_self_",
        ],
        "actor_rollout_ref": {
            "model": {
                "path": "~/models/deepseek-llm-7b-chat",
                "lora_rank": 0,
                "lora_alpha": 16,
                "target_modules": "all-linear",
                "lora": {
                    "rank": 0,
                    "alpha": 32,
                    "merge": False,
                    "target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
                },
            },
            "rollout": {
                "name": "???",
                "prompt_length": "${oc.select:data.max_prompt_length,512}",
                "response_length": "${oc.select:data.max_response_length,512}",
                "log_prob_micro_batch_size": None,
                "engine_kwargs": {"vllm": {}, "sglang": {}, "trtllm": {}},
                "multi_turn": {"enable": False, "max_assistant_turns": None},
            },
        },
        "algorithm": {"adv_estimator": "gae", "gamma": 1.0},
        "reward": {"custom_reward_function": {"path": None, "name": "compute_score"}},
        "custom_reward_function": {"path": None, "name": None},
        "distillation": {"enabled": False},
        "trainer": {"total_epochs": 30, "use_v1": True},
    },
    "actor/actor": {"strategy": "???", "ppo_mini_batch_size": 256, "clip_ratio": 0.2},
    "actor/dp_actor": {
        "defaults": [{"../engine@fsdp_config": "fsdp"}, "actor", "_self_"],
        "use_torch_compile": True,
        "grad_clip": 1.0,
    },
    "critic/dp_critic": {
        "defaults": [{"../engine@fsdp": "fsdp"}, "_self_"],
        "strategy": "???",
        "ppo_micro_batch_size": None,
        "forward_micro_batch_size": "${oc.select:.ppo_micro_batch_size,null}",
        "optim": {"lr": 1e-5},
    },
    "data/legacy_data": {"train_batch_size": 1024, "seed": None, "use_shm": False},
    "engine/fsdp": ENGINE,
}
OLDER = {
    "ppo_trainer": {
        "defaults": [{"critic@critic": "dp_critic"}, {"reward_model@reward_model": "rm"}, "_self_"],
        "data": {"train_batch_size": 1024, "max_prompt_length": 512},
        "actor_rollout_ref": {
            "hybrid_engine": True,
            "actor": {"strategy": "???", "optim": {"warmup_style": "constant"}},
            "rollout": {"prompt_length": "${oc.select:data.max_prompt_length,512}"},
        },
        "custom_reward_function": {"path": None, "name": "compute_score"},
        "ray_init": {"num_cpus": None, "timeline_json_file": None},
    },
    "critic/dp_critic": {
        "optim": {"lr": 1e-5, "min_lr_ratio": None, "warmup_style": "constant"},
        "model": {"fsdp_config": {"wrap_policy": {"min_num_params": 0}, "fsdp_size": -1}},
        "forward_micro_batch_size": "${oc.select:.ppo_micro_batch_size,null}",
    },
    "reward_model/rm": {
        "enable": False,
        "reward_manager": "naive",
        "sandbox_fusion": {"url": None},
    },
}


@pytest.fixture
def folder(tmp_path):
    def write(files, change=None):
        for name, content in {**files, **(change or {})}.items():
            path = tmp_path / f"{name}.yaml"
            path.parent.mkdir(exist_ok=True)
            path.write_text(yaml.safe_dump(content, sort_keys=False))
        return tmp_path

    return write


@pytest.mark.parametrize("files", [NEWEST, OLDER], ids=["newest", "older"])
def test_verls_files_are_a_configuration(folder, material, files):
    """Every default of verl that is repeated there leaves a run as it is without the files."""
    loaded = material.load(config_name="ppo_trainer", config_dir=folder(files))
    (note,) = [text for text in texts(loaded) if text not in material.notes()]
    assert "verl's at verl's defaults" in note
    assert loaded.user_keys == material.load().user_keys
    mine, own = loaded.config, material.load().config
    assert mine.trainer.total_epochs in (30, None)
    if files is NEWEST:  # what HEAD's files give and verlite's defaults do not
        own.trainer.total_epochs = 30
        for engine in (own.actor_rollout_ref.actor.fsdp_config, own.critic.model.fsdp_config):
            engine.dtype = "bfloat16"  # and use_torch_compile stays off: verl's is for the entropy
        own.actor_rollout_ref.rollout.engine_kwargs = {"vllm": {}, "sglang": {}, "trtllm": {}}
    assert mine == own


def test_changes_of_verls_files_count(folder, material):
    model = NEWEST["ppo_trainer"]["actor_rollout_ref"]["model"]
    actor = {**NEWEST["actor/dp_actor"], "grad_clip": 0.5}
    critic = {**NEWEST["critic/dp_critic"], "fsdp": {"param_offload": True}}
    top = {
        **NEWEST["ppo_trainer"],
        "actor_rollout_ref": {"model": {**model, "lora_rank": 8, "lora_alpha": 64}},
    }
    change = {"ppo_trainer": top, "actor/dp_actor": actor, "critic/dp_critic": critic}
    config = material.load(config_name="ppo_trainer", config_dir=folder(NEWEST, change)).config
    assert config.actor_rollout_ref.actor.grad_clip == 0.5
    assert config.critic.model.fsdp_config.param_offload
    found = config.actor_rollout_ref.model
    assert (found.lora_rank, found.lora_alpha, found.target_modules) == (8, 64, "all-linear")


def test_use_torch_compile_of_verls_files_does_not_compile_the_model(folder, material):
    """It compiles the entropy there. A file of one's own has verlite's key and its meaning."""
    engine = {"actor_rollout_ref": {"actor": {"fsdp_config": {"use_torch_compile": True}}}}
    mine = {"mine": {"defaults": ["ppo_trainer", "_self_"], **engine}}
    place = folder(NEWEST, mine)
    config = material.load(config_name="ppo_trainer", config_dir=place).config
    engines = (config.actor_rollout_ref.actor.fsdp_config, config.critic.model.fsdp_config)
    assert [one.use_torch_compile for one in engines] == [False, False]
    config = material.load(config_name="mine", config_dir=place).config
    assert config.actor_rollout_ref.actor.fsdp_config.use_torch_compile
    old = "actor_rollout_ref.actor.use_torch_compile"
    (note,) = material.notes(f"{old}=true")
    assert note.startswith(f"{old} has no effect: verl compiles the entropy with it")


def test_a_file_of_ones_own_may_use_one_of_verls_names(folder, material):
    """alpha=32 is verl's default under this name; the default of lora_alpha is 16."""
    mine = {"actor_rollout_ref": {"model": {"lora": {"rank": 32, "alpha": 32}}}}
    loaded = material.load(
        config_name="mine",
        config_dir=folder({"mine": {"defaults": ["ppo_trainer", "_self_"], **mine}}),
    )
    model = loaded.config.actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha) == (32, 32)


def test_keys_of_verl_with_another_value_are_still_refused(folder, material):
    wrong = {**NEWEST["ppo_trainer"], "distillation": {"distillation_loss": {"topk": 8}}}
    with pytest.raises(ConfigError, match="distillation.distillation_loss.topk"):
        material.load(config_name="ppo_trainer", config_dir=folder(NEWEST, {"ppo_trainer": wrong}))


def test_nothing_but_the_seed_of_verl_may_be_null(material):
    assert material.load("data.seed=null").config.data.seed == 42
    assert "data.seed has no effect: null is verl's default; verlite uses 42" in material.notes(
        "data.seed=null"
    )
    with pytest.raises(ConfigError, match="expected whole number, got null"):
        material.load("data.train_batch_size=null")


OLD_SFT = {
    "sft_trainer": {
        "data": {
            "prompt_key": "question",
            "micro_batch_size": None,
            "multiturn": {"enable": False},
        },
        "model": {"partial_pretrain": "~/models/gemma-1.1-7b-it", "strategy": "fsdp2"},
        "optim": {"lr": 1e-5, "betas": [0.9, 0.95], "warmup_steps_ratio": 0.1, "clip_grad": 1.0},
        "use_remove_padding": True,
    }
}


def test_verls_sft_file_is_a_configuration(folder, material):
    path = material.folder / "model"
    overrides = [f"data.train_files={material.folder}/train.parquet", f"model.path={path}"]
    config = compose("sft_trainer", overrides, folder(OLD_SFT), command=SFT).config
    optim = config.optim
    assert (config.model.path, config.data.prompt_key) == (str(path), "question")
    assert (optim.lr, optim.betas, optim.lr_warmup_steps_ratio) == (1e-5, [0.9, 0.95], 0.1)
