"""The `fullshard train` command: check all settings, then train on this rank or start the ranks."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import nullcontext

from rich.console import Console

from fullshard.train.check import check, check_ranks
from fullshard.train.options import COMMAND, parse_settings
from fullshard.train.progress import restore_terminal
from fullshard.train.ranks import (
    check_restarts,
    end_with_launcher,
    process_group,
    rank_from_environment,
    ranks_of_machine,
    runs_under_torchrun,
)
from fullshard.train.resuming import AUTO, resumed_settings
from fullshard.train.run_folder import free_folder, has_stopped
from fullshard.train.stopping import PREEMPTED

__all__ = ["COMMAND", "run"]

PATIENCE_S = 600  # time for stopped ranks to save


def run(argv: Sequence[str]) -> int:
    """Train with the options `argv` and return the exit code: 75 if SIGTERM stopped the run, which can be resumed."""
    return train_on_this_rank(argv) if runs_under_torchrun() else _start_ranks(argv)


def _start_ranks(argv: Sequence[str]) -> int:
    settings = parse_settings(argv)
    requested = settings.parallelism.ranks
    ranks = ranks_of_machine() if requested is None else requested
    check_restarts(settings.checkpoints.safety_copy_every)
    settings = resumed_settings(settings, ranks)
    check(settings, ranks)
    out = settings.run.out or free_folder(settings)
    saves = settings.checkpoints.checkpoint_every > 0
    argv = [*argv, "--out", str(out)]
    if settings.parallelism.on == "ray":
        from fullshard.train.on_ray import run_on_ray  # imported here, because Ray is optional

        resume = ["--resume", AUTO] if saves and settings.checkpoints.resume is None else []
        return run_on_ray([*argv, *resume], ranks, out, address=settings.parallelism.ray_address, restarts=saves)

    # Imported here, because this is slow, and not needed to report errors in the settings.
    from fullshard.train.launch import INTERRUPTED, launch

    code = launch("fullshard.cli", ["train", *argv], ranks, patience_s=PATIENCE_S if saves else 5)
    if code != INTERRUPTED:
        return code
    restore_terminal(Console(emoji=False))
    return PREEMPTED if has_stopped(out) else code


def train_on_this_rank(argv: Sequence[str], *, has_group: bool = False) -> int:
    """Train as one rank of several and return the exit code, as `run` does.

    Args:
        argv: Options of the trainer.
        has_group: Whether the launcher has created the process group, and calls this on a separate thread.
    """
    if not has_group:
        # Ctrl-C ends a rank immediately and without output: it may be waiting for a rank that has already ended.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        end_with_launcher()
    settings = parse_settings(argv)
    check_restarts(settings.checkpoints.safety_copy_every)
    rank = rank_from_environment()
    check_ranks(settings.parallelism.ranks, rank.world)
    settings = resumed_settings(settings, rank.world)
    source = check(settings, rank.world, rank.machines)

    from fullshard.train.loop import train  # imported here, because it imports the engine

    records = settings.run.report and not settings.optimization.capture
    with nullcontext() if has_group else process_group(rank):
        return train(settings, source, rank, predicts=settings.run.predict, records=records)
