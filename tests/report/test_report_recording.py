"""The record of a run: times that add up to the clock, the engine's actions, and a small file per rank."""

import json
import math
import os
import random
import re
import shutil
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from shared_ranks import run_ranks
from small_models import chain, inputs, sgd
from torch import nn

import fullshard
from fullshard import fully_shard, recording
from fullshard.cli.report import run as report_command
from fullshard.device.accelerator import Accelerator
from fullshard.device.streams import STREAMS, Stream, Streams, reuse_stamps, stamp_on
from fullshard.plan.ledger import measure_ledger
from fullshard.plan.memory import State
from fullshard.report import counters as counters_module
from fullshard.report import recording as recording_module
from fullshard.report import steps as steps_module
from fullshard.report.causes import find_causes
from fullshard.report.memory_watch import held_between_steps
from fullshard.report.rank_file import RankFile, lines_in, path_of
from fullshard.report.reading import DROPPED, read_run
from fullshard.report.run import COUNTERS, PARTS, Run
from fullshard.report.shown import shown as as_shown
from fullshard.report.steps import PAUSE, Piece, StepRecorder, StepTaken, UnitCounts, is_kept_whole
from fullshard.report.usage import Usage
from fullshard.tape.recorder import Event, Origin, Phase, Recorder

FORWARD, BACKWARD, REDUCE, STEP, IDLE = (
    Phase.FORWARD,
    Phase.BACKWARD,
    Phase.POST_BACKWARD,
    Phase.STEP,
    Phase.IDLE,
)


class Clock:
    """A clock that advances on request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(steps_module.time, "perf_counter", lambda: self.now)

    def after(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def recorder(taken: list[StepTaken], accelerator: Accelerator | None = None) -> StepRecorder:
    return StepRecorder(accelerator or Accelerator(), lambda: Usage(0.0, 0.0, 7), taken.append)


def turn(record: Recorder, clock: Clock, seconds: float, phase: Phase, unit: str = "") -> None:
    """Stay in the current phase for `seconds`, and then switch to `phase` of `unit`."""
    clock.after(seconds)
    record.turn_to(Origin(unit, phase))


def collective(record: Recorder, clock: Clock, name: str, phase: Phase, unit: str, *seconds: float) -> Event:
    """Record a collective with the seconds of its launch, of its overlap with compute, and of the wait for it."""
    start, alongside, wait = seconds
    event = record.add(Event(name, Origin(unit, phase), "gather", sent_bytes=100, start=clock.now))
    clock.after(start)
    event.launched = clock.now
    clock.after(alongside)
    event.awaited = clock.now
    clock.after(wait)
    event.end = clock.now
    return event


def one_step(record: Recorder, clock: Clock) -> None:
    turn(record, clock, 1.0, FORWARD)  # input
    collective(record, clock, "all_gather", FORWARD, "a", 0.1, 0.0, 0.4)
    turn(record, clock, 0.5, FORWARD, "a")
    turn(record, clock, 2.0, FORWARD)
    turn(record, clock, 0.25, BACKWARD, "a")
    collective(record, clock, "reduce_scatter", REDUCE, "a", 0.2, 3.0, 0.3)
    turn(record, clock, 0.0, IDLE)
    turn(record, clock, 0.125, STEP)  # other
    turn(record, clock, 0.75, IDLE)


def test_step_time_is_split_into_phases_and_exposed_communication(clock):
    taken: list[StepTaken] = []
    record = recorder(taken)
    one_step(record, clock)
    one_step(record, clock)
    assert [item.number for item in taken] == [1]  # only the next forward ends a step
    record.finish()
    for step in taken:
        expected = {"input": 1.0, "forward": 2.75, "backward": 3.0, "gather": 0.5, "reduce": 0.5}
        expected |= {"optimizer": 0.75, "checkpoint": 0.0, "other": 0.125}
        assert step.parts_s == pytest.approx(expected)
        assert step.step_s == pytest.approx(8.625)
        counts = step.units["a"]
        assert (counts.gathers, counts.gathered_bytes, counts.gathers_ahead, counts.reductions) == (1, 100, 0, 1)
        assert (counts.gather_s, counts.gather_exposed_s) == pytest.approx((0.5, 0.5))
        assert (counts.reduce_s, counts.reduce_exposed_s) == pytest.approx((3.5, 0.5))
        compute = sorted(piece[3:] for piece in step.pieces if piece.stream == "compute")
        assert all(end == pytest.approx(start) for (_, end), (start, _) in pairwise(compute))


def test_parts_of_random_steps_add_up_to_the_clock_minus_pauses(clock):
    """Phases, nested collectives, checkpoints, reports of the loop and pauses occur in any order."""
    for seed in range(200):
        rng = random.Random(seed)
        taken: list[StepTaken] = []
        record = recorder(taken)
        start, paused = clock.now, 0.0
        for _ in range(3):
            turn(record, clock, rng.random(), FORWARD)
            for _ in range(rng.randrange(12)):
                what = rng.randrange(5)
                if what == 0:
                    with record.doing(rng.choice(["input", "checkpoint", "logging"])):
                        turn(record, clock, rng.random(), rng.choice([FORWARD, BACKWARD, IDLE]))
                elif what == 1:
                    before = clock.now
                    with record.doing(PAUSE):
                        turn(record, clock, rng.random(), rng.choice([FORWARD, STEP, IDLE]))
                        collective(record, clock, "all_reduce", REDUCE, "b", *(rng.random() for _ in range(3)))
                    paused += clock.now - before
                elif what == 2:
                    outer = record.add(Event("checkpoint", record.origin, start=clock.now))
                    collective(record, clock, "all_gather", IDLE, "b", *(rng.random() for _ in range(3)))
                    outer.end = clock.now
                elif what == 3:
                    phase, name = rng.choice([(REDUCE, "reduce_scatter"), (FORWARD, "all_gather")])
                    event = collective(record, clock, name, phase, "a", *(rng.random() for _ in range(3)))
                    clock.now = rng.choice([clock.now, event.launched])  # what follows may overlap it
                else:
                    turn(record, clock, rng.random(), rng.choice([FORWARD, BACKWARD, REDUCE]), "a")
            turn(record, clock, rng.random(), BACKWARD)
            turn(record, clock, rng.random(), STEP)
            turn(record, clock, rng.random(), IDLE)
        record.finish()
        assert len(taken) == 3
        assert sum(item.step_s for item in taken) == pytest.approx(clock.now - start - paused)
        assert all(item.step_s == pytest.approx(sum(item.parts_s.values())) for item in taken)
        assert min(value for item in taken for value in item.parts_s.values()) >= 0


@dataclass
class Stamped:
    """A timing event on a stream that lags behind the host. It can be read once the stream has reached it."""

    at: float
    stream: "LaggingStream"
    is_reused: bool = False

    def query(self) -> bool:
        assert not self.is_reused
        return self.stream.reached >= self.at

    def synchronize(self) -> None:
        assert not self.is_reused
        self.stream.reached = max(self.stream.reached, self.at)

    def elapsed_time(self, other: "Stamped") -> float:
        assert not self.is_reused
        assert other.query(), "no stream is waited for"
        return 1e3 * (other.at - self.at)


class LaggingStream(Stream):
    is_stream = True
    reached = float("inf")

    def __init__(self, name: str, clock: Clock) -> None:
        super().__init__(name)
        self._clock = clock

    def stamp(self) -> Stamped:
        return Stamped(2 * self._clock.now, self)


def test_lagging_streams_report_their_own_times_when_available(clock, monkeypatch):
    reused: list[Stamped] = []

    def reuse(stamps: Iterator[Stamped]) -> None:
        for stamp in stamps:
            stamp.is_reused = True
            reused.append(stamp)

    monkeypatch.setattr(steps_module, "reuse_stamps", reuse)
    accelerator = Accelerator()
    accelerator.has_streams = True
    streams = Streams(*[LaggingStream(name, clock) for name in STREAMS])
    accelerator.streams = streams
    taken: list[StepTaken] = []
    record = recorder(taken, accelerator)
    streams.compute.reached = 0.0  # all other streams have caught up
    for _ in range(3):
        turn(record, clock, 1.0, FORWARD)
        event = record.add(Event("all_gather", Origin("a", FORWARD), "gather", start=clock.now, sent_bytes=8))
        event.began = streams.gather.stamp()
        clock.after(1.0)
        event.ended, event.launched, event.awaited, event.end = streams.gather.stamp(), *[clock.now] * 3
        waited = Event("wait", Origin("a", FORWARD), "compute", began=streams.compute.stamp(), start=clock.now)
        clock.after(0.25)
        waited.ended, waited.end = streams.compute.stamp(), clock.now
        record.add(waited)
        turn(record, clock, 0.5, BACKWARD)
        turn(record, clock, 2.0, STEP)
        turn(record, clock, 0.25, IDLE)
    assert not taken
    record.finish()  # waits for the streams
    assert len(taken) == 3
    assert len(reused) == 3 * 8, "a step begins with the stamp of the one before, and ends with that of the next"
    for step in taken:  # streams take twice as long as the host
        expected = dict.fromkeys(PARTS, 0.0) | {"input": 2.0, "forward": 3.0, "gather": 0.5, "backward": 4.0}
        assert step.parts_s == pytest.approx(expected | {"optimizer": 0.5})
        assert (step.units["a"].gather_s, step.units["a"].gather_exposed_s) == pytest.approx((2.0, 0.5))
        assert step.usage.busy_s == pytest.approx(7.5)


def test_released_timing_events_are_reused():
    recorded: list[torch.Event] = []
    stream = SimpleNamespace(device=torch.device("cpu"), record_event=recorded.append)
    reuse_stamps([])
    first, second = stamp_on(stream), stamp_on(stream)
    reuse_stamps([first, None, second, first])
    assert {id(stamp_on(stream)), id(stamp_on(stream))} == {id(first), id(second)}
    assert stamp_on(stream) not in (first, second)
    assert len(recorded) == 5


def test_several_optimizers_and_steps_in_backward_count_as_one_step(clock):
    taken: list[StepTaken] = []
    record = recorder(taken)
    for _ in range(2):
        turn(record, clock, 1.0, FORWARD)
        turn(record, clock, 1.0, BACKWARD)
        turn(record, clock, 1.0, STEP)  # in a gradient hook
        turn(record, clock, 1.0, BACKWARD)
        turn(record, clock, 1.0, IDLE)
        for _ in range(2):
            turn(record, clock, 0.0, STEP)
            turn(record, clock, 1.0, IDLE)
    record.finish()
    assert [item.step_s for item in taken] == [7.0, 7.0]
    assert taken[1].parts_s["optimizer"] == pytest.approx(3.0)


def test_nested_recorder_forwards_events_to_the_outer_recorder():
    with recording() as outer:
        outer.turn_to(Origin("a", FORWARD))
        with recording() as inner:
            assert inner.origin == outer.origin
            inner.add(Event("all_gather", inner.origin))
            inner.turn_to(Origin("b", STEP))
        outer.add(Event("all_reduce", outer.origin))
    assert outer.names() == ["all_gather", "all_reduce"]
    assert inner.names() == ["all_gather"]
    assert outer.origin == Origin("b", STEP)


# -- real ranks -------------------------------------------------------------------------------------------------------


def train(folder: str | None, steps: int, *, torn: bool = False) -> Any:
    """Return the counts and results of ranks, with or without a record."""
    torch.manual_seed(0)
    model = chain(partial(fully_shard, strategy="zero3"))
    optimizer = sgd(model)
    report = nullcontext() if folder is None else fullshard.report(model, folder)
    ends, losses, counted = [], [], []
    with report:
        for number in range(steps):
            with recording() as record:
                for _ in range(2):
                    loss = model(inputs(number)).square().mean()
                    loss.backward()
                fullshard.clip_grad_norm_(model.parameters(), 1.0)
                before = time.perf_counter()
                optimizer.step()
            ends.append((before, time.perf_counter()))
            optimizer.zero_grad()
            losses.append(loss.detach())
            gathers = [
                each_collective
                for each_collective in record.collectives("all_gather")
                if each_collective.origin.phase is not STEP
            ]
            counted.append((len(gathers), sum(gather.sent_bytes for gather in gathers)))
            if folder is not None:
                report.log(loss=loss, learning_rate=0.05)
    ledger = measure_ledger(model, optimizer, lambda: model(inputs(0)).square().mean())
    return (
        ends,
        losses,
        counted,
        ledger,
        [fullshard_unit.param_groups[0].plan.stored_nbytes for fullshard_unit in fullshard_units(model)],
    )


def fullshard_units(model: nn.Module) -> list[Any]:
    from fullshard.engine.registry import units_in

    return units_in(model)


STEPS = 9


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    reported = run_ranks(2, train, str(folder), STEPS)
    return folder, reported, read_run(folder)


@pytest.mark.slow
def test_recorded_run_matches_unrecorded_run_bitwise(trained):
    _, reported, _ = trained
    plain = run_ranks(2, train, None, STEPS)
    for local, peer in zip(reported, plain, strict=True):
        assert [item.item() for item in local[1]] == [their.item() for their in peer[1]]
        assert local[2] == peer[2]


def test_step_times_add_up_to_the_wall_clock(trained):
    """The loop reads the clock before and after each optimizer step. A recorded step ends in between."""
    _, reported, run = trained
    assert run.steps.tolist() == list(range(3, STEPS + 1))  # earlier steps are not timed
    for rank, (ends, *_) in enumerate(reported):
        (first_before, first_after), (last_before, last_after) = ends[1], ends[-1]
        assert last_before - first_after - 1e-4 <= run.step_s[rank].sum() <= last_after - first_before + 1e-4
    assert run.parts_s.sum(axis=2) == pytest.approx(run.step_s)
    assert (run.parts_s[:, :, PARTS.index("forward")] > 0).all()
    assert (run.waited_for_s >= 0).all() and (run.waited_for_s.min(axis=0) == 0).all()
    assert (run.busy_s > 0).all() and (run.held_bytes > 0).all()


def test_reported_units_match_the_collectives_of_the_engine(trained):
    _, reported, run = trained
    counted = reported[0][2][-1]
    assert (sum(unit.gathers for unit in run.units), sum(unit.gathered_bytes for unit in run.units)) == pytest.approx(
        counted
    )
    assert [unit.fqn for unit in run.units] == ["", *(f"layers.{n}" for n in range(len(run.units) - 1))]
    for unit in run.units:
        assert (unit.gathers, unit.reductions) == ((2, 2) if not unit.fqn else (4, 2))
        assert 0 < unit.gather_exposed_s <= unit.gather_s * 1.001
        assert unit.param_dtype == unit.reduce_dtype == "float32"
        assert unit.trains and not unit.recomputed
        assert unit.gathers_ahead == (0 if not unit.fqn else 4)
    assert {wait.what for wait in run.host_waits} >= {"clipping"}
    assert run.work is not None and (run.work == 2 * inputs(0).numel()).all()


def test_spans_of_all_ranks_cover_one_step(trained):
    _, _, run = trained
    assert run.shown_step in (4, 8) and sorted(run.spans) == [0, 1]
    column = run.steps.tolist().index(run.shown_step)
    for rank, spans in run.spans.items():
        assert {span.stream for span in spans} == {"compute", "gather", "reduce"}
        assert {"forward", "backward", "wait", "optimizer", "all_gather", "reduce_scatter"} <= {s.name for s in spans}
        on_compute = [span for span in spans if span.stream == "compute"]
        shown_s = sum(span.end_s - span.start_s for span in on_compute)
        assert shown_s == pytest.approx(run.step_s[rank, column], rel=0.01)


def test_reported_memory_by_state_matches_the_ledger(trained):
    _, reported, run = trained
    ledger, memory = reported[0][3], run.memory
    assert memory is not None
    most = {State(state): int(values.max()) for state, values in memory.by_state.items()}
    assert most[State.PARAMETERS] == ledger.parameters
    assert most[State.OPTIMIZER] == pytest.approx(ledger.optimizer_state, rel=0.01)
    assert most[State.SHARDED_GRADIENTS] == ledger.gradients
    assert most[State.ACTIVATIONS] == pytest.approx(ledger.activations, rel=0.25)
    sums = sum(memory.by_state.values())
    assert memory.peak == int(np.argmax(sums))
    assert sum(item.nbytes for item in memory.largest) <= sums[memory.peak]
    assert len(memory.at_s) == len(memory.labels) and (np.diff(memory.at_s) >= 0).all()


def test_optimizer_state_is_listed_by_tensor_with_parameter_and_shape():
    def listed() -> list[str]:
        model = chain(partial(fully_shard, strategy="zero3"))
        optimizer = sgd(model)
        model(inputs(0)).mean().backward()
        optimizer.step()
        return [item.what for item in held_between_steps(model, [optimizer]) if item.state == State.OPTIMIZER.value]

    what = run_alone(listed)
    assert what
    for item in what:
        assert re.fullmatch(r"momentum_buffer of \S+\.\S+, float32 \[[\d, ]+\]", item), item


def test_logged_values_are_averaged_over_ranks_per_step(trained):
    _, reported, run = trained
    means = np.mean([[loss.item() for loss in losses] for _, losses, *_ in reported], axis=0)
    assert run.training["loss"] == pytest.approx(means[2:])
    assert run.training["learning rate"] == pytest.approx(0.05)


def test_reported_shards_cover_each_parameter(trained):
    _, _, run = trained
    for shard in run.shards:
        rows = [row for start, stop in shard.rows for row in range(start, stop)]
        assert rows == list(range(shard.shape[shard.dim]))
    assert {shard.packed for shard in run.shards} == {False, True}


def copied(trained: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained[0], tmp_path / "copy"))


def test_truncated_or_missing_rank_file_is_tolerated_and_none_raises(trained, tmp_path):
    folder, whole = copied(trained, tmp_path), trained[2]
    path = path_of(folder, 1)
    lines = path.read_bytes().splitlines(keepends=True)
    place = next(i for i, line in enumerate(lines) if b'"kind":"step","n":6' in line)
    for cut in (len(lines[place]) - 1, 3):
        path.write_bytes(b"".join(lines[:place]) + lines[place][:cut])
        run = read_run(folder)
        assert run.steps.tolist() == whole.steps.tolist()
        assert np.isnan(run.step_s[1, 3:]).all() and not np.isnan(run.step_s[:, :3]).any()
    path.unlink()
    assert [rank.rank for rank in read_run(folder).ranks] == [0]
    path_of(folder, 0).unlink()
    with pytest.raises(fullshard.ConfigError, match="no run was recorded there"):
        read_run(folder)


@pytest.mark.parametrize(
    "damage",
    [
        *(b"\x00\xff garbage", b"[1, 2]", b"7", b'{"n": 3}', b'{"kind":"step"}', b"[" * 100000),
        b'{"kind":"spans","n":' + b"9" * 5000 + b",",
    ],
)
def test_damaged_lines_are_logged_and_skipped(trained, tmp_path, caplog, damage):
    folder, whole = copied(trained, tmp_path), trained[2]
    path = path_of(folder, 1)
    lines = path.read_bytes().splitlines(keepends=True)
    lines.insert(2, damage + b"\n")
    path.write_bytes(b"".join(lines))
    run = read_run(folder)
    assert np.array_equal(run.step_s, whole.step_s, equal_nan=True)
    assert run.facts[DROPPED] == "1 of rank 1"
    assert DROPPED not in whole.facts
    (record,) = caplog.records
    assert f"{path}: skipped damaged line 3 (1 in total)." == record.message


ODD_VALUES = [None, True, -1, 0.5, math.nan, 10**30, "9", "<b>", "\x1b[31m", [], [None], {}, {"a": 1}, 2**31]


def places_in(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in pairs:
        yield from places_in(item, (*place, key))


def with_odd_values(folder: Path, draw: random.Random) -> None:
    """Replace, remove or rename a few values in the files of the run in `folder`."""
    for _ in range(draw.randint(1, 3)):
        path = path_of(folder, draw.randrange(2))
        lines = [json.loads(line) for line in path.read_bytes().splitlines()]
        kind = draw.choice(sorted({line["kind"] for line in lines if len(line) > 1}))
        line = draw.choice([line for line in lines if line["kind"] == kind])
        *way, last = draw.choice([place for place in places_in(line) if place and place != ("kind",)])
        parent = line
        for key in way:
            parent = parent[key]
        how = draw.randrange(4)
        if how < 2:
            parent[last] = draw.choice(ODD_VALUES)
        elif how == 2:
            del parent[last]
        elif isinstance(parent, dict):
            parent["x"] = parent.pop(last)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.slow
def test_invalid_values_in_a_log_are_shown_or_skipped(trained, tmp_path, caplog):
    """An unexpected type, a missing field, or a world size of two billion caused bare Python errors or a hang."""
    left_out = 0
    for case in range(150):
        folder = copied(trained, tmp_path / str(case))
        with_odd_values(folder, random.Random(case))
        caplog.clear()
        with suppress(fullshard.ConfigError):
            run = read_run(folder)
            as_shown(run, find_causes(run))
        left_out += bool(caplog.records)
    assert left_out > 50


def test_unwritable_report_folder_raises_config_error(trained, tmp_path):
    folder = copied(trained, tmp_path)
    (folder / f"report.json.{os.getpid()}.tmp").mkdir()
    with pytest.raises(fullshard.ConfigError, match="the report cannot be written there"):
        report_command([str(folder)])


def test_escape_sequences_from_a_log_are_not_printed(trained, tmp_path, capsys):
    folder = copied(trained, tmp_path)
    for path in (folder / "report").iterdir():
        path.write_bytes(
            path.read_bytes().replace(b'"host":"', b'"host":"\\u001b[2J').replace(b'"name":"', b'"name":"\\u001b]0;x')
        )
    report_command([str(folder)])
    assert "\x1b" not in capsys.readouterr().out


def test_step_uses_the_counters_of_the_next_sample(trained, tmp_path):
    folder = copied(trained, tmp_path)
    for path in (folder / "report").glob("*.jsonl"):  # a slow machine has recorded some samples
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if json.loads(line)["kind"] != "counters"))
    samples = {4: [None, 1.0], 7: [None, 3.0]}
    rest: list[float | None] = [None] * (len(COUNTERS) - 2)
    with path_of(folder, 1).open("a") as file:
        for number, values in samples.items():
            file.write(json.dumps({"kind": "counters", "n": number, "v": values + rest}) + "\n")
    run = read_run(folder)
    (name,) = [item for at, item in enumerate(COUNTERS) if at == 1]
    assert run.steps.tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert np.isnan(run.counters[name][0]).all()
    assert run.counters[name][1].tolist() == [1, 1, 3, 3, 3, 3, 3]
    assert next(iter(COUNTERS)) not in run.counters


@pytest.mark.slow
def test_counters_are_recorded_during_training(monkeypatch, tmp_path):
    monkeypatch.setattr(counters_module, "_EVERY_S", 0.0)
    run_alone(lambda: train(str(tmp_path), 6))
    run = read_run(tmp_path)
    assert (run.counters["CPU of this rank"] >= 0).all()
    assert run.counters["CPU of this rank"].shape == run.step_s.shape


def test_resumed_run_keeps_earlier_steps_and_replaces_repeated_steps(trained, tmp_path):
    folder = copied(trained, tmp_path)
    for rank in range(2):
        path = path_of(folder, rank)
        start = json.loads(path.read_bytes().splitlines()[0])
        again = {"kind": "step", "n": 8, "p": [1.0] * len(PARTS), "b": 1.0, "s": None, "h": 1, "w": 1.0}
        added = [start | {"first_step": 6}, *({**again, "n": number} for number in (6, 7, 8))]
        with path.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in added))
    run = read_run(folder)
    assert run.steps.tolist() == [3, 4, 5, 8, 9]  # the first two after a start are not timed
    assert run.step_s[:, 3].tolist() == [len(PARTS)] * 2


@pytest.mark.slow
def test_number_of_step_lines_grows_logarithmically(monkeypatch, tmp_path):
    """A line contains the mean of the values logged in its steps, whether in each of them or in few."""
    monkeypatch.setattr(recording_module, "_LINES", 8)

    def one() -> Run:
        model = chain(fully_shard)
        optimizer = sgd(model)
        with fullshard.report(model, tmp_path) as report:
            for number in range(1, 61):
                model(inputs(number)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                report.log(loss=number, **({"score": number} if number % 7 == 0 else {}))
        assert report.page is None or report.page.exists()
        assert not report._unread and not report._logged
        return read_run(tmp_path)

    run = run_alone(one)
    assert run.steps.tolist() == [*range(3, 9), *range(10, 26, 2), *range(28, 60, 4), 60][: len(run.steps)]
    kinds = [line["kind"] for line in lines_in(path_of(tmp_path, 0))]
    assert kinds.count("step") <= 25 and kinds.count("told") <= 26
    logged = run.training["loss"], run.training["score"]
    for start, stop, loss, score in zip([2, *run.steps[:-1]], run.steps, *logged, strict=True):
        covered = range(start + 1, stop + 1)
        assert loss == np.mean(covered)
        scores = [number for number in covered if number % 7 == 0]
        assert score == np.mean(scores) if scores else np.isnan(score)


@pytest.mark.slow
def test_recording_memory_does_not_grow_with_steps(monkeypatch, tmp_path):
    """Lines cover up to 32 steps, as those of a run of 100,000 steps do."""
    monkeypatch.setattr(recording_module, "_LINES", 512)

    def one() -> tuple[int, int, int]:
        report, held = fullshard.report(chain(fully_shard), tmp_path), []
        units = {unit: UnitCounts(gathers=2, gather_s=0.01) for unit in ("0", "1", "2")}
        spans = [Piece("compute", "forward", "0", 0.0, 1.0)] * 100
        tracemalloc.start()
        for number in range(1, 16_001):
            parts = dict.fromkeys(PARTS, 0.001)
            step = StepTaken(
                number=number,
                step_s=0.008,
                parts_s=parts,
                host_waits={"clipping": (1, 0.001)},
                usage=Usage(0.0, 0.0, 7),
                work=1.0,
                best_bytes_per_s=1.0,
                units=units,
                pieces=spans if is_kept_whole(number) else [],
            )
            report.log(number, loss=1.0)
            report._after_step(step)
            if number in (4_000, 16_000):
                held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        report.close(draws=False)
        return held[0], held[1], path_of(tmp_path, 0).stat().st_size

    before, after, nbytes = run_alone(one)
    assert after - before < 30_000, (before, after)
    assert nbytes < 600_000


def run_alone(function: Any) -> Any:
    import torch.distributed as dist

    from fullshard._dry_compat import fake_store

    dist.init_process_group("fake", rank=0, world_size=1, store=fake_store())
    try:
        return function()
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_trainer_callbacks_record_logged_values(tmp_path):
    """The test calls the callbacks as the trainers do. The order of calls is the trainers' responsibility."""
    lightning = pytest.importorskip("fullshard.integrations.lightning")
    transformers = pytest.importorskip("fullshard.integrations.transformers")

    def steps(begin: Any, log: Any, end: Any) -> None:
        model = chain(fully_shard)
        optimizer = sgd(model)
        begin(model)
        for number in range(1, 5):
            model(inputs(number)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            log(model, number)
        end(model)

    def by_transformers(folder: Path) -> None:
        callback, args = transformers.ReportCallback(folder), SimpleNamespace(to_dict=lambda: {"lr": 1.0, "x": None})
        states = [SimpleNamespace(global_step=number) for number in range(5)]
        steps(
            lambda model: callback.on_train_begin(args, states[0], None, model=model),
            lambda _, n: callback.on_log(args, states[n], None, logs={"loss": n, "grad_norm": torch.tensor(2.0 * n)}),
            lambda _: callback.on_train_end(args, states[4], None),
        )

    def by_lightning(folder: Path) -> None:
        callback, trainer = lightning.ReportCallback(), SimpleNamespace(default_root_dir=str(folder), global_step=0)

        def log(model: Any, number: int) -> None:
            trainer.global_step = number
            trainer.logged_metrics = {"loss": torch.tensor(float(number)), "grad_norm": 2.0 * number, "text": "no"}
            callback.on_train_batch_end(trainer, model, None, None, 0)

        steps(
            lambda item: callback.on_train_start(trainer, item), log, lambda item: callback.on_train_end(trainer, item)
        )

    for number, train_by in enumerate((by_transformers, by_lightning)):
        folder = tmp_path / str(number)
        run_alone(partial(train_by, folder))
        run = read_run(folder)
        assert run.steps.tolist() == [3, 4]
        assert {name: values.tolist() for name, values in run.training.items()} == {
            "loss": [3, 4],
            "gradient norm": [6, 8],
        }
        assert (folder / "report.html").exists()


def test_write_error_ends_the_recording_without_raising(tmp_path, caplog):
    (tmp_path / "x").write_text("a file")
    (tmp_path / "report").mkdir()
    path_of(tmp_path, 1).symlink_to("/dev/full")
    for file in (RankFile(path_of(tmp_path / "x", 0)), RankFile(path_of(tmp_path, 1))):
        for number in range(3):
            file.add("step", n=number)
            file.flush()
        file.close()
    assert [record.message.count("recording of this run has ended") for record in caplog.records] == [1, 1]


def test_page_on_a_full_disk_logs_a_one_line_warning(tmp_path, caplog):
    (tmp_path / f"report.json.{os.getpid()}.tmp").symlink_to("/dev/full")
    run_alone(lambda: train(str(tmp_path), 1))
    (warning,) = caplog.records
    assert warning.exc_info is None
    assert warning.message == f"rank 0: no page was written for {tmp_path} (No space left on device)"
    assert list(tmp_path.glob("*.tmp")) == []


STUBS = {
    "wandb": """
import json
class Run:
    def log(self, numbers): reported.append((numbers.pop("step"), numbers))
    def finish(self): reported.append("closed")
def init(**given):
    reported.append((given["name"], given["config"]))
    return Run()
reported = []
""",
    "mlflow": """
reported = []
def start_run(run_name): reported.append(run_name)
def log_params(params): reported[-1] = reported[-1], params
def log_metrics(numbers, step): reported.append((step, numbers))
def end_run(): reported.append("closed")
""",
    "tensorboard": "reported = []\n",
}
WRITER = """
from tensorboard import reported
class SummaryWriter:
    def __init__(self, folder): reported.append(folder)
    def add_text(self, name, text): reported[-1] = reported[-1].split("/")[-2], {"batch": text.split(": ")[1]}
    def add_scalar(self, name, value, step): reported.append((step, {name: value}))
    def close(self): reported.append("closed")
"""


def reported_elsewhere(destination: str, folder: Path) -> list[Any]:
    model = chain(fully_shard)
    optimizer = sgd(model)
    with fullshard.report(model, folder, settings={"batch": 6}, log_to=destination) as report:
        for number in range(1, 4):
            model(inputs(number)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            report.log(loss=float(number))
    return list(sys.modules[destination].reported)


@pytest.mark.parametrize("destination", ["tensorboard", "wandb", "mlflow"])
def test_log_to_sends_metrics_to_the_named_tracker(destination, tmp_path, monkeypatch):
    """The report uses the documented calls of each library. Stubs replace the libraries here."""
    for name, source in STUBS.items():
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
    writer = ModuleType("torch.utils.tensorboard")
    monkeypatch.syspath_prepend(str(tmp_path))
    exec(WRITER, vars(writer))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", writer)
    first, *reported, last = run_alone(partial(reported_elsewhere, destination, tmp_path / "x"))
    assert (first, last) == (("x", {"batch": "6"}), "closed")
    by_step: dict[int, dict[str, float]] = {}
    for step, numbers in reported:
        by_step.setdefault(step, {}).update(numbers)
    assert sorted(by_step) == [1, 2, 3]
    for step, numbers in by_step.items():
        assert numbers["loss"] == step
        parts = sum(numbers[f"seconds/{part}"] for part in PARTS)
        assert numbers["seconds/step"] == pytest.approx(parts)
    with pytest.raises(fullshard.ConfigError, match="tensorboard, wandb, mlflow"):
        run_alone(lambda: fullshard.report(chain(fully_shard), tmp_path / "y", log_to="paper"))


def test_report_of_model_without_units_raises_before_writing(tmp_path):
    with pytest.raises(fullshard.ConfigError, match="Linear has no units"):
        fullshard.report(nn.Linear(2, 2), tmp_path)
    assert not os.listdir(tmp_path)
