"""Tensors without memory, whose values are in a scratch file.

[Note: operations on tensors on disk]
Every operation works on such a tensor: its values are read into new memory, the operation runs on that memory, and
in-place changes are written back. So a state dict of such tensors is correct, and is not read until its values are
used. This is slow and meant for occasional access. The optimizer step gives these tensors memory instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fullshard._compat import tensor_without_memory, tree_map
from fullshard.disk.files import aligned_buffer
from fullshard.disk.interface import ALIGNMENT, TensorOnDisk, aligned, noting_errors
from fullshard.disk.space import Extent

_COPY_NBYTES = 16 * 2**20  # bytes copied from file to file at a time


def no_buffer() -> Tensor:
    """Return an empty buffer."""
    return torch.empty(0, dtype=torch.uint8, device="cpu")


class OnDisk(TensorOnDisk):
    """A contiguous tensor whose values are in `extent`, starting at byte `start`.

    Views with a different shape are `ViewOnDisk`s, in memory. See [Note: operations on tensors on disk].
    """

    extent: Extent

    @staticmethod
    def __new__(
        cls, extent: Extent, start: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> OnDisk:
        tensor: OnDisk = tensor_without_memory(cls, shape, dtype, device)
        tensor.extent, tensor.start = extent, start
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares its own as disabled
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ALIASES or (func is torch.ops.aten.view.default and list(args[0].shape) == list(args[1])):
            tensor = args[0]
            return OnDisk(tensor.extent, tensor.start, tensor.shape, tensor.dtype, tensor.device)
        if "_foreach_" in func._schema.name and len(args[0]) > 1:
            return _one_by_one(func, args, kwargs)
        memory: dict[int, tuple[OnDisk, Tensor]] = {}

        def filled(value: Any) -> Any:
            if not isinstance(value, OnDisk):
                return value
            if id(value) not in memory:
                is_overwritten = func is torch.ops.aten.copy_.default and value is args[0] and value is not args[1]
                empty = torch.empty(value.shape, dtype=value.dtype, device=value.device) if is_overwritten else None
                memory[id(value)] = value, value.fetch() if empty is None else empty
            return memory[id(value)][1]

        result = func(*tree_map(filled, args), **tree_map(filled, kwargs))
        given = [(argument, value) for argument, value in zip(func._schema.arguments, args, strict=False)]
        given += [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]
        changed = [value for argument, value in given if argument.alias_info and argument.alias_info.is_write]
        back: dict[int, OnDisk] = {}

        def stored(value: Any) -> Any:
            if isinstance(value, OnDisk):
                value.store(memory[id(value)][1])
                back[id(memory[id(value)][1])] = value
            return value

        tree_map(stored, changed)
        if func.is_view and isinstance(args[0], OnDisk):
            return tree_map(partial(ViewOnDisk.of, args[0], memory[id(args[0])][1]), result)
        return tree_map(lambda value: back.get(id(value), value), result) if back else result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # nothing is read
        return f"OnDisk({tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.fetch()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.fetch().__reduce_ex__(protocol)

    @property
    def blocks(self) -> tuple[int, int]:
        """The start and end of the disk blocks that contain the values, in the extent."""
        return self.start // ALIGNMENT * ALIGNMENT, aligned(self.start + self.numel() * self.dtype.itemsize)

    def fetch(self) -> Tensor:
        """Return the values in new memory on the tensor's device."""
        begin, end = self.blocks
        with torch.inference_mode(False):  # views may be written to with or without inference mode
            buffer = aligned_buffer(end - begin)
            with noting_errors():
                self.extent.read(buffer, begin).wait()
            return self.over(buffer, begin).to(self.device)

    def store(self, values: Tensor) -> None:
        """Write `values`, which have the same shape and dtype."""
        begin, end = self.blocks
        buffer = aligned_buffer(end - begin)
        with noting_errors():
            for at in {begin, end - ALIGNMENT} if buffer.numel() else ():  # keep other bytes in the same blocks
                self.extent.read(buffer[at - begin :][:ALIGNMENT], at).wait()
            self.over(buffer, begin).copy_(values)
            self.extent.write(buffer, begin).wait()

    def store_part(self, offsets: Sequence[int], values: Tensor) -> None:
        """Write `values` at the given offset in each dim."""
        if values.shape == self.shape:
            self.store(values)
            return
        whole = self.fetch()
        whole[tuple(slice(at, at + size) for at, size in zip(offsets, values.shape, strict=True))] = values
        self.store(whole)

    def copied_to(self, extent: Extent) -> OnDisk:
        """Return a tensor with the same values in `extent`, which has at least `room` bytes."""
        begin, end = self.blocks
        memory = aligned_buffer(min(_COPY_NBYTES, end - begin))
        for at in range(begin, end, _COPY_NBYTES):
            buffer = memory[: end - at]
            self.extent.read(buffer, at).wait()
            extent.write(buffer, at - begin).wait()
        return OnDisk(extent, self.start - begin, self.shape, self.dtype, self.device)

    @property
    def room(self) -> int:
        """The size in bytes of the blocks that contain the values."""
        begin, end = self.blocks
        return end - begin

    def over(self, block: Tensor, begin: int = 0) -> Tensor:
        """Return a view of `block` with this tensor's shape. `block` holds the extent's bytes, starting at `begin`."""
        raw = block[self.start - begin :][: self.numel() * self.dtype.itemsize]
        return raw.view(self.dtype).view(self.shape)


class ViewOnDisk(Tensor):
    """A view of an `OnDisk` tensor, in memory. In-place changes to it are also written to the disk."""

    stored: OnDisk
    whole: Tensor  # the values of `stored` in memory, which this is a view of

    @staticmethod
    def of(stored: OnDisk, whole: Tensor, result: Any) -> Any:
        """Return `result` as a `ViewOnDisk` if it is a view of `whole`, the values of `stored` in memory."""
        if not isinstance(result, Tensor) or result.untyped_storage()._cdata != whole.untyped_storage()._cdata:
            return result
        view = result.as_subclass(ViewOnDisk)
        view.stored, view.whole = stored, whole
        return view

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = list[ViewOnDisk]()
        tree_map(lambda value: views.append(value) if isinstance(value, cls) else None, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            before = [view._version for view in views]
            result = func(*args, **(kwargs or {}))
            for view, version in zip(views, before, strict=True):
                if view._version != version:
                    view._store()
            stored, whole = views[0].stored, views[0].whole
            return tree_map(lambda value: value if isinstance(value, cls) else cls.of(stored, whole, value), result)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self._plain().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def _plain(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    @torch.no_grad()
    def _store(self) -> None:
        """Write the elements of this view to the disk. Other values on the disk do not change."""
        whole = self.stored.fetch()
        values = whole.view(-1).view(self.dtype)  # a view can have another dtype
        skipped = self.storage_offset() * self.itemsize - self.whole.storage_offset() * self.whole.itemsize
        offset = values.storage_offset() + skipped // self.itemsize
        values.as_strided(self.shape, self.stride(), offset).copy_(self)
        self.stored.store(whole)


def _one_by_one(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on lists of tensors element by element, because all of them may not fit in memory."""
    number = len(args[0])

    def nth(value: Any, i: int) -> Any:
        return [value[i]] if isinstance(value, list | tuple) and len(value) == number else value

    done = [
        func(*(nth(value, i) for value in args), **{name: nth(value, i) for name, value in kwargs.items()})
        for i in range(number)
    ]
    return None if func._schema.is_mutable else [item for result in done for item in result]


_ALIASES = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})
