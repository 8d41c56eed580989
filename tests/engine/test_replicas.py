"""HSDP: replicas of shards give the same weights, updates and files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.engine import matrix, programs
from tests.engine.ranks import Ranks
from verlite.weights.fingerprint import fingerprint

pytestmark = pytest.mark.process

LAYOUTS = {
    "4 shards": {},
    "2 replicas of 2 shards": {"fsdp_size": 2},
    "4 replicas": {"fsdp_size": 1},
}
Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, tiny_qwen2: str, four_ranks: Ranks
) -> tuple[Path, Results]:
    """Return the folder with a subfolder per layout, and the results of each rank."""
    folder = tmp_path_factory.mktemp("layouts")
    found = {"1 rank": [programs.everything(tiny_qwen2, str(folder / "1 rank"), {})]}
    for layout, settings in LAYOUTS.items():
        found[layout] = four_ranks.call(
            programs.everything, tiny_qwen2, str(folder / layout), settings
        )
    return folder, found


def same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return actual.keys() == expected.keys() and all(
        torch.equal(actual[name], tensor) for name, tensor in expected.items()
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_passes_and_updates_equal_one_rank(results: tuple[Path, Results], layout: str) -> None:
    """Uneven rows, one rank without any.

    Ranks agree exactly with each other, and with one rank to float32 rounding (matrix.TOLERANCE).
    """
    (alone,) = results[1]["1 rank"]
    ranks = results[1][layout]
    whole = sum(tensor.numel() for tensor in alone["export"].values())
    copies = {"4 shards": 1, "2 replicas of 2 shards": 2, "4 replicas": 4}[layout]
    assert sum(rank["held"] for rank in ranks) == copies * whole, (
        "the layout decides how many weights a rank has"
    )
    for rank in ranks:
        assert rank["metrics"] == ranks[0]["metrics"] and same(rank["state"], ranks[0]["state"])
        torch.testing.assert_close(rank["log_probs"], alone["log_probs"], atol=2e-6, rtol=1e-5)
        assert matrix.difference(rank["gradients"], alone["gradients"]) < matrix.TOLERANCE
        metrics, expected = (matrix.comparable(x["metrics"]) for x in (rank, alone))
        assert metrics == pytest.approx(expected, rel=1e-5)
        for name, tensor in alone["state"].items():
            torch.testing.assert_close(
                rank["state"][name], tensor, atol=1e-7, rtol=1e-5
            )  # the step is 1e-2 g / (|g| + 1e-2)
    assert alone["metrics"]["grad_norm"] > 0.5, (
        "the test has no power over clipping unless something is clipped"
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_export_and_fingerprint_count_replicas_once(
    results: tuple[Path, Results], layout: str
) -> None:
    folder, found = results
    file = load_file(folder / layout / "huggingface" / "model.safetensors")
    for rank in found[layout]:
        assert same(rank["export"], file)
        assert rank["fingerprint"] == fingerprint(file.items()), "a replica counts once"


@pytest.mark.parametrize("wrote", ["1 rank", *LAYOUTS])
def test_checkpoint_loads_into_every_layout(
    results: tuple[Path, Results], tiny_qwen2: str, four_ranks: Ranks, wrote: str
) -> None:
    """Weights, moments and step counts are exact, whichever layout wrote them."""
    folder, found = results
    saved = found[wrote][0]
    checkpoint = str(folder / wrote / "checkpoint")
    loaded = [programs.load_state(tiny_qwen2, checkpoint)]
    for settings in LAYOUTS.values():
        loaded += four_ranks.call(
            programs.load_state, tiny_qwen2, checkpoint, "lm", settings.get("fsdp_size", -1)
        )
    assert len(loaded) == 13
    for one in loaded:
        assert same(one["state"], saved["state"]) and one["fingerprint"] == saved["fingerprint"]
    steps = [value for name, value in loaded[0]["state"].items() if name.endswith(".step")]
    assert steps and all(value == 1 for value in steps)
