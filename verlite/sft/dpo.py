"""Direct preference optimization: Rafailov et al. 2023, https://arxiv.org/abs/2305.18290.

A row has two examples with the same prompt: the better response, then the worse one. The reference
is the model with which the run starts. Loss and metrics come first, then the reading of rows.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import logsigmoid

from verlite.config import commands
from verlite.config.sft import DPOConfig, DPODataConfig
from verlite.engine.fsdp import Counts, TrainEngine
from verlite.sft import data as sft_data
from verlite.sft.data import Example
from verlite.sft.run import Task
from verlite.sft.train import log_prob_sums, micro_batching
from verlite.trainer.preflight import DPO


def dpo_loss(
    rows: TensorDict, outputs: dict[str, Tensor], counts: Counts, beta: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return this micro-batch's part of the mean over pairs, and of the metrics of `pair_metrics`.

    rows: ref_log_prob_sums [2k] of k pairs, better and worse response in turns.
    """
    sums = (outputs["log_probs"] * rows["response_mask"]).double().sum(1)
    pairs = counts.sequences / 2
    metrics = {
        name: values.sum() / pairs
        for name, values in pair_metrics(beta * (sums - rows["ref_log_prob_sums"])).items()
    }
    tokens = {"tokens": rows["response_mask"].sum()}
    return metrics.pop("loss"), metrics | tokens


def pair_metrics(rewards: Tensor) -> dict[str, Tensor]:
    """Return loss and metrics of each pair [k].

    The loss is -log sigmoid(r_chosen - r_rejected) with r = beta * log(p / p_ref): equation 7 of
    the paper.

    rewards: [2k], better and worse response in turns.
    """
    chosen, rejected = rewards[0::2], rewards[1::2]
    margin = chosen - rejected
    return {
        "loss": -logsigmoid(margin),
        "rewards/accuracy": (margin > 0).double(),
        "rewards/margin": margin,
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
    }


def judge(
    config: DPOConfig, examples: list[Example], sums: list[float], references: list[float]
) -> tuple[dict[str, float], list[float]]:
    """Return the means of `pair_metrics`, and the reward of each example."""
    change = torch.tensor(sums, dtype=torch.float64) - torch.tensor(references, dtype=torch.float64)
    rewards = config.beta * change
    metrics = {name: float(values.mean()) for name, values in pair_metrics(rewards).items()}
    return metrics, rewards.tolist()


def reference(engine: TrainEngine, config: DPOConfig, examples: list[Example]) -> list[float]:
    """Return the sum of log-probs of each example under the engine's weights."""
    return log_prob_sums(engine, examples, micro_batching(config))


def row_examples(row: sft_data.Row, tokenizer: Any, data: DPODataConfig) -> list[Example]:
    """Return two examples of a row: the better one, then the worse one.

    Prompts and responses become tokens as those of main_sft. Raises ValueError: the row has the
    wrong form, or an example is too long.
    """
    tools = sft_data.tools_of(row, data)
    return [
        sft_data.fit(sft_data.answer(prompt, response, tokenizer, data, tools), data)
        for prompt, response in _answers(row, data)
    ]


def columns(path: Path, present: list[str], data: DPODataConfig) -> list[str]:
    """Return the columns of a file that training reads. Raises DataError if it has not all of
    them."""
    required = [data.chosen_key, data.rejected_key]
    sft_data.require(path, present, required, "Set data.chosen_key and data.rejected_key.")
    return [*required, *(key for key in (data.prompt_key, data.tools_key) if key in present)]


def _answers(row: sft_data.Row, data: DPODataConfig) -> list[tuple[sft_data.Messages, str]]:
    """Return prompt and response of both sides of a row."""
    sides = [_side(row[column], column) for column in (data.chosen_key, data.rejected_key)]
    (before, better), (other, worse) = sides
    if data.prompt_key in row:
        prompt = sft_data.prompt_of(row, data)
        before = _with_all_turns(prompt, before, data.chosen_key, data)
        other = _with_all_turns(prompt, other, data.rejected_key, data)
        if before != other:
            raise ValueError(
                f"the messages before the responses in {data.chosen_key!r} and "
                f"{data.rejected_key!r} are different: both must answer one prompt"
            )
        return [(before, better), (before, worse)]
    if not before or before != other:
        raise ValueError(
            f"there is no prompt: neither a column {data.prompt_key!r}, nor the same messages "
            f"before the responses in {data.chosen_key!r} and {data.rejected_key!r}"
        )
    return sides


def _with_all_turns(
    prompt: sft_data.Messages, before: sft_data.Messages, column: str, data: DPODataConfig
) -> sft_data.Messages:
    """Return the prompt and the messages before a response as one, each turn once."""
    if not before or prompt[-len(before) :] == before:
        return prompt
    if prompt in (before[: len(prompt)], before[-len(prompt) :]):
        return before
    raise ValueError(
        f"column {column!r}: {len(before)} messages before the response neither begin nor end with "
        f"those of column {data.prompt_key!r}. Write the response alone, or the whole conversation"
    )


def _side(value: Any, column: str) -> tuple[sft_data.Messages, str]:
    """Return the messages before a response, none for text, and the response."""
    value = sft_data.chat_or_text(value)
    if isinstance(value, str):
        return [], value
    messages = sft_data.messages_of(value, column, ["role", "content"], sft_data.TEXT_OR_CHAT)
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"column {column!r}: the last message is not the assistant's")
    if messages[-1].get("tool_calls"):
        raise ValueError(f"column {column!r}: the last message has tool_calls, expected text")
    return messages[:-1], messages[-1]["content"]


TASK = Task(
    command=commands.DPO,
    kind=DPO,
    columns=columns,
    examples_of=row_examples,
    sources=("chosen", "rejected"),
    loss=lambda config: partial(dpo_loss, beta=config.beta),
    judge=judge,
    reference=reference,
)
"""`verlite.main_dpo`."""
