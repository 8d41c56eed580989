"""A Ray cluster of two nodes on this machine, of which the second can be lost."""

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from verlite.controller.node import free_listener

STARTED_S = 180.0
END_S = 30.0


class Hosts:
    """Two nodes that `verlite cluster start` has started: the head, and a second one.

    They end with this process. Each has two CPU slots, the same address and a folder of its own for
    the record of its node, so that commands with `environment` run on the head.
    """

    def __init__(self, folder: Path) -> None:
        """Start both nodes.

        Args:
            folder: for their records and output, and for what nodes share.
        """
        self._folder = folder
        self._ended = threading.Event()
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._starts = 0
        self._joining: threading.Thread | None = None
        with free_listener("0.0.0.0") as listener:
            self._port = listener.getsockname()[1]
        # In /tmp, because the paths of sockets must be short.
        self._ray_dir = f"/tmp/verlite-hosts-{self._port}"
        atexit.register(self.stop)
        head = ["--port", str(self._port), "--", "--include-dashboard=false"]
        try:
            self._nodes.append(self._start(0, *head, f"--temp-dir={self._ray_dir}"))
            self._nodes.append(self._start(1))
        except BaseException:
            self.stop()
            raise

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a command on the head."""
        return self._environment(0)

    def lose_second(self, away_s: float) -> None:
        """Kill the raylet of the second node, and join the node again some seconds after its end.

        Returns at once.
        """
        record = json.loads((self._record_folder(1) / "node.json").read_text())
        os.kill(next(pid for name, pid, _ in record["daemons"] if name == "raylet"), signal.SIGKILL)

        def join() -> None:
            self._nodes[1].wait(END_S)
            if not self._ended.wait(away_s):
                self._nodes[1] = self._start(1)

        self._joining = threading.Thread(target=join, daemon=True)
        self._joining.start()

    def stop(self) -> None:
        """End both nodes. Later calls do nothing."""
        atexit.unregister(self.stop)
        self._ended.set()
        if self._joining is not None:
            self._joining.join(END_S)
        for node in reversed(self._nodes):
            _end(node)
        shutil.rmtree(self._ray_dir, ignore_errors=True)

    def _start(self, rank: int, *options: str) -> "subprocess.Popen[bytes]":
        """Start a node and wait until it has joined. It is ended if it does not."""
        self._starts += 1
        log = self._folder / f"node_{rank}_{self._starts}.log"
        shared = self._folder / "shared"
        shared.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "verlite", "cluster", "start", "--block"]
        command += ["--rank", str(rank), "--shared", str(shared), "--num-cpus=2", "--num-gpus=0"]
        with log.open("w") as out:
            node = subprocess.Popen(
                [*command, *options],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._environment(rank)},
            )
        deadline = time.monotonic() + STARTED_S
        try:
            while "Ray started" not in log.read_text():
                ended = node.poll() is not None or self._ended.is_set()
                if ended or time.monotonic() > deadline:
                    raise RuntimeError(f"node {rank} did not start:\n{log.read_text()}")
                time.sleep(0.1)
        except BaseException:
            _end(node)
            raise
        return node

    def _environment(self, rank: int) -> dict[str, str]:
        return {"VERLITE_CLUSTER_DIR": str(self._record_folder(rank)), "PYTHONUNBUFFERED": "1"}

    def _record_folder(self, rank: int) -> Path:
        return self._folder / f"record_{rank}"


def _end(node: "subprocess.Popen[bytes]") -> None:
    if node.poll() is None:
        node.send_signal(signal.SIGTERM)
        try:
            node.wait(END_S)
        except subprocess.TimeoutExpired:
            node.kill()
            node.wait()
