"""Memory files."""

import os
from pathlib import Path

import pytest
import torch

from tests.weights.test_buckets import NAMED, assert_equal
from verlite.weights.buckets import BucketFiles, fill, header_of, in_buckets
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
    tensor = torch.arange(65, dtype=torch.uint8)
    staging = Staging(torch.device("cpu"), size)
    for _ in range(2):
        assert torch.cat([part.clone() for part in staging.to_host(tensor)]).equal(tensor)
