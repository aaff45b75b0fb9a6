"""Names of DeepSpeed that have no counterpart. For each name, an error states the alternative."""

from __future__ import annotations

from fullshard.errors import ConfigError


class MissingNameError(ConfigError, AttributeError):
    """A name of DeepSpeed that has no counterpart. It is also an `AttributeError`, so `hasattr` returns False."""


_INSTEAD = {
    "PipelineEngine": "Stages of torch.distributed.pipelining can be sharded by fullshard.fully_shard.",
    "PipelineModule": "Stages of torch.distributed.pipelining can be sharded by fullshard.fully_shard.",
    "autotuning": "`make bench` measures strategies in turn, and `fullshard plan` predicts them.",
    "compression": "Quantize the model with another library, before or after training.",
    "inference": "Export the weights (fullshard checkpoint export), and serve them with an inference engine.",
    "init_inference": "Export the weights (fullshard checkpoint export), and serve them with an inference engine.",
    "module_inject": "Kernels are not replaced.",
    "moe": "Experts on an axis of a mesh can be sharded by fullshard.fully_shard; see docs/tensor_parallel.md.",
    "pipe": "Stages of torch.distributed.pipelining can be sharded by fullshard.fully_shard.",
    "profiling": "torch.profiler, and fullshard.recording for collectives, measure steps.",
    "runtime": "It is an internal part of DeepSpeed. The engine that initialize returns has the documented methods.",
    "sequence": "Use torch's context parallelism.",
    "tp_model_init": "torch.distributed.tensor.parallel places parameters, and fullshard.fully_shard takes them.",
}


def missing(module: str, name: str) -> MissingNameError:
    """Return the error for `name`, which was looked up in DeepSpeed's `module`."""
    whole = f"{module}.{name}"
    instead = _INSTEAD.get(name, "docs/deepspeed.md lists what there is.")
    return MissingNameError(f"{whole} has no counterpart in fullshard.integrations.deepspeed. {instead}")
