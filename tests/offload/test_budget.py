"""A memory budget per rank: offload as little as possible, with bitwise equal results, consistently on all ranks."""

import errno
import gc
import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_ranks
from small_models import batch, chain, inputs, loss_of, my_part, small_gpt, take_step, trained, wholes
from test_offload_to_disk import on_the_disk, states_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fullshard
from fullshard import ConfigError, DiskError, MixedPrecisionPolicy, Offload, StateError, dry, fully_shard
from fullshard.checkpoint import load, save
from fullshard.device.accelerator import accelerator_for
from fullshard.disk.tensors import OnDisk
from fullshard.engine import activations, offloaded
from fullshard.engine.placements import placements_of, units_on_disk, units_steppable_on_cpu
from fullshard.engine.registry import units_in
from fullshard.optim import step_shards
from fullshard.plan.explain import explain
from fullshard.plan.hardware import hardware
from fullshard.plan.ledger import peak_during, storage_bytes
from fullshard.policy.offload import StatePlacement
from fullshard.policy.tiers import Tier, least_that_fits
from fullshard.report.reading import read_run
from fullshard.state import on_disk
from fullshard.tape.tape import HOST
from fullshard.testing import assert_same
from fullshard.train.options import parse_settings
from fullshard.train.predicting import Machine, predicted

MACHINE = Machine(device_type="cpu", device_name="", memory_bytes=8 << 30, world=4, local_world=4, machines=1)

STATES = Tier(what="optimizer", where="disk", steps=[(0.25, -5), (0.5, 20), (1.0, 60)])
KEPT = Tier(what="activations", where="disk", steps=[(0.5, 10), (1.0, 30)])


@pytest.mark.parametrize("budget", range(130))
def test_least_offload_that_fits_uses_the_cheapest_tier_first(budget):
    chosen, needed = least_that_fits(100, budget, [STATES, KEPT])
    freed = {tier.what: dict(tier.steps)[fraction] for tier, fraction in chosen}
    assert needed == 100 - sum(freed.values())
    assert (needed <= budget) == (budget >= 10)
    if freed.get("activations"):
        assert freed["optimizer"] == 60
    for tier, fraction in chosen:  # one step less does not fit, or no smaller step exists
        less = max((bytes_ for share, bytes_ in tier.steps if share < fraction), default=0)
        assert needed + freed[tier.what] - max(less, 0) > budget


small_chunks = mock.patch.object(on_disk, "CHUNK_NBYTES", 16384)


def small_windows(test: Callable[..., None]) -> Callable[..., None]:
    """Decorate a test with thresholds low enough to offload the activations and units of small models."""
    smallest = mock.patch.object(activations, "SMALLEST_BYTES", 1)
    return smallest(mock.patch.object(offloaded, "WINDOW_BYTES", 4096)(test))


def build(policy: Offload | None, strategy: str = "zero3") -> Any:
    model = small_gpt(4)
    for block in model.blocks:
        fully_shard(block, strategy=strategy, offload_policy=policy)
    return fully_shard(model, strategy=strategy, offload_policy=policy)


def learn(model: Any, make: Any, microbatches: int = 1) -> tuple[list[Any], int]:
    """Return losses and weights, and the peak bytes of tensors of steps after the first."""
    optimizer, left, peaks = make(trained(model)), [], [0]
    for step in range(3):

        def run(step: int = step) -> None:
            for number in range(microbatches):
                model.set_requires_gradient_sync(number == microbatches - 1)
                loss = loss_of(model, my_part(batch(10 * step + number)))
                loss.backward()
                left.append(loss.detach().clone())
            optimizer.step()
            optimizer.zero_grad()

        gc.collect()
        held = storage_bytes(model.parameters(), (unit.slot.storage for unit in units_in(model)))
        held += storage_bytes(item for of_one in optimizer.state.values() for item in of_one.values())
        _, peak = peak_during(run)
        peaks.append(held + peak if step else 0)
    return [*left, wholes(model)], max(peaks)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def shares_on_disk(model: Any) -> list[float]:
    """Return the fractions on disk of optimizer states, of saved activations, and of shards."""
    policy = units_in(model)[0].options.offload
    return [item.get("disk", 0.0) for item in (policy.optimizer, policy.activations, policy.parameters)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "make", "microbatches"), [("zero3", adamw, 1), ("zero2", momentum, 2), ("ddp", adamw, 1)]
)
@on_ranks(2)
@small_windows
@small_chunks
def test_budget_bounds_peak_memory_and_matches_no_offload_bitwise(tmp_path, strategy, make, microbatches):
    expected, _ = learn(build(None, strategy), make, microbatches)
    with pytest.raises(ConfigError, match="a rank needs") as refused:
        learn(build(Offload(budget=1000, folder=tmp_path), strategy), make, microbatches)
    least, most = map(int, re.search(r"at least (\d+) bytes .*\((\d+) with nothing", str(refused.value)).groups())
    before: list[float] = [2.0, 2.0, 2.0]
    for budget in (least, (least + most) // 2, most):
        model = build(Offload(budget=budget, folder=tmp_path), strategy)
        left, peak = learn(model, make, microbatches)
        assert_same(left, expected, name=f"{strategy}, {budget} of {least} to {most}")
        assert peak <= budget, (strategy, budget, least, most, peak)
        shares = shares_on_disk(model)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, shares)
        assert all(item == shares for item in every)
        assert all(now <= then for now, then in zip(shares, before, strict=True)), (strategy, budget, shares)
        assert not shares[1] or shares[0] == 1, "states go first"
        assert not shares[2] or shares[:2] == [1, 1], "shards go last"
        before = shares
    assert before == [0, 0, 0], "nothing is offloaded if everything fits"


def layers(policy: Offload | None, **options: Any) -> Any:
    """Build twelve identical units and a root with its own parameters."""
    torch.manual_seed(0)
    each = [fully_shard(nn.Linear(256, 256), offload_policy=policy, **options) for _ in range(12)]
    return fully_shard(nn.Sequential(*each, nn.Linear(256, 64)), offload_policy=policy, **options)


def learn_layers(
    policy: Offload | None, microbatches: int, max_norm: float | None, options: dict[str, Any]
) -> tuple[Any, list[Any], int]:
    """Return the model, losses, norms and weights, and the peak bytes of tensors of steps after the first."""
    model = layers(policy, **options)
    optimizer, left, peaks = adamw(model.parameters()), [], [0]
    rows = torch.randn(3, microbatches, 16, 256, generator=torch.Generator().manual_seed(dist.get_rank()))
    for step in rows:

        def run(step: Tensor = step) -> None:
            for number, microbatch in enumerate(step):
                model.set_requires_gradient_sync(number == microbatches - 1)
                loss = model(microbatch).square().mean()
                loss.backward()
                left.append(loss.detach().clone())
            if max_norm is not None:
                left.append(fullshard.clip_grad_norm_(model.parameters(), max_norm).clone())
            optimizer.step()
            optimizer.zero_grad()

        gc.collect()
        held = storage_bytes(model.parameters(), {unit.slot.storage for unit in units_in(model)})
        held += storage_bytes(item for of_one in optimizer.state.values() for item in of_one.values())
        _, peak = peak_during(run)
        peaks.append(held + peak if len(peaks) > 1 else 0)
    return model, [*left, wholes(model), states_of(optimizer)], max(peaks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "microbatches", "max_norm"),
    [
        ("zero3", 1, 0.1),
        pytest.param("zero3", 3, None, marks=pytest.mark.slow),
        pytest.param("zero2", 2, 0.1, marks=pytest.mark.slow),
    ],
)
@on_ranks(2)
@small_windows
@small_chunks
def test_fewest_units_move_to_disk_after_states_and_activations(tmp_path, strategy, microbatches, max_norm):
    loop = {"microbatches": microbatches, "max_norm": max_norm, "options": {"strategy": strategy}}
    plain, expected, _ = learn_layers(None, **loop)
    nbytes = [unit.whole_nbytes for unit in units_in(plain)]
    del plain
    with pytest.raises(ConfigError, match="a rank needs") as refused:
        learn_layers(Offload(budget=1000, folder=tmp_path), **loop)
    least, most = needed(refused)
    counts = []
    for budget in (least + (most - least) * part // 5 for part in (0, 2, 4)):
        model, left, peak = learn_layers(Offload(budget=budget, folder=tmp_path), **loop)
        assert_same(left, expected, name=f"{strategy}, {budget} from {least} on")
        assert peak <= budget, (strategy, budget, least, most, peak)
        there = [unit.shards.is_on_disk for unit in units_in(model)]
        counts.append(sum(there))
        of_states, of_kept, of_shards = shares_on_disk(model)
        assert not of_shards or (of_states, of_kept) == (1, 1), "shards go last"
        assert round(of_shards * sum(nbytes)) == sum(size for size, item in zip(nbytes, there, strict=True) if item)
        assert not any(there) or f"{sum(there)} of 13 units are on a disk" in explain(model)
        for unit in units_in(model):
            assert {isinstance(param.local, OnDisk) for param in unit.params} == {unit.shards.is_on_disk}
    assert counts == sorted(counts, reverse=True), "the more there is, the fewer are there"
    assert counts[0] >= 12 and counts[-1] == 0 and len(set(counts)) >= 3, counts


def test_units_with_buffers_larger_than_freed_bytes_stay_in_memory(tmp_path):
    with dry.world(2), dry.taped(streams="cpu"):
        for count, expected in ((4, 0), (12, 12)):
            policy = Offload(budget="1GB", folder=tmp_path)
            each = [fully_shard(nn.Linear(256, 256), offload_policy=policy) for _ in range(count)]
            model = fully_shard(nn.Sequential(*each, nn.Linear(256, 8192)), offload_policy=policy)
            model(torch.ones(4, 256))
            root, *others = units_in(model)
            assert [unit.shards.is_on_disk for unit in others] == [expected > 0] * count
            assert not root.shards.is_on_disk, "it needs larger buffers than all others free"


def test_root_unit_moves_to_disk_last(tmp_path):
    with dry.world(2), dry.taped(streams="cpu"):
        model = layers(Offload(budget="1GB", folder=tmp_path))
        root, *others = units_in(model)
        root.is_root = True
        assert units_on_disk([root, *others]) == [*others, root]


@pytest.mark.slow
@on_ranks(2)
def test_pending_graph_keeps_its_values_while_units_leave_the_disk(tmp_path):
    """Some units are read from disk between forward and backward. Saved values survive, and slots stay referenced."""

    def run(*, moves: bool) -> list[Any]:
        model = layers(Offload(budget="1GB", folder=tmp_path))
        units, rows = units_in(model), torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
        for _ in range(2):  # units share slots from now on
            model(rows).square().mean().backward()
        assert all(unit.shards.is_on_disk for unit in units)
        grads = [param.grad for param in model.parameters()]
        loss = model(rows).square().mean()
        if moves:
            referenced = [unit.slot.is_referenced for unit in units]
            assert any(referenced)
            for unit in units[::2]:
                unit.shards.move_to(StatePlacement.DEVICE)
                unit.shards.move_to(StatePlacement.DEVICE)
            assert [unit.slot.is_referenced for unit in units] == referenced
            assert [unit.shards.is_on_disk for unit in units] == [number % 2 == 1 for number in range(len(units))]
            for unit in units:
                for local in (item for param in unit.params for item in (param.local, param.grad)):
                    assert isinstance(local, OnDisk) == unit.shards.is_on_disk
        loss.backward()
        return [[grad.full_tensor() for grad in grads], [param.grad.full_tensor() for param in model.parameters()]]

    moved, stayed = run(moves=True), run(moves=False)
    assert_same(moved[1], stayed[1])
    for had, kept in zip(moved[0][1::2], stayed[0][1::2], strict=True):
        assert had.shape == kept.shape


@on_ranks(2)
def test_unit_read_error_on_one_rank_raises_on_every_rank(tmp_path):
    """Reading gradients fails on one rank when units move them from disk to memory."""
    model = layers(Offload(budget="1GB", folder=tmp_path))
    optimizer = adamw(model.parameters())
    model(torch.ones(4, 256)).square().mean().backward()
    broken = OSError(errno.EIO, os.strerror(errno.EIO))
    here = mock.patch("os.preadv", side_effect=broken) if dist.get_rank() == 1 else nullcontext()
    with here, pytest.raises(DiskError, match=f"^rank 1: .*errno {errno.EIO}"):
        optimizer.step()


@pytest.mark.slow
@on_ranks(2)
def test_units_do_not_move_during_backward_with_optimizer_hooks(tmp_path):
    """Optimizers step in gradient hooks. No unit moves during this backward, and results do not change."""

    def run(policy: Offload | None) -> tuple[Any, Any]:
        model = layers(policy)
        optimizers = {param: adamw([param]) for param in model.parameters()}

        def step(param: Any) -> None:
            optimizers[param].step()
            param.grad = None

        for param in optimizers:
            param.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            model(torch.ones(4, 256)).square().mean().backward()
        return model, wholes(model)

    (_, expected), (model, found) = run(None), run(Offload(budget="1GB", folder=tmp_path))
    assert_same(found, expected)
    assert all(unit.shards.is_on_disk and unit.options.offload.budget is not None for unit in units_in(model))


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"strategy": "zero1"}, "choose a strategy that shards parameters, such as 'zero3'"),
        ({"mp_policy": MixedPrecisionPolicy(reduce_wire="int8")}, "leave reduce_wire out"),
    ],
    ids=["whole", "encoded"],
)
def test_budget_error_names_the_option_that_prevents_disk_offload(tmp_path, options, remedy):
    with dry.world(2), dry.taped(streams="cpu"):
        model = layers(Offload(budget=1000, folder=tmp_path), **options)
        assert not any(unit.shards.is_on_disk for unit in units_in(model))
        optimizer = adamw(model.parameters())
        model(torch.ones(4, 256)).square().mean().backward()
        with pytest.raises(ConfigError, match=re.escape(remedy)):
            optimizer.step()


@on_ranks(2)
def test_untied_weights_raise_before_units_move(tmp_path):
    """Loading with `assign=True` unties weights, as in plain PyTorch. The second one must not be dropped silently."""
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Sequential(nn.Linear(6, 6)), nn.Linear(6, 6, bias=False))
    model[1].weight = model[0][0].weight
    for module in (model[0], model):
        fully_shard(module, offload_policy=Offload(budget="1GB", folder=tmp_path))
    values = {"0.0.weight": torch.zeros(6, 6), "0.0.bias": torch.zeros(6), "1.weight": torch.ones(6, 6)}
    model.load_state_dict(values, assign=True)
    with pytest.raises(StateError, match="was replaced by another parameter"):
        model(torch.ones(2, 6))


@pytest.mark.slow
@on_ranks(2)
@small_windows
@small_chunks
def test_checkpoint_is_independent_of_the_budget(tmp_path):
    """Save and load checkpoints with and without a budget that puts shards on disk. Training continues unchanged."""
    with pytest.raises(ConfigError, match="a rank needs") as refused:
        learn_layers(Offload(budget=1000, folder=tmp_path), 1, None, {})
    least, most = needed(refused)
    policies = {"none": None, "disk": Offload(budget=(3 * least + most) // 4, folder=tmp_path)}

    def learn_on(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[Any]:
        for step in steps:
            take_step(optimizer, model(torch.full((16, 256), 0.1 * step)).square().mean())
        return [wholes(model), states_of(optimizer)]

    left = {}
    for first, policy in policies.items():
        model = layers(policy)
        optimizer = adamw(model.parameters())
        learn_on(model, optimizer, range(2))
        there = {unit.shards.is_on_disk for unit in units_in(model)}
        assert there == ({True, False} if policy else {False})
        save(tmp_path / first, model=model, optimizer=optimizer, step=2)
        for then, other in policies.items():
            model = layers(other)
            optimizer = adamw(model.parameters())
            load(tmp_path / first, model=model, optimizer=optimizer)
            left[first, then] = learn_on(model, optimizer, range(2, 4))
    for found in left.values():
        assert_same(found, left["none", "none"])


@on_ranks(1)
def test_optimizer_marked_with_step_shards_resolves_the_budget():
    model = build(Offload(budget="1GB"))
    optimizer = step_shards(adamw(trained(model)))
    loss_of(model, my_part(batch(0))).backward()
    optimizer.step()
    assert all(unit.options.offload.budget is None for unit in units_in(model))


def learn_more(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[Any]:
    for step in steps:
        take_step(optimizer, loss_of(model, my_part(batch(step))))
    return [wholes(model), states_of(optimizer)]


@pytest.mark.slow
@on_ranks(2)
@mock.patch.object(activations, "SMALLEST_BYTES", 1)
@small_chunks
def test_states_loaded_before_first_step_follow_the_budget(tmp_path):
    """States loaded before placements are chosen go to disk. Those chosen to stay resident move back to memory."""
    first = build(None)
    optimizer = adamw(trained(first))
    learn_more(first, optimizer, range(2))
    save(tmp_path / "run", model=first, optimizer=optimizer, step=2)
    expected = learn_more(first, optimizer, range(2, 4))
    model = build(Offload(budget="3.3MB", folder=tmp_path))
    optimizer = adamw(trained(model))
    load(tmp_path / "run", model=model, optimizer=optimizer)
    assert all(on_the_disk(optimizer)), "nobody knows yet what would fit"
    assert_same(learn_more(model, optimizer, range(2, 4)), expected)
    assert {True, False} == set(on_the_disk(optimizer))
    assert "of the optimizer state is on a disk" in explain(model)


# -- with an accelerator ----------------------------------------------------------------------------------------------


def needed(refused: Any) -> tuple[int, int]:
    """Return the bytes needed with everything offloaded, and with nothing offloaded."""
    found = re.search(r"at least (\d+) bytes .*\((\d+) with nothing.*Give budget=(\d+), ", str(refused.value))
    assert found is not None
    least, most, reported = map(int, found.groups())
    assert least == reported
    return least, most


def on_the_cpu(model: Any) -> list[bool]:
    return [unit.shards.destination is StatePlacement.STEPPED_ON_CPU for unit in units_in(model)]


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("strategy", ["zero3", "zero2", "zero1", "ddp"])
@small_windows
def test_fewest_states_are_offloaded_to_cpu_with_an_accelerator(strategy, microbatches):
    made: list[Any] = []

    def make(budget: int) -> Any:
        made.append(chain(partial(fully_shard, strategy=strategy, offload_policy=Offload(budget=budget))))
        return made[-1]

    def tape_of(budget: int) -> dry.Tape:
        return dry.run(partial(make, budget), inputs, world=2, steps=3, microbatches=microbatches)

    with pytest.raises(ConfigError, match="a rank needs") as refused:
        tape_of(1000)
    assert "folder" not in str(refused.value), "states need none"
    least, most = needed(refused)
    with pytest.raises(ConfigError, match=f"Give budget={least}"):
        tape_of(least - 1)
    before = [True] * 5
    for part in range(8):
        budget = least + (most - least) * part // 7
        tape = tape_of(budget)
        assert tape.peak_bytes() <= budget
        assert tape.peak_bytes() >= 0.74 * budget or part not in (0, 7), "what was counted, and not much less"
        assert not dry.races(tape)
        now, units = on_the_cpu(made[-1]), units_in(made[-1])
        assert now <= before, "more memory offloads less"
        in_turn = units_steppable_on_cpu(units)
        assert [unit for unit in in_turn if unit.shards.destination is StatePlacement.STEPPED_ON_CPU] == in_turn[
            : sum(now)
        ]
        policy = units[0].options.offload
        wanted = policy.optimizer.get("cpu", 0.0) * sum(unit.trained_nbytes for unit in units)
        assert round(wanted) == sum(unit.trained_nbytes for unit, item in zip(units, now, strict=True) if item)
        assert not policy.activations or all(now), "states go first"
        before = now
    assert not any(before)


@pytest.mark.slow
@small_windows
def test_budget_one_byte_below_the_peak_offloads_one_unit():

    def peak(policy: Offload) -> int:
        made = partial(chain, partial(fully_shard, strategy="zero3", offload_policy=policy))
        return dry.run(made, inputs, world=2, steps=3).peak_bytes()

    with pytest.raises(ConfigError, match="a rank needs") as refused:
        peak(Offload(budget=1000))
    _, most = needed(refused)
    everything = peak(Offload(budget=most))
    assert everything == peak(Offload())
    assert peak(Offload(budget=most - 1)) == peak(Offload(optimizer={"cpu": 0.2})), "one unit goes"


def learn_alongside(policy: Offload | None, strategy: str, microbatches: int = 1, max_norm: float | None = None) -> Any:
    """Return the model and the results of training: losses, weights, states."""
    model = build(policy, strategy)
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2, fused=True)
    left = []
    for step in range(3):
        for number in range(microbatches):
            model.set_requires_gradient_sync(number == microbatches - 1)
            loss = loss_of(model, my_part(batch(10 * step + number)))
            loss.backward()
            left.append(loss.detach().clone())
        if max_norm is not None:
            left.append(fullshard.clip_grad_norm_(trained(model), max_norm).clone())
        optimizer.step()
        optimizer.zero_grad()
    return model, [*left, wholes(model), states_of(optimizer)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "loop"),
    [
        pytest.param("zero3", {"max_norm": 1.0}, id="zero3"),
        pytest.param("ddp", {"microbatches": 2}, id="ddp"),
        pytest.param("zero2", {"microbatches": 2}, id="zero2", marks=pytest.mark.slow),
        pytest.param("zero1", {"max_norm": 1.0}, id="zero1", marks=pytest.mark.slow),
    ],
)
@on_ranks(2)
@small_windows
def test_budget_with_states_on_cpu_matches_no_offload_bitwise(strategy, loop):
    _, expected = learn_alongside(None, strategy, **loop)
    with dry.taped(values=True), pytest.raises(ConfigError, match="a rank needs") as refused:
        learn_alongside(Offload(budget=1000), strategy, **loop)
    least, most = needed(refused)
    counts = set()
    for budget in (least, most - 1, most):
        with dry.taped(values=True) as tape:
            model, found = learn_alongside(Offload(budget=budget), strategy, **loop)
        assert_same(found, expected, name=f"{strategy}, {loop}, {budget} of {least} to {most}")
        assert not dry.races(tape)
        local, every = on_the_cpu(model), [None] * dist.get_world_size()
        dist.all_gather_object(every, local)
        assert all(item == local for item in every)
        counts.add(sum(local))
    assert counts == {len(local), 1, 0}, "all, as few as will do, and none"


@pytest.mark.slow
@on_ranks(2)
@small_windows
def test_loaded_states_reside_in_the_memory_that_steps_them(tmp_path):
    """Load states before placements are chosen. They follow their units from the first step."""
    first = build(None)
    optimizer = torch.optim.AdamW(trained(first), fused=True)
    learn_more(first, optimizer, range(2))
    save(tmp_path / "run", model=first, optimizer=optimizer, step=2)
    expected = learn_more(first, optimizer, range(2, 4))
    with dry.taped(values=True), pytest.raises(ConfigError, match="a rank needs") as refused:
        learn_alongside(Offload(budget=1000), "zero3")
    budget = needed(refused)[1] - 1
    with dry.taped(values=True):
        model = build(Offload(budget=budget))
        assert set(placements_of(units_in(model)).values()) == {StatePlacement.STEPPED_ON_CPU}
        assert "100% of the optimizer's state is on the CPU" in explain(model)
        optimizer = torch.optim.AdamW(trained(model), fused=True)
        load(tmp_path / "run", model=model, optimizer=optimizer)
        found = learn_more(model, optimizer, range(2, 4))
        memory_of = accelerator_for(torch.device("cpu")).memory_of
        for unit in units_in(model):
            for param in unit.params:
                states = optimizer.state[param.sharded].values()
                where = {memory_of(state._local_tensor) for state in states if isinstance(state, DTensor)} | {
                    memory_of(param.local)
                }
                assert (where == {HOST}) == (unit.shards.destination is StatePlacement.STEPPED_ON_CPU)
                assert len(where) == 1
        assert {True, False} == set(on_the_cpu(model))
    assert_same(found, expected)


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "zero1", "ddp"])
@on_ranks(1)
def test_pending_graph_keeps_its_values_while_units_move(strategy):
    """Views that forward saved keep their storage, whatever the placement of the shards."""

    def run(*, moves: bool) -> list[Any]:
        with dry.taped(values=True):
            model = chain(partial(fully_shard, strategy=strategy, offload_policy=Offload(optimizer={"cpu": 1.0})))
            loss = model(inputs()).square().mean()
            loss.backward(retain_graph=True)
            first = [param.grad.full_tensor().clone() for param in model.parameters()]
            if moves:
                for unit, destination in zip(
                    units_in(model), [StatePlacement.DEVICE, StatePlacement.STEPPED_ON_CPU] * 3, strict=False
                ):
                    unit.shards.move_to(destination)
                    unit.shards.move_to(StatePlacement.DEVICE)
                assert not any(unit.shards.is_on_cpu for unit in units_in(model))
                memory_of = accelerator_for(torch.device("cpu")).memory_of
                assert HOST not in {memory_of(item.to_local()) for p in model.parameters() for item in (p, p.grad)}
            assert_same([param.grad.full_tensor() for param in model.parameters()], first)
            loss.backward()
            return [param.grad.full_tensor() for param in model.parameters()]

    assert_same(run(moves=True), run(moves=False))


def layers_tape(budget: int, strategy: str, microbatches: int, **options: Any) -> tuple[dry.Tape, Any]:
    """Dry-run three steps of `layers`, and return tape and model. `options` are `host_bytes` and `folder`."""
    policy, made = Offload(budget=budget, folder=options.pop("folder", None)), []

    def make() -> Any:
        made.append(layers(policy, strategy=strategy))
        return made[-1]

    rows = partial(torch.randn, 16, 256)
    return dry.run(make, rows, world=2, steps=3, microbatches=microbatches, **options), made[-1]


def reported_of_host(refused: Any) -> tuple[int, int, int]:
    """Return the bytes to be moved to the host's memory, the available bytes, and the budget that would suffice."""
    found = re.search(r"need (\d+) more bytes of host .* but (\d+) are available. .*budget=(\d+),", str(refused.value))
    assert found is not None
    requested, room, budget = map(int, found.groups())
    return requested, room, budget


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "microbatches", "with_folder"),
    [
        ("zero3", 1, True),
        pytest.param("ddp", 2, False, marks=pytest.mark.slow),
        pytest.param("zero2", 2, True, marks=pytest.mark.slow),
    ],
)
@small_windows
@small_chunks
def test_cpu_offload_is_bounded_by_available_host_memory(tmp_path, strategy, microbatches, with_folder):
    tape_of = partial(layers_tape, strategy=strategy, microbatches=microbatches)
    with pytest.raises(ConfigError, match="a rank needs") as refused:
        tape_of(1000)
    least, most = needed(refused)
    first = tape_of(most)[0].peak_bytes(of_host=True)  # before the choice, the host holds everything but states
    whole = tape_of(least)[0].peak_bytes(of_host=True)
    budgets, fractions = [], []
    for host_bytes in range(first, whole - (whole - first) // 5, (whole - first) // 5):
        here = partial(tape_of, host_bytes=host_bytes, folder=tmp_path if with_folder else None)
        with pytest.raises(ConfigError, match="of host memory") as refused:
            here(least)
        requested, room, budget = reported_of_host(refused)
        assert requested > room
        assert ("Pass a folder" in str(refused.value)) != with_folder
        here(least, host_bytes=host_bytes + requested - room)
        with pytest.raises(ConfigError, match=f"budget={budget},"):
            here(budget - 1)
        tape, model = here(budget)
        assert tape.peak_bytes() <= budget
        assert tape.peak_bytes(of_host=True) <= host_bytes
        assert not dry.races(tape)
        policy = units_in(model)[0].options.offload
        assert sum(policy.optimizer.values()) <= 1 and ("disk" not in policy.optimizer or with_folder)
        budgets.append(budget)
        fractions.append(policy.optimizer)
    assert budgets == sorted(budgets, reverse=True) and len(set(budgets)) > 2, "a smaller budget offloads more"
    assert any(set(fraction) == {"cpu", "disk"} for fraction in fractions) == with_folder


def learn_with_room(policy: Offload | None, strategy: str) -> tuple[Any, list[Any]]:
    """Return the model and the training results: losses, weights, states. `model.there` is True for states on disk."""
    model = layers(policy, strategy=strategy)
    optimizer, left = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), []
    for step in range(3):
        rows = torch.randn(16, 256, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = model(rows).square().mean()
        loss.backward()
        left.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    model.there = on_the_disk(optimizer)
    return model, [*left, wholes(model), states_of(optimizer)]


def every_ranks(own: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return every


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "room"), [("zero3", 1_600_000), pytest.param("ddp", 2_800_000, marks=pytest.mark.slow)]
)
@on_ranks(2)
@small_windows
@small_chunks
def test_ranks_agree_on_host_with_least_memory_and_match_bitwise(tmp_path, strategy, room):
    _, expected = learn_with_room(None, strategy)
    with dry.taped(values=True), pytest.raises(ConfigError, match="a rank needs") as refused:
        learn_with_room(Offload(budget=1000), strategy)
    least, most = needed(refused)
    with dry.taped(values=True) as tape:
        learn_with_room(Offload(budget=most), strategy)
    # The first rank's host has less room than the second one's, which could take all.
    host_bytes = tape.peak_bytes(of_host=True) + (most if dist.get_rank() else room)
    for with_folder, tiers in ((False, {"cpu"}), (True, {"cpu", "disk"})):
        policy = Offload(budget=least, folder=tmp_path if with_folder else None)
        with dry.taped(values=True, host_bytes=host_bytes), pytest.raises(ConfigError) as refused:
            learn_with_room(policy, strategy)
        assert len(set(every_ranks(str(refused.value)))) == 1
        with dry.taped(values=True, host_bytes=host_bytes) as tape:
            model, found = learn_with_room(replace(policy, budget=reported_of_host(refused)[2]), strategy)
        assert_same(found, expected, name=f"{strategy}, {tiers}")
        assert not dry.races(tape)
        assert tape.peak_bytes(of_host=True) <= host_bytes
        decided = units_in(model)[0].options.offload
        assert set(decided.optimizer) == tiers
        assert set(model.there) == ({True, False} if with_folder else {False})
        assert len(set(map(repr, every_ranks((on_the_cpu(model), decided.optimizer))))) == 1


@pytest.mark.slow
@on_ranks(2)
@small_chunks
def test_report_names_the_disk_and_the_bytes_moved_per_step(tmp_path):
    model = build(Offload(optimizer={"disk": 1.0}, folder=tmp_path / "scratch"))
    optimizer = adamw(trained(model))
    with fullshard.report(model, tmp_path / "run"):
        for step in range(12):
            take_step(optimizer, loss_of(model, my_part(batch(step))))
    if dist.get_rank() == 0:
        facts = read_run(tmp_path / "run").facts
        assert "100% of the optimizer state is on a disk" in facts["offload"]
        stated = facts[f"disk {tmp_path / 'scratch'}"]
        held, read, written = map(float, re.findall(r"([\d.e-]+) GB", stated))
        states = 2 * sum(param.numel() * param.element_size() for param in trained(model)) / 1e9
        for moved in (read, written):  # in whole blocks, over as many steps, but for the last one
            assert 0.85 * states < moved < 1.4 * states, (stated, states)
        assert held >= states, stated


@pytest.mark.slow
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_forecast_follows_the_memory_budget(tmp_path, monkeypatch, device_type):
    """The dry run makes the decisions of the real run, so the predicted peak falls to the budget."""
    monkeypatch.setattr(on_disk, "CHUNK_NBYTES", 16384)
    machine = replace(MACHINE, device_type=device_type)

    def reported(*options: str) -> int:
        argv = ["--size", "nano", "--layers", "4", "--seq", "16", "--batch", "4", "--dtype", "float32", *options]
        return predicted(parse_settings(argv), machine, hardware("h100-80")).peak.nbytes

    whole = reported()
    assert reported("--offload-budget", "80GB", "--offload-folder", str(tmp_path)) <= whole
    with pytest.raises(ConfigError, match="a rank needs") as refused:
        reported("--offload-budget", "1KB", "--offload-folder", str(tmp_path))
    found = re.search(
        r"at least (\d+) bytes .* \((\d+) with nothing offloaded\): .* (\d+) of states", str(refused.value)
    )
    assert found is not None
    least, most, states = map(int, found.groups())
    assert most - least > 0.5 * states, "buffers are small"
    assert reported("--offload-budget", str(least), "--offload-folder", str(tmp_path)) <= min(whole, least)


@pytest.mark.slow
def test_forecast_raises_if_host_memory_is_too_small_for_the_budget():
    argv = ["--size", "nano", "--layers", "4", "--seq", "16", "--batch", "4", "--dtype", "float32"]

    def reported(budget: str, host_bytes: int | None) -> None:
        machine = replace(MACHINE, device_type="cuda", host_bytes=host_bytes)
        predicted(parse_settings([*argv, "--offload-budget", budget]), machine, hardware("h100-80"))

    with pytest.raises(ConfigError, match="a rank needs") as refused:
        reported("1KB", None)
    least, _ = needed(refused)
    reported(str(least), None)
    with pytest.raises(ConfigError, match="of host memory per rank, but 0 are available"):
        reported(str(least), 0)


def test_budget_combined_with_fractions_raises():
    with pytest.raises(ConfigError, match="a budget chooses the fractions"):
        Offload(budget="20GB", optimizer={"disk": 0.5}, folder="/nvme")
    with pytest.raises(ConfigError, match="is not a size of memory"):
        Offload(budget="a lot", folder="/nvme")
