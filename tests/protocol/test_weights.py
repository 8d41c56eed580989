"""Fingerprints of weights, and files that pass weights between processes."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from verlite.protocol.weights import (
    MODULUS,
    combine,
    fingerprint,
    fingerprints,
    read_buckets,
    tensor_fingerprint,
    write_buckets,
)


def naive_fingerprint(tensor: torch.Tensor) -> int:
    """Compute the hash with Python integers, element by element."""
    total = 0
    for pattern in (
        tensor.reshape(-1).view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).tolist()
    ):
        if (
            tensor.element_size() == 4
            and pattern == -(2**31)
            or tensor.element_size() == 2
            and pattern == -(2**15)
        ):
            continue  # minus zero
        bits = pattern * 0x9E3779B1 % 2**32
        signed = bits - 2**32 if bits >= 2**31 else bits
        bits = (bits ^ (signed >> 15)) % 2**32
        total += bits * 0x85EBCA6B
    return total % MODULUS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fingerprint_equals_its_formula_in_python_integers(dtype):
    torch.manual_seed(0)
    tensor = torch.randn(7, 129).to(dtype)
    tensor[2, 5], tensor[3, 3], tensor[4, 4] = -0.0, 0.0, 1e-30
    assert tensor_fingerprint(tensor) == naive_fingerprint(tensor)


def test_fingerprint_ignores_order_fusion_sharding_layout_and_zero_padding():
    torch.manual_seed(1)
    q, k, v = torch.randn(8, 16), torch.randn(4, 16), torch.randn(4, 16)
    whole = fingerprint([("q", q), ("k", k), ("v", v)])
    assert whole == fingerprint([("v", v), ("q", q), ("k", k)])
    fused = torch.cat([q, k, v])
    assert whole == fingerprint([("qkv", fused)])
    assert whole == fingerprint([("qkv_t", fused.t())])
    assert whole == fingerprint([("qkv_t", fused.t().contiguous())])
    assert whole == combine(*(fingerprint([("part", part)]) for part in fused.chunk(3, dim=1)))
    assert whole == fingerprint([("padded", torch.nn.functional.pad(fused, (0, 5, 0, 3)))])
    assert whole == fingerprint([("padded", torch.cat([fused, -torch.zeros(2, 16)]))])
    assert 0 <= whole < MODULUS


def test_fingerprint_does_not_depend_on_chunks():
    torch.manual_seed(2)
    long = torch.randn(300_001)
    assert tensor_fingerprint(long) == combine(
        *(tensor_fingerprint(piece) for piece in long.split(77_777))
    )
    assert tensor_fingerprint(torch.empty(0, 4)) == 0


def test_fingerprint_detects_one_unit_in_the_last_place():
    torch.manual_seed(3)
    before = torch.randn(1000)
    seen = {tensor_fingerprint(before)}
    for index in range(0, 1000, 7):
        after = before.clone()
        after[index] = torch.nextafter(after[index], torch.tensor(10.0))
        seen.add(tensor_fingerprint(after))
    assert len(seen) == 1 + len(range(0, 1000, 7))


def test_fingerprint_detects_changes_whose_bits_cancel():
    """A plain sum of the bits, or of a linear hash of them, would miss this."""
    before = torch.full((64,), 1.5)
    after = before.clone()
    after[3] = torch.nextafter(before[3], torch.tensor(2.0))
    after[9] = torch.nextafter(before[9], torch.tensor(0.0))
    assert before.view(torch.int32).sum() == after.view(torch.int32).sum()
    assert tensor_fingerprint(before) != tensor_fingerprint(after)


def test_fingerprint_detects_a_relative_change_of_one_millionth():
    torch.manual_seed(4)
    before = torch.randn(4096)
    assert tensor_fingerprint(before) != tensor_fingerprint(before * (1 + 1e-6))


def test_float32_master_and_bfloat16_engine_agree_under_bfloat16():
    torch.manual_seed(5)
    master = torch.randn(999) * torch.logspace(-44, 10, 999)
    master[::5] *= -1
    for dtype in (torch.bfloat16, torch.float16):
        engine = master.to(dtype)
        assert fingerprint([("w", master)], dtype) == fingerprint([("w", engine)])
    assert fingerprint([("w", master)]) != fingerprint([("w", master.to(torch.bfloat16))])


def test_per_tensor_fingerprints_name_what_differs():
    named = {"a": torch.ones(3), "b": torch.full((3,), 2.0)}
    other = {"a": torch.ones(3), "b": torch.full((3,), 2.5)}
    left, right = fingerprints(named.items()), fingerprints(other.items())
    assert [name for name in left if left[name] != right[name]] == ["b"]
    assert combine(*left.values()) == fingerprint(named.items())


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
