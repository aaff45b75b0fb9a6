"""`get_accelerator()`: what DeepSpeed scripts ask of the device that they run on, by its names."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from fullshard.device.current import current_device, usual_device_type
from fullshard.integrations.deepspeed.refused import MissingNameError

__all__ = ["Accelerator", "get_accelerator"]


@cache
def get_accelerator() -> Accelerator:
    """The accelerator of this process: always the same object."""
    return Accelerator()


class Accelerator:
    """The device on which models compute, by DeepSpeed's names. On a CPU there is one device, and no memory is counted.

    Names that are not here raise an error that says so, which is an `AttributeError` too.
    """

    def __getattr__(self, name: str) -> Any:
        """The function of that name of `torch.cuda`, `torch.xpu` or their like, or of `torch.cpu`."""
        found = getattr(getattr(torch, usual_device_type()), name, None)
        if found is None or name.startswith("_"):
            raise MissingNameError(
                f"get_accelerator().{name} has no counterpart: neither DeepSpeed's names that are here nor "
                f"torch.{usual_device_type()} have it. Call torch itself."
            )
        return found

    def device_name(self, device_index: int | None = None) -> str:
        """Such as "cuda:1", or "cpu"; without the number, if that is None."""
        kind = usual_device_type()
        return kind if device_index is None or kind == "cpu" else f"{kind}:{device_index}"

    def current_device(self) -> int:
        """The number of the present device; 0 on a CPU."""
        return current_device(usual_device_type()).index or 0

    def current_device_name(self) -> str:
        """The present device, by name."""
        return self.device_name(self.current_device())

    def device(self, device_index: int | None = None) -> Any:
        """A context in which `device_index` is the present device."""
        return torch.device(self.device_name(device_index))

    def set_device(self, device_index: int) -> None:
        """Make `device_index` the present device; a CPU has one only."""
        if usual_device_type() != "cpu":
            torch.accelerator.set_device_index(device_index)

    def device_count(self) -> int:
        """The number of devices; 1 on a CPU."""
        return 1 if usual_device_type() == "cpu" else torch.accelerator.device_count()

    def is_available(self) -> bool:
        """True: a CPU counts."""
        return True

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait until the device has done what it was given. A CPU has."""
        if usual_device_type() != "cpu":
            torch.accelerator.synchronize(device_index)

    def communication_backend_name(self) -> str:
        """The backend of the default process group, or that which `init_distributed` would choose."""
        return str(dist.get_backend()) if dist.is_initialized() else "gloo" if self.device_name() == "cpu" else "nccl"

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices."""
        torch.manual_seed(seed)

    manual_seed = manual_seed_all

    def is_bf16_supported(self) -> bool:
        """True on a CPU, and where torch says so."""
        return usual_device_type() != "cuda" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """True."""
        return True

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """True if `tensor` is on such a device."""
        return tensor.device.type == usual_device_type()

    def empty_cache(self) -> None:
        """Give cached memory back to the device. A CPU caches none."""
        if usual_device_type() == "cuda":
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes that tensors take on the device; 0 on a CPU."""
        return torch.cuda.memory_allocated(device_index) if usual_device_type() == "cuda" else 0

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most bytes that tensors have taken there; 0 on a CPU."""
        return torch.cuda.max_memory_allocated(device_index) if usual_device_type() == "cuda" else 0

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Start `max_memory_allocated` anew."""
        if usual_device_type() == "cuda":
            torch.cuda.reset_peak_memory_stats(device_index)
