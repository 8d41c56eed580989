"""Mutants of verlite.controller: rows, causes and processes that get lost."""

import contextlib

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

DISPATCH = "verlite.controller.dispatch:"
COLUMNS = "verlite.controller.columns:"
FAILURES = "verlite.controller.failures:"
SUPERVISE = "verlite.controller.supervise:Supervisor."
PLACEMENT = "verlite.controller.placement:"
GUARDIAN = "verlite.controller.guardian:"
DAEMONS = "verlite.controller.node_watch:"
DAEMON = ("tests/controller/test_daemon_watch.py",)
ROWS = "tests/controller/test_dispatch.py"
WORKERS = "tests/controller/test_workers.py"
GPUS = "tests/controller/test_gpus.py"


def _in_worker_order(original, results, data):
    from verlite.protocol.data import DataProto

    if all(isinstance(part, DataProto) for part in results):
        return DataProto.concat(results)
    return original(results, data)


def _unchecked_assignment(original, data, ranks):
    import numpy as np

    given = data.meta_info.get("assignment")
    return None if given is None else [np.asarray(part, dtype=np.int64) for part in given]


def _rows_mixed_up(original, batch, names=None):
    import numpy as np

    fetched = original(batch, names)
    wanted = list(batch.non_tensor_batch if names is None else names)
    if len(batch) < 2:
        return fetched
    reverse = {name: fetched.non_tensor_batch[name][::-1].copy() for name in wanted}
    assert all(isinstance(column, np.ndarray) for column in reverse.values())
    return fetched.with_non_tensor(**reverse)


def _every_method(original, worker_class, method):
    try:
        return original(worker_class, method)
    except AttributeError:
        return "all"


MUTANTS = [
    Mutant(
        "rows come back in the order of the workers",
        DISPATCH + "join_rows",
        calls(_in_worker_order),
        (ROWS,),
    ),
    Mutant(
        "an assignment may lose or repeat rows",
        DISPATCH + "assigned_rows",
        calls(_unchecked_assignment),
        (ROWS,),
    ),
    Mutant(
        "any method of a worker can be called",
        DISPATCH + "dispatch_of",
        calls(_every_method),
        (ROWS,),
    ),
    Mutant(
        "fetched columns belong to other rows", COLUMNS + "fetch", calls(_rows_mixed_up), (WORKERS,)
    ),
    Mutant(
        "a consequence is reported as the cause",
        FAILURES + "Cause.is_consequence",
        calls(lambda original, self: False),
        ("tests/controller/test_failures.py",),
    ),
    Mutant(
        "out-of-memory kills are not recognized",
        FAILURES + "reason_for_death",
        argument("more_oom_kills", lambda more: False),
        ("tests/controller/test_failures.py",),
    ),
    Mutant(
        "dead workers are not detected",
        SUPERVISE + "_dead_workers",
        result(lambda causes: []),
        (WORKERS,),
    ),
    Mutant(
        "workers of a stuck run are left running",
        SUPERVISE + "stop_all",
        calls(lambda original, self: self.outstanding.clear()),
        (WORKERS,),
    ),
    Mutant(
        "heartbeats of other processes are believed",
        "verlite.controller.heartbeat:hmac.compare_digest",
        returns(True),
        ("tests/controller/test_heartbeat.py",),
    ),
    Mutant(
        "Ray opens the run's private folder to every user",
        "verlite.controller.cluster:os.path.join",
        calls(lambda original, *parts: parts[0] if parts[1:] == ("r",) else original(*parts)),
        ("tests/controller/test_forks.py",),
    ),
    Mutant(
        "a run in a copied directory ends the original",
        "verlite.controller.leftovers:_identity",
        returns([0, 0]),
        ("tests/controller/test_leftovers.py",),
    ),
    Mutant(
        "a fork server of another user gets the environment",
        "verlite.controller.worker_fork:_peer_uid",
        calls(lambda original, connection: __import__("os").getuid()),
        ("tests/controller/test_forks.py",),
    ),
    Mutant(
        "calls have no time limit",
        SUPERVISE + "wait",
        argument("timeout_s", lambda timeout: 1e9),
        (WORKERS,),
    ),
    Mutant(
        "every worker takes a whole device",
        PLACEMENT + "Placement.share",
        calls(lambda original, self, index: 1.0),
        (WORKERS,),
    ),
    Mutant(
        "Ray alone decides which GPUs a worker sees",
        "verlite.controller.ray_internals:set_visible_gpus",
        does_nothing,
        (GPUS,),
    ),
    Mutant(
        "the guardian finds no Ray processes by their files",
        GUARDIAN + "ray_processes_using",
        result(lambda found: []),
        ("tests/controller/test_cluster.py",),
    ),
    Mutant(
        "a worker that has lost the head stays",
        GUARDIAN + "answers",
        returns(True),
        ("tests/controller/test_cluster.py",),
    ),
    Mutant(
        "variables of a node group reach no worker",
        "verlite.controller.worker_start:_runtime_env",
        argument("device", attribute("env_vars", lambda variables: {})),
        ("tests/controller/test_node_environment.py",),
    ),
    Mutant(
        "waiting for devices has no end",
        PLACEMENT + "_has",
        constant(lambda free, needs: True),
        ("tests/controller/test_joined.py",),
    ),
    Mutant(
        "the end of a process of Ray is not noticed",
        DAEMONS + "DaemonWatch._look",
        does_nothing,
        DAEMON,
    ),
    Mutant(
        "a main thread that hangs in Ray hangs for ever",
        DAEMONS + "DaemonWatch._run",
        does_nothing,
        DAEMON,
    ),
    Mutant(
        "a poll that fails ends the watch over Ray's processes",
        DAEMONS + "suppress",
        constant(lambda *errors: contextlib.suppress(MemoryError)),
        DAEMON,
    ),
    Mutant(
        "a guardian that is killed is not replaced",
        "verlite.controller.cluster:Cluster._check_guardian",
        does_nothing,
        DAEMON,
    ),
    Mutant(
        "what a dead engine has started goes on",
        "verlite.controller.node:_descendants",
        returns([]),
        ("tests/controller/test_cluster.py",),
    ),
]
