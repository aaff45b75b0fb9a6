"""State dicts of optimizers: sharded or full, with the FQNs of the user's own module as keys.

`optimizer.state_dict()` numbers its parameters, so it can only be loaded with the same order of parameters. With names,
a full state dict can be loaded at any world size and under any strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from fullshard._compat import holds_tensors, make_dtensor, tree_map
from fullshard.comm.mesh import local_shard
from fullshard.comm.routes import collectives_for
from fullshard.engine.comparison import barrier
from fullshard.engine.managed import managed_by
from fullshard.engine.registry import clean_fqn, failing_together, units_in
from fullshard.engine.sharded_param import full_copy
from fullshard.errors import ConfigError, StateError
from fullshard.policy.arguments import check_type
from fullshard.state.names import FORM, OWN, is_part
from fullshard.state.on_disk import states_on_disk
from fullshard.state.optim_kinds import SavedOptions, block_states, misfit_of_kind
from fullshard.state.state_dict import (
    FullOptimStateDictConfig,
    OptimStateKeyType,
    StateDictType,
    device_of,
    get_state_dict_type,
    groups_of,
    is_first_rank,
)
from fullshard.tape.recorder import Origin, Phase

_ORIGIN = Origin("optimizer state", Phase.IDLE)

StateDict = dict[str, Any]


def optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, optim_state_dict: StateDict | None = None
) -> StateDict:
    """Return the state of `optim` by FQN, in the form set for `model`: full on every rank by default.

    Every rank must call it. A full state dict is a copy. A sharded state dict shares tensors with the optimizer.

    Args:
        model: The model with the parameters that `optim` updates.
        optim: The optimizer, created after `model` was sharded.
        optim_state_dict: A state dict of `optim` to use instead of `optim.state_dict()`.

    Returns:
        `{"state": {fqn: {name: value}}, "param_groups": [{..., "params": [fqn]}]}`; empty on all ranks but the first if
        `rank0_only` is set.

    Raises:
        ConfigError: `optim` has a parameter that is not in `model`.
    """
    _check_arguments(model, optim, optim_state_dict)
    check_type("optim", optim, torch.optim.Optimizer, "the optimizer of the model")
    settings = get_state_dict_type(model)
    config = settings.optim_state_dict_config
    saved = optim_state_dict or optim.state_dict()
    _check_form(saved)
    named = _named(model, optim, saved)
    if settings.state_dict_type is not StateDictType.FULL_STATE_DICT:
        return _mapped(named, lambda value: value.cpu()) if config.offload_to_cpu else named
    assert isinstance(config, FullOptimStateDictConfig)
    _meet(model, named, "optim_state_dict() of full tensors")
    with failing_together(units_in(model)):
        return _gathered(named, keep=not config.rank0_only or is_first_rank(model), offload=config.offload_to_cpu)


def _check_arguments(model: object, optim: object, optim_state_dict: object) -> None:
    check_type("model", model, nn.Module, "the sharded nn.Module")
    if optim is not None:
        check_type("optim", optim, torch.optim.Optimizer, "the optimizer of the model")
    if optim_state_dict is not None:
        check_type("optim_state_dict", optim_state_dict, Mapping, "a state dict of the optimizer")


def full_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, *, rank0_only: bool = True) -> StateDict:
    """Return the state of `optim` by FQN with full tensors on the CPU, independent of the form set for `model`."""
    named = _named(model, optim, optim.state_dict())
    _meet(model, named, "full_optim_state_dict()")
    with failing_together(units_in(model)):
        return _gathered(named, keep=not rank0_only or is_first_rank(model), offload=True)


def sharded_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer) -> StateDict:
    """Return the state of `optim` by FQN with `DTensor`s, independent of the form set for `model`."""
    return _named(model, optim, optim.state_dict())


def optim_state_dict_to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    optim_state_dict: StateDict | None,
    load_directly: bool = False,
    *,
    from_first_rank: bool | None = None,
) -> StateDict:
    """Convert the result of `optim_state_dict` to a state dict for `optim.load_state_dict` with this rank's shards.

    Args:
        model: The model with the parameters that `optim` updates.
        optim: The optimizer to load into. Its parameter groups may differ from the saved ones. If None, the result is
            for an optimizer with the saved groups that has not stepped yet.
        optim_state_dict: The state dict, full or sharded. It is not modified, and shares no memory with the result.
        load_directly: Whether to load the result into `optim` as well.
        from_first_rank: Whether only the first rank has `optim_state_dict`, and sends it to the others. None means
            `rank0_only` of the settings of `model`.

    Raises:
        ConfigError: A parameter of `optim` is not in `model`, or the parameters or the shapes of the states differ from
            those of `optim`.
    """
    _check_arguments(model, optim, optim_state_dict)
    config = get_state_dict_type(model).optim_state_dict_config
    if from_first_rank is None:
        from_first_rank = isinstance(config, FullOptimStateDictConfig) and config.rank0_only
    found = optim_state_dict or {}
    if "state" in found and _fault_of_form(found) is None:
        found = {**found, "state": _in_model_order(model, found["state"])}
    given, fetch = _sent_by_first(found, model) if from_first_rank else (found, lambda value: value)
    _check_form(given)
    optim = optim or _as_saved(model, given)
    params = params_by_fqn(model, optim)
    _check_names(given, params)
    template = StateTemplate(optim, params)
    forms = (template.misfit_of_form(fqn, values, values.get(FORM)) for fqn, values in given["state"].items())
    misfit = next((form for form in forms if form is not None), None)
    if misfit is not None:
        raise ConfigError(
            f"the optimizer state dict has {misfit}. Load it into an optimizer that encodes states in the same way, "
            "or create a new optimizer without states."
        )
    kind = template.misfit_of_kind([SavedOptions(group["params"], group) for group in given["param_groups"]])
    if kind is not None:
        raise ConfigError(f"the optimizer state dict is {kind}. Load it into an optimizer of the class that was saved.")
    template.note_counters(
        (fqn, name) for fqn, values in given["state"].items() for name, value in values.items() if _is_scalar(value)
    )

    def placed(fqn: str, name: str, leaf: Any) -> Any:
        return template.fill(fqn, name, fetch(leaf))

    state = {
        fqn: {name: tree_map(partial(placed, fqn, name), value) for name, value in values.items()}
        for fqn, values in given["state"].items()
    }
    loadable = template.numbered({"state": state, "param_groups": given["param_groups"]})
    if load_directly:
        optim.load_state_dict(loadable)
    return loadable


def _as_saved(model: nn.Module, named: StateDict) -> torch.optim.Optimizer:
    """Return a placeholder optimizer with the parameters and groups of `named`."""
    params = {clean_fqn(name): param for name, param in model.named_parameters()}
    groups = [[params[fqn] for fqn in group["params"] if fqn in params] for group in named["param_groups"]]
    if not any(groups):
        raise ConfigError(
            "the param_groups of the optimizer state dict have no parameter of the model. Pass the result of "
            "optim_state_dict(), or pass optim."
        )
    return torch.optim.Optimizer([{"params": group} for group in groups], {})


def params_by_fqn(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Return the parameters of `optim` by FQN, in the order of their numbers in `optim`."""
    fqns: dict[int, str] = {}
    for name, param in model.named_parameters():
        managed = managed_by(param)
        forms = [param] if managed is None else [param, managed.param.sharded]  # a unit may be unsharded at the moment
        fqns.update((id(form), clean_fqn(name)) for form in forms)
    found: dict[str, nn.Parameter] = {}
    for param in (param for group in optim.param_groups for param in group["params"]):
        if id(param) not in fqns:
            raise ConfigError(
                f"{type(optim).__name__} has a parameter of shape {tuple(param.shape)} that is not in the model. "
                "Create the optimizer from model.parameters() after sharding the model."
            )
        found[fqns[id(param)]] = param
    return found


def rekeyed(
    state_dict: Mapping[str, Any], keys: OptimStateKeyType, model: nn.Module, optim: torch.optim.Optimizer
) -> StateDict:
    """Return `state_dict`, whose keys are FQNs or the parameter numbers of `optim`, with keys of the kind `keys`."""
    fqns = list(params_by_fqn(model, optim))
    pairs: list[tuple[Any, Any]] = list(enumerate(fqns))
    if keys is OptimStateKeyType.PARAM_ID:
        pairs = [(fqn, number) for number, fqn in pairs]
    new = {**dict(pairs), **{key: key for _, key in pairs}}
    _check_form(state_dict)
    saved = [key for group in state_dict["param_groups"] for key in group["params"]]
    missing = [key for key in (*state_dict["state"], *saved) if key not in new]
    if missing:
        raise ConfigError(
            f"the optimizer state dict has {missing[0]!r}, but {type(optim).__name__} has {len(fqns)} parameters: "
            f"{', '.join(fqns[:3])} and so on. Pass the optimizer that was saved."
        )
    order: Any = sorted if keys is OptimStateKeyType.PARAM_ID else list  # in an optimizer, numbers are ascending
    groups = [{**group, "params": order(new[key] for key in group["params"])} for group in state_dict["param_groups"]]
    return {"state": {new[key]: values for key, values in state_dict["state"].items()}, "param_groups": groups}


def _named(model: nn.Module, optim: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> StateDict:
    """Return `state_dict` with FQNs instead of parameter numbers, and states in the order of the model's parameters.

    Ranks may pass the same parameters to an optimizer in different orders (groups built from a `set`), and callers run
    one collective per state of the result.
    """
    params = params_by_fqn(model, optim)
    fqns = list(params)
    state = {fqns[key] if isinstance(key, int) else key: dict(value) for key, value in state_dict["state"].items()}
    state = _in_model_order(model, state)
    blocks = block_states(optim)
    if blocks is not None:
        state = {fqn: blocks.separate(values, params[fqn]) for fqn, values in state.items()}
    for fqn, values in state.items():
        own = next((name for name, value in values.items() if _is_of_shard_alone(value)), None)
        if own is not None:
            raise StateError(
                f"{own!r} of {fqn} in the state of {type(optim).__name__} covers only this rank's shard and cannot be "
                "combined with the states of other ranks. Save the model without the optimizer, or use an optimizer "
                "whose states have the shape of their parameters."
            )
    groups = [
        {**group, "params": [fqns[key] if isinstance(key, int) else key for key in group["params"]]}
        for group in state_dict["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def _in_model_order(model: nn.Module, state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return `state`, whose keys are FQNs, in the order of `model.named_parameters()`, with other keys at the end."""
    numbers = {clean_fqn(name): number for number, (name, _) in enumerate(model.named_parameters())}
    return {fqn: state[fqn] for fqn in sorted(state, key=lambda fqn: numbers.get(fqn, len(numbers)))}


def _meet(model: nn.Module, named: StateDict, doing: str) -> None:
    """Wait until all ranks are about to gather the states in `named`."""
    forms: list[str] = []

    def note(fqn: str, value: Any) -> None:
        if isinstance(value, DTensor):
            forms.append(f"{fqn} {tuple(value.shape)} {value.dtype} {value.placements}")

    for fqn, values in named["state"].items():
        tree_map(partial(note, fqn), values)
    barrier(units_in(model), f"{doing}: {len(forms)} sharded states ({crc32(repr(forms).encode()):08x})")


def _is_of_shard_alone(value: Any) -> bool:
    return hasattr(value, OWN) or (isinstance(value, DTensor) and holds_tensors(value._local_tensor))


def _mapped(named: StateDict, function: Callable[[Tensor], Any]) -> StateDict:
    """Return `named` with `function` applied to every tensor of its state, including those in lists and dicts."""
    return {
        **named,
        "state": tree_map(lambda item: function(item) if isinstance(item, Tensor) else item, named["state"]),
    }


def _gathered(named: StateDict, *, keep: bool, offload: bool) -> StateDict:
    """Return `named` with full tensors, gathered one by one. Unless `keep`, each is dropped immediately."""

    def gather(value: Tensor) -> Tensor | None:
        whole = full_copy(value) if isinstance(value, DTensor) else value.clone() if keep else value
        if not keep:
            return None
        return whole.cpu() if offload else whole

    whole = _mapped(named, gather)
    return {**whole, "param_groups": [_copied(group) for group in named["param_groups"]]} if keep else {}


def _copied(options: Mapping[str, Any]) -> StateDict:
    """Return a copy of the options of a group, including tensors such as a learning rate."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in options.items()}


# -- loading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Absent:
    """The shape and dtype of a tensor that has not been received yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _sent_by_first(state_dict: StateDict | None, model: nn.Module) -> tuple[StateDict, Callable[[Any], Any]]:
    """Return the first rank's `state_dict` without tensors, and a function that fetches the next tensor in order.

    So other ranks hold at most one full tensor at a time.
    """
    groups, device = groups_of(model), device_of(model)
    first_rank_state = state_dict if state_dict and is_first_rank(model) else None
    to_send: list[Tensor] = []

    def note(value: Tensor) -> _Absent:
        to_send.append(value)
        return _Absent(tuple(value.shape), value.dtype)

    skeleton: Any = first_rank_state
    if first_rank_state and "state" in first_rank_state and _fault_of_form(first_rank_state) is None:
        skeleton = _mapped(first_rank_state, note)
    transports = [collectives_for(group or dist.distributed_c10d._get_default_group(), device) for group in groups]
    for transport in transports:
        skeleton = transport.broadcast_object(skeleton, 0, origin=_ORIGIN)
    sent = iter(to_send)

    def fetch(value: Any) -> Any:
        if not isinstance(value, _Absent):
            return value
        tensor = torch.empty(value.shape, dtype=value.dtype, device=device)
        if first_rank_state is not None:
            tensor.copy_(next(sent))
        for transport in transports:
            transport.broadcast([tensor], 0, origin=_ORIGIN)
        return tensor

    return skeleton or {}, fetch


def _fault_of_form(state_dict: Mapping[str, Any]) -> str | None:
    """Describe the first value of a state dict with a type unlike that in `optimizer.state_dict()`, or return None."""
    state, groups = state_dict.get("state", {}), state_dict.get("param_groups", [])
    if not isinstance(state, Mapping):
        return f"'state' is {_type(state)} instead of a dict"
    if not isinstance(groups, list | tuple):
        return f"'param_groups' is {_type(groups)} instead of a list"
    for key, values in state.items():
        if not isinstance(values, Mapping):
            return f"the state of {key!r} is {_type(values)} instead of a dict"
    for number, group in enumerate(groups):
        if not (isinstance(group, Mapping) and isinstance(group.get("params"), list | tuple)):
            return f"parameter group {number} has no list 'params'"
    return None


def _type(value: Any) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"


def _check_form(given: Mapping[str, Any]) -> None:
    absent = next((key for key in ("state", "param_groups") if key not in given), None)
    if absent is not None:
        raise ConfigError(
            f"the optimizer state dict has no {absent!r}; it has {sorted(map(str, given))}. Pass the result of "
            "optim_state_dict(). If only rank 0 has it, set FullOptimStateDictConfig(rank0_only=True)."
        )
    if (fault := _fault_of_form(given)) is not None:
        raise ConfigError(f"optimizer state dict: {fault}. Pass the result of optim_state_dict(), unchanged.")


def _check_names(given: StateDict, params: Mapping[str, nn.Parameter]) -> None:
    saved = [fqn for group in given["param_groups"] for fqn in group["params"]]
    unknown = [fqn for fqn in dict.fromkeys([*saved, *given["state"]]) if fqn not in params]
    missing = [fqn for fqn in params if fqn not in saved]
    if unknown or missing:
        raise ConfigError(
            f"the optimizer state dict has different parameters than the optimizer (unknown: {_some(unknown)}; "
            f"missing: {_some(missing)}). Load it into an optimizer of the same parameters, and save it "
            "with optim_state_dict(), which uses FQNs."
        )


def _some(fqns: Sequence[Any]) -> str:
    """Describe `fqns` by their number and the first of them."""
    return f"{len(fqns)}, such as {fqns[0]!r}" if fqns else "none"


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor | _Absent) and not value.shape


class StateTemplate:
    """The placements of the states of `optim`, whose parameters are given by FQN in `params`.

    If the optimizer has stepped, these are the current placements. Otherwise they are those after the first step:
    states with the shape of their parameter are sharded like it, other states are replicated, and counters are plain
    tensors.
    """

    def __init__(self, optim: torch.optim.Optimizer, params: Mapping[str, nn.Parameter]) -> None:
        self.optimizer = optim
        self._params = params
        self._counters = {"step"}
        self._disk = states_on_disk(optim)
        self._blocks = block_states(optim)

    @property
    def fqns(self) -> Collection[str]:
        """The FQNs of the parameters that the optimizer updates, in its order."""
        return self._params.keys()

    def note_counters(self, scalars: Iterable[tuple[str, str]]) -> None:
        """Record that the given states, which are 0-dim, are counters, such as step counts."""
        self._counters |= {name for fqn, name in scalars if self._params[fqn].shape}

    def make_room(self, states: Mapping[tuple[str, str], tuple[torch.Size, torch.dtype]]) -> None:
        """Allocate space for `states`, given by FQN and name with shape and dtype, if they are on a disk."""
        if self._disk is None:
            return
        dtypes = {
            (id(self._params[fqn]), name): dtype
            for (fqn, name), (shape, dtype) in states.items()
            if self._params[fqn].shape == shape and not is_part(name)
        }
        self._disk.expect(dtypes)

    def present(self, fqn: str, name: str) -> Tensor | None:
        """Return the optimizer's current state, if it is a tensor."""
        found = self.optimizer.state.get(self._params[fqn], {}).get(name)
        return found if isinstance(found, Tensor) else None

    def misfit_of_form(self, fqn: str, names: Collection[str], form: str | None) -> str | None:
        """Describe how the encoding of the states `names` of `fqn` differs from the optimizer's; None if it does not.

        Args:
            form: The recorded encoding in blocks; None if the states are not encoded.
        """
        own = None if self._blocks is None else self._blocks.form(self._params[fqn])
        if form == own or not names:
            return None
        return f"the states of {fqn} ({form or 'plain'} in it, {own or 'plain'} in the optimizer)"

    def misfit_of_kind(self, saved: Sequence[SavedOptions]) -> str | None:
        """Describe how the optimizer of `saved` differs from this one; None if its states can be loaded."""
        return misfit_of_kind(self.optimizer, list(self._params), saved)

    def fill(self, fqn: str, name: str, value: Any) -> Any:
        """Return `value`, full or sharded, as the state `name` of the parameter `fqn`, in separate memory."""
        if not isinstance(value, Tensor):
            return value
        present = self.present(fqn, name)
        if present is not None and present.shape != value.shape:
            raise ConfigError(
                f"the optimizer state dict has {name!r} of {fqn} with shape {tuple(value.shape)}, but the optimizer "
                f"has shape {tuple(present.shape)}. Build the model and optimizer as they were when it was saved."
            )
        like = self._like(fqn, name)
        if not isinstance(like, DTensor):
            return full_copy(value) if isinstance(value, DTensor) else value.clone()
        return _distributed(value, like.device_mesh, _placements(like, name, value.shape), like.to_local().device)

    def destination(self, fqn: str, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return the tensor to load the state `name` of the parameter `fqn` into.

        This is the optimizer's own tensor if it matches, else a new one with the placement of the state and undefined
        contents.
        """
        like = self._like(fqn, name)
        if not isinstance(like, DTensor):
            fits = like is self.present(fqn, name) and (like.shape, like.dtype) == (shape, dtype)
            return like if fits else torch.empty(shape, dtype=dtype, device=like.device)
        placements = _placements(like, name, shape)
        on_disk = None if self._disk is None or is_part(name) else self._disk.place_of(self._params[fqn], name)
        if like is self.present(fqn, name) and (like.shape, like.dtype, like.placements) == (shape, dtype, placements):
            return like
        if on_disk is not None and (like.shape, on_disk.dtype) == (shape, dtype):
            return make_dtensor(on_disk, like.device_mesh, placements, tuple(shape))
        part = local_shard(torch.empty(shape, dtype=dtype, device="meta"), like.device_mesh, placements)
        local = torch.empty(part.shape, dtype=dtype, device=like.to_local().device)
        return make_dtensor(local, like.device_mesh, placements, tuple(shape))

    def numbered(self, named: StateDict) -> StateDict:
        """Return a state dict for `optim.load_state_dict`, from one with FQNs and states that are already placed."""
        numbers = {fqn: number for number, fqn in enumerate(self._params)}
        state = {
            numbers[fqn]: values if self._blocks is None else self._blocks.together(values, self._params[fqn])
            for fqn, values in named["state"].items()
        }
        return {"state": state, "param_groups": _groups(self.optimizer, named["param_groups"], list(self._params))}

    def _like(self, fqn: str, name: str) -> Tensor:
        """Return a tensor with the placement of the state."""
        present = self.present(fqn, name)
        if present is not None:
            return present
        return torch.empty(0, device="cpu") if name in self._counters else self._params[fqn]


def _placements(like: DTensor, name: str, shape: tuple[int, ...]) -> tuple[Placement, ...]:
    """Return the placements of a state of `shape` that belongs to `like`.

    States with the shape of `like`, and components of states that are encoded in blocks, have its placements. Others
    are replicated.
    """
    parts = like.shape == shape or is_part(name)
    return tuple(placement if parts and not placement.is_partial() else Replicate() for placement in like.placements)


def placed_like(like: DTensor, value: Tensor) -> DTensor:
    """Return a copy of `value`, a full state of the shape of `like`, with its placements. Nothing is communicated."""
    return _distributed(value, like.device_mesh, tuple(like.placements), like.to_local().device)


def _distributed(value: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], device: torch.device) -> DTensor:
    """Return `value`, full or sharded, with these placements. This is a collective if its placements differ."""
    if isinstance(value, DTensor) and (value.device_mesh, value.placements) == (mesh, placements):
        local = value.to_local()
    else:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        local = local_shard(whole, mesh, placements)
    local = local.to(device, copy=True).contiguous()
    return make_dtensor(local, mesh, placements, tuple(value.shape))


def _groups(optim: torch.optim.Optimizer, saved: list[StateDict], fqns: list[str]) -> list[StateDict]:
    """Return the groups of `optim`, each with the saved options of its first parameter."""
    return list(_each_group(optim, saved, iter(fqns)))


def _each_group(optim: torch.optim.Optimizer, saved: list[StateDict], fqns: Iterator[str]) -> Iterator[StateDict]:
    number = 0
    for group in optim.param_groups:
        names = [next(fqns) for _ in group["params"]]
        options = next((item for item in saved if names and names[0] in item["params"]), group)
        kept = {name: value for name, value in options.items() if name != "param_names"}  # of the saved group
        added = {name: value for name, value in group.items() if name not in options}  # since it was saved
        yield {**added, **kept, "params": list(range(number, number + len(names)))}
        number += len(names)
