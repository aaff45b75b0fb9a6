"""Bytes that travel between the memory that computes and where things rest, counted where they are moved.

Places are "cpu", the host's memory beside an accelerator, and "disk". What passes through the host's memory on its way
to or from a disk counts as the disk's. States are STATES; "other" is what is none of them, such as the copies of a
checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock

__all__ = ["STATES", "Transfers", "Travelled", "travel"]

STATES = ("parameters", "gradients", "optimizer state", "activations")
"""What rests, on the device or away from it."""


@dataclass(frozen=True)
class Travelled:
    """Bytes that came from a place, and bytes that went there."""

    arrived: int = 0
    passed: int = 0

    def since(self, before: Travelled) -> Travelled:
        """What has come to it since it was `before`."""
        return Travelled(self.arrived - before.arrived, self.passed - before.passed)


Transfers = dict[tuple[str, str], Travelled]
"""By place and state."""


@dataclass
class _Travel:
    _total: Transfers = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    @property
    def total(self) -> Transfers:
        """Since the process began."""
        with self._lock:
            return dict(self._total)

    def note(self, place: str, state: str, *, arrived: int = 0, passed: int = 0) -> None:
        """Note that so many bytes of a state are on their way from a place, or to it."""
        with self._lock:
            known = self._total.get((place, state), Travelled())
            self._total[place, state] = Travelled(known.arrived + arrived, known.passed + passed)

    def since(self, before: Transfers) -> Transfers:
        """What was moved since the total was `before`."""
        return {key: now.since(before.get(key, Travelled())) for key, now in self.total.items()}


travel = _Travel()
"""That of this process."""
