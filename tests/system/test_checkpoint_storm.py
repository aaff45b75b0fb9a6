"""A run that is killed repeatedly, at any time, on any rank, ends with the weights of an undisturbed run."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_models import Chain, Layer, chain, inputs, wholes
from torch import nn
from training_runs import metrics, train_here, wait_for_step, weights

from fullshard import fully_shard
from fullshard.checkpoint import async_save, latest, load, save
from fullshard.testing import RanksFailed, assert_same, run_ranks


@contextmanager
def killed_after(seconds: float) -> Iterator[None]:
    """Let another process kill this one with SIGKILL after `seconds`, unless it finishes first."""
    killer = subprocess.Popen(["sh", "-c", f"sleep {seconds:.3f}; kill -KILL {os.getpid()}"])
    yield
    killer.kill()
    killer.wait()


def run(folder: Path, steps: int, doomed: int | None, after_s: float) -> dict[str, Any]:
    """Resume from `folder` and train to the last step. On rank `doomed`, kill the process after `after_s` seconds."""
    with killed_after(after_s) if dist.get_rank() == doomed else nullcontext():
        return go_on(folder, steps)


def go_on(folder: Path, steps: int) -> dict[str, Any]:
    """Save after each step, synchronously or in the background."""
    torch.manual_seed(dist.get_rank())
    model = chain(fully_shard, Chain([nn.Sequential(Layer(), nn.Dropout(0.1)) for _ in range(2)]))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    visited = [latest(folder) is not None]
    dist.broadcast_object_list(visited, src=0)
    done = load(folder, model=model, optimizer=optimizer).step if visited[0] else 0
    for step in range(done + 1, steps + 1):
        model(inputs(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        saving = save if step % 3 == 0 else async_save
        pending = saving(folder, model=model, optimizer=optimizer, step=step, keep=2)
        if step == steps and saving is async_save:
            pending.wait()
    return {**wholes(model), "drawn": torch.rand(1)}


def storm(folder: Path, steps: int, kills: int, within_s: float, calm: list[dict[str, Any]]) -> None:
    """Kill a run repeatedly. If it ends before, compare it with the undisturbed run and start again."""
    draw = random.Random(0)
    killed = 0
    while killed <= kills:
        doomed = draw.randrange(2) if killed < kills else None
        try:
            ended = run_ranks(2, run, folder, steps, doomed, draw.uniform(0.05, within_s), timeout=600)
        except RanksFailed as failed:
            assert "SIGKILL" in str(failed), failed
            killed += 1
        else:
            assert_same(ended, calm)
            assert sorted(path.name for path in folder.iterdir()) == [f"step-{n:09d}" for n in (steps - 1, steps)]
            shutil.rmtree(folder)
            killed += doomed is None


def check(folder: Path, steps: int, kills: int, within_s: float | None = None) -> None:
    """Kill runs within `within_s` seconds of their start; if None, within the duration of a whole run."""
    run_ranks(2, dist.get_rank)  # start the server that ranks are forked from
    start = time.monotonic()
    calm = run_ranks(2, run, folder / "calm", steps, None, 0.0, timeout=600)
    storm(folder / "storm", steps, kills, within_s or time.monotonic() - start, calm)


@pytest.mark.slow
def test_repeated_kills_do_not_change_resumed_weights(tmp_path):
    check(tmp_path, steps=12, kills=4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_kills_in_one_run_do_not_change_resumed_weights(tmp_path):
    """All kills hit one run, which has too many steps to finish between them."""
    check(tmp_path, steps=80, kills=10, within_s=1.0)


# -- the command ------------------------------------------------------------------------------------------------------

SIZES = ("--text", __file__, "--size", "nano", "--seq", "16", "--batch", "4", "--steps", "120", "--log-every", "1")
ENDING = ("--validate-bytes", "300", "--sample-bytes", "8")


def command(out: Path) -> subprocess.Popen[str]:
    argv = ["train", "--no-predict", "--ranks", "2", *SIZES, *ENDING, "--out", str(out)]
    return subprocess.Popen(
        [sys.executable, "-m", "fullshard.cli", *argv, "--checkpoint-every", "10", "--resume", "auto"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ranks_of(launcher: subprocess.Popen[str]) -> list[int]:
    """Return the processes of a launcher's ranks."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    return [int(pid) for pid in children.read_text().split()]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_train_command_resumes_after_each_killed_rank(tmp_path):
    """Kill the first and the last rank, each after a checkpoint to resume from, then one rank during startup."""
    draw = random.Random(1)
    reached = 0
    for doomed in (0, -1):
        training = command(tmp_path / "storm")
        reached = wait_for_step(tmp_path / "storm", reached + draw.randrange(15, 30))
        time.sleep(draw.uniform(0.0, 0.1))
        os.kill(ranks_of(training)[doomed], signal.SIGKILL)
        stated, _ = training.communicate(timeout=300)
        assert training.returncode != 0, stated
    training = command(tmp_path / "storm")
    while not ranks_of(training):  # pytest-timeout ends an endless loop
        time.sleep(0.01)
    time.sleep(draw.uniform(0.0, 3.0))  # while it starts or resumes
    os.kill(ranks_of(training)[0], signal.SIGKILL)
    stated, _ = training.communicate(timeout=300)
    assert training.returncode != 0, stated
    last = command(tmp_path / "storm")
    stated, _ = last.communicate()
    assert last.returncode == 0, stated
    assert [line["kind"] for line in metrics(tmp_path / "storm")].count("resume") in (2, 3)
    assert run_ranks(2, train_here, *SIZES, *ENDING, "--out", str(tmp_path / "calm")) == [0, 0]
    assert_same(weights(tmp_path / "storm"), weights(tmp_path / "calm"))
