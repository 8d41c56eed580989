"""The order in which prompts are used. It depends only on (seed, epoch), so its state is a few JSON
values.
"""

import functools
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from verlite.data.custom import EpochsOfVerl, RowsOfVerl, call, verl_config
from verlite.data.dataset import DataError, PromptDataset
from verlite.importing import CODE_ERRORS, OwnCodeError, find, text_of
from verlite.spec.roles import DataSpec


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
        order: Callable[[int], np.ndarray] | None = None,
    ) -> None:
        """Create a sampler over `size` rows.

        Args:
            key: the name of batch_size in messages.
            order: the rows of an epoch, in place of a permutation. Then `size` is their number in
                every epoch.
        """
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
        self._own_order = order
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
        """Return the state as JSON values: seed, shuffle, epoch, position, size.

        With an order of the user's, also its checksum.
        """
        own = {} if self._own_order is None else {"order": zlib.crc32(self._order.tobytes())}
        return {
            **own,
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
        if self.state_dict() != state:
            raise ValueError(
                f"data.sampler: order({self.epoch}) is another one than before the checkpoint. It "
                "may depend only on the rows, the configuration and the epoch"
            )

    def _permutation(self) -> np.ndarray:
        if self._own_order is not None:
            order = self._own_order(self.epoch)
            if len(order) != self.size:
                raise DataError(
                    f"data.sampler: order({self.epoch}) has {len(order)} rows, and order(0) has "
                    f"{self.size}: every epoch must have the same number"
                )
            return order
        if not self.shuffle:
            return np.arange(self.size)
        return np.random.default_rng([self.seed, self.epoch]).permutation(self.size)


def own_order(spec: DataSpec, rows: PromptDataset) -> Callable[[int], np.ndarray] | None:
    """Create the user's sampler, and return the order of each epoch. None: there is no sampler.

    Raises:
        DataError: it cannot be created; later, its order is not a list of row numbers.
    """
    path, name = spec.sampler.path, spec.sampler.name
    if path is None or name is None:
        return None
    key = f"data.sampler.class_name={name} in {path}"
    try:
        own = find(path, name)
        if hasattr(own, "__iter__") and not hasattr(own, "order"):
            if callable(getattr(own, "update", None)):
                raise DataError(
                    f"{key} changes after each step (update), so a resumed run could not repeat "
                    "its order. Give it a method order(epoch) instead (docs/data.md)"
                )
            given = {"data_source": RowsOfVerl(rows), "data_config": verl_config(spec)}
            sampler: Any = EpochsOfVerl(functools.partial(call, path, name, **given))
        else:
            sampler = call(path, name, data_source=rows, data_config=spec.section)
    except DataError:
        raise
    except OwnCodeError as error:
        raise DataError(f"data.sampler: {error}") from error
    except CODE_ERRORS as error:
        raise DataError(f"{key} cannot be created: {text_of(error)}") from error

    if not callable(getattr(sampler, "order", None)):
        raise DataError(f"{key} has neither a method order(epoch) nor __iter__ (docs/data.md)")

    def order(epoch: int) -> np.ndarray:
        try:
            given = np.asarray(sampler.order(epoch))
        except CODE_ERRORS as error:
            raise DataError(f"{key}: order({epoch}) failed: {text_of(error)}") from error
        numbers = given.ndim == 1 and np.issubdtype(given.dtype, np.integer)
        if not numbers or not len(given) or given.min() < 0 or given.max() >= len(rows):
            raise DataError(
                f"{key}: order({epoch}) must be a list of row numbers from 0 to {len(rows) - 1}, "
                f"not {str(given)[:80]}"
            )
        return given.astype(np.int64)

    return order
