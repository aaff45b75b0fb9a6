"""Weights that stay in their files until a model is sharded, so that no process ever holds the whole of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from torch import nn

from fullshard.checkpoint import load_safetensors

__all__ = ["read_waiting", "wait_for"]

_WAITING = "_fullshard_waiting"  # the attribute by which a model remembers where its weights are


@dataclass(frozen=True)
class _Waiting:
    path: Path
    rename: Callable[[str], str | None] | None


def wait_for(model: nn.Module, path: str | PathLike[str], rename: Callable[[str], str | None] | None = None) -> None:
    """Let `model`, whose parameters are on the meta device, get the weights in `path` later: safetensors files."""
    vars(model)[_WAITING] = _Waiting(Path(path), rename)


def read_waiting(model: nn.Module) -> None:
    """Read what `model` waits for, if anything: each rank the rows that are its own, if it is sharded by now.

    Raises:
        CheckpointError: the files are missing or damaged, or do not fit; the same error on every rank.
    """
    waiting: _Waiting | None = vars(model).pop(_WAITING, None)
    if waiting is not None:
        load_safetensors(model, waiting.path, rename=waiting.rename)
