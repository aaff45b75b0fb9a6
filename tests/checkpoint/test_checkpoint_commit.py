"""A checkpoint is complete or absent, whether a process is killed or the disk is full or read-only."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from killing import die_before, ended_well
from shared_ranks import on_new_ranks, same_on_all_ranks
from small_models import chain, inputs, sgd
from torch import nn

from fullshard import CheckpointError, fully_shard
from fullshard.checkpoint import container, latest, load, save
from fullshard.checkpoint.folder import clear_up, entries
from fullshard.testing import RanksFailed, run_ranks


def plain(value: float) -> nn.Module:
    """Return a model that needs no process group, with all parameters equal to `value`."""
    model = nn.Linear(4, 3)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    return model


def saved_value(folder: Path) -> float:
    """Return the value in the newest intact checkpoint of `folder`, after checking it against its step."""
    model = plain(-1)
    restored = load(folder, model=model)
    numbers = {number for param in model.parameters() for number in param.flatten().tolist()}
    assert numbers == {float(restored.step)}
    return numbers.pop()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def save_and_die(folder: Path, step: int, operation: int) -> None:
    """Save, but kill the process before file operation number `operation`."""
    die_before(operation, folder)
    save(folder, model=plain(step), step=step, keep=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "step", [2, pytest.param(1, marks=pytest.mark.slow)], ids=["another step", "the same step again"]
)
def test_save_killed_at_any_file_operation_keeps_a_complete_checkpoint(step, tmp_path):
    """Kill before every file operation. The folder then has the old or the new checkpoint, complete."""
    save(tmp_path / "first", model=plain(1), step=1)
    for operation in range(1, 100):
        folder = tmp_path / str(operation)
        shutil.copytree(tmp_path / "first", folder)
        ended = ended_well(1, save_and_die, folder, step, operation)
        assert saved_value(folder) == step if ended else saved_value(folder) in (1, step)
        save(folder, model=plain(3), step=3, keep=1)
        assert names(folder) == ["step-000000003"]
        if ended:
            break
    assert operation > 10


def test_keep_deletes_oldest_and_counts_only_intact_checkpoints(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, model=plain(step), step=step, keep=2)
    assert names(tmp_path) == ["step-000000003", "step-000000004"]
    data = next((tmp_path / "step-000000004").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    save(tmp_path, model=plain(5), step=5, keep=2)
    assert names(tmp_path) == ["step-000000003", "step-000000004", "step-000000005"]
    assert saved_value(tmp_path) == 5


def test_latest_checkpoint_is_the_last_saved_even_at_a_lower_step(tmp_path):
    for step in (10, 20, 5):
        save(tmp_path, model=plain(step), step=step)
    assert saved_value(tmp_path) == 5
    save(tmp_path, model=plain(6), step=6, keep=1)
    assert names(tmp_path) == ["step-000000006"]


@pytest.mark.parametrize("name", ["step-100", "step-200.ckpt"])
def test_folder_of_checkpoints_may_be_named_like_a_checkpoint(name, tmp_path):
    save(tmp_path / name, model=plain(5), step=5)
    assert saved_value(tmp_path / name) == 5
    (tmp_path / name / "step-000000005" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="expected the manifest of a complete checkpoint, found none"):
        saved_value(tmp_path / name)


def test_save_replaces_checkpoint_of_the_same_step(tmp_path):
    save(tmp_path, model=plain(-1), step=7)
    save(tmp_path, model=plain(7), step=7)
    assert saved_value(tmp_path) == 7
    assert names(tmp_path) == ["step-000000007"]


def test_files_of_a_killed_run_are_ignored_and_then_removed(tmp_path):
    assert latest(tmp_path / "nowhere") is None
    save(tmp_path, model=plain(1), step=1)
    shutil.copytree(tmp_path / "step-000000001", tmp_path / "step-000000002.partial-0a")
    (tmp_path / "step-000000003.deleted-0b").mkdir()
    (tmp_path / "notes").mkdir()
    assert latest(tmp_path) == tmp_path / "step-000000001"
    clear_up(tmp_path)
    assert names(tmp_path) == ["notes", "step-000000001"]


def test_a_replaced_checkpoint_without_a_successor_is_kept(tmp_path):
    path = save(tmp_path, model=plain(1), step=1)
    path.rename(tmp_path / "step-000000001.replaced-0a")
    assert saved_value(tmp_path) == 1
    clear_up(tmp_path)
    assert [entry.path for entry in entries(tmp_path)] == [path]


# -- failing writers --------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder with half a megabyte of space."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def trained_chain() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = chain(fully_shard)
    optimizer = sgd(model)
    model(inputs()).sum().backward()
    optimizer.step()
    return model, optimizer


def refusal(action: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    return str(caught.value)


@on_new_ranks(2)
def test_full_disk_raises_on_every_rank_and_keeps_old_checkpoint(small_disk):
    model, optimizer = trained_chain()
    save(small_disk, model=model, step=1)
    stated = refusal(lambda: save(small_disk, model=model, optimizer=optimizer, step=2))
    loss = model(inputs()).sum()
    loss.backward()
    optimizer.step()
    model, optimizer = trained_chain()
    assert load(small_disk, model=model).step == 1
    ranks = same_on_all_ranks((stated, loss.item()))
    assert "No space left on device" in ranks[0]
    assert names(small_disk) == ["step-000000001"]


def test_read_only_folder_raises_on_every_rank(small_disk):
    run_ranks(2, save_chain, small_disk, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    first, second = run_ranks(2, refuse_to_save_chain, small_disk, 2)
    assert first == second
    assert "Read-only file system" in first
    assert names(small_disk) == ["step-000000001"]


def save_chain(folder: Path, step: int) -> None:
    save(folder, model=trained_chain()[0], step=step)


def refuse_to_save_chain(folder: Path, step: int) -> str:
    return refusal(lambda: save_chain(folder, step))


def fail_to_write(patch: pytest.MonkeyPatch) -> None:
    def write(stream: Any, data: Any) -> int:
        raise OSError(5, "Input/output error")

    patch.setattr(container._Stream, "write", write)


def fail_to_sync(patch: pytest.MonkeyPatch) -> None:
    def fsync(file: int) -> None:
        raise OSError(122, "Disk quota exceeded")

    patch.setattr(container.os, "fsync", fsync)


def lose_what_was_written(patch: pytest.MonkeyPatch) -> None:
    def fsync(file: int) -> None:
        os.unlink(os.readlink(f"/proc/self/fd/{file}"))

    patch.setattr(container.os, "fsync", fsync)


@on_new_ranks(2)
def test_failed_write_on_one_rank_raises_on_every_rank(tmp_path):
    model, _ = trained_chain()
    save(tmp_path, model=model, step=1)
    stated = []
    for broken in (fail_to_write, fail_to_sync, lose_what_was_written):
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                broken(patch)
            stated.append(refusal(lambda: save(tmp_path, model=model, step=2, keep=1)))
    assert load(tmp_path, model=model).step == 1
    first = same_on_all_ranks(stated)
    causes = ("Input/output error", "Disk quota exceeded", "a folder that all hosts share")
    for stated, words in zip(first, causes, strict=True):
        assert f"saving step 2 to {tmp_path}" in stated
        assert words in stated
    assert "rank 1" in first[0]
    assert names(tmp_path) == ["step-000000001"]


def die_in_the_middle(folder: Path) -> None:
    model, _ = trained_chain()
    save(folder, model=model, step=1)
    if dist.get_rank() == 1:
        container._Stream.write = lambda *_: os._exit(9)
    save(folder, model=model, step=2)


@pytest.mark.slow
def test_killed_writer_raises_on_other_ranks_and_keeps_old_checkpoint(tmp_path):
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, die_in_the_middle, tmp_path)
    assert caught.value.failures[1].kind == "exit"
    assert caught.value.failures[0].kind == "fullshard.errors.CheckpointError"
    assert "another rank has ended" in caught.value.failures[0].message
    run_ranks(3, go_on_from, tmp_path, 1)


def go_on_from(folder: Path, step: int) -> None:
    assert load(folder, model=trained_chain()[0]).step == step
