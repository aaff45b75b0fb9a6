"""The engine of a DeepSpeed training loop: forward, backward, step, and checkpoints."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from fullshard.checkpoint import latest, load, save
from fullshard.checkpoint.contents import model_state
from fullshard.checkpoint.folder import write_synced
from fullshard.checkpoint.together import default_ranks
from fullshard.engine.managed import in_model_order
from fullshard.engine.sharded_param import full_copy
from fullshard.errors import CheckpointError, ConfigError, StateError
from fullshard.fsdp_module import FSDPModule
from fullshard.integrations.deepspeed.building import make_loader
from fullshard.integrations.deepspeed.configuration import BatchSizes, Configuration
from fullshard.integrations.deepspeed.importing import LATEST, read_tag
from fullshard.optim.clipping import clip_grad_norm_, total_norm
from fullshard.policy.precision import is_castable

logger = logging.getLogger(__name__)


class Engine(nn.Module):
    """A sharded model with its optimizer and scheduler, used like DeepSpeed's engine.

        for batch in loader:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()

    Created by `initialize`. Attributes that the engine does not have are looked up in `module`, the user's model.

    Attributes:
        module: The model, sharded in place.
        optimizer: The optimizer of the shards; None if there is nothing to train.
        lr_scheduler: The scheduler, which is stepped after every optimizer step that is not skipped; None if there is
            none.
        training_dataloader: A loader of `training_data`; None if there is none.
        global_steps: The number of optimizer steps so far, including skipped ones.
        micro_steps: The number of microbatches so far.
        global_samples: The number of samples so far, over all ranks.
        skipped_steps: The number of steps that were skipped because gradients were not finite.
        device: The device that computes.
    """

    def __init__(
        self,
        module: nn.Module,
        configuration: Configuration,
        config: Any,
        device: torch.device,
        *,
        optimizer: Optimizer | None,
        lr_scheduler: Any,
        training_data: Dataset[Any] | None,
        collate_fn: Callable[..., Any] | None,
    ) -> None:
        super().__init__()
        self.module = module
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.config = config
        self.device = device
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.dp_world_size = self.world_size
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.global_steps = self.micro_steps = self.global_samples = self.skipped_steps = 0
        self._settings = configuration
        self._sizes = configuration.sizes
        self._loss_scale = configuration.loss_scale
        self._norm: float | None = None
        self._applied = False
        self._backwards = 0  # since the last step()
        self._in_step = 0  # microbatches of the current step so far
        self._is_boundary: bool | None = None  # as set by the user
        self._collate_fn = collate_fn
        self.training_dataloader = None if training_data is None else self.deepspeed_io(training_data)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the engine, or else of the model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    # -- a step -------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output."""
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Accumulate the gradients of `loss`, and return the loss divided by the number of microbatches.

        Args:
            loss: A scalar.
            retain_graph: See `torch.Tensor.backward`.
            scale_wrt_gas: Whether to divide by the number of microbatches.

        Raises:
            StateError: The engine has no optimizer.
        """
        self._trained()
        if scale_wrt_gas:
            loss = loss / self._sizes.microbatches
        if self._settings.stage < 2:  # accumulated unsharded gradients need only one reduction per step
            self._sharded.set_requires_gradient_sync(self.is_gradient_accumulation_boundary() and not self._separate)
        (loss * self._loss_scale.scale).backward(retain_graph=retain_graph)
        self._backwards += 1
        return loss

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Count a microbatch. After the last one of a step, run the optimizer and the scheduler.

        Args:
            lr_kwargs: Keyword arguments for the `step` of the scheduler.

        Raises:
            StateError: The engine has no optimizer, or backward was not called since the last step.
        """
        optimizer = self._trained()
        if not self._backwards:
            raise StateError(
                "engine.step() without engine.backward(loss) since the last step. Call engine.backward(loss) rather "
                "than loss.backward(): it scales the loss and counts the microbatches of a step."
            )
        self._backwards = 0
        self._applied = False
        is_last = self.is_gradient_accumulation_boundary()
        self._in_step = 0 if is_last else self._in_step + 1
        if is_last:
            self._applied = self._clip(optimizer)
            if self._applied:
                optimizer.step()
                if self.lr_scheduler is not None:
                    self.lr_scheduler.step(**(lr_kwargs or {}))
            else:
                self.skipped_steps += 1
            self.zero_grad()
            self.global_steps += 1
            self.global_samples += self._sizes.step
            self._report()
        self.micro_steps += 1

    def _clip(self, optimizer: Optimizer) -> bool:
        """Unscale and clip the gradients. Return False if the step must be skipped."""
        settings = self._settings
        params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
        scale = self._loss_scale.scale
        if scale != 1:
            for param in params:
                param.grad.div_(scale)
        if settings.clips_to > 0:
            norm = clip_grad_norm_(params, settings.clips_to)
        elif settings.always_norm or settings.skips_overflows:
            norm = total_norm([param.grad for param in in_model_order(params)])
        else:
            self._norm = None
            return True
        overflowed = settings.skips_overflows and not bool(torch.isfinite(norm))
        self._norm = float("inf") if overflowed else float(norm)
        self._loss_scale.update(overflowed)
        return not overflowed

    def _report(self) -> None:
        every = self._settings.steps_per_print
        if every and self.global_steps % every == 0 and self.global_rank == 0:
            logger.info(
                "step %d, %d skipped, learning rates %s, loss scale %g",
                self.global_steps,
                self.skipped_steps,
                self.get_lr(),
                self._loss_scale.scale,
            )

    def _trained(self) -> Optimizer:
        if self.optimizer is None:
            raise StateError(
                "the engine has no optimizer. Pass optimizer= to initialize, or set one in the configuration."
            )
        return self.optimizer

    @property
    def _sharded(self) -> FSDPModule:
        return cast(FSDPModule, self.module)

    # -- accumulation -------------------------------------------------------------------------------------------------

    _separate = False  # True within no_sync()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True if the current microbatch is the last of its step."""
        if self._is_boundary is not None:
            return self._is_boundary
        return self._in_step + 1 >= self._sizes.microbatches

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set whether the next microbatches are the last of their step, instead of counting them.

        A script that sets it before each microbatch can call `step` once, after the last one.

        Args:
            is_boundary: True before the last microbatch of a step, False before the others; None to count them again.
        """
        self._is_boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager that makes backward accumulate unsharded gradients. A later backward reduces all of them."""
        self._separate = True
        try:
            with self._sharded.no_sync():
                yield
        finally:
            self._separate = False

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of samples per step over all ranks, and thereby the number of microbatches. The microbatch
        size stays the same.

        Args:
            train_batch_size: The number of samples per step over all ranks.

        Raises:
            ConfigError: It is not a multiple of the microbatch size times the number of ranks.
        """
        self._sizes = BatchSizes.resolve(train_batch_size, self._sizes.microbatch, None, self.world_size)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients of the model."""
        self.module.zero_grad(set_to_none=set_to_none)

    # -- numbers and settings -----------------------------------------------------------------------------------------

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """Return the momentum or the betas of each parameter group."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return self._of_groups("momentum" if any("momentum" in group for group in groups) else "betas")

    def _of_groups(self, option: str) -> list[Any]:
        return [] if self.optimizer is None else [group.get(option, 0.0) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of all gradients of the last step before clipping."""
        return self._norm

    def was_step_applied(self) -> bool:
        """Return True if the last `step()` changed parameters."""
        return self._applied

    def train_batch_size(self) -> int:
        """Return the samples per step over all ranks."""
        return self._sizes.step

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples per microbatch and rank."""
        return self._sizes.microbatch

    def gradient_accumulation_steps(self) -> int:
        """Return the microbatches per step."""
        return self._sizes.microbatches

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return samples per step over all ranks, samples per microbatch and rank, and microbatches per step."""
        return self._sizes.step, self._sizes.microbatch, self._sizes.microbatches

    def gradient_clipping(self) -> float:
        """Return the norm that gradients are clipped to; 0 without clipping."""
        return self._settings.clips_to

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage."""
        return self._settings.stage

    def zero_optimization(self) -> bool:
        """Return True if anything is sharded."""
        return self._settings.stage > 0

    def fp16_enabled(self) -> bool:
        """Return True if compute uses float16."""
        return self._settings.dtype is torch.float16

    def bfloat16_enabled(self) -> bool:
        """Return True if compute uses bfloat16."""
        return self._settings.dtype is torch.bfloat16

    def loss_scale(self) -> float:
        """Return the current loss scale."""
        return self._loss_scale.scale

    # -- data ---------------------------------------------------------------------------------------------------------

    def deepspeed_io(
        self, dataset: Dataset[Any], batch_size: int | None = None, collate_fn: Callable[..., Any] | None = None
    ) -> DataLoader[Any]:
        """Return a loader of this rank's part of `dataset`, in microbatches unless `batch_size` is given.

        Args:
            dataset: The samples.
            batch_size: The number of samples in a batch. If None, the microbatch size.
            collate_fn: Merges samples into a batch. If None, that of `initialize`, or else torch's own.
        """
        return make_loader(
            dataset,
            batch_size or self._sizes.microbatch,
            collate_fn=collate_fn or self._collate_fn,
            drop_last=self._settings.drops_last,
            pin_memory=self.device.type == "cuda",
        )

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return the model's sharded state dict. Use `save_16bit_model` to write full weights.

        Args:
            destination: Must be None, or is filled like the argument of `nn.Module.state_dict`.
            prefix: A prefix for all names.
            keep_vars: Whether tensors stay attached to autograd.
            exclude_frozen_parameters: Whether to leave out parameters that are not trained.
        """
        state: dict[str, Any] = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, param in self.module.named_parameters(remove_duplicate=False):
                if not param.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def save_checkpoint(
        self,
        save_dir: str | PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything as a fullshard checkpoint in `save_dir`/`tag`. Every rank must call it.

        Args:
            save_dir: A folder on storage that all hosts share.
            tag: The name of the checkpoint's folder. If None, `global_step` and the number of steps.
            client_state: Plain values and plain tensors, which `load_checkpoint` returns. Those of the first rank are
                saved.
            save_latest: Whether `load_checkpoint` finds the checkpoint without a tag.
            exclude_frozen_parameters: Must be False: a checkpoint is complete.

        Raises:
            CheckpointError: A rank could not save, or tags differ between ranks. The same error is raised on every
                rank.
            ConfigError: An argument is not supported.
        """
        if exclude_frozen_parameters:
            raise ConfigError(
                "exclude_frozen_parameters=True is not supported by checkpoints, which are complete. Use "
                "save_16bit_model."
            )
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        folder, ranks = Path(save_dir), default_ranks()
        doing = f"saving {folder / name}"
        names = ranks.share(doing, lambda: name)
        if len(set(names)) > 1:
            raise CheckpointError(
                f"{doing}: ranks passed different tags: {', '.join(names)}. Pass the same tag on every rank."
            )
        counters = {
            "global_steps": self.global_steps,
            "micro_steps": self.micro_steps,
            "global_samples": self.global_samples,
            "skipped_steps": self.skipped_steps,
            "loss_scale": self._loss_scale.state_dict(),
        }
        save(
            folder / name,
            model=self.module,
            optimizer=self.optimizer,
            scheduler=self.lr_scheduler,
            step=self.global_steps,
            extra={"engine": counters, "client_state": dict(client_state or {})},
            keep=1,
        )
        if save_latest:
            ranks.once(doing, lambda: _write_latest(folder, name))
        return True

    def load_checkpoint(
        self,
        load_dir: str | PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint from `save_checkpoint`, with any number of ranks and any stage. Every rank must call it.

        Random generators are restored as well, so the losses are those of a run without interruption. The next
        microbatch is the first of its step: gradients of an unfinished step are dropped.

        Args:
            load_dir: The `save_dir` of `save_checkpoint`.
            tag: The name of the checkpoint. If None, the latest.
            load_module_strict: Must be True.
            load_optimizer_states: Whether to load the optimizer.
            load_lr_scheduler_states: Whether to load the scheduler.
            load_module_only: Whether to load only the model.
            custom_load_fn: Must be None.

        Returns:
            The path of the checkpoint and the client state; (None, None) if there is none in `load_dir`.

        Raises:
            CheckpointError: It is damaged, does not match, or was written by DeepSpeed. The same error is raised on
                every rank.
            ConfigError: An argument is not supported.
        """
        if not load_module_strict or custom_load_fn is not None:
            raise ConfigError(
                "load_module_strict=False and custom_load_fn are not supported: a checkpoint is always loaded "
                "completely. Use engine.module.load_state_dict(..., strict=False) for other weights."
            )
        ranks, folder = default_ranks(), Path(load_dir)
        doing = f"loading {folder}"
        path = ranks.once(doing, lambda: _find(folder, None if tag is None else str(tag)))
        if path is None:
            logger.warning("found no checkpoint in %s, so nothing is loaded", folder)
            return None, None
        restored = load(
            path,
            model=self.module,
            optimizer=self.optimizer if load_optimizer_states and not load_module_only else None,
            scheduler=self.lr_scheduler if load_lr_scheduler_states and not load_module_only else None,
            random_states=not load_module_only,
        )
        extra = restored.extra or {}
        self.zero_grad()
        self._in_step = self._backwards = 0
        if not load_module_only:
            counters = extra.get("engine", {})
            self.global_steps = counters.get("global_steps", restored.step or 0)
            self.micro_steps = counters.get("micro_steps", self.global_steps * self._sizes.microbatches)
            self.global_samples = counters.get("global_samples", self.global_steps * self._sizes.step)
            self.skipped_steps = counters.get("skipped_steps", 0)
            if "loss_scale" in counters:
                self._loss_scale.load_state_dict(counters["loss_scale"])
        return str(restored.path), extra.get("client_state", {})

    def save_16bit_model(
        self,
        save_dir: str | PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the full weights, in the compute dtype, to one file for `torch.load`. Every rank must call it.

        The first rank holds all of them in memory; `fullshard.checkpoint.export_safetensors` does not need this memory.

        Args:
            save_dir: The folder, which is created.
            save_filename: The name of the file.
            exclude_frozen_parameters: Whether to leave out parameters that are not trained.
        """
        named = self.module.named_parameters(remove_duplicate=False)
        frozen = {name for name, param in named if not param.requires_grad}
        ranks, path = default_ranks(), Path(save_dir) / save_filename
        weights: dict[str, Tensor] = {}
        for name, value in model_state(self.module).items():
            if not isinstance(value, Tensor) or (exclude_frozen_parameters and name in frozen):
                continue
            whole = full_copy(value) if isinstance(value, DTensor) else value
            if ranks.leads:
                casts = isinstance(value, DTensor) and is_castable(whole.dtype) and self._settings.low_precision
                weights[name] = whole.detach().to("cpu", self._settings.dtype if casts else whole.dtype)
        ranks.once(f"writing {path}", lambda: _write_weights(path, weights))
        return True

    def save_fp16_model(self, save_dir: str | PathLike[str], save_filename: str = "pytorch_model.bin") -> bool:
        """Call `save_16bit_model` under its older name.

        Args:
            save_dir: The folder, which is created.
            save_filename: The name of the file.
        """
        return self.save_16bit_model(save_dir, save_filename)

    def destroy(self) -> None:
        """Do nothing, because there is nothing to free."""


def _write_latest(folder: Path, name: str) -> None:
    unfinished = folder / f"{LATEST}.partial"
    write_synced(unfinished, name.encode())
    unfinished.replace(folder / LATEST)


def _write_weights(path: Path, weights: dict[str, Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(weights, path)


def _find(folder: Path, tag: str | None) -> Path | None:
    """Return the checkpoint `tag` in `folder`, or the latest; None if there is no checkpoint."""
    if tag is None and (folder / LATEST).exists():
        tag = read_tag(folder)
    place = folder if tag is None else folder / tag
    if latest(place) is not None or (place / "manifest.json").is_file():
        return place
    if next(place.glob("*_optim_states.pt"), None) or next(place.glob("*_model_states.pt"), None):
        raise CheckpointError(
            f"{place} is a checkpoint written by DeepSpeed. Convert it first: fullshard checkpoint import-deepspeed "
            f"{place} OUT"
        )
    if tag is not None:
        raise CheckpointError(f"found no checkpoint at {place}. Pass the tag and the folder that it was saved to.")
    return None
