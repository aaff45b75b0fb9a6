"""Does `fullshard plan` choose well? Searches whose every candidate is also measured, on the CPU of this machine.

    python benchmarks/plan_searches.py --hardware here --json benchmarks/results/plan_searches.json

For each of eight models (deep, wide, many tokens, few tokens, ...) all candidates are trained on two ranks of this
machine, by turns: strategies, checkpointing, and the microbatches of a step of eight rows a rank. The plan, which has
seen none of that, names one. What counts is how much longer its choice takes than the fastest that was measured: the
goal is 3 %.
`--hardware here` is what `fullshard calibrate` has written; any description of a CPU will do.

The last line is the result as JSON.
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from fullshard.engine.hooks import without_sync
from fullshard.engine.registry import units_in
from fullshard.optim.clipping import clip_grad_norm_
from fullshard.planner.candidates import Candidate, Cluster, Program, sharded
from fullshard.planner.search import Question, search
from fullshard.planner.settings import MachineSettings, PlanSettings
from fullshard.planner.subject import Subject, gpt_subject
from fullshard.testing import run_ranks
from fullshard.train.model import GPT, initialize, shape_of
from fullshard.train.settings import ModelSettings
from fullshard.versions import versions

RANKS, ROWS = 2, 8
GOAL = 0.03
SEARCHES: dict[str, tuple[ModelSettings, int]] = {  # with tokens in a row
    "small": (ModelSettings(size="small", layers=6), 128),
    "deep and narrow": (ModelSettings(size="small", layers=16, width=64), 64),
    "wide and shallow": (ModelSettings(size="small", layers=2, width=1024, heads=8), 32),
    "medium": (ModelSettings(size="medium"), 64),
    "many tokens": (ModelSettings(size="small", layers=4), 512),
    "few tokens": (ModelSettings(size="medium", layers=6), 8),
    "wide MLP": (ModelSettings(size="small", layers=4, mlp_ratio=16), 64),
    "many heads": (ModelSettings(size="medium", layers=4, heads=16), 128),
}


def question(name: str, cluster: Cluster) -> Question:
    """All that is searched through."""
    size, seq = SEARCHES[name]
    return Question(
        subject=gpt_subject(size, seq),
        cluster=cluster,
        global_batch=RANKS * ROWS,
        strategies=("ddp", "zero1", "zero2", "zero3"),
        checkpointing=("none", "every-1"),
        precisions=("fp32",),
        exhaustive=True,
    )


def measure(name: str, candidates: list[Candidate], rounds: int) -> list[list[float]]:
    """Seconds of a step of each candidate in each round, on this rank. Candidates take turns."""
    torch.set_num_threads(1)
    size, seq = SEARCHES[name]
    subject = gpt_subject(size, seq)
    made = [trainer(size, candidate.program) for candidate in candidates]
    found: list[list[float]] = [[] for _ in candidates]
    for number in range(rounds + 2):  # two to warm up: the first step is in no order yet
        for (model, optimizer), candidate, seconds in zip(made, candidates, found, strict=True):
            start = time.perf_counter()
            step(subject, model, optimizer, candidate)
            if number > 1:
                seconds.append(time.perf_counter() - start)
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
    asked = question(name, cluster)
    plan = search(asked)
    assert plan.best is not None
    told = [(it.sketch, *shape) for it in plan.found for shape in asked.shapes_of(it.sketch.program)]
    figures = [made.figures(rows, count) for made, rows, count in told]
    candidates = [it.candidate for it in figures]
    each = run_ranks(RANKS, measure, name, candidates, rounds, timeout=1800)
    seconds = [statistics.median(map(max, zip(*ranks, strict=True))) for ranks in zip(*each, strict=True)]
    chosen, best = candidates.index(plan.best.figures.candidate), seconds.index(min(seconds))
    return {
        "search": name,
        "candidates": len(candidates),
        "chosen": asdict(candidates[chosen]),
        "best": asdict(candidates[best]),
        "slower": seconds[chosen] / seconds[best] - 1,
        "measured_s": seconds,
        "predicted_s": [it.step_s for it in figures],
    }


def _candidate(row: dict[str, Any]) -> Candidate:
    return Candidate(**{**row, "program": Program(**row["program"])})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", default="here", help="a name, here, or the path of a TOML file")
    parser.add_argument("--searches", default=",".join(SEARCHES), help="names, separated by commas")
    parser.add_argument("--rounds", type=int, default=7, help="steps of each candidate that count")
    parser.add_argument("--json", type=Path, help="a file for the result")
    options = parser.parse_args()
    machine = PlanSettings(machines=MachineSettings(hardware=options.hardware, per_host=RANKS)).cluster()
    cluster = replace(machine, hosts=1)
    rows = []
    for name in options.searches.split(","):
        row = searched(name, cluster, options.rounds)
        rows.append(row)
        chosen, best = (
            Candidate(**{**row[key], "program": Program(**row[key]["program"])}) for key in ("chosen", "best")
        )
        print(
            f"{name}: of {row['candidates']} the plan takes {chosen.program}, {chosen.rows} rows; "
            f"{row['slower']:.1%} slower than {best.program}, {best.rows} rows",
            flush=True,
        )
    within = sum(row["slower"] <= GOAL for row in rows)
    report = {"versions": versions(), "ranks": RANKS, "within_3_percent": within, "of": len(rows), "searches": rows}
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({"within_3_percent": within, "of": len(rows), "slower": [row["slower"] for row in rows]}))


if __name__ == "__main__":
    main()
