"""Sharded training on one rank, and comparison of every step with the plain process."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from fullshard import FSDPModule, ShardPlacementResult, clip_grad_norm_, fully_shard
from fullshard.optim.clipping import total_norm
from fullshard.testing.parity.cases import Case
from fullshard.testing.parity.difference import Compared, Kind, Tolerance
from fullshard.testing.parity.parallel import SCHEDULES, V_SHAPED
from fullshard.testing.parity.recipe import Recipe, trained
from fullshard.testing.parity.stages import Cut, Stage, clip, find_cut, norm_of_all
from fullshard.testing.parity.trace import Step, Trace
from fullshard.testing.parity.unsharded import Divided, is_expert
from fullshard.wrap import wrapped_modules


def train_sharded(recipe: Recipe, case: Case, trace: Trace, tolerance: Tolerance) -> Compared:
    """Train on this rank under `case`, and compare with `trace`. Every rank compares its own shards."""
    divided = Divided(recipe, case)
    with divided.attention:
        training = (Pipeline if case.axes.pp > 1 else OneStage)(recipe, divided)
        optimizer = recipe.optimizer_of(training.module)
        compared = Compared(dist.get_rank(), tolerance)
        params = training.params
        _compare_parameters(compared, 0, training, trace.read(0))
        for step in range(1, recipe.steps + 1):
            expected = trace.read(step)
            for number, loss in training.backward(step).items():
                expected_loss = expected.losses[number]
                if expected_loss.ndim:  # one loss per part of the sequence
                    expected_loss = expected_loss[divided.context_rank]
                compared.add(Kind.LOSS, str(number), step, loss, expected_loss)
            for name, gradient in expected.gradients.items():
                if training.has(name):
                    param = params.get(name)
                    own = None if param is None else param.grad
                    compared.add(Kind.GRADIENT, name, step, *_of_this_rank(own, gradient))
            compared.add(Kind.GRADIENT_NORM, "", step, training.clip(), expected.norm)
            optimizer.step()
            optimizer.zero_grad()
            _compare_parameters(compared, step, training, expected)
    return compared


def _shard(module: nn.Module, recipe: Recipe, divided: Divided, **own: Any) -> None:
    case, mesh, over = divided.case, divided.mesh, None
    if len(mesh.mesh_dim_names or ()) > (2 if case.has_two_axes else 1):
        mesh = mesh["replicate", "shard"] if case.has_two_axes else mesh["shard"]
    if divided.sparse is not None:
        over = divided.sparse["replicate", "efsdp"] if case.has_two_axes else divided.sparse["efsdp"]

    def place(param: nn.Parameter) -> ShardPlacementResult | None:
        return ShardPlacementResult(None, over) if is_expert(param) else None

    options: dict[str, Any] = {
        "mesh": mesh,
        "strategy": case.strategy,
        "mp_policy": recipe.precision,
        "shard_placement_fn": None if over is None else place,
    }
    fully_shard(module, **options | own)


class OneStage:
    """The full model on this rank, sharded."""

    def __init__(self, recipe: Recipe, divided: Divided) -> None:
        self._recipe, self._divided = recipe, divided
        self.module = divided.model()
        _shard(self.module, recipe, divided, auto_wrap_policy=recipe.policy(self.module))
        self.params: dict[str, Tensor] = dict(self.module.named_parameters())

    def has(self, name: str) -> bool:
        """Return True: this rank has all parameters."""
        return True

    def backward(self, step: int) -> dict[int, Tensor]:
        """Compute the gradients of a step and return the losses of this rank's microbatches, by number."""
        losses = {}
        for numbers in self._recipe.microbatches(step, self._divided.rank, self._divided.case.ranks):
            for number in numbers:
                cast(FSDPModule, self.module).set_requires_gradient_sync(number == numbers[-1])
                losses[number] = self._recipe.backward(self.module, number)
        return losses

    def clip(self) -> Tensor:
        """Clip gradients and return their norm before clipping."""
        return clip_grad_norm_(trained(self.module), self._recipe.clip or math.inf)


class Pipeline:
    """This rank's stages, sharded, with a schedule of torch."""

    def __init__(self, recipe: Recipe, divided: Divided) -> None:
        from torch.distributed.pipelining import PipelineStage as TorchStage  # takes a second to import
        from torch.distributed.pipelining.schedules import get_schedule_class

        from fullshard.integrations.pipelining import PipelineStage, with_actions

        self._recipe, self._divided = recipe, divided
        self._pipe = divided.mesh["pp"]
        chosen, count = recipe.parallelism.schedule, recipe.parallelism.stages
        rank, ranks = self._pipe.get_local_rank(), self._pipe.size()
        second = 2 * ranks - 1 - rank if chosen in V_SHAPED else rank + ranks
        self.numbers = [rank, second][: count // ranks]
        self._cut = cut = find_cut(recipe, divided.model())
        self._stages = [self._stage(cut, number) for number in self.numbers]
        self.module = nn.ModuleList(self._stages)
        self.params = {
            name.removeprefix("model."): param for stage in self._stages for name, param in stage.named_parameters()
        }
        device, group = torch.device("cpu"), self._pipe.get_group()
        made: list[TorchStage] = []
        for number, stage in zip(self.numbers, self._stages, strict=True):
            given, sent = cut.received[number], None if stage.is_last else cut.received[number + 1]
            first, loss = torch.empty(1, dtype=torch.long, device="meta"), torch.empty(1, device="meta")
            made.append(
                PipelineStage(
                    stage,
                    number,
                    count,
                    device,
                    input_args=first if given is None else given.requires_grad_(),
                    output_args=(loss if sent is None else sent).requires_grad_(),
                    group=group,
                )
            )
        kind: Any = get_schedule_class(chosen)
        self._schedule = with_actions(
            kind(
                made[0] if SCHEDULES[chosen] == 1 else made,
                n_microbatches=recipe.count,
                loss_fn=lambda loss, number: loss[0] / recipe.count,
                scale_grads=False,
            )
        )

    def has(self, name: str) -> bool:
        """Return True if a stage of this rank has the parameter."""
        return self._cut.stage_of[name] in self.numbers

    def _stage(self, cut: Cut, number: int) -> Stage:
        model = self._divided.model()
        units = wrapped_modules(model, self._recipe.policy(model))
        stage = Stage(self._recipe, model, cut, number, units)
        for unit, options in stage.units.items():
            _shard(unit, self._recipe, self._divided, **options)
        _shard(stage, self._recipe, self._divided)
        stage.begin_with_received()
        return stage

    def backward(self, step: int) -> dict[int, Tensor]:
        """Compute the gradients of a step. On the rank of the last stage, return the losses by microbatch number."""
        (numbers,) = self._recipe.microbatches(step, self._divided.rank, self._divided.case.ranks)
        given = torch.tensor(numbers)
        is_last = any(stage.is_last for stage in self._stages)
        self._schedule.step(
            *([given] if 0 in self.numbers else []), number=given, **({"target": given} if is_last else {})
        )
        losses = {number: loss for stage in self._stages for number, loss in stage.losses.items()}
        for stage in self._stages:
            stage.losses.clear()
        return losses

    def clip(self) -> Tensor:
        """Clip gradients and return their norm over all stages before clipping."""
        grads = [[param.grad for param in stage.parameters() if param.grad is not None] for stage in self._stages]
        own = torch.stack([total_norm(of_stage) for of_stage in grads])
        of_ranks = [torch.empty_like(own) for _ in range(self._pipe.size())]
        dist.all_gather(of_ranks, own, group=self._pipe.get_group())
        first, *second = torch.stack(of_ranks).T
        if second:
            is_v = self._recipe.parallelism.schedule in V_SHAPED
            first = torch.cat([first, second[0].flip(0) if is_v else second[0]])
        norm = norm_of_all(list(first))
        local = [grad.to_local() for of_stage in grads for grad in of_stage if isinstance(grad, DTensor)]
        clip(local, norm, self._recipe.clip)
        return norm


def _compare_parameters(compared: Compared, step: int, training: OneStage | Pipeline, expected: Step) -> None:
    for name, values in expected.parameters.items():
        if training.has(name):
            compared.add(Kind.PARAMETER, name, step, *_of_this_rank(training.params.get(name), values))


def _of_this_rank(actual: Tensor | None, expected: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return this rank's part of a tensor, and the expected part."""
    if not isinstance(actual, DTensor):
        return actual, expected
    local = actual.to_local().detach()
    if expected is None or expected.shape != actual.shape:
        return local, expected
    mesh = actual.device_mesh
    for axis, placement in enumerate(actual.placements):
        if isinstance(placement, Shard):
            parts = expected.chunk(mesh.size(axis), placement.dim)  # the last ranks may have no part
            rank = mesh.get_local_rank(axis)
            expected = parts[rank] if rank < len(parts) else expected.narrow(placement.dim, 0, 0)
    return local, expected
