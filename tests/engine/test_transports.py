"""A transport that a user registers moves all data of its backend, on every device."""

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from shared_ranks import run_ranks as run_shared_ranks
from small_models import chain, inputs, take_step
from torch import Tensor

from fullshard import dry, fully_shard
from fullshard.comm.native import NativeCollectives
from fullshard.comm.routes import register_backend
from fullshard.comm.transport import PartSums
from fullshard.testing import assert_same, run_ranks

calls: Counter[str] = Counter()


class CountingCollectives(NativeCollectives):
    """Collectives of the backend that count their calls."""

    def all_gather(self, wholes: Sequence[Tensor], parts: Sequence[Tensor], tag: int) -> Callable[[], None]:
        calls["all_gather"] += 1
        return super().all_gather(wholes, parts, tag)

    def reduce_scatter(self, of: PartSums, tag: int) -> Callable[[], None]:
        calls["reduce_scatter"] += 1
        return super().reduce_scatter(of, tag)


def learn() -> list[Tensor]:
    model = chain(fully_shard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        take_step(optimizer, model(inputs(step)).square().mean())
    return [param.full_tensor().detach() for param in model.parameters()]


def learn_with(streams: str | None, registered: bool) -> tuple[list[Tensor], Counter[str]]:
    if registered:
        register_backend("gloo", CountingCollectives)
    dist.barrier()
    if streams is None:
        return learn(), calls
    with dry.taped(streams=streams, values=True):
        return learn(), calls


@pytest.mark.parametrize("streams", [None, "cpu", "gpu"])
def test_a_registered_transport_is_used_on_every_device(streams):
    expected, none = run_shared_ranks(2, learn_with, None, False)[0]
    assert not none
    for values, counts in run_ranks(2, learn_with, streams, True):
        assert_same(values, expected)
        assert counts["all_gather"] > 0 and counts["reduce_scatter"] > 0
