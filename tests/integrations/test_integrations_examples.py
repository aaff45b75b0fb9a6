"""The examples of integrations: one changed import each; killed half-way, the losses of a run that never stopped."""

import difflib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from fullshard.integrations.accelerate import plugin_from_config_file

EXAMPLES = Path(__file__).parents[2] / "examples"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
CONFIGURATION = EXAMPLES / "accelerate" / "fsdp.yaml"
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGURATION)]
STEPS = 24
SMALL = ["--width", "64", "--layers", "2", "--steps", str(STEPS)]


@pytest.mark.parametrize("name", ["transformers", "accelerate"])
def test_the_diff_is_one_import(name):
    before, after = ((EXAMPLES / name / file).read_text().splitlines(True) for file in ("before.py", "after.py"))
    diff = (EXAMPLES / name / "change.diff").read_text()
    assert "".join(difflib.unified_diff(before, after, "before.py", "after.py")) == diff
    (added,) = re.findall(r"^\+[^+].*", diff, re.MULTILINE)
    assert added.startswith(f"+from fullshard.integrations.{name} import ")
    assert len(re.findall(r"^-[^-]", diff, re.MULTILINE)) == 1


@pytest.mark.parametrize("name", ["ray", "torchft"])
def test_the_diff_is_that_of_the_files(name):
    before, after = ((EXAMPLES / name / file).read_text().splitlines(True) for file in ("before.py", "digits.py"))
    diff = (EXAMPLES / name / "change.diff").read_text()
    assert "".join(difflib.unified_diff(before, after, "before.py", "digits.py")) == diff
    assert f"+from fullshard.integrations.{name} import " in diff


def test_the_configuration_is_read():
    plugin = plugin_from_config_file(CONFIGURATION)
    assert plugin.strategy == "zero3"
    assert plugin.transformer_layer_cls_to_wrap == ("LlamaDecoderLayer",)


def run(command: list[str], **environment: str) -> str:
    done = subprocess.run(
        command, env={**ENVIRONMENT, **environment}, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def losses(printed: str) -> list[str]:
    return re.findall(r"'loss': '([\d.]+)'|: loss ([\d.]+)", printed)


def killed_once(command: list[str], there: Path) -> None:
    """Start a run, and kill all of its processes as soon as `there` exists."""
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(7500):
            if there.exists() or process.poll() is not None:
                break
            time.sleep(0.02)
        assert process.poll() is None, "it ended before it could be killed"
    finally:  # torchrun gives each rank a separate session
        started = [*psutil.Process(process.pid).children(recursive=True), process]
        for one in started:
            one.kill()
        psutil.wait_procs(started[:-1])
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_trainer_as_ddp_and_after_a_kill(tmp_path):
    own, plain = ([*TORCHRUN, str(EXAMPLES / "transformers" / name)] for name in ("after.py", "before.py"))
    expected = run([*plain, "--output_dir", str(tmp_path / "ddp"), *SMALL])
    whole = run([*own, "--output_dir", str(tmp_path / "whole"), *SMALL])
    assert losses(whole) == losses(expected)
    assert len(losses(whole)) == STEPS
    killed = tmp_path / "killed"
    killed_once([*own, "--output_dir", str(killed), *SMALL], killed / "checkpoint-6" / "trainer_state.json")
    resumed = run([*own, "--output_dir", str(killed), *SMALL, "--resume"])
    assert len(losses(resumed)) in range(3, STEPS - 5, 3)
    assert losses(resumed) == losses(whole)[-len(losses(resumed)) :]
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "whole", killed)]
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_accelerate_as_ddp_and_after_a_kill(tmp_path):
    own = [*LAUNCH, str(EXAMPLES / "accelerate" / "after.py")]
    plain = [*TORCHRUN, str(EXAMPLES / "accelerate" / "before.py")]
    expected = run([*plain, "--output_dir", str(tmp_path / "ddp"), *SMALL], ACCELERATE_USE_CPU="true")
    whole = run([*own, "--output_dir", str(tmp_path / "whole"), *SMALL])
    rounded = [[round(float(loss), 3) for _, loss in losses(printed)] for printed in (expected, whole)]
    assert rounded[0] == rounded[1]
    assert len(rounded[0]) == STEPS
    killed = tmp_path / "killed"
    killed_once([*own, "--output_dir", str(killed), *SMALL], killed / "step_9")
    command = [*own, "--output_dir", str(killed), *SMALL, "--resume_from_checkpoint", str(killed / "step_6")]
    assert losses(run(command)) == losses(whole)[6:]
