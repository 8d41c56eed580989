"""Fingerprints of weights."""

from types import SimpleNamespace

import pytest
import torch

from verlite.rollout.engines.vllm_worker import WorkerExtension
from verlite.weights.fingerprint import (
    MODULUS,
    _compiled,
    combine,
    fingerprint,
    kernel,
    settle,
    sum_of_hashes,
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
        bits = _signed(pattern * 0x9E3779B1)
        bits ^= bits >> 16
        total += bits + bits * (bits >> 13) * 0x7FEB352D
    return total % MODULUS


def _signed(number: int) -> int:
    """Wrap to 32 bits."""
    return (number + 2**31) % 2**32 - 2**31


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fingerprint_equals_its_formula_in_python_integers(dtype):
    torch.manual_seed(0)
    tensor = torch.randn(7, 129).to(dtype)
    tensor[2, 5], tensor[3, 3], tensor[4, 4] = -0.0, 0.0, 1e-30
    assert tensor_fingerprint(tensor) == naive_fingerprint(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_compiled_loop_equals_torch(dtype, monkeypatch):
    """For every bit pattern of 16 bits, an odd length and an address between two vectors."""
    if kernel(dtype) is None:
        pytest.skip("no C compiler")
    torch.manual_seed(6)
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    patterns = patterns[(patterns & 0x7FFF) <= 0x7C00].view(torch.float16)  # without NaN
    master = torch.cat([torch.randn(150_001), -torch.zeros(3), patterns.float()])
    for tensor in (master.to(dtype), master.to(dtype)[3:], master):
        compiled = tensor_fingerprint(tensor, dtype)
        with monkeypatch.context() as patch:
            patch.setattr("verlite.weights.fingerprint.kernel", lambda dtype: None)
            assert tensor_fingerprint(tensor, dtype) == compiled
    assert tensor_fingerprint(master.to(dtype)) == compiled


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "false"])
def test_without_a_working_compiler_torch_computes_the_fingerprint(compiler, monkeypatch):
    torch.manual_seed(7)
    tensor = torch.randn(2, 40_000)
    expected = combine(*(tensor_fingerprint(row) for row in tensor))
    monkeypatch.setenv("CC", compiler)
    _compiled.cache_clear()
    try:
        assert tensor_fingerprint(tensor) == expected
        assert _compiled() == {}
    finally:
        _compiled.cache_clear()


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


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda bits: bits ^ -(2**31), id="sign"),
        pytest.param(lambda bits: bits + (1 << 23), id="times 2"),
        pytest.param(lambda bits: bits + 1, id="one unit in the last place"),
    ],
)
def test_equal_changes_of_two_weights_do_not_cancel(change):
    """Of 2 million pairs of weights that change in the same way, none leaves the sum as it was."""
    torch.manual_seed(8)
    weights = (torch.rand(2048) * 0.02 + 0.01).unique()  # none is the negative or double of another
    changed = change(weights.view(torch.int32)).view(torch.float32)
    added = [
        (tensor_fingerprint(after) - tensor_fingerprint(before)) % MODULUS
        for before, after in zip(weights, changed, strict=True)
    ]
    assert not set(added) & {-one % MODULUS for one in added}


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


def counted_waits(monkeypatch) -> list[str]:
    """Return a list that gets an entry for each conversion of a tensor to Python numbers. On a GPU
    each of them waits for the device."""
    waits: list[str] = []
    for name in ("__int__", "tolist", "item"):
        convert = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor,
            name,
            lambda self, name=name, convert=convert: waits.append(name) or convert(self),
        )
    return waits


def test_a_set_of_weights_is_waited_for_once(monkeypatch):
    named = {str(i): torch.randn(5, i + 1) for i in range(7)}
    named |= {"native": torch.randn(1 << 16), "none": torch.zeros(0)}
    by_name = {name: tensor_fingerprint(tensor) for name, tensor in named.items()}
    waits = counted_waits(monkeypatch)
    assert fingerprint(named.items()) == sum(by_name.values()) % MODULUS and len(waits) == 1
    hashes = {name: sum_of_hashes(tensor) for name, tensor in named.items()}
    assert settle(hashes) == by_name and len(waits) == 2


def test_a_worker_of_vllm_waits_once_for_all_its_weights(monkeypatch):
    model = torch.nn.Sequential(torch.nn.Linear(3, 12), torch.nn.Linear(12, 2))
    fused = {"num_kv_head_replicas": 2, "num_heads": 2, "head_size": 4}
    for name, value in fused.items():
        setattr(model[0], name, value)
    model[1].lora_a_stacked = torch.randn(2, 5)
    worker = WorkerExtension()
    worker.rank, worker.model_config = 3, SimpleNamespace(dtype=torch.float32)
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    (weight, bias), (other, last) = ((one.weight, one.bias) for one in model)
    expected = {
        **{"0.weight[q]": weight[:8], "0.weight[kv 1]": weight[8:], "0.bias[q]": bias[:8]},
        **{"0.bias[kv 1]": bias[8:], "1.weight": other, "1.bias": last},
        "1.lora_a_stacked[0]": model[1].lora_a_stacked,
    }
    expected = {name: naive_fingerprint(tensor) for name, tensor in expected.items()}
    waits = counted_waits(monkeypatch)
    assert worker.verlite_fingerprints() == expected and len(waits) == 1
