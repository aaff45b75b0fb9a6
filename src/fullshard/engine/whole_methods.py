"""Checks of methods of Hugging Face models that need full parameters. On sharded models, they raise an error."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from inspect import signature
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.errors import StateError


@cache
def checked_methods(cls: type) -> dict[str, Callable[..., Any]]:
    """Return methods of `cls` by name that raise an error if they need parameters that are sharded."""
    return {name: _checked(getattr(cls, name)) for name in _CHECKS if callable(getattr(cls, name, None))}


def _checked(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def checked(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        _check(self, method.__name__, signature(method).bind(self, *args, **kwargs).arguments)
        return method(self, *args, **kwargs)

    return checked


def _check(module: nn.Module, name: str, arguments: dict[str, Any]) -> None:
    """Raise `StateError` if `module.name`, called with `arguments`, needs full parameters of a sharded module."""
    if any(isinstance(param, DTensor) for param in module.parameters()):
        _CHECKS[name](module, {**arguments, **arguments.get("kwargs", {})})


def _check_save(module: nn.Module, arguments: dict[str, Any]) -> None:
    if arguments.get("state_dict") is None:
        raise StateError(
            f"save_pretrained of {type(module).__name__}, which is sharded: each rank has only a part of the weights. "
            "On every rank, call torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True, cpu_offload=True)), and pass it to save_pretrained as "
            "state_dict on rank 0. Or call fullshard.checkpoint.export_safetensors(model, folder) on every rank, "
            "which gathers one weight at a time."
        )


def _check_resize(module: nn.Module, arguments: dict[str, Any]) -> None:
    rows = len(module.get_input_embeddings().weight)  # type: ignore[operator]  # transformers' method
    wanted = arguments.get("new_num_tokens") or rows
    if wanted != rows or wanted % (arguments.get("pad_to_multiple_of") or 1):
        raise StateError(
            f"resize_token_embeddings of {type(module).__name__}, which is sharded: it would replace parameters, but "
            "the parameters of a unit cannot change their shapes. Call it before sharding the model."
        )


_CHECKS: dict[str, Callable[[nn.Module, dict[str, Any]], None]] = {
    "save_pretrained": _check_save,
    "resize_token_embeddings": _check_resize,
}
