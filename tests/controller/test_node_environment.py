"""Variables and the interpreter of a node group go to the workers of its nodes only."""

from types import SimpleNamespace

import pytest

from verlite.controller.cluster import RUN_MARK, daemon_environment
from verlite.controller.placement import Placement, _devices
from verlite.controller.ray_internals import hip_environment
from verlite.controller.worker_start import _runtime_env

NODES = [{"NodeID": name, "NodeManagerAddress": "127.0.0.1"} for name in ("first", "second")]


@pytest.mark.parametrize("local", [True, False])
def test_environment_of_a_node_reaches_its_workers_only(local):
    cluster = SimpleNamespace(
        local=local, run_id="run", environment={"A": "run", "B": "run"}, py_executable="python3"
    )
    devices = _devices(NODES, 2, None, {1: {"A": "node"}}, {1: "/opt/python"})
    placement = Placement(cluster, "cpu", devices, {"actor": ((0,), (1,), (2,), (3,))}, None)

    def spec(rank):
        return SimpleNamespace(role="actor", rank=rank, secrets=(), restarts=0)

    found = [_runtime_env(placement, spec(rank), device) for rank, device in enumerate(devices)]
    pythons = [env["py_executable"] for env in found]
    assert pythons == ["python3", "python3", "/opt/python", "/opt/python"]
    variables = [env.get("env_vars", {}) for env in found]
    if local:  # the processes inherit the driver's variables
        assert variables == [{}, {}, {"A": "node"}, {"A": "node"}]
    else:
        assert variables == [
            {"A": value, "B": "run", RUN_MARK: f"run/actor/{rank}"}
            for rank, value in enumerate(("run", "run", "node", "node"))
        ]


@pytest.mark.parametrize(
    ("before", "added"),
    [
        ({"ROCR_VISIBLE_DEVICES": "4,5,7"}, {"HIP_VISIBLE_DEVICES": "0,1,2"}),
        ({"ROCR_VISIBLE_DEVICES": "4", "HIP_VISIBLE_DEVICES": "0"}, {}),
        ({"ROCR_VISIBLE_DEVICES": ""}, {}),
        ({"HIP_VISIBLE_DEVICES": "3"}, {}),
        ({}, {}),
    ],
)
def test_hip_numbers_the_gpus_that_rocr_leaves(monkeypatch, before, added):
    """Slurm sets ROCR's variable alone, with which `import ray` fails on AMD GPUs."""
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    assert hip_environment() == added
    assert daemon_environment().items() >= added.items()
