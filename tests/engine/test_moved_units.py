"""Units whose modules are moved or cast between steps keep their values, encodings and history.
Units inside wrappers of other libraries do too.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_ranks, run_ranks
from small_models import Layer, Shard, chain, inputs, leave, sgd
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from fullshard import FullyShardedDataParallel, MixedPrecisionPolicy, StateError, fully_shard, recording
from fullshard.engine.registry import units_in
from fullshard.tape.context import Kept, kept
from fullshard.testing import assert_same


def cast_between_transports(
    strategy: str, first: torch.dtype, then: torch.dtype, policy: MixedPrecisionPolicy
) -> list[int]:
    """Return the bytes that this rank sends in a step after a cast, and in a step of a model always of that dtype."""
    sent = []
    for dtypes in ((first, then), (then,)):
        model = chain(partial(fully_shard, strategy=strategy, mp_policy=policy)).to(dtypes[0])
        for dtype in dtypes:
            model.to(dtype)
            before = [param.to_local().clone() for param in model.parameters()]
            with recording() as record:
                model(inputs().to(dtype)).square().mean().backward()
            assert_same([param.to_local() for param in model.parameters()], before)  # only optimizers change shards
            model.zero_grad()
        sent.append(record.sent_bytes())
    return sent


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)], ids=str)
def test_cast_updates_encodings_as_policy_specifies(strategy, dtypes):
    """Float64 is never encoded. The layout alone does not determine the encodings of a parameter group."""
    policy = MixedPrecisionPolicy(gather_wire="int8", reduce_wire="int8")
    for cast, always in run_ranks(2, cast_between_transports, strategy, *dtypes, policy):
        assert cast == always > 0


@on_ranks(2)
def test_next_forward_detects_step_after_cast_between_backward_and_step():
    left = []
    for moves in (True, False):
        model = chain(partial(fully_shard, strategy="zero1"))
        model(inputs()).square().mean().backward()
        if moves:
            model.to(torch.float64).to(torch.float32)
        with torch.no_grad():
            model(inputs())  # an evaluation gathers the parameters
            for param in model.parameters():
                param.to_local().numpy()[...] *= 1.5  # as fused optimizers do: the version counter does not change
            left.append([model(inputs())])
    moved, stayed = left
    assert_same(moved, stayed)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
@on_ranks(2)
def test_cast_keeps_unreduced_gradients_of_earlier_microbatches(strategy):
    grads = []
    for cast in (lambda model: None, nn.Module.double):
        model = chain(partial(fully_shard, strategy=strategy))
        model.set_requires_gradient_sync(False)
        model(inputs()).square().mean().backward()
        model.set_requires_gradient_sync(True)
        cast(model)
        model(inputs().to(next(model.parameters()).dtype)).square().mean().backward()
        grads.append([param.grad.to_local().float() for param in model.parameters()])
    torch.testing.assert_close(*grads)


def cast_what_one_rank_has_nothing_of() -> list[str]:
    model = fully_shard(nn.LayerNorm(1))
    model.to(torch.bfloat16)
    model(torch.ones(2, 1, dtype=torch.bfloat16)).sum().backward()
    return [str(param_group.plan.contract) for unit in units_in(model) for param_group in unit.param_groups]


def test_cast_applies_on_ranks_with_empty_shards():
    first, second = run_ranks(2, cast_what_one_rank_has_nothing_of)
    assert first == second == ["stored bfloat16, computed and gathered bfloat16, reduced bfloat16"]


@on_ranks(2)
def test_units_train_after_inference_mode_detects_replaced_shards():
    model = chain(fully_shard)
    model.layers[1].to(torch.float32)
    model(inputs()).sum().backward()
    for layer in model.layers:
        nn.Module._apply(layer, lambda tensor: tensor.clone())  # behind the unit's back
    with torch.inference_mode():
        model(inputs())
    model(inputs()).sum().backward()


@on_ranks(2)
def test_per_group_caches_are_cleared_when_default_process_group_changes():
    closed: list[str] = []
    local = Kept[str, str]("test", closed.append)
    local.get_or_make("a", lambda: "first")
    model = chain(fully_shard)
    model(inputs()).sum().backward()
    before = kept()
    store = dist.distributed_c10d._get_default_store()
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=world)
    assert local.get_or_make("a", lambda: "second") == "second"
    assert closed == ["first"]
    after = kept()
    chain(fully_shard)(inputs()).sum().backward()
    assert before["collectives of process groups"] >= 1
    assert before["default meshes"] == 1
    assert {what for what, count in after.items() if count} == {"test"}


class Around(nn.Module):
    """A wrapper that this library does not know."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "CheckpointWrapper": checkpoint_wrapper,
    "Sequential": nn.Sequential,
    "a user's": Around,
}
CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "to": lambda model: model.to("cpu", torch.float64),
    "cpu": lambda model: model.cpu(),
    "float": lambda model: model.double().float(),
    "half": lambda model: model.half().float(),
    "bfloat16": lambda model: model.bfloat16().float(),
    "double": lambda model: model.double(),
    "type": lambda model: model.type(torch.float64),
    "apply": lambda model: model.apply(lambda module: None),
    "zero_grad": lambda model: model.zero_grad(),
    "zero_grad to zeros": lambda model: model.zero_grad(set_to_none=False),
    "requires_grad_": lambda model: model.requires_grad_(False).requires_grad_(True),
    "load_state_dict": lambda model: model.load_state_dict(model.state_dict()),
    "train": lambda model: model.eval().train(),
    "to_empty": lambda model: refilled(model),
}


def refilled(model: nn.Module) -> None:
    values = {name: value.clone() for name, value in model.state_dict().items()}
    model.to_empty(device="cpu")
    model.load_state_dict(values)


def wrap_everywhere(model: nn.Module, wrapper: Callable[[nn.Module], Any]) -> nn.Module:
    """Wrap each layer of `model` and `model` itself."""
    for name, layer in model.layers.named_children():
        setattr(model.layers, name, wrapper(layer))
    return wrapper(model)


def wrap_inside(model: nn.Module, wrapper: Callable[[nn.Module], Any]) -> nn.Module:
    """Wrap all layers inside `FullyShardedDataParallel`, as torch does."""
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: isinstance(module, Layer)
    )
    return model


def learn_after(change: Callable[[nn.Module], object], model: nn.Module) -> list[torch.Tensor]:
    """Return losses before a step, after it, and after a step that follows the change."""
    losses = []
    for number in range(3):
        if number == 1:
            change(model)
        optimizer = sgd(model)
        loss = model(inputs(number).to(next(model.parameters()).dtype)).square().mean()
        loss.backward()
        losses.append(loss.detach().double())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def sharded_chain(shard: Shard) -> Any:
    """Return a chain whose layers are units, sharded by either interface."""
    model = chain(leave)
    for name, layer in model.layers.named_children():
        setattr(model.layers, name, shard(layer))
    return shard(model)


@pytest.mark.slow
@on_ranks(1)
def test_module_methods_on_wrapped_units_match_plain_modules():
    for name, change in CHANGES.items():
        expected = learn_after(change, chain(leave))
        for kind, wrapper in WRAPPERS.items():
            for shard in (fully_shard, FullyShardedDataParallel):
                if kind == "CheckpointWrapper" or name == "to":
                    assert_same(learn_after(change, wrap_inside(sharded_chain(shard), wrapper)), expected)
                if name == "to":
                    assert_same(learn_after(change, wrap_everywhere(sharded_chain(shard), wrapper)), expected)


@on_ranks(2)
def test_share_memory_raises_after_sharding():
    stated = []
    for model in (sharded_chain(fully_shard), Around(sharded_chain(FullyShardedDataParallel))):
        with pytest.raises(StateError) as caught:
            model.share_memory()
        stated.append(str(caught.value))
        model(inputs()).sum().backward()
    assert all("Call share_memory() before sharding the module" in message for message in stated)
