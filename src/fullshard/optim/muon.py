"""Muon for sharded matrices. Every matrix is orthogonalized once, by one rank, instead of on every rank.

The algorithm is that of Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024,
https://kellerjordan.github.io/posts/muon). The update is the momentum with its singular values replaced by numbers
close to 1, which a Newton-Schulz iteration computes. The learning rate "match_rms_adamw" is that of Liu et al., "Muon
is Scalable for LLM Training" (2025, arXiv:2502.16982). The operations are those of `torch.optim.Muon`.

[Note: how matrices are exchanged]
Momenta are updated in shards. The iteration needs the full matrix and computes in bfloat16. So messages are in
bfloat16, without any loss of precision. Each rank has one buffer, `local`, with its parts of all matrices of a
batch, by owner, and receive buffers, `received`, with every rank's parts of the matrices that it owns. With matrices A
and B owned by rank 0 and C by rank 1:

              local           received
    rank 0    [A0 B0][C0]     [A0 B0][A1 B1]      its own receive buffer is a slice of `local`
    rank 1    [A1 B1][C1]     [C0][C1]

One all-to-all sends slices of `local` to the receive buffers of the owners. The owners overwrite the parts with
their results, and a second all-to-all sends them back. Along a mesh axis whose ranks have the same parts, only the
results are sent, at the end. If a matrix is sharded along several axes (by tensor parallelism or expert parallelism in
addition to the shard axis), these count as one axis of all ranks with different parts.

Each matrix of a stack (experts) is separate. A rank that has a full matrix owns it, without communication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim.optimizer import ParamsT

from fullshard.comm.collectives import Collectives
from fullshard.comm.mesh import subgroup
from fullshard.comm.routes import collectives_for
from fullshard.comm.transport import Pending
from fullshard.device.accelerator import accelerator_for
from fullshard.device.streams import Mark
from fullshard.engine.managed import in_model_order, managed_by
from fullshard.errors import ConfigError
from fullshard.layout.group_layout import ALIGNMENT_BYTES
from fullshard.layout.offsets import aligned_offsets
from fullshard.layout.shard_spec import owned
from fullshard.policy.arguments import check_iterable, is_number
from fullshard.state.on_disk import states_on_disk
from fullshard.state.optim_kinds import ChunkedSteps
from fullshard.state.steps_in_chunks import bring_to_memory
from fullshard.tape.context import Kept
from fullshard.tape.recorder import Event, Origin, Phase, active_recorder

BATCH_NBYTES = 16 * 2**20
"""Maximum bytes of full matrices that a rank orthogonalizes in one batch, unless it is one larger matrix."""

_TRANSPORT = torch.bfloat16
_VARIANTS = 1024  # the number of sets of matrices that the channel distinguishes


class Muon(torch.optim.Optimizer, ChunkedSteps):
    """Muon for sharded and plain matrices under any strategy, with the arguments of `torch.optim.Muon`.

    On one process the results are bitwise identical to `torch.optim.Muon`. On several processes they are identical to
    those of one process with the same gradients, under every strategy. With bfloat16 parameters they are close to
    torch's: torch adds an update in bfloat16, with rounding that depends on the position of elements. This class adds
    it in float32 and rounds once.

    The ranks of a mesh, including replicas, divide the orthogonalizations evenly, and exchange the next matrices while
    they compute. Matrices that are not `DTensor`s are orthogonalized on each rank. Every rank must call `step` with
    gradients of the same parameters.

    A 3-D parameter is a stack of matrices, one per expert or head. Each matrix is orthogonalized separately, and
    locally if a rank has all of it. Matrices may be sharded along any axes of their mesh, including those of tensor and
    expert parallelism.

    Muon is for the weight matrices of hidden layers. Give embeddings, output heads, biases and norms to another
    optimizer:

        hidden = [param for param in model.blocks.parameters() if param.ndim >= 2]
        muon = Muon(hidden, lr=0.02, weight_decay=0.01)

    Args:
        params: Matrices or stacks of matrices (2-D or 3-D, real, floating-point), or parameter groups of them.
        lr: The learning rate, as a number or a tensor with one element.
        weight_decay: the decoupled weight decay, which is multiplied by the learning rate.
        momentum: The weight of the previous momentum; the gradient has the rest.
        nesterov: Whether to use Nesterov momentum, a mixture of the gradient and the new momentum.
        ns_coefficients: The coefficients of the iterated odd polynomial of degree five.
        eps: the minimum norm that a matrix is divided by before the iteration.
        ns_steps: the number of iterations.
        adjust_lr_fn: the factor of the learning rate for a matrix of `a` rows and `b` columns: "original" (or None)
            selects `sqrt(max(1, a / b))`; "match_rms_adamw" selects `0.2 * sqrt(max(a, b))`.

    Raises:
        ConfigError: a parameter is not a matrix, or an option is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        check_iterable("params", params, "parameters, or groups of them")
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, with its options or else the optimizer's defaults.

        Raises:
            ConfigError: a parameter is not a matrix, or an option is out of its range.
        """
        super().add_param_group(param_group)
        wrong = _wrong_option(self.param_groups[-1]) or self._wrong_param()
        if wrong:
            self.param_groups.pop()
            raise ConfigError(wrong)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient. Return the loss of `closure`, which is called first, if given.

        Raises:
            ConfigError: a gradient is sparse.
            RankMismatchError: ranks have gradients of different parameters (on gloo).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        disk = states_on_disk(self)
        if disk is None:
            bring_to_memory(self, (param for _, _, param in self._named()))
            self._step_all(self._matrices_by_team())
        else:
            disk.step(self, self._step_some)
        return loss

    def _step_some(self, params: Sequence[Tensor]) -> None:
        """Update `params`, which are the same on every rank."""
        ids = set(map(id, params))
        by_team = self._matrices_by_team()
        some = {team: [matrix for matrix in matrices if id(matrix.param) in ids] for team, matrices in by_team.items()}
        self._step_all({team: matrices for team, matrices in some.items() if matrices})

    def _step_all(self, matrices_by_team: Mapping[Team, Sequence[Matrix]]) -> None:
        for team, matrices in matrices_by_team.items():
            lacking = [matrix.name for matrix in matrices if matrix.param.requires_grad and matrix.param.grad is None]
            note = f"without {', '.join(lacking)}" if lacking else ""
            team.step([matrix for matrix in matrices if matrix.param.grad is not None], note)

    def _named(self) -> Iterator[tuple[str, dict[str, Any], Tensor]]:
        """Yield each parameter with its group and its name: the user's, or its number in the state dict."""
        number = 0
        for group in self.param_groups:
            for i, param in enumerate(group["params"]):
                yield group["param_names"][i] if "param_names" in group else f"parameter {number}", group, param
                number += 1

    def _matrices_by_team(self) -> dict[Team, list[Matrix]]:
        """Return the matrices of all parameters, with or without gradients, by team."""
        found: dict[Team, list[Matrix]] = {}
        named = {id(param): (name, group) for name, group, param in self._named()}
        for param in in_model_order([param for _, _, param in self._named()]):
            name, group = named[id(param)]
            managed = managed_by(param)
            if managed is not None and "param_names" not in group:
                name = f"{managed.unit.name}.{managed.param.fqn}".removeprefix(".")  # the same on every rank
            if param.grad is not None and param.grad.layout != torch.strided:
                raise ConfigError(
                    f"Muon: the gradient of {name}, {tuple(param.shape)}, is sparse. Make it dense (nn.Embedding has "
                    "sparse=False), or give the parameter to torch.optim.SparseAdam."
                )
            team = Team.of(param)
            found.setdefault(team, []).extend(_matrices(name, param, group, self.state, team))
        return found

    def _wrong_param(self) -> str | None:
        """Describe why the last group's parameters are invalid; None if Muon supports all of them."""
        number = len(self.param_groups) - 1
        for name, _, param in (item for item in self._named() if item[1] is self.param_groups[-1]):
            if param.ndim not in (2, 3) or not param.is_floating_point():
                return (
                    f"Muon: {name}, in param group {number}, has the shape {tuple(param.shape)} and the dtype "
                    f"{param.dtype}, but Muon supports only real matrices and 3-D stacks of them. Use another "
                    "optimizer for it, such as torch.optim.AdamW."
                )
            placements = param.placements if isinstance(param, DTensor) else ()
            if any(type(placement) not in (Replicate, Shard) for placement in placements):
                return (
                    f"Muon: {name}, in param group {number}, is placed {placements}, but Muon supports only "
                    "Shard(dim) and Replicate(). Redistribute it first, or use another optimizer for it, such as "
                    "torch.optim.AdamW."
                )
        return None


def _wrong_option(options: Mapping[str, Any]) -> str | None:
    lr, adjust = options["lr"], options["adjust_lr_fn"]
    one = lr.numel() == 1 if isinstance(lr, Tensor) else is_number(lr)
    steps, coefficients = options["ns_steps"], options["ns_coefficients"]
    needed = {
        "lr": (one and lr >= 0, "one number of 0 or more"),
        "weight_decay": (is_number(options["weight_decay"]) and options["weight_decay"] >= 0, "a number of 0 or more"),
        "momentum": (is_number(options["momentum"]) and options["momentum"] >= 0, "a number of 0 or more"),
        "nesterov": (isinstance(options["nesterov"], bool), "True or False"),
        "ns_coefficients": (isinstance(coefficients, Sequence) and len(coefficients) == 3, "a tuple of three numbers"),
        "eps": (is_number(options["eps"]) and options["eps"] >= 0, "a number of 0 or more"),
        "ns_steps": (type(steps) is int and 0 <= steps < 100, "a number from 0 to 99"),
        "adjust_lr_fn": (adjust in (None, "original", "match_rms_adamw"), "'original', 'match_rms_adamw' or None"),
    }
    wrong = [f"Muon({name}={options[name]!r}): expected {text}." for name, (fits, text) in needed.items() if not fits]
    return wrong[0] if wrong else None


# -- one matrix -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cuts:
    """The division of one matrix of a parameter into parts.

    Args:
        spans: The positions of each part along each dim of the parameter.
        index: The index of the matrix in a stack; empty for a single matrix.
        rows: The rows of the matrix.
        columns: The columns of the matrix.
        whole_part: the part that is the full matrix, if there is one.
    """

    spans: Sequence[Sequence[range]]
    index: tuple[int, ...]
    rows: int
    columns: int
    whole_part: int | None

    def has(self, part: int) -> bool:
        """Return True if `part` of the parameter contains elements of this matrix."""
        return all(at in span for at, span in zip(self.index, self.spans[part], strict=False))

    def tile(self, part: int) -> tuple[slice, slice]:
        """Return the rows and columns of the matrix in `part` of the parameter."""
        if not self.has(part):
            return slice(0), slice(0)
        rows, columns = self.spans[part][-2:]
        return slice(rows.start, rows.stop), slice(columns.start, columns.stop)

    def shape(self, part: int) -> tuple[int, int]:
        """Return the shape of `part`."""
        rows, columns = self.tile(part)
        return rows.stop - (rows.start or 0), columns.stop - (columns.start or 0)

    def numel(self, part: int) -> int:
        """Return the number of elements of `part`."""
        return math.prod(self.shape(part))

    def own(self, local: Tensor, part: int) -> Tensor:
        """Return a view of this matrix's part in `local`, which is part `part` of the parameter."""
        if not self.has(part):
            return local.new_empty(0, 0)
        for at, span in zip(self.index, self.spans[part], strict=False):
            local = local[at - span.start]
        return local


@dataclass(frozen=True)
class Matrix:
    """A matrix and the operations on it. It is a parameter, or one matrix of a stack that is a parameter."""

    name: str  # the parameter's
    param: Tensor
    group: Mapping[str, Any]  # its options
    states: dict[Tensor, Any]  # of all parameters
    cuts: Cuts
    part: int  # this rank's

    @property
    def nbytes(self) -> int:
        """Bytes of the full matrix when it is sent."""
        return self.cuts.rows * self.cuts.columns * _TRANSPORT.itemsize

    @property
    def cost(self) -> float:
        """The number of multiplications of its orthogonalization, up to a factor common to all matrices."""
        short, long = sorted((self.cuts.rows, self.cuts.columns))
        return float(self.group["ns_steps"] * short * short * (2 * long + short))

    def update_momentum(self) -> Tensor:
        """Add the gradient to the momentum, and return this rank's part of the matrix to orthogonalize."""
        state, momentum = self.states[self.param], self.group["momentum"]
        assert self.param.grad is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(self.param.grad, memory_format=torch.preserve_format)
        grad, buffer = (self._own(tensor) for tensor in (self.param.grad, state["momentum_buffer"]))
        buffer.lerp_(grad, 1 - momentum)
        return grad.lerp(buffer, momentum) if self.group["nesterov"] else buffer

    def orthogonalize(self, parts: Sequence[Tensor]) -> None:
        """Replace the contents of `parts`, the ranks' parts of the matrix, by those of the orthogonalized matrix."""
        coefficients, steps, eps = (self.group[name] for name in ("ns_coefficients", "ns_steps", "eps"))
        whole = parts[0].new_empty(self.cuts.rows, self.cuts.columns)
        for number, part in enumerate(parts):
            whole[self.cuts.tile(number)] = part
        whole = orthogonalized(whole, coefficients, steps, eps)
        for number, part in enumerate(parts):
            part.copy_(whole[self.cuts.tile(number)])

    def subtract(self, update: Tensor) -> None:
        """Update this rank's part of the parameter by `update`, its part of the orthogonalized matrix."""
        lr: Any = self.group["lr"]
        lr = lr.squeeze() if isinstance(lr, Tensor) else lr
        own = self._own(self.param)
        own.mul_(1 - lr * self.group["weight_decay"])
        # A bfloat16 sum rounds vectorized elements differently from the remaining ones, so results would depend on
        # shard boundaries.
        update = accelerator_for(update.device).alongside(update, own)
        own.add_(update.float(), alpha=-lr * self._lr_factor)
        if isinstance(self.param, DTensor):
            torch.autograd.graph.increment_version(self.param)

    def _own(self, tensor: Tensor) -> Tensor:
        return self.cuts.own(tensor._local_tensor if isinstance(tensor, DTensor) else tensor, self.part)

    @property
    def _lr_factor(self) -> float:
        rows, columns = self.cuts.rows, self.cuts.columns
        if self.group["adjust_lr_fn"] == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1, rows / max(1, columns)))


def _matrices(
    name: str, param: Tensor, group: Mapping[str, Any], states: dict[Tensor, Any], team: Team
) -> list[Matrix]:
    """Return the matrices of `param`."""
    *stacked, rows, columns = shape = tuple(param.shape)
    cuts: tuple[tuple[int, int], ...] = ()
    if isinstance(param, DTensor):
        sizes = zip(param.placements, param.device_mesh.shape, strict=True)
        cuts = tuple((item.dim, size) for item, size in sizes if isinstance(item, Shard))
    spans, whole_parts = _divided(shape, cuts, team.places)
    indices: list[tuple[int, ...]] = [()] if not stacked else [(i,) for i in range(stacked[0])]
    return [
        Matrix(name, param, group, states, Cuts(spans, index, rows, columns, whole_part), team.part)
        for index, whole_part in zip(indices, whole_parts, strict=True)
    ]


@lru_cache(maxsize=1024)
def _divided(
    shape: tuple[int, ...], cuts: tuple[tuple[int, int], ...], places: tuple[tuple[int, ...], ...]
) -> tuple[list[list[range]], list[int | None]]:
    """Return the index ranges of each part of a parameter by dim, and for each matrix the part that has all of it.

    Args:
        shape: The shape of the parameter.
        cuts: The dims along which it is split, in order, with the number of pieces.
        places: For each part, the index of its piece in each split. Empty if there is only one part.
    """
    spans = [[range(size) for size in shape] for _ in places or [()]]
    for span, place in zip(spans, places, strict=False):
        for (dim, pieces), number in zip(cuts, place, strict=True):
            piece = owned(len(span[dim]), pieces, number)
            span[dim] = span[dim][piece.start : piece.stop]
    whole_parts: list[int | None] = [None] * math.prod(shape[:-2])
    for part, span in enumerate(spans):
        if tuple(map(len, span[-2:])) == shape[-2:]:
            for index in span[0] if len(shape) == 3 else range(1):
                whole_parts[index] = part if whole_parts[index] is None else whole_parts[index]
    return spans, whole_parts


def orthogonalized(matrix: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Return a matrix with the singular vectors of `matrix`, and singular values around 1.

    Divide by the norm, so that no singular value is above 1, and iterate `x -> a x + b (x x^T) x + c (x x^T)^2 x` for
    the coefficients (a, b, c). This maps each singular value by the polynomial `a s + b s^3 + c s^5`.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


# -- many matrices on many ranks --------------------------------------------------------------------------------------


def divide(
    costs: Sequence[float],
    nbytes: Sequence[int],
    owners: int,
    limit: int,
    allowed: Mapping[int, Sequence[int]] | None = None,
) -> list[list[list[int]]]:
    """Divide the work into batches. `divide(...)[batch][owner]` are indices of matrices.

    Matrices are assigned in descending order of their cost, each to the owner with the least work so far. So the
    maximum work of an owner is at most 4/3 of the optimum (Graham, 1969, "Bounds on multiprocessing timing anomalies").
    A batch ends before an owner would have more than `limit` bytes of it, except for a single larger matrix. A matrix
    in `allowed` is assigned to one of the owners listed there.
    """
    batches: list[list[list[int]]] = [[[] for _ in range(owners)]]
    loads, held = [0.0] * owners, [0] * owners
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owner = min((allowed or {}).get(i, range(owners)), key=loads.__getitem__)
        if batches[-1][owner] and held[owner] + nbytes[i] > limit:
            batches.append([[] for _ in range(owners)])
            held = [0] * owners
        batches[-1][owner].append(i)
        loads[owner] += costs[i]
        held[owner] += nbytes[i]
    return batches


@dataclass(frozen=True)
class Team:
    """The ranks of one mesh, which divide the work on its matrices.

    Ranks are numbered so that the index along the last transport varies fastest. Results are sent back along the last
    transport first.

    Args:
        transports: The collectives of the ranks with the same parts along each axis of the mesh; then, if matrices are
            sharded, of all ranks with different parts, along one or several axes. Empty for a plain tensor, whose team
            is one rank.
        places: The coordinates of the ranks with different parts on the sharded axes.
        device: The device that orthogonalizes matrices.
    """

    transports: tuple[Collectives, ...]
    places: tuple[tuple[int, ...], ...]
    device: torch.device

    @classmethod
    def of(cls, param: Tensor) -> Team:
        """Return the team that updates `param`."""
        if not isinstance(param, DTensor):
            return cls((), (), param.device)
        mesh, device = param.device_mesh, torch.device(param.device_mesh.device_type)
        cut = tuple(axis for axis, placement in enumerate(param.placements) if placement.is_shard())
        groups = [mesh.get_group(axis) for axis in range(mesh.ndim) if axis not in cut]
        places: tuple[tuple[int, ...], ...] = ()
        if cut:
            group, places = _alongside.get_or_make((mesh, cut), lambda: _along(mesh, cut))
            groups.append(group)
        return cls(tuple(collectives_for(group, device) for group in groups), places, device)

    @property
    def is_sharded(self) -> bool:
        """True if the ranks along the last transport have different parts."""
        return bool(self.places)

    @property
    def parts(self) -> int:
        """The number of parts of a matrix."""
        return self.transports[-1].world if self.is_sharded else 1

    @property
    def part(self) -> int:
        """The index of this rank's part of a matrix."""
        return self.transports[-1].rank if self.is_sharded else 0

    @property
    def size(self) -> int:
        """The number of ranks in the team."""
        return math.prod(transport.world for transport in self.transports)

    @property
    def number(self) -> int:
        """The number of this rank in the team."""
        number = 0
        for transport in self.transports:
            number = number * transport.world + transport.rank
        return number

    @property
    def partners(self) -> range:
        """The owners that this rank sends its parts to: the ranks with different parts, including this one."""
        first = self.number - self.part
        return range(first, first + self.parts)

    def owners_reached(self, axis: int, rank: int) -> range:
        """Return the owners whose results `rank` of `axis` has after results were sent back along the later axes."""
        each = math.prod(transport.world for transport in self.transports[axis + 1 :])
        every = each * self.transports[axis].world
        first = self.number // every * every + rank * each
        return range(first, first + each)

    def _resident(self, matrices: Sequence[Matrix]) -> dict[int, range]:
        """Return the possible owners of those `matrices` that are complete on at least one rank."""
        whole_parts = {i: matrix.cuts.whole_part for i, matrix in enumerate(matrices)}
        return {
            i: range(whole_part, self.size, self.parts)
            for i, whole_part in whole_parts.items()
            if whole_part is not None
        }

    def step(self, matrices: Sequence[Matrix], note: str) -> None:
        """Update `matrices` in batches. While a batch is computed, the next one is sent to its owners, and the previous
        one is sent back.

        Args:
            matrices: Matrices with gradients, identical on every rank.
            note: A note that distinguishes the collectives of special steps.
        """
        which = ", ".join(dict.fromkeys(f"{matrix.name} {tuple(matrix.param.shape)}" for matrix in matrices))
        costs, nbytes = [matrix.cost for matrix in matrices], [matrix.nbytes for matrix in matrices]
        work = divide(costs, nbytes, self.size, BATCH_NBYTES, self._resident(matrices))
        batches = [
            MatrixBatch(self, [[matrices[i] for i in indices] for indices in by_owner], number % 2, which, note)
            for number, by_owner in enumerate(work)
        ]
        passing_on = [MatrixBatch.take_back] * (len(self.transports) - 1)
        stages = [MatrixBatch.collect, MatrixBatch.orthogonalize, *passing_on, MatrixBatch.finish]
        for tick in range(len(batches) + len(stages) - 1):
            for lag, stage in enumerate(stages):
                if 0 <= tick - lag < len(batches):
                    stage(batches[tick - lag])


class MatrixBatch:
    """Some matrices that are sent to their owners and back. See [Note: how matrices are exchanged].

    Args:
        team: The ranks.
        by_owner: The matrices that each rank orthogonalizes.
        parity: 0 and 1 alternately, because two batches are pending at the same time.
        which: The names and shapes of all matrices. Messages of different matrices have different tags.
        note: A note that distinguishes the collectives of special steps.
    """

    def __init__(self, team: Team, by_owner: Sequence[Sequence[Matrix]], parity: int, which: str, note: str) -> None:
        self._team = team
        self._by_owner = by_owner
        self._parity = parity
        self._which = which
        self._note = note
        self._numels = [sum(item.cuts.numel(team.part) for item in of_owner) for of_owner in by_owner]
        self._starts, self._numel = aligned_offsets(self._numels, ALIGNMENT_BYTES // _TRANSPORT.itemsize)
        self._local = torch.empty(0)
        self._received: list[Tensor] = []
        self._axes = list(range(len(team.transports)))  # results are still to be sent back along these
        self._pending = Pending()
        self._arrived: Mark | None = None

    def collect(self) -> None:
        """Update all momenta, and start to send this rank's parts to the owners."""
        team = self._team
        self._local = torch.empty(self._numel, dtype=_TRANSPORT, device=team.device)
        for owner, start, of_owner in zip(range(team.size), self._starts, self._by_owner, strict=True):
            for matrix, part in zip(of_owner, _parts(self._local[start:], of_owner, team.part), strict=True):
                update = matrix.update_momentum()
                if owner in team.partners:
                    part.copy_(update)
        owned_here = self._by_owner[team.number]
        self._received = [
            self._region(range(team.number, team.number + 1))
            if part == team.part
            else self._local.new_empty(sum(matrix.cuts.numel(part) for matrix in owned_here))
            for part in range(team.parts)
        ]
        if team.is_sharded:
            sent = [self._region(range(owner, owner + 1)) for owner in team.partners]
            self._exchange(team.transports[-1], self._received, sent, self._partners_nbytes, "there")

    def orthogonalize(self) -> None:
        """Orthogonalize the matrices that this rank owns, and start to send them back."""
        self._wait()
        owned_here = self._by_owner[self._team.number]
        parts = [_parts(buffer, owned_here, part) for part, buffer in enumerate(self._received)]
        for matrix, its_parts in zip(owned_here, zip(*parts, strict=True), strict=True):
            recorder, origin = active_recorder(), Origin(matrix.name, Phase.STEP)
            event = recorder and recorder.add(Event("orthogonalize", origin, nbytes=matrix.nbytes))
            matrix.orthogonalize(its_parts)
            if event:
                event.finish()
        self.take_back()

    def take_back(self) -> None:
        """Start to send the results back along the next axis."""
        self._wait()
        if not self._axes:
            return
        axis = self._axes.pop()
        transport = self._team.transports[axis]
        received = [self._region(self._team.owners_reached(axis, rank)) for rank in range(transport.world)]
        if self._team.is_sharded and axis == len(self._team.transports) - 1:
            sent, common_nbytes = self._received, self._partners_nbytes
        else:
            sent, common_nbytes = (
                [received[transport.rank]] * transport.world,
                sum(buffer.nbytes for buffer in received),
            )
        self._exchange(transport, received, sent, common_nbytes, "back")

    def finish(self) -> None:
        """Update the parameters, and free the memory."""
        self._wait()
        for start, of_owner in zip(self._starts, self._by_owner, strict=True):
            for matrix, part in zip(of_owner, _parts(self._local[start:], of_owner, self._team.part), strict=True):
                matrix.subtract(part)
        self._local, self._received = torch.empty(0), []

    @property
    def _partners_nbytes(self) -> int:
        return sum(matrix.nbytes for owner in self._team.partners for matrix in self._by_owner[owner])

    def _region(self, owners: range) -> Tensor:
        """Return this rank's parts of all matrices that `owners` own."""
        last = owners[-1]
        return self._local[self._starts[owners[0]] : self._starts[last] + self._numels[last]]

    def _exchange(
        self, transport: Collectives, received: Sequence[Tensor], sent: Sequence[Tensor], common_nbytes: int, way: str
    ) -> None:
        channel = transport.channel_for(f"Muon {way} {self._parity}", 1, variants=_VARIANTS).variant(self._which)
        origin = Origin("Muon", Phase.STEP, note=self._note)
        streams = accelerator_for(self._team.device).streams
        with streams.reduce.after(streams.compute):
            self._pending = channel.all_to_all(received, sent, common_nbytes=common_nbytes, origin=origin)
            self._arrived = streams.reduce.mark()

    def _wait(self) -> None:
        self._pending.wait()
        accelerator_for(self._team.device).streams.compute.wait(self._arrived)


def _parts(buffer: Tensor, matrices: Sequence[Matrix], part: int) -> list[Tensor]:
    """Return views of the `part` of each of `matrices`, which are stored contiguously in `buffer` (1-D)."""
    numels = [matrix.cuts.numel(part) for matrix in matrices]
    flat = buffer[: sum(numels)].split(numels)
    return [item.view(matrix.cuts.shape(part)) for item, matrix in zip(flat, matrices, strict=True)]


_Alongside = tuple[dist.ProcessGroup, tuple[tuple[int, ...], ...]]
_alongside: Kept[tuple[DeviceMesh, tuple[int, ...]], _Alongside] = Kept("ranks along several axes")


def _along(mesh: DeviceMesh, axes: Sequence[int]) -> _Alongside:
    """Return a process group of this rank along `axes` of `mesh`, and the coordinates of its ranks on these axes."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    alongside = mesh.mesh[tuple(slice(None) if axis in axes else at for axis, at in enumerate(coordinate))]
    at = {int(alongside[place]): place for place in product(*(range(mesh.size(axis)) for axis in axes))}
    group = mesh.get_group(axes[0]) if len(axes) == 1 else subgroup(list(at))
    return group, tuple(at[rank] for rank in dist.get_process_group_ranks(group))
