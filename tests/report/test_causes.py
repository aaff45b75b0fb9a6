"""Causes in synthetic runs: each is reported with its share and the suggested change, and no others are."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from tests.faulty_runs import FAULTS, healthy_run, with_parts, with_seconds

from fullshard.report.account import GROUPS
from fullshard.report.causes import find_causes, verdict
from fullshard.report.figures import ENOUGH_STEPS, RunFigures
from fullshard.report.rules import RULES
from fullshard.report.run import PARTS, WhatIf
from fullshard.report.shown import shown

sizes = {
    "ranks": st.sampled_from([4, 5, 8, 16]),
    "steps": st.integers(16, 40),
    "units": st.sampled_from([5, 12, 49]),
    "noise": st.floats(0, 0.08),
    "seed": st.integers(0, 2**16),
    "step_s": st.floats(0.01, 20),
}
# The rules are statistical, so the examples of this file are the same in every run. `benchmarks/report_faults.py`
# measures how often rules are wrong in random runs.
quick = settings(max_examples=50, deadline=None, derandomize=True)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.planted)
@quick
@given(share=st.floats(0.35, 1.5), **sizes)
def test_planted_fault_is_the_only_reported_cause(fault, share, **size):
    """Faults and runs have any size. No other cause is reported."""
    run = fault.plant(healthy_run(**size), share)
    findings = find_causes(run)
    assert [finding.cause for finding in findings] == [fault.cause]
    assert fault.stated.lower() in verdict(run, findings).lower()
    assert findings[0].change in verdict(run, findings)


@seed(0)  # otherwise the examples depend on the name; of 3000 random runs, 11 have a cause, with noise above 7 %
@settings(max_examples=80, deadline=None)
@given(**{**sizes, "ranks": st.integers(1, 16), "steps": st.integers(1, 40), "units": st.integers(1, 60)})
def test_healthy_synthetic_run_has_no_cause(**size):
    run = healthy_run(**size)
    assert find_causes(run) == ()
    stated = verdict(run, ())
    assert "computes" in stated if size["steps"] > ENOUGH_STEPS else "steps were recorded" in stated


@quick
@given(**sizes)
def test_large_logits_are_reported_only_if_memory_is_short(**size):
    [fault] = [fault for fault in FAULTS if fault.cause == "large logits"]
    run = fault.plant(healthy_run(**size), 1.0)
    used = RunFigures(run).used_memory()
    assert used is not None and run.memory is not None
    spacious = replace(run, memory=replace(run.memory, limit=4 * used[0]))
    assert find_causes(run) and find_causes(spacious) == ()


def test_rising_noise_is_not_reported_as_a_leak():
    """Of 30,000 series of noise, one rises as clearly as this one. It does not rise in the first quarter of the run."""
    assert find_causes(healthy_run(ranks=4, steps=25, units=5, noise=0.0, seed=33868, step_s=1.0)) == ()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(burst=st.sampled_from(["input", "forward", "gather", "other"]), **sizes)
def test_intermittent_slowdown_is_reported_with_share_and_steps(burst, **size):
    """Every sixth step loses the time of two steps."""
    run = healthy_run(**size)
    slow = with_parts(run, [0], **{burst: 2.0})
    parts = run.parts_s.copy()
    parts[:, ::6] = slow.parts_s[:, ::6]
    run = replace(run, parts_s=parts, step_s=parts.sum(-1))
    finding = find_causes(run)[0]
    often = len(range(6, len(run.steps), 6))
    lost = 2.0 * often / (2.0 * often + len(run.steps) - 1)
    assert finding.lost == pytest.approx(lost, rel=0.1)
    assert ("every 6th step" if often > 2 else f"in {often} of") in finding.stated


@settings(max_examples=40, deadline=None, derandomize=True)
@given(**{**sizes, "noise": st.floats(0.1, 0.5)})
def test_alternating_late_ranks_are_not_reported_as_slow(**size):
    """On a shared machine, each rank is very late at times, but no rank is slow."""
    reported = {find_cause.cause for find_cause in find_causes(healthy_run(**size))}
    assert reported.isdisjoint({"throttled rank", "slow host", "slow input", "unequal work"})


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data(), **sizes)
def test_run_that_loses_a_third_of_its_time_has_a_cause(data, **size):
    """Any part of a step may take the time, on any ranks and in any steps."""
    run = healthy_run(**size)
    parts = st.sampled_from([part for part in PARTS if part not in GROUPS["compute"]])
    chance = np.random.default_rng(size["seed"])
    for part in data.draw(st.lists(parts, min_size=1, max_size=3, unique=True)):
        slow = chance.random(run.step_s.shape) < data.draw(st.sampled_from([0.05, 0.2, 0.5, 1.0]))
        run = with_seconds(run, **{part: slow * data.draw(st.floats(0.1, 5.0)) * np.median(run.step_s)})
    figures = RunFigures(run)
    is_lost = figures.share(figures.computes) < 2 / 3
    assert find_causes(run) or not is_lost


@pytest.mark.parametrize("part", ["input", "checkpoint", "other"])
@pytest.mark.parametrize("slow", [range(1, 100), range(7, 100, 7), range(60, 100)], ids=["always", "7th", "since"])
def test_verdict_matches_the_numbers_of_the_charts(part, slow):
    run = healthy_run(steps=99, noise=0.1)
    run = with_seconds(run, **{part: np.isin(run.steps, slow) * np.full(run.step_s.shape, 0.5)})
    findings = find_causes(run)
    step = shown(run, findings)["step"]
    charted = {item["part"]: item["share"] for item in step["parts"]}
    assert findings[0].lost == pytest.approx(charted[part], rel=1e-3)
    assert f"{100 * charted[part]:.0f} % of the time" in verdict(run, findings)
    assert step["clock_s"] == pytest.approx(RunFigures(run).step_s.mean(), rel=1e-4)
    assert step["sum_s"] == pytest.approx(step["clock_s"], rel=1e-4)


def test_healthy_verdict_matches_the_numbers_of_the_charts():
    run = healthy_run(steps=99, noise=0.1)
    charted = {item["part"]: item["share"] for item in shown(run, ())["step"]["parts"]}
    assert f"{100 * sum(charted[part] for part in GROUPS['compute']):.0f} % of the time computes" in verdict(run, ())
    assert sum(charted.values()) == pytest.approx(1.0, rel=1e-4)


def test_every_rule_has_a_planted_fault():
    assert {fault.cause for fault in FAULTS} == {rule.cause for rule in RULES}
    assert len({rule.cause for rule in RULES}) == len(RULES) >= 14


def test_most_expensive_cause_is_first():
    run = with_parts(healthy_run(), input=0.3, other=0.6)
    findings = find_causes(run)
    assert [finding.cause for finding in findings] == ["host waits", "slow input"]
    assert findings[0].lost > findings[1].lost > 0
    shares = 1 + 0.3 + 0.6
    assert findings[0].lost == pytest.approx(0.6 / shares, abs=0.03)


@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if "memory" not in fault.planted], ids=lambda fault: fault.planted
)
def test_rules_without_measurements_do_not_raise(fault):
    """A rule without its measurements reports nothing: it neither raises nor guesses."""
    run = fault.plant(healthy_run(steps=20), 0.4)
    bare = replace(
        run,
        work=None,
        starved_s=None,
        busy_s=np.full_like(run.busy_s, np.nan),
        waited_for_s=np.full_like(run.busy_s, np.nan),
        units=(),
        memory=None,
        link_gb_s=None,
        links_gb_s=(),
        host_waits=(),
        held_bytes=np.zeros((len(run.ranks), 0), dtype=np.int64),
    )
    verdict(bare, find_causes(bare))


def test_gain_is_that_of_the_best_applicable_change():
    slow = next(fault for fault in FAULTS if fault.planted == "prefetching off").plant(healthy_run(), 0.5)
    changes = [
        WhatIf(change="prefetch of two units", step_s=0.6, gain_s=0.15, command="--prefetch 2"),
        WhatIf(change="prefetch of one unit", step_s=0.65, gain_s=0.1, command="--prefetch 1"),
        WhatIf(change="zero2", step_s=0.5, gain_s=0.25, command="--strategy zero2"),
    ]
    run = replace(slow, what_ifs=tuple(changes))
    findings = find_causes(run)
    assert findings[0].gain_s == 0.15
    assert "Simulated gain: 150 ms" in verdict(run, findings)
    assert find_causes(slow)[0].gain_s is None


def test_memory_for_a_larger_batch_is_reported():
    run = healthy_run()
    assert "free: a larger batch fits" in verdict(run, ())
    assert "free" not in verdict(replace(run, memory=None), ())


def test_docs_list_every_rule_with_its_threshold():
    lines = (Path(__file__).parents[2] / "docs" / "report.md").read_text().splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("| cause |"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start + 2 : start + 2 + len(RULES)]]
    assert [row[0] for row in rows] == [rule.cause for rule in RULES]
    assert all(f"{100 * rule.least:.0f} %" in row[2] for rule, row in zip(RULES, rows, strict=True))
