"""Whole parameters for the user: to look at, to initialise, to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard._compat import dtensor_like
from fullshard.errors import ConfigError, StateError
from fullshard.record import Phase
from fullshard.runtime import Turn, is_unit, turns_in
from fullshard.sharded_param import ShardedParam

__all__ = ["summon_full_params"]


@contextmanager
def summon_full_params(
    module: nn.Module,
    *,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """A context in which the parameters of `module` are whole plain tensors, in the dtype they are stored in.

    Not for use within forward or backward. Every rank must enter.

    Args:
        recurse: whether the units below `module` are meant too, or only its own.
        writeback: whether what is changed in them is kept; each rank keeps its own part.
        rank0_only: other ranks keep their shards, and need no memory. Not with `writeback`.
        offload_to_cpu: whether whole parameters are moved to the CPU.
        with_grads: whether their gradients are whole too. Changes to gradients are kept with `writeback`.

    Raises:
        ConfigError: `rank0_only` together with `writeback`, or with `with_grads`.
        StateError: a unit is in forward or backward.
    """
    if rank0_only and writeback:
        raise ConfigError(
            "summon_full_params(rank0_only=True, writeback=True): ranks without the whole parameters could not keep "
            "what rank 0 changes. Pass writeback=False."
        )
    turns = turns_in(module) if recurse else _own_turns(module)
    for turn in turns:
        if turn.holds:
            raise StateError(
                f"summon_full_params within a forward or backward of {turn.unit.name or 'the root'}: its parameters "
                "are in use. Call it between steps."
            )
    with ExitStack() as stack:
        for turn in turns:
            stack.enter_context(_whole(turn, writeback, rank0_only, offload_to_cpu, with_grads))
        yield


def _own_turns(module: nn.Module) -> list[Turn]:
    """The unit of `module` itself, or the one that a wrapper around it stands for."""
    for child in module.modules():
        if is_unit(child):
            return turns_in(child)[:1]
    return []


@contextmanager
def _whole(turn: Turn, writeback: bool, rank0_only: bool, offload: bool, with_grads: bool) -> Iterator[None]:
    unit = turn.unit
    unit.reshard(Phase.IDLE)
    if any(param.owners[0].module._parameters[param.owners[0].name] is not param.sharded for param in unit.params):
        yield  # summoned already, further out
        return
    device = torch.device("cpu") if offload else unit.settings.device
    wholes = [_summoned(param, device, unit.settings.device, with_grads) for param in unit.params]
    shows = not rank0_only or dist.get_rank() == 0
    if shows:
        for param, whole in zip(unit.params, wholes, strict=True):
            param.show(whole)
    else:
        wholes = []
    try:
        yield
    finally:
        if shows:
            for param in unit.params:
                param.show(param.sharded)
        if writeback:
            with torch.no_grad():
                for param, whole in zip(unit.params, wholes, strict=True):
                    param.write(whole)
                    if with_grads and whole.grad is not None:
                        param.grad = param.take_own(whole.grad).to(param.local.device, copy=True).contiguous()


def _summoned(param: ShardedParam, device: torch.device, wire: torch.device, with_grads: bool) -> nn.Parameter:
    """The parameter whole, in memory of its own on `device`."""
    whole = nn.Parameter(_gathered(param, param.local, wire).to(device), requires_grad=param.sharded.requires_grad)
    if with_grads and param.grad is not None:
        whole.grad = _gathered(param, param.grad, wire).to(device)
    return whole


@torch.no_grad()
def _gathered(param: ShardedParam, shard: Tensor, wire: torch.device) -> Tensor:
    whole = dtensor_like(shard.to(wire), param.dtensor).full_tensor()
    return whole.clone() if whole.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr() else whole
