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
from fullshard.engine.param_group import Section
from fullshard.engine.runtime import turns_in


def section_of(shapes: list[tuple[int, ...]], dims: list[int | None]) -> Section:
    """The one section of a unit of such parameters, cut along such dims or as the library chooses."""
    module = nn.Module()
    for number, shape in enumerate(shapes):
        module.register_parameter(f"p{number}", nn.Parameter(torch.zeros(shape)))
    chosen = dict(zip(module.parameters(), dims, strict=True))

    def placement(param: nn.Parameter) -> Shard | None:
        return None if chosen[param] is None else Shard(chosen[param])

    fully_shard(module, shard_placement_fn=placement)
    [turn] = turns_in(module)
    [section] = turn.unit.sections
    return section


def expected_wire(section: Section, grads: dict[int, Tensor]) -> Tensor:
    """A row a rank: zeros, and each part that the rank owns."""
    layout = section.layout
    wire = torch.zeros(layout.world, layout.pack_numel)
    for i in layout.packed:
        if i not in grads:
            continue
        place, cut = layout.places[i], layout.places[i].cut
        start = place.shard_offset - layout.pack_offset
        for rank in range(layout.world):
            span = cut.span(rank)
            part = grads[i] if cut.dim is None else grads[i].narrow(cut.dim, span.start, len(span))
            wire[rank, start : start + part.numel()] = part.reshape(-1)
    return wire


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
        section = section_of(shapes, dims)
        grads = {i: torch.randn(shape) for i, shape in enumerate(shapes) if draw.random() < 0.8}
        wire = torch.full((world, section.layout.pack_numel), torch.nan)
        section.pack(wire, grads)
        torch.testing.assert_close(wire, expected_wire(section, grads), rtol=0, atol=0)
        seen.update(f"dim {section.layout.places[i].cut.dim}" for i in section.layout.packed)
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
    section = section_of([(16, 16), (16,)] * (count // 2), [None] * count)
    grads = {i: torch.ones(place.cut.shape) for i, place in enumerate(section.layout.places)}
    wire = torch.empty(8, section.layout.pack_numel)
    section.pack(wire, grads)
    with Noting() as noting:
        section.pack(wire, grads)
    return noting.names


@pytest.mark.parametrize("count", [2, 40])
def test_packing_is_one_operation_however_many_parameters_there_are(count):
    assert run_ranks(1, operations_of_packing, count) == [["aten._chunk_cat"]]
