"""Processes that die at a chosen operation on files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fullshard.checkpoint.keeper import named
from fullshard.testing import RanksFailed, run_ranks


def die_before(operation: int, folder: Path) -> None:
    """End this process, as SIGKILL would, before the operation of that number on files in `folder`; the first is 1."""
    count = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        path = str(args[0]) if args and isinstance(args[0], str | os.PathLike) else ""
        within = path and str(named(Path(path))).startswith(str(folder))
        if within and (event == "open" or event.startswith(("os.", "shutil."))):
            count += 1
            if count == operation:
                os._exit(9)

    sys.addaudithook(hook)


def ended_well(world: int, function: Callable[..., Any], *args: Any) -> bool:
    """Return True if all ranks finished, and False if `die_before` ended one."""
    try:
        run_ranks(world, function, *args)
    except RanksFailed as failed:
        assert any(failure.kind == "exit" for failure in failed.failures.values()), failed
        return False
    return True
