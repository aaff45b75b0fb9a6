"""The registry of units by module, and their names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.comm.mesh import Axes
from fullshard.device.awaited import settled
from fullshard.disk.interface import errors_noted_by
from fullshard.engine.findings import DiskFailures
from fullshard.engine.unit import Unit
from fullshard.errors import StateError
from fullshard.policy.offload import Offload

_UNIT = "_fullshard_unit"  # attribute of a module that holds its unit, so that both have the same lifetime


def register(unit: Unit) -> None:
    """Register `unit` for each of its modules, for `unit_of`."""
    for module in unit.modules:
        register_as(unit, module)


def register_as(unit: Unit, module: nn.Module) -> None:
    """Register `unit` for `module`, for `unit_of`."""
    vars(module)[_UNIT] = unit  # in the instance, because its class may stay the user's own


def unregister(module: nn.Module) -> Unit | None:
    """Remove the registration of `module`, and return its unit, if there was any."""
    unit = _unit_or_none(module)
    vars(module).pop(_UNIT, None)
    return unit


def unit_of(module: nn.Module) -> Unit:
    """Return the unit of `module`. If `module` is a wrapper, return the unit of the module that it wraps."""
    found = module.__dict__.get(_UNIT)
    unit = found if type(found) is Unit else _unit_or_none(unwrapped(module))
    if unit is None:
        raise StateError(
            f"{type(module).__name__} is not a unit. Call fully_shard(module) on it first, or pass one of its units."
        )
    return unit


def units_in(module: nn.Module) -> list[Unit]:
    """Return all units in `module` and below, each once, in the order of `module.modules()`."""
    found: dict[int, Unit] = {}
    for child in module.modules():
        unit = _unit_or_none(child)
        if unit is not None:
            found.setdefault(id(unit), unit)
    return list(found.values())


def own_modules(modules: Iterable[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return the modules in `modules` that do not belong to another unit, with names relative to `modules`.

    A module that two parents share is returned twice, with both names.
    """
    found: list[tuple[str, nn.Module]] = []

    def visit(name: str, module: nn.Module) -> None:
        found.append((name, module))
        for child_name, child in module.named_children():
            if not is_unit(child):
                visit(f"{name}.{child_name}" if name else child_name, child)

    for module in modules:
        visit("", module)
    return found


def has_forward(module: nn.Module) -> bool:
    """Return whether the class of `module`, or `module` itself, defines a forward."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def buffers_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the buffers of `modules` and of the modules below that do not belong to another unit, each once.

    For a `DTensor` (as created by `distribute_module`), this is its local tensor.
    """
    return [_local(buffer) for buffer in _buffers_of(modules)]


def replicated_buffers_of(modules: Iterable[nn.Module], axes: Axes) -> list[Tensor]:
    """Return `buffers_of(modules)` without `DTensor`s that are sharded over the ranks of `axes`."""
    return [_local(buffer) for buffer in _buffers_of(modules) if not _is_cut_along(buffer, axes)]


def _buffers_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    found = (buffer for _, module in own_modules(modules) for buffer in module._buffers.values())
    return list({id(buffer): buffer for buffer in found if buffer is not None}.values())


def _local(buffer: Tensor) -> Tensor:
    local: Tensor = settled(buffer._local_tensor) if isinstance(buffer, DTensor) else buffer
    return local


def _is_cut_along(buffer: Tensor, axes: Axes) -> bool:
    if not isinstance(buffer, DTensor):
        return False
    cut = [axis for axis, placement in enumerate(buffer.placements) if not placement.is_replicate()]
    groups = [buffer.device_mesh.get_group(axis) for axis in cut]
    return any(len(axes.ranks.intersection(dist.get_process_group_ranks(group))) > 1 for group in groups)


def process_groups_along(units: Iterable[Unit]) -> list[dist.ProcessGroup]:
    """Return the process groups that connect, one after the other, all ranks that these units are sharded over."""
    return list(dict.fromkeys(group for unit in units for group in unit.process_groups))


@contextmanager
def failing_together(units: Sequence[Unit]) -> Iterator[None]:
    """Context manager for an operation that all ranks run with tensors that may be on a disk, such as optimizer states.

    A disk that fails on one rank is an error on all of them, at the end of the block. This is a collective if `units`
    may offload to a disk. See [Note: a disk that fails on one rank].

    Raises:
        DiskError: The disk of a rank has failed.
    """
    if not any([isinstance(unit.options.offload, Offload) and unit.options.offload.folder for unit in units]):
        yield
        return
    failures = DiskFailures()
    with errors_noted_by(failures.noted):
        yield
    failures.raise_on_every_rank(process_groups_along(units), units[0].device)


def is_unit(module: nn.Module) -> bool:
    """Return True if `module` is a unit, whose forward unshards parameters."""
    return _unit_or_none(module) is not None


def _unit_or_none(module: nn.Module) -> Unit | None:
    unit = vars(module).get(_UNIT)
    return unit if isinstance(unit, Unit) else None


_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def clean_fqn(name: str) -> str:
    """Return `name` as in the user's module, without the names that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return `module`, or the module in it if it is a wrapper such as that of activation checkpointing."""
    while not is_unit(module):
        inner = next((module._modules[name] for name in _WRAPPERS if name in module._modules), None)
        if inner is None:
            break
        module = inner
    return module


def name_units(root: nn.Module, units: Sequence[Unit], place: str = "") -> None:
    """Name each unit after the FQN of its first module in `root`.

    If there are several roots, `place` is the prefix of the names.
    """
    names = {module: clean_fqn(name) for name, module in root.named_modules()}
    for unit in units:
        name = next(names[module] for module in unit.modules if module in names)
        unit.name = f"{place}.{name}" if place and name else place or name
