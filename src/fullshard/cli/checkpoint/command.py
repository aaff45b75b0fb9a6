"""The `fullshard checkpoint` command and its subcommands."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from fullshard.checkpoint.exporting import export_stored
from fullshard.checkpoint.folder import Entry, entries, unfinished
from fullshard.checkpoint.manifest import MANIFEST, Manifest, StoredFile, damage_in, step_of
from fullshard.checkpoint.stored import Stored, holds_tensor_files, open_stored
from fullshard.checkpoint.tensor_files import CHECKSUMS, Description, open_tensor_files
from fullshard.cli.checkpoint.differences import TensorDifference, differences
from fullshard.cli.checkpoint.display import SlowBar, print_json, print_line, print_table
from fullshard.cli.checkpoint.settings import ExportSettings, ShowSettings
from fullshard.command_line import Command
from fullshard.errors import CheckpointError, ConfigError, near_matches, shown
from fullshard.integrations.deepspeed.importing import import_deepspeed

GOOD, BAD, NOT_DONE, INTERRUPTED = 0, 1, 2, 130
_PROG = "fullshard checkpoint"


@dataclass(frozen=True)
class _Action:
    """A subcommand."""

    words: tuple[str, ...]  # positional arguments
    does: str
    run: Callable[..., int]
    settings: type[Any] = ShowSettings


def run(argv: Sequence[str]) -> int:
    """Run the subcommand in `argv` and return the exit code: 1 for damage or differences, 2 for failure."""
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(_usage() + "\n")
        return GOOD
    name, *remaining = argv
    if name not in _ACTIONS:
        raise ConfigError(
            f"{_PROG} {name}: unknown.{near_matches(name, _ACTIONS)} Choose one of {', '.join(_ACTIONS)}."
        )
    action, command = _ACTIONS[name], COMMANDS[name]
    words, options = command.take_words(remaining)
    settings = command.parse(options)
    try:
        return action.run(*map(Path, words), settings)
    except CheckpointError as error:
        sys.stderr.write(f"fullshard: {shown(str(error), lines=True)}\n")
        return NOT_DONE
    except KeyboardInterrupt:
        return INTERRUPTED


def _usage() -> str:
    calls = {" ".join([name, *action.words]): action.does for name, action in _ACTIONS.items()}
    width = max(map(len, calls)) + 2
    lines = [f"  {call:<{width}}{does}" for call, does in calls.items()]
    return "\n".join([f"usage: {_PROG} SUBCOMMAND ... [options]", "", *lines, "", "Each takes --json, and --help."])


# -- ls ---------------------------------------------------------------------------------------------------------------


def _list(folder: Path, settings: ShowSettings) -> int:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: the folder does not exist. Pass a folder of checkpoints.")
    rows = [_listed(entry) for entry in _entries(folder)]
    left = [path.name for path in unfinished(folder)]
    if settings.output.json:
        print_json({"checkpoints": rows, "unfinished": left})
        return GOOD
    headings = ("name", "step", "world", "strategy", "saved at", "bytes", "files")
    shown = [
        [
            row["name"],
            str(row["step"]),
            *(str(row[name] or "?") for name in ("world", "strategy", "saved_at")),
            "?" if row["bytes"] is None else decimal(row["bytes"]),
            "complete" if row["intact"] else "damaged",
        ]
        for row in rows
    ]
    shown += [[name, *[""] * 5, "unfinished"] for name in left]
    if shown:
        print_table(headings, shown, right=("step", "world", "bytes"))
        for line in (line for row in rows for line in row["damage"]):
            print_line(line)
        print_line(f"Sizes of files were compared. {_PROG} verify compares their checksums.")
    else:
        print_line(f"No checkpoints found in {folder}.")
    return GOOD


def _entries(folder: Path) -> list[Entry]:
    """Return the checkpoints in `folder`, newest first, or `folder` if it is a checkpoint."""
    if (folder / MANIFEST).exists():
        return [Entry(folder)]
    return entries(folder) or ([Entry(folder)] if step_of(folder) is not None else [])


def _listed(entry: Entry) -> dict[str, Any]:
    manifest, damage = _manifest_of(entry)
    if manifest is not None:
        damage = list(damage_in(entry.path, manifest.files, reads=False))
    return {
        "name": entry.path.name,
        "step": entry.step if manifest is None else manifest.step,
        "world": manifest and manifest.world,
        "strategy": manifest and manifest.strategy,
        "saved_at": manifest and manifest.saved_at,
        "bytes": manifest and manifest.nbytes,
        "intact": not damage,
        "damage": damage,
    }


def _manifest_of(entry: Entry) -> tuple[Manifest | None, list[str]]:
    """Return the manifest and an empty list, or None and the damage."""
    try:
        return Manifest.read(entry.path), []
    except CheckpointError as error:
        return None, [str(error)]


# -- inspect ----------------------------------------------------------------------------------------------------------


def _inspect(path: Path, settings: ShowSettings) -> int:
    stored = open_stored(path, verifies=False)
    rows = [*_tensors("model", stored.weights, stored.ties), *_tensors("other", stored.others, {})]
    total = sum(row["bytes"] for row in rows)
    about = _about(stored)
    if settings.output.json:
        print_json({"path": str(stored.path), **about, "bytes": total, "tensors": rows})
        return GOOD
    print_line(str(stored.path))
    for name, value in about.items():
        print_line(f"  {name.replace('_', ' ')}: {value}")
    shown = [
        [
            row["name"],
            str(tuple(row["shape"])),
            row["dtype"],
            f"= {row['tied_to']}" if row["tied_to"] else decimal(row["bytes"]),
        ]
        for row in rows
    ]
    shown.append([f"{len(rows)} tensors", "", "", decimal(total)])
    print_table(("name", "shape", "dtype", "bytes"), shown, right=("bytes",))
    return GOOD


def _about(stored: Stored) -> dict[str, Any]:
    """Return a checkpoint's data about the run."""
    manifest = stored.manifest
    if manifest is None:
        return {}
    data = {name: getattr(manifest, name) for name in ("step", "world", "strategy", "saved_at")}
    return {**data, "versions": ", ".join(f"{name} {version}" for name, version in manifest.versions.items())}


def _tensors(section: str, tensors: Mapping[str, Description], ties: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "section": section,
            "shape": list(tensor.shape),
            "dtype": tensor.dtype_name,
            "bytes": 0 if name in ties else tensor.nbytes,
            "tied_to": ties.get(name),
        }
        for name, tensor in tensors.items()
    ]


# -- verify -----------------------------------------------------------------------------------------------------------


def _verify(path: Path, settings: ShowSettings) -> int:
    rows: list[dict[str, Any]] = []
    with SlowBar() as bar:
        for folder, files, damage in _expected_files(path):
            found = [*damage, *damage_in(folder, files, progress=bar.reporting(f"verifying {folder.name}"))]
            nbytes = sum(stored.nbytes for stored in files.values())
            rows.append({"path": str(folder), "files": len(files), "bytes": nbytes, "damage": found})
    if settings.output.json:
        print_json(rows)
    else:
        for row in rows:
            stated = "damaged" if row["damage"] else f"intact ({row['files']} files, {decimal(row['bytes'])})"
            print_line(f"{row['path']}: {stated}")
            for line in row["damage"]:
                print_line(f"  {line}")
    return BAD if any(row["damage"] for row in rows) else GOOD


def _expected_files(path: Path) -> list[tuple[Path, Mapping[str, StoredFile], list[str]]]:
    """Return folders, each with its expected files and the damage found so far."""
    if holds_tensor_files(path):
        try:
            files = open_tensor_files(path)
        except CheckpointError as error:
            return [(path, {}, [str(error)])]
        if files.checksums is None:
            raise CheckpointError(
                f"{path}: {CHECKSUMS} is missing, so its checksums are unknown. Compare it with a copy: {_PROG} diff."
            )
        return [(files.folder, files.checksums, [])]
    found = []
    for entry in _entries(path):
        manifest, damage = _manifest_of(entry)
        found.append((entry.path, {} if manifest is None else manifest.files, damage))
    if not found:
        raise CheckpointError(
            f"{path}: found nothing to verify. Pass a checkpoint, a folder of checkpoints, or an export."
        )
    return found


# -- export, import and diff ------------------------------------------------------------------------------------------


def _export(checkpoint: Path, out: Path, settings: ExportSettings) -> int:
    dtype = settings.dtype()
    with SlowBar() as bar:
        stored = open_stored(checkpoint, bar.reporting("verifying"))
        size = settings.files.max_shard_size
        export_stored(stored, out, max_shard_size=size, dtype=dtype, progress=bar.reporting("exporting"))
    files = {path.name: path.stat().st_size for path in sorted(out.iterdir())}
    if settings.output.json:
        print_json({"from": str(stored.path), "to": str(out), "files": files})
    else:
        print_line(f"{stored.path} -> {out}: {len(files)} files, {decimal(sum(files.values()))}")
    return GOOD


def _import_deepspeed(folder: Path, out: Path, settings: ShowSettings) -> int:
    with SlowBar() as bar:
        written = import_deepspeed(folder, out, bar.reporting("importing"))
    if settings.output.json:
        print_json({"from": str(folder), "to": str(written)})
    else:
        print_line(f"{folder} -> {written}")
    return GOOD


def _diff(one: Path, other: Path, settings: ShowSettings) -> int:
    with SlowBar() as bar:
        sides = [open_stored(path, bar.reporting(f"verifying {path.name}")) for path in (one, other)]
        found = list(differences(sides[0], sides[1], bar.reporting("comparing")))
    odd = [item for item in found if not item.bit_equal]
    if settings.output.json:
        tensors = [_as_json(item) for item in found]
        print_json({"first": str(sides[0].path), "second": str(sides[1].path), "equal": not odd, "tensors": tensors})
        return BAD if odd else GOOD
    if odd:
        headings = ("name", "differs in", "first", "second", "largest difference")
        shown = [
            [
                item.name,
                item.stated,
                str(item.one or "-"),
                str(item.other or "-"),
                "" if item.largest is None else f"{item.largest:.6g}",
            ]
            for item in odd
        ]
        print_table(headings, shown, right=("largest difference",))
    print_line(f"{len(found) - len(odd)} of {len(found)} tensors are equal, bit for bit.")
    return BAD if odd else GOOD


def _as_json(found: TensorDifference) -> dict[str, Any]:
    def side(tensor: Description | None) -> dict[str, Any] | None:
        return None if tensor is None else {"shape": list(tensor.shape), "dtype": tensor.dtype_name}

    largest = found.largest
    return {
        "name": found.name,
        "differs_in": None if found.bit_equal else found.stated,
        "first": side(found.one),
        "second": side(found.other),
        # JSON has no NaN and no infinity.
        "largest_difference": largest if largest is None or math.isfinite(largest) else str(largest),
    }


_ACTIONS = {
    "ls": _Action(("FOLDER",), "list the checkpoints of a folder, the newest first", _list),
    "inspect": _Action(("PATH",), "show the contents of a checkpoint or of safetensors files", _inspect),
    "verify": _Action(("PATH",), "compare every checksum; the exit code is 1 if anything is damaged", _verify),
    "export": _Action(("PATH", "OUT"), "write the weights of a checkpoint as safetensors", _export, ExportSettings),
    "diff": _Action(("ONE", "OTHER"), "compare tensor by tensor; the exit code is 1 if any differs", _diff),
    "import-deepspeed": _Action(("FOLDER", "OUT"), "convert a ZeRO checkpoint of DeepSpeed", _import_deepspeed),
}
COMMANDS = {
    name: Command(action.settings, f"{_PROG} {name}", f"{action.does[0].upper()}{action.does[1:]}.", action.words)
    for name, action in _ACTIONS.items()
}
