"""The dtypes of a `FullyShardedDataParallel` module, and their conversion to a `MixedPrecisionPolicy`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import nn

from fullshard.errors import ConfigError
from fullshard.policy.arguments import check_flags, check_iterable
from fullshard.policy.precision import MixedPrecisionPolicy, check_encoding, check_floating


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of a `FullyShardedDataParallel` module, with torch's names.

    Args:
        param_dtype: The dtype of unsharded floating-point parameters, and so of the all-gather and of compute.
        reduce_dtype: The dtype of the gradient reduction. If None, `param_dtype`.
        buffer_dtype: The dtype that floating-point buffers are cast to once.
        keep_low_precision_grads: Must be False: an optimizer sees gradients in the dtype of its parameters.
        cast_forward_inputs: Whether every unit casts its floating-point inputs to `param_dtype`.
        cast_root_forward_inputs: Whether the root casts its inputs if `cast_forward_inputs` is False.
        _module_classes_to_ignore: Modules of these classes become separate units that compute in full precision.
        gather_wire: See `MixedPrecisionPolicy`. Not in torch.
        reduce_wire: See `MixedPrecisionPolicy`. Not in torch.

    Raises:
        ConfigError: A dtype is not a floating-point dtype, `keep_low_precision_grads` is True, or
            `MixedPrecisionPolicy` does not support an encoding.
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
        check_floating(self, ("param_dtype", "reduce_dtype", "buffer_dtype"))
        check_flags(
            cast_forward_inputs=self.cast_forward_inputs,
            cast_root_forward_inputs=self.cast_root_forward_inputs,
            keep_low_precision_grads=self.keep_low_precision_grads,
        )
        check_iterable("_module_classes_to_ignore", self._module_classes_to_ignore, "a list of module classes")
        check_encoding(self)
        if self.keep_low_precision_grads:
            raise ConfigError(
                "keep_low_precision_grads=True is not supported: shards keep the dtype of their parameters, and the "
                "optimizer needs gradients of that dtype. Leave it False, and set reduce_dtype to reduce gradients "
                "in low precision."
            )

    def policy(self) -> MixedPrecisionPolicy:
        """Return the policy of a unit: all fields that both classes have, with their values here."""
        shared = {field.name for field in fields(MixedPrecisionPolicy)}
        return MixedPrecisionPolicy(
            **{field.name: getattr(self, field.name) for field in fields(self) if field.name in shared}
        )
