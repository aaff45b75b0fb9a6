"""The manifest of a complete checkpoint: step, origin, and size and checksum of every file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from fullshard.errors import CheckpointError
from fullshard.regular_files import is_plain_name, open_unbuffered, read_regular

MANIFEST = "manifest.json"
FORMAT = 1
_MOST_NBYTES = 256 << 20
_LONGEST_LINE = 1 << 16
_PIECE_NBYTES = 4 << 20

Progress = Callable[[int, int], None]
"""Called with the bytes that this rank has processed, and the total that it has to process."""


@dataclass(frozen=True)
class StoredFile:
    """The size and checksum of a file as it was written."""

    nbytes: int
    checksum: str  # xxh3_128, in hexadecimal digits


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of a checkpoint. It is the last file to be written."""

    id: str
    step: int
    number: int  # counts the saves to this folder, even if a run resumes from an earlier step
    world: int
    strategy: str
    versions: Mapping[str, str]
    saved_at: str  # UTC, as in ISO 8601
    files: Mapping[str, StoredFile]

    @property
    def nbytes(self) -> int:
        """The bytes of all files except the manifest itself."""
        return sum(stored.nbytes for stored in self.files.values())

    def dumps(self) -> str:
        """Return the text of the manifest, with a checksum of its content."""
        content = {"format": FORMAT, **asdict(self)}
        return json.dumps({"checksum": _checksum(content), "content": content}, indent=1)

    @classmethod
    def read(cls, checkpoint: Path) -> Manifest:
        """Read the manifest of `checkpoint`."""
        path = checkpoint / MANIFEST
        expected, found = "the manifest of a complete checkpoint", ""
        try:
            content = _content(json.loads(read_regular(path, limit=_MOST_NBYTES)))
            step = step_of(checkpoint)
            if step in (None, content["step"]):
                return cls(**content)
            expected, found = f"the manifest of step {step}", f"that of step {content['step']}"
        except OSError as error:
            found = f"none ({error.strerror})"
        except _ManifestError as error:
            expected, found = error.expected or expected, error.found
        except (ValueError, RecursionError) as error:
            found = f"a file that cannot be understood ({error})"
        raise CheckpointError(f"{path}: expected {expected}, found {found}. Load another checkpoint.")


class _ManifestError(Exception):
    """The content of a manifest is not valid."""

    def __init__(self, found: str, expected: str = "") -> None:
        super().__init__(found)
        self.expected = expected
        self.found = found


def _content(document: Any) -> dict[str, Any]:
    """Return the fields of the manifest in `document`, an untrusted JSON value."""
    if not isinstance(document, dict) or document.keys() != {"checksum", "content"}:
        raise _ManifestError("something else")
    content = document["content"]
    if not _is_checksum(document["checksum"]):
        raise _ManifestError("one without a checksum")
    if document["checksum"] != (actual := _checksum(content)):
        raise _ManifestError(actual, f"the checksum {document['checksum']}")
    if isinstance(content, dict) and "format" in content and not _is_count(content["format"], FORMAT, FORMAT):
        raise _ManifestError("one of a different version of fullshard", f"a manifest of format {FORMAT}")
    odd = [name for name in _FIELDS if not isinstance(content, dict) or not _FIELDS[name](content.get(name))]
    if odd or content.keys() != _FIELDS.keys():
        raise _ManifestError(f"one whose {', '.join(odd) or 'list of fields'} is not valid")
    if content["world"] > len(content["files"]):
        raise _ManifestError(
            f"one of {content['world']} ranks with {len(content['files'])} files, fewer than one per rank"
        )
    fields = {name: content[name] for name in _FIELDS if name != "format"}
    return {**fields, "files": {name: StoredFile(**stored) for name, stored in content["files"].items()}}


def are_stored_files(value: Any) -> bool:
    """Return True if `value`, read from JSON, contains the sizes and checksums of files by name."""
    return isinstance(value, dict) and all(
        is_plain_name(name)
        and isinstance(stored, dict)
        and stored.keys() == {"nbytes", "checksum"}
        and _is_count(stored["nbytes"])
        and _is_checksum(stored["checksum"])
        for name, stored in value.items()
    )


def _is_count(value: Any, least: int = 0, most: int = (1 << 63) - 1) -> bool:
    return type(value) is int and least <= value <= most  # bool is an int, too


def _is_checksum(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None


def _is_line(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_LINE and value.isprintable()


_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "format": _is_count,
    "id": _is_line,
    "step": _is_count,
    "number": _is_count,
    "world": lambda value: _is_count(value, 1),
    "strategy": _is_line,
    "versions": lambda value: isinstance(value, dict) and all(map(_is_line, (*value, *value.values()))),
    "saved_at": _is_line,
    "files": are_stored_files,
}


def step_of(checkpoint: Path) -> int | None:
    """Return the step in the name of a checkpoint's folder; None for other names."""
    match = re.match(r"step-(\d+)(\.|$)", checkpoint.name)
    return int(match[1]) if match else None


def _checksum(content: Any) -> str:
    return xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()


def damage_in(
    checkpoint: Path, files: Mapping[str, StoredFile], *, reads: bool = True, progress: Progress | None = None
) -> Iterator[str]:
    """Yield the expected and actual state of each file in `checkpoint` that differs from `files`.

    Args:
        reads: Whether to compare checksums, which reads all files once. If False, only sizes are compared.
    """
    total = sum(stored.nbytes for stored in files.values())
    done = 0
    for name, stored in files.items():
        path, wrong = checkpoint / name, None
        try:
            with open_unbuffered(path) as file:
                nbytes = os.fstat(file.fileno()).st_size
                if nbytes != stored.nbytes:
                    wrong = f"expected {stored.nbytes} bytes, found {nbytes}"
                elif reads:
                    checksum, buffer = xxh3_128(), memoryview(bytearray(_PIECE_NBYTES))
                    while count := file.readinto(buffer):
                        checksum.update(buffer[:count])
                        done += count
                        if progress is not None:
                            progress(done, total)
                    if checksum.hexdigest() != stored.checksum:
                        wrong = f"expected the checksum {stored.checksum}, found {checksum.hexdigest()}"
        except OSError as error:
            wrong = f"expected {stored.nbytes} bytes, found a file that cannot be read ({error.strerror})"
        if wrong is not None:
            yield f"{path}: {wrong}"
