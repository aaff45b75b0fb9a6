"""What divides the work of a rank of data: stages, the sequence, experts, matrices; and the meshes of all this."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.errors import ConfigError

__all__ = [
    "NO_AXES",
    "SCHEDULES",
    "V_SHAPED",
    "Axes",
    "CutContext",
    "Parallelism",
    "PlaceExperts",
    "TensorParallelPlan",
]

TensorParallelPlan = Callable[[nn.Module], Mapping[str, Any]]
PlaceExperts = Callable[[nn.Module, DeviceMesh], Any]
CutContext = Callable[[Any], Sequence[tuple[Tensor, int]]]

SCHEDULES = {  # torch's, and how many stages a rank has
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # the first rank has the first stage and the last


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Sizes of the axes beside data parallelism; 1 where there is none.

    Raises:
        ConfigError: a size is below 1.
    """

    pp: int = 1  # ranks that have stages of the model one after the other
    cp: int = 1  # ranks that have parts of the sequence
    ep: int = 1  # ranks that have parts of the experts: among those of data and context, not beside them
    tp: int = 1  # ranks that have parts of matrices

    def __post_init__(self) -> None:
        for name, size in self.sizes.items():
            if size < 1:
                raise ConfigError(f"{name}={size}: must be at least 1.")

    @property
    def sizes(self) -> dict[str, int]:
        """By name."""
        return {"pp": self.pp, "cp": self.cp, "ep": self.ep, "tp": self.tp}

    @property
    def rounds(self) -> bool:
        """True if sums are taken in another order than one process takes them. A pipeline alone keeps that."""
        return self.cp * self.ep * self.tp > 1

    def __str__(self) -> str:
        return ", ".join(f"{name}{size}" for name, size in self.sizes.items() if size > 1)


NO_AXES = Axes()


@dataclass(frozen=True, kw_only=True)
class Parallelism(Axes):
    """Parallelisms beside sharding, and how the model is divided by them. For the functions see `docs/parity.md`.

    Args:
        blocks: the FQN of the `nn.ModuleList` (or `nn.Sequential`) that a pipeline's stages have parts of.
        schedule: torch's name for the order of a pipeline's microbatches.
        context: of a batch, its tensors that run along the sequence, each with that dim; all of two dims or more, along
            dim 1, if None.
        experts: called with the model and the mesh of the axis `ep`, makes `DTensor`s on it of the experts' parameters,
            and has tokens sent.
        tp_plan: of the model, a plan for `torch.distributed.tensor.parallel.parallelize_module`; the one that comes
            with a model of transformers, if None.

    Raises:
        ConfigError: a size is below 1, or says nothing without an argument that is missing.
    """

    blocks: str | None = None
    schedule: str = "1F1B"
    context: CutContext | None = None
    experts: PlaceExperts | None = None
    tp_plan: TensorParallelPlan | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"schedule={self.schedule!r}: unknown. Take one of {', '.join(SCHEDULES)}.")
        if self.pp > 1 and self.blocks is None:
            raise ConfigError(
                f"pp={self.pp}: name the list of blocks that stages have parts of, as the model has it: "
                "blocks='model.layers' (--blocks model.layers)."
            )
        if self.ep > 1 and self.experts is None:
            raise ConfigError(
                f"ep={self.ep}: name a function of the model and the mesh of the axis, which makes DTensors on that "
                "mesh of the experts' parameters and has tokens sent to them: experts=place (--experts my_model:place)."
            )

    @property
    def stages(self) -> int:
        """Of a pipeline."""
        return self.pp * SCHEDULES[self.schedule] if self.pp > 1 else 1
