"""The plans that docs/plan.md shows. `python -m tests.sizing.plans` writes them."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

from tests.config.conftest import write_prompts
from tests.config.test_guides import arguments
from tests.sizing.conftest import config_folder

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "plan.md"
MARKED = re.compile(r"(<!-- plan of ([^:\n]+): ([^\n]+) -->\n```\n).*?(```\n)", re.DOTALL)
"""A name of COMMANDS, and the beginnings of what is shown, "all" or divided by ";"."""
SMALL = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}
"""DeepSeek-R1-Distill-Qwen-1.5B: Qwen2.5-1.5B with an output head of its own."""

AS_TERMINAL = {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "0", "COLUMNS": "100", "NO_COLOR": "1"}
"""What makes rich print tables of this width into a pipe."""


def command(name: str, folder: Path) -> list[str]:
    """Return the arguments of `verlite plan` of a command of the page, and write its model."""
    if name.startswith("recipes/math"):
        small = config_folder(folder / "models/R1-Distill-Qwen-1.5B", "qwen2.5-7b", **SMALL)
        config = name.split("/")[-1]
        path = f"actor_rollout_ref.model.path={small.relative_to(folder)}"
        return ["--config-path", str(ROOT / "recipes/math/config"), "--config-name", config, path]
    model = config_folder(folder / "models/Qwen2.5-7B", "qwen2.5-7b").relative_to(folder)
    for data in ("train.parquet", "test.parquet"):
        write_prompts(folder / data, 1024)
    given = arguments(name, SimpleNamespace(folder=folder), 2, 8)
    changes = {
        "actor_rollout_ref.model.path": model,
        "critic.model.path": model,
        "trainer.default_local_dir": "verl_checkpoints/x",
    }
    return [f"{k}={changes.get(k, v)}" for k, _, v in (x.partition("=") for x in given)]


def printed(name: str) -> str:
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        line = ["plan", "--devices", "8xH100-80GB", "--no-cache", *command(name, folder)]
        done = subprocess.run(
            [sys.executable, "-m", "verlite", *line],
            cwd=folder, env=os.environ | AS_TERMINAL | {"PYTHONPATH": str(ROOT)},
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode or "cannot be shown" in done.stdout:
            raise SystemExit(f"{name}: {done.stdout}{done.stderr}")
        plain = re.sub(r"\x1b\[[\d;]*m", "", done.stdout)
        return re.sub(r"[ \t]+\n", "\n", plain).replace(f"{folder}/", "")


def shown(text: str, beginnings: str) -> str:
    """Return the tables and sentences with these beginnings."""
    if beginnings == "all":
        return text
    parts = re.split(r"\n(?=[^\n┏┡│└┌├┃])", text.strip())
    wanted = tuple(beginnings.split(";"))
    return "".join(f"{part}\n" for part in parts if part.startswith(wanted))


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    known = {name: printed(name) for name in dict.fromkeys(m[2] for m in MARKED.finditer(text))}
    page = MARKED.sub(lambda m: m[1] + shown(known[m[2]], m[3]) + m[4], text)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
