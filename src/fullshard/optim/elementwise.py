"""Checks whether an optimizer can step shards, by its name, a trial on test tensors, or a comparison with full tensors.

Stepping shards gives the results of a single process only if the step treats each element separately. Norms, means,
and factored or projected states need the full parameter.
"""

from __future__ import annotations

import inspect
import logging
import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard._compat import outside_of_modes
from fullshard.engine.managed import managed_by
from fullshard.errors import ConfigError

_log = logging.getLogger(__name__)

trials: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers that were created here for a trial or a comparison. The rest of this package ignores them."""

_INSTEAD = {"muon": "Use Muon of fullshard.optim", "adafactor": "Use AdamW, or Muon of fullshard.optim for matrices"}
_NEED_WHOLES = frozenset(
    {
        *("adafactor", "adafactorbigvision", "adahessian", "adalomo", "adammini", "adamp", "apollo", "came"),
        *("dadaptadagrad", "dadaptadam", "dadaptadan", "dadaptlion", "dadaptsgd", "dion", "distributedshampoo"),
        *("fira", "fromage", "galoreadafactor", "galoreadamw", "kron", "lamb", "lars", "lbfgs", "lomo", "mars", "muon"),
        *("normuon", "novograd", "nvnovograd", "prodigy", "psgd", "pytorchlars", "ranger", "ranger21", "rangerva"),
        *("sam", "scalableshampoo", "scion", "sgdp", "shampoo", "sm3", "soap", "stableadamw"),
    }
)
_SUFFIX = re.compile(r"_?(\d+bit|fp8)$")

_ROWS, _COLUMNS, _STEPS, _PARTS = 256, 160, 6, 2
_LARGEST_GROUPS = 4
_TOLERANCE = 1e-4  # of the largest change of an element of the parameter


def check_name(optimizer: Optimizer) -> None:
    """Raise `ConfigError` if `optimizer`, or one of its base classes, is known to need full parameters."""
    for kind in type(optimizer).__mro__:
        name = _known_name(kind.__name__)
        if name is not None:
            raise ConfigError(
                f"{type(optimizer).__name__} computes sums over full parameters, but each rank has only a part of "
                f"them. {_INSTEAD.get(name, 'Use AdamW')}, or keep parameters whole with strategy='ddp'."
            )
    clipped = next((group["max_unorm"] for group in _options(optimizer) if group.get("max_unorm")), 0)
    if clipped:
        raise ConfigError(
            f"{type(optimizer).__name__} with max_unorm={clipped} computes norms of full parameters, but each rank "
            "has only a part of them. Leave max_unorm out, or keep parameters whole with strategy='ddp'."
        )


def _known_name(name: str) -> str | None:
    lowered = name.lower()
    return next((item for item in (lowered, _SUFFIX.sub("", lowered)) if item in _NEED_WHOLES), None)


def _options(optimizer: Any) -> list[Mapping[str, Any]]:
    args = getattr(optimizer, "args", None)
    return [*optimizer.param_groups, vars(args) if hasattr(args, "__dict__") else {}]


# -- a trial on test tensors ------------------------------------------------------------------------------------------


def check_elementwise(optimizer: Optimizer) -> None:
    """Raise if steps of `optimizer` on two halves of test tensors differ from steps on the full tensors.

    Two optimizers of its class step the halves, as two ranks would, without communication. A warning is logged if the
    optimizer cannot be tested, or if its states indicate that later steps need full parameters.

    Raises:
        ConfigError: The steps differ.
    """
    kind = type(optimizer).__name__
    try:
        wholes, parts, shapes = _try_both(optimizer)
        again = _try_both(optimizer, seed=1)[0]
    except Exception as error:
        _log.warning(
            "step_shards(%s): its step could not be tested (%s: %s). Results are correct only if it treats each "
            "element, or each block of elements, separately. step_shards(optimizer, verify=True) compares the first "
            "steps with full tensors.",
            *(kind, type(error).__name__, str(error).partition("\n")[0]),
        )
        return
    if _difference(wholes, again) > 0:
        _log.warning(
            "step_shards(%s): its steps are random, so they cannot be tested. Results are correct only if it treats "
            "each element, or each block of elements, separately.",
            kind,
        )
        return
    difference = _difference(wholes, parts)
    if difference > _TOLERANCE:
        raise ConfigError(
            f"{kind} needs full parameters, but each rank has only a part of them: its steps on the halves of test "
            f"tensors differ from those on the full tensors by {difference:.2g} of the largest step. Use AdamW or "
            "another optimizer that treats each element separately, or keep parameters whole with strategy='ddp'."
        )
    if shapes:
        _log.warning(
            "step_shards(%s): its state %r has shape %s for a parameter of shape %s. Steps on test tensors do not "
            "depend on it yet. If later steps need full parameters, keep parameters whole with strategy='ddp'; "
            "step_shards(optimizer, verify=True) compares the first steps with full tensors.",
            *(kind, *shapes[0]),
        )


Updates = list[Tensor]  # the change of each parameter in each step
Shapes = list[tuple[str, tuple[int, ...], tuple[int, ...]]]


def _try_both(optimizer: Optimizer, seed: int = 0) -> tuple[Updates, Updates, Shapes]:
    """Step full test tensors and parts of them. Return both updates, and the states not shaped like the parameter."""
    device = next(param.device for group in optimizer.param_groups for param in group["params"])
    for where in dict.fromkeys([torch.device("cpu"), device]):
        if where.type == "meta":
            continue
        devices = [] if where.type == "cpu" else [where]
        try:
            with outside_of_modes(), torch.random.fork_rng(devices, device_type=device.type), torch.no_grad():
                torch.manual_seed(seed)
                whole, shapes = _steps_of(optimizer, where, 0, 1)
                parts = [_steps_of(optimizer, where, part, _PARTS)[0] for part in range(_PARTS)]
        except Exception:
            if where == device:
                raise
        else:
            return whole, [torch.cat(of_param) for of_param in zip(*parts, strict=True)], shapes
    raise RuntimeError(f"parameters are on {device}")


def _steps_of(optimizer: Optimizer, device: torch.device, part: int, parts: int) -> tuple[Updates, Shapes]:
    """Return the updates of part number `part` of `parts` of the test tensors in a few steps, and state shapes."""
    generator = torch.Generator().manual_seed(0)
    groups = optimizer.param_groups[:_LARGEST_GROUPS]
    drawn = [[_draw(generator, shape) for shape in ((_ROWS, _COLUMNS), (_ROWS,))] for _ in groups]
    params = [[_part(item, part, parts).to(device).requires_grad_() for item in group] for group in drawn]
    made = clone_for(optimizer, groups, params, lr=1e-2)
    flat = [param for group in params for param in group]
    updates = []
    for step in range(_STEPS):
        for param, whole in zip(flat, (item for group in drawn for item in group), strict=True):
            grad = _draw(generator, tuple(whole.shape))
            grad[_ROWS // 2 :] *= 10.0 ** (step % 3 - 1)  # sums over rows differ between parts and steps
            param.grad = _part(grad, part, parts).to(device)
        before = [param.detach().clone() for param in flat]
        made.step()
        updates += [(param.detach() - old).double().cpu() for param, old in zip(flat, before, strict=True)]
    shapes = [
        (name, tuple(value.shape), tuple(param.shape))
        for param in flat
        for name, value in made.state.get(param, {}).items()
        if isinstance(value, Tensor) and value.numel() > 1 and value.shape != param.shape
    ]
    return updates, shapes


def _draw(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=generator, device="cpu")


def _part(whole: Tensor, part: int, parts: int) -> Tensor:
    return whole.chunk(parts)[part].clone()


def _difference(expected: Iterable[Tensor], found: Iterable[Tensor]) -> float:
    """Return the largest difference beyond float32 rounding, relative to the largest element of the same tensor."""
    worst = 0.0
    for one, other in zip(expected, found, strict=True):
        largest = float(one.abs().max()) or 1e-12
        worst = max(worst, (float((one - other).abs().max()) - 1e-6) / largest)
    return worst


# -- optimizers of the same class -------------------------------------------------------------------------------------


def clone_for(
    optimizer: Optimizer,
    groups: Sequence[Mapping[str, Any]],
    params: Sequence[Sequence[Tensor]],
    lr: float | None = None,
) -> Optimizer:
    """Return a new optimizer with the class and options of `optimizer`, for other parameters.

    Args:
        optimizer: the template.
        groups: the parameter groups with the options. Their parameters are left out.
        params: The parameters of each group.
        lr: replaces all learning rates; None keeps them.
    """
    given = []
    for group, of_group in zip(groups, params, strict=True):
        options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        if lr is not None and isinstance(options.get("lr"), int | float | Tensor):
            options["lr"] = lr if isinstance(options["lr"], int | float) else torch.full_like(options["lr"], lr)
        given.append({**options, "params": list(of_group)})
    known = {**_plain(vars(optimizer)), **optimizer.defaults}
    if lr is not None and isinstance(known.get("lr"), int | float):
        known["lr"] = lr
    _, *others = list(inspect.signature(type(optimizer).__init__).parameters.values())[1:]
    arguments = {
        other.name: known[other.name] for other in others if other.name in known and other.kind is not other.VAR_KEYWORD
    }
    with torch.enable_grad():
        made = type(optimizer)(given, **arguments)
    trials.add(made)
    if callable(getattr(made, "train", None)):
        made.train()  # type: ignore[attr-defined]  # schedule-free optimizers
    return made


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in values.items() if value is None or isinstance(value, bool | int | float | str)
    }


# -- a comparison with full tensors -----------------------------------------------------------------------------------


@dataclass
class StepComparison:
    """Compares the first steps of an optimizer on shards with those of a reference optimizer on full tensors."""

    optimizer: weakref.ref[Optimizer]
    steps_left: int = 3
    made: Optimizer | None = None

    def begin(self, args: Any, kwargs: Any) -> None:
        """Gather parameters and gradients, and run a step of the reference optimizer. This is a collective."""
        optimizer = self._optimizer
        if args or kwargs:
            raise ConfigError(
                f"{type(optimizer).__name__}.step was called with arguments, while step_shards(verify=True) compares "
                "its steps. Call backward, and then step(), in the first steps."
            )
        if self.made is None:
            if any(optimizer.state.values()):
                raise ConfigError(
                    f"step_shards(verify=True): {type(optimizer).__name__} already has states, but the reference "
                    "optimizer starts without states. Verify before load_state_dict and before the first step."
                )
            wholes = [[_whole(param).requires_grad_() for param in group["params"]] for group in optimizer.param_groups]
            self.made = clone_for(optimizer, optimizer.param_groups, wholes)
        for group, own in zip(self.made.param_groups, optimizer.param_groups, strict=True):
            group.update({name: value for name, value in own.items() if name not in ("params", "param_names")})
            for whole, param in zip(group["params"], own["params"], strict=True):
                whole.grad = None if param.grad is None else _whole(param.grad)
        self._before = [whole.detach().clone() for whole in self._wholes]
        self.made.step()

    def end(self) -> bool:
        """Gather parameters again and compare. Return True after the last step that is compared. This is a collective.

        Raises:
            ConfigError: The results differ. The error is raised on every rank.
        """
        self.steps_left -= 1
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        for param, whole, before in zip(params, self._wholes, self._before, strict=True):
            found, expected = _whole(param).double(), whole.detach().double()
            largest = float((expected - before.double()).abs().max()) if expected.numel() else 0.0
            rounding = 2 * torch.finfo(whole.dtype).eps * float(expected.abs().max()) if expected.numel() else 0.0
            off = float((found - expected).abs().max()) if expected.numel() else 0.0
            if not off <= _TOLERANCE * largest + rounding:
                managed = managed_by(param)
                name = "a parameter" if managed is None else managed.param.fqn
                raise ConfigError(
                    f"{type(self._optimizer).__name__} needs full parameters, but each rank has only a part of them: "
                    f"the step of {name} of shape {tuple(whole.shape)} on shards differs from that on the full "
                    f"tensor by {off:.2g}, and the largest step of an element is {largest:.2g}. Use AdamW or another "
                    "optimizer that treats each element separately, or keep parameters whole with strategy='ddp'."
                )
        return self.steps_left <= 0

    @property
    def _optimizer(self) -> Optimizer:
        optimizer = self.optimizer()
        assert optimizer is not None
        return optimizer

    @property
    def _wholes(self) -> list[Tensor]:
        assert self.made is not None
        return [whole for group in self.made.param_groups for whole in group["params"]]


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()
