"""The model to plan for, on the meta device, with its batches and its loss. It uses memory only with --measure."""

from __future__ import annotations

import copy
import gc
import inspect
import json
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fullshard import _compat, _dry_compat, _fakes, dry
from fullshard.dry.run import own_loss
from fullshard.errors import ConfigError, StateError
from fullshard.policy.arguments import mismatch
from fullshard.regular_files import CONFIG_BYTES, UNPARSED, read_text
from fullshard.testing.parity.batches import shapes_of
from fullshard.testing.parity.named import function_named
from fullshard.train.model import GPT, MOST_LAYERS, VOCABULARY, byte_losses, shape_of
from fullshard.train.settings import ModelSettings

Loss = Callable[[nn.Module, Any], Tensor]
_MOST_SEQ = 4096  # limit for configurations that allow more
_STORED = torch.float32  # as in the code to paste; a configuration can name the dtype of a checkpoint


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to plan for."""

    name: str  # the name for display
    # The plain model, on the meta device, or with values if `values`. None if `make_sharded` is given.
    model: nn.Module | None
    make_batch: Callable[[int], Any]  # creates one microbatch with a number of rows
    loss: Loss  # computes the loss from a model and a batch
    seq: int | None = None  # tokens per row; None if rows are not token ids
    values: bool = False  # whether steps run on real tensors, for operations that depend on values
    # Creates and shards the model, if the user's function does so; its sharding is not changed.
    make_sharded: Callable[[], nn.Module] | None = None
    any_rows: bool = True  # whether `make_batch` uses the number of rows. Otherwise microbatches have one row
    paste: tuple[str, ...] = ("model = make_model()",)  # how the code to paste creates a plain model
    # The optimizer as an expression, preceded by the line of its import, if any.
    paste_optimizer: tuple[str, str] = ("", "torch.optim.AdamW(model.parameters(), fused=True)")
    # Options of `fullshard train` that select the model; empty if it is not the trainer's.
    train_flags: tuple[str, ...] = ()
    is_transformers: bool = False  # whether the Trainer of transformers trains it as planned
    notes: tuple[str, ...] = field(default=())

    def with_optimizer(self, spec: str) -> Subject:
        """Return a copy whose code to paste uses the optimizer function named `spec`. Only Python supports this."""
        expression = f"{spec.rpartition(':')[2]}([param for param in model.parameters() if param.requires_grad])"
        return replace(self, paste_optimizer=(_import_line(spec), expression), train_flags=(), is_transformers=False)

    @property
    def unit(self) -> str:
        """The unit of throughput: tokens or samples."""
        return "samples" if self.seq is None else "tokens"

    @property
    def per_row(self) -> int:
        """The number of units per row."""
        return self.seq or 1


def named_subject(model: str, batch: str | None, loss: str | None, *, measure: bool = False) -> Subject:
    """Return the subject for user functions, named as `package.module:function` or `file.py:function`.

    Args:
        model: A function without arguments that returns the model.
        batch: A function of the number of rows that returns a microbatch; one without arguments returns a row.
        loss: A function of model and batch. If None, the model returns the loss, an object with the loss as `.loss`, or
            a tensor whose mean is the loss.
        measure: Whether steps run on real tensors.
    """
    if batch is None:
        raise ConfigError("--batch is missing. Pass a function of the number of rows, such as --batch my:make_batch.")
    make_model, make_batch = function_named(model, "--model"), function_named(batch, "--batch")
    made, make_sharded = _plain_or_sharded(make_model, model, measure)
    any_rows = mismatch(make_batch, (1,), {}) is None
    if any_rows:
        _check_heeds_rows(make_batch, batch)
    given = make_batch if any_rows else lambda rows: make_batch()
    notes = (
        ()
        if any_rows
        else ((f"{batch} does not take a number of rows: each microbatch is counted as one row, one sample."),)
    )
    return Subject(
        name=model,
        model=made,
        make_batch=given,
        loss=_loss_named(loss) if loss else own_loss,
        seq=_tokens_of(given),
        values=measure,
        make_sharded=make_sharded,
        any_rows=any_rows,
        paste=(_import_line(model), "", f"model = {model.rpartition(':')[2]}()"),
        is_transformers=type(made).__module__.startswith("transformers."),
        notes=notes,
    )


def gpt_subject(size: ModelSettings, seq: int) -> Subject:
    """Return the trainer's GPT with its loss."""
    shape = shape_of(size)
    with torch.device("meta"):
        model = GPT(shape)
    given = {name: getattr(size, name) for name in ("layers", "heads", "width", "mlp_ratio")}
    flags = [f"--size {size.size}", f"--seq {seq}"]
    flags += [f"--{name.replace('_', '-')} {value}" for name, value in given.items() if value is not None]
    return Subject(
        name=f"the trainer's GPT, {size.size}",
        model=model,
        make_batch=lambda rows: torch.randint(0, VOCABULARY, (rows, seq)),
        loss=lambda model, batch: byte_losses(model(batch), batch).mean(),
        seq=seq,
        paste=(
            "from fullshard.train.model import GPT, shape_of",
            "from fullshard.train.settings import ModelSettings",
            "",
            f"model = GPT(shape_of(ModelSettings({_arguments({'size': size.size, **given})})))",
        ),
        train_flags=tuple(flags),
    )


def transformers_subject(config: Path, seq: int | None) -> Subject:
    """Return a transformers model that a `config.json` describes, trained on all tokens of its rows."""
    try:
        with _uncollected():
            import transformers
    except ImportError as error:
        raise ConfigError("--config needs transformers: pip install 'fullshard[transformers]'.") from error
    config = config / "config.json" if config.is_dir() else config
    try:
        stated = json.loads(read_text(config, limit=CONFIG_BYTES))
    except (OSError, *UNPARSED) as error:
        raise ConfigError(
            f"--config {config}: cannot be read as JSON ({error}). Pass the config.json of a model."
        ) from error
    kind = stated.pop("model_type", None) if isinstance(stated, dict) else None
    if kind is None:
        raise ConfigError(f"--config {config}: has no model_type, so it is not a transformers configuration.")
    for name, value in _numbers_of_layers(stated):
        if value > MOST_LAYERS:
            raise ConfigError(f"--config {config}: {name} is {value}. Plans support at most {MOST_LAYERS} layers.")
    try:
        described = transformers.AutoConfig.for_model(kind, **stated)
        described.use_cache = False
        names = [name for name in stated.get("architectures") or () if hasattr(transformers, name)]
        with _uncollected():  # its modules are imported lazily
            made_by: Any = getattr(transformers, names[0]) if names else transformers.AutoModelForCausalLM
        with torch.device("meta"):
            model: nn.Module = made_by(described) if names else made_by.from_config(described, dtype=_STORED)
    except Exception as error:
        raise ConfigError(f"--config {config}: transformers cannot create a model from it: {_line(error)}") from error
    model.train()
    longest = getattr(described, "max_position_embeddings", _MOST_SEQ)
    if seq is not None and seq > longest:
        raise ConfigError(f"--seq {seq}: the model supports at most {longest} tokens. Use that, or less.")
    length = seq or min(_MOST_SEQ, longest)

    def make_batch(rows: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, described.vocab_size, (rows, length))
        return {"input_ids": tokens, "labels": tokens}

    name = type(model).__name__
    return Subject(
        name=f"{name} of {config}",
        model=model,
        make_batch=make_batch,
        loss=own_loss,
        seq=length,
        paste=(
            f"from transformers import AutoConfig, {name}",
            "",
            f'model = {name}(AutoConfig.from_pretrained("{config}", use_cache=False))',
        ),
        is_transformers=True,
    )


def _numbers_of_layers(stated: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the numbers of layers in a transformers configuration and in those within it, by name."""
    for name, value in stated.items():
        if isinstance(value, Mapping):
            yield from _numbers_of_layers(value)
        elif isinstance(value, int) and "layer" in name:
            yield name, value


@contextmanager
def _uncollected() -> Iterator[None]:
    """Context manager without garbage collection, for imports, which create many objects but no garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def copy_with_memory(model: nn.Module, *, values: bool) -> nn.Module:
    """Return a copy of a meta-device model on the CPU: on fake tensors within a dry run. Tied weights stay tied.

    With `values` it is a plain copy.
    """
    if values:
        return copy.deepcopy(model)
    memo: dict[int, Any] = {}
    for module in model.modules():
        held = [*module._parameters.values(), *module._buffers.values(), *vars(module).values()]
        for tensor in held:
            if isinstance(tensor, Tensor) and id(tensor) not in memo:
                memo[id(tensor)] = _like(tensor)
    return copy.deepcopy(model, memo)


def _like(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def user_line(error: BaseException | None) -> str:
    """Return the last line of user files in the traceback of `error`: " (train.py:12: y = x.item())", or "".

    If `error` is None, use the current stack.
    """
    frames = traceback.extract_stack() if error is None else traceback.extract_tb(error.__traceback__)
    own = [item for item in _without_torch(frames) if not _is_own(item) and "site-packages" not in item.filename]
    return _stated(own[-1]) if own else ""


def library_line(error: BaseException) -> str:
    """Return the line of a library, such as transformers, that raised `error` itself or by a call of torch.

    The format is that of `user_line`; empty if there is none.
    """
    others = [item for item in _without_torch(traceback.extract_tb(error.__traceback__)) if not _watches(item)]
    return _stated(others[-1]) if others and not _is_own(others[-1]) else ""


def _stated(frame: traceback.FrameSummary) -> str:
    return f" ({frame.filename}:{frame.lineno}: {frame.line})"


def _watches(frame: traceback.FrameSummary) -> bool:
    """Return True if the frame belongs to the dry run, which intercepts all torch operations."""
    file = Path(frame.filename)
    others = (str(module.__file__) for module in (_compat, _dry_compat, _fakes))
    return file.parent == Path(dry.__file__).parent or frame.filename in others


def _is_own(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(str(Path(__file__).parent.parent))


def _without_torch(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the frames that belong neither to torch nor to Python."""
    torchs, pythons = str(Path(torch.__file__).parent), str(Path(inspect.__file__).parent)
    others = [frame for frame in frames if not frame.filename.startswith((torchs, "<frozen", "<string"))]
    return [other for other in others if not other.filename.startswith(pythons) or "site-packages" in other.filename]


def _plain_or_sharded(
    make_model: Callable[[], Any], name: str, measure: bool
) -> tuple[nn.Module | None, Callable[[], nn.Module] | None]:
    """Return the plain model, or the function if it shards the model. It does if it requests a process group."""
    try:
        with nullcontext() if measure else torch.device("meta"):
            made = make_model()
    except StateError:
        return None, make_model
    except ConfigError:
        raise
    except Exception as error:
        where = user_line(error)
        remedy = (
            ""
            if measure
            else (" If it needs values, add --measure to create it with real tensors, in this machine's memory.")
        )
        on = "" if measure else " on the meta device"
        raise ConfigError(
            f"--model {name}: cannot be created{on}{where}: {type(error).__name__}: {_line(error)}.{remedy}"
        ) from error
    if not isinstance(made, nn.Module):
        raise ConfigError(f"--model {name}: returned {type(made).__name__}, but must return the model, an nn.Module.")
    if not any(param.requires_grad for param in made.parameters()):
        raise ConfigError(f"--model {name}: returned a model without trained parameters.")
    return made, None


def _loss_named(spec: str) -> Loss:
    found: Loss = function_named(spec, "--loss")
    if (why := mismatch(found, (None, None), {})) is not None:
        raise ConfigError(f"--loss {spec}: {why}. It is called with the model and a batch, and returns the loss.")
    return found


def _check_heeds_rows(make_batch: Callable[[int], Any], name: str) -> None:
    """Raise an error if a function returns the same shapes for one row and for two: predictions would be wrong.

    Raises:
        ConfigError: The shapes are the same.
    """
    one, two = (shapes_of(_batch_on_meta(make_batch, rows)) for rows in (1, 2))
    if one and one == two:
        raise ConfigError(
            f"--batch {name}: returns the same shapes for 1 row and for 2 rows: {', '.join(map(str, one))}. Its "
            "argument is the number of rows. Return that number of rows, or take no argument and return one row."
        )


def _batch_on_meta(make_batch: Callable[[int], Any], rows: int) -> Any:
    """Return a batch without values; None if that fails, so that the dry run reports the error."""
    with torch.device("meta"):
        try:
            return make_batch(rows)
        except Exception:
            return None


def _tokens_of(make_batch: Callable[[int], Any]) -> int | None:
    """Return the token ids per row of a batch: the elements per row of its first tensor, if they are integers."""
    batch = _batch_on_meta(make_batch, 1)
    if isinstance(batch, Mapping):
        batch = batch.get("input_ids", next(iter(batch.values()), None))
    while isinstance(batch, tuple | list) and batch:
        batch = batch[0]
    if not isinstance(batch, Tensor) or batch.dtype != torch.int64 or batch.ndim < 2:
        return None
    return batch[0].numel()


def _import_line(spec: str) -> str:
    where, _, name = spec.rpartition(":")
    return f"from {Path(where).stem if where.endswith('.py') else where} import {name}"


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items() if value is not None)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
