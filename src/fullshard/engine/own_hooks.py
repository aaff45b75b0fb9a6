"""Which of a module's hooks are this package's: copies of modules are to be without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["is_own_hook", "own_hook"]

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "_is_of_fullshard"


def own_hook(hook: F) -> F:
    """`hook`, marked as this package's."""
    setattr(hook, _MARK, True)
    return hook


def is_own_hook(hook: Any) -> bool:
    """True if `hook`, or what torch has wrapped in it, is marked so."""
    return hasattr(getattr(hook, "hook", hook), _MARK)
