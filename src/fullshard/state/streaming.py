"""Full weights in buckets of bounded size, for an inference engine that runs alongside training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.comm.routes import collectives_for
from fullshard.engine.comparison import barrier
from fullshard.engine.hooks import check_idle
from fullshard.engine.late_params import LateParams
from fullshard.engine.managed import Managed, managed_by
from fullshard.engine.registry import clean_fqn, failing_together, units_in
from fullshard.engine.sharded_param import full_copy
from fullshard.errors import ConfigError, StateError
from fullshard.layout.offsets import align
from fullshard.policy.arguments import check_callable, check_type, is_number
from fullshard.policy.strategy import Placement
from fullshard.tape.recorder import Origin, Phase

_STEP = 256  # bytes: in a bucket, tensors start at multiples of this, which are aligned for every dtype


def stream_weights(
    model: nn.Module,
    *,
    bucket_bytes: int = 256 * 2**20,
    dtype: torch.dtype | None = None,
    rename: Callable[[str], str | None] | None = None,
    to_rank: int | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and full values of all weights of `model`, one bucket at a time, for inference engines.

    Every rank must call it and iterate to the end before training continues. Each bucket is one collective, which sends
    shards in `dtype`. A rank holds one bucket at a time, unless the caller keeps tensors of earlier buckets. A weight
    larger than `bucket_bytes` has a separate bucket. Weights that are sharded on a dim other than 0, or by tensor
    parallelism, need memory for one additional weight. With tensor parallelism, each weight takes one collective.
    Weights that need not be gathered may share the model's memory.

    Args:
        model: The model, sharded or not. Its parameters and persistent buffers are yielded with the names and in the
            order of the user's module. Tied weights are yielded once, with their first name.
        bucket_bytes: The bytes of full weights in `dtype` that are gathered together.
        dtype: The dtype of floating-point weights. None keeps their dtypes.
        rename: A function that returns a new name. If it returns None, the weight is not gathered.
        to_rank: The only global rank that gets weights. The other ranks must also call this function. If None, all
            ranks get weights.

    Raises:
        ConfigError: `bucket_bytes` is not a positive number, or two weights would have the same name.
        StateError: A unit is in forward or backward, or on the meta device; a weight is encoded by its class; or a
            trainable parameter was added after sharding.

    Example:
        ```python
        for name, weight in stream_weights(model, dtype=torch.bfloat16):
            engine.load_weights([(name, weight)])
        ```
    """
    check_type("model", model, nn.Module, "an nn.Module")
    if dtype is not None:
        check_type("dtype", dtype, torch.dtype, "a torch.dtype, or None")
    if rename is not None:
        check_callable("rename", rename, "a function of a name, or None")
    if to_rank is not None and (type(to_rank) is not int or to_rank < 0):
        raise ConfigError(f"stream_weights(to_rank={to_rank!r}): expected the number of a rank, or None.")
    if not is_number(bucket_bytes) or not bucket_bytes >= 1:
        raise ConfigError(f"stream_weights(bucket_bytes={bucket_bytes!r}): expected a positive number of bytes.")
    units = units_in(model)
    for unit in units:
        check_idle(unit, "streamed")
        unit.check_materialized()
        unit.residency.reshard()
        unit.check_replacements()
    LateParams(units).check()
    weights = _weights(model, dtype, rename or (lambda name: name))
    twice = [name for name, count in Counter(weight.name for weight in weights).items() if count > 1]
    if twice:
        raise ConfigError(
            f"stream_weights(rename=...): {len(twice)} names are used for several weights, such as {twice[0]!r}. "
            "Return a unique name for each weight, or None to skip it."
        )
    for name, value in ((weight.name, weight.managed.param) for weight in weights if weight.managed is not None):
        if value.is_encoded:
            raise StateError(
                f"stream_weights: {name} is a {type(value.local).__name__}, which encodes its values in several "
                "tensors and cannot be streamed. To skip it, return None for it from rename."
            )
    if units:
        barrier(units, "stream_weights")
    return _stream(weights, bucket_bytes, gives=to_rank is None or dist.get_rank() == to_rank)


@dataclass(frozen=True)
class _Weight:
    name: str
    value: Tensor
    dtype: torch.dtype
    managed: Managed | None  # None if nothing is gathered

    @property
    def part_nbytes(self) -> int:
        """Bytes of one rank's equal part when it is sent; 0 if there is nothing to gather."""
        return 0 if self.managed is None else self.managed.param.layout.spec.part_numel * self.dtype.itemsize

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks whose parts are gathered, not always those of the unit; None if there is nothing to gather."""
        return self.managed.param.axes.shard_group if self.managed is not None and self.part_nbytes else None

    @property
    def nbytes(self) -> int:
        """Bytes that the weight takes in a bucket."""
        return 0 if self.managed is None else align(self.managed.param.axes.shard_world * self.part_nbytes, _STEP)


def _weights(model: nn.Module, dtype: torch.dtype | None, rename: Callable[[str], str | None]) -> list[_Weight]:
    found: list[tuple[str, Tensor]] = list(model.named_parameters())
    for prefix, module in model.named_modules():
        kept = (
            (name, buffer) for name, buffer in module._buffers.items() if name not in module._non_persistent_buffers_set
        )
        found += [(f"{prefix}.{name}" if prefix else name, buffer) for name, buffer in kept if buffer is not None]
    weights = []
    for found_name, value in found:
        name = rename(clean_fqn(found_name))
        if name is not None:
            cast = value.dtype if dtype is None or not value.is_floating_point() else dtype
            weights.append(_Weight(name, value.detach(), cast, _to_gather(value)))
    return weights


def _to_gather(value: Tensor) -> Managed | None:
    managed = managed_by(value) if isinstance(value, nn.Parameter) else None
    if managed is None or managed.param.layout.spec.dim is None:
        return None
    return managed if managed.unit.options.placements.optimizer is Placement.SHARDED else None


def _stream(weights: Sequence[_Weight], bucket_bytes: int, *, gives: bool) -> Iterator[tuple[str, Tensor]]:
    for bucket in _buckets(weights, bucket_bytes):
        with failing_together([weight.managed.unit for weight in bucket if weight.managed is not None]):
            regions = _gathered(bucket)
        while regions:
            weight, region = bucket[-len(regions)], regions.pop(0)
            whole = _whole(weight, region)
            del region
            if gives:
                yield weight.name, whole
            del whole


def _buckets(weights: Sequence[_Weight], bucket_bytes: int) -> Iterator[list[_Weight]]:
    """Yield buckets of adjacent weights that are gathered over the same group, of at most `bucket_bytes`."""
    bucket: list[_Weight] = []
    over: dist.ProcessGroup | None = None
    nbytes = 0
    for weight in weights:
        group = weight.group or over
        if nbytes and (nbytes + weight.nbytes > bucket_bytes or group is not over):
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(weight)
        over, nbytes = group, nbytes + weight.nbytes
    yield bucket


@torch.no_grad()
def _gathered(bucket: Sequence[_Weight]) -> list[Tensor | None]:
    """Gather all ranks' parts of each weight, as contiguous bytes; None where there is nothing to gather."""
    units = [weight.managed.unit for weight in bucket if weight.managed is not None]
    if not units:
        return [None] * len(bucket)
    unit, group = units[0], next((weight.group for weight in bucket if weight.group is not None), None)
    memory = torch.empty(sum(weight.nbytes for weight in bucket), dtype=torch.uint8, device=unit.device)
    regions: list[Tensor | None] = []
    receive, send, start = [], [], 0
    for weight in bucket:
        if weight.managed is None:
            regions.append(None)
            continue
        part, shard = weight.part_nbytes, weight.managed.param.local
        axes = weight.managed.param.axes
        region = memory[start : start + axes.shard_world * part]
        own = region[axes.shard_rank * part : (axes.shard_rank + 1) * part]
        own[: shard.numel() * weight.dtype.itemsize].view(weight.dtype).view(shard.shape).copy_(shard)
        regions.append(region)
        if part:
            receive.append(region)
            send.append(own)
        start += weight.nbytes
    if group is None:
        return regions
    tensors = 2 ** (len(receive) - 1).bit_length()
    channel = collectives_for(group, unit.device).channel_for(f"stream_weights of up to {tensors}", tensors)
    channel.all_gather(receive, send, origin=Origin(unit.name, Phase.IDLE)).wait()
    return regions


@torch.no_grad()
def _whole(weight: _Weight, region: Tensor | None) -> Tensor:
    if weight.managed is None or region is None:
        value = full_copy(weight.value) if isinstance(weight.value, DTensor) else weight.value
        return value.to(weight.dtype)
    param = weight.managed.param
    spec = param.layout.spec
    flat = region.view(weight.dtype)
    if spec.dim == 0:
        local = flat[: spec.numel].view(spec.shape)
    else:
        assert spec.dim is not None
        parts = [
            flat[rank * spec.part_numel :][: spec.shard_numel(rank)].view(spec.shard_shape(rank))
            for rank in range(spec.world)
        ]
        local = torch.cat(parts, spec.dim)
    visited = param.view.make_unsharded(local)
    return full_copy(visited) if isinstance(visited, DTensor) else visited
