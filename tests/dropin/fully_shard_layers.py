"""`fully_shard` on each layer and on the model, mixed precision, clipping, explicit prefetch, evaluation."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, vocabulary=13, width=20, layers=4):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def main(folder):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Model()
    bf16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(**bf16), reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**bf16, output_dtype=torch.float32))
    assert isinstance(model, FSDPModule)
    assert isinstance(model, Model)
    for param in model.parameters():
        assert isinstance(param, DTensor)
        assert param.placements == (Shard(0),)
        assert param.dtype == torch.float32

    for i, layer in enumerate(model.layers):
        layer.set_modules_to_forward_prefetch(list(model.layers[i + 1 : i + 3]))
        layer.set_modules_to_backward_prefetch(list(reversed(model.layers[max(0, i - 2) : i])))

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=False)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(25):
        tokens = torch.randint(13, (8, 10), generator=generator)
        logits = model(tokens)
        assert logits.dtype == torch.float32
        loss = F.cross_entropy(logits.flatten(0, 1), ((tokens * 3 + 1) % 13).flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert torch.isfinite(norm.full_tensor())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    model.eval()
    with torch.no_grad():
        accuracy = (model(tokens).argmax(-1) == (tokens * 3 + 1) % 13).float().mean()
    assert accuracy > 0.5
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(main("."))
