"""Properties of a folder: its file system, its free space, and reasons not to offload to it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fullshard.errors import DiskError

MOUNTS = Path("/proc/self/mountinfo")
IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})  # file systems that are stored in memory
_OVER_A_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "beegfs", "9p", "afs", "glusterfs", "ocfs2"}
)


@dataclass(frozen=True)
class Mount:
    """A mounted file system."""

    point: Path
    kind: str  # the name of its type, such as "ext4" or "tmpfs"


def mount_of(folder: Path) -> Mount | None:
    """Return the file system of `folder`, or None if it is unknown."""
    try:
        lines = MOUNTS.read_text().splitlines()
    except OSError:
        return None
    path = folder.resolve()
    found = None
    for line in lines:  # the last mount at one point hides earlier ones
        # Number, parent, device, root, point, options, tags until "-", kind, source, options. A space is written \040.
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split(" ")[4])
        mount = Mount(Path(point), line.partition(" - ")[2].split(" ")[0])
        if path.is_relative_to(mount.point) and (found is None or mount.point.is_relative_to(found.point)):
            found = mount
    return found


@contextmanager
def creating(folder: Path, what: str = "a scratch file") -> Iterator[None]:
    """Context manager within which the caller creates `what` in `folder`. The folder is created first.

    Raises:
        DiskError: The system rejected an operation.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise DiskError(f"{folder} is a file, but {what} needs a folder. Choose a folder on a local disk.")
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except DiskError:  # a subclass of OSError with a better message
        raise
    except OSError as error:
        raise DiskError(
            f"{folder}: {error.strerror} (errno {error.errno}) while creating {what} there. Choose another folder, on "
            "a local disk."
        ) from error


def free_bytes(folder: Path) -> int:
    """Return the bytes that this user can still write to the file system of `folder`."""
    reported = os.statvfs(folder)
    return reported.f_bavail * reported.f_frsize


def why_unfit(folder: Path) -> str | None:
    """Return why `folder` is unsuitable for offloading (memory or a network file system), or None."""
    mount = mount_of(folder)
    if mount is None:
        return None
    if mount.kind in IN_MEMORY:
        return f"{mount.point} is {mount.kind}, which is in this machine's memory, so offloading to it frees none"
    if mount.kind in _OVER_A_NETWORK or mount.kind.startswith("fuse."):
        return f"{mount.point} is {mount.kind}, so every byte of every step may cross a network"
    return None
