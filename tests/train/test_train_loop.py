"""Whole runs of the trainer on several ranks: the files that they write, and the settings that change their losses."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from replayed_graph import ReplayedGraph
from safetensors.torch import load_file
from shared_ranks import on_ranks, run_ranks
from training_runs import QUICK, losses, metrics, this_rank, train_here

from fullshard import CheckpointError, ConfigError, DiskError, Offload, fully_shard, testing
from fullshard.comm.native import NativeCollectives
from fullshard.comm.routes import register_backend
from fullshard.disk.pace import pace_of
from fullshard.disk.prediction import Traffic
from fullshard.graphs import CapturedStep
from fullshard.plan.forecast import Forecast, Forecasting
from fullshard.plan.ledger import predict_on_disk
from fullshard.train.check import check
from fullshard.train.evaluate import validation_loss
from fullshard.train.loop import agreed_text, resolved, train
from fullshard.train.model import GPT, shape_of
from fullshard.train.options import parse_settings
from fullshard.train.predicting import Machine, disk_lines, disk_traffic, forecast_run, machine_of
from fullshard.train.run_folder import SETTINGS, WEIGHTS
from fullshard.train.schedule import learning_rate
from fullshard.train.settings import OptimizationSettings, TrainSettings
from fullshard.train.sharding import ShardedGPT, sharded_gpt
from fullshard.train.text import find_text, write_text

FULL = "/dev/full"  # every write fails as on a full disk


def trained(world: int, out: Path, *argv: str) -> Path:
    run_ranks(world, train_here, *QUICK, *argv, "--out", str(out))
    return out


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(2, tmp_path_factory.mktemp("two"))


def test_run_logs_metrics_line_for_every_event(two_ranks: Path) -> None:
    lines = metrics(two_ranks)
    assert [line["kind"] for line in lines] == ["run", "step", "step", "validation", "step", "validation", "end"]
    assert [line["step"] for line in lines[1:]] == [1, 2, 2, 3, 3, 3]
    assert lines[0]["settings"]["batch"] == 4
    assert lines[-1]["bits_per_byte"] == lines[-2]["bits_per_byte"]
    assert (two_ranks / "samples.txt").read_bytes().startswith(b"===== step 3 =====\n")


def test_measured_memory_matches_formula(two_ranks: Path) -> None:
    columns = metrics(two_ranks)[-1]["bytes_a_rank"]
    assert columns["measured"] == columns["formula"]
    assert columns["measured"]["optimizer_state"] < 0.6 * columns["ddp_formula"]["optimizer_state"]


def test_same_seed_gives_identical_metrics_and_weights(two_ranks: Path, tmp_path: Path) -> None:
    again = trained(2, tmp_path)
    assert metrics(two_ranks)[1:] == metrics(again)[1:]
    assert (two_ranks / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_different_seed_gives_different_losses(two_ranks: Path, tmp_path: Path) -> None:
    assert losses(trained(2, tmp_path, "--seed", "1")) != losses(two_ranks)


@pytest.mark.parametrize("world", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_losses_do_not_depend_on_world_size(two_ranks: Path, world: int, tmp_path: Path) -> None:
    assert losses(trained(world, tmp_path)) == pytest.approx(losses(two_ranks), rel=1e-5)


@pytest.mark.parametrize(
    "strategy", ["zero1", *(pytest.param(item, marks=pytest.mark.slow) for item in ("ddp", "zero2"))]
)
def test_losses_do_not_depend_on_strategy(two_ranks: Path, strategy: str, tmp_path: Path) -> None:
    assert losses(trained(2, tmp_path, "--strategy", strategy)) == losses(two_ranks)


@pytest.mark.parametrize("strategy", ["hsdp", pytest.param("hsdp_zero2", marks=pytest.mark.slow)])
def test_hybrid_strategy_losses_are_close_to_default_strategy(two_ranks: Path, strategy: str, tmp_path: Path) -> None:
    """Two replicas of one rank each: the norm of the full gradient is added up in a different order."""
    assert losses(trained(2, tmp_path, "--strategy", strategy)) == pytest.approx(losses(two_ranks), rel=1e-6)


def test_gradient_accumulation_matches_full_batch_losses(two_ranks: Path, tmp_path: Path) -> None:
    halves = trained(2, tmp_path, "--batch", "2", "--accumulate", "2")
    assert losses(halves) == pytest.approx(losses(two_ranks), rel=1e-5)


def test_activation_checkpointing_does_not_change_losses(two_ranks: Path, tmp_path: Path) -> None:
    assert losses(trained(2, tmp_path, "--activation-checkpointing")) == losses(two_ranks)


def run_with_rates_of_float32(out: Path, captures: bool) -> int:
    """Run nine steps; if `captures`, six of them replay the captured graph. Return the number of replays."""
    register_backend("gloo", NativeCollectives)
    graph = ReplayedGraph()
    argv = [*QUICK, "--steps", "9", "--accumulate", "2", "--validate-every", "4", "--out", str(out)]
    settings = parse_settings(argv)
    settings = replace(settings, optimization=replace(settings.optimization, capture=captures))
    with (
        mock.patch("fullshard.train.loop.capture", lambda step, examples: CapturedStep(step, examples, 3, graph)),
        mock.patch("fullshard.train.loop.learning_rate", lambda *args: torch.tensor(learning_rate(*args)).item()),
    ):
        rank = this_rank()
        train(settings, check(replace(settings, optimization=OptimizationSettings()), rank.world), rank)
    return graph.replays


@pytest.mark.slow
def test_captured_steps_do_not_change_losses_or_weights(tmp_path: Path) -> None:
    replays = [
        testing.run_ranks(2, run_with_rates_of_float32, tmp_path / str(captures), captures)
        for captures in (True, False)
    ]
    assert replays == [[6, 6], [0, 0]]
    assert losses(tmp_path / "True") == losses(tmp_path / "False")
    assert (tmp_path / "True/model.safetensors").read_bytes() == (tmp_path / "False/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "flags",
    [
        ("--offload-optimizer", "1", "--offload-activations", "1"),
        ("--offload-parameters", "1"),
        pytest.param(("--offload-budget", "1GB"), marks=pytest.mark.slow),
    ],
)
def test_disk_offload_does_not_change_losses(two_ranks: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    flags = (*flags, "--offload-folder", str(tmp_path / "disk"))
    assert losses(trained(2, tmp_path / "run", *flags)) == losses(two_ranks)
    assert not any((tmp_path / "disk").glob("*"))


@pytest.mark.slow
def test_memory_formula_includes_offloaded_activations(tmp_path: Path) -> None:
    """Tensors below 64 KiB are not offloaded, so these are larger. The measurement may include unwritten buffers."""
    flags = (
        "--seq",
        "256",
        "--width",
        "128",
        "--offload-activations",
        "0.5",
        "--offload-folder",
        str(tmp_path / "disk"),
    )
    columns = metrics(trained(2, tmp_path / "run", *flags))[-1]["bytes_a_rank"]
    measured, formula, ddp = (columns[item].pop("activations") for item in ("measured", "formula", "ddp_formula"))
    assert 0 < formula < 0.9 * ddp and formula <= measured < ddp
    assert {**columns["measured"], "total": 0} == {**columns["formula"], "total": 0}


def foreseen(folder: Path) -> tuple[int, list[str]]:
    policy = Offload(optimizer={"disk": 1.0}, folder=folder)
    model = fully_shard(torch.nn.Linear(500, 500), offload_policy=policy)
    argv = [*QUICK, "--offload-optimizer", "1", "--offload-folder", str(folder), "--out", str(folder)]
    settings = parse_settings(argv)
    with mock.patch("fullshard.train.predicting.MEASURING_S", 0.1):
        return predict_on_disk(model).nbytes, disk_lines(
            model, settings, this_rank(), 0.5, disk_traffic(model, settings)
        )


def test_disk_cost_is_reported_before_first_step(tmp_path: Path) -> None:
    """All ranks of the machine write to this disk: 0.002 GB each."""
    nbytes, lines = run_ranks(2, foreseen, tmp_path)[0]
    assert f"takes {2 * nbytes / 1e9:.3g} GB" in lines[1]
    assert f"writes {2 * nbytes / 1e9:.3g} GB" in lines[2] and "for a step of 0.5 to " in lines[2]
    assert f"writes {2 * nbytes * 2 * 86400 / 1e12:.3g} TB a day, {3 * 2 * nbytes / 1e12:.3g} TB in 3 steps" in lines[3]


def refused(folder: Path, flags: list[str]) -> None:
    """Check that errors for lack of disk space name options that fit."""
    rank = this_rank()

    def made(flags: list[str]) -> tuple[ShardedGPT, TrainSettings]:
        argv = [*QUICK, *flags, "--layers", "8", "--offload-folder", str(folder), "--out", str(folder)]
        settings = resolved(parse_settings(argv), rank)
        return sharded_gpt(settings, rank), settings

    def lines(flags: list[str]) -> list[str]:
        model, settings = made(flags)
        return disk_lines(model, settings, rank, 0.5, disk_traffic(model, settings))

    free = int(0.6 * rank.world * disk_traffic(*made(flags)).room_bytes)
    with (
        mock.patch("fullshard.train.predicting.MEASURING_S", 0.1),
        mock.patch("fullshard.train.predicting.free_bytes", lambda _: free - rank.world * pace_of(folder).held_bytes),
    ):
        with pytest.raises(DiskError, match=f"{free} are free. Ask for --offload") as caught:
            lines(flags)
        [requested] = re.findall(r"Ask for (.*), free space", str(caught.value))
        assert len(lines(requested.split())) == 4
        assert [part for part in requested.split() if part[0] == "-"] == flags[::2]


@pytest.mark.parametrize("flags", ["--offload-optimizer 1", "--offload-optimizer 0.5 --offload-parameters 0.5"])
def test_offload_without_disk_space_raises_with_options_that_fit(tmp_path: Path, flags: str) -> None:
    run_ranks(2, refused, tmp_path, flags.split())


def forecast_in_background(settings: TrainSettings, machine: Machine) -> Forecast:
    return Forecasting(forecast_run, settings, machine).result()


@pytest.mark.slow
@on_ranks(2)  # the first rank starts processes that import torch
def test_dry_run_predicts_disk_traffic(tmp_path):
    """A dry run moves the bytes of the formulas, and activations in addition."""
    rank = this_rank()
    offload = ["--offload-optimizer", "0.6", "--offload-parameters", "0.3", "--offload-folder", str(tmp_path)]
    shape = ["--accumulate", "2", "--batch", "4", "--seq", "256", "--width", "128"]
    settings = resolved(parse_settings([*QUICK, *offload, *shape, "--out", str(tmp_path)]), rank)
    expected = disk_traffic(sharded_gpt(settings, rank), settings)
    if not rank.leads:
        return
    machine = machine_of(rank)
    found = forecast_in_background(settings, machine).disk_traffic
    for name in ("room_bytes", "read_bytes", "written_bytes"):
        assert getattr(expected, name) == pytest.approx(getattr(found, name), rel=0.05), name
    offloaded = replace(settings, memory=replace(settings.memory, offload_activations=1.0))
    more = forecast_in_background(offloaded, machine).disk_traffic
    kept = more.room_bytes - found.room_bytes
    assert kept > 0 and more == found + Traffic.of_activations(kept, microbatches=2)


def train_as_a_user_does(out: Path, argv: list[str]) -> None:
    rank = this_rank()
    settings = parse_settings([*QUICK, *argv, "--out", str(out)])
    with mock.patch("fullshard.train.predicting.MEASURING_S", 0.1):
        train(settings, check(settings, rank.world), rank, predicts=True, records=True)


def train_without_room(out: Path, argv: list[str]) -> None:
    with (
        mock.patch("fullshard.train.predicting.free_bytes", lambda _: 10),
        pytest.raises(DiskError, match=r"10 are free\. One unit does not fit"),
    ):
        train_as_a_user_does(out, argv)


@pytest.mark.slow
def test_predicted_and_recorded_disk_run_does_not_change_losses(two_ranks: Path, tmp_path: Path) -> None:
    argv = ["--offload-optimizer", "1", "--offload-folder", str(tmp_path / "disk")]
    run_ranks(2, train_as_a_user_does, tmp_path / "run", argv)
    assert losses(tmp_path / "run") == losses(two_ranks)
    run_ranks(2, train_without_room, tmp_path / "refused", argv)
    assert "step" not in {line["kind"] for line in metrics(tmp_path / "refused")}, "refused on every rank, before it"


@pytest.mark.slow
def test_bfloat16_losses_stay_close_to_float32(two_ranks: Path, tmp_path: Path) -> None:
    assert losses(trained(2, tmp_path, "--dtype", "bfloat16")) == pytest.approx(losses(two_ranks), rel=0.02)


@pytest.mark.parametrize(
    "transports",
    [
        pytest.param(("--gather-wire", "fp8"), marks=pytest.mark.slow),
        ("--strategy", "hsdp", "--gather-wire", "int8", "--reduce-wire", "int4"),
    ],
)
def test_losses_with_encoded_communication_stay_close(
    two_ranks: Path, transports: tuple[str, ...], tmp_path: Path
) -> None:
    found = losses(trained(2, tmp_path, *transports))
    assert found != losses(two_ranks)
    assert found == pytest.approx(losses(two_ranks), rel=0.02)


@on_ranks(1)
def test_saved_weights_reproduce_validation_loss(two_ranks):
    settings = parse_settings(["--config", str(two_ranks / SETTINGS)])
    model = GPT(shape_of(settings.model))
    model.load_state_dict(load_file(two_ranks / WEIGHTS))
    text = write_text(find_text(settings.text.text), two_ranks / ".text")
    again = validation_loss(model, text, settings, this_rank())
    assert again == pytest.approx(losses(two_ranks)[-1], rel=1e-6)


@on_ranks(1)
def test_text_of_killed_run_is_excluded_from_training_text(tmp_path):
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text("some text\n" * 1000)
    source = find_text(tmp_path)
    agreed_text(source, tmp_path / "run", this_rank())
    assert (tmp_path / "run").is_dir()
    assert find_text(tmp_path) == source


@on_ranks(4)
def test_unequal_ranks_per_machine_raises_on_every_rank(tmp_path):
    out = tmp_path / "run"
    rank = replace(this_rank(), local_world=3 if dist.get_rank() == 2 else 1, machines=2)
    settings = parse_settings([*QUICK, "--strategy", "hsdp", "--out", str(out)])
    with pytest.raises(ConfigError, match=r"machines have 1 to 3 ranks\. .* set --replicas"):
        train(settings, check(settings, rank.world, rank.machines), rank)
    assert not out.exists()


def train_where_nothing_fits(folder: Path, file: str) -> tuple[type[BaseException], str]:
    """Return the error of a run in which the disk is full when `file` is written."""
    rank, out = this_rank(), folder / "run"
    settings = parse_settings([*QUICK, "--sample-every", "2", "--out", str(out)])
    source = check(settings, rank.world)
    if file == "text":
        source = find_text(folder / "source")
        file = f".text/text.bin.{os.getpid()}.tmp"
    dist.barrier()  # wait until both ranks have checked
    if rank.leads:
        link = out.with_name(file) if file == out.name else out / file
        link.parent.mkdir(parents=True, exist_ok=True)
        if file == "model.safetensors":
            link.mkdir()  # since that file is written under another name
        else:
            link.symlink_to(FULL)
    dist.barrier()
    with pytest.raises((ConfigError, CheckpointError)) as raised:
        train(settings, source, rank)
    return raised.type, str(raised.value)


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("run", "run: cannot be written"),
        ("text", r"run/\.text/text\.bin: cannot be written"),
        ("settings.yaml", "run/settings.yaml: cannot be written"),
        ("metrics.jsonl", "run/metrics.jsonl: cannot be written"),
        ("samples.txt", "run/samples.txt: cannot be written"),
        ("model.safetensors", "writing .*/run/model.safetensors: rank 0: .* Free space on the disk of --out"),
    ],
)
def test_full_disk_raises_on_every_rank_with_file_name(file: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    for name in ("one.txt", "two.txt"):
        (tmp_path / "source" / name).write_text("some text\n" * 1000)
    first, *others = run_ranks(2, train_where_nothing_fits, tmp_path, file)
    assert others == [first]
    kind, message = first
    assert re.search(named, message) and "\n" not in message and "another --out" in message
    if kind is ConfigError:
        assert ("No space left on device" in message and "Free space on that disk" in message) == (file != "run")
