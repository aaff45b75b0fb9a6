"""Optimizers that were made before their model was sharded: they have parameters that nothing trains any more."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fullshard.errors import StateError
from fullshard.stepping import has_shards, step_shards
from fullshard.unit import managed_by

__all__ = ["point_to_shards", "watch_optimizers"]


def point_to_shards(optimizer: Optimizer) -> None:
    """Let `optimizer` have, in place of each parameter that was sharded since it was made, the sharded parameter.

    Happens by itself before each `step()`.

    Raises:
        StateError: the optimizer has state for a parameter from before it was sharded.
    """
    for group in optimizer.param_groups:
        pointed = [_sharded(param, optimizer) for param in group["params"]]
        if any(new is not old for new, old in zip(pointed, group["params"], strict=True)):
            group["params"] = list(dict.fromkeys(pointed))  # tied weights are one


def _sharded(param: Any, optimizer: Optimizer) -> Any:
    managed = managed_by(param) if isinstance(param, nn.Parameter) else None
    if managed is None:
        return param
    unit, sharded = managed
    if param is not sharded.sharded and optimizer.state.get(param):
        raise StateError(
            f"{type(optimizer).__name__} has state for {sharded.fqn} of {unit.name or 'the root'} from before that was "
            f"sharded: {', '.join(optimizer.state[param])}. Make the optimizer after sharding, and load into it what "
            "FullyShardedDataParallel.optim_state_dict_to_load makes of the old one's state by FQN."
        )
    return sharded.sharded


@cache
def watch_optimizers() -> None:
    """Look after every optimizer before it steps, from now on."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not has_shards(optimizer):
        point_to_shards(optimizer)
        step_shards(optimizer)
