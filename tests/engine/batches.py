"""Ragged batches, and a token-by-token oracle for the engine."""

import torch
from torch import Tensor

from verlite.engine.fsdp import TrainEngine
from verlite.protocol.data import DataProto
from verlite.spec.roles import FSDPSpec, ModelSpec, OptimSpec

P = 7
R = 9
PROMPTS = (7, 1, 4, 2, 5, 3, 6, 1)
RESPONSES = (1, 9, 3, 6, 2, 5, 9, 4)
SHARED = {0: (6, 7), 2: (6, 5), 5: (6, 8), 3: (1, 4), 7: (3, 5), 4: (1, 3)}
"""Rows with another row's first tokens, and their number.

Two trees: rows part in prompts and responses, at one token or at several, and rows 5 and 7 are the
whole beginning of another.
"""


def ragged_batch(rows: int = len(PROMPTS), seed: int = 0, padding_id: int = 0) -> DataProto:
    """Return rows with short and long prompts and responses, which share prefixes.

    Row 1 contains tool text. Row 4 has no trainable token.
    """
    generator = torch.Generator().manual_seed(seed)
    real = torch.zeros(rows, P + R, dtype=torch.int64)
    for row in range(rows):
        real[row, P - PROMPTS[row] : P + RESPONSES[row]] = 1
    ids = torch.randint(3, 128, (rows, P + R), generator=generator).masked_fill(
        real == 0, padding_id
    )
    for row, (other, tokens) in SHARED.items():
        if max(row, other) < rows:
            begin, source = P - PROMPTS[row], P - PROMPTS[other]
            ids[row, begin : begin + tokens] = ids[other, source : source + tokens]
    mask = real[:, P:].clone()
    if rows > 4:
        mask[1, 2:5] = 0
        mask[4] = 0
    tensors = {
        "input_ids": ids,
        "prompts": ids[:, :P],
        "responses": ids[:, P:],
        "attention_mask": real,
        "position_ids": (real.cumsum(1) - 1).clamp(min=0),
        "response_mask": mask,
        "advantages": torch.randn(rows, R, generator=generator),
    }
    return DataProto.from_dict(tensors)


def engine(path: str, *, train: bool = False, head: str = "lm", **settings: object) -> TrainEngine:
    """Return an engine, on the CPU if `device` is not among the settings. Each setting goes to the
    config class or argument of that name."""
    configs = []
    for kind in (ModelSpec, FSDPSpec, OptimSpec):
        mine = {
            name: settings.pop(name) for name in list(settings) if name in kind.__dataclass_fields__
        }
        configs.append(kind(**({"path": path} if kind is ModelSpec else {}) | mine))
    model, fsdp, optim = configs
    settings = {"device": "cpu"} | settings
    return TrainEngine(model, fsdp, optim if train else None, head=head, **settings)


def naive_log_probs(
    model: torch.nn.Module, batch: DataProto, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return log-prob and entropy [B, R] of each trainable token, from the tokens before it."""
    log_probs = torch.zeros(len(batch), R, dtype=torch.float64)
    entropies = torch.zeros(len(batch), R, dtype=torch.float64)
    for row in range(len(batch)):
        item = batch.batch[row]
        ids = item["input_ids"][item["attention_mask"].bool()]
        prompt = int(item["attention_mask"][:P].sum())
        for j in item["response_mask"].nonzero().flatten().tolist():
            logits = model(ids[None, : prompt + j]).logits[0, -1].double() / temperature
            p = torch.softmax(logits, -1)
            log_probs[row, j] = torch.log(p[ids[prompt + j]])
            entropies[row, j] = -(p * torch.log(p)).sum()
    return log_probs, entropies
