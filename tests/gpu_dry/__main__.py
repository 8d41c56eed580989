"""Run the tests of this folder on a simulated CUDA: ENV/bin/python -m tests.gpu_dry

ENV has a build of torch for CUDA and what the core needs; `make gpu-dry` makes one. Arguments are
pytest's.
"""

import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build/dry-cuda"


def build() -> Path:
    """Compile cuda.c. Return the folder of the libraries, which other processes may be using.

    Raises:
        SystemExit: without torch for CUDA, or a compiler.
    """
    triton = find_spec("triton")
    if triton is None or not triton.origin:
        raise SystemExit(
            f"{sys.executable} has no build of torch for CUDA: `make gpu-dry` makes one"
        )
    headers = Path(triton.origin).parent / "backends/nvidia/include"
    BUILD.mkdir(parents=True, exist_ok=True)
    names = ("libcuda.so.1", "libnvidia-ml.so.1")
    options = f"-O1 -shared -fPIC -w -Wl,-soname,{names[0]} -pthread -I{headers}".split()
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        library, nvml = (Path(folder, name) for name in names)
        subprocess.run(["cc", *options, HERE / "cuda.c", "-o", library, "-ldl"], check=True)
        nvml.symlink_to(names[0])
        for made in (library, nvml):
            made.replace(BUILD / made.name)
    return BUILD


def environment(folder: Path, gpus: int = 8) -> dict[str, str]:
    """Return the variables of a process that has these GPUs."""
    paths = (str(HERE / "site"), str(ROOT), os.environ.get("PYTHONPATH", ""))
    return os.environ | {
        "LD_PRELOAD": str(folder / "libcuda.so.1"),
        "LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "PYTHONPATH": ":".join(filter(None, paths)),
        "DRY_GPUS": str(gpus),
    }


if __name__ == "__main__":
    # A long traceback prints whole tensors. Tests wait for as long as a busy machine takes.
    options = ["-q", "-p", "no:cacheprovider", "--tb=short", "--timeout=1200"]
    command = [sys.executable, "-m", "pytest", *options, *sys.argv[1:]]
    if not any(argument.startswith("tests") for argument in sys.argv[1:]):
        command.append(str(HERE))
    raise SystemExit(subprocess.run(command, env=environment(build())).returncode)
