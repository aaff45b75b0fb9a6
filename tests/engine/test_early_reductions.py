"""Gradients of large parameters that arrive before those of the nested units are reduced before them."""

import pytest
import torch
import torch.distributed as dist
from shared_ranks import run_ranks
from small_models import inputs, sgd, wholes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import NonFiniteError, check_finite_gradients, dry, fully_shard
from fullshard.engine import unit_plans
from fullshard.engine.registry import units_in
from fullshard.tape.recorder import Phase
from fullshard.tape.tape import Allocation, Collective, Entry, Free
from fullshard.testing import assert_same

WIDTH = 48  # of `inputs`
WORLD = 8
LARGE = unit_plans.SEPARATE_NBYTES


class Language(nn.Module):
    """A first layer, blocks, and a head. All of them are linear."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 2 * width)

    def forward(self, x: Tensor, *, uses_head: bool = True) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x)) if uses_head else x


def sharded(separate_nbytes: int, width: int = WIDTH, **options: object) -> Language:
    """Return a `Language` with separate groups for parameters of at least `separate_nbytes`."""
    torch.manual_seed(0)
    model = Language(width)
    unit_plans.SEPARATE_NBYTES = separate_nbytes
    try:
        for module in (*model.blocks, model):
            fully_shard(module, **options)
    finally:
        unit_plans.SEPARATE_NBYTES = LARGE
    return model


def steps_of(separate_nbytes: int, width: int = WIDTH) -> tuple[list[Entry], int]:
    """Return the entries of three steps, and where the third begins."""
    with dry.world(WORLD):
        mesh = init_device_mesh("cpu", (WORLD,))
        with dry.taped() as tape:
            model = sharded(separate_nbytes, width, mesh=mesh)
            for _ in range(3):
                begun = len(tape.entries)
                model(torch.zeros(4, width)).square().mean().backward()
                model.zero_grad()
    assert not dry.races(tape)
    return tape.entries, begun


def collectives(separate_nbytes: int, name: str) -> list[Collective]:
    """Return those of the third step with `name` in their names."""
    entries, begun = steps_of(separate_nbytes)
    return [entry for entry in entries[begun:] if isinstance(entry, Collective) and name in entry.name]


def test_a_head_is_reduced_before_the_blocks():
    early, late = (
        [(item.origin.unit, sum(item.sizes)) for item in collectives(nbytes, "reduce")] for nbytes in (1, LARGE)
    )
    assert [unit for unit, _ in late] == ["blocks.2", "blocks.1", "blocks.0", ""]
    assert early[1:-1] == late[:-1], "the blocks do not change"
    assert early[0][0] == early[-1][0] == "", "the root's first and last"
    assert early[0][1] + early[-1][1] == pytest.approx(late[-1][1], abs=8 * WORLD * 4), "the same bytes, but padding"
    assert early[0][1] > early[-1][1], "the head is larger than the first layer"


def test_gathers_of_groups_stay_one_collective():
    early, late = (collectives(nbytes, "gather") for nbytes in (1, LARGE))
    assert [item.origin for item in early] == [item.origin for item in late]


def test_memory_of_the_heads_gradient_is_freed_during_the_backward():
    """Only the shards of it are left when the backward of the first block begins."""
    width = 256

    def held(separate_nbytes: int) -> int:
        entries, begun = steps_of(separate_nbytes, width)
        live = dict[int, int]()
        for place, entry in enumerate(entries):
            if isinstance(entry, Allocation):
                live[entry.storage] = entry.nbytes
            elif isinstance(entry, Free):
                live.pop(entry.storage, None)
            origin = entry.origin
            if place > begun and (origin.unit, origin.phase) == ("blocks.0", Phase.BACKWARD):
                return sum(live.values())
        raise AssertionError("there is no such backward")

    head = 4 * (2 * width * width + 2 * width + 2 * width)  # weight, bias and norm
    assert held(LARGE) - held(1) == pytest.approx(head * (WORLD - 1) / WORLD, rel=0.01)


@pytest.mark.parametrize("nbytes", [0, 4 * (WIDTH * WIDTH + WIDTH), 4 * (WIDTH * WIDTH + WIDTH) + 1])
def test_groups_are_separate_if_both_are_large(nbytes):
    """The first layer is the smaller one."""
    with dry.world(WORLD):
        groups = units_in(sharded(nbytes, mesh=init_device_mesh("cpu", (WORLD,))))[0].param_groups
    names = [[param.fqn.split(".")[0] for param in group.params] for group in groups]
    together = ["first", "first", "norm", "norm", "head", "head"]
    assert names == ([together] if nbytes > 4 * (WIDTH * WIDTH + WIDTH) else [together[:2], together[2:]])


def trained(separate_nbytes: int, strategy: str) -> dict[str, Tensor]:
    """Train with accumulation with and without `no_sync`, a frozen head, and a head that is not used."""
    model = sharded(separate_nbytes, strategy=strategy)
    optimizer = sgd(model)
    for step in range(6):
        model.head.requires_grad_(step != 3)
        with model.no_sync():
            model(inputs(step)).square().mean().backward()
        for microbatch in range(2):
            batch = inputs(10 * step + microbatch) * (1 + dist.get_rank())
            model(batch, uses_head=step != 4).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return wholes(model)


def train_both_ways(strategy: str) -> None:
    assert_same(trained(1, strategy), trained(LARGE, strategy))


@pytest.mark.parametrize("strategy", ["zero3", "zero1", "ddp"])
def test_values_do_not_depend_on_it(strategy):
    run_ranks(2, train_both_ways, strategy)


def spoilt() -> str:
    """Return the message about a NaN in the gradient of the head on rank 1."""
    model = sharded(1)
    check_finite_gradients(True)
    try:
        output = model(inputs(0))
        with pytest.raises(NonFiniteError) as caught:
            (output * (float("nan") if dist.get_rank() == 1 else 1.0)).mean().backward()
    finally:
        check_finite_gradients(False)
    return str(caught.value)


def test_a_value_that_is_not_finite_is_reported_once():
    (message, other) = run_ranks(2, spoilt)
    assert message == other
    assert message.count("head.weight") == message.count("head.bias") == 1
