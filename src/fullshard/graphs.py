"""A whole training step in a CUDA graph: `capture`.

[Note: conditions of a replay]
A replay repeats the kernels and collectives of one step with the same addresses. The Python code of the step does not
run. So a replay is correct only if this code would queue the same work again. `_Conditions` contains everything that
decisions of the engine, torch's optimizers and autocast depend on. A call replays the graph only if the conditions are
the same as at the capture. All other values that decisions in the user's step depend on must be arguments of the step.

[Note: the learning rate of a graph]
A number in a parameter group of an optimizer becomes a constant of the graph. Schedulers change the learning rate in
every step. So the number is replaced by a tensor on the device, which the graph reads. Values set by the user or a
scheduler are copied to this tensor.
"""

from __future__ import annotations

import linecache
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from fullshard._compat import global_hooks, grad_hooks, module_hooks, step_hooks
from fullshard.device.cuda_graph import CudaGraph
from fullshard.engine.hooks import abandon_step, runtime_of
from fullshard.engine.late_params import number_of_registrations
from fullshard.engine.registry import is_unit, process_groups_along, unit_of
from fullshard.engine.unit import Unit
from fullshard.engine.unit_parts import UnitSettings
from fullshard.errors import ConfigError
from fullshard.optim.before_step import leave_uncompared
from fullshard.optim.elementwise import trials
from fullshard.policy.arguments import check_callable, check_type
from fullshard.policy.switches import switches

_log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")


def capture(step: Callable[..., ResultT], example_inputs: Sequence[Any], warmup: int = 3) -> CapturedStep[ResultT]:
    """Return a function that runs `step` as a CUDA graph, so that a whole training step costs the host one call.

        def step(tokens):
            loss = model(tokens).mean()
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = fullshard.capture(step, (tokens,))
        for tokens in loader:
            loss = step(tokens)

    The first calls run eagerly and are normal training steps. The next call captures the step, and later ones copy
    their inputs to the memory of the graph and replay it. Results are those of eager steps whose learning rate is a
    tensor. Evaluation, checkpoints and learning rate schedulers work between calls.

    A call runs eagerly, and logs the reason once, if inputs have different shapes than the examples, if modules,
    buffers, parameters, settings or optimizers have changed, or if a unit is unsharded by `unshard()`. If the change
    persists, the step is captured again after a few calls. Other values that Python code of the step reads are
    constants of the graph: pass changing values as arguments.

    `capture` sets `capturable=True` and a tensor as `lr` in the groups of the optimizers. If parameters do not belong
    to a unit, ranks compare them during the first 64 steps, and the step is captured afterwards.

    `step` must contain the whole training step: forward, backward, all of its microbatches, clipping, the optimizer's
    step and `zero_grad`. The graph keeps the memory of one step: unsharded parameters, activations and gradients.

    Args:
        step: A function of positional arguments. It must not read values of tensors on the host, as `.item()` and
            `print(loss)` do. It returns tensors on the device, in any nesting, or None.
        example_inputs: The arguments of a call, with the shapes and dtypes that the graph is for. Tensors on the CPU
            are copied to the device. Their values are not used.
        warmup: The number of eager calls before a capture, 2 or more.

    Returns:
        The captured step. Tensors that it returns are detached copies.

    Raises:
        ConfigError: `example_inputs` is not a sequence, a tensor in it requires a gradient, `warmup` is too small, or
            there is no CUDA device. The call that would capture the step raises it if the step cannot be captured:
            states are offloaded, `check_finite_gradients` is enabled, the backend is not NCCL, the optimizer has state
            on the host, the step changes hyperparameters, draws random numbers on the host, differs from call to call,
            or waits for the device. The message names the line. Each rank checks this independently.
    """
    return CapturedStep(step, example_inputs, warmup, CudaGraph())


class Graph(Protocol):
    """Device work that is recorded once and replayed. Tests use an implementation that runs on the CPU."""

    device: torch.device
    backends: frozenset[str]
    """Backends of process groups whose collectives can be recorded."""

    def check(self) -> None:
        """Raise a `ConfigError` if this machine has no such graphs."""

    def queueing_warm_up(self) -> Any:
        """Return a context for eager steps before a capture."""

    def host_random_state(self) -> Any:
        """Return the state of the random generators on the host, which a replay does not advance."""

    def noting_waits(self, note: Callable[[FrameType], object]) -> Any:
        """Return a context that calls `note` with the frame of the caller whenever the host waits for the device."""

    def record(self, call: Callable[[], Any]) -> Any:
        """Record the work of `call` without running it, replacing any earlier record. Return its result."""

    def replay(self) -> None:
        """Run the recorded work."""

    def drop(self) -> None:
        """Free the memory of the recorded work."""


class CapturedStep(Generic[ResultT]):
    """A training step that runs as a CUDA graph. Created by `capture`."""

    def __init__(self, step: Callable[..., ResultT], example_inputs: Sequence[Any], warmup: int, graph: Graph) -> None:
        check_callable("step", step, "a function that runs a training step")
        check_type("example_inputs", example_inputs, (tuple, list), "a tuple with the arguments of the step: (batch,)")
        if type(warmup) is not int or warmup < 2:
            raise ConfigError(f"capture(warmup={warmup!r}): expected a number of eager calls, 2 or more.")
        graph.check()
        self._step, self._graph = step, graph
        self._buffers = _InputBuffers(list(example_inputs), graph.device)
        self._warmup = warmup
        self._parts = _StepParts(graph.device)
        self._previous: _Conditions | None = None  # of the last eager call
        self._in_a_row = 0  # consecutive eager calls with these conditions
        self._eager_calls = 0
        self._calls: list[int] = []  # of units and optimizers in the last eager call
        self._refusal: str | None = None  # the reason why a graph cannot repeat the last eager call
        self._captured: _Capture | None = None
        self._written: list[tuple[list[Tensor | None], Tensor | None]] = []  # engine lists, each with an added tensor
        self._reported: set[str] = set()

    @property
    def is_captured(self) -> bool:
        """True if there is a graph. A call replays it unless something that it depends on has changed."""
        return self._captured is not None

    def __call__(self, *inputs: Any) -> ResultT:
        """Run a training step.

        Raises:
            ConfigError: An input requires a gradient, or this call would capture the step but that is not possible.
            StateError: `data` of a parameter was assigned, or it has a hook that would never be called.
        """
        self._parts.prepare_optimizers()
        other = self._buffers.take(inputs)
        if other is not None:
            self._report(*other)
            self._previous = None
            return self._run(self._buffers.on_device(inputs))
        unsharded = next((unit for unit in self._parts.units if unit.residency.is_unsharded_manually), None)
        if unsharded is not None:
            self._report(f"{unsharded.name or 'the root'} is unsharded by unshard(). Call reshard() before the step.")
            self._previous = None
            return self._run(self._buffers.arguments)
        now = self._parts.conditions()
        if self._captured is not None:
            change = self._captured.change(now)
            if change is None:
                return self._replay(self._captured)
            self._report(change)
            if change == _OTHER_GRADS:  # another capture would not help
                return self._run(self._buffers.arguments)
        change = None if self._previous is None else self._previous.change(now)
        self._in_a_row = 0 if self._previous is None or change else self._in_a_row + 1
        self._eager_calls += 1
        if change is not None and self._eager_calls > 2 * self._warmup:  # in the first calls, states are created
            self._report(change)
        if self._in_a_row >= self._warmup - 1 and self._parts.are_known and not self._parts.may_compare_ranks:
            return self._capture(now)
        return self._warm_up(now)

    def reset(self) -> None:
        """Drop the graph and its memory. The step is captured again after a few more calls."""
        self._drop()
        self._previous, self._in_a_row = None, 0

    def __del__(self) -> None:
        with suppress(Exception):  # the interpreter may be shutting down
            self._drop()

    def _drop(self) -> None:
        self._captured = None
        self._graph.drop()
        for kept, flat in self._written:
            del kept[[item is flat for item in kept].index(True)]
        self._written = []

    def _run(self, inputs: Sequence[Any]) -> ResultT:
        self._parts.expect_broadcast()
        with self._parts.observing():
            result: ResultT = _detached(self._step(*inputs))
        return result

    def _warm_up(self, now: _Conditions) -> ResultT:
        """Run the step eagerly, on the stream and with the input buffers that the graph will use."""
        waits: list[str] = []
        before, random_before = self._parts.host_state(), self._graph.host_random_state()
        with self._graph.queueing_warm_up(), self._graph.noting_waits(lambda frame: waits.append(_line_of(frame))):
            result = self._run(self._buffers.arguments)
        self._refusal = _problem_of(result, self._graph.device) or _changed(before, self._parts.host_state())
        if random_before != self._graph.host_random_state():
            self._refusal = (
                "The step draws random numbers on the host, and each replay would use the same ones. Draw them on the "
                "device, or before the step, and pass what depends on them as an argument."
            )
        if waits:
            self._refusal = (
                f"The step waits for the device at {waits[0]}. A CUDA graph cannot do that. Keep values in tensors on "
                "the device: return the loss and read it after the step, and make constants once, outside."
            )
        if self._calls != self._parts.calls:
            self._in_a_row = 0
            if self._eager_calls > 2 * self._warmup:
                self._report(_OTHER_CALLS)
        self._calls = self._parts.calls
        self._previous = now if self._parts.are_known else None
        return result

    def _capture(self, now: _Conditions) -> ResultT:
        self._drop()  # before another graph takes memory
        self._parts.check(self._graph.backends)
        if self._refusal is not None:
            raise ConfigError(self._refusal)
        self._parts.expect_broadcast()
        lists = self._parts.written_by_graphs()
        before = [len(kept) for kept in lists]
        try:
            with self._parts.observing():
                result = self._graph.record(lambda: self._step(*self._buffers.arguments))
            if self._parts.calls != self._calls:
                raise ConfigError(
                    f"{_OTHER_CALLS} A CUDA graph does the same in each replay. Make the step depend only on its "
                    "arguments. To accumulate gradients, run all microbatches in one step."
                )
        except Exception as error:
            self._written = _added(lists, before)
            self._drop()
            for unit in self._parts.first_units:
                abandon_step(unit.module)
            if isinstance(error, ConfigError):
                raise
            where = _line_of_error(error)
            raise ConfigError(
                f"The step cannot be captured in a CUDA graph: {type(error).__name__} at {where}: {error}"
            ) from error
        self._written = _added(lists, before)
        self._captured = _Capture(now, self._parts.conditions(), _detached(result, copies=False))
        _log.info("Captured the training step in a CUDA graph.")
        return self._replay(self._captured)

    def _replay(self, captured: _Capture) -> ResultT:
        self._previous = None
        for unit in self._parts.first_units:
            unit.streams.join()  # the graph may reuse memory that eager work has freed
        self._graph.replay()
        self._parts.note_step()
        result: ResultT = _detached(captured.result)
        return result

    def _report(self, reason: str, details: str = "") -> None:
        if reason not in self._reported:
            self._reported.add(reason)
            _log.warning("A captured step runs eagerly: %s%s", reason, details)


# -- what a graph depends on ------------------------------------------------------------------------------------------


_OTHER_GRADS = "gradients were set outside of the step. Call zero_grad at its end."


@dataclass
class _Conditions:
    """Inputs of the decisions of the engine and of optimizers. See [Note: conditions of a replay].

    Values are numbers or object ids. `kept` keeps the objects alive, so that no other object gets the same id.
    """

    modes: tuple[Any, ...] = field(metadata={"what": "autocast, grad mode or another mode of torch has changed"})
    settings: tuple[Any, ...] = field(metadata={"what": "settings of units have changed"})
    modules: tuple[Any, ...] = field(
        metadata={"what": "modules were switched between training and evaluation, replaced, or have other hooks"}
    )
    hooks: tuple[Any, ...] = field(metadata={"what": "optimizers, parameters or all modules have other hooks"})
    params: tuple[Any, ...] = field(metadata={"what": "parameters or buffers were replaced, moved, frozen or unfrozen"})
    hyperparameters: tuple[Any, ...] = field(
        metadata={"what": "hyperparameters of an optimizer have changed, other than a learning rate in a tensor"}
    )
    states: tuple[Any, ...] = field(metadata={"what": "the state of an optimizer was replaced, as by load_state_dict"})
    has_grad: tuple[bool, ...] = field(metadata={"what": "other parameters have gradients when the step begins"})
    grads: list[Tensor | None] = field(compare=False)
    kept: list[Any] = field(compare=False)

    def change(self, now: _Conditions) -> str | None:
        """Return what has changed in `now`, or None."""
        for item in _COMPARED:
            if getattr(self, item.name) != getattr(now, item.name):
                return f"{item.metadata['what']}."
        return None


_COMPARED = [item for item in fields(_Conditions) if item.compare]


@dataclass
class _Capture:
    """A recorded step."""

    before: _Conditions
    after: _Conditions  # only its gradients are compared: later calls may start with them
    result: Any

    def change(self, now: _Conditions) -> str | None:
        """Return what has changed since the capture, or None."""
        change = self.before.change(now)
        if change is None and any(
            grad is not None and grad is not of_graph
            for grad, of_graph in zip(now.grads, self.after.grads, strict=True)
        ):
            return _OTHER_GRADS
        return change


class _StepParts:
    """The units and optimizers of a step, as found in its eager calls."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.calls: list[int] = []  # in the last context, the id of each called unit or optimizer, in order
        self.first_units: list[Unit] = []
        self.units: list[Unit] = []
        self.optimizers: list[Optimizer] = []
        self._rates: dict[tuple[int, int], Tensor] = {}
        self._modules: list[nn.Module] = []
        self._registrations = -1  # of parameters and modules in the process, when `_modules` was computed

    @property
    def are_known(self) -> bool:
        """True after an eager call."""
        return bool(self.units or self.optimizers)

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Find the units and optimizers that are used in this context."""
        called: dict[int, nn.Module] = {}
        self.calls = calls = []

        def before_forward(module: nn.Module, args: Any) -> None:
            if is_unit(module):
                called.setdefault(id(module), module)
                calls.append(id(module))

        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if optimizer in trials:
                return
            calls.append(id(optimizer))
            if not any(optimizer is known for known in self.optimizers):
                self.optimizers.append(optimizer)
                if "capturable" in optimizer.defaults:  # DTensors may lack a kernel for the first step of others
                    self.prepare_optimizers()

        with ExitStack() as stack:
            for handle in (
                register_module_forward_pre_hook(before_forward),
                register_optimizer_step_pre_hook(before_step),
            ):
                stack.callback(handle.remove)
            yield
        for module in called.values():
            if unit_of(module) not in self.units:
                self._add_root(runtime_of(module).units)

    def _add_root(self, units: Sequence[Unit]) -> None:
        """Add the units of a root.

        Later eager steps of these units queue the same collectives as a replay, because other ranks may replay. A
        replay gathers all parameters, including frozen ones.
        """
        for group in [group for unit in units for group in unit.param_groups]:
            group.gradients.state.is_replayed = True
        self.first_units.append(units[0])
        self.units += units
        self._registrations = -1  # the root's modules are not known yet

    def prepare_optimizers(self) -> None:
        """Move learning rates and step counts into tensors. See [Note: the learning rate of a graph]."""
        device = self._device
        for number, optimizer in enumerate(self.optimizers):
            leave_uncompared(optimizer)
            for index, group in enumerate(optimizer.param_groups):
                if device.type == "cuda" and group.get("capturable") is False:
                    group["capturable"] = True
                    for state in [optimizer.state.get(param, {}) for param in group["params"]]:
                        scalars = [
                            name for name, value in state.items() if isinstance(value, Tensor) and not value.ndim
                        ]
                        state.update({name: state[name].to(device) for name in scalars})
                if not (group.get("capturable") or group.get("fused")) or "lr" not in group:
                    continue
                lr, rate = group["lr"], self._rates.get((number, index))
                if rate is None and isinstance(lr, Tensor) and lr.device == device and lr.dtype == torch.float32:
                    if sum(other["lr"] is lr for other in optimizer.param_groups) == 1:
                        self._rates[number, index] = lr  # the user's tensor, unless several groups share it
                    continue
                if rate is None:
                    rate = self._rates[number, index] = torch.tensor(float(lr), dtype=torch.float32, device=device)
                elif isinstance(lr, Tensor) and lr is not rate:
                    rate.copy_(lr)
                elif not isinstance(lr, Tensor):
                    rate.fill_(lr)
                group["lr"] = rate

    def conditions(self) -> _Conditions:
        """Return the current conditions.

        Raises:
            StateError: `data` of a parameter was assigned, or it has a hook that would never be called.
        """
        for unit in self.units:
            for param_group in unit.param_groups:
                param_group.assignments.refuse()
        if self._registrations != number_of_registrations():
            self._registrations = number_of_registrations()
            self._modules = [module for unit in self.first_units for module in unit.module.modules()]
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        stepped = [param for group in groups for param in group["params"]]
        managed = [param for unit in self.units for param in unit.params]
        shards = [param.dtensor._local_tensor for param in managed]
        numbers = set(map(id, stepped))
        params = [*stepped, *(param.sharded for param in managed if id(param.sharded) not in numbers)]
        outside = [param for param in stepped if not isinstance(param, DTensor)]
        buffers = [buffer for module in self._modules for buffer in module._buffers.values()]
        grads = [param.grad for param in params]
        states = [optimizer.state for optimizer in self.optimizers]
        values = [value for state in states for param in stepped for value in state.get(param, {}).values()]
        hyperparameters = [(name, value) for group in groups for name, value in group.items() if name not in _NOT_READ]
        return _Conditions(
            modes=_modes(self._device.type),
            modules=tuple([(id(module), module.training, *module_hooks(module)) for module in self._modules]),
            hooks=(tuple(map(step_hooks, self.optimizers)), tuple(map(grad_hooks, params)), global_hooks()),
            settings=(
                switches.checks_finite,
                tuple([getattr(unit.settings, item.name) for unit in self.units for item in _SETTINGS]),
                tuple([unit.runtime.finalizes_manually for unit in self.first_units]),
            ),
            params=(
                tuple([(id(param), param.requires_grad) for param in params]),
                tuple(map(id, shards)),
                tuple([group.params[0].local.data_ptr() for unit in self.units for group in unit.param_groups]),
                tuple([param.data_ptr() for param in outside]),
                tuple(map(id, buffers)),
            ),
            hyperparameters=tuple(
                [(name, id(value) if isinstance(value, Tensor) else value) for name, value in hyperparameters]
            ),
            states=(tuple(map(id, states)), tuple([id(value) for value in values if isinstance(value, Tensor)])),
            has_grad=tuple([grad is not None for grad in grads]),
            grads=grads,
            kept=[params, shards, buffers, states, values, hyperparameters, self._modules],
        )

    def written_by_graphs(self) -> list[list[Tensor | None]]:
        """Return the engine's lists of gradients that graphs write to."""
        return [group.gradients.state.written_by_graphs for unit in self.units for group in unit.param_groups]

    def host_state(self) -> dict[str, Any]:
        """Return values that a replay would not update: numbers and versions of tensors in the states and groups of
        optimizers.

        Tensors that the kernels of a step write to are not included.
        """
        found: dict[str, Any] = {}
        for optimizer in self.optimizers:
            name_of = type(optimizer).__name__
            for number, state in enumerate(optimizer.state.values()):
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.device.type == "cpu":
                        found[f"{name_of}'s state {name!r} of parameter {number}"] = value._version
                    elif isinstance(value, int | float):
                        found[f"{name_of}'s state {name!r} of parameter {number}"] = value
            for number, group in enumerate(optimizer.param_groups):
                for name, value in group.items():
                    if name not in _NOT_READ:
                        version = value._version if isinstance(value, Tensor) else value
                        found[f"{name_of}'s hyperparameter {name!r} of group {number}"] = version
        return found

    def check(self, backends: frozenset[str]) -> None:
        """Raise if the step cannot be captured."""
        if not self.units:
            raise ConfigError(
                "The step did not call a sharded module, so there is nothing to capture. Call fully_shard first. "
                "For other modules, see make_graphed_callables of torch."
            )
        if not self.optimizers:
            raise ConfigError(
                "The step did not call an optimizer, so a replay would not accumulate gradients as eager calls do. "
                "Call optimizer.step() and optimizer.zero_grad() within the step."
            )
        if switches.checks_finite:
            raise ConfigError(
                "check_finite_gradients(True) waits for the device in each backward, which a CUDA graph cannot do. "
                "Call check_finite_gradients(False) first, or check the loss after the step."
            )
        for unit in self.units:
            policy = unit.options.offload.in_full
            if policy.optimizer or policy.parameters or policy.activations or policy.budget is not None:
                raise ConfigError(
                    f"{unit.name or 'the root'} has the offload policy {unit.options.offload}, whose copies need the "
                    "host in every step. A CUDA graph cannot do that. Shard it without offload, or do not capture."
                )
            if unit.runtime is not None and unit.runtime.finalizes_manually:
                raise ConfigError("Steps that are finalized manually, as in pipelines, cannot be captured.")
        for group in process_groups_along(self.units):
            backend = dist.get_backend_config(group)
            if not backends & {part.rpartition(":")[2] for part in str(backend).split(",")}:
                raise ConfigError(
                    f"Collectives of the backend {backend} cannot be captured in a CUDA graph. Expected: "
                    f"{', '.join(sorted(backends))}. Call init_process_group('nccl')."
                )

    @property
    def may_compare_ranks(self) -> bool:
        """True if eager steps compare parameters outside of units between ranks, which a replay would not do."""
        return any(unit.runtime.state.microbatches.outside for unit in self.first_units)

    def expect_broadcast(self) -> None:
        """Make the next forward broadcast buffers, as a replay does, even if an evaluation has already done so."""
        for unit in self.first_units:
            unit.runtime.state.microbatches.note_end()

    def note_step(self) -> None:
        """Record that a replay has changed parameters and buffers."""
        self.expect_broadcast()
        torch.autograd.graph.increment_version(
            [param for optimizer in self.optimizers for group in optimizer.param_groups for param in group["params"]]
        )


_SETTINGS = fields(UnitSettings)
_NOT_READ = {"params", "initial_lr", "max_lr", "min_lr", "swa_lr"}
"""Options of a parameter group that are compared separately, or that only schedulers read."""


def _modes(device_type: str) -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
    )


def _added(lists: Sequence[list[Any]], before: Sequence[int]) -> list[tuple[list[Any], Any]]:
    """Return the items of `lists` that were added since they had the lengths `before`, each with its list."""
    return [(kept, item) for kept, n in zip(lists, before, strict=True) for item in kept[n:]]


_OTHER_CALLS = "The step called other modules or optimizers than in the call before."


def _changed(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """Return a message if a step has changed a value on the host, which a replay would not change."""
    for name, value in after.items():
        if name in before and before[name] != value:
            if "hyperparameter" in name:
                remedy = "Call learning rate schedulers between the steps."
            else:
                remedy = "Use an optimizer with capturable=True, such as torch.optim.AdamW."
            return f"{name} is changed by each step on the host, which a CUDA graph would not repeat. {remedy}"
    return None


# -- inputs and results -----------------------------------------------------------------------------------------------


def _check_detached(tensor: Tensor) -> None:
    if tensor.requires_grad:
        raise ConfigError(
            f"An input of a captured step with the shape {tuple(tensor.shape)} requires a gradient, which a graph "
            "cannot return. Pass a detached tensor, or compute it within the step."
        )


_LEAVES = (Tensor, int, float, str, torch.dtype, torch.device, type(None))


class _InputBuffers:
    """The memory that a graph reads its inputs from."""

    def __init__(self, examples: list[Any], device: torch.device) -> None:
        leaves, self._spec = pytree.tree_flatten(examples)
        self._device = device
        for leaf in leaves:
            if not isinstance(leaf, _LEAVES):
                raise ConfigError(
                    f"capture(example_inputs): a {type(leaf).__name__} may contain tensors that would not be copied. "
                    "Pass tensors, numbers and strings in tuples, lists and dicts."
                )
            if isinstance(leaf, Tensor):
                _check_detached(leaf)
        self._leaves = [torch.zeros_like(leaf, device=device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.arguments: list[Any] = pytree.tree_unflatten(self._leaves, self._spec)

    def take(self, inputs: Sequence[Any]) -> tuple[str, str] | None:
        """Copy `inputs` to the memory of the graph. Return None, or if they do not fit, the reason and details."""
        leaves, spec = pytree.tree_flatten(list(inputs))
        if spec != self._spec:
            return "arguments are nested in another way than the examples.", ""
        for number, (leaf, known) in enumerate(zip(leaves, self._leaves, strict=True)):
            if isinstance(leaf, Tensor) and isinstance(known, Tensor):
                _check_detached(leaf)
                if leaf.shape != known.shape or leaf.dtype != known.dtype:
                    details = f" {tuple(leaf.shape)}, {leaf.dtype} is not {tuple(known.shape)}, {known.dtype}."
                    return f"tensor {number} has a different shape or dtype than the example.", details
            elif isinstance(leaf, Tensor) or isinstance(known, Tensor) or leaf != known:
                return (
                    f"argument {number} has a different value than the example.",
                    f" {leaf!r:.100} is not {known!r:.100}.",
                )
        for leaf, buffer in zip(leaves, self._leaves, strict=True):
            if isinstance(buffer, Tensor):
                buffer.copy_(leaf, non_blocking=True)
        return None

    def on_device(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Return `inputs` with tensors on the device, for an eager call."""

        def move(leaf: Any) -> Any:
            return leaf.to(self._device, non_blocking=True) if isinstance(leaf, Tensor) else leaf

        moved: Sequence[Any] = pytree.tree_map(move, list(inputs))
        return moved


def _detached(result: Any, *, copies: bool = True) -> Any:
    """Return `result` with detached tensors, copied if `copies`, because the next replay overwrites them."""

    def detach(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().clone() if copies else leaf.detach()

    return pytree.tree_map(detach, result)


def _problem_of(result: Any, device: torch.device) -> str | None:
    """Return a message if a replay would not update a part of `result`."""
    for leaf in pytree.tree_leaves(result):
        if leaf is None or isinstance(leaf, str) or (isinstance(leaf, Tensor) and leaf.device.type == device.type):
            continue
        shown = f"a tensor on {leaf.device}" if isinstance(leaf, Tensor) else f"{leaf!r:.100}"
        return f"The step returned {shown}, which a replay would not update. Return tensors on {device} or None."
    return None


# -- lines of the user's code -----------------------------------------------------------------------------------------

_LIBRARIES = (
    *(str(Path(module.__file__ or "").parent) for module in (torch, sys.modules[__package__])),
    warnings.__file__,  # it calls the function that records a wait
    "<",  # code without a file
)


def _line_of(frame: FrameType | None) -> str:
    """Return the innermost line of user code on the stack of `frame`."""
    calls = []
    while frame is not None:
        calls.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return _innermost(calls)


def _line_of_error(error: Exception) -> str:
    """Return the innermost line of user code that an exception went through."""
    calls, traceback = [], error.__traceback__
    while traceback is not None:
        calls.append((traceback.tb_frame.f_code.co_filename, traceback.tb_lineno))
        traceback = traceback.tb_next
    return _innermost(calls[::-1])


def _innermost(calls: Sequence[tuple[str, int]]) -> str:
    for file, number in calls:
        if not file.startswith(_LIBRARIES):
            return f"{file}:{number} ({linecache.getline(file, number).strip()})"
    return "an operation of backward"
