"""The memory of each tier, and the traffic per step between the tiers and the device that computes.

The formula, for each rank:

    parameters on the CPU      copied to the device for each all-gather; if the device keeps a copy, after each
                               reduction, because an optimizer may have updated them; in the all-gather dtype
    gradients on the CPU       copied from the device after each reduction, in the reduce dtype
    states on disk             see `disk.prediction.Traffic`
    activations                copied from the device in forward and back in backward
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from fullshard._compat import local_tensor
from fullshard.device.transfers import TransferBytes, Transfers
from fullshard.disk.interface import aligned
from fullshard.disk.prediction import Traffic
from fullshard.disk.tensors import OnDisk
from fullshard.engine.group_plan import GroupPlan
from fullshard.engine.managed import managed_by
from fullshard.engine.registry import units_in
from fullshard.engine.runtime import runtime_or_none
from fullshard.plan.ledger import (
    TIERS,
    Ledger,
    OptimizerCost,
    plans_without_offload,
    predict_on_disk,
    predict_tiers,
    storage_bytes,
)


def measure_tiers(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Ledger]:
    """Return the ledgers of this rank by tier, like `predict_tiers`, for a running model with its actual states.

    Parameters, gradients and buffers follow the formula. Activations are the most that one forward has offloaded; those
    on the device are unknown. Nothing is communicated, and no value is read.

    Args:
        model: The root.
        optimizers: The optimizers of the model, which have taken a step.
    """
    states: dict[str, list[Tensor]] = {tier: [] for tier in TIERS}
    for optimizer in optimizers:
        for param, state in optimizer.state.items():
            managed = managed_by(param)
            alongside = managed is not None and managed.unit.shards.is_offloaded
            for value in (local_tensor(item) for item in state.values() if isinstance(item, Tensor)):
                states["disk" if isinstance(value, OnDisk) else "cpu" if alongside else "device"].append(value)
    nbytes = {tier: storage_bytes(tensors) for tier, tensors in states.items()}
    nbytes["disk"] = sum(state.nbytes for state in states["disk"])
    on_disk = predict_on_disk(model)
    nbytes["cpu" if on_disk.alongside_nbytes else "device"] += on_disk.buffer_nbytes
    found = predict_tiers(model, activations=offloaded_activations(model))
    return {tier: replace(ledger, optimizer_state=nbytes[tier]) for tier, ledger in found.items()}


def offloaded_activations(model: nn.Module) -> Mapping[str, int]:
    """Return the most bytes that one forward of `model` has offloaded, by tier. Empty if none have been offloaded."""
    units = units_in(model)
    runtime = runtime_or_none(units[0]) if units else None
    return {} if runtime is None else runtime.activations.most_offloaded


def predict_transfers(
    model: nn.Module,
    *,
    microbatches: int = 1,
    clips: bool = False,
    optimizer: OptimizerCost | None = None,
    activations: Mapping[str, int] | None = None,
) -> Transfers:
    """Return the bytes copied to and from this rank's device per step, by tier and state, without zeros.

    Args:
        model: A module with units.
        microbatches: The number of microbatches per step, each with a reduction.
        clips: Whether gradients are clipped.
        optimizer: The optimizer state per parameter. If None, that of AdamW.
        activations: The bytes that one forward offloads, by tier.
    """
    found: dict[tuple[str, str], TransferBytes] = {}
    for key, more in _transfers(model, microbatches, clips, optimizer, activations or {}):
        known = found.get(key, TransferBytes())
        found[key] = TransferBytes(known.arrived + more.arrived, known.passed + more.passed)
    return {key: item for key, item in found.items() if item.arrived or item.passed}


def _transfers(
    model: nn.Module,
    microbatches: int,
    clips: bool,
    optimizer: OptimizerCost | None,
    activations: Mapping[str, int],
) -> Iterator[tuple[tuple[str, str], TransferBytes]]:
    states = Traffic.of_optimizer(1, bytes_each=predict_on_disk(model, optimizer=optimizer).nbytes)
    yield ("disk", "optimizer state"), _as_transfer(states)
    for tier, nbytes in activations.items():
        yield (tier, "activations"), _as_transfer(Traffic.of_activations(nbytes, microbatches=microbatches))
    for unit, plan, is_trained in plans_without_offload(model):
        reductions = microbatches if is_trained else 0
        gathers = reductions if unit.keeps_unsharded else microbatches * (2 if unit.reshards_after_forward else 1)
        if plan.is_on_disk:
            shards = aligned(plan.layout.shard_numel * plan.contract.stored.itemsize)
            moved = Traffic.of_shards(shards, gathers=gathers, is_stepped=is_trained)
            yield ("disk", "parameters"), _as_transfer(moved)
            if is_trained:
                grads = aligned(plan.layout.shard_numel * plan.contract.delivered.itemsize)
                moved = Traffic.of_gradients(grads, reductions=reductions, clips=clips)
                yield ("disk", "gradients"), _as_transfer(moved)
        elif plan.memory.offloaded:
            yield ("cpu", "parameters"), TransferBytes(arrived=_comes(plan, gathers, reductions))
            yield ("cpu", "gradients"), TransferBytes(passed=reductions * _summed(plan))


def _as_transfer(traffic: Traffic) -> TransferBytes:
    return TransferBytes(traffic.read_bytes, traffic.written_bytes)


def _comes(plan: GroupPlan, gathers: int, reductions: int) -> int:
    """Return the bytes of parameters that are copied from the CPU to the device per step."""
    if plan.keeps_copy:
        return reductions * plan.copy_nbytes
    if plan.shards_optimizer:
        return gathers * plan.layout.shard_numel * plan.sent_dtype.itemsize
    return gathers * plan.layout.unsharded_numel * plan.contract.compute.itemsize


def _summed(plan: GroupPlan) -> int:
    """Return the bytes of the reduced gradients that are copied to the optimizer on the CPU."""
    layout = plan.layout
    numel = layout.shard_numel if plan.shards_optimizer else sum(param.spec.numel for param in layout.params)
    return numel * plan.contract.reduce.itemsize
