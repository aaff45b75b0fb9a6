"""Run programs on a pool of ranks, judge their results, and shrink those that fail."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import fullshard
from benchmarks.fuzzing import execution
from benchmarks.fuzzing.execution import Json, Outcome, first_difference, is_finite, run_plain, run_sharded
from benchmarks.late_streams import late, some_late
from fullshard.device import accelerator
from fullshard.dry.streams import DryAccelerator
from fullshard.tape.tape import Tape
from fullshard.testing.ranks import RankPool, RanksFailed

EQUAL, CLOSE, REFUSED, INVALID = "equal", "close", "refused", "invalid"
HANG, DIED, DISAGREE, BARE, WRONG = "hang", "rank died", "ranks disagree", "bare error", "wrong numbers"
FAILURES = (HANG, DIED, DISAGREE, BARE, WRONG)


@dataclass(frozen=True)
class Verdict:
    """The result of one program.

    Args:
        kind: equal, close (on GPUs, where kernels depend on addresses, and states on the CPU are stepped by other
            kernels), refused, invalid (the plain program itself fails), or one of `FAILURES`.
        cause: for errors, the type and the place; for wrong numbers, what is wrong. It stays while a program shrinks.
        details: the whole story, for readers.
    """

    kind: str
    cause: str = ""
    details: str = ""

    @property
    def is_failure(self) -> bool:
        return self.kind in FAILURES


class Pool:
    """Ranks that run one program after another, and are started again after anything but an equal one."""

    def __init__(self, timeout: float = 30.0, before: Callable[[], None] | None = None) -> None:
        self._timeout = timeout
        self._before = before
        self._ranks: dict[tuple[int, bool], RankPool] = {}

    def judge(self, program: Json) -> Verdict:
        """Run `program` plain and sharded, and compare."""
        try:
            expected = run_plain(program)
        except Exception as error:
            return Verdict(INVALID, type(error).__name__, str(error))
        if not is_finite(expected):
            return Verdict(INVALID, "not finite")
        key = (program.get("ranks", 1), program.get("no shared memory", False))
        backend = "cpu:gloo,cuda:nccl" if program.get("device") == "cuda" else "gloo"
        ranks = self._ranks.setdefault(key, RankPool(key[0], timeout=self._timeout, backend=backend))
        with tempfile.TemporaryDirectory(prefix="fullshard-fuzz-") as folder:
            try:
                outcomes = ranks.run(_on_rank, program, folder, self._before)
            except RanksFailed as failed:
                kind = DIED if any(failure.kind == "exit" for failure in failed.failures.values()) else HANG
                return Verdict(kind, "", str(failed))
        verdict = verdict_of(outcomes, expected)
        if verdict.kind == WRONG and "device" in program:
            tolerance = 0.03 if any(key in program for key in ("precision", "dtype", "autocast")) else 1e-3
            rounded = verdict_of(outcomes, expected, tolerance)
            verdict = Verdict(CLOSE, verdict.cause, verdict.details) if rounded.kind == EQUAL else rounded
        if verdict.kind not in (EQUAL, CLOSE):
            ranks.end()
        return verdict

    def end(self) -> None:
        for ranks in self._ranks.values():
            ranks.end()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _on_rank(program: Json, folder: str, before: Callable[[], None] | None) -> Outcome:
    fullshard.share_memory_between_ranks(not program.get("no shared memory", False))
    try:
        if before is not None:
            before()
        with streams_of(program):
            return run_sharded(program, folder)
    finally:
        fullshard.share_memory_between_ranks(True)


def streams_of(program: Json) -> AbstractContextManager[None]:
    """Return a context in which the program's streams are simulated, or some of a GPU's are late, if it asks for it."""
    if program.get("simulated streams"):
        return accelerator.pretending(DryAccelerator(Tape()))
    if "late streams" not in program:
        return nullcontext()
    device = torch.device(program["device"], 0)
    names, timed = some_late(program["late streams"])
    slow = late(accelerator.StreamAccelerator(device), names, timed(lambda ms: torch.cuda._sleep(int(ms * 1.5e6))))
    return mock.patch.dict(accelerator._known, {device: slow})


def verdict_of(outcomes: list[Outcome], expected: dict[str, Any], tolerance: float = 0.0) -> Verdict:
    """Combine the outcomes of all ranks into a verdict."""
    errors = [outcome for outcome in outcomes if outcome.records is None]
    details = "\n".join(f"---- rank {rank}: {outcome.details or 'no error'}" for rank, outcome in enumerate(outcomes))
    bare = next((error for error in errors if not error.is_own), None)
    if bare is not None:
        return Verdict(BARE, f"{bare.error.partition(':')[0]} in {bare.place}", details)
    kinds = {outcome.error.partition(":")[0] for outcome in outcomes}
    if len(kinds) > 1:
        return Verdict(DISAGREE, ", ".join(sorted(kinds)), details)
    if errors:
        return Verdict(REFUSED, f"{errors[0].error.partition(':')[0]} in {errors[0].place}", details)
    for rank, outcome in enumerate(outcomes):
        assert outcome.records is not None
        found = first_difference(outcome.records, expected, rank, tolerance)
        if found is not None:
            what = found.partition(": ")[2].split()[0].rstrip(",:")
            return Verdict(WRONG, what, found)
    return Verdict(EQUAL)


# -- shrinking --------------------------------------------------------------------------------------------------------

_KEPT = {"kind", "do", "name"}  # keys without a default


def shrink(program: Json, still_fails: Callable[[Json], bool], attempts: int = 200) -> Json:
    """Return a smaller program that still fails: parts are deleted or simplified while it does."""
    for _ in range(attempts):
        for smaller in reductions(program):
            attempts -= 1
            if still_fails(smaller):
                program = smaller
                break
            if attempts <= 0:
                return program
        else:
            return program
    return program


def reductions(value: Any) -> Iterator[Any]:
    """Simpler forms of a JSON value, the smallest first."""
    if isinstance(value, list):
        if len(value) > 3:
            yield value[: len(value) // 2]
            yield value[len(value) // 2 :]
        for i in range(len(value)):
            yield value[:i] + value[i + 1 :]
        for i, item in enumerate(value):
            for simpler in reductions(item):
                yield [*value[:i], simpler, *value[i + 1 :]]
    elif isinstance(value, dict):
        yield from value.get("children", []) if "kind" in value else []
        for key in value:
            if key not in _KEPT:
                yield {name: item for name, item in value.items() if name != key}
        for key, item in value.items():
            for simpler in reductions(item):
                yield value | {key: simpler}
    elif isinstance(value, int) and not isinstance(value, bool) and value > 2:
        yield 2
        if value > 3:
            yield value - 1


def script_of(program: Json) -> str:
    """Return a script that runs `program` on its own, with torchrun."""
    source = Path(execution.__file__).read_text()
    ranks = program.get("ranks", 1)
    literal = json.dumps(program, indent=1)
    return (
        f"# torchrun --nproc-per-node {ranks} this_file.py\n{source}\n\n"
        f'import json\n\nPROGRAM = json.loads("""\n{literal}\n""")\n\n'
        'if __name__ == "__main__":\n    sys.exit(main(PROGRAM))\n'
    )
