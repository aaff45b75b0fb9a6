"""The unit that has a parameter: found by any form of it, since weights can be tied across units."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Any

from torch import nn

from fullshard.engine.sharded_param import ShardedParam

__all__ = ["Managed", "ignored_names", "is_ignored", "managed_by", "mark_ignored"]

_IGNORED = "_fullshard_ignored"


@dataclass(eq=False, frozen=True)
class Managed:
    """A parameter of a unit, and what it was made of. The unit has the only lasting reference."""

    unit: Any
    param: ShardedParam
    source: weakref.ref[nn.Parameter]

    @property
    def forms(self) -> list[nn.Parameter]:
        """All that this parameter is known as."""
        source = self.source()
        return [self.param.sharded, self.param.unsharded, *([] if source is None else [source])]

    def register(self) -> None:
        """Let `managed_by` find it by every form that it has now."""
        _by_id.update((id(form), self) for form in self.forms)


def mark_ignored(params: Iterable[nn.Parameter], modules: Iterable[nn.Module]) -> None:
    """Mark `params`, which the user has listed in `ignored_params`, and their names in those `modules` that have them.

    The names are needed because `to_empty` and `load_state_dict(assign=True)` make new parameters.
    """
    ids = set()
    for param in params:
        setattr(param, _IGNORED, True)
        ids.add(id(param))
    for module in modules if ids else ():
        names = {name for name, param in module._parameters.items() if id(param) in ids}
        if names:
            vars(module)[_IGNORED] = names | vars(module).get(_IGNORED, set())


def is_ignored(param: nn.Parameter) -> bool:
    """True if the user has listed `param` in `ignored_params`."""
    return hasattr(param, _IGNORED)


def ignored_names(module: nn.Module) -> Set[str]:
    """The names under which `module` has parameters that were listed in `ignored_params`."""
    names: Set[str] = vars(module).get(_IGNORED, frozenset())
    return names


# By id, since torch refuses to move a parameter that anything has a weak reference to.
_by_id: weakref.WeakValueDictionary[int, Managed] = weakref.WeakValueDictionary()


def managed_by(param: nn.Parameter) -> Managed | None:
    """The entry of `param`, in any of its forms or as it was before it was sharded; None if no unit has it."""
    managed = _by_id.get(id(param))
    if managed is None or all(form is not param for form in managed.forms):
        return None
    return managed
