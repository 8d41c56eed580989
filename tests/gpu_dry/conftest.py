"""Tests on a simulated CUDA. `make gpu-dry` runs them; elsewhere they are not collected."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu_dry import gpu

collect_ignore_glob = [] if gpu.loaded() else ["test_*.py"]

if gpu.loaded():
    from tests.gpu_dry import cpu_kernels

    cpu_kernels.install()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "faults(name, ...): what cuda.c finds in this test")


@pytest.fixture(autouse=True)
def no_fault(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nothing that a GPU would refuse, or that was not computed, but what the test expects."""
    marker = request.node.get_closest_marker("faults")
    with gpu.calls() as seen:
        yield
        torch.cuda.synchronize()
    assert seen.faults() == list(marker.args if marker else ())


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    import torch.distributed as dist

    store: Path = tmp_path_factory.mktemp("rank") / "store"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=dist.FileStore(str(store), 1), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()
