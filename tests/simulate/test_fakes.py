"""Quickly created fake tensors equal the fake tensors that torch creates."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from fullshard._fakes import QuickFakes


def views(x: Tensor) -> Any:
    """Return views of every kind: slices, other shapes, and views that the schema does not declare as views."""
    parts = (*x.split(3), *x.unbind(1), *x.chunk(2, dim=1))
    same = x.detach(), torch.ops.aten.alias(x), x.view_as(x), torch.ops.aten._unsafe_view(x, [x.numel()])
    return *parts, *same, x.t(), x.reshape(-1), x[1:, 2], x[None].expand(2, -1, -1), x.as_strided((2, 2), (1, 3), 1)


def new(x: Tensor) -> Any:
    """Return results in new memory: one or several, of other dtypes, strides and sizes."""
    other = x.t().contiguous()
    normed = torch.native_layer_norm(x, [x.shape[1]], None, None, 1e-5)
    return x @ other, x.t() + other, x.to(torch.bfloat16), x > 0, x.sum(), x.argmax(1), torch.cat([x, x]), *normed


def written(x: Tensor) -> Any:
    """Return results of in-place and `out` operations: the arguments themselves, or nothing."""
    y = x.clone()
    torch._foreach_add_([y, y], 1.0)
    return y.add_(1), y.zero_(), y.copy_(x), torch._foreach_mul([x, y], 2.0), torch.stack([y, y], out=x.new_empty(0))


def given_outs(x: Tensor) -> Any:
    """Outputs have the right shape or none yet; calls with several outputs return nothing."""
    rows, columns = x.shape
    each = [x.new_empty(rows, 1) for _ in range(columns)]
    torch.split_with_sizes_copy(x, [1] * columns, dim=1, out=each)
    products = [torch.mm(x, x.t(), out=x.new_empty(shape)) for shape in ((rows, rows), (0,))]
    chunks = torch._chunk_cat([x, x], 0, 2, out=x.new_empty(2, 2 * -(-rows // 2) * columns))
    return *products, *each, chunks, x.new_empty(1, dtype=torch.promote_types(x.dtype, torch.float32))


def trained(x: Tensor) -> Any:
    """Return a loss with its gradients, by attention and fused cross-entropy."""
    weight = torch.empty(x.shape[1], 12).requires_grad_()
    heads = (x @ weight).view(1, -1, 3, 4).transpose(1, 2)
    attended = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    loss = F.cross_entropy(attended.transpose(1, 2).flatten(2)[0], torch.zeros(x.shape[0], dtype=torch.int64))
    loss.backward()
    return loss, weight.grad


def reported(result: Any, given: Tensor) -> list[Any]:
    """Return all properties of fake tensors, and which of them share memory."""
    leaves = [tree_leaf for tree_leaf in tree_leaves(result) if isinstance(tree_leaf, Tensor)]
    storages = [given.untyped_storage()._cdata, *(leaf.untyped_storage()._cdata for leaf in leaves)]
    shared = [storages.index(storage) for storage in storages]
    each = [
        (
            leaf.shape,
            leaf.stride(),
            leaf.storage_offset(),
            leaf.dtype,
            leaf.device,
            leaf.requires_grad,
            leaf.untyped_storage().size(),
        )
        for leaf in leaves
    ]
    return [each, shared, [torch._C._dispatch_key_set(leaf) for leaf in leaves]]


@pytest.mark.parametrize("run", [views, new, written, given_outs, trained])
def test_quick_fake_tensors_match_torch_fake_tensors(run: Callable[[Tensor], Any]) -> None:
    """Compare the first call and a cached one, for an equal tensor and for one of another layout."""
    quick, slow = QuickFakes(), FakeTensorMode(allow_non_fake_inputs=True)

    def under(mode: FakeTensorMode, shape: tuple[int, ...], dtype: torch.dtype, transposed: bool) -> list[Any]:
        with mode:
            x = torch.empty(shape, dtype=dtype)
            x = x.t().clone(memory_format=torch.preserve_format).t() if transposed else x
            return reported(run(x), x)

    for shape in ((6, 4), (6, 4), (5, 3)):
        for dtype in (torch.float32, torch.float64):
            for transposed in (False, True):
                assert under(quick, shape, dtype, transposed) == under(slow, shape, dtype, transposed)


def test_torch_is_called_once_for_identical_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views are never computed, other operations once per shape. The cache keeps no tensor alive."""
    monkeypatch.setattr(QuickFakes, "_known", {})
    requested: list[str] = []
    dispatch = QuickFakes.dispatch

    def count(self: QuickFakes, func: Any, *args: Any) -> Any:
        requested.append(str(func))
        return dispatch(self, func, *args)

    monkeypatch.setattr(QuickFakes, "dispatch", count)
    with QuickFakes():
        x = torch.empty(4, 4)
        requested.clear()
        for _ in range(3):
            (x.t()[1:] @ x).view(-1)
        assert requested == ["aten.mm.default"]
        x.new_empty(4, 4).add_(x)
        storage = x.untyped_storage()._cdata
        assert not any(isinstance(part, Tensor) or part == storage for key in QuickFakes._known for part in key)
