"""Training with other parallelisms and without sharding, as a reference for sharded training.

Tensor, context and expert parallelism sum in a different order than one process, so gradients differ by rounding.
Therefore two comparisons are made. The ranks of the mesh, without its pipeline, train with unsharded parameters on each
data-parallel rank, and a loop averages gradients in the engine's order. Sharded training must give the same bits. The
first step of unsharded training is compared with the plain process, up to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fullshard.errors import ConfigError
from fullshard.optim.clipping import total_norm
from fullshard.testing.parity.cases import Case
from fullshard.testing.parity.context import attention_over
from fullshard.testing.parity.difference import Compared, Kind, Tolerance
from fullshard.testing.parity.plain import mean_of
from fullshard.testing.parity.recipe import Recipe
from fullshard.testing.parity.stages import clip, find_cut
from fullshard.testing.parity.tensor import cut as cut_matrices
from fullshard.testing.parity.trace import Step, Trace

_ROUNDING = Tolerance(of_largest=1e-5)  # float32 sums in a different order


class Divided:
    """The meshes of a case, and the user's model divided over them."""

    def __init__(self, recipe: Recipe, case: Case) -> None:
        self._recipe, self.case = recipe, case
        axes = case.axes
        self.mesh = case.mesh()
        self.sparse = case.expert_mesh() if axes.ep > 1 else None
        self.context = case.context_mesh() if axes.cp > 1 else None
        self.rank = dist.get_rank() % (case.ranks * axes.cp) // axes.cp  # among the data-parallel ranks
        self.context_rank = dist.get_rank() % axes.cp

    def model(self) -> nn.Module:
        """Return a new model with experts and matrices divided over the ranks."""
        recipe, model = self._recipe.parallelism, self._recipe.model()
        if self.sparse is not None and recipe.experts is not None:
            recipe.experts(model, self.sparse["ep"])
            if not any(is_expert(param) for param in model.parameters()):
                raise ConfigError(
                    f"ep={self.case.axes.ep}: the function that places experts set no parameter of "
                    f"{type(model).__name__} to a DTensor on its mesh. Set them as in experts.weight = "
                    "nn.Parameter(distribute_tensor(experts.weight.detach(), mesh, [Shard(0)]))."
                )
        if self.case.axes.tp > 1:
            cut_matrices(model, recipe.tp_plan, self.mesh["tp"])
        return model

    @property
    def attention(self) -> AbstractContextManager[None]:
        """Return the context within which steps run."""
        return nullcontext() if self.context is None else attention_over(self.context)


def is_expert(param: Tensor) -> bool:
    """Return True if expert parallelism divides the parameter."""
    return isinstance(param, DTensor) and "ep" in (param.device_mesh.mesh_dim_names or ())


def train_unsharded(recipe: Recipe, case: Case, trace: Trace, plain: Trace) -> Compared:
    """Train on this rank without sharding, write the results to `trace`, and compare the first step with `plain`."""
    divided = Divided(recipe, case)
    with divided.attention:
        cut = find_cut(recipe, divided.model())
        means = _Means(recipe, divided, divided.model())
        optimizer = recipe.optimizer_of(means.model)
        params = dict(means.model.named_parameters())
        compared = Compared(dist.get_rank(), _ROUNDING)
        _write(trace, 0, Step(_wholes(params)))
        for number in range(1, recipe.steps + 1):
            losses = means.compute(number)
            gradients = {name: param.grad for name, param in params.items()}
            norm = cut.norm({name: means.placed(grad) for name, grad in gradients.items()}, total_norm)
            step = Step({}, _wholes(gradients), norm, losses)
            clip([_local(grad) for grad in gradients.values() if grad is not None], norm, recipe.clip)
            optimizer.step()
            optimizer.zero_grad()
            step.parameters.update(_wholes(params))
            _write(trace, number, step)
            if number == 1:
                _compare(compared, step, plain.read(1))
        dist.barrier()  # every rank's trace is complete
    return compared


class _Means:
    """Gradients averaged over all data, in the engine's order."""

    def __init__(self, recipe: Recipe, divided: Divided, model: nn.Module) -> None:
        self.model, self._recipe, self._divided = model, recipe, divided
        self._params = [param for param in model.parameters() if param.requires_grad]
        self._group = divided.case.data_mesh().get_group()
        self._experts: tuple[dist.ProcessGroup, DeviceMesh] | None = None
        if divided.case.axes.ep > 1:
            self._experts = divided.case.same_experts_mesh().get_group(), divided.case.expert_norm_mesh()

    def compute(self, step: int) -> dict[int, Tensor]:
        """Write the averages to the gradients of the parameters and return all losses, by microbatch number."""
        recipe, case = self._recipe, self._divided.case
        plans = [recipe.microbatches(step, rank, case.ranks) for rank in range(case.ranks)]
        losses: dict[int, Tensor] = {}
        totals: list[Tensor | None] = [None for _ in self._params]
        for together in zip(*plans, strict=True):
            found = torch.stack([recipe.backward(self.model, number) for number in together[self._divided.rank]])
            gathered = torch.stack(_gathered(found, self._group)).unflatten(0, (case.ranks, case.axes.cp))
            for numbers, of_rank in zip(together, gathered, strict=True):
                losses.update(zip(numbers, of_rank.T if case.axes.cp > 1 else of_rank[0], strict=True))
            for i, param in enumerate(self._params):
                mean, earlier = self._mean(param), totals[i]
                if mean is not None:
                    totals[i] = mean if earlier is None else earlier.add_(mean)
        for param, total in zip(self._params, totals, strict=True):
            if total is None or not isinstance(param, DTensor):
                param.grad = total
            else:
                param.grad = DTensor.from_local(total, param.device_mesh, param.placements)
        return losses

    def _mean(self, param: Tensor) -> Tensor | None:
        """Return the mean of a parameter's gradient, and remove the gradient."""
        grad, param.grad = param.grad, None
        case = self._divided.case
        if self._experts is not None and is_expert(param):
            terms = _gathered(_local(torch.zeros_like(param) if grad is None else grad), self._experts[0])
            return mean_of(terms, case.shards // case.axes.ep, case.ranks * case.axes.cp)
        if grad is None:
            return None
        if isinstance(param, DTensor) and isinstance(grad, DTensor):  # autograd may have changed the placements
            grad = grad.redistribute(placements=param.placements)
        return mean_of(_gathered(_local(grad), self._group), case.shards)

    def placed(self, grad: Tensor | None) -> Tensor | None:
        """Return a mean as a `DTensor` that is replicated over data ranks, to compute its norm."""
        if grad is None:
            return None
        if self._experts is not None and is_expert(grad):
            return DTensor.from_local(_local(grad), self._experts[1], [*cast(DTensor, grad).placements, Replicate()])
        mesh = self._divided.mesh
        if isinstance(grad, DTensor):
            return DTensor.from_local(_local(grad), mesh["tp", "shard"], [*grad.placements, Replicate()])
        return DTensor.from_local(grad, mesh["shard"], [Replicate()])


def _gathered(local: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Gather the tensors of all ranks of the group, in rank order."""
    of_ranks = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(of_ranks, local.contiguous(), group=group)
    return of_ranks


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _wholes(tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """Return detached copies of the tensors, full over the axes other than data."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        if tensor is not None
        else None
        for name, tensor in tensors.items()
    }


def _write(trace: Trace, number: int, step: Step) -> None:
    if dist.get_rank() == 0:
        trace.write(number, step)


def _compare(compared: Compared, step: Step, expected: Step) -> None:
    for number, loss in expected.losses.items():
        compared.add(Kind.LOSS, str(number), 1, step.losses[number].mean(), loss)  # mean over the parts of a sequence
    for name, gradient in expected.gradients.items():
        compared.add(Kind.GRADIENT, name, 1, step.gradients.get(name), gradient)
    compared.add(Kind.GRADIENT_NORM, "", 1, step.norm, expected.norm)
