"""The `fullshard completion` command: scripts for shells that complete subcommands and options."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from collections.abc import Sequence
from dataclasses import make_dataclass
from typing import Annotated, Any, Union

import tyro

from fullshard.command_line import Command
from fullshard.errors import ConfigError, near_matches

SHELLS = ("bash", "zsh", "fish")
_USAGE = (
    f"usage: fullshard completion {{{','.join(SHELLS)}}}\n\nPrint a script that completes subcommands and options.\n"
)


def run(argv: Sequence[str]) -> int:
    """Print the script for the shell named in `argv`, and return the exit code."""
    if {"-h", "--help"} & set(argv):
        sys.stdout.write(_USAGE)
        return 0
    if len(argv) != 1 or argv[0] not in SHELLS:
        found = f"found {' '.join(argv)}.{near_matches(argv[0], SHELLS)}" if argv else "found none."
        raise ConfigError(f"fullshard completion: expected one of {', '.join(SHELLS)}, but {found}")
    sys.stdout.write(_script(argv[0]))
    return 0


def commands() -> dict[str, Command[Any] | dict[str, Command[Any]]]:
    """Return the commands with options by name, in the order of `fullshard --help`. Some are dicts of actions."""
    from fullshard.cli import SUBCOMMANDS

    modules = {name: importlib.import_module(subcommand.module) for name, subcommand in SUBCOMMANDS.items()}
    found = {name: getattr(module, "COMMANDS", getattr(module, "COMMAND", None)) for name, module in modules.items()}
    return {name: command for name, command in found.items() if command is not None}


def _script(shell: str) -> str:
    """Return the completion script of `shell`, as printed by tyro for a command with all subcommands."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        tyro.cli(
            _one_of(commands()),
            args=["--tyro-print-completion", shell],
            prog="fullshard",
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
        )
    return printed.getvalue()


def _one_of(found: dict[str, Any]) -> Any:
    """Return the union type of the subcommands in `found`."""
    return Union[tuple(_subcommand(name, command) for name, command in found.items())]  # noqa: UP007


def _subcommand(name: str, command: Command[Any] | dict[str, Command[Any]]) -> Any:
    if isinstance(command, dict):
        return Annotated[make_dataclass(name, [("action", _one_of(command))]), tyro.conf.subcommand(name)]
    return Annotated[command.with_words(), tyro.conf.subcommand(name, description=command.description)]
