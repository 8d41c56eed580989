"""Question answering with a search engine: the last <answer> by exact match, and Search-R1's format-aware score.

The rules are Search-R1's (arXiv 2503.09516; scores by format: arXiv 2505.15117), which normalises as SQuAD's evaluation does
(arXiv 1606.05250). They differ from its code where that is at odds with its intent:

- Only the model's own text can hold an answer, so that neither the prompt's example nor an observation is one; no answer scores 0.
- Structure is checked on who wrote what, not on a chat template's markers, so that it holds for every family of models.
- A gold answer of which normalising leaves nothing ("A+", "*") would equal an empty answer and stand in every text. It is compared as
  written, and no retrieved text counts as holding it.
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
"""State and the model's tag -> next state; an observation leads from searched to informed. Text stands only in the "in" states."""


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
    """Score of one trajectory, by its last answer and, where the three scores are not 0, by its form.

    | structure | answer | a retrieved text holds a gold answer | score |
    |---|---|---|---|
    | valid | right | any | 1 |
    | not valid | right | any | 1 - structure_format_score |
    | valid | wrong | yes | structure_format_score + retrieval_score |
    | valid | wrong | no | structure_format_score |
    | not valid | wrong | any | final_format_score |
    | any | none | any | 0 |

    Args:
        solution_str: what the model wrote, in all its turns; without prompt and observations.
        ground_truth: {"target": answers}, with one text or several, or these answers themselves.
        extra_info: extra_info["trajectory"]["segments"] is the list of [who, text], who being "model" or "tool", in order.
            Without it, as in a single turn, all is the model's.
        method: "em": the answer equals a gold one, both normalised. "sub_em": it contains one.

    Returns:
        score; acc, 1.0 or 0.0 by the method alone, for validation; format_valid and retrieved, 1.0 or 0.0, the latter only where the
        structure is valid; pred, the answer as it was extracted, "" for none.

    Raises:
        ValueError: no gold answer, an unknown method, a score outside [0, 1], scores for form above a right answer's, or segments of
            another form.
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r} is not one of {', '.join(METHODS)}")
    scores = {
        "structure_format_score": structure_format_score,
        "final_format_score": final_format_score,
        "retrieval_score": retrieval_score,
    }
    for name, value in scores.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value} is outside [0, 1]: a right answer scores 1")
    if structure_format_score + retrieval_score > 1:
        total = f"{structure_format_score} + {retrieval_score}"
        raise ValueError(
            f"structure_format_score + retrieval_score = {total} is above 1: a wrong answer would beat a right one"
        )
    golds = gold_answers(ground_truth)
    trajectory = (extra_info or {}).get("trajectory")
    segments = [("model", solution_str)] if trajectory is None else trajectory["segments"]
    blocks = observations(segments)
    given = [
        answer
        for who, text in segments
        if who == "model" and (answer := last_answer(text)) is not None
    ]  # no tag spans two turns
    answer = given[-1] if given else None
    right = answer is not None and matches(answer, golds, method)
    retrieved = blocks is not None and holds(blocks, golds)
    if answer is None:
        score = 0.0
    elif right:
        score = 1.0 if blocks is not None else 1.0 - structure_format_score
    elif blocks is not None:
        score = structure_format_score + retrieval_score * retrieved
    else:
        score = final_format_score
    return {
        "score": float(score),
        "acc": float(right),
        "format_valid": float(blocks is not None),
        "retrieved": float(retrieved),
        "pred": answer or "",
    }


def normalize(text: str) -> str:
    """Lower case, without ASCII punctuation and the articles a, an, the, words one space apart."""
    return " ".join(ARTICLE.sub(" ", text.lower().translate(PUNCTUATION)).split())


def matches(answer: str, golds: Sequence[str], method: str = "em") -> bool:
    """Whether an answer is right: it equals (em) or contains (sub_em) one of the gold answers, both normalised."""
    said = normalize(answer)
    for gold in golds:
        wanted = normalize(gold)
        if not wanted:
            found = answer.strip().lower() == gold.strip().lower() != ""
        else:
            found = said == wanted if method == "em" else wanted in said
        if found:
            return True
    return False


def holds(texts: Sequence[str], golds: Sequence[str]) -> bool:
    """Whether one of the texts contains one of the gold answers, both normalised."""
    wanted = [gold for gold in map(normalize, golds) if gold]
    return any(gold in text for text in map(normalize, texts) for gold in wanted)


def last_answer(text: str) -> str | None:
    """What stands in the last complete <answer>...</answer>, without outer white space, or None.

    A pair begins at the first <answer> after the pair before it.
    """
    answer, at = None, 0
    # A regex would search for the end of every <answer> anew, which takes quadratic time where none has one.
    while (start := text.find("<answer>", at)) >= 0 and (end := text.find("</answer>", start)) >= 0:
        answer, at = text[start + len("<answer>") : end].strip(), end + len("</answer>")
    return answer


def observations(segments: Sequence[Sequence[str]]) -> list[str] | None:
    """The texts that were retrieved, one for each search, where the trajectory's structure is valid; else None.

    Valid is: think, then any number of (search, observation, think), then answer; nothing but white space before, between and after;
    no tag inside a block of the model's. An observation is the tool's <information>...</information>, whatever stands inside; other
    words of the tool's, such as those after an action that is none, and the model's own <information> are not valid.

    Raises ValueError for segments that are no [who, text].
    """
    state, retrieved = "start", []
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
        elif text := text.strip():
            if not (
                state == "searched"
                and text.startswith("<information>")
                and text.endswith("</information>")
            ):
                return None
            state = "informed"
            retrieved.append(text.removeprefix("<information>").removesuffix("</information>"))
    return retrieved if state == "end" else None


def gold_answers(ground_truth: Any) -> list[str]:
    """A row's accepted answers, from {"target": answers} or the answers themselves: one text, or a list or array of them.

    Raises ValueError where there is none.
    """
    target: Any = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    if hasattr(target, "tolist"):  # numpy's, as some readers of parquet files give it
        target = target.tolist()
    golds = [target] if isinstance(target, str) else target
    if (
        not isinstance(golds, list | tuple)
        or not all(isinstance(gold, str) for gold in golds)
        or not any(map(str.strip, golds))
    ):
        raise ValueError(
            f'ground_truth={ground_truth!r:.200} has no answers: expected {{"target": [text, ...]}}'
        )
    return list(golds)
