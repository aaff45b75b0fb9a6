"""The documentation is correct: links resolve, code runs, lists and formulas equal what they describe."""

import ast
import inspect
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from pages import ROOT, code_blocks, page, rows, section
from shared_ranks import run_ranks
from test_floors import PACKAGE, PUBLIC, ROOMS
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fullshard import ShardingStrategy, fully_shard, recording
from fullshard.comm.codec import codec_named
from fullshard.policy.strategy import resolve_placements

T = TypeVar("T")

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_relative_links_resolve(path):
    targets = re.findall(r"\]\(([^)#\s]+)", path.read_text())
    assert [t for t in targets if "://" not in t and not (path.parent / t).exists()] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_begin_with_title_and_sentence(path):
    """The sentence states the task of the page and precedes all code."""
    title, _, first = path.read_text().splitlines()[:3]
    assert title.startswith("# ")
    assert re.match(r"[A-Z`]\w", first)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_python_blocks_compile(path):
    for block in code_blocks(path.read_text(), "python"):
        compile(block, str(path), "exec")


def run_readme(path: str) -> tuple[str, list[tuple[int, ...]]]:
    """Run the README's script on one rank. Return a weight's placements, and the shapes of its tensors on this rank."""
    dist.init_process_group = lambda: None  # the process group exists already
    names = runpy.run_path(path)
    weight = names["model"][0].weight
    moments = names["optimizer"].state[weight]
    kept = (weight, weight.grad, moments["exp_avg"], moments["exp_avg_sq"])
    return str(weight.placements), [tuple(weight.shape), *(tuple(tensor.to_local().shape) for tensor in kept)]


def test_readme_script_matches_its_table(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(code_blocks(page("README.md"), "python")[0])
    for placed, shapes in run_ranks(2, run_readme, str(script)):
        assert placed == "(Shard(dim=0),)"
        assert shapes == [(512, 512), *[(256, 512)] * 4]


def run_tensor_parallel(path: str) -> list[list[str]]:
    """Run the page's script on one rank. Return the rows of the table below the script, computed from the model."""
    dist.init_process_group = lambda: None
    model = runpy.run_path(path)["model"]
    return [describe(model, *place) for place in ((1, "weight"), (3, "weight"), (3, "bias"), (0, "weight"))]


def describe(model: nn.Module, layer: int, name: str) -> list[str]:
    def axes(tensor: DTensor) -> str:
        return f"({', '.join(tensor.device_mesh.mesh_dim_names)})"

    sharded = getattr(model[0][layer], name)
    placed = (f"{type(p).__name__}({p.dim if p.is_shard() else ''})" for p in sharded.placements)
    between = [f"{tuple(sharded.shape)} on {axes(sharded)}", ", ".join(placed), str(tuple(sharded.to_local().shape))]
    model[0].unshard()
    whole = getattr(model[0][layer], name)
    visited = "a plain tensor"
    if isinstance(whole, DTensor):
        visited = f"a DTensor on {axes(whole)}, here {tuple(whole.to_local().shape)}"
    model[0].reshard()
    return [f"model[0][{layer}].{name}", *between, visited]


def test_tensor_parallel_script_matches_its_table(tmp_path):
    text = page("docs/tensor_parallel.md")
    script = tmp_path / "script.py"
    script.write_text(code_blocks(text, "python")[0])
    for found in run_ranks(4, run_tensor_parallel, str(script)):
        assert found == rows(text)


def test_readme_quotes_actual_error_message():
    quoted = re.search(r"^fullshard\.errors\.ConfigError: (.*?)^```", page("README.md"), re.MULTILINE | re.DOTALL)[1]
    with pytest.raises(ValueError, match=re.escape(" ".join(quoted.split()))):
        resolve_placements("zero4")


def test_compression_table_matches_codec_sizes():
    options, _ = section(page("docs/networks.md"), "Compressed communication").split("The effect on the loss", 1)
    table = rows(options)
    assert len(table) > 1
    for word, _, reported, _ in table:
        assert f"{codec_named(word).nbytes(1 << 20) / (1 << 20):.3g}" == reported


def test_files_named_in_pages_exist():
    for path in PAGES:
        named = re.findall(r"\b((?:benchmarks|examples|tests|docs)/[\w/]+\.(?:py|md))\b", path.read_text())
        assert [name for name in named if not (ROOT / name).is_file()] == [], path.name


def test_room_table_matches_package_tree():
    reported = [row[0].removesuffix(".py").rstrip("/") for row in rows(section(page("docs/design.md"), "Rooms"))]
    assert reported == [room for room in ROOMS if room != PUBLIC]
    files = {path.stem for path in PACKAGE.glob("*.py")}
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(ROOMS) == files | folders


def state_of_modules() -> set[tuple[str, str]]:
    """Return the file and name of each value that a module keeps and that is neither a constant nor a class nor a
    logger, and of each that a function rebinds. Constants have names in capitals. `Kept` mappings are left out, since
    `kept()` lists them.
    """
    found = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        rebound = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
        found |= {(path.relative_to(PACKAGE).as_posix(), name) for name in rebound}
        for node in tree.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            name = target.id if isinstance(target, ast.Name) else ""
            if not name or name != name.lower() or name.startswith("__") or not made_here(node.value):
                continue
            found.add((path.relative_to(PACKAGE).as_posix(), name))
    return found


def made_here(value: ast.expr | None) -> bool:
    """Return True if `value` makes an object that can change."""
    containers = ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp
    kind = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
    return isinstance(value, containers) or (bool(kind) and kind not in {"logging.getLogger", "Kept"})


def test_process_state_table_lists_all_module_state():
    table = rows(section(page("docs/design.md"), "State of the process").split("Functions that install something")[0])
    listed = [(file, name) for _, names, file in table for name in names.split(", ")]
    assert len(listed) == len(set(listed))
    assert set(listed) == state_of_modules()


def test_process_state_table_lists_cached_install_functions():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef) or node.args.args or ast.unparse(node.returns or node) != "None":
                continue
            if any(ast.unparse(decorator) == "cache" for decorator in node.decorator_list):
                found.add((path.relative_to(PACKAGE).as_posix(), node.name))
    text = section(page("docs/design.md"), "State of the process").split("Functions that install something")[1]
    assert {(file, name) for _, names, file in rows(text) for name in names.split(", ")} == found


@pytest.mark.parametrize(("name", "heading"), [("README.md", "Strategies"), ("docs/strategies.md", "Placements")])
def test_strategy_tables_match_engine(name, heading):
    table = rows(section(page(name), heading))
    assert [(row[0], row[1].split(" ")[0]) for row in table] == [(s.value, s.name) for s in ShardingStrategy]
    for short, _, *states in table:
        if any(states[1:]):
            reported = [state.split(" ")[0] for state in states]
            p = resolve_placements(short)
            held = [p.parameters, p.parameters_in_step, p.gradients, p.optimizer]
            assert reported == [placement.value for placement in held], short


WIDTH, LAYERS, MICROBATCHES = 256, 3, 3
UNIT_BYTES = WIDTH * WIDTH * 4


def count_traffic(strategy: str, reduce_each: bool) -> dict[str, int]:
    """Return bytes that this rank sends in a step after the first, by collective."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if "hsdp" in strategy else None
    head = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))  # stays with the root
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)), head)
    for layer in model[:LAYERS]:
        fully_shard(layer, mesh=mesh, strategy=strategy)
    fully_shard(model, mesh=mesh, strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with recording() as record:
            for microbatch in range(MICROBATCHES):
                model.set_requires_gradient_sync(reduce_each or microbatch == MICROBATCHES - 1)
                model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: record.sent_bytes(name) for name in ("all_gather", "reduce_scatter", "all_reduce")}


@pytest.mark.parametrize("reduce_each", [True, False])
@pytest.mark.parametrize("formulas", rows(section(page("docs/strategies.md"), "Traffic")), ids=lambda row: row[0])
def test_traffic_matches_documented_formulas(formulas, reduce_each):
    strategy, *expressions = formulas
    whole = (LAYERS + 1) * UNIT_BYTES
    reductions = MICROBATCHES if reduce_each else 1
    known = {"P": whole, "G": whole, "root": UNIT_BYTES, "k": MICROBATCHES, "s": reductions, "N": 2, "R": 2}
    world = 4 if "hsdp" in strategy else 2
    for sent in run_ranks(world, count_traffic, strategy, reduce_each):
        assert list(sent.values()) == [eval(expression, known) for expression in expressions]


def named(text: str, heading: str) -> set[str]:
    """Return the names in the first column of the table under a heading."""
    return {name.strip() for row in rows(section(text, heading)) for name in row[0].split(",")}


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the page is about torch 2.13")
def test_moving_over_page_covers_torch_arguments_and_methods():
    """The page lists every argument and public method of torch, and marks those that fullshard lacks as missing."""
    from torch.distributed import fsdp as peer

    import fullshard as own

    text = page("docs/moving_over.md")
    for heading, function in (
        ("`FullyShardedDataParallel`: arguments", peer.FullyShardedDataParallel),
        ("`fully_shard`: arguments", peer.fully_shard),
    ):
        assert named(text, heading) == set(inspect.signature(function).parameters)
    for name in ("FullyShardedDataParallel", "FSDPModule"):
        heading = f"`{name}`: methods"
        public = {method for method in vars(getattr(peer, name)) if not method.startswith("_")}
        assert named(text, heading) == public
        for row in rows(section(text, heading)):
            there = [hasattr(getattr(own, name), method.strip()) for method in row[0].split(",")]
            assert all(there) if "missing" not in row[1] else not all(there), row[0]


def test_benchmark_table_matches_measurements():
    assert runpy.run_path(str(ROOT / "benchmarks/summary.py"))["table"]() in page("docs/benchmarks.md")


class TwoBlocks(nn.Module):
    """The model of docs/one_step.md."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(128, 128)
        self.blocks = nn.ModuleList(nn.Linear(128, 128) for _ in range(2))
        self.head = nn.Linear(128, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(x)


def functions_called(phase: str, step: int) -> list[str]:
    """Return the package's functions in the order that `phase` of a step calls them, as "Class.name" or "name"."""
    called: list[str] = []

    def note(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            called.append(frame.f_code.co_qualname)

    def noted(name: str, number: int, function: Callable[[], T]) -> T:
        if (name, number) != (phase, step):
            return function()
        sys.setprofile(note)
        try:
            return function()
        finally:
            sys.setprofile(None)

    model = TwoBlocks()

    def shard() -> torch.optim.Optimizer:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        return torch.optim.AdamW(model.parameters())

    optimizer = noted("Before the first step: `fully_shard`", 0, shard)
    for number in range(1, step + 1):
        loss = noted("Forward", number, lambda: model(torch.randn(4, 128)).sum())
        noted("Backward", number, loss.backward)
        optimizer.step()
        optimizer.zero_grad()
    return called


@cache
def functions_defined() -> dict[str, set[str]]:
    """Return the files of each function and method of the package, by "name" and "Class.name"."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            within = node.body if isinstance(node, ast.ClassDef) else [node]
            prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
            for item in within:
                if isinstance(item, ast.FunctionDef):
                    found.setdefault(prefix + item.name, set()).add(path.relative_to(PACKAGE).as_posix())
    return found


@cache
def attributes_defined() -> set[str]:
    """Return the attributes that classes of the package set or declare, as "Class.name"."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for cls in ast.walk(ast.parse(path.read_text())):
            for node in ast.walk(cls) if isinstance(cls, ast.ClassDef) else ():
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
                    found.add(f"{cls.name}.{node.attr}")
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    found.add(f"{cls.name}.{node.id}")
    return found


def unknown_names(text: str) -> list[str]:
    """Return the names in `text` that the package does not have: dotted ones of classes, private ones, and those that
    are given with a file in which they are not defined.
    """
    names = re.findall(r"`(_\w+|[A-Z]\w*\.[\w.]+)`", text)
    unknown = [name for name in names if name not in functions_defined().keys() | attributes_defined()]
    placed = re.findall(r"`([\w.]+)`\s\((?:[^()`]*\s)?`([\w/]+\.py)`\)", text)
    classes = {(name.split(".")[0], file) for name, files in functions_defined().items() for file in files}
    unknown += [
        f"{name} in {file}"
        for name, file in placed
        if file not in functions_defined().get(name, set()) and (name, file) not in classes
    ]
    return unknown


def test_one_step_page_uses_only_existing_names():
    assert unknown_names(page("docs/one_step.md")) == []
    planted = "`Runtime._start`, `_no_such`, `Unit.__init__` (`engine/gather.py`), `Gather.start` (`engine/gather.py`)"
    assert unknown_names(planted) == ["Runtime._start", "_no_such", "Unit.__init__ in engine/gather.py"]


def first_out_of_order(names: Sequence[str], called: Sequence[str]) -> str | None:
    """Return the first of `names` that is not in `called` after the one before it; None if all are."""
    remaining = iter(called)
    return next((name for name in names if all(name != item for item in remaining)), None)


@pytest.mark.parametrize(
    ("heading", "step"), [("Before the first step: `fully_shard`", 0), ("Forward", 4), ("Backward", 4)]
)
def test_one_step_page_lists_functions_in_call_order(heading, step):
    """Each function that a section names is called in that phase, after the function named before it. Functions that
    an item names first are first called in this order.
    """
    items = re.split(r"\n\d+\. ", section(page("docs/one_step.md"), heading))
    reported = [[name for name in re.findall(r"`([\w.]+)`", item) if name in functions_defined()] for item in items]
    names = [name for item in reported for name in item]
    assert len(names) > 8
    called = run_ranks(2, functions_called, heading, step)[0]
    if step == 0:
        called = called[: called.index("install") + 1]  # only the first unit; the other units repeat these calls
    assert first_out_of_order(names, called) is None
    named: set[str] = set()
    for item in reported:
        new = [name for name in dict.fromkeys(item) if name not in named]
        assert new == sorted(new, key=called.index)
        named.update(item)
