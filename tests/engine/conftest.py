"""Process groups: one rank in the test process, two or four ranks in child processes."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.engine.ranks import Ranks
from tests.models import tiny_model


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    rendezvous = tmp_path_factory.mktemp("one_rank") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("two_ranks"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("four_ranks"), size=4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a GPT-2 with dropout, and learned positions to detect wrong position ids."""
    folder = tmp_path_factory.mktemp("gpt2")
    return tiny_model(
        folder, "gpt2", n_positions=32, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5
    )
