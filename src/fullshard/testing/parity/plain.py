"""The plain process: unsharded PyTorch that does the work of all ranks, one after the other.

Each rank's microbatches are computed by a separate copy of the model, because ranks may differ in state other than
parameters, such as the running averages of batch norms. The engine is not used: only autograd, a loop that sums
gradients, and an optimizer of torch. The order of additions is that of the engine, because every order rounds
differently. Gradients are added in rank order (on a mesh of two axes, first within each replica) and divided once
(float16 is first divided by the necessary power of two). The norm is computed from the norms of the ranks' parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from math import ceil, log2

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from fullshard.errors import ConfigError
from fullshard.optim.clipping import part_of_rank
from fullshard.testing.parity.recipe import Recipe, trained
from fullshard.testing.parity.stages import find_cut
from fullshard.testing.parity.trace import Step, Trace


def train_plain(recipe: Recipe, ranks: int, shards: int, trace: Trace) -> None:
    """Do the training of `ranks` ranks, with `shards` ranks on the shard axis, and write the results to `trace`."""
    plain = Plain(recipe, ranks, shards)
    trace.write(0, Step(plain.parameters))
    for number in range(1, recipe.steps + 1):
        trace.write(number, plain.step(number))


class Plain:
    """The model that the optimizer updates, and copies for compute, one for each rank."""

    def __init__(self, recipe: Recipe, ranks: int, shards: int) -> None:
        self._recipe = recipe
        self._shards = shards
        self._model = recipe.model()
        self._stages = find_cut(recipe, recipe.model())
        self._optimizer = recipe.optimizer_of(self._model)
        self._copies = [recipe.computing(recipe.model()) for _ in range(ranks)]

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters by FQN."""
        return {name: param.detach() for name, param in self._model.named_parameters()}

    def step(self, number: int) -> Step:
        """Run one training step, counted from 1."""
        losses: dict[int, Tensor] = {}
        for copy in self._copies:
            with torch.no_grad():
                for param, copied in zip(self._model.parameters(), copy.parameters(), strict=True):
                    copied.copy_(param)
        plans = [self._recipe.microbatches(number, rank, len(self._copies)) for rank in range(len(self._copies))]
        for numbers in zip(*plans, strict=True):  # each rank's microbatches until a reduction
            terms = [self._gradients(copy, local, losses) for copy, local in zip(self._copies, numbers, strict=True)]
            self._add_mean(terms)
        gradients = {
            name: None if param.grad is None else param.grad.clone() for name, param in self._model.named_parameters()
        }
        norm = self._stages.norm(gradients, lambda grads: norm_in_parts(grads, self._shards))
        if self._recipe.clip:
            clip_grads_with_norm_(trained(self._model), self._recipe.clip, norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._check_finite(number, gradients, losses)
        return Step(self.parameters, gradients, norm, losses)

    def _check_finite(self, step: int, gradients: Mapping[str, Tensor | None], losses: Mapping[int, Tensor]) -> None:
        """Raise `ConfigError` if a result is not finite, which cannot be compared."""
        found: dict[str, Tensor] = {f"the loss of microbatch {number}": loss for number, loss in losses.items()}
        found |= {f"the gradient of {name}": grad for name, grad in gradients.items() if grad is not None}
        found |= {name: param.detach() for name, param in self._model.named_parameters() if param.requires_grad}
        for name, values in found.items():
            odd = values[~values.isfinite()]
            if odd.numel():
                raise ConfigError(
                    f"plain training gives {name} = {odd[0].item()} in step {step}, so results cannot be compared. "
                    "Choose a model, loss, batch or learning rate that keeps all values finite."
                )

    def _gradients(self, copy: nn.Module, numbers: Sequence[int], losses: dict[int, Tensor]) -> list[Tensor | None]:
        """Return one rank's gradients of the microbatches `numbers`, in the dtype of gradient sums."""
        sums: list[Tensor | None] = [None for _ in copy.parameters()]
        for number in numbers:
            losses[number] = self._recipe.backward(copy, number)
            for i, (param, stored) in enumerate(zip(copy.parameters(), self._model.parameters(), strict=True)):
                if param.grad is not None:
                    dense = param.grad if param.grad.layout == torch.strided else param.grad.to_dense()
                    grad = dense.to(self._recipe.precision.contract(stored.dtype).reduce)
                    sums[i] = _added(sums[i], grad)
                    param.grad = None
        return sums

    def _add_mean(self, terms: Sequence[Sequence[Tensor | None]]) -> None:
        """Add the mean over all ranks to the gradients of the optimizer."""
        for param, of_ranks in zip(self._model.parameters(), zip(*terms, strict=True), strict=True):
            found = [grad for grad in of_ranks if grad is not None]
            if found:
                whole = [torch.zeros_like(found[0]) if grad is None else grad for grad in of_ranks]
                mean = mean_of(whole, self._shards)
                param.grad = _added(param.grad, mean.to(param.dtype))


def mean_of(terms: Sequence[Tensor], shards: int, count: int | None = None) -> Tensor:
    """Return the mean of `terms`, which overflows in float16 only if the result does.

    `count` is the number of ranks that the terms represent, if it differs from the number of terms.
    """
    count = len(terms) if count is None else count
    scale = 0.5 ** ceil(log2(count)) if terms[0].dtype == torch.float16 else 1.0
    return summed([term * scale for term in terms], shards) / (count * scale)


def summed(terms: Sequence[Tensor], shards: int) -> Tensor:
    """Return the sum in rank order, first over each group of `shards` consecutive ranks."""
    replicas = [reduce(torch.add, terms[i : i + shards]) for i in range(0, len(terms), shards)]
    return reduce(torch.add, replicas)


def norm_in_parts(grads: Sequence[Tensor], shards: int) -> Tensor:
    """Return the total gradient norm, computed over each rank's shards, then over ranks, then over parameters."""
    if not grads:
        return torch.tensor(0.0)
    norms = [_norm(part_of_rank(grad, shards, rank)) for rank in range(shards) for grad in grads]
    by_rank = torch.stack(norms).view(shards, len(grads))
    total: Tensor = torch.linalg.vector_norm(torch.linalg.vector_norm(by_rank, dim=0))
    return total


def _norm(part: Tensor) -> Tensor:
    """Return the norm of one tensor as torch does for clipping. On GPUs, `vector_norm` adds in another order."""
    wide = torch.promote_types(part.dtype, torch.float32)
    return torch._foreach_norm([part], dtype=wide)[0] if part.numel() else part.new_zeros((), dtype=wide)


def _added(total: Tensor | None, term: Tensor) -> Tensor:
    return term.clone() if total is None else total.add_(term)
