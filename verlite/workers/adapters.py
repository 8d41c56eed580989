"""Which parts of a policy with LoRA the next weight sync carries."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from verlite.weights.fingerprint import combine

if TYPE_CHECKING:
    from verlite.engine.export import Part


class SyncedParts:
    """What a weight sync carries.

    With rollout.lora_sync=merged it is always the merged weights. With adapter the first sync
    carries the base model and the adapters, and later ones the adapters alone. After a sync that
    did not succeed the base model is sent again, because an engine may have loaded only a part of
    it.

    Args:
        separate: rollout.lora_sync=adapter.

    Attributes:
        parts: of the sync under way, in the order in which they are sent.
    """

    def __init__(self, separate: bool) -> None:
        self.parts: tuple[Part, ...] = ("merged",)
        self._separate = separate
        self._engines_have_base = False
        self._base_fingerprint: int | None = None

    def start(self) -> None:
        """Choose the parts of the next sync."""
        if self._separate:
            self.parts = ("adapters",) if self._engines_have_base else ("adapters", "base")
        self._engines_have_base = False

    def forget(self) -> None:
        """Take note that an engine was started anew, without the base model."""
        self._engines_have_base = False

    def succeeded(self) -> None:
        """Take note that all engines have the version."""
        self._engines_have_base = True

    def fingerprint(self, measure: "Callable[[Part], int]") -> int:
        """Return the fingerprint of all weights that the engines will have.

        The base model is frozen, so it is measured once.

        Args:
            measure: returns the fingerprint of a part.
        """
        if not self._separate:
            return measure("merged")
        if self._base_fingerprint is None:
            self._base_fingerprint = measure("base")
        return combine(self._base_fingerprint, measure("adapters"))
