"""The choice of optimizer states to keep on a disk, and of the chunks in which they are stepped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.engine.managed import in_model_order, managed_by
from fullshard.engine.placements import placements_of
from fullshard.engine.unit import Unit
from fullshard.policy.offload import Offload, StatePlacement

if TYPE_CHECKING:
    from fullshard.state.steps_in_chunks import StatesOnDisk

CHUNK_NBYTES = 64 * 2**20  # maximum bytes of states of a chunk, unless it has a single larger parameter
STATES = 2  # assumed number of states of a parameter's shape in an optimizer, as in AdamW

_TRAINED = attrgetter("requires_grad")
_made: WeakKeyDictionary[Optimizer, tuple[tuple[int, ...], StatesOnDisk | None]] = WeakKeyDictionary()


def states_on_disk(optimizer: Optimizer) -> StatesOnDisk | None:
    """Return the states of `optimizer` on a disk, according to the policies of its units; None if there are none.

    If the parameters of the optimizer have changed, or some were frozen or unfrozen, a new object is created. It adopts
    the states in the next step.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    key = (*map(id, params), *map(_TRAINED, params))
    known = _made.get(optimizer)
    if known is None or known[0] != key:
        chunks = chunks_on_disk(params)
        known = _made[optimizer] = key, _states_in(chunks, optimizer) if chunks else None
    return known[1]


def _states_in(chunks: Sequence[tuple[Path, list[nn.Parameter]]], optimizer: Optimizer) -> StatesOnDisk:
    from fullshard.state.steps_in_chunks import StatesOnDisk  # imported here, because few programs need it

    return StatesOnDisk(chunks, f"states-{type(optimizer).__name__}".lower())


def choose_chunks_again(units: Iterable[Unit]) -> None:
    """Apply the current policies of `units` to the states of their parameters, starting with the next step."""
    changed = {id(param.sharded) for unit in units for param in unit.params}
    for optimizer in [item for item, (key, _) in _made.items() if changed.intersection(key)]:
        del _made[optimizer]


def chunks_on_disk(params: Iterable[nn.Parameter]) -> list[tuple[Path, list[nn.Parameter]]]:
    """Return the chunks of the `params` of an optimizer with states on a disk, each with its folder.

    They are identical on all ranks, because Muon runs collectives for each chunk.
    """
    ordered = in_model_order(list(params))
    return [(folder, chunk) for folder, of_unit in _chosen(ordered) for chunk in _divided(of_unit)]


def _chosen(params: Iterable[nn.Parameter]) -> Iterator[tuple[Path, list[nn.Parameter]]]:
    """Yield the folder and the parameters of each unit with states on a disk, the last unit first."""
    by_policy: list[tuple[Offload, dict[Unit, list[nn.Parameter]]]] = []
    for param in params:
        managed = managed_by(param)
        policy = None if managed is None else managed.unit.options.offload
        if managed is None or not isinstance(policy, Offload):
            continue
        if not param.requires_grad and param.grad is None:  # a parameter frozen after the backward is still stepped
            continue
        if not policy.disk_fraction and not managed.unit.shards.is_on_disk:
            continue
        known = next((units for other, units in by_policy if other == policy), None)
        if known is None:
            known = {}
            by_policy.append((policy, known))
        known.setdefault(managed.unit, []).append(param)
    for policy, units in by_policy:
        placements = placements_of(list(units))
        nbytes = {
            unit: sum(param.numel() * param.dtype.itemsize for param in of_unit) for unit, of_unit in units.items()
        }
        wanted = round(policy.disk_fraction * sum(nbytes.values()))  # as in `placements.py`
        taken = sum(size for unit, size in nbytes.items() if unit.shards.is_on_disk)
        for unit in reversed(units):
            if unit.shards.is_on_disk:
                yield policy.disk_folder, units[unit]
            elif taken < wanted and placements[unit] is StatePlacement.DEVICE:
                taken += nbytes[unit]
                yield policy.disk_folder, units[unit]


def _divided(params: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield `params` in chunks, which are identical on all ranks even though shards may differ in size."""
    chunk: list[nn.Parameter] = []
    nbytes = 0
    for together in _inseparable(params):
        size = sum(_stepped_nbytes(param) for param in together)
        if chunk and nbytes + size > CHUNK_NBYTES:
            yield chunk
            chunk, nbytes = [], 0
        chunk += together
        nbytes += size
    if chunk:
        yield chunk


def _inseparable(params: Sequence[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    """Return groups of parameters that are read and written together, because their shards share blocks of the disk."""
    together: dict[int, list[nn.Parameter]] = {}
    for number, param in enumerate(params):
        managed = managed_by(param)
        is_alone = managed is None or not managed.unit.shards.is_on_disk or managed.param.layout.in_place
        together.setdefault(number if is_alone else -1, []).append(param)
    return together.values()


def _stepped_nbytes(param: nn.Parameter) -> int:
    """Return the bytes that an optimizer step reads for `param`."""
    managed = managed_by(param)
    values = (
        STATES if managed is None or not managed.unit.shards.is_on_disk else STATES + 2
    )  # plus the shard and the gradient
    return values * param.numel() * param.dtype.itemsize // _parts(param)


def _parts(param: Tensor) -> int:
    if not isinstance(param, DTensor):
        return 1
    sizes = zip(param.placements, param.device_mesh.shape, strict=True)
    return prod(size for placement, size in sizes if placement.is_shard())
