"""results.json: what was measured last, part by part, with the day; and the keys that sum it up."""

import json
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results.json"


def keep(part: str, measured: dict[str, Any]) -> None:
    """Put one part's results into the file, and renew the keys taken from it."""
    results = read()
    results.setdefault("parts", {})[part] = {"date": time.strftime("%Y-%m-%d"), **measured}
    results["summary"] = summary(results["parts"])
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def read() -> dict[str, Any]:
    """The file's content; empty where there is none."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


KEYS = {
    "grpo_step_vs_trl": ("step_w25", "vs_trl"),
    "grpo_step_vs_floor": ("step_w25", "vs_floor"),
    "tiny_step_vs_trl": ("step_wtiny", "vs_trl"),
    "training_vs_bare": ("training", "update_speed_vs_bare"),
}


def summary(parts: dict[str, Any]) -> dict[str, float]:
    """Of each key that was measured, its figure."""
    return {key: parts[part][name] for key, (part, name) in KEYS.items() if part in parts}


PAGE = RESULTS.parents[2] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- written by recipes/benchmark/report.py -->\n", "<!-- until here -->\n"


def tables(results: dict[str, Any]) -> str:
    """Markdown of everything that was measured."""
    parts = results["parts"]
    text = "| whole steps | verlite | TRL | ratio | ratio by token | floor | times the floor |\n|---|---|---|---|---|---|---|\n"
    for part in ("step_w25", "step_wtiny"):
        if step := parts.get(part):
            text += (
                f"| {part.removeprefix('step_')}, engine {step['engine']}, {step['rounds']} x {step['steps_per_round']} steps "
                f"| {step['seconds']:.2f} s | {step['trl_seconds']:.2f} s | {step['vs_trl']:.2f} | {step['vs_trl_per_token']:.2f} "
                f"| {step['floor_seconds']:.2f} s | {step['vs_floor']:.2f} |\n"
            )
    text += "\n| where a step's time goes | " + " | ".join(_STAGES) + " |\n|---|" + "---|" * len(_STAGES) + "\n"
    for part in ("step_w25", "step_wtiny"):
        if step := parts.get(part):
            shares = [f"{step['stages'][stage]:.2f} s ({step['stages'][stage] / step['seconds']:.0%})" for stage in _STAGES]
            text += f"| {part.removeprefix('step_')} | " + " | ".join(shares) + " |\n"
    text += "\n| from the process's start to the end of the first step | verlite | TRL |\n|---|---|---|\n"
    for part in ("step_w25", "step_wtiny"):
        if step := parts.get(part):
            first, theirs = step["seconds_to_first_step"], step["trl_seconds_to_first_step"]
            text += f"| {part.removeprefix('step_')}, engine {step['engine']} | {first:.0f} s | {theirs:.0f} s |\n"
    if training := parts.get("training"):
        text += "\n| the training engine alone, w25 | verlite | bare loop | verlite's speed over the bare loop's | times the floor |\n"
        text += "|---|---|---|---|---|\n"
        for name, what in (("update", "one update"), ("log_prob", "one pass for log-probs")):
            text += (
                f"| {what} | {training[f'{name}_seconds']:.2f} s | {training[f'bare_{name}_seconds']:.2f} s "
                f"| {training[f'{name}_speed_vs_bare']:.2f} | {training[f'{name}_vs_floor']:.2f} |\n"
            )
    if library := parts.get("library"):
        text += "\n| functions, in one process | milliseconds |\n|---|---|\n"
        text += "".join(f"| {name} | {found:.1f} |\n" for name, found in library["milliseconds"].items())
    return text


_STAGES = ("gen", "reward", "adv", "update_actor", "update_weights")


def renew(page: str, results: dict[str, Any]) -> str:
    """The page with new tables between its two marks."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + "\n" + tables(results) + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(renew(PAGE.read_text(encoding="utf-8"), read()), encoding="utf-8")
