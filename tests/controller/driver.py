"""A driver process for test_orphans: `python driver.py <run dir> <way to end>`.

Prints the run's id when it is ready.
"""

import multiprocessing
import os
import signal
import sys
import time

from tests.controller.conftest import pids
from tests.controller.workers import Light
from verlite.control.machine import Machine
from verlite.control.policy import Policy
from verlite.controller.cluster import connect
from verlite.controller.placement import reserve
from verlite.controller.worker_group import ready, spawn
from verlite.trainer.stop import Stop

PRELOAD = ["tests.controller.workers"]  # the guardian must find forks too


def main(run_dir: str, end: str) -> None:
    with connect(run_dir, address="local", num_cpus=2, preload=PRELOAD) as cluster:
        placement = reserve(cluster, {"light": [0]}, devices_per_node=1, kind="cpu")
        worker = spawn(Light, placement, "light")
        ready(worker)
        worker.child()
        # A forked process keeps the driver's end of the guardian's pipe open, and has no mark.
        context = multiprocessing.get_context("fork")
        context.Process(target=time.sleep, args=(20,), daemon=True).start()
        if end == "kill":
            os.kill(pids(worker)[0], signal.SIGSTOP)
        if end == "stop":
            stop = Stop()
            stop.tell(Machine.begins, Policy(total_steps=2))
            stop.tell(Machine.step_wanted)
            stop.tell(Machine.step_finished)
            with stop:
                print(cluster.run_id, flush=True)
                while not stop.machine.requested:
                    worker.sleep(0.1)
                worker.sleep(1.5)  # Ray and the worker stay, longer than a death takes to be seen
            print("saved after", stop.machine.requested)
            return
        print(cluster.run_id, flush=True)
        worker.sleep(1000)


if __name__ == "__main__":
    main(*sys.argv[1:])
