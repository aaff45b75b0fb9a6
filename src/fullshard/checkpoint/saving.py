"""Saving of a run. Each rank writes its shards, and a checkpoint is complete or does not exist."""

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
from fullshard.checkpoint.together import GroupRanks, default_ranks
from fullshard.errors import CheckpointError, ConfigError
from fullshard.tape.context import Kept
from fullshard.tape.recorder import noting
from fullshard.versions import versions

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
    """Save a run as `folder`/step-000000100, and return that path.

    Every rank of the default process group must call it. Each rank writes its own shards. The files have the format of
    `torch.distributed.checkpoint`, which can also read them. The random states of every rank are saved as well. If a
    process is killed during the save, or a disk is full, previous checkpoints in `folder` still exist, and unfinished
    files are ignored.

    Args:
        folder: The folder for the checkpoints of the run, on storage that all hosts share.
        model: The model, sharded or not, with its parameters, buffers and other state.
        step: The number that names the checkpoint. A checkpoint of the same step is replaced.
        optimizer: An optimizer of parameters of `model`.
        scheduler: An object with `state_dict()`. The state of the first rank is saved.
        data: The position in the data: an object with `state_dict()`. The state of each rank is saved.
        extra: Other plain values and plain tensors. The values of the first rank are saved.
        keep: The number of checkpoints to keep, including this one. Older ones are deleted. If None, all are kept.
        progress: Called with the bytes of tensors that this rank has written so far, and their total.

    Raises:
        CheckpointError: A rank could not save. The same error is raised on every rank. The run can continue.
        ConfigError: `step` is below 0, or `keep` below 1.
    """
    request = _SaveRequest(Path(folder), step, keep)
    checkpoints.wait()
    ranks = default_ranks()
    contents = ranks.do(request.doing, lambda: collect(model, optimizer, scheduler, data, extra))
    return request.write(contents, ranks, progress)


def save_contents(
    folder: Path, step: int, collect_contents: Callable[[], Contents], progress: Progress | None = None
) -> Path:
    """Save the contents from `collect_contents` like `save`, in a single process, and return the path."""
    request = _SaveRequest(folder, step, None)
    ranks = GroupRanks()
    return request.write(ranks.do(request.doing, collect_contents), ranks, progress)


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
    """Write this rank's files of a checkpoint to `folder`/step-000000100 on a local disk, and return that path.

    Every rank of the default process group must call it. The files of all ranks form a checkpoint once another program
    has moved them into one folder. Before that, no complete checkpoint exists.

    Args: Those of `save`. Each rank must use a different folder.

    Raises:
        CheckpointError: A rank could not write. The same error is raised on every rank.
        ConfigError: `step` is below 0.
    """
    request = _SaveRequest(Path(folder), step, None)
    checkpoints.wait()
    ranks = default_ranks()
    contents = ranks.do(request.doing, lambda: collect(model, optimizer, scheduler, data, extra))
    partial = ranks.do(request.doing, lambda: begin(request.folder, step))
    by_rank = write_files(partial, contents, ranks, request.doing)
    manifest = manifest_of(partial, step, 1, contents.strategy, by_rank)
    return ranks.do(request.doing, lambda: commit(partial, manifest, by_rank[ranks.index], writes=ranks.leads))


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
    """Start a `save`, and return as soon as all values have been copied to host memory.

    A thread writes the copy while training continues. The next save or load waits for it, and raises its error unless
    `wait()` was called before. The host memory is kept for the next copy.

    Args:
        folder: The folder for the checkpoints of the run, on storage that all hosts share.
        model: The model, sharded or not.
        step: The number that names the checkpoint.
        optimizer: An optimizer of parameters of `model`.
        scheduler: An object with `state_dict()`. The state of the first rank is saved.
        data: The position in the data: an object with `state_dict()`. The state of each rank is saved.
        extra: Other plain values and plain tensors. The values of the first rank are saved.
        keep: The number of checkpoints to keep, including this one. If None, all are kept.
        progress: Called by the thread with the bytes that this rank has written so far, and their total.

    Raises:
        CheckpointError: A rank could not copy its values, or the previous save failed.
        ConfigError: `step` is below 0, or `keep` below 1.
        RankMismatchError: A rank makes a different call at the same time.
    """
    request = _SaveRequest(Path(folder), step, keep)
    checkpoints.wait()
    default_ranks().barrier("async_save")  # the ranks below use a separate group, where calls are not compared
    ranks = checkpoints.ranks()
    memory = _memory.get_or_make(None, HostMemory)
    contents = ranks.do(request.doing, lambda: memory.copy(collect(model, optimizer, scheduler, data, extra)))
    return checkpoints.start(lambda: request.write(contents, ranks, progress))


_memory: Kept[None, HostMemory] = Kept("host memory for copies")


@dataclass(frozen=True)
class _SaveRequest:
    """The step to save, the folder of the checkpoints, and the number of checkpoints to keep."""

    folder: Path
    step: int
    keep: int | None

    def __post_init__(self) -> None:
        if self.step < 0:
            raise ConfigError(f"step={self.step}: must be the number of completed steps, 0 or more.")
        if self.keep is not None and self.keep < 1:
            raise ConfigError(
                f"keep={self.keep}: must be 1 or more, since the checkpoint that is being saved is always kept. None "
                "keeps all."
            )

    @property
    def doing(self) -> str:
        """The beginning of error messages."""
        return f"saving step {self.step} to {self.folder}"

    def write(self, contents: Contents, ranks: GroupRanks, progress: Progress | None) -> Path:
        """Write the checkpoint on all ranks together, and return its path."""
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
            except OSError as error:  # the new checkpoint is complete
                logger.warning("could not delete old checkpoints in %s: %s", self.folder, error)
        return path


def write_files(
    partial: Path, contents: Contents, ranks: GroupRanks, doing: str, progress: Progress | None = None
) -> list[dict[str, StoredFile]]:
    """Write the contents of this rank into the folder `partial`, and return the files of all ranks, in rank order.

    Raises:
        CheckpointError: A rank could not write. The same error is raised on every rank.
    """
    written = container.write(
        partial, contents.entries(ranks, doing), ties=contents.ties, ranks=ranks, doing=doing, progress=progress
    )
    return ranks.share(doing, lambda: written)


def manifest_of(partial: Path, step: int, number: int, strategy: str, by_rank: list[dict[str, StoredFile]]) -> Manifest:
    """Return the manifest of the files in `partial`."""
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
