"""The memory of safety copies: a folder of files in memory, and a process that removes it, the keeper.

The ranks of a host are restarted when one is lost, so a copy must outlive them; it must not outlive the launcher that
starts them. A process of its own, the keeper, waits for the launcher to end, however it does, and removes the folder
then. This file is that process's program, too: it imports nothing of ours, and so takes 10 MB and no time.

[Note: a folder among those of other users]
Every user of the host can make files in /dev/shm. So the name of the folder is random, only its owner can enter it, and
it is not found by its name: it holds a record of the launcher that it belongs to, which counts only if the folder is a
real folder of this user, closed to all others. /dev/shm is sticky, so nobody else can rename or replace the folder. A
process that uses it opens it once, checks what it has opened, and reaches the files through the descriptor: if the
folder is removed and another user makes one of the same name, nothing is written there.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["MEMORY", "keeps_folders", "kept_folder", "launcher_identity", "named", "opened_folder"]

MEMORY = Path("/dev/shm")
_PREFIX = "fullshard-"
_RECORD = "kept"  # the file with the identity of the launcher; its keeper holds a lock on it as long as it lives
_RECORD_NBYTES = 4096  # more than any record has
_OPENED = Path("/proc/self/fd")


def keeps_folders(launcher: int, memory: Path = MEMORY) -> bool:
    """True if this system has a folder in memory, and the means to watch `launcher`."""
    return memory.is_dir() and hasattr(os, "pidfd_open") and _started(launcher) is not None


def launcher_identity(launcher: int) -> str:
    """Text that only the process `launcher` has, among all that run or ran on this host."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {_pid_namespace()} {launcher} {_started(launcher)}"


def kept_folder(launcher: int, memory: Path = MEMORY) -> Path:
    """Return a folder in the memory of this host that is there as long as the process `launcher` lives.

    Another call finds the same folder as long as that process lives. Only one process of the host may call this at a
    time. Folders of launchers whose keepers were killed with them are removed. See [Note: a folder among those of other
    users].

    Raises:
        PermissionError: every user may rename what others have in `memory`.
    """
    mode = memory.stat().st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        raise PermissionError(
            f"{memory} has mode {stat.S_IMODE(mode):o}: other users can rename and replace what is in it. Set its "
            "sticky bit (chmod +t), or mount it as the system does."
        )
    identity = launcher_identity(launcher)
    found = None
    for path in sorted(memory.glob(f"{_PREFIX}*")):
        with suppress(OSError), _record_of(path, os.O_RDWR) as record:  # of another user, or gone meanwhile
            recorded = os.read(record, _RECORD_NBYTES).decode(errors="replace")
            if recorded == identity:
                found = path
            elif _is_left(record, recorded):
                shutil.rmtree(path, ignore_errors=True)
    return found if found is not None and _has_keeper(found, launcher) else _new_folder(launcher, identity, memory)


@contextmanager
def opened_folder(folder: Path) -> Iterator[int]:
    """Open `folder`; a descriptor of it, closed at the end.

    Raises:
        PermissionError: it is not a folder of this user that is closed to all others.
        OSError: it is a link, or no folder, or not there.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise PermissionError(
                f"{folder} belongs to user {found.st_uid} and has mode {stat.S_IMODE(found.st_mode):o}, but must "
                f"belong to user {os.geteuid()} and have mode 700. Another user may have made it."
            )
        yield descriptor
    finally:
        os.close(descriptor)


def named(path: Path) -> Path:
    """`path` by its name in the file system, if it leads through the descriptor of a folder."""
    if not path.is_relative_to(_OPENED):
        return path
    descriptor, *below = path.relative_to(_OPENED).parts
    return Path(os.readlink(_OPENED / descriptor), *below)


@contextmanager
def _record_of(folder: Path, flags: int) -> Iterator[int]:
    """A descriptor of the record in `folder`.

    Raises:
        OSError: there is none, or the folder is not this user's own.
    """
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    with opened_folder(folder) as within:
        descriptor = os.open(_RECORD, flags, 0o600, dir_fd=within)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def _is_left(record: int, recorded: str) -> bool:
    """True if the launcher of this record has ended, and its keeper cannot remove the folder any more."""
    if len(recorded.split()) != 4:
        return False  # it is being made
    _, namespace, launcher, started = recorded.split()
    if namespace == _pid_namespace():
        return _started(int(launcher)) != started
    return _locks(record)  # of another container, whose launcher cannot be seen from here, but whose keeper can


def _locks(record: int) -> bool:
    """True if nobody else has the lock of the record, which is then held until the descriptor is closed."""
    try:
        fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _has_keeper(folder: Path, launcher: int) -> bool:
    """True once `folder` has a keeper; False if the folder is gone."""
    try:
        with _record_of(folder, os.O_RDWR) as record:
            if _locks(record):
                _start_keeper(launcher, folder, record)
    except FileNotFoundError:
        return False
    return True


def _new_folder(launcher: int, identity: str, memory: Path) -> Path:
    folder = memory / f"{_PREFIX}{os.urandom(16).hex()}"
    folder.mkdir(mode=0o700)
    try:
        with _record_of(folder, os.O_RDWR | os.O_CREAT | os.O_EXCL) as record:
            fcntl.flock(record, fcntl.LOCK_EX)
            os.write(record, identity.encode())
            _start_keeper(launcher, folder, record)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def _start_keeper(launcher: int, folder: Path, record: int) -> None:
    """Start a keeper, which takes over the lock. Its session is its own, since the launcher ends those of the ranks."""
    subprocess.run(
        [sys.executable, "-I", "-S", __file__, str(launcher), str(folder), str(record)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(record,),
        start_new_session=True,
        check=True,
        cwd="/",
    )


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _started(process: int) -> str | None:
    """The start of a process, in the kernel's ticks; None if there is none of this number."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _keep(launcher: int, folder: Path) -> None:
    """Remove `folder` once the process `launcher` has ended."""
    for asked in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # the launcher has them too, and may take its time
        signal.signal(asked, signal.SIG_IGN)
    if os.fork():
        return  # whoever has started this goes on, and has no child to look after
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(launcher)
        select.select([descriptor], [], [])
    # Ranks that the launcher leaves behind do not make the folder again: they have opened this one.
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _keep(int(sys.argv[1]), Path(sys.argv[2]))
