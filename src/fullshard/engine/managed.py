"""A map from each parameter, in either form, to its unit. Weights can be tied across units."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from torch import Tensor, nn

from fullshard.engine.sharded_param import ShardedParam

TensorT = TypeVar("TensorT", bound=Tensor)

_IGNORED = "_fullshard_ignored"


@dataclass(eq=False, frozen=True)
class Managed:
    """A parameter of a unit, with its original tensor. Only the unit keeps this object alive."""

    unit: Any
    param: ShardedParam
    source: weakref.ref[nn.Parameter]

    @property
    def forms(self) -> list[nn.Parameter]:
        """All tensors that represent this parameter."""
        source = self.source()
        return [self.param.sharded, self.param.unsharded, *([] if source is None else [source])]

    def register(self) -> None:
        """Register every current form of this parameter, so that `managed_by` finds it."""
        _by_id.update((id(form), self) for form in self.forms)


def mark_ignored(params: Iterable[nn.Parameter], modules: Iterable[nn.Module]) -> None:
    """Mark `params`, which the user has passed as `ignored_params`, and their names in each of `modules`.

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


def mark_ignored_buffers(modules: Iterable[nn.Module]) -> None:
    """Mark the buffers of `modules`, which the user has passed as `ignored_modules`."""
    for module in modules:
        for buffer in module.buffers():
            setattr(buffer, _IGNORED, True)


def is_ignored(param: Tensor) -> bool:
    """Return True if `param` is in the user's `ignored_params`, or is a buffer of the user's `ignored_modules`."""
    return hasattr(param, _IGNORED)


def ignored_names(module: nn.Module) -> Set[str]:
    """Return the names of the parameters of `module` that were passed as `ignored_params`."""
    names: Set[str] = vars(module).get(_IGNORED, frozenset())
    return names


# Keys are ids, because `torch.utils.swap_tensors` rejects a parameter with weak references.
_by_id: weakref.WeakValueDictionary[int, Managed] = weakref.WeakValueDictionary()


def managed_by(param: Tensor) -> Managed | None:
    """Return the entry of `param`, in any of its forms or before it was sharded; None if it is not in a unit."""
    managed = _by_id.get(id(param))
    if managed is None:
        return None
    own = managed.param
    is_form = param is own.sharded or param is own.unsharded or param is managed.source()
    return managed if is_form else None


_numbers = count()


def number_parameters(root: nn.Module) -> None:
    """Number the managed parameters of `root` in the order of `root.parameters()`, for `in_model_order`."""
    for param in root.parameters():
        managed = managed_by(param)
        if managed is not None:
            managed.param.number = next(_numbers)


def in_model_order(params: Sequence[TensorT]) -> list[TensorT]:
    """Sort the managed parameters in `params` by their order in the model. Other parameters keep their positions.

    The order is the same on every rank, even if the order of `params` is not (a group built from a `set`, for example).
    Code that runs one collective per parameter must use it.
    """
    return sorted_with_entries(params)[0]


def sorted_with_entries(params: Sequence[TensorT]) -> tuple[list[TensorT], list[Managed]]:
    """Return `in_model_order(params)` and the entries of the managed parameters among them, in the same order."""
    entries = {i: managed for i, param in enumerate(params) if (managed := managed_by(param)) is not None}
    numbers = {i: managed.param.number for i, managed in entries.items()}
    ordered, positions = list(params), sorted(numbers, key=numbers.__getitem__)
    for i, j in zip(numbers, positions, strict=True):
        ordered[i] = params[j]
    return ordered, [entries[i] for i in positions]
