"""Chunked log-probs against a per-token oracle, gradcheck, and a memory limit."""

import functools
import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from verlite.algorithms import logprobs
from verlite.algorithms.logprobs import sum_pi_squared, token_log_probs

T, H, V = 7, 5, 11


def sample(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(n, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for n in (T, V)
    )
    return hidden, weight, torch.randint(V, (T,), generator=generator)


def oracle(hidden, weight, labels, temperature: float) -> tuple[list[float], list[float]]:
    """Return log-prob and entropy of each token by the definition, in Python floats."""
    log_probs, entropies = [], []
    for h, label in zip(hidden.tolist(), labels.tolist(), strict=True):
        logits = [
            sum(a * b for a, b in zip(h, w, strict=True)) / temperature for w in weight.tolist()
        ]
        total = sum(math.exp(x) for x in logits)
        log_probs.append(math.log(math.exp(logits[label]) / total))
        entropies.append(-sum(math.exp(x) / total * math.log(math.exp(x) / total) for x in logits))
    return log_probs, entropies


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("chunk", [1, 2, 7, 100, None])
def test_agrees_with_the_oracle(temperature: float, chunk: int | None) -> None:
    hidden, weight, labels = sample()
    log_probs, entropy = token_log_probs(
        hidden, weight, labels, temperature, chunk, with_entropy=True
    )
    want_log_probs, want_entropy = oracle(hidden, weight, labels, temperature)
    assert log_probs.tolist() == pytest.approx(want_log_probs, rel=1e-12)
    assert entropy.tolist() == pytest.approx(want_entropy, rel=1e-12)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradcheck(with_entropy: bool) -> None:
    hidden, weight, labels = sample()

    def function(h, w):
        log_probs, entropy = token_log_probs(h, w, labels, 0.7, 3, with_entropy)
        return (log_probs, entropy) if with_entropy else log_probs

    assert torch.autograd.gradcheck(function, (hidden, weight))


def unchunked(hidden, weight, labels, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs and entropies from all logits at once, with torch's autograd."""
    log_softmax = torch.log_softmax((hidden @ weight.T).float() / temperature, -1)
    log_probs = log_softmax.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return log_probs, -(log_softmax.exp() * log_softmax).sum(-1)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_gradients_agree_with_unchunked_logits(dtype: torch.dtype, tolerance: float) -> None:
    grads = []
    for chunked in (True, False):
        hidden, weight, labels = sample(dtype)
        if chunked:
            log_probs, entropy = token_log_probs(hidden, weight, labels, 1.3, 2, with_entropy=True)
        else:
            log_probs, entropy = unchunked(hidden, weight, labels, 1.3)
        assert log_probs.dtype == entropy.dtype == torch.float32
        (log_probs * torch.arange(T) + entropy.square()).sum().backward()
        assert hidden.grad.dtype == weight.grad.dtype == dtype
        grads.append((hidden.grad, weight.grad))
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_log_softmax_is_float32_for_bfloat16_inputs() -> None:
    """Only the logits are rounded to bfloat16. A bfloat16 softmax has a 100 times larger error."""
    hidden, weight, labels = sample(torch.bfloat16)
    logits = (hidden @ weight.T).double()
    log_probs, _ = token_log_probs(hidden, weight, labels, 0.7)
    torch.testing.assert_close(
        log_probs.double(),
        (logits / 0.7).log_softmax(-1)[torch.arange(T), labels],
        rtol=1e-6,
        atol=1e-6,
    )


def test_forbidden_tokens_and_uniform_logits() -> None:
    hidden = torch.tensor([[1.0]])
    weight = torch.tensor([[0.0], [-math.inf], [0.0]])
    log_probs, entropy = token_log_probs(hidden, weight, torch.tensor([2]), with_entropy=True)
    assert log_probs.item() == pytest.approx(math.log(0.5)) and entropy.item() == pytest.approx(
        math.log(2)
    )
    _, entropy = token_log_probs(
        torch.zeros(3, H), torch.randn(V, H), torch.zeros(3, dtype=torch.int64), with_entropy=True
    )
    torch.testing.assert_close(entropy, torch.full((3,), math.log(V)))


def test_large_logits_do_not_overflow() -> None:
    weight = torch.tensor([[1000.0], [-1000.0]], requires_grad=True)
    log_probs, entropy = token_log_probs(
        torch.tensor([[1.0], [1.0]]), weight, torch.tensor([0, 1]), with_entropy=True
    )
    (log_probs + entropy).sum().backward()
    assert (
        log_probs.tolist() == [0, -2000]
        and entropy.tolist() == [0, 0]
        and weight.grad.isfinite().all()
    )


def test_sum_pi_squared() -> None:
    hidden, weight, labels = sample()
    want = []
    for h in hidden.tolist():
        weights = [
            math.exp(sum(a * b for a, b in zip(h, w, strict=True)) / 0.7) for w in weight.tolist()
        ]
        want.append(sum((x / sum(weights)) ** 2 for x in weights))
    for chunk in (2, None):
        got = sum_pi_squared(hidden, weight, 0.7, chunk)
        assert got.tolist() == pytest.approx(want, rel=1e-12) and not got.requires_grad


def test_empty_batch_gives_empty_results() -> None:
    hidden, weight, labels = (
        torch.zeros(0, H, requires_grad=True),
        torch.randn(V, H, requires_grad=True),
        torch.zeros(0, dtype=torch.int64),
    )
    log_probs, entropy = token_log_probs(hidden, weight, labels, with_entropy=True)
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.shape == entropy.shape == (0,) and (weight.grad == 0).all()


def test_memory_stays_within_a_chunk() -> None:
    """Allocations are at most as large as the logits of a chunk, and these are not saved."""
    tokens, vocabulary, chunk = 512, 1024, 16
    hidden, weight = (
        torch.randn(tokens, 8, requires_grad=True),
        torch.randn(vocabulary, 8, requires_grad=True),
    )
    labels = torch.randint(vocabulary, (tokens,))
    with torch.profiler.profile(profile_memory=True, record_shapes=False) as profile:
        log_probs, _ = token_log_probs(hidden, weight, labels, 0.9, chunk)
        log_probs.sum().backward()
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest <= 4 * chunk * vocabulary, largest
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.numel()) or t, lambda t: t
    ):
        token_log_probs(hidden, weight, labels, 0.9, chunk, with_entropy=True)
    assert sum(saved) == hidden.numel() + weight.numel() + 3 * tokens


def test_logging_entropy_does_not_change_gradients() -> None:
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(7, 4), torch.randn(11, 4), torch.randint(11, (7,))
    gradients = []
    for with_entropy in (False, True):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        log_probs, _ = token_log_probs(h, w, labels, 0.7, chunk=3, with_entropy=with_entropy)
        log_probs.square().sum().backward()
        gradients.append((h.grad, w.grad))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_entropy_gradient_equals_autograd() -> None:
    torch.manual_seed(1)
    hidden, weight, labels = (
        torch.randn(5, 4).double(),
        torch.randn(11, 4).double(),
        torch.randint(11, (5,)),
    )
    h, other = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    _, entropy = token_log_probs(h, weight, labels, chunk=2, with_entropy=True)
    assert entropy is not None
    entropy.square().sum().backward()
    probs = (other @ weight.t()).softmax(-1)
    (-(probs * probs.log()).sum(-1)).square().sum().backward()
    torch.testing.assert_close(h.grad, other.grad)


# On a GPU the work on logits is compiled


@pytest.mark.parametrize("with_entropy", [False, True])
def test_all_chunks_are_computed_by_one_graph(
    monkeypatch: pytest.MonkeyPatch, with_entropy: bool
) -> None:
    """Else a row's bits would depend on what the process computed before it."""
    from torch._dynamo.testing import CompileCounterWithBackend  # takes a second

    counter = CompileCounterWithBackend("aot_eager")
    compile_function: Any = torch.compile

    def compiled(function: Any, options: Any = None, **settings: Any) -> Any:
        return compile_function(function, backend=counter, fullgraph=True, **settings)

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(logprobs, "_compiled", functools.cache(logprobs._compiled.__wrapped__))
    generator = torch.Generator().manual_seed(0)
    rows, chunk = 80, 40
    logits = torch.randn(rows, V, generator=generator).bfloat16()
    labels = torch.randint(V, (rows, 1), generator=generator)
    columns = list(torch.rand(4 if with_entropy else 2, rows, 1, generator=generator))
    calls = [(logprobs._outputs, with_entropy, [labels])]
    calls += [(logprobs._gradient, False, columns)]
    for number, (function, flag, of_tokens) in enumerate(calls, 1):
        for temperature in (0.7, 1.0, 1.3):
            want = function(logits.clone(), temperature, flag, *of_tokens)
            for start, stop in ((0, 40), (40, 57), (57, 58), (58, 59), (3, 43), (0, 23), (0, 40)):
                at = slice(start, stop)
                got = logprobs._whole_chunk(
                    function,
                    chunk,
                    logits[at].clone(),
                    temperature,
                    flag,
                    *(x[at] for x in of_tokens),
                )
                for one, whole in zip(tree_leaves(got), tree_leaves(want), strict=True):
                    assert len(whole) in (0, rows) and torch.equal(one, whole[at])
        assert counter.frame_count == number, (function, temperature, start, stop)


def _without_logits(logits: Any, temperature: float, value: int) -> int:
    return value


def test_without_a_compiler_log_probs_are_computed_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: Any) -> Any:
        raise RuntimeError("Failed to find C compiler.\nSet CC")

    logits: Any = SimpleNamespace(is_cuda=True)
    monkeypatch.setattr(logprobs, "_whole_chunk", broken)
    monkeypatch.setattr(logprobs, "_unfused", set())
    with caplog.at_level(logging.WARNING):
        assert [logprobs._fused(_without_logits, 8, logits, 1.0, i) for i in range(2)] == [0, 1]
    assert "RuntimeError: Failed to find C compiler.)" in caplog.text
    assert len(caplog.records) == 1 == len(logprobs._unfused)


@pytest.mark.parametrize("broken", ["addmm", "_whole_chunk"])
def test_full_memory_is_not_taken_for_a_missing_kernel(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """One full moment would slow the head down until the process ends."""

    def full(*arguments: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch if broken == "addmm" else logprobs, broken, full)
    with pytest.raises(torch.OutOfMemoryError):
        if broken == "addmm":
            logprobs._adds_wide.__wrapped__(torch.device("cpu"), torch.bfloat16)
        else:
            logits: Any = SimpleNamespace(is_cuda=True)
            logprobs._fused(_without_logits, 8, logits, 1.0, 1)
    assert _without_logits not in logprobs._unfused


def test_gradients_of_chunks_are_added_in_float32() -> None:
    """1,024 chunks that each add 1 to a weight's gradient: a bfloat16 sum stays at 256."""
    total = torch.zeros(1, 1)
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    for _ in range(1024):
        logprobs._add_product(total, one, one)
    assert total.item() == 1024
