"""Fine-tuning with a frozen trunk, adapters as separate units, an ignored head and batch norm in full precision."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    _or_policy,
    lambda_auto_wrap_policy,
    transformer_auto_wrap_policy,
)


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(12, 12)
        self.adapter = nn.Sequential(nn.Linear(12, 3, bias=False), nn.Linear(3, 12, bias=False))
        self.trunk.requires_grad_(False)

    def forward(self, x):
        return torch.relu(self.trunk(x) + self.adapter(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Adapted(), nn.BatchNorm1d(12), Adapted())
        self.head = nn.Linear(12, 2)

    def forward(self, x):
        return self.head(self.layers(x).float())


def is_trained_leaf(module):
    return (
        not list(module.named_children())
        and getattr(module, "weight", None) is not None
        and (module.weight.requires_grad)
    )


def fit(model):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(40):
        x = torch.randn(32, 12, generator=generator)
        loss = nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long())
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.module.head.parameters():  # synchronize the ignored head manually
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(folder):
    by_class = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Adapted})
    by_hand = functools.partial(lambda_auto_wrap_policy, lambda_fn=is_trained_leaf)
    policy = functools.partial(_or_policy, policies=[by_class, by_hand])
    torch.manual_seed(0)
    plain = Model()
    model = FSDP(
        plain,
        auto_wrap_policy=policy,
        ignored_modules=[plain.head],
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True),
        use_orig_params=True,
    )
    frozen = model.module.layers[0].trunk.weight.full_tensor().clone()
    losses = fit(model)
    assert torch.equal(frozen, model.module.layers[0].trunk.weight.full_tensor())
    assert isinstance(model.module.layers[1], FSDP)

    by_rule = CustomPolicy(lambda module: isinstance(module, Adapted) and {"forward_prefetch": True})
    torch.manual_seed(0)
    plain = Model()
    model = FSDP(plain, auto_wrap_policy=by_rule, ignored_states=[*plain.head.parameters()])
    again = fit(model)
    assert again[-1] < again[0]
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(main("."))
