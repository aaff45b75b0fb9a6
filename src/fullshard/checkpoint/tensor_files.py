"""Safetensors files, written tensor by tensor, and read row by row.

So no rank needs memory for more than one tensor. The safetensors library handles the format.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file
from torch import Tensor
from xxhash import xxh3_128

from fullshard.checkpoint.manifest import StoredFile, are_stored_files
from fullshard.errors import CheckpointError
from fullshard.regular_files import is_plain_name, read_regular, reopened

WEIGHTS = "model.safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
CHECKSUMS = "checksums.json"
_MOST_JSON_NBYTES = 256 << 20


@dataclass(frozen=True)
class Description:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """The name of the dtype, such as "float32"."""
        return str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype_name}"


def _code_of(dtype: torch.dtype) -> str | None:
    """Return the name of `dtype` in a safetensors file; None if the format does not support it."""
    try:
        return TensorSpec(
            dtype=str(dtype).removeprefix("torch."), shape=[0], data_ptr=_EMPTY.ctypes.data, data_len=0
        ).dtype
    except SafetensorError:
        return None


_EMPTY = numpy.zeros(1, numpy.uint8)
_DTYPES = {_code_of(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


# -- writing ----------------------------------------------------------------------------------------------------------


class TensorFile:
    """A new file. After its creation, tensors must be written in the order `order`.

    The library first writes a file of zeros, so that the disk space is allocated. The zeros are one untouched mapping,
    which takes no memory.

    Raises:
        CheckpointError: The format does not support the dtype of a tensor.
        OSError, SafetensorError: The file cannot be written.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Description], metadata: Mapping[str, str]) -> None:
        odd = [f"{name} ({tensor.dtype})" for name, tensor in tensors.items() if _code_of(tensor.dtype) is None]
        if odd:
            raise CheckpointError(f"a safetensors file cannot hold {', '.join(odd)}. Pass dtype=, or leave them out.")
        zeros = numpy.zeros(max((tensor.nbytes for tensor in tensors.values()), default=1), numpy.uint8)
        start = zeros.ctypes.data
        specs = {
            name: TensorSpec(dtype=tensor.dtype_name, shape=tensor.shape, data_ptr=start, data_len=tensor.nbytes)
            for name, tensor in tensors.items()
        }
        serialize_file(specs, path, dict(metadata))
        with safe_open(path, "pt") as file:
            self.order: tuple[str, ...] = tuple(file.offset_keys())
        self._file = path.open("r+b")
        self._checksum = xxh3_128()
        header_nbytes = path.stat().st_size - sum(tensor.nbytes for tensor in tensors.values())
        self._checksum.update(self._file.read(header_nbytes))
        self._nbytes = path.stat().st_size

    def write(self, tensor: Tensor) -> None:
        """Write the next tensor, which is on the CPU."""
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        self._file.write(raw)
        self._checksum.update(raw)

    def close(self) -> StoredFile:
        """Sync the file, and return its size and checksum."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        return StoredFile(self._nbytes, self._checksum.hexdigest())


def dumps_checksums(files: Mapping[str, StoredFile]) -> str:
    """Return the text of `checksums.json` for `files`."""
    return json.dumps({name: vars(stored) for name, stored in files.items()}, indent=1)


# -- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Merged:
    """A tensor that the files store in parts. Each part is a tensor in the files, or a `Merged`.

    Args:
        parts: The parts, in order.
        dim: The dim to concatenate them along; None to stack them along a new dim 0.
    """

    parts: tuple[Merged | str, ...]
    dim: int | None = None

    @property
    def names(self) -> Iterator[str]:
        """The names of the tensors in the files."""
        for part in self.parts:
            yield from [part] if isinstance(part, str) else part.names


_Place = tuple[int | slice, ...]  # a position in the tensor that is read
_Piece = tuple[str, list[range], _Place]  # a tensor in the files, index ranges in it, and their position in the result


@dataclass(frozen=True)
class TensorFiles:
    """The tensors of a file, or of a folder of files with an index."""

    path: Path
    tensors: Mapping[str, Description]
    places: Mapping[str, Path]  # the file of each tensor
    metadata: Mapping[str, str]
    checksums: Mapping[str, StoredFile] | None = None  # by file name, if fullshard has written them
    merged: Mapping[str, Merged] = field(default_factory=dict)  # tensors that the files store in parts
    whole: TensorFiles | None = None  # the same files with the parts instead of `merged`

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def ties(self) -> dict[str, str]:
        """Names that are not tensors, each with the tensor that has its values."""
        return {name: kept for name, kept in self.metadata.items() if kept in self.tensors and name not in self.tensors}

    def with_merged(self, merged: Mapping[str, Merged]) -> TensorFiles:
        """Return the same files with the tensors `merged` instead of their parts."""
        tensors = {name: _described_merged(name, item, self.tensors) for name, item in merged.items()}
        used = {name for item in merged.values() for name in item.names}
        kept = {name: tensor for name, tensor in self.tensors.items() if name not in used}
        return replace(self, tensors={**kept, **tensors}, merged=merged, whole=self)

    def read(self, wanted: Mapping[str, tuple[str, Sequence[range] | None]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors in `wanted`, file by file, on the CPU, each with its key.

        Args:
            wanted: By key, the name of a tensor, and the positions along each dim, or None for the full tensor.
        """
        for key, (name, spans) in wanted.items():
            if name in self.merged:
                yield key, self._read_merged(name, spans)
        wanted = {key: item for key, item in wanted.items() if item[0] not in self.merged}
        for path in dict.fromkeys(self.places[name] for name, _ in wanted.values()):
            with _opened(path) as file:
                for key, (name, spans) in wanted.items():
                    if self.places[name] == path:
                        yield key, _read(file, name, self.tensors[name], spans)

    def _read_merged(self, name: str, spans: Sequence[range] | None) -> Tensor:
        assert self.whole is not None, "set by `with_merged`"
        shape = self.tensors[name].shape
        spans = [range(size) for size in shape] if spans is None else list(spans)
        found = torch.empty([len(span) for span in spans], dtype=self.tensors[name].dtype, device="cpu")
        pieces = list(_pieces(self.merged[name], spans, self.whole.tensors))
        wanted = {str(number): (part, positions) for number, (part, positions, _) in enumerate(pieces)}
        for number, values in self.whole.read(wanted):
            found[pieces[int(number)][2]] = values
        return found


def _shape_of(of: Merged | str, tensors: Mapping[str, Description]) -> tuple[int, ...]:
    if isinstance(of, str):
        return tensors[of].shape
    first, *others = [_shape_of(part, tensors) for part in of.parts]
    if of.dim is None:
        return (len(of.parts), *first)
    return (*first[: of.dim], sum(other[of.dim] for other in (first, *others)), *first[of.dim + 1 :])


def _described_merged(name: str, merged: Merged, tensors: Mapping[str, Description]) -> Description:
    """Return the shape and dtype of a merged tensor."""

    def fits(of: Merged | str) -> bool:
        if isinstance(of, str):
            return True
        shapes = [_shape_of(part, tensors) for part in of.parts]
        if of.dim is not None:
            shapes = [(*shape[: of.dim], *shape[of.dim + 1 :]) for shape in shapes]
        return len(set(shapes)) == 1 and all(fits(part) for part in of.parts)

    dtypes = {tensors[part].dtype for part in merged.names}
    if not fits(merged) or len(dtypes) > 1:
        each = ", ".join(f"{part} {tensors[part]}" for part in list(merged.names)[:5])
        raise CheckpointError(f"{name} is stored in tensors that do not fit together, such as {each}. {_AGAIN}")
    return Description(_shape_of(merged, tensors), dtypes.pop())


def _pieces(of: Merged | str, spans: Sequence[range], tensors: Mapping[str, Description]) -> Iterator[_Piece]:
    """Yield the pieces to read for the index ranges `spans` of a tensor, each with its position in the result."""
    if isinstance(of, str):
        yield of, list(spans), tuple(slice(0, len(span)) for span in spans)
        return
    if of.dim is None:
        for row, number in enumerate(spans[0]):
            for name, positions, place in _pieces(of.parts[number], spans[1:], tensors):
                yield name, positions, (row, *place)
        return
    start, span = 0, spans[of.dim]
    for part in of.parts:
        size = _shape_of(part, tensors)[of.dim]
        first, last = max(span.start, start), min(span.stop, start + size)
        if first < last:
            within = [*spans[: of.dim], range(first - start, last - start), *spans[of.dim + 1 :]]
            for name, positions, place in _pieces(part, within, tensors):
                yield name, positions, _moved(place, of.dim, first - span.start)
        start += size


def _moved(place: _Place, dim: int, by: int) -> _Place:
    at = place[dim]
    moved = at + by if isinstance(at, int) else slice(at.start + by, at.stop + by)
    return (*place[:dim], moved, *place[dim + 1 :])


def _read(file: Any, name: str, there: Description, spans: Sequence[range] | None) -> Tensor:
    if spans is None or not spans or all(len(span) == size for span, size in zip(spans, there.shape, strict=True)):
        whole: Tensor = file.get_tensor(name)
        return whole
    if not all(map(len, spans)):
        return torch.empty([len(span) for span in spans], dtype=there.dtype, device="cpu")
    part: Tensor = file.get_slice(name)[tuple(slice(span.start, span.stop) for span in spans)]
    return part


def open_tensor_files(path: Path) -> TensorFiles:
    """Return the tensors at `path`: a file, an index, or a folder with an index or with one file."""
    index = _index_of(path)
    weight_map = {} if index is None else _weight_map(index)
    files = [_only_file(path)] if index is None else [index.parent / name for name in sorted(set(weight_map.values()))]
    tensors: dict[str, Description] = {}
    places: dict[str, Path] = {}
    metadata: dict[str, str] = {}
    for file in files:
        found, header = _described(file)
        twice = [name for name in found if name in tensors]
        if twice:
            raise CheckpointError(f"{file}: {twice[0]!r} is also in another file of the folder. {_AGAIN}")
        tensors |= found
        places |= dict.fromkeys(found, file)
        metadata |= header
    lost = [f"{name} in {file}" for name, file in weight_map.items() if name not in places or places[name].name != file]
    if lost:
        raise CheckpointError(f"{index}: expected {', '.join(lost[:5])}, found no such tensor there. {_AGAIN}")
    listed = [*files, *([] if index is None else [index])]
    return TensorFiles(path, tensors, places, metadata, _checksums(files[0].parent, [file.name for file in listed]))


_AGAIN = "Download the files again, or choose another checkpoint."


def _index_of(path: Path) -> Path | None:
    """Return the index at `path`; None for a file or a folder without one."""
    if path.name.endswith(INDEX_SUFFIX):
        return path
    found = sorted(path.glob(f"*{INDEX_SUFFIX}"))
    if len(found) > 1:
        raise CheckpointError(
            f"{path}: expected one index, found {', '.join(item.name for item in found)}. Pass the path of one of them."
        )
    return found[0] if found else None


def _weight_map(index: Path) -> dict[str, str]:
    """Return the name of the file of each tensor from the index."""
    content = _json(index, "an index of safetensors files")
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: expected an index of safetensors files, found no 'weight_map'. {_AGAIN}")
    odd = [name for name in weight_map.values() if not is_plain_name(name)]
    if odd:
        raise CheckpointError(f"{index}: expected names of files in the same folder, found {odd[0]!r}. {_AGAIN}")
    return weight_map


def _only_file(path: Path) -> Path:
    """Return the safetensors file at `path`: the file itself, `model.safetensors`, or the only file of a folder."""
    if not path.is_dir():
        return path
    found = [path / WEIGHTS] if (path / WEIGHTS).exists() else sorted(path.glob("*.safetensors"))
    if len(found) != 1:
        stated = f"{len(found)} of them, and no index" if found else "none"
        raise CheckpointError(
            f"{path}: expected a safetensors file, found {stated}. Pass a file, or a folder that contains one."
        )
    return found[0]


def _described(path: Path) -> tuple[dict[str, Description], dict[str, str]]:
    """Return the tensors of a file, without their values, and its metadata."""
    found: dict[str, Description] = {}
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118  # it is not a dict
            tensor = file.get_slice(name)
            code = tensor.get_dtype()
            if code not in _DTYPES:
                raise CheckpointError(f"{path}: expected a dtype of torch, found {code} of {name!r}.")
            found[name] = Description(tuple(tensor.get_shape()), _DTYPES[code])
        return found, file.metadata() or {}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Context manager that opens `path` without mapping it into memory. Error messages contain its name."""
    try:
        with reopened(path) as same, safe_open(same, "pt", backend="pread") as file:
            yield file
    except (SafetensorError, OSError) as error:
        stated = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{path}: expected a safetensors file, found one that cannot be read ({stated}). {_AGAIN}"
        ) from error


def _checksums(folder: Path, names: Sequence[str]) -> dict[str, StoredFile] | None:
    """Return the checksums of the files `names`; None if `folder` has none."""
    path = folder / CHECKSUMS
    if not path.exists():
        return None
    content = _json(path, "checksums")
    absent = [name for name in names if not isinstance(content, dict) or name not in content]
    if absent or not are_stored_files(content):
        found = f"none of {absent[0]}" if absent else "something else"
        raise CheckpointError(
            f"{path}: expected the checksums of {', '.join(names)}, found {found}. If the files were changed on "
            f"purpose, delete {CHECKSUMS}."
        )
    return {name: StoredFile(**content[name]) for name in names}


def _json(path: Path, expected: str) -> Any:
    try:
        return json.loads(read_regular(path, limit=_MOST_JSON_NBYTES))
    except OSError as error:
        raise CheckpointError(f"{path}: expected {expected}, found none ({error.strerror}). {_AGAIN}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: expected {expected}, found a file that cannot be parsed ({error}). {_AGAIN}"
        ) from error
