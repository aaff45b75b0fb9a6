"""States sharded within groups of neighboring ranks: equal results, and less communication between groups."""

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from shared_ranks import on_ranks
from small_models import Chain, chain, initialize, inputs, sgd, take_step, whole_grads, wholes
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from fullshard import ConfigError, Placement, Placements, fully_shard, recording
from fullshard.comm.mesh import subgroup
from fullshard.engine.registry import units_in
from fullshard.plan.ledger import measure_ledger, predict_ledger
from fullshard.testing import assert_same

W, G, S = Placement.WHOLE, Placement.GROUPED, Placement.SHARDED


def grouped(parameters: Placement, in_step: Placement, gradients: Placement, group: int = 2) -> Placements:
    return Placements(parameters=parameters, parameters_in_step=in_step, gradients=gradients, optimizer=S, group=group)


WITHIN_STEP = grouped(S, G, S)  # what ZeRO++ calls hpZ
BETWEEN_STEPS = grouped(G, G, S)
ALL_BUT_OPTIMIZER = grouped(G, G, G)  # what Megatron-FSDP calls HFSDP
GRADIENTS_ONLY = grouped(S, S, G)
WHOLE_IN_STEP = grouped(G, W, S)


def batch(step: int) -> torch.Tensor:
    return inputs(step * 7 + torch.distributed.get_rank())


def learn(shard: Any, *, accumulate: int = 1, synced: bool = False, steps: int = 4) -> list[Any]:
    model = chain(shard)
    optimizer, left = sgd(model), []
    for step in range(steps):
        for i in range(accumulate):
            if accumulate > 1:
                model.set_requires_gradient_sync(synced or i == accumulate - 1)
            loss = model(batch(step * accumulate + i)).square().mean() / accumulate
            loss.backward()
            left.append(loss.detach())
        left.append(whole_grads(model))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            left.append(model(batch(99)))
    return [*left, wholes(model)]


@pytest.mark.slow
@on_ranks(4)
def test_grouped_parameters_match_zero3_bitwise():
    expected = learn(fully_shard)
    for placements in (WITHIN_STEP, BETWEEN_STEPS, WHOLE_IN_STEP):
        assert_same(learn(partial(fully_shard, strategy=placements)), expected, name=str(placements))
    for count in (1, 2, 4):
        assert_same(learn(partial(fully_shard, reshard_after_forward=count)), expected, name=f"to {count} ranks")


@pytest.mark.slow
@on_ranks(4)
def test_grouped_gradients_match_hybrid_sharding_bitwise():
    """Gradients are summed within groups of two, then across, as in hybrid sharding on a mesh of the same groups."""
    accumulate = 3
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    hybrid = partial(fully_shard, strategy="hsdp", mesh=mesh)
    for placements in (ALL_BUT_OPTIMIZER, GRADIENTS_ONLY):
        shard = partial(fully_shard, strategy=placements)
        assert_same(learn(shard), learn(hybrid), name=str(placements))
        assert_same(
            learn(shard, accumulate=accumulate, synced=True),
            learn(hybrid, accumulate=accumulate, synced=True),
            name=str(placements),
        )


@on_ranks(4)
def test_microbatches_without_sync_accumulate_sums_of_group():
    """Hybrid sharding does the same if it reduces only over the shard dimension in microbatches without sync."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def learn_with(shard: Any, switch: str) -> list[Any]:
        model = chain(shard)
        left = []
        for step in range(2):
            for i in range(3):
                getattr(model, switch)(i == 2)
                model(batch(step * 3 + i)).square().mean().backward()
            left.append(whole_grads(model))
            model.zero_grad()
        return left

    hybrid = learn_with(partial(fully_shard, strategy="hsdp", mesh=mesh), "set_requires_all_reduce")
    grouped = learn_with(partial(fully_shard, strategy=ALL_BUT_OPTIMIZER), "set_requires_gradient_sync")
    assert_same(grouped, hybrid)


@on_ranks(3)
def test_subgroup_is_not_split_from_default_process_group():
    """NCCL splits a communicator only if all its ranks call it, and ranks outside of the new group never do.

    Two of three ranks create a group while the default group is bound to a device, as `init_process_group` does.
    """
    world, device = torch.distributed.group.WORLD, torch.device("cuda", 0)
    world.bound_device_id = device
    sources = []
    split_source = distributed_c10d._get_split_source

    def source(parent: Any) -> Any:
        sources.append(parent)
        return split_source(parent)

    with patch.object(distributed_c10d, "_get_split_source", source):
        group = subgroup([0, 2]) if torch.distributed.get_rank() in (0, 2) else None
    assert sources == []
    assert world.bound_device_id == device
    world.bound_device_id = None
    if group is not None:
        assert group.bound_device_id is None
        total = torch.ones(1)
        torch.distributed.all_reduce(total, group=group)
        assert total == 2


@pytest.mark.parametrize(
    ("placements", "gathers", "reductions"),
    [(WITHIN_STEP, 3, 0), (BETWEEN_STEPS, 1, 0), (ALL_BUT_OPTIMIZER, 1, 1), (WHOLE_IN_STEP, 1, 0)],
)
@on_ranks(4)
def test_traffic_between_groups_is_expected_multiple_of_shards(placements, gathers, reductions):
    """Traffic is counted in multiples of a rank's shards, sent once to its counterpart in the other group."""
    model = chain(partial(fully_shard, strategy=placements))
    optimizer = sgd(model)
    for _ in range(3):
        with recording() as record:
            for i in range(3):
                model.set_requires_gradient_sync(i == 2)
                model(batch(i)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    rank = torch.distributed.get_rank()
    across = [event for event in record.collectives() if event.ranks == (rank % 2, rank % 2 + 2)]
    sections = [section for unit in units_in(model) for section in unit.param_groups]
    shards = sum(section.plan.layout.shard_numel for section in sections) * 4
    sent = {name: sum(event.sent_bytes for event in across if event.name == name) for name in record.names()}
    assert sent.get("all_gather", 0) // shards == gathers
    assert round(sent.get("reduce_scatter", 0) / shards) == reductions


@pytest.mark.parametrize("placements", [WITHIN_STEP, BETWEEN_STEPS, ALL_BUT_OPTIMIZER, WHOLE_IN_STEP])
@on_ranks(4)
def test_predicted_ledger_matches_measured_ledger_with_groups(placements):
    model = chain(partial(fully_shard, strategy=placements))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        take_step(optimizer, model(batch(step)).square().mean())
    measured = measure_ledger(model, optimizer, lambda: model(batch(0)).square().mean())
    predicted = predict_ledger(model, activations=measured.activations)
    assert measured == predicted
    assert predict_ledger(chain(fully_shard), strategy=placements, activations=measured.activations) == predicted


@on_ranks(4)
def test_invalid_group_options_are_rejected():
    model = Chain()
    initialize(model)
    for options, stated in [
        ({"reshard_after_forward": 3}, "groups of 3 ranks do not divide the shard axis of 4 ranks"),
        ({"reshard_after_forward": 0}, "reshard_after_forward=0"),
        ({"reshard_after_forward": "host"}, "reshard_after_forward='host'"),
        ({"reshard_after_forward": 2, "strategy": "zero1"}, "parameters are whole between steps"),
        ({"strategy": grouped(G, G, G), "mesh": init_device_mesh("cpu", (1, 4))}, "gradients are grouped"),
    ]:
        with recording() as record, pytest.raises(ConfigError, match=stated):
            fully_shard(model, **options)
        assert not record.collectives()
