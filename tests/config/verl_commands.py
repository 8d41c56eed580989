"""Published command lines of verl, verl-recipe and Search-R1, and what verlite says about each.

    python -m tests.config.verl_commands

prints how many are accepted, how many of these with notes, and how many are refused for which
cause. The samples have keys and values: a comment with the origin, one with what happens, and the
overrides. Paths are placeholders; names of projects and runs are left out.
"""

import json
import shlex
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verlite.config import ConfigError
from verlite.config.commands import PPO, SFT, Command
from verlite.config.load import compose, parse_argv
from verlite.config.problems import Note

SAMPLES = Path(__file__).parents[1] / "samples" / "guides"
FILES = {"verl.txt": PPO, "verl_sft.txt": SFT}
MODEL = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "num_hidden_layers": 2,
    "num_attention_heads": 56,
    "num_key_value_heads": 8,
    "intermediate_size": 1024,
    "max_position_embeddings": 131072,
}


@dataclass(frozen=True)
class Published:
    """One command line of a sample."""

    origin: str
    verdict: str
    line: str
    command: Command

    def judge(self, folder: Path) -> tuple[str, list[Note]]:
        """Return "accepted" or "refused: KEY, KEY", and the notes of an accepted command.

        Args:
            folder: a folder of `material`.
        """
        line = self.line
        for name, path in {
            "$MODEL": folder,
            "$DATA": folder / "missing.parquet",
            "$REWARD": folder / "reward.py",
            "$RUN": folder / "run",
            "$DIR": folder,
        }.items():
            line = line.replace(name, str(path))
        name, config_dir, overrides, _ = parse_argv(shlex.split(line))
        if not any("trainer.device=" in override for override in overrides):
            overrides.append("trainer.device=cuda")
        try:
            loaded: Any = compose(name, overrides, config_dir, True, True, self.command)
        except ConfigError as error:
            keys = sorted({problem.key for problem in error.problems})
            return f"refused: {', '.join(keys)}", []
        return "accepted", loaded.notes


def material(folder: Path) -> Path:
    """Write the model and the reward function that the commands name."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    (folder / "reward.py").write_text("def compute_score(*args, **kwargs): ...\n")
    return folder


def published() -> Iterator[Published]:
    """Yield the command lines of all samples."""
    for file, command in FILES.items():
        text = (SAMPLES / file).read_text(encoding="utf-8").strip()
        for block in text.split("\n\n"):
            origin, verdict, line = block.splitlines()
            yield Published(origin.removeprefix("# "), verdict.removeprefix("# "), line, command)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = material(Path(name))
        for file, command in FILES.items():
            verdicts = [one.judge(folder) for one in published() if one.command is command]
            accepted = [notes for verdict, notes in verdicts if verdict == "accepted"]
            silent = sum(not notes for notes in accepted)
            print(f"{file}: {len(verdicts)} commands, {len(accepted)} accepted ({silent} silently)")
            refused = [verdict for verdict, _ in verdicts if verdict != "accepted"]
            causes = Counter(
                key for verdict in refused for key in verdict.removeprefix("refused: ").split(", ")
            )
            for key, count in causes.most_common():
                print(f"  {count:>3} refused: {key}")


if __name__ == "__main__":
    main()
