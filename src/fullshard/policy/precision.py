"""The dtypes for storage, compute, communication and reduction: one printable dataclass per parameter group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from fullshard.errors import ConfigError
from fullshard.policy.arguments import check_callable, check_flags
from fullshard.policy.strategy import Placement, Placements

GATHER_ENCODINGS = ("int8", "fp8")
"""Encodings of parameters in an all-gather, besides their compute dtype."""

REDUCE_ENCODINGS = ("bf16", "int8", "int4")
"""Encodings of gradients in a reduction, besides their reduce dtype."""


def is_castable(dtype: torch.dtype) -> bool:
    """Return True if a dtype policy casts `dtype`: all floating-point dtypes except those of 8 bits.

    8-bit dtypes hold quantized weights. Like integers, these are meaningful only together with their scale.
    """
    return dtype.is_floating_point and dtype.itemsize > 1


@dataclass(frozen=True, kw_only=True)
class DtypeContract:
    """The dtypes of one parameter group: stored, in compute and the all-gather, and in the gradient reduction.

    If `gather_wire` or `reduce_wire` names an encoding, messages are encoded with it and decoded into the dtype. `grad`
    is the gradient dtype that parameters request, for unsharded gradients and shards; None for the default.
    `keeps_dtype` is True if the parameters compute in the stored dtype, whatever `param_dtype` is.
    """

    stored: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    gather_wire: str | None = None
    reduce_wire: str | None = None
    grad: torch.dtype | None = None
    keeps_dtype: bool = False

    @property
    def delivered(self) -> torch.dtype:
        """The dtype of the gradients that an optimizer sees."""
        return self.grad or self.stored

    @property
    def itemsize(self) -> int:
        """The size in bytes of the smallest element in any buffer of the group."""
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
    """The dtypes of compute, gradient reduction and module outputs. None keeps the existing dtype.

    The parameters that the optimizer updates keep their original dtype; all-gathers already communicate `param_dtype`.
    Integers and 8-bit floats, which hold quantized weights, are never cast.

    Encoding into fewer bits costs time on fast links, and results differ from full precision: see docs/networks.md for
    measurements. Parameters that compute in float64 are never encoded. Nothing is encoded if an axis has one rank, or
    within a group of ranks if states are grouped.

    Args:
        param_dtype: The dtype of unsharded floating-point parameters, and so of the all-gather and of compute.
        reduce_dtype: The dtype of the gradient reduction. If None, `param_dtype`, or float32 with `reduce_wire`.
        output_dtype: The dtype that floating-point outputs of a unit are cast to.
        cast_forward_inputs: Whether to cast floating-point inputs of a unit to `param_dtype`.
        gather_wire: "int8" or "fp8": parameters are communicated with 8 bits each, and every rank computes with the
            decoded values. The optimizer's parameters keep their full precision.
        reduce_wire: "bf16", "int8" or "int4": gradients are communicated in this format and summed in float32. The last
            two add the quantization error to the next message (error feedback), which takes the memory of unsharded
            gradients on each rank.
        param_dtype_override_fn: A function that is called with each parameter when a module is sharded. If it returns
            the dtype of the parameter, the parameter is gathered and computes in that dtype, and gathers do not encode
            it. If it returns None or `param_dtype`, `param_dtype` applies. It must return the same on every rank.

    Raises:
        ConfigError: A dtype is not a floating-point dtype, an encoding is unknown, `reduce_wire` is combined with a
            `reduce_dtype` other than float32, or `param_dtype_override_fn` is not a function. When a module is
            sharded: that function returned another dtype.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    gather_wire: str | None = None
    reduce_wire: str | None = None
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_floating(self, ("param_dtype", "reduce_dtype", "output_dtype"))
        check_flags(cast_forward_inputs=self.cast_forward_inputs)
        check_encoding(self)
        if self.param_dtype_override_fn is not None:
            expected = "a function of a parameter that returns a torch.dtype or None"
            check_callable("param_dtype_override_fn", self.param_dtype_override_fn, expected)

    def keeps_dtype(self, fqn: str, param: nn.Parameter) -> bool:
        """Return True if `param_dtype_override_fn` selects the dtype that a parameter has.

        Args:
            fqn: The FQN of the parameter, for messages.
            param: The parameter, before sharding.

        Raises:
            ConfigError: The function returned neither None, nor `param_dtype`, nor the dtype of the parameter.
        """
        if self.param_dtype_override_fn is None:
            return False
        chosen = self.param_dtype_override_fn(param)
        if chosen not in (None, self.param_dtype, param.dtype):
            raise ConfigError(
                f"param_dtype_override_fn returned {chosen!r} for {fqn}. Return the dtype of the parameter, "
                f"{param.dtype}, to compute in it, or None to compute in param_dtype={self.param_dtype}."
            )
        return chosen is not None and chosen == param.dtype != self.param_dtype

    def contract(
        self, stored: torch.dtype, grad: torch.dtype | None = None, *, keeps_dtype: bool = False
    ) -> DtypeContract:
        """Return the dtypes of parameters that are stored as `stored`. Integers and 8-bit floats are never cast.

        Args:
            stored: The dtype of the stored shards.
            grad: The gradient dtype that the parameters request. Gradients are summed in it unless `reduce_dtype` is
                set.
            keeps_dtype: Whether to compute in `stored`, and not to encode gathers.
        """
        if not is_castable(stored):
            return DtypeContract(stored=stored, compute=stored, reduce=stored)
        compute = stored if keeps_dtype else self.param_dtype or stored
        can_encode = compute != torch.float64
        return DtypeContract(
            stored=stored,
            compute=compute,
            reduce=self.reduce_dtype or (torch.float32 if self.reduce_wire and can_encode else grad or compute),
            gather_wire=self.gather_wire if can_encode and not keeps_dtype else None,
            reduce_wire=self.reduce_wire if can_encode else None,
            grad=grad,
            keeps_dtype=keeps_dtype,
        )


def check_floating(policy: object, names: Sequence[str]) -> None:
    """Raise if one of the attributes `names` of `policy` is neither None nor a floating-point dtype of 16 bits or more.

    Raises:
        ConfigError: See above.
    """
    for name in names:
        dtype = getattr(policy, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and is_castable(dtype)):
            raise ConfigError(
                f"{type(policy).__name__}({name}={dtype!r}): expected a floating-point torch.dtype of 16 bits or "
                "more, such as torch.bfloat16, or None to keep the existing dtype."
            )


class _Encoded(Protocol):
    """A policy that can encode messages."""

    @property
    def reduce_dtype(self) -> torch.dtype | None: ...
    @property
    def gather_wire(self) -> str | None: ...
    @property
    def reduce_wire(self) -> str | None: ...


def check_encoding(policy: _Encoded) -> None:
    """Raise `ConfigError` if `policy` names an unknown encoding, or one that its `reduce_dtype` does not allow."""
    for name, known in (("gather_wire", GATHER_ENCODINGS), ("reduce_wire", REDUCE_ENCODINGS)):
        encoding = getattr(policy, name)
        if encoding is not None and encoding not in known:
            raise ConfigError(
                f"{type(policy).__name__}({name}={encoding!r}): expected one of {', '.join(map(repr, known))}, or "
                "None to send unencoded values."
            )
    if policy.reduce_wire is not None and policy.reduce_dtype not in (None, torch.float32):
        raise ConfigError(
            f"{type(policy).__name__}(reduce_wire={policy.reduce_wire!r}, reduce_dtype={policy.reduce_dtype}): "
            "encoded gradients are summed in float32. Leave out reduce_dtype or reduce_wire."
        )


def check_encodings(policy: MixedPrecisionPolicy, placements: Placements) -> None:
    """Raise `ConfigError` if an encoding is set for parameters that are never gathered."""
    if policy.gather_wire is not None and placements.optimizer is Placement.WHOLE:
        raise ConfigError(
            f"gather_wire={policy.gather_wire!r}, but every rank keeps and updates full parameters (as under "
            "strategy='ddp'), so none are gathered. Leave it out, or choose a strategy that shards the optimizer "
            "state, such as 'zero1'."
        )
