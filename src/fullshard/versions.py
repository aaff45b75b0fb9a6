"""The versions that a run depends on, and whether optional libraries are new enough."""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, version

from fullshard.errors import MissingLibraryError


def versions() -> dict[str, str]:
    """Return versions by name; 'not installed' for fullshard if it runs from its sources."""
    return {
        "fullshard": _version("fullshard"),
        "torch": _version("torch"),
        "python": platform.python_version(),
    }


def all_versions() -> dict[str, str]:
    """Return the versions of `versions` and the communication backends of torch, for bug reports."""
    import torch.distributed as dist  # takes a second

    available = {
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
        "mpi": dist.is_available() and dist.is_mpi_available(),
        "ucc": dist.is_available() and dist.is_ucc_available(),
        "xccl": dist.is_available() and dist.is_xccl_available(),
    }
    backends = ", ".join(name for name, is_there in available.items() if is_there)
    return {**versions(), "backends": backends or "none"}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def require(library: str, oldest: str, *, extra: str) -> None:
    """Raise `MissingLibraryError` unless `library` is installed, as `oldest` or newer."""
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
