"""The options of `verlite launch slurm`, each declared once: the command shows and reads them, and
verlite/launch/slurm.py checks them and fills in their defaults."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from typer import Option


class Runtime(StrEnum):
    """Programs that run containers."""

    podman = "podman"
    docker = "docker"


@dataclass(frozen=True)
class Options:
    """What the user asked for. None: not given."""

    # fmt: off
    nodes: Annotated[int | None, Option(min=1, help="Machines. Default: trainer.nnodes.")] = None
    gpus_per_node: Annotated[int | None, Option(min=1,
        help="GPUs of a machine. Without GPUs: trainer.device=cpu.")] = None
    cpus_per_task: Annotated[int | None, Option(min=1,
        help="Cores of a machine. Default: 4 per GPU, or 1 per CPU slot.")] = None
    mem: Annotated[str, Option(help="Memory of a machine, such as 200G. 0: all.")] = "0"
    time: Annotated[str | None, Option(metavar="D-HH:MM:SS",
        help="Time limit. Default: the partition's.")] = None
    partition: Annotated[str | None, Option(help="Slurm's partition.")] = None
    account: Annotated[str | None, Option(help="Account to charge.")] = None
    qos: Annotated[str | None, Option(help="Quality of service.")] = None
    sbatch: Annotated[tuple[str, ...], Option(metavar="OPTION",
        help="One more option, such as --sbatch=--exclusive.")] = ()
    job_name: Annotated[str | None, Option(help="Default: trainer.experiment_name.",
        show_default=False)] = None
    output: Annotated[str, Option(metavar="FILE",
        help="The job's output; %j is its number.")] = "slurm-%j.out"
    grace: Annotated[int, Option(min=10, max=65535, metavar="SECONDS",
        help="Stop with a checkpoint this long before the time limit.")] = 300
    requeue: Annotated[bool, Option(
        help="Start again after a stop with a checkpoint, and if a node is lost.")] = True
    prepare: Annotated[
        tuple[str, ...],
        Option(
            metavar="COMMAND",
            help="Run this on the first node before Ray starts, such as a data_preprocess script.",
        ),
    ] = ()
    container: Annotated[str | None, Option(metavar="IMAGE",
        help="Run everything in this image.")] = None
    container_runtime: Annotated[Runtime | None, Option(help="Default: podman.",
        show_default=False)] = None
    mount: Annotated[tuple[str, ...], Option(metavar="FOLDER",
        help="A folder that containers see, besides the home and the working folder.")] = ()
    shm_size: Annotated[str | None, Option(metavar="SIZE",
        help="Limit of /dev/shm in containers. Default: 128g.")] = None
    rocm: Annotated[bool, Option("--rocm", help="The GPUs are AMD's.")] = False
    python: Annotated[str | None, Option(
        help="Interpreter with verlite. Default: this one; python3 in a container.")] = None
    # fmt: on
