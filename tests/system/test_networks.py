"""Two hosts with separate networks: results equal those of one host, and traffic equals `docs/networks.md`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hosts import INTERFACE, SOURCE, Host, run_on_hosts, sent_bytes, torchrun, wait_for
from pages import ROOT, page, rows, section
from small_models import adamw, shard, small_gpt, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from training_runs import train_here

from fullshard import Placement, Placements, ShardingStrategy, clip_grad_norm_, fully_shard
from fullshard.comm.mesh import default_mesh
from fullshard.testing import assert_same, run_ranks

pytestmark = pytest.mark.slow  # starting two hosts takes long

HOSTS, RANKS = 2, 2  # number of hosts, and ranks per host
S, G = Placement.SHARDED, Placement.GROUPED
HPZ = Placements(parameters=S, parameters_in_step=G, gradients=S, optimizer=S)
HFSDP = Placements(parameters=G, parameters_in_step=G, gradients=G, optimizer=S)
STRATEGIES = {**{strategy.value: strategy for strategy in ShardingStrategy}, "hpZ": HPZ, "HFSDP": HFSDP}


@dataclass(frozen=True)
class Report:
    """The report of a rank on two hosts."""

    host: str
    shards_with: list[int]  # ranks of its shard dimension, on the default mesh of hsdp
    numbers: dict[str, Any]  # results of training, by strategy
    sent: dict[str, float]  # bytes that its host sends to the other host per step, by strategy


@pytest.fixture(scope="module")
def reports(hosts: tuple[Host, Host]) -> list[Report]:
    """Return the reports of all ranks. torchrun takes seconds to start, so it starts once per module."""
    return run_on_hosts(hosts, report, ranks=RANKS)


def report() -> Report:
    return Report(
        host=os.readlink("/proc/self/ns/net"),
        shards_with=dist.get_process_group_ranks(default_mesh("cpu", replicated=True).get_group("shard")),
        numbers=train_under_each({name: {} for name in ("zero3", "hsdp", "hpZ", "HFSDP")}),
        sent={name: sent_in_a_step(strategy) for name, strategy in STRATEGIES.items()},
    )


def test_default_hsdp_mesh_shards_within_host(reports):
    for rank, visited in enumerate(reports):
        assert visited.shards_with == [other for other, peer in enumerate(reports) if peer.host == visited.host]
        assert rank in visited.shards_with
        assert len(visited.shards_with) == RANKS


# -- the hosts themselves ---------------------------------------------------------------------------------------------

MAKES_HOSTS = """
import os, sys
from hosts import two_hosts
with two_hosts() as hosts:
    for host in hosts:
        host.start("sleep", "600")
    print(*(os.readlink(f"/proc/{host.holder.pid}/ns/net") for host in hosts), flush=True)
    sys.stdin.read()
"""


def processes_of(networks: list[str]) -> list[str]:
    found = []
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        with suppress(OSError):  # the process has just ended, or belongs to another user
            found += [str(link)] if os.readlink(link) in networks else []
    return found


@pytest.mark.parametrize("killed", [False, True])
def test_hosts_end_with_their_creator_process(hosts, killed, tmp_path):
    options = {"cwd": Path(__file__).parents[1], "env": {**os.environ, "TMPDIR": str(tmp_path)}}
    command = [sys.executable, "-c", MAKES_HOSTS]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True, **options) as program:
        networks = program.stdout.readline().split()
        assert len(processes_of(networks)) >= 2 * len(networks)
        if killed:
            program.kill()
    while processes_of(networks):  # pytest-timeout ends an endless loop
        time.sleep(0.05)


# -- numbers ----------------------------------------------------------------------------------------------------------


def train_under_each(options: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the training results for each named strategy, with these additional options of `fully_shard`."""
    numbers = {}
    for name, chosen in options.items():
        model = shard(small_gpt(blocks=2), **{"strategy": STRATEGIES[name], **chosen})
        numbers[name] = train(model, adamw(model), steps=2, clip=clip_grad_norm_).numbers
    return numbers


def train_on_one_host() -> dict[str, Any]:
    """Train as on two hosts, with the given host boundaries."""
    mesh = init_device_mesh("cpu", (HOSTS, RANKS), mesh_dim_names=("replicate", "shard"))
    return train_under_each(
        {
            "zero3": {},
            "hsdp": {"mesh": mesh},
            "hpZ": {"reshard_after_forward": RANKS},
            "HFSDP": {"strategy": replace(HFSDP, group=RANKS)},
        }
    )


def test_training_on_two_hosts_matches_one_host_bitwise(reports):
    expected = run_ranks(HOSTS * RANKS, train_on_one_host)
    assert_same([visited.numbers for visited in reports], expected)


def fullshard_train(text: Path, *more: str) -> list[str]:
    sizes = ("--size", "nano", "--steps", "4", "--seq", "16", "--validate-bytes", "256", "--sample-bytes", "4")
    command = [
        "fullshard.cli",
        "train",
        "--no-predict",
        "--strategy",
        "hsdp",
        "--text",
        str(text),
        *sizes,
        "--log-every",
        "1",
    ]
    return [*command, "--out", "run", *more]


def train_in(folder: Path, argv: list[str]) -> int:
    os.chdir(folder)
    return train_here(*argv)


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_train_command_matches_one_host_bitwise_without_shared_folder(hosts, tmp_path):
    text = ROOT / "docs"  # a folder: each host writes a separate file from it
    with (tmp_path / "output").open("w") as output:
        options = {"stdout": output, "stderr": STDOUT}
        started = torchrun(hosts, "-m", *fullshard_train(text), ranks=RANKS, **options)
        assert wait_for(started, 300) == [0] * HOSTS
    assert run_ranks(HOSTS * RANKS, train_in, tmp_path, fullshard_train(text, "--replicas", str(HOSTS))[2:]) == [0] * 4
    one, first, second = (folder / "run" for folder in (tmp_path, *(host.folder for host in hosts)))
    assert (first / "model.safetensors").read_bytes() == (one / "model.safetensors").read_bytes()
    assert losses(first) == losses(one)
    assert len(losses(one)) == 4 + 1  # one per step, and one of the final validation
    assert {path.name for path in second.iterdir()} == {".text", "report"}  # files of the ranks on this host


# -- traffic ----------------------------------------------------------------------------------------------------------

WIDTH, LAYERS, MICROBATCHES, STEPS = 512, 3, 2, 2
UNIT_BYTES = WIDTH * WIDTH * 4
# Headers of Ethernet, IP and TCP are 66 bytes of a packet of at most 1514, and as many bytes acknowledge what comes the
# other way. The bytes that ranks exchange about each collective are few in comparison.
OVERHEAD = 1.10


def sent_in_a_step(strategy: Any) -> float:
    head = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))  # stays with the root
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)), head)
    for layer in model[:LAYERS]:
        fully_shard(layer, strategy=strategy)
    fully_shard(model, strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1 + STEPS):
        if step == 1:
            dist.barrier()
            before = sent_bytes()
            dist.barrier()
        for microbatch in range(MICROBATCHES):
            model.set_requires_gradient_sync(microbatch == MICROBATCHES - 1)
            model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    return (sent_bytes() - before) / STEPS


@pytest.mark.parametrize("formula", rows(section(page("docs/networks.md"), "Bytes")), ids=lambda row: row[0])
def test_traffic_between_hosts_matches_formulas(formula, reports):
    name, expression = formula[:2]
    whole = (LAYERS + 1) * UNIT_BYTES
    known = {"P": whole, "G": whole, "root": UNIT_BYTES, "k": MICROBATCHES, "s": 1, "h": HOSTS, "g": RANKS}
    expected = eval(expression, known)
    for visited in reports:
        assert expected <= visited.sent[name] <= OVERHEAD * expected


def test_hsdp_sends_less_between_hosts_than_zero3(reports):
    for visited in reports:
        assert visited.sent["hsdp"] < visited.sent["zero3"] / 4


# -- a host is lost ---------------------------------------------------------------------------------------------------

TRAIN_FOR_EVER = """
import pathlib, sys, time
import torch, torch.distributed as dist
from fullshard import fully_shard
from fullshard.liveness import watchdog
watchdog.SILENCE_S = int(sys.argv[2])
dist.init_process_group("gloo")
model = fully_shard(torch.nn.Linear(64, 64))
started, steps = time.monotonic(), 0
while True:
    model(torch.ones(2, 64)).sum().backward()
    model.zero_grad()
    steps += 1
    if time.monotonic() - started > 5:  # ranks watch one another by now
        pathlib.Path(sys.argv[1]).write_text(str(steps))
"""
SILENCE_S = 8


def steps_of(path: Path) -> int:
    """Return the number of steps that a rank reports; 0 while its file is being written."""
    return int((path.read_text() if path.exists() else "") or 0)


def test_short_network_outage_is_survived_and_long_outage_ends_ranks(hosts, tmp_path):
    """This includes ranks that cannot reach the store. Torchrun is not used, because its agent exits minutes later."""
    ranks = range(HOSTS * RANKS)
    trains, stated = ([tmp_path / f"{what}{rank}" for rank in ranks] for what in ("trains", "said"))
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE)}
    rendezvous = {"WORLD_SIZE": str(len(ranks)), "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500"}
    started = []
    for rank in ranks:
        command = [sys.executable, "-c", TRAIN_FOR_EVER, str(trains[rank]), str(SILENCE_S)]
        with stated[rank].open("w") as output:
            options = {"env": {**environ, **rendezvous, "RANK": str(rank)}, "stderr": output}
            started.append(hosts[rank // RANKS].start(*command, **options))

    def await_step(number: int) -> None:
        while not all(steps_of(path) > number for path in trains):
            assert [process.poll() for process in started] == [None] * len(ranks), stated[0].read_text()
            time.sleep(0.1)

    try:
        await_step(0)
        hosts[1].plug(False)
        time.sleep(SILENCE_S - 3)
        hosts[1].plug(True)
        await_step(max(steps_of(path) for path in trains) + 1)  # a step that starts and ends while connected
        hosts[1].plug(False)
        codes = wait_for(started, 90)
    finally:
        hosts[1].plug(True)
        for host in hosts:
            host.stop_all()
    assert all(codes), codes
    assert all(" was lost: " in text.read_text() for text in stated)
    for rank, lost in ((0, 3), (2, 1)):  # each rank watches the previous rank
        assert f"rank {lost} was lost: its host does not answer" in stated[rank].read_text()
