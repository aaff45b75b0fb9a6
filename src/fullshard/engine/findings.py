"""What some ranks have found, told to all of them, so that all go on alike; and what a disk could not do.

[Note: a disk that fails on one rank]
A rank that raises where it meets the failure leaves the others in their next collective, of which it will not be part.
Nothing can be sent there in its place: whoever waits in a collective waits for data, and on NCCL nobody looks at what
comes. So the failure is noted, the rank goes on with whatever is in memory where something could not be read, and all
ranks meet at the next moment at which they all do the same: at the end of a forward, a backward, or a step. There they
add up one number, and raise the same error if it is not zero. What was computed meanwhile is of no use to anybody then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard._compat import FakeTensor
from fullshard.comm.routes import collectives_for
from fullshard.errors import DiskError
from fullshard.tape.recorder import Origin, Phase

__all__ = ["DiskFailures", "findings_of_all"]

T = TypeVar("T")

_SHOWN = 4  # ranks in a message


def findings_of_all(
    findings: Callable[[], Sequence[T]], here: Tensor, groups: Sequence[dist.ProcessGroup], origin: Origin
) -> list[T] | None:
    """The findings of all ranks that `groups` reach, one group after the other; None if no rank has any.

    Args:
        findings: gives those of this rank; called only if some rank has any.
        here: one number in float32 on the device of the groups, more than 0 if there are any. It is changed.
        groups: the same in the same order on all of these ranks.
        origin: for whom they are compared.
    """
    for group in groups:
        collectives_for(group, here.device).combine(here, dist.ReduceOp.SUM, origin=origin)
    if isinstance(here, FakeTensor) or not here.item():
        return None
    known = list(findings())
    for group in groups:
        parts = collectives_for(group, here.device).gather_objects(known, origin=origin)
        known = [finding for part in parts for finding in part]
    return known


class DiskFailures:
    """What the disk could not do for this rank, until all ranks are told. See the note above.

    Args:
        are_reported: whether all ranks are going to be told. Otherwise a failure is raised where it is met.
    """

    def __init__(self, *, are_reported: bool = True) -> None:
        self.are_reported = are_reported
        self._errors: list[DiskError] = []

    def __bool__(self) -> bool:
        return bool(self._errors)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """A context that a `DiskError` leaves, and is noted; or is raised, if nobody is going to be told."""
        try:
            yield
        except DiskError as error:
            if not self.are_reported:
                raise
            self._errors.append(error)

    def take(self) -> list[DiskError]:
        """What was noted, which is forgotten here."""
        errors, self._errors = self._errors, []
        return errors

    def add(self, errors: Iterable[DiskError]) -> None:
        """Note `errors`, which others have met."""
        self._errors += errors

    def raise_on_every_rank(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        """Raise on all ranks that `groups` reach if the disk of any of them has failed; a collective.

        Raises:
            DiskError: one has; with the first failure of each.
        """
        errors = self.take()
        here = torch.full((1,), float(len(errors)), device=device)
        found = findings_of_all(lambda: [(dist.get_rank(), str(error)) for error in errors[:1]], here, groups, _ORIGIN)
        if found is None:
            return
        reported = sorted(set(found))
        lines = [f"rank {rank}: {message}" for rank, message in reported[:_SHOWN]]
        lines += [f"and {len(reported) - _SHOWN} more ranks"] if len(reported) > _SHOWN else []
        raise DiskError(" ".join(lines)) from (errors[0] if errors else None)


_ORIGIN = Origin("disk check", Phase.IDLE)
