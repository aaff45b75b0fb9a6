"""State dicts of optimizers: sharded or full, with the FQNs of the user's own module as keys.

`optimizer.state_dict()` numbers its parameters, so it can only be loaded where they come in the same order. Here they
have names, and a full state dict can be loaded at any world size and under any strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.errors import ConfigError
from fullshard.runtime import clean_fqn
from fullshard.sharded_param import whole_of
from fullshard.state_dict import (
    FullOptimStateDictConfig,
    StateDictType,
    device_of,
    get_state_dict_type,
    groups_of,
    is_first_rank,
    shard_of,
)
from fullshard.unit import managed_by

__all__ = ["full_optim_state_dict", "optim_state_dict", "optim_state_dict_to_load", "sharded_optim_state_dict"]

StateDict = dict[str, Any]


def optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, optim_state_dict: StateDict | None = None
) -> StateDict:
    """The state of `optim`, by FQN, in the form that `model` is set to give: full on every rank, unless set otherwise.

    Every rank must call it. A full one is a copy; the tensors of a sharded one are the optimizer's own.

    Args:
        model: has the parameters that `optim` steps.
        optim: made after `model` was sharded.
        optim_state_dict: used in place of `optim.state_dict()`.

    Returns:
        `{"state": {fqn: {name: value}}, "param_groups": [{..., "params": [fqn]}]}`; empty on all ranks but the first if
        `rank0_only` is set.

    Raises:
        ConfigError: `optim` has a parameter that is not in `model`.
    """
    settings = get_state_dict_type(model)
    config = settings.optim_state_dict_config
    named = _named(model, optim, optim_state_dict or optim.state_dict())
    if settings.state_dict_type is not StateDictType.FULL_STATE_DICT:
        return _mapped(named, lambda value: value.cpu()) if config.offload_to_cpu else named
    assert isinstance(config, FullOptimStateDictConfig)
    return _gathered(named, keep=not config.rank0_only or is_first_rank(model), offload=config.offload_to_cpu)


def full_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, *, rank0_only: bool = True) -> StateDict:
    """The state of `optim` by FQN with whole tensors on the CPU, whatever `model` is set to give."""
    named = _named(model, optim, optim.state_dict())
    return _gathered(named, keep=not rank0_only or is_first_rank(model), offload=True)


def sharded_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer) -> StateDict:
    """The state of `optim` by FQN with `DTensor`s, whatever `model` is set to give."""
    return _named(model, optim, optim.state_dict())


def optim_state_dict_to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: StateDict | None,
    load_directly: bool = False,
    *,
    from_first_rank: bool | None = None,
) -> StateDict:
    """What `optim.load_state_dict` takes, from what `optim_state_dict` gave: each rank cuts its own part.

    Args:
        model: has the parameters that `optim` steps.
        optim: what to load into; its groups may differ from those that were saved.
        optim_state_dict: full or sharded. Not changed.
        load_directly: whether to load it as well.
        from_first_rank: whether only the first rank has `optim_state_dict`, and sends it to the others; what
            `rank0_only` of `model`'s settings says, if None.

    Raises:
        ConfigError: a parameter of `optim` is not in `model`, or the state dict has one that is not in `optim`.
    """
    config = get_state_dict_type(model).optim_state_dict_config
    if from_first_rank is None:
        from_first_rank = isinstance(config, FullOptimStateDictConfig) and config.rank0_only
    params = _params_by_fqn(model, optim)
    given = _received(optim_state_dict, model) if from_first_rank else optim_state_dict or {}
    _check_names(given, params)
    numbers = {fqn: number for number, fqn in enumerate(params)}
    state = {}
    for fqn, values in given["state"].items():
        state[numbers[fqn]] = {name: _like(params[fqn], name, value) for name, value in values.items()}
    loadable = {"state": state, "param_groups": _groups(optim, given["param_groups"], list(params))}
    if load_directly:
        optim.load_state_dict(loadable)
    return loadable


def _params_by_fqn(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The parameters of `optim` by FQN, in the order in which `optim` numbers them."""
    fqns = {id(param): clean_fqn(name) for name, param in model.named_parameters()}
    found: dict[str, nn.Parameter] = {}
    for param in (param for group in optim.param_groups for param in group["params"]):
        if id(param) not in fqns:
            raise ConfigError(
                f"{type(optim).__name__} has a parameter of shape {tuple(param.shape)} that is not in the model. Make "
                "the optimizer from model.parameters() after the model is sharded."
            )
        found[fqns[id(param)]] = param
    return found


def _named(model: nn.Module, optim: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> StateDict:
    """`state_dict`, which numbers parameters, with their FQNs instead."""
    fqns = list(_params_by_fqn(model, optim))
    state = {fqns[key] if isinstance(key, int) else key: dict(value) for key, value in state_dict["state"].items()}
    groups = [
        {**group, "params": [fqns[key] if isinstance(key, int) else key for key in group["params"]]}
        for group in state_dict["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def _mapped(named: StateDict, function: Callable[[Tensor], Any]) -> StateDict:
    """`named` with `function` applied to every tensor of its state."""
    state = {
        fqn: {name: function(value) if isinstance(value, Tensor) else value for name, value in values.items()}
        for fqn, values in named["state"].items()
    }
    return {**named, "state": state}


def _gathered(named: StateDict, *, keep: bool, offload: bool) -> StateDict:
    """`named` with whole tensors, one gathered after the other. Without `keep` each is dropped at once."""

    def gather(value: Tensor) -> Tensor | None:
        whole = whole_of(value) if isinstance(value, DTensor) else value.clone() if keep else value
        if not keep:
            return None
        return whole.cpu() if offload else whole

    whole = _mapped(named, gather)
    return whole if keep else {}


# -- the way back -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Absent:
    """A tensor that is still to come."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _received(state_dict: StateDict | None, model: nn.Module) -> StateDict:
    """The first rank's `state_dict` on every rank: its numbers and names at once, its tensors one after another."""
    groups, device = groups_of(model), device_of(model)
    mine = state_dict if state_dict and is_first_rank(model) else None
    skeleton: list[Any] = [mine and _mapped(mine, lambda value: _Absent(tuple(value.shape), value.dtype))]
    for group in groups:
        dist.broadcast_object_list(skeleton, group=group, group_src=0, device=device)
    received: StateDict = skeleton[0] or {}
    for fqn, values in received.get("state", {}).items():
        for name, value in values.items():
            if isinstance(value, _Absent):
                tensor = torch.empty(value.shape, dtype=value.dtype, device=device)
                if mine is not None:
                    tensor.copy_(mine["state"][fqn][name])
                for group in groups:
                    dist.broadcast(tensor, group=group, group_src=0)
                values[name] = tensor
    return received


def _check_names(given: StateDict, params: Mapping[str, nn.Parameter]) -> None:
    missing = [key for key in ("state", "param_groups") if key not in given]
    if missing:
        raise ConfigError(
            f"the optimizer state dict has no {missing[0]!r}; it has {sorted(map(str, given))}. Pass what "
            "optim_state_dict() gave; if only rank 0 has it, set FullOptimStateDictConfig(rank0_only=True)."
        )
    unknown = [fqn for fqn in given["state"] if fqn not in params]
    if unknown:
        raise ConfigError(
            f"the optimizer state dict has state of {unknown[0]!r} ({len(unknown)} such), which the optimizer does not "
            f"step; it steps {', '.join(list(params)[:3])}, ... Load it into an optimizer of the same parameters."
        )


def _like(param: nn.Parameter, name: str, value: Any) -> Any:
    """`value` as the optimizer would have made it for `param`: sharded as `param` is, if it has its shape."""
    managed = managed_by(param)
    # "step" is the one state without a dimension that optimizers keep plain, even for a parameter without one.
    if managed is None or not isinstance(value, Tensor) or value.shape != param.shape or name == "step":
        return value.clone() if isinstance(value, Tensor) and not isinstance(value, DTensor) else value
    cut = shard_of(value, *managed)
    return cut if cut is value else cut.clone()


def _groups(optim: torch.optim.Optimizer, saved: list[StateDict], fqns: list[str]) -> list[StateDict]:
    """The options of each group of `optim` as they were saved for its first parameter."""
    return list(_each_group(optim, saved, iter(fqns)))


def _each_group(optim: torch.optim.Optimizer, saved: list[StateDict], fqns: Iterator[str]) -> Iterator[StateDict]:
    number = 0
    for group in optim.param_groups:
        names = [next(fqns) for _ in group["params"]]
        options = next((it for it in saved if names and names[0] in it["params"]), group)
        yield {**options, "params": list(range(number, number + len(names)))}
        number += len(names)
