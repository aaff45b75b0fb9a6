"""A slow disk is reported once, with its rates. The tests control the clock."""

import logging
from pathlib import Path
from threading import Thread

import pytest

from fullshard.disk.files import DiskFile, aligned_buffer
from fullshard.disk.pace import SLOWER, DiskPace, Moved, pace_of, paces


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def step(pace: DiskPace, clock: Clock, gb_per_s: float, nbytes: int = 10**9) -> None:
    """Run two concurrent requests, one read and one write of equal size, on an otherwise idle disk."""
    clock.now += 5.0
    with pace.moving(read_bytes=nbytes), pace.moving(written_bytes=nbytes):
        clock.now += 2 * nbytes / gb_per_s / 1e9
    pace.check()


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("slower", [1.0, 0.9 * SLOWER, 1.1 * SLOWER, 50.0])
def test_disk_slowdown_is_logged_once(caplog, measured, slower):
    clock = Clock()
    pace = DiskPace(Path("/nvme"), clock)
    with caplog.at_level(logging.WARNING):
        if measured:
            pace.expect(lambda read, written: (read + written) / 2e9)
        for _ in range(3):
            step(pace, clock, 2.0)
        step(pace, clock, 2.0 / slower)
        assert not caplog.records, "once may be anything"
        step(pace, clock, 2.0)
        step(pace, clock, 2.0 / slower)
        assert not caplog.records, "not in a row"
        for _ in range(5):
            step(pace, clock, 2.0 / slower)
    assert len(caplog.records) == (slower > SLOWER)
    for record in caplog.records:
        stated = record.getMessage()
        assert f"{2 / slower:.3g} GB/s now, 2 GB/s {'when it was measured' if measured else 'in the first'}" in stated
        assert f"takes {slower:.3g} s instead of 1 s" in stated


def test_disk_that_is_never_idle_is_not_logged_as_slow(caplog):
    """At least one request is pending at each check, for many steps."""
    clock = Clock()
    pace = DiskPace(Path("/nvme"), clock)
    before = pace.moving(written_bytes=10**9)
    before.__enter__()
    with caplog.at_level(logging.WARNING):
        for number in range(1, 10):
            after = pace.moving(written_bytes=10**9)
            after.__enter__()
            clock.now += 1.0
            before.__exit__(None, None, None)
            before = after
            assert (pace.total.busy_s, pace.total.written_bytes) == (number, number * 10**9)
            pace.check()
    before.__exit__(None, None, None)
    assert not caplog.records


def test_small_requests_are_not_logged_as_a_slow_disk(caplog):
    """Small requests have a fixed cost, however fast the disk serves large requests."""
    clock = Clock()
    pace = DiskPace(Path("/nvme"), clock)
    pace.expect(lambda read, written: (read + written) / 2e9)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            for _ in range(40):
                with pace.moving(read_bytes=1 << 16):
                    clock.now += 5e-4
            pace.check()
    assert not caplog.records


def test_bytes_moved_and_wait_time_are_counted(tmp_path, monkeypatch):
    clock = Clock()
    pace = pace_of(tmp_path)
    monkeypatch.setattr(pace, "clock", clock)
    file = DiskFile(tmp_path, "counted", 1 << 20)
    before, buffer = pace.total, aligned_buffer(1 << 20)
    assert pace in paces() and pace.held_bytes == 1 << 20
    file.write(0, buffer).wait()
    file.read(0, buffer[: 1 << 16]).wait()
    assert pace.total.since(before) == Moved(1 << 16, 1 << 20)
    with pace.waiting():
        clock.now += 3
    assert pace.total.since(before).waited_s == 3
    file.close()
    assert pace.held_bytes == 0 and pace not in paces()


def test_garbage_collection_frees_a_file_while_pace_lock_is_held(tmp_path):
    pace, files = pace_of(tmp_path), [DiskFile(tmp_path, "dropped", 1 << 20)]

    def collect() -> None:
        with pace._lock:
            files.clear()

    thread = Thread(target=collect, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive() and pace.held_bytes == 0
