"""Hosts that are lost and restored: the run continues on the others, and every step has the same results."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hosts import Host, torchrun, wait_for
from training_runs import metrics, train_here, wait_for_step

from fullshard.checkpoint.keeper import MEMORY
from fullshard.errors import ConfigError
from fullshard.testing import run_ranks
from fullshard.train import ranks
from fullshard.train.check import check
from fullshard.train.options import parse_settings
from fullshard.train.ranks import check_restarts

OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
TRAIN = [
    *(
        "train",
        "--no-predict",
        "--text",
        __file__,
        "--size",
        "nano",
        "--seq",
        "128",
        "--batch",
        "6",
        "--log-every",
        "1",
    ),
    *("--validate-every", "0", "--validate-bytes", "300", "--sample-every", "0", "--sample-bytes", "8"),
    # The learning rate is constant after the warm-up, so that shorter runs have the losses of longer ones.
    *("--lr", "0.001", "--min-lr", "1", "--warmup", "10", "--resume", "auto"),
]
STEPS = 300  # more steps than one host takes while another one starts
TO_DISK = ("--checkpoint-every", "5")
TO_MEMORY = ("--checkpoint-every", "100000", "--safety-copy-every", "5")
Launcher = subprocess.Popen[Any]


def options(steps: int, out: Path) -> list[str]:
    return [*TRAIN, "--steps", str(steps), "--out", str(out)]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of an undisturbed run on two ranks. It saves no checkpoints, which does not change losses."""
    out = tmp_path_factory.mktemp("calm") / "out"
    assert run_ranks(2, train_here, *options(STEPS, out)[1:]) == [0, 0]
    return losses(out)


def start(hosts: list[Host], steps: int, out: Path, first: Host, *more: str, **options_: Any) -> list[Launcher]:
    """Run the same command on every host, one rank each. It continues with one or two hosts."""
    with (out.parent / "said").open("a") as stated:
        return torchrun(
            hosts,
            *("--max-restarts=9", "-m", "fullshard.cli", *options(steps, out), *(more or TO_DISK)),
            ranks=1,
            nodes="1:2",
            rendezvous="last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=8",
            first=first,
            stdout=subprocess.DEVNULL,
            stderr=stated,
            **{"environ": OWN_STORE, **options_},
        )


def kill_ranks(launcher: Launcher) -> None:
    """Kill the ranks of a launcher, but not the launcher."""
    for pid in ranks_of(launcher.pid):
        os.kill(pid, signal.SIGKILL)


def ranks_of(launcher: int) -> list[int]:
    """Return the rank processes that a launcher has started, directly or through a process that enters a host."""
    below = [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]
    is_rank = {pid: b"RANK=" in Path(f"/proc/{pid}/environ").read_bytes() for pid in below}
    return [rank for pid in below for rank in ([pid] if is_rank[pid] else ranks_of(pid))]


def resumed(out: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(out) if line["kind"] == "resume"]


def losses(out: Path) -> dict[int, float]:
    found = [(line["step"], line["loss"]) for line in metrics(out) if line["kind"] == "step"]
    assert len(found) == len(dict(found)), "a step is reported once"
    return dict(found)


def wait_for_resume(out: Path, world: int) -> None:
    deadline = time.monotonic() + 100
    while not (resumed(out) and resumed(out)[-1]["world"] == world):
        assert time.monotonic() < deadline, metrics(out)[-1]
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_run_continues_after_killed_ranks_lost_host_and_new_host(hosts, calm, tmp_path):
    """Killed ranks do not change results. Then one host loses its power, and starts again later."""
    out = tmp_path / "out"
    first, second = hosts
    launched = start([first, second], STEPS, out, first)
    wait_for_step(out, 12)
    kill_ranks(launched[1])
    wait_for_resume(out, 2)
    wait_for_step(out, 25)
    second.stop_all()
    wait_for_resume(out, 1)
    alone = resumed(out)[-1]["step"]
    wait_for_step(out, alone + 10)
    launched[1].wait()
    [launched[1]] = start([second], STEPS, out, first)
    wait_for_resume(out, 2)
    assert wait_for(launched, 300) == [0, 0], (tmp_path / "said").read_text()
    assert [line["world"] for line in resumed(out)] == [2, 1, 2]
    found = losses(out)
    assert found.keys() == calm.keys()
    assert {step: loss for step, loss in found.items() if step <= alone} == {
        step: loss for step, loss in calm.items() if step <= alone
    }
    assert found == pytest.approx(calm, rel=1e-4)


@dataclass(frozen=True)
class Here:
    """This machine in place of one of several hosts: copies in memory need the system's own /proc."""

    address: str = "127.0.0.1"

    def start(self, *command: str, **options_: Any) -> Launcher:
        return subprocess.Popen(command, **options_)


def copies_of(launchers: list[Launcher]) -> list[Path]:
    """Return the folders of these launchers in the memory of this machine."""
    pids = [str(launcher.pid) for launcher in launchers]
    return [path.parent for path in MEMORY.glob("fullshard-*/kept") if path.read_text().split()[2] in pids]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_run_resumes_from_memory_copies_after_lost_host(calm, tmp_path):
    """No checkpoint is written before the end. Only the steps since the last copy are lost."""
    steps = 60
    out = tmp_path / "out"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    first, second = Here(), Here()
    here = {"environ": {**OWN_STORE, "GLOO_SOCKET_IFNAME": "lo"}, "port": port}
    launchers = start([first, second], steps, out, first, *TO_MEMORY, **here)
    wait_for_step(out, 20)
    assert len(copies_of(launchers)) == 2
    doomed = [*ranks_of(launchers[1].pid), launchers[1].pid]
    for pid in doomed:
        os.kill(pid, signal.SIGKILL)
    launchers[1].wait()
    wait_for_resume(out, 1)
    (line,) = resumed(out)
    assert Path(line["from"]).is_relative_to(MEMORY)
    assert line["step"] >= 15
    assert line["step"] % 5 == 0
    assert wait_for(launchers[:1], 300) == [0], (tmp_path / "said").read_text()
    while copies_of(launchers):  # pytest-timeout ends an endless loop
        time.sleep(0.05)
    found = losses(out)
    assert found == pytest.approx({step: calm[step] for step in range(1, steps + 1)}, rel=1e-4)
    before = range(1, line["step"] + 1)
    assert [found[step] for step in before] == [calm[step] for step in before]


def test_unusable_safety_copies_are_rejected(tmp_path):
    with pytest.raises(ConfigError, match="does not restart lost ranks"):
        check_restarts(5, environ={})
    with pytest.raises(ConfigError, match="but this system lacks one of them"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "keeps_folders", lambda launcher: False)
        check_restarts(5, environ={"TORCHELASTIC_MAX_RESTARTS": "3"})
    with pytest.raises(ConfigError, match="Add that, or leave --safety-copy-every out"):
        check(parse_settings(["--safety-copy-every", "5"]), 2)


def test_launcher_that_cannot_restart_ranks_is_rejected():
    shared = {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with pytest.raises(ConfigError, match=r"--max-restarts 3: .* Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        check_restarts(environ=shared)
    check_restarts(environ={**shared, "TORCHELASTIC_MAX_RESTARTS": "0"})
    check_restarts(environ={**shared, "TORCHELASTIC_USE_AGENT_STORE": "False"})
