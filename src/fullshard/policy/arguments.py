"""Checks of arguments at the call of the user, so that error messages name the argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from fullshard.errors import ConfigError

__all__ = ["check_callable", "check_flags", "check_iterable", "check_type", "is_number", "mismatch"]


def is_number(value: object) -> bool:
    """Return whether `value` is a real number. True and False are not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_type(name: str, value: object, kinds: type[Any] | tuple[type[Any], ...], expected: str) -> None:
    """Raise if `value`, passed as the argument `name`, is not an instance of `kinds`.

    Raises:
        ConfigError: It is not. The message says to pass `expected`.
    """
    if not isinstance(value, kinds):
        raise ConfigError(f"{name}={value!r} is a {type(value).__name__}. Pass {expected}.")


def check_callable(name: str, value: object, expected: str) -> None:
    """Raise if `value`, passed as the argument `name`, is not callable.

    Raises:
        ConfigError: It is not callable. The message says to pass `expected`.
    """
    if not callable(value):
        raise ConfigError(f"{name}={value!r} cannot be called. Pass {expected}.")


def check_iterable(name: str, value: object, expected: str) -> None:
    """Raise if `value`, passed as the argument `name`, is a string or is not iterable.

    Raises:
        ConfigError: It is. The message says to pass `expected`.
    """
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ConfigError(f"{name}={value!r} is a {type(value).__name__}. Pass {expected}.")


def check_flags(**flags: object) -> None:
    """Raise if an argument is neither True nor False (1 and 0 are accepted).

    Raises:
        ConfigError: It is something else, such as the string "False".
    """
    for name, value in flags.items():
        if not isinstance(value, bool) and not (type(value) is int and value in (0, 1)):
            raise ConfigError(f"{name}={value!r} is a {type(value).__name__}. Pass True or False.")


def mismatch(function: Callable[..., Any], given: Sequence[Any], named: Mapping[str, Any]) -> str | None:
    """Return why `function` does not accept these arguments; None if it does, or if its signature is unknown."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*given, **named)
    except TypeError as error:
        return str(error)
    return None
