"""`fullshard plan`: run the search and print the result. The exit code is 0 if something fits, 1 if nothing does."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from fullshard.command_line import Command, check_writable
from fullshard.errors import ConfigError, near_matches
from fullshard.plan.forecast import comparison_table
from fullshard.planner.candidates import STRATEGIES, Program
from fullshard.planner.found import FoundProgram, Plan, largest_rows
from fullshard.planner.page import page
from fullshard.planner.question import Question
from fullshard.planner.report import (
    WIDTH,
    as_dict,
    head,
    left_out_lines,
    nearest_lines,
    paste,
    predict_load,
    stated,
    table,
    what_ifs,
    why,
)
from fullshard.planner.search import least_hosts, nearest, search
from fullshard.planner.settings import PlanSettings
from fullshard.planner.workers import Workers
from fullshard.regular_files import writing

FITS, FITS_NOT, INTERRUPTED = 0, 1, 130

_DESCRIPTION = (
    "Predict which configurations of a model fit on which machines, how fast they are and where the time goes, and "
    "print the code for the best one. The engine runs on fake tensors without a GPU, and its operations are "
    "simulated on the description of the machine. The exit code is 0 if something fits, 1 if nothing fits."
)
COMMAND = Command(PlanSettings, "fullshard plan", _DESCRIPTION)


def run(argv: Sequence[str]) -> int:
    """Run `fullshard plan` with the arguments `argv` and return the exit code."""
    settings = COMMAND.parse(argv)
    answer = settings.answer
    settings.check()
    for name, path in (("json", answer.json), ("html", answer.html)):
        if path is not None and str(path) != "-":
            check_writable(name, Path(path))
    if answer.against is not None:
        return _report_drawbacks(answer.against, answer.json)
    if answer.why is not None and answer.why not in STRATEGIES:
        raise ConfigError(
            f"--why {answer.why}: unknown.{near_matches(answer.why, STRATEGIES)} Choose one of {', '.join(STRATEGIES)}."
        )
    question = settings.question()
    console = Console(emoji=False)
    if not console.is_terminal:
        console.width = WIDTH
    try:
        return _answered(settings, question, console)
    except KeyboardInterrupt:
        return INTERRUPTED


def _answered(settings: PlanSettings, question: Question, console: Console) -> int:
    answer = settings.answer
    quiet = answer.json == "-"

    def log(*lines: str) -> None:
        if not quiet:
            for line in lines:
                console.print(line, markup=False, highlight=False, soft_wrap=True)

    log(*head(question))
    if answer.why is not None:
        return _report_why(question, answer.why, answer.json, log)
    waiting: Any = console.status("simulating") if console.is_terminal and not quiet else nullcontext()
    with waiting as status:
        on_progress = (lambda item: status.update(f"simulating {item}")) if status is not None else (lambda item: None)
        with Workers(question, on_progress) as workers:
            if answer.fits_on:
                plan = least_hosts(question, workers)
            elif answer.largest_batch:
                plan = search(replace(question, global_batch=None, largest=True), workers)
            else:
                plan = search(question, workers, predict_load=lambda plan: predict_load(plan, workers))
            asks_size = answer.fits_on or answer.largest_batch
            changes = [] if plan is None or asks_size else what_ifs(plan, workers)
    if plan is None:
        nowhere = (
            "It does not fit on any of the world sizes that were tried: the activations of one row, or one unit, are "
            "too large for a rank."
        )
        log(nowhere)
        _write_json(answer.json, {"recommended": None, "said": [nowhere]})
        return FITS_NOT
    if answer.fits_on:
        cluster = plan.question.cluster
        hosts = f"{cluster.hosts} host{'s' * (cluster.hosts > 1)} of {cluster.per_host}"
        log(f"Fewest ranks that are enough: {cluster.world} ({hosts}).")
    if not quiet:
        console.print(table(plan))
    if answer.largest_batch:
        log(*_largest(plan))
    else:
        log(*stated(plan), *map(str, changes))
        for where, text in paste(plan).items():
            log("", f"--- {where} ---", text)
    _write_json(answer.json, as_dict(plan, changes))
    if answer.html is not None and plan.best is not None:
        drawn = page(plan, changes)
        with writing(answer.html, option="--html"):
            answer.html.write_text(drawn)
    elif answer.html is not None:
        log(f"{answer.html} is not written, since nothing fits.")
    return FITS if plan.best is not None else FITS_NOT


def _write_json(path: str | None, report: dict[str, Any]) -> None:
    """Write `report` to `path`, the path of --json, if given."""
    if path is None:
        return
    text = json.dumps(report, indent=2, default=str) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        with writing(path, option="--json"):
            Path(path).write_text(text)


def _report_drawbacks(out: Path, path: str | None) -> int:
    """Print the predictions for a run next to its measurements, and the causes of differences."""
    from fullshard.train.predicting import comparison_of  # late: it takes a quarter of a second that plans do not need

    found = comparison_of(out)
    _write_json(path, asdict(found))
    if path == "-":
        return FITS
    console = Console(emoji=False)
    console.print(comparison_table(found))
    for cause in found.causes:
        console.print(cause, markup=False, highlight=False, soft_wrap=True)
    return FITS


def _report_why(question: Question, strategy: str, path: str | None, log: Any) -> int:
    """Explain why a strategy fits or not, with the first checkpointing option, and report the nearest alternative."""
    rows, count = min(question.shapes())
    program = Program(
        strategy=strategy,
        checkpointing=question.checkpointing[0],
        precision=question.precisions[0],
        offload=question.offload,
        accumulates=count > 1,
        compiled=question.compiled,
    )
    with Workers(question) as ask:
        made = ask.sketch(ask(question, program))
        figures, usable = made.figures(rows, count), question.cluster.usable_bytes
        found = FoundProgram(made, figures, figures.needed_bytes <= usable, largest_rows(made))
        others = [] if found.fits else nearest(question, program, ask)
    lines = [*why(question, found), *nearest_lines(question, found, others)]
    log(*lines)
    if path is not None:
        plan = Plan(question, [found, *(other for other in others if other.sketch.program != program)])
        _write_json(path, {**as_dict(plan), "why": lines})
    return FITS if found.fits else FITS_NOT


def _largest(plan: Plan) -> list[str]:
    """Return lines about the largest microbatch of all simulated programs."""
    most = max(plan.found, key=lambda item: item.largest, default=None)
    if most is None or not most.largest:
        return [*left_out_lines(plan), "One row does not fit."]
    unit = plan.question.subject
    return [
        *left_out_lines(plan),
        f"Largest microbatch: {most.largest} rows of {unit.per_row} {unit.unit} per rank, with {most.sketch.program}. "
        "The last column shows the largest microbatch of each row.",
    ]
