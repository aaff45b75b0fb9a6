"""A clone installs its requirements once, installs no more than needed, and works in any folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKES = ("Makefile", "pyproject.toml", "constraints.txt")

# A stand-in for Python and pip in an environment: prints the packages to install, and fails on request.
STUB = """#!/bin/sh
case "$1 $2" in
    "-m venv") mkdir -p "$3/bin"; for it in python fullshard ruff mypy; do cp "$0" "$3/bin/$it"; done ;;
    "-m pip") echo "$@" >> installed; exit "${FAILS:-0}" ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder for calling make, with files that have old timestamps."""
    for name in MAKES:
        shutil.copy(ROOT / name, tmp_path)
        os.utime(tmp_path / name, (1000, 1000))
    stub = tmp_path / "python"
    stub.write_text(STUB)
    stub.chmod(0o755)
    return tmp_path


def pip_calls(clone: Path, target: str, *options: str, fails: bool = False) -> list[str]:
    """Return the arguments of pip in `make target`."""
    log = clone / "installed"
    log.unlink(missing_ok=True)
    environ = {**os.environ, "FAILS": str(int(fails)), "MAKEFLAGS": ""}
    done = subprocess.run(
        ["make", target, f"PYTHON={clone / 'python'}", *options],
        cwd=clone,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode != 0) == fails, done.stderr
    return log.read_text().splitlines() if log.exists() else []


def installed_by(clone: Path, target: str, *, fails: bool = False) -> list[str]:
    """Return the requirements that `make target` installs."""
    lines = pip_calls(clone, target, fails=fails)
    assert all("-c constraints.txt" in line for line in lines)
    return [line.split("-e ")[1] for line in lines]


@pytest.mark.parametrize(
    ("target", "needs"),
    [("train", "."), ("bench", ".[bench]"), ("test", ".[dev]"), ("lint", ".[dev]"), ("docs", ".[docs]")],
)
def test_make_target_installs_its_requirements_once(clone, target, needs):
    assert installed_by(clone, target) == [needs]
    assert installed_by(clone, target) == []
    assert installed_by(clone, "train") == []


def test_make_installs_only_missing_requirements(clone):
    assert [installed_by(clone, target) for target in ("train", "test", "train", "bench", "test")] == [
        ["."],
        [".[dev]"],
        [],
        [".[bench]"],
        [],
    ]


def test_make_test_torch_installs_in_separate_environment(clone):
    (call,) = pip_calls(clone, "test-torch", "TORCH=2.12.1")
    assert call.endswith("-c .venv-torch-2.12.1/constraints.txt torch==2.12.1 -e .[dev]")
    pinned = (clone / ".venv-torch-2.12.1" / "constraints.txt").read_text()
    constraints = (clone / "constraints.txt").read_text()
    assert pinned == re.sub(r"^(torch|setuptools)==.*\n", "", constraints, flags=re.MULTILINE)
    assert pip_calls(clone, "test-torch", "TORCH=2.12.1") == []
    assert not (clone / ".venv").exists()


@pytest.mark.parametrize("target", ["train", "test"])
def test_make_repeats_failed_installation(clone, target):
    installed_by(clone, target, fails=True)
    assert len(installed_by(clone, target)) == 1


@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt"])
@pytest.mark.parametrize("target", ["train", "test"])
def test_make_reinstalls_after_requirement_files_change(clone, target, changed):
    installed_by(clone, target)
    for stamp in (clone / ".venv").glob(".installed*"):
        os.utime(stamp, (2000, 2000))
    os.utime(clone / changed, (3000, 3000))
    assert len(installed_by(clone, target)) == 1


@pytest.mark.slow
def test_clone_folder_named_like_package_does_not_hide_package(tmp_path):
    """Scripts next to the folder, or Python started there, would find the folder first, as a namespace package."""
    clone, wheels, environment = (tmp_path / name for name in ("fullshard", "wheels", "environment"))
    shutil.copytree(ROOT / "src", clone / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    wheels.mkdir()
    build = f"from setuptools.build_meta import build_editable; build_editable({str(wheels)!r})"  # pip calls it
    subprocess.run([sys.executable, "-c", build], cwd=clone, capture_output=True, check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    paths = {"base": str(environment), "platbase": str(environment)}
    site = Path(sysconfig.get_path("purelib", "venv", paths))
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))  # makes torch and other packages importable
    with zipfile.ZipFile(next(wheels.iterdir())) as wheel:
        wheel.extractall(site)
    (tmp_path / "script.py").write_text(
        "import fullshard; from fullshard import fully_shard; print(fullshard.__file__)"
    )
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    done = subprocess.run(
        [environment / "bin" / "python", "script.py"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == clone / "src" / "fullshard" / "__init__.py"
