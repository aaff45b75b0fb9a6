"""Facts about a run that are known before its first step: hosts, devices, versions, and how parameters are sharded."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard.engine.registry import clean_fqn, units_in
from fullshard.engine.unit import Unit
from fullshard.errors import ConfigError
from fullshard.plan.hardware import HERE, hardware
from fullshard.policy.strategy import ShardingStrategy
from fullshard.versions import versions

_FLAGS = ("OMP_NUM_THREADS", "MALLOC_MMAP_THRESHOLD_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_VISIBLE_DEVICES")


def rank_facts(device: torch.device) -> dict[str, Any]:
    """Return the host and device of this rank."""
    is_cpu = device.type == "cpu"
    return {
        "rank": dist.get_rank() if dist.is_initialized() else 0,
        "host": socket.gethostname(),
        "device": "cpu" if is_cpu else torch.get_device_module(device).get_device_name(device),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
    }


def facts_of(model: nn.Module) -> dict[str, str]:
    """Return the facts that are listed at the end of a page: versions, topology, parameters, commit and flags."""
    units = units_in(model)
    axes = units[0].axes
    shape = " x ".join(map(str, axes.mesh.shape))
    numel = sum(param.layout.spec.numel for unit in units for param in unit.params)
    backend = dist.get_backend() if dist.is_initialized() else "none"
    return {
        **versions(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "backend": backend,
        "mesh": f"{shape} ({', '.join(axes.mesh.mesh_dim_names or ()) or 'no names'})",
        "model": type(model).__name__,
        "parameters": f"{numel:,} in {len(units)} units",
        "git commit": _commit(),
        "seed": str(torch.initial_seed()),
        **{name: value for name, value in sorted(os.environ.items()) if name.startswith(_FLAGS)},
    }


def _commit() -> str:
    with suppress(OSError, subprocess.SubprocessError):
        called = ("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
        return subprocess.run(called, capture_output=True, text=True, timeout=2, check=True).stdout.strip()
    return "none"


def strategy_of(model: nn.Module) -> str:
    """Return the name of the root's strategy, or its placements if they have no name."""
    placements = units_in(model)[0].options.placements
    named = {item.placements: item.value for item in ShardingStrategy}
    return named.get(placements) or f"parameters {placements.parameters.value}, optimizer {placements.optimizer.value}"


def link_bytes_per_s(device: torch.device) -> float | None:
    """Return the bandwidth between two ranks of this host as measured by `fullshard calibrate`; None if unknown."""
    with suppress(ConfigError):
        here = hardware(HERE)
        if here.kind == ("cpu" if device.type == "cpu" else "gpu"):
            return here.link.bytes_per_s
    return None


def units_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return the constant properties of the units."""
    return [
        {
            "fqn": unit.name,
            "nbytes": unit.unsharded_nbytes,
            "trains": unit.is_trained,
            "param_dtype": _dtype(unit, "compute"),
            "reduce_dtype": _dtype(unit, "reduce"),
        }
        for unit in units_in(model)
    ]


def _dtype(unit: Unit, which: str) -> str:
    largest = max(unit.param_groups, key=lambda param_group: param_group.plan.unsharded_nbytes, default=None)
    return "" if largest is None else str(getattr(largest.plan.contract, which)).removeprefix("torch.")


def shards_of(model: nn.Module) -> list[Mapping[str, Any]]:
    """Return the parameters and how they are sharded."""
    names = {id(param): clean_fqn(name) for name, param in model.named_parameters(remove_duplicate=False)}
    return [
        {
            "fqn": names.get(id(param.sharded)) or names.get(id(param.unsharded)) or param.fqn,
            "unit": unit.name,
            "shape": param.layout.spec.shape,
            "dtype": str(param_group.plan.contract.stored).removeprefix("torch."),
            "dim": param.layout.spec.dim,
            "world": param.layout.spec.world if param_group.plan.shards_optimizer else 1,
            "packed": not param.layout.in_place,
            "padding": param.layout.spec.padding * param_group.plan.contract.stored.itemsize,
        }
        for unit in units_in(model)
        for param_group in unit.param_groups
        for param in param_group.params
    ]
