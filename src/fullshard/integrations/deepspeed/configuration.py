"""Conversion of a DeepSpeed configuration into values for this engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from fullshard.errors import ConfigError
from fullshard.integrations.deepspeed.keys import KEYS, check, leaves, settings_of
from fullshard.integrations.deepspeed.loss_scale import LossScale
from fullshard.policy.arguments import check_type
from fullshard.policy.offload import Offload, OffloadPolicy
from fullshard.policy.precision import MixedPrecisionPolicy
from fullshard.regular_files import CONFIG_BYTES, UNPARSED, read_text

STRATEGIES = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
_DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), torch.float32),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), torch.float16),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
}


@dataclass(frozen=True)
class ConfigPart:
    """An optimizer or a scheduler in a configuration."""

    type: str
    params: Mapping[str, Any]


@dataclass(frozen=True)
class BatchSizes:
    """Batch sizes: samples per step over all ranks, samples per microbatch and rank, and microbatches per step."""

    step: int
    microbatch: int
    microbatches: int

    @classmethod
    def resolve(cls, step: int | None, microbatch: int | None, microbatches: int | None, world: int) -> BatchSizes:
        """Return all three sizes, derived from those that are given.

        Raises:
            ConfigError: Too few are given, one is not a positive number, or they are inconsistent.
        """
        given = {
            "train_batch_size": step,
            "train_micro_batch_size_per_gpu": microbatch,
            "gradient_accumulation_steps": microbatches,
        }
        odd = {
            name: item for name, item in given.items() if item is not None and not (type(item) is int and item > 0)
        }  # a bool is an int
        if odd:
            raise ConfigError(f"{odd} in the DeepSpeed configuration: batch sizes must be positive integers.")
        if step is None and microbatch is None:
            raise ConfigError(
                "the DeepSpeed configuration has neither train_batch_size nor train_micro_batch_size_per_gpu. "
                "Set one of them."
            )
        if microbatches is None:
            microbatches = step // (microbatch * world) if step is not None and microbatch is not None else 1
        if microbatch is None:
            assert step is not None
            microbatch = step // (microbatches * world)
        if step is None:
            step = microbatch * microbatches * world
        if step != microbatch * microbatches * world:
            raise ConfigError(
                f"the DeepSpeed configuration has { ({k: v for k, v in given.items() if v is not None}) }, but "
                f"{step} is not {microbatch} x {microbatches} x {world} ranks. Set two of the three; the other follows."
            )
        return cls(step, microbatch, microbatches)


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """The settings of this engine that follow from a DeepSpeed configuration."""

    sizes: BatchSizes
    stage: int = 0
    dtype: torch.dtype = torch.float32  # of compute
    communication: torch.dtype = torch.float32  # of gradient sums over ranks
    casts_inputs: bool = False
    clips_to: float = 1.0
    skips_overflows: bool = False
    always_norm: bool = True
    averages: bool = True
    together: int | None = None  # number of consecutive ranks that keep secondary shards from forward to backward
    offload: OffloadPolicy = field(default_factory=OffloadPolicy)
    optimizer: ConfigPart | None = None
    scheduler: ConfigPart | None = None
    loss_scale: LossScale = field(default_factory=LossScale)
    drops_last: bool = False
    steps_per_print: int | None = None

    @property
    def strategy(self) -> str:
        """The strategy that corresponds to the ZeRO stage."""
        return STRATEGIES[self.stage]

    @property
    def low_precision(self) -> bool:
        """True if compute uses 16 bits."""
        return self.dtype is not torch.float32

    def policy(self, *, root: bool) -> MixedPrecisionPolicy:
        """Return the dtypes of a unit. Only the root casts inputs, like DeepSpeed's `auto_cast`."""
        return MixedPrecisionPolicy(
            param_dtype=self.dtype if self.low_precision else None,
            reduce_dtype=self.communication if self.low_precision else None,
            cast_forward_inputs=root and self.casts_inputs,
        )


def read(config: str | PathLike[str] | Mapping[str, Any], world: int) -> Configuration:
    """Read a DeepSpeed configuration, a JSON file or a dict, for `world` ranks.

    Raises:
        ConfigError: It cannot be read, or a key is not supported. The message names the key.
    """
    found = settings_of(_loaded(config))
    zero = "zero_optimization."
    stage = found.get(zero + "stage", 0)
    if type(stage) is not int or stage not in STRATEGIES:
        raise ConfigError(f"zero_optimization.stage={stage!r}: expected 0, 1, 2 or 3.")
    dtype = _compute_dtype(found)
    communication = found.get("communication_data_type")
    if communication is not None and dtype is torch.float32 and _dtype(communication) is not torch.float32:
        raise ConfigError(
            f"communication_data_type={communication!r} with float32 compute is not supported: gradients are then "
            "summed in float32. Set bf16.enabled or fp16.enabled, or leave it out."
        )
    skips = stage > 0 or dtype is torch.float16
    if dtype is torch.bfloat16:
        skips = bool(found.get("bf16.check_grad_overflow", True))
    return Configuration(
        sizes=BatchSizes.resolve(
            found.get("train_batch_size"),
            found.get("train_micro_batch_size_per_gpu"),
            found.get("gradient_accumulation_steps"),
            world,
        ),
        stage=stage,
        dtype=dtype,
        communication=dtype if communication is None else _dtype(communication),
        casts_inputs=dtype is torch.float16 and bool(found.get("fp16.auto_cast", False)),
        clips_to=_number(found, "gradient_clipping", 1.0),
        skips_overflows=skips,
        always_norm=bool(found.get(zero + "compute_grad_norm", True)),
        averages=_averages(found),
        together=_together(found.get(zero + "zero_hpz_partition_size", 1), stage),
        offload=_offload(found),
        optimizer=_part(found, "optimizer"),
        scheduler=_part(found, "scheduler"),
        loss_scale=_loss_scale(found) if dtype is torch.float16 else LossScale(),
        drops_last=bool(found.get("dataloader_drop_last", False)),
        steps_per_print=found.get("steps_per_print"),
    )


def explain_config(config: str | PathLike[str] | Mapping[str, Any]) -> str:
    """Return a line for each key of a DeepSpeed configuration with its effect, or the reason why it has none.

    Args:
        config: A `ds_config.json`, or its contents.

    Raises:
        ConfigError: A key is not supported. The message names it.
    """
    loaded = _loaded(config)
    lines = [f"{path} = {json.dumps(item)}: {check(path, item).explanation}" for path, item in leaves(loaded)]
    if "gradient_clipping" not in loaded:
        lines.append(f"gradient_clipping is not set, so 1.0 is used: {KEYS['gradient_clipping'].explanation}")
    return "\n".join(lines)


def _loaded(config: str | PathLike[str] | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    check_type("config", config, (str, PathLike), "a dict, or the path of a JSON file")
    path = Path(config)
    try:
        loaded = json.loads(read_text(path, limit=CONFIG_BYTES))
    except OSError as error:
        raise ConfigError(
            f"the DeepSpeed configuration {path} cannot be read ({error.strerror}). Pass the path of a JSON file, or a "
            "dict."
        ) from error
    except UNPARSED as error:
        raise ConfigError(
            f"the DeepSpeed configuration {path} is not JSON ({error}). DeepSpeed also accepts HJSON: remove comments "
            "and trailing commas."
        ) from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"the DeepSpeed configuration {path} holds a {type(loaded).__name__}, not an object of keys.")
    return loaded


def _compute_dtype(found: Mapping[str, Any]) -> torch.dtype:
    bf16, fp16 = bool(found.get("bf16.enabled", False)), bool(found.get("fp16.enabled", False))
    if bf16 and fp16:
        raise ConfigError("bf16.enabled and fp16.enabled are both set. Choose one.")
    dtype = torch.bfloat16 if bf16 else torch.float16 if fp16 else torch.float32
    wanted = found.get("data_types.param_dtype")
    if wanted is not None and _dtype(wanted) is not dtype:
        raise ConfigError(
            f"data_types.param_dtype={wanted!r}, but the compute dtype is {dtype}. Set only bf16 or fp16."
        )
    return dtype


def _dtype(name: Any) -> torch.dtype:
    if not isinstance(name, str) or name.lower() not in _DTYPES:
        raise ConfigError(f"{name!r} in the DeepSpeed configuration is not a dtype. Write fp32, fp16 or bf16.")
    return _DTYPES[name.lower()]


def _number(found: Mapping[str, Any], key: str, default: float) -> float:
    value = found.get(key, default)
    if type(value) not in (int, float) or not value >= 0:
        raise ConfigError(f"{key}={value!r} in the DeepSpeed configuration: expected a number of 0 or more.")
    return float(value)


def _averages(found: Mapping[str, Any]) -> bool:
    operation = str(found.get("gradient_allreduce_op", "mean")).lower()
    if operation not in ("mean", "sum"):
        raise ConfigError(f"gradient_allreduce_op={operation!r}: choose mean or sum.")
    return operation == "mean"


def _together(size: Any, stage: int) -> int | None:
    if size in (0, 1, None):
        return None
    if type(size) is not int or size < 0 or stage != 3:
        raise ConfigError(
            f"zero_hpz_partition_size={size!r} under stage {stage}: expected a number of consecutive ranks and stage "
            "3. Leave it out under other stages, where parameters stay unsharded from forward to backward."
        )
    return size


def _offload(found: Mapping[str, Any]) -> OffloadPolicy:
    """Return the offload policy of the shards and the optimizer state."""
    zero = "zero_optimization."
    devices, pins = {}, found.get(zero + "cpu_offload_use_pin_memory", True)
    for which, old in (("offload_optimizer", "cpu_offload"), ("offload_param", "cpu_offload_param")):
        device = found.get(f"{zero}{which}.device") or "none"
        if device not in ("none", "cpu", "nvme"):
            raise ConfigError(f"{zero}{which}.device={device!r} is not supported. Expected cpu, nvme or none.")
        devices[which] = "cpu" if device == "none" and found.get(zero + old) else device
        pins = found.get(f"{zero}{which}.pin_memory", pins)
    ratio = _number(found, zero + "offload_optimizer.ratio", 1)
    share = 0.0 if devices["offload_optimizer"] == "none" else float(ratio)
    folders = {found.get(f"{zero}{which}.nvme_path") or None for which in devices if devices[which] == "nvme"}
    if folders:
        if len(folders) > 1 or None in folders or "cpu" in devices.values():
            raise ConfigError(
                f"{zero}offload_optimizer.device={devices['offload_optimizer']!r} and "
                f"offload_param.device={devices['offload_param']!r} with nvme_path={', '.join(map(str, folders))}: "
                "both must use one folder on a local disk of each host, and neither may use the CPU."
            )
        shards = float(devices["offload_param"] == "nvme")
        return Offload(optimizer={"disk": share}, parameters={"disk": shards}, folder=folders.pop())
    if "cpu" not in devices.values():
        return OffloadPolicy()
    parameters = 1.0 if devices["offload_param"] == "cpu" else 0.0
    return Offload(optimizer={"cpu": share}, parameters={"cpu": parameters}, pin_memory=bool(pins))


def _part(found: Mapping[str, Any], section: str) -> ConfigPart | None:
    kind = found.get(f"{section}.type")
    if kind is None:
        return None
    return ConfigPart(kind, dict(found.get(f"{section}.params") or {}))


def _loss_scale(found: Mapping[str, Any]) -> LossScale:
    fixed = _number(found, "fp16.loss_scale", 0)
    if fixed:
        return LossScale(scale=fixed)
    window, smallest = found.get("fp16.loss_scale_window", 1000), found.get("fp16.min_loss_scale", 1)
    if not (window > 0 and smallest > 0):
        raise ConfigError(
            f"fp16 has loss_scale_window={window}, min_loss_scale={smallest}: both must be greater than 0."
        )
    return LossScale(
        scale=2.0 ** found.get("fp16.initial_scale_power", 16),
        adapts=True,
        window=window,
        hysteresis=found.get("fp16.hysteresis", 2),
        restores_hysteresis=bool(found.get("fp16.consecutive_hysteresis", False)),
        smallest=float(smallest),
    )
