"""A reader of the metadata of `torch.distributed.checkpoint`, which is a pickle, without unpickling it.

The file is untrusted. Python's unpickler calls functions and sets attributes that the file names. An allow list of
classes is not enough, because a pickle can set attributes of an allowed class. `loads` is a separate interpreter for
the few opcodes that such a file contains. It only creates numbers, strings, containers and `_Object`s, which have the
name of a class and the state in the file. Nothing is imported, called or modified. Then the result is compared with the
known structure of the metadata, and torch's classes are created from checked values.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fullshard._compat import storage_info
from fullshard.errors import CheckpointError
from fullshard.layout.coverage import uncovered
from fullshard.regular_files import is_plain_name

T = TypeVar("T")

_MODULE = "torch.distributed.checkpoint.metadata"
_MOST_DIMS = 64
_LONGEST_NAME = 1 << 16  # characters
_LARGEST = (1 << 63) - 1
_LEAST_NBYTES = 16  # minimum size of the description of a chunk


def loads(data: bytes) -> Metadata:
    """Return the metadata in `data`.

    Raises:
        CheckpointError: It is not the metadata of a checkpoint, or its chunks do not cover every tensor exactly. The
            message gives the reason.
    """
    return _metadata(_Interpreter(data).run(), most_chunks=len(data) // _LEAST_NBYTES)


# -- from bytes to inert values ---------------------------------------------------------------------------------------


class _Global(NamedTuple):
    """The name of a class or function, which is never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class _Object:
    """The description of an instance of the class `kind`: its arguments and its state."""

    __slots__ = ("args", "kind", "state")

    def __init__(self, kind: _Global, args: tuple[Any, ...]) -> None:
        self.kind = kind
        self.args = args
        self.state: dict[Any, Any] | tuple[Any, ...] | None = None


_NAMES = (
    *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
    *("StorageMeta", "TensorProperties", "TensorStorageMetadata"),
)
_CLASSES = {
    *(_Global(_MODULE, name) for name in _NAMES),
    _Global("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
_SIZE = _Global("torch", "Size")
_LAYOUT = _Global("torch.serialization", "_get_layout")
_MEMORY_FORMAT = _Global(_MODULE, "_MEM_FORMAT_ENCODING")
_ORDERED = _Global("collections", "OrderedDict")
_PATHS = {
    _Global(module, name)
    for module in ("pathlib", "pathlib._local")  # the latter in Python 3.13
    for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
}
_DTYPES = {_Global("torch", name): var for name, var in vars(torch).items() if isinstance(var, torch.dtype)}
_LAYOUTS = {str(var): var for var in vars(torch).values() if isinstance(var, torch.layout)}
_MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)  # as torch encodes them
_KNOWN = {*_CLASSES, *_PATHS, *_DTYPES, _SIZE, _LAYOUT, _MEMORY_FORMAT, _ORDERED}

_MARK = object()


class _Interpreter:
    """An interpreter for the opcodes of one pickle. Each opcode creates at most one new value."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Return the value that the pickle describes."""
        data = self._data
        while self._at < len(data):
            code = data[self._at]
            self._at += 1
            if code == _STOP:
                if len(self._stack) != 1 or self._at != len(data):
                    raise CheckpointError("it does not end after exactly one value")
                return self._pop()
            step = _STEPS.get(code)
            if step is None:
                raise CheckpointError(f"it has the opcode {code:#04x}, which no checkpoint needs")
            try:
                step(self)
            except (IndexError, KeyError, struct.error, UnicodeDecodeError):
                raise CheckpointError(f"the opcode at byte {self._at} has no valid argument") from None
        raise CheckpointError("it has no end")

    # arguments

    def _take(self, nbytes: int) -> bytes:
        found = self._data[self._at : self._at + nbytes]
        if len(found) != nbytes:
            raise CheckpointError("it is truncated")
        self._at += nbytes
        return found

    def _number(self, format: str) -> int:
        [number] = struct.unpack(format, self._take(struct.calcsize(format)))
        return int(number)

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at)
        if end < 0:
            raise CheckpointError("it is truncated")
        return self._take(end + 1 - self._at)[:-1].decode()

    # the stack

    def _pop(self, kind: type[T] | None = None) -> T:
        value = self._stack.pop()
        if value is _MARK or (kind is not None and type(value) is not kind):
            raise CheckpointError(f"the opcode at byte {self._at} has an argument of a different type")
        return value  # type: ignore[no-any-return]

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _top(self, kind: type[T]) -> T:
        value = self._stack[-1]
        if type(value) is not kind:
            raise CheckpointError(f"the opcode at byte {self._at} has an argument of a different type")
        return value

    def _since_mark(self) -> list[Any]:
        stack = self._stack
        for place in range(len(stack) - 1, -1, -1):
            if stack[place] is _MARK:
                found = stack[place + 1 :]
                del stack[place:]
                return found
        raise CheckpointError("a mark is missing")

    # opcodes

    def _protocol(self) -> None:
        if self._number("<B") > 5:
            raise CheckpointError("its pickle protocol is unknown")

    def _frame(self) -> None:
        self._take(8)  # the size of the frame

    def _text(self, format: str) -> None:
        self._push(self._take(self._number(format)).decode("utf-8", "surrogatepass"))

    def _long(self) -> None:
        self._push(int.from_bytes(self._take(self._number("<B")), "little", signed=True))

    def _tuple(self, count: int) -> None:
        if count:
            found = tuple(self._stack[-count:])
            if len(found) != count or any(item is _MARK for item in found):
                raise CheckpointError("a tuple is not complete")
            del self._stack[-count:]
            self._push(found)
        else:
            self._push(())

    def _remember(self, place: int) -> None:
        value = self._stack[-1]
        if value is _MARK:
            raise CheckpointError("a mark is stored in the memo")
        self._memo[place] = value

    def _global(self, module: str, name: str) -> None:
        found = _Global(module, name)
        if found not in _KNOWN:
            raise CheckpointError(f"it names {found}, which no checkpoint needs")
        self._push(found)

    def _stack_global(self) -> None:
        name = self._pop(str)
        self._global(self._pop(str), name)

    def _new(self) -> None:
        args, kind = self._pop(tuple), self._pop(_Global)
        if kind not in _CLASSES or args:
            raise CheckpointError(f"it creates a {kind} with {len(args)} arguments")
        self._push(_Object(kind, args))

    def _reduce(self) -> None:
        args, kind = self._pop(tuple), self._pop(_Global)
        if kind == _ORDERED and not args:
            self._push({})
        elif kind == _SIZE and len(args) == 1 and _are_sizes(args[0]):
            self._push(args[0])
        elif (kind in (_LAYOUT, _MEMORY_FORMAT) and len(args) == 1) or kind in _PATHS:
            self._push(_Object(kind, args))
        else:
            raise CheckpointError(f"it calls {kind} with arguments that are not a size, layout or path")

    def _build(self) -> None:
        state: Any = self._pop()
        target = self._top(_Object)
        if target.kind not in _CLASSES or target.state is not None or type(state) not in (dict, tuple):
            raise CheckpointError(f"it sets an invalid state on a {target.kind}")
        target.state = state

    def _set(self, items: list[Any]) -> None:
        target = self._top(dict)
        if len(items) % 2:
            raise CheckpointError("a key has no value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (str, _Object):  # hashing others would require recursion or be impossible
                raise CheckpointError("a key is not a string")
            target[key] = value

    def _extend(self, items: list[Any]) -> None:
        self._top(list).extend(items)


_STOP = ord(".")
_STEPS: Mapping[int, Callable[[_Interpreter], None]] = {
    ord(code): step
    for code, step in {
        "\x80": _Interpreter._protocol,
        "\x95": _Interpreter._frame,
        "(": lambda item: item._push(_MARK),
        "N": lambda item: item._push(None),
        "\x88": lambda item: item._push(True),
        "\x89": lambda item: item._push(False),
        "J": lambda item: item._push(item._number("<i")),
        "K": lambda item: item._push(item._number("<B")),
        "M": lambda item: item._push(item._number("<H")),
        "\x8a": _Interpreter._long,
        "X": lambda item: item._text("<I"),
        "\x8c": lambda item: item._text("<B"),
        "\x8d": lambda item: item._text("<Q"),
        "}": lambda item: item._push({}),
        "]": lambda item: item._push([]),
        ")": lambda item: item._tuple(0),
        "\x85": lambda item: item._tuple(1),
        "\x86": lambda item: item._tuple(2),
        "\x87": lambda item: item._tuple(3),
        "t": lambda item: item._push(tuple(item._since_mark())),
        "q": lambda item: item._remember(item._number("<B")),
        "r": lambda item: item._remember(item._number("<I")),
        "\x94": lambda item: item._remember(len(item._memo)),
        "h": lambda item: item._push(item._memo[item._number("<B")]),
        "j": lambda item: item._push(item._memo[item._number("<I")]),
        "c": lambda item: item._global(item._line(), item._line()),
        "\x93": _Interpreter._stack_global,
        "R": _Interpreter._reduce,
        "\x81": _Interpreter._new,
        "b": _Interpreter._build,
        "s": lambda item: item._set([item._pop(), item._pop()][::-1]),
        "u": lambda item: item._set(item._since_mark()),
        "a": lambda item: item._extend([item._pop()]),
        "e": lambda item: item._extend(item._since_mark()),
    }.items()
}


# -- from inert values to metadata ------------------------------------------------------------------------------------


def _metadata(value: Any, *, most_chunks: int) -> Metadata:
    """Create metadata from the value that a file describes."""
    state = _state(value, "Metadata")
    stored: dict[MetadataIndex, Any] = {}
    for key, info in _entries(state.get("storage_data"), _Object):
        index = _index(key)
        if index in stored:
            raise CheckpointError(f"{index.fqn!r} at {index.offset} is stored twice")
        stored[index] = _storage(info)
    entries = dict(_entries(state.get("state_dict_metadata"), str))
    tensors = {name: entry for name, entry in entries.items() if _is_a(entry, "TensorStorageMetadata")}
    chunks = [_list(_state(tensor, "TensorStorageMetadata").get("chunks")) for tensor in tensors.values()]
    if sum(map(len, chunks)) > most_chunks:  # before any is read, because a file may refer to one list many times
        raise CheckpointError("it lists more chunks of tensors than fit in a file of its size")
    if not all(name in tensors or _is_a(entry, "BytesStorageMetadata") for name, entry in entries.items()):
        raise CheckpointError("an entry is neither a tensor nor a value")
    made = {
        name: _tensor(name, entry) if name in tensors else BytesStorageMetadata() for name, entry in entries.items()
    }
    for name, entry in made.items():
        if isinstance(entry, TensorStorageMetadata):
            for chunk in entry.chunks:
                _check_stored(name, chunk, entry.properties.dtype, stored)
        elif MetadataIndex(name) not in stored:
            raise CheckpointError(f"the value {name!r} is not stored in any file")
    version = state.get("version")
    return Metadata(
        state_dict_metadata=made,
        planner_data=_planned(state.get("planner_data")),
        storage_data=stored,
        version=None if version is None else _name(version),
    )


def _tensor(name: str, value: Any) -> TensorStorageMetadata:
    state = _state(value, "TensorStorageMetadata")
    size = _size(state.get("size"))
    described = [_state(item, "ChunkStorageMetadata") for item in _list(state.get("chunks"))]
    chunks = [ChunkStorageMetadata(_size(item.get("offsets")), _size(item.get("sizes"))) for item in described]
    why = uncovered(size, ((chunk.offsets, chunk.sizes) for chunk in chunks))
    if why is not None:
        raise CheckpointError(f"tensor {_name(name)!r}: {why}")
    return TensorStorageMetadata(_properties(state.get("properties")), size, chunks)


def _check_stored(
    name: str, chunk: ChunkStorageMetadata, dtype: torch.dtype, stored: Mapping[MetadataIndex, Any]
) -> None:
    place = stored.get(MetadataIndex(name, chunk.offsets))
    nbytes = math.prod(chunk.sizes) * dtype.itemsize
    if place is None or place.length < nbytes:
        found = "nothing" if place is None else f"{place.length} bytes"
        raise CheckpointError(f"{name!r} has {nbytes} bytes at {tuple(chunk.offsets)}, but the files contain {found}")


def _properties(value: Any) -> TensorProperties:
    if not _is_a(value, "TensorProperties") or type(value.state) is not tuple or len(value.state) not in (5, 6):
        raise CheckpointError("a tensor has no properties")
    dtype, layout, requires_grad, memory_format, pin_memory, *strides = value.state
    if type(dtype) is not _Global or dtype not in _DTYPES:
        raise CheckpointError("a tensor has an unknown dtype")
    if type(requires_grad) is not bool or type(pin_memory) is not bool:
        raise CheckpointError("a tensor has invalid properties")
    if strides and strides[0] is not None:
        _size(strides[0])
    made = TensorProperties(
        dtype=_DTYPES[dtype],
        layout=_known(layout, _LAYOUT, _LAYOUTS),
        requires_grad=requires_grad,
        memory_format=_known(memory_format, _MEMORY_FORMAT, dict(enumerate(_MEMORY_FORMATS))),
        pin_memory=pin_memory,
    )
    if strides and hasattr(made, "strides"):  # since torch 2.15
        made.strides = strides[0]
    return made


def _known(value: Any, kind: _Global, values: Mapping[Any, T]) -> T:
    """Return the member of `values` that an enumeration's object represents."""
    if type(value) is not _Object or value.kind != kind:
        raise CheckpointError(f"expected a {kind}")
    [stated] = value.args
    if type(stated) not in (int, str) or stated not in values:
        raise CheckpointError(f"it has an unknown {kind}")
    return values[stated]


def _index(value: Any) -> MetadataIndex:
    state = _state(value, "MetadataIndex")
    offset, hint = state.get("offset"), state.get("index")
    return MetadataIndex(
        _name(state.get("fqn")), None if offset is None else _size(offset), None if hint is None else _count(hint)
    )


def _storage(value: Any) -> Any:
    state = _state(value, "_StorageInfo")
    path = state.get("relative_path")
    if not isinstance(path, str) or not is_plain_name(path):
        found = repr(path[:200]) if isinstance(path, str) else "something else"
        raise CheckpointError(f"it refers to {found}, which is not in the checkpoint's folder")
    if state.get("transform_descriptors"):
        raise CheckpointError("its values are transformed, for example compressed. Save it without extensions")
    return storage_info(path, _count(state.get("offset")), _count(state.get("length")))


def _planned(value: Any) -> dict[str, tuple[str | int, ...]] | None:
    """Return the path of each entry in the saved state dict."""
    if value is None:
        return None
    paths = {}
    for key, path in _entries(value, str):
        if type(path) is not tuple or len(path) > _LONGEST_NAME or not all(type(item) in (str, int) for item in path):
            raise CheckpointError("an entry has no path in the state dict")
        paths[key] = path
    return paths


def _is_a(value: Any, name: str) -> bool:
    return type(value) is _Object and value.kind.name == name


def _state(value: Any, name: str) -> dict[Any, Any]:
    if not _is_a(value, name) or type(value.state) is not dict:
        raise CheckpointError(f"expected a {name}")
    return value.state


def _entries(value: Any, kind: type) -> Iterator[tuple[Any, Any]]:
    if type(value) is not dict or not all(type(key) is kind for key in value):
        raise CheckpointError("it lacks a table that every checkpoint has")
    for key, item in value.items():
        yield (_name(key) if kind is str else key), item


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise CheckpointError("expected a list")
    return value


def _name(value: Any) -> str:
    if type(value) is not str or len(value) > _LONGEST_NAME:
        raise CheckpointError("expected a name")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise CheckpointError("expected a number of 0 or more")
    return value


def _are_sizes(value: Any) -> bool:
    return (
        type(value) is tuple
        and len(value) <= _MOST_DIMS
        and all(type(item) is int and 0 <= item <= _LARGEST for item in value)
    )


def _size(value: Any) -> torch.Size:
    if not _are_sizes(value):
        raise CheckpointError("expected the shape of a tensor")
    return torch.Size(value)
