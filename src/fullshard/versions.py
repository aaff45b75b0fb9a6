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


def all_versions() -> dict[str, str]:
    """Return the versions of `versions`, and the communication backends of torch, for reports of problems."""
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
