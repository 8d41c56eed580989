"""Writing a safetensors file one tensor at a time.

A file begins with the size of its header and the header, a JSON object with the place of every
tensor. The library's `save_file` therefore needs all tensors at once, and copies them. Here the
header has a fixed size, padded with spaces as the format allows, and is written last.
"""

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from verlite.weights.buckets import DTYPE_NAMES, flat_bytes


class TensorFile:
    """A safetensors file that is being written. It is complete after `close`; one that was left
    before has no valid header.

    Args:
        path: the file to create.
        header_bytes: space for the header.
        metadata: strings in the header.

    Attributes:
        names: names of the tensors so far.
        data_bytes: their size.
    """

    def __init__(self, path: Path, header_bytes: int, metadata: dict[str, str]):
        self.names: list[str] = []
        self.data_bytes = 0
        self._header: dict[str, Any] = {"__metadata__": metadata}
        self._header_bytes = (header_bytes + 7) // 8 * 8  # the format aligns the data to 8 bytes
        self._used = len(json.dumps(self._header))
        self._file = open(path, "wb")  # noqa: SIM115
        self._file.seek(8 + self._header_bytes)

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._file.close()

    def has_room(self, name: str, tensor: Tensor) -> bool:
        """Return True if the header has space for the tensor."""
        return self._used + len(self._entry(name, tensor)) <= self._header_bytes

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor of any device.

        Raises:
            ValueError: the header has no space for it.
        """
        if not self.has_room(name, tensor):
            raise ValueError(
                f"{self._file.name}: the header of {self._header_bytes} bytes has no space for "
                f"{name} after {len(self.names)} tensors. Write fewer tensors to one file"
            )
        self._used += len(self._entry(name, tensor))
        end = self.data_bytes + tensor.nbytes
        self._header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self.data_bytes, end],
        }
        self._file.write(flat_bytes(tensor.detach().cpu()).numpy().data)
        self.data_bytes = end
        self.names.append(name)

    def _entry(self, name: str, tensor: Tensor) -> str:
        """Return text at least as long as the tensor's entry in the header."""
        end = self.data_bytes + tensor.nbytes
        entry = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end]}
        return json.dumps({name: entry}) + ", "

    def close(self) -> None:
        """Write the header, and wait until the file is on the disk."""
        header = json.dumps(self._header).encode().ljust(self._header_bytes)
        self._file.seek(0)
        self._file.write(len(header).to_bytes(8, "little"))
        self._file.write(header)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
