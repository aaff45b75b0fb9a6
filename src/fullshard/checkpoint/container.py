"""The container: `torch.distributed.checkpoint`'s own files, with checksums, and read without executing anything.

torch reads `.metadata` by pickle, and values that are no tensors by an unrestricted `torch.load`: both run whatever
code somebody has put there. Here the metadata is not unpickled (`metadata_file.py`), and values are read with
`weights_only=True`.
"""

from __future__ import annotations

import io
import math
import os
import struct
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import IO, Any
from zipfile import ZIP_STORED, ZipFile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from xxhash import xxh3_128

from fullshard._compat import storage_info
from fullshard.checkpoint import metadata_file
from fullshard.checkpoint.manifest import Progress, StoredFile
from fullshard.checkpoint.together import Ranks, failure_of_group, failure_of_some, said_by
from fullshard.disk.tensors import OnDisk
from fullshard.errors import CheckpointError
from fullshard.regular_files import open_regular, open_unbuffered, read_regular

__all__ = ["METADATA", "check_files", "read_metadata", "read_values", "write"]

METADATA = ".metadata"
_MOST_METADATA_NBYTES = 1 << 30


# -- writing ----------------------------------------------------------------------------------------------------------


def write(
    folder: Path,
    entries: dict[str, Any],
    *,
    ties: Mapping[str, str],
    ranks: Ranks,
    doing: str,
    progress: Progress | None = None,
) -> dict[str, StoredFile]:
    """Write `entries` to `folder`, each rank its own part; the files that this rank wrote, synced.

    Args:
        entries: nested dicts. An entry that several ranks have is written by one of them.
        ties: keys that are no entries, each with the key of the entry that has its values.
        doing: begins the message of an error.

    Raises:
        CheckpointError: some rank could not; the same error on every rank.
    """
    writer = _Writer(folder, ties, progress)
    with _failing_together(doing, ranks):
        dcp.save(
            entries,
            storage_writer=writer,
            planner=dcp.DefaultSavePlanner(),
            process_group=ranks.group,
            no_dist=not dist.is_initialized(),
        )
    return writer.fs.written


class _Writer(dcp.FileSystemWriter):
    """Writes one file a rank, with its checksum. `ties` cost an entry in the metadata, and no bytes.

    torch's own writer keeps all its copies in host memory until the last byte is out; here it is one tensor at a time,
    and none for tensors that are there already.
    """

    def __init__(self, folder: Path, ties: Mapping[str, str], progress: Progress | None) -> None:
        super().__init__(folder, sync_files=False)  # its own sync comes before the last bytes are out
        self.fs: _Files = _Files(progress)
        self._ties = ties

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.fs.total = sum(map(_nbytes, plan.items))
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        results: list[WriteResult] = []
        try:
            with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as stream:
                for item in plan.items:
                    data, start = planner.resolve_data(item), stream.tell()
                    if isinstance(data, Tensor):
                        torch.save(_alone(data), stream)
                    else:
                        stream.write(data.getbuffer())
                    nbytes = stream.tell() - start
                    results.append(WriteResult(item.index, nbytes, storage_info(name, start, nbytes)))
        except Exception as error:
            # torch.save turns an error of the disk into one that has lost its cause.
            raise CheckpointError(said_by(self.fs.error or error)) from error
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        for tied, key in self._ties.items():
            metadata.state_dict_metadata[tied] = metadata.state_dict_metadata[key]
            metadata.planner_data[tied] = tuple(tied.split(".", 1))
        by_key: dict[str, list[str]] = {}
        for tied, key in self._ties.items():
            by_key.setdefault(key, []).append(tied)
        aliases = [
            WriteResult(MetadataIndex(tied, item.index.offset, item.index.index), item.size_in_bytes, item.storage_data)
            for result in results
            for item in result
            for tied in by_key.get(item.index.fqn, [])
        ]
        super().finish(metadata, [*results, aliases])


def _alone(tensor: Tensor) -> Tensor:
    """`tensor` on the CPU, with no more in its storage: torch.save writes whole storages. A copy only if it must be."""
    local = tensor.detach().cpu().contiguous()
    if not local.numel():
        return local.clone()
    raw = local.reshape(-1).view(torch.uint8)
    return torch.from_numpy(raw.numpy()).view(local.dtype).reshape(local.shape)


def _nbytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


class _Files(FileSystem):
    """The files that one rank writes, with their sizes and checksums."""

    def __init__(self, progress: Progress | None) -> None:
        self.written: dict[str, StoredFile] = {}
        self.total = 0  # bytes of tensors that are to be written
        self.error: OSError | None = None
        self._progress = progress
        self._done = 0

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """A file to be written from its beginning to its end. It is synced when the context ends."""
        with Path(path).open(mode) as file:
            stream = _Stream(self, file)
            yield stream
            file.flush()
            os.fsync(file.fileno())
        self.written[Path(path).name] = StoredFile(stream.nbytes, stream.checksum.hexdigest())

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)

    def advance(self, nbytes: int) -> None:
        """Note that `nbytes` more bytes are written."""
        self._done += nbytes
        if self._progress is not None:
            self._progress(min(self._done, self.total), self.total)


class _Stream:
    """A file for torch to write to, with the checksum of all written bytes."""

    def __init__(self, files: _Files, file: IO[bytes]) -> None:
        self._files = files
        self._file = file
        self.nbytes = 0
        self.checksum = xxh3_128()

    def write(self, data: bytes | memoryview) -> int:
        """Write all of `data`."""
        try:
            count = self._file.write(data)
        except OSError as error:
            self._files.error = error
            raise
        self.checksum.update(data)
        self.nbytes += count
        self._files.advance(count)
        return count

    def tell(self) -> int:
        """Bytes written so far."""
        return self.nbytes

    def flush(self) -> None:
        """Nothing: it is flushed once, before it is synced."""

    def close(self) -> None:
        """Nothing: see `create_stream`."""


@contextmanager
def _failing_together(doing: str, ranks: Ranks) -> Iterator[None]:
    """A context in which torch's reports of failures on other ranks are raised as our own error."""
    try:
        with warnings.catch_warnings() if not dist.is_initialized() else nullcontext():
            if not dist.is_initialized():  # one process alone is a valid world
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except dcp.CheckpointException as error:
        failed = {rank: said_by(cause) for rank, (cause, _) in error.failures.items()}
        raise failure_of_some(doing, failed, ranks.world) from error
    except RuntimeError as error:
        raise failure_of_group(doing, error) from error


# -- reading ----------------------------------------------------------------------------------------------------------


def read_metadata(checkpoint: Path) -> Metadata:
    """The metadata of a checkpoint: its entries without their values. Nothing in the file is executed.

    Raises:
        CheckpointError: the file is missing, or is not a container's.
    """
    path = checkpoint / METADATA
    try:
        return metadata_file.loads(read_regular(path, limit=_MOST_METADATA_NBYTES))
    except OSError as error:
        raise CheckpointError(
            f"{path}: expected the metadata of a checkpoint, found none ({error.strerror}). Name the folder that "
            "torch.distributed.checkpoint or fullshard.checkpoint has written."
        ) from error
    except CheckpointError as error:
        raise CheckpointError(
            f"{path}: expected the metadata of a checkpoint, found something else ({error}). Nothing in it was "
            "executed. Load another checkpoint."
        ) from error


def check_files(checkpoint: Path, metadata: Metadata) -> None:
    """Check that every file that `metadata` refers to is a regular file with all the bytes that it says.

    Raises:
        CheckpointError: one is missing, is not a regular file, or is too short.
    """
    needed: dict[str, int] = {}
    for info in metadata.storage_data.values():
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
    for name, nbytes in needed.items():
        path = checkpoint / name
        try:
            with open_regular(path) as file:
                found = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise CheckpointError(
                f"{path}: expected {nbytes} bytes, found a file that cannot be read ({error.strerror}). Load another "
                "checkpoint."
            ) from error
        if found < nbytes:
            raise CheckpointError(f"{path}: expected {nbytes} bytes, found {found}. Load another checkpoint.")


def read_values(
    checkpoint: Path,
    metadata: Metadata,
    targets: dict[str, Any],
    *,
    ranks: Ranks,
    doing: str,
    ours: bool = False,
    progress: Progress | None = None,
) -> None:
    """Read the values of `targets`, by key: tensors in place, whole or sharded in any way; others are replaced.

    Args:
        ours: whether `write` has written it, so that the layout of a tensor in its file is known.

    Raises:
        CheckpointError: some rank could not; the same error on every rank.
    """
    with _failing_together(doing, ranks):
        dcp.load(
            targets,
            storage_reader=_Reader(checkpoint, metadata, ours=ours),
            planner=_Planner(progress),
            process_group=ranks.group,
            no_dist=not dist.is_initialized(),
        )


class _Reader(dcp.FileSystemReader):
    """Reads files whose metadata is known already.

    In our own files, rows that are wanted together are read straight into their target. torch would make a tensor of
    the whole entry first, and copy from that.
    """

    def __init__(self, checkpoint: Path, metadata: Metadata, *, ours: bool) -> None:
        super().__init__(checkpoint)
        self.fs = _RegularFiles()
        self._metadata = metadata
        self._ours = ours

    def read_metadata(self) -> Metadata:  # torch would look for a single rank's, did it take arguments
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        assert isinstance(planner, _Planner)
        planner.total = sum(math.prod(item.lengths) for item in plan.items)
        try:
            others = self._read_straight(plan.items, planner) if self._ours else plan.items
            return super().read_data(replace(plan, items=others), planner)
        except Exception as error:
            raise CheckpointError(said_by(error)) from error

    def _read_straight(self, items: list[ReadItem], planner: LoadPlanner) -> list[ReadItem]:
        """Read the items that are one piece in file and memory; returns the others."""
        others: list[ReadItem] = []
        by_file: dict[str, list[ReadItem]] = {}
        for item in items:
            target = planner.resolve_tensor(item).detach() if item.type is LoadItemType.TENSOR else None
            if target is None or not self._is_one_piece(item, target):
                others.append(item)
            else:
                by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, wanted in by_file.items():
            with open_unbuffered(Path(self.path) / name) as file:
                for item in wanted:
                    target = planner.resolve_tensor(item).detach()  # of what rests on a disk, memory for one at a time
                    _read_into(target, file, self._start_of(item, file))
                    planner.commit_tensor(item, target)
        return others

    def _is_one_piece(self, item: ReadItem, target: Tensor) -> bool:
        """True if `item` is whole rows of the entry, of the same dtype and order as in memory."""
        stored = self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(stored, TensorStorageMetadata)
        sizes = _sizes_of_chunk(stored, item)
        return (
            target.device.type == "cpu"
            and target.dtype == stored.properties.dtype
            and target.is_contiguous()
            and target.shape == item.lengths
            and item.lengths[1:] == sizes[1:]
        )

    def _start_of(self, item: ReadItem, file: io.RawIOBase) -> int:
        """The position in its file, in bytes, of the first row of `item`."""
        stored = self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(stored, TensorStorageMetadata)
        entry = self.storage_data[item.storage_index]
        itemsize = stored.properties.dtype.itemsize
        nbytes = math.prod(_sizes_of_chunk(stored, item)) * itemsize
        row_nbytes = math.prod(item.lengths[1:]) * itemsize
        first_row = item.storage_offsets[0] if item.storage_offsets else 0
        start: int = entry.offset
        return start + _start_of_tensor(_Entry(file, start, entry.length), nbytes) + first_row * row_nbytes


class _RegularFiles(FileSystem):
    """Opens regular files for reading, and nothing else."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        assert mode == "rb", "this file system only reads"
        with open_regular(path) as file:
            yield file


def _sizes_of_chunk(stored: TensorStorageMetadata, item: ReadItem) -> torch.Size:
    """The shape of the entry that `item` is read from."""
    return next(chunk.sizes for chunk in stored.chunks if chunk.offsets == item.storage_index.offset)


class _Entry(io.RawIOBase):
    """A stretch of a file as a file of its own."""

    def __init__(self, file: io.RawIOBase, start: int, nbytes: int) -> None:
        self._file = file
        self._start = start
        self._nbytes = nbytes
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        count = self._file.readinto(memoryview(buffer)[: max(0, self._nbytes - self._at)]) or 0
        self._at += count
        return count


def _start_of_tensor(entry: _Entry, nbytes: int) -> int:
    """The position, in bytes, of a tensor in the output of torch.save: a zip file with a record for these bytes alone.

    Raises:
        CheckpointError: the byte order is not this machine's, or the record has other than `nbytes` bytes.
    """
    with ZipFile(entry) as records:
        [record] = [item for item in records.infolist() if item.filename.endswith("/data/0")]
        order = records.read(record.filename.removesuffix("data/0") + "byteorder").decode()
    if order != sys.byteorder:
        raise CheckpointError(f"expected numbers in the order of bytes {sys.byteorder}, found {order}")
    if record.file_size != nbytes or record.compress_type != ZIP_STORED:
        raise CheckpointError(f"expected a tensor of {nbytes} bytes, found {record.file_size}")
    entry.seek(record.header_offset + 26)  # in the record's header: the lengths of its name, and of what follows
    name, more = struct.unpack("<HH", entry.read(4) or b"")
    return int(record.header_offset + 30 + name + more)


def _read_into(target: Tensor, file: io.RawIOBase, start: int) -> None:
    """Read the bytes of `file` from `start` on into a contiguous tensor on the CPU."""
    buffer = memoryview(target.reshape(-1).view(torch.uint8).numpy().data)
    file.seek(start)
    while buffer.nbytes:
        count = file.readinto(buffer)
        if not count:
            raise CheckpointError(f"expected {buffer.nbytes} more bytes from byte {file.tell()} on, found none")
        buffer = buffer[count:]


class _Planner(dcp.DefaultLoadPlanner):
    """Reads values that are no tensors without executing anything, and what rests on a disk by way of memory."""

    def __init__(self, progress: Progress | None) -> None:
        super().__init__()
        self.total = 0  # elements that are to be read
        self._progress = progress
        self._done = 0

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)

    def transform_tensor(self, read_item: ReadItem, tensor: Tensor) -> Tensor:
        if isinstance(tensor, OnDisk):
            return torch.empty(read_item.lengths, dtype=tensor.dtype)
        narrowed: Tensor = super().transform_tensor(read_item, tensor)
        return narrowed

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        rest = self.lookup_tensor(read_item.dest_index)
        if isinstance(rest, OnDisk):
            rest.store_part(read_item.dest_offsets, tensor)
        self._done += tensor.numel()
        if self._progress is not None:
            self._progress(self._done, self.total)
