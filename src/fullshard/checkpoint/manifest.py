"""The manifest of a complete checkpoint: step, origin, and size and checksum of every file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from fullshard.errors import CheckpointError

__all__ = ["MANIFEST", "Manifest", "Progress", "StoredFile", "damage_in", "step_of"]

MANIFEST = "manifest.json"
FORMAT = 1
_PIECE_NBYTES = 4 << 20

Progress = Callable[[int, int], None]
"""Called with the bytes that this rank has done, and the bytes that it has to do."""


@dataclass(frozen=True)
class StoredFile:
    """A file as it was written."""

    nbytes: int
    checksum: str  # xxh3_128, in hexadecimal digits


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A checkpoint's own account of itself. It is the last file to be written."""

    id: str
    step: int
    number: int  # counts the saves to a folder: the newest has the highest, even if a run went back some steps
    world: int
    strategy: str
    versions: Mapping[str, str]
    saved_at: str  # UTC, as in ISO 8601
    files: Mapping[str, StoredFile]

    @property
    def nbytes(self) -> int:
        """Bytes of all files but the manifest itself."""
        return sum(stored.nbytes for stored in self.files.values())

    def dumps(self) -> str:
        """The text of the manifest, with a checksum over its content."""
        content = {"format": FORMAT, **asdict(self)}
        return json.dumps({"checksum": _checksum(content), "content": content}, indent=1)

    @classmethod
    def read(cls, checkpoint: Path) -> Manifest:
        """The manifest of `checkpoint`.

        Raises:
            CheckpointError: it is missing or damaged, or is that of another step.
        """
        path = checkpoint / MANIFEST
        expected, found = "the manifest of a complete checkpoint", ""
        try:
            document = json.loads(path.read_bytes())
            content: dict[str, Any] = document["content"]
            if document["checksum"] == _checksum(content):
                step = step_of(checkpoint)
                if content.pop("format") != FORMAT:
                    expected, found = f"a manifest of format {FORMAT}", "one of another version of fullshard"
                elif step not in (None, content["step"]):
                    expected, found = f"the manifest of step {step}", f"that of step {content['step']}"
                else:
                    files = {name: StoredFile(**stored) for name, stored in content.pop("files").items()}
                    return cls(**content, files=files)
            else:
                expected, found = f"the checksum {document['checksum']}", _checksum(content)
        except OSError as error:
            found = f"none ({error.strerror})"
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            found = f"a file that cannot be understood ({error})"
        raise CheckpointError(f"{path}: expected {expected}, found {found}. Load another checkpoint.")


def step_of(checkpoint: Path) -> int | None:
    """The step in the name of a checkpoint's folder; None if it has a name of another kind."""
    match = re.match(r"step-(\d+)(\.|$)", checkpoint.name)
    return int(match[1]) if match else None


def _checksum(content: Any) -> str:
    return xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()


def damage_in(
    checkpoint: Path, files: Mapping[str, StoredFile], *, reads: bool = True, progress: Progress | None = None
) -> Iterator[str]:
    """The damage in `files` of `checkpoint`: for each file that is not as it was written, what was expected and found.

    Args:
        reads: compare checksums, for which all is read once; else sizes only.
    """
    total = sum(stored.nbytes for stored in files.values())
    done = 0
    for name, stored in files.items():
        path, wrong = checkpoint / name, None
        try:
            nbytes = path.stat().st_size
            if nbytes != stored.nbytes:
                wrong = f"expected {stored.nbytes} bytes, found {nbytes}"
            elif reads:
                checksum = xxh3_128()
                for piece in _pieces(path):
                    checksum.update(piece)
                    done += len(piece)
                    if progress is not None:
                        progress(done, total)
                if checksum.hexdigest() != stored.checksum:
                    wrong = f"expected the checksum {stored.checksum}, found {checksum.hexdigest()}"
        except OSError as error:
            wrong = f"expected {stored.nbytes} bytes, found a file that cannot be read ({error.strerror})"
        if wrong is not None:
            yield f"{path}: {wrong}"


def _pieces(path: Path) -> Iterator[memoryview]:
    room = memoryview(bytearray(_PIECE_NBYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(room):
            yield room[:count]
