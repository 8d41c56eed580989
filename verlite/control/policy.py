"""What a run wants: how many steps, and when to validate and to save."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """What a run wants. Frequencies count steps; one that is not positive means never."""

    total_steps: int = 0
    test_freq: int = 0
    """0 without data to validate on."""
    save_freq: int = 0
    validates_first: bool = False
    """Before step 1 of a run that starts from the beginning, and with `val_only`."""
    validates_last: bool = False
    """After the last step, whatever `test_freq` says."""
    val_only: bool = False
    gives_up: bool = True
    """Whether a stop gives up what can be repeated. False for ranks that work together without a
    driver (SFT, DPO): a stop is obeyed between steps, when all of them know of it."""
    exports: bool = True
    """Whether the model is exported at the end."""
    max_restarts: int = 0
    """Rollout engines that are started again in one step."""
    max_failed_saves: int = 3
    """Failed saves in a row that end the run."""
    failed_saves_key: str = ""
    """The key of `max_failed_saves` with "=", for messages. Empty if there is none."""
    stop_grace_s: float = 30.0
    """How long the first signal waits for a save before a message says that it waits, and how long
    a second signal waits."""
    max_runtime: str | None = None
    """trainer.max_runtime as the user wrote it."""
    deadline: float | None = None
    """When the process must have ended, on the clock of `now`. None: no limit."""

    def validates(self, step: int) -> bool:
        """Whether a validation follows this step."""
        last = self.validates_last and step >= self.total_steps
        return last or is_due(self.test_freq, step, self.total_steps)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint follows this step."""
        return is_due(self.save_freq, step, self.total_steps)


def is_due(frequency: int, step: int, total_steps: int) -> bool:
    """Whether something that happens every `frequency` steps and after the last is due now.

    Never if `frequency` is not positive.
    """
    return frequency > 0 and (step >= total_steps or step % frequency == 0)
