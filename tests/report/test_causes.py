"""Existing causes are reported with their number and the change, and no others. On synthetic runs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.faulty_runs import FAULTS, healthy_run, with_parts

from fullshard.report.causes import find_causes, verdict
from fullshard.report.figures import ENOUGH_STEPS
from fullshard.report.rules import RULES
from fullshard.report.run import WhatIf

sizes = {
    "ranks": st.sampled_from([4, 5, 8, 16]),
    "steps": st.integers(16, 40),
    "units": st.sampled_from([5, 12, 49]),
    "noise": st.floats(0, 0.08),
    "seed": st.integers(0, 2**16),
    "step_s": st.floats(0.01, 20),
}
quick = settings(max_examples=400, deadline=None)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.planted)
@quick
@given(share=st.floats(0.35, 1.5), **sizes)
def test_a_fault_is_reported_by_its_name_alone(fault, share, **size):
    """For faults of any size, in runs of any size. No other cause is reported."""
    run = fault.plant(healthy_run(**size), share)
    findings = find_causes(run)
    assert [finding.cause for finding in findings] == [fault.cause]
    assert fault.stated.lower() in verdict(run, findings).lower()
    assert findings[0].change in verdict(run, findings)


@settings(max_examples=80, deadline=None)
@given(**{**sizes, "ranks": st.integers(1, 16), "steps": st.integers(1, 40), "units": st.integers(1, 60)})
def test_a_healthy_run_has_no_cause(**size):
    run = healthy_run(**size)
    assert find_causes(run) == ()
    stated = verdict(run, ())
    assert "computes" in stated if size["steps"] > ENOUGH_STEPS else "steps were recorded" in stated


def test_noise_that_happens_to_rise_is_no_leak():
    """Of 30,000 series of noise, one rises as clearly as this one. It does not in the first quarter of the run."""
    assert find_causes(healthy_run(ranks=4, steps=25, units=5, noise=0.0, seed=33868, step_s=1.0)) == ()


@settings(max_examples=40, deadline=None)
@given(burst=st.sampled_from(["input", "forward", "gather", "other"]), **sizes)
def test_a_burst_in_a_few_steps_is_no_cause(burst, **size):
    """Other load on the machine in one of six steps is not a property of the run."""
    run = healthy_run(**size)
    slow = with_parts(run, [0], **{burst: 2.0})
    parts = run.parts_s.copy()
    parts[:, ::6] = slow.parts_s[:, ::6]
    assert find_causes(replace(run, parts_s=parts, step_s=parts.sum(-1))) == ()


@settings(max_examples=40, deadline=None)
@given(**{**sizes, "noise": st.floats(0.1, 0.5)})
def test_ranks_in_turn_late_are_no_slow_ranks(**size):
    """On a machine that others use, each rank is late at times, by much; none is slow."""
    reported = {find_cause.cause for find_cause in find_causes(healthy_run(**size))}
    assert reported.isdisjoint({"throttled rank", "slow host", "slow input", "unequal work"})


def test_each_cause_is_planted():
    assert {fault.cause for fault in FAULTS} == {rule.cause for rule in RULES}
    assert len({rule.cause for rule in RULES}) == len(RULES) >= 14


def test_the_most_expensive_cause_is_first():
    run = with_parts(healthy_run(), input=0.3, other=0.6)
    findings = find_causes(run)
    assert [finding.cause for finding in findings] == ["host waits", "slow input"]
    assert findings[0].lost > findings[1].lost > 0
    shares = 1 + 0.3 + 0.6
    assert findings[0].lost == pytest.approx(0.6 / shares, abs=0.03)


@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if "memory" not in fault.planted], ids=lambda fault: fault.planted
)
def test_what_was_not_measured_is_no_evidence(fault):
    """Without what a rule needs it is silent: it neither raises nor guesses."""
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


def test_a_gain_is_that_of_the_best_change_that_helps():
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


def test_the_docs_page_has_every_rule_with_its_threshold():
    lines = (Path(__file__).parents[2] / "docs" / "report.md").read_text().splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("| cause |"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start + 2 : start + 2 + len(RULES)]]
    assert [row[0] for row in rows] == [rule.cause for rule in RULES]
    assert all(f"{100 * rule.least:.0f} %" in row[2] for rule, row in zip(RULES, rows, strict=True))
