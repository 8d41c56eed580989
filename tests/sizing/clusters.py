"""The table of simulated clusters on docs/plan.md. `python -m tests.sizing.clusters` writes it."""

import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from typer.testing import CliRunner

from tests.sizing.conftest import config_folder
from verlite.cli import app

PAGE = Path(__file__).parents[2] / "docs" / "plan.md"
MARKED = re.compile(r"(<!-- clusters -->\n).*?(<!-- until here -->\n)", re.DOTALL)
PROMPTS = {8: 16, 64: 128, 512: 512, 1024: 512}
"""GPUs -> data.train_batch_size."""
SHOWN = (("sync", 1), ("async", 1), ("async", 4))
"""Mode and max_age."""
HEAD = ("GPUs", "prompts", "mode", "engines + trainer", "step", "speed", "waits", "tokens/s/GPU",
        "engines busy", "trainer busy", "mean age", "max age")  # fmt: skip


def command(gpus: int) -> list[str]:
    """Return the command, but for the model."""
    return [
        *("simulate", "--config-name", "grpo", "--devices", "8xH100-80GB", "--steps", "8"),
        *("--response-length", "p50=2000 p99=16000", "--prompt-length", "512"),
        "data.train_files=gsm8k/train.parquet",
        "data.max_response_length=16384",
        f"data.train_batch_size={PROMPTS[gpus]}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS[gpus]}",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.n=16",
        "trainer.n_gpus_per_node=8",
        f"trainer.nnodes={gpus // 8}",
    ]


def lines(gpus: int) -> list[str]:
    """Return the table's lines of one cluster."""
    with tempfile.TemporaryDirectory() as folder:
        model = config_folder(Path(folder), "qwen2.5-7b")
        line = [*command(gpus), f"actor_rollout_ref.model.path={model}", "--json"]
        done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.output)["rows"]
    found = []
    for row in rows:
        settings = row["settings"]
        if (settings["mode"], settings["max_age"]) not in SHOWN:
            continue
        is_async = settings["mode"] == "async"
        depth = f", max_age {settings['max_age']}, depth {settings['depth']}" if is_async else ""
        split = f"{settings['engines']} + {settings['trainer_devices']}"
        cells = (
            f"{gpus:,}",
            str(settings["prompts"]),
            settings["mode"] + depth,
            split if is_async else f"{settings['engines']} on the same",
            f"{row['timing_s/step']:.0f} s",
            f"{rows[0]['timing_s/step'] / row['timing_s/step']:.2f}",
            f"{row['timing_s/gen'] / row['timing_s/step']:.0%}",
            f"{row['perf/throughput']:,.0f}",
            f"{row['utilization/engines']:.0%}",
            f"{row['utilization/trainer']:.0%}",
            f"{row['async/age/mean']:.1f}",
            f"{row['async/age/max']:.0f}",
        )
        found.append(markdown(cells))
    return found


def markdown(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    table = [markdown(HEAD), markdown(["---"] * len(HEAD))]
    for gpus in PROMPTS:
        table += lines(gpus)
    text = "\n".join(table)
    page = PAGE.read_text(encoding="utf-8")
    renewed = MARKED.sub(lambda mark: f"{mark[1]}\n{text}\n\n{mark[2]}", page)
    PAGE.write_text(renewed, encoding="utf-8")


if __name__ == "__main__":
    main()
