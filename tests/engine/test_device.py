"""The accelerator interface, as far as it can be tested without an accelerator."""

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
    """An accelerator that captures a graph, with streams that record on a tape."""

    is_capturing = True

    def __init__(self, tape: dry.Tape) -> None:
        self.streams = DryAccelerator(tape).streams


def test_graph_capture_ends_after_the_gather_stream():
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
def test_end_pass_is_called_after_each_forward_and_backward(strategy):
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


def test_device_stream_creates_a_new_handle_per_use():
    """Up to torch 2.11, one handle cannot be entered twice, and each handle stores only one stream to return to."""
    stream = DeviceStream.__new__(DeviceStream)
    stream._own = torch.Stream(stream_id=3, device_index=0, device_type=1)  # as torch.Stream(device) gives on a GPU
    one, other = stream.queueing(), stream.queueing()
    assert one is not other
    assert one == other == stream._own


def test_dry_run_uses_cpu_on_a_machine_with_gpu(monkeypatch):
    monkeypatch.setattr(current, "_accelerator", lambda: torch.device("cuda"))  # looked up only once
    assert usual_device_type() == "cuda"
    with dry.taped():
        assert usual_device_type() == "cpu"
        assert mark_here() is None
