"""Gradients of small parameters are copied into the pack once, at the layout's offsets, by one operation."""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from logged import Operations
from shared_ranks import in_fake_world, on_ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fullshard import fully_shard
from fullshard.device.accelerator import pretending, pretending_to_capture
from fullshard.dry import Tape
from fullshard.dry.streams import DryAccelerator
from fullshard.engine.pack import Pack, Unpacking
from fullshard.engine.registry import units_in
from fullshard.layout.group_layout import GroupLayout


def pack_of(shapes: list[tuple[int, ...]], dims: list[int | None]) -> tuple[Pack, GroupLayout]:
    """Return the pack of a unit of such parameters, cut along such dims or as the library chooses, and their layout."""
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
    """Return one row per rank: zeros, and each chunk that the rank owns."""
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


def check_unpacking(pack: Pack, layout: GroupLayout, shapes: list[tuple[int, ...]]) -> None:
    """Check that either way of unpacking fills all packed parameters and writes to no others."""
    values = [torch.randn(shape) for shape in shapes]
    message = torch.empty(layout.world, layout.pack_numel)
    pack.write(message, dict(enumerate(values)))
    for copies in (Unpacking.copy, Unpacking.copy_at_once):
        wholes = [torch.full(shape, torch.nan) for shape in shapes]
        copies(pack.unpacking(wholes, message))
        for i, (whole, value) in enumerate(zip(wholes, values, strict=True)):
            expected = torch.full_like(value, torch.nan) if layout.params[i].in_place else value
            torch.testing.assert_close(whole, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@on_ranks(1)
def test_pack_follows_layout_pads_with_zeros_and_unpacks(world):
    """For any shapes, any sharded dims, and any missing gradients."""
    cases = 40
    in_fake_world(world)
    draw = random.Random(world)
    visited = Counter[str]()
    for _ in range(cases):
        shapes = [tuple(draw.choice([1, 2, 3, 7, 16]) for _ in range(draw.randint(0, 3))) for _ in range(6)]
        dims = [draw.choice([None, draw.randrange(len(shape))]) if shape else None for shape in shapes]
        pack, layout = pack_of(shapes, dims)
        grads = {i: torch.randn(shape) for i, shape in enumerate(shapes) if draw.random() < 0.8}
        message = torch.empty(world, layout.pack_numel)
        expected = expected_message(layout, grads)
        for context in (nullcontext, pretending_to_capture):
            with context():
                pack.write(message.fill_(torch.nan), grads)
            torch.testing.assert_close(message, expected, rtol=0, atol=0)
        check_unpacking(pack, layout, shapes)
        visited.update(f"dim {layout.params[i].spec.dim}" for i in layout.packed)
    assert {"dim None", "dim 0", "dim 1", "dim 2"} <= visited.keys()


COPIES = ("_chunk_cat", "split_with_sizes_copy", "_foreach_copy_", "copy_", "clone", "cat")
KERNELS = {f"aten.{name}" for name in (*COPIES, "zero_", "zeros", "new_zeros")}


def kernels(run: Callable[[], None], captures: bool) -> list[str]:
    with Operations() as noting, pretending_to_capture() if captures else nullcontext():
        run()
    return [name for name in noting.names if name in KERNELS]


def kernels_of_packing(count: int, captures: bool) -> list[str]:
    in_fake_world(8)
    pack, layout = pack_of([(16, 16), (16,)] * (count // 2), [None] * count)
    grads = {i: torch.ones(param_layout.spec.shape) for i, param_layout in enumerate(layout.params)}
    message = torch.empty(8, layout.pack_numel)
    pack.write(message, grads)  # makes what it keeps
    return kernels(lambda: pack.write(message, grads), captures)


@pytest.mark.parametrize("count", [2, 40])
def test_packing_launches_one_copy_kernel_for_any_number_of_parameters(count):
    """In a CUDA graph, packing uses an operation that reads no addresses from memory."""
    assert run_ranks(1, kernels_of_packing, count, False) == [["aten._chunk_cat"]]
    assert run_ranks(1, kernels_of_packing, count, True) == [["aten.zero_", "aten._foreach_copy_"]]


EVEN_AND_ODD: list[tuple[int, ...]] = [(16, 16), (13,), (), (8, 3)]  # two divide by 8, and two do not


def kernels_of_unpacking(shapes: list[tuple[int, ...]], captures: bool = False) -> list[str]:
    """Return the kernels that unpack parameters on an accelerator."""
    in_fake_world(8)
    pack, layout = pack_of(shapes, [None] * len(shapes))
    wholes = [torch.empty(shape) for shape in shapes]
    with pretending(DryAccelerator(Tape())):
        unpacking = pack.unpacking(wholes, torch.empty(8, layout.pack_numel))
        return kernels(unpacking.copy, captures)


@pytest.mark.parametrize("times", [1, 10])
def test_unpacking_launches_at_most_two_kernels_for_any_parameter_count(times):
    """The second one is for parameters that do not divide evenly. CUDA graphs and small packs use different ones."""
    split, each, shapes = "aten.split_with_sizes_copy", "aten._foreach_copy_", EVEN_AND_ODD * times
    assert run_ranks(1, kernels_of_unpacking, shapes[:1] * 3 * times) == [[split]]
    assert run_ranks(1, kernels_of_unpacking, shapes) == [[split, each]]
    assert run_ranks(1, kernels_of_unpacking, shapes, True) == [[each]]
    assert run_ranks(1, kernels_of_unpacking, shapes[:1] * 2) == [[each]]
