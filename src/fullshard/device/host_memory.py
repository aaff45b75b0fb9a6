"""Available memory of this host: of the machine, and of the container or job of this process.

[Note: groups of the kernel]
A container or a Slurm job is a control group. The kernel enforces its limit by killing a process, and does not include
it in `/proc/meminfo`. Groups are nested, so the limit is the minimum of the available memory of all groups that contain
this process. The usage of a group includes cached pages of files, which the kernel frees when it needs memory. Version
2 of the groups has one tree, version 1 has a separate one for memory. Inside a container, its group may be the top
of the tree, under a different name than outside. So missing folders are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_MACHINE = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class _Tree:
    """A hierarchy of control groups, with the names of its memory files."""

    top: str
    limit: str
    used: str
    taken_back: tuple[str, ...]  # used bytes that the kernel can reclaim, by name in `memory.stat`


_SECOND = _Tree(top="", limit="memory.max", used="memory.current", taken_back=("inactive_file", "active_file"))
_FIRST = _Tree(
    top="memory",
    limit="memory.limit_in_bytes",
    used="memory.usage_in_bytes",
    taken_back=("total_inactive_file", "total_active_file"),
)


def share_of_host(ranks: int) -> int | None:
    """Return the bytes of host memory that each of `ranks` ranks on this host may allocate beyond its current usage.

    This is its share of the available memory, minus a tenth for other programs. None if the kernel does not report it.
    """
    room = host_room()
    return None if room is None else room * 9 // 10 // ranks


def host_room() -> int | None:
    """Return the bytes that this process can still allocate, limited by the machine and the groups around it.

    See [Note: groups of the kernel]. None if the kernel does not report it.
    """
    rooms = [*_left_in_groups()]
    if (available := available_bytes()) is not None:
        rooms.append(available)
    return min(rooms, default=None)


def available_bytes() -> int | None:
    """Return the bytes of this machine's available memory; None if the kernel does not report it."""
    try:
        return bytes_by_name(_MACHINE)["MemAvailable"]
    except (OSError, KeyError):
        return None


def bytes_by_name(path: Path) -> dict[str, int]:
    """Return the bytes by name from the lines `name:  number kB` of a file."""
    words = (line.split() for line in path.read_text().splitlines())
    return {parts[0].rstrip(":"): int(parts[1]) * 1024 for parts in words if len(parts) == 3 and parts[2] == "kB"}


def _left_in_groups() -> Iterator[int]:
    """Yield the available bytes of each control group with a limit that contains this process."""
    for tree, folder in _groups():
        with suppress(OSError, ValueError):  # no such group; or its limit is "max"
            yield _left(tree, folder)


def _groups() -> Iterator[tuple[_Tree, Path]]:
    """Yield the control groups that contain this process, innermost first, in each tree with a memory controller."""
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
