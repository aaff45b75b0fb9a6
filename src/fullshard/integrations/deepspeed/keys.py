"""All keys of DeepSpeed configurations and how each is handled, for the reader and the documentation page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fullshard.errors import ConfigError, near_matches


class Handling(Enum):
    """How a key is handled."""

    SUPPORTED = "supported"
    IGNORED = "ignored"  # accepted without effect: it tunes something that does not exist here
    REJECTED = "rejected"  # an error, unless its value changes nothing


@dataclass(frozen=True)
class Key:
    """One key, named by its path."""

    path: str
    handling: Handling
    stated: str
    idle: tuple[Any, ...] = (None, False)

    @property
    def explanation(self) -> str:
        """A sentence about how the key is handled."""
        return f"{self.handling.value}. {self.stated}"


def _supported(path: str, stated: str) -> Key:
    return Key(path, Handling.SUPPORTED, stated)


def _ignored(why: str, *paths: str) -> list[Key]:
    return [Key(path, Handling.IGNORED, why) for path in paths]


def _rejected(path: str, instead: str, *idle: Any) -> Key:
    return Key(path, Handling.REJECTED, instead, idle or (None, False))


_ZERO = "zero_optimization."
_IN_UNITS = "The parameters of a unit are gathered and reduced together, not in buckets."
_RECORDED = "Prefetching follows the recorded order of units, one unit at a time."
_ALL = (
    # -- batch sizes
    _supported(
        "train_batch_size", ("Samples per step over all ranks; checked against the next two, or derived from them.")
    ),
    _supported("train_micro_batch_size_per_gpu", "Samples per microbatch and rank: the batch size of the loader."),
    _supported(
        "gradient_accumulation_steps",
        "Microbatches per step. Losses are divided by it. Stages 0 and 1 reduce gradients with the last microbatch "
        "only.",
    ),
    _rejected(
        "managed_gradient_accumulation",
        "Set gradient_accumulation_steps, or call engine.module.set_requires_gradient_sync yourself.",
        None,
        True,
    ),
    _supported("dataloader_drop_last", "`drop_last` of the loader that is created for `training_data`."),
    # -- optimizer, scheduler
    _supported(
        "optimizer.type",
        "Adam and AdamW (decoupled weight decay, unless `adam_w_mode` is false), Adagrad, or the class of that name in "
        "`torch.optim`. Others: pass `optimizer=` to initialize; `fullshard.optim.Muon` for Muon.",
    ),
    _supported(
        "optimizer.params",
        "Arguments of that class. `torch_adam`, `adam_w_mode` and `fp32_optimizer_states` are supported.",
    ),
    *_ignored("Torch's optimizers choose their kernels.", "optimizer.legacy_fusion"),
    *_ignored(
        "Every optimizer of torch works on sharded parameters and on the CPU.",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
    ),
    _supported(
        "scheduler.type",
        "LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR, or the class of that name in "
        "`torch.optim.lr_scheduler`.",
    ),
    _supported("scheduler.params", "Arguments of that class."),
    _supported("gradient_clipping", "The norm that gradients are clipped to, 1.0 if left out; 0 clips nothing."),
    # -- dtypes
    _supported("bf16.enabled", "Compute and gathers in bfloat16; shards, gradients in them and moments in float32."),
    _supported("bf16.check_grad_overflow", "Whether a step with infinite or NaN gradients is skipped, as by default."),
    *_ignored("Gradients are added to those of the shards as they arrive.", "bf16.immediate_grad_update"),
    _rejected(
        "bf16.bf16_master_weights_and_grads",
        "Call model.to(torch.bfloat16) and leave bf16 out: weights, gradients and moments are bfloat16 then.",
    ),
    _rejected(
        "bf16.bf16_optimizer_states", "Call model.to(torch.bfloat16) and leave bf16 out: moments follow weights."
    ),
    _supported("fp16.enabled", "Compute and gathers in float16; shards, gradients in them and moments in float32."),
    _supported("fp16.auto_cast", "Whether floating-point inputs of the model are cast to float16."),
    _supported("fp16.loss_scale", "A fixed loss scale; 0, which is the default, for one that adapts."),
    _supported("fp16.initial_scale_power", "The first adapting loss scale is 2 to this power; 16 if left out."),
    _supported("fp16.loss_scale_window", "Steps without an overflow until the loss scale doubles; 1000 if left out."),
    _supported("fp16.hysteresis", "Overflows until the loss scale is halved; 2 if left out."),
    _supported("fp16.consecutive_hysteresis", "Whether each step without an overflow restores the hysteresis."),
    _supported("fp16.min_loss_scale", "The smallest adapting loss scale; 1 if left out."),
    _rejected(
        "fp16.fp16_master_weights_and_grads",
        "Call model.half() and leave fp16 out: weights, gradients and moments are float16 then.",
    ),
    _rejected("torch_autocast.enabled", "Run the forward in torch.autocast yourself, or set bf16.enabled."),
    *_ignored("It belongs to torch_autocast.enabled.", "torch_autocast.*"),
    _supported(
        "communication_data_type",
        "The dtype for summing gradients over ranks: fp32, fp16 or bf16; the compute dtype if left out.",
    ),
    _supported("data_types.param_dtype", "Must be the dtype that bf16 or fp16 selects."),
    _rejected(
        "data_types.grad_accum_dtype",
        "Leave it out: gradients accumulate in the dtype of the shards, which is float32.",
        None,
        "fp32",
        "float32",
        "float",
        "torch.float32",
    ),
    _rejected("data_types.buffer_dtype", "Cast the buffers before initialize; they keep the dtype they have.", None),
    *_ignored("Buffers keep their dtype.", "data_types.keep_in_fp32_modules"),
    # -- reduction
    _supported("gradient_allreduce_op", "mean, or sum: then gradients are not divided by the number of ranks."),
    *_ignored(
        "float16 terms are divided by a power of two before they are summed, so sums do not overflow.",
        "prescale_gradients",
        "gradient_predivide_factor",
    ),
    *_ignored("All-gathers are always used.", "disable_allgather"),
    *_ignored("It only affects sequence parallelism, which is not supported.", "seq_parallel_communication_data_type"),
    # -- sharding
    _supported(_ZERO + "stage", "0: strategy ddp. 1: zero1. 2: zero2. 3: zero3."),
    _supported(
        _ZERO + "offload_optimizer.device",
        "cpu: the optimizer state, gradients and the shards that the optimizer updates are on the CPU, and the device "
        "has a copy of the shards in the compute dtype. none: on the device. nvme: the optimizer state is on a disk, "
        "in nvme_path, and is updated on the device in chunks.",
    ),
    _supported(
        _ZERO + "offload_param.device",
        "cpu: shards, gradients and optimizer state are only on the CPU. nvme: all of these are on a disk between "
        "uses, under stages 2 and 3.",
    ),
    _supported(_ZERO + "offload_optimizer.nvme_path", "The folder on that disk; each rank has its own scratch file."),
    _supported(_ZERO + "offload_param.nvme_path", "The same folder."),
    _supported(
        _ZERO + "offload_optimizer.ratio",
        "The share of the optimizer state on the CPU (as in Twin-Flow) or on the disk; all if left out.",
    ),
    _supported(_ZERO + "offload_optimizer.pin_memory", "Whether that CPU memory is page-locked."),
    _supported(_ZERO + "offload_param.pin_memory", "Whether that CPU memory is page-locked."),
    _supported(_ZERO + "cpu_offload", "As offload_optimizer.device: cpu."),
    _supported(_ZERO + "cpu_offload_param", "As offload_param.device: cpu."),
    _supported(_ZERO + "cpu_offload_use_pin_memory", "As offload_optimizer.pin_memory."),
    _rejected(_ZERO + "offload_optimizer.super_offload", "Leave it out: the optimizer step is torch's."),
    *_ignored(
        "Data on a disk passes through a few buffers and is read ahead and written asynchronously.",
        *(
            f"{_ZERO}offload_{which}.{key}"
            for which, keys in {
                "optimizer": (
                    "buffer_count",
                    "pipeline_read",
                    "pipeline_write",
                    "fast_init",
                    "cpuadam_cores_perc",
                ),
                "param": ("buffer_count", "buffer_size", "max_in_cpu"),
            }.items()
            for key in keys
        ),
        _ZERO + "sub_group_size",
        "aio.*",
    ),
    _supported(
        _ZERO + "zero_hpz_partition_size",
        "Under stage 3, the number of consecutive ranks that keep parameters together from forward to backward.",
    ),
    _rejected(_ZERO + "zero_quantized_weights", "Set bf16.enabled: all-gathers then communicate bfloat16."),
    _rejected(
        _ZERO + "zero_quantized_nontrainable_weights", ("Quantize frozen weights in the model; they stay quantized.")
    ),
    _rejected(_ZERO + "zero_quantized_gradients", "Set communication_data_type to bf16."),
    _rejected(_ZERO + "mics_shard_size", "Use fullshard.fully_shard with strategy='hsdp' and a mesh.", None, -1),
    _rejected(_ZERO + "mics_hierarchical_params_gather", "Use fullshard.fully_shard with strategy='hsdp' and a mesh."),
    _rejected(_ZERO + "zenflow", "Leave it out: gradients are applied in the step that computed them.", None),
    _rejected(_ZERO + "legacy_stage1", "Leave it out."),
    _rejected(_ZERO + "leaf_module", "Pass auto_wrap_policy= to initialize, which chooses the units.", None),
    _supported(
        _ZERO + "compute_grad_norm", "Whether the norm is computed if nothing is clipped, which is the default."
    ),
    _rejected(
        _ZERO + "ignore_unused_parameters",
        "Leave it true: parameters without a gradient are treated as if it were zero, under every strategy.",
        None,
        True,
    ),
    _rejected(_ZERO + "load_from_fp32_weights", "Leave it true: float32 weights are saved.", None, True),
    *_ignored(
        _IN_UNITS,
        _ZERO + "contiguous_gradients",
        _ZERO + "reduce_scatter",
        _ZERO + "reduce_bucket_size",
        _ZERO + "use_multi_rank_bucket_allreduce",
        _ZERO + "allgather_partitions",
        _ZERO + "allgather_bucket_size",
        _ZERO + "round_robin_gradients",
        _ZERO + "stage3_use_all_reduce_for_fetch_params",
        _ZERO + "stage3_allgather_sequential",
        "allgather_size",
    ),
    *_ignored("Gathers and reductions always overlap with compute.", _ZERO + "overlap_comm"),
    *_ignored("Every shard starts on a 16-byte boundary.", _ZERO + "parameter_alignment"),
    *_ignored(
        _RECORDED,
        _ZERO + "stage3_prefetch_bucket_size",
        _ZERO + "stage3_max_live_parameters",
        _ZERO + "stage3_max_reuse_distance",
        _ZERO + "log_trace_cache_warnings",
    ),
    *_ignored(
        "Small parameters are sharded, too, and share one collective.",
        _ZERO + "stage3_param_persistence_threshold",
        _ZERO + "stage3_model_persistence_threshold",
    ),
    *_ignored("Units are whole layers.", _ZERO + "stage3_module_granularity_threshold"),
    *_ignored(
        "`save_16bit_model` gathers under every stage.",
        _ZERO + "stage3_gather_16bit_weights_on_model_save",
        _ZERO + "stage3_gather_fp16_weights_on_model_save",
    ),
    *_ignored(
        "Checkpoints load at any number of ranks and under any stage.",
        _ZERO + "elastic_checkpoint",
        _ZERO + "pipeline_loading_checkpoint",
    ),
    *_ignored("Modules of the user are not replaced.", _ZERO + "memory_efficient_linear"),
    *_ignored("`module.apply` between steps sees shards.", _ZERO + "override_module_apply"),
    *_ignored("Collectives are always compared across ranks.", _ZERO + "enable_sanity_checks"),
    *_ignored("Tensors are not swapped to a disk.", _ZERO + "save_muon_momentum_buffer_in_memory"),
    # -- checkpoints
    *_ignored("Tags are always compared across ranks, and a difference is an error.", "checkpoint.tag_validation"),
    *_ignored("Each rank writes its shards to one file.", "checkpoint.parallel_write"),
    _rejected("checkpoint.load_universal", "Leave it out: checkpoints load at any number of ranks as they are."),
    _rejected("checkpoint.use_node_local_storage", "Save to a folder that all hosts share."),
    _rejected("checkpoint.writer", "Use fullshard.checkpoint.async_save to write in the background.", None),
    _rejected("datastates_ckpt", "Use fullshard.checkpoint.async_save to write in the background.", None),
    # -- reports
    _supported("steps_per_print", ("Rank 0 logs step, loss scale and learning rate every this many steps (INFO).")),
    *_ignored("Levels are set by `logging.getLogger('fullshard')`.", "log_level"),
    *_ignored("Sizes need not be multiples of a number.", "vocabulary_size"),
    _rejected("dump_state", "print(fullshard.explain(engine.module))."),
    _rejected("disable_python_gc", "Call gc.disable() in the script."),
    _rejected("wall_clock_breakdown", "Use torch.profiler, or fullshard.recording()."),
    _rejected("memory_breakdown", "print(fullshard.explain(engine.module)), or torch.profiler."),
    *(
        _rejected(f"{section}.enabled", instead)
        for section, instead in {
            "flops_profiler": "Use torch.utils.flop_counter.FlopCounterMode.",
            "comms_logger": "Use fullshard.recording(), which counts collectives and bytes.",
            "tensorboard": "Log from the script.",
            "wandb": "Log from the script.",
            "csv_monitor": "Log from the script.",
            "comet": "Log from the script.",
            "autotuning": "Set the batch sizes. Buckets do not exist.",
            "data_efficiency": "Choose samples in the script's own loader.",
            "curriculum_learning": "Choose samples in the script's own loader.",
            "hybrid_engine": "Leave it out: generate with engine.module.",
            "progressive_layer_drop": "Drop layers in the model.",
            "eigenvalue": "Leave it out: DeepSpeed has removed it, too.",
            "quantize_training": "Use torch's quantization.",
            "elasticity": "Leave it out: checkpoints load at any number of ranks.",
            "amp": "Set bf16.enabled or fp16.enabled.",
        }.items()
    ),
    *(
        _rejected(section, instead, None, {})
        for section, instead in {
            "compression_training": "Compress the model outside of training.",
            "weight_quantization": "Use torch's quantization.",
            "sparse_attention": "Use torch.nn.attention.",
            "pipeline": "Pipeline parallelism is not supported.",
            "nebula": "Use fullshard.checkpoint.async_save.",
        }.items()
    ),
    _rejected("sparse_gradients", "Leave it out: gradients are dense."),
    _rejected("compile.deepcompile", "Use torch.compile on the model."),
    _rejected("tensor_parallel.autotp_size", "Use torch.distributed.tensor.parallel with fully_shard.", None, 0, 1),
    _rejected("sequence_parallel_size", "Sequence parallelism is not supported.", None, 1),
    _rejected("expert_parallel", "Expert parallelism is not supported.", None, {}),
    *_ignored("All ranks are data parallel.", "data_parallel_size", "use_data_before_expert_parallelism"),
    # -- keys of sections that are off
    *_ignored("It only affects a section that is not supported.", "timers.*"),
    *(
        _rejected(f"activation_checkpointing.{key}", "Use torch.utils.checkpoint in the model.", None, False)
        for key in (
            "partition_activations",
            "contiguous_memory_optimization",
            "cpu_checkpointing",
            "number_checkpoints",
            "synchronize_checkpoint_boundary",
            "profile",
        )
    ),
)


def table() -> list[tuple[str, str, str]]:
    """Return the rows of the documentation page: the keys, how they are handled, and an explanation."""
    found: dict[tuple[Handling, str], list[str]] = {}
    for key in _ALL:
        found.setdefault((key.handling, key.stated), []).append(f"`{key.path}`")
    rows = [(", ".join(keys), handling.value, stated) for (handling, stated), keys in found.items()]
    return sorted(rows, key=lambda row: [handling.value for handling in Handling].index(row[1]))


KEYS: Mapping[str, Key] = {key.path: key for key in _ALL}

# Older or shorter names of sections and keys.
_ALIASES = {
    "bfloat16": "bf16",
    **{
        f"{_ZERO}{name}": f"{_ZERO}stage3_{name}"
        for name in (
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
            "gather_16bit_weights_on_model_save",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
        )
    },
}


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `config` by the path of their key, after checking that all keys are known and supported.

    Raises:
        ConfigError: A key is unknown or not supported, or has a placeholder value that another library should have
            replaced.
    """
    found: dict[str, Any] = {}
    for path, value in leaves(config):
        key = check(path, value)
        if key.handling is Handling.SUPPORTED:
            found[key.path] = value
    return found


def check(path: str, value: Any) -> Key:
    """Return the key at `path` after checking its value."""
    key = _find(path)
    if key is None:
        raise ConfigError(
            f"the DeepSpeed configuration has the unknown key {path!r}.{near_matches(path, KEYS)} Remove it, or see "
            "docs/deepspeed.md for the supported keys."
        )
    if "auto" in (value.values() if isinstance(value, Mapping) else (value,)):
        raise ConfigError(
            f"{path} has the value 'auto', which only a trainer around DeepSpeed can replace. Set a value."
        )
    if key.handling is Handling.REJECTED and not any(value == item and type(value) is type(item) for item in key.idle):
        raise ConfigError(f"{path}={value!r} in the DeepSpeed configuration is not supported. {key.stated}")
    return key


def leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each key. Arguments of optimizers and schedulers are not split."""
    off = section.get("enabled") is False
    for name, value in section.items():
        path = f"{prefix}{name}"
        path = _ALIASES.get(path, path)
        if path in KEYS:
            yield path, value
        elif isinstance(value, Mapping | None) and any(known.startswith(f"{path}.") for known in KEYS):
            yield from leaves(value or {}, f"{path}.")
        elif not (off and f"{prefix}enabled" in KEYS):  # keys of a disabled section have no effect
            yield path, value


def _find(path: str) -> Key | None:
    section = path.rpartition(".")[0]
    return KEYS.get(path) or KEYS.get(f"{section}.*")
