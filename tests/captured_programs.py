"""Random training programs around `fullshard.capture`, which must give the bits of the same programs without it."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from small_models import Chain, Layer, initialize, whole, wholes
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from fullshard import MixedPrecisionPolicy, clip_grad_norm_, fully_shard, summon_full_params

ACTIONS = (
    *("nothing",) * 6,
    *(
        "batch",
        "batch on one rank",
        "evaluate",
        "rate",
        "scheduler",
        "decay",
        "save",
        "load",
        "load states",
        "freeze",
        "thaw",
        "write",
    ),
    *("zero", "mode", "settings", "copy", "reset", "autocast", "divide", "backward", "buffer", "hook", "unshard"),
)


@dataclass(frozen=True)
class Program:
    """A step and what happens between its calls."""

    strategy: str
    actions: tuple[str, ...]
    microbatches: int = 1
    clips: bool = False
    precise: bool = True
    dropout: float = 0.0
    recomputes: bool = False
    frozen: bool = False
    keeps_unsharded: bool = False
    zeroes_first: bool = False
    to_none: bool = True
    optimizer: str = "adamw"
    broadcasts: bool = False


def random_program(seed: int) -> Program:
    rng = random.Random(seed)
    return Program(
        strategy=rng.choice(("ddp", "zero1", "zero2", "zero3", "zero3")),
        actions=tuple(rng.choice(ACTIONS) for _ in range(16)),
        microbatches=rng.choice((1, 1, 2, 3)),
        clips=rng.random() < 0.4,
        precise=rng.random() < 0.6,
        dropout=rng.choice((0.0, 0.0, 0.3)),
        recomputes=rng.random() < 0.3,
        frozen=rng.random() < 0.3,
        keeps_unsharded=rng.random() < 0.2,
        zeroes_first=rng.random() < 0.3,
        to_none=rng.random() < 0.8,
        optimizer=rng.choice(("adamw", "adamw", "adam", "sgd")),
        broadcasts=rng.random() < 0.5,
    )


class _Recomputed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        # Restoring random states needs the host. The layer draws no numbers.
        return checkpoint(self.layer, x, use_reentrant=False, preserve_rng_state=False)


class _Dropped(Layer):
    """A layer with dropout, a parameter without dims, a buffer that it reads and one that it writes."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("mean", torch.zeros(48))

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(super().forward(x))
        y = y * self.gain * self.scale.to(y.dtype)
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(y.float().mean(0), 0.1)
        return y - self.mean.to(y.dtype)


def _model(program: Program, device: torch.device) -> Any:
    layers: list[nn.Module] = [_Dropped(program.dropout) for _ in range(3)]
    if program.recomputes:
        layers[1] = _Recomputed(Layer())
    model = Chain(layers)
    initialize(model)
    if program.frozen:
        layers[0].requires_grad_(False)
        layers[2].get_parameter("up.weight").requires_grad_(False)
    policy = None if program.precise else MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    shard: Any = partial(
        fully_shard,
        strategy=program.strategy,
        broadcast_buffers=program.broadcasts,
        **({} if policy is None else {"mp_policy": policy}),
        **({"reshard_after_forward": False} if program.keeps_unsharded and program.strategy == "zero3" else {}),
    )
    model.to(device)
    for layer in model.layers:
        shard(layer)
    return shard(model)


def _optimizer(program: Program, model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [{"params": params[::2]}, {"params": params[1::2], "weight_decay": 0.03}]
    if program.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    kind = torch.optim.AdamW if program.optimizer == "adamw" else torch.optim.Adam
    made = kind(groups, lr=1e-2, fused=True, **({"capturable": True} if device.type == "cuda" else {}))
    for group in made.param_groups:
        group["lr"] = torch.tensor(1e-2, device=device)
    return made


def run(program: Program, capture: Callable[[Any, Any], Any] | None, device: torch.device) -> dict[str, Any]:
    """Run `program`, with its step captured if `capture` is given. Return losses, evaluations and weights."""
    torch.manual_seed(3)
    model = _model(program, device)
    optimizer = _optimizer(program, model, device)
    rate_in_tensor = isinstance(optimizer.param_groups[0]["lr"], Tensor)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def step(batches: Tensor) -> Tensor:
        total = torch.zeros((), device=device)
        if program.zeroes_first:
            optimizer.zero_grad(set_to_none=program.to_none)
        for number in range(program.microbatches):
            last = number == program.microbatches - 1
            with nullcontext() if last or program.keeps_unsharded else model.no_sync():
                loss = model(batches[number]).float().square().mean() / program.microbatches
                loss.backward()
            total = total + loss.detach()
        if program.clips:
            clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if not program.zeroes_first:
            optimizer.zero_grad(set_to_none=program.to_none)
        return total

    def batch(number: int, rows: int = 6) -> Tensor:
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        return torch.randn(program.microbatches, rows, 48, generator=generator).to(device)

    take = step if capture is None else capture(step, (batch(0),))
    values: list[Tensor] = []
    handles: list[Any] = []  # of hooks that other programs would call, too
    saved = {name: value.detach().clone() for name, value in model.state_dict().items()}
    states = None
    for number, action in enumerate((*("nothing",) * 4, *program.actions)):
        rows = 6
        if action == "batch":
            rows = 4
        elif action == "batch on one rank":
            rows = 4 + 2 * dist.get_rank()
        elif action == "evaluate":
            model.eval()
            with torch.no_grad():
                values.append(model(batch(100 + number)[0]).float().sum())
            model.train()
        elif action == "rate":
            for group in optimizer.param_groups:
                new = 0.01 / (1 + number)
                is_plain = capture is None and rate_in_tensor
                group["lr"] = torch.tensor(new, device=device) if is_plain else new
        elif action == "scheduler":
            scheduler.step()
        elif action == "decay":
            optimizer.param_groups[0]["weight_decay"] = 0.01 * number
        elif action == "save":
            saved = {name: value.detach().clone() for name, value in model.state_dict().items()}
            states = _copied(optimizer.state_dict())
        elif action == "load":
            model.load_state_dict(saved)
        elif action == "load states" and states is not None:
            optimizer.load_state_dict(states)
        elif action in ("freeze", "thaw"):
            model.layers[1].requires_grad_(action == "thaw")
        elif action == "write":
            with summon_full_params(model):
                model.head.weight.data.mul_(1.01)
        elif action == "zero":
            model.zero_grad()
        elif action == "mode":
            model.layers[0].train(not model.layers[0].training)
        elif action == "settings":
            model.layers[0].set_reshard_after_backward(number % 2 == 0)
        elif action == "divide":
            model.set_gradient_divide_factor(float(number))
        elif action == "buffer":
            model.layers[0].scale = torch.full((), 1 + 0.01 * number, device=device)
        elif action == "hook":
            model.head.register_forward_pre_hook(lambda module, args: (args[0] * 0.9,))
        elif action == "backward hook":
            model.head.register_full_backward_hook(lambda module, grads, _: (grads[0] * 0.9,))
        elif action == "gradient hook":
            model.head.weight.register_post_accumulate_grad_hook(_halve_gradient)
        elif action == "step hook":
            optimizer.register_step_pre_hook(lambda optimizer, *_: _halve_gradient(model.head.weight))
        elif action == "hook of all modules":
            handles.append(register_module_forward_pre_hook(partial(_smaller_input, model.head)))
        elif action == "hook of all optimizers":
            handles.append(register_optimizer_step_pre_hook(lambda *_: _halve_gradient(model.head.weight)))
        elif action == "unshard":
            model.layers[0].unshard()
        elif action == "backward":
            model(batch(100 + number)[0]).float().mean().backward()
        elif action == "copy":
            values.append(whole(model.head.weight))
        elif action == "reset" and capture is not None:
            take.reset()
        with torch.autocast(device.type, torch.bfloat16, enabled=action == "autocast"):
            values.append(take(batch(number, rows)).detach().clone())
    for handle in handles:
        handle.remove()
    return {"values": values, "weights": wholes(model)}


def _smaller_input(chosen: nn.Module, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    return (args[0] * 0.9,) if module is chosen else None


def _halve_gradient(param: Tensor) -> None:
    if param.grad is not None:
        param.grad.mul_(0.5)


def _copied(item: Any) -> Any:
    if isinstance(item, dict):
        return {name: _copied(value) for name, value in item.items()}
    if isinstance(item, list):
        return [_copied(value) for value in item]
    return item.detach().clone() if isinstance(item, Tensor) else item
