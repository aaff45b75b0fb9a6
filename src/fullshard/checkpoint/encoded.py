"""Weights that are encoded in several tensors. A checkpoint stores these tensors without decoding them.

A tensor subclass such as torchao's NF4 is saved as its inner tensors, each under a name that begins with the name of
the parameter. Inner tensors that are sharded with the rows are `DTensor`s like the parameter; other inner tensors are
not sharded. bitsandbytes' 4-bit weights are plain bytes in shards. Their modules add the description of the weights to
state dicts, but do not load it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard._compat import holds_tensors, inner_names, make_dtensor, plain_values
from fullshard.engine.managed import managed_by
from fullshard.engine.registry import clean_fqn

_DESCRIPTION = ".quant_state.bitsandbytes__"  # in the name of the tensor that contains values other than tensors


def parts_of(param: nn.Parameter, value: Tensor) -> dict[str, Tensor] | None:
    """Return the inner tensors of `value`, the state dict entry of `param`, in the same memory.

    Return None if it is not encoded in this way, or if an inner tensor is sharded differently.
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
    one_row = value.shape[0] == 1  # only one rank has it
    whole = {name for name, part in parts.items() if tuple(part.shape) == shapes[name]}
    cut = {name for name in parts if name not in whole or (one_row and shapes[name][:1] == (1,))}
    return {
        name: make_dtensor(part, mesh, placements, shapes[name]) if name in cut else part
        for name, part in parts.items()
    }


def names_alongside(model: nn.Module) -> tuple[str, ...]:
    """Return the prefixes of the state dict names under which modules describe their 4-bit weights."""
    named = model.named_parameters(remove_duplicate=False)
    return tuple(f"{clean_fqn(name)}." for name, param in named if hasattr(param, "quant_state"))


def describes_4_bits(name: str) -> bool:
    """Return True if a tensor with this name encodes values other than tensors, so that its length varies."""
    return _DESCRIPTION in name


def restore_descriptions(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Restore the descriptions of the 4-bit weights of `model` from `values`, the entries of a state dict."""
    for name, param in model.named_parameters():
        known = getattr(param, "quant_state", None)
        prefix = f"{clean_fqn(name)}."
        given = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
        if known is not None and any(describes_4_bits(f".{key}") for key in given):
            vars(known).update(vars(type(known).from_dict(given, device=known.absmax.device)))
