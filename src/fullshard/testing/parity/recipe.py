"""The model, its data and its training, identical in the plain process and on every rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from fullshard.engine.nested import map_tensors
from fullshard.errors import ConfigError
from fullshard.policy.precision import MixedPrecisionPolicy
from fullshard.testing.parity.batches import BatchArgument, argument_of, check_has_rows
from fullshard.testing.parity.context import cut_batch
from fullshard.testing.parity.parallel import Parallelism
from fullshard.wrap import AutoWrapPolicy, WrapPolicy, size_based_auto_wrap_policy, wrapped_modules

Loss = Callable[[nn.Module, Any], Tensor]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]

_LEARNING_RATES = {"adamw": 1e-3, "sgd": 0.05}
_UNITS = 10  # by default a unit has at least 1 / _UNITS of the parameters


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model, its data and its training. The arguments are those of `check_parity`."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[..., Any]
    loss: Loss | None = None
    rows: int = 2
    steps: int = 5
    accumulate: int | None = None
    reduce_each: bool = False
    optimizer: str | MakeOptimizer = "adamw"
    lr: float | None = None
    clip: float = 1.0
    dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    auto_wrap_policy: AutoWrapPolicy | None = None
    seed: int = 0
    parallelism: Parallelism = field(default_factory=Parallelism)

    def __post_init__(self) -> None:
        for name, value in (("rows", self.rows), ("steps", self.steps), ("accumulate", self.count)):
            if value < 1:
                raise ConfigError(f"{name}={value}: must be at least 1.")
        if self.parallelism.pp > 1 and (self.reduce_each or self.count < self.parallelism.stages):
            raise ConfigError(
                f"a pipeline of {self.parallelism.stages} stages with "
                f"accumulate={self.count}{' and reduce_each' if self.reduce_each else ''}: a pipeline runs all "
                "microbatches of a step before it reduces gradients, and needs at least one microbatch per stage. "
                "Leave these options out."
            )
        for name in ("clip", "seed"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 0.")
        if isinstance(self.optimizer, str) and self.optimizer not in _LEARNING_RATES:
            raise ConfigError(
                f"optimizer={self.optimizer!r}: unknown. Pass {' or '.join(_LEARNING_RATES)}, or a function of a "
                "model that returns an optimizer."
            )
        if self.lr is not None and not isinstance(self.optimizer, str):
            raise ConfigError(f"lr={self.lr}: your function creates the optimizer. Set the learning rate there.")
        if self.lr is not None and not self.lr > 0:
            raise ConfigError(f"lr={self.lr}: must be greater than 0.")
        _ = self.precision  # checks the dtypes

    @property
    def count(self) -> int:
        """Microbatches per rank and step: `accumulate`, by default the number of stages of a pipeline."""
        return self.parallelism.stages if self.accumulate is None else self.accumulate

    @property
    def precision(self) -> MixedPrecisionPolicy:
        """The dtypes of compute and of gradient sums."""
        lowered = None if self.dtype is None else torch.float32
        return MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=self.reduce_dtype or lowered)

    def model(self) -> nn.Module:
        """Return a new model. Its values are always the same, because random generators are seeded."""
        _seed(self.seed)
        model = self.make_model()
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"{_name(self.make_model)} returned {_article(model)}. It must return the model, an nn.Module."
            )
        if not any(param.requires_grad for param in model.parameters()):
            raise ConfigError(
                f"{_name(self.make_model)} returned a model without trained parameters, so nothing can be compared."
            )
        return model

    def policy(self, model: nn.Module) -> AutoWrapPolicy:
        """Return the policy that selects the submodules of `model` that become units."""
        if isinstance(self.auto_wrap_policy, ClassNames):
            self.auto_wrap_policy.check(model)
        if self.auto_wrap_policy is not None:
            return self.auto_wrap_policy
        numel = sum(param.numel() for param in model.parameters())
        return partial(size_based_auto_wrap_policy, min_num_params=max(1, numel // _UNITS))

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of `model`'s trained parameters."""
        if isinstance(self.optimizer, str):
            lr = _LEARNING_RATES[self.optimizer] if self.lr is None else self.lr
            if self.optimizer == "adamw":
                return torch.optim.AdamW(trained(model), lr=lr)
            return torch.optim.SGD(trained(model), lr=lr, momentum=0.9)
        optimizer = self.optimizer(model)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"{_name(self.optimizer)} returned {_article(optimizer)}. It must return a torch.optim.Optimizer."
            )
        return optimizer

    def microbatches(self, step: int, rank: int, ranks: int) -> list[list[int]]:
        """Return the indices of `rank`'s microbatches in step `step` (from 1), as one list per reduction."""
        first = ((step - 1) * ranks + rank) * self.count
        numbers = list(range(first, first + self.count))
        return [[number] for number in numbers] if self.reduce_each else [numbers]

    def loss_of(self, model: nn.Module, number: int) -> Tensor:
        """Return the loss of a microbatch.

        Random numbers depend only on the microbatch, not on the process or on its previous computations.
        """
        batch = cut_batch(self._batch(number), self.parallelism.context)
        loss = _own_loss(model, batch) if self.loss is None else self.loss(model, batch)
        _check_loss(loss, number)
        return cast(Tensor, loss)

    @cached_property
    def _batch_argument(self) -> BatchArgument:
        return argument_of(self.make_batch)

    def _batch(self, number: int) -> Any:
        argument = self._batch_argument  # calls `make_batch`, so this must precede seeding
        _seed(self.seed + 1 + number)
        values = {BatchArgument.ROWS: (self.rows,), BatchArgument.NUMBER: (number,)}.get(argument, ())
        batch = self.make_batch(*values)
        check_has_rows(batch, f"{_name(self.make_batch)}({', '.join(map(str, values))})")
        return batch

    def backward(self, model: nn.Module, number: int) -> Tensor:
        """Add a microbatch's part of the step's gradients to those of `model` and return its loss."""
        loss = self.loss_of(model, number)
        (loss / self.count).backward()
        return loss.detach()

    def computing(self, model: nn.Module) -> nn.Module:
        """Return `model` with parameters in the dtype of compute. Modules that would be units cast their inputs."""
        units = [model, *wrapped_modules(model, self.policy(model))]
        if self.precision.param_dtype is not None:
            for param in model.parameters():
                param.data = param.data.to(self.precision.contract(param.dtype).compute)
        for unit in units:
            self.cast_inputs(unit)
        return model

    def cast_inputs(self, module: nn.Module) -> None:
        """Make `module` cast its inputs to the dtype of compute, if set, as a unit does."""
        dtype = self.precision.param_dtype

        def cast_all(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs))

        if dtype is not None:
            module.register_forward_pre_hook(cast_all, with_kwargs=True)


class ClassNames(WrapPolicy):
    """A wrap policy that selects the instances of classes with given names, including subclasses."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def overrides(self, module: nn.Module, numel: int) -> dict[str, Any] | None:
        return {} if not _names(module).isdisjoint(self.names) else None

    def check(self, model: nn.Module) -> None:
        """Raise `ConfigError` for names that match no module of `model`."""
        below = list(model.modules())[1:]
        missing = [name for name in self.names if not any(name in _names(module) for module in below)]
        if missing:
            found = sorted({type(module).__name__ for module in below})
            raise ConfigError(
                f"no module below {type(model).__name__} is a {missing[0]}. Its modules have the classes "
                f"{', '.join(found) or 'none'}."
            )


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters of `model`."""
    return [param for param in model.parameters() if param.requires_grad]


def _names(module: nn.Module) -> set[str]:
    return {cls.__name__ for cls in type(module).__mro__}


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _own_loss(model: nn.Module, batch: Any) -> Any:
    """Return the loss that `model` itself computes."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, tuple | list):
        output = model(*batch)
    else:
        output = model(batch)
    return output if isinstance(output, Tensor) else getattr(output, "loss", output)


def _check_loss(loss: Any, number: int) -> None:
    remedy = "Let the model return the loss or an object with a .loss attribute, or pass a function loss(model, batch)."
    if not isinstance(loss, Tensor):
        raise ConfigError(f"the loss of microbatch {number} is {_article(loss)}, but must be a tensor. {remedy}")
    if loss.numel() != 1:
        shape = tuple(loss.shape)
        raise ConfigError(f"the loss of microbatch {number} is of shape {shape}, but must be one number. {remedy}")
    if not loss.requires_grad:
        raise ConfigError(
            f"the loss of microbatch {number} has no gradient: it does not depend on any trained parameter. {remedy}"
        )


def _name(function: Any) -> str:
    return getattr(function, "__name__", repr(function))


def _article(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
