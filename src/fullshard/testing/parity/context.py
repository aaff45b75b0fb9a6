"""Context parallelism: each rank's part of a batch, and attention over the full sequence.

Like torch's `context_parallel`, this replaces `scaled_dot_product_attention`. torch's implementation has no kernels for
CPUs, so here each rank gathers the keys and values of the other ranks. The model gets the same in both cases: a part of
the sequence, with attention to the full sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fullshard.engine.nested import map_tensors
from fullshard.errors import ConfigError
from fullshard.testing.parity.parallel import CutContext

_mesh: list[DeviceMesh] = []  # of this process, while it trains with a part of each sequence
_calls: list[int] = [0]


@contextmanager
def attention_over(mesh: DeviceMesh) -> Iterator[None]:
    """Context manager that splits batches (`cut_batch`) and computes attention over all ranks of the 1-D `mesh`.

    Raises:
        ConfigError: Attention was never called.
    """
    original = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = _attention(original)
    _mesh.append(mesh)
    _calls[0] = 0
    try:
        yield
    finally:
        _mesh.pop()
        F.scaled_dot_product_attention = original
    if not _calls[0]:
        raise ConfigError(
            "cp: the model never called torch.nn.functional.scaled_dot_product_attention, so the parts of a sequence "
            'did not attend to one another. Use that function (attn_implementation="sdpa" in transformers), or leave '
            "cp out."
        )


def cut_batch(batch: Any, context: CutContext | None) -> Any:
    """Return this rank's part of each sequence of `batch` within `attention_over`; outside of it, return `batch`."""
    if not _mesh:
        return batch
    mesh = _mesh[-1]
    world, rank = mesh.size(), mesh.get_local_rank()
    dims = {id(tensor): dim for tensor, dim in (_along_dim_1(batch) if context is None else context(batch))}

    def part(tensor: Tensor) -> Tensor:
        dim = dims.get(id(tensor))
        if dim is None:
            return tensor
        if tensor.shape[dim] % world:
            raise ConfigError(
                f"cp={world}: a batch has a tensor of shape {tuple(tensor.shape)}, whose dim {dim} cannot be split "
                f"into {world} equal parts. Use another length, or pass a function that returns the tensors of a "
                "batch with a sequence dim (--context)."
            )
        return tensor.chunk(world, dim)[rank].contiguous()

    return map_tensors(part, batch)


def _along_dim_1(batch: Any) -> Sequence[tuple[Tensor, int]]:
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else [batch]
    return [(value, 1) for value in values if isinstance(value, Tensor) and value.ndim > 1]


def _attention(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `scaled_dot_product_attention` for equal parts of the queries, keys and values on each rank."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        if attn_mask is not None:
            raise ConfigError(
                f"cp: attention was called with a mask of shape {tuple(attn_mask.shape)}, which covers only one part "
                "of the sequence. Call it with is_causal, or without a mask."
            )
        _calls[0] += 1
        mesh, length = _mesh[-1], query.shape[-2]
        whole = [cast(Any, _Gathered).apply(item, mesh.get_group()) for item in (key, value)]
        if is_causal:
            position = torch.arange(length, device=query.device) + mesh.get_local_rank() * length
            attn_mask = position[:, None] >= torch.arange(length * mesh.size(), device=query.device)
        return original(query, *whole, attn_mask=attn_mask, dropout_p=dropout_p, **options)

    return attend


class _Gathered(torch.autograd.Function):
    """All-gather the parts along the second-to-last dim. The gradient is the sum over all ranks in rank order."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=-2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        sent = torch.stack(grads[0].chunk(ctx.group.size(), dim=-2))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=ctx.group)
        total = received[0]
        for term in received[1:]:
            total = total + term
        return total, None
