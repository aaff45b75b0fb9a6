"""FLOPs of torch operations, by torch's formulas and by additional formulas.

As in torch's formulas, a multiplication with an addition counts as two. Only convolutions, attention, and products of
matrices and vectors count, because memory limits other operations. `register_flop_formula` of
`torch.utils.flop_counter` adds formulas of custom operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

_ATEN = torch.ops.aten
_ATTENTION_ON_CPU = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _ATEN._scaled_dot_product_flash_attention_backward,
}
_ATTENTION = frozenset(
    (
        *_ATTENTION_ON_CPU,
        *_ATTENTION_ON_CPU.values(),
        _ATEN._scaled_dot_product_efficient_attention,
        _ATEN._scaled_dot_product_efficient_attention_backward,
    )
)
_flops: dict[Any, int] = {}  # a cache by operation and shapes: formulas are slower than the rest of the recording


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the floating-point operations of an operation of torch; 0 without a formula."""
    packet = func._overloadpacket
    formula = _formula(packet)
    if formula is None:
        return 0
    if formula in _OWN:
        return int(formula(*args))
    key = (packet, *map(_shape_or_value, args), *kwargs, *map(_shape_or_value, kwargs.values()))
    try:
        known = _flops.get(key)
    except TypeError:  # there are lists among the arguments
        return int(formula(*args, **kwargs, out_val=result))
    if known is None:
        known = _flops[key] = int(formula(*args, **kwargs, out_val=result))
    return known


def has_formula(packet: Any) -> bool:
    """Return True if the FLOPs of an operation are known."""
    return _formula(packet) is not None


def _formula(packet: Any) -> Callable[..., int] | None:
    """Return the formula of an operation. It is the same if the operation writes to its first argument."""
    for known in _packets(packet):
        formula = _FORMULAS.get(known) or flop_registry.get(known)
        if formula is not None:
            return formula
    return None


@cache
def _packets(packet: Any) -> tuple[Any, ...]:
    """Return the operations whose FLOP formula also applies to `packet`."""
    name = packet.__name__
    bare = getattr(_ATEN, name.removesuffix("_"), None) if name.endswith(("mm_", "mv_")) else None
    return (_ATTENTION_ON_CPU.get(packet, packet), *([bare] if bare is not None else []))


def skipped_flops_of(func: Any, args: Any, kwargs: Any, flops: int) -> int:
    """Return the part of an operation's `flops` that its kernel skips because of a causal attention mask.

    FlashAttention computes blocks of 128 queries by 128 keys: full blocks on the diagonal, and none above it.
    """
    packet = func._overloadpacket
    if packet not in _ATTENTION:
        return 0
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if not given.get("is_causal", False):
        return 0
    blocks = max(given["query"].shape[-2], given["key"].shape[-2]) / 128
    return int(flops * max(0.0, 0.5 - 0.5 / blocks))


def _shape_or_value(argument: Any) -> Any:
    return argument.shape if isinstance(argument, Tensor) else argument


def _grouped_product(first: Tensor, second: Tensor, *others: Any) -> int:
    """Return the FLOPs of one product: each row (or each index of the inner dimension) belongs to one group."""
    groups = first.shape[0] if first.ndim == second.ndim == 3 else 1
    return 2 * groups * first.shape[-2] * first.shape[-1] * second.shape[-1]


def _trilinear(
    first: Tensor,
    second: Tensor,
    third: Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    summed: Sequence[int],
    *others: Any,
) -> int:
    """Return the FLOPs of the first two tensors' product, and of its product with the third, as in torch's kernel."""
    ndim = first.ndim + len(expand1)
    sizes = [1] * ndim
    for tensor, expanded in ((first, expand1), (second, expand2), (third, expand3)):
        kept = (dim for dim in range(ndim) if dim not in expanded)
        for dim, size in zip(kept, tensor.shape, strict=True):
            sizes[dim] = max(sizes[dim], size)
    of_two = math.prod(size for dim, size in enumerate(sizes) if not (dim in expand1 and dim in expand2))
    of_third = math.prod(size for dim, size in enumerate(sizes) if not (dim in expand3 and dim in summed))
    return 2 * (of_two + of_third)


def _distances(first: Tensor, second: Tensor) -> int:
    """Return the FLOPs of a product of matrices with two additional columns, which contain the squares."""
    return 2 * first.numel() // first.shape[-1] * second.shape[-2] * (first.shape[-1] + 2)


def _rnn(x: Tensor, weights: Sequence[Tensor], passes: int) -> int:
    """Return the FLOPs of the products of each row of each step with all matrices. `passes` is 2 in backward."""
    rows = x.numel() // x.shape[-1]
    return 2 * passes * rows * sum(weight.numel() for weight in weights if weight.ndim == 2)


_FORMULAS: dict[Any, Callable[..., int]] = {
    _ATEN._grouped_mm: _grouped_product,
    _ATEN._scaled_grouped_mm: _grouped_product,
    _ATEN._int_mm: lambda first, second: 2 * first.numel() * second.shape[-1],
    _ATEN._addmm_activation: lambda bias, first, second, *others: 2 * first.numel() * second.shape[-1],
    _ATEN.addbmm: lambda bias, first, second, *others: 2 * first.numel() * second.shape[-1],
    _ATEN.mv: lambda matrix, vector: 2 * matrix.numel(),
    _ATEN.addmv: lambda bias, matrix, vector, *others: 2 * matrix.numel(),
    _ATEN.dot: lambda first, second: 2 * first.numel(),
    _ATEN.vdot: lambda first, second: 2 * first.numel(),
    _ATEN._trilinear: _trilinear,
    _ATEN._euclidean_dist: _distances,
    _ATEN._cudnn_rnn: lambda x, weights, *others: _rnn(x, weights, 1),
    _ATEN._cudnn_rnn_backward: lambda x, weights, *others: _rnn(x, weights, 2),
    _ATEN.mkldnn_rnn_layer: lambda x, *others: _rnn(x, others[:2], 1),
    _ATEN.mkldnn_rnn_layer_backward: lambda x, *others: _rnn(x, others[:2], 2),
}
_OWN = frozenset(_FORMULAS.values())  # they take only the arguments of the operation
