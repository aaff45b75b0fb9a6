"""Parallelisms that divide the work of one data-parallel rank: pipeline, context, expert and tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.errors import ConfigError

TensorParallelPlan = Callable[[nn.Module], Mapping[str, Any]]
PlaceExperts = Callable[[nn.Module, DeviceMesh], Any]
CutContext = Callable[[Any], Sequence[tuple[Tensor, int]]]

SCHEDULES = {  # the stages per rank, by torch's name of the schedule
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # the first rank has the first and the last stage


@dataclass(frozen=True, kw_only=True)
class ParallelAxes:
    """Sizes of the axes other than data parallelism; 1 for an unused axis.

    Raises:
        ConfigError: A size is below 1.
    """

    pp: int = 1  # ranks with consecutive stages of the model
    cp: int = 1  # ranks with parts of the sequence
    ep: int = 1  # ranks with parts of the experts, a subset of the data and context ranks
    tp: int = 1  # ranks with parts of matrices

    def __post_init__(self) -> None:
        for name, size in self.sizes.items():
            if size < 1:
                raise ConfigError(f"{name}={size}: must be at least 1.")

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes by name."""
        return {"pp": self.pp, "cp": self.cp, "ep": self.ep, "tp": self.tp}

    @property
    def rounds(self) -> bool:
        """True if sums have a different order than in one process. Only a pipeline keeps that order."""
        return self.cp * self.ep * self.tp > 1

    def __str__(self) -> str:
        return ", ".join(f"{name}{size}" for name, size in self.sizes.items() if size > 1)


NO_AXES = ParallelAxes()


@dataclass(frozen=True, kw_only=True)
class Parallelism(ParallelAxes):
    """Parallelisms other than sharding, and functions that divide the model. See `docs/parity.md`.

    Args:
        pp: The number of stages of the pipeline.
        cp: The number of ranks that share each sequence.
        ep: The number of ranks that experts are distributed over.
        tp: The number of ranks that share each layer.
        blocks: The FQN of the `nn.ModuleList` (or `nn.Sequential`) that is divided into the stages of a pipeline.
        schedule: The name of the pipeline schedule in torch.
        context: `context(batch)` returns pairs of a tensor in the batch and its sequence dim. If None, all tensors with
            two or more dims are used, with dim 1.
        experts: `experts(model, mesh)` converts the experts' parameters to `DTensor`s on `mesh`, the axis `ep`, and
            makes the model exchange tokens.
        tp_plan: `tp_plan(model)` returns a plan for `torch.distributed.tensor.parallel.parallelize_module`. If None,
            the plan of a transformers model.

    Raises:
        ConfigError: A size is below 1 or lacks its required argument, or the schedule is unknown.
    """

    blocks: str | None = None
    schedule: str = "1F1B"
    context: CutContext | None = None
    experts: PlaceExperts | None = None
    tp_plan: TensorParallelPlan | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"schedule={self.schedule!r}: unknown. Choose one of {', '.join(SCHEDULES)}.")
        if self.pp > 1 and self.blocks is None:
            raise ConfigError(
                f"pp={self.pp}: pass the FQN of the list of blocks that is split into stages: blocks='model.layers' "
                "(--blocks model.layers)."
            )
        if self.ep > 1 and self.experts is None:
            raise ConfigError(
                f"ep={self.ep}: pass a function of the model and the mesh of the axis, which makes the parameters of "
                "experts DTensors on that mesh and exchanges tokens: experts=place (--experts my_model:place)."
            )

    @property
    def stages(self) -> int:
        """The number of pipeline stages."""
        return self.pp * SCHEDULES[self.schedule] if self.pp > 1 else 1
