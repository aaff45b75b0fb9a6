"""Recording of every torch operation in a trace, with the memory that it reads, writes and allocates."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard._compat import FakeTensor, is_wrapper_type, outside_of_modes
from fullshard._dry_compat import are_real, data_dependent_errors, finished_work, group_of, grouped_product, has_group
from fullshard._fakes import ASKS_DEVICE, QuickFakes
from fullshard.device.awaited import Awaited
from fullshard.dry.flops import flops_of, skipped_flops_of
from fullshard.dry.rnn import with_workspace
from fullshard.dry.streams import DryAccelerator
from fullshard.errors import ConfigError
from fullshard.tape.tape import HOST, Collective, Operation

_COPIES_OF_FSDP2 = frozenset(
    f"fsdp.{name}" for name in ("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat", "chunk_cat_mixed_dtype")
)
_COPIES = _COPIES_OF_FSDP2 | frozenset(
    f"aten.{name}"
    for name in (
        *("copy_", "_to_copy", "clone", "cat", "stack", "_foreach_copy_", "_foreach_copy", "_chunk_cat"),
        *("split_with_sizes_copy", "constant_pad_nd"),
    )
)
_COPIES_INTO_FIRST_RESULT = "fsdp.all_gather_copy_in"
"""Its schema lacks a write: it copies its first argument to its first result, which is a view of the second."""
_NO_MEMORY = frozenset(("aten._unsafe_view", "aten.set_", "aten.detach", "aten.alias", "prim.device"))
_NO_VALUES = frozenset(
    ("aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten.new_empty_strided")
)
_READ_BY_HOST = frozenset(("aten._local_scalar_dense", "aten.equal", "aten.nonzero", "aten.is_nonzero"))

_NOT_TENSORS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout))
_ENDLESS = 10_000  # consecutive reads of a value by one line that indicate an endless loop


class EndlessLoopError(ConfigError):
    """A loop in a dry run waits for a value that never appears. `found` is the message without the remedy."""

    def __init__(self, found: str) -> None:
        super().__init__(f"{found} Pass values=True, or remove the loop.")
        self.found = found


class Watch(TorchDispatchMode):
    """Context manager that records operations in the trace of `accelerator`, on the current stream.

    With fake tensors and a simulated world, collectives are not executed. If the host reads a value of a fake tensor,
    the result is 1 or True.
    """

    def __init__(self, accelerator: DryAccelerator, fakes: QuickFakes | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._accelerator = accelerator
        self._tape = accelerator.tape
        self._storages = accelerator.storages
        self._fakes = fakes
        self._reads, self._reads_at = 0, ""  # consecutive reads of values by one line
        self._groups: dict[tuple[int, ...], tuple[int, ...]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch's compiler does not check at every operation whether to skip it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run or simulate the operation and record it. For wrappers such as `DTensor`, record the wrapped tensors."""
        if func is ASKS_DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device
        if Awaited in types or any(map(is_wrapper_type, types)):
            return NotImplemented
        kwargs = kwargs or {}
        kind = _kind(func)
        if kind == "view" and FakeTensor in types:
            return self._execute(func, args, kwargs)
        given = _tensors((args, kwargs))
        if self._fakes is not None and are_real(given) and kind != "constant":  # such as the ranks of a mesh
            with outside_of_modes():
                return func(*args, **kwargs)
        if kind == "view":
            return func(*args, **kwargs)
        if kind == "constant":
            return self._constant(func(*args, **kwargs))
        if kind == "collective":
            return self._collect(func, args, kwargs)
        name = str(func._overloadpacket)
        on_host = bool(given) and all(map(self._storages.is_host, given))
        stream = HOST if on_host else self._accelerator.stream
        written = _tensors(_written(func, args, kwargs))
        if name == _COPIES_INTO_FIRST_RESULT:
            given = _tensors(args[0])
        reads = () if name in _NO_VALUES else tuple(map(self._storages.access, _without(given, written, func)))
        writes = tuple(map(self._storages.access, written))
        result = self._run(name, func, args, kwargs)
        results, made = _tensors(result), []
        for tensor in results:
            if not self._storages.is_known(tensor) and not tensor.is_meta:
                self._storages.note_allocated(tensor.untyped_storage(), stream)
                made.append(tensor)
        if name in _NO_VALUES or not (results or written or name in _READ_BY_HOST):  # such as a query of dtypes
            return result
        if name == _COPIES_INTO_FIRST_RESULT:
            writes += (self._storages.access(result[0]),)
        writes += tuple(map(self._storages.access, made))
        flops = flops_of(func, args, kwargs, result)
        reported = given[0] if flops else next(itertools.chain(results, written, given))
        dtype = str(reported.dtype).removeprefix("torch.")
        skipped = skipped_flops_of(func, args, kwargs, flops) if flops else 0
        origin, copies = self._tape.origin, name in _COPIES
        crosses = copies and len({self._storages.is_host(tensor) for tensor in given}) > 1
        self._tape.note(Operation(name, stream, origin, reads, writes, flops, copies, dtype, skipped, crosses))
        self._accelerator.queued += 1
        if self._accelerator.has_streams and stream != HOST and _blocks_host(name, crosses, args, kwargs):
            self._accelerator.block_host(stream, name)
        return result

    def _constant(self, made: Any) -> Any:
        """Record a tensor created from Python values. A number, such as a step count, is in host memory."""
        if self._accelerator.has_streams and isinstance(made, Tensor) and made.ndim == 0:
            self._storages.note_allocated(made.untyped_storage(), HOST)
        return made

    def _run(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if self._fakes is not None and name in ("aten._local_scalar_dense", "aten.equal", "aten.is_nonzero"):
            self._note_read(name)
            if name != "aten._local_scalar_dense" or args[0].dtype == torch.bool:
                return True
            return 1.0 if args[0].dtype.is_floating_point else 1
        if self._fakes is not None and name == "aten._grouped_mm":
            product = grouped_product(args, kwargs)
            if product is not None:
                return product
        try:
            result = self._execute(func, args, kwargs)
            if self._fakes is not None and name == "aten.mkldnn_rnn_layer":
                return with_workspace(args[0], result, hidden=args[10])
            return result
        except data_dependent_errors as error:
            raise ConfigError(
                f"{name} was called in a dry run, but its result depends on values, which fake tensors do not have. "
                "Pass values=True to use real tensors, if the model fits in this machine's memory."
            ) from error

    def _execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation. Fake tensors skip torch's dispatcher where possible."""
        result = NotImplemented if self._fakes is None else self._fakes.quickly(func, args, kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result

    def _note_read(self, name: str) -> None:
        """Count consecutive reads of values by the same line. Fake values never change, so a loop may not end.

        Raises:
            EndlessLoopError: Their number indicates an endless loop.
        """
        frame = sys._getframe(3)
        while frame.f_back is not None and "/torch/" in frame.f_code.co_filename:
            frame = frame.f_back
        site = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
        self._reads = self._reads + 1 if site == self._reads_at else 1
        self._reads_at = site
        if self._reads > _ENDLESS:
            raise EndlessLoopError(
                f"{site} has read a value ({name}) {_ENDLESS} times in a row in a dry run. Fake tensors have no "
                "values: bool() returns True and a number is 1, so a loop that waits for another value does not end."
            )

    def _collect(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record a collective, and execute it unless its tensors are fake."""
        reads, writes, sizes = [], [], []
        for argument, value in zip(func._schema.arguments, args, strict=False):
            tensors = _tensors(value)
            if not argument.name.startswith("output"):
                reads += [self._storages.access(tensor) for tensor in tensors]
                sizes += [tensor.nbytes for tensor in tensors]
            if not argument.name.startswith("input"):
                writes += [self._storages.access(tensor) for tensor in tensors]
        functional, ranks, sends = func.namespace != "c10d", *group_of(func, args)
        if functional or (sends and self._fakes is None):
            result = func(*args, **kwargs)
        else:
            result = (args[0], finished_work()) if len(func._schema.returns) > 1 else finished_work()
        if functional:
            writes = []
            for tensor in _tensors(result):
                if not self._storages.is_known(tensor):
                    self._storages.note_allocated(tensor.untyped_storage(), self._accelerator.stream)
                writes.append(self._storages.access(tensor))
        ranks = self._groups.setdefault(ranks, ranks)  # one tuple per group: it may have thousands of ranks
        name, stream, origin = str(func._overloadpacket).split(".")[-1], self._accelerator.stream, self._tape.origin
        if sizes:
            self._tape.note(Collective(name, stream, origin, tuple(reads), tuple(writes), ranks, tuple(sizes)))
        return result


def _blocks_host(name: str, crosses: bool, args: Any, kwargs: Any) -> bool:
    """Return True if the host waits for the operation to complete. See `Operation.crosses` for `crosses`."""
    if name in _READ_BY_HOST:
        return True
    takes_flag = name in ("aten.copy_", "aten._foreach_copy_")
    return crosses and not (kwargs.get("non_blocking") or (takes_flag and len(args) > 2 and args[2]))


@cache
def _kind(func: OpOverload) -> str:
    if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
        return "collective" if has_group(func) else "view"
    if str(func._overloadpacket) == "aten.lift_fresh":
        return "constant"
    reported = func.is_view or func.namespace == "profiler" or str(func._overloadpacket) in _NO_MEMORY
    return "view" if reported else "operation"


@cache
def _writing(func: OpOverload) -> tuple[tuple[int, str], ...]:
    """Return the index and name of each argument that an operation writes to."""
    arguments = enumerate(func._schema.arguments)
    return tuple((i, item.name) for i, item in arguments if item.alias_info is not None and item.alias_info.is_write)


def _written(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in _writing(func)]


def _without(given: Sequence[Tensor], written: Sequence[Tensor], func: OpOverload) -> Iterator[Tensor]:
    """Yield the tensors that are read. Written tensors count as read unless they are overwritten entirely."""
    outs = {id(tensor) for tensor in written} if _replaces(func) else set()
    return (tensor for tensor in given if id(tensor) not in outs)


@cache
def _replaces(func: OpOverload) -> bool:
    """Return True if an operation overwrites all elements of its outputs without reading them."""
    if str(func._overloadpacket) in ("aten.copy_", "aten._foreach_copy_", "aten.zero_", "aten.fill_"):
        return True
    return func._overloadname == "out" or (func.namespace == "fsdp" and bool(_writing(func)))


def _tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in arguments or results."""
    found: list[Tensor] = []
    _add_tensors(tree, found)
    return found


def _add_tensors(tree: Any, found: list[Tensor]) -> None:
    # This runs for each operation, mostly on numbers, and `isinstance` is slow for `Tensor`.
    if type(tree) in _NOT_TENSORS:
        return
    if isinstance(tree, list | tuple):
        for value in tree:
            _add_tensors(value, found)
    elif isinstance(tree, dict):
        for value in tree.values():
            _add_tensors(value, found)
    elif isinstance(tree, Tensor):
        found.append(tree)
