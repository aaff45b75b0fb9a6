"""Checks of arguments in the user's call, so that error messages name the argument."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from fullshard.errors import ConfigError


def is_number(value: object) -> bool:
    """Return True if `value` is a real number other than True and False."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_type(name: str, value: object, kinds: type[Any] | tuple[type[Any], ...], expected: str) -> None:
    """Raise if `value`, passed as the argument `name`, is not an instance of `kinds`.

    Raises:
        ConfigError: It is not an instance. The message says to pass `expected`.
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
        ConfigError: It is a string or not iterable. The message says to pass `expected`.
    """
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ConfigError(f"{name}={value!r} is a {type(value).__name__}. Pass {expected}.")


def check_flags(**flags: object) -> None:
    """Raise `ConfigError` if an argument is neither True nor False (1 and 0 are accepted)."""
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


_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_size(size: int | str, name: str, of: str) -> int:
    """Return the size in bytes, given as a number or as a string such as "5GB".

    Raises:
        ConfigError: It is not a size, or it is less than 1.
    """
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMGT]B)?\s*", str(size), re.IGNORECASE)
    try:
        nbytes = int(float(match[1]) * _UNITS[(match[2] or "").upper()]) if match else 0
    except ValueError:
        nbytes = 0
    if nbytes < 1:
        raise ConfigError(
            f"{name}={size!r} is not a size of {of}. Pass a number of bytes, or a string such as '500MB' or '5GB'."
        )
    return nbytes
