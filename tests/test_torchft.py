"""Replicas of torchft: killed ones come back, nobody diverges, losses are those of the same batches undisturbed."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from small_models import adamw, chain
from torch import nn

from fullshard import ConfigError, StateError, fully_shard
from fullshard.testing import run_ranks

torchft = pytest.importorskip("torchft", reason="torchft is not installed", exc_type=ImportError)
ROOT = Path(__file__).parent.parent
clusters = [pytest.mark.clusters, pytest.mark.slow, pytest.mark.timeout(600)]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}


def with_kills(*options: str) -> dict[str, Any]:
    """What the benchmark says of a run."""
    done = subprocess.run(
        [sys.executable, "benchmarks/replica_kills.py", *options],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("replicas", [pytest.param(it, marks=clusters) for it in (2, 3)])
def test_killed_replicas_come_back_and_nobody_diverges(replicas):
    found = with_kills("--kills", "3", "--replicas", str(replicas), "--seed", str(replicas))
    assert found["replicas_have_the_same_weights"]
    assert found["most_abandoned_by_a_survivor"] <= 1
    assert set(found["steps_by_participants"]) >= {str(replicas - 1), str(replicas)}
    if replicas == 2:  # of two terms, a sum has no order
        assert found["losses_of_the_same_bits"] == found["losses_compared"]
        assert found["weights_have_the_bits_of_the_replay"]
    assert found["largest_relative_difference"] < 1e-4


def free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


@pytest.mark.clusters
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_example_learns(tmp_path):
    """By the command lines of its header, with ports that are free."""
    path = ROOT / "examples" / "torchft" / "digits.py"
    command, *launches = re.findall(r"^    ((?:torchft_lighthouse|torchrun) .*?)(?: &)?$", path.read_text(), re.M)
    ports = free_ports(3)
    around = environment(TORCHFT_LIGHTHOUSE=f"http://localhost:{ports[0]}")
    around["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{around['PATH']}"
    lighthouse = subprocess.Popen(
        command.replace("29510", str(ports[0])), shell=True, env=around, stderr=subprocess.DEVNULL, process_group=0
    )
    try:
        replicas = [
            subprocess.Popen(
                re.sub(r"--master-port \d+", f"--master-port {port}", launch) + " --steps 60",
                shell=True,
                cwd=ROOT,
                env=around,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for launch, port in zip(launches, ports[1:], strict=True)
        ]
        for replica in replicas:
            said, _ = replica.communicate(timeout=300)
            assert replica.returncode == 0, said[-4000:]
            losses = [float(loss) for loss in re.findall(r"step 60 of 2 replicas: loss ([\d.]+)", said)]
            assert len(losses) == 1, said[-4000:]
            assert losses[0] < 0.7
    finally:
        os.killpg(lighthouse.pid, 9)
        lighthouse.wait()


def made_wrongly() -> None:
    from fullshard.integrations.torchft import Replicas

    plain = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"Replicas\(Linear\) is not sharded.* Call fully_shard"):
        Replicas(plain, adamw(plain), name="a", lighthouse="http://localhost:1")
    model = chain(fully_shard)
    with pytest.raises(ConfigError, match=r"no lighthouse is named. Start one by torchft_lighthouse"):
        Replicas(model, adamw(model), name="a")
    nobody = f"http://localhost:{free_ports(1)[0]}"
    with pytest.raises(StateError, match=f"{nobody}.*replica 'a' could not join.* Is the lighthouse there"):
        Replicas(model, adamw(model), name="a", lighthouse=nobody, timeout_s=1)
    dist.destroy_process_group()
    with pytest.raises(StateError, match="without a process group"):
        Replicas(model, adamw(model), name="a", lighthouse=nobody)


def test_mistakes_are_told_and_nothing_hangs():
    run_ranks(1, made_wrongly)
