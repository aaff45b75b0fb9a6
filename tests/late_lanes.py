"""Lanes whose work comes late, to have what nothing has put in order happen in another order than usual."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from fullshard.device.accelerator import Accelerator
from fullshard.device.lanes import LANES, Lane, Lanes, Mark

QUEUES = LANES[:-1]  # all but the host's
Sleep = Callable[[], None]


class LateLane(Lane):
    """What `lane` does, with `sleep()` queued ahead of whatever is queued, and ahead of each mark."""

    def __init__(self, lane: Lane, sleep: Sleep) -> None:
        super().__init__(lane.name)
        self.is_stream = lane.is_stream
        self._lane, self._sleep = lane, sleep

    @contextmanager
    def queueing(self) -> Iterator[None]:
        with self._lane.queueing():
            self._sleep()
            yield

    def mark(self) -> Mark | None:
        with self.queueing():  # what is to be waited for is late too; of the compute lane, this is all work
            pass
        return self._lane.mark()

    def wait(self, mark: Mark | None) -> None:
        self._lane.wait(mark)


def late(accelerator: Accelerator, names: Collection[str], sleep: Sleep) -> Accelerator:
    """`accelerator`, which nobody has used yet, with the lanes of these names late."""
    before = accelerator.lanes
    lanes = (getattr(before, name) for name in LANES)
    accelerator.lanes = Lanes(*(LateLane(lane, sleep) if lane.name in names else lane for lane in lanes))
    return accelerator


def some_late(seed: int) -> tuple[frozenset[str], Callable[[Callable[[float], None]], Sleep]]:
    """For the first seeds one lane each, then several at random; and what makes of `sleep(ms)` a sleep of some ms."""
    chance = random.Random(seed)
    if seed < len(QUEUES):
        names = frozenset((QUEUES[seed],))
    else:
        names = frozenset(name for name in QUEUES if chance.random() < 0.5) or frozenset(QUEUES)
    return names, lambda sleep: lambda: sleep(chance.choice((0.0, 0.2, 1.0)) if seed >= len(QUEUES) else 0.5)
