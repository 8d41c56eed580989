"""Question answering with search: exact match of the last <answer>, and Search-R1's format scores.

The rules are those of Search-R1 (arXiv 2503.09516; format scores: arXiv 2505.15117), which
normalizes text as the evaluation of SQuAD does (arXiv 1606.05250). Three rules differ from it:

- Only the model's own text counts, so an example in the prompt or a tag in an observation is not an
  answer. A response without an answer scores 0.
- The structure is checked on who wrote each segment, not on the markers of one chat template.
- A gold answer that normalizes to nothing ("A+", "*") would equal an empty answer and occur in
  every text. It is compared as written, and no retrieved text counts as containing it.
"""

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

METHODS = ("em", "sub_em")
TAG = re.compile(r"(</?(?:think|search|information|answer)>)")
ARTICLE = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)

NEXT = {
    ("start", "<think>"): "in think",
    ("in think", "</think>"): "thought",
    ("thought", "<search>"): "in search",
    ("in search", "</search>"): "searched",
    ("informed", "<think>"): "in think",
    ("thought", "<answer>"): "in answer",
    ("in answer", "</answer>"): "end",
}
"""(state, tag of the model) -> next state. An observation leads from "searched" to "informed".

Text is allowed only in the "in" states.
"""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    method: str = "em",
    structure_format_score: float = 0.0,
    final_format_score: float = 0.0,
    retrieval_score: float = 0.0,
) -> dict[str, float | str]:
    """Score a trajectory by its last answer and, if a format score is not 0, by its structure.

    | structure | answer | a retrieved text contains a gold answer | score |
    |---|---|---|---|
    | valid | right | any | 1 |
    | not valid | right | any | 1 - structure_format_score |
    | valid | wrong | yes | structure_format_score + retrieval_score |
    | valid | wrong | no | structure_format_score |
    | not valid | wrong | any | final_format_score |
    | any | none | any | 0 |

    Args:
        solution_str: the text of the model in all its turns, without prompt and observations.
        ground_truth: {"target": answers} or the answers themselves; one text or several.
        extra_info: extra_info["trajectory"]["segments"] is the list of [who, text] in order; who is
            "model" or "tool". Without it, as in a single turn, all text is the model's.
        method: "em" if the normalized answer must equal a gold answer, "sub_em" if it must contain
            one.

    Returns:
        score; acc, 1.0 or 0.0 by the method alone, for validation; format_valid, 1.0 or 0.0;
        retrieved, 1.0 or 0.0, and 0.0 if the structure is not valid; pred, the extracted answer, ""
        if there is none.

    Raises:
        ValueError: there is no gold answer, the method is unknown, a score is outside [0, 1], the
            format scores add up to more than 1, or a segment is neither the model's nor the tool's.
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r} is not one of {', '.join(METHODS)}")
    _check_format_scores(structure_format_score, final_format_score, retrieval_score)
    golds = gold_answers(ground_truth)
    trajectory = (extra_info or {}).get("trajectory")
    segments = [("model", solution_str)] if trajectory is None else trajectory["segments"]
    blocks = observations(segments)
    # No tag spans two turns, so each turn is searched alone.
    turns = [last_answer(text) for who, text in segments if who == "model"]
    answers = [text for text in turns if text is not None]
    answer = answers[-1] if answers else None
    is_valid = blocks is not None
    is_right = answer is not None and matches(answer, golds, method)
    is_retrieved = blocks is not None and contain_gold(blocks, golds)
    if answer is None:
        score = 0.0
    elif is_right:
        score = 1.0 if is_valid else 1.0 - structure_format_score
    elif is_valid:
        score = structure_format_score + retrieval_score * is_retrieved
    else:
        score = final_format_score
    return {
        "score": float(score),
        "acc": float(is_right),
        "format_valid": float(is_valid),
        "retrieved": float(is_retrieved),
        "pred": answer or "",
    }


def _check_format_scores(structure: float, final: float, retrieval: float) -> None:
    scores = {
        "structure_format_score": structure,
        "final_format_score": final,
        "retrieval_score": retrieval,
    }
    for name, value in scores.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value} is outside [0, 1]: a right answer scores 1")
    if structure + retrieval > 1:
        raise ValueError(
            f"structure_format_score + retrieval_score = {structure} + {retrieval} is above 1: "
            "a wrong answer would beat a right one"
        )


def normalize(text: str) -> str:
    """Return the text in lower case, without ASCII punctuation and articles, single-spaced."""
    return " ".join(ARTICLE.sub(" ", text.lower().translate(PUNCTUATION)).split())


def matches(answer: str, golds: Sequence[str], method: str = "em") -> bool:
    """Return whether the answer equals (em) or contains (sub_em) a gold answer, both normalized."""
    normalized = normalize(answer)
    for gold in golds:
        wanted = normalize(gold)
        if not wanted:
            found = answer.strip().lower() == gold.strip().lower() != ""
        elif method == "em":
            found = normalized == wanted
        else:
            found = wanted in normalized
        if found:
            return True
    return False


def contain_gold(texts: Sequence[str], golds: Sequence[str]) -> bool:
    """Return whether one of the texts contains one of the gold answers, both normalized."""
    wanted = [gold for gold in map(normalize, golds) if gold]
    return any(gold in text for text in map(normalize, texts) for gold in wanted)


def last_answer(text: str) -> str | None:
    """Return the stripped content of the last complete <answer>...</answer>, or None.

    A pair begins at the first <answer> after the previous pair.
    """
    # A regex would search for an end from every <answer>, which takes quadratic time.
    answer = None
    position = 0
    while True:
        start = text.find("<answer>", position)
        end = text.find("</answer>", start)
        if start < 0 or end < 0:
            return answer
        answer = text[start + len("<answer>") : end].strip()
        position = end + len("</answer>")


def observations(segments: Sequence[Sequence[str]]) -> list[str] | None:
    """Return the retrieved texts, one per search, or None if the structure is not valid.

    A valid trajectory is: think, then any number of (search, observation, think), then answer.
    There is only white space before, between and after these blocks, and no tag inside a block of
    the model. An observation is <information>...</information> of the tool, with any content. Other
    text of the tool, such as its reply to an invalid action, and <information> written by the model
    make the trajectory invalid.

    Raises:
        ValueError: a segment is neither the model's nor the tool's.
    """
    state = "start"
    retrieved = []
    for who, text in segments:
        if who not in ("model", "tool"):
            raise ValueError(
                f"a segment of the trajectory is by {who!r:.100}, expected model or tool"
            )
        if who == "model":
            for piece in TAG.split(text):
                if TAG.fullmatch(piece):
                    state = NEXT.get((state, piece), "wrong")
                elif piece.strip() and not state.startswith("in "):
                    return None
        elif text.strip():
            passage = _information(text.strip())
            if state != "searched" or passage is None:
                return None
            state = "informed"
            retrieved.append(passage)
    return retrieved if state == "end" else None


def _information(text: str) -> str | None:
    if not (text.startswith("<information>") and text.endswith("</information>")):
        return None
    return text.removeprefix("<information>").removesuffix("</information>")


def gold_answers(ground_truth: Any) -> list[str]:
    """Return the accepted answers of a row.

    Args:
        ground_truth: {"target": answers} or the answers themselves: one text, or a list or array.

    Raises:
        ValueError: there is no answer.
    """
    target: Any = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    if hasattr(target, "tolist"):  # a numpy array, as some parquet readers return
        target = target.tolist()
    golds = [target] if isinstance(target, str) else target
    is_list = isinstance(golds, list | tuple) and all(isinstance(gold, str) for gold in golds)
    if not is_list or not any(map(str.strip, golds)):
        raise ValueError(
            f'ground_truth={ground_truth!r:.200} has no answers: expected {{"target": [text, ...]}}'
        )
    return list(golds)
