"""Recurrent layers in dry runs: one operation of cuDNN on a GPU, and the workspace of oneDNN on a CPU.

On CPU tensors, torch computes GRUs and plain RNNs one step of the sequence at a time, and its fake LSTMs lack the
workspace that backward reads. On CUDA, one `_cudnn_rnn` computes all layers and steps. The weights are copied to one
buffer first, because sharded parameters are not laid out as cuDNN needs them.

Neither library documents the size of its workspace. cuDNN's is assumed to be the gates, the cell states and the outputs
of every step. oneDNN's was measured (torch 2.13, LSTM): 15.25 values per step, row and hidden unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fullshard._dry_compat import below_autograd

_ATEN = torch.ops.aten
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # of cuDNN
_SAVED = {0: 1, 1: 1, 2: 6, 3: 5}  # values per step, row and hidden unit: gates, cell states and outputs
_ONEDNN_SAVED = 15.25


class _CudnnRnn(torch.autograd.Function):
    """cuDNN's kernel, forward and backward. Autograd has no formula for it on a CPU."""

    @staticmethod
    def forward(context: Any, x: Tensor, hx: Tensor, cx: Tensor | None, how: Sequence[Any], *weights: Tensor) -> Any:
        mode, hidden, layers, train, bidirectional = how[0], how[1], how[3], how[6], how[7]
        saved = _SAVED[mode] * x.numel() // x.shape[-1] * hidden * layers * (1 + bidirectional)
        with below_autograd():
            buffer = torch.cat([weight.reshape(-1) for weight in weights])
            reserve = torch.empty(saved * x.element_size() if train else 0, dtype=torch.uint8)
            stride = len(weights) // (layers * (1 + bidirectional))
            kernel = _ATEN._cudnn_rnn.default
            output, hy, cy, *_ = kernel(x, list(weights), stride, buffer, hx, cx, *how, None)
        context.how, context.stride = how, stride
        context.save_for_backward(x, hx, cx, output, buffer, reserve, *weights)
        return output, hy, cy

    @staticmethod
    def backward(context: Any, *grads: Tensor | None) -> Any:
        x, hx, cx, output, buffer, reserve, *weights = context.saved_tensors
        state, how = (context.stride, buffer, hx, cx, output, *grads), context.how
        needed = context.needs_input_grad
        mask = [needed[0], needed[1], needed[2], any(needed[4:])]
        with below_autograd():
            kernel = _ATEN._cudnn_rnn_backward.default
            of_x, of_hx, of_cx, of_weights = kernel(x, weights, *state, *how, None, reserve, mask)
        of_weights = of_weights or [None] * len(weights)
        return of_x, of_hx, of_cx if cx is not None else None, None, *of_weights


def _backward_on_meta(x: Tensor, weights: Sequence[Tensor], *others: Any) -> Any:
    hx, cx, mask = others[2], others[3], others[-1]
    of_x, of_hx, of_cx = (
        torch.empty_like(tensor) if needed else None
        for tensor, needed in zip((x, hx, cx if cx is not None else hx), mask, strict=False)
    )
    return of_x, of_hx, of_cx, [torch.empty_like(weight) for weight in weights] if mask[3] else []


def _rnn(
    mode: int,
    x: Tensor,
    state: Any,
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
    *,
    batch_sizes: Sequence[int] = (),
) -> Any:
    """Return the output and the last states, as `torch.lstm` or `torch.gru` do."""
    hx, cx = (state[0], state[1]) if isinstance(state, list | tuple) else (state, None)
    projected = hx.shape[-1]
    hidden = projected if cx is None else cx.shape[-1]
    how = (
        *(mode, hidden, projected if projected != hidden else 0, layers, batch_first, dropout, train, bidirectional),
        list(batch_sizes),
    )
    output, hy, cy = _CudnnRnn.apply(x, hx, cx, how, *weights)  # type: ignore[no-untyped-call]
    return (output, hy) if cx is None else (output, hy, cy)


def _packed(mode: int, x: Tensor, batch_sizes: Tensor, state: Any, *how: Any) -> Any:
    """Return the result of `_rnn` for packed sequences. Fakes have no lengths, so every step has all rows."""
    rows = (state[0] if isinstance(state, list | tuple) else state).shape[1]
    sizes = [rows] * batch_sizes.shape[0]
    return _rnn(mode, x, state, *how, batch_sizes=sizes)


def with_workspace(x: Tensor, result: Sequence[Tensor], hidden: int) -> Sequence[Tensor]:
    """Return the result of a fake `mkldnn_rnn_layer` with the workspace that it keeps for backward."""
    values = int(_ONEDNN_SAVED * x.numel() // x.shape[-1] * hidden)
    return *result[:3], x.new_empty(4 * values, dtype=torch.uint8)


KERNELS: dict[str, Callable[..., Any]] = {
    **{f"{name}.input": partial(_rnn, mode) for name, mode in _MODES.items()},
    **{f"{name}.data": partial(_packed, mode) for name, mode in _MODES.items()},
}
META_KERNELS: dict[str, Callable[..., Any]] = {"_cudnn_rnn_backward": _backward_on_meta}
