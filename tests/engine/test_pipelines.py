"""Torch pipelines with sharded stages: every schedule and strategy yields the gradients of one process."""

from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_ranks, run_ranks
from small_models import torch_before
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fullshard import MixedPrecisionPolicy, StateError, errors, fully_shard, testing
from fullshard.integrations.pipelining import PipelineStage, with_actions
from fullshard.tape.recorder import Recorder, recording

LAYERS, WIDTH, BATCH, MICROBATCHES = 8, 9, 16, 4
SCHEDULES: dict[type, int] = {  # stages a rank
    ScheduleGPipe: 1,
    Schedule1F1B: 1,
    ScheduleInterleaved1F1B: 2,
    ScheduleInterleavedZeroBubble: 4,  # so many that some are freed while they wait
    ScheduleZBVZeroBubble: 2,
    ScheduleDualPipeV: 2,
}
V_SHAPED = (ScheduleZBVZeroBubble, ScheduleDualPipeV)


class Layer(nn.Module):
    """A layer with rows that do not divide evenly and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.down.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))) * self.scale


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(LAYERS)))


def batch(step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(step)
    return torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)


def plain_step(model: nn.Module, step: int, data_ranks: int, dtype: torch.dtype | None = None) -> None:
    """Gradients of one process: of each data rank's microbatches in turn, then their mean over data ranks."""
    sums: list[list[Tensor]] = []
    compute = model if dtype is None else layers().to(dtype)
    if dtype is not None:
        compute.load_state_dict(model.state_dict())
    trained = [param for param in compute.parameters() if param.requires_grad]
    for x, target in zip(*(whole.chunk(data_ranks) for whole in batch(step)), strict=True):
        sums.append([torch.zeros_like(param, dtype=torch.float32) for param in trained])
        for part, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            grads = torch.autograd.grad(nn.functional.mse_loss(compute(part.to(dtype)).float(), wanted), trained)
            for total, grad in zip(sums[-1], grads, strict=True):
                total += grad
    for param, *terms in zip((p for p in model.parameters() if p.requires_grad), *sums, strict=True):
        param.grad = sum(terms) / data_ranks / MICROBATCHES


def stage_numbers(kind: type, rank: int, pipes: int) -> list[int]:
    if kind in V_SHAPED:
        return [rank, 2 * pipes - 1 - rank]
    return [rank + pipes * i for i in range(SCHEDULES[kind])]


class Pipeline:
    """One rank's part of a pipeline of two ranks along "pp", sharded over what is left of the mesh."""

    def __init__(self, kind: type, mesh: DeviceMesh, data: DeviceMesh, stage: Any = PipelineStage, **options: Any):
        pipes = mesh["pp"].size()
        self.rank = mesh["pp"].get_local_rank()
        self.kind, count = kind, SCHEDULES[kind] * pipes
        self.numbers = stage_numbers(kind, self.rank, pipes)
        self.size = LAYERS // count
        whole = layers()
        self.parts = [whole[number * self.size : (number + 1) * self.size] for number in self.numbers]
        for part in self.parts:
            if "tp" in mesh.mesh_dim_names:
                plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
                parallelize_module(part, mesh["tp"], plan)
            for layer in part:
                fully_shard(layer, mesh=data, **options)
            fully_shard(part, mesh=data, **options)
        group = mesh.get_group("pp")
        self.stages = [
            stage(part, number, count, torch.device("cpu"), group=group)
            for part, number in zip(self.parts, self.numbers, strict=True)
        ]
        given = self.stages if SCHEDULES[kind] > 1 else self.stages[0]
        self.schedule = kind(given, n_microbatches=MICROBATCHES, loss_fn=self.loss)
        if stage is PipelineStage:
            assert with_actions(self.schedule) is self.schedule
        self.data_rank, self.data_ranks = dist.get_rank() % data.size(), data.size()
        self.data_rank = (
            data.get_group().rank()
            if data.ndim == 1
            else data.get_local_rank(0) * data.size(1) + (data.get_local_rank(1))
        )

    @staticmethod
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output.float(), target)

    def step(self, number: int) -> None:
        x, target = (whole.chunk(self.data_ranks)[self.data_rank] for whole in batch(number))
        is_first, is_last = 0 in self.numbers, any(stage.is_last for stage in self.stages)
        self.schedule.step(*([x] if is_first else []), **({"target": target} if is_last else {}))

    def named(self) -> dict[str, nn.Parameter]:
        """Return parameters by their names in the whole model, which slices keep."""
        return {name: param for part in self.parts for name, param in part.named_parameters()}


def matches_one_process(pipeline: Pipeline, check: Any, dtype: torch.dtype | None = None) -> None:
    """Two steps, the second with what an optimizer made of the first."""
    whole = layers()
    own = torch.optim.SGD(list(pipeline.named().values()), lr=1.0)
    peer = torch.optim.SGD(whole.parameters(), lr=1.0)
    for step in range(2):
        pipeline.step(step)
        plain_step(whole, step, pipeline.data_ranks, dtype)
        expected = {name: param.grad for name, param in whole.named_parameters() if param.requires_grad}
        for name, param in pipeline.named().items():
            if param.requires_grad:
                check(param.grad.full_tensor(), expected[name])
        for optimizer in (own, peer):
            optimizer.step()
            optimizer.zero_grad()
    for name, param in pipeline.named().items():
        check(param.full_tensor(), whole.get_parameter(name).detach())


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-8)


def every_schedule_and_strategy(world: int, kinds: list[type]) -> None:
    data = world // 2
    mesh = init_device_mesh("cpu", (2, data), mesh_dim_names=("pp", "dp"))
    deep = init_device_mesh("cpu", (2, data, 1), mesh_dim_names=("pp", "replicate", "shard"))
    for kind in kinds:
        for strategy in ("ddp", "zero1", "zero2", "zero3"):
            matches_one_process(Pipeline(kind, mesh, mesh["dp"], strategy=strategy), testing.assert_same)
        hsdp = Pipeline(kind, deep, deep["replicate", "shard"], strategy="hsdp")
        matches_one_process(hsdp, testing.assert_same)


lazy_pairs = torch_before((2, 13), "torch 2.11's gloo cannot send while it connects")


@pytest.mark.slow
@lazy_pairs
def test_pipeline_stages_match_gradients_of_one_process_bitwise():
    """Bit for bit: each rank sums its microbatches in order, and ranks are summed in order."""
    run_ranks(2, every_schedule_and_strategy, 2, list(SCHEDULES))


@pytest.mark.slow
@pytest.mark.parametrize("kind", SCHEDULES)
def test_stages_sharded_over_two_ranks_match_gradients_of_one_process(kind):
    run_ranks(4, every_schedule_and_strategy, 4, [kind])


class BackwardInLoss(Pipeline):
    """Its loss trains the last layer a second time, in a separate backward, as a loss in chunks does with the head."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        self.parts[-1][-1](output.detach()).square().mean().backward()
        return super().loss(output, target)


@pytest.mark.parametrize("kind", [Schedule1F1B, ScheduleInterleaved1F1B])
@on_ranks(2)
def test_shape_inference_of_pipeline_leaves_no_gradients(kind):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    pipeline = BackwardInLoss(kind, mesh, mesh["dp"])
    found = []
    for _ in range(2):
        pipeline.step(0)
        found.append({name: p.grad.full_tensor() for name, p in pipeline.named().items() if p.grad is not None})
        for param in pipeline.named().values():
            param.grad = None
    testing.assert_same(found[0], found[1])


# -- communication ----------------------------------------------------------------------------------------------------


class Watched(PipelineStage):
    """Notes how many collectives had been started before and after each computation."""

    record: Recorder | None = None
    started: list[tuple[int, int]] = []  # noqa: RUF012

    def _watch(self, compute: Any, *args: Any, **kwargs: Any) -> Any:
        before = 0 if self.record is None else len(self.record.collectives())
        result = compute(*args, **kwargs)
        if self.record is not None:
            self.started.append((before, len(self.record.collectives())))
        return result

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return self._watch(super().forward_one_chunk, *args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return self._watch(super().backward_one_chunk, *args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return self._watch(super().backward_weight_one_chunk, *args, **kwargs)


def visits(pipeline: Pipeline) -> dict[str, int]:
    """Return how often a step unshards each stage of this rank."""
    actions = getattr(pipeline.schedule, "pipeline_order_with_comms", None)
    if actions is None:
        return dict.fromkeys((f"stage {number}" for number in pipeline.numbers), 1)
    return Counter(
        f"stage {action.stage_index}" for action in actions[pipeline.rank] if action.computation_type.name == "UNSHARD"
    )


@pytest.mark.slow
@lazy_pairs
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@on_ranks(4)
def test_stage_units_unshard_once_per_visit_and_reduce_once_per_step(strategy):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    for kind, stages in SCHEDULES.items():
        pipeline = Pipeline(kind, mesh, mesh["dp"], stage=Watched, strategy=strategy)
        with_actions(pipeline.schedule)
        pipeline.step(0)
        for param in pipeline.named().values():
            param.grad = None
        with recording() as record:
            Watched.record, Watched.started = record, []
            pipeline.step(1)
            Watched.record = None
        gathers, sums = Counter[str](), Counter[str]()
        for event in record.collectives():
            stage, _, layer = event.origin.unit.partition(".")
            assert layer, event
            (gathers if event.name == "all_gather" else sums)[f"{stage}.{layer}"] += 1
        expected = visits(pipeline)
        assert (max(expected.values()) > 1) == (stages == 4)
        if strategy != "zero3":
            expected = dict.fromkeys(expected, 1)  # they stay unsharded from forward to backward
        wanted = {unit: 2 * expected[unit.partition(".")[0]] for unit in sums}  # of trained and of frozen parameters
        assert gathers == wanted, kind
        assert len(gathers) == len(sums) == LAYERS // 2
        assert set(sums.values()) == {1}, (kind, sums)
        late = [before != after for before, after in Watched.started]
        assert late == sorted(late, reverse=True), "what the first forward gathers in a schedule without actions"
        assert sum(late) == (stages == 1), (kind, Watched.started)


# -- with other features ----------------------------------------------------------------------------------------------

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@on_ranks(2)
def test_pipeline_microbatches_accumulate_in_reduce_dtype():
    """Including parameters without a gradient hook."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    for kind in (Schedule1F1B, ScheduleInterleavedZeroBubble):
        matches_one_process(Pipeline(kind, mesh, mesh["dp"], mp_policy=BF16), testing.assert_same, torch.bfloat16)


@pytest.mark.slow
@torch_before((2, 13), "torch 2.11 gives no full tensor of axes that are not in the mesh's order")
@on_ranks(4)
def test_pipeline_stages_support_tensor_parallelism():
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    for kind in SCHEDULES:
        matches_one_process(Pipeline(kind, mesh, mesh["dp"]), close)


@on_ranks(2)
def test_gradients_accumulate_over_pipeline_schedules_and_evaluations():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    whole = layers()
    for kind in (Schedule1F1B, ScheduleInterleavedZeroBubble):
        pipeline = Pipeline(kind, mesh, mesh["dp"])
        x, target = batch(0)
        pipeline.step(0)  # to be forgotten
        for part in pipeline.parts:
            part.zero_grad()
            part.set_requires_gradient_sync(False)
        pipeline.step(0)
        assert all(param.grad is None for param in pipeline.named().values())
        ends = {"target": target} if any(stage.is_last for stage in pipeline.stages) else {}
        with ExitStack() as as_in_torch_2_15:  # where an evaluation does not call this
            for stage in pipeline.stages:
                as_in_torch_2_15.enter_context(mock.patch.object(stage, "perform_reduce_grad"))
            pipeline.schedule.eval(*([x] if 0 in pipeline.numbers else []), **ends)
        for part in pipeline.parts:
            part.set_requires_gradient_sync(True)
        pipeline.step(0)
        plain_step(whole, 0, 1)
        for name, param in pipeline.named().items():
            if param.requires_grad:
                close(param.grad.full_tensor(), 2 * whole.get_parameter(name).grad)


class OnceError(Exception):
    pass


@torch_before((2, 13), "torch 2.11's stages keep what a failed step has left")
@on_ranks(2)
def test_failed_pipeline_step_does_not_affect_next_step():
    """Fail in a pipeline of one rank, without peers that wait."""
    group, calls = dist.new_subgroups(1)[0], []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        calls.append(output)
        if len(calls) == 6:  # one was to try out shapes
            raise OnceError
        return nn.functional.mse_loss(output, target)

    model = layers()
    for layer in model:
        fully_shard(layer)
    stage = PipelineStage(fully_shard(model), 0, 1, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=loss)
    x, target = (whole.chunk(2)[dist.get_rank()] for whole in batch(0))
    schedule.step(x, target=target)
    model.zero_grad()
    with pytest.raises(OnceError):
        schedule.step(x, target=target)
    assert model.reset_iter_state() is None
    schedule.step(x, target=target)
    whole = layers()
    plain_step(whole, 0, 2)
    for param, plain in zip(model.parameters(), whole.parameters(), strict=True):
        if param.requires_grad:
            testing.assert_same(param.grad.full_tensor(), plain.grad)


def count_differently() -> None:
    group = dist.new_subgroups(1)[0]
    model = fully_shard(nn.Sequential(fully_shard(Layer())))
    stage = PipelineStage(model, 3, 4, torch.device("cpu"), group=group)
    stage.has_backward = True
    stage.unshard()
    for _ in range(1 + dist.get_rank()):
        model(torch.ones(2, WIDTH)).sum().backward()
    with pytest.raises(errors.RankMismatchError, match=r"of stage 3\.0 .* of microbatch 2"):
        stage.perform_reduce_grad(1)


def test_different_microbatch_counts_raise_on_every_rank():
    testing.run_ranks(2, count_differently)


# -- without a stage --------------------------------------------------------------------------------------------------


def finalize_by_hand(policy: MixedPrecisionPolicy) -> None:
    grads = []
    for by_hand in (False, True):
        model = layers()
        for layer in model:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        model.set_manual_backward_finalization(by_hand)
        x = batch(dist.get_rank())[0]
        for _ in range(2):
            losses = [model(part).float().square().sum() for part in x.chunk(MICROBATCHES)]
            if by_hand:
                model[1].reshard()  # its backward unshards it
                model[2].reshard()
                model[2].unshard(async_op=True)
            for i, loss in enumerate(reversed(losses)):
                model.set_requires_gradient_sync(by_hand or i == MICROBATCHES - 1)
                loss.backward()
            if by_hand:
                assert model.finalize_backward(async_op=True).wait() is None
        grads.append([None if param.grad is None else param.grad.full_tensor() for param in model.parameters()])
    testing.assert_same(grads[1], grads[0])


@pytest.mark.slow
def test_manual_finalization_matches_gradients_of_hooks():
    """Microbatches wait for their backward, which runs in a different order."""
    for policy in (MixedPrecisionPolicy(), BF16):
        run_ranks(2, finalize_by_hand, policy)


@on_ranks(1)
def test_gradients_not_finalized_are_dropped():
    model = fully_shard(nn.Linear(WIDTH, WIDTH))
    with pytest.raises(StateError, match=r"set_manual_backward_finalization\(True\)"):
        model.finalize_backward()
    model.set_manual_backward_finalization(True)
    model(torch.ones(1, WIDTH)).sum().backward()
    model.set_manual_backward_finalization(False)
    (2 * model(torch.ones(1, WIDTH)).sum()).backward()
    testing.assert_same(model.weight.grad.full_tensor(), torch.full((WIDTH, WIDTH), 2.0))


# -- stages of torch's ------------------------------------------------------------------------------------------------


def with_stages_of_torch(kind: type) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    pipeline = Pipeline(kind, mesh, mesh["dp"], stage=pipelining.PipelineStage, reshard_after_forward=False)
    matches_one_process(pipeline, testing.assert_same)


@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B])
def test_torch_pipeline_stages_match_gradients_of_one_process(kind):
    run_ranks(2, with_stages_of_torch, kind)


@on_ranks(2)
def test_with_actions_rejects_torch_pipeline_stages():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    pipeline = Pipeline(ScheduleInterleaved1F1B, mesh, mesh["dp"], stage=pipelining.PipelineStage)
    with pytest.raises(errors.ConfigError, match=r"stage \d is a torch.*integrations\.pipelining"):
        with_actions(pipeline.schedule)


def test_split_backward_raises_with_torch_pipeline_stages():
    with pytest.raises(testing.RanksFailed, match=r"integrations\.pipelining\.PipelineStage"):
        testing.run_ranks(2, with_stages_of_torch, ScheduleInterleavedZeroBubble)


class Skipping(nn.Module):
    """A trained layer that some microbatches do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 1.0 if self.calls in (2, 3) else self.layer(x)


@pytest.mark.parametrize("stage", [PipelineStage, pipelining.PipelineStage])
@on_ranks(2)
def test_pipeline_stage_may_skip_a_layer_in_some_steps(stage):
    group = dist.new_subgroups(1)[0]
    model = nn.Sequential(Skipping(), nn.Linear(WIDTH, WIDTH))
    for layer in model:
        fully_shard(layer)
    made = stage(fully_shard(model), 0, 1, torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(made, n_microbatches=1, loss_fn=lambda y, _: y.sum())
    for _ in range(4):
        schedule.step(torch.ones(2, WIDTH), target=torch.zeros(2))
