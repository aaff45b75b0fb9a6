"""The contents of an opened checkpoint for a model and an optimizer, written by fullshard or by torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fullshard.checkpoint.contents import MODEL
from fullshard.checkpoint.opening import Opened
from fullshard.checkpoint.plain import Outline
from fullshard.errors import CheckpointError


@dataclass(frozen=True)
class SavedGroup:
    """A parameter group of an optimizer."""

    fqns: list[str]
    options: Outline
    kinds: list[str] = field(default_factory=list)  # the optimizer's class and its bases; empty if not recorded


@dataclass(frozen=True)
class Saved:
    """The contents of a checkpoint, with the keys of its tensors."""

    tensors: Mapping[str, str]  # of the model: the key of each FQN
    values: Mapping[str, Any] = field(default_factory=dict)  # of the model: state of modules other than tensors
    ties: Mapping[str, str] | None = None  # additional names of a tensor, with the first name; None if unknown
    states: Mapping[str, Outline] = field(default_factory=dict)  # of the optimizer, by FQN
    groups: tuple[SavedGroup, ...] | None = None  # of the optimizer; None if it was not saved
    remaining: Mapping[str, Any] = field(default_factory=dict)  # scheduler, extra

    def renamed(self, names: Mapping[str, str]) -> Saved:
        """Return the same contents with other names for some parameters of the optimizer."""
        states = {names.get(fqn, fqn): states for fqn, states in self.states.items()}
        groups = self.groups and tuple(
            replace(group, fqns=[names.get(fqn, fqn) for fqn in group.fqns]) for group in self.groups
        )
        return replace(self, states=states, groups=groups)


def saved_by_fullshard(opened: Opened, record: Mapping[str, Any]) -> Saved:
    """Return the contents of a checkpoint written by fullshard."""
    optimizer, groups = record.get("optimizer"), None
    if optimizer is not None:
        groups = tuple(_group(options) for _, options in optimizer["param_groups"])
        if (kinds := optimizer.get("kinds")) is not None:  # earlier versions did not record them
            groups = tuple(replace(group, kinds=kind) for group, kind in zip(groups, kinds, strict=False))
    return Saved(
        tensors=_under(f"{MODEL}.", opened.sizes()),
        values=record["model"],
        ties={name.removeprefix(f"{MODEL}."): key.removeprefix(f"{MODEL}.") for name, key in record["ties"].items()},
        states={} if optimizer is None else dict(optimizer["state"][1]),
        groups=groups,
        remaining=record,
    )


def saved_by_torch(opened: Opened, in_model: Collection[str], in_optimizer: Collection[str]) -> Saved:
    """Return the contents of a checkpoint of `torch.distributed.checkpoint`, as far as its names are known.

    The optimizer can have either form of `get_state_dict`, flattened or not.
    """
    keys = opened.metadata.state_dict_metadata
    model = _most_frequent(
        before for key in keys for before, fqn, remaining in _splits(key) if fqn in in_model and not remaining
    )
    optimizer = _most_frequent(
        before.removesuffix("state.").removesuffix("param_groups.")
        for key in keys
        for before, fqn, remaining in _splits(key)
        if (before.endswith("state.") and fqn in in_optimizer and remaining) or before.endswith("param_groups.")
    )
    groups = _leaves(opened, f"{optimizer}param_groups.")
    # A model without a prefix can be saved together with other data. Keys that begin like FQNs belong to the model.
    tops = {fqn.split(".")[0] for fqn in in_model}
    return Saved(
        tensors={fqn: key for fqn, key in _under(model, opened.sizes()).items() if fqn.split(".")[0] in tops},
        states=_states(_leaves(opened, f"{optimizer}state."), in_optimizer),
        groups=opened.ranks.do(opened.doing, lambda: _groups(groups, in_optimizer)),
    )


def _under(prefix: str, keys: Iterable[str]) -> dict[str, str]:
    """Return the keys that begin with `prefix`, by the rest of the key."""
    return {key.removeprefix(prefix): key for key in keys if key.startswith(prefix)}


def _splits(key: str) -> Iterator[tuple[str, str, str]]:
    """Yield all ways to split `key` at an FQN: the text before it, the FQN, and the text after it."""
    words = key.split(".")
    for start in range(len(words)):
        for stop in range(start + 1, len(words) + 1):
            before = "".join(f"{word}." for word in words[:start])
            yield before, ".".join(words[start:stop]), ".".join(words[stop:])


def _most_frequent(prefixes: Iterable[str]) -> str:
    counts = Counter(prefixes)
    return max(counts, key=lambda prefix: (counts[prefix], -len(prefix)), default="")


def _leaves(opened: Opened, prefix: str) -> dict[str, Outline]:
    """Return the values whose keys begin with `prefix`, by the rest of the key."""
    keys, sizes = _under(prefix, opened.metadata.state_dict_metadata), opened.sizes()
    names = [name for name, key in keys.items() if key not in sizes]
    values = dict(zip(names, opened.values(*(keys[name] for name in names)), strict=True))
    odd = [keys[name] for name, value in values.items() if isinstance(value, Tensor)]
    if odd:
        raise CheckpointError(
            f"{opened.doing}: {odd[0]!r} is a tensor, but its metadata describes a value. Load another checkpoint."
        )
    return {name: ("value", values[name]) if name in values else ("tensor", key) for name, key in keys.items()}


def _states(leaves: Mapping[str, Outline], fqns: Collection[str]) -> dict[str, Outline]:
    """Return the states by FQN. If an FQN is unknown, use the key without its last component."""
    found: dict[str, list[tuple[str, Outline]]] = {}
    for key, leaf in leaves.items():
        known = (fqn for before, fqn, name in _splits(key) if not before and fqn in fqns and name)
        fqn = next(known, key.rpartition(".")[0])
        found.setdefault(fqn, []).append((key.removeprefix(f"{fqn}."), leaf))
    return {fqn: ("dict", states) for fqn, states in found.items()}


def _groups(leaves: Mapping[str, Outline], fqns: Collection[str]) -> tuple[SavedGroup, ...] | None:
    """Return the groups. A flattened state dict has options for each parameter."""
    found: dict[str, list[tuple[str, Outline]]] = {}
    for key, leaf in leaves.items():
        group, _, option = key.rpartition(".")
        found.setdefault(group, []).append((option, leaf))
    groups = [
        SavedGroup([name], ("dict", options)) if name in fqns else _group(options) for name, options in found.items()
    ]
    return tuple(groups) or None


def _group(options: Iterable[tuple[str, Outline]]) -> SavedGroup:
    """Return the group for `options`, which include the names of its parameters."""
    named = dict(options)
    kind, fqns = named.pop("params", ("value", []))
    if kind != "value" or not isinstance(fqns, list) or not all(isinstance(fqn, str) for fqn in fqns):
        raise CheckpointError(
            f"expected FQNs as the params of a parameter group, found {fqns!r:.200}. Save the optimizer with "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, or load another checkpoint."
        )
    return SavedGroup(fqns, ("dict", list(named.items())))
