"""Bytes per rank by state: predicted from shapes and placements, and measured in a running engine.

The formula, for the units of a model with the layouts of `layout/group_layout.py`:

    parameters        memory between steps: shards, or unsharded buffers if they are kept; for units on the CPU
                      alongside an accelerator, at most a copy of the shards in the compute dtype
    gradients         those that the optimizer sees: shards, or unsharded ones if the optimizer is whole; and the error
                      feedback of encoded gradients
    optimizer state   the number of values that the optimizer keeps per parameter element; without those on disk, but
                      with the buffers for them, of three chunks (`state/steps_in_chunks.py`)
    gathered peak     unsharded buffers beyond those kept between steps: of every unit if parameters stay unsharded
                      until backward; else of the root and the two adjacent units that need most, one computing, one
                      prefetched; and the secondary shards of all units up to these, if groups keep them
    activations       tensors that forward saves for backward: counted in a forward on fake tensors, without memory
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard._compat import inner_tensors
from fullshard._dry_compat import fake_tensors, storage_watch
from fullshard.comm.codec import codec_named
from fullshard.comm.encoded import error_feedback_numel
from fullshard.comm.mesh import resolve_groups
from fullshard.disk.buffers import buffers_of
from fullshard.disk.interface import BUFFERS, MOST_WRITING
from fullshard.disk.tensors import OnDisk
from fullshard.engine.footprint import gathered_peak, kept_between_steps
from fullshard.engine.group_plan import GroupPlan
from fullshard.engine.managed import managed_by
from fullshard.engine.placements import placements_of
from fullshard.engine.registry import units_in
from fullshard.engine.unit import Unit
from fullshard.errors import ConfigError
from fullshard.layout.shard_spec import owned
from fullshard.policy.offload import StatePlacement
from fullshard.policy.strategy import Placement, ShardingStrategy, resolve_placements
from fullshard.policy.strategy import Placements as StrategyPlacements
from fullshard.state.on_disk import chunks_on_disk, states_on_disk
from fullshard.tape.recorder import recording

TIERS = ("device", "cpu", "disk")  # the tiers: the device that computes, the CPU alongside it, and disk


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """The bytes of one rank by state, each at its peak."""

    parameters: int
    gradients: int
    optimizer_state: int
    gathered_peak: int
    activations: int

    @property
    def total(self) -> int:
        """The sum over all states."""
        return sum(getattr(self, state.name) for state in fields(self))


@dataclass(frozen=True, kw_only=True)
class OptimizerCost:
    """The state of an optimizer per parameter: `values` per element, in the parameter's dtype, and `extra_bytes`.

    The default is that of Adam and AdamW: two moments, and a step count in float32.
    """

    values: int = 2
    extra_bytes: int = 4


def predict_ledger(
    model: nn.Module,
    *,
    strategy: str | ShardingStrategy | StrategyPlacements | None = None,
    optimizer: OptimizerCost | None = None,
    activations: int = 0,
) -> Ledger:
    """Return the predicted ledger of this rank for `model`, by default with its own strategy.

    Args:
        model: A module with units. Nothing is executed, and no values are read.
        strategy: The strategy to predict for. If None, that of the model. The number of ranks on the shard axis does
            not change.
        optimizer: The optimizer state per parameter. If None, that of AdamW.
        activations: Bytes that forward saves for backward, for example those of `predict_activations`.
    """
    return predict_tiers(model, strategy=strategy, optimizer=optimizer, activations={"device": activations})["device"]


def predict_tiers(
    model: nn.Module,
    *,
    strategy: str | ShardingStrategy | StrategyPlacements | None = None,
    optimizer: OptimizerCost | None = None,
    activations: Mapping[str, int] | None = None,
) -> dict[str, Ledger]:
    """Return the predicted ledger of this rank for each of TIERS: "device", "cpu" (host memory), and "disk".

    Each byte is counted in exactly one tier. When computing on the CPU, all of its memory is in the tier "device".
    Buffers for states on disk are in the tier whose processor updates these states.

    Args:
        model: See `predict_ledger`.
        strategy: See `predict_ledger`.
        optimizer: See `predict_ledger`.
        activations: Bytes that forward saves for backward, by tier.
    """
    units, size, placements = _under(model, strategy)
    cost, kept = optimizer or OptimizerCost(), activations or {}
    every = _groups(units, size, placements)
    on_disk = predict_on_disk(model, strategy=strategy, optimizer=cost)
    here, there = (
        _in_memory(
            [item for item in every if item.plan.memory.offloaded == alongside], cost, on_disk, is_alongside=alongside
        )
        for alongside in (False, True)
    )
    device = replace(
        here,
        parameters=here.parameters
        + sum(item.plan.copy_nbytes for item in every)
        + kept_between_steps(units, size, placements),
        gradients=here.gradients + sum(item.error_feedback for item in every),
        gathered_peak=gathered_peak(units, size, placements),
    )
    disk = Ledger(
        parameters=on_disk.shard_nbytes,
        gradients=sum(item.gradients_on_disk for item in every),
        optimizer_state=on_disk.nbytes,
        gathered_peak=0,
        activations=0,
    )
    found = zip(TIERS, (device, there, disk), strict=True)
    return {tier: replace(ledger, activations=kept.get(tier, 0)) for tier, ledger in found}


def _in_memory(
    groups: Sequence[_GroupBytes], cost: OptimizerCost, on_disk: OnDiskCost, *, is_alongside: bool
) -> Ledger:
    """Return the memory of parameter groups on the device, or on the CPU alongside it."""
    offloaded = on_disk.alongside_nbytes if is_alongside else on_disk.nbytes - on_disk.alongside_nbytes
    buffers = on_disk.buffer_nbytes if is_alongside == (on_disk.alongside_nbytes > 0) else 0
    return Ledger(
        parameters=sum(group.plan.stored_nbytes for group in groups),
        gradients=sum(group.gradients for group in groups),
        optimizer_state=sum(group.optimizer(cost) for group in groups) - offloaded + buffers,
        gathered_peak=0,
        activations=0,
    )


@dataclass(frozen=True, kw_only=True)
class OnDiskCost:
    """Bytes on disk, without padding to whole blocks, and of the memory buffers for the optimizer step."""

    nbytes: int = 0  # of the optimizer state
    alongside_nbytes: int = 0  # the part of `nbytes` that the CPU updates alongside an accelerator
    shard_nbytes: int = 0  # of parameters; the same number again for their gradients
    buffer_nbytes: int = 0


def predict_on_disk(
    model: nn.Module,
    *,
    strategy: str | ShardingStrategy | StrategyPlacements | None = None,
    optimizer: OptimizerCost | None = None,
) -> OnDiskCost:
    """Return the bytes on disk if a single optimizer updates all of `model`. For arguments see `predict_ledger`."""
    units, size, placements = _under(model, strategy)
    cost = optimizer or OptimizerCost()
    nbytes: dict[int, int] = {}
    for param_group in (param_group for unit in units for param_group in unit.param_groups):
        plan = param_group.plan.under(size, placements)
        for param, layout in zip(param_group.params, plan.layout.params, strict=True):
            numel = layout.spec.shard_numel(plan.rank) if plan.shards_optimizer else layout.spec.numel
            nbytes[id(param.sharded)] = cost.values * numel * plan.contract.stored.itemsize
    stored = [unit for unit in units if unit.shards.is_on_disk]
    params = [param.sharded for unit in units for param in unit.params]
    if placements.parameters is Placement.WHOLE:  # such strategies do not support parameters on disk
        params = [param.sharded for unit in units if unit not in stored for param in unit.params]
        stored = []
    each = [chunk for _, chunk in chunks_on_disk(params)]
    chunks = [sum(nbytes[id(param)] for param in chunk) for chunk in each]
    buffers = sum(max(chunks[turn::BUFFERS], default=0) for turn in range(BUFFERS))
    separate = {id(param.sharded) for unit in stored for param in unit.params}
    alongside = {id(param.sharded) for unit in stored if unit.shards.is_offloaded for param in unit.params}
    stepped = (sum(nbytes[id(item)] for item in chunk if id(item) in separate) for chunk in each)
    passing = 2 * max(stepped, default=0) // max(1, cost.values)  # shards and gradients of a chunk
    shards = [param_group.plan for unit in stored for param_group in unit.param_groups]
    return OnDiskCost(
        nbytes=sum(chunks),
        alongside_nbytes=sum(nbytes[item] for chunk in each for item in map(id, chunk) if item in alongside),
        shard_nbytes=sum(plan.layout.shard_numel * plan.contract.stored.itemsize for plan in shards),
        buffer_nbytes=buffers + (MOST_WRITING + 2) * passing,
    )


def plans_without_offload(model: nn.Module) -> Iterator[tuple[Unit, GroupPlan, bool]]:
    """Yield units of `model`, their parameter group plans with their final placement, and whether they are trained."""
    units, size, placements = _under(model, None)
    yield from ((group.unit, group.plan, group.is_trained) for group in _groups(units, size, placements))


def predict_error_feedback(model: nn.Module) -> int:
    """Return the bytes of quantization error feedback, which the gradients in this rank's ledger include."""
    units, size, placements = _under(model, None)
    return sum(group.error_feedback for group in _groups(units, size, placements))


@dataclass(frozen=True)
class _GroupBytes:
    """Bytes of one parameter group's states, derived from its plan."""

    unit: Unit
    plan: GroupPlan
    is_trained: bool

    @property
    def gradients(self) -> int:
        """Bytes of the gradients that the optimizer sees, if in memory."""
        return 0 if self.plan.is_on_disk else self._gradients

    @property
    def gradients_on_disk(self) -> int:
        """Bytes of the gradients on disk."""
        return self._gradients if self.plan.is_on_disk else 0

    @property
    def _gradients(self) -> int:
        if not self.is_trained:
            return 0
        plan, layout = self.plan, self.plan.layout
        numel = layout.shard_numel if plan.shards_optimizer else sum(param.spec.numel for param in layout.params)
        return numel * plan.contract.delivered.itemsize

    @property
    def error_feedback(self) -> int:
        """Bytes of quantization error feedback, in float32; see `comm/encoded.py`."""
        plan, layout, axes = self.plan, self.plan.layout, self.plan.axes
        encoding = plan.contract.reduce_wire
        if encoding is None or not codec_named(encoding).keeps_error or not self.is_trained:
            return 0
        replicas = 1 if axes.replicate_group is None else axes.world // axes.shard_world
        if plan.shards_optimizer:
            world, whole = layout.world, [layout.shard_numel]
            if plan.sums_in_two_levels:  # nothing is encoded within a group
                assert axes.group_size is not None
                world //= axes.group_size
            parts = [item.spec.part_numel for item in layout.in_place]
            kept = error_feedback_numel([*parts, layout.pack_numel], world, whole=False)
        else:
            packed = sum(param.spec.numel for param in layout.params if not param.in_place)
            whole = [*(item.spec.numel for item in layout.in_place), packed]
            kept = _feedback_of_wholes(whole, layout.world)
        return 4 * (kept + _feedback_of_wholes(whole, replicas))

    def optimizer(self, cost: OptimizerCost) -> int:
        """Return the bytes of the optimizer state on this rank."""
        if not self.is_trained:
            return 0
        plan, specs = self.plan, [param.spec for param in self.plan.layout.params]
        numel = sum(spec.shard_numel(plan.rank) if plan.shards_optimizer else spec.numel for spec in specs)
        return cost.values * numel * plan.contract.stored.itemsize + cost.extra_bytes * len(specs)


def _groups(units: Sequence[Unit], group_size: int | None, placements: StrategyPlacements) -> list[_GroupBytes]:
    """Return the byte counts of the parameter groups of `units`, which all belong to one root, under `placements`."""
    found = []
    for unit, destination in placements_of(units).items():
        could_not = destination is StatePlacement.DISK and placements.parameters is Placement.WHOLE
        memory = unit.shards.memory_at(StatePlacement.DEVICE if could_not else destination)
        for param_group in unit.param_groups:
            plan = replace(param_group.plan.under(group_size, placements), memory=memory)
            found.append(_GroupBytes(unit, plan, param_group.is_trained))
    return found


def _feedback_of_wholes(numels: Sequence[int], world: int) -> int:
    """Return the elements of error feedback for tensors of `numels` elements whose full sums all `world` ranks get."""
    parts = [len(owned(numel, world, 0)) for numel in numels]
    return error_feedback_numel(parts, world, whole=True) if world > 1 else 0


def measure_ledger(model: nn.Module, optimizer: torch.optim.Optimizer, forward: Callable[[], Tensor]) -> Ledger:
    """Measure the ledger of this rank in one microbatch. Its gradients are discarded. Every rank must call this.

    Args:
        model: A module with units, whose optimizer has taken a step and so has its state.
        optimizer: The optimizer of the model's sharded parameters, which have no gradients at this time.
        forward: Returns the loss of one microbatch.
    """
    units = _units(model)
    with recording() as record:
        loss, activations = live_after(forward)
        loss.backward()
    params = [param for param in model.parameters() if not _is_offloaded(param)]
    gradients = storage_bytes(param.grad for param in params if param.grad is not None)
    gradients += sum(param_group.error_feedback_nbytes for unit in units for param_group in unit.param_groups)
    optimizer.zero_grad()
    kept = [unit for unit in units if unit.keeps_unsharded]
    groups = sum(unit.residency.secondary_nbytes for unit in units)
    copies = sum(param_group.plan.copy_nbytes for unit in units for param_group in unit.param_groups)
    on_disk = states_on_disk(optimizer)
    return Ledger(
        parameters=storage_bytes(params, (unit.slot.storage for unit in kept)) + copies + groups,
        gradients=gradients,
        optimizer_state=storage_bytes(_state_tensors(optimizer))
        + (0 if on_disk is None else on_disk.buffer_nbytes)
        + (buffers_of(units[0].device).idle_nbytes if any(unit.shards.is_on_disk for unit in units) else 0),
        gathered_peak=record.gathered_peak_bytes(),
        activations=activations,
    )


def predict_activations(make_model: Callable[[], nn.Module], forward: Callable[[nn.Module], Tensor]) -> int:
    """Return the bytes that one forward saves for backward, counted on tensors with shapes but no memory.

    Args:
        make_model: Creates the plain module in the compute dtype.
        forward: Creates a batch, runs the given module and returns its loss.
    """
    with fake_tensors():
        model = make_model()
        return live_after(lambda: forward(model))[1]


def live_after(run: Callable[[], Any]) -> tuple[Any, int]:
    """Return the result of `run()`, and the bytes of tensors that it created and that are still alive."""
    with storage_watch() as watch:
        result = run()
    gc.collect()
    return result, watch.live_bytes()


def peak_during(run: Callable[[], Any]) -> tuple[Any, int]:
    """Return the result of `run()`, and the peak bytes of live tensors created in it."""
    with storage_watch(every_operation=True) as watch:
        result = run()
    return result, watch.peak_bytes


def storage_bytes(tensors: Iterable[Tensor], storages: Iterable[torch.UntypedStorage] = ()) -> int:
    """Return the bytes of the storages of `tensors` and of `storages`, each counted once. Tensors on disk have none."""
    found = {storage.data_ptr(): storage.nbytes() for storage in storages}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if isinstance(local, OnDisk):
            continue
        for inner in inner_tensors(local):  # a wrapper has no memory itself
            storage = inner.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def _is_offloaded(param: Any) -> bool:
    """Return True if the shard of `param` is on the CPU alongside an accelerator."""
    managed = managed_by(param)
    return managed is not None and managed.unit.shards.is_offloaded


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in (state for param, state in optimizer.state.items() if not _is_offloaded(param)):
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _under(
    model: nn.Module, strategy: str | ShardingStrategy | StrategyPlacements | None
) -> tuple[list[Unit], int | None, StrategyPlacements]:
    """Return the units of `model`, and their rank group size and placements under `strategy` (None: their own)."""
    units = _units(model)
    placements = units[0].options.placements if strategy is None else resolve_placements(strategy)
    axes, placements = resolve_groups(units[0].axes, placements)
    return units, axes.group_size, placements


def _units(model: nn.Module) -> list[Unit]:
    units = units_in(model)
    if not units:
        raise ConfigError(f"{type(model).__name__} has no units, so there is nothing to count. Call fully_shard first.")
    return units
