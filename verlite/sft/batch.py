"""Training examples as a padded batch, which the engine packs."""

from collections.abc import Sequence

import torch

from verlite.protocol.data import DataProto
from verlite.protocol.ragged import pad
from verlite.sft.data import Example


def build_batch(examples: list[Example], references: Sequence[float] | None = None) -> DataProto:
    """Return examples as a batch of B rows.

    Prompts are padded on the left to P tokens, responses on the right to R tokens.
    response_mask [B, R] int64 is 1 on the tokens that are trained. With references, the sums of the
    examples' log-probs at the start of the run, they are ref_log_prob_sums [B] float64.
    """
    prompts = [example.prompt for example in examples]
    responses = [example.response for example in examples]
    prompt_width = max(map(len, prompts), default=1)
    width = max(map(len, responses), default=1)
    prompt_mask = pad([[1] * len(ids) for ids in prompts], prompt_width, torch.int64, "left")
    present = pad([[1] * len(ids) for ids in responses], width, torch.int64)
    attention_mask = torch.cat([prompt_mask, present], dim=1)
    padded_prompts = pad(prompts, prompt_width, torch.int64, "left")
    padded_responses = pad(responses, width, torch.int64)
    fields = {
        "input_ids": torch.cat([padded_prompts, padded_responses], dim=1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
        "responses": padded_responses,
        "response_mask": pad([example.mask for example in examples], width, torch.int64),
    }
    if references is not None:
        fields["ref_log_prob_sums"] = torch.tensor(references, dtype=torch.float64)
    return DataProto.from_dict(fields)
