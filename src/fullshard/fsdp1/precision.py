"""The dtypes of a `FullyShardedDataParallel` module, and their conversion to a `MixedPrecisionPolicy`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.engine.nested import map_tensors, tensors_in
from fullshard.errors import ConfigError
from fullshard.policy.arguments import check_flags, check_iterable
from fullshard.policy.precision import MixedPrecisionPolicy, check_encoding, check_floating, is_castable

_INPUT_DTYPE = "_full_precision_input_dtype"


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
        _module_classes_to_ignore: Modules of these classes become separate units that compute in full precision. Their
            inputs are cast to the dtype of their stored parameters, and their outputs back to the dtype of the inputs.
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
        """Return the policy of a unit, with the values of all fields that both classes have."""
        shared = {field.name for field in fields(MixedPrecisionPolicy)}
        return MixedPrecisionPolicy(
            **{field.name: getattr(self, field.name) for field in fields(self) if field.name in shared}
        )


def compute_in_full_precision(module: nn.Module) -> None:
    """Cast positional inputs of `module` to the dtype of its parameters, and its outputs to the dtype of its inputs.

    A module without floating-point parameters computes in float32.
    """
    if _INPUT_DTYPE not in vars(module):
        vars(module)[_INPUT_DTYPE] = None
        module.register_forward_pre_hook(_cast_inputs)
        module.register_forward_hook(_cast_outputs)


def _cast_inputs(module: nn.Module, args: Any) -> Any:
    stored = (param.dtype for param in module.parameters() if is_castable(param.dtype))
    full = next(stored, torch.float32)
    given = [tensor.dtype for tensor in tensors_in(args) if is_castable(tensor.dtype) and tensor.dtype != full]
    vars(module)[_INPUT_DTYPE] = given[-1] if given else None
    return map_tensors(partial(_cast, full), args) if given else None


def _cast_outputs(module: nn.Module, _: Any, output: Any) -> Any:
    dtype = vars(module)[_INPUT_DTYPE]
    return None if dtype is None else map_tensors(partial(_cast, dtype), output)


def _cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if is_castable(tensor.dtype) else tensor
