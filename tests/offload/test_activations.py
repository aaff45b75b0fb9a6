"""Offloaded activations: bitwise equal to resident activations with every other option, no memory beyond the
window, and no files left behind.
"""

import copy
import errno
import gc
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_ranks, run_ranks
from small_models import (
    ONE_AXIS,
    Chain,
    Layer,
    batch,
    chain,
    loss_of,
    my_part,
    small_gpt,
    whole_grads,
    wholes,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fullshard import ConfigError, DiskError, MixedPrecisionPolicy, StateError, dry, fully_shard
from fullshard._compat import saved_tensor_hooks
from fullshard._dry_compat import storage_watch
from fullshard.disk.space import Scratch
from fullshard.engine import activations, offloaded
from fullshard.engine.activations import tiers_of
from fullshard.engine.hooks import runtime_of
from fullshard.policy.offload import Offload
from fullshard.tape.tape import Operation
from fullshard.testing import assert_same

ROWS = 64
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)


@pytest.fixture(autouse=True)
def everything_is_offloaded(monkeypatch):
    monkeypatch.setattr(activations, "SMALLEST_BYTES", 1)
    monkeypatch.setattr(offloaded, "WINDOW_BYTES", 100_000)


def offload_everything(window: int = 100_000) -> None:
    """Apply the settings of `everything_is_offloaded` in a rank's process."""
    activations.SMALLEST_BYTES, offloaded.WINDOW_BYTES = 1, window


def to_disk(folder: Path, fraction: float = 1.0) -> Offload:
    return Offload(activations={"disk": fraction}, folder=folder)


def stores_of(model: Any) -> Any:
    return runtime_of(model).activations.stores


def learn(model: Any, *, microbatches: int = 1, steps: int = 2) -> list[Any]:
    optimizer, left = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(steps):
        for i in range(microbatches):
            loss = loss_of(model, my_part(batch(10 * step + i)))
            loss.backward()
            left.append(loss.detach())
        left.append(whole_grads(model))
        optimizer.step()
        optimizer.zero_grad()
    return [*left, wholes(model)]


def checkpointed(kind: str, reentrant: bool, model: Any) -> Any:
    """Checkpoint each block, inside its unit or around it."""
    if kind == "within":
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)
    else:
        for i, block in enumerate(model.blocks):
            around = nn.Module()
            around.block = block
            around.forward = partial(checkpoint, block, use_reentrant=reentrant)
            model.blocks[i] = around
    return model


def gpt(
    policy: Offload | None,
    checkpoints: tuple[str, bool] | None = None,
    in_blocks: MixedPrecisionPolicy | None = None,
    **options: Any,
) -> Any:
    model = small_gpt()
    blocks = list(model.blocks)
    if checkpoints is not None:
        checkpointed(*checkpoints, model)
    for block in blocks:
        fully_shard(block, offload_policy=policy, mp_policy=in_blocks, **options)
    return fully_shard(model, offload_policy=policy, **options)


def compare(folder: Path) -> None:
    offload_everything()
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        *((name, {"strategy": name}, {}) for name in ONE_AXIS),
        ("accumulation", {}, {"microbatches": 3}),
        ("bf16", {"in_blocks": BF16}, {}),
        *(
            (f"{item}", {"checkpoints": item}, {})
            for item in [(w, r) for w in ("within", "around") for r in (False, True)]
        ),
    ]
    for name, options, loop in cases:
        expected = learn(gpt(None, **options), **loop)
        for fraction in (1.0, 0.5) if name == "zero3" else (1.0,):
            model = gpt(to_disk(folder, fraction), **options)
            assert_same(learn(model, **loop), expected, name=f"{name} {fraction}")
            (store,) = stores_of(model)
            assert store.put_bytes > 0 and store.read_bytes > 0, name


@pytest.mark.slow
def test_activation_offload_to_disk_matches_resident_bitwise(tmp_path):
    run_ranks(2, compare, tmp_path)
    assert list(tmp_path.iterdir()) == []


class Pieces(nn.Module):
    """Write in place to chunks of one tensor, each of which has a separate version counter."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 24)
        self.order = order

    def forward(self, rows: Tensor) -> Tensor:
        pieces = self.linear(rows).unsafe_chunk(3, -1)
        for piece in self.order:
            pieces[piece].add_(1).sigmoid_()
        return torch.cat([piece * piece for piece in pieces], -1)


@on_ranks(1)
def test_chunks_modified_in_place_keep_separate_saved_values(tmp_path):
    offload_everything()
    makers: list[Callable[[], nn.Module]] = [partial(Pieces, order) for order in permutations(range(3))]
    makers += [partial(kind, 8, 8) for kind in (nn.GRU, nn.LSTM, nn.RNN, nn.GRUCell, nn.LSTMCell)]
    rows = torch.randn(5, 8, dtype=torch.float64)
    for make in makers:
        plain = make().double()
        sharded = fully_shard(copy.deepcopy(plain), offload_policy=to_disk(tmp_path))
        for model in (plain, sharded):
            found = model(rows)
            (found[0] if isinstance(found, tuple) else found).square().sum().backward()
        assert_same(whole_grads(sharded), whole_grads(plain), name=f"{make}")


class Dropping(nn.Module):
    """Save a tensor for an autograd node that is dropped immediately, and then for two nodes that remain."""

    def forward(self, rows: Tensor) -> Tensor:
        wide = rows + 1
        wide.cos()
        return wide.cos() + wide.sin()


@on_ranks(1)
def test_storage_is_offloaded_again_after_first_copy_is_dropped(tmp_path):
    offload_everything()
    model: Any = fully_shard(nn.Sequential(nn.Linear(8, 8), Dropping()), offload_policy=to_disk(tmp_path))
    rows = torch.ones(4, 8)
    model(rows).sum().backward()
    (store,) = stores_of(model)
    assert store.put_bytes == 3 * rows.nbytes, "the input of the layer, and twice that of cos"


class Sharing(Layer):
    """A layer that saves one storage many times: by several nodes, as views of every kind, and with gaps."""

    def forward(self, x: Tensor) -> Tensor:
        both = self.up(self.norm(x))
        first, second = both.chunk(2, dim=-1)
        folded = both.view(-1, 2, 96).transpose(1, 2)
        y = first.tanh() * second.sin() + folded.sigmoid().mean(-1) + both.reshape(-1, 96, 2)[..., 1].cos()
        return x.tanh() + self.down(torch.cat([y, y * first.tanh()], dim=-1)) + both[:1].expand_as(both).cos()[:, :48]


def alone(scenario: Callable[..., Any], folder: Path | None = None, layer: type[Layer] = Layer, **options: Any) -> Any:
    """Return `scenario(model)` for a chain of layers. Activations go to `folder`, or are resident without one."""
    policy = None if folder is None else to_disk(folder)
    return scenario(chain(partial(fully_shard, offload_policy=policy, **options), Chain([layer() for _ in range(3)])))


def rows(step: int = 0) -> Tensor:
    return torch.randn(ROWS, 48, generator=torch.Generator().manual_seed(step))


def one_step(model: Any) -> list[Any]:
    loss = model(rows()).square().mean()
    loss.backward()
    return [loss.detach(), whole_grads(model)]


def again_and_again(model: Any) -> list[Any]:
    """Run backward three times through one graph."""
    loss = model(rows()).square().mean()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()
    return [whole_grads(model)]


def twice_differentiated(model: Any) -> list[Any]:
    x = rows().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
    grad.square().mean().backward()
    return [grad.detach(), x.grad, whole_grads(model)]


def several_graphs(model: Any) -> list[Any]:
    """Build several graphs before any backward. Their backward passes run in another order, and one never runs."""
    losses = [model(rows(i)).square().mean() for i in range(4)]
    for i in (1, 3, 0):
        losses[i].backward()
    return [whole_grads(model)]


def breaking(model: Any) -> list[Any]:
    """Raise exceptions in forward and in backward, and then run a complete step."""

    def fail(*_: Any) -> None:
        raise KeyError("planted")

    hook = model.layers[1].down.register_forward_hook(fail)
    with pytest.raises(KeyError):
        model(rows())
    hook.remove()
    assert saved_tensor_hooks() is None
    loss = model(rows())
    loss.grad_fn.register_prehook(lambda grads: None)
    hook = model.layers[1].register_full_backward_hook(fail)
    out = model(rows())
    with pytest.raises(KeyError):
        out.sum().backward()
    hook.remove()
    del loss, out
    model.zero_grad()
    return one_step(model)


def with_hooks_of_the_user(model: Any) -> list[Any]:
    with torch.autograd.graph.save_on_cpu():
        return one_step(model)


def by_hand(model: Any) -> list[Any]:
    """Run a pipeline stage: the forward passes of all microbatches, and then their backward passes."""
    model.set_manual_backward_finalization(True)
    losses = [model(rows(i)).square().mean() for i in range(3)]
    for loss in losses:
        loss.backward()
    model.finalize_backward()
    return [whole_grads(model)]


SCENARIOS = (one_step, again_and_again, twice_differentiated, several_graphs, breaking, with_hooks_of_the_user, by_hand)


@pytest.mark.slow
@on_ranks(1)
def test_autograd_scenarios_match_resident_activations_bitwise(tmp_path):
    offload_everything()
    for scenario in SCENARIOS:
        for layer in (Layer, Sharing):
            got, expected = (alone(scenario, to, layer) for to in (tmp_path, None))
            assert_same(got, expected, name=f"{scenario.__name__}, {layer.__name__}")


@on_ranks(1)
def test_each_storage_is_offloaded_once_and_its_memory_is_freed(tmp_path):
    """Each storage is offloaded once, and parameters never. Memory after forward shrinks by exactly these bytes."""
    offload_everything(window=1 << 30)
    gc.disable()
    for layer in (Layer, Sharing):
        kept = {}
        for to in (None, tmp_path):
            model = alone(lambda model: model, to, layer)
            for _ in range(2):
                one_step(model)
            for store in stores_of(model):
                store._clear_left(wait=True)  # so that its buffers are reused
            with storage_watch() as watch:
                x = rows()
                loss = model(x).square().mean()
                kept[to] = watch.live_bytes()
            if to is not None:
                (store,) = stores_of(model)
                put = store.put_bytes // 3
                assert store.put_bytes == 3 * put
            loss.backward()
        assert kept[None] - kept[tmp_path] == put - x.nbytes  # the caller still holds `x`


@on_ranks(1)
def test_scratch_file_and_buffers_do_not_grow_over_steps(tmp_path):
    offload_everything(window=200_000)
    model = alone(lambda model: model, tmp_path)
    visited = []
    for step in range(8):
        model(rows(step)).square().mean().backward()
        model.zero_grad()
        (store,) = stores_of(model)
        store._clear_left(wait=True)
        assert store.scratch.free_bytes == store.scratch.nbytes
        assert not [ref for ref in store._leaving if ref() is not None] and store._ahead_bytes == 0
        in_use = 2 * ROWS * 192 * 4  # held by the current and the previous backward node
        assert store.buffer_bytes <= 2 * store.window_bytes + in_use
        visited.append((store.scratch.nbytes, len(os.listdir("/proc/self/fd"))))
    assert len(set(visited[1:])) == 1, visited


class Writing(Layer):
    """A layer that modifies in place what `exp` saved. A small tensor stays in memory. An offloaded one was copied."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).exp()
        z = self.down(y)
        y.detach().mul_(2)
        return z


@on_ranks(1)
def test_saved_tensor_modified_in_place_before_its_copy_raises(tmp_path):
    for smallest, window, fails in ((1 << 30, 1000, True), (1, 1000, False)):
        activations.SMALLEST_BYTES, offloaded.WINDOW_BYTES = smallest, window
        model = alone(lambda model: model, tmp_path, Writing)
        loss = model(rows()).square().mean()
        if fails:
            with pytest.raises(StateError, match="that backward needs was modified in place after forward saved it"):
                loss.backward()
        else:
            loss.backward()

    offload_everything(window=1 << 30)
    for tier in ("cpu", "disk"):
        with dry.taped(values=True):  # modified while its copy is in progress
            policy = Offload(activations={tier: 1.0}, folder=tmp_path)
            loss = chain(partial(fully_shard, offload_policy=policy), Chain([Writing()]))(rows()).sum()
            with pytest.raises(StateError, match="that backward needs was modified in place"):
                loss.backward()


@on_ranks(1)
def test_disk_error_raises_and_training_continues_after_repair(tmp_path):
    """Check that forward or backward raises the error of a failed write. Training continues on a repaired disk."""
    offload_everything(window=50_000)
    model = alone(lambda model: model, tmp_path)
    expected = one_step(model)
    model.zero_grad()
    for call in ("pwritev", "preadv"):
        works = getattr(os, call)
        calls = [0]

        def fail(*args: Any, works: Any = works, calls: list[int] = calls) -> int:
            calls[0] += 1
            if calls[0] == 4:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return works(*args)

        setattr(os, call, fail)
        with pytest.raises(DiskError, match=r"activations-of-rank-0: cannot (read|write) .*errno 5"):
            one_step(model)
        setattr(os, call, works)
        model.zero_grad()
        assert_same(one_step(model), expected, name=call)
        model.zero_grad()


@pytest.mark.slow
@on_ranks(2)
def test_disk_error_on_one_rank_raises_on_every_rank_in_backward(tmp_path):
    """Each system call fails on one rank, during and after the creation of the file."""
    offload_everything(window=50_000)
    full, broken = (OSError(code, os.strerror(code)) for code in (errno.ENOSPC, errno.EIO))
    for steps, call, error in ((0, "posix_fallocate", full), (1, "pwritev", broken), (1, "preadv", broken)):
        model = gpt(to_disk(tmp_path))
        learn(model, steps=steps)
        here = mock.patch(f"os.{call}", side_effect=error) if dist.get_rank() == 1 else nullcontext()
        with here, pytest.raises(DiskError, match=f"^rank 1: .*errno {error.errno}") as raised:
            learn(model)
        assert "rank 0" not in str(raised.value), call
        dist.barrier()


@pytest.mark.parametrize(
    ("fractions", "expected"),
    [
        ({}, "....."),
        ({"disk": 1.0}, "ddddd"),
        ({"cpu": 1.0}, "ccccc"),
        ({"cpu": 0.4, "disk": 0.4}, ".ddcc"),
        ({"disk": 0.2}, ".d..."),
        ({"cpu": 0.05}, "....."),
        ({"cpu": 0.8, "disk": 0.2}, "cdccc"),
    ],
)
def test_fractions_offload_earliest_units_first_and_root_last(fractions, expected):
    options = SimpleNamespace(activations=fractions)
    units: Any = [type("U", (), {"options": options, "is_root": i == 0})() for i in range(5)]
    tiers = tiers_of(units)
    assert "".join(tiers.get(unit, ".")[0] for unit in units) == expected


def test_invalid_activation_offload_policy_raises():
    for wrong, why in [
        ({"activations": {"disk": 0.5}}, "without a folder"),
        ({"activations": {"gpu": 0.5}}, "'gpu' is not a tier of activations"),
        ({"activations": {"cpu": 0.7, "disk": 0.7}, "folder": "/x"}, "their sum at most 1"),
    ]:
        with pytest.raises(ConfigError, match=why):
            Offload(**wrong)


# -- on simulated streams ----------------------------------------------------------------------------------------------


def on_streams(
    policy: Offload | None, scenario: Callable[..., Any], layer: type[Layer] = Layer
) -> tuple[Any, dry.Tape]:
    """Run a scenario on real tensors and simulated streams. Return its result and its tape."""
    with dry.taped(values=True) as tape:
        model = chain(partial(fully_shard, offload_policy=policy), Chain([layer() for _ in range(3)]))
        given = scenario(model)
    return given, tape


def copies_on_offload(tape: dry.Tape) -> bool:
    return any(operation.stream == "offload" for operation in tape.of(Operation))


@pytest.mark.slow
@on_ranks(1)
def test_activation_offload_on_streams_matches_bitwise_without_races(tmp_path):
    offload_everything()
    for scenario in SCENARIOS:
        if scenario is not with_hooks_of_the_user:
            for tier in ("cpu", "disk"):
                expected, before = on_streams(None, scenario, Sharing)
                got, tape = on_streams(Offload(activations={tier: 1.0}, folder=tmp_path), scenario, Sharing)
                assert_same(got, expected, name=f"{scenario.__name__}, {tier}")
                assert not dry.races(tape), (scenario, tier)
                assert not copies_on_offload(before) and copies_on_offload(tape)


@pytest.mark.slow
@pytest.mark.parametrize("streams", ["gpu", "cpu"])
def test_dry_run_predicts_lower_peak_without_using_the_disk(tmp_path, monkeypatch, streams):
    monkeypatch.setattr(Scratch, "take", None)

    def peak(policy: Offload | None) -> int:
        def make() -> nn.Module:
            return chain(partial(fully_shard, offload_policy=policy), Chain([Layer() for _ in range(12)]))

        tape = dry.run(make, lambda: torch.randn(4096, 48), world=2, steps=2, streams=streams)
        assert not dry.races(tape)
        return tape.peak_bytes()

    assert peak(to_disk(tmp_path)) < peak(None) / 2
