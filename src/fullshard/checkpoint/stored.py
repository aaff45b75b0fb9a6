"""The tensors of a checkpoint or of safetensors files, without their model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fullshard.checkpoint.contents import MODEL, RECORD
from fullshard.checkpoint.manifest import Manifest, Progress
from fullshard.checkpoint.opening import Opened, open_checkpoint, verify
from fullshard.checkpoint.tensor_files import CHECKSUMS, INDEX_SUFFIX, Description, open_tensor_files
from fullshard.checkpoint.together import GroupRanks


@dataclass(frozen=True)
class Stored:
    """The stored tensors, and a function to read them."""

    path: Path
    weights: Mapping[str, Description]  # of the model, by FQN
    fetch: Callable[[str], Tensor]  # reads one tensor, by its name in `weights` or `others`
    ties: Mapping[str, str] = field(default_factory=dict)  # by name in `weights`, the name that it is tied to
    others: Mapping[str, Description] = field(default_factory=dict)  # the optimizer's, by key
    values: tuple[str, ...] = ()  # FQNs of the model's values other than tensors
    manifest: Manifest | None = None

    @property
    def tensors(self) -> dict[str, Description]:
        """All tensors by name."""
        return {**self.weights, **self.others}


def holds_tensor_files(path: Path) -> bool:
    """Return True if `path` is a safetensors file, an index, or a folder with safetensors files."""
    return path.name.endswith((".safetensors", INDEX_SUFFIX)) or any(path.glob("*.safetensors"))


def open_stored(path: Path, progress: Progress | None = None, *, verifies: bool = True) -> Stored:
    """Open safetensors files, a checkpoint, or the newest intact checkpoint in the folder `path`, in a single process.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged.
    """
    if holds_tensor_files(path):
        return _of_tensor_files(path, progress, verifies)
    return _of_checkpoint(open_checkpoint(path, GroupRanks(), progress, verifies=verifies))


def _of_tensor_files(path: Path, progress: Progress | None, verifies: bool) -> Stored:
    files = open_tensor_files(path)
    if verifies and files.checksums is not None:
        remedy = f"If it was changed on purpose, delete {CHECKSUMS}."
        verify(files.folder, files.checksums, GroupRanks(), f"reading {path}", remedy, progress)

    def fetch(name: str) -> Tensor:
        [(_, tensor)] = files.read({name: (files.ties.get(name, name), None)})
        return tensor

    tied = {name: files.tensors[kept] for name, kept in files.ties.items()}
    return Stored(path, {**files.tensors, **tied}, fetch, files.ties)


def _of_checkpoint(opened: Opened) -> Stored:
    planned = opened.metadata.planner_data or {}
    weights: dict[str, str] = {}
    others: dict[str, str] = {}
    of_model: list[str] = []  # other than tensors
    sizes = opened.sizes()
    paths = {key: planned.get(key, (key,)) for key in opened.metadata.state_dict_metadata}
    has_section = any(MODEL in path[:-1] for key, path in paths.items() if key in sizes)
    for key, path in paths.items():
        if has_section and MODEL in path[:-1]:
            fqn = ".".join(map(str, path[path.index(MODEL) + 1 :]))
            if key in sizes:
                weights[fqn] = key
            else:
                of_model.append(fqn)
        elif key not in sizes:
            continue
        elif len(path) == 1 and not has_section:
            weights[key] = key
        else:
            others[key] = key
    keys = {**weights, **others}
    described = {name: Description(tuple(sizes[key]), opened.dtype(key)) for name, key in keys.items()}

    def fetch(name: str) -> Tensor:
        target = torch.empty(described[name].shape, dtype=described[name].dtype, device="cpu")
        opened.read({keys[name]: target})
        return target

    ties: dict[str, str] = {}
    values = tuple(of_model)
    if opened.manifest is not None:
        [record] = opened.records(RECORD)
        names = {key: name for name, key in weights.items()}
        ties = {names[tied]: names[key] for tied, key in record["ties"].items()}
        values = tuple(record["model"])
    in_model, remaining = ({name: described[name] for name in names} for names in (weights, others))
    return Stored(opened.path, in_model, fetch, ties, remaining, values, opened.manifest)
