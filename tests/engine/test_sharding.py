"""What FSDP gathers and reduces at a time."""

from pathlib import Path

import pytest
from torch.distributed.fsdp import FSDPModule

from tests.engine.batches import engine
from tests.models import tiny_model


def groups(path: str, head: str) -> list[set[str]]:
    """Return the names of the parameters that FSDP gathers together, of each group."""
    model = engine(path, head=head).model
    owners: dict[str, set[str]] = {}
    for name, _ in model.named_parameters():
        parts = name.split(".")
        parents = [".".join(parts[:i]) for i in range(len(parts))]
        owner = [p for p in parents if isinstance(model.get_submodule(p), FSDPModule)][-1]
        owners.setdefault(owner, set()).add(name.removeprefix("model."))
    return list(owners.values())


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_and_output_head_are_reduced_on_their_own(tied: bool, tmp_path: Path) -> None:
    """Together they are several GiB of gradients in float32 for a vocabulary of 150,000."""
    path = tiny_model(tmp_path, "qwen2", tie_word_embeddings=tied)
    alone = [{"model.embed_tokens.weight"}, {"lm_head.weight"}]
    assert [group in groups(path, "lm") for group in alone] == [not tied, not tied]
    assert alone[0] in groups(path, "value")
