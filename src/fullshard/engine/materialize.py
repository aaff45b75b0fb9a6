"""Preparation of a module's parameters for a unit: finding, initializing and synchronizing them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fullshard._compat import dtensor_like, has_values, is_wrapper_type, without_weak_references
from fullshard.comm.mesh import Axes
from fullshard.engine.hooks import changing_shards
from fullshard.engine.managed import is_ignored, managed_by
from fullshard.engine.param_view import check_payloads, view_of
from fullshard.engine.registry import clean_fqn, own_modules, units_in
from fullshard.engine.sharded_param import Owner, Source, refuse_tensor_hooks
from fullshard.engine.unit import Unit
from fullshard.errors import ConfigError
from fullshard.policy.precision import MixedPrecisionPolicy, is_castable


@dataclass(frozen=True)
class NewParameters:
    """The parameters of a new unit."""

    sources: list[Source]  # parameters that no unit has yet
    borrowed: list[Unit]  # units that own a parameter which is tied to one of these modules


def find_parameters(
    modules: Sequence[nn.Module],
    ignored: Iterable[nn.Parameter],
    place: Callable[[str, nn.Parameter], tuple[Axes, int | None]],
    precision: MixedPrecisionPolicy,
) -> NewParameters:
    """Find the parameters of `modules` to shard, and the units that own parameters tied to them.

    The sharded form of such a tied parameter is also set in these modules, so that it stays tied.

    Args:
        modules: The modules of the new unit.
        ignored: parameters to leave out.
        place: A function that returns the axes and the dim to shard a parameter along, given its FQN and the parameter.
        precision: The policy that selects dtypes.

    Raises:
        ConfigError: A parameter is a `DTensor` that cannot be sharded over these axes, has no shape yet, or shares
            memory with another parameter.
        StateError: A parameter has a hook that would never be called.
    """
    skip = {id(param) for param in ignored}
    new: dict[int, Source] = {}
    borrowed: list[Unit] = []
    for prefix, module in own_modules(modules):
        for name, param in list(module._parameters.items()):
            if param is None or id(param) in skip:
                continue
            owner = Owner(module, name)
            managed = managed_by(param)
            if managed is not None:
                unit, sharded = managed.unit, managed.param
                _check_inner_first(modules, module, name, unit)
                if owner not in sharded.owners:
                    sharded.owners.append(owner)
                sharded.show(sharded.sharded)
                if unit not in borrowed:
                    borrowed.append(unit)
                continue
            fqn = clean_fqn(f"{prefix}.{name}" if prefix else name)
            if id(param) not in new:
                if is_lazy(param):
                    raise ConfigError(
                        f"{fqn} of {type(module).__name__} has no shape yet. Run a forward on every rank before "
                        "sharding, with the same seed and an input of the same shape; or build the module with its "
                        "sizes instead of a lazy one."
                    )
                refuse_tensor_hooks(fqn, param)
                axes, dim = place(fqn, param)
                new[id(param)] = Source(
                    param, [], fqn, axes, dim, view_of(fqn, param, axes), precision.keeps_dtype(fqn, param)
                )
                if new[id(param)].sends_payloads:
                    check_payloads(fqn, new[id(param)].local, axes, dim)
            source = new[id(param)]
            if owner not in source.owners:
                source.owners.append(owner)
    _check_memory(list(new.values()))
    return NewParameters(list(new.values()), borrowed)


def _check_memory(sources: Sequence[Source]) -> None:
    """Raise if different parameters overlap in memory, because sharding would separate them without an error."""
    spans = sorted(
        (str(param.device), param.data_ptr(), param.nbytes, source.fqn)
        for source in sources
        if not is_wrapper_type(type(param := source.param))
        and has_values(param)
        and param.is_contiguous()
        and param.numel()
    )
    for (device, start, nbytes, first), (other_device, other_start, _, second) in pairwise(spans):
        if device == other_device and other_start < start + nbytes:
            raise ConfigError(
                f"{first} and {second} are different parameters in the same memory, as after second.data = first.data. "
                "Sharding would give each its own copy. Make them one parameter: assign it to both modules."
            )


def _check_inner_first(modules: Sequence[nn.Module], module: nn.Module, name: str, unit: Unit) -> None:
    """Raise if the parameter `name` of `module`, inside `modules`, already belongs to a unit of an outer module."""
    outer = _first_around(module, unit.modules)
    if outer is not None:
        around = _first_around(module, modules)
        if around is not None and not any(around is inner for inner in outer.modules()):
            raise ConfigError(
                f"{name} of {type(module).__name__} is shared by two units: {type(outer).__name__}, which was sharded "
                f"first and owns it, and {type(around).__name__}. Make the shared {type(module).__name__} a unit: "
                "call fully_shard on it before any module that contains it."
            )
        raise ConfigError(
            f"{name} of {type(module).__name__} belongs to the unit of {type(outer).__name__} around it, which was "
            "sharded first, so no parameters are left to shard here. Call fully_shard on inner modules first and on "
            "the outermost module last."
        )


def _first_around(module: nn.Module, modules: Iterable[nn.Module]) -> nn.Module | None:
    """Return the first of `modules` that contains `module` and is not `module` itself."""
    others = (other for other in modules if other is not module)
    return next((other for other in others if any(module is inner for inner in other.modules())), None)


def initialize(
    modules: Iterable[nn.Module],
    device: torch.device,
    ignored: Iterable[nn.Parameter],
    param_init_fn: Callable[[nn.Module], None] | None,
) -> None:
    """Give memory and values to the parameters and buffers of `modules` that are on the meta device.

    Modules are initialized one at a time, with `param_init_fn(module)` if given, else with `reset_parameters()`. A
    parameter that several modules share stays shared, with the values that the first of them gave it.

    Raises:
        ConfigError: a module has neither, or `param_init_fn` left something on the meta device.
    """
    skip = {id(param) for param in ignored}
    for name, module in own_modules(modules):
        waiting = _on_meta(module, skip)
        if not waiting:
            continue
        fqn = clean_fqn(name) or type(module).__name__
        if param_init_fn is None and not callable(getattr(module, "reset_parameters", None)):
            raise ConfigError(
                f"{fqn} ({type(module).__name__}) has parameters on the meta device, such as {waiting[0]!r}, but no "
                "reset_parameters() to initialize them. Pass param_init_fn=, or define reset_parameters() on it."
            )
        with _keeping_identity(module):
            (param_init_fn or partial(_reset, device=device))(module)
        left = _on_meta(module, skip)
        if left:
            raise ConfigError(
                f"param_init_fn left {left[0]!r} of {fqn} on the meta device. It must call "
                "module.to_empty(device=..., recurse=False) and initialize the module's own parameters."
            )


def _reset(module: Any, device: torch.device) -> None:
    """Allocate `module` on `device` and call its `reset_parameters()`. Buffers that have values keep them."""
    valued = {name: buffer for name, buffer in module._buffers.items() if buffer is not None and not buffer.is_meta}
    module.to_empty(device=device, recurse=False)
    module._buffers.update(valued)
    with torch.no_grad():
        module.reset_parameters()


@contextmanager
def _keeping_identity(module: nn.Module) -> Iterator[None]:
    """Return a context for initializing `module` that restores its original parameter objects at the end.

    At the end, parameters that were on the meta device have the values of their replacements, unless an exception was
    raised. Parameters that already have values, because they are tied to those of another module, keep them: a
    placeholder is initialized instead.
    """
    own = {name: param for name, param in module._parameters.items() if param is not None}
    for name, param in own.items():
        if not param.is_meta:
            placeholder = torch.empty(param.shape, dtype=param.dtype, device="meta")
            module._parameters[name] = nn.Parameter(placeholder, requires_grad=param.requires_grad)
    succeeded = False
    try:
        yield
        succeeded = True
    finally:
        with without_weak_references(module):
            for name, param in own.items():
                given = module._parameters[name]
                if succeeded and param.is_meta and given is not None and given is not param:
                    _swap(param, given)
                module._parameters[name] = param


def _on_meta(module: nn.Module, skip: set[int]) -> list[str]:
    params = [name for name, p in module._parameters.items() if p is not None and p.is_meta and id(p) not in skip]
    return params + [name for name, b in module._buffers.items() if b is not None and b.is_meta]


def allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate memory, without values, for the entries of the state dict of `model` that are on the meta device.

    Sharded parameters are allocated on the device of their unit's shards, other parameters and buffers on `device`.
    Parameters stay the same objects.
    """
    for unit in units_in(model):
        if unit.is_meta:
            with changing_shards(unit):
                for param in unit.params:
                    local = torch.empty_like(param.local, device=unit.shards.device)
                    give(param.sharded, dtensor_like(local, param.dtensor))
    for module in model.modules():
        with without_weak_references(module):
            for plain in module._parameters.values():
                if plain is not None and plain.is_meta:
                    give(plain, torch.empty_like(plain, device=device))
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and name not in module._non_persistent_buffers_set:
                module._buffers[name] = torch.empty_like(buffer, device=device)


def give(param: nn.Parameter, value: Tensor) -> None:
    """Give `param` the memory and the values of `value`. It stays the same object."""
    _swap(param, nn.Parameter(value, requires_grad=param.requires_grad))


def _swap(param: nn.Parameter, given: nn.Parameter) -> None:
    """Replace the contents of `param` with those of `given`, except for attributes that users have set."""
    marks = dict(vars(param))
    torch.utils.swap_tensors(param, given)
    vars(param).update(marks)


def move_buffers(modules: Iterable[nn.Module], device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Move the buffers of `modules` to `device`, and floating-point ones to `dtype` if given.

    Those on the meta device and those of ignored modules stay as they are. Plain tensors stay the same objects, because
    other modules may have them, too.
    """
    for _, module in own_modules(modules):
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta and not is_ignored(buffer):
                cast = dtype if dtype is not None and is_castable(buffer.dtype) else buffer.dtype
                moved = buffer.to(device, cast)
                if type(buffer) is not Tensor:
                    module._buffers[name] = moved
                elif moved is not buffer:
                    buffer.data = moved
