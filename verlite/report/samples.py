"""A run's kept samples, shown in the terminal: who wrote what, what was trained, what tools answered, what it was worth."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Sample = dict[str, Any]
"""A line of rollouts/step_N.jsonl."""

STYLES = {"trained": "green", "not trained": "yellow", "tool": "cyan"}
"""How text is coloured: sampled tokens in the loss, sampled tokens kept out of it, and what tools wrote, which is never trained."""
LONGEST_PROMPT = 600
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that a terminal would obey; models and passages write them too."""


def read_samples(
    run_dir: Path, step: int | None, validation: bool = False
) -> tuple[Path, list[Sample]]:
    """The samples of a step, in the order in which they were made; None: of the newest step that has any.

    Raises:
        ValueError: there are none, or the file cannot be read; the message says which steps there are.
    """
    start = "val_step_" if validation else "step_"
    files = [
        path.stem.removeprefix(start) for path in (run_dir / "rollouts").glob(f"{start}*.jsonl")
    ]
    steps = sorted(int(name) for name in files if name.isdecimal())
    if not steps:
        raise ValueError(
            f"{run_dir / 'rollouts'} has no {start}N.jsonl: is it a run directory, with trainer.rollouts_per_step above 0?"
        )
    if step is None:
        step = steps[-1]
    if step not in steps:
        raise ValueError(
            f"{run_dir} has no samples of step {step}; there are steps {', '.join(map(str, steps[-20:]))}"
        )
    path = run_dir / "rollouts" / f"{start}{step}.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").split(
            "\n"
        )  # and at no other line separator, which a model may have written
        return path, [json.loads(line) for line in lines if line]
    except ValueError as error:
        raise ValueError(f"{path} is not whole: {error}") from error


def worst(samples: Sequence[Sample], count: int) -> list[Sample]:
    """The samples with the lowest scores, the lowest first; those without a score, which failed, come before all."""
    return sorted(
        samples, key=lambda sample: (sample["score"] is not None, sample["score"] or 0.0)
    )[:count]


def legend() -> Text:
    """What the colours mean."""
    text = Text("colours: ", style="dim")
    for name, style in STYLES.items():
        text.append(f"{name} ", style=style)
    return text


def picture(sample: Sample, whole_prompt: bool = False) -> RenderableType:
    """One sample: a head line, the prompt, and every turn."""
    prompt = sample["prompt"].strip()
    if len(prompt) > LONGEST_PROMPT and not whole_prompt:
        prompt = f"… {prompt[-LONGEST_PROMPT:]}"
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right", style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("prompt", Text(_shown(prompt)))
    infos, turn = list(sample.get("turn_infos") or []), 0
    trained = sample.get("trained_tokens", 1) > 0
    for who, text in sample.get("transcript") or [["model", sample["response"]]]:
        if who == "model":
            turn += 1
            grid.add_row(
                f"turn {turn}",
                Text(_shown(text), style=STYLES["trained" if trained else "not trained"]),
            )
        else:
            grid.add_row(
                _call(infos[turn - 1] if turn <= len(infos) else {}),
                Text(_shown(text.strip("\n")), style=STYLES["tool"]),
            )
    if sample.get("error"):
        grid.add_row("error", Text(_shown(str(sample["error"])), style="red"))
    grid.add_row("expected", Text(_shown(_plain(sample["ground_truth"]))))
    return Group(_head(sample), grid, Text())


def _head(sample: Sample) -> Text:
    score = sample["score"]
    style = "bold red" if score is None else "bold green" if score > 0 else "bold yellow"
    text = Text("no score" if score is None else f"score {score:g}", style=style)
    parts = [
        f"{name} {value:g}" if isinstance(value, (int, float)) else f"{name} {value!r}"
        for name, value in sample["reward_parts"].items()
    ]
    searches = sum(bool(info.get("called")) for info in sample.get("turn_infos") or [])
    words = [
        *parts,
        f"status {sample['status']}",
        sample["data_source"],
        f"prompt {sample['index']}",
    ]
    words += [f"{searches} tool call{'s' * (searches != 1)}"] if "turn_infos" in sample else []
    tokens = f"{sample['response_tokens']} tokens"
    words += [
        f"{tokens}, {sample['trained_tokens']} trained" if "trained_tokens" in sample else tokens
    ]
    return text.append("  " + "  ".join(words), style="dim")


def _call(info: dict[str, Any]) -> str:
    """What is known of the call that a tool's text answers."""
    words = [str(info.get("action", "tool"))]
    words += [f"{info['seconds']:.2f} s"] if "seconds" in info else []
    words += ["cached"] if info.get("cached") else []
    words += [f"{info['retries']} retries"] if info.get("retries") else []
    return "\n".join(words)


def _plain(truth: Any) -> str:
    target = truth.get("target", truth) if isinstance(truth, dict) else truth
    return " | ".join(map(str, target)) if isinstance(target, list) else str(target)


def _shown(text: str) -> str:
    """Control characters as visible escapes."""
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
