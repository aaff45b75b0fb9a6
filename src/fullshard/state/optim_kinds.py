"""The kinds of optimizers: whether they encode their states, and whether they continue from saved states."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

if TYPE_CHECKING:
    from fullshard.state.block_states import BlockStates

_OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"})
_NAMES = frozenset({"params", "param_names"})


class ChunkedSteps:
    """A base class of optimizers that call `StatesOnDisk.step` themselves."""


def block_states(optimizer: Optimizer) -> BlockStates | None:
    """Return the encoding of the states of `optimizer`; None if no states are encoded in blocks."""
    if "torchao.optim.adam" not in sys.modules and "bitsandbytes.optim.optimizer" not in sys.modules:
        return None
    from fullshard.state.block_states import encoding_of  # imported here, because few programs need it

    return encoding_of(optimizer)


@dataclass(frozen=True)
class SavedOptions:
    """The options of one parameter group in a checkpoint."""

    fqns: Collection[str]
    names: Collection[str]  # of the options
    kinds: Sequence[str] = ()  # the class that saved it, then its base classes; empty if not recorded


def kinds_of_groups(optim: Any) -> list[list[str]]:
    """Return the names of the optimizer's class and of its base classes for each group of `optim`.

    Wrappers of accelerate and Lightning count as the optimizer inside. Joined optimizers count separately.
    """
    return [_kinds(owner) for owner, _ in groups_by_owner(optim)]


def misfit_of_kind(optim: Any, fqns: Sequence[str], saved: Sequence[SavedOptions]) -> str | None:
    """Return how the optimizer that saved a state differs from `optim`, in words; None if `optim` can continue from it.

    The same class, its base classes and its subclasses fit. Other classes fit if their options have the same names, as
    when a class was renamed. Without a recorded class, only the names of the options are compared.
    """
    by_fqn = {fqn: options for options in saved for fqn in options.fqns}
    names = iter(fqns)
    for owner, group in groups_by_owner(optim):
        of_group = [next(names) for _ in group["params"]]
        for options in {id(item): item for item in (by_fqn.get(fqn) for fqn in of_group) if item is not None}.values():
            missing, unknown = _differences(owner, group, options)
            if options.kinds:
                related = options.kinds[0] in _kinds(owner) or _kinds(owner)[0] in options.kinds
                differs = not related and bool(missing or unknown)
            else:
                differs = bool(missing and unknown)
            if differs:
                return _described(owner, options, missing, unknown)
    return None


def _differences(owner: Optimizer, group: dict[str, Any], options: SavedOptions) -> tuple[list[str], list[str]]:
    """Return the options of `owner` that were not saved, and the saved options that it does not have."""
    missing = sorted({*owner.defaults} - {*options.names})
    unknown = sorted({*options.names} - {*owner.defaults} - {*group} - _OF_SCHEDULERS - _NAMES)
    return missing, unknown


def _described(owner: Optimizer, options: SavedOptions, missing: list[str], unknown: list[str]) -> str:
    parts = [f"its options have {', '.join(unknown)}"] if unknown else []
    parts += [f"{'and ' if parts else 'its options '}lack {', '.join(missing)}"] if missing else []
    source = options.kinds[0] if options.kinds else "another class"
    return f"saved by {source}, loaded into {type(owner).__name__} ({' '.join(parts)})"


def _kinds(optim: Optimizer) -> list[str]:
    return [item.__name__ for item in type(optim).__mro__ if issubclass(item, Optimizer) and item is not Optimizer] or [
        type(optim).__name__
    ]


def groups_by_owner(optim: Any) -> Iterator[tuple[Optimizer, dict[str, Any]]]:
    """Yield each group of `optim` with the optimizer that updates it, in order."""
    while isinstance(inner := getattr(optim, "optimizer", None), Optimizer):
        optim = inner
    for owner in getattr(optim, "joined_optimizers", (optim,)):
        if owner is not optim:
            yield from groups_by_owner(owner)
            continue
        for group in owner.param_groups:
            yield owner, group
