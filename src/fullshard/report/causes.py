"""Causes of slow steps or lack of memory: the findings of all rules, and a short verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from fullshard.amounts import in_bytes
from fullshard.report.account import GROUPS
from fullshard.report.figures import ENOUGH_STEPS, RunFigures, milliseconds, percent
from fullshard.report.rules import RULES, Rule
from fullshard.report.run import PARTS, Finding, Run


def find_causes(run: Run) -> tuple[Finding, ...]:
    """Return the causes of lost time and memory in `run`, the most expensive first."""
    figures = RunFigures(run)
    found = ((rule, rule.finding(figures)) for rule in RULES)
    findings = (replace(item, gain_s=_gain(run, rule)) for rule, item in found if item is not None)
    return tuple(sorted(findings, key=lambda finding: -max(finding.lost, finding.of_memory)))


def _gain(run: Run, rule: Rule) -> float | None:
    """Return the largest gain of the simulated changes that help against the rule's cause; None if there are none."""
    gains = (item.gain_s for item in run.what_ifs if item.change.startswith(rule.helps))
    return max((gain for gain in gains if gain > 0), default=None)


def verdict(run: Run, findings: tuple[Finding, ...]) -> str:
    """Return one or two sentences about `run`: the most expensive cause and the recommended change, if there is one."""
    figures = RunFigures(run)
    if run.out_of_memory is not None:
        return _out_of_memory(run, findings)
    if findings:
        first = findings[0]
        stated = f"{first.stated} {first.change}"
        if first.gain_s is not None and figures.reports_time:
            stated += f" Simulated gain: {milliseconds(first.gain_s)} of {milliseconds(figures.usual_step_s)}."
        return stated
    if not figures.reports_time:
        return (
            f"{run.step_s.shape[1]} steps were recorded; causes of lost time are reported for {ENOUGH_STEPS + 1} "
            "steps or more."
        )
    shares = {part: figures.share(figures.of(part)) for part in PARTS}
    remaining = max((part for part in PARTS if part not in GROUPS["compute"]), key=lambda part: shares[part])
    stated = (
        f"No cause of lost time found: {percent(figures.share(figures.computes))} of the time computes, in steps of "
        f"{milliseconds(figures.usual_step_s)}"
    )
    if shares[remaining] >= _WORTH_REPORTING:
        stated += f", and most of the rest is {_PART_NAMES[remaining]}, {percent(shares[remaining])}"
    return f"{stated}.{_free_memory(figures)}"


def step_lines(run: Run) -> list[str]:
    """Return a line with percentiles of step times, as means over ranks; empty without enough steps."""
    figures = RunFigures(run)
    if not figures.reports_time:
        return []
    p50, p95, p99 = (milliseconds(float(np.quantile(figures.step_s, share))) for share in (0.5, 0.95, 0.99))
    return [f"steps of {run.name}: p50 {p50}, p95 {p95}, p99 {p99}"]


def tier_lines(run: Run) -> list[str]:
    """Return a line per tier with the bytes that the first rank stores and copies; empty without offloading."""
    return [
        f"on the {tier.name}: {_bytes_by_state(tier.stored)}"
        + (
            f"; a step moves {_bytes_by_state(tier.comes)} in and {_bytes_by_state(tier.goes)} out"
            if tier.comes or tier.goes
            else ""
        )
        for tier in run.tiers
    ]


def _bytes_by_state(by_state: Mapping[str, float]) -> str:
    each = ", ".join(f"{state} {in_bytes(nbytes)}" for state, nbytes in by_state.items())
    return f"{in_bytes(sum(by_state.values()))} ({each})" if each else "nothing"


_WORTH_REPORTING = 0.005
_PART_NAMES = {
    "input": "input",
    "gather": "waiting for gathers",
    "reduce": "waiting for reductions",
    "checkpoint": "checkpoints",
    "other": "the program between",
}


def _free_memory(figures: RunFigures) -> str:
    """Return a sentence about the free memory of a rank if a larger batch could use it; otherwise an empty string."""
    used = figures.used_memory()
    if used is None or not used[1] or used[0] > used[1] / 2:
        return ""
    return f" {percent(1 - used[0] / used[1])} of a rank's memory is free: a larger batch fits."


def _out_of_memory(run: Run, findings: tuple[Finding, ...]) -> str:
    failed = run.out_of_memory
    assert failed is not None
    used = f"{in_bytes(failed.used_bytes)} of {in_bytes(failed.limit_bytes)} in use"
    if failed.requested_bytes is None:
        stated = f"Rank {failed.rank} had {used} in {failed.where}: almost none is left."
    else:
        requested = in_bytes(failed.requested_bytes)
        stated = f"Rank {failed.rank} ran out of memory in {failed.where}: it requested {requested} with {used}."
    of_memory = next((finding for finding in findings if finding.of_memory), None)
    if of_memory is not None:
        stated += f" {of_memory.stated} {of_memory.change}"
    if failed.would_fit:
        stated += f" It would fit with {failed.would_fit[0]}."
    return stated
