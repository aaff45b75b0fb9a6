"""Errors that name a parameter that is used while it is sharded. Torch's own errors name types only.

Calling a module whose parameters are sharded raises an error. Use of a sharded parameter in a function can only be
detected after it has failed. If the exception ends the process, a text is printed after the traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import cache
from traceback import walk_tb
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard._compat import explain_backwards, implicitly_replicates, own_hook
from fullshard.engine.managed import Managed, managed_by
from fullshard.engine.nested import tensors_in
from fullshard.engine.validity import is_invalid, owner_of_version
from fullshard.errors import StateError

_HOOK = "fullshard: sharded parameters"  # the key among a module's hooks; torch's own keys are numbers


def refuse_calls(modules: Sequence[nn.Module]) -> None:
    """Make calls of `modules` raise an error while their parameters are sharded."""
    for module in modules:
        module._forward_pre_hooks[_HOOK] = _check_unsharded  # type: ignore[index]  # hooks are looked up by position


def accept_calls(modules: Sequence[nn.Module]) -> None:
    """Make `modules` callable again, by removing the hooks of `refuse_calls`."""
    for module in modules:
        hooks: dict[Any, Any] = module._forward_pre_hooks
        if _HOOK in hooks:
            del hooks[_HOOK]  # noqa: RUF051  # `pop` would be a call for each module in each microbatch


@own_hook
def _check_unsharded(module: nn.Module, args: Any) -> None:
    given = tensors_in(args)
    if implicitly_replicates() or not given or any(isinstance(tensor, DTensor) for tensor in given):
        return
    for name, param in module._parameters.items():
        managed = None if param is None else managed_by(param)
        if managed is not None and param is managed.param.sharded:
            unit, kind = managed.unit, type(module).__name__
            raise StateError(
                f"{kind} was called while its {name} ({managed.param.fqn} of {unit.name or 'the root'}) is sharded. "
                f"It is unsharded only during forward and backward of its unit, {type(unit.module).__name__}. Call "
                f"that module instead; or make {kind} a separate unit with fully_shard before the modules around it; "
                "or register the unit's method that calls it with register_fsdp_forward_method(module, name); or "
                "call it between unshard() and reshard() of the unit, or within summon_full_params."
            )


def read_while_sharded(fqn: str, unit: str) -> StateError:
    """Return the error for a backward that reads unsharded parameters without valid values."""
    unit = unit or "the root"
    return StateError(
        f"backward reads {fqn} of {unit} while {unit} is not unsharded, so the memory of {fqn} does not hold its "
        "values. A tensor that was computed from it left the unit's forward where no hook sees it, so backward did not "
        "unshard the unit. Return the tensor from the unit's forward (in a list, tuple, dict, dataclass, or an "
        "attribute of an object), or set it as an attribute of one of the unit's modules during forward. Otherwise, "
        "call unshard() on the unit before backward, or set_reshard_after_forward(False) before the first forward."
    )


@cache
def explain_reads() -> None:
    """Make errors name the parameter if a later backward reads a saved parameter without valid values.

    Also make `autograd.grad` and `backward(inputs=...)` raise an error if they reach none of their sharded parameters.
    """
    explain_backwards(_explain_version, _refuse_unreached)


def _refuse_unreached(inputs: Sequence[Any], unreached: Sequence[Any]) -> None:
    """Raise an error if a pass for sharded parameters reached none of them. A penalty on them reaches some."""
    sharded = [managed for managed in map(_sharded_form, inputs) if managed is not None]
    missed = sum(_sharded_form(given) is not None for given in unreached)
    if sharded and missed == len(sharded):
        fqn, unit = sharded[0].param.fqn, sharded[0].unit.name or "the root"
        raise StateError(
            f"backward was called for the gradient of {fqn} of {unit}, a sharded parameter, but the graph of a forward "
            "has the unsharded parameter. Call loss.backward() without inputs=, and read param.grad. To choose "
            "parameters, set requires_grad before the forward. For torch.autograd.grad, call unshard() on the units, "
            "list the parameters, and then run the forward: the gradients are those of this rank, not averaged."
        )


def _sharded_form(given: Any) -> Managed | None:
    managed = managed_by(given) if isinstance(given, Tensor) else None
    return None if managed is None or given is managed.param.unsharded else managed


def check_saved(tensor: Tensor) -> Tensor:
    """Check and return `tensor`, which backward is about to read.

    Raises:
        StateError: `tensor` is a view of an unsharded parameter without valid values.
    """
    if is_invalid(tensor._version):
        raise _explain_version(tensor._version) or StateError("backward reads a parameter of a model that was deleted.")
    return tensor


def _explain_version(version: int) -> StateError | None:
    param = owner_of_version(version)
    if param is None:
        return None
    managed = managed_by(param.sharded)
    unit = "its unit" if managed is None else managed.unit.name
    if is_invalid(version):
        return read_while_sharded(param.fqn, unit)
    return StateError(
        f"backward needs {param.fqn} of {unit or 'the root'} with its values from forward, but they are lost. An "
        "optimizer stepped between forward and backward, or the unit was moved, cast or loaded there, or the parameter "
        "was modified in place and then resharded. Run backward before the step, or forward again after it. Do not "
        "write to parameters in forward: compute with a new tensor instead."
    )


@cache
def explain_mixtures() -> None:
    """Print, after the traceback of an uncaught error about mixed tensor types, which parameters may be the cause."""
    known = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        known(kind, error, traceback)
        if isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in str(error):
            names = list(dict.fromkeys(_sharded_in(traceback)))
            if names:
                sys.stderr.write(
                    "[fullshard] Sharded parameters in scope there: "
                    f"{', '.join(names[:3])}{' and others' if names[3:] else ''}. Outside forward and backward of "
                    "their unit, sharded parameters are DTensors. To compute with them, call unshard() on the unit "
                    "before and reshard() after; or use summon_full_params; or make the function a method of the "
                    "unit and call register_fsdp_forward_method(module, name).\n"
                )
            if "_foreach_" in str(error):
                sys.stderr.write(
                    "[fullshard] A foreach operation received sharded parameters and plain buffers in one list, as "
                    "in averages of weights. Use get_ema_avg_fn (avg_fn) instead of get_ema_multi_avg_fn for torch's "
                    "AveragedModel, or foreach=False for timm's ModelEmaV3.\n"
                )

        if isinstance(error, RuntimeError) and "_NormPartial" in str(error):
            sys.stderr.write(
                "[fullshard] The norm of a sharded parameter is a sum over ranks, which torch cannot change in place. "
                "In your code, write norm.clamp(...) instead of norm.clamp_(...). Some libraries do this in LAMB and "
                "in adaptive gradient clipping: use other ones, such as AdamW and fullshard.clip_grad_norm_.\n"
            )

    sys.excepthook = excepthook


def _sharded_in(traceback: TracebackType | None) -> Iterator[str]:
    """Yield the sharded parameters in local variables of the frames, and in modules there, innermost first."""
    for frame, _ in reversed(list(walk_tb(traceback))):
        for value in frame.f_locals.values():
            held = value.parameters() if isinstance(value, nn.Module) else [value]
            for param in held:
                managed = managed_by(param) if isinstance(param, nn.Parameter) else None
                if managed is not None and param is managed.param.sharded:
                    yield f"{managed.param.fqn} of {managed.unit.name or 'the root'}"
