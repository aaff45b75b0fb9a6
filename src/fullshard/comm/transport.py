"""The protocol of all transports between ranks, which the engine uses.

    Gathers                all_gather
    ├── EncodedGathers     over another transport, in fewer bits
    └── TwoLevelGathers    across groups of neighboring ranks, and then within a group
    Sums                   reduce_scatter, all_reduce
    └── EncodedSums        over another transport, in fewer bits
    Transport              both, and all_to_all
    └── Channel            messages for one purpose over a process group, by any backend: see `collectives.py`

A call moves several tensors as one. All tensors are 1-D and contiguous, and are read and written in place. With gloo,
a sum is computed in rank order 0..N-1 and divided once, so it is bitwise identical with and without shared memory.
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
    """The arguments of a reduce-scatter of several tensors.

    Rank r's part of `wholes[i]` is `wholes[i][r * n : (r + 1) * n]` with `n = part_numels[i]`. The last parts may be
    short or empty. `sums[i]` receives the sum over ranks of this rank's part, divided by `divisor`. `names[i]`
    identifies the tensor for error feedback.
    """

    sums: Sequence[Tensor]
    wholes: Sequence[Tensor]
    part_numels: Sequence[int]
    divisor: float
    names: Sequence[TermName] = ()


class Pending:
    """A started collective. Its tensors may be used after `wait()`, which may be called again.

    Args:
        finish: A function that waits for the result.
        event: The event of the collective in the trace.
        has_arrived: A function that returns True if `wait()` does not wait for other ranks. By default this is unknown,
            and the function returns False.
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
            RankMismatchError: Another rank has started a different collective. The group can no longer be used.
            RankLostError: The process of another rank has ended. The group cannot be used anymore.
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
    """A transport for gathers between `world` ranks; `rank` is the index of this rank.

    `is_queued` is True if calls are executed in order, so that the host does not need to wait between them.
    """

    world: int
    rank: int
    is_queued: bool

    @abstractmethod
    def all_gather(
        self, receive: Sequence[Tensor], send: Sequence[Tensor], *, origin: Origin, into_shared: bool = False
    ) -> Pending:
        """All-gather each tensor to the corresponding receive buffer, in rank order.

        Args:
            receive: buffers of `world * part.numel()` elements. They may contain this rank's part in its final
                position.
            send: The parts of this rank.
            origin: the unit and phase of the call.
            into_shared: Whether the receive buffers are in memory that all ranks share, at the same offset on every
                rank. The caller no longer needs their current contents.
        """


class Sums(ABC):
    """A transport for reductions between `world` ranks; `rank` is the index of this rank."""

    world: int
    rank: int
    is_queued: bool
    names_terms = False  # True if terms need names, for error feedback

    @property
    def error_nbytes(self) -> int:
        """Bytes that error feedback keeps."""
        return 0

    def forget_errors(self) -> None:  # noqa: B027  # most transports have none
        """Reset error feedback, so that the next sums do not include errors of earlier messages."""

    @abstractmethod
    def reduce_scatter(self, of: PartSums, *, origin: Origin) -> Pending:
        """Start the reduce-scatter that `of` describes. `of.wholes` must not change until `wait()` returns."""

    @abstractmethod
    def all_reduce(
        self, tensors: Sequence[Tensor], divisor: float, *, origin: Origin, names: Sequence[TermName] = ()
    ) -> Pending:
        """All-reduce each tensor in place, and divide it by `divisor`."""


class Transport(Gathers, Sums):
    """A transport for all collectives."""

    @abstractmethod
    def all_to_all(
        self, receive: Sequence[Tensor], send: Sequence[Tensor], *, common_nbytes: int, origin: Origin
    ) -> Pending:
        """Send one message to each rank, and receive one from each rank.

        Args:
            receive: The receive buffers, one per rank. Sizes may differ, and may be 0.
            send: The messages of this rank, one per rank. Its message to itself may already be in its receive buffer.
                Several messages may be the same tensor.
            common_nbytes: The bytes of the exchange, equal on all ranks, for comparison between ranks.
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
