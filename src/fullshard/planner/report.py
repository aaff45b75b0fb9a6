"""A plan as text (the table, and the recommendation with its reason) and as a dict."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich import box
from rich.table import Table

from fullshard.disk.prediction import DAY_S
from fullshard.disk.speed import TYPICAL
from fullshard.errors import ConfigError
from fullshard.planner.advice import python_lines, train_flags, trainer_arguments
from fullshard.planner.bounds import states_bytes
from fullshard.planner.candidates import Candidate, Program
from fullshard.planner.found import IDENTICAL, FoundProgram, Plan, fastest
from fullshard.planner.question import Question
from fullshard.planner.sketch import Sketch, SketchFigures
from fullshard.planner.workers import Workers
from fullshard.versions import versions

WIDTH = 140
_SHOWN = 12


def head(question: Question) -> list[str]:
    """Return the model and the machines, with all constants that were fitted rather than looked up."""
    subject, cluster = question.subject, question.cluster
    fitted, machine = cluster.hardware.fitted, cluster.hardware
    lines = [
        f"{subject.name}: {_parameters(question)} on {_count(cluster.hosts, 'host')} of {cluster.per_host} "
        f"({machine.name}: {machine.title})",
    ]
    lines += _states_line(question)
    lines += [
        f"Usable: {cluster.why_usable}.",
        f"Margin: measured memory has exceeded predictions by up to {cluster.memory_error:.0%}, so programs that need "
        f"at most {_gb(cluster.safe_bytes)} are preferred.",
        f"Fitted to measurements: matrix products reach {fitted.matmul_share:.0%} of the peak rate, other kernels "
        f"{fitted.memory_share:.0%} of the memory's bandwidth, and the host launches an operation in "
        f"{fitted.host_s * 1e6:.1f} us.",
    ]
    return [*lines, *subject.notes]


def _states_line(question: Question) -> list[str]:
    """Return the bytes of states under ddp and under zero3, which show the benefit of sharding."""
    model, world = question.subject.model, question.cluster.world
    if model is None or question.make_optimizer is not None:
        return []
    stored = sum(param.numel() * param.element_size() for param in model.parameters())
    trained = sum(param.numel() * param.element_size() for param in model.parameters() if param.requires_grad)
    whole = stored + 3 * trained
    return [
        f"States (parameters, gradients, AdamW's two moments): {_gb(whole)} whole, {_gb(whole / world)} per rank if "
        f"fully sharded over {world} ranks."
    ]


def table(plan: Plan) -> Table:
    """Return a table of the simulated programs, each with its fastest candidate, those that fit first."""
    shown = Table(box=box.SIMPLE, pad_edge=False)
    left = ("strategy", "checkpoints", "limited by")
    for name in columns(plan):
        shown.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    misfits = sorted((item for item in plan.found if not item.fits), key=lambda item: item.figures.needed_bytes)
    for found in (*plan.fitting[:_SHOWN], *misfits[: max(2, _SHOWN - len(plan.fitting))]):
        shown.add_row(*row(plan, found), style=None if found.fits else "dim")
    return shown


def columns(plan: Plan) -> list[str]:
    """Return the columns of the table."""
    unit = plan.question.subject.unit
    reported = ("strategy", "checkpoints", "rows x micro", "peak, GB", "usable", "step, ms", f"{unit}/s", "MFU")
    return [*reported, "exposed", "limited by", "most rows"]


def row(plan: Plan, found: FoundProgram) -> list[str]:
    """Return one row of the table, with the columns of `columns`."""
    usable = plan.question.cluster.usable_bytes
    program, figures = found.sketch.program, found.figures
    candidate, subject = figures.candidate, plan.question.subject
    name = program.strategy + (f" over {program.shard_hosts} hosts" if program.shard_hosts > 1 else "")
    name += ", offload" if program.offload else ""
    name += f", {program.cpu:.0%} on CPU" if program.cpu else ""
    name += f", {program.disk:.0%} on disk" if program.disk else ""
    name += f", {program.prefetch_depth} ahead" if program.prefetch_depth > 1 else ""
    name += f", units of {program.blocks_per_unit}" if program.blocks_per_unit > 1 else ""
    name += f", {program.precision}" if len(plan.question.precisions) > 1 else ""
    count = f"{candidate.rows} x {candidate.microbatches}" + (" sums" if program.syncs_each else "")
    needed_gb = figures.needed_bytes / 1e9
    cells = [name, program.checkpointing, count, f"{needed_gb:.1f}" if needed_gb >= 1 else f"{needed_gb:.3f}"]
    verdict = "" if found.has_margin else " tight" if found.fits else " no"
    cells.append(f"{figures.needed_bytes / usable:.0%}{verdict}")
    rate = candidate.rows * candidate.microbatches * plan.question.cluster.world * subject.per_row / figures.step_s
    cells += [_ms(figures.step_s), f"{rate:,.0f}", f"{figures.flops_utilisation:.1%}"]
    return [*cells, _ms(figures.exposed_s), figures.limited_by, str(found.largest)]


def stated(plan: Plan) -> list[str]:
    """Return the recommendation and its reason, the runner-up, and the programs that were left out."""
    lines = left_out_lines(plan)
    lines += _unknown_lines(plan)
    if any(found.sketch.program.syncs_each for found in plan.found):
        lines.append("sums: gradients are reduced after each microbatch; otherwise after the last one (no_sync).")
    best, second = plan.best, plan.runner_up
    if best is None:
        return [*lines, _nothing_fits(plan)]
    lines += [f"Recommended: {_named(best)}. {_reason(best, plan)}", *_without_margin(best, plan)]
    if best.sketch.program.blocks_per_unit > 1:
        lines.append(_larger_units(best, plan))
    if best.sketch.program.cpu:
        lines.append(_on_cpu(best, plan))
    if best.sketch.program.disk:
        lines.append(_on_disk(best, plan))
    if second is not None:
        lines.append(f"Runner-up: {_named(second)}. {_behind(best, second)}")
    return lines


def _unknown_lines(plan: Plan) -> list[str]:
    """Return a line about operations without a formula, with their largest shares of the displayed steps."""
    shares: dict[str, float] = {}
    for found in plan.found:
        for name, share in found.figures.unknown.items():
            shares[name] = max(share, shares.get(name, 0.0))
    each = [f"{name} ({share:.1%} of the step)" for name, share in sorted(shares.items(), key=lambda item: -item[1])]
    if not each:
        return []
    remedy = "torch.utils.flop_counter.register_flop_formula adds a formula"
    return [f"Without a FLOP formula, so timed by their bytes, which may be too little: {', '.join(each)}. {remedy}."]


def paste(plan: Plan) -> dict[str, str]:
    """Return the code to paste, by the place to paste it, without empty entries."""
    best, question = plan.best, plan.question
    if best is None:
        return {}
    of = (question.subject, best.sketch.program, best.figures, question.cluster, question.max_norm)
    found: dict[str, str | None] = {
        "Python": "\n".join(python_lines(*of)),
        "fullshard train": train_flags(*of),
        "TrainingArguments": trainer_arguments(*of),
    }
    return {where: text for where, text in found.items() if text is not None}


@dataclass(frozen=True)
class ChangedMachine:
    """The result for a changed machine. `figures` is None if the program does not fit there."""

    change: str
    figures: SketchFigures | None
    of_best: float  # throughput relative to the plan
    why_none: str = "it does not fit."

    def __str__(self) -> str:
        if self.figures is None:
            return f"{self.change}: {self.why_none}"
        candidate = self.figures.candidate
        return (
            f"{self.change}: {candidate.program}, {candidate.rows} x {candidate.microbatches}: "
            f"{_ms(self.figures.step_s)} ms per step, {self.of_best:.2f} times the throughput."
        )


def what_ifs(plan: Plan, ask: Workers) -> list[ChangedMachine]:
    """Return results of the best program with half the network (or link) bandwidth, and with twice the hosts."""
    best, question = plan.best, plan.question
    if best is None:
        return []
    predict_load(plan, ask)  # in parallel with the following, if there is a free core
    changes = []
    if question.cluster.world > 1:
        part = "network" if question.cluster.hosts > 1 else "link"
        link = getattr(question.cluster.hardware, part)
        slower = replace(question.cluster.hardware, **{part: replace(link, bytes_per_s=link.bytes_per_s / 2)})
        figures = best.sketch.on(slower).figures(best.figures.candidate.rows, best.figures.candidate.microbatches)
        change = f"Half the {part}{' between ranks' * (part == 'link')}"
        changes.append(ChangedMachine(change, figures, _gain(best.figures, figures, 1)))
    try:
        twice, program = _twice(plan)
        made = ask.sketch(ask(twice, program))
    except ConfigError as error:
        return [*changes, ChangedMachine("Twice the hosts", None, 0.0, str(error))]
    best_of_twice = _fastest(made, twice)
    change = "Twice the hosts, the same strategy"
    return [*changes, ChangedMachine(change, best_of_twice, _gain(best.figures, best_of_twice, 2))]


def predict_load(plan: Plan, ask: Workers) -> None:
    """Start the simulations that `what_ifs` will need if the best program so far remains the best."""
    with suppress(ConfigError):
        ask.ask_ahead(*_twice(plan))
    for item in plan.fitting:
        _ = item.sketch.tapes  # unpack while other programs are simulated


def _twice(plan: Plan) -> tuple[Question, Program]:
    """Return the best program on twice the hosts."""
    assert plan.best is not None
    cluster, program = plan.question.cluster, plan.best.sketch.program
    twice = replace(plan.question, cluster=cluster.with_hosts(2 * cluster.hosts))
    if not twice.shapes_of(program):  # fewer microbatches remain
        program = replace(program, accumulates=not program.accumulates, syncs_each=False)
    return twice, program


def _fastest(made: Sketch, question: Question) -> SketchFigures | None:
    fitting = (
        made.figures(rows, count)
        for rows, count in question.shapes_of(made.program)
        if made.can_report(rows) and made.needed_bytes(rows) <= question.cluster.usable_bytes
    )
    return fastest(question.cluster, fitting)


def _gain(best: SketchFigures, other: SketchFigures | None, times: int) -> float:
    return 0.0 if other is None else times * best.seconds_a_row / other.seconds_a_row


def why(question: Question, found: FoundProgram) -> list[str]:
    """Return why a program fits or not: the difference, the unit and phase, the states and the largest tensors."""
    figures, usable = found.figures, question.cluster.usable_bytes
    over = figures.needed_bytes - usable
    verdict = f"{_gb(over)} over" if over > 0 else f"{_gb(-over)} to spare"
    lines = [
        f"{found.sketch.program}, {_count(figures.candidate.rows, 'row')} a microbatch: "
        f"{_gb(figures.needed_bytes)} needed, {_gb(usable)} usable: {verdict}.",
        f"The peak of tensors is {_gb(figures.peak_bytes)}, in {figures.where}"
        + (
            f"; the {question.cluster.holder} holds {_gb(figures.needed_bytes - figures.peak_bytes)} beyond them."
            if figures.needed_bytes > figures.peak_bytes
            else "."
        ),
    ]
    by_state = sorted(figures.by_state.items(), key=lambda item: -item[1])
    lines += [
        f"  {state.value:34}{_gb(nbytes):>12}" for state, nbytes in by_state if nbytes >= 1e-3 * figures.peak_bytes
    ]
    lines.append(f"The largest tensors then, with {_count(found.sketch.tapes[0].rows, 'row')}:")
    lines += [f"  {_gb(nbytes):>10}  {state.value}" for nbytes, state in found.sketch.peak_moment().largest[:5]]
    states = states_bytes(question, found.sketch.program)
    if states > usable:
        lines.append(f"The states need {_gb(states)}, so no batch fits. Shard more, or use more ranks.")
    elif over > 0 and found.largest:
        lines.append(f"Up to {found.largest} rows per microbatch fit.")
    return lines


def nearest_lines(question: Question, found: FoundProgram, others: Sequence[FoundProgram]) -> list[str]:
    """Return a line on the fastest fitting program of the same strategy, or the nearest one, unless it is `found`."""
    fitting = [other for other in others if other.fits]
    best = min(fitting, key=lambda item: item.figures.seconds_a_row, default=None) or next(iter(others), found)
    if best.sketch.program == found.sketch.program:
        return ["No other configuration of this strategy is closer to fitting."] if others else []
    figures, usable = best.figures, question.cluster.usable_bytes
    over = figures.needed_bytes - usable
    verdict = f"{_gb(over)} over, in {figures.where}" if over > 0 else f"fits, with {_gb(-over)} to spare"
    rows = f"{figures.candidate.rows} x {figures.candidate.microbatches}"
    return [f"Closest to fitting: {best.sketch.program}, rows {rows}: {_gb(figures.needed_bytes)} needed, {verdict}."]


def as_dict(plan: Plan, changes: Sequence[ChangedMachine] = ()) -> dict[str, Any]:
    """Return the whole plan for JSON."""
    cluster, best, second = plan.question.cluster, plan.best, plan.runner_up
    return {
        "versions": versions(),
        "model": plan.question.subject.name,
        "hardware": {
            "name": cluster.hardware.name,
            "hosts": cluster.hosts,
            "per_host": cluster.per_host,
            "usable_bytes": cluster.usable_bytes,
            "memory_error": cluster.memory_error,
            "fitted": asdict(cluster.hardware.fitted),
        },
        "global_batch": plan.question.global_batch,
        "recommended": None if best is None else _found_dict(plan, best),
        "runner_up": None if second is None else _found_dict(plan, second),
        "said": stated(plan),
        "paste": paste(plan),
        "what_if": [
            {"change": change.change, "throughput": change.of_best, **_candidate_dict(change.figures)}
            for change in changes
        ],
        "simulated": [
            _found_dict(plan, item)
            for item in (*plan.fitting, *(element for element in plan.found if not element.fits))
        ],
        "left_out": plan.left_out,
    }


def _found_dict(plan: Plan, found: FoundProgram) -> dict[str, Any]:
    figures, subject = found.figures, plan.question.subject
    rows = figures.candidate.rows * figures.candidate.microbatches * plan.question.cluster.world
    return {
        **_candidate_dict(figures),
        "fits": found.fits,
        "has_margin": found.has_margin,
        "largest_rows": found.largest,
        "needed_bytes": figures.needed_bytes,
        "peak_bytes": figures.peak_bytes,
        "peak_in": figures.where,
        "by_state": {state.value: nbytes for state, nbytes in figures.by_state.items()},
        "host_bytes": figures.host_bytes,
        f"{subject.unit}_per_s": rows * subject.per_row / figures.step_s,
        "flops_utilisation": figures.flops_utilisation,
        "unknown": dict(figures.unknown),
        "exposed_s": figures.exposed_s,
        "limited_by": figures.limited_by,
        "seconds": dict(figures.limits),
        "sent_bytes": figures.sent_bytes,
    }


def _candidate_dict(figures: SketchFigures | None) -> dict[str, Any]:
    if figures is None:
        return {"step_s": None}
    candidate: Candidate = figures.candidate
    return {
        **asdict(candidate.program),
        "rows": candidate.rows,
        "microbatches": candidate.microbatches,
        "step_s": figures.step_s,
    }


# -------------------------------------------------------------------------------------------------------- sentences


def _named(found: FoundProgram) -> str:
    figures, program = found.figures, found.sketch.program
    count = figures.candidate
    kept = {
        "none": "without checkpoints",
        "selective": "with selective checkpoints",
        "every-2": "with every other block checkpointed",
        "every-1": "with every block checkpointed",
    }[program.checkpointing]
    more = ", shards on the CPU" if program.offload else ""
    more += f", {program.cpu:.0%} of the optimizer's state on the CPU" if program.cpu else ""
    more += f", {program.disk:.0%} of the optimizer's state on a disk" if program.disk else ""
    more += f", {program.prefetch_depth} units gathered ahead" if program.prefetch_depth > 1 else ""
    more += f", units of {program.blocks_per_unit} blocks" if program.blocks_per_unit > 1 else ""
    each = f"{count.rows} row{'s' * (count.rows > 1)} a microbatch"
    each += f", {count.microbatches} microbatches a step" if count.microbatches > 1 else ""
    if count.microbatches > 1:
        each += ", each reduced" if program.syncs_each else ", reduced once"
    over = f" with shards over {program.shard_hosts} hosts" if program.shard_hosts > 1 else ""
    return f"{program.strategy}{over} {kept}{more}, {each}"


def _reason(best: FoundProgram, plan: Plan) -> str:
    figures, usable = best.figures, plan.question.cluster.usable_bytes
    share = figures.limits[figures.limited_by] / figures.step_s
    is_fastest = (plan.with_margin or plan.fitting)[0] is best
    beyond = (
        "is faster" if is_fastest else f"is faster by more than {IDENTICAL - 1:.1%}, and this needs the least memory"
    )
    margin = " with a margin" if best.has_margin else ""
    return (
        f"No simulated configuration that fits{margin} {beyond}: {_ms(figures.step_s)} ms per step ({share:.0%} "
        f"{figures.limited_by}), in {figures.needed_bytes / usable:.0%} of the usable memory."
    )


def _without_margin(best: FoundProgram, plan: Plan) -> list[str]:
    """Return a line if the best program may not fit, or if a program that may not fit is faster."""
    error, usable = plan.question.cluster.memory_error, plan.question.cluster.usable_bytes
    if not best.has_margin:
        return [
            f"Nothing fits with a margin. Predictions have been up to {error:.0%} too low, and then this needs "
            f"{(1 + error) * best.figures.needed_bytes / usable:.0%} of the usable memory. Run a few steps before a "
            "long run, take more ranks, or add --offload."
        ]
    first = plan.fitting[0]
    gain = 1 - first.figures.seconds_a_row / best.figures.seconds_a_row
    if first.has_margin or gain < IDENTICAL - 1:
        return []
    return [
        f"{gain:.1%} faster, but without a margin: {_named(first)}, in {first.figures.needed_bytes / usable:.0%} of "
        "the usable memory."
    ]


def _larger_units(best: FoundProgram, plan: Plan) -> str:
    """Return a sentence about the time that larger units save, and the memory that they take."""
    program = replace(best.sketch.program, blocks_per_unit=1)
    like = next(found for found in plan.fitting if found.sketch.program == program)
    more_mb = max(0.0, best.figures.needed_bytes - like.figures.needed_bytes) / 1e6
    return (
        "The host limits this step, so several blocks form a unit: with a unit for each block, the compute stream "
        f"waits {_ms(like.figures.limits['host'])} ms of {_ms(like.figures.step_s)} for the host, now "
        f"{_ms(best.figures.limits['host'])} ms of {_ms(best.figures.step_s)}. It takes {more_mb:,.0f} MB more memory. "
        "TrainingArguments and fullshard train have no option for it: each block is a unit there."
    )


def _on_cpu(best: FoundProgram, plan: Plan) -> str:
    """Return a sentence about the states that a host's CPU stores and updates, and its assumed rate."""
    cluster = plan.question.cluster
    machine = cluster.hardware
    nbytes, rate = best.figures.host_bytes * cluster.per_host, machine.host_memory_bytes_per_s / cluster.per_host
    return (
        f"The CPUs of a host step it in {_gb(nbytes)} of page-locked memory, of {_gb(machine.host_memory_bytes)}: for "
        f"each rank they read and write {rate / 1e9:.3g} GB/s (assumed: host_memory_bytes_per_s of the description), "
        f"and copies go at {machine.host_link_bytes_per_s / 1e9:.3g} GB/s each way."
    )


def _on_disk(best: FoundProgram, plan: Plan) -> str:
    """Return a sentence about the traffic of each host's disk, and its assumed speed."""
    cluster = plan.question.cluster
    nbytes = best.sketch.disk_bytes * cluster.per_host
    known = "as measured" if cluster.disk is not TYPICAL else "assumed, as of an SSD; --disk FOLDER measures one"
    a_day = nbytes * DAY_S / best.figures.step_s / 1e12
    return (
        f"The disk of a host holds {_gb(nbytes)}, all of it read and written in each step: {a_day:,.1f} TB written "
        f"per day. Reads and writes together: {cluster.disk.both_bytes_per_s / 1e9:.2g} GB/s in all, {known}."
    )


def _behind(best: FoundProgram, second: FoundProgram) -> str:
    slower = second.figures.seconds_a_row / best.figures.seconds_a_row - 1
    rows = best.figures.candidate.rows * best.figures.candidate.microbatches
    others = second.figures.candidate.rows * second.figures.candidate.microbatches
    more = {
        name: second.figures.limits[name] / others - best.figures.limits[name] / rows for name in best.figures.limits
    }
    most = max(more, key=lambda name: more[name])
    less = 1 - second.figures.needed_bytes / best.figures.needed_bytes
    memory = f"{abs(less):.0%} {'less' if less > 0 else 'more'} memory"
    if abs(slower) < IDENTICAL - 1:
        return f"As fast; it takes {memory}."
    return f"{slower:.1%} slower, mostly by {most}; it takes {memory}."


def _nothing_fits(plan: Plan) -> str:
    usable = plan.question.cluster.usable_bytes
    least = min(plan.found, key=lambda item: item.figures.needed_bytes, default=None)
    ask = "--fits-on shows how many ranks are needed"
    if least is None:
        return f"Nothing fits: the states need more than {_gb(usable)} per rank under every strategy; {ask}."
    return (
        f"Nothing fits: {least.sketch.program} needs the least, {_gb(least.figures.needed_bytes)} of {_gb(usable)}, "
        f"in {least.figures.where}; {ask}."
    )


def left_out_lines(plan: Plan) -> list[str]:
    """Return lines with the numbers of simulated and skipped programs, by reason; empty if all were simulated."""
    parts = [f"{count} {reason}" for reason, count in plan.left_out.items()]
    return [f"Simulated: {_count(len(plan.found), 'program')}. Left out: {'; '.join(parts)}."] if parts else []


def _parameters(question: Question) -> str:
    model = question.subject.model
    if model is None:
        return "sharded by the user's function"
    numel = sum(param.numel() for param in model.parameters())
    return f"{numel / 1e9:.2f}B parameters" if numel >= 1e8 else f"{numel / 1e6:.2f}M parameters"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def _gb(nbytes: float) -> str:
    if nbytes < 1e8:
        return f"{nbytes / 1e6:,.2f} MB"
    return f"{nbytes / 1e9:,.2f} GB" if nbytes < 1e10 else f"{nbytes / 1e9:,.1f} GB"


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.2f}"
