"""Checks that a checkpoint fits the model and the optimizer, before anything is overwritten."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fullshard._compat import outside_of_modes
from fullshard.checkpoint.encoded import describes_4_bits
from fullshard.checkpoint.opening import Opened
from fullshard.checkpoint.saved import Saved
from fullshard.errors import CheckpointError
from fullshard.optim.elementwise import clone_for
from fullshard.state.names import FORM
from fullshard.state.optim_kinds import SavedOptions, groups_by_owner
from fullshard.state.optim_state import StateTemplate

_LISTED = 20  # maximum FQNs listed per kind
_REMEDY = "Build the model and optimizer as they were when it was saved, and pass only what was saved."
_EXTRA_STATE = "_extra_state"  # the name of tensors that modules add to their state, with any shape


@dataclass
class Misfit:
    """The names of mismatches, by kind."""

    absent: list[str] = field(default_factory=list)  # requested parts that are missing entirely
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    untied: list[str] = field(default_factory=list)
    encoded: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)

    def __add__(self, other: Misfit) -> Misfit:
        return Misfit(*(getattr(self, kind.name) + getattr(other, kind.name) for kind in fields(self)))

    def check(self, what: str = "the checkpoint", remedy: str = _REMEDY) -> None:
        """Raise an error if there is a mismatch. The message begins with `what` and ends with `remedy`.

        Raises:
            CheckpointError: There is a mismatch. The message lists all of them.
        """
        kinds = {
            "it has no": self.absent,
            "missing in it:": self.missing,
            "unexpected in it:": self.unexpected,
            "of a different shape:": self.misshapen,
            "tied in the model, but not in the checkpoint:": self.untied,
            "encoded otherwise:": self.encoded,
            "state of another optimizer:": self.kinds,
        }
        misfits = [f"{kind} {_listed(names)}" for kind, names in kinds.items() if names]
        if misfits:
            raise CheckpointError(f"{what} does not fit; {'; '.join(misfits)}. Nothing was overwritten. {remedy}")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def fit_model(
    saved: Saved, opened: Opened, state: Mapping[str, Any], tied: Mapping[str, str]
) -> tuple[dict[str, str], Misfit]:
    """Return the key of each tensor in `state`, and the mismatches. Tied tensors only have their first name."""
    sizes, misfit = opened.sizes(), Misfit()
    keys: dict[str, str] = {}
    for fqn, value in state.items():
        if fqn in tied:
            continue
        known = saved.tensors if isinstance(value, Tensor) else saved.values
        aliases = [other for other, first in tied.items() if first == fqn]
        names = [name for name in (fqn, *aliases) if name in known]
        if not names:
            misfit.missing.append(fqn)
        elif isinstance(value, Tensor):
            keys[fqn] = saved.tensors[names[0]]
            size, dtype = sizes[keys[fqn]], opened.dtype(keys[fqn])
            has_own_length = fqn.rpartition(".")[2] == _EXTRA_STATE or describes_4_bits(fqn)
            if size != value.shape and not has_own_length:
                misfit.misshapen.append(f"{fqn} ({tuple(size)} in it, {tuple(value.shape)} in the model)")
            elif not torch.can_cast(dtype, value.dtype):  # such as floating-point values into integers
                misfit.misshapen.append(f"{fqn} ({dtype} in it, {value.dtype} in the model)")
            if saved.ties is not None and len({saved.ties.get(name, name) for name in names}) > 1:
                misfit.untied.append(" and ".join(names))
    misfit.unexpected += [fqn for fqn in (*saved.tensors, *saved.values) if fqn not in state]
    return keys, misfit


def fit_optimizer(saved: Saved, opened: Opened, template: StateTemplate) -> Misfit:
    """Return the mismatches between the saved optimizer state and the optimizer that `template` describes."""
    if saved.groups is None:
        return Misfit(absent=["optimizer"])
    stepped = [fqn for group in saved.groups for fqn in group.fqns]
    sizes = opened.sizes()
    misshapen = []
    for fqn, (_, states) in saved.states.items():
        for name, (kind, key) in states:
            present = template.present(fqn, name) if fqn in template.fqns and kind == "tensor" else None
            if present is not None and present.shape != sizes[key]:
                misshapen.append(
                    f"{name!r} of {fqn} in the optimizer ({tuple(sizes[key])} in it, {tuple(present.shape)} in the "
                    "optimizer)"
                )
    forms = [
        template.misfit_of_form(fqn, names, names[FORM][1] if FORM in names else None)
        for fqn, names in ((fqn, dict(states)) for fqn, (_, states) in saved.states.items())
        if fqn in template.fqns
    ]
    options = [SavedOptions(group.fqns, dict(group.options[1]), group.kinds) for group in saved.groups]
    kind = template.misfit_of_kind(options)
    return Misfit(
        missing=[
            *(f"{fqn} in the optimizer" for fqn in template.fqns if fqn not in stepped),
            *(() if kind else _missing_states(saved, template)),
        ],
        unexpected=[
            f"{fqn} in the optimizer" for fqn in dict.fromkeys([*stepped, *saved.states]) if fqn not in template.fqns
        ],
        misshapen=misshapen,
        encoded=[misfit for misfit in forms if misfit is not None],
        kinds=[] if kind is None else [kind],
    )


def _missing_states(saved: Saved, template: StateTemplate) -> Iterator[str]:
    """Yield the states that the next step reads, but that were not saved.

    A parameter without any state has not been stepped, and its first step creates its states.
    """
    options = {fqn: dict(group.options[1]) for group in saved.groups or () for fqn in group.fqns}
    known: dict[str, frozenset[str]] = {}
    groups = groups_by_owner(template.optimizer)
    params = ((owner, group, param) for owner, group in groups for param in group["params"])
    for fqn, (owner, group, param) in zip(template.fqns, params, strict=True):
        names = dict(saved.states[fqn][1]) if fqn in saved.states else {}
        if not names or FORM in names:
            continue
        plain = {**group, **{name: value for name, (kind, value) in options.get(fqn, {}).items() if kind == "value"}}
        plain = {name: value for name, value in plain.items() if name not in ("params", "param_names", "lr")}
        case = f"{id(owner)} {param.ndim} {plain}"
        if case not in known:
            known[case] = _states_after_step(owner, plain, param.ndim)
        yield from (f"{name!r} of {fqn} in the optimizer" for name in sorted(known[case] - names.keys()))


def _states_after_step(optimizer: Optimizer, options: Mapping[str, Any], dims: int) -> frozenset[str]:
    """Return the names of the states of a parameter after its first step; empty if that is unknown.

    It is determined by a step of a new optimizer of the same class, if that is a class of torch.
    """
    if not type(optimizer).__module__.startswith("torch.optim"):
        return frozenset()
    param = torch.zeros((1,) * dims, device="cpu", requires_grad=True)
    param.grad = torch.zeros_like(param)
    on_cpu = {name: False if name == "capturable" else value for name, value in options.items()}
    try:
        with outside_of_modes(), torch.no_grad():
            made = clone_for(optimizer, [on_cpu], [[param]])
            made.step()
    except Exception:  # the class needs a closure or other gradients, or the options cannot be used
        return frozenset()
    return frozenset(made.state[param])
