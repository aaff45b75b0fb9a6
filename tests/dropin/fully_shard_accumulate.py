"""Manual gradient accumulation: reduce in the last microbatch only, keep parameters unsharded in between."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, UnshardHandle, fully_shard
from torch.distributed.tensor import DTensor


def build(offload):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 27), nn.GELU(), nn.Linear(27, 27), nn.GELU(), nn.Linear(27, 2))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, offload_policy=offload)
    return fully_shard(model, offload_policy=offload)


def fit(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for step in range(120):
        last = step % 4 == 3
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        model.set_is_last_backward(last)
        x = torch.randn(16, 10, generator=generator)
        loss = nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long())
        (loss / 4).backward()
        losses.append(loss.item())
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def main(folder):
    model = build(OffloadPolicy())
    losses = fit(model)
    assert fit(build(CPUOffloadPolicy(pin_memory=False))) == losses

    handle = model[0].unshard(async_op=True)
    assert isinstance(handle, UnshardHandle)
    handle.wait()
    assert not isinstance(model[0].weight, DTensor)
    assert model[0].weight.shape == (27, 10)
    model[0].reshard()
    assert isinstance(model[0].weight, DTensor)
    model.set_reshard_after_forward(False)
    with torch.no_grad():
        model(torch.randn(2, 10))
    model.reshard()
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(main("."))
