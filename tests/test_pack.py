"""Gradients of small parameters on their way into the pack: each once, where the layout says, by one operation."""

import random
from collections import Counter
from typing import Any

import pytest
import torch
from shared_ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard import fully_shard
from fullshard.engine.pack import Pack
from fullshard.engine.registry import units_in
from fullshard.layout.group_layout import GroupLayout


def pack_of(shapes: list[tuple[int, ...]], dims: list[int | None]) -> tuple[Pack, GroupLayout]:
    """The pack of a unit of such parameters, cut along such dims or as the library chooses, and their layout."""
    module = nn.Module()
    for number, shape in enumerate(shapes):
        module.register_parameter(f"p{number}", nn.Parameter(torch.zeros(shape)))
    chosen = dict(zip(module.parameters(), dims, strict=True))

    def placement(param: nn.Parameter) -> Shard | None:
        return None if chosen[param] is None else Shard(chosen[param])

    fully_shard(module, shard_placement_fn=placement)
    [unit] = units_in(module)
    [param_group] = unit.param_groups
    return Pack(param_group.plan.layout, param_group.plan.rank), param_group.plan.layout


def expected_message(layout: GroupLayout, grads: dict[int, Tensor]) -> Tensor:
    """A row a rank: zeros, and each part that the rank owns."""
    message = torch.zeros(layout.world, layout.pack_numel)
    for i in layout.packed:
        if i not in grads:
            continue
        param_layout, spec = layout.params[i], layout.params[i].spec
        start = param_layout.shard_offset - layout.pack_offset
        for rank in range(layout.world):
            span = spec.span(rank)
            part = grads[i] if spec.dim is None else grads[i].narrow(spec.dim, span.start, len(span))
            message[rank, start : start + part.numel()] = part.reshape(-1)
    return message


def in_a_world(world: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("fake", rank=0, world_size=world, store=FakeStore())


def pack_all_kinds(world: int, cases: int) -> None:
    in_a_world(world)
    draw = random.Random(world)
    seen = Counter[str]()
    for _ in range(cases):
        shapes = [tuple(draw.choice([1, 2, 3, 7, 16]) for _ in range(draw.randint(0, 3))) for _ in range(6)]
        dims = [draw.choice([None, draw.randrange(len(shape))]) if shape else None for shape in shapes]
        pack, layout = pack_of(shapes, dims)
        grads = {i: torch.randn(shape) for i, shape in enumerate(shapes) if draw.random() < 0.8}
        message = torch.full((world, layout.pack_numel), torch.nan)
        pack.write(message, grads)
        torch.testing.assert_close(message, expected_message(layout, grads), rtol=0, atol=0)
        seen.update(f"dim {layout.params[i].spec.dim}" for i in layout.packed)
    assert {"dim None", "dim 0", "dim 1", "dim 2"} <= seen.keys()


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_every_part_lies_where_the_layout_says_and_all_else_is_zero(world):
    """Whatever the shapes, the dims they are cut along, and the gradients that are missing."""
    run_ranks(1, pack_all_kinds, world, 40)


class Noting(TorchDispatchMode):
    """Names of the operations that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


def operations_of_packing(count: int) -> list[str]:
    in_a_world(8)
    pack, layout = pack_of([(16, 16), (16,)] * (count // 2), [None] * count)
    grads = {i: torch.ones(param_layout.spec.shape) for i, param_layout in enumerate(layout.params)}
    message = torch.empty(8, layout.pack_numel)
    pack.write(message, grads)
    with Noting() as noting:
        pack.write(message, grads)
    return noting.names


@pytest.mark.parametrize("count", [2, 40])
def test_packing_is_one_operation_however_many_parameters_there_are(count):
    assert run_ranks(1, operations_of_packing, count) == [["aten._chunk_cat"]]
