"""The operations of the observed step: each belongs to the module, unit and part of a step that called it."""

from __future__ import annotations

import random
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from shared_ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import fully_shard
from fullshard.report.reading import read_run

WIDTHS = [*range(5, 37, 2)]  # each used once, so the shape of a weight names its layer
MICROBATCHES = 2


class Tree(nn.Module):
    """Linear layers in nested containers. Some are checkpointed, some called twice."""

    def __init__(self, rng: random.Random, widths: list[int], depth: int = 2) -> None:
        super().__init__()
        self.way, self.is_inner = rng.choice([None, "reentrant", "not reentrant"]), depth < 2
        if depth and len(widths) > 2:
            cut = rng.randrange(1, len(widths) - 1)
            parts = widths[: cut + 1], widths[cut:]
            self.parts = nn.ModuleList(Tree(rng, part, depth - 1) for part in parts)
        else:
            self.parts = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        if self.way is None or not self.is_inner or not torch.is_grad_enabled():
            return self.run(x)
        result: Tensor = checkpoint(self.run, x, use_reentrant=self.way == "reentrant")
        return result

    def run(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x).tanh()
        return x


def observed(seed: int, folder: str) -> dict[str, tuple[int, ...]]:
    """Record a run, and return the shape of each layer's weight."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    widths = rng.sample(WIDTHS, 9)
    model = Tree(rng, widths)
    shapes = {
        name: tuple(module.weight.shape) for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    units = [module for module in model.modules() if isinstance(module, Tree) and rng.random() < 0.5]
    for unit in reversed([model, *(unit for unit in units if unit is not model)]):
        fully_shard(unit)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fullshard.report(model, folder):
        for _ in range(3):
            for _ in range(MICROBATCHES):
                model(torch.randn(3, widths[0], requires_grad=True)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return shapes


@pytest.mark.parametrize("seed", range(6))
def test_matmul_is_attributed_to_the_layer_that_owns_its_weight(seed: int, tmp_path: Path) -> None:
    shapes = run_ranks(1, partial(observed, seed), str(tmp_path))[0]
    run = read_run(tmp_path)
    units = {unit.fqn for unit in run.units}
    calls: dict[tuple[str, str], int] = {}
    for item in run.operations:
        if item.name not in ("addmm", "mm"):
            continue
        assert item.module, item
        out, given = shapes[item.module]
        assert f"[{given}, {out}]" in item.inputs or f"[{out}, {given}]" in item.inputs or f"[{out}, 3]" in item.inputs
        parents = [item.module[:end] for end, sign in enumerate(item.module + ".") if sign == "."]
        assert item.unit == max((parent for parent in parents if parent in units), key=len, default="")
        assert item.seconds > 0
        calls[item.module, item.part] = calls.get((item.module, item.part), 0) + item.calls
    for name in shapes:
        assert calls[name, "forward"] == MICROBATCHES
        assert calls[name, "backward"] == 2 * MICROBATCHES, "a product for the input, and one for the weight"
        assert calls.get((name, "forward again"), 0) in (0, MICROBATCHES, 2 * MICROBATCHES)
    assert any(item.part == "optimizer" for item in run.operations)


def test_largest_activations_are_listed_by_operation_and_shape(tmp_path: Path) -> None:
    run_ranks(1, wide, str(tmp_path))
    memory = read_run(tmp_path).memory
    assert memory is not None
    largest: list[Any] = [item for item in memory.largest if item.state == "activations"]
    assert [item.what for item in largest[:2]] == [
        "forward: addmm in 0, float32 [64, 512]",
        "forward: gelu in 1, float32 [64, 512]",
    ]
    assert {item.nbytes for item in largest[:2]} == {64 * 512 * 4}


def wide(folder: str) -> None:
    """Record a run of a model with two large activations."""
    model = fully_shard(nn.Sequential(nn.Linear(4, 512), nn.GELU(), nn.Linear(512, 2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fullshard.report(model, folder):
        for _ in range(3):
            model(torch.randn(64, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
