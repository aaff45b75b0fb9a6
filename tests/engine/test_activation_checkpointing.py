"""Activation checkpointing with every tool of torch, inside and around units: results match plain PyTorch bitwise, no
all-gather is redundant, and activation memory equals that of an unsharded model.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shared_ranks import on_ranks, run_ranks
from small_models import (
    Chain,
    Layer,
    Shard,
    agree_with_plain,
    chain,
    learn,
    leave,
    memory_is_shared,
    most_whole,
)
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fullshard import fully_shard, recording
from fullshard._dry_compat import storage_watch
from fullshard.engine.registry import units_in
from fullshard.tape.recorder import Phase

STEPS, ROWS = 4, 128


class Dropping(Layer):
    """Draws random numbers, which must be identical in the recomputation."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.1)


class Within(Dropping):
    """Recomputes its own forward, without the hooks around it."""

    options: dict[str, Any]

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, **self.options)


class Regions(Chain):
    """Recomputes `size` layers at a time."""

    options: dict[str, Any]
    size: int

    def forward(self, x: Tensor) -> Tensor:
        for start in range(0, len(self.layers), self.size):
            x = checkpoint(nn.Sequential(*self.layers[start : start + self.size]), x, **self.options)
        return self.head(x)


def save_narrow_products(context: object, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save the outputs of `down`, and nothing else."""
    if operation is torch.ops.aten.addmm.default and args[2].shape[1] == 48:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


FREE: dict[str, Any] = {"use_reentrant": False}
REENTRANT: dict[str, Any] = {"use_reentrant": True}
SELECTIVE: dict[str, Any] = {**FREE, "context_fn": partial(create_selective_checkpoint_contexts, save_narrow_products)}


def without(shard: Shard, layers: int) -> Any:
    """Build a model without activation checkpointing."""
    return chain(shard, Chain([Dropping() for _ in range(layers)]))


def within(options: dict[str, Any], shard: Shard, layers: int) -> Any:
    model = Chain([Within() for _ in range(layers)])
    for layer in model.layers:
        layer.options = options
    return chain(shard, model)


def around(size: int, options: dict[str, Any], shard: Shard, layers: int) -> Any:
    model = Regions([Dropping() for _ in range(layers)])
    model.size, model.options = size, options
    return chain(shard, model)


def without_root(options: dict[str, Any], shard: Shard, layers: int) -> Any:
    """Only the layers are units. Each is a separate root and is entered during another unit's backward. The
    head's gradients are equal already, with the same batch on every rank.
    """
    return around(2, options, lambda module: shard(module) if isinstance(module, Layer) else module, layers)


def wrapped(impl: CheckpointImpl, before: bool, shard: Shard, layers: int) -> Any:
    """Apply torch's own wrapper, around the layers before they are sharded, or inside of the units later."""
    wrap = partial(checkpoint_wrapper, checkpoint_impl=impl)
    if before:
        return chain(shard, Chain([wrap(Dropping()) for _ in range(layers)]))
    model = without(shard, layers)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=lambda m: isinstance(m, Layer))
    return model


def every_other(shard: Shard, layers: int) -> Any:
    model = without(shard, layers)
    chosen = list(model.layers)[::2]
    apply_activation_checkpointing(model, check_fn=lambda m: any(m is layer for layer in chosen))
    return model


def offloaded(shard: Shard, layers: int) -> Any:
    """Offload everything that autograd saves, including unsharded weights."""
    model = without(shard, layers)
    apply_activation_checkpointing(model, offload_wrapper, check_fn=lambda m: isinstance(m, Layer))
    return model


class AllOfIt(nn.Module):
    def __init__(self, model: nn.Module, options: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.model, x, **self.options)


def around_all(options: dict[str, Any], shard: Shard, layers: int) -> Any:
    """Checkpoint the root, so that all hooks run again within backward."""
    return AllOfIt(without(shard, layers), options)


@dataclass(frozen=True)
class Kind:
    """One way to recompute activations.

    Args:
        build: makes a model with this number of layers.
        gathers: number of all-gathers in a backward under zero3 with 6 layers.
        most_whole: maximum number of layers that are unsharded at the same time.
        inputs: how much more forward keeps for 6 layers than for 3, in layer inputs; None if it is much more.
    """

    build: Callable[[Shard, int], Any]
    gathers: int = 6
    most_whole: int = 2
    inputs: int | None = 3


KINDS = {
    "nothing": Kind(without, inputs=None),
    "within a unit": Kind(partial(within, FREE)),
    "within a unit, reentrant": Kind(partial(within, REENTRANT)),
    "within a unit, selective": Kind(partial(within, SELECTIVE), inputs=6),
    "around a unit": Kind(partial(around, 1, FREE)),
    "around a unit, reentrant": Kind(partial(around, 1, REENTRANT)),
    "around a unit, selective": Kind(partial(around, 1, SELECTIVE), inputs=6),
    # Layers 3, 4 and 5 are recomputed, and all but the last are needed again in reverse order. If the backward of 5
    # has started by then, layer 5 stays unsharded meanwhile, and so does layer 4.
    "around three": Kind(partial(around, 3, FREE), gathers=8, most_whole=3, inputs=1),
    "around three, reentrant": Kind(partial(around, 3, REENTRANT), gathers=10, inputs=1),
    "around three, selective": Kind(partial(around, 3, SELECTIVE), gathers=8, most_whole=3, inputs=4),
    "by torch's wrapper": Kind(partial(wrapped, CheckpointImpl.NO_REENTRANT, True)),
    "by torch's wrapper, reentrant": Kind(partial(wrapped, CheckpointImpl.REENTRANT, True)),
    "by torch's wrapper in units": Kind(partial(wrapped, CheckpointImpl.NO_REENTRANT, False)),
    "by torch's wrapper in units, reentrant": Kind(partial(wrapped, CheckpointImpl.REENTRANT, False)),
    "every other layer, by torch's wrapper": Kind(every_other, inputs=None),
}
BITS_ONLY = {
    "without a root": partial(without_root, FREE),
    "without a root, reentrant": partial(without_root, REENTRANT),
    "around the root": partial(around_all, FREE),
    "around the root, reentrant": partial(around_all, REENTRANT),
    "offloaded": offloaded,
}


def loss_of(model: Any, step: int) -> Tensor:
    torch.manual_seed(step)
    x = torch.randn(ROWS, 48, requires_grad=True)  # reentrant checkpoints need a gradient to pass on
    return model(x).square().mean()


def learn_built(build: Callable[[Shard, int], Any], shard: Shard) -> list[Any]:
    return learn(build(shard, 6), STEPS, loss_of)


@pytest.mark.parametrize("strategies", [("zero3",), pytest.param(("zero1", "zero2"), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [name for name in (*KINDS, *BITS_ONLY) if name != "nothing"])
def test_activation_checkpointing_matches_plain_pytorch_bitwise(name, strategies):
    build = KINDS[name].build if name in KINDS else BITS_ONLY[name]
    run_ranks(2, agree_with_plain, partial(learn_built, build), *strategies)


@pytest.mark.slow
@on_ranks(2)
def test_recomputation_needs_minimal_all_gathers_and_prefetches_all():
    """Units are gathered once in forward, and in backward once for all units needed right after a recomputation."""
    for name, kind in KINDS.items():
        model = kind.build(fully_shard, 6)
        for step in range(STEPS):
            with recording() as forward:
                loss = loss_of(model, step)
            with recording() as backward:
                loss.backward()
        first, again = (record.collectives("all_gather") for record in (forward, backward))
        ahead = all(event.origin.phase is Phase.BACKWARD for event in again)
        counts = (len(first), len(again), ahead, most_whole(backward), memory_is_shared(model))
        assert counts == (7, kind.gathers, True, kind.most_whole, True), name


# -- memory -----------------------------------------------------------------------------------------------------------


def memory_of_a_step(model: Any) -> tuple[int, int]:
    """Return the bytes that forward keeps for backward, and the peak bytes of a step."""
    for step in range(3):
        loss_of(model, step).backward()
        model.zero_grad()
    with storage_watch(every_operation=True) as watch:
        loss = loss_of(model, 3)
        kept = watch.live_bytes()
        loss.backward()
    return kept, watch.peak_bytes


def kept_by(model: Any) -> int:
    with storage_watch() as watch:
        loss = loss_of(model, 0)
        kept = watch.live_bytes()
        loss.backward()
    return kept


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds",
    [
        [kind for name, kind in KINDS.items() if "wrapper" not in name],
        pytest.param([kind for name, kind in KINDS.items() if "wrapper" in name], marks=pytest.mark.slow),
    ],
    ids=["by function", "by wrapper"],
)
@on_ranks(2)
def test_sharding_adds_no_activation_memory_to_checkpointed_forward(kinds):
    """Forward keeps region inputs and selected outputs. Backward adds unsharded gradients of at most two units."""
    gc.disable()
    _, all_of_it = memory_of_a_step(without(leave, 6))
    for kind in kinds:
        plain, plain_peak = memory_of_a_step(kind.build(leave, 6))
        sharded = kind.build(fully_shard, 6)
        kept, peak = memory_of_a_step(sharded)
        two_units = 2 * max(unit.unsharded_nbytes for unit in units_in(sharded))
        assert kept == plain
        assert peak <= plain_peak + two_units
        if kind.inputs is not None:
            assert kept - kept_by(kind.build(leave, 3)) == kind.inputs * ROWS * 48 * 4
            assert plain_peak + two_units < all_of_it
