"""When units are gathered, freed and reduced: the phases of one root, driven by hooks before and after forward and
backward.

[Note: one microbatch, in order]
forward    a unit's pre-forward hook waits for its gather and starts the next one; its forward hook registers hooks on
           the outputs that need a gradient, and reshards if the strategy says so.
backward   the first gradient that reaches an output of a unit gathers it again and starts the gather of the one before
           it. Autograd adds to the whole gradients; the last of them starts the reduction of the unit. When the
           gradients of the unit's inputs are known, nothing of its backward can follow, and it is resharded.
end        autograd calls back after its last node. What never got a gradient, or never told that it was over, is
           settled then, in a fixed order.

[Note: when a unit's backward is over]
The last gradient of its parameters does not mean that its whole parameters are not needed any more: a frozen weight is
read to pass a gradient on to the inputs, and sends no sign. But autograd runs the nodes that can run in the reverse
order of their making. So a call is over when anything that was made before it gets its gradient: an input of the call,
or an output of a call that had ended when this one began. The graph is left as it is, so that gradients are added in
the order in which they would be without sharding. A unit at the start of the graph is freed at the end of backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node

from fullshard._compat import in_backward, on_backward_end, outside_of_graphs, outside_of_selective_checkpoints
from fullshard.device.lanes import Lane, is_capturing
from fullshard.device.memory import Slot
from fullshard.engine.finite import Tally, checks_finite, raise_on_every_rank, tally
from fullshard.engine.nested import map_tensors, tensors_in
from fullshard.engine.order import Follower
from fullshard.engine.sharded_param import ShardedParam
from fullshard.engine.unit import Form, Unit, UnitReduction
from fullshard.errors import RankMismatchError, StateError
from fullshard.layout.slots import Interval, assign_slots
from fullshard.liveness.watchdog import watch
from fullshard.liveness.whereabouts import here
from fullshard.policy.precision import is_castable
from fullshard.policy.strategy import Placement
from fullshard.tape.recorder import Origin, Phase

__all__ = [
    "Runtime",
    "Turn",
    "changing_shards",
    "clean_fqn",
    "groups_along",
    "install",
    "is_in_use",
    "is_unit",
    "refuse_copy",
    "refuse_pickle",
    "run_as_forward",
    "runtime_of",
    "share_memory_between_units",
    "turn_of",
    "turns_in",
    "unwrapped",
]


@dataclass(eq=False)
class Turn:
    """A unit's part in the runtime: who needs it whole at the moment, and how it wants to be prefetched."""

    unit: Unit
    modules: tuple[nn.Module, ...]
    prefetch_forward: bool = True
    prefetch_backward: str = "pre"  # "pre": before its backward; "post": after it; "": not at all
    ahead: int = 1
    unshards_in_backward: bool = True
    is_root: bool = False
    casts_inputs_at_root: bool = False
    next_forward: list[Turn] | None = None  # the user's own choice, instead of the recorded order
    next_backward: list[Turn] | None = None
    runtime: Runtime | None = None
    number: int = -1
    holds: int = 0
    is_asked_for: bool = False  # by the user's `unshard`, until it is resharded
    summoned: bool = False  # the modules have whole parameters of the user's, not the unit's
    arrived: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)  # modules whose forward is over, where the unit has several

    @property
    def reshards_after_forward(self) -> bool:
        """What the user chose, or what the strategy says; a root is needed again at once."""
        choice = self.unit.settings.reshard_after_forward
        whole_in_step = self.unit.settings.placements.parameters_in_step is Placement.WHOLE
        return not whole_in_step and not self.is_root if choice is None else choice


class Call:
    """One forward of a unit, as its backward will see it."""

    def __init__(self, runtime: Runtime, turn: Turn, start: int) -> None:
        self._runtime = runtime
        self.turn = turn
        self.start = start
        self._end = start
        self._before: list[Node] = []  # nodes that had made the inputs
        self._backward = -1  # the last one that came to it

    def watch_inputs(self, given: Any) -> Any:
        """Be told when the gradient of anything in `given` is known. Returns it as the forward is to see it."""
        tensors = [tensor for tensor in tensors_in(given) if tensor.requires_grad]
        self._before = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        watched = [tensor for tensor in tensors if self._is_in_order(tensor)]
        leaf = next((tensor for tensor in tensors if tensor.grad_fn is None), None)
        if not watched and leaf is not None:  # no node has made it, so let one make what forward sees
            watched = [leaf.view_as(leaf)]
            given = map_tensors(lambda tensor: watched[0] if tensor is leaf else tensor, given)
        for tensor in watched:
            tensor.register_hook(self._after_input)
        return given

    def watch_outputs(self, returned: Any, end: int) -> None:
        """Make the unit whole before the gradient goes on from anything in `returned` into the call."""
        self._end = end
        for tensor in tensors_in(returned):
            if tensor.requires_grad and tensor.grad_fn not in self._before:  # an input may be passed on as it came
                tensor.register_hook(partial(self._before_output, self._is_in_order(tensor)))
        self._before = []

    def _is_in_order(self, tensor: Tensor) -> bool:
        """Whether the gradient of `tensor` is known when all that was made after it is done, and not before."""
        return tensor.grad_fn is not None and tensor.device == self.turn.unit.settings.device

    def _before_output(self, is_in_order: bool, grad: Tensor) -> None:
        serial = self._runtime.begin_backward()
        if is_in_order:
            self._runtime.end_calls_since(self._end)
        if self._backward != serial:
            self._backward = serial
            self._runtime.before_backward(self)

    def _after_input(self, grad: Tensor) -> None:
        self._runtime.after_backward(self)


class Runtime:
    """The units below one root, and where they are in a microbatch.

    Args:
        root: the outermost sharded module.
        turns: its units, in the order of `root.modules()`.
    """

    def __init__(self, root: nn.Module, turns: Sequence[Turn]) -> None:
        self.turns = list(turns)
        self.phase = Phase.IDLE
        self.serial = 0
        self._microbatch = 0  # of the step, from 1 on
        self._step = 0
        self._device = turns[0].unit.settings.device
        self.shares_memory = self._device.type == "cpu" if _shares_memory is None else _shares_memory
        self.after_optimizer: torch.Event | torch.cuda.Event | None = None  # the next forward waits for it
        self._gather_lane = Lane("gather", self._device)
        self._reduce_lane = Lane("reduce", self._device)
        self._stack: list[tuple[Turn, Call | None]] = []
        self._calls: list[Call] = []  # those in whose backward we are
        self._recomputed: list[Turn] = []  # left in backward by a checkpoint's forward, and whole still
        self._orders: dict[int, tuple[int, ...]] = {}  # the forward order by the number of the outermost unit
        self.forward_order: Sequence[int] = ()  # the numbers of units, as the last forward came to them
        self.backward_order: tuple[int, ...] = ()
        self._forwards: tuple[int, ...] = ()  # what forwards had left before that backward
        self._forward = Follower()
        self._backward = Follower()
        self._since_backward: list[int] = []  # what forwards since the last backward left, in order
        self._reductions: list[UnitReduction] = []
        self._reduced: set[Turn] = set()  # in this backward, of those that reduce what is unused here, too
        self._tallies: list[Tally] = []
        self._clock = 0
        self._filled: dict[int, int] = {}
        self._intervals: list[Interval] = []
        self._planned = False
        self._postponed: list[Turn] = []
        _name_units(root, turns)
        watch()
        with here.waiting("comparison of models", Origin("", Phase.FORWARD)):
            _check_ranks_agree(turns)
        for number, turn in enumerate(turns):
            turn.number, turn.runtime = number, self
            turn.is_root = root in turn.modules

    # -- forward ------------------------------------------------------------------------------------------------------

    def before_forward(self, turn: Turn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Have `turn`'s unit whole. Its inputs as its forward is to see them."""
        _check_not_summoned(turn)
        recomputing = in_backward()
        if not self._stack and not recomputing:
            self._begin_forward(turn)
        args, kwargs = self._prepare_inputs(turn, args, kwargs)
        call = Call(self, turn, self._tick()) if torch.is_grad_enabled() else None
        self._stack.append((turn, call))
        if recomputing and turn.holds == 0:
            self._free_recomputed(turn)
        self._hold(turn)
        self._unshard(turn, Phase.FORWARD)
        if not recomputing:
            self._prefetch_forward(turn)
        elif self.phase is Phase.BACKWARD:
            self._prefetch_backward(turn)
        if call is not None:
            args, kwargs = call.watch_inputs((args, kwargs))
        return args, kwargs

    def after_forward(self, turn: Turn, module: nn.Module, output: Any) -> Any:
        """Free `turn`'s unit if its strategy says so. Its output as the caller is to see it."""
        if turn.unit.is_lost or all(entered is not turn for entered, _ in self._stack):
            return output  # its unit could not be made whole
        while self._stack[-1][0] is not turn:
            self._leave(self._stack[-1][0])  # an exception passed through a forward within
            self._stack.pop()
        call = self._stack.pop()[1]
        dtype = turn.unit.settings.precision.output_dtype
        if dtype is not None:
            output = map_tensors(lambda t: t.to(dtype) if is_castable(t.dtype) else t, output)
        if call is not None:
            call.watch_outputs(output, self._tick())
        turn.left.add(id(module))
        if call is not None and not in_backward():
            self._since_backward.append(turn.number)
        self._leave(turn)
        if not self._stack and not in_backward():
            self._end_forward(turn)
        return output

    def _begin_forward(self, top: Turn) -> None:
        if self.phase is not Phase.IDLE:
            self.recover()
        self.phase = Phase.FORWARD
        self._gather_lane.hold_compute_until(self.after_optimizer)
        self.after_optimizer = None
        self._forward = Follower(self._orders.get(top.number, ()))
        if is_capturing(self._device):
            for turn in [turn for turn in self.turns if turn.holds == 0]:
                self._reshard(turn, Phase.IDLE)  # to be filled within the graph, in memory of the graph's
        waiting = [turn.unit.notice_step() for turn in self.turns]
        if torch.is_grad_enabled():
            self._microbatch = self._microbatch + 1 if any(waiting) else 1
            self._step += self._microbatch == 1
            here.step = self._step
        for turn in self.turns:
            turn.unit.microbatch = self._microbatch

    def _end_forward(self, top: Turn) -> None:
        self._orders[top.number] = tuple(self._forward.seen)
        self.forward_order = self._forward.seen
        for turn in self.turns:
            turn.left.clear()
            over = not torch.is_grad_enabled() and turn.unit.settings.reshard_after_forward is not False
            if turn.holds == 0:
                keep = not (over or turn.unit.form is Form.GATHERING or turn.reshards_after_forward)
                self._reshard(turn, Phase.FORWARD, keep=keep)
                if over:
                    turn.unit.release_group(Phase.FORWARD)
        self.phase = Phase.IDLE

    def _leave(self, turn: Turn) -> None:
        self._release(turn)
        complete = len(turn.left) == len(turn.modules)
        if complete:
            turn.left.clear()
        for done in ((turn,) if complete else ()) + tuple(self._lenders(turn)):
            if done.holds == 0 and done.reshards_after_forward:
                if in_backward():
                    self._recomputed.append(done)  # if it is the last of its checkpoint, its backward comes next
                else:
                    self._reshard(done, Phase.FORWARD)

    def _prepare_inputs(self, turn: Turn, args: Any, kwargs: Any) -> tuple[Any, Any]:
        policy = turn.unit.settings.precision
        outermost = not self._stack
        casts = policy.cast_forward_inputs or (outermost and turn.casts_inputs_at_root)
        dtype = policy.param_dtype if casts else None
        moves = outermost and self._device.type != "cpu"
        if dtype is None and not moves:
            return args, kwargs

        def prepare(tensor: Tensor) -> Tensor:
            if moves:
                tensor = tensor.to(self._device, non_blocking=True)
            return tensor.to(dtype) if dtype is not None and is_castable(tensor.dtype) else tensor

        prepared: tuple[Any, Any] = map_tensors(prepare, (args, kwargs))
        return prepared

    # -- backward -----------------------------------------------------------------------------------------------------

    def begin_backward(self) -> int:
        """The number of the backward that is executing; the first call in one arranges for its end."""
        if self.phase is not Phase.BACKWARD:
            self.phase = Phase.BACKWARD
            self.serial += 1
            before, self._forwards = self._forwards, tuple(self._since_backward)
            self._since_backward = []
            self._backward = Follower(self.backward_order if before == self._forwards else self._forwards[::-1])
            on_backward_end(self.finish_backward)
        return self.serial

    def before_backward(self, call: Call) -> None:
        """Have the unit of `call` whole again, and start the gather of the one that comes next."""
        turn = call.turn
        self._complete_arrived()
        self._calls.append(call)
        self._free_recomputed(turn)
        self._hold(turn)
        if turn.unshards_in_backward:
            self._unshard(turn, Phase.PRE_BACKWARD)
        self._prefetch_backward(turn)

    def on_grad(self, turn: Turn, param: ShardedParam) -> None:
        """Note that autograd has added to `param`'s whole gradient; the last one starts the unit's reduction."""
        self.begin_backward()
        self._complete_arrived()
        unit = turn.unit
        turn.arrived.add(id(param))
        if len(turn.arrived) == unit.trainable and not unit.settings.reduces_unused:
            self._start_reduce(turn)

    def end_calls_since(self, time: int) -> None:
        """Note that the backward of every call that began after `time` is over."""
        for call in [call for call in self._calls if call.start > time]:
            self.after_backward(call)

    def after_backward(self, call: Call) -> None:
        """Free the unit of `call`, whose backward is over. Nothing happens if that was noted already."""
        if call not in self._calls:
            return
        self._calls.remove(call)
        turn = call.turn
        self._release(turn)
        if turn.holds == 0 and turn.unit.settings.reduces_unused:  # the one moment that comes on every rank
            self._reduced.add(turn)
            self._start_reduce(turn)
        for done in (turn, *self._lenders(turn)):
            if done.holds == 0 and done.unit.settings.reshard_after_backward:
                self._reshard(done, Phase.POST_BACKWARD)
        self._prefetch(self._postponed, Phase.BACKWARD)
        self._postponed = []

    def finish_backward(self) -> None:
        """Settle what is left when autograd has run its last node: reductions, unused parameters, whole units."""
        for turn in reversed(self.turns):
            if turn not in self._reduced:
                self._start_reduce(turn)
        self._finish_reductions()
        self._reduced.clear()
        self._calls.clear()
        self._recomputed.clear()
        for turn in self.turns:
            turn.holds = 0
            keep = not (turn.unit.settings.reshard_after_backward or turn.unit.form is Form.GATHERING)
            self._reshard(turn, Phase.POST_BACKWARD, keep=keep)
        if self._device.type != "cpu" and any(t.unit.settings.home.device.type == "cpu" for t in self.turns):
            torch.cuda.current_stream().synchronize()  # offloaded gradients must be there before the optimizer reads
        agreed = self._backward.agrees
        self.backward_order = tuple(self._backward.seen)
        self.phase = Phase.IDLE
        if agreed and not self._planned:
            self._share_memory()
        self._intervals.clear()
        self._filled.clear()
        tallies, self._tallies = self._tallies, []
        if checks_finite():
            raise_on_every_rank(tallies, groups_along(self.turns), self._device)

    def _start_reduce(self, turn: Turn) -> None:
        turn.arrived.clear()
        unit = turn.unit
        if checks_finite():
            self._tallies += tally(unit)
        if unit.holds_grads_back:
            unit.hold_grads()
        elif unit.has_whole_grads or unit.awaits_second_sum or (unit.settings.reduces_unused and unit.is_trained):
            # One at a time: gradients of more than two units at once would be memory without a bound.
            self._finish_reductions()
            self._reductions.append(unit.start_reduce(self._reduce_lane, Phase.POST_BACKWARD))

    def _complete_arrived(self) -> None:
        """Free whole gradients as soon as other ranks' have come.

        Ranks do so at different moments, so the optimizer's gradients stay as they are: if a backward fails, all ranks
        must have the same.
        """
        for reduction in self._reductions:
            if not reduction.is_complete:
                reduction.complete_if_come()

    def _finish_reductions(self) -> None:
        for reduction in self._reductions:
            reduction.finish()
        self._reductions.clear()

    @property
    def is_interrupted(self) -> bool:
        """Whether a forward or backward was begun, and is over without having come to its end."""
        return self.phase is not Phase.IDLE and not self._stack and not in_backward()

    def recover(self) -> None:
        """Be idle again after an exception left a forward or a backward unfinished. Its gradients are dropped."""
        self._stack.clear()
        self._calls.clear()
        self._recomputed.clear()
        for reduction in self._reductions:
            reduction.abandon()
        self._reductions.clear()
        self._reduced.clear()
        self._tallies.clear()
        self._since_backward = []
        for turn in self.turns:
            turn.holds = 0
            turn.arrived.clear()
            turn.left.clear()
            if self.phase is Phase.BACKWARD:
                turn.unit.drop_grads()
            self._reshard(turn, Phase.IDLE)
        self.phase = Phase.IDLE

    # -- whole and sharded --------------------------------------------------------------------------------------------

    def _hold(self, turn: Turn) -> None:
        for held in (turn, *self._lenders(turn)):
            held.holds += 1

    def _release(self, turn: Turn) -> None:
        for held in (turn, *self._lenders(turn)):
            held.holds = max(0, held.holds - 1)

    def _lenders(self, turn: Turn) -> list[Turn]:
        return [turn_of(unit.module) for unit in turn.unit.borrowed]

    def _unshard(self, turn: Turn, phase: Phase) -> None:
        needed = (turn, *self._lenders(turn))
        for item in needed:
            self.start_unshard(item, phase)
        for item in needed:
            item.unit.wait_unshard()

    def start_unshard(self, turn: Turn, phase: Phase) -> None:
        """Begin to gather `turn`'s unit, unless it is whole or on its way."""
        unit = turn.unit
        if unit.form is not Form.SHARDED:
            return
        _check_not_summoned(turn)
        if phase is Phase.IDLE:
            unit.notice_step()
        if not unit.can_fill and not unit.keeps_whole:
            self._make_room(unit)
        unit.start_unshard(self._gather_lane, phase)
        self._filled.setdefault(turn.number, self._tick())

    def _make_room(self, unit: Unit) -> None:
        """Let `unit` have memory of its own, since the unit that it shares memory with is whole too."""
        idle = [t for t in self.turns if t.unit is unit.slot.occupant and t.holds == 0 and not t.is_asked_for]
        for turn in idle:  # prefetched, or kept for later: it can be gathered again
            self._reshard(turn, Phase.IDLE)
        if not unit.can_fill:
            self.shares_memory = False
            unit.move(Slot(self._device))

    def _reshard(self, turn: Turn, phase: Phase, *, keep: bool = False) -> None:
        turn.is_asked_for = False
        turn.unit.reshard(phase, keep=keep)
        start = None if keep else self._filled.pop(turn.number, None)
        if start is not None:
            self._intervals.append(Interval(turn.number, start, self._tick()))

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _prefetch_forward(self, turn: Turn) -> None:
        ahead = self._ahead(turn, self._forward, turn.next_forward)
        if turn.prefetch_forward or turn.next_forward is not None:
            self._prefetch(ahead, Phase.FORWARD)

    def _prefetch_backward(self, turn: Turn) -> None:
        ahead = [t for t in self._ahead(turn, self._backward, turn.next_backward) if t.unshards_in_backward]
        if turn.prefetch_backward == "pre":
            self._prefetch(ahead, Phase.BACKWARD)
        self._postponed = ahead if turn.prefetch_backward == "post" else []

    def _free_recomputed(self, needed: Turn) -> None:
        """Free what a checkpoint computed again and does not need at once, which `needed` is."""
        for turn in self._recomputed:
            if turn.holds == 0 and turn is not needed:
                self._reshard(turn, Phase.FORWARD)
        self._recomputed.clear()

    def _ahead(self, turn: Turn, order: Follower, chosen: list[Turn] | None) -> list[Turn]:
        following = [self.turns[number] for number in order.use(turn.number, turn.ahead)]
        return following if chosen is None else chosen

    def _prefetch(self, turns: Iterable[Turn], phase: Phase) -> None:
        for turn in turns:
            if turn.unit.form is Form.SHARDED and (turn.unit.can_fill or turn.unit.keeps_whole):
                self.start_unshard(turn, phase)

    def _share_memory(self) -> None:
        """Give units that are never whole at once the same memory, which stays."""
        self._planned = True
        turns = [t for t in self.turns if not t.unit.keeps_whole and t.unit.whole_nbytes]
        if not turns or not (self.shares_memory or self._device.type == "cpu"):  # on a CPU other ranks may ask
            return
        nbytes = {turn.number: turn.unit.whole_nbytes for turn in turns}
        may_move = self.shares_memory and not any(turn.unit.slot.is_referenced for turn in turns)
        mine = [interval for interval in self._intervals if interval.unit in nbytes and may_move]
        assigned = assign_slots(mine, nbytes)
        sizes = [max(nbytes[unit] for unit in assigned if assigned[unit] == slot) for slot in set(assigned.values())]
        storages = self._common_storages(turns, sizes, f"{assigned} {nbytes}") or [None] * len(sizes)
        slots = [Slot(self._device, shared=True, common=storage) for storage in storages]
        for number in sorted(assigned, key=lambda number: -nbytes[number]):  # the largest sizes the slot
            self.turns[number].unit.move(slots[assigned[number]])
        for slot in slots:
            slot.settle()

    def _common_storages(
        self, turns: Sequence[Turn], sizes: Sequence[int], plan: str
    ) -> Sequence[torch.UntypedStorage | None]:
        """Memory for slots that ranks on one host have in common, so that each writes its part for all; if possible.

        A rank on which units cannot move now asks too, for nothing, so that none waits for it and none gets any.
        """
        if any(_writes_to_parameters(turn.unit.module) for turn in turns):
            return []
        sections = [section for turn in turns for section in turn.unit.sections]
        wires = {section.wires.shard for section in sections}
        if len(wires) != 1 or not all(section.gathers_from_all for section in sections):
            return []
        return wires.pop().common_storages(sizes, plan)


def _writes_to_parameters(module: nn.Module) -> bool:
    """Whether a forward within `module` is known to change whole parameters: other ranks must not see it."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return any(isinstance(inner, kinds) and inner.max_norm is not None for inner in module.modules())


# -- who belongs to which root ----------------------------------------------------------------------------------------


_TURN = "_fullshard_turn"  # the attribute by which a module holds its turn, so that both end together
_shares_memory: bool | None = None


def share_memory_between_units(enabled: bool | None) -> None:
    """Whether units that are never whole at the same time take turns on memory that stays. Without a call: on CPUs.

    Concerns models whose first forward comes after this call. Without it every unit's memory goes back to the allocator
    when it is resharded. On a CPU that costs page faults in each gather. On a GPU it costs little and leaves the memory
    to activations; but memory that stays, as much as is whole at once, means that the whole parameters of a unit are at
    the same addresses from the second step on, as CUDA graphs of parts of a model need.

    Args:
        enabled: None for what is usual on the device.
    """
    global _shares_memory
    _shares_memory = enabled


def turn_of(module: nn.Module) -> Turn:
    """The turn of the unit that `module` makes whole in its forward.

    Raises:
        StateError: the module is not sharded.
    """
    turn = _turn_or_none(module)
    if turn is None:
        raise StateError(
            f"{type(module).__name__} is not a unit. Call fully_shard(module) on it first, or name one of its units."
        )
    return turn


def turns_in(module: nn.Module) -> list[Turn]:
    """The turns of all units in `module` and below, each once, in the order of `module.modules()`."""
    found: dict[int, Turn] = {}
    for child in module.modules():
        turn = _turn_or_none(child)
        if turn is not None:
            found.setdefault(id(turn), turn)
    return list(found.values())


def groups_along(turns: Iterable[Turn]) -> list[dist.ProcessGroup]:
    """The groups along which a rank reaches all others that these units are spread over, one after the other."""
    return list(dict.fromkeys(group for turn in turns for group in turn.unit.groups))


def is_unit(module: nn.Module) -> bool:
    """Whether `module` makes a unit whole in its forward."""
    return _turn_or_none(module) is not None


def _turn_or_none(module: nn.Module) -> Turn | None:
    turn = vars(module).get(_TURN)
    return turn if isinstance(turn, Turn) else None


def is_in_use(turn: Turn) -> bool:
    """Whether a forward or backward that is under way needs `turn`'s unit. What a failed one has left is cleared up."""
    runtime = turn.runtime
    if runtime is not None and runtime.is_interrupted:
        runtime.recover()
    return turn.holds > 0


@contextmanager
def changing_shards(turn: Turn) -> Iterator[None]:
    """A context in which modules may be given other parameters, as `Module.to` does: the unit takes them over.

    Raises:
        StateError: the unit is in forward or backward, or its parameters are summoned.
    """
    _check_not_summoned(turn)
    if is_in_use(turn):
        raise StateError(
            f"{turn.unit.name or 'the root'} was to be moved or cast within its forward or backward. Do it between "
            "steps."
        )
    units = (turn.unit, *turn.unit.borrowed)  # tied weights are changed through any module that has them
    for unit in units:
        unit.reshard()
    yield
    for unit in units:
        unit.adopt()


def _check_not_summoned(turn: Turn) -> None:
    if turn.summoned:
        raise StateError(
            f"{turn.unit.name or 'the root'} is needed within summon_full_params: its parameters are in the user's "
            "hands, and changes to them are not in place yet. Leave the context first."
        )


def runtime_of(module: nn.Module) -> Runtime:
    """The runtime that drives `module`; made when an outermost module is first used.

    Raises:
        RankMismatchError: the ranks do not agree on the units.
    """
    turn = turn_of(module)
    if turn.runtime is None:
        return Runtime(module, turns_in(module))
    return turn.runtime


def refuse_copy(module: nn.Module, memo: object = None) -> NoReturn:
    """Raise: a copy of a sharded module would have parameters and hooks, but no unit.

    Raises:
        StateError: always.
    """
    raise StateError(
        f"copy.deepcopy of {type(module).__name__}, which is sharded: a copy would belong to no unit. Build and shard "
        "a second module, then load_state_dict() this one's state_dict() into it."
    )


def refuse_pickle(module: nn.Module, protocol: object = None) -> NoReturn:
    """Raise: a module that is read back from a file would have shards of a mesh that is not there, and no unit.

    Raises:
        StateError: always.
    """
    raise StateError(
        f"pickle, torch.save or copy.copy of {type(module).__name__}, which is sharded: what came back would belong to "
        "no unit. Save its state_dict(), and load that into a module that was built and sharded."
    )


def install(turn: Turn) -> None:
    """Let `turn`'s modules have their unit whole in forward and backward."""
    for module in turn.modules:
        refusals = {"__deepcopy__": partial(refuse_copy, module), "__reduce_ex__": partial(refuse_pickle, module)}
        vars(module).update({_TURN: turn, **refusals})  # the class may stay the user's own
        module.register_forward_pre_hook(_before_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(_after_forward, always_call=True)
    turn.unit.watch(partial(_on_grad, turn))


def run_as_forward(module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What `function(*args, **kwargs)` returns, with `module`'s unit whole meanwhile, as in its forward."""
    args, kwargs = _before_forward(module, args, kwargs)
    output = None
    try:
        output = function(*args, **kwargs)
    finally:
        output = _after_forward(module, args, output)
    return output


@outside_of_graphs
def _before_forward(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    with outside_of_selective_checkpoints():
        return runtime_of(module).before_forward(turn_of(module), args, kwargs)


@outside_of_graphs
def _after_forward(module: nn.Module, args: Any, output: Any) -> Any:
    turn = turn_of(module)
    if turn.runtime is None:
        return output
    with outside_of_selective_checkpoints():
        return turn.runtime.after_forward(turn, module, output)


def _on_grad(turn: Turn, param: ShardedParam) -> None:
    runtime = turn.runtime or runtime_of(turn.unit.module)
    runtime.on_grad(turn, param)


_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def clean_fqn(name: str) -> str:
    """`name` as in the user's own module, without the names that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def unwrapped(module: nn.Module) -> nn.Module:
    """`module`, or what is in it, if it is a wrapper such as that of activation checkpointing."""
    while not is_unit(module):
        inner = next((module._modules[name] for name in _WRAPPERS if name in module._modules), None)
        if inner is None:
            break
        module = inner
    return module


def _name_units(root: nn.Module, turns: Sequence[Turn]) -> None:
    names = {module: clean_fqn(name) for name, module in root.named_modules()}
    for turn in turns:
        turn.unit.name = names[turn.unit.module]


def _check_ranks_agree(turns: Sequence[Turn]) -> None:
    """Raise on every rank alike if they do not have the same units with the same parameters."""
    axes = turns[0].unit.settings.axes
    mine = [turn.unit.description for turn in turns]
    for group in (axes.shard_group, axes.replicate_group):
        if group is None or dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake":
            continue
        theirs: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(theirs, mine, group=group)
        odd = next((rank for rank, other in enumerate(theirs) if other != theirs[0]), None)
        if odd is not None:
            first, second = dist.get_global_rank(group, 0), dist.get_global_rank(group, odd)
            raise RankMismatchError(_difference(first, theirs[0], second, theirs[odd]))


def _difference(first: int, mine: Sequence[str], second: int, theirs: Sequence[str]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))
    of_first = mine[at] if at < len(mine) else "no further unit"
    of_second = theirs[at] if at < len(theirs) else "no further unit"
    return (
        f"ranks do not have the same model. Unit {at} is on rank {first}: {of_first}; on rank {second}: {of_second}. "
        "Build and shard the same modules in the same order on every rank."
    )
