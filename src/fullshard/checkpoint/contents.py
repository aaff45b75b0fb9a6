"""The contents of a checkpoint: the shards of this rank, values that all ranks share, and values of this rank only."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from xxhash import xxh3_128

from fullshard._compat import dtensor_like, holds_tensors, plain_values
from fullshard.checkpoint.encoded import parts_of
from fullshard.checkpoint.plain import Path, outline, plain_copy
from fullshard.checkpoint.random_states import random_states
from fullshard.checkpoint.together import GroupRanks
from fullshard.engine.registry import clean_fqn, units_in
from fullshard.errors import CheckpointError
from fullshard.optim.hyperparameters import SAME_SCHEDULE, different_hyperparameter
from fullshard.policy.strategy import ShardingStrategy
from fullshard.state.optim_kinds import kinds_of_groups
from fullshard.state.optim_state import sharded_optim_state_dict
from fullshard.state.state_dict import StateDictType, state_dict_type

logger = logging.getLogger(__name__)

MODEL, OPTIMIZER = "model", "optimizer"  # key prefixes, which torch's own scripts also read
_GROUPS = (OPTIMIZER, "param_groups")
RECORD = "fullshard"  # values shared by all ranks that are not tensors of the model or the optimizer
_RANK = "rank"


class HasState(Protocol):
    """An object whose state can be saved and restored, such as a scheduler or a position in the data."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Restore a state."""


@dataclass
class Contents:
    """The values that one rank saves. Tensors are those of the model and the optimizer until they are copied."""

    sharded: dict[Path, DTensor] = field(default_factory=dict)
    plain: dict[Path, Tensor] = field(default_factory=dict)  # written by rank 0, and by ranks with different values
    values: dict[Path, Any] = field(default_factory=dict)  # values other than tensors, in torch's format
    ties: dict[str, str] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)  # of this rank only
    strategy: str = ""

    def put(self, path: Path, leaf: Any) -> str:
        """Add `leaf` and return its key in the checkpoint."""
        if path in self.sharded or path in self.plain or path in self.values:
            raise CheckpointError(f"two values are named {'.'.join(path)}. Rename the keys of the state.")
        if isinstance(leaf, DTensor):
            self.sharded[path] = _without_partial_sums(leaf)
        elif isinstance(leaf, Tensor):
            self.plain[path] = leaf
        else:
            self.values[path] = copy.deepcopy(leaf)
        return ".".join(path)

    def entries(self, ranks: GroupRanks, doing: str) -> dict[str, Any]:
        """Return this rank's entries as nested dicts. Ranks exchange checksums of their plain tensors.

        The first rank logs a warning if ranks have different hyperparameters, such as learning rates.

        Raises:
            CheckpointError: A rank failed. `doing` begins the message.
        """
        compared = self.plain if ranks.world > 1 else {}
        shared = ranks.share(
            doing, lambda: ({path: _checksum(tensor) for path, tensor in compared.items()}, self._param_groups())
        )
        if ranks.leads:
            found = different_hyperparameter({rank: groups for rank, (_, groups) in enumerate(shared)})
            if found is not None:
                logger.warning("%s The checkpoint contains those of rank 0. %s", found, SAME_SCHEDULE)
        local, of_first = shared[ranks.index][0], shared[0][0]
        differing = [path for path in local if local[path] != of_first.get(path)]
        own = {**self.own, "plain": {".".join(path): self.plain[path].detach().cpu() for path in differing}}
        written: dict[Path, Any] = {**self.sharded, (_RANK, str(ranks.index)): as_one_value(own)}
        if ranks.leads:
            written |= {**self.plain, **self.values, (RECORD,): as_one_value(self.record)}
        return _nested(written)

    def _param_groups(self) -> list[dict[str, Any]]:
        """Return the FQNs and hyperparameters of each parameter group of the optimizer, without those in tensors."""
        groups: dict[str, dict[str, Any]] = {}
        for path, value in self.values.items():
            if path[:2] == _GROUPS:
                groups.setdefault(path[2], {})[".".join(path[3:])] = value
        return list(groups.values())


def collect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: HasState | None,
    data: HasState | None,
    extra: Any,
) -> Contents:
    """Collect the contents that this rank saves.

    Raises:
        CheckpointError: A value could not be read back without executing code.
        ConfigError: The optimizer has a parameter that is not in the model.
        StateError: A forward or backward is in progress.
    """
    placements = dict.fromkeys(unit.options.placements for unit in units_in(model))
    names = {strategy.placements: strategy.value for strategy in ShardingStrategy}
    contents = Contents(strategy=", ".join(names.get(item, str(item)) for item in placements) or "none")
    state, tied = model_state(model, in_parts=True), tied_names(model)
    values: dict[str, Any] = {}  # state of modules other than tensors
    for fqn, value in state.items():
        if fqn in tied and tied[fqn] in state:
            contents.ties[f"{MODEL}.{fqn}"] = f"{MODEL}.{tied[fqn]}"
        elif isinstance(value, Tensor):
            contents.put((MODEL, fqn), value)
        else:
            values[fqn] = value
    record = {"ties": contents.ties, "extra": extra, "model": values}
    if optimizer is not None:
        record["optimizer"] = put_optimizer(contents, sharded_optim_state_dict(model, optimizer))
        record["optimizer"]["kinds"] = kinds_of_groups(optimizer)
    if scheduler is not None:
        record["scheduler"] = scheduler.state_dict()
    contents.record = plain_copy(record, "the checkpoint's ")
    contents.values |= {
        (MODEL, fqn): value for fqn, value in contents.record["model"].items() if not isinstance(value, Mapping)
    }
    own = {"random": random_states(), **({} if data is None else {"data": data.state_dict()})}
    contents.own = plain_copy(own, "the checkpoint's ")
    return contents


def put_optimizer(contents: Contents, named: Mapping[str, Any]) -> dict[str, Any]:
    """Add the optimizer state, by FQN, to `contents`, and return its outline without the tensors."""
    return {
        "state": outline(named["state"], (OPTIMIZER, "state"), contents.put),
        "param_groups": [
            outline(group, (OPTIMIZER, "param_groups", str(index)), contents.put)
            for index, group in enumerate(named["param_groups"])
        ],
    }


def as_one_value(value: Any) -> tuple[Any]:
    """Wrap `value` so that torch does not write each entry of a dict separately."""
    return (value,)


def key_of_rank(rank: int) -> str:
    """Return the key of the values of one rank."""
    return f"{_RANK}.{rank}"


def model_state(model: nn.Module, *, in_parts: bool = False) -> dict[str, Any]:
    """Return the state dict of `model` with shards as `DTensor`s by the user's FQNs, whatever its state dict type.

    Args:
        in_parts: Whether weights that are encoded in several tensors are replaced by these tensors. Their names then
            begin with the name of the weight.

    Raises:
        CheckpointError: There are such weights, and `in_parts` is False or their inner tensors are sharded differently.
    """
    with state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        named = {clean_fqn(fqn): value for fqn, value in model.state_dict().items()}
    params = model.named_parameters(remove_duplicate=False) if in_parts else ()
    by_fqn = {clean_fqn(name): param for name, param in params}
    state: dict[str, Any] = {}
    for fqn, value in named.items():
        parts = parts_of(by_fqn[fqn], value) if fqn in by_fqn else None
        if parts is None:
            state[fqn] = _plain(fqn, value)
        else:
            state |= {f"{fqn}.{name}": part for name, part in parts.items()}
    return state


def _plain(fqn: str, value: Any) -> Any:
    """Return `value`, or a `DTensor` of its plain values in the same memory."""
    if not isinstance(value, DTensor) or not holds_tensors(value._local_tensor):
        return value
    values = plain_values(value._local_tensor)
    if values is None:
        raise CheckpointError(
            f"{fqn} is a {type(value._local_tensor).__name__}, which encodes its values in several tensors. A full "
            "state dict cannot hold it. Save it with fullshard.checkpoint.save if only fullshard shards it; or save "
            "only the trained parameters next to it, such as adapters, with their own state_dict."
        )
    return dtensor_like(values, value)


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the additional names of tied parameters and buffers, each with the first name."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        fqn = clean_fqn(name)
        known = first.setdefault(id(tensor), fqn)
        if known != fqn:
            tied[fqn] = known
    return tied


def _without_partial_sums(tensor: DTensor) -> DTensor:
    """Return `tensor` with partial sums reduced. The container would write only the partial sum of one rank."""
    if not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    return tensor.redistribute(
        placements=[Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    )


def _checksum(tensor: Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{tuple(tensor.shape)} {tensor.dtype} {xxh3_128(raw.numpy().data).hexdigest()}"


def _nested(entries: Mapping[Path, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in entries.items():
        inner = nested
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = value
    return nested
