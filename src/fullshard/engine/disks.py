"""Disk failures in a forward or backward of a root, reported to all ranks at its end.

See [Note: a disk that fails on one rank] in `findings.py`. Outside of these passes, as in a manual `unshard()` or when
a state is read, ranks may do different things. There a failure is raised where it occurs.
"""

from __future__ import annotations

from collections.abc import Sequence

from fullshard.engine.findings import DiskFailures
from fullshard.engine.registry import process_groups_along
from fullshard.engine.unit import Unit

__all__ = ["Disks"]


class Disks:
    """The disks that store units of one root.

    Args:
        units: all units of the root.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._failures = DiskFailures()
        self.are_in_pass = False
        """Whether the shards of any unit were on a disk when the last pass began."""

    @property
    def are_used(self) -> bool:
        """True if the shards of any unit are on a disk."""
        return any([unit.shards.is_on_disk for unit in self._units])

    def begin_pass(self) -> None:
        """Record that all ranks begin the same forward or backward."""
        self.are_in_pass = self.are_used
        for of_unit in self._of_units():
            of_unit.are_reported = True

    def end_pass(self, activations: DiskFailures | None = None) -> None:
        """Raise on all ranks if the disk of one of them has failed. All ranks call it at the end of the same pass.

        This is a collective if anything is stored on a disk.

        Args:
            activations: failures with activations, if these are on a disk in this pass.

        Raises:
            DiskError: the disk of a rank has failed.
        """
        self._collect()
        if activations is not None:
            self._failures.add(activations.take())
        if activations is not None or self.are_used:
            self._failures.raise_on_every_rank(process_groups_along(self._units), self._units[0].device)

    def forget(self) -> None:
        """Record that an exception has ended a pass."""
        self._collect()
        self._failures.take()

    def _collect(self) -> None:
        for of_unit in self._of_units():
            self._failures.add(of_unit.take())
            of_unit.are_reported = False

    def _of_units(self) -> list[DiskFailures]:
        return [
            disk_failure for unit in self._units if unit.shards.is_on_disk for disk_failure in unit.shards.disk_failures
        ]
