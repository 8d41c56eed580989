"""The groups of asynchronous training in a checkpoint: a run that resumes trains the finished ones
and goes on with the running ones, instead of sampling them again.

They are one batch each in the folders `groups` and `running`, without pickle: the rollout workers'
columns, and two that tell whether a group is still what the run would ask for (`uid`, and
`sampling` as text). A group that is not is sampled again, so nothing here refuses a checkpoint.
"""

import operator
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from verlite.controller.columns import fetch
from verlite.protocol.data import DataProto, object_array
from verlite.protocol.fields import check, columns
from verlite.protocol.ragged import RESPONSE
from verlite.trainer.checkpoints import Checkpoint
from verlite.workers.rollout import as_columns
from verlite.workers.running import as_rows, of_row, oldest_version

FINISHED, RUNNING = "groups", "running"
"""Folders of a checkpoint."""
WORDS = {FINISHED: "finished", RUNNING: "running"}
SESSION = "session"
"""Column of agent programs' samples."""
_UNREADABLE = (
    *(OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, IndexError),
    *(RecursionError, RuntimeError),
)
"""What reading a batch with unexpected contents raises."""


def write(
    folder: Path,
    samples: Mapping[int, DataProto],
    requests: Mapping[int, DataProto],
    warn: Callable[[str], None],
) -> None:
    """Write groups, finished or running.

    Args:
        samples, requests: of each group, by number (`Groups`).
        warn: says that they have values that cannot be saved: an environment may report anything.

    Raises:
        OSError: they cannot be written.
    """
    parts = []
    for number, rows in samples.items():
        asked = requests[number]
        if "sample_index" in rows.tensors():  # not all of its samples may be there
            asked = asked.select_idxs(rows.batch["sample_index"])
        parts.append(fetch(rows.select(meta_info_keys=[])).with_non_tensor(**_identity(asked)))
    if not parts:
        return
    try:
        DataProto.concat(parts).save_to_disk(folder)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    except (TypeError, ValueError, RecursionError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        warn(
            f"the checkpoint is written without {len(parts)} {WORDS[folder.name]} prompts, which a "
            f"run that resumes samples again: {type(error).__name__}: {error}"
        )


def read(
    checkpoint: Checkpoint,
    folder: str,
    requests: Mapping[int, DataProto],
    oldest: Mapping[int, int],
    warn: Callable[[str], None],
) -> dict[int, DataProto]:
    """Return the groups of a checkpoint that fit the run, by number.

    Args:
        folder: FINISHED or RUNNING.
        requests: of each group that is not trained, by number.
        oldest: oldest version of each of these groups, by the driver's state.
        warn: says which groups are sampled again, and why.
    """
    if not checkpoint.files(folder):  # there was none, or an earlier version wrote it
        return {}
    path, what = checkpoint.path / folder, f"{WORDS[folder]} prompts of the checkpoint"
    fits = _fits if folder == FINISHED else _goes_on
    try:
        batch = check(DataProto.load_from_disk(path))
        _check_columns(batch, folder)
        uids = batch.non_tensor_batch["uid"]
        found, unfit = {}, []
        for number in oldest:
            own = requests[number]
            rows = batch.select_idxs(uids == own.non_tensor_batch["uid"][0])
            if not len(rows):
                continue
            if fits(rows, own, oldest[number]):
                found[number] = rows.pop([], ["uid", "sampling"])[1].select(meta_info_keys=[])
            else:
                unfit.append(number)
    except _UNREADABLE as error:
        warn(
            f"{path} cannot be used, so the {what} are sampled again: "
            f"{type(error).__name__}: {error}"
        )
        return {}
    if unfit:
        warn(f"{len(unfit)} {what} are sampled again: they were sampled with other settings")
    return found


def oldest_of(rows: DataProto) -> int | None:
    """Return the oldest version that sampled a token of a running group, None without any."""
    versions = [oldest_version(of_row(row)) for row in rows_of(rows)]
    return min((version for version in versions if version is not None), default=None)


def rows_of(rows: DataProto) -> list[dict[str, Any]]:
    """Return the rows of running samples as `RolloutWorker.start` takes them."""
    columns = rows.non_tensor_batch
    return [{name: column[row] for name, column in columns.items()} for row in range(len(rows))]


def _identity(requests: DataProto) -> dict[str, Any]:
    """Return the columns that tell which group it is, and how it was sampled."""
    own = requests.non_tensor_batch
    return {"uid": own["uid"], "sampling": object_array([str(one) for one in own["sampling"]])}


def _check_columns(batch: DataProto, folder: str) -> None:
    """Raise ValueError unless the batch has the columns that the rollout workers return, with or
    without turns, or of agent programs."""
    added = {"uid", "sampling"}
    kinds = ((False, False), (True, False), (True, True))
    known = [columns(as_columns([], [], {}, 0.0, *kind)) | added for kind in kinds]
    if folder == RUNNING:
        known = [columns(as_rows([])) | added]
    if columns(batch) not in known:
        different = min((sorted(columns(batch) ^ names) for names in known), key=len)
        raise ValueError(f"its columns are not those of a rollout worker: {', '.join(different)}")


def _fits(rows: DataProto, requests: DataProto, oldest: int) -> bool:
    """Return whether these are the samples that the run would ask for, of the age in the driver's
    state."""
    mine, own = rows.non_tensor_batch, requests.non_tensor_batch
    asked = _identity(requests)
    is_of_program = SESSION in mine  # which writes its own prompts
    versions = rows.batch["oldest_version"]
    versions = versions[versions >= 0]
    return (
        list(mine["sampling"]) == list(asked["sampling"])
        and (is_of_program or all(map(_same_tokens, mine["prompt_ids"], own["prompt_ids"])))
        and (not len(versions) or int(versions.min()) == oldest)
        and rows.batch["response_length"].tolist() == [len(ids) for ids in mine[RESPONSE]]
    )


def _goes_on(rows: DataProto, requests: DataProto, oldest: int) -> bool:
    """Return whether these samples are what the run would ask for, and not older than the group in
    the driver's state."""
    places = rows.batch["sample_index"].tolist()
    if sorted(set(places)) != places or not 0 <= places[0] <= places[-1] < len(requests):
        return False
    own, mine = requests.select_idxs(places).non_tensor_batch, rows.non_tensor_batch
    asked = [str(one) for one in own["sampling"]]
    found = oldest_of(rows)
    is_of_program = [bool(state["trajectory"].get(SESSION)) for state in mine["running"]]
    same_prompt = map(_same_tokens, mine["prompt_ids"], own["prompt_ids"])
    return (
        list(mine["sampling"]) == asked
        and all(map(operator.or_, is_of_program, same_prompt))
        and (found is None or found >= oldest)
    )


def _same_tokens(one: Iterable[int], other: Iterable[int]) -> bool:
    return list(one) == list(other)
