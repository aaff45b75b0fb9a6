"""Marks of hooks that belong to this package. Copies of modules must not have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "_is_of_fullshard"


def own_hook(hook: F) -> F:
    """Mark `hook` as one of this package, and return it."""
    setattr(hook, _MARK, True)
    return hook


def is_own_hook(hook: Any) -> bool:
    """Return True if `hook`, or the hook that torch has wrapped in it, is marked."""
    return hasattr(getattr(hook, "hook", hook), _MARK)
