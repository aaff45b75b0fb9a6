"""Operations with one fused kernel on a GPU and several kernels on a CPU. The trace of a GPU records the fused one.

The tensors of a dry run are CPU tensors. For those, torch decomposes operations that have fused kernels on CUDA:

    dropout          `native_dropout`, which keeps a mask of one byte per element. On a CPU it takes three kernels and
                     a mask in the dtype of the input
    attention        with dropout, with a bias that requires gradients, or with values and keys of different widths: one
                     kernel, and no matrix of scores in memory
    softmax          from float16 to float32: one kernel that converts while it reads
    RMSNorm          `_fused_rms_norm`, if input and weight have the same dtype
    LSTM, GRU, RNN   `_cudnn_rnn`: see `rnn.py`

A torch build without CUDA disables `torch.autocast("cuda")`. A dry run enables it: operations then have the dtypes of
autocast on CUDA, including float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fullshard._compat import unpacked
from fullshard._dry_compat import autocast_of_cuda_on_cpu, below_autograd, kernels_instead
from fullshard.dry import rnn

_ATEN = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Context manager that makes fake CPU tensors use the operations of CUDA."""
    in_float32 = {name: partial(_in_float32, _operation(name)) for name in _FLOAT32_UNDER_AUTOCAST}
    with ExitStack() as stack:
        stack.enter_context(kernels_instead({**_KERNELS, **rnn.KERNELS}, "AutogradCPU"))
        stack.enter_context(kernels_instead(rnn.META_KERNELS, "Meta"))
        stack.enter_context(kernels_instead(in_float32, "AutocastCPU"))
        stack.enter_context(autocast_of_cuda_on_cpu())
        yield


def _dropout(x: Tensor, p: float, train: bool) -> Any:
    if not train or not 0 < p < 1 or x.numel() == 0:
        return unpacked(_ATEN.dropout.default, x, p, train)
    return _ATEN.native_dropout.default(x, p, train)[0]


def _softmax(name: str, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    if dtype is torch.float32 and x.dtype is torch.float16:
        return getattr(_ATEN, f"_{name}").default(x, dim, True)
    return unpacked(getattr(_ATEN, name).int, x, dim, dtype)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    trains_mask = attn_mask is not None and attn_mask.requires_grad
    fused_on_cpu = dropout_p == 0 and not trains_mask and query.shape[-1] == value.shape[-1]
    is_plain = query.ndim == key.ndim == value.ndim == 4 and query.shape[1] == key.shape[1] == value.shape[1]
    if fused_on_cpu or not is_plain or query.dtype not in (*_HALF, torch.float32):
        options = {"scale": scale, "enable_gqa": enable_gqa}
        whole = _ATEN.scaled_dot_product_attention.default
        return unpacked(whole, query, key, value, attn_mask, dropout_p, is_causal, **options)
    bias = attn_mask
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(~bias, float("-inf"))
    if bias is not None:
        bias = bias.expand(*query.shape[:-1], key.shape[-2])
    saves = torch.is_grad_enabled() and any(item.requires_grad for item in (query, key, value))
    fused = _ATEN._scaled_dot_product_efficient_attention.default
    return fused(query, key, value, bias, saves, dropout_p, is_causal, scale=scale)[0]


class _RmsNorm(torch.autograd.Function):
    """The fused kernel, forward and backward. Autograd has no formula for it on a CPU."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor | None, shape: Sequence[int], eps: float | None) -> Any:
        with below_autograd():
            normed, inverse = _ATEN._fused_rms_norm.default(x, shape, weight, eps)
        context.save_for_backward(x, weight, inverse)
        context.shape = shape
        return normed

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, inverse = context.saved_tensors
        needed = list(context.needs_input_grad[:2])
        with below_autograd():
            backward = _ATEN._fused_rms_norm_backward.default
            of_x, of_weight = backward(grad, x, context.shape, inverse, weight, needed)
        return of_x, of_weight, None, None


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Any:
    if x.dtype.is_complex or (weight is not None and weight.dtype != x.dtype):
        return unpacked(_ATEN.rms_norm.default, x, shape, weight, eps)
    return _RmsNorm.apply(x, weight, shape, eps)  # type: ignore[no-untyped-call]


_KERNELS: dict[str, Callable[..., Any]] = {
    "dropout": _dropout,
    "softmax.int": partial(_softmax, "softmax"),
    "log_softmax.int": partial(_softmax, "log_softmax"),
    "scaled_dot_product_attention": _attention,
    "rms_norm": _rms_norm,
}

_FLOAT32_UNDER_AUTOCAST = (
    *("layer_norm", "native_layer_norm", "group_norm", "softmax.int", "log_softmax.int", "nll_loss", "nll_loss2d"),
    *("exp", "log", "rsqrt", "reciprocal", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "softplus", "sum"),
    *("sum.dim_IntList", "cumsum", "logsumexp", "linalg_vector_norm", "cosine_similarity"),
    "binary_cross_entropy_with_logits",
)
"""Common operations that torch's autocast runs in float32 on CUDA but not on CPUs."""


def _operation(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(_ATEN, packet), overload or "default")


def _in_float32(operation: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast("cpu", enabled=False):
        return operation(
            *[_widened(argument) for argument in args], **{name: _widened(kwarg) for name, kwarg in kwargs.items()}
        )


def _widened(value: Any) -> Any:
    is_half = isinstance(value, Tensor) and value.dtype in _HALF
    return value.float() if is_half else value
