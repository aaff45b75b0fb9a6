"""Rebinding of optimizers that were made before their model was sharded, and hold parameters that nothing trains."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from fullshard.engine.managed import managed_by
from fullshard.errors import StateError

__all__ = ["point_to_shards"]


def point_to_shards(optimizer: Optimizer) -> None:
    """Replace parameters of `optimizer` that were sharded since it was made by the sharded ones.

    This is called automatically before each `step()`.

    Raises:
        StateError: the optimizer has state for a parameter from before it was sharded, or state that was loaded while
            it was unsharded.
    """
    for group in optimizer.param_groups:
        pointed = [_sharded(param, optimizer) for param in group["params"]]
        if any(new is not old for new, old in zip(pointed, group["params"], strict=True)):
            group["params"] = list(dict.fromkeys(pointed))  # tied weights are one


def _sharded(param: Any, optimizer: Optimizer) -> Any:
    managed = managed_by(param) if isinstance(param, nn.Parameter) else None
    if managed is None:
        return param
    unit, sharded = managed.unit, managed.param
    if param is not sharded.sharded and optimizer.state.get(param):
        what = f"{type(optimizer).__name__} has state for {sharded.fqn} of {unit.name or 'the root'}"
        names = ", ".join(optimizer.state[param])
        if param is sharded.unsharded:  # loading has cast the states to the compute dtype
            raise StateError(
                f"{what} that was loaded while the parameters were unsharded: {names}. Create the optimizer and load "
                "its state while parameters are sharded: call reshard() after unshard(), and abandon_step() after an "
                "exception in a step."
            )
        raise StateError(
            f"{what} from before sharding: {names}. Create the optimizer after sharding, and load the old state by "
            "FQN with FullyShardedDataParallel.optim_state_dict_to_load."
        )
    return sharded.sharded
