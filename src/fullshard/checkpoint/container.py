"""The container: the file format of `torch.distributed.checkpoint`, with checksums, read without executing code.

torch reads `.metadata` with pickle, and values other than tensors with an unrestricted `torch.load`. Both execute any
code in the files. Here the metadata is not unpickled (`metadata_file.py`), and values are read with
`weights_only=True`.
"""

from __future__ import annotations

import io
import math
import os
import re
import struct
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile, is_zipfile

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
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from xxhash import xxh3_128

from fullshard._compat import storage_info
from fullshard.checkpoint import metadata_file
from fullshard.checkpoint.manifest import Progress, StoredFile
from fullshard.checkpoint.together import GroupRanks, failure_of_group, failure_of_some, reported_by
from fullshard.disk.tensors import OnDisk
from fullshard.errors import CheckpointError
from fullshard.regular_files import open_regular, open_unbuffered, read_regular

METADATA = ".metadata"
_MOST_METADATA_NBYTES = 1 << 30
_PIECE_NBYTES = 1 << 20


# -- writing ----------------------------------------------------------------------------------------------------------


def write(
    folder: Path,
    entries: dict[str, Any],
    *,
    ties: Mapping[str, str],
    ranks: GroupRanks,
    doing: str,
    progress: Progress | None = None,
) -> dict[str, StoredFile]:
    """Write this rank's part of `entries` to `folder`, and return the synced files of this rank.

    Args:
        entries: Nested dicts. An entry that several ranks have is written by one of them.
        ties: Keys that are not entries, each with the key of the entry that has its values.
        doing: The beginning of error messages.

    Raises:
        CheckpointError: A rank could not write. The same error is raised on every rank.
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
    """A storage writer for one file per rank, with its checksum. `ties` have an entry in the metadata, and no bytes.

    torch's own writer keeps all copies in host memory until the last byte is written. This one copies one tensor at a
    time, and does not copy tensors in host memory.
    """

    def __init__(self, folder: Path, ties: Mapping[str, str], progress: Progress | None) -> None:
        super().__init__(folder, sync_files=False)  # its own sync would come before the last bytes are written
        self.fs: _Files = _Files(progress)
        self._ties = ties

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors = (item.tensor_data for item in plan.items if item.tensor_data is not None)
        self.fs.total = sum(math.prod(data.chunk.sizes) * data.properties.dtype.itemsize for data in tensors)
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        results: list[WriteResult] = []
        try:
            with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as stream:
                for item in plan.items:
                    data, start = planner.resolve_data(item), stream.tell()
                    if isinstance(data, Tensor):
                        torch.save(_with_own_storage(data), stream)
                    else:
                        with data.getbuffer() as view:  # released after an error, too
                            stream.write(view)
                    nbytes = stream.tell() - start
                    results.append(WriteResult(item.index, nbytes, storage_info(name, start, nbytes)))
        except Exception as error:
            # torch.save converts a disk error into an error without its cause.
            raise CheckpointError(reported_by(self.fs.error or error)) from error
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


def _with_own_storage(tensor: Tensor) -> Tensor:
    """Return `tensor` on the CPU with a storage of its size, because torch.save writes whole storages."""
    local = tensor.detach().cpu().contiguous()
    if not local.numel():
        return local.clone()
    raw = local.reshape(-1).view(torch.uint8)
    return torch.from_numpy(raw.numpy()).view(local.dtype).reshape(local.shape)


class _Files(FileSystem):
    """The files that one rank writes, with their sizes and checksums."""

    def __init__(self, progress: Progress | None) -> None:
        self.written: dict[str, StoredFile] = {}
        self.total = 0  # bytes of all tensors to write
        self.error: OSError | None = None
        self._progress = progress
        self._done = 0

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a file for sequential writing. It is synced when the context ends."""
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
        """Record that `nbytes` more bytes were written."""
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
        """Return the number of bytes written so far."""
        return self.nbytes

    def flush(self) -> None:
        """Do nothing: the file is flushed once, before it is synced."""

    def close(self) -> None:
        """Do nothing: see `create_stream`."""


@contextmanager
def _failing_together(doing: str, ranks: GroupRanks) -> Iterator[None]:
    """Context manager that converts torch's errors about failures on other ranks into a `CheckpointError`."""
    try:
        with warnings.catch_warnings() if not dist.is_initialized() else nullcontext():
            if not dist.is_initialized():  # a single process is a valid world
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except dcp.CheckpointException as error:
        failed = {rank: reported_by(cause) for rank, (cause, _) in error.failures.items()}
        raise failure_of_some(doing, failed, ranks.world) from error
    except RuntimeError as error:
        raise failure_of_group(doing, error) from error


# -- reading ----------------------------------------------------------------------------------------------------------


def read_metadata(checkpoint: Path) -> Metadata:
    """Return the metadata of a checkpoint: its entries without their values. No code in the file is executed."""
    path = checkpoint / METADATA
    try:
        return metadata_file.loads(read_regular(path, limit=_MOST_METADATA_NBYTES))
    except OSError as error:
        raise CheckpointError(
            f"{path}: expected the metadata of a checkpoint, found none ({error.strerror}). Pass the folder that "
            "torch.distributed.checkpoint or fullshard.checkpoint wrote."
        ) from error
    except CheckpointError as error:
        raise CheckpointError(
            f"{path}: expected the metadata of a checkpoint, found something else ({error}). Nothing in it was "
            "executed. Load another checkpoint."
        ) from error


def check_files(checkpoint: Path, metadata: Metadata) -> None:
    """Check that every file that `metadata` refers to is a regular file of at least the required size."""
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
    ranks: GroupRanks,
    doing: str,
    record: bool = False,
    progress: Progress | None = None,
) -> None:
    """Read the values of `targets` by key. Tensors, sharded or not, are filled in place. Other values are replaced.

    Raises:
        CheckpointError: A rank could not read. The same error is raised on every rank.
    """
    with _failing_together(doing, ranks):
        dcp.load(
            targets,
            storage_reader=_Reader(checkpoint, metadata, record=record),
            planner=_Planner(progress),
            process_group=ranks.group,
            no_dist=not dist.is_initialized(),
        )


class _Reader(dcp.FileSystemReader):
    """A storage reader with known metadata, which compares what it reads with the metadata.

    In files written by `write` (`record`), contiguous rows are read directly into their target. Otherwise the entire
    entry is read first.
    """

    def __init__(self, checkpoint: Path, metadata: Metadata, *, record: bool) -> None:
        super().__init__(checkpoint)
        self._metadata = metadata
        self._own = record

    def read_metadata(self) -> Metadata:  # with arguments, torch would look for the metadata of a single rank
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        assert isinstance(planner, _Planner)
        planner.total = sum(math.prod(item.lengths) for item in plan.items)
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        try:
            for name, items in by_file.items():
                with open_unbuffered(Path(self.path) / name) as file:
                    for item in items:
                        self._read(item, file, planner)
        except Exception as error:
            raise CheckpointError(reported_by(error)) from error
        read: Future[None] = Future()
        read.set_result(None)
        return read

    def _read(self, item: ReadItem, file: io.FileIO, planner: _Planner) -> None:
        info = self.storage_data[item.storage_index]
        target = planner.resolve_tensor(item).detach() if item.type is LoadItemType.TENSOR else None
        found: Any = None
        try:
            if target is not None and self._own and self._is_contiguous(item, target):
                _read_into(target, file, self._start_of(item, target, file))
            else:
                entry: Any = _Entry(file, info.offset, info.length)
                check_archive(entry, info.length, reads=not self._own)  # own files are verified already
                entry.seek(0)
                found = torch.load(entry, map_location="cpu", weights_only=True)
                if target is not None:
                    found = self._part_of(found, item)
        except Exception as error:  # invalid bytes can make torch raise any error
            raise CheckpointError(
                f"{Path(self.path) / info.relative_path}: {item.storage_index.fqn!r} at byte {info.offset} cannot be "
                f"read ({reason_of(error)}). Load another checkpoint."
            ) from error
        if target is None:
            planner.original_state_dict[item.dest_index.fqn] = found
            return
        if found is not None:
            target.copy_(found)
        planner.commit_tensor(item, target)

    def _part_of(self, chunk: Any, item: ReadItem) -> Tensor:
        """Check that the stored `chunk` is what the metadata describes, and return the part `item` of it."""
        stored: Any = self._metadata.state_dict_metadata[item.storage_index.fqn]
        shape, dtype = self._shape_of_chunk(item), stored.properties.dtype
        if not isinstance(chunk, Tensor) or (chunk.shape, chunk.dtype, chunk.layout) != (shape, dtype, torch.strided):
            found = f"one of {tuple(chunk.shape)} {chunk.dtype}" if isinstance(chunk, Tensor) else type(chunk).__name__
            raise CheckpointError(f"expected a dense tensor of {tuple(shape)} {dtype}, found {found}")
        part: Tensor = chunk
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    def _shape_of_chunk(self, item: ReadItem) -> torch.Size:
        """Return the shape of the stored chunk that `item` is read from."""
        stored = self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(stored, TensorStorageMetadata)
        return next(chunk.sizes for chunk in stored.chunks if chunk.offsets == item.storage_index.offset)

    def _is_contiguous(self, item: ReadItem, target: Tensor) -> bool:
        """Return True if `item` consists of entire rows of the chunk, and `target` has the same layout in memory."""
        stored: Any = self._metadata.state_dict_metadata[item.storage_index.fqn]
        return (
            target.device.type == "cpu"
            and target.dtype == stored.properties.dtype
            and target.is_contiguous()
            and target.shape == item.lengths
            and item.lengths[1:] == self._shape_of_chunk(item)[1:]
        )

    def _start_of(self, item: ReadItem, target: Tensor, file: io.RawIOBase) -> int:
        """Return the position of the first row of `item` in its file, in bytes."""
        entry = self.storage_data[item.storage_index]
        nbytes = math.prod(self._shape_of_chunk(item)) * target.itemsize
        row_nbytes = math.prod(item.lengths[1:]) * target.itemsize
        first_row = item.storage_offsets[0] if item.storage_offsets else 0
        start: int = entry.offset
        return start + _start_of_tensor(_Entry(file, start, entry.length), nbytes) + first_row * row_nbytes


class _Entry(io.RawIOBase):
    """A byte range of a file that behaves like a separate file."""

    def __init__(self, file: io.RawIOBase, start: int, nbytes: int) -> None:
        self._file = file
        self._start = start
        self.nbytes = nbytes
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.nbytes}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        found = memoryview(buffer)[: max(0, self.nbytes - self._at)]
        self._file.seek(self._start + self._at)
        start = self._at
        while found and (count := self._file.readinto(found)):  # the system may return fewer bytes than requested
            found = found[count:]
            self._at += count
        return self._at - start


@contextmanager
def _records(file: Any, nbytes: int) -> Iterator[ZipFile]:
    """Open the output of torch.save of `nbytes` bytes, a zip file whose records are not compressed.

    Raises:
        CheckpointError: It is damaged, or its records are larger than the file. Expanding them could take all memory.
    """
    try:
        with ZipFile(file) as records:
            expanded = sum(record.file_size for record in records.infolist())
            if expanded > nbytes:
                raise CheckpointError(f"its records have {expanded} bytes, but it has only {nbytes}")
            yield records
    except BadZipFile as error:
        raise CheckpointError(f"it is damaged: {error}") from error


def check_archive(file: Any, nbytes: int, *, reads: bool = True) -> None:
    """Check that reading the output of torch.save does not take more memory than its size, and compare its checksums.

    Args:
        file: A path or an open file. Files in torch's old format are never compressed, and have no checksums.
        nbytes: Its size.
        reads: Whether to compare checksums, which reads the file once.
    """
    if is_zipfile(file):
        with _records(file, nbytes) as records:
            for record in (item for item in records.infolist() if reads and item.CRC):  # 0 if torch did not compute it
                with records.open(record) as content:
                    while content.read(_PIECE_NBYTES):
                        pass


def reason_of(error: Exception) -> str:
    """Return the class that torch.load rejects, or the reason in its message, which is long."""
    text = reported_by(error)
    named = re.search(r"GLOBAL (\S+)", text)
    return f"it names {named[1]}" if named else text.rpartition("WeightsUnpickler error: ")[2].partition("\n")[0]


def _start_of_tensor(entry: _Entry, nbytes: int) -> int:
    """Return the byte position of a tensor in the output of torch.save, a zip file with one record for the bytes.

    Raises:
        CheckpointError: The byte order is not this machine's, or the size of the record is not `nbytes`.
    """
    with _records(entry, entry.nbytes) as records:
        [record] = [item for item in records.infolist() if item.filename.endswith("/data/0")]
        order = records.read(record.filename.removesuffix("data/0") + "byteorder").decode()
    if order != sys.byteorder:
        raise CheckpointError(f"expected byte order {sys.byteorder}, found {order}")
    if record.file_size != nbytes or record.compress_type != ZIP_STORED:
        raise CheckpointError(f"expected a tensor of {nbytes} bytes, found {record.file_size}")
    entry.seek(record.header_offset + 26)  # the position of the lengths of the name and the extra field
    name, more = struct.unpack("<HH", entry.read(4) or b"")
    return int(record.header_offset + 30 + name + more)


def _read_into(target: Tensor, file: io.RawIOBase, start: int) -> None:
    """Read the bytes of `file` from position `start` into a contiguous CPU tensor."""
    buffer = memoryview(target.reshape(-1).view(torch.uint8).numpy().data)
    file.seek(start)
    while buffer.nbytes:
        count = file.readinto(buffer)
        if not count:
            raise CheckpointError(f"expected {buffer.nbytes} more bytes from byte {file.tell()} on, found none")
        buffer = buffer[count:]


class _Planner(dcp.DefaultLoadPlanner):
    """A load planner that supports tensors on disk."""

    def __init__(self, progress: Progress | None) -> None:
        super().__init__()
        self.total = 0  # the number of elements to read
        self._progress = progress
        self._done = 0

    def transform_tensor(self, read_item: ReadItem, tensor: Tensor) -> Tensor:
        if isinstance(tensor, OnDisk):
            return torch.empty(read_item.lengths, dtype=tensor.dtype, device="cpu")
        narrowed: Tensor = super().transform_tensor(read_item, tensor)
        return narrowed

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        remaining = self.lookup_tensor(read_item.dest_index)
        if isinstance(remaining, OnDisk):
            remaining.store_part(read_item.dest_offsets, tensor)
        self._done += tensor.numel()
        if self._progress is not None:
            self._progress(self._done, self.total)
