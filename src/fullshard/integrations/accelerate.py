"""accelerate's `Accelerator`, with this engine instead of DDP or torch's FSDP.

    from fullshard.integrations.accelerate import Accelerator      # was: from accelerate import Accelerator

    accelerator = Accelerator()                                     # under accelerate launch --use_fsdp
    accelerator = Accelerator(fsdp_plugin=ShardingPlugin(strategy="zero2"))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

Everything else in a loop stays the same. If neither a plugin nor `accelerate launch` requests sharding, this class
behaves like accelerate's `Accelerator`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.versions import require

TESTED_ACCELERATE = "1.15"
require("accelerate", TESTED_ACCELERATE, extra="accelerate")

import accelerate  # noqa: E402  # after the check that it is installed
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.tracking import GeneralTracker  # noqa: E402

from fullshard import checkpoint  # noqa: E402
from fullshard.checkpoint.contents import tied_names  # noqa: E402
from fullshard.engine.nested import tensors_in  # noqa: E402
from fullshard.engine.registry import is_unit  # noqa: E402
from fullshard.errors import CheckpointError, ConfigError, StateError  # noqa: E402
from fullshard.integrations.adapters import trained_part  # noqa: E402
from fullshard.integrations.plugin import (  # noqa: E402
    FULL,
    ShardingPlugin,
    plugin_from_config_file,
    plugin_from_environment,
)
from fullshard.integrations.preparing import shard  # noqa: E402
from fullshard.integrations.reporting import numbers_of  # noqa: E402
from fullshard.integrations.waiting_weights import read_waiting  # noqa: E402
from fullshard.optim.before_step import point_to_shards  # noqa: E402
from fullshard.optim.clipping import ShardedGradScaler, clip_grad_norm_  # noqa: E402
from fullshard.report.recording import RunReport, report  # noqa: E402
from fullshard.state.state_dict import FullStateDictConfig, StateDictSettings, StateDictType, as_configured  # noqa: E402

__all__ = ["TESTED_ACCELERATE", "Accelerator", "ReportTracker", "ShardingPlugin", "plugin_from_config_file"]

_COMPUTES_IN = {"bf16": torch.bfloat16, "fp16": torch.float16}
_WHOLE_ON_FIRST_RANK = StateDictSettings(
    StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
)
_EXCLUDED = ("deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin", "torch_tp_plugin", "parallelism_config")
_FOLDER = "fullshard"  # in the folder of save_state: model and optimizer, as saved by fullshard.checkpoint


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]  # it has no types, so it may be anything
    """accelerate's `Accelerator`. Models that it prepares are sharded in place and keep their type.

    Args:
        *args: The arguments of accelerate's `Accelerator`.
        **kwargs: The same by name. `fsdp_plugin` can be a `ShardingPlugin`, accelerate's own plugin, or None for the
            settings of `accelerate launch`.

    Raises:
        ConfigError: A setting is not supported.
        StateError: There are several processes, but accelerate was initialized earlier for a single one.
    """

    sharding: ShardingPlugin | None  # how models are sharded; None to behave like accelerate
    scaler: torch.amp.GradScaler | None
    _starts_reports = False
    _leaves_models = False  # True while fullshard, not accelerate, saves or loads models
    _models: list[nn.Module]
    _optimizers: list[AcceleratedOptimizer]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(accelerate.Accelerator).bind(*args, **kwargs).arguments
        plugin = given.pop("fsdp_plugin", None)
        self.sharding = plugin_from_environment() if plugin is None else ShardingPlugin.of(plugin)
        if self.sharding is None:
            super().__init__(**given)
            return
        _check(given)
        if not torch.accelerator.is_available():
            given["cpu"] = True  # otherwise accelerate lets each process train alone
        with _without_torch_fsdp():
            super().__init__(**given)
        if int(os.environ.get("WORLD_SIZE", "1")) != self.num_processes:
            raise StateError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but accelerate counts {self.num_processes} "
                "processes, because it was initialized for GPUs earlier. On CPUs set TrainingArguments(use_cpu=True), "
                "or the environment variable ACCELERATE_USE_CPU=true."
            )
        if self.sharding.cpu_ram_efficient_loading:
            os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_CPU_RAM_EFFICIENT_LOADING="true")
        if self.scaler is not None:
            options = self.scaler_handler.to_kwargs() if self.scaler_handler is not None else {}
            self.scaler = ShardedGradScaler(self.device.type, **options)

    @property
    def shards(self) -> bool:
        """True if `prepare` shards models: there is a plugin, and processes train together."""
        return self.sharding is not None and dist.is_initialized()

    # -- preparing ----------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare like accelerate, but shard models in place, and make optimizers update the shards."""
        prepared = super().prepare(*args, **kwargs)
        if self.shards:
            self._start_reports()
            for one in prepared if isinstance(prepared, tuple) else (prepared,):
                if isinstance(one, AcceleratedOptimizer):
                    _point_to_shards(one.optimizer)  # now, so that nothing keeps unsharded parameters alive
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Shard `model` in place, run its forward under mixed precision, and compile it if requested.

        A model that is only evaluated is sharded too, and takes as little memory as one that is trained.
        """
        if not self.shards:
            read_waiting(model)
            return super().prepare_model(model, device_placement, evaluation_mode)
        assert self.sharding is not None
        inner = self.unwrap_model(model, keep_torch_compile=False)
        if not is_unit(inner):
            if inner is not model:
                raise ConfigError(
                    f"prepare got a {type(model).__name__} around a {type(inner).__name__}. Pass the model itself: "
                    "prepare shards it first and then compiles it."
                )
            shard(
                model,
                self.sharding,
                computes_in=_COMPUTES_IN.get(self.mixed_precision) if self.native_amp else None,
                broadcast_buffers=self.ddp_handler is None or self.ddp_handler.broadcast_buffers,
            )
            _remember_names(model)
        # In evaluation mode accelerate does everything except wrapping the model.
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def init_trackers(self, project_name: str, config: dict[str, Any] | None = None, *args: Any, **kwargs: Any) -> None:
        """See accelerate's `init_trackers`. A `ReportTracker` also starts on each rank once a model is sharded."""
        super().init_trackers(project_name, config, *args, **kwargs)  # on the first rank only
        self._starts_reports = True
        self._start_reports()

    def _start_reports(self) -> None:
        sharded = [model for model in map(self.unwrap_model, self._models) if is_unit(model)]
        for tracker in self._report_trackers() if self._starts_reports and sharded else ():
            tracker.start_report(sharded[0])

    def _report_trackers(self) -> list[ReportTracker]:
        return [tracker for tracker in self.log_with if isinstance(tracker, ReportTracker)]

    def end_training(self) -> None:
        """See accelerate's `end_training`. Reports end on each rank."""
        for tracker in self._report_trackers():
            tracker.finish()
        super().end_training()

    # -- training -----------------------------------------------------------------------------------------------------

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip gradients and return their norm over all ranks before clipping; see `fullshard.clip_grad_norm_`."""
        if not self.shards:
            plain: Tensor = super().clip_grad_norm_(parameters, max_norm, norm_type)
            return plain
        self.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum or mean of `tensor` over the ranks.

        Raises:
            StateError: It contains a `DTensor`, such as a sharded parameter that `LocalSGD` would average.
        """
        if self.shards and any(isinstance(each_tensor, DTensor) for each_tensor in tensors_in(tensor)):
            raise StateError(
                "cannot reduce a DTensor: each rank has a different shard. LocalSGD, which averages "
                "full parameters, cannot be used with a sharded model. Use gradient accumulation."
            )
        return super().reduce(tensor, reduction, scale)

    # -- weights for export -------------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the unsharded weights of `model` in host memory on rank 0, and an empty dict on other ranks.

        Every rank must call it.
        """
        if self._leaves_models:
            return {}
        inner = self.unwrap_model(model, keep_torch_compile=False)
        if not is_unit(inner):
            plain: dict[str, Any] = super().get_state_dict(model, unwrap)
            return plain
        tied = tied_names(inner)
        state = {name: value for name, value in inner.state_dict().items() if name not in tied}
        as_configured(inner, state, "", _WHOLE_ON_FIRST_RANK)
        return state | {name: state[first] for name, first in tied.items() if first in state}

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> str:
        """Save the run to `output_dir`: each rank saves its shards, and accelerate saves the rest. Every rank must call
        it.

        The last file that is written completes the checkpoint, so the unfinished checkpoint of a killed run is not
        loaded.

        Raises:
            CheckpointError: A rank could not save. The same error is raised on every rank.
        """
        if self.sharding is None:
            place: str = super().save_state(output_dir, safe_serialization, **kwargs)
            return place
        number = self.save_iteration
        with self._leaving_to_us():
            place = super().save_state(output_dir, safe_serialization, **kwargs)
        self.wait_for_everyone()
        for index, (model, optimizer) in enumerate(self._with_optimizers()):
            folder = Path(place) / f"{_FOLDER}_{index}"
            if self.sharding.state_dict_type == FULL:
                checkpoint.export_safetensors(model, folder.with_name(f"model_{index}"))
            checkpoint.save(folder, model=trained_part(model), optimizer=optimizer, step=number, keep=1)
        return place

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Load a run saved by `save_state`, for the current number of ranks and strategy.

        Args: Those of accelerate. If `input_dir` is None and accelerate names checkpoints, the newest complete one is
            loaded.

        Raises:
            CheckpointError: The checkpoint is missing, unfinished or damaged, or belongs to other models. The same
                error is raised on every rank.
        """
        if self.sharding is None:
            super().load_state(input_dir, load_kwargs, **kwargs)
            return
        place = Path(input_dir).expanduser() if input_dir is not None else self._newest_checkpoint()
        with self._leaving_to_us():
            super().load_state(str(place), load_kwargs, **kwargs)
        for index, (model, optimizer) in enumerate(self._with_optimizers()):
            checkpoint.load(place / f"{_FOLDER}_{index}", model=trained_part(model), optimizer=optimizer)

    def _newest_checkpoint(self) -> Path:
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ConfigError(
                "load_state() without input_dir needs automatic checkpoint names. Pass input_dir, or create the "
                "Accelerator with ProjectConfiguration(automatic_checkpoint_naming=True)."
            )
        folder = Path(self.project_dir) / "checkpoints"
        found = sorted(folder.glob("checkpoint_*"), key=lambda path: int(path.name.removeprefix("checkpoint_")))
        complete = [path for path in found if checkpoint.latest(path / f"{_FOLDER}_0") is not None]
        if not complete:
            raise CheckpointError(f"none of the {len(found)} checkpoints in {folder} is complete.")
        return complete[-1]

    # -- private to accelerate ----------------------------------------------------------------------------------------
    # Most undocumented parts of accelerate are used here. tests/integrations/test_integrations_accelerate.py names the
    # version that they were checked with, and fails if one of them is gone.

    def _with_optimizers(self) -> Iterator[tuple[nn.Module, Optimizer | None]]:
        """Yield each prepared model with its optimizer.

        Raises:
            ConfigError: Two optimizers update parameters of one model.
        """
        for prepared in self._models:
            model = self.unwrap_model(prepared, keep_torch_compile=False)
            own = {id(param) for param in model.parameters()}
            found = [
                one.optimizer
                for one in self._optimizers
                if any(id(param) in own for group in one.param_groups for param in group["params"])
            ]
            if len(found) > 1:
                raise ConfigError(
                    f"{len(found)} optimizers update parameters of one {type(model).__name__}, but a checkpoint can "
                    "hold one. Create one optimizer with several parameter groups."
                )
            yield model, found[0] if found else None

    @contextmanager
    def _leaving_to_us(self) -> Iterator[None]:
        """Context manager within which accelerate does not save or load models and optimizers. Users' hooks still see
        the models.
        """
        optimizers, self._optimizers, self._leaves_models = self._optimizers, [], True
        handles = (
            self.register_save_state_pre_hook(lambda models, weights, folder: weights.clear()),
            self.register_load_state_pre_hook(lambda models, folder: models.clear()),
        )
        try:
            yield
        finally:
            self._optimizers, self._leaves_models = optimizers, False
            for handle in handles:
                handle.remove()


class ReportTracker(GeneralTracker):  # type: ignore[misc]  # it has no types
    """Writes the page of a training run, with the values that the loop logs: see `fullshard.report`.

        accelerator = Accelerator(log_with=ReportTracker("runs/mine"))
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        accelerator.init_trackers("mine", config)
        ...
        accelerator.log({"loss": loss})
        accelerator.end_training()

    It records the first model that is sharded. Without one, it does nothing.

    Args:
        path: The folder of the run.
        first_step: The number of the first step. If it is above 1, an existing record is continued.
    """

    name = "fullshard"
    requires_logging_directory = False

    def __init__(self, path: str | os.PathLike[str], *, first_step: int = 1) -> None:
        super().__init__()
        self._path, self._first_step, self._settings = Path(path), first_step, dict[str, Any]()
        self.report: RunReport | None = None

    @property
    def tracker(self) -> RunReport | None:
        """The report; None before it starts."""
        return self.report

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Show `values` as the settings of the run."""
        self._settings.update(values)

    def start_report(self, model: nn.Module) -> None:
        """Start recording, unless it has started.

        Args:
            model: The sharded root.
        """
        if self.report is None:
            self.report = report(model, self._path, settings=self._settings, first_step=self._first_step)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add numbers to those of the current step. `step` is ignored: steps are counted by the optimizer."""
        if self.report is not None:
            self.report.log(step=None, **numbers_of(values))

    def finish(self) -> None:
        """Write the page."""
        if self.report is not None:
            self.report.close()


def _check(given: dict[str, Any]) -> None:
    """Raise `ConfigError` for options that cannot be combined with sharding."""
    for name in _EXCLUDED:
        if given.get(name) is not None:
            raise ConfigError(f"Accelerator({name}=...) cannot be combined with fullshard. Leave one of them out.")
    if str(given.get("mixed_precision")) == "fp8":
        raise ConfigError("mixed_precision='fp8' is not supported. Choose 'bf16'.")
    if getattr(given.get("dynamo_plugin"), "use_regional_compilation", False):
        raise ConfigError(
            "use_regional_compilation is not supported: it replaces modules by copies, which are not units. Call "
            "compile() on each layer before prepare, or compile the whole model."
        )


@contextmanager
def _without_torch_fsdp() -> Iterator[None]:
    """Context manager that hides the request to shard from accelerate."""
    before = os.environ.pop("ACCELERATE_USE_FSDP", None)
    try:
        yield
    finally:
        if before is not None:
            os.environ["ACCELERATE_USE_FSDP"] = before


def _point_to_shards(optimizer: Optimizer) -> None:
    """Let `optimizer` update the shards. Adagrad has states before its first step, which are created again."""
    is_new = isinstance(optimizer, torch.optim.Adagrad) and not any(item["step"] for item in optimizer.state.values())
    if is_new:
        optimizer.state.clear()
    point_to_shards(optimizer)
    for group in optimizer.param_groups if is_new else ():
        options = {name: group[name] for name in ("initial_accumulator_value", "fused")}
        if group["params"]:
            optimizer.state.update(torch.optim.Adagrad(group["params"], **options).state)


def _remember_names(model: nn.Module) -> None:
    """Store the name of the original class in `model`."""
    name = type(model).__name__.removeprefix("FSDP")
    model._get_name = lambda: name  # type: ignore[method-assign]  # the Trainer's label smoothing looks it up
