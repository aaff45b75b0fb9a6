"""The peers that this library is measured against, each used as its own documentation says.

The only file here that imports torch's sharding, and only within functions that measure it.
"""

from __future__ import annotations

import importlib
import logging
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard.bench.model import Block, Model
from fullshard.bench.trainer import Build, Trainer
from fullshard.bench.workload import OPTIMIZERS, Workload

__all__ = ["ddp", "deepspeed", "fsdp1", "fsdp2", "zero1"]


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
    """`FullyShardedDataParallel`, each block a unit. On a CPU it needs the device."""
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
    """`fully_shard`, each block a unit.

    Args:
        reshard_after_forward: whether units are freed between forward and backward; None is torch's default, all
            but the root.
        prefetch: name the next block to each, so that it is gathered early.
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


def deepspeed(stage: int) -> Build:
    """DeepSpeed's ZeRO of that stage, with the same optimizer of torch's. Its defaults clip gradients, and make buckets
    of 2 GB whatever the model; here nothing is clipped, and a bucket holds a block.
    """

    def build(workload: Workload, model: Model) -> Trainer:
        logging.disable(logging.WARNING)  # it tells its settings at length
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
