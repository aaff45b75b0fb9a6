"""Counts of bytes transferred between compute memory and the tiers of offloaded states.

Tiers are "cpu", the host memory of an accelerator, and "disk". Data that passes through host memory to or from a disk
counts for the disk. States are STATES; "other" is everything else, such as the copies of a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock

STATES = ("parameters", "gradients", "optimizer state", "activations")  # the states that can be offloaded


@dataclass(frozen=True)
class TransferBytes:
    """Bytes that were read from a tier, and bytes that were written to it."""

    arrived: int = 0
    passed: int = 0

    def since(self, before: TransferBytes) -> TransferBytes:
        """Return the bytes since `before`."""
        return TransferBytes(self.arrived - before.arrived, self.passed - before.passed)


Transfers = dict[tuple[str, str], TransferBytes]  # by tier and state


@dataclass
class _TransferCounter:
    _total: Transfers = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    @property
    def total(self) -> Transfers:
        """The totals since the process started."""
        with self._lock:
            return dict(self._total)

    def note(self, place: str, state: str, *, arrived: int = 0, passed: int = 0) -> None:
        """Count bytes of a state that are transferred from a tier (`arrived`), or to it (`passed`)."""
        with self._lock:
            known = self._total.get((place, state), TransferBytes())
            self._total[place, state] = TransferBytes(known.arrived + arrived, known.passed + passed)

    def since(self, before: Transfers) -> Transfers:
        """Return the transfers since the total was `before`."""
        return {key: now.since(before.get(key, TransferBytes())) for key, now in self.total.items()}


transfers = _TransferCounter()  # the transfers of this process
