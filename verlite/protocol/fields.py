"""The table of batch fields: name, shape, dtype, writer and meaning of each.

B: rows. P: prompt tokens. R: response tokens. S = P + R. Entry j of a [B, R] field belongs to
response token j, and float fields are 0 on padding and tool text. A [B, R] field may be ragged
(protocol.ragged), or [B, 1] where all tokens of a row have the same number. To add a field, add it
here.

Masks. Two columns say which tokens count, and no other column does:

- `response_mask` is 1 on tokens that the policy sampled, in rows whose generation and reward
  succeeded. It is used for estimation: KL in the reward, GAE, whitening, rollout metrics.
- `loss_mask` is 1 on tokens that the losses train on (policy, entropy, KL, critic). It is
  `response_mask` without the tokens that rollout correction rejects and, with
  `algorithm.mask_truncated`, without truncated responses. If nothing is removed, both columns have
  the same entries. In an update the engine gets it under the name `response_mask`.

A mask is stored when it changes, together with its number of tokens per row, and is not recombined
from other columns. `valid` is not a mask: it says whether the row has a usable score, which
statistics of its group use.
"""

import difflib
from dataclasses import dataclass

import numpy as np
import torch

from verlite.protocol.data import DataProto


@dataclass(frozen=True)
class Field:
    """One field.

    shape: letters of its dimensions.
    dtype: a torch dtype; for object columns the Python types of an entry, () for any.
    writer: stages of the trainer that write it, or the package that does.
    """

    shape: str
    dtype: torch.dtype | tuple[type, ...]
    writer: str
    meaning: str


_INT = torch.int64
_FLOAT = torch.float32
_DOUBLE = torch.float64
_BOOL = torch.bool
_TEXT = (str,)
_TEXT_OR_NONE = (str, type(None))
_ANY = ()
_RAGGED = (np.ndarray, list, tuple)  # a reference is a tuple

# fmt: off
FIELDS: dict[str, Field] = {
    # Tokens, padded by protocol.ragged.
    "prompts": Field("B P", _INT, "protocol.ragged", "prompt tokens, padded on the left"),
    "responses": Field("B R", _INT, "protocol.ragged",
        "response tokens, with tool text, padded on the right"),
    "input_ids": Field("B S", _INT, "protocol.ragged", "prompts and responses joined"),
    "attention_mask": Field("B S", _INT, "protocol.ragged", "1 on real tokens, 0 on padding"),
    "position_ids": Field("B S", _INT, "protocol.ragged",
        "position of each real token in its row, from 0"),
    # Masks and their numbers of tokens.
    "response_mask": Field("B R", _INT, "generate",
        "1 on sampled tokens of rows that count; used for estimation"),
    "loss_mask": Field("B R", _INT, "loss_mask", "1 on tokens that the losses train on"),
    "sampled_tokens": Field("B", _INT, "generate", "tokens of the row in response_mask"),
    "trained_tokens": Field("B", _INT, "loss_mask", "tokens of the row in loss_mask"),
    # Log-probs and values.
    "rollout_log_probs": Field("B R", _FLOAT, "generate",
        "log-prob of each sampled token in the rollout engine"),
    "old_log_probs": Field("B R", _FLOAT, "old_log_probs",
        "log-prob under the policy before this step's updates"),
    "entropys": Field("B R", _FLOAT, "old_log_probs",
        "entropy at each sampled token, in nats (verl's name)"),
    "entropy_sums": Field("B", _DOUBLE, "old_log_probs",
        "sum of the entropy over response_mask, in nats"),
    "gap_sums": Field("B G", _DOUBLE, "old_log_probs",
        "sums over response_mask of differences between trainer and rollout log-probs"),
    "sum_pi_squared": Field("B R", _FLOAT, "old_log_probs",
        "sum of squared probabilities over the vocabulary (optimal_token_baseline)"),
    "rollout_is_weights": Field("B R", _FLOAT, "loss_mask",
        "importance weight between trainer and rollout engine"),
    "ref_log_prob": Field("B R", _FLOAT, "reference_log_probs",
        "log-prob under the frozen reference policy"),
    "teacher_log_prob": Field("B R", _FLOAT, "teacher_log_probs",
        "log-prob under the teacher of distillation"),
    "values": Field("B R", _FLOAT, "values", "the critic's value before each token"),
    # Scores, rewards and advantages.
    "raw_scores": Field("B", _FLOAT, "generate", "score that the reward function returned"),
    "overlong_penalty": Field("B", _FLOAT, "score",
        "part of the score for length (reward.overlong_buffer), at most 0"),
    "scores": Field("B", _FLOAT, "score",
        "raw_scores normalized, clipped and penalized for length"),
    "gdpo_rewards": Field("B K", _DOUBLE, "score",
        "the reward's parts in algorithm.gdpo_reward_keys (gdpo)"),
    "reward_baselines": Field("B", _FLOAT, "score",
        "score of the greedy response to the same prompt (remax)"),
    "rewards": Field("B", _FLOAT, "advantages", "score minus the row's KL penalty, if any"),
    "advantages": Field("B R", _FLOAT, "advantages", "advantage of each token in loss_mask"),
    "returns": Field("B R", _FLOAT, "advantages", "the critic's targets"),
    "credit": Field("B R", _FLOAT, "generate",
        "factor of the advantage in the policy's update (agent.credit)"),
    "selected_tokens": Field("B R", _BOOL, "advantages",
        "tokens that the loss clip_cov or kl_cov treats differently"),
    # Numbers per row.
    "prompt_length": Field("B", _INT, "generate", "tokens of the prompt"),
    "response_length": Field("B", _INT, "generate", "tokens of the response, with tool text"),
    "valid": Field("B", _BOOL, "generate",
        "whether the row has a usable score (ReMax: and a baseline)"),
    "weight_version": Field("B", _INT, "generate",
        "version of the weights that sampled the row's last token"),
    "oldest_version": Field("B", _INT, "generate",
        "oldest version of the weights that sampled a token of the row"),
    "first_branch": Field("B", _INT, "protocol.branches",
        "1 on the row that losses count as the sample, 0 on others"),
    "sample_index": Field("B", _INT, "generate",
        "place of the row in its group, of rows sampled in the background"),
    "reward_seconds": Field("B", _FLOAT, "generate",
        "time its worker waited for rewards after its last sample"),
    "turns": Field("B", _INT, "generate", "turns of the policy"),
    "num_turns": Field("B", _INT, "generate",
        "messages, as verl counts them: the prompt, the policy's turns and the answers of tools"),
    "invalid_turns": Field("B", _INT, "generate", "turns that the environment called malformed"),
    "truncated_observations": Field("B", _INT, "generate",
        "observations truncated to data.max_obs_length"),
    "gen_seconds": Field("B", _FLOAT, "generate", "time the sample waited for the engine"),
    "tool_seconds": Field("B", _FLOAT, "generate", "time the sample waited for its tools"),
    "mini_batch_index": Field("B E", _INT, "assign_mini_batches",
        "the row's optimizer step in each of the actor's E epochs"),
    "critic_mini_batch_index": Field("B C", _INT, "assign_mini_batches",
        "the row's optimizer step in each of the critic's C epochs"),
    # Objects, one per row.
    "uid": Field("B", _TEXT, "next_prompts", "prompt id; rows with the same uid are a group"),
    "index": Field("B", (int,), "next_prompts", "row number in the dataset"),
    "data_source": Field("B", _TEXT, "next_prompts",
        "origin of the prompt; selects the reward function"),
    "messages": Field("B", (list,), "next_prompts",
        "the prompt's chat messages (verl: raw_prompt)"),
    "ground_truth": Field("B", _ANY, "next_prompts", "the reward function's reference answer"),
    "extra_info": Field("B", (dict,), "next_prompts", "the dataset's other columns"),
    "sampling": Field("B", _ANY, "next_prompts", "sampling parameters (rollout.types.Sampling)"),
    "prompt_ids": Field("B", _ANY, "next_prompts, generate", "tokens of the prompt"),
    "teacher_prompt_ids": Field("B", _ANY, "next_prompts",
        "tokens of the prompt that the teacher reads (data.teacher_prompt_key)"),
    "response_ids": Field("B", _ANY, "generate", "tokens of the response, with tool text"),
    "status": Field("B", _TEXT, "generate", "how the row ended (rollout.types.Status)"),
    "error": Field("B", _TEXT_OR_NONE, "generate", "class and message of the failure, or None"),
    "reward_parts": Field("B", (dict,), "generate", "named parts of the score"),
    "reward_traceback": Field("B", _TEXT_OR_NONE, "generate",
        "traceback of a failed reward function, or None"),
    "text": Field("B", _ANY, "generate", "what the policy wrote, as the reward function saw it"),
    "version_spans": Field("B", (list,), "generate",
        "(weight version, number of tokens that it sampled) of consecutive tokens, oldest first"),
    "branches": Field("B", (list,), "generate",
        "(tokens of the context, tokens that follow) of each of its sequences (protocol.branches)"),
    "requests": Field("B", (list,), "generate",
        "an agent program's requests (rollout.types.Trajectory.requests)"),
    "agent_log": Field("B", _ANY, "generate", "end of what an agent program printed"),
    "segments": Field("B", (list,), "generate",
        "(model or tool, number of tokens) per part of the response"),
    "running": Field("B", (dict,), "generate", "state of a sample that runs (workers.running)"),
    "turn_ids": Field("B", _ANY, "generate", "tokens so far of a turn that is generated"),
    "turn_log_probs": Field("B", _ANY, "generate", "their log-probs"),
    "transcript": Field("B", _ANY, "generate", "(model or tool, text) per part of the response"),
    "session": Field("B", (dict,), "generate",
        "what became of an agent program's requests (gateway.conversation.Session.ledger)"),
    "turn_infos": Field("B", (list,), "generate", "the environment's info of each turn"),
}
# fmt: on

MASK_COUNTS = {"response_mask": "sampled_tokens", "loss_mask": "trained_tokens"}
"""Each mask, and the field with its number of tokens per row."""


def check(data: DataProto) -> DataProto:
    """Return `data` if all of its fields agree with the table.

    Raises:
        ValueError: It lists every disagreement, one per line.
    """
    problems: list[str] = []
    sizes: dict[str, tuple[int, str]] = {"B": (len(data), "the batch")}
    tensors = data.tensors()
    for name in [*tensors, *data.non_tensor_batch]:
        field = FIELDS.get(name)
        if field is None:
            problems.append(_unknown(name))
        elif name in tensors:
            problems += _check_tensor(name, tensors[name], field, sizes)
        else:
            problems += _check_objects(name, data.non_tensor_batch[name], field)
    if {"P", "R", "S"} <= sizes.keys() and sizes["P"][0] + sizes["R"][0] != sizes["S"][0]:
        parts = ", ".join(f"{letter}={sizes[letter][0]} ({sizes[letter][1]})" for letter in "PRS")
        problems.append(f"S must be P + R, but {parts}")
    if problems:
        raise ValueError("batch disagrees with the field table:\n  " + "\n  ".join(problems))
    return data


def check_stage(stage: str, before: DataProto, after: DataProto) -> DataProto:
    """Check what a stage returns: all fields, and that the table names it as writer of new ones.

    It costs a few milliseconds, so it runs in production too.

    Raises:
        ValueError: As `check`, or the stage added a field of another writer.
    """
    check(after)
    old = columns(before)
    for name in columns(after) - old:
        writers = FIELDS[name].writer.split(", ")
        if stage not in writers:
            raise ValueError(
                f"stage {stage} added the field {name}, whose writer is {FIELDS[name].writer}; "
                "correct the stage or protocol/fields.py"
            )
    return after


def columns(data: DataProto) -> set[str]:
    """Return the names of all columns."""
    return {*data.tensors(), *data.non_tensor_batch}


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, FIELDS, n=2)
    if near:
        return f"{name}: unknown field; did you mean {' or '.join(near)}?"
    return f"{name}: unknown field; add it to protocol/fields.py"


def _check_tensor(
    name: str, tensor: torch.Tensor, field: Field, sizes: dict[str, tuple[int, str]]
) -> list[str]:
    if not isinstance(field.dtype, torch.dtype):
        return [f"{name}: must be an object column, is a tensor"]
    problems = []
    if tensor.dtype != field.dtype:
        problems.append(f"{name}: dtype must be {field.dtype}, is {tensor.dtype}")
    letters = field.shape.split()
    if len(letters) != tensor.ndim:
        return [*problems, f"{name}: must be [{field.shape}], has shape {list(tensor.shape)}"]
    for letter, size in zip(letters, tensor.shape, strict=True):
        if letter == "R" and size == 1:  # one number for the whole row
            continue
        known, where = sizes.setdefault(letter, (size, name))
        if size != known:
            problems.append(
                f"{name} [{field.shape}]: {letter} is {size}, but it is {known} in {where}"
            )
    return problems


def _check_objects(name: str, column: np.ndarray, field: Field) -> list[str]:
    types = field.dtype
    if isinstance(types, torch.dtype):
        if field.shape != "B R":
            return [f"{name}: must be a tensor [{field.shape}], is an object column"]
        types = _RAGGED
    allowed = types
    if not allowed:
        return []
    wrong = {kind for kind in set(map(type, column)) if not issubclass(kind, allowed)}
    if not wrong:
        return []
    row = next(i for i, value in enumerate(column) if type(value) in wrong)
    names = " or ".join(kind.__name__ for kind in allowed)
    return [f"{name}: entries must be {names}, row {row} is {type(column[row]).__name__}"]
