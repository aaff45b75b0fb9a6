"""Checks that a library is installed and new enough, before anything is imported from it."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from fullshard.errors import MissingLibraryError

__all__ = ["require"]


def require(library: str, oldest: str, *, extra: str) -> None:
    """Raise unless `library` is installed, as `oldest` or newer.

    Args:
        library: The name of the library in the package registry.
        oldest: the oldest version that this integration is tested with.
        extra: the optional extra of fullshard that brings it.

    Raises:
        MissingLibraryError: it is missing, or older.
    """
    remedy = f"Install it with pip install 'fullshard[{extra}]'."
    try:
        found = version(library)
    except PackageNotFoundError:
        raise MissingLibraryError(
            f"fullshard[{extra}] needs {library} {oldest} or newer, which is not installed. {remedy}"
        ) from None
    if _numbers(found) < _numbers(oldest):
        raise MissingLibraryError(f"fullshard[{extra}] needs {library} {oldest} or newer, but found {found}. {remedy}")


def _numbers(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()
