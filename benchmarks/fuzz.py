"""Random programs, each compared bit by bit with plain PyTorch, or refused by an error of this package on every rank.

    python benchmarks/fuzz.py --minutes 30 --seed 1
    python benchmarks/fuzz.py --reproduce 1:137

A program is a model (tied, frozen, unused, nested, shared and recomputed parts, outputs in containers), a strategy
with precision and offload, an optimizer, and a loop of steps, evaluations, saves and loads, on 1 to 4 ranks of this
machine. A hang, ranks that disagree, a bare error where the plain program runs, and different bits are failures. A
failing program is shrunk and printed as a script for torchrun. The last line is JSON; the exit code is 1 if anything
failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.fuzzing.generation import FEATURES, Generator
from benchmarks.fuzzing.judging import CLOSE, EQUAL, INVALID, REFUSED, Pool, Verdict, script_of, shrink


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="stop after this time")
    parser.add_argument("--programs", type=int, default=10**9, help="stop after this many programs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first program of the seed")
    parser.add_argument("--ranks", default="1,2,3,4", help="numbers of ranks to choose from")
    parser.add_argument("--without", default="", help=f"parts to leave out: {', '.join(FEATURES)}")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="on GPUs, one rank over NCCL")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds that a program may take")
    parser.add_argument("--failures", type=int, default=20, help="stop after this many different failures")
    parser.add_argument("--reproduce", help="a file with a program as JSON, or SEED:NUMBER")
    parser.add_argument("--no-shrink", action="store_true", help="print failing programs as they are")
    parser.add_argument("--verbose", action="store_true", help="print every refusal")
    parser.add_argument("--out", type=Path, help="folder for scripts of failing programs")
    return parser.parse_args()


def main() -> int:
    given = options()
    torch.set_num_threads(1)
    ranks = tuple(int(part) for part in given.ranks.split(",")) if given.device == "cpu" else (1,)
    without = tuple(part for part in given.without.split(",") if part)
    with Pool(given.timeout) as pool:
        if given.reproduce:
            return reproduce(given, pool, ranks, without)
        return search(given, pool, ranks, without)


def reproduce(given: argparse.Namespace, pool: Pool, ranks: tuple[int, ...], without: tuple[str, ...]) -> int:
    path = Path(given.reproduce)
    if path.exists():
        program = json.loads(path.read_text())
    else:
        program = Generator(given.reproduce, ranks, without, given.device).program()
    verdict = pool.judge(program)
    print(json.dumps(program))
    print(f"{verdict.kind}: {verdict.cause}\n{verdict.details}")
    if verdict.is_failure:
        report(given, pool, given.reproduce, program, verdict)
    return int(verdict.is_failure)


def search(given: argparse.Namespace, pool: Pool, ranks: tuple[int, ...], without: tuple[str, ...]) -> int:
    end, counts, causes = time.monotonic() + 60 * given.minutes, Counter[str](), Counter[str]()
    found: set[tuple[str, str]] = set()
    for number in range(given.first, given.first + given.programs):
        if time.monotonic() > end or len(found) >= given.failures:
            break
        program = Generator(f"{given.seed}:{number}", ranks, without, given.device).program()
        verdict = pool.judge(program)
        counts[verdict.kind] += 1
        if verdict.kind != EQUAL:
            causes[f"{verdict.kind}: {verdict.cause}"] += 1
        if verdict.kind == REFUSED and given.verbose:
            print(f"{given.seed}:{number}: refused: {verdict.details.strip().splitlines()[-1]}", flush=True)
        if verdict.is_failure and (verdict.kind, verdict.cause) not in found:
            found.add((verdict.kind, verdict.cause))
            report(given, pool, f"{given.seed}:{number}", program, verdict)
        elif verdict.is_failure:
            print(f"{given.seed}:{number}: {verdict.kind} again: {verdict.cause}", flush=True)
        if sum(counts.values()) % 100 == 0:
            print(dict(counts), flush=True)
    for cause, count in causes.most_common():
        print(f"{count:6}  {cause}")
    failures = sum(counts.values()) - counts[EQUAL] - counts[CLOSE] - counts[REFUSED] - counts[INVALID]
    print(json.dumps({"programs": sum(counts.values()), **counts, "failures": failures}))
    return int(failures > 0)


def report(given: argparse.Namespace, pool: Pool, name: str, program: dict, verdict: Verdict) -> None:
    """Shrink a failing program, print it, and write its script."""
    wanted = (verdict.kind, verdict.cause)

    def still_fails(smaller: dict) -> bool:
        now = pool.judge(smaller)
        return (now.kind, now.cause) == wanted

    print(f"\n==== {name}: {verdict.kind}: {verdict.cause}", flush=True)
    if not given.no_shrink:
        if still_fails(program):
            program = shrink(program, still_fails, 12 if verdict.kind == "hang" else 150)
            verdict = pool.judge(program)
        else:
            print("It does not fail when it is run again.")
    print(json.dumps(program))
    print(verdict.details[-3000:], flush=True)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        path = given.out / f"{name.replace(':', '_')}.py"
        path.write_text(script_of(program))
        print(f"torchrun --nproc-per-node {program.get('ranks', 1)} {path}")


if __name__ == "__main__":
    sys.exit(main())
