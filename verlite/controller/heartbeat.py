"""Heartbeats: every worker tells the driver where it is, without taking part in Ray's calls.

A thread of each worker sends a datagram with its position (`verlite.progress`) every few seconds.
A thread of the driver receives them. `control.watch` decides what they mean. A lost datagram
costs nothing, and a worker never waits for the driver.

Each datagram has a keyed hash. The key is new for each run, so another process cannot speak for a
worker. A number that only grows keeps an old datagram from being sent again.
"""

import dataclasses
import hashlib
import hmac
import json
import secrets
import socket
import sys
import threading
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

from verlite import progress
from verlite.control import limits
from verlite.control.watch import Beat, Watch
from verlite.progress import Progress

HASH_BYTES = 32
MAX_BYTES = 4096
COLLECTIVES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py",
)
"""A process waits for other ranks if one of its innermost frames is in one of these files."""
INNERMOST = 3


@dataclass(frozen=True)
class Target:
    """Where and as whom a worker sends heartbeats.

    Attributes:
        address: (host, port) of the driver's receiver.
        name: unique name of the worker's process within the run.
        key: key of the run.
    """

    address: tuple[str, int]
    name: str
    key: bytes = dataclasses.field(repr=False)


def pack(target: Target, beat: Beat) -> bytes:
    """Return a datagram: a keyed hash and JSON."""
    text = json.dumps({"name": target.name, **dataclasses.asdict(beat)}).encode()
    return _hash(target.key, text) + text


def unpack(key: bytes, datagram: bytes) -> tuple[str, Beat] | None:
    """Return (name of the worker's process, heartbeat); None if it is not from a worker."""
    text = datagram[HASH_BYTES:]
    if not hmac.compare_digest(datagram[:HASH_BYTES], _hash(key, text)):
        return None
    values: dict[str, Any] = json.loads(text)
    name: str = values.pop("name")
    return name, Beat(**{**values, "at": Progress(**values["at"])})


def _hash(key: bytes, text: bytes) -> bytes:
    return hmac.digest(key, text, hashlib.sha256)


class Sender:
    """A thread of a worker that sends heartbeats until the process ends."""

    def __init__(self, target: Target) -> None:
        self.target = target
        family = socket.AF_INET6 if ":" in target.address[0] else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._lock = threading.Lock()
        self._number = 0
        self._call = self._samples = self._waits = 0
        self._main = threading.main_thread().ident
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def send(self) -> None:
        """Send a heartbeat now. Errors are ignored: the next one may arrive."""
        with self._lock:
            waits = self._sample()
            self._number += 1
            beat = Beat(self._number, progress.here, self._samples, self._waits, waits)
            try:
                self._socket.sendto(pack(self.target, beat), self.target.address)
            except OSError:
                pass

    def _run(self) -> None:
        looks = round(limits.BEAT_S / limits.SAMPLE_S)
        while True:
            for _ in range(looks):
                time.sleep(limits.SAMPLE_S)
                with self._lock:
                    self._sample()
            self.send()

    def _sample(self) -> bool:
        """Count whether the main thread waits in a collective, and return it."""
        if progress.here.calls != self._call:
            self._call, self._samples, self._waits = progress.here.calls, 0, 0
        waits = in_collective(sys._current_frames().get(self._main or 0))
        self._samples += 1
        self._waits += waits
        return waits


def in_collective(frame: FrameType | None) -> bool:
    """Return whether one of the innermost frames is a collective's."""
    for _ in range(INNERMOST):
        if frame is None:
            return False
        if frame.f_code.co_filename.endswith(COLLECTIVES):
            return True
        frame = frame.f_back
    return False


class Receiver:
    """A thread of the driver that receives heartbeats until `stop`.

    Its clock is the seconds that it has run. It stands still while the driver is suspended:
    otherwise every worker would seem silent afterwards.

    Attributes:
        watch: gets the heartbeats and the clock.
    """

    def __init__(self, host: str, watch: Watch) -> None:
        self.watch = watch
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.bind((host, 0))
        self._socket.settimeout(limits.SAMPLE_S)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._key = secrets.token_bytes(32)
        self._stopped = False
        threading.Thread(target=self._run, name="heartbeats", daemon=True).start()

    def target(self, role: str, rank: int) -> Target:
        """Return the target for a new process of this rank."""
        return Target(self.address, f"{role}/{rank}/{secrets.token_hex(4)}", self._key)

    def stop(self) -> None:
        """End the thread."""
        self._stopped = True

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stopped:
            datagram = b""
            try:
                datagram = self._socket.recv(MAX_BYTES)
            except OSError:  # a time-out, or ICMP's answer to another datagram
                pass
            now = time.monotonic()
            self.watch.clock += min(now - last, 2 * limits.SAMPLE_S)
            last = now
            if datagram:
                self.receive(datagram)
        self._socket.close()

    def receive(self, datagram: bytes) -> None:
        """Note a heartbeat. Datagrams of others, and old ones, are ignored."""
        found = unpack(self._key, datagram)
        if found is not None:
            self.watch.hear(*found)
