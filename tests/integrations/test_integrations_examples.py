"""Integration examples change one import, and resume after a kill with the losses of an uninterrupted run."""

import contextlib
import difflib
import io
import os
import re
import runpy
import subprocess
import sys
import time
import warnings
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
import transformers.trainer  # noqa: F401  # the ranks are forked from a server that imports what is imported here
from transformers import AutoModelForCausalLM

from fullshard.integrations.accelerate import plugin_from_config_file
from fullshard.testing import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
CONFIGURATION = EXAMPLES / "accelerate" / "fsdp.yaml"
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGURATION)]
STEPS = 24
SMALL = ["--width", "64", "--layers", "2", "--steps", str(STEPS)]


@pytest.mark.parametrize("name", ["transformers", "accelerate"])
def test_example_diff_changes_one_import(name):
    before, after = ((EXAMPLES / name / file).read_text().splitlines(True) for file in ("before.py", "after.py"))
    diff = (EXAMPLES / name / "change.diff").read_text()
    assert "".join(difflib.unified_diff(before, after, "before.py", "after.py")) == diff
    (added,) = re.findall(r"^\+[^+].*", diff, re.MULTILINE)
    assert added.startswith(f"+from fullshard.integrations.{name} import ")
    assert len(re.findall(r"^-[^-]", diff, re.MULTILINE)) == 1


@pytest.mark.parametrize("name", ["ray", "torchft"])
def test_change_diff_matches_the_example_files(name):
    before, after = ((EXAMPLES / name / file).read_text().splitlines(True) for file in ("before.py", "digits.py"))
    diff = (EXAMPLES / name / "change.diff").read_text()
    assert "".join(difflib.unified_diff(before, after, "before.py", "digits.py")) == diff
    assert f"+from fullshard.integrations.{name} import " in diff


def test_accelerate_example_configuration_is_read():
    plugin = plugin_from_config_file(CONFIGURATION)
    assert plugin.strategy == "zero3"
    assert plugin.transformer_layer_cls_to_wrap == ("LlamaDecoderLayer",)


def run_here(script: Path, *options: str) -> str:
    """Run a script on a rank without a launcher, and return its output."""
    sys.argv = [str(script), *options]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as printed:
        warnings.simplefilter("ignore")
        runpy.run_path(str(script), run_name="__main__")
        if dist.is_initialized():
            dist.destroy_process_group()
    return printed.getvalue()


def losses(printed: str) -> list[str]:
    return re.findall(r"'loss': '([\d.]+)'|: loss ([\d.]+)", printed)


def killed_once(command: list[str], there: Path) -> dict[str, str]:
    """Start a run, kill all of its processes as soon as `there` exists, and return the settings of its ranks.

    These are the environment variables that `accelerate launch` sets.
    """
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(7500):
            if there.exists() or process.poll() is not None:
                break
            time.sleep(0.02)
        assert process.poll() is None, "it ended before it could be killed"
        environments = [child.environ() for child in psutil.Process(process.pid).children(recursive=True)]
        of_rank = next(environ for environ in environments if "RANK" in environ)
        return {name: value for name, value in of_rank.items() if name.startswith(("ACCELERATE_", "FSDP_"))}
    finally:  # torchrun gives each rank a separate session
        started = [*psutil.Process(process.pid).children(recursive=True), process]
        for one in started:
            one.kill()
        psutil.wait_procs(started[:-1])
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_transformers_example_matches_ddp_and_resumes_after_a_kill(tmp_path, monkeypatch):
    """The killed run uses torchrun. The ranks of the other runs are forked without a launcher, after the imports."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    own, plain = (EXAMPLES / "transformers" / name for name in ("after.py", "before.py"))
    expected, _ = run_ranks(2, run_here, plain, "--output_dir", str(tmp_path / "ddp"), *SMALL)
    whole, _ = run_ranks(2, run_here, own, "--output_dir", str(tmp_path / "whole"), *SMALL)
    assert losses(whole) == losses(expected)
    assert len(losses(whole)) == STEPS
    killed = tmp_path / "killed"
    command = [*TORCHRUN, str(own), "--output_dir", str(killed), *SMALL]
    killed_once(command, killed / "checkpoint-6" / "trainer_state.json")
    resumed, _ = run_ranks(2, run_here, own, "--output_dir", str(killed), *SMALL, "--resume")
    assert len(losses(resumed)) in range(3, STEPS - 5, 3)
    assert losses(resumed) == losses(whole)[-len(losses(resumed)) :]
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "whole", killed)]
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_accelerate_example_matches_ddp_and_resumes_after_a_kill(tmp_path, monkeypatch):
    """The killed run uses accelerate's launcher. The other runs set its variables and fork ranks after the imports."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    plain, own = (EXAMPLES / "accelerate" / name for name in ("before.py", "after.py"))
    with monkeypatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        expected, _ = run_ranks(2, run_here, plain, "--output_dir", str(tmp_path / "ddp"), *SMALL)
    killed = tmp_path / "killed"
    by_launcher = killed_once([*LAUNCH, str(own), "--output_dir", str(killed), *SMALL], killed / "step_9")
    assert by_launcher["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "LlamaDecoderLayer"
    for name, value in by_launcher.items():
        monkeypatch.setenv(name, value)
    whole, _ = run_ranks(2, run_here, own, "--output_dir", str(tmp_path / "whole"), *SMALL)
    rounded = [[round(float(loss), 3) for _, loss in losses(printed)] for printed in (expected, whole)]
    assert rounded[0] == rounded[1]
    assert len(rounded[0]) == STEPS
    resuming = ("--resume_from_checkpoint", str(killed / "step_6"))
    resumed, _ = run_ranks(2, run_here, own, "--output_dir", str(killed), *SMALL, *resuming)
    assert losses(resumed) == losses(whole)[6:]
