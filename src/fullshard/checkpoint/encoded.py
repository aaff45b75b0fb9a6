"""Weights that are encoded in several tensors, in a checkpoint: these tensors as they are, and nothing decoded.

A tensor subclass such as torchao's NF4 is saved as the tensors in it, each by its own name behind the parameter's. What
is cut with the rows is a `DTensor` as the parameter is, and the rest is whole. bitsandbytes' 4-bit weights are plain
bytes on shards; modules add what describes them to their state dicts, and do not take it back themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard._compat import holds_tensors, inner_names, make_dtensor, plain_values
from fullshard.engine.managed import managed_by
from fullshard.engine.registry import clean_fqn

__all__ = ["describes_4_bits", "names_beside", "parts_of", "put_back_descriptions"]

_DESCRIPTION = ".quant_state.bitsandbytes__"  # in the name of the tensor that has values which are no tensors


def parts_of(param: nn.Parameter, value: Tensor) -> dict[str, Tensor] | None:
    """The tensors in `value`, that of `param` in a state dict, in the same memory; None if it is not encoded so, or a
    part of a parameter that is cut in another way, too.
    """
    local = value._local_tensor if isinstance(value, DTensor) else value
    if not holds_tensors(local) or plain_values(local) is not None:
        return None
    parts = {name: getattr(local, name) for name in inner_names(local)}
    if not isinstance(value, DTensor):
        return parts
    managed = managed_by(param)
    if managed is None or managed.param.view.is_cut or any(map(holds_tensors, parts.values())):
        return None
    mesh, placements, shapes = value.device_mesh, tuple(value.placements), managed.param.inner_shapes
    return {
        name: part if _is_whole(part, shapes[name]) else make_dtensor(part, mesh, placements, shapes[name])
        for name, part in parts.items()
    }


def _is_whole(part: Tensor, shape: tuple[int, ...]) -> bool:
    return tuple(part.shape) == shape


def names_beside(model: nn.Module) -> tuple[str, ...]:
    """The beginnings of the names, in state dicts, of what modules add to describe their 4-bit weights."""
    named = model.named_parameters(remove_duplicate=False)
    return tuple(f"{clean_fqn(name)}." for name, param in named if hasattr(param, "quant_state"))


def describes_4_bits(name: str) -> bool:
    """True if a tensor of this name has values in it that are no tensors, and so a length of its own."""
    return _DESCRIPTION in name


def put_back_descriptions(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Let the 4-bit weights of `model` be described as `values`, of a state dict, say."""
    for name, param in model.named_parameters():
        known = getattr(param, "quant_state", None)
        prefix = f"{clean_fqn(name)}."
        given = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
        if known is not None and any(describes_4_bits(f".{key}") for key in given):
            vars(known).update(vars(type(known).from_dict(given, device=known.absmax.device)))
