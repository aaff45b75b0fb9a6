"""Creation of units from modules, and copies of sharded modules."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fullshard._compat import dtensor_like, holds_tensors, marks_of
from fullshard.comm.mesh import (
    Axes,
    axes_chosen,
    axes_of_replicas,
    broadcast_from_first,
    resolve_axes,
    resolve_groups,
)
from fullshard.device.current import current_device, usual_device_type
from fullshard.engine.hooks import as_plain, changing_shards, check_idle, drop_own_hooks, install, watch_zero_grad
from fullshard.engine.late_params import watch_registrations
from fullshard.engine.managed import managed_by, mark_ignored
from fullshard.engine.materialize import find_parameters, give, initialize, move_buffers
from fullshard.engine.other_engines import watch_wrappers
from fullshard.engine.registry import is_unit, own_modules, replicated_buffers_of, units_in
from fullshard.engine.sharded_param import ShardedParam
from fullshard.engine.sharded_use import explain_mixtures, explain_reads
from fullshard.engine.uncounted_writes import watch_writes
from fullshard.engine.unit import Unit
from fullshard.errors import ConfigError, StateError
from fullshard.layout.shard_spec import ShardSpec, choose_spec
from fullshard.optim.local_steps import watch_optimizers
from fullshard.policy.arguments import check_type
from fullshard.policy.meshes import ShardPlacementResult
from fullshard.policy.options import ShardOptions
from fullshard.policy.strategy import Placement
from fullshard.state.state_dict import copy_settings, register_hooks
from fullshard.tape.recorder import Phase

ShardPlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]


def shard_unit(
    modules: Sequence[nn.Module],
    options: ShardOptions,
    *,
    mesh: DeviceMesh | Axes | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    device: torch.device | None = None,
    param_init_fn: Callable[[nn.Module], None] | None = None,
    materialize: bool = False,
    sync_module_states: bool = False,
    buffer_dtype: torch.dtype | None = None,
) -> Unit:
    """Create one unit of `modules`, with its hooks, for `fully_shard` and `FullyShardedDataParallel`.

    Args:
        modules: See `fully_shard`, also for all arguments with the same names.
        options: The options of the unit.
        mesh: The mesh to shard over, or its axes.
        ignored_params: Parameters that are neither sharded nor synchronized.
        shard_placement_fn: The function that selects the dim, and optionally the mesh, to shard a parameter along.
        device: The device that computes. If None, it is the current device of the mesh's type.
        param_init_fn: The function that initializes one module on the meta device.
        materialize: Whether to initialize modules on the meta device now. Otherwise they stay there.
        sync_module_states: Whether every rank gets the values of the mesh's first rank.
        buffer_dtype: The dtype to cast floating-point buffers to.
    """
    _check(modules)
    ranks = mesh.mesh if isinstance(mesh, Axes) else mesh
    device_type = device.type if device is not None else usual_device_type() if ranks is None else ranks.device_type
    axes, placements = resolve_groups(resolve_axes(mesh, options.placements, device_type), options.placements)
    device = device or current_device(axes.mesh.device_type)  # the creation of the mesh may have selected it
    options = replace(options, placements=placements)
    ignored = list(ignored_params or ())
    mark_ignored(ignored, (module for _, module in own_modules(modules)))
    if materialize:
        initialize(modules, device, ignored, param_init_fn)
    place = partial(_place, axes, options, shard_placement_fn)
    found = find_parameters(modules, ignored, place, options.precision)
    move_buffers(modules, device, buffer_dtype)
    if sync_module_states:
        for over in dict.fromkeys([axes, *(source.axes for source in found.sources)]):
            values = [source.local for source in found.sources if source.axes == over]
            buffers = replicated_buffers_of(modules, axes) if over is axes else []
            broadcast_from_first([*values, *buffers], over, Phase.IDLE)
    unit = Unit(modules, found.sources, found.borrowed, options, axes, device)
    install(unit)
    watch_optimizers()
    watch_zero_grad()
    watch_writes()
    watch_wrappers()
    watch_registrations()
    explain_mixtures()
    explain_reads()
    own = [module for _, module in own_modules(modules)]
    register_hooks(own, unit)
    if placements.parameters is not Placement.WHOLE:
        _mark(own)
    for module in modules:
        vars(module)["__deepcopy__"] = partial(copy_sharded, module)
    return unit


def _mark(modules: Iterable[nn.Module]) -> None:
    """Mark `modules` like torch's sharded modules, so that transformers' `generate` runs equally long on all ranks."""
    for module in modules:
        vars(module).update(_is_fsdp_managed_module=True, _fsdp_use_orig_params=True)  # bypasses custom __setattr__


def _place(
    axes: Axes, options: ShardOptions, choose: ShardPlacementFn | None, fqn: str, param: nn.Parameter
) -> tuple[Axes, int | None]:
    """Return the axes to shard a parameter over, and the dim to shard it along (None for the default).

    These are the axes of its unit, unless `choose`, a user's `shard_placement_fn`, or an alignment requires other axes.
    """
    axes, dim = _chosen_place(axes, choose, fqn, param)
    aligns = options.shard_alignment > 1 and options.placements.optimizer is Placement.SHARDED
    if aligns and param.requires_grad and param.numel() >= _ALIGNED_FROM_NUMEL:
        return _aligned_place(axes, dim, options.shard_alignment, fqn, param)
    return axes, dim


def _chosen_place(
    axes: Axes, choose: ShardPlacementFn | None, fqn: str, param: nn.Parameter
) -> tuple[Axes, int | None]:
    chosen, shape = None if choose is None else choose(param), tuple(param.shape)
    info = getattr(chosen, "mesh_info", None)  # torch's own result has the same fields
    placement = chosen if info is None else getattr(chosen, "placement", None)
    if info is not None:
        others = axes_chosen(info, fqn)
        if others != axes:
            _check_together(fqn, axes, others)
            axes = others
    if placement is None:
        return axes, None
    if type(placement) is not Shard or not -len(shape) <= placement.dim < len(shape):
        raise ConfigError(
            f"shard_placement_fn returned {chosen!r} for {fqn} of shape {shape}. Return Shard(dim) with one of its "
            f"{len(shape)} dims, None for the default, or a ShardPlacementResult of one of these and a mesh."
        )
    return axes, placement.dim % len(shape)


_ALIGNED_FROM_NUMEL = 4096  # minimum number of elements of parameters to align: optimizers do not encode smaller ones


def _aligned_place(axes: Axes, dim: int | None, block: int, fqn: str, param: nn.Parameter) -> tuple[Axes, int | None]:
    """Return axes and dim for shards that consist of whole blocks along dim 0, or else for a replicated parameter."""
    shape = tuple(param._local_tensor.shape if isinstance(param, DTensor) else param.shape)
    specs = [choose_spec(shape, axes.shard_world, dim)]
    if dim is None:
        specs.append(ShardSpec(shape, 0, axes.shard_world))
    aligned = next((spec for spec in specs if spec.consists_of_blocks(block)), None)
    if aligned is not None:
        return axes, aligned.dim
    found = (
        f"{fqn} of shape {shape}, sharded along dim {specs[0].dim} over {axes.shard_world} ranks, has shards of "
        f"{specs[0].part_numel} elements, not a multiple of shard_alignment={block}"
    )
    if isinstance(param, DTensor) or axes.group_size is not None or dim not in (None, 0):
        raise ConfigError(
            f"{found}. It cannot stay whole on every rank either, since it is also sharded by tensor parallelism, by "
            "groups of ranks or by shard_placement_fn. Choose a number of ranks or rows so that shards are multiples "
            "of the block size, or shard it without shard_alignment."
        )
    return axes_of_replicas(axes), None


def _check_together(fqn: str, axes: Axes, others: Axes) -> None:
    """Raise an error if meshes for single parameters cannot be combined with the mesh of their unit.

    Raises:
        ConfigError: They have a different device type, or the unit's ranks keep states in groups.
    """
    if others.mesh.device_type != axes.mesh.device_type:
        raise ConfigError(
            f"shard_placement_fn chose {others.mesh} for {fqn}, but its unit is on {axes.mesh}. Create both meshes "
            "for the same type of device."
        )
    if axes.group_size is not None:
        raise ConfigError(
            f"shard_placement_fn chose {others.mesh} for {fqn}, but its unit keeps states in groups of "
            f"{axes.group_size} ranks of {axes.mesh}. Make the modules on the other mesh a separate unit."
        )


def _check(modules: Sequence[nn.Module]) -> None:
    if not modules:
        raise ConfigError("fully_shard got an empty list of modules. Pass a module, or a list with at least one.")
    for module in modules:
        check_type("module", module, nn.Module, "an nn.Module, or a list of them")
        if is_unit(module):
            raise ConfigError(
                f"{type(module).__name__} is already sharded. Call fully_shard once on each module, inner modules "
                "first."
            )
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            raise ConfigError(
                f"{type(module).__name__} has no forward, so it would never be gathered. Call fully_shard on each "
                "module in it, then on the module that contains it."
            )
    for name, module in own_modules(modules):
        if isinstance(module, torch.jit.RecursiveScriptModule):
            raise ConfigError(
                f"{name or 'the module'} was created by torch.jit.script, which does not support hooks, so it would "
                "never be gathered. Shard the original module, and compile it with torch.compile or torch.jit.trace."
            )
    if torch.is_inference_mode_enabled():
        raise StateError(
            "fully_shard was called within torch.inference_mode(). Tensors created there cannot be trained, and their "
            "changes are not tracked. Shard the model outside of it, and run the forward within it."
        )


# -- copies -----------------------------------------------------------------------------------------------------------

PLAIN_CLASS = "_fullshard_plain_class"  # an attribute of classes that `fully_shard` gives modules: the user's own class
_COPYING = "fullshard: a sharded module that is being copied"  # a key of the memo, whose other keys are ids


def copy_sharded(module: nn.Module, memo: dict[Any, Any]) -> nn.Module:
    """Implement `copy.deepcopy` of a sharded module: the copy has the same sharding and values. Nothing is
    communicated.

    An optimizer that is copied after the module, in the same call, has the parameters of the copy.

    Raises:
        StateError: The module is in forward or backward, or shares a unit with modules that are not copied, or its
            parameters were copied before it.
    """
    module = _module_being_copied(module)
    if _COPYING in memo:
        return _copy_structure(module, memo)
    units = units_in(module)
    _check_whole(module, units)
    _check_not_copied(module, units, memo)
    for unit in units:
        check_idle(unit, "to be copied")
        unit.residency.reshard()
        unit.check_replacements()
        memo[id(unit)] = None
        for param in unit.params:
            memo[id(param.sharded)] = _on_meta(param, memo)
    memo[_COPYING] = True
    try:
        copied = _copy_structure(module, memo)
    finally:
        del memo[_COPYING]
    for inner in copied.modules():
        drop_own_hooks(inner)
    for unit in _in_sharding_order(units):
        _shard_identically(unit, memo)
    copy_settings({inner: memo[id(inner)] for inner in module.modules()})
    return copied


def _module_being_copied(module: nn.Module) -> nn.Module:
    """Return the object that `copy.deepcopy` copies by the method of `module`: `module`, or a wrapper around it.

    Wrappers such as that of activation checkpointing look up unknown attributes in the module that they wrap, so
    `copy.deepcopy` of a wrapper finds the method of the wrapped module, and would lose the wrapper. Only the frame of
    `copy.deepcopy` shows which of the two is being copied.
    """
    frame = inspect.currentframe()
    for _ in range(2):  # the callers: `copy_sharded`, and what called it
        frame = None if frame is None else frame.f_back
    if frame is not None and frame.f_locals.get("self") is module:  # `__deepcopy__` of this package's wrapper
        frame = frame.f_back
    source = frame.f_locals.get("x") if frame is not None and frame.f_code is copy.deepcopy.__code__ else module
    return source if isinstance(source, nn.Module) else module


def _in_sharding_order(units: Sequence[Unit]) -> list[Unit]:
    """Return `units` sorted so that each follows those inside it and those whose tied parameters it borrows."""
    ordered: dict[Unit, None] = {}
    path: list[Unit] = []

    def visit(unit: Unit) -> None:
        if unit in ordered:
            return
        if unit in path:
            raise StateError(
                f"copy.deepcopy: {unit.name or 'the root'} and {path[-1].name or 'the root'} use parameters of each "
                "other, because weights were tied or exchanged after fully_shard, so neither can be sharded first. Tie "
                "or exchange them before fully_shard, or copy the model before that."
            )
        path.append(unit)
        for inner in [
            each_unit for module in unit.modules for each_unit in reversed(units_in(module)) if each_unit is not unit
        ]:
            visit(inner)
        for lender in unit.borrowed:
            visit(lender)
        path.pop()
        ordered[unit] = None

    for unit in reversed(units):
        visit(unit)
    return list(ordered)


def _check_whole(module: nn.Module, units: Sequence[Unit]) -> None:
    inside = set(module.modules())
    for unit in units:
        odd = [param for param in unit.params if holds_tensors(param.local)]
        if odd:
            raise StateError(
                f"copy.deepcopy of {type(module).__name__}: {odd[0].fqn} of {unit.name or 'its unit'} is a "
                f"{type(odd[0].local).__name__}, which cannot be created without values. Copy the module before "
                "fully_shard, and shard both."
            )
        needed = [module for whose in (unit, *unit.borrowed) for module in whose.modules]
        missing = [item for item in needed if item not in inside]
        if missing:
            raise StateError(
                f"copy.deepcopy of {type(module).__name__}: {unit.name or 'its unit'} also has parameters of "
                f"{type(missing[0]).__name__}, which is outside this module. Copy a module that contains both."
            )


def _check_not_copied(module: nn.Module, units: Sequence[Unit], memo: dict[Any, Any]) -> None:
    copied = next((param for unit in units for param in unit.params if id(param.sharded) in memo), None)
    if copied is not None:
        raise StateError(
            f"copy.deepcopy of {type(module).__name__}: {copied.fqn} was already copied in this call, with an "
            "optimizer or with an inner module, and the copy of this module would not have that copy. Copy the "
            "outermost module first: model, optimizer = copy.deepcopy((model, optimizer))."
        )


def _copy_structure(module: nn.Module, memo: dict[Any, Any]) -> nn.Module:
    """Return a copy of `module` as if it were not sharded, with the entries of `memo` in place of parameters.

    If the class defines `__deepcopy__`, such as a parametrized module, that method is used. The method of this
    package's wrapper calls this function again, and is not called a second time.
    """
    method: Callable[..., nn.Module] | None = getattr(type(module), "__deepcopy__", None)
    called = (_COPYING, id(module))
    with as_plain(module):
        if method is not None and called not in memo:
            memo[called] = True
            copied = memo[id(module)] = _copy_by(method, module, memo)
        else:
            reduced: Any = object.__reduce_ex__(module, 4)  # calls `__reduce__` of the class
            make, arguments, *state = reduced
            if type(module).__reduce__ is object.__reduce__:  # the default calls methods of the class
                copied = memo[id(module)] = object.__new__(type(module))
            else:
                copied = memo[id(module)] = make(*copy.deepcopy(arguments, memo))
            if state:
                copied.__setstate__(copy.deepcopy(state[0], memo))
    return copied


def _copy_by(method: Callable[..., nn.Module], module: nn.Module, memo: dict[Any, Any]) -> nn.Module:
    """Call `method` while the module has the user's class, which `method` may instantiate. Return the result."""
    cls = type(module)
    plain = vars(cls).get(PLAIN_CLASS, cls)
    module.__class__ = plain
    try:
        copied = method(module, memo)
    finally:
        module.__class__ = cls
    if type(copied) is plain:
        copied.__class__ = cls
    return copied


def _on_meta(param: ShardedParam, memo: dict[Any, Any]) -> nn.Parameter:
    """Return a parameter on the meta device with the shape and the attributes of `param` before sharding."""
    local = torch.empty(param.layout.spec.shape, dtype=param.local.dtype, device="meta")
    made = nn.Parameter(param.view.make_unsharded(local), requires_grad=param.sharded.requires_grad)
    if param.grad_dtype is not None:
        made.grad_dtype = param.grad_dtype
    vars(made).update(copy.deepcopy(marks_of(param.sharded), memo))
    return made


def _shard_identically(unit: Unit, memo: dict[Any, Any]) -> None:
    """Create a unit from the copies of `unit`'s modules, with the same sharding and current values."""
    modules = [memo[id(module)] for module in unit.modules]
    places = {
        id(memo[id(param.sharded)]): (param.layout.spec.dim, param_group.plan.axes)
        for param_group in unit.param_groups
        for param in param_group.params
    }

    def placed_identically(param: nn.Parameter) -> ShardPlacementResult:
        dim, axes = places[id(param)]
        return ShardPlacementResult(None if dim is None else Shard(dim), axes)

    plain = [param for _, module in own_modules(unit.modules) for param in module._parameters.values()]
    made = shard_unit(
        modules,
        unit.options,
        mesh=unit.axes,
        ignored_params=[memo[id(param)] for param in plain if param is not None and managed_by(param) is None],
        shard_placement_fn=placed_identically,
        device=unit.device,
    )
    made.settings = unit.settings.copy()
    # Parameters may have been frozen since they were grouped, so the order of the copies may differ.
    copies = {(owner.module, owner.name): param for param in made.params for owner in param.owners}
    # A weight that was tied after sharding replaces others, and modules may have been removed.
    present = [(peer, owner) for peer in unit.params for owner in peer.owners if id(owner.module) in memo]
    owned = dict(reversed(present))
    pairs = [(peer, copies[memo[id(owner.module)], owner.name]) for peer, owner in owned.items()]
    if not unit.is_meta:
        with changing_shards(made), torch.no_grad():
            for peer, own in pairs:
                # Fractions and budgets may choose another device for the copy.
                give(own.sharded, dtensor_like(peer.local.to(made.shards.device, copy=True), own.dtensor))
    for peer, own in pairs:
        memo[id(peer.sharded)] = own.sharded  # for an optimizer that is copied next
