"""The order in which prompts are used. It depends only on (seed, epoch), so its state is a few JSON
values.
"""

import numpy as np

from verlite.data.dataset import DataError


class PromptSampler:
    """An endless sequence of batches of row indices.

    Each epoch uses its own permutation of the rows, drawn from (seed, epoch). Rows that do not fill
    a batch at the end of an epoch are skipped. Loading the `state_dict()` taken after batch k
    continues with batch k+1, even if batch k was the last of its epoch.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        seed: int = 42,
        shuffle: bool = True,
        key: str = "data.train_batch_size",
    ) -> None:
        """Create a sampler over `size` rows. `key` is the name of batch_size in messages."""
        if batch_size < 1:
            raise ValueError(f"{key}={batch_size} must be at least 1")
        if size < batch_size:
            raise DataError(
                f"{key}={batch_size} is more than the {size} training prompts that are left: "
                f"not one full batch. Use at most {size}, or drop fewer prompts "
                "(data.max_prompt_length, data.filter_overlong_prompts)"
            )
        self.size = size
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        """Epoch of the last batch, from 0."""
        self.position = 0
        """Number of rows of this epoch that were used."""
        self._order = self._permutation()

    @property
    def steps_per_epoch(self) -> int:
        """Number of full batches in one pass over the rows."""
        return self.size // self.batch_size

    def next_batch(self) -> list[int]:
        """Return the next `batch_size` row indices."""
        if self.position + self.batch_size > self.size:
            self.epoch += 1
            self.position = 0
            self._order = self._permutation()
        batch = self._order[self.position : self.position + self.batch_size]
        self.position += self.batch_size
        rows: list[int] = batch.tolist()
        return rows

    def state_dict(self) -> dict[str, int]:
        """Return the state as JSON values: seed, shuffle, epoch, position, size."""
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self.epoch,
            "position": self.position,
            "size": self.size,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a state.

        Raises:
            DataError: the number of training prompts has changed.
            ValueError: the state belongs to another order, or is invalid.
        """
        if set(state) != set(self.state_dict()):
            raise ValueError(
                f"sampler state has the entries {sorted(state)}, "
                f"expected {sorted(self.state_dict())}"
            )
        if not all(isinstance(value, int) for value in state.values()):
            raise ValueError(f"sampler state has values that are not whole numbers: {state}")
        if state["size"] != self.size:
            raise DataError(
                f"the checkpoint's sampler counted {state['size']} training prompts, "
                f"data.train_files now has {self.size}: resume with the same data, "
                "or start again with trainer.resume_mode=disable"
            )
        for key in ("seed", "shuffle"):
            if state[key] != getattr(self, key):
                raise ValueError(
                    f"the checkpoint was written with data.{key}={state[key]}, "
                    f"but now data.{key}={getattr(self, key)}"
                )
        if not (0 <= state["position"] <= self.size and state["epoch"] >= 0):
            raise ValueError(
                f"sampler state epoch={state['epoch']}, position={state['position']} "
                f"is impossible with {self.size} prompts"
            )
        self.epoch = state["epoch"]
        self.position = state["position"]
        self._order = self._permutation()

    def _permutation(self) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.size)
        return np.random.default_rng([self.seed, self.epoch]).permutation(self.size)
