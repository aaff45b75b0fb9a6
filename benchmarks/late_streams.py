"""Streams with delayed work, to change the order of operations that no event orders."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from fullshard.device.accelerator import Accelerator
from fullshard.device.streams import STREAMS, Mark, Stream, Streams

QUEUES = STREAMS[:-1]  # all but the host's
Sleep = Callable[[], None]


class LateStream(Stream):
    """A stream that queues `sleep()` ahead of its work and of each mark."""

    def __init__(self, stream: Stream, sleep: Sleep) -> None:
        super().__init__(stream.name)
        self.is_stream = stream.is_stream
        self._stream, self._sleep = stream, sleep

    @contextmanager
    def queueing(self) -> Iterator[None]:
        with self._stream.queueing():
            self._sleep()
            yield

    def mark(self) -> Mark | None:
        with self.queueing():  # what is to be waited for is late too; of the compute stream, this is all work
            pass
        return self._stream.mark()

    def wait(self, mark: Mark | None) -> None:
        self._stream.wait(mark)


def late(accelerator: Accelerator, names: Collection[str], sleep: Sleep) -> Accelerator:
    """Delay the streams with these names on an unused `accelerator` and return it."""
    before = accelerator.streams
    streams = (getattr(before, name) for name in STREAMS)
    accelerator.streams = Streams(
        *(LateStream(stream, sleep) if stream.name in names else stream for stream in streams)
    )
    return accelerator


def some_late(seed: int) -> tuple[frozenset[str], Callable[[Callable[[float], None]], Sleep]]:
    """For the first seeds one stream each, then several at random; and what makes of `sleep(ms)` a sleep of some ms."""
    chance = random.Random(seed)
    if seed < len(QUEUES):
        names = frozenset((QUEUES[seed],))
    else:
        names = frozenset(name for name in QUEUES if chance.random() < 0.5) or frozenset(QUEUES)
    return names, lambda sleep: lambda: sleep(chance.choice((0.0, 0.2, 1.0)) if seed >= len(QUEUES) else 0.5)
