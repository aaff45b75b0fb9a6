"""Muon on shards is bitwise equal to plain Muon for any sharding. One rank orthogonalizes each matrix."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise, product
from typing import Any
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from pages import code_blocks, page, rows, section
from shared_ranks import in_fake_world, on_ranks, run_ranks
from small_models import ONE_AXIS, whole, whole_grads, wholes
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fullshard.optim.muon
from fullshard import FullyShardedDataParallel, Placement, Placements, RankMismatchError, fully_shard, recording
from fullshard._dry_compat import storage_watch
from fullshard.comm.native import NativeCollectives
from fullshard.comm.routes import collectives_for
from fullshard.layout.shard_spec import owned
from fullshard.optim.muon import Muon, divide, orthogonalized
from fullshard.state.optim_state import full_optim_state_dict, optim_state_dict_to_load
from fullshard.tape.recorder import Recorder
from fullshard.testing import assert_same
from fullshard.testing import run_ranks as run_fresh_ranks
from fullshard.wrap import ModuleWrapPolicy

# -- one process ------------------------------------------------------------------------------------------------------


SHAPES = [(64, 32), (32, 64), (131, 97), (5, 97), (97, 5), (1, 7), (7, 1), (1, 1), (0, 5), (48, 48)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"lr": 0.02, "nesterov": False, "weight_decay": 0.3, "momentum": 0.8},
    {"lr": torch.tensor(0.02), "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3},
    {"lr": torch.tensor([0.1]), "adjust_lr_fn": "original", "eps": 0.1, "ns_coefficients": (2.0, -1.5, 0.5)},
]


def numbers(shape: Sequence[int], *seed: object, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random numbers that depend only on the shape and the seed, in every process."""
    generator = torch.Generator().manual_seed(crc32(repr((tuple(shape), seed)).encode()))
    return torch.randn(tuple(shape), generator=generator).to(dtype)


def stepped(kind: type[torch.optim.Optimizer], dtype: torch.dtype, options: dict[str, Any]) -> Any:
    """Plain parameters after some steps, and the optimizer's state dict."""
    params = [nn.Parameter(numbers(shape, dtype=dtype)) for shape in SHAPES]
    optimizer = kind(params, **options)
    for step in range(1, 4):
        for param in params:
            param.grad = None if step == len(param) else numbers(param.shape, step, dtype=dtype)
        optimizer.step()
    return [param.detach() for param in params], optimizer.state_dict()


def names_of(options: dict[str, Any]) -> str:
    return ",".join(options) or "defaults"


@pytest.mark.parametrize("options", OPTIONS, ids=names_of)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_muon_on_plain_tensors_matches_torch_muon_bitwise(dtype, options):
    """Parameters, momenta and options have torch's names, so that a state dict fits both optimizers."""
    assert_same(stepped(Muon, dtype, options), stepped(torch.optim.Muon, dtype, options))


def test_muon_on_bfloat16_parameters_matches_torch_muon_within_rounding():
    """torch adds with a bfloat16 learning rate, and rounds by memory order. Sharding must not change the result."""
    own, peer = (stepped(kind, torch.bfloat16, {"lr": 0.02}) for kind in (Muon, torch.optim.Muon))
    assert_same(own[1], peer[1])
    torch.testing.assert_close(own[0], peer[0], rtol=2**-7, atol=2**-7)


def test_orthogonalization_does_not_modify_bfloat16_momentum():
    momenta = [
        [values["momentum_buffer"].float() for values in stepped(Muon, dtype, {"nesterov": False})[1]["state"].values()]
        for dtype in (torch.bfloat16, torch.float32)
    ]
    torch.testing.assert_close(*momenta, rtol=2**-6, atol=2**-6)


@given(rows=st.integers(1, 40), columns=st.integers(1, 40), seed=st.integers(0, 9))
def test_orthogonalization_keeps_singular_vectors_and_drives_values_to_one(rows, columns, seed):
    matrix = numbers((rows, columns), seed, dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    result = left.T @ orthogonalized(matrix, (3.4445, -4.7750, 2.0315), 10, 1e-7) @ right.T
    torch.testing.assert_close(result, result.diagonal().diag(), rtol=0, atol=1e-6)
    clear = result.diagonal()[values > 1e-2 * values[0]]  # smaller ones take more iterations
    assert ((clear > 0.6) & (clear < 1.3)).all()


def test_muon_step_calls_closure_with_gradients_enabled():
    weight = nn.Parameter(torch.ones(2, 3))
    muon = Muon([weight])

    def closure() -> float:
        loss = weight.square().sum()
        loss.backward()
        return loss.item()

    assert muon.step(closure) == 6.0
    assert muon.step() is None
    assert (weight != 1).all()


# -- division of work -------------------------------------------------------------------------------------------------


@given(
    work=st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9)), max_size=6),
    owners=st.integers(1, 3),
    limit=st.integers(0, 20),
)
def test_divide_balances_costs_and_limits_batch_sizes(work, owners, limit):
    costs, nbytes = [cost for cost, _ in work], [size for _, size in work]
    batches = divide(costs, nbytes, owners, limit)
    owner_of = {i: owner for batch in batches for owner, numbers in enumerate(batch) for i in numbers}
    assert sorted(i for batch in batches for numbers in batch for i in numbers) == list(range(len(work)))

    def busiest(division: Sequence[int]) -> int:
        return max(sum(cost for cost, who in zip(costs, division, strict=True) if who == o) for o in range(owners))

    best = min(busiest(division) for division in product(range(owners), repeat=len(work)))
    assert 3 * busiest([owner_of[i] for i in range(len(work))]) <= 4 * best
    for batch in batches:
        assert all(len(local) <= 1 or sum(nbytes[i] for i in local) <= limit for local in batch)
    for batch, following in pairwise(batches):
        first = max((i for local in following for i in local), key=lambda i: (costs[i], -i))
        assert batch[owner_of[first]]
        assert sum(nbytes[i] for i in (*batch[owner_of[first]], first)) > limit


# -- training under every strategy ------------------------------------------------------------------------------------


class Block(nn.Module):
    """`up` and `down` are communicated in place on 1 to 4 ranks; `base` is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(96, 192)
        self.down = nn.Linear(192, 96)
        self.base = nn.Linear(96, 96, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x))) + 0.1 * self.base(x)


class Net(nn.Module):
    """Matrices that divide by no number of ranks, with fewer rows than ranks, or so that the last rank has none; with
    no elements, in other dtypes, frozen, and never used.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.four = nn.Parameter(torch.randn(4, 96) / 10)
        self.row = nn.Parameter(torch.randn(1, 96) / 10)
        self.low = nn.Parameter((torch.randn(45, 37) / 10).bfloat16())  # parts do not fill vector registers
        self.nothing = nn.Parameter(torch.empty(0, 5))
        self.unused = nn.Parameter(torch.ones(6, 6))
        self.wide = nn.Linear(96, 5, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = x * (1 + self.four.sum(0)) + self.row + self.nothing.sum()
        x = x + (x[:, :45] @ self.low.float()).square().mean()
        return self.wide(x.double())


TRAINED = ["four", "row", "low", "nothing", "wide.weight"]
TRAINED += [f"blocks.{i}.{name}.weight" for i in range(2) for name in ("up", "down")]


def by_units(model: Net, **options: Any) -> Net:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def wrapped(model: Net, **options: Any) -> nn.Module:
    return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


def cases() -> dict[str, Callable[[Net], nn.Module]]:
    """Return the shardings that this world size supports."""
    world = dist.get_world_size()
    found: dict[str, Callable[[Net], nn.Module]] = {
        one_item: partial(by_units, strategy=one_item) for one_item in ONE_AXIS
    }
    if world == 2:
        columns = partial(by_units, shard_placement_fn=lambda by_unit: Shard(1) if by_unit.shape == (192, 96) else None)
        found |= {"columns": columns, "wrapper": partial(wrapped, sharding_strategy="zero3")}
        for shape in ((1, 2), (2, 1)):
            found[f"hsdp {shape}"] = partial(by_units, strategy="hsdp", mesh=init_device_mesh("cpu", shape))
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2))
        found = {item: partial(by_units, strategy=item, mesh=mesh) for item in ("hsdp", "hsdp_zero2", "ddp", "zero1")}
        grouped = Placements(
            parameters=Placement.GROUPED,
            parameters_in_step=Placement.GROUPED,
            gradients=Placement.GROUPED,
            optimizer=Placement.SHARDED,
            group=2,
        )
        found["grouped"] = partial(by_units, strategy=grouped)
    return found


def muon_of(model: nn.Module, **options: Any) -> Muon:
    named = [(name, param) for name, param in model.named_parameters() if param.ndim == 2]
    return Muon(named, **{"lr": 0.05, "weight_decay": 0.2, **options})


def follow(model: nn.Module) -> Recorder:
    """Train `model` and a plain model with the same gradients. Return the record of the last step."""
    plain = Net()
    both = [
        (muon_of(item), torch.optim.AdamW([p for p in item.parameters() if p.ndim == 1])) for item in (model, plain)
    ]
    for step in range(3):
        model(numbers((4, 96), step, dist.get_rank())).square().mean().backward()
        for name, grad in whole_grads(model).items():
            plain.get_parameter(name).grad = grad
        with recording() as record:
            both[0][0].step()
        for optimizer in (both[1][0], both[0][1], both[1][1]):
            optimizer.step()
        model.zero_grad()
        assert_same(wholes(model), wholes(plain))
    names = {param: name for name, param in plain.named_parameters()}
    momenta = {names[param]: state for param, state in both[1][0].state.items()}
    assert_same(full_optim_state_dict(model, both[0][0], rank0_only=False)["state"], momenta)
    for param, state in both[0][0].state.items():
        assert state["momentum_buffer"].placements == param.placements
    return record


def follow_all() -> dict[str, Recorder]:
    return {name: follow(shard(Net())) for name, shard in cases().items()}


@cache
def followed(world: int) -> list[dict[str, Recorder]]:
    return run_ranks(world, follow_all)


WORLDS = pytest.mark.parametrize("world", [1, 2, *(pytest.param(world, marks=pytest.mark.slow) for world in (3, 4))])


@pytest.mark.slow
@WORLDS
def test_sharded_muon_matches_plain_muon_bitwise(world):
    """With the same gradients, under every strategy, on 1D and 2D meshes, with either interface."""
    assert len(followed(world)) == world


@WORLDS
def test_each_matrix_is_orthogonalized_by_one_rank(world):
    for case in followed(world)[0]:
        done = [event.origin.unit for rank in followed(world) for event in rank[case].events if "ortho" in event.name]
        assert Counter(done) == Counter(TRAINED), case


# -- what is sent, and when -------------------------------------------------------------------------------------------


def sharded(shapes: Sequence[tuple[int, int]], *placements: Any) -> list[nn.Parameter]:
    """Parameters of the whole world, on as many mesh axes as there are placements, with gradients."""
    size = {1: (dist.get_world_size(),), 2: (2, dist.get_world_size() // 2)}[len(placements)]
    mesh = init_device_mesh("cpu", size)

    def spec(i: int, *seed: object) -> DTensor:
        return distribute_tensor(numbers(shapes[i], i, *seed), mesh, placements, src_data_rank=None)

    params = [nn.Parameter(spec(i)) for i in range(len(shapes))]
    for i, param in enumerate(params):
        param.grad = spec(i, "gradient")
    return params


PLACED = {"ddp": (Replicate(),), "zero3": (Shard(0),), "hsdp": (Replicate(), Shard(0))}


def step_once(shapes: Sequence[tuple[int, int]], placed: str) -> Recorder:
    muon = Muon(sharded(shapes, *PLACED[placed]))
    with recording() as record:
        muon.step()
    return record


def numbers_done(record: Recorder) -> list[int]:
    """Return the numbers of the parameters that this rank has orthogonalized."""
    return [int(event.origin.unit.split()[1]) for event in record.events if event.name == "orthogonalize"]


FORMULAS = {
    name: row[1:] for row in rows(section(page("docs/optimizers.md"), "Traffic")) for name in row[0].split(", ")
}
ROUND = [(64, 32), (32, 64), (48, 48), (128, 16), (16, 16), (80, 16)]  # for 2 and 4 ranks without padding


@pytest.mark.parametrize(
    ("placed", "world", "shapes"),
    [("ddp", 3, SHAPES), ("zero3", 3, SHAPES), ("ddp", 2, SHAPES), ("hsdp", 4, ROUND)],
)
def test_muon_traffic_matches_documented_formulas(placed, world, shapes):
    """Each rank sends its shard to each owner in one message. The owner sends each other rank's shard back."""
    records = run_ranks(world, step_once, shapes, placed)
    known = {"N": 2 if placed == "hsdp" else world, "R": 2}
    expected = [0, 0]
    for rank, record in enumerate(records):
        for i in numbers_done(record):
            rows_of_owner = owned(shapes[i][0], known["N"], rank % known["N"])
            known |= {"n": shapes[i][0] * shapes[i][1], "own": len(rows_of_owner) * shapes[i][1]}
            for leg in (0, 1):
                expected[leg] += eval(FORMULAS[placed][leg], known)
    there = [record.collectives("all_to_all")[: placed != "ddp"] for record in records]
    back = [record.collectives("all_to_all")[placed != "ddp" :] for record in records]
    sent = [sum(event.sent_bytes for rank in leg for event in rank) for leg in (there, back)]
    assert sent == expected
    for legs in (there, back):
        for leg in legs:
            assert all(event.messages <= len(event.ranks) - 1 for event in leg)
            assert len(leg) == (2 if placed == "hsdp" and legs is back else placed != "ddp" or legs is back)


def test_hsdp_ranks_orthogonalize_equal_numbers_of_matrices():
    """Replicas divide the work like the ranks of the shard dimension."""
    for record in run_ranks(4, step_once, [(32, 48)] * 12, "hsdp"):
        assert len(numbers_done(record)) == 3


MATRIX = (64, 64)
MATRIX_NBYTES = 2 * 64 * 64
MATRICES = 24


def step_in_batches(placed: str) -> tuple[Recorder, list[int]]:
    """Step in batches of one matrix per rank. Return the record, and peak bytes of that and of a single batch."""
    results, peaks = [], []
    for limit in (MATRICES * MATRIX_NBYTES, MATRIX_NBYTES):
        fullshard.optim.muon.BATCH_NBYTES = limit
        params = sharded([MATRIX] * MATRICES, *PLACED[placed])
        muon = Muon(params)
        muon.step()
        with recording() as record, storage_watch(every_operation=True) as watch:
            muon.step()
        results.append([whole(param) for param in params])
        peaks.insert(0, watch.peak_bytes)
    assert_same(*results)
    return record, peaks


def step_in_batches_everywhere() -> dict[str, tuple[Recorder, list[int]]]:
    return {placed: step_in_batches(placed) for placed in PLACED}


@cache
def in_batches() -> list[dict[str, tuple[Recorder, list[int]]]]:
    return run_ranks(2, step_in_batches_everywhere)


@pytest.mark.parametrize(
    ("placed", "order"),
    [("ddp", "OX" * 12), ("zero3", "X" + "XOX" * 11 + "OX"), ("hsdp", "X" + "XOX" + "XOXX" * 10 + "OXX" + "X")],
)
def test_muon_exchanges_overlap_orthogonalization_of_other_batches(placed, order):
    """X: an exchange begins, O: a matrix is orthogonalized."""
    for rank in in_batches():
        events = rank[placed][0].events
        assert "".join("O" if event.name == "orthogonalize" else "X" for event in events) == order
        for param_layout, event in list(enumerate(events))[3:-3]:
            if event.name == "orthogonalize" and placed != "ddp":
                ahead, behind = events[param_layout - 1], events[param_layout - 2]
                assert ahead.start < event.start < event.end < ahead.end
                assert behind.start < event.start < event.end < behind.end


@pytest.mark.parametrize(("placed", "batches", "held"), [("ddp", 3, 2), ("zero3", 3, 1.5), ("hsdp", 4, 2)])
def test_muon_peak_memory_is_bounded_by_batches_in_flight(placed, batches, held):
    """For any number of matrices, the peak is shards, buffers and one orthogonalization."""
    for rank in in_batches():
        limited, unlimited = rank[placed][1]
        assert limited <= (batches * held + 6) * MATRIX_NBYTES
        assert unlimited >= held * MATRICES // 2 * MATRIX_NBYTES


# -- mixed parameters -------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_muon_steps_mixed_groups_meshes_and_plain_matrices():
    """Step sharded and plain matrices, on two meshes, in groups with different options, one of them added later."""
    for placed in PLACED.values():
        groups = [(sharded([(8, 6), (6, 8)], *placed), {"lr": 0.1}), (sharded([(9, 5)], Shard(1)), {"ns_steps": 2})]
        groups.append(([nn.Parameter(numbers((4, 4)))], {"weight_decay": 0.5, "adjust_lr_fn": "match_rms_adamw"}))
        groups[2][0][0].grad = numbers((4, 4), "gradient")
        copies = [([nn.Parameter(whole(param)) for param in params], options) for params, options in groups]
        for (params, _), (others, _) in zip(groups, copies, strict=True):
            for param, other in zip(params, others, strict=True):
                other.grad = whole(param.grad)
        optimizers = []
        for kind, (first, *others) in ((Muon, groups), (torch.optim.Muon, copies)):
            optimizer = kind(first[0], **first[1])
            for params, options in others:
                optimizer.add_param_group({"params": params, **options})
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            for _ in range(3):
                optimizer.step()
                scheduler.step()
            optimizers.append(optimizer)
        for own, peer in zip(*(optimizer.param_groups for optimizer in optimizers), strict=True):
            assert_same([whole(our) for our in own["params"]], [their.detach() for their in peer["params"]])


def give_gradients(model: nn.Module, step: int) -> None:
    """Set the same gradients for the matrices of a model, unsharded or sharded, at any world size."""
    for name, param in model.named_parameters():
        if param.ndim == 2 and param.requires_grad:
            grad = numbers(param.shape, name, step, dtype=param.dtype)
            if isinstance(param, DTensor):
                grad = distribute_tensor(grad, param.device_mesh, param.placements, src_data_rank=None)
            param.grad = grad


@on_ranks(2)
def test_next_forward_sees_step_with_manually_set_gradients():
    """Unsharded parameters that are kept between steps are gathered again."""
    model, plain = by_units(Net(), strategy="zero1"), Net()
    with torch.no_grad():
        x = numbers((4, 96))
        assert_same(model(x), plain(x))
        for item in (model, plain):
            give_gradients(item, 0)
            muon_of(item).step()
        assert_same(model(x), plain(x))


def step_without(missing: Sequence[int | None]) -> str:
    """Return this rank's error if the parameter at its index of `missing` has no gradient."""
    params = sharded([(8, 6)] * 3, Shard(0))
    lacks = missing[dist.get_rank()]
    for param in params if lacks == -1 else params[lacks : lacks + 1]:
        param.grad = None
    with pytest.raises(RankMismatchError) as reported:
        Muon(params).step()
    dist.barrier()  # by now all has arrived that the others have sent
    return str(reported.value)


@pytest.mark.parametrize(
    ("missing", "stated"),
    [
        ((1, 2), ["without parameter 1", "without parameter 2"]),
        ((1, 9), ["without parameter 1", "288 bytes"]),
        ((9, -1), ["288 bytes", " 0 bytes, without parameter 0, parameter 1, parameter 2"]),
    ],
)
def test_muon_raises_on_every_rank_if_ranks_lack_different_gradients(missing, stated):
    """Every rank raises, with the state of each rank. No message is taken for that of another parameter."""
    answers = run_fresh_ranks(2, step_without, missing)
    assert answers[0] == answers[1]
    for text in ("all_to_all of Muon", "in step", *stated):
        assert text in answers[0]


def step_without_any() -> list[int]:
    params = sharded([(8, 6)], Shard(0))
    before = whole(params[0])
    params[0].grad = None
    with recording() as record:
        Muon(params).step()
    assert_same(whole(params[0]), before)
    return [event.sent_bytes for event in record.events]


def test_muon_step_without_gradients_sends_nothing_and_changes_nothing():
    assert all(set(sent) == {0} for sent in run_ranks(2, step_without_any))


@pytest.mark.slow
@on_ranks(2)
def test_documented_muon_example_runs():
    model = Net()
    known = {"model": model, "batch": numbers((4, 96)), "loss": lambda model, batch: model(batch).square().mean()}
    exec(code_blocks(section(page("docs/optimizers.md"), "Muon"), "python")[0], known)
    muon, adamw = known["optimizers"]
    hidden = [id(param) for param in model.blocks.parameters() if param.ndim == 2]
    assert [id(param) for param in muon.param_groups[0]["params"]] == hidden
    assert len(muon.state) == len(TRAINED) - 5
    assert len(hidden) + len(adamw.param_groups[0]["params"]) == len(list(model.parameters()))


# -- state dicts ------------------------------------------------------------------------------------------------------


def save(folder: str, strategy: str) -> dict[str, Any]:
    """Save weights and state after two steps. Return them and the weights after a third step."""
    model = by_units(Net(), strategy=strategy)
    muon = muon_of(model)
    for step in range(2):
        give_gradients(model, step)
        muon.step()
    state = get_optimizer_state_dict(model, muon)
    dcp.save({"model": model.state_dict(), "optim": state}, checkpoint_id=folder)
    full, weights = full_optim_state_dict(model, muon, rank0_only=False), wholes(model)
    give_gradients(model, 2)
    muon.step()
    return {"state": full, "weights": weights, "after": wholes(model)}


def load(folder: str, expected: dict[str, Any]) -> None:
    for strategy, by_files in product(("ddp", "zero3"), (True, False)):
        model = by_units(Net(), strategy=strategy)
        muon = muon_of(model, lr=1.0, momentum=0.5)
        if by_files:
            found = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, muon)}
            dcp.load(found, checkpoint_id=folder)
            model.load_state_dict(found["model"])
            set_optimizer_state_dict(model, muon, found["optim"])
        else:
            model.load_state_dict(expected["weights"])
            optim_state_dict_to_load(model, muon, expected["state"], load_directly=True)
        assert_same(wholes(model), expected["weights"])
        assert_same(full_optim_state_dict(model, muon, rank0_only=False)["state"], expected["state"]["state"])
        give_gradients(model, 2)
        muon.step()
        assert_same(wholes(model), expected["after"], name=f"{strategy}, {by_files}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved_by", "strategy", "loaded_by"), [(2, "zero3", 3), pytest.param(3, "ddp", 1, marks=pytest.mark.slow)]
)
def test_muon_resumes_bitwise_equal_at_another_world_size(tmp_path, saved_by, strategy, loaded_by):
    expected = run_ranks(saved_by, save, str(tmp_path), strategy)[0]
    run_ranks(loaded_by, load, str(tmp_path), expected)


# -- large worlds -----------------------------------------------------------------------------------------------------


WORLD = 512


def in_large_world() -> Recorder:
    in_fake_world(WORLD)
    assert isinstance(collectives_for(dist.group.WORLD, torch.device("cpu")), NativeCollectives)
    return step_once([(1024, 16)] * (2 * WORLD), "zero3")


@pytest.mark.slow
def test_rank_0_of_512_orthogonalizes_two_of_1024_matrices():
    """By the backend's all-to-all. The fake one receives as much as the buffers hold: every rank has two matrices."""
    record = run_ranks(1, in_large_world)[0]
    assert numbers_done(record) == [0, 512]
    there, back = record.collectives()
    for exchange in (there, back):
        assert exchange.sent_bytes == 2 * (2 * 2 * 16) * (WORLD - 1)  # of two matrices two of the 1024 rows
        assert exchange.messages == WORLD - 1
