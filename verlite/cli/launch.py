"""`verlite launch`: train on several machines, after checking the training command."""

import os
import shlex
import shutil
import subprocess
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from verlite.cli.common import TrainingArguments, fail
from verlite.files import replace_file

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Train on several machines: by Slurm, or by ssh. docs/cluster.md",
)


class Runtime(StrEnum):
    """Programs that run containers."""

    podman = "podman"
    docker = "docker"


@app.command()
def slurm(
    arguments: TrainingArguments = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Machines. Default: trainer.nnodes.")
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(min=1, help="GPUs of a machine. Without GPUs: trainer.device=cpu."),
    ] = None,
    cpus_per_task: Annotated[
        int | None,
        typer.Option(min=1, help="Cores of a machine. Default: 4 per GPU, or 1 per CPU slot."),
    ] = None,
    mem: Annotated[str, typer.Option(help="Memory of a machine, such as 200G. 0: all.")] = "0",
    time: Annotated[
        str | None, typer.Option(metavar="D-HH:MM:SS", help="Time limit. Default: the partition's.")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm's partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Account to charge.")] = None,
    qos: Annotated[str | None, typer.Option(help="Quality of service.")] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="One more option, such as --sbatch=--exclusive."),
    ] = None,
    job_name: Annotated[
        str | None, typer.Option(help="Default: trainer.experiment_name.", show_default=False)
    ] = None,
    output: Annotated[
        str, typer.Option(metavar="FILE", help="The job's output; %j is its number.")
    ] = "slurm-%j.out",
    grace: Annotated[
        int,
        typer.Option(
            min=10,
            max=65535,
            metavar="SECONDS",
            help="Stop with a checkpoint this long before the time limit.",
        ),
    ] = 300,
    requeue: Annotated[
        bool,
        typer.Option(help="Start again after a stop with a checkpoint, and if a node is lost."),
    ] = True,
    prepare: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COMMAND",
            help="Run this on the first node before Ray starts, such as a data_preprocess script.",
        ),
    ] = None,
    container: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="Run everything in this image.")
    ] = None,
    container_runtime: Annotated[
        Runtime | None, typer.Option(help="Default: podman.", show_default=False)
    ] = None,
    mount: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FOLDER",
            help="A folder that containers see, besides the home and the working folder.",
        ),
    ] = None,
    shm_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Limit of /dev/shm in containers. Default: 128g."),
    ] = None,
    rocm: Annotated[bool, typer.Option("--rocm", help="The GPUs are AMD's.")] = False,
    python: Annotated[
        str | None,
        typer.Option(help="Interpreter with verlite. Default: this one; python3 in a container."),
    ] = None,
    script: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to write. Default: JOB_NAME.sbatch; -: stdout."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the script.")] = False,
    submit: Annotated[bool, typer.Option("--submit", help="Submit the script.")] = False,
) -> None:
    """Write a Slurm script that trains with these arguments on several nodes. Exit code 2 if the
    options or the configuration are invalid.

    Example: verlite launch slurm --nodes 2 --gpus-per-node 8 --time 1-00:00:00 --submit --
    --config-name grpo data.train_files=...
    """
    from verlite.config.problems import ConfigError
    from verlite.config.show import console, notes_text
    from verlite.launch.slurm import script as script_text
    from verlite.launch.slurm_options import Options, plan_job

    options = Options(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        cpus_per_task=cpus_per_task,
        mem=mem,
        time=time,
        partition=partition,
        account=account,
        qos=qos,
        sbatch=tuple(sbatch or ()),
        job_name=job_name,
        output=output,
        grace_s=grace,
        requeue=requeue,
        prepare=tuple(prepare or ()),
        container=container,
        runtime=container_runtime.value if container_runtime else None,
        mounts=tuple(mount or ()),
        shm_size=shm_size,
        rocm=rocm,
        python=python,
        folder=os.getcwd(),
    )
    out = console(stderr=script == Path("-"))
    try:
        job, notes = plan_job(options, arguments or [])
    except ConfigError as error:
        console(stderr=True).print(error.text(), soft_wrap=True, end="")
        raise typer.Exit(2) from None
    if submit and shutil.which("sbatch") is None:
        fail("--submit: sbatch is not installed here. Submit from a login node of the cluster.")
    if notes:
        out.print(notes_text(notes), soft_wrap=True)
    text = script_text(job)
    if script == Path("-"):
        if submit:
            fail("--submit: needs a file; --script=- writes to the terminal.")
        print(text, end="")
        return
    path = script or Path(f"{job.name}.sbatch")
    _write(path, text, overwrite)
    say = typer.echo
    say(f"wrote {path}")
    if not submit:
        say(f"submit it: sbatch {shlex.quote(str(path))}")
        return
    number = _submit(path)
    log = Path(job.folder, job.output.replace("%j", number).replace("%x", job.name))
    say(f"submitted job {number}")
    say(f"output:     tail -F {shlex.quote(str(log))}")
    say(f"state:      squeue --jobs={number}")
    say(f"checkpoint and stop: scancel --batch --signal=USR1 {number}")
    say(f"end now:    scancel {number}")


@app.command()
def hostfile(
    arguments: TrainingArguments = None,
    nodes: Annotated[
        Path, typer.Option(metavar="FILE", help="Master node, services and models.")
    ] = Path("config/nodes.yaml"),
    hostfile: Annotated[
        Path, typer.Option(metavar="FILE", help="Training hosts: HOST slots=N on each line.")
    ] = Path("config/hostfile"),
    ssh: Annotated[
        str, typer.Option(metavar="COMMAND", help="With options, such as 'ssh -F FILE'.")
    ] = "ssh",
    python: Annotated[
        str | None,
        typer.Option(help="Interpreter with verlite on all hosts. Default: this one's path."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="One more environment variable that the hosts get."),
    ] = None,
    wait: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="How long Ray's start may take.")
    ] = 600,
    service_wait: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="How long to wait for services to be healthy."),
    ] = 0,
) -> None:
    """Train on the hosts of a DeepSpeed hostfile, over ssh. The exit code is the run's.

    Example: verlite launch hostfile --nodes config/nodes.yaml --hostfile config/hostfile --
    --config-name grpo data.train_files=...
    """
    from verlite.config.problems import ConfigError
    from verlite.config.show import console, notes_text
    from verlite.launch.errors import ClusterError
    from verlite.launch.hosts_plan import passed_environment, plan_run
    from verlite.launch.hosts_run import launch, own_python
    from verlite.launch.session import Remote

    missing = [name for name in env or [] if name not in os.environ]
    if missing:
        fail(f"--env {missing[0]}: this variable is not set here.")
    try:
        ssh_words = shlex.split(ssh)
    except ValueError as error:
        fail(f"--ssh {ssh}: cannot be read as a command: {error}")
    if not ssh_words:
        fail("--ssh: must name a command, such as 'ssh -F FILE'")
    try:
        job, notes = plan_run(nodes, hostfile, arguments or [], Path.cwd())
    except ConfigError as error:
        console(stderr=True).print(error.text(), soft_wrap=True, end="")
        raise typer.Exit(2) from None
    if notes:
        console().print(notes_text(notes), soft_wrap=True)
    environment = passed_environment(os.environ)
    tokens = [variable for _, _, variable in job.services if variable in os.environ]
    environment |= {name: os.environ[name] for name in [*tokens, *(env or [])]}
    remote = Remote(ssh_words, python or own_python(), os.getcwd(), environment)
    try:
        code = launch(job, remote, _say, wait, service_wait)
    except ClusterError as error:
        fail(error, code=1)
    raise typer.Exit(code)


def _say(text: str) -> None:
    print(f"[launch] {text}", flush=True)


def _write(path: Path, text: str, overwrite: bool) -> None:
    """Write the script. A file that someone may have changed is not replaced unasked."""
    try:
        if path.exists() and not overwrite and path.read_text(encoding="utf-8") != text:
            fail(f"{path} exists and differs. Use --overwrite, or another --script FILE.")
        replace_file(path, text)
    except OSError as error:
        fail(f"{path} cannot be written: {error.strerror}.")


def _submit(path: Path) -> str:
    """Submit the script and return the number of the job."""
    command = ["sbatch", "--parsable", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        fail(f"sbatch refused {path}: {done.stderr.strip()}", code=1)
    return done.stdout.strip().partition(";")[0]
