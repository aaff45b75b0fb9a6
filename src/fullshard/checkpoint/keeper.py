"""The memory of safety copies: a folder of files in memory, and a process that removes it, the keeper.

The ranks of a host are started anew when one is lost, so a copy must outlive them; it must not outlive the launcher
that starts them. So the folder is named after the launcher, and a process of its own, the keeper, waits for the
launcher to end, however it does, and removes the folder then. This file is that process's program, too: it imports
nothing of ours, and so takes 10 MB and no time.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

__all__ = ["MEMORY", "keeps_folders", "kept_folder"]

MEMORY = Path("/dev/shm")
_LOCK = "kept"  # the file that a keeper holds a lock on as long as it lives


def keeps_folders(launcher: int, memory: Path = MEMORY) -> bool:
    """True if this system has a folder in memory, and the means to watch `launcher`."""
    return memory.is_dir() and hasattr(os, "pidfd_open") and _started(launcher) is not None


def kept_folder(launcher: int, memory: Path = MEMORY) -> Path:
    """A folder in the memory of this host that is there as long as the process `launcher` lives.

    Another call finds the same folder as long as that process lives. Folders of launchers whose keepers were killed
    with them are removed.
    """
    for left in memory.glob(f"fullshard-{os.getuid()}-*"):
        named = re.fullmatch(r"fullshard-\d+-(\d+)-(\d+)", left.name)
        if named is not None and _started(int(named[1])) != named[2]:
            shutil.rmtree(left, ignore_errors=True)
    folder = memory / f"fullshard-{os.getuid()}-{launcher}-{_started(launcher)}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return folder  # it has its keeper
        # The lock goes over to the keeper. Its session is its own, since the launcher ends those of the ranks.
        subprocess.run(
            [sys.executable, "-I", "-S", __file__, str(launcher), str(folder), str(lock.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(lock.fileno(),),
            start_new_session=True,
            check=True,
            cwd="/",
        )
    return folder


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
    # Ranks that the launcher leaves behind cannot make the folder again: see safety_copy.py.
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _keep(int(sys.argv[1]), Path(sys.argv[2]))
