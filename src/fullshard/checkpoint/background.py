"""Saves that go on while training does, and their errors."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

from fullshard.checkpoint.together import Ranks
from fullshard.liveness.whereabouts import here
from fullshard.tape.context import Kept

__all__ = ["Background", "PendingSave", "checkpoints"]


class PendingSave:
    """A save that goes on while training does."""

    def __init__(self, future: Future[Path]) -> None:
        self._future = future
        self._was_waited_for = False

    @property
    def done(self) -> bool:
        """True once it has ended, well or not."""
        return self._future.done()

    def wait(self) -> Path:
        """The path of the checkpoint, once it is there.

        Raises:
            CheckpointError: some rank could not write; the same error on every rank.
        """
        self._was_waited_for = True
        with here.waiting_here():
            return self._future.result()


class Background:
    """One thread that writes, one save at a time, and the group that its ranks communicate over meanwhile."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._writer = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=here.work_behind)
        self._pending: PendingSave | None = None

    def wait(self) -> None:
        """Wait for the save that goes on, if there is one.

        Raises:
            CheckpointError: it failed, and nobody has waited for it yet.
        """
        pending, self._pending = self._pending, None
        if pending is not None and not pending._was_waited_for:
            pending.wait()
        elif pending is not None:
            with here.waiting_here():
                pending._future.exception()

    def start(self, write: Callable[[], Path]) -> PendingSave:
        """Let `write` run on the thread; only one does at a time."""
        self._pending = PendingSave(self._writer.submit(write))
        return self._pending

    def ranks(self) -> Ranks:
        """All ranks, over a group that training does not use: gloo's, since the copies are in host memory."""
        if not dist.is_initialized():
            return Ranks()
        return Ranks(_groups.get_or_make(self._name, _new_group))


def _new_group() -> dist.ProcessGroup:
    with here.waiting("making of a process group for saves"):
        group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


_groups: Kept[str, dist.ProcessGroup] = Kept("process groups of saves")

checkpoints = Background("fullshard-checkpoint")
