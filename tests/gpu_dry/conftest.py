"""Tests on a CUDA that is not there. `make gpu-dry` runs them; elsewhere they are not collected."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu_dry import gpu

collect_ignore_glob = [] if gpu.loaded() else ["test_*.py"]

if gpu.loaded():
    from tests.gpu_dry import cpu_kernels

    cpu_kernels.install()


@pytest.fixture(autouse=True)
def no_fault() -> Iterator[None]:
    """Nothing that a GPU would refuse, or that was not computed, in any test."""
    with gpu.calls() as seen:
        yield
    assert seen.faults() == []


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    import torch.distributed as dist

    store: Path = tmp_path_factory.mktemp("rank") / "store"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=dist.FileStore(str(store), 1), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()
