"""There is no race on simulated streams, and each wait of the engine is needed: removing it causes a race."""

import ast
import copy
import gc
import itertools
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from small_models import Chain, Layer, chain, covering_pairs, inputs
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import CPUOffloadPolicy, MixedPrecisionPolicy, Placement, Placements, clip_grad_norm_, dry, fully_shard
from fullshard.checkpoint.contents import collect
from fullshard.checkpoint.snapshot import snapshot
from fullshard.checkpoint.staging import HostMemory
from fullshard.device.accelerator import accelerator_for, pretending_to_capture
from fullshard.disk.files import aligned_buffer
from fullshard.disk.interface import ALIGNMENT, BUFFERS
from fullshard.disk.space import Extent, Scratch
from fullshard.dry.races import find_races
from fullshard.dry.streams import LAG, OF_TORCH
from fullshard.engine import activations, offloaded
from fullshard.engine.hooks import runtime_of
from fullshard.engine.offloaded import Store
from fullshard.optim import Muon
from fullshard.policy.offload import Offload
from fullshard.state.summon import summon_full_params
from fullshard.tape.recorder import Origin, Phase
from fullshard.tape.tape import Access, Allocation, Collective, Free, Operation, Recorded, Waited

W, G, S = Placement.WHOLE, Placement.GROUPED, Placement.SHARDED
GROUPED = {
    "hpZ": Placements(parameters=S, parameters_in_step=G, gradients=S, optimizer=S, group=2),
    "hfsdp": Placements(parameters=G, parameters_in_step=G, gradients=G, optimizer=S, group=2),
}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP16 = MixedPrecisionPolicy(param_dtype=torch.float16)
ENCODED = MixedPrecisionPolicy(gather_wire="int8", reduce_wire="int8")
ALL = Offload(optimizer={"cpu": 1}, parameters={"cpu": 0.3})


class Checkpointed(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class TwiceUsed(Layer):
    """A layer where the gradient that autograd leaves for one parameter shares memory with another tensor."""

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


def finalizing_by_hand(model: Any) -> None:
    """Run a stage of a pipeline: two visits, with microbatches between forward and backward."""
    optimizer = torch.optim.AdamW(model.parameters())
    model.set_manual_backward_finalization(True)
    for _ in range(2):
        losses = [model(inputs()).sum() for _ in range(2)]
        for module in model.modules():
            if isinstance(module, fullshard.FSDPModule):
                module.reshard()
        for module in model.modules():
            if isinstance(module, fullshard.FSDPModule):
                module.unshard(async_op=True)
        for loss in losses:
            loss.backward()
        model.finalize_backward()
        optimizer.step()
        optimizer.zero_grad()


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


def stepping_in_backward(model: Any, take: Callable[[Tensor], None] | None = None) -> None:
    optimizers = {param: torch.optim.AdamW([param], fused=True) for param in model.parameters()}

    def step(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(take or step)
    for number in range(3):
        model(inputs(number)).float().square().mean().backward()


def stepping_between_uses(model: Any, take: Callable[[Tensor], None] | None = None) -> None:
    """Use a layer twice under reentrant checkpoints: its gradients are ready, and stepped with, use by use."""

    def forward(x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for i in (0, 1, 0, 2):
            x = checkpoint(model.layers[i], x, use_reentrant=True)
        return model.head(x)

    model.forward = forward
    stepping_in_backward(model, take)


def updating_data_between_uses(model: Any) -> None:
    """The same without an optimizer: no version counter shows that shards were written to."""

    def take(param: Tensor) -> None:
        param.data.add_(param.grad, alpha=-0.1)
        param.grad = None

    stepping_between_uses(model, take)


def dropping_a_graph(model: Any) -> None:
    """Drop the graph of a forward while its activations may still be in transfer."""
    for number in range(2):
        loss = model(inputs(number)).float().square().mean()
        dropped = model(inputs(number)).float().square().mean()
        del dropped
        loss.backward()


def dropping_forwards(model: Any) -> None:
    """Forwards whose graphs are dropped at once, after each number of layers."""
    for number in range(2):
        model(inputs(number))
        for layer in model.layers:
            layer(inputs(number))
    model(inputs()).float().square().mean().backward()


def writing_in_hooks(model: Any) -> None:
    """Write to the shards of a later layer in a hook of an earlier layer."""
    last = list(model.layers[-1].parameters())

    @torch.no_grad()
    def decay(*_: object) -> None:
        for param in last:
            param.mul_(0.9)

    model.layers[0].register_forward_hook(decay)
    plainly(model)


def failing(model: Any) -> None:
    optimizer = sgd(model)
    for number in range(3):
        Breaking.armed = number == 1
        try:
            step(model, optimizer, number)
        except KeyError:
            optimizer.zero_grad()


def loading_after_failing(model: Any) -> None:
    optimizer = sgd(model)
    for number in range(3):
        Breaking.armed = number == 1
        try:
            step(model, optimizer, number)
        except KeyError:
            model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
            optimizer.zero_grad()


def dropping_after_failing(model: Any) -> None:
    """Drop a model after a failed backward and train a second one in its memory."""
    Breaking.armed = False
    failed = copy.deepcopy(model)
    step(failed, sgd(failed), 0)
    Breaking.armed = True
    with suppress(KeyError):
        step(failed, sgd(failed), 1)
    del failed
    gc.collect()
    plainly(model)


def unsharding_by_hand(model: Any) -> None:
    optimizer, layer = sgd(model), model.layers[1]
    for number in range(3):
        model(inputs(number)).float().square().mean().backward()
        if number < 2:
            layer.unshard()
            layer.reshard()
        else:
            layer.unshard(async_op=True)
        optimizer.step()
        layer.unshard()
        layer.reshard()
        optimizer.zero_grad()


def unsharding_ahead_of_the_step(model: Any) -> None:
    """A gather that starts before the optimizer's step and is waited for after it."""
    optimizer, layer = sgd(model), model.layers[1]
    for number in range(3):
        model(inputs(number)).float().square().mean().backward()
        handle = layer.unshard(async_op=True)
        optimizer.step()
        optimizer.zero_grad()
        if number == 1:  # else by the next forward
            handle.wait()
            for param in layer.parameters():
                param.sum()
            layer.reshard()


def writing_after_evaluations_by_hand(model: Any) -> None:
    """Finalize steps manually, with forwards without gradients between them."""
    optimizer = torch.optim.AdamW(model.parameters())
    model.set_manual_backward_finalization(True)
    for _ in range(2):
        model(inputs()).sum().backward()
        model.finalize_backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(inputs())
        model.finalize_backward()
        write_to(model)


@torch.no_grad()
def write_to(module: nn.Module) -> None:
    for param in module.parameters():
        param.mul_(0.9)


def linear_biases(module: nn.Module) -> nn.ParameterList:
    """Return parameters that autograd does not save for backward, so that they may be written to before it."""
    found = [param for name, param in module.named_parameters() if name.endswith("bias") and "norm" not in name]
    assert found
    return nn.ParameterList(found)


def freezing_the_first(model: Any) -> None:
    """Backward ends with a gather that no gradient follows."""
    model.layers[0].requires_grad_(False)
    optimizer = sgd(model)
    for number in range(3):
        step(model, optimizer, number)
        write_to(model)


def writing_in_the_hook_before(model: Any) -> None:
    """A forward hook writes to the shards of the next layer, which would be prefetched at that time."""
    later = list(model.layers[1].parameters())
    model.layers[0].register_forward_hook(lambda *_: write_to(nn.ParameterList(later)))
    plainly(model)


def writing_in_the_backward_hook_before(model: Any) -> None:
    later = linear_biases(model.layers[1])
    model.layers[2].register_full_backward_hook(lambda *_: write_to(later))
    plainly(model)


def stepping_between_forwards(model: Any) -> None:
    """Step after a forward, so that shards change before its backward."""
    optimizer = torch.optim.SGD(linear_biases(model), lr=0.1)
    step(model, optimizer, 0)
    model(inputs(1)).float().square().mean().backward()
    loss = model(inputs(2)).float().square().mean()
    optimizer.step()
    optimizer.zero_grad()
    loss.backward()


def writing_before_backward(model: Any) -> None:
    for number in range(2):
        loss = model(inputs(number)).float().square().mean()
        write_to(linear_biases(model))
        loss.backward()


def with_muon(model: Any) -> None:
    optimizer = Muon([param for param in model.parameters() if param.ndim == 2])
    for number in range(2):
        step(model, optimizer, number)


def stepping_and_writing_with_muon(model: Any) -> None:
    optimizer = Muon([param for param in model.parameters() if param.ndim == 2])
    for number in range(2):
        step(model, optimizer, number)
        write_to(model)


def summoning(model: Any, **options: bool) -> None:
    """Read full parameters between backward and step."""
    optimizer = sgd(model)
    for number in range(2):
        model(inputs(number)).float().square().mean().backward()
        with summon_full_params(model, **options):
            for param in model.parameters():
                param.sum()
        optimizer.step()
        optimizer.zero_grad()


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


def stepping_alongside_compute(model: Any) -> None:
    """The optimizer steps on a stream of the user's, and the next forward waits for its event."""
    optimizer, streams = sgd(model), accelerator_for(torch.device("cpu")).streams
    batches = [inputs(number) for number in range(3)]  # memory of compute's, which waits at the forward only
    for given in batches:
        loss = model(given).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        with streams.offload.after(streams.compute):
            optimizer.step()
        model.set_post_optim_event(streams.offload.mark())
    streams.compute.wait(streams.offload.mark())
    for param in model.parameters():
        param.to_local().sum()


def write_alongside(model: Any, module: nn.Module) -> None:
    """Write to the shards of `module` on a stream of the user's; `model` waits for its event."""
    streams = accelerator_for(torch.device("cpu")).streams
    with streams.offload.after(streams.compute):
        write_to(module)
    model.set_post_optim_event(streams.offload.mark())


def writing_alongside_compute(model: Any) -> None:
    """Write to shards on a stream of the user's between forward, backward and manual gathers."""
    biases = linear_biases(model)
    for number in range(2):
        loss = model(inputs(number)).float().square().mean()
        write_alongside(model, biases)
        loss.backward()
        write_alongside(model, model)
        model.layers[1].unshard()
        model.layers[1].reshard()
    model.set_manual_backward_finalization(True)
    write_alongside(model, model)
    model(inputs()).sum().backward()
    model.finalize_backward()


def writing_alongside_in_hooks(model: Any) -> None:
    model.layers[0].register_forward_hook(lambda *_: write_alongside(model, model.layers[1]))
    plainly(model)


def unsharding_ahead_of_transforms(model: Any) -> None:
    """A gather that starts before the optimizer's step, and a forward under `torch.func` after it."""
    optimizer = sgd(model)
    step(model, optimizer, 0)
    model(inputs(1)).float().square().mean().backward()
    for unit in (model, *model.layers):
        unit.unshard(async_op=True)
    optimizer.step()
    torch.func.grad(lambda x: model(x).float().square().mean())(inputs(2))


def transforming(model: Any) -> None:
    """A forward under `torch.func` that follows an optimizer on a stream of the user's."""
    optimizer, streams = sgd(model), accelerator_for(torch.device("cpu")).streams
    given = inputs()
    model(given).float().square().mean().backward()
    with streams.offload.after(streams.compute):
        optimizer.step()
    model.set_post_optim_event(streams.offload.mark())
    torch.func.grad(lambda x: model(x).float().square().mean())(given)


Loop = Callable[[Any], None]
Scenario = tuple[str, str, str]  # strategy, loop, options

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp", "hsdp_zero2", "hpZ", "hfsdp")
LOOPS: dict[str, tuple[Loop, type[Layer]]] = {
    "steps": (plainly, Layer),
    "accumulation": (accumulating, Layer),
    "manually finalized": (finalizing_by_hand, Layer),
    "accumulation without sync": (without_sync, Layer),
    "replicas withheld": (withholding_replicas, Layer),
    "hooks": (stepping_in_backward, Layer),
    "hooks between uses": (stepping_between_uses, Layer),
    "data between uses": (updating_data_between_uses, Layer),
    "graph dropped": (dropping_a_graph, Layer),
    "forwards dropped": (dropping_forwards, Layer),
    "writing in hooks": (writing_in_hooks, Layer),
    "checkpointing": (plainly, Checkpointed),
    "shared gradients": (plainly, TwiceUsed),
    "failing backward": (failing, BreakingLayer),
    "loading after a failure": (loading_after_failing, BreakingLayer),
    "dropping after a failure": (dropping_after_failing, BreakingLayer),
    "manual unsharding": (unsharding_by_hand, Layer),
    "unsharding ahead of the step": (unsharding_ahead_of_the_step, Layer),
    "manual evaluations": (writing_after_evaluations_by_hand, Layer),
    "first layer frozen": (freezing_the_first, Layer),
    "writing in the hook before": (writing_in_the_hook_before, Layer),
    "writing in the backward hook before": (writing_in_the_backward_hook_before, Layer),
    "step between forwards": (stepping_between_forwards, Layer),
    "writing before backward": (writing_before_backward, Layer),
    "Muon": (with_muon, Layer),
    "capture": (captured, Layer),
    "optimizer on another stream": (stepping_alongside_compute, Layer),
    "writing on another stream": (writing_alongside_compute, Layer),
    "writing on another stream in hooks": (writing_alongside_in_hooks, Layer),
    "transforms": (transforming, Layer),
    "unsharding ahead of transforms": (unsharding_ahead_of_transforms, Layer),
    "evaluation and writing": (evaluating_and_writing, Layer),
}
TEMPORARY = tempfile.gettempdir()
OFFLOADING: dict[str, dict[str, Any]] = {
    "": {},
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "states offloaded": {"offload_policy": Offload(optimizer={"cpu": 0.6})},
    "all offloaded": {"offload_policy": ALL},
    "activations": {"offload_policy": Offload(activations={"cpu": 1.0})},
    "activations on disk": {"offload_policy": Offload(activations={"disk": 1.0}, folder=TEMPORARY)},
    "states on disk": {"offload_policy": Offload(optimizer={"disk": 1.0}, folder=TEMPORARY)},
    "disk": {"offload_policy": Offload(parameters={"disk": 1.0}, folder=TEMPORARY)},
}
PRECISIONS = {"": {}, "bf16": {"mp_policy": BF16}, "fp16": {"mp_policy": FP16}, "encoded": {"mp_policy": ENCODED}}
OPTIONS = {
    f"{offloading} {precision}".strip(): OFFLOADING[offloading] | PRECISIONS[precision]
    for offloading, precision in itertools.product(OFFLOADING, PRECISIONS)
}
# Offload everything, a little at a time: a storage of the layers here has 1 to 5 KB.
SMALLEST_BYTES, WINDOW_BYTES = 1, 16_384
AXES = ("strategy", "loop", "offloading", "precision")  # of the scenarios that are not common
COMMON_LOOPS = ("steps", "accumulation", "replicas withheld", "failing backward")
COMMON_OPTIONS = ("", "bf16", "offload", "states offloaded", "disk")


def exists(strategy: str, loop: str, offloading: str, precision: str = "") -> bool:
    has_no_shards = strategy in ("ddp", "zero1", "hfsdp") and "disk" in offloading
    is_refused = precision == "encoded" and (strategy == "ddp" or offloading == "disk")
    return not (has_no_shards or is_refused or (loop == "capture" and "disk" in offloading))


KINDS = {
    "ddp": "whole",
    "zero1": "whole",
    "zero2": "sharded",
    "zero3": "sharded",
    "hsdp": "replicated",
    "hsdp_zero2": "replicated",
    "hpZ": "grouped",
    "hfsdp": "grouped",
    "offload": "parameters",
    "all offloaded": "parameters",
    "disk": "parameters",
    "states offloaded": "states",
    "states on disk": "states",
    "activations on disk": "activations",
}
"""Strategies and offloading that are alike for a loop: it does not meet each of them."""


def kind_of_pair(first: tuple[int, str], second: tuple[int, str]) -> Any:
    """Return the pair, with kinds of strategies and of offloading next to a loop."""
    if "loop" in (AXES[first[0]], AXES[second[0]]):
        return tuple((axis, KINDS.get(value, value)) for axis, value in (first, second))
    return first, second


def tape_of(strategy: str, loop: str, option: str, *, values: bool = True, rank: int = 0) -> dry.Tape:
    return tape_of_run(strategy, *LOOPS[loop], option, values=values, rank=rank)


def tape_of_run(
    strategy: str, run: Loop, layer: type[Layer], option: str, *, values: bool = True, rank: int = 0, layers: int = 3
) -> dry.Tape:
    offloads_everything = mock.patch.object(activations, "SMALLEST_BYTES", SMALLEST_BYTES)
    in_small_windows = mock.patch.object(offloaded, "WINDOW_BYTES", WINDOW_BYTES)
    with dry.world(8, rank=rank), offloads_everything, in_small_windows:
        mesh = {"mesh": init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))}
        with dry.taped(values=values) as tape:
            options = {"strategy": GROUPED.get(strategy, strategy), **OPTIONS[option]}
            shard = partial(fully_shard, **options, **(mesh if "hsdp" in strategy else {}))
            run(chain(shard, Chain([layer(48) for _ in range(layers)])))
    return tape


REDUNDANT = {
    "MatrixBatch.take_back: self._wait()": "the reduce stream sends its own result; on a CPU the host must wait",
    "Residency.hand_over_shards: self.reshard()": "the next gather waits for compute; the next forward need not",
    "Residency.invalidate_if_stepped: self.finish_gather()": "compute has waited for that gather, begun between steps",
    "Buffers.take: small.settle()": "its memory is freed, which torch and the work in progress keep",
    "Store._buffer: self._free[size] = [item for item in given if not item.is_free]": "its memory is freed, as above",
    "Store._drop: self._leave_buffer(offloaded)": "the write is over; its error is raised there",
    "Store._read_ahead: self._bring_back(earlier)": "the read is over; its error is raised there",
    "Store.get: self._read_ahead(offloaded)": "what is read is waited for as well",
    "StatesOnDisk._write: chunk.buffer = chunk.new_buffer(nbytes) if filled else self._take_buffer(chunk, number, "
    "nbytes)": "see `test_buffers_of_states_are_written_before_they_are_filled`",
    "Extent.write: self._writes.wait(start, end)": "see `test_writes_to_the_same_blocks_are_in_order`",
    "OnDisk.__torch_dispatch__.<locals>.stored: value.store(memory[id(value)][1])": "its error is raised there",
}
"""Calls of functions that wait that are not needed on streams, by function and line, and why they are there."""


class Sites(NamedTuple):
    """Places that wait for streams, as the line of the wait and the line that calls its function."""

    met: frozenset[str]
    needed: frozenset[str]  # without which there is a race

    def __or__(self, other: "Sites") -> "Sites":
        return Sites(self.met | other.met, self.needed | other.needed)

    @property
    def needless(self) -> set[str]:
        return {site for site in self.met - self.needed if not may_be_needless(site)}


@cache
def may_be_needless(site: str) -> bool:
    """Return True for waits of torch and for those that `REDUNDANT` lists."""
    return site.startswith(OF_TORCH) or any(call in REDUNDANT for call in calls_of(site))


def calls_of(site: str) -> Iterator[str]:
    """Yield the function and the line that call the function of a wait."""
    _, _, caller = site.partition(", called by ")
    place, _, function = caller.partition(" in ")
    file, _, line = place.partition(":")
    for path in Path(fullshard.__file__).parent.rglob(file) if file else ():
        lines = path.read_text().splitlines()
        if int(line) <= len(lines):
            yield f"{function}: {lines[int(line) - 1].strip()}"


def has_race(tape: dry.Tape, *, without: str) -> bool:
    return next(find_races(tape, without=without), None) is not None


@cache
def looked_through(among: tuple[Scenario, ...], known: frozenset[str] = frozenset()) -> Sites:
    """Return the places that wait for streams in these scenarios, after checking that none has a race.

    Waits that are `known` to be needed are not tested again.
    """
    met, needed = set[str](), set[str](known)
    for scenario in among:
        tape = tape_of(*scenario)
        assert not dry.races(tape), scenario
        assert {entry.stream for entry in tape.of(Collective)} >= {"reduce"}
        sites = {wait.site for wait in tape.of(Waited)}
        met |= sites
        needed |= {site for site in sites - needed if not may_be_needless(site) and has_race(tape, without=site)}
    return Sites(frozenset(met), frozenset(needed))


RARE = (
    ("hsdp", "hooks", "offload"),
    ("zero3", "Muon", ""),
    ("zero3", "hooks between uses", ""),
    ("zero3", "writing in hooks", ""),
    ("zero3", "optimizer on another stream", ""),
    ("zero3", "writing on another stream", ""),
    ("zero3", "writing on another stream in hooks", ""),
    ("zero3", "transforms", ""),
    ("zero3", "unsharding ahead of transforms", ""),
    ("zero3", "evaluation and writing", "offload"),
    ("zero3", "data between uses", ""),
    ("hsdp", "Muon", ""),
    ("zero3", "graph dropped", "activations"),
    ("zero3", "manually finalized", ""),
    ("ddp", "manually finalized", "offload"),
    ("ddp", "steps", "offload"),
    ("zero3", "manual unsharding", ""),
    ("zero3", "manual unsharding", "offload"),
    ("zero3", "unsharding ahead of the step", ""),
    ("zero3", "unsharding ahead of the step", "offload"),
    ("zero3", "manual evaluations", "offload"),
    ("zero3", "first layer frozen", "offload"),
    ("zero3", "loading after a failure", "offload"),
    ("zero3", "dropping after a failure", "activations"),
    ("zero3", "writing in the hook before", ""),
    ("zero3", "writing in the hook before", "offload"),
    ("zero3", "writing in the backward hook before", ""),
    ("zero3", "step between forwards", ""),
    ("zero3", "writing before backward", ""),
    ("zero3", "steps", "activations"),
    ("zero3", "failing backward", "activations"),
    ("zero3", "forwards dropped", "activations"),
    ("zero3", "steps", "activations on disk"),
    ("zero3", "graph dropped", "activations on disk"),
    ("zero3", "failing backward", "activations on disk"),
    ("zero3", "steps", "states on disk"),
)
COMMON: list[Scenario] = covering_pairs(STRATEGIES, COMMON_LOOPS, COMMON_OPTIONS, allows=exists)
OTHERS: list[Scenario] = [
    (strategy, loop, f"{offloading} {precision}".strip())
    for strategy, loop, offloading, precision in covering_pairs(
        STRATEGIES, LOOPS, OFFLOADING, PRECISIONS, allows=exists, kind=kind_of_pair
    )
]


def of_strategy(strategy: str, *, common: bool) -> tuple[Scenario, ...]:
    """Return the common scenarios of a strategy, or its others.

    Every combination of two among strategy, loop, offloading and precision occurs in a scenario of some strategy, where
    a loop meets one strategy and one offloading of each kind.
    """
    found = COMMON if common else [scenario for scenario in OTHERS if scenario not in COMMON]
    return tuple(scenario for scenario in found if scenario[0] == strategy)


def other_scenarios(strategy: str) -> Sites:
    return looked_through(of_strategy(strategy, common=False), in_few_scenarios().needed)


@cache
def in_few_scenarios() -> Sites:
    """Return the waits of scenarios that suffice to show that every wait is needed."""
    sites = looked_through(RARE)
    for strategy in ("ddp", "zero3", "hsdp"):
        sites |= looked_through(of_strategy(strategy, common=True))
    return sites


common = pytest.mark.parametrize("strategy", STRATEGIES)


@pytest.mark.slow
@common
def test_common_scenarios_have_no_stream_races(strategy):
    looked_through(of_strategy(strategy, common=True))


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["hooks between uses", "writing in hooks"])
def test_shards_written_during_a_disk_read_are_read_again(loop):
    assert not dry.races(tape_of("zero3", loop, "disk"))
    no_version = mock.PropertyMock(return_value=-1)
    with mock.patch.object(Extent, "version", no_version, create=True):  # all versions are equal
        found = dry.races(tape_of("zero3", loop, "disk"))
    assert found and all("uses data that was read while it was being written" in race.what for race in found)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [3, 7])
def test_scenarios_have_no_stream_races_on_other_ranks(rank):
    for scenario in (("zero3", "steps", ""), ("hsdp", "accumulation", "bf16"), ("zero1", "steps", "offload")):
        assert not dry.races(tape_of(*scenario, rank=rank)), scenario


@common
@pytest.mark.slow
@pytest.mark.timeout(300)  # many dry runs
def test_remaining_scenarios_have_no_stream_races(strategy):
    other_scenarios(strategy)


def test_every_stream_wait_is_needed():
    sites = in_few_scenarios()
    assert not sites.needless
    met = {without_names(site) for site in sites.met}
    expected = dict(waits_by_caller())
    assert {names for site, names in expected.items() if site not in met} == set(NOT_MET)


def without_names(site: str) -> str:
    """Return the lines of `site` without the functions that they are in, which comprehensions change."""
    return ", called by ".join(part.split(" in ")[0] for part in site.split(", called by "))


class Source(ast.NodeVisitor):
    """The waits and the calls in a file, each with its line and the function around it."""

    def __init__(self, path: Path) -> None:
        self.file = path.name
        self.waits: list[tuple[int, str]] = []
        self.calls: list[tuple[int, str, str, str]] = []  # with the receiver and the name of what is called
        self._around: list[str] = []
        self.visit(ast.parse(path.read_text()))

    def visit_ClassDef(self, node: Any) -> None:
        self._around.append(node.name)
        self.generic_visit(node)
        self._around.pop()

    visit_FunctionDef = visit_ClassDef  # noqa: N815  # the name is of `ast`

    def visit_Call(self, node: ast.Call) -> None:
        if re.search(WAITS, ast.unparse(node.func)):
            self.waits.append((node.lineno, ".".join(self._around)))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Note a call, or a use of a property or of a method that is called later."""
        self.calls.append((node.lineno, ".".join(self._around), ast.unparse(node.value), node.attr))
        self.generic_visit(node)


WAITS = r"streams\.\w+\.(wait|after)$|\w\.(synchronize|query)$|\b_?(writing|reading|work)\.(wait|settle)$"
"""Functions that wait for a stream or a disk, or ask whether it is ready."""
RECEIVERS = {
    "UnitReduction.finish": "reduction",
    "UnitReduction.abandon": "reduction",
    "UnitReduction.free_whole_grads": "reduction",
    "Buffer.settle": "found|small",
    "Store.put": "store",
    "ShardsInMemory.fill": "chunk.shards",
    "_Writes.settle": "writes",
}
"""Receivers of calls of functions that wait, if other classes have functions of the same name."""
NOT_MET = {
    "Residency.invalidate_if_stepped by UnshardScheduler.start_unshard": "it is sharded there; no gather is pending",
    "Residency.wait_unshard by ManualDriver.wait_for_all": "see `test_a_gather_is_repeated_after_the_write`",
    "Residency.wait_unshard by UnshardScheduler.unshard": "see `test_a_gather_is_repeated_after_the_write`",
    "Residency.wait_unshard by UnshardScheduler._free_slot_for": "for the views of a gather; see `test_lifetime.py`",
    "Residency.finish_gather by Residency.finish_gather": "the method of a group",
    "UnitReduction.abandon by UnitReduction.abandon": "the method of a group's reduction",
    "UnitReduction.free_whole_grads by UnitReduction.free_whole_grads": "the method of a group's reduction",
    "UnitReduction.free_whole_grads by UnitReduction.complete_if_arrived": "the method of a group's reduction",
    "Store._clear_left by Store.get": "it waits for disks with wait=True only",
    "_Writes.settle by Scratch._reclaim": "for the number of free bytes, which nothing reads or writes",
    "Store._clear_left by Store.put": "see `test_buffers_that_a_disk_writes_are_waited_for`",
}
"""Waits by the function and its caller that no scenario meets, and why."""


def waits_by_caller() -> Iterator[tuple[str, str]]:
    """Yield each wait for a stream, once per call of the function that it is in: both lines, and both functions."""
    package = Path(fullshard.__file__).parent
    folders = ("engine", "optim", "state", "disk", "integrations")
    skipped = ("files.py", "speed.py")  # the waits themselves, and a measurement
    sources = [Source(path) for folder in folders for path in (package / folder).glob("*.py")]
    sources = [source for source in sources if source.file not in skipped]
    for source in sources:
        for line, function in source.waits:
            name = function.split(".")[-1]
            if name == "__del__":
                continue
            for other in sources:
                for place, caller, receiver, called in other.calls:
                    is_same_file = not name.startswith("_") or other is source
                    fits = re.fullmatch(RECEIVERS.get(function, ".*"), receiver)
                    if called == name and is_same_file and fits and caller:
                        yield f"{source.file}:{line}, called by {other.file}:{place}", f"{function} by {caller}"


def writing_in_a_new_hook(model: Any) -> None:
    """A hook that writes to the next layer, first called when that layer is prefetched."""
    step(model, sgd(model), 0)
    model.layers[0].register_forward_hook(lambda *_: write_to(model.layers[1]))
    model(inputs(1))


def writing_while_all_are_gathered(model: Any) -> None:
    runtime = runtime_of(model)
    runtime.manual_driver.unshard_all()
    write_to(model.layers[1])
    runtime.manual_driver.wait_for_all()


@pytest.mark.parametrize(
    ("run", "caller"),
    [
        (writing_in_a_new_hook, "UnshardScheduler.unshard"),
        (writing_while_all_are_gathered, "ManualDriver.wait_for_all"),
    ],
)
def test_a_gather_is_repeated_after_the_write(run, caller):
    """The first gather is discarded, so that it may race with the write. The second one follows the write."""
    tape = tape_of_run("zero3", run, Layer, "")
    (site,) = {
        wait.site for wait in tape.of(Waited) if f"Residency.wait_unshard, called by {caller}" in by_names(wait.site)
    }
    assert {(race.first_stream, race.second_stream) for race in dry.races(tape)} == {("gather", "compute")}
    assert "compute" in {race.first_stream for race in dry.races(tape, without=site)}


def test_buffers_that_a_disk_writes_are_waited_for():
    """Storages that no graph references count towards the window until they are written."""

    def run(_: Any) -> None:
        order: list[Any] = []
        store = Store(torch.device("cpu"), Scratch(Path(TEMPORARY), "dropped"), 3 * ALIGNMENT)
        first = store.put(torch.ones(2048), order)
        for _ in range(LAG):
            torch.ones(1).add_(1)
        second = store.put(torch.ones(8), order)  # starts to write the first
        del first, second
        store.put(torch.ones(2048), order)  # needs its buffer

    tape = tape_of_run("zero3", run, Layer, "")
    assert not dry.races(tape)
    sites = {wait.site for wait in tape.of(Waited) if "Store.put: self._clear_left(wait=True)" in calls_of(wait.site)}
    (site,) = (site for site in sites if site.startswith(place_of("work.settle()", "engine/offloaded.py")))
    assert dry.races(tape, without=site)  # another one is for storages that no disk writes


def place_of(text: str, path: str) -> str:
    """Return the line with `text` in a file of the package, as in the site of a wait."""
    lines = (Path(fullshard.__file__).parent / path).read_text().splitlines()
    return f"{Path(path).name}:{[line.strip() for line in lines].index(text) + 1} "


def test_buffers_of_states_are_written_before_they_are_filled():
    """A first step with more portions of equal size than buffers."""
    tape = tape_of_run("zero3", lambda model: step(model, sgd(model), 0), Layer, "states on disk", layers=BUFFERS + 1)
    assert not dry.races(tape)
    (site,) = {wait.site for wait in tape.of(Waited) if wait.site.endswith("in StatesOnDisk._write")}
    assert dry.races(tape, without=site)


def test_writes_to_the_same_blocks_are_in_order():
    def run(_: Any) -> None:
        extent = Scratch(Path(TEMPORARY), "twice").take(ALIGNMENT)
        for _ in range(2):
            extent.write(aligned_buffer(ALIGNMENT))

    tape = tape_of_run("zero3", run, Layer, "")
    assert not dry.races(tape)
    (site,) = {wait.site for wait in tape.of(Waited) if wait.site.endswith("in Extent.write")}
    assert len(dry.races(tape, without=site)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("option", ["offload", "states offloaded", "all offloaded bf16"])
def test_copies_between_host_and_device_report_no_false_races(option):
    """The host waits for copies from host memory to the device and back that are not asynchronous."""
    for writeback, with_grads, offload_to_cpu in itertools.product((False, True), repeat=3):
        options = {"writeback": writeback, "with_grads": with_grads, "offload_to_cpu": offload_to_cpu}
        tape = tape_of_run("zero3", partial(summoning, **options), Layer, option)
        assert not dry.races(tape), options
    for strategy in ("zero1", "zero3"):
        assert not dry.races(tape_of_run(strategy, stepping_and_writing_with_muon, Layer, option)), strategy


def test_race_detector_treats_foreach_copy_as_asynchronous():
    with dry.taped(values=True) as tape:
        held = accelerator_for(torch.device("cpu")).host_zeros(8, torch.float32, pinned=True)
        torch._foreach_copy_([held], [torch.ones(8)], non_blocking=True)
        held.sum()
    (race,) = dry.races(tape)
    assert race.first == "aten._foreach_copy_"


def taking_snapshots(model: Any) -> None:
    """Snapshots with a metric in host memory that is being copied there."""
    optimizer = sgd(model)
    metric = accelerator_for(torch.device("cpu")).host_zeros(1, torch.float32, pinned=True)
    for number in range(2):
        step(model, optimizer, number)
        metric.copy_(inputs(number)[0, :1], non_blocking=True)
        snapshot(model=model, optimizer=optimizer, extra={"metric": metric})


def copying_for_checkpoints(model: Any) -> None:
    """Copies in host memory, which a thread writes to files while training continues."""
    optimizer, memory = sgd(model), HostMemory()
    for number in range(2):
        step(model, optimizer, number)
        contents = memory.copy(collect(model, optimizer, None, None, None))
        for tensor in (*contents.sharded.values(), *contents.plain.values()):
            tensor.clone()


@pytest.mark.parametrize("option", ["", "offload", "states offloaded", "states on disk"])
@pytest.mark.parametrize(
    ("run", "name"), [(taking_snapshots, "snapshot"), (copying_for_checkpoints, "HostMemory.copy")]
)
def test_checkpoint_copies_complete_before_they_are_read(run, name, option):
    """A snapshot of states on the device waits for each copy, and one of states in host memory at its end."""
    tape = tape_of_run("zero3", run, Layer, option)
    assert not dry.races(tape)
    (site,) = {wait.site for wait in tape.of(Waited) if by_names(wait.site).split(", ")[0] == name}
    is_needed = (name == "snapshot") == (option == "offload")
    assert bool(dry.races(tape, without=site)) == is_needed


def by_names(site: str) -> str:
    """Return the functions of `site` without their lines."""
    return ", called by ".join(part.split(" in ")[-1] for part in site.split(", called by "))


@pytest.mark.slow
@pytest.mark.timeout(900)  # by itself; after the others it has been looked through
def test_every_stream_wait_is_needed_in_all_scenarios():
    sites = looked_through(RARE)
    for strategy in STRATEGIES:
        sites |= looked_through(of_strategy(strategy, common=True)) | other_scenarios(strategy)
    assert not sites.needless


def test_simulated_event_completes_after_lag_or_wait():
    with dry.taped(values=True) as tape:
        streams = accelerator_for(torch.device("cpu")).streams
        first, second = streams.gather.mark(), streams.gather.mark()
        assert not first.query()
        second.synchronize()
        assert first.query() and second.query()
        third = streams.gather.mark()
        for _ in range(LAG):
            assert not third.query()
            torch.ones(1)
        assert third.query()
    assert [wait.queried for wait in tape.of(Waited)] == [False, True]  # the host knew of the first
    with dry.taped():  # of predictions
        assert accelerator_for(torch.device("cpu")).streams.gather.mark().query()


def two_accesses(*between: Any) -> dry.Tape:
    """Return a tape of a write on one stream and a read on another, with something between them."""
    tape, here = dry.Tape(), Origin("", Phase.FORWARD)
    tape.note(Operation("write", "compute", here, (), (Access(1, 0, 8),)))
    for entry in between:
        tape.note(entry)
    tape.note(Operation("read", "gather", here, (Access(1, 4, 12),), ()))
    return tape


def test_accesses_ordered_by_a_wait_are_no_race():
    here = Origin("", Phase.FORWARD)
    marked, waited = Recorded(1, "compute", here), Waited(1, "gather", "somewhere", here)
    assert not dry.races(two_accesses(marked, waited))
    through_host = Waited(1, "host", "somewhere", here)
    assert not dry.races(two_accesses(marked, through_host))  # what the host queues after it has waited comes later
    (race,) = dry.races(two_accesses(marked))
    assert str(race) == (
        "both use storage 1: write on stream compute (the root, forward), then read on stream gather (the root, "
        "forward) without a wait between them"
    )
    assert len(dry.races(two_accesses(waited_before_marking := Recorded(2, "gather", here), marked))) == 1
    assert waited_before_marking


def test_reuse_of_freed_memory_on_its_stream_without_wait_is_a_race():
    here = Origin("", Phase.FORWARD)
    read = Operation("read", "reduce", here, (Access(1, 0, 8),), ())
    entries = [Allocation(1, 8, "compute", here), read, Free(1, 8, "compute", here)]
    mark, wait = Recorded(1, "reduce", here), Waited(1, "compute", "somewhere", here)
    for order, found in (
        ([*entries], 0),  # nothing is allocated anymore
        ([*entries, Allocation(2, 8, "compute", here)], 1),
        ([*entries, Allocation(2, 8, "reduce", here)], 0),  # from other memory
        ([*entries[:2], mark, wait, entries[2], Allocation(2, 8, "compute", here)], 0),
        ([*entries, mark, wait, Allocation(2, 8, "compute", here)], 0),  # in time
        ([*entries, mark, Allocation(2, 8, "compute", here), wait], 1),
    ):
        tape = dry.Tape()
        for entry in order:
            tape.note(entry)
        assert len(dry.races(tape)) == found
