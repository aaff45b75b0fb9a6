"""Safe reads of untrusted files, and writes with the errors of this package.

Only regular files are read, and none larger than the reader expects.

A FIFO or a device in place of a file would block its reader, or never end. Such files raise an `OSError` whose
`strerror` describes what was found, so callers handle them like a file that cannot be read.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fullshard.errors import ConfigError

CONFIG_BYTES = 64 << 20  # the largest configuration file that is read

UNPARSED = (ValueError, LookupError, AttributeError, RecursionError)
"""The errors of parsers of JSON, TOML and YAML for invalid text, in addition to `yaml.YAMLError`."""

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK  # a FIFO without a writer does not block then
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: str | os.PathLike[str], *, limit: int | None = None) -> io.BufferedReader:
    """Open a regular file, or a link to one, for reading.

    The type is checked before the file is opened, since opening a device can have effects, and again on the open
    descriptor, since another process may replace the file in between.

    Raises:
        OSError: It is missing, is not a regular file, or is larger than `limit`.
    """
    return io.BufferedReader(open_unbuffered(path, limit=limit))


def open_unbuffered(path: str | os.PathLike[str], *, limit: int | None = None) -> io.FileIO:
    """Open a file as `open_regular` does, without a buffer."""
    _check(os.stat(path), path, limit)
    descriptor = os.open(path, _FLAGS)
    try:
        _check(os.fstat(descriptor), path, limit)
        return io.FileIO(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | os.PathLike[str], *, limit: int) -> bytes:
    """Return the bytes of a regular file.

    Raises:
        OSError: As for `open_regular`, or the file has grown beyond `limit` since it was opened.
    """
    with open_regular(path, limit=limit) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise _too_large(len(data), path, limit)
    return data


def read_text(path: str | os.PathLike[str], *, limit: int) -> str:
    """Return the text of a regular file in UTF-8.

    Raises:
        OSError: As for `read_regular`.
        UnicodeDecodeError: The bytes are not UTF-8.
    """
    return read_regular(path, limit=limit).decode("utf-8")


@contextmanager
def reopened(path: Path) -> Iterator[Path]:
    """Yield a path of a regular file for libraries that open files by path.

    On Linux the yielded path refers to the descriptor that was checked, so nothing else can be opened by it.

    Raises:
        OSError: As for `open_regular`.
    """
    with open_regular(path) as file:
        same = Path(f"/proc/self/fd/{file.fileno()}")
        yield same if same.exists() else path


@contextmanager
def writing(path: str | os.PathLike[str], *, option: str = "", instead: str = "another file") -> Iterator[None]:
    """Context manager for writing a file that converts errors of the operating system.

    Args:
        path: The file.
        option: The command-line option that names it, such as "--json".
        instead: The alternative to suggest to the user.

    Raises:
        ConfigError: The system rejected an operation, for example because the disk is full.
    """
    try:
        yield
    except OSError as error:
        named = f"{option} {os.fspath(path)}".lstrip()
        room = "Free space on that disk, or choose" if error.errno in _FULL else "Name"
        raise ConfigError(f"{named}: cannot be written ({error.strerror or error}). {room} {instead}.") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Context manager that yields the path of a new file. It replaces `path` on success, and is removed on failure."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield unfinished
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise


def is_too_long(value: object) -> bool:
    """Return True for an integer of more than 63 bits. Python refuses to write very long ones in messages."""
    return isinstance(value, int) and value.bit_length() > 63


def is_plain_name(name: object) -> bool:
    """Return True if `name` is a printable name of a file, without folders."""
    return (
        isinstance(name, str)
        and 0 < len(name.encode(errors="replace")) < 256
        and name.isprintable()
        and "/" not in name
        and name not in (".", "..")
    )


def _check(found: os.stat_result, path: str | os.PathLike[str], limit: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise OSError(errno.EINVAL, f"expected a regular file, but it is {kind}", os.fspath(path))
    if limit is not None and found.st_size > limit:
        raise _too_large(found.st_size, path, limit)


def _too_large(nbytes: int, path: str | os.PathLike[str], limit: int) -> OSError:
    return OSError(errno.EFBIG, f"expected at most {limit} bytes, but it has {nbytes}", os.fspath(path))
