"""Recomputed layers, a generate() that needs full parameters, and a tied head."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(18, 40)
        self.down = nn.Linear(40, 18)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 18)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(18, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if i == 0 else layer(x)
        return self.head(x)

    @torch.no_grad()
    def generate(self, tokens, count):
        for _ in range(count):
            tokens = torch.cat([tokens, self.forward(tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens


def main(folder):
    torch.manual_seed(0)
    model = Model()
    model.layers[1] = checkpoint_wrapper(model.layers[1])
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    register_fsdp_forward_method(model, "generate")
    assert sum(isinstance(module, FSDPModule) for module in model.modules()) == 4
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(30):
        tokens = torch.randint(9, (16, 5), generator=generator)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), ((tokens + 1) % 9).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert model.head.weight is model.embed.weight
    assert model.generate(torch.tensor([[3]]), 4).shape == (1, 5)
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(main("."))
