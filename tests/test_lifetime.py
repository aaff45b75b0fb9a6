"""A sharded model can be moved, copied in place and dropped like any other."""

import gc
import weakref
from dataclasses import dataclass
from itertools import permutations

import pytest
import torch
from torch import Tensor, nn

from fullshard import ConfigError, StateError, fully_shard
from fullshard.device.memory import Slot
from fullshard.engine.registry import units_in
from fullshard.testing import assert_same, run_ranks


def sharded(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8))
    model[0].weight.mark = "mine"
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def step(model: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    loss = model(torch.ones(2, 8, dtype=dtype)).sum()
    loss.backward()
    return loss.detach()


def forget_a_model() -> bool:
    model = sharded()
    for _ in range(3):
        step(model)
    gone = weakref.ref(model)
    del model
    for _ in range(3):  # tensors may need more than one round
        gc.collect()
    return gone() is None


def test_a_model_that_is_dropped_is_freed():
    assert run_ranks(2, forget_a_model) == [True, True]


@dataclass
class Answer:
    """An output that is not a tensor, as those of the transformers library."""

    scores: Tensor


class Answering(nn.Linear):
    def forward(self, question: Answer) -> Answer:
        return Answer(super().forward(question.scores))


def forget_what_went_through() -> None:
    gc.disable()
    model = fully_shard(nn.Sequential(fully_shard(Answering(8, 8)), fully_shard(Answering(8, 8))))
    for _ in range(3):
        question = Answer(torch.ones(2, 8, requires_grad=True) * 1)
        answer = model(question)
        answer.scores.sum().backward()
        gone = [weakref.ref(question.scores), weakref.ref(answer.scores)]
        del question, answer
        assert [ref() for ref in gone] == [None, None]


def test_what_goes_through_a_model_is_freed_without_the_garbage_collector():
    """Else activations would pile up until it comes by, and peak memory would be a matter of chance."""
    run_ranks(2, forget_what_went_through)


def change_dtype() -> tuple[bool, Tensor, Tensor]:
    model = sharded()
    step(model)
    model.zero_grad()
    weight = model[0].weight
    model.to(torch.float64)
    kept = model[0].weight is weight and weight.mark == "mine"
    return kept, step(model, torch.float64), model[0].weight.grad.full_tensor()


def change_dtype_plain() -> tuple[bool, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)).to(torch.float64)
    return True, step(model, torch.float64), model[0].weight.grad


def test_a_model_changes_dtype_after_a_step():
    """Parameters stay the same objects, with the marks that users left on them before."""
    [expected] = run_ranks(1, change_dtype_plain)
    for actual in run_ranks(2, change_dtype):
        assert_same(actual, expected)


def materialise() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    values = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)).state_dict()
    model = sharded("meta").to_empty(device="cpu")
    model.load_state_dict(values)
    return step(model), step(sharded())


def test_a_model_sharded_on_the_meta_device_is_materialised_later():
    for loaded, built in run_ranks(2, materialise):
        assert_same(loaded, built)


def shard_half_on_meta() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    with pytest.raises(ConfigError, match=r"1.weight is on the meta device, but 0.weight, in the same unit, is not"):
        fully_shard(model)


def test_a_unit_is_on_the_meta_device_as_a_whole():
    run_ranks(1, shard_half_on_meta)


def leave_shared_memory() -> None:
    model = nn.Sequential(*(fully_shard(nn.Linear(64, 64)) for _ in range(6)))
    fully_shard(model)
    for _ in range(3):
        model(torch.ones(2, 64)).sum().backward()
    units = {unit.name: unit for unit in units_in(model)}
    leaver, stayer = next(
        (a, b)
        for a, b in permutations(units.values(), 2)
        if a.slot is b.slot and a.unsharded_nbytes and b.unsharded_nbytes
    )
    leaver.move(Slot(torch.device("cpu")))
    assert not stayer.slot.is_referenced
    waiting = stayer.module(torch.ones(2, 64, requires_grad=True))
    assert stayer.slot.is_referenced
    with pytest.raises(StateError, match="a graph that waits for its backward has views of it"):
        stayer.move(Slot(torch.device("cpu")))
    waiting.sum().backward()
    assert not stayer.slot.is_referenced


def test_a_unit_that_leaves_shared_memory_hides_no_graph_that_waits():
    run_ranks(2, leave_shared_memory)
