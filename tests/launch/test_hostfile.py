"""`verlite launch hostfile`: the two files, the settings of the run, and the command on a host."""

import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.models import tiny_model
from tests.trainer.runs import write_sums
from verlite.config.load import compose, with_home
from verlite.config.override_text import override
from verlite.config.problems import ConfigError
from verlite.control import limits
from verlite.launch import ClusterError, host_check
from verlite.launch.host_check import Expected
from verlite.launch.hostfile import Host, read_hostfile, read_nodes
from verlite.launch.hosts import Launcher, passed_environment, plan_run
from verlite.launch.session import Remote, Session

RECIPE = Path(__file__).parents[2] / "recipes/rlaif"
GUIDE = RECIPE / "config/nodes.yaml"


# The hostfile.


def test_guides_hostfile_has_two_hosts():
    assert read_hostfile(RECIPE / "config/hostfile") == [Host("gpu007", 8, 3), Host("gpu005", 8, 4)]


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a slots=1", [("a", "a", 1)]),
        ("\n  \n# only text\na\tslots=2#note\nb slots=2", [("a", "a", 2), ("b", "b", 2)]),
        ("me@node-1.local slots=4", [("me@node-1.local", "node-1.local", 4)]),
        ("10.0.0.1 slots=8\nfd00::1 slots=8", [("10.0.0.1",) * 2 + (8,), ("fd00::1",) * 2 + (8,)]),
    ],
)
def test_hostfile_lines(tmp_path, text, hosts):
    path = tmp_path / "hostfile"
    path.write_text(text)
    assert [(host.target, host.name, host.slots) for host in read_hostfile(path)] == hosts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no host"),
        ("# gpu007 slots=8", "names no host"),
        ("gpu007", "line 1: 'gpu007' is not of the form HOST slots=N"),
        ("gpu007 8", "line 1: 'gpu007 8' is not of the form HOST slots=N"),
        ("gpu007 slots = 8", "is not of the form HOST slots=N"),
        ("gpu007 gpus=8", "is not of the form HOST slots=N"),
        ("gpu007 slots=8 max_slots=8", "is not of the form HOST slots=N"),
        ("gpu007 slots=", "slots= is not a number of devices from 1 to 1024"),
        ("gpu007 slots=0", "slots=0 is not a number of devices"),
        ("gpu007 slots=-1", "slots=-1 is not a number of devices"),
        ("gpu007 slots=eight", "slots=eight is not a number of devices"),
        ("gpu007 slots=\u0668", "is not a number of devices"),
        ("gpu007 slots=99999999999", "is not a number of devices"),
        ("-oProxyCommand=id slots=8", "'-oProxyCommand=id' is not HOST or USER@HOST"),
        ("a;reboot slots=8", "is not HOST or USER@HOST"),
        ("a@b@c slots=8", "is not HOST or USER@HOST"),
        ("a slots=8\n\na slots=8", "line 3: a is already on line 1"),
        ("me@a slots=8\nyou@a slots=8", "line 2: a is already on line 1"),
        ("a slots=8\nb slots=4", "a slots=8, b slots=4. A run uses the same number"),
    ],
)
def test_wrong_hostfile_is_refused_with_the_line(tmp_path, text, message):
    path = tmp_path / "hostfile"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_hostfile(path)
    assert len(raised.value.problems) == 1 and message in str(raised.value.problems[0])


def test_all_wrong_lines_of_a_hostfile_are_reported(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("a\nb slots=x\nc slots=1")
    with pytest.raises(ConfigError) as raised:
        read_hostfile(path)
    assert len(raised.value.problems) == 2
    with pytest.raises(ConfigError, match="missing: cannot be read: No such file"):
        read_hostfile(tmp_path / "missing")


# nodes.yaml.


def test_guides_nodes_become_settings():
    model = "/data/vayu/train/models/xDAN-L1-Qwen25-7B-Instruct"
    nodes = read_nodes(GUIDE)
    assert (nodes.master_node, nodes.master_port) == ("gpu007", 29500)
    assert nodes.settings(Path("/project")) == {
        "actor_rollout_ref.model.path": model,
        "trainer.default_local_dir": "/project/output/checkpoints",
        "trainer.experiment_name": "xDAN-L1-Qwen25-7B-Instruct",
        "actor_rollout_ref.rollout.name": "server",
        "actor_rollout_ref.rollout.servers": ["http://gpu004:8000"],
        "actor_rollout_ref.ref.url": ["http://gpu008:8001"],
    }
    assert nodes.logs == Path("output/logs")


def edited(tmp_path, key, value):
    """Write the guide's nodes.yaml with one key changed; remove it if the value is `...`."""
    content = yaml.safe_load(GUIDE.read_text(encoding="utf-8"))
    *sections, last = key.split(".")
    section = content
    for name in sections:
        section = section.setdefault(name, {})
    if value is ...:
        del section[last]
    else:
        section[last] = value
    path = tmp_path / "nodes.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "models.train.paths",
            "m",
            "models.train.paths=m: is not a key of this file. Did you mean",
        ),
        ("training.services.reward.url", "http://a:1", "training.services.reward={url:http://a:1}"),
        ("trainer", {"nnodes": 2}, "trainer={nnodes:2}: is not a key of this file"),
        ("models.train.type", "x", "models.train.type=x: is not a key of this file"),
        ("training.master_node", ..., "training.master_node: is missing"),
        ("training.master_node", 7, "training.master_node=7: is not text"),
        ("training.master_port", "29500", "training.master_port=29500: is not a whole number"),
        ("training.master_port", True, "training.master_port=true: is not a whole number"),
        ("training.master_port", 70000, "training.master_port=70000: is not a port"),
        ("training.services", "http://a:1", "training.services=http://a:1: is a section with"),
        ("training.services.reference.url", "gpu008:8001", "is not the address of a service"),
        ("training.services.reference.url", "http://u:p@a:1", "is not the address of a service"),
        ("training.services.reference.url", "http://a:1/x", "is not the address of a service"),
        ("training.services.generation.url", [8000], "is not the address of a service"),
        ("training.services.generation.url", [], "is not the address of a service"),
        ("training.services.generation.url", "http://a:99999", "is not the address of a service"),
        ("models.output.path", 5, "models.output.path=5: is not text"),
        ("models.train.path", "", "models.train.path=: is not text"),
    ],
)
def test_wrong_key_of_nodes_is_named(tmp_path, key, value, message):
    with pytest.raises(ConfigError) as raised:
        read_nodes(edited(tmp_path, key, value))
    assert len(raised.value.problems) == 1 and message in str(raised.value.problems[0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training: [", "is not YAML"),
        ("- a", "is not a mapping with the sections"),
        ("", "is not a mapping with the sections"),
        ("training:\n  master_node: a\n  master_node: b\n", "a key is given twice"),
        ("training: !!python/object/apply:os.getcwd []", "is not YAML"),
    ],
)
def test_text_that_is_not_nodes_yaml_is_refused(tmp_path, text, message):
    path = tmp_path / "nodes.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_nodes(path)
    with pytest.raises(ConfigError, match="Copy recipes/rlaif/config/nodes.yaml"):
        read_nodes(tmp_path / "missing.yaml")


def test_model_path_may_come_from_base_path_and_name(tmp_path):
    path = edited(tmp_path, "models.train.path", ...)
    assert read_nodes(path).model_path == "/data/vayu/train/models/xDAN-L1-Qwen25-7B-Instruct"
    path = edited(tmp_path, "models", {"train": {"name": "only"}})
    with pytest.raises(ConfigError, match=r"models.train.path: is missing. Give the model's"):
        read_nodes(path)


def test_services_may_be_left_out_or_have_several_addresses(tmp_path):
    path = edited(tmp_path, "training.services", ...)
    assert read_nodes(path).services == {}
    urls = ["http://a:1/", "https://b"]
    path = edited(tmp_path, "training.services.reference.url", urls)
    assert read_nodes(path).services["reference"] == ["http://a:1", "https://b"]


# The run.


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project folder with files for two hosts, a model and data. Returns (folder, arguments)."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "config").mkdir()
    (folder / "config/hostfile").write_text("worker slots=2\nme@main slots=2\n")
    nodes = {
        "training": {"master_node": "main"},
        "models": {
            "train": {"name": "tiny", "path": tiny_model(folder / "a model")},
            "output": {"path": "out", "checkpoint_dir": "saved"},
        },
    }
    (folder / "config/nodes.yaml").write_text(yaml.safe_dump(nodes))
    data = write_sums(folder / "train.parquet", 8)
    arguments = [f"data.train_files={data}", "data.train_batch_size=4", "trainer.device=cpu"]
    arguments += ["actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.actor.use_kl_loss=true"]
    arguments += ["actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=2"]
    arguments += ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"]
    return folder, [*arguments, "algorithm.adv_estimator=grpo"]


def plan(project, *more):
    folder, arguments = project
    files = folder / "config/nodes.yaml", folder / "config/hostfile"
    return plan_run(*files, [*arguments, *more], folder)


def test_run_has_the_master_first_and_the_files_settings(project):
    folder, arguments = project
    run, _ = plan(project)
    assert [host.target for host in run.hosts] == ["me@main", "worker"]
    config = compose(None, run.arguments).config
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (2, 2)
    assert config.actor_rollout_ref.model.path == str(folder / "a model")
    assert config.trainer.default_local_dir == str(run.run_dir) == str(folder / "out/saved")
    assert config.trainer.experiment_name == "tiny" and config.trainer.device == "cpu"
    assert run.logs == folder / "out/logs" and not run.gpus and not run.services
    assert set(arguments) <= set(run.arguments)


def test_the_launchers_home_is_that_of_the_run(project, monkeypatch):
    monkeypatch.setenv("HOME", str(project[0]))
    words = ["custom_reward_function.path=~/r.py", "data.val_files=[~/v.parquet,a~/v.parquet]"]
    assert with_home(words) == [
        f"custom_reward_function.path={project[0]}/r.py",
        f"data.val_files=[{project[0]}/v.parquet,a~/v.parquet]",
    ]
    run, _ = plan(project, "trainer.rollout_data_dir=~/dumps")
    assert f"trainer.rollout_data_dir={project[0]}/dumps" in run.arguments


def test_the_home_in_a_yaml_file_is_the_launchers(project, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(project[0]))
    text = "defaults: [ppo_trainer, _self_]\ndata: {val_files: [~/train.parquet]}\n"
    (tmp_path / "mine.yaml").write_text(text)
    own = [f"--config-path={tmp_path}", "--config-name=mine"]
    run, _ = plan(project, *own)
    own_of_job, overrides = run.arguments[:2], run.arguments[2:]
    assert own_of_job == ["--config-name=mine", f"--config-path={tmp_path}"]
    monkeypatch.setenv("HOME", "/elsewhere")  # that of a host
    config = compose("mine", overrides, str(tmp_path), check=False).config
    assert config.data.val_files == [f"{project[0]}/train.parquet"]
    monkeypatch.setenv("HOME", str(project[0]))
    run, _ = plan(project, *own, "data.val_files=null")
    assert [word for word in run.arguments if "val_files" in word] == ["data.val_files=null"]


def test_settings_after_the_dashes_replace_those_of_nodes_yaml(project):
    run, notes = plan(project, "trainer.experiment_name=mine", "trainer.nnodes=2")
    assert compose(None, run.arguments).config.trainer.experiment_name == "mine"
    assert any("trainer.experiment_name is set after --" in str(note) for note in notes)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("trainer.nnodes=3", "trainer.nnodes=3: the hostfile has another number of hosts: 2"),
        ("trainer.n_gpus_per_node=8", "another number of slots of a host: 2"),
        ("ray_kwargs.ray_init.address=10.0.0.1:6379", "starts a Ray cluster of its own"),
        ("trainer.nonsense=1", "trainer.nonsense"),
        ("--help", "Give it before the --"),
    ],
)
def test_settings_that_contradict_the_files_are_refused(project, setting, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        plan(project, setting)


def test_master_node_must_be_in_the_hostfile(project, tmp_path):
    folder, arguments = project
    path = tmp_path / "hostfile"
    path.write_text("other slots=2")
    with pytest.raises(ConfigError, match="master_node=main: is not in .*, which has other"):
        plan_run(folder / "config/nodes.yaml", path, arguments, folder)


@pytest.mark.parametrize("text", ["a b", "it's", "x=1", "1", "a\\b", "plain", "[x]"])
def test_values_survive_hydras_grammar(text):
    given = ["actor_rollout_ref.model.path=m", "data.train_files=f"]
    loaded = compose(None, [*given, override("trainer.experiment_name", text)], check=False)
    assert loaded.config.trainer.experiment_name == text


def test_only_known_variables_reach_the_hosts():
    given = {"HF_HOME": "/hf", "NCCL_DEBUG": "INFO", "AWS_SECRET": "x", "RAY_ADDRESS": "y"}
    given |= {"VERLITE_REFERENCE_TOKEN": "t", "PYTHONPATH": "/p", "MY_HF_HOME": "z"}
    names = {"HF_HOME", "NCCL_DEBUG", "VERLITE_REFERENCE_TOKEN", "PYTHONPATH"}
    assert set(passed_environment(given)) == names
    by_user = {"OMP_NUM_THREADS": "3"}
    assert passed_environment(by_user) == by_user
    assert passed_environment(by_user | {"VERLITE_THREADS": "3"}) == {}


# The check of a host.


def expected(tmp_path, **changes):
    (tmp_path / "check").write_text("nonce")
    values = {
        "versions": host_check.versions(),
        "shared": (str(tmp_path / "check"), "nonce"),
        "gpus": 0,
        "model": "",
        "services": [],
        "wait_s": 0,
    }
    return Expected(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"versions": {"Python": "2.7"}}, r"has Python 3.\d+; the launcher's machine has 2.7"),
        ({"shared": ("/nowhere/check", "x")}, "does not share /nowhere with the launcher's"),
        ({"gpus": 1000}, r"has \d+ GPUs, and slots=1000 in the hostfile"),
        ({"model": "/nowhere"}, "has no model at /nowhere"),
        ({"services": [("reference", "http://127.0.0.1:1", "")]}, "not healthy: .*refused"),
    ],
)
def test_problems_of_a_host_are_named(tmp_path, changes, message):
    found = list(host_check.problems(expected(tmp_path, **changes)))
    assert len(found) == 1 and re.search(message, found[0]), found
    assert not list(host_check.problems(expected(tmp_path)))


# A command on a host. A stand-in for ssh runs it on this machine.


@pytest.fixture
def remote(tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n')
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    environment = {"PYTHONPATH": os.getcwd(), "VERLITE_QUOTED": "it's $HOME; \n two"}
    folder = tmp_path / "a folder's"
    folder.mkdir()
    return Remote([str(ssh)], sys.executable, str(folder), environment)


def test_ssh_gets_no_secret_and_keeps_the_users_host_key_policy(remote):
    argv = remote.argv("me@gpu-0")
    assert argv[-3:-1] == ["--", "me@gpu-0"]
    assert "BatchMode=yes" in argv and "it's" not in " ".join(argv[:-1])
    assert "VERLITE_QUOTED" not in argv[-1] and not any("StrictHost" in one for one in argv)
    assert shlex.split(argv[-1])[1] == remote.folder


@pytest.mark.process
def test_session_passes_environment_folder_output_and_exit_code(remote):
    code = "import os; print(os.environ['VERLITE_QUOTED'], os.getcwd()); raise SystemExit(7)"
    one = Session(remote, "me@gpu-0", ["-c", code])
    try:
        assert one.wait(60) and one.code == 7 and one.name == "gpu-0"
    finally:
        one.close()
    assert list(one.last) == ["it's $HOME; ", f" two {remote.folder}"]
    assert one.why().startswith("exit code 7:\n  it's $HOME")


@pytest.mark.process
def test_signal_reaches_the_command(remote):
    code = "import signal, time; signal.signal(15, lambda *_: exit(75)); print('ready', flush=True)"
    lines = []
    one = Session(remote, "h", ["-c", f"{code}; time.sleep(600)"], on_line=lines.append)
    try:
        deadline = time.monotonic() + 60
        while not lines and time.monotonic() < deadline:
            time.sleep(0.05)
        one.signal(signal.SIGTERM)
        assert one.wait(60) and one.code == 75
    finally:
        one.close()


LAUNCHER = """
import sys
from verlite.launch.session import Remote, Session
code = '''
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True)
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
'''
remote = Remote(["{ssh}"], sys.executable, "{folder}", {{"PYTHONPATH": "{path}"}})
session = Session(remote, "h", ["-c", code], on_line=lambda line: print(line, flush=True))
session.wait(600)
"""


@pytest.mark.process
def test_nothing_is_left_on_a_host_when_the_launcher_is_killed(remote, tmp_path):
    text = LAUNCHER.format(ssh=remote.ssh[0], folder=tmp_path, path=os.getcwd())
    launcher = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in launcher.stdout.readline().split()]
    assert len(pids) == 2 and all(Path(f"/proc/{pid}").exists() for pid in pids)
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    launcher.stdout.close()


@pytest.mark.process
def test_host_that_cannot_be_reached_is_named_with_the_reason(project, tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\necho 'ssh: connect to host h port 22: timed out' >&2\nexit 255\n")
    ssh.chmod(0o755)
    run, _ = plan(project)
    remote = Remote([str(ssh), "-F", "my file"], sys.executable, str(tmp_path), {})
    with pytest.raises(ClusterError) as raised:
        Launcher(run, remote, lambda text: None, 10, 0).run()
    assert f"Try: {ssh} -F 'my file' -o BatchMode=yes worker true" in str(raised.value)
    for host in ("main", "worker"):
        assert f"{host} cannot be reached by ssh: ssh: connect to host h port 22" in str(
            raised.value
        )
    assert not list(run.run_dir.parent.glob(".launch-*"))


def test_the_silence_limit_is_longer_than_several_heartbeats():

    assert limits.SILENCE_S > 10 * limits.ALIVE_S


def test_expected_survives_json(tmp_path):
    one = expected(tmp_path, services=[("reference", "http://a:1", "T")])
    job = json.loads(one.text())
    assert job["services"] == [["reference", "http://a:1", "T"]] and job["shared"][1] == "nonce"


# The recipe.


@pytest.mark.parametrize(
    ("given", "options", "settings"),
    [
        ([], [], []),
        (["trainer.total_epochs=1", "a=b c"], [], ["trainer.total_epochs=1", "a=b c"]),
        (["--service-wait", "9", "--", "x=1"], ["--service-wait", "9"], ["x=1"]),
        (["--wait=9", "--"], ["--wait=9"], []),
    ],
)
def test_script_of_the_guide_calls_the_launcher_in_its_folder(tmp_path, given, options, settings):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\npwd\nfor one; do echo "$one"; done\n')
    python.chmod(0o755)
    out = subprocess.run(
        [RECIPE / "scripts/launch_distributed.sh", *given],
        env={**os.environ, "PYTHON": str(python)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.splitlines()
    files = ["--nodes", "config/nodes.yaml", "--hostfile", "config/hostfile"]
    training = ["--config-path=config", "--config-name=train_grpo"]
    assert out[0] == str(RECIPE)
    command = ["-m", "verlite", "launch", "hostfile", *files, *options, "--", *training, *settings]
    assert out[1:] == command


def test_recipes_settings_are_valid_with_the_guides_files(project, monkeypatch, tmp_path):
    folder, arguments = project
    monkeypatch.chdir(RECIPE)
    data = [one for one in arguments if one.startswith(("data.train_files", "actor_rollout_ref.r"))]
    more = ["data.val_files=null", "trainer.test_freq=-1", "trainer.device=cpu"]
    more += ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", *data]
    options = ["--config-path=config", "--config-name=train_grpo"]
    files = folder / "config/nodes.yaml", folder / "config/hostfile"
    run, _ = plan_run(*files, [*options, *more], folder)
    assert compose(
        "train_grpo", [one for one in run.arguments if not one.startswith("--")], "config"
    ).config.actor_rollout_ref.actor.use_kl_loss


def test_a_missing_ssh_is_named(tmp_path):
    remote = Remote(["no-such-ssh"], sys.executable, str(tmp_path), {})
    with pytest.raises(ClusterError, match="--ssh: no-such-ssh cannot be run: No such file"):
        Session(remote, "host", [])
