"""Weights are exchanged with other tools through safetensors files, bitwise, and no rank holds the whole model."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import subprocess
import weakref
from collections.abc import Callable, Collection
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from killing import die_before, ended_well
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from shared_ranks import on_ranks, run_ranks, same_on_all_ranks
from small_models import Chain, Layer, SmallGPT, batch, chain, loss_of, shard, small_gpt, wholes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fullshard import CheckpointError, ConfigError, FullyShardedDataParallel, fully_shard
from fullshard.checkpoint import Merged, Unmatched, export_safetensors, load_safetensors, tensor_files
from fullshard.checkpoint.exporting import export_stored, write_safetensors
from fullshard.checkpoint.stored import open_stored
from fullshard.checkpoint.tensor_files import Description, TensorFile
from fullshard.engine.registry import units_in
from fullshard.plan.ledger import peak_during, storage_bytes
from fullshard.policy.arguments import parse_size
from fullshard.testing import assert_same
from fullshard.wrap import ModuleWrapPolicy

STRATEGIES = {
    1: ("ddp", "zero1", "zero2", "zero3"),
    2: ("ddp", "zero1", "zero2", "zero3", "hsdp", "hsdp_zero2"),
    3: ("ddp", "zero1", "zero2", "zero3"),
    4: ("ddp", "zero1", "zero2", "zero3", "hsdp", "hsdp_zero2"),
}
FEW = {1: ("zero1",), 2: ("ddp", "zero3"), 3: ("zero2",), 4: ("hsdp",)}
SENTINEL = 7.25


def files_of(folder: Path) -> dict[str, Tensor]:
    """Return all tensors in the safetensors files of a folder."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def sharded(model: SmallGPT, strategy: str) -> SmallGPT:
    replicas = 2 if strategy.startswith("hsdp") else 0
    shape = (replicas, dist.get_world_size() // replicas) if replicas else (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    return shard(model, tied_in_two_units=strategy == "zero2", mesh=mesh, strategy=strategy)


def mark(model: nn.Module) -> nn.Module:
    """Overwrite all values of `model` and return it."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(SENTINEL)
    return model


def once(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors that are stored. A tied weight is stored under its first name."""
    return {name: tensor for name, tensor in tensors.items() if name != "head.weight"}


# -- export and import ------------------------------------------------------------------------------------------------


def go_there_and_back(folder: Path, strategies: tuple[str, ...]) -> None:
    expected = small_gpt(2).state_dict()
    losses = []
    for strategy in strategies:
        out = export_safetensors(sharded(small_gpt(2), strategy), folder / strategy, max_shard_size=300_000)
        assert_same(files_of(out), once(expected), name=strategy)
        with torch.device("meta"):
            built = SmallGPT(2)
        for model in (mark(small_gpt(2)), built):
            model = sharded(model, strategy)
            assert load_safetensors(model, out) == Unmatched()
            assert_same(wholes(model), expected, name=strategy)
            assert model.head.weight is model.embedding.weight
            losses.append(loss_of(model, batch(0, sequences=2)).detach())
    assert_same(losses, losses[:1] * len(losses))


@pytest.mark.parametrize("world", [1, 2, *(pytest.param(item, marks=pytest.mark.slow) for item in (3, 4))])
def test_weights_survive_export_and_import(tmp_path, world):
    """Export several files at every world size, and import into models with other values and on the meta device."""
    run_ranks(world, go_there_and_back, tmp_path, FEW[world])
    for folder in tmp_path.iterdir():
        assert len(list(folder.glob("*.safetensors"))) > 1


@pytest.mark.slow
@pytest.mark.parametrize("world", STRATEGIES)
def test_weights_survive_export_and_import_under_every_strategy(tmp_path, world):
    run_ranks(world, go_there_and_back, tmp_path, STRATEGIES[world])


def test_unsharded_model_is_exported_without_process_group(tmp_path):
    model = small_gpt(1)
    out = export_safetensors(model, tmp_path / "out", metadata={"author": "me"})
    assert sorted(path.name for path in out.iterdir()) == ["checksums.json", "model.safetensors"]
    assert_same(load_file(out / "model.safetensors"), once(model.state_dict()))
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "author": "me", "head.weight": "embedding.weight"}
    for path in (out, out / "model.safetensors"):
        other = mark(small_gpt(1))
        load_safetensors(other, path)
        assert_same(other.state_dict(), model.state_dict())


def test_exported_files_respect_max_shard_size_and_are_indexed(tmp_path):
    model = chain(lambda module: module)
    out = export_safetensors(model, tmp_path / "out", max_shard_size="60KB")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(param.nbytes for param in model.parameters())}
    files = sorted(out.glob("*.safetensors"))
    assert [path.name for path in files] == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    for path in files:
        tensors = load_file(path)
        assert {name for name, file in index["weight_map"].items() if file == path.name} == set(tensors)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 60_000
    assert_same(files_of(out), model.state_dict())


class Odd(nn.Module):
    """Tensors of many dtypes and shapes, and a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        for index, dtype in enumerate((torch.float32, torch.float64, torch.bfloat16, torch.float16)):
            self.register_parameter(f"weight_{index}", nn.Parameter(torch.randn(5, 3).to(dtype)))
        self.register_buffer("count", torch.tensor(2**40 + 1))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("phase", torch.randn(4, dtype=torch.complex64))
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x


def cast(folder: Path) -> None:
    model = fully_shard(Odd(), strategy="zero3")
    plain = Odd().state_dict()
    low = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in plain.items()}
    assert_same(files_of(export_safetensors(model, folder / "own")), plain)
    assert_same(files_of(export_safetensors(model, folder / "low", dtype=torch.bfloat16)), low)
    load_safetensors(model, folder / "low")
    assert_same(wholes(model), {name: tensor.to(plain[name].dtype) for name, tensor in low.items()})
    with torch.device("meta"):
        built = fully_shard(Odd(), strategy="zero3")
    for other in (fully_shard(Odd(), strategy="zero3"), built):
        load_safetensors(other, folder / "own", dtype=torch.bfloat16)
        assert_same(wholes(other), low)


def test_export_and_import_keep_or_cast_dtypes(tmp_path):
    run_ranks(2, cast, tmp_path)


# -- memory -----------------------------------------------------------------------------------------------------------


def wrapped_on_meta(strategy: str) -> nn.Module:
    with torch.device("meta"):
        model = Chain()
    for layer in model.layers:
        fully_shard(layer, strategy=strategy)
    return fully_shard(model, strategy=strategy)


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@on_ranks("world")
def test_export_and_import_hold_one_unit_and_read_only_local_shards(tmp_path, world):
    read: list[int] = []
    alive: list[weakref.ref[Tensor]] = []

    def noted(*args: Any) -> Tensor:
        assert [part for part in alive if part() is not None] == []
        part = plainly(*args)
        alive.append(weakref.ref(part))
        read.append(part.untyped_storage().nbytes())
        return part

    plainly, tensor_files._read = tensor_files._read, noted
    for strategy in ("zero3", "zero1"):
        model = chain(lambda module, strategy=strategy: fully_shard(module, strategy=strategy))
        largest = max(param.nbytes for param in model.parameters())
        unit = max(sum(4 * param.layout.spec.numel for param in unit.params) for unit in units_in(model))
        _, peak = peak_during(lambda model=model, strategy=strategy: export_safetensors(model, tmp_path / strategy))
        assert peak <= unit + 4096
        assert peak <= 2 * largest + 4096  # one of the two copies is held by torch, if it gathers
        built = wrapped_on_meta(strategy)
        read.clear()
        _, peak = peak_during(lambda built=built, strategy=strategy: load_safetensors(built, tmp_path / strategy))
        offloaded_states = storage_bytes(built.parameters(), [unit.slot.storage for unit in units_in(built)])
        local = max(param.to_local().nbytes for param in built.parameters())
        assert peak <= offloaded_states + unit + 4096
        assert max(read) == local
        assert_same(wholes(built), wholes(model))
        total = sum(param.nbytes for param in built.parameters())
        assert sum(read) == sum(param.to_local().nbytes for param in built.parameters())
        assert strategy == "zero1" or sum(read) < 1.1 * total / dist.get_world_size()


@on_ranks(1)
def test_tensor_file_allocates_disk_space_but_no_memory(tmp_path):
    path = tmp_path / "much.safetensors"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    TensorFile(path, {"much": Description((64 << 20,), torch.float32)}, {})
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert (tmp_path / "much.safetensors").stat().st_size > 256 << 20
    assert grown_kib < 64 << 10


# -- interoperability with other programs -----------------------------------------------------------------------------


def causal_models() -> dict[str, Callable[[], Any]]:
    import transformers

    llama = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=2,
    )
    gpt2 = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    return {
        "llama": lambda: transformers.LlamaForCausalLM(llama),
        "gpt2": lambda: transformers.GPT2LMHeadModel(gpt2),
    }


def visit_transformers(folder: Path) -> None:
    import transformers

    tokens = torch.arange(10)[None] * 5 % 64
    for name, build in causal_models().items():
        torch.manual_seed(0)
        plain = build().eval()
        expected = plain(tokens).logits.detach()
        model = build().eval()
        model.load_state_dict(plain.state_dict())
        blocks = model.model.layers if name == "llama" else model.transformer.h
        for block in blocks:
            fully_shard(block)
        fully_shard(model)
        out = export_safetensors(model, folder / name, max_shard_size="20KB")
        opened = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
        assert type(opened) is type(plain)
        assert_same(opened.state_dict(), plain.state_dict())
        assert_same(opened(tokens).logits.detach(), expected)
        low = export_safetensors(model, folder / f"{name}-low", dtype=torch.bfloat16)
        assert transformers.AutoModelForCausalLM.from_pretrained(low).dtype == torch.bfloat16
        peer = folder / f"{name}-theirs"
        if dist.get_rank() == 0:
            plain.save_pretrained(peer, max_shard_size="20KB")
        dist.barrier()
        wrapped = FullyShardedDataParallel(mark(build()).eval(), auto_wrap_policy=ModuleWrapPolicy({type(blocks[0])}))
        load_safetensors(wrapped, peer)
        again = export_safetensors(wrapped, folder / f"{name}-again")
        configs = [json.loads((folder / "config.json").read_text()) for folder in (out, again, peer)]
        assert configs[0] == configs[1] == configs[2]
        assert_same(files_of(again), files_of(out))


@pytest.mark.slow
def test_export_and_import_interoperate_with_transformers(tmp_path):
    pytest.importorskip("transformers")
    run_ranks(2, visit_transformers, tmp_path)


def parallel() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 18), nn.ReLU(), nn.Linear(18, 7))


@on_ranks(4)
def test_tensor_parallel_weights_survive_export_and_import(tmp_path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    expected = parallel().state_dict()
    models = []
    for made in (parallel(), mark(parallel())):
        parallelize_module(made, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        models.append(fully_shard(made, mesh=mesh["dp"]))
    out = export_safetensors(models[0], tmp_path / "out")
    assert_same(files_of(out), expected)
    load_safetensors(models[1], out)
    for name, value in models[1].state_dict().items():
        assert_same(value.full_tensor(), expected[name], name=name)


# -- names ------------------------------------------------------------------------------------------------------------


class Untied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def test_tied_weights_load_into_untied_model_and_back(tmp_path):
    tied = Untied(tied=True)
    out = export_safetensors(tied, tmp_path / "tied")
    untied = mark(Untied(tied=False))
    load_safetensors(untied, out)
    assert_same(untied.state_dict(), tied.state_dict())
    copies = {name: tensor.clone() for name, tensor in tied.state_dict().items()}
    save_file(copies, tmp_path / "both.safetensors")
    save_file({"head.weight": copies["head.weight"]}, tmp_path / "last.safetensors")
    for name in ("both", "last"):
        other = mark(Untied(tied=True))
        load_safetensors(other, tmp_path / f"{name}.safetensors")
        assert_same(other.state_dict(), tied.state_dict())
    copies["head.weight"][5, 3] += 1
    save_file(copies, tmp_path / "apart.safetensors")
    refuse(
        other,
        tmp_path / "apart.safetensors",
        "but not in the checkpoint: embedding.weight and head.weight",
    )


def test_rename_maps_and_skips_tensors(tmp_path):
    plain = Untied(tied=False)
    stored = {f"model.{name}": tensor for name, tensor in plain.state_dict().items()}
    save_file({**stored, "model.inv_freq": torch.ones(3)}, tmp_path / "model.safetensors")
    model = mark(Untied(tied=False))
    load_safetensors(model, tmp_path, rename=lambda name: None if "freq" in name else name.removeprefix("model."))
    assert_same(model.state_dict(), plain.state_dict())
    refuse(
        model,
        tmp_path,
        "rename gives 'model.head.weight' and 'model.inv_freq' the same name, 'x'",
        rename=lambda name: "x" if "embedding" not in name else name,
    )


def test_missing_tensors_stay_unchanged_if_not_strict(tmp_path):
    plain = Untied(tied=False)
    save_file({"head.weight": plain.head.weight.detach(), "more": torch.ones(2)}, tmp_path / "some.safetensors")
    model = mark(Untied(tied=False))
    reported = load_safetensors(model, tmp_path / "some.safetensors", strict=False)
    assert reported == Unmatched(("embedding.weight",), ("more",))
    assert_same(model.head.weight.detach(), plain.head.weight.detach())
    assert (model.embedding.weight == SENTINEL).all()
    with torch.device("meta"):
        built = Untied(tied=False)
    with pytest.raises(CheckpointError, match=r"missing in it: embedding.weight \(on the meta device"):
        load_safetensors(built, tmp_path / "some.safetensors", strict=False)
    assert built.head.weight.is_meta


# -- mistakes and damage ----------------------------------------------------------------------------------------------


def refuse(model: nn.Module, path: Path, *stated: str, **options: Any) -> str:
    """Return the error of loading, after checking that nothing was overwritten."""
    before = {name: whole.clone() for name, whole in wholes(model).items()}
    with pytest.raises(CheckpointError) as caught:
        load_safetensors(model, path, **options)
    for words in stated:
        assert words in str(caught.value), caught.value
    assert_same(wholes(model), before)
    return str(caught.value)


def misfit(folder: Path) -> str:
    model = chain(fully_shard)
    tensors = {name: tensor for name, tensor in Chain().state_dict().items() if name != "layers.1.up.bias"}
    tensors["head.weight"] = torch.zeros(5, 47)
    tensors["layers.2.norm.bias"] = torch.zeros(48, dtype=torch.complex64)
    tensors["new"] = torch.zeros(3)
    if dist.get_rank() == 0:
        save_file(tensors, folder / "model.safetensors")
    dist.barrier()
    return refuse(
        model,
        folder,
        f"loading {folder}: {folder} does not fit; missing in it: layers.1.up.bias; unexpected in it: new; "
        "of a different shape: layers.2.norm.bias (torch.complex64 in it, torch.float32 in the model), "
        "head.weight ((5, 47) in it, (5, 48) in the model). Nothing was overwritten.",
        "strict=False",
    )


def test_all_mismatches_raise_one_error_on_every_rank(tmp_path):
    stated = run_ranks(3, misfit, tmp_path)
    assert stated == stated[:1] * 3


def lose(folder: Path) -> str:
    model = chain(fully_shard)
    if dist.get_rank() == 0:
        export_plainly = chain(lambda module: module)
        save_file(export_plainly.state_dict(), folder / "model.safetensors")
    dist.barrier()
    if dist.get_rank() == 1:
        folder = folder / "not_here"
    with pytest.raises(CheckpointError) as caught:
        load_safetensors(model, folder)
    return str(caught.value)


def test_file_missing_on_one_rank_raises_on_every_rank(tmp_path):
    stated = [re.sub("^loading [^:]*: ", "", run_rank) for run_rank in run_ranks(2, lose, tmp_path)]
    assert stated[0] == stated[1]
    assert stated[0].startswith("rank 1: ")
    assert "expected a safetensors file, found one that cannot be read (No such file or directory" in stated[0]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with several files. Tests must not modify it."""
    return export_safetensors(small(), tmp_path_factory.mktemp("exported") / "out", max_shard_size=7_000)


def small() -> Chain:
    torch.manual_seed(5)
    model = Chain([Layer()])
    model.layers[0].up = nn.Linear(48, 32)
    model.layers[0].down = nn.Linear(32, 48)
    return model


def break_one(path: Path, draw: random.Random) -> str:
    """Damage a file in a random way and return the kind of damage."""
    data = bytearray(path.read_bytes())
    kind = draw.choice(("flip", "overwrite", "cut", "grow", "early"))
    if kind == "flip":
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == "early":  # where the header is
        data[draw.randrange(min(len(data), 900))] ^= 1 << draw.randrange(8)
    elif kind == "overwrite":
        start = draw.randrange(len(data))
        stop = min(len(data), start + draw.randrange(1, 3000))
        data[start:stop] = draw.randbytes(stop - start)
    elif kind == "cut":
        del data[draw.randrange(len(data)) :]
    else:
        data += draw.randbytes(draw.randrange(1, 100))
    path.write_bytes(data)
    return kind


def fuzz(folder: Path, cases: int, *, verified: bool) -> int:
    """Return how many cases were rejected. The others were loaded exactly, if the files can be verified."""
    draw = random.Random(int(verified))
    expected = small().state_dict()
    refused = 0
    if not verified:
        (folder / "checksums.json").unlink()
    files = sorted(folder.iterdir())
    for case in range(cases):
        path = draw.choice(files)
        data = path.read_bytes()
        kind = break_one(path, draw)
        model = mark(small())
        try:
            load_safetensors(model, folder)
        except CheckpointError as error:
            refused += 1
            assert all((tensor == SENTINEL).all() for tensor in model.state_dict().values())
            assert str(folder) in str(error)
        else:
            assert set(model.state_dict()) == set(expected)
            if verified:
                assert_same(model.state_dict(), expected, name=f"case {case}: {kind} of {path.name}")
        path.write_bytes(data)
    return refused


def test_damaged_export_raises_or_loads_exactly(exported, tmp_path):
    assert fuzz(shutil.copytree(exported, tmp_path / "copy"), 250, verified=True) > 200


def test_damaged_header_raises_without_checksums(exported, tmp_path):
    assert fuzz(shutil.copytree(exported, tmp_path / "copy"), 250, verified=False) > 100


@pytest.mark.parametrize(
    ("damage", "stated"),
    [
        (lambda folder: (folder / "model-00002-of-00003.safetensors").unlink(), "model-00002-of-00003.safetensors"),
        (lambda folder: os.truncate(folder / "model-00001-of-00003.safetensors", 700), "incomplete metadata"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{"), "cannot be parsed"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("[]"), "found no 'weight_map'"),
        (
            lambda folder: point_to_other_file(folder, "../secret"),
            "expected names of files in the same folder, found '../secret'",
        ),
        (lambda folder: point_to_other_file(folder, "model-00001-of-00003.safetensors"), "found no such tensor there"),
        (lambda folder: (folder / "checksums.json").write_text("{}"), "If the files were changed on purpose, delete"),
        (lambda folder: (folder / "other.safetensors.index.json").touch(), "expected one index, found model"),
        (lambda folder: shutil.rmtree(folder), "expected a safetensors file"),
    ],
)
def test_damage_error_names_folder_and_cause(exported, tmp_path, damage, stated):
    folder = shutil.copytree(exported, tmp_path / "copy")
    damage(folder)
    refuse(mark(small()), folder, f"loading {folder}: {folder}", stated)


def point_to_other_file(folder: Path, name: str) -> None:
    index = folder / "model.safetensors.index.json"
    reported = json.loads(index.read_text())
    reported["weight_map"]["head.weight"] = name
    index.write_text(json.dumps(reported))


def test_folder_without_files_or_with_ambiguous_files_is_rejected(tmp_path):
    refuse(small(), tmp_path, "expected a safetensors file, found none")
    for name in ("a", "b"):
        save_file({"x": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    refuse(small(), tmp_path, "found 2 of them, and no index")


# -- atomic exports ---------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_export_rejects_weights_or_arguments_that_differ_between_ranks(tmp_path):
    cases: list[tuple[Callable[[], nn.Module], dict[str, Any], str]] = [
        (lambda: nn.Linear(4, 6), {}, r"weight \(8, 4\) float32 in model.safetensors on rank 0, but weight \(6, 4\)"),
        (lambda: nn.Linear(4, 8, bias=False), {}, r"bias \(8,\) .* on rank 0, but no further one on rank 1"),
        (lambda: nn.Linear(4, 8), {"dtype": torch.bfloat16}, "but .* bfloat16"),
        (lambda: nn.Linear(4, 8), {"max_shard_size": 130}, "but weight .* in model-00001-of-00002"),
    ]
    odd = dist.get_rank() == 1
    for number, (make, options, stated) in enumerate(cases):
        model = fully_shard(make() if odd else nn.Linear(4, 8))
        folder = tmp_path / str(number)
        with pytest.raises(CheckpointError, match=stated):
            export_safetensors(model, folder, **(options if odd else {}))
        assert not folder.exists()
        if not options:
            with pytest.raises(CheckpointError, match="ranks differ"):
                write_safetensors(model.state_dict(), tmp_path / "one.safetensors")


@on_ranks(2)
def test_failed_export_leaves_no_files_and_raises_on_every_rank(tmp_path):
    folder = tmp_path / "out"

    def full(self: TensorFile, tensor: Tensor) -> None:
        raise OSError(28, "No space left on device")

    model = chain(fully_shard)
    folder.with_name(f"out.partial-{'01' * 16}").mkdir(exist_ok=True)  # left by a run that was killed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorFile, "write", full)
        with pytest.raises(CheckpointError) as caught:
            export_safetensors(model, folder, max_shard_size=30_000)
    dist.barrier()
    assert list(folder.parent.iterdir()) == []
    dist.barrier()
    export_safetensors(model, folder)
    with pytest.raises(CheckpointError, match="the folder is not empty"):
        export_safetensors(model, folder)
    assert_same(files_of(folder), wholes(model))
    stated = same_on_all_ranks(str(caught.value))
    assert "out: rank 0: OSError: [Errno 28] No space left on device" in stated


def test_export_keeps_other_folders_with_similar_names(tmp_path):
    others = ["out.partial-results", "out.partial-2024", f"out.partial-{'01' * 16}.bak"]
    for name in others:
        (tmp_path / name).mkdir()
    export_safetensors(small(), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["out", *others])


def export_and_die(folder: Path, operation: int) -> None:
    """Export, but kill the process before file operation number `operation`."""
    die_before(operation, folder)
    export_safetensors(small(), folder / "out", max_shard_size=7_000)


def test_export_killed_at_any_file_operation_is_complete_or_absent(tmp_path):
    expected = small().state_dict()
    ended, operation = False, 0
    while not ended:
        operation += 1
        folder = tmp_path / str(operation)
        folder.mkdir()
        ended = ended_well(1, export_and_die, folder, operation)
        if (folder / "out").exists():
            model = mark(small())
            load_safetensors(model, folder / "out")
            assert_same(model.state_dict(), expected)
        else:
            assert not ended
            export_safetensors(small(), folder / "out")
        assert [path.name for path in folder.iterdir()] == ["out"]
    assert operation > 8


def test_export_to_full_disk_raises_and_leaves_no_files(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(place)]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk: {mounted.stderr.decode().strip()}")
    try:
        with pytest.raises(CheckpointError, match=r"exporting to .*/out: .*No space left on device"):
            export_safetensors(chain(lambda module: module), place / "out")
        assert list(place.iterdir()) == []
        export_safetensors(small(), place / "out")
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_failed_replacement_leaves_no_temporary_file(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"writing .*IsADirectoryError"):
        write_safetensors({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    assert os.listdir(tmp_path) == ["model.safetensors"]


class Stateful(nn.Linear):
    def get_extra_state(self) -> str:
        return "words"


def test_export_error_names_unsupported_values(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match=r"the model: _extra_state are not tensors, and a safetensors file"):
        export_safetensors(Stateful(2, 2), out)
    with pytest.raises(CheckpointError, match=r"2 tensors of the model are on the meta device, such as weight"):
        export_safetensors(nn.Linear(2, 2, device="meta"), out)
    with pytest.raises(CheckpointError, match=r"cannot hold weight \(torch.complex128\)"):
        export_safetensors(nn.Linear(2, 2, dtype=torch.complex128, bias=False), out)
    with pytest.raises(ConfigError, match=r"dtype=torch.int8: weights can only be cast to a floating-point dtype"):
        export_safetensors(nn.Linear(2, 2), out, dtype=torch.int8)
    with pytest.raises(ConfigError, match=r"dtype=torch.int8: weights can only be cast to a floating-point dtype"):
        load_safetensors(nn.Linear(2, 2), out, dtype=torch.int8)
    with pytest.raises(ConfigError, match=r"metadata has 3: the metadata of a safetensors file can only hold strings"):
        export_safetensors(nn.Linear(2, 2), out, metadata={"step": 3})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_export_error_names_non_tensor_values_of_torch_checkpoint(tmp_path):
    """Values outside the model are skipped."""
    weights = {"weight": torch.ones(2, 2)}
    dcp.save({"model": {**weights, "_extra_state": "words"}, "epoch": 3}, checkpoint_id=tmp_path / "whole")
    with pytest.raises(CheckpointError, match=r"whole: _extra_state are not tensors, and a safetensors file"):
        export_stored(open_stored(tmp_path / "whole"), tmp_path / "out")
    for name, saved in {"model": {"model": weights, "epoch": 3}, "weights": {**weights, "epoch": 3}}.items():
        dcp.save(saved, checkpoint_id=tmp_path / name)
        folder = export_stored(open_stored(tmp_path / name), tmp_path / f"{name} exported")
        assert_same(load_file(folder / "model.safetensors"), weights)


def test_parse_size_accepts_numbers_and_units():
    assert [parse_size(size, "size", "a file") for size in (7, "7", "7kb", "1.5 MB", "5GB", "2TB")] == [
        7,
        7,
        7000,
        1500000,
        5 * 10**9,
        2 * 10**12,
    ]
    for odd in (0, -1, "5 apples", "", "1.2.3GB", "GB", 0.5):
        with pytest.raises(ConfigError, match="is not a size of a file"):
            parse_size(odd, "size", "a file")


# -- merged tensors ---------------------------------------------------------------------------------------------------


def experts_of(names: Collection[str]) -> dict[str, Merged]:
    """Stack the three experts, and concatenate the gate and up matrices of each expert."""
    stacks = [Merged(tuple(name for name in sorted(names) if name.endswith(kind))) for kind in ("gate", "up")]
    return {"experts": Merged(tuple(stacks), dim=1)}


def test_merged_tensors_are_read_as_one(tmp_path):
    parts = {f"{i}.{kind}": torch.randn(rows, 4) for i in range(3) for kind, rows in (("gate", 2), ("up", 3))}
    save_file({**parts, "norm": torch.ones(4)}, tmp_path / "model.safetensors")
    opened = tensor_files.open_tensor_files(tmp_path)
    files = opened.with_merged(experts_of(opened.tensors))
    expected = torch.stack([torch.cat([parts[f"{i}.gate"], parts[f"{i}.up"]]) for i in range(3)])
    assert {name: tensor.shape for name, tensor in files.tensors.items()} == {"experts": (3, 5, 4), "norm": (4,)}
    for spans in product(*([range(a, b) for a in range(n + 1) for b in range(a, n + 1)] for n in (3, 5, 4))):
        [(_, found)] = files.read({"it": ("experts", spans)})
        assert_same(found, expected[tuple(slice(span.start, span.stop) for span in spans)])
    [(_, found)] = files.read({"it": ("experts", None)})
    assert_same(found, expected)
    model = nn.Module()
    model.experts, model.norm = nn.Parameter(torch.zeros(3, 5, 4)), nn.Parameter(torch.zeros(4))
    assert load_safetensors(model, tmp_path, merge=experts_of) == Unmatched()
    assert_same(model.experts.detach(), expected)


def test_merge_error_names_tensors_of_different_shapes(tmp_path):
    save_file({"0.gate": torch.ones(2, 4), "1.gate": torch.ones(3, 4)}, tmp_path / "model.safetensors")
    merged = {"experts": Merged(("0.gate", "1.gate"))}
    with pytest.raises(CheckpointError, match=r"experts is stored in tensors .* 0.gate \(2, 4\) float32"):
        load_safetensors(nn.Linear(1, 1), tmp_path, merge=lambda names: merged)
