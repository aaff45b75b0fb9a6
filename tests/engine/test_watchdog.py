"""A job with ranks that would wait forever ends and reports the lost rank or the progress of all ranks."""

import ast
import gc
import importlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import weakref
from _thread import allocate_lock
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread, main_thread
from time import monotonic, sleep
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_ranks import on_new_ranks

import fullshard
from fullshard import ConfigError, RankMismatchError, set_collective_timeout
from fullshard._compat import in_backward_of_inputs, in_pass_for_inputs, visits_frames
from fullshard.comm.pairwise import PairwiseCollectives
from fullshard.comm.routes import collectives_for
from fullshard.liveness import watchdog
from fullshard.liveness.rank_progress import GroupProgress, RankProgress, _line_of, _torch_call_of
from fullshard.liveness.ring import Ring, _find_silence
from fullshard.liveness.store import PatientStore
from fullshard.liveness.watchdog import EXIT_CODE, _Board, _Question, is_deadlock
from fullshard.tape.recorder import Origin, Phase
from fullshard.testing import run_ranks

SOURCE = Path(fullshard.__file__).parent
WORLD = 3
KILLED = 137 - 128
IN_RING = "time.sleep(2); "  # until the ring is closed

# One process imports the modules that all ranks need. For each run it forks them, and prints their process ids and exit
# codes.
FORKS = """
import json, os, sys
from pathlib import Path
import torch, torch._dynamo, fullshard

def start_as_a_rank():
    for line in sys.stdin:
        folder, environment, *sys.argv[1:] = json.loads(line)
        ranks = []
        for rank in range(int(environment["WORLD_SIZE"])):
            ranks.append(os.fork())
            if not ranks[-1]:
                os.environ.update(environment, RANK=str(rank))
                with (Path(folder) / str(rank)).open("w") as log:
                    os.dup2(log.fileno(), 2)
                return
        print(*ranks, flush=True)
        for _ in ranks:
            ended, status = os.wait()
            print(ranks.index(ended), os.waitstatus_to_exitcode(status), flush=True)
    sys.exit()

start_as_a_rank()
"""

# Rank 1 executes the given actions before some steps, while the others continue.
SCRIPT = """
import logging, os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch import nn
from fullshard import fully_shard, set_collective_timeout
from fullshard._compat import default_store
from fullshard.tape.recorder import Origin, Phase
from fullshard.liveness.rank_progress import here

action, setting, steps, elsewhere = sys.argv[1:]

def await_reports(number):
    while store.add("reports", 0) < number:
        time.sleep(0.1)

dist.init_process_group("gloo")
store = default_store()
logging.getLogger("fullshard.liveness.watchdog").addFilter(
    lambda record: "the job continues" not in record.getMessage() or store.add("reports", 1)
)
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters())
exec(setting)
for step in range(1, 10):
    if str(step) in steps.split():
        dist.barrier()
        if dist.get_rank() == 1:
            exec(action)
        exec(elsewhere)
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
"""


@dataclass
class Ended:
    code: int
    at: float
    stated: str


# A wait that does not notice lost ranks, as a wait for a GPU would not.
UNAWARE = """
with here.waiting("all_gather", Origin("0", Phase.FORWARD, 1)):
    time.sleep(100)
"""


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., list[Ended]]]:
    """See `run_on`."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE.parent)}
    command = [sys.executable, "-c", FORKS + SCRIPT]
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launcher:
        yield partial(run_on, launcher)
    assert launcher.returncode == 0


def run_on(
    launcher: subprocess.Popen[str], action: str, setting: str = "", *, steps: str = "6", destinations: str = ""
) -> list[Ended]:
    """Return how three ranks ended. At `steps`, rank 1 executes `action`, and then all ranks execute `destinations`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(WORLD)}
    with TemporaryDirectory() as folder:
        print(json.dumps([folder, environ, action, setting, steps, destinations]), file=launcher.stdin, flush=True)
        ranks = [int(pid) for pid in launcher.stdout.readline().split()]
        ends = await_ends(ranks, launcher.stdout)
        return [Ended(*ends[rank], stated=(Path(folder) / str(rank)).read_text()) for rank in range(WORLD)]


def await_ends(ranks: list[int], reported: Iterable[str]) -> dict[int, tuple[int, float]]:
    """Return the exit code and end time of each rank. Kill ranks that do not end.

    Rank 1 may be stopped, so the wait for it is shorter.
    """
    ends: dict[int, tuple[int, float]] = {}
    ended = [Event() for _ in ranks]

    def follow() -> None:
        for line in islice(reported, len(ranks)):
            rank, code = map(int, line.split())
            ends[rank] = code, monotonic()
            ended[rank].set()

    follower = Thread(target=follow)
    follower.start()
    try:
        for rank in (0, 2, 1):
            ended[rank].wait(timeout=10 if rank == 1 else 100)
    finally:
        for rank, pid in enumerate(ranks):
            with suppress(ProcessLookupError):
                if not ended[rank].is_set():
                    os.kill(pid, signal.SIGKILL)
        follower.join()
    return ends


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "code", "how"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -KILLED, "its process ended without a message (killed"),
        pytest.param("raise ValueError('a bad batch')", 1, "it raised ValueError: a bad batch", marks=pytest.mark.slow),
        pytest.param("sys.exit()", 0, "its process ended while other ranks waited for it", marks=pytest.mark.slow),
    ],
    ids=["killed", "raised", "ended"],
)
def test_waiting_ranks_report_the_lost_rank_and_their_collective(run, action, code, how):
    """For the other ranks, an exception on one rank is the loss of that rank."""
    first, lost, last = run(IN_RING + action)
    assert lost.code == code
    for rank, end in ((0, first), (2, last)):
        assert end.code in (1, EXIT_CODE)  # EXIT_CODE if rank 1 exits slowly
        assert f"rank 1 was lost: {how}" in end.stated
        assert f"Rank {rank} was in all_gather of 0 in forward, microbatch 1, step 6" in end.stated
        assert "restart from the last checkpoint" in end.stated
        assert end.at - lost.at < 10  # a guaranteed bound, not a measurement


@pytest.mark.slow
def test_watchdog_ends_ranks_that_do_not_notice_a_lost_rank(run):
    first, lost, last = run(IN_RING + "os.kill(os.getpid(), signal.SIGKILL)", destinations=UNAWARE)
    for rank, end in ((0, first), (2, last)):
        assert end.code == EXIT_CODE
        assert "[fullshard] rank 1 was lost: its process ended without a message" in end.stated
        assert f"Rank {rank} was in all_gather of 0 in forward, microbatch 1, step 5, for" in end.stated
        assert end.at - lost.at < 10


SAVES = """
import tempfile
import fullshard.checkpoint.saving as saving
def save(hangs=False):
    if hangs:
        saving.write_files = lambda *args: time.sleep(100)
    saving.async_save(folder, model=model, step=step).wait()
def start_save(hangs=False):
    if hangs:
        saving.write_files = lambda *args: time.sleep(100)
    return saving.async_save(folder, model=model, step=step)
step = 0
folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(folder)
folder = folder[0]
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
OUTLIVES = """
pids = [0] * dist.get_world_size()
dist.all_gather_object(pids, os.getpid())
def outlive(pid):
    while os.path.exists(f"/proc/{pid}"):
        time.sleep(0.1)
"""


def check_lost(ends: list[Ended], places: dict[int, str]) -> None:
    """Check that rank 1 was killed, and that the other ranks ended soon after and reported the given `places`."""
    first, lost, last = ends
    assert lost.code == -KILLED
    for rank, end in ((0, first), (2, last)):
        assert end.code in (1, EXIT_CODE), end.stated
        assert end.at - lost.at < 30  # and not the 30 minutes of the process group
        assert "rank 1 was lost: its process ended without a message" in end.stated
        assert places.get(rank, "") in end.stated


@pytest.mark.slow
def test_lost_rank_ends_ranks_that_wait_in_async_save(run):
    """They have not yet created the process group of the first save, whose store would wait for 30 minutes."""
    ends = run(IN_RING + KILL, SAVES, destinations="start_save()")
    check_lost(ends, dict.fromkeys((0, 2), "was in async_save"))


@pytest.mark.slow
def test_lost_rank_ends_ranks_with_a_pending_background_save(run):
    """Either the program waits for the save, or it has ended and Python waits for the thread."""
    action = "pending = start_save(hangs=True); time.sleep(1); " + KILL
    others = "pending = start_save()\nif dist.get_rank() == 0:\n    pending.wait()\nelse:\n    sys.exit()"
    first, lost, last = run(action, SAVES + "save()", destinations=others)
    assert lost.code == -KILLED
    assert first.code in (1, EXIT_CODE)
    assert last.code in (0, 1, EXIT_CODE)
    assert max(first.at, last.at) - lost.at < 30  # and not the 30 minutes of the process group


@pytest.mark.slow
def test_lost_rank_ends_ranks_that_wait_in_full_tensor(run):
    whole = "next(model.parameters()).full_tensor() if dist.get_rank() == 0 else outlive(pids[0])"
    first, lost, _ = run(IN_RING + KILL, OUTLIVES, destinations=whole)
    assert lost.code == -KILLED
    assert first.code in (1, EXIT_CODE)


@pytest.mark.slow
def test_full_tensor_called_on_one_rank_only_is_reported_early(run):
    """It is reported like a barrier that other ranks do not reach."""
    alone = "threading.Timer(6.5, lambda: os._exit(9)).start()\n"
    whole = alone + "next(model.parameters()).full_tensor() if dist.get_rank() == 0 else dist.barrier()"
    ends = run("import time; time.sleep(0.1); dist.barrier()", EARLY + "import threading", destinations=whole)
    reports = "".join(end.stated for end in ends)
    assert "and all ranks wait, but not for the same collective: every rank must" in reports
    assert "rank 0: in DTensor.full_tensor, step 5, at " in reports
    assert "in torch.distributed.barrier, step 5, at " in reports


EARLY = "import fullshard.liveness.watchdog as watchdog; watchdog._EARLY_S = 2.2\n"


# Waits for other ranks run in `here.waiting`. The following wait for something else, or their callers record the wait.
WAITS_KNOWN = {
    **dict.fromkeys(("_compat.py", "device/streams.py", "engine/runtime.py", "graphs.py"), "queued work"),
    **dict.fromkeys(
        ("comm/encoded.py", "comm/pairwise.py", "comm/two_level.py", "comm/transport.py", "engine/reduction.py"),
        "Collectives.start",
    ),
    **dict.fromkeys(
        ("engine/residency.py", "fsdp_module.py", "optim/muon.py", "plan/cpu_speeds.py", "state/streaming.py"),
        "Collectives.start",
    ),
    **dict.fromkeys(("disk", "engine/offloaded.py", "engine/activations.py", "engine/gradients_on_disk.py"), "disk"),
    **dict.fromkeys(("engine/shards_on_disk.py", "state/steps_in_chunks.py"), "disk"),
    **dict.fromkeys(
        ("checkpoint/background.py", "checkpoint/importing.py", "checkpoint/loading.py", "checkpoint/safety_copy.py"),
        "PendingSave.wait",
    ),
    **dict.fromkeys(("checkpoint/saving.py", "train/loop.py"), "PendingSave.wait"),
    "liveness": "the watchdog itself",
    "optim/hyperparameters.py": "keys of the store that are set",
    **dict.fromkeys(("plan/background.py", "plan/speeds_of_ranks.py", "planner", "train/what_ifs.py"), "own processes"),
    **dict.fromkeys(("testing", "report/watching.py"), "own processes and threads"),
}
STORE = re.compile(r"(^|[._])store$")


def waits_in(path: Path) -> list[str]:
    """Return the calls that wait outside `here.waiting`."""
    tree = ast.parse(path.read_text())
    reported = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.With) and any("here.waiting" in ast.unparse(item) for item in node.items)
    ]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of, name = ast.unparse(node.func.value), node.func.attr
            waits = (
                not node.args if name in ("wait", "result", "join", "acquire") else name == "get" and STORE.search(of)
            )
            if waits and not any(item.lineno <= node.lineno <= (item.end_lineno or 0) for item in reported):
                found.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {of}.{name}")
    return found


@pytest.mark.slow
def test_every_wait_for_other_ranks_is_known_to_the_watchdog():
    unknown, used = [], set()
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE)
        known = {parent.as_posix() for parent in (place, *place.parents)} & WAITS_KNOWN.keys()
        waits = waits_in(path)
        used |= known if waits else set()
        unknown += [] if known else waits
    assert unknown == [], "wait in `with here.waiting(...)`, or say above what is waited for"
    assert used == WAITS_KNOWN.keys()


def test_only_collectives_compared_between_ranks_are_numbered():
    """Otherwise a rank that waits in a different collective with the same number would appear to have sent its data."""
    numbers = re.compile(r"self\.started \+?= ")
    counting = [path for path in SOURCE.rglob("*.py") if numbers.search(path.read_text())]
    places = {path.relative_to(SOURCE).as_posix() for path in counting}
    assert places == {"comm/collectives.py", "liveness/rank_progress.py"}


def test_no_lock_is_held_while_waiting_for_other_ranks():
    """Otherwise two threads that train two models could deadlock across two ranks."""
    sends = {"waiting", "wait", "neighbors", "all_gather", "all_reduce", "broadcast", "barrier", "gather_objects"}
    sends |= {
        "new_group",
        "exchange",
        "_exchange",
        "_connect",
        "_connect_all",
        "combine",
        "gather_rows",
        "broadcast_object",
    }
    held, locks = [], []
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("Lock", "Condition", "Semaphore")):
                locks.append(place)
            if isinstance(node, ast.FunctionDef) and "cached_property" in map(ast.unparse, node.decorator_list):
                names = {each_node.attr for each_node in ast.walk(node) if isinstance(each_node, ast.Attribute)}
                held += [f"{place}:{node.lineno}: {name}" for name in names & sends]
    assert held == []
    # `visits_frames` holds this lock, without waiting. A dataclass creates the lock of `RankProgress`.
    assert locks == ["_compat.py"]


FAILS = """
import fullshard.liveness.watchdog as it
look = it._Board.known_loss
def fail_once(board):
    it._Board.known_loss = look
    raise ValueError("no such key")
it._Board.known_loss = fail_once
class Broken:
    def query(self):
        raise RuntimeError("CUDA error: unspecified launch failure")
for unit in "012":
    here.queue("all_gather", Origin(unit, Phase.FORWARD, 1), Broken())
"""


@pytest.mark.slow
def test_slow_collective_is_reported_once_and_the_job_continues(run):
    """A failed check is retried. If a GPU cannot be queried, only its work is not watched. Both are reported once."""
    late = "await_reports(1) or time.sleep(2) if step == 4 else await_reports(2)"
    ends = run(late, FAILS + "set_collective_timeout(60, report_after=1)", steps="4 6")
    assert [end.code for end in ends] == [0] * WORLD
    reports = "".join(end.stated for end in ends)
    head = r"for \d+ s, and the job continues; it will be ended after 60 s. Progress of all ranks:"
    for step in (4, 6):
        assert len(re.findall(rf"is in all_gather of 0 in forward, microbatch 1, step {step}, {head}", reports)) == 1
        assert f"ranks 0, 2: in all_gather of 0 in forward, microbatch 1, step {step}, for" in reports
    assert reports.count("rank 1: in no collective (the last was ") == reports.count("the job continues") == 2
    assert reports.count("in await_reports, for ") == 2
    assert reports.count("the watchdog failed and retries: ValueError('no such key'). Until it succeeds") == WORLD
    assert reports.count("the GPU does not report") == WORLD
    blind = "whether all_gather of 2 in forward, microbatch 1 has ended: RuntimeError('CUDA error: unspecified"
    assert reports.count(blind) == WORLD


STORE_GOES = """
import threading
import fullshard.liveness.watchdog as it
it.SILENCE_S = 2
def fail(*args):
    raise dist.DistNetworkError("connection reset")
def go():
    it.PatientStore.check = it.PatientStore.add = it.PatientStore.compare_set = fail
threading.Timer(3, go).start()
"""


@pytest.mark.slow
def test_lost_store_is_reported_once_and_long_waits_are_still_reported(run):
    ends = run("time.sleep(9)", STORE_GOES + "set_collective_timeout(60, report_after=5)")
    assert [end.code for end in ends] == [0] * WORLD
    for end in ends:
        gone = "the store of the process group has not answered for 2 s: DistNetworkError('connection reset"
        assert end.stated.count(gone) == 1
        assert "This rank still watches its own collectives and the previous rank" in end.stated
    assert ends[0].stated.count("and the job continues; it will be ended after 60 s") == 1


@pytest.mark.slow
def test_slow_rank_in_the_first_step_causes_no_report_and_no_timeout(run):
    """Ranks may compile in the first step."""
    ends = run("time.sleep(5)", "set_collective_timeout(2, report_after=1)", steps="1")
    assert [(end.code, end.stated) for end in ends] == [(0, "")] * WORLD


GROUP_TIMEOUT = """
from torch.distributed.distributed_c10d import _set_pg_timeout
_set_pg_timeout(timedelta(seconds=8), dist.group.WORLD)
"""


BUSY = ("time.sleep(100)", "rank 1: in no collective (the last was reduce_scatter of")
STOPPED = ("os.kill(os.getpid(), signal.SIGSTOP)", "rank 1: gives no answer (stopped, or gone)")
SET = ("set_collective_timeout(2)", "2 s", "call fullshard.set_collective_timeout(seconds)")
GROUP = (GROUP_TIMEOUT, "4 s", "give init_process_group a longer timeout")


@pytest.mark.parametrize(
    ("action", "answer", "setting", "limit", "advice"),
    [(*BUSY, *SET), (*STOPPED, *SET), (*BUSY, *GROUP)],
    ids=["busy", "stopped", "by the group's time"],
)
@pytest.mark.slow
def test_collective_timeout_ends_all_ranks_and_reports_their_progress(run, action, answer, setting, limit, advice):
    """The limit is the given time, or a time below the timeout of the process group."""
    ends = run(action, setting)
    waiting = [ends[0], ends[2]]
    assert all(end.code == EXIT_CODE for end in waiting)
    reports = [end.stated for end in waiting if f"longer than the {limit} allowed for a collective" in end.stated]
    assert len(reports) == 1
    assert "ranks 0, 2: in all_gather of 0 in forward, microbatch 1, step 6, for" in reports[0]
    assert answer in reports[0]
    assert advice in reports[0]
    if "sleep" in action:
        assert ends[1].code == EXIT_CODE
        assert "another rank has waited too long for a collective. Rank 1 is in no collective" in ends[1].stated
        assert "at <string>:1 in <module>" in ends[1].stated


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_set_collective_timeout_rejects_invalid_seconds(seconds):
    for call in (partial(set_collective_timeout, seconds), partial(set_collective_timeout, 60, report_after=seconds)):
        with pytest.raises(ConfigError, match=r"expected a positive number of seconds, or None"):
            call()


def test_board_asks_one_question_at_a_time():
    store = PatientStore(dist.HashStore(), 5)
    first, second = _Board(store), _Board(store)
    requested = first.ask(0, "report")
    assert second.ask(1, "end") == requested == second.last_question()
    for rank in (0, 1):
        second.answer(requested, rank, "in step 1", rank, is_waiting=True)
    assert first.has_answers(requested, 2)
    assert not first.has_answers(requested, 3)
    assert first.answers(requested, 3) == [
        "ranks 0, 1: in step 1, for 1 s",
        "rank 2: gives no answer (stopped, or gone)",
    ]
    last = second.ask(1, "end")
    assert last.rank == 1
    assert last.purpose == "end"
    assert first.last_question() == last
    assert not first.has_answers(last, 1)
    store.close()


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([1.0, 5.0]), st.booleans()), min_size=1, max_size=4))
def test_board_is_split_if_all_ranks_wait_long_in_different_collectives(answers):
    store = PatientStore(dist.HashStore(), 5)
    board = _Board(store)
    requested = board.ask(0, "early")
    for rank, (place, seconds, is_waiting) in enumerate(answers):
        board.answer(requested, rank, place, seconds, is_waiting=is_waiting)
    stuck = all(seconds > 2 and is_waiting for _, seconds, is_waiting in answers)
    assert board.is_split(requested, len(answers)) == (stuck and len({place for place, _, _ in answers}) > 1)
    assert not board.is_split(requested, len(answers) + 1)  # a missing answer is not a wait
    store.close()


@pytest.mark.slow
def test_a_barrier_that_other_ranks_do_not_reach_is_reported_early(run):
    """This happens if ranks have different numbers of batches."""
    alone = "import threading; threading.Timer(5.5, lambda: os._exit(9)).start(); dist.barrier()"
    ends = run(alone, "import fullshard.liveness.watchdog as watchdog; watchdog._EARLY_S = 2.2")
    reports = "".join(end.stated for end in ends)
    assert reports.count("and all ranks wait, but not for the same collective: every rank must") == 1
    assert "ranks 0, 2: in all_gather of 0 in forward, microbatch 1, step 6, for" in reports
    assert "rank 1: in torch.distributed.barrier, step 5, at " in reports


GROUPS = {"all": (0, 1, 2), "low": (0, 1), "high": (1, 2), "ends": (0, 2)}
ONE, TWO_IF_AWAITED, TWO = "one message", "a second one while it is waited for", "a second one while any is waited for"


class SimulatedRank:
    """A rank that carries out `program`: start a collective of a group, or wait for the oldest one that it started."""

    def __init__(self, rank: int, program: list[tuple[str, str]]) -> None:
        self.program = [*program, *[("wait", "")] * sum(what != "wait" for what, _ in program)]
        self.groups = {name: GroupProgress(name, ranks) for name, ranks in GROUPS.items() if rank in ranks}
        self.here = RankProgress()
        for group in self.groups.values():
            self.here.register(group)
        self.pending: list[tuple[str, str, int]] = []  # kind, group and number of collectives that it has started
        self.awaited: tuple[str, str, int] | None = None

    def start(self, kind: str, name: str) -> None:
        group = self.groups[name]
        group.started += 1
        if kind != ONE:
            group.unsent[group.started] = kind == TWO
        self.pending.append((kind, name, group.started))

    def moves(self, ranks: list["SimulatedRank"]) -> bool:
        """Execute the next action that this rank can execute, and return whether there was one."""
        if self.awaited is None:
            if not self.program:
                return False
            kind, name = self.program.pop(0)
            if kind != "wait":
                self.start(kind, name)
            elif self.pending:
                self.awaited = self.pending.pop(0)
                _, name, number = self.awaited
                self.here.enter("all_reduce", Origin("", Phase.IDLE), self.groups[name], number)
            return True
        return self.sends(ranks) or self.ends_wait(ranks)

    def sends(self, ranks: list["SimulatedRank"]) -> bool:
        _, name, awaited = self.awaited
        members = [ranks[rank].groups[name] for rank in GROUPS[name]]
        for number, sends_always in self.groups[name].unsent.items():
            if (sends_always or number == awaited) and all(member.started >= number for member in members):
                del self.groups[name].unsent[number]
                return True
        return False

    def ends_wait(self, ranks: list["SimulatedRank"]) -> bool:
        _, name, number = self.awaited
        members = [ranks[rank].groups[name] for rank in GROUPS[name]]
        if any(member.started < number or number in member.unsent for member in members):
            return False
        self.here.leave()
        self.awaited = None
        return True


@st.composite
def programs(draw) -> list[list[tuple[str, str]]]:
    common = draw(st.lists(st.tuples(st.sampled_from([ONE, TWO_IF_AWAITED, TWO, "wait"]), st.sampled_from([*GROUPS]))))
    local = [[(what, name) for what, name in common if rank in GROUPS[name]] for rank in range(3)]
    for program in local:
        if program and draw(st.booleans()):
            del program[draw(st.integers(0, len(program) - 1))]
    return local


@pytest.mark.slow
@settings(max_examples=300)
@given(programs(), st.randoms(use_true_random=False))
def test_is_deadlock_is_true_exactly_if_no_rank_can_ever_continue(each, random):
    """For any order of execution, and any delay of messages."""
    ranks = [SimulatedRank(rank, program) for rank, program in enumerate(each)]
    waits_for_ever = None
    while True:
        waits = [rank.here.wait for rank in ranks]
        if is_deadlock(waits) and waits_for_ever is None:
            waits_for_ever = [rank.awaited for rank in ranks]
        if not [rank for rank in random.sample(ranks, 3) if rank.moves(ranks)]:
            break
    assert waits_for_ever in (None, [rank.awaited for rank in ranks])
    assert (waits_for_ever is not None) == all(rank.awaited is not None for rank in ranks)


EARLY_S, LOOK_S = 0.6, 0.2


def wait_in_a_circle(rank: int, groups: list[dist.ProcessGroup]) -> str:
    """Rank r waits for rank r + 1 in a process group of these two."""
    collectives = collectives_for(groups[rank], torch.device("cpu"))
    with pytest.raises(RankMismatchError, match="they wait for one another in different process groups") as caught:
        collectives.combine(torch.ones(4), dist.ReduceOp.SUM, origin=Origin("circle", Phase.IDLE))
    return str(caught.value)


def train_slowly(rank: int, groups: list[dist.ProcessGroup]) -> list[float]:
    """Train with slow messages on all ranks, then with one slow rank. Both exceed the watchdog's early limit."""
    wait_all, sums = PairwiseCollectives._wait_all, []

    def wait_long(self, works):
        sleep(EARLY_S + 2 * LOOK_S)
        wait_all(self, works)

    for delay_s, waits in ((0, wait_all), (0, wait_long), (EARLY_S + 4 * LOOK_S, wait_all)):
        with patch.object(PairwiseCollectives, "_wait_all", waits):
            sleep(delay_s if rank == 1 else 0)
            for first, group in enumerate(groups):
                if rank in (first, (first + 1) % WORLD):
                    sums.append(torch.ones(4))
                    channel = collectives_for(group, torch.device("cpu")).channel_for("test", 1)
                    channel.all_reduce(sums[-1:], 1, origin=Origin("slow", Phase.IDLE)).wait()
    assert watchdog._watchdog._answered is not None
    return [float(total.sum()) for total in sums]


def wait_and_go_on(shares_memory: bool) -> tuple[list[float], str, str]:
    """Return the sums of slow ranks, the error of ranks in a circle, and the sums after a renewal of their groups."""
    watchdog._EARLY_S, watchdog._LOOK_S = EARLY_S, LOOK_S
    rank = dist.get_rank()
    fullshard.share_memory_between_ranks(shares_memory)
    groups = [dist.new_group(sorted([first, (first + 1) % WORLD])) for first in range(WORLD)]
    watchdog.watch()
    trained = train_slowly(rank, groups)
    error = wait_in_a_circle(rank, groups)
    after = ""
    for first, group in enumerate(groups):
        if rank in (first, (first + 1) % WORLD):
            collectives = collectives_for(group, torch.device("cpu"))
            try:
                collectives.renew()
                total = torch.ones(4)
                collectives.combine(total, dist.ReduceOp.SUM, origin=Origin("again", Phase.IDLE))
                after += str(float(total.sum()))
            except RankMismatchError as refused:
                after += str(refused)
    return trained, error, after


@pytest.mark.slow
@pytest.mark.parametrize("shares_memory", [True, False])
def test_deadlock_across_process_groups_raises_and_slow_ranks_do_not(shares_memory):
    results = run_ranks(WORLD, wait_and_go_on, shares_memory)
    for trained, error, after in results:
        assert trained == [8.0] * 6
        assert error == results[0][1]
        assert after.count("8.0" if shares_memory else "This process group cannot be used again") == 2
    error = results[0][1]
    for rank in range(WORLD):
        following = (rank + 1) % WORLD
        assert f"rank {rank}: in all_reduce of circle in idle, over ranks" in error
        assert f"and waits for rank {following}\n" in error
    assert "Every rank must call the same modules in the same order" in error


class SlowStore:
    """A store that answers only after `let` is set."""

    def __init__(self) -> None:
        self.let = Event()

    def check(self, keys: list[str]) -> bool:
        self.let.wait()
        return keys == ["here"]


def test_patient_store_waits_for_an_unresponsive_store_once():
    slow = SlowStore()
    store = PatientStore(slow, 0.05)
    with pytest.raises(RuntimeError, match=r"did not answer in 0\.05 s"):
        store.check(["here"])
    with pytest.raises(RuntimeError, match="has not answered yet"):
        store.check(["here"])
    slow.let.set()
    while True:
        with suppress(RuntimeError):
            assert store.check(["here"])
            break
    assert not store.check(["elsewhere"])
    store.close()


def ring_of(world: int) -> list[Ring]:
    store = PatientStore(dist.HashStore(), 5)
    rings = [Ring(store, rank, world, silence_s=4) for rank in range(world)]
    while sum(ring.join() for ring in rings) < world:
        pass
    return rings


@pytest.mark.parametrize("world", [2, 3, 5])
def test_ring_distinguishes_a_lost_rank_from_a_farewell(world):
    rings = ring_of(world)
    assert not any(ring.lost_previous(0.01) for ring in rings)
    rings[0].leave(farewell=True)
    assert not rings[1].lost_previous(1)
    assert not rings[1].watches
    rings[1].leave(farewell=False)
    assert world == 2 or rings[2].lost_previous(1)
    for ring in rings:
        ring.leave(farewell=True)


def test_ring_closes_connections_with_a_wrong_token():
    store = PatientStore(dist.HashStore(), 5)
    ring = Ring(store, 0, 2, silence_s=4)
    other = Ring(store, 1, 2, silence_s=4)
    assert not ring.join()
    host, port, _ = store.get("ring/0").decode().split()
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"x" * 32)
        while ring.join() + other.join() < 2:
            pass
        assert stranger.recv(1) == b""
    assert ring.watches
    for each in (ring, other):
        each.leave(farewell=True)


def test_ring_is_not_delayed_by_connections_without_a_valid_token():
    """Any user of the host can connect. Each of 200 such connections once took 5 s, in which no loss was noticed."""
    store = PatientStore(dist.HashStore(), 5)
    ring, other = (Ring(store, rank, 2, silence_s=4) for rank in range(2))
    assert not ring.join()
    host, port, token = store.get("ring/0").decode().split()
    with ExitStack() as strangers:
        for number in range(200):
            stranger = strangers.enter_context(socket.create_connection((host, int(port))))
            stranger.sendall([b"", token[:20].encode(), b"\x00" * 7, b"\xff" * 4096][number % 4])
        began = monotonic()
        while ring.join() + other.join() < 2:
            pass
        assert monotonic() - began < 3
    assert ring.watches
    assert not ring.lost_previous(0.01)
    other.leave(farewell=False)
    assert ring.lost_previous(1)
    ring.leave(farewell=True)


def test_ring_listens_only_on_the_address_needed_by_the_previous_rank():
    """This is the loopback address on one host, and the outgoing address if the host is unknown or a different one."""
    rings = ring_of(3)
    assert [ring._server.getsockname()[0] for ring in rings] == ["127.0.0.1"] * 3
    for ring in rings:
        ring.leave(farewell=True)
    for destinations in ("another host", ""):
        store = PatientStore(dist.HashStore(), 5)
        way = ("127.0.0.9", 9)
        ring = Ring(store, 0, 2, silence_s=4, way=way)
        store.set("ring/host/1", destinations)
        assert not ring.join()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(way)
            assert ring._server.getsockname()[0] == probe.getsockname()[0]
        ring.leave(farewell=True)
        store.close()


def listening_addresses() -> set[str]:
    """Return the IP addresses at which this process listens; see proc_pid_net(5)."""
    found = set()
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in links:
                found.add(words[1].partition(":")[0])
    return found


@pytest.mark.slow
@on_new_ranks(2)
def test_ranks_of_one_host_listen_at_the_loopback_address_only():
    """This includes gloo's addresses, because the ranks of these tests configure gloo for it."""
    model = fullshard.fully_shard(torch.nn.Linear(8, 8))
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
    dist.barrier()
    sleep(2.5)  # until the ring is closed
    addresses = listening_addresses()
    assert addresses == {"0100007F"}


@pytest.mark.slow
@on_new_ranks(2)
def test_forked_process_leaves_the_connections_of_its_parent_open():
    """Closing them in the child once ended jobs with DataLoader workers: the next rank reported the parent as lost."""
    watchdog._LOOK_S = LOOK_S
    watchdog.watch()
    dog = watchdog._watchdog
    while not dog._joined:
        sleep(0.01)
    connection = dog._ring._from_previous
    dist.barrier()
    if dist.get_rank() == 0:
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
    dist.barrier()
    assert not select.select([connection], [], [], 2 * LOOK_S)[0]  # neither data nor the end
    assert dog._ring.watches
    assert dog._board.known_loss() is None
    dist.barrier()


def test_rank_progress_reports_collective_step_and_line():
    me = RankProgress(step=4)
    assert "there has been none" in str(me)
    with me.waiting("all_gather", Origin("layers.3", Phase.FORWARD, 2)):
        assert str(me) == "in all_gather of layers.3 in forward, microbatch 2, step 4, for 0 s"
        assert me.waited_s >= 0
        assert not me.task.in_first_step
    assert me.waited_s == 0
    place = "the last was all_gather of layers.3 in forward, microbatch 2, step 4"
    assert f"in no collective ({place}), at {__file__}:" in me.now()[0]


NESTED: dict[str, Any] = {}
exec("def nested(depth, begin, wait): return nested(depth - 1, begin, wait) if depth else (begin(), wait())", NESTED)


visits_pause_collections = pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="later versions collect garbage only between instructions"
)


@visits_pause_collections
@pytest.mark.parametrize(
    ("visit", "visitor"),
    [
        (_line_of, "_line_of"),
        (lambda thread: _torch_call_of(thread, 0.0), "_torch_call_of"),
        (lambda thread: in_backward_of_inputs(), "_is_within"),
        (lambda thread: in_pass_for_inputs(), "_takes_inputs"),
    ],
)
def test_garbage_collection_pauses_while_visiting_frames_of_a_thread(visit, visitor):
    """A collection would let the other thread run and return from these frames. Their memory would then be invalid."""
    importlib.import_module("torch.distributed.pipelining._backward")
    begun, ended, collecting = allocate_lock(), allocate_lock(), []
    begun.acquire()
    ended.acquire()

    def note(phase: str, info: object) -> None:
        collecting.append(sys._getframe(1).f_code.co_name)

    def visit_and_release() -> None:
        begun.acquire()
        try:
            visit(main_thread().ident)
        finally:
            ended.release()

    thresholds = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(10)
    try:
        Thread(target=visit_and_release).start()
        NESTED["nested"](100, begun.release, ended.acquire)
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(note)
    assert collecting
    assert visitor not in collecting
    assert gc.isenabled()


@visits_pause_collections
def test_process_forked_during_a_frame_visit_collects_garbage():
    begun = Event()

    @visits_frames
    def visit() -> None:
        begun.set()
        sleep(0.2)

    visiting = Thread(target=visit)
    visiting.start()
    begun.wait()
    child = os.fork()
    if not child:
        os._exit(0 if gc.isenabled() else 1)
    visiting.join()
    assert os.waitpid(child, 0)[1] == 0


def test_first_step_ends_at_the_second_step_or_if_collectives_repeat():
    me = RankProgress()

    def in_first_step(unit: str, phase: Phase = Phase.FORWARD) -> bool:
        with me.waiting("all_gather", Origin(unit, phase, 0)):
            return me.task.in_first_step

    assert [in_first_step(unit) for unit in ("0", "1", "0", "1")] == [True, True, False, False]
    assert in_first_step("0", Phase.BACKWARD)
    me.step = 1
    assert in_first_step("0")
    assert in_first_step("0")
    me.step = 2
    assert not in_first_step("2")


class End:
    """A fake event of GPU work. The test sets `reached` when the work ends."""

    def __init__(self, *, reached: bool = False) -> None:
        self.reached = reached

    def query(self) -> bool:
        return self.reached


def queue(me: RankProgress, *ends: End | None) -> None:
    for end in ends:
        me.queue("all_gather", Origin("0", Phase.FORWARD, 1), end)


def test_rank_progress_drops_finished_gpu_work_without_being_queried():
    """With a world size of 1, no watchdog queries the progress."""
    me = RankProgress()
    ends = [End(reached=True) for _ in range(100)]
    kept = [weakref.ref(end) for end in ends]
    while ends:
        queue(me, ends.pop())
    assert sum(end() is not None for end in kept) == 2  # the last in the queue, and the last that has ended
    queue(me, None)  # a queued call of unknown state
    assert me.task is None


def test_concurrent_queries_of_rank_progress_keep_pending_work():
    me = RankProgress()

    class Interrupting(End):
        """Another thread queries the progress before this query returns."""

        def query(self) -> bool:
            if not self.reached:
                self.reached = True
                other = Thread(target=lambda: me.task)
                other.start()
                other.join()
            return True

    last = End()
    queue(me, Interrupting(), last)
    assert me.task is not None
    assert me.task.ended is last


def test_wait_time_of_a_queued_collective_starts_after_its_predecessor(monkeypatch):
    """Otherwise queued collectives would look stuck if the host runs far ahead of the GPU."""
    now = 0.0
    monkeypatch.setattr("fullshard.liveness.rank_progress.monotonic", lambda: now)
    me, ends = RankProgress(), [End() for _ in range(4)]
    queue(me, *ends[:3])
    now = 100.0
    assert me.waited_s == 100
    ends[0].reached = True
    assert me.waited_s == 0
    now = 103.0
    assert me.waited_s == 3
    assert me.task is me.task  # one collective, reported once
    ends[1].reached = ends[2].reached = True
    queue(me)
    assert me.task is None
    now = 110.0
    queue(me, ends[3])
    now = 115.0
    assert me.waited_s == 5


@pytest.mark.parametrize("silence_s", [4, 30])
def test_tcp_keepalive_probes_a_silent_host_for_the_given_time(silence_s):
    """Includes a host that becomes silent just before the first request."""
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as connection:
        _find_silence(connection, silence_s)
        options = (socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        interval_s, probes = (connection.getsockopt(socket.IPPROTO_TCP, option) for option in options)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert interval_s * probes == silence_s
    assert probes > 1  # one lost probe has no effect


def test_a_board_reports_for_how_long_its_store_has_been_silent():
    class Idle:
        is_stored = True

        def check(self, keys: list[str]) -> bool:
            if self.is_stored:
                raise dist.DistNetworkError("connection reset")
            return False

    stored = Idle()
    store = PatientStore(stored, 5)
    board = _Board(store)
    assert board.silent_s == 0
    assert board.known_loss() is None
    assert board.last_question() is None
    assert board.silent_s > 0
    assert "connection reset" in str(board.error)
    stored.is_stored = False
    assert board.known_loss() is None
    assert board.silent_s == 0
    store.close()


def test_await_account_does_not_wait_for_a_closed_store():
    """The rank that collects the report has ended, too, and waiting ranks fail in their collectives first."""
    requested = 0

    class Gone:
        def check(self, keys: list[str]) -> bool:
            nonlocal requested
            requested += 1
            raise dist.DistNetworkError("connection reset")

    _Board(PatientStore(Gone(), 5)).await_account(_Question(1, rank=0, purpose="end"))
    assert requested == 1
