"""Memory by tier and transfers per step: tiers add up to the total, and formulas match the counts."""

from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from shared_ranks import on_ranks, run_ranks
from torch import nn

from fullshard import CPUOffloadPolicy, MixedPrecisionPolicy, Offload, OffloadPolicy, dry, explain, fully_shard, report
from fullshard.device.transfers import Transfers, transfers
from fullshard.disk.interface import ALIGNMENT
from fullshard.plan.ledger import (
    TIERS,
    Ledger,
    plans_without_offload,
    predict_ledger,
    predict_on_disk,
    predict_tiers,
)
from fullshard.plan.stored import measure_tiers, offloaded_activations, predict_transfers
from fullshard.report.reading import read_run
from fullshard.report.steps import WATCHED_STEP

WIDTH, LAYERS = 128, 4  # shards of 2 ranks are whole blocks of a disk
ROWS = 256
KEPT = ROWS * WIDTH * 4  # saved by a layer's forward
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def layers(policy: OffloadPolicy | None, **options: Any) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer, offload_policy=policy, **options)
    return fully_shard(model, offload_policy=policy, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, microbatches: int, clips: bool) -> None:
    for _ in range(microbatches):
        model(torch.ones(ROWS, WIDTH)).sum().backward()
    if clips:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    optimizer.zero_grad()


def transferred(
    policy: OffloadPolicy | None, microbatches: int, clips: bool, **options: Any
) -> tuple[Transfers, Transfers]:
    """Return the measured transfers per step, averaged over two steps, and the predicted ones of one step."""
    model = layers(policy, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        step(model, optimizer, microbatches, clips)
    before = transfers.total
    for _ in range(2):
        step(model, optimizer, microbatches, clips)
    found = {
        key: (item.arrived / 2, item.passed / 2)
        for key, item in transfers.since(before).items()
        if item.arrived or item.passed
    }
    predicted = predict_transfers(
        model, microbatches=microbatches, clips=clips, activations=offloaded_activations(model)
    )
    return found, {key: (item.arrived, item.passed) for key, item in predicted.items()}


LOOPS = [(1, False), (2, True)]


def agree(found: Transfers, predicted: Transfers, microbatches: int, clips: bool, where: Any) -> None:
    """Compare to the byte. Exceptions: backward takes one activation storage before it is written, and unscaling
    gradients on disk reads the blocks at their ends.
    """
    assert found.keys() == predicted.keys(), where
    for (tier, state), (arrived, passed) in found.items():
        less, more = 0, 0
        if state == "activations":
            less = microbatches * KEPT
        elif clips and (tier, state) == ("disk", "gradients"):
            more = LAYERS * 2 * ALIGNMENT
        assert passed == predicted[tier, state][1], (tier, state, where)
        assert predicted[tier, state][0] - less <= arrived <= predicted[tier, state][0] + more, (tier, state, where)


@pytest.mark.slow
@on_ranks(2)
@mock.patch("fullshard.engine.offloaded.WINDOW_BYTES", KEPT)
def test_disk_transfers_per_step_match_the_formula(tmp_path):
    for number, (microbatches, clips) in enumerate(LOOPS):
        for strategy in ("zero3", "zero2"):
            for name, share in (("parameters", 1.0), ("parameters", 0.5), ("optimizer", 0.5), ("activations", 1.0)):
                policy = Offload(folder=tmp_path / f"{number}-{strategy}-{name}-{share}", **{name: {"disk": share}})
                found, predicted = transferred(policy, microbatches, clips, strategy=strategy)
                agree(found, predicted, microbatches, clips, (found, predicted, microbatches, strategy, policy))


SOME = Offload(optimizer={"cpu": 0.5}, parameters={"cpu": 0.25})
ON_CPU = (SOME, Offload(optimizer={"cpu": 1.0}), CPUOffloadPolicy(), Offload(activations={"cpu": 0.5}))


@pytest.mark.slow
@on_ranks(2)
@mock.patch("fullshard.engine.offloaded.WINDOW_BYTES", KEPT)
def test_cpu_transfers_per_step_match_the_formula():
    for microbatches, clips in LOOPS[:2]:
        for strategy in ("zero3", "zero2", "ddp"):
            for policy in ON_CPU:
                for precision in (None, BF16)[: 1 + (strategy == "zero3")]:
                    with dry.taped(values=True):
                        found, predicted = transferred(
                            policy, microbatches, clips, strategy=strategy, mp_policy=precision
                        )
                    agree(
                        found,
                        predicted,
                        microbatches,
                        clips,
                        (found, predicted, microbatches, strategy, policy, precision),
                    )


# -- memory by tier ---------------------------------------------------------------------------------------------------


def summed(tiers: dict[str, Ledger], state: str) -> int:
    return sum(getattr(tier, state) for tier in tiers.values())


def tiers_of(folder: Path, alongside: bool) -> None:
    """Check that each byte is in one tier, and that tiers add up to the memory of a run without offload."""
    plain = predict_ledger(layers(None))
    cases = [{"optimizer": {"disk": 0.5}}, {"parameters": {"disk": 0.5}}, {"parameters": {"disk": 1.0}}]
    cases += [{"optimizer": {"cpu": 0.5}, "parameters": {"cpu": 0.25}}, {"optimizer": {"cpu": 0.5, "disk": 0.5}}]
    for number, case in enumerate(cases):
        model = layers(Offload(folder=folder / str(number), **case))
        tiers = predict_tiers(model)
        assert tuple(tiers) == TIERS
        assert tiers["device"] == predict_ledger(model)
        on_disk = predict_on_disk(model)
        copies = sum(plan.copy_nbytes for _, plan, _ in plans_without_offload(model))
        assert summed(tiers, "parameters") == plain.parameters + copies, case
        assert summed(tiers, "gradients") == plain.gradients, case
        assert summed(tiers, "optimizer_state") == plain.optimizer_state + on_disk.buffer_nbytes, case
        assert all(nbytes >= 0 for tier in tiers.values() for nbytes in asdict(tier).values()), case
        if not alongside:
            assert tiers["cpu"].total == 0
        share = case.get("parameters", {}).get("disk", 0.0)
        assert tiers["disk"].parameters == tiers["disk"].gradients == round(share * plain.parameters)
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer, 1, clips=False)
        # The measured tiers of a run, with its actual states, equal the predicted tiers.
        assert measure_tiers(model, [optimizer]) == predict_tiers(model), case


def pretended(folder: Path) -> None:
    with dry.taped(values=True):
        tiers_of(folder, alongside=True)


@pytest.mark.slow
def test_tiers_add_up_to_the_memory_without_offload(tmp_path):
    run_ranks(2, tiers_of, tmp_path, False)
    run_ranks(2, pretended, tmp_path / "pretended")


# -- report and explain -----------------------------------------------------------------------------------------------


COUNTED = 4  # number of measured steps


def reported(folder: Path, share: float) -> tuple[Any, Any, str]:
    """Return the reported tiers, the measured tiers with the predicted transfers, and the text of `explain`."""
    policy = Offload(parameters={"disk": share}, folder=folder / "scratch") if share else None
    model = layers(policy)
    optimizer = torch.optim.AdamW(model.parameters())
    with report(model, folder):
        for _ in range(WATCHED_STEP + COUNTED):
            step(model, optimizer, 1, clips=False)
    return read_run(folder).tiers, (measure_tiers(model, [optimizer]), predict_transfers(model)), explain(model)


def test_report_contains_bytes_on_disk_and_bytes_moved_per_step(tmp_path):
    reported_tiers, (tiers, moved), text = run_ranks(1, reported, tmp_path, 0.5)[0]
    assert [item.name for item in reported_tiers] == ["device", "disk"]
    device, disk = reported_tiers
    for item, ledger in ((device, tiers["device"]), (disk, tiers["disk"])):
        for state in ("parameters", "gradients", "optimizer state"):
            assert item.stored.get(state, 0) == getattr(ledger, state.replace(" ", "_")), (item.name, state)
    assert device.stored["activations"] >= LAYERS * KEPT // 2
    assert not device.comes and not device.goes
    assert disk.comes.keys() == {state for _, state in moved}
    for (_, state), element in moved.items():  # prefetches for the first measured forward ran before it
        ahead = WIDTH * WIDTH * 4 / COUNTED if state == "parameters" else 0
        assert element.arrived - ahead <= disk.comes[state] <= element.arrived, state
    assert disk.goes == {state: item.passed for (_, state), item in moved.items()}
    assert "on the disk" in text and "per step of one microbatch" in text


def test_report_without_offload_has_no_tiers(tmp_path):
    reported_tiers, _, text = run_ranks(1, reported, tmp_path, 0.0)[0]
    assert reported_tiers == ()
    assert "on the disk" not in text and "microbatch" not in text
