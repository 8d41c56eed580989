"""Write the script of a Slurm job that trains on several nodes.

The script runs Ray in a background step, one Ray node per machine, and the driver in a step on the
first node. Slurm's signals reach the driver, which writes a checkpoint and exits with 75; the
script then puts the job back into the queue. It is meant to be read and changed by its user.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

RUNTIMES = ("podman", "docker")
PASSED = (
    "VERLITE_CLUSTER_DIR",
    "VERLITE_VERL_COMPAT",
    "HOME",
    "USER",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
    "HF_HOME",
    "HF_TOKEN",
    "HF_HUB_OFFLINE",
    "WANDB_API_KEY",
    "NCCL_DEBUG",
    "NCCL_IB_HCA",
    "NCCL_IB_GID_INDEX",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
)
"""Environment variables that a container gets from the job."""
VISIBLE = {
    False: ("CUDA_VISIBLE_DEVICES",),
    True: ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "HSA_NO_SCRATCH_RECLAIM"),
}
"""The same for GPUs, by whether they are AMD's."""


@dataclass(frozen=True)
class Container:
    """The container that everything of the job runs in.

    Attributes:
        image: name of the image, which every node has or can pull.
        runtime: podman or docker.
        mounts: folders of the machine, besides the home and the working folder. They have the
            same path in the container.
        shm_size: limit of /dev/shm, which holds Ray's objects and NCCL's buffers.
    """

    image: str
    runtime: str = "podman"
    mounts: tuple[str, ...] = ()
    shm_size: str = "128g"


@dataclass(frozen=True)
class Job:
    """A Slurm job that runs verlite.main_ppo.

    Attributes:
        arguments: arguments of main_ppo, without trainer.nnodes and trainer.n_gpus_per_node.
        folder: working folder, on a file system that all nodes share.
        devices_per_node: GPUs, or CPU slots if `gpus` is False.
        cpus_per_task: cores of a node.
        mem: memory of a node; "0" is all of it.
        time: time limit as Slurm writes it. None: the partition's; "0" or UNLIMITED: no limit.
        options: further options of sbatch, such as --nodelist=gpu-[0-3].
        output: the job's output file, with Slurm's patterns such as %j.
        grace_s: seconds before the time limit at which the job is told to stop. Unused without a
            limit.
        requeue: put the job back into the queue after a stop and after the loss of a node.
        prepare: shell commands that run once, on the first node, before Ray starts.
        downloads: models on the Hugging Face hub.
        python: the interpreter that has verlite.
        environment: names and values that the script exports.
        rocm: the GPUs are AMD's.
    """

    arguments: tuple[str, ...]
    folder: str
    nodes: int
    devices_per_node: int
    gpus: bool
    cpus_per_task: int
    name: str = "verlite"
    mem: str = "0"
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    options: tuple[str, ...] = ()
    output: str = "slurm-%j.out"
    grace_s: int = 300
    requeue: bool = True
    prepare: tuple[str, ...] = ()
    downloads: tuple[str, ...] = ()
    python: str = "python3"
    environment: tuple[tuple[str, str], ...] = ()
    container: Container | None = None
    rocm: bool = False


def limit_seconds(limit: str) -> int | None:
    """Return a time limit of Slurm in seconds, 0 for no limit, or None if it is not one.

    Slurm's forms are M, M:S, H:M:S, D-H, D-H:M, D-H:M:S, UNLIMITED and INFINITE. 0 means no limit.
    """
    if limit.upper() in ("UNLIMITED", "INFINITE"):
        return 0
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if not found:
        return None
    days, *rest = found.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is None and len(parts) < 3:
        parts = [0, *parts]
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def script(job: Job) -> str:
    """Return the text of the sbatch script."""
    parts = [
        "\n".join(_header(job)),
        "set -uo pipefail",
        _training(job),
        "\n".join(_environment(job)),
        SHARED_FILES,
        STEPS.replace("@REQUEUE@", "yes" if job.requeue else ""),
        _container(job, job.container) if job.container else IN_JOB,
        RAY.replace("@WAIT@", WAIT_FOR_CONTAINER if job.container else ""),
        FINISH,
        _main(job),
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _header(job: Job) -> Iterator[str]:
    nodes = "1 node" if job.nodes == 1 else f"{job.nodes} nodes"
    kind = "GPU" if job.gpus else "CPU slot"
    devices = f"{job.devices_per_node} {kind}" + ("s" if job.devices_per_node > 1 else "")
    yield "#!/bin/bash"
    yield f"# Train with verlite on {nodes}, {devices} each. Submit this file with sbatch."
    yield "# `verlite launch slurm` wrote it. Read it, change it, keep it."
    yield "#"
    yield f"#SBATCH --job-name={job.name}"
    yield f"#SBATCH --nodes={job.nodes}"
    yield "#SBATCH --ntasks-per-node=1"
    if job.gpus:
        yield f"#SBATCH --gpus-per-node={job.devices_per_node}"
    yield f"#SBATCH --cpus-per-task={job.cpus_per_task}"
    yield f"#SBATCH --mem={job.mem}"
    for name in ("time", "partition", "account", "qos"):
        value = getattr(job, name)
        if value is not None:
            yield f"#SBATCH --{name}={value}"
    for option in job.options:
        yield f"#SBATCH {option}"
    yield "#"
    yield "# All nodes must see this folder. The folder of the output must exist."
    yield f"#SBATCH --chdir={_sbatch_quote(job.folder)}"
    yield f"#SBATCH --output={_sbatch_quote(job.output)}"
    yield "# A job that starts again continues its output file."
    yield "#SBATCH --open-mode=append"
    yield "#SBATCH --requeue" if job.requeue else "#SBATCH --no-requeue"
    if job.time is not None and limit_seconds(job.time) == 0:
        yield "# The job has no time limit, so this is unused. If it gets one, TERM reaches this"
        yield f"# script (B:) and no step {job.grace_s} s before it."
    else:
        before = f"{job.grace_s} s before the time limit"
        yield f"# {before}, TERM reaches this script (B:) and no step. One"
        yield "# training step and a checkpoint must fit into that time."
    yield f"#SBATCH --signal=B:TERM@{job.grace_s}"


def _sbatch_quote(text: str) -> str:
    """Quote a path for an #SBATCH line, where a # would start a comment."""
    return f'"{text}"' if re.search(r"[\s#]", text) else text


def _training(job: Job) -> str:
    lines = [
        *(shlex.quote(argument) for argument in job.arguments),
        'trainer.nnodes="$SLURM_JOB_NUM_NODES"',
        'trainer.n_gpus_per_node="$devices"',
    ]
    listed = "\n".join(f"    {line}" for line in lines)
    if job.gpus:
        count = (
            "# GPUs of a node. Slurm may put a type before the number, as in a100:8.\n"
            "devices=${SLURM_GPUS_PER_NODE##*:}\ngpus=$devices"
        )
    else:
        count = (
            f"# CPU slots of a node that train, of $SLURM_CPUS_PER_TASK.\n"
            f"devices={job.devices_per_node}\ngpus=0"
        )
    return f"{count}\n\n# The arguments of verlite.main_ppo.\ntrain=(\n{listed}\n)"


def _environment(job: Job) -> Iterator[str]:
    yield f"python={shlex.quote(job.python)}"
    if "/" in job.python:
        yield 'PATH=$(dirname "$python"):$PATH'
    yield "export PYTHONUNBUFFERED=1"
    for name, value in job.environment:
        yield f"export {name}={shlex.quote(value)}"
    if job.rocm:
        yield "# GPU kernels keep their scratch memory instead of allocating it in each launch."
        yield "export HSA_NO_SCRATCH_RECLAIM=1"


SHARED_FILES = """
# Files that the nodes share while the job runs: the address of Ray's head, and the token without
# which Ray refuses connections. Only you can read them.
job_dir=$PWD/.verlite-job-$SLURM_JOB_ID
rm -rf "$job_dir"
mkdir -m 700 "$job_dir" || exit 1
trap 'rm -rf "$job_dir"' EXIT

# For each job, a port of its own and on each node a folder of its own.
port=$((20000 + SLURM_JOB_ID % 10000))
export VERLITE_CLUSTER_DIR=/tmp/verlite-job-$SLURM_JOB_ID
"""

STEPS = """
# --- Steps and signals

# yes: back into the queue after a stop, and after the loss of a node
requeue=@REQUEUE@
stopped=       # name of the signal that has arrived
current=       # name of the step that runs on the first node
background=()  # process ids of the sruns of steps on all nodes
lost=$job_dir/lost

# This script, Ray's head and the driver run on the first node. --overlap: steps share the job's
# cores, memory and GPUs.
on_first=(--overlap --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME"
    --cpus-per-task="$SLURM_CPUS_PER_TASK")
on_all=(--overlap --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1
    --cpus-per-task="$SLURM_CPUS_PER_TASK" --label)

# signal_step NAME SIGNAL. scancel reaches the program of a step; TERM to srun would kill the step.
# Slurm 22.05 delivers the signal and then complains about the id.
signal_step() {
    local id
    id=$(squeue --steps --noheader --jobs="$SLURM_JOB_ID" --format="%i %j" |
        awk -v name="$1" '$2 == name {print $1}')
    [ -n "$id" ] || return 1  # the step has not started yet
    scancel --signal="$2" "$id" 2> /dev/null
    return 0
}

# Slurm sends TERM before the time limit. To stop with a checkpoint and stay stopped, send USR1:
# scancel --batch --signal=USR1 JOB
stop() {
    stopped=$1
    echo "SIG$1: stopping"
}
trap 'stop TERM' TERM
trap 'stop USR1' USR1

# run NAME COMMAND...: run a step on the first node and return its exit code. A stop reaches it as
# one TERM. If Ray or a container ends, it has `patience` seconds to report the cause.
patience=0
run() {
    local step told='' since='' killed=''
    [ -z "$stopped" ] || return 75
    current=$1
    shift
    srun --job-name="$current" "${on_first[@]}" "$@" &
    step=$!
    while kill -0 "$step" 2> /dev/null; do
        sleep 1  # bash handles signals after it
        if [ -n "$stopped" ] && [ -z "$told" ] && signal_step "$current" TERM; then
            told=yes
        fi
        if [ -z "$since" ] && [ -s "$lost" ]; then
            cat "$lost" >&2
            since=$SECONDS
        fi
        if [ -n "$since" ] && [ $((SECONDS - since)) -ge "$patience" ]; then
            killed=yes
            kill "$step" 2> /dev/null  # srun then ends the step
        fi
    done
    [ -z "$killed" ] || return 1
    wait "$step"
}

# stay NAME COMMAND...: run a command in a step on all nodes until the end of the job sends USR2.
# Pre-emption sends TERM to all steps. It is ignored here, because the driver needs Ray for its
# checkpoint.
stay() {
    local process code ending='' name=$1
    shift
    trap : TERM
    trap 'ending=yes; kill -TERM "$process"' USR2
    "$@" &
    process=$!
    while kill -0 "$process" 2> /dev/null; do sleep 1; done
    wait "$process"
    code=$?
    [ -n "$ending" ] || echo "$name on $SLURMD_NODENAME ended, exit code $code" >> "$lost"
}
"""

IN_JOB = """
in_job=()  # what comes before a command to run it where the training runs: nothing
"""

RAY = """
# --- Ray: one node of it per machine

ray_node() {@WAIT@
    stay Ray "${in_job[@]}" "$python" -m verlite cluster start --block --rank="$SLURM_NODEID" \\
        --shared="$job_dir" --port="$port" --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="$gpus"
    rm -rf "$VERLITE_CLUSTER_DIR"
}
"""

WAIT_FOR_CONTAINER = """
    until "${in_job[@]}" true 2> /dev/null; do sleep 1; done"""

FINISH = """
# finish CODE: end Ray, and start the job again where that continues the training.
finish() {
    local code=$1 again='' i
    # 75: stopped with a checkpoint; 143: a step that ended by TERM; with a stop also 130: a driver
    # that had nothing to save yet.
    if [[ $code =~ ^(75|143)$ ]] || [[ $stopped$code =~ ^(TERM|USR1)130$ ]]; then
        code=75
        [ "$stopped" = USR1 ] || again="stopped"
    # 76: a process or a node was lost, also one that answers again
    elif [ "$code" = 76 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]; then
        again="a process or a node was lost"
    elif [ "$code" != 0 ] && [ "$code" != 2 ] && [ -n "$requeue" ] && ! all_nodes_answer; then
        again="a node does not answer"
    fi
    rm -rf "$job_dir"
    for ((i = 0; i < 20; i++)); do
        kill -0 "${background[@]}" 2> /dev/null || break
        # srun passes USR2 on to its step, also after scancel JOB
        [ $((i % 10)) -gt 0 ] || kill -USR2 "${background[@]}" 2> /dev/null
        sleep 1
    done
    # A canceled job is no longer RUNNING, and must not come back.
    if [ -n "$requeue" ] && [ -n "$again" ] &&
        scontrol --oneliner show job "$SLURM_JOB_ID" | grep -q "JobState=RUNNING"; then
        echo "$again: back into the queue"
        scontrol requeue "$SLURM_JOB_ID" && sleep 60  # Slurm ends this script
    fi
    exit "$code"
}

all_nodes_answer() {
    timeout --kill-after=5 30 srun --job-name=probe "${on_all[@]}" true
}
"""


def _container(job: Job, container: Container) -> str:
    runtime = container.runtime
    options = [
        "--network=host  # Ray and NCCL use the interfaces of the machine",
        f"--shm-size={container.shm_size}  # Ray's objects and NCCL's buffers",
        "--pids-limit=-1  # podman's default of 2048 threads is too few for Ray",
        '--volume="$PWD:$PWD" --workdir="$PWD"',
        '--volume="$HOME:$HOME"',
        *(f"--volume={shlex.quote(f'{mount}:{mount}')}" for mount in container.mounts),
    ]
    if runtime == "docker":
        options.append('--user="$(id -u):$(id -g)"  # files belong to you, not to root')
    if job.rocm:
        keep = "keep-groups" if runtime == "podman" else "video"
        options += [
            "--device=/dev/kfd --device=/dev/dri",
            f"--group-add={keep}  # of the GPUs' device files",
            "--cap-add=SYS_PTRACE --security-opt=seccomp=unconfined  # GPUs share memory by ptrace",
        ]
    elif job.gpus:
        options.append("--gpus=all" if runtime == "docker" else "--device=nvidia.com/gpu=all")
    names = [*PASSED, *(VISIBLE[job.rocm] if job.gpus else ())]
    return f"""
# --- The container, one per machine. Every command of the job runs in it.

runtime={runtime}
image={shlex.quote(container.image)}
container=verlite-$SLURM_JOB_ID

# Variables that the container gets from the job, as far as they are set. Their values are on no
# command line.
passed=({chr(10).join(_wrapped(names))})
container_options=(
{chr(10).join("    " + option for option in options)}
)
container_options+=("${{passed[@]/#/--env=}}")
if [ -e /dev/infiniband ]; then
    container_options+=(--device=/dev/infiniband --ulimit=memlock=-1)
fi
{CONTAINER}"""


CONTAINER = """
container_node() {
    "$runtime" rm --force "$container" &> /dev/null
    # bash ends at TERM and reaps orphans, which sleep as the first process of a container does not
    stay Container "$runtime" run --rm --name="$container" "${container_options[@]}" "$image" \\
        bash -c "trap exit TERM; sleep infinity & wait"
    "$runtime" rm --force "$container" &> /dev/null
}

# What comes before a command to run it where the training runs.
in_job=("$runtime" exec "$container")

# `exec` passes no signal on to the program, so this does, as soon as the program has started.
driver() {
    local process stopping=''
    trap 'stopping=yes' TERM
    "${in_job[@]}" rm -f /tmp/driver.pid || return $?
    [ -z "$stopping" ] || return 75
    "${in_job[@]}" sh -c 'echo $$ > /tmp/driver.pid; exec "$@"' sh "$@" &
    process=$!
    while kill -0 "$process" 2> /dev/null; do
        sleep 1
        if [ -n "$stopping" ] &&
            "${in_job[@]}" sh -c "kill -TERM \\$(cat /tmp/driver.pid)" 2> /dev/null; then
            stopping=''
        fi
    done
    wait "$process"
}
"""


def _wrapped(names: list[str]) -> Iterator[str]:
    """Yield the names in lines of at most about 90 characters, for a bash array."""
    line = ""
    for name in names:
        if len(line) + len(name) > 88:
            yield line.rstrip()
            line = "    "
        line += f"{name} "
    yield line.rstrip()


START = """
# --- The job

starts=$((${SLURM_RESTART_COUNT:-0} + 1))
echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, start $starts"
"""

START_CONTAINER = """
srun --job-name=container "${on_all[@]}" bash -c "$(declare -p runtime image container lost \\
    container_options; declare -f stay container_node); container_node" &
background+=($!)
run image bash -c "$(declare -p in_job)
    until \\"\\${in_job[@]}\\" true 2> /dev/null; do sleep 1; done" || finish $?
"""

START_RAY = """
# Model, data and settings, as they are on this node.
run check "${in_job[@]}" "$python" -m verlite check "${train[@]}" || finish $?

srun --job-name=ray "${on_all[@]}" bash -c "$(declare -p in_job python job_dir port gpus lost
    declare -f stay ray_node); ray_node" &
background+=($!)
run wait "${in_job[@]}" "$python" -m verlite cluster check --shared="$job_dir" --port="$port" \\
    --nodes="$SLURM_JOB_NUM_NODES" $((SLURM_JOB_NUM_NODES * @SLOTS@)) || finish $?
"""

TRAIN = """
patience=120
run driver "$python" -m verlite.main_ppo "${train[@]}"
finish $?
"""

TRAIN_ROCM = """
# Ray refuses ROCR_VISIBLE_DEVICES, which Slurm sets. The driver uses no GPU.
patience=120
run driver env --unset=ROCR_VISIBLE_DEVICES "$python" -m verlite.main_ppo "${train[@]}"
finish $?
"""

TRAIN_IN_CONTAINER = """
patience=120
run driver bash -c "$(declare -p in_job; declare -f driver); driver \\"\\$@\\"" driver \\
    "$python" -m verlite.main_ppo "${train[@]}"
finish $?
"""


def _main(job: Job) -> str:
    """Return the part of the script that runs the steps, in order."""
    parts = [START]
    if job.container:
        parts.append(START_CONTAINER)
    once = [f'run prepare "${{in_job[@]}}" bash -c {shlex.quote(one)}' for one in job.prepare]
    once += [
        f'run download "${{in_job[@]}}" hf download {shlex.quote(name)}' for name in job.downloads
    ]
    if once:
        lines = [f"{command} || finish $?" for command in once]
        parts.append("\n".join(["# Data and model, once, before Ray starts.", *lines]))
    parts.append(START_RAY.replace("@SLOTS@", "gpus" if job.gpus else "SLURM_CPUS_PER_TASK"))
    if job.container:
        parts.append(TRAIN_IN_CONTAINER)
    else:
        parts.append(TRAIN_ROCM if job.rocm else TRAIN)
    return "\n\n".join(part.strip("\n") for part in parts)
