"""Recording of training runs, in any training loop."""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, astuple
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fullshard.device.accelerator import accelerator_for
from fullshard.device.streams import STREAMS
from fullshard.device.transfers import STATES, Transfers, transfers
from fullshard.disk.pace import Moved, paces
from fullshard.engine.nested import tensors_in
from fullshard.engine.registry import units_in
from fullshard.errors import ConfigError
from fullshard.plan.explain import offload_lines
from fullshard.plan.memory_used import memory_for_a_rank
from fullshard.plan.stored import measure_tiers
from fullshard.report.counters import HardwareCounters
from fullshard.report.destinations import DESTINATIONS, check_destination
from fullshard.report.facts import facts_of, link_bytes_per_s, rank_facts, shards_of, strategy_of, units_of
from fullshard.report.memory_watch import MemoryWatch, can_be_watched
from fullshard.report.rank_file import RankFile, finite, is_closed, path_of
from fullshard.report.reading import read_run
from fullshard.report.run import COUNTERS, PARTS, WhatIf
from fullshard.report.running_out import MemoryGuard, holders_text, is_out_of_memory
from fullshard.report.steps import PAUSE, WATCHED_STEP, StepRecorder, StepTaken, UnitCounts, is_kept_whole
from fullshard.report.usage import UsageMeter
from fullshard.tape.recorder import Event, recording_to

_log = logging.getLogger(__name__)
T = TypeVar("T")

_LINES = 4096  # the number of `step` lines after which a line covers twice as many steps
_UNITS_FIRST_S = 5.0  # seconds until the first `units` line
_MOST_SPANS = 20_000
_PATIENCE_S = 5.0  # maximum wait for the last lines of other ranks


def report(
    model: nn.Module,
    path: str | PathLike[str],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    settings: Mapping[str, Any] | None = None,
    first_step: int = 1,
    log_to: str | None = None,
) -> RunReport:
    """Record the training of `model`, and write a page that shows where time and memory went.

        with fullshard.report(model, "runs/x") as report:
            for batch in report.batches(loader):
                loss = model(batch).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                report.log(loss=loss)

    Call it on every rank once the model is sharded. Each rank writes its part of the record to a small separate file in
    the folder `path`/report, which all hosts should be able to access. Ranks do not communicate. The first rank writes
    the page when the context or the process ends, or on `close()`, after it waits up to 5 s for the other ranks.

    A step ends with the last optimizer step before the next forward. The time between the two counts as input, unless
    the loop declares something else: see `RunReport.doing`.

    Args:
        model: The sharded root.
        path: The folder of the run, which is created if it does not exist.
        optimizer: The optimizer, if it is not a torch optimizer. Torch optimizers are detected automatically.
        settings: Names and values that distinguish this run from other runs.
        first_step: The number of the first step. If it is above 1, an existing record is continued.
        log_to: "tensorboard", "wandb" or "mlflow": also log the numbers of each step with that library.

    Raises:
        ConfigError: The model has no units, `first_step` is below 1, or `log_to` is unknown.
        MissingLibraryError: The library of `log_to` is not installed.
    """
    if not units_in(model):
        raise ConfigError(f"{type(model).__name__} has no units, so nothing can be reported. Call fully_shard first.")
    if first_step < 1:
        raise ConfigError(f"report(first_step={first_step}): step numbers start at 1.")
    if log_to is not None:
        check_destination(log_to)
    return RunReport(model, Path(path), [optimizer] if optimizer else [], settings or {}, first_step, log_to)


class RunReport:
    """The active record of this rank. Created by `report`, and used as a context manager."""

    def __init__(
        self,
        model: nn.Module,
        path: Path,
        optimizers: Sequence[torch.optim.Optimizer],
        settings: Mapping[str, Any],
        first_step: int,
        log_to: str | None,
    ) -> None:
        self.path = path
        self.page: Path | None = None
        """The path of the page once it is written; only on the first rank."""
        self._model, self._device = model, units_in(model)[0].device
        self._optimizers = list(optimizers)
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self._first_step = first_step
        self._predicted: Sequence[tuple[str, int]] | None = None
        self._watch: MemoryWatch | None = None
        self._units: dict[str, UnitCounts] = {}
        self._host_waits: dict[str, tuple[int, float]] = {}
        self._disks: dict[Path, Moved] = {}  # bytes moved before steps were counted
        self._transferred: Transfers = {}  # likewise
        self._stored_bytes: dict[str, dict[str, int]] = {}  # between steps, by tier and state
        self._counted = 0  # steps in the totals
        self._best_bytes_per_s = 0.0
        self._units_every_s = _UNITS_FIRST_S
        self._units_due = time.monotonic() + _UNITS_FIRST_S
        self._group: list[StepTaken] = []  # steps that form one line
        self._lines, self._group_size = 0, 1
        self._output_nbytes = 0
        # Logged numbers by step. Their tensors have not been read yet.
        self._unread: dict[int, dict[str, float | Tensor]] = {}
        self._logged: dict[str, list[float]] = {}  # numbers logged for the steps of the next line
        self._is_open = True
        self._guard = MemoryGuard(model, self._optimizers, self._device)
        self._file = RankFile(path_of(path, self._rank), goes_on=first_step > 1)
        texts = {name: str(value) for name, value in settings.items()}
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", self._world))
        self._file.add(
            "start",
            world=self._world,
            name=path.name,
            rank=rank_facts(self._device),
            strategy=strategy_of(model),
            facts=facts_of(model) if self._rank == 0 else {},
            settings=texts,
            link_bytes_per_s=link_bytes_per_s(self._device),
            limit=memory_for_a_rank(self._device, local_world),
            first_step=first_step,
        )
        self._file.flush()
        self._destination = DESTINATIONS[log_to](path, texts) if log_to is not None and self._rank == 0 else None
        self._counters = HardwareCounters(self._device)
        usage = UsageMeter(self._device)
        self._steps = StepRecorder(
            accelerator_for(self._device),
            usage,
            self._after_step,
            self._before_step,
            self._observed,
            first=first_step,
        )
        self._stack = ExitStack()
        self._stack.callback(usage.close)
        self._stack.enter_context(recording_to(self._steps))
        hooks = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]
        self._output_hook = model.register_forward_hook(self._after_forward)
        for hook in (*hooks, self._output_hook):
            self._stack.callback(hook.remove)
        atexit.register(self.close)
        self._stack.callback(atexit.unregister, self.close)

    # -- from the loop -------------------------------------------------------------------------------------------------

    def log(self, step: int | None = None, **numbers: float | Tensor) -> None:
        """Log numbers of a step by name, to show on the page: loss, gradient_norm, learning_rate, tokens_per_s, ...

        Tensors of the current step are read once the device has completed the step, so that nothing waits for them.

        Args:
            step: The number of the step. If None, it is the current step, or the last one if none is in progress.
            **numbers: Floats or tensors with one element, by name.
        """
        values = {
            name: value.detach() if isinstance(value, Tensor) else float(value) for name, value in numbers.items()
        }
        number = self._steps.number if step is None else step
        if number >= self._steps.number:
            self._unread.setdefault(number, {}).update(values)
        else:
            self._write_numbers(number, values)

    def doing(self, what: str) -> AbstractContextManager[None]:
        """Context manager within which the program does `what`.

        Args:
            what: A part of a step, such as "input" or "checkpoint". Anything else counts as "other", and is listed
                among the causes of host waits.
        """
        return self._steps.doing(what)

    def pausing(self) -> AbstractContextManager[None]:
        """Context manager for work that does not belong to a step, such as validation."""
        return self._steps.doing(PAUSE)

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the batches of `loader`. Only the time spent in `loader` counts as input.

        Args:
            loader: The data loader, or any other iterable.
        """
        iterator = iter(loader)
        while True:
            with self.doing("input"):
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch

    def expect_memory(self, turns: Sequence[tuple[str, int]]) -> None:
        """Show a predicted curve of memory next to the measured one.

        Args:
            turns: Labels and bytes at the turning points of a step, predicted from a trace.
        """
        self._predicted = turns

    def report_what_ifs(self, what_ifs: Sequence[WhatIf]) -> None:
        """Show the simulated gains of other settings on the page.

        Args:
            what_ifs: The settings, with their simulated times.
        """
        self._file.add("what_ifs", v=[asdict(item) for item in what_ifs])

    def close(self, *, draws: bool = True) -> Path | None:
        """Stop recording, and write the page on the first rank.

        Args:
            draws: Whether to write the page.

        Returns:
            The path of the page on the first rank. None on other ranks, or if no page was written.
        """
        if not self._is_open:
            return self.page
        self._is_open = False
        self._stack.close()
        with suppress(RuntimeError):  # the device has failed
            self._steps.finish()
        if self._watch is not None:
            self._watch.stop()
        self._write_line()
        self._write_units()
        self._file.add("end")
        self._file.close()
        if self._destination is not None:
            self._destination.close()
        if self._rank == 0 and draws:
            self._await_others()
            self._write_page()
        return self.page

    def __enter__(self) -> RunReport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and is_out_of_memory(error):
            self._report_out_of_memory(error)
        self.close()

    # -- from the engine -----------------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            given = tensors_in((args, kwargs))
            self._steps.work += given[0].numel() if given else 0

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self._output_nbytes = sum(tensor.nbytes for tensor in tensors_in(output))
            self._output_hook.remove()

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        is_known = any(known is optimizer for known in self._optimizers)
        if self._steps.number - self._first_step < WATCHED_STEP and not is_known:
            local = {id(param.sharded) for unit in units_in(self._model) for param in unit.params}
            if any(id(param) in local for group in optimizer.param_groups for param in group["params"]):
                self._optimizers.append(optimizer)

    def _observed(self, event: Event) -> None:
        if self._watch is not None:
            self._watch.note_event(event)
        if self._guard.is_near():
            self._report_out_of_memory()

    def _before_step(self, number: int) -> None:
        if number - self._first_step + 1 == WATCHED_STEP and self._rank == 0 and can_be_watched(self._model):
            self._watch = MemoryWatch(self._model, self._optimizers, self._steps, accelerator_for(self._device))
            self._watch.start()

    def _after_step(self, step: StepTaken) -> None:
        nth = step.number - self._first_step + 1
        if nth == 1:
            self._write_model()
        if self._watch is not None and nth >= WATCHED_STEP and self._watch.stop():
            watched = self._watch.watched(self._predicted)
            if watched is not None:
                self._file.add("memory", questions=self._watch.host_waits, **asdict(watched))
            self._file.add("operations", n=self._first_step + WATCHED_STEP - 1, v=self._watch.operations.rows())
            self._watch = None
        for number in [number for number in self._unread if number <= step.number]:
            self._write_numbers(number, self._unread.pop(number))
        if nth == WATCHED_STEP:
            self._disks = {pace.folder: pace.total for pace in paces()}
            self._transferred = transfers.total
        if nth > WATCHED_STEP:
            self._counted += 1
            if self._counted == 1:  # decisions for a budget have been made by now
                self._stored_bytes = self._measure_stored()
            self._best_bytes_per_s = max(self._best_bytes_per_s, step.best_bytes_per_s)
            for name, counts in step.units.items():
                self._units.setdefault(name, UnitCounts()).add(counts)
            for name, (times, seconds) in step.host_waits.items():
                known = self._host_waits.get(name, (0, 0.0))
                self._host_waits[name] = known[0] + times, known[1] + seconds
            if is_kept_whole(step.number):
                self._write_spans(step)
        counters = self._counters.sample()
        if counters is not None:
            self._file.add("counters", n=step.number, v=counters)
        if self._destination is not None:
            numbers = {f"seconds/{part}": seconds for part, seconds in step.parts_s.items()}
            numbers |= {"seconds/step": step.step_s, "bytes held": step.usage.held}
            sampled = zip(COUNTERS, counters or (), strict=False)
            numbers |= {f"hardware/{name}": value for name, value in sampled if value is not None}
            self._destination.write(step.number, numbers)
        self._group.append(step)
        if len(self._group) == self._group_size:
            self._write_line()
        if time.monotonic() > self._units_due:
            self._write_units()
            self._file.flush()

    def _report_out_of_memory(self, error: BaseException | None = None) -> None:
        """Write the page of a run that has raised the out-of-memory error `error`, or will soon run out of memory."""
        state = self._guard.state(self._rank, self._steps.origin, error)
        self._file.add("out_of_memory", **asdict(state))
        self._file.flush()
        self._write_page()
        what = "is out of memory" if error is not None else "will soon run out of memory"
        message = (
            f"rank {self._rank} {what} in {state.where}. It holds {holders_text(state)}. See {self.page or self.path}"
        )
        if error is None:
            _log.warning(message)
        else:
            error.add_note(message)

    def _write_page(self) -> None:
        """Write the page. Log a warning if this fails, for example for lack of memory or disk space."""
        from fullshard.report.causes import find_causes  # late: drawing needs libraries that training does not
        from fullshard.report.page import write

        try:
            run = read_run(self.path)
            self.page = write(run, find_causes(run), self.path)
        except OSError as error:
            _log.warning("rank %d: no page was written for %s (%s)", self._rank, self.path, error.strerror)
        except Exception:
            _log.warning("rank %d: no page was written for %s", self._rank, self.path, exc_info=True)

    # -- lines --------------------------------------------------------------------------------------------------------

    def _write_numbers(self, step: int, values: Mapping[str, float | Tensor]) -> None:
        numbers = {name: float(value) for name, value in values.items()}
        if self._group_size == 1:
            self._file.add("told", n=step, v=finite(numbers))
        else:
            for name, value in numbers.items():
                self._logged.setdefault(name, []).append(value)
        if self._destination is not None:
            self._destination.write(step, numbers)

    def _write_line(self) -> None:
        group, self._group = self._group, []
        if not group:
            return
        count = len(group)
        starved = [item.usage.starved_s for item in group if item.usage.starved_s is not None]
        self._file.add(
            "step",
            n=group[-1].number,
            p=[round(sum(item.parts_s[part] for item in group) / count, 7) for part in PARTS],
            b=round(sum(item.usage.busy_s for item in group) / count, 6),
            s=round(sum(starved) / count, 6) if len(starved) == count else None,
            h=max(item.usage.held for item in group),
            w=sum(item.work for item in group) / count,
        )
        if self._logged:
            means = {name: sum(values) / len(values) for name, values in self._logged.items()}
            self._file.add("told", n=group[-1].number, v=finite(means))
            self._logged.clear()
        self._lines += 1
        if self._lines % _LINES == 0:
            self._group_size *= 2

    def _write_model(self) -> None:
        if self._rank == 0:
            self._file.add(
                "model",
                units=units_of(self._model),
                shards=shards_of(self._model),
                output_nbytes=self._output_nbytes,
                offload=list(offload_lines(units_in(self._model))),
            )
            self._file.flush()

    def _write_units(self) -> None:
        if not self._counted:
            return
        self._file.add(
            "units",
            steps=self._counted,
            best_bytes_per_s=self._best_bytes_per_s,
            reports_input=self._steps.reports_input,
            v={name: [round(count, 6) for count in astuple(counts)] for name, counts in self._units.items()},
            waits=self._host_waits,
            disks={
                str(pace.folder): [pace.held_bytes, *astuple(pace.total.since(self._disks.get(pace.folder, Moved())))]
                for pace in paces()
            },
            stored=self._stored_bytes,
            transferred=[
                [tier, state, item.arrived, item.passed]
                for (tier, state), item in transfers.since(self._transferred).items()
            ],
        )
        self._units_every_s *= 2  # only the last line counts: a long run has a few dozen
        self._units_due = time.monotonic() + self._units_every_s

    def _measure_stored(self) -> dict[str, dict[str, int]]:
        """Return the bytes of this rank in each tier, by state; empty without offloading."""
        if not any(offload_lines(units_in(self._model))):
            return {}
        return {
            name: {state: getattr(tier, state.replace(" ", "_")) for state in STATES}
            for name, tier in measure_tiers(self._model, self._optimizers).items()
        }

    def _write_spans(self, step: StepTaken) -> None:
        pieces = step.pieces[:_MOST_SPANS]
        names = list(dict.fromkeys(piece.name for piece in pieces))
        units = list(dict.fromkeys(piece.unit for piece in pieces))
        name_at, unit_at = ({item: i for i, item in enumerate(known)} for known in (names, units))
        self._file.add(
            "spans",
            n=step.number,
            names=names,
            units=units,
            v=[
                [
                    STREAMS.index(piece.stream),
                    name_at[piece.name],
                    unit_at[piece.unit],
                    round(piece.start * 1e6),
                    round((piece.end - piece.start) * 1e6),
                ]
                for piece in pieces
            ],
        )

    def _await_others(self) -> None:
        """Wait a limited time for the last lines of other ranks."""
        deadline = time.monotonic() + _PATIENCE_S
        missing = [path_of(self.path, rank) for rank in range(1, self._world)]
        while missing and time.monotonic() < deadline:
            missing = [path for path in missing if not is_closed(path)]
            if missing:
                time.sleep(0.02)
