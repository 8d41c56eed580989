"""Export a checkpoint to a Hugging Face folder, without Ray or a GPU.

The number of ranks that wrote the checkpoint does not matter. A checkpoint may come from someone
else: the model, its tokenizer and the permission to run its code come from the caller, never from
the checkpoint.
"""

import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from verlite.engine.folder import load_tokenizer
from verlite.engine.fsdp import NonFiniteError, TrainEngine
from verlite.engine.micro import MicroBatching
from verlite.engine.process_group import single_process_group
from verlite.files import free_text, one_line
from verlite.protocol.data import DataProto
from verlite.spec.roles import FSDPSpec, ModelSpec
from verlite.trainer.checkpoints import (
    PREFIX,
    Checkpoint,
    CheckpointError,
    complete,
    defect,
    step_of,
)

_PROBE_ROWS = 8
_PROBE_LENGTH = 16
_FROM_CHECKPOINT: dict[str, tuple[type, ...]] = {
    "use_remove_padding": (bool,),
    "share_prefixes": (bool,),
    "override_config": (dict,),
    "custom_chat_template": (str, type(None)),
    "lora_rank": (int,),
    "lora_alpha": (int,),
    "target_modules": (str, list),
    "exclude_modules": (str, list, type(None)),
}
"""Settings of the model that state.json decides, and their types. They change numbers and text."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Base:
    """The model that was trained, as the user names it.

    Attributes:
        path: folder or hub name of the model that the training began with.
        tokenizer_path: the same of its tokenizer. None: the model's.
        lora_adapter_path: folder of the adapter that the training began with.
        trust_remote_code: run Python code that comes with this model.
    """

    path: str
    tokenizer_path: str | None = None
    lora_adapter_path: str | None = None
    trust_remote_code: bool = False

    @classmethod
    def recorded(cls, checkpoint: Checkpoint) -> "Base":
        """Return what a checkpoint records. Only for checkpoints that the caller's run wrote."""
        model = checkpoint.state()["model"]
        return cls(**{field.name: model[field.name] for field in fields(cls)})


def find_checkpoint(path: Path, warn: Callable[[str], None]) -> Checkpoint:
    """Return the checkpoint in the global_step_N folder that `path` names.

    A run directory stands for its newest complete checkpoint. Newer folders that are not complete
    are warned about.

    Raises:
        CheckpointError: `path` is neither a complete checkpoint nor a run directory, or the run
            directory has no complete checkpoint.
    """
    usage = "Give a run directory or a global_step_N folder."
    if path.is_file():
        raise CheckpointError(f"{path} is a file. {usage}")
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist. {usage}")
    folder = path.resolve()
    if folder.name.startswith(PREFIX):
        problem = defect(folder)
        if problem:
            raise CheckpointError(f"{path} cannot be exported: {problem}.")
        return Checkpoint(path, step_of(folder))
    newest, ignored = complete(path)
    if newest is None and ignored:
        raise CheckpointError(f"{path} has no complete checkpoint: {'; '.join(ignored)}.")
    if newest is None:
        raise CheckpointError(f"{path} {_reason_without_checkpoints(path)} {usage}")
    for line in ignored:
        warn(line)
    return newest


def _reason_without_checkpoints(path: Path) -> str:
    if (path / "config.json").is_file():
        return "is already a Hugging Face model folder."
    if (path / "metrics.jsonl").is_file():
        why = (
            "is a run directory without checkpoints: with trainer.save_freq=-1 only a stop saves "
            "one."
        )
        done = (path / "huggingface" / "config.json").is_file()
        return f"{why} Its last model is already in {path / 'huggingface'}." if done else why
    return "contains no global_step_N folder."


def export_checkpoint(
    checkpoint: Checkpoint, target: Path, base: Base | None, dtype: str = "float32"
) -> float:
    """Write the policy of a checkpoint and its tokenizer to `target`, reload it, and compare.

    Args:
        checkpoint: from `find_checkpoint`.
        base: the model that was trained. None is an error that shows what the checkpoint says.
        target: the Hugging Face folder to write.
        dtype: float32, bfloat16 or float16.

    Returns:
        The largest difference between the log-probs of the two models on 8 random token sequences.
        It is 0 up to rounding in float32. In a 16-bit dtype it includes the rounding of weights.

    Raises:
        CheckpointError: `base` is missing, the checkpoint cannot be loaded, `target` is not empty
            or cannot be written, or `dtype` is unknown.
    """
    if dtype not in _DTYPES:
        raise CheckpointError(f"--dtype={dtype} must be one of {', '.join(_DTYPES)}.")
    if target.is_file():
        raise CheckpointError(f"{target} is a file. Choose a new or empty folder.")
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target} is not empty. Choose a new or empty folder.")
    folder = checkpoint.path
    for path in (folder, target):
        if not str(path).isascii() and path != Path(os.fsencode(path).decode(errors="replace")):
            raise CheckpointError(
                f"{path}: the path is not UTF-8 text, so the libraries that read and write models "
                "cannot open it. Rename the folder."
            )
    model = _model(checkpoint, base)
    with single_process_group():
        try:
            engine = TrainEngine(model, FSDPSpec(), device="cpu")
            engine.load(folder / "actor", checkpoint.files("actor"))
        except (ValueError, NonFiniteError) as error:
            raise CheckpointError(f"{folder} cannot be exported: {error}.") from error
        try:
            engine.save_pretrained(target, load_tokenizer(model), _DTYPES[dtype])
        except OSError as error:
            raise CheckpointError(
                f"{target} cannot be written: {error} ({free_text(target.parent)} free)."
            ) from error
        merged = replace(
            model, path=str(target), tokenizer_path=None, lora_rank=0, lora_adapter_path=None
        )
        exported = TrainEngine(merged, FSDPSpec(), device="cpu")
        return float((_probe(engine) - _probe(exported)).abs().max())


def _model(checkpoint: Checkpoint, base: Base | None) -> ModelSpec:
    """Return the caller's model with the settings of _FROM_CHECKPOINT. Raises CheckpointError."""
    file = checkpoint.path / "state.json"
    saved = checkpoint.state()["model"]
    if base is None:
        named = {
            "--model": saved.get("path"),
            "--tokenizer": saved.get("tokenizer_path"),
            "--adapter": saved.get("lora_adapter_path"),
        }
        options = " ".join(
            f"{option} {shlex.quote(one_line(value))}" for option, value in named.items() if value
        )
        raise CheckpointError(
            f"{checkpoint.path} does not contain the model that was trained, and its word for it "
            f"is not taken. Name the model. The checkpoint says: {options or 'nothing'}"
        )
    taken = {}
    for name, types in _FROM_CHECKPOINT.items():
        if name in saved:
            if type(saved[name]) not in types:
                raise CheckpointError(f"{file}: model.{name} has a wrong type.")
            taken[name] = saved[name]
    for name in _names(taken.get("override_config", {})):
        # Such values choose code: transformers loads kernels that "_attn_implementation" names.
        if name.startswith("_") or "implementation" in name or name == "auto_map":
            raise CheckpointError(
                f"{file}: model.override_config.{one_line(name, 80)} chooses code, so it is not "
                "taken from a checkpoint. Remove it there."
            )
    return ModelSpec(
        path=base.path,
        tokenizer_path=base.tokenizer_path,
        lora_adapter_path=base.lora_adapter_path,
        trust_remote_code=base.trust_remote_code,
        **taken,
    )


def _names(value: Any) -> Iterator[str]:
    """Yield the names in a value of JSON, on all levels."""
    if isinstance(value, dict):
        yield from map(str, value)
    if isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _names(entry)


def _probe(engine: TrainEngine) -> torch.Tensor:
    """Return log-probs [8, 8] of the second halves of 8 fixed random sequences."""
    embeddings: Any = engine.model.model.get_input_embeddings()
    vocabulary = embeddings.weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (_PROBE_ROWS, _PROBE_LENGTH), generator=generator)
    ones = torch.ones_like(ids)
    half = _PROBE_LENGTH // 2
    rows = {
        "input_ids": ids,
        "attention_mask": ones,
        "position_ids": ones.cumsum(1) - 1,
        "responses": ids[:, half:],
        "response_mask": ones[:, half:],
    }
    return engine.forward(DataProto.from_dict(rows), MicroBatching(_PROBE_ROWS, None))["log_probs"]
