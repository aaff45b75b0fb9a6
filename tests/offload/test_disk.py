"""Scratch files: data is read back in full, or an error says what failed, where and why; no files are left."""

import errno
import gc
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard import ConfigError, DiskError, cli
from fullshard._compat import storage_references
from fullshard.disk import files, folder, speed
from fullshard.disk.buffers import Buffers
from fullshard.disk.files import DiskFile, DiskWork, aligned_buffer
from fullshard.disk.folder import free_bytes, mount_of, why_unfit
from fullshard.disk.interface import ALIGNMENT, aligned
from fullshard.disk.prediction import Traffic, floored, predict_load
from fullshard.disk.space import Scratch
from fullshard.disk.tensors import OnDisk
from fullshard.testing import assert_same

IN_MEMORY = Path("/dev/shm")


def noise(nbytes, seed=0):
    """Return random bytes in a buffer that can be written to disk."""
    made = aligned_buffer(nbytes)
    made.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
    return made


def there_and_back(file, source, offset=0):
    file.write(offset, source).wait()
    found = aligned_buffer(source.numel()).fill_(7)
    file.read(offset, found).wait()
    return found


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 1 << 20])
def test_buffers_are_aligned_and_have_the_requested_size(nbytes):
    buffer = aligned_buffer(nbytes)
    assert buffer.data_ptr() % ALIGNMENT == 0 and buffer.shape == (nbytes,) and buffer.dtype == torch.uint8
    assert aligned(nbytes) % ALIGNMENT == 0 and nbytes <= aligned(nbytes) < nbytes + ALIGNMENT


@pytest.mark.parametrize("direct", [None, False])
@pytest.mark.parametrize("requests", [1, 3, 64])
def test_written_data_is_read_back(tmp_path, direct, requests):
    """Data is read back for any number of requests, and for any order of concurrent ones."""
    source = noise(requests * ALIGNMENT)
    file = DiskFile(tmp_path, "state", 3 * source.numel(), direct=direct, request_bytes=ALIGNMENT, depth=3)
    pieces = [file.write(i * source.numel(), noise(source.numel(), seed=i)) for i in range(3)]
    for piece in pieces:
        piece.wait()
    assert all(piece.done for piece in pieces)
    for i in (2, 0, 1):
        found = aligned_buffer(source.numel())
        file.read(i * source.numel(), found).wait()
        assert torch.equal(found, noise(source.numel(), seed=i))
    file.close()


def test_threads_release_the_buffer_before_a_request_completes(tmp_path, monkeypatch):
    source, may_go, counts = noise(3 * ALIGNMENT), threading.Event(), []
    file = DiskFile(tmp_path, "state", source.numel(), request_bytes=ALIGNMENT)
    before, pwritev = storage_references(source.untyped_storage()), os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *args: may_go.wait(60) and pwritev(*args))
    work = file.write(0, source[:])  # a separate tensor
    for part in work._parts:  # called by the thread of the request
        part.add_done_callback(lambda _: counts.append(storage_references(source.untyped_storage())))
    may_go.set()
    work.wait()
    file.close()  # after all threads
    assert min(counts) == before and len(counts) == 3


def test_file_system_without_direct_io_uses_the_page_cache(tmp_path, monkeypatch):
    assert there_and_back(DiskFile(IN_MEMORY, "state", 1 << 16), noise(1 << 16)).equal(noise(1 << 16))

    def refuse(descriptor, command, flags=0):
        if command == files.fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not here")
        return 0

    monkeypatch.setattr(files.fcntl, "fcntl", refuse)
    file = DiskFile(tmp_path, "state", 1 << 16)
    assert not file.is_direct
    assert there_and_back(file, noise(1 << 16)).equal(noise(1 << 16))
    with pytest.raises(DiskError, match=r"does not support direct I/O\. Leave `direct` out"):
        DiskFile(tmp_path, "state", 1 << 16, direct=True)


@pytest.mark.parametrize("most", [ALIGNMENT, ALIGNMENT + 512, 3 * ALIGNMENT - 1])
def test_partial_reads_and_writes_are_continued(tmp_path, monkeypatch, most):
    preadv, pwritev = os.preadv, os.pwritev
    calls = []

    def some(call):
        def limited(descriptor, buffers, offset):
            calls.append(offset)
            return call(descriptor, [memoryview(buffers[0])[:most]], offset)

        return limited

    file = DiskFile(tmp_path, "state", 1 << 16, direct=False)
    monkeypatch.setattr(os, "preadv", some(preadv))
    monkeypatch.setattr(os, "pwritev", some(pwritev))
    assert there_and_back(file, noise(1 << 16)).equal(noise(1 << 16))
    assert len(calls) > 2 and all(offset % ALIGNMENT == 0 for offset in calls)


@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, None])
def test_failed_request_raises_with_operation_size_and_offset(tmp_path, monkeypatch, verb, code):
    """All other work has ended as well, so the caller may reuse the tensor."""
    file = DiskFile(tmp_path, "rank3", 1 << 16, request_bytes=1 << 14)
    call = {"read": "preadv", "write": "pwritev"}[verb]
    works = getattr(os, call)

    def fail(descriptor, buffers, offset):
        if offset != 1 << 15:
            return works(descriptor, buffers, offset)
        if code is None:
            return 100  # less than ALIGNMENT, at every attempt
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    work = getattr(file, verb)(0, noise(1 << 16))
    why = f"errno {code or errno.EIO}"
    for _ in range(2):
        with pytest.raises(
            DiskError, match=rf"rank3: cannot {verb} 16384 bytes at offset 32768: .*{why}.*last checkpoint"
        ):
            work.wait()
    assert work.done
    monkeypatch.undo()
    assert there_and_back(file, noise(1 << 16)).equal(noise(1 << 16))


@pytest.mark.parametrize(("offset", "start", "nbytes"), [(512, 0, 4096), (0, 512, 4096), (0, 0, 4000), (4096, 0, 8192)])
def test_unaligned_or_out_of_range_request_raises_before_io(tmp_path, offset, start, nbytes):
    file, buffer = DiskFile(tmp_path, "state", 8192), aligned_buffer(1 << 14)
    for verb in ("read", "write"):
        with pytest.raises(
            DiskError, match=f"offset {offset}, {nbytes} bytes at address .*multiples of 4096.*8192 bytes"
        ):
            getattr(file, verb)(offset, buffer[start : start + nbytes])


def test_full_disk_raises_at_file_creation(tmp_path):
    free = free_bytes(tmp_path)
    requested = 2 * free
    with pytest.raises(
        DiskError, match=rf"{tmp_path}/state: growing .* to {requested} bytes failed, \d+ bytes are free"
    ):
        DiskFile(tmp_path, "state", requested)
    assert free_bytes(tmp_path) > free // 2
    assert list(tmp_path.iterdir()) == []


def test_folder_path_that_is_a_file_raises_with_the_path(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match=f"{tmp_path}/file is a file, but a scratch file of 4096 bytes needs a folder"):
        DiskFile(tmp_path / "file", "state", 4096)


@pytest.mark.parametrize("nameless", [True, False])
def test_scratch_file_is_unlinked_and_close_frees_its_space(tmp_path, monkeypatch, nameless):
    if not nameless:
        monkeypatch.delattr(os, "O_TMPFILE")
    before = free_bytes(tmp_path)
    file = DiskFile(tmp_path / "deep" / "er", "state", 256 << 20)
    assert list((tmp_path / "deep" / "er").iterdir()) == []
    assert os.fstat(file._descriptor).st_blocks * 512 >= 256 << 20 and os.fstat(file._descriptor).st_nlink == 0
    work = file.write(0, noise(1 << 20))
    file.close()
    assert work.done
    file.close()
    assert free_bytes(tmp_path) > before - (128 << 20)


def test_dropped_range_is_reused_after_its_pending_write(tmp_path, monkeypatch):
    """A pending write would overwrite the data of the next owner. One range is read while another is written."""
    scratch, may_write, write = Scratch(tmp_path, "room"), threading.Event(), os.pwritev
    first, second = scratch.take(ALIGNMENT, more=2 * ALIGNMENT), scratch.take(2 * ALIGNMENT)
    assert scratch.nbytes == 3 * ALIGNMENT and scratch.free_bytes == 0
    second.write(noise(ALIGNMENT, seed=2), ALIGNMENT).wait()

    monkeypatch.setattr(os, "pwritev", lambda *args: may_write.wait() and write(*args))
    first.write(noise(ALIGNMENT))
    second.write(noise(ALIGNMENT, seed=1))
    into = aligned_buffer(ALIGNMENT)
    second.read(into, ALIGNMENT).wait()
    assert torch.equal(into, noise(ALIGNMENT, seed=2))
    del first
    third = scratch.take(ALIGNMENT)
    assert scratch.nbytes == 4 * ALIGNMENT, "the first one's stretch was taken under its write"
    may_write.set()
    assert scratch.free_bytes == ALIGNMENT
    fourth = scratch.take(ALIGNMENT)
    assert scratch.nbytes == 4 * ALIGNMENT and scratch.free_bytes == 0
    del second, third
    assert scratch.free_bytes == 3 * ALIGNMENT
    fifth = scratch.take(3 * ALIGNMENT)
    assert scratch.nbytes == 4 * ALIGNMENT, "neighbors are one stretch"
    del fourth
    sixth = scratch.take(2 * ALIGNMENT)
    assert scratch.nbytes == 6 * ALIGNMENT and (fifth.nbytes, sixth.nbytes) == (3 * ALIGNMENT, 2 * ALIGNMENT)


def test_file_without_references_is_closed(tmp_path):
    def open_ones():
        return [link for link in Path("/proc/self/fd").iterdir() if str(tmp_path) in os.path.realpath(link)]

    file = DiskFile(tmp_path, "state", 1 << 20)
    work = file.write(0, noise(1 << 20))
    assert len(open_ones()) == 1
    del file
    work.wait()
    gc.collect()
    assert open_ones() == []
    with pytest.raises(DiskError):
        DiskFile(tmp_path, "state", 2 * free_bytes(tmp_path))
    assert open_ones() == []


KILLED = """
import sys
from pathlib import Path
from fullshard.disk.files import DiskFile, aligned_buffer
file = DiskFile(Path(sys.argv[1]), "state", 512 << 20)
print("streams", flush=True)
while True:
    file.write(0, aligned_buffer(64 << 20)).wait()
"""


@pytest.mark.slow
def test_killed_process_leaves_no_scratch_file(tmp_path):
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "streams\n"
        held = Path(f"/proc/{process.pid}/fd")
        assert any(str(tmp_path) in os.readlink(entry) for entry in held.iterdir())
        process.send_signal(signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


class Work(DiskWork):
    """Disk work that finishes immediately, or only when it is awaited."""

    def __init__(self, is_fast):
        super().__init__([])
        self.is_fast = is_fast

    @property
    def done(self):
        return self.is_fast or self.was_awaited


@given(st.lists(st.tuples(st.sampled_from(["take", "give", "wait and give", "drop"]), st.integers(1, 5)), max_size=60))
def test_buffer_memory_is_independent_of_disk_speed(doings):
    def memory(is_fast):
        buffers, taken, found = Buffers(torch.device("cpu")), [], []
        for what, blocks in doings:
            if what == "take":
                taken.append(buffers.take(blocks * ALIGNMENT))
            elif what == "drop":
                buffers.drop()
            elif taken:
                work = Work(is_fast)
                if what == "wait and give":
                    work.wait()
                buffers.give(taken.pop(0), work)
            found.append((buffers.idle_nbytes, [item.whole.numel() for item in taken]))
        return found

    assert memory(is_fast=True) == memory(is_fast=False)


@pytest.mark.parametrize(
    ("lines", "path", "kind", "stated"),
    [
        (["/ / rw - ext4"], "/data/run", "ext4", None),
        (["/ / rw - ext4", "/ /data rw - tmpfs"], "/data/run", "tmpfs", "is in this machine's memory"),
        (["/ / rw - ext4", "/ /dat rw - tmpfs"], "/data/run", "ext4", None),
        (["/ /data rw - nfs4", "/ / rw - ext4"], "/data/run", "nfs4", "cross a network"),
        (["/ / rw - ext4", r"/ /my\040data rw shared:1 - fuse.sshfs"], "/my data", "fuse.sshfs", "cross a network"),
        (["/ / rw - ext4", "/ /dätä rw - nfs4"], "/dätä/run", "nfs4", "cross a network"),
        (["/ /data rw - tmpfs", "/ /data rw - xfs"], "/data/run", "xfs", None),
        ([], "/data", None, None),
    ],
)
def test_unfit_folder_is_detected_by_its_file_system(tmp_path, monkeypatch, lines, path, kind, stated):
    table = tmp_path / "mountinfo"
    table.write_text("".join(f"1 0 0:1 {line} source rw\n" for line in lines))
    monkeypatch.setattr(folder, "MOUNTS", table)
    mount = mount_of(Path(path))
    assert (mount and mount.kind) == kind
    reason = why_unfit(Path(path))
    assert reason is None if stated is None else stated in reason and kind in reason


def test_unfit_folder_warns_once(tmp_path, monkeypatch, caplog):
    assert "tmpfs" in why_unfit(IN_MEMORY)
    monkeypatch.setattr(files, "_warned", set())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            DiskFile(IN_MEMORY, "state", 4096).close()
        DiskFile(tmp_path, "state", 4096).close()
    assert len(caplog.messages) == 1 and "/dev/shm is tmpfs" in caplog.messages[0]
    monkeypatch.setattr(folder, "MOUNTS", tmp_path / "none")
    assert mount_of(IN_MEMORY) is None and why_unfit(IN_MEMORY) is None


class Clock:
    """A clock that advances only while a disk is awaited."""

    now = 0.0

    def __call__(self):
        return self.now


class PretendedDisk:
    """A disk of known rates behind the interface of `DiskFile`. It serves requests in order. Each request costs
    `latency`, which enough concurrent requests hide.
    """

    def __init__(self, nbytes, clock, *, read, write, latency):
        self.nbytes, self.is_direct = nbytes, True
        self.clock, self.rates, self.latency = clock, {"read": read, "write": write}, latency
        self.free_at = 0.0
        self.visited = []
        self.memory = set()

    def start(self, verb, offset, tensor):
        begun = self.clock.now
        self.memory.add(tensor.data_ptr())
        self.free_at = max(self.free_at, begun) + tensor.numel() / self.rates[verb]
        done = max(self.free_at, begun + self.latency)
        self.visited.append((verb, offset, tensor.numel()))
        return SimpleNamespace(wait=lambda: setattr(self.clock, "now", max(self.clock.now, done)))

    def read(self, offset, into):
        return self.start("read", offset, into)

    def write(self, offset, source):
        return self.start("write", offset, source)

    def close(self):
        self.rates = {}


@pytest.mark.parametrize(
    ("read", "write", "latency", "least_under_way"),
    [(3e9, 3e9, 0.0, 0), (2e9, 2e9, 2e-3, 1.5e6), (1e8, 5e7, 1e-4, 0), (2e7, 2e7, 0.0, 0)],
)
def test_disk_rates_are_measured_within_time_and_buffer_limits(
    tmp_path, monkeypatch, read, write, latency, least_under_way
):
    clock = Clock()
    made = []

    def pretend(folder, name, nbytes, **options):
        made.append(PretendedDisk(nbytes, clock, read=read, write=write, latency=latency))
        return made[0]

    monkeypatch.setattr(speed, "DiskFile", pretend)
    found = speed.measure(tmp_path, seconds=8, clock=clock)
    assert clock.now < 10
    assert found.read_bytes_per_s == pytest.approx(read, rel=0.06)
    assert found.write_bytes_per_s == pytest.approx(write, rel=0.06)
    assert found.both_bytes_per_s == pytest.approx(2 / (1 / read + 1 / write), rel=0.11)
    assert least_under_way <= found.request_bytes * found.depth <= max(4 * least_under_way, 1 << 20)
    assert found.seconds(read, 0) == pytest.approx(1, rel=0.06)
    assert found.seconds(0, write) == pytest.approx(1, rel=0.06)
    assert found.seconds(read, write) == pytest.approx(2, rel=0.11)
    if read > 1e9:  # more memory than a CPU's cache; a slow disk has no time for it, and is no faster with less
        assert max(made[0].memory) - min(made[0].memory) > 0.9 * speed.MEMORY
    filled = max(offset + nbytes for verb, offset, nbytes in made[0].visited if verb == "write")
    assert all(offset + nbytes <= filled for verb, offset, nbytes in made[0].visited)


def test_measurement_of_a_real_folder_leaves_no_files(tmp_path):
    found = speed.measure(tmp_path / "new", seconds=0.2)
    assert min(found.read_bytes_per_s, found.write_bytes_per_s, found.both_bytes_per_s) > 0
    assert found.request_bytes in speed.REQUESTS and found.depth in speed.DEPTHS
    assert found.file_system == mount_of(tmp_path).kind and 0 < found.free_bytes <= found.disk_bytes
    assert list((tmp_path / "new").iterdir()) == []


def test_measurement_without_time_or_space_raises(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="for 0 seconds: must be greater than 0"):
        speed.measure(tmp_path, seconds=0)
    monkeypatch.setattr(speed, "free_bytes", lambda folder: 20 << 20)
    assert speed.measure(tmp_path, seconds=0.1).free_bytes == 20 << 20, "what is little is enough to measure on"
    monkeypatch.setattr(speed, "free_bytes", lambda folder: 1 << 20)
    with pytest.raises(DiskError, match="1048576 bytes are free there, but the measurement needs 16777216"):
        speed.measure(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match=r"file is a file, but"):
        speed.measure(tmp_path / "file")
    with pytest.raises(DiskError, match=r"file/below: Not a directory .*Choose another folder"):
        speed.measure(tmp_path / "file" / "below")


def disk(**changed):
    rates = {"read_bytes_per_s": 4e9, "write_bytes_per_s": 1e9, "both_bytes_per_s": 2e9}
    shape = {"request_bytes": 1 << 20, "depth": 4, "free_bytes": 10**12, "disk_bytes": 2 * 10**12}
    stated = {"folder": Path("/nvme"), "file_system": "ext4", "is_direct": True, **rates, **shape}
    return speed.DiskSpeed(**{**stated, **changed})


def test_predicted_offload_cost_matches_the_documented_formula():
    """7B parameters with two fp32 moments: 56 GB read and written per step, 560 TB in 10,000 steps."""
    found = predict_load(disk(), Traffic.of_optimizer(7e9), step_s=20.0)
    assert found.traffic.written_bytes == found.traffic.room_bytes == 56 * 10**9
    assert found.disk_s == pytest.approx(56)
    assert (found.least_step_s, found.most_step_s) == pytest.approx((56, 76))
    assert found.written_in(10_000) == 560 * 10**12
    assert found.written_a_day == pytest.approx(56e9 * 86400 / 56)
    stated = "\n".join(found.lines(10_000))
    assert "560 TB in 10000 steps: 46.7% of the 1200 TB that a disk of 2 TB is likely to endure" in stated
    assert "86.4 TB a day" in stated and "56 s of the disk, for a step of 56 to 76 s" in stated
    of_sheet = predict_load(disk(), Traffic.of_optimizer(7e9), endurance_bytes=1.5e12).lines(10_000)
    assert of_sheet[-1].endswith("37333.3% of the 1.5 TB that its data sheet warrants")
    in_memory = predict_load(disk(file_system="tmpfs"), Traffic.of_optimizer(7e9)).lines(10_000)
    assert in_memory[-1] == "writes 560 TB in 10000 steps", "memory does not wear"


def test_traffic_is_additive_and_proportional_to_the_fraction():
    half = Traffic.of_optimizer(1e9, bytes_each=4, fraction=0.5)
    both = half + Traffic.of_activations(10**9, microbatches=3)
    assert (both.room_bytes, both.read_bytes, both.written_bytes) == (3 * 10**9, 5 * 10**9, 5 * 10**9)
    nothing = predict_load(disk(), Traffic.of_optimizer(0))
    assert nothing.disk_s == nothing.written_a_day == 0


def test_oversized_offload_raises_with_a_fraction_that_fits():
    with pytest.raises(DiskError, match=r"56000000000 bytes.*20000000000 are free.*Offload 0\.35 of it"):
        predict_load(disk(free_bytes=20 * 10**9), Traffic.of_optimizer(7e9))
    predict_load(disk(free_bytes=20 * 10**9), Traffic.of_optimizer(7e9, fraction=0.35))
    with pytest.raises(ConfigError, match="none of them may be negative"):
        predict_load(disk(), Traffic.of_optimizer(7e9), step_s=-1)


def test_suggested_fraction_is_rounded_down():
    for exponent in range(-80, 1):
        fraction = 10 ** (exponent / 10)
        assert 0.9 * fraction < float(floored(fraction)) <= fraction
    assert floored(-0.1) == floored(0.0) == "nothing"


def test_disk_command_reports_costs_and_rejects_invalid_options(tmp_path, capsys, monkeypatch):
    assert cli.main(["disk", str(tmp_path), "--parameters", "1e6", "--seconds", "0.2", "--steps", "500"]) == 0
    stated = capsys.readouterr().out
    assert "takes 0.008 GB" in stated and "0.004 TB in 500 steps" in stated
    for wrong, why in [
        ([], "FOLDER must be given"),
        ([str(tmp_path), "--fraction", "1.5"], "--fraction 1.5: must be from 0 to 1"),
        ([str(tmp_path), "--shards", "2"], "--shards 2: must be from 0 to 1"),
        ([str(tmp_path), "--steps", "0"], "must be 1 or more"),
        ([str(tmp_path), "--parameters", "-3"], "--parameters -3: must be from 0 to 1e18"),
        ([str(tmp_path), "--parameters", "1e308"], "--parameters 1e+308: must be from 0 to 1e18"),
        ([str(tmp_path), "--step-seconds", "-1"], "--step-seconds -1: must be from 0 to 1e18"),
        ([str(tmp_path), "--endurance", "0"], "--endurance 0: must be greater than 0"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr("fullshard.cli.disk.measure", None)  # options are checked before measuring
            assert cli.main(["disk", *wrong]) == 2
        assert why in capsys.readouterr().err
    argv = ["disk", str(tmp_path), "--seconds", "0.1", "--activations", "1e6"]
    assert cli.main([*argv, "--parameters", "1e15", "--fraction", "0.7"]) == 1
    [fits] = re.findall(r"Ask for --fraction (\S+),", capsys.readouterr().err)
    assert cli.main([*argv, "--parameters", "1e15", "--fraction", fits]) == 0
    assert cli.main([*argv, "--activations", "1e18"]) == 1
    assert "Ask for fewer --activations" in capsys.readouterr().err
    assert cli.main([*argv, "--parameters", "1e15", "--shards", "1"]) == 1
    assert "Ask for smaller --shards" in capsys.readouterr().err
    assert cli.main([*argv[:-2], "--parameters", "1e6", "--shards", "1", "--microbatches", "3"]) == 0
    stated = capsys.readouterr().out  # 8 MB of states, 4 of shards and 4 of gradients
    assert "takes 0.016 GB" in stated
    assert f"reads 0.0{8 + 4 * (2 * 3 + 1) + 4 * 3} GB and writes 0.0{8 + 4 + 4 * 3} GB" in stated


VIEWS = st.lists(
    st.tuples(st.just("narrow"), st.integers(0, 2), st.integers(0, 3), st.integers(1, 3))
    | st.tuples(st.just("select"), st.integers(0, 2), st.integers(0, 3), st.just(0))
    | st.tuples(st.just("transpose"), st.integers(0, 2), st.integers(0, 2), st.just(0))
    | st.tuples(st.just("flatten"), st.just(0), st.just(0), st.just(0))
    | st.tuples(st.just("dtype"), st.integers(0, 3), st.just(0), st.just(0)),
    max_size=4,
)


def view_of(tensor: torch.Tensor, views: list[tuple[str, int, int, int]]) -> torch.Tensor:
    """Return a view of `tensor` by those of `views` that it allows."""
    for kind, dim, start, size in views:
        if kind == "flatten" and tensor.is_contiguous():
            tensor = tensor.view(-1)
        elif kind == "transpose" and max(dim, start) < tensor.ndim:
            tensor = tensor.transpose(dim, start)
        elif kind == "narrow" and dim < tensor.ndim and start + size <= tensor.size(dim):
            tensor = tensor.narrow(dim, start, size)
        elif kind == "select" and dim < tensor.ndim and start < tensor.size(dim):
            tensor = tensor.select(dim, start)
        elif kind == "dtype" and tensor.ndim in (1, 2) and tensor.stride(-1) == 1:  # not of the full tensor
            dtype = (torch.uint8, torch.int16, torch.int32, torch.float32)[dim]
            if dtype.itemsize <= tensor.itemsize and not torch.is_inference_mode_enabled():
                tensor = tensor.view(dtype)
    return tensor


@given(
    VIEWS, st.lists(st.tuples(st.sampled_from(["mul_", "add_", "fill_"]), VIEWS), min_size=1, max_size=2), st.booleans()
)
def test_writes_to_views_reach_the_tensor_on_disk(tmp_path_factory, views, writes, inference):
    scratch = Scratch(tmp_path_factory.getbasetemp(), "views")
    values = torch.arange(60.0).view(3, 4, 5)
    stored = OnDisk(scratch.take(ALIGNMENT), 0, values.shape, values.dtype, values.device)
    stored.copy_(values)
    with torch.inference_mode(inference), torch.no_grad():
        for tensor in (values, stored):
            view = view_of(tensor, views)
            for write, more in writes:
                getattr(view_of(view, more), write)(3)
            assert_same(torch.as_tensor(view).clone(), view_of(values, views))
    assert_same(stored.fetch(), values)
