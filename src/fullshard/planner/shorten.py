"""Models with fewer blocks, from which the full model is predicted: identical blocks have identical costs.

Peak memory and step time are linear in the number of identical blocks, once there are a few of them. So two short
models determine the long one. Peaks are extrapolated per region (a block near either end, and a phase), because the
region with the peak can change with the number of blocks, while the memory of each region is linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

LEAST = 6
"""The minimum number of blocks of a list that is shortened. Shorter lists are not changed."""


@dataclass(frozen=True)
class BlockList:
    """A list of identical blocks in a model, by its FQN."""

    fqn: str
    length: int


def block_lists(model: nn.Module) -> list[BlockList]:
    """Return the lists of at least `LEAST` identical blocks, except for lists within other lists."""
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
    """Truncate the lists of `model` in place to `lengths`, by FQN. Return the lists and blocks, to restore them."""
    undo = []
    for fqn, length in lengths.items():
        blocks: Any = model.get_submodule(fqn)
        undo.append((blocks, list(blocks)[length:]))
        del blocks[length:]
    return undo


def _signature(block: nn.Module) -> tuple[Any, ...]:
    """Return what must be equal for blocks of the same cost: classes, shapes, dtypes, and flags in attributes."""
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
