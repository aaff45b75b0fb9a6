"""`fully_shard`: shard a module's parameters in place."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.comm.mesh import Axes, axes_by_name
from fullshard.device.accelerator import accelerator_for, on_stream
from fullshard.engine.hooks import (
    abandon_step,
    changing_shards,
    is_in_use,
    run_as_forward,
    runtime_of,
    without_sync,
    zero_shard_grads,
)
from fullshard.engine.registry import clean_fqn, is_unit, unit_of, units_in
from fullshard.engine.unit import Unit
from fullshard.engine.whole_methods import checked_methods
from fullshard.errors import ConfigError, StateError
from fullshard.policy.arguments import check_callable, check_flags, check_iterable, check_type, is_number
from fullshard.policy.meshes import DataParallelMeshDims
from fullshard.policy.offload import OffloadPolicy, policies_by_name
from fullshard.policy.options import ShardOptions
from fullshard.policy.precision import MixedPrecisionPolicy
from fullshard.policy.strategy import Placements as StrategyPlacements
from fullshard.policy.strategy import ShardingStrategy
from fullshard.sharding import PLAIN_CLASS, ShardPlacementFn, shard_unit
from fullshard.wrap import AutoWrapPolicy, wrapped_modules

Strategy = str | ShardingStrategy | StrategyPlacements
_log = logging.getLogger(__name__)
M = TypeVar("M", bound="nn.Module | Sequence[nn.Module]")


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    strategy: Strategy = "zero3",
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | Mapping[str, OffloadPolicy] | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    auto_wrap_policy: AutoWrapPolicy | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    broadcast_buffers: bool = False,
    shard_alignment: int = 1,
) -> M:
    """Shard the parameters of `module` in place and return it.

    The module becomes a unit: its parameters are this rank's shards, and are unsharded only while compute needs them.
    Call this function on inner modules first (for example each transformer block), and on the outermost module last: a
    unit contains the parameters that are not in a unit below it. Between steps every parameter is a `DTensor`, so
    optimizers, gradient clipping and checkpoints of torch work on it. The module gains the methods of `FSDPModule`.

    Args:
        module: the module to shard. Several modules in a list are one unit, which is unsharded from the forward of the
            first one to that of the last one.
        mesh: the ranks to shard over. A mesh with one axis shards over this axis. A mesh with two axes replicates over
            the first and shards over the second. If None, all ranks are on one axis.
        strategy: `"ddp"`, `"zero1"`, `"zero2"`, `"zero3"`, `"hsdp"`, `"hsdp_zero2"`, a `ShardingStrategy` or
            `Placements`.
        reshard_after_forward: whether to free the unsharded parameters between forward and backward. None uses the
            setting of the strategy, except that a root keeps its parameters, because its backward follows
            immediately. A number is the size of groups of consecutive ranks, which must divide the number of ranks.
            After forward, each group keeps an additional copy of the parameters, sharded over its ranks, and backward
            gathers within the group only.
        mp_policy: the dtypes of compute, of the reduction and of outputs.
        offload_policy: `CPUOffloadPolicy()` keeps shards, their gradients and the optimizer step on the CPU. `Offload`
            sets the fractions that are offloaded, over all units with the same policy. With `auto_wrap_policy`, a
            mapping from patterns (`{"lm_head": ..., "layers.*": ...}`) to policies is also accepted. The first pattern
            that matches a unit's FQN relative to `module` applies to it. The FQN of `module` is `""`.
        ignored_params: parameters that are neither sharded nor synchronized.
        dp_mesh_dims: the names of the axes of `mesh` to shard and to replicate over. Several axes are flattened to one.
            The other axes belong to other parallelisms. Parameters may be `DTensor`s on all axes of `mesh`, with
            `Replicate()` on the named axes, and modules still see such `DTensor`s. Parameters may also be `DTensor`s on
            the other axes only, or plain tensors.
        auto_wrap_policy: selects the submodules that become separate units first; see `fullshard.wrap`.
        shard_placement_fn: for each parameter, returns `Shard(dim)` to shard it along that dim, or None for the
            default. A parameter that is not sharded along dim 0 needs a copy, since its gathered shards are not
            contiguous. To shard a parameter over a different mesh, return a `ShardPlacementResult` of one of these
            values and the mesh, for example to shard experts over fewer ranks than the rest of their block. All
            parameters of a unit are gathered together.
        broadcast_buffers: whether the first forward after a step broadcasts the buffers (such as batch norm statistics)
            of the mesh's first rank, like DDP. Otherwise each rank keeps its own buffers.
        shard_alignment: the number of elements per block. Shards then consist of whole blocks, such as the blocks in
            which 8-bit optimizers encode their states, so that results per block are the same on any number of ranks. A
            trained parameter of 4096 elements or more that cannot be split into whole blocks is not sharded, nor are
            its gradient and its states, and its gradients are all-reduced.

    Raises:
        ConfigError: an argument is invalid or not supported, or the module is already sharded.
        StateError: the default process group is not initialized.

    Example:
        ```python
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        ```
    """
    _check_arguments(module, mesh, mp_policy, ignored_params, dp_mesh_dims, shard_placement_fn)
    check_flags(broadcast_buffers=broadcast_buffers)
    ignored_params = None if ignored_params is None else list(ignored_params)
    axes = mesh if dp_mesh_dims is None else axes_by_name(mesh, dp_mesh_dims)
    if dp_mesh_dims is not None and dp_mesh_dims.shard is None:
        strategy = _whole_everywhere(strategy)
    modules = tuple(module) if isinstance(module, list | tuple) else (module,)
    if auto_wrap_policy is not None and modules:
        options: dict[str, Any] = {
            "mesh": mesh,
            "strategy": strategy,
            "reshard_after_forward": reshard_after_forward,
            "mp_policy": mp_policy,
            "ignored_params": ignored_params,
            "dp_mesh_dims": dp_mesh_dims,
            "shard_placement_fn": shard_placement_fn,
            "broadcast_buffers": broadcast_buffers,
            "shard_alignment": shard_alignment,
        }
        for root in modules:
            sharded = [child for child in root.modules() if is_unit(child)]
            chosen = wrapped_modules(root, auto_wrap_policy, ignored_modules=sharded)
            policies = _policies(root, chosen, offload_policy)
            for child, overrides in chosen.items():
                fully_shard(child, **{**options, "offload_policy": policies[child], **overrides})
        offload_policy = policies[root]
    elif isinstance(offload_policy, Mapping):
        raise ConfigError(
            f"offload_policy names units ({', '.join(offload_policy)}), which an auto_wrap_policy must create. Pass "
            "auto_wrap_policy, or pass each unit its policy in its own fully_shard call."
        )
    shard_in_place(
        modules,
        ShardOptions.of(
            strategy,
            reshard_after_forward=reshard_after_forward,
            mp_policy=mp_policy,
            offload_policy=offload_policy,
            broadcast_buffers=broadcast_buffers,
            shard_alignment=shard_alignment,
        ),
        mesh=axes,
        ignored_params=ignored_params,
        shard_placement_fn=shard_placement_fn,
    )
    return module


def _check_arguments(
    module: object,
    mesh: object,
    mp_policy: object,
    ignored_params: Iterable[nn.Parameter] | None,
    dp_mesh_dims: object,
    shard_placement_fn: object,
) -> None:
    for each in module if isinstance(module, list | tuple) else (module,):
        check_type("module", each, nn.Module, "an nn.Module, or a list of them")
    if mesh is not None:
        check_type("mesh", mesh, DeviceMesh, "what init_device_mesh returns, or None")
    if mp_policy is not None:
        check_type("mp_policy", mp_policy, MixedPrecisionPolicy, "a fullshard.MixedPrecisionPolicy, or None")
    if ignored_params is not None:
        check_iterable("ignored_params", ignored_params, "a set of parameters, or None")
    if dp_mesh_dims is not None and not hasattr(dp_mesh_dims, "shard"):  # torch's own class has the same fields
        check_type("dp_mesh_dims", dp_mesh_dims, DataParallelMeshDims, "a DataParallelMeshDims, or None")
    if shard_placement_fn is not None:
        check_callable("shard_placement_fn", shard_placement_fn, "a function of one parameter, or None")


def _policies(
    root: nn.Module, units: Iterable[nn.Module], policy: OffloadPolicy | Mapping[str, OffloadPolicy] | None
) -> dict[nn.Module, OffloadPolicy | None]:
    """Return the offload policies of `root` and of `units`, which are modules in it."""
    modules = [root, *units]
    if not isinstance(policy, Mapping):
        return dict.fromkeys(modules, policy)
    names = {module: clean_fqn(name) for name, module in root.named_modules()}
    return dict(zip(modules, policies_by_name(policy, [names[module] for module in modules]), strict=True))


def shard_in_place(
    modules: Sequence[nn.Module],
    options: ShardOptions,
    *,
    mesh: DeviceMesh | Axes | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
) -> None:
    """Make `modules` one unit, and add the methods of `FSDPModule` to them. For the arguments, see `shard_unit`."""
    shard_unit(modules, options, mesh=mesh, ignored_params=ignored_params, shard_placement_fn=shard_placement_fn)
    for module in modules:
        _gain_methods(module)


def _whole_everywhere(strategy: Strategy) -> Strategy:
    """Return the strategy for replication only. The default strategy, which shards, is also accepted."""
    if strategy not in ("zero3", "ddp"):
        raise ConfigError(
            f"dp_mesh_dims names axes to replicate over and none to shard over, but strategy={strategy!r} was "
            'passed. Leave it out, or pass "ddp"; or name the axes to shard over, by DataParallelMeshDims(shard=...).'
        )
    return "ddp"


def replicate(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> M:
    """Replicate `module` in place and return it: `fully_shard` with `strategy="ddp"`.

    Every rank of `mesh` has all parameters, and gradients are means over the ranks.

    Args:
        module: see `fully_shard`, also for the other arguments. A mesh of one axis replicates.
        mesh: the ranks.
        mp_policy: the dtypes.
        offload_policy: the placement of parameters, gradients and the optimizer's step.
        ignored_params: parameters that are neither sharded nor synchronized.
        dp_mesh_dims: the names of the axes of `mesh` to replicate over.

    Raises:
        ConfigError: an argument is invalid or not supported, or `dp_mesh_dims` names axes to shard over.
    """
    _check_arguments(module, mesh, mp_policy, ignored_params, dp_mesh_dims, None)
    if dp_mesh_dims is not None and dp_mesh_dims.shard is not None:
        raise ConfigError(
            f"replicate(dp_mesh_dims={dp_mesh_dims}) has axes to shard over. Pass them as replicate=, or call "
            "fully_shard."
        )
    return fully_shard(
        module,
        mesh=mesh,
        strategy="ddp",
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        ignored_params=ignored_params,
        dp_mesh_dims=dp_mesh_dims,
    )


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """Do nothing, for compatibility with torch: all roots on a device, such as pipeline stages, share its streams.

    So one root can reuse memory that another root has freed.

    Args:
        modules: Units.

    Raises:
        StateError: a module is not a unit.
    """
    _units_of(modules)


_NO_STAGING = "data is sent from shards and gradients and received in place"


@functools.cache
def _warn_without_effect(name: str, reason: str) -> None:
    """Log, once, that a setting of torch has no effect."""
    _log.warning("%s has no effect: %s.", name, reason)


def _custom_refused(name: str, comm: Any) -> ConfigError:
    return ConfigError(
        f"{name}({type(comm).__name__}): such a collective copies between staging buffers, but here {_NO_STAGING}. "
        "Register a custom backend with fullshard.comm.routes.register_backend and use it for the process group; or "
        "set MixedPrecisionPolicy(gather_wire=..., reduce_wire=...)."
    )


class UnshardHandle:
    """An all-gather in progress. Created by `FSDPModule.unshard(async_op=True)`."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = list(units)

    def wait(self) -> None:
        """Wait until the parameters of the module are unsharded."""
        for unit in self._units:
            unit.residency.wait_unshard()


class GradientReductionHandle:
    """A reduction of gradients, for compatibility with torch. Created by `finalize_backward(async_op=True)`."""

    def wait(self) -> None:
        """Return immediately: `finalize_backward` has completed the reduction."""


class FSDPModule:
    """The methods that `fully_shard` adds to a module. Those with `recurse` also affect the units below.

    Created by `fully_shard`, as a base of the class of the module.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create a plain module of the user's class, not a unit, such as a slice of a sharded `nn.Sequential`."""
        plain: Any = next((plain for plain, made in _classes.items() if made in cls.__mro__), None)
        if plain is None:  # a class that the user has derived from `FSDPModule`
            return super().__new__(cls)
        module = plain.__new__(plain, *args, **kwargs)
        module.__init__(*args, **kwargs)  # Python does so for instances of `cls` only
        return module

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Do not call `__init_subclass__` of the user's class for the class that `fully_shard` derives from it."""
        if PLAIN_CLASS not in cls.__dict__:
            super().__init_subclass__(**kwargs)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Unshard the unit's parameters, until `reshard` or the module's next forward frees them.

        Changes of `requires_grad` of the unsharded parameters are kept. In-place changes of their values are lost, and
        a warning is logged.

        Args:
            async_op: Whether to return immediately with a handle to wait for the all-gather.
        """
        check_flags(async_op=async_op)
        unit = unit_of(_module(self))
        runtime_of(_module(self)).start_unshard(unit)
        handle = UnshardHandle([unit])
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Reshard the parameters, and free the unsharded ones."""
        unit = unit_of(_module(self))
        unit.residency.is_unsharded_manually = False
        unit.residency.hand_over_shards()
        accelerator_for(unit.device).end_pass()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager that makes backward accumulate unsharded gradients without reducing them.

        Parameters are gathered as usual. The first backward after the context reduces the accumulated gradients.
        """
        with without_sync(units_in(_module(self))):
            yield

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backward reduces gradients. Pass False for all microbatches of a step except for the last one.

        Args:
            requires_gradient_sync: True to reduce in each backward; False to accumulate unsharded gradients on this
                rank.
            recurse: Whether to also set it for the units below.
        """
        check_flags(requires_gradient_sync=requires_gradient_sync)
        for unit in self._units(recurse):
            unit.settings.syncs_gradients = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward also reduces over the replicate axis, or keeps sums over the shard axis for later.

        Args:
            requires_all_reduce: True to all-reduce over the replicate axis in each backward.
            recurse: Whether to also set it for the units below.
        """
        check_flags(requires_all_reduce=requires_all_reduce)
        for unit in self._units(recurse):
            unit.settings.syncs_replicas = requires_all_reduce

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Set whether parameters without a gradient are reduced as zeros, which is needed if only some ranks use them.

        The units themselves must be called on all ranks. A unit is then reduced at the end of its backward, not with
        its last gradient, and parameters that no rank used get a gradient of zeros.

        Args:
            reduce_scatter_unused_params: True to reduce parameters without a gradient as zeros.
            recurse: Whether to also set it for the units below.
        """
        check_flags(reduce_scatter_unused_params=reduce_scatter_unused_params)
        for unit in self._units(recurse):
            unit.settings.reduces_unused = reduce_scatter_unused_params

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether to free the unsharded parameters between forward and backward.

        Args:
            reshard_after_forward: True to free the unsharded parameters after forward.
            recurse: Whether to also set it for the units below.
        """
        check_flags(reshard_after_forward=reshard_after_forward)
        for unit in self._units(recurse):
            unit.settings.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether to free the unsharded parameters after backward. If not, the next microbatch needs no all-gather.

        Args:
            reshard_after_backward: True to free the unsharded parameters after backward.
            recurse: Whether to also set it for the units below.
        """
        check_flags(reshard_after_backward=reshard_after_backward)
        for unit in self._units(recurse):
            unit.settings.reshard_after_backward = reshard_after_backward

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Do nothing, for compatibility with torch: every backward finishes its reductions.

        Args:
            is_last_backward: Ignored.
        """

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether only `finalize_backward` reduces gradients. Then call it after the last backward of each step.

        This is for an outermost module whose backwards run in parts or in any order, such as a pipeline stage. Its
        units stay unsharded after the step's first forward (or `unshard`), and unsharded gradients stay in memory.
        Disabling it within a step drops the gradients of that step.

        Args:
            enabled: True to reduce gradients in `finalize_backward` only.
        """
        check_flags(enabled=enabled)
        runtime_of(_module(self)).finalize_manually(enabled)

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce the accumulated gradients, and reshard. `set_requires_gradient_sync(False)` defers the reduction.

        Args:
            async_op: Whether to return a handle, for compatibility with torch. Its `wait()` returns immediately.

        Raises:
            StateError: `set_manual_backward_finalization(True)` was not called.
        """
        runtime_of(_module(self)).finalize_backward()
        return GradientReductionHandle() if async_op else None

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether this unit's parameters are gathered for its backward.

        Disable it only if backward does not read parameters, as for an embedding. Otherwise backward raises an error.

        Args:
            unshard_in_backward: False to leave the parameters sharded in backward.
        """
        check_flags(unshard_in_backward=unshard_in_backward)
        unit_of(_module(self)).settings.unshards_in_backward = unshard_in_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of this unit's gradients by `factor` instead of the number of the root's ranks.

        By default, the gradients of units on fewer ranks than the root are also divided by the number of the root's
        ranks. This is correct for experts, which process the tokens of all these ranks. torch divides by the number of
        the unit's ranks. A warning is logged for such units, unless their parameters are `DTensor`s of expert
        parallelism.

        Args:
            factor: A positive number.

        Raises:
            ConfigError: `factor` is not a positive number.
        """
        if not is_number(factor) or not factor > 0:
            raise ConfigError(f"set_gradient_divide_factor({factor!r}): expected a positive number.")
        unit_of(_module(self)).settings.gradient_divisor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Alias of `set_gradient_divide_factor`.

        Args:
            factor: A positive number.
        """
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Do nothing, for compatibility with torch: gradients are always summed, and divided afterwards.

        Args:
            enable: Ignored.
        """

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: torch.Stream | None = None) -> None:
        """Call `hook(sums)` with this unit's gradients after they are summed over its ranks.

        The optimizer gets the values after the call. So the hook may modify them in place, or sum them over additional
        ranks.

        `sums` is 1-D, in the reduce dtype, and contains this rank's shards of the means over the ranks, in order, with
        padding between them. There is one call per parameter group (the parameters on one mesh, of one dtype). If
        gradients are not sharded (`"ddp"`), there is one call per message. All ranks make the calls in the same order,
        and only in microbatches that reduce gradients. An exception in the hook ends the backward.

        Args:
            hook: The function.
            stream: The stream to run it on, on a GPU. If None, this is the stream of sums over the replicate axis.
                Ignored on a CPU.

        Raises:
            ConfigError: `stream` was given for a mesh with a replicate axis, whose sums already have a stream.
        """
        check_callable("hook", hook, "a function of one tensor")
        unit = unit_of(_module(self))
        replicated = next((axes.mesh for axes in unit.collectives if axes.replicate_group is not None), None)
        if stream is not None and replicated is not None:
            raise ConfigError(
                f"set_all_reduce_hook(stream=...): {replicated} has a replicate axis, so the hook runs on the stream "
                "of its all-reduce. Leave stream out."
            )
        unit.settings.all_reduce_hook = hook if stream is None else functools.partial(on_stream, stream, hook)

    def set_custom_all_gather(self, comm: Any) -> None:
        """Raise an error: torch's interface requires one send buffer and one receive buffer, which do not exist here.

        Args:
            comm: An implementation of torch's interface.

        Raises:
            ConfigError: Always.
        """
        raise _custom_refused("set_custom_all_gather", comm)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Raise an error: torch's interface requires one send buffer and one receive buffer, which do not exist here.

        Args:
            comm: An implementation of torch's interface.

        Raises:
            ConfigError: Always.
        """
        raise _custom_refused("set_custom_reduce_scatter", comm)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Raise an error for True, which in torch (2.15) keeps the addresses of unsharded parameters fixed.

        Args:
            keep: False does nothing.
            recurse: Ignored.

        Raises:
            ConfigError: The argument is True.
        """
        if keep:
            raise ConfigError(
                "set_keep_unsharded_storage(True): resharding frees a unit's memory, and the next unshard may use "
                "different memory. For CUDA graphs of parts of a model, call "
                "fullshard.share_memory_between_units(True) before the first forward: units then share permanent "
                "buffers."
            )

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Do nothing, for compatibility with torch: gradients are sent without staging buffers.

        Args:
            max_input_buffers: A number of buffers, 1 or more. It has no effect.
            recurse: Ignored.

        Raises:
            ConfigError: `max_input_buffers` is not a positive number.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int) or max_input_buffers < 1:
            raise ConfigError(
                f"set_reduce_scatter_max_input_buffers({max_input_buffers!r}): expected an integer of 1 or more."
            )
        _warn_without_effect("set_reduce_scatter_max_input_buffers", "gradients are sent without a staging copy")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Do nothing, for compatibility with torch: staging buffers are not used.

        Args:
            enable: Ignored.
        """
        _warn_without_effect("set_allocate_memory_from_process_group_for_comm", _NO_STAGING)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Do nothing, for compatibility with torch: staging buffers are not used.

        Args:
            backend: Ignored.
        """
        _warn_without_effect("set_symm_mem_for_comm", _NO_STAGING)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Do nothing, for compatibility with torch: gathers and reductions use the same process group.

        Args:
            enable: Ignored.
            recurse: Ignored.
        """
        _warn_without_effect("set_separate_reduce_scatter_group", "gathers and reductions use one process group")

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Make the next forward wait for `event`, recorded on the stream of the optimizer's step.

        On a CPU, which has no streams, the step has completed when it returns, so nothing waits.

        Args:
            event: An event that is recorded after the optimizer's step.
        """
        runtime_of(_module(self)).scheduler.after_optimizer = event

    def reset_iter_state(self) -> None:
        """Clean up after a failed forward or backward, so that all units are sharded and none is in use.

        Gradients that have not been reduced are dropped. Call `zero_grad()` to drop reduced ones. The next forward does
        this automatically, and so do `state_dict` and `summon_full_params`.

        Raises:
            StateError: a forward or backward is running.
        """
        runtime = runtime_of(_module(self))
        if runtime.finalizes_manually:
            runtime.finalize_manually(True)
        if any(is_in_use(unit) for unit in units_in(_module(self))):
            raise StateError(
                "reset_iter_state was called within a forward or backward. Call it after catching the exception."
            )

    def abandon_step(self) -> None:
        """Undo the current step: the next step gives the same bits as if this one had never started.

        Every rank of the mesh must call it on the outermost module, at any point of the step: after a forward, between
        microbatches, after an exception in forward or backward, on all ranks or on one. A rank that waits in a
        collective for a rank that calls this gets a `RankMismatchError`: catch it, and also call this method. (NCCL
        cannot detect this, so on NCCL all ranks must get the same exception.) Gradients of all microbatches are
        dropped, including those that the optimizer would see, as is the error feedback of encoded gradients. Weights
        and optimizer state are as before the step, provided that the optimizer has not stepped yet. The caller must
        restore buffers that the forward has written, and random generators.

        Raises:
            StateError: a forward or backward is running: call it once the exception is caught.
            RankLostError: A rank is lost, so the process group cannot be used.
        """
        abandon_step(_module(self))

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Prefetch these units in this one's forward, instead of the next one in the recorded order.

        Args:
            modules: Units, in the order of their all-gathers.
        """
        unit_of(_module(self)).settings.next_forward = _units_of(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Prefetch these units in this one's backward, instead of the next one in the recorded order.

        Args:
            modules: Units, in the order of their all-gathers.
        """
        unit_of(_module(self)).settings.next_backward = _units_of(modules)

    def _units(self, recurse: bool) -> list[Unit]:
        check_flags(recurse=recurse)
        module = _module(self)
        return units_in(module) if recurse else [unit_of(module)]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See `nn.Module.zero_grad`. It also resets gradients of shards while modules have unsharded parameters.

        Args:
            set_to_none: True to drop gradients; False to fill them with zeros.
        """
        super().zero_grad(set_to_none)  # type: ignore[misc]  # as in `_apply`
        zero_shard_grads(_module(self), set_to_none)

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        """Apply `nn.Module.to` and similar functions to the shards, which then move into the group's buffers again."""
        with changing_shards(unit_of(_module(self)), fn):
            super()._apply(fn, recurse)  # type: ignore[misc]  # the class it is mixed into is an nn.Module
        return _module(self)


def _units_of(modules: Sequence[nn.Module]) -> list[Unit]:
    check_iterable("modules", modules, "a list of units")
    for module in modules:
        check_type("modules", module, nn.Module, "a list of units")
    return [unit_of(module) for module in modules]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Unshard parameters in `module.method_name(...)`, for example `generate`, as in `forward`.

    Modules that are not units are not changed.

    Args:
        module: A module that was sharded.
        method_name: The name of a method that uses parameters of `module`.

    Raises:
        ConfigError: the module has no such method.
    """
    check_type("module", module, nn.Module, "an nn.Module")
    check_type("method_name", method_name, str, "the name of a method")
    if not is_unit(module):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ConfigError(f"{type(module).__name__} has no method {method_name!r} to unshard parameters for.")

    @functools.wraps(method)
    def run_unsharded(*args: Any, **kwargs: Any) -> Any:
        return run_as_forward(module, method, args, kwargs)

    setattr(module, method_name, run_unsharded)


def take_part(module: nn.Module) -> Tensor:
    """Return a zero to add to the loss on a rank that has no inputs for `module` while other ranks have some.

    The module's units are gathered, and backward contributes gradients of zeros, as in a call of the module. So
    gradients are means over all ranks, including ranks without inputs. Call
    `module.set_reduce_scatter_unused_params(True)` first, on all ranks. The module's forward should call inner units
    once, in the order of its submodules, and end with its own operation, such as a norm. If ranks gather in different
    orders, all of them raise an error.

        features = tower(images) if len(images) else take_part(tower)

    Args:
        module: A unit, with or without inner units.

    Returns:
        A 0-dim tensor. It requires a gradient if any parameter of these units does.

    Raises:
        StateError: the module is not a unit, or its unused parameters are not reduced.
    """
    check_type("module", module, nn.Module, "a unit")
    lacking = [unit for unit in units_in(module) if unit.is_trained and not unit.settings.reduces_unused]
    if lacking:
        raise StateError(
            f"take_part({type(module).__name__}): {lacking[0].name} is reduced with its last gradient, which other "
            "ranks may compute at a different time. Call set_reduce_scatter_unused_params(True) on it first, on "
            "every rank."
        )
    return _zero_through(module, torch.zeros((), device=unit_of(module).device))


def _zero_through(module: nn.Module, x: Tensor) -> Tensor:
    def run(x: Tensor) -> Tensor:
        params = [param.unsharded for param in unit.params if param.unsharded.requires_grad]
        x = cast(Any, _Zeros).apply(x, *params) if params else x
        for inner in _units_below(module):
            x = _zero_through(inner, x)
        return x.clone()  # a separate tensor, like the result of a forward after the last inner unit

    unit = unit_of(module)
    return cast(Tensor, run_as_forward(module, run, (x,), {}))


def _units_below(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost units within `module`."""
    for child in module.children():
        if is_unit(child):
            yield child
        else:
            yield from _units_below(child)


class _Zeros(torch.autograd.Function):
    """The identity function of `x`. Its backward returns gradients of zeros for the other arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *params: Tensor) -> Tensor:
        ctx.params = params
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (*grads, *(torch.zeros_like(param) for param in ctx.params))


_classes: dict[type, type] = {}


def _gain_methods(module: nn.Module) -> None:
    """Make `module` an `FSDPModule`, by replacing its class with a subclass that has these methods."""
    cls = type(module)
    if cls not in _classes:
        own = {
            "__doc__": cls.__doc__,
            "__module__": cls.__module__,
            PLAIN_CLASS: cls,
            **checked_methods(cast(Any, cls)),
        }
        _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), own)
    object.__setattr__(module, "__class__", _classes[cls])  # without calling the module's own __setattr__


def _module(mixed: FSDPModule) -> nn.Module:
    return cast(nn.Module, mixed)
