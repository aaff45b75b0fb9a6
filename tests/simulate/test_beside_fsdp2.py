"""A step of this library compared with torch's FSDP2, counted on tapes: exact, deterministic, and with fewer copies."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.bench.comparison import SYSTEMS, StepTape, Task, cast, plain_step, sharded_step
from benchmarks.bench.peers import fsdp2_on_dry_streams, shard_by_fsdp2
from fullshard import dry
from fullshard.errors import StateError
from fullshard.tape.tape import Collective, Operation

WIDTH, LAYERS, VOCABULARY, SEQ, WORLD = 1024, 3, 1024, 64, 8
FULLSHARD, PEER = SYSTEMS
BLOCK = 8 * WIDTH * WIDTH + 4 * WIDTH + WIDTH + 2 * WIDTH  # elements


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float(), tokens)


TASK = Task(
    make_model=Model,
    units=lambda model: list(model.blocks),
    make_batch=lambda: torch.zeros(SEQ, dtype=torch.long),
)


@cache
def step_of(system: str, world: int = WORLD) -> StepTape:
    return sharded_step(system, TASK, world)


@cache
def plain() -> StepTape:
    return plain_step(TASK)


def collectives(system: str) -> list[Collective]:
    return [entry for entry in step_of(system).entries if isinstance(entry, Collective)]


@pytest.mark.parametrize("system", SYSTEMS)
def test_operation_counts_are_deterministic(system):
    assert sharded_step(system, TASK, WORLD).counts(plain()) == step_of(system).counts(plain())


@pytest.mark.parametrize("system", SYSTEMS)
def test_step_has_no_races(system):
    assert step_of(system).races == 0


@pytest.mark.parametrize("system", SYSTEMS)
def test_each_unit_is_all_gathered_twice_and_the_root_once(system):
    gathered = {
        (collective.origin.unit, collective.origin.phase)
        for collective in collectives(system)
        if "gather" in collective.name
    }
    assert len(gathered) == 2 * LAYERS + 1


def test_copied_bytes_are_below_a_tenth_of_fsdp2():
    fully_sharded, peer = (step_of(system).counts(plain()) for system in SYSTEMS)
    assert 0 <= fully_sharded.copied_bytes <= 0.1 * peer.copied_bytes
    assert fully_sharded.sent_bytes == pytest.approx(peer.sent_bytes, rel=0.01)  # small ones start at aligned addresses
    assert fully_sharded.host_operations <= peer.host_operations
    assert fully_sharded.peak_bytes <= 1.02 * peer.peak_bytes


def test_fsdp2_copied_bytes_match_its_source_code():
    """Per block: a cast into one buffer, a copy into the all-gather input, a copy out, and a copy of the gradients."""
    shards = 2 * BLOCK // WORLD  # bytes in bf16
    chunk_cat = "chunk_cat_mixed_dtype" if hasattr(torch.ops.fsdp, "chunk_cat_mixed_dtype") else "chunk_cat"
    of_block = {
        "aten._foreach_copy_": 2 * shards,  # before each of two gathers
        "fsdp.all_gather_copy_in": 2 * shards,
        "fsdp.split_with_sizes_copy": 2 * WORLD * shards,
        f"fsdp.{chunk_cat}": 2 * WORLD * shards,  # fp32
    }
    found = dict.fromkeys(of_block, 0)
    for entry in step_of(PEER).entries:
        if isinstance(entry, Operation) and entry.origin.unit == "blocks.1" and entry.name in found:
            found[entry.name] += sum(access.nbytes for access in entry.writes)
    assert found == of_block
    beyond = step_of(PEER).counts(plain()).copied_bytes
    root = 2 * VOCABULARY * WIDTH * 2
    assert beyond == LAYERS * 2 * (shards + WORLD * shards) + root // WORLD + root


def test_only_small_parameters_are_copied():
    fully_sharded = step_of(FULLSHARD).counts(plain()).copied_bytes
    small = 2 * (4 * WIDTH + 3 * WIDTH)
    assert fully_sharded == 2 * LAYERS * small


@pytest.mark.slow
def test_operation_count_is_independent_of_world_size():
    for system in SYSTEMS:
        few, many = (step_of(system, world).counts(plain()) for world in (WORLD, 512))
        assert (few.launches, few.collectives) == (many.launches, many.collectives)


@pytest.mark.parametrize("system", SYSTEMS)
def test_busy_exposed_and_starved_times_add_up(system):
    timeline = step_of(system).timeline()
    assert timeline.busy_s("compute") > 0
    assert timeline.exposed_s("compute") > 0
    together = timeline.busy_s("compute") + timeline.exposed_s("compute") + timeline.starved_s("compute")
    assert together == pytest.approx(timeline.end_of("compute"))
    assert timeline.end >= timeline.end_of("compute")


def test_fsdp2_stream_patches_are_removed_afterwards():
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as peer

    def patched() -> list[object]:
        group = peer.FSDPParamGroup
        return [peer._get_device_handle, peer.alloc_storage, group.unshard, torch.accelerator.current_stream]

    before = patched()
    with dry.world(2):
        mesh = init_device_mesh("cpu", (2,))
        with dry.taped() as tape, fsdp2_on_dry_streams():
            assert all(now is not then for now, then in zip(patched(), before, strict=True))
            shard_by_fsdp2(torch.bfloat16, torch.float32)(model := nn.Linear(8, 8), mesh)
            model(torch.ones(2, 8)).sum().backward()
    assert {collective.stream for collective in tape.of(Collective)} == {"gather", "reduce"}
    assert patched() == before


def test_fsdp2_on_dry_streams_raises_without_a_tape():
    with pytest.raises(StateError, match=r"dry\.taped"), fsdp2_on_dry_streams():
        pass


def test_cast_preserves_tied_weights_and_requires_grad():
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    cast(model, torch.bfloat16)
    assert model[1].weight is model[0].weight
    assert model[0].weight.dtype == torch.bfloat16
    assert [param.requires_grad for param in model.parameters()] == [True, False, True]
