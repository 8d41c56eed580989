"""What roles are compiled to: defaults are the configuration's, and a spec is all that travels."""

import dataclasses
import pickle
import subprocess
import sys

import pytest

from verlite.config import keys, make_plan, schema
from verlite.config.compile import role_spec
from verlite.config.schema import Config, DataConfig
from verlite.spec import roles
from verlite.spec.roles import DataSpec

NOT_KEYS_OF_A_SERVICE = {"name", "section", "token_key", "max_answer", "max_values"}
NOT_KEYS_OF_A_SERVICE |= {"max_in_flight", "batch_size", "batch_window_ms"}  # of the reference


@pytest.mark.parametrize(
    ("spec", "sections"),
    [
        (roles.ModelSpec, [schema.ModelConfig]),
        (roles.OptimSpec, [schema.OptimConfig]),
        (roles.FSDPSpec, [schema.FSDPConfig]),
        (roles.GenerationSpec, [schema.RolloutConfig]),
        (roles.ReferenceServiceSpec, [schema.RefConfig]),
        (roles.RetrieverSpec, [schema.RetrieverConfig]),
        (roles.RewardServiceSpec, [schema.RemoteRewardConfig]),
        (roles.ScorerSpec, [schema.RewardConfig, schema.CustomRewardConfig]),
        (DataSpec, [schema.DataConfig]),
    ],
)
def test_defaults_are_those_of_the_keys(spec, sections):
    """`url`: the schema takes one address or a list; a spec has them all. `path`: it has none."""
    made = spec(path="x") if spec is roles.ModelSpec else spec()
    values = {}
    for section in sections:
        values |= vars(section(path="x") if section is schema.ModelConfig else section())
    compared = 0
    for field in dataclasses.fields(made):
        if field.name not in values or field.name in ("remote", "custom_cls", "sampler"):
            continue
        want, got = values[field.name], getattr(made, field.name)
        if field.name in ("url", "servers"):
            want = () if want is None else (want,)
        assert (tuple(got) if isinstance(want, list) else got) == (
            tuple(want) if isinstance(want, list) else want
        ), field.name
        compared += 1
    names = {field.name for field in dataclasses.fields(made)}
    if isinstance(made, roles.ServiceSpec):
        names -= NOT_KEYS_OF_A_SERVICE - set(values)
        assert compared == len(names)
    assert compared >= len(names) - 3


def a_run() -> tuple[Config, object]:
    config = Config(data=DataConfig(train_files="x"))
    config.actor_rollout_ref.model.path = "/models/tiny"
    config.actor_rollout_ref.actor.use_kl_loss = True
    config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = 2
    config.critic.ppo_micro_batch_size_per_gpu = 2
    config.algorithm.adv_estimator = "gae"
    config.trainer.n_gpus_per_node = 3
    config.cluster.component_placement = {"actor,ref,critic": "0", "rollout": "1", "inference": "2"}
    return config, make_plan(config, "cpu", count_rows=False)


def test_a_worker_gets_no_configuration(tmp_path):
    """A new process reads every role's spec, and then has imported nothing of verlite.config."""
    config, plan = a_run()
    assert set(plan.roles) == {"actor", "rollout", "inference", "ref", "critic"}
    specs = {role: role_spec(role, config, plan, 10) for role in plan.roles}
    file = tmp_path / "specs"
    file.write_bytes(pickle.dumps(specs))
    program = (
        "import pickle, sys\n"
        f"specs = pickle.load(open({str(file)!r}, 'rb'))\n"
        "print(sorted(specs), [name for name in sys.modules if 'verlite.config' in name])"
    )
    read = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert read.stdout.strip() == f"{sorted(plan.roles)} []", read.stderr


def test_inference_computes_with_the_actors_dtype_and_no_optimizer():
    config, plan = a_run()
    config.actor_rollout_ref.actor.fsdp_config.dtype = "bfloat16"
    plan = dataclasses.replace(plan, train_dtype="bfloat16")
    spec = role_spec("inference", config, plan, 10)
    assert (spec.dtype, spec.engine.fsdp.model_dtype) == ("bfloat16", "bfloat16")
    assert spec.engine.optim is None and role_spec("ref", config, plan, 10).engine.optim is None
    assert role_spec("critic", config, plan, 10).engine.model.path == "/models/tiny"


VALUES = {
    "actor_rollout_ref.actor.grad_clip": (0.11, "actor", "engine.grad_clip"),
    "actor_rollout_ref.actor.max_nonfinite_updates": (7, "actor", "engine.max_nonfinite_updates"),
    "actor_rollout_ref.actor.optim.lr": (0.12, "actor", "engine.optim.lr"),
    "actor_rollout_ref.actor.fsdp_config.fsdp_size": (1, "actor", "engine.fsdp.fsdp_size"),
    "actor_rollout_ref.actor.ppo_epochs": (3, "actor", "updates.epochs"),
    "actor_rollout_ref.actor.clip_ratio_low": (0.13, "actor", "loss.clip_low"),
    "actor_rollout_ref.actor.clip_ratio_high": (0.31, "actor", "loss.clip_high"),
    "actor_rollout_ref.actor.clip_ratio_c": (4.5, "actor", "loss.clip_c"),
    "actor_rollout_ref.actor.loss_scale_factor": (77.0, "actor", "loss.loss_scale"),
    "actor_rollout_ref.actor.entropy_coeff": (0.14, "actor", "loss.entropy_coeff"),
    "actor_rollout_ref.actor.kl_loss_coef": (0.15, "actor", "loss.kl_loss_coef"),
    "actor_rollout_ref.actor.kl_loss_type": ("k2", "actor", "loss.kl_loss_type"),
    "actor_rollout_ref.actor.tau_pos": (1.6, "actor", "loss.extra.tau_pos"),
    "actor_rollout_ref.actor.tau_neg": (1.7, "actor", "loss.extra.tau_neg"),
    "actor_rollout_ref.actor.policy_loss.ppo_kl_coef": (0.18, "actor", "loss.extra.ppo_kl_coef"),
    "actor_rollout_ref.actor.policy_loss.clip_cov_lb": (
        2.1,
        "actor",
        "token_selection.clip_cov_lb",
    ),
    "actor_rollout_ref.actor.calculate_entropy": (True, "actor", "calculate_entropy"),
    "algorithm.gamma": (0.91, "actor", "advantage.gamma"),
    "algorithm.lam": (0.92, "actor", "advantage.lam"),
    "algorithm.kl_penalty": ("abs", "actor", "advantage.kl_penalty"),
    "reward.clip_range": ([-2.0, 3.0], "actor", "advantage.reward_clip_range"),
    "actor_rollout_ref.rollout.sync_bucket_mb": (33, "actor", "publish.sync_bucket_mb"),
    "critic.grad_clip": (0.22, "critic", "engine.grad_clip"),
    "critic.max_nonfinite_updates": (5, "critic", "engine.max_nonfinite_updates"),
    "critic.optim.lr": (0.23, "critic", "engine.optim.lr"),
    "critic.cliprange_value": (0.24, "critic", "cliprange_value"),
    "critic.ppo_epochs": (4, "critic", "updates.epochs"),
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": (6, "ref", "micro.size"),
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": (
        8,
        "inference",
        "log_probs.micro.size",
    ),
    "actor_rollout_ref.rollout.temperature": (0.77, "ref", "temperature"),
    "trainer.phase_timeout_s": (1234.0, "critic", "phase_timeout_s"),
    "data.seed": (99, "actor", "engine.seed"),
    "actor_rollout_ref.rollout.seed": (98, "rollout", "seed"),
    "actor_rollout_ref.rollout.request_timeout_s": (
        97.0,
        "rollout",
        "generation.request_timeout_s",
    ),
    "actor_rollout_ref.rollout.kv_cache_gb": (0.5, "rollout", "generation.kv_cache_gb"),
    "data.max_obs_length": (96, "rollout", "max_obs_length"),
    "max_turns": (2, "rollout", "max_turns"),
    "retriever.topk": (9, "rollout", "env.retriever.topk"),
    "retriever.url": ("http://a:1", "rollout", "env.retriever.url"),
    "custom_reward_function.name": ("mine", "rollout", "scorer.name"),
    "reward.timeout_s": (95.0, "rollout", "scorer.timeout_s"),
    "reward.item_timeout_s": (94.0, "rollout", "scorer.item_timeout_s"),
    "trainer.default_local_dir": ("/runs/here", "rollout", "run_dir"),
    "trainer.debug": (True, "rollout", "debug"),
}
"""key: (value, a role that reads it, where it is in the role's spec)."""


def test_each_value_arrives_where_it_is_read():
    config, _ = a_run()
    config.do_search, config.env.name = True, "search"
    for key, (value, _, _) in VALUES.items():
        section, _, name = key.rpartition(".")
        setattr(keys.get(config, section) if section else config, name, value)
    plan = make_plan(config, "cpu", count_rows=False)
    assert role_spec("rollout", config, plan, 10).phase_timeout_s == 1234.0
    for key, (value, role, place) in VALUES.items():
        found = role_spec(role, config, plan, 10)
        for name in place.split("."):
            found = found[name] if isinstance(found, dict) else getattr(found, name)
        if key == "retriever.url":
            value = (value,)
        assert found == (tuple(value) if isinstance(value, list) else value), key
