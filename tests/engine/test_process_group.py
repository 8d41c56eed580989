"""The process group of an engine without Ray."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from verlite.engine.process_group import process_group


@pytest.mark.parametrize(
    ("device", "ranks", "backend"),
    [
        ("cpu", 1, "gloo"),
        ("cpu", 2, "gloo"),
        ("cuda", 1, "cpu:gloo,cuda:nccl"),
        ("cuda", 2, "cpu:gloo,cuda:nccl"),
    ],
)
def test_gpus_have_nccl_and_host_memory_has_gloo(
    device: str, ranks: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with one GPU: FSDP's collectives run on its tensors."""
    started: list[Any] = []
    monkeypatch.setattr(dist, "init_process_group", lambda name, **_: started.append(name))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", started.append)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if ranks > 1:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        monkeypatch.setenv("LOCAL_RANK", "1")
    with process_group(device):
        pass
    assert started == ([1] if (device, ranks) == ("cuda", 2) else []) + [backend]
