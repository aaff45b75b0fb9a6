"""Gradient norm, clipping, and the scaling of fp16 losses."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from fullshard.comm.routes import collectives_for
from fullshard.device.accelerator import accelerator_for
from fullshard.device.current import usual_device_type
from fullshard.engine.managed import in_model_order
from fullshard.errors import ConfigError
from fullshard.layout.shard_spec import choose_spec
from fullshard.optim.before_step import point_to_shards
from fullshard.policy.arguments import check_flags, check_iterable, check_type, is_number
from fullshard.tape.recorder import Origin, Phase, acting_for

_DEVICE = attrgetter("device")
_NORM = Origin("gradient norm", Phase.STEP)
_OVERFLOW = Origin("overflow check", Phase.STEP)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients down so that their total norm is at most `max_norm`, and return the norm before scaling.

    Every rank gets the same number, and at one world size the same bits under every strategy: the norm is computed for
    each rank's shard of each gradient, even if the rank has the whole gradient, and combined in rank order. The order
    of `parameters` does not matter, and may differ between ranks.

    Args:
        parameters: sharded parameters, plain ones, or both. Every rank must pass the same parameters.
        max_norm: the maximum norm.
        norm_type: the p of the p-norm; `math.inf` for the largest magnitude.
        error_if_nonfinite: whether to raise if the norm is infinite or not a number.

    Returns:
        The norm, 0-dim, float32 or wider.

    Raises:
        ConfigError: `max_norm` or `norm_type` is not a positive number.
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
    """
    if not isinstance(parameters, Tensor):
        check_iterable("parameters", parameters, "parameters, such as model.parameters()")
    check_flags(error_if_nonfinite=error_if_nonfinite)
    numbers = all(is_number(item) or isinstance(item, Tensor) for item in (norm_type, max_norm))
    if not numbers or not norm_type > 0 or not max_norm >= 0:
        raise ConfigError(f"clip_grad_norm_(max_norm={max_norm}, norm_type={norm_type}): both must be positive.")
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for param in params:
        if not isinstance(param, Tensor):
            check_type("parameters", param, Tensor, "parameters, such as model.parameters()")
    params = in_model_order(params)
    grads = [param.grad for param in params if param.grad is not None]
    with acting_for(_NORM):
        norm = total_norm(grads, norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"the total gradient norm of order {norm_type} is {norm.item()}, so nothing was clipped")
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for local in _by_memory(_locals(grads)).values():
        torch._foreach_mul_(local, accelerator_for(norm.device).alongside(coefficient, local[0]))
    return norm


@torch.no_grad()
def total_norm(grads: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the p-norm of all `grads` together, like `clip_grad_norm_`. The order must be the same on every rank."""
    if not grads:
        return torch.tensor(0.0)
    counted: list[Tensor] = []  # the part of each gradient that this rank counts
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
    norms = _norms(counted, norm_type)
    for (mesh, axes), indices in spread.items():
        combined = _stacked([norms[i] for i in indices], torch.device(mesh.device_type))
        for axis in axes:
            combined = _combined(combined, mesh, axis, norm_type)
        for i, norm in zip(indices, combined, strict=True):
            norms[i] = norm
    device = norms[0].device
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), norm_type)
    return total


def _norms(values: Sequence[Tensor], norm_type: float) -> list[Tensor]:
    """Return the norm of each of `values`, 0-dim, 0 if it is empty, in float32 or wider, since float16 squares
    overflow.

    On a GPU, the norms of all tensors of a dtype take a few kernels.
    """
    norms: list[Tensor] = [torch.empty(0)] * len(values)
    together: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(values):
        if tensor.numel():
            together.setdefault((tensor.device, tensor.dtype), []).append(i)
        else:
            norms[i] = tensor.new_zeros((), dtype=torch.promote_types(tensor.dtype, torch.float32))
    for (_, dtype), indices in together.items():
        wide = torch.promote_types(dtype, torch.float32)
        found = torch._foreach_norm([values[i] for i in indices], norm_type, dtype=wide)
        for i, norm in zip(indices, found, strict=True):
            norms[i] = norm
    return norms


class _Part:
    """The part of gradients with the same placements that this rank counts in a norm.

    On the last axis, the shard axis, the part is the shard, cut out of the gradient if the gradient is whole.

    Args:
        mesh: The mesh of the gradients.
        placements: Their placements. Partial ones are those of a parameter that no unit has.
    """

    def __init__(self, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
        last = mesh.ndim - 1
        self._summed = tuple(Replicate() if placement.is_partial() else placement for placement in placements)
        whole = [placement.is_replicate() for placement in self._summed]
        self._mesh, self._last, self._is_whole, self._is_summed = mesh, last, whole[last], self._summed == placements
        self.axes = (last, *(axis for axis in range(last) if not whole[axis]))
        """The axes of the mesh over which the parts differ."""
        self.is_local = self._is_summed and not whole[last]
        """True if the part is the local tensor."""

    def of(self, grad: DTensor) -> Tensor:
        """Return the part of `grad`."""
        local: Tensor = (grad if self._is_summed else grad.redistribute(placements=self._summed))._local_tensor
        if not self._is_whole:
            return local
        return part_of_rank(local, self._mesh.size(self._last), self._mesh.get_local_rank(self._last))


def part_of_rank(whole: Tensor, world: int, rank: int) -> Tensor:
    """Return the shard of the gradient `whole` on `rank` of `world`; empty for a scalar on all ranks but the first."""
    spec = choose_spec(whole.shape, world)
    if spec.dim is None:  # a scalar, which every rank has: it counts once
        return whole if rank == 0 else whole.new_empty(0)
    span = spec.span(rank)
    return whole.narrow(
        spec.dim, span.start, len(span)
    ).contiguous()  # as the shard is: a norm's bits follow the strides


def _stacked(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """Stack `norms` in one tensor: in their common memory, or else in the memory of `device`."""
    places = _by_memory(norms)
    if len(places) == 1:
        return torch.stack(list(norms))
    brought: dict[int, Tensor] = {}
    for same in places.values():  # one copy for all
        moved = accelerator_for(device).to_device(torch.stack(same), device)
        brought.update(zip(map(id, same), moved, strict=True))
    return torch.stack([brought[id(norm)] for norm in norms])


def _combined(own: Tensor, mesh: DeviceMesh, axis: int, norm_type: float) -> Tensor:
    """Return the norm over an axis of `mesh` of each of the norms in `own`, 1-D with one element per gradient."""
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
    if len(devices) == 1 and not accelerator_for(*devices).is_dry:  # usually all are in one
        return {devices.pop(): [*tensors]}
    found: dict[Hashable, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(accelerator_for(tensor.device).memory_of(tensor), []).append(tensor)
    return found


class ShardedGradScaler(torch.amp.GradScaler):
    """Scales fp16 losses, and skips a step on every rank when any rank's shard of a gradient overflowed.

    Takes the arguments of `torch.amp.GradScaler` (`device` is the type of the present one, if None), and the process
    group over which ranks agree (all ranks, if None).

    Args:
        device: The type of the device, such as `"cuda"`. If None, the type of the present accelerator.
        init_scale: The scale of the first step.
        growth_factor: The factor of the scale after `growth_interval` steps without overflow.
        backoff_factor: The factor of the scale after an overflow.
        growth_interval: The number of steps without overflow before the scale grows.
        enabled: False to scale nothing.
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
