"""Ranks on one host share memory. It is bounded, private to the ranks, and freed with them; waiting ranks sleep."""

import gc
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_new_ranks
from small_models import Chain, chain, initialize, inputs, sgd, take_step
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import (
    MixedPrecisionPolicy,
    Placement,
    Placements,
    RankMismatchError,
    fully_shard,
    share_memory_between_ranks,
    share_memory_between_units,
)
from fullshard.comm import peers
from fullshard.comm.collectives import Collectives
from fullshard.comm.peers import ADDRESS_NBYTES, CannotShareError, HostPeers, connect
from fullshard.comm.routes import collectives_for
from fullshard.comm.shared_memory import SharedMemoryCollectives
from fullshard.device.memory import Slot
from fullshard.engine.reduction_queue import ReductionQueue
from fullshard.engine.registry import units_in
from fullshard.liveness.watchdog import PeerGoneError
from fullshard.tape.recorder import Origin, Phase
from fullshard.testing import assert_same, run_ranks

ORIGIN = Origin("block", Phase.FORWARD)


def transport(group: dist.ProcessGroup | None = None) -> SharedMemoryCollectives:
    found = collectives_for(group or dist.group.WORLD, torch.device("cpu"))
    assert isinstance(found, SharedMemoryCollectives)
    return found


def gather(transport: Collectives, numel: int = 1000) -> Tensor:
    whole = torch.empty(transport.world * numel)
    part = torch.full((numel,), float(transport.rank))
    transport.channel_for("test", 1).all_gather([whole], [part], origin=ORIGIN).wait()
    return whole.view(transport.world, numel)[:, -1]


# -- threads for ranks, without a process group -----------------------------------------------------------------------


class Ranks:
    """Ranks that exchange their addresses over a list."""

    def __init__(self, world: int, timeout_s: float = 60) -> None:
        self.world, self.timeout_s = world, timeout_s
        self.published = [b""] * world
        self.barrier = Barrier(world)
        self.results: list[Any] = [None] * world

    def exchange(self, rank: int, local: bytes) -> list[bytes]:
        assert len(local) == ADDRESS_NBYTES
        self.published[rank] = local
        self.barrier.wait()
        published = list(self.published)
        self.barrier.wait()
        return published

    def connect(self, rank: int) -> None:
        try:
            self.results[rank] = connect(rank, lambda local: self.exchange(rank, local), self.timeout_s)
        except CannotShareError as error:
            self.results[rank] = str(error)

    def meet(self) -> list[Any]:
        threads = [Thread(target=self.connect, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.results


@pytest.fixture
def meet() -> Iterator[Callable[[Ranks], list[Any]]]:
    """Let ranks meet and return their results. Close their connections in the end."""
    met: list[Any] = []

    def meet_(ranks: Ranks) -> list[Any]:
        met.extend(ranks.meet())
        return met

    yield meet_
    for result in met:
        if isinstance(result, HostPeers):
            result.close()


def test_published_block_is_kept_until_read(meet):
    first, second = meet(Ranks(2))
    sent = torch.arange(5.0)
    block = first.take(sent.nbytes)
    block.memory.tensors_like([sent])[0].copy_(sent)
    first.publish((1, 7), block)
    assert first.take(8) is not block  # it is not read yet
    [published] = second.published((1, 7))
    assert torch.equal(published.tensors_like([sent])[0], sent)
    second.have_read([published])
    assert first.take(sent.nbytes) is block


def test_blocks_are_reused_and_replaced_by_larger_blocks(meet):
    first, second = meet(Ranks(2))
    for collective in range(1, 50):
        block = first.take(collective * 1000)
        first.publish((collective, 0), block)
        second.have_read(second.published((collective, 0)))
    assert len(first.blocks) == 1
    second.take(1)  # makes it read its messages
    assert [len(other.blocks) for other in second._others.values()] == [1]


@pytest.mark.parametrize(
    ("patience_s", "is_due", "waits"), [(60.0, True, True), (0.01, True, False), (3600.0, False, False)]
)
def test_patient_take_waits_for_block_that_is_due(meet, monkeypatch, patience_s, is_due, waits):
    monkeypatch.setattr(peers, "_PATIENCE_S", patience_s)
    first, second = meet(Ranks(2))
    block = first.take(100)
    first.publish((1, 0), block)
    block.is_due = is_due
    reader = Thread(target=lambda: second.have_read(second.published((1, 0))))
    if waits:
        reader.start()
    assert (first.take(80, patiently=True) is block) == waits
    if not waits:
        reader.start()
    reader.join()
    assert first.take(1000, patiently=True).memory.nbytes >= 1000  # larger than any block that it could wait for


def test_drop_free_releases_only_free_blocks(meet):
    first, second = meet(Ranks(2))
    busy, free = first.take(100), first.take(100)
    for collective, block in enumerate((busy, free)):
        first.publish((collective, 0), block)
    second.have_read(second.published((1, 0)))
    first.drop_free()
    assert first.blocks == [busy]
    assert second.have_all_published((0, 0))
    assert [len(other.blocks) for other in second._others.values()] == [1]


def test_have_all_published_is_true_after_all_ranks_publish(meet):
    first, second, third = meet(Ranks(3))
    assert not first.have_all_published((1, 0))
    second.publish((1, 0), second.take(8))
    assert not first.have_all_published((1, 0))
    third.publish((1, 0), third.take(8))
    assert first.have_all_published((1, 0))
    assert len(first.published((1, 0))) == 2


def test_published_blocks_and_fingerprints_match_their_collective(meet):
    first, second = meet(Ranks(2))
    for collective in (1, 2):  # the first is never asked for, as after an exception
        block = first.take(8)
        block.memory.tensors_like([torch.empty(1)])[0].fill_(collective)
        first.publish((collective, 0), block, fingerprint=bytes([collective]))
    [published] = second.published((2, 0))
    assert published.tensors_like([torch.empty(1)])[0].item() == 2
    assert [second.next_fingerprints() for _ in range(2)] == [{0: b"\1"}, {0: b"\2"}]


def test_waiting_for_missing_rank_raises_after_group_timeout(meet):
    first, _ = meet(Ranks(2, timeout_s=0.2))
    with pytest.raises(dist.DistError, match=r"Timed out: rank 0 .* rank 1 for 0.2 s"):
        first.published((1, 0))


def test_closed_peer_raises_after_its_last_message_is_read(meet):
    first, second = meet(Ranks(2))
    second.publish((1, 0), second.take(8))
    second.close()
    assert len(first.published((1, 0))) == 1
    with pytest.raises(PeerGoneError):
        first.published((2, 0))


def test_shared_memory_is_visible_to_all_ranks_and_freed_after_last_use(meet):
    first, second = meet(Ranks(2))
    memories = [first.rank_shared([100, 5000], 1), second.rank_shared([100, 5000], 1)]
    like = [torch.empty(25)]
    memories[0][1].tensors_like(like)[0].fill_(3)
    assert memories[1][1].tensors_like(like)[0].tolist() == [3.0] * 25
    mapped = mapped_blocks()
    del memories
    assert mapped_blocks() == mapped - 4


def mapped_blocks() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:fullshard")


def test_signalled_actions_run_once_in_waiting_thread(meet):
    first, second = meet(Ranks(2))
    done: list[str] = []
    first.when_signalled((1, 0), lambda: done.append("one"))
    first.when_signalled((2, 0), lambda: done.append("two"))
    second.signal((1, 0), fingerprint=b"x")
    second.signal((2, 0))
    first.await_signals((2, 0))  # though the other is not asked for
    assert done == ["one", "two"]
    first.await_signals((1, 0))
    assert first.next_fingerprints() == {1: b"x"}
    first.when_signalled((3, 0), lambda: done.append("three"))
    second.close()
    with pytest.raises(PeerGoneError):
        first.await_signals((3, 0))
    assert done == ["one", "two"]


@pytest.mark.slow
def test_waiting_rank_drains_full_socket(meet):
    """Both ranks may send more than the socket buffers hold before either reads."""
    first, second = meet(Ranks(2))
    count = 2000

    def talk(me: HostPeers) -> None:
        for collective in range(count):
            me.have_read([])
            me.publish((collective, 0), blocks[me.rank], fingerprint=bytes(192))
        for collective in range(count):
            assert len(me.published((collective, 0))) == 1

    blocks = [first.take(8), second.take(8)]
    threads = [Thread(target=talk, args=(me,), daemon=True) for me in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_unknown_connection_is_rejected_as_peer(meet):
    class Visited(Ranks):
        def exchange(self, rank: int, local: bytes) -> list[bytes]:
            addresses = super().exchange(rank, local)
            if rank == 1 and not strangers:
                name = peers.json.loads(addresses[0])["name"]
                for greeting in (b"x" * 20, b"short"):
                    strangers.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                    strangers[-1].connect(name)
                    strangers[-1].sendall(greeting)
            return addresses

    strangers: list[socket.socket] = []
    first, second = meet(Visited(2))
    for stranger in strangers:
        assert stranger.recv(1) == b""
        stranger.close()
    second.publish((1, 0), second.take(8))
    assert len(first.published((1, 0))) == 1


def test_connect_sends_nothing_to_socket_of_another_user(monkeypatch):
    """A socket name is free again after its rank ended, and all users of the host can see it."""
    monkeypatch.setattr(peers, "_user_of", lambda connection: os.geteuid() + 1)
    name = f"\0fullshard-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.bind(name)
        stranger.listen()
        addresses = [peers._Address("host", name, "0" * 16)] * 2
        sockets: dict[int, socket.socket] = {}
        with pytest.raises(OSError, match="belongs to another user"):
            peers._connect_all(sockets, stranger, addresses, 1)
        for connection in sockets.values():
            connection.close()
        accepted, _ = stranger.accept()
        with accepted:
            assert accepted.recv(100) == b""


def test_connect_fails_on_every_rank_if_hosts_differ(meet, monkeypatch):
    hosts = iter("abb")
    monkeypatch.setattr(peers, "host_identity", lambda: next(hosts))
    assert meet(Ranks(3)) == ["they are on 2 hosts"] * 3


def test_connect_fails_on_every_rank_if_one_rank_cannot_connect(meet, monkeypatch):
    connect_all = peers._connect_all

    def fail(sockets: Any, listener: Any, addresses: Any, rank: int) -> None:
        connect_all(sockets, listener, addresses, rank)
        if rank == 1:
            raise OSError("out of sockets")

    monkeypatch.setattr(peers, "_connect_all", fail)
    assert meet(Ranks(3)) == ["rank 1 could not connect: out of sockets"] * 3


# -- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("host", "falls_back"), [("{rank}", True), ("one", False)])
@on_new_ranks(2)
def test_ranks_on_several_hosts_fall_back_to_messages(host, falls_back):
    expected = torch.tensor([0.0, 1.0])
    peers.host_identity = lambda: host.format(rank=dist.get_rank())
    fell_back, gathered = transport().peers is None, gather(transport())
    assert fell_back == falls_back
    assert torch.equal(gathered, expected)


@on_new_ranks(2)
def test_shared_memory_is_disabled_if_one_rank_disables_it():
    share_memory_between_ranks(dist.get_rank() == 0)
    assert transport().peers is None


@pytest.mark.parametrize(
    ("value", "shares"), [pytest.param(*case, marks=pytest.mark.slow) for case in (("0", False), ("1", True))]
)
def test_environment_variable_disables_shared_memory(value, shares):
    published = subprocess.run(
        [
            sys.executable,
            "-c",
            "from fullshard.policy.switches import switches; print(switches.shares_memory_between_ranks)",
        ],
        env={**os.environ, "FULLSHARD_SHARED_MEMORY": value},
        capture_output=True,
        text=True,
        check=True,
    )
    assert published.stdout.split() == [str(shares)]


@on_new_ranks(2)
def test_number_of_shared_memory_blocks_stays_bounded_during_training():
    """For what is reduced: the memory that gathers needed before units took turns on common memory is given up. There
    is one more, and stays, where the other rank was late once.
    """
    model = chain(fully_shard)
    counts = []
    for count in (4, 20):
        steps(model, range(count))
        assert transport().peers is not None
        counts.append(len(transport().peers.blocks))
    few, many = counts[0], counts[1]
    assert 1 <= few <= many <= 2


@on_new_ranks(2)
def test_unit_reduction_completes_before_next_unit_once_all_ranks_publish():
    """No later unit could check the last unit."""
    model = chain(fully_shard)
    visited: list[list[bool]] = []
    finish = ReductionQueue.finish

    def finish_and_note(queue: ReductionQueue, **options: Any) -> None:
        visited[-1] += [reduction.is_complete for reduction in queue.pending.values()]
        finish(queue, **options)

    def meet_in_backward(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(lambda grad: dist.barrier())

    for layer in model.layers:
        layer.register_forward_hook(meet_in_backward)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReductionQueue, "finish", finish_and_note)
        for number in range(3):
            visited.append([])
            steps(model, [number])
    by_step = visited
    for complete in by_step:
        assert len(complete) > 2
        assert complete[:-1] == [True] * (len(complete) - 1)


@on_new_ranks(2)
def test_ranks_do_not_wait_for_blocks_that_peers_cannot_read_yet():
    """Units with two messages a reduction, and gathers that go through blocks as reductions do."""
    peers._PATIENCE_S = 3600.0
    share_memory_between_units(False)
    model = Chain()
    initialize(model)
    for layer in model.layers:
        layer.extra = nn.Parameter(torch.ones(48, 48, dtype=torch.float64))
        layer.register_forward_hook(lambda layer, _, output: output + (output.double() @ layer.extra).float())
    steps(chain(fully_shard, model), range(6))


def steps(model: Any, numbers: Iterable[int]) -> None:
    optimizer = sgd(model)
    for number in numbers:
        take_step(optimizer, model(inputs(number)).square().mean())


def common_slots(strategy: Any, shares_units: bool = True) -> list[bool]:
    """Return for each slot whether all ranks share its memory."""
    share_memory_between_units(shares_units or dist.get_rank() == 0)
    model = chain(partial(fully_shard, strategy=strategy))
    steps(model, range(3))
    units = units_in(model)
    return [unit.slot.is_rank_shared for unit in units if not unit.keeps_unsharded and unit.unsharded_nbytes]


GROUPED = Placements(
    parameters=Placement.SHARDED,
    parameters_in_step=Placement.GROUPED,
    gradients=Placement.SHARDED,
    optimizer=Placement.SHARDED,
    group=2,
)


@pytest.mark.parametrize(
    ("strategy", "ranks", "expected"),
    [("zero3", 2, True), ("zero2", 2, True), ("zero1", 2, None), ("ddp", 2, None), (GROUPED, 4, False)],
    ids=["zero3", "zero2", "zero1", "ddp", "grouped"],
)
def test_unit_buffers_are_shared_between_ranks_by_strategy(strategy, ranks, expected):
    """A gathered parameter exists once per host. Parameters kept between steps have their own memory on each rank."""
    for slots in run_ranks(ranks, common_slots, strategy):
        assert set(slots) == (set() if expected is None else {expected})


def test_no_buffers_are_shared_if_one_rank_disables_sharing_between_units():
    for slots in run_ranks(2, common_slots, "zero3", False):
        assert set(slots) == {False}


class Renormalized(nn.Module):
    """Its forward shortens the rows that it looks up, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8, max_norm=0.5)
        self.head = nn.Linear(8, 8)

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(rows))
        return out


def look_up(shares: bool) -> tuple[list[bool], list[Tensor]]:
    share_memory_between_ranks(shares)
    torch.manual_seed(0)
    model = fully_shard(Renormalized())
    outputs = []
    for number in range(4):
        rows = torch.arange(4) * (dist.get_rank() + 1) + number
        outputs.append(model(rows).detach())
        model(rows).square().mean().backward()
    return [unit.slot.is_rank_shared for unit in units_in(model)], outputs


def test_parameters_written_in_forward_are_not_shared_between_ranks():
    shared, sent = (run_ranks(2, look_up, shares) for shares in (True, False))
    assert [slots for slots, _ in shared] == [[False]] * 2
    assert_same(shared, sent)


@on_new_ranks(2)
def test_rank_shared_memory_is_freed_with_model():
    before = mapped_blocks()
    model = chain(fully_shard)
    steps(model, range(3))
    between = mapped_blocks()
    del model
    for _ in range(3):
        gc.collect()
    after = mapped_blocks()
    assert before < after < between  # blocks stay, for other models


def leave_on_one_rank() -> str:
    model = chain(fully_shard)
    steps(model, range(3))
    if dist.get_rank() == 1:
        units_in(model)[2].residency.move(Slot(torch.device("cpu")))
    with pytest.raises(RankMismatchError) as raised:
        steps(model, range(2))
    return str(raised.value)


def test_leaving_rank_shared_memory_on_one_rank_raises_on_every_rank():
    messages = run_ranks(2, leave_on_one_rank)
    assert messages[0] == messages[1]
    assert "rank 0 started all_gather of layers.1" in messages[0]
    assert messages[0].count("bytes, into shared memory)") == 1


def agree_on_one_rank() -> str:
    own = transport()
    gather(own)
    with pytest.raises(RankMismatchError) as raised:
        if dist.get_rank() == 0:
            own.rank_shared_storages([8], "plan")
        else:
            gather(own)
    return str(raised.value)


def test_all_gather_during_agreement_on_shared_memory_raises_on_every_rank():
    messages = run_ranks(2, agree_on_one_rank, timeout=15)
    assert messages[0] == messages[1]
    assert "rank 0 started agreement on shared memory after a backward; rank 1 started all_gather" in messages[0]


def call_without_backward(shares: bool, steps_with_more: Iterable[int]) -> tuple[list[bool], dict[str, Tensor]]:
    share_memory_between_ranks(shares)
    model = chain(partial(fully_shard, strategy="zero2"))
    for number in range(5):
        if number in steps_with_more and dist.get_rank() == 0:
            model(inputs(number))  # gathers what the forward after it would gather
        steps(model, [number])
    values = {name: param.full_tensor() for name, param in model.named_parameters()}
    return [unit.slot.is_rank_shared for unit in units_in(model)], values


@pytest.mark.slow
@pytest.mark.parametrize(("steps_with_more", "expected"), [([0, 1], True), (range(5), False)])
def test_forward_without_backward_on_one_rank_does_not_block_other_ranks(steps_with_more, expected):
    """That rank still awaits a backward when the microbatch of others is over, and they agree on nothing then."""
    shared, sent = (run_ranks(2, call_without_backward, of, steps_with_more, timeout=30) for of in (True, False))
    assert [set(slots) for slots, _ in shared] == [{expected}] * 2
    assert_same([values for _, values in shared], [values for _, values in sent])


def trained(shares: bool, axes: tuple[int, ...], precision: MixedPrecisionPolicy) -> dict[str, Tensor]:
    share_memory_between_ranks(shares)
    mesh = init_device_mesh("cpu", axes, mesh_dim_names=("replicate", "shard")[-len(axes) :])
    model = chain(partial(fully_shard, mesh=mesh, mp_policy=precision))
    optimizer = sgd(model)
    for number in range(6):
        for _ in range(2):
            model(inputs(10 * number + dist.get_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(inputs(number))
    return {name: param.full_tensor() for name, param in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("axes", [(2,), *(pytest.param(axes, marks=pytest.mark.slow) for axes in ((4,), (2, 2)))])
def test_training_with_shared_memory_matches_messages_bitwise(axes):
    ranks = 2 if axes == (2,) else 4
    for precision in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        shared, sent = (run_ranks(ranks, trained, shares, axes, precision) for shares in (True, False))
        assert_same(shared, sent)


def wait_long() -> float:
    """Return seconds of processor time that rank 0 takes while it waits for rank 1."""
    gather(transport())
    before = resource.getrusage(resource.RUSAGE_THREAD)
    if dist.get_rank() == 1:
        time.sleep(2)
    gather(transport())
    after = resource.getrusage(resource.RUSAGE_THREAD)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.slow
def test_waiting_rank_uses_little_cpu_time():
    assert run_ranks(2, wait_long)[0] < 0.5


def shared_descriptors(pid: int) -> int:
    """How many descriptors of shared blocks a process has, beyond those that are mapped."""
    links = [link for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    return sum("memfd:fullshard" in str(link.readlink()) for link in links)


SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from fullshard.comm.routes import collectives_for
from fullshard.tape.recorder import Origin, Phase
dist.init_process_group("gloo")
collectives = collectives_for(dist.group.WORLD, torch.device("cpu"))
part, whole = torch.ones(1 << 20), torch.empty(2 << 20)
for _ in range(3):
    collectives.channel_for("test", 1).all_gather([whole], [part], origin=Origin("unit", Phase.FORWARD)).wait()
if collectives.rank == 1 and sys.argv[1] == "fork" and os.fork() == 0:
    time.sleep(20)  # as a data loader's worker, which outlives its parent a little
    os._exit(0)
print("ready", os.getpid(), flush=True)
if collectives.rank == 1:
    time.sleep(100)
try:
    collectives.channel_for("test", 1).all_gather([whole], [part], origin=Origin("unit", Phase.FORWARD)).wait()
except Exception as error:
    print(type(error).__name__, error, flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["alone", pytest.param("fork", marks=pytest.mark.slow)])
def test_killed_rank_leaves_no_files_memory_or_sockets(how):
    """Neither files nor memory. The other rank gets an error immediately, even if a child of the killed rank lives."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    before = set(Path("/dev/shm").iterdir())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, how],
            env={**os.environ, **common, "RANK": str(rank), "PYTHONPATH": str(Path(fullshard.__file__).parents[1])},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        stated = [rank.stdout.readline().split() for rank in ranks]
        assert [words[0] for words in stated] == ["ready", "ready"]
        assert shared_descriptors(int(stated[0][1])) > 0  # else this test would look for the wrong thing
        ranks[1].kill()
        ranks[1].wait()
        started = time.monotonic()
        published = ranks[0].stdout.readline()
        assert "RankLostError rank 1 was lost" in published
        assert time.monotonic() - started < 15  # the child sleeps for longer
        ranks[0].wait()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            rank.stdout.close()
    # Tests in other processes keep safety copies in folders.
    new = [path.name for path in set(Path("/dev/shm").iterdir()) - before if not path.is_dir()]
    assert [name for name in new if "fullshard" in name] == []
    deadline = time.monotonic() + 30
    while left := sockets() - sockets_of_other_runs(f"MASTER_PORT={port}"):  # a child of the dead one's has its own
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def sockets() -> set[str]:
    """Return the inodes of all sockets that this library has named, on this machine."""
    return set(re.findall(r"([1-9]\d*) @fullshard", Path("/proc/net/unix").read_text()))


def sockets_of_other_runs(own: str) -> set[str]:
    """Return the inodes of sockets that processes hold whose environment does not have `own`."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone by now
            if own.encode() not in (process / "environ").read_bytes():
                found |= {os.readlink(path).removeprefix("socket:[").rstrip("]") for path in (process / "fd").iterdir()}
    return found


def two_groups() -> tuple[Tensor, Tensor]:
    """Run concurrent gathers of two groups, which end in a different order on each rank."""
    rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    rank = dist.get_rank()
    transports = [transport(rows[rank // 2]), transport(columns[rank % 2])]
    wholes = [torch.empty(2), torch.empty(2)]
    for _ in range(3):
        pending = [
            each.channel_for("test", 1).all_gather([whole], [torch.tensor([float(rank)])], origin=ORIGIN)
            for each, whole in zip(transports, wholes, strict=True)
        ]
        for one in pending if rank % 2 else reversed(pending):
            one.wait()
    assert all(each.peers is not None for each in transports)
    return wholes[0], wholes[1]


def test_two_process_groups_use_separate_shared_memory():
    for rank, (row, column) in enumerate(run_ranks(4, two_groups)):
        assert row.tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert column.tolist() == [rank % 2, rank % 2 + 2]
