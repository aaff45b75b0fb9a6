"""Where everything rests, tier by tier, and what travels in a step between these and the device that computes.

By formula, for each rank:

    parameters on the CPU      come for each gather; where the device keeps a copy, after each reduction, since an
                               optimizer may have stepped them; in the dtype that is gathered
    gradients there            go with each reduction, in the dtype that sums them
    what is on a disk          as `disk.foresight.Traffic` has it
    activations                go in forward, and come in backward
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from fullshard._compat import local_tensor
from fullshard.device.travel import Journeys, Travelled
from fullshard.disk.files import aligned
from fullshard.disk.foresight import Traffic
from fullshard.disk.tensors import OnDisk
from fullshard.engine.group_plan import GroupPlan
from fullshard.engine.managed import managed_by
from fullshard.engine.registry import units_in
from fullshard.engine.runtime import runtime_or_none
from fullshard.plan.ledger import (
    TIERS,
    Ledger,
    OptimizerCost,
    plans_at_home,
    predict_on_disk,
    predict_tiers,
    storage_bytes,
)

__all__ = ["activations_away", "measure_tiers", "predict_travel"]


def measure_tiers(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Ledger]:
    """The ledgers of this rank by tier, as of `predict_tiers`, in a run: the states are those that there are.

    Parameters, gradients and buffers are by formula. Activations are those that are away, of the forward with the
    most; of the device's own nothing is known. Nothing is sent, and no value is read.

    Args:
        model: the root.
        optimizers: those that step it, and have stepped.

    Raises:
        ConfigError: the model has no units.
    """
    states: dict[str, list[Tensor]] = {tier: [] for tier in TIERS}
    for optimizer in optimizers:
        for param, state in optimizer.state.items():
            managed = managed_by(param)
            beside = managed is not None and managed.unit.is_offloaded
            for value in (local_tensor(item) for item in state.values() if isinstance(item, Tensor)):
                states["disk" if isinstance(value, OnDisk) else "cpu" if beside else "device"].append(value)
    nbytes = {tier: storage_bytes(tensors) for tier, tensors in states.items()}
    nbytes["disk"] = sum(state.nbytes for state in states["disk"])
    on_disk = predict_on_disk(model)
    nbytes["cpu" if on_disk.beside_nbytes else "device"] += on_disk.buffer_nbytes
    found = predict_tiers(model, activations=activations_away(model))
    return {tier: replace(ledger, optimizer_state=nbytes[tier]) for tier, ledger in found.items()}


def activations_away(model: nn.Module) -> Mapping[str, int]:
    """By tier, the most bytes that one forward of `model` has put away; empty if nothing has travelled yet."""
    units = units_in(model)
    runtime = runtime_or_none(units[0]) if units else None
    return {} if runtime is None else runtime.activations.most_away


def predict_travel(
    model: nn.Module,
    *,
    microbatches: int = 1,
    clips: bool = False,
    optimizer: OptimizerCost | None = None,
    activations: Mapping[str, int] | None = None,
) -> Journeys:
    """Bytes that come to this rank's device and go from it in a step, by tier and state; what nothing travels of is
    left out.

    Args:
        model: a module with units.
        microbatches: of a step, each with a reduction.
        clips: whether gradients are clipped.
        optimizer: its state for each parameter; that of AdamW, if None.
        activations: by tier, bytes that one forward puts away.

    Raises:
        ConfigError: the model has no units.
    """
    found: dict[tuple[str, str], Travelled] = {}
    for key, more in _journeys(model, microbatches, clips, optimizer, activations or {}):
        known = found.get(key, Travelled())
        found[key] = Travelled(known.came + more.came, known.went + more.went)
    return {key: item for key, item in found.items() if item.came or item.went}


def _journeys(
    model: nn.Module,
    microbatches: int,
    clips: bool,
    optimizer: OptimizerCost | None,
    activations: Mapping[str, int],
) -> Iterator[tuple[tuple[str, str], Travelled]]:
    states = Traffic.of_optimizer(1, bytes_each=predict_on_disk(model, optimizer=optimizer).nbytes)
    yield ("disk", "optimizer state"), _as_travelled(states)
    for tier, nbytes in activations.items():
        yield (tier, "activations"), _as_travelled(Traffic.of_activations(nbytes, microbatches=microbatches))
    for unit, plan, is_trained in plans_at_home(model):
        reductions = microbatches if is_trained else 0
        gathers = reductions if unit.keeps_unsharded else microbatches * (2 if unit.reshards_after_forward else 1)
        if plan.rests_on_disk:
            shards = aligned(plan.layout.shard_numel * plan.contract.stored.itemsize)
            moved = Traffic.of_shards(shards, gathers=gathers, is_stepped=is_trained)
            yield ("disk", "parameters"), _as_travelled(moved)
            if is_trained:
                grads = aligned(plan.layout.shard_numel * plan.contract.delivered.itemsize)
                moved = Traffic.of_gradients(grads, reductions=reductions, clips=clips)
                yield ("disk", "gradients"), _as_travelled(moved)
        elif plan.memory.offloaded:
            yield ("cpu", "parameters"), Travelled(came=_comes(plan, gathers, reductions))
            yield ("cpu", "gradients"), Travelled(went=reductions * _summed(plan))


def _as_travelled(traffic: Traffic) -> Travelled:
    return Travelled(traffic.read_bytes, traffic.written_bytes)


def _comes(plan: GroupPlan, gathers: int, reductions: int) -> int:
    """Bytes of parameters on the CPU that come to the device in a step."""
    if plan.keeps_copy:
        return reductions * plan.copy_nbytes
    if plan.shards_optimizer:
        return gathers * plan.layout.shard_numel * plan.sent_dtype.itemsize
    return gathers * plan.layout.unsharded_numel * plan.contract.compute.itemsize


def _summed(plan: GroupPlan) -> int:
    """Bytes of a reduction's sums, of which the optimizer on the CPU gets its gradients."""
    layout = plan.layout
    numel = layout.shard_numel if plan.shards_optimizer else sum(param.spec.numel for param in layout.params)
    return numel * plan.contract.reduce.itemsize
