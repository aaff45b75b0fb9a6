"""`FullyShardedDataParallel`: the same engine with the wrapper interface of torch's FSDP1."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from functools import partial
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard._compat import comm_hook_dtypes
from fullshard.comm.mesh import default_mesh
from fullshard.device.current import count_devices, current_device, usual_device_type
from fullshard.engine.hooks import (
    abandon_step,
    changing_shards,
    check_idle,
    refuse_pickle,
    runtime_of,
    without_sync,
    zero_shard_grads,
)
from fullshard.engine.managed import mark_ignored_buffers
from fullshard.engine.registry import clean_fqn, is_unit, process_groups_along, unit_of, units_in
from fullshard.engine.unit import Unit
from fullshard.engine.whole_methods import checked_methods
from fullshard.errors import ConfigError, StateError
from fullshard.fsdp1.precision import MixedPrecision, compute_in_full_precision
from fullshard.optim.clipping import clip_grad_norm_
from fullshard.policy.arguments import check_callable, check_flags, check_iterable, check_type
from fullshard.policy.offload import CPUOffload
from fullshard.policy.options import ShardOptions
from fullshard.policy.precision import MixedPrecisionPolicy
from fullshard.policy.strategy import Placements, ShardingStrategy, resolve_placements
from fullshard.sharding import copy_sharded, shard_unit
from fullshard.state import optim_state
from fullshard.state.state_dict import (
    OptimStateKeyType,
    as_configured,
    get_state_dict_type,
    set_state_dict_type,
    state_dict_type,
)
from fullshard.state.summon import summon_full_params
from fullshard.wrap import AutoWrapPolicy, wrapped_modules

_WRAPPED = "_fsdp_wrapped_module"
_SHARDED = "_sharded_module"
_PRECISION = "_mixed_precision"
_HOOKED = "_has_comm_hook"


class BackwardPrefetch(Enum):
    """The point in backward at which the all-gather of the next unit starts."""

    BACKWARD_PRE = "pre"  # before the backward of the current unit: most overlap, two units are unsharded at once
    BACKWARD_POST = "post"  # after it, when the current unit is freed: less memory


class FullyShardedDataParallel(nn.Module):
    """A wrapper of `module` that shards its parameters over the ranks of a process group.

    Submodules that `auto_wrap_policy` selects are wrapped first. Each wrapped module is a unit. Parameters keep their
    shapes and FQNs. Between steps they are `DTensor`s.

    Args:
        module: The module to shard. Its submodules may be wrapped already.
        process_group: The ranks to shard over. If None, all ranks. A pair (shard group, replicate group) for hybrid
            strategies is not supported: pass `device_mesh`.
        sharding_strategy: A `ShardingStrategy`, its short name or `Placements`. If None, `FULL_SHARD`.
        cpu_offload: `CPUOffload(offload_params=True)` keeps shards, their gradients and the optimizer step on the CPU.
        auto_wrap_policy: Selects the submodules that become separate units; see `fullshard.wrap`.
        backward_prefetch: The point in backward at which the next unit's all-gather starts. If None, backward does not
            prefetch units.
        mixed_precision: The dtypes of compute, of the reduction and of buffers.
        ignored_modules: Modules whose parameters are neither sharded nor synchronized.
        param_init_fn: Initializes one module on the meta device. If None, `reset_parameters()` is called.
        device_id: The device that computes. If None, the device of `device_mesh`, or else the current GPU if there is
            one, or else the CPU.
        sync_module_states: Whether every rank gets the values of rank 0.
        forward_prefetch: Whether the next unit's all-gather starts before this unit's forward.
        limit_all_gathers: Whether to prefetch at most one unit. If False, at most two.
        use_orig_params: Must be True, because parameters are never flattened.
        ignored_states: Parameters or modules that are neither sharded nor synchronized. Replaces `ignored_modules`.
        device_mesh: The mesh to shard over, instead of `process_group`.
        broadcast_buffers, shard_alignment: See `fullshard.fully_shard`. torch's class does not have these arguments.

    Raises:
        ConfigError: An argument, or a combination of arguments, is invalid or not supported.
        StateError: The default process group is not initialized.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        sharding_strategy: ShardingStrategy | str | Placements | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: AutoWrapPolicy | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = True,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
        broadcast_buffers: bool = False,
        shard_alignment: int = 1,
    ) -> None:
        super().__init__()
        _check_module_and_ranks(module, process_group, device_mesh)
        _check_types(cpu_offload, backward_prefetch, mixed_precision, param_init_fn, device_id, device_mesh)
        check_flags(
            use_orig_params=use_orig_params,
            sync_module_states=sync_module_states,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
            broadcast_buffers=broadcast_buffers,
        )
        if not use_orig_params:
            raise ConfigError(
                "use_orig_params=False is not supported: parameters are never flattened and keep their shapes and "
                "FQNs. Leave the argument out."
            )
        skipped, params = _ignored(ignored_modules, ignored_states)
        mark_ignored_buffers(skipped)
        strategy = ShardingStrategy.FULL_SHARD if sharding_strategy is None else sharding_strategy
        resolve_placements(strategy, argument="sharding_strategy")
        device = _device(device_id, device_mesh)
        mesh = device_mesh
        if mesh is None and process_group not in (None, dist.group.WORLD):
            mesh = DeviceMesh.from_group(process_group, device.type)
        elif mesh is None:
            mesh = default_mesh(device.type, replicated=resolve_placements(strategy).replicated)
        precision = mixed_precision or MixedPrecision()
        options: dict[str, Any] = {
            "sharding_strategy": strategy,
            "cpu_offload": cpu_offload,
            "backward_prefetch": backward_prefetch,
            "mixed_precision": mixed_precision,
            "param_init_fn": param_init_fn,
            "device_id": device,
            "sync_module_states": sync_module_states,
            "forward_prefetch": forward_prefetch,
            "limit_all_gathers": limit_all_gathers,
            "ignored_states": params,
            "device_mesh": mesh,
            "broadcast_buffers": broadcast_buffers,
            "shard_alignment": shard_alignment,
        }
        if auto_wrap_policy is not None:
            separate: dict[type[nn.Module], Mapping[str, Any]] = {}
            if mixed_precision is not None:
                separate = {cls: {"mixed_precision": None} for cls in precision._module_classes_to_ignore}
            self._wrap_children(module, auto_wrap_policy, skipped, params, separate, options)
        self._fsdp_wrapped_module = module
        vars(self)[_PRECISION] = precision
        vars(self)[_SHARDED] = module  # `apply_activation_checkpointing` may replace the attribute by a wrapper
        shard_unit(
            (module,),
            ShardOptions(
                placements=resolve_placements(strategy),
                precision=MixedPrecisionPolicy() if mixed_precision is None else mixed_precision.policy(),
                offload=(cpu_offload or CPUOffload()).policy,
                prefetches_forward=forward_prefetch,
                backward_prefetch="" if backward_prefetch is None else backward_prefetch.value,
                prefetch_depth=1 if limit_all_gathers else 2,
                casts_inputs_at_root=mixed_precision is not None and mixed_precision.cast_root_forward_inputs,
                broadcasts_buffers=broadcast_buffers,
                shard_alignment=shard_alignment,
            ),
            mesh=mesh,
            ignored_params=params,
            device=device,
            param_init_fn=param_init_fn,
            materialize=True,
            sync_module_states=sync_module_states,
            buffer_dtype=precision.buffer_dtype,
        )
        self.register_state_dict_post_hook(_convert_state_dict)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_add_wrapper_name)  # type: ignore[no-untyped-call]

    @staticmethod
    def _wrap_children(
        module: nn.Module,
        policy: AutoWrapPolicy,
        skipped: Iterable[nn.Module],
        params: Iterable[nn.Parameter],
        separate: Mapping[type[nn.Module], Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> None:
        wrapped = [child for child in module.modules() if is_unit(child) or isinstance(child, FullyShardedDataParallel)]
        chosen = wrapped_modules(
            module, policy, ignored_modules=[*skipped, *wrapped], ignored_params=params, separate=separate
        )
        for child, overrides in chosen.items():
            if isinstance(child, tuple(separate)):
                compute_in_full_precision(child)
            parents = [parent._modules for parent in module.modules() if child in parent._modules.values()]
            wrapper = FullyShardedDataParallel(child, **{**options, **overrides})
            for children in parents:
                children.update({name: wrapper for name, candidate in children.items() if candidate is child})

    # -- arguments as attributes --------------------------------------------------------------------------------------

    @property
    def sharding_strategy(self) -> ShardingStrategy | Placements:
        """The strategy, or the placements if no strategy has the same placements."""
        placements = self._unit.options.placements
        return next((each for each in ShardingStrategy if each.placements == placements), placements)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group of the shard axis: all ranks if the mesh has one axis."""
        return self._unit.axes.shard_group

    @property
    def rank(self) -> int:
        """The rank of this process in `process_group`."""
        return dist.get_rank(self.process_group)

    @property
    def world_size(self) -> int:
        """The number of ranks of `process_group`."""
        return dist.get_world_size(self.process_group)

    @property
    def mixed_precision(self) -> MixedPrecision:
        """The precision policy, with None for dtypes that are not changed."""
        return cast(MixedPrecision, vars(self)[_PRECISION])

    @property
    def cpu_offload(self) -> CPUOffload:
        """The CPU offload setting of parameters."""
        return CPUOffload(self._unit.options.offload == CPUOffload(True).policy)

    @property
    def compute_device(self) -> torch.device:
        """The device that computes."""
        return self._unit.device

    # -- methods of nn.Module -----------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._fsdp_wrapped_module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the wrapped module."""
        return self._fsdp_wrapped_module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return the wrapper's own attribute, or the wrapped module's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == _WRAPPED:
                raise
            module = self._fsdp_wrapped_module
            checked = checked_methods(cast(Any, type(module))).get(name)
            return getattr(module, name) if checked is None else partial(checked, module)

    def __getitem__(self, key: Any) -> Any:
        """Return the item of the wrapped module at `key`, if it is a sequence."""
        return cast(Any, self._fsdp_wrapped_module)[key]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters, with the FQNs of the user's own module."""
        for name, param in super().named_parameters(*args, **kwargs):
            yield clean_fqn(name), param

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers, with the FQNs of the user's own module."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield clean_fqn(name), buffer

    def _fqn_modifiers(self) -> dict[str, str]:
        """Return the name that FQNs do not contain, for `torch.distributed.checkpoint.state_dict`."""
        return {"": _WRAPPED}

    def __deepcopy__(self, memo: dict[Any, Any]) -> nn.Module:
        """Return a copy with the same sharding and the same values."""
        return copy_sharded(self, memo)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise an error. Save its `state_dict()` instead.

        Raises:
            StateError: Always.
        """
        refuse_pickle(self, protocol)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, including those of shards while modules have unsharded parameters."""
        super().zero_grad(set_to_none)
        zero_shard_grads(self, set_to_none)

    def _apply(self, fn: Any, recurse: bool = True) -> FullyShardedDataParallel:
        with changing_shards(self._unit, fn):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Call `fn` on every submodule with all parameters unsharded. Changes to parameters are kept."""
        with summon_full_params(self):
            return super().apply(fn)

    # -- training -----------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager that makes backward accumulate unsharded gradients without communication."""
        with without_sync(units_in(self)):
            yield

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Reduce gradients in the dtype of one of torch's hooks. Call it before the first backward.

        This affects all units of this module. The hook itself is never called, because gradients are not flattened.

        Args:
            state: The hook's `DefaultState` or `LowPrecisionState`. Its process group must have this wrapper's ranks.
            hook: `allreduce_hook`, `reduce_scatter_hook`, `fp16_compress_hook` or `bf16_compress_hook` of
                `torch.distributed.algorithms._comm_hooks`. The first two change nothing.

        Raises:
            ConfigError: The hook is not supported, or `state` does not match it.
            StateError: A hook is already registered, or there are gradients.
        """
        wrappers, units = self.fsdp_modules(self), units_in(self)
        dtype = _dtype_of_hook(hook)
        _check_hook_state(state, self.process_group, units)
        if any(vars(wrapper).get(_HOOKED) for wrapper in wrappers):
            raise StateError("register_comm_hook: a hook is already registered. Register one hook per model.")
        for unit in units:
            check_idle(unit, "to be given a hook")
            if unit.gradients.are_waiting:
                raise StateError(
                    f"register_comm_hook: {unit.name or 'the root'} already has gradients. Call it before the first "
                    "backward, or after zero_grad()."
                )
        if dtype is not None:
            for unit in units:
                unit.shards.reduce_in(dtype)
        for wrapper in wrappers:
            vars(wrapper)[_HOOKED] = True

    def abandon_step(self) -> None:
        """Drop all results of the current step, as `FSDPModule.abandon_step` does.

        Call it on every rank to continue after an exception in forward or backward. Parameters may be unsharded until
        then. Writes to unsharded parameters are lost.

        Raises:
            StateError: A forward or backward is running.
            RankLostError: A rank is lost, so the process group cannot be used.
        """
        abandon_step(self._unit.module)

    def clip_grad_norm_(self, max_norm: float, norm_type: float | str = 2.0) -> Tensor:
        """Clip the gradients of all parameters, and return their previous norm. See `fullshard.clip_grad_norm_`.

        Args:
            max_norm: The maximum norm.
            norm_type: The p of the p-norm.
        """
        return clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def check_is_root(self) -> bool:
        """Return True if no other wrapped module contains this one. This is known after the first forward."""
        return self._unit in runtime_of(self._unit.module).units[:1]

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Return the wrapped modules in `module`, including itself; if `root_only`, only the outermost ones.

        Args:
            module: The module to search.
            root_only: Whether to leave out modules within other wrapped modules.
        """
        found = [child for child in module.modules() if isinstance(child, FullyShardedDataParallel)]
        if not root_only:
            return found
        inner = {id(below) for outer in found for below in outer.modules() if below is not outer}
        return [child for child in found if id(child) not in inner]

    @staticmethod
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> AbstractContextManager[None]:
        """Context manager that unshards parameters; see `fullshard.summon_full_params`.

        Args:
            module: A wrapped module, or a module with wrapped modules in it.
            recurse: Whether to include wrapped modules below `module`.
            writeback: Whether to keep changes to the parameters.
            rank0_only: Whether only the first rank gets full parameters. Cannot be combined with `writeback`.
            offload_to_cpu: Whether full parameters are moved to the CPU.
            with_grads: Whether to unshard gradients as well.
        """
        return summon_full_params(
            module,
            recurse=recurse,
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
        )

    @property
    def _unit(self) -> Unit:
        return unit_of(vars(self)[_SHARDED])

    # -- state dicts --------------------------------------------------------------------------------------------------

    set_state_dict_type = staticmethod(set_state_dict_type)
    get_state_dict_type = staticmethod(get_state_dict_type)
    state_dict_type = staticmethod(state_dict_type)

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return the optimizer's state by FQN, in the form set for `model` by `set_state_dict_type`.

        Args:
            model: The model that contains wrapped modules.
            optim: The optimizer of the parameters of `model`.
            optim_state_dict: The state dict to convert. If None, that of `optim`.
            group: The process group over which the model is sharded; None for this group.
        """
        _check_group(group, model)
        return optim_state.optim_state_dict(model, optim, optim_state_dict)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return a state dict for `optim.load_state_dict`, from one of `optim_state_dict`. Load it if `load_directly`.

        Args:
            model: The model that contains wrapped modules.
            optim: The optimizer of the parameters of `model`.
            optim_state_dict: A state dict as returned by `optim_state_dict`. Ranks without it pass None.
            is_named_optimizer: Must be False.
            load_directly: Whether to load the result into `optim`.
            group: The process group over which the model is sharded; None for this group.

        Raises:
            ConfigError: `is_named_optimizer` is set, or the state dict is not of the optimizer's parameters.
        """
        _check_group(group, model)
        if is_named_optimizer:
            raise ConfigError(
                "optim_state_dict_to_load(is_named_optimizer=True): load_state_dict of torch.optim expects numbered "
                "parameters. Leave the argument out. For an optimizer with named parameters, pass optim_state_dict "
                "unchanged."
            )
        return optim_state.optim_state_dict_to_load(model, optim, optim_state_dict, load_directly)

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: Iterable[Any] | None = None,
        rank0_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return the full optimizer state by FQN, on the CPU; only on the first rank if `rank0_only`.

        Args:
            model: The model that contains wrapped modules.
            optim: The optimizer of the parameters of `model`.
            optim_input: Ignored.
            rank0_only: Whether only the first rank gets the state.
            group: The process group over which the model is sharded; None for this group.
        """
        _check_group(group, model)
        return optim_state.full_optim_state_dict(model, optim, rank0_only=rank0_only)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
    ) -> dict[str, Any]:
        """Return the optimizer's state by FQN, sharded.

        Args:
            model: The model that contains wrapped modules.
            optim: The optimizer of the parameters of `model`.
            group: The process group over which the model is sharded; None for this group.
        """
        _check_group(group, model)
        return optim_state.sharded_optim_state_dict(model, optim)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: Iterable[Any] | None = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Return a state dict for `optim.load_state_dict`, from a full one that every rank has.

        This is torch's older method. Without an optimizer, the state dict is for one with the saved groups.

        Args:
            full_optim_state_dict: A state dict as returned by `full_optim_state_dict`.
            model: The model that contains wrapped modules.
            optim_input: Instead of `optim`, the argument that was passed to the optimizer.
            optim: The optimizer that will load the result; None if there is none yet.
        """
        optim = optim or _optimizer_of(optim_input)
        return optim_state.optim_state_dict_to_load(model, optim, full_optim_state_dict, from_first_rank=False)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: Iterable[Any] | None = None,
        optim: torch.optim.Optimizer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return a state dict for `optim.load_state_dict`, from a full one that only the first rank has.

        See `shard_full_optim_state_dict`.

        Args:
            full_optim_state_dict: A state dict as returned by `full_optim_state_dict`. All ranks except the first one
                pass None.
            model: The model that contains wrapped modules.
            optim_input: Instead of `optim`, the argument that was passed to the optimizer.
            optim: The optimizer that will load the result; None if there is none yet.
            group: The process group over which the model is sharded; None for this group.
        """
        _check_group(group, model)
        optim = optim or _optimizer_of(optim_input)
        return optim_state.optim_state_dict_to_load(model, optim, full_optim_state_dict, from_first_rank=True)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """Return a state dict for `optim.load_state_dict`, from a sharded one.

        Args:
            sharded_optim_state_dict: A state dict as returned by `sharded_optim_state_dict`.
            model: The model that contains wrapped modules.
            optim: The optimizer of the parameters of `model`.
        """
        return optim_state.optim_state_dict_to_load(model, optim, sharded_optim_state_dict, from_first_rank=False)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Iterable[Any] | None = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Return `optim_state_dict` with FQNs instead of parameter numbers as keys, or vice versa.

        Args:
            optim_state_dict: The result of `optim.state_dict()` or of `optim_state_dict()`.
            optim_state_key_type: The kind of keys to return.
            model: The model with the parameters.
            optim_input: Instead of `optim`, the argument that was passed to the optimizer.
            optim: The optimizer that numbers the parameters. By default they have the order of `model.parameters()`.

        Raises:
            ConfigError: The state dict has different parameters.
        """
        optim = optim or _optimizer_of(optim_input) or _optimizer_of(model.parameters())
        assert optim is not None
        return optim_state.rekeyed(optim_state_dict, optim_state_key_type, model, optim)


def _check_group(group: dist.ProcessGroup | None, model: nn.Module) -> None:
    """Raise `ConfigError` if the model is not sharded over `group`: states are gathered over the model's groups."""
    if group is not None:
        check_type("group", group, dist.ProcessGroup, "a process group, or None")
    check_type("model", model, nn.Module, "the sharded nn.Module")
    known = [*process_groups_along(units_in(model)), dist.group.WORLD]
    if group is not None and group not in known:
        raise ConfigError(
            f"group of {dist.get_world_size(group)} ranks: the model is not sharded over this group, so the optimizer "
            "state cannot be exchanged in it. Leave group out."
        )


def _optimizer_of(optim_input: Iterable[Any] | None) -> torch.optim.Optimizer | None:
    """Return an optimizer of the given parameters or groups, whose step does nothing."""
    return None if optim_input is None else torch.optim.Optimizer(list(optim_input), {})


def _convert_state_dict(
    module: nn.Module, state: MutableMapping[str, Any], prefix: str, local_metadata: Mapping[str, Any]
) -> None:
    """Remove the wrapper's name from the keys, and convert the values to the requested form."""
    inner = f"{prefix}{_WRAPPED}."
    for key in [key for key in state if key.startswith(inner)]:
        state[prefix + key.removeprefix(inner)] = state.pop(key)
    as_configured(module, state, prefix, get_state_dict_type(module))


def _add_wrapper_name(module: nn.Module, state: MutableMapping[str, Any], prefix: str, *_: Any) -> None:
    """Add the wrapper's name to the keys, as `nn.Module` expects them."""
    inner = f"{prefix}{_WRAPPED}."
    for key in [key for key in state if key.startswith(prefix) and not key.startswith(inner)]:
        state[inner + key.removeprefix(prefix)] = state.pop(key)


def _check_module_and_ranks(module: object, process_group: object, device_mesh: DeviceMesh | None) -> None:
    check_type("module", module, nn.Module, "the nn.Module to shard")
    if process_group is not None and device_mesh is not None:
        raise ConfigError("process_group and device_mesh both define the ranks to shard over. Pass one of them.")
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise ConfigError(
            f"process_group={process_group!r}: expected one process group. For a hybrid strategy, pass "
            'device_mesh=init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", "shard")).'
        )


def _dtype_of_hook(hook: Callable[..., Any]) -> torch.dtype | None:
    """Return the dtype in which `hook` sums gradients; None for the gradients' own dtype."""
    known = comm_hook_dtypes()
    found = [dtype for each, dtype in known.items() if each is hook]
    if not found:
        names = ", ".join(each.__name__ for each in known)
        raise ConfigError(
            f"register_comm_hook: {getattr(hook, '__name__', repr(hook))} is not supported: torch's hooks expect "
            f"gradients in one flat tensor, which does not exist here. Pass one of {names}; or set "
            "MixedPrecision(reduce_dtype=..., reduce_wire=...) for fewer bits; or use fullshard.fully_shard, whose "
            "set_all_reduce_hook calls a function with the reduced gradients."
        )
    return found[0]


def _check_hook_state(state: Any, group: dist.ProcessGroup, units: Iterable[Unit]) -> None:
    """Raise `ConfigError` if the state of a hook has different ranks, or a different dtype for gradients."""
    ranks = getattr(state, "process_group", None)
    if not isinstance(ranks, dist.ProcessGroup):
        raise ConfigError(
            f"register_comm_hook(state={state!r}): the state of a hook must have a process group. Pass "
            "DefaultState(process_group) or LowPrecisionState(process_group) of "
            "torch.distributed.algorithms._comm_hooks."
        )
    if dist.get_process_group_ranks(ranks) != dist.get_process_group_ranks(group):
        raise ConfigError(
            f"register_comm_hook: the state's process group has {ranks.size()} ranks, but the parameters are sharded "
            f"over a different group of {group.size()} ranks. Pass the wrapper's process_group."
        )
    given = getattr(state, "parameter_type", None)
    trained = [each for unit in units for each in unit.param_groups if each.is_trained]
    stored = {each.plan.contract.delivered for each in trained}
    if given is not None and stored - {given}:
        raise ConfigError(
            f"register_comm_hook: parameter_type={given} in the state, but gradients have the dtypes of their "
            f"parameters: {', '.join(sorted(map(str, stored)))}. Pass LowPrecisionState(process_group, dtype) with it."
        )


def _check_types(
    cpu_offload: object,
    backward_prefetch: object,
    mixed_precision: MixedPrecision | None,
    param_init_fn: object,
    device_id: object,
    device_mesh: object,
) -> None:
    if cpu_offload is not None:
        check_type("cpu_offload", cpu_offload, CPUOffload, "CPUOffload(offload_params=True), or None")
    if backward_prefetch is not None:
        check_type("backward_prefetch", backward_prefetch, BackwardPrefetch, "a BackwardPrefetch, or None")
    if mixed_precision is not None:
        check_type("mixed_precision", mixed_precision, MixedPrecision, "a fullshard.MixedPrecision, or None")
        if mixed_precision.param_dtype is not None and os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1":
            raise ConfigError(
                f"FSDP_USE_FULL_PREC_IN_EVAL=1 with mixed_precision={mixed_precision}: evaluation computes in "
                "param_dtype, like training. Unset the variable. To evaluate in full precision, load the weights "
                "into a model without mixed_precision, or evaluate within summon_full_params."
            )
    if param_init_fn is not None:
        check_callable("param_init_fn", param_init_fn, "a function of one module, or None")
    if device_id is not None and (isinstance(device_id, bool) or not isinstance(device_id, int | str | torch.device)):
        raise ConfigError(f"device_id={device_id!r} is a {type(device_id).__name__}. Pass a torch.device or a number.")
    if device_mesh is not None:
        check_type("device_mesh", device_mesh, DeviceMesh, "what init_device_mesh returns, or None")


def _ignored(
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
) -> tuple[list[nn.Module], list[nn.Parameter]]:
    """Return the modules and the parameters to ignore, including the parameters of these modules."""
    if ignored_modules is not None and ignored_states is not None:
        raise ConfigError("ignored_modules and ignored_states are both given. Pass one of them.")
    for name, items in (("ignored_modules", ignored_modules), ("ignored_states", ignored_states)):
        if items is not None:
            check_iterable(name, items, "a list of modules" if name == "ignored_modules" else "a list of parameters")
    given: list[Any] = [*(ignored_modules or ()), *(ignored_states or ())]
    modules = [item for item in given if isinstance(item, nn.Module)]
    params = [item for item in given if isinstance(item, nn.Parameter)]
    odd = [type(item).__name__ for item in given if not isinstance(item, nn.Module | nn.Parameter)]
    if odd:
        raise ConfigError(f"ignored_modules / ignored_states contain {odd[0]}: expected modules or parameters.")
    return modules, params + [param for module in modules for param in module.parameters()]


def _device(device_id: int | torch.device | None, mesh: DeviceMesh | None) -> torch.device:
    """Return the requested device, or else the device of the mesh."""
    if device_id is None:
        return current_device(usual_device_type() if mesh is None else mesh.device_type)
    found = torch.accelerator.current_accelerator(check_available=True)
    kind = "cuda" if found is None else found.type
    try:
        device = torch.device(kind, device_id) if isinstance(device_id, int) else torch.device(device_id)
    except RuntimeError as error:
        raise ConfigError(f"device_id={device_id!r} is not a device. Pass a torch.device or its index.") from error
    if device.type == kind and (device.index or 0) >= count_devices():
        raise ConfigError(
            f'device_id={device_id!r}: no such GPU, torch sees {count_devices()} here. Pass torch.device("cpu"), or '
            "leave it out to use the current GPU, or the CPU if there is no GPU."
        )
    if mesh is not None and mesh.device_type != device.type:
        raise ConfigError(
            f"device_id={device_id!r} does not match the device type of device_mesh ({mesh.device_type}). Create the "
            f"mesh with init_device_mesh({device.type!r}, ...), or leave device_id out."
        )
    return device if device.type == "cpu" or device.index is not None else current_device(device.type)
