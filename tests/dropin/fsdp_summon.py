"""Full parameters: to initialize, to look at, to average, to change."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import always_wrap_policy


def init_weights(module):
    if isinstance(module, nn.Linear):
        torch.manual_seed(module.in_features)
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)


def main(folder):
    model = nn.Sequential(nn.Linear(5, 17), nn.Tanh(), nn.Linear(17, 1))
    shapes = [tuple(p.shape) for p in model.parameters()]
    model = FSDP(model, auto_wrap_policy=always_wrap_policy, use_orig_params=True)
    model.apply(init_weights)
    average = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(30):
        x = torch.randn(16, 5, generator=generator)
        loss = (model(x) - x[:, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        with FSDP.summon_full_params(model, writeback=False), torch.no_grad():
            for name, param in model.named_parameters():
                old = average.get(name, param)
                average[name] = 0.9 * old + 0.1 * param

    with FSDP.summon_full_params(model, rank0_only=True, writeback=False, offload_to_cpu=True):
        if dist.get_rank() == 0:
            assert [tuple(p.shape) for p in model.parameters()] == shapes
    with FSDP.summon_full_params(model, with_grads=True):
        assert all(p.grad.shape == p.shape for p in model.parameters())
    with FSDP.summon_full_params(model), torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(average[name])
    with FSDP.summon_full_params(model.module, recurse=True):
        assert torch.equal(model.module[0].weight, average["0.weight"])
    with torch.no_grad():
        x = torch.randn(64, 5, generator=generator)
        losses.append((model(x) - x[:, :1]).square().mean().item())
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(main("."))
