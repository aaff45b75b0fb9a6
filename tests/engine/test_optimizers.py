"""Optimizers of torch, created before or after sharding, that step after backward or within it."""

import copy
import gc
import random
import unittest.mock
import weakref
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from logged import Operations
from pages import code_blocks, page, section
from shared_ranks import on_ranks, run_ranks
from small_models import Chain, Layer, agree_with_plain, chain, inputs, leave, whole, whole_grads, wholes
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from fullshard import ConfigError, Offload, ShardedGradScaler, StateError, clip_grad_norm_, fully_shard
from fullshard.engine.registry import units_in
from fullshard.optim import step_shards
from fullshard.state.optim_state import full_optim_state_dict, optim_state_dict_to_load
from fullshard.testing import assert_same

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

# Optimizers that work on DTensor. All are elementwise, so that sharding cannot change a bit.
ELEMENTWISE: dict[str, Make] = {
    "Adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05),
    "Adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "AdamW fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "AdamW one by one": partial(torch.optim.AdamW, lr=0.01, foreach=False),
    "Adamax": partial(torch.optim.Adamax, lr=0.01),
    "ASGD": partial(torch.optim.ASGD, lr=0.01),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "RAdam": partial(torch.optim.RAdam, lr=0.01),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
}


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 3) -> dict[str, Tensor | None]:
    for step in range(count):
        optimizer.zero_grad()
        model(inputs(step)).square().mean().backward()
        optimizer.step()
    return wholes(model)


def trained(shard: Any, make: Make) -> dict[str, Tensor | None]:
    model = chain(shard)
    return steps(model, make(list(model.parameters())))


@pytest.mark.slow
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
@on_ranks("world")
def test_elementwise_torch_optimizers_match_plain_training_bitwise(world):
    for make in ELEMENTWISE.values():
        agree_with_plain(partial(trained, make=make), "ddp", "zero3")


class Turns(nn.Module):
    """Complex parameters with uneven shards along the last dimension."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vector = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.matrix = nn.Parameter(torch.randn(48, 5, dtype=torch.complex64))
        self.scalar = nn.Parameter(torch.randn((), dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x.to(torch.complex64) @ self.matrix * self.vector * self.scalar)


def turned(shard: Any, make: Make, how: str) -> Any:
    """Return the parameters after some steps, with a hook of the optimizer or a closure in some of them."""
    model = Turns()
    if shard is not leave:
        shard(model, shard_placement_fn=lambda param: Shard(1) if param.ndim == 2 else None)
    optimizer = make(list(model.parameters()))
    results: list[Any] = []
    if how == "hook":
        optimizer.register_step_post_hook(lambda *_: results.append(None))
    for step in range(4):
        optimizer.zero_grad()
        loss = model(inputs(step)).square().mean()
        loss.backward()
        is_closure = how == "closures" or (how == "closure later" and step == 2)
        results.append(optimizer.step(lambda found=loss: found.detach()) if is_closure else optimizer.step())
    return [wholes(model), results]


class Turn(nn.Module):
    """A complex matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(48, 6, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x.to(torch.complex64) @ self.matrix)


def turned_and_loaded(shard: Any, how: str) -> list[Tensor | None]:
    """Return the parameter after steps of an optimizer, and of another one that has loaded its states."""
    model, found, loaded = shard(Turn()), [], None
    for _ in range(2):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if loaded is not None:
            optimizer.load_state_dict(loaded)
        for step in range(2):
            optimizer.zero_grad()
            loss = model(inputs(step)).square().mean()
            loss.backward()
            optimizer.step(*[lambda found=loss: found.detach()] if how == "closures" else ())
            found.append(wholes(model)["matrix"])
        loaded = copy.deepcopy(optimizer.state_dict())
    return found


@pytest.mark.parametrize("policy", [{"parameters": {"disk": 1.0}}, {"optimizer": {"disk": 1.0}}, {"budget": "1MB"}])
@on_ranks(1)
def test_optimizer_steps_complex_parameters_offloaded_to_disk(policy, tmp_path):
    """Viewing them as real numbers makes a copy in memory; writes to it would be lost."""
    for how in ("plain", "closures"):
        shard = partial(fully_shard, offload_policy=Offload(**policy, folder=tmp_path))
        assert_same(turned_and_loaded(shard, how), turned_and_loaded(leave, how), name=how)


@on_ranks(2)
def test_optimizers_step_unevenly_sharded_complex_parameters():
    """A `DTensor` of these gives optimizers a copy when they view it as real numbers, and their writes are lost."""
    for name, make in ELEMENTWISE.items():
        if "fused" not in name:
            agree_with_plain(partial(turned, make=make, how="plain"), "zero1", "zero3")
    for how in ("closures", "closure later", "hook"):
        agree_with_plain(partial(turned, make=ELEMENTWISE["AdamW"], how=how), "zero3")
    model = Turns()
    fully_shard(model)
    model(inputs()).square().mean().backward()
    optimizer = Careful(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"Careful cannot step vector, a complex parameter.*step_shards"):
        optimizer.step()
    before = wholes(model)["vector"]
    step_shards(optimizer).step()
    assert before is not None and not torch.equal(before, wholes(model)["vector"])


@on_ranks(2)
def test_clipping_counts_empty_shards_of_complex_parameters():
    model = fully_shard(Turns())
    model(inputs()).square().mean().backward()
    norm = clip_grad_norm_([param for name, param in model.named_parameters() if name == "scalar"], 1e9)
    assert_same(norm, model.scalar.grad.full_tensor().abs())


# -- made before sharding ---------------------------------------------------------------------------------------------


def made_before(shard: Any, scales: bool = False) -> dict[str, Tensor | None]:
    model = Chain()
    torch.manual_seed(0)
    for param in model.parameters():
        nn.init.normal_(param, std=0.1)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    optimizer = torch.optim.AdamW(
        [{"params": list(model.layers.parameters())}, {"params": list(model.head.parameters()), "lr": 0.1}]
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for layer in model.layers:
        shard(layer)
    shard(model)
    scaler = ShardedGradScaler("cpu", init_scale=4.0) if scales else None
    for step in range(3):
        optimizer.zero_grad()
        loss = model(inputs(step)).square().mean()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        scheduler.step()
    groups = [len(group["params"]) for group in optimizer.param_groups]
    assert groups == [len(list(model.layers.parameters())), len(list(model.head.parameters()))]
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in model.parameters()}
    return wholes(model)


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
@on_ranks("world")
def test_optimizer_created_before_sharding_steps_shards(world):
    """The optimizer keeps its groups, their options, its scheduler and a scaler."""
    agree_with_plain(made_before)
    agree_with_plain(partial(made_before, scales=True), "zero3")


def zero_and_clip_before_the_first_step(shard: Any) -> dict[str, Tensor | None]:
    """Skip the first steps, as a gradient scaler does, and take the parameters from the optimizer's groups."""
    model = chain(lambda module: module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for layer in model.layers:
        shard(layer)
    shard(model)
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        model(inputs(step)).square().mean().backward()
        nn.utils.clip_grad_value_(optimizer.param_groups[0]["params"], 1e-3)
        if step > 1:
            optimizer.step()
    return wholes(model)


@on_ranks(2)
def test_optimizer_created_before_sharding_zeroes_and_clips_gradients():
    agree_with_plain(zero_and_clip_before_the_first_step)
    model = chain(lambda module: module)
    originals = list(model.parameters())
    fully_shard(model)
    model(inputs()).square().mean().backward()
    norm = clip_grad_norm_(originals, 1e-3)
    assert norm > 1e-3
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 1.0), torch.tensor(1e-3))


@on_ranks(2)
def test_step_raises_if_optimizer_has_state_from_before_sharding():
    model = Chain()
    optimizer = torch.optim.AdamW(model.parameters())
    steps(model, optimizer, 1)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model(inputs(1)).square().mean().backward()
    before = wholes(model)
    with pytest.raises(StateError) as caught:
        optimizer.step()
    assert_same(wholes(model), before)
    stated = str(caught.value)
    assert "AdamW has state for norm.weight of layers.0 from before sharding: step, exp_avg, exp_avg_sq" in stated
    assert "optim_state_dict_to_load" in stated


# -- a step within backward -------------------------------------------------------------------------------------------


def step_when_ready(model: nn.Module) -> None:
    """Run the documented recipe for freeing gradients one by one."""
    exec(code_blocks(section(page("docs/optimizers.md"), "A step within backward"), "python")[0], globals() | locals())


def stepping_in_backward(shard: Any) -> dict[str, Tensor | None]:
    model = chain(shard)
    step_when_ready(model)
    for step in range(3):
        model(inputs(step)).square().mean().backward()
        assert all(param.grad is None for param in model.parameters())
    return wholes(model)


@pytest.mark.slow
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
@on_ranks("world")
def test_steps_within_backward_match_steps_after_backward_bitwise(world):
    agree_with_plain(stepping_in_backward, "ddp", "zero1", "zero2", "zero3")
    after = trained(partial(fully_shard, strategy="zero3"), torch.optim.AdamW)
    assert_same(stepping_in_backward(partial(fully_shard, strategy="zero3")), after)


def stepping_between_uses(shard: Any) -> dict[str, Tensor | None]:
    """Reentrant checkpoints pass gradients use by use: the earlier use is computed again, with the hook's results."""
    model = chain(shard)
    step_when_ready(model)

    def forward(x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for i in (0, 1, 0, 2):
            x = checkpoint(model.layers[i], x, use_reentrant=True)
        return model.head(x)

    model.forward = forward
    for step in range(3):
        model(inputs(step)).square().mean().backward()
    return wholes(model)


@on_ranks(2)
def test_reentrant_recompute_uses_weights_stepped_in_backward_hooks():
    agree_with_plain(stepping_between_uses, "ddp", "zero1", "zero2", "zero3")


@on_ranks(2)
def test_post_accumulate_grad_hooks_run_only_on_reduced_gradients():
    """Unreduced microbatches call no hooks. Later, hooks receive the parameters that optimizers hold."""

    def run(shard: Any) -> tuple[int, dict[str, Tensor | None]]:
        model = chain(shard)
        calls: list[Tensor] = []
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(calls.append)
        if isinstance(next(model.parameters()), DTensor):
            model.set_requires_gradient_sync(False)
            model(inputs(0)).square().mean().backward()
            assert calls == []
            model.set_requires_gradient_sync(True)
        model(inputs(1)).square().mean().backward()
        return len(calls), wholes(model)

    model = Chain()
    assert run(fully_shard)[0] == len(list(model.parameters()))


def halve(param: Tensor) -> None:
    assert param.grad is not None
    param.grad = param.grad * 0.5


def hooked(shard: Any, registers_early: bool) -> dict[str, Tensor | None]:
    model = Chain()
    shard = partial(chain, shard, model)
    if not registers_early:
        shard()
    handles = [param.register_post_accumulate_grad_hook(halve) for param in model.parameters()]
    if registers_early:
        shard()
    backward(model, 0)
    for handle in handles[::2]:
        handle.remove()
    backward(model, 1)
    return whole_grads(model)


@on_ranks(2)
def test_post_accumulate_grad_hooks_work_if_registered_before_sharding():
    for registers_early in (False, True):
        agree_with_plain(partial(hooked, registers_early=registers_early), "ddp", "zero2", "zero3")


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
@on_ranks(1)
def test_register_hook_on_parameters_raises_until_removed(strategy):
    model = Chain()
    handle = model.head.weight.register_hook(torch.neg)
    with pytest.raises(StateError, match="weight has a hook of register_hook, which is never called"):
        fully_shard(model, strategy=strategy)
    handle.remove()
    fully_shard(model, strategy=strategy)
    handle = model.head.weight.register_hook(torch.neg)
    for _ in range(2):
        with pytest.raises(StateError, match=r"head\.weight has a hook of register_hook, which is never called"):
            backward(model, 0)
    handle.remove()
    backward(model, 0)


def gradient_peak(in_backward: bool, layers: int) -> int:
    """Return the peak bytes of gradient shards."""
    model = chain(fully_shard, Chain([Layer() for _ in range(layers)]))
    if in_backward:
        step_when_ready(model)
    held: list[int] = []

    def look(param: Tensor) -> None:
        buffers = [param_group.gradients.flat for unit in units_in(model) for param_group in unit.param_groups]
        held.append(sum(buffer.nbytes for buffer in buffers if buffer is not None))

    for param in list(model.parameters()):
        param.register_post_accumulate_grad_hook(look)
    model(inputs(1)).square().mean().backward()
    return max(held)


def test_steps_within_backward_hold_gradients_of_one_unit_at_a_time():
    """The peak is that of one unit, for any number of units."""
    few, many = run_ranks(2, gradient_peak, True, 2), run_ranks(2, gradient_peak, True, 6)
    assert few == many
    assert run_ranks(2, gradient_peak, False, 6)[0] > 4 * many[0]


# -- stepping shards --------------------------------------------------------------------------------------------------


def on_dtensors() -> Operations:
    return Operations(lambda func, types: DTensor in types)


def backward(model: nn.Module, step: int) -> None:
    model(inputs(step)).square().mean().backward()


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "SGD"])
@on_ranks(2)
def test_later_steps_update_shards_without_dtensor_dispatch(name):
    """Users still see the same `DTensor`s in groups and states."""
    model = chain(fully_shard)
    optimizer = ELEMENTWISE[name](list(model.parameters()))
    steps(model, optimizer, 2)
    params = optimizer.param_groups[0]["params"]
    states = {param: dict(optimizer.state[param]) for param in params}
    optimizer.zero_grad()
    backward(model, 2)
    with on_dtensors() as visited:
        optimizer.step()
    assert visited.names == []
    assert optimizer.param_groups[0]["params"] is params
    assert list(optimizer.state) == params == list(model.parameters())
    for param, before in states.items():
        after = optimizer.state[param]
        assert before.keys() == after.keys()
        for key, value in after.items():
            assert isinstance(value, DTensor) == (isinstance(value, Tensor) and value.ndim > 0)
            assert not isinstance(value, DTensor) or value is before[key]
        assert isinstance(param.grad, DTensor)
        assert param._local_tensor.grad is None


# -- changes between steps ---------------------------------------------------------------------------------------------


def load_own(optimizer: torch.optim.Optimizer, _: random.Random) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def replace_values(optimizer: torch.optim.Optimizer, draw: random.Random) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in draw.sample(params, len(params) // 2):
        state = optimizer.state[param]
        state.update({name: value * 2 for name, value in state.items() if isinstance(value, Tensor) and value.ndim})


def write_values(optimizer: torch.optim.Optimizer, _: random.Random) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor) and value.ndim:
                value.mul_(0.5)


def forget_states(optimizer: torch.optim.Optimizer, draw: random.Random) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in draw.sample(params, draw.randint(1, len(params))):
        optimizer.state.pop(param, None)


def forget_grads(optimizer: torch.optim.Optimizer, draw: random.Random) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in draw.sample(params, draw.randint(1, len(params) - 1)):
        param.grad = None


def replace_grads(optimizer: torch.optim.Optimizer, _: random.Random) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = None if param.grad is None else param.grad * 3


def change_settings(optimizer: torch.optim.Optimizer, draw: random.Random) -> None:
    for group in optimizer.param_groups:
        group["lr"] = draw.choice((0.001, 0.002))
        if "momentum" in group:
            group["momentum"] = draw.choice((0.0, 0.9))
            group["nesterov"] = group.get("nesterov", False) and group["momentum"] > 0


def split_groups(optimizer: torch.optim.Optimizer, _: random.Random) -> None:
    group = optimizer.param_groups[-1]
    if len(group["params"]) > 1:
        moved = group["params"].pop()
        optimizer.add_param_group({**group, "params": [moved], "lr": 0.003})


def drop_a_param(optimizer: torch.optim.Optimizer, _: random.Random) -> None:
    if len(optimizer.param_groups[0]["params"]) > 2:
        optimizer.state.pop(optimizer.param_groups[0]["params"].pop(), None)


CHANGES = (
    *(load_own, replace_values, write_values, forget_states, forget_grads),
    *(replace_grads, change_settings, split_groups, drop_a_param),
)


def changed(shard: Any, name: str, seed: int) -> list[Any]:
    """Return the parameters after each of some steps, between which something about the optimizer changes."""
    draw = random.Random(f"{name} {seed}")
    model = chain(shard)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.01) if name == "SGD without states" else ELEMENTWISE[name](params)
    found: list[Any] = []
    for step in range(10):
        optimizer.zero_grad()
        backward(model, step)
        if step > 2 and draw.random() < 0.6:
            draw.choice(CHANGES)(optimizer, draw)
        if step == 5 and name == "SGD without states":  # it has states from here on
            for group in optimizer.param_groups:
                group["momentum"] = 0.9
        optimizer.step()
        found.append(wholes(model))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "ASGD", "SGD", "SGD without states"])
@on_ranks(2)
def test_optimizer_changes_between_steps_match_plain_training_bitwise(name):
    """Most steps reuse the exchange of parameters and states of the step before. A change must invalidate it."""
    for seed in range(4):
        agree_with_plain(partial(changed, name=name, seed=seed), "zero3", *["ddp"] * (seed == 0))


@on_ranks(1)
def test_replaced_optimizer_states_are_freed_immediately():
    """Programs that reuse the memory of the states replace the states between steps."""
    model = chain(fully_shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps(model, optimizer, 3)
    gone = []
    for state in optimizer.state.values():
        for name, value in state.items():
            gone += [weakref.ref(value), weakref.ref(getattr(value, "_local_tensor", value))]
            state[name] = value.clone()
    del value
    assert [ref() for ref in gone] == [None] * len(gone)


class Careful(torch.optim.SGD):
    """Derived from a known optimizer, with unknown behavior."""


@on_ranks(2)
def test_param_groups_show_dtensors_in_hooks_closures_and_after_failures():
    """Check the tensors that users get within a step, and after a failed step."""
    model = chain(fully_shard)
    visited: list[bool] = []

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        visited.append(all(isinstance(param, DTensor) for param in optimizer.param_groups[0]["params"]))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps(model, optimizer, 2)
    backward(model, 0)
    optimizer.step(lambda: note(optimizer))
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        with closing(SimpleNamespace(close=register(note).remove)):
            optimizer.step()
    derived = Careful(model.parameters(), lr=0.1)
    for _ in range(2):
        with on_dtensors() as dispatched:
            derived.step()
        visited.append(bool(dispatched.names))
    assert visited == [True] * 5

    params = optimizer.param_groups[0]["params"]
    shape = params[0].grad._local_tensor.shape
    params[0].grad._local_tensor = torch.zeros(7, 11)  # so that the step fails
    with pytest.raises(RuntimeError, match="size"):
        optimizer.step()
    assert optimizer.param_groups[0]["params"] is params
    params[0].grad._local_tensor = torch.zeros(shape)
    optimizer.step()
    assert optimizer.param_groups[0]["params"] is params


def scheduled(shard: Any, *, late: bool) -> list[Any]:
    """A scheduler takes the optimizer's `step` apart, before or after this library has."""
    model = chain(shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = None if late else torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rates = []
    for step in range(5):
        if late and step == 3:
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return [torch.tensor(rates), wholes(model)]


@on_ranks(2)
def test_schedulers_created_before_or_after_first_step_match_plain():
    for late in (False, True):
        agree_with_plain(partial(scheduled, late=late), "zero1", "zero3")


@on_ranks(1)
def test_an_optimizer_is_freed_with_its_last_reference():
    """It is in no reference cycle, because its state is most of a rank's memory and garbage collection is delayed."""
    model = chain(fully_shard)
    optimizer = torch.optim.AdamW(model.parameters())
    steps(model, optimizer, 3)
    gone = weakref.ref(optimizer)
    gc.disable()
    del optimizer
    gc.enable()
    assert gone() is None


def late_states(shard: Any) -> list[Any]:
    """Give a parameter its first gradient after the first steps. Its state is sharded like that of others."""
    model = chain(shard)
    model.head.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps(model, optimizer)
    model.head.weight.requires_grad_(True)
    left = steps(model, optimizer)
    buffer = optimizer.state[model.head.weight]["momentum_buffer"]
    assert isinstance(buffer, DTensor) == (shard is not leave)
    return [left, whole(buffer)]


def test_optimizer_state_created_in_later_steps_is_sharded():
    run_ranks(2, agree_with_plain, late_states)


class Lion(torch.optim.Optimizer):
    """A custom elementwise optimizer with operations that `DTensor` does not support."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    assert type(param) is not DTensor, "a kernel that takes plain memory"
                    state = self.state[param]
                    mean = state.setdefault("mean", torch.zeros_like(param))
                    self.note(state, param)
                    param.sub_(mean.lerp(param.grad, 0.1).sign_(), alpha=group["lr"])
                    mean.lerp_(param.grad, 0.01)

    def note(self, state: dict[str, Any], param: Tensor) -> None:
        """Keep nothing else."""


class BlockedLion(Lion):
    """One that keeps a scale for each block of its state, too."""

    def note(self, state: dict[str, Any], param: Tensor) -> None:
        state["scales"] = param.detach().flatten()[::8].abs().clone()


def lion(model: nn.Module, sharded: bool, kind: type[Lion] = Lion) -> Any:
    optimizer = kind(model.parameters(), lr=0.01)
    return step_shards(optimizer) if sharded else optimizer


@on_ranks(2)
def test_step_shards_enables_custom_elementwise_optimizers():
    plain, model = chain(lambda module: module), chain(fully_shard)
    optimizers = lion(plain, False), lion(model, True)
    assert step_shards(optimizers[1]) is optimizers[1]
    for step in range(4):
        for item, optimizer in zip((plain, model), optimizers, strict=True):
            item(inputs(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step == 1:
            state = full_optim_state_dict(model, optimizers[1], rank0_only=False)
            optimizers = optimizers[0], lion(model, True)
            optimizers[1].load_state_dict(optim_state_dict_to_load(model, optimizers[1], state))
    assert_same([param.full_tensor() for param in model.parameters()], [param.detach() for param in plain.parameters()])
    param = next(iter(model.parameters()))
    assert isinstance(optimizers[1].state[param]["mean"], DTensor)
    blocked = lion(model, True, BlockedLion)
    model(inputs()).square().mean().backward()
    blocked.step()
    with pytest.raises(StateError, match=r"'scales' of .* in the state of BlockedLion covers only this rank's shard"):
        full_optim_state_dict(model, blocked)


class Repointed(Lion):
    """A variant that replaces the storage of its state tensor in each step."""

    def note(self, state: dict[str, Any], param: Tensor) -> None:
        state["mean"].data = state["mean"] * 0.5


class Scalar(nn.Module):
    """A parameter without dimensions, and one with a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x + self.shift


@on_ranks(2)
def test_step_shards_allows_state_to_change_its_storage():
    plain, model = Scalar(), fully_shard(Scalar())
    optimizers = lion(plain, False, Repointed), lion(model, True, Repointed)
    for step in range(4):
        for item, optimizer in zip((plain, model), optimizers, strict=True):
            item(torch.arange(8.0) - step).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same([param.full_tensor() for param in model.parameters()], [param.detach() for param in plain.parameters()])
    states = [
        [optimizer.state[param]["mean"] for param in optimizer.param_groups[0]["params"]] for optimizer in optimizers
    ]
    assert_same([state.full_tensor() for state in states[1]], states[0])


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS", "Muon", "Rprop"])
@on_ranks(2)
def test_unsupported_torch_optimizers_raise_config_error(name):
    model = chain(fully_shard)
    matrices = [param for param in model.parameters() if param.ndim == 2]
    optimizer = getattr(torch.optim, name)(matrices)
    model(inputs()).square().mean().backward()
    if name in ("Adafactor", "Rprop"):
        stated = "step_shards" if name == "Rprop" else "strategy='ddp'"
        with pytest.raises(ConfigError, match=f"{name} .*{stated}"):
            optimizer.step()
    if name == "Rprop":
        step_shards(optimizer).step()
        model(inputs()).square().mean().backward()
        optimizer.step(closure=None)  # as torch.distributed.checkpoint calls it
        model(inputs()).square().mean().backward()
        before = wholes(model)
        with closing(SimpleNamespace(close=optimizer.register_step_pre_hook(lambda *_: None).remove)):
            assert optimizer.step(lambda: 3.0) == 3.0
        assert any(not torch.equal(value, before[name]) for name, value in wholes(model).items())
    else:
        with pytest.raises(ConfigError, match="computes sums over full parameters"):
            step_shards(optimizer)


class Kept(torch.optim.Optimizer):
    """An optimizer with `update(param, grad, state, group)`. Subclasses define the update."""

    def __init__(self, params: Any, lr: float = 0.01, beta: float = 0.9, extra: str = "x") -> None:
        super().__init__(params, {"lr": lr, "beta": beta})
        self.extra = extra

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(self.update(param, param.grad, self.state[param], group), alpha=group["lr"])

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return grad.sign()

    def adam(self, grad: Tensor, state: dict[str, Any]) -> Tensor:
        if not state:
            state |= {"m": torch.zeros_like(grad), "v": torch.zeros_like(grad), "t": 0}
        state["t"] += 1
        state["m"].lerp_(grad, 0.1)
        state["v"].lerp_(grad * grad, 0.01)
        return state["m"] / (1 - 0.9 ** state["t"]) / ((state["v"] / (1 - 0.99 ** state["t"])).sqrt() + 1e-8)


class OwnAdam(Kept):
    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return self.adam(grad, state) + 0.1 * param


class DecaysMatrices(Kept):
    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return self.adam(grad, state) + (0.1 * param if param.ndim > 1 else 0)


class InTraining(OwnAdam):
    """It steps only after `train()`, as schedule-free optimizers do."""

    is_training = False

    def train(self) -> None:
        self.is_training = True

    def step(self, closure: Any = None) -> None:
        assert self.is_training
        super().step()


class Foreach(Kept):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                torch._foreach_add_(params, [param.grad for param in params], alpha=-group["lr"])


class TrustRatio(Kept):  # LAMB
    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        move = self.adam(grad, state)
        return move * param.norm().clamp(max=10) / move.norm().clamp(min=1e-6)


class ClippedUpdates(Kept):  # StableAdamW
    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        move = self.adam(grad, state)
        return move / (grad.square() / state["v"].clamp(min=1e-16)).mean().sqrt().clamp(min=1)


class Factored(Kept):  # Adafactor, CAME
    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if param.ndim < 2:
            return self.adam(grad, state)
        rows, columns = grad.square().mean(1), grad.square().mean(0)
        state["rows"] = rows if "rows" not in state else state["rows"].lerp(rows, 0.1)
        state["columns"] = columns if "columns" not in state else state["columns"].lerp(columns, 0.1)
        return grad / (state["rows"][:, None] * state["columns"] / state["rows"].mean()).sqrt().clamp(min=1e-6)


class Preconditioned(Kept):  # Shampoo
    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if param.ndim < 2:
            return grad
        state["right"] = state.get("right", torch.eye(param.shape[1])) + grad.t() @ grad
        values, vectors = torch.linalg.eigh(state["right"])
        return grad @ (vectors * values.clamp(min=1e-6) ** -0.5) @ vectors.t()


class Rotated(Kept):  # SOAP, which takes no step at first
    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if param.ndim < 2:
            return self.adam(grad, state)
        if "basis" not in state:
            state["basis"] = torch.linalg.eigh(grad.t() @ grad)[1]
            return torch.zeros_like(grad)
        adam = state.setdefault("adam", {})
        return self.adam(grad @ state["basis"], adam) @ state["basis"].t()


class Centred(Kept):  # Ranger
    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return grad - grad.mean(0, keepdim=True)


class NormOfAll(Kept):  # Adan with max_grad_norm, SAM
    def step(self, closure: Any = None) -> None:
        grads = [param.grad for group in self.param_groups for param in group["params"] if param.grad is not None]
        self.norm = torch.stack([grad.norm() for grad in grads]).norm()
        super().step()

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return grad / self.norm


class Drawn(Kept):
    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return grad + torch.randn_like(grad)


class NeedsMore(OwnAdam):
    """Its arguments are kept nowhere."""

    def __init__(self, params: Any, needed: Any, **options: Any) -> None:
        super().__init__(params, **options)


class Later(OwnAdam):
    """A statistic that is used in much later steps only."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        move = super().update(param, grad, state, group)
        state["rows"] = grad.square().mean(-1)
        return move


def of_layers(kind: Any, *args: Any, **options: Any) -> Any:
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    first = {"params": list(model[0].parameters()), "lr": 0.0}  # of a schedule that begins with 0
    return kind([first, {"params": list(model[1].parameters())}], *args, **options)


@pytest.mark.parametrize("kind", [Kept, OwnAdam, DecaysMatrices, InTraining, Foreach, Lion])
def test_step_shards_accepts_unknown_elementwise_optimizers(kind, caplog):
    optimizer = of_layers(kind, lr=1e-3)
    if kind is InTraining:
        optimizer.train()
    state = torch.get_rng_state()
    assert step_shards(optimizer, verify=False) is optimizer
    assert caplog.text == ""
    assert not optimizer.state
    assert_same(torch.get_rng_state(), state)


NEED_WHOLES = [TrustRatio, ClippedUpdates, Factored, Preconditioned, Rotated, Centred, NormOfAll]


@pytest.mark.parametrize("kind", NEED_WHOLES)
def test_step_shards_rejects_optimizers_that_need_full_parameters(kind):
    with pytest.raises(ConfigError, match=rf"{kind.__name__} needs full parameters.*of test tensors differ"):
        step_shards(of_layers(kind))


@pytest.mark.parametrize(
    ("kind", "args", "stated"),
    [
        (Drawn, (), "its steps are random"),
        (NeedsMore, (object(),), "its step could not be tested"),
        (Later, (), "its state 'rows' has shape"),
    ],
)
def test_step_shards_warns_if_optimizer_cannot_be_tested(kind, args, stated, caplog):
    step_shards(of_layers(kind, *args))
    assert stated in caplog.text


@pytest.mark.parametrize(
    "name", ["SOAP", "CAME", "CAME8bit", "Shampoo", "DistributedShampoo", "StableAdamW", "Lamb", "LARS", "Prodigy"]
)
def test_step_shards_rejects_known_non_elementwise_optimizers_by_name(name):
    kind = type(name, (OwnAdam,), {})
    for derived in (kind, type("Mine", (kind,), {})):
        with pytest.raises(ConfigError, match=f"{derived.__name__} computes sums over full parameters"):
            step_shards(of_layers(derived))


def test_step_shards_classifies_optimizers_of_installed_libraries():
    import bitsandbytes.optim as bnb
    import torchao.optim as ao
    import transformers

    for kind in (bnb.AdamW8bit, bnb.Lion32bit, bnb.AdEMAMix, ao.AdamW8bit, ao.AdamW4bit, torch.optim.Rprop):
        step_shards(of_layers(kind, lr=0.01))
    for kind in (bnb.LAMB, bnb.LAMB8bit, bnb.LARS8bit, bnb.PytorchLARS, transformers.Adafactor, torch.optim.Adafactor):
        options: dict[str, Any] = {"momentum": 0.9} if "LARS" in kind.__name__ else {}
        options |= {"relative_step": False} if kind is transformers.Adafactor else {}
        with pytest.raises(ConfigError, match="computes sums over full parameters"):
            step_shards(of_layers(kind, lr=0.01, **options))


def verify(kinds: Sequence[Any]) -> dict[str, str]:
    found = {}
    for kind in kinds:
        torch.manual_seed(0)
        model = chain(fully_shard)
        optimizer = kind(model.parameters(), lr=0.01)
        with unittest.mock.patch("fullshard.optim.local_steps.check_elementwise"):
            step_shards(optimizer, verify=True)
        try:
            for step in range(5):
                model(inputs(step) + dist.get_rank()).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        except ConfigError as error:
            found[kind.__name__] = str(error)
    return found


@pytest.mark.slow
def test_verify_detects_optimizers_that_need_full_parameters():
    right = [Kept, OwnAdam, DecaysMatrices, Foreach, torch.optim.AdamW]
    first, second = run_ranks(2, verify, [*right, *NEED_WHOLES])
    assert first == second
    assert set(first) == {kind.__name__ for kind in NEED_WHOLES}
    assert "on shards differs from that on the full tensor by" in first["Rotated"]


@on_ranks(2)
def test_lbfgs_on_evenly_sharded_parameters_matches_plain_training():
    """Run with evenly divisible rows; in all other cases torch raises."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model, x = fully_shard(copy.deepcopy(plain)), torch.randn(6, 8)
    for item in (plain, model):
        optimizer = torch.optim.LBFGS(item.parameters(), lr=0.1, max_iter=3)

        def closure(element: nn.Module = item, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = element(x).square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
    for own, peer in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.full_tensor(), peer.detach())
