"""The exceptions that fullshard raises.

Every message states what was requested, what was found (with names and numbers), and a remedy. User errors are raised
on every rank before the first collective, so that no rank waits for another.

    FullshardError
    ├── ConfigError         an argument, or a combination of arguments, that is invalid or not supported
    ├── LayoutError         a tensor that cannot be divided over the ranks as requested
    ├── NonFiniteError      NaN or infinity in gradients, if users requested the check
    ├── StateError          a call that is not allowed in the current phase
    ├── RankMismatchError   ranks that do not agree on the model, the order of its units or the number of ranks per host
    ├── RankLostError       another rank's process is gone
    ├── CheckpointError     a checkpoint that cannot be written, is damaged, or is of another model
    ├── DiskError           a disk that offloaded data cannot be written to, or read from
    └── MissingLibraryError a library that an integration needs, and that is missing or too old
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, Self

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DiskError",
    "FullshardError",
    "LayoutError",
    "MissingLibraryError",
    "NonFiniteError",
    "RankLostError",
    "RankMismatchError",
    "StateError",
]


class FullshardError(Exception):
    """The root of every exception that fullshard raises on purpose."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Create an error with a note that refers to its documentation. Tracebacks show the note after the message."""
        error = super().__new__(cls, *args, **kwargs)
        error.add_note(f"See docs/errors.md#{next(c.__name__ for c in cls.__mro__ if c.__name__ in __all__).lower()}")
        return error

    def __str__(self) -> str:
        """Return the message without escape sequences for terminals, which names in files may contain."""
        return "\n".join(map(shown, super().__str__().split("\n")))


class ConfigError(FullshardError, ValueError):
    """An argument, or a combination of arguments, that is invalid or not supported."""


class LayoutError(FullshardError, ValueError):
    """A tensor that cannot be divided over the ranks as requested."""


class StateError(FullshardError, RuntimeError):
    """A call that is not allowed in the current phase of a unit or of its root."""


class NonFiniteError(FullshardError, ArithmeticError):
    """NaN or infinity in gradients."""


class RankMismatchError(FullshardError, RuntimeError):
    """Ranks that have different models, units, orders of units or numbers of ranks per host."""


class RankLostError(FullshardError, RuntimeError):
    """Another rank's process has ended, so a collective of this rank cannot complete."""


class CheckpointError(FullshardError, RuntimeError):
    """A checkpoint that cannot be written or read, is damaged, or belongs to another model."""


class DiskError(FullshardError, OSError):
    """A disk that is too small for offloaded data, or failed to write it or to read it back."""


class MissingLibraryError(FullshardError, ImportError):
    """A library that an integration needs is not installed, or is older than the tested versions."""


def same_calls() -> str:
    """Return advice for ranks that make different calls, for messages."""
    return (
        "Every rank must call the same modules in the same order, in the same number of microbatches per step, and "
        "compute gradients for the same parameters. Saving, loading, exporting and reading full state dicts or full "
        "parameters must be done on every rank, not on rank 0 only. If only some ranks use some parameters, call "
        "set_reduce_scatter_unused_params(True) on the model. If only some ranks call a whole unit, as with layer "
        "drop, draw the same layers on all ranks (a torch.Generator with one seed), or call "
        "set_reduce_scatter_unused_params(True) on the model and add fullshard.take_part(unit) to the output where a "
        "rank skips that unit. The process group cannot be used anymore: end the processes and start again, or "
        "catch this on every rank and call abandon_step() on the model."
    )


def named_ranks(ranks: Sequence[int]) -> str:
    """Return text such as "rank 3" or "ranks 0, 2", for messages."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def shown(text: str, *, lines: bool = False) -> str:
    """Return `text` with an escape sequence for each character that a terminal does not print as itself.

    Args:
        text: The text, which may come from a file.
        lines: Whether line breaks are kept. Text after a line break is indented, so that it cannot look like a separate
            line.
    """
    if lines:
        return "\n  ".join(map(shown, text.split("\n")))
    return "".join(item if item.isprintable() else item.encode("unicode_escape").decode("ascii") for item in text)


def near_matches(word: str, known: Iterable[str]) -> str:
    """Return ' Did you mean ...?' with the known words similar to `word`, or an empty text."""
    close = difflib.get_close_matches(word, list(known), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(close)}?" if close else ""
