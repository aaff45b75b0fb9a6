"""`fullshard train`: check everything, then train on this rank or start the ranks that do."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from rich.console import Console

from fullshard.train.check import check, check_ranks
from fullshard.train.options import parse_settings
from fullshard.train.progress import restore_terminal
from fullshard.train.ranks import process_group, rank_from_environment, ranks_of_machine, runs_under_torchrun
from fullshard.train.run_folder import free_folder

__all__ = ["run"]


def run(argv: Sequence[str]) -> int:
    """Train as `argv` says; the exit code.

    Raises:
        ConfigError: something about the run is not sound. No process group has started then.
    """
    return _train_on_this_rank(argv) if runs_under_torchrun() else _start_ranks(argv)


def _start_ranks(argv: Sequence[str]) -> int:
    settings = parse_settings(argv)
    asked = settings.parallelism.ranks
    ranks = ranks_of_machine() if asked is None else asked
    check(settings, ranks)
    out = settings.run.out or free_folder(settings)

    from fullshard.train.launch import (
        INTERRUPTED,
        launch,
    )  # late: it is slow to import, and a mistake is answered without it

    code = launch("fullshard.cli", ["train", *argv, "--out", str(out)], ranks)
    if code == INTERRUPTED:
        restore_terminal(Console())
    return code


def _train_on_this_rank(argv: Sequence[str]) -> int:
    # Ctrl-C ends a rank at once and in silence: it may be waiting for a rank that is already gone.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    settings = parse_settings(argv)
    rank = rank_from_environment()
    check_ranks(settings.parallelism.ranks, rank.world)
    source = check(settings, rank.world, rank.machines)

    from fullshard.train.loop import train  # late: it pulls in the engine

    with process_group(rank):
        train(settings, source, rank)
    return 0
