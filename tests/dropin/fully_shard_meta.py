"""Built on the meta device, sharded, then given memory and values; a whole checkpoint loaded shard by shard."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor


class Scale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(width))
        self.register_buffer("shift", torch.empty(width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.ones_(self.gain)
        nn.init.zeros_(self.shift)

    def forward(self, x):
        return x * self.gain + self.shift


def build():
    return nn.Sequential(nn.Linear(6, 21), Scale(21), nn.Tanh(), nn.Linear(21, 21), nn.Tanh(), nn.Linear(21, 1))


def shard(model):
    for module in model:
        if isinstance(module, nn.Linear):
            fully_shard(module)
    return fully_shard(model)


def fit(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(20):
        x = torch.randn(16, 6, generator=generator)
        loss = (model(x) - x[:, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(folder):
    torch.manual_seed(0)
    trained = build()

    with torch.device("meta"):
        model = build()
    shard(model)
    for tensor in (*model.parameters(), *model.buffers()):
        assert tensor.device == torch.device("meta")
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    state = {}
    for name, whole in trained.state_dict().items():
        like = model.get_parameter(name)
        state[name] = distribute_tensor(whole, like.device_mesh, like.placements)
    model.load_state_dict(state)
    losses = fit(model)

    # the checkpoint's own tensors become the parameters
    with torch.device("meta"):
        model = build()
    shard(model)
    meta = model.state_dict()
    state = {}
    for name, whole in trained.state_dict().items():
        part = distribute_tensor(whole, meta[name].device_mesh, meta[name].placements)
        state[name] = nn.Parameter(part)
    model.load_state_dict(state, strict=False, assign=True)
    model[1].shift = torch.zeros(21)
    assert fit(model) == losses
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(main("."))
