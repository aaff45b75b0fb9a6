"""The whole state of a run, and optimizers with states of every kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from small_models import batch, gathered, loss_of, wholes
from torch import Tensor, nn

from fullshard.state.optim_state import sharded_optim_state_dict


class Position:
    """A position in the data, with any state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters and states whole, and the options of each parameter."""
    named = sharded_optim_state_dict(model, optimizer)
    states = {f"{fqn} {name}": item for fqn, of_fqn in named["state"].items() for name, item in of_fqn.items()}
    options = {
        fqn: {name: value for name, value in group.items() if name != "params"}
        for group in named["param_groups"]
        for fqn in group["params"]
    }
    return {"params": wholes(model), "states": gathered(states), "options": options}


class RowScaled(torch.optim.Optimizer):
    """Keeps states with other shapes than the parameter's, also in a nested dict, and a number that counts."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step(param, param.grad, group["lr"])

    def _step(self, param: Tensor, grad: Tensor, lr: float) -> None:
        state = self.state[param]
        if not state:
            state["calls"] = torch.tensor(0.0)
            state["moments"] = {"first": torch.zeros_like(param), "history": [torch.zeros_like(param)]}
            if param.ndim > 1 and param.numel():
                state["rows"] = param.new_zeros((param.shape[0], *[1] * (param.ndim - 1)))
        state["calls"] += 1
        first = state["moments"]["first"].mul_(0.9).add_(grad)
        state["moments"]["history"][0].copy_(grad)
        if param.ndim > 1 and param.numel():
            rows = grad.abs().amax(dim=tuple(range(1, grad.ndim)), keepdim=True)
            state["rows"].mul_(0.5).add_(rows)
            first = first.clone().div_(1 + state["rows"])
        param.add_(first, alpha=-lr / (1 + 0.1 * state["calls"].item()))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": partial(torch.optim.Adam, lr=1e-2),
    "AdamW, amsgrad": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    "SGD": partial(torch.optim.SGD, lr=0.05),
    "SGD, momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "NAdam": partial(torch.optim.NAdam, lr=1e-2),  # a scalar state that is not a step count
    "ASGD": partial(torch.optim.ASGD, lr=1e-2),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1),  # has state before any step
    "RowScaled": RowScaled,
}


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    """Return losses of some steps. Every rank has the same batch, so that one process alone can be compared with."""
    losses = []
    for step in steps:
        loss = loss_of(model, batch(step, sequences=4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses
