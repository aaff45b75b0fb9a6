"""The contents of an opened checkpoint for a model and an optimizer: one of ours, or one of torch's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fullshard.checkpoint.contents import MODEL
from fullshard.checkpoint.opening import Opened
from fullshard.checkpoint.plain import Outline

__all__ = ["Saved", "SavedGroup", "saved_by_others", "saved_by_us"]


@dataclass(frozen=True)
class SavedGroup:
    """A group of an optimizer's parameters."""

    fqns: list[str]
    options: Outline
    kinds: list[str] = field(default_factory=list)  # the optimizer's class and its bases; empty if not recorded


@dataclass(frozen=True)
class Saved:
    """The contents of a checkpoint, with the keys of its tensors."""

    tensors: Mapping[str, str]  # of the model: the key of each FQN
    values: Mapping[str, Any] = field(default_factory=dict)  # of the model: state of modules that is no tensor
    ties: Mapping[str, str] | None = None  # other names of a tensor, with the first; None if unknown
    states: Mapping[str, Outline] = field(default_factory=dict)  # of the optimizer, by FQN
    groups: tuple[SavedGroup, ...] | None = None  # of the optimizer; None if it was not saved
    rest: Mapping[str, Any] = field(default_factory=dict)  # scheduler, extra

    def renamed(self, names: Mapping[str, str]) -> Saved:
        """The same with other names for some parameters of the optimizer."""
        states = {names.get(fqn, fqn): states for fqn, states in self.states.items()}
        groups = self.groups and tuple(
            replace(group, fqns=[names.get(fqn, fqn) for fqn in group.fqns]) for group in self.groups
        )
        return replace(self, states=states, groups=groups)


def saved_by_us(opened: Opened, ours: Mapping[str, Any]) -> Saved:
    """The contents of a checkpoint of ours, as its own account says."""
    optimizer = ours.get("optimizer")
    return Saved(
        tensors=_under(f"{MODEL}.", opened.sizes()),
        values=ours["model"],
        ties={name.removeprefix(f"{MODEL}."): key.removeprefix(f"{MODEL}.") for name, key in ours["ties"].items()},
        states={} if optimizer is None else dict(optimizer["state"][1]),
        groups=None if optimizer is None else _our_groups(optimizer),
        rest=ours,
    )


def saved_by_others(opened: Opened, in_model: Collection[str], in_optimizer: Collection[str]) -> Saved:
    """The contents of a checkpoint of `torch.distributed.checkpoint` alone, as far as names in it are recognised.

    Its optimizer may be as `get_state_dict` gives it, flattened or not.

    Args:
        in_model: FQNs in the model's state dict.
        in_optimizer: FQNs of the parameters that the optimizer steps.
    """
    keys = opened.metadata.state_dict_metadata
    model = _most_frequent(before for key in keys for before, fqn, rest in _splits(key) if fqn in in_model and not rest)
    optimizer = _most_frequent(
        before.removesuffix("state.").removesuffix("param_groups.")
        for key in keys
        for before, fqn, rest in _splits(key)
        if (before.endswith("state.") and fqn in in_optimizer and rest) or before.endswith("param_groups.")
    )
    # A model without a prefix of its own may be saved beside anything; keys that begin like its own belong to it.
    tops = {fqn.split(".")[0] for fqn in in_model}
    return Saved(
        tensors={fqn: key for fqn, key in _under(model, opened.sizes()).items() if fqn.split(".")[0] in tops},
        states=_states(_leaves(opened, f"{optimizer}state."), in_optimizer),
        groups=_groups(_leaves(opened, f"{optimizer}param_groups."), in_optimizer),
    )


def _under(prefix: str, keys: Iterable[str]) -> dict[str, str]:
    """The keys that begin with `prefix`, by the rest of the key."""
    return {key.removeprefix(prefix): key for key in keys if key.startswith(prefix)}


def _splits(key: str) -> Iterator[tuple[str, str, str]]:
    """All ways to see an FQN in `key`: what comes before it, the FQN, what comes after it."""
    words = key.split(".")
    for start in range(len(words)):
        for stop in range(start + 1, len(words) + 1):
            before = "".join(f"{word}." for word in words[:start])
            yield before, ".".join(words[start:stop]), ".".join(words[stop:])


def _most_frequent(prefixes: Iterable[str]) -> str:
    counts = Counter(prefixes)
    return max(counts, key=lambda prefix: (counts[prefix], -len(prefix)), default="")


def _leaves(opened: Opened, prefix: str) -> dict[str, Outline]:
    """The values whose keys begin with `prefix`, by the rest of the key."""
    keys, sizes = _under(prefix, opened.metadata.state_dict_metadata), opened.sizes()
    names = [name for name, key in keys.items() if key not in sizes]
    values = dict(zip(names, opened.values(*(keys[name] for name in names)), strict=True))
    return {name: ("value", values[name]) if name in values else ("tensor", key) for name, key in keys.items()}


def _states(leaves: Mapping[str, Outline], fqns: Collection[str]) -> dict[str, Outline]:
    """The states by FQN; those of no known FQN, by all of the key but its last word."""
    found: dict[str, list[tuple[str, Outline]]] = {}
    for key, leaf in leaves.items():
        known = (fqn for before, fqn, name in _splits(key) if not before and fqn in fqns and name)
        fqn = next(known, key.rpartition(".")[0])
        found.setdefault(fqn, []).append((key.removeprefix(f"{fqn}."), leaf))
    return {fqn: ("dict", states) for fqn, states in found.items()}


def _groups(leaves: Mapping[str, Outline], fqns: Collection[str]) -> tuple[SavedGroup, ...] | None:
    """The groups; a flattened state dict has options for each parameter."""
    found: dict[str, list[tuple[str, Outline]]] = {}
    for key, leaf in leaves.items():
        group, _, option = key.rpartition(".")
        found.setdefault(group, []).append((option, leaf))
    groups = [
        SavedGroup([name], ("dict", options)) if name in fqns else _group(options) for name, options in found.items()
    ]
    return tuple(groups) or None


def _our_groups(optimizer: Mapping[str, Any]) -> tuple[SavedGroup, ...]:
    groups = tuple(_group(options) for _, options in optimizer["param_groups"])
    kinds = optimizer.get("kinds")  # earlier versions did not record them
    return groups if kinds is None else tuple(map(lambda group, its: replace(group, kinds=its), groups, kinds))


def _group(options: Iterable[tuple[str, Outline]]) -> SavedGroup:
    """The group of which `options` has the parameters' names too."""
    named = dict(options)
    _, fqns = named.pop("params", ("value", []))
    return SavedGroup(fqns, ("dict", list(named.items())))
