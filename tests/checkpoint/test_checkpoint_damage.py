"""Damaged, moved or foreign checkpoints are never loaded, and loaded data is never executed."""

from __future__ import annotations

import logging
import os
import pickle
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from run_states import Position
from shared_ranks import on_new_ranks, same_on_all_ranks
from small_models import Chain, Layer, chain, inputs, sgd, whole
from torch import Tensor, nn

from fullshard import CheckpointError, fully_shard
from fullshard.checkpoint import load, save
from fullshard.checkpoint.manifest import Manifest, StoredFile
from fullshard.testing import assert_same, run_ranks

STEPS = (10, 20)
SENTINEL = 7.25


def write_steps(folder: Path) -> None:
    model = chain(fully_shard, Chain([Layer(), Layer()]))
    optimizer = sgd(model)
    for step in STEPS:
        model(inputs(step)).sum().backward()
        optimizer.step()
        save(folder, model=model, optimizer=optimizer, step=step)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints written by two ranks. Tests must not modify it."""
    folder = tmp_path_factory.mktemp("written")
    run_ranks(2, write_steps, folder)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy of `written` that tests may damage."""
    return shutil.copytree(written, tmp_path / "copy")


def marked() -> Chain:
    """Return an unsharded model with none of the saved values."""
    model = Chain([Layer(), Layer()])
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(SENTINEL)
    return model


def loaded(checkpoint: Path) -> dict[str, Tensor]:
    """Return the parameters and the momentum of a checkpoint."""
    model = marked()
    optimizer = sgd(model)
    load(checkpoint, model=model, optimizer=optimizer, random_states=False)
    momentum = {f"{name}'s": optimizer.state[param]["momentum_buffer"] for name, param in model.named_parameters()}
    return {**model.state_dict(), **momentum}


def refusal(checkpoint: Path) -> str:
    """Return the error of loading, after checking that nothing was overwritten."""
    model = marked()
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint, model=model)
    assert all((param == SENTINEL).all() for param in model.parameters())
    return str(caught.value)


def of_step(folder: Path, step: int) -> Path:
    return folder / f"step-{step:09d}"


# -- fuzz -------------------------------------------------------------------------------------------------------------


def flip(data: bytearray, draw: random.Random) -> bytes:
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(data)


def overwrite(data: bytearray, draw: random.Random) -> bytes:
    start = draw.randrange(len(data))
    stop = min(len(data), start + draw.randrange(1, 5000))
    data[start:stop] = draw.randbytes(stop - start)
    return bytes(data)


def cut(data: bytearray, draw: random.Random) -> bytes:
    return bytes(data[: draw.randrange(len(data))])


def grow(data: bytearray, draw: random.Random) -> bytes:
    return bytes(data) + draw.randbytes(draw.randrange(1, 100))


def repeat(data: bytearray, draw: random.Random) -> bytes:
    """Simulate a write at the wrong offset."""
    start = draw.randrange(len(data))
    moved = data[start : start + 512]
    place = draw.randrange(len(data))
    data[place : place + len(moved)] = moved
    return bytes(data)


DAMAGES = (flip, overwrite, cut, grow, repeat)


def fuzz(folder: Path, cases: int, seed: int) -> int:
    """Return how many of the cases were rejected. The others were loaded exactly."""
    draw = random.Random(seed)
    checkpoint, other = of_step(folder, 20), of_step(folder, 10)
    expected = loaded(checkpoint)
    files = sorted(checkpoint.iterdir())
    refused = 0
    for case in range(cases):
        path = draw.choice(files)
        data = path.read_bytes()
        kind = draw.choice([*DAMAGES, None, "swap"])
        if kind is None:
            path.unlink()
        elif kind == "swap":
            shutil.copy(draw.choice([other / path.name, draw.choice(files)]), path.with_name("swapped"))
            path.with_name("swapped").rename(path)
        else:
            path.write_bytes(kind(bytearray(data), draw))
        try:
            assert_same(loaded(checkpoint), expected, name=f"case {case}: {kind} of {path.name}")
        except CheckpointError as error:
            refused += 1
            assert re.search(rf"{re.escape(str(checkpoint))}/\S+: expected .*, found ", str(error)), error
        path.write_bytes(data)
    return refused


def test_damaged_checkpoint_raises_or_loads_exactly(folder):
    assert fuzz(folder, cases=60, seed=0) > 50


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_damaged_checkpoint_raises_or_loads_exactly_in_1000_cases(folder):
    assert fuzz(folder, cases=1000, seed=1) > 900


# -- error messages ---------------------------------------------------------------------------------------------------


def test_flipped_byte_error_names_file_and_checksums(folder):
    path = of_step(folder, 20) / "__1_0.distcp"
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    expected = Manifest.read(path.parent).files[path.name].checksum
    stated = refusal(path.parent)
    assert re.search(
        rf"loading \S+: {re.escape(str(path))}: expected the checksum {expected}, found [0-9a-f]{{32}}", stated
    )


def test_truncated_file_error_names_file_and_sizes(folder):
    path = of_step(folder, 20) / "__0_0.distcp"
    size = path.stat().st_size
    os.truncate(path, size - 3)
    assert f"{path}: expected {size} bytes, found {size - 3}" in refusal(path.parent)


def test_missing_file_error_counts_other_damaged_files(folder):
    (of_step(folder, 20) / "__0_0.distcp").unlink()
    (of_step(folder, 20) / ".metadata").unlink()
    stated = refusal(of_step(folder, 20))
    assert "found a file that cannot be read (No such file or directory) (1 more files are damaged)" in stated


def test_load_rejects_checkpoint_renamed_to_another_step(folder):
    shutil.rmtree(of_step(folder, 20))
    of_step(folder, 10).rename(of_step(folder, 20))
    assert "expected the manifest of step 20, found that of step 10" in refusal(of_step(folder, 20))


def test_load_accepts_checkpoint_copied_to_a_custom_name(folder, tmp_path):
    copied = shutil.copytree(of_step(folder, 10), tmp_path / "best")
    assert_same(loaded(copied), loaded(of_step(folder, 10)))


@pytest.mark.parametrize("name", ["step-000000020", "best"])
def test_load_rejects_checkpoint_without_manifest(folder, name):
    checkpoint = of_step(folder, 20).rename(folder / name)
    (checkpoint / "manifest.json").unlink()
    assert "manifest.json: expected the manifest of a complete checkpoint, found none" in refusal(checkpoint)


def test_load_rejects_edited_manifest(folder):
    path = of_step(folder, 20) / "manifest.json"
    path.write_text(path.read_text().replace('"world": 2', '"world": 3'))
    assert re.search(r"manifest.json: expected the checksum [0-9a-f]{32}, found [0-9a-f]{32}", refusal(path.parent))


def test_load_rejects_manifest_of_another_format(folder, monkeypatch):
    checkpoint = of_step(folder, 20)
    manifest = Manifest.read(checkpoint)
    monkeypatch.setattr("fullshard.checkpoint.manifest.FORMAT", 2)
    newer = manifest.dumps()
    monkeypatch.undo()
    (checkpoint / "manifest.json").write_text(newer)
    assert "expected a manifest of format 1, found one of a different version" in refusal(checkpoint)


def test_load_from_folder_without_checkpoints_raises(tmp_path):
    assert "found no complete checkpoint there" in refusal(tmp_path / "nowhere")


# -- fallback ---------------------------------------------------------------------------------------------------------


def load_on_ranks(folder: Path) -> tuple[int, list[str], dict[str, Tensor]]:
    """Return the step that was loaded, what was logged, and the parameters."""
    stated: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            stated.append(record.getMessage())

    logging.getLogger("fullshard").addHandler(Listener())
    model = chain(fully_shard, Chain([Layer(), Layer()]))
    restored = load(folder, model=model)
    return restored.step, stated, {name: whole(param) for name, param in model.named_parameters()}


def test_load_falls_back_to_newest_intact_checkpoint_and_warns(folder):
    path = of_step(folder, 20) / "__1_0.distcp"
    os.truncate(path, 100)
    expected = {name: value for name, value in loaded(of_step(folder, 10)).items() if "'" not in name}
    first, second = run_ranks(2, load_on_ranks, folder)
    assert first[0] == second[0] == 10
    assert second[1] == []
    (warning,) = first[1]
    assert f"{path}: expected " in warning
    assert "Falling back to the previous checkpoint" in warning
    assert_same([first[2], second[2]], [expected, expected])


def test_load_error_names_every_damaged_checkpoint(folder):
    for step in STEPS:
        (of_step(folder, step) / ".metadata").unlink()
    stated = refusal(folder)
    assert "none of its 2 checkpoints is intact" in stated
    assert all(f"{of_step(folder, step)}/.metadata: expected" in stated for step in STEPS)


# -- another model ----------------------------------------------------------------------------------------------------


class Other(nn.Module):
    """`Chain` with one additional parameter, one missing parameter, and a head of a different shape."""

    def __init__(self, head: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.layers[1].norm.bias = None
        self.layers[0].gate = nn.Parameter(torch.zeros(3))
        self.head = nn.Linear(48, head)


@on_new_ranks(2)
def test_load_into_another_model_raises_all_fqns_on_every_rank(written):
    model = fully_shard(Other(head=4))
    optimizer = torch.optim.SGD(model.parameters())
    before = {name: whole(param) for name, param in model.named_parameters()}
    with pytest.raises(CheckpointError) as caught:
        load(of_step(written, 20), model=model, optimizer=optimizer)
    assert_same({name: whole(param) for name, param in model.named_parameters()}, before)
    assert not optimizer.state
    first = same_on_all_ranks(str(caught.value))
    missing, unexpected, misshapen = re.search(
        r"missing in it: (.*); unexpected in it: (.*); of a different shape: (.*)\. Nothing was overwritten", first
    ).groups()
    assert missing == "layers.0.gate, layers.0.gate in the optimizer"
    assert unexpected == "layers.1.norm.bias, layers.1.norm.bias in the optimizer"
    assert misshapen == ("head.weight ((5, 48) in it, (4, 48) in the model), head.bias ((5,) in it, (4,) in the model)")


@on_new_ranks(2)
def test_mismatch_on_one_rank_raises_on_every_rank(written):
    """Only one rank requests a scheduler, which the checkpoint does not have."""
    model = marked()
    scheduler = torch.optim.lr_scheduler.StepLR(sgd(model), 1) if torch.distributed.get_rank() else None
    with pytest.raises(CheckpointError) as caught:
        load(of_step(written, 20), model=model, scheduler=scheduler)
    assert all((param == SENTINEL).all() for param in model.parameters())
    first = same_on_all_ranks(str(caught.value))
    assert "rank 1: the checkpoint does not fit; it has no scheduler" in first


def test_load_rejects_optimizer_state_of_another_shape(written):
    model = marked()
    optimizer = sgd(model)
    model(inputs()).sum().backward()
    optimizer.step()
    optimizer.state[model.head.bias]["momentum_buffer"] = torch.zeros(9)
    with pytest.raises(
        CheckpointError, match=r"'momentum_buffer' of head.bias in the optimizer \(\(5,\) in it, \(9,\)"
    ):
        load(of_step(written, 20), model=model, optimizer=optimizer)


def test_load_error_counts_many_mismatches(written):
    with pytest.raises(CheckpointError, match=r"missing in it: (0\.\S+, ){19}0\.\S+ and 4 more"):
        load(of_step(written, 20), model=nn.Sequential(nn.Sequential(*[nn.Linear(2, 2) for _ in range(12)])))


# -- nothing is executed ----------------------------------------------------------------------------------------------


class Evil:
    """Runs code when pickle loads it."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.proof),)


def forge(checkpoint: Path, name: str, data: bytes) -> None:
    """Change a file and its checksum in the manifest, as an attacker could."""
    from xxhash import xxh3_128

    (checkpoint / name).write_bytes(data)
    manifest = Manifest.read(checkpoint)
    files = {**manifest.files, name: StoredFile(len(data), xxh3_128(data).hexdigest())}
    forged = Manifest(**{**vars(manifest), "files": files})
    (checkpoint / "manifest.json").write_text(forged.dumps())


def test_metadata_that_runs_code_is_rejected_despite_valid_checksum(folder, tmp_path):
    proof = tmp_path / "proof"
    forge(of_step(folder, 20), ".metadata", pickle.dumps(Evil(proof)))
    stated = refusal(of_step(folder, 20))
    assert "it names posix.mkdir, which no checkpoint needs" in stated
    assert not proof.exists()


def test_metadata_with_paths_outside_the_folder_is_rejected(folder):
    checkpoint = of_step(folder, 20)
    data = (checkpoint / ".metadata").read_bytes()
    forge(checkpoint, ".metadata", data.replace(b"__1_0.distcp", b"/etc/passwd0"))
    assert "it refers to '/etc/passwd0', which is not in the checkpoint's folder" in refusal(checkpoint)


@pytest.mark.parametrize("data", [b"", b"no pickle", pickle.dumps([1, 2])])
def test_invalid_metadata_is_rejected(folder, data):
    forge(of_step(folder, 20), ".metadata", data)
    assert "expected the metadata of a checkpoint, found something else" in refusal(of_step(folder, 20))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stored_value_that_runs_code_is_rejected(tmp_path):
    """The checkpoint is written by torch.distributed.checkpoint, which can store such a value."""
    model, proof = marked(), tmp_path / "proof"
    groups = [{"lr": Evil(proof), "params": [name for name, _ in model.named_parameters()]}]
    state = {"model": model.state_dict(), "optim": {"state": {}, "param_groups": groups}}
    dcp.save(state, checkpoint_id=tmp_path / "theirs")
    proof.rmdir() if proof.exists() else None
    with pytest.raises(CheckpointError, match=r"posix\.mkdir"):
        load(tmp_path / "theirs", model=model, optimizer=sgd(model))
    assert not proof.exists()


@pytest.mark.parametrize(
    ("what", "stated"),
    [
        (
            {"extra": {"a": [1, {"b": Path("x")}]}},
            r"the checkpoint's \['extra'\]\['a'\]\[1\]\['b'\] is a pathlib[.a-z_]*.PosixPath",
        ),
        (
            {"data": Position({"sampler": random.Random(1)})},
            r"the checkpoint's \['data'\]\['sampler'\] is a random.Random",
        ),
        ({"scheduler": Position({"rule": Evil})}, r"\['scheduler'\]\['rule'\] is a "),
    ],
    ids=["extra", "data", "scheduler"],
)
def test_save_rejects_values_that_load_cannot_read(what, stated, tmp_path):
    with pytest.raises(CheckpointError, match=stated):
        save(tmp_path, model=marked(), step=1, **what)
    assert list(tmp_path.iterdir()) == []
