"""The seam to the accelerator, as far as it can be seen without one."""

from functools import partial

import pytest
import torch
from shared_ranks import on_ranks
from small_models import chain, inputs

from fullshard import dry, fully_shard
from fullshard.device import current
from fullshard.device.accelerator import Accelerator, StreamAccelerator, pretending
from fullshard.device.current import mark_here, usual_device_type
from fullshard.device.streams import DeviceStream
from fullshard.dry.streams import DryAccelerator
from fullshard.tape.tape import Recorded, Waited


class Capturing(StreamAccelerator):
    """One that records a graph, with streams that write on a tape."""

    is_capturing = True

    def __init__(self, tape: dry.Tape) -> None:
        self.streams = DryAccelerator(tape).streams


def test_a_graph_ends_after_the_gather_stream():
    tape = dry.Tape()
    Capturing(tape).end_pass()
    assert [type(entry) for entry in tape.entries] == [Recorded, Waited]
    assert [entry.stream for entry in tape.entries] == ["gather", "compute"]


class Noting(Accelerator):
    def __init__(self) -> None:
        self.passes = 0

    def end_pass(self) -> None:
        self.passes += 1


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@on_ranks(1)
def test_a_graph_may_end_after_each_forward_and_each_backward(strategy):
    accelerator, found = Noting(), []
    with pretending(accelerator):
        model = chain(partial(fully_shard, strategy=strategy))
        for _ in range(2):
            loss = model(inputs()).square().mean()
            found.append(accelerator.passes)
            loss.backward()
            found.append(accelerator.passes)
        with torch.no_grad():
            model(inputs())
        found.append(accelerator.passes)
    assert found == [1, 2, 3, 4, 5]


def test_each_use_of_a_stream_has_a_handle_of_its_own():
    """Up to torch 2.11 one handle cannot be entered twice, and any handle has one stream to go back to."""
    stream = DeviceStream.__new__(DeviceStream)
    stream._own = torch.Stream(stream_id=3, device_index=0, device_type=1)  # as torch.Stream(device) gives on a GPU
    one, other = stream.queueing(), stream.queueing()
    assert one is not other
    assert one == other == stream._own


def test_a_dry_run_is_on_the_cpu_of_a_machine_with_a_gpu(monkeypatch):
    monkeypatch.setattr(current, "_accelerator", lambda: torch.device("cuda"))  # which is looked up once
    assert usual_device_type() == "cuda"
    with dry.taped():
        assert usual_device_type() == "cpu"
        assert mark_here() is None
