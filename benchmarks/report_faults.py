"""Are causes of lost time found? Random faults are planted in synthetic runs, and the rules are asked.

    python -m benchmarks.report_faults
    python -m benchmarks.report_faults --seed 7 --planted 1000 --healthy 500

A fault has a kind, a part of the step, ranks, a size and a pattern over steps: all steps, each n-th, at random, since
some step, or growing. Runs have 1 to 16 ranks, 40 to 1000 steps, and noise of up to 15 % of each part of each step.
Half of them, and all whose fault can only be seen there, have hardware counters. The seed is fixed unless it is given.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from tests.faulty_runs import healthy_run, with_seconds

from fullshard.report.causes import find_causes
from fullshard.report.run import PARTS, Finding, HostWait, Run, UnitTimes

__all__ = ["Confusion", "Outcome", "evaluate"]

Seconds = NDArray[np.float64]
LEAST = 0.10  # of the time: smaller losses need not be found
NOISE = 0.15


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of fault.

    Args:
        title: A short name.
        parts: The parts of a step that it makes longer; one is chosen.
        ranks: "all", "some" for one or a few ranks, or "turn" for another rank in each step.
        causes: The causes that are right for a loss in every step.
        at_times: Those that are right for other losses; None for the same.
        needs_pattern: Whether it cannot be seen if it is in every step.
        counted: What hardware counters show: "idle" GPUs, "hot" ones, or "swapping".
    """

    title: str
    parts: tuple[str, ...]
    ranks: str
    causes: tuple[str, ...]
    at_times: tuple[str, ...] | None = None
    needs_pattern: bool = False
    counted: str = ""


_COMPUTE = ("forward", "backward", "optimizer")
KINDS = (
    Kind(title="slow input", parts=("input",), ranks="all", causes=("slow input",)),
    Kind(title="slow input of some ranks", parts=("input",), ranks="some", causes=("slow input",)),
    Kind(title="slow input of a rank in turn", parts=("input",), ranks="turn", causes=("slow input",)),
    Kind(title="logging on all ranks", parts=("other",), ranks="all", causes=("host waits",)),
    Kind(title="logging on one rank", parts=("other",), ranks="some", causes=("code on one rank",)),
    Kind(title="evaluation", parts=("other",), ranks="all", causes=("evaluation",)),
    Kind(title="checkpoints", parts=("checkpoint",), ranks="all", causes=("checkpoint stalls",)),
    Kind(title="checkpoints on one rank", parts=("checkpoint",), ranks="some", causes=("checkpoint stalls",)),
    Kind(title="slow ranks", parts=_COMPUTE[:2], ranks="some", causes=("throttled rank", "slow host")),
    Kind(title="a slow rank in turn", parts=_COMPUTE, ranks="turn", causes=("stragglers",)),
    Kind(
        title="slow compute",
        parts=_COMPUTE,
        ranks="all",
        causes=(),
        at_times=("slow steps", "changed speed"),
        needs_pattern=True,
    ),
    *(
        Kind(
            title=title,
            parts=_COMPUTE[:2],
            ranks="all",
            causes=(cause,),
            at_times=("slow steps", "changed speed"),
            counted=counted,
        )
        for title, cause, counted in (
            ("kernels launched too slowly", "host-bound steps", "idle"),
            ("hot GPUs", "reduced clocks", "hot"),
            ("a host that swaps", "swapping", "swapping"),
        )
    ),
    Kind(title="slow communication", parts=("gather", "reduce"), ranks="all", causes=("slow link", "network stalls")),
)
PATTERNS = ("steady", "every", "random", "since", "growing")


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A planted fault: what it is, and the fraction of the time that it costs."""

    kind: Kind
    pattern: str
    part: str
    ranks: tuple[int, ...]
    lost: float
    step: int = 0  # the period, or the first slow step
    world: int
    steps: int
    noise: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A run, the fault that was planted in it, if any, and what was found."""

    planted: Planted | None
    findings: tuple[Finding, ...]

    @property
    def first(self) -> Finding | None:
        """The most expensive cause of lost time."""
        return next((finding for finding in self.findings if finding.lost), None)

    @property
    def is_unnoticed(self) -> bool:
        """True if a fault is not reported at all."""
        return self.planted is not None and self.first is None

    @property
    def is_wrong(self) -> bool:
        """True if the first cause is not the planted one, or names other ranks."""
        if self.planted is None or self.first is None:
            return False
        kind, stated = self.planted.kind, self.first.stated
        causes = kind.causes if self.planted.pattern == "steady" else kind.at_times or kind.causes
        named = re.search(r"\branks? ([\d, and]+\d|\d+)", stated)
        ranks = {int(number) for number in re.findall(r"\d+", named[1])} if named else set()
        is_right_rank = kind.ranks != "some" or "node" in stated or " more" in stated or ranks == {*self.planted.ranks}
        return self.first.cause not in causes or not is_right_rank

    @property
    def is_wrong_time(self) -> bool:
        """True if the right cause is reported with other steps than those planted."""
        if self.planted is None or self.first is None or self.is_wrong or self.planted.pattern == "steady":
            return False
        stated, step = self.first.stated, self.planted.step
        since = re.search(r"since step (\d+)", stated)
        return not {
            "every": bool(re.search(rf"every {step}\w\w step", stated)),
            "random": bool(re.search(r"in \d+ of \d+ steps", stated)),
            "since": since is not None and abs(int(since[1]) - step) <= max(2, self.planted.steps // 50),
            "growing": "growing" in stated,
        }[self.planted.pattern]

    @property
    def error(self) -> float | None:
        """The relative error of the reported loss; None if there is no right report."""
        if self.planted is None or self.first is None or self.is_wrong:
            return None
        return abs(self.first.lost / self.planted.lost - 1)


def plant(chance: np.random.Generator) -> tuple[Run, Planted]:
    """Return a run with a random fault."""
    kind = KINDS[chance.integers(len(KINDS))]
    pattern = PATTERNS[chance.integers(kind.needs_pattern, len(PATTERNS))]
    run, noise = _healthy(chance, several=kind.ranks != "all")
    world, steps = run.step_s.shape
    some = _some(world, chance)
    part = kind.parts[chance.integers(len(kind.parts))]
    when, step = _when(pattern, steps, chance)
    where = np.ones((world, steps))
    if kind.ranks == "some":
        where *= np.isin(np.arange(world), some)[:, None]
    elif kind.ranks == "turn":
        where *= np.arange(world)[:, None] == chance.integers(world, size=steps)
    lost = float(chance.uniform(0.12, 0.65))
    later = run.steps > 1
    total_s = float(run.step_s[:, later].mean(0).sum())
    each = when * lost / (1 - lost) * total_s / when[later].sum()
    if pattern in ("every", "random"):
        each *= np.exp(chance.normal(0, 0.1, steps))
    lost_s = float(each[later].sum())
    planted = Planted(
        kind=kind,
        pattern=pattern,
        part=part,
        ranks=some if kind.ranks == "some" else (),
        lost=lost_s / (total_s + lost_s),
        step=step,
        world=world,
        steps=steps,
        noise=noise,
    )
    run = with_seconds(run, **{part: where * each})
    if kind.counted or chance.random() < 0.5:
        run = _counted(run, kind.counted, where * each, chance)
    if part in ("gather", "reduce"):
        more = float(each[later].mean()) / len(run.units)
        run = replace(run, units=tuple(_exposing(unit, part, more) for unit in run.units))
    if kind.title == "evaluation":
        seconds = float((where * each).mean())
        run = replace(run, host_waits=(HostWait(what="forward without gradients", waits=3.0, waited_s=seconds),))
    return run, planted


def _counted(run: Run, shows: str, seconds: Seconds, chance: np.random.Generator) -> Run:
    """Return the run with hardware counters that show what has cost `seconds`, of shape (ranks, steps)."""

    def about(value: Seconds | float) -> Seconds:
        return np.asarray(value) * (1 + chance.normal(0, 0.02, run.step_s.shape))

    lost = seconds / run.step_s
    at_work = run.parts_s[:, :, [PARTS.index(part) for part in PARTS if part not in ("input", "other", "checkpoint")]]
    compute = run.parts_s[:, :, [PARTS.index(part) for part in _COMPUTE]].sum(-1)
    used = at_work.sum(-1) / run.step_s - (lost if shows == "idle" else 0)
    slowed = lost * run.step_s / compute if shows == "hot" else np.zeros(run.step_s.shape)
    counters = {
        "GPU utilization": np.clip(about(used), 0, 1),
        "GPU clock": 1.98e9 * (1 - slowed) * (1 - 0.03 * chance.random(run.step_s.shape)),
        "GPU clock, at most": np.full(run.step_s.shape, 1.98e9),
        "GPU temperature": about(60.0 + 30 * (slowed > 0)),
        "GPU slowed by heat or supply": (slowed > 0).astype(float),
        "GPU at its power limit": np.zeros(run.step_s.shape),
        "CPU of this rank": about(1.0),
        "CPU of the host": about(1.2 * len(run.ranks)),
        "swapped in": 5e7 * (lost > 0) if shows == "swapping" else np.zeros(run.step_s.shape),
        "swapped out": np.zeros(run.step_s.shape),
        "stalled for memory": lost if shows == "swapping" else 0.01 * chance.random(run.step_s.shape),
    }
    return replace(run, counters=counters)


def _exposing(unit: UnitTimes, part: str, seconds: float) -> UnitTimes:
    """Return a unit whose all-gathers or reductions take longer, while compute waits."""
    return replace(unit, **{name: getattr(unit, name) + seconds for name in (f"{part}_s", f"{part}_exposed_s")})


def _some(world: int, chance: np.random.Generator) -> tuple[int, ...]:
    """Return one rank, mostly, or up to a third of them."""
    count = 1 if chance.random() < 0.7 else int(chance.integers(1, max(1, world // 3) + 1))
    return tuple(sorted(int(rank) for rank in chance.choice(world, count, replace=False)))


def _when(pattern: str, steps: int, chance: np.random.Generator) -> tuple[Seconds, int]:
    """Return the relative size of the loss in each step, and the period or first slow step."""
    at = np.arange(1, steps + 1)
    if pattern == "every":
        period = int(chance.integers(2, max(3, min(100, steps // 5))))
        return (at % period == 0).astype(float), period
    if pattern == "random":
        slow = chance.random(steps) < chance.uniform(0.05, 0.5)
        slow[chance.integers(1, steps, 3)] = True
        return slow.astype(float), 0
    if pattern == "since":
        first = int(steps * chance.uniform(0.15, 0.8))
        return (at >= first).astype(float), first
    if pattern == "growing":
        return at.astype(float), 0
    return np.ones(steps), 0


def _healthy(chance: np.random.Generator, *, several: bool = False) -> tuple[Run, float]:
    """Return a healthy run, and its noise."""
    noise = float(chance.uniform(0, NOISE))
    run = healthy_run(
        ranks=int(chance.choice([2, 3, 4, 8, 16] if several else [1, 2, 4, 8, 16])),
        steps=int(chance.choice([40, 60, 100, 300, 1000])),
        units=int(chance.choice([5, 12, 49])),
        noise=noise,
        step_s=float(10 ** chance.uniform(-2, 1)),
        seed=int(chance.integers(1 << 30)),
    )
    return run, noise


@dataclass(frozen=True)
class Confusion:
    """The outcomes of planted and healthy runs."""

    planted: list[Outcome]
    healthy: list[Outcome]

    def share(self, is_so: Callable[[Outcome], bool], among: list[Outcome] | None = None) -> float:
        """Return the share of planted runs, or of others, for which `is_so`."""
        among = self.planted if among is None else among
        return sum(map(is_so, among)) / max(1, len(among))

    @property
    def numbers(self) -> dict[str, float]:
        """The shares by name, and the error of the reported loss: the median and the 95th percentile."""
        errors = [item.error for item in self.planted if item.error is not None]
        return {
            "unnoticed": self.share(lambda item: item.is_unnoticed),
            "wrong cause": self.share(lambda item: item.is_wrong),
            "wrong steps": self.share(lambda item: item.is_wrong_time),
            "false alarms": self.share(lambda item: item.first is not None, self.healthy),
            "median error": float(np.median(errors)) if errors else float("nan"),
            "error, 95 %": float(np.quantile(errors, 0.95)) if errors else float("nan"),
            "error within 10 %": float(np.mean([error <= 0.1 for error in errors])) if errors else float("nan"),
        }


def evaluate(*, seed: int, planted: int, healthy: int) -> Confusion:
    """Plant faults at random, and ask for the causes."""
    chance = np.random.default_rng(seed)
    faulty = [plant(chance) for _ in range(planted)]
    return Confusion(
        [Outcome(planted=fault, findings=find_causes(run)) for run, fault in faulty if fault.lost > LEAST],
        [Outcome(planted=None, findings=find_causes(_counted_or_not(chance))) for _ in range(healthy)],
    )


def _counted_or_not(chance: np.random.Generator) -> Run:
    run = _healthy(chance)[0]
    return _counted(run, "", np.zeros(run.step_s.shape), chance) if chance.random() < 0.5 else run


def _table(confusion: Confusion) -> str:
    lines = [
        "| planted | runs | unnoticed | wrong cause or rank | wrong steps | others, too | median error | found as |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for kind in KINDS:
        outcomes = [item for item in confusion.planted if item.planted is not None and item.planted.kind is kind]
        errors = [item.error for item in outcomes if item.error is not None]
        names = Counter(item.first.cause for item in outcomes if item.first is not None)
        counts = [
            sum(item.is_unnoticed for item in outcomes),
            sum(item.is_wrong for item in outcomes),
            sum(item.is_wrong_time for item in outcomes),
            sum(sum(finding.lost > 0 for finding in item.findings) > 1 for item in outcomes),
        ]
        error = f"{100 * float(np.median(errors)):.1f} %" if errors else "-"
        name = names.most_common(1)[0][0] if names else "-"
        lines.append(f"| {kind.title} | {len(outcomes)} | {' | '.join(map(str, counts))} | {error} | {name} |")
    alarms = sum(item.first is not None for item in confusion.healthy)
    lines.append(f"| nothing | {len(confusion.healthy)} | - | {alarms} | - | - | - | - |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--planted", type=int, default=400, help="runs with a fault")
    parser.add_argument("--healthy", type=int, default=200, help="runs without a fault")
    parser.add_argument("--misses", action="store_true", help="print runs whose fault is not found")
    args = parser.parse_args()
    confusion = evaluate(seed=args.seed, planted=args.planted, healthy=args.healthy)
    if args.misses:
        for item in [*confusion.planted, *confusion.healthy]:
            is_off = item.error is not None and item.error > 0.1
            if item.is_unnoticed or item.is_wrong or item.is_wrong_time or is_off or (not item.planted and item.first):
                print(_described(item))
    print(_table(confusion))
    print(json.dumps({name: round(value, 4) for name, value in confusion.numbers.items()}))


def _described(item: Outcome) -> str:
    found = "; ".join(f"{finding.cause}: {finding.stated}" for finding in item.findings) or "nothing"
    if item.planted is None:
        return f"FALSE ALARM {found}"
    fault = item.planted
    word = "UNNOTICED" if item.is_unnoticed else "WRONG" if item.is_wrong else "STEPS" if item.is_wrong_time else "SIZE"
    return (
        f"{word} {fault.kind.title}, {fault.part}, {fault.pattern} {fault.step}, ranks {fault.ranks} of {fault.world}, "
        f"{fault.steps} steps, noise {fault.noise:.2f}, lost {fault.lost:.3f} -> {found}"
    )


if __name__ == "__main__":
    main()
