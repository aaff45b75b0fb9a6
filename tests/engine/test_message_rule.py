"""Parameters with separate messages: few if device queues run collectives, and no influence on results."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from shared_ranks import in_fake_world, on_ranks, run_ranks
from small_models import adamw, chain, inputs, momentum, shard, small_gpt, train
from torch import nn

from fullshard import Placement, Placements, fully_shard, recording
from fullshard.comm.mesh import Axes
from fullshard.engine import group_plan
from fullshard.engine.group_plan import message_rule
from fullshard.engine.pack import Unpacking
from fullshard.engine.registry import units_in
from fullshard.layout.group_layout import ON_A_QUEUE, PAIRWISE, MessageRule
from fullshard.plan.ledger import measure_ledger, predict_ledger
from fullshard.testing import assert_same

FEW = MessageRule(least_nbytes=1 << 12, most=1, always_from_nbytes=1 << 17, start_step_bytes=256)
GROUPED = Placements(
    parameters=Placement.SHARDED,
    parameters_in_step=Placement.GROUPED,
    gradients=Placement.GROUPED,
    optimizer=Placement.SHARDED,
    group=2,
)


@contextmanager
def on_a_queue(rule: MessageRule = FEW) -> Iterator[None]:
    """Lay out and unpack parameters in this context as on devices with queues."""
    with (
        mock.patch.object(group_plan, "message_rule", lambda axes: rule),
        mock.patch.object(Unpacking, "copy", Unpacking.copy_at_once),
    ):
        yield


def test_message_rule_depends_on_device_type_of_mesh():
    """The rule is therefore the same on all ranks, whichever devices hold their values."""
    rules = {kind: message_rule(Axes(SimpleNamespace(device_type=kind))) for kind in ("cpu", "cuda", "xpu")}
    assert rules == {"cpu": PAIRWISE, "cuda": ON_A_QUEUE, "xpu": ON_A_QUEUE}


@pytest.mark.parametrize(("world", "strategy"), [(2, "ddp"), (2, "zero1"), (3, "zero3"), (4, GROUPED)])
@on_ranks("world")
def test_message_rule_does_not_change_training_results(world, strategy):
    traces, in_place = [], []
    for context in (nullcontext(), on_a_queue()):
        with context:
            model = shard(small_gpt(2), strategy=strategy)
            layouts = [param_group.plan.layout for unit in units_in(model) for param_group in unit.param_groups]
            in_place.append([param_layout.in_place for layout in layouts for param_layout in layout.params])
            traces.append(train(model, momentum(model), steps=3).numbers)
    assert in_place[0] != in_place[1]
    assert any(in_place[1])
    assert_same(traces[1], traces[0])


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@on_ranks(2)
def test_predicted_ledger_matches_measured_ledger_on_device_queue(strategy):
    with on_a_queue():
        model = chain(partial(fully_shard, strategy=strategy))
        optimizer = adamw(model)
        for step in range(2):
            model(inputs(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        measured = measure_ledger(model, optimizer, lambda: model(inputs()).square().mean())
        assert measured == predict_ledger(model, activations=measured.activations)


@on_ranks(2)
def test_unsharded_parameters_are_aligned_to_256_bytes():
    module = nn.Module()
    for number, (size, dtype) in enumerate([(5, torch.float32), (7, torch.float64), (9, torch.float32)] * 2):
        module.register_parameter(f"p{number}", nn.Parameter(torch.zeros(size, dtype=dtype)))
    module.p5.requires_grad_(False)
    with on_a_queue():
        fully_shard(module).unshard()
    [unit] = units_in(module)
    assert len(unit.param_groups) == 3
    starts = [param.unsharded.storage_offset() * param.unsharded.itemsize for param in unit.params]
    assert len(set(starts)) == 6
    assert all(start % 256 == 0 for start in starts)


class Experts(nn.Module):
    """Many matrices of one size, and a larger one."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(64, 256, bias=False)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([expert(x) for expert in self.experts]).sum() + self.router(x).sum()


def step_of_experts(world: int, rule: MessageRule) -> dict[str, int]:
    """Return the most tensors per collective of each kind, in a unit of 100 experts before and after a cast."""
    in_fake_world(world)
    with on_a_queue(rule):
        model = fully_shard(Experts(100))
        with recording() as record:
            for dtype in (torch.float32, torch.float64):
                model.to(dtype)(torch.ones(2, 64, dtype=dtype)).backward()
                model.zero_grad()
    found: dict[str, int] = {}
    for event in record.collectives():
        found[event.name] = max(found.get(event.name, 0), event.messages // (world - 1))
    return found


@pytest.mark.parametrize("world", [2, 64])
@pytest.mark.parametrize(("most", "always_from_nbytes", "tensors"), [(3, 1 << 20, 4), (0, 1 << 16, 2), (3, 0, 102)])
def test_unit_with_many_experts_sends_number_of_messages_set_by_rule(world, most, always_from_nbytes, tensors):
    """`tensors` includes one message for the pack, whatever it contains."""
    rule = MessageRule(least_nbytes=1 << 12, most=most, always_from_nbytes=always_from_nbytes)
    assert run_ranks(1, step_of_experts, world, rule) == [{"all_gather": tensors, "reduce_scatter": tensors}]
