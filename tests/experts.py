"""A small mixture of experts that sends tokens to the ranks that have their experts, and the same in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

WIDTH, HIDDEN, EXPERTS, TOKENS = 16, 24, 4, 12


class AllToAll(torch.autograd.Function):
    """Rows for every rank of a group against rows from every rank; gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.splits = sent, received, group
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, group = ctx.splits
        back = grad.new_empty(sum(sent), *grad.shape[1:])
        dist.all_to_all_single(back, grad.contiguous(), sent, received, group=group)
        return back, None, None, None


def local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


class Experts(nn.Module):
    """A perceptron an expert. It takes tokens in the order of their experts, and how many each of them has."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, WIDTH, HIDDEN) * 0.2)
        self.down = nn.Parameter(torch.randn(experts, HIDDEN, WIDTH) * 0.2)

    def forward(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        up, down = local(self.up), local(self.down)
        parts = [(part @ up[i]).relu() @ down[i] for i, part in enumerate(tokens.split(list(counts)))]
        return torch.cat(parts)


class MoE(nn.Module):
    """Each token goes to the expert that the router finds best. `group`: the ranks that have the experts together."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.experts = Experts(experts)
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weight, chosen = self.router(y).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=self.router.out_features)
        run = self.experts if self.group is None else self._elsewhere
        out = run(y[order], counts.tolist())
        return x + torch.zeros_like(x).index_copy(0, order, out) * weight[:, None]

    def _elsewhere(self, tokens: Tensor, counts: list[int]) -> Tensor:
        group = self.group
        world = dist.get_world_size(group)
        each = torch.tensor(counts).view(world, -1)  # tokens for every expert of every rank
        peer = torch.empty_like(each)
        dist.all_to_all_single(peer, each, group=group)
        sent, received = each.sum(1).tolist(), peer.sum(1).tolist()
        arrived = AllToAll.apply(tokens, sent, received, group)
        # From rank by rank to expert by expert, where each expert's tokens are in the order of ranks.
        of = torch.arange(peer.shape[1]).repeat(world).repeat_interleave(peer.flatten())
        order = of.argsort(stable=True)
        out = self.experts(arrived[order], peer.sum(0).tolist())
        back = torch.empty_like(out).index_copy(0, order, out)
        return AllToAll.apply(back, received, sent, group)


class Model(nn.Module):
    """Two mixtures between dense layers."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(MoE(experts) for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def model_of(experts: int = EXPERTS) -> Model:
    """Return a new model, with the same weights on every call."""
    torch.manual_seed(0)
    return Model(experts)


def expert_mesh(efsdp: int = 2, ep: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (efsdp, ep), mesh_dim_names=("efsdp", "ep"))


def place(model: Model, mesh: DeviceMesh) -> Model:
    """Give every rank of the axis `ep` its experts."""
    for block in model.blocks:
        experts = block.experts
        for name, weight in list(experts.named_parameters()):
            placed = distribute_tensor(weight.detach(), mesh["ep"], [Shard(0)])
            setattr(experts, name, nn.Parameter(placed))
        block.group = mesh.get_group("ep")
    return model


def is_expert(name: str) -> bool:
    return "experts." in name


def tokens_of(step: int, rank: int) -> Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    return model(tokens).square().mean()


def whole_grads(model: nn.Module) -> dict[str, Tensor]:
    found = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad.clone() for name, grad in found.items()}


def wholes(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    return {name: item.full_tensor() if isinstance(item, DTensor) else item.clone() for name, item in state.items()}


def summed(terms: Sequence[Tensor]) -> Tensor:
    """Return the sum of `terms`, in order."""
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


class InOneProcess:
    """The model in one process, with gradients summed in the same order as across ranks: dense terms by rank,
    those of experts by the ranks that have the same ones. For that the model is copied, once for each term.

    Args:
        plain: the model.
        efsdp: how many ranks have the same experts.
        ep: how many ranks have them together.
        replicas: how many replicas there are, within which sums are taken first.
    """

    def __init__(self, plain: Model, efsdp: int, ep: int, replicas: int = 1) -> None:
        self.efsdp, self.ep, self.replicas = efsdp, ep, replicas
        self.plain = plain
        self._dense = [deepcopy(plain) for _ in range(efsdp * ep)]
        self._experts = [deepcopy(plain) for _ in range(efsdp)]

    def backward(self, batches: Sequence[Tensor]) -> None:
        """Let the plain model have the gradients of the mean of the losses of `batches`, one a rank."""
        for copied in (*self._dense, *self._experts):
            copied.load_state_dict(self.plain.state_dict())
            copied.zero_grad()
        xs = [model.first(batch) for model, batch in zip(self._dense, batches, strict=True)]
        for layer in range(len(self.plain.blocks)):
            mixtures = [model.blocks[layer] for model in self._dense]
            xs = [
                x
                for i in range(self.efsdp)
                for x in self._mixture(
                    mixtures[i * self.ep :][: self.ep],
                    self._experts[i].blocks[layer].experts,
                    xs[i * self.ep :][: self.ep],
                )
            ]
        losses = [model.last(x).square().mean() for model, x in zip(self._dense, xs, strict=True)]
        torch.autograd.backward(losses)
        for name, param in self.plain.named_parameters():
            copies = self._experts if is_expert(name) else self._dense
            grads = [copy.get_parameter(name).grad for copy in copies]
            each = len(grads) // self.replicas
            sums = [summed(grads[i * each :][:each]) for i in range(self.replicas)]
            param.grad = summed(sums) / len(self._dense)

    @staticmethod
    def _mixture(mixtures: Sequence[MoE], experts: Experts, xs: Sequence[Tensor]) -> list[Tensor]:
        """Compute the outputs of the ranks that share `experts`, one tensor per rank."""
        routed = []
        for mixture, x in zip(mixtures, xs, strict=True):
            y = mixture.norm(x)
            weight, chosen = mixture.router(y).softmax(-1).max(-1)
            routed.append((y, weight, chosen))
        all_chosen = torch.cat([chosen for _, _, chosen in routed])
        order = all_chosen.argsort(stable=True)
        tokens = torch.cat([y for y, _, _ in routed])[order]
        out = experts(tokens, all_chosen.bincount(minlength=len(experts.up)).tolist())
        back = torch.zeros_like(out).index_copy(0, order, out).split([len(x) for x in xs])
        return [x + output * weight[:, None] for x, output, (_, weight, _) in zip(xs, back, routed, strict=True)]
