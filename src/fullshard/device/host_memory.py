"""The memory of this host that programs can still get: of the machine, and of the container or job that they are in.

[Note: groups of the kernel]
A container, or a job of Slurm's, is a control group, whose limit the kernel holds by ending a process: it says nothing
of it in `/proc/meminfo`. Groups lie within one another, so the least of what is left in each of those around this
process counts. What a group uses includes pages of files that were read, which the kernel takes back when it needs
them. Version 2 of the groups has one tree, version 1 one for memory; in a container its own group may be the tree's
top, whatever it is called outside, so folders that are not there are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["available_bytes", "bytes_by_name", "host_room", "share_of_host"]

_MACHINE = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class _Tree:
    """A tree of groups: the names of what each of its folders says of memory."""

    top: str
    limit: str
    used: str
    taken_back: tuple[str, ...]  # of what is used, in the group's `memory.stat`


_SECOND = _Tree(top="", limit="memory.max", used="memory.current", taken_back=("inactive_file", "active_file"))
_FIRST = _Tree(
    top="memory",
    limit="memory.limit_in_bytes",
    used="memory.usage_in_bytes",
    taken_back=("total_inactive_file", "total_active_file"),
)


def share_of_host(ranks: int) -> int | None:
    """Bytes of this host's memory that one of so many ranks on it may take beyond what it has: its share of what there
    is room for, of which a tenth is left to others. None if the kernel does not tell.
    """
    room = host_room()
    return None if room is None else room * 9 // 10 // ranks


def host_room() -> int | None:
    """Bytes that programs can still get where this process is: on the machine, or within the groups around it, see
    [Note: groups of the kernel]. None if the kernel does not tell.
    """
    rooms = [*_left_in_groups()]
    if (available := available_bytes()) is not None:
        rooms.append(available)
    return min(rooms, default=None)


def available_bytes() -> int | None:
    """Bytes of this machine's memory that programs can still get; None if the kernel does not tell."""
    try:
        return bytes_by_name(_MACHINE)["MemAvailable"]
    except (OSError, KeyError):
        return None


def bytes_by_name(path: Path) -> dict[str, int]:
    """Bytes by name, of the lines `name:  number kB` of a file.

    Raises:
        OSError: it cannot be read.
    """
    words = (line.split() for line in path.read_text().splitlines())
    return {parts[0].rstrip(":"): int(parts[1]) * 1024 for parts in words if len(parts) == 3 and parts[2] == "kB"}


def _left_in_groups() -> Iterator[int]:
    """Bytes that can still be taken in each group around this process that has a limit."""
    for tree, folder in _groups():
        with suppress(OSError, ValueError):  # no such group; or its limit is "max"
            yield _left(tree, folder)


def _groups() -> Iterator[tuple[_Tree, Path]]:
    """The groups around this process, the innermost one first, in each tree that knows of memory."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:  # "4:memory:/path", or "0::/path"
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        tree = _FIRST if controllers else _SECOND
        inner = Path(path.lstrip("/"))
        yield from ((tree, _GROUPS / tree.top / folder) for folder in (inner, *inner.parents))


def _left(tree: _Tree, folder: Path) -> int:
    limit, used = (int((folder / name).read_text()) for name in (tree.limit, tree.used))
    stated = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return max(0, limit - used + sum(int(stated.get(name, 0)) for name in tree.taken_back))
