"""The text of a run: one memory-mapped file of bytes, split into training and validation text.

The files of a folder are copied into one cache file: training files first, then validation files. A single file is read
in place. The text is never fully in memory, and every batch depends only on the seed and the step.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from math import gcd
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fullshard.errors import ConfigError
from fullshard.regular_files import CONFIG_BYTES, UNPARSED, open_regular, read_regular, read_text, replacing, writing
from fullshard.train.run_folder import ANOTHER_OUT, METRICS

VALIDATION_SHARE = 20  # one part in twenty
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "node_modules"})
_END_OF_FILE = b"\n"


@dataclass(frozen=True)
class SourceFile:
    """One file of a folder of text."""

    name: str  # path from the folder, with forward slashes
    size: int  # bytes

    @property
    def validates(self) -> bool:
        """True if this file is used for validation. This depends on its name only, so all machines agree."""
        digest = sha256(self.name.encode("utf-8", "surrogateescape")).digest()
        return int.from_bytes(digest[:8], "big") % VALIDATION_SHARE == 0


@dataclass(frozen=True)
class TextSource:
    """The text named by the user, inspected but not read. `files` is empty if `root` is a single file."""

    root: Path
    files: tuple[SourceFile, ...]
    training_bytes: int
    validation_bytes: int


@dataclass(frozen=True)
class Text:
    """A memory-mapped file of bytes: training text first, validation text after it."""

    path: Path
    training_bytes: int
    validation_bytes: int

    @cached_property
    def training(self) -> np.memmap[tuple[int], np.dtype[np.uint8]]:
        """The training bytes, memory-mapped."""
        return np.memmap(self.path, dtype=np.uint8, mode="r", shape=(self.training_bytes,))

    @cached_property
    def validation(self) -> np.memmap[tuple[int], np.dtype[np.uint8]]:
        """The validation bytes, memory-mapped."""
        return np.memmap(
            self.path, dtype=np.uint8, mode="r", offset=self.training_bytes, shape=(self.validation_bytes,)
        )


@dataclass(frozen=True)
class Batch:
    """Bytes and the bytes that follow them; both int64 of shape (rows, seq)."""

    inputs: Tensor
    targets: Tensor


def find_text(text: Path | None) -> TextSource:
    """Return the text in `text`, a file or a folder. If None, return the Python sources of the standard library.

    Files of a folder are sorted. Hidden files, files with a NUL byte near the start, and the output of earlier runs are
    skipped. About one file in twenty is used for validation, or the last twentieth of a single file or a small folder.
    """
    if text is None:
        return _source_of_folder(Path(sysconfig.get_path("stdlib")), suffix=".py")
    if text.exists() and not text.is_dir():
        try:
            open_regular(text).close()
        except OSError as error:
            raise ConfigError(f"--text {text}: cannot be read ({error.strerror}). Pass a file or a folder.") from error
        size = text.stat().st_size
        held_back = size // VALIDATION_SHARE
        return TextSource(text, (), size - held_back, held_back)
    if text.is_dir():
        return _source_of_folder(text, suffix="")
    raise ConfigError(
        f"--text {text}: the file or folder does not exist. Pass another, or leave --text out for the standard library."
    )


def write_text(source: TextSource, cache: Path) -> Text:
    """Return the source as one mapped file: the file itself, or a copy of the folder in `cache` with an index.

    A cache of the same source is reused.
    """
    if not source.files:
        return Text(source.root, source.training_bytes, source.validation_bytes)
    text = Text(cache / "text.bin", source.training_bytes, source.validation_bytes)
    index = {
        "root": str(source.root),
        "training_bytes": source.training_bytes,
        "files": [asdict(file) for file in source.files],
    }
    index_file = cache / "text.json"
    with suppress(OSError, *UNPARSED):  # the index is missing or invalid
        if json.loads(read_text(index_file, limit=CONFIG_BYTES)) == index:
            return text
    with writing(cache, instead=ANOTHER_OUT):
        cache.mkdir(parents=True, exist_ok=True)
    _write_whole(text.path, _contents(source))
    _write_whole(index_file, iter([json.dumps(index, indent=0).encode()]))
    return text


def training_batch(text: Text, *, seed: int, first: int, rows: int, seq: int) -> Batch:
    """Return the sequences `first` to `first + rows - 1` of the run, a pure function of `seed` and their indices."""
    starts = [window_start(seed, first + row, text.training_bytes, seq) for row in range(rows)]
    return _windows(text.training, starts, seq)


def validation_batches(
    text: Text, *, windows: int, rows: int, seq: int, rank: int = 0, world: int = 1
) -> Iterator[Batch]:
    """Yield the rows of one rank in each validation batch.

    There are `windows` windows, spread evenly over the validation text. They do not depend on `rows` or `world`. All
    ranks get the same number of batches, each with `rows` windows over all ranks. The last window is repeated to fill
    the last batch.
    """
    last_start = text.validation_bytes - seq - 1
    share = rows // world
    for first in range(rank * share, -(-windows // rows) * rows, rows):
        indices = (min(first + row, windows - 1) for row in range(share))
        yield _windows(text.validation, [index * last_start // max(1, windows - 1) for index in indices], seq)


def window_start(seed: int, index: int, total_bytes: int, seq: int) -> int:
    """Return the start, in bytes, of the `index`-th window. Each epoch visits every window of `seq` bytes once.

    An epoch cuts the text at a random phase into n windows and visits them in the order a * k + b modulo n, with `a`
    and `b` drawn from the seed and the epoch and `a` coprime to n. Windows overlap by one byte, which is only a target.
    """
    windows = max(1, (total_bytes - 1) // seq - 1)
    epoch, k = divmod(index, windows)
    phase = _draw(seed, epoch, 0) % max(1, min(seq, total_bytes - 1 - windows * seq))
    start = _draw(seed, epoch, 1)
    step = next(a for a in range(start, start + windows + 1) if gcd(a, windows) == 1)
    return phase + seq * ((step * k + _draw(seed, epoch, 2)) % windows)


def _draw(*key: int) -> int:
    """Return 64 random bits that depend only on the key, in every version of every library."""
    return int.from_bytes(sha256(repr(key).encode()).digest()[:8], "big")


def _windows(source: np.memmap[tuple[int], np.dtype[np.uint8]], starts: list[int], seq: int) -> Batch:
    rows = np.stack([source[start : start + seq + 1] for start in starts]).astype(np.int64)
    whole = torch.from_numpy(rows)
    return Batch(whole[:, :-1], whole[:, 1:])


def _source_of_folder(root: Path, suffix: str) -> TextSource:
    files = sorted(_text_files(root, suffix), key=lambda file: file.name)
    if not files:
        raise ConfigError(f"--text {root}: the folder contains no text files. Pass another folder, or a file.")
    files.sort(key=lambda file: file.validates)  # stable: training files first, each part in the order of names
    sizes = {part: sum(f.size + len(_END_OF_FILE) for f in files if f.validates is part) for part in (True, False)}
    held_back = sizes[True] if all(sizes.values()) else sum(sizes.values()) // VALIDATION_SHARE
    return TextSource(root, tuple(files), sum(sizes.values()) - held_back, held_back)


def _text_files(root: Path, suffix: str) -> Iterator[SourceFile]:
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(name for name in inner if name not in _SKIPPED_FOLDERS and not name.startswith("."))
        if METRICS in names:
            inner.clear()
            continue
        for name in names:
            path = Path(folder, name)
            if name.endswith(suffix) and not name.startswith(".") and _looks_like_text(path):
                yield SourceFile(path.relative_to(root).as_posix(), path.stat().st_size)


def _looks_like_text(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return b"\0" not in file.read(4096)
    except OSError:
        return False


def _contents(source: TextSource) -> Iterator[bytes]:
    for file in source.files:
        try:
            content = read_regular(source.root / file.name, limit=file.size)
        except OSError:  # it has grown, is missing, or is no longer a regular file
            content = b""
        if len(content) != file.size:
            raise ConfigError(
                f"--text {source.root}: {file.name} changed while it was read. Start again when it no longer changes."
            )
        yield content + _END_OF_FILE


def _write_whole(path: Path, parts: Iterator[bytes]) -> None:
    with writing(path, instead=ANOTHER_OUT), replacing(path) as unfinished, unfinished.open("wb") as file:
        file.writelines(parts)
