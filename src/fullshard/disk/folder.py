"""The folder that files lie in: which file system it is on, what is free there, and why it may be the wrong one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fullshard.errors import DiskError

__all__ = ["IN_MEMORY", "MOUNTS", "Mount", "free_bytes", "made", "mount_of", "why_unfit"]

MOUNTS = Path("/proc/self/mountinfo")
IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
"""File systems that lie in memory."""
_OVER_A_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "beegfs", "9p", "afs", "glusterfs", "ocfs2"}
)


@dataclass(frozen=True)
class Mount:
    """Where a file system is mounted."""

    point: Path
    kind: str  # as the system calls it: "ext4", "tmpfs", ...


def mount_of(folder: Path) -> Mount | None:
    """What `folder` is on; None where the system does not tell."""
    try:
        lines = MOUNTS.read_text().splitlines()
    except OSError:
        return None
    path = folder.resolve()
    found = None
    for line in lines:  # the last of those mounted at one point hides the others
        mount = _parsed(line)
        if path.is_relative_to(mount.point) and (found is None or mount.point.is_relative_to(found.point)):
            found = mount
    return found


def _parsed(line: str) -> Mount:
    """One line of mountinfo: number, parent, device, root, point, options, tags until "-", kind, source, options."""
    point = line.split(" ")[4].encode().decode("unicode_escape")  # a space is written \040
    return Mount(Path(point), line.partition(" - ")[2].split(" ")[0])


@contextmanager
def made(folder: Path, what: str = "a scratch file") -> Iterator[None]:
    """A context in which `folder` is there, to make `what` in.

    Raises:
        DiskError: it cannot be made, or the system refused what was done in it.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise DiskError(f"{folder} is a file, and no folder for {what}. Name one on a disk of this machine.")
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except DiskError:  # which is an OSError, and says more
        raise
    except OSError as error:
        raise DiskError(
            f"{folder}: {error.strerror} (errno {error.errno}), when {what} was to be made there. Name another folder, "
            "on a disk of this machine."
        ) from error


def free_bytes(folder: Path) -> int:
    """Bytes that this user can still write to the file system of `folder`."""
    told = os.statvfs(folder)
    return told.f_bavail * told.f_frsize


def why_unfit(folder: Path) -> str | None:
    """Why `folder` is a bad place to offload to, if it is: memory again, or another machine's disk."""
    mount = mount_of(folder)
    if mount is None:
        return None
    if mount.kind in IN_MEMORY:
        return f"{mount.point} is {mount.kind}, which lies in this machine's memory: what goes there frees none"
    if mount.kind in _OVER_A_NETWORK or mount.kind.startswith("fuse."):
        return f"{mount.point} is {mount.kind}, and every byte may go over a network, in every step"
    return None
