"""Lightning's Trainer and Fabric with this engine: `Trainer(strategy=FullShardStrategy(), ...)`.

Both strategies are Lightning's own strategies for DDP, except that the model is sharded in place instead of being
wrapped by DDP. Undocumented parts of Lightning are marked "private" at the end of the line. Tests check that they exist
in the installed version.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from fullshard.checkpoint import load, save
from fullshard.checkpoint.contents import model_state
from fullshard.engine.hooks import run_as_forward
from fullshard.engine.registry import is_unit
from fullshard.errors import ConfigError
from fullshard.fsdp_module import FSDPModule, Strategy
from fullshard.integrations.joined_optimizers import joined
from fullshard.integrations.placing import layers_and_children, repeated_layers, shard_model
from fullshard.integrations.reporting import numbers_of
from fullshard.optim.before_step import point_to_shards
from fullshard.optim.clipping import ShardedGradScaler, clip_grad_norm_
from fullshard.policy.offload import OffloadPolicy
from fullshard.policy.precision import MixedPrecisionPolicy
from fullshard.report.recording import RunReport, report
from fullshard.state.optim_state import optim_state_dict_to_load, params_by_fqn, sharded_optim_state_dict
from fullshard.versions import require
from fullshard.wrap import AutoWrapPolicy

require("lightning", "2.6", extra="lightning")

from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision  # noqa: E402  # after the check
from lightning.fabric.plugins import TorchCheckpointIO  # noqa: E402
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy  # noqa: E402
from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402

_AVERAGES = "fullshard_averages"  # the key of the names of callbacks, and the folder with their averages

__all__ = ["FabricFullShardStrategy", "FullShardStrategy", "ReportCallback"]


@dataclass(frozen=True)
class _LightningSharding:
    """The sharding options of both strategies."""

    strategy: Strategy
    auto_wrap_policy: AutoWrapPolicy | None
    mp_policy: MixedPrecisionPolicy | None
    offload_policy: OffloadPolicy | None

    def apply(self, model: nn.Module, device: torch.device, policy: AutoWrapPolicy) -> None:
        """Shard `model` in place, with the wrap policy `policy` unless the user has set one."""
        shard_model(
            model,
            device=device,
            auto_wrap_policy=self.auto_wrap_policy or policy,
            strategy=self.strategy,
            mp_policy=self.mp_policy,
            offload_policy=self.offload_policy,
        )


class FullShardStrategy(DDPStrategy):
    """The strategy of a `lightning.Trainer` whose module is sharded in place.

        trainer = Trainer(strategy=FullShardStrategy(), devices=2, ...)

    Modules that `configure_model` creates on the meta device are initialized unit by unit, by `reset_parameters`.
    Checkpoints are folders in the format of `fullshard.checkpoint`. Files that other strategies have saved can also be
    loaded.

    Args:
        strategy: See `fullshard.fully_shard`.
        auto_wrap_policy: Selects the units. If None, the layers of the LightningModule's child modules, and these
            modules themselves. Units that `configure_model` has created are kept.
        mp_policy: The dtypes of units, in addition to the precision plugin. See `fullshard.fully_shard`.
        offload_policy: The placement of shards. See `fullshard.fully_shard`.
        process_group_backend: If None, NCCL for GPUs, otherwise gloo.
        timeout: The timeout of collectives.
        options: Options of Lightning's `DDPStrategy` that do not concern the DDP wrapper: accelerator,
            parallel_devices, cluster_environment, precision_plugin, start_method.

    Raises:
        ConfigError: An option is not supported.
    """

    def __init__(
        self,
        strategy: Strategy = "zero3",
        *,
        auto_wrap_policy: AutoWrapPolicy | None = None,
        mp_policy: MixedPrecisionPolicy | None = None,
        offload_policy: OffloadPolicy | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**_known(options, process_group_backend, timeout, "precision_plugin"))
        self._sharding = _LightningSharding(strategy, auto_wrap_policy, mp_policy, offload_policy)
        self._given: dict[str, Any] = {}  # the last state dict returned, to detect changes by hooks
        self._averaging: list[Callback] = []  # callbacks that average weights

    # -- setting up ---------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Shard the module, and create its optimizers for the shards."""
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        if self._layer_sync is not None:  # private
            raise ConfigError(
                "sync_batchnorm=True is not supported: call nn.SyncBatchNorm.convert_sync_batchnorm in configure_model."
            )
        self.model = self.precision_plugin.convert_module(self.model)
        self._shard(self.model)
        self._averaging = [
            callback
            for callback in trainer.callbacks  # type: ignore[attr-defined]
            if _average_shards(callback, self.model)
        ]
        _share_overflows(self.precision_plugin)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _shard(self, model: nn.Module) -> None:
        if is_unit(model):  # an earlier call of the trainer has sharded it, and moved it to the CPU at the end
            model.to(self.root_device)
        self._sharding.apply(model, self.root_device, layers_and_children(model))

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Context manager for creating modules, on the meta device if `empty_init`."""
        with torch.device("meta") if empty_init else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    def model_to_device(self) -> None:
        """Do nothing: units are moved to their device when they are created."""

    # -- steps --------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `training_step` with the root unit's parameters unsharded, and return its result.

        With manual optimization, they are unsharded in the module's forward only, because backward runs within the
        step.
        """
        module = self._module
        with self.precision_plugin.train_step_context():
            if not module.automatic_optimization:
                return module.training_step(*args, **kwargs)
            return run_as_forward(module, module.training_step, args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the module's `validation_step`."""
        with self.precision_plugin.val_step_context():
            return run_as_forward(self._module, self._module.validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the module's `test_step`."""
        with self.precision_plugin.test_step_context():
            return run_as_forward(self._module, self._module.test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the module's `predict_step`."""
        with self.precision_plugin.predict_step_context():
            return run_as_forward(self._module, self._module.predict_step, args, kwargs)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Context manager within which backward accumulates unsharded gradients without communication."""
        with cast(FSDPModule, self._module).no_sync():
            yield

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: shards are loaded into shards."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False for folders, because `load_checkpoint` has loaded optimizers already."""
        return self._from_file

    _from_file = False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's sharded state."""
        self._given = model_state(self._module)
        return dict(self._given)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's sharded state by FQN."""
        return sharded_optim_state_dict(self._module, getattr(optimizer, "optimizer", optimizer))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint to the folder `filepath`, completely or not at all. Each rank writes its shards.

        Raises:
            CheckpointError: A rank could not write, or a value could not be read back without executing code.
            ConfigError: An option, or a change by a hook, is not supported.
        """
        if storage_options is not None or type(self.checkpoint_io) is not TorchCheckpointIO:
            raise ConfigError(
                "storage_options and CheckpointIO plugins are not supported: checkpoints are folders of shards "
                "written by fullshard.checkpoint."
            )
        averages = self._take_averages(checkpoint)
        given = checkpoint.get("state_dict", {})
        if given.keys() != self._given.keys() or any(given[name] is not item for name, item in self._given.items()):
            raise ConfigError(
                "on_save_checkpoint changed checkpoint['state_dict'], but a checkpoint stores the unchanged state of "
                "the module. Save changed values in another file."
            )
        self._given = {}
        remaining = {name: item for name, item in checkpoint.items() if name not in ("state_dict", "optimizer_states")}
        remaining[_AVERAGES] = list(averages)
        path = Path(self.broadcast(filepath))
        for i, average in enumerate(averages.values()):  # before the model; previous averages stay until the next save
            save(path / _AVERAGES / str(i), model=average, step=checkpoint["global_step"], keep=2)
        save(
            path,
            model=self._module,
            optimizer=joined(self.optimizers) if "optimizer_states" in checkpoint else None,
            step=checkpoint["global_step"],
            extra=remaining,
            keep=1,
        )

    def _take_averages(self, checkpoint: dict[str, Any]) -> dict[str, nn.Module]:
        """Remove averaged weights from `checkpoint`, and return the averaged models by the key of their callback."""
        averages = {}
        for callback in self._averaging:
            average, states = _average_of(callback), checkpoint.get("callbacks", {})
            if average is None or callback.state_key not in states:
                continue  # not within a fit, or only weights are saved
            averages[callback.state_key] = average
            if "average_model_state" in (state := states[callback.state_key]):
                states[callback.state_key] = {**state, "average_model_state": None}
            else:  # `WeightAveraging` has exchanged the state dicts
                checkpoint["state_dict"] = checkpoint.pop("current_model_state", checkpoint["state_dict"])
        return averages

    def _load_averages(self, path: Path, checkpoint: dict[str, Any], step: int) -> None:
        """Load the averages of the checkpoint in `path` into the models of callbacks, and return them to the callbacks.

        Without the callback, or in a run that does not train, averages of `WeightAveraging` replace the weights of the
        module.
        """
        averaging = {callback.state_key: callback for callback in self._averaging}
        for i, key in enumerate(checkpoint.pop(_AVERAGES, ())):
            average = _average_of(averaging.get(key))
            replaces = "average_model_state" not in checkpoint.get("callbacks", {}).get(key, {})
            if average is None and not replaces:
                continue
            model = self._module if average is None else average
            load(path / _AVERAGES / str(i) / f"step-{step:09d}", model=model, random_states=False)
            if average is not None and replaces:
                checkpoint["current_model_state"] = model_state(self._module)
                checkpoint["state_dict"] = model_state(average)
            elif average is not None:
                checkpoint["callbacks"][key]["average_model_state"] = model_state(average)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint folder into module and optimizers. For a file, return its content, which is loaded later.

        The number of ranks and the strategy may differ. With the same number of ranks, random generators are restored,
        too.

        Raises:
            CheckpointError: It is damaged, or does not match.
        """
        path = Path(self.broadcast(checkpoint_path))
        self._from_file = path.is_file()
        if self._from_file:
            return self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        fits = bool(self.optimizers)
        restored = load(path, model=self._module, optimizer=joined(self.optimizers), random_states=fits)
        checkpoint = {**(restored.extra or {}), "state_dict": model_state(self._module)}
        self._load_averages(path, checkpoint, restored.step or 0)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load full weights from a file; for a folder, do nothing."""
        if self._from_file:
            self._module.load_state_dict(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load full states from a file. Each rank loads its shards."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            fqns = list(params_by_fqn(self._module, optimizer))
            named = {
                "state": {fqns[number]: values for number, values in state["state"].items()},
                "param_groups": [
                    {**item, "params": [fqns[i] for i in item["params"]]} for item in state["param_groups"]
                ],
            }
            optim_state_dict_to_load(self._module, optimizer, named, load_directly=True, from_first_rank=False)

    def teardown(self) -> None:
        """Clean up like other strategies. The module stays sharded."""
        self._from_file = False
        super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Do nothing: this strategy is passed as an object, not by name."""


class ReportCallback(Callback):
    """Writes the page of a training run of Lightning's Trainer, with the values that it logs: see `fullshard.report`.

    Args:
        path: The folder. If None, the Trainer's `default_root_dir`.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._path = path
        self.report: RunReport | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start recording."""
        self.report = report(
            pl_module, Path(self._path or trainer.default_root_dir), first_step=trainer.global_step + 1
        )

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Add logged values to the page."""
        if self.report is not None:
            self.report.log(step=max(1, trainer.global_step), **numbers_of(trainer.logged_metrics))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the page."""
        if self.report is not None:
            self.report.close()


class FabricFullShardStrategy(FabricDDPStrategy):
    """The strategy of a `lightning.Fabric` that shards modules in place.

        fabric = Fabric(strategy=FabricFullShardStrategy(), devices=2)
        model, optimizer = fabric.setup(model, optimizer)

    Modules that are created on the meta device, for example in `fabric.init_module(empty_init=True)`, are initialized
    unit by unit, by `reset_parameters`. `fabric.save` and `fabric.load` write and read folders in the format of
    `fullshard.checkpoint`. The state must have one module.

    Args:
        strategy: See `fullshard.fully_shard`.
        auto_wrap_policy: Selects the units. If None, the module's layers.
        mp_policy: The dtypes of units, in addition to the precision plugin. See `fullshard.fully_shard`.
        offload_policy: The placement of shards. See `fullshard.fully_shard`.
        process_group_backend: If None, NCCL for GPUs, otherwise gloo.
        timeout: The timeout of collectives.
        options: Options of Fabric's `DDPStrategy` that do not concern the DDP wrapper: accelerator, parallel_devices,
            cluster_environment, precision, start_method.

    Raises:
        ConfigError: An option is not supported.
    """

    def __init__(
        self,
        strategy: Strategy = "zero3",
        *,
        auto_wrap_policy: AutoWrapPolicy | None = None,
        mp_policy: MixedPrecisionPolicy | None = None,
        offload_policy: OffloadPolicy | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**_known(options, process_group_backend, timeout, "precision"))
        self._sharding = _LightningSharding(strategy, auto_wrap_policy, mp_policy, offload_policy)
        self._backward_sync_control = cast(Any, _NoSync())  # private: for fabric.no_backward_sync

    def setup_module(self, module: nn.Module) -> Any:
        """Shard `module` in place, and return a module that calls it."""
        _share_overflows(self.precision)
        self._sharding.apply(module, self.root_device, repeated_layers(module))
        return _Caller(module)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Make `optimizer` update the shards, even if it was created before sharding, and return it."""
        point_to_shards(optimizer)
        return optimizer

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: units are moved to their device when they are created."""

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Return a context for creating modules, on the meta device if `empty_init`."""
        stack = ExitStack()
        if empty_init:
            stack.enter_context(torch.device("meta"))
        stack.enter_context(self.precision.module_init_context())
        return stack

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip all gradients and return their norm: see `fullshard.clip_grad_norm_`."""
        self.precision.unscale_gradients(optimizer)
        params = cast(list[nn.Parameter], self.precision.main_params(optimizer))
        return clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write `state` to the folder `path`, completely or not at all. Each rank writes its shards.

        Raises:
            CheckpointError: A rank could not write, or a value could not be read back without executing code.
            ConfigError: `state` does not contain exactly one module, or an option is not supported.
        """
        if storage_options is not None or filter is not None:
            raise ConfigError(
                "fabric.save: storage_options and filter are not supported, because the whole state is saved."
            )
        parts = _Parts.of(state)
        remaining = {name: item.state_dict() if _is_stateful(item) else item for name, item in parts.remaining.items()}
        save(
            Path(self.broadcast(path)),
            model=parts.module,
            optimizer=joined(parts.optimizers),
            step=0,
            extra=remaining,
            keep=1,
        )

    def load_checkpoint(
        self,
        path: str | Path,
        state: nn.Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load the folder `path` into the objects in `state`, and return the remaining saved values.

        Raises:
            CheckpointError: It is damaged, or does not match.
            ConfigError: `state` does not contain exactly one module, or an option is not supported.
        """
        if not isinstance(state, dict):
            raise ConfigError('fabric.load(path, state): pass the same keys that were saved, such as {"model": model}.')
        parts = _Parts.of(state)
        restored = load(Path(self.broadcast(path)), model=parts.module, optimizer=joined(parts.optimizers))
        remaining = dict(restored.extra or {})
        absent = [name for name in parts.remaining if name not in remaining]
        if absent and strict:
            raise ConfigError(
                f"fabric.load: {', '.join(absent)} are not in {path}, which has {', '.join(remaining) or 'nothing'} "
                "in addition to module and optimizers. Leave them out of the state, or pass strict=False."
            )
        for name, item in parts.remaining.items():
            if name in absent:
                continue
            if _is_stateful(item):
                item.load_state_dict(remaining.pop(name))
            else:
                state[name] = remaining.pop(name)
        return remaining

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Do nothing: this strategy is passed as an object, not by name."""


def _average_shards(callback: Callback, model: nn.Module) -> bool:
    """Make `callback` average the shards of `model` if it averages weights, because it has copied the unsharded module.

    Lightning's `StochasticWeightAveraging` and `WeightAveraging` keep the average in a private attribute. Return True
    for these callbacks.
    """
    average = getattr(callback, "_average_model", None)
    if isinstance(average, AveragedModel):
        average.module = copy.deepcopy(model)
    elif isinstance(average, nn.Module):
        callback._average_model = copy.deepcopy(model)  # type: ignore[attr-defined]
    return isinstance(average, nn.Module)


def _average_of(callback: Callback | None) -> nn.Module | None:
    """Return the module with the averages of `callback`; None if it has none now."""
    average = getattr(callback, "_average_model", None)
    return average.module if isinstance(average, AveragedModel) else average


class _Caller(nn.Module):
    """Calls `module`, as a DDP wrapper does.

    Fabric calls step methods, and methods passed to `mark_forward_method`, through this forward and with its precision
    only if its module is not the user's module. So with this wrapper, parameters are unsharded in these methods.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def _called(module: nn.Module) -> nn.Module:
    """Return the sharded module, which `module` may wrap."""
    return module.module if isinstance(module, _Caller) else module


class _NoSync:
    """Fabric's interface for backward without communication."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Return a context within which backward accumulates unsharded gradients without communication, if
        `enabled`.
        """
        return cast(FSDPModule, _called(module)).no_sync() if enabled else nullcontext()


@dataclass(frozen=True)
class _Parts:
    """The parts of a state that Fabric saves: a module, its optimizers, and other values."""

    module: nn.Module
    optimizers: Sequence[Optimizer]
    remaining: dict[str, Any]

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> _Parts:
        modules = [item for item in state.values() if isinstance(item, nn.Module)]
        if len(modules) != 1:
            raise ConfigError(
                f"the state has {len(modules)} modules ({', '.join(state)}), but a checkpoint holds one. Pass one "
                "module. Put several modules into an nn.ModuleDict."
            )
        optimizers = [item for item in state.values() if isinstance(item, Optimizer)]
        known = {id(item) for item in (*modules, *optimizers)}
        remaining = {name: item for name, item in state.items() if id(item) not in known}
        return cls(_called(modules[0]), optimizers, remaining)


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _known(options: dict[str, Any], backend: str | None, timeout: timedelta | None, precision: str) -> dict[str, Any]:
    """Return `options` for Lightning's strategy after checking that they are supported."""
    known = {"accelerator", "parallel_devices", "cluster_environment", "start_method", precision}
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ConfigError(
            f"FullShardStrategy({', '.join(unknown)}): unknown options. Options of DistributedDataParallel and "
            f"checkpoint_io are not supported. Supported in addition to the named ones: {', '.join(sorted(known))}."
        )
    timed = {} if timeout is None else {"timeout": timeout}
    return {**options, **timed, "process_group_backend": backend}


def _share_overflows(plugin: Any) -> None:
    """Make all ranks skip a step of scaled losses if the shards of any rank overflowed."""
    scaler = plugin.scaler if isinstance(plugin, MixedPrecision | FabricMixedPrecision) else None
    if scaler is not None and not isinstance(scaler, ShardedGradScaler):
        plugin.scaler = ShardedGradScaler(
            plugin.device,
            init_scale=scaler.get_scale(),
            growth_factor=scaler.get_growth_factor(),
            backoff_factor=scaler.get_backoff_factor(),
            growth_interval=scaler.get_growth_interval(),
            enabled=scaler.is_enabled(),
        )
