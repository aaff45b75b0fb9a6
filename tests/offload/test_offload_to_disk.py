"""Optimizer states on disk: bitwise equal to a run without offload, in little memory, under all operations."""

import copy
import errno
import io
import os
import random
import re
import subprocess
import sys
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
from run_states import everything
from shared_ranks import on_ranks, run_ranks
from small_models import (
    BLOCKS,
    ONE_AXIS,
    SmallGPT,
    batch,
    covering_pairs,
    gathered,
    loss_of,
    my_part,
    small_gpt,
    trained,
    wholes,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

import fullshard.disk.space
import fullshard.state.on_disk as on_disk
from fullshard import ConfigError, DiskError, MixedPrecisionPolicy, Offload, clip_grad_norm_, dry, fully_shard
from fullshard.checkpoint import async_save, load, restore_snapshot, save, snapshot
from fullshard.disk.interface import ALIGNMENT, BUFFERS
from fullshard.disk.tensors import OnDisk
from fullshard.engine.registry import units_in
from fullshard.optim import Muon
from fullshard.plan.explain import explain
from fullshard.plan.ledger import measure_ledger, peak_during, predict_ledger, predict_on_disk, storage_bytes
from fullshard.state.on_disk import states_on_disk
from fullshard.state.optim_state import full_optim_state_dict, optim_state_dict_to_load
from fullshard.testing import assert_same

Optimizers = list[torch.optim.Optimizer]
Make = Callable[[nn.Module], Optimizers]


def adamw(model: nn.Module) -> Optimizers:
    """Build AdamW with two groups, one with an additional state."""
    params = trained(model)
    groups = [{"params": params[::2]}, {"params": params[1::2], "amsgrad": True, "weight_decay": 0.3}]
    return [torch.optim.AdamW(groups, lr=1e-2)]


def momentum(model: nn.Module) -> Optimizers:
    return [torch.optim.SGD(trained(model), lr=0.05, momentum=0.9, nesterov=True)]


def muon(model: nn.Module) -> Optimizers:
    """Build Muon for the matrices of blocks, and Adam for all other parameters."""
    hidden = [
        param
        for name, param in model.named_parameters()
        if "blocks" in name and param.ndim == 2 and param.requires_grad
    ]
    ids = set(map(id, hidden))
    return [Muon(hidden, lr=0.02), torch.optim.Adam([item for item in trained(model) if id(item) not in ids])]


def adafactor(model: nn.Module) -> Optimizers:
    return [torch.optim.Adafactor([item for item in trained(model) if item.numel()], lr=0.05)]


def build(
    fraction: float | None,
    folder: Path,
    strategy: str = "zero3",
    mp_policy: MixedPrecisionPolicy | None = None,
    blocks: int = BLOCKS,
) -> SmallGPT:
    """Build a model of several units with a fraction of the states on disk. Blocks have `mp_policy`."""
    policy = None if fraction is None else Offload(optimizer={"disk": fraction}, folder=folder / "scratch")
    model, options = small_gpt(blocks), {"strategy": strategy, "offload_policy": policy}
    for block in model.blocks:
        fully_shard(block, mp_policy=mp_policy, **options)
    return fully_shard(model, **options)


def learn(
    model: Any, optimizers: Optimizers, steps: range = range(3), microbatches: int = 1, clips: bool = False
) -> list[Any]:
    """Train, and return everything to compare."""
    left: list[Any] = []
    for step in steps:
        for number in range(microbatches):
            model.set_requires_gradient_sync(number == microbatches - 1)
            loss = loss_of(model, my_part(batch(10 * number + step)))
            loss.backward()
            left.append(loss.detach().clone())
        if clips:
            left.append(clip_grad_norm_(trained(model), 0.5).clone())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [*left, wholes(model), [states_of(optimizer) for optimizer in optimizers]]


def states_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return all states, unsharded, in the optimizer's order."""
    state = optimizer.state_dict()["state"]
    return gathered({f"{number} {name}": item for number, of_one in state.items() for name, item in of_one.items()})


def on_the_disk(optimizer: torch.optim.Optimizer) -> list[bool]:
    """Return for each state of a parameter's shape whether it is on disk."""
    states = [item for of_one in optimizer.state.values() for item in of_one.values() if isinstance(item, DTensor)]
    return [isinstance(state.to_local(), OnDisk) for state in states if state.ndim]


def few_bytes_per_chunk() -> Any:
    return mock.patch.object(on_disk, "CHUNK_NBYTES", 60_000)


# -- bitwise equality with no offload ---------------------------------------------------------------------------------

LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
LOOPS: list[dict[str, Any]] = [{}, {"microbatches": 2, "clips": True}, {"mp_policy": LOW, "clips": True}]
FEW = [("ddp", 0), ("zero1", 1), ("zero3", 2), ("zero2", 0)]
MAKERS, WORLDS, FRACTIONS = [adamw, momentum, muon], [1, 2, 3], [0.0, 0.25, 0.5, 1.0]
CASES = covering_pairs(MAKERS, WORLDS, ONE_AXIS, range(3), FRACTIONS)


@few_bytes_per_chunk()
def compare(folder: Path, make: Make, cases: Sequence[tuple[str, int, float]]) -> None:
    """All strategies are bitwise equal, so one run without offload is the reference for each loop."""

    def run(fraction: float | None, strategy: str, mp_policy: Any = None, **loop: Any) -> list[Any]:
        model = build(fraction, folder, strategy, mp_policy)
        optimizers = make(model)
        left = learn(model, optimizers, **loop)
        assert all(any(on_the_disk(optimizer)) == bool(fraction) for optimizer in optimizers)
        return left

    expected = {number: run(None, cases[0][0], **LOOPS[number]) for number in {number for _, number, _ in cases}}
    for strategy, number, fraction in cases:
        found = run(fraction, strategy, **LOOPS[number])
        assert_same(found, expected[number], name=f"{strategy}, {make.__name__}, {fraction}, {LOOPS[number]}")


def with_fraction(fraction: float, cases: Sequence[tuple[str, int]]) -> list[tuple[str, int, float]]:
    return [(*case, fraction) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS, ids=lambda maker: maker.__name__)
def test_state_offload_fractions_match_no_offload_bitwise(tmp_path, make):
    run_ranks(2, compare, tmp_path, make, with_fraction(0.4, FEW))


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("make", MAKERS, ids=lambda maker: maker.__name__)
def test_state_offload_fractions_match_no_offload_in_every_case(tmp_path, make, world):
    """All combinations of any two among optimizer, world, strategy, loop and fraction are covered."""
    run_ranks(world, compare, tmp_path, make, [case[2:] for case in CASES if case[:2] == (make, world)], timeout=500)


@pytest.mark.slow
def test_adafactor_with_states_on_disk_matches_no_offload_bitwise(tmp_path):
    run_ranks(2, compare, tmp_path, adafactor, with_fraction(1.0, [("ddp", 0), ("ddp", 1)]))


@pytest.mark.slow
@on_ranks(1)
@few_bytes_per_chunk()
def test_hooks_closures_and_missing_grads_match_no_offload_bitwise(tmp_path):
    """User hooks, closures, schedulers, foreach and fused steps, steps without some gradients, states created later."""

    def by_closure(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, my_part(batch(step)))
            loss.backward()
            return loss

        assert optimizer.step(closure).ndim == 0

    def by_hand(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.zero_grad()
        loss_of(model, my_part(batch(step))).backward()
        optimizer.step()

    def without_some(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.zero_grad()
        loss_of(model, my_part(batch(step))).backward()
        for number, param in enumerate(trained(model)):
            if number % 3 == step % 3 or number < 9 * step:
                param.grad = None
        optimizer.step()

    def with_states_later(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.param_groups[0]["momentum"] = 0.9 * (step > 0)
        by_hand(model, optimizer, step)

    def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            param.grad = None if param.grad is None else param.grad / 2

    def run(fraction: float | None, take: Any, hooks: bool, scheduled: bool, **options: Any) -> list[Any]:
        model, counts = build(fraction, tmp_path), [0]
        kind = torch.optim.SGD if take is with_states_later else torch.optim.AdamW
        optimizer = kind(trained(model), lr=1e-2, **options)
        if hooks:
            optimizer.register_step_pre_hook(halve)
            optimizer.register_step_post_hook(lambda *_: counts.append(len(counts)))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if scheduled else None
        for step in range(4):
            take(model, optimizer, step)
            if scheduler is not None:
                scheduler.step()
        return [wholes(model), states_of(optimizer), counts, optimizer.param_groups[0]["lr"]]

    for take, hooks, scheduled, options in [
        (by_closure, False, True, {}),
        (by_closure, True, False, {}),
        (by_hand, True, False, {"foreach": True}),
        (by_hand, False, True, {"fused": True}),
        (without_some, False, False, {}),
        (with_states_later, False, False, {}),
    ]:
        found, expected = (run(fraction, take, hooks, scheduled, **options) for fraction in (0.6, None))
        assert_same(found, expected, name=f"{take.__name__}, {hooks}, {options}")


@pytest.mark.slow
@on_ranks(2)
@few_bytes_per_chunk()
def test_step_hooks_on_one_rank_change_neither_results_nor_peak(tmp_path):
    """Collectives and the peak of a first step are the same, whichever ranks have hooks."""

    def run(hooks: bool) -> tuple[list[Any], list[Any]]:
        model, called = build(1.0, tmp_path), []
        optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
        if hooks:
            optimizer.register_step_pre_hook(lambda *its: called.append(its))
            handle = optimizer.register_step_post_hook(lambda *its: called.append(its) or handle.remove())
        loss_of(model, my_part(batch(0))).backward()
        _, most = peak_during(optimizer.step)
        return [most, learn(model, [optimizer])], [its == (optimizer, (optimizer,), {}) for its in called]

    expected, none = run(hooks=False)
    found, called = run(hooks=dist.get_rank() == 0)
    assert_same(found, expected)
    assert not none and called == ([True] * 5 if dist.get_rank() == 0 else []), "once before each, and once after"


# -- offloaded bytes and memory ---------------------------------------------------------------------------------------


@few_bytes_per_chunk()
def weigh(folder: Path) -> None:
    for fraction in (0.0, 0.25, 0.5, 1.0):
        model = build(fraction, folder)
        optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
        loss_of(model, my_part(batch(0))).backward()
        _, first = peak_during(optimizer.step)
        loss_of(model, my_part(batch(1))).backward()
        _, later = peak_during(optimizer.step)
        states = states_on_disk(optimizer)
        if not fraction:
            assert states is None and not any(on_the_disk(optimizer))
            continue
        assert states is not None
        sizes = {
            unit: sum(
                sharded.numel() * sharded.itemsize
                for sharded in (p.sharded for p in unit.params)
                if sharded.requires_grad
            )
            for unit in units_in(model)
        }
        there = [unit for unit in sizes if any(states.holds(param.sharded) for param in unit.params)]
        assert all(states.holds(p.sharded) for unit in there for p in unit.params if p.sharded.requires_grad)
        taken = sum(sizes[unit] for unit in there)
        assert taken >= fraction * sum(sizes.values()) > taken - max(sizes[unit] for unit in there)

        kept = [item for of_one in optimizer.state.values() for item in of_one.values()]
        in_memory = storage_bytes(item for item in kept if isinstance(item, DTensor) and item.ndim)
        total = sum(item.to_local().nbytes for item in kept if isinstance(item, DTensor) and item.ndim)
        on_it = sum(
            item.to_local().nbytes for item in kept if isinstance(item, DTensor) and isinstance(item.to_local(), OnDisk)
        )
        assert in_memory == total - on_it
        assert states.nbytes - ALIGNMENT * len(states.chunks) <= on_it <= states.nbytes

        predicted = predict_ledger(model)
        padding = ALIGNMENT * BUFFERS
        optimizer.zero_grad()
        found = measure_ledger(model, optimizer, partial(loss_of, model, my_part(batch(2))))
        assert 0 <= found.optimizer_state - predicted.optimizer_state <= padding, (found, predicted)
        text = explain(model)
        assert f"{fraction:.0%} of the optimizer state is on a disk, in {folder}" in text
        assert re.search(
            r"on the disk .*: optimizer state .*\n.*comes .*: optimizer state .*\n.*goes there .*: optimizer state",
            text,
        )

        largest = max(states.chunks)
        assert states.buffer_nbytes <= BUFFERS * (largest + ALIGNMENT)
        temporaries = 3 * largest  # of the optimizer's arithmetic, on the parameters of one chunk
        assert first <= BUFFERS * (2 * largest + ALIGNMENT) + temporaries + in_memory
        assert later <= BUFFERS * (largest + ALIGNMENT) + temporaries + in_memory
        assert not any(buffer.numel() for its in states._buffers.values() for buffer in its), "gone after the step"


@pytest.mark.slow
def test_whole_units_are_offloaded_and_a_step_buffers_three_chunks(tmp_path):
    run_ranks(2, weigh, tmp_path)
    run_ranks(1, weigh, tmp_path)


@pytest.mark.slow
@on_ranks(2)
def test_snapshot_restores_states_to_disk(tmp_path):
    run = build(1.0, tmp_path)
    [optimizer] = momentum(run)
    learn(run, [optimizer])
    taken = snapshot(model=run, optimizer=optimizer)
    expected = learn(run, [optimizer])
    for fraction in (0.0, 0.5, 1.0, None):
        new = run if fraction is None else build(fraction, tmp_path)  # the last case restores in place
        [its] = [optimizer] if fraction is None else momentum(new)
        restore_snapshot(taken, model=new, optimizer=its)
        share = sum(on_the_disk(its)) / len(on_the_disk(its))
        assert share == 0 if fraction == 0 else 0 < share < 1 if fraction == 0.5 else share == 1
        assert_same(learn(new, [its]), expected)


def twelve_layers(fraction: float, folder: Path) -> nn.Module:
    policy = Offload(optimizer={"disk": fraction}, folder=folder / "scratch")
    layers = [fully_shard(nn.Linear(256, 256), offload_policy=policy) for _ in range(12)]
    return fully_shard(nn.Sequential(*layers), offload_policy=policy)


@pytest.mark.slow
@on_ranks(1)
def test_first_step_buffers_at_most_three_chunks(tmp_path):
    """Check that at most three of twelve chunks are in memory, plus their new states, and arithmetic on one."""
    for make in (torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9), Muon):
        model = twelve_layers(1.0, tmp_path)
        optimizer = make([param for param in model.parameters() if param.ndim == 2], lr=1e-2)
        model(torch.randn(4, 256)).square().mean().backward()
        _, peak = peak_during(optimizer.step)
        chunks = states_on_disk(optimizer).chunks
        assert len(chunks) == 12
        arithmetic = 12 if make is Muon else 5  # Newton-Schulz steps have several matrices at once
        assert peak <= (BUFFERS + arithmetic) * (max(chunks) + ALIGNMENT), make


@pytest.mark.slow
@pytest.mark.parametrize("streams", ["cpu", "gpu"])
def test_dry_run_peak_matches_the_formula_without_creating_files(tmp_path, monkeypatch, streams):
    monkeypatch.setattr(fullshard.disk.space, "DiskFile", None)
    peaks, costs = {}, {}
    for fraction in (0.0, 0.5, 1.0):

        def make(fraction: float = fraction) -> nn.Module:
            model = twelve_layers(fraction, tmp_path)
            costs[fraction] = predict_on_disk(model)
            return model

        for fused in (False, True):
            optimizer = partial(torch.optim.AdamW, fused=fused)
            tape = dry.run(
                make, lambda: torch.randn(4, 256), world=2, steps=2, streams=streams, make_optimizer=optimizer
            )
            assert not dry.races(tape)
            peaks[fraction, fused] = tape.peak_bytes() + (streams == "gpu") * tape.peak_bytes(of_host=True)
            saved = costs[fraction].nbytes - costs[fraction].buffer_nbytes
            found = peaks[0.0, fused] - peaks[fraction, fused]
            gone = (
                costs[fraction].buffer_nbytes if streams == "cpu" else 0
            )  # freed between steps, unlike page-locked memory
            assert -gone <= saved - found <= 2 * ALIGNMENT * BUFFERS, (fraction, fused)


# -- access to offloaded states ---------------------------------------------------------------------------------------


def pickled(tensor: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.slow
@on_ranks(2)
@few_bytes_per_chunk()
def test_states_on_disk_can_be_read_and_written(tmp_path):
    models = [build(fraction, tmp_path) for fraction in (None, 1.0)]
    plain, offloaded = ([model, adamw(model)[0]] for model in models)
    for model, optimizer in (plain, offloaded):
        learn(model, [optimizer])
    known, stored = (
        next(item["exp_avg"] for param, item in optimizer.state.items() if param.shape == (192, 97))
        for _, optimizer in (plain, offloaded)
    )
    local = stored.to_local()
    assert isinstance(local, OnDisk)
    for name, read in {
        "sum": lambda item: item.sum().full_tensor(),
        "whole": lambda item: item.full_tensor(),
        "part": lambda item: item.to_local()[1:3, ::2],
        "flat": lambda item: item.to_local().flatten(),
        "copy": lambda item: item.clone().to_local(),
        "deep copy": lambda item: copy.deepcopy(item).to_local(),
        "number": lambda item: item.to_local()[0, 0].item(),
        "other dtype": lambda item: item.to_local().double(),
        "two": lambda item: (item + item).to_local(),
        "many": lambda item: torch._foreach_mul([item.to_local()], 2.0),
        "pickled": lambda item: pickled(item.to_local()),
    }.items():
        assert_same(read(stored), read(known), name=name)
    for name, write in {
        "add_": lambda item: item.add_(1.0),
        "copy_": lambda item: item.copy_(item * 3),
        "local": lambda item: item.to_local().mul_(0.5),
        "many": lambda item: torch._foreach_add_([item.to_local()], 1.0),
        "detached": lambda item: item.detach().to_local().neg_(),
        "out": lambda item: torch.neg(item.to_local(), out=item.to_local()),
    }.items():
        for item in (stored, known):
            with torch.no_grad():
                write(item)
        assert isinstance(stored.to_local(), OnDisk)
        assert_same(stored.full_tensor(), known.full_tensor(), name=name)
    with pytest.raises(RuntimeError, match="numpy"):
        local.numpy()
    assert repr(local) == f"OnDisk({tuple(local.shape)}, torch.float32)"
    assert_same(*(learn(model, [optimizer], range(3, 5)) for model, optimizer in (offloaded, plain)))


# -- checkpoints ------------------------------------------------------------------------------------------------------


MAKES: dict[str, Make] = {"adamw": adamw, "muon": lambda model: muon(model)[:1]}
SAVED = {("adamw", 0.6): async_save, ("adamw", 1.0): save, ("muon", 1.0): async_save}
LOADED = [("adamw", 0.6, 1.0), ("adamw", 0.6, None), ("adamw", 1.0, 0.4), ("muon", 1.0, 0.3)]


@few_bytes_per_chunk()
def save_all(folder: Path) -> None:
    for (name, fraction), saves in SAVED.items():
        model = build(fraction, folder, blocks=2)
        [optimizer] = optimizers = MAKES[name](model)
        learn(model, optimizers, range(2))
        reported = everything(model, optimizer)
        saved = saves(folder / f"{name} {fraction}", model=model, optimizer=optimizer, step=2)
        left = learn(model, optimizers, range(2, 4))  # while the checkpoint is written
        if saves is async_save:
            saved.wait()
        if dist.get_rank() == 0:
            torch.save({**reported, "next": left[-2:]}, folder / f"{name} {fraction}.pt")


@few_bytes_per_chunk()
def load_all(folder: Path) -> None:
    for name, saved, fraction in LOADED:
        expected = torch.load(folder / f"{name} {saved}.pt", weights_only=False)
        left = expected.pop("next")
        model = build(fraction, folder, "zero2", blocks=2)
        [optimizer] = optimizers = MAKES[name](model)
        load(folder / f"{name} {saved}", model=model, optimizer=optimizer)
        assert all(on_the_disk(optimizer)) == (fraction == 1), "what is loaded takes memory for a tensor at a time"
        assert_same(everything(model, optimizer), expected, name=f"{name}, {saved}, {fraction}")
        if dist.get_world_size() == 2:
            assert_same(learn(model, optimizers, range(2, 4))[-2:], left, name="going on")


@pytest.mark.slow
def test_checkpoint_of_states_resumes_with_other_fraction_and_world_size(tmp_path):
    run_ranks(2, save_all, tmp_path)
    for world in (2, 1, 3):
        run_ranks(world, load_all, tmp_path)


@pytest.mark.slow
@on_ranks(2)
@few_bytes_per_chunk()
def test_optimizer_state_dicts_of_states_on_disk_round_trip(tmp_path):
    """Get and set states through all other state dict functions."""
    model = build(1.0, tmp_path)
    [optimizer] = adamw(model)
    expected = learn(model, [optimizer])[-1]
    named, full = get_optimizer_state_dict(model, optimizer), full_optim_state_dict(model, optimizer, rank0_only=False)
    numbered = copy.deepcopy(optimizer.state_dict())
    weights = model.state_dict()
    left = None
    for way in ("torch's", "full", "numbered"):
        other = build(0.5, tmp_path)
        [stepping] = adamw(other)
        learn(other, [stepping], range(7, 8))
        other.load_state_dict(weights)
        if way == "torch's":
            set_optimizer_state_dict(other, stepping, named)
        elif way == "full":
            optim_state_dict_to_load(other, stepping, full, load_directly=True)
        else:
            stepping.load_state_dict(numbered)
        assert_same([states_of(stepping)], expected, name=way)
        found = learn(other, [stepping], range(3, 5))
        left = left or found
        assert_same(found, left, name=way)
        assert any(on_the_disk(stepping))


# -- what can go wrong ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@on_ranks(1)
@few_bytes_per_chunk()
def test_disk_error_reports_errno_and_training_resumes_from_checkpoint(tmp_path):
    model = build(1.0, tmp_path)
    [optimizer] = adamw(model)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        mock.patch("os.posix_fallocate", side_effect=full),
        pytest.raises(DiskError, match=r"bytes failed, .*free"),
    ):
        learn(model, [optimizer], range(1))
    model = build(1.0, tmp_path)
    [optimizer] = adamw(model)
    learn(model, [optimizer], range(2))
    saved = everything(model, optimizer)
    save(tmp_path / "checkpoints", model=model, optimizer=optimizer, step=2)
    broken = OSError(errno.EIO, os.strerror(errno.EIO))
    for call in ("preadv", "pwritev"):
        with mock.patch(f"os.{call}", side_effect=broken):
            with pytest.raises(DiskError, match="last checkpoint") as raised:
                learn(model, [optimizer], range(2, 4))
            assert "errno 5" in str(raised.value)
        # The content of the file is undefined now; the checkpoint has a whole step.
        other = build(1.0, tmp_path)
        [stepping] = adamw(other)
        load(tmp_path / "checkpoints", model=other, optimizer=stepping)
        assert_same(everything(other, stepping), saved, name=call)
        model, optimizer = other, stepping


@pytest.mark.slow
@on_ranks(2)
@few_bytes_per_chunk()
def test_disk_error_on_one_rank_raises_on_every_rank_in_step(tmp_path):
    """No rank waits for the one with the failed disk, with or without collectives in the optimizer."""
    full, broken = (OSError(code, os.strerror(code)) for code in (errno.ENOSPC, errno.EIO))
    fails = [(0, "posix_fallocate", full), (0, "pwritev", broken), (2, "preadv", broken), (2, "pwritev", broken)]
    for make, (steps, call, error) in product((adamw, muon), fails):
        model = build(1.0, tmp_path)
        optimizers = make(model)
        learn(model, optimizers, range(steps))
        here = mock.patch(f"os.{call}", side_effect=error) if dist.get_rank() == 1 else nullcontext()
        with here, pytest.raises(DiskError, match=f"^rank 1: .*errno {error.errno}") as raised:
            learn(model, optimizers, range(steps, steps + 2))
        assert "rank 0" not in str(raised.value), (make, call)
        dist.barrier()


@on_ranks(1)
def test_optimizer_that_may_need_all_parameters_at_once_raises(tmp_path):
    class Whole(torch.optim.SGD):
        """An optimizer with an unknown step."""

    model = build(1.0, tmp_path)
    loss_of(model, batch(0)).backward()
    before = wholes(model)
    with pytest.raises(ConfigError, match="Whole may need all parameters at once"):
        Whole(trained(model), lr=1.0, momentum=0.9).step()
    assert_same(wholes(model), before)


KILLED = """
import os, random, signal, sys
from pathlib import Path
import torch, torch._dynamo, torch.distributed as dist  # a DTensor needs both: or each child would import the one
import test_offload_to_disk as laws
from fullshard.checkpoint import latest, load, save

folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
STEPS = 3

def train(dies_at):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    calls = 0
    def dying(move):
        def moved(descriptor, buffers, offset):
            nonlocal calls
            calls += 1
            if calls == dies_at:
                half = memoryview(buffers[0]).cast("B")[: len(buffers[0]) // 8192 * 4096]
                move(descriptor, [half], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            return move(descriptor, buffers, offset)
        return moved
    os.preadv, os.pwritev = dying(os.preadv), dying(os.pwritev)
    model = laws.build(0.8, folder, blocks=1)
    [optimizer] = laws.adamw(model)
    done = 0
    if latest(folder / "checkpoints") is not None:
        done = load(folder / "checkpoints", model=model, optimizer=optimizer).step
    for step in range(done, STEPS):
        laws.learn(model, [optimizer], range(step, step + 1))
        save(folder / "checkpoints", model=model, optimizer=optimizer, step=step + 1, keep=2)
    return laws.everything(model, optimizer)

moments = random.Random(seed)
killed = 0
while True:
    dies_at = moments.randint(1, 25) if killed < kills else 0
    child = os.fork()
    if not child:
        with laws.few_bytes_per_chunk():
            found = train(dies_at)
        torch.save(found, folder / "found.pt")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.listdir(folder / "scratch") == [], "nothing is left to be trusted, or to fill the disk"
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        killed += 1
        continue
    assert status == 0
    break
print("killed", killed)
"""


def straight(folder: Path) -> Any:
    model = build(None, folder, blocks=1)
    [optimizer] = adamw(model)
    learn(model, [optimizer], range(3))
    return everything(model, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_run_killed_during_disk_io_resumes_bitwise_from_checkpoint(tmp_path, kills):
    """Each kill interrupts a read or a write after half of its bytes."""
    paths = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    reported = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), str(kills), str(random.Random(kills).random())[2:]],
        env={**os.environ, **paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert reported.returncode == 0, reported.stderr
    assert reported.stdout == f"killed {kills}\n"
    [expected] = run_ranks(1, straight, tmp_path)
    assert_same(torch.load(tmp_path / "found.pt", weights_only=False), expected)
