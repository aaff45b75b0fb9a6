"""The gradients of a parameter group between autograd and the optimizer.

Unsharded gradients stay in `param.grad`, or are held here until the reduction of a later microbatch. A reduction
returns this rank's shards in one buffer. Later steps reuse the buffer, unless allocating a new one is cheap.

[Note: when a step is over]
Unsharded parameters that are kept must be gathered again after every step. Every step of a `torch.optim.Optimizer` adds
to the versions of the shards that it updates (`optim/local_steps.py` does it for fused kernels), and so does every
in-place operation on a parameter. A script can also update `param.data`, which does not change any version. Therefore
parameters are gathered again as long as there is a gradient whose shard still has the version it had when the gradient
was delivered: a script may have used this gradient at any time. After an optimizer step the versions differ, whether
`zero_grad` has removed gradients or filled them with zeros.

The microbatch count restarts under the same conditions. It also restarts if gradients were written to since their
delivery, as by `zero_grad(set_to_none=False)` after a step that a gradient scaler skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard._compat import dtensors_like, holders, starts_of, storage_holders
from fullshard.device.accelerator import accelerator_for, is_capturing
from fullshard.engine.findings import DiskFailures
from fullshard.engine.group_plan import GroupPlan
from fullshard.engine.sharded_param import ShardedParam
from fullshard.layout.offsets import contiguous_strides
from fullshard.tape.recorder import allocating

_SHARDED, _DTYPE = attrgetter("sharded"), attrgetter("dtype")

_CAST_AT_ONCE = 2**27
"""Bytes of gradients that one kernel casts on an accelerator. A larger limit uses more memory and is not faster."""


@dataclass
class GradientState:
    """Gradients of earlier microbatches, and all state that is kept when a group moves to other memory."""

    whole: dict[int, Tensor] = field(default_factory=dict)  # not reduced yet, in the reduce dtype, by parameter
    first_sums: dict[int, Tensor] = field(default_factory=dict)  # not yet summed over the second level, by parameter
    may_have_stepped: bool = False
    delivered: list[tuple[int, int]] = field(default_factory=list)  # versions of each shard and gradient at delivery
    is_replayed: bool = False  # a CUDA graph writes the gradients, so a step may run without any Python code
    written_by_graphs: list[Tensor | None] = field(default_factory=list)  # kept alive: replays write to them


class Gradients:
    """The gradients of a group."""

    failures: DiskFailures | None = None  # of the disk that stores them

    def __init__(self, plan: GroupPlan, params: Sequence[ShardedParam], state: GradientState) -> None:
        self.plan = plan
        self._has_streams = accelerator_for(plan.device).has_streams
        self.params = params
        self.state = state
        self.flat: Tensor | None = None  # the optimizer's gradients, contiguous like the shards
        self._shards: list[DTensor] = []  # as the optimizer sees them, one per parameter
        self._starts: list[Tensor] = []  # the result of `starts_of` for their local tensors
        self._holders: Any = None  # the result of `holders` for them, without references of other code
        self._flat_holders: Any = None  # the result of `storage_holders` for `flat`, without references of other code
        shapes = [param_layout.spec.shard_shape(plan.rank) for param_layout in plan.layout.params]
        starts = [param_layout.shard_offset for param_layout in plan.layout.params]
        self._regions = [slice(start, start + prod(shape)) for start, shape in zip(starts, shapes, strict=True)]
        self._strided = [(shape, contiguous_strides(shape), start) for shape, start in zip(shapes, starts, strict=True)]

    # -- unsharded gradients -------------------------------------------------------------------------------------------

    def take(self) -> dict[int, Tensor]:
        """Remove and return the unsharded gradients, including those held from earlier microbatches, by parameter.

        They are contiguous and in the reduce dtype, except for gradients that the pack's kernel casts.
        """
        grads: dict[int, Tensor] = {}
        waiting: dict[int, Tensor] = {}  # to be cast together
        nbytes, at_once = 0, _CAST_AT_ONCE if self._has_streams else 0
        reduce = self.plan.contract.reduce
        for i, param in enumerate(self.params):
            unsharded = param.unsharded
            if (grad := unsharded.grad) is None:
                continue
            unsharded.grad = None
            if param.view.changes_grad:
                grad = param.view.local_grad(grad)
            if grad.layout is not torch.strided:
                grad = grad.to_dense()
            if grad.dtype is reduce or self._is_cast_by_pack(i):
                grads[i] = grad if grad.is_contiguous() else grad.contiguous()
                continue
            grads[i] = waiting[i] = grad
            nbytes += grad.nbytes
            del grad
            if nbytes >= at_once:
                self._cast(waiting, grads)
                nbytes = 0
        if waiting:
            self._cast(waiting, grads)
        if self.state.whole:
            for i in range(len(self.params)):
                if (held := self.state.whole.pop(i, None)) is not None:
                    grads[i] = held.add_(grads[i]) if i in grads else held
        return grads

    def _is_cast_by_pack(self, i: int) -> bool:
        """Return True if the kernel that writes the pack's message also casts the gradient of parameter `i`."""
        contract, placed = self.plan.contract, self.plan.layout.params[i].in_place
        is_cast = (contract.compute, contract.reduce, contract.grad) == (torch.bfloat16, torch.float32, None)
        packs = not placed and is_cast and self.plan.shards_optimizer
        return packs and self._has_streams

    def _cast(self, waiting: dict[int, Tensor], grads: dict[int, Tensor]) -> None:
        """Move the gradients in `waiting` to `grads`, contiguous and in the reduce dtype."""
        reduce = self.plan.contract.reduce
        odd = [i for i, grad in waiting.items() if grad.dtype is not reduce]
        if len(odd) > 1 or any(self._padding(i) for i in odd):
            cast = self._empty_grads(odd)
            torch._foreach_copy_(cast, [waiting.pop(i) for i in odd])
            grads.update(zip(odd, cast, strict=True))
        for i, grad in waiting.items():
            grads[i] = grad.to(reduce).contiguous()
        waiting.clear()

    def _empty_grads(self, indices: Sequence[int]) -> list[Tensor]:
        """Return memory for unsharded gradients, each followed by zeros for the rows that the last shards lack."""
        plan, dtype = self.plan, self.plan.contract.reduce
        wholes, tails = list[Tensor](), list[Tensor]()
        for i in indices:
            spec, padding = plan.layout.params[i].spec, self._padding(i)
            if padding:
                flat = torch.empty(spec.numel + padding, dtype=dtype, device=plan.device)
                tails.append(flat[spec.numel :])
                wholes.append(flat[: spec.numel].view(spec.shape))
            else:
                wholes.append(torch.empty(spec.shape, dtype=dtype, device=plan.device))
        if tails:
            torch._foreach_zero_(tails)
        return wholes

    def _padding(self, i: int) -> int:
        """Return the elements of padding that make all shards of parameter `i` equal, if reduced in place."""
        placed = self.plan.layout.params[i]
        return placed.spec.part_numel * self.plan.layout.world - placed.spec.numel if placed.in_place else 0

    def hold(self) -> None:
        """Keep the unsharded gradients of this microbatch for a later reduction, in the dtype of the reduction."""
        if self.plan.contract.reduce == self.plan.contract.compute or self.plan.contract.grad is not None:
            return  # autograd accumulates in `param.grad`
        grads = self.take()
        self._cast(dict(grads), grads)
        self.state.whole.update(grads)

    def drop(self) -> None:
        """Drop the unsharded gradients that no reduction has taken."""
        self.state.whole.clear()
        for param in self.params:
            param.unsharded.grad = None

    def missing(self, grads: dict[int, Tensor]) -> str:
        """Return text that names the parameters without a gradient in `grads`; empty if all have one."""
        names = [param.fqn for i, param in enumerate(self.params) if i not in grads]
        return f"without {', '.join(names)}" if names else ""

    def fill_missing(self, grads: dict[int, Tensor]) -> None:
        """Add zeros for every trainable parameter without a gradient in `grads`."""
        for i, param in enumerate(self.params):
            if param.unsharded.requires_grad and i not in grads:
                grads[i] = self.zeros(i)

    def zeros(self, i: int) -> Tensor:
        """Return an unsharded gradient of zeros for parameter `i`."""
        plan = self.plan
        return torch.zeros(plan.layout.params[i].spec.shape, dtype=plan.contract.reduce, device=plan.device)

    # -- what the optimizer sees --------------------------------------------------------------------------------------

    def new_shards(self) -> Tensor:
        """Return a buffer for the gradient shards: that of the last step, unless other code still refers to it."""
        flat = self.flat
        if flat is None or self._is_referenced_elsewhere(flat):
            with allocating("gradient shards"):
                flat = self.flat = self._new_flat()
            start = flat.storage_offset()
            shards = [flat.as_strided(shape, strides, start + offset) for shape, strides, offset in self._strided]
            sharded = [*map(_SHARDED, self.params)]
            if {*map(_DTYPE, sharded)} == {flat.dtype}:
                if not self._starts or (self._starts[0].dtype, self._starts[0].device) != (flat.dtype, flat.device):
                    self._starts = starts_of(shards)
                self._shards = dtensors_like(shards, sharded, self._starts)
            else:
                self._shards = [param.placed(shard) for param, shard in zip(self.params, shards, strict=True)]
            del shards
            self._holders = holders(self._shards)
            self._flat_holders = storage_holders(flat)
        return flat

    def _new_flat(self) -> Tensor:
        """Allocate memory for gradient shards. It is zeroed if later steps reuse it. Padding is never read."""
        plan, numel = self.plan, self.plan.layout.shard_numel
        if self._is_handed_over:
            return torch.empty(numel, dtype=plan.contract.delivered, device=plan.device)
        return plan.memory.zeros(numel, plan.contract.delivered)

    @property
    def _is_handed_over(self) -> bool:
        """True if the buffer is used for a single step, because allocation is cheap and no CUDA graph refers to it."""
        plan = self.plan
        return self._has_streams and not (plan.memory.offloaded or is_capturing(plan.device))

    def _is_referenced_elsewhere(self, flat: Tensor) -> bool:
        if storage_holders(flat) != self._flat_holders:
            return True
        return bool(holders(self._shards) != self._holders)

    def shard_in(self, i: int, buffer: Tensor) -> Tensor:
        """Return this rank's slice of a shard buffer for parameter `i`, in its shape."""
        shape, strides, start = self._strided[i]
        return buffer.as_strided(shape, strides, buffer.storage_offset() + start)

    def region_of(self, i: int, buffer: Tensor) -> Tensor:
        """Return this rank's slice of a shard buffer for parameter `i`, 1-D, without padding."""
        return buffer[self._regions[i]]

    def give(self, indices: Iterable[int]) -> None:
        """Set the slices of `flat` for parameters `indices` as the gradients that the optimizer sees."""
        for i in indices:
            self.params[i].sharded.grad = self._shards[i]

    def add(self, sums: Mapping[int, Tensor], *, are_own: bool) -> None:
        """Add `sums`, this rank's gradient shards by parameter, to the gradients that the optimizer sees.

        Args:
            sums: The shards, in any dtype.
            are_own: Whether `sums` are in `flat`. Otherwise their memory will be reused, so they are copied.
        """
        for i, shard in sums.items():
            param = self.params[i]
            if param.grad is None:
                param.grad = shard.to(self.plan.contract.delivered, copy=not are_own)
            else:
                param.grad.add_(shard.to(self.plan.contract.delivered))

    def hand_over(self) -> None:
        """Drop the reference to the buffer if allocating a new one is cheap. `zero_grad` then frees the memory.

        The buffer of a CUDA graph, and a buffer in page-locked memory, are kept for all steps.
        """
        if self._has_streams and self._is_handed_over:
            self.drop_shards()

    def drop_shards(self) -> None:
        """Drop the buffer of the gradient shards."""
        self.flat = None
        self._shards, self._holders = [], None

    # -- steps --------------------------------------------------------------------------------------------------------

    def note_delivery(self) -> None:
        """Record that the optimizer has new gradients."""
        self.state.may_have_stepped = True
        self.state.delivered = [
            (param.sharded._version, -1 if (grad := param.sharded.grad) is None else grad._version)
            for param in self.params
        ]
        if is_capturing(self.plan.device):
            self.state.is_replayed = True
            self.state.written_by_graphs.append(self.flat)

    def take_possible_step(self) -> bool:
        """Return True if shards may have changed since the last call. See [Note: when a step is over].

        The first call after a delivery returns True. The comparison of versions decides what the next call returns.
        """
        stepped = self.state.may_have_stepped or self.state.is_replayed or is_capturing(self.plan.device)
        if stepped:
            self.state.may_have_stepped = any([shard for shard, _ in self._as_delivered()])
        return stepped

    @property
    def are_waiting(self) -> bool:
        """True if the optimizer can still use gradients, or if sums wait for their second level."""
        waiting = self.state.may_have_stepped and any(shard and grad for shard, grad in self._as_delivered())
        return waiting or bool(self.state.first_sums)

    def _as_delivered(self) -> list[tuple[bool, bool]]:
        """Return, for each parameter with a gradient, whether its shard and gradient are unchanged since delivery."""
        pairs = zip(self.params, self.state.delivered, strict=False)
        return [
            (param.sharded._version == shard, grad._version == version)
            for param, (shard, version) in pairs
            if (grad := param.sharded.grad) is not None
        ]
