"""The devices of a plan: those of `--devices "8xH100-80GB"` or "8x24GB", or this machine's."""

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from verlite import toml_tables
from verlite.config.plan import Plan
from verlite.terminal import GIB, counted


class Known(NamedTuple):
    """A row of devices.toml, which says what the fields are."""

    gib: float
    tflops: int
    gb_s: int


KNOWN: dict[str, Known] = toml_tables.read(
    Path(__file__).with_name("devices.toml"), {"devices": Known}
)["devices"]
"""By name."""


class DevicesError(ValueError):
    """--devices is unknown or does not fit the configuration."""


@dataclass(frozen=True)
class Devices:
    """The devices of one node.

    name: what to call one of them.
    count: devices per node.
    bytes: memory of each; on CPUs of the whole node. None: unknown.
    kind: "cuda" or "cpu".
    """

    name: str
    count: int
    bytes: int | None
    kind: str

    def __str__(self) -> str:
        if self.kind == "cpu":
            return f"{counted(self.count, 'CPU slot')}, which share its memory"
        memory = "unknown memory" if self.bytes is None else f"{self.bytes / GIB:.1f} GiB each"
        return f"{self.count} {'devices' if self.name.endswith('GiB') else self.name}, {memory}"


def parse_devices(text: str) -> tuple[int, str, int]:
    """Return count, name and bytes of "8xH100-80GB", or of "8x24GB" for any other device.

    Raises:
        DevicesError: the text has another form, or the device is unknown.
    """
    match = re.fullmatch(r"\s*(\d+)\s*[xX*]\s*(\S+)\s*", text)
    if not match or int(match[1]) < 1:
        raise DevicesError(
            f'--devices {text!r} must be a number of devices and their name, as in "8xH100-80GB", '
            'or their memory, as in "8x24GB"'
        )
    name = match[2]
    found = {known.lower(): known for known in KNOWN}
    if name.lower() in found:
        known = found[name.lower()]
        return int(match[1]), known, int(KNOWN[known].gib * GIB)
    memory = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:GB|GiB|G)", name, re.IGNORECASE)
    if memory:
        if float(memory[1]) <= 0:
            raise DevicesError(f"--devices {text!r}: a device has more than 0 GiB")
        return int(match[1]), f"{memory[1]} GiB", int(float(memory[1]) * GIB)
    near = difflib.get_close_matches(name.upper(), KNOWN, 3, 0.4)
    near += [known for known in KNOWN if known.startswith(name.upper()) and known not in near]
    choices = " or ".join(near) if near else ", ".join(KNOWN)
    raise DevicesError(
        f"--devices {text!r}: {name} is not in the table of devices. Write {choices}, or its "
        f"memory, as in {match[1]}x80GB"
    )


def choose_devices(text: str | None, plan: Plan) -> Devices:
    """Return the devices of each node of the plan: those that `--devices` names, otherwise this
    machine's.

    Raises:
        DevicesError: the text is wrong, or its number or kind of devices is not the
            configuration's.
    """
    per_node = plan.devices_per_node
    if text is not None:
        number, name, size = parse_devices(text)
        if plan.device == "cpu":
            raise DevicesError(
                f"--devices {text!r} are GPUs, but trainer.device=cpu. Leave one of the two out"
            )
        if number not in (per_node, plan.n_devices):
            total = ""
            if plan.nnodes > 1:
                total = f", or {plan.n_devices} for all {plan.nnodes} nodes"
            raise DevicesError(
                f"--devices {text!r} has {number} devices, but trainer.n_gpus_per_node={per_node}. "
                f"Write {per_node}x{name.replace(' GiB', 'GB')}{total}, or change "
                "trainer.n_gpus_per_node"
            )
        return Devices(name, per_node, size, "cuda")
    if plan.device == "cpu":
        return Devices("CPU slots", per_node, host_memory(), "cpu")
    import torch

    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        return Devices(found.name, per_node, found.total_memory, "cuda")
    return Devices("GPUs", per_node, None, "cuda")


def host_memory() -> int:
    """Return this machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
