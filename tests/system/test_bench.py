"""`make bench`: identical losses of all systems, correct statistics, correct memory counts, and processes that sleep,
fail and exit correctly. No test depends on speed.
"""

from __future__ import annotations

import io
import json
import math
import mmap
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from pages import page, rows, section
from rich.console import Console

import benchmarks.bench.command
import benchmarks.bench.rounds
import benchmarks.bench.settings
from benchmarks.bench.__main__ import main
from benchmarks.bench.floor import FloorSeconds, FloorTurn
from benchmarks.bench.model import SIZES
from benchmarks.bench.picture import draw
from benchmarks.bench.progress import shown
from benchmarks.bench.report import BenchReport, Failure, SystemResult
from benchmarks.bench.rounds import Plan, largest_difference, measure
from benchmarks.bench.spread import Spread, ratios
from benchmarks.bench.systems import SYSTEMS, chosen_systems
from benchmarks.bench.team import Team, TeamFailed
from benchmarks.bench.training import Training
from benchmarks.bench.turns import Span
from benchmarks.bench.workload import Workload
from fullshard.plan.memory_used import PeakMemory, process_bytes
from fullshard.testing import run_ranks

TINY = Workload(shape=SIZES["tiny"], world=2)
MB = 2**20


def plan(*systems: str, workload: Workload = TINY, rounds: int = 1, steps: int = 1) -> Plan:
    return Plan(workload=workload, systems=systems, rounds=rounds, steps=steps, warmup=1, timeout=300)


def silent(stage: str, what: str) -> None:
    """Show nothing."""


def differences(of: Plan) -> dict[str, float]:
    report = measure(of, silent)
    assert report.failed == {}
    return {system.name: system.loss_difference for system in report.systems}


# -- the same losses as one process -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_installed_systems_match_single_process_losses(tmp_path, capsys):
    """On two ranks every sum has two terms and therefore one order of addition, so all systems agree bitwise."""
    file = tmp_path / "result.json"
    argv = ["--size", "tiny", "--ranks", "2", "--rounds", "2", "--steps", "2", "--warmup", "1", "--json", str(file)]
    assert main(argv) == 0

    reported = json.loads(file.read_text())
    names = chosen_systems("all", 2)
    assert list(reported["systems"]) == names
    assert {name: system["loss_difference"] for name, system in reported["systems"].items()} == dict.fromkeys(
        names, 0.0
    )
    assert reported["failed"] == {}
    check_json(reported)

    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line in ("starting", "warming up") or line.startswith("round ")] == [
        "starting",
        "warming up",
        "round 1 of 2",
        "round 2 of 2",
    ]
    for name in ("floor", *names):
        assert any(line.split()[:1] == [name] for line in out.splitlines()), name
    assert "floor = compute" in out


def check_json(reported: dict) -> None:
    """Check that every field exists and is consistent with the raw numbers."""
    assert set(reported) == {
        "options", "versions", "machine", "workload", "rounds", "steps_per_round", "floor", "systems", "failed",
        "not_installed",
    }  # fmt: skip
    assert (reported["rounds"], reported["steps_per_round"]) == (2, 2)
    assert reported["options"]["size"] == "tiny"
    assert reported["workload"]["tokens_per_step"] == 2 * 2 * 8
    floors = reported["floor"]["seconds"]
    assert floors == [sum(part.values()) for part in reported["floor"]["parts"]]
    assert [set(part) for part in reported["floor"]["parts"]] == [{"compute", "optimizer", "gather", "reduce"}] * 2
    for name, system in reported["systems"].items():
        assert set(system) == {
            "settings", "step_s", "seconds", "tokens_per_s", "over", "process_bytes", "tensor_bytes", "allocated_bytes",
            "reserved_bytes", "loss_difference",
        }  # fmt: skip
        assert len(system["seconds"]) == 2
        assert min(system["seconds"]) > 0
        assert set(system["over"]) == {"floor", *reported["systems"]} - {name}
        of_rounds = [a / b for a, b in zip(system["seconds"], floors, strict=True)]
        assert system["over"]["floor"]["median"] == pytest.approx(sum(of_rounds) / 2)
        assert system["tokens_per_s"] == pytest.approx(32 / system["step_s"]["median"])
        assert (
            system["tensor_bytes"] > 4 * 4 * reported["workload"]["parameters"] / 2
        )  # one rank holds half of all four states


@pytest.mark.slow
def test_fullshard_on_three_ranks_matches_single_process_bitwise():
    workload = Workload(shape=SIZES["tiny"], world=3, optimizer="sgd")
    assert differences(plan("fullshard-zero3", workload=workload)) == {"fullshard-zero3": 0.0}


@pytest.mark.slow
def test_systems_agree_within_bfloat16_precision():
    workload = Workload(shape=SIZES["tiny"], world=2, dtype="bf16")
    found = differences(plan("fullshard-zero3", "torch-ddp", "torch-fsdp1", "torch-fsdp2", workload=workload))
    assert found.pop("fullshard-zero3") == 0.0
    for name, difference in found.items():
        assert difference < 0.05, name


@pytest.mark.slow
def test_system_variants_match_single_process_losses():
    names = [name for name, system in SYSTEMS.items() if system.variant]
    assert differences(plan(*names)) == dict.fromkeys(names, 0.0)


@pytest.mark.slow
def test_systems_match_single_process_losses_on_one_rank():
    report = measure(plan("fullshard-zero3", "torch-fsdp2", workload=Workload(shape=SIZES["tiny"], world=1)), silent)
    assert [system.loss_difference for system in report.systems] == [0.0, 0.0]


# -- arithmetic -------------------------------------------------------------------------------------------------------


def result(name: str, *seconds: float) -> SystemResult:
    return SystemResult(
        name=name,
        seconds=seconds,
        loss_difference=0.0,
        tensor_bytes=3000,
        process_bytes=None,
        allocated_bytes=None,
        reserved_bytes=None,
    )


def made_up(*systems: SystemResult, floor: float = 1.0, failed: dict[str, Failure] | None = None) -> BenchReport:
    rounds = len(systems[0].seconds) if systems else 1
    parts = FloorSeconds(compute=floor, optimizer=0.0, gather=0.0, reduce=0.0)
    return BenchReport(workload=TINY, steps=1, floor=[parts] * rounds, systems=systems, failed=failed or {})


def test_ratios_compare_rounds_not_medians():
    """The machine is ten times slower in the second round and a hundred times in the third, for both."""
    own, peer = result("fullshard-zero3", 1.0, 10.0, 300.0), result("torch-ddp", 2.0, 20.0, 100.0)
    report = made_up(own, peer)
    assert report.over("fullshard-zero3", "torch-ddp").median == 0.5
    assert report.over("torch-ddp", "fullshard-zero3").median == 2.0
    moved = made_up(own, result("torch-ddp", 20.0, 2.0, 100.0))
    assert Spread.of(moved.systems[1].seconds) == Spread.of(peer.seconds)  # the same medians
    assert moved.over("fullshard-zero3", "torch-ddp").median == 3.0


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20), st.floats(1e-3, 1e3))
def test_spread_is_ordered_and_scales_with_values(values, factor):
    spread = Spread.of(values)
    assert min(values) <= spread.low <= spread.median <= spread.high <= max(values)
    assert Spread.of([factor * value for value in values]).median == pytest.approx(factor * spread.median)
    assert set(ratios(values, values)) == {1.0}


def test_spread_is_interquartile_range():
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(median=3.0, low=2.0, high=4.0)
    assert Spread.of([7.0]) == Spread(median=7.0, low=7.0, high=7.0)


def test_span_lasts_from_first_start_to_last_end():
    assert Span.seconds([Span(3.0, 5.0), Span(2.0, 4.5)]) == 3.0


def test_floor_counts_two_all_gathers_and_one_optimizer_step():
    def rank(late: float) -> FloorTurn:
        return FloorTurn(
            compute=Span(0.0, 8.0 + late), optimizer=Span(0, 4), gather=Span(0, 2), reduce=Span(0, 1), repeats=2
        )

    seconds = FloorSeconds.of([rank(0.0), rank(2.0)])
    assert seconds == FloorSeconds(compute=5.0, optimizer=2.0, gather=2.0, reduce=0.5)
    assert seconds.total == 9.5


def test_nan_loss_has_infinite_difference():
    assert largest_difference([[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.5], [3.0, 4.25]]) == 0.5
    assert largest_difference([[1.0, math.nan]], [[1.0, 2.5]]) == math.inf
    assert made_up(result("torch-ddp", 1.0)).as_dict()["systems"]["torch-ddp"]["loss_difference"] == 0.0


def test_report_lists_failures_below_table_and_in_json():
    report = made_up(result("torch-ddp", 1.0), failed={"torch-fsdp1": Failure(reason="no", details="Traceback")})
    assert "torch-fsdp1 failed: no" in report.stated
    assert report.as_dict()["failed"] == {"torch-fsdp1": {"reason": "no", "details": "Traceback"}}
    assert len(report.tables()) == 1  # no fullshard result to compare with the peer


def test_progress_shows_bar_on_terminal_and_lines_otherwise():
    def stated(*, terminal: bool) -> str:
        console = Console(file=io.StringIO(), force_terminal=terminal, color_system=None, width=80)
        with shown(console, 3) as report:
            for what in ("floor", "torch-ddp"):
                report("starting", what)
            report("round 1 of 1", "floor")
        return console.file.getvalue()

    assert stated(terminal=False) == "starting\nround 1 of 1\n"
    assert "2/3 round 1 of 1: floor" in stated(terminal=True)


def test_picture_is_drawn_as_png_and_svg(tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("bars.png", "bars.svg"):
        draw(made_up(result("fullshard-zero3", 1.0, 2.0), result("torch-ddp", 2.0, 3.0)), tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    drawn = (tmp_path / "bars.svg").read_text()
    assert "<!-- floor: 1e+03 ms -->" in drawn
    assert "<!-- fullshard-zero3 -->" in drawn


# -- memory -----------------------------------------------------------------------------------------------------------


def peaks() -> tuple[int | None, int | None, int | None]:
    """Return the peaks of a process that needs 64 MB for a moment, and of the same process later."""
    memory = PeakMemory(torch.device("cpu"))
    memory.reset()
    torch.ones(64 * MB // 4)
    while_large = memory.peak().process
    memory.reset()
    return while_large, memory.peak().process, memory.peak().allocated


def test_process_peak_memory_is_measured_and_reset():
    (large, later, on_gpu), = run_ranks(1, peaks)  # fmt: skip
    assert large is not None
    assert later is not None
    assert 63 * MB <= large < 80 * MB  # the kernel counts pages in batches, and misses the last few
    assert later < 16 * MB
    assert on_gpu is None


def half_of_what_is_shared(path: str) -> int:
    """Return the growth of a process that maps 64 MB together with a second process."""
    before = process_bytes()
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 64 * MB) as shared:
        torch.frombuffer(shared, dtype=torch.uint8).fill_(1)
        dist.barrier()
        after = process_bytes()
        dist.barrier()
    assert before is not None
    assert after is not None
    return after - before


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory of Linux")
def test_process_bytes_counts_share_of_shared_memory():
    path = Path(f"/dev/shm/fullshard-test-{os.getpid()}")
    try:
        path.write_bytes(bytes(64 * MB))
        for grown in run_ranks(2, half_of_what_is_shared, str(path)):
            assert 31 * MB <= grown < 40 * MB
    finally:
        path.unlink(missing_ok=True)


# -- processes --------------------------------------------------------------------------------------------------------


class Subject:
    """Methods that a team calls, including ones that fail."""

    def __init__(self, workload: Workload) -> None:
        self.rank = dist.get_rank()

    def who(self) -> tuple[int, int, int]:
        return self.rank, dist.get_world_size(), torch.get_num_threads()

    def fall_over(self) -> None:
        if self.rank == 1:
            raise ValueError("out of luck\nand more")
        dist.barrier()  # never completes

    def die(self) -> None:
        if self.rank == 1:
            os._exit(7)
        dist.barrier()

    def notice(self) -> None:
        if self.rank == 0:
            raise ConnectionError("connection closed by peer")
        time.sleep(0.3)
        os._exit(7)

    def wait(self) -> None:
        time.sleep(60)


class RestlessTraining(Training):
    def cpu_seconds(self) -> float:
        return time.process_time()


def test_team_returns_answers_in_rank_order_and_exits():
    team = Team(Subject, Workload(shape=SIZES["tiny"], world=2, threads=2))
    assert team.ask("who") == [(0, 2, 2), (1, 2, 2)]
    assert team.ask("who") == [(0, 2, 2), (1, 2, 2)]
    team.end()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("method", "timeout", "stated"),
    [
        ("fall_over", 100.0, "rank 1: ValueError: out of luck"),
        ("die", 100.0, "rank 1 ended with exit code 7."),
        ("notice", 100.0, "rank 1 ended with exit code 7."),
        ("wait", 0.5, "rank 0, 1 did not answer within 0.5 s."),
    ],
)
def test_team_reports_failure_without_waiting_for_other_ranks(method, timeout, stated):
    team = Team(Subject, TINY)
    team._timeout = timeout  # only for questions, since starting may take longer
    try:
        with pytest.raises(TeamFailed) as failed:
            team.ask(method)
    finally:
        team.end()
    assert str(failed.value) == stated
    assert ("fall_over" in failed.value.details) == (method == "fall_over")


@pytest.mark.slow
def test_team_that_fails_to_start_leaves_no_process():
    with pytest.raises(TeamFailed, match="KeyError: 'no-such'"):
        Team(partial(Training, name="no-such"), TINY)
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_idle_ranks_use_no_cpu_time():
    team = Team(partial(RestlessTraining, name="fullshard-zero3"), TINY)
    team.ask("prepare")
    before = team.ask("cpu_seconds")
    time.sleep(1.0)
    after = team.ask("cpu_seconds")
    team.end()
    assert max(a - b for a, b in zip(after, before, strict=True)) < 0.1


@pytest.mark.slow
def test_killed_system_is_excluded_and_other_systems_continue():
    started: dict[str, set[int | None]] = {}
    visited: set[int | None] = set()

    def report_stage(stage: str, what: str) -> None:
        here = {child.pid for child in multiprocessing.active_children()}
        if stage == "starting":
            started[what] = here  # processes that existed before `what`
        elif not visited:
            for pid in here - started["torch-ddp"]:
                assert pid is not None
                os.kill(pid, 9)
            visited.update(here)

    report = measure(plan("fullshard-zero3", "torch-ddp"), report_stage)
    assert [system.name for system in report.systems] == ["fullshard-zero3"]
    assert "ended with exit code -9" in report.failed["torch-ddp"].reason
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_system_without_enough_free_memory_is_not_started(monkeypatch):
    frees = iter([1 << 40, 1 << 10])
    monkeypatch.setattr(benchmarks.bench.rounds, "available_bytes", lambda: next(frees))
    report = measure(plan("fullshard-zero3", "torch-ddp"), lambda stage, what: None)
    assert [system.name for system in report.systems] == ["fullshard-zero3"]
    assert re.search(
        r"must be free to start it beside 1 other systems, .* Name fewer", report.failed["torch-ddp"].reason
    )


# -- rejected input ---------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("it has begun to measure")

    monkeypatch.setattr(benchmarks.bench.command, "measure", refuse)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--size", "35m"], "--size 35m: unknown. Choose one of tiny, 34m"),
        (["--layers", "0"], "--layers 0: must be at least 1"),
        (["--mlp-ratio", "-1"], "--mlp-ratio -1: must be at least 1"),
        (["--width", "100", "--heads", "3"], "Take --width 102"),
        (["--dtype", "fp16"], "Choose one of fp32, bf16"),
        (["--optimizer", "adam"], "Choose one of adamw, adamw-default, sgd"),
        (["--device", "tpu"], "Choose one of cpu, cuda"),
        (["--ranks", "0"], "--ranks 0: must be at least 1"),
        (["--rounds", "0"], "--rounds 0: must be at least 1"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--warmup", "-1"], "--warmup -1: must be at least 0"),
        (["--timeout", "0"], "positive number of seconds"),
        (["--systems", "torch-fsdp3"], "Did you mean torch-fsdp"),
        (["--systems", ","], "names none"),
        (["--systems", "torch-ddp,torch-ddp"], "named twice"),
        (["--systems", "fullshard-hsdp", "--ranks", "3"], "Take an even --ranks"),
        (["--width", "65536", "--layers", "96"], "Name fewer systems"),
        (["--json", "no/such/folder/result.json"], "cannot be written"),
        (["--picture", "bars.bmp"], "must end in one of .png, .svg, .pdf"),
        (["--rouns", "3"], "Did you mean rounds"),
    ],
)
def test_bench_rejects_bad_input_with_one_line_and_exit_code_2(argv, words, nothing_starts, capsys):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fullshard: ")
    assert err.count("\n") == 1
    assert words in err


def test_missing_system_is_rejected_by_name_and_excluded_from_all(nothing_starts, monkeypatch, capsys):
    found: Callable[[str], object] = benchmarks.bench.systems.find_spec
    monkeypatch.setattr(
        benchmarks.bench.systems, "find_spec", lambda name: None if name == "deepspeed" else found(name)
    )
    assert main(["--systems", "all,deepspeed-zero3"]) == 2
    assert "deepspeed-zero3 needs deepspeed, which is not installed" in capsys.readouterr().err
    assert not any(name.startswith("deepspeed") for name in chosen_systems("all", 2))
    assert made_up(result("torch-ddp", 1.0)).not_installed == ["deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3"]
    assert chosen_systems("all, torch-ddp-views", 2)[-1] == "torch-ddp-views"


def test_picture_option_requires_matplotlib(nothing_starts, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["--picture", str(tmp_path / "bars.png")]) == 2
    assert "pip install 'fullshard[bench]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_each_rank_requires_separate_gpu(nothing_starts, monkeypatch, capsys):
    assert torch.cuda.is_available() or main(["--device", "cuda"]) == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert main(["--ranks", "3"]) == 2
    assert "--ranks 3: there are 2 GPUs" in capsys.readouterr().err
    monkeypatch.setattr(benchmarks.bench.settings, "cores_of_machine", lambda: 8)
    workload = benchmarks.bench.settings.BenchSettings().plan().workload
    assert (workload.world, workload.threads, workload.device_type) == (2, 4, "cuda")


def test_bench_exits_with_code_1_after_failure(monkeypatch, capsys):
    failed = made_up(result("torch-ddp", 1.0), failed={"torch-fsdp1": Failure(reason="no", details="")})
    monkeypatch.setattr(benchmarks.bench.command, "measure", lambda plan, report: failed)
    assert main(["--size", "tiny"]) == 1
    assert "torch-fsdp1 failed: no" in capsys.readouterr().out

    def fail(plan: Plan, report: object) -> None:
        raise TeamFailed("rank 0: ValueError: no", "Traceback\n")

    monkeypatch.setattr(benchmarks.bench.command, "measure", fail)
    assert main(["--size", "tiny"]) == 1
    assert capsys.readouterr().err == "fullshard: there is nothing to compare with: rank 0: ValueError: no\nTraceback\n"


def test_bench_reports_full_disk_with_file_name(tmp_path, monkeypatch, capsys):
    full = tmp_path / "full.json"
    full.symlink_to("/dev/full")
    monkeypatch.setattr(benchmarks.bench.command, "measure", lambda plan, report: made_up(result("torch-ddp", 1.0)))
    assert main(["--size", "tiny", "--json", str(full)]) == 2
    assert f"{full}: cannot be written (No space left on device)" in capsys.readouterr().err


def test_benchmarks_page_lists_every_system():
    named = [name.strip() for row in rows(section(page("docs/benchmarks.md"), "Systems")) for name in row[0].split(",")]
    assert named == list(SYSTEMS)


def test_bench_help_lists_options(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    for option in ("--size", "--mlp-ratio", "--dtype", "--systems", "--rounds", "--json", "--picture"):
        assert option in out
