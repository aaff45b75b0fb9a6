"""No race on pretended lanes, and each wait of the engine is needed: without it there is one."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from small_models import Chain, Layer, chain, inputs
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fullshard import CPUOffloadPolicy, MixedPrecisionPolicy, Placement, Placements, clip_grad_norm_, dry, fully_shard
from fullshard.device.accelerator import accelerator_for, pretending_to_capture
from fullshard.optim import Muon
from fullshard.tape.tape import Collective

W, G, S = Placement.WHOLE, Placement.GROUPED, Placement.SHARDED
GROUPED = {
    "hpZ": Placements(parameters=S, parameters_in_step=G, gradients=S, optimizer=S, group=2),
    "hfsdp": Placements(parameters=G, parameters_in_step=G, gradients=G, optimizer=S, group=2),
}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP16 = MixedPrecisionPolicy(param_dtype=torch.float16)
ENCODED = MixedPrecisionPolicy(gather_wire="int8", reduce_wire="int8")


class Checkpointed(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class TwiceUsed(Layer):
    """Gives the gradient of one parameter away: what autograd leaves shares memory with another tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.norm.bias


class Breaking(torch.autograd.Function):
    """Raises in backward, once."""

    armed = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Breaking.armed:
            Breaking.armed = False
            raise KeyError("a planted error")
        return grad


class BreakingLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return Breaking.apply(super().forward(x))


def step(model: Any, optimizer: torch.optim.Optimizer, number: int, *, backwards: int = 1, clip: bool = False) -> None:
    for i in range(backwards):
        model(inputs(number + i)).float().square().mean().backward()
    if clip:
        clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plainly(model: Any) -> None:
    optimizer = sgd(model)
    for number in range(3):
        step(model, optimizer, number, clip=number == 1)
    with torch.no_grad():
        model(inputs())


def accumulating(model: Any) -> None:
    optimizer = sgd(model)
    for number in range(2):
        step(model, optimizer, number, backwards=3)


def without_sync(model: Any) -> None:
    optimizer = sgd(model)
    for number in range(3):
        with model.no_sync():
            model(inputs(number)).float().square().mean().backward()
            model(inputs(number)).float().square().mean().backward()
        step(model, optimizer, number)


def withholding_replicas(model: Any) -> None:
    optimizer = sgd(model)
    for number in range(3):
        model.set_requires_all_reduce(False)
        model(inputs(number)).float().square().mean().backward()
        model(inputs(number)).float().square().mean().backward()
        model.set_requires_all_reduce(True)
        step(model, optimizer, number)


def stepping_in_backward(model: Any) -> None:
    optimizers = {param: torch.optim.SGD([param], lr=0.1, momentum=0.9) for param in model.parameters()}

    def take(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(take)
    for number in range(3):
        model(inputs(number)).float().square().mean().backward()


def failing(model: Any) -> None:
    optimizer = sgd(model)
    for number in range(3):
        Breaking.armed = number == 1
        try:
            step(model, optimizer, number)
        except KeyError:
            optimizer.zero_grad()


def with_muon(model: Any) -> None:
    optimizer = Muon([param for param in model.parameters() if param.ndim == 2])
    for number in range(2):
        step(model, optimizer, number)


def captured(model: Any) -> None:
    optimizer = sgd(model)
    step(model, optimizer, 0)
    with pretending_to_capture():
        step(model, optimizer, 1)
    step(model, optimizer, 2)


def evaluating_and_writing(model: Any) -> None:
    step(model, sgd(model), 0)
    with torch.no_grad():
        model(inputs())
        for param in model.parameters():
            param.to_local().mul_(2)
        model(inputs())


def stepping_beside_compute(model: Any) -> None:
    """The optimizer steps on a lane of the user's, and the next forward waits for its event."""
    optimizer, lanes = sgd(model), accelerator_for(torch.device("cpu")).lanes
    for number in range(3):
        model(inputs(number)).float().square().mean().backward()
        with lanes.offload.after(lanes.compute):
            optimizer.step()
        event = lanes.offload.mark()
        lanes.compute.wait(event)  # before gradients are freed
        optimizer.zero_grad()
        model.set_post_optim_event(event)


Loop = Callable[[Any], None]
Scenario = tuple[Loop, type[Layer], dict[str, Any]]

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp", "hsdp_zero2", "hpZ", "hfsdp")
LOOPS: dict[str, tuple[Loop, type[Layer]]] = {
    "steps": (plainly, Layer),
    "accumulation": (accumulating, Layer),
    "accumulation without sync": (without_sync, Layer),
    "replicas withheld": (withholding_replicas, Layer),
    "hooks": (stepping_in_backward, Layer),
    "checkpointing": (plainly, Checkpointed),
    "shared gradients": (plainly, TwiceUsed),
    "failing backward": (failing, BreakingLayer),
    "Muon": (with_muon, Layer),
    "capture": (captured, Layer),
    "optimizer on another stream": (stepping_beside_compute, Layer),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "bf16": {"mp_policy": BF16},
    "fp16": {"mp_policy": FP16},
    "encoded": {"mp_policy": ENCODED},
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "offload bf16": {"mp_policy": BF16, "offload_policy": CPUOffloadPolicy()},
}
COMMON_LOOPS = ("steps", "accumulation", "replicas withheld", "failing backward")
COMMON_OPTIONS = ("", "bf16", "offload")


def scenarios() -> Iterator[tuple[str, str, str]]:
    for strategy in STRATEGIES:
        for loop in LOOPS:
            for option in OPTIONS:
                if not (loop == "Muon" and "offload" in option):
                    yield strategy, loop, option
        yield strategy, "evaluation and writing", "offload"


LOOPS["evaluation and writing"] = (evaluating_and_writing, Layer)


def tape_of(strategy: str, loop: str, option: str, without: frozenset[str] = frozenset()) -> dry.Tape:
    run, layer = LOOPS[loop]
    with dry.world(8):
        mesh = {"mesh": init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))}
        with dry.taped(without=without) as tape:
            options = {"strategy": GROUPED.get(strategy, strategy), **OPTIONS[option]}
            shard = partial(fully_shard, **options, **(mesh if "hsdp" in strategy else {}))
            run(chain(shard, Chain([layer(48) for _ in range(3)])))
    return tape


def marked(scenario: tuple[str, str, str]) -> Any:
    strategy, loop, option = scenario
    is_common = loop in COMMON_LOOPS and option in COMMON_OPTIONS
    return pytest.param(*scenario, marks=[] if is_common else pytest.mark.slow, id="-".join(filter(None, scenario)))


@pytest.mark.parametrize(("strategy", "loop", "option"), [marked(scenario) for scenario in scenarios()])
def test_no_lane_touches_what_another_still_uses(strategy, loop, option):
    tape = tape_of(strategy, loop, option)
    assert not dry.races(tape)
    assert {entry.lane for entry in tape.of(Collective)} - {"compute"}
