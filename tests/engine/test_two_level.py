"""Two-level collectives over groups of ranks: few messages per queue, bitwise equal with and without reordering."""

from contextlib import AbstractContextManager
from functools import partial
from math import ceil
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from shared_ranks import in_fake_world, on_ranks
from small_models import chain, inputs, sgd, whole_grads, wholes
from torch import Tensor

from fullshard import Placement, Placements, fully_shard, recording
from fullshard.comm import two_level
from fullshard.comm.collectives import Collectives
from fullshard.comm.mesh import subgroup
from fullshard.comm.routes import collectives_for
from fullshard.comm.two_level import TwoLevelGathers, TwoLevelSums
from fullshard.device.memory import Pool
from fullshard.engine.gather import Gather
from fullshard.engine.registry import units_in
from fullshard.layout.group_layout import FEW_OPERATIONS
from fullshard.tape.recorder import Origin, Phase
from fullshard.testing import assert_same

ORIGIN = Origin("test", Phase.IDLE)
HFSDP = partial(
    Placements,
    parameters=Placement.GROUPED,
    parameters_in_step=Placement.GROUPED,
    gradients=Placement.GROUPED,
    optimizer=Placement.SHARDED,
)


class Counting(Pool):
    """Scratch memory that counts the tensors in use."""

    out = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        self.out += 1
        return super().take(numel, dtype).fill_(torch.nan)  # reads of unwritten values become visible

    def give(self, tensor: Tensor) -> None:
        self.out -= 1
        super().give(tensor)


def levels(size: int) -> tuple[Collectives, Collectives]:
    """Return the collectives across groups of `size` adjacent ranks, and those within this rank's group."""
    ranks, rank, cpu = range(dist.get_world_size()), dist.get_rank(), torch.device("cpu")
    across, within = subgroup([*ranks[rank % size :: size]]), subgroup([*ranks[rank // size * size :][:size]])
    return collectives_for(across, cpu), collectives_for(within, cpu)


def by_places(whether: bool) -> AbstractContextManager[object]:
    """Return a context in which two-level collectives reorder, or do not reorder, within groups."""
    return mock.patch.object(two_level, "_reorders", lambda *_: whether)


@pytest.mark.parametrize(("world", "size"), [(4, 2), (6, 2), (6, 3)])
@on_ranks("world")
def test_two_level_all_gather_returns_parts_in_rank_order(world, size):
    world, rank, numels = dist.get_world_size(), dist.get_rank(), (1, 4, 7)
    across, within = levels(size)
    send = [torch.arange(n) + 100.0 * rank for n in numels]
    expected = [torch.cat([torch.arange(n) + 100.0 * other for other in range(world)]) for n in numels]
    for whether in (False, True):
        scratch = Counting(torch.device("cpu"))
        messages = len(numels) * across.world
        gathers = TwoLevelGathers(across.channel(messages), within.channel(messages), scratch)
        receive = [torch.full((world * n,), torch.nan) for n in numels]
        with by_places(whether):
            gathers.all_gather(receive, send, origin=ORIGIN).wait()
            assert_same(receive, expected)
            for whole in receive:
                whole.fill_(torch.nan)
            gathers.gather_within(receive, origin=ORIGIN).wait()
        assert_same(receive, expected)
        assert scratch.out == 1  # the secondary shards
        gathers.release()
        assert scratch.out == 0


@pytest.mark.parametrize(("world", "size"), [(4, 2), (6, 2), (6, 3)])
@on_ranks("world")
def test_two_level_sums_are_bitwise_equal_with_and_without_reordering(world, size):
    world, rank, part = dist.get_world_size(), dist.get_rank(), 5
    across, within = levels(size)
    numels = [*range(world * part + 1)]  # includes every size of a short or empty last part
    part_numels = [max(1, ceil(n / world)) if i % 2 else part for i, n in enumerate(numels)]
    draw = torch.Generator().manual_seed(rank)
    wholes = [torch.randn(n, generator=draw) for n in numels]
    kept, owned, found = [whole.clone() for whole in wholes], [], []
    for whether in (False, True):
        scratch = Counting(torch.device("cpu"))
        messages = len(numels) * across.world
        sums = TwoLevelSums(across.channel(messages), within.channel(messages), scratch)
        owned = [sums.secondary_numel(n, p) for n, p in zip(numels, part_numels, strict=True)]
        group_sums = [torch.full((across.world * p,), torch.nan) for p in part_numels]
        with by_places(whether):
            sums.reduce_within(group_sums, wholes, part_numels, origin=ORIGIN).wait()
        found.append([total[:n] for total, n in zip(group_sums, owned, strict=True)])
        assert scratch.out == 0
        if whether:
            assert not any(total[n:].any() for total, n in zip(group_sums, owned, strict=True))
    assert_same(wholes, kept)
    assert_same(found[1], found[0])
    assert not any(total.isnan().any() for total in found[0])


@on_ranks(4)
def test_hfsdp_training_is_bitwise_equal_with_and_without_reordering():
    """Train two steps of two microbatches each. The first microbatch reduces within groups only."""
    left = []
    for whether in (False, True):
        with by_places(whether):
            model = chain(partial(fully_shard, strategy=HFSDP(group=2)))
            optimizer = sgd(model)
            left.append([])
            for step in range(2):
                for i in range(2):
                    model.set_requires_gradient_sync(i == 1)
                    model(inputs(step * 7 + dist.get_rank())).square().mean().backward()
                left[-1].append(whole_grads(model))
                optimizer.step()
                optimizer.zero_grad()
            left[-1].append(wholes(model))
    assert_same(left[1], left[0])


@on_ranks(4)
def test_secondary_shards_are_not_used_after_a_gather_failed_to_start():
    """The next forward gathers across the groups again, and uses the parameters after the optimizer step."""
    model = chain(partial(fully_shard, strategy=HFSDP(group=2)))
    optimizer = sgd(model)
    model(inputs(dist.get_rank())).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with (
        mock.patch.object(Gather, "start", side_effect=MemoryError("no memory")),
        pytest.raises(MemoryError, match="no memory"),
    ):
        model(inputs(0))
    expected = chain(lambda module: module)
    expected.load_state_dict(wholes(model))
    assert_same(model(inputs(0)), expected(inputs(0)))


@pytest.mark.parametrize(("world", "group", "messages"), [(512, 8, 1), (512, 2, 1), (64, 4, FEW_OPERATIONS), (8, 4, 2)])
@on_ranks(1)
def test_messages_within_a_group_are_bounded_for_any_number_of_groups(world, group, messages):
    """There is one message per unsharded tensor, or one per group if groups are few. The bytes are the same."""
    in_fake_world(world)
    model = chain(partial(fully_shard, strategy=HFSDP(group=group)))
    with recording() as record:
        model(inputs()).square().mean().backward()
    layouts = [param_group.plan.layout for unit in units_in(model) for param_group in unit.param_groups]
    within = [event for event in record.collectives() if event.ranks == tuple(range(group))]
    assert {event.name for event in within} == {"all_gather", "reduce_scatter"}
    secondary = {layout.shard_numel * world // group * 4 for layout in layouts}
    assert {event.sent_bytes for event in within} == {nbytes * (group - 1) for nbytes in secondary}
    assert not any(layout.in_place for layout in layouts)  # so an unsharded unit is one tensor, the pack
    counts = [event.messages // (group - 1) for event in within]
    assert set(counts) == {messages}
