"""Checkpoints: exact resume, other numbers of ranks, and damaged files."""

import json
import random
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from tests.engine import programs
from tests.engine.batches import engine, ragged_batch
from tests.engine.ranks import Ranks
from tests.models import tiny_model
from verlite.engine.checkpoint import local_part
from verlite.engine.folder import load_tokenizer
from verlite.engine.fsdp import NonFiniteError
from verlite.engine.micro import MicroBatching
from verlite.spec.roles import ModelSpec

pytestmark = pytest.mark.process


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("head", ["lm", "value"])
def test_resume_is_exact_on_one_rank(tiny_llama: str, tmp_path: Path, head: str) -> None:
    unbroken = programs.train(tiny_llama, 4, head=head)
    programs.train(tiny_llama, 2, head=head, save=str(tmp_path))
    resumed = programs.train(tiny_llama, 2, head=head, load=str(tmp_path))
    assert resumed["history"] == unbroken["history"][4:]
    assert_equal(resumed["state"], unbroken["state"])


def test_resume_is_exact_on_two_ranks_and_loads_on_one(
    tiny_qwen2: str, two_ranks: Ranks, tmp_path: Path
) -> None:
    unbroken = two_ranks.call(programs.train, tiny_qwen2, 4)
    saved = two_ranks.call(programs.train_and_save, tiny_qwen2, 2, str(tmp_path))
    resumed = two_ranks.call(programs.load_and_train, tiny_qwen2, 2, str(tmp_path))
    for straight, again in zip(unbroken, resumed, strict=True):
        assert again["history"] == straight["history"][4:]
        assert_equal(again["state"], straight["state"])
    alone = programs.load_state(tiny_qwen2, str(tmp_path))
    assert_equal(alone["state"], saved[0]["state"])
    assert alone["fingerprint"] == saved[0]["fingerprint"] == saved[1]["fingerprint"]
    assert alone["step"] == 2


def test_checkpoint_of_one_rank_loads_on_two(tmp_path: Path, two_ranks: Ranks) -> None:
    """Includes sizes that two ranks do not divide: 7 and 129 rows, and value heads of one row."""
    path = tiny_model(
        tmp_path / "odd",
        "qwen2",
        hidden_size=24,
        num_key_value_heads=1,
        intermediate_size=7,
        vocab_size=129,
    )
    for head in ("lm", "value"):
        saved = programs.train(path, 1, head=head, save=str(tmp_path / head))
        for loaded in two_ranks.call(programs.load_state, path, str(tmp_path / head), head):
            assert_equal(loaded["state"], saved["state"])
            assert loaded["fingerprint"] == saved["fingerprint"]


def test_checkpoint_has_no_pickles(tiny_qwen2: str, tmp_path: Path) -> None:
    programs.train(tiny_qwen2, 1, save=str(tmp_path))
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {file.suffix for file in files} == {".json", ".safetensors"}


def test_forward_after_load_uses_the_loaded_weights(tiny_qwen2: str, tmp_path: Path) -> None:
    """Parameters that an earlier pass left gathered must not survive the load."""
    trained = engine(tiny_qwen2, train=True, lr=1e-2)
    trained.update(ragged_batch(), MicroBatching(size=8), 1.0, programs.weighted_loss("token-mean"))
    trained.save(tmp_path)
    expected = trained.forward(ragged_batch(), MicroBatching(size=8))["log_probs"]
    for settings in ({}, {"reshard_after_forward": False}):
        other = engine(tiny_qwen2, train=True, **settings)
        other.forward(ragged_batch(), MicroBatching(size=8))
        other.load(tmp_path)
        assert torch.equal(
            other.forward(ragged_batch(), MicroBatching(size=8))["log_probs"], expected
        )


def test_frozen_engine_loads_weights_only(tiny_qwen2: str, tmp_path: Path) -> None:
    saved = programs.train(tiny_qwen2, 1, save=str(tmp_path))
    frozen = engine(tiny_qwen2)
    frozen.load(tmp_path)
    assert frozen.fingerprint() == saved["fingerprint"]


def damage(folder: Path, change: Any) -> None:
    (file,) = (folder / "shards").glob("*.safetensors")
    tensors = load_file(file)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    change(tensors)
    save_file(tensors, file, metadata)


def test_nonfinite_weights_are_rejected(tiny_qwen2: str, tmp_path: Path) -> None:
    programs.train(tiny_qwen2, 1, save=str(tmp_path))

    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.model.norm.weight"][3] = float("nan")

    damage(tmp_path, poison)
    subject = engine(tiny_qwen2, train=True)
    with pytest.raises(
        NonFiniteError, match="1 weights are NaN or infinite, the first is model.norm.weight"
    ):
        subject.load(tmp_path)
    with pytest.raises(NonFiniteError, match="refusing to save"):
        subject.save(tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_nan_on_one_rank_raises_on_all(tiny_qwen2: str, two_ranks: Ranks, tmp_path: Path) -> None:
    """Each rank has half of the weight; one half has a NaN."""
    for message in two_ranks.call(programs.save_with_a_nan_on_one_rank, tiny_qwen2, str(tmp_path)):
        assert (
            message
            == "refusing to save: 1 weights are NaN or infinite, the first is model.norm.weight"
        )
    assert not list(tmp_path.iterdir())


def test_persistent_buffers_are_saved(tiny_qwen2: str, tmp_path: Path) -> None:
    """An example is a router's bias, which gets no gradient."""
    trained = engine(tiny_qwen2)
    other = engine(tiny_qwen2)
    for subject, value in ((trained, 3.0), (other, 0.0)):
        subject.model.model.register_buffer("bias_of_the_router", torch.full((4,), value))
    trained.save(tmp_path)
    other.load(tmp_path)
    assert other.model.model.bias_of_the_router.tolist() == [3.0] * 4


def test_mismatched_checkpoint_is_rejected(tiny_qwen2: str, tmp_path: Path) -> None:
    programs.train(tiny_qwen2, 1, save=str(tmp_path))
    with pytest.raises(ValueError, match="cannot load the checkpoint"):
        engine(tiny_model(tmp_path / "other", "qwen2", intermediate_size=48), train=True).load(
            tmp_path
        )
    with pytest.raises(ValueError, match="cannot load the checkpoint"):
        engine(tiny_qwen2, train=True).load(tmp_path / "nowhere")
    damage(tmp_path, lambda tensors: tensors.pop("model.model.norm.weight"))
    with pytest.raises(ValueError, match="model.norm.weight"):
        engine(tiny_qwen2, train=True).load(tmp_path)


def test_full_disk_raises_oserror(tiny_qwen2: str, tmp_path: Path) -> None:
    """The operating system rejects files over 4 KiB, like a full disk."""
    subject = engine(tiny_qwen2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match=f"cannot write the checkpoint {tmp_path}") as failure:
            subject.save(tmp_path)
        assert "File too large" in str(failure.value) and "\n" not in str(failure.value)
        with pytest.raises(OSError, match=f"cannot write {tmp_path / 'hf'}"):
            subject.save_pretrained(tmp_path / "hf", load_tokenizer(ModelSpec(path=tiny_qwen2)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_only_listed_files_are_read_and_no_part_may_be_missing(
    tiny_qwen2: str, two_ranks: Ranks, tmp_path: Path
) -> None:
    """A stray shard has other values of the same weights. Without its first half, a weight would
    keep the values that it had."""
    saved = two_ranks.call(programs.train_and_save, tiny_qwen2, 1, str(tmp_path))[0]
    files = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    (first, second) = sorted((tmp_path / "shards").glob("*.safetensors"))
    for number, shard in enumerate((first, second)):
        tensors = {name: tensor + 1 for name, tensor in load_file(shard).items()}
        with safe_open(shard, "pt") as opened:
            save_file(tensors, tmp_path / "shards" / f"a{number}.safetensors", opened.metadata())
    subject = engine(tiny_qwen2, train=True)
    subject.load(tmp_path, files)
    assert subject.fingerprint() == saved["fingerprint"]
    for shard in (first, second):
        listed = set(files) - {str(shard.relative_to(tmp_path))}
        with pytest.raises(ValueError, match="cannot load the checkpoint") as failure:
            engine(tiny_qwen2, train=True).load(tmp_path, listed)
        assert "Traceback" not in str(failure.value)
    with pytest.raises(ValueError, match="does not list state.json"):
        subject.load(tmp_path, set(files) - {"state.json"})


def test_full_disk_on_one_rank_raises_on_all(
    tiny_qwen2: str, two_ranks: Ranks, tmp_path: Path
) -> None:
    for program in (programs.save_with_a_full_disk_on_one_rank, programs.unwritable_generators):
        folder = tmp_path / program.__name__
        for message in two_ranks.call(program, tiny_qwen2, str(folder)):
            assert message.startswith(f"cannot write the checkpoint {folder}: ")


def test_random_state_is_restored_only_for_the_same_number_of_ranks(
    tiny_qwen2: str, tmp_path: Path
) -> None:
    subject = engine(tiny_qwen2)
    subject.save(tmp_path)
    expected = torch.rand(3)
    others = (np.random.random(), random.random())
    subject.load(tmp_path)
    assert torch.equal(torch.rand(3), expected)
    assert (np.random.random(), random.random()) == others
    state = json.loads((tmp_path / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps(state | {"world_size": 2}))
    subject.load(tmp_path)
    assert not torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("settings", [{}, {"reshard_after_forward": False}, programs.LORA], ids=str)
@pytest.mark.parametrize("head", ["lm", "value"])
def test_passes_leave_no_gathered_parameters_or_gradients(
    tiny_qwen2: str, head: str, settings: dict[str, Any]
) -> None:
    """The rollout engine needs that memory when it wakes. Gathered parameters are not DTensors."""

    def left() -> list[str]:
        return [
            name
            for name, p in subject.model.named_parameters()
            if not isinstance(p, DTensor) or p.grad is not None
        ]

    subject = engine(tiny_qwen2, train=True, head=head, **settings)
    loss = programs.weighted_loss("token-mean") if head == "lm" else programs.squared_error
    for rows in (list(range(8)), [4]):  # row 4 has no trainable token: no pass at all
        subject.forward(ragged_batch()[rows], MicroBatching(size=3))
        assert left() == []
        subject.update(ragged_batch()[rows], MicroBatching(size=3), 1.0, loss)
        assert left() == []
    dict(subject.export())
    assert left() == [] and subject.fingerprint() and left() == []


@pytest.mark.parametrize("lora", [{}, programs.LORA])
def test_offload_moves_every_shard_into_one_locked_piece_and_changes_no_result(
    tiny_qwen2: str, monkeypatch: pytest.MonkeyPatch, lora: dict[str, Any]
) -> None:
    """The test treats this CPU as a device with its own memory. Export, fingerprint and checkpoint
    work while the model is away."""
    locked: list[tuple[int, int]] = []

    def note(memory: torch.Tensor, device: torch.device) -> None:
        locked.append((memory.data_ptr(), memory.data_ptr() + memory.nbytes))

    monkeypatch.setattr("verlite.engine.offload._lock_pages", note)
    results = []
    for is_device in (False, True):
        monkeypatch.setattr("verlite.engine.fsdp.has_own_memory", lambda _, x=is_device: x)
        subject = engine(
            tiny_qwen2, train=True, lr=1e-2, param_offload=True, optimizer_offload=True, **lora
        )
        states = subject.optimizer.state

        def shards(subject: Any = subject, states: Any = states) -> list[torch.Tensor]:
            moments = [t for p in subject.parameters for t in states[p].values()]
            return [local_part(t) for t in [*subject.model.parameters(), *moments]]

        for _ in range(2):
            subject.offload()
            if is_device:
                assert all(any(a <= t.data_ptr() < b for a, b in locked) for t in shards())
            away = (subject.fingerprint(), {n: w.clone() for n, w in subject.export()})
            subject.onload(parameters=True, optimizer=True)
            assert not any(a <= t.data_ptr() < b for a, b in locked for t in shards())
            assert away[0] == subject.fingerprint()
            metrics = subject.update(
                ragged_batch(), MicroBatching(size=8), 1.0, programs.weighted_loss("token-mean")
            )
        results.append((metrics, away[0], away[1].keys(), subject.fingerprint()))
    assert results[0] == results[1]
    assert len(locked) == 2, "parameters and moments, each once"
