"""The one save that goes on behind the training, and what it has to tell."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

from fullshard.checkpoint.together import Ranks

__all__ = ["PendingSave", "background_ranks", "start_behind", "wait_for_pending"]


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


_writer = ThreadPoolExecutor(1, thread_name_prefix="fullshard-checkpoint")
_pending: PendingSave | None = None
_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


def wait_for_pending() -> None:
    """Wait for the save that goes on behind the training, if there is one.

    Raises:
        CheckpointError: it failed, and nobody has been told yet.
    """
    global _pending
    pending, _pending = _pending, None
    if pending is not None and not pending._told:
        pending.wait()
    elif pending is not None:
        pending._future.exception()


def start_behind(write: Callable[[], Path]) -> PendingSave:
    """Let `write` run on a thread of its own; only one does at a time."""
    global _pending
    _pending = PendingSave(_writer.submit(write))
    return _pending


def background_ranks() -> Ranks:
    """All ranks, over a group that training does not use: gloo's, since what is written lies in host memory."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None:
        return Ranks()
    if world not in _groups:
        _groups[world] = dist.new_group(backend="gloo")
    return Ranks(_groups[world])
