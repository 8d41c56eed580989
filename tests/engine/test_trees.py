"""Prefixes that rows share are computed once: every number equals that of the flat batch.

`ragged_batch` has two trees of rows, so the other tests of the engine compare trees with their
oracles, on one rank and on several. Here flat and shared passes are compared with each other.
"""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoConfig

from tests.engine import matrix, programs
from tests.engine.batches import engine, ragged_batch
from tests.models import tiny_model
from verlite.algorithms.aggregation import AGGREGATION_MODES
from verlite.engine.fsdp import Counts
from verlite.engine.micro import MicroBatching, model_inputs
from verlite.engine.model import HeadedModel, build, training_config
from verlite.spec.catalog import LOSSES
from verlite.spec.roles import ModelSpec

FLAT = {"share_prefixes": False}
PACKED_TOKENS = 61  # of the rows with a trainable token
DISTINCT_TOKENS = 32
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "mistral": {"sliding_window": 3},
    "gpt2": {"n_positions": 32},
}


def trained_rows() -> Any:
    batch = ragged_batch().batch
    return batch[batch["response_mask"].any(1)]


@pytest.mark.parametrize("kind", ["lm", "value"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_outputs_and_gradients_equal_those_of_the_flat_rows(
    arch: str, kind: str, tmp_path: Any
) -> None:
    """In float64: positions, windows and forks of all kinds, and both heads."""
    path = tiny_model(tmp_path, arch, **ARCHITECTURES[arch])
    torch.manual_seed(0)
    config = training_config(AutoConfig.from_pretrained(path), ModelSpec(path=path))
    model = build(config, kind, dtype=torch.float64)
    torch.nn.init.normal_(getattr(model, "score", model.get_input_embeddings()).weight)
    headed = HeadedModel(model, kind).train()
    rows = trained_rows()
    results = []
    for shared in (False, True):
        inputs = model_inputs(rows, packed=True, share_prefixes=shared)
        assert inputs.tokens == (DISTINCT_TOKENS if shared else PACKED_TOKENS)
        outputs = headed(inputs, 0.8, with_entropy=kind == "lm")
        dense = {name: inputs.scatter(values) for name, values in outputs.items()}
        noise = torch.randn(len(rows), 9, generator=torch.Generator().manual_seed(1)).double()
        headed.zero_grad()
        sum((noise * values**2).sum() for values in dense.values()).backward()
        results.append((dense, {n: p.grad for n, p in headed.named_parameters()}))
    (flat, flat_gradients), (tree, gradients) = results
    for name, values in flat.items():
        torch.testing.assert_close(tree[name], values, rtol=1e-9, atol=1e-12)
        assert values.any()
    # The norms of qwen2 and mistral compute in float32.
    limit = 1e-12 if arch == "gpt2" else 1e-6
    assert matrix.difference(gradients, flat_gradients) < limit


def test_every_loss_and_aggregation_has_the_same_gradient(tiny_qwen2: str) -> None:
    given = matrix.columns(tiny_qwen2)
    given |= {"rollout_log_probs": given["old_log_probs"]}
    selected = torch.zeros(8, 9, dtype=torch.bool)
    selected[::2, ::2] = True
    given["selected_tokens"] = selected
    splits = [{"size": 8}, {"size": 3}, {"max_tokens": 24}]
    cases = [
        {"loss": loss, "mode": mode, "rows": list(range(8)), "columns": given, **splits[i % 3]}
        for i, (loss, mode) in enumerate((a, b) for a in LOSSES for b in AGGREGATION_MODES)
    ]
    compare(tiny_qwen2, cases, {})


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float64, 1e-14)])
def test_losses_differ_by_the_order_of_sums_alone(
    dtype: torch.dtype, limit: float, tmp_path: Any
) -> None:
    """The actor's loss and its gradient differ by the last digits of the dtype, whichever it is: a
    wrong term would not shrink with them."""
    path = tiny_model(tmp_path, "gpt2", n_positions=32)
    torch.manual_seed(0)
    config = training_config(AutoConfig.from_pretrained(path), ModelSpec(path=path))
    headed = HeadedModel(build(config, "lm", dtype=dtype), "lm").train()
    rows = ragged_batch().with_batch(**matrix.columns(path)).batch
    rows = rows[rows["response_mask"].any(1)]
    counts = Counts(int(rows["response_mask"].sum()), len(rows))
    found = []
    for shared in (False, True):
        inputs = model_inputs(rows, packed=True, share_prefixes=shared)
        outputs = headed(inputs, 0.8, with_entropy=True)
        dense = {name: inputs.scatter(values) for name, values in outputs.items()}
        headed.zero_grad()
        loss, _ = programs.actors_loss("token-mean")(rows, dense, counts)
        loss.backward()
        found.append((float(loss.detach()), {n: p.grad for n, p in headed.named_parameters()}))
    (flat, flat_gradients), (tree, gradients) = found
    assert tree == pytest.approx(flat, rel=limit)
    assert matrix.difference(gradients, flat_gradients) < limit


@pytest.mark.parametrize(
    "settings",
    [
        {"lora_rank": 4},
        {"enable_gradient_checkpointing": True},
        {"enable_gradient_checkpointing": "attention"},
        {"enable_gradient_checkpointing": "products", "lora_rank": 4},
    ],
)
def test_adapters_and_recomputation_change_nothing(
    tiny_qwen2: str, settings: dict[str, Any]
) -> None:
    given = matrix.columns(tiny_qwen2)
    case = {"mode": "token-mean", "rows": list(range(8)), "columns": given, "size": 8}
    compare(tiny_qwen2, [case], settings)


def compare(path: str, cases: list[dict[str, Any]], settings: dict[str, Any]) -> None:
    """Compare gradients and metrics of updates with and without shared prefixes."""
    tree = programs.gradients(path, cases, **settings)
    flat = programs.gradients(path, cases, **settings, **FLAT)
    for case, (metrics, found), (flat_metrics, expected) in zip(cases, tree, flat, strict=True):
        name = {key: value for key, value in case.items() if key != "columns"}
        assert matrix.difference(found, expected) < 5e-6, name
        assert metrics.pop("tokens_computed") < flat_metrics.pop("tokens_computed"), name
        assert metrics == pytest.approx(flat_metrics, rel=1e-5, abs=1e-6), name


def test_tokens_are_counted_where_they_are_computed(tiny_qwen2: str) -> None:
    """All rows in one pass, and one row in each."""
    subject = engine(tiny_qwen2, train=True)
    for size, tokens in ((8, DISTINCT_TOKENS), (1, PACKED_TOKENS)):
        metrics = subject.update(
            ragged_batch(), MicroBatching(size=size), 1.0, programs.weighted_loss("token-mean")
        )
        assert metrics["tokens_computed"] == tokens
        assert metrics["tokens_trained"] == int(ragged_batch().batch["response_mask"].sum())


def test_micro_batches_count_distinct_tokens() -> None:
    """The rows have 61 tokens, which takes two passes of 44, and 32 distinct ones. Rows that have
    more trained than new tokens count those: 44 in all."""
    rows = ragged_batch().batch

    def parts(limit: int, share: bool) -> list[list[int]]:
        return sorted(p.rows.tolist() for p in MicroBatching(max_tokens=limit).split(rows, share))

    assert len(parts(44, False)) == 2
    assert parts(44, True) == [[0, 1, 2, 3, 5, 6, 7]]
    # Neither of the two trees, of 20 and 24 tokens, is divided.
    assert parts(24, True) == [[0, 2, 5, 6], [1, 3, 7]]


def rows_of(sequences: list[list[int]], prompt: int) -> TensorDict:
    """Return sequences, whose first `prompt` tokens are not trained, as rows."""
    width = max(map(len, sequences))
    mask = torch.tensor([[1] * len(s) + [0] * (width - len(s)) for s in sequences])
    tensors = {
        "input_ids": torch.tensor([s + [0] * (width - len(s)) for s in sequences]),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "response_mask": mask[:, prompt:],
    }
    return TensorDict(tensors, [len(sequences)])


def computed(rows: TensorDict, micro: MicroBatching) -> list[int]:
    """Return the tokens of each pass."""
    parts = micro.split(rows, True)
    return [model_inputs(rows[p.rows], True, p.share_prefixes).tokens for p in parts]


def test_no_pass_computes_more_than_the_limit() -> None:
    """Whether sharing pays is decided for all rows. Rows 0 and 1 have 96 distinct tokens of 100,
    which alone would not pay; without the others it does not."""
    few = [[1] * 4 + list(range(10 + 50 * i, 56 + 50 * i)) for i in range(2)]
    many = [[2] * 40 + list(range(200 + 10 * i, 210 + 10 * i)) for i in range(4)]
    limit = MicroBatching(max_tokens=96)
    assert sorted(computed(rows_of(few + many, 40), limit)) == [80, 96]
    assert sorted(computed(rows_of(few, 40), limit)) == [50, 50]


def test_pairs_count_their_prompt_once() -> None:
    """Pairs of 20 tokens, of which 11 are distinct and 4 are trained, two in 22. If 18 are
    trained, those count."""
    pairs = [[pair] * 8 + [10 + pair, answer] for pair in range(1, 5) for answer in (1, 2)]
    rows = rows_of(pairs, 8)
    assert computed(rows, MicroBatching(max_tokens=22, together=2)) == [22, 22]
    assert computed(rows, MicroBatching(max_tokens=21, together=2)) == [11] * 4
    assert computed(rows_of(pairs, 1), MicroBatching(max_tokens=35, together=2)) == [11] * 4
    parts = MicroBatching(size=3, together=2).split(rows, True)
    assert [p.rows.tolist() for p in parts] == [[0, 1, 2, 3, 4, 5], [6, 7]]
