"""Gradient norms, gradient clipping, and loss scaling for fp16."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from math import inf
from operator import attrgetter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from fullshard.comm.routes import collectives_for
from fullshard.device.accelerator import accelerator_for
from fullshard.device.current import usual_device_type
from fullshard.engine.managed import managed_by, sorted_with_entries
from fullshard.engine.registry import failing_together
from fullshard.errors import ConfigError
from fullshard.layout.shard_spec import choose_spec
from fullshard.optim.before_step import point_to_shards
from fullshard.policy.arguments import check_flags, check_iterable, check_type, is_number
from fullshard.tape.recorder import Origin, Phase, acting_for

_DEVICE = attrgetter("device")
_ROW = 16384  # elements of an offloaded gradient whose norm one thread computes
_NORM = Origin("gradient norm", Phase.STEP)
_OVERFLOW = Origin("overflow check", Phase.STEP)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients down so that their total norm is at most `max_norm`, and return the norm before scaling.

    Every rank gets the same norm. For a given mesh, its bits do not depend on the strategy: the norm is computed
    for each rank's shard of each gradient, even if the rank has the full gradient, and combined in rank order. The
    order of `parameters` does not matter, and may differ between ranks.

    Args:
        parameters: Sharded parameters, plain ones, or both. Every rank must pass the same parameters.
        max_norm: The maximum norm.
        norm_type: The order of the norm. `math.inf` or "inf" selects the largest magnitude.
        error_if_nonfinite: Whether to raise if the norm is infinite or NaN.

    Returns:
        The norm before scaling, a 0-dim tensor in float32 or a wider dtype.

    Raises:
        ConfigError: `max_norm` is not a number of 0 or more, or `norm_type` is not a positive number.
        RuntimeError: The norm is not finite and `error_if_nonfinite` is set.
    """
    if not isinstance(parameters, Tensor):
        check_iterable("parameters", parameters, "parameters, such as model.parameters()")
    check_flags(error_if_nonfinite=error_if_nonfinite)
    order = inf if norm_type == "inf" else cast(float, norm_type)
    numbers = all(is_number(item) or isinstance(item, Tensor) for item in (order, max_norm))
    if not numbers or not order > 0 or not max_norm >= 0:
        raise ConfigError(
            f"clip_grad_norm_(max_norm={max_norm!r}, norm_type={norm_type!r}): both must be positive numbers."
        )
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for param in params:
        if not isinstance(param, Tensor):
            check_type("parameters", param, Tensor, "parameters, such as model.parameters()")
    params, entries = sorted_with_entries([_current(param) if param.grad is None else param for param in params])
    grads = [param.grad for param in params if param.grad is not None]
    units = list(dict.fromkeys([managed.unit for managed in entries]))
    with acting_for(_NORM), failing_together(units):
        norm = total_norm(grads, order)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"the total gradient norm of order {norm_type} is {norm.item()}, so nothing was clipped")
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    with failing_together(units):
        for local in _by_memory(_locals(grads)).values():
            torch._foreach_mul_(local, accelerator_for(norm.device).alongside(coefficient, local[0]))
    return norm


def _current(param: Tensor) -> Tensor:
    """Return the sharded parameter if `param` is its original from before sharding, as in an optimizer made earlier."""
    return managed.param.sharded if (managed := managed_by(param)) and param is managed.source() else param


@torch.no_grad()
def total_norm(grads: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the total norm of `grads`, as `clip_grad_norm_` does. Their order must be identical on all ranks."""
    if not grads:
        return torch.tensor(0.0)
    counted: list[Tensor] = []  # the slice of each gradient whose norm this rank computes
    parts: dict[tuple[int, tuple[Placement, ...]], tuple[_Part, list[int]]] = {}  # by mesh and placements
    spread: dict[tuple[DeviceMesh, tuple[int, ...]], list[int]] = {}
    for i, grad in enumerate(grads):
        if isinstance(grad, DTensor):
            spec = grad._spec  # properties of a DTensor are slow, and so is the hash of a mesh
            known = parts.get((id(spec.mesh), spec.placements))
            if known is None:
                part = _Part(spec.mesh, spec.placements)
                known = part, spread.setdefault((spec.mesh, part.axes), [])
                parts[id(spec.mesh), spec.placements] = known
            part, indices = known
            indices.append(i)
            counted.append(grad._local_tensor if part.is_local else part.of(grad))
        else:
            counted.append(grad)
    norms = _norms(counted, norm_type, offloaded=any(mesh.device_type != "cpu" for mesh, _ in spread))
    for (mesh, axes), indices in spread.items():
        combined = _stacked([norms[i] for i in indices], torch.device(mesh.device_type))
        for axis in axes:
            combined = _combined(combined, mesh, axis, norm_type)
        for i, norm in zip(indices, combined, strict=True):
            norms[i] = norm
    device = norms[0].device
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), norm_type)
    return total


def _norms(values: Sequence[Tensor], norm_type: float, *, offloaded: bool = False) -> list[Tensor]:
    """Return the norm of each of `values`, 0-dim, in float32 or wider. The norm of an empty tensor is 0.

    Squares of float16 numbers would overflow. On a GPU, the norms of all tensors of one dtype take a few kernels.

    Args:
        values: the tensors.
        norm_type: the order of the norm.
        offloaded: whether values on the CPU are offloaded from a GPU. All threads then compute their norms, because the
            GPU waits for them. The rounding differs from that of `torch.linalg.vector_norm` of the whole tensor.
    """
    norms: list[Tensor] = [torch.empty(0)] * len(values)
    together: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(values):
        if tensor.numel():
            together.setdefault((tensor.device, tensor.dtype), []).append(i)
        else:
            norms[i] = tensor.new_zeros((), dtype=torch.promote_types(tensor.dtype, torch.float32).to_real())
    for (device, dtype), indices in together.items():
        wide = torch.promote_types(dtype, torch.float32)
        if offloaded and device.type == "cpu":
            found = tuple(_norm_by_rows(values[i], norm_type, wide) for i in indices)
        else:
            found = torch._foreach_norm([values[i] for i in indices], norm_type, dtype=wide)
        for i, norm in zip(indices, found, strict=True):
            norms[i] = norm
    return norms


class _Part:
    """The part of gradients with equal placements whose norm this rank computes.

    On the last axis, the shard axis, the part is the shard, even if the gradient is replicated.

    Args:
        mesh: The mesh of the gradients.
        placements: Their placements. They may be `Partial` for parameters outside of units.
    """

    def __init__(self, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
        last = mesh.ndim - 1
        self._summed = tuple(Replicate() if placement.is_partial() else placement for placement in placements)
        whole = [placement.is_replicate() for placement in self._summed]
        self._mesh, self._last, self._is_whole, self._is_summed = mesh, last, whole[last], self._summed == placements
        self.axes = (last, *(axis for axis in range(last) if not whole[axis]))
        """The axes of the mesh along which the parts differ."""
        self.is_local = self._is_summed and not whole[last]
        """True if the part is the local tensor."""

    def of(self, grad: DTensor) -> Tensor:
        """Return this rank's part of `grad`."""
        local: Tensor = (grad if self._is_summed else grad.redistribute(placements=self._summed))._local_tensor
        if not self._is_whole:
            return local
        return part_of_rank(local, self._mesh.size(self._last), self._mesh.get_local_rank(self._last))


def part_of_rank(whole: Tensor, world: int, rank: int) -> Tensor:
    """Return the shard of `whole` on `rank` of `world`. The shard of a scalar is empty, except on rank 0."""
    spec = choose_spec(whole.shape, world)
    if spec.dim is None:  # every rank has a scalar, which counts once
        return whole if rank == 0 else whole.new_empty(0)
    span = spec.span(rank)
    # The bits of a norm depend on the strides, and shards are contiguous.
    return whole.narrow(spec.dim, span.start, len(span)).contiguous()


def _norm_by_rows(values: Tensor, norm_type: float, dtype: torch.dtype) -> Tensor:
    """Return the norm of a CPU tensor, computed from the norms of its rows. Threads divide rows among themselves.

    A norm of all elements at once is computed by one thread (torch 2.13). The result does not depend on the number of
    threads.
    """
    flat = values.reshape(-1)
    rows = flat.numel() // _ROW
    whole, rest = flat[: rows * _ROW].view(rows, _ROW), flat[rows * _ROW :]
    parts = [torch.linalg.vector_norm(whole, norm_type, dim=1, dtype=dtype)]
    if rest.numel():  # the maximum of an empty tensor is an error
        parts.append(torch.linalg.vector_norm(rest, norm_type, dtype=dtype).view(1))
    total: Tensor = torch.linalg.vector_norm(torch.cat(parts), norm_type)
    return total


def _stacked(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """Stack `norms` in one tensor. If they are in different memory, move them to `device`."""
    places = _by_memory(norms)
    if len(places) == 1:
        return torch.stack(list(norms))
    brought: dict[int, Tensor] = {}
    for same in places.values():  # one copy for all
        moved = accelerator_for(device).to_device(torch.stack(same), device)
        brought.update(zip(map(id, same), moved, strict=True))
    return torch.stack([brought[id(norm)] for norm in norms])


def _combined(own: Tensor, mesh: DeviceMesh, axis: int, norm_type: float) -> Tensor:
    """Combine the norms in `own`, 1-D with one element per gradient, over an axis of `mesh`."""
    device = torch.device(mesh.device_type)
    gathered = collectives_for(mesh.get_group(axis), device).gather_rows(
        accelerator_for(device).to_device(own, device), origin=_NORM
    )
    combined: Tensor = torch.linalg.vector_norm(gathered, norm_type, dim=0)
    return combined


def _locals(grads: Sequence[Tensor]) -> list[Tensor]:
    return [grad._local_tensor if isinstance(grad, DTensor) else grad for grad in grads]


def _by_memory(tensors: Sequence[Tensor]) -> dict[Hashable, list[Tensor]]:
    """Group `tensors` by their memory."""
    devices = {*map(_DEVICE, tensors)}
    if len(devices) == 1 and not accelerator_for(*devices).is_dry:
        return {devices.pop(): [*tensors]}
    found: dict[Hashable, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(accelerator_for(tensor.device).memory_of(tensor), []).append(tensor)
    return found


class ShardedGradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` for sharded gradients. All ranks skip a step if a gradient shard of any rank overflows.

    Args:
        device: The type of the device, such as `"cuda"`. If None, the type of the current accelerator.
        init_scale: The scale of the first step.
        growth_factor: The factor that multiplies the scale after `growth_interval` steps without overflow.
        backoff_factor: The factor that multiplies the scale after an overflow.
        growth_interval: The number of steps without overflow before the scale grows.
        enabled: Whether to scale losses and gradients.
        process_group: The ranks that skip a step together. If None, all ranks.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            device or usual_device_type(), init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._group = process_group

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        point_to_shards(optimizer)
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        found: dict[torch.device, Tensor] = {}
        for local in _by_memory(_locals(grads)).values():
            device = local[0].device
            flag = found.setdefault(device, found_inf.to(device, copy=True))
            torch._amp_foreach_non_finite_check_and_unscale_(local, flag, inv_scale.to(device))
        worst = max([flag.to(found_inf.device) for flag in found.values()], default=found_inf)
        worst = worst.clone()
        group = self._group or dist.distributed_c10d._get_default_group()
        collectives_for(group, worst.device).combine(worst, dist.ReduceOp.MAX, origin=_OVERFLOW)
        return {device: worst.to(device) for device in found or {found_inf.device: worst}}
