"""The Slurm recipe under real Slurm, on two nodes of this machine: a job is stopped, loses a node, is requeued."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hosts import SOURCE, NoHosts, two_hosts
from pages import ROOT
from slurm import Slurm, slurm_on
from test_elastic import TRAIN, losses, options, resumed
from training_runs import wait_for_step

RECIPE = ROOT / "docs" / "launch" / "slurm.sh"
STEPS = 60
pytestmark = [pytest.mark.clusters, pytest.mark.slow, pytest.mark.timeout(600)]

TORCHRUN = """#!/bin/bash
# Started by the recipe, on nodes of one rank each without a GPU. The last one of repeated options counts.
exec {python} -m torch.distributed.run --rdzv-conf last_call_timeout=2,keep_alive_interval=1 "${{@/=8/=1}}" {small}
"""
SLEEP = """#!/bin/bash
exec /bin/sleep 1
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with a torchrun that starts a small run, and a sleep that lasts one second."""
    folder = tmp_path / "programs"
    folder.mkdir()
    small = [*TRAIN[1:], "--accumulate", "1", "--steps", str(STEPS), "--checkpoint-every", "25"]
    scripts = {"torchrun": TORCHRUN.format(python=sys.executable, small=shlex.join(small)), "sleep": SLEEP}
    for name, script in scripts.items():
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    return folder


@contextmanager
def cluster(tmp_path: Path) -> Iterator[Slurm]:
    """Two nodes under Slurm, where the system allows it."""
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons change users, which only root may let them")
    folder = tmp_path / "slurm"
    folder.mkdir()
    try:
        with two_hosts(own_users=False) as hosts, slurm_on(hosts, folder) as made:
            yield made
    except NoHosts as reason:
        pytest.skip(str(reason))


def submit(slurm: Slurm, out: Path, programs: Path) -> int:
    """Return the number of the recipe's job."""
    path = f"{programs}:{os.environ['PATH']}"
    variables = {"OUT": str(out), "PATH": path, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    stated = f"--output={out.parent}/said"
    return int(slurm.run("sbatch", "--parsable", "--nodes=2", stated, str(RECIPE), **variables))


def wait_for_resumes(out: Path, count: int) -> None:
    """Wait until the run has resumed `count` times."""
    deadline = time.monotonic() + 100
    while (stated := (out.parent / "said").read_text()).count("Resuming after step") < count:
        assert time.monotonic() < deadline, stated[-4000:]
        time.sleep(0.1)


def wait_until_done(slurm: Slurm, job: int) -> None:
    """Wait until the job has completed with exit code 0."""
    deadline = time.monotonic() + 100
    while (state := slurm.job(job))["JobState"] != "COMPLETED":
        assert time.monotonic() < deadline, state
        time.sleep(0.2)
    assert state["ExitCode"] == "0:0"


def test_slurm_job_is_requeued_after_stop_and_after_lost_first_node(programs, tmp_path):
    """The job resumes from the saved state, and its losses equal those of an undisturbed run."""
    out, calm = tmp_path / "out", tmp_path / "calm"
    with cluster(tmp_path) as slurm:
        job = submit(slurm, out, programs)
        reached = wait_for_step(out, 10)
        slurm.run("scancel", "--batch", "--signal=TERM", str(job))  # as Slurm does five minutes before the time is up
        wait_for_resumes(out, 1)
        saved = resumed(out)[0]["step"]
        assert saved > reached
        wait_for_step(out, saved + 10)
        slurm.hosts[0].stop_all()  # and the job's script with it: Slurm keeps what is left of the job
        while slurm.job(job)["NodeList"] == "a[1-2]":  # pytest-timeout ends an endless loop
            time.sleep(0.2)
        slurm.start_daemon(0, "slurmd")
        wait_until_done(slurm, job)
        assert slurm.job(job)["Restarts"] == "2"
    command = [sys.executable, "-m", "fullshard.cli", *options(STEPS, calm), "--ranks", "2"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert resumed(out)[-1]["world"] == 2
    assert losses(out) == losses(calm)
