"""The closed ledger of batch fields: what each is called, its shape and dtype, who writes it and what it means.

B rows, P prompt tokens, R response tokens, S = P + R. Every [B, R] float field is 0 on padding and tool text, and entry j of
a [B, R] field belongs to response token j. Such a field may also be ragged (protocol.ragged), or [B, 1] where a row has one number
for all its trained tokens. To add a field, add a line here.
"""

import difflib
from dataclasses import dataclass

import numpy as np
import torch

from verlite.protocol.data import DataProto


@dataclass(frozen=True)
class Field:
    """shape: letters of its dimensions. dtype: a torch dtype, or for object columns the Python types of an entry (() for any)."""

    shape: str
    dtype: torch.dtype | tuple[type, ...]
    writer: str
    meaning: str


_INT, _FLOAT, _BOOL = torch.int64, torch.float32, torch.bool
_TEXT, _ANY = (str,), ()
_RAGGED = (np.ndarray, list, tuple)  # a reference is a tuple

FIELDS: dict[str, Field] = {
    # tokens
    "prompts": Field("B P", _INT, "rollout", "prompt tokens, padded on the left"),
    "responses": Field(
        "B R", _INT, "rollout", "response tokens, sampled and tool text, padded on the right"
    ),
    "input_ids": Field("B S", _INT, "rollout", "prompts and responses side by side"),
    "attention_mask": Field("B S", _INT, "rollout", "1 on real tokens, 0 on padding"),
    "position_ids": Field(
        "B S", _INT, "rollout", "position of each real token in its row, from 0; 0 on left padding"
    ),
    "response_mask": Field(
        "B R",
        _INT,
        "rollout",
        "1 only on sampled tokens that are trained: no tool text, padding, ERROR rows",
    ),
    # log-probs and values
    "rollout_log_probs": Field(
        "B R", _FLOAT, "rollout", "log-prob of each sampled token when it was sampled"
    ),
    "old_log_probs": Field(
        "B R", _FLOAT, "actor", "log-prob under the policy before this step's updates"
    ),
    "ref_log_prob": Field("B R", _FLOAT, "reference", "log-prob under the frozen reference"),
    "values": Field("B R", _FLOAT, "critic", "value estimated before each token"),
    "rollout_is_weights": Field(
        "B R", _FLOAT, "trainer", "importance weight between trainer and rollout engine"
    ),
    "sum_pi_squared": Field(
        "B R",
        _FLOAT,
        "actor",
        "sum of squared probabilities over the vocabulary (optimal_token_baseline)",
    ),
    # rewards and advantages
    "raw_scores": Field(
        "B",
        _FLOAT,
        "reward",
        "what the reward function gave, before normalisation, clipping and length penalty",
    ),
    "overlong_penalty": Field(
        "B", _FLOAT, "trainer", "what the score loses for length (reward.overlong_buffer)"
    ),
    "scores": Field(
        "B",
        _FLOAT,
        "reward",
        "the score that training takes: raw_scores normalised, clipped and penalised for length",
    ),
    "rewards": Field(
        "B",
        _FLOAT,
        "trainer",
        "score less the KL penalty, if there is one, summed over the row's tokens",
    ),
    "reward_seconds": Field(
        "B", _FLOAT, "rollout", "how long its worker waited for rewards after its last sample"
    ),
    "reward_baselines": Field(
        "B", _FLOAT, "trainer", "score of the greedy answer to the same prompt (remax)"
    ),
    "advantages": Field("B R", _FLOAT, "trainer", "advantage of each trained token"),
    "rejected_tokens": Field(
        "B R", _BOOL, "trainer", "sampled tokens that rollout correction takes out of the loss"
    ),
    "selected_tokens": Field(
        "B R", _BOOL, "trainer", "tokens that clip_cov leaves out, or kl_cov holds back"
    ),
    "returns": Field("B R", _FLOAT, "trainer", "target of the critic"),
    # rows
    "prompt_length": Field("B", _INT, "rollout", "tokens of the prompt"),
    "response_length": Field("B", _INT, "rollout", "tokens of the response, sampled and tool text"),
    "trained_tokens": Field(
        "B",
        _INT,
        "rollout, trainer",
        "tokens of the row that are trained; 0 in rows without a vote",
    ),
    "rejected": Field("B", _INT, "trainer", "tokens of the row that are rejected_tokens"),
    "entropy_sums": Field(
        "B",
        torch.float64,
        "actor",
        "sum over trained tokens of the entropy they were sampled with, in nats",
    ),
    "gap_sums": Field(
        "B G",
        torch.float64,
        "actor",
        "sums over trained tokens of how far trainer and rollout engine are apart",
    ),
    "valid": Field(
        "B",
        _BOOL,
        "rollout, reward",
        "False: infrastructure or reward failure; the row has no vote anywhere",
    ),
    "weight_version": Field(
        "B", _INT, "rollout", "version of the weights that sampled the row's last token"
    ),
    "turns": Field("B", _INT, "rollout", "times the policy spoke in the row"),
    "invalid_turns": Field(
        "B", _INT, "rollout", "of these, how many the environment called malformed"
    ),
    "truncated_observations": Field(
        "B", _INT, "rollout", "observations that were cut to data.max_obs_length"
    ),
    "gen_seconds": Field("B", _FLOAT, "rollout", "time that the sample waited for the engine"),
    "tool_seconds": Field("B", _FLOAT, "rollout", "time that the sample waited for its tools"),
    "mini_batch_index": Field(
        "B E",
        _INT,
        "trainer",
        "optimizer step, within each of E epochs, in which the row takes part",
    ),
    "critic_mini_batch_index": Field(
        "B C", _INT, "trainer", "the same for the critic, over its C epochs"
    ),
    # objects, one per row
    "uid": Field(
        "B", _TEXT, "trainer", "one id per prompt, shared by its samples; rows are grouped by it"
    ),
    "index": Field("B", (int,), "data", "row number in the dataset"),
    "data_source": Field("B", _TEXT, "data", "where the prompt comes from; chooses the scorer"),
    "messages": Field("B", (list,), "data", "the prompt as chat messages (verl's raw_prompt)"),
    "prompt_ids": Field("B", _ANY, "data, rollout", "the prompt's tokens before padding"),
    "response_ids": Field("B", _ANY, "rollout", "the response's tokens before padding"),
    "ground_truth": Field("B", _ANY, "data", "what the scorer compares with"),
    "extra_info": Field("B", (dict,), "data", "whatever else the dataset says about the row"),
    "status": Field("B", _TEXT, "rollout", "how the row ended (rollout.types.Status)"),
    "error": Field(
        "B",
        (str, type(None)),
        "rollout, reward",
        "class and message of the failure, None without one",
    ),
    "reward_parts": Field("B", (dict,), "reward", "named parts of the score"),
    "sampling": Field("B", _ANY, "trainer", "how the row is sampled (rollout.types.Sampling)"),
    "segments": Field(
        "B", (list,), "rollout", "who wrote the response, piece by piece: (model or tool, tokens)"
    ),
    "turn_infos": Field("B", (list,), "rollout", "what the environment reported of each turn"),
    "transcript": Field(
        "B", _ANY, "rollout", "the response as (model or tool, text), piece by piece"
    ),
    "text": Field("B", _ANY, "rollout", "what the model wrote in the row, as scored"),
    "reward_traceback": Field(
        "B", (str, type(None)), "reward", "where the reward function failed, None where it did not"
    ),
}


def check(data: DataProto) -> DataProto:
    """Return `data` if it agrees with the ledger; else raise ValueError with every disagreement, one per line."""
    problems: list[str] = []
    sizes: dict[str, tuple[int, str]] = {"B": (len(data), "the batch")}
    tensors = {} if data.batch is None else dict(data.batch.items())
    for name in [*tensors, *data.non_tensor_batch]:
        spec = FIELDS.get(str(name))
        if spec is None:
            near = difflib.get_close_matches(str(name), FIELDS, n=2)
            problems.append(
                f"{name}: unknown field"
                + (
                    f"; did you mean {' or '.join(near)}?"
                    if near
                    else "; add it to protocol.fields"
                )
            )
        elif isinstance(spec.dtype, torch.dtype) and not (
            spec.shape == "B R" and name in data.non_tensor_batch
        ):
            problems += _check_tensor(str(name), tensors.get(name), spec, sizes)
        else:
            problems += _check_objects(
                str(name), data, spec.dtype if isinstance(spec.dtype, tuple) else _RAGGED
            )
    if {"P", "R", "S"} <= sizes.keys() and sizes["P"][0] + sizes["R"][0] != sizes["S"][0]:
        parts = ", ".join(f"{letter}={sizes[letter][0]} ({sizes[letter][1]})" for letter in "PRS")
        problems.append(f"S must be P + R, but {parts}")
    if problems:
        raise ValueError("batch disagrees with the field ledger:\n  " + "\n  ".join(problems))
    return data


def _check_tensor(
    name: str, tensor: object, spec: Field, sizes: dict[str, tuple[int, str]]
) -> list[str]:
    if not isinstance(tensor, torch.Tensor):
        return [f"{name}: must be a tensor [{spec.shape}], is an object column"]
    problems = (
        []
        if tensor.dtype == spec.dtype
        else [f"{name}: dtype must be {spec.dtype}, is {tensor.dtype}"]
    )
    letters = spec.shape.split()
    if len(letters) != tensor.ndim:
        return [*problems, f"{name}: must be [{spec.shape}], has shape {list(tensor.shape)}"]
    for letter, size in zip(letters, tensor.shape, strict=True):
        if letter == "R" and size == 1:  # one number for all of a row
            continue
        known, where = sizes.setdefault(letter, (size, name))
        if size != known:
            problems.append(
                f"{name} [{spec.shape}]: {letter} is {size} here and {known} in {where}"
            )
    return problems


def _check_objects(name: str, data: DataProto, types: tuple[type, ...]) -> list[str]:
    if name not in data.non_tensor_batch:
        return [f"{name}: must be an object column, is a tensor"]
    wrong = next(
        (
            row
            for row, value in enumerate(data.non_tensor_batch[name])
            if types and not isinstance(value, types)
        ),
        None,
    )
    if wrong is None:
        return []
    names = " or ".join(kind.__name__ for kind in types)
    return [
        f"{name}: entries must be {names}, row {wrong} is {type(data.non_tensor_batch[name][wrong]).__name__}"
    ]
