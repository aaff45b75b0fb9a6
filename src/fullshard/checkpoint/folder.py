"""Checkpoints in a folder: `step-000000100` is complete or does not exist, even if processes are killed.

A checkpoint is written under another name (`step-000000100.partial-...`) and synced. The manifest is written last. Then
the folder is renamed. The next save recognizes the remains of a killed run by their names and removes them.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from xxhash import xxh3_128

from fullshard.checkpoint.manifest import MANIFEST, Manifest, StoredFile, damage_in, step_of
from fullshard.errors import CheckpointError

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-\d+")
_LEFT = re.compile(r"(step-\d+)\.(partial|replaced|deleted)-[0-9a-f]+")


@dataclass(frozen=True)
class Entry:
    """A complete checkpoint, possibly damaged."""

    path: Path

    @property
    def step(self) -> int:
        """The step in the name of the folder."""
        return step_of(self.path) or 0

    @cached_property
    def manifest(self) -> Manifest | None:
        """Its manifest; None if it cannot be read."""
        try:
            return Manifest.read(self.path)
        except CheckpointError:
            return None

    @property
    def order(self) -> tuple[float, int]:
        """The sort key for the order of saves. Checkpoints without a manifest come last."""
        return (float("inf") if self.manifest is None else self.manifest.number, self.step)


def entries(folder: Path) -> list[Entry]:
    """Return the complete checkpoints in `folder`, the newest first."""
    found: dict[str, Path] = {}
    for path in _inside(folder):
        left = _LEFT.fullmatch(path.name)
        if left is not None and left[2] == "replaced":
            found.setdefault(left[1], path)  # its replacement is missing
        elif _NAME.fullmatch(path.name):
            found[path.name] = path
    return sorted(map(Entry, found.values()), key=lambda entry: entry.order, reverse=True)


def unfinished(folder: Path) -> list[Path]:
    """Return the partially written or deleted checkpoints in `folder`, of active or killed runs."""
    complete = {entry.path for entry in entries(folder)}
    return [path for path in _inside(folder) if _LEFT.fullmatch(path.name) and path not in complete]


def begin(folder: Path, step: int) -> Path:
    """Create a folder for writing the checkpoint of `step`, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    clear_up(folder)
    partial = partial_in(folder, step, uuid.uuid4().hex)
    partial.mkdir()
    return partial


def partial_in(folder: Path, step: int, id: str) -> Path:
    """Return the folder for writing the checkpoint of `step` until it is renamed."""
    return folder / f"step-{step:09d}.partial-{id}"


def newest_number(folder: Path) -> int:
    """Return the number of the newest checkpoint in `folder`; 0 if there is none."""
    return max((entry.manifest.number for entry in entries(folder) if entry.manifest is not None), default=0)


def commit(
    partial: Path, manifest: Manifest, files: Mapping[str, StoredFile] | None = None, *, writes: bool = True
) -> Path:
    """Turn `partial` into a complete checkpoint of its folder, and return its path.

    Args:
        partial: The folder with the files.
        manifest: The manifest.
        files: The files in `partial`, if not all files of the manifest are expected there.
        writes: Whether to write the manifest. If several processes have separate folders, only one of them does.
    """
    missing = list(damage_in(partial, manifest.files if files is None else files, reads=False))
    if missing:
        raise CheckpointError(
            f"{missing[0]}. The first rank cannot see all files that the ranks have written. Save to a folder that "
            "all hosts share."
        )
    if writes:
        write_synced(partial / MANIFEST, manifest.dumps().encode())
    sync(partial)
    final = partial.with_name(f"step-{manifest.step:09d}")
    replaced = final.with_name(f"{final.name}.replaced-{uuid.uuid4().hex}")
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def discard(partial: Path) -> None:
    """Remove an unfinished folder as far as possible."""
    shutil.rmtree(partial, ignore_errors=True)


def clear_up(folder: Path) -> None:
    """Remove unfinished and deleted checkpoints of killed runs. Restore a replaced one that has no replacement."""
    for path in _inside(folder):
        left = _LEFT.fullmatch(path.name)
        if left is None:
            continue
        place = path.with_name(left[1])
        if left[2] == "replaced" and not place.exists():
            path.rename(place)
        else:
            logger.info("removing %s, which an earlier run left unfinished", path)
            discard(path)


def keep_newest(folder: Path, count: int) -> None:
    """Delete the checkpoints in `folder` that seem to be intact, except for the newest `count`.

    Damaged checkpoints are neither counted nor deleted. Only the sizes of files are checked.
    """
    readable = [(entry, entry.manifest) for entry in entries(folder)]
    intact = [
        entry
        for entry, manifest in readable
        if manifest is not None and not any(damage_in(entry.path, manifest.files, reads=False))
    ]
    for entry in intact[count:]:
        delete(entry)


def delete(entry: Entry) -> None:
    """Delete a checkpoint. It is renamed first, so a partially deleted folder is never taken for a checkpoint."""
    doomed = entry.path.with_name(f"step-{entry.step:09d}.deleted-{uuid.uuid4().hex}")
    entry.path.rename(doomed)
    discard(doomed)


def write_synced(path: Path, data: bytes) -> StoredFile:
    """Write and sync a file, and return its size and checksum."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return StoredFile(len(data), xxh3_128(data).hexdigest())


def _inside(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.iterdir()) if folder.is_dir() else ()


def sync(folder: Path) -> None:
    """Sync the entries of `folder` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
