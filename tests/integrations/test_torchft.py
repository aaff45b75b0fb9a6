"""torchft: killed replicas recover, no replica diverges, and losses equal those of an undisturbed run."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch.distributed as dist
from shared_ranks import on_new_ranks
from small_models import adamw, chain, inputs, take_step, wholes
from torch import Tensor, nn

from benchmarks.replica_kills import run_command
from fullshard import ConfigError, StateError, fully_shard
from fullshard.testing import assert_same, run_ranks

torchft = pytest.importorskip("torchft", reason="torchft is not installed", exc_type=ImportError)
ROOT = Path(__file__).parents[2]
clusters = [pytest.mark.clusters, pytest.mark.slow, pytest.mark.timeout(600)]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}


@pytest.mark.parametrize("replicas", [pytest.param(item, marks=clusters) for item in (2, 3)])
def test_killed_replicas_recover_and_no_replica_diverges(replicas, capsys):
    """One replica is killed as a whole, and one by the loss of a rank."""
    run_ranks(1, dist.get_rank)  # starts the process that ranks are forked from
    run_command(["--kills", "2", "--replicas", str(replicas), "--seed", str(replicas), "--fork", "--gap", "1"])
    *kills, found = map(json.loads, capsys.readouterr().out.splitlines())
    assert {len(each["ranks"]) for each in kills} == {1, 2}
    assert found["replicas_have_the_same_weights"]
    assert found["most_abandoned_by_a_survivor"] <= 1
    assert set(found["steps_by_participants"]) >= {str(replicas - 1), str(replicas)}
    assert found["losses_of_the_same_bits"] == found["losses_compared"]
    assert found["weights_have_the_bits_of_the_replay"]


def free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def start_lighthouse() -> tuple[subprocess.Popen[bytes], str]:
    port = free_ports(1)[0]
    program = str(Path(sys.executable).with_name("torchft_lighthouse"))
    options = ("--min_replicas", "1", "--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "1000")
    command = [program, "--bind", f"[::]:{port}", *options]
    started = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while started.poll() is None:
        with suppress(OSError), socket.create_connection(("localhost", port)):
            break
        time.sleep(0.1)
    return started, f"http://localhost:{port}"


@pytest.mark.clusters
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_torchft_example_recovers_from_a_killed_rank(tmp_path):
    """Run the command lines in the example's header, and check the described results."""
    stated = (ROOT / "examples" / "torchft" / "digits.py").read_text()
    launches = re.findall(r"^    (torchrun .*?)(?: &)?$", stated, re.M)
    lighthouse, address = start_lighthouse()
    around = environment(TORCHFT_LIGHTHOUSE=address, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    around["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{around['PATH']}"
    logs = [tmp_path / "a", tmp_path / "b"]
    try:
        replicas = []
        for launch, log in zip(launches, logs, strict=True):
            with log.open("wb") as file:
                command = [*shlex.split(launch), "--steps", "2000"]
                replicas.append(subprocess.Popen(command, cwd=ROOT, env=around, stdout=file, stderr=file))
        wait_for_line(logs[1], r"of 2 replicas")
        written = logs[0].stat().st_size  # the first replica may have started alone
        psutil.Process(replicas[1].pid).children()[1].kill()
        wait_for_line(logs[0], r"of 1 replicas", after=written)
        for replica, log in zip(replicas, logs, strict=True):
            assert replica.wait(300) == 0, log.read_text()[-4000:]
            losses = re.findall(r"step 2000 of 2 replicas: loss ([\d.]+)", log.read_text())
            assert [float(loss) < 0.1 for loss in losses] == [True], log.read_text()[-4000:]
    finally:
        for process in (*replicas, lighthouse):
            process.kill()
            process.wait()


def wait_for_line(log: Path, pattern: str, *, after: int = 0) -> None:
    """Wait until `log` has a line with `pattern` after its first `after` bytes."""
    until = time.monotonic() + 200
    while not re.search(pattern, log.read_bytes()[after:].decode()):
        assert time.monotonic() < until, log.read_text()[-4000:]
        time.sleep(0.1)


@on_new_ranks(1)
def test_replicas_reject_invalid_setup_without_hanging():
    from fullshard.integrations.torchft import Replicas

    plain = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"Replicas\(Linear\) is not sharded.* Call fully_shard"):
        Replicas(plain, adamw(plain), name="a", lighthouse="http://localhost:1")
    model = chain(fully_shard)
    with pytest.raises(ConfigError, match=r"no lighthouse is given. Start one with torchft_lighthouse"):
        Replicas(model, adamw(model), name="a")
    unused = f"http://localhost:{free_ports(1)[0]}"
    with pytest.raises(StateError, match=f"{unused}.*replica 'a' could not join.* Check that the lighthouse runs"):
        Replicas(model, adamw(model), name="a", lighthouse=unused, timeout_s=1)
    dist.destroy_process_group()
    with pytest.raises(StateError, match=r"needs a process group.*and there is none"):
        Replicas(model, adamw(model), name="a", lighthouse=unused)


@pytest.mark.clusters
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated:DeprecationWarning")  # torchft calls it
@on_new_ranks(1)
def test_single_replica_matches_sharded_training_until_lighthouse_loss():
    from fullshard.integrations.torchft import Replicas

    lighthouse, address = start_lighthouse()
    model = chain(fully_shard)
    optimizer = adamw(model)
    replicas = Replicas(model, optimizer, name="a", lighthouse=address, timeout_s=8)
    for step in range(2):
        assert replicas.step == step
        replicas.begin_step()
        assert (replicas.index, replicas.count) == (0, 1)
        model(inputs(step)).square().mean().backward()
        assert replicas.should_commit()
        optimizer.step()
        optimizer.zero_grad()
    alone = chain(fully_shard)
    optimizer = adamw(alone)
    for step in range(2):
        take_step(optimizer, alone(inputs(step)).square().mean())
    assert_same(wholes(model), wholes(alone))
    lighthouse.kill()
    lighthouse.wait()
    with pytest.raises(StateError, match=r"begin_step of step 2: no quorum.* Check that the lighthouse runs"):
        replicas.begin_step()


class HalfHealed:
    """A manager of a replica that received a state on its first rank only."""

    def __init__(self) -> None:
        self.step = 7 if dist.get_rank() == 0 else 3

    def register_state_dict_fn(self, key: str, load: object, take: object) -> None:
        """Ignore the function, because no replica requests a state."""

    def allreduce(self, sums: Tensor) -> mock.Mock:
        return mock.Mock()

    def errored(self) -> None:
        return None

    def current_step(self) -> int:
        return self.step

    def should_commit(self) -> bool:
        return False  # on all ranks, because one rank does not commit

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "batches_committed": 20}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


@on_new_ranks(2)
def test_partially_received_state_is_requested_again_by_all_ranks():
    from fullshard.integrations.torchft import Replicas

    model = chain(fully_shard)
    with mock.patch.object(Replicas, "_join", lambda *_: HalfHealed()):
        replicas = Replicas(model, adamw(model), name="a", lighthouse="somewhere")
    model(inputs()).square().mean().backward()
    assert not replicas.should_commit()
    assert replicas.step == 3
