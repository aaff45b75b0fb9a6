"""One training run, from the initial to the trained weights."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from fullshard import CapturedStep, CheckpointError, ConfigError, DiskError, capture, clip_grad_norm_
from fullshard.checkpoint import PendingSave, Restored, async_save, latest, load
from fullshard.checkpoint.exporting import write_safetensors
from fullshard.checkpoint.keeper import named
from fullshard.checkpoint.manifest import step_of
from fullshard.checkpoint.safety_copy import SafetyCopies
from fullshard.plan.background import FirstSteps, warn_if_too_large
from fullshard.plan.forecast import Forecast, Measured, compare
from fullshard.plan.memory_used import PeakMemory
from fullshard.report.recording import RunReport, report
from fullshard.train.bytes_table import RunLedgers
from fullshard.train.evaluate import bits, sample, validation_loss
from fullshard.train.ledgers import ledgers_of_run
from fullshard.train.model import byte_losses
from fullshard.train.parallelism import BatchPart, part_of, replicas_of, rows_of, sequences_of
from fullshard.train.predicting import RunPrediction, by_state, disk_lines, disk_traffic, start_forecast
from fullshard.train.progress import Display, Heading, Result, StepReport, display_for
from fullshard.train.ranks import Rank, do_together, gather_in_rank_order
from fullshard.train.resuming import AUTO
from fullshard.train.run_folder import ANOTHER_OUT, STOPPED, RunFolder, check_shared, free_folder
from fullshard.train.schedule import learning_rate, peak_lr
from fullshard.train.settings import TrainSettings
from fullshard.train.sharding import ShardedGPT, dtype_of, offload_of, optimizer_of, sharded_gpt
from fullshard.train.stopping import PREEMPTED, StopRequest, recording_sigterm
from fullshard.train.stopwatch import Stopwatch
from fullshard.train.text import Text, TextSource, training_batch, write_text
from fullshard.train.what_ifs import simulate_changes
from fullshard.versions import versions

T = TypeVar("T")


def train(
    settings: TrainSettings, source: TextSource, rank: Rank, *, predicts: bool = False, records: bool = False
) -> int:
    """Train on this rank from initial weights or a checkpoint, write the output folder, and return the exit code.

    Every rank of the process group must call it.

    Args:
        settings: The settings, which `check` has checked on every rank.
        source: The text, as returned by `check`.
        rank: This rank.
        predicts: Whether the first rank shows the prediction, and later the measurement.
        records: Whether to write a report, see `fullshard.report`.

    Raises:
        ConfigError: Each machine should hold one replica, but machines have different numbers of ranks; or not all
            machines can access the folder of the checkpoints; or the checkpoint belongs to another run; or a file of
            the output folder cannot be written.
        CheckpointError: The checkpoint is damaged or does not match; or no checkpoint could be written.
    """
    check_machines(settings, rank)
    if settings.checkpoints.resume == AUTO:  # machines that do not share --out may have another run there, or none
        settings = replace(settings, optimization=agreed(settings.optimization, rank))
    settings = resolved(settings, rank)
    forecasting = start_forecast(settings, rank) if predicts else None
    peak = PeakMemory(rank.device)
    out = agreed(settings.run.out or free_folder(settings), rank)
    if settings.checkpoints.checkpoint_every and rank.machines > 1:
        check_shared(out, rank)
    folder = RunFolder(out, writes=rank.leads)
    do_together(folder.check, rank.world)
    text = agreed_text(source, out, rank)
    model = sharded_gpt(settings, rank)
    display = display_for(Console(emoji=False), shows=rank.leads)
    trainer = TrainingLoop(settings, rank, text, model, folder, display, records=records, predicts=predicts)
    if forecasting is not None:
        peak.reset()  # the memory of the model before sharding does not count
        trainer.prediction = RunPrediction(forecasting, peak)
    if settings.checkpoints.safety_copy_every:
        trainer.copies = SafetyCopies.kept_with(os.getppid())
    saves = settings.checkpoints.checkpoint_every > 0
    with recording_sigterm() if saves else nullcontext() as stop:
        try:
            return trainer.run(stop)
        finally:
            if trainer.prediction is not None:
                trainer.prediction.close()
            display.close()


@dataclass
class TrainingLoop:
    """The training loop of a run, with its state on this rank."""

    settings: TrainSettings  # resolved: see `resolved`
    rank: Rank
    text: Text
    model: ShardedGPT
    folder: RunFolder
    display: Display
    records: bool = False
    predicts: bool = False
    ledgers: RunLedgers = field(init=False)  # set after the first step
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    pending: PendingSave | None = None  # the checkpoint that is being written
    has_saved: bool = False  # whether a checkpoint was written since the run started
    unsaved: CheckpointError | None = None  # the error of the last save that failed
    copies: SafetyCopies | None = None
    prediction: RunPrediction | None = None  # on the rank with output, in a run that predicts
    forecast: Forecast | None = None
    record: RunReport | None = None
    captured: CapturedStep[tuple[Tensor, Tensor]] | None = None

    def __post_init__(self) -> None:
        self.optimizer = optimizer_of(self.model, self.settings.optimization)

    def run(self, stop: StopRequest | None) -> int:
        """Run all remaining steps, with saves, reports and evaluations, and return the exit code."""
        done = self.begin()
        self.predict()
        with self.recording(done):
            code = self.run_steps(done, stop)
            if code == 0:
                self.report_what_ifs()
        if self.record is not None and self.record.page is not None:
            self.display.log(f"Where time and memory went: {self.record.page}")
        self.check_saved()
        return code

    def recording(self, done: int) -> AbstractContextManager[object]:
        """Return a context that records the run, if requested, after `done` completed steps."""
        if not self.records:
            return nullcontext()
        settings = {name: value for name, value in self.settings.as_options().items() if name != "out"}
        self.record = report(
            self.model,
            self.folder.path,
            optimizer=self.optimizer,
            settings=settings,
            first_step=done + 1,
            log_to=self.settings.run.log_to,
        )
        if self.forecast is not None:
            self.record.expect_memory(self.forecast.turns)
        return self.record

    def report_what_ifs(self) -> None:
        """Add simulated gains of other settings to the report of a run with a prediction."""
        if self.record is None or self.prediction is None:
            return
        try:
            self.record.report_what_ifs(simulate_changes(self.settings, self.rank, str(self.folder.path)))
        except ConfigError as error:
            self.display.show_problem(str(error))

    def doing(self, what: str) -> AbstractContextManager[object]:
        """Return a context that records the time within it as `what`."""
        return nullcontext() if self.record is None else self.record.doing(what)

    def between_steps(self) -> AbstractContextManager[object]:
        """Return a context whose time does not count as part of any step."""
        return nullcontext() if self.record is None else self.record.pausing()

    def run_steps(self, done: int, stop: StopRequest | None) -> int:
        """Run the steps after the first `done`, finish the run, and return the exit code."""
        for step in range(done + 1, self.settings.optimization.steps + 1):
            if stop is not None:
                stop.exchange()
            with self.stopwatch.running():
                losses, norm = self.train_step(step - 1)
            self.display.advance(step)
            if step == done + 1:
                with self.between_steps():
                    self.measure_memory()
            with self.doing("logging"):
                self.report_if_due(step, losses, norm)
            with self.between_steps():
                self.evaluate_if_due(step)
            stops = stop is not None and stop.any_requested()
            self.save_if_due(step, stops=stops)
            if stops:
                return self.stop(step)
        with self.between_steps():
            if done == self.settings.optimization.steps:  # no steps are left
                self.measure_memory()  # a first microbatch allocates memory that later ones reuse
                self.measure_memory()
            self.finish()
        return 0

    def predict(self) -> None:
        """Show the prediction, and compare it with the measurement after the third step.

        Raises:
            DiskError: The disk does not have enough space for the offloaded data. Raised on every rank.
        """
        if self.prediction is not None:
            self.forecast = self.predict_step(self.prediction)
        if self.predicts and offload_of(self.settings.memory).folder is not None:
            self.predict_disk()
        if self.prediction is not None and self.forecast is not None:
            self.prediction.peak.reset()  # the disk measurement used memory that the run does not need
            self.measure_first_steps(self.prediction, self.forecast)

    def predict_step(self, prediction: RunPrediction) -> Forecast | None:
        """Show the prediction of a step and return it; None without a prediction."""
        try:
            forecast = prediction.forecasting.result()
        except ConfigError as error:
            self.display.show_problem(str(error))
            return None
        self.folder.write_line("forecast", forecast.as_dict())
        self.display.show_forecast(forecast)
        warn_if_too_large(forecast, self.display.show_problem)
        return forecast

    def measure_first_steps(self, prediction: RunPrediction, forecast: Forecast) -> None:
        """Measure the first steps, and show them next to the prediction."""

        def done(measured: Measured) -> None:
            measured = replace(measured, by_state=by_state(self.ledgers.measured))
            self.folder.write_line("measured", measured.as_dict())
            self.display.show_comparison(compare(forecast, measured))

        prediction.steps = FirstSteps(self.model, self.optimizer, prediction.peak, done)

    def predict_disk(self) -> None:
        """Show the cost of the disk per step. The first rank measures the disk while the other ranks wait.

        Raises:
            DiskError: The disk is full or not writable. Raised on every rank, before the first step.
        """
        failure = None
        if self.rank.leads:
            forecast = self.forecast
            traffic = disk_traffic(self.model, self.settings) if forecast is None else forecast.disk_traffic
            step_s = 0.0 if forecast is None else forecast.step_s
            try:
                if traffic.room_bytes:
                    for line in disk_lines(self.model, self.settings, self.rank, step_s, traffic):
                        self.display.log(f"Disk: {line}")
            except DiskError as error:
                failure = str(error)
        failure = agreed(failure, self.rank)
        if failure is not None:
            raise DiskError(failure)

    def train_step(self, step: int) -> tuple[Tensor, Tensor]:
        """Run step `step`, counted from 0: all its microbatches, then one step of the optimizer.

        Returns:
            The losses of this rank's rows in nats per byte, of shape (accumulate, rows per rank), and the norm of the
            gradient. Both are on the device, so reading them makes the host wait.
        """
        optimization = self.settings.optimization
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(optimization, peak_lr(self.settings), step)
        batches = (self.batch(step, microbatch) for microbatch in range(optimization.accumulate))
        if not optimization.capture:
            return self.update(batches)
        examples = list(batches)
        self.captured = self.captured or capture(self.update, (examples,))
        return self.captured(examples)

    def batch(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        """Return this rank's inputs and targets of a microbatch."""
        part = self.part(microbatch)
        with self.doing("input"):
            batch = training_batch(
                self.text,
                seed=self.settings.run.seed,
                first=step * self.sequences + part.first,
                rows=part.rows,
                seq=self.settings.text.seq,
            )
        return batch.inputs, batch.targets

    def update(self, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Run all microbatches and the optimizer. Return the losses and the norm of the gradient."""
        losses = [self.train_microbatch(number, *batch) for number, batch in enumerate(batches)]
        norm = clip_grad_norm_(self.model.parameters(), self.settings.optimization.clip or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses), norm

    def train_microbatch(self, number: int, inputs: Tensor, targets: Tensor) -> Tensor:
        """Add the gradients of a microbatch, reduce them if it is the last one, and return the losses of its rows."""
        self.model.set_requires_gradient_sync(number == self.settings.optimization.accumulate - 1)
        losses = byte_losses(self.model(inputs.to(self.rank.device)), targets.to(self.rank.device))
        counted = losses[: self.part(number).counted]
        mean = counted.sum() / (self.sequences / self.rank.world)  # since gradients are averaged over the ranks
        mean.backward()
        return losses.detach()

    def part(self, microbatch: int) -> BatchPart:
        """Return this rank's part of a microbatch."""
        rank = self.rank
        return part_of(self.settings.optimization, microbatch=microbatch, rank=rank.index, world=rank.world)

    def begin(self) -> int:
        """Write the settings and the metrics' header, show a heading, and return the number of completed steps."""
        heading = Heading(
            strategy=self.settings.parallelism.strategy,
            ranks=self.rank.world,
            device=self.rank.device.type,
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            training_bytes=self.text.training_bytes,
            validation_bytes=self.text.validation_bytes,
            steps=self.settings.optimization.steps,
            out=self.folder.path,
        )
        self.display.start(heading)
        resume = self.settings.checkpoints.resume
        if resume == AUTO and (restored := self.restored()) is not None:
            return self.resume_from(restored)
        self.folder.truncate(dict.fromkeys(self.folder.sizes(), 0))
        self.folder.write_settings(self.settings)
        facts = ("device", "parameters", "training_bytes", "validation_bytes")
        header = {"settings": self.settings.as_options(), "versions": versions(), "world": heading.ranks}
        self.write_line("run", header | {name: getattr(heading, name) for name in facts})
        return 0 if resume in (None, AUTO) else self.load(Path(resume)).step or 0

    def restored(self) -> Restored | None:
        """Load the newest of this run's safety copies and checkpoints; None if there are none."""
        newest = latest(self.folder.checkpoints)
        saved = agreed(-1 if newest is None else step_of(newest) or 0, self.rank)
        copy = None if self.copies is None else self.copies.newest()
        if self.copies is not None and copy is not None and copy.manifest.step > saved:
            try:
                return self.load(self.copies.fetch(copy))
            except CheckpointError as error:
                self.display.show_problem(f"{error} Resuming from the newest checkpoint instead.")
        return None if saved < 0 else self.load(self.folder.checkpoints)

    def resume_from(self, restored: Restored) -> int:
        """Reset the run's folder to the loaded checkpoint and return the number of completed steps."""
        state = restored.extra
        if state["training_bytes"] != self.text.training_bytes:
            raise ConfigError(
                f"--resume auto: the text to train on had {state['training_bytes']} bytes, and now it has "
                f"{self.text.training_bytes}. Restore the text, or start a separate run with --resume {restored.path} "
                "and another --out."
            )
        self.folder.truncate(state["sizes"])
        self.stopwatch.total_s = state["seconds"]
        values = {"step": restored.step, "world": self.rank.world, "from": str(named(restored.path))}
        self.write_line("resume", values)
        return restored.step or 0

    def load(self, source: Path) -> Restored:
        """Load a checkpoint into model and optimizer."""
        with self.display.watching("loading a checkpoint") as progress:
            restored = load(source, model=self.model, optimizer=self.optimizer, progress=progress)
        steps = self.settings.optimization.steps
        if (restored.step or 0) > steps:
            raise ConfigError(
                f"--resume {source}: {restored.path} has completed {restored.step} steps, but --steps is {steps}. "
                "Increase --steps."
            )
        self.display.log(f"Resuming after step {restored.step or 0} from {restored.path}")
        return restored

    def save_if_due(self, step: int, *, stops: bool) -> None:
        """Save a checkpoint or a safety copy if one is due.

        A checkpoint is due at regular steps, after the last step, and before the run stops. Both are written during the
        steps that follow. If a save fails, the run logs this and continues.

        Raises:
            CheckpointError: `stops` is True, and a rank could not copy its values.
        """
        settings = self.settings.checkpoints
        due = is_due(step, settings.checkpoint_every, self.settings.optimization.steps)
        if settings.checkpoint_every and (due or stops):
            self.wait_for_saves()
            try:
                self.pending = async_save(
                    self.folder.checkpoints,
                    model=self.model,
                    optimizer=self.optimizer,
                    step=step,
                    extra=self.run_state(),
                    keep=settings.keep,
                )
            except CheckpointError as error:
                if stops:  # without the checkpoint of this step, the run must not report that it can be resumed
                    raise
                self.display.show_problem(str(error))
                self.unsaved = error
        elif self.copies is not None and is_due(step, settings.safety_copy_every):
            try:
                self.copies.save(model=self.model, optimizer=self.optimizer, step=step, extra=self.run_state())
            except CheckpointError as error:
                self.display.show_problem(str(error))

    def run_state(self) -> dict[str, Any]:
        """Return the state that is needed to resume the run, in addition to the model and the optimizer."""
        return {
            "sizes": self.folder.sizes(),
            "seconds": self.stopwatch.total_s,
            "training_bytes": self.text.training_bytes,
        }

    def wait_for_saves(self) -> None:
        """Wait for the pending saves, and show their errors."""
        for waiting in (self.pending, self.copies):
            try:
                if waiting is not None:
                    waiting.wait()
                    self.has_saved |= waiting is self.pending
            except CheckpointError as error:
                self.display.show_problem(str(error))
                if waiting is self.pending:
                    self.unsaved = error
        self.pending = None

    def check_saved(self) -> None:
        """Raise the error of the last save if none has succeeded."""
        if self.unsaved is not None and not self.has_saved:
            raise CheckpointError(
                f"no checkpoint could be saved since this run started. The last attempt: {self.unsaved}. The trained "
                f"weights are in {self.folder.weights}. Free space on the disk of --out, or choose another --out, and "
                "start again if you need checkpoints."
            ) from self.unsaved

    def stop(self, step: int) -> int:
        """Stop before the last step, once the checkpoint of `step` is written, and return the exit code."""
        assert self.pending is not None, "it was saved"
        path = self.pending.wait()
        self.wait_for_saves()
        self.write_line(STOPPED, {"step": step})
        self.display.close()
        self.display.log(f"Stopped after step {step}, saved in {path}. Resume with --resume auto.")
        return PREEMPTED

    def measure_memory(self) -> None:
        """Measure the memory of this rank. This requires that the optimizer has its state."""
        self.ledgers = ledgers_of_run(self.model, self.optimizer, self.settings, self.rank)
        self.display.set_memory(self.ledgers)

    def report_if_due(self, step: int, losses: Tensor, gradient_norm: Tensor) -> None:
        """Show a line with the loss at the first step, every `log_every` steps, and at the last step."""
        if not is_due(step, self.settings.run.log_every, self.settings.optimization.steps) and step != 1:
            return
        with self.stopwatch.running():  # this waits for the steps on the device, so it counts as their time
            loss = mean_in_row_order(losses, self.sequences, self.rank)
        step_s = self.stopwatch.lap(step)
        tokens_per_s = self.sequences * self.settings.text.seq / step_s  # over all ranks
        left_s = step_s * (self.settings.optimization.steps - step)
        values = {"loss": loss, "bits_per_byte": bits(loss), "gradient_norm": float(gradient_norm)}
        lr = float(self.optimizer.param_groups[0]["lr"])
        self.display.report(
            StepReport(step=step, loss=loss, bits_per_byte=bits(loss), tokens_per_s=tokens_per_s, left_s=left_s)
        )
        more = {"lr": lr, "tokens_per_s": round(tokens_per_s, 1), "seconds": round(self.stopwatch.total_s, 3)}
        self.write_line("step", {"step": step, **values, **more})
        if self.record is None or not self.rank.leads:
            return
        self.record.log(step=step, **values, learning_rate=lr, tokens_per_s=tokens_per_s)
        if self.forecast is not None and self.forecast.flops_share:
            self.record.log(step=step, mfu=self.forecast.flops_share * self.forecast.step_s / step_s)

    def evaluate_if_due(self, step: int) -> None:
        """Run validation and generate a sample if they are due, except at the last step."""
        if step == self.settings.optimization.steps:
            return
        if is_due(step, self.settings.run.validate_every):
            self.display.show_validation(step, self.validate(step))
        if is_due(step, self.settings.run.sample_every):
            self.display.show_sample(step, self.write_sample(step))

    def validate(self, step: int) -> float:
        """Run validation, add its bits per byte to the metrics, and return them."""
        loss = validation_loss(self.model, self.text, self.settings, self.rank)
        self.write_line("validation", {"step": step, "loss": loss, "bits_per_byte": bits(loss)})
        return bits(loss)

    def write_sample(self, step: int) -> bytes:
        """Generate text with the model, add it to the samples, and return it."""
        content = sample(self.model, self.settings, self.rank.device, seed=self.settings.run.seed + step)
        self.folder.write_sample(step, content)
        do_together(self.folder.check, self.rank.world)
        return content

    def write_line(self, kind: str, values: Mapping[str, Any]) -> None:
        """Add a line to the metrics. Every rank calls it, and the first one writes.

        Raises:
            ConfigError: The first rank could not write this file, or another file of the folder. Raised on every rank.
        """
        self.folder.write_line(kind, values)
        do_together(self.folder.check, self.rank.world)

    def finish(self) -> None:
        """Run the last validation, generate a sample, and write the weights and the result."""
        steps = self.settings.optimization.steps
        bits_per_byte = self.validate(steps)
        content = self.write_sample(steps)
        try:
            write_safetensors(self.model.state_dict(), self.folder.weights)
        except CheckpointError as error:
            raise CheckpointError(f"{error}. Free space on the disk of --out, or choose {ANOTHER_OUT}.") from error
        self.wait_for_saves()
        seconds = self.stopwatch.since_start_s()
        self.write_line(
            "end",
            {
                "step": steps,
                "bits_per_byte": bits_per_byte,
                "sample": content.decode("utf-8", errors="replace"),
                "bytes_a_rank": self.ledgers.as_dict(),
                "seconds": round(seconds, 3),
            },
        )
        self.display.close()
        self.display.show_result(
            Result(
                bits_per_byte=bits_per_byte,
                sample=content,
                seconds=seconds,
                ledgers=self.ledgers,
                strategy=self.settings.parallelism.strategy,
                out=self.folder.path,
            )
        )

    @property
    def sequences(self) -> int:
        """The training sequences per step, over all ranks."""
        return sequences_of(self.settings.optimization, self.rank.world)


def resolved(settings: TrainSettings, rank: Rank) -> TrainSettings:
    """Return the settings with all defaults filled in, including those that depend on the ranks or the size."""
    optimization, parallelism = settings.optimization, settings.parallelism
    return replace(
        settings,
        parallelism=replace(parallelism, replicas=replicas_of(parallelism, rank.world, rank.machines)),
        optimization=replace(optimization, batch=rows_of(optimization, rank.world), lr=peak_lr(settings)),
        memory=replace(settings.memory, dtype=str(dtype_of(settings.memory, rank.device)).removeprefix("torch.")),
    )


def check_machines(settings: TrainSettings, rank: Rank) -> None:
    """Raise an error on all ranks if each machine should hold one replica but numbers of ranks differ."""
    parallelism = settings.parallelism
    if parallelism.replicas is None and replicas_of(parallelism, rank.world, rank.machines) is not None:
        sizes = gather_in_rank_order(torch.tensor([rank.local_world]), rank).tolist()
        if min(sizes) < max(sizes):
            raise ConfigError(
                f"--strategy {parallelism.strategy}: keeps one replica per machine, but machines have {min(sizes)} to "
                f"{max(sizes)} ranks. Start the same number on every machine, or set --replicas."
            )


def agreed(value: T, rank: Rank) -> T:
    """Return the first rank's `value` on every rank."""
    chosen = [value]
    dist.broadcast_object_list(chosen, src=0, device=rank.device)
    return chosen[0]


def agreed_text(source: TextSource, out: Path, rank: Rank) -> Text:
    """Return the text. One rank of every machine writes it before other ranks read it."""
    cache = out / ".text"  # hidden, so that a later run does not read it as text if this one is killed now
    do_together(lambda: None if rank.local_index else write_text(source, cache), rank.world)
    return do_together(lambda: write_text(source, cache), rank.world)


def mean_in_row_order(losses: Tensor, sequences: int, rank: Rank) -> float:
    """Return the mean of `losses` over all ranks in float64.

    `losses` has shape (accumulate, rows per rank). The rows are summed in order. Only the first `sequences` rows are
    included; the others are padding.
    """
    by_rank = gather_in_rank_order(losses[None].double(), rank)
    return float(by_rank.transpose(0, 1).flatten()[:sequences].cpu().mean())


def is_due(step: int, every: int, last: int | None = None) -> bool:
    """Return True every `every` steps (never if 0), and at the last step."""
    return step == last or (every > 0 and step % every == 0)
