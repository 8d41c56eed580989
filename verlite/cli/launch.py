"""Commands that start training: launch (on several machines, after checking the training command)
and supervise (again after failures that may pass).
"""

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from verlite.cli.common import TrainingArguments, fail, failing, from_data_classes, refuse
from verlite.files import replace_file
from verlite.launch.slurm_options import Options

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Train on several machines: by Slurm, or by ssh. docs/cluster.md",
)


@app.command()
@from_data_classes
def slurm(
    options: Options,
    arguments: TrainingArguments = None,
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
    from verlite.config.problems import ConfigError, notes_text
    from verlite.launch.slurm import plan_job
    from verlite.launch.slurm import script as script_text
    from verlite.terminal import console

    out = console(stderr=script == Path("-"))
    try:
        job, notes = plan_job(options, arguments or [])
    except ConfigError as error:
        refuse(error)
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
    path = script or Path(f"{job.options.job_name}.sbatch")
    _write(path, text, overwrite)
    say = typer.echo
    say(f"wrote {path}")
    if not submit:
        say(f"submit it: sbatch {shlex.quote(str(path))}")
        return
    number = _submit(path)
    output = job.options.output.replace("%j", number).replace("%x", job.options.job_name or "")
    log = Path(job.folder, output)
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
    from verlite.config.problems import ConfigError, notes_text
    from verlite.launch import ClusterError
    from verlite.launch.hosts import Launcher, own_python, passed_environment, plan_run
    from verlite.launch.session import Remote
    from verlite.terminal import console

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
        refuse(error)
    if notes:
        console().print(notes_text(notes), soft_wrap=True)
    environment = passed_environment(os.environ)
    tokens = [variable for _, _, variable in job.services if variable in os.environ]
    environment |= {name: os.environ[name] for name in [*tokens, *(env or [])]}
    remote = Remote(ssh_words, python or own_python(), os.getcwd(), environment)
    with failing(ClusterError, code=1):
        code = Launcher(job, remote, _say, wait, service_wait).run()
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


def supervise(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="What to run.")],
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Restarts in a row without a new checkpoint.")
    ] = 10,
    same_step: Annotated[
        int, typer.Option(min=0, help="Give up after this many failures at one step. 0: no limit.")
    ] = 3,
) -> None:
    """Run a training command, and start it again after a stop or a failure that may pass.

    verlite supervise -- python -m verlite.main_ppo key=value ...

    Exit codes 75 and 76, and a process that was killed, lead to a restart, after a growing pause.
    Signals are passed on to the command, and there is no restart after them. docs/failures.md
    """
    from verlite.files import tolerate_full_disk
    from verlite.launch.supervise import supervise as run
    from verlite.terminal import clean_output

    tolerate_full_disk()  # nor a closed terminal
    clean_output()  # again, for the streams of the line above
    try:
        code = run(
            command,
            max_restarts,
            same_step,
            lambda text: typer.echo(f"supervise: {text}", err=True),
        )
    except OSError as error:
        fail(f"cannot run {shlex.join(command)}: {error.strerror}")
    raise typer.Exit(code)
