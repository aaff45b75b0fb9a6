"""`summon_full_params`: full parameters inside the context, and which changes to them are kept."""

import copy
import gc
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from time import sleep
from typing import Any

import pytest
import torch
from shared_ranks import on_ranks, run_ranks
from small_models import (
    ONE_AXIS,
    Block,
    BrokenBackward,
    SmallGPT,
    Stop,
    adamw,
    batch,
    gathered,
    loss_of,
    shard,
    small_gpt,
    take_step,
    whole_grads,
    wholes,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from fullshard import (
    CheckpointError,
    ConfigError,
    FullyShardedDataParallel,
    StateError,
    fully_shard,
    recording,
    stream_weights,
    summon_full_params,
)
from fullshard._dry_compat import storage_watch
from fullshard.checkpoint import async_save, export_safetensors, save, snapshot
from fullshard.testing import assert_same
from fullshard.wrap import ModuleWrapPolicy


def by_wrapper(model: SmallGPT, *, tied_in_two_units: bool = False, **options: Any) -> nn.Module:
    classes = {Block, nn.Embedding} if tied_in_two_units else {Block}
    return FullyShardedDataParallel(
        model, sharding_strategy=options.pop("strategy", "zero3"), auto_wrap_policy=ModuleWrapPolicy(classes), **options
    )


FRONTS = {
    "fully_shard": shard,
    "fully_shard, tied across units": partial(shard, tied_in_two_units=True),
    "wrapper": by_wrapper,
    "wrapper, tied across units": partial(by_wrapper, tied_in_two_units=True),
}
ALONE = [("fully_shard", strategy) for strategy in ONE_AXIS] + [("wrapper", "zero3")]
TIED = [("fully_shard, tied across units", "zero3"), ("wrapper, tied across units", "zero1")]
WAYS = [*ALONE, *TIED]
FEW = [("fully_shard", "ddp"), ("wrapper", "zero3"), TIED[0]]


def sharded(way: tuple[str, str]) -> nn.Module:
    front, strategy = way
    return FRONTS[front](small_gpt(blocks=2), strategy=strategy)


def plain() -> SmallGPT:
    return small_gpt(blocks=2)


def same_batch(step: int) -> Tensor:
    """Return the same batch on every rank, so that results can be compared with those of one process."""
    return batch(step, sequences=4)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 0) -> Tensor:
    loss = loss_of(model, same_batch(number))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def names_of(parameters: Any) -> list[str]:
    return [name for name, _ in parameters]


# -- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
@on_ranks("world")
def test_summon_full_params_unshards_parameters_and_restores_shards(world):
    for way in WAYS:
        model, reference = sharded(way), plain()
        optimizer, other = adamw(model), adamw(reference)
        expected, before = dict(reference.named_parameters()), dict(model.named_parameters())
        for number in range(2):
            with summon_full_params(model):
                found = dict(model.named_parameters())
                assert list(found) == list(expected)
                assert_same(found, expected, name=str(way))
                assert {type(param) for param in found.values()} == {nn.Parameter}
                assert all(found[name].requires_grad == expected[name].requires_grad for name in found)
                assert all(param.grad is None for param in found.values())
                assert model.head.weight is model.embedding.weight  # still tied
            after = dict(model.named_parameters())
            assert all(after[name] is before[name] for name in before)  # the objects that the optimizer holds
            assert all(isinstance(param, DTensor) for param in after.values())
            assert_same(step(model, optimizer, number), step(reference, other, number), name=str(way))


# -- writing ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def change(model: nn.Module, replaces: bool = False) -> None:
    """Modify weights in the ways that users do.

    With `replaces`, also replace a parameter. The optimizer of a plain model would not see the new one.
    """
    for param in model.parameters():
        param.mul_(1.25)
    model.blocks[0].up.weight.data = model.blocks[0].up.weight.data.flip(0)
    replaced = nn.Parameter(torch.full_like(model.blocks[1].down.weight, 0.01))
    if replaces:
        model.blocks[1].down.weight = replaced
    else:
        model.blocks[1].down.weight.copy_(replaced)
    nn.init.ones_(model.norm.weight)
    model.mixture[1].fill_(3.0)
    model.wide.weight.data[0, 0] = 7.0
    model.embedding.weight.requires_grad_(False)


@pytest.mark.slow
@pytest.mark.parametrize("writeback", [True, pytest.param(False, marks=pytest.mark.slow)])
@on_ranks(2)
def test_summon_full_params_keeps_changes_only_with_writeback(writeback):
    """Test every strategy, including those that keep unsharded parameters in memory between steps."""
    for way in WAYS:
        model, reference = sharded(way), plain()
        if way[0] == "fully_shard":
            model.set_reshard_after_backward(False)  # keep unsharded parameters, which are then gathered again
        optimizer, other = adamw(model), adamw(reference)
        for number in range(2):
            assert_same(step(model, optimizer, number), step(reference, other, number), name=str(way))
        with recording() as record, summon_full_params(model, writeback=writeback):
            change(model, replaces=True)
            assert model.blocks[0].up.weight.shape == (192, 97)
        assert record.names() == []  # DTensor gathers the parameters, not the engine
        if writeback:
            change(reference)
            assert not model.embedding.weight.requires_grad
        assert_same(wholes(model), dict(reference.state_dict()), name=str(way))
        for number in range(2, 4):
            assert_same(step(model, optimizer, number), step(reference, other, number), name=str(way))
        assert_same(wholes(model), dict(reference.state_dict()), name=str(way))


# -- options ----------------------------------------------------------------------------------------------------------


def summon_on_the_first_rank() -> list[bool]:
    """Return, per model, whether this rank had unsharded parameters. Check that other ranks hold no memory for them."""
    visited = []
    for way in FEW:
        model = sharded(way)
        with storage_watch() as watch, summon_full_params(model, writeback=False, rank0_only=True, offload_to_cpu=True):
            gc.collect()
            found = dict(model.named_parameters())
            visited.append(not isinstance(found["norm.weight"], DTensor))
            if visited[-1]:
                assert_same(found, dict(plain().named_parameters()))
                assert {param.device.type for param in found.values()} == {"cpu"}
                assert watch.live_bytes() >= sum(param.nbytes for param in plain().parameters())
                with torch.no_grad():
                    found["norm.weight"].zero_()  # not kept
            else:
                assert all(isinstance(param, DTensor) for param in found.values())
                for _ in range(3000):  # the process group's thread may still hold send buffers
                    if not watch.live_bytes():
                        break
                    sleep(0.01)
                assert watch.live_bytes() == 0, way
        assert_same(wholes(model), dict(plain().state_dict()), name=str(way))
    return visited


@pytest.mark.slow
def test_rank0_only_keeps_other_ranks_sharded_without_extra_memory():
    first, *others = run_ranks(3, summon_on_the_first_rank)
    assert all(first)
    assert not any(any(visited) for visited in others)


@pytest.mark.slow
@on_ranks(2)
def test_with_grads_unshards_gradients_and_keeps_changes_with_writeback():
    """The optimizer steps with the changed gradients, under every strategy."""
    for way in WAYS:
        model, reference = sharded(way), plain()
        for net in (model, reference):
            loss_of(net, same_batch(0)).backward()
        grads = {name: param.grad for name, param in reference.named_parameters()}
        with summon_full_params(model, with_grads=True, writeback=False):
            assert_same({name: param.grad for name, param in model.named_parameters()}, grads, name=str(way))
            model.norm.weight.grad.zero_()
        assert_same(whole_grads(model), grads, name=str(way))  # not kept
        for net in (model, reference):
            with summon_full_params(net, with_grads=True), torch.no_grad():
                net.embedding.weight.grad.mul_(0.5)
                net.mixture.grad = torch.full_like(net.mixture, 0.25)
                net.scale.grad = None
                net.blocks[1].up.weight.grad = torch.ones_like(net.blocks[1].up.weight)  # a frozen parameter
        assert_same(whole_grads(model), {n: p.grad for n, p in reference.named_parameters()}, name=str(way))
        for net in (model, reference):
            net.blocks[1].up.weight.grad = None
        optimizer, other = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, reference))
        optimizer.step()
        other.step()
        with torch.no_grad():
            assert_same(loss_of(model, same_batch(1)), loss_of(reference, same_batch(1)), name=str(way))


def whole_names(model: nn.Module) -> list[str]:
    return [name for name, param in model.named_parameters() if not isinstance(param, DTensor)]


@pytest.mark.slow
@on_ranks(2)
def test_summon_full_params_supports_submodules_and_nested_contexts():
    for way in WAYS:
        model, everything = sharded(way), names_of(plain().named_parameters())
        tied = "," in way[0]
        own = [name for name in everything if not name.startswith("blocks") and not (tied and "embedding" in name)]
        with summon_full_params(model, recurse=False):
            assert [name for name in whole_names(model) if "embedding" not in name] == [
                name for name in own if "embedding" not in name
            ]
            with summon_full_params(model.blocks[0], writeback=False):
                assert [name for name in whole_names(model) if "blocks.0" in name] == [
                    name for name in everything if name.startswith("blocks.0")
                ]
                with summon_full_params(model):  # unsharded parameters keep the options of the outer context
                    assert whole_names(model) == everything
                    with torch.no_grad():
                        model.blocks[0].up.bias.fill_(5.0)  # not kept
                        model.blocks[1].up.bias.fill_(6.0)
                        model.norm.bias.fill_(7.0)
                assert not any("blocks.1" in name for name in whole_names(model))
            assert not any("blocks.0" in name for name in whole_names(model))
        assert whole_names(model) == []
        expected = plain()
        with torch.no_grad():
            expected.blocks[1].up.bias.fill_(6.0)
            expected.norm.bias.fill_(7.0)
        assert_same(wholes(model), dict(expected.state_dict()), name=str(way))

        with summon_full_params(model.head):  # tied to a weight that may be in another unit
            assert model.head.weight.shape == (131, 97)
            assert not isinstance(model.head.weight, DTensor)
            assert model.head.weight is model.embedding.weight
        with summon_full_params(model.blocks[0].norm), torch.no_grad():  # a submodule of a unit
            model.blocks[0].norm.bias.fill_(4.0)
        assert_same(wholes(model)["blocks.0.norm.bias"], torch.full((97,), 4.0))


def summon_what_is_not_sharded() -> None:
    model = plain()
    with summon_full_params(model):
        assert whole_names(model) == names_of(model.named_parameters())


def test_summon_full_params_accepts_plain_model():
    summon_what_is_not_sharded()


@on_ranks(2)
def test_summon_full_params_finds_units_of_both_apis_below_plain_root():
    model = nn.Sequential(FullyShardedDataParallel(nn.Linear(6, 5)), nn.ReLU(), fully_shard(nn.Linear(5, 4)))
    with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
        model[0].weight.fill_(1.0)
        model[2].weight.fill_(2.0)
    with summon_full_params(model, recurse=False):
        assert len(whole_names(model)) == 0
    with torch.no_grad():
        out = model(torch.ones(1, 6))
    bias = gathered(dict(model.named_parameters()))
    expected = (torch.relu(6 + bias["0._fsdp_wrapped_module.bias"]).sum() * 2).expand(4) + bias["2.bias"]
    torch.testing.assert_close(out[0], expected)


# -- invalid uses and failures ----------------------------------------------------------------------------------------


@on_ranks(2)
def test_exception_in_summon_full_params_keeps_earlier_changes():
    """Earlier changes are kept, and the state is consistent."""
    for way in FEW:
        model, reference = sharded(way), plain()
        optimizer, other = adamw(model), adamw(reference)
        step(model, optimizer), step(reference, other)
        with pytest.raises(Stop), summon_full_params(model), torch.no_grad():
            model.norm.weight.fill_(1.5)
            raise Stop
        with torch.no_grad():
            reference.norm.weight.fill_(1.5)
        assert whole_names(model) == []
        assert_same(step(model, optimizer, 1), step(reference, other, 1), name=str(way))


def uses_of(model: nn.Module) -> list[Callable[[Tensor], Any]]:
    uses: list[Callable[[Tensor], Any]] = [
        lambda _: loss_of(model, same_batch(1)),
        lambda _: model.blocks[0](torch.zeros(1, 2, 97)),
        lambda loss: loss.backward(),
        lambda _: model.to(torch.float64),
        lambda _: model.blocks[0].half(),
    ]
    return uses + ([lambda _: model.unshard()] if hasattr(model, "unshard") else [])


@pytest.mark.slow
@on_ranks(2)
def test_forward_backward_and_casts_raise_in_summon_full_params():
    """The rejected calls have no side effects."""
    for way in ALONE:
        model, reference = sharded(way), plain()
        optimizer, other = adamw(model), adamw(reference)
        assert_same(step(model, optimizer), step(reference, other))
        for use in uses_of(model):
            loss = loss_of(model, same_batch(2))
            with recording() as record, pytest.raises(StateError) as error, summon_full_params(model):
                use(loss)
            assert "was used within summon_full_params" in str(error.value)
            assert record.names() == []
        model.zero_grad()
        assert_same(step(model, optimizer, 1), step(reference, other, 1), name=str(way))


@on_ranks(2)
def test_optimizer_step_in_summon_full_params_with_writeback_raises():
    for front in ("fully_shard", "wrapper"):
        model = sharded((front, "zero3"))
        optimizer = adamw(model)
        loss_of(model, same_batch(0)).backward()
        with (
            pytest.raises(StateError, match=r"were modified within summon_full_params"),
            summon_full_params(model),
        ):
            optimizer.step()
        with summon_full_params(model, writeback=False):
            optimizer.step()  # no writeback overwrites the step
        model, reference = sharded((front, "zero3")), plain()
        with summon_full_params(model, writeback=False):
            pass
        assert_same(step(model, adamw(model)), step(reference, adamw(reference)))


def fail(*_: Any) -> None:
    raise Stop


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
@on_ranks(2)
def test_summon_full_params_works_after_failed_forward_or_backward(phase):
    """After a failed forward or backward, parameters can be summoned, saved and moved immediately."""
    for way in FEW:
        model, reference = sharded(way), plain()
        optimizer, other = adamw(model), adamw(reference)
        for number in range(3):
            assert_same(step(model, optimizer, number), step(reference, other, number))
            hook = fail if phase == "forward" else lambda m, i, out: BrokenBackward.apply(out)
            handle = model.blocks[0].register_forward_hook(hook)
            with pytest.raises(Stop):
                loss_of(model, same_batch(9)).backward()
            handle.remove()
            if number == 0:
                with summon_full_params(model):
                    assert_same(dict(model.named_parameters()), dict(reference.named_parameters()))
            elif number == 1:
                assert_same(wholes(model), dict(reference.state_dict()))
            else:
                model.to(torch.float32)
            optimizer.zero_grad()


@pytest.mark.parametrize("phase", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
@on_ranks(2)
def test_summon_full_params_raises_in_forward_and_backward(phase):
    for front in ("fully_shard", "wrapper"):
        model = sharded((front, "zero3"))
        stated = []

        def summon(*_: Any, model: nn.Module = model, stated: list[str] = stated) -> None:
            with pytest.raises(StateError) as error, summon_full_params(model):
                pass
            stated.append(str(error.value))

        block = model.blocks[0]
        register = block.register_forward_hook if phase == "forward" else block.register_full_backward_hook
        handle = register(summon)
        loss_of(model, same_batch(0)).backward()
        handle.remove()
        assert len(stated) == 1
        assert "summon_full_params within a forward or backward of" in stated[0]
        assert "Call it between steps." in stated[0]


@contextmanager
def nothing_sent() -> Any:
    with recording() as record:
        yield
    assert record.names() == []


@on_ranks(2)
def test_summon_full_params_rejects_bad_options_meta_params_and_shapes():
    model = fully_shard(nn.Linear(6, 5))
    with nothing_sent():
        with pytest.raises(ConfigError, match=r"rank0_only=True, writeback=True.*Pass writeback=False"):
            summon_full_params(model, rank0_only=True).__enter__()
        with torch.device("meta"):
            meta = fully_shard(nn.Linear(6, 5))
        with pytest.raises(StateError, match=r"2 parameters are still on the meta device, such as 'weight'"):
            summon_full_params(meta).__enter__()
    misshapen = pytest.raises(StateError, match=r"weight has the shape \(3, 3\) within summon_full_params")
    with misshapen, summon_full_params(model):
        model.weight = nn.Parameter(torch.zeros(3, 3))
    assert isinstance(model.weight, DTensor)


# -- parameters that are replaced after sharding ----------------------------------------------------------------------


class TwoEnds(nn.Module):
    """An embedding and a head of the same shape, with a layer between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.e, self.body, self.h = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.h(self.body(self.e(tokens)))


ENTRIES: dict[str, Any] = {
    "forward": lambda m: m(torch.tensor([1])),
    "unshard": lambda m: m.unshard(),
    "summon_full_params": lambda m: summon_full_params(m).__enter__(),
    "state_dict": lambda m: m.state_dict(),
    "load_state_dict": lambda m: m.load_state_dict(TwoEnds().state_dict()),
    "stream_weights": lambda m: list(stream_weights(m)),
    "deepcopy": copy.deepcopy,
    "snapshot": lambda m: snapshot(model=m),
    "to": lambda m: m.double(),
    "step": lambda m: stepped(m).step(),
    "get_optimizer_state_dict": lambda m: get_optimizer_state_dict(m, stepped(m)),
}
OPTIMIZERS: dict[nn.Module, torch.optim.Optimizer] = {}


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of `model` that has taken a step before a parameter was replaced or added."""
    return OPTIMIZERS[model]


def sharded_and_stepped() -> TwoEnds:
    model = fully_shard(TwoEnds())
    optimizer = OPTIMIZERS[model] = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    return model


@pytest.mark.slow
@on_ranks(2)
def test_entry_points_raise_if_a_parameter_was_replaced():
    for name, enter in ENTRIES.items():
        for replace in (
            lambda layer: setattr(layer, "weight", nn.Parameter(torch.ones(4, 4))),
            lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.detach().clone())),
            lambda layer: delattr(layer, "weight"),
        ):
            for is_unsharded in (False, True):
                model = sharded_and_stepped()
                if is_unsharded:
                    model.unshard()
                replace(model.body)
                if name in ("unshard", "forward", "step"):
                    model.reshard()  # forward accepts replaced parameters while unsharded, as functional_call needs
                if name == "step" and "weight" not in model.body._parameters:
                    continue  # the step is valid; only uses of the module are invalid
                with pytest.raises(StateError, match=r"body.weight.* was replaced"):
                    enter(model)
                    raise AssertionError(f"{name} took a replaced parameter")


def step_of_another(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()


@on_ranks(2)
def test_saves_and_steps_raise_if_a_parameter_was_added(tmp_path):
    entries = {name: ENTRIES[name] for name in ("state_dict", "stream_weights", "snapshot", "step")} | {
        "get_optimizer_state_dict": ENTRIES["get_optimizer_state_dict"],
        "step of another optimizer": step_of_another,
        "save": lambda m: save(tmp_path, model=m, step=1),
        "async_save": lambda m: async_save(tmp_path, model=m, step=2).wait(),
        "export_safetensors": lambda m: export_safetensors(m, tmp_path / "exported"),
    }
    for name, enter in entries.items():
        for add in (
            lambda model: model.body.register_parameter("extra", nn.Parameter(torch.ones(3))),
            lambda model: model.body.add_module("extra", nn.Linear(4, 4)),
            lambda model: setattr(model, "body", nn.Linear(4, 4)),
        ):
            model = sharded_and_stepped()
            add(model)
            with pytest.raises((StateError, CheckpointError), match=r"body.* was added after fully_shard"):
                enter(model)
                raise AssertionError(f"{name} took an added parameter")
    model = sharded_and_stepped()
    model.body.extra = nn.Parameter(torch.ones(3), requires_grad=False)  # not trained, so allowed
    save(tmp_path, model=model, step=3)
    OPTIMIZERS[model].step()


def train_tied(tie: Any, shard: Any, forwards: int, moves: bool) -> list[Any]:
    model = shard(TwoEnds())
    tokens = torch.tensor([0, 3, 5, 3])
    for _ in range(forwards):
        model(tokens)
    tie(model)
    if moves:
        model.double()
    optimizer, left = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for _ in range(3):
        left.append(take_step(optimizer, model(tokens).square().sum()))
    snapshot(model=model, optimizer=optimizer)
    with summon_full_params(model):
        assert model.e.weight is model.h.weight
        return [*left, {name: param.detach().clone() for name, param in model.named_parameters()}]


@pytest.mark.parametrize(("forwards", "moves"), [(0, False), (2, False), (0, True)])
@pytest.mark.parametrize(("first", "second"), [("e", "h"), ("h", "e")])
@on_ranks(2)
def test_weights_tied_after_sharding_match_plain_pytorch_bitwise(first, second, forwards, moves):
    def tie(model: TwoEnds) -> None:
        getattr(model, first).weight = getattr(model, second).weight

    expected = train_tied(tie, lambda model: model, forwards, moves)
    for units in ([["e", "h"]], [["e"], ["h"]], [["e"]], [["h"]], [["e", "body"], ["h"]], []):
        for strategy in ("zero3", "zero1"):

            def shard(model: TwoEnds, units: Any = units, strategy: str = strategy) -> TwoEnds:
                for names in units:
                    fully_shard([getattr(model, name) for name in names], strategy=strategy)
                return fully_shard(model, strategy=strategy)

            assert_same(train_tied(tie, shard, forwards, moves), expected, name=f"{units}, {strategy}")
