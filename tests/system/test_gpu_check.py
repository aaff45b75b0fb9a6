"""`make gpu-check` without a GPU: each part is reported separately, however other parts end."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import FAILS, HANGS, HOLDS, LEFT_OUT, Part, check, outcomes_in, parts, verdict_of

SCRIPT = gpu_check.__file__


def saying(code: str) -> tuple[str, str]:
    return "-c", f"print('before', flush=True); {code}"


PLANTED = [
    Part("hangs", "it ends", saying("import time; time.sleep(600)"), 2),
    Part("fails", "it works", saying("raise SystemExit('a planted error')"), 30),
    Part("is wrong", "it is right", saying('print(\'{"holds": false, "said": "twice as much"}\')'), 30),
    Part("holds", "it holds", saying("print('{\"number\": 3}'); print('and more')"), 30),
]


@pytest.mark.slow
def test_failed_and_hanging_parts_are_reported_and_other_parts_run(tmp_path):
    stated: list[str] = []
    found = check(PLANTED, tmp_path / "found.json", stated.append)
    assert {name: each["verdict"] for name, each in found.items()} == {
        "hangs": HANGS,
        "fails": FAILS,
        "is wrong": FAILS,
        "holds": HOLDS,
    }
    assert json.loads((tmp_path / "found.json").read_text()) == found
    assert found["hangs"]["seconds"] < 10
    assert found["hangs"]["tail"] == "before\n"
    assert "a planted error" in found["fails"]["tail"]
    assert found["holds"]["numbers"] == {"number": 3}
    assert found["holds"]["tail"] == ""
    assert "twice as much" in stated[2]


@pytest.mark.slow
def test_child_processes_of_timed_out_part_are_killed(tmp_path):
    """A hanging rank would otherwise keep the GPU."""
    kept = tmp_path / "child"
    child = f"import time; time.sleep(3); open({str(kept)!r}, 'w')"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
    while_it_would = Part("waits", "", saying("import time; time.sleep(3)"), 30)
    found = check([Part("hangs", "", saying(code), 1), while_it_would], tmp_path / "found.json", print)
    assert found["hangs"]["verdict"] == HANGS
    assert not kept.exists()


def test_part_is_skipped_when_no_time_is_left(tmp_path):
    found = check(PLANTED[1:2], tmp_path / "found.json", print, seconds=1)
    assert found["fails"]["verdict"] == LEFT_OUT


def test_part_time_limits_sum_to_about_ten_minutes():
    """Limits are those of one GPU: parts for several GPUs are skipped within seconds."""
    assert sum(part.limit_s for part in parts(dry=False) if part.name != "several GPUs") < 620


def test_outcomes_before_hang_are_reported():
    stated = (
        "tests/engine/test_gpu.py::test_a[late streams] PASSED    [ 10%]\n"
        "tests/engine/test_gpu.py::test_b FAILED [ 20%]\n"
        "tests/engine/test_gpu.py::test_c \n"
    )
    assert outcomes_in(stated) == {"test_a[late streams]": "PASSED", "test_b": "FAILED"}
    assert verdict_of(None, outcomes_in(stated), is_test=True) == HANGS
    assert verdict_of(0, {"test_a": "SKIPPED"}, is_test=True) == LEFT_OUT
    assert verdict_of(1, {"test_a": "PASSED"}, is_test=True) == FAILS


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_gpu_check_without_gpu_prints_one_line():
    ran = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1 and "--dry" in ran.stderr


def test_gpu_check_names_missing_packages(monkeypatch):
    monkeypatch.setattr(gpu_check, "NEEDS", ("torch", "no_such_package"))
    assert gpu_check.missing() == ["no_such_package"]


@pytest.mark.slow
def test_gpu_check_tests_import_only_declared_packages():
    """A rented machine has few packages; torch itself needs jinja2."""
    requirements = tomllib.loads((gpu_check.ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    missing = {re.split(r"[><=]", name)[0].replace("-", "_") for name in requirements} - {*gpu_check.NEEDS, "jinja2"}
    assert "tyro" in missing
    files = [word for part in parts(dry=False) for word in part.command if word.startswith("tests/")]
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({sorted(missing | {'yaml'})}))\n"
        f"import pytest; sys.exit(pytest.main(['--noconftest', '-p', 'no:cacheprovider', '--collect-only', *{files}]))"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=gpu_check.ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_dry_gpu_check_writes_facts_and_prediction(tmp_path):
    path = tmp_path / "found.json"
    chosen = "facts,prediction"
    ran = subprocess.run(
        [sys.executable, SCRIPT, "--dry", "--parts", chosen, "--json", str(path)], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout
    found = json.loads(path.read_text())
    assert found["facts"]["numbers"]["torch"] == torch.__version__
    alone, of_eight = (found["prediction"]["numbers"]["predicted"][world] for world in ("1", "8"))
    assert alone["peak_bytes"] > of_eight["peak_bytes"] > 0
    assert alone["collectives"] and alone["operations"]
    assert Path(SCRIPT).name in ran.args[1]
