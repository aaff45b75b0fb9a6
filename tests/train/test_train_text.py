"""The text of a run: sources, splits, and the bytes of each step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard.errors import ConfigError
from fullshard.train.text import Batch, Text, find_text, training_batch, validation_batches, window_start, write_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folder")
    for number in range(120):
        inner = root / f"part{number % 3}"
        inner.mkdir(exist_ok=True)
        (inner / f"file{number}.txt").write_bytes(f"text of file {number}. ".encode() * (number % 7 + 1))
    (root / "picture.png").write_bytes(b"\x89PNG\0\0\0")
    (root / ".hidden").write_bytes(b"not for learning")
    return root


@pytest.fixture(scope="module")
def text(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Text:
    return write_text(find_text(folder), tmp_path_factory.mktemp("cache"))


def rows(text: Text, first: int, count: int, seed: int = 3) -> torch.Tensor:
    return training_batch(text, seed=seed, first=first, rows=count, seq=16).inputs


@pytest.mark.parametrize("count", [1, 4, 6])
def test_sequences_do_not_depend_on_batch_size(text: Text, count: int) -> None:
    parts = [rows(text, first, count) for first in range(0, 60, count)]
    assert torch.equal(torch.cat(parts), rows(text, 0, 60))


def test_batches_depend_only_on_seed_and_index(text: Text) -> None:
    assert torch.equal(rows(text, 48, 12), rows(text, 48, 12))
    assert not torch.equal(rows(text, 48, 12), rows(text, 60, 12))
    assert not torch.equal(rows(text, 48, 12), rows(text, 48, 12, seed=4))


def test_targets_are_inputs_shifted_by_one_byte(text: Text) -> None:
    batch = training_batch(text, seed=0, first=0, rows=4, seq=16)
    assert batch.inputs.shape == batch.targets.shape == (4, 16)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])


@given(seed=st.integers(0, 2**40), total=st.integers(3, 5000), seq=st.integers(1, 64), epoch=st.integers(0, 3))
def test_epoch_visits_every_window_once_within_text(seed: int, total: int, seq: int, epoch: int) -> None:
    if total < seq + 2:
        return
    windows = max(1, (total - 1) // seq - 1)
    starts = sorted(window_start(seed, epoch * windows + k, total, seq) for k in range(windows))
    assert starts[0] >= 0
    assert starts[-1] + seq + 1 <= total
    assert starts == list(range(starts[0], starts[0] + windows * seq, seq))


def test_unreadable_files_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").symlink_to("b.txt")
    (tmp_path / "c.txt").symlink_to("c" * 300)
    (tmp_path / "d.txt").symlink_to(tmp_path)
    assert [file.name for file in find_text(tmp_path).files] == ["a.txt"]


def test_validation_split_is_disjoint_complete_and_stable(folder: Path, text: Text, tmp_path: Path) -> None:
    source = find_text(folder)
    assert source == find_text(folder)
    names = [file.name for file in source.files]
    assert len(set(names)) == len(names) == 120  # neither the picture nor the hidden file
    whole = b"".join((folder / name).read_bytes() + b"\n" for name in names)
    assert text.training.tobytes() + text.validation.tobytes() == whole
    held_back = {file.name for file in source.files if file.validates}
    assert 0 < len(held_back) < 20
    assert names == sorted(set(names) - held_back) + sorted(held_back)
    assert text.validation_bytes == sum(len((folder / name).read_bytes()) + 1 for name in held_back)


def test_new_file_does_not_change_split_of_other_files(folder: Path) -> None:
    before = {file.name: file.validates for file in find_text(folder).files}
    extra = folder / "part0" / "one-more.txt"
    extra.write_text("more")
    try:
        after = {file.name: file.validates for file in find_text(folder).files}
    finally:
        extra.unlink()
    assert before.items() <= after.items()


def test_single_file_is_read_in_place_and_split_near_its_end(tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    file.write_bytes(bytes(range(32, 127)) * 20)
    text = write_text(find_text(file), tmp_path / "cache")
    assert text.path == file
    assert not (tmp_path / "cache").exists()
    assert text.training.tobytes() + text.validation.tobytes() == file.read_bytes()
    assert text.validation_bytes == 1900 // 20


def test_folder_of_one_file_has_validation_text(tmp_path: Path) -> None:
    (tmp_path / "only.txt").write_bytes(b"x" * 1000)
    source = find_text(tmp_path)
    assert (source.training_bytes, source.validation_bytes) == (951, 50)


def test_text_cache_is_rewritten_only_when_text_changes(tmp_path: Path) -> None:
    folder, cache = tmp_path / "text", tmp_path / "cache"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"a" * 500)
    first = write_text(find_text(folder), cache)
    written = first.path.stat().st_mtime_ns
    assert write_text(find_text(folder), cache).path.stat().st_mtime_ns == written
    (folder / "b.txt").write_bytes(b"b" * 500)
    again = write_text(find_text(folder), cache)
    assert again.training_bytes + again.validation_bytes == 1002
    assert again.training.tobytes().startswith(b"a" * 500)


def test_files_of_earlier_runs_are_excluded_from_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a" * 500)
    run = tmp_path / "runs" / "first" / "text"
    run.mkdir(parents=True)
    (run / "text.bin").write_bytes(b"b" * 500)
    (run.parent / "metrics.jsonl").write_text("{}")
    assert [file.name for file in find_text(tmp_path).files] == ["a.txt"]


def test_default_text_is_standard_library() -> None:
    source = find_text(None)
    assert source.training_bytes > 5_000_000
    assert all(file.name.endswith(".py") and "site-packages" not in file.name for file in source.files)


def test_missing_or_empty_text_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the file or folder does not exist"):
        find_text(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="no text files"):
        find_text(tmp_path)


def in_order(text: Text, world: int, rows: int, windows: int) -> torch.Tensor:
    def of_rank(rank: int) -> list[Batch]:
        return list(validation_batches(text, windows=windows, rows=rows, seq=8, rank=rank, world=world))

    batches = zip(*(of_rank(rank) for rank in range(world)), strict=True)
    return torch.cat([part.inputs for batch in batches for part in batch])


@pytest.mark.parametrize(("world", "rows"), [(1, 1), (1, 4), (2, 4), (3, 6), (4, 12)])
def test_validation_windows_do_not_depend_on_world_size_or_batch(text: Text, world: int, rows: int) -> None:
    visited = in_order(text, world, rows, windows=10)
    assert torch.equal(visited[:10], in_order(text, 1, 1, windows=10))
    assert all(torch.equal(row, visited[9]) for row in visited[10:])
