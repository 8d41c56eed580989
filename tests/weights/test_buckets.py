"""Buckets: their sizes, their bytes, and files that are mapped."""

import torch
from safetensors.torch import load, load_file

from verlite.weights.buckets import BucketFiles, fill, header_of, in_buckets, views
from verlite.weights.shared_memory import MemoryFiles

NAMED = [
    ("model.embed.weight", torch.randn(50, 8)),
    ("big", torch.randn(4000)),
    ("half", torch.randn(3, 5).to(torch.bfloat16)),
    ("scalar", torch.tensor(3.0)),
    ("transposed", torch.randn(6, 4).t()),
    ("counts", torch.arange(5)),
    ("flags", torch.tensor([True, False])),
    ("after odd bytes", torch.randn(2)),
]


def assert_equal(found, expected=NAMED):
    found = list(found)
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (_, got), (_, sent) in zip(found, expected, strict=True):
        assert got.dtype == sent.dtype and got.shape == sent.shape and torch.equal(got, sent)


def test_buckets_keep_order_and_size():
    named = [(f"w{i}", torch.zeros(100)) for i in range(10)]
    assert [len(bucket) for bucket in in_buckets(named, 800)] == [2] * 5
    assert [len(bucket) for bucket in in_buckets(named, 1000)] == [2] * 5
    assert [len(bucket) for bucket in in_buckets(named, 1)] == [1] * 10
    assert list(in_buckets([], 800)) == []


def test_a_filled_payload_is_a_safetensors_file_and_views_return_its_tensors():
    header, size = header_of(NAMED)
    payload = torch.full((size,), 7, dtype=torch.uint8)
    fill(payload, NAMED)
    assert_equal(views(header, payload))
    parsed = load(header + payload.numpy().tobytes())
    assert_equal((name, parsed[name]) for name, _ in NAMED)
    assert len(header) % 64 == 0


def test_bucket_files_can_be_read_twice():
    files = MemoryFiles()
    for bucket in in_buckets(NAMED, 2000):
        files.add(bucket)
    assert len(files.paths) > 2
    assert set(load_file(files.paths[0])) == {"model.embed.weight"}
    mapped = BucketFiles(tuple(files.paths))
    assert_equal(mapped)
    assert_equal(mapped)
    files.close()
