"""Small wrapper subclasses for weights, which define the tensors to send. No library is needed."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten
_KEEPS_CLASS = {
    *(_aten.detach.default, _aten.clone.default, _aten.new_zeros.default, _aten.empty_like.default),
    *(_aten.split.Tensor, _aten.slice.Tensor, _aten.copy_.default, _aten._to_copy.default, _aten.view.default),
}

_COLLECTIVES = {
    getattr(torch.ops._c10d_functional, name).default
    for name in ("all_gather_into_tensor", "wait_tensor", "_wrap_tensor_autograd")
    if hasattr(torch.ops._c10d_functional, name)
}


def encode(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of 8 bits, and a scale for each row."""
    scales = values.abs().amax(1).clamp(min=1e-6) / 127
    return (values / scales[:, None]).round().to(torch.int8), scales


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.to(scales.dtype) * scales[:, None]


class Wrapper(torch.Tensor):
    """A tensor with others in it, and a number that a user may leave on it."""

    inner: tuple[str, ...]

    @staticmethod
    def __new__(cls, *tensors: Tensor, shape: torch.Size | None = None, dtype: torch.dtype | None = None) -> Wrapper:
        first = tensors[0]
        return torch.Tensor._make_wrapper_subclass(
            cls, first.shape if shape is None else shape, dtype=dtype or tensors[-1].dtype, device=first.device
        )

    def __init__(self, *tensors: Tensor, **_: Any) -> None:
        for name, tensor in zip(self.inner, tensors, strict=True):
            setattr(self, name, tensor)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.inner), None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, shape: Any, strides: Any) -> Wrapper:
        return cls(*(inner[name] for name in cls.inner), shape=shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} of {cls.__name__}")


class Operand(Wrapper):
    """The gathered value: codes and scales, as a kernel would take them."""

    inner = ("codes", "scales")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (_aten.detach.default, _aten.view.default):
            return cls(args[0].codes, args[0].scales)
        return super().__torch_dispatch__(func, types, args, kwargs)


class Weight(Wrapper):
    """Weights that are encoded before they are sent: trained in full precision, computed with in 8 bits."""

    inner = ("values",)
    calls: ClassVar[list[tuple[Any, ...]]] = []

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Weight, lambda item: item.values, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return tree_map_only(Tensor, cls, result) if func in _KEEPS_CLASS else result

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> Any:
        Weight.calls.append((tuple(self.shape), mesh.size(), tuple(outer_size), outer_stride, module, mp_policy))
        return encode(self.values), getattr(self, "note", None)

    def fsdp_post_all_gather(
        self, gathered: Any, metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        Weight.calls.append((metadata, param_dtype, out is None))
        return None if out is not None else (Operand(*gathered), gathered)


class DecodedWeight(Weight):
    """A weight that is decoded into separate memory after the gather. Its method takes the mesh only."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return encode(self.values), None

    def fsdp_post_all_gather(
        self, gathered: Any, metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        decoded = decode(*gathered)
        if out is None:
            return decoded, (decoded,)
        out.copy_(decoded)
        return None


class FlatWeight(Weight):
    """A weight that sends tensors without the rows of a shard."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.values.flatten(),), None


class OneHook(Weight):
    fsdp_post_all_gather = property()


class Codes(Operand):
    """Weights that are stored and sent in 8 bits."""

    @classmethod
    def of(cls, values: Tensor) -> Codes:
        return cls(*encode(values))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        its = [
            [getattr(argument, name) if isinstance(argument, Codes) else argument for argument in args]
            for name in cls.inner
        ]
        if func is _aten.new_zeros.default:
            return cls(
                *(func(item, size, **kwargs) for (item, _), size in zip(its, (args[1], args[1][:1]), strict=True))
            )
        if func is _aten.view.default:
            return cls(args[0].codes.view(args[1]), args[0].scales)
        if func is _aten.split.Tensor:
            return [cls(*pair) for pair in zip(*(func(*each, **kwargs) for each in its), strict=True)]
        if func in _KEEPS_CLASS or func in _COLLECTIVES:
            left = [func(*each, **kwargs) for each in its]
            return args[0] if func is _aten.copy_.default else cls(*left)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.codes, self.scales), None

    def fsdp_post_all_gather(
        self, gathered: Any, metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        return None if out is not None else (Codes(*gathered), gathered)


class Product(torch.autograd.Function):
    """A product with codes forward and backward. The weight gets a gradient as if it were a plain tensor."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:
        context.save_for_backward(x, weight)
        return x @ decoded(weight).to(x.dtype).t()

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = context.saved_tensors
        flat = grad.flatten(0, -2).t() @ x.flatten(0, -2) if context.needs_input_grad[1] else None
        return grad @ decoded(weight), flat


def decoded(weight: Tensor) -> Tensor:
    if isinstance(weight, Weight):
        return decode(*encode(weight.values))
    return decode(weight.codes, weight.scales) if isinstance(weight, Operand) else weight


class LowLinear(nn.Module):
    """A linear layer whose weight is a tensor of class `kind`."""

    def __init__(self, into: int, out: int, kind: type[Weight] = Weight, *, trained: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(kind(torch.randn(out, into) / into**0.5), requires_grad=trained)
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight) + self.bias
