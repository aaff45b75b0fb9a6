"""A unit: the modules whose parameters are gathered and freed together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.comm.collectives import Pending
from fullshard.comm.mesh import Axes
from fullshard.device.lanes import Lane
from fullshard.device.memory import Pool, Slot
from fullshard.engine.param_group import Home, Section, Wires
from fullshard.engine.reduction import Reduction, start_reduction
from fullshard.engine.sharded_param import ShardedParam, Source
from fullshard.errors import ConfigError, StateError
from fullshard.layout.offsets import align
from fullshard.policy.offload import CPUOffloadPolicy, OffloadPolicy
from fullshard.policy.precision import MixedPrecisionPolicy
from fullshard.policy.strategy import Placement, Placements
from fullshard.tape.recorder import Event, Origin, Phase, active_recorder

__all__ = ["Form", "Unit", "UnitReduction", "UnitSettings", "managed_by"]

_STORAGE_STEP = 64  # bytes: a section starts on a cache line


class Form(Enum):
    """What a unit's modules have at the moment."""

    SHARDED = "sharded"  # shards; the whole storage is empty, unless it is kept to be used again
    GATHERING = "gathering"  # shards; the whole storage is being filled
    UNSHARDED = "unsharded"  # whole parameters; the shards still exist


class UnitSettings:
    """What a unit was asked to do: fixed when it is made, but for the switches that users may turn between steps."""

    def __init__(
        self,
        *,
        axes: Axes,
        placements: Placements,
        precision: MixedPrecisionPolicy,
        offload: OffloadPolicy,
        device: torch.device,
        reshard_after_forward: bool | None,
    ) -> None:
        self.axes = axes
        self.placements = placements
        self.precision = precision
        self.offload = offload
        self.device = device
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.syncs_gradients = True
        self.syncs_replicas = True
        self.reduces_unused = False
        self.divisor: float = axes.world

    @property
    def home(self) -> Home:
        """Where shards live."""
        if isinstance(self.offload, CPUOffloadPolicy):
            return Home(torch.device("cpu"), pinned=self.offload.pin_memory and self.device.type == "cuda")
        return Home(self.device)


class Unit:
    """The parameters of some modules, gathered and freed together; what to do when is decided a floor above.

    Args:
        module: the module whose forward needs them.
        sources: its parameters that no other unit has.
        borrowed: units that have parameters which are tied to some of this module's.
        settings: what was asked for.
    """

    def __init__(
        self, module: nn.Module, sources: Sequence[Source], borrowed: Sequence[Unit], settings: UnitSettings
    ) -> None:
        self.module = module
        self.name = type(module).__name__  # until a root gives it its FQN
        self.borrowed = list(borrowed)
        self.settings = settings
        self.form = Form.SHARDED
        self.microbatch = 0  # of the step, from 1 on
        self._withholds = False  # whole gradients wait for a later microbatch's reduction
        self.slot = Slot(_device_of(sources, settings.device))
        self.wires = Wires.along(settings.axes, settings.device, _scratch_of(settings.device))
        self.sections = [self._section(list(group)) for group in _by_kind(sources)]
        self._pending: list[Pending] = []
        self._gathered: torch.cuda.Event | None = None
        self._stale: list[Section] = []
        self._is_bound = False  # whether views of the slot are there
        self._lie_in(self.slot)
        for section in self.sections:
            section.make_params()
        self.slot.settle()
        self.params = tuple(param for section in self.sections for param in section.params)
        self.trainable = 0  # how many parameters a backward should bring gradients for
        ordered = [source for group in _by_kind(sources) for source in group]
        self._managed = [
            _Managed(self, param, weakref.ref(source.param)) for source, param in zip(ordered, self.params, strict=True)
        ]
        self._claim()
        self._show_sharded()

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {len(self.params)} parameters, {self.form.value})"

    def _section(self, sources: Sequence[Source]) -> Section:
        settings = self.settings
        contract = settings.precision.contract(sources[0].param.dtype)
        device = _device_of(sources, settings.device)
        return Section(
            sources,
            axes=settings.axes,
            placements=settings.placements,
            contract=contract,
            wires=self.wires,
            device=device,
            home=Home(device) if device.type == "meta" else settings.home,
        )

    # -- what it has --------------------------------------------------------------------------------------------------

    @property
    def keeps_whole(self) -> bool:
        """Whether whole parameters stay between steps."""
        return self.settings.placements.parameters is Placement.WHOLE

    @property
    def whole_nbytes(self) -> int:
        """Bytes of the storage that holds the whole parameters."""
        return sum(align(section.whole_nbytes, _STORAGE_STEP) for section in self.sections)

    @property
    def is_trained(self) -> bool:
        """Whether any parameter is trained."""
        return any(param.sharded.requires_grad for param in self.params)

    @property
    def is_meta(self) -> bool:
        """Whether any shard is still without memory."""
        return any(section.home.device.type == "meta" for section in self.sections)

    @property
    def description(self) -> str:
        """What ranks must have in common: the name, and every parameter's FQN, shape and dtypes."""
        params = (
            f"{param.fqn} {tuple(param.place.cut.shape)} {section.contract}"
            + ("" if param.sharded.requires_grad else ", frozen")
            for section in self.sections
            for param in section.params
        )
        return f"{self.name or 'the root'} ({'; '.join(params)})"

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The groups that its parameters are spread over: the engine's, then those that were there before."""
        axes = self.settings.axes
        own = [axes.shard_group] if axes.replicate_group is None else [axes.shard_group, axes.replicate_group]
        return list(dict.fromkeys([*own, *(group for param in self.params for group in param.guise.groups)]))

    @property
    def is_lost(self) -> bool:
        """Whether ranks were found to do different things, so that nothing can be sent any more."""
        replicas = self.wires.replicate
        return self.wires.shard.broken is not None or (replicas is not None and replicas.broken is not None)

    def origin(self, phase: Phase) -> Origin:
        """This unit in `phase`, for the record."""
        return Origin(self.name, phase, self.microbatch)

    # -- whole and sharded --------------------------------------------------------------------------------------------

    @property
    def can_fill(self) -> bool:
        """Whether no other unit lies in this one's slot."""
        return self.slot.occupant in (None, self)

    @property
    def is_filled(self) -> bool:
        """Whether this unit lies in its slot, be it that modules have its whole parameters or that they are kept."""
        return self.slot.occupant is self

    def notice_step(self) -> bool:
        """Gather kept parameters anew if an optimizer may have stepped since they were whole.

        Returns:
            Whether there are gradients that an optimizer can still step with, or that wait for a reduction.
        """
        waiting = [section.notice_step() for section in self.sections]
        return self._withholds or any(waiting)

    def start_unshard(self, lane: Lane, phase: Phase) -> None:
        """Begin to gather the whole parameters. Nothing happens if they are there or on their way."""
        if self.form is not Form.SHARDED:
            return
        for param in self.params:
            for owner in param.owners:
                if owner.module._parameters.get(owner.name) is not param.sharded:
                    param.refuse_replacement(owner)
        if not all(section.is_at_home for section in self.sections):
            self.adopt()  # a part of the module was moved or cast alone
        if self.is_meta:
            self.check_materialized()
        self._fill(phase)
        stale = [section for section in self.sections if not section.is_gathered]
        group_nbytes = self._group_nbytes
        with torch.no_grad(), lane.after_compute():
            origin, in_common = self.origin(phase), self.slot.is_common
            self._pending = [section.start_gather(origin, in_common=in_common) for section in stale]
            self._gathered = lane.mark()
        if self._group_nbytes > group_nbytes and self.settings.placements.parameters is not Placement.GROUPED:
            self._note("fill", phase, self._group_nbytes - group_nbytes)
        self._stale = stale
        self.form = Form.GATHERING

    def wait_unshard(self) -> None:
        """Let the modules have the whole parameters, once they are there."""
        if self.form is not Form.GATHERING:
            return
        for pending in self._pending:
            pending.wait()
        Lane.hold_compute(self._gathered)
        for section in self._stale:
            section.finish_gather()
        self._pending, self._gathered, self._stale = [], None, []
        self.form = Form.UNSHARDED
        self.trainable = sum(param.follow_requires_grad() for param in self.params)
        for param in self.params:
            param.show(param.unsharded)

    def reshard(self, phase: Phase = Phase.IDLE, *, keep: bool = False) -> None:
        """Let the modules have the shards, and give the whole parameters' memory back.

        Args:
            phase: for the record.
            keep: leave the whole parameters in memory: they are gathered again only if they have changed meanwhile.
        """
        if self.form is Form.GATHERING:
            self.wait_unshard()
        if self.form is Form.UNSHARDED:
            self._show_sharded()
            self.form = Form.SHARDED
        if self.is_filled and not (keep or self.keeps_whole):
            self.slot.empty()
            for section in self.sections:
                section.forget()
            self._note("empty", phase, self.whole_nbytes)
        if phase is not Phase.FORWARD:
            self.release_group(phase)

    def release_group(self, phase: Phase) -> None:
        """Give back what the group keeps of the unit from forward to backward."""
        if self.settings.placements.parameters is Placement.GROUPED:
            return
        nbytes = self._group_nbytes
        for section in self.sections:
            section.release_group()
        if nbytes:
            self._note("empty", phase, nbytes)

    @property
    def _group_nbytes(self) -> int:
        return sum(section.group_nbytes for section in self.sections)

    def _fill(self, phase: Phase) -> None:
        if self.keeps_whole or self.is_filled:
            return
        if not self.can_fill:
            self.move(Slot(self.settings.device))
        self.slot.fill(self, self.whole_nbytes)
        if not self._is_bound:
            self._bind()
        self._note("fill", phase, self.whole_nbytes)

    def _note(self, name: str, phase: Phase, nbytes: int) -> None:
        recorder = active_recorder()
        if recorder is not None:
            recorder.add(Event(name, self.origin(phase), nbytes=nbytes)).finish()

    def _show_sharded(self) -> None:
        for param in self.params:
            param.show(param.sharded)

    def check_materialized(self) -> None:
        """Raise if any parameter has no values yet.

        Raises:
            StateError: some are on the meta device.
        """
        names = [param.fqn for param in self.params if param.local.is_meta]
        if names:
            raise StateError(
                f"{self.name or 'the root'}: {len(names)} parameters are still on the meta device, such as "
                f"{names[0]!r}. Call model.to_empty(device=...) and initialise or load them first, or pass "
                "param_init_fn."
            )

    # -- where whole parameters lie -----------------------------------------------------------------------------------

    def move(self, slot: Slot) -> None:
        """Lie in `slot` from now on. Only for a unit that is sharded, and that no waiting graph has a view of.

        Raises:
            StateError: a graph that waits for its backward still has views of the present storage.
        """
        assert self.form is Form.SHARDED, "only a sharded unit moves"
        if self.slot.is_referenced:
            raise StateError(
                f"{self.name} and {self.slot.occupant!r} are needed whole at the same time, but share memory, since "
                "they never were in the steps before, and a graph that waits for its backward has views of it. "
                "Call fullshard.share_memory_between_units(False) before the first forward."
            )
        self._lie_in(slot)
        for section in self.sections:
            section.forget()

    def _lie_in(self, slot: Slot) -> None:
        """Have `slot`, and views of it if it has memory that stays; else they are made when it is filled first.

        Making them takes memory for the whole unit, which a rank that just builds its shards may not have.
        """
        with self.slot.dropping_views():
            for section in self.sections:
                section.unbind()
        self.slot, self._is_bound = slot, False
        if self.keeps_whole or slot.shared:
            occupant, slot.occupant = slot.occupant, None
            slot.fill(self, self.whole_nbytes)
            slot.occupant = occupant if slot.shared else self
            self._bind()
        slot.settle()

    def _bind(self) -> None:
        byte_offset = 0
        with torch.inference_mode(False):
            for section in self.sections:
                section.bind(self.slot.storage, byte_offset)
                byte_offset += align(section.whole_nbytes, _STORAGE_STEP)
        self._is_bound = True
        self.slot.settle()

    def adopt(self) -> None:
        """Take over what `Module.to`, `to_empty`, `load_state_dict(assign=True)` and their like left in the modules.

        Raises:
            ConfigError: parameters that shared a dtype do so no longer.
        """
        for section in self.sections:
            _check_one_dtype(section)
        changed = [param.adopt() for param in self.params]
        if not any(changed) and all(section.is_at_home for section in self.sections):
            return
        if len({param.local.is_meta for param in self.params}) > 1:
            return  # some have been given values; this is called again when others are
        shards = []
        for section in self.sections:
            first = section.params[0].local
            meta = first.is_meta
            device = first.device if meta else self._compute_device(first)
            home = Home(first.device) if meta else self._home_of(first)
            contract = self.settings.precision.contract(first.dtype)
            shards.append(section.change(contract, home, device))
        if not self.is_meta:
            self.settings.device = self.sections[0].device
            self.wires = Wires.along(self.settings.axes, self.settings.device, _scratch_of(self.settings.device))
        self._lie_in(Slot(self.sections[0].device))
        for section, locals_now in zip(self.sections, shards, strict=True):
            section.wires = self.wires
            section.rehome(locals_now)
        self._claim()
        self._show_sharded()

    def _claim(self) -> None:
        """Let `managed_by` find this unit by every form of its parameters."""
        for managed in self._managed:
            _managers.update((id(form), managed) for form in managed.forms)

    def _compute_device(self, shard: Tensor) -> torch.device:
        return self.settings.device if isinstance(self.settings.offload, CPUOffloadPolicy) else shard.device

    def _home_of(self, shard: Tensor) -> Home:
        return self.settings.home if isinstance(self.settings.offload, CPUOffloadPolicy) else Home(shard.device)

    # -- gradients ----------------------------------------------------------------------------------------------------

    def watch(self, on_grad: Callable[[ShardedParam], None]) -> None:
        """Call `on_grad(param)` whenever autograd has added to the whole gradient of one of its parameters."""
        for param in self.params:
            param.watch(on_grad)

    @property
    def finishes_sums(self) -> bool:
        """Whether a reduction now takes the second sum too: over the replicate axis, or across groups."""
        return self.settings.syncs_gradients and self.settings.syncs_replicas

    @property
    def awaits_second_sum(self) -> bool:
        """Whether sums that were kept from the second level are now to be taken over it."""
        return self.finishes_sums and any(section.is_partial for section in self.sections)

    @property
    def holds_grads_back(self) -> bool:
        """Whether whole gradients wait until a later microbatch is synced, instead of being reduced now."""
        return not self.settings.syncs_gradients and self.settings.placements.gradients is not Placement.GROUPED

    @property
    def has_whole_grads(self) -> bool:
        """Whether whole gradients wait for a reduction."""
        return any(p.unsharded.grad is not None for p in self.params) or any(s.holds_grads for s in self.sections)

    def hold_grads(self) -> None:
        """Keep whole gradients for a later reduction."""
        for section in self.sections:
            section.hold_grads()
        self._withholds = self.has_whole_grads

    def drop_grads(self) -> None:
        """Forget whole gradients."""
        self._withholds = False
        for section in self.sections:
            section.drop_grads()

    def start_reduce(self, lane: Lane, phase: Phase) -> UnitReduction:
        """Begin to turn whole gradients into what the optimizer sees."""
        self._withholds = False
        with torch.no_grad():
            return UnitReduction(self, lane, phase)


class UnitReduction:
    """The reductions of all sections of a unit, started together. `finish()` gives the optimizer its gradients."""

    def __init__(self, unit: Unit, lane: Lane, phase: Phase) -> None:
        self._lane = lane
        self._reductions: list[Reduction] = []
        taken = [(section, section.take_grads()) for section in unit.sections]
        with lane.after_compute():
            for section, grads in taken:
                if unit.settings.reduces_unused:
                    section.fill_missing(grads)
                if grads or (unit.finishes_sums and section.is_partial):
                    reduction = start_reduction(
                        section,
                        grads,
                        divisor=unit.settings.divisor,
                        finishes=unit.finishes_sums,
                        origin=unit.origin(phase),
                    )
                    self._reductions.append(reduction)
            self.is_complete = lane.is_stream  # whether nothing is left to wait for
            if self.is_complete:
                self._complete_all()
            self._ended = lane.mark()

    def complete_if_come(self) -> None:
        """Free the whole gradients already, if nobody need wait for other ranks. Not for a lane that is a stream."""
        if all(reduction.has_come for reduction in self._reductions):
            with torch.no_grad():
                self._complete_all()
            for reduction in self._reductions:
                reduction.drop_wholes()
            self.is_complete = True

    def finish(self) -> None:
        """Let the sharded parameters have their gradients. The compute lane waits for them."""
        with torch.no_grad():
            if not self.is_complete:
                self._complete_all()
            Lane.hold_compute(self._ended)
            for reduction in self._reductions:
                reduction.deliver()
        delivered, self._reductions = self._reductions, []
        for reduction in delivered:
            reduction.tell()

    def abandon(self) -> None:
        """Let what is under way arrive, and forget it: a message that nobody takes would be taken for a later one."""
        with torch.no_grad():
            if not self.is_complete:
                self._complete_all()
        self._reductions = []

    def _complete_all(self) -> None:
        for reduction in self._reductions:
            reduction.complete()


def managed_by(param: nn.Parameter) -> tuple[Unit, ShardedParam] | None:
    """The unit that has `param` already, in any of its forms or as it was before: weights can be tied across units."""
    managed = _managers.get(id(param))
    if managed is None or all(form is not param for form in managed.forms):
        return None
    return managed.unit, managed.param


@dataclass(eq=False, frozen=True)
class _Managed:
    """A parameter of a unit, and what it was made of. The unit has the only lasting reference."""

    unit: Unit
    param: ShardedParam
    source: weakref.ref[nn.Parameter]

    @property
    def forms(self) -> list[nn.Parameter]:
        """All that this parameter is known as."""
        source = self.source()
        return [self.param.sharded, self.param.unsharded, *([] if source is None else [source])]


# By id, since torch refuses to move a parameter that anything has a weak reference to.
_managers: weakref.WeakValueDictionary[int, _Managed] = weakref.WeakValueDictionary()


_scratch: dict[torch.device, Pool] = {}


def _scratch_of(device: torch.device) -> Pool:
    """The scratch memory of `device`, which all units share."""
    if device not in _scratch:
        _scratch[device] = Pool(device)
    return _scratch[device]


def _device_of(sources: Sequence[Source], device: torch.device) -> torch.device:
    """Where whole parameters lie: on `device`, or nowhere while the sources are on the meta device.

    Raises:
        ConfigError: only some of them are.
    """
    meta = [source.fqn for source in sources if source.param.is_meta]
    if meta and len(meta) < len(sources):
        real = next(source.fqn for source in sources if not source.param.is_meta)
        raise ConfigError(
            f"{meta[0]} is on the meta device, but {real}, in the same unit, is not. Build all modules of a unit under "
            'torch.device("meta"), or none.'
        )
    return torch.device("meta") if meta else device


def _check_one_dtype(section: Section) -> None:
    values = [param for param in section.params if not param.shown.is_meta]
    odd = [param for param in values if param.shown.dtype != values[0].shown.dtype]
    if odd:
        raise ConfigError(
            f"{odd[0].fqn} is of {odd[0].shown.dtype} now, but {values[0].fqn} of {values[0].shown.dtype}: they "
            "were of one dtype when their module was sharded, and lie in one buffer. Change the dtype of all of them, "
            "or do it before sharding."
        )


def _by_kind(sources: Sequence[Source]) -> list[list[Source]]:
    """The sources by dtype and by whether they are trained, each in the order they came."""

    def kind(source: Source) -> tuple[str, bool]:
        return str(source.param.dtype), source.param.requires_grad

    return [list(group) for _, group in groupby(sorted(sources, key=kind), key=kind)]
