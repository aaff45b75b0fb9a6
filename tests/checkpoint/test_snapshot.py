"""Snapshots of one rank: taking a snapshot has no side effects, and a restored run continues bitwise equal."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_new_ranks
from small_models import adamw, batch, loss_of, my_part, shard, small_gpt, wholes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import StepLR

from fullshard import CheckpointError, recording
from fullshard.checkpoint import restore_snapshot, snapshot
from fullshard.testing import assert_same

STRATEGIES = ("ddp", "zero1", "zero3", "hsdp")


def begun(strategy: str) -> dict[str, Any]:
    options: dict[str, Any] = {"strategy": strategy}
    if strategy == "hsdp":
        options["mesh"] = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    gpt = small_gpt()
    gpt.outside = nn.BatchNorm1d(3)  # buffers
    model = shard(gpt, **options)
    optimizer = adamw(model)
    return {"model": model, "optimizer": optimizer, "scheduler": StepLR(optimizer, 2, gamma=0.5)}


def step(run: dict[str, Any], number: int, taking: bool = False) -> None:
    loss = loss_of(run["model"], my_part(batch(number)))
    if taking and dist.get_rank() == 0:  # on one rank only, in the middle of a step
        snapshot(**run)
    loss.backward()
    if taking and dist.get_rank() == 1:
        snapshot(**run)
    run["optimizer"].step()
    run["optimizer"].zero_grad()
    run["scheduler"].step()


def state_of(run: dict[str, Any]) -> list[Any]:
    return [wholes(run["model"]), run["optimizer"].state_dict()["param_groups"][0]["lr"]]


@pytest.mark.slow
@on_new_ranks(2)
def test_restored_snapshot_continues_bitwise_equal_to_undisturbed_run():
    for strategy in STRATEGIES:
        left_alone = begun(strategy)
        for number in range(6):
            step(left_alone, number)
        run = begun(strategy)
        at_start = snapshot(**run, extra={"at": 0})
        for number in range(3):
            step(run, number, taking=True)
        with recording() as record:
            taken = snapshot(**run, extra={"at": 3})
        assert record.events == []
        addresses = [param.to_local().data_ptr() for param in run["model"].parameters()]
        for number in range(3, 6):
            step(run, number)
        assert_same(state_of(run), state_of(left_alone))

        assert restore_snapshot(taken, **run) == {"at": 3}  # in place
        assert [param.to_local().data_ptr() for param in run["model"].parameters()] == addresses
        new = begun(strategy)  # in a process that has taken no step
        assert restore_snapshot(pickle.loads(pickle.dumps(taken)), **new) == {"at": 3}
        for item in (run, new):
            for number in range(3, 6):
                step(item, number)
            assert_same(state_of(item), state_of(left_alone))

        restore_snapshot(at_start, **run)  # from before the optimizer had any state
        for number in range(6):
            step(run, number)
        assert_same(state_of(run), state_of(left_alone))


@on_new_ranks(2)
def test_restore_snapshot_rejects_mismatches_by_name():
    run = begun("zero3")
    step(run, 0)
    taken = snapshot(model=run["model"])
    before = wholes(run["model"])
    with pytest.raises(CheckpointError, match=r"the snapshot does not fit; it has no optimizer, scheduler"):
        restore_snapshot(taken, **run)
    other = begun("ddp")
    with pytest.raises(CheckpointError, match=r"of a different shape: .* Nothing was overwritten"):
        restore_snapshot(taken, model=other["model"])
    del taken["model"]["scale"]
    with pytest.raises(CheckpointError, match="missing in it: scale"):
        restore_snapshot(taken, model=run["model"])
    assert_same(wholes(run["model"]), before)


def test_restored_values_are_independent_of_the_snapshot():
    class Kept:
        def __init__(self) -> None:
            self.state: dict[str, Any] = {"losses": [1.0]}

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    model, kept = nn.Linear(2, 2), Kept()
    taken = snapshot(model=model, scheduler=kept, extra={"seen": [1]})
    for _ in range(2):
        extra = restore_snapshot(taken, model=model, scheduler=kept)
        assert (extra, kept.state) == ({"seen": [1]}, {"losses": [1.0]})
        extra["seen"].append(2)
        kept.state["losses"].append(2.0)


def test_restore_snapshot_rejects_state_of_another_optimizer():
    model = nn.Linear(2, 2)
    optimizer = adamw(model)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    taken = snapshot(model=model, optimizer=optimizer)
    with torch.no_grad():
        model.weight.zero_()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match="state of another optimizer: saved by AdamW, loaded into SGD"):
        restore_snapshot(taken, model=model, optimizer=other)
    assert not model.weight.any()
    assert other.param_groups[0]["lr"] == 0.1
    restore_snapshot(taken, model=model, optimizer=optimizer)
    assert model.weight.any()
    del taken["optimizer"]["kinds"]  # as in a snapshot of an earlier version
    restore_snapshot(taken, model=model, optimizer=optimizer)
