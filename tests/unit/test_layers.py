"""`import fullshard` does not load torch; sharding loads the core; everything else is loaded when it is used."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "fullshard"
PLUG_INS = {"checkpoint", "dry", "fsdp1", "integrations", "plan", "report", "testing"}
APPLICATIONS = {"cli", "command_line", "planner", "train"}
CORE = "from fullshard import clip_grad_norm_, fully_shard"
STEP = """
import torch, torch.distributed as dist
from fullshard import clip_grad_norm_, fully_shard
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fully_shard(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.ones(2, 4)).sum().backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
model.state_dict()
dist.destroy_process_group()
"""
MAX_MODULES = 106
MAX_LINES = 15_400  # without docstrings, which describe arguments and errors
LOADED_BY_STEPS = {  # of the core
    *("comm.pairwise", "comm.peers", "comm.shared_memory"),
    *("optim.plain_step", "state.first_step", "state.loaded_states", "state.optim_state"),
}

LIST = """
import json, sys
{program}
print(json.dumps({{name: getattr(module, "__file__", None) for name, module in sys.modules.items()}}))
"""


def loaded_by(program: str) -> dict[str, str | None]:
    """Return the modules that a new process has loaded after `program`, and their files."""
    command = [sys.executable, "-W", "ignore", "-c", LIST.format(program=program)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.fixture(scope="module")
def loaded() -> dict[str, str | None]:
    return loaded_by(CORE)


def own(modules: dict[str, str | None]) -> dict[str, Path]:
    return {name: Path(file or "") for name, file in modules.items() if name.partition(".")[0] == "fullshard"}


def third_party(modules: dict[str, str | None]) -> set[str]:
    """Return the packages of `modules` that were installed, by the names that programs import."""
    tops = {name.partition(".")[0] for name, file in modules.items() if file is not None and "site-packages" in file}
    return tops - {"fullshard"}


def test_sharding_imports_no_plug_ins_or_applications(loaded):
    """The file `report/__init__.py` is empty; see `fullshard/__init__.py`."""
    files = {file.relative_to(PACKAGE).as_posix() for file in own(loaded).values()} - {"report/__init__.py"}
    rooms = {file.partition("/")[0].removesuffix(".py") for file in files}
    assert rooms & (PLUG_INS | APPLICATIONS) == set()
    assert len((PACKAGE / "report" / "__init__.py").read_text().splitlines()) == 1


def lines_without_docstrings(source: str) -> int:
    """Return the number of lines of a module, without those of docstrings."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    bodies = [node.body for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    texts = [body[0] for body in bodies if body and isinstance(body[0], ast.Expr) and is_text(body[0].value)]
    return len(source.splitlines()) - sum((text.end_lineno or 0) - text.lineno + 1 for text in texts)


def is_text(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def test_line_count_excludes_docstrings():
    texts = ['"""A module.\n\nText.\n"""', "class C:", '    """A class."""', "    def f(self):", '        """Do."""']
    source = "\n".join([*texts, '        return "text"'])
    assert lines_without_docstrings(source) == len(source.splitlines()) - 6


def test_sharding_imports_few_modules_and_lines(loaded):
    lines = sum(lines_without_docstrings(file.read_text()) for file in own(loaded).values())
    assert len(own(loaded)) <= MAX_MODULES
    assert lines <= MAX_LINES


def test_steps_import_no_code_of_unused_options(loaded):
    """Steps load no code for disks, budgets, encoded communication or payloads of tensor subclasses."""
    more = set(own(loaded_by(STEP))) - set(own(loaded))
    assert {name.removeprefix("fullshard.") for name in more} == LOADED_BY_STEPS


def test_sharding_imports_no_third_party_package_except_torch(loaded):
    """Compare with a process that imports the same modules of torch, since these import packages, too."""
    of_torch = [name for name in loaded if name.partition(".")[0] == "torch" and loaded[name] is not None]
    program = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    command = [sys.executable, "-W", "ignore", "-c", LIST.format(program=program), *of_torch]
    alone = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert "torch" in third_party(alone)
    assert third_party(loaded) - third_party(alone) == set()


@pytest.mark.parametrize(
    "program",
    ["import fullshard", *(f"import fullshard.cli; fullshard.cli.main([{word!r}])" for word in ("--help", "x"))],
)
def test_import_and_help_load_no_third_party_package(program):
    """This keeps `fullshard --help` and messages about invalid subcommands at a tenth of a second."""
    quiet = "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()):\n    "
    assert third_party(loaded_by(quiet + program)) == third_party(loaded_by(""))


def test_public_names_are_loaded_on_first_access(loaded):
    """A submodule that has the name of a function must not replace it."""
    program = "import fullshard.report.page, fullshard\nassert fullshard.report.__name__ == 'report'"
    assert "fullshard.report.recording" not in loaded
    assert "fullshard.report.recording" in loaded_by(program + "\nfrom fullshard import report, RunReport")


@pytest.mark.parametrize("package", ["fullshard", "fullshard.optim"])
def test_dir_lists_public_names_before_loading(package):
    loaded_by(f"import {package} as package\nassert set(package.__all__) <= set(dir(package))")
