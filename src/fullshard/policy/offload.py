"""Memory of the shards, their gradients and so of the optimizer step: the device's, or the CPU's."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CPUOffload", "CPUOffloadPolicy", "OffloadPolicy"]


@dataclass(frozen=True)
class OffloadPolicy:
    """Everything stays on the device that computes."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards and their gradients live in CPU memory, and the optimizer steps there.

    A unit's shards are copied to the device before its gather, and its reduced gradients back. On a machine that
    computes on the CPU this is valid and changes nothing.

    Args:
        pin_memory: whether the CPU memory is page-locked, so that copies run beside compute.
    """

    pin_memory: bool = True


@dataclass(frozen=True)
class CPUOffload:
    """The same choice for `FullyShardedDataParallel`, spelled as in torch."""

    offload_params: bool = False

    @property
    def policy(self) -> OffloadPolicy:
        """The policy that this stands for."""
        return CPUOffloadPolicy() if self.offload_params else OffloadPolicy()
