"""Command lines as settings: a dataclass of groups. Each group is a dataclass whose fields are options.

This module checks the arguments before the parser does, and raises errors of one line. The parser prints long reports.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar, get_args, get_type_hints

import tyro

from fullshard.errors import ConfigError, near_matches
from fullshard.regular_files import writing

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# Optional values. Their explanations name the default in words, so --help does not show one.
MaybeInt = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]
MaybeFloat = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")]
MaybeStr = Annotated[str | None, tyro.conf.arg(metavar="STR", help_behavior_hint="")]
MaybePath = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]

S = TypeVar("S")

_KINDS = {int: "a whole number", float: "a number"}


def parse(settings: type[S], argv: Sequence[str], *, prog: str, description: str, defaults: Sequence[str] = ()) -> S:
    """Parse `argv` and return the settings. Other options keep the values in `defaults`, which must be valid.

    Raises `ConfigError` for an unknown option and for a value of the wrong type, with one line that names both.
    `--help` prints the explanation of all options and raises `SystemExit(0)`.
    """
    if "--help" not in argv and "-h" not in argv:
        _check_items(settings, argv, prog)
    return tyro.cli(
        settings,
        args=[*defaults, *argv],
        prog=prog,
        description=description,
        config=(tyro.conf.OmitArgPrefixes,),
    )


@dataclass(frozen=True)
class Command(Generic[S]):
    """A command: the information that its parser, shell completion and the reference need."""

    settings: type[S]
    prog: str
    description: str
    words: tuple[str, ...] = ()

    def parse(self, argv: Sequence[str], defaults: Sequence[str] = ()) -> S:
        """Return the settings in `argv`, see `parse`."""
        return parse(self.settings, argv, prog=self.usage, description=self.description, defaults=defaults)

    def take_words(self, argv: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the positional arguments in `argv` and the remaining items."""
        return take_words(self.settings, argv, self.words, prog=self.prog)

    @property
    def usage(self) -> str:
        """The command and its positional arguments."""
        return " ".join([self.prog, *self.words])

    def with_words(self) -> type:
        """Return a dataclass of the positional arguments and the options, for shell completion."""
        words = [(name.lower(), tyro.conf.Positional[Path]) for name in self.words]
        options = ("options", self.settings, field(default_factory=self.settings))
        return make_dataclass(self.settings.__name__, [*words, options])


def take_words(settings: type, argv: Sequence[str], names: Sequence[str], *, prog: str) -> tuple[list[str], list[str]]:
    """Return the positional words of `argv`, one for each of `names`, and the rest for `parse`.

    Raises `ConfigError` for too few or too many words. `--help` is left to `parse`.
    """
    types = option_types(settings)
    words, remaining = [], []
    items = iter(argv)
    for item in items:
        if not item.startswith("-"):
            check_path(item, f"an argument of {prog}")
            words.append(item)
            continue
        remaining.append(item)
        takes_value = item.startswith("--") and types.get(item[2:].replace("_", "-"), bool) is not bool
        if takes_value and (value := next(items, None)) is not None:
            remaining.append(value)
    if len(words) != len(names) and not {"-h", "--help"} & set(remaining):
        found = f"found {' '.join(words)}" if words else "found none"
        raise ConfigError(f"{prog}: {' and '.join(names)} must be given, but {found}.")
    return words, remaining


def option_types(settings: type) -> Mapping[str, type]:
    """Return the type of each option's value by name, without the leading dashes."""
    groups = get_type_hints(settings).values()
    hints = {name: hint for group in groups for name, hint in get_type_hints(group).items()}
    return {name.replace("_", "-"): next(iter(get_args(hint)), hint) for name, hint in hints.items()}


def check_name(settings: type, name: str, complaint: str, prog: str) -> None:
    """Raise an error if no option has this name."""
    known = option_types(settings)
    if name not in known:
        raise ConfigError(f"{complaint}.{near_matches(name, known)} See {prog} --help for all of them.")


def check_value(settings: type, name: str, value: str, where: str) -> None:
    """Raise an error if a value does not have the type of the option."""
    kind = option_types(settings)[name]
    if kind is Path:
        check_path(value, where)
    if kind not in _KINDS:
        return
    try:
        number = int(value) if kind is int else float(value)
    except ValueError:
        raise ConfigError(f"{where} is {value!r}, but must be {_KINDS[kind]}.") from None
    if isinstance(number, int) and abs(number) >= 1 << 63:
        raise ConfigError(f"{where} is {value!r}, but must be less than 2**63.")
    if not math.isfinite(number):
        raise ConfigError(f"{where} is {value!r}, but must be a finite number.")


def check_path(value: str, where: str) -> None:
    """Raise an error if a path is empty, or if the system does not accept it, for example because it is too long.

    The path does not need to exist.
    """
    if not value:
        raise ConfigError(f"{where} is empty, but must be a path. For the current folder write '.'.")
    try:
        os.stat(value)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{where} is {value!r}, which cannot be used as a path ({why}).") from error


def check_writable(name: str, path: Path) -> None:
    """Raise an error if `path`, the value of the option `name`, is not a writable file. Call it before other work."""
    with writing(path, option=f"--{name}"):
        path.open("a").close()


def dumps_with_options(settings: DataclassInstance, report: Mapping[str, Any]) -> str:
    """Return `report` as JSON, together with the options."""
    options = {name: value for group in asdict(settings).values() for name, value in group.items()}
    return json.dumps({"options": options, **report}, indent=2, default=str, allow_nan=False) + "\n"


def _check_items(settings: type, argv: Sequence[str], prog: str) -> None:
    types = option_types(settings)
    items = iter(argv)
    for item in items:
        if not item.startswith("--"):
            first = next(iter(types))
            raise ConfigError(f"unexpected argument {item!r}: options start with --, as in --{first} {item}.")
        name, equals, value = item[2:].partition("=")
        name = name.replace("_", "-")
        if bool in (types.get(name), types.get(name.removeprefix("no-"))):
            if equals:
                raise ConfigError(f"{item}: takes no value. Write --{name}.")
            continue
        check_name(settings, name, f"unknown option --{name}", prog)
        if not equals:
            following = next(items, None)
            if following is None or following.startswith("--"):
                raise ConfigError(f"--{name} needs a value, such as '--{name} {_example(types[name])}'.")
            value = following
        check_value(settings, name, value, f"--{name}")


def _example(kind: type) -> str:
    return {int: "8", float: "0.1", Path: "some/path"}.get(kind, "word")
