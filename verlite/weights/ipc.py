"""Transport `ipc`: engine and trainer share a device, and the engine reads buckets from memory of
the trainer's process.

The trainer packs a bucket into one of two buffers and sends a handle of the buffer over a Unix
socket; the engine copies the weights out, and acknowledges. On a CPU the buffers are memory files.
On a GPU they are shared by CUDA IPC, and nothing goes through the host: the trainer's shards, the
engine's weights and two buckets are on the GPU at the same time.
"""

import contextlib
import itertools
import json
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verlite import progress
from verlite.files import one_line
from verlite.weights import GOODBYE_S, JOIN_S, TIMEOUT_S, TransportError
from verlite.weights.buckets import TRAINED, Bucket, fill, header_of, views

TRIAL_S = 30.0
"""How long the sides of a trial wait for each other."""
_TRIAL_TENSORS = 3  # the first buffer is used again
_TRIAL_SIZE = 1 << 14  # float32: the memory of a failed trial may stay until the process ends
_ACKNOWLEDGED = b"done"
_numbers = itertools.count()


class SharedBuffer:
    """uint8 memory of a device that another process opens by its `handle`, a JSON value.

    Attributes:
        number: of the buffer in this process. A handle may be used again for another buffer.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.number = next(_numbers)
        self.handle: Any
        if device.type == "cuda":
            with _without_expandable_segments():
                self.tensor = torch.empty(size, dtype=torch.uint8, device=device)
            shared = self.tensor.untyped_storage()._share_cuda_()
            self.handle = [x.hex() if isinstance(x, bytes) else x for x in shared]
        else:
            self._file = os.memfd_create("verlite-weights")
            os.truncate(self._file, size)
            self.tensor = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)
            self.handle = f"/proc/{os.getpid()}/fd/{self._file}"

    def close(self) -> None:
        """Release the memory when the other process has released it too."""
        if isinstance(self.handle, str):
            os.close(self._file)
        del self.tensor


def open_buffer(handle: Any) -> Tensor:
    """Return the memory of another process's SharedBuffer."""
    if isinstance(handle, str):
        try:
            with open(handle, "r+b") as file:
                return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        except OSError as error:
            raise TransportError(f"the other side of a weight sync is gone: {error}") from error
    _, *parts = [bytes.fromhex(x) if isinstance(x, str) else x for x in handle]
    device = torch.cuda.current_device()  # its number differs between processes
    storage = torch.UntypedStorage._new_shared_cuda(device, *parts)
    return torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}").set_(storage)


@contextlib.contextmanager
def _without_expandable_segments() -> Iterator[None]:
    """Allocate plain segments within the context: handles of expandable ones need more rights."""
    before = _allocator_settings()
    torch.cuda.synchronize()  # other streams may still use what is unmapped
    torch.cuda.empty_cache()  # so that no cached expandable segment is reused
    torch._C._accelerator_setAllocatorSettings(without_expandable(before))
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(before or "expandable_segments:False")


def _allocator_settings() -> str:
    """Return the settings of torch's allocator as a string; "" if nobody has set any."""
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if read is None:  # torch 2.11
        settings = torch.cuda.memory._snapshot()["allocator_settings"]
        return str(settings["PYTORCH_CUDA_ALLOC_CONF"])
    return str(read())


def without_expandable(settings: str) -> str:
    """Return allocator settings with expandable_segments off and all others as they are.

    torch resets every setting that a new string leaves out.
    """
    others = [part for part in settings.split(",") if part and "expandable_segments" not in part]
    return ",".join([*others, "expandable_segments:False"])


class Publisher:
    """The trainer's side on one GPU. It serves the one engine process of that GPU."""

    def __init__(self, device: torch.device, timeout_s: float = TIMEOUT_S) -> None:
        self.device = device
        # An abstract address leaves no file behind; it ends with this process.
        self.address = f"\0verlite-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.settimeout(min(JOIN_S, timeout_s))
        self._listener.bind(self.address)
        self._listener.listen(1)
        self._timeout_s = timeout_s
        self._peer: socket.socket | None = None
        self._buffers: list[SharedBuffer | None] = [None, None]
        self._slot = 0
        self._unread = 0

    def add(self, bucket: Bucket) -> None:
        """Share a bucket. Returns while the engine reads it."""
        header, size = header_of(bucket)
        if self._peer is None:
            self._peer = self._accept()
        while self._unread >= len(self._buffers):
            self._wait()
        buffer = self._buffer(size)
        fill(buffer.tensor[:size], bucket)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        message = {
            "handle": buffer.handle,
            "buffer": buffer.number,
            "slot": self._slot,
            "size": size,
            "gpu": gpu_uuid(self.device),
        }
        _send(self._peer, json.dumps(message).encode())
        _send(self._peer, header)
        self._unread += 1
        self._slot = 1 - self._slot

    def finish(self) -> None:
        """Tell the engine that it has every bucket. Returns when it has read them and has closed
        the buffers: the memory of a GPU is not freed before."""
        while self._unread:
            self._wait()
        if self._peer is not None:
            _send(self._peer, json.dumps({"end": True}).encode())
            self._unread += 1
            self._wait()
            self._peer.close()
        self._peer = None
        self._free()

    def _accept(self) -> socket.socket:
        """Return a connection to the engine. Those of other users, who can see the address, are
        closed."""
        while True:
            try:
                peer, _ = self._listener.accept()
            except TimeoutError as error:
                waited = self._listener.gettimeout()
                message = f"no engine asked for the weights within {waited:g} s"
                raise TransportError(message) from error
            if _peer_uid(peer) == os.getuid():
                peer.settimeout(self._timeout_s)
                return peer
            peer.close()

    def abort(self, reason: str) -> None:
        """Make the engine's sync fail with the reason."""
        if self._peer is not None:
            with contextlib.suppress(TransportError):
                _send(self._peer, json.dumps({"error": reason}).encode())
            self._peer.close()
        self._peer = None
        self._unread = 0
        self._free()

    def close(self) -> None:
        """Free everything."""
        self.abort("the trainer has closed the stream")
        self._listener.close()

    def _buffer(self, size: int) -> SharedBuffer:
        buffer = self._buffers[self._slot]
        if buffer is None or buffer.tensor.numel() < size:
            if buffer is not None:
                buffer.close()
            buffer = self._buffers[self._slot] = SharedBuffer(size, self.device)
        return buffer

    def _wait(self) -> None:
        assert self._peer is not None
        if _receive(self._peer) != _ACKNOWLEDGED:
            raise TransportError("the engine did not acknowledge a bucket")
        self._unread -= 1

    def _free(self) -> None:
        for buffer in self._buffers:
            if buffer is not None:
                buffer.close()
        self._buffers = [None, None]
        if self.device.type == "cuda":
            del buffer  # torch frees shared memory in the next collection after the last reader
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class BucketStream:
    """Weights that a trainer publishes while an engine iterates over them.

    addresses: of the publisher of each of the engine's devices, in rank order.
    """

    addresses: tuple[str, ...]
    rank: int = 0
    timeout_s: float = TIMEOUT_S

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor). The tensors are copies: an engine may keep one beyond its bucket.

        Raises:
            TransportError: the trainer stopped before the end.
        """
        opened: dict[int, tuple[int, Tensor]] = {}  # number and memory of each slot's buffer
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(self.timeout_s)
            _connect(peer, self.addresses[self.rank])
            if _peer_uid(peer) != os.getuid():  # it took the address of a trainer that has ended
                raise TransportError("the socket of the weights belongs to another user")
            while "end" not in (message := json.loads(_receive(peer))):
                if "error" in message:
                    raise _failure(message["error"])
                _check_gpu(message["gpu"])
                slot = message["slot"]
                if slot not in opened or opened[slot][0] != message["buffer"]:
                    try:
                        opened[slot] = message["buffer"], open_buffer(message["handle"])
                    except TransportError as error:
                        raise _reason(peer) or error from error
                payload = opened[slot][1][: message["size"]]
                for name, tensor in views(_receive(peer), payload):
                    progress.tick()
                    if not name.startswith(TRAINED):
                        yield name, tensor.clone()
                if payload.is_cuda:
                    torch.cuda.synchronize()
                del payload, tensor
                with contextlib.suppress(TransportError):  # the next message says why
                    _send(peer, _ACKNOWLEDGED)
            opened.clear()
            _send(peer, _ACKNOWLEDGED)


def publish_trial(publisher: Publisher) -> str:
    """Publish the tensors of a trial, one a bucket, and close the publisher.

    Returns:
        Why that failed; "" if the engine has read them.
    """
    try:
        for name, tensor in _trial():
            publisher.add([(name, tensor.to(publisher.device))])
        publisher.finish()
    except Exception as error:  # of an allocator or a driver: the run goes on without ipc
        publisher.abort(error_line(error))
        return error_line(error)
    finally:
        publisher.close()
    return ""


def read_trial(stream: BucketStream) -> str:
    """Read what `publish_trial` publishes, and compare it.

    Returns:
        Why that failed; "" if every value has arrived.
    """
    try:
        found = {name: tensor.cpu() for name, tensor in stream}
    except Exception as error:
        return error_line(error)
    same = [name in found and torch.equal(found[name], tensor) for name, tensor in _trial()]
    return "" if all(same) else "the engine read other values than the actor had written"


def error_line(error: Exception) -> str:
    """Return an error as one line."""
    return f"{type(error).__name__}: {one_line(error)}"


def _trial() -> Bucket:
    values = torch.arange(_TRIAL_TENSORS * _TRIAL_SIZE, dtype=torch.float32)
    return [(f"trial {i}", part) for i, part in enumerate(values.split(_TRIAL_SIZE))]


def _connect(peer: socket.socket, address: str) -> None:
    """Connect to a publisher. Others may have filled its queue until it takes the next one."""
    until = time.monotonic() + JOIN_S
    while True:
        try:
            return peer.connect(address)
        except BlockingIOError as error:
            if time.monotonic() > until:
                message = f"the trainer took no connection within {JOIN_S:g} s"
                raise TransportError(message) from error
            time.sleep(0.05)
        except OSError as error:
            raise TransportError(f"the other side of a weight sync is gone: {error}") from error


def _peer_uid(peer: socket.socket) -> int:
    """Return the user of the process at the other end."""
    uid: int = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
    return uid


def _failure(reason: str) -> TransportError:
    return TransportError(f"the trainer could not send all weights: {reason}")


def _reason(peer: socket.socket) -> TransportError | None:
    """Return why the trainer has freed a buffer that it had announced, if it says so."""
    peer.settimeout(GOODBYE_S)
    with contextlib.suppress(TransportError):
        while True:
            _receive(peer)  # the header of the bucket
            message = json.loads(_receive(peer))
            if "error" in message:
                return _failure(message["error"])
    return None


def gpu_uuid(device: torch.device) -> str | None:
    """Return the id of a GPU that all processes agree on; None for a CPU."""
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


def _check_gpu(publisher: str | None) -> None:
    if publisher is None:
        return
    own = gpu_uuid(torch.device("cuda", torch.cuda.current_device()))
    if own != publisher:
        raise TransportError(
            f"the engine runs on GPU {own} and its trainer on GPU {publisher}; ipc needs one "
            "GPU for both. Set actor_rollout_ref.rollout.weight_transport=shared_memory"
        )


def _send(peer: socket.socket, message: bytes) -> None:
    try:
        peer.sendall(len(message).to_bytes(8, "little") + message)
    except OSError as error:
        raise TransportError(f"the other side of a weight sync is gone: {error}") from error


def _receive(peer: socket.socket) -> bytes:
    size = int.from_bytes(_receive_exactly(peer, 8), "little")
    return _receive_exactly(peer, size)


def _receive_exactly(peer: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        try:
            part = peer.recv(size - len(parts))
        except ConnectionError as error:
            raise TransportError(f"the other side of a weight sync is gone: {error}") from error
        except OSError as error:
            raise TransportError(f"the other side of a weight sync is silent: {error}") from error
        if not part:
            raise TransportError("the other side of a weight sync is gone")
        parts += part
    return bytes(parts)
