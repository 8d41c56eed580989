"""Export a checkpoint to a Hugging Face folder, without Ray or a GPU.

The number of ranks that wrote the checkpoint does not matter.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from verlite.config.schema import FSDPConfig, ModelConfig
from verlite.engine.folder import load_tokenizer
from verlite.engine.fsdp import NonFiniteError, TrainEngine
from verlite.engine.micro import MicroBatching
from verlite.engine.process_group import single_process_group
from verlite.files import free_text
from verlite.protocol.data import DataProto
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
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
        why = "is a run directory without checkpoints: trainer.save_freq=-1 saves none."
        done = (path / "huggingface" / "config.json").is_file()
        return f"{why} Its last model is already in {path / 'huggingface'}." if done else why
    return "contains no global_step_N folder."


def export_checkpoint(checkpoint: Checkpoint, target: Path, dtype: str = "float32") -> float:
    """Write the policy of a checkpoint and its tokenizer to `target`, reload it, and compare.

    Args:
        checkpoint: from `find_checkpoint`.
        target: the Hugging Face folder to write.
        dtype: float32, bfloat16 or float16.

    Returns:
        The largest difference between the log-probs of the two models on 8 random token sequences.
        It is 0 up to rounding in float32. In a 16-bit dtype it includes the rounding of weights.

    Raises:
        CheckpointError: the checkpoint cannot be loaded, `target` is not empty or cannot be
            written, or `dtype` is unknown.
    """
    if dtype not in _DTYPES:
        raise CheckpointError(f"--dtype={dtype} must be one of {', '.join(_DTYPES)}.")
    if target.is_file():
        raise CheckpointError(f"{target} is a file. Choose a new or empty folder.")
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target} is not empty. Choose a new or empty folder.")
    folder = checkpoint.path
    try:
        model = ModelConfig(**checkpoint.state()["model"])
    except TypeError as error:
        raise CheckpointError(f"{folder}/state.json has an unknown model: {error}.") from error
    with single_process_group():
        try:
            engine = TrainEngine(model, FSDPConfig(), device="cpu")
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
        exported = TrainEngine(merged, FSDPConfig(), device="cpu")
        return float((_probe(engine) - _probe(exported)).abs().max())


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
