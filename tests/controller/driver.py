"""A run as a user starts it: `python driver.py <run dir> <how it ends>`. Prints the run's id once it runs."""

import multiprocessing
import os
import signal
import sys
import time

from tests.controller.workers import Light
from verlite.controller.cluster import connect
from verlite.controller.placement import reserve
from verlite.controller.supervise import StopRequest
from verlite.controller.worker_group import group, ready, spawn


def main(run_dir: str, end: str) -> None:
    with connect(run_dir, address="local", num_cpus=2) as cluster:
        worker = spawn(
            Light, reserve(cluster, {"light": [0]}, devices_per_node=1, kind="cpu"), "light"
        )
        ready(worker)
        worker.child()
        # A fork keeps the driver's open files, also its end of the guardian's pipe, and carries no mark of the run.
        multiprocessing.get_context("fork").Process(
            target=time.sleep, args=(20,), daemon=True
        ).start()
        if end == "frozen":
            os.kill(group(worker).pids[0], signal.SIGSTOP)
        if end == "request":
            with StopRequest() as stop:
                print(cluster.run_id, flush=True)
                while not stop.requested:
                    worker.sleep(0.1)
            print("saved after", stop.requested)
            return
        print(cluster.run_id, flush=True)
        if end == "success":
            return
        if end == "exception":
            raise ValueError("a bug in the driver")
        worker.sleep(1000)


if __name__ == "__main__":
    main(*sys.argv[1:])
