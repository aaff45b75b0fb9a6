"""Which dtype each number is stored, computed, sent and summed in: one contract a section, printable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fullshard.errors import ConfigError

__all__ = ["DtypeContract", "MixedPrecision", "MixedPrecisionPolicy", "is_castable"]


def is_castable(dtype: torch.dtype) -> bool:
    """Whether a dtype policy concerns what is of `dtype`: floating-point numbers, but for those of 8 bits.

    The latter are quantised weights, which mean something beside their scale only, as integers do.
    """
    return dtype.is_floating_point and dtype.itemsize > 1


@dataclass(frozen=True, kw_only=True)
class DtypeContract:
    """The dtypes of one section: at rest, in compute and in the gather, in the gradient reduction."""

    stored: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of the smallest item that lies in any of the section's buffers."""
        return min(self.stored.itemsize, self.compute.itemsize, self.reduce.itemsize)

    def __str__(self) -> str:
        names = (str(dtype).removeprefix("torch.") for dtype in (self.stored, self.compute, self.reduce))
        return "stored {}, computed and gathered {}, reduced {}".format(*names)


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Which dtype computes, sums gradients and leaves a module. None keeps what is there.

    The parameters that the optimizer updates keep the dtype they came in; gathers already move `param_dtype`. Integers
    and floats of 8 bits, which hold quantised weights, are never cast.

    Args:
        param_dtype: of the unsharded floating-point parameters, and so of the gather and of compute.
        reduce_dtype: gradients are summed over the ranks in it; `param_dtype` if None.
        output_dtype: floating-point outputs of a unit are cast to it.
        cast_forward_inputs: whether floating-point inputs of a unit are cast to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        _check_floating(self, ("param_dtype", "reduce_dtype", "output_dtype"))

    def contract(self, stored: torch.dtype) -> DtypeContract:
        """The dtypes of parameters that are stored as `stored`. Integers and 8-bit floats are never cast."""
        if not is_castable(stored):
            return DtypeContract(stored=stored, compute=stored, reduce=stored)
        compute = self.param_dtype or stored
        return DtypeContract(stored=stored, compute=compute, reduce=self.reduce_dtype or compute)


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of a `FullyShardedDataParallel` module, spelled as in torch.

    Args:
        param_dtype: of the unsharded floating-point parameters, and so of the gather and of compute.
        reduce_dtype: gradients are summed over the ranks in it; `param_dtype` if None.
        buffer_dtype: floating-point buffers are cast to it, once.
        keep_low_precision_grads: must be False: an optimizer sees gradients in its parameters' own dtype.
        cast_forward_inputs: whether every unit casts its floating-point inputs to `param_dtype`.
        cast_root_forward_inputs: whether the root does, when `cast_forward_inputs` is False.
        _module_classes_to_ignore: modules of these classes compute in full precision, as units of their own.

    Raises:
        ConfigError: a dtype is not a floating-point one, or `keep_low_precision_grads` is asked for.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (nn.modules.batchnorm._BatchNorm,)

    def __post_init__(self) -> None:
        _check_floating(self, ("param_dtype", "reduce_dtype", "buffer_dtype"))
        if self.keep_low_precision_grads:
            raise ConfigError(
                "keep_low_precision_grads=True cannot be honoured: parameters keep their own dtype in the shards, and "
                "an optimizer needs gradients of that dtype. Leave it False; reduce_dtype sets what travels."
            )


def _check_floating(policy: object, names: Sequence[str]) -> None:
    for name in names:
        dtype = getattr(policy, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and is_castable(dtype)):
            raise ConfigError(
                f"{type(policy).__name__}({name}={dtype!r}): a floating-point torch.dtype is needed, of 16 bits or "
                "more, such as torch.bfloat16, or None to keep the dtype that is there."
            )
