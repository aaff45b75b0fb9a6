"""Untrusted files are loaded as valid files or rejected. They never execute code and never block the program."""

from __future__ import annotations

import copy
import io
import json
import logging
import os
import pickle
import random
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from test_checkpoint_damage import forge
from torch import nn
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import get_state_dict

from fullshard import CheckpointError, ConfigError, DiskError
from fullshard.checkpoint import container, load, load_safetensors, metadata_file, save
from fullshard.checkpoint import manifest as manifests
from fullshard.checkpoint.folder import entries
from fullshard.checkpoint.manifest import MANIFEST, Manifest
from fullshard.cli import main
from fullshard.errors import shown
from fullshard.integrations.deepspeed.configuration import _loaded
from fullshard.integrations.deepspeed.importing import import_deepspeed, read_tag
from fullshard.integrations.plugin import plugin_from_config_file
from fullshard.layout.coverage import uncovered
from fullshard.plan.hardware import hardware
from fullshard.planner.subject import transformers_subject
from fullshard.regular_files import open_regular, read_regular
from fullshard.report.rank_file import RankFile, path_of
from fullshard.testing import assert_same
from fullshard.train.options import _read_mapping
from fullshard.train.run_folder import METRICS, lines_of

ESCAPES = "\x1b[31mred\x1b[0m\u202e\r"


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two fullshard checkpoints. Tests must not modify them."""
    folder = tmp_path_factory.mktemp("written")
    for step in (1, 2):
        torch.manual_seed(step)
        own = model()
        save(folder, model=own, step=step, optimizer=torch.optim.AdamW(own.parameters()), extra={"a": [1, "b"]})
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy that tests may damage."""
    return shutil.copytree(written, tmp_path / "copy")


def newest(folder: Path) -> Path:
    return folder / "step-000000002"


# -- metadata: nothing is executed, imported or modified --------------------------------------------------------------

CALLS: list[Any] = []


def trap(*args: Any, **kwargs: Any) -> Any:
    """A stand-in for a function that an attacker would call."""
    CALLS.append(args)
    return {}


class Trap:
    """A stand-in for a class in this process that an attacker would modify."""

    __slots__ = ("slot",)
    shared = "as it was"

    def __setstate__(self, state: Any) -> None:
        trap(state)


GLOBALS = [
    (__name__, "trap"),
    (__name__, "Trap"),
    ("os", "system"),
    ("builtins", "getattr"),
    ("torch", "load"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("torch", "float32"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("a_module_that_is_not_there", "x"),
]


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


SLOTS = b"}" + text("__init__") + named(__name__, "trap") + b"s"
ATTACKS = [
    *(named(*each_global) for each_global in GLOBALS),
    *(named(*each_global) + b")R" for each_global in GLOBALS),
    *(named(*each_global) + b")\x81" for each_global in GLOBALS),
    *(named(*each_global) + b"N" + SLOTS + b"\x86b" for each_global in GLOBALS),  # slot state, set on the class itself
    *(named(*each_global) + SLOTS + b"b" for each_global in GLOBALS),
    *(named(*each_global) + b")\x81" + SLOTS + b"b" for each_global in GLOBALS),
    b"cos\nsystem\n(" + text("true") + b"tR",
    b"(" + text("true") + b"ios\nsystem\n",
    b"(" + named(__name__, "trap") + b"o",
    named(__name__, "Trap") + b")}\x92",
    text("id") + b"Q",
    b"Pid\n",
    b"\x82\x01",
    b"\x84\x01\x00\x00\x00",
    b"\x97",
    b"]\x94h\x00a",  # a list that holds itself
    b"r\xff\xff\xff\xff",
    b"\x8e" + struct.pack("<Q", 1 << 62),
    b"\x8d" + struct.pack("<Q", 1 << 62),
    b"\x8b" + struct.pack("<i", -5),
    b"\x95" + struct.pack("<Q", 1 << 62),
    b")" + b"\x85" * 5000,
    b"(" * 5000,
    b"}" + b")" + b"\x85" * 5000 + b"Ns",
    *(bytes([code]) for code in range(256)),
]


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Return `data` with some opcodes or bytes removed, repeated, replaced or inserted."""
    for _ in range(draw.randrange(1, 4)):
        start, stop = sorted((draw.randrange(len(data)), draw.randrange(len(data))))
        kind = draw.randrange(6)
        if kind == 0:
            data = data[:start] + draw.choice(ATTACKS) + data[start:]
        elif kind == 1:
            data = data[:start] + draw.choice(ATTACKS) + data[start + draw.randrange(1, 9) :]
        elif kind == 2:
            data = data[:start] + bytes([data[start] ^ 1 << draw.randrange(8)]) + data[start + 1 :]
        elif kind == 3:
            data = data[:start] + data[min(stop, start + 40) :]
        elif kind == 4:
            data = data[:stop] + data[start : start + 40] + data[stop:]
        else:
            data = data[:-1] + draw.choice(ATTACKS) + b"."
        data = data or b"."
    return data


def what_classes_have() -> dict[str, dict[str, int]]:
    """Return the attributes of every class and module that checkpoint metadata or an attack can name."""
    modules = ["torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem", __name__]
    found: dict[str, dict[str, int]] = {}
    for name in [*modules, "torch", "torch.serialization", "collections", "pathlib", "os", "builtins"]:
        held = {key: var for key, var in vars(sys.modules[name]).items() if key not in ("CALLS", "__warningregistry__")}
        found[name] = {key: id(item) for key, item in held.items()}
        for key, item in held.items():
            if isinstance(item, type) and item.__module__ in (*modules, "pathlib", "collections", "torch"):
                found[f"{name}.{key}"] = {attribute: id(value) for attribute, value in vars(item).items()}
    return found


def is_plain(value: Any) -> bool:
    """Return whether `value` is metadata in which all fields have the types that torch writes."""
    return (
        type(value) is Metadata
        and all(type(key) is str and is_plain_entry(item) for key, item in value.state_dict_metadata.items())
        and all(
            type(key) is MetadataIndex and type(storage_item.offset) is int
            for key, storage_item in value.storage_data.items()
        )
        and all(
            type(key) is str and type(planner_item) is tuple and all(type(word) in (str, int) for word in planner_item)
            for key, planner_item in (value.planner_data or {}).items()
        )
    )


def is_plain_entry(entry: Any) -> bool:
    if type(entry) is BytesStorageMetadata:
        return True
    return (
        type(entry) is TensorStorageMetadata
        and type(entry.properties.dtype) is torch.dtype
        and type(entry.size) is torch.Size
        and all(type(chunk) is ChunkStorageMetadata for chunk in entry.chunks)
        and uncovered(entry.size, ((chunk.offsets, chunk.sizes) for chunk in entry.chunks)) is None
    )


def count_refused(data: bytes, cases: int, seed: int) -> int:
    """Return how many of the cases were rejected. The others are valid metadata."""
    draw, before, refused = random.Random(seed), what_classes_have(), 0
    modules = set(sys.modules)
    CALLS.clear()
    for case in range(cases):
        hostile = mutated(data, draw)
        try:
            assert is_plain(metadata_file.loads(hostile)), f"case {case} of seed {seed}"
        except CheckpointError:
            refused += 1
    assert CALLS == []
    assert set(sys.modules) == modules
    assert what_classes_have() == before
    return refused


def test_mutated_metadata_is_rejected_or_valid_without_side_effects(written):
    data = (newest(written) / ".metadata").read_bytes()
    assert is_plain(metadata_file.loads(data))
    assert count_refused(data, cases=3000, seed=0) > 2000


@pytest.mark.slow
def test_mutated_metadata_of_every_pickle_protocol_is_rejected_or_valid(written):
    for protocol in range(2, 6):
        data = pickle.dumps(pickle.loads((newest(written) / ".metadata").read_bytes()), protocol=protocol)
        assert is_plain(metadata_file.loads(data))
        assert count_refused(data, cases=3000, seed=protocol) > 1800


def test_every_pickle_attack_is_rejected(written):
    before = what_classes_have()
    CALLS.clear()
    for attack in ATTACKS:
        with pytest.raises(CheckpointError):
            metadata_file.loads(b"\x80\x04" + attack + b".")
    assert CALLS == []
    assert what_classes_have() == before


def test_attack_on_class_slots_does_not_affect_later_loads(folder):
    """Slot state that is set on a class would modify the class, even if an allow list restricts the classes."""
    kind = named("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata")
    forge(newest(folder), ".metadata", b"\x80\x04" + kind + b"N" + SLOTS + b"\x86b.")
    assert load(folder, model=model()).step == 1
    with pytest.raises(CheckpointError, match=r"\.metadata: expected the metadata of a checkpoint"):
        load(newest(folder), model=model())
    assert load(folder, model=model()).step == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("protocol", range(2, 6))
def test_metadata_reader_matches_pickle_for_torch_checkpoints(protocol, tmp_path):
    state = {"a": {"b": torch.ones(2, 3), "c": torch.tensor(1, dtype=torch.int8)}, "d": [1, {"e": 2.5}], "f": "x"}
    dcp.save(state, checkpoint_id=tmp_path / "theirs")
    peer = pickle.loads((tmp_path / "theirs" / ".metadata").read_bytes())
    own = metadata_file.loads(pickle.dumps(peer, protocol=protocol))
    peer.storage_meta = None
    assert own == peer


# -- chunks cover every tensor exactly once ---------------------------------------------------------------------------


def counted(shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Return whether every element is in exactly one box, by counting per element."""
    times = torch.zeros(shape, dtype=torch.int64)
    for offsets, sizes in boxes:
        times[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))] += 1
    return bool((times == 1).all())


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Draw a tensor that is split repeatedly. Chunks may then be lost, repeated, moved or resized."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, sizes[dim]))
        for start, size in ((0, at), (at, sizes[dim] - at)):
            boxes.append(
                (
                    (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :]),
                    (*sizes[:dim], size, *sizes[dim + 1 :]),
                )
            )
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(boxes) - 1)) if boxes else 0
        if boxes and draw(st.booleans()):
            boxes.pop(place)
        elif boxes:
            offsets, sizes = boxes[place]
            boxes.append((tuple(max(0, offset - draw(st.integers(0, 1))) for offset in offsets), sizes))
    return shape, boxes


@given(cut_tensors())
@settings(max_examples=300, deadline=None)
def test_chunks_are_valid_only_if_each_element_is_covered_once(case):
    shape, boxes = case
    assert (uncovered(shape, boxes) is None) == counted(shape, boxes)


def test_coverage_check_scales_to_many_chunks_and_dims():
    many = 50_000
    assert uncovered((many, 2), (((row, 0), (1, 2)) for row in range(many))) is None
    assert uncovered((2, many), (((0, column), (2, 1)) for column in range(many))) is None
    assert uncovered((1,) * 64, [((0,) * 64, (1,) * 64)]) is None
    assert "at most 8" in (uncovered((2,) * 40, [((0,) * 40, (1,) * 40)]) or "")


def edited(path: Path, edit: Callable[[Metadata], None]) -> bytes:
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    return pickle.dumps(metadata)


def halve(metadata: Metadata, key: str) -> None:
    """Cut `key` in two and drop the second half."""
    entry = metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    entry.chunks[0].sizes = torch.Size([entry.size[0] // 2, *entry.size[1:]])


def repeat(metadata: Metadata, key: str) -> None:
    """Store one chunk of `key` twice."""
    entry = metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    entry.chunks.append(entry.chunks[0])


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("edit", [halve, repeat])
@pytest.mark.parametrize("key", ["model.0.weight", "optimizer.state.1.weight.exp_avg"])
@pytest.mark.parametrize("peer", [False, True])
def test_missing_or_repeated_chunks_are_rejected_before_loading(edit, key, peer, folder):
    own = model()
    optimizer = torch.optim.AdamW(own.parameters())
    own(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save(folder, model=own, step=2, optimizer=optimizer)
    checkpoint = newest(folder)
    forge(checkpoint, ".metadata", edited(checkpoint / ".metadata", lambda item: edit(item, key)))
    if peer:
        (checkpoint / MANIFEST).unlink()
        forge_offloaded = pickle.loads((checkpoint / ".metadata").read_bytes())
        del forge_offloaded.state_dict_metadata["fullshard"]
        (checkpoint / ".metadata").write_bytes(pickle.dumps(forge_offloaded))
    fresh = model()
    for param in fresh.parameters():
        nn.init.constant_(param, 7.0)
    with pytest.raises(CheckpointError, match=f"tensor '{key}': its . parts do not cover each element"):
        load(checkpoint, model=fresh)
    assert all((param == 7).all() for param in fresh.parameters())


def test_tensor_sizes_without_stored_bytes_are_rejected(folder):
    """A size that a file only claims never causes an allocation."""

    def grow(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata["model.0.weight"]
        assert isinstance(entry, TensorStorageMetadata)
        entry.size = entry.chunks[0].sizes = torch.Size([10**9, 10**9])

    checkpoint = newest(folder)
    forge(checkpoint, ".metadata", edited(checkpoint / ".metadata", grow))
    with pytest.raises(CheckpointError, match=r"'model\.0\.weight' has 4000000000000000000 bytes"):
        load(checkpoint, model=model())
    assert main(["checkpoint", "inspect", str(checkpoint)]) != 0


# -- manifests --------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([-1, 10**12, 10**400, "9"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a JSON document."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def put(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return document


def resealed(document: Any) -> bytes:
    """Return `document` with the checksum of its current content."""
    if isinstance(document, dict) and "checksum" in document and "content" in document:
        document["checksum"] = manifests._checksum(document["content"])
    return json.dumps(document).encode("utf-8", "surrogatepass")


def check_run_goes_on(folder: Path) -> None:
    """Check that a checkpoint loads whatever the newest manifest contains, and that the next save is the newest."""
    try:
        Manifest.read(newest(folder))
        is_valid = True
    except CheckpointError as error:
        is_valid = False
        assert str(newest(folder) / MANIFEST) in str(error)
    assert len(entries(folder)) == 2
    fresh = model()
    try:
        assert load(folder, model=fresh).step in (1, 2)
    except CheckpointError:  # a valid manifest of another world or step, which its values contradict
        assert is_valid
    for command in (["ls"], ["verify"], ["inspect"]):
        assert main(["checkpoint", *command, str(folder)]) in (0, 1, 2)
    number = max((entry.manifest.number for entry in entries(folder) if entry.manifest is not None), default=0)
    saved = save(folder, model=fresh, step=3)
    assert Manifest.read(saved).number == number + 1
    shutil.rmtree(saved)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_fuzzed_manifest_is_valid_or_rejected(data, written, tmp_path_factory):
    logging.getLogger("fullshard").setLevel(logging.ERROR)
    folder = shutil.copytree(written, tmp_path_factory.mktemp("any") / "copy")
    path = newest(folder) / MANIFEST
    if data.draw(st.booleans(), "any bytes"):
        path.write_bytes(data.draw(st.binary(max_size=200)))
    else:
        document = json.loads(path.read_text())
        place = data.draw(st.sampled_from(list(places(document))))
        path.write_bytes(resealed(put(document, place, data.draw(JSON))))
    try:
        check_run_goes_on(folder)
    finally:
        shutil.rmtree(folder)
        logging.getLogger("fullshard").setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("number", "9"),
        ("number", True),
        ("files", None),
        ("files", {"../outside": {"nbytes": 1, "checksum": "0" * 32}}),
        ("files", {"a\x1bb": {"nbytes": 1, "checksum": "0" * 32}}),
        ("world", 10**12),
        ("step", 2.0),
        ("strategy", ESCAPES),
        ("versions", {"torch": 2}),
        ("saved_at", None),
        ("id", []),
    ],
)
def test_invalid_manifest_field_is_rejected(field, value, folder):
    path = newest(folder) / MANIFEST
    path.write_bytes(resealed(put(json.loads(path.read_text()), ("content", field), value)))
    with pytest.raises(CheckpointError, match=r"manifest\.json: expected "):
        Manifest.read(newest(folder))
    check_run_goes_on(folder)


# -- archives ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [TensorStorageMetadata, BytesStorageMetadata])
def test_compressed_archive_entry_is_rejected_before_allocation(kind, folder):
    """A compressed record of 64 KB can expand to 64 MB, and one of 1 GB can exhaust all memory."""
    checkpoint = newest(folder)
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    of_kind = {key for key, entry in metadata.state_dict_metadata.items() if isinstance(entry, kind)}
    index = next(index for index in metadata.storage_data if index.fqn in of_kind)
    place = metadata.storage_data[index]
    data = (checkpoint / place.relative_path).read_bytes()
    bomb = io.BytesIO()
    with ZipFile(io.BytesIO(data[place.offset : place.offset + place.length])) as records, ZipFile(bomb, "w") as out:
        for record in records.infolist():
            out.writestr(record, records.read(record), ZIP_STORED)
        out.writestr("archive/more", bytes(64 << 20), ZIP_DEFLATED)
    place.offset, place.length = len(data), len(bomb.getvalue())
    forge(checkpoint, place.relative_path, data + bomb.getvalue())
    forge(checkpoint, ".metadata", pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="its records have 67"):
        load(checkpoint, model=(own := model()), optimizer=torch.optim.AdamW(own.parameters()))


# -- values in torch's own checkpoints --------------------------------------------------------------------------------


def theirs(folder: Path, kind: Any = torch.optim.AdamW) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Write a checkpoint with torch alone, and return what was saved."""
    own = model()
    optimizer = kind(own.parameters())
    own(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    states, options = get_state_dict(own, optimizer)
    dcp.save({"model": states, "optim": options}, checkpoint_id=folder)
    return own, optimizer


def read_theirs(folder: Path, kind: Any = torch.optim.AdamW) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Load `folder` into a new model and optimizer."""
    own = model()
    optimizer = kind(own.parameters())
    load(folder, model=own, optimizer=optimizer)
    return own, optimizer


def store_instead(folder: Path, key: str, value: Any) -> None:
    """Let the metadata refer to `value` in place of the value of `key`."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    place = next(place for index, place in metadata.storage_data.items() if index.fqn == key)
    place.offset = (folder / place.relative_path).stat().st_size
    with (folder / place.relative_path).open("ab") as file:
        torch.save(value, file)
        place.length = file.tell() - place.offset
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_bit_flip_in_torch_checkpoint_raises_or_has_no_effect(tmp_path):
    """Any bit may flip. torch.load does not compare checksums."""
    saved, optimizer = theirs(tmp_path)
    path = tmp_path / "__0_0.distcp"
    data, draw = path.read_bytes(), random.Random(0)
    for at in draw.sample(range(len(data)), 300):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :])
        try:
            own, read = read_theirs(tmp_path)
        except CheckpointError as error:
            assert f"{path}: '" in str(error)
        else:
            assert_same(own.state_dict(), saved.state_dict())
            assert_same(read.state_dict(), optimizer.state_dict())


class ShortReads(io.FileIO):
    """A file that returns fewer bytes than requested, as network file systems may do."""

    def readinto(self, buffer: Any) -> int:
        return super().readinto(memoryview(buffer)[: len(buffer) // 2 or 1]) or 0


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["direct", "cast"])
def test_load_handles_short_reads(dtype, folder, tmp_path, monkeypatch):
    saved, _ = theirs(tmp_path / "theirs")
    own = model()
    load(newest(folder), model=own)
    monkeypatch.setattr(container, "open_unbuffered", ShortReads)
    for path, expected in ((tmp_path / "theirs", saved), (newest(folder), own)):
        read = model().to(dtype)
        load(path, model=read)
        assert_same(read.float().state_dict(), expected.state_dict())


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_load_accepts_torch_checkpoints_without_checksums(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        saved, _ = theirs(tmp_path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert_same(read_theirs(tmp_path)[0].state_dict(), saved.state_dict())


@pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    "value",
    [torch.ones(5), torch.ones(4, 4), torch.ones(4, dtype=torch.float64), torch.ones(4).to_sparse(), {}, 1.0, None],
    ids=["longer", "of more dims", "wider", "sparse", "dict", "number", "nothing"],
)
@pytest.mark.parametrize("key", ["model.0.bias", "optim.state.0.bias.exp_avg"])
def test_stored_value_that_contradicts_metadata_is_rejected(key, value, tmp_path):
    theirs(tmp_path)
    store_instead(tmp_path, key, value)
    with pytest.raises(
        CheckpointError, match=rf"__0_0.distcp: '{key}' at byte \d+ .*expected .* of \(4,\) torch.float32"
    ):
        read_theirs(tmp_path)


def without(folder: Path, ending: str) -> None:
    """Remove the entries whose keys have this ending from the metadata."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for table in (metadata.state_dict_metadata, metadata.storage_data):
        for index in [index for index in table if getattr(index, "fqn", index).endswith(ending)]:
            del table[index]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


STEPPED = [
    partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    *(partial(torch.optim.RMSprop, **options) for options in ({}, {"momentum": 0.9}, {"centered": True})),
    *(partial(torch.optim.AdamW, **options) for options in ({}, {"amsgrad": True}, {"foreach": True}, {"fused": True})),
    *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adamax, torch.optim.ASGD, torch.optim.NAdam),
    *(torch.optim.Adafactor, torch.optim.RAdam, torch.optim.Rprop),
]


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("optimizer", STEPPED)
def test_missing_optimizer_state_is_rejected_before_loading(optimizer, tmp_path):
    """A parameter may lack all of its states, since it may never have been stepped, but not some of them."""
    _, saved = theirs(tmp_path / "whole", optimizer)
    assert_same(read_theirs(tmp_path / "whole", optimizer)[1].state_dict(), saved.state_dict())
    states = dict(zip(["0.weight", "0.bias"], saved.state.values(), strict=False))
    for fqn, state in states.items():
        for name in state if len(state) > 1 else ():
            having = [other for other, names in states.items() if name in names]
            for ending, missing in ((f"{fqn}.{name}", [fqn]), (f".{name}", having)):
                shutil.copytree(tmp_path / "whole", tmp_path / "part")
                without(tmp_path / "part", ending)
                own = model()
                before = copy.deepcopy(own.state_dict())
                with pytest.raises(CheckpointError) as caught:
                    load(tmp_path / "part", model=own, optimizer=optimizer(own.parameters()))
                assert all(f"{name!r} of {item} in the optimizer" in str(caught.value) for item in missing)
                assert_same(own.state_dict(), before)
                shutil.rmtree(tmp_path / "part")


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("value", [2.5, None, "0.weight", [0, 1, 2, 3], {"0.weight": 1}])
def test_parameter_groups_without_fqns_are_rejected(value, tmp_path):
    theirs(tmp_path)
    store_instead(tmp_path, "optim.param_groups.0.params", value)
    with pytest.raises(CheckpointError, match="expected FQNs as the params of a parameter group, found"):
        read_theirs(tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("name", ["lr", "params"])
def test_tensor_in_place_of_optimizer_option_is_rejected(name, tmp_path):
    theirs(tmp_path)
    store_instead(tmp_path, f"optim.param_groups.0.{name}", torch.ones(4))
    with pytest.raises(CheckpointError, match=rf"'optim.param_groups.0.{name}' is a tensor, but its metadata"):
        read_theirs(tmp_path)


# -- special files -----------------------------------------------------------------------------------------------------


def replace_by_special(path: Path, kind: str) -> None:
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")


SPECIAL = ("fifo", "device", "folder")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", [MANIFEST, ".metadata", "__0_0.distcp"])
def test_special_files_in_checkpoint_are_rejected_immediately(name, kind, folder, capsys):
    replace_by_special(newest(folder) / name, kind)
    with pytest.raises(CheckpointError, match="expected a regular file, but it is a "):
        load(newest(folder), model=model())
    assert load(folder, model=model()).step == 1
    for command in ("ls", "verify", "inspect"):
        assert main(["checkpoint", command, str(newest(folder))]) in (0, 1, 2)
    assert save(folder, model=model(), step=3).exists()


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_special_files_in_torch_checkpoint_are_rejected_immediately(name, kind, tmp_path):
    dcp.save({"model": model().state_dict()}, checkpoint_id=tmp_path / "theirs")
    replace_by_special(tmp_path / "theirs" / name, kind)
    with pytest.raises(CheckpointError, match="expected a regular file, but it is a "):
        load(tmp_path / "theirs", model=model())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "checksums.json"])
def test_special_files_in_safetensors_folder_are_rejected_immediately(name, kind, tmp_path):
    save_file(model().state_dict(), tmp_path / "model.safetensors")
    weight_map = dict.fromkeys(model().state_dict(), "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "checksums.json").write_text("{}")
    replace_by_special(tmp_path / name, kind)
    with pytest.raises(CheckpointError, match=r"regular file|cannot be read"):
        load_safetensors(model(), tmp_path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize(
    "name", ["latest", "tag/zero_pp_rank_0_mp_rank_00_optim_states.pt", "tag/mp_rank_00_model_states.pt"]
)
def test_special_files_in_deepspeed_checkpoint_are_rejected_immediately(name, kind, tmp_path):
    (tmp_path / "tag").mkdir()
    (tmp_path / "latest").write_text("tag")
    torch.save({"module": {}}, tmp_path / "tag" / "mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": {}}, tmp_path / "tag" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    replace_by_special(tmp_path / name, kind)
    with pytest.raises(CheckpointError, match="expected a regular file, but it is a "):
        import_deepspeed(tmp_path, tmp_path / "out")


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=40) | st.sampled_from([b"../tag", b"/etc", b"", b"a/../../b", ESCAPES.encode()]))
def test_deepspeed_tag_cannot_leave_its_folder(content, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tags")
    (folder / "latest").write_bytes(content)
    try:
        tag = read_tag(folder)
    except CheckpointError as error:
        assert str(error).isprintable()
    else:
        assert (folder / tag).resolve().is_relative_to(folder.resolve())


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "states", [[], None, {}, {"partition_count": None}, {"partition_count": []}, {"partition_count": "1"}]
)
def test_malformed_deepspeed_states_are_rejected(states, tmp_path):
    torch.save({"module": {}}, tmp_path / "mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": states}, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(CheckpointError):
        import_deepspeed(tmp_path, tmp_path / "out")


def test_compressed_deepspeed_state_is_rejected_before_allocation(tmp_path):
    file = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"optimizer_state_dict": {}}, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    torch.save({"module": {}}, file)
    with ZipFile(file, "a") as records:
        records.writestr("mp_rank_00_model_states/more", bytes(64 << 20), ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match=r"mp_rank_00_model_states.pt: its records have 67"):
        import_deepspeed(tmp_path, tmp_path / "out")


@pytest.mark.timeout(60)
def test_fifo_in_place_of_rank_log_does_not_block(tmp_path, caplog):
    path = path_of(tmp_path, 0)
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    RankFile(path).add("step", number=1)
    assert str(path) in caplog.text


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", SPECIAL)
def test_special_file_as_model_config_is_rejected_immediately(kind, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text("{}")
    replace_by_special(tmp_path / "config.json", kind)
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        transformers_subject(tmp_path / "config.json", None)


@pytest.mark.timeout(60)
def test_file_replaced_by_fifo_during_open_does_not_block(tmp_path, monkeypatch):
    """The file is replaced between the check of its name and its opening."""
    path = tmp_path / "file"
    path.write_bytes(b"x")
    before = os.stat(path)
    replace_by_special(path, "fifo")
    monkeypatch.setattr(os, "stat", lambda *_: before)
    with pytest.raises(OSError, match="FIFO"):
        open_regular(path)


def test_read_regular_limits_file_size(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_regular(path, limit=5) == b"12345"
    with pytest.raises(OSError, match="at most 4 bytes, but it has 5"):
        read_regular(path, limit=4)
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # a sparse file, which takes no space on the disk
    with pytest.raises(OSError, match="at most"):
        read_regular(path, limit=1 << 20)


# -- configurations ----------------------------------------------------------------------------------------------------


_DEEP = "[" * 100_000
_LONG = "1" * 5000  # more digits than Python converts
_YAML = [_DEEP, _LONG, "a: 2026-13-45", "a: !!timestamp x", "!!int ''", "!!bool x"]


@pytest.mark.parametrize(
    ("read", "name", "texts"),
    [
        (_read_mapping, "a.yaml", _YAML),
        (_read_mapping, "a.toml", [f"a = {_DEEP}", f"a = {_LONG}"]),
        (
            plugin_from_config_file,
            "a.yaml",
            [*_YAML, *(f"fsdp_config: {{fsdp_{key}: 0x{'f' * 5000}}}" for key in ("version", "min_num_params"))],
        ),
        (_loaded, "a.json", [_DEEP, _LONG]),
        (lambda path: hardware(str(path)), "a.toml", [f"a = {_DEEP}", f"a = {_LONG}"]),
        (lambda path: transformers_subject(path, 8), "config.json", [_DEEP, _LONG]),
        (lambda path: list(lines_of(path.parent)), METRICS, [f"{_DEEP}\n", f"{_LONG}\n", "[1]\n", "{}\n"]),
    ],
    ids=["train, YAML", "train, TOML", "accelerate", "deepspeed", "hardware", "model", "metrics"],
)
def test_unparsable_configuration_is_rejected(read, name, texts, tmp_path):
    for text in texts:
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError):
            read(tmp_path / name)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["num_hidden_layers", "text_config"])
def test_model_with_too_many_layers_is_rejected_before_construction(name, tmp_path):
    pytest.importorskip("transformers")
    value = {"num_hidden_layers": 10**9} if name == "text_config" else 10**9
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", name: value}))
    with pytest.raises(ConfigError, match=r"num_hidden_layers is 1000000000\. Plans support at most 10000 layers"):
        transformers_subject(tmp_path / "config.json", 8)


# -- printed output ---------------------------------------------------------------------------------------------------


@given(st.text())
def test_shown_returns_only_printable_text(text):
    assert shown(text).isprintable()
    assert all(line.isprintable() for line in shown(text, lines=True).split("\n"))
    assert text.isprintable() == (shown(text) == text)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("command", ["ls", "inspect", "verify"])
def test_escape_sequences_in_files_are_not_printed(command, tmp_path, capsys):
    dcp.save({"model": {f"w{ESCAPES}": torch.ones(2)}}, checkpoint_id=tmp_path / "theirs")
    save_file({f"w{ESCAPES}": torch.ones(2)}, tmp_path / f"{ESCAPES}.safetensors")
    for path in (tmp_path, tmp_path / "theirs", tmp_path / f"{ESCAPES}.safetensors"):
        main(["checkpoint", command, str(path)])
        stated = capsys.readouterr()
        assert not set(stated.out + stated.err) & set(ESCAPES[:1] + ESCAPES[-2:])


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("kind", ["checkpoint", "safetensors"])
def test_escape_sequences_in_files_are_not_in_error_messages(kind, tmp_path):
    """Python prints the message of an uncaught exception unmodified."""
    name = f"w{ESCAPES}"
    dcp.save({"model": {name: torch.ones(2)}}, checkpoint_id=tmp_path / name)
    save_file({name: torch.ones(2)}, tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"w.*red") as refused:
        if kind == "checkpoint":
            load(tmp_path / name, model=nn.Linear(2, 2))
        else:
            load_safetensors(nn.Linear(2, 2), tmp_path / "weights.safetensors")
    assert all(line.isprintable() for line in str(refused.value).split("\n"))


def test_error_messages_keep_line_breaks():
    assert str(CheckpointError("one\n  two\x1b[31m")) == "one\n  two\\x1b[31m"
    assert str(DiskError("one\x1b[31m")) == "one\\x1b[31m"
