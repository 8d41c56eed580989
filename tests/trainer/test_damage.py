"""Every kind of damage to every kind of file of a run directory.

A damaged checkpoint is refused in one line and the older one is used; the state that is loaded is
always one that was written. Other files cost only the lines that are damaged.
"""

import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.trainer.runs import driver_state
from verlite.config.schema import Config, DataConfig
from verlite.files import RetryingWriter
from verlite.report.samples import read_samples
from verlite.trainer import checkpoints
from verlite.trainer.errors import RunRefused
from verlite.trainer.opening import checkpoint_text, lock_run_dir
from verlite.trainer.samples import as_jsonl
from verlite.trainer.saving import STEP_FILE, exported_step
from verlite.trainer.tracking import METRICS, MetricsFile, read_lines

pytestmark = pytest.mark.slow

Damage = Callable[[Path], None]

CHECKPOINT_FILES = (
    "manifest.json",
    "state.json",
    "actor/state.json",
    "actor/rng_rank_0.json",
    "actor/shards/shard-00001.safetensors",
)
CONTENTS = {
    "empty": b"",
    "blank": b" \n\n",
    "NUL bytes": bytes(64),
    "not UTF-8": b"\xff\xfe{",
    "a number": b"12",
    "a huge number": b"1" * 5000,
    "infinity": b"1e999",
    "NaN": b"NaN",
    "null": b"null",
    "text": b'"step"',
    "a list": b"[]",
    "an object": b"{}",
    "an object with another key": b'{"../../state.json": {"bytes": 1e999, "sha256": 7}}',
    "a surrogate": b'{"\\ud800": {}, "state.json": {"bytes": 5}}',
    "a list of entries": b'{"state.json": [1, 2]}',
    "a NUL in a name": b'{"state.json\\u0000": {}, "state.json": null}',
    "deep nesting": b"[" * 100_000,
    "deep objects": b'{"step":' * 100_000,
    "terminal codes": b'{"state.json": {"bytes": 1}, "\\u001b[2J\\nx": 1}',
}


def write_content(content: bytes) -> Damage:
    return lambda path: _replace(path, content)


def _replace(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").touch()


def to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def to_link(target: str) -> Damage:
    def link(path: Path) -> None:
        path.unlink()
        path.symlink_to(target.replace("NAME", path.name))

    return link


def too_large(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(1 << 40)


def flip(position: int) -> Damage:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[position % len(content)] ^= 1 << position % 8
        path.write_bytes(bytes(content))

    return damage


def cut(position: int) -> Damage:
    return lambda path: _replace(path, path.read_bytes()[:position])


NOT_LOCKED = ("a folder", "a pipe", "a device", "a loop", "another file", "nothing behind a link")


def damages(size: int) -> Iterator[tuple[str, Damage]]:
    """Yield every damage to a file of `size` bytes."""
    yield from ((name, write_content(content)) for name, content in CONTENTS.items())
    for position in range(0, size, max(1, size // 40)):
        yield f"bit flipped at {position}", flip(position)
        yield f"cut at {position}", cut(position)
    yield "twice", lambda path: _replace(path, path.read_bytes() * 2)
    yield "a byte more", lambda path: _replace(path, path.read_bytes() + b"\n")
    yield "deleted", Path.unlink
    yield "a folder", to_folder
    yield "a pipe", to_pipe
    yield "a device", to_link("/dev/zero")
    yield "another file", to_link("/proc/version")
    yield "nothing behind a link", to_link("missing")
    yield "a loop", to_link("NAME")
    yield "a huge file", too_large


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with checkpoints of steps 3 and 6, written by the functions of a run."""
    run_dir = tmp_path_factory.mktemp("sound")
    writer = RetryingWriter(pytest.fail)
    metrics = MetricsFile(run_dir / METRICS, writer)
    for step in range(1, 7):
        metrics.write(step, {"critic/score/mean": step / 8, "actor/lr": float("nan")})
        records = [{"uid": f"{step}-{i}", "score": 0.5, "response": "é\u2028"} for i in range(2)]
        writer.replace(run_dir / "rollouts" / f"step_{step}.jsonl", as_jsonl(records))
        if step % 3 == 0:
            sampler = {"seed": 42, "shuffle": True, "epoch": 0, "position": step, "size": 64}
            state = driver_state(step, sampler=sampler, metrics={"loss": step / 7})
            checkpoints.write(run_dir, step, state, lambda folder, step=step: parts(folder, step))
    writer.replace(run_dir / "huggingface" / STEP_FILE, b"6")
    return run_dir


def parts(folder: Path, step: int) -> None:
    """Write what the workers write."""
    (folder / "actor" / "shards").mkdir(parents=True)
    save_file(
        {"model.w": torch.arange(4.0) * step},
        folder / "actor" / "shards" / "shard-00001.safetensors",
    )
    state = {"world_size": 1, "schedule": {"step": step}, "optimizer_steps": {"w": step}}
    (folder / "actor" / "state.json").write_text(json.dumps(state))
    (folder / "actor" / "rng_rank_0.json").write_text(json.dumps({"torch": [1, 2, step]}))


def copy_of(run_dir: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return Path(shutil.copytree(run_dir, folder))


def loaded(found: checkpoints.Checkpoint) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Everything that a run reads of a checkpoint."""
    files = found.files("actor")
    return found.state(), {name: (found.path / "actor" / name).read_bytes() for name in files}


def resume(run_dir: Path, mode: str = "auto", path: Path | None = None) -> tuple[Any, list[str]]:
    """Return what a run would load, or the message of its refusal, and the warnings."""
    warnings: list[str] = []
    try:
        found = checkpoints.find(run_dir, mode, path and str(path), warnings.append)
        return found and loaded(found), warnings
    except checkpoints.CheckpointError as refusal:
        return str(refusal), warnings


@pytest.fixture(scope="module")
def written(sound: Path) -> dict[int, Any]:
    """What is loaded of each sound checkpoint."""
    found = {n: checkpoints.Checkpoint(sound / f"global_step_{n}", n) for n in (3, 6)}
    return {n: loaded(checkpoint) for n, checkpoint in found.items()}


def check_resume(run_dir: Path, written: dict[int, Any], what: str) -> None:
    """Resume from a run directory whose newest checkpoint is damaged: it loads what was written, or
    the older one after one line."""
    newest = run_dir / "global_step_6"
    exact, _ = resume(run_dir, "resume_path", newest)
    if isinstance(exact, str):
        assert f"trainer.resume_from_path={newest}" in exact and "resume_mode=auto" in exact, what
        assert exact.isprintable(), what
    else:
        assert exact == written[6], what
    result, warnings = resume(run_dir)
    if result != written[6]:
        assert result == written[3], (what, result)
        about = [line for line in warnings if str(newest) in line]
        assert len(about) == 1 and about[0].isprintable() and len(about[0]) < 500, (what, warnings)
    assert (result == written[6]) == (exact == written[6]), what


@pytest.mark.parametrize("name", CHECKPOINT_FILES)
def test_a_damaged_checkpoint_is_passed_over(
    sound: Path, written: dict[int, Any], tmp_path: Path, name: str
) -> None:
    size = (sound / "global_step_6" / name).stat().st_size
    for what, damage in damages(size):
        run_dir = copy_of(sound, tmp_path / "run")
        damage(run_dir / "global_step_6" / name)
        check_resume(run_dir, written, what)
        if what != "a byte more":  # white space after a manifest changes nothing
            assert checkpoints.defect(run_dir / "global_step_6"), what


def test_swapped_and_copied_files_are_passed_over(
    sound: Path, written: dict[int, Any], tmp_path: Path
) -> None:
    """Swap each two files of a checkpoint, and each file with that of the other checkpoint."""
    own = [f"global_step_6/{name}" for name in CHECKPOINT_FILES]
    pairs = [*itertools.combinations(own, 2)]
    pairs += [(name, name.replace("_6/", "_3/")) for name in own]
    for first, second in pairs:
        run_dir = copy_of(sound, tmp_path / "run")
        shutil.copy(sound / second, run_dir / first)
        check_resume(run_dir, written, f"{second} over {first}")
        assert checkpoints.defect(run_dir / "global_step_6")
        if second in own:
            shutil.copy(sound / first, run_dir / second)
            check_resume(run_dir, written, f"{first} and {second} swapped")


@pytest.mark.parametrize("place", ["", "actor", "actor/shards"])
def test_foreign_files_are_not_read(
    sound: Path, written: dict[int, Any], tmp_path: Path, place: str
) -> None:
    run_dir = copy_of(sound, tmp_path / "run")
    folder = run_dir / "global_step_6" / place
    shard = sound / "global_step_3" / CHECKPOINT_FILES[-1]
    for name in ("shard-00002.safetensors", "rng_rank_1.json", ".nfs0001", "a\nb\x1b[2J"):
        shutil.copy(shard, folder / name)
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to("loop")
    (folder / "outside").symlink_to("/")
    assert resume(run_dir) == (written[6], [])


@pytest.mark.parametrize(
    "key", ["state.json", "actor/state.json", "actor/shards/shard-00001.safetensors"]
)
def test_a_file_that_the_manifest_does_not_list_is_not_read(
    sound: Path, tmp_path: Path, key: str
) -> None:
    run_dir = copy_of(sound, tmp_path / "run")
    path = run_dir / "global_step_6" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest[key]
    path.write_text(json.dumps(manifest))
    found = checkpoints.find(run_dir, "auto", None, lambda line: None)
    assert found is not None
    if key == "state.json":
        assert found.step == 3
    else:
        assert f"actor/{key}" not in found.files("actor")
        assert key.removeprefix("actor/") not in found.files("actor")


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_a_state_of_another_type_is_refused_even_with_its_hash(
    sound: Path, written: dict[int, Any], tmp_path: Path, content: bytes
) -> None:
    run_dir = copy_of(sound, tmp_path / "run")
    state = json.loads((sound / "global_step_6" / "state.json").read_text())
    contents = [content]
    for key in state:
        try:
            contents.append(json.dumps({**state, key: json.loads(content)}).encode())
        except (ValueError, RecursionError):
            continue
    for changed in contents:
        folder = run_dir / "global_step_6"
        (folder / "state.json").write_bytes(changed)
        (folder / "manifest.json").write_text(json.dumps(checkpoints.make_manifest(folder)))
        result, warnings = resume(run_dir)
        assert result == written[3] or isinstance(result[0], dict), warnings
        if result != written[3]:
            types = {name: type(value) for name, value in result[0].items()}
            assert types == checkpoints.STATE_TYPES and result[0]["step"] == 6


@pytest.mark.parametrize(
    "name",
    [
        "global_step_²",
        "global_step_06",
        "global_step_-6",
        "global_step_7",
        "global_step_6.0",
        "global_step_",
        "global_step_6\n",
        "global_step_" + "9" * 200,
    ],
)
def test_a_folder_of_another_name_is_passed_over(
    sound: Path, written: dict[int, Any], tmp_path: Path, name: str
) -> None:
    run_dir = copy_of(sound, tmp_path / "run")
    (run_dir / "global_step_6").rename(run_dir / name)
    result, warnings = resume(run_dir)
    assert result == written[3]
    assert len(warnings) == 2, "one about the folder, one about the pointer"
    refusal, _ = resume(run_dir, "resume_path", run_dir / name)
    assert isinstance(refusal, str) and "resume_mode=auto" in refusal


def test_folders_that_are_files_or_links(
    sound: Path, written: dict[int, Any], tmp_path: Path
) -> None:
    run_dir = copy_of(sound, tmp_path / "run")
    (run_dir / "global_step_7").touch()
    (run_dir / "global_step_8").symlink_to("global_step_6")
    (run_dir / "global_step_9").symlink_to("nowhere")
    (run_dir / ".tmp_global_step_10").touch()
    result, warnings = resume(run_dir)
    assert result == written[6] and len(warnings) == 4
    assert resume(run_dir)[1] == warnings[:3], "the unfinished one was removed"
    for step in (7, 8, 9):
        checkpoints.write(run_dir, step, driver_state(step), lambda folder: None)
        assert resume(run_dir)[0][0]["step"] == step or step < 9
    assert (run_dir / "global_step_6" / "manifest.json").is_file(), "only the link was removed"


def test_the_pointer_only_costs_a_line(
    sound: Path, written: dict[int, Any], tmp_path: Path
) -> None:
    config = Config(data=DataConfig(train_files="x"))
    config.trainer.default_local_dir = str(tmp_path / "run")
    for what, damage in damages(1):
        run_dir = copy_of(sound, tmp_path / "run")
        pointer = run_dir / checkpoints.POINTER
        damage(pointer)
        assert "global_step_6. To resume" in checkpoint_text(config, 0.0), what
        result, warnings = resume(run_dir)
        assert result == written[6] and len(warnings) <= 1, what
        if what == "a folder":
            checkpoints.write(run_dir, 9, driver_state(9), lambda folder: None)
            assert resume(run_dir)[0][0]["step"] == 9
        else:
            assert pointer.read_text().strip() == "6", what


def test_metrics_lose_only_damaged_lines(sound: Path, tmp_path: Path) -> None:
    """A flipped bit may join two lines, or change a number to another: no line has a hash."""
    whole = read_lines(sound / METRICS)
    size = (sound / METRICS).stat().st_size
    for what, damage in damages(size):
        run_dir = copy_of(sound, tmp_path / "run")
        path = run_dir / METRICS
        damage(path)
        is_small = path.is_file() and path.stat().st_size < 10**6
        damaged = path.read_bytes() if is_small else None
        warnings: list[str] = []
        file = MetricsFile(path, RetryingWriter(warnings.append), 6)
        file.write_missing(6, {"critic/score/mean": 0.75, "actor/lr": float("nan")})
        file.write(7, {"critic/score/mean": 0.5})
        lines = read_lines(path)
        steps = [line["step"] for line in lines]
        assert steps == sorted(set(steps)) and steps[-2:] == [6, 7], what
        assert len(warnings) <= 1, (what, warnings)
        kept = [line for line in whole if line in lines]
        if what.startswith("bit"):
            assert len(kept) >= len(whole) - 2, what
        if what.startswith(("cut", "twice", "a byte")):
            timeless = [{**line, "time": None} for line in whole]  # step 6 is written again
            found = [{**line, "time": None} for line in lines if line["step"] < 7]
            assert [line for line in found if line not in timeless] == [], what
        aside = run_dir / "metrics-unreadable.jsonl"
        if aside.exists() and damaged is not None:
            assert warnings and all(line in damaged for line in aside.read_bytes().splitlines())


def test_samples_lose_only_damaged_lines(sound: Path, tmp_path: Path) -> None:
    _, whole, _ = read_samples(sound, 6)
    size = (sound / "rollouts" / "step_6.jsonl").stat().st_size
    for what, damage in damages(size):
        run_dir = copy_of(sound, tmp_path / "run")
        path = run_dir / "rollouts" / "step_6.jsonl"
        damage(path)
        try:
            _, samples, unreadable = read_samples(run_dir, 6)
        except ValueError as error:
            assert str(path) in str(error) or "no samples of step 6" in str(error), what
            continue
        changed = [sample for sample in samples if sample not in whole]
        assert len(changed) + unreadable <= 2 or what in ("another file", "twice"), what


def test_other_small_files(sound: Path, tmp_path: Path) -> None:
    for what, damage in damages(1):
        run_dir = copy_of(sound, tmp_path / "run")
        damage(run_dir / "huggingface" / STEP_FILE)
        assert type(exported_step(run_dir)) in (int, type(None)), what
        (run_dir / ".lock").write_text("4711")
        damage(run_dir / ".lock")
        if what in NOT_LOCKED:
            with pytest.raises(RunRefused, match=re.escape(str(run_dir))):
                lock_run_dir(run_dir)
        else:
            lock_run_dir(run_dir).close()
            assert (run_dir / ".lock").read_text() == str(os.getpid()), what


def test_locking_writes_nothing_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("keep this")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to("../other")
    with pytest.raises(RunRefused):
        lock_run_dir(tmp_path / "run")
    assert (tmp_path / "other").read_text() == "keep this"
