"""A dry run behaves like the engine: the same values on real tensors, and the same tape on fake tensors."""

import copy
import gc
import sys
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_ranks
from small_models import ONE_AXIS, Chain, chain, inputs, sgd, whole_grads, wholes
from test_races import OPTIONS, STRATEGIES, tape_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard import ConfigError, FullyShardedDataParallel, StateError, clip_grad_norm_, dry, fully_shard
from fullshard.device import current
from fullshard.dry.streams import OF_TORCH
from fullshard.plan.ledger import peak_during
from fullshard.tape.recorder import Phase
from fullshard.tape.tape import Allocation, Collective, Free, Operation, Recorded, Waited
from fullshard.testing import assert_same


def learn(strategy: str, option: str) -> list[Any]:
    """Return all results of a run with gradient accumulation, deferred all-reduces and gradient clipping."""
    mesh = {"mesh": replicated(2, 1)} if "hsdp" in strategy else {}
    model = chain(partial(fully_shard, strategy=strategy, **OPTIONS[option], **mesh))
    optimizer, left = sgd(model), []
    for step in range(3):
        for last in (False, True):
            model.set_requires_gradient_sync(last or step == 1)
            model.set_requires_all_reduce(last)
            loss = model(inputs(step + dist.get_rank())).float().square().mean()
            loss.backward()
            left.append(loss.detach().clone())
        left += [clip_grad_norm_(model.parameters(), 0.5), whole_grads(model)]
        optimizer.step()
        optimizer.zero_grad()
    return [*left, wholes(model)]


def replicated(replicas: int, shards: int) -> Any:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


@pytest.mark.slow
@pytest.mark.parametrize("option", ["", "bf16", pytest.param("fp16", marks=pytest.mark.slow), "offload"])
@on_ranks(2)
def test_taped_streams_keep_results_bitwise_equal(option):
    for strategy in ("ddp", "zero1", "zero2", "zero3", "hsdp"):
        expected = learn(strategy, option)
        with dry.taped(values=True) as tape:
            assert_same(learn(strategy, option), expected, name=strategy)
        assert not dry.races(tape), strategy


def reported(tape: dry.Tape) -> list[Any]:
    """Return the entries of a tape from the first forward on, without the numbers of storages and marks. Before it,
    the entries differ, because values are read if there are any.
    """
    left: list[Any] = []
    start = next(i for i, entry in enumerate(tape.entries) if entry.origin.phase is Phase.FORWARD)
    for entry in tape.entries[start:]:
        match entry:
            case Operation() | Collective():
                spans = [[(access.start, access.stop) for access in (*entry.reads, *entry.writes)]]
                left.append((entry.name, entry.stream, entry.origin, spans))
            case Allocation() | Free():
                left.append((type(entry), entry.nbytes, entry.stream, entry.origin))
            case Recorded() | Waited():
                left.append((type(entry), entry.stream))
    return left


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fake_tensors_record_the_same_tape_as_real_tensors(strategy):
    for loop, option in (("steps", "bf16"), ("accumulation", "offload")):
        fakes, reals = (tape_of(strategy, loop, option, values=values) for values in (False, True))
        assert reported(fakes) == reported(reals)
        assert fakes.peak_bytes() == reals.peak_bytes() > 0
        assert fakes.peak_bytes(of_host=True) == reals.peak_bytes(of_host=True)
        assert (fakes.peak_bytes(of_host=True) > 0) == (option == "offload")


def make_chain(strategy: str = "zero3") -> Any:
    return chain(partial(fully_shard, strategy=strategy))


@pytest.mark.parametrize("strategy", ONE_AXIS)
def test_dry_run_counts_collectives_and_flops_at_any_world_size(strategy):
    for world in (2, 512, 4096):
        tape = dry.run(partial(make_chain, strategy), inputs, world=world, steps=2, microbatches=2, max_norm=1.0)
        kinds = Counter(entry.name for entry in tape.of(Collective))
        units, reductions = 5, 2 * 5
        gathers = {"ddp": 0, "zero1": 2, "zero2": 4, "zero3": 8}[strategy] * (units - 1)
        gathers += {"ddp": 0, "zero1": 2, "zero2": 4, "zero3": 4}[strategy]  # of the root, once per microbatch
        assert kinds["allgather_into_tensor_coalesced_"] == gathers
        assert kinds["allreduce_coalesced_" if strategy == "ddp" else "reduce_scatter_tensor_coalesced_"] == reductions
        assert all(entry.ranks == tuple(range(world)) for entry in tape.of(Collective))
        flops = [entry.flops for entry in tape.of(Operation) if entry.origin.phase is Phase.FORWARD]
        assert sum(flops) == 2 * 2 * 2 * 6 * (4 * 2 * 48 * 192 + 48 * 5)  # steps, microbatches, 2 per product, rows


def test_dry_run_handles_model_larger_than_machine_memory():
    width = 1 << 17

    def make() -> nn.Module:
        model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(4)])  # of 64 GiB each
        for layer in model:
            fully_shard(layer)
        return fully_shard(model)

    tape = dry.run(make, lambda: torch.randn(1, width), world=4096, steps=1)
    assert tape.peak_bytes() > 2 * 4 * width**2


@pytest.mark.parametrize("strategy", ONE_AXIS)
@on_ranks(1)
def test_tape_peak_bytes_match_measured_peak(strategy):
    def train() -> None:
        model = chain(partial(fully_shard, strategy=strategy))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            model(torch.ones(6, 48)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    counted = peak_during(train)[1]
    gc.collect()
    with dry.taped(streams="cpu", values=True) as tape:
        train()
    taped = tape.peak_bytes()
    assert counted == taped


def test_tape_frees_all_memory_of_a_deleted_model():
    """All memory is freed when the model is deleted."""
    with dry.world(8), dry.taped() as tape:
        model = make_chain()
        model(inputs()).mean().backward()
        del model
        gc.collect()
    assert sum(entry.nbytes for entry in tape.of(Allocation)) == sum(entry.nbytes for entry in tape.of(Free))


def waits_of(tape: dry.Tape, stream: str, on: str) -> list[int]:
    """Return the indices of the tape entries in which `stream` waits for `on`."""
    of_stream = {entry.mark: entry.stream for entry in tape.of(Recorded)}
    return [
        i
        for i, entry in enumerate(tape.entries)
        if isinstance(entry, Waited) and entry.stream == stream and of_stream[entry.mark] == on
    ]


@pytest.mark.parametrize("strategy", ["zero3", "hsdp"])
def test_all_gathers_overlap_computation_without_known_order(strategy):
    """In the first forward, and after a change of order, an all-gather waits for the unit before last."""
    orders = [[0, 1, 2, 3], [3, 2, 1, 0]]

    class Shuffled(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number in self.order:
                x = self.layers[number](x)
            return self.head(x)

    with dry.world(8):
        mesh = {"mesh": replicated(2, 4)} if strategy == "hsdp" else {}
        with dry.taped() as tape, torch.no_grad():
            model = chain(partial(fully_shard, strategy=strategy, **mesh), Shuffled())
            for order in orders:
                model.order = order
                model(inputs())
    marks = {entry.mark: i for i, entry in enumerate(tape.entries) if isinstance(entry, Recorded)}
    began, known, alongside = (
        -1,
        -1,
        [],
    )  # index at which the previous unit started to compute; last index that the gather stream waits for
    for i, entry in enumerate(tape.entries):
        if isinstance(entry, Waited) and entry.stream == "gather":
            known = max(known, marks[entry.mark])
        elif isinstance(entry, Collective) and entry.origin.unit:
            alongside.append(known < began)
            began = next(j for j in range(i, len(tape.entries)) if starts_computing(tape.entries[j], entry))
    # Layer 0 is gathered after the root, as in the last forward, and stays. Layer 3 is assumed to be the last one.
    assert alongside == [False, True, True, True, *(False, True, False, True)]


def starts_computing(entry: Any, gather: Collective) -> bool:
    return isinstance(entry, Operation) and entry.stream == "compute" and entry.origin.unit == gather.origin.unit


def reductions(tape: dry.Tape) -> list[int]:
    return [
        i
        for i, entry in enumerate(tape.entries)
        if isinstance(entry, Collective) and entry.name.startswith("reduce_scatt")
    ]


def test_all_reduce_over_replicas_overlaps_backward_of_next_units():
    """In hybrid sharding, an all-reduce over the slow network can overlap the backward of two units."""
    tape = dry.run(
        lambda mesh: chain(partial(fully_shard, strategy="hsdp", mesh=mesh)),
        inputs,
        world=16,
        make_mesh=lambda: replicated(2, 8),
        steps=1,
    )
    started, held = reductions(tape), waits_of(tape, "compute", "replicate")
    assert len(started) == len(held) == 5
    for number, place in enumerate(held):
        assert place > started[min(number + 1, 4)]
    assert not waits_of(tape, "reduce", "replicate")


@pytest.mark.parametrize("strategy", ["zero3", "hsdp", "ddp"])
def test_gradients_are_offloaded_on_a_separate_stream(strategy):
    tape = tape_of(strategy, "steps", "offload")
    copies = [entry for entry in tape.of(Operation) if entry.copies and entry.stream in ("compute", "offload")]
    to_host = {entry.stream for entry in copies if entry.origin.phase is Phase.POST_BACKWARD}
    assert to_host == {"offload"}
    requested = [tape.entries[i].site for i in waits_of(tape, "host", "compute")]
    assert all(site.startswith(OF_TORCH) for site in requested)
    assert len(waits_of(tape, "host", "offload")) == 3


@on_ranks(2)
def test_ddp_gradients_with_offload_match_gradients_without_offload():
    with dry.taped(values=True):
        model = chain(partial(fully_shard, strategy="ddp", **OPTIONS["offload"]))
        expected = chain(partial(fully_shard, strategy="ddp"))
        for item in (model, expected):
            for _ in range(2):
                item(inputs()).square().mean().backward()
        for local, peer in zip(model.parameters(), expected.parameters(), strict=True):
            assert_same(local.grad.to_local(), peer.grad.to_local())


class Masked(nn.Linear):
    """Has a constant as buffer, and creates a second one in forward."""

    def __init__(self) -> None:
        super().__init__(48, 48)
        self.register_buffer("offset", torch.tensor([1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, super().forward(x), torch.tensor(0.0)) + self.offset


def by_twos(layer: nn.Module) -> Any:
    model = nn.Sequential(layer, copy.deepcopy(layer))
    for part in model:
        fully_shard(part)
    return fully_shard(model)


def from_meta() -> Any:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 48))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model).to_empty(device="cpu")


def clipped(model: Any, batch: torch.Tensor) -> torch.Tensor:
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: torch.nn.utils.clip_grad_norm_(param, 1.0))
    return model(batch).mean()


@pytest.mark.slow
@pytest.mark.parametrize("values", [False, True])
def test_dry_run_supports_common_models(values):
    makers = [
        lambda: by_twos(Masked()),
        lambda: by_twos(nn.BatchNorm1d(48)),
        lambda: by_twos(nn.TransformerEncoderLayer(48, 4, 64)),
        lambda: FullyShardedDataParallel(nn.Sequential(nn.Linear(48, 48), nn.Dropout())),
        from_meta,
    ]
    for maker in makers:
        tape = dry.run(maker, inputs, world=8, values=values, microbatches=2, max_norm=1.0)
        assert not dry.races(tape)
    learning_rate = partial(torch.optim.AdamW, lr=torch.tensor(0.1), fused=True)
    dry.run(make_chain, inputs, world=8, values=values, make_optimizer=learning_rate, loss=clipped)


def test_dry_run_rejects_unsupported_models_and_arguments():
    with pytest.raises(ConfigError, match=r"aten\.nonzero .*depends on values.*values=True"):
        dry.run(make_chain, inputs, world=2, loss=lambda model, batch: model(batch).nonzero().float().sum())
    with pytest.raises(ConfigError, match="returned list, which is neither a tensor nor"):
        dry.run(lambda: fully_shard(Listing()), inputs, world=2)
    for arguments in ({"world": 0}, {"world": 2, "rank": 2}, {"world": 2, "ranks_per_host": 0}):
        with pytest.raises(ConfigError, match="rank from 0 to size - 1"):
            dry.run(make_chain, inputs, **arguments)
    for arguments in ({"steps": 0}, {"microbatches": 0}):
        with pytest.raises(ConfigError, match="both must be positive"):
            dry.run(make_chain, inputs, world=2, **arguments)
    with pytest.raises(ConfigError, match=r"streams='tpu'.*expected \"gpu\" or \"cpu\""):
        dry.run(make_chain, inputs, world=2, streams="tpu")
    with dry.world(2), pytest.raises(StateError, match="but a real one exists"):
        dry.run(make_chain, inputs, world=2)
    assert not dist.is_initialized()


def test_manually_finalized_model_raises_in_dry_run():
    with dry.world(1):
        model = make_chain()
        model.set_manual_backward_finalization(True)
        with dry.taped(values=True):
            for _ in range(2):
                with pytest.raises(StateError, match="within one context"):
                    model(inputs())


def test_model_raises_when_it_enters_or_leaves_a_dry_run():
    with dry.world(1):
        model = make_chain()
        with dry.taped(values=True):
            with pytest.raises(StateError, match=r"Chain was sharded outside of this context of fullshard\.dry\.taped"):
                model(inputs())
            within = make_chain()
            within(inputs()).sum().backward()
        with pytest.raises(StateError, match="within one context"):
            within(inputs())
        model(inputs()).sum().backward()


class Listing(nn.Linear):
    def __init__(self) -> None:
        super().__init__(48, 48)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [super().forward(x)]


class Module:
    """A stand-in for a device module such as torch.cuda, not yet initialized."""

    def __init__(self) -> None:
        self.device: int | None = None

    def is_initialized(self) -> bool:
        return self.device is not None

    def device_count(self) -> int:
        return 4

    def set_device(self, index: int) -> None:
        self.device = index

    def current_device(self) -> int:
        self.device = self.device or 0
        return self.device


@pytest.mark.parametrize(("chosen", "found"), [(None, 3), (0, 0), (2, 2)])
def test_current_device_is_local_rank_unless_device_was_set(chosen, found, monkeypatch):
    module = Module()
    module.device = chosen
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert current.current_device("cuda") == torch.device("cuda", found)


def test_device_independent_packages_do_not_refer_to_torch_cuda():
    from pathlib import Path

    import fullshard

    package = Path(fullshard.__file__).parent
    rooms = ("engine", "comm", "liveness", "tape", "layout", "policy", "state", "optim", "checkpoint", "dry")
    named = [
        f"{path.relative_to(package)}: {line.strip()}"
        for path in (*[path for room in rooms for path in (package / room).rglob("*.py")], *package.glob("*.py"))
        for line in path.read_text().splitlines()
        if "torch.cuda" in line
    ]
    assert not named


class Compared(nn.Linear):
    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (super().forward(x) - target).square().mean()


@pytest.mark.parametrize(
    "batch",
    [(torch.ones(2, 48), torch.ones(2, 48)), [torch.ones(2, 48), 1.0], {"x": torch.ones(2, 48), "target": 1.0}],
)
def test_dry_run_passes_batches_as_model_arguments(batch):
    assert dry.run(lambda: fully_shard(Compared(48, 48)), lambda: batch, world=4, steps=1).entries
    with pytest.raises(ConfigError, match="forward does not take a batch of type"):
        dry.run(lambda: fully_shard(nn.Linear(48, 48)), lambda: batch, world=4, steps=1)


def test_dry_run_supports_several_ranks_of_hybrid_mesh_in_sequence():
    """Meshes of an earlier world, whose process groups do not exist anymore, are equal to those of a later one."""
    for rank in (0, 5, 2):
        tape = dry.run(
            lambda mesh: chain(partial(fully_shard, mesh=mesh)),
            inputs,
            world=8,
            rank=rank,
            make_mesh=lambda: replicated(2, 4),
            max_norm=1.0,
        )
        groups = {entry.ranks for entry in tape.of(Collective)}
        assert groups and all(rank in ranks for ranks in groups)


@pytest.mark.parametrize(
    "make_mesh",
    [
        lambda: init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard")),
        lambda: init_device_mesh("cpu", (2, 1, 4), mesh_dim_names=("dp", "tp", "shard"))["dp", "shard"],
        lambda: DeviceMesh("cuda", [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
)
def test_dry_run_with_mesh_made_by_model_function_matches_make_mesh(make_mesh):
    def collectives(tape: dry.Tape) -> list[Any]:
        return [(entry.name, entry.ranks, entry.sizes) for entry in tape.of(Collective)]

    expected = dry.run(
        lambda mesh: chain(partial(fully_shard, mesh=mesh)), inputs, world=8, make_mesh=lambda: replicated(2, 4)
    )
    tape = dry.run(lambda: chain(partial(fully_shard, mesh=make_mesh())), inputs, world=8)
    assert collectives(tape) == collectives(expected)


def test_dry_run_rejects_device_mesh_of_a_tensor():
    with pytest.raises(ConfigError, match=r"no values in a dry run\. Pass a list of ranks"):
        dry.run(lambda: chain(partial(fully_shard, mesh=DeviceMesh("cpu", torch.arange(8)))), inputs, world=8)


@pytest.mark.slow
def test_dry_run_cost_is_linear_in_the_number_of_layers():
    def calls_of(layers: int) -> int:
        count = 0

        def note(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event == "call"

        def make() -> nn.Module:
            model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
            for layer in model:
                fully_shard(layer)
            return fully_shard(model)

        sys.setprofile(note)
        try:
            dry.run(make, lambda: torch.ones(2, 8), world=8)
        finally:
            sys.setprofile(None)
        return count

    calls_of(2)  # fills the caches of torch
    assert calls_of(160) < 2.2 * calls_of(80)
