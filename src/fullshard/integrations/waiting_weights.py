"""Deferred weights, which stay in their files until a model is sharded, so that no process ever holds all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

from torch import nn

from fullshard.checkpoint import Merged, load_safetensors
from fullshard.errors import ConfigError

_WAITING = "_fullshard_waiting"  # the attribute of a model with the path of its weights


@dataclass(frozen=True)
class _Waiting:
    path: Path
    rename: Callable[[str], str | None] | None
    merge: Callable[[Collection[str]], Mapping[str, Merged]] | None


def wait_for(
    model: nn.Module,
    path: str | PathLike[str],
    rename: Callable[[str], str | None] | None = None,
    merge: Callable[[Collection[str]], Mapping[str, Merged]] | None = None,
) -> None:
    """Defer loading of the safetensors weights in `path` into `model`, whose parameters are on the meta device.

    For `rename` and `merge` see `load_safetensors`.
    """
    vars(model)[_WAITING] = _Waiting(Path(path), rename, merge)


def wait_for_others(model: nn.Module, path: str | PathLike[str]) -> None:
    """Replace the deferred weights of `model` by those in `path`, with the same options."""
    waiting: _Waiting = vars(model)[_WAITING]
    vars(model)[_WAITING] = replace(waiting, path=Path(path))


def is_waiting(model: nn.Module) -> bool:
    """Return True if the weights of `model` are still in files."""
    return _WAITING in vars(model)


def read_waiting(model: nn.Module) -> None:
    """Read the deferred weights of `model`, if there are any. If it is sharded, each rank reads its own rows.

    Raises:
        CheckpointError: The files are missing or damaged, or do not match. The same error is raised on every rank.
        ConfigError: Only a part of `model` has deferred weights, because it was inserted into another model.
    """
    if is_waiting(model):
        waiting: _Waiting = vars(model)[_WAITING]
        load_safetensors(model, waiting.path, rename=waiting.rename, merge=waiting.merge)
        del vars(model)[_WAITING]
        return
    for name, part in model.named_modules():
        if is_waiting(part):
            raise ConfigError(
                f"the weights of {name} ({type(part).__name__}) are loaded from {vars(part)[_WAITING].path} when it is "
                f"sharded, but it is part of a {type(model).__name__} with other weights. Load it with its class's "
                "from_pretrained before adding adapters or heads around it."
            )
