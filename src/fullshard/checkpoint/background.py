"""Saves that go on behind the training, and what they have to tell."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

from fullshard.checkpoint.together import Ranks

__all__ = ["Background", "PendingSave", "checkpoints"]


class PendingSave:
    """A save that goes on behind the training."""

    def __init__(self, future: Future[Path]) -> None:
        self._future = future
        self._told = False

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def wait(self) -> Path:
        """The path of the checkpoint, once it is there.

        Raises:
            CheckpointError: some rank could not write; the same error on every rank.
        """
        self._told = True
        return self._future.result()


class Background:
    """One thread that writes, one save at a time, and the group over which its ranks speak meanwhile."""

    def __init__(self, name: str) -> None:
        self._writer = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._pending: PendingSave | None = None
        self._groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}

    def wait(self) -> None:
        """Wait for the save that goes on behind the training, if there is one.

        Raises:
            CheckpointError: it failed, and nobody has been told yet.
        """
        pending, self._pending = self._pending, None
        if pending is not None and not pending._told:
            pending.wait()
        elif pending is not None:
            pending._future.exception()

    def start(self, write: Callable[[], Path]) -> PendingSave:
        """Let `write` run on the thread; only one does at a time."""
        self._pending = PendingSave(self._writer.submit(write))
        return self._pending

    def ranks(self) -> Ranks:
        """All ranks, over a group that training does not use: gloo's, since what is written lies in host memory."""
        world = dist.group.WORLD if dist.is_initialized() else None
        if world is None:
            return Ranks()
        if world not in self._groups:
            self._groups[world] = dist.new_group(backend="gloo")
        return Ranks(self._groups[world])


checkpoints = Background("fullshard-checkpoint")
