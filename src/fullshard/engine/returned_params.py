"""Copies for outputs of a unit that contain unsharded parameters.

For example, a module of learned positions returns a slice of its parameter. The memory of the parameter is freed, or
reused by another unit, while the caller still reads the output. So the caller gets copies. Their gradients flow to the
parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.engine.nested import map_tensors
from fullshard.engine.unit import Unit
from fullshard.errors import StateError


def copy_returned_params(unit: Unit, output: Any, evaluated: Sequence[Unit]) -> Any:
    """Return `output` of `unit` with copies of all tensors whose memory is freed after the forward.

    Args:
        unit: the unit whose forward returns `output`.
        output: The output of its forward.
        evaluated: All units of the root at the end of an evaluation; otherwise none.

    Raises:
        StateError: such a tensor is in an object that cannot be copied.
    """
    storages = set()
    for used in (unit, *unit.borrowed):
        if not used.keeps_unsharded and used.reshards_after_forward:
            storages.add(used.residency.memory.slot.storage._cdata)
    for each in evaluated:
        if not each.keeps_unsharded and each.settings.reshard_after_forward is not False:
            storages.add(each.slot.storage._cdata)
    if not storages:
        return output

    def copied(tensor: Tensor) -> Tensor:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        is_param = local.layout is torch.strided and local.untyped_storage()._cdata in storages
        return tensor.clone() if is_param else tensor

    return map_tensors(copied, output, partial(_refuse, unit))


def _refuse(unit: Unit, value: Any) -> NoReturn:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise StateError(
        f"{unit.name or 'the root'} returns a {kind} that refers to its parameters, whose memory is freed after "
        "forward. An object of this class cannot be copied with other tensors. Return the tensors in a tuple, a dict "
        "or a dataclass, or return copies of them (weight.clone()); or call set_reshard_after_forward(False) on the "
        "unit."
    )
