"""Order and number of collectives, and the copies that they need.

The communicated bytes are compared with the formulas by `test_docs.py`.
"""

import weakref
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_ranks
from small_models import ONE_AXIS, Layer, chain, inputs, leave, sgd
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fullshard import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    dry,
    fully_shard,
    recording,
    share_memory_between_ranks,
)
from fullshard.device.streams import Stream
from fullshard.engine.param_group import ParamGroup
from fullshard.engine.reduction import Reduction, UnitReduction
from fullshard.engine.registry import units_in
from fullshard.engine.residency import UnitState
from fullshard.engine.unit_gradients import UnitGradients
from fullshard.tape.recorder import Phase, Recorder
from fullshard.tape.tape import Collective
from fullshard.testing import assert_same
from fullshard.testing import run_ranks as run_fresh_ranks
from fullshard.wrap import ModuleWrapPolicy

LAYERS = ["layers.0", "layers.1", "layers.2", "layers.3"]


def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> Recorder:
    with recording() as record:
        model(inputs(10 * number + dist.get_rank())).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return record


def gather(*names: str) -> list[tuple[str, str]]:
    return [("all_gather", name) for name in names]


def scatter(*names: str) -> list[tuple[str, str]]:
    return [("reduce_scatter", name) for name in names]


FORWARD = gather("", *LAYERS)
AFTER_BACKWARD = ["", *reversed(LAYERS)]  # the root has the head, whose gradients come first
EXPECTED = {
    "ddp": [("all_reduce", name) for name in AFTER_BACKWARD],
    "zero1": FORWARD + scatter(*AFTER_BACKWARD),
    "zero2": FORWARD + scatter(*AFTER_BACKWARD),
    # The all-gather of the next unit precedes the reduce-scatter of this one. The root is still unsharded.
    "zero3": [
        *FORWARD,
        *(gather("layers.3") + scatter("")),
        *(gather("layers.2") + scatter("layers.3")),
        *(gather("layers.1") + scatter("layers.2")),
        *(gather("layers.0") + scatter("layers.1")),
        *scatter("layers.0"),
    ],
}


@pytest.mark.parametrize("strategy", ONE_AXIS)
@on_ranks(2)
def test_collectives_run_in_the_order_of_the_strategy(strategy):
    model = chain(partial(fully_shard, strategy=strategy))
    optimizer = sgd(model)
    records = [step(model, optimizer, number) for number in range(4)]
    assert [[(event.name, event.origin.unit) for event in record.collectives()] for record in records] == [
        EXPECTED[strategy]
    ] * 4


PREFETCHED = "backward"  # when the backward of the neighboring unit begins
OWN = Phase.PRE_BACKWARD.value


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({"backward_prefetch": BackwardPrefetch.BACKWARD_PRE}, [PREFETCHED] * 4),
        ({"backward_prefetch": BackwardPrefetch.BACKWARD_POST}, [OWN, PREFETCHED, PREFETCHED, PREFETCHED]),
        ({"backward_prefetch": None}, [OWN] * 4),
    ],
    ids=["pre", "post", "none"],
)
@on_ranks(2)
def test_backward_prefetch_option_sets_the_phase_of_all_gathers(options, how):
    model = FullyShardedDataParallel(chain(leave), auto_wrap_policy=ModuleWrapPolicy({Layer}), **options)
    optimizer = sgd(model)
    for number in range(4):
        record = step(model, optimizer, number)
    gathers = [(event.origin.unit, event.origin.phase.value) for event in record.collectives("all_gather")]
    backward = [(unit, phase) for unit, phase in gathers if phase != "forward"]
    assert [unit for unit, _ in backward] == list(reversed(LAYERS))
    assert [phase for _, phase in backward] == how


@on_ranks(2)
def test_at_most_two_inner_units_are_unsharded_at_the_same_time():
    model = chain(fully_shard)
    optimizer = sgd(model)
    most = 0
    for number in range(5):
        filled: set[str] = set()
        for event in step(model, optimizer, number).events:
            if event.origin.unit and event.name == "allocate":
                filled.add(event.origin.unit)
            if event.origin.unit and event.name == "free":
                filled.discard(event.origin.unit)
            most = max(most, len(filled))
    assert most == 2


@pytest.mark.parametrize(("strategy", "counts"), [("ddp", [0, 0, 0]), ("zero1", [5, 0, 0]), ("zero3", [5, 5, 5])])
@on_ranks(2)
def test_zero1_all_gathers_once_per_step_and_zero3_once_per_forward(strategy, counts):
    model = chain(partial(fully_shard, strategy=strategy))
    optimizer = sgd(model)
    step(model, optimizer, 0)
    for number in range(3):
        with recording() as record, torch.no_grad():
            model(inputs(number))
        assert len(record.collectives()) == counts[number]


# -- copies -----------------------------------------------------------------------------------------------------------

COPIES = {
    *("aten.copy_", "aten._foreach_copy_", "aten.clone", "aten._to_copy"),
    *("aten.cat", "aten._chunk_cat", "aten.constant_pad_nd"),
}


class CountCopies(TorchDispatchMode):
    """Counts the bytes that copies write, to tensors of at least `floor` bytes and to smaller tensors."""

    def __init__(self, floor: int) -> None:
        super().__init__()
        self.floor = floor
        self.large = self.small = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func.overloadpacket) in COPIES:
            written = args[0] if func.overloadpacket.__name__ == "_foreach_copy_" else [result]
            for tensor in written:
                if tensor.nbytes >= self.floor:
                    self.large += tensor.nbytes
                else:
                    self.small += tensor.nbytes
        return result


def copies_of_a_step(model: Any, x: Tensor) -> CountCopies:
    optimizer = sgd(model)
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with CountCopies(floor=9000) as copies:
        model(x).square().mean().backward()
    return copies


SHARES = pytest.mark.parametrize("shares", [False, True], ids=["pairwise", "shared memory"])


def count_copies(strategy: str, shares: bool) -> tuple[int, int, int, int]:
    """Return the bytes copied in one step, of matrices and of the rest, and the bytes of this rank's shards of both."""
    share_memory_between_ranks(shares)
    model = chain(partial(fully_shard, strategy=strategy))
    copies = copies_of_a_step(model, inputs())
    layouts = [param_group.plan.layout for unit in units_in(model) for param_group in unit.param_groups]
    matrices = sum(item.spec.part_numel for layout in layouts for item in layout.in_place)
    return copies.large, copies.small, matrices * 4, sum(layout.pack_numel for layout in layouts) * 4


@SHARES
@pytest.mark.parametrize(
    ("strategy", "gathers", "own"),
    [("zero1", 1, 0), pytest.param("zero2", 1, 1, marks=pytest.mark.slow), ("zero3", 2, 2)],
)
def test_collectives_copy_nothing_between_shards_and_transport(strategy, gathers, own, shares):
    """An all-gather copies only this rank's own rows. A reduce-scatter copies no matrix.

    If the transport is shared memory, gradients and gathered parameters are copied into it and back. Units that share
    one buffer have this buffer in shared memory. Their all-gathers copy only this rank's own rows.
    """
    transport = (2 * gathers if own == 0 else 0) + 1 if shares else 0
    for large, small, matrices, packed in run_fresh_ranks(2, count_copies, strategy, shares):
        assert large == (own + transport) * matrices
        # Packed tensors: the parts of both ranks are copied out of the pack, and the gradients of both into it.
        assert small <= (3 * max(own, 1) + 2 + transport) * packed


WIDTH = 256
PART = WIDTH * WIDTH // 2


def count_copies_in_low_precision(shares: bool) -> int:
    share_memory_between_ranks(shares)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = nn.Sequential(
        *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)), nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    )
    for layer in model[:3]:
        fully_shard(layer, mp_policy=policy)
    return copies_of_a_step(fully_shard(model, mp_policy=policy), torch.ones(4, WIDTH, dtype=torch.bfloat16)).large


@SHARES
def test_mixed_precision_casts_once_per_all_gather_and_reduce_scatter(shares):
    gathers = 3 + 1 + 3  # the root stays unsharded
    cast, own_rows, to_masters = gathers * PART * 2, gathers * PART * 2, 4 * PART * 4
    transport = 4 * PART * 2 if shares else 0
    assert run_fresh_ranks(2, count_copies_in_low_precision, shares) == [cast + own_rows + to_masters + transport] * 2


@on_ranks(2)
def test_low_precision_halves_communicated_bytes():
    sent = []
    for dtype in (torch.float32, torch.bfloat16):
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        model = chain(partial(fully_shard, mp_policy=policy))
        record = step(model, sgd(model), 0)
        sent.append(record.sent_bytes())
    full, half = sent
    assert full / 2 <= half <= full / 2 + 5 * 16  # packs are padded to 16 bytes


def storages(model: torch.nn.Module) -> list[int]:
    found = []
    for unit in units_in(model):
        found.append(unit.slot.storage.data_ptr())
        for param_group in unit.param_groups:
            found += [param.local.untyped_storage().data_ptr() for param in param_group.params]
            flat = param_group.gradients.flat
            found.append(0 if flat is None else flat.untyped_storage().data_ptr())
    return found


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@on_ranks(2)
def test_buffers_keep_their_addresses_from_the_fourth_step(strategy):
    model = chain(partial(fully_shard, strategy=strategy))
    optimizer = sgd(model)
    visited: list[list[int]] = []
    for number in range(6):
        step(model, optimizer, number)
        visited.append(storages(model))
    assert visited[3] == visited[4] == visited[5]


def without_autograd(grad: DTensor) -> Tensor:
    with torch.no_grad():
        return grad.to_local()  # the DTensor's local tensor itself


def as_it_is(grad: DTensor) -> DTensor:
    return grad


def a_part(grad: DTensor) -> Tensor:
    return grad.to_local().flatten()[:1]


@pytest.mark.parametrize("keep", [as_it_is, without_autograd, a_part])
@on_ranks(2)
def test_gradients_referenced_by_the_user_are_not_overwritten(keep):
    model = chain(fully_shard)
    optimizer = sgd(model)
    for number in range(3):
        step(model, optimizer, number)
    model(inputs(3)).square().mean().backward()
    kept = [keep(param.grad) for param in model.parameters()]
    at_once = [(item.to_local() if isinstance(item, DTensor) else item).clone() for item in kept]
    optimizer.zero_grad()
    model(inputs(4)).square().mean().backward()
    later = [item.to_local() if isinstance(item, DTensor) else item for item in kept]
    assert_same(later, at_once)


def give_it_other_memory(grad: DTensor) -> None:
    local = grad.to_local()
    local.data = local + 1


def give_it_another_local_tensor(grad: DTensor) -> None:
    grad._local_tensor = grad._local_tensor + 1


def watch_it(grad: DTensor) -> None:
    grad.requires_grad_()


@pytest.mark.parametrize("change", [give_it_other_memory, give_it_another_local_tensor, watch_it])
@on_ranks(2)
def test_user_changes_to_a_gradient_do_not_affect_the_next_gradient(change):
    model = chain(fully_shard)
    found = []
    for _ in range(2):
        model(inputs()).square().mean().backward()
        found.append([param.grad.to_local().clone() for param in model.parameters()])
        for param in model.parameters():
            with torch.no_grad():
                change(param.grad)
        model.zero_grad()
    first, second = found[0], found[1]
    assert_same(second, first)
    assert not any(grad.requires_grad for grad in second)


@on_ranks(2)
def test_unsharded_gradients_stay_alive_until_their_reduction_finishes():
    """Count the live unsharded gradients when reductions start, when they are queued, and when they finish."""
    found, alive = [], []
    make, queue, finish = ParamGroup.start_reduction, UnitGradients.start_reductions, UnitReduction.finish

    def note(param_group: ParamGroup, grads: dict[int, Tensor], **options: Any) -> Reduction:
        alive[-1] += [weakref.ref(grad) for grad in grads.values()]
        return make(param_group, grads, **options)

    def note_queued(gradients: UnitGradients, *args: Any) -> UnitReduction:
        alive.append([])
        reduction = queue(gradients, *args)
        found.append([len(alive[-1]), sum(ref() is not None for ref in alive[-1])])
        return reduction

    def note_finished(reduction: UnitReduction) -> None:
        finish(reduction)
        found[-1].append(sum(ref() is not None for ref in alive[-1]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stream, "is_stream", True)
        patch.setattr(ParamGroup, "start_reduction", note)
        patch.setattr(UnitGradients, "start_reductions", note_queued)
        patch.setattr(UnitReduction, "finish", note_finished)
        model = chain(fully_shard)
        step(model, sgd(model), 0)
    assert len(found) == len(LAYERS) + 1
    for count, queued, finished in found:
        assert count == queued > 0
        assert finished == 0


@on_ranks(2)
def test_gradient_tensors_are_reused_in_every_step_if_unreferenced():
    model = chain(fully_shard)
    optimizer = sgd(model)
    visited = []
    for number in range(4):
        model(inputs(number)).square().mean().backward()
        visited.append([(id(param.grad), param.grad.to_local().data_ptr()) for param in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    assert visited[1] == visited[2] == visited[3]


@pytest.mark.parametrize("recomputes", [False, True])
def test_unit_of_several_modules_is_all_gathered_once_per_pass(recomputes):
    width = 64
    with dry.world(8):
        mesh = init_device_mesh("cpu", (8,))
        with dry.taped() as tape:
            model = nn.Sequential(*(nn.Linear(width, width) for _ in range(6)), nn.Linear(width, 1))
            blocks = list(model)[:6]
            if recomputes:
                for block in blocks:
                    block.forward = partial(checkpoint, block.forward, use_reentrant=False)
            for first in (0, 2, 4):
                fully_shard(blocks[first : first + 2], mesh=mesh)
            fully_shard(model, mesh=mesh)
            for _ in range(3):
                begun = len(tape.entries)
                model(torch.zeros(4, width)).sum().backward()
    step = (entry for entry in tape.entries[begun:] if isinstance(entry, Collective))
    counts = Counter(entry.origin.unit for entry in step if "gather" in entry.name)
    assert counts == {"": 1, "0": 2, "2": 2, "4": 2}
    assert not dry.races(tape)


@pytest.mark.parametrize("first_is_frozen", [False, True])
def test_unit_of_distant_modules_reshards_between_their_backwards(first_is_frozen):
    with dry.world(8):
        mesh = init_device_mesh("cpu", (8,))
        with dry.taped():
            first, *blocks, last = model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)))
            first.requires_grad_(not first_is_frozen)
            for modules in ([first, last], *blocks):
                fully_shard(modules, mesh=mesh)
            fully_shard(model, mesh=mesh)
            unit, states = units_in(model)[1], []
            blocks[1].register_full_backward_hook(lambda *_: states.append(unit.residency.state))
            for _ in range(3):
                model(torch.zeros(4, 64, requires_grad=True)).sum().backward()
    assert set(unit.modules) == {first, last}
    assert set(states) == {UnitState.SHARDED}
