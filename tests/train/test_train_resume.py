"""Interrupted and resumed runs of the trainer have the results of an uninterrupted run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from training_runs import QUICK, losses, metrics, this_rank, wait_for_step, weights

from fullshard.checkpoint import latest
from fullshard.checkpoint.contents import Contents
from fullshard.checkpoint.manifest import Manifest
from fullshard.checkpoint.staging import HostMemory
from fullshard.errors import CheckpointError, ConfigError
from fullshard.testing import assert_same, run_ranks
from fullshard.train.check import check
from fullshard.train.loop import TrainingLoop, train
from fullshard.train.options import parse_settings
from fullshard.train.parallelism import adapt_to_ranks, part_of, rows_of, sequences_of
from fullshard.train.resuming import options_after_restart, resumed_settings
from fullshard.train.run_folder import METRICS
from fullshard.train.schedule import peak_lr
from fullshard.train.settings import OptimizationSettings
from fullshard.train.stopping import PREEMPTED

SAVING = ["--checkpoint-every", "1", "--steps", "4"]


def run_training(out: Path, argv: list[str], stop_at: int | None = None) -> int:
    """Return the exit code. Only the last rank gets SIGTERM, early enough that the run ends after step `stop_at`."""
    rank = this_rank()
    if stop_at is not None and rank.index == rank.world - 1:
        step_of = TrainingLoop.train_step

        def step_and_be_stopped(self: TrainingLoop, step: int) -> Any:
            if step + 2 == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            return step_of(self, step)

        TrainingLoop.train_step = step_and_be_stopped
    settings = resumed_settings(parse_settings([*QUICK, *argv, "--out", str(out)]), rank.world)
    return train(settings, check(settings, rank.world), rank)


def ran(world: int, out: Path, *argv: str, stop_at: int | None = None) -> Path:
    codes = run_ranks(world, run_training, out, [*SAVING, *argv], stop_at)
    assert codes == [0 if stop_at is None else PREEMPTED] * world
    return out


def reported(out: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run without the first line and the resume lines."""
    return [line for line in metrics(out)[1:] if line["kind"] != "resume"]


def steps_kept(out: Path) -> list[int]:
    return sorted(Manifest.read(path).step for path in (out / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run on two ranks."""
    return ran(2, tmp_path_factory.mktemp("whole"), "--keep", "3")


@pytest.mark.slow
def test_saving_checkpoints_does_not_change_weights(whole, tmp_path):
    assert steps_kept(whole) == [2, 3, 4]
    codes = run_ranks(2, run_training, tmp_path, ["--steps", "4"])
    assert codes == [0, 0]
    assert not (tmp_path / "checkpoints").exists()
    assert_same(weights(tmp_path), weights(whole))


@pytest.mark.slow
def test_stopped_run_resumes_with_identical_weights_and_metrics(whole, tmp_path):
    ran(2, tmp_path, "--checkpoint-every", "100", stop_at=2)
    assert steps_kept(tmp_path) == [2]
    assert metrics(tmp_path)[-1] == {"kind": "stopped", "step": 2}
    ran(2, tmp_path, "--checkpoint-every", "100", "--resume", "auto")
    assert_same(weights(tmp_path), weights(whole))
    assert reported(tmp_path) == reported(whole)
    assert (tmp_path / "samples.txt").read_bytes() == (whole / "samples.txt").read_bytes()
    assert [line for line in metrics(tmp_path) if line["kind"] == "resume"] == [
        {"kind": "resume", "step": 2, "world": 2, "from": str(tmp_path / "checkpoints" / "step-000000002")}
    ]


@pytest.mark.slow
def test_restarted_ranks_of_a_forked_run_resume_from_its_own_checkpoint(whole, tmp_path):
    """The run began with the checkpoint of another run. Its options have not changed."""
    ran(2, tmp_path / "other", stop_at=2)
    options = ["--resume", str(tmp_path / "other" / "checkpoints" / "step-000000001")]
    assert options_after_restart(options, tmp_path / "run") == options
    ran(2, tmp_path / "run", *options, stop_at=3)
    ran(2, tmp_path / "run", *options_after_restart(options, tmp_path / "run"))
    assert_same(weights(tmp_path / "run"), weights(whole))


@pytest.mark.slow
def test_resume_auto_starts_from_scratch_without_checkpoint(whole, tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes((whole / "metrics.jsonl").read_bytes()[:-7])  # killed before any save
    ran(2, tmp_path, "--resume", "auto")
    assert reported(tmp_path) == reported(whole)


@pytest.mark.slow
def test_resuming_finished_run_restores_its_result(whole, tmp_path):
    ran(2, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    ran(2, tmp_path, "--resume", "auto")
    assert_same(weights(tmp_path), weights(whole))
    assert reported(tmp_path) == reported(whole)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, *(pytest.param(world, marks=pytest.mark.slow) for world in (3, 4))])
def test_run_resumes_at_another_world_size_with_same_losses(whole, world, tmp_path):
    ran(2, tmp_path, stop_at=2)
    ran(world, tmp_path, "--resume", "auto", "--strategy", "zero2")
    assert losses(tmp_path) == pytest.approx(losses(whole), rel=1e-5)


@pytest.mark.parametrize(
    ("transports", "exact"),
    [
        (("--gather-wire", "int8", "--reduce-wire", "bf16"), True),
        (("--gather-wire", "fp8", "--reduce-wire", "int4"), False),
    ],
)
@pytest.mark.slow
def test_checkpoint_of_encoded_communication_stores_full_precision(transports, exact, tmp_path):
    """Only the encoding errors kept from the last messages of a step are missing from a checkpoint."""
    expected = ran(2, tmp_path / "whole", *transports)
    out = tmp_path / "stopped"
    ran(2, out, *transports, stop_at=2)
    ran(2, out, *transports, "--resume", "auto")
    assert losses(out) == (losses(expected) if exact else pytest.approx(losses(expected), rel=0.02))


@pytest.mark.slow
def test_damaged_checkpoint_falls_back_to_previous_checkpoint(whole, tmp_path):
    ran(2, tmp_path, stop_at=3)
    os.truncate(latest(tmp_path / "checkpoints") / "__1_0.distcp", 10)
    ran(2, tmp_path, "--resume", "auto")
    assert next(line["step"] for line in metrics(tmp_path) if line["kind"] == "resume") == 2
    assert_same(weights(tmp_path), weights(whole))


@pytest.mark.slow
def test_new_run_starts_from_given_checkpoint(whole, tmp_path):
    out = ran(2, tmp_path / "new", "--resume", str(whole / "checkpoints" / "step-000000002"))
    assert_same(weights(out), weights(whole))
    assert [line["step"] for line in metrics(out) if line["kind"] == "step"] == [3, 4]
    assert metrics(out)[0]["kind"] == "run"


def train_without_checkpoints(out: Path, writable_from: int | None) -> str | None:
    """Return the error of a run whose checkpoint folder is a file, until step `writable_from` if given."""
    rank = this_rank()
    settings = parse_settings([*QUICK, "--checkpoint-every", "1", "--out", str(out)])
    source = check(settings, rank.world)
    dist.barrier()
    if rank.leads:
        out.mkdir()
        (out / "checkpoints").touch()
    step_of = TrainingLoop.train_step

    def step(self: TrainingLoop, step: int) -> Any:
        self.wait_for_saves()
        if rank.leads and step + 1 == writable_from:
            (out / "checkpoints").unlink()
        return step_of(self, step)

    with mock.patch.object(TrainingLoop, "train_step", step):
        try:
            assert train(settings, source, rank) == 0
        except CheckpointError as error:
            return str(error)
    return None


@pytest.mark.parametrize("writable_from", [None, 3])
def test_run_that_saved_no_checkpoint_raises_after_last_step(writable_from, tmp_path):
    first, second = run_ranks(2, train_without_checkpoints, tmp_path / "run", writable_from)
    assert first == second
    assert metrics(tmp_path / "run")[-1]["kind"] == "end"
    assert weights(tmp_path / "run")
    if writable_from is None:
        assert "no checkpoint could be saved since this run started" in first
        assert "FileExistsError" in first and "choose another --out" in first
    else:
        assert first is None


def train_without_memory(out: Path, enough_from: int | None, stop_at: int | None = None) -> str | None:
    """Return the error of a run whose last rank cannot copy its values, until step `enough_from` if given."""
    copy = HostMemory.copy

    def fail(self: HostMemory, contents: Contents) -> Contents:
        if dist.get_rank() == 1 and not (enough_from and contents.record["extra"]["step"] >= enough_from):
            raise MemoryError("no memory for copies")
        return copy(self, contents)

    state, step_of, steps = TrainingLoop.run_state, TrainingLoop.train_step, [0]

    def step(self: TrainingLoop, step: int) -> Any:
        steps[0] = step + 1
        return step_of(self, step)

    with (
        mock.patch.object(HostMemory, "copy", fail),
        mock.patch.object(TrainingLoop, "train_step", step),
        mock.patch.object(TrainingLoop, "run_state", lambda self: {**state(self), "step": steps[0]}),
    ):
        try:
            assert run_training(out, ["--checkpoint-every", "1"], stop_at) == 0
        except CheckpointError as error:
            return str(error)
    return None


@pytest.mark.parametrize(("enough_from", "stop_at"), [(None, None), (3, None), (None, 2)])
def test_run_continues_if_a_rank_cannot_copy_its_values(enough_from, stop_at, tmp_path):
    first, second = run_ranks(2, train_without_memory, tmp_path / "run", enough_from, stop_at)
    assert first == second
    if enough_from is not None:
        assert first is None
        assert steps_kept(tmp_path / "run") == [3]
    elif stop_at is None:
        assert "no checkpoint could be saved since this run started" in first
        assert weights(tmp_path / "run")
    else:
        assert first.startswith("saving step 2 ")
    assert first is None or "rank 1: MemoryError: no memory for copies" in first


def refuse(out: Path, argv: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        run_training(out, argv)
    return str(caught.value)


def test_resume_rejects_checkpoint_beyond_requested_steps(whole, tmp_path):
    resume = str(whole / "checkpoints")
    (stated,) = run_ranks(1, refuse, tmp_path / "new", ["--steps", "2", "--resume", resume])
    assert "has completed 4 steps, but --steps is 2" in stated


@pytest.mark.slow
def test_resume_rejects_changed_text(whole, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be " * 100)
    out = ran(1, tmp_path / "out", "--text", str(text), "--batch", "2")
    text.write_text("to be or not to be " * 120)
    argv = [*SAVING, "--text", str(text), "--batch", "2", "--resume", "auto"]
    (stated,) = run_ranks(1, refuse, out, argv)
    assert "Restore the text" in stated


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--lr", "0.5"], "had --lr 0.01, and now it is 0.5"),
        (["--steps", "9"], "had --steps 4, and now it is 9"),
        (["--layers", "3"], r"had --layers (left out), and now it is 3"),
        (["--batch", "6"], "has 4 sequences, not 6"),
    ],
)
def test_resume_rejects_changed_options(whole, argv, words):
    settings = parse_settings([*QUICK, *SAVING, "--resume", "auto", "--out", str(whole), *argv])
    with pytest.raises(ConfigError) as caught:
        resumed_settings(settings, 2)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"settings": None, "world": 2},
        {"settings": {}, "world": "2"},
        {"settings": {"dtype": "float32"}, "world": 0},
        {"settings": {"dtype": "float32", "batch": "4"}, "world": 2},
        {"settings": {"dtype": "float32", "accumulate": 0}, "world": 2},
    ],
)
def test_resume_rejects_metrics_without_valid_first_line(header, tmp_path):
    (tmp_path / METRICS).write_text(json.dumps({"kind": "start", **header}) + "\n")
    with pytest.raises(ConfigError, match=r"line 1 of .*metrics.jsonl has no valid settings"):
        resumed_settings(parse_settings(["--resume", "auto", "--out", str(tmp_path)]), 2)


def test_resume_auto_requires_out():
    with pytest.raises(ConfigError, match="--resume auto needs --out"):
        resumed_settings(parse_settings(["--resume", "auto"]), 2)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--keep", "0"], "at least 1"),
        (["--checkpoint-every", "-1"], "at least 0"),
        (["--resume", "no/where"], "the folder does not exist"),
        (["--gather-wire", "int4"], "Choose one of int8 or fp8"),
        (["--gather-wire", "int8", "--strategy", "ddp"], "does not gather parameters"),
        (["--reduce-wire", "fp8"], "Choose one of bf16, int8 or int4"),
        (["--reduce-wire", "bf16", "--reduce-dtype", "bfloat16"], "summed in float32"),
        (["--offload-optimizer", "1.5"], "--offload-optimizer 1.5: must be a fraction from 0 to 1"),
        (
            ["--offload-parameters", "0.7", "--offload-optimizer-cpu", "0.5", "--offload-folder", "."],
            "--offload-parameters 0.7 and",
        ),
        (["--offload-activations", "0.5"], "--offload-activations 0.5 needs --offload-folder"),
        (["--offload-activations-cpu", "1.5"], "--offload-activations-cpu 1.5: must be a fraction"),
        (
            ["--offload-activations-cpu", "0.7", "--offload-activations", "0.5", "--offload-folder", "."],
            "--offload-activations 0.5 and --offload-activations-cpu 0.7: their sum must be at most 1",
        ),
        (["--offload-folder", "."], "--offload-folder .: not used"),
        (["--offload-budget", "9GB", "--offload-activations-cpu", "1"], "with --offload-activations-cpu 1: a budget"),
    ],
)
def test_invalid_options_are_rejected_before_start(argv, words):
    with pytest.raises(ConfigError, match=words):
        check(parse_settings(argv), 2)


def test_adapted_batch_keeps_sequences_and_rows_at_any_world_size():
    """For any sequence of rank counts, each sequence of a step counts once, in the order of reported losses."""
    for first, then, last, rows, accumulate in product(range(1, 5), range(1, 10), range(1, 6), (1, 3, 4), (1, 2, 6)):
        was = OptimizationSettings(batch=first * rows, accumulate=accumulate)
        shared = adapt_to_ranks(was, before=first, world=then)
        for world, settings in ((then, shared), (last, adapt_to_ranks(shared, before=then, world=last))):
            places = product(range(settings.accumulate), range(world))
            parts = [part_of(settings, microbatch=microbatch, rank=rank, world=world) for microbatch, rank in places]
            counted = [part.first + row for part in parts for row in range(part.counted)]
            assert counted == list(range(first * rows * accumulate))
            assert all(part.rows <= rows for part in parts)
            places = settings.batch * settings.accumulate
            assert places < len(counted) + world * settings.accumulate
            assert settings.accumulate == 1 or rows_of(settings, world) * (settings.accumulate - 1) < len(counted)


@pytest.mark.slow
def test_new_run_keeps_batch_sequences_at_any_world_size(tmp_path):
    """A batch size for another world size is kept: a step trains on the same number of sequences."""
    for world, batch, accumulate in product(range(1, 9), (1, 4, 6, 16), (1, 3)):
        argv = ["--batch", str(batch), "--accumulate", str(accumulate), "--resume", "auto", "--out", str(tmp_path)]
        settings = resumed_settings(parse_settings(argv), world).optimization
        assert sequences_of(settings, world) == batch * accumulate
        assert rows_of(settings, world) // world <= -(-batch // world)
        if batch % world == 0:
            assert (settings.batch, settings.accumulate) == (batch, accumulate)


def test_unchanged_world_size_keeps_batch_settings():
    was = OptimizationSettings(batch=8, accumulate=2, sequences=9)
    assert adapt_to_ranks(was, before=2, world=2) == was


# -- the command ------------------------------------------------------------------------------------------------------


def start(out: Path, *more: str) -> subprocess.Popen[str]:
    """Start the trainer on two ranks, with far more steps than the test waits for."""
    argv = ["train", "--no-predict", "--ranks", "2", *QUICK, "--steps", "100000", "--out", str(out)]
    saving = ["--checkpoint-every", "50", "--resume", "auto", "--validate-every", "0", "--sample-every", "0"]
    return subprocess.Popen(
        [sys.executable, "-m", "fullshard.cli", *argv, *saving, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_sigterm_saves_checkpoint_and_exits_with_preempted_code(tmp_path):
    reached = 0
    for round_ in range(2):
        run = start(tmp_path)
        try:
            reached = wait_for_step(tmp_path, reached + 3)
            run.send_signal(signal.SIGTERM)
            out, err = run.communicate(timeout=60)
        finally:
            run.kill()
        assert run.returncode == PREEMPTED == 75, err
        assert err == ""
        assert "Resume with --resume auto" in out
        last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
        assert last["kind"] == "stopped"
        assert Manifest.read(latest(tmp_path / "checkpoints")).step == last["step"] >= reached
        reached = last["step"]  # otherwise the next round would stop ranks that have not started
        assert ("Resuming after step" in out) == (round_ > 0)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a process of the end of its parent")
def test_killed_launcher_leaves_no_running_ranks(tmp_path):
    run, ranks = start(tmp_path, "--checkpoint-every", "100000"), []
    try:
        wait_for_step(tmp_path, 3)
        ranks = [int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]
        assert len(ranks) == 2
        run.kill()
        run.communicate(timeout=20)  # returns when no process has the output open
    finally:
        for pid in (run.pid, *ranks):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_sigterm_handler_is_not_installed_outside_ranks():
    assert not dist.is_initialized()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def optimization_with_own_folder(folder: Path, argv: list[str]) -> OptimizationSettings:
    """Return the settings with which this rank trains if each rank resumes the run in a separate folder."""
    with mock.patch.object(TrainingLoop, "run", lambda self, stop: self.settings.optimization):
        return run_training(folder / str(dist.get_rank()), argv)


def test_ranks_resume_with_settings_of_the_first_rank(tmp_path):
    """Machines that do not share --out may have different runs there, and safety copies do not need a shared folder."""
    argv = ["--batch", "4", "--accumulate", "2", "--resume", "auto"]
    settings = parse_settings([*QUICK, *argv])
    old = {**settings.as_options(), "lr": peak_lr(settings), "dtype": "float32"}
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / METRICS).write_text(json.dumps({"kind": "run", "world": 1, "settings": old}) + "\n")
    first, second = run_ranks(2, optimization_with_own_folder, tmp_path, argv)
    assert first == second
    assert (first.batch, first.accumulate) == (8, 1)
