"""The order in which prompts are used: a pure function of (seed, epoch), so that its state is a few values in a JSON file."""

import numpy as np

from verlite.data.dataset import DataError


class PromptSampler:
    """Endless batches of row indices, epoch after epoch.

    Each epoch is its own permutation of the rows, drawn from (seed, epoch); rows that do not fill a batch at the end of
    an epoch are left out of it. `state_dict()` after batch k, loaded anywhere, continues with batch k+1, also when
    batch k was the last of its epoch.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        seed: int = 42,
        shuffle: bool = True,
        key: str = "data.train_batch_size",
    ) -> None:
        """key: what batch_size is called, for messages."""
        if batch_size < 1:
            raise ValueError(f"{key}={batch_size} must be at least 1")
        if size < batch_size:
            raise DataError(
                f"{key}={batch_size} is more than the {size} training prompts that are left: not one full batch. "
                f"Use at most {size}, or drop fewer prompts (data.max_prompt_length, data.filter_overlong_prompts)"
            )
        self.size, self.batch_size, self.seed, self.shuffle = size, batch_size, seed, shuffle
        self.epoch = 0
        """Epoch of the batch that was returned last, from 0."""
        self.position = 0
        """Rows of this epoch that were used."""
        self._order = self._permutation()

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in one pass over the rows."""
        return self.size // self.batch_size

    def next_batch(self) -> list[int]:
        """The next `batch_size` row indices."""
        if self.position + self.batch_size > self.size:
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._permutation()
        batch = self._order[self.position : self.position + self.batch_size]
        self.position += self.batch_size
        return batch.tolist()

    def state_dict(self) -> dict[str, int]:
        """Where the sampler stands, as JSON values: seed, shuffle, epoch, position, size."""
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self.epoch,
            "position": self.position,
            "size": self.size,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where `state` was taken. Raises ValueError when it belongs to other data or another order."""
        if set(state) != set(self.state_dict()):
            raise ValueError(
                f"sampler state has the entries {sorted(state)}, expected {sorted(self.state_dict())}"
            )
        if state["size"] != self.size:
            raise DataError(
                f"the checkpoint's sampler counted {state['size']} training prompts, data.train_files now has {self.size}: "
                "resume with the same data, or start anew with trainer.resume_mode=disable"
            )
        for key in ("seed", "shuffle"):
            if state[key] != getattr(self, key):
                raise ValueError(
                    f"the checkpoint was made with data.{key}={state[key]}, but now data.{key}={getattr(self, key)}"
                )
        if not (0 <= state["position"] <= self.size and state["epoch"] >= 0):
            raise ValueError(
                f"sampler state epoch={state['epoch']}, position={state['position']} is impossible with {self.size} prompts"
            )
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._permutation()

    def _permutation(self) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.size)
        return np.random.default_rng([self.seed, self.epoch]).permutation(self.size)
