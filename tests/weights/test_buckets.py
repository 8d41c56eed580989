"""Buckets in shared memory."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from verlite.weights.buckets import read_buckets, write_buckets


def test_buckets_return_every_tensor_in_order():
    torch.manual_seed(6)
    named = [
        ("model.embed.weight", torch.randn(50, 8)),
        ("big", torch.randn(4000)),
        ("half", torch.randn(3, 5).to(torch.bfloat16)),
        ("scalar", torch.tensor(3.0)),
        ("transposed", torch.randn(6, 4).t()),
        ("counts", torch.arange(5)),
        ("flags", torch.tensor([True, False])),
    ]
    buckets = write_buckets(iter(named), bucket_bytes=2000)
    assert len(buckets.paths) > 2 and buckets.bytes == sum(
        os.stat(path).st_size for path in buckets.paths
    )
    back = list(read_buckets(buckets.paths))
    assert [name for name, _ in back] == [name for name, _ in named]
    for (_, sent), (_, got) in zip(named, back, strict=True):
        assert got.dtype == sent.dtype and got.shape == sent.shape and torch.equal(got, sent)
    assert set(load_file(buckets.paths[0])) == {"model.embed.weight"}, (
        "the files are ordinary safetensors files"
    )


def test_bucket_sizes_are_bounded_and_empty_buckets_are_not_written():
    named = [(f"w{i}", torch.zeros(100)) for i in range(10)]
    assert len(write_buckets(named, bucket_bytes=800).paths) == 5
    assert len(write_buckets(named, bucket_bytes=1).paths) == 10
    assert write_buckets([], bucket_bytes=800).paths == []


def test_mapped_tensors_stay_readable_after_their_buckets_are_closed():
    buckets = write_buckets([("w", torch.arange(10.0))], 1 << 20)
    ((_, tensor),) = read_buckets(buckets.paths)
    buckets.close()
    assert tensor.sum() == 45
    assert not any(Path(path).exists() for path in buckets.paths)


def test_a_failure_while_writing_leaves_no_files():
    def broken():
        yield "v", torch.arange(10.0)
        yield "w", torch.arange(10.0)  # now the first bucket is written
        raise ZeroDivisionError

    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(
        ZeroDivisionError
    ) as caught:  # the traceback would keep unreleased mappings alive
        write_buckets(broken(), 1)
    assert caught.value and sorted(os.listdir("/proc/self/fd")) == before


def test_without_memory_files_a_private_folder_is_used(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    buckets = write_buckets([("w", torch.arange(10.0)), ("v", torch.ones(3))], 1)
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o700]
    assert [name for name, _ in read_buckets(buckets.paths)] == ["w", "v"]
    buckets.close()
    assert not list(tmp_path.iterdir())
