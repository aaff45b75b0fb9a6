"""Dry runs of a program's steps on a model of a few blocks."""

from __future__ import annotations

import gc
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fullshard import dry
from fullshard._dry_compat import data_dependent_errors
from fullshard.dry.run import fused_adamw
from fullshard.dry.watch import EndlessLoopError
from fullshard.engine.hooks import without_sync
from fullshard.engine.placements import fractions_of
from fullshard.engine.registry import units_in
from fullshard.errors import ConfigError
from fullshard.optim.clipping import ShardedGradScaler, clip_grad_norm_
from fullshard.planner.candidates import Cluster, Program, sharded
from fullshard.planner.shorten import shortened
from fullshard.planner.subject import Subject, copy_with_memory, library_line, user_line
from fullshard.planner.tapes import Tapes
from fullshard.tape.recorder import Origin, Phase, note_origin
from fullshard.tape.tape import Entry, Operation

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]

_BETWEEN = Origin("", Phase.IDLE)
_MEASURE = "Add --measure to run steps on real tensors, in this machine's memory."
_READS_VALUES = ("aten._local_scalar_dense", "aten.is_nonzero", "aten.equal")


def take_steps(
    subject: Subject,
    cluster: Cluster,
    program: Program,
    lengths: dict[str, int],
    rows_of_steps: Sequence[int],
    max_norm: float | None,
    make_optimizer: MakeOptimizer | None,
) -> Tapes:
    """Run one step for each of the given numbers of rows per microbatch. In the first step the order is not known yet.

    If the optimizer runs on the CPU, the work of a step is done in the next step's forward, except for the first step.
    So one more step precedes the second one.
    """
    steps = list(rows_of_steps if subject.any_rows else (1, 1))
    if program.cpu:
        steps.insert(1, steps[0])
    microbatches = 2 if program.accumulates else 1
    streams: Any = "gpu" if cluster.hardware.kind == "gpu" else "cpu"
    gc.freeze()  # garbage collection then skips existing objects: scanning them takes as long as a step
    with (
        dry.world(cluster.world, ranks_per_host=cluster.per_host),
        dry.taped(streams=streams, values=subject.values) as tape,
    ):
        try:
            model = _made(subject, cluster, program, lengths)
            params = [param for param in model.parameters() if param.requires_grad]
            optimizer: Any = (make_optimizer or fused_adamw)(params)
            if not isinstance(optimizer, torch.optim.Optimizer):
                found = type(optimizer).__name__
                raise ConfigError(f"the function of --optimizer returned {found}, but must return an optimizer")
            scaler = ShardedGradScaler("cpu", enabled=program.scales_loss)  # tensors are on the CPU in a dry run
            begins = []
            for step, rows in enumerate(steps):
                note_origin(_BETWEEN)
                begins.append(len(tape.entries))
                _step(subject, program, model, optimizer, scaler, rows, microbatches if step else 1, max_norm)
        except ConfigError as error:
            raise _in_words(subject, error) from error
        if program.cpu:
            del begins[1]
        begins += [len(tape.entries)] * (4 - len(begins))
    one = tape.entries[begins[1] : begins[2]]
    two = tape.entries[begins[2] : begins[3]] or one
    if not subject.values:
        _check_reads_no_values(subject, cluster, lengths, one)
    return Tapes(lengths, tape, begins, one, two, rows_of_steps[1] if subject.any_rows else 1)


def fractions_on_cpu(subject: Subject, cluster: Cluster, program: Program) -> list[float]:
    """Return the fractions of the optimizer state at which one more unit is updated on the CPU, up to all of it."""
    with dry.world(cluster.world, ranks_per_host=cluster.per_host), dry.taped(values=subject.values):
        return fractions_of(units_in(_made(subject, cluster, program, {})))


def _made(subject: Subject, cluster: Cluster, program: Program, lengths: dict[str, int]) -> nn.Module:
    if subject.make_sharded is not None:
        return subject.make_sharded()
    return sharded(_short_copy(subject, lengths), program, cluster)


def _short_copy(subject: Subject, lengths: dict[str, int]) -> nn.Module:
    """Return a copy of the model with lists of the given lengths."""
    assert subject.model is not None
    undo = shortened(subject.model, lengths)
    try:
        return copy_with_memory(subject.model, values=subject.values)
    finally:
        for blocks, remaining in undo:
            blocks.extend(remaining)


def _step(
    subject: Subject,
    program: Program,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: ShardedGradScaler,
    rows: int,
    microbatches: int,
    max_norm: float | None,
) -> None:
    for number in range(microbatches):
        with ExitStack() as stack:
            if number < microbatches - 1 and not program.syncs_each:
                stack.enter_context(without_sync(units_in(model)))
            scaler.scale(subject.loss(model, subject.make_batch(rows))).backward()
    if max_norm is not None:
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def _in_words(subject: Subject, error: ConfigError) -> ConfigError:
    """Return `error` with the name of the model, and with advice if values are missing."""
    cause = error.__cause__
    if isinstance(cause, data_dependent_errors):
        return ConfigError(
            f"{subject.name}: cannot be planned without values{user_line(cause) or user_line(error)}: the result of "
            f"{cause.func} depends on them. {_MEASURE}"
        )
    if isinstance(error, EndlessLoopError):
        return ConfigError(f"{subject.name}: {error.found} {_MEASURE}")
    return ConfigError(f"{subject.name}: {error}")


def users_mistake(subject: Subject, error: Exception) -> ConfigError | None:
    """Return an error that names the line of user or library code that raised `error`.

    None if `error` does not come from such a line.
    """
    where = user_line(error) or library_line(error)
    if not where:
        return None
    stated = " ".join(str(error).split()).rstrip(".")
    remedy = "" if subject.values else f" It may need the values of real tensors. {_MEASURE}"
    return ConfigError(f"{subject.name}: cannot take a step{where}: {type(error).__name__}: {stated}.{remedy}")


def _check_reads_no_values(subject: Subject, cluster: Cluster, lengths: dict[str, int], step: Sequence[Entry]) -> None:
    """Raise if the model reads values in forward, because its operations may depend on these, which do not exist."""
    for entry in step:
        if isinstance(entry, Operation) and entry.name in _READS_VALUES and entry.origin.phase is Phase.FORWARD:
            line = _line_that_reads(subject, cluster, lengths)
            if line is None:
                return
            raise ConfigError(
                f"{subject.name}: its forward reads a value{line} with .item(), bool() or a similar call "
                f"({entry.name}), and its operations may depend on it. {_MEASURE}"
            )


class _Reads(TorchFunctionMode):
    """A mode that records the first user line that reads the value of a tensor.

    Checks in transformers whether a mask excludes any token do not count: in a dry run, they see a full batch.
    """

    line: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = getattr(func, "__name__", "") in ("item", "tolist", "__bool__", "__int__", "__float__")
        if reads and self.line is None and "mask" not in _asking_file():
            self.line = user_line(None)
        return func(*args, **(kwargs or {}))


def _asking_file() -> str:
    """Return the name of the calling file if it belongs to transformers."""
    files = (Path(frame.filename) for frame in reversed(traceback.extract_stack()))
    asking = next((file for file in files if "torch" not in file.parts and file != Path(__file__)), Path())
    return asking.name if "transformers" in asking.parts else ""


def _line_that_reads(subject: Subject, cluster: Cluster, lengths: dict[str, int]) -> str | None:
    """Return the line that reads a value, if the model can be run separately; None if it is not in the model's code."""
    if subject.model is None:
        return ""
    if subject.model not in _reads:  # the same for all sketches
        with dry.world(cluster.world, ranks_per_host=cluster.per_host), dry.taped(), _Reads() as reads:
            subject.loss(_short_copy(subject, lengths), subject.make_batch(1))
        _reads[subject.model] = reads.line
    return _reads[subject.model]


_reads: weakref.WeakKeyDictionary[nn.Module, str | None] = weakref.WeakKeyDictionary()
