"""Scripts of other libraries with one changed line: the diff is as documented, and a stopped run resumes."""

import contextlib
import difflib
import io
import os
import re
import runpy
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import lightning.pytorch  # noqa: F401  # the ranks are forked from a server that imports what is imported here
import pytest
import torch.distributed as dist

import fullshard
from fullshard.testing import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
OPTIONS = {
    "deepspeed": ("--deepspeed_config", str(EXAMPLES / "deepspeed" / "ds_config.json")),
    "lightning": ("--folder",),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_documented_diff_matches_the_changed_scripts(name):
    before, after = ((EXAMPLES / name / file).read_text().splitlines(True) for file in ("before.py", "after.py"))
    diff = (EXAMPLES / name / "change.diff").read_text()
    assert "".join(difflib.unified_diff(before, after, "before.py", "after.py")) == diff
    assert len(re.findall(r"^\+[^+]", diff, re.MULTILINE)) <= 2


def run(name: str, *options: str) -> list[str]:
    """Return the lines with losses that a rank prints."""
    sys.argv = ["after.py", *options]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as printed:
        warnings.filterwarnings("ignore", module="lightning")
        warnings.filterwarnings("ignore", category=FutureWarning)
        runpy.run_path(str(EXAMPLES / name / "after.py"), run_name="__main__")
        if dist.is_initialized():
            dist.destroy_process_group()
    return [line for line in printed.getvalue().splitlines() if "loss" in line]


def losses(lines: list[str]) -> list[float]:
    return [float(line.split()[-1]) for line in lines]


@pytest.mark.slow
def test_deepspeed_example_resumes_with_the_same_losses(tmp_path):
    given = OPTIONS["deepspeed"]
    saving = ("--save_dir", str(tmp_path), "--save_interval", "2")
    whole, _ = run_ranks(2, run, "deepspeed", *given, "--steps", "8")
    before, _ = run_ranks(2, run, "deepspeed", *given, "--steps", "5", *saving)
    after, others = run_ranks(2, run, "deepspeed", *given, "--steps", "8", *saving)
    assert before == whole[:10]
    assert after == whole[8:]  # after the fourth step, the last saved one
    assert len(whole) == 16
    assert others == []
    assert sum(losses(whole)[-4:]) < 0.9 * sum(losses(whole)[:4])


@pytest.mark.slow
def test_lightning_example_resumes_with_the_same_losses(tmp_path):
    whole, _ = run_ranks(2, run, "lightning", "--epochs", "2", "--folder", str(tmp_path / "whole"))
    before, _ = run_ranks(2, run, "lightning", "--epochs", "1", "--folder", str(tmp_path / "parts"))
    after, others = run_ranks(2, run, "lightning", "--epochs", "2", "--folder", str(tmp_path / "parts"))
    assert before + after == whole
    assert len(whole) == 20
    assert others == []
    assert sum(losses(whole)[-4:]) < 0.8 * sum(losses(whole)[:4])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "folder", "last"),
    [
        ("deepspeed", (*OPTIONS["deepspeed"], "--steps", "12"), "--save_dir", "microbatch 15"),
        ("lightning", ("--epochs", "2"), "--folder", "epoch 1, batch 3"),
    ],
)
def test_killed_example_resumes_with_the_same_losses(tmp_path, name, options, folder, last):
    """The killed run uses torchrun. The other two runs fork ranks without a launcher, after the imports."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(EXAMPLES / name / "after.py"), *options, folder, str(tmp_path / "killed")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(fullshard.__file__).parent.parent)}
    whole, _ = run_ranks(2, run, name, *options, folder, str(tmp_path / "whole"))
    lines = []
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        for line in process.stdout:
            lines.append(line.strip())
            if line.startswith(last):
                os.killpg(process.pid, signal.SIGKILL)
                break
    found = [line for line in lines if "loss" in line]
    assert found == whole[: len(found)]
    again, _ = run_ranks(2, run, name, *options, folder, str(tmp_path / "killed"))
    assert again == whole[-len(again) :]
    assert len(found) + len(again) >= len(whole)
