"""Ranks that diverge raise the same error in the first differing collective and do not hang."""

import os
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from shared_ranks import on_new_ranks
from small_models import Chain, Layer, chain, inputs, leave, sgd, take_step, whole_grads
from torch import Tensor, nn

from fullshard import (
    FullyShardedDataParallel,
    Placement,
    Placements,
    RankMismatchError,
    compare_ranks,
    fully_shard,
    summon_full_params,
)
from fullshard.checkpoint import async_save, export_safetensors, save
from fullshard.comm.fingerprint import FINGERPRINT_NBYTES, fingerprint, mismatch
from fullshard.state.optim_state import full_optim_state_dict
from fullshard.tape.recorder import Origin, Phase
from fullshard.testing import assert_same, run_ranks

text = st.text(max_size=200)


@given(
    texts=st.lists(st.tuples(text, text, text), min_size=2, max_size=2),
    equal=st.booleans(),
    microbatch=st.integers(0, 9),
)
def test_fingerprints_differ_exactly_when_contents_differ(texts, equal, microbatch):
    texts = texts[:1] * 2 if equal else texts
    start = "a long beginning that is common to the texts of all ranks, so that only their ends differ: "
    for long in ("", start):
        fingerprints = [
            fingerprint(long + name, Origin(unit + long, Phase.FORWARD, microbatch, note=long + note), 3, 77)
            for name, unit, note in texts
        ]
        assert all(len(published) == FINGERPRINT_NBYTES for published in fingerprints)
        error = mismatch(fingerprints, [0, 1])
        assert (error is None) == (texts[0] == texts[1])
        assert error is None or ("rank 0 started" in str(error) and "rank 1 started" in str(error))


def test_mismatch_error_keeps_end_of_long_unit_name():
    unit = "trunk." * 40 + "block.7"
    error = mismatch([fingerprint("all_gather", Origin(name, Phase.FORWARD, 1), 2, 5) for name in (unit, "")], [4, 6])
    assert "block.7 (2 tensors, 5 bytes) in forward of microbatch 1" in str(error)
    assert "rank 6 started all_gather of the root" in str(error)


class Branching(Chain):
    """The ranks in `odd` call the layers in a different order."""

    odd: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self.layers)
        if dist.get_rank() in self.odd:
            layers[1], layers[2] = layers[2], layers[1]
        for layer in layers:
            x = layer(x)
        return self.head(x)


def steps(model: Any, count: int) -> None:
    optimizer = sgd(model)
    for step in range(count):
        take_step(optimizer, model(inputs(step)).square().mean())


def branch(before: int, strategy: str) -> None:
    model = chain(partial(fully_shard, strategy=strategy), Branching())
    steps(model, before)
    model.odd = (1, 2)
    steps(model, 1)


def one_more_microbatch(before: int, strategy: str) -> None:
    model = chain(partial(fully_shard, strategy=strategy))
    steps(model, before)
    for _ in range(3 if dist.get_rank() == 0 else 2):
        model(inputs()).sum().backward()
    model.zero_grad()
    steps(model, 1)


class Skipping(Chain):
    skips = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x if layer is self.layers[2] and self.skips else layer(x)
        return self.head(x)


def a_layer_less(before: int, strategy: str) -> None:
    model = chain(partial(fully_shard, strategy=strategy), Skipping())
    steps(model, before)
    model.skips = dist.get_rank() == 1
    steps(model, 1)


def published(scenario: Callable[[int, str], None], before: int, strategy: str) -> str:
    with pytest.raises(RankMismatchError) as raised:
        scenario(before, strategy)
    return str(raised.value)


@pytest.mark.parametrize("before", [0, 3], ids=["in the first step", "in a later step"])
@pytest.mark.parametrize(
    ("scenario", "strategy", "sides"),
    [
        (branch, "zero3", ["rank 0 started all_gather of layers.", "ranks 1, 2 started", "of layers."]),
        (branch, "ddp", ["rank 0 started all_reduce of layers.2", "ranks 1, 2 started all_reduce of layers.1"]),
        (branch, "zero2", ["layers.1", "layers.2"]),
        (
            one_more_microbatch,
            "zero3",
            ["rank 0 started all_gather", "of microbatch 3", "ranks 1, 2", "of microbatch 1"],
        ),
        (a_layer_less, "zero3", ["ranks 0, 2 started", "rank 1 started", "layers.3"]),
        (a_layer_less, "zero1", ["ranks 0, 2 started", "rank 1 started", "layers.2"]),
    ],
)
def test_diverging_ranks_raise_same_mismatch_error(scenario, strategy, sides, before):
    messages = run_ranks(3, published, scenario, before, strategy)
    assert len(set(messages)) == 1
    for side in sides:
        assert side in messages[0]


class GatedLayer(nn.Module):
    """A layer whose gate only the ranks in `users` use. On 2 ranks its weight is sent in place and its bias packed."""

    users: tuple[int, ...] = (0,)

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate = Layer(), nn.Linear(48, 192)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return x * self.gate(x).sigmoid().mean(1, keepdim=True) if dist.get_rank() in self.users else x


def gated(shard: Any) -> Any:
    return chain(shard, Chain([GatedLayer() for _ in range(3)]))


def unused_on_one_rank(before: int, strategy: str) -> None:
    steps(gated(partial(fully_shard, strategy=strategy)), before + 1)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_parameters_unused_on_some_ranks_raise_error_with_remedy(strategy):
    messages = run_ranks(3, published, unused_on_one_rank, 0, strategy)
    assert len(set(messages)) == 1
    assert "set_reduce_scatter_unused_params(True)" in messages[0]


def frozen_on_one_rank(name: str, before: int, strategy: str) -> None:
    model = chain(partial(fully_shard, strategy=strategy))
    steps(model, before)
    model.get_parameter(name).requires_grad_(dist.get_rank() != 1)
    steps(model, 1)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize("name", ["head.bias", "head.weight"])
def test_freezing_parameter_on_one_rank_raises_on_every_rank(name, strategy):
    messages = run_ranks(2, published, partial(frozen_on_one_rank, name), 1, strategy)
    assert len(set(messages)) == 1
    assert f"without {name})" in messages[0]


def with_setting_on_one_rank(setting: str, value: Any, before: int, strategy: str) -> None:
    model = chain(partial(fully_shard, strategy=strategy))
    steps(model, before)
    if dist.get_rank() == 1:
        getattr(model.layers[1], setting)(value)
    steps(model, 1)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize(
    ("setting", "value", "note"),
    [
        ("set_gradient_divide_factor", 8.0, "divided by 8.0"),
        ("set_all_reduce_hook", torch.Tensor.neg_, "with an all-reduce hook"),
    ],
)
def test_gradient_setting_changed_on_one_rank_raises_on_every_rank(setting, value, note, strategy):
    messages = run_ranks(2, published, partial(with_setting_on_one_rank, setting, value), 1, strategy)
    assert len(set(messages)) == 1
    assert note in messages[0]


def without_zero_grad_on_one_rank(before: int, strategy: str) -> None:
    """Train for `before` steps of two microbatches each, and another step. Its gradients stay on rank 1."""
    model = chain(partial(fully_shard, strategy=strategy))
    optimizer = sgd(model)
    for step in range(before + 2):
        for _ in range(2):
            model(inputs(step)).square().mean().backward()
        optimizer.step()
        if step != before or dist.get_rank() == 0:
            optimizer.zero_grad()


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_gradients_that_only_one_rank_keeps_for_the_next_step_are_an_error(strategy, before):
    first, second = run_ranks(2, published, without_zero_grad_on_one_rank, before, strategy)
    assert first == second
    rank_0, rank_1 = first.partition("rank 1 started")[::2]
    assert "added to earlier gradients" in rank_1
    assert "added to earlier gradients" not in rank_0


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
@on_new_ranks(2)
def test_parameters_unused_on_some_ranks_contribute_zeros_if_requested(strategy):
    """The gradient is the mean of the plain gradients over ranks, with zeros for ranks that have none."""
    plain, model = gated(leave), gated(partial(fully_shard, strategy=strategy))
    model.set_reduce_scatter_unused_params(True)
    batch = inputs(dist.get_rank())
    for _ in range(4):  # from the third step on, memory is shared and all-gathers are prefetched
        plain(batch).square().mean().backward()
        model(batch).square().mean().backward()
        actual = whole_grads(model)
        for name, param in plain.named_parameters():
            terms = [torch.empty_like(param) for _ in range(dist.get_world_size())]
            dist.all_gather(terms, torch.zeros_like(param) if param.grad is None else param.grad)
            assert_same(actual[name], sum(terms[1:], terms[0]) / len(terms), name=name)
        plain.zero_grad()
        model.zero_grad()


class Gate(nn.Module):
    """A unit without parameters, which only the ranks in `users` call."""

    users: tuple[int, ...] = (0,)

    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x) if dist.get_rank() in self.users else x


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@on_new_ranks(2, timeout=30)
def test_units_without_parameters_can_be_called_on_some_ranks_only(strategy):
    """Ranks agree to share memory between units after a backward that ran in the expected order on all ranks."""
    layers = [Gate(fully_shard(nn.GELU(), strategy=strategy)), Layer(), Layer(), Gate(fully_shard(nn.GELU()))]
    model = chain(partial(fully_shard, strategy=strategy), Chain(layers))
    for step in range(6):
        layers[0].users = layers[3].users = (step % 2,)
        model(inputs(step)).square().mean().backward()
        model.zero_grad()


@on_new_ranks(2)
def test_every_call_after_mismatch_raises_same_error():
    model = chain(fully_shard, Branching())
    model.odd = (1,)
    messages = set()
    for _ in range(3):
        with pytest.raises(RankMismatchError) as raised:
            steps(model, 1)
        messages.add(str(raised.value))
    assert len(messages) == 1


def first_rank_alone(call: str) -> str:
    """Make a collective call on rank 0 only, while rank 1 continues to train. Return the error."""
    model = chain(fully_shard) if call != "state_dict" else FullyShardedDataParallel(chain(lambda module: module))
    optimizer = torch.optim.AdamW(model.parameters())
    steps(model, 1)
    calls: dict[str, Callable[[], Any]] = {
        "state_dict": model.state_dict,
        "optim_state_dict": lambda: full_optim_state_dict(model, optimizer),
        "summon": lambda: summon_full_params(model).__enter__(),
        "save": lambda: save(tempfile.mkdtemp(), model=model, step=1),
        "async_save": lambda: async_save(tempfile.mkdtemp(), model=model, step=1),
        "export": lambda: export_safetensors(model, tempfile.mkdtemp()),
    }
    with pytest.raises(RankMismatchError) as raised:
        calls[call]() if dist.get_rank() == 0 else model(inputs())
    return str(raised.value)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("state_dict", "state_dict() of full tensors"),
        ("optim_state_dict", "full_optim_state_dict()"),
        ("summon", "summon_full_params"),
        ("save", "saving;"),
        ("async_save", "async_save;"),
        ("export", "exporting;"),
    ],
)
def test_collective_call_on_one_rank_raises_on_every_rank(call, name):
    messages = run_ranks(2, first_rank_alone, call)
    assert messages[0] == messages[1]
    assert f"rank 0 started {name}" in messages[0]
    assert "rank 1 started all_gather of" in messages[0]
    assert "on every rank, not on rank 0 only" in messages[0]


def losses(compares: bool) -> list[Tensor]:
    compare_ranks(compares)
    model = chain(fully_shard)
    steps(model, 3)
    return [model(inputs()).detach()]


def test_compare_ranks_does_not_change_losses():
    assert torch.equal(run_ranks(2, losses, True)[0][0], run_ranks(2, losses, False)[0][0])


def hosts_of_different_numbers_of_ranks() -> list[str]:
    """Each number divides the world size, so no rank can detect the difference locally."""
    os.environ["LOCAL_WORLD_SIZE"] = "1" if dist.get_rank() == 0 else "2"
    grouped = Placements(
        parameters=Placement.SHARDED,
        parameters_in_step=Placement.GROUPED,
        gradients=Placement.SHARDED,
        optimizer=Placement.SHARDED,
    )
    stated = []
    for strategy in ("hsdp", grouped):
        with pytest.raises(RankMismatchError) as found:
            fully_shard(nn.Linear(8, 8), strategy=strategy)
        stated.append(str(found.value))
    return stated


def test_hosts_with_different_rank_counts_raise_on_every_rank():
    first, second = run_ranks(2, hosts_of_different_numbers_of_ranks)
    assert first == second
    for message, remedy in zip(first, ("Pass mesh=", "Placements(group=...)"), strict=True):
        assert "the host of rank 0 has 1, the host of rank 1 has 2" in message
        assert remedy in message
