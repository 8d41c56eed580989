"""Packed attention against a written-out softmax."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from verlite.engine import attention
from verlite.engine.attention import Paths, Select, Sequences, packed_attention

LENGTHS = (5, 1, 8, 1, 5, 3)  # two pairs are alike


def naive(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    window: int | None,
    lengths: tuple[int, ...] = LENGTHS,
) -> torch.Tensor:
    """Return naive attention [1, T, H, D]: a token sees at most `window` tokens of its sequence."""
    groups = query.shape[1] // key.shape[1]
    start = 0
    out = torch.zeros(1, query.shape[2], query.shape[1], query.shape[3], dtype=query.dtype)
    for length in lengths:
        for t in range(start, start + length):
            first = start if window is None else max(start, t - window + 1)
            for head in range(query.shape[1]):
                scores = query[0, head, t] @ key[0, head // groups, first : t + 1].T * scaling
                out[0, t, head] = torch.softmax(scores, 0) @ value[0, head // groups, first : t + 1]
        start += length
    return out


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_equals_naive_softmax(kv_heads: int, window: int | None) -> None:
    torch.manual_seed(0)
    total = sum(LENGTHS)
    query, key, value = (
        torch.randn(1, heads, total, 6, dtype=torch.float64, requires_grad=True)
        for heads in (4, kv_heads, kv_heads)
    )
    sequences = Sequences(LENGTHS, torch.tensor([0, *LENGTHS]).cumsum(0).int())
    out, weights = packed_attention(
        nn.Module(),
        query,
        key,
        value,
        None,
        scaling=0.3,
        sliding_window=window,
        sequences=sequences,
    )
    expected = naive(query, key, value, 0.3, window)
    assert weights is None
    torch.testing.assert_close(out, expected)
    direction = torch.randn_like(expected)
    for actual, correct in zip(
        torch.autograd.grad((out * direction).sum(), (query, key, value)),
        torch.autograd.grad((expected * direction).sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(actual, correct)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 9])
def test_short_sequences_that_share_a_call_have_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    threads = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    torch.set_num_threads(1)  # with more, torch rounds by how it divides its work among them
    torch.manual_seed(0)
    lengths = (33, 7, 33, 200, 7, 33, 200)
    query, key, value, direction = (
        torch.randn(1, heads, sum(lengths), 32, dtype=dtype, requires_grad=True)
        for heads in (4, 2, 2, 4)
    )
    sequences = Sequences(lengths, torch.tensor([0, *lengths]).cumsum(0).int())
    options: dict[str, Any] = {"scaling": 0.3, "sliding_window": window, "sequences": sequences}
    counted, found = [], []
    one_call = attention.causal_attention
    monkeypatch.setattr(
        attention, "causal_attention", lambda *args: counted.append(len(args[0])) or one_call(*args)
    )
    for short in (attention._SHORT, 0):
        monkeypatch.setattr(attention, "_SHORT", short)
        out, _ = packed_attention(nn.Module(), query, key, value, None, **options)
        loss = (out.transpose(1, 2) * direction).sum()
        found.append([out, *torch.autograd.grad(loss, (query, key, value))])
    assert counted == [3, 2, 2] + [1] * 7
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("window", [None, 3])
def test_a_tree_attends_along_its_paths(window: int | None) -> None:
    """A prompt of 4 tokens, an answer of 3 that two answers of 1 and 2 leave after its first token,
    and another sequence, against the flat sequences: outputs, and sums of gradients."""
    torch.manual_seed(0)
    places = [0, 1, 2, 3, 4, 5, 6] + [0, 1, 2, 3, 4, 7] + [0, 1, 2, 3, 8, 9] + [10, 11]
    lengths = (7, 6, 6, 2)
    query, key, value = (
        torch.randn(1, heads, 12, 6, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    )
    flat = naive(*(x[:, :, places] for x in (query, key, value)), 0.3, window, lengths)
    kept = [places.index(place) for place in range(12)]
    paths = Paths(torch.tensor(places), lengths, torch.tensor([0, *lengths]).cumsum(0).int())
    own = (7, 1, 2, 2)
    sequences = Sequences(own, torch.tensor([0, *own]).cumsum(0).int(), paths=paths)
    assert sequences.longest == 7
    options: dict[str, Any] = {"scaling": 0.3, "sliding_window": window, "sequences": sequences}
    out, _ = packed_attention(nn.Module(), query, key, value, None, **options)
    torch.testing.assert_close(out, flat[:, kept])
    direction = torch.randn_like(out)
    for actual, correct in zip(
        torch.autograd.grad((out * direction).sum(), (query, key, value)),
        torch.autograd.grad((flat[:, kept] * direction).sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(actual, correct)


def test_gradients_of_shared_tokens_are_summed_in_float32() -> None:
    """A token on 1,024 paths: bfloat16 has 8 bits, so a sum in it stays at 256."""
    x = torch.zeros(1, 1, 2, 1, dtype=torch.bfloat16, requires_grad=True)
    paths = Paths(
        torch.tensor([0, 1] * 1024), (2,) * 1024, torch.arange(0, 2049, 2, dtype=torch.int32)
    )
    paths.gather(x).sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16
    assert x.grad.flatten().tolist() == [1024.0, 1024.0]


def test_gradients_of_shared_hidden_states_are_summed_in_float32() -> None:
    hidden = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    Select.apply(hidden, torch.tensor([0] * 1024 + [1])).sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16
    assert hidden.grad.flatten().tolist() == [1024.0, 1.0]


def test_unsupported_attention_raises() -> None:
    x = torch.zeros(1, 2, 3, 4)
    sequences = Sequences((3,), torch.tensor([0, 3], dtype=torch.int32))
    bidirectional = nn.Module()
    bidirectional.is_causal = False
    for module, mask, more, message in (
        (nn.Module(), None, {"softcap": 30.0}, "softcap"),
        (nn.Module(), None, {"s_aux": x}, "s_aux"),
        (nn.Module(), None, {"dropout": 0.1}, "dropout"),
        (nn.Module(), x, {}, "an attention mask"),
        (bidirectional, None, {}, "bidirectional"),
        (nn.Module(), None, {"sequences": None}, "did not receive the packing layout"),
    ):
        with pytest.raises(NotImplementedError, match=f"{message}.*use_remove_padding=False"):
            packed_attention(module, x, x, x, mask, **({"sequences": sequences} | more))


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_varlen_kernel_accepts_the_arguments(kv_heads: int) -> None:
    """Check shapes and arguments with a mocked GPU kernel. The numbers need a real GPU."""
    with FakeTensorMode():
        query, key, value = (
            torch.empty(1, heads, sum(LENGTHS), 64, dtype=torch.bfloat16, device="cuda")
            for heads in (4, kv_heads, kv_heads)
        )
        sequences = Sequences(LENGTHS, torch.zeros(7, dtype=torch.int32, device="cuda"))
        out, _ = packed_attention(
            nn.Module(), query, key, value, None, scaling=0.1, sliding_window=3, sequences=sequences
        )
        assert out.shape == (1, sum(LENGTHS), 4, 64) and out.dtype == torch.bfloat16


def test_varlen_kernel_gets_the_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries are a sequence's own tokens, keys those of its path. FlashAttention aligns them at
    the end, as the written-out kernel does here."""

    def kernel(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
        assert (max_q, max_k, window_size) == (3, 5, (-1, 0))
        outputs = []
        for i in range(len(cu_q) - 1):
            own, path = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
            whole = torch.zeros(int(cu_k[i + 1] - cu_k[i]), *q.shape[1:], dtype=q.dtype)
            whole[len(whole) - len(q[own]) :] = q[own]
            heads = (x.transpose(0, 1)[None] for x in (whole, k[path], v[path]))
            out = naive(*heads, scale, None, (len(whole),))[0]
            outputs.append(out[len(whole) - len(q[own]) :])
        return torch.cat(outputs)

    torch.manual_seed(0)
    x = [torch.randn(1, heads, 6, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    boundaries = [torch.tensor(b, dtype=torch.int32) for b in ([0, 3, 5, 6], [0, 3, 8, 9])]
    paths = Paths(torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 5]), (3, 5, 1), boundaries[1])
    options: dict[str, Any] = {
        "scaling": 0.3,
        "sequences": Sequences((3, 2, 1), boundaries[0], paths=paths),
    }
    expected, _ = packed_attention(nn.Module(), *x, None, **options)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    monkeypatch.setattr(attention, "_fits_varlen_kernel", lambda query, value: True)
    found, _ = packed_attention(nn.Module(), *x, None, **options)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({}, True),
        ({"capability": (7, 5)}, False),  # Turing
        ({"hip": "6.4"}, False),  # AMD
        ({"head_dim": 36}, False),
        ({"head_dim": 264}, False),
        ({"dtype": torch.float32}, False),
    ],
)
def test_the_varlen_kernel_is_used_only_where_it_works(
    change: dict[str, Any], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention-2 needs an NVIDIA GPU from Ampere on, 16 bits, and a head size of 8 n."""
    about = {"capability": (8, 0), "hip": None, "head_dim": 64, "dtype": torch.bfloat16} | change
    monkeypatch.setattr(torch.version, "hip", about["hip"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: about["capability"])
    attention._has_varlen_kernel.cache_clear()
    tensor: Any = SimpleNamespace(
        is_cuda=True,
        device=torch.device("cuda", 0),
        dtype=about["dtype"],
        shape=(1, 4, 10, about["head_dim"]),
    )
    assert attention._fits_varlen_kernel(tensor, tensor) is fits
    attention._has_varlen_kernel.cache_clear()
