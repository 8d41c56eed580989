"""The finished groups of asynchronous training in a checkpoint: a run that resumes trains them
instead of sampling them again.

They are one batch in the folder `groups`, without pickle: the rollout workers' columns, and two
that tell whether a group is still what the run would ask for (`uid`, and `sampling` as text). A
group that is not is sampled again, so nothing here refuses a checkpoint.
"""

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

FOLDER = "groups"
SESSION = "session"
"""Column of agent programs' samples."""
_UNREADABLE = (
    *(OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, IndexError),
    *(RecursionError, RuntimeError),
)
"""What reading a batch with unexpected contents raises."""


def write(
    folder: Path,
    answers: Mapping[int, DataProto],
    requests: Mapping[int, DataProto],
    warn: Callable[[str], None],
) -> None:
    """Write finished groups.

    Args:
        answers, requests: of each group, by number (`Groups`).
        warn: says that they have values that cannot be saved: an environment may report anything.

    Raises:
        OSError: they cannot be written.
    """
    parts = [
        fetch(answer.select(meta_info_keys=[])).with_non_tensor(**_identity(requests[number]))
        for number, answer in answers.items()
    ]
    if not parts:
        return
    try:
        DataProto.concat(parts).save_to_disk(folder)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    except (TypeError, ValueError, RecursionError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        warn(
            f"the checkpoint is written without {len(parts)} finished prompts, which a run that "
            f"resumes samples again: {type(error).__name__}: {error}"
        )


def read(
    checkpoint: Checkpoint,
    requests: Mapping[int, DataProto],
    ready: Mapping[int, int],
    warn: Callable[[str], None],
) -> dict[int, DataProto]:
    """Return the finished groups of a checkpoint that fit the run, by number.

    Args:
        requests: of each group that is not trained, by number.
        ready: oldest version of each finished group.
        warn: says which groups are sampled again, and why.
    """
    if not checkpoint.files(FOLDER):  # none was finished, or an earlier version wrote it
        return {}
    folder = checkpoint.path / FOLDER
    try:
        batch = check(DataProto.load_from_disk(folder))
        _check_columns(batch)
        uids = batch.non_tensor_batch["uid"]
        found, unfit = {}, []
        for number in ready:
            own = requests[number]
            rows = batch.select_idxs(uids == own.non_tensor_batch["uid"][0])
            if not len(rows):
                continue
            if _fits(rows, own, ready[number]):
                found[number] = rows.pop([], ["uid", "sampling"])[1].select(meta_info_keys=[])
            else:
                unfit.append(number)
    except _UNREADABLE as error:
        warn(
            f"{folder} cannot be used, so the finished prompts of the checkpoint are sampled "
            f"again: {type(error).__name__}: {error}"
        )
        return {}
    if unfit:
        warn(
            f"{len(unfit)} finished prompts of the checkpoint are sampled again: they were sampled "
            "with other settings"
        )
    return found


def _identity(requests: DataProto) -> dict[str, Any]:
    """Return the columns that tell which group it is, and how it was sampled."""
    own = requests.non_tensor_batch
    return {"uid": own["uid"], "sampling": object_array([str(one) for one in own["sampling"]])}


def _check_columns(batch: DataProto) -> None:
    """Raise ValueError unless the batch has the columns that the rollout workers return, with or
    without turns, or of agent programs."""
    added = {"uid", "sampling"}
    kinds = ((False, False), (True, False), (True, True))
    known = [columns(as_columns([], [], {}, 0.0, *kind)) | added for kind in kinds]
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


def _same_tokens(one: Iterable[int], other: Iterable[int]) -> bool:
    return list(one) == list(other)
