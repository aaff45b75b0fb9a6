"""Out-of-memory errors: where they occur, the largest tensors, and the page that the error names."""

import logging
import resource
from itertools import chain, repeat
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from logged import Logged
from torch import nn

from fullshard import fully_shard
from fullshard.plan.memory import State
from fullshard.report import recording, running_out
from fullshard.report.causes import find_causes, verdict
from fullshard.report.reading import read_run
from fullshard.report.recording import report
from fullshard.report.running_out import _BALLAST_NBYTES, Limit, _container, is_out_of_memory, requested_bytes
from fullshard.testing import run_ranks

MB = 1 << 20
WIDTH = 256


class Hungry(nn.Module):
    """A block that raises an allocator's error at a chosen forward, or allocates as much as the batch requires."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.forwards, self.last = 0, -1

    def forward(self, x):
        self.forwards += 1
        if self.forwards == self.last:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total of ...")
        return torch.relu(self.inner(x)).square().exp()


def train_until_it_raises(folder: Path, rows: list[int], last: int = -1) -> dict:
    """Return the notes of the error that ends the loop, and the record of the run at that time."""
    model = nn.Sequential(*(Hungry() for _ in range(4)))
    model[2].last = last
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    error = None
    try:
        with report(model, folder, optimizer=optimizer):
            for count in rows:
                model(torch.zeros(count, WIDTH)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    except RuntimeError as raised:
        error = raised
    run = read_run(folder)
    notes = [] if error is None else error.__notes__
    return {"notes": notes, "state": run.out_of_memory, "verdict": verdict(run, find_causes(run))}


def on_rank(folder: Path) -> dict[str, dict]:
    """Run all cases in one process, and return their results."""
    reported = {"planted": train_until_it_raises(folder / "planted", [8] * 6, last=5)}
    size = int(next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmSize" in line).split()[1])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size * 1024 + 400 * MB, before[1]))
    reported["limited"] = train_until_it_raises(folder / "limited", [8, 8, 8, 1_000_000])
    resource.setrlimit(resource.RLIMIT_AS, before)
    used = chain([0] * 40, repeat(99))
    limit = Limit(100, lambda: next(used), raises=False)
    with patch.object(running_out, "_limits", lambda device: [limit]), patch.object(running_out, "_LOOK_EVERY_S", 0.0):
        logged = Logged()
        logging.getLogger(recording.__name__).addHandler(logged)
        reported["near"] = {**train_until_it_raises(folder / "near", [8] * 6), "logged": logged.messages}
    return reported


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    return run_ranks(1, on_rank, tmp_path_factory.mktemp("out"))[0]


def test_allocator_error_names_the_page_and_the_largest_tensors(reported):
    """A failure in the fifth forward of a block reports that block, its phase, and the requested size."""
    state, (note,) = reported["planted"]["state"], reported["planted"]["notes"]
    assert (state.requested_bytes, state.where, state.rank) == (3 << 29, "2, forward", 0)
    assert sum(state.by_state.values()) > 0
    assert state.by_state[State.OPTIMIZER.value] >= 2 * 4 * WIDTH * (WIDTH + 1) * 4  # two moments of four blocks
    assert list(state.largest) == sorted(state.largest, key=lambda item: -item.nbytes)
    assert all(item.what in note for item in state.largest[:3])
    assert "planted" in note
    assert "ran out of memory in 2, forward" in reported["planted"]["verdict"]


def test_process_memory_limit_is_reported_with_used_bytes(reported):
    """The allocation fails where the loop creates a batch of a million rows."""
    state = reported["limited"]["state"]
    assert state.where == "the loop"
    assert state.requested_bytes == 1_000_000 * WIDTH * 4
    assert state.used_bytes <= state.limit_bytes < state.used_bytes + state.requested_bytes + _BALLAST_NBYTES
    assert reported["limited"]["notes"]


@pytest.mark.parametrize(
    ("message", "requested"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has", 20 * MB),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12", 4096),
        ("out of memory", None),
    ],
)
def test_requested_size_is_parsed_from_the_error_message(message, requested):
    assert requested_bytes(RuntimeError(message)) == requested


@pytest.mark.parametrize("error", [ValueError("can't allocate memory"), RuntimeError("shape mismatch"), KeyError()])
def test_other_errors_are_not_out_of_memory(error):
    assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    ("line", "folder", "files"),
    [
        ("0::/job", "job", {"memory.max": "1000", "memory.stat": "anon 600\nfile 5000\nshmem 40"}),
        (
            "4:memory:/job",
            "memory/job",
            {"memory.limit_in_bytes": "1000", "memory.stat": "rss 1\ntotal_rss 600\ntotal_shmem 40\ntotal_cache 5000"},
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_container_memory_excludes_pages_of_files(tmp_path, line, folder, files):
    """The kernel can drop pages of files, so they do not cause it to kill a process."""
    (tmp_path / folder).mkdir(parents=True)
    for name, content in files.items():
        (tmp_path / folder / name).write_text(content)
    (tmp_path / "of").write_text(f"1:name=systemd:/\n{line}\n")
    limit = _container(tmp_path, tmp_path / "of")
    assert (limit.nbytes, limit.used()) == (1000, 640)
    assert not limit.raises


def test_nearly_full_container_is_reported_once(reported):
    """The page is written while there is memory for it, and the run continues."""
    assert reported["near"]["notes"] == []
    assert reported["near"]["state"].used_bytes == 99
    assert sum("will soon run out of memory" in item for item in reported["near"]["logged"]) == 1
