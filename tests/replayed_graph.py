"""A CUDA graph on the CPU: records the operations of a step with their tensors, and repeats them without its code."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.device.accelerator import accelerator_for, pretending_to_capture


class ReplayedGraph:
    """Like a CUDA graph, it does not run what it records: values are as before once the recording is over.

    A replay calls the recorded operations with the recorded tensors, whatever Python code would do by then. Operations
    draw new random numbers. Collectives are those of gloo, which wait here.
    """

    device = torch.device("cpu")
    backends = frozenset({"gloo"})

    def __init__(self) -> None:
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.sizes: dict[torch.UntypedStorage, int] = {}
        self.replays = 0

    def check(self) -> None: ...

    @contextmanager
    def queueing_warm_up(self) -> Iterator[None]:
        yield

    def host_random_state(self) -> Any:
        return random.getstate()

    @contextmanager
    def noting_waits(self, note: Callable[[FrameType], object]) -> Iterator[None]:
        with _Waits(note):
            yield

    def record(self, call: Callable[[], Any]) -> Any:
        self.operations = []
        state = torch.get_rng_state()
        recorder = _Recorder(self.operations)
        try:
            with recorder, pretending_to_capture(), without_frees():
                return call()
        finally:
            recorder.restore()
            self.sizes = {storage: storage.nbytes() for storage in recorder.storages.values()}
            torch.set_rng_state(state)

    def drop(self) -> None:
        self.operations, self.sizes = [], {}

    def replay(self) -> None:
        self.replays += 1
        for storage, nbytes in self.sizes.items():
            if storage.nbytes() != nbytes:  # freed by eager work since
                storage.resize_(nbytes)
        with torch._C._AutoDispatchBelowAutograd():
            for function, args, kwargs, recorded in self.operations:
                repeated = function(*args, **kwargs)
                for new, old in zip(pytree.tree_leaves(repeated), pytree.tree_leaves(recorded), strict=True):
                    if isinstance(old, Tensor) and new.data_ptr() != old.data_ptr():
                        old.copy_(new)
                    elif isinstance(new, torch.ScriptObject):
                        dist.Work.unbox(new).wait()


@contextmanager
def without_frees() -> Iterator[None]:
    """Keep memory that is freed and allocated again: recorded operations have it."""
    accelerator: Any = accelerator_for(torch.device("cpu"))
    accelerator.resize = lambda storage, nbytes: storage.resize_(nbytes) if nbytes > storage.nbytes() else None
    try:
        yield
    finally:
        del accelerator.resize


class _Recorder(TorchDispatchMode):
    def __init__(self, operations: list[tuple[Any, Any, Any, Any]]) -> None:
        super().__init__()
        self._operations = operations
        self.storages: dict[int, torch.UntypedStorage] = {}
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls operations on its local tensors
        if function.namespace == "profiler":
            return function(*args, **kwargs)
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self.storages:
                self.storages[storage._cdata] = storage
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                self._before.append((whole, whole.clone()))
        result = _not_sent(function, args) if function.namespace == "c10d" else function(*args, **kwargs)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.storages.setdefault(tensor.untyped_storage()._cdata, tensor.untyped_storage())
        self._operations.append((function, *pytree.tree_map(_alias, (args, kwargs, result))))
        return result

    def restore(self) -> None:
        """Undo what the recorded operations wrote to tensors that existed before."""
        for whole, values in self._before:
            whole.copy_(values)


def _not_sent(collective: Any, args: Any) -> Any:
    """Return the result of a collective that sends nothing. Other ranks may not record now."""
    is_work = ["Work" in str(returned.type) for returned in collective._schema.returns]
    results = [FakeWork().boxed() if item else args[0] for item in is_work]
    return tuple(results) if len(results) > 1 else results[0]


def _alias(item: Any) -> Any:
    """Return another tensor on the memory that `item` has now. The engine gives its parameters other memory later."""
    return item.detach() if isinstance(item, Tensor) else item


class _Waits(TorchDispatchMode):
    def __init__(self, note: Callable[[FrameType], object]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if function is torch.ops.aten._local_scalar_dense.default:
            self._note(sys._getframe(1))
        return function(*args, **(kwargs or {}))
