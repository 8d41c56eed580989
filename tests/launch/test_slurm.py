"""`verlite launch slurm`: its scripts, what they do on signals and failures, and its refusals."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.launch import slurm_examples
from verlite.cli import app
from verlite.launch.slurm import SlurmJob, filled_in, limit_seconds, script
from verlite.launch.slurm_options import Options, Runtime

MODEL = [
    "data.train_files=data.parquet",
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
]


@pytest.mark.parametrize("name", sorted(slurm_examples.commands()))
def test_examples_are_what_their_commands_write(name, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    written = slurm_examples.write(slurm_examples.commands()[name])
    kept = (slurm_examples.FOLDER / name).read_text(encoding="utf-8")
    assert kept == written, "write them again: python -m tests.launch.slurm_examples"


@pytest.mark.parametrize("name", sorted(slurm_examples.commands()))
def test_examples_are_valid_bash(name):
    path = str(slurm_examples.FOLDER / name)
    assert subprocess.run(["bash", "-n", path], capture_output=True).stderr == b""
    if shutil.which("shellcheck"):
        # SC2317: functions that only a trap or another step calls
        done = subprocess.run(["shellcheck", "-e", "SC2317", path], capture_output=True, text=True)
        assert done.stdout == ""


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("90", 5400),
        ("2:30", 150),
        ("1:00:05", 3605),
        ("2-3", 183600),
        ("1-00:30", 88200),
        ("30-00:00:00", 2592000),
        ("0", 0),
        ("unlimited", 0),
        ("1h", None),
        ("1:2:3:4", None),
        ("", None),
    ],
)
def test_limits_have_the_meaning_of_slurm(limit, seconds):
    assert limit_seconds(limit) == seconds


GPUS = ["--gpus-per-node", "8"]
CPU = ["--", *MODEL, "trainer.device=cpu"]
REFUSED = {
    "two numbers of nodes": (
        ["--nodes", "2", *GPUS, "--", *MODEL, "trainer.nnodes=4"],
        ["--nodes=2", "trainer.nnodes=4 gives another number of machines"],
    ),
    "two numbers of GPUs": (
        ["--gpus-per-node", "8", "--", *MODEL, "cluster.num_gpus_per_node=4"],
        ["--gpus-per-node=8", "trainer.n_gpus_per_node=4 gives another number"],
    ),
    "no number of GPUs": (
        ["--nodes", "2", "--", *MODEL],
        ["--gpus-per-node", "must be given", "trainer.device=cpu"],
    ),
    "GPUs that are not used": (
        [*GPUS, *CPU],
        ["--gpus-per-node=8", "trainer.device=cpu would leave the GPUs unused"],
    ),
    "ROCm without GPUs": (["--rocm", *CPU], ["--rocm", "trainer.device=cpu uses no GPU"]),
    "too few cores": (
        [*GPUS, "--cpus-per-task", "4", "--", *MODEL],
        ["--cpus-per-task=4", "each of the 8 devices of a machine needs a core"],
    ),
    "a time in another format": (
        [*GPUS, "--time", "12h", "--", *MODEL],
        ["--time=12h", "is not a time of Slurm"],
    ),
    "grace as long as the limit": (
        [*GPUS, "--time", "5", "--grace", "300", "--", *MODEL],
        ["--grace=300", "--time=5 is not longer"],
    ),
    "memory in another unit": (
        [*GPUS, "--mem", "200GB", "--", *MODEL],
        ["--mem=200GB", "is not a size of Slurm"],
    ),
    "an output in a folder that does not exist": (
        [*GPUS, "--output", "log/%j.out", "--", *MODEL],
        ["--output=log/%j.out", "log does not exist"],
    ),
    "an option that the script sets": (
        [*GPUS, "--sbatch=--signal=USR1@60", "--", *MODEL],
        ["--sbatch=--signal=USR1@60", "Use --grace"],
    ),
    "an option of the same name": (
        [*GPUS, "--sbatch=--time=5", "--", *MODEL],
        ["--sbatch=--time=5", "Use --time."],
    ),
    "another file for errors": (
        [*GPUS, "--sbatch=--error=x", "--", *MODEL],
        ["--sbatch=--error=x", "Use --output"],
    ),
    "an environment of one's own": (
        [*GPUS, "--sbatch=--export=NONE", "--", *MODEL],
        ["--sbatch=--export=NONE", "sbatch passes its environment"],
    ),
    "a partition of two lines": (
        [*GPUS, "--partition", "a\nreboot", "--", *MODEL],
        ["--partition=a", "is not a name"],
    ),
    "an account with a space": (
        [*GPUS, "--account", "a b", "--", *MODEL],
        ["--account=a b", "is not a name"],
    ),
    "an empty qos": ([*GPUS, "--qos", "", "--", *MODEL], ["--qos=", "is not a name"]),
    "a name of two lines": (
        [*GPUS, "--job-name", "a\nreboot", "--", *MODEL],
        ["--job-name=a", "has more than one line"],
    ),
    "an output with a quote": (
        [*GPUS, "--output", 'a"b.out', "--", *MODEL],
        ['--output=a"b.out', "has a quote"],
    ),
    "a secret of a command": (
        [*GPUS, "--prepare", "cd x && HF_TOKEN='s3cr3t' python x", "--", *MODEL],
        ["--prepare=***", "this secret, HF_TOKEN", "Export HF_TOKEN in your shell"],
    ),
    "a secret of a command's option": (
        [*GPUS, "--prepare", "hf auth login --token s3cr3t", "--", *MODEL],
        ["--prepare=***", "this secret, token", 'write "$NAME" here'],
    ),
    "a secret of a command's URL": (
        [*GPUS, "--prepare", "git clone https://me:s3cr3t@host/x", "--", *MODEL],
        ["--prepare=***", "this secret, in a URL"],
    ),
    "a secret after an option": (
        [*GPUS, "--prepare", "podman run --env HF_TOKEN=s3cr3t x", "--", *MODEL],
        ["--prepare=***", "this secret, HF_TOKEN"],
    ),
    "a secret for sbatch alone": (
        [*GPUS, "--sbatch=--export=HF_TOKEN=s3cr3t", "--", *MODEL],
        ["--sbatch=***", "this secret, HF_TOKEN"],
    ),
    "a secret of a header": (
        [*GPUS, "--prepare", "curl -H 'Authorization: Bearer s3cr3t' x", "--", *MODEL],
        ["--prepare=***", "this secret, Authorization"],
    ),
    "a secret for sbatch": (
        [*GPUS, "--sbatch=--export=ALL,HF_TOKEN=s3cr3t", "--", *MODEL],
        ["--sbatch=***", "this secret, HF_TOKEN", "sbatch passes the environment"],
    ),
    "a secret of the interpreter": (
        [*GPUS, "--python", "env MY_SECRET=s3cr3t python", "--container", "i", "--", *MODEL],
        ["--python=***", "Export MY_SECRET", "add its name to passed=(...)"],
    ),
    "a short option": (
        [*GPUS, "--sbatch=-x node3", "--", *MODEL],
        ["--sbatch=-x node3", "is not a long option of sbatch"],
    ),
    "a runtime without an image": (
        [*GPUS, "--container-runtime", "docker", "--", *MODEL],
        ["--container-runtime=docker", "has no effect without --container"],
    ),
    "a relative mount": (
        [*GPUS, "--container", "image", "--mount", "data", "--", *MODEL],
        ["--mount=data", "is not an absolute path"],
    ),
    "a size of shared memory": (
        [*GPUS, "--container", "image", "--shm-size", "half", "--", *MODEL],
        ["--shm-size=half", "is not a size"],
    ),
    "a cluster of one's own": (
        [*GPUS, "--", *MODEL, "ray_kwargs.ray_init.address=10.0.0.1:6379"],
        ["ray_kwargs.ray_init.address=10.0.0.1:6379", "starts a Ray cluster of its own"],
    ),
    "progress that a new start would lose": (
        [*GPUS, "--", *MODEL, "trainer.resume_mode=disable"],
        ["trainer.resume_mode=disable", "--no-requeue"],
    ),
    "a secret": (
        [*GPUS, "--", *MODEL, "custom_reward_function.reward_kwargs.api_key=s3cr3t"],
        ["api_key=***", "the script would contain this secret", "oc.env"],
    ),
    "a key that does not exist": (
        [*GPUS, "--", *MODEL, "trainer.save_frq=3"],
        ["trainer.save_frq=3", "unknown key", "trainer.save_freq"],
    ),
    "a file that does not exist": (
        [*GPUS, "--", *MODEL],
        ["data.train_files=data.parquet", "does not exist"],
    ),
    "another program": (
        [*GPUS, "--", "python", "-m", "verlite.main_ppo", *MODEL],
        ["python", "is not an override"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_launch_lines_are_refused(name, tmp_path, monkeypatch, capsys):
    arguments, texts = REFUSED[name]
    monkeypatch.chdir(tmp_path)
    code = app(["launch", "slurm", *arguments], standalone_mode=False)
    errors = capsys.readouterr().err
    assert code == 2
    for text in texts:
        assert text in errors
    assert "s3cr3t" not in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--time", "0", "--grace", "600"],
        ["--time", "UNLIMITED"],
        ["--container", "image", "--shm-size", "64G"],
        ["--container", "image", "--shm-size", "64g"],
        ["--prepare", 'HF_TOKEN="$MY_TOKEN" hf auth login --token $(cat token)'],
        ["--prepare", "python x.py --image-key image --max_tokens=5 --use-token true sort_key=a"],
        ["--prepare", 'git clone "https://me:$TOKEN@host/x"'],
        ["--output", "a # b.out"],
    ],
)
def test_valid_options_are_accepted(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["launch", "slurm", *GPUS, "--prepare", "true", "--script=-", *arguments]
    assert not app([*command, "--", *MODEL], standalone_mode=False)
    written = capsys.readouterr().out
    assert ("no time limit" in written) is ("--time" in arguments)


def test_a_changed_script_is_not_replaced_unasked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["launch", "slurm", *GPUS, "--prepare", "true", "--job-name=run", "--", *MODEL]
    assert not app(command, standalone_mode=False)
    path = tmp_path / "run.sbatch"
    original = path.read_text()
    assert not app(command, standalone_mode=False)  # the same text again
    path.write_text(original + "# mine\n")
    assert app(command, standalone_mode=False) == 2
    assert "run.sbatch exists and differs. Use --overwrite" in capsys.readouterr().err
    assert path.read_text().endswith("# mine\n")
    command.insert(2, "--overwrite")
    assert not app(command, standalone_mode=False)
    assert path.read_text() == original


def test_submit_says_where_the_output_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    _program(tmp_path / "bin/sbatch", 'echo "$@" > submitted; echo "31;cluster"')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    command = ["launch", "slurm", *GPUS, "--prepare", "true", "--submit", "--", *MODEL]
    assert not app(command, standalone_mode=False)
    assert (tmp_path / "submitted").read_text() == "--parsable gsm8k.sbatch\n"
    printed = capsys.readouterr().out
    assert "submitted job 31" in printed
    assert f"tail -F {tmp_path}/slurm-31.out" in printed
    _program(tmp_path / "bin/sbatch", "echo 'sbatch: error: invalid account' >&2; exit 1")
    assert app(command, standalone_mode=False) == 1
    assert "sbatch refused gsm8k.sbatch: sbatch: error: invalid account" in capsys.readouterr().err


def test_submit_needs_sbatch(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    command = ["launch", "slurm", *GPUS, "--prepare", "true", "--submit", "--", *MODEL]
    assert app(command, standalone_mode=False) == 2
    assert "sbatch is not installed here" in capsys.readouterr().err


# The programs of Slurm that the script calls, on this machine. A step is a command per node; its
# process ids are in a file of its name.
SRUN = """
name='' nodes=node-0
while [[ $1 == --* ]]; do
    case $1 in
        --job-name=*) name=${1#*=} ;;
        --ntasks-per-node=*) nodes="node-0 node-1" ;;
    esac
    shift
done
echo "$name" >> steps
ids=() id=0
for node in $nodes; do
    SLURM_NODEID=$id SLURMD_NODENAME=$node "$@" &
    ids+=($!) id=$((id + 1))
done
echo "${ids[@]}" > "step.$name"
trap 'kill "${ids[@]}"' TERM
trap 'echo "USR2 to $name" >> signals; kill -USR2 "${ids[@]}"' USR2
code=0
for one in "${ids[@]}"; do
    wait "$one" || code=$?
    while kill -0 "$one" 2> /dev/null; do wait "$one" || code=$?; done
done
exit $code
"""
SQUEUE = 'for file in step.*; do echo "7.${file#step.} ${file#step.}"; done'
SCANCEL = """
echo "$1 $2" >> signals
kill "-${1#--signal=}" $(cat "step.${2#7.}")
echo 'scancel: error: Invalid job id specified' >&2
exit 225
"""
SCONTROL = """
case "$*" in
    *requeue*) echo requeued >> signals ;;
    *show*) echo "JobId=7 JobState=$(cat state)" ;;
esac
"""
PYTHON = """
case "$*" in
    *"verlite check"*) echo "$@" > checked; exit "$(cat check)" ;;
    *"cluster start"*)
        echo $$ >> "ray.$SLURM_NODEID"
        trap 'exit 143' TERM
        while :; do sleep 0.1; done ;;
    *"cluster check"*)
        until [ -s ray.0 ] && [ -s ray.1 ] && [ ! -e incomplete ]; do sleep 0.1; done ;;
    *main_ppo*)
        touch driving
        trap 'exit 75' TERM
        until [ -s driver ]; do sleep 0.1; done
        exit "$(cat driver)" ;;
esac
"""
# A container on this machine. The driver's starts when the test says so.
PODMAN = """
case $1 in
    run)
        trap 'exit 143' TERM
        while :; do sleep 0.1; done ;;
    exec)
        shift 2
        case "$*" in *main_ppo*)
            touch starting
            until [ -e go ]; do sleep 0.1; done ;;
        esac
        exec "${@//\\/tmp\\/driver.pid/driver.pid}" ;;
esac
"""


class FakeSlurm:
    """A job of two nodes on this machine."""

    def __init__(self, folder: Path, **changes):
        self.folder = folder
        for name, text in {
            "srun": SRUN,
            "squeue": SQUEUE,
            "scancel": SCANCEL,
            "scontrol": SCONTROL,
            "python3": PYTHON,
            "podman": PODMAN,
            "sleep": "exec /bin/sleep 0.1",
        }.items():
            _program(folder / "bin" / name, text)
        (folder / "state").write_text("RUNNING")
        (folder / "check").write_text("0")
        options = Options(nodes=2, job_name="verlite", python="python3", **changes)
        training = ("data.train_files=a b.parquet",)
        job = SlurmJob(filled_in(options, 1, False), training, str(folder), 1, False)
        (folder / "job.sbatch").write_text(script(job))
        environment = {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(folder),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "node-[0-1]",
            "SLURM_CPUS_PER_TASK": "1",
            "SLURMD_NODENAME": "node-0",
            "SLURM_RESTART_COUNT": os.environ.get("SLURM_RESTART_COUNT", ""),
        }
        self.process = subprocess.Popen(
            ["bash", "job.sbatch"],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + 20
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline and self.process.poll() is None, self.output()
            time.sleep(0.05)

    def output(self) -> str:
        return self.process.communicate(timeout=60)[0]

    def read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""


@pytest.fixture
def slurm(tmp_path):
    started = []

    def start(**changes):
        started.append(FakeSlurm(tmp_path, **changes))
        return started[-1]

    yield start
    for one in started:
        try:
            os.killpg(one.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


@pytest.mark.process
def test_job_ends_with_the_exit_code_of_the_run_and_leaves_nothing(slurm):
    job = slurm(prepare=("touch 'prepared first'",))
    job.wait_for("driving")
    steps = job.read("steps").split()  # ray and wait start at the same time
    assert steps[:2] + sorted(steps[2:4]) + steps[4:] == "prepare check ray wait driver".split()
    assert (job.folder / "prepared first").exists()
    assert "data.train_files=a b.parquet trainer.nnodes=2" in job.read("checked")
    assert (job.folder / ".verlite-job-7").stat().st_mode & 0o777 == 0o700
    (job.folder / "driver").write_text("3")
    assert "back into the queue" not in job.output()
    assert job.process.returncode == 3
    assert "probe" in job.read("steps")  # all nodes answer: a new start would fail again
    assert "USR2 to ray" in job.read("signals") and "requeued" not in job.read("signals")
    assert not (job.folder / ".verlite-job-7").exists()
    for rank in (0, 1):
        for line in job.read(f"ray.{rank}").split():
            assert not Path(f"/proc/{line}").exists()


@pytest.mark.process
@pytest.mark.parametrize(("restarts", "requeued"), [("", True), ("19", True), ("20", False)])
def test_a_lost_node_that_answers_again_still_starts_the_job_again(
    slurm, monkeypatch, restarts, requeued
):
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    job = slurm()
    job.wait_for("driving")
    (job.folder / "driver").write_text("76")
    assert ("a process or a node was lost: back into the queue" in job.output()) is requeued
    assert job.process.returncode == 76
    assert ("requeued" in job.read("signals")) is requeued


@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "state", "requeued"),
    [
        (signal.SIGTERM, "RUNNING", True),
        (signal.SIGTERM, "CANCELLED", False),
        (signal.SIGUSR1, "RUNNING", False),
    ],
)
def test_a_signal_reaches_the_driver_and_the_job_starts_again(slurm, number, state, requeued):
    job = slurm()
    job.wait_for("driving")
    (job.folder / "state").write_text(state)
    job.process.send_signal(number)
    output = job.output()
    assert f"{number.name}: stopping" in output
    assert job.process.returncode == 75
    signals = job.read("signals").splitlines()
    assert signals[:2] == ["--signal=TERM 7.driver", "USR2 to ray"]
    assert ("requeued" in signals) is requeued


@pytest.mark.process
def test_a_stop_before_the_driver_has_started_in_its_container_reaches_it(slurm, tmp_path):
    with subprocess.Popen(["/bin/sleep", "60"]) as other:
        (tmp_path / "driver.pid").write_text(f"{other.pid}\n")  # stale
        job = slurm(container="image")
        job.wait_for("starting")
        job.process.send_signal(signal.SIGTERM)
        job.wait_for("signals")
        time.sleep(0.5)  # the step tries to pass it on
        is_alive = other.poll() is None
        other.kill()
    assert is_alive
    (job.folder / "go").touch()
    assert "back into the queue" in job.output()
    assert job.process.returncode == 75
    assert job.read("signals").splitlines()[0] == "--signal=TERM 7.driver"


@pytest.mark.process
def test_pre_emption_that_only_steps_see_starts_the_job_again(slurm):
    job = slurm()
    job.wait_for("driving")
    for name in ("ray", "driver"):  # Ray's step must ignore it
        for process in job.read(f"step.{name}").split():
            os.kill(int(process), signal.SIGTERM)
    assert "back into the queue" in job.output()
    assert job.process.returncode == 75
    assert "USR2 to ray" in job.read("signals")


@pytest.mark.process
def test_a_wrong_configuration_ends_the_job_before_ray_starts(slurm):
    job = slurm(prepare=("echo 2 > check",))
    job.output()
    assert job.process.returncode == 2
    assert job.read("steps").split() == ["prepare", "check"]


@pytest.mark.process
def test_the_end_of_ray_on_a_node_ends_the_job_with_the_node_named(slurm):
    job = slurm(prepare=("touch incomplete",))
    job.wait_for("ray.1")
    os.kill(int(job.read("ray.1")), signal.SIGTERM)
    assert "Ray on node-1 ended, exit code 143" in job.output()
    assert job.process.returncode not in (0, 75)
    assert "driver" not in job.read("steps")


def test_containers_get_no_secret_on_a_command_line():
    options = Options(nodes=2, job_name="a", container="image", container_runtime=Runtime.docker)
    text = script(SlurmJob(filled_in(options, 8, True), ("a=1",), "/shared", 8, True))
    assert "--user=" in text and "--gpus=all" in text and "--privileged" not in text
    assert "WANDB_API_KEY" in text and "WANDB_API_KEY=" not in text


WORD = 'it\'s $(reboot) `x`; "y" # \\'


def test_every_text_is_one_word_of_the_script(tmp_path):
    """Bash reads back what the options say."""
    options = Options(nodes=1, job_name="a", python=WORD, container=WORD, mount=(f"/{WORD}",))
    options = filled_in(options, 1, False)
    text = script(SlurmJob(options, (WORD,), "/shared", 1, False, (), (("NAME", WORD),)))
    inner = text[text.index("devices=") : text.index("# Files that the nodes share")]
    container = text[text.index("runtime=") : text.index("container_node()")]
    show = 'printf "%s\\0" "${train[0]}" "$python" "$NAME" "$image" "${container_options[6]}"'
    done = subprocess.run(
        ["bash", "-c", f"{inner}\n{container}\n{show}"],
        capture_output=True,
        cwd=tmp_path,
        check=True,
    )
    words = done.stdout.decode().split("\0")[:-1]
    assert words == [WORD, WORD, WORD, WORD, f"--volume=/{WORD}:/{WORD}"]


def _program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
