"""Token sampling and its random numbers."""

import pytest
import torch

from tests.rollout.oracle import naive_filter
from verlite.rollout.sampling import mix64, sample, uniform


def splitmix64(state: int) -> int:
    """Return SplitMix64 in Python integers (Steele, Lea and Flood 2014, figure 15)."""
    mask = 2**64 - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_numbers_equal_splitmix64():
    assert splitmix64(1234567) == 6457827717110365317  # the first number of a published sequence
    for seed in (0, 1, -1, 2**62 + 12345, -(2**63)):
        assert mix64(seed) % 2**64 == splitmix64(seed)
        position = torch.tensor([1, 2, 77])
        expected = [
            (splitmix64(seed + (p - 1) * 0x9E3779B97F4A7C15) >> 12) / 2**52
            for p in position.tolist()
        ]
        assert uniform(torch.full((3,), seed), position).tolist() == expected


def test_numbers_are_uniform_and_uncorrelated():
    keys = torch.tensor([mix64(seed) for seed in range(300)])
    numbers = uniform(keys[:, None].expand(300, 300), torch.arange(300).expand(300, 300))
    assert abs(numbers.mean() - 0.5) < 0.004 and abs(numbers.var() - 1 / 12) < 0.002
    centred = numbers - 0.5
    for other in (
        centred.roll(1, 0),
        centred.roll(1, 1),
        centred.roll((1, 1), (0, 1)),
        centred.roll((1, -1), (0, 1)),
    ):
        assert abs((centred * other).mean() * 12) < 0.015


def row(*values: float) -> torch.Tensor:
    return torch.tensor(values).log()


def draw(logits, temperature=1.0, top_k=None, top_p=1.0, count=20001):
    """Return the frequencies of the tokens for evenly spaced draws."""
    n = count
    vocabulary = logits.shape[-1]
    ids, log_probs = sample(
        logits.expand(n, vocabulary),
        torch.full((n,), temperature),
        torch.full((n,), top_k or vocabulary),
        torch.full((n,), top_p),
        torch.arange(n, dtype=torch.float64) / n,
        filtered=top_k is not None or top_p < 1,
    )
    return torch.bincount(ids, minlength=vocabulary) / n, ids, log_probs


@pytest.mark.parametrize(
    "temperature, top_k, top_p",
    [(1.0, None, 1.0), (0.5, None, 1.0), (1.0, 3, 1.0), (1.0, None, 0.75), (2.0, 4, 0.6)],
)
def test_frequencies_and_log_probs_match_the_filtered_distribution(temperature, top_k, top_p):
    logits = row(0.08, 0.4, 0.02, 0.3, 0.2)
    expected = naive_filter(logits / temperature, top_k or -1, top_p).softmax(-1)
    frequencies, ids, log_probs = draw(logits, temperature, top_k, top_p)
    torch.testing.assert_close(frequencies, expected, atol=2e-4, rtol=0)
    torch.testing.assert_close(log_probs, expected.log()[ids], atol=1e-6, rtol=0)


def test_zero_probability_token_is_never_drawn():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    largest = torch.tensor([1 - 2.0**-52], dtype=torch.float64)
    for draws in (
        torch.zeros(1, dtype=torch.float64),
        torch.full((1,), 0.5, dtype=torch.float64),
        largest,
    ):
        ids, _ = sample(
            logits, torch.ones(1), torch.tensor([5]), torch.ones(1), draws, filtered=False
        )
        assert ids.item() in (1, 3)


def test_tail_of_a_large_vocabulary_keeps_its_probability():
    """A float32 running sum would give the last tokens probability 0."""
    logits = torch.zeros(1, 200_000)
    logits[0, 0] = 18.0
    share = (199_999 / (torch.tensor(18.0).double().exp() + 199_999)).item()
    draws = torch.tensor([1 - 1e-12], dtype=torch.float64)
    ids, _ = sample(
        logits, torch.ones(1), torch.tensor([200_000]), torch.ones(1), draws, filtered=False
    )
    assert ids.item() == 199_999
    draws = torch.tensor([1 - share / 2], dtype=torch.float64)
    ids, _ = sample(
        logits, torch.ones(1), torch.tensor([200_000]), torch.ones(1), draws, filtered=False
    )
    assert abs(ids.item() - 100_000) < 2_000


def test_greedy_rows_beside_sampled_rows():
    logits = torch.stack([row(0.1, 0.6, 0.3), row(0.1, 0.6, 0.3)])
    ids, log_probs = sample(
        logits,
        torch.tensor([0.0, 0.5]),
        torch.tensor([3, 3]),
        torch.ones(2),
        torch.tensor([0.999, 0.999]).double(),
        filtered=False,
    )
    assert ids.tolist() == [1, 2]
    torch.testing.assert_close(log_probs, torch.tensor([0.6, 0.09 / 0.46]).log())
