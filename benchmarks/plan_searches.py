"""Does `fullshard plan` choose well? Searches whose every candidate is also measured, on the CPU of this machine.

    python benchmarks/plan_searches.py --hardware here --json benchmarks/results/plan_searches.json

For each of eight models (deep, wide, many tokens, few tokens, ...) all candidates are trained on two ranks of this
machine, by turns: strategies, with and without checkpoints, and the microbatches of a step of four rows a rank. In its
turn each takes a step that does not count, since in training a step comes after one of the same model, which leaves
caches and memory as it needs them; then three that do. The plan, which has seen none of that, names one. What counts is
how much longer its choice takes than the fastest that was measured, in each round: the goal is 3 % by the median.
`--hardware here` is what `fullshard calibrate` has written; any description of a CPU will do.

Each search is added to the file as soon as it is done, and those that are there are not run again: so they can be run
in pieces. The last line is the result as JSON.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fullshard.engine.hooks import without_sync
from fullshard.engine.registry import units_in
from fullshard.optim.clipping import clip_grad_norm_
from fullshard.planner.candidates import Candidate, Cluster, Program, sharded
from fullshard.planner.question import Question
from fullshard.planner.search import search
from fullshard.planner.settings import MachineSettings, PlanSettings
from fullshard.planner.subject import Subject, gpt_subject
from fullshard.testing import run_ranks
from fullshard.train.model import GPT, initialize, shape_of
from fullshard.train.settings import ModelSettings
from fullshard.versions import versions

RANKS, ROWS = 2, 4
STEPS = 3  # of a turn that count
GOAL = 0.03
SEARCHES: dict[str, tuple[ModelSettings, int]] = {  # with tokens in a row
    "small": (ModelSettings(size="small"), 64),
    "deep and narrow": (ModelSettings(size="small", layers=12, width=64, heads=2), 32),
    "wide and shallow": (ModelSettings(size="small", layers=1, width=768, heads=8), 16),
    "medium": (ModelSettings(size="medium", layers=3), 32),
    "many tokens": (ModelSettings(size="small", layers=2), 256),
    "few tokens": (ModelSettings(size="medium", layers=2), 4),
    "wide MLP": (ModelSettings(size="small", layers=2, mlp_ratio=16), 32),
    "many heads": (ModelSettings(size="small", layers=3, heads=16), 128),
}


def question(name: str, cluster: Cluster) -> Question:
    """Return all that is searched through: 26 candidates."""
    size, seq = SEARCHES[name]
    return Question(
        subject=gpt_subject(size, seq),
        cluster=cluster,
        global_batch=RANKS * ROWS,
        strategies=("ddp", "zero2", "zero3"),
        checkpointing=("none", "every-1"),
        precisions=("fp32",),
        exhaustive=True,
    )


def measure(name: str, candidates: list[Candidate], rounds: int) -> list[list[float]]:
    """Return seconds of a step of each candidate in each round, on this rank. Candidates take turns of some steps."""
    torch.set_num_threads(1)
    size, seq = SEARCHES[name]
    subject = gpt_subject(size, seq)
    made = [trainer(size, candidate.program) for candidate in candidates]
    found: list[list[float]] = [[] for _ in candidates]
    for number in range(rounds + 1):  # one to warm up: the first step is in no order yet
        for (model, optimizer), candidate, seconds in zip(made, candidates, found, strict=True):
            step(subject, model, optimizer, candidate)
            start = time.perf_counter()
            for _ in range(STEPS):
                step(subject, model, optimizer, candidate)
            if number > 0:
                seconds.append((time.perf_counter() - start) / STEPS)
    return found


def trainer(size: ModelSettings, program: Program) -> tuple[Any, torch.optim.Optimizer]:
    model = sharded(initialize(GPT(shape_of(size)), seed=0), program, RANKS)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def step(subject: Subject, model: Any, optimizer: torch.optim.Optimizer, candidate: Candidate) -> None:
    for number in range(candidate.microbatches):
        loss = subject.loss(model, subject.make_batch(candidate.rows))
        withheld = () if number == candidate.microbatches - 1 or candidate.program.syncs_each else units_in(model)
        with without_sync(withheld):
            loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def searched(name: str, cluster: Cluster, rounds: int) -> dict[str, Any]:
    """One search: what was chosen, and what everything took."""
    requested = question(name, cluster)
    plan = search(requested)
    assert plan.best is not None
    reported = [(item.sketch, *shape) for item in plan.found for shape in requested.shapes_of(item.sketch.program)]
    figures = [made.figures(rows, count) for made, rows, count in reported]
    candidates = [figure.candidate for figure in figures]
    each = run_ranks(RANKS, measure, name, candidates, rounds, timeout=1800)
    seconds = [[max(ranks) for ranks in zip(*of_ranks, strict=True)] for of_ranks in zip(*each, strict=True)]
    chosen = candidates.index(plan.best.figures.candidate)
    medians = [statistics.median(second) for second in seconds]
    best = medians.index(min(medians))
    ratios = [local / fastest for local, fastest in zip(seconds[chosen], seconds[best], strict=True)]
    return {
        "search": name,
        "chosen": named(candidates[chosen]),
        "best": named(candidates[best]),
        "slower": statistics.median(ratios) - 1,
        "candidates": [
            {
                "candidate": named(figure.candidate),
                "measured_s": median,
                "rounds_s": rounds_s,
                "predicted_s": figure.step_s,
            }
            for figure, median, rounds_s in zip(figures, medians, seconds, strict=True)
        ],
    }


def named(candidate: Candidate) -> str:
    return f"{candidate.program}, {candidate.rows} x {candidate.microbatches}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", default="here", help="a name, here, or the path of a TOML file")
    parser.add_argument("--searches", default=",".join(SEARCHES), help="names, separated by commas")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each candidate that count")
    parser.add_argument("--json", type=Path, help="a file that results are added to")
    options = parser.parse_args()
    machine = PlanSettings(machines=MachineSettings(hardware=options.hardware, per_host=RANKS)).cluster()
    cluster = replace(machine, hosts=1)
    known = options.json is not None and options.json.exists()
    rows: list[dict[str, Any]] = json.loads(options.json.read_text())["searches"] if known else []
    done = {row["search"] for row in rows}
    for name in options.searches.split(","):
        if name in done:
            continue
        rows.append(searched(name, cluster, options.rounds))
        if options.json is not None:
            report = {"versions": versions(), "ranks": RANKS, "rows_a_rank": ROWS, "goal": GOAL, "searches": rows}
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    for row in rows:
        chosen, best, count = row["chosen"], row["best"], len(row["candidates"])
        print(f"{row['search']}: of {count} the plan takes {chosen}; {row['slower']:.1%} slower than {best}")
    within = sum(row["slower"] <= GOAL for row in rows)
    print(json.dumps({"within_3_percent": within, "of": len(rows), "slower": [row["slower"] for row in rows]}))


if __name__ == "__main__":
    main()
