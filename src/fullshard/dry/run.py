"""Dry runs of whole steps: for one rank of any world size, in one process, without a GPU."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard._dry_compat import (
    copyable_fakes,
    fake_store,
    fake_tensors,
    foreach_by_default,
    initializing_without_values,
    meshes_on_cpu,
    taken_for_real,
    unwatched_propagation,
)
from fullshard.device.accelerator import pretending
from fullshard.dry.gpu_kernels import as_on_gpu
from fullshard.dry.streams import LAG, DryAccelerator
from fullshard.dry.watch import Watch
from fullshard.engine.hooks import without_sync
from fullshard.engine.registry import units_in
from fullshard.errors import ConfigError, StateError
from fullshard.optim.clipping import clip_grad_norm_
from fullshard.policy.arguments import mismatch
from fullshard.tape.context import drop_if_stale
from fullshard.tape.recorder import recording_to
from fullshard.tape.tape import Tape


@contextmanager
def world(size: int, *, rank: int = 0, ranks_per_host: int = 8) -> Iterator[None]:
    """Context manager that simulates a default process group. This process is rank `rank` of `size`.

    Args:
        size: The world size.
        rank: The rank of this process.
        ranks_per_host: The number of ranks per host.

    Raises:
        ConfigError: The rank does not exist.
        StateError: A default process group exists already.
    """
    if not 0 <= rank < size or ranks_per_host < 1:
        raise ConfigError(
            f"dry.world({size}, rank={rank}, ranks_per_host={ranks_per_host}): size and ranks_per_host must be 1 or "
            "more, and rank from 0 to size - 1."
        )
    if dist.is_initialized():
        raise StateError(
            "a dry run simulates the default process group, but a real one exists. Create the dry run in a separate "
            "process, or before init_process_group(). To record real ranks on simulated streams, use "
            "fullshard.dry.taped()."
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
    *, streams: Literal["gpu", "cpu"] = "gpu", values: bool = False, host_bytes: int | None = None
) -> Iterator[Tape]:
    """Context manager that records everything this process does, and returns the trace.

    Create and shard models within the context, on the CPU. Device meshes are CPU meshes, whatever their device type.

    Args:
        streams: "gpu" to simulate an accelerator with streams and memory separate from the host's; "cpu" for none.
        values: Whether tensors are real. If False, tensors have shapes but no memory, and collectives are not executed.
            If True, the simulated device lags behind the host by some operations, so that event queries may return
            False.
        host_bytes: The host memory in bytes that this rank may use alongside a simulated accelerator.
            `Offload(budget=...)` respects it. None means no limit.

    Raises:
        ConfigError: `streams` is invalid, or the result of an operation depends on values but tensors are fake.
    """
    if streams not in ("gpu", "cpu"):
        raise ConfigError(f'streams={streams!r}: expected "gpu" or "cpu".')
    accelerator = DryAccelerator(Tape(), has_streams=streams == "gpu", host_bytes=host_bytes, lag=LAG if values else 0)
    with ExitStack() as stack:
        stack.callback(accelerator.storages.forget)
        stack.enter_context(pretending(accelerator))
        tape = stack.enter_context(recording_to(accelerator.tape))
        fakes = None if values else stack.enter_context(fake_tensors())
        stack.enter_context(unwatched_propagation())
        stack.enter_context(copyable_fakes())
        if not values:
            stack.enter_context(initializing_without_values())
            stack.enter_context(taken_for_real())
            stack.enter_context(meshes_on_cpu())
        if streams == "gpu":
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
    streams: Literal["gpu", "cpu"] = "gpu",
    values: bool = False,
    host_bytes: int | None = None,
) -> Tape:
    """Return the trace of whole training steps of one rank: forward, backward, clipping and the optimizer step.

    Neither a GPU nor memory for the model is needed: tensors are fake unless `values` is set.

    Args:
        make_model: Creates the model and shards it on the CPU, as each rank would. Receives the mesh, if there is one.
        make_batch: Creates one microbatch.
        world: The world size.
        rank: The rank to simulate. Ranks differ in the rows that they own; rank 0 has the most.
        ranks_per_host: The number of ranks per host.
        make_mesh: Creates the mesh, if `make_model` takes one.
        loss: Computes the loss from a model and a batch. If None, the model returns the loss, an object with the loss
            as `.loss`, or a tensor whose mean is the loss. See `own_loss`.
        make_optimizer: Creates the optimizer from parameters. If None, fused AdamW.
        steps: The number of steps. The first differs from later ones because the order of units is not known yet.
        microbatches: The number of forward and backward passes per step. All but the last run under `no_sync`.
        max_norm: Clips gradients to that norm, if given.
        streams: See `taped`.
        values: See `taped`.
        host_bytes: See `taped`.

    Raises:
        ConfigError: An argument is not supported, or the result of an operation depends on values.
        StateError: A default process group exists in this process.
    """
    if steps < 1 or microbatches < 1:
        raise ConfigError(f"dry.run(steps={steps}, microbatches={microbatches}): both must be positive.")
    with _world(world, rank=rank, ranks_per_host=ranks_per_host):
        mesh = () if make_mesh is None else (make_mesh(),)
        with taped(streams=streams, values=values, host_bytes=host_bytes) as tape:
            model = make_model(*mesh)
            optimizer = (make_optimizer or fused_adamw)(model.parameters())
            with nullcontext() if values else taken_for_real():  # again, for modules that `make_model` has imported
                for _ in range(steps):
                    for number in range(microbatches):
                        with without_sync(units_in(model)) if number < microbatches - 1 else nullcontext():
                            (loss or own_loss)(model, make_batch()).backward()
                    if max_norm is not None:
                        clip_grad_norm_(model.parameters(), max_norm)
                    optimizer.step()
                    optimizer.zero_grad()
            gc.collect()
    return tape


_world = world


def fused_adamw(params: Any) -> torch.optim.Optimizer:
    """Return the default optimizer of dry runs."""
    return torch.optim.AdamW(params, fused=True)


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss that `model` computes. `batch` is a mapping, tuple or list of arguments, or one argument."""
    name = type(model).__name__.removeprefix("FSDP")
    named = dict(batch) if isinstance(batch, Mapping) else {}
    given = () if isinstance(batch, Mapping) else tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    if (why := mismatch(model.forward, given, named)) is not None:
        raise ConfigError(
            f"{name}.forward does not take a batch of type {type(batch).__name__}: {why}. Tuples and lists are passed "
            "as positional arguments, mappings as keyword arguments. Return such a batch, or pass a function of "
            "model and batch: loss=..., or --loss my_training:loss."
        )
    returned = model(*given, **named)
    found = getattr(returned, "loss", returned)
    if not isinstance(found, Tensor):
        raise ConfigError(
            f"{name} returned {type(returned).__name__}, which is neither a tensor nor an object with a loss "
            "attribute. Pass a function of model and batch: loss=..., or --loss my_training:loss."
        )
    return found if found.ndim == 0 else found.float().mean()
