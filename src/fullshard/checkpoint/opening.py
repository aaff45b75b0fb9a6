"""Search for a checkpoint, and verification of its files before anything is read from it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fullshard.checkpoint import container
from fullshard.checkpoint.contents import RECORD
from fullshard.checkpoint.folder import entries
from fullshard.checkpoint.manifest import MANIFEST, Manifest, Progress, StoredFile, damage_in, step_of
from fullshard.checkpoint.together import GroupRanks
from fullshard.errors import CheckpointError, shown

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Opened:
    """An intact checkpoint, written by fullshard or by another program."""

    path: Path
    manifest: Manifest | None  # None if another program has written it
    metadata: Metadata
    ranks: GroupRanks

    @property
    def doing(self) -> str:
        """The beginning of error messages."""
        return f"loading {self.path}"

    def sizes(self) -> dict[str, torch.Size]:
        """Return the shapes of all tensors, by key."""
        entries = self.metadata.state_dict_metadata.items()
        return {key: item.size for key, item in entries if isinstance(item, TensorStorageMetadata)}

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of the tensor `key`."""
        entry = self.metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        return entry.properties.dtype

    def values(self, *keys: str) -> list[Any]:
        """Return the values of `keys`, which are not tensors."""
        targets: dict[str, Any] = dict.fromkeys(keys)
        self.read(targets)
        return [targets[key] for key in keys]

    def records(self, *keys: str) -> list[Any]:
        """Return the values of `keys` that `as_one_value` has wrapped."""
        values = self.values(*keys)
        for key, value in zip(keys, values, strict=True):
            if type(value) is not tuple or len(value) != 1:
                raise CheckpointError(
                    f"{self.doing}: {key!r} does not have the form that fullshard writes. Load another checkpoint."
                )
        return [value for (value,) in values]

    def read(self, targets: dict[str, Any], progress: Progress | None = None) -> None:
        """Read the values of `targets`. Tensors, sharded or not, are filled in place. Other values are replaced."""
        if targets:
            container.read_values(
                self.path,
                self.metadata,
                targets,
                ranks=self.ranks,
                doing=self.doing,
                record=self.manifest is not None,
                progress=progress,
            )


def open_checkpoint(
    path: Path, ranks: GroupRanks, progress: Progress | None = None, *, verifies: bool = True
) -> Opened:
    """Verify and open the checkpoint `path`, or the newest intact one in the folder `path`.

    Each rank verifies some of the files. Damaged checkpoints that are newer are logged.

    Args:
        path: A checkpoint, or a folder of checkpoints.
        ranks: The ranks that load it.
        progress: Called with the bytes that this rank has verified, and their total.
        verifies: Whether to verify all files. If False, only the manifest, the metadata and file sizes are checked.

    Raises:
        CheckpointError: There is none, or none is intact. The same error is raised on every rank.
    """
    doing = f"loading {path}"
    # Relative paths, because the same checkpoint can have another path on another host.
    names = ranks.once(doing, lambda: [found.relative_to(path) for found in _found(path)])
    found = [path / name for name in names]
    refused: list[str] = []
    for candidate in found:
        try:
            opened = _opened(candidate, ranks, progress, verifies)
        except CheckpointError as error:
            if len(found) == 1:
                raise
            refused.append(str(error))
            if ranks.leads:
                logger.warning("%s Falling back to the previous checkpoint.", shown(str(error), lines=True))
        else:
            return opened
    raise CheckpointError(f"{doing}: none of its {len(found)} checkpoints is intact. {' '.join(refused)}")


def _found(path: Path) -> list[Path]:
    """Return the checkpoint at `path`, or the checkpoints in the folder `path`, the newest first."""
    if (path / MANIFEST).exists() or (path / container.METADATA).exists():
        return [path]
    found = [entry.path for entry in entries(path)]
    if found:
        return found
    if step_of(path) is not None:  # a damaged checkpoint
        return [path]
    if path.is_file():
        raise CheckpointError(
            f"{path.name} is a file, but a checkpoint is a folder. Use model.load_state_dict(torch.load(path)) for a "
            "file written by torch.save, and fullshard.checkpoint.load_safetensors for safetensors."
        )
    raise CheckpointError(
        "found no complete checkpoint there. Pass a checkpoint, such as folder/step-000000100, or a folder of "
        "checkpoints."
    )


def _opened(path: Path, ranks: GroupRanks, progress: Progress | None, verifies: bool) -> Opened:
    doing = f"loading {path}"

    def read_manifest() -> Manifest | None:
        """Return the manifest of a checkpoint; None for a checkpoint of another program, which has none."""
        if not (path / MANIFEST).exists() and RECORD not in container.read_metadata(path).state_dict_metadata:
            return None
        return Manifest.read(path)  # raises an error if it is missing

    manifest = ranks.once(doing, read_manifest)
    if manifest is not None and verifies:
        verify(path, manifest.files, ranks, doing, "Load another checkpoint.", progress)
    metadata = ranks.do(doing, lambda: container.read_metadata(path))
    ranks.once(doing, lambda: container.check_files(path, metadata))
    return Opened(path, manifest, metadata, ranks)


def verify(
    folder: Path,
    files: Mapping[str, StoredFile],
    ranks: GroupRanks,
    doing: str,
    remedy: str,
    progress: Progress | None = None,
) -> None:
    """Compare `files` in `folder` with their checksums. Each rank checks some of them.

    Raises:
        CheckpointError: Some files are damaged. The same error is raised on every rank.
    """
    local = _shares(files, ranks.world)[ranks.index]
    by_rank = ranks.share(doing, lambda: list(damage_in(folder, local, progress=progress)))
    damage = [item for of_rank in by_rank for item in of_rank]
    if damage:
        more = f" ({len(damage) - 1} more files are damaged)" if len(damage) > 1 else ""
        raise CheckpointError(f"{doing}: {damage[0]}{more}. {remedy}")


def _shares(files: Mapping[str, StoredFile], world: int) -> list[dict[str, StoredFile]]:
    """Divide the files over the ranks, with a similar number of bytes for each."""
    shares: list[dict[str, StoredFile]] = [{} for _ in range(world)]
    for name, stored in sorted(files.items(), key=lambda item: -item[1].nbytes):
        least = min(shares, key=lambda share: sum(item.nbytes for item in share.values()))
        least[name] = stored
    return shares
