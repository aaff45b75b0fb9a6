"""Fast fake tensors: torch computes the result of an operation once, and a cache repeats it.

Even for cached operations, torch's own `FakeTensorMode` takes longer than everything else in a dry run, because it
makes many checks that only the compiler needs. Here views call their kernels directly. For other operations the results
are cached by the shapes of tensors and by the other arguments. All other calls use torch's implementation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
_NOT_KNOWN_FROM_SHAPES = frozenset(("data_dependent_output", "dynamic_output_shape", "inplace_view"))  # tags
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default  # a view, though its schema does not say so
ASKS_DEVICE = torch.ops.prim.device.default
"""The operation that returns the device of a tensor. torch itself runs it several times per operation."""


@dataclass(frozen=True, slots=True)
class _Like:
    """A tensor with a new storage."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class _Given:
    """An argument of the operation, by index; keyword arguments follow positional ones."""

    number: int


@dataclass(frozen=True, slots=True)
class _Value:
    """A value that is not a tensor."""

    value: Any


class QuickFakes(FakeTensorMode):
    """Context manager that creates tensors without memory. Real tensors used together with them are converted."""

    _known: ClassVar[dict[Any, Any]] = {}  # results of operations by their arguments; None: torch computes them

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False  # torch's own cache would keep the storages of arguments alive
        self._vars: dict[torch.device, dict[str, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not wrap each call of `__torch_dispatch__` to disable its compiler."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the result of `func`."""
        kwargs = kwargs or {}
        if func is ASKS_DEVICE and type(args[0]) is FakeTensor:
            return args[0].device
        result = self.quickly(func, args, kwargs)
        if result is not NotImplemented:
            return result
        given = (*args, *kwargs.values())
        key = self._key(func, given, kwargs) if _is_known_from_shapes(func) else None
        result = self.dispatch(func, types, args, kwargs)
        if key is not None and key not in self._known:
            is_same = self._key(func, given, kwargs) == key  # False if the operation changed the shape of an argument
            self._known[key] = self._reported(result, given) if is_same else None
        return result

    def quickly(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of `func` if it is a view or cached; else `NotImplemented`. No dispatch mode sees it."""
        if not _is_known_from_shapes(func):
            return NotImplemented
        given = (*args, *kwargs.values())
        key = self._key(func, given, kwargs)
        if key is None:
            return NotImplemented
        if func.is_view or func is _UNSAFE_VIEW:
            with in_kernel_invocation_manager(self):
                viewed = func(*args, **kwargs)
            return self._wrapped(viewed, args[0].fake_device)
        reported = self._known.get(key)
        if reported is None:
            return NotImplemented
        unheard = torch._C._DisableTorchDispatch()
        try:
            return self._made(reported, given)
        finally:
            del unheard

    def _key(self, func: Any, given: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """Return everything that a result can depend on; None if an argument is not plain."""
        key = [func, torch.get_default_dtype(), *kwargs]
        return tuple(key) if self._add(key, given) else None

    def _add(self, key: list[Any], args: Sequence[Any]) -> bool:
        """Add everything that a result can depend on to `key`. Return False if an argument is not plain."""
        for arg in args:
            kind = type(arg)
            if kind is FakeTensor:
                if arg.fake_mode is not self or arg.constant is not None or arg.layout is not torch.strided:
                    return False
                if arg.dtype.is_complex:
                    return False
                key += (arg.shape, arg.stride(), arg.dtype, arg.fake_device)
            elif kind in _PLAIN:
                key += (kind, arg)
            elif kind is list or kind is tuple:
                key += (kind, len(arg))
                if not self._add(key, arg):
                    return False
            else:
                return False
        return True

    def _reported(self, result: Any, args: Sequence[Any]) -> Any:
        """Return a description for creating `result` again, as a tuple for several tensors; None if impossible."""
        if not isinstance(result, tuple | list):
            return self._reported_one(result, args)
        each = [self._reported_one(item, args) for item in result]
        tensors = [item for item in result if isinstance(item, Tensor)]
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        return None if None in each or len(storages) < len(tensors) else tuple(each)

    def _reported_one(self, result: Any, args: Sequence[Any]) -> Any:
        if result is None or (type(result) in _PLAIN and all(type(arg) in _PLAIN for arg in args)):
            return _Value(result)
        given = next((_Given(number) for number, arg in enumerate(args) if arg is result), None)
        if given is not None or type(result) is not FakeTensor:
            return given
        if not self._add([], [result]) or result.requires_grad or result.untyped_storage()._cdata in _storages(args):
            return None
        like = _Like(result.shape, result.stride(), result.dtype, result.fake_device)
        made = self._made(like, args)
        same_keys = torch._C._dispatch_key_set(made) == torch._C._dispatch_key_set(result)
        is_whole = result.storage_offset() == 0 and result.untyped_storage().nbytes() == made.untyped_storage().nbytes()
        return like if same_keys and is_whole else None

    def _made(self, reported: Any, args: Sequence[Any]) -> Any:
        if type(reported) is _Like:
            empty = torch.empty_strided(reported.shape, reported.stride, dtype=reported.dtype, device="meta")
            return self._wrapped(empty, reported.device)
        if type(reported) is _Given:
            return args[reported.number]
        if type(reported) is _Value:
            return reported.value
        return tuple([self._made(item, args) for item in reported])

    def _wrapped(self, meta: Any, device: torch.device) -> Any:
        """Convert meta tensors to fake ones of `device`, like torch's constructor, but without its checks."""
        if not isinstance(meta, Tensor):
            return type(meta)([self._wrapped(item, device) for item in meta])
        left = self._vars.get(device)
        if left is None:
            left = self._vars[device] = dict(vars(FakeTensor(self, torch.empty(0, device="meta"), device)))
        made = Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
        torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(left)
        return made


@cache
def _is_known_from_shapes(func: Any) -> bool:
    """Return True if results of `func` can be cached.

    This requires that the result follows from shapes, dtypes and other arguments, and is new memory, an argument, or a
    view of the first argument.
    """
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return False
    name = str(func._overloadpacket).removeprefix("aten.")
    if any(tag.name in _NOT_KNOWN_FROM_SHAPES for tag in func.tags) or name.startswith("lift_fresh"):
        return False
    may_copy = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return not (func.is_view and may_copy)  # as `to` does


def _storages(tree: Any) -> set[int]:
    """Return the handles of the storages of the tensors in `tree`."""
    if isinstance(tree, Tensor):
        return {tree.untyped_storage()._cdata}
    return set().union(*map(_storages, tree)) if isinstance(tree, tuple | list) else set()
