"""Saving in the background: the state at the time of the call is saved, one save at a time, and errors are raised."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_new_ranks, same_on_all_ranks
from small_models import Chain, Layer, chain, inputs, take_step, whole
from torch import Tensor, nn

from fullshard import CheckpointError, fully_shard
from fullshard._dry_compat import storage_watch
from fullshard.checkpoint import async_save, container, latest, load, save, saving
from fullshard.checkpoint.background import Background
from fullshard.checkpoint.staging import HostMemory
from fullshard.testing import assert_same


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = chain(fully_shard, Chain([Layer(), Layer()]))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> list[Tensor]:
    losses = []
    for step in range(steps):
        losses.append(take_step(optimizer, model(inputs(step)).square().mean()))
    return losses


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    return [whole(tensor) for tensor in (*model.parameters(), *moments)]


class Gate:
    """Blocks the writers of this rank until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self._write = container._Stream.write
        container._Stream.write = lambda stream, data: self.opened.wait(30) and self._write(stream, data)


@pytest.mark.slow
@on_new_ranks(2)
def test_async_save_stores_state_at_the_time_of_the_call(tmp_path):
    model, optimizer = built()
    train(model, optimizer)
    expected, gate = everything(model, optimizer), Gate()
    pending = async_save(tmp_path, model=model, optimizer=optimizer, step=1)
    train(model, optimizer, 3)  # while the checkpoint is written
    assert not pending.done
    assert latest(tmp_path) is None
    gate.opened.set()
    assert pending.wait() == latest(tmp_path) == tmp_path / "step-000000001"
    assert pending.done
    model, optimizer = built()
    load(tmp_path, model=model, optimizer=optimizer)
    assert_same(everything(model, optimizer), expected)


@on_new_ranks(2)
def test_async_save_waits_for_the_previous_save(tmp_path):
    """Each save, and a load, wait for the previous save."""
    model, _ = built()
    gate = Gate()
    threading.Timer(0.2, gate.opened.set).start()
    first = async_save(tmp_path, model=model, step=1, keep=1)
    second = async_save(tmp_path, model=model, step=2, keep=1)
    assert first.done
    gate.opened.clear()
    threading.Timer(0.2, gate.opened.set).start()
    save(tmp_path, model=model, step=3, keep=2)
    assert second.done
    async_save(tmp_path, model=model, step=4, keep=2)
    assert load(tmp_path, model=model).step == 4
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000003", "step-000000004"]


@on_new_ranks(2)
def test_async_write_error_raises_once_on_every_rank(tmp_path):
    model, optimizer = built()
    save(tmp_path, model=model, step=1)
    write = container._Stream.write
    if dist.get_rank() == 1:

        def refuse(stream: Any, data: Any) -> int:
            raise OSError(28, "No space left on device")

        container._Stream.write = refuse
    stated = []
    async_save(tmp_path, model=model, step=2)
    train(model, optimizer)
    with pytest.raises(CheckpointError) as at_next:
        save(tmp_path, model=model, step=3)
    stated.append(str(at_next.value))
    pending = async_save(tmp_path, model=model, step=4)
    with pytest.raises(CheckpointError) as when_waited:
        pending.wait()
    stated.append(str(when_waited.value))
    container._Stream.write = write
    save(tmp_path, model=model, step=5)
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000001", "step-000000005"]
    first = same_on_all_ranks(stated)
    for step, stated in zip((2, 4), first, strict=True):
        assert f"saving step {step} to " in stated
        assert "rank 1: OSError: [Errno 28] No space left on device" in stated


@on_new_ranks(2)
def test_async_save_reuses_staging_memory(tmp_path):
    """The second save reuses the staging memory of the first."""
    model, optimizer = built()
    train(model, optimizer)
    nbytes = sum(tensor.to_local().nbytes for tensor in model.parameters())
    peaks, places = [], []
    for step in (1, 2):
        with storage_watch(every_operation=True) as watch:
            async_save(tmp_path, model=model, optimizer=optimizer, step=step).wait()
        peaks.append(watch.peak_bytes)
        places.append(
            {path: held.data_ptr() for path, held in saving._memory.get_or_make(None, HostMemory)._held.items()}
        )
    assert peaks[0] > 3 * nbytes  # parameters and both moments
    assert peaks[1] < nbytes
    assert places[0] == places[1]


@pytest.mark.slow
def test_error_of_unawaited_async_save_is_logged_at_exit():
    """The program ends while a save is in progress. Without the log at exit, the error of the save would be lost."""
    script = """
import sys
from fullshard import CheckpointError
from fullshard.checkpoint.background import Background
def fail():
    raise CheckpointError("the disk is full")
background = Background("saves")
pending = background.start(fail)
if sys.argv[1] == "waits":
    try:
        pending.wait()
    except CheckpointError:
        pass
"""
    for how, times in (("ends", 1), ("waits", 0)):
        ended = subprocess.run([sys.executable, "-c", script, how], capture_output=True, text=True, check=True)
        assert ended.stderr.count("the disk is full") == times, ended.stderr


def test_async_save_error_is_logged_on_garbage_collection(caplog):
    def fail() -> Path:
        raise CheckpointError("the disk is full")

    background = Background("saves")
    background.start(fail)
    background._writer.shutdown()
    assert not caplog.messages
    del background
    gc.collect()
    assert ["the disk is full" in message for message in caplog.messages] == [True]


def test_interrupted_wait_keeps_the_running_save(monkeypatch):
    """The next save must not start before the running one has ended, because both use the same memory."""
    begun, gate = threading.Event(), threading.Event()

    def write() -> Path:
        begun.set()
        gate.wait(30)
        raise CheckpointError("the disk is full")

    def interrupt(future: Any) -> None:
        raise KeyboardInterrupt

    background = Background("saves")
    pending = background.start(write)
    begun.wait(30)
    with monkeypatch.context() as patched:
        patched.setattr(Future, "result", interrupt)
        with pytest.raises(KeyboardInterrupt):
            background.wait()
    assert not pending.done
    gate.set()
    with pytest.raises(CheckpointError, match="the disk is full"):
        background.wait()
    assert pending.done
    background.wait()  # the error is raised once


def test_async_save_works_without_process_group(tmp_path):
    model = nn.Linear(3, 3)
    expected = model.weight.detach().clone()
    pending = async_save(tmp_path, model=model, step=1)
    with torch.no_grad():
        model.weight.zero_()
    pending.wait()
    load(tmp_path, model=model)
    assert_same(model.weight, expected)
