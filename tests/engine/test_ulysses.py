"""Sequence parallelism gives the results of one rank: attention, passes, updates."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.engine import matrix, programs
from tests.engine.batches import engine, naive_log_probs, ragged_batch
from tests.engine.ranks import Ranks
from tests.engine.test_attention import naive
from tests.models import tiny_model
from verlite.engine.micro import MicroBatching, model_inputs
from verlite.protocol.data import DataProto

pytestmark = pytest.mark.process

TWO = {"sequence_parallel": 2}
EXACT = {"atol": 2e-6, "rtol": 1e-5}
"""Float32 rounding of numbers up to about 10, with other orders of summation; eps is 6e-8."""

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "as many KV heads as ranks": ("qwen2", {}),
    "one KV head": ("llama", {"num_key_value_heads": 1}),
    "KV heads that ranks do not divide": (
        "llama",
        {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3},
    ),
    "no grouping": ("llama", {"num_key_value_heads": 4}),
    "a window": ("mistral", {"sliding_window": 3}),
    "learned positions": ("gpt2", {"n_positions": 32}),
}


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    arch, settings = MODELS[request.param]
    return tiny_model(tmp_path_factory.mktemp("model"), arch, **settings)


class Rank:
    """A process group without processes."""

    def __init__(self, rank: int, size: int):
        self.rank = lambda: rank
        self.size = lambda: size


def test_rank_slices_by_hand() -> None:
    """Sequences of 3 and 4 tokens on 3 ranks, with two tokens of padding.

    The second sequence crosses both slice boundaries, and labels come from the next slice.
    """
    rows = DataProto.from_dict(
        {
            "input_ids": torch.tensor([[0, 11, 12, 13, 0], [21, 22, 23, 24, 0]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 0]]),
            "position_ids": torch.tensor([[0, 0, 1, 2, 2], [0, 1, 2, 3, 3]]),
            "response_mask": torch.tensor([[1, 1, 0], [1, 1, 0]]),
        }
    ).batch
    every: Any = [model_inputs(rows, packed=True).rank_slice(Rank(rank, 3)) for rank in range(3)]  # type: ignore[arg-type]
    assert [part.input_ids.tolist() for part in every] == [
        [[11, 12, 13]],
        [[21, 22, 23]],
        [[24, 0, 0]],
    ]
    assert [part.position_ids.tolist() for part in every] == [[[0, 1, 2]], [[0, 1, 2]], [[3, 0, 0]]]
    assert [part.targets.source.tolist() for part in every] == [[0, 1], [1, 2], []]
    assert [part.targets.labels.tolist() for part in every] == [[12, 13], [23, 24], []]
    assert [part.targets.destination.tolist() for part in every] == [[0, 1], [3, 4], []]
    for part in every:
        assert part.sequences.lengths == (3, 4, 2) and part.sequences.cu_seqlens.tolist() == [
            0,
            3,
            7,
            9,
        ]


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("window", [None, 3])
def test_shared_attention_equals_the_whole_row(
    two_ranks: Ranks, kv_heads: int, window: int | None
) -> None:
    """Outputs and gradients of 6 heads against a naive softmax. The third sequence crosses the
    boundary of the slices."""
    torch.manual_seed(0)
    lengths = (5, 1, 8, 3, 1)
    tensors = [
        torch.randn(1, heads, 18, 6, dtype=torch.float64) for heads in (6, kv_heads, kv_heads)
    ]
    direction = torch.randn(1, 18, 6, 6, dtype=torch.float64)
    whole = [tensor.clone().requires_grad_() for tensor in tensors]
    expected = naive(*whole, 0.3, window, lengths)
    gradients = torch.autograd.grad((expected * direction).sum(), whole)
    parts = two_ranks.call(programs.shared_attention, tensors, direction, lengths, window)
    torch.testing.assert_close(torch.cat([out for out, _ in parts], 1), expected)
    for i, gradient in enumerate(gradients):
        torch.testing.assert_close(torch.cat([part[i] for _, part in parts], 2), gradient)


SHARES = {
    "uneven": [[5, 2, 7, 0, 4], [6, 1, 3]],
    "all on the second rank": [[], list(range(8))],
    "one row": [[3], []],
    "nothing to train": [[4], []],
}


@pytest.mark.parametrize(
    "micro",
    [MicroBatching(size=3), MicroBatching(size=1), MicroBatching(max_tokens=24)],
    ids=["3", "1", "tokens"],
)
def test_shared_log_probs_equal_one_rank(path: str, two_ranks: Ranks, micro: MicroBatching) -> None:
    """They also equal the token-by-token oracle. Each rank receives the outputs of its own rows."""
    batch = ragged_batch()
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    with torch.no_grad():
        log_probs, entropy = naive_log_probs(oracle, batch, programs.TEMPERATURE)
    alone = programs.passes(path, batch, [list(range(8))], micro, "lm", {})
    for shares in SHARES.values():
        for rows, out in zip(
            shares,
            two_ranks.call(programs.passes, path, batch, shares, micro, "lm", TWO),
            strict=True,
        ):
            assert out.keys() == alone.keys() == {"log_probs", "entropy", "sum_pi_squared"}
            for name, values in out.items():
                torch.testing.assert_close(values, alone[name][rows], **EXACT)
            torch.testing.assert_close(
                out["log_probs"], log_probs[rows].float(), atol=1e-5, rtol=1e-5
            )
            torch.testing.assert_close(out["entropy"], entropy[rows].float(), atol=1e-5, rtol=1e-5)


def test_ranks_with_different_padding(tiny_qwen2: str, two_ranks: Ranks) -> None:
    """Rows padded to each rank's width give the outputs and gradients of the common width."""
    alone = programs.passes(
        tiny_qwen2, ragged_batch(), [list(range(8))], MicroBatching(size=3), "lm", {}
    )
    shares = [[0, 3], [1, 2, 4, 5, 6, 7]]
    for rows, out in zip(
        shares, two_ranks.call(programs.narrow_passes, tiny_qwen2, shares, TWO), strict=True
    ):
        width = out["log_probs"].shape[1]
        torch.testing.assert_close(out["log_probs"], alone["log_probs"][rows][:, :width], **EXACT)
        assert not alone["log_probs"][rows][:, width:].any()
    widths = {
        tuple(out["log_probs"].shape)
        for out in two_ranks.call(programs.narrow_passes, tiny_qwen2, shares, TWO)
    }
    assert len({width for _, width in widths}) == 2, "the ranks must differ, or nothing is tested"


def test_shared_values_equal_one_rank(tiny_qwen2: str, two_ranks: Ranks, tmp_path: Path) -> None:
    trained = engine(
        tiny_qwen2, train=True, head="value", lr=1e-2
    )  # a fresh head's values are all 0
    trained.update(ragged_batch(), MicroBatching(size=8), 1.0, programs.squared_error)
    trained.save_pretrained(tmp_path)
    alone = programs.passes(
        str(tmp_path), ragged_batch(), [list(range(8))], MicroBatching(size=3), "value", {}
    )["values"]
    assert alone.std() > 0.05
    shares = SHARES["uneven"]
    for rows, out in zip(
        shares,
        two_ranks.call(
            programs.passes,
            str(tmp_path),
            ragged_batch(),
            shares,
            MicroBatching(size=3),
            "value",
            TWO,
        ),
        strict=True,
    ):
        torch.testing.assert_close(out["values"], alone[rows], **EXACT)


def test_row_shorter_than_the_number_of_ranks(tiny_qwen2: str, four_ranks: Ranks) -> None:
    """One prompt token and one response token on four ranks: two ranks have only padding."""
    ones = torch.ones(1, 2, dtype=torch.int64)
    zero_one = torch.tensor([[0, 1]])
    batch = DataProto.from_dict(
        {
            "input_ids": torch.tensor([[17, 42]]),
            "attention_mask": ones,
            "position_ids": zero_one,
            "response_mask": ones[:, 1:],
            "advantages": torch.ones(1, 1),
        }
    )
    alone = programs.passes(tiny_qwen2, batch, [[0]], MicroBatching(size=1), "lm", {})
    shares: list[list[int]] = [[], [], [0], []]
    _, _, out, _ = four_ranks.call(
        programs.passes,
        tiny_qwen2,
        batch,
        shares,
        MicroBatching(size=1),
        "lm",
        {"sequence_parallel": 4},
    )
    for name, values in out.items():
        torch.testing.assert_close(values, alone[name], **EXACT)


def cases(given: dict[str, Tensor]) -> list[dict[str, Any]]:
    """The actor's whole loss with entropy bonus and KL, for a token and a sequence loss."""
    rows = matrix.ORDERS["shuffled"]
    return [
        {"mode": mode, "loss": loss, "rows": rows, "columns": given, **split}
        for mode in ("token-mean", "seq-mean-token-mean")
        for loss in ("vanilla", "gspo")
        for split in ({"size": 3}, {"size": 1}, {"max_tokens": 24})
    ]


def check_gradients(
    path: str, ranks: Ranks, settings: dict[str, Any], some: slice = slice(None)
) -> None:
    given = matrix.columns(path)
    every = cases(given)[some]
    alone = programs.gradients(path, every)
    first, *others = ranks.call(programs.gradients_with, path, every, settings)
    for case, (expected_metrics, expected), (metrics, gradients) in zip(
        every, alone, first, strict=True
    ):
        assert matrix.difference(gradients, expected) < matrix.TOLERANCE
        assert metrics.keys() == expected_metrics.keys()
        for name, value in matrix.comparable(expected_metrics).items():
            assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), (
                name
            )  # differences of log-probs, of 1e-6
        if case["loss"] == "vanilla":
            loss, formula = matrix.closed_form(path, case["mode"], given)
            assert matrix.difference(gradients, formula) < matrix.TOLERANCE
            assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
            assert 0 < metrics["actor/pg_clipfrac"] < 0.5
    for other in others:
        for (metrics, gradients), (their_metrics, theirs) in zip(first, other, strict=True):
            assert metrics == their_metrics and all(
                torch.equal(gradients[name], theirs[name]) for name in gradients
            )


def test_shared_actor_gradient_equals_closed_form(path: str, two_ranks: Ranks) -> None:
    check_gradients(path, two_ranks, TWO)


@pytest.mark.parametrize(
    "settings",
    [
        {"sequence_parallel": 2},
        {"sequence_parallel": 4},
        {"sequence_parallel": 2, "fsdp_size": 2},
        {
            "sequence_parallel": 4,
            "fsdp_size": 2,
            "reshard_after_forward": False,
            "enable_gradient_checkpointing": True,
        },
    ],
    ids=str,
)
def test_shared_actor_gradient_on_four_ranks(
    tiny_qwen2: str, four_ranks: Ranks, settings: dict[str, Any]
) -> None:
    """Two groups of two, and one group of four with fewer KV heads than ranks; also with HSDP."""
    check_gradients(
        tiny_qwen2, four_ranks, settings, slice(0, None, 5)
    )  # both losses, aggregations and kinds of split


def test_group_without_rows_takes_part(tiny_qwen2: str, four_ranks: Ranks) -> None:
    """The first group has all rows; afterwards nothing is trainable. The second group still takes
    part in all collectives."""
    metrics, gradients, log_probs, untrained = programs.uneven_ranks(tiny_qwen2)
    results = four_ranks.call(programs.uneven_ranks, tiny_qwen2, TWO)
    for theirs, caught, _, nothing in results:
        assert matrix.difference(caught, gradients) < matrix.TOLERANCE
        assert nothing == untrained
        expected = pytest.approx(matrix.comparable(metrics), rel=1e-5)
        assert matrix.comparable(theirs) == expected
    torch.testing.assert_close(results[0][2], log_probs, **EXACT)
    assert [len(out) for _, _, out, _ in results] == [8, 0, 0, 0]


@pytest.mark.parametrize("head", ["lm", "value"])
def test_shared_update_gives_the_same_weights(tiny_qwen2: str, two_ranks: Ranks, head: str) -> None:
    alone = programs.one_update(tiny_qwen2, head, {})
    for result in two_ranks.call(programs.one_update, tiny_qwen2, head, TWO):
        assert result["metrics"]["grad_norm"] == pytest.approx(
            alone["metrics"]["grad_norm"], rel=1e-5
        )
        assert result["metrics"]["loss"] == pytest.approx(alone["metrics"]["loss"], rel=1e-5)
        for name, tensor in alone["state"].items():
            torch.testing.assert_close(
                result["state"][name], tensor, atol=1e-7, rtol=1e-5
            )  # steps of 1e-2 g / (|g| + 1e-2), g to 1e-6
    assert math.isfinite(alone["metrics"]["loss"])


def test_unsupported_sequence_parallel_sizes_are_rejected(
    tiny_qwen2: str, two_ranks: Ranks, tmp_path: Path
) -> None:
    three_heads = tiny_model(
        tmp_path, "llama", hidden_size=48, num_attention_heads=3, num_key_value_heads=3
    )
    for path, settings, why in (
        (
            three_heads,
            TWO,
            "ulysses_sequence_parallel_size=2 must divide the model's 3 attention heads",
        ),
        (
            tiny_qwen2,
            {"sequence_parallel": 3},
            "ulysses_sequence_parallel_size=3 must divide the 2 devices of this role",
        ),
        (
            tiny_qwen2,
            {**TWO, "use_remove_padding": False},
            "ulysses_sequence_parallel_size=2 splits packed rows: "
            "it needs model.use_remove_padding=True",
        ),
        (tiny_qwen2, TWO, "nothing"),
    ):
        assert two_ranks.call(programs.refusal, path, settings) == [why, why]
