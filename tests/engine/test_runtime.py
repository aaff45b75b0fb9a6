"""A model may do anything between forward and backward. The results are those of unsharded training.

Each scenario runs on a plain model and on sharded models. The results must be bitwise equal.
"""

import random
import weakref
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from shared_ranks import on_ranks, run_ranks
from small_models import (
    ONE_AXIS,
    BrokenBackward,
    Chain,
    Layer,
    Shard,
    Stop,
    agree_with_plain,
    chain,
    initialize,
    inputs,
    learn,
    leave,
    memory_is_shared,
    most_whole,
    poison_freed,
    sgd,
    under_strategies,
    whole,
    whole_grads,
    wholes,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Split

from fullshard import (
    MixedPrecisionPolicy,
    RankMismatchError,
    StateError,
    fully_shard,
    recording,
    register_fsdp_forward_method,
    stream_weights,
    summon_full_params,
)
from fullshard.device.accelerator import pretending_to_capture
from fullshard.engine.hooks import runtime_of
from fullshard.engine.registry import units_in
from fullshard.engine.residency import INACTIVE
from fullshard.tape.recorder import Phase
from fullshard.testing import assert_same

STEPS = 4  # units share memory from the third step on


# -- exceptions -------------------------------------------------------------------------------------------------------


class Fragile(Layer):
    """Fails on request."""

    fails = ""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.fails == "forward":
            raise Stop
        return BrokenBackward.apply(x) if self.fails == "backward" else x


def fail_in_between(phase: str, shard: Shard) -> list[Any]:
    """Fail once in each step and then repeat it. The plain model never fails."""
    model = chain(shard, Chain([Layer(), Fragile(), Layer(), Fragile(), Layer()]))
    optimizer = sgd(model)
    left = []
    for step in range(STEPS):
        for fragile in (model.layers[1], model.layers[3]) if shard is not leave else ():
            fragile.fails = phase
            with pytest.raises(Stop):
                model(inputs(50)).sum().backward()
            fragile.fails = ""
            optimizer.zero_grad()
        loss = model(inputs(step)).square().mean()
        loss.backward()
        left += [loss.detach(), whole_grads(model)]
        optimizer.step()
        optimizer.zero_grad()
    return [*left, wholes(model)]


@pytest.mark.parametrize("phase", ["forward", "backward"])
@under_strategies
def test_failed_step_does_not_change_later_results(phase, strategies):
    run_ranks(2, agree_with_plain, partial(fail_in_between, phase), *strategies)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@on_ranks(2)
def test_forward_after_failure_leaves_all_units_inactive(phase):
    for strategy in ("zero2", "zero3"):
        model = chain(partial(fully_shard, strategy=strategy), Chain([Layer(), Fragile(), Layer()]))
        model.layers[1].fails = phase
        with pytest.raises(Stop):
            model(inputs()).sum().backward()
        model.layers[1].fails = ""
        with torch.no_grad():
            model(inputs())
        assert all(unit.residency.state in INACTIVE for unit in units_in(model))
        assert runtime_of(model).phase is Phase.IDLE


# -- unusual orders of forward and backward ---------------------------------------------------------------------------


def several_forwards_one_backward(shard: Shard) -> list[Any]:
    return learn(chain(shard), loss_of=lambda m, s: m(inputs(s)).sum() * m(inputs(s + 10)).square().mean())


def several_forwards_backwards_reversed(shard: Shard) -> list[Any]:
    model = chain(shard)
    left = []
    for step in range(STEPS):
        losses = [model(inputs(step + i)).square().mean() for i in range(3)]
        for loss in (losses[1], losses[0], losses[2]):
            loss.backward()
        left.append(whole_grads(model))
        model.zero_grad()
    return left


def the_same_graph_twice(shard: Shard) -> list[Any]:
    model = chain(shard)
    left = []
    for step in range(STEPS):
        loss = model(inputs(step)).square().mean()
        loss.backward(retain_graph=True)
        left.append(whole_grads(model))
        loss.backward()
        left.append(whole_grads(model))
        model.zero_grad()
    return left


class Peeking(Chain):
    """Also returns the hidden state after every layer."""

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        visited = []
        for layer in self.layers:
            x = layer(x)
            visited.append(x)
        return self.head(x), visited


def backward_through_a_part(shard: Shard) -> list[Any]:
    model = chain(shard, Peeking())
    left = []
    for step in range(STEPS):
        _, visited = model(inputs(step))
        visited[1].square().mean().backward()  # the last layers and the head get no gradient
        left.append(whole_grads(model))
        model.zero_grad()
        _, visited = model(inputs(step))
        visited[2].sum().backward(retain_graph=True)
        visited[3].sum().backward()
        left.append(whole_grads(model))
        model.zero_grad()
    return left


def gradients_of_inputs_only(shard: Shard) -> list[Any]:
    model = chain(shard)
    left = []
    for step in range(STEPS):
        x = inputs(step).requires_grad_()
        left += torch.autograd.grad(model(x).square().mean(), [x])
        model(x).mean().backward()
        left += [x.grad.clone(), whole_grads(model)]
        model.zero_grad()
    return left


def gradients_of_inputs_of_a_layer(shard: Shard) -> list[Any]:
    model = chain(shard, Peeking())
    left = []
    for step in range(STEPS):
        out, visited = model(inputs(step))
        left += torch.autograd.grad(out.sum(), [visited[1]], retain_graph=True)
        out.square().mean().backward()
        left.append(whole_grads(model))
        model.zero_grad()
    return left


class Repeating(Chain):
    """Uses each layer twice, and the first a third time."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *self.layers, self.layers[0]):
            x = layer(x)
        return self.head(x)


def a_module_called_twice(shard: Shard) -> list[Any]:
    return learn(chain(shard, Repeating()))


class Choosing(Chain):
    """Skips different layers in every step and never uses its spare layer."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(48, 48)
        self.left_out = 0

    def forward(self, x: Tensor) -> Tensor:
        self.left_out += 1
        for i, layer in enumerate(self.layers):
            if (i + self.left_out) % 3:
                x = layer(x)
        return self.head(x)


def unused_parameters(shard: Shard) -> list[Any]:
    return learn(chain(shard, Choosing()), steps=6)


def evaluation_between_steps(shard: Shard) -> list[Any]:
    model = chain(shard)
    optimizer, left = sgd(model), []
    for step in range(STEPS):
        model.eval()
        with torch.no_grad():
            left.append(model(inputs(20)))
        with torch.inference_mode():
            left.append(model(inputs(21)).clone())
        model.train()
        loss = model(inputs(step)).square().mean()
        with torch.inference_mode():  # between forward and backward
            left.append(model(inputs(22)).clone())
        loss.backward()
        left.append(model(inputs(23)).detach())  # gradients were asked for, but never taken
        optimizer.step()
        optimizer.zero_grad()
        left.append(model(inputs(24)).detach())
    return [*left, wholes(model)]


def evaluation_before_any_step(shard: Shard) -> list[Any]:
    model = chain(shard)
    with torch.inference_mode():
        first = model(inputs(20)).clone()
    return [first, *learn(model)]


def a_forward_without_backward(shard: Shard) -> list[Any]:
    model = chain(shard)
    left = []
    for step in range(STEPS):
        left.append(model(inputs(step)).detach())
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.25)
        left.append(model(inputs(step)).detach())  # must see the new values
        left += learn(model, steps=1)
    return left


def a_layer_alone(shard: Shard) -> list[Any]:
    """Call the forward of a unit outside of the forward of its root."""
    model = chain(shard)
    left = learn(model, steps=2)
    left += learn(model, steps=3, loss_of=lambda m, s: m.layers[1](m.layers[2](inputs(s))).square().mean())
    return left + learn(model, steps=2)


def a_hold_on_the_graph(shard: Shard) -> list[Any]:
    """Keep a graph for several steps before its backward."""
    model = chain(shard)
    kept = model(inputs(30)).square().mean()
    left = learn_without_writing(model)
    kept.backward()
    return [*left, whole_grads(model)]


def learn_without_writing(model: nn.Module) -> list[Any]:
    left = []
    for step in range(STEPS):
        model(inputs(step)).square().mean().backward()
        left.append(whole_grads(model))
        model.zero_grad()
    return left


@pytest.mark.parametrize(
    "scenario",
    [
        several_forwards_one_backward,
        several_forwards_backwards_reversed,
        the_same_graph_twice,
        backward_through_a_part,
        gradients_of_inputs_only,
        gradients_of_inputs_of_a_layer,
        a_module_called_twice,
        unused_parameters,
        evaluation_between_steps,
        evaluation_before_any_step,
        a_forward_without_backward,
        a_layer_alone,
        a_hold_on_the_graph,
    ],
)
@under_strategies
def test_any_order_of_forward_and_backward_matches_plain_bitwise(scenario, strategies):
    run_ranks(2, agree_with_plain, scenario, *strategies)


# -- inputs and outputs of modules ------------------------------------------------------------------------------------


Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Bag:
    x: Tensor
    note: str
    more: list[Tensor]


class Giving(Layer):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, *, x: Tensor, note: str = "") -> Any:
        x = super().forward(x)
        forms = {
            "dict": {"x": x, "note": note},
            "dataclass": Bag(x, note, [x * 2]),
            "namedtuple": Pair(x, note),
            "list": [[x], note],
        }
        return forms.get(self.form)


class Taking(Chain):
    """Layers return outputs of different types; one returns None."""

    def __init__(self) -> None:
        super().__init__([Giving(form) for form in ("dict", "dataclass", "namedtuple", "list", "none")])

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x=x, note="a")["x"]
        bag = self.layers[1](x=x, note="b")
        assert isinstance(bag, Bag)
        assert bag.note == "b"
        pair = self.layers[2](x=bag.x + bag.more[0], note="c")
        assert isinstance(pair, Pair)
        assert pair.second == "c"
        [[x], _] = self.layers[3](x=pair.first)
        assert self.layers[4](x=x) is None
        return self.head(x)


def outputs_of_every_form(shard: Shard) -> list[Any]:
    return learn(chain(shard, Taking()))


class Reusing(Layer):
    """Writes to its input, as `nn.ReLU(inplace=True)` does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5).sub_(0.5))


class AddingInPlace(Layer):
    """Writes its result to its input tensor and returns that tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(super().forward(x.clone()))


class ReusingChain(Chain):
    def __init__(self) -> None:
        super().__init__([Layer(), Reusing(), Layer(), AddingInPlace(), Reusing()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        y = x * 1.5
        z = self.layers[1](y)
        z = self.layers[2](z + y.detach())  # y was changed by the layer, as in a plain model
        return self.head(self.layers[4](self.layers[3](z * 1) * 1))


def inputs_that_are_written_to(shard: Shard) -> list[Any]:
    return learn(chain(shard, ReusingChain()))


class Passing(Layer):
    """Returns its unchanged input together with a result."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, super().forward(x)


class PassingChain(Chain):
    def __init__(self) -> None:
        super().__init__([Passing(), Passing(), Passing()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            before, after = layer(x)
            x = before * 0.5 + after
        return self.head(x)


def inputs_that_are_passed_on(shard: Shard) -> list[Any]:
    return learn(chain(shard, PassingChain()))


class Attending(Layer):
    """Uses a second input, which others use too, several times."""

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return super().forward(x) + self.norm(memory) * memory.tanh() + self.down(self.up(memory).sigmoid())


class AttendingChain(Chain):
    def __init__(self) -> None:
        super().__init__([Layer(), *(Attending() for _ in range(4))])

    def forward(self, x: Tensor) -> Tensor:
        memory, x = self.layers[0](x), x * 1
        for layer in self.layers[1:]:
            x = layer(x, memory)
        return self.head(x + memory)


def an_input_of_several_units(leaf: bool, shard: Shard) -> list[Any]:
    """The gradient of the input has many terms, whose sum depends on their order."""
    return learn(chain(shard, AttendingChain()), loss_of=lambda m, s: m(inputs(s).requires_grad_(leaf)).square().mean())


class Viewing(Layer):
    """Uses views of its weights, which autograd saves."""

    def forward(self, x: Tensor) -> Tensor:
        up = self.up.weight.view(-1)[: 96 * 48].view(96, 48)
        down = self.down.weight.t()[:96]
        return x + F.gelu(self.norm(x) @ up.t()) @ down


def views_of_weights(shard: Shard) -> list[Any]:
    return learn(chain(shard, Chain([Viewing() for _ in range(4)])))


def hooks_of_users(shard: Shard) -> list[Any]:
    model = chain(shard)
    visited: list[Any] = []
    for layer in model.layers:
        layer.register_full_backward_hook(lambda _, given, got: visited.extend([given[0].clone(), got[0].clone()]))
        layer.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))
        layer.register_forward_hook(lambda _, args, out: out + args[0])
    return [*learn(model, loss_of=lambda m, s: m(inputs(s).requires_grad_()).square().mean()), *visited]


@pytest.mark.parametrize(
    "scenario",
    [
        outputs_of_every_form,
        inputs_that_are_written_to,
        inputs_that_are_passed_on,
        partial(an_input_of_several_units, False),
        partial(an_input_of_several_units, True),
        views_of_weights,
        hooks_of_users,
    ],
)
@under_strategies
def test_any_module_inputs_outputs_and_hooks_match_plain_bitwise(scenario, strategies):
    run_ranks(2, agree_with_plain, scenario, *strategies)


# -- frozen, unfrozen, nested -----------------------------------------------------------------------------------------


def unfreezing_in_mid_run(shard: Shard) -> list[Any]:
    model = Chain()
    model.layers[1].up.weight.requires_grad_(False)
    model.layers[2].requires_grad_(False)
    model = chain(shard, model)
    left = learn(model, steps=3)
    model.layers[1].up.weight.requires_grad_(True)
    model.layers[2].requires_grad_(True)
    left += learn(model, steps=3)
    model.layers[0].requires_grad_(False)
    return left + learn(model, steps=3)


def trained_or_frozen_while_unsharded(shard: Shard) -> list[Any]:
    """Parameters keep the `requires_grad` that they are given while modules show them unsharded."""
    choose = random.Random(5)
    layers = [Layer(), Fragile(), Layer(), Fragile()]
    model = chain(shard, Chain(layers))
    optimizer, left = sgd(model), []

    def switch(module: nn.Module) -> None:
        for name, _ in [*module.named_parameters()]:
            module.get_parameter(name).requires_grad_(choose.random() < 0.5)

    for step in range(12):
        switched = choose.choice(layers)
        way = ("unshard", "unshard all", "failed backward", "forward")[step % 4]
        handle = None
        if way.startswith("unshard"):
            for module in layers if way == "unshard all" else [switched]:
                if shard is not leave:
                    module.unshard()
                switch(module)
                if shard is not leave and step % 8 < 4:
                    module.reshard()
        elif way == "failed backward":
            layers[1].fails = "backward"
            with pytest.raises(Stop):
                model(inputs(50)).sum().backward()
            layers[1].fails = ""
            optimizer.zero_grad()
            switch(model)
        else:
            handle = switched.up.register_forward_pre_hook(lambda module, args: switch(module))
        model.head.weight.requires_grad_(True)  # something is trained
        loss = model(inputs(step)).square().mean()
        loss.backward()
        left.append(loss.detach())
        if handle is not None:
            handle.remove()
        left.append(whole_grads(model))
        optimizer.step()
        optimizer.zero_grad()
        left.append(torch.tensor([param.requires_grad for param in model.parameters()]))
    return [*left, wholes(model)]


def units_without_anything_to_train(shard: Shard) -> list[Any]:
    """Freeze a first unit, whose backward has no end signal, and a middle unit, which passes gradients on."""
    model = Chain()
    model.layers[0].requires_grad_(False)
    model.layers[2].requires_grad_(False)
    return learn(chain(shard, model))


class Nest(nn.Module):
    """A layer with nested layers, and its own weights, used before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.mix = nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x)
        for layer in self.layers:
            x = layer(x)
        return self.mix(x)


def units_in_units(shard: Shard) -> list[Any]:
    model = Chain([Nest(), Layer(), Nest()])
    initialize(model)
    for nest in (model.layers[0], model.layers[2]):
        for layer in nest.layers:
            shard(layer)
        shard(nest)
    shard(model.layers[1])
    return learn(shard(model), steps=5)


def one_unit_for_all(shard: Shard) -> list[Any]:
    torch.manual_seed(0)
    return learn(shard(Chain()))


def several_modules_in_a_unit(shard: Shard) -> list[Any]:
    torch.manual_seed(0)
    model = Chain()
    if shard is not leave:
        shard([model.layers[0], model.layers[1]])
        shard([model.layers[2], model.layers[3], model.head])
    return learn(shard(model))


def reshard_after_forward(choice: bool, shard: Shard) -> list[Any]:
    return learn(chain(partial(shard, reshard_after_forward=choice)))


def whole_after_backward(shard: Shard) -> list[Any]:
    """Units that stay unsharded after backward must still use the values that the optimizer writes."""
    model = chain(shard)
    if shard is not leave:
        model.set_reshard_after_backward(False)
    left = learn(model)
    if shard is not leave:
        model.set_reshard_after_backward(True)
    return left + learn(model)


def one_unit_whole_after_backward(shard: Shard) -> list[Any]:
    torch.manual_seed(0)
    model = shard(Chain(), reshard_after_forward=True)
    if shard is not leave:
        model.set_reshard_after_backward(False)
    return learn(model)


@pytest.mark.parametrize(
    "scenario",
    [
        unfreezing_in_mid_run,
        trained_or_frozen_while_unsharded,
        units_without_anything_to_train,
        units_in_units,
        one_unit_for_all,
        several_modules_in_a_unit,
        partial(reshard_after_forward, True),
        partial(reshard_after_forward, False),
        whole_after_backward,
        one_unit_whole_after_backward,
    ],
)
@under_strategies
def test_any_choice_of_units_matches_plain_bitwise(scenario, strategies):
    run_ranks(2, agree_with_plain, scenario, *strategies)


# -- writing to parameters by other ways than an optimizer ------------------------------------------------------------


def write_by_no_grad(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.mul_(1.1).add_(0.01)


def write_by_data(param: nn.Parameter) -> None:
    param.data.mul_(1.1).add_(0.01)


def write_by_detach(param: nn.Parameter) -> None:
    param.detach().mul_(1.1).add_(0.01)


def write_by_foreach(param: nn.Parameter) -> None:
    with torch.no_grad():
        torch._foreach_mul_([param], 1.1)


def write_by_local_tensor(param: nn.Parameter) -> None:
    with torch.no_grad():
        (param.to_local() if isinstance(param, DTensor) else param).mul_(1.1)


def written_between_steps(write: Callable[[nn.Parameter], None], shard: Shard) -> list[Any]:
    model = chain(shard)
    left = []
    for _ in range(3):
        left += learn(model, steps=1)
        for param in model.parameters():
            write(param)
        with torch.no_grad():
            left.append(model(inputs(40)))
    return left


@pytest.mark.parametrize(
    "write",
    [
        write_by_no_grad,
        write_by_local_tensor,
        *(pytest.param(item, marks=pytest.mark.slow) for item in (write_by_data, write_by_detach, write_by_foreach)),
    ],
)
@under_strategies
def test_next_forward_uses_values_written_to_parameters(write, strategies):
    """By any method, and also if unsharded parameters are kept between steps."""
    run_ranks(2, agree_with_plain, partial(written_between_steps, write), *strategies)


def after_a_capture(shard: Shard) -> list[Any]:
    """Write to shards without notification, as a replayed CUDA graph does."""
    model = chain(shard)
    left = learn(model, steps=1)
    with pretending_to_capture():
        left += learn(model, steps=1)
    for _ in range(3):
        for param in model.parameters():
            local = (param.to_local() if isinstance(param, DTensor) else param).detach().numpy()
            local *= 1.1
        with torch.no_grad():
            left.append(model(inputs(40)))
    return left


@under_strategies
def test_forward_uses_values_written_by_replayed_cuda_graph(strategies):
    run_ranks(2, agree_with_plain, after_a_capture, *strategies)


@pytest.mark.parametrize("options", [{"strategy": "zero1"}, {"reshard_after_forward": False}], ids=str)
@on_ranks(2)
def test_captured_forward_gathers_all_units(options):
    model = chain(partial(fully_shard, **options))
    learn(model, steps=2)
    with torch.no_grad():
        model(inputs(40))
    with pretending_to_capture(), recording() as record:
        model(inputs(40))
    units = [event.origin.unit for event in record.collectives("all_gather")]
    assert units == ["", "layers.0", "layers.1", "layers.2", "layers.3"]


@on_ranks(2)
def test_gradient_buffers_of_captured_backward_stay_allocated():
    model = chain(fully_shard)
    learn(model, steps=1)
    with pretending_to_capture():
        model(inputs()).square().mean().backward()
    written = [weakref.ref(part.gradients.flat) for unit in units_in(model) for part in unit.param_groups]
    kept = [param.grad for param in model.parameters()]
    model.zero_grad()
    model(inputs()).square().mean().backward()  # has new memory
    del kept
    there = [tensor() is not None for tensor in written]
    assert all(there)


# -- methods of units -------------------------------------------------------------------------------------------------


class Generating(Chain):
    def generate(self, x: Tensor, times: int) -> Tensor:
        for _ in range(times):
            for layer in self.layers:
                x = layer(x)
        return self.head(x)


def a_method_alongside_forward(shard: Shard) -> list[Any]:
    model = chain(shard, Generating())
    register_fsdp_forward_method(model, "generate")
    with torch.no_grad():
        first = model.generate(inputs(), times=2)
    return [first, *learn(model, loss_of=lambda m, s: m.generate(inputs(s), times=2).square().mean())]


def whole_by_hand(shard: Shard) -> list[Any]:
    """Between `unshard` and `reshard`, weights are plain tensors of the whole shape: of as many units as one likes."""
    model = chain(shard)
    left = learn(model, steps=3)
    layer = model.layers[1]
    if shard is not leave:
        for each in model.layers:  # units that take turns on memory
            each.unshard()
    assert {type(each.up.weight) for each in model.layers} == {nn.Parameter}
    left += [each.up.weight.detach().clone() for each in model.layers]
    if shard is not leave:
        for each in model.layers:
            each.reshard()
        assert isinstance(layer.up.weight, DTensor)
        handle = layer.unshard(async_op=True)
        handle.wait()
        assert not isinstance(layer.up.weight, DTensor)
        layer.reshard()
    left += learn(model, steps=2)
    if shard is not leave:
        assert isinstance(layer.up.weight, DTensor)
    return left


def second_module_of_a_unit_first(shard: Shard) -> list[Any]:
    """`unshard` of another module than the first of a unit, before any forward."""
    model = chain(lambda module: module)
    layers = list(model.layers)
    if shard is leave:
        return learn(model)
    shard(layers[:2])
    for layer in layers[2:]:
        shard(layer)
    shard(model)
    layers[1].unshard()
    assert {type(layer.up.weight) for layer in layers[:2]} == {nn.Parameter}
    return learn(model)


@pytest.mark.parametrize("scenario", [a_method_alongside_forward, whole_by_hand, second_module_of_a_unit_first])
@under_strategies
def test_manual_unshard_and_forward_methods_match_plain_bitwise(scenario, strategies):
    run_ranks(2, agree_with_plain, scenario, *strategies)


@on_ranks(2)
def test_explicit_prefetch_order_is_used_from_first_step():
    """Without one, a first forward prefetches nothing; the recorded order of a first backward is forward's reversed."""
    forward = ["", "layers.0", "layers.1", "layers.2", "layers.3"]
    model = chain(fully_shard)
    first, second, third, fourth = model.layers
    first.set_modules_to_forward_prefetch([second, third, fourth])
    fourth.set_modules_to_backward_prefetch([second, third])
    expected = learn(chain(fully_shard))
    with recording() as record:
        assert_same(learn(model, steps=1), learn(chain(fully_shard), steps=1))
    learned = learn(chain(fully_shard))
    assert_same(learned, expected)
    order = [event.origin.unit for event in record.collectives("all_gather")][: 5 + 4]
    assert order == [*forward, "layers.3", "layers.1", "layers.2", "layers.0"]


# -- number of unsharded units ----------------------------------------------------------------------------------------


class Branches(Chain):
    """Parallel layers on one input."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.head.weight.sum()
        return self.head(sum(layer(x) for layer in self.layers))


class Starts(Chain):
    """Parallel layers on an input without gradient, so that each layer starts a graph."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(sum(layer(x) for layer in self.layers))


@on_ranks(2)
def test_at_most_two_units_are_unsharded_at_once():
    """Even if the end of a unit's backward is only detected in the next unit's backward."""
    counts = []
    for model in (Chain(), Branches(), Starts()):
        model = chain(fully_shard, model)
        for step in range(STEPS):
            with recording() as record:
                model(inputs(step)).square().mean().backward()
        counts.append(most_whole(record))
    assert counts == [2, 2, 2]


# -- what is left after a step ----------------------------------------------------------------------------------------


@on_ranks(2)
def test_all_units_are_resharded_after_every_step():
    for strategy in ONE_AXIS:
        model = chain(partial(fully_shard, strategy=strategy))
        optimizer = sgd(model)
        for step in range(STEPS):
            model(inputs(step)).square().mean().backward()
            assert all(isinstance(param.grad, DTensor) for param in model.parameters())
            optimizer.step()
            assert all(isinstance(param, DTensor) for param in model.parameters())
            cut = [param.placements[-1].is_shard() for param in model.parameters()]
            assert set(cut) == {strategy != "ddp"}
            assert all(unit.residency.state in INACTIVE for unit in units_in(model))
            assert all(unit.slot.occupant is None for unit in units_in(model) if not unit.keeps_unsharded)
            assert all(unit.residency.users == 0 for unit in units_in(model))
            assert all(param.unsharded.grad is None for unit in units_in(model) for param in unit.params)
            optimizer.zero_grad()
            assert all(param.grad is None for param in model.parameters())
        assert memory_is_shared(model) == (strategy == "zero3")


@on_ranks(2)
def test_backward_reads_no_freed_memory():
    """Views that autograd saved are valid, because the same storage is refilled before they are read."""
    expected = learn(chain(fully_shard), steps=1)
    for warm in (0, 3):  # separate memory, then shared
        model = chain(fully_shard)
        for step in range(warm):
            model(inputs(step)).square().mean().backward()
            model.zero_grad()
        loss = model(inputs(0)).square().mean()
        poison_freed(model)
        loss.backward()
        assert_same([loss.detach(), whole_grads(model)], expected[:2])


class Lending(nn.Module):
    """Its weight's gradient is a view of what autograd hands on, round the layers, to the module before."""

    def __init__(self, shard: Shard) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(128 * 128))
        self.layers = nn.Sequential(*(shard(nn.Linear(128, 128)) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) + self.weight.view(128, 128)


@on_ranks(2)
def test_reduction_does_not_overwrite_gradients_still_read_by_autograd():
    found = []
    for strategy in ("zero3", "ddp"):
        shard = partial(fully_shard, strategy=strategy)
        torch.manual_seed(0)
        model = shard(nn.Sequential(nn.Linear(128, 128), shard(Lending(shard)), nn.Linear(128, 128)))
        torch.manual_seed(dist.get_rank())  # with equal gradients on all ranks, the mean would change nothing
        model(torch.randn(128, 128)).square().mean().backward()
        found.append(whole_grads(model))
    assert_same(found[1], found[0])


# -- ranks that differ ------------------------------------------------------------------------------------------------


def build_differently(difference: str) -> nn.Module:
    odd = dist.get_rank() == 1
    layers = [Layer() for _ in range(4 if odd and difference == "units" else 3)]
    if odd and difference == "shape":
        layers[1].up, layers[1].down = nn.Linear(48, 200), nn.Linear(200, 48)
    if odd and difference == "frozen":
        layers[2].norm.bias.requires_grad_(False)
    if odd and difference == "dtype":
        layers[2].double()
    by_columns = odd and difference == "placement"
    model = chain(partial(fully_shard, shard_placement_fn=lambda param: Split(param.ndim - 1) if by_columns else None))
    model = model if difference == "placement" else chain(fully_shard, Chain(layers))
    if odd and difference == "divisor":
        model.layers[1].set_gradient_divide_factor(2.0)
    return model


def errors_of_different_models(difference: str) -> list[str]:
    """Return the messages of operations that are the first ones of a model."""
    found = []
    operations: list[Callable[[Any], Any]] = [
        lambda model: model(inputs()),
        lambda model: summon_full_params(model).__enter__(),
        lambda model: list(stream_weights(model)),
    ]
    for first in operations:
        model = build_differently(difference)
        with pytest.raises(RankMismatchError) as error:
            first(model)
        found.append(str(error.value))
    return found


@pytest.mark.parametrize(
    ("difference", "stated"),
    [
        ("units", "layers.3"),
        ("shape", "up.weight (200, 48)"),
        ("frozen", "norm.bias (48,) stored float32, computed and gathered float32, reduced float32, frozen"),
        ("dtype", "stored float64"),
        ("placement", "placed (Shard(dim=1),)"),
        ("divisor", "layers.1, gradients divided by 2"),
    ],
)
def test_ranks_with_different_models_raise_the_same_error(difference, stated):
    """No hang: every rank gets the name of the first differing unit, and the difference."""
    messages = run_ranks(3, errors_of_different_models, difference)
    assert messages[0] == messages[1] == messages[2]
    for message in messages[0]:
        assert "rank 0" in message
        assert "rank 1" in message
    assert stated in messages[0][0]  # units have no names before the first forward


@on_ranks(1)
def test_set_modules_to_forward_prefetch_rejects_plain_modules():
    model = chain(fully_shard)
    with pytest.raises(StateError, match=r"Linear is not a unit\. Call fully_shard"):
        model.set_modules_to_forward_prefetch([model.head])


@on_ranks(2)
def test_full_tensor_of_parameters_returns_full_values():
    """What `full_tensor()` gives is what this file's quicker way of gathering gives."""
    model = chain(fully_shard)
    learn(model)
    for name, value in wholes(model).items():
        assert_same(whole(dict(model.named_parameters())[name]), value)


# -- odd parameters and odd beginnings --------------------------------------------------------------------------------


class Fused(torch.autograd.Function):
    """Writes its weight's gradient itself, as kernels that accumulate do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.weight.grad = grad.T @ x
        return grad @ ctx.weight.detach(), None


class FusedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(48, 48))

    def forward(self, x: Tensor) -> Tensor:
        return x + Fused.apply(x, self.weight)


def gradients_without_a_sign(shard: Shard) -> list[Any]:
    return learn(chain(shard, Chain([FusedLayer() for _ in range(3)])))


class Empty(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.nothing.sum()


class OnlyEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.nothing.sum()


def parameters_without_elements(shard: Shard) -> list[Any]:
    return learn(chain(shard, Chain([Empty(), OnlyEmpty(), Layer()])))


@under_strategies
@pytest.mark.parametrize("scenario", [gradients_without_a_sign, parameters_without_elements])
def test_unusual_parameters_match_plain_bitwise(scenario, strategies):
    run_ranks(2, agree_with_plain, scenario, *strategies)


@on_ranks(2)
def test_inference_mode_before_training_does_not_change_results():
    """Evaluate in low precision, so that scratch memory is first allocated there."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    left = []
    for evaluates in (False, True):
        model = chain(partial(fully_shard, mp_policy=policy))
        if evaluates:
            with torch.inference_mode():
                model(inputs())
        left.append(learn(model))
    assert_same(left[1], left[0])
