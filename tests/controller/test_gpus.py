"""GPUs as Ray hands them out: a cluster that says it has eight, on a machine without one."""

import os
from functools import partial

import pytest

from tests.controller.workers import Light
from verlite.config.plan import make_plan
from verlite.config.problems import Problem
from verlite.config.schema import Config
from verlite.controller import placement as placements
from verlite.controller import ray_internals
from verlite.controller.cluster import connect
from verlite.controller.placement import ResourcesMissing, reserve
from verlite.controller.worker_group import ready, spawn
from verlite.trainer import launch
from verlite.trainer.errors import RunRefused
from verlite.trainer.launch import plan_on, reserve_devices

pytestmark = pytest.mark.process

ALL = "0,1,2,3,4,5,6,7"
VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Guide 003 exports all three variables; its clusters may also forbid Ray to narrow them."""
    import ray

    patch = pytest.MonkeyPatch()
    patch.setattr(ray, "init", partial(ray.init, num_gpus=8))
    for name in VARIABLES:
        patch.setenv(name, ALL)
    patch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    patch.setenv("RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES", "1")
    with connect(tmp_path_factory.mktemp("run"), address="local", num_cpus=8) as cluster:
        cluster.local = False  # as if the driver, without a GPU, had joined it
        yield cluster
    patch.undo()


@pytest.fixture
def config():
    """Two engines of two GPUs each."""
    config = Config()
    config.data.train_files = "x.parquet"
    config.actor_rollout_ref.model.path = "org/model"
    config.algorithm.adv_estimator = "reinforce_plus_plus"
    config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = 1
    config.actor_rollout_ref.rollout.name = "vllm"
    config.actor_rollout_ref.rollout.tensor_model_parallel_size = 2
    config.trainer.n_gpus_per_node = 4
    config.trainer.device = "auto"
    config.trainer.total_training_steps = 1
    config.trainer.resource_wait_s = 5
    return config


@pytest.fixture
def torch_for_gpus(monkeypatch):
    """The nodes have a torch for GPUs."""
    monkeypatch.setattr(placements, "torch_build", lambda: "cuda")


def test_engines_are_grouped_for_the_clusters_gpus(fresh, config, torch_for_gpus):
    plan = make_plan(config, "cpu", count_rows=False)
    assert (plan.device, plan.rollout_dtype) == ("cpu", "float32"), "what the driver sees alone"
    plan = plan_on(fresh, config, plan)
    placement = reserve_devices(fresh, config, plan)
    assert (placement.kind, plan.device, plan.rollout_dtype) == ("cuda", "cuda", "bfloat16")
    assert (plan.engines, plan.tensor_parallel) == (2, 2)
    assert placement.roles["rollout"] == ((0, 1), (2, 3))
    assert placement.roles["actor"] == ((0,), (1,), (2,), (3,))
    assert len({device.gpu_id for device in placement.devices}) == 4


def test_a_named_device_and_a_local_cluster_keep_their_plan(fresh, config, monkeypatch):
    plan = make_plan(config, "cpu", count_rows=False)
    config.trainer.device = "cpu"
    assert plan_on(fresh, config, plan) is plan
    config.trainer.device = "auto"
    monkeypatch.setattr(fresh, "local", True)
    assert plan_on(fresh, config, plan) is plan


def test_rules_are_checked_again_for_the_clusters_devices(fresh, config, monkeypatch):
    seen = []

    def check(config, files):
        seen.append((config.trainer.device, files))
        return [Problem("a.key", 3, "does not fit a GPU", "Use 2.")]

    monkeypatch.setattr(launch, "check", check)
    with pytest.raises(RunRefused, match=r"auto is cuda on .*\n  a.key=3: does not fit a GPU"):
        plan_on(fresh, config, make_plan(config, "cpu", count_rows=False))
    assert seen == [("cuda", False)]


def test_each_worker_sees_only_its_gpus(fresh, torch_for_gpus):
    """All variables have the same value, even where Ray was told not to set them."""
    roles = {"actor": [0, 1], "ref": [0, 1], "rollout": [[0, 1]]}
    placement = reserve(fresh, roles, devices_per_node=2, kind="cuda")
    workers = {role: spawn(Light, placement, role) for role in roles}
    ready(*workers.values())
    ids = [device.gpu_id for device in placement.devices]
    shown = {role: worker.environment(*VARIABLES) for role, worker in workers.items()}
    # ROCR listed the same GPUs as HIP; it must not renumber them.
    one_each = [[gpu, gpu, None] for gpu in ids]
    both = ",".join(ids)
    assert shown == {"actor": one_each, "ref": one_each, "rollout": [[both, both, None]]}


def test_workers_on_cpus_see_no_gpu(fresh):
    worker = spawn(Light, reserve(fresh, {"a": [0]}, devices_per_node=1, kind="cpu"), "a")
    ready(worker)
    assert worker.environment(*VARIABLES) == [["-1", "-1", None]]


@pytest.mark.parametrize("ids", [None, ["0", "1"]])
def test_hip_counts_within_the_gpus_that_rocr_leaves(monkeypatch, ids):
    """Slurm gave GPUs 4 and 5; Ray's ids number these two."""
    for name in VARIABLES[:2]:
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "4,5")
    monkeypatch.setattr(ray_internals, "_visible_before", lambda: ids)
    ray_internals.set_visible_gpus(["1"])
    assert [os.environ[name] for name in VARIABLES] == ["1", "1", "4,5"]


def test_nodes_whose_torch_is_for_cpus_are_named(fresh, monkeypatch):
    monkeypatch.setattr(placements, "torch_build", lambda: "cpu")
    with pytest.raises(ResourcesMissing, match=r"127.0.0.1: cpu\n.*trainer.device=cpu"):
        reserve(fresh, {"a": [0]}, devices_per_node=1, kind="cuda")


def test_nodes_without_verlite_are_left_to_the_workers_start(fresh, monkeypatch):
    def missing():
        raise ModuleNotFoundError("No module named 'verlite'")

    monkeypatch.setattr(placements, "torch_build", missing)
    assert reserve(fresh, {"a": [0]}, devices_per_node=1, kind="cuda").kind == "cuda"
