"""The protocol of all transports between ranks, which the engine uses.

    Gathers                all_gather
    ├── EncodedGathers     over another transport, in fewer bits
    └── TwoLevelGathers    across groups of neighbouring ranks, and then within a group
    Sums                   reduce_scatter, all_reduce
    └── EncodedSums        over another transport, in fewer bits
    Transport              both, and all_to_all
    └── Channel            messages for one purpose over a process group, by any backend: see `collectives.py`

A call moves several tensors as one. All tensors are 1-D and contiguous, and are read and written in place. Sums are
computed in rank order 0..N-1 and divided once, so that a sum has the same bits on every transport.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fullshard.tape.recorder import Event, Origin

TermName = tuple[object, ...]
"""The kind of a term of a sum, followed by its components. It identifies the term for error feedback."""


@dataclass(frozen=True, slots=True)
class PartSums:
    """Sums over ranks that are scattered to the ranks.

    Rank r's part of a whole is `whole[r * n : (r + 1) * n]` for its `n` of `part_numels`: the last parts may be short
    or empty. The corresponding one of `sums` receives the sum over ranks of this rank's part, divided by `divisor`.
    A transport with error feedback identifies the wholes by `names`, one for each.
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
        event: The event of the collective in the trace.
        has_arrived: returns True if `wait()` will not wait for other ranks. Not every collective knows.
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
        """Wait until the result is in place.

        Raises:
            RankMismatchError: another rank does something else. The group cannot be used any more.
            RankLostError: another rank's process has ended. The group cannot be used any more.
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
    """A transport for gathers between `world` ranks. This rank is `rank`.

    `is_queued` is True if calls are executed in order, so that the host need not wait in between.
    """

    world: int
    rank: int
    is_queued: bool

    @abstractmethod
    def all_gather(
        self, receive: Sequence[Tensor], send: Sequence[Tensor], *, origin: Origin, into_shared: bool = False
    ) -> Pending:
        """Gather every rank's part of each tensor, contiguous in rank order, to the corresponding receive buffer.

        Args:
            receive: buffers of `world * part.numel()` elements. They may contain this rank's part in its final
                position.
            send: The parts of this rank.
            origin: the unit and phase of the call.
            into_shared: the receive buffers are in memory that all ranks share, at the same offset on every rank, and
                this rank does not need the present contents any more.
        """


class Sums(ABC):
    """A transport for sums over `world` ranks. This rank is `rank`."""

    world: int
    rank: int
    is_queued: bool
    names_terms = False  # whether terms must be named, since the error of a message is added to the next one

    @abstractmethod
    def reduce_scatter(self, of: PartSums, *, origin: Origin) -> Pending:
        """Compute the sums that `of` describes. The whole tensors must not change until `wait()` returns."""

    @abstractmethod
    def all_reduce(
        self, tensors: Sequence[Tensor], divisor: float, *, origin: Origin, names: Sequence[TermName] = ()
    ) -> Pending:
        """Sum each tensor over ranks and divide it by `divisor`, in place."""


class Transport(Gathers, Sums):
    """A transport for all collectives."""

    @abstractmethod
    def all_to_all(
        self, receive: Sequence[Tensor], send: Sequence[Tensor], *, common_nbytes: int, origin: Origin
    ) -> Pending:
        """Receive every rank's message for this one in the corresponding receive buffer.

        Args:
            receive: one per rank, each as large as the message of that rank for this one; it may be empty.
            send: this rank's message for each rank. Its own may be in its final position; several may be the same
                tensor.
            common_nbytes: bytes of the exchange, counted equally on all ranks, for comparison between ranks.
            origin: the unit and phase of the call.
        """


def then(transport: Gathers | Sums, first: Pending, finish: Callable[[], None]) -> Pending:
    """Chain `first` and `finish`. If `transport` is queued, queue both immediately."""

    @torch.no_grad()
    def both() -> None:
        first.wait()
        finish()

    if not transport.is_queued:
        return Pending(both)
    both()
    return Pending()
