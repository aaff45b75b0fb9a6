"""transformers' `Trainer` and `Seq2SeqTrainer`, which train with this engine if sharding is requested.

    from fullshard.integrations.transformers import Trainer    # was: from transformers import Trainer

    args = TrainingArguments(..., fsdp=True, fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]})
    Trainer(model, args, train_dataset=data).train()

or, for scripts with a trainer of another library, such as trl, before any other import:

    import fullshard.integrations.transformers
    fullshard.integrations.transformers.enable()

If neither `fsdp` nor `accelerate launch` requests sharding, these classes behave like those of transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from fullshard.versions import require

TESTED_TRANSFORMERS = "5.23"
require("transformers", TESTED_TRANSFORMERS, extra="transformers")

import accelerate  # noqa: E402  # after the check that transformers is installed
import transformers  # noqa: E402
import transformers.core_model_loading as loading  # noqa: E402
import transformers.trainer  # noqa: E402
import transformers.trainer_seq2seq  # noqa: E402
from transformers.trainer_callback import TrainerCallback, TrainerState  # noqa: E402
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR  # noqa: E402

from fullshard import checkpoint  # noqa: E402
from fullshard.checkpoint import Merged  # noqa: E402
from fullshard.errors import ConfigError, StateError  # noqa: E402
from fullshard.integrations.accelerate import Accelerator  # noqa: E402
from fullshard.integrations.adapters import computing_prompts, trained_part  # noqa: E402
from fullshard.integrations.plugin import FULL, SHARDED, ShardingPlugin, plugin_from_environment  # noqa: E402
from fullshard.integrations.reporting import numbers_of  # noqa: E402
from fullshard.integrations.waiting_weights import is_waiting, read_waiting, wait_for, wait_for_others  # noqa: E402
from fullshard.report.recording import RunReport, report  # noqa: E402
from fullshard.state.loaded_states import accept_whole_states  # noqa: E402

__all__ = ["TESTED_TRANSFORMERS", "ReportCallback", "Seq2SeqTrainer", "Trainer", "enable", "from_pretrained"]

_FOLDER = "fullshard"  # in a checkpoint of the Trainer: model, optimizer and scheduler, in our format


class _TrainerSharding(transformers.Trainer):
    """The methods of a trainer that differ if its model is sharded."""

    accelerator: Any

    @property
    def sharding(self) -> ShardingPlugin | None:
        """The sharding options; None if the model is not sharded."""
        return self.accelerator.sharding if isinstance(self.accelerator, Accelerator) else None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.sharding is None and self.model is not None:
            read_waiting(self.model)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, with sharding if the arguments or the launcher request it.

        Raises:
            ConfigError: A key of `fsdp_config` is not supported. The message names it and gives the reason.
        """
        plugin = _plugin_of(self.args)
        if plugin is None:
            super().create_accelerator_and_postprocess()
            return
        if self.args.save_only_model and plugin.state_dict_type == SHARDED:
            raise ConfigError(
                f"save_only_model saves full weights, and fsdp_config's state_dict_type={SHARDED} leaves them out of "
                f"checkpoints. Set state_dict_type={FULL}, or leave out save_only_model."
            )
        if self.args.optim == "adafactor":
            raise ConfigError(
                "optim=adafactor is not supported: transformers' Adafactor computes means over rows and columns, but "
                "each rank has only a part of them. Choose another optimizer, such as adamw_torch."
            )
        with self._making(plugin):
            super().create_accelerator_and_postprocess()

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train. `resume_from_checkpoint=True` resumes from the newest complete checkpoint."""
        if self.sharding is not None and resume_from_checkpoint is True:
            resume_from_checkpoint = str(_newest_complete(Path(str(self.args.output_dir))))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model to a folder for `from_pretrained`. Every rank must call it, and rank 0 writes.

        With `state_dict_type: SHARDED_STATE_DICT`, checkpoints during training do not contain the full weights.
        """
        if self.sharding is None:
            super().save_model(output_dir, _internal_call)
            return
        if _internal_call and self.sharding.state_dict_type == SHARDED:
            return
        state_dict = self.accelerator.get_state_dict(self.model)
        with computing_prompts(self.accelerator.unwrap_model(self.model, keep_torch_compile=False)):
            self._save(output_dir, state_dict=state_dict)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    # -- private to transformers --------------------------------------------------------------------------------------
    # Undocumented parts of transformers are used only here and below.
    # tests/integrations/test_integrations_transformers.py names the version that they were checked with, and fails if
    # one of them is gone or has other parameters.

    @contextmanager
    def _making(self, plugin: ShardingPlugin) -> Iterator[None]:
        """Context manager within which transformers creates this package's `Accelerator`, with `plugin`."""

        def make(**options: Any) -> Accelerator:
            return Accelerator(**{**options, "fsdp_plugin": plugin})

        module = cast(Any, transformers.trainer)
        accelerator, plugin_args = module.Accelerator, self.args.fsdp_plugin_args
        module.Accelerator, self.args.fsdp_plugin_args = make, None
        try:
            yield
        finally:
            module.Accelerator, self.args.fsdp_plugin_args = accelerator, plugin_args

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.sharding is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        checkpoint.save(
            Path(output_dir) / _FOLDER,
            model=self._saved_model(),
            optimizer=self._own_optimizer(),
            scheduler=self.lr_scheduler,
            step=self.state.global_step,
            keep=1,
        )

    def _load_optimizer_and_scheduler(self, checkpoint_path: str | None) -> None:
        folder = None if checkpoint_path is None else Path(checkpoint_path) / _FOLDER
        if self.sharding is None or folder is None:
            super()._load_optimizer_and_scheduler(checkpoint_path)
        elif folder.exists():
            checkpoint.load(
                folder, model=self._saved_model(), optimizer=self._own_optimizer(), scheduler=self.lr_scheduler
            )
        else:  # a run that started without sharding
            accept_whole_states(self._own_optimizer())
            super()._load_optimizer_and_scheduler(checkpoint_path)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        is_own = self.sharding is not None and (Path(resume_from_checkpoint) / _FOLDER).exists()
        resumed: Any = model or self.model
        if not is_own and is_waiting(resumed):
            wait_for_others(resumed, resume_from_checkpoint)
        elif not is_own:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        # else: `_load_optimizer_and_scheduler` also loads the model, once it is sharded

    def _load_best_model(self) -> None:
        folder = Path(str(self.state.best_model_checkpoint)) / _FOLDER
        if self.sharding is None or not folder.exists():
            super()._load_best_model()
        else:
            checkpoint.load(folder, model=self._saved_model(), random_states=False)

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        if self.sharding is None:  # else a rank may not have memory for the full model
            read_waiting(model)
            super()._move_model_to_device(model, device)

    def _saved_model(self) -> nn.Module:
        return trained_part(self.accelerator.unwrap_model(self.model, keep_torch_compile=False))

    def _own_optimizer(self) -> Optimizer:
        return cast(Optimizer, cast(Any, self.optimizer).optimizer)


class Trainer(_TrainerSharding):
    """transformers' `Trainer`. If `TrainingArguments` or `accelerate launch` sets `fsdp`, this engine shards the model.

    Arguments and methods are those of transformers.

    Args:
        *args: The arguments of transformers' `Trainer`.
        **kwargs: The same by name.
    """


class Seq2SeqTrainer(_TrainerSharding, transformers.Seq2SeqTrainer):
    """transformers' `Seq2SeqTrainer`, changed like `Trainer`.

    Args:
        *args: The arguments of transformers' `Seq2SeqTrainer`.
        **kwargs: The same by name.
    """


class ReportCallback(TrainerCallback):
    """Writes the page of a training run of the Trainer, with the values that it logs: see `fullshard.report`.

    Args:
        path: The folder. If None, the output folder of the Trainer.
    """

    def __init__(self, path: str | PathLike[str] | None = None) -> None:
        self._path = path
        self.report: RunReport | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Start recording."""
        folder = Path(self._path or args.output_dir)
        settings = {name: value for name, value in args.to_dict().items() if isinstance(value, str | int | float)}
        self.report = report(kwargs["model"], folder, settings=settings, first_step=state.global_step + 1)

    def on_log(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Add the values that the Trainer has logged to the page."""
        if self.report is not None:
            self.report.log(step=max(1, state.global_step), **numbers_of(kwargs.get("logs") or {}))

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Write the page."""
        if self.report is not None:
            self.report.close()


def enable() -> None:
    """Replace `transformers.Trainer` and `transformers.Seq2SeqTrainer` by those of this module for all later imports.

    Raises:
        StateError: A class was derived from transformers' own trainer before.
    """
    own = (transformers.trainer_seq2seq.Seq2SeqTrainer, Seq2SeqTrainer, _TrainerSharding)
    early = [cls for cls in transformers.trainer.Trainer.__subclasses__() if cls not in own]
    if early and transformers.trainer.Trainer is not Trainer:
        raise StateError(
            f"{early[0].__module__}.{early[0].__qualname__} was derived from transformers' Trainer before enable() "
            "and would train without sharding. Call enable() before importing that module."
        )
    for module, cls in (
        (transformers, Trainer),
        (transformers.trainer, Trainer),
        (transformers, Seq2SeqTrainer),
        (transformers.trainer_seq2seq, Seq2SeqTrainer),
    ):
        setattr(module, cls.__name__, cls)


def from_pretrained(
    cls: Any,
    folder: str | PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    rename: Callable[[str], str | None] | None = None,
    **options: Any,
) -> Any:
    """Create a model like `cls.from_pretrained(folder)`, but keep the weights in their files until it is sharded.

    Then each rank reads its own rows, so that no process ever holds more of a model than its shards and one unit. The
    Trainers of this module and `Accelerator.prepare` shard a model, or read all of it if sharding is not requested.

    Args:
        cls: A model class of transformers, such as `AutoModelForCausalLM`.
        folder: A folder with `config.json` and safetensors files, as written by `save_pretrained`.
        dtype: The dtype of the parameters. If None, that of `config.json`.
        rename: Returns the FQN for a name in the files, or None to skip it.
        options: Values that replace those of the configuration.

    Raises:
        ConfigError: `folder` does not exist or has no configuration, an option is not part of the configuration, or
            transformers computes the weights of this model from those in files instead of only renaming and merging
            them.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"from_pretrained: {folder} is not a folder with a config.json and safetensors files. Download the model, "
            "or let save_pretrained write one."
        )
    config, unknown = transformers.AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **options)
    if unknown:
        raise ConfigError(
            f"from_pretrained: {', '.join(unknown)}: unknown values of the configuration of {config.model_type}. Only "
            "configuration values can be passed. Other options are supported by transformers' from_pretrained."
        )
    chosen: torch.dtype | None = dtype or config.dtype
    with accelerate.init_empty_weights(include_buffers=False):  # buffers that are not in files are computed
        model = (cls.from_config if hasattr(cls, "from_config") else cls._from_config)(config, dtype=chosen)
    merge = None
    if rename is None and (conversions := _conversions(model)):
        rename, merge = conversions.rename, conversions.merge
    _raise_dtypes(model, chosen)
    model.tie_weights()
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    wait_for(model, folder, rename, merge)
    return model.eval()


# Private to transformers as well, and covered by the same test.


class _Conversions:
    """The conversion that transformers applies to weights in files: renaming and merging, as for experts.

    Raises:
        ConfigError: There is a different kind of transform.
    """

    def __init__(self, model: Any, transforms: Sequence[Any]) -> None:
        model_type = model.config.model_type
        self._left_out = list(model._keys_to_ignore_on_load_unexpected or ())
        self._made: set[str] = set()  # names of merged tensors
        self._renamings = [transform for transform in transforms if isinstance(transform, loading.WeightRenaming)]
        self._converters = [transform for transform in transforms if not isinstance(transform, loading.WeightRenaming)]
        for converter in self._converters:
            kinds = [type(operation) for operation in getattr(converter, "operations", [None])]
            if kinds not in ([loading.MergeModulelist], [loading.MergeModulelist, loading.Concatenate]) or (
                converter.operations[0].dim != 0
            ):
                names = ", ".join(kind.__name__ for kind in kinds)
                raise ConfigError(
                    f"from_pretrained: transformers computes the weights of {model_type} models from the tensors in "
                    f"the files ({names}), so a rank cannot read only its rows. Use from_pretrained of transformers, "
                    "with cpu_ram_efficient_loading in fsdp_config to read them on one rank only; or pass rename= if "
                    "only names differ."
                )

    def rename(self, name: str) -> str | None:
        """Return the FQN of a tensor in the files, or of a merged tensor; None if it is skipped."""
        if name in self._made:
            return name
        fqn = str(loading.rename_source_key(name, self._renamings, [])[0])
        return None if any(re.search(pattern, fqn) for pattern in self._left_out) else fqn

    def merge(self, names: Collection[str]) -> dict[str, Merged]:
        """Return the tensors that are merged from several of `names`."""
        parts: dict[str, dict[str, list[str]]] = {}
        for name in sorted(names, key=loading.dot_natural_key):
            fqn, pattern = loading.rename_source_key(name, self._renamings, self._converters)
            if pattern is not None and self.rename(name) is not None:
                parts.setdefault(fqn, {}).setdefault(pattern, []).append(name)
        self._made = set(parts)
        return {fqn: self._merged(by_pattern) for fqn, by_pattern in parts.items()}

    def _merged(self, by_pattern: Mapping[str, Sequence[str]]) -> Merged:
        converter = next(
            converter for converter in self._converters if next(iter(by_pattern)) in converter.source_patterns
        )
        stacks = [
            Merged(tuple(by_pattern[source_pattern]))
            for source_pattern in converter.source_patterns
            if source_pattern in by_pattern
        ]
        joins = converter.operations[1:]
        return Merged(tuple(stacks), dim=joins[0].dim) if joins else stacks[0]


def _conversions(model: Any) -> _Conversions | None:
    """Return the conversion from files to the weights of `model`; None if they are identical."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    transforms = get_model_conversion_mapping(model, add_legacy=False)
    return _Conversions(model, transforms) if transforms else None


def _raise_dtypes(model: Any, dtype: torch.dtype | None) -> None:
    """Cast the parameters that the model requires in float32 to float32, if the others have lower precision."""
    for pattern, wide in model._get_dtype_plan(dtype).items():
        for name, param in model.named_parameters():
            if pattern in name:
                param.data = param.data.to(wide)


def _plugin_of(args: Any) -> ShardingPlugin | None:
    """Return the sharding options of the arguments, or else of the launcher."""
    if not args.fsdp:
        return plugin_from_environment()
    return ShardingPlugin.from_config(_stated(args.fsdp_config), state_dict_type=FULL)


def _stated(config: dict[str, Any]) -> dict[str, Any]:
    """Return `fsdp_config` without the values that `TrainingArguments` adds itself."""
    return {key: value for key, value in config.items() if not (key == "min_num_params" and value == 0)}


def _newest_complete(folder: Path) -> Path:
    """Return the newest complete checkpoint of the Trainer in `folder`."""
    found = [path for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.name.rpartition("-")[2].isdigit()]
    newest = sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    for path in newest:
        if _is_complete(path):
            return path
    raise ConfigError(
        f"resume_from_checkpoint=True: {folder} has {len(newest)} checkpoints, but none is complete. Start a new run."
    )


def _is_complete(path: Path) -> bool:
    try:
        TrainerState.load_from_json(str(path / "trainer_state.json"))  # the Trainer writes it last
    except (OSError, ValueError, TypeError):
        return False
    return not (path / _FOLDER).exists() or checkpoint.latest(path / _FOLDER) is not None
