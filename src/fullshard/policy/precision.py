"""The dtypes that numbers are stored, computed, sent and summed in: one printable contract a parameter group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fullshard.errors import ConfigError
from fullshard.policy.arguments import check_flags, check_iterable
from fullshard.policy.strategy import Placement, Placements

__all__ = [
    "GATHER_WIRES",
    "REDUCE_WIRES",
    "DtypeContract",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "check_wires",
    "is_castable",
]

GATHER_WIRES = ("int8", "fp8")
"""Encodings of parameters in a gather, other than the dtype they compute in."""

REDUCE_WIRES = ("bf16", "int8", "int4")
"""Encodings of gradients in a reduction, other than the dtype they are summed in."""


def is_castable(dtype: torch.dtype) -> bool:
    """True if a dtype policy casts `dtype`: floating-point numbers, but for those of 8 bits.

    The latter are quantised weights, which mean something beside their scale only, as integers do.
    """
    return dtype.is_floating_point and dtype.itemsize > 1


@dataclass(frozen=True, kw_only=True)
class DtypeContract:
    """The dtypes of one parameter group: at rest, in compute and in the gather, in the gradient reduction.

    Where `gather_wire` or `reduce_wire` names an encoding, messages are encoded so, and decoded into the dtype. `grad`
    is what parameters ask of their gradients, whole ones and shards, if not the dtype that these have of themselves.
    """

    stored: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    gather_wire: str | None = None
    reduce_wire: str | None = None
    grad: torch.dtype | None = None

    @property
    def delivered(self) -> torch.dtype:
        """Of the gradients that an optimizer sees."""
        return self.grad or self.stored

    @property
    def itemsize(self) -> int:
        """Bytes of the smallest element in any of the group's buffers."""
        return min(item.itemsize for item in (self.stored, self.compute, self.reduce, self.delivered))

    def __str__(self) -> str:
        stored, compute, reduce = (
            str(item).removeprefix("torch.") for item in (self.stored, self.compute, self.reduce)
        )
        gathered = (
            f"and gathered {compute}" if self.gather_wire is None else f"{compute}, gathered as {self.gather_wire}"
        )
        sent = "" if self.reduce_wire is None else f", sent as {self.reduce_wire}"
        given = "" if self.grad is None else f", gradients {str(self.grad).removeprefix('torch.')}"
        return f"stored {stored}, computed {gathered}, reduced {reduce}{sent}{given}"


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of compute, of gradient sums and of a module's outputs. None keeps the dtype that is there.

    The parameters that the optimizer updates keep the dtype they came in; gathers already move `param_dtype`. Integers
    and floats of 8 bits, which hold quantised weights, are never cast.

    Encoding into fewer bits costs time on fast links, and numbers differ from those of full precision: docs/networks.md
    says by how much. Parameters that compute in float64 are never encoded. Nor is anything with one rank on an axis, or
    within a group of ranks where states are grouped.

    Args:
        param_dtype: of the unsharded floating-point parameters, and so of the gather and of compute.
        reduce_dtype: gradients are summed over the ranks in it; `param_dtype` if None, or float32 with `reduce_wire`.
        output_dtype: floating-point outputs of a unit are cast to it.
        cast_forward_inputs: whether floating-point inputs of a unit are cast to `param_dtype`.
        gather_wire: "int8" or "fp8": parameters travel as 8 bits each, and every rank computes with the decoded values.
            The optimizer's parameters keep their full precision.
        reduce_wire: "bf16", "int8" or "int4": gradients travel so, and are summed in float32. The last two keep the
            quantisation error and add it to the next message (error feedback): memory of whole gradients on each rank.

    Raises:
        ConfigError: a dtype is not a floating-point one, a wire has another name, or `reduce_wire` is to be summed in
            another dtype than float32.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    gather_wire: str | None = None
    reduce_wire: str | None = None

    def __post_init__(self) -> None:
        _check_floating(self, ("param_dtype", "reduce_dtype", "output_dtype"))
        check_flags(cast_forward_inputs=self.cast_forward_inputs)
        _check_wire(self)

    def contract(self, stored: torch.dtype, grad: torch.dtype | None = None) -> DtypeContract:
        """The dtypes of parameters that are stored as `stored`. Integers and 8-bit floats are never cast.

        Args:
            grad: what the parameters ask of their gradients. They are summed in it, unless `reduce_dtype` is set.
        """
        if not is_castable(stored):
            return DtypeContract(stored=stored, compute=stored, reduce=stored)
        compute = self.param_dtype or stored
        if compute == torch.float64:
            return DtypeContract(stored=stored, compute=compute, reduce=self.reduce_dtype or grad or compute, grad=grad)
        return DtypeContract(
            stored=stored,
            compute=compute,
            reduce=self.reduce_dtype or (grad or compute if self.reduce_wire is None else torch.float32),
            gather_wire=self.gather_wire,
            reduce_wire=self.reduce_wire,
            grad=grad,
        )


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
        gather_wire: see `MixedPrecisionPolicy`. torch has none.
        reduce_wire: see `MixedPrecisionPolicy`. torch has none.

    Raises:
        ConfigError: a dtype is not a floating-point one, `keep_low_precision_grads` is asked for, or a wire is not one
            that `MixedPrecisionPolicy` takes.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (nn.modules.batchnorm._BatchNorm,)
    gather_wire: str | None = None
    reduce_wire: str | None = None

    def __post_init__(self) -> None:
        _check_floating(self, ("param_dtype", "reduce_dtype", "buffer_dtype"))
        check_flags(
            cast_forward_inputs=self.cast_forward_inputs,
            cast_root_forward_inputs=self.cast_root_forward_inputs,
            keep_low_precision_grads=self.keep_low_precision_grads,
        )
        check_iterable("_module_classes_to_ignore", self._module_classes_to_ignore, "a list of module classes")
        _check_wire(self)
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


def _check_wire(policy: MixedPrecision | MixedPrecisionPolicy) -> None:
    for name, known in (("gather_wire", GATHER_WIRES), ("reduce_wire", REDUCE_WIRES)):
        wire = getattr(policy, name)
        if wire is not None and wire not in known:
            raise ConfigError(
                f"{type(policy).__name__}({name}={wire!r}): one of {', '.join(map(repr, known))} is needed, or None to "
                "send numbers as they are."
            )
    if policy.reduce_wire is not None and policy.reduce_dtype not in (None, torch.float32):
        raise ConfigError(
            f"{type(policy).__name__}(reduce_wire={policy.reduce_wire!r}, reduce_dtype={policy.reduce_dtype}): what "
            "travels encoded is summed in float32. Leave reduce_dtype out, or reduce_wire."
        )


def check_wires(policy: MixedPrecisionPolicy, placements: Placements) -> None:
    """Refuse an encoding for parameters that are never gathered.

    Raises:
        ConfigError: parameters are never gathered.
    """
    if policy.gather_wire is not None and placements.optimizer is Placement.WHOLE:
        raise ConfigError(
            f"gather_wire={policy.gather_wire!r}, but every rank keeps whole parameters and updates all of them (as "
            "under strategy='ddp'), so that none are gathered. Leave it out, or choose a strategy that shards the "
            "optimizer's state, such as 'zero1'."
        )
