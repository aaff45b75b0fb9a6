"""Preparation of an optimizer's first step: loaded states are moved, and the fractions of a budget are chosen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard._compat import set_local_tensor
from fullshard.device.accelerator import accelerator_for
from fullshard.disk.interface import TensorOnDisk
from fullshard.engine.managed import in_model_order, managed_by
from fullshard.engine.placements import open_budget
from fullshard.engine.runtime import Runtime, runtime_or_none
from fullshard.errors import ConfigError
from fullshard.tape.recorder import Phase

_observed: WeakSet[Optimizer] = WeakSet()  # optimizers that are prepared


def before_first_step(optimizer: Optimizer) -> None:
    """Place loaded states before the first step of `optimizer`, and choose the fractions of a budget.

    This is a collective if its units have a budget. If hooks run optimizer steps within backward, units cannot move.
    Nothing is chosen then, and everything stays offloaded.

    Raises:
        ConfigError: Offloading everything is not enough (the message contains a sufficient budget), host memory is too
            small for the offloaded states, or units have several budgets.
        DiskError: On some rank, a unit that is moved to memory cannot be read.
    """
    if optimizer in _observed:
        return
    params = in_model_order([param for group in optimizer.param_groups for param in group["params"]])
    units = dict.fromkeys(managed.unit for param in params if (managed := managed_by(param)) is not None)
    runtimes = dict.fromkeys(runtime_or_none(unit) for unit in units)
    if None in runtimes:  # no forward has run, so nothing was counted
        return
    if any(runtime is not None and _is_in_backward(runtime) for runtime in runtimes):
        return
    for runtime in runtimes:
        assert runtime is not None
        policies = [policy for unit in runtime.units if (policy := open_budget(unit)) is not None]
        if any(policy != policies[0] for policy in policies):
            raise ConfigError(
                f"budgets of {' and '.join(dict.fromkeys(repr(policy.budget) for policy in policies))} for units of "
                "one model: a budget applies to all memory of a rank. Pass the same policy to all of these units."
            )
        if policies:
            from fullshard.state.budget import choose_fractions  # imported here, because few programs need it

            choose_fractions(runtime, policies[0], optimizer)
    _bring_alongside(optimizer, params)
    _observed.add(optimizer)


def _is_in_backward(runtime: Runtime) -> bool:
    """Return True if a backward is running that needs units which would move."""
    is_elsewhere = (
        unit.shards.is_on_disk or unit.shards.is_on_cpu for unit in runtime.units if open_budget(unit) is not None
    )
    return runtime.phase is Phase.BACKWARD and any(is_elsewhere)


def _bring_alongside(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> None:
    """Move states that were loaded before units were placed to the memory where they are updated."""
    follow = {id(param) for group in optimizer.param_groups if _counts_follow(group) for param in group["params"]}
    for param in params:
        managed, state = managed_by(param), optimizer.state.get(param)
        if managed is None or not state or managed.unit.shards.is_on_disk:
            continue
        shard, accelerator = managed.param.local, accelerator_for(managed.unit.device)
        for name, value in state.items():
            if isinstance(value, DTensor) and not isinstance(value._local_tensor, TensorOnDisk):
                set_local_tensor(value, accelerator.alongside(value._local_tensor, shard))
            elif isinstance(value, Tensor) and (value.numel() > 1 or id(param) in follow):
                state[name] = moved = accelerator.alongside(value, shard)
                vars(moved).update(vars(value))


def _counts_follow(group: Mapping[str, Any]) -> bool:
    """Return True if step counts are on the device of the parameters of `group` instead of on the CPU."""
    return bool(group.get("fused") or group.get("capturable"))
