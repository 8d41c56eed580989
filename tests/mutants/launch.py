"""Mutants of verlite.launch: clusters that are joined, announced or ended by mistake, and jobs of
Slurm that lose their checkpoint."""

from tests.mutants import Mutant
from tests.mutants.patches import (
    argument,
    attribute,
    calls,
    constant,
    does_nothing,
    result,
    returns,
)

SHARED = "verlite.launch.head:"
START = "verlite.launch.start:"
DAEMONS = "verlite.launch.ray_daemons:"
DEVICES = "verlite.launch.devices:"
SLURM = "verlite.launch.slurm:"
CLUSTER = ("tests/launch/test_cluster.py",)
PROCESSES = ("tests/launch/test_cluster_process.py",)
JOBS = ("tests/launch/test_slurm.py",)
# For changes of the script's text, which the test of the examples would notice, too.
STOPS = (JOBS[0] + "::test_a_signal_reaches_the_driver_and_the_job_starts_again",)
PRE_EMPTED = (JOBS[0] + "::test_pre_emption_that_only_steps_see_starts_the_job_again",)
ENDS = (JOBS[0] + "::test_job_ends_with_the_exit_code_of_the_run_and_leaves_nothing",)
SUPERVISE = "verlite.launch.supervise:"
SUPERVISED = ("tests/launch/test_supervise.py",)


def _text(old, new):
    """Patch a text of the script. The original must contain `old`."""

    def change(text):
        assert old in text
        return text.replace(old, new)

    return change


MUTANTS = [
    Mutant(
        "others can read the token",
        SHARED + "_replace",
        argument("mode", lambda mode: 0o644),
        CLUSTER,
    ),
    Mutant(
        "a token that others can read is used", SHARED + "stat.S_IMODE", returns(0o600), CLUSTER
    ),
    Mutant(
        "the head file of a newer cluster is removed",
        SHARED + "remove_head",
        argument("cluster_id", lambda cluster: None),
        CLUSTER,
    ),
    Mutant(
        "the head is awaited without end",
        START + "_wait_for_head",
        argument("source", attribute("wait_s", lambda wait: wait + 1e9)),
        (CLUSTER[0] + "::test_wait_for_the_head_is_bounded_and_says_why",),
    ),
    Mutant("a second head replaces one that runs", START + "_still_runs", returns(False), CLUSTER),
    Mutant("a failed `ray start` is not tried again", DAEMONS + "TRIES", constant(1), CLUSTER),
    Mutant(
        "labels of the user are lost",
        DAEMONS + "with_label",
        calls(lambda original, options, label: [*options, "--labels", label]),
        CLUSTER,
    ),
    Mutant("agents get ports that are in use", DAEMONS + "_is_free", returns(True), CLUSTER),
    Mutant(
        "a rank that stops ends the workers of another rank on its machine",
        DAEMONS + "_raylets_using",
        returns([]),
        PROCESSES,
    ),
    Mutant(
        "the death of Ray is not noticed",
        "verlite.controller.ray_node:RayNode.dead",
        returns([]),
        CLUSTER,
    ),
    Mutant(
        "check wants exactly as many devices",
        DEVICES + "ClusterDevices.total",
        result(lambda total: min(total, 16)),
        CLUSTER,
    ),
    Mutant(
        "Ray stays on a node that has lost the head",
        "verlite.control.limits:VIEW_FAILURES",
        constant(10**9),
        CLUSTER,
    ),
    Mutant(
        "minutes of a time limit are read as hours",
        SLURM + "limit_seconds",
        result(lambda seconds: seconds and seconds * 60),
        JOBS,
    ),
    Mutant(
        "a stop does not reach the driver",
        SLURM + "script",
        result(_text('signal_step "$current" TERM', "true")),
        STOPS,
    ),
    Mutant(
        "Ray ends at the TERM of a pre-emption",
        SLURM + "script",
        result(_text("trap : TERM", "trap - TERM")),
        PRE_EMPTED,
    ),
    Mutant(
        "a canceled job starts again",
        SLURM + "script",
        result(_text("JobState=RUNNING", "JobState=")),
        STOPS,
    ),
    Mutant(
        "Ray is left running at the end of a job",
        SLURM + "script",
        result(_text('|| kill -USR2 "${background[@]}"', "|| true")),
        ENDS,
    ),
    Mutant(
        "secrets in commands are written into the script",
        SLURM + "_typed_secret",
        returns(None),
        JOBS,
    ),
    Mutant(
        "signals do not reach the command",
        SUPERVISE + "CommandSupervisor._pass_on",
        does_nothing,
        SUPERVISED,
    ),
    Mutant(
        "folders of supervisors that run are removed",
        SUPERVISE + "fcntl.flock",
        does_nothing,
        SUPERVISED,
    ),
]
