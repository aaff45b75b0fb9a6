"""Communication for the engine: sums in rank order, many concurrent messages, and an exact record."""

import random
import threading
from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_new_ranks
from small_models import ONE_AXIS, chain, inputs, learn, leave
from torch import Tensor, nn

from fullshard import fully_shard, share_memory_between_ranks
from fullshard._compat import break_connections
from fullshard.comm.collectives import Collectives
from fullshard.comm.routes import collectives_for
from fullshard.comm.shared_memory import SharedMemoryCollectives
from fullshard.comm.transport import PartSums, Pending
from fullshard.layout.shard_spec import owned
from fullshard.tape.recorder import Origin, Phase, recording
from fullshard.testing import assert_same

WORLDS = pytest.mark.parametrize("world", [1, 2, 3, 4])
WAYS = pytest.mark.parametrize("shares", [True, False], ids=["shared memory", "pairwise"])
NUMELS = (64, 7, 1, 5, 0, 1000)  # even, uneven, fewer than ranks, none
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
ORIGIN = Origin("block", Phase.FORWARD)


def transports() -> Collectives:
    return collectives_for(dist.group.WORLD, torch.device("cpu"))


def choose(shares: bool) -> None:
    """Exchange through shared memory or pairwise, from the first collective on."""
    share_memory_between_ranks(shares)
    transport = transports()
    assert isinstance(transport, SharedMemoryCollectives)
    assert (transport.peers is not None) == (shares and transport.world > 1)


def numbers(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return the values of `rank`. Their sum depends on the order of the terms."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * numel + rank)
    exponents = torch.randint(-6, 6, (numel,), generator=generator)
    return (torch.randn(numel, generator=generator) * 2.0**exponents).to(dtype)


def sum_in_rank_order(numel: int, dtype: torch.dtype, divisor: float, seed: int = 0) -> Tensor:
    total = numbers(0, numel, dtype, seed)
    for rank in range(1, dist.get_world_size()):
        total = total + numbers(rank, numel, dtype, seed)
    return total / divisor if divisor != 1 else total


def local(whole: Tensor) -> Tensor:
    """Return this rank's chunk of `whole`. The last chunks may be short or empty."""
    span = owned(whole.numel(), dist.get_world_size(), dist.get_rank())
    return whole[span.start : span.stop]


class Gather:
    """An all-gather of chunks of each size, and its expected result."""

    def __init__(self, dtype: torch.dtype, seed: int = 0, in_place: bool = False) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        self.expected = [torch.cat([numbers(r, n, dtype, seed) for r in range(world)]) for n in NUMELS]
        self.wholes = [torch.full((world * n,), torch.nan, dtype=dtype) for n in NUMELS]
        self.parts = [numbers(rank, n, dtype, seed) for n in NUMELS]
        if in_place:
            places = [whole.view(world, -1)[rank] for whole in self.wholes]
            self.parts = [place.copy_(part) for place, part in zip(places, self.parts, strict=True)]
        self.kept = [part.clone() for part in self.parts]

    def start(self) -> Pending:
        return transports().channel(len(NUMELS)).all_gather(self.wholes, self.parts, origin=ORIGIN)

    def check(self) -> None:
        assert_same(self.wholes, self.expected)
        assert_same(self.parts, self.kept)


class Scatter:
    """A reduce-scatter of tensors of each size, and its expected result."""

    def __init__(self, dtype: torch.dtype, seed: int = 0, divisor: float = 1) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        self.divisor = divisor
        self.expected = [local(sum_in_rank_order(n, dtype, divisor, seed)) for n in NUMELS]
        self.wholes = [numbers(rank, n, dtype, seed) for n in NUMELS]
        self.kept = [whole.clone() for whole in self.wholes]
        self.sums = [torch.full_like(part, torch.nan) for part in self.expected]
        self.part_numels = [len(owned(n, world, 0)) for n in NUMELS]

    def start(self) -> Pending:
        channel = transports().channel(len(NUMELS))
        return channel.reduce_scatter(PartSums(self.sums, self.wholes, self.part_numels, self.divisor), origin=ORIGIN)

    def check(self) -> None:
        assert_same(self.sums, self.expected)
        assert_same(self.wholes, self.kept)


class AllReduce:
    """An all-reduce of tensors of each size, and its expected result."""

    def __init__(self, dtype: torch.dtype, seed: int = 0, divisor: float = 1) -> None:
        self.divisor = divisor
        self.expected = [sum_in_rank_order(n, dtype, divisor, seed) for n in NUMELS]
        self.tensors = [numbers(dist.get_rank(), n, dtype, seed) for n in NUMELS]

    def start(self) -> Pending:
        return transports().channel(len(NUMELS)).all_reduce(self.tensors, self.divisor, origin=ORIGIN)

    def check(self) -> None:
        assert_same(self.tensors, self.expected)


class Exchange:
    """An all-to-all of chunks of every size, including empty ones, and its expected result."""

    def __init__(self, dtype: torch.dtype, seed: int = 0, in_place: bool = False) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        self.expected = [self.part(sender, rank, dtype, seed) for sender in range(world)]
        self.rooms = [torch.full_like(part, torch.nan) for part in self.expected]
        self.parts = [self.part(rank, receiver, dtype, seed) for receiver in range(world)]
        if in_place:
            self.parts[rank] = self.rooms[rank].copy_(self.parts[rank])
        self.kept = [part.clone() for part in self.parts]

    @staticmethod
    def part(sender: int, receiver: int, dtype: torch.dtype, seed: int) -> Tensor:
        world = dist.get_world_size()
        return numbers(world * sender + receiver, NUMELS[(seed + 2 * sender + receiver) % len(NUMELS)], dtype, seed)

    def start(self) -> Pending:
        return transports().channel(1).all_to_all(self.rooms, self.parts, common_nbytes=0, origin=ORIGIN)

    def check(self) -> None:
        assert_same(self.rooms, self.expected)
        assert_same(self.parts, self.kept)


@WAYS
@WORLDS
@on_new_ranks("world")
def test_collectives_return_exact_values_or_sums_in_rank_order(world, shares):
    """Sums are bitwise equal for every collective that computes them, so all strategies agree."""
    choose(shares)
    for dtype in DTYPES:
        calls = [Gather(dtype), Gather(dtype, in_place=True), Scatter(dtype), Scatter(dtype, divisor=world)]
        calls += [AllReduce(dtype), AllReduce(dtype, divisor=world), Scatter(dtype, divisor=0.7)]
        calls += [Exchange(dtype, seed, in_place) for seed in range(len(NUMELS)) for in_place in (False, True)]
        for call in calls:
            pending = call.start()
            pending.wait()
            pending.wait()  # a second wait is allowed and does nothing
            call.check()


@WAYS
@WORLDS
@on_new_ranks("world")
def test_messages_of_concurrent_collectives_do_not_mix(world, shares):
    """Each rank may wait in a different order, because messages have tags."""
    choose(shares)
    rank = dist.get_rank()
    for round_ in range(3):  # later rounds use the scratch memory of those before
        calls: list[Gather | Scatter | Exchange] = []
        for seed in range(4):
            calls += [Gather(torch.float32, seed), Scatter(torch.float32, 10 * round_ + seed, divisor=3)]
            calls += [Exchange(torch.float32, seed)]
        pending = [call.start() for call in calls]
        order = list(range(len(calls)))
        random.Random(rank + 10 * round_).shuffle(order)
        for i in order:
            pending[i].wait()
            calls[i].check()


@WAYS
@WORLDS
@on_new_ranks("world")
def test_all_reduces_complete_in_any_order_common_to_all_ranks(world, shares):
    choose(shares)
    calls = [AllReduce(torch.float32, seed, divisor=2) for seed in range(4)]
    pending = [call.start() for call in calls]
    for i in (2, 0, 3, 1):  # the same on all ranks: an all-reduce has a second half, which begins with the wait
        pending[i].wait()
        calls[i].check()


@WAYS
@WORLDS
@on_new_ranks("world")
def test_recording_reports_bytes_and_messages_sent_by_each_rank(world, shares):
    elements = sum(NUMELS)
    choose(shares)
    with recording() as record:
        for call in (Gather(torch.float32), Scatter(torch.float32), AllReduce(torch.float32), Exchange(torch.float32)):
            pending = call.start()
            assert record.events[-1].end is None
            pending.wait()
            assert record.events[-1].end >= record.events[-1].start
        transports().broadcast([torch.zeros(10), torch.zeros(3)], 0, origin=ORIGIN)
    Gather(torch.float32).start().wait()  # outside of the recording
    rank = dist.get_rank()
    gather, scatter, reduce, exchange, broadcast = record.events
    assert record.names() == ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]
    assert [event.stream for event in record.events] == ["gather", *["reduce"] * 4]
    assert {event.origin for event in record.events} == {ORIGIN}
    assert gather.sent_bytes == 4 * elements * (world - 1)
    assert scatter.sent_bytes == 4 * (elements - sum(len(owned(n, world, rank)) for n in NUMELS))
    assert reduce.sent_bytes == 2 * 4 * elements * (world - 1) // world
    sent = [NUMELS[(2 * rank + other) % len(NUMELS)] for other in range(world) if other != rank]
    assert exchange.sent_bytes == 4 * sum(sent)
    assert broadcast.sent_bytes == (4 * 13 if rank == 0 else 0)
    messages = [event.messages for event in (gather, scatter, reduce, exchange)]
    if shares:  # one message has the location of all data
        assert messages == [world - 1, world - 1, 2 * (world - 1), world - 1]
    else:
        of_each = len(NUMELS) * (world - 1)
        assert messages == [of_each, of_each, 2 * of_each, sum(numel > 0 for numel in sent)]
    assert record.sent_bytes() == sum(event.sent_bytes for event in record.events)
    assert record.sent_bytes("all_gather") == gather.sent_bytes


@on_new_ranks(2)
def test_process_group_has_one_collectives_object_with_unique_tags():
    """Two objects would use the same tags and confuse their messages."""
    group = dist.new_group(list(range(dist.get_world_size())))
    own = collectives_for(group, torch.device("cpu"))
    assert own is collectives_for(group, torch.device("cpu"))
    assert own is not transports()
    channels = [own.channel(3, variants=4), own.channel(1), own.channel_for("this", 5), own.channel_for("that", 5)]
    assert own.channel_for("this", 5) is channels[2]
    tags = [
        set(range(channel._first_tag, channel._first_tag + channel._tags * channel._variants)) for channel in channels
    ]
    assert sum(map(len, tags)) == len(set().union(*tags))  # every message has a unique tag
    assert [len(tag) for tag in tags] == [2 * 3 * 4, 2, 10, 10]
    variants = {channels[0].variant(text)._first_tag for text in ("", "a", "b", "c", "d", "e")}
    assert 1 < len(variants) <= 4 and variants <= tags[0]


@on_new_ranks(3)
def test_break_connections_works_after_a_peer_closed_its_connections():
    group = dist.new_group(list(range(dist.get_world_size())))
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        awaited = group.recv([torch.empty(1)], 2, 0)
        failures: list[str] = []

        def wait() -> None:
            try:
                awaited.wait()
            except RuntimeError as error:
                failures.append(str(error))

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        store.set("waiting", "")
        with suppress(RuntimeError):  # rank 1 closes its connections and sends nothing
            group.recv([torch.empty(1)], 1, 0).wait()
        break_connections(group, [1, 2], 1)
        waiting.join(timeout=30)
        assert failures
        store.set("ended", "")
    elif dist.get_rank() == 1:
        store.wait(["waiting"])
        break_connections(group, [2, 0], 1)
    store.wait(["ended"])


@pytest.mark.slow
@WAYS
@on_new_ranks(2)
def test_unused_models_on_some_ranks_do_not_affect_training(shares):
    """A rank may shard models that it never uses, before the first step and between steps."""
    choose(shares)
    rng, unused = random.Random(dist.get_rank()), list[nn.Module]()

    def loss_of(model: nn.Module, step: int) -> Tensor:
        unused.extend(fully_shard(nn.Linear(48, 48)) for _ in range(rng.randrange(3)))
        return model(inputs(step)).square().mean()

    expected = learn(chain(leave), loss_of=loss_of)
    for strategy in ONE_AXIS:
        unused.extend(chain(partial(fully_shard, strategy=strategy)) for _ in range(rng.randrange(3)))
        assert_same(learn(chain(partial(fully_shard, strategy=strategy)), loss_of=loss_of), expected, name=strategy)
