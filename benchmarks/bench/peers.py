"""The systems that this library is compared with, each used as documented by its authors.

This is the only file that imports torch's sharding, and only within functions that measure it.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, wraps
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.bench.model import Block, Model
from benchmarks.bench.trainer import Build, Trainer
from benchmarks.bench.workload import OPTIMIZERS, Workload
from fullshard.device.accelerator import accelerator_for
from fullshard.device.streams import Mark
from fullshard.dry.streams import DryAccelerator, DryStream
from fullshard.errors import StateError
from fullshard.tape.recorder import Origin, Phase, acting_for, note_origin

__all__ = ["ddp", "deepspeed", "fsdp1", "fsdp2", "fsdp2_on_dry_streams", "shard_by_fsdp2", "zero1"]


def ddp(*, bucket_views: bool = False) -> Build:
    """`DistributedDataParallel`, with or without gradients that are views of its buckets."""

    def build(workload: Workload, model: Model) -> Trainer:
        wrapped = _ddp(workload, model, bucket_views)
        return Trainer(workload, wrapped, workload.make_optimizer(wrapped.parameters()), autocast=True)

    return build


def zero1(workload: Workload, model: Model) -> Trainer:
    """`DistributedDataParallel` with `ZeroRedundancyOptimizer`."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = _ddp(workload, model, bucket_views=True)
    call = OPTIMIZERS[workload.optimizer]
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), optimizer_class=call.kind, **call.arguments)
    return Trainer(workload, wrapped, optimizer, autocast=True)


def fsdp1(workload: Workload, model: Model) -> Trainer:
    """`FullyShardedDataParallel` with each block as a unit. On a CPU it needs the device."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    precision = MixedPrecision(param_dtype=workload.compute_dtype, reduce_dtype=torch.float32)
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=precision if workload.casts else None,
        device_id=workload.device(dist.get_rank()),
        use_orig_params=True,
    )
    return Trainer(workload, wrapped, workload.make_optimizer(wrapped.parameters()))


def fsdp2(*, reshard_after_forward: bool | None = None, prefetch: bool = False) -> Build:
    """`fully_shard` with each block as a unit.

    Args:
        reshard_after_forward: Whether units are freed between forward and backward; None: all except the root.
        prefetch: Set the next block of each block for prefetching.
    """

    def build(workload: Workload, model: Model) -> Trainer:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(workload.device_type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(
            param_dtype=workload.compute_dtype if workload.casts else None, reduce_dtype=torch.float32
        )
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
        if prefetch:
            blocks: list[Any] = list(model.blocks)
            for block, following in pairwise(blocks):
                block.set_modules_to_forward_prefetch([following])
                following.set_modules_to_backward_prefetch([block])
        return Trainer(workload, model, workload.make_optimizer(model.parameters()))

    return build


def shard_by_fsdp2(compute: torch.dtype, reduce: torch.dtype) -> Callable[[nn.Module, DeviceMesh], object]:
    """`fully_shard` of a module on a mesh, with parameters in one dtype and sums in another."""

    def shard(module: nn.Module, mesh: DeviceMesh) -> object:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        return fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce))

    return shard


def deepspeed(stage: int) -> Build:
    """DeepSpeed's ZeRO of that stage, with the same torch optimizer.

    Its defaults clip gradients, and use buckets of 2 GB for any model. Here nothing is clipped, and a bucket holds a
    block.
    """

    def build(workload: Workload, model: Model) -> Trainer:
        logging.disable(logging.WARNING)  # it logs all its settings
        library = importlib.import_module("deepspeed")
        block = sum(param.numel() for param in model.blocks[0].parameters())
        engine, optimizer, _, _ = library.initialize(
            model=model,
            optimizer=workload.make_optimizer(model.parameters()),
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": workload.shape.batch,
                "zero_optimization": {
                    "stage": stage,
                    "reduce_bucket_size": block,
                    "allgather_bucket_size": block,
                    "stage3_prefetch_bucket_size": block,
                },
                "gradient_clipping": 0.0,
                "communication_data_type": "fp32",
                "zero_allow_untested_optimizer": True,
                "bf16": {"enabled": workload.casts},
                "steps_per_print": None,
            },
        )
        return _DeepSpeedTrainer(workload, engine, optimizer)

    return build


class _DeepSpeedTrainer(Trainer):
    """Training by DeepSpeed's engine, which drives backward and the optimizer itself."""

    model: Any

    def update(self, loss: Tensor) -> None:
        self.model.backward(loss)
        self.model.step()


def _ddp(workload: Workload, model: Model, bucket_views: bool) -> nn.Module:
    devices = [workload.device(dist.get_rank())] if workload.device_type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=bucket_views)


@contextmanager
def fsdp2_on_dry_streams() -> Iterator[None]:
    """Run FSDP2 on simulated streams, as on streams of a GPU, within this context and `dry.taped`.

    Modules must be sharded within it. FSDP2 gets streams and events from torch's device module (`torch.cuda`); here it
    gets those of the simulated accelerator. The tape records its frees and allocations of storages, and the unit and
    phase of its work. Nothing else of FSDP2 is changed.

    Raises:
        StateError: The accelerator is not simulated.
    """
    from torch.distributed.fsdp._fully_shard import (
        _fsdp_collectives,
        _fsdp_init,
        _fsdp_param,
        _fsdp_param_group,
        _fsdp_state,
    )

    accelerator = accelerator_for(torch.device("cpu"))
    if not isinstance(accelerator, DryAccelerator):
        raise StateError(
            "FSDP2 gets simulated streams within dry.taped() only: with dry.taped(), fsdp2_on_dry_streams(): ..."
        )
    streams = _Streams(accelerator)

    def allocate(tensor: Tensor) -> None:
        storage, nbytes = tensor.untyped_storage(), tensor.numel() * tensor.itemsize
        if storage.size() != nbytes:
            accelerator.resize(storage, nbytes)

    def free(tensor: Tensor) -> None:
        if tensor.untyped_storage().size():
            accelerator.resize(tensor.untyped_storage(), 0)

    with ExitStack() as stack:
        for module in (_fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state):
            stack.enter_context(patch.object(module, "_get_device_handle", lambda device_type: streams))
        stack.enter_context(patch.object(torch.accelerator, "current_stream", streams.current_stream))
        for module in (_fsdp_param, _fsdp_param_group):
            stack.enter_context(patch.object(module, "alloc_storage", allocate))
        stack.enter_context(patch.object(_fsdp_param, "free_storage", free))
        for name, phase in _PHASES.items():
            kind = _fsdp_param_group.FSDPParamGroup
            stack.enter_context(patch.object(kind, name, _on_behalf(getattr(kind, name), phase)))
        yield


_STREAMS = "gather copy-in", "gather", "reduce", "all-reduce"  # of FSDP2, in order of creation
_PHASES = {  # methods of FSDP2's parameter groups, and their phases; None: the group's own state
    "unshard": None,
    "pre_forward": Phase.FORWARD,
    "post_forward": Phase.FORWARD,
    "pre_backward": Phase.PRE_BACKWARD,
    "post_backward": Phase.POST_BACKWARD,
}


def _on_behalf(method: Callable[..., Any], phase: Phase | None) -> Callable[..., Any]:
    """Return a method of a parameter group whose work is recorded with the group as origin.

    So is later computation until the module ends; then the origin is the root.
    """

    @wraps(method)
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        unit = group._module_fqn or ""
        now = phase or (Phase.FORWARD if group._training_state.name == "FORWARD" else Phase.PRE_BACKWARD)
        with acting_for(Origin(unit, now)):
            result = method(group, *args, **kwargs)
        if phase is not None:
            begins = method.__name__.startswith("pre_")
            note_origin(Origin(unit if begins else "", Phase.FORWARD if now is Phase.FORWARD else Phase.BACKWARD))
        return result

    return call


class _Streams:
    """A replacement of `torch.cuda` for FSDP2 with simulated streams and torch's names."""

    def __init__(self, accelerator: DryAccelerator) -> None:
        self._accelerator = accelerator
        self._made = 0
        self._of_stream = cache(lambda name: _Stream(DryStream(name, accelerator)))

    def Stream(self, priority: int = 0) -> _Stream:  # noqa: N802
        self._made += 1
        name = _STREAMS[self._made - 1] if self._made <= len(_STREAMS) else f"stream {self._made}"
        return self._of_stream(name)

    def Event(self) -> _Event:  # noqa: N802
        return _Event(self)

    def stream(self, stream: _Stream) -> AbstractContextManager[object]:
        return stream.stream.queueing()

    def current_stream(self, device: object = None) -> _Stream:
        return self._of_stream(self._accelerator.stream)

    def current_device(self) -> int:
        return 0


class _Stream:
    """A stream as a `torch.Stream`."""

    def __init__(self, stream: DryStream) -> None:
        self.stream = stream

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event(None)
        event.record(self)
        return event

    def wait_event(self, event: _Event) -> None:
        self.stream.wait(event.mark)

    def wait_stream(self, stream: _Stream) -> None:
        self.stream.wait(stream.stream.mark())


class _Event:
    """A mark as a `torch.Event`, which may be recorded again."""

    def __init__(self, streams: _Streams | None) -> None:
        self._streams = streams
        self.mark: Mark | None = None

    def record(self, stream: _Stream | None = None) -> None:
        if stream is None:
            assert self._streams is not None
            stream = self._streams.current_stream()
        self.mark = stream.stream.mark()

    def synchronize(self) -> None:
        if self.mark is not None:
            self.mark.synchronize()
