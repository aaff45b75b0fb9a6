"""Hooks of modules that call the runtime, and operations on a unit's modules between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer

from fullshard._compat import (
    before_optimizer_method,
    in_backward,
    in_function_transform,
    in_plain_code,
    is_own_hook,
    is_share_memory,
    outside_of_function_transforms,
    outside_of_graphs,
    outside_of_selective_checkpoints,
    own_hook,
)
from fullshard.engine.managed import managed_by
from fullshard.engine.registry import register, register_as, unit_of, units_in, unregister
from fullshard.engine.root_state import cast_outputs
from fullshard.engine.runtime import Runtime, runtime_or_none
from fullshard.engine.sharded_param import ShardedParam
from fullshard.engine.unit import Unit
from fullshard.engine.unit_gradients import holding
from fullshard.errors import StateError

_OWN_ATTRIBUTES = ("__deepcopy__", "__reduce_ex__")


def install(unit: Unit) -> None:
    """Install the hooks that unshard `unit` in forward and backward of its modules."""
    register(unit)
    for module in unit.modules:
        vars(module)["__reduce_ex__"] = partial(refuse_pickle, module)
        module.register_forward_pre_hook(_before_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(_after_forward, always_call=True)
    on_grad = partial(_on_grad, unit)
    for param in unit.params:
        param.watch(on_grad)


def run_as_forward(module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call `function(*args, **kwargs)` with the unit of `module` unsharded, like its forward."""
    output = None
    try:
        args, kwargs = _before_forward(module, args, kwargs)
        output = function(*args, **kwargs)
    finally:
        output = _after_forward(module, args, output)
    return output


@own_hook
@outside_of_graphs
def _before_forward(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    unit = unit_of(module)
    if in_plain_code():
        return (unit.runtime or runtime_of(module)).driver.before_forward(unit, args, kwargs)
    if in_function_transform():
        with outside_of_function_transforms():
            runtime = runtime_of(module)
            runtime.hook_driver.before_transformed_forward(unit)
        return runtime.state.prepare_inputs(unit, args, kwargs)
    with outside_of_selective_checkpoints():
        return runtime_of(module).driver.before_forward(unit, args, kwargs)


@own_hook
@outside_of_graphs
def _after_forward(module: nn.Module, args: Any, output: Any) -> Any:
    unit = unit_of(module)
    runtime: Runtime | None = unit.runtime
    if runtime is None:
        return output
    if in_plain_code():
        return runtime.driver.after_forward(unit, module, output)
    if in_function_transform():
        with outside_of_function_transforms():
            runtime.hook_driver.after_transformed_forward(unit)
        return cast_outputs(unit, output)
    with outside_of_selective_checkpoints():
        return runtime.driver.after_forward(unit, module, output)


def _on_grad(unit: Unit, param: ShardedParam) -> None:
    runtime = unit.runtime or runtime_of(unit.module)
    runtime.driver.on_grad(unit, param)


def runtime_of(module: nn.Module) -> Runtime:
    """Return the runtime that drives `module`. It is created on the first use of an outermost module."""
    return runtime_or_none(unit_of(module)) or Runtime(module, units_in(module))


def abandon_step(module: nn.Module) -> None:
    """Undo the current step of the outermost `module`. See `FSDPModule.abandon_step`."""
    runtime = runtime_of(module)
    if runtime.state.is_running:
        raise StateError("abandon_step was called within a forward or backward. Call it after catching the exception.")
    runtime.abandon()


def is_in_use(unit: Unit) -> bool:
    """Return True if a running forward or backward needs `unit`. The state of a failed pass is cleaned up first."""
    runtime = runtime_or_none(unit)
    if runtime is not None and runtime.state.is_interrupted:
        runtime.recover()
    return unit.residency.users > 0


@contextmanager
def without_sync(units: Sequence[Unit]) -> Iterator[None]:
    """Return a context that disables communication in backward through `units`, and then restores their settings."""
    before = [unit.settings.syncs_gradients for unit in units]
    for unit in units:
        unit.settings.syncs_gradients = False
    try:
        yield
    finally:
        for unit, syncs in zip(units, before, strict=True):
            unit.settings.syncs_gradients = syncs


def zero_shard_grads(module: nn.Module, set_to_none: bool) -> None:
    """Remove the gradients that the optimizer would see from all units in `module`, or fill them with zeros.

    `Module.zero_grad` itself acts on the unsharded parameters if a unit is unsharded manually. Gradients of
    microbatches that have not been reduced yet are removed too.
    """
    for unit in units_in(module):
        if unit.gradients in holding and not in_backward():
            unit.gradients.drop_unreduced(set(unit.params))
        for param in unit.params:
            if set_to_none:
                param.sharded.grad = None
            elif param.sharded.grad is not None:
                param.sharded.grad.zero_()


@cache
def watch_zero_grad() -> None:
    """Make `zero_grad()` of every optimizer remove the gradients of microbatches that have not been reduced yet."""
    before_optimizer_method("zero_grad", _drop_unreduced)


def _drop_unreduced(optimizer: Optimizer) -> None:
    if not holding or in_backward():
        return
    params = (param for param_group in optimizer.param_groups for param in param_group["params"])
    found = [managed for param in params if (managed := managed_by(param)) is not None]
    dropped = {managed.param for managed in found}
    for unit in dict.fromkeys(managed.unit for managed in found):
        unit.gradients.drop_unreduced(dropped)


def check_idle(unit: Unit, doing: str) -> None:
    """Raise `StateError` if `unit` is in use. `doing` is what would happen to it, for the message."""
    unit.residency.check_not_summoned()
    if is_in_use(unit):
        raise StateError(
            f"{unit.name or 'the root'} was {doing} within its forward or backward. This is allowed only between steps."
        )


@contextmanager
def changing_shards(unit: Unit, function: Callable[..., Any] | None = None) -> Iterator[None]:
    """Return a context within which the modules get other parameters, as in `Module.to`. The unit adopts them.

    Args:
        unit: the unit whose modules change.
        function: The function that `Module._apply` calls with each tensor, if it makes the change.

    Raises:
        StateError: the unit is in forward or backward, its parameters are summoned, or `function` is that of
            `Module.share_memory`; or a parameter was replaced earlier.
    """
    check_idle(unit, "to be moved or cast")
    if function is not None and is_share_memory(function):
        raise StateError(
            f"share_memory() of {unit.name or 'the root'}, which is sharded: torch cannot move a DTensor to shared "
            "memory. Call share_memory() before sharding the module, or on the tensors of a full state dict."
        )
    unit.residency.reshard()
    unit.check_replacements()  # before the unit would adopt them
    units = (unit, *unit.borrowed)  # tied weights are changed through any module that has them
    for lender in unit.borrowed:
        lender.residency.reshard()
    yield
    for changed in units:
        changed.shards.adopt(may_wait=True)


@contextmanager
def as_plain(module: nn.Module) -> Iterator[None]:
    """Return a context that removes all attributes of its unit from `module`, except for hooks."""
    own: dict[str, Any] = {name: vars(module).pop(name) for name in _OWN_ATTRIBUTES if name in vars(module)}
    unit = unregister(module)
    try:
        yield
    finally:
        vars(module).update(own)
        if unit is not None:
            register_as(unit, module)


def drop_own_hooks(module: nn.Module) -> None:
    """Remove the hooks of this package from `module`, a copy of a module that has a unit."""
    for name, hooks in vars(module).items():
        if name.endswith("_hooks") and isinstance(hooks, dict):
            for key in [key for key, hook in hooks.items() if is_own_hook(hook)]:
                del hooks[key]


def refuse_pickle(module: nn.Module, protocol: object = None) -> NoReturn:
    """Raise an error: a module loaded from a file would have no unit, and shards of a mesh that does not exist."""
    raise StateError(
        f"pickle, torch.save or copy.copy of {type(module).__name__}, which is sharded: the restored module would "
        "not belong to a unit. Save its state_dict(), and load it into a new sharded module."
    )
