"""Units chosen where the model is built, with wrap(), and a second strategy for one of them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import enable_wrap, wrap


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = wrap(nn.Linear(9, 33))
        self.between = nn.Sequential(nn.Tanh(), wrap(nn.Linear(33, 33)), nn.Tanh())
        self.last = wrap(nn.Linear(33, 1), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.last(self.between(self.first(x))) * self.scale


def main(folder):
    torch.manual_seed(0)
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, cpu_offload=CPUOffload(offload_params=False)):
        model = wrap(Regressor())
    assert isinstance(model, FullyShardedDataParallel)
    assert len(FullyShardedDataParallel.fsdp_modules(model)) == 4
    assert FullyShardedDataParallel.fsdp_modules(model, root_only=True) == [model]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(40):
        x = torch.randn(32, 9, generator=generator)
        loss = (model(x) - x[:, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        model.eval()
        model(torch.randn(4, 9))
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(main("."))
