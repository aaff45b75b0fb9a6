"""Trainable parameters that were added to a sharded model after `fully_shard`, such as adapters or a new head.

They do not belong to a unit, so their gradients are not averaged, and each rank would train its own copy. Training,
optimizer steps and saving raise an error. `Module.to`, loading, `unshard` and `summon_full_params` do not, because they
may be used to prepare the new parameters before `fully_shard` is called on their module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from fullshard.engine.managed import ignored_names, is_ignored, managed_by
from fullshard.engine.registry import own_modules
from fullshard.engine.residency import INACTIVE
from fullshard.engine.unit import Unit
from fullshard.errors import StateError

_registrations = 0  # of parameters and modules, in any module of this process


@cache
def watch_registrations() -> None:
    """Start to count registrations of parameters and modules."""
    register_module_parameter_registration_hook(_count)
    register_module_module_registration_hook(_count)


def _count(*_: Any) -> None:
    global _registrations
    _registrations += 1


def number_of_registrations() -> int:
    """Return the number of parameters and modules that have been registered so far, in any module."""
    return _registrations


def refuse_changed_modules(units: Sequence[Unit]) -> None:
    """Raise if parameters of `units` were added after sharding, or replaced in units that are not in use.

    Raises:
        StateError: a parameter was replaced by one that no unit has, or a trained one was added.
    """
    for unit in units:
        if unit.residency.state in INACTIVE:
            unit.check_replacements()
    LateParams(units).check()


class LateParams:
    """Parameters of a root that do not belong to a unit. The search runs only after a new registration."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._searched_at = -1
        self._found: list[tuple[str, nn.Parameter]] = []

    def check(self, *, again: bool = False, among: Iterable[nn.Parameter] | None = None) -> None:
        """Raise `StateError` if any of them is trainable and there is more than one rank.

        Args:
            again: Whether to search even if nothing was registered, since some code writes to `Module._parameters`.
            among: The parameters to check; None for all.
        """
        if again or self._searched_at != _registrations:
            self._searched_at = _registrations
            self._found = self._search() if any(unit.axes.world > 1 for unit in self._units) else []
        chosen = None if among is None else set(map(id, among))
        trained = [
            (name, param)
            for name, param in self._found
            if param.requires_grad and (chosen is None or id(param) in chosen)
        ]
        if trained:
            name, param = trained[0]
            raise StateError(
                f"{name} of shape {tuple(param.shape)} was added after fully_shard"
                + (f", and so were {len(trained) - 1} other trained parameters" if len(trained) > 1 else "")
                + ". No unit manages it, so its gradient would not be averaged and each rank would train its own "
                "copy. Add adapters, heads and parameters before fully_shard; or call fully_shard on the new "
                "module; or freeze the parameter by requires_grad_(False). If your code averages its gradient, "
                "call fully_shard(new_module, ignored_params=new_module.parameters())."
            )

    def _search(self) -> list[tuple[str, nn.Parameter]]:
        slots = {
            (id(owner.module), owner.name) for unit in self._units for param in unit.params for owner in param.owners
        }
        found = {}
        for unit in self._units:
            for prefix, module in own_modules(unit.modules):
                for name, param in module._parameters.items():
                    if param is None or (id(module), name) in slots or not _is_unmanaged(module, name, param):
                        continue
                    found[id(param)] = (".".join(part for part in (unit.name, prefix, name) if part), param)
        return list(found.values())


def _is_unmanaged(module: nn.Module, name: str, param: nn.Parameter) -> bool:
    if isinstance(param, DTensor) or managed_by(param) is not None:
        return False
    return not is_ignored(param) and name not in ignored_names(module)
