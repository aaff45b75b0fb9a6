"""Modules that are called while their parameters are sharded: refused by name, where torch would tell of types only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.engine.managed import managed_by
from fullshard.engine.nested import tensors_in
from fullshard.engine.own_hooks import own_hook
from fullshard.errors import StateError

__all__ = ["accept_calls", "refuse_calls"]

_HOOK = "fullshard: parameters at rest"  # where hooks of torch's have numbers


def refuse_calls(modules: Sequence[nn.Module]) -> None:
    """Have `modules` answer calls with an error, as long as their parameters are sharded."""
    for module in modules:
        module._forward_pre_hooks[_HOOK] = _check_unsharded  # type: ignore[index]  # hooks are looked up by position


def accept_calls(modules: Sequence[nn.Module]) -> None:
    """Have `modules` take calls as they always do, at no cost."""
    for module in modules:
        module._forward_pre_hooks.pop(_HOOK, None)  # type: ignore[call-overload]  # as above


@own_hook
def _check_unsharded(module: nn.Module, args: Any) -> None:
    given = tensors_in(args)
    if not any(isinstance(tensor, Tensor) for tensor in given) or any(isinstance(it, DTensor) for it in given):
        return
    for name, param in module._parameters.items():
        managed = None if param is None else managed_by(param)
        if managed is not None and param is managed.param.sharded:
            unit, kind = managed.unit, type(module).__name__
            raise StateError(
                f"{kind} was called while its {name} ({managed.param.fqn} of {unit.name or 'the root'}) is sharded: "
                f"that is unsharded within forward and backward of {type(unit.module).__name__}, its unit, only. Call "
                f"that instead; or make {kind} a unit of its own by fully_shard before the modules around it; or let "
                "the unit's method that calls it count as a forward, by register_fsdp_forward_method(module, name); or "
                "call it between unshard() and reshard() of the unit, or within summon_full_params."
            )
