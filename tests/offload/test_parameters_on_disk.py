"""Parameters and gradients on disk: bitwise equal to a run without offload, in little memory, for all operations."""

import copy
import errno
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_ranks, run_ranks
from small_models import (
    BLOCKS,
    SmallGPT,
    batch,
    covering_pairs,
    loss_of,
    my_part,
    small_gpt,
    take_step,
    trained,
    wholes,
)
from test_offload_to_disk import (
    LOOPS,
    Make,
    adamw,
    few_bytes_per_chunk,
    learn,
    momentum,
    muon,
    on_the_disk,
    states_of,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fullshard.disk.space
from fullshard import CheckpointError, DiskError, Offload, clip_grad_norm_, dry, fully_shard
from fullshard.checkpoint import async_save, export_safetensors, load, restore_snapshot, save, snapshot
from fullshard.disk.buffers import buffers_of
from fullshard.disk.interface import ALIGNMENT, BUFFERS, MOST_WRITING, aligned
from fullshard.disk.pace import pace_of
from fullshard.disk.prediction import Traffic
from fullshard.disk.tensors import OnDisk
from fullshard.engine.registry import units_in
from fullshard.plan.explain import explain
from fullshard.plan.ledger import (
    OnDiskCost,
    measure_ledger,
    peak_during,
    predict_ledger,
    predict_on_disk,
    storage_bytes,
)
from fullshard.state.on_disk import states_on_disk
from fullshard.state.optim_state import full_optim_state_dict
from fullshard.state.state_dict import StateDictType, as_configured, get_state_dict_type, state_dict_type
from fullshard.state.streaming import stream_weights
from fullshard.state.summon import summon_full_params
from fullshard.tape.recorder import recording
from fullshard.testing import assert_same


def build(fraction: float | None, folder: Path, strategy: str = "zero3", mp_policy: Any = None, **options: Any) -> Any:
    """Build a model of several units with a fraction of its shards on disk; blocks have `mp_policy`."""
    return shard(small_gpt(BLOCKS), fraction, folder, strategy=strategy, mp_policy=mp_policy, **options)


def shard(model: SmallGPT, fraction: float | None, folder: Path, mp_policy: Any = None, **options: Any) -> Any:
    policy = None if fraction is None else Offload(parameters={"disk": fraction}, folder=folder / "scratch")
    for block in model.blocks:
        fully_shard(block, mp_policy=mp_policy, offload_policy=policy, **options)
    return fully_shard(model, offload_policy=policy, **options)


def locals_of(model: nn.Module) -> list[Tensor]:
    return [param.to_local() for param in model.parameters() if isinstance(param, DTensor)]


def stored(model: nn.Module) -> list[bool]:
    return [isinstance(local, OnDisk) for local in locals_of(model)]


def plain_sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Build SGD without states."""
    return [torch.optim.SGD(trained(model), lr=0.05)]


# -- bitwise equality with no offload ---------------------------------------------------------------------------------


Case = tuple[str, float, Make, int]  # strategy, fraction, optimizers, loop


@few_bytes_per_chunk()
def compare(folder: Path, cases: Sequence[Case]) -> None:
    """Strategies on one mesh axis are bitwise equal: one reference without offload suffices per optimizer and loop."""
    expected: dict[Any, list[Any]] = {}
    for strategy, fraction, make, number in cases:
        meshes = {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))} if "hsdp" in strategy else {}
        key = (make, number, *meshes)
        if key not in expected:
            expected[key] = trained_with(None, folder, strategy, make, number, **meshes)
        found = trained_with(fraction, folder, strategy, make, number, **meshes)
        assert_same(found, expected[key], name=f"{strategy}, {make.__name__}, {fraction}, {LOOPS[number]}")


def trained_with(
    fraction: float | None, folder: Path, strategy: str, make: Make, number: int, **options: Any
) -> list[Any]:
    """Return the results of training. The fraction determines how many whole units are on disk."""
    loop = dict(LOOPS[number])
    model = build(fraction, folder, strategy, loop.pop("mp_policy", None), **options)
    optimizers = make(model)
    left = learn(model, optimizers, **loop)
    units = units_in(model)
    sizes = [unit.whole_nbytes for unit in units]
    there = [size for unit, size in zip(units, sizes, strict=True) if unit.shards.is_on_disk]
    assert (fraction or 0) * sum(sizes) <= sum(there) <= (fraction or 0) * sum(sizes) + max(sizes)
    for unit in units:
        assert {isinstance(param.local, OnDisk) for param in unit.params} <= {unit.shards.is_on_disk}
    if fraction == 1.0 and make is not plain_sgd:
        assert all(all(on_the_disk(optimizer)) for optimizer in optimizers)
    return left


@pytest.mark.slow
def test_shard_offload_fractions_match_no_offload_bitwise(tmp_path):
    loops = [(adamw, 0), (adamw, 1), (momentum, 2)]
    cases = [("zero3", fraction, *loop) for loop in loops for fraction in (0.5, 1.0)]
    run_ranks(2, compare, tmp_path, [*cases, ("zero2", 1.0, muon, 0), ("zero2", 1.0, plain_sgd, 1)])


MAKERS, WORLDS, FRACTIONS = [adamw, momentum, muon, plain_sgd], [1, 3, 4], [0.3, 1.0]
STRATEGIES = [*product(["zero3", "zero2", "hsdp"], FRACTIONS)]


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_shard_offload_fractions_match_no_offload_in_every_case(tmp_path, world):
    """All combinations of any two among strategy with fraction, optimizer, loop and world are covered."""

    def exists(world: int, strategy: tuple[str, float], *_: object) -> bool:
        return world == 4 or strategy[0] != "hsdp"

    chosen = covering_pairs(WORLDS, STRATEGIES, MAKERS, range(3), allows=exists)
    cases = [(*strategy, make, number) for at, strategy, make, number in chosen if at == world]
    run_ranks(world, compare, tmp_path, cases, timeout=500)


# -- access to offloaded parameters -----------------------------------------------------------------------------------


@on_ranks(1)
def test_parameters_frozen_or_unfrozen_between_steps_match_no_offload(tmp_path):
    """A step updates a parameter if it has a gradient, even if it was frozen after the backward."""
    values = []
    for fraction in (None, 1.0):
        model = build(fraction, tmp_path)
        norms = [param for name, param in model.named_parameters() if "norm" in name]
        assert norms
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(6):
            if step in (0, 2, 5):
                for param in norms:
                    param.requires_grad_(step != 0)
            loss_of(model, batch(step)).backward()
            if step == 3:
                for param in norms:
                    param.requires_grad_(False)
            optimizer.step()
            optimizer.zero_grad()
        values.append(wholes(model))
    assert_same(*values)


@pytest.mark.slow
@on_ranks(2)
@few_bytes_per_chunk()
def test_parameters_on_disk_can_be_read_and_written(tmp_path):
    there, plain = build(1.0, tmp_path), build(None, tmp_path)
    assert all(stored(there)) and storage_bytes(there.parameters()) == 0
    before = copy.deepcopy(there)
    assert all(stored(before))

    with torch.no_grad():
        for param in (*there.parameters(), *plain.parameters()):
            param.mul_(2)
    for model in (there, plain):
        with summon_full_params(model), torch.no_grad():
            for param in model.parameters():
                param.add_(1)
    assert_same(wholes(there), wholes(plain), name="modified in place")

    left = []
    for model in (there, plain):
        [optimizer] = adamw(model)
        for step in range(2):
            loss_of(model, my_part(batch(step))).backward()
            kept = [param.grad for param in trained(model)]
            norm = torch.nn.utils.clip_grad_norm_(trained(model), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        loss_of(model, my_part(batch(5))).backward()
        left.append([norm.full_tensor(), [item.full_tensor() for item in kept if item is not None], wholes(model)])
        optimizer.zero_grad(set_to_none=False)
        assert all(not param.grad.full_tensor().any() for param in trained(model))
        optimizer.zero_grad()
    assert_same(left[0], left[1], name="torch's clipping, and gradients that somebody has kept")

    state = before.state_dict()
    for model in (there, plain):
        model.load_state_dict(state)
        model.double()
    assert all(stored(there)) and {local.dtype for local in locals_of(there)} == {torch.float64}
    assert_same(wholes(there), wholes(plain), name="loaded, and cast")


# -- checkpoints, and models on the meta device -----------------------------------------------------------------------


@few_bytes_per_chunk()
def save_all(folder: Path) -> None:
    model = build(1.0, folder)
    [optimizer] = adamw(model)
    learn(model, [optimizer], range(2))
    save(folder / "save", model=model, optimizer=optimizer, step=2)
    saved = async_save(folder / "async_save", model=model, optimizer=optimizer, step=2)
    taken = snapshot(model=model, optimizer=optimizer)
    left = learn(model, [optimizer], range(2, 4))  # while the checkpoint is written
    saved.wait()
    restore_snapshot(taken, model=model, optimizer=optimizer)
    assert_same(learn(model, [optimizer], range(2, 4)), left, name="from a snapshot")
    if dist.get_rank() == 0:
        torch.save(left[-2:], folder / "left.pt")


@few_bytes_per_chunk()
def load_all(folder: Path) -> None:
    left = torch.load(folder / "left.pt", weights_only=False)
    for name, fraction in (("save", None), ("save", 0.5), ("async_save", 1.0)):
        model = build(fraction, folder)
        [optimizer] = adamw(model)
        load(folder / name, model=model, optimizer=optimizer)
        assert any(stored(model)) == bool(fraction)
        with torch.device("meta"):
            empty = small_gpt(BLOCKS)
        load(folder / name, model=shard(empty, fraction, folder))
        assert any(stored(empty)) == bool(fraction)
        assert_same(wholes(empty), wholes(model), name="a model that had no values")
        if dist.get_world_size() == 2:
            assert_same(learn(model, [optimizer], range(2, 4))[-2:], left, name=f"{name}, {fraction}")


@pytest.mark.slow
def test_checkpoint_of_shards_resumes_with_other_fraction_and_world_size(tmp_path):
    run_ranks(2, save_all, tmp_path)
    for world in (2, 3):
        run_ranks(world, load_all, tmp_path)


# -- how much memory --------------------------------------------------------------------------------------------------


LAYERS, WIDTH = 12, 256


def layers(fraction: float | None, folder: Path) -> nn.Module:
    policy = None if fraction is None else Offload(parameters={"disk": fraction}, folder=folder / "scratch")
    each = [fully_shard(nn.Linear(WIDTH, WIDTH), offload_policy=policy) for _ in range(LAYERS)]
    return fully_shard(nn.Sequential(*each), offload_policy=policy)


@pytest.mark.slow
@on_ranks(2)
@few_bytes_per_chunk()
def test_memory_holds_few_units_from_model_construction_on(tmp_path):
    torch.manual_seed(0)
    shards = aligned((WIDTH * WIDTH + WIDTH) * 4 // dist.get_world_size()) + 2 * ALIGNMENT
    model, made = peak_during(partial(layers, 1.0, tmp_path))
    assert made <= 8 * shards * dist.get_world_size(), "no more than a layer, and what is written of others"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def step() -> None:
        take_step(optimizer, model(torch.randn(4, WIDTH)).square().mean())

    for _ in range(3):
        step()
    _, later = peak_during(step)
    world, buffers = dist.get_world_size(), 2 * MOST_WRITING + BUFFERS
    # Full parameters and gradients of two units each, transfer buffers, and pending writes of a step.
    assert later <= (4 * world + buffers) * 2 * shards
    assert buffers_of(torch.device("cpu")).idle_nbytes == 0, "gone after the step"
    model(torch.randn(4, WIDTH)).square().mean().backward()
    assert 0 < buffers_of(torch.device("cpu")).idle_nbytes <= (2 * MOST_WRITING + 1) * shards
    states = states_on_disk(optimizer)
    assert states is not None and len(states.chunks) == 2 * LAYERS

    model(torch.randn(4, WIDTH)).square().mean().backward()
    grads = [param.grad.to_local() for param in model.parameters()]
    assert all(isinstance(grad, OnDisk) for grad in grads)
    optimizer.zero_grad()
    found = measure_ledger(model, optimizer, lambda: model(torch.randn(4, WIDTH)).square().mean())
    predicted = predict_ledger(model)
    assert (predicted.parameters, predicted.gradients) == (found.parameters, found.gradients) == (0, 0)
    assert "12 of 13 units are on a disk between uses" in explain(model)


@pytest.mark.parametrize("streams", ["cpu", "gpu"])
def test_dry_run_predicts_savings_without_creating_files(tmp_path, monkeypatch, streams):
    monkeypatch.setattr(fullshard.disk.space, "DiskFile", None)
    peaks = {}
    for fraction in (None, 0.5, 1.0):
        tape = dry.run(
            partial(layers, fraction, tmp_path), lambda: torch.randn(4, WIDTH), world=2, steps=2, streams=streams
        )
        assert not dry.races(tape)
        peaks[fraction] = tape.peak_bytes() + (streams == "gpu") * tape.peak_bytes(of_host=True)
    shards = (WIDTH * WIDTH + WIDTH) * 4 // 2
    assert peaks[None] - peaks[1.0] >= 4 * shards * (LAYERS - 8), "parameters, gradients and two states"
    assert peaks[None] > peaks[0.5] > peaks[1.0]


# -- when the disk fails ----------------------------------------------------------------------------------------------


@on_ranks(1)
@few_bytes_per_chunk()
def test_disk_error_raises_with_advice_to_use_the_last_checkpoint(tmp_path):
    for call in ("preadv", "pwritev"):
        model = build(1.0, tmp_path)
        [optimizer] = adamw(model)
        loss_of(model, my_part(batch(0))).backward()
        real = getattr(os, call)

        def broken(*args: Any) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        setattr(os, call, broken)
        try:
            with pytest.raises(DiskError, match="continue from the last checkpoint, on another disk"):
                optimizer.step()
                loss_of(model, my_part(batch(1)))
        finally:
            setattr(os, call, real)


@on_ranks(1)
@few_bytes_per_chunk()
def test_disk_error_raises_in_forward_if_no_backward_follows(tmp_path):
    """Evaluate a stage with manual backward finalization. No backward follows that could report the error."""
    model = build(1.0, tmp_path)
    model.set_manual_backward_finalization(True)
    broken = mock.patch("os.preadv", side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
    with torch.no_grad(), broken, pytest.raises(DiskError, match="continue from the last checkpoint"):
        loss_of(model, my_part(batch(0)))


@on_ranks(2)
@few_bytes_per_chunk()
def test_disk_error_on_one_rank_raises_on_every_rank_in_each_pass(tmp_path):
    """Fail reads of shards in forward, in forward without gradients and in backward, and writes of gradients in the
    backward of a second microbatch.
    """
    model = build(1.0, tmp_path)
    rows = my_part(batch(0))
    with torch.no_grad():
        before = loss_of(model, rows)
    broken = OSError(errno.EIO, os.strerror(errno.EIO))

    def forward() -> None:
        loss_of(model, rows)

    def evaluation() -> None:
        with torch.no_grad():
            loss_of(model, rows)

    def backward() -> None:
        loss.backward()

    def second_backward() -> None:
        loss_of(model, rows).backward()

    cases = [(forward, "preadv"), (evaluation, "preadv"), (backward, "preadv"), (second_backward, "pwritev")]
    for fails, call in cases:
        loss = loss_of(model, rows)
        if fails is second_backward:
            loss.backward()
        here = mock.patch(f"os.{call}", side_effect=broken) if dist.get_rank() == 1 else nullcontext()
        with here, pytest.raises(DiskError, match=f"^rank 1: .*errno {errno.EIO}") as raised:
            for _ in range(2):  # a write that is pending when a pass ends is checked in the next
                fails()
        assert "rank 0" not in str(raised.value), fails.__name__
        model.zero_grad()
        if call == "preadv":  # nothing was lost
            with torch.no_grad():
                assert_same(loss_of(model, rows), before, name=fails.__name__)


def by_hand(*args: Any) -> None:
    raise RuntimeError("on purpose")


@pytest.mark.slow
@on_ranks(2)
@few_bytes_per_chunk()
def test_read_error_on_one_rank_raises_on_every_rank_in_full_gathers(tmp_path):
    """No rank waits for the one that cannot read its shard. Nothing is overwritten, so the same calls then succeed."""
    model = build(1.0, tmp_path)
    [optimizer] = adamw(model)
    learn(model, [optimizer], range(1))
    loss_of(model, my_part(batch(1))).backward()

    def summon() -> None:
        with summon_full_params(model, writeback=False):
            pass

    def full_weights() -> None:
        with state_dict_type(model, StateDictType.FULL_STATE_DICT):
            as_configured(model, model.state_dict(), "", get_state_dict_type(model))

    calls: dict[str, Callable[[], object]] = {
        "full_optim_state_dict": lambda: full_optim_state_dict(model, optimizer),
        "full state dict": full_weights,
        "summon_full_params": summon,
        "stream_weights": lambda: list(stream_weights(model)),
        "export_safetensors": lambda: export_safetensors(model, tmp_path / "exported"),
        "clip_grad_norm_": lambda: clip_grad_norm_(trained(model), 1e9),
    }
    before = [wholes(model), states_of(optimizer)]
    broken = OSError(errno.EIO, os.strerror(errno.EIO))
    for name, call in calls.items():
        here = mock.patch("os.preadv", side_effect=broken) if dist.get_rank() == 1 else nullcontext()
        with here, pytest.raises((DiskError, CheckpointError), match=rf"rank 1: .*scratch/\S+: .*errno {errno.EIO}"):
            call()
        assert_same([wholes(model), states_of(optimizer)], before, name=name)
        call()


@on_ranks(2)
@few_bytes_per_chunk()
def test_failed_forward_skips_the_final_all_reduce(tmp_path):
    model = build(1.0, tmp_path)
    rows = my_part(batch(0))
    with recording() as whole:
        before = loss_of(model, rows)
    raising = mock.patch.object(model, "forward", side_effect=by_hand)
    with recording() as record, raising, pytest.raises(RuntimeError, match="on purpose"):
        model(rows)
    reported = whole.names()[-1]
    assert reported == "all_reduce" and reported not in record.names(), "no peer has to reduce"
    assert_same(loss_of(model, rows), before)


# -- disk traffic -----------------------------------------------------------------------------------------------------


def moved(folder: Path, microbatches: int, clips: bool) -> tuple[float, float]:
    """Return bytes read and written by four steps, relative to the prediction. Last writes may end in the next step."""
    policy = Offload(parameters={"disk": 1.0}, folder=folder)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    for layer in model:
        fully_shard(layer, offload_policy=policy)
    fully_shard(model, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(5):
        for microbatch in range(microbatches):
            model.set_requires_gradient_sync(microbatch == microbatches - 1)
            model(torch.ones(2, 256)).sum().backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            before = pace_of(folder).total
    found, cost = pace_of(folder).total.since(before), predict_on_disk(model)
    forecast = Traffic.of_optimizer(1, bytes_each=cost.nbytes) + Traffic.of_parameters(
        cost.shard_nbytes, gathers=2 * microbatches, clips=clips
    )
    return found.read_bytes / (4 * forecast.read_bytes), found.written_bytes / (4 * forecast.written_bytes)


@pytest.mark.slow
def test_disk_traffic_of_a_step_matches_the_prediction(tmp_path):
    for number, (microbatches, clips) in enumerate([(1, False), (3, True)]):
        for found in run_ranks(2, moved, tmp_path / str(number), microbatches, clips):
            assert found == pytest.approx((1, 1), rel=0.1)


def test_ledger_counts_parameters_in_memory_if_strategy_replicates(tmp_path):
    with dry.world(2), dry.taped():
        there, here = build(0.6, tmp_path), build(None, tmp_path)
        for strategy in ("ddp", "zero1"):
            assert predict_ledger(there, strategy=strategy) == predict_ledger(here, strategy=strategy)
            assert predict_on_disk(there, strategy=strategy) == OnDiskCost()


@on_ranks(2)
def test_buffers_created_in_inference_mode_are_writable_afterwards(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model, offload_policy=Offload(parameters={"disk": 1.0}, folder=tmp_path))
    buffers_of(torch.device("cpu")).drop()  # buffers that other tests left
    with torch.inference_mode():
        expected = model(torch.ones(2, 8)).clone()
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert_same(copied(torch.ones(2, 8)).detach(), expected)
