"""`get_accelerator()`: properties and functions of the device that a script runs on, under DeepSpeed's names."""

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
    """Return the accelerator of this process, always the same object."""
    return Accelerator()


class Accelerator:
    """The compute device, with DeepSpeed's interface. A CPU counts as one device, and its memory is reported as 0.

    Names that are not supported raise a descriptive error, which is also an `AttributeError`.
    """

    def __getattr__(self, name: str) -> Any:
        """Return the function of that name from `torch.cuda`, `torch.xpu` or similar modules, or from `torch.cpu`."""
        found = getattr(getattr(torch, usual_device_type()), name, None)
        if found is None or name.startswith("_"):
            raise MissingNameError(
                f"get_accelerator().{name} is not supported: it is neither one of the supported names nor a function "
                f"of torch.{usual_device_type()}. Call torch directly."
            )
        return found

    def device_name(self, device_index: int | None = None) -> str:
        """Return a name such as "cuda:1" or "cpu"; without the index if `device_index` is None."""
        kind = usual_device_type()
        return kind if device_index is None or kind == "cpu" else f"{kind}:{device_index}"

    def current_device(self) -> int:
        """Return the index of the current device; 0 on a CPU."""
        return current_device(usual_device_type()).index or 0

    def current_device_name(self) -> str:
        """Return the name of the current device."""
        return self.device_name(self.current_device())

    def device(self, device_index: int | None = None) -> Any:
        """Context manager within which `device_index` is the current device. A CPU has only one."""
        kind = usual_device_type()
        return torch.device(kind) if kind == "cpu" else torch.get_device_module(kind).device(device_index)

    def set_device(self, device_index: int) -> None:
        """Make `device_index` the current device. A CPU has only one."""
        if usual_device_type() != "cpu":
            torch.accelerator.set_device_index(device_index)

    def device_count(self) -> int:
        """Return the number of devices; 1 on a CPU."""
        return 1 if usual_device_type() == "cpu" else torch.accelerator.device_count()

    def is_available(self) -> bool:
        """Return True: a CPU counts as a device."""
        return True

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait until the device has completed its work. A CPU has no pending work."""
        if usual_device_type() != "cpu":
            torch.accelerator.synchronize(device_index)

    def communication_backend_name(self) -> str:
        """Return the backend of the default process group, or the one that `init_distributed` would choose."""
        return str(dist.get_backend()) if dist.is_initialized() else "gloo" if self.device_name() == "cpu" else "nccl"

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices."""
        torch.manual_seed(seed)

    manual_seed = manual_seed_all

    def is_bf16_supported(self) -> bool:
        """Return True if the device supports bfloat16, as a CPU does."""
        return usual_device_type() != "cuda" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Return True."""
        return True

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return True if `tensor` is on a device of this type."""
        return tensor.device.type == usual_device_type()

    def empty_cache(self) -> None:
        """Return cached memory to the device. A CPU has no cache."""
        if usual_device_type() == "cuda":
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the bytes of tensors on the device; 0 on a CPU."""
        return torch.cuda.memory_allocated(device_index) if usual_device_type() == "cuda" else 0

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the peak bytes of tensors on the device; 0 on a CPU."""
        return torch.cuda.max_memory_allocated(device_index) if usual_device_type() == "cuda" else 0

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Reset `max_memory_allocated`."""
        if usual_device_type() == "cuda":
            torch.cuda.reset_peak_memory_stats(device_index)
