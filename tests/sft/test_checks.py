"""What is checked before main_sft and main_dpo start: everything at once, each file read once."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tests.trainer.runs import driver_state
from verlite import tables
from verlite.cli import app
from verlite.config import critical
from verlite.config.commands import DPO, SFT
from verlite.config.critical import tuning_settings
from verlite.config.load import compose
from verlite.engine.process_group import single_process_group
from verlite.sft import dpo, train
from verlite.sft.run import tuning_preflight
from verlite.trainer import checkpoints
from verlite.trainer.preflight import PHASES, ROWS, Preflight, walk

ROW = {"prompt": "1+1=", "response": "2", "chosen": "2", "rejected": "3", "other": "x"}
TASKS = {"main_sft": (SFT, train.TASK), "main_dpo": (DPO, dpo.TASK)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("train", "val"):
        pq.write_table(pa.Table.from_pylist([ROW] * 16), f"{name}.parquet")
    return tmp_path


def options(model: str, *more: str) -> list[str]:
    return [
        *("data.train_files=train.parquet", "data.val_files=val.parquet", f"model.path={model}"),
        *("data.train_batch_size=8", "trainer.device=cpu", "trainer.default_local_dir=run", *more),
    ]


def checked(name: str, arguments: list[str], first: int | None = ROWS) -> Preflight:
    command, task = TASKS[name]
    found = tuning_preflight(compose(None, arguments, command=command).config, task, first)
    with single_process_group():
        walk(found, *PHASES)
    return found


@pytest.mark.parametrize("name", TASKS)
def test_all_problems_are_reported_at_once(name: str, folder: Path, tiny_qwen2: str) -> None:
    """In both splits, the batch, the model, and the checkpoint."""
    Path("global_step_3").mkdir()
    Path("val.jsonl").write_text(json.dumps({"prompt": "1+1="}))
    broken = (
        "data.max_token_len_per_gpu=3",
        "data.val_files=val.jsonl",
        "data.train_batch_size=17",
    )
    more = ("trainer.resume_mode=resume_path", "trainer.resume_from_path=global_step_3")
    nope = "+model.override_config.nope=1"
    result = CliRunner().invoke(app, ["check", name, *options(tiny_qwen2, *broken, *more, nope)])
    assert result.exit_code == 2
    errors = result.stderr.splitlines()
    assert [line.partition(":")[0] for line in errors] == ["error"] * 5, result.stderr
    for words, error in zip(
        (
            "trainer.resume_from_path=global_step_3 is damaged",
            "val.jsonl has no column",
            "data.train_batch_size=17 is more than the 16",
            "model.override_config.nope is not a value",
            "data.max_token_len_per_gpu=3 has no room",
        ),
        errors,
        strict=True,
    ):
        assert words in error


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_each_file_is_read_once_and_only_its_columns(
    name: str, suffix: str, folder: Path, tiny_qwen2: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if suffix == "jsonl":
        Path("train.jsonl").write_text((json.dumps(ROW) + "\n") * 16)
    read: list[str] = []
    whole, lines = tables.read, tables.located_rows

    def counted(path: Path, columns: list[str], **more: object) -> pa.Table:
        assert set(columns) == {"prompt", *(("response",) if name == "main_sft" else PAIR)}
        read.append(path.name)
        return whole(path, columns, **more)

    def counted_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        read.append(path.name)
        return lines(path)

    monkeypatch.setattr(tables, "read", counted)
    monkeypatch.setattr(tables, "located_rows", counted_lines)
    arguments = options(tiny_qwen2, f"data.train_files=train.{suffix}")
    found = checked(name, arguments, None)
    found.lock.close()
    assert read == [f"train.{suffix}", "val.parquet"]
    assert len(found.data["train"]) == 16 * found.task.size


PAIR = ("chosen", "rejected")


def test_check_reads_the_first_rows_only(
    folder: Path, tiny_qwen2: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all files; the batch is compared with all rows that a run uses."""
    both = options(tiny_qwen2, "data.train_files=[train.parquet,val.parquet]")
    more = ["data.train_max_samples=30", "data.train_batch_size=30"]
    found = checked("main_sft", [*both, *more], 20)
    assert len(found.data["train"]) == 20 and found.sampler.size == 30
    assert found.findings.errors == []
    more[1] = "data.train_batch_size=31"
    (error,) = checked("main_sft", [*both, *more], 5).findings.errors
    assert "more than the 30 training rows" in error


@pytest.mark.parametrize("name", TASKS)
def test_check_hashes_data_only_for_a_checkpoint(
    name: str, folder: Path, tiny_qwen2: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    digest = critical._digest
    command = TASKS[name][0]

    def noted(file: str, samples: bool = False) -> str:
        hashed.append(file)
        return digest(file, samples)

    noted.cache_clear = digest.cache_clear  # type: ignore[attr-defined]
    monkeypatch.setattr(critical, "_digest", noted)
    arguments = options(tiny_qwen2, "trainer.total_epochs=9")
    assert checked(name, arguments).findings.errors == [] and hashed == []
    settings = tuning_settings(compose(None, arguments, command=command).config)
    order = {"seed": 42, "shuffle": True, "epoch": 0, "position": 8, "size": 16}
    state = driver_state(1, critical=settings, sampler=order)
    checkpoints.write(Path("run"), 1, state, lambda folder: None)
    assert checked(name, arguments).findings.errors == []
    pq.write_table(pa.Table.from_pylist([ROW | {"response": "3"}] * 16), "train.parquet")
    (error,) = checked(name, arguments).findings.errors
    assert "contents of data.train_files (SHA-256)" in error
