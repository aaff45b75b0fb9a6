"""The total time of steps, excluding the time between them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """The total time of steps in seconds, `total_s`."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._created = time.monotonic()
        self._lap_step = 0
        self._lap_s = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context manager that adds the time within it to the total."""
        start = time.monotonic()
        yield
        self.total_s += time.monotonic() - start

    def lap(self, step: int) -> float:
        """Return the mean seconds per step since the last lap, after `step` steps in total. The result is never 0."""
        seconds = (self.total_s - self._lap_s) / max(1, step - self._lap_step)
        self._lap_step, self._lap_s = step, self.total_s
        return max(seconds, 1e-9)

    def since_start_s(self) -> float:
        """Return the seconds since the stopwatch was created."""
        return time.monotonic() - self._created
