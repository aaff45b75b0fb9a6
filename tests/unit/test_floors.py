"""Imports between the rooms of the package follow the order of ROOMS.

A room is a folder of the package, or a file at its root. A room may import only rooms that precede it in ROOMS. If a
room lists its files, a file may import only files that precede it in the list. A new file must be added to the list.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "fullshard"
PUBLIC = "__init__"  # the public names: an import from the bare package
ROOMS: dict[str, list[str] | None] = {
    "errors": None,
    "_lazy": None,
    "versions": None,
    "amounts": None,
    "regular_files": None,
    "policy": ["arguments", "strategy", "precision", "offload", "tiers", "meshes", "options", "switches"],
    "layout": ["offsets", "shard_spec", "group_layout", "slots", "coverage"],
    "_fakes": None,
    "_compat": None,
    "_dry_compat": None,
    "device": ["cuda_graph", "streams", "host_memory", "accelerator", "memory", "awaited", "current", "transfers"],
    "disk": ["interface", "folder", "pace", "files", "buffers", "space", "tensors", "speed", "prediction"],
    "tape": ["recorder", "tape", "context"],
    "liveness": ["rank_progress", "store", "ring", "watchdog"],
    "comm": [
        "transport",
        "fingerprint",
        "collectives",
        "pairwise",
        "peers",
        "shared_memory",
        "pretended",
        "native",
        "routes",
        "mesh",
        "codec",
        "encoded",
        "two_level",
    ],
    "engine": [
        "nested",
        "whole_methods",
        "order",
        "communicating",
        "param_view",
        "validity",
        "findings",
        "group_plan",
        "sharded_param",
        "pack",
        "group_buffers",
        "shards_on_disk",
        "payload",
        "group_transports",
        "gather",
        "gradients",
        "gradients_on_disk",
        "reduction",
        "param_group",
        "payload_group",
        "managed",
        "sharded_use",
        "other_engines",
        "unit_parts",
        "unit_plans",
        "unsharded_memory",
        "residency",
        "unit_shards",
        "unit_gradients",
        "unit",
        "registry",
        "uncounted_writes",
        "footprint",
        "finite",
        "comparison",
        "late_params",
        "slot_sharing",
        "placements",
        "reduction_queue",
        "unshard_scheduler",
        "microbatches",
        "call",
        "returned_params",
        "expected",
        "offloaded",
        "activations",
        "root_state",
        "hook_driver",
        "manual_driver",
        "runtime",
        "hooks",
        "materialize",
    ],
    "state": [
        "names",
        "block_states",
        "optim_kinds",
        "steps_in_chunks",
        "on_disk",
        "budget",
        "first_step",
        "state_dict",
        "optim_state",
        "loaded_states",
        "summon",
        "streaming",
    ],
    "optim": [
        "hyperparameters",
        "before_step",
        "elementwise",
        "defer",
        "plain_step",
        "local_steps",
        "clipping",
        "muon",
    ],
    "checkpoint": None,
    "dry": None,
    "wrap": None,
    "sharding": None,
    "fsdp_module": None,
    "graphs": None,
    "fsdp1": ["precision", "wrapper", "__init__"],
    "plan": None,  # shards a model to measure the cost
    "report": [
        "run",
        "usage",
        "counters",
        "steps",
        "operations",
        "memory_watch",
        "running_out",
        "facts",
        "line_schema",
        "rank_file",
        "destinations",
        "reading",
        "account",
        "figures",
        "hardware",
        "rules",
        "causes",
        "shown",
        "trace",
        "export",
        "frame",
        "page",
        "watching",
        "recording",
    ],
    # the public names, imported from the rooms above
    PUBLIC: None,
    # edges: nothing above imports these
    "command_line": None,
    "integrations": None,
    "testing": None,  # tests pipelines
    "train": None,
    "planner": [
        "shorten",
        "subject",
        "candidates",
        "tapes",
        "steps",
        "readings",
        "sketch",
        "question",
        "found",
        "bounds",
        "workers",
        "search",
        "advice",
        "report",
        "page",
        "settings",
        "command",
    ],
    "cli": None,
}
FORBIDDEN = "torch.distributed.fsdp"
PEERS_NAMES = {"integrations/deepspeed/utils.py"}  # scripts import this name
EMPTY_NAMES = {"util", "utils", "common", "helper", "helpers", "misc"}


def room_of(path: Path, package: Path) -> str:
    return path.relative_to(package).parts[0].removesuffix(".py")


def imported_names(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and dotted name of each import in the file, one per name of `from x import a, b`."""
    folder = [package.name, *path.relative_to(package).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == FORBIDDEN:
            yield node.lineno, FORBIDDEN


def complaints(package: Path, rooms: Mapping[str, Sequence[str] | None]) -> list[str]:
    """Return the errors in imports and file names of `package`, one line each."""
    place = {room: number for number, room in enumerate(rooms)}
    found = []
    for path in sorted(package.rglob("*.py")):
        here, room = path.relative_to(package.parent), room_of(path, package)
        if path.stem in EMPTY_NAMES and path.relative_to(package).as_posix() not in PEERS_NAMES:
            found.append(f"{here}: name it after its subject; '{path.stem}' has none")
        if room not in place:
            found.append(f"{here}: not listed; add '{room}' to ROOMS, below all that it imports")
            continue
        files = {file: number for number, file in enumerate(rooms[room] or ())}
        if files and path.stem not in files and path.stem != PUBLIC:
            found.append(f"{here}: has no place in its room; add '{path.stem}' to ROOMS['{room}']")
        for line, name in imported_names(path, package):
            target = target_room(name, package.name, place)
            if name == FORBIDDEN or name.startswith(FORBIDDEN + "."):
                found.append(f"{here}:{line}: imports {name}; fullshard is its own engine")
            if target is not None and place.get(target, len(place)) > place[room]:
                found.append(f"{here}:{line}: imports {name}, which stands higher; move one of the two")
            elif target == room and path.stem in files:
                file = name.split(".")[2] if name.count(".") > 1 else PUBLIC
                if files.get(file, len(files)) >= files[path.stem]:
                    found.append(f"{here}:{line}: imports {name}, which stands higher in its room; move one of the two")
    return found


def target_room(name: str, package: str, places: dict[str, int]) -> str | None:
    """Return the room that an import of `name` leads to; None if it leads out of the package."""
    top, *remaining = name.split(".")
    if top != package:
        return None
    # `from fullshard import x` is a module if there is one of that name, and a public name otherwise.
    return remaining[0] if remaining and (len(remaining) > 1 or remaining[0] in places) else PUBLIC


def test_rooms_import_only_earlier_rooms():
    assert complaints(PACKAGE, ROOMS) == []


def test_listed_rooms_and_files_exist():
    here = {room for room in ROOMS if (PACKAGE / room).is_dir() or (PACKAGE / f"{room}.py").is_file()}
    assert here == set(ROOMS)
    listed = [PACKAGE / room / f"{file}.py" for room, files in ROOMS.items() for file in files or ()]
    assert [path for path in listed if not path.is_file()] == []


@pytest.mark.parametrize(
    ("source", "stated"),
    [
        ("from house.low import x", None),
        ("from house import low", None),
        ("from house.mid import x", None),
        ("import os, torch.distributed", None),
        ("from house.high import x", "higher"),
        ("import house.high", "higher"),
        ("from house import high", "higher"),
        ("from house import SomeName", "higher"),
        ("import house", "higher"),
        ("from . import high", "higher"),
        ("from .high import x", "higher"),
        ("from house.attic.box import x", "higher"),
        ("from house.nowhere import x", "higher"),
        ("def f():\n    from house.high import x", "higher"),
        ("if TYPE_CHECKING:\n    from house.high import X", "higher"),
        ("from torch.distributed.fsdp import fully_shard", "own engine"),
        ("from torch.distributed import fsdp", "own engine"),
        ("import torch.distributed.fsdp.wrap as w", "own engine"),
        ("import torch\ntorch.distributed.fsdp.wrap()", "own engine"),
    ],
)
def test_import_check_detects_every_kind_of_import(tmp_path, source, stated):
    found = complaints(house(tmp_path, {"mid.py": source}), dict.fromkeys(["low", "mid", "high", PUBLIC, "attic"]))
    assert len(found) == (stated is not None)
    assert all(stated in line and line.startswith("house/mid.py:") for line in found)


def test_import_check_treats_folder_as_one_room(tmp_path):
    files = {
        "low.py": "",
        "attic/__init__.py": "from .box import x",
        "attic/box.py": "from .. import low\nfrom . import lid",
    }
    assert complaints(house(tmp_path, files), dict.fromkeys(["low", "attic"])) == []
    files["attic/box.py"] = "from ..high import x"
    assert len(complaints(house(tmp_path, files), dict.fromkeys(["low", "attic", "high"]))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from torch.distributed.fsdp import fully_shard",
        "def f():\n    def g():\n        import torch.distributed.fsdp.wrap",
        "import torch\n\ntorch.distributed.fsdp",
    ],
)
def test_import_check_rejects_torch_fsdp_imports(tmp_path, source):
    (line,) = complaints(house(tmp_path, {"box.py": source}), {"box": None})
    assert "own engine" in line


def test_import_check_rejects_unlisted_and_vaguely_named_files(tmp_path):
    assert "add 'new' to ROOMS" in complaints(house(tmp_path, {"new.py": ""}), {"low": None})[0]
    assert (
        "name it after its subject"
        in complaints(house(tmp_path, {"attic/utils.py": ""}), {"new": None, "attic": None})[0]
    )


def test_files_of_room_import_only_earlier_files(tmp_path):
    rooms = {"low": None, "attic": ["box", "lid"]}
    files = {"low.py": "", "attic/box.py": "from house import low", "attic/lid.py": "from house.attic.box import x"}
    assert complaints(house(tmp_path, files), rooms) == []
    files["attic/box.py"] = "from house.attic.lid import x"
    assert "higher in its room" in complaints(house(tmp_path, files), rooms)[0]
    files["attic/box.py"] = "def f():\n    from . import lid"
    assert "higher in its room" in complaints(house(tmp_path, files), rooms)[0]
    files = {"attic/box.py": "", "attic/new.py": ""}
    assert "add 'new' to ROOMS['attic']" in complaints(house(tmp_path / "other", files), rooms)[0]


def house(folder: Path, files: dict[str, str]) -> Path:
    for name, source in files.items():
        path = folder / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return folder / "house"
