"""How a run ended."""

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Result:
    """How a run ended, and where its files are."""

    run_dir: Path
    state: str
    """"finished", or "stopped": by SIGTERM, SIGUSR1 or trainer.max_runtime. The same call then
    resumes from the checkpoint."""
    exit_code: int
    """The exit code that the command would have (docs/failures.md)."""

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of each step, from metrics.jsonl. Steps before a resume are included."""
        from verlite.trainer.tracking import METRICS, read_lines

        return read_lines(self.run_dir / METRICS)

    def history(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) of one metric for each step that has it.

        Raises:
            KeyError: no step has it. The message lists similar names.
        """
        lines = self.metrics
        found = [(line["step"], line[name]) for line in lines if name in line]
        if not found:
            known = sorted({key for line in lines for key in line})
            close = get_close_matches(name, known, n=5, cutoff=0.4)
            raise KeyError(
                f"{name}: no step has this metric. Similar: {', '.join(close) or 'none'}"
            )
        return found

    @property
    def step(self) -> int:
        """The last finished step."""
        lines = self.metrics
        return int(lines[-1]["step"]) if lines else 0

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint. None if none was saved."""
        from verlite.trainer.checkpoints import last_saved

        step = last_saved(self.run_dir)
        return None if step is None else self.run_dir / f"global_step_{step}"

    @property
    def model(self) -> Path | None:
        """The Hugging Face folder of the trained model. None if none was written."""
        folder = self.run_dir / "huggingface"
        return folder if folder.is_dir() else None
