"""One protocol for all ways between ranks: what the engine talks to.

    Gathers                all_gather
    ├── EncodedGathers     over another wire, in fewer bits
    └── TwoLevelGathers    across groups of neighbouring ranks, and then within a group
    Sums                   reduce_scatter, all_reduce
    └── EncodedSums        over another wire, in fewer bits
    Wire                   both, and all_to_all
    └── Channel            one purpose's messages over a process group, by whatever route: see `collectives.py`

A call moves several tensors as one. All tensors are 1-D and contiguous, and are read and written where they lie.
Sums are taken in rank order 0..N-1 and divided once, so that a sum has the same bits whichever route carried it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fullshard.tape.recorder import Event, Origin

__all__ = ["Gathers", "PartSums", "Pending", "Sums", "TermName", "Transport", "then"]

TermName = tuple[object, ...]
"""Of what a term of a sum is, and then all that it consists of: what error feedback goes by."""


@dataclass(frozen=True, slots=True)
class PartSums:
    """Sums over ranks of which each rank takes its part.

    Rank r's part of a whole is `whole[r * n : (r + 1) * n]` for its `n` of `part_numels`: the last parts may be short
    or empty. In the corresponding one of `sums` is then the sum over ranks of this rank's part, divided by `divisor`.
    A wire with error feedback goes by `names`, one for each whole.
    """

    sums: Sequence[Tensor]
    wholes: Sequence[Tensor]
    part_numels: Sequence[int]
    divisor: float
    names: Sequence[TermName] = ()


class Pending:
    """A started collective. Its tensors may be used after `wait()`, which may be called again.

    Args:
        finish: returns when the result is in place.
        event: for the record.
        has_arrived: tells whether `wait()` is sure not to wait for other ranks. Not every collective knows.
    """

    def __init__(
        self,
        finish: Callable[[], None] | None = None,
        event: Event | None = None,
        has_arrived: Callable[[], bool] = lambda: False,
    ) -> None:
        self._finish = finish
        self._event = event
        self.has_arrived = has_arrived

    def wait(self) -> None:
        """Return when the result is in place.

        Raises:
            RankMismatchError: another rank does something else. The group cannot be used any more.
            RankLostError: another rank's process is gone. Nor can it then.
        """
        finish, self._finish = self._finish, None
        if self._event is not None:
            self._event.awaited = time.perf_counter()
        if finish is not None:
            finish()
        if self._event is not None:
            self._event.finish()
            self._event = None


class Gathers(ABC):
    """A wire for gathers between `world` ranks, of which this is `rank`.

    `is_queued` tells whether calls are carried out in order, with no need for the host to wait in between.
    """

    world: int
    rank: int
    is_queued: bool

    @abstractmethod
    def all_gather(
        self, receive: Sequence[Tensor], send: Sequence[Tensor], *, origin: Origin, in_common: bool = False
    ) -> Pending:
        """Every rank's part of each tensor, end to end in rank order, in the corresponding receive buffer.

        Args:
            receive: each of `world * part.numel()` elements. A part may lie in its own place there.
            send: this rank's parts.
            origin: on whose behalf.
            in_common: the receive buffers lie in memory that all ranks share, at the same place on every rank, and this
                rank does not need any more what lies there now.
        """


class Sums(ABC):
    """A wire for sums over `world` ranks, of which this is `rank`."""

    world: int
    rank: int
    is_queued: bool
    names_terms = False  # whether terms must be named, since the error of a message is added to the next one

    @abstractmethod
    def reduce_scatter(self, of: PartSums, *, origin: Origin) -> Pending:
        """Take the sums that `of` says over ranks. The wholes must stay unchanged until `wait()` returns."""

    @abstractmethod
    def all_reduce(
        self, tensors: Sequence[Tensor], divisor: float, *, origin: Origin, names: Sequence[TermName] = ()
    ) -> Pending:
        """The sum over ranks of each tensor, divided by `divisor`, in its place."""


class Transport(Gathers, Sums):
    """A wire for everything."""

    @abstractmethod
    def all_to_all(
        self, receive: Sequence[Tensor], send: Sequence[Tensor], *, common_nbytes: int, origin: Origin
    ) -> Pending:
        """Every rank's message for this one, in the corresponding receive buffer.

        Args:
            receive: one a rank, each as large as what that rank has for this one; that may be nothing.
            send: what this rank has for each. Its own may lie in its own place; several may be the same tensor.
            common_nbytes: bytes of what is exchanged as all ranks count them, who otherwise have nothing to compare.
            origin: on whose behalf.
        """


def then(transport: Gathers | Sums, first: Pending, finish: Callable[[], None]) -> Pending:
    """Both, one after the other: queued at once where `transport` is a queue."""

    @torch.no_grad()
    def both() -> None:
        first.wait()
        finish()

    if not transport.is_queued:
        return Pending(both)
    both()
    return Pending()
