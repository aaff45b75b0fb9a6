"""Settings from the command line and configuration files, and the values derived from them."""

from __future__ import annotations

import math
import os
import socket
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fullshard.command_line import option_types
from fullshard.errors import ConfigError
from fullshard.testing import run_ranks
from fullshard.train.check import check
from fullshard.train.options import parse_settings
from fullshard.train.parallelism import replicas_of, rows_of, sequences_of
from fullshard.train.ranks import Rank
from fullshard.train.run_folder import SETTINGS, RunFolder, check_shared
from fullshard.train.schedule import learning_rate, peak_lr
from fullshard.train.settings import MemorySettings, OptimizationSettings, ParallelSettings, RunSettings, TrainSettings


def test_fixed_option_names_exist() -> None:
    fixed = {"text", "size", "strategy", "ranks", "batch", "seq", "accumulate", "steps", "lr", "dtype", "seed", "out"}
    assert fixed <= set(option_types(TrainSettings))


def test_no_options_give_default_settings() -> None:
    assert parse_settings([]) == TrainSettings()


def test_command_line_options_set_their_fields() -> None:
    settings = parse_settings(
        [
            "--text",
            "a/b",
            "--size=nano",
            "--ranks",
            "3",
            "--lr",
            "1e-3",
            "--activation-checkpointing",
            "--mlp-ratio",
            "2",
        ]
    )
    assert settings.text.text == Path("a/b")
    assert settings.model.size == "nano"
    assert settings.model.mlp_ratio == 2
    assert settings.optimization.lr == 1e-3
    assert settings.memory.activation_checkpointing


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.yaml", "steps: 7\nmin-lr: 0.5\nactivation-checkpointing: true\nsize: nano\n"),
        ("run.yml", "steps: 7\nmin_lr: 0.5\nactivation_checkpointing: true\nsize: nano\n"),
        ("run.toml", 'steps = 7\nmin-lr = 0.5\nactivation-checkpointing = true\nsize = "nano"\n'),
    ],
)
def test_command_line_overrides_config_file_in_any_order(name: str, content: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(content)
    for argv in (
        ["--config", str(file), "--steps", "9", "--no-activation-checkpointing"],
        ["--steps", "9", "--no-activation-checkpointing", f"--config={file}"],
    ):
        settings = parse_settings(argv)
        assert settings.optimization.steps == 9
        assert settings.optimization.min_lr == 0.5
        assert settings.model.size == "nano"
        assert not settings.memory.activation_checkpointing
    assert parse_settings(["--config", str(file)]).memory.activation_checkpointing


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("stesp: 3", "unknown option 'stesp'. Did you mean steps?"),
        ("steps: many", "steps is 'many', but must be a whole number"),
        ("steps:", "steps has no value"),
        ("steps: [1, 2]", "steps must be one value, not a list"),
        ("steps: 0x" + "f" * 5000, "steps must be less than 2**63"),
        ("prompt: 0x" + "f" * 5000, "put it in quotes"),
        ("activation-checkpointing: 3", "must be true or false"),
        ("config: other.yaml", "refers to another configuration file"),
        ("- steps", "must hold option names with values"),
        ("steps: {", "is not valid YAML"),
    ],
)
def test_config_file_error_names_mistake_and_file(content: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as error:
        parse_settings(["--config", str(file)])
    assert words in str(error.value)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


def test_unsupported_or_missing_config_file_raises(tmp_path: Path) -> None:
    for name, words in (("run.json", "must end in"), ("none.yaml", "cannot be read")):
        with pytest.raises(ConfigError, match=words):
            parse_settings(["--config", str(tmp_path / name)])
    with pytest.raises(ConfigError, match="needs a file"):
        parse_settings(["--config"])


def test_written_settings_are_read_back_without_out(tmp_path: Path) -> None:
    settings = TrainSettings(
        optimization=OptimizationSettings(lr=1e-5, batch=4),
        run=RunSettings(prompt="def 'a': #\n", out=tmp_path / "elsewhere"),
    )
    RunFolder(tmp_path, writes=True).write_settings(settings)
    assert parse_settings(["--config", str(tmp_path / SETTINGS)]) == replace(
        settings, run=replace(settings.run, out=None)
    )


def test_learning_rate_rises_to_peak_and_decays_to_minimum() -> None:
    settings = OptimizationSettings(steps=100, warmup=10, min_lr=0.1)
    rates = [learning_rate(settings, 2.0, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == rates[9] == 2.0
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.2)
    assert rates[54] == pytest.approx(0.2 + 1.8 * (1 + math.cos(math.pi / 2)) / 2)


def test_learning_rate_only_rises_if_run_is_shorter_than_warmup() -> None:
    settings = OptimizationSettings(steps=3, warmup=50)
    assert [learning_rate(settings, 3.0, step) for step in range(3)] == pytest.approx([1.0, 2.0, 3.0])


def test_model_size_sets_learning_rate_unless_given() -> None:
    assert peak_lr(TrainSettings()) > 0
    assert peak_lr(TrainSettings(optimization=OptimizationSettings(lr=0.5))) == 0.5


@pytest.mark.parametrize("world", range(1, 70))
def test_default_batch_is_divisible_by_every_world_size(world: int) -> None:
    rows = rows_of(OptimizationSettings(), world)
    assert rows % world == 0
    assert rows_of(OptimizationSettings(batch=rows), world) == rows


def test_indivisible_batch_raises_with_valid_alternatives() -> None:
    for batch, world, words in ((10, 4, "Use 8 or 12"), (3, 4, "Use 4."), (0, 2, "Use 2."), (-1, 2, "Use 2.")):
        with pytest.raises(ConfigError, match=words):
            rows_of(OptimizationSettings(batch=batch), world)


def test_step_sequences_may_be_fewer_than_microbatch_capacity() -> None:
    settings = OptimizationSettings(batch=4, accumulate=3)
    assert sequences_of(settings, 2) == 12
    for sequences in range(9, 13):
        assert sequences_of(replace(settings, sequences=sequences), 2) == sequences
    for sequences, words in ((8, "Take --accumulate 2, or"), (13, "Take --accumulate 4, or"), (0, "Take more, or")):
        with pytest.raises(ConfigError, match=f"3 microbatches of 4 are for 9 to 12 sequences. {words}"):
            sequences_of(replace(settings, sequences=sequences), 2)


def test_default_replicas_follow_machines_for_hybrid_strategies() -> None:
    hybrid = ParallelSettings(strategy="hsdp")
    assert replicas_of(hybrid, world=4) == 2
    assert replicas_of(hybrid, world=16, machines=4) == 4
    assert replicas_of(replace(hybrid, replicas=1), world=4) == 1
    assert replicas_of(hybrid, world=3) == replicas_of(hybrid, world=1) == 1
    assert replicas_of(hybrid, world=3, machines=3) == 3
    assert replicas_of(ParallelSettings(strategy="zero3"), world=4) is None
    with pytest.raises(ConfigError, match="Choose one of 1, 3"):
        replicas_of(replace(hybrid, replicas=2), world=3)
    with pytest.raises(ConfigError, match="does not use replicas"):
        replicas_of(ParallelSettings(strategy="zero2", replicas=2), world=4)


def probed(folder: str) -> tuple[str, str, list[str]]:
    """Return this rank's errors with a shared folder and with separate ones, and the files left in the former."""
    rank, world = dist.get_rank(), dist.get_world_size()
    here = Rank(index=rank, world=world, local_index=0, local_world=1, machines=world, device=torch.device("cpu"))
    stated = []
    for out in (Path(folder) / "shared", Path(folder) / f"own{rank}"):
        try:
            check_shared(out, here)
            stated.append("")
        except ConfigError as error:
            stated.append(str(error))
    return stated[0], stated[1], os.listdir(Path(folder) / "shared")


def test_check_shared_raises_if_machines_do_not_share_storage(tmp_path: Path) -> None:
    for rank, (shared, own, left) in enumerate(run_ranks(2, probed, str(tmp_path))):
        assert (shared, left) == ("", [])
        assert f"{socket.gethostname()} (rank 1)" in own
        assert f"own{rank}" in own


def test_on_and_ray_address_options_are_validated() -> None:
    for requested, word in (({"on": "rey"}, "did you mean ray"), ({"ray_address": "a:1"}, "--on ray")):
        with pytest.raises(ConfigError, match=f"(?i){word}"):
            check(TrainSettings(parallelism=ParallelSettings(**requested)), world=1)


def test_capture_requires_gpu_without_offload_or_report_destination() -> None:
    captured = OptimizationSettings(capture=True)
    with mock.patch("torch.cuda.is_available", lambda: False), pytest.raises(ConfigError, match=r"--capture: .* a GPU"):
        check(TrainSettings(optimization=captured), world=1)
    offloaded = MemorySettings(offload_parameters_cpu=0.5)
    with (
        mock.patch("torch.cuda.is_available", lambda: True),
        pytest.raises(ConfigError, match="Leave out --capture or --offload-parameters-cpu"),
    ):
        check(TrainSettings(optimization=captured, memory=offloaded), world=1)
    with (
        mock.patch("torch.cuda.is_available", lambda: True),
        pytest.raises(ConfigError, match=r"--log-to with --capture: .* Leave one of them out"),
    ):
        check(TrainSettings(optimization=captured, run=RunSettings(log_to="tensorboard")), world=1)
