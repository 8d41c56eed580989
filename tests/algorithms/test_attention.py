"""Causal attention on a GPU that does not exist: which kernels it can use, and the same numbers."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from verlite.algorithms import attention
from verlite.algorithms.attention import causal_attention


def inputs(**options: Any) -> list[torch.Tensor]:
    """Return query, key and value of two sequences of 9 tokens, 6 heads and 2 key-value heads."""
    return [torch.randn(2, heads, 9, 8, **options) for heads in (6, 2, 2)]


class OnGPU(torch.Tensor):
    """A CPU tensor that says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("window", [None, 4, 100])
def test_repeated_heads_change_no_output_and_no_gradient(window, monkeypatch):
    """A GPU's tensors are repeated if FlashAttention does not take them."""
    torch.manual_seed(0)
    direction = torch.randn(2, 6, 9, 8, dtype=torch.float64)
    shared = [x.requires_grad_() for x in inputs(dtype=torch.float64)]
    expected = causal_attention(*shared, 0.3, window)
    repeated = [x.detach().as_subclass(OnGPU).requires_grad_() for x in shared]
    heads = []
    original = attention.scaled_dot_product_attention

    def kernel(query, key, value, *args, **options):
        heads.append((query.shape[1], key.shape[1], value.shape[1], options["enable_gqa"]))
        return original(query, key, value, *args, **options)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", kernel)
    found = causal_attention(*repeated, 0.3, window)
    assert heads == [(6, 6, 6, False)]
    torch.testing.assert_close(found.as_subclass(torch.Tensor), expected)
    for actual, correct in zip(
        torch.autograd.grad((found * direction).sum(), repeated),
        torch.autograd.grad((expected * direction).sum(), shared),
        strict=True,
    ):
        torch.testing.assert_close(actual.as_subclass(torch.Tensor), correct)


@pytest.mark.parametrize(
    ("dtype", "window", "is_repeated"),
    [
        (torch.bfloat16, None, False),
        (torch.bfloat16, 100, False),
        (torch.bfloat16, 4, True),
        (torch.float32, None, True),
    ],
)
def test_heads_are_repeated_only_if_flash_attention_does_not_fit(
    dtype, window, is_repeated, monkeypatch
):
    """It takes 16 bits without a mask. torch is asked, because only torch knows the GPU."""

    def fits(params):
        return params.query.dtype != torch.float32 and params.attn_mask is None

    monkeypatch.setattr(attention, "can_use_flash_attention", fits)
    heads = []
    original = attention.scaled_dot_product_attention

    def kernel(query, key, value, *args, **options):
        heads.append((key.shape[1], options["enable_gqa"]))
        return original(query, key, value, *args, **options)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", kernel)
    with FakeTensorMode():
        out = causal_attention(*inputs(dtype=dtype, device="cuda"), None, window)
        causal_attention(*inputs(dtype=dtype), None, window)  # a CPU's kernel shares them
    assert out.shape == (2, 6, 9, 8)
    assert heads == [(6, False) if is_repeated else (2, True), (2, True)]


@pytest.mark.parametrize("window", [None, 1, 4, 8, 100])
@pytest.mark.parametrize("queries", [1, 3, 9])
def test_the_last_tokens_alone_attend_as_in_the_whole_sequence(queries, window, monkeypatch):
    """Masks of two rows at most: their memory does not grow with the queries."""
    torch.manual_seed(0)
    query, key, value = inputs(dtype=torch.float64)
    scores = query @ key.repeat_interleave(3, 1).transpose(2, 3) * 0.3
    back = torch.arange(9)[:, None] - torch.arange(9)
    seen = (back >= 0) & (back < (window or 9))
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    expected = weights @ value.repeat_interleave(3, 1)
    monkeypatch.setattr(attention, "_MASK_ROWS", 2)
    rows = []
    original = attention._mask
    monkeypatch.setattr(attention, "_mask", lambda q, *rest: rows.append(q) or original(q, *rest))
    found = causal_attention(query[:, :, -queries:], key, value, 0.3, window)
    torch.testing.assert_close(found, expected[:, :, -queries:])
    assert max(rows, default=0) <= 2
