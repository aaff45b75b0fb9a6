"""The reduction of a parameter group: from the unsharded gradients of every rank to the optimizer's gradients.

Reduction
├── WholeReduction       optimizer whole: all-reduce, over the shard axis and then over the replicate axis
└── ShardReduction       optimizer sharded: reduce-scatter, and then an all-reduce of shards over the replicate axis
    ├── OneLevelReduction
    └── TwoLevelReduction   the reduce-scatter within groups of neighboring ranks, and then across them
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fullshard._compat import grad_hooks, have_grad_hooks, shares_memory, without_grad
from fullshard.comm.transport import PartSums, Pending, Sums, TermName
from fullshard.comm.two_level import TwoLevelSums
from fullshard.device.streams import Streams
from fullshard.device.transfers import transfers
from fullshard.engine.gradients import Gradients
from fullshard.engine.group_transports import GroupTransports
from fullshard.engine.pack import Pack
from fullshard.engine.sharded_param import ShardedParam
from fullshard.tape.recorder import Origin, active, note_wait


@dataclass(frozen=True)
class ReductionOf:
    """The unsharded gradients of one parameter group, and the settings of their reduction.

    Args:
        grads: Gradients by parameter index, as `Gradients.take` returns them.
        gradients: The gradients of the group.
        transports: the collectives that sum them.
        pack: The pack for small parameters.
        divisor: The divisor of the sum over all ranks.
        finishes: Whether to reduce over the second level too, if there is one. Otherwise the first sums are kept for a
            later microbatch.
        origin: the unit and phase of the reduction.
        hook: A function that is called with the sums before delivery, 1-D in the reduce dtype. It may modify them.
    """

    grads: dict[int, Tensor]
    gradients: Gradients
    transports: GroupTransports
    pack: Pack
    divisor: float
    finishes: bool
    origin: Origin
    hook: Callable[[Tensor], None] | None = None


def start_reduction(of: ReductionOf) -> Reduction:
    """Start the reduction of unsharded gradients over the ranks, with the class that the placements need."""
    if of.gradients.plan.contract.reduce == torch.float16:
        of = _scaled_down(of)
    if not of.gradients.plan.shards_optimizer:
        return WholeReduction(of)
    if of.transports.two_level_sums is not None:
        return TwoLevelReduction(of, of.transports.two_level_sums)
    return OneLevelReduction(of)


def _scaled_down(of: ReductionOf) -> ReductionOf:
    """Scale gradients and divisor down, so that the sum overflows only if the mean does.

    Gradients are divided by a power of two, which rounds only subnormal numbers.
    """
    replicas = of.transports.replicas
    ranks = of.gradients.plan.layout.world * (1 if replicas is None else replicas.world)
    scale = 0.5 ** (ranks - 1).bit_length()
    grads = of.grads
    for i, grad in grads.items():
        grads[i] = grad.mul(scale) if shares_memory(grad) else grad.mul_(scale)
    return replace(of, divisor=of.divisor * scale)


def _have_grads(params: Sequence[ShardedParam], indices: Iterable[int]) -> bool:
    """Return True if the optimizer will see a gradient of any of the parameters with these `indices`."""
    for i in indices:
        if params[i].sharded.grad is not None:
            return True
    return False


class Reduction(ABC):
    """A reduction that has been started. Call `complete`, `land`, `deliver` and `call_hooks` in this order."""

    _pending: Pending  # the first sums; every subclass starts them at the end of its constructor

    def __init__(self, of: ReductionOf, *, has_second_level: bool) -> None:
        self._accumulates = _have_grads(of.gradients.params, of.grads)
        note = of.gradients.missing(of.grads) if len(of.grads) < len(of.gradients.params) else ""
        if self._accumulates:  # ranks compare the note: one may have called zero_grad or stepped alone
            note = ", ".join(filter(None, ("added to earlier gradients", note)))
        self._plan = of.gradients.plan
        self._gradients = of.gradients
        self._transports = of.transports
        self._grads = of.grads
        self._divisor = of.divisor
        self._origin = of.origin._replace(note=", ".join(filter(None, (note, of.origin.note)))) if note else of.origin
        self._has_second_level = has_second_level
        self._hook = of.hook
        self._finishes = of.finishes or not has_second_level
        self._scratch: list[Tensor] = []
        self._kept: list[Tensor] = []  # tensors that a stream may still read
        self._first_sums = of.gradients.state.first_sums
        if self._finishes:
            for i in self._first_sums.keys() - of.grads.keys():
                of.grads[i] = of.gradients.zeros(i)
        self._summed = sorted(of.grads)
        if self._summed != list(of.grads):  # ranks may use parameters in different microbatches, or not at all
            for i in self._summed:
                of.grads[i] = of.grads.pop(i)

    @property
    def has_arrived(self) -> bool:
        """True if `complete()` does not wait for other ranks."""
        return not self._has_second_level and self._hook is None and self._pending.has_arrived()

    def complete(self) -> None:
        """Wait for the first-level sums, and start the second level. On devices with streams, only queue the work."""
        self._pending.wait()
        if self._has_second_level and self._finishes:
            for i, kept in self._first_sums.items():
                self._first_sum(i).add_(kept)
                self._kept.append(kept)
            self._first_sums.clear()
            self._take_second_sums()
        if self._hook is not None and self._finishes:
            for sums in self._results():
                self._hook(sums)

    def abandon(self) -> None:
        """Complete the reduction without calling the hook, and drop its result."""
        self._hook = None
        self.complete()

    def free_whole_grads(self) -> None:  # noqa: B027  # the default keeps them
        """Free the unsharded gradients, unless they are the result. Call it when the sums are complete."""

    @property
    def sends_more(self) -> bool:
        """True if `complete()` may communicate after the first-level sums: for the second level, or in a hook."""
        return self._finishes and (self._has_second_level or self._hook is not None)

    @property
    def is_read_by_host(self) -> bool:
        """True if the host reads landed gradients immediately: to add them, write them to a disk, or run hooks."""
        if self._plan.is_on_disk:
            return True
        return self._accumulates or _have_grads(self._gradients.params, self._summed) or self.has_hooks

    @property
    def has_to_land(self) -> bool:
        """True if the optimizer's gradients are offloaded from an accelerator to host memory."""
        return self._finishes and self._plan.memory.offloaded

    @abstractmethod
    def land(self) -> None:
        """Copy the sums to host memory. On devices with streams this only queues the copy."""

    def _note_landed(self, sums: Tensor) -> None:
        if not self._plan.is_on_disk:
            transfers.note("cpu", "gradients", passed=sums.nbytes)

    def deliver(self) -> None:
        """Set the gradients of the sharded parameters, or add to the current ones. Keep sums that are not complete."""
        if self._finishes:
            self._deliver()
            self._gradients.note_delivery()
            self._kept.clear()
            self._gradients.hand_over()
        else:
            for i in self._summed:
                term, kept = self._first_sum(i), self._first_sums.get(i)
                self._first_sums[i] = term.clone() if kept is None else kept.add_(term)
        for scratch in self._scratch:
            self._transports.scratch.give(scratch)

    @property
    def has_hooks(self) -> bool:
        """True if users have registered hooks that are called when these gradients are complete."""
        params = self._gradients.params
        return self._finishes and have_grad_hooks([params[i].sharded for i in self._summed])

    def call_hooks(self) -> bool:
        """Call the hooks that users have registered for complete gradients, such as an optimizer's step.

        Returns:
            True if there were any hooks.
        """
        gradients, hooked = self._gradients, False
        for i in self._summed:
            param = gradients.params[i].sharded
            for hook in grad_hooks(param):
                hook(param)
                hooked = True
        if hooked and not any(param.has_grad for param in gradients.params):
            gradients.drop_shards()  # hooks have consumed them: free the memory for gradients of other units
        return hooked

    def _take(self, numel: int) -> Tensor:
        scratch = self._transports.scratch.take(numel, self._plan.contract.reduce)
        self._scratch.append(scratch)
        return scratch

    @abstractmethod
    def _first_sum(self, i: int) -> Tensor:
        """Return a view of the first-level sum of parameter `i`."""

    @abstractmethod
    def _take_second_sums(self) -> None: ...

    @abstractmethod
    def _results(self) -> list[Tensor]:
        """Return the memory of the sums, 1-D."""

    @abstractmethod
    def _deliver(self) -> None: ...


class ShardReduction(Reduction):
    """A reduction that gives each rank its shard of the sums. Subclasses start the first-level sums."""

    def __init__(self, of: ReductionOf, *, has_second_level: bool) -> None:
        super().__init__(of, has_second_level=has_second_level)
        plan, layout = self._plan, self._plan.layout
        self._in_place = [i for i in of.grads if layout.params[i].in_place]
        self._has_pack = layout.pack_numel > 0 and len(self._in_place) < len(of.grads)
        self._pack = of.pack
        direct = (
            plan.contract.reduce == plan.contract.delivered
            and not plan.memory.offloaded
            and self._finishes
            and not self._accumulates
        )
        self._shards = of.gradients.new_shards() if direct else self._take(layout.shard_numel)
        if len(of.grads) < len(of.gradients.params):
            self._shards.zero_()

    def _terms(self) -> tuple[list[Tensor], list[int]]:
        """Return the send buffers (gradients in place, and the pack), and the elements per rank in each."""
        layout = self._plan.layout
        wholes = [self._grads[i].view(-1) for i in self._in_place]
        part_numels = [layout.params[i].spec.part_numel for i in self._in_place]
        if self._has_pack:
            message = self._take(layout.world * layout.pack_numel)
            self._pack.write(message.view(layout.world, layout.pack_numel), self._grads)
            wholes.append(message)
            part_numels.append(layout.pack_numel)
        return wholes, part_numels

    def _names(self, over: Sums) -> list[TermName]:
        """Return the names of the terms, for error feedback."""
        if not over.names_terms:
            return []
        pack: TermName = ("pack", *(i for i in self._plan.layout.packed if i in self._summed))
        return [*((i,) for i in self._in_place), *([pack] if self._has_pack else [])]

    def _sums(self) -> list[Tensor]:
        """Return the receive buffers: this rank's shard of each term's sum."""
        sums = [self._gradients.region_of(i, self._shards) for i in self._in_place]
        return [*sums, self._shards[self._plan.layout.pack]] if self._has_pack else sums

    def _results(self) -> list[Tensor]:
        return [self._shards]

    def free_whole_grads(self) -> None:
        self._grads.clear()

    def land(self) -> None:
        plan, sums = self._plan, self._shards
        if self._accumulates:
            self._shards = plan.memory.zeros(plan.layout.shard_numel, plan.contract.delivered)
        else:
            self._shards = self._gradients.new_shards()
        self._shards.copy_(sums, non_blocking=True)
        self._note_landed(sums)

    def _deliver(self) -> None:
        gradients, shards = self._gradients, self._shards
        is_fresh = not _have_grads(gradients.params, self._summed)
        if shards is not gradients.flat and is_fresh:
            shards = gradients.new_shards()
            shards.copy_(self._shards)
        if shards is gradients.flat and is_fresh:
            gradients.give(self._summed)
            return
        gradients.add({i: gradients.shard_in(i, shards) for i in self._summed}, are_own=shards is gradients.flat)


class OneLevelReduction(ShardReduction):
    """Sums over the shard axis, and then over the replicate axis if there is one."""

    def __init__(self, of: ReductionOf) -> None:
        super().__init__(of, has_second_level=of.transports.replicas is not None)
        wholes, part_numels = self._terms()
        divisor = 1 if self._has_second_level else of.divisor
        sums = of.transports.sums
        terms = PartSums(self._sums(), wholes, part_numels, divisor, self._names(sums) if sums.names_terms else ())
        self._pending = of.transports.sums.reduce_scatter(terms, origin=self._origin)

    def _first_sum(self, i: int) -> Tensor:
        return self._gradients.region_of(i, self._shards)

    def _take_second_sums(self) -> None:
        replicas = self._transports.replicas
        assert replicas is not None
        names: list[TermName] = [("shards", *sorted(self._summed))]
        replicas.all_reduce([self._shards], self._divisor, origin=self._origin, names=names).wait()


class TwoLevelReduction(ShardReduction):
    """Sums within the group of neighboring ranks, and then across groups."""

    def __init__(self, of: ReductionOf, two_level: TwoLevelSums) -> None:
        super().__init__(of, has_second_level=True)
        self._two_level = two_level
        self._secondary = self._take(two_level.across.world * self._plan.layout.shard_numel)
        if len(of.grads) < len(of.gradients.params):
            self._secondary.zero_()
        wholes, self._part_numels = self._terms()
        self._numels = [whole.numel() for whole in wholes]
        sums = self._secondary_sums()
        self._pending = two_level.reduce_within(sums, wholes, self._part_numels, origin=self._origin)

    def _secondary_sums(self) -> list[Tensor]:
        """Return the receive buffers of the sums within the group, laid out as secondary shards."""
        layout = self._plan.layout
        sums = [self._secondary_part(layout.params[i].part) for i in self._in_place]
        return [*sums, self._secondary_part(layout.pack)] if self._has_pack else sums

    def _secondary_part(self, part: slice) -> Tensor:
        """Return the slice of the secondary shards for the slice `part` of a shard buffer; groups are contiguous."""
        groups = self._two_level.across.world
        return self._secondary[groups * part.start : groups * part.stop]

    def _take_second_sums(self) -> None:
        across = self._two_level.across
        owned = [self._two_level.secondary_numel(*item) for item in zip(self._numels, self._part_numels, strict=True)]
        terms = [term[:numel] for term, numel in zip(self._secondary_sums(), owned, strict=True)]
        sums = PartSums(self._sums(), terms, self._part_numels, self._divisor, self._names(across))
        across.reduce_scatter(sums, origin=self._origin).wait()

    def _first_sum(self, i: int) -> Tensor:
        layout, param_layout = self._plan.layout, self._plan.layout.params[i]
        if param_layout.in_place:
            return self._secondary_part(param_layout.part)
        rows = self._secondary_part(layout.pack).view(-1, layout.pack_numel)
        start = param_layout.shard_offset - layout.pack_offset
        return rows[:, start : start + param_layout.spec.part_numel]


class WholeReduction(Reduction):
    """Full sums for every rank, over the shard axis and then over the replicate axis if there is one."""

    def __init__(self, of: ReductionOf) -> None:
        super().__init__(of, has_second_level=of.transports.replicas is not None)
        grads = of.grads
        layout = self._plan.layout
        self._packed = packed = [i for i in grads if not layout.params[i].in_place]
        flat: list[Tensor] = []
        if packed:  # one message for the small gradients, which stay in its buffer
            flat = [torch.cat([grads[i].view(-1) for i in packed])]
            parts = flat[0].split([grads[i].numel() for i in packed])
            self._grads = {**grads, **dict(zip(packed, parts, strict=True))}
        for i in self._grads.keys() - set(packed):
            if shares_memory(self._grads[i]):  # the sum is written in place, but autograd may still use the memory
                self._grads[i] = self._grads[i].clone()
        self._wholes = [*(grad.view(-1) for i, grad in self._grads.items() if i not in packed), *flat]
        divisor, sums = 1 if self._has_second_level else of.divisor, of.transports.sums
        self._pending = sums.all_reduce(self._wholes, divisor, origin=self._origin, names=self._names(sums))

    def _names(self, over: Sums) -> list[TermName]:
        """Return the names of the full tensors, for error feedback."""
        if not over.names_terms:
            return []
        names: list[TermName] = [(i,) for i in self._grads if i not in self._packed]
        return [*names, ("pack", *self._packed)] if self._packed else names

    def _first_sum(self, i: int) -> Tensor:
        return self._grads[i].view(-1)

    def _take_second_sums(self) -> None:
        replicas = self._transports.replicas
        assert replicas is not None
        replicas.all_reduce(self._wholes, self._divisor, origin=self._origin, names=self._names(replicas)).wait()

    def _results(self) -> list[Tensor]:
        return self._wholes

    def land(self) -> None:
        memory, delivered = self._plan.memory, self._plan.contract.delivered
        for i, grad in self._grads.items():
            self._grads[i] = memory.zeros(grad.numel(), delivered)
            self._grads[i].copy_(grad.view(-1), non_blocking=True)
            self._note_landed(grad)
            self._kept.append(grad)

    def _deliver(self) -> None:
        for i, grad in self._grads.items():
            self._gradients.add({i: grad.view(self._plan.layout.params[i].spec.shape)}, are_own=True)


class UnitReduction:
    """The reductions of a unit's parameter groups, started together. `finish()` sets the optimizer's gradients.

    On devices with streams, all work is queued immediately. Sums over the replicate axis and copies to the host run on
    separate streams, so that neither delays the first sums of the next unit.

    Args:
        reductions: One for each group that has gradients.
        read: Buffers that the reductions read. They are kept until they have been read.
        streams: The streams of the device.
        origin: the unit and phase of the reductions.
    """

    def __init__(
        self, reductions: Sequence[Reduction], read: Sequence[object], streams: Streams, origin: Origin
    ) -> None:
        self._reductions = list(reductions)
        self._streams = streams
        self._origin = origin
        self.is_complete = streams.reduce.is_stream  # the host need not wait for other ranks
        self._read = list(read) if self.is_complete else []
        self._summed = self._ended = streams.reduce.mark() if self.is_complete else None
        self.ends_after_first_sums = False  # the optimizer's gradients are complete later than the first sums
        if self.is_complete:
            self._queue_others()

    def _queue_others(self) -> None:
        last = self._streams.reduce
        with without_grad():
            sends_more, landing = False, list[Reduction]()
            for reduction in self._reductions:
                sends_more = sends_more or reduction.sends_more
                if reduction.has_to_land:
                    landing.append(reduction)
            if sends_more:
                with self._streams.replicate.after(last):
                    self._complete_all()
                last = self._streams.replicate
            else:
                self._complete_all()
            if landing:
                with self._streams.offload.after(last):
                    for reduction in landing:
                        reduction.land()
                last = self._streams.offload
        self.ends_after_first_sums = last is not self._streams.reduce
        if self.ends_after_first_sums:
            self._ended = last.mark()

    @property
    def has_hooks(self) -> bool:
        """True if users have registered hooks that run at its end, and may write to the unit's shards."""
        return any(reduction.has_hooks for reduction in self._reductions)

    def complete_if_arrived(self) -> None:
        """Free the unsharded gradients if the data of all ranks has arrived. Only for devices without streams."""
        for reduction in self._reductions:
            if not reduction.has_arrived:
                return
        with without_grad():
            for reduction in self._reductions:
                reduction.complete()
                reduction.free_whole_grads()
        self.is_complete = True

    def free_whole_grads(self) -> None:
        """Make compute wait for the first-level sums. Free the unsharded gradients, unless they are the result."""
        if self._summed is None:
            return
        is_over = None if active.recorder is None else note_wait(self._streams.compute, self._origin)
        self._streams.compute.wait(self._summed)
        if is_over is not None:
            is_over()
        self._summed = None
        self._read.clear()
        for reduction in self._reductions:
            reduction.free_whole_grads()

    def finish(self) -> None:
        """Make compute wait for the sums, and set the gradients of the sharded parameters."""
        with without_grad():
            if not self.is_complete:
                self._complete_all()
            if self._ended is not None:
                is_over = None if active.recorder is None else note_wait(self._streams.compute, self._origin)
                self._streams.compute.wait(self._ended)
                if is_over is not None:
                    is_over()
                for reduction in self._reductions:
                    if reduction.has_to_land and reduction.is_read_by_host:
                        self._streams.host.wait(self._ended)
                        break
            for reduction in self._reductions:
                reduction.deliver()
        self._read.clear()
        delivered, self._reductions = self._reductions, []
        is_hooked = False
        for reduction in delivered:
            if reduction.has_hooks:
                is_hooked = reduction.call_hooks() or is_hooked
        if is_hooked:  # hooks may have written to shards
            self._streams.gather.wait(self._streams.compute.mark())

    def abandon(self) -> None:
        """Complete the pending communication and drop its result, so that later messages are not confused with it."""
        with torch.no_grad():
            if not self.is_complete:
                for reduction in self._reductions:
                    reduction.abandon()
        self._streams.compute.wait(self._ended)
        self._read.clear()
        self._reductions = []

    def _complete_all(self) -> None:
        for reduction in self._reductions:
            reduction.complete()
