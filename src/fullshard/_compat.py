"""Code that depends on torch's version or uses undocumented parts of torch. For dry runs, see `_dry_compat.py`."""

from __future__ import annotations

import gc
import math
import os
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import cache, partialmethod, wraps
from itertools import islice
from operator import attrgetter
from traceback import walk_stack
from types import CodeType, FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import AllgatherOptions, AllreduceCoalescedOptions, ReduceScatterOptions
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,  # noqa: F401  # imported from here
)
from torch.autograd import forward_ad
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils import _pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from fullshard.layout.offsets import contiguous_strides

P = ParamSpec("P")
R = TypeVar("R")
HookT = TypeVar("HookT", bound=Callable[..., Any])
_OWN_HOOK = "_is_of_fullshard"


def in_backward() -> bool:
    """Return True if autograd runs a backward on this thread, including the recomputation of activation checkpoints."""
    return torch._C._current_graph_task_id() != -1


def backward_number() -> int:
    """Return the number of the backward pass that autograd is executing on this thread; -1 if there is none."""
    return torch._C._current_graph_task_id()


def current_autograd_node() -> Any:
    """Return the node that autograd is executing on this thread; None outside of backward passes."""
    return torch._C._current_autograd_node()


def comm_hook_dtypes() -> dict[Callable[..., Any], torch.dtype | None]:
    """Return torch's hooks for `FullyShardedDataParallel.register_comm_hook`, each with the dtype of its sums.

    None stands for the dtype of the gradients that the hook receives.
    """
    return {
        default_hooks.allreduce_hook: None,
        default_hooks.reduce_scatter_hook: None,
        default_hooks.fp16_compress_hook: torch.float16,
        default_hooks.bf16_compress_hook: torch.bfloat16,
    }


def implicitly_replicates() -> bool:
    """Return True within torch's `implicit_replication()`, which allows mixing plain tensors and `DTensor`s."""
    return bool(DTensor._op_dispatcher._allow_implicit_replication)


next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Return the number of the next autograd node that this thread creates: `node._sequence_nr()`."""


def in_function_transform() -> bool:
    """Return True within a transform of `torch.func`, such as `grad` and `vmap`, or under forward-mode dual numbers."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def outside_of_function_transforms() -> AbstractContextManager[Any]:
    """Return a context that keeps operations out of all transforms of `torch.func`."""
    context: AbstractContextManager[Any] = torch._C._DisableFuncTorch()
    return context


def in_pipeline_stage() -> bool:
    """Return True if this code was called by a stage of `torch.distributed.pipelining` that computes a microbatch.

    A stage that infers shapes does not count: it only computes gradients of its inputs.
    """
    stage = sys.modules.get("torch.distributed.pipelining.stage")
    return stage is not None and _is_within(sys._getframe(1), stage._PipelineStageBase.forward_one_chunk.__code__)


_VISITS = threading.RLock()
# A fork waits for the end of a visit. Otherwise, garbage collection would stay disabled in the child process.
os.register_at_fork(before=_VISITS.acquire, after_in_parent=_VISITS.release, after_in_child=_VISITS.release)


def visits_frames(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that visits callers of other threads' frames, so that no garbage collection starts in it.

    In Python 3.11, `frame.f_back` may start one. Other threads run during its finalizers and may return from the frame
    that is about to be visited. Then the result is an arbitrary object, or the memory of another frame is overwritten.
    Later versions collect only between instructions.
    """
    if sys.version_info >= (3, 12):
        return function

    @wraps(function)
    def visit(*args: P.args, **kwargs: P.kwargs) -> R:
        with _VISITS:
            was_enabled = gc.isenabled()
            gc.disable()
            try:
                return function(*args, **kwargs)
            finally:
                if was_enabled:
                    gc.enable()

    return visit


@visits_frames
def in_backward_of_inputs() -> bool:
    """Return True while `stage_backward_input` of `torch.distributed.pipelining` runs in any thread."""
    module = sys.modules.get("torch.distributed.pipelining._backward")
    if module is None:
        return False
    code = module.stage_backward_input.__code__
    # A GPU's backward runs on separate threads. No local variable may refer to a frame here: the frames include the one
    # of this function, and the reference cycle would keep the variables of all callers until garbage is collected.
    return any(_is_within(frame, code) for frame in sys._current_frames().values())


@visits_frames
def in_pass_for_inputs() -> bool:
    """Return True while `torch.autograd.grad` or `backward(inputs=...)` runs in any thread."""
    return any(_takes_inputs(frame) for frame in sys._current_frames().values())  # in all threads, as above


def _takes_inputs(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is torch.autograd.grad.__code__:
            return True
        if frame.f_code is torch.autograd.backward.__code__:
            inputs = frame.f_locals.get("inputs")
            return isinstance(inputs, torch.Tensor) or bool(inputs)
        frame = frame.f_back
    return False


def _is_within(frame: FrameType | None, code: CodeType) -> bool:
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""Set whether autograd records operations, without the context manager of torch."""


class without_grad:  # noqa: N801  # used as a context manager, like a function
    """A context manager like `torch.no_grad` with a third of its function calls. Each unit enters it several times."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        set_grad_enabled(False)

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        set_grad_enabled(self._before)


def on_backward_end(callback: Callable[[], None]) -> None:
    """Call `callback` when the current backward pass has accumulated its last gradient."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def have_grad_hooks(params: Iterable[Tensor]) -> bool:
    """Return True if a hook was registered by `register_post_accumulate_grad_hook` on any of `params`."""
    return any(map(_GRAD_HOOKS, params))


_GRAD_HOOKS = attrgetter("_post_accumulate_grad_hooks")


def grad_hooks(param: Tensor) -> Sequence[Callable[[Any], Any]]:
    """Return the hooks registered by `param.register_post_accumulate_grad_hook`."""
    return tuple((param._post_accumulate_grad_hooks or {}).values())


def share_grad_hooks(source: Tensor, target: Tensor) -> None:
    """Also register the post-accumulate-grad hooks of `source` on `target`. Their handles remove them from both."""
    if source._post_accumulate_grad_hooks is not None:
        target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks


TENSOR_HOOKS: Callable[[Tensor], Any] = attrgetter("_backward_hooks")
"""Return the hooks registered by `param.register_hook`; None or empty if there are none."""


def step_hooks(optimizer: torch.optim.Optimizer) -> Sequence[int]:
    """Return the unique numbers of the hooks that are called before and after steps of `optimizer`."""
    return *optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks


def module_hooks(module: torch.nn.Module) -> Sequence[int]:
    """Return the unique numbers of the forward and backward hooks of `module`."""
    return *module._forward_pre_hooks, *module._forward_hooks, *module._backward_pre_hooks, *module._backward_hooks


def global_hooks() -> Sequence[int]:
    """Return the unique numbers of the hooks that torch calls for all modules and optimizers."""
    modules = torch.nn.modules.module
    before, after = modules._global_forward_pre_hooks, modules._global_forward_hooks
    backward = *modules._global_backward_pre_hooks, *modules._global_backward_hooks
    return *before, *after, *backward, *_global_optimizer_pre_hooks, *_global_optimizer_post_hooks


def saved_tensor_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the pair of hooks that autograd currently calls for saved tensors, if there is one."""
    hooks: tuple[Callable[..., Any], Callable[..., Any]] | None = torch._C._autograd._top_saved_tensors_default_hooks(
        True
    )
    return hooks


def weak_storage(storage: torch.UntypedStorage) -> Any:
    """Return an object that prevents the reuse of the address of `storage`, but does not keep its memory alive."""
    return StorageWeakRef(storage)


def version_counter_of(tensor: Tensor) -> Tensor:
    """Return an empty tensor that shares the version counter of `tensor`, but not its memory."""
    counter = tensor.detach()
    counter.data = tensor.new_empty(0)
    return counter


def shares_version_counter(tensor: Tensor, other: Tensor) -> bool:
    """Return True if in-place writes to `tensor` also change the version of `other`."""
    version, others = tensor._version, other._version
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version + 1,))
    try:
        return other._version != others
    finally:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


@contextmanager
def without_weak_references(module: nn.Module) -> Iterator[None]:
    """Context manager that makes `module`, if recurrent, drop weak references to parameters, so torch can swap them."""
    if not isinstance(module, nn.RNNBase):
        yield
        return
    module._flat_weight_refs = []
    try:
        yield
    finally:
        module._init_flat_weights()


def keep_weights_in_place(module: nn.Module) -> None:
    """Prevent a recurrent layer from moving its weights to a separate buffer in a forward that finds new weights.

    Layers on a GPU do this for cuDNN, which otherwise copies the weights in each forward.
    """
    if isinstance(module, nn.RNNBase):
        vars(module)["flatten_parameters"] = _leave_weights


def _leave_weights() -> None:
    pass


def withhold_step_hooks(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Keep the running step of `optimizer` from calling its step hooks, and return a function that restores them.

    The dictionaries of hooks remain the same objects, because handles of hooks refer to them.
    """
    known: list[dict[int, Any]] = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    held = [dict(hooks) for hooks in known]
    for hooks in known:
        hooks.clear()

    def give_back() -> None:
        for hooks, saved in zip(known, held, strict=True):
            hooks.update(saved)

    return give_back


def own_hook(hook: HookT) -> HookT:
    """Mark `hook` as a hook of this package, which must not be copied together with a module, and return it."""
    setattr(hook, _OWN_HOOK, True)
    return hook


def is_own_hook(hook: Any) -> bool:
    """Return True if `hook`, or the hook that torch has wrapped in it, is marked by `own_hook`."""
    return hasattr(getattr(hook, "hook", hook), _OWN_HOOK)


@contextmanager
def without_step_hooks(optimizer: torch.optim.Optimizer) -> Iterator[tuple[list[Any], list[Any]]]:
    """Context manager that removes the hooks of `optimizer.step`, and yields the removed pre-hooks and post-hooks."""
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        yield list(before.values()), list(after.values())
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = before, after


def storage_references(storage: torch.UntypedStorage) -> int:
    """Return the number of tensors (including those saved by autograd) and handles that keep `storage` alive."""
    return int(torch._C._storage_Use_Count(storage._cdata))


_LOCAL_TENSOR = attrgetter("_local_tensor")
_REQUIRES_GRAD = attrgetter("requires_grad")
_SHAPE = attrgetter("shape")


def holders(tensors: Sequence[DTensor]) -> Any:
    """Return a value that stays equal until a reference to one of `tensors` or its local tensor is added, or a local
    tensor is replaced.

    Several functions are called per tensor. `map` calls C functions without the interpreter, which is much faster.
    """
    use_count: Any = Tensor._use_count  # type: ignore[attr-defined]
    local = [*map(_LOCAL_TENSOR, tensors)]
    is_plain = {*map(type, local)} <= {Tensor}
    return (
        [*map(sys.getrefcount, tensors)],
        [*map(use_count, tensors)],
        [*map(sys.getrefcount, local)],
        [*map(use_count, local)],
        [*map(len, map(vars, tensors))],
        [*map(_REQUIRES_GRAD, tensors)],
        [*map(id, local)],
        [*map(Tensor.data_ptr if is_plain else address, local)],
        [*map(_SHAPE, local)],
        [*map(Tensor.stride, local)],
    )


def storage_holders(tensor: Tensor) -> tuple[int, int]:
    """Return a value that stays equal until a reference to the storage of `tensor` is added or dropped."""
    storage = tensor.untyped_storage()
    return storage_references(storage), sys.getrefcount(storage)


def held_twice(tensors: list[Tensor]) -> bool:
    """Return True if each of `tensors` has no references except for this list and one other holder."""
    own = _own_references()
    return all(count <= own for count in _references(tensors))


@cache
def _own_references() -> int:
    sample = [torch.empty(0)]
    holder = [*sample]
    return _references(sample)[0] if holder else 0


def _references(tensors: list[Tensor]) -> list[int]:
    return [sys.getrefcount(tensor) for tensor in tensors]


def shares_memory(tensor: Tensor) -> bool:
    """Return True if another tensor shares the storage of `tensor`."""
    return storage_references(tensor.untyped_storage()) > 2  # the tensor's own, and that of the handle just made


def is_share_memory(function: Callable[..., Any]) -> bool:
    """Return True if `function` is the one that `nn.Module.share_memory` applies to each tensor."""
    return getattr(function, "__code__", None) in torch.nn.Module.share_memory.__code__.co_consts


def all_gather_each(wholes: list[Tensor], parts: list[Tensor], group: dist.ProcessGroup) -> None:
    """All-gather the contiguous shards `parts` into the full tensors `wholes`, in one launch on the current stream."""
    if not wholes:  # parameters without elements
        return
    options = AllgatherOptions()
    options.asyncOp = False
    gather = getattr(group, _GATHER)
    if wholes[0].dtype.is_complex:
        wholes, parts = _as_real(wholes), _as_real(parts)
    work = gather(wholes, parts, options)
    if work is not None:  # the current stream waits for it; with a synchronous backend, the host does
        work.wait()


def all_gather_rows(rows: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
    """All-gather `own` of all ranks into rows of a matrix, in rank order. The host waits on synchronous backends."""
    gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(rows.view(-1), own, group=group)


def reduce_scatter_each(sums: list[Tensor], wholes: list[Tensor], group: dist.ProcessGroup) -> None:
    """Reduce-scatter the full tensors `wholes` into `sums`, in one launch on the current stream."""
    if not wholes:
        return
    options = ReduceScatterOptions()
    options.asyncOp = False
    reduce = getattr(group, _REDUCE)
    if wholes[0].dtype.is_complex:
        sums, wholes = _as_real(sums), _as_real(wholes)
    work = reduce(sums, wholes, options)
    if work is not None:
        work.wait()


def all_reduce_each(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """All-reduce each of `tensors` in place, by summation, in one launch on the current stream."""
    if not tensors:
        return
    options = AllreduceCoalescedOptions()
    options.asyncOp = False
    work = group.allreduce_coalesced(_as_real(tensors), options)
    if work is not None:
        work.wait()


def _as_real(tensors: list[Tensor]) -> list[Tensor]:
    """Return views of `tensors` without complex numbers, which NCCL does not support."""
    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]


def _first_method(name: str, until_2_12: str) -> str:
    return name if hasattr(dist.ProcessGroup, name) else until_2_12


_GATHER = _first_method("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
_REDUCE = _first_method("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")


def group_timeout_s(group: dist.ProcessGroup) -> float:
    """Return the shortest timeout of `group`'s backends in seconds: infinity if none of them aborts collectives."""
    timeouts = []
    for device in group._device_types:
        with suppress(AttributeError, RuntimeError):  # a backend without options
            timeouts.append(float(group._get_backend(device).options._timeout.total_seconds()))
    return min((timeout for timeout in timeouts if timeout > 0), default=math.inf)


def group_made_alone(ranks: list[int]) -> dist.ProcessGroup:
    """Create a process group of `ranks`, which include this rank, without a call on other ranks.

    `use_local_synchronization` is not enough for this. While the default group is bound to a device
    (`init_process_group(device_id=...)`), torch splits a new group's communicator off that of all ranks, and NCCL waits
    for all of them. So this function temporarily unbinds the default group from its device. torch then connects these
    ranks at their first message.
    """
    world = dist.distributed_c10d._get_default_group()
    device, world.bound_device_id = world.bound_device_id, None
    try:
        group: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
    finally:
        world.bound_device_id = device
    return group


def connected_again(group: dist.ProcessGroup, name: str) -> dist.ProcessGroupGloo:
    """Create new gloo connections between the ranks of `group`, for messages only. Every rank must call it.

    Args:
        group: a gloo group.
        name: a unique name among the connections of this group.
    """
    store = dist.PrefixStore(f"{group.group_name}/{name}", default_store())
    timeout = timedelta(seconds=group_timeout_s(group))
    return dist.ProcessGroupGloo(store, dist.get_rank(group), dist.get_world_size(group), timeout)


def break_connections(connections: Any, peers: Sequence[int], tag: int) -> None:
    """Break all connections, so that every thread that waits for a message raises RuntimeError.

    gloo breaks all connections of a process group when one message arrives too late. A receive from a peer that has
    closed its own connections fails without breaking the others, so every peer is tried.

    Args:
        connections: a gloo process group, or the result of `connected_again`.
        peers: the other ranks of the group.
        tag: a tag that no peer sends a message with.
    """
    for peer in peers:
        with suppress(RuntimeError):
            connections.recv([torch.empty(1, device="cpu")], peer, tag).wait(timedelta(milliseconds=1))


def default_store() -> dist.Store:
    """Return the store of the default process group, over a separate connection."""
    store = dist.distributed_c10d._get_default_store()
    own: dist.Store = store.clone()  # type: ignore[attr-defined]  # torch's annotations lack it
    return own


def store_address(store: dist.Store) -> tuple[str, int] | None:
    """Return host and port of the server of `store`, if it has one."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else None


def tree_map(leaf: Callable[[Any], Any], tree: Any) -> Any:
    """Return `tree` (lists, tuples, dicts and registered pytrees) with `leaf` applied to everything else."""
    return _pytree.tree_map(leaf, tree)


def taken_one_level(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """Return the children of `tree` and a function that rebuilds it, if its class is a registered pytree; else None."""
    node = _pytree.SUPPORTED_NODES.get(_pytree._get_node_type(tree))
    if node is None:
        return None
    children, context = node.flatten_fn(tree)
    return list(children), lambda items: node.unflatten_fn(items, context)


def storage_info(file: str, start: int, nbytes: int) -> Any:
    """Return the position of a value in a file, in bytes, as metadata of `torch.distributed.checkpoint`."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # late: takes 0.1 s, and is rarely needed

    return _StorageInfo(file, start, nbytes)


def make_dtensor(local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> DTensor:
    """Return a contiguous `DTensor` of global `shape` around `local` itself, on any device.

    `DTensor.from_local` would move a shard that is offloaded to the CPU back to the mesh's device.
    """
    tensor_meta = TensorMeta(torch.Size(shape), contiguous_strides(shape), local.dtype)
    spec = DTensorSpec(mesh, placements, tensor_meta=tensor_meta)
    tensor = DTensor(at_start(local), spec, requires_grad=False)
    tensor._local_tensor = local
    return tensor


def dtensor_like(local: Tensor, other: DTensor) -> DTensor:
    """Return a `DTensor` around `local` with the placements of `other`.

    `DTensor.__init__` is skipped, because it only disables the compiler and takes most of the time.
    """
    tensor = DTensor.__new__(DTensor, at_start(local), other._spec, requires_grad=False)
    tensor._local_tensor = local
    return tensor


def dtensors_like(local: Sequence[Tensor], others: Sequence[Any], starts: Sequence[Tensor]) -> list[DTensor]:
    """Return a `DTensor` for each tensor in `local`, like `dtensor_like`, but without one function call per tensor.

    Args:
        starts: The results of `starts_of` for tensors with the same shapes and dtype.
    """
    made = list[DTensor]()
    for tensor, other, start in zip(local, others, starts, strict=True):
        made.append(DTensor.__new__(DTensor, start, other._spec, requires_grad=False))
        made[-1]._local_tensor = tensor
    return made


def starts_of(local: Sequence[Tensor]) -> list[Tensor]:
    """Return a tensor with the same shape and one element of memory for each tensor in `local`; see `at_start`."""
    one = local[0].new_empty(1)
    return [one.as_strided(tensor.shape, [0] * len(tensor.shape)) for tensor in local]


def at_start(local: Tensor) -> Tensor:
    """Return a tensor like `local`, or `local` itself, that starts at offset 0 of its storage, for a `DTensor`.

    A `DTensor` has the storage offset of its local tensor, but no storage. Pickling and copying in torch assume that a
    tensor with an offset has memory, and fail.
    """
    return local if local.storage_offset() == 0 else local.new_empty([1] * local.ndim).expand(local.shape)


def holds_tensors(tensor: Tensor) -> bool:
    """Return True if `tensor` is of a subclass that wraps other tensors, such as quantized values and their scales."""
    return bool(is_traceable_wrapper_subclass(tensor))


def inner_tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in `tree`; for wrappers such as `DTensor`, the inner tensors, since only they have memory."""
    found: list[Tensor] = []
    for leaf in _pytree.tree_leaves(tree):
        if is_traceable_wrapper_subclass(leaf):
            found += inner_tensors([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
        elif isinstance(leaf, Tensor):
            found.append(leaf)
    return found


def inner_names(tensor: Tensor) -> list[str]:
    """Return the names of the attributes of `tensor`, a wrapper, that hold the wrapped tensors."""
    names: list[str] = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    return names


def plain_values(tensor: Tensor) -> Tensor | None:
    """Return the only tensor in `tensor`, a wrapper, that holds its plain values; None if several encode them."""
    inner = inner_tensors(tensor)
    same = [item for item in inner if item.shape == tensor.shape and item.dtype == tensor.dtype]
    return same[0] if len(same) == 1 and all(item is same[0] or item.numel() <= 1 for item in inner) else None


@contextmanager
def keeping_versions(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Context manager that hides writes to `tensors` from autograd's checks of saved tensors."""
    with torch.autograd._unsafe_preserve_version_counter(tuple(tensors)):
        yield


set_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = torch._C._autograd._unsafe_set_version_counter
"""Set the version counters of tensors, which autograd compares with those of what it has saved."""


_VERSION = re.compile(r"modified by an inplace operation.*is at version (\d+)", re.DOTALL)


def explain_backwards(
    explain: Callable[[int], Exception | None],
    refuse_unreached: Callable[[Sequence[Any], Sequence[Any]], None],
) -> None:
    """Call `explain` for every error of a backward pass that found a saved tensor with a different version.

    Args:
        explain: gets the version and returns the error to raise, or None to keep torch's.
        refuse_unreached: gets the inputs of `autograd.grad` or `backward(inputs=...)`, and those without a gradient.
    """
    run = torch.autograd.graph._engine_run_backward

    @wraps(run)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        inputs: Sequence[Any] = args[4] if len(args) > 4 else ()
        before = [(given.grad, given.grad._version) if _has_grad(given) else None for given in inputs]
        try:
            result = run(*args, **kwargs)
        except RuntimeError as error:
            if inputs and "appears to not have been used in the graph" in str(error):
                refuse_unreached(inputs, inputs)
            found = _VERSION.search(str(error))
            explained = None if found is None else explain(int(found[1]))
            if explained is None:
                raise
            try:
                raise explained from error
            finally:
                explained = None  # breaks a cycle of the error and this frame, which would keep the graph in memory
        if inputs and kwargs.get("accumulate_grad"):
            missed = [given for given, grad in zip(inputs, before, strict=True) if _is_still(given, grad)]
            refuse_unreached(inputs, missed)
        elif inputs:
            refuse_unreached(inputs, [given for given, grad in zip(inputs, result, strict=True) if grad is None])
        return result

    torch.autograd.graph._engine_run_backward = run_backward
    torch.autograd._engine_run_backward = run_backward  # the module that imports it by name


def _has_grad(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_leaf and tensor.grad is not None


def _is_still(tensor: Any, before: tuple[Tensor, int] | None) -> bool:
    """Return True if `tensor` still has the gradient in `before`, with the same version."""
    if before is None:
        return not _has_grad(tensor)
    return tensor.grad is before[0] and before[0]._version == before[1]


def has_values(tensor: Tensor) -> bool:
    """Return True if `tensor` has memory: it is neither on the meta device nor a fake."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def has_memory(storage: torch.UntypedStorage) -> bool:
    """Return True if `storage` has memory, unlike the storages of tensor subclasses that only wrap tensors."""
    try:
        return storage.data_ptr() != 0
    except RuntimeError:
        return False


def set_local_tensor(tensor: DTensor, local: Tensor) -> None:
    """Set `local`, of the same shape and dtype, as the local tensor of `tensor`.

    The device of `tensor` changes too, since torch rejects gradients on a different device.
    """
    if tensor.device != local.device:
        tensor.data = dtensor_like(local, tensor)
    tensor._local_tensor = local


def waited(tensor: Tensor) -> Tensor:
    """Return `tensor`, or its result if it represents a pending collective of torch."""
    if not isinstance(tensor, AsyncCollectiveTensor):
        return tensor
    result: Tensor = tensor.wait()
    return result


def joined_mesh(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh | None:
    """Return a mesh of the axes of both, those of `outer` first; None if they are not different axes of one mesh.

    It is a new mesh of the existing groups, since torch does not reorder the axes of a mesh.
    """
    if outer.mesh_dim_names is None or inner.mesh_dim_names is None:
        return None
    try:
        joined = DeviceMesh._concatenate([outer, inner])
    except RuntimeError:
        return None
    return DeviceMesh.from_group(
        [*outer.get_all_groups(), *inner.get_all_groups()],
        joined.device_type,
        joined.mesh,
        mesh_dim_names=joined.mesh_dim_names,
    )


def flattened_mesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return the axes `names` of `mesh` as one axis. Every rank must call it, since it may create process groups."""
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


def concatenated_mesh(parts: list[DeviceMesh]) -> DeviceMesh:
    """Return a mesh of the axes of `parts`, different axes of one mesh, in order."""
    return DeviceMesh._concatenate(parts)


@contextmanager
def killed_after(patience_s: int) -> Iterator[dict[str, Any]]:
    """Context manager that gives ranks `patience_s` seconds to terminate; yields arguments for their `LaunchConfig`."""
    from torch.distributed.elastic.multiprocessing import PContext  # late, since only launchers need it
    from torch.distributed.launcher.api import LaunchConfig

    if "shutdown_timeout" in LaunchConfig.__dataclass_fields__:
        yield {"shutdown_timeout": patience_s}
        return
    close = PContext.close  # torch 2.11: always 30 s

    PContext.close = partialmethod(close, timeout=patience_s)  # type: ignore[method-assign, assignment]
    try:
        yield {}
    finally:
        PContext.close = close  # type: ignore[method-assign]


def outside_of_modes() -> AbstractContextManager[Any]:
    """Return a context without dispatch modes, in which tensors have values, as needed for the ranks of a mesh."""
    context: AbstractContextManager[Any] = _disable_current_modes()
    return context


def unpacked(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the result of torch's decomposition of an operation, ignoring other registrations for it."""
    return operation._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def before_optimizer_method(name: str, prepare: Callable[[Optimizer], None]) -> None:
    """Call `prepare` with every optimizer before its method `name`. torch has no such hooks for all optimizers."""
    method = getattr(Optimizer, name)

    @wraps(method)
    def prepared(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        prepare(optimizer)
        return method(optimizer, *args, **kwargs)

    setattr(Optimizer, name, prepared)


def after_dtensor_writes(note: Callable[[Sequence[Tensor]], None], note_out: Callable[[Tensor, bool], None]) -> None:
    """Call `note` with the `DTensor`s that an in-place operation has written, and `note_out` with each `out=` argument.

    The second argument of `note_out` is True if no argument of the operation is a tensor, so that sizes determine the
    number of values. torch has no such hook.
    """
    dispatcher: Any = type(DTensor._op_dispatcher)
    finish = dispatcher._dispatch_fast_path_python_tail

    @wraps(finish)
    def noted_finish(self: Any, operation: Any, args: Any, kwargs: Any, *others: Any) -> Any:
        *_, is_in_place, is_out = others
        if is_in_place:
            note([args[0]] if isinstance(args[0], Tensor) else args[0])
        elif is_out:
            has_sizes = not any(isinstance(argument, Tensor) for argument in args)
            for argument in operation._schema.arguments:
                if argument.is_out:
                    note_out(kwargs[argument.name], has_sizes)
        return finish(self, operation, args, kwargs, *others)

    dispatcher._dispatch_fast_path_python_tail = noted_finish


def loads_whole_states() -> bool:
    """Return True if `torch.distributed.checkpoint` is the caller, to load a full state dict of an optimizer."""
    callers = islice(walk_stack(None), 12)
    return any(frame.f_code.co_name == "_load_optim_state_dict" for frame, _ in callers)


def forget_shardings() -> None:
    """Clear torch's caches of the results of `DTensor` operations on this thread.

    A cached result has the mesh of its operands, and equal meshes of two process groups have different groups.
    """
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


def marks_of(param: Tensor) -> dict[str, Any]:
    """Return the attributes that users have set on `param`, without those of fake tensors, such as the device, and
    those of wrappers, such as the inner tensors.
    """
    own: dict[str, Any] = {}
    if isinstance(param, FakeTensor):
        own = vars(param.new_empty(0))
    elif holds_tensors(param) and not isinstance(param, DTensor):
        own = {**vars(param.detach()), "_is_param": True}
    return {name: value for name, value in vars(param).items() if name not in own}


def tensor_without_memory(cls: type, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """Return a contiguous tensor of class `cls`, whose `__torch_dispatch__` handles all operations."""
    return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)


def address(tensor: Tensor) -> Any:
    """Return a value that identifies the start of the memory of `tensor`, also for tensors without memory."""
    if type(tensor) is FakeTensor:
        return tensor.untyped_storage()._cdata, tensor.storage_offset()
    return tensor.data_ptr()


@cache
def is_wrapper_type(cls: type) -> bool:
    """Return True for tensors that wrap others, such as `DTensor`."""
    return bool(is_traceable_wrapper_subclass_type(cls))


def innermost_dispatch_mode() -> TorchDispatchMode | None:
    """Return the active dispatch mode that was entered last."""
    stack = _get_current_dispatch_mode_stack()
    return stack[-1] if stack else None


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a `DTensor`, or any other tensor unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def outside_of_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Exclude `function` from `torch.compile`: it runs eagerly, between two graphs.

    Unlike `torch.compiler.disable`, this does not import the compiler before the function is called.
    """
    return _disable_dynamo(function)


_SELECTIVE = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)


def in_plain_code() -> bool:
    """Return True outside of all transforms of `torch.func`, and of all dispatch modes."""
    functorch: object = torch._C._functorch.peek_interpreter_stack()
    return not torch._C._len_torch_dispatch_stack() and functorch is None and forward_ad._current_level < 0


@contextmanager
def outside_of_selective_checkpoints() -> Iterator[None]:
    """Context manager that keeps operations out of a selectively checkpointed region.

    torch records every operation of such a region, and requires the same ones when it recomputes the region.
    """
    stack = _get_current_dispatch_mode_stack()
    first = next((i for i, mode in enumerate(stack) if isinstance(mode, _SELECTIVE)), len(stack))
    others = [mode for mode in stack[first:] if not isinstance(mode, _SELECTIVE)]
    _replace_modes(len(stack) - first, others)
    try:
        yield
    finally:
        _replace_modes(len(others), stack[first:])


def _replace_modes(count: int, modes: Sequence[TorchDispatchMode]) -> None:
    for _ in range(count):
        _pop_mode()
    for mode in modes:
        _push_mode(mode)
