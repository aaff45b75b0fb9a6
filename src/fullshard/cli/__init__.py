"""The `fullshard` command and its subcommands."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import select
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fullshard.errors import CheckpointError, ConfigError, DiskError, MissingLibraryError, near_matches, shown
from fullshard.versions import all_versions

__all__ = ["main"]

FAILED, BAD_INPUT = 1, 2
CLOSED_PIPE = 141  # the exit code that a shell reports for SIGPIPE


@dataclass(frozen=True)
class Subcommand:
    """A subcommand: its summary line, and the module with its `run(argv) -> int`."""

    module: str
    does: str


SUBCOMMANDS = {
    "plan": Subcommand(
        "fullshard.planner.command", "predict which configurations fit, how fast they are, and print the code for them"
    ),
    "train": Subcommand("fullshard.train.command", "train a byte-level GPT with fully sharded data parallelism"),
    "parity": Subcommand(
        "fullshard.testing.parity.command", "compare sharded training with plain training, bit for bit"
    ),
    "checkpoint": Subcommand(
        "fullshard.cli.checkpoint.command", "list, inspect, verify, export and compare checkpoints"
    ),
    "report": Subcommand("fullshard.cli.report", "write a report of a run: what slows it down, what fills its memory"),
    "disk": Subcommand("fullshard.cli.disk", "measure the disk of a folder and predict the cost of offloading to it"),
    "calibrate": Subcommand("fullshard.cli.calibrate", "measure this machine for predictions"),
    "completion": Subcommand("fullshard.cli.completion", "print a completion script for bash, zsh or fish"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (`sys.argv` if None) and return its exit code. See `exit_code_of`."""
    arguments = sys.argv[1:] if argv is None else argv
    return exit_code_of(lambda: dispatch(arguments))


def exit_code_of(command: Callable[[], int]) -> int:
    """Run `command` and return its exit code.

    The code is 2 for invalid input, and 1 for an unusable checkpoint or disk or a missing library. One line on stderr
    explains the error. The code is 141 if the reader of stdout has closed the pipe.
    """
    atexit.register(_skip_last_collection)
    try:
        try:
            return command()
        except (ConfigError, CheckpointError, DiskError, MissingLibraryError) as error:
            if os.environ.get("RANK", "0") == "0":  # all ranks raise the same error, and one reports it
                print(f"fullshard: {shown(str(error), lines=True)}", file=sys.stderr)
            return BAD_INPUT if isinstance(error, ConfigError) else FAILED
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # otherwise a closed pipe is detected after this function
    except BrokenPipeError:
        poll = select.poll()
        poll.register(1, 0)  # errors are reported in any case
        if not any(events & select.POLLERR for _, events in poll.poll(0)):
            raise  # of another connection: the reader of stdout has not closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes the rest of the output when it exits
        return CLOSED_PIPE


def _skip_last_collection() -> None:
    """Skip the garbage collection at exit, which takes a second for torch, unless triton is loaded.

    At exit, triton 3.9 reports on stderr those of its objects that were not freed.
    """
    if "triton" in sys.modules:
        gc.unfreeze()  # the planner freezes objects
    else:
        gc.freeze()


def dispatch(argv: Sequence[str]) -> int:
    """Run the subcommand of the command line and return its exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0
    name, *remaining = argv
    if name == "--version":
        print("\n".join(f"{library} {found}" for library, found in all_versions().items()))
        return 0
    if name not in SUBCOMMANDS:
        raise ConfigError(
            f"{name}: unknown subcommand.{near_matches(name, SUBCOMMANDS)} Expected one of: {', '.join(SUBCOMMANDS)}."
        )
    exit_code: int = importlib.import_module(SUBCOMMANDS[name].module).run(remaining)
    return exit_code


def usage() -> str:
    """Return the text of `fullshard --help`."""
    lines = [f"  {name:<12}{subcommand.does}" for name, subcommand in SUBCOMMANDS.items()]
    return "\n".join(
        ["usage: fullshard SUBCOMMAND [options]", "", *lines, "", "fullshard SUBCOMMAND --help explains its options."]
    )
