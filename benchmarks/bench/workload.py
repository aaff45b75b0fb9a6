"""The training job: the same for every system, the plain process and the floor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.bench.model import Model, Shape

__all__ = ["DTYPES", "OPTIMIZERS", "OptimizerCall", "Workload"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class OptimizerCall:
    """A torch optimizer and its arguments other than the parameters."""

    kind: type[torch.optim.Optimizer]
    arguments: dict[str, Any]

    def __call__(self, params: Iterable[Tensor]) -> torch.optim.Optimizer:
        """Return the optimizer over `params`."""
        make: Callable[..., torch.optim.Optimizer] = self.kind
        return make(params, **self.arguments)


OPTIMIZERS = {
    "adamw": OptimizerCall(torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
    "adamw-default": OptimizerCall(torch.optim.AdamW, {"lr": 1e-3}),
    "sgd": OptimizerCall(torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training job. Weights and data depend only on the seed."""

    shape: Shape
    dtype: str = "fp32"  # of compute; stored parameters, gradient sums and the optimizer stay float32
    optimizer: str = "adamw"
    world: int
    threads: int = 1  # of each rank
    device_type: str = "cpu"
    seed: int = 0

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of compute and of gathers."""
        return DTYPES[self.dtype]

    @property
    def casts(self) -> bool:
        """True if compute and stored parameters have different dtypes."""
        return self.compute_dtype is not torch.float32

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step, over all ranks."""
        return self.world * self.shape.batch * self.shape.seq

    def device(self, rank: int) -> torch.device:
        """Return the device of `rank`."""
        return torch.device("cuda", rank) if self.device_type == "cuda" else torch.device("cpu")

    def model(self, device: torch.device) -> Model:
        """Return the model with its initial weights, in float32."""
        torch.manual_seed(self.seed)
        return Model(self.shape).to(device)

    def make_optimizer(self, params: Iterable[Tensor]) -> torch.optim.Optimizer:
        """Return the optimizer of all systems, over `params`."""
        return OPTIMIZERS[self.optimizer](params)

    def tokens(self, step: int, rank: int) -> Tensor:
        """Return the tokens of `rank` in `step`, on the CPU: shape (batch, seq + 1). The last is a target only."""
        random = torch.Generator().manual_seed((self.seed * 1_000_003 + step) * self.world + rank)
        return torch.randint(self.shape.vocab, (self.shape.batch, self.shape.seq + 1), generator=random)

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Return the mean loss per token, in float32."""
        scores = model(tokens[:, :-1])
        return F.cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def parameter_count(self) -> int:
        """Return the number of trained elements."""
        with torch.device("meta"):
            return sum(param.numel() for param in Model(self.shape).parameters())
