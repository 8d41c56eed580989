"""Several GPUs, a rank on each: collectives of tensors on GPUs give the CPU's values."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.engine import programs
from tests.engine.ranks import Ranks
from verlite.weights.buckets import BucketFiles
from verlite.weights.collective import WeightReceiver, WeightSender
from verlite.weights.transport import publish

CPU: dict[str, Any] = {"device": "cpu"}
GPU: dict[str, Any] = {"device": "cuda", "dtype": "float32"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "shards": {},
    "replicas of 2 shards": {"fsdp_size": 2, "enable_gradient_checkpointing": True},
    "Ulysses over 2, replicas": {"sequence_parallel": 2, "fsdp_size": 1},
}


@pytest.fixture(scope="module", params=[2, 4, 8])
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("ranks"), request.param, gpus=True)
    yield ranks
    ranks.close()


def strict(program: Callable[..., Any], *args: Any) -> Any:
    """Run a program on a rank. A fault or a kernel that was not computed ends the rank."""
    os.environ["DRY_STRICT"] = "1"
    return program(*args)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_cpu(tiny_qwen2: str, ranks: Ranks, tmp_path: Path, layout: str) -> None:
    """FSDP2, HSDP and Ulysses, bit for bit: passes, gradients, an update, export, fingerprint."""
    expected, actual = (
        ranks.call(
            strict,
            programs.everything,
            tiny_qwen2,
            str(tmp_path / kind["device"]),
            LAYOUTS[layout] | kind,
        )
        for kind in (CPU, GPU)
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, check_device=False)


def sync(by: int) -> dict[str, Tensor]:
    """Rank 0 sends weights of several buckets, the others receive them. Return what a rank has."""
    device, offer = torch.device("cuda", 0), [None]
    values = torch.arange(5 << 20, dtype=torch.float32) * by
    if dist.get_rank() == 0:
        sender = WeightSender("127.0.0.1", dist.get_world_size() - 1, device, timeout_s=600)
        offer = [sender.offer()]
    dist.broadcast_object_list(offer, device="cpu")
    if dist.get_rank() == 0:
        publish(((f"w{i}", (values + i).to(device)) for i in range(3)), [sender], 12 << 20)
        sender.abort("the test ends")
        return {f"w{i}": values + i for i in range(3)}
    receiver = WeightReceiver(device, timeout_s=600)
    files = receiver.receive(offer[0], dist.get_rank())
    found = {name: tensor.clone() for name, tensor in BucketFiles(tuple(files.paths))}
    files.close()
    receiver.close()
    return found


def test_weights_by_collective(ranks: Ranks) -> None:
    sent, *received = ranks.call(strict, sync, 3)
    for found in received:
        torch.testing.assert_close(found, sent, rtol=0, atol=0)
