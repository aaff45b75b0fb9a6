"""A budget for a rank's memory: the least that is away with which it fits, to the same bits, on all ranks alike."""

import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared_ranks import run_ranks
from small_models import batch, loss_of, my_part, small_gpt, trained, wholes
from test_offload_to_disk import on_the_disk, states_of

import fullshard
from fullshard import ConfigError, Offload, fully_shard
from fullshard.checkpoint import load, save
from fullshard.engine import activations, away
from fullshard.engine.registry import units_in
from fullshard.plan.explain import explain
from fullshard.plan.hardware import hardware
from fullshard.plan.ledger import peak_during, storage_bytes
from fullshard.policy.tiers import Tier, least_that_fits
from fullshard.report.reading import read_run
from fullshard.state import on_disk
from fullshard.state.on_disk import states_on_disk
from fullshard.testing import assert_same
from fullshard.train.options import parse_settings
from fullshard.train.predicting import Machine, predicted

MACHINE = Machine(device_type="cpu", device_name="", memory_bytes=8 << 30, world=4, local_world=4, machines=1)

STATES = Tier(what="optimizer", where="disk", steps=[(0.25, -5), (0.5, 20), (1.0, 60)])
KEPT = Tier(what="activations", where="disk", steps=[(0.5, 10), (1.0, 30)])


@pytest.mark.parametrize("budget", range(130))
def test_the_least_that_fits_is_chosen_and_the_cheapest_tier_is_used_up_first(budget):
    chosen, needed = least_that_fits(100, budget, [STATES, KEPT])
    freed = {tier.what: dict(tier.steps)[fraction] for tier, fraction in chosen}
    assert needed == 100 - sum(freed.values())
    assert (needed <= budget) == (budget >= 10)
    if freed.get("activations"):
        assert freed["optimizer"] == 60
    for tier, fraction in chosen:  # a step less does not do, or is all that there is
        less = max((bytes_ for share, bytes_ in tier.steps if share < fraction), default=0)
        assert needed + freed[tier.what] - max(less, 0) > budget


def build(policy: Offload | None, strategy: str = "zero3") -> Any:
    model = small_gpt(4)
    for block in model.blocks:
        fully_shard(block, strategy=strategy, offload_policy=policy)
    return fully_shard(model, strategy=strategy, offload_policy=policy)


def learn(model: Any, make: Any, microbatches: int = 1) -> tuple[list[Any], int]:
    """Losses and weights, and the most bytes of tensors of steps after the first."""
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
        disk = states_on_disk(optimizer)
        held = storage_bytes(model.parameters(), (unit.slot.storage for unit in units_in(model))) + (
            0 if disk is None else disk.buffer_nbytes
        )
        held += storage_bytes(it for of_one in optimizer.state.values() for it in of_one.values())
        _, peak = peak_during(run)
        peaks.append(held + peak if step else 0)
    return [*left, wholes(model)], max(peaks)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def choose(folder: Path) -> None:
    activations.SMALLEST_BYTES, on_disk.PORTION_NBYTES = 1, 4096
    activations.WINDOW_BYTES = away.WINDOW_BYTES = 4096
    for strategy, make, microbatches in (("zero3", adamw, 1), ("zero2", momentum, 2), ("ddp", adamw, 1)):
        expected, _ = learn(build(None, strategy), make, microbatches)
        with pytest.raises(ConfigError, match="a rank needs") as refused:
            learn(build(Offload(budget=1000, folder=folder), strategy), make, microbatches)
        least, most = map(int, re.search(r"needs (\d+) bytes .*of (\d+) if nothing is", str(refused.value)).groups())
        before: list[float] = [2.0, 2.0]
        for budget in (least, (2 * least + most) // 3, (least + 2 * most) // 3, most):
            model = build(Offload(budget=budget, folder=folder), strategy)
            left, peak = learn(model, make, microbatches)
            assert_same(left, expected, name=f"{strategy}, {budget} of {least} to {most}")
            assert peak <= budget, (strategy, budget, least, most, peak)
            policy = units_in(model)[0].options.offload
            shares = [policy.optimizer.get("disk", 0.0), policy.activations.get("disk", 0.0)]
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, shares)
            assert all(it == shares for it in every)
            assert all(now <= then for now, then in zip(shares, before, strict=True)), (strategy, budget, shares)
            assert not shares[1] or shares[0] == 1, "states go first"
            before = shares
        assert before == [0, 0], "nothing is away where everything fits"


def test_a_budget_is_kept_with_the_least_away_and_changes_no_bit(tmp_path):
    run_ranks(2, choose, tmp_path)


def resume(folder: Path) -> None:
    """States that are loaded before anything is chosen go to the disk, and back as far as is chosen then."""
    activations.SMALLEST_BYTES, on_disk.PORTION_NBYTES = 1, 4096
    first = build(None)
    optimizer = adamw(trained(first))
    learn_more(first, optimizer, range(2))
    save(folder / "run", model=first, optimizer=optimizer, step=2)
    expected = learn_more(first, optimizer, range(2, 4))
    model = build(Offload(budget="3.3MB", folder=folder))
    optimizer = adamw(trained(model))
    load(folder / "run", model=model, optimizer=optimizer)
    assert all(on_the_disk(optimizer)), "nobody knows yet what would fit"
    assert_same(learn_more(model, optimizer, range(2, 4)), expected)
    assert {True, False} == set(on_the_disk(optimizer))
    assert "of the optimizer's state rests on a disk" in explain(model)


def learn_more(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[Any]:
    for step in steps:
        loss_of(model, my_part(batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [wholes(model), states_of(optimizer)]


def test_states_that_were_loaded_before_the_first_step_are_where_the_budget_has_them(tmp_path):
    run_ranks(2, resume, tmp_path)


def record(folder: Path) -> None:
    on_disk.PORTION_NBYTES = 4096
    model = build(Offload(optimizer={"disk": 1.0}, folder=folder / "scratch"))
    optimizer = adamw(trained(model))
    with fullshard.report(model, folder / "run"):
        for step in range(12):
            loss_of(model, my_part(batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
    if dist.get_rank() == 0:
        facts = read_run(folder / "run").facts
        assert "100% of the optimizer's state rests on a disk" in facts["offload"]
        said = facts[f"disk {folder / 'scratch'}"]
        held, read, written = map(float, re.findall(r"([\d.e-]+) GB", said))
        states = 2 * sum(param.numel() * param.element_size() for param in trained(model)) / 1e9
        for moved in (read, written):  # in whole blocks, over as many steps, but for the last one
            assert 0.85 * states < moved < 1.4 * states, (said, states)
        assert held >= states, said


def test_the_report_names_the_disk_and_what_a_step_moves(tmp_path):
    run_ranks(2, record, tmp_path)


def test_a_forecast_goes_by_the_budget(tmp_path):
    """A run dry decides as the run will: so much less is needed, of what a budget asks for."""

    def told(*options: str) -> int:
        argv = ["--size", "nano", "--seq", "64", "--batch", "4", "--dtype", "float32", *options]
        return predicted(parse_settings(argv), MACHINE, hardware("h100-80")).peak.nbytes

    whole = told()
    away = told("--offload-optimizer", "1", "--offload-folder", str(tmp_path))
    assert told("--offload-budget", "80GB", "--offload-folder", str(tmp_path)) <= whole
    with pytest.raises(ConfigError, match="a rank needs") as refused:
        told("--offload-budget", "1KB", "--offload-folder", str(tmp_path))
    least = re.search(r"needs (\d+) bytes", str(refused.value))
    assert least is not None
    assert told("--offload-budget", least[1], "--offload-folder", str(tmp_path)) <= min(away, int(least[1]))


def test_a_budget_and_fractions_contradict_one_another():
    with pytest.raises(ConfigError, match="a budget chooses the fractions"):
        Offload(budget="20GB", optimizer={"disk": 0.5}, folder="/nvme")
    with pytest.raises(ConfigError, match="is no size of memory"):
        Offload(budget="a lot", folder="/nvme")
