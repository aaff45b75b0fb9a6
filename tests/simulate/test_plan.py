"""`fullshard plan`: short models predict long ones, the best program that fits is chosen, printed code runs."""

import json
import re
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fullshard import ConfigError, dry
from fullshard.disk.speed import TYPICAL
from fullshard.dry import watch
from fullshard.dry.run import own_loss
from fullshard.optim.clipping import clip_grad_norm_
from fullshard.plan.allocator import allocator_use
from fullshard.plan.hardware import described, hardware, known_hardware
from fullshard.plan.memory import State, memory_peak
from fullshard.plan.prediction import steps_of
from fullshard.plan.process import FIRST_STEPS_NBYTES
from fullshard.planner import steps
from fullshard.planner import workers as planner_workers
from fullshard.planner.advice import python_lines, train_flags, trainer_arguments
from fullshard.planner.bounds import states_bytes
from fullshard.planner.candidates import (
    CHECKPOINTING,
    PRECISIONS,
    STRATEGIES,
    Candidate,
    Cluster,
    Program,
    checkpointed,
    programs,
    share_rows,
    usual_precision,
)
from fullshard.planner.command import run
from fullshard.planner.found import largest_rows
from fullshard.planner.page import page
from fullshard.planner.question import Question
from fullshard.planner.readings import LIMITS
from fullshard.planner.report import as_dict, nearest_lines, predict_load, stated, what_ifs
from fullshard.planner.search import least_hosts, nearest, search
from fullshard.planner.settings import MachineSettings, PlanSettings
from fullshard.planner.shorten import block_lists, shortened
from fullshard.planner.sketch import Sketch, sketch
from fullshard.planner.steps import fractions_on_cpu, take_steps
from fullshard.planner.subject import Subject, gpt_subject, named_subject
from fullshard.planner.workers import Workers
from fullshard.tape.tape import Collective
from fullshard.train.options import parse_settings
from fullshard.train.settings import ModelSettings

H100 = Cluster(hardware=hardware("h100-80"), hosts=1, per_host=8)
TWO_HOSTS = H100.with_hosts(2)


def gpt(layers: int = 6, seq: int = 32) -> Subject:
    return gpt_subject(ModelSettings(size="nano", layers=layers), seq=seq)


def wide_gpt(layers: int = 6, seq: int = 256) -> Subject:
    """Return a model that is large compared with the segments of the caching allocator."""
    return gpt_subject(ModelSettings(size="nano", layers=layers, width=1024, heads=16), seq=seq)


# ------------------------------------------------------------------------------------- short models predict long ones


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "kept", "accumulates"),
    [
        ("zero3", "every-1", True),
        ("ddp", "none", False),
        pytest.param("zero2", "selective", True, marks=pytest.mark.slow),
        pytest.param("hsdp", "none", True, marks=pytest.mark.slow),
        pytest.param("hpz", "every-1", False, marks=pytest.mark.slow),
    ],
)
def test_shortened_model_predicts_memory_and_time_of_the_full_model(strategy, kept, accumulates):
    """Compare memory by state, and time, with rows and microbatches that were never run.

    Times are nonlinear where host and accelerator are about equally fast. With one row, the time predicted for `ddp`
    is 1.5 % too short.
    """
    cluster = TWO_HOSTS if strategy in ("hsdp", "hpz") else H100
    program = Program(strategy=strategy, checkpointing=kept, accumulates=accumulates)
    subject, count = gpt_subject(ModelSettings(size="large"), seq=1024), 5 if accumulates else 1
    short = sketch(subject, cluster, program).figures(4, count)
    whole = sketch(subject, cluster, program, shortens=False).figures(4, count)
    assert short.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.01)
    assert short.step_s == pytest.approx(whole.step_s, rel=0.01)
    assert short.where == whole.where
    for state in State:
        assert short.by_state[state] == pytest.approx(whole.by_state[state], rel=0.01, abs=0.001 * whole.peak_bytes)
    assert (short.flops, short.sent_bytes) == pytest.approx((whole.flops, whole.sent_bytes))


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "kept"), [("zero3", "none"), ("ddp", "every-2")])
def test_shortened_model_with_cpu_steps_predicts_the_full_model(strategy, kept):
    program = Program(strategy=strategy, checkpointing=kept, accumulates=True, cpu=1.0)
    short, whole = (sketch(wide_gpt(9), H100, program, shortens=shortens).figures(2, 5) for shortens in (True, False))
    for name in ("peak_bytes", "host_bytes", "step_s"):
        assert getattr(short, name) == pytest.approx(getattr(whole, name), rel=0.01), name


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "kept"), [("zero3", "none"), ("zero3", "every-2"), ("ddp", "every-1")])
def test_shortened_model_predicts_peak_and_reserved_bytes_for_any_rows(strategy, kept):
    """The rows determine where the peak is: in parameters or gradients with few rows, in activations with many.

    The first step runs with one row, before the order of units is known. So it is compared with one row only. The
    peak can be in the second block, which a model of three blocks does not distinguish from the one before the last.
    """
    subject, program = wide_gpt(12), Program(strategy=strategy, checkpointing=kept)
    made = sketch(subject, H100, program)
    for rows in (1, 6, 40):
        taken = take_steps(subject, H100, program, {}, (rows, rows), 1.0, None)
        taken.tape.entries = taken.tape.entries[: taken.begins[2]]
        peak = memory_peak(taken.tape, since=taken.begins[0 if rows == 1 else 1]).nbytes
        found = made.figures(rows, 1)
        assert found.peak_bytes == pytest.approx(peak, rel=0.06)
        reserved = allocator_use(taken.tape, since=taken.begins[0]).reserved
        assert found.needed_bytes == pytest.approx(reserved, rel=0.12)


class BatchFirst(nn.Module):
    """Attention that copies its input, unless it has one row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.MultiheadAttention(256, 4, 0.1, batch_first=True) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, x, x, need_weights=False)[0]
        return x


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "batch first"])
def test_steps_with_few_rows_predict_steps_with_more_rows(name):
    """Compare memory and time with the same steps run with 5 rows."""
    subject = gpt(layers=3, seq=1024)
    if name == "batch first":
        with torch.device("meta"):
            model = BatchFirst()
        batch: Any = lambda rows: torch.ones(rows, 512, 256)  # noqa: E731
        subject = Subject(name=name, model=model, make_batch=batch, loss=own_loss)
    program = Program(strategy="zero3")
    few = sketch(subject, H100, program, shortens=False)
    many = take_steps(subject, H100, program, {}, (5, 5, 6), 1.0, None)
    for item in ("flops", "skipped_flops"):
        assert sum(getattr(each, item, 0) for each in few.tapes[0].at(5)) == sum(
            getattr(each, item, 0) for each in many.one
        )
    reported, taken = few.figures(5, 1), replace(few, _tapes=[many]).figures(5, 1)
    assert few.tapes[0].rows == (2 if name == "batch first" else 1)
    assert reported.peak_bytes == pytest.approx(taken.peak_bytes, rel=0.01)
    assert reported.step_s == pytest.approx(taken.step_s, rel=0.01)


def test_block_lists_are_found_shortened_and_restored():
    model = nn.ModuleDict({"first": nn.Sequential(*[nn.Linear(3, 3) for _ in range(7)]), "few": nn.ModuleList()})
    model["other"] = nn.Sequential(nn.Linear(3, 4), *[nn.Linear(4, 4) for _ in range(7)])
    model["switched"] = nn.ModuleList(nn.Dropout() for _ in range(7))
    assert [(block_list.fqn, block_list.length) for block_list in block_lists(model)] == [("first", 7)]
    before = list(model["first"])
    for blocks, remaining in shortened(model, {"first": 3}):
        assert len(blocks) == 3
        blocks.extend(remaining)
    assert list(model["first"]) == before


@pytest.mark.slow
def test_states_bytes_are_a_lower_bound_of_peak_memory():
    summed = [Program(strategy=item, accumulates=True, syncs_each=True) for item in ("zero1", "zero2")]
    for program in (Program(strategy="zero3"), Program(strategy="zero1", accumulates=True), *summed):
        for subject in (gpt(), gpt(layers=48, seq=1)):
            question = Question(subject=subject, cluster=H100, global_batch=32)
            assert 0 < states_bytes(question, program) <= sketch(subject, H100, program).figures(1, 2).peak_bytes


# ------------------------------------------------------------------------------------------------------- the search


def requested(**changes: Any) -> Question:
    usual = {"subject": gpt(), "cluster": TWO_HOSTS, "global_batch": 64, "strategies": ("zero3", "hsdp")}
    return Question(**{**usual, "checkpointing": ("none",), "exhaustive": True, **changes})


@pytest.fixture(scope="module")
def plan() -> Any:
    return search(requested())


@pytest.mark.slow
def test_recommended_plan_is_the_fastest_that_fits(plan):
    safe = TWO_HOSTS.safe_bytes
    assert len(one_block(plan)) == 6  # per strategy, one without accumulation and two with it
    assert plan.best is not None and plan.best.figures.needed_bytes <= safe
    shapes = [(made.sketch, *shape) for made in plan.found for shape in plan.question.shapes_of(made.sketch.program)]
    every = [made.figures(rows, count) for made, rows, count in shapes]
    assert plan.best.figures.step_s == min(item.step_s for item in every if item.needed_bytes <= safe)
    assert plan.runner_up.sketch.program.strategy != plan.best.sketch.program.strategy
    for item in every:
        assert item.candidate.rows * item.candidate.microbatches * TWO_HOSTS.world == 64
        assert sum(item.by_state.values()) == pytest.approx(item.peak_bytes, rel=0.01)
        assert sum(item.limits.values()) == pytest.approx(item.step_s, rel=0.05)
        assert 0 < item.flops_utilisation < 1 and set(item.limits) == set(LIMITS)


def fail_like_autograd_in_a_fork(*args: Any) -> None:
    raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")


@pytest.mark.slow
def test_plan_is_identical_if_forks_cannot_run_backward(plan, monkeypatch):
    """A process that has already run backward, as with a GPU, cannot run it in forks."""
    for in_fork in (planner_workers._run_backward, planner_workers._sketched):
        monkeypatch.setattr(planner_workers, in_fork.__name__, fail_like_autograd_in_a_fork)
    other = search(requested())
    assert [(item.sketch.program, item.figures) for item in other.found] == [
        (item.sketch.program, item.figures) for item in plan.found
    ]
    assert not planner_workers._REQUESTED


@pytest.mark.slow
def test_simulations_started_ahead_are_reused(plan):
    with Workers(plan.question) as workers:
        predict_load(plan, workers)
        assert len(workers._ahead) == (workers.at_once > 1)  # none if forks cannot run backward
        for question, program, future in workers._ahead:
            assert question.cluster.hosts == 4 and program == plan.best.sketch.program
            assert workers(question, program) is future
            assert workers(plan.question, program) is not future
        foreseen = what_ifs(plan, workers)
    with Workers(plan.question) as workers:
        assert what_ifs(plan, workers) == foreseen


def test_what_ifs_vary_the_recommended_program(plan):
    best = plan.best.figures
    with Workers(plan.question) as workers:
        of_network, of_twice = what_ifs(plan, workers)
    assert of_network.figures.candidate == best.candidate and of_network.of_best <= 1
    assert of_twice.figures.candidate.program.strategy == best.candidate.program.strategy
    assert str(best.candidate.program) in str(of_network)


@pytest.mark.slow
def test_what_ifs_of_one_rank_omit_the_network():
    question = requested(cluster=replace(H100, per_host=1), global_batch=4, strategies=("ddp",))
    with Workers(question) as workers:
        changes = what_ifs(search(question, workers), workers)
    assert [change.change for change in changes] == ["Twice the hosts, the same strategy"]


@pytest.mark.slow
def test_what_ifs_report_that_twice_the_hosts_cannot_share_the_batch():
    question = requested(global_batch=16, strategies=("zero3",))
    with Workers(question) as workers:
        of_network, of_twice = what_ifs(search(question, workers), workers)
    assert of_network.figures is not None and of_twice.figures is None
    assert str(of_twice) == "Twice the hosts: --global-batch 16: 32 ranks cannot share 16 rows evenly. Use 32."


@pytest.mark.slow
def test_zero1_and_zero2_are_identical_without_kept_gradients():
    """The planner simulates only one of them."""
    for accumulates in (False, True):
        one, two = (
            sketch(gpt(), H100, Program(strategy=item, accumulates=accumulates, syncs_each=accumulates))
            for item in ("zero1", "zero2")
        )
        for rows in (1, 4):
            first, second = (item.figures(rows, 1 + accumulates) for item in (one, two))
            assert (first.flops, first.sent_bytes) == (second.flops, second.sent_bytes)
            assert second.peak_bytes <= first.peak_bytes
            assert second.step_s == pytest.approx(first.step_s, rel=0.01)
    every = [program for program in programs(H100, checkpointing=("none",)) if program.strategy in ("zero1", "zero2")]
    assert {(item.strategy, item.accumulates, item.syncs_each) for item in every} == {
        ("zero1", False, False),
        ("zero1", True, False),
        ("zero2", True, False),
        ("zero2", True, True),
    }


@pytest.mark.slow
def test_more_memory_never_reduces_the_largest_microbatch():
    """Less memory is never faster: programs that fit into less memory also fit into more."""
    made = sketch(wide_gpt(), TWO_HOSTS, Program(strategy="zero3"))
    needed = [made.needed_bytes(rows) for rows in (1, 2, 4, 8)]
    assert needed == sorted(needed)
    for share in (1.0, 1 + TWO_HOSTS.memory_error):
        rows = [largest_rows(with_usable(made, share * each)) for each in needed]
        assert rows == sorted(rows) and rows[0] == 1
        assert share == 1.0 or rows == [1, 2, 4, 8]
    assert largest_rows(with_usable(made, needed[0] - 1)) == 0


def with_usable(made: Sketch, nbytes: float) -> Sketch:
    """Return a sketch on machines with this much usable memory."""
    other = made.on(replace(made.cluster.hardware, memory_bytes=nbytes))
    other.cluster = replace(other.cluster, share=1.0)
    return other


@pytest.mark.slow
def test_slower_network_never_speeds_up_a_step(plan):
    machine = TWO_HOSTS.hardware
    slower = replace(machine, network=replace(machine.network, bytes_per_s=machine.network.bytes_per_s / 50))
    for found in plan.found:
        candidate = found.figures.candidate
        again = found.sketch.on(slower).figures(candidate.rows, candidate.microbatches)
        assert again.step_s >= found.figures.step_s
    with Workers(plan.question) as workers:
        assert any(item.change == "Half the network" and item.of_best <= 1.001 for item in what_ifs(plan, workers))


@pytest.mark.slow
def test_pruned_search_finds_a_plan_close_to_the_fastest(plan):
    found = search(requested(exhaustive=False))
    assert found.best.figures.step_s <= 1.03 * plan.best.figures.step_s


@pytest.mark.slow
def test_plan_reports_that_nothing_fits():
    tiny = replace(H100, hardware=replace(H100.hardware, memory_bytes=1e4, host_memory_bytes=1e4), share=1.0)
    found = search(requested(cluster=tiny, strategies=("zero3",), global_batch=8))
    assert found.best is None
    assert "Nothing fits" in stated(found)[-1] and "--fits-on" in stated(found)[-1]


def test_least_disk_fraction_that_fits_is_chosen(plan, monkeypatch):
    """Memory falls by the offloaded states minus buffers. The step grows by the time of the disk at most."""
    monkeypatch.setattr("fullshard.planner.sketch.CHUNK_NBYTES", 1000)
    made = next(item.sketch for item in plan.found if item.sketch.program.strategy == "zero3")
    states = made.states_bytes
    assert states == pytest.approx(states_bytes_of(made), rel=0.02)
    whole = made.figures(1, made.program.accumulates + 1)
    for share in (0.25, 0.5, 1.0):
        part = made.with_on_disk(share)
        figures = part.figures(1, made.program.accumulates + 1)
        offloaded = share * states - part.disk_buffers_bytes
        assert figures.needed_bytes == pytest.approx(whole.needed_bytes - offloaded)
        assert figures.by_state[State.OPTIMIZER] == pytest.approx(max(0, whole.by_state[State.OPTIMIZER] - offloaded))
        nbytes = share * states * TWO_HOSTS.per_host
        assert 0 <= figures.step_s - whole.step_s <= TYPICAL.seconds(nbytes, nbytes)
        assert figures.limits["disk"] == pytest.approx(figures.step_s - whole.step_s)
    for usable in (whole.needed_bytes, made.with_on_disk(0.8).needed_bytes(1), 0.0):
        least = made.least_on_disk(1, usable)
        assert (least is None) == (usable == 0)
        if least:
            assert made.with_on_disk(least).needed_bytes(1) <= usable < made.with_on_disk(least - 0.01).needed_bytes(1)
            assert least == pytest.approx(0.8)
    assert made.least_on_disk(1, whole.needed_bytes) == 0


def states_bytes_of(made: Any) -> float:
    return (
        sum(2 * param.numel() * param.element_size() for param in made.subject.model.parameters()) / made.cluster.world
    )


# 1.40 GB of GPU memory are usable. The model needs 1.72 GB with everything on the device.
TIGHT = ["--size", "xl", "--layers", "6", "--per-host", "1", "--gpu-memory", "0.0165", "--global-batch", "1"]
TIGHT += ["--strategies", "ddp", "--checkpointing", "every-1"]


@pytest.mark.slow
def test_disk_offload_is_planned_if_nothing_else_fits(tmp_path, capsys):
    """The host's memory is too small for offloading to the CPU."""
    (tmp_path / "small.toml").write_text('like = "h100-80"\nname = "small"\nhost_memory_bytes = 0.25e9')
    argv = [*TIGHT, "--hardware", str(tmp_path / "small.toml")]
    code, stated = reported(capsys, *argv)
    assert code == 0, stated
    assert "1 of which the memory of a host is too small, with states on the CPU" in stated
    assert "of the optimizer's state on a disk" in stated and "TB written per day" in stated
    assert 'offload_policy=Offload(optimizer={"disk": 0.' in stated and "--offload-optimizer 0." in stated
    code, stated = reported(capsys, *argv, "--why", "ddp")
    assert code == 1 and re.search(r"Closest to fitting: .*% of states on disk.* fits, with", stated), stated


@pytest.mark.slow
def test_cpu_offload_is_planned_before_disk_offload(capsys):
    code, stated = reported(capsys, *TIGHT)
    assert code == 0 and "disk" not in stated, stated
    assert "ddp, 29% on CPU" in stated and "29% of the optimizer's state on the CPU" in stated
    assert 'offload_policy=Offload(optimizer={"cpu": 0.29})' in stated and "--offload-optimizer-cpu 0.29" in stated
    assert re.search(
        r"The CPUs of a host step it in 0.4\d GB of page-locked memory, of 2,000.0 GB: .* 150 GB/s", stated
    )


def tight(question: Question, part: float) -> Question:
    """Return a question whose memory is between what `zero3` needs with all states on the CPU (0) and with none (1)."""
    every, none = (question.requested(Program(strategy="zero3", cpu=share)).needed_bytes(1) for share in (1.0, 0.0))
    assert every < none
    memory = question.cluster.hardware.memory_bytes
    return replace(question, cluster=replace(question.cluster, share=(every + part * (none - every)) / memory))


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.1, 0.9])
def test_least_cpu_fraction_that_fits_is_chosen(part):
    """Dry runs of the whole model confirm that it fits with that fraction, and not with one unit less, or none."""
    one_shape = requested(subject=wide_gpt(), cluster=H100, global_batch=8, strategies=("zero3",))
    question = tight(one_shape, part)
    found = search(question).best
    assert found is not None and found.sketch.program.strategy == "zero3"
    fractions = fractions_on_cpu(question.subject, question.cluster, found.sketch.program)
    assert len(fractions) == 7
    every = question.requested(replace(found.sketch.program, cpu=1.0)).needed_bytes(1)
    usable = question.cluster.limit_for(every)
    place = fractions.index(found.sketch.program.cpu)
    for share in (*fractions[place - 1 : place], 0.0):
        less = replace(found.sketch.program, cpu=share)
        assert sketch(question.subject, question.cluster, less, shortens=False).needed_bytes(1) > usable
    assert found.figures.needed_bytes <= usable
    assert found.figures.host_bytes == pytest.approx(16 * numel(question) * found.sketch.program.cpu / 8, rel=0.25)
    tape = run_pasted(question, found)
    begin = steps_of(tape.entries)[0]  # the printed code creates the model on the device
    assert memory_peak(tape, since=begin).nbytes == pytest.approx(found.figures.peak_bytes, rel=0.001)
    assert memory_peak(tape, of_host=True).nbytes == pytest.approx(found.figures.host_bytes, rel=0.001)


@pytest.mark.slow
def test_remaining_states_go_to_disk_if_host_memory_is_too_small(monkeypatch):
    """Dry runs of the printed code confirm the memory of device and host."""
    for module in ("planner.sketch", "state.on_disk"):
        monkeypatch.setattr(f"fullshard.{module}.CHUNK_NBYTES", 1 << 16)
    one_shape = requested(subject=wide_gpt(), cluster=H100, global_batch=8, strategies=("zero3",))
    question = tight(one_shape, 0.5)
    on_cpu = search(question).best
    assert on_cpu is not None and not on_cpu.sketch.program.disk
    room = 0.7 * on_cpu.figures.host_bytes * question.cluster.per_host / 0.9
    machine = replace(question.cluster.hardware, host_memory_bytes=room)
    question = replace(question, cluster=replace(question.cluster, hardware=machine))
    plan = search(question)
    found = plan.best
    assert found is not None
    program = found.sketch.program
    assert 0 < program.cpu < on_cpu.sketch.program.cpu and 0 < program.disk <= 1 - program.cpu
    assert found.figures.host_bytes * question.cluster.per_host <= 0.9 * room
    assert found.figures.needed_bytes <= question.cluster.usable_bytes
    pasted = "\n".join(python_lines(question.subject, program, found.figures, question.cluster))
    assert f'Offload(optimizer={{"cpu": {program.cpu:g}, "disk": {program.disk:g}}}, folder=' in pasted
    explained = "\n".join(stated(plan))
    assert "page-locked memory" in explained and "TB written per day" in explained
    tape = run_pasted(question, found)
    begin = steps_of(tape.entries)[0]
    peak = memory_peak(tape, since=begin).nbytes  # whole units are on disk, so it may be less than predicted
    assert 0.9 * found.figures.peak_bytes <= peak <= found.figures.peak_bytes
    assert memory_peak(tape, of_host=True).nbytes <= found.figures.host_bytes


@pytest.mark.slow
def test_blocks_are_grouped_if_the_host_limits_the_step():
    """The printed code matches the prediction: fewer collectives, with this memory and time."""
    slow = replace(H100.hardware, fitted=replace(H100.hardware.fitted, host_s=40e-6))
    question = requested(cluster=replace(H100, hardware=slow), global_batch=8, strategies=("zero3",))
    plan = search(question)
    found = plan.best
    assert found is not None and found.sketch.program.blocks_per_unit == 4, "of 6 blocks"
    by_blocks = {item.sketch.program.blocks_per_unit: item.figures for item in reversed(plan.fitting)}
    assert found.figures.step_s < 0.9 * by_blocks[1].step_s
    assert any("waits" in line and "MB more memory" in line for line in stated(plan))
    tape = run_pasted(question, found)
    step = tape.entries[steps_of(tape.entries)[2] :]
    gathers = [item for item in step if isinstance(item, Collective) and "gather" in item.name]
    assert len(gathers) == 5 + 1, "two units of blocks twice and the root once; and the norm for clipping"
    assert memory_peak(tape).nbytes == pytest.approx(found.figures.peak_bytes, rel=0.001)


@pytest.mark.slow
def test_blocks_are_not_grouped_if_the_host_is_fast():
    fast = replace(H100.hardware, fitted=replace(H100.hardware.fitted, host_s=1e-9))
    plan = search(requested(cluster=replace(H100, hardware=fast), global_batch=8, strategies=("zero3",)))
    assert {item.sketch.program.blocks_per_unit for item in plan.found} == {1}


def one_block(plan: Any) -> list[Any]:
    """Return the programs in which each block is a unit."""
    return [found for found in plan.found if found.sketch.program.blocks_per_unit == 1]


def numel(question: Question) -> int:
    assert question.subject.model is not None
    return sum(param.numel() for param in question.subject.model.parameters())


def run_pasted(question: Question, found: Any) -> dry.Tape:
    """Run three steps of the printed code, and return their tape."""
    names: dict[str, Any] = {}
    program, subject = found.sketch.program, question.subject
    with dry.world(question.cluster.world), dry.taped() as tape:
        exec("\n".join(python_lines(subject, program, found.figures, question.cluster)), names)
        for _ in range(3):
            subject.loss(names["model"], subject.make_batch(1)).backward()
            clip_grad_norm_(names["model"].parameters(), 1.0)
            names["optimizer"].step()
            names["optimizer"].zero_grad()
    assert len(steps_of(tape.entries)) == 3
    return tape


@pytest.mark.slow
def test_cpu_step_time_is_independent_of_the_microbatch_count():
    """A slower CPU makes the step longer, except for the part that the device hides."""
    made = requested(cluster=H100).requested(Program(strategy="zero3", accumulates=True, cpu=1.0))
    machine = H100.hardware
    slow = made.on(replace(machine, host_memory_bytes_per_s=machine.host_memory_bytes_per_s / 100))
    (few, many), (slow_few, slow_many) = ([item.figures(1, count).step_s for count in (2, 12)] for item in (made, slow))
    assert slow_few > 1.2 * few
    assert slow_many - slow_few == pytest.approx(many - few, rel=0.01)


def test_cpu_offload_is_not_planned_if_the_cpu_computes():
    cluster = Cluster(hardware=measured_here(), hosts=1, per_host=2, share=1e-6)
    assert not any(item.sketch.program.cpu for item in search(requested(cluster=cluster, strategies=("zero3",))).found)


def test_candidate_programs_depend_on_the_cluster():
    assert {program.strategy for program in programs(TWO_HOSTS)} == set(STRATEGIES)
    assert {program.strategy for program in programs(H100)} == {"ddp", "zero1", "zero2", "zero3"}
    assert {program.strategy for program in programs(replace(H100, per_host=1))} == {"ddp"}
    assert share_rows(64, 16) == [1, 2, 4]


@settings(deadline=None, max_examples=50, derandomize=True)
@given(hosts=st.integers(2, 80), per_host=st.sampled_from((2, 8)), billions=st.floats(0.1, 400))
def test_hsdp_shards_over_the_fewest_hosts_expected_to_fit(hosts, per_host, billions):
    cluster = Cluster(hardware=hardware("h100-80"), hosts=hosts, per_host=per_host)
    with torch.device("meta"):
        model = nn.Linear(1, int(billions * 1e9), bias=False)
    subject = Subject(name="wide", model=model, make_batch=lambda rows: torch.ones(rows, 1), loss=own_loss)
    question = Question(subject=subject, cluster=cluster, strategies=("hsdp",))
    needed = 16 * billions * 1e9  # of float32: a parameter, its gradient and two moments
    chosen = {program.shard_hosts for program in question.programs()}
    whole = [n for n in (1, 2, 4, 8, 16, 32, 64) if hosts % n == 0 and hosts // n > 1]
    for share in (1, 2):
        enough = [n for n in whole if share * needed / n / per_host <= cluster.usable_bytes]
        assert not enough or enough[0] in chosen
    assert {1} <= chosen <= set(whole)
    assert len(chosen) <= 3


@pytest.mark.slow
def test_hsdp_replica_spans_hosts_if_one_host_is_too_small():
    """With four hosts, each replica spans two."""
    cluster = replace(TWO_HOSTS, hosts=4)
    question = requested(subject=wide_gpt(seq=32), cluster=cluster, strategies=("hsdp",), global_batch=32)
    needed = {
        hosts: question.requested(Program(strategy="hsdp", shard_hosts=hosts)).needed_bytes(1) for hosts in (1, 2)
    }
    assert needed[2] < needed[1]
    machine = replace(cluster.hardware, memory_bytes=(needed[1] + needed[2]) / 2)
    plan = search(replace(question, cluster=replace(cluster, hardware=machine, share=1.0)))
    assert {item.sketch.program.shard_hosts for item in plan.fitting} == {2}


@pytest.mark.parametrize("blocks", [0, 2, 6])
def test_candidate_programs_are_distinct_for_any_number_of_blocks(blocks):
    """Each program checkpoints different blocks, or reshards them at different times."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Tanh(), *[nn.Linear(4, 4) for _ in range(blocks)], nn.LayerNorm(4))
    batch: Any = lambda rows: torch.ones(rows, 4)  # noqa: E731
    subject = Subject(name="blocks", model=model, make_batch=batch, loss=own_loss)
    every = Question(subject=subject, cluster=TWO_HOSTS, global_batch=32).programs()
    without_blocks = {"zero2": "zero3", "hsdp_zero2": "hsdp"}
    changed = [
        replace(
            item,
            checkpointing=f"{checkpointed(range(blocks), item.checkpointing)} {item.checkpointing == 'selective'}",
            strategy=item.strategy if blocks else without_blocks.get(item.strategy, item.strategy),
        )
        for item in every
    ]
    assert len(set(changed)) == len(every) > 5
    assert {item.checkpointing for item in every} == set(CHECKPOINTING if blocks else ("none",))


@pytest.mark.parametrize("name", known_hardware())
def test_default_precision_is_the_fastest_16_bit_dtype(name):
    machine = hardware(name)
    dtype, _ = PRECISIONS[usual_precision(machine)]
    rates = [machine.flops_per_s.get(dtype, 0.0) for dtype in ("bfloat16", "float16")]
    assert machine.flops_per_s[str(dtype).removeprefix("torch.")] == max(rates)


@pytest.mark.slow
def test_plan_report_has_every_field(plan, tmp_path):
    with Workers(plan.question) as workers:
        report = json.loads(json.dumps(as_dict(plan, what_ifs(plan, workers))))
    assert report["recommended"]["fits"] and report["recommended"]["step_s"] > 0
    fields = {
        "strategy",
        "checkpointing",
        "rows",
        "microbatches",
        "needed_bytes",
        "peak_in",
        "by_state",
        "tokens_per_s",
    }
    fields |= {"flops_utilisation", "exposed_s", "limited_by", "seconds", "sent_bytes", "largest_rows", "precision"}
    assert all(fields <= set(row) for row in report["simulated"])
    assert set(report["paste"]) == {"Python", "fullshard train"}
    text = page(plan)
    assert "Plan: the trainer" in text and len(text) < 2e6  # drawn as `tests/report/test_page.py` says


# --------------------------------------------------------------------------------------------------- printed code


def test_printed_code_matches_the_plan(models):
    """Check the user's optimizer, the norm of gradient clipping, and when gradients are reduced."""
    pytest.importorskip("transformers")
    program = Program(strategy="zero3", accumulates=True, syncs_each=True)
    figures: Any = SimpleNamespace(candidate=Candidate(program=program, rows=2, microbatches=2))
    subject = named_subject(f"{models}:make_model", f"{models}:make_batch", None).with_optimizer(f"{models}:sgd")
    names: dict[str, Any] = {}
    with dry.world(8):
        exec("\n".join(python_lines(subject, program, figures, H100, 0.5)), names)
    assert isinstance(names["optimizer"], torch.optim.SGD)
    assert "clip_grad_norm_(model.parameters(), 0.5)" in python_lines(subject, program, figures, H100, 0.5)
    reduced_once = replace(program, syncs_each=False)
    for norm, reported in ((0.5, 0.5), (None, 0.0), (1.0, 1.0)):
        flags = train_flags(gpt(), reduced_once, figures, H100, norm)
        assert flags is not None
        assert parse_settings(flags.split(" train ")[1].split()).optimization.clip == reported
        for each in (program, reduced_once):
            assert trainer_arguments(subject, each, figures, H100, norm) is None, "it would make another optimizer"
            arguments = keys_for_the_trainer(replace(subject, is_transformers=True), each, figures, norm)
            assert arguments.get("max_grad_norm", 1.0) == reported
            kwargs = arguments.get("accelerator_config", {}).get("gradient_accumulation_kwargs", {})
            assert kwargs.get("sync_each_batch", False) == each.syncs_each
    assert train_flags(subject, reduced_once, figures, H100) is None


def keys_for_the_trainer(subject: Subject, program: Program, figures: Any, max_norm: float | None) -> dict[str, Any]:
    text = trainer_arguments(subject, program, figures, H100, max_norm)
    assert text is not None
    found: dict[str, Any] = eval(text, {"TrainingArguments": lambda folder, **keys: keys})
    return found


def test_printed_code_initializes_every_rank_equally():
    program = Program(strategy="zero3")
    figures: Any = SimpleNamespace(candidate=Candidate(program=program, rows=2, microbatches=1))
    made = []
    for rank in range(2):
        names: dict[str, Any] = {}
        torch.manual_seed(rank)
        lines = python_lines(gpt(2), program, figures, H100)
        made_at = next(place for place, line in enumerate(lines) if line.startswith("model = "))
        exec("\n".join(lines[: made_at + 1]), names)
        made.append(names["model"].state_dict())
    assert all(torch.equal(one, two) for one, two in zip(made[0].values(), made[1].values(), strict=True))


@pytest.mark.slow
def test_nonzero_bytes_are_not_printed_as_zero(capsys):
    """Nonzero sizes are never printed as 0.00 GB, or as 0.0 in the table."""
    for question in (["--why", "zero3"], []):
        code, out = reported(capsys, "--size", "nano", "--layers", "2", "--seq", "32", "--clip", "0", *question)
        assert code == 0 and "0.00 GB" not in out and not re.search(r" 0\.0 +0%", out)


def test_trainer_arguments_use_documented_fsdp_keys():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=16)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    subject = replace(gpt(), model=model, train_flags=(), is_transformers=True)
    hsdp = Program(strategy="hsdp", checkpointing="every-1", disk=0.5)
    for program in (hsdp, Program(strategy="hpz", offload=True), Program(strategy="zero3", cpu=0.3)):
        figures: Any = SimpleNamespace(candidate=Candidate(program=program, rows=2, microbatches=3))
        found = keys_for_the_trainer(subject, program, figures, 1.0)
        reported = (Path(__file__).parents[2] / "docs/transformers.md").read_text()
        assert all(f"`{key}`" in reported for key in found["fsdp_config"])
        assert found["fsdp_config"]["transformer_layer_cls_to_wrap"] == ["GPT2Block"]


# ------------------------------------------------------------------------------------------------------ the command

MODELS = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def make_model():
    return nn.Sequential(*[Block() for _ in range(6)])


def make_sharded():
    from fullshard import fully_shard

    model = make_model()
    for block in model:
        fully_shard(block)
    return fully_shard(model)


class Indexed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x, y=None):
        return self.blocks[5](self.blocks[0](x))


class Wrong(Indexed):
    def forward(self, x):
        return super().forward(x).view(5, -1)


class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x):
        x = self.layer(x)
        return x[x.sum(-1) > 0]


class Item(Asks):
    def forward(self, x):
        x = self.layer(x)
        return x * 2 if x.sum().item() > 0 else x


class Waits(Asks):
    def forward(self, x):
        while (x > 0).any():
            x = x - 1
        return self.layer(x)


def make_batch(rows):
    return torch.randn(rows, 4, 32)


def one_row():
    return torch.randn(1, 4, 32)


def pair(rows):
    return make_batch(rows), make_batch(rows)


def numbered(number):
    return torch.randn(8, 4, 32)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def not_a_model():
    return 3


def made_of_values():
    return nn.Linear(int(torch.ones(3).sum().item()), 2)
"""
USUAL = ["--hardware", "h100-80", "--checkpointing", "none", "--strategies", "zero3", "--most", "1"]
_NUMBERS = count()


@pytest.fixture
def models(tmp_path, monkeypatch):
    """Return the name of a module with models. Each test has a separate module, since modules stay imported."""
    name = f"training_{next(_NUMBERS)}"
    (tmp_path / f"{name}.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    return name


def reported(capsys: Any, *argv: str) -> tuple[int, str]:
    code = run([*USUAL, *argv])
    return code, capsys.readouterr().out


@pytest.mark.slow
def test_names_between_colons_are_not_printed_as_emoji(models, capsys, tmp_path):
    (tmp_path / f"{models}.py").write_text(f"{MODELS}\n\none = make_model\n")
    argv = ["--model", f"{models}.py:one", "--batch", f"{models}.py:make_batch", "--global-batch", "8"]
    _, out = reported(capsys, *argv)
    assert out.startswith(f"{models}.py:one: ")


def test_every_console_disables_emoji():
    package = Path(planner_workers.__file__).parents[1]
    calls = [call for path in package.rglob("*.py") for call in re.findall(r"[^.\w]Console\(.*\)", path.read_text())]
    assert calls and all("emoji=False" in call for call in calls)


@pytest.mark.slow
def test_plan_command_accepts_a_user_model(models, capsys):
    code, out = reported(
        capsys,
        "--model",
        f"{models}.py:make_model",
        "--batch",
        f"{models}.py:make_batch",
        "--global-batch",
        "8",
        "--json",
        "-",
    )
    report = json.loads(out)
    assert code == 0
    assert report["recommended"]["samples_per_s"] > 0
    assert f"from {models} import make_model" in report["paste"]["Python"]


def test_plan_command_accepts_a_model_sharded_by_the_user(models, capsys):
    argv = ["--hardware", "h100-80", "--model", f"{models}.py:make_sharded", "--batch", f"{models}.py:one_row"]
    code = run([*argv, "--json", "-"])
    report = json.loads(capsys.readouterr().out)
    assert (code, report["recommended"]["strategy"], report["recommended"]["rows"]) == (0, "own", 1)


@pytest.mark.slow
def test_plan_command_accepts_a_transformers_config(tmp_path, capsys):
    pytest.importorskip("transformers")
    config = {"model_type": "gpt2", "n_layer": 6, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 64}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    code, out = reported(capsys, "--config", str(path), "--seq", "16")
    assert code == 0
    assert "TrainingArguments(" in out and "GPT2Block" in out and "tokens/s" in out
    names: dict[str, Any] = {}
    exec(out[out.index("from transformers import") :].partition("options =")[0], {"torch": torch}, names)
    assert not names["model"].config.use_cache  # recomputed blocks would add their keys to the cache twice


@pytest.mark.slow
def test_plan_command_supports_fits_on_largest_batch_and_why(capsys, tmp_path):
    size = ["--size", "nano", "--layers", "6", "--seq", "32"]
    code, out = reported(capsys, *size, "--fits-on")
    assert code == 0 and "Fewest ranks that are enough: 1 (" in out
    code, out = reported(capsys, *size, "--largest-batch", "--html", str(tmp_path / "plan.html"))
    assert code == 0 and "Largest microbatch: " in out
    assert (tmp_path / "plan.html").stat().st_size > 1000
    code, out = reported(capsys, *size, "--why", "zero3", "--gpu-memory", "0.000001")
    assert code == 1 and " over." in out and "The peak of tensors is" in out and "largest tensors" in out


@pytest.mark.slow
def test_largest_microbatch_is_the_maximum_of_all_programs():
    """This holds even if few are simulated, because programs that need the least memory per row are first."""
    tight = replace(TWO_HOSTS, share=0.005)
    question = requested(cluster=tight, global_batch=None, largest=True, checkpointing=("none", "every-1"), most=2)
    found, every = search(replace(question, exhaustive=False)), search(question)
    assert len(one_block(found)) == 2 < len(one_block(every))
    assert max(item.largest for item in found.found) == max(item.largest for item in every.found)


@pytest.mark.slow
def test_least_hosts_finds_the_fewest_hosts_that_fit():
    """With one host fewer, the leanest program does not fit. The number of hosts need not be a power of two."""
    one = replace(requested().cluster, hosts=1, per_host=1)
    question = requested(subject=wide_gpt(), cluster=one, global_batch=None, strategies=("ddp", "zero3"))
    leanest = Program(strategy="zero3")
    needs = {
        hosts: replace(question, cluster=one.with_hosts(hosts)).requested(leanest).needed_bytes(1) for hosts in (2, 3)
    }
    share = (needs[2] + needs[3]) / 2 / one.hardware.memory_bytes
    found = least_hosts(replace(question, cluster=replace(one, share=share)))
    assert found is not None and found.best is not None
    assert (found.question.cluster.hosts, found.best.sketch.program.strategy) == (3, "zero3")


@pytest.mark.slow
def test_suggestions_are_sorted_by_required_memory():
    """A program with more activation checkpoints is suggested if it fits."""
    program = Program(strategy="zero2")
    question = requested(subject=gpt(seq=512), global_batch=None, checkpointing=("none", "every-1"))
    needs = [
        question.requested(replace(program, checkpointing=kept)).needed_bytes(1) for kept in question.checkpointing
    ]
    share = sum(needs) / 2 / question.cluster.hardware.memory_bytes
    tight = replace(question, cluster=replace(question.cluster, share=share))
    with Workers(tight) as workers:
        likes = nearest(tight, program, workers)
    assert [(like.sketch.program.checkpointing, like.fits) for like in likes] == [("every-1", True), ("none", False)]
    (line,) = nearest_lines(tight, likes[1], likes)
    assert line.startswith("Closest to fitting: zero2, checkpoints every-1, rows 1 x 1: ") and "fits, with" in line


def test_data_dependent_model_requires_the_measure_option(models, capsys):
    argv = ["--model", f"{models}.py:Asks", "--batch", f"{models}.py:make_batch", "--global-batch", "8"]
    with pytest.raises(
        ConfigError, match=r"cannot be planned without values .*training_\d+.py:\d+: return x\[x.sum.*--measure"
    ):
        reported(capsys, *argv)
    assert reported(capsys, *argv, "--measure")[0] == 0


def test_model_that_indexes_its_blocks_is_not_shortened(models):
    subject = named_subject(f"{models}:Indexed", f"{models}:make_batch", None)
    assert sketch(subject, H100, Program(strategy="zero3")).whole == {}


OWN = ["--model", "my_training:make_model", "--batch", "my_training:make_batch"]


@pytest.mark.parametrize(
    ("argv", "stated"),
    [
        (
            ["--model", "my_training:Wrong", "--batch", "my_training:make_batch"],
            r"py:\d+: .*view.*RuntimeError.*--measure",
        ),
        (
            ["--model", "my_training:Item", "--batch", "my_training:pair"],
            "Item.forward does not take a batch of .*--loss",
        ),
        (
            ["--model", "my_training:make_model", "--batch", "my_training:numbered"],
            "same shapes for 1 row and for 2",
        ),
        ([*OWN, "--optimizer", "my_training:one_row"], "It is called with a list of parameters"),
        ([*OWN, "--optimizer", "my_training:make_batch"], r"py:\d+: .*TypeError"),
        ([*OWN, "--optimizer", "builtins:list"], "returned list, but must return an optimizer"),
        ([*OWN, "--loss", "my_training:one_row"], "called with the model and a batch"),
        ([*OWN, "--seq", "8"], "--seq: not supported with --model"),
        (["--size", "nano", "--batch", "my_training:make_batch"], "--batch: not supported with --size.*use --model"),
        (["--size", "nano", "--fits-on", "--why", "zero3"], "--fits-on and --why cannot be combined"),
        (["--size", "nano", "--largest-batch", "--global-batch", "8"], "Leave --global-batch out"),
        (["--size", "nano", "--why", "zero3", "--html", "x.html"], "Leave --html out"),
        (["--size", "nano", "--against", "x"], "Leave --size out"),
        (["--size", "nano", "--most", "-1"], "--most -1: must be 0 or more"),
        (
            ["--model", "my_training:make_sharded", "--batch", "my_training:make_batch", "--strategies", "zero3"],
            "--strategies: .* already shards its model",
        ),
        (
            ["--model", "my_training:make_sharded", "--batch", "my_training:make_batch", "--compile"],
            "--compile: .* already shards its model",
        ),
        (["--size", "nano", "--hardware", "h1000"], "is neither known hardware .* h100-80"),
        (["--size", "nano", "--hardware", "here"], "Run `fullshard calibrate` to measure this machine"),
        (["--size", "nano", "--global-batch", "9"], "8 ranks cannot share 9 rows evenly. Use 8 or 16"),
        (["--size", "nano", "--per-host", "9"], "a host of h100-80 has 8"),
        (["--size", "nano", "--hosts", "0"], "--hosts 0: must be at least 1"),
        (["--size", "nano", "--hosts", "10000000"], "must be at most 131072, with 8 ranks per host"),
        (["--size", "nano", "--global-batch", str(8 * 10**12)], "must be at most 8388608, 1048576 per rank"),
        (["--size", "nano", "--gpu-memory", "2"], "must be a fraction"),
        (["--size", "nano", "--disk", "/no/such/disk"], "the folder does not exist"),
        (
            ["--model", "my_training:Waits", "--batch", "my_training:make_batch"],
            r"py:\d+ in .*forward has read a value .*100 times.*does not end. Add --measure",
        ),
        (["--size", "nano", "--seq", "0"], "--seq 0"),
        (["--size", "nano", "--measure"], "Leave it out"),
        (["--size", "nano", "--strategies", "zero9"], "zero9 is unknown. Choose from ddp"),
        (["--size", "nano", "--precision", "int3"], "Choose from bf16"),
        (["--size", "nano", "--gather-wire", "int3"], "Choose one of int8"),
        (["--size", "nano", "--why", "zero4"], "Did you mean"),
        (["--size", "giant"], "--size giant: unknown"),
        ([], "found none of them"),
        (["--size", "nano", "--config", "x.json"], "found --config and --size"),
        (["--config", "nowhere.json"], "cannot be read as JSON"),
        (["--model", "nowhere:make", "--batch", "nowhere:make"], "no such module in"),
        (["--model", "my_training:make_model"], "--batch is missing"),
        (["--model", "my_training:not_a_model", "--batch", "my_training:make_batch"], "must return the model"),
        (["--model", "my_training:made_of_values", "--batch", "my_training:make_batch"], r"py:\d+: return nn.Linear"),
        (
            ["--model", "my_training:Item", "--batch", "my_training:make_batch"],
            r"its forward reads a value \(.*py:\d+: return x \* 2 if x.sum",
        ),
        (["--model", "torch.nn:Identity", "--batch", "my_training:make_batch"], "without trained parameters"),
    ],
    ids=lambda item: " ".join(item) if isinstance(item, list) else None,
)
def test_invalid_plan_arguments_raise_with_a_remedy(models, monkeypatch, tmp_path, argv, stated):
    monkeypatch.setattr(watch, "_ENDLESS", 100)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    named = [item.replace("my_training", models) for item in argv]
    with pytest.raises(ConfigError, match=stated):
        run(["--hardware", "h100-80", *named] if "--hardware" not in argv else named)


def test_library_error_raises_with_its_line_and_our_bug_unchanged(models, tmp_path):
    """A bug of this package raises its original exception."""
    library = tmp_path / "site-packages" / "theirs.py"
    library.parent.mkdir()
    library.write_text("import torch\n\n\ndef loss(model, batch):\n    return torch.ones(3) @ batch[:, :7].t()\n")
    peer = named_subject(f"{models}:make_model", f"{models}:make_batch", f"{library}:loss")
    with pytest.raises(ConfigError, match=r"theirs\.py:5: return torch\.ones\(3\).*RuntimeError.*--measure"):
        sketch(peer, H100, Program(strategy="zero3"))
    attention = "nn.functional.scaled_dot_product_attention(torch.ones(1, 4, 8, 2), *[torch.ones(1, 3, 8, 2)] * 2)"
    library = library.with_name("others.py")
    library.write_text(f"import torch\nfrom torch import nn\n\n\ndef loss(model, batch):\n    return {attention}\n")
    peer = named_subject(f"{models}:make_model", f"{models}:make_batch", f"{library}:loss")
    with pytest.raises(ConfigError, match=r"others\.py:6: return nn\.functional.*RuntimeError"):  # from our kernel
        sketch(peer, H100, Program(strategy="zero3"))
    with (
        mock.patch.object(steps, "without_sync", side_effect=IndexError("ours")),
        pytest.raises(IndexError, match="ours"),
    ):
        sketch(gpt(), H100, Program(strategy="zero3", accumulates=True))


def test_forward_output_that_is_not_a_loss_raises(models):
    subject = named_subject(f"{models}:make_model", f"{models}:make_batch", None)
    assert subject.seq is None

    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> None: ...

    with pytest.raises(ConfigError, match="returned NoneType, which is neither a tensor"):
        own_loss(Nothing(), torch.ones(1))


def measured_here():
    """Return the CPU that the results in the repository were measured on."""
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "predicted_time.json"
    return described(json.loads(results.read_text())["here"])


@pytest.mark.slow
def test_cpu_plan_includes_process_memory_and_first_steps():
    cluster = Cluster(hardware=measured_here(), hosts=1, per_host=2)
    program = Program(strategy="zero3", checkpointing="none", accumulates=False)
    short, whole = (sketch(gpt(), cluster, program, shortens=shortens).figures(1, 1) for shortens in (True, False))
    assert short.step_s == pytest.approx(whole.step_s, rel=0.05)  # costs depend on earlier operations
    assert whole.needed_bytes > whole.peak_bytes + FIRST_STEPS_NBYTES
    assert short.needed_bytes == pytest.approx(whole.needed_bytes, rel=0.05)


def test_cpu_costs_scale_with_ranks_sharing_cores(monkeypatch):
    here = measured_here()
    monkeypatch.setattr("fullshard.planner.settings.hardware", lambda name: here)
    for ranks in (2, 4):
        cluster = PlanSettings(machines=MachineSettings(per_host=ranks)).cluster()
        assert cluster.costs("float32").turns == ranks / here.ranks_per_host
