"""Parsing of command line and configuration file into `TrainSettings`.

A configuration file holds option names and values. They are inserted before the items of the command line. So the
command line takes precedence, and both are parsed and checked in the same way.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from fullshard.command_line import Command, check_name, check_value, option_types
from fullshard.errors import ConfigError
from fullshard.regular_files import CONFIG_BYTES, UNPARSED, is_too_long, read_text
from fullshard.train.settings import TrainSettings

CONFIG = "config"
PROG = "fullshard train"


def parse_settings(argv: Sequence[str]) -> TrainSettings:
    """Return the settings from the command line and the file named by `--config`.

    Raises:
        ConfigError: An option is unknown, or a value has the wrong type.
        SystemExit: `--help` was given, and the help text has been printed.
    """
    user, config_files = _without_config(argv)
    items = [item for path in config_files for item in config_items(path)]
    return COMMAND.parse(user, items)


def config_items(path: Path) -> list[str]:
    """Return the checked contents of a YAML or TOML file as command line items.

    Keys are option names, written with dashes or underscores.
    """
    items: list[str] = []
    for key, value in _read_mapping(path).items():
        name = str(key).replace("_", "-")
        check_name(TrainSettings, name, f"{path}: unknown option {str(key)!r}", PROG)
        if name == CONFIG:
            raise ConfigError(
                f"{path}: refers to another configuration file. Put its options here, or pass --config twice."
            )
        if value is None:
            raise ConfigError(f"{path}: {key} has no value. Set a value, or remove the line.")
        if isinstance(value, (list, dict)):
            raise ConfigError(f"{path}: {key} must be one value, not a {type(value).__name__}.")
        if is_too_long(value):
            raise ConfigError(f"{path}: {key} must be less than 2**63. If it is text, put it in quotes.")
        if option_types(TrainSettings)[name] is bool:
            if not isinstance(value, bool):
                raise ConfigError(f"{path}: {key} is {value!r}, but must be true or false.")
            items.append(f"--{name}" if value else f"--no-{name}")
        else:
            check_value(TrainSettings, name, str(value), f"{path}: {key}")
            items += [f"--{name}", str(value)]
    return items


_DESCRIPTION = (
    "Train a byte-level GPT whose parameters, gradients and optimizer state are sharded over ranks. Without options "
    "it learns the Python standard library on every core or GPU of this machine in about five minutes. "
    "Under torchrun the same command is one rank of the run, on one machine or several."
)
COMMAND = Command(TrainSettings, PROG, _DESCRIPTION)


def _read_mapping(path: Path) -> dict[Any, Any]:
    readers: dict[str, Callable[[str], Any]] = {".yaml": yaml.safe_load, ".yml": yaml.safe_load, ".toml": tomllib.loads}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"--config {path}: unknown format. The name must end in .yaml, .yml or .toml.")
    try:
        content = reader(read_text(path, limit=CONFIG_BYTES))
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error.strerror}). Pass an existing file.") from error
    except (yaml.YAMLError, *UNPARSED) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--config {path}: is not valid {path.suffix[1:].upper()}: {reason}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: must hold option names with values, such as 'steps: 100'.")
    return content


def _without_config(argv: Sequence[str]) -> tuple[list[str], list[Path]]:
    """Return the command line without its `--config FILE`, and the named files."""
    remaining: list[str] = []
    files: list[Path] = []
    items = iter(argv)
    for item in items:
        if item == f"--{CONFIG}":
            value = next(items, None)
            if value is None:
                raise ConfigError("--config needs a file: a YAML or TOML file of option names and values.")
            files.append(Path(value))
        elif item.startswith(f"--{CONFIG}="):
            files.append(Path(item.partition("=")[2]))
        else:
            remaining.append(item)
    return remaining, files
