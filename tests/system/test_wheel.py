"""The distributions are complete, and the wheel works in an environment with only its declared dependencies.

The environment has links to these packages of the environment that runs the tests, so no network is needed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import fullshard

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TOOLS = {"bench", "dev", "docs"}  # extras that are used in a clone, by make
NOT_NEEDED = {"nvml"}  # without it, reports leave out the counters of GPUs

# Prints the error for each extra in the arguments, and the exit code of a command that needs it.
USE_EXTRAS = """
import contextlib, importlib, io, json, sys, traceback
from fullshard.cli import main
from fullshard.report.destinations import DESTINATIONS
found = {}
for extra in sys.argv[1:]:
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        if extra in DESTINATIONS:
            code = main(["train", "--log-to", extra])
        else:
            try:
                code = importlib.import_module(f"fullshard.integrations.{extra}")
            except ImportError as error:
                code = None
                print(error, file=stderr)
    found[extra] = (code, stderr.getvalue())
print(json.dumps(found))
"""


def with_dependencies(distributions: dict[str, Distribution], requirements: list[str]) -> dict[str, Distribution]:
    """Add the installed distributions of `requirements` and of their requirements, by name."""
    for requirement in map(Requirement, requirements):
        needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if needed and requirement.name not in distributions:
            distributions[requirement.name] = found = distribution(requirement.name)
            with_dependencies(distributions, found.requires or [])
    return distributions


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the dependencies of the package and nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    for found in with_dependencies({}, PROJECT["dependencies"]).values():
        for name in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / name).exists():
                (site / name).symlink_to(Path(str(found.locate_file(name))))
    return folder


def run(command: list[str], folder: Path, **variables: str) -> str:
    """Return the output of a command that cannot see the source tree."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environ |= {"OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_missing_extra_is_reported_with_pip_command(environment: Path, tmp_path: Path) -> None:
    extras = set(PROJECT["optional-dependencies"]) - TOOLS - NOT_NEEDED
    command = [str(environment / "bin" / "python"), "-c", USE_EXTRAS, *extras]
    found = json.loads(run(command, tmp_path, PYTHONPATH=str(ROOT / "src")))
    assert set(found) == extras
    for extra, (code, message) in found.items():
        assert re.fullmatch(rf".+ Install it with pip install 'fullshard\[{extra}\]'\.\n", message), message
        assert code == (None if importlib.util.find_spec(f"fullshard.integrations.{extra}") else 1)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, checked by twine. It is built without build isolation, which would need a network."""
    folder = tmp_path_factory.mktemp("wheel")
    dist, source = folder / "dist", folder / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for module, *arguments in (
        ("build", "--no-isolation", "--outdir", str(dist), str(source)),
        ("twine", "check", "--strict", str(dist / "*")),
    ):
        run([sys.executable, "-m", module, *arguments], folder)
    assert len(list(dist.glob("*.tar.gz"))) == 1
    (found,) = dist.glob("*.whl")
    return found


@pytest.mark.slow
def test_wheel_contains_all_package_files(wheel: Path) -> None:
    ignored = ("__pycache__", "egg-info")
    source = [path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*") if path.is_file()]
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in source if not any(part in name for part in ignored)} == {
            name for name in archive.namelist() if "dist-info" not in name
        }


@pytest.mark.slow
@pytest.mark.timeout(600)  # 30 s, several times as long on a busy machine
def test_wheel_works_without_source_tree(wheel: Path, environment: Path, tmp_path: Path) -> None:
    python = str(environment / "bin" / "python")
    run([sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", str(wheel)], tmp_path)
    for command, expected in (
        ("--help", "usage: fullshard SUBCOMMAND"),
        ("--version", f"fullshard {fullshard.__version__}\ntorch "),
        ("train --size nano --seq 16 --steps 5 --ranks 2 --validate-bytes 300 --sample-bytes 8", "Validation: "),
        ("report runs/nano-zero3-1", "written to runs/nano-zero3-1/report.html"),
        ("plan --size nano --hardware h100-80 --global-batch 64", "fully_shard(model, **options)"),
        ("completion bash", "complete "),
    ):
        assert expected in run([str(environment / "bin" / "fullshard"), *command.split()], tmp_path), command
