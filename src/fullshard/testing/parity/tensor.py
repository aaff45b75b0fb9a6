"""A mesh with tensor parallelism: what its ranks train where nothing is sharded, which sharding must not change.

Tensor parallelism cuts matrix products, and adds up in another order than one process: gradients differ by rounding. So
there are two comparisons. The ranks of a mesh train with every parameter whole on each rank of data parallelism, and
gradients averaged in the engine's order by a loop: sharded training must have these bits. And of that training itself
the first step is held to the plain process, within rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from fullshard.errors import ConfigError
from fullshard.optim.clipping import total_norm
from fullshard.testing.parity.cases import Case
from fullshard.testing.parity.difference import Compared, Kind, Tolerance
from fullshard.testing.parity.plain import mean_of
from fullshard.testing.parity.recipe import Recipe
from fullshard.testing.parity.trace import Step, Trace

__all__ = ["cut", "train_unsharded"]

_ROUNDING = Tolerance(of_largest=1e-5)  # sums of float32 in another order

_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}


def cut(model: nn.Module, recipe: Recipe, mesh: DeviceMesh) -> None:
    """Divide matrices of `model` over the one axis of `mesh`, as the recipe's plan says, or its own.

    Raises:
        ConfigError: there is no plan, or it has an entry that is not known here.
    """
    plan = _own_plan(model) if recipe.tp_plan is None else recipe.tp_plan(model)
    if not isinstance(plan, Mapping) or not plan:
        raise ConfigError(
            f"the plan of tensor parallelism of {type(model).__name__} is {plan!r}. It must be a dict from names of "
            "modules (with * for any) to styles of torch.distributed.tensor.parallel."
        )
    unknown = {name: style for name, style in plan.items() if not isinstance(style, ParallelStyle)}
    if unknown:
        name, style = next(iter(unknown.items()))
        raise ConfigError(
            f"the plan of tensor parallelism of {type(model).__name__} has {style!r} for {name}. Known are "
            f"{', '.join(_STYLES)}, of transformers' plans, and styles of torch.distributed.tensor.parallel: pass a "
            "plan of these as --tp-plan, a function of the model."
        )
    parallelize_module(model, mesh, dict(plan))


def _own_plan(model: nn.Module) -> dict[str, Any]:
    """The plan that comes with a model of transformers."""
    config, prefix = getattr(model, "config", None), getattr(model, "base_model_prefix", "")
    of_base: Any = getattr(config, "base_model_tp_plan", None)
    if not of_base:
        raise ConfigError(
            f"{type(model).__name__} has no plan of tensor parallelism (config.base_model_tp_plan, as transformers' "
            "models have). Pass --tp-plan, a function of the model that returns one for parallelize_module of torch."
        )
    below = f"{prefix}." if hasattr(model, prefix) else ""
    of_head: Any = getattr(model, "_tp_plan", None)
    named = {f"{below}{name}": style for name, style in of_base.items()} | (of_head or {})
    return {name: _STYLES[style]() if style in _STYLES else style for name, style in named.items()}


def train_unsharded(recipe: Recipe, case: Case, trace: Trace, plain: Trace) -> Compared:
    """Train on this rank with nothing sharded, and leave the numbers in `trace`; the first step beside `plain`."""
    mesh = init_device_mesh("cpu", (case.tp, case.ranks), mesh_dim_names=("tp", "data"))
    model = recipe.model()
    cut(model, recipe, mesh["tp"])
    optimizer = recipe.optimizer_of(model)
    params = dict(model.named_parameters())
    compared = Compared(dist.get_rank(), _ROUNDING)
    _write(trace, 0, Step(_wholes(params)))
    for number in range(1, recipe.steps + 1):
        losses = _take_gradients(recipe, model, mesh["data"], case, number)
        gradients = {name: param.grad for name, param in params.items()}
        norm = total_norm([_as_placed(grad, mesh) for grad in gradients.values() if grad is not None])
        step = Step({}, _wholes(gradients), norm, losses)
        if recipe.clip:
            coefficient = torch.clamp(recipe.clip / (norm + 1e-6), max=1.0)
            for grad in gradients.values():
                if grad is not None:
                    _local(grad).mul_(coefficient)
        optimizer.step()
        optimizer.zero_grad()
        step.parameters.update(_wholes(params))
        _write(trace, number, step)
        if number == 1:
            _compare(compared, step, plain.read(1))
    dist.barrier()  # every rank's trace is whole
    return compared


def _take_gradients(recipe: Recipe, model: nn.Module, data: DeviceMesh, case: Case, step: int) -> dict[int, Tensor]:
    """Have the means over all data in the parameters' gradients; the losses of all, by number of the microbatch."""
    plans = [recipe.microbatches(step, rank, case.ranks) for rank in range(case.ranks)]
    losses: dict[int, Tensor] = {}
    params = [param for param in model.parameters() if param.requires_grad]
    totals: list[Tensor | None] = [None for _ in params]
    for together in zip(*plans, strict=True):
        found = torch.stack([recipe.backward(model, number) for number in together[data.get_local_rank()]])
        for rank, of_rank in enumerate(_gathered(found, data)):
            losses.update(zip(together[rank], of_rank, strict=True))
        for i, param in enumerate(params):
            if param.grad is not None:
                mean = mean_of(_gathered(_local(_placed_like(param, param.grad)), data), case.shards)
                earlier = totals[i]
                totals[i] = mean if earlier is None else earlier.add_(mean)
                param.grad = None
    for param, total in zip(params, totals, strict=True):
        if total is not None:
            param.grad = _wrapped_like(param, total)
    return losses


def _gathered(mine: Tensor, data: DeviceMesh) -> list[Tensor]:
    """The tensors of all ranks of the axis, in order."""
    of_ranks = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(data.size())]
    dist.all_gather(of_ranks, mine.contiguous(), group=data.get_group())
    return of_ranks


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _placed_like(param: Tensor, grad: Tensor) -> Tensor:
    """`grad`, which autograd may have left in other placements, in those of its parameter."""
    if isinstance(param, DTensor) and isinstance(grad, DTensor) and grad.placements != param.placements:
        return grad.redistribute(placements=param.placements)
    return grad


def _wrapped_like(param: Tensor, local: Tensor) -> Tensor:
    return DTensor.from_local(local, param.device_mesh, param.placements) if isinstance(param, DTensor) else local


def _as_placed(grad: Tensor, mesh: DeviceMesh) -> DTensor:
    """`grad` as the gradient of a parameter that is whole on all ranks of data parallelism."""
    if isinstance(grad, DTensor):
        return DTensor.from_local(_local(grad), mesh, [*grad.placements, Replicate()])
    return DTensor.from_local(grad, mesh["data"], [Replicate()])


def _wholes(tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """Copies, over the axis of tensor parallelism."""
    return {
        name: (it.full_tensor() if isinstance(it, DTensor) else it).detach().clone() if it is not None else None
        for name, it in tensors.items()
    }


def _write(trace: Trace, number: int, step: Step) -> None:
    if dist.get_rank() == 0:
        trace.write(number, step)


def _compare(compared: Compared, step: Step, expected: Step) -> None:
    for number, loss in expected.losses.items():
        compared.add(Kind.LOSS, str(number), 1, step.losses[number], loss)
    for name, gradient in expected.gradients.items():
        compared.add(Kind.GRADIENT, name, 1, step.gradients.get(name), gradient)
    compared.add(Kind.GRADIENT_NORM, "", 1, step.norm, expected.norm)
