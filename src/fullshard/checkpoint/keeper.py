"""The memory of safety copies: a folder of files in memory, and the keeper, a process that removes it.

When a rank is lost, the ranks of its host are restarted. So a copy must outlive the ranks, but not their launcher. A
separate process, the keeper, waits until the launcher ends for any reason, and then removes the folder. This file is
also the program of that process. It imports nothing from this package, so it takes 10 MB and starts fast.

[Note: a folder that other users can see]
Every user of the host can create files in /dev/shm. So the folder has a random name, and only its owner can access it.
Ranks find it by the record of their launcher in it. This record is only read if the folder is a real folder of this
user without access for others. /dev/shm is sticky, so no other user can rename or replace the folder. A process that
uses the folder opens it once, checks the opened folder, and accesses the files through its descriptor. If the folder is
removed and another user creates one with the same name, nothing is written there.
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

MEMORY = Path("/dev/shm")
_PREFIX = "fullshard-"
_RECORD = "kept"  # the file with the identity of the launcher; the keeper locks this file as long as it runs
_RECORD_NBYTES = 4096  # more than any record has
_OPENED = Path("/proc/self/fd")


def keeps_folders(launcher: int, memory: Path = MEMORY) -> bool:
    """Return True if this system has a folder in memory, and supports waiting for `launcher`."""
    return memory.is_dir() and hasattr(os, "pidfd_open") and _started(launcher) is not None


def launcher_identity(launcher: int) -> str:
    """Return text that identifies the process `launcher` among all past and present processes of this host."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {_pid_namespace()} {launcher} {_started(launcher)}"


def kept_folder(launcher: int, memory: Path = MEMORY) -> Path:
    """Return a folder in the memory of this host that exists until the process `launcher` ends.

    Later calls return the same folder. Only one process of the host may call this at a time. Folders of launchers that
    were killed together with their keepers are removed. See [Note: a folder that other users can see].

    Raises:
        PermissionError: Every user may rename the files of others in `memory`.
    """
    mode = memory.stat().st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        raise PermissionError(
            f"{memory} has mode {stat.S_IMODE(mode):o}: other users can rename and replace its contents. Set its "
            "sticky bit (chmod +t), or mount it as the system does by default."
        )
    identity = launcher_identity(launcher)
    found = None
    for path in sorted(memory.glob(f"{_PREFIX}*")):
        with suppress(OSError), _record_of(path, os.O_RDWR) as record:  # it belongs to another user, or was removed
            recorded = os.read(record, _RECORD_NBYTES).decode(errors="replace")
            if recorded == identity:
                found = path
            elif _is_left(record, recorded):
                shutil.rmtree(path, ignore_errors=True)
    return found if found is not None and _has_keeper(found, launcher) else _new_folder(launcher, identity, memory)


@contextmanager
def opened_folder(folder: Path) -> Iterator[int]:
    """Context manager that opens `folder` and yields its descriptor.

    Raises:
        PermissionError: It is not a folder of this user without access for others.
        OSError: It is a link, is not a folder, or does not exist.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise PermissionError(
                f"{folder} belongs to user {found.st_uid} and has mode {stat.S_IMODE(found.st_mode):o}, but must "
                f"belong to user {os.geteuid()} and have mode 700. Another user may have created it."
            )
        yield descriptor
    finally:
        os.close(descriptor)


def named(path: Path) -> Path:
    """Return the name of `path` in the file system, if `path` contains the descriptor of a folder."""
    if not path.is_relative_to(_OPENED):
        return path
    descriptor, *below = path.relative_to(_OPENED).parts
    return Path(os.readlink(_OPENED / descriptor), *below)


@contextmanager
def _record_of(folder: Path, flags: int) -> Iterator[int]:
    """Context manager that opens the record in `folder` and yields its descriptor."""
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    with opened_folder(folder) as within:
        descriptor = os.open(_RECORD, flags, 0o600, dir_fd=within)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def _is_left(record: int, recorded: str) -> bool:
    """Return True if the launcher of this record, or in another container its keeper, has ended."""
    words = recorded.split()
    if len(words) != 4 or not words[2].isdecimal():
        return False  # it is being created, or damaged
    _, namespace, launcher, started = words
    if namespace == _pid_namespace():
        return _started(int(launcher)) != started
    return _locks(record)  # it belongs to another container, whose launcher is not visible, unlike the keeper's lock


def _locks(record: int) -> bool:
    """Lock the record until the descriptor is closed. Return False if another process holds the lock."""
    try:
        fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _has_keeper(folder: Path, launcher: int) -> bool:
    """Start a keeper for `folder` if it has none. Return False if the folder no longer exists."""
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
    """Start a keeper, which inherits the lock. It gets a new session, because the launcher ends those of the ranks."""
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
    """Return the start time of a process in kernel ticks; None if the process does not exist."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _keep(launcher: int, folder: Path) -> None:
    """Remove `folder` once the process `launcher` has ended."""
    for requested in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # the launcher may take a while to end
        signal.signal(requested, signal.SIG_IGN)
    if os.fork():
        return  # the parent continues and has no child to wait for
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(launcher)
        select.select([descriptor], [], [])
    # Ranks that outlive the launcher do not create the folder again, because they have opened this one.
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _keep(int(sys.argv[1]), Path(sys.argv[2]))
