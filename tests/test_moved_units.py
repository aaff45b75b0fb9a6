"""Units whose modules are moved or cast between steps: they go on with the values, the wires and the past they have."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from shared_ranks import run_ranks
from small_models import chain, inputs
from torch import nn

from fullshard import MixedPrecisionPolicy, fully_shard, recording
from fullshard.engine.registry import units_in
from fullshard.tape.context import Kept, kept
from fullshard.testing import assert_same


def cast_between_wires(strategy: str, first: torch.dtype, then: torch.dtype, policy: MixedPrecisionPolicy) -> list[int]:
    """Bytes that this rank sends in a step after a cast, and in one of a model that was always of that dtype."""
    sent = []
    for dtypes in ((first, then), (then,)):
        model = chain(partial(fully_shard, strategy=strategy, mp_policy=policy)).to(dtypes[0])
        for dtype in dtypes:
            model.to(dtype)
            before = [param.to_local().clone() for param in model.parameters()]
            with recording() as record:
                model(inputs().to(dtype)).square().mean().backward()
            assert_same([param.to_local() for param in model.parameters()], before)  # only optimizers change shards
            model.zero_grad()
        sent.append(record.sent_bytes())
    return sent


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)], ids=str)
def test_a_cast_changes_what_is_encoded_as_the_policy_says(strategy, dtypes):
    """Float64 is never encoded; the layout alone does not tell which wires a parameter group needs."""
    policy = MixedPrecisionPolicy(gather_wire="int8", reduce_wire="int8")
    for cast, always in run_ranks(2, cast_between_wires, strategy, *dtypes, policy):
        assert cast == always > 0


def step_after_a_move() -> list[list[torch.Tensor]]:
    """Outputs after a step that no version tells of, with a move between backward and step, and without one."""
    left = []
    for moves in (True, False):
        model = chain(partial(fully_shard, strategy="zero1"))
        model(inputs()).square().mean().backward()
        if moves:
            model.to(torch.float64).to(torch.float32)
        with torch.no_grad():
            model(inputs())  # an evaluation has the parameters gathered
            for param in model.parameters():
                param.to_local().numpy()[...] *= 1.5  # as fused optimizers do: no version counts it
            left.append([model(inputs())])
    return left


def test_a_move_between_backward_and_step_hides_no_step():
    for moved, stayed in run_ranks(2, step_after_a_move):
        assert_same(moved, stayed)


def cast_what_one_rank_has_nothing_of() -> list[str]:
    model = fully_shard(nn.LayerNorm(1))
    model.to(torch.bfloat16)
    model(torch.ones(2, 1, dtype=torch.bfloat16)).sum().backward()
    return [str(param_group.plan.contract) for unit in units_in(model) for param_group in unit.param_groups]


def test_a_cast_reaches_ranks_that_have_no_rows():
    first, second = run_ranks(2, cast_what_one_rank_has_nothing_of)
    assert first == second == ["stored bfloat16, computed and gathered bfloat16, reduced bfloat16"]


def evaluate_after_a_cast() -> None:
    model = chain(fully_shard)
    model.layers[1].to(torch.float32)
    model(inputs()).sum().backward()
    for layer in model.layers:
        nn.Module._apply(layer, lambda tensor: tensor.clone())  # behind the unit's back
    with torch.inference_mode():
        model(inputs())
    model(inputs()).sum().backward()


def test_shards_that_are_found_moved_in_an_evaluation_can_be_trained():
    run_ranks(2, evaluate_after_a_cast)


def make_a_new_world() -> tuple[dict[str, int], dict[str, int]]:
    closed: list[str] = []
    mine = Kept[str, str]("test", closed.append)
    mine.get_or_make("a", lambda: "first")
    model = chain(fully_shard)
    model(inputs()).sum().backward()
    before = kept()
    store = dist.distributed_c10d._get_default_store()
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=world)
    assert mine.get_or_make("a", lambda: "second") == "second"
    assert closed == ["first"]
    after = kept()
    chain(fully_shard)(inputs()).sum().backward()
    return before, after


def test_what_is_kept_for_a_default_group_goes_with_it():
    for before, after in run_ranks(2, make_a_new_world):
        assert before["collectives of process groups"] >= 1
        assert before["default meshes"] == 1
        assert {what for what, count in after.items() if count} == {"test"}
