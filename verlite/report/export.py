"""From a checkpoint to a Hugging Face folder, without Ray or a GPU, whatever number of ranks wrote it."""

from dataclasses import replace
from pathlib import Path

import torch

from verlite.config.schema import FSDPConfig, ModelConfig
from verlite.engine.folder import load_tokenizer
from verlite.engine.fsdp import TrainEngine
from verlite.engine.micro import MicroBatching
from verlite.engine.process_group import single_process_group
from verlite.protocol.data import DataProto
from verlite.trainer.checkpoints import Checkpoint, CheckpointError, defect, step_of

_PROBES, _PROBE_LENGTH = 8, 16


def export_checkpoint(folder: Path, target: Path, dtype: str = "float32") -> float:
    """Write the policy of `folder` (a global_step_N) to `target` with its tokenizer, reload it, and compare.

    Returns:
        The largest difference between the two models' log-probs on 8 sequences of random tokens. 0 up to rounding in float32;
        in bfloat16 it is what the rounding of the weights costs.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, or `target` has something in it.
    """
    if problem := defect(folder):
        raise CheckpointError(f"{folder} cannot be exported: {problem}")
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target} is not empty; choose another folder")
    model = ModelConfig(**Checkpoint(folder, step_of(folder)).state()["model"])
    with single_process_group():
        engine = TrainEngine(model, FSDPConfig(), device="cpu")
        engine.load(folder / "actor")
        engine.save_pretrained(target, load_tokenizer(model), getattr(torch, dtype))
        merged = replace(
            model, path=str(target), tokenizer_path=None, lora_rank=0, lora_adapter_path=None
        )
        exported = TrainEngine(merged, FSDPConfig(), device="cpu")
        return float((_probe(engine) - _probe(exported)).abs().max())


def _probe(engine: TrainEngine) -> torch.Tensor:
    vocabulary = engine.model.model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(
        vocabulary, (_PROBES, _PROBE_LENGTH), generator=torch.Generator().manual_seed(0)
    )
    ones, half = torch.ones_like(ids), _PROBE_LENGTH // 2
    rows = {
        "input_ids": ids,
        "attention_mask": ones,
        "position_ids": ones.cumsum(1) - 1,
        "responses": ids[:, half:],
        "response_mask": ones[:, half:],
    }
    return engine.forward(DataProto.from_dict(rows), MicroBatching(_PROBES, None))["log_probs"]
