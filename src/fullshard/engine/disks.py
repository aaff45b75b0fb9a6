"""What the disks of a root's ranks could not do in a forward or backward: told to all ranks at its end.

See [Note: a disk that fails on one rank] in `findings.py`. Between such passes, as in `unshard()` by hand or where
somebody looks at a state, ranks need not do the same, and a failure is raised where it is met.
"""

from __future__ import annotations

from collections.abc import Sequence

from fullshard.engine.findings import DiskFailures
from fullshard.engine.registry import process_groups_along
from fullshard.engine.unit import Unit

__all__ = ["Disks"]


class Disks:
    """The disks that units of one root rest on.

    Args:
        units: all units of the root.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._failures = DiskFailures()

    def begin_pass(self) -> None:
        """Note that all ranks begin the same forward or backward."""
        for of_unit in self._of_units():
            of_unit.are_reported = True

    def end_pass(self, activations: DiskFailures | None = None) -> None:
        """Tell all ranks, each of which has ended the same pass, if the disk of one of them has failed: a collective,
        if anything rests on a disk.

        Args:
            activations: what could not be done for activations, if these are on a disk in this pass.

        Raises:
            DiskError: one has.
        """
        self._collect()
        if activations is not None:
            self._failures.add(activations.take())
        if activations is not None or any(unit.is_on_disk for unit in self._units):
            self._failures.raise_on_every_rank(process_groups_along(self._units), self._units[0].device)

    def forget(self) -> None:
        """Note that a pass will have no end: an exception has left it."""
        self._collect()
        self._failures.take()

    def _collect(self) -> None:
        for of_unit in self._of_units():
            self._failures.add(of_unit.take())
            of_unit.are_reported = False

    def _of_units(self) -> list[DiskFailures]:
        return [disk_failure for unit in self._units if unit.is_on_disk for disk_failure in unit.disk_failures]
