"""Findings of some ranks that are reported to all ranks, such as disk failures, so that all act identically.

[Note: a disk that fails on one rank]
If a rank raised immediately, the other ranks would wait for it in their next collective. The rank cannot send an error
instead: the other ranks expect data, and NCCL does not inspect the data. So the rank records the failure and continues
with the current contents of the memory that could not be filled. At the next point that all ranks reach (the end of a
forward, a backward, or a step), they sum one number, and raise the same error if it is not zero. Values that were
computed in between must not be used.
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

T = TypeVar("T")

_SHOWN = 4  # ranks in a message


def findings_of_all(
    findings: Callable[[], Sequence[T]], here: Tensor, groups: Sequence[dist.ProcessGroup], origin: Origin
) -> list[T] | None:
    """Gather the findings of all ranks that `groups` reach, over one group after the other; None if no rank has any.

    Args:
        findings: returns the findings of this rank; called only if some rank has any.
        here: one number in float32 on the device of the groups, more than 0 if this rank has any. It is changed.
        groups: the same in the same order on all of these ranks.
        origin: The unit and phase of the exchange.
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
    """Disk failures of this rank not yet reported to all ranks. See [Note: a disk that fails on one rank].

    Args:
        are_reported: whether failures will be reported to all ranks. Otherwise a failure is raised where it occurs.
    """

    def __init__(self, *, are_reported: bool = True) -> None:
        self.are_reported = are_reported
        self._errors: list[DiskError] = []

    def __bool__(self) -> bool:
        return bool(self._errors)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Context manager that records a `DiskError` of its block, or raises it if failures are not reported."""
        try:
            yield
        except DiskError as error:
            if not self.are_reported:
                raise
            self._errors.append(error)

    def take(self) -> list[DiskError]:
        """Return and clear the recorded failures."""
        errors, self._errors = self._errors, []
        return errors

    def add(self, errors: Iterable[DiskError]) -> None:
        """Record `errors`, which other objects have collected."""
        self._errors += errors

    def raise_on_every_rank(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        """Raise on all ranks that `groups` reach if the disk of any of them has failed. This is a collective."""
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
