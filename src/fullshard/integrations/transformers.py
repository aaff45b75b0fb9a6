"""transformers' `Trainer` and `Seq2SeqTrainer`, which train with this engine if they are to shard.

    from fullshard.integrations.transformers import Trainer    # was: from transformers import Trainer

    args = TrainingArguments(..., fsdp=True, fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]})
    Trainer(model, args, train_dataset=data).train()

or, for scripts that get their trainer from elsewhere (trl's, for one), before anything else is imported:

    import fullshard.integrations.transformers
    fullshard.integrations.transformers.enable()

Where neither `fsdp` nor `accelerate launch` asks for sharding, these are transformers' own.
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

from fullshard.required import require

TESTED_TRANSFORMERS = "5.23"
require("transformers", TESTED_TRANSFORMERS, extra="transformers")

import accelerate  # noqa: E402  # once transformers is known to be there
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
from fullshard.integrations.adapters import trained_part  # noqa: E402
from fullshard.integrations.plugin import FULL, SHARDED, ShardingPlugin, plugin_from_environment  # noqa: E402
from fullshard.integrations.reporting import numbers_of  # noqa: E402
from fullshard.integrations.waiting_weights import is_waiting, read_waiting, wait_for, wait_for_others  # noqa: E402
from fullshard.report.recording import RunReport, report  # noqa: E402
from fullshard.state.loaded_states import accept_whole_states  # noqa: E402

__all__ = ["TESTED_TRANSFORMERS", "ReportCallback", "Seq2SeqTrainer", "Trainer", "enable", "from_pretrained"]

_FOLDER = "fullshard"  # in a checkpoint of the Trainer's: model, optimizer and scheduler, as fullshard.checkpoint saves


class _Sharding(transformers.Trainer):
    """A trainer's methods that differ once its model is sharded."""

    accelerator: Any

    @property
    def sharding(self) -> ShardingPlugin | None:
        """The options by which the model is sharded; None if it is not."""
        return self.accelerator.sharding if isinstance(self.accelerator, Accelerator) else None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.sharding is None and self.model is not None:
            read_waiting(self.model)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, one that shards if the arguments or the launcher say so.

        Raises:
            ConfigError: a key of `fsdp_config` cannot be honoured; the message names it and says why.
        """
        plugin = _plugin_of(self.args)
        if plugin is None:
            super().create_accelerator_and_postprocess()
            return
        if self.args.save_only_model and plugin.state_dict_type == SHARDED:
            raise ConfigError(
                f"save_only_model saves whole weights, and fsdp_config's state_dict_type={SHARDED} leaves them out of "
                f"checkpoints. Set state_dict_type={FULL}, or leave out save_only_model."
            )
        if self.args.optim == "adafactor":
            raise ConfigError(
                "optim=adafactor cannot be honoured: transformers' Adafactor takes means over rows and columns, and a "
                "rank has a part of them. Choose another one, such as adamw_torch."
            )
        with self._making(plugin):
            super().create_accelerator_and_postprocess()

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; `resume_from_checkpoint=True` goes on from the newest checkpoint that is complete."""
        if self.sharding is not None and resume_from_checkpoint is True:
            resume_from_checkpoint = str(_newest_complete(Path(str(self.args.output_dir))))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model to a folder that `from_pretrained` opens. Every rank calls it, and rank 0 writes.

        Checkpoints within training have no such folder in them under `state_dict_type: SHARDED_STATE_DICT`.
        """
        if self.sharding is None:
            super().save_model(output_dir, _internal_call)
            return
        if _internal_call and self.sharding.state_dict_type == SHARDED:
            return
        self._save(output_dir, state_dict=self.accelerator.get_state_dict(self.model))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    # -- private to transformers --------------------------------------------------------------------------------------
    # Undocumented parts of transformers are used only here and below. tests/test_integrations_transformers.py names the
    # version that they were checked with, and fails if one of them is gone or has other parameters.

    @contextmanager
    def _making(self, plugin: ShardingPlugin) -> Iterator[None]:
        """A context in which an `Accelerator` that transformers makes is ours, with `plugin`."""

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
        else:  # a run that began without sharding
            accept_whole_states(self._own_optimizer())
            super()._load_optimizer_and_scheduler(checkpoint_path)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        is_ours = self.sharding is not None and (Path(resume_from_checkpoint) / _FOLDER).exists()
        resumed: Any = model or self.model
        if not is_ours and is_waiting(resumed):
            wait_for_others(resumed, resume_from_checkpoint)
        elif not is_ours:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        # else: along with the optimizer, once the model is sharded

    def _load_best_model(self) -> None:
        folder = Path(str(self.state.best_model_checkpoint)) / _FOLDER
        if self.sharding is None or not folder.exists():
            super()._load_best_model()
        else:
            checkpoint.load(folder, model=self._saved_model(), random_states=False)

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        if self.sharding is None:  # a rank need not have room for a whole model
            read_waiting(model)
            super()._move_model_to_device(model, device)

    def _saved_model(self) -> nn.Module:
        return trained_part(self.accelerator.unwrap_model(self.model, keep_torch_compile=False))

    def _own_optimizer(self) -> Optimizer:
        return cast(Optimizer, cast(Any, self.optimizer).optimizer)


class Trainer(_Sharding):
    """transformers' `Trainer`; where `TrainingArguments` or `accelerate launch` says `fsdp`, this engine shards.

    Arguments and methods are those of transformers'.
    """


class Seq2SeqTrainer(_Sharding, transformers.Seq2SeqTrainer):
    """transformers' `Seq2SeqTrainer`, as `Trainer` is here."""


class ReportCallback(TrainerCallback):
    """Leaves behind the page of a training by the Trainer, with what it logs: see `fullshard.report`.

    Args:
        path: the folder; the Trainer's own output folder, if None.
    """

    def __init__(self, path: str | PathLike[str] | None = None) -> None:
        self._path = path
        self.report: RunReport | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Record from here on."""
        folder = Path(self._path or args.output_dir)
        settings = {name: value for name, value in args.to_dict().items() if isinstance(value, str | int | float)}
        self.report = report(kwargs["model"], folder, settings=settings, first_step=state.global_step + 1)

    def on_log(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Let the page show what the Trainer has logged."""
        if self.report is not None:
            self.report.log(step=max(1, state.global_step), **numbers_of(kwargs.get("logs") or {}))

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Write the page."""
        if self.report is not None:
            self.report.close()


def enable() -> None:
    """Let `transformers.Trainer` and `transformers.Seq2SeqTrainer` be those of this module, for all that import them.

    Raises:
        StateError: a trainer was derived from transformers' own before.
    """
    own = (transformers.trainer_seq2seq.Seq2SeqTrainer, Seq2SeqTrainer, _Sharding)
    early = [cls for cls in transformers.trainer.Trainer.__subclasses__() if cls not in own]
    if early and transformers.trainer.Trainer is not Trainer:
        raise StateError(
            f"{early[0].__module__}.{early[0].__qualname__} was made from transformers' Trainer before enable(), and "
            "would train without sharding. Call enable() before that module is imported."
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
    """`cls.from_pretrained(folder)`, but for the weights: they stay in their files until the model is sharded.

    Then each rank reads its own rows, so that no process ever holds more of a model than its shards and one unit. The
    Trainers here and `Accelerator.prepare` shard a model, or read all of it if nothing is to be sharded.

    Args:
        cls: a model class of transformers, such as `AutoModelForCausalLM`.
        folder: with `config.json` and safetensors files, as `save_pretrained` writes it.
        dtype: of the parameters; that of `config.json`, if None.
        rename: gives the FQN for a name in the files, or None to leave it out.
        options: replace values of the configuration.

    Raises:
        ConfigError: `folder` is none, or has no configuration; or transformers computes the weights of such a model
            from those in files, and does not only rename or merge them; or an option is none of the configuration's.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"from_pretrained: {folder} is no folder with a config.json and safetensors files. Download the model, or "
            "let save_pretrained write one."
        )
    config, unknown = transformers.AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **options)
    if unknown:
        raise ConfigError(
            f"from_pretrained: {', '.join(unknown)}: there is no such value in the configuration of "
            f"{config.model_type}. Only such can be given; transformers' own from_pretrained knows other options."
        )
    chosen: torch.dtype | None = dtype or config.dtype
    with accelerate.init_empty_weights(include_buffers=False):  # buffers that files do not hold are computed
        model = _build(cls, config, chosen)
    merge = None
    if rename is None and (conversions := _conversions(model)):
        rename, merge = conversions.rename, conversions.merge
    _raise_dtypes(model, chosen)
    model.tie_weights()
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    wait_for(model, folder, rename, merge)
    return model.eval()


# Private to transformers, too, and in the same test.


def _build(cls: Any, config: Any, dtype: torch.dtype | None) -> Any:
    """A model of class `cls`: an automatic one chooses by the configuration."""
    return (cls.from_config if hasattr(cls, "from_config") else cls._from_config)(config, dtype=dtype)


class _Conversions:
    """How transformers makes the weights of a model of those in files: by other names, and merged, as of experts.

    Args:
        model: for errors, and for what it leaves out.
        transforms: transformers' own.

    Raises:
        ConfigError: it does anything else with them.
    """

    def __init__(self, model: Any, transforms: Sequence[Any]) -> None:
        model_type = model.config.model_type
        self._left_out = list(model._keys_to_ignore_on_load_unexpected or ())
        self._made: set[str] = set()  # names of what is merged
        self._renamings = [transform for transform in transforms if isinstance(transform, loading.WeightRenaming)]
        self._converters = [transform for transform in transforms if not isinstance(transform, loading.WeightRenaming)]
        for converter in self._converters:
            kinds = [type(operation) for operation in getattr(converter, "operations", [None])]
            if kinds not in ([loading.MergeModulelist], [loading.MergeModulelist, loading.Concatenate]) or (
                converter.operations[0].dim != 0
            ):
                names = ", ".join(kind.__name__ for kind in kinds)
                raise ConfigError(
                    f"from_pretrained: transformers computes the weights of {model_type} models from those in files "
                    f"({names}), so a rank cannot read its own rows. Use its own from_pretrained, with "
                    "cpu_ram_efficient_loading in fsdp_config to read them on one rank only; or pass rename= where "
                    "names are all that differs."
                )

    def rename(self, name: str) -> str | None:
        """The FQN of a tensor that is in the files as it is in the model, or that is merged; None if it is left out."""
        if name in self._made:
            return name
        fqn = str(loading.rename_source_key(name, self._renamings, [])[0])
        return None if any(re.search(pattern, fqn) for pattern in self._left_out) else fqn

    def merge(self, names: Collection[str]) -> dict[str, Merged]:
        """The tensors that are made of several of `names`."""
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
    """How `model` is made of what is in files; None if that is the same."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    transforms = get_model_conversion_mapping(model, add_legacy=False)
    return _Conversions(model, transforms) if transforms else None


def _raise_dtypes(model: Any, dtype: torch.dtype | None) -> None:
    """Keep the modules in float32 for which the model's authors ask it, if the rest has fewer digits."""
    for pattern, wide in model._get_dtype_plan(dtype).items():
        for name, param in model.named_parameters():
            if pattern in name:
                param.data = param.data.to(wide)


def _plugin_of(args: Any) -> ShardingPlugin | None:
    """The options by which to shard the model: those of the arguments, or else of the launcher."""
    if not args.fsdp:
        return plugin_from_environment()
    return ShardingPlugin.from_config(_said(args.fsdp_config), state_dict_type=FULL)


def _said(config: dict[str, Any]) -> dict[str, Any]:
    """`fsdp_config` without what `TrainingArguments` adds to it by itself."""
    return {key: value for key, value in config.items() if not (key == "min_num_params" and value == 0)}


def _newest_complete(folder: Path) -> Path:
    """The newest of the Trainer's checkpoints in `folder` that was not cut off while it was written.

    Raises:
        ConfigError: there is none.
    """
    found = [path for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.name.rpartition("-")[2].isdigit()]
    newest = sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    for path in newest:
        if _is_complete(path):
            return path
    raise ConfigError(
        f"resume_from_checkpoint=True: {folder} has no complete checkpoint, but {len(newest)} others. Start anew."
    )


def _is_complete(path: Path) -> bool:
    try:
        TrainerState.load_from_json(str(path / "trainer_state.json"))  # which the Trainer writes last
    except (OSError, ValueError, TypeError):
        return False
    return not (path / _FOLDER).exists() or checkpoint.latest(path / _FOLDER) is not None
