"""Save a run: all ranks together, each its own shards; a checkpoint is complete, or does not exist."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint import container
from fullshard.checkpoint.background import PendingSave, checkpoints
from fullshard.checkpoint.contents import Contents, HasState, collect
from fullshard.checkpoint.folder import begin, commit, discard, keep_newest, newest_number
from fullshard.checkpoint.manifest import Manifest, Progress, StoredFile
from fullshard.checkpoint.staging import HostMemory
from fullshard.checkpoint.together import Ranks, default_ranks
from fullshard.errors import CheckpointError, ConfigError
from fullshard.tape.context import Kept
from fullshard.tape.recorder import noting
from fullshard.versions import versions

__all__ = ["async_save", "manifest_of", "save", "save_contents", "save_own_files", "write_files"]

logger = logging.getLogger(__name__)


@noting("checkpoint")
def save(
    folder: str | PathLike[str],
    *,
    model: nn.Module,
    step: int,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: HasState | None = None,
    data: HasState | None = None,
    extra: Any = None,
    keep: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Save a run as `folder`/step-000000100; the path of that. Every rank of the default process group calls it.

    Each rank writes its own shards. The files are those of `torch.distributed.checkpoint`, which can read them too.
    Random states of every rank are saved besides. If anything is killed meanwhile, or a disk is full, the checkpoints
    that were in `folder` before are still there, and unfinished files do not count.

    Args:
        folder: the checkpoints of the run, on storage that all hosts share.
        model: sharded or not; its parameters, buffers and other state.
        step: names the checkpoint. One of the same step is replaced.
        optimizer: steps parameters of `model`.
        scheduler: anything with `state_dict()`. The first rank's is kept.
        data: the position in the data: anything with `state_dict()`. Each rank's own is kept.
        extra: anything else, in plain values and plain tensors. The first rank's is kept.
        keep: how many checkpoints to keep, this one included; older ones are deleted. All, if None.
        progress: called with the bytes of tensors that this rank has written so far, and all that it will write.

    Raises:
        CheckpointError: some rank could not; the same error on every rank. The run can go on.
        ConfigError: `step` is below 0, or `keep` below 1.
    """
    order = _Order(Path(folder), step, keep)
    checkpoints.wait()
    ranks = default_ranks()
    contents = ranks.do(order.doing, lambda: collect(model, optimizer, scheduler, data, extra))
    return order.write(contents, ranks, progress)


def save_contents(
    folder: Path, step: int, collect_contents: Callable[[], Contents], progress: Progress | None = None
) -> Path:
    """Save the contents from `collect_contents`, as `save` does; the path of the checkpoint. For one process."""
    order = _Order(folder, step, None)
    ranks = Ranks()
    return order.write(ranks.do(order.doing, collect_contents), ranks, progress)


@noting("checkpoint")
def save_own_files(
    folder: str | PathLike[str],
    *,
    model: nn.Module,
    step: int,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: HasState | None = None,
    data: HasState | None = None,
    extra: Any = None,
) -> Path:
    """Write this rank's files of a checkpoint to `folder`/step-000000100 on a disk of its own; the path of that.

    Every rank of the default process group calls it. What all of them have written is a checkpoint once it lies in one
    folder, wherever something else takes it; until then there is no whole one anywhere.

    Args: as those of `save`; no two ranks give the same folder.

    Raises:
        CheckpointError: some rank could not; the same error on every rank.
        ConfigError: `step` is below 0.
    """
    order = _Order(Path(folder), step, None)
    checkpoints.wait()
    ranks = default_ranks()
    contents = ranks.do(order.doing, lambda: collect(model, optimizer, scheduler, data, extra))
    partial = ranks.do(order.doing, lambda: begin(order.folder, step))
    by_rank = write_files(partial, contents, ranks, order.doing)
    manifest = manifest_of(partial, step, 1, contents.strategy, by_rank)
    return ranks.do(order.doing, lambda: commit(partial, manifest, by_rank[ranks.index], writes=ranks.leads))


@noting("checkpoint")
def async_save(
    folder: str | PathLike[str],
    *,
    model: nn.Module,
    step: int,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: HasState | None = None,
    data: HasState | None = None,
    extra: Any = None,
    keep: int | None = None,
    progress: Progress | None = None,
) -> PendingSave:
    """Start to `save`, and return as soon as everything has been copied to host memory.

    A thread writes the copy while training goes on. The next save, or the next load, waits for it first, and raises its
    error if nobody has called `wait()` before. The host memory is kept for the next copy.

    Args: as those of `save`; `progress` is called by the thread.

    Raises:
        CheckpointError: something cannot be copied or saved on some rank, or the save before this one failed.
        ConfigError: `step` is below 0, or `keep` below 1.
    """
    order = _Order(Path(folder), step, keep)
    checkpoints.wait()
    ranks = checkpoints.ranks()
    memory = _memory.get_or_make(None, HostMemory)
    contents = ranks.do(order.doing, lambda: memory.copy(collect(model, optimizer, scheduler, data, extra)))
    return checkpoints.start(lambda: order.write(contents, ranks, progress))


_memory: Kept[None, HostMemory] = Kept("host memory for copies")


@dataclass(frozen=True)
class _Order:
    """The step to save, the folder for it, and the number of checkpoints to keep there."""

    folder: Path
    step: int
    keep: int | None

    def __post_init__(self) -> None:
        if self.step < 0:
            raise ConfigError(f"step={self.step}: a checkpoint is named by the steps done, so by 0 or more.")
        if self.keep is not None and self.keep < 1:
            raise ConfigError(
                f"keep={self.keep}: at least the checkpoint that is being saved is kept. Pass 1 or more, or None to "
                "keep all."
            )

    @property
    def doing(self) -> str:
        """The beginning of an error message."""
        return f"saving step {self.step} to {self.folder}"

    def write(self, contents: Contents, ranks: Ranks, progress: Progress | None) -> Path:
        """Write the checkpoint on all ranks together; its path."""
        partial = ranks.once(self.doing, lambda: begin(self.folder, self.step))
        try:
            by_rank = write_files(partial, contents, ranks, self.doing, progress)
            return ranks.once(self.doing, lambda: self._commit(partial, contents.strategy, by_rank))
        except CheckpointError:
            if ranks.leads:
                discard(partial)
            raise

    def _commit(self, partial: Path, strategy: str, by_rank: list[dict[str, StoredFile]]) -> Path:
        number = newest_number(self.folder) + 1
        path = commit(partial, manifest_of(partial, self.step, number, strategy, by_rank))
        if self.keep is not None:
            try:
                keep_newest(self.folder, self.keep)
            except OSError as error:  # no reason to fail: the new one is there
                logger.warning("could not delete old checkpoints in %s: %s", self.folder, error)
        return path


def write_files(
    partial: Path, contents: Contents, ranks: Ranks, doing: str, progress: Progress | None = None
) -> list[dict[str, StoredFile]]:
    """Write `contents`, each rank its own, into the folder `partial`; the files of each rank, in rank order.

    Raises:
        CheckpointError: some rank could not; the same error on every rank.
    """
    written = container.write(
        partial, contents.entries(ranks, doing), ties=contents.ties, ranks=ranks, doing=doing, progress=progress
    )
    return ranks.share(doing, lambda: written)


def manifest_of(partial: Path, step: int, number: int, strategy: str, by_rank: list[dict[str, StoredFile]]) -> Manifest:
    """The manifest of the files that have been written to `partial`."""
    return Manifest(
        id=partial.suffix.removeprefix(".partial-"),
        step=step,
        number=number,
        world=len(by_rank),
        strategy=strategy,
        versions=versions(),
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
        files={name: stored for of_rank in by_rank for name, stored in of_rank.items()},
    )
