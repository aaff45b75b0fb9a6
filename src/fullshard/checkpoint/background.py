"""Saves in the background during training, and their errors."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

from fullshard.checkpoint.together import GroupRanks
from fullshard.liveness.rank_progress import here
from fullshard.tape.context import Kept

_log = logging.getLogger(__name__)


class PendingSave:
    """A save in the background. Created by `async_save`.

    If it fails and `wait` is not called, its error is logged at the end of the program.
    """

    def __init__(self, future: Future[Path]) -> None:
        self._future = future
        self._unseen = weakref.finalize(self, future.add_done_callback, _log_failure)

    @property
    def done(self) -> bool:
        """True once the save has ended, successfully or not."""
        return self._future.done()

    def wait(self) -> Path:
        """Wait for the checkpoint and return its path.

        Raises:
            CheckpointError: A rank could not write. The same error is raised on every rank.
        """
        with here.waiting_here():
            try:
                return self._future.result()
            finally:
                if self.done:  # not if the wait was interrupted
                    self._unseen.detach()


def _log_failure(future: Future[Path]) -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None:
        _log.error("%s Call wait() of the save before the program ends, to handle such errors.", error)


class Background:
    """The thread that writes one save at a time, and the process group for its communication."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._writer = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=here.work_behind)
        self._pending: PendingSave | None = None

    def wait(self) -> None:
        """Wait for the save in progress, if there is one.

        Raises:
            CheckpointError: It failed, and its error has not been raised by `PendingSave.wait` yet.
        """
        pending = self._pending
        if pending is None:
            return
        try:
            if pending._unseen.alive:
                pending.wait()
            else:
                with here.waiting_here():
                    pending._future.exception()
        finally:
            if pending.done:  # an interrupted wait must not forget a save that still uses the memory for copies
                self._pending = None

    def start(self, write: Callable[[], Path]) -> PendingSave:
        """Run `write` on the thread."""
        self._pending = PendingSave(self._writer.submit(write))
        return self._pending

    def ranks(self) -> GroupRanks:
        """Return all ranks, with a separate gloo group, because the copies are in host memory."""
        if not dist.is_initialized():
            return GroupRanks()
        with here.waiting("making of a process group for saves"):
            return GroupRanks(_groups.get_or_make(self._name, lambda: dist.new_group(backend="gloo")))


_groups: Kept[str, dist.ProcessGroup] = Kept("process groups of saves")

checkpoints = Background("fullshard-checkpoint")
