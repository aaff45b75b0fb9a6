"""Optimizers, schedulers and loaders for a DeepSpeed configuration and the arguments of `initialize`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from fullshard.engine.managed import managed_by
from fullshard.errors import ConfigError
from fullshard.integrations.deepspeed.configuration import ConfigPart
from fullshard.integrations.deepspeed.schedules import SCHEDULES
from fullshard.optim.before_step import point_to_shards

ModelParameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
MakeOptimizer = Callable[[Any], Optimizer]


def make_optimizer(
    model: nn.Module,
    parameters: ModelParameters | None,
    given: Optimizer | MakeOptimizer | None,
    part: ConfigPart | None,
) -> Optimizer | None:
    """Return an optimizer of the shards: `given`, or the result of calling it, or that of the configuration.

    Args:
        model: The sharded model.
        parameters: The parameters to optimize, or groups of them, as they were before sharding. If None, all trained
            parameters.
        given: An optimizer, or a function that creates one from parameters.
        part: The section of the configuration.
    """
    if isinstance(given, Optimizer):
        point_to_shards(given)
        return given
    if given is None and part is None:
        return None
    over = _sharded(list(model.parameters() if parameters is None else parameters))
    if given is not None:
        return given(over)
    assert part is not None
    make, arguments = _class_of(part)
    return cast(Optimizer, _called(make, "optimizer", part.type, over, arguments))


def _class_of(part: ConfigPart) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the class that an optimizer section names, and its arguments."""
    arguments = dict(part.params)
    name = part.type.lower()
    if "max_grad_norm" in arguments:
        raise ConfigError("optimizer.params.max_grad_norm: DeepSpeed does not support it. Set gradient_clipping.")
    if name in ("adam", "adamw"):
        decoupled = arguments.pop("adam_w_mode", True) or name == "adamw"
        torchs = arguments.pop("torch_adam", False)
        arguments.pop("fp32_optimizer_states", None)  # moments are in the shards' dtype, which is float32
        if not torchs:  # DeepSpeed's own kernel has other defaults than torch's class
            arguments = {"weight_decay": 0.0, **arguments}
            if not arguments.pop("bias_correction", True):
                raise ConfigError(
                    "optimizer.params.bias_correction=False is not supported: torch's Adam always applies bias "
                    "correction. Pass optimizer= to initialize."
                )
        return (torch.optim.AdamW if decoupled else torch.optim.Adam), arguments
    if name in ("lamb", "lion", "muon", "muadam", "muadamw", "musgd", "onebitadam", "zerooneadam", "onebitlamb"):
        instead = "fullshard.optim.Muon" if name == "muon" else "one of your own or of a library,"
        raise ConfigError(
            f"optimizer.type={part.type!r}: torch has no such optimizer. Pass {instead} as optimizer= to initialize."
        )
    cls = torch.optim.Adagrad if name == "adagrad" else getattr(torch.optim, part.type, None)
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        known = sorted(item for item, value in vars(torch.optim).items() if isinstance(value, type))
        raise ConfigError(f"optimizer.type={part.type!r} is unknown. Expected one of: {', '.join(known)}.")
    return cls, arguments


def _called(make: Callable[..., Any], section: str, name: str, first: Any, arguments: Mapping[str, Any]) -> Any:
    """Return `make(first, **arguments)` after checking that it accepts these arguments."""
    try:
        inspect.signature(make).bind(first, **arguments)
    except TypeError as error:
        raise ConfigError(
            f"{section}.params of {name}: {error}. Change them to arguments of {make.__name__}."
        ) from error
    return make(first, **arguments)


def _sharded(items: Sequence[Any]) -> list[Any]:
    """Return the sharded parameters (or groups of them) for unsharded ones. Frozen parameters are excluded."""
    if items and isinstance(items[0], Mapping):
        groups = [{**group, "params": _sharded(list(group["params"]))} for group in items]
        return [group for group in groups if group["params"]]
    found = []
    for param in items:
        managed = managed_by(param)
        found.append(param if managed is None else managed.param.sharded)
    return [param for param in dict.fromkeys(found) if param.requires_grad]


def make_scheduler(optimizer: Optimizer | None, given: Any, part: ConfigPart | None) -> Any:
    """Return the scheduler: `given`, or the result of calling it with the optimizer, or that of the configuration."""
    if given is not None:
        return given(optimizer) if callable(given) else given
    if part is None:
        return None
    cls = SCHEDULES.get(part.type) or getattr(torch.optim.lr_scheduler, part.type, None)
    if optimizer is None or not isinstance(cls, type):
        found = "there is no optimizer" if optimizer is None else f"there are {', '.join(SCHEDULES)}, and torch's own"
        raise ConfigError(f"scheduler.type={part.type!r}: {found}. Change the configuration.")
    return _called(cls, "scheduler", part.type, optimizer, part.params)


def make_loader(
    data: Dataset[Any], batch_size: int, *, collate_fn: Callable[..., Any] | None, drop_last: bool, pin_memory: bool
) -> DataLoader[Any]:
    """Return a loader, without workers, of this rank's part of the shuffled `data`; of all of an `IterableDataset`."""
    streams = isinstance(data, IterableDataset)
    sampler: DistributedSampler[Any] | None = None if streams else DistributedSampler(data)
    return DataLoader(
        data,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=drop_last,
        pin_memory=pin_memory,
    )
