"""Steps of elementwise optimizers on plain shards instead of the `DTensor`s around them.

Optimizers of torch do this automatically, starting with their second step. Other optimizers do it after `step_shards`.

Every operation on a `DTensor` is first dispatched in Python, which takes as long as updating a small shard. So during a
step, the groups and the state of the optimizer contain this rank's shards instead of the `DTensor`s. The same
operations on the same memory give the same bits.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial, update_wrapper
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fullshard._compat import (
    address,
    before_optimizer_method,
    dtensor_like,
    make_dtensor,
    outside_of_graphs,
    step_hooks,
    withhold_step_hooks,
    without_step_hooks,
)
from fullshard.device.accelerator import accelerator_for
from fullshard.disk.interface import TensorOnDisk
from fullshard.engine.managed import managed_by
from fullshard.engine.unit import Unit
from fullshard.errors import ConfigError
from fullshard.optim.before_step import (
    check_modules,
    check_same_order,
    count_step,
    point_to_shards,
    register_outside_params,
)
from fullshard.optim.defer import can_defer, defer
from fullshard.optim.elementwise import StepComparison, check_elementwise, check_name, trials
from fullshard.policy.arguments import check_type
from fullshard.state.names import OWN
from fullshard.state.on_disk import states_on_disk
from fullshard.state.optim_kinds import ChunkedSteps, block_states
from fullshard.tape.recorder import Origin, Phase, acting_for, active_recorder, note_origin

if TYPE_CHECKING:
    from fullshard.state.steps_in_chunks import StatesOnDisk

# Subclasses are not included, because they may do anything.
_ELEMENTWISE = frozenset(
    {
        *(torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax),
        *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.SGD, torch.optim.ASGD),
    }
)
_LIBRARIES_WITH_KERNELS = {"bitsandbytes", "torchao"}
_stepping: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # optimizers in a step on shards
_comparisons: weakref.WeakKeyDictionary[Optimizer, StepComparison] = weakref.WeakKeyDictionary()
_MARK = "_fullshard_steps_shards"
OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


@cache
def watch_optimizers() -> None:
    """Make every optimizer use the sharded parameters in its steps, and update their plain shards."""
    before_optimizer_method("state_dict", lambda optimizer: _loaded_states().prepare_to_save(optimizer))
    before_optimizer_method("zero_grad", _before_zero_grad)
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _loaded_states() -> ModuleType:
    from fullshard.state import loaded_states  # imported here, because inference does not need it

    return loaded_states


def _first_steps() -> ModuleType:
    from fullshard.state import first_step  # imported here for the same reason

    return first_step


def _before_zero_grad(optimizer: Optimizer) -> None:
    """Make an optimizer from before sharding zero the gradients of the shards. Its first step reports any old state."""
    if not (optimizer.state or torch.compiler.is_compiling()):
        point_to_shards(optimizer)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Prepare a step of `optimizer`, or run it here. Return new arguments for its own step, or None to keep them."""
    if torch.compiler.is_compiling():
        _refuse_compiled_step(optimizer)
    if optimizer in trials:
        return None
    replaced = None
    if optimizer not in _stepping:
        _restore(optimizer)
        point_to_shards(optimizer)
        check_modules(optimizer)
        _loaded_states().accept_whole_states(optimizer)
        _check_steps_shards(optimizer)
        if not _may_have_any_order(optimizer):
            check_same_order(optimizer)
        register_outside_params(optimizer)
        if not hasattr(optimizer.step, _MARK):
            count_step(optimizer)
        _first_steps().before_first_step(optimizer)
        _step_shards(optimizer)
        replaced = _step_instead_of(optimizer, args, kwargs)
    _note_step()
    return replaced


@outside_of_graphs
def _refuse_compiled_step(optimizer: Optimizer) -> None:
    """Raise if `optimizer` has sharded parameters: Dynamo cannot trace a `DTensor` over a slice of a buffer."""
    if any(isinstance(param, DTensor) for param in _params(optimizer)):
        raise ConfigError(
            f"{type(optimizer).__name__}.step() of sharded parameters was called within torch.compile, which cannot "
            "trace them. Call optimizer.step() outside of the compiled function. Modules can be compiled."
        )


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in trials:
        return
    if optimizer not in _stepping:
        _restore(optimizer)
        _record_writes(optimizer)
    _note_end_of_step()


def _record_writes(optimizer: Optimizer) -> None:
    """Increment the versions of the sharded parameters that `optimizer` has updated.

    Fused and foreach kernels do not increment them. Kept unsharded parameters are gathered again if versions change.
    """
    params = (param for group in optimizer.param_groups for param in group["params"])
    torch.autograd.graph.increment_version(
        [param for param in params if isinstance(param, DTensor) and param.grad is not None]
    )


def _note_step() -> None:
    """Attribute later events of the trace to an optimizer step."""
    global _interrupted
    recorder = active_recorder()
    if recorder is not None and recorder.origin is not _STEP:  # it still is `_STEP` after a step that raised
        _interrupted = recorder.origin
        note_origin(_STEP)


def _note_end_of_step() -> None:
    recorder = active_recorder()
    if recorder is not None and recorder.origin is _STEP:
        note_origin(_interrupted)


_STEP = Origin("", Phase.STEP)
_interrupted = Origin("", Phase.IDLE)  # the origin before a step, which may run within backward


def step_shards(optimizer: OptimizerT, *, verify: bool = False) -> OptimizerT:
    """Make `optimizer` update this rank's plain shards instead of the sharded parameters, and return it.

    Use it for optimizers that treat each element, or each block of elements, separately, and whose kernels need plain
    memory. torch's elementwise optimizers do not need it. The optimizers of bitsandbytes and torchao encode states in
    blocks, so their shards must consist of whole blocks. States whose shape is not the parameter's are local to each
    rank, and are not saved.

    Optimizers that are known by name to need full parameters raise an error. Unknown optimizers are tested on small
    tensors, full and split in two, and raise an error if the steps differ. A warning is logged if they cannot be
    tested.

    Args:
        optimizer: The optimizer, with or without states.
        verify: Whether to compare the first three steps with those of an optimizer of the same class on full tensors.
            For this, each rank gathers all parameters and gradients, and needs memory for full states.

    Raises:
        ConfigError: The optimizer needs full parameters, or its shards must consist of whole blocks and do not (pass
            `shard_alignment` to `fully_shard`). With `verify`, `step()` also raises it.
    """
    check_type("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
    check_name(optimizer)
    blocks = block_states(optimizer)
    if blocks is not None:
        blocks.check(_sharded_params(optimizer))
    is_known = type(optimizer) in _ELEMENTWISE or type(optimizer) is torch.optim.Rprop
    if not (is_known or _is_of_library_with_kernels(optimizer) or _has_no_shards(optimizer)):
        check_elementwise(optimizer)
    if not hasattr(optimizer.step, _MARK):
        _replace_step(optimizer)
    if verify:
        _comparisons[optimizer] = StepComparison(weakref.ref(optimizer))
    return optimizer


def _is_of_library_with_kernels(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.split(".")[0] in _LIBRARIES_WITH_KERNELS


def _has_no_shards(optimizer: Optimizer) -> bool:
    """Return True if all parameters are replicated `DTensor`s, as under `ddp`."""
    return all(isinstance(param, DTensor) for param in _params(optimizer)) and not _sharded_params(optimizer)


def _check_steps_shards(optimizer: Optimizer) -> None:
    """Raise if `optimizer` would have to update `DTensor`s but cannot."""
    kind, sharded, blocks = type(optimizer), _sharded_params(optimizer), block_states(optimizer)
    if blocks is not None and blocks.draws:  # replicas must also draw identical numbers
        sharded = [item for item in _params(optimizer) if isinstance(item, DTensor)]
    if kind is torch.optim.Rprop:  # it writes by masks, which torch does not support for 0-dim DTensors
        sharded = sharded or [item for item in _params(optimizer) if isinstance(item, DTensor) and not item.ndim]
    if not sharded or hasattr(optimizer.step, _MARK):
        return
    if kind is torch.optim.Adafactor:
        check_name(optimizer)
    if kind is torch.optim.Rprop or _is_of_library_with_kernels(optimizer):
        raise ConfigError(
            f"{kind.__module__}.{kind.__name__} cannot step DTensors, but {len(sharded)} sharded parameters are "
            "DTensors. If it treats each element, or each block of elements, separately, let it step the local "
            "shards: optimizer = fullshard.optim.step_shards(optimizer)."
        )


def _may_have_any_order(optimizer: Optimizer) -> bool:
    """Return True if the order of the parameters of `optimizer` does not affect a step."""
    blocks = block_states(optimizer)
    if blocks is not None and blocks.draws:  # random numbers, which must be identical on replicas
        return False
    return type(optimizer) in _ELEMENTWISE or hasattr(optimizer.step, _MARK) or isinstance(optimizer, ChunkedSteps)


def _sharded_params(optimizer: Optimizer) -> list[Tensor]:
    params = (param for group in optimizer.param_groups for param in group["params"])
    return [
        param for param in params if isinstance(param, DTensor) and any(isinstance(p, Shard) for p in param.placements)
    ]


def _step_shards(optimizer: Optimizer) -> None:
    """Make `optimizer` update plain shards from its next step on, if it is elementwise."""
    if type(optimizer) not in _ELEMENTWISE or hasattr(optimizer.step, _MARK):
        return
    if any(isinstance(param, DTensor) for group in optimizer.param_groups for param in group["params"]):
        _replace_step(optimizer)


def _replace_step(optimizer: Optimizer) -> None:
    known: Any = optimizer.step
    # Use the function of the class, or a scheduler's replacement. A bound method would be a reference cycle.
    inner = getattr(known, "__func__", None) or (lambda _, *args, **kwargs: known(*args, **kwargs))
    optimizer.step = _shard_stepping(optimizer, known, inner)  # type: ignore[method-assign]


def _shard_stepping(optimizer: Optimizer, known: Callable[..., Any], inner: Callable[..., Any]) -> Any:
    from fullshard.optim.plain_step import note_params, plain_step  # imported here for the same reason

    owner = weakref.ref(optimizer)

    def step_of(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        comparison = _comparisons.get(optimizer)
        if comparison is None:
            return take_step(optimizer, *args, **kwargs)
        point_to_shards(optimizer)
        comparison.begin(args, kwargs)
        result = take_step(optimizer)
        if comparison.end():
            del _comparisons[optimizer]
        return result

    def take_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            check_modules(optimizer)
            _loaded_states().accept_whole_states(optimizer)
            register_outside_params(optimizer)  # parameters may have been added since the last step
            count_step(optimizer)
            _first_steps().before_first_step(optimizer)  # before tiers are looked up
        plain = None if args or kwargs or torch.compiler.is_compiling() else plain_step(optimizer)
        disk, on_cpu = states_on_disk(optimizer), {} if plain is not None else _on_cpu(optimizer)
        for unit in on_cpu:
            unit.residency.run_deferred_steps()
        if disk is not None or on_cpu:
            may_wait = not (args or kwargs or step_hooks(optimizer)) and type(optimizer) in _ELEMENTWISE
            step_all = partial(_step_separately, optimizer, disk, on_cpu, may_wait=may_wait)
            return _step_outside_of_graphs(optimizer, step_all, inner, args, kwargs)
        if type(optimizer) not in _ELEMENTWISE or _complex_without_view(optimizer) is not None:  # never on DTensors
            return _step_outside_of_graphs(optimizer, partial(_step_all, optimizer), inner, args, kwargs)
        if block_states(optimizer) is not None and not torch.compiler.is_compiling():  # their kernels take no DTensors
            return _step_in_chunks(optimizer, partial(_step_all, optimizer), inner, args, kwargs)
        # A closure or a hook of the user must see the sharded parameters.
        if args or kwargs or step_hooks(optimizer) or torch.compiler.is_compiling():
            return inner(optimizer, *args, **kwargs)
        if plain is not None:
            return _step_plain(optimizer, plain, inner)
        point_to_shards(optimizer)
        with _swapped_for_shards(optimizer):
            result = inner(optimizer)
        note_params(optimizer)
        return result

    def step(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _refuse_compiled_step(owner())  # type: ignore[arg-type]  # as below
        if all(value is None for value in (*args, *kwargs.values())):  # `closure=None`
            args, kwargs = (), {}
        return step_of(owner(), *args, **kwargs)  # type: ignore[arg-type]  # the caller keeps the optimizer alive

    update_wrapper(step, known)
    del step.__wrapped__  # type: ignore[attr-defined]  # it is bound to the optimizer
    setattr(step, _MARK, True)
    step.__func__ = step_of  # type: ignore[attr-defined]  # torch's schedulers read `__func__`
    return step


def _step_plain(optimizer: Optimizer, plain: Any, inner: Callable[..., Any]) -> Any:
    states: dict[Tensor, dict[str, Any]] = {}
    try:
        with _restricted_to(optimizer, None), plain.exchanged() as states:
            return inner(optimizer)
    finally:
        for param, name, value in plain.replaced_values(states):
            optimizer.state[param][name] = _placed_as(param, value)


@contextmanager
def _swapped_for_shards(optimizer: Optimizer, params: Iterable[Tensor] | None = None) -> Iterator[None]:
    """Context manager that replaces the sharded parameters of `optimizer` that have a gradient by plain shards.

    If `params` are given, the optimizer has only these parameters in the context.
    """
    state = optimizer.state
    swapped: list[tuple[Any, Tensor]] = []  # (parameter, shard)
    with _restricted_to(optimizer, params):
        for group in optimizer.param_groups:
            group["params"] = [_shard_of(param, swapped) for param in group["params"]]
        given: dict[Tensor, dict[str, Any]] = {}
        for param, shard in swapped:
            known = state.get(param)
            if known is not None:
                state[shard], given[shard] = _local_state(known)
        blocks = block_states(optimizer)
        deciding = None if blocks is None else blocks.deciding_by_wholes({id(item): param for param, item in swapped})
        try:
            with deciding or nullcontext():
                yield
        finally:
            for param, shard in swapped:
                shard.grad = None
                stepped = state.pop(shard, None)
                if stepped is not None:
                    known, before = state[param], given.get(shard, {})
                    for name, value in stepped.items():
                        if name not in before or before[name] is not value or _was_moved(known.get(name), value):
                            known[name] = _placed_as(param, value)
            torch.autograd.graph.increment_version([param for param, _ in swapped])


@contextmanager
def _restricted_to(optimizer: Optimizer, params: Iterable[Tensor] | None) -> Iterator[None]:
    """Context manager that restricts `optimizer` to `params`, if given, and restores its parameters afterwards."""
    given = [group["params"] for group in optimizer.param_groups]
    if params is not None:
        ids = set(map(id, params))
        for group in optimizer.param_groups:
            group["params"] = [param for param in group["params"] if id(param) in ids]
    _stepping.add(optimizer)
    try:
        yield
    finally:
        _stepping.discard(optimizer)
        for group, own in zip(optimizer.param_groups, given, strict=True):
            group["params"] = own


def _shard_of(param: nn.Parameter, swapped: list[tuple[Any, Tensor]]) -> Tensor:
    """Return this rank's shard of `param` with its gradient, and record it in `swapped`. Return others unchanged."""
    grad = param.grad
    if not isinstance(grad, DTensor) or not isinstance(param, DTensor) or managed_by(param) is None:
        return param
    shard: Tensor = param._local_tensor
    if not shard.ndim:  # use a 1-D view, because the state would otherwise have the shape of a step count
        shard, local_grad = shard.view(1), grad._local_tensor.view(1)
    else:
        local_grad = grad._local_tensor
    if shard.dtype != local_grad.dtype:
        shard.grad_dtype = local_grad.dtype
    shard.grad = local_grad
    swapped.append((param, shard))
    return shard


def _local_state(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the `state` of a parameter with plain tensors, and the subset that shares memory with `state`."""
    local, shared = dict[str, Any](), dict[str, Any]()
    for name, value in state.items():
        if not isinstance(value, DTensor):
            local[name] = shared[name] = value
            continue
        own: Tensor = value._local_tensor
        if isinstance(own, TensorOnDisk):  # loaded from the state dict of another optimizer
            own = own.fetch()
            local[name] = own if value.ndim else own.view(1)
        else:
            local[name] = shared[name] = own if value.ndim else own.view(1)
    return local, shared


def _was_moved(known: Any, value: Any) -> bool:
    """Return True if a step has moved `value`, the 1-D view of the 0-dim `known`, to other memory."""
    return isinstance(known, DTensor) and not known.ndim and address(value) != address(known._local_tensor)


def _marked(value: Any) -> Any:
    """Return `value`, marked as local to this rank if it is a tensor with more than one element."""
    if isinstance(value, Tensor) and value.numel() > 1:
        setattr(value, OWN, True)
    return value


def _placed_as(param: DTensor, value: Any) -> Any:
    """Return `value`, as a `DTensor` if it has the shape of the shard."""
    if not param.ndim and isinstance(value, Tensor) and value.shape == (1,):
        value = value.view(())
    elif not isinstance(value, Tensor) or not param.ndim or value.shape != param._local_tensor.shape:
        return _marked(value)
    if value.dtype == param.dtype:
        return dtensor_like(value, param)
    return make_dtensor(value, param.device_mesh, tuple(param.placements), tuple(param.shape))


# -- steps in chunks --------------------------------------------------------------------------------------------------

_BY_PARAMETER = frozenset({torch.optim.Adafactor})  # steps each full parameter separately
_given: weakref.WeakKeyDictionary[Optimizer, list[list[Tensor]]] = weakref.WeakKeyDictionary()
"""The parameters, by group, of optimizers that were stepped in chunks, until their own step is over."""
_withheld: weakref.WeakKeyDictionary[Optimizer, Callable[[], None]] = weakref.WeakKeyDictionary()
"""Functions that restore the user's hooks of these optimizers, which their own step must not call again."""


Run = Callable[[Sequence[Tensor]], None]


def _step_in_chunks(
    optimizer: Optimizer, step_all: Callable[[Run], None], inner: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Run the step `inner` of `optimizer` in chunks, and return the result of the closure, if given.

    The closure is called once, before any parameter is updated. The user's hooks are called before the first and after
    the last chunk.

    Args:
        step_all: A function that calls its argument with the parameters of each chunk.
    """
    with without_step_hooks(optimizer) as (before, after):
        for hook in before:
            (_, *args), kwargs = hook(optimizer, (optimizer, *args), kwargs) or ((optimizer, *args), kwargs)
        closure, *others = args or (kwargs.get("closure"),)
        options = {name: value for name, value in kwargs.items() if name != "closure"}
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        point_to_shards(optimizer)
        swap = _restricted_to if type(optimizer) in _BY_PARAMETER else _swapped_for_shards
        chunks = itertools.count()

        def run(params: Sequence[Tensor]) -> None:
            for drawing_params, drawing in _with_identical_random_numbers(optimizer, params, next(chunks)):
                with swap(optimizer, drawing_params), drawing:
                    inner(optimizer, *([None, *others] if others else []), **options)
                _note_step()  # again, because hooks of `inner` have recorded its end

        _note_step()
        step_all(run)
        _record_writes(optimizer)
        _note_end_of_step()
        for hook in after:
            hook(optimizer, (optimizer, *args), kwargs)
    return loss


_step_outside_of_graphs = outside_of_graphs(_step_in_chunks)


def _step_all(optimizer: Optimizer, run: Run) -> None:
    run(_params(optimizer))


def _params(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _on_cpu(optimizer: Optimizer) -> dict[Unit, list[nn.Parameter]]:
    """Return the parameters whose shards are offloaded to the CPU, by unit."""
    units: dict[Unit, list[nn.Parameter]] = {}
    for param in _params(optimizer):
        managed = managed_by(param)
        if managed is not None and managed.unit.shards.is_on_cpu and managed.unit.shards.is_offloaded:
            units.setdefault(managed.unit, []).append(param)
    return units


def _step_separately(
    optimizer: Optimizer,
    disk: StatesOnDisk | None,
    on_cpu: Mapping[Unit, Sequence[nn.Parameter]],
    run: Run,
    *,
    may_wait: bool,
) -> None:
    """Update parameters on the device, in chunks if states are on a disk, and parameters `on_cpu` on the CPU.

    The CPU updates units in the order of their gradients, while the device updates others, or later if `may_wait`.
    """
    there = {id(param) for params in on_cpu.values() for param in params}
    if disk is None:
        run([param for param in _params(optimizer) if id(param) not in there])
    else:
        disk.step(optimizer, run, there)
    for unit, params in reversed(list(on_cpu.items())):
        step = partial(_step_on_cpu, run, unit, params)
        if may_wait and can_defer(optimizer, unit, params):
            defer(optimizer, unit, params, step)
        else:
            step()


def _step_on_cpu(run: Run, unit: Unit, params: Sequence[nn.Parameter]) -> None:
    with acting_for(_STEP), accelerator_for(unit.device).on_host():
        run(params)


def _with_identical_random_numbers(
    optimizer: Optimizer, params: Sequence[Tensor], chunk: int
) -> Iterator[tuple[Sequence[Tensor], AbstractContextManager[Any]]]:
    """Yield groups of `params` with the same mesh, and a context to step each group in.

    In this context random numbers depend only on the step, the chunk and the rank's coordinate on sharded axes. So
    stochastic rounding is identical on all replicas.
    """
    blocks = block_states(optimizer)
    if blocks is None or not blocks.draws:
        yield params, nullcontext()
        return
    by_mesh: dict[Any, list[Tensor]] = {}
    for param in params:
        by_mesh.setdefault(param.device_mesh if isinstance(param, DTensor) else None, []).append(param)
    counts = [state["step"] for state in optimizer.state.values() if "step" in state]
    for number, (mesh, of_mesh) in enumerate(by_mesh.items()):
        place = [] if mesh is None else mesh.get_coordinate()
        cut = {
            axis
            for item in of_mesh
            if isinstance(item, DTensor)
            for axis, p in enumerate(item.placements)
            if p.is_shard()
        }
        part = [coordinate for axis, coordinate in enumerate(place) if axis in cut]
        seed = crc32(repr((max(map(int, counts), default=0), chunk, number, part)).encode())
        yield of_mesh, _seeded(seed, of_mesh[0].device)


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Context manager that seeds the generator of `device`, and restores its state afterwards."""
    module: Any = torch.random if device.type == "cpu" else torch.get_device_module(device)
    state = module.get_rng_state()
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would seed all devices
    else:
        module.manual_seed(seed)
    try:
        yield
    finally:
        module.set_rng_state(state)


def _complex_without_view(optimizer: Optimizer) -> DTensor | None:
    """Return a complex parameter that torch's optimizers cannot update as a `DTensor`; None if there is none.

    Optimizers view complex tensors as real ones. If a `DTensor` is sharded unevenly along its last dim, torch gathers
    it for the view, so writes to the view are lost. For a 0-dim `DTensor` it raises `RuntimeError`. The view of a
    parameter or a state on a disk is a copy in memory.
    """
    for param in _params(optimizer):
        if param.is_complex() and isinstance(param, DTensor):
            held = (param, *optimizer.state.get(param, {}).values())
            if any(isinstance(tensor, DTensor) and isinstance(tensor._local_tensor, TensorOnDisk) for tensor in held):
                return param
            last = param.ndim - 1
            for axis, placement in enumerate(param.placements):
                is_cut = isinstance(placement, Shard) and placement.dim == last
                if last < 0 or (is_cut and param.shape[last] % param.device_mesh.size(axis)):
                    return param
    return None


def _step_instead_of(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Run the step of `optimizer` in chunks if necessary, and remove its parameters until its own step has returned.

    With a closure, its own step runs with all states in memory, and the states are written to the disk afterwards. For
    complex parameters without a view, its own step runs without parameters: the returned arguments contain a closure
    that returns the loss. The user's hooks, which may exist on some ranks only, are called here, before and after all
    chunks.
    """
    disk = None if isinstance(optimizer, ChunkedSteps) else states_on_disk(optimizer)
    on_cpu, complex_param = _on_cpu(optimizer), _complex_without_view(optimizer)
    if disk is None and not on_cpu and complex_param is None:
        return None
    if type(optimizer) not in _BY_PARAMETER and not hasattr(optimizer.step, _MARK):
        if complex_param is not None and (managed := managed_by(complex_param)) is not None:
            raise ConfigError(
                f"{type(optimizer).__name__} cannot step {managed.param.fqn}, a complex parameter of shape "
                f"{tuple(complex_param.shape)}: as a DTensor over {complex_param.device_mesh.size()} ranks, or on a "
                "disk, it cannot be viewed as real numbers, so torch would lose the update. If it treats each element "
                "separately, let it step the local shards: optimizer = fullshard.optim.step_shards(optimizer)."
            )
        if disk is None:
            return None
        raise ConfigError(
            f"{type(optimizer).__name__} may need all parameters at once, but Offload puts its states on a disk. Use "
            "an optimizer of torch.optim that steps each parameter separately, such as AdamW, or "
            "fullshard.optim.Muon. If it treats each element separately, use fullshard.optim.step_shards(optimizer)."
        )
    _given[optimizer] = [group["params"] for group in optimizer.param_groups]
    has_closure = len(args) > 1 or bool(kwargs)  # args[0] is the optimizer
    if has_closure and complex_param is None:
        return None
    step_all = partial(_step_separately, optimizer, disk, on_cpu, may_wait=False)
    result = _step_outside_of_graphs(optimizer, step_all, type(optimizer).step, args[1:], kwargs)
    _withheld[optimizer] = withhold_step_hooks(optimizer)
    for group in optimizer.param_groups:
        group["params"] = []
    return ((optimizer, lambda: result), {}) if has_closure else None


def _nothing() -> None:
    """Do nothing, since no hooks were withheld."""


def _restore(optimizer: Optimizer) -> None:
    """Restore the parameters and hooks of `optimizer`, and write its states to the disk."""
    _withheld.pop(optimizer, _nothing)()
    given = _given.pop(optimizer, None)
    if given is None:
        return
    for group, params in zip(optimizer.param_groups, given, strict=True):
        group["params"] = params
    disk = states_on_disk(optimizer)
    if disk is not None:
        disk.write_all(optimizer)
