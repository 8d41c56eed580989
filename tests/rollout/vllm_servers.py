"""Start a stock vLLM server as a user does, by `verlite serve generation`."""

import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).parents[2]


def write_plugin(folder: Path) -> Path:
    """Write the metadata of a package with the entry points of pyproject.toml.

    The installed metadata may be older than pyproject.toml.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = folder / "verlite_plugin-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: verlite-plugin\nVersion: 0\n")
    lines = [
        line
        for group, entries in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {target}" for name, target in entries.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


class VLLMProcess:
    """A running server on loopback.

    Args:
        folder: for its log.
        options: of `verlite serve generation`.
    """

    def __init__(self, folder: Path, *options: str, token: str | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "server.log"
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}
        path = os.pathsep.join([str(ROOT), str(write_plugin(folder / "plugin"))])
        environment = os.environ | {
            "PYTHONPATH": path,
            "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than the rest of the start
            "OMP_NUM_THREADS": "1",
        }
        if token:
            environment["SERVER_TOKEN"] = token
            options = (*options, "--token-env", "SERVER_TOKEN")
        words = ["-m", "verlite.cli", "serve", "generation", "--port", str(self.port), *options]
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, *words],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def wait(self, seconds: float = 240) -> None:
        """Wait until the server answers."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.2)

    def call(self, method: str, path: str, body=None, **options) -> httpx.Response:
        options = {"headers": self.headers, "timeout": 60} | options
        return httpx.request(method, self.url + path, json=body, **options)

    def stop(self) -> None:
        """End the server and its workers."""
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            children = []
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for child in psutil.wait_procs(children, timeout=60)[1]:
            child.kill()
