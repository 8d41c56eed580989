"""The reference service's requests and answers: JSON, with arrays of numbers as base64.

    POST /log_probs {"ids": I, "lengths": [5, 7], "scored": [2, 3], "temperature": 1.0}
    {"log_probs": F, "model": "..."}

I is the base64 text of all sequences one after another, as little-endian int32; F that of the
log-probs of the last 2 and the last 3 tokens, as little-endian float32. `model` identifies the
weights that computed them. Nothing is pickled.
"""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

IDS = np.dtype("<i4")
VALUES = np.dtype("<f4")
MOST_ABOVE_ZERO = 1e-3
"""What rounding may add to a log-prob of 0."""


@dataclass(frozen=True)
class Job:
    """Sequences whose last tokens are to be scored.

    Attributes:
        sequences: token ids of each sequence, int32.
        scored: for each sequence, how many of its last tokens: at least 1, and not the first token.
        temperature: divisor of the logits.
    """

    sequences: list[np.ndarray]
    scored: list[int]
    temperature: float

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return sum(len(sequence) for sequence in self.sequences)


@dataclass(frozen=True)
class ModelInfo:
    """What the service tells of its model.

    Attributes:
        model: identifies weights and precision: an answer with another one is from another model.
        name: last part of the model's path.
        vocab_size: token ids are below it.
        max_length: tokens of the longest sequence.
        dtype: in which it computes.
        fingerprints: of the weights rounded to a dtype, by the dtype's name. Only dtypes that are
            not finer than the one that holds them.
        shape: values of the model's config.json, by name.
        ranks: processes that compute.
        vocabulary: `engine.folder.vocabulary_digest` of its tokenizer; "" if it has none.
    """

    model: str
    name: str
    vocab_size: int
    max_length: int
    dtype: str
    fingerprints: dict[str, int]
    shape: dict[str, Any]
    ranks: int
    vocabulary: str = ""


def request(job: Job) -> dict[str, Any]:
    """Return the body of a request."""
    return {
        "ids": _text(np.concatenate(job.sequences).astype(IDS)),
        "lengths": [len(sequence) for sequence in job.sequences],
        "scored": job.scored,
        "temperature": job.temperature,
    }


def read_request(value: dict[str, Any], vocab_size: int, max_length: int, most: int) -> Job:
    """Return the job of a request.

    Args:
        vocab_size, max_length: of the model.
        most: sequences that a request may have.

    Raises:
        ValueError: names the wrong field.
    """
    lengths, scored = _counts(value, "lengths", most), _counts(value, "scored", most)
    if len(lengths) != len(scored):
        raise ValueError(f"lengths has {len(lengths)} entries and scored {len(scored)}")
    for place, (length, last) in enumerate(zip(lengths, scored, strict=True)):
        if length > max_length:
            raise ValueError(
                f"lengths[{place}] is {length}; the model's longest sequence is {max_length}"
            )
        if last >= length:
            raise ValueError(
                f"scored[{place}] is {last}, but the sequence has {length} tokens, of which the "
                "first one has no log-prob"
            )
    temperature = value.get("temperature", 1.0)
    if isinstance(temperature, bool) or not isinstance(temperature, int | float):
        raise ValueError("temperature is not a number")
    if not 1e-6 <= temperature <= 1e6:
        raise ValueError(f"temperature is {temperature!r:.20}, expected a number from 1e-6 to 1e6")
    ids = _array(value.get("ids"), IDS, "ids")
    if len(ids) != sum(lengths):
        raise ValueError(f"ids has {len(ids)} tokens, and lengths {sum(lengths)} in all")
    if len(ids) and not (0 <= ids.min() and ids.max() < vocab_size):
        raise ValueError(
            f"ids has token ids from {ids.min()} to {ids.max()}; the model has {vocab_size} tokens"
        )
    return Job(np.split(ids, np.cumsum(lengths)[:-1]), scored, float(temperature))


def answer(log_probs: Sequence[np.ndarray], model: str) -> dict[str, Any]:
    """Return the body of an answer."""
    return {"log_probs": _text(np.concatenate(log_probs).astype(VALUES)), "model": model}


def read_answer(value: Any, scored: Sequence[int]) -> tuple[list[np.ndarray], str]:
    """Return (log-probs of each sequence, the model that computed them).

    Raises:
        ValueError: the answer has another number of values, or one that is not a log-prob.
    """
    if not isinstance(value, dict) or not isinstance(value.get("model"), str):
        raise ValueError("expected an object with log_probs and model")
    values = _array(value.get("log_probs"), VALUES, "log_probs")
    if len(values) != sum(scored):
        raise ValueError(f"log_probs has {len(values)} values for {sum(scored)} tokens")
    if not (np.isfinite(values).all() and (values <= MOST_ABOVE_ZERO).all()):
        raise ValueError("log_probs has a value that is not finite or above 0")
    return np.split(values, np.cumsum(scored)[:-1]), value["model"]


def read_info(value: Any) -> ModelInfo:
    """Return the answer of GET /model.

    Raises:
        ValueError: it is not one.
    """
    try:
        fields = {name: value[name] for name in ModelInfo.__dataclass_fields__ if name in value}
        info = ModelInfo(**fields)
    except (TypeError, KeyError):
        raise ValueError("GET /model is not answered by a reference service") from None
    right = (
        isinstance(info.model, str)
        and isinstance(info.vocab_size, int)
        and isinstance(info.max_length, int)
        and isinstance(info.fingerprints, dict)
        and isinstance(info.shape, dict)
        and isinstance(info.vocabulary, str)
    )
    if not right:
        raise ValueError("GET /model is answered with fields of other types")
    return info


def _counts(value: dict[str, Any], name: str, most: int) -> list[int]:
    counts = value.get(name)
    if not isinstance(counts, list) or not counts:
        raise ValueError(f"{name} is not a list of numbers")
    if len(counts) > most:
        raise ValueError(f"{name} has {len(counts)} entries; at most {most} sequences per request")
    if not all(type(count) is int and 0 < count < 2**31 for count in counts):
        raise ValueError(f"{name} has an entry that is not a whole number above 0")
    return counts


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _array(text: Any, dtype: np.dtype[Any], name: str) -> np.ndarray:
    if not isinstance(text, str):
        raise ValueError(f"{name} is not base64 text")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"{name} is not base64 text") from None
    if len(data) % dtype.itemsize:
        raise ValueError(f"{name} is not a whole number of values of {dtype.itemsize} bytes")
    return np.frombuffer(data, dtype)
