"""Write results.json (the latest measurement of each part, with its date, and summary figures) and
the page that shows it."""

import json
import re
import time
from pathlib import Path
from typing import Any

from tables import tables

RESULTS = Path(__file__).resolve().parent / "results.json"


def keep(part: str, measured: dict[str, Any], path: Path = RESULTS) -> None:
    """Store one part's results and update the summary figures."""
    parts = read(path).get("parts", {}) | {part: {"date": time.strftime("%Y-%m-%d"), **measured}}
    results = {**summary(parts), "parts": parts}
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def read(path: Path = RESULTS) -> dict[str, Any]:
    """Return the file's content; empty if it does not exist."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


KEYS: dict[str, tuple[str, ...]] = {
    "grpo_step_vs_trl": ("step_w25", "vs_trl"),
    "grpo_step_vs_floor": ("step_w25", "vs_floor"),
    "tiny_step_vs_trl": ("step_wtiny", "vs_trl"),
    "training_vs_bare": ("training", "update_speed_vs_bare"),
    "agent_branches_vs_flat": ("trees", "workloads", "w25g", "update", "vs_flat"),
    "sft_vs_trl": ("sft", "ratios", "trl"),
    "sft_vs_loop": ("sft", "ratios", "loop"),
    "generation_vs_vllm": ("generation_w25", "vs_vllm"),
    "server_vs_engine": ("server_w25", "server_vs_engine"),
    "gateway_vs_engine": ("gateway_vllm", "vs_engine"),
    "weight_sync_vs_memcpy": ("sync", "syncs", "w25, vllm", "vs_memcpy"),
    "weight_sync_vs_memcpy_hf": ("sync", "syncs", "w25, hf", "vs_memcpy"),
    "fingerprint_share": ("sync", "syncs", "w25, vllm", "fingerprint_share"),
    "fingerprint_share_hf": ("sync", "syncs", "w25, hf", "fingerprint_share"),
    "dispatch_overhead_64_workers": ("controller", "dispatch_overhead_64"),
    "driver_bytes_per_sample": ("controller", "driver_bytes_per_sample"),
    "seconds_to_first_step_hf": ("startup", "hf", "seconds"),
    "seconds_to_first_step_vllm": ("startup", "vllm", "seconds"),
    "watchers_of_step": ("watchers", "of_seconds"),
    "watchers_of_cpu": ("watchers", "of_cpu"),
    "preprocess_rows_per_s": ("data", "preprocess_rows_per_s"),
    "load_rows_per_s": ("data", "load_rows_per_s"),
    "retriever_queries_per_s": ("retriever", "queries_per_s"),
    "gpu_update_mfu": ("gpu_1.5b", "rows", "update", "mfu"),
    "gpu_log_probs_mfu": ("gpu_1.5b", "rows", "log-probs", "mfu"),
}
"""Path of each summary figure among the parts."""


def summary(parts: dict[str, Any]) -> dict[str, float]:
    """Return the summary figures that were measured."""
    found = {}
    for key, path in KEYS.items():
        value: Any = parts
        for name in path:
            value = value.get(name) if value else None
        if value is not None:
            found[key] = value
    return found


PAGE = RESULTS.parents[2] / "docs" / "benchmarks.md"
MARKED = re.compile(
    r"(<!-- (\w+), written by recipes/benchmark/report\.py -->\n).*?(<!-- until here -->\n)",
    re.DOTALL,
)


def renew(page: str, results: dict[str, Any]) -> str:
    """Return the page with new tables between its marks."""
    made = tables(results)

    def filled(mark: re.Match[str]) -> str:
        shown = made.get(mark[2], "Not measured.\n")
        return f"{mark[1]}\n{shown}\n{mark[3]}"

    return MARKED.sub(filled, page)


if __name__ == "__main__":
    PAGE.write_text(renew(PAGE.read_text(encoding="utf-8"), read()), encoding="utf-8")
