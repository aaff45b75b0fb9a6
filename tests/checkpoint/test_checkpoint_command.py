"""`fullshard checkpoint` reports what was saved. It detects damage and differences, also in its exit code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from safetensors.torch import load_file, save_file
from small_models import batch, loss_of, shard, small_gpt, wholes
from torch import Tensor, nn

from fullshard.checkpoint import export_safetensors, save
from fullshard.checkpoint.exporting import export_stored
from fullshard.checkpoint.stored import open_stored
from fullshard.cli import main
from fullshard.cli.checkpoint import display
from fullshard.cli.checkpoint.display import SlowBar
from fullshard.plan.ledger import peak_during
from fullshard.testing import assert_same, run_ranks

STEPS = (10, 20)


def write(folder: Path) -> None:
    """Save two steps of a run with tied, frozen, scalar and empty parameters, and export the last step."""
    model = shard(small_gpt(1), strategy="zero3")
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    for step in STEPS:
        loss_of(model, batch(step, sequences=2)).backward()
        optimizer.step()
        save(folder / "run", model=model, optimizer=optimizer, step=step)
    export_safetensors(model, folder / "exported")
    whole = wholes(model)
    torch.save(whole, folder / "whole.pt")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with saved and exported files. Tests must not modify it."""
    folder = tmp_path_factory.mktemp("written")
    run_ranks(2, write, folder)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy that tests may damage."""
    return shutil.copytree(written, tmp_path / "copy")


class Command:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def text(self, *argv: object, code: int = 0) -> str:
        """Return the printed output, including errors."""
        assert main(["checkpoint", *map(str, argv)]) == code
        reported = self._capsys.readouterr()
        assert "Traceback" not in reported.err
        return reported.out + reported.err

    def json(self, *argv: object, code: int = 0) -> Any:
        return json.loads(self.text(*argv, "--json", code=code))


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def flip(path: Path, place: int = 2000) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


# -- ls ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ls_lists_all_checkpoints_newest_first(command, folder):
    run = folder / "run"
    (run / "step-000000030.partial-00ff").mkdir()
    (run / "step-000000010" / "__1_0.distcp").unlink()
    reported = command.json("ls", run)
    assert [
        (item["name"], item["step"], item["world"], item["strategy"], item["intact"])
        for item in reported["checkpoints"]
    ] == [
        ("step-000000020", 20, 2, "zero3", True),
        ("step-000000010", 10, 2, "zero3", False),
    ]
    files = [path for path in (run / "step-000000020").iterdir() if path.name != "manifest.json"]
    assert reported["checkpoints"][0]["bytes"] == sum(path.stat().st_size for path in files)
    assert reported["unfinished"] == ["step-000000030.partial-00ff"]
    [newest, other, left, damage] = command.text("ls", run).splitlines()[1:5]
    assert newest.split()[:4] == ["step-000000020", "20", "2", "zero3"]
    assert [line.split()[-1] for line in (newest, other, left)] == ["complete", "damaged", "unfinished"]
    assert "step-000000010/__1_0.distcp: expected" in damage
    [one] = command.json("ls", run / "step-000000020")["checkpoints"]
    assert one["step"] == 20


def test_ls_lists_folder_named_like_a_checkpoint(command, tmp_path):
    save(tmp_path / "step-100", model=nn.Linear(2, 2), step=5)
    assert [item["name"] for item in command.json("ls", tmp_path / "step-100")["checkpoints"]] == ["step-000000005"]


def test_ls_handles_empty_folder_and_damaged_manifest(command, folder, tmp_path):
    assert "No checkpoints found" in command.text("ls", tmp_path)
    flip(folder / "run" / "step-000000020" / "manifest.json", 150)
    reported = command.json("ls", folder / "run")["checkpoints"]
    assert [(item["step"], item["world"], item["intact"]) for item in reported] == [(20, None, False), (10, 2, True)]
    assert "?" in command.text("ls", folder / "run")


# -- inspect ----------------------------------------------------------------------------------------------------------


def test_inspect_reports_every_tensor(command, written):
    whole = torch.load(written / "whole.pt")
    reported = command.json("inspect", written / "run")
    assert (reported["path"], reported["step"], reported["world"]) == (str(written / "run" / "step-000000020"), 20, 2)
    assert "torch" in reported["versions"]
    rows = {item["name"]: item for item in reported["tensors"] if item["section"] == "model"}
    assert set(rows) == set(whole)
    for name, tensor in whole.items():
        assert (rows[name]["shape"], rows[name]["dtype"]) == (list(tensor.shape), str(tensor.dtype)[6:])
        tied = name == "head.weight"
        assert rows[name]["bytes"] == (0 if tied else tensor.nbytes)
        assert rows[name]["tied_to"] == ("embedding.weight" if tied else None)
    states = {item["name"] for item in reported["tensors"] if item["section"] == "other"}
    assert {"optimizer.state.scale.exp_avg", "optimizer.state.embedding.weight.step"} <= states
    text = command.text("inspect", written / "run" / "step-000000020")
    assert "= embedding.weight" in text
    assert "strategy: zero3" in text


def test_inspect_reports_tensors_of_export(command, written):
    whole = torch.load(written / "whole.pt")
    for path in (written / "exported", written / "exported" / "model.safetensors"):
        reported = command.json("inspect", path)
        assert {item["name"]: item["shape"] for item in reported["tensors"]} == {
            name: list(item.shape) for name, item in whole.items()
        }
        assert reported["bytes"] == sum(tensor.nbytes for name, tensor in whole.items() if name != "head.weight")


# -- verify -----------------------------------------------------------------------------------------------------------


def test_verify_detects_flipped_byte_in_checkpoint(command, folder):
    assert [item["damage"] for item in command.json("verify", folder / "run")] == [[], []]
    assert "intact (3 files, " in command.text("verify", folder / "run" / "step-000000020")
    assert "intact (1 files, " in command.text("verify", folder / "exported")
    damaged = folder / "run" / "step-000000010" / "__0_0.distcp"
    flip(damaged)
    assert all(item["intact"] for item in command.json("ls", folder / "run")["checkpoints"])  # ls compares sizes only
    reported = command.json("verify", folder / "run", code=1)
    assert [len(item["damage"]) for item in reported] == [0, 1]
    assert f"{damaged}: expected the checksum" in reported[1]["damage"][0]
    command.text("verify", folder / "run" / "step-000000020")
    assert "damaged" in command.text("verify", folder / "run", code=1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: flip(folder / "exported" / "model.safetensors", 4000),
        lambda folder: flip(folder / "exported" / "model.safetensors", 20),
        lambda folder: flip(folder / "exported" / "checksums.json", 3),
    ],
)
def test_verify_detects_damage_in_export(command, folder, damage):
    damage(folder)
    assert "damaged" in command.text("verify", folder / "exported", code=1)


def test_verify_reports_missing_manifest(command, folder):
    (folder / "run" / "step-000000020" / "manifest.json").unlink()
    assert "expected the manifest" in command.text("verify", folder / "run" / "step-000000020", code=1)


def test_verify_fails_without_checksums(command, tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert "checksums.json is missing" in command.text("verify", tmp_path, code=2)
    assert "found nothing to verify" in command.text("verify", tmp_path / "nowhere", code=2)


# -- export -----------------------------------------------------------------------------------------------------------


def test_export_command_writes_checkpoint_as_safetensors(command, written, tmp_path):
    """The export needs no model object. The files equal an export of the model."""
    reported = command.json("export", written / "run", tmp_path / "out")
    assert reported["from"] == str(written / "run" / "step-000000020")
    assert sorted(reported["files"]) == ["checksums.json", "model.safetensors"]
    assert_same(
        load_file(tmp_path / "out" / "model.safetensors"), load_file(written / "exported" / "model.safetensors")
    )
    command.text("verify", tmp_path / "out")
    command.text("diff", tmp_path / "out", written / "run")
    command.text("export", tmp_path / "out", tmp_path / "low", "--dtype", "bfloat16", "--max-shard-size=100KB")
    assert (tmp_path / "low" / "model.safetensors.index.json").exists()
    assert "the folder is not empty" in command.text("export", written / "run", tmp_path / "out", code=2)


def test_export_command_rejects_damaged_checkpoint(command, folder, tmp_path):
    checkpoint = folder / "run" / "step-000000020"
    flip(checkpoint / "__0_0.distcp")
    assert "expected the checksum" in command.text("export", checkpoint, tmp_path / "out", code=2)
    assert not (tmp_path / "out").exists()


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_export_holds_one_tensor_in_memory_at_a_time(tmp_path):
    save(tmp_path / "run", model=Large(), step=1)

    def export() -> None:
        export_stored(open_stored(tmp_path / "run"), tmp_path / "out")

    _, peak = peak_during(export)
    assert peak < 3 * 256 * 256 * 4  # the tensor, and the chunk of it that torch reads


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_export_command_accepts_torch_dcp_checkpoints(command, tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    shapes = {
        "flat": model.state_dict(),
        "sections": {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        "deeper": {"app": {"model": model.state_dict()}},
    }
    for name, state in shapes.items():
        dcp.save(state, checkpoint_id=tmp_path / name, no_dist=True)
        command.text("export", tmp_path / name, tmp_path / f"{name}-out")
        assert_same(load_file(tmp_path / f"{name}-out" / "model.safetensors"), model.state_dict())
    dcp.save({"app": {"net": model.state_dict()}}, checkpoint_id=tmp_path / "none", no_dist=True)
    assert "expected the weights of a model, found none" in command.text(
        "export", tmp_path / "none", tmp_path / "x", code=2
    )


# -- diff -------------------------------------------------------------------------------------------------------------


def test_equal_checkpoints_are_reported_as_equal(command, written):
    step = written / "run" / "step-000000020"
    reported = command.json("diff", step, written / "exported")
    assert reported["equal"]
    assert {item["name"] for item in reported["tensors"]} == set(torch.load(written / "whole.pt"))
    assert all(item["largest_difference"] == 0 for item in reported["tensors"])
    both = command.json("diff", step, written / "run")["tensors"]
    assert "optimizer.state.scale.exp_avg" in {item["name"] for item in both}
    assert f"{len(both)} of {len(both)} tensors are equal" in command.text("diff", step, step)


def test_every_kind_of_difference_is_reported(command, tmp_path):
    nan = float("nan")
    one = {
        "same": torch.tensor([1.0, nan]),
        "value": torch.tensor([1.0, 2.0, -3.0]),
        "sign of zero": torch.tensor([0.0]),
        "nan": torch.tensor([1.0, 2.0]),
        "shape": torch.zeros(2, 3),
        "dtype": torch.tensor([1.0, 2.0]),
        "only one": torch.zeros(1),
        "complex": torch.tensor([1 + 1j]),
        "many": torch.zeros(3_000_000, dtype=torch.uint8),
        "empty": torch.zeros(0, 4),
    }
    other = dict(one)
    other |= {
        "value": torch.tensor([1.0, 2.5, -3.0]),
        "sign of zero": torch.tensor([-0.0]),
        "nan": torch.tensor([nan, 2.0]),
        "shape": torch.zeros(3, 2),
        "dtype": torch.tensor([1.0, 2.25], dtype=torch.bfloat16),
        "complex": torch.tensor([4 + 5j]),
        "many": torch.nn.functional.pad(torch.zeros(2_999_999, dtype=torch.uint8), (0, 1), value=200),
        "only other": torch.zeros(2),
    }
    del other["only one"]
    for name, tensors in (("a", one), ("b", other)):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    reported = command.json("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", code=1)
    found = {item["name"]: (item["differs_in"], item["largest_difference"]) for item in reported["tensors"]}
    assert found == {
        "same": (None, 0),
        "value": ("values", 0.5),
        "sign of zero": ("values", 0),
        "nan": ("values", "nan"),
        "shape": ("shape", None),
        "dtype": ("dtype", 0.25),
        "only one": ("missing in the second", None),
        "only other": ("missing in the first", None),
        "complex": ("values", 5),
        "many": ("values", 200),
        "empty": (None, 0),
    }
    text = command.text("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", code=1)
    assert "2 of 11 tensors are equal, bit for bit." in text
    assert "(2, 3) float32" in text
    assert "same" not in text


def test_diff_reports_changed_tensors_between_two_steps(command, written):
    run = written / "run"
    reported = command.json("diff", run / "step-000000010", run / "step-000000020", code=1)
    odd = {item["name"] for item in reported["tensors"] if item["differs_in"]}
    assert "embedding.weight" in odd
    assert "optimizer.state.embedding.weight.step" in odd
    assert "blocks.0.up.weight" not in odd  # frozen


# -- invalid arguments and output -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["inspct", "x"], "Did you mean inspect?"),
        (["ls"], "FOLDER must be given, but found none"),
        (["diff", "a"], "ONE and OTHER must be given, but found a"),
        (["ls", "a", "b"], "FOLDER must be given, but found a b"),
        (["ls", "no/such/folder"], "the folder does not exist"),
        (["ls", "x", "--jsno"], "Did you mean json?"),
        (["inspect", "no/such/folder"], "found no complete checkpoint"),
        (["inspect", "no.safetensors"], "No such file"),
        (["export", "a", "b", "--dtype", "float8"], "--dtype float8: unknown. Choose one of float32"),
        (["export", "a", "--dtype"], "PATH and OUT must be given, but found a"),
        (["export", "{run}", "b", "--max-shard-size", "5 apples"], "is not a size of a file"),
    ],
)
def test_invalid_arguments_are_reported_in_one_line(command, written, argv, words):
    reported = command.text(*[word.format(run=written / "run") for word in argv], code=2)
    assert words in reported
    assert reported.startswith("fullshard: ")
    assert reported.count("\n") == 1


def test_help_lists_commands_and_options(command, capsys):
    for argv in ([], ["--help"]):
        assert "diff ONE OTHER" in command.text(*argv)
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", "export", "--help"])
    assert ended.value.code == 0
    reported = capsys.readouterr().out
    assert "fullshard checkpoint export PATH OUT" in reported
    assert "--max-shard-size" in reported


def test_progress_bar_appears_after_one_second_only_on_a_terminal(monkeypatch):
    now = 0.0
    monkeypatch.setattr(display, "monotonic", lambda: now)
    for terminal in (True, False):
        monkeypatch.setattr(
            display, "Console", lambda terminal=terminal, **_: Console(force_terminal=terminal, stderr=True)
        )
        with SlowBar() as bar:
            for doing in ("verifying", "exporting"):
                report_progress = bar.reporting(doing)
                report_progress(1, 10)
                assert (bar._bar is not None) == (terminal and now > 1)
                now += 1.5
                report_progress(2, 10)
                assert (bar._bar is not None) == terminal
        assert bar._bar is None
        now = 0.0
