"""A model too large to be built on every rank: on the meta device but for rank 0, or everywhere."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.gain = nn.Parameter(torch.empty(16))
        self.register_buffer("shift", torch.zeros(16))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.ones_(self.gain)
        nn.init.constant_(self.shift, 0.25)

    def forward(self, x):
        return torch.tanh(self.linear(x) * self.gain + self.shift)


def build():
    torch.manual_seed(dist.get_rank())
    return nn.Sequential(Layer(), Layer(), nn.Linear(16, 1))


def fit(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(25):
        x = torch.randn(16, 16, generator=generator)
        loss = (model(x) - x[:, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(folder):
    policy = ModuleWrapPolicy({Layer})
    if dist.get_rank() == 0:
        model, init = build(), None
    else:
        with torch.device("meta"):
            model = build()
        init = lambda module: module.to_empty(device=torch.device("cpu"), recurse=False)  # noqa: E731
    losses = fit(FSDP(model, auto_wrap_policy=policy, param_init_fn=init, sync_module_states=True))

    with torch.device("meta"):
        model = build()
    torch.manual_seed(0)
    model = FSDP(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))  # reset_parameters() of each module
    again = fit(model)
    assert again[-1] < again[0]
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(main("."))
