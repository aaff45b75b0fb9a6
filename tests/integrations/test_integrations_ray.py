"""Ray Train: after lost workers and nodes or a changed worker count, losses match those of an undisturbed run."""

import ast
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from training_runs import train_here

from fullshard.testing import run_ranks
from fullshard.train.run_folder import lines_of

ray_runs = pytest.importorskip("ray_runs", reason="ray is not installed", exc_type=ImportError)
EXAMPLES = Path(__file__).parents[2] / "examples" / "ray"
pytestmark = [pytest.mark.clusters, pytest.mark.slow, pytest.mark.timeout(600)]
# Ray waits 15 s until a node counts as lost, and 60 s for a worker on a node that it does not know to be lost.
# A busy node still has 10 s to answer. Workers have a niceness of 15, so they would wait for all other tests.
QUICK = {
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """One cluster for all commands: a head without cores, and two nodes with one each."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**QUICK, "OMP_NUM_THREADS": "1"}.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)]))
        made = ray_runs.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        for _ in range(2):
            made.add_node(num_cpus=1)
        patch.setenv("RAY_ADDRESS", made.address)
        yield made
        made.shutdown()


def output_of(*command: str) -> str:
    """Return the output of a command that uses the cluster."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def undisturbed() -> list[float]:
    """Return the losses of two ranks that run without Ray."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, optimizer = ray_runs.make_model()
    return [ray_runs.train_step(model, optimizer, step, rank, world) for step in range(ray_runs.STEPS)]


@pytest.fixture(scope="module")
def expected():
    return run_ranks(2, undisturbed)[0]


@pytest.fixture(scope="module")
def disturbed(cluster, tmp_path_factory):
    """Return the lines of each run, on a cluster that loses a worker and nodes, and gets new ones."""
    folder = tmp_path_factory.mktemp("ray")
    with ThreadPoolExecutor() as pool:
        runs = pool.submit(output_of, ray_runs.__file__, str(folder))
        ray_runs.disturb(cluster, folder)
        runs.result()
    return {name: ray_runs.lines_of(folder / f"{name}.jsonl") for name in ("fixed", "elastic")}


def test_losses_are_bitwise_equal_after_a_lost_worker_and_a_lost_node(disturbed, expected):
    steps = [line["step"] for line in disturbed["fixed"]]
    assert sorted(set(steps)) == list(range(ray_runs.STEPS))
    assert {line["world"] for line in disturbed["fixed"]} == {2}
    assert all(line["loss"] == expected[line["step"]] for line in disturbed["fixed"])


def test_losses_match_after_the_worker_count_changes(disturbed, expected):
    worlds = [line["world"] for line in disturbed["elastic"]]
    changes = [world for place, world in enumerate(worlds) if place == 0 or worlds[place - 1] != world]
    assert changes == [2, 1, 2]
    assert {line["step"] for line in disturbed["elastic"]} == set(range(ray_runs.STEPS))
    for line in disturbed["elastic"]:
        assert line["loss"] == pytest.approx(expected[line["step"]], rel=1e-5)


def test_ray_example_trains_on_ray_data(tmp_path):
    stated = output_of(str(EXAMPLES / "digits.py"), "--workers", "2", "--epochs", "2", "--storage", str(tmp_path))
    reported = ast.literal_eval(stated.strip().splitlines()[-1])
    assert reported["epoch"] == 1
    assert reported["loss"] < 1.5


def test_tune_finds_the_better_learning_rate(tmp_path):
    """Both trials run at the same time, on the two nodes."""
    arguments = ("--workers", "1", "--epochs", "1", "--rates", "1e-6", "3e-3", "--at-once", "2")
    stated = output_of(str(EXAMPLES / "learning_rates.py"), *arguments, "--storage", str(tmp_path))
    best = ast.literal_eval(stated.strip().splitlines()[-1])
    assert best["lr"] == 3e-3
    assert best["loss"] < 2


def test_train_command_on_ray_matches_losses_of_local_ranks(tmp_path):
    options = ("--size", "nano", "--steps", "4", "--log-every", "1", "--sample-bytes", "8", "--validate-bytes", "4096")
    on_ray = ("--ranks", "2", "--no-predict", "--on", "ray", "--checkpoint-every", "2")
    output_of("-m", "fullshard.cli", "train", *options, *on_ray, "--out", str(tmp_path / "ray"))
    assert run_ranks(2, train_here, *options, "--out", str(tmp_path / "here")) == [0, 0]
    losses = [
        [line["loss"] for line in lines_of(tmp_path / name) if line["kind"] == "step"] for name in ("ray", "here")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4
