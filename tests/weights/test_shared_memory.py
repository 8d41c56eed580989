"""Memory files."""

import os
from pathlib import Path

import pytest
import torch

from tests.weights.test_buckets import NAMED, assert_equal
from verlite.weights.buckets import BucketFiles, fill, flat_bytes, header_of, in_buckets
from verlite.weights.shared_memory import MemoryFiles, Staging
from verlite.weights.transport import publish


def test_files_have_the_size_that_is_reported():
    files = MemoryFiles()
    publish(NAMED, [files], 2000)
    assert files.bytes == sum(os.stat(path).st_size for path in files.paths)
    files.close()


def test_mapped_tensors_stay_readable_after_their_files_are_closed():
    files = MemoryFiles()
    files.add([("w", torch.arange(10.0))])
    ((_, tensor),) = BucketFiles(tuple(files.paths))
    files.close()
    assert tensor.sum() == 45
    assert not any(Path(path).exists() for path in files.paths)


def test_a_failure_while_publishing_leaves_no_files():
    def broken():
        yield "v", torch.arange(10.0)
        yield "w", torch.arange(10.0)  # now the first bucket is written
        raise ZeroDivisionError

    before = sorted(os.listdir("/proc/self/fd"))
    # The traceback would keep unreleased mappings alive.
    with pytest.raises(ZeroDivisionError) as caught:
        publish(broken(), [MemoryFiles()], 1)
    assert caught.value and sorted(os.listdir("/proc/self/fd")) == before


def test_without_memory_files_a_private_folder_is_used(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    files = MemoryFiles()
    for bucket in in_buckets([("w", torch.arange(10.0)), ("v", torch.ones(3))], 1):
        files.add(bucket)
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o700]
    assert [name for name, _ in BucketFiles(tuple(files.paths))] == ["w", "v"]
    files.close()
    assert not list(tmp_path.iterdir())


def test_a_file_can_be_filled_through_its_mapping():
    files = MemoryFiles()
    header, size = header_of(NAMED)
    fill(files.map_new(header, size), NAMED)
    assert_equal(BucketFiles(tuple(files.paths)))
    assert files.bytes == os.stat(files.paths[0]).st_size
    files.close()


@pytest.mark.parametrize("size", [1, 7, 64, 65, 1000])
def test_staging_yields_every_byte_in_order(size):
    """Two buffers alternate; a yielded one is not overwritten before the next is asked for."""
    tensors = [torch.arange(n, dtype=torch.int16) for n in (20, 0, 1, 11)]
    tensors.append(torch.arange(6.0).reshape(2, 3).t())
    expected = torch.cat([flat_bytes(tensor) for tensor in tensors])
    staging = Staging(torch.device("cpu"), size)
    for _ in range(2):
        parts = [part.clone() for part in staging.to_host(tensors)]
        assert torch.cat(parts).equal(expected)
        assert len(parts) == -(-len(expected) // size)  # small tensors are copied together
    assert not list(staging.to_host([]))


def test_staging_waits_for_the_device_before_a_buffer_is_read_or_filled_again():
    """Events as of a GPU, whose copies are done only when the event after them is waited for."""
    staging = Staging(torch.device("cpu"), 4)
    log = []

    class Event:
        def __init__(self, slot):
            self.slot = slot

        def record(self):
            log.append(("copied to", self.slot))

        def synchronize(self):
            log.append(("waited for", self.slot))

    staging.copied = [Event(0), Event(1)]
    for part in staging.to_host([torch.zeros(3, dtype=torch.uint8)] * 3):
        log.append(("read", 0 if part.data_ptr() == staging.buffers[0].data_ptr() else 1))
    both = [("copied to", 0), ("copied to", 1), ("waited for", 0), ("read", 0)]
    assert log == [*both, ("copied to", 0), ("waited for", 1), ("read", 1), *both[2:]]
