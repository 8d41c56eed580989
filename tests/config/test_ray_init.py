"""ray_kwargs.ray_init: each argument of ray.init is a key, or has a note or a refusal."""

import inspect
import os
import sys

import pytest
import yaml

from verlite.config import ConfigError, translation
from verlite.config.commands import PPO
from verlite.config.load import dump

RAY_INIT = "ray_kwargs.ray_init."
ENV = f"{RAY_INIT}runtime_env.env_vars."


def meanings(name: str) -> list[str]:
    """Return the tables that know a key."""
    tables = (PPO.tables.fixed, PPO.tables.refused, PPO.tables.ignored)
    known = ["schema"] if PPO.find(name) else []
    return known + ["alias"] * any(translation.lookup(table, name) for table in tables)


def test_every_argument_of_ray_init_has_one_meaning():
    import ray
    from ray.runtime_env import RuntimeEnv

    arguments = [*inspect.signature(ray.init).parameters, "_temp_dir", "_system_config"]
    names = [f"{RAY_INIT}{name}" for name in arguments if name != "kwargs"]
    names += [f"{RAY_INIT}runtime_env.{name}" for name in RuntimeEnv.known_fields]
    assert len(names) > 30
    found = {name: meanings(name) for name in names}
    # A key of the schema is looked up first; the pattern for other fields also matches it.
    assert {name for name, tables in found.items() if not tables} == set()
    in_schema = {name.removeprefix(RAY_INIT) for name, known in found.items() if "schema" in known}
    assert in_schema == {
        "address",
        "num_cpus",
        "runtime_env",
        "runtime_env.env_vars",
        "runtime_env.py_executable",
    }


def test_environment_variables_are_text_as_typed(material):
    loaded = material.load(
        f'++{ENV}NCCL_P2P_DISABLE="1"',
        f"+{ENV}RATE=1e-3",
        f"{ENV}NCCL_IB_HCA=mlx5_0,mlx5_1",
        f"{ENV}FLAG=true",
        f"{ENV}PYTHONPATH=/a:/b",
    )
    assert loaded.config.ray_kwargs.ray_init.runtime_env.env_vars == {
        "NCCL_P2P_DISABLE": "1",
        "RATE": "1e-3",
        "NCCL_IB_HCA": "mlx5_0,mlx5_1",
        "FLAG": "true",
        "PYTHONPATH": "/a:/b",
    }
    assert loaded.notes == []


def test_a_value_that_yaml_has_changed_is_refused(material):
    with pytest.raises(ConfigError) as caught:
        material.load(f"{ENV.rstrip('.')}={{A: true, B: 1, C: 0.5}}")
    assert [str(problem) for problem in caught.value.problems] == [
        f"{ENV}A=true: expected text, got true/false. Quote the value.",
        f"{ENV}C=0.5: expected text, got a number. Quote the value.",
    ]


def test_secrets_are_masked(material, monkeypatch):
    monkeypatch.setenv("HIDDEN", "canary-1")
    loaded = material.load(
        f"{ENV}HF_TOKEN=${{oc.env:HIDDEN}}", f"{ENV}WANDB_API_KEY=canary-2", f"{ENV}NCCL_DEBUG=WARN"
    )
    variables = loaded.config.ray_kwargs.ray_init.runtime_env.env_vars
    assert variables["HF_TOKEN"] == "canary-1" and variables["WANDB_API_KEY"] == "canary-2"
    written = dump(loaded)
    assert "canary" not in written
    assert yaml.safe_load(written)["ray_kwargs"]["ray_init"]["runtime_env"]["env_vars"] == {
        "HF_TOKEN": "***",
        "WANDB_API_KEY": "***",
        "NCCL_DEBUG": "WARN",
    }
    with pytest.raises(ConfigError) as caught:
        material.load(f"{ENV}MY-TOKEN=canary-3")
    assert "canary" not in str(caught.value)


def test_the_driver_has_the_variables_while_it_runs(monkeypatch):
    from verlite.trainer.opening import environment

    monkeypatch.setenv("VERLITE_TEST_KEPT", "before")
    path_before = list(sys.path)
    variables = {"VERLITE_TEST_KEPT": "during", "VERLITE_TEST_NEW": "1", "PYTHONPATH": "/x:/y"}
    monkeypatch.delenv("VERLITE_TEST_NEW", raising=False)
    with environment(variables):
        assert os.environ["VERLITE_TEST_KEPT"] == "during"
        assert os.environ["VERLITE_TEST_NEW"] == "1"
        assert sys.path[:2] == ["/x", "/y"]
    assert os.environ["VERLITE_TEST_KEPT"] == "before"
    assert "VERLITE_TEST_NEW" not in os.environ and sys.path == path_before
