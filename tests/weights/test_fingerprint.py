"""Fingerprints of weights."""

import pytest
import torch

from verlite.weights.fingerprint import (
    MODULUS,
    combine,
    fingerprint,
    fingerprints,
    tensor_fingerprint,
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
