"""Show the samples that a run saved, in the terminal.

The text's color tells what the model sampled, what was trained on, and what tools answered.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from verlite.control.flow import State
from verlite.files import one_line, read_json, read_json_lines
from verlite.terminal import clean
from verlite.trainer.checkpoints import PREFIX, STATE, last_saved

Sample = dict[str, Any]
"""A line of rollouts/step_N.jsonl."""

STYLES = {"trained": "green", "not trained": "yellow", "tool": "cyan"}
"""Text colors: sampled and in the loss; sampled but excluded from the loss; written by a tool."""
MAX_PROMPT_CHARS = 600


def read_samples(
    run_dir: Path, step: int | None, validation: bool = False
) -> tuple[Path, list[Sample], int]:
    """Return the file, the samples of a step in file order, and the number of unreadable lines.
    step=None: the newest saved step.

    Raises:
        ValueError: there are no samples of this step, or the file cannot be read. The message
            lists the available steps.
    """
    if run_dir.is_file():
        raise ValueError(f"{run_dir} is a file. Give a run directory.")
    prefix = "val_step_" if validation else "step_"
    names = [
        path.stem.removeprefix(prefix) for path in (run_dir / "rollouts").glob(f"{prefix}*.jsonl")
    ]
    steps = sorted(int(name) for name in names if name.isdecimal())
    if not steps:
        raise ValueError(
            f"{run_dir / 'rollouts'} has no {prefix}N.jsonl. Give the directory of a run "
            + (
                "that has validated (data.val_files)."
                if validation
                else "with trainer.rollouts_per_step above 0, or of main_sft after its first step."
            )
        )
    if step is None:
        step = steps[-1]
    if step not in steps:
        available = ", ".join(map(str, steps[-20:]))
        raise ValueError(f"{run_dir} has no samples of step {step}. Available steps: {available}")
    path = run_dir / "rollouts" / f"{prefix}{step}.jsonl"
    try:
        objects, unreadable = read_json_lines(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    samples = [one for one in objects if type(one.get("score")) in (int, float, type(None))]
    lines = len(objects) + unreadable
    if lines and not samples:
        raise ValueError(f"{path} is damaged: none of its {lines} lines can be read")
    return path, samples, lines - len(samples)


STATE_WORDS = {
    State.TRAINED: "trained",
    State.READY: "finished and waiting",
    State.RUNNING: "running",
    State.QUEUED: "queued",
    State.FILTERED: "filtered",
}


def drawn_prompts(run_dir: Path) -> str:
    """Return a line about the prompts of the newest checkpoint of an asynchronous run: how many are
    drawn, and what became of them. "" if there is none, or it is one of trainer.mode=sync.

    Raises:
        ValueError: the checkpoint's state cannot be read, or does not account for each prompt.
    """
    try:
        step = last_saved(run_dir)
        if step is None:
            return ""
        name = f"{PREFIX}{step}"
        state = read_json(run_dir / name / STATE)
        if "groups" not in state:
            return ""
        flow = state["groups"]["flow"]
        alive = Counter(State(group[1]) for group in flow["groups"])
        counts = {s: alive[s] + flow["gone"].get(s, 0) for s in STATE_WORDS}
        is_whole = all(type(n) is int and n >= 0 for n in (flow["next"], *counts.values()))
        if not is_whole or sum(counts.values()) != flow["next"]:
            raise ValueError("each prompt that is drawn must have one state")
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        cause = one_line(f"{type(error).__name__}: {error}")
        raise ValueError(f"{STATE} of the newest checkpoint cannot be read: {cause}") from error
    parts = [f"{counts[s]} {words}" for s, words in STATE_WORDS.items() if counts[s]]
    return f"{name}: {flow['next']} prompts drawn: {', '.join(parts)}"


def lowest_scores(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Return the `count` lowest-scoring samples, lowest first. Failed samples come before all."""

    def order(sample: Sample) -> tuple[bool, float]:
        score = sample["score"]
        return score is not None, score or 0.0

    return sorted(samples, key=order)[:count]


def legend() -> Text:
    """Return the meaning of the colors."""
    text = Text("colors: ", style="dim")
    for name, style in STYLES.items():
        text.append(f"{name} ", style=style)
    return text


def render(sample: Sample, whole_prompt: bool = False) -> RenderableType:
    """Return one sample for the terminal: a summary line, the prompt, and every turn."""
    prompt = sample["prompt"].strip()
    if len(prompt) > MAX_PROMPT_CHARS and not whole_prompt:
        prompt = f"… {prompt[-MAX_PROMPT_CHARS:]}"
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right", style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    requests = list(sample.get("requests") or [])
    if any(request["branch"] for request in requests):
        grid.add_row("requests", _graph(requests))
    grid.add_row("prompt", Text(clean(prompt)))
    infos = list(sample.get("turn_infos") or [])
    is_trained = sample.get("trained_tokens", 1) > 0
    model_style = STYLES["trained" if is_trained else "not trained"]
    turn = 0
    for author, text in sample.get("transcript") or [["model", sample["response"]]]:
        if author == "model":
            turn += 1
            grid.add_row(_turn(turn, infos), Text(clean(text), style=model_style))
        elif (
            turn < len(requests) and requests[turn]["branch"] > requests[max(turn, 1) - 1]["branch"]
        ):
            name = f"branch {requests[turn]['branch'] + 1}"
            grid.add_row(name, Text(clean(text.strip("\n")), style=STYLES["tool"]))
        else:
            info = infos[turn - 1] if turn <= len(infos) else {}
            result = Text(clean(text.strip("\n")), style=STYLES["tool"])
            grid.add_row(Text(clean(_tool_call(info))), result)
    if sample.get("agent_log"):
        grid.add_row("log", Text(clean(sample["agent_log"].strip()), style="dim"))
    if sample.get("error"):
        grid.add_row("error", Text(clean(str(sample["error"])), style="red"))
    expected = _answer(sample["ground_truth"])
    if expected:
        grid.add_row("expected", Text(clean(expected)))
    return Group(_summary(sample), grid, Text())


def _graph(requests: Sequence[dict[str, Any]]) -> Tree:
    """Return the requests of an agent program: under each those that continue it."""
    root = Tree("", hide_root=True)
    nodes: dict[int | None, Tree] = {None: root}
    for turn, request in enumerate(requests, start=1):
        words = [f"turn {turn}:", f"{request['given']} given, {request['sampled']} sampled"]
        if request["root"] not in (None, "first"):
            words.insert(1, f"{request['root']} conversation,")
        if request["credit"] != 1:
            words.append(f"x {request['credit']:.3g}")
        parent = nodes.get(request["parent"], root)
        nodes[request["request"]] = parent.add(Text(" ".join(words)))
    return root


def _turn(turn: int, infos: Sequence[dict[str, Any]]) -> str:
    """Return the label of a turn, with the reward that the environment gave for it."""
    reward = infos[turn - 1].get("reward") if turn <= len(infos) else None
    return f"turn {turn}" if reward is None else f"turn {turn} ({reward:+g})"


def _summary(sample: Sample) -> Text:
    """Return the sample's score, reward parts, status, source and size on one line."""
    fields = []
    for name, value in sample["reward_parts"].items():
        shown = f"{value:g}" if isinstance(value, int | float) else repr(value)
        fields.append(f"{name} {shown}")
    fields.append(f"status {sample['status']}")
    fields.append(sample["data_source"])
    fields.append(f"prompt #{sample['index']}")
    requests = len(sample.get("requests") or [])
    if requests:  # of a program, whose tools are unknown here
        fields.append(f"{requests} request{'s' * (requests != 1)}")
    elif "turn_infos" in sample:
        calls = sum(bool(info.get("called")) for info in sample["turn_infos"] or [])
        fields.append(f"{calls} tool call{'s' * (calls != 1)}")
    tokens = f"{sample['response_tokens']} tokens"
    if "trained_tokens" in sample:
        tokens += f", {sample['trained_tokens']} trained"
    fields.append(tokens)
    return _score(sample["score"]).append(clean("  " + "  ".join(fields)), style="dim")


def _score(score: float | None) -> Text:
    if score is None:
        return Text("no score", style="bold red")
    return Text(f"score {score:g}", style="bold green" if score > 0 else "bold yellow")


def _tool_call(info: dict[str, Any]) -> str:
    """Return the action, duration and retries of a tool call, one per line."""
    words = [str(info.get("action", "tool"))]
    if "seconds" in info:
        words.append(f"{info['seconds']:.2f} s")
    if info.get("cached"):
        words.append("cached")
    if info.get("retries"):
        words.append(f"{info['retries']} retries")
    return "\n".join(words)


def _answer(truth: Any) -> str:
    target = truth.get("target", truth) if isinstance(truth, dict) else truth
    return " | ".join(map(str, target)) if isinstance(target, list) else str(target)
