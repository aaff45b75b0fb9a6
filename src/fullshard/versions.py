"""The versions that a run depends on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version


def versions() -> dict[str, str]:
    """Return versions by name; 'not installed' for fullshard if it runs from its sources."""
    return {
        "fullshard": _version("fullshard"),
        "torch": _version("torch"),
        "python": platform.python_version(),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
