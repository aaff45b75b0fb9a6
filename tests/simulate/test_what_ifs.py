"""Gains of alternative settings equal the difference of two predictions, and each has a command that selects it."""

import shlex
from dataclasses import replace

import pytest
import yaml

from fullshard.plan.hardware import hardware
from fullshard.train import what_ifs
from fullshard.train.options import parse_settings
from fullshard.train.predicting import Machine, predicted
from fullshard.train.settings import MemorySettings, ModelSettings, OptimizationSettings, TextSettings, TrainSettings

H100 = hardware("h100-80")
MACHINE = Machine(device_type="cuda", device_name="H100", memory_bytes=80 << 30, world=4, local_world=4, machines=1)
SETTINGS = replace(
    TrainSettings(),
    model=ModelSettings(size="nano"),
    text=TextSettings(seq=16),
    optimization=OptimizationSettings(batch=8, lr=1e-3),
    memory=MemorySettings(dtype="bfloat16"),
)


@pytest.fixture(scope="module")
def reported():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(what_ifs, "described_here", lambda machine: H100)
        return what_ifs.what_ifs_of(SETTINGS, MACHINE, "runs/x")


@pytest.mark.slow
def test_gain_is_difference_of_two_predictions(reported):
    step_s = predicted(SETTINGS, MACHINE, H100).step_s
    assert all(item.gain_s == pytest.approx(step_s - item.step_s) for item in reported)
    assert [item.gain_s for item in reported] == sorted((item.gain_s for item in reported), reverse=True)
    assert {item.change for item in reported} >= {"ddp", "zero2", "activation checkpointing", "reductions in bfloat16"}
    assert "zero3" not in {item.change for item in reported}  # the run already uses it


@pytest.mark.parametrize("change", ["ddp", "activation checkpointing", "reductions in bfloat16"])
def test_command_of_what_if_selects_simulated_settings(reported, change, tmp_path):
    item = next(element for element in reported if element.change == change)
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(SETTINGS.as_options()))
    program, command, *argv = shlex.split(item.command.replace("runs/x", str(tmp_path)))
    assert (program, command) == ("fullshard", "train")
    requested = predicted(parse_settings(argv), MACHINE, H100)
    assert requested.step_s == pytest.approx(item.step_s)


@pytest.mark.slow
def test_what_ifs_exclude_settings_that_do_not_fit(monkeypatch):
    monkeypatch.setattr(what_ifs, "described_here", lambda machine: H100)
    assert what_ifs.what_ifs_of(SETTINGS, replace(MACHINE, memory_bytes=1), "runs/x") == ()


@pytest.mark.slow
def test_what_ifs_exclude_incompatible_strategies(monkeypatch, tmp_path):
    """Some strategies have no shards to offload to disk."""
    monkeypatch.setattr(what_ifs, "described_here", lambda machine: H100)
    there = replace(SETTINGS, memory=MemorySettings(dtype="bfloat16", offload_parameters=1.0, offload_folder=tmp_path))
    found = {item.change for item in what_ifs.what_ifs_of(there, MACHINE, "runs/x")}
    assert "zero2" in found and not found & {"ddp", "zero1"}


def test_what_ifs_are_empty_without_hardware_description(monkeypatch):
    """Times predicted for another machine would be meaningless."""
    monkeypatch.setattr(what_ifs, "described_here", lambda machine: None)
    assert what_ifs.what_ifs_of(SETTINGS, MACHINE, "runs/x") == ()
