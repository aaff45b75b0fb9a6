"""The loss scale for fp16, adapted like DeepSpeed's: it is halved only after several overflows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fullshard.errors import StateError


@dataclass
class LossScale:
    """The loss scale. By default it is always 1."""

    scale: float = 1.0
    adapts: bool = False  # whether it changes after overflows. Otherwise the other arguments have no effect
    window: int = 1000  # steps without an overflow until it is doubled
    hysteresis: int = 2  # overflows until it is halved, including the last one
    # Whether each step without an overflow resets the count of overflows; otherwise a doubling resets it.
    restores_hysteresis: bool = False
    smallest: float = 1.0
    _patience: int = field(init=False)
    _since_overflow: int = field(init=False, default=0)  # steps

    def __post_init__(self) -> None:
        self._patience = self.hysteresis

    def update(self, overflowed: bool) -> None:
        """Adapt the scale after a step. `overflowed` is True if its gradients had an overflow.

        Raises:
            StateError: The gradients had an overflow, and the scale is already at its minimum.
        """
        if not self.adapts:
            return
        if overflowed:
            self._since_overflow = 0
            self._lower()
            return
        if self.restores_hysteresis:
            self._patience = self.hysteresis
        if self._since_overflow > 0 and self._since_overflow % self.window == 0:
            self._patience = self.hysteresis
            self.scale *= 2
        self._since_overflow += 1

    def _lower(self) -> None:
        if self._patience > 1:
            self._patience -= 1
        elif self.scale == self.smallest:
            raise StateError(
                f"the gradients overflowed in float16 with the smallest loss scale, {self.smallest:g}: training has "
                "diverged, or the model needs bf16. Lower the learning rate, or set bf16.enabled."
            )
        else:
            self.scale = max(self.scale / 2, self.smallest)

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""
        return {"scale": self.scale, "patience": self._patience, "since_overflow": self._since_overflow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self.scale = state["scale"]
        self._patience = state["patience"]
        self._since_overflow = state["since_overflow"]
