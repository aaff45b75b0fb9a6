"""Optimizer states that are on a disk between steps, and in a few buffers during a step.

[Note: a step in chunks]
Parameters with states on the disk are updated one chunk at a time. The states of one chunk are contiguous in the file,
in one extent. Three buffers are used in turn: while one chunk is updated, the next one is read and the previous one is
written.

    disk       read 0   read 1   write 0, read 2   write 1, read 3   ...
    optimizer           step 0   step 1            step 2            ...

Shards and gradients of units with parameters on the disk are read with the states, and the shards are written. When
computing on the CPU, the buffers are freed after the step, since forward and backward need most memory.

The states are always the same `DTensor`s. Their local tensor is a view of a buffer while their chunk is updated, and an
`OnDisk` tensor otherwise. If a chunk has no extent for its states, as in the first step or after `load_state_dict`, it
is updated with its current states, and gets an extent afterwards.

Disk failures are reported on all ranks at the end of the step. They are also reported after the first chunk that gets
an extent, which allocates the space for all chunks. See [Note: a disk that fails on one rank] in `engine/findings.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard._compat import dtensor_like, holds_tensors, local_tensor, set_local_tensor
from fullshard.device.accelerator import accelerator_for
from fullshard.disk.buffers import buffers_of
from fullshard.disk.files import DiskWork, aligned_buffer
from fullshard.disk.interface import ALIGNMENT, BUFFERS, aligned
from fullshard.disk.pace import pace_of
from fullshard.disk.space import Extent, Scratch
from fullshard.disk.tensors import OnDisk, no_buffer
from fullshard.engine.findings import DiskFailures
from fullshard.engine.managed import Managed, managed_by
from fullshard.engine.registry import process_groups_along
from fullshard.engine.unit import Unit
from fullshard.layout.group_layout import ALIGNMENT_BYTES
from fullshard.layout.offsets import aligned_offsets
from fullshard.state.optim_kinds import ChunkedSteps

Key = tuple[int, str]  # the index of a parameter in its chunk, and the name of a state


@dataclass(eq=False)
class _Chunk:
    """Parameters that are updated together, and the storage of their states."""

    params: list[nn.Parameter]
    scratch: Scratch
    disk_tensors: dict[Key, OnDisk] = field(default_factory=dict)  # all in one extent
    buffer: Tensor = field(default_factory=no_buffer)  # host memory that the extent is read into
    block: Tensor = field(default_factory=no_buffer)  # the same data on the device that updates the chunk
    views: dict[Key, Tensor] = field(default_factory=dict)  # views of `block`, which the states hold during the step
    reading: DiskWork | None = None
    shards: ShardsInMemory | None = None  # shards on the disk, and their gradients, during the step

    @property
    def extent(self) -> Extent | None:
        """The chunk's extent in the file; None until it has states."""
        return next((stored.extent for stored in self.disk_tensors.values()), None)

    @property
    def is_offloaded(self) -> bool:
        """True if the CPU updates the chunk alongside a device that computes."""
        return self._unit.shards.is_offloaded

    @property
    def _unit(self) -> Unit:
        managed = managed_by(self.params[0])
        assert managed is not None, "what has a policy has a unit"
        unit: Unit = managed.unit
        return unit

    def where_it_is_stepped(self) -> AbstractContextManager[object]:
        """Return a context for creating tensors on the device that updates this chunk."""
        return accelerator_for(self._unit.device).on_host() if self.is_offloaded else nullcontext()

    def new_buffer(self, nbytes: int) -> Tensor:
        """Return host memory for the chunk's states."""
        with self.where_it_is_stepped():
            return aligned_buffer(nbytes)

    @property
    def has_grads(self) -> bool:
        """True if any parameter has a gradient."""
        return any(param.grad is not None for param in self.params)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's shards of the parameters."""
        return sum(local_tensor(param).nbytes for param in self.params)

    def states(self, optimizer: Optimizer) -> dict[Key, DTensor]:
        """Return the current states of `optimizer` that are on the disk between steps."""
        return {
            (number, name): value
            for number, param in enumerate(self.params)
            if param.ndim and param in optimizer.state
            for name, value in optimizer.state[param].items()
            if isinstance(value, DTensor) and value.shape == param.shape and not holds_tensors(value._local_tensor)
        }


class StatesOnDisk:
    """The states of one optimizer on a disk. See [Note: a step in chunks]."""

    def __init__(self, chunks: Iterable[tuple[Path, list[nn.Parameter]]], name: str) -> None:
        scratches: dict[Path, Scratch] = {}
        self._chunks = [
            _Chunk(params, scratches.setdefault(folder, Scratch(folder, name))) for folder, params in chunks
        ]
        self._chunk_of = {id(param): chunk for chunk in self._chunks for param in chunk.params}
        self._buffers = {is_host: [no_buffer() for _ in range(BUFFERS)] for is_host in (False, True)}
        self._writes = [DiskWork([]) for _ in range(BUFFERS)]
        self._buffer_nbytes = 0
        self._failures = DiskFailures()

    @property
    def nbytes(self) -> int:
        """Bytes of states on the disk, rounded up to whole blocks in each chunk."""
        return sum(self.chunks)

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of the buffers in the last step."""
        return self._buffer_nbytes

    @property
    def chunks(self) -> list[int]:
        """Bytes of each chunk on the disk, in the order of their steps."""
        return [chunk.extent.nbytes for chunk in self._chunks if chunk.extent is not None]

    def holds(self, param: Tensor) -> bool:
        """Return True if the states of `param` are on the disk."""
        return id(param) in self._chunk_of

    def step(
        self, optimizer: Optimizer, run: Callable[[Sequence[nn.Parameter]], None], without: Collection[int] = ()
    ) -> None:
        """Update all parameters of `optimizer`, except for those with ids in `without`. Call `run` for each chunk.

        Raises:
            DiskError: States cannot be read or written on some rank. Earlier chunks have already been updated.
        """
        for param in (item for group in optimizer.param_groups for item in group["params"] if item.grad is not None):
            optimizer.state[param]  # creates entries in the order of a step without chunks
        todo = [chunk for chunk in self._chunks if chunk.has_grads]
        self._begin_to_read(todo, 0)
        params = (item for group in optimizer.param_groups for item in group["params"])
        stored = [param for param in params if not self.holds(param) and id(param) not in without]
        bring_to_memory(optimizer, stored)
        run(stored)
        takes_room = next((chunk for chunk in todo if chunk.extent is None), None)
        for number, chunk in enumerate(todo):
            self._begin_to_read(todo, number + 1)
            self._fill(chunk, optimizer)
            try:
                if isinstance(optimizer, ChunkedSteps):  # it communicates in its steps, and selects devices itself
                    run(chunk.params)
                elif not self._failures:
                    with chunk.where_it_is_stepped():
                        run(chunk.params)
            except BaseException:
                self._empty(chunk, optimizer)
                raise
            self._begin_to_write(chunk, optimizer, number)
            if chunk.shards is not None:
                with self._failures.noted():
                    chunk.shards.end(writes=not self._failures)
                chunk.shards = None
            if chunk is takes_room:
                self._raise_failures()
        self._raise_failures()
        self._drop_buffers()
        for folder in dict.fromkeys(chunk.scratch.folder for chunk in self._chunks):
            pace_of(folder).check()

    def _drop_buffers(self) -> None:
        """Drop the buffers of this step. They are freed after the last chunks have been written."""
        self._buffer_nbytes = sum(buffer.numel() for buffers in self._buffers.values() for buffer in buffers)
        device = next(self._managed).unit.device
        if not accelerator_for(device).has_streams:
            for buffers in self._buffers.values():
                buffers[:] = [no_buffer() for _ in buffers]
        buffers_of(device).drop()

    @property
    def _managed(self) -> Iterator[Managed]:
        """The engine's entries for the parameters."""
        return filter(None, (managed_by(param) for chunk in self._chunks for param in chunk.params))

    def write_all(self, optimizer: Optimizer) -> None:
        """Write all states that are in memory to the disk, such as those of a step that was not taken in chunks.

        Raises:
            DiskError: A write failed on some rank.
        """
        lacking = [
            (number, chunk)
            for number, chunk in enumerate(self._chunks)
            if any(value._local_tensor is not chunk.disk_tensors.get(key) for key, value in _items(chunk, optimizer))
        ]
        for number, chunk in lacking:
            self._begin_to_write(chunk, optimizer, number)
        if lacking:
            self._raise_failures()
            self._drop_buffers()

    def expect(self, dtypes: Mapping[tuple[int, str], torch.dtype]) -> None:
        """Allocate space for states that will be loaded, given their dtypes by id of the parameter and name."""
        for chunk in self._chunks:
            forms = {
                (number, name): _DiskForm(local_tensor(param).shape, dtype, local_tensor(param).device)
                for number, param in enumerate(chunk.params)
                for (key, name), dtype in dtypes.items()
                if key == id(param) and param.ndim
            }
            if forms:
                self._make_room(chunk, forms)

    def place_of(self, param: nn.Parameter, name: str) -> OnDisk | None:
        """Return the tensor on disk for the state `name` of `param`; None if no space is allocated for this name."""
        chunk = self._chunk_of.get(id(param))
        if chunk is None:
            return None
        number = next(number for number, known in enumerate(chunk.params) if known is param)
        return chunk.disk_tensors.get((number, name))

    def _raise_failures(self) -> None:
        """Raise on all ranks that have these parameters if the disk of one of them has failed."""
        units = list(dict.fromkeys(item.unit for item in self._managed))
        self._failures.raise_on_every_rank(process_groups_along(units), units[0].device)

    def _begin_to_read(self, todo: Sequence[_Chunk], number: int) -> None:
        if number >= len(todo):
            return
        chunk = todo[number]
        with self._failures.noted():
            chunk.shards = ShardsInMemory.of(chunk.params)
        extent = chunk.extent
        if extent is not None:
            chunk.buffer = self._take_buffer(chunk, number, extent.nbytes)
            chunk.reading = DiskWork([])
            with self._failures.noted():
                chunk.reading = extent.read(chunk.buffer)

    def _take_buffer(self, chunk: _Chunk, number: int, nbytes: int) -> Tensor:
        """Wait for the next buffer, for the `chunk` with this number, and return its first `nbytes`."""
        turn, buffers = number % BUFFERS, self._buffers[chunk.is_offloaded]
        writing, self._writes[turn] = self._writes[turn], DiskWork([])
        with self._failures.noted():
            writing.wait()
        if buffers[turn].numel() < nbytes:
            buffers[turn] = no_buffer()  # free the old buffer before a new one is allocated
            buffers[turn] = chunk.new_buffer(nbytes)
        return buffers[turn][:nbytes]

    def _fill(self, chunk: _Chunk, optimizer: Optimizer) -> None:
        """Load the states of `chunk` from the disk into memory. If reading fails, the values are undefined."""
        if chunk.shards is not None:
            with self._failures.noted():
                chunk.shards.fill()
        if chunk.reading is None:
            bring_to_memory(optimizer, chunk.params)
            return
        with self._failures.noted():
            chunk.reading.wait()
        chunk.reading = None
        chunk.block = chunk.buffer.to(_device(chunk.disk_tensors))
        chunk.views = {key: stored.over(chunk.block) for key, stored in chunk.disk_tensors.items()}
        for key, value in _items(chunk, optimizer):
            if value._local_tensor is chunk.disk_tensors.get(key):
                set_local_tensor(value, chunk.views[key])
        bring_to_memory(optimizer, chunk.params)

    def _empty(self, chunk: _Chunk, optimizer: Optimizer) -> None:
        """Drop the memory of the chunk's states and shards. The file has the valid values."""
        if chunk.shards is not None:
            chunk.shards.end(writes=False)
            chunk.shards = None
        for key, value in _items(chunk, optimizer):
            if key in chunk.views and value._local_tensor is chunk.views[key]:
                set_local_tensor(value, chunk.disk_tensors[key])
        chunk.buffer, chunk.block, chunk.views = no_buffer(), no_buffer(), {}

    def _begin_to_write(self, chunk: _Chunk, optimizer: Optimizer, number: int) -> None:
        """Start to write the states of `chunk`, which have no memory afterwards.

        After a failure nothing more is written, so the file keeps valid values of other chunks.
        """
        if not self._failures:
            with self._failures.noted():
                self._write(chunk, optimizer, number)
        if self._failures:
            self._empty(chunk, optimizer)

    def _write(self, chunk: _Chunk, optimizer: Optimizer, number: int) -> None:
        """Start to write the states of `chunk`, and drop their memory."""
        states = chunk.states(optimizer)
        if not states:
            return
        filled = chunk.views
        if self._make_room(chunk, {key: _form(value._local_tensor) for key, value in states.items()}) or not filled:
            assert chunk.extent is not None
            nbytes = chunk.extent.nbytes
            # If states were read from the disk, they are still in this turn's buffer, so another one is needed.
            chunk.buffer = chunk.new_buffer(nbytes) if filled else self._take_buffer(chunk, number, nbytes)
            chunk.block = chunk.buffer.to(_device(chunk.disk_tensors))
            chunk.views = {key: stored.over(chunk.block) for key, stored in chunk.disk_tensors.items()}
        for key, value in states.items():
            local = value._local_tensor
            if local is not chunk.views[key]:
                chunk.views[key].copy_(local)
            if local is chunk.views[key] or local is filled.get(key):
                set_local_tensor(value, chunk.disk_tensors[key])
            else:  # a tensor of other code, which may still use its values
                optimizer.state[chunk.params[key[0]]][key[1]] = dtensor_like(chunk.disk_tensors[key], value)
        if chunk.block is not chunk.buffer:
            chunk.buffer.copy_(chunk.block)
        assert chunk.extent is not None
        self._writes[number % BUFFERS] = chunk.extent.write(chunk.buffer)
        chunk.buffer, chunk.block, chunk.views = no_buffer(), no_buffer(), {}

    def _make_room(self, chunk: _Chunk, forms: Mapping[Key, _DiskForm]) -> bool:
        """Allocate space for states of `forms` of `chunk`. Return False if it is allocated already."""
        if {key: _form(stored) for key, stored in chunk.disk_tensors.items()} == forms:
            return False
        starts, end = aligned_offsets([form.nbytes for form in forms.values()], ALIGNMENT_BYTES)
        others = (each_chunk for each_chunk in self._chunks if each_chunk.extent is None and each_chunk is not chunk)
        lacking = [other for other in others if other.scratch is chunk.scratch]
        more = sum(aligned(end * item.nbytes // max(1, chunk.nbytes)) + ALIGNMENT for item in lacking)
        extent = chunk.scratch.take(aligned(end), more, state="optimizer state")
        chunk.disk_tensors = {
            key: OnDisk(extent, start, form.shape, form.dtype, form.device)
            for (key, form), start in zip(forms.items(), starts, strict=True)
        }
        return True


def bring_to_memory(optimizer: Optimizer, params: Iterable[Tensor]) -> None:
    """Read states of `params` into memory if they are on a disk, as after loading the states of another model."""
    for param in params:
        for name, value in optimizer.state.get(param, {}).items():
            if isinstance(value, DTensor) and isinstance(value._local_tensor, OnDisk):
                optimizer.state[param][name] = dtensor_like(value._local_tensor.fetch(), value)


class _DiskForm(NamedTuple):
    """The shape, dtype and device of a state, which determine its space."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def _form(tensor: Tensor) -> _DiskForm:
    return _DiskForm(tensor.shape, tensor.dtype, tensor.device)


def _device(disk_tensors: Mapping[Key, OnDisk]) -> torch.device:
    return next(iter(disk_tensors.values())).device


def _items(chunk: _Chunk, optimizer: Optimizer) -> list[tuple[Key, Any]]:
    return list(chunk.states(optimizer).items())


# -- shards and gradients on the disk ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Region:
    """Whole blocks of an extent, and their offset in a buffer."""

    extent: Extent
    start: int
    end: int
    offset: int


class ShardsInMemory:
    """The shards and gradients of a chunk that are on a disk between steps, in memory during the step.

    Args:
        held: Pairs of a `DTensor` and its local tensor on disk.
        is_shard: Whether each is a shard, which is written back.
    """

    def __init__(self, held: Sequence[tuple[DTensor, OnDisk]], is_shard: Sequence[bool]) -> None:
        self._held = list(held)
        blocks = _blocks([stored for _, stored in held])
        self._regions, nbytes = [], 0
        for extent, start, end in blocks:
            self._regions.append(_Region(extent, start, end, nbytes))
            nbytes += end - start
        written = {id(stored.extent) for (_, stored), item in zip(held, is_shard, strict=True) if item}
        self._written = [region for region in self._regions if id(region.extent) in written]
        self._buffers = buffers_of(held[0][1].device)
        self._buffer = self._buffers.take(nbytes)
        self._reading = DiskWork.of_all(
            region.extent.read(self._place(region), region.start) for region in self._regions
        )

    @classmethod
    def of(cls, params: Iterable[nn.Parameter]) -> ShardsInMemory | None:
        """Start to read the shards and gradients of `params`; None if none of them is on a disk."""
        held: list[tuple[DTensor, OnDisk]] = []
        is_shard = []
        for param in params:
            for tensor, is_param in ((param, True), (param.grad, False)) if param.grad is not None else ():
                if isinstance(tensor, DTensor) and isinstance(tensor._local_tensor, OnDisk):
                    held.append((tensor, tensor._local_tensor))
                    is_shard.append(is_param)
        return cls(held, is_shard) if held else None

    def _place(self, region: _Region) -> Tensor:
        return self._buffer.data[region.offset :][: region.end - region.start]

    def fill(self) -> None:
        """Set the local tensors to views of the buffer, whose values are undefined after a failed read."""
        for tensor, stored in self._held:
            around = (region for region in self._regions if region.extent is stored.extent)
            inside = next(item for item in around if item.start <= stored.start <= item.end)
            set_local_tensor(tensor, stored.over(self._place(inside), inside.start))
        self._reading.wait()

    def end(self, *, writes: bool) -> None:
        """Drop the memory, after starting to write the current shards if `writes`."""
        for tensor, stored in self._held:
            set_local_tensor(tensor, stored)
        works = [item.extent.write(self._place(item), item.start) for item in (self._written if writes else ())]
        self._buffers.give(self._buffer, DiskWork.of_all([self._reading, *works]))


def _blocks(disk_tensors: Iterable[OnDisk]) -> list[tuple[Extent, int, int]]:
    """Return the blocks of `disk_tensors`, merged to as few ranges as possible: start and end of each in its extent."""
    by_extent: dict[int, tuple[Extent, list[tuple[int, int]]]] = {}
    for stored in disk_tensors:
        by_extent.setdefault(id(stored.extent), (stored.extent, []))[1].append(stored.blocks)
    found: list[tuple[Extent, int, int]] = []
    for extent, ranges in by_extent.values():
        for start, end in sorted(ranges):
            if found and found[-1][0] is extent and start <= found[-1][2]:
                found[-1] = extent, found[-1][1], max(end, found[-1][2])
            else:
                found.append((extent, start, end))
    return found
