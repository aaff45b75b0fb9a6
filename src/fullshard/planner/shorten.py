"""A model of fewer blocks, from which the whole one is told: blocks that are alike cost alike.

The peak of memory and the time of a step are linear in the number of like blocks, once there are a few of them: so two
short models tell of the long one. Peaks are told region by region (a block near either end, and a phase): which region
has the peak may change with the number of blocks, and what a region needs does not bend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["LEAST", "BlockList", "block_lists", "shortened"]

LEAST = 6
"""Blocks that a list has at least, to be shortened: shorter ones are run as they are."""


@dataclass(frozen=True)
class BlockList:
    """A list of like blocks in a model, by its FQN."""

    fqn: str
    length: int


def block_lists(model: nn.Module) -> list[BlockList]:
    """The lists of `LEAST` like blocks or more, those within others left out."""
    found: list[BlockList] = []
    for fqn, module in model.named_modules():
        if any(fqn.startswith(f"{outer.fqn}.") for outer in found):
            continue
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) >= LEAST:
            first, *others = (_signature(child) for child in module)
            if first[1] and all(other == first for other in others):
                found.append(BlockList(fqn, len(module)))
    return found


def shortened(model: nn.Module, lengths: dict[str, int]) -> Sequence[tuple[nn.ModuleList, list[nn.Module]]]:
    """Cut the lists of `model`, in place, to `lengths` by FQN. What comes back puts the blocks there again."""
    undo = []
    for fqn, length in lengths.items():
        blocks: Any = model.get_submodule(fqn)
        undo.append((blocks, list(blocks)[length:]))
        del blocks[length:]
    return undo


def _signature(block: nn.Module) -> tuple[Any, ...]:
    """What must be equal in blocks that cost the same: classes, shapes, dtypes, and switches among their attributes."""
    tensors = [
        (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for name, tensor in (*block.named_parameters(), *block.named_buffers())
    ]
    switches = [
        (name, key, value)
        for name, module in block.named_modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, str | bool)
    ]
    return [type(module) for module in block.modules()], tensors, switches
