"""Undocumented parts of torch for dry runs and simulated worlds only. The engine does not import this module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import _StridedShard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard._compat import inner_tensors, outside_of_modes
from fullshard._fakes import QuickFakes
from fullshard.errors import ConfigError

data_dependent_errors = (DataDependentOutputException, DynamicOutputShapeException)
"""Raised for operations whose results depend on values, which fake tensors do not have."""


def fake_tensors() -> QuickFakes:
    """Return a context that creates tensors without memory. Real tensors used together with them are converted."""
    return QuickFakes()


@contextmanager
def meshes_on_cpu() -> Iterator[None]:
    """Context manager that allows creating device meshes under fake tensors. They are CPU meshes.

    Raises:
        ConfigError: The ranks of a mesh are a fake tensor, which has no values.
    """
    make = DeviceMesh.__init__

    def init(self: DeviceMesh, device_type: str, mesh: Any = None, **options: Any) -> None:
        if isinstance(mesh, FakeTensor):
            raise ConfigError(
                "the ranks of a DeviceMesh are a tensor, which has no values in a dry run. Pass a list of ranks, or "
                "use init_device_mesh."
            )
        with outside_of_modes():
            if isinstance(ranks := options.get("_rank_map"), FakeTensor):  # all ranks, from `init_device_mesh`
                options["_rank_map"] = torch.arange(ranks.numel(), dtype=torch.int)
            make(self, "cpu", mesh, **options)

    DeviceMesh.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        DeviceMesh.__init__ = make  # type: ignore[method-assign]


@contextmanager
def copyable_fakes() -> Iterator[None]:
    """Context manager that makes `copy.deepcopy` of a fake tensor, such as a buffer, return a clone."""

    def cloned(tensor: FakeTensor, memo: dict[int, Any]) -> Any:
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]

    FakeTensor.__deepcopy__ = cloned  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del FakeTensor.__deepcopy__


@contextmanager
def initializing_without_values() -> Iterator[None]:
    """Context manager that makes `nn.init.trunc_normal_` draw only once, instead of until all values are in bounds."""
    draws = torch.nn.init._no_grad_trunc_normal_

    def draw(
        tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
    ) -> Tensor:
        with torch.no_grad():
            drawn = tensor.normal_(mean, std, generator=generator)
            (drawn < a) | (drawn > b)  # torch's check of the bounds, which also allocates memory
        return tensor

    torch.nn.init._no_grad_trunc_normal_ = draw
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = draws


@contextmanager
def taken_for_real() -> Iterator[None]:
    """Context manager that makes models of transformers, if imported, treat fake tensors like real ones.

    transformers omits the attention mask of real tensors if no token is masked. It cannot check this for fake tensors,
    so it would create the mask.
    """
    module = sys.modules.get("transformers.utils.import_utils")
    is_fake = getattr(module, "is_fake_tensor", None)
    if module is None or is_fake is None:
        yield
        return
    vars(module)["is_fake_tensor"] = lambda tensor: False
    try:
        yield
    finally:
        vars(module)["is_fake_tensor"] = is_fake


@contextmanager
def kernels_instead(kernels: Mapping[str, Callable[..., Any]], key: str) -> Iterator[None]:
    """Context manager that replaces operations of `aten`, given by name, for the dispatch key `key`.

    Operations that have a kernel of torch for that key are not replaced, unless it is an autograd key.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, kernel in kernels.items():
            if key.startswith("Autograd") or not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
                library.impl(name, kernel, key)
        yield
    finally:
        library._destroy()


def below_autograd() -> AbstractContextManager[Any]:
    """Return a context within which operations call their kernels directly, below autograd."""
    context: AbstractContextManager[Any] = torch._C._AutoDispatchBelowAutograd()
    return context


@contextmanager
def foreach_by_default() -> Iterator[None]:
    """Context manager that makes torch's optimizers use foreach kernels for CPU and fake tensors, as on a GPU."""
    module: Any = sys.modules[torch.optim.Optimizer.__module__]
    devices, types = module._get_foreach_kernels_supported_devices, module._foreach_supported_types
    module._get_foreach_kernels_supported_devices = lambda: [*devices(), "cpu"]
    types.append(FakeTensor)
    try:
        yield
    finally:
        types.remove(FakeTensor)
        module._get_foreach_kernels_supported_devices = devices


@contextmanager
def autocast_of_cuda_on_cpu() -> Iterator[None]:
    """Context manager that makes `torch.autocast("cuda")` act on the CPU, with CUDA's dtype."""
    made = torch.autocast.__init__

    def make(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        made(self, device_type, dtype, *args, **kwargs)

    torch.autocast.__init__ = make  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = made  # type: ignore[method-assign]


def grouped_product(args: Any, kwargs: Any) -> Tensor | None:
    """Return the result of `aten._grouped_mm` on fakes of dtypes that a CPU supports, but torch's fakes do not."""
    first, second = cast(Tensor, args[0]), cast(Tensor, args[1])
    if first.dtype == torch.bfloat16:
        return None
    offsets = args[2] if len(args) > 2 else kwargs.get("offs")
    rows, columns = first.shape[-2], second.shape[-1]
    if first.ndim == second.ndim:
        groups = first.shape[:-2] if first.ndim == 3 else offsets.shape
        return first.new_empty(*groups, rows, columns)
    return first.new_empty(rows, columns)


@contextmanager
def unwatched_propagation() -> Iterator[None]:
    """Context manager that hides the fake tensors that `DTensor` uses to infer shapes from dispatch modes.

    It also skips repeats of a check of strided shards, whose total time is quadratic in the number of parameters.
    """
    method = "_propagate_tensor_meta_non_cached"
    propagate = getattr(ShardingPropagator, method)
    module: Any = sys.modules[ShardingPropagator.__module__]
    flag = "_propagate_use_strided_shard_flag"
    passed: Any = getattr(module, flag, None)
    last: Any = None  # the schema of the last check without strided shards

    def unwatched(*args: Any, **kwargs: Any) -> Any:
        with outside_of_modes():
            return propagate(*args, **kwargs)

    def pass_on(strategy: Any, schema: Any) -> None:
        nonlocal last
        if schema is last:
            return
        if any(isinstance(item, _StridedShard) for spec in schema.args_spec for item in spec.placements):
            passed(strategy, schema)
        else:
            last = schema

    setattr(ShardingPropagator, method, unwatched)
    if passed is not None:
        setattr(module, flag, pass_on)
    try:
        yield
    finally:
        setattr(ShardingPropagator, method, propagate)
        if passed is not None:
            setattr(module, flag, passed)


def fake_store() -> dist.Store:
    """Return a store for a process group of the backend "fake", which sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # late: only simulated worlds need it

    store: dist.Store = FakeStore()
    return store


def finished_work() -> Any:
    """Return the work handle of a finished operation of a process group."""
    return FakeWork().boxed()


def has_group(func: Any) -> bool:
    """Return True if `func` is an operation on a process group."""
    return any(argument.name in ("group_name", "process_group") for argument in func._schema.arguments)


def group_of(func: Any, args: Sequence[Any]) -> tuple[tuple[int, ...], bool]:
    """Return the ranks of the process group of an operation, and whether the group really communicates."""
    names = [argument.name for argument in func._schema.arguments]
    given = args[names.index("group_name" if "group_name" in names else "process_group")]
    group = (
        dist.distributed_c10d._resolve_process_group(cast(Any, given))
        if isinstance(given, str)
        else dist.ProcessGroup.unbox(given)
    )
    return tuple(dist.get_process_group_ranks(group)), dist.get_backend(group) != "fake"


def are_real(tensors: Sequence[Tensor]) -> bool:
    """Return True if `tensors` is not empty, and none of them is fake."""
    return bool(tensors) and not any(isinstance(tensor, FakeTensor) for tensor in tensors)


class storage_watch(TorchDispatchMode):  # noqa: N801  # used as a context manager, like a function
    """Context manager that counts the memory allocated in it. `live_bytes()` returns how much of it is still alive.

    Args:
        every_operation: count after each operation, at some cost, so that `peak_bytes` is known.
    """

    def __init__(self, *, every_operation: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[StorageWeakRef, int] = {}
        self._given: set[StorageWeakRef] = set()
        self._every_operation = every_operation
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count the memory of its outputs that is not part of its inputs."""
        for tensor in inner_tensors((args, kwargs or {})):
            ref = StorageWeakRef(tensor.untyped_storage())
            if ref not in self._made:
                self._given.add(ref)
        result = func(*args, **(kwargs or {}))
        for tensor in inner_tensors(result):
            ref = StorageWeakRef(tensor.untyped_storage())
            if ref not in self._given and not tensor.is_meta:
                self._made[ref] = tensor.untyped_storage().nbytes()
        if self._every_operation:
            self.peak_bytes = max(self.peak_bytes, self.present_bytes())
        return result

    def live_bytes(self) -> int:
        """Return the bytes of memory that was allocated within the context and is still in use."""
        return sum(nbytes for ref, nbytes in self._made.items() if not ref.expired())

    def present_bytes(self) -> int:
        """Return `live_bytes`, minus the memory of storages that are currently freed and will be allocated again."""
        self._made = {ref: nbytes for ref, nbytes in self._made.items() if not ref.expired()}
        storages = (torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self._made)
        return sum(storage.nbytes() for storage in storages if storage is not None)
