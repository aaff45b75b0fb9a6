"""Whole steps of the engine, run dry, for one rank of any world on one process without a GPU."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard._compat import (
    copyable_fakes,
    fake_store,
    fake_tensors,
    foreach_by_default,
    initialising_without_values,
    taken_for_real,
    unwatched_propagation,
)
from fullshard.device.accelerator import pretending
from fullshard.dry.gpu_kernels import as_on_gpu
from fullshard.dry.lanes import DryAccelerator
from fullshard.dry.watch import Watch
from fullshard.engine.hooks import without_sync
from fullshard.engine.registry import units_in
from fullshard.errors import ConfigError, StateError
from fullshard.optim.clipping import clip_grad_norm_
from fullshard.tape.context import drop_if_stale
from fullshard.tape.recorder import recording_to
from fullshard.tape.tape import Tape

__all__ = ["fused_adamw", "run", "taped", "world"]


@contextmanager
def world(size: int, *, rank: int = 0, ranks_per_host: int = 8) -> Iterator[None]:
    """A context in which this process is `rank` of `size`: the default process group sends nothing.

    Args:
        size: how many ranks there are.
        rank: which one this process is.
        ranks_per_host: how many ranks a host has, for what goes by hosts.

    Raises:
        ConfigError: there is no such rank.
        StateError: there is a default process group.
    """
    if not 0 <= rank < size or ranks_per_host < 1:
        raise ConfigError(f"dry.world({size}, rank={rank}, ranks_per_host={ranks_per_host}): there is no such rank.")
    if dist.is_initialized():
        raise StateError(
            "a dry run pretends a default process group, and there is a real one. Make it in a process of its own, or "
            "before init_process_group(); to record what real ranks do on pretended lanes, use fullshard.dry.taped()."
        )
    before = os.environ.get("LOCAL_WORLD_SIZE")
    os.environ["LOCAL_WORLD_SIZE"] = str(min(size, ranks_per_host))
    dist.init_process_group("fake", rank=rank, world_size=size, store=fake_store())
    try:
        yield
    finally:
        dist.destroy_process_group()
        drop_if_stale()
        if before is None:
            del os.environ["LOCAL_WORLD_SIZE"]
        else:
            os.environ["LOCAL_WORLD_SIZE"] = before


@contextmanager
def taped(
    *, lanes: Literal["gpu", "cpu"] = "gpu", values: bool = False, host_bytes: int | None = None
) -> Iterator[Tape]:
    """A context in which all that this process does is written on the tape that it gives.

    Models must be made and sharded within it, on the CPU; a mesh, before it.

    Args:
        lanes: "gpu" to pretend an accelerator with lanes of its own, and memory beside the host's; "cpu" for none.
        values: whether tensors are real. Otherwise they have shapes and no memory, whatever their size, and collectives
            are not carried out.
        host_bytes: what the rank may take of the host's memory beside a pretended accelerator, by which an
            `Offload(budget=...)` goes; None for as much as it likes.

    Raises:
        ConfigError: `lanes` is something else; or an operation gives what depends on values, and there are none.
    """
    if lanes not in ("gpu", "cpu"):
        raise ConfigError(f'lanes={lanes!r}: "gpu" or "cpu" is needed.')
    accelerator = DryAccelerator(Tape(), has_lanes=lanes == "gpu", host_bytes=host_bytes)
    with ExitStack() as stack:
        stack.callback(accelerator.storages.forget)
        stack.enter_context(pretending(accelerator))
        tape = stack.enter_context(recording_to(accelerator.tape))
        fakes = None if values else stack.enter_context(fake_tensors())
        stack.enter_context(unwatched_propagation())
        stack.enter_context(copyable_fakes())
        if not values:
            stack.enter_context(initialising_without_values())
            stack.enter_context(taken_for_real())
        if lanes == "gpu":
            stack.enter_context(foreach_by_default())
            stack.enter_context(nullcontext() if values else as_on_gpu())
        stack.enter_context(Watch(accelerator, fakes))
        yield tape


def run(
    make_model: Callable[..., nn.Module],
    make_batch: Callable[[], Any],
    *,
    world: int,
    rank: int = 0,
    ranks_per_host: int = 8,
    make_mesh: Callable[[], DeviceMesh] | None = None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    steps: int = 2,
    microbatches: int = 1,
    max_norm: float | None = None,
    lanes: Literal["gpu", "cpu"] = "gpu",
    values: bool = False,
    host_bytes: int | None = None,
) -> Tape:
    """The tape of whole training steps of one rank: forward, backward, clipping and the optimizer's step.

    No GPU is needed, nor memory for the model: tensors are fakes, unless `values` is set.

    Args:
        make_model: makes the model and shards it, as each rank would, on the CPU. Given the mesh, if there is one.
        make_batch: makes one microbatch.
        world: how many ranks there are.
        rank: which one is told of. Ranks differ in the rows that they own, rank 0 has the most.
        ranks_per_host: how many of them share a host.
        make_mesh: makes the mesh, where `make_model` needs one that it is given.
        loss: the loss of a model and a batch. If None, `model(batch)`: what it returns is the loss, or has it as
            `.loss`, or is a tensor whose mean is taken.
        make_optimizer: makes the optimizer of parameters; fused AdamW, if None.
        steps: how many steps are taken. The first differs from later ones: no order is known yet.
        microbatches: forward and backward passes of a step; all but the last under `no_sync`.
        max_norm: clips gradients to that norm, if given.
        lanes: see `taped`, and so for `values` and `host_bytes`.

    Raises:
        ConfigError: an argument cannot be honoured; or an operation gives what depends on values.
        StateError: there is a default process group in this process.
    """
    if steps < 1 or microbatches < 1:
        raise ConfigError(f"dry.run(steps={steps}, microbatches={microbatches}): positive numbers are needed.")
    with _world(world, rank=rank, ranks_per_host=ranks_per_host):
        mesh = () if make_mesh is None else (make_mesh(),)
        with taped(lanes=lanes, values=values, host_bytes=host_bytes) as tape:
            model = make_model(*mesh)
            optimizer = (make_optimizer or fused_adamw)(model.parameters())
            with nullcontext() if values else taken_for_real():  # which `make_model` may have imported
                _train(model, optimizer, make_batch, loss or _loss, steps, microbatches, max_norm)
            gc.collect()
    return tape


_world = world


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    make_batch: Callable[[], Any],
    loss: Callable[[nn.Module, Any], Tensor],
    steps: int,
    microbatches: int,
    max_norm: float | None,
) -> None:
    units = units_in(model)
    for _ in range(steps):
        for number in range(microbatches):
            with ExitStack() as stack:
                if number < microbatches - 1:
                    stack.enter_context(without_sync(units))
                loss(model, make_batch()).backward()
        if max_norm is not None:
            clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()


def fused_adamw(params: Any) -> torch.optim.Optimizer:
    """The optimizer of dry runs for which none is named."""
    return torch.optim.AdamW(params, fused=True)


def _loss(model: nn.Module, batch: Any) -> Tensor:
    returned = model(**batch) if isinstance(batch, dict) else model(batch)
    found = getattr(returned, "loss", returned)
    if not isinstance(found, Tensor):
        raise ConfigError(
            f"{type(model).__name__} returned {type(returned).__name__}, which is no tensor and has no loss. Pass "
            "loss=lambda model, batch: ..."
        )
    return found if found.ndim == 0 else found.float().mean()
