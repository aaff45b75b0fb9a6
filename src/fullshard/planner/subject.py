"""What is planned for: a model on the meta device, its batches and its loss. Whatever its size, it takes no memory."""

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

from fullshard import _fakes, dry
from fullshard.errors import ConfigError, StateError
from fullshard.regular_files import CONFIG_BYTES, read_text
from fullshard.testing.parity.batches import shapes_of
from fullshard.testing.parity.named import function_named, mismatch
from fullshard.train.model import GPT, VOCABULARY, byte_losses, shape_of
from fullshard.train.settings import ModelSettings

__all__ = [
    "Subject",
    "gpt_subject",
    "library_line",
    "named_subject",
    "transformers_subject",
    "user_line",
]

Loss = Callable[[nn.Module, Any], Tensor]
_MOST_SEQ = 4096  # of a configuration that allows more, if nothing is said


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to plan for.

    Args:
        name: in words.
        model: the plain model; on the meta device, or with its values if `values`. None if `make_sharded` is there.
        make_batch: makes one microbatch of so many rows.
        loss: of a model and a batch.
        seq: tokens in a row; None if rows are no token ids.
        values: whether steps are taken on real tensors, for operations that depend on values.
        make_sharded: makes the model and shards it, where the user's function does so; nothing about that is changed.
        any_rows: whether `make_batch` heeds the number of rows. Otherwise microbatches have one row.
        paste: how the lines to paste get a plain model.
        paste_optimizer: the optimizer as an expression, behind the line that imports what it takes, if any.
        train_flags: options of `fullshard train` that name the model; empty if it is not the trainer's.
        is_transformers: whether it is a model of the transformers library.
    """

    name: str
    model: nn.Module | None
    make_batch: Callable[[int], Any]
    loss: Loss
    seq: int | None = None
    values: bool = False
    make_sharded: Callable[[], nn.Module] | None = None
    any_rows: bool = True
    paste: tuple[str, ...] = ("model = make_model()",)
    paste_optimizer: tuple[str, str] = ("", "torch.optim.AdamW(model.parameters(), fused=True)")
    train_flags: tuple[str, ...] = ()
    is_transformers: bool = False
    notes: tuple[str, ...] = field(default=())

    def with_optimizer(self, spec: str) -> Subject:
        """The same, with the lines to paste for the function that `spec` names: it is not one of the trainer's."""
        expression = f"{spec.rpartition(':')[2]}([param for param in model.parameters() if param.requires_grad])"
        return replace(self, paste_optimizer=(_import_line(spec), expression), train_flags=())

    @property
    def unit(self) -> str:
        """What is counted in a second: tokens, or rows."""
        return "samples" if self.seq is None else "tokens"

    @property
    def per_row(self) -> int:
        """How many of them a row has."""
        return self.seq or 1


def named_subject(model: str, batch: str | None, loss: str | None, *, measure: bool = False) -> Subject:
    """The subject of a user's functions, named as `package.module:function` or `file.py:function`.

    Args:
        model: a function without arguments that returns the model.
        batch: a function of the number of rows that returns a microbatch; one without arguments returns a row.
        loss: a function of model and batch. If None, what the model returns is the loss, or has it as `.loss`, or is a
            tensor whose mean is taken.
        measure: whether steps are taken on real tensors.

    Raises:
        ConfigError: a function is not there, or does something else.
    """
    if batch is None:
        raise ConfigError("--batch is missing: name a function of the number of rows, such as --batch my:make_batch.")
    make_model, make_batch = function_named(model, "--model"), function_named(batch, "--batch")
    made, make_sharded = _plain_or_sharded(make_model, model, measure)
    any_rows = _takes_rows(make_batch)
    if any_rows:
        _check_heeds_rows(make_batch, batch)
    given = make_batch if any_rows else lambda rows: make_batch()
    notes = () if any_rows else (f"{batch} takes no number of rows: microbatches have one row, taken to be a sample.",)
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
    """The trainer's GPT, with its loss.

    Raises:
        ConfigError: as `shape_of`.
    """
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
    """A model of the transformers library that a `config.json` describes, trained on all tokens of its rows.

    Raises:
        ConfigError: the file is not there, or describes no such model; transformers is not installed.
    """
    try:
        with _uncollected():
            import transformers
    except ImportError as error:
        raise ConfigError("--config needs transformers: pip install 'fullshard[transformers]'.") from error
    config = config / "config.json" if config.is_dir() else config
    try:
        said = json.loads(read_text(config, limit=CONFIG_BYTES))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--config {config}: cannot be read as JSON ({error}). Name a model's config.json."
        ) from error
    kind = said.pop("model_type", None) if isinstance(said, dict) else None
    if kind is None:
        raise ConfigError(f"--config {config}: says no model_type, so it is no configuration of transformers.")
    try:
        described = transformers.AutoConfig.for_model(kind, **said)
        described.use_cache = False
        names = [name for name in said.get("architectures") or () if hasattr(transformers, name)]
        with _uncollected():  # its modules are imported when they are asked for
            made_by: Any = getattr(transformers, names[0]) if names else transformers.AutoModelForCausalLM
        with torch.device("meta"):
            model: nn.Module = made_by(described) if names else made_by.from_config(described)
    except Exception as error:
        raise ConfigError(f"--config {config}: transformers makes no model of it: {_line(error)}") from error
    model.train()
    longest = getattr(described, "max_position_embeddings", _MOST_SEQ)
    if seq is not None and seq > longest:
        raise ConfigError(f"--seq {seq}: the model takes {longest} tokens at most. Take that, or less.")
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


@contextmanager
def _uncollected() -> Iterator[None]:
    """A context for imports, which make no garbage and many objects that would be looked through again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that `model` itself returns for `batch`: a mapping or tuple of its arguments, or its only argument.

    Raises:
        ConfigError: it takes other arguments, or returns something else.
    """
    name = type(model).__name__.removeprefix("FSDP")
    named = dict(batch) if isinstance(batch, Mapping) else {}
    given = () if named else tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    if (why := mismatch(model.forward, given, named)) is not None:
        raise ConfigError(
            f"{name}.forward does not take a batch of type {type(batch).__name__}: {why}. The items of a tuple or "
            "list are its arguments, those of a mapping its named ones. Return such a batch, or name a function of "
            "model and batch by --loss my_training:loss."
        )
    returned = model(*given, **named)
    found = getattr(returned, "loss", returned)
    if not isinstance(found, Tensor):
        raise ConfigError(
            f"{name} returned {type(returned).__name__}, which is no tensor and has no loss. Name a function of model "
            "and batch by --loss my_training:loss."
        )
    return found if found.ndim == 0 else found.float().mean()


def copy_with_memory(model: nn.Module, *, values: bool) -> nn.Module:
    """A copy of a model of the meta device, on the CPU: within a dry run, on fake tensors. Tied weights stay tied.

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
    """The last line of the user's own files in the traceback of `error`: " (train.py:12: y = x.item())", or nothing.

    If None, in the calls that are under way.
    """
    frames = traceback.extract_stack() if error is None else traceback.extract_tb(error.__traceback__)
    own = [item for item in _without_torch(frames) if not _is_ours(item) and "site-packages" not in item.filename]
    return _said(own[-1]) if own else ""


def library_line(error: BaseException) -> str:
    """The line of a library, such as transformers, that has raised `error` itself or by a call of torch's, written as
    that of `user_line`; nothing if there is none.
    """
    others = [item for item in _without_torch(traceback.extract_tb(error.__traceback__)) if not _watches(item)]
    return _said(others[-1]) if others and not _is_ours(others[-1]) else ""


def _said(frame: traceback.FrameSummary) -> str:
    return f" ({frame.filename}:{frame.lineno}: {frame.line})"


def _watches(frame: traceback.FrameSummary) -> bool:
    """True if it is of a dry run, through which all of torch's operations go."""
    file = Path(frame.filename)
    return file.parent == Path(dry.__file__).parent or file == Path(_fakes.__file__)


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(str(Path(__file__).parent.parent))


def _without_torch(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Those that are neither torch's nor Python's."""
    torchs, pythons = str(Path(torch.__file__).parent), str(Path(inspect.__file__).parent)
    others = [frame for frame in frames if not frame.filename.startswith((torchs, "<frozen", "<string"))]
    return [other for other in others if not other.filename.startswith(pythons) or "site-packages" in other.filename]


def _plain_or_sharded(
    make_model: Callable[[], Any], name: str, measure: bool
) -> tuple[nn.Module | None, Callable[[], nn.Module] | None]:
    """The plain model, or the function that makes a sharded one: known by its asking for a process group."""
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
            "" if measure else " If it needs values, add --measure: it is made with them, in this machine's memory."
        )
        on = "" if measure else " on the meta device"
        raise ConfigError(
            f"--model {name}: cannot be made{on}{where}: {type(error).__name__}: {_line(error)}.{remedy}"
        ) from error
    if not isinstance(made, nn.Module):
        raise ConfigError(f"--model {name}: returned {type(made).__name__}, but must return the model, an nn.Module.")
    if not any(param.requires_grad for param in made.parameters()):
        raise ConfigError(f"--model {name}: returned a model without trained parameters. There is nothing to plan.")
    return made, None


def _loss_named(spec: str) -> Loss:
    found: Loss = function_named(spec, "--loss")
    if (why := mismatch(found, (None, None), {})) is not None:
        raise ConfigError(f"--loss {spec}: {why}. It is called with the model and a batch, and returns the loss.")
    return found


def _takes_rows(make_batch: Callable[..., Any]) -> bool:
    return mismatch(make_batch, (1,), {}) is None


def _check_heeds_rows(make_batch: Callable[[int], Any], name: str) -> None:
    """Refuse a function that makes as much of one row as of two: what is said of rows would be wrong.

    Raises:
        ConfigError: it does.
    """
    one, two = (shapes_of(_batch_on_meta(make_batch, rows)) for rows in (1, 2))
    if one and one == two:
        raise ConfigError(
            f"--batch {name}: makes the same for 1 row and for 2, tensors of {', '.join(map(str, one))}. Its argument "
            "is the number of rows: return so many, or take no argument, if what it returns is one row."
        )


def _batch_on_meta(make_batch: Callable[[int], Any], rows: int) -> Any:
    """A batch without values; None if it cannot be made so, and then the dry run tells what is wrong."""
    with torch.device("meta"):
        try:
            return make_batch(rows)
        except Exception:
            return None


def _tokens_of(make_batch: Callable[[int], Any]) -> int | None:
    """Token ids in a row of a batch: the numbers in a row of its first tensor, if those are whole numbers."""
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
