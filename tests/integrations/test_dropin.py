"""FSDP scripts from other authors train after changing only their imports."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.testing import run_ranks

SCRIPTS = {path.stem: path for path in sorted((Path(__file__).parents[1] / "dropin").glob("*.py"))}
# torch's FSDP1 requires an accelerator, so its scripts are not compared with torch here.
WITH_A_PEER = [name for name in SCRIPTS if name.startswith("fully_shard")]
REPEATING = {  # covered by other scripts and tests, too
    *("fully_shard_layers", "fully_shard_checkpointed", "fully_shard_meta"),
    *("fsdp_manual_wrap", "fsdp_mixed_units", "fsdp_meta_device", "fsdp_hybrid", "fsdp_cnn_size_based"),
}
IMPORT = re.compile(r"^from torch\.distributed\.fsdp(\.\w+)? import", re.MULTILINE)


def marked(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow) if name in REPEATING else name


def moved(text: str) -> str:
    """Return the script with its imports changed, as a user would by a stream editor."""
    return IMPORT.sub(lambda match: f"from fullshard{'.wrap' if match[1] == '.wrap' else ''} import", text)


def run_script(text: str, name: str, folder: str, ignores_warnings: bool) -> list[float]:
    # torch's message about every random initialization of a DTensor that is not on a GPU.
    warnings.filterwarnings("ignore", message="DTensor random operators")
    if ignores_warnings:
        warnings.simplefilter("ignore")
    scope = {"__name__": name}
    exec(compile(text, f"{name}.py", "exec"), scope)
    return scope["main"](folder)


def losses_of(name: str, folder: Path, *, peer: bool = False) -> list[torch.Tensor]:
    text = SCRIPTS[name].read_text()
    ranks = run_ranks(2, run_script, text if peer else moved(text), name, str(folder), peer)
    return [torch.tensor(losses) for losses in ranks]


def assert_learnt(losses: torch.Tensor) -> None:
    quarter = len(losses) // 4 or 1
    assert losses[-quarter:].mean() < 0.8 * losses[:quarter].mean()


@pytest.mark.parametrize("name", [marked(name) for name in SCRIPTS if name not in WITH_A_PEER])
def test_script_trains_after_changing_only_its_imports(name, tmp_path):
    for losses in losses_of(name, tmp_path):
        assert_learnt(losses)


@pytest.mark.slow
@pytest.mark.parametrize("name", [marked(name) for name in WITH_A_PEER])
def test_script_with_changed_imports_matches_losses_of_fsdp2(name, tmp_path):
    own, others = tmp_path / "ours", tmp_path / "theirs"
    own.mkdir()
    others.mkdir()
    for actual, expected in zip(losses_of(name, own), losses_of(name, others, peer=True), strict=True):
        assert_learnt(actual)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
