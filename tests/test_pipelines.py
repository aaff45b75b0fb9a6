"""Pipelines of torch's with sharded stages: schedules that train, and those that are refused."""

import pytest
import torch
import torch.distributed as dist
from shared_ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from fullshard import fully_shard, testing

STAGES, WIDTH, BATCH = 4, 8, 8


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(STAGES))
    )


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)


def plain_grads() -> list[Tensor]:
    model, (x, target) = layers(), batch()
    for part, wanted in zip(x.chunk(4), target.chunk(4), strict=True):
        (nn.functional.mse_loss(model(part), wanted) / 4).backward()
    return [param.grad for param in model.parameters()]


def run_schedule(kind: type, per_rank: int) -> None:
    """Two ranks with stages; each is sharded over one rank of its own."""
    rank, count = dist.get_rank(), 2 * per_rank
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    whole, size = layers(), STAGES // count
    numbers = [rank + 2 * i for i in range(per_rank)]
    parts = [whole[number * size : (number + 1) * size] for number in numbers]
    for part in parts:
        for layer in part:
            fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
        fully_shard(part, mesh=mesh["dp"], reshard_after_forward=False)
    group = mesh.get_group("pp")
    stages = [
        PipelineStage(part, number, count, torch.device("cpu"), group=group)
        for part, number in zip(parts, numbers, strict=True)
    ]
    x, target = batch()
    schedule = kind(stages if per_rank > 1 else stages[0], n_microbatches=4, loss_fn=nn.functional.mse_loss)
    schedule.step(*([x] if rank == 0 else []), **({"target": target} if rank == 1 else {}))
    expected = list(zip(whole.named_parameters(), plain_grads(), strict=True))
    for part, number in zip(parts, numbers, strict=True):
        mine = [grad for (name, _), grad in expected if number * size <= int(name.split(".")[0]) < (number + 1) * size]
        testing.assert_same([param.grad.full_tensor() for param in part.parameters()], mine)


@pytest.mark.parametrize(("kind", "per_rank"), [(ScheduleGPipe, 1), (Schedule1F1B, 1), (ScheduleInterleaved1F1B, 2)])
def test_stages_get_the_gradients_of_one_process(kind, per_rank):
    run_ranks(2, run_schedule, kind, per_rank)


def test_a_backward_in_two_parts_is_refused():
    with pytest.raises(testing.RanksFailed, match="ScheduleInterleaved1F1B"):
        testing.run_ranks(2, run_schedule, ScheduleInterleavedZeroBubble, 2)


class Skipping(nn.Module):
    """A trained layer that some microbatches do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 1.0 if self.calls in (2, 3) else self.layer(x)


def drop_a_layer() -> None:
    group = dist.new_subgroups(1)[0]
    model = nn.Sequential(Skipping(), nn.Linear(WIDTH, WIDTH))
    for layer in model:
        fully_shard(layer)
    stage = PipelineStage(fully_shard(model), 0, 1, torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(stage, n_microbatches=1, loss_fn=lambda y, _: y.sum())
    for _ in range(4):
        schedule.step(torch.ones(2, WIDTH), target=torch.zeros(2))


def test_a_layer_may_be_dropped_in_a_stage():
    run_ranks(2, drop_a_layer)
