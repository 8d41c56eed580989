"""What roles are compiled to: defaults are the configuration's, and a spec is all that travels."""

import dataclasses
import pickle
import subprocess
import sys

import pytest

from verlite.config import make_plan, schema
from verlite.config.compile import role_spec
from verlite.config.schema import Config, DataConfig
from verlite.spec import roles
from verlite.spec.data import DataSpec


@pytest.mark.parametrize(
    ("spec", "sections"),
    [
        (roles.ModelSpec, [schema.ModelConfig]),
        (roles.OptimSpec, [schema.OptimConfig]),
        (roles.FSDPSpec, [schema.FSDPConfig]),
        (roles.GenerationSpec, [schema.RolloutConfig]),
        (roles.ServiceSpec, [schema.RefConfig]),
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
    assert compared >= len(dataclasses.fields(made)) - 3


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
