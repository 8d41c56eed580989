"""Counting GPUs without torch, against folders that look like the kernel's."""

import importlib.metadata
import importlib.util
from types import SimpleNamespace

import pytest

from verlite import machine
from verlite.config import plan
from verlite.config.plan import make_plan
from verlite.config.problems import ConfigError

NOTHING = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"))


@pytest.fixture
def visibility(monkeypatch):
    """Set these visibility variables and no other."""

    def apply(**names: str) -> None:
        for name in NOTHING:
            monkeypatch.delenv(name, raising=False)
        for name, value in names.items():
            monkeypatch.setenv(f"{name}_VISIBLE_DEVICES", value)

    return apply


@pytest.fixture
def nvidia(tmp_path):
    """A machine with four GPUs of NVIDIA."""
    for number in range(4):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:0{number}:00.0").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def amd(tmp_path, monkeypatch):
    """Two processors and six GPUs of AMD.

    The container may open the render devices of four GPUs.
    """
    monkeypatch.setattr(machine, "torch_build", lambda: "rocm")
    (tmp_path / "dev/dri").mkdir(parents=True)
    (tmp_path / "dev/kfd").touch()
    for node in range(8):
        folder = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{node}"
        folder.mkdir(parents=True)
        is_gpu = node >= 2
        minor = 126 + node if is_gpu else 0
        (folder / "gpu_id").write_text(f"{4000 + node if is_gpu else 0}\n")
        (folder / "properties").write_text(f"simd_count {is_gpu * 304}\ndrm_render_minor {minor}\n")
    for minor in range(128, 132):
        (tmp_path / f"dev/dri/renderD{minor}").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("chosen", "visible"),
    [
        ({}, 4),
        ({"CUDA": ""}, 0),
        ({"CUDA": "-1"}, 0),
        ({"CUDA": "0,2"}, 2),
        ({"CUDA": "0,1,2,3,4,5"}, 4),
        ({"HIP": "0"}, 4),
    ],
)
def test_nvidia_gpus_are_counted(nvidia, visibility, chosen, visible):
    visibility(**chosen)
    assert machine.visible_gpus(nvidia) == visible


@pytest.mark.parametrize(
    ("chosen", "visible"),
    [
        ({}, 4),
        ({"HIP": "0,2"}, 2),
        ({"HIP": "-1"}, 0),
        ({"CUDA": "1"}, 1),
        ({"HIP": "0,1,2", "CUDA": "1"}, 3),
        ({"ROCR": "0,1"}, 2),
        ({"ROCR": "0,1", "HIP": "0"}, 1),
        ({"HIP": "0,1,2,3,4,5,6,7", "ROCR": "0,1,2,3,4,5,6,7", "CUDA": "0,1,2,3,4,5,6,7"}, 4),
    ],
)
def test_amd_gpus_are_counted(amd, visibility, chosen, visible):
    visibility(**chosen)
    assert machine.visible_gpus(amd) == visible


def test_amd_gpus_count_only_where_torch_can_use_them(amd, visibility, monkeypatch):
    """The graphics of a laptop appear in the same files."""
    visibility()
    monkeypatch.setattr(machine, "torch_build", lambda: "cuda")
    assert machine.visible_gpus(amd) == 0


@pytest.mark.parametrize(
    ("lines", "build"),
    [
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "cuda"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '7.1.25424'\n", "rocm"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", "cpu"),
        ("cuda = None\n", "cpu"),
    ],
)
def test_the_build_of_torch_is_read_from_its_version_file(tmp_path, monkeypatch, lines, build):
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\ndebug = False\n{lines}")
    torch = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: torch)
    assert machine.torch_build.__wrapped__() == build


def test_the_installed_torch_is_what_it_says():
    import torch

    builds = {"cuda": torch.version.cuda, "rocm": torch.version.hip}
    expected = [name for name, version in builds.items() if version] or ["cpu"]
    assert [machine.torch_build.__wrapped__()] == expected


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_gpus_without_a_torch_for_them_are_refused(material, monkeypatch, device):
    monkeypatch.setattr(machine, "visible_gpus", lambda: 8)
    monkeypatch.setattr(machine, "torch_build", lambda: "cpu")
    with pytest.raises(ConfigError) as caught:
        material.load(f"trainer.device={device}")
    [problem] = caught.value.problems
    assert problem.key == "trainer.device"
    assert "8 visible GPUs, but torch is a build for CPUs" in problem.rule
    assert "trainer.device=cpu" in problem.remedy
    monkeypatch.setattr(machine, "torch_build", lambda: "cuda")
    assert make_plan(material.load().config).device == "cuda"


def test_a_plan_for_other_machines_obeys_the_rules_of_the_placement(material, monkeypatch):
    """That this machine lacks the GPUs hides no other problem, so the plan has its arithmetic."""
    monkeypatch.setattr(machine, "visible_gpus", lambda: 0)
    line = ["trainer.device=cuda", "trainer.n_gpus_per_node=1", "data.train_batch_size=8"]
    assert make_plan(material.load(*line, elsewhere=True).config).lines()
    with pytest.raises(ConfigError) as caught:
        material.load(
            *line, "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", elsewhere=True
        )
    [problem] = caught.value.problems
    assert problem.rule == "must divide the 1 devices"


@pytest.mark.parametrize(
    ("version", "is_old"),
    [("0.28.1", True), ("0.9.2", True), ("0.29.0", False), ("0.32.0+cpu", False), ("1.0.0", False)],
)
def test_vllm_that_loses_state_in_sleep_is_refused(material, monkeypatch, version, is_old):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    monkeypatch.setattr(plan, "installed", lambda package: True)
    name = "actor_rollout_ref.rollout.name"
    if not is_old:
        assert machine.old_vllm() == ""
        return
    with pytest.raises(ConfigError) as caught:
        material.load(f"{name}=vllm")
    [problem] = caught.value.problems
    assert problem.key == name
    assert f"vLLM {version} is installed; before 0.29 it loses" in problem.rule
    assert "vllm>=0.29" in problem.remedy
