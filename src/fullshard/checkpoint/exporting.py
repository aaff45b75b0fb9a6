"""Export of a model for other tools: a folder of safetensors files that is complete or does not exist.

Tensors are gathered one at a time and written by the first rank. No rank holds more than one unsharded tensor.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard._compat import dtensor_like
from fullshard.checkpoint.contents import model_state, tied_names
from fullshard.checkpoint.folder import discard, sync, write_synced
from fullshard.checkpoint.manifest import Progress, StoredFile
from fullshard.checkpoint.stored import Stored
from fullshard.checkpoint.tensor_files import (
    CHECKSUMS,
    INDEX_SUFFIX,
    WEIGHTS,
    Description,
    TensorFile,
    dumps_checksums,
)
from fullshard.checkpoint.together import GroupRanks, default_ranks
from fullshard.disk.interface import errors_noted_by
from fullshard.engine.findings import DiskFailures
from fullshard.engine.registry import unwrapped
from fullshard.engine.sharded_param import full_copy
from fullshard.errors import CheckpointError, ConfigError
from fullshard.policy.arguments import parse_size


def export_safetensors(
    model: nn.Module,
    folder: str | PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write the weights of `model` to `folder` in the format of Hugging Face's tools, and return its path.

    Every rank must call it. It writes `model.safetensors`, or several files and `model.safetensors.index.json`; the
    `config.json` of a model that has one, so that `from_pretrained` can open the folder; and `checksums.json`, so that
    `load_safetensors` can detect damage. Weights are gathered one at a time, so no rank holds more than its shards and
    one weight. Tied weights are written once. The metadata of the files lists their other names. If a process is killed
    during the export, `folder` remains empty or absent.

    Args:
        model: The model, sharded or not.
        folder: The folder. It must not exist, or must be empty.
        max_shard_size: Maximum bytes of tensors per file, as a number or a string such as "500MB". A larger tensor gets
            a separate file.
        dtype: The dtype of floating-point tensors in the files. None keeps their dtypes.
        metadata: Text to store in each file.
        progress: Called with the bytes of tensors written so far and in total.

    Raises:
        CheckpointError: The folder exists already, the model has state that is not a tensor or has no values, ranks
            have different models or arguments, or the first rank cannot write. The same error is raised on every rank.
        ConfigError: An argument is not supported.
    """
    export = _Export(Path(folder), parse_size(max_shard_size, "max_shard_size", "a file"), dtype, dict(metadata or {}))
    ranks = default_ranks()
    state, ties = ranks.do(export.doing, lambda: _weights(model))

    def fetch(name: str) -> Tensor:
        value = state[name]
        if not isinstance(value, DTensor):
            return value
        return full_copy(dtensor_like(value.to_local().to(value.device_mesh.device_type), value))

    export.write(_described(state), ties, ranks, fetch, partial(_configs, model), progress)
    return export.folder


def write_safetensors(state: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write `state`, sharded or not, to the single file `path`. Tensors are gathered one at a time.

    Every rank must call it, and the first rank writes.

    Args:
        state: Tensors by FQN, with the same names in the same order on every rank.
        path: The file to write. An existing file is replaced once the new one is complete.
        metadata: Text to store in the header of the file.

    Raises:
        CheckpointError: Ranks have different tensors, or the first rank cannot write. The same error is raised on every
            rank.
    """
    ranks = default_ranks()
    doing = f"writing {path}"
    unfinished = path.with_name(f"{path.name}.tmp")
    tensors = _described(state)
    ranks.check_same(doing, {name: str(tensor) for name, tensor in tensors.items()})
    writer = _ExportWriter(unfinished, tensors, metadata or {})
    failures = DiskFailures()
    try:
        with errors_noted_by(failures.noted):
            for name in ranks.once(doing, writer.begin):
                value = state[name]
                writer.write(full_copy(value) if isinstance(value, DTensor) else value, value.dtype)
        ranks.do(doing, lambda: _raise_first(failures))
        ranks.once(doing, writer.close)
        ranks.once(doing, lambda: unfinished.replace(path))
    except BaseException:
        if ranks.leads:
            with suppress(OSError):
                unfinished.unlink()
        raise


def _raise_first(failures: DiskFailures) -> None:
    for error in failures.take():
        raise error


def _described(state: Mapping[str, Tensor]) -> dict[str, Description]:
    return {name: Description(tuple(value.shape), value.dtype) for name, value in state.items()}


def export_stored(
    stored: Stored,
    folder: Path,
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write the weights of a checkpoint in the format of `export_safetensors`, in a single process.

    No model is created, and only one tensor is in memory at a time.

    Raises:
        CheckpointError: The folder exists already, the model had state that is not a tensor, or reading or writing
            failed.
        ConfigError: An argument is not supported.
    """
    export = _Export(folder, parse_size(max_shard_size, "max_shard_size", "a file"), dtype, {})
    if stored.values:
        raise CheckpointError(_no_tensors(stored.path, stored.values))
    if not stored.weights:
        raise CheckpointError(f"{stored.path}: expected the weights of a model, found none. Choose another checkpoint.")
    kept = {name: weight for name, weight in stored.weights.items() if name not in stored.ties}
    export.write(kept, stored.ties, GroupRanks(), stored.fetch, lambda _: {}, progress)
    return folder


def _no_tensors(where: object, names: Iterable[str]) -> str:
    return (
        f"{where}: {', '.join(names)} are not tensors, and a safetensors file can only hold tensors. Leave them out of "
        "the state dict."
    )


def _weights(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of `model` by FQN, and the additional names of tied tensors."""
    state, tied = model_state(model), tied_names(model)
    ties = {name: kept for name, kept in tied.items() if name in state and kept in state}
    weights = {name: value for name, value in state.items() if name not in ties}
    odd = [name for name, value in weights.items() if not isinstance(value, Tensor)]
    if odd:
        raise CheckpointError(_no_tensors("the model", odd))
    empty = [name for name, value in weights.items() if value.is_meta]
    if empty:
        raise CheckpointError(
            f"{len(empty)} tensors of the model are on the meta device, such as {empty[0]}. Initialize or load them "
            "first."
        )
    return weights, ties


def _configs(model: nn.Module, written: Mapping[str, Description]) -> dict[str, Any]:
    """Return the files that transformers stores next to the weights of its models, as JSON by file name."""
    inner = unwrapped(model)
    found: dict[str, Any] = {}
    for attribute in ("config", "generation_config"):
        to_json = getattr(getattr(inner, attribute, None), "to_json_string", None)
        if callable(to_json):
            found[f"{attribute}.json"] = json.loads(to_json())
    config = found.get("config.json")
    if config is not None:
        config["architectures"] = [type(inner).__name__.removeprefix("FSDP")]
        names = [item.dtype_name for item in written.values() if item.dtype.is_floating_point]
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = next(iter(names), None)
    return found


@dataclass(frozen=True)
class _Export:
    """The folder and the options of an export."""

    folder: Path
    max_shard_nbytes: int
    dtype: torch.dtype | None
    metadata: dict[str, str]

    def __post_init__(self) -> None:
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ConfigError(
                f"dtype={self.dtype}: weights can only be cast to a floating-point dtype. Pass one, such as "
                "torch.bfloat16."
            )
        odd = [repr(item) for pair in self.metadata.items() for item in pair if not isinstance(item, str)]
        if odd:
            raise ConfigError(
                f"metadata has {odd[0]}: the metadata of a safetensors file can only hold strings. Pass strings."
            )

    @property
    def doing(self) -> str:
        """The beginning of error messages."""
        return f"exporting to {self.folder}"

    def write(
        self,
        tensors: Mapping[str, Description],
        ties: Mapping[str, str],
        ranks: GroupRanks,
        fetch: Callable[[str], Tensor],
        configs: Callable[[Mapping[str, Description]], Mapping[str, Any]],
        progress: Progress | None = None,
    ) -> None:
        """Write `tensors`. Every rank must call it, and the first rank writes.

        Args:
            tensors: The shapes and dtypes of the tensors, by name.
            ties: Additional names of the tensors, each with its name in `tensors`.
            ranks: The ranks.
            fetch: Returns a tensor by name.
            configs: Returns the JSON files to write next to `tensors`, by file name.
            progress: Called with the bytes written so far and in total.

        Raises:
            CheckpointError: Ranks have different tensors, the first rank cannot write, or a rank cannot read weights
                that are offloaded to a disk. The same error is raised on every rank.
        """
        tensors = {name: self._cast(tensor) for name, tensor in tensors.items()}
        total = sum(tensor.nbytes for tensor in tensors.values())
        metadata = {"format": "pt", **ties, **self.metadata}
        files = self._divided(tensors)
        ranks.check_same(self.doing, {name: f"{tensors[name]} in {file}" for file in files for name in files[file]})
        unfinished = ranks.once(self.doing, self._begin)
        written: dict[str, StoredFile] = {}
        done = 0
        try:
            for file, names in files.items():
                writer = _ExportWriter(unfinished / file, {name: tensors[name] for name in names}, metadata)
                failures = DiskFailures()
                with errors_noted_by(failures.noted):
                    for name in ranks.once(self.doing, writer.begin):
                        writer.write(fetch(name), tensors[name].dtype)
                        done += tensors[name].nbytes
                        if progress is not None:
                            progress(done, total)
                ranks.do(self.doing, partial(_raise_first, failures))
                written[file] = ranks.once(self.doing, writer.close)
            ranks.once(self.doing, lambda: self._commit(unfinished, files, total, written, configs(tensors)))
        except CheckpointError:
            if ranks.leads:
                discard(unfinished)
            raise

    def _cast(self, tensor: Description) -> Description:
        if self.dtype is None or not tensor.dtype.is_floating_point:
            return tensor
        return replace(tensor, dtype=self.dtype)

    def _divided(self, tensors: Mapping[str, Description]) -> dict[str, list[str]]:
        """Return the names of the tensors in each file, in the order of the model."""
        files: list[list[str]] = [[]]
        nbytes = 0
        for name, tensor in tensors.items():
            if files[-1] and nbytes + tensor.nbytes > self.max_shard_nbytes:
                files.append([])
                nbytes = 0
            files[-1].append(name)
            nbytes += tensor.nbytes
        if len(files) == 1:
            return {WEIGHTS: files[0]}
        stem = WEIGHTS.removesuffix(".safetensors")
        return {f"{stem}-{i:05d}-of-{len(files):05d}.safetensors": names for i, names in enumerate(files, 1)}

    def _begin(self) -> Path:
        """Create a temporary folder next to the final one. Remove the temporary folders of killed exports."""
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise CheckpointError("the folder is not empty. Choose a folder that does not exist or is empty.")
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        beginning = f"{self.folder.name}.partial-"
        for left in self.folder.parent.iterdir():
            if re.fullmatch(re.escape(beginning) + "[0-9a-f]{32}", left.name):
                discard(left)
        unfinished = self.folder.with_name(f"{beginning}{uuid.uuid4().hex}")
        unfinished.mkdir()
        return unfinished

    def _commit(
        self,
        unfinished: Path,
        files: Mapping[str, list[str]],
        total: int,
        written: dict[str, StoredFile],
        configs: Mapping[str, Any],
    ) -> None:
        for name, config in configs.items():
            write_synced(unfinished / name, (json.dumps(config, indent=2) + "\n").encode())
        if len(files) > 1:
            weight_map = {name: file for file, names in files.items() for name in names}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            name = WEIGHTS.removesuffix(".safetensors") + INDEX_SUFFIX
            written = written | {name: write_synced(unfinished / name, (json.dumps(index, indent=2) + "\n").encode())}
        write_synced(unfinished / CHECKSUMS, dumps_checksums(written).encode())
        sync(unfinished)
        unfinished.rename(self.folder)
        sync(self.folder.parent)


class _ExportWriter:
    """One file on the first rank. `close` raises the errors of `write`, because other ranks gather until then."""

    def __init__(self, path: Path, tensors: Mapping[str, Description], metadata: Mapping[str, str]) -> None:
        self._path = path
        self._tensors = tensors
        self._metadata = metadata
        self._file: TensorFile | None = None
        self._error: Exception | None = None

    def begin(self) -> tuple[str, ...]:
        """Lay out the file, and return the names of its tensors in the order of writing."""
        self._file = TensorFile(self._path, self._tensors, self._metadata)
        return self._file.order

    def write(self, whole: Tensor, dtype: torch.dtype) -> None:
        """Write the next tensor."""
        if self._file is None or self._error is not None:
            return
        try:
            self._file.write(whole.detach().to("cpu", dtype))
        except Exception as error:
            self._error = error

    def close(self) -> StoredFile:
        """Close the file, and return its size and checksum."""
        assert self._file is not None
        stored = self._file.close()
        if self._error is not None:
            raise self._error
        return stored
