"""Bytes a rank by state: by formula from shapes and placements, and measured where the engine runs.

By formula, for the units of a model, with N ranks on the shard axis and the layouts of `fullshard.layout.sharding`:

    parameters        what lies in memory between steps: shards, or the whole buffers that are kept
    gradients         what the optimizer sees: shards, or whole gradients where the optimizer is whole; and what encoded
                      ones have lacked, which is told the next time
    optimizer state   as many values as the optimizer keeps for each one it updates
    gathered peak     whole buffers beyond those kept between steps: every unit where whole parameters stay until
                      backward; else the root and the two neighbours that need most, one computing, one gathered ahead;
                      and what groups keep until backward of all units up to these, if they do
    activations       what forward leaves for backward: counted in a forward without memory, on fake tensors
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard._compat import fake_tensors, storage_watch
from fullshard.comm.codec import codec_named
from fullshard.comm.encoded import residual_numel
from fullshard.comm.mesh import resolve_groups
from fullshard.engine.param_group import Section
from fullshard.engine.runtime import Turn, turns_in
from fullshard.errors import ConfigError
from fullshard.layout.group_layout import SectionLayout, lay_out
from fullshard.layout.shard_spec import owned
from fullshard.policy.strategy import Placement, ShardingStrategy, resolve_placements
from fullshard.policy.strategy import Placements as StrategyPlacements
from fullshard.tape.recorder import recording

__all__ = [
    "Ledger",
    "OptimizerCost",
    "measure_ledger",
    "peak_during",
    "predict_activations",
    "predict_ledger",
    "predict_residuals",
]


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Bytes that one rank holds, by state, each at its own peak."""

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
    """What an optimizer keeps for each parameter: `values` an element, of the parameter's dtype, and `extra_bytes`.

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
    """The ledger of this rank by formula, for `model`'s units under its own strategy, or under another one.

    Args:
        model: a module with units. Nothing is run, and no values are read.
        strategy: the one to predict for; the model's own, if None. The number of ranks on the shard axis stays.
        optimizer: what the optimizer keeps; that of AdamW, if None.
        activations: bytes that forward leaves for backward, such as `predict_activations` tells.

    Raises:
        ConfigError: the model has no units.
    """
    turns = _turns(model)
    cost = optimizer or OptimizerCost()
    settings = turns[0].unit.settings
    placements = settings.placements if strategy is None else resolve_placements(strategy)
    _, placements = resolve_groups(settings.axes, placements)
    plans = [[_SectionPlan.of(section, placements) for section in turn.unit.sections] for turn in turns]
    every = [plan for unit in plans for plan in unit]
    return Ledger(
        parameters=sum(plan.rest_nbytes for plan in every) + _kept_between_steps(turns, placements),
        gradients=sum(plan.gradient_nbytes for plan in every),
        optimizer_state=sum(plan.optimizer_nbytes(cost) for plan in every),
        gathered_peak=_gathered_peak(turns, placements),
        activations=activations,
    )


def predict_residuals(model: nn.Module) -> int:
    """Bytes, among those of gradients in this rank's ledger, of what encoded ones have lacked.

    Raises:
        ConfigError: the model has no units.
    """
    units = [turn.unit for turn in _turns(model)]
    plans = (_SectionPlan.of(section, unit.settings.placements) for unit in units for section in unit.sections)
    return sum(plan.residual_nbytes for plan in plans)


@dataclass(frozen=True)
class _SectionPlan:
    """One section's layout under given placements, and what follows from it."""

    section: Section
    layout: SectionLayout
    placements: StrategyPlacements

    @classmethod
    def of(cls, section: Section, placements: StrategyPlacements) -> _SectionPlan:
        cuts = [place.cut for place in section.layout.places]
        shapes, dims = [cut.shape for cut in cuts], [cut.dim for cut in cuts]
        return cls(section, lay_out(shapes, section.layout.world, section.contract.itemsize, dims), placements)

    @property
    def _cuts(self) -> bool:
        return self.placements.optimizer is Placement.SHARDED

    @property
    def _casts(self) -> bool:
        """Whether compute sees other numbers than rest, see `Section.casts`."""
        contract = self.section.contract
        encodes = contract.gather_wire is not None and self._cuts and self.layout.world > 1
        return encodes or contract.stored != contract.compute

    @property
    def rest_nbytes(self) -> int:
        """Bytes between steps, beyond a whole buffer that is kept."""
        stored, layout = self.section.contract.stored.itemsize, self.layout
        if self.placements.parameters is Placement.WHOLE and not self._casts:
            return layout.pack_numel * stored if self._cuts else 0
        return stored * (layout.shard_numel if self._cuts else layout.whole_numel)

    @property
    def gradient_nbytes(self) -> int:
        """Bytes of the gradients that the optimizer sees."""
        if not self.section.params[0].sharded.requires_grad:
            return 0
        numel = self.layout.shard_numel if self._cuts else sum(place.cut.numel for place in self.layout.places)
        return numel * self.section.contract.stored.itemsize + self.residual_nbytes

    @property
    def residual_nbytes(self) -> int:
        """Bytes of what encoded gradients have lacked, see `fullshard.comm.encoded`."""
        wire, layout = self.section.contract.reduce_wire, self.layout
        if wire is None or not codec_named(wire).keeps_error or not self.section.params[0].sharded.requires_grad:
            return 0
        axes, _ = resolve_groups(self.section.axes, self.placements)
        replicas = 1 if axes.replicate_group is None else axes.world // axes.shard_world
        if self._cuts:
            world, whole = layout.world, [layout.shard_numel]
            if self.placements.gradients is Placement.GROUPED:  # nothing is encoded within a group
                assert axes.group_size is not None
                world //= axes.group_size
            parts = [place.cut.part_numel for place in layout.in_place]
            kept = residual_numel([*parts, layout.pack_numel], world, whole=False)
        else:
            numels = [place.cut.numel for place in layout.places]
            packed = sum(n for n, place in zip(numels, layout.places, strict=True) if not place.in_place)
            whole = [*(n for n, place in zip(numels, layout.places, strict=True) if place.in_place), packed]
            kept = _residual_of_wholes(whole, layout.world)
        return 4 * (kept + _residual_of_wholes(whole, replicas))

    def optimizer_nbytes(self, cost: OptimizerCost) -> int:
        """Bytes of the optimizer's state on this rank."""
        if not self.section.params[0].sharded.requires_grad:
            return 0
        cuts = [place.cut for place in self.layout.places]
        numel = sum(cut.shard_numel(self.section.rank) if self._cuts else cut.numel for cut in cuts)
        return cost.values * numel * self.section.contract.stored.itemsize + cost.extra_bytes * len(cuts)


def _residual_of_wholes(numels: Sequence[int], world: int) -> int:
    """Numbers that a rank keeps of what it lacks in sums that all of `world` ranks have whole."""
    parts = [len(owned(numel, world, 0)) for numel in numels]
    return residual_numel(parts, world, whole=True) if world > 1 else 0


def _kept_between_steps(turns: Sequence[Turn], placements: StrategyPlacements) -> int:
    if placements.parameters is Placement.SHARDED:
        return 0
    if placements.parameters is Placement.WHOLE:
        return sum(turn.unit.whole_nbytes for turn in turns)
    return sum(_group_nbytes(turn, placements) for turn in turns)


def _group_nbytes(turn: Turn, placements: StrategyPlacements) -> int:
    """Bytes of what this rank's group keeps of a unit, on this rank."""
    axes, _ = resolve_groups(turn.unit.settings.axes, placements)
    assert axes.group_size is not None
    groups = axes.shard_world // axes.group_size
    sections = turn.unit.sections
    return sum(groups * section.layout.shard_numel * section.contract.compute.itemsize for section in sections)


def _gathered_peak(turns: Sequence[Turn], placements: StrategyPlacements) -> int:
    if placements.parameters is Placement.WHOLE:
        return 0
    nbytes = [turn.unit.whole_nbytes for turn in turns]
    if placements.parameters_in_step is Placement.WHOLE:
        return sum(nbytes)
    kept = [0] * len(turns)
    if placements.parameters is Placement.SHARDED and placements.parameters_in_step is Placement.GROUPED:
        kept = [_group_nbytes(turn, placements) for turn in turns]
    root, inner = nbytes[0], nbytes[1:]
    pairs = (sum(pair) + sum(kept[: last + 1]) for last, pair in enumerate(pairwise(inner), 2))
    return root + max(pairs, default=sum(inner) + sum(kept))


def measure_ledger(model: nn.Module, optimizer: torch.optim.Optimizer, forward: Callable[[], Tensor]) -> Ledger:
    """The ledger of this rank, measured in one microbatch, whose gradients are dropped. Every rank must call it.

    Args:
        model: a module with units, whose optimizer has stepped, so that it has its state.
        optimizer: over the model's sharded parameters, without gradients at the moment.
        forward: gives the loss of one microbatch.

    Raises:
        ConfigError: the model has no units.
    """
    turns = _turns(model)
    with recording() as record:
        loss, activations = live_after(forward)
        loss.backward()
    gradients = storage_bytes(param.grad for param in model.parameters() if param.grad is not None)
    gradients += sum(section.residual_nbytes for turn in turns for section in turn.unit.sections)
    optimizer.zero_grad()
    kept = [turn.unit for turn in turns if turn.unit.keeps_whole]
    groups = sum(section.group_nbytes for turn in turns for section in turn.unit.sections)
    return Ledger(
        parameters=storage_bytes(model.parameters(), (unit.slot.storage for unit in kept)) + groups,
        gradients=gradients,
        optimizer_state=storage_bytes(_state_tensors(optimizer)),
        gathered_peak=record.gathered_peak_bytes(),
        activations=activations,
    )


def predict_activations(make_model: Callable[[], nn.Module], forward: Callable[[nn.Module], Tensor]) -> int:
    """Bytes that one forward leaves for backward: counted on tensors that have shapes but no memory.

    Args:
        make_model: makes the plain module, in the dtype that computes.
        forward: given that module, makes a batch and returns its loss.
    """
    with fake_tensors():
        model = make_model()
        return live_after(lambda: forward(model))[1]


def live_after(run: Callable[[], Any]) -> tuple[Any, int]:
    """What `run()` returns, and the bytes of tensors that it made and that are still alive."""
    with storage_watch() as watch:
        result = run()
    gc.collect()
    return result, watch.live_bytes()


def peak_during(run: Callable[[], Any]) -> tuple[Any, int]:
    """What `run()` returns, and the most bytes of tensors made in it that were alive at once."""
    with storage_watch(every_operation=True) as watch:
        result = run()
    return result, watch.peak_bytes


def storage_bytes(tensors: Iterable[Tensor], storages: Iterable[torch.UntypedStorage] = ()) -> int:
    """Bytes of the memory that `tensors` and `storages` lie in, each stretch of it counted once."""
    found = {storage.data_ptr(): storage.nbytes() for storage in storages}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _turns(model: nn.Module) -> list[Turn]:
    turns = turns_in(model)
    if not turns:
        raise ConfigError(f"{type(model).__name__} has no units, so there is nothing to count. Call fully_shard first.")
    return turns
