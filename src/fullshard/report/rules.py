"""The rules that detect causes. Each is a function that inspects the statistics of a run and returns a finding or None.

To add a rule, write its function here, in the order of the table in docs/report.md, and add a run with the fault to
`tests/faulty_runs.py`. No healthy run may reach its threshold, and its message must contain the number that is compared
with the threshold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fullshard.amounts import in_bytes
from fullshard.report.account import GROUPS, Loss
from fullshard.report.figures import RunFigures, listed, milliseconds, named, percent
from fullshard.report.hardware import SWAPPED, reason_of, slow_link_of, slowed_by, swaps
from fullshard.report.run import PARTS, Finding, UnitTimes

__all__ = ["RULES", "Rule"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The rule for one cause."""

    cause: str  # the name of the cause
    least: float  # the threshold, as a fraction of the total time or of memory. A value of `least` or more is a cause
    why: str  # the reason for the threshold
    of_time: bool  # whether it depends on step times, which need enough steps
    helps: tuple[str, ...]  # prefixes of the `WhatIf.change` of simulated changes that would help, the best first
    find: Found  # returns the finding, or None

    def finding(self, figures: RunFigures) -> Finding | None:
        """Apply the rule to a run, and return its finding, or None."""
        if self.of_time and not figures.reports_time:
            return None
        if self.cause not in figures.findings:
            figures.findings[self.cause] = self.find(figures, self)
        return figures.findings[self.cause]

    def of_loss(self, figures: RunFigures, loss: Loss, stated: str, change: str) -> Finding:
        """Return a finding for a loss. If hardware counters explain the loss, use their reason and change instead."""
        reason = reason_of(figures, loss)
        if reason is not None:
            stated, change = f"{stated} {reason.stated}", reason.change
        return self.found(stated, change, lost=loss.lost)

    def found(self, stated: str, change: str, *, lost: float = 0.0, of_memory: float = 0.0) -> Finding:
        """Return a finding of this rule's cause. `stated` contains the number that proves it."""
        lost, of_memory = min(1.0, float(lost)), min(1.0, float(of_memory))
        return Finding(cause=self.cause, stated=stated, change=change, lost=lost, of_memory=of_memory)


Found = Callable[[RunFigures, Rule], Finding | None]
Series = NDArray[np.float64]

RULES: list[Rule] = []  # all rules, in the order of the table in docs/report.md


def rule(
    cause: str, *, least: float, why: str, of_time: bool = True, helps: tuple[str, ...] = ()
) -> Callable[[Found], Rule]:
    """Decorator that adds the rule for `cause`."""

    def added(find: Found) -> Rule:
        RULES.append(Rule(cause=cause, least=least, why=why, of_time=of_time, helps=helps, find=find))
        return RULES[-1]

    return added


# -- input, and ranks that differ from the others ---------------------------------------------------------------------


@rule("slow input", least=0.10, why="a loader with workers returns a batch in under 1 % of a step")
def slow_input(figures: RunFigures, rule: Rule) -> Finding | None:
    loss = _large(figures.loss("input"), rule)
    if loss is None:
        return None
    if loss.ranks:
        stated = f"{percent(loss.lost)} of the time waits for the input of {figures.who(loss)}: {figures.when(loss)}."
        return rule.found(stated, "Check the storage of its files, and whether its loader has workers.", lost=loss.lost)
    what = "input" if figures.run.reports_input else "input, or for other code of the loop before forward"
    stated = f"{percent(loss.lost)} of the time waits for {what}, on {figures.who(loss)}: {figures.when(loss)}."
    change = "Give the loader workers (`num_workers`), or prepare the data beforehand."
    if not figures.run.reports_input:
        change += " `report.batches(loader)` distinguishes the two."
    return rule.found(stated, change, lost=loss.lost)


def _large(loss: Loss | None, rule: Rule) -> Loss | None:
    return loss if loss is not None and loss.lost >= rule.least else None


@rule("unequal work", least=0.10, why="lengths in a bucket differ by a few per cent; 10 % is worth sorting")
def unequal_work(figures: RunFigures, rule: Rule) -> Finding | None:
    work = figures.later(figures.run.work)
    if work is None or len(work) < 2 or (work <= 0).any():
        return None
    most = work.argmax(0)
    behind = np.take_along_axis(figures.computes, most[None], 0)[0] - figures.computes.mean(0)
    lost, spread = figures.share(behind), float((work.max(0) / work.mean(0)).mean() - 1)
    if spread < rule.least or lost < rule.least:
        return None
    always = int(np.bincount(most).argmax())
    is_one = float((most == always).mean()) > 0.75
    who = figures.ranks_text((always,)) if is_one else "another rank in each step"
    stated = f"{percent(lost)} of the time waits for {who}, which gets {percent(1 + spread)} of the mean of the ranks."
    return rule.found(stated, "Give all ranks the same number of tokens: sort rows by length, or pack them.", lost=lost)


def _slow_ranks(figures: RunFigures, least: float) -> tuple[Loss, str | None] | None:
    """Return the loss by ranks that compute longer for the same work, and their host if they are all of its ranks."""
    loss = figures.loss("compute", of_all=False, in_turn=False)
    work = figures.later(figures.run.work)
    if loss is None or loss.lost < least:
        return None
    if work is not None and work[list(loss.ranks)].mean() > 1.02 * np.median(np.delete(work.mean(1), loss.ranks)):
        return None  # they have more work
    hosts = figures.hosts()
    whole = [host for host, ranks in hosts.items() if len(hosts) > 1 and set(ranks) == set(loss.ranks)]
    return loss, whole[0] if whole and len(loss.ranks) > 1 else None


@rule("slow host", least=0.10, why="clocks of equal machines differ by 1 to 3 %, those of a faulty one by 10 % or more")
def slow_host(figures: RunFigures, rule: Rule) -> Finding | None:
    found = _slow_ranks(figures, rule.least)
    if found is None or found[1] is None:
        return None
    loss, host = found
    stated = (
        f"{percent(loss.lost)} of the time waits for {host}: each of its ranks computes longer for the same work, "
        f"{figures.when(loss)}."
    )
    change = f"Check clocks, temperature and other programs on {host}, or remove it from the run."
    return rule.of_loss(figures, loss, stated, change)


@rule(
    "throttled rank", least=0.10, why="clocks of equal devices differ by 1 to 3 %, of a throttled one by 10 % or more"
)
def throttled_rank(figures: RunFigures, rule: Rule) -> Finding | None:
    found = _slow_ranks(figures, rule.least)
    if found is None or found[1] is not None:
        return None
    loss, starved = found[0], figures.starved
    who, ranks = figures.who(loss), list(loss.ranks)
    stated = (
        f"{percent(loss.lost)} of the time waits for {who}: {'it computes' if len(ranks) == 1 else 'they compute'} "
        f"longer for the same work, {figures.when(loss)}."
    )
    part = 0.0 if starved is None else figures.share(starved[ranks].mean(0) - np.delete(starved, ranks, 0).mean(0))
    if part >= loss.lost / 2:
        change = f"It has no core for {percent(part)} of the time: end other programs on its cores."
    else:
        device = figures.run.ranks[ranks[0]].device
        change = f"Check clock, temperature and power of its {device}, and other programs there."
    return rule.of_loss(figures, loss, stated, change)


@rule("stragglers", least=0.10, why="a rank that is behind by more than noise of the same size in most steps explains")
def stragglers(figures: RunFigures, rule: Rule) -> Finding | None:
    loss = _large(figures.loss("compute", in_turn=True), rule)
    if loss is None or _is_starved(figures, loss) or unequal_work.finding(figures) is not None:
        return None
    stated = (
        f"{percent(loss.lost)} of the time waits for {figures.who(loss)}, which computes longer: {figures.when(loss)}."
    )
    change = "Look for what ranks do at different times: garbage collection (`gc.freeze()`), longer rows, compiling."
    return rule.of_loss(figures, loss, stated, change)


def _is_starved(figures: RunFigures, loss: Loss) -> bool:
    """Return True if ranks have no core for most of the lost time."""
    starved = figures.starved
    return starved is not None and np.minimum(starved.max(0), loss.seconds).sum() >= loss.seconds.sum() / 2


@rule("slow steps", least=0.10, why="steps of equal size take equal time, except for noise")
def slow_steps(figures: RunFigures, rule: Rule) -> Finding | None:
    loss = _large(figures.loss("compute", of_all=True), rule)
    if loss is None or loss.pattern.kind not in ("every", "random") or _is_starved(figures, loss):
        return None
    stated = f"{percent(loss.lost)} of the time is in slow steps: all ranks compute longer, {figures.when(loss)}."
    change = (
        "Look for garbage collection (`gc.freeze()`, then `gc.disable()`), recompilation (`TORCH_LOGS=recompiles`), or "
        "longer rows in these steps."
    )
    return rule.of_loss(figures, loss, stated, change)


@rule("changed speed", least=0.10, why="the same work takes the same time in all of a run")
def changed_speed(figures: RunFigures, rule: Rule) -> Finding | None:
    loss = _large(figures.loss("compute", of_all=True), rule)
    if loss is None or loss.pattern.kind in ("every", "random") or _is_starved(figures, loss):
        return None
    stated = f"{percent(loss.lost)} of the time is lost because all ranks compute longer: {figures.when(loss)}."
    if loss.pattern.kind == "growing":
        change = "Look for data that grows with each step: a list, a cache, a graph that is kept, or longer rows."
    else:
        change = "Look for what changed then: clocks and temperature, other programs, longer rows, a new phase."
    return rule.of_loss(figures, loss, stated, change)


@rule("slow optimizer", least=0.2, why="the optimizer step of a sharded model takes under 10 % of a step")
def slow_optimizer(figures: RunFigures, rule: Rule) -> Finding | None:
    beyond = figures.loss("compute")  # of some ranks or steps, which is another cause
    lost = figures.share(figures.of("optimizer")) - (0.0 if beyond is None else beyond.lost)
    if lost < rule.least:
        return None
    each = milliseconds(float(figures.of("optimizer").mean()))
    stated = f"{percent(lost)} of the time is in the optimizer: {each} per step."
    change = "Use a fused optimizer (`fused=True`), or larger batches and gradient accumulation: fewer optimizer steps."
    return rule.found(stated, change, lost=lost)


@rule(
    "oversubscribed cores",
    least=0.10,
    why="with dedicated cores, a program waits for one for less than 1 % of the time",
)
def oversubscribed_cores(figures: RunFigures, rule: Rule) -> Finding | None:
    if figures.starved is None:
        return None
    lost = figures.share(np.sort(figures.starved, axis=0)[(len(figures.starved) - 1) // 4])
    if lost < rule.least:
        return None
    stated = f"For {percent(lost)} of the time a rank is ready to compute and has no core."
    host, places = max(figures.hosts().items(), key=lambda host: len(host[1]))
    threads = sum(figures.run.ranks[place].threads for place in places)
    cores = max(figures.run.ranks[place].cores for place in places)
    if threads > cores:
        stated += f" {len(places)} ranks with {threads} threads share {cores} cores of {host}."
        share = cores // len(places)
        change = f"Set OMP_NUM_THREADS={share}, or start fewer ranks." if share else f"Start {cores} ranks, not more."
        return rule.found(stated, change, lost=lost)
    others = figures.other_cores
    used = "the" if others is None else f"{np.nan_to_num(others[list(places)]).mean():.1f} of the"
    change = f"Other programs use {used} {cores} cores of {host}: end them, or pin ranks to cores."
    return rule.found(stated, change, lost=lost)


@rule("reduced clocks", least=0.10, why="at full load the clock of a GPU is within 10 % of its highest")
def reduced_clocks(figures: RunFigures, rule: Rule) -> Finding | None:
    slowed, clock, most = map(figures.counter, ("GPU slowed by heat or supply", "GPU clock", "GPU clock, at most"))
    if slowed is None or clock is None or most is None or _is_explained(figures):
        return None
    with np.errstate(invalid="ignore"):
        cells = (slowed > 0) & (clock < most)
    lost = figures.share(np.where(cells, (1 - clock / most) * figures.computes, 0.0))
    if lost < rule.least:
        return None
    reason = slowed_by(figures, cells, float(most[cells].mean()))
    who = figures.ranks_text(tuple(int(rank) for rank in np.flatnonzero(cells.any(1))))
    stated = f"About {percent(lost)} of the time is lost by reduced clocks of the GPUs of {who}. {reason.stated}"
    return rule.found(stated, reason.change, lost=lost)


def _is_explained(figures: RunFigures) -> bool:
    """Return True if slow ranks or steps are a cause already. The counters then explain that cause."""
    others = (slow_host, throttled_rank, stragglers, slow_steps, changed_speed)
    return any(other.finding(figures) is not None for other in others)


@rule("swapping", least=0.10, why="a host with free memory stalls for less than 1 % of the time")
def swapping(figures: RunFigures, rule: Rule) -> Finding | None:
    stalled, swapped = figures.counter("stalled for memory"), figures.counter("swapped in", "swapped out")
    if stalled is None or swapped is None or _is_explained(figures):
        return None
    cells = np.nan_to_num(swapped) >= SWAPPED
    by_rank = np.where(cells, np.nan_to_num(stalled), 0.0) * figures.step_s
    worst = int(by_rank.sum(1).argmax())
    lost = figures.share(by_rank[worst])
    if lost < rule.least:
        return None
    reason = swaps(figures.run.ranks[worst].host, float(swapped[worst][cells[worst]].mean()))
    stated = f"For {percent(lost)} of the time programs wait for memory. {reason.stated}"
    return rule.found(stated, reason.change, lost=lost)


# -- communication ----------------------------------------------------------------------------------------------------

EXPOSED = 0.10
"""The minimum fraction of a step in exposed communication that justifies a change. With overlap, 1 to 5 % remain."""

_SPREAD = 4.0  # minimum ratio to the median unit: in most models, a root with an embedding is 2 to 3 times a block
_FEW_MOVING = 1 / 3  # maximum fraction of the time of a small message in which data moves
_NO_SMALL_NBYTES = 1_000_000  # a transfer of 20 us at 50 GB/s, as long as the start of a collective


def _waits_for_transport(figures: RunFigures) -> bool:
    return figures.waits.share >= EXPOSED and bool(figures.run.units)


def _is_one_unit(figures: RunFigures) -> bool:
    sizes = [unit.nbytes for unit in figures.run.units]
    return max(sizes) >= 0.9 * sum(sizes)


def _has_small_messages(figures: RunFigures) -> bool:
    """Return True if start-up is most of the time of collectives."""
    run, count = figures.run, figures.collectives
    if not count or figures.moved_bytes / count >= _NO_SMALL_NBYTES or len(run.units) < 4:
        return False
    gb_s = min((item for item in (run.link_gb_s, max(run.links_gb_s, default=None)) if item), default=None)
    if gb_s is None:
        return figures.moved_bytes / count < _NO_SMALL_NBYTES / 10
    return figures.moved_bytes / gb_s / 1e9 < _FEW_MOVING * figures.waited_s


@rule("one unit for all", least=EXPOSED, why="nothing hides a transfer while no other unit computes")
def one_unit(figures: RunFigures, rule: Rule) -> Finding | None:
    if not (_waits_for_transport(figures) and _is_one_unit(figures)):
        return None
    lost = figures.waits.share
    unit = max(figures.run.units, key=lambda unit: unit.nbytes)
    stated = (
        f"{percent(lost)} of the time waits for communication: {named(unit)} is one unit of {in_bytes(unit.nbytes)}, "
        "nearly the whole model."
    )
    change = "Make each block a unit: `fully_shard(block)` before `fully_shard(model)`, or `auto_wrap_policy`."
    return rule.found(stated, change, lost=lost)


@rule(
    "unit too large",
    least=EXPOSED / 2,
    why=f"for one unit of {_SPREAD:g} times the median size or more that hides less of its time than other units",
)
def unit_too_large(figures: RunFigures, rule: Rule) -> Finding | None:
    units = figures.run.units
    if not _waits_for_transport(figures) or _is_one_unit(figures):
        return None
    median = float(np.median([unit.nbytes for unit in units]))
    largest = max(range(len(units)), key=lambda index: units[index].nbytes)
    times, lost = units[largest].nbytes / max(median, 1), sum(figures.waits.by_unit[largest])
    others = [unit for place, unit in enumerate(units) if place != largest]
    is_most = units[largest].nbytes > sum(unit.nbytes for unit in others)  # such as the root of a model with few units
    stands_out = len(units) > 3 and _exposed_part([units[largest]]) >= 1.5 * _exposed_part(others)
    if lost < rule.least or not (is_most or (times >= _SPREAD and stands_out)):
        return None
    stated = (
        f"{percent(lost)} of the time waits for {named(units[largest])}: that unit is {times:.0f} times as large as "
        "the median unit."
    )
    return rule.found(stated, "Split it into units of about the size of the other units.", lost=lost)


def _exposed_part(units: list[UnitTimes]) -> float:
    """Return the exposed fraction of the time of the units' collectives."""
    exposed = sum(unit.gather_exposed_s + unit.reduce_exposed_s for unit in units)
    return exposed / max(sum(unit.gather_s + unit.reduce_s for unit in units), 1e-12)


@rule(
    "units too small",
    least=EXPOSED,
    why=f"where data moves for less than {percent(_FEW_MOVING)} of a collective's time, the rest is start-up time",
)
def units_too_small(figures: RunFigures, rule: Rule) -> Finding | None:
    if not _waits_for_transport(figures) or not _has_small_messages(figures):
        return None
    lost, count = figures.waits.share, figures.collectives
    each = in_bytes(figures.moved_bytes / count)
    stated = (
        f"{percent(lost)} of the time waits for {count:.0f} collectives of {each} each: "
        f"{milliseconds(figures.waited_s / count)} each, most of it start-up time."
    )
    return rule.found(stated, "Make larger units: several blocks as one, `fully_shard([a, b])`.", lost=lost)


@rule(
    "each microbatch communicates",
    least=EXPOSED,
    why="a step needs one reduction per unit, and two gathers",
    helps=("zero2",),
)
def each_microbatch_communicates(figures: RunFigures, rule: Rule) -> Finding | None:
    if not _waits_for_transport(figures):
        return None
    reductions, gathers = (
        float(np.median([getattr(unit, name) for unit in figures.run.units])) for name in ("reductions", "gathers")
    )
    if reductions < _MICROBATCHES + 0.5 and gathers < 2 * _MICROBATCHES:
        return None
    lost, change = figures.waits.share, list[str]()
    stated = (
        f"{percent(lost)} of the time waits for communication: each step gathers a unit {gathers:.3g} times "
        f"and reduces it {reductions:.3g} times."
    )
    if reductions >= _MICROBATCHES + 0.5:
        change.append("Reduce in the last microbatch only (`set_requires_gradient_sync(False)` before the others)")
    if gathers >= 2 * _MICROBATCHES:
        change.append("keep units unsharded between microbatches (`reshard_after_forward=False`, or zero2)")
    both = "; ".join(change)
    return rule.found(stated, f"{both[0].upper()}{both[1:]}.", lost=lost)


_MICROBATCHES = 2  # hsdp reduces twice in a step of one microbatch


@rule("no prefetch", least=EXPOSED, why="a gather that starts when it is needed is not hidden", helps=("prefetch",))
def no_prefetch(figures: RunFigures, rule: Rule) -> Finding | None:
    lost = figures.waits.gathers
    gathering = [unit for unit in figures.run.units if unit.gathers]
    ahead, gathers = sum(unit.gathers_ahead for unit in gathering), sum(unit.gathers for unit in gathering)
    prefetches = not (len(gathering) > 1 and ahead < 0.05 * gathers)  # True for unknown values (NaN)
    if not _waits_for_transport(figures) or prefetches or lost < rule.least:
        return None
    stated = f"{percent(lost)} of the time waits for gathers, and none was prefetched."
    change = (
        "Turn prefetching on (`forward_prefetch=True`, `backward_prefetch=BackwardPrefetch.BACKWARD_PRE`); if it is "
        "on, use units in the same order in every step."
    )
    return rule.found(stated, change, lost=lost)


@rule(
    "frozen part gathered",
    least=0.05,
    why="sharding saves little for parameters without gradients and optimizer state",
    helps=("zero2",),
)
def frozen_part_gathered(figures: RunFigures, rule: Rule) -> Finding | None:
    if figures.waits.share < rule.least or not figures.run.units:
        return None
    both = zip(figures.run.units, figures.waits.by_unit, strict=True)
    frozen = [(item, gather) for item, (gather, _) in both if not item.trains and item.gathers]
    lost = sum(gather for _, gather in frozen)
    if lost < rule.least:
        return None
    units = sorted(frozen, key=lambda item: -item[1])
    nbytes = sum(item.nbytes for item, _ in frozen)
    stated = (
        f"{percent(lost)} of the time waits for gathers of {len(frozen)} frozen units, {in_bytes(nbytes)}, most for "
        f"{listed([named(item) for item, _ in units[:2]])}."
    )
    change = "Keep them whole on every rank: `fully_shard(part, reshard_after_forward=False)`, or `ignored_params`."
    return rule.found(stated, change, lost=lost)


@rule(
    "gradients in float32",
    least=0.05,
    why="half of the exposed time: they have twice the bytes of the compute dtype",
    helps=("reductions in bfloat16",),
)
def gradients_in_float32(figures: RunFigures, rule: Rule) -> Finding | None:
    if figures.waits.share < rule.least or not figures.run.units:
        return None
    both = zip(figures.run.units, figures.waits.by_unit, strict=True)
    wide = [
        (item, reduce)
        for item, (_, reduce) in both
        if item.param_dtype in ("bfloat16", "float16") and item.reduce_dtype == "float32"
    ]
    exposed = sum(reduce for _, reduce in wide)
    if exposed / 2 < rule.least:
        return None
    stated = (
        f"{percent(exposed)} of the time waits for reductions in float32, of {len(wide)} units that compute in "
        f"{wide[0][0].param_dtype}: {in_bytes(sum(item.reduced_bytes for item, _ in wide))} a step."
    )
    dtype = wide[0][0].param_dtype
    change = f"Sum in {dtype} (`MixedPrecisionPolicy(reduce_dtype=...)`, `--reduce-dtype`) to halve the bytes."
    return rule.found(stated, change, lost=exposed / 2)


@rule(
    "slow link",
    least=2 * EXPOSED,
    why="beyond what the other communication rules explain: send fewer bytes, or use a faster link",
    helps=("hsdp", "gradients sent in bfloat16", "zero2"),
)
def slow_link(figures: RunFigures, rule: Rule) -> Finding | None:
    run, waits = figures.run, figures.waits
    if waits.share < EXPOSED or not run.units:
        return None
    reason = slow_link_of(figures)
    if reason is not None:
        stated = f"{percent(waits.share)} of the time waits for communication. {reason.stated}"
        return rule.found(stated, reason.change, lost=waits.share)
    others = one_unit, unit_too_large, units_too_small, each_microbatch_communicates, no_prefetch, frozen_part_gathered
    explained = sum(item.lost for item in (other.finding(figures) for other in others) if item is not None)
    if gradients_in_float32.finding(figures) is not None:
        explained += waits.reductions
    if waits.share - explained < rule.least:
        return None
    gave = f"; the link has reached {in_bytes(1e9 * run.link_gb_s)}/s" if run.link_gb_s else ""
    stated = (
        f"{percent(waits.share)} of the time waits for communication of {in_bytes(figures.moved_bytes)} per step at "
        f"{in_bytes(1e9 * figures.reached_gb_s)}/s{gave}."
    )
    change = (
        'Send less (`strategy="hsdp"`, `reduce_wire`, larger batches). One slow link slows all ranks: measure the link '
        "of each host (`iperf3`, `ib_write_bw`)."
    )
    return rule.found(stated, change, lost=waits.share)


@rule("network stalls", least=0.10, why="communication of the same bytes takes the same time in all steps")
def network_stalls(figures: RunFigures, rule: Rule) -> Finding | None:
    loss = _large(figures.loss("transport"), rule)
    if loss is None:
        return None
    stated = f"{percent(loss.lost)} of the time waits because communication is slower than usual: {figures.when(loss)}."
    change = "Look for other traffic on the network at these steps: checkpoints, loaders, other jobs; or link errors."
    reason = slow_link_of(figures)
    if reason is not None:
        stated, change = f"{stated} {reason.stated}", reason.change
    return rule.found(stated, change, lost=loss.lost)


# -- the program ------------------------------------------------------------------------------------------------------


@rule("checkpoint stalls", least=0.05, why="checkpoints in the background stall steps for less than 1 % of the time")
def checkpoint_stalls(figures: RunFigures, rule: Rule) -> Finding | None:
    loss = _large(figures.loss("checkpoint"), rule)
    if loss is None:
        return None
    stated = f"{percent(loss.lost)} of the time waits for checkpoints, on {figures.who(loss)}: {figures.when(loss)}."
    change = "Save in the background (`checkpoint.async_save`), to a faster disk, or less often."
    return rule.found(stated, change, lost=loss.lost)


_EVALUATION = "forward without gradients"


@rule("evaluation", least=0.10, why="evaluation of a few batches now and then takes under 5 % of the time")
def evaluation(figures: RunFigures, rule: Rule) -> Finding | None:
    seconds = sum(wait.waited_s for wait in figures.run.host_waits if wait.what == _EVALUATION)
    loss = figures.loss("other", of_all=True)
    if loss is None or loss.lost < rule.least or seconds < loss.seconds.mean() / 2:
        return None
    stated = f"{percent(loss.lost)} of the time is in evaluation (forwards without gradients): {figures.when(loss)}."
    change = "Evaluate less often or on fewer batches. `with report.pausing():` leaves its time out of the steps."
    return rule.found(stated, change, lost=loss.lost)


@rule("code on one rank", least=0.10, why="logging of a few numbers takes under 1 % of a step")
def code_on_one_rank(figures: RunFigures, rule: Rule) -> Finding | None:
    loss = _large(figures.loss("other", of_all=False), rule)
    if loss is None:
        return None
    stated = (
        f"{percent(loss.lost)} of the time waits for {figures.who(loss)}, in code between forward, backward and "
        f"optimizer: {figures.when(loss)}{_listed_waits(figures)}."
    )
    change = "Log every tenth step, in a thread, or by `fullshard.report`'s `log_to`: the other ranks wait meanwhile."
    return rule.found(stated, change, lost=loss.lost)


def _listed_waits(figures: RunFigures) -> str:
    waits = sorted(figures.run.host_waits, key=lambda host_wait: -host_wait.waited_s)
    return f"; {listed([f'{wait.what} ({wait.waits:.3g} times)' for wait in waits])}" if waits else ""


@rule(
    "host waits",
    least=0.10,
    why="queueing steps ahead takes the host less than 1 % of the time; on a CPU, clipping takes 2 to 5 %",
)
def host_waits(figures: RunFigures, rule: Rule) -> Finding | None:
    loss = figures.loss("other", of_all=True)
    if evaluation.finding(figures) is not None:
        return None
    between = 0.0 if loss is None or _is_starved(figures, loss) else loss.lost
    waited = sum(wait.waited_s for wait in figures.run.host_waits if wait.what != _EVALUATION)
    waited = min(waited / float(figures.step_s.mean()), _idle_share(figures))
    lost = max(between, waited)
    if lost < rule.least:
        return None
    size = f": {figures.when(loss)}" if loss is not None and between >= rule.least else ""
    stated = f"{percent(lost)} of the time the program neither computes nor communicates{size}{_listed_waits(figures)}."
    change = "Log every tenth step and keep values on the device until then: no `.item()` in the loop."
    if loss is not None and loss.pattern.kind != "steady":
        change = "Do this less often or in a thread: saving with `torch.save`, logging, images, metrics."
    return rule.found(stated, change, lost=lost)


def _idle_share(figures: RunFigures) -> float:
    """Return the fraction of a step during which an accelerator is idle, an upper bound on the cost of host waits."""
    busy = figures.later(figures.run.busy_s)
    if busy is None or all(rank.device == "cpu" for rank in figures.run.ranks):
        return 1.0
    return max(0.0, 1 - figures.share(busy))


@rule("host-bound steps", least=0.10, why="with work queued ahead, a GPU is idle for less than 5 % of its compute")
def host_bound_steps(figures: RunFigures, rule: Rule) -> Finding | None:
    used = figures.counter("GPU utilization")
    if used is None or _is_explained(figures):
        return None
    used_share = figures.share(np.nan_to_num(used, nan=1.0) * figures.step_s)
    outside = sum(figures.share(figures.of(part)) for part in ("input", "checkpoint", "other"))
    lost = 1 - used_share - outside
    if lost < rule.least:
        return None
    stated = (
        f"The GPUs run kernels for {percent(used_share)} of the time. For {percent(lost)} they wait for the host to "
        "launch the next one, within forward, backward and the optimizer step."
    )
    change = (
        "Larger microbatches; `fullshard.capture` or torch.compile; several blocks as one unit, as `fullshard plan` "
        "recommends."
    )
    return rule.found(stated, change, lost=lost)


UNEXPLAINED = 1 / 3  # the minimum fraction of the time that is lost without any cause that reaches its threshold


@rule("unexplained waits", least=UNEXPLAINED, why="several smaller losses, or a loss that no other rule detects")
def unexplained_waits(figures: RunFigures, rule: Rule) -> Finding | None:
    lost = 1 - figures.share(figures.computes)
    others = (other.finding(figures) for other in RULES if other.of_time and other is not rule)
    if lost < rule.least or any(found is not None for found in others):
        return None
    shares = {part: figures.share(figures.of(part)) for part in PARTS if part not in GROUPS["compute"]}
    most = [f"{percent(shares[part])} {part}" for part in sorted(shares, key=lambda part: -shares[part])[:2]]
    stated = f"{percent(lost)} of the time is not compute: {listed(most)}."
    return rule.found(stated, "See where a step goes, and the map of ranks and steps.", lost=lost)


# -- memory -----------------------------------------------------------------------------------------------------------

_FULL = 0.90  # minimum fraction of the limit; an allocator with less free memory frees and reallocates its cache


@rule(
    "no activation checkpointing",
    least=0.40,
    why="of the peak: recomputing frees most of it and takes a third more time",
    of_time=False,
    helps=("activation checkpointing",),
)
def no_activation_checkpointing(figures: RunFigures, rule: Rule) -> Finding | None:
    run, used = figures.run, figures.used_memory()
    if any(unit.recomputed for unit in run.units) or not run.units:
        return None
    if run.out_of_memory is not None:
        held, total = run.out_of_memory.by_state.get("activations", 0), sum(run.out_of_memory.by_state.values())
        full = 1.0 if held >= run.out_of_memory.limit_bytes / 10 else 0.0  # otherwise something else is large
    elif used is not None and used[1] and run.memory is not None:
        full, total = used[0] / used[1], figures.tensors_at_peak()
        held = int(run.memory.by_state["activations"][run.memory.peak]) if "activations" in run.memory.by_state else 0
    else:
        return None
    if full < _FULL or held < rule.least * max(total, 1):
        return None
    stated = (
        f"Memory is {percent(min(1.0, full))} full, and {percent(held / total)} of tensors at the peak are "
        f"activations: {in_bytes(held)}."
    )
    change = "Recompute them (`--activation-checkpointing`, `torch.utils.checkpoint`), or use smaller microbatches."
    return rule.found(stated, change, of_memory=full * held / total)


@rule(
    "needless activation checkpointing",
    least=0.10,
    why="recomputing takes as long as a forward; it is for memory that would be full without it",
)
def needless_activation_checkpointing(figures: RunFigures, rule: Rule) -> Finding | None:
    units, used = figures.run.units, figures.used_memory()
    recomputed = sum(unit.nbytes for unit in units if unit.recomputed) / max(1, sum(unit.nbytes for unit in units))
    lost = recomputed * figures.share(figures.of("forward"))
    if used is None or not used[1] or used[0] > _SPARE * used[1] or lost < rule.least:
        return None
    stated = (
        f"About {percent(lost)} of the time recomputes activations in backward, and "
        f"{percent(1 - used[0] / used[1])} of a rank's memory is free."
    )
    change = "Turn activation checkpointing off, or recompute fewer blocks, as far as memory allows."
    return rule.found(stated, change, lost=lost)


_SPARE = 0.3  # maximum fraction of the limit; without recomputing, activations may be several times as large


@rule("large logits", least=0.30, why="of tensors at the peak: a smaller share is one of many", of_time=False)
def large_logits(figures: RunFigures, rule: Rule) -> Finding | None:
    run, total, used = figures.run, figures.tensors_at_peak(), figures.used_memory()
    logits = run.output_nbytes
    if run.memory is None or not total or logits < _NOTABLE_LOGITS_NBYTES:
        return None
    full = 1.0
    if used is not None and used[1] and run.out_of_memory is None:
        full = min(1.0, used[0] / used[1])
    if full < _SPARE:
        return None
    # Logits, their cast to float32, and their gradients.
    identical = [item.nbytes for item in run.memory.largest if item.nbytes in (logits, 2 * logits)]
    if sum(identical) < rule.least * total:
        return None
    stated = (
        f"The model returns {in_bytes(logits)}, and the peak has {len(identical)} tensors of that kind: "
        f"{percent(sum(identical) / total)} of {in_bytes(total)}."
    )
    change = (
        "Compute the loss in chunks of rows, or fused with the head, so that the logits never exist as a whole; or "
        "use smaller microbatches."
    )
    return rule.found(stated, change, of_memory=full * sum(identical) / total)


_NOTABLE_LOGITS_NBYTES = 64_000_000  # smaller logits do not cause an out-of-memory error


@rule(
    "memory leak",
    least=0.02,
    why="of the memory in use, more in the second half of a run: tensors of a step are freed by its end",
    of_time=False,
)
def memory_leak(figures: RunFigures, rule: Rule) -> Finding | None:
    run = figures.run
    held = run.held_bytes[:, run.held_bytes.shape[1] // 4 :].astype(np.float64)  # an allocator fills its caches first
    if held.shape[1] < _LEAK_STEPS:
        return None
    half = held.shape[1] // 2
    slopes = np.array([_slope(item) for item in held])
    worst = int(slopes.argmax())
    series, slope = held[worst], float(slopes[worst])
    grown = slope * (len(series) - 1)
    continues = _slope(series[half:]) >= 0.5 * _slope(series[:half]) > 0
    if grown < max(rule.least * series[0], _NOTABLE_LEAK_NBYTES) or not continues:
        return None
    if _trend(series) < _SURE or _trend(run.held_bytes[worst].astype(np.float64)) < _SURE_OF_ALL_STEPS:
        return None
    leaking = tuple(int(rank) for rank in np.flatnonzero(slopes >= slope / 2))
    who = "each rank" if len(leaking) == len(held) > 1 else figures.ranks_text(leaking)
    holds = f"{who[0].upper()}{who[1:]} {'hold' if who.startswith('ranks') else 'holds'}"
    stated = f"{holds} {in_bytes(slope)} more after each step, {in_bytes(series[-1])} at the end."
    limit = run.memory.limit if run.memory is not None else None
    if limit is not None and limit > series[-1]:
        stated += f" In {(limit - series[-1]) / slope:.0f} steps its memory is full."
    change = (
        "Keep numbers of losses and outputs, not tensors: use `.detach()` or `.item()` before appending them to a list."
    )
    return rule.found(stated, change, of_memory=grown / series[-1])


_LEAK_STEPS = 10
_NOTABLE_LEAK_NBYTES = 4_000_000
_SURE = 4.0  # standard deviations: by chance once in 30,000 series
_SURE_OF_ALL_STEPS = 5.0  # the same over the first quarter too: by chance once in three million series


def _slope(series: Series) -> float:
    """Return bytes per step: the median slope of all pairs of at most 64 steps (Theil, 1950; Sen, 1968)."""
    at, early, late = _pairs(series)
    return float(np.median((series[at[late]] - series[at[early]]) / (at[late] - at[early])))


def _trend(series: Series) -> float:
    """Return the excess of rising over falling pairs of steps, in standard deviations (Mann, 1945)."""
    at, early, late = _pairs(series)
    count = len(at)
    deviation = np.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    return float(np.sign(series[at[late]] - series[at[early]]).sum() / deviation)


def _pairs(series: Series) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return at most 64 steps, and all pairs of them as indices."""
    at = np.unique(np.linspace(0, len(series) - 1, 64).round().astype(np.int64))
    return (at, *np.triu_indices(len(at), 1))
