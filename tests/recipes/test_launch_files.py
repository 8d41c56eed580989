"""recipes/cluster: dstack, SkyPilot and KubeRay files, and the Dockerfiles.

tests/samples/launch has the parts of the published schemas that the files use, with their sources.
"""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.config.conftest import Material, write_material
from verlite.config import compose, make_plan
from verlite.config.plan import installed

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes" / "cluster"
SCHEMAS = ROOT / "tests" / "samples" / "launch"
FILES = {
    "dstack": "dstack.yml",
    "skypilot": "skypilot.yaml",
    "kuberay-rayjob": "kuberay-rayjob.yaml",
}
DOCKERFILES = sorted((FOLDER / "docker").glob("Dockerfile.*"))


def load(name: str):
    return yaml.safe_load((FOLDER / FILES[name]).read_text())


def script(name: str) -> str:
    """Return the shell commands of a launch file."""
    content = load(name)
    if name == "dstack":
        return "\n".join(content["commands"])
    return content["run"] if name == "skypilot" else content["spec"]["entrypoint"]


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Material:
    folder = tmp_path_factory.mktemp("material")
    write_material(folder, heads=28)
    return Material(folder)


@pytest.mark.parametrize("name", FILES)
def test_fields_exist_and_have_the_right_types(name):
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(load(name))


def test_a_misspelled_field_is_found():
    for name, section in (
        ("dstack", []),
        ("skypilot", ["resources"]),
        ("kuberay-rayjob", ["spec", "rayClusterSpec"]),
    ):
        content = load(name)
        inner = content
        for key in section:
            inner = inner[key]
        inner["nods"] = 2
        schema = json.loads((SCHEMAS / f"{name}.json").read_text())
        with pytest.raises(jsonschema.ValidationError, match="nods"):
            jsonschema.Draft202012Validator(schema).validate(content)


@pytest.mark.skipif(not installed("vllm"), reason="the commands name rollout.name=vllm")
@pytest.mark.parametrize("name", FILES)
def test_training_command_is_valid(name, material, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    text = script(name).replace("\\\n", " ")
    (line,) = re.findall(r"^ *(?:exec )?python -m verlite\.main_ppo (.*)$", text, re.MULTILINE)
    line = re.sub(r'"?\$(DSTACK_GPUS_PER_NODE|SKYPILOT_NUM_GPUS_PER_NODE)"?', "8", line)
    line = re.sub(r'"?\$(DSTACK_NODES_NUM|SKYPILOT_NUM_NODES)"?', "2", line)
    assert "$" not in line
    line = line.replace("/shared/data/gsm8k", str(material.folder))
    line = re.sub(r"(model\.path=)\S+", rf"\1{material.folder}/model", line)
    line = re.sub(r"(default_local_dir=)\S+", rf"\1{material.folder}/run", line)
    words = shlex.split(line)
    config_name = words[1] if words[0] == "--config-name" else None
    loaded = compose(config_name, words[2:] if config_name else words)
    plan = make_plan(loaded.config)
    assert (plan.nnodes, plan.devices_per_node) == (2, 8)


@pytest.mark.parametrize("name", ["dstack", "skypilot"])
def test_shell_is_valid(name):
    result = subprocess.run(
        ["bash", "-n"], input=script(name), text=True, capture_output=True, check=False
    )
    assert result.stderr == ""


def test_no_file_ends_rays_processes_of_others():
    for name in FILES:
        commands = [line for line in script(name).splitlines() if not line.strip().startswith("#")]
        assert "ray stop" not in "\n".join(commands)


def test_kuberay_has_what_a_run_needs():
    spec = load("kuberay-rayjob")["spec"]
    cluster = spec["rayClusterSpec"]
    assert cluster["enableInTreeAutoscaling"] is False and cluster["authOptions"]["mode"] == "token"
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "requirements" / "core.txt").read_text()
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 2
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        mounts = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts == {"/shared", "/dev/shm"}
    assert "working_dir" not in yaml.safe_load(spec["runtimeEnvYAML"])


def test_runtime_env_is_one_that_ray_accepts():
    from ray.runtime_env import RuntimeEnv

    content = yaml.safe_load((ROOT / "verlite/trainer/runtime_env.yaml").read_text())
    assert RuntimeEnv(**content)["env_vars"] == content["env_vars"]
    assert "working_dir" not in content


# Dockerfiles


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return (instruction, arguments) of a Dockerfile."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfile(path):
    lines = instructions(path)
    assert {name for name, _ in lines} <= {
        "FROM", "ARG", "ENV", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT", "CMD",
    }  # fmt: skip
    ((_, base),) = [line for line in lines if line[0] == "FROM"]
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*", base)  # a pinned version
    copied = [arguments.split() for name, arguments in lines if name == "COPY"]
    sources = [source for words in copied for source in words[:-1]]
    assert sources and all((ROOT / source).exists() for source in sources)
    needed = {"pyproject.toml", "README.md", "LICENSE", "conf", "verlite", "requirements/core.txt"}
    assert needed <= set(sources)
    *_, user = [arguments for name, arguments in lines if name == "USER"]
    assert user == "${RUN_AS}" and ("ARG", "RUN_AS=10001") in lines
    assert "://" not in path.read_text()  # no package index but the default
    torch = re.findall(r"torch==[\d.]+", path.read_text())
    assert torch == (["torch==2.13.0"] if path.suffix == ".cpu" else [])


def test_there_is_a_dockerfile_for_each_kind_of_device():
    assert [path.suffix for path in DOCKERFILES] == [".cpu", ".cuda", ".rocm"]


@pytest.mark.skipif(not shutil.which("hadolint"), reason="hadolint is not installed")
@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint(path):
    subprocess.run(["hadolint", str(path)], check=True)
