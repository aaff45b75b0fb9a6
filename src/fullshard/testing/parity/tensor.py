"""Tensor parallelism, by a plan for torch's `parallelize_module` or by a transformers model's own plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from fullshard.errors import ConfigError
from fullshard.testing.parity.parallel import TensorParallelPlan

_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}


def cut(model: nn.Module, plan_of: TensorParallelPlan | None, mesh: DeviceMesh) -> None:
    """Shard matrices of `model` over the 1-D `mesh`, by `plan_of(model)` or the model's own tensor-parallel plan."""
    plan = _own_plan(model) if plan_of is None else plan_of(model)
    if not isinstance(plan, Mapping) or not plan:
        raise ConfigError(
            f"the tensor parallel plan of {type(model).__name__} is {plan!r}. It must be a dict from module names "
            "(with * as a wildcard) to styles of torch.distributed.tensor.parallel."
        )
    unknown = {name: style for name, style in plan.items() if not isinstance(style, ParallelStyle)}
    if unknown:
        name, style = next(iter(unknown.items()))
        raise ConfigError(
            f"the tensor parallel plan of {type(model).__name__} has {style!r} for {name}. Supported: "
            f"{', '.join(_STYLES)} of transformers' plans, and styles of torch.distributed.tensor.parallel. Pass a "
            "function of the model that returns such a plan as --tp-plan."
        )
    parallelize_module(model, mesh, dict(plan))


def _own_plan(model: nn.Module) -> dict[str, Any]:
    """Return the tensor-parallel plan of a transformers model."""
    config, prefix = getattr(model, "config", None), getattr(model, "base_model_prefix", "")
    of_base: Any = getattr(config, "base_model_tp_plan", None)
    if not of_base:
        raise ConfigError(
            f"{type(model).__name__} has no tensor parallel plan (config.base_model_tp_plan, as in transformers' "
            "models). Pass --tp-plan, a function of the model that returns a plan for torch's parallelize_module."
        )
    below = f"{prefix}." if hasattr(model, prefix) else ""
    of_head: Any = getattr(model, "_tp_plan", None)
    named = {f"{below}{name}": style for name, style in of_base.items()} | (of_head or {})
    return {name: _STYLES[style]() if style in _STYLES else style for name, style in named.items()}
