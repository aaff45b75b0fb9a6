"""All state of a run is restored: the state of every rank, and of every optimizer and module."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from logged import Logged
from run_states import OPTIMIZERS, Position, learn
from shared_ranks import on_ranks, run_ranks
from small_models import Chain, Layer, adamw, batch, chain, inputs, loss_of, shard, small_gpt, trained, wholes
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.optim import lr_scheduler

from fullshard import CheckpointError, CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from fullshard._dry_compat import storage_watch
from fullshard.checkpoint import contents, load, save
from fullshard.checkpoint.plain import are_same
from fullshard.integrations.joined_optimizers import joined
from fullshard.testing import assert_same
from fullshard.versions import versions
from fullshard.wrap import ModuleWrapPolicy


def draws() -> list[Any]:
    """Draw from each generator, including a normal draw of Python, which keeps a second value."""
    return [random.gauss(0, 1), random.random(), *np.random.normal(size=3), *torch.rand(3).tolist()]


# -- state per rank ---------------------------------------------------------------------------------------------------


def draw_on(folder: Path) -> list[list[Any]]:
    """Draw after saving, and after loading into generators with other states."""
    rank = dist.get_rank()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(100 + rank)
    draws()
    random.gauss(0, 1)
    model = nn.Linear(2, 2)
    save(folder, model=model, step=1)
    expected = draws()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    load(folder, model=model)
    return [expected, draws()]


def draw_after_loading(folder: Path) -> list[Any]:
    load(folder, model=nn.Linear(2, 2))
    return draws()


def test_load_restores_random_states_of_every_rank(tmp_path):
    reported = run_ranks(2, draw_on, tmp_path)
    for expected, found in reported:
        assert found == expected
    assert reported[0][0] != reported[1][0]
    again = [run_ranks(3, draw_after_loading, tmp_path) for _ in range(2)]
    assert again[0] == again[1]
    assert len({tuple(drawn) for drawn in again[0]}) == 3


def test_load_leaves_random_states_unchanged_if_requested(tmp_path):
    save(tmp_path, model=nn.Linear(2, 2), step=1)
    model = nn.Linear(2, 2)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    load(tmp_path, model=model, random_states=False)
    assert torch.equal(torch.rand(2), expected)


class Normed(nn.Module):
    """Has batch norm statistics, which differ between ranks, and a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def positions_and_buffers(folder: Path) -> None:
    """Save and load with the same number of ranks."""
    rank = dist.get_rank()
    model = fully_shard(Normed())
    model.norm.running_mean.fill_(rank)
    save(folder, model=model, data=Position({"at": rank, "order": torch.arange(rank + 1)}), step=1)
    save(folder.with_name("identical"), model=model, data=Position({"at": 3}), step=1)
    model, data = fully_shard(Normed()), Position()
    load(folder, model=model, data=data)
    assert data.state["at"] == rank
    assert torch.equal(data.state["order"], torch.arange(rank + 1))
    assert torch.equal(model.norm.running_mean, torch.full((6,), float(rank)))
    assert model.scratch.tolist() == [0, 0]


def positions_elsewhere(folder: Path) -> list[float]:
    model, data = fully_shard(Normed()), Position()
    load(folder.with_name("identical"), model=model, data=data)
    assert data.state == {"at": 3}
    with pytest.raises(RuntimeError, match=r"ranks 0 and 1 had different positions .* divided over 3"):
        load(folder, model=model, data=data)
    load(folder, model=model)
    return model.norm.running_mean.tolist()


def test_buffers_and_data_positions_are_saved_per_rank(tmp_path):
    run_ranks(2, positions_and_buffers, tmp_path / "differ")
    for found in run_ranks(3, positions_elsewhere, tmp_path / "differ"):
        assert found == [0] * 6


# -- schedulers, extra, states of modules -----------------------------------------------------------------------------


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "MultiStepLR": partial(lr_scheduler.MultiStepLR, milestones=[2, 4]),  # keeps a dict of numbers
    "LambdaLR": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.9**step),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=10),
    "CosineAnnealingWarmRestarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3),
    "SequentialLR": lambda item: lr_scheduler.SequentialLR(
        item, [lr_scheduler.ConstantLR(item), lr_scheduler.ExponentialLR(item, 0.5)], milestones=[2]
    ),
}


def rates(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_resumes_with_the_same_learning_rates(name, tmp_path):
    def made() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        return model, optimizer, SCHEDULERS[name](optimizer)

    model, optimizer, scheduler = made()
    rates(optimizer, scheduler, 3)
    save(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler, step=3)
    expected = rates(optimizer, scheduler, 5)
    model, optimizer, scheduler = made()
    load(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler)
    assert rates(optimizer, scheduler, 5) == expected


def reported_of_hyperparameters(folder: Path, rates: tuple[float, float], plateau: bool, others: bool) -> list[str]:
    """Save with one learning rate per rank, for the same or (`others`) different parameters. Return the warnings."""
    rank = dist.get_rank()
    model = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    optimizer = torch.optim.AdamW((model[rank] if others else model).parameters(), lr=rates[rank])
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    with Logged() as messages:
        for step in range(2):
            improves = rank == 0 or not plateau
            scheduler.step(3.0 - step * improves)
            save(folder / f"{rates[1]} {plateau} {others}", model=model, optimizer=optimizer, step=step)
    return messages


def test_hyperparameters_that_differ_between_ranks_are_reported(tmp_path):
    """Rounding differences are allowed, and so are different hyperparameters of different parameters."""
    for rates, plateau, others, expected in (
        ((0.1, 0.1), False, False, 0),
        ((0.1, 0.1 + 1e-14), False, False, 0),
        ((0.1, 0.1), True, False, 1),
        ((0.1, 0.2), False, False, 2),
        ((0.1, 0.2), False, True, 0),
    ):
        first, other = run_ranks(2, reported_of_hyperparameters, tmp_path, rates, plateau, others)
        assert (len(first), other) == (expected, [])
        assert all("lr of parameter group 0 is 0.1 on rank 0, but 0." in line for line in first)


def test_load_restores_extra_values(tmp_path):
    extra = {"a": [1, 2.5, None, True, "x"], 3: (1, 2), "empty": {}, "tensor": torch.arange(3, dtype=torch.bfloat16)}
    save(tmp_path, model=nn.Linear(2, 2), step=1, extra=extra)
    found = load(tmp_path, model=nn.Linear(2, 2))
    assert_same(found.extra.pop("tensor"), extra.pop("tensor"))
    assert found.extra == extra
    assert (found.path, found.step, found.world, found.strategy) == (tmp_path / "step-000000001", 1, 1, "none")
    assert found.versions == versions()


class Keeping(nn.Linear):
    """Keeps state other than parameters: a tensor with a variable shape, or a dict."""

    kept: Any = None

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


@pytest.mark.parametrize("kept", [torch.arange(5), {"scale": 2.0, "history": {1: [3]}}, None], ids=str)
def test_extra_state_of_modules_is_restored(kept, tmp_path):
    model = Keeping(2, 2)
    model.kept = kept
    save(tmp_path, model=model, step=1)
    again = Keeping(2, 2)
    again.kept = torch.zeros(1) if isinstance(kept, Tensor) else None
    load(tmp_path, model=again)
    assert are_same(again.kept, kept)


# -- optimizers -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@on_ranks(2)
def test_every_optimizer_resumes_bitwise_under_other_strategies(tmp_path):
    for name, make in OPTIMIZERS.items():
        place = tmp_path / name.replace(", ", "-")
        model = shard(small_gpt(1), strategy="zero3")
        optimizer = make(trained(model))
        learn(model, optimizer, range(2))
        save(place, model=model, optimizer=optimizer, step=2)
        expected = learn(model, optimizer, range(2, 4))
        for strategy, steps in (("zero1", 0), ("zero3", 1)):  # into an optimizer without states, and with states
            model = shard(small_gpt(1), strategy=strategy)
            optimizer = make(trained(model))
            learn(model, optimizer, range(steps))
            load(place, model=model, optimizer=optimizer)
            assert_same(learn(model, optimizer, range(2, 4)), expected, name=f"{name} into {strategy}")


class Summing(torch.optim.SGD):
    """Keeps a `Partial` DTensor: every rank holds one addend of the sum."""

    def step(self, closure: None = None) -> None:
        for param in self.param_groups[0]["params"]:
            share = torch.full(param.shape, 1.0 + dist.get_rank())
            self.state[param]["sum"] = DTensor.from_local(share, param.device_mesh, [Partial()])


def sums(optimizer: torch.optim.Optimizer) -> list[float]:
    return [state["sum"].full_tensor().mean().item() for state in optimizer.state.values()]


@on_ranks(2)
def test_partial_dtensor_state_is_restored_as_its_sum(tmp_path):
    model = fully_shard(nn.Linear(4, 4))
    optimizer = Summing(model.parameters())
    optimizer.step()
    save(tmp_path, model=model, optimizer=optimizer, step=1)
    for into in (optimizer, Summing(model.parameters())):
        load(tmp_path, model=model, optimizer=into)
        assert sums(into) == [3.0, 3.0]


@on_ranks(2)
def test_load_maps_options_to_different_parameter_groups(tmp_path):
    """A group takes the options of the saved group that held its parameters, even if the groups differ."""
    model = chain(fully_shard)
    params = list(model.parameters())
    two = torch.optim.SGD([{"params": params[:4], "lr": torch.tensor(0.5)}, {"params": params[4:], "lr": 0.25}], lr=1)
    save(tmp_path, model=model, optimizer=two, step=1)
    three = torch.optim.SGD([{"params": params[4:6]}, {"params": params[:2]}, {"params": [*params[2:4], *params[6:]]}])
    load(tmp_path, model=model, optimizer=three)
    assert [float(group["lr"]) for group in three.param_groups] == [0.25, 0.5, 0.5]


# -- ways to build a model --------------------------------------------------------------------------------------------


def wrapped(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Layer}))


def in_bfloat16(model: nn.Module) -> nn.Module:
    return chain(partial(fully_shard, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), model)


def offloaded(model: nn.Module) -> nn.Module:
    return chain(partial(fully_shard, offload_policy=CPUOffloadPolicy()), model)


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "units": partial(chain, fully_shard),
    "one unit": fully_shard,
    "wrapped": wrapped,
    "mixed": in_bfloat16,
    "offloaded": offloaded,
    "plain": lambda model: model,
}


@pytest.mark.slow
@on_ranks(2)
def test_checkpoint_is_independent_of_wrapping_precision_and_offload(tmp_path):
    """Checkpoints do not depend on wrap policies, front ends, precision or offloading."""
    for way, build in WAYS.items():
        model = build(Chain([Layer(), Layer()]))
        optimizer = torch.optim.Adam(model.parameters())
        model(inputs()).float().sum().backward()
        optimizer.step()
        save(tmp_path / way, model=model, optimizer=optimizer, step=1)
    for (way, _), (other, build) in zip(WAYS.items(), [*list(WAYS.items())[1:], *list(WAYS.items())[:1]], strict=True):
        model = build(Chain([Layer(), Layer()]))
        optimizer = torch.optim.Adam(model.parameters())
        load(tmp_path / way, model=model, optimizer=optimizer)
        save(tmp_path / f"{way} as {other}", model=model, optimizer=optimizer, step=1)
        plain = Chain([Layer(), Layer()])
        its = torch.optim.Adam(plain.parameters())
        load(tmp_path / way, model=plain, optimizer=its)
        expected = [*plain.parameters(), *(state["exp_avg"] for state in its.state.values())]
        load(tmp_path / f"{way} as {other}", model=plain, optimizer=its)
        found = [*plain.parameters(), *(state["exp_avg"] for state in its.state.values())]
        assert_same(found, expected, name=f"{way} as {other}")


@pytest.mark.slow
@on_ranks(2)
def test_load_materializes_meta_device_model(tmp_path):
    """A checkpoint loads into a model on the meta device and into an optimizer that was constructed from it."""
    model = shard(small_gpt(1), tied_in_two_units=True)
    optimizer = torch.optim.Adam(trained(model))
    learn(model, optimizer, range(2))
    save(tmp_path, model=model, optimizer=optimizer, step=2)
    expected = [learn(model, optimizer, range(2, 4)), wholes(model)]
    for strategy in ("zero3", "zero1", "ddp"):
        with torch.device("meta"):
            model = small_gpt(1)
        model = shard(model, tied_in_two_units=True, strategy=strategy)
        optimizer = torch.optim.Adam(trained(model))
        load(tmp_path, model=model, optimizer=optimizer)
        assert_same([learn(model, optimizer, range(2, 4)), wholes(model)], expected, name=strategy)
    with torch.device("meta"):
        plain = small_gpt(1)
    load(tmp_path, model=plain)
    loss_of(plain, batch(0))


# -- ties -------------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64, bias=False)
        self.second = nn.Linear(64, 64, bias=False)
        if tie:
            self.second.weight = self.first.weight


def test_tied_weights_are_stored_once_and_load_by_both_names(tmp_path):
    model = Tied()
    path = save(tmp_path / "tied", model=model, step=1)
    data = sum(file.stat().st_size for file in path.glob("*.distcp"))
    assert data < 1.5 * model.first.weight.nbytes + 20_000
    separate = Tied(tie=False)
    load(path, model=separate)
    assert_same([separate.first.weight, separate.second.weight], [model.first.weight] * 2)
    again = Tied()
    load(path, model=again)
    assert_same(again.second.weight, model.first.weight)
    assert again.second.weight is again.first.weight
    save(tmp_path / "apart", model=separate, step=1)
    with pytest.raises(RuntimeError, match=r"but not in the checkpoint: first.weight and second.weight"):
        load(tmp_path / "apart", model=again)


# -- memory -----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_saving_copies_no_shard_in_host_memory(tmp_path):
    model = nn.Sequential(*(fully_shard(nn.Linear(512, 512)) for _ in range(6)))
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    with storage_watch(every_operation=True) as watch:
        save(tmp_path, model=model, optimizer=optimizer, step=1)
    peak, shard_nbytes = watch.peak_bytes, model[0].weight.to_local().nbytes
    assert peak < 0.2 * shard_nbytes  # random states, and metadata that ranks exchange


@on_ranks(2)
def test_load_creates_no_intermediate_tensors(tmp_path):
    """Rows are read from the file directly into the shard."""
    model = chain(fully_shard)
    optimizer = adamw(model)
    save(tmp_path, model=model, optimizer=optimizer, step=1)
    made: list[Any] = []
    load_of_torch = torch.load

    def noted(*args: Any, **options: Any) -> Any:
        made.append(load_of_torch(*args, **options))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "load", noted)
        load(tmp_path, model=model, optimizer=optimizer)
    assert not any(isinstance(value, torch.Tensor) for value in made)


# -- optimizers of other classes --------------------------------------------------------------------------------------


class OwnAdamW(torch.optim.AdamW):
    """A subclass of torch's class with an additional option."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group.setdefault("strength", 1.0)
        self.defaults["strength"] = 1.0

    def step(self, closure: None = None) -> None:
        assert all(group["strength"] == 1.0 for group in self.param_groups)
        super().step(closure)


class SignedMomentum(torch.optim.Optimizer):
    """Keeps one of AdamW's states, and has no option that AdamW lacks."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                param.sub_(state.lerp_(param.grad, 0.1).sign(), alpha=group["lr"])


class Wrapping(torch.optim.Optimizer):
    """A wrapper like the one of accelerate."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure: None = None) -> None:
        self.optimizer.step()


KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.3, momentum=0.9),
    "Adam": partial(torch.optim.Adam, lr=0.3),
    "AdamW": partial(torch.optim.AdamW, lr=0.3, foreach=True),
    "AdamW, fused": partial(torch.optim.AdamW, lr=0.3, fused=True),
    "RAdam": partial(torch.optim.RAdam, lr=0.3),
    "OwnAdamW": partial(OwnAdamW, lr=0.3),
    "SignedMomentum": partial(SignedMomentum, lr=0.3),
    "wrapped AdamW": lambda params: Wrapping(torch.optim.AdamW(params, lr=0.3)),
    "joined": lambda params: joined([torch.optim.AdamW(params[:2], lr=0.3), torch.optim.SGD(params[2:], lr=0.3)]),
    "joined in a different order": lambda params: joined(
        [torch.optim.SGD(params[2:], lr=0.3), torch.optim.AdamW(params[:2], lr=0.3)]
    ),
}
IDENTICAL = [
    {"Adam", "AdamW", "AdamW, fused", "OwnAdamW", "wrapped AdamW"},
    {"joined", "joined in a different order"},
]


@pytest.mark.slow
@pytest.mark.parametrize("recorded", [True, False])
@on_ranks(1)
def test_load_rejects_state_of_another_optimizer_before_loading(recorded, tmp_path):
    def learn_once(model: nn.Module, optimizer: Any) -> None:
        model(inputs(0)).square().mean().backward()
        for item in getattr(optimizer, "joined_optimizers", [optimizer]):
            getattr(item, "optimizer", item).step()
            item.zero_grad()

    for name, make in KINDS.items():
        model = chain(fully_shard)
        optimizer = make(list(model.parameters()))
        learn_once(model, optimizer)
        with pytest.MonkeyPatch.context() as patch:
            if not recorded:
                patch.setattr(contents, "kinds_of_groups", lambda optimizer: None)
            save(tmp_path / name, model=model, optimizer=optimizer, step=1)
        for other, make_other in KINDS.items():
            if not recorded and {name, other} & {"RAdam", "SignedMomentum"}:
                continue  # their options are a subset of AdamW's, so nothing distinguishes them
            fits = name == other or any({name, other} <= identical for identical in IDENTICAL)
            model = chain(fully_shard)
            optimizer = make_other(list(model.parameters()))
            if fits:
                load(tmp_path / name, model=model, optimizer=optimizer)
                learn_once(model, optimizer)
                continue
            before = wholes(model)
            with pytest.raises(CheckpointError, match=r"state of another optimizer: saved by \w") as caught:
                load(tmp_path / name, model=model, optimizer=optimizer)
            assert recorded == ("saved by another class" not in str(caught.value))
            assert "loaded into" in str(caught.value)
            assert_same(wholes(model), before)
            assert all(group.get("lr") == 0.3 for group in optimizer.param_groups)
            assert not optimizer.state


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize(
    ("saved", "present"), [(torch.float32, torch.int64), (torch.complex64, torch.float32), (torch.int64, torch.bool)]
)
def test_load_rejects_tensors_that_would_lose_values(saved, present, tmp_path):
    def built(dtype: torch.dtype) -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_buffer("counts", torch.ones(3, dtype=dtype))
        return model

    model = built(saved)
    save(tmp_path / "own", model=model, step=1)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp")
    for name in ("own", "dcp"):
        model = built(present)
        before = wholes(model)
        stated = rf"of a different shape: counts \({saved} in it, {present} in the model\)"
        with pytest.raises(CheckpointError, match=stated):
            load(tmp_path / name, model=model)
        assert_same(wholes(model), before)
        load(tmp_path / name, model=built(torch.complex64))  # which holds values of all dtypes
