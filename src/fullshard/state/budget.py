"""The fractions of `Offload(budget=...)`: decided at the first step of an optimizer, by what is known then.

[Note: what a budget goes by]
At that step everything is known but temporaries: bytes of parameters, of gradients and of what is gathered follow from
shapes; those of states from the optimizer; and what forward keeps was counted, storage by storage, while it travelled.
What is computed within a unit beyond what it keeps is taken to be as much as the unit keeps that keeps most. Nothing
here is measured by an allocator or a clock, and ranks take the largest of each number over all of them: so all decide
alike, in every run alike. A rank needs the more of

    forward and backward   parameters + states + gathered + whole gradients + working memory
                           + what is kept and gradients: the larger, or both if microbatches add up
    the step               parameters + states + gradients + a copy of the largest of them

Before it, all is away that can be, so that a model which fits at all comes so far.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fullshard._compat import FakeTensor, local_tensor
from fullshard.comm.routes import collectives_for
from fullshard.device.accelerator import accelerator_for
from fullshard.engine import away
from fullshard.engine.footprint import gathered_peak, kept_between_steps
from fullshard.engine.managed import managed_by
from fullshard.engine.registry import process_groups_along
from fullshard.engine.runtime import Runtime, runtime_or_none
from fullshard.engine.unit import Unit
from fullshard.errors import ConfigError
from fullshard.policy.offload import Offload
from fullshard.policy.tiers import Tier, least_that_fits
from fullshard.state import on_disk
from fullshard.tape.recorder import Origin, Phase

__all__ = ["choose_for_budget"]

_log = logging.getLogger(__name__)
_ORIGIN = Origin("budget", Phase.STEP)
_seen: WeakSet[Optimizer] = WeakSet()


def choose_for_budget(optimizer: Optimizer) -> None:
    """Choose the fractions of a budget, if units of `optimizer`, which is about to step, have one: a collective then.

    Raises:
        ConfigError: nothing that can be away is enough. The budget that would do is named.
    """
    if optimizer in _seen:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    units = dict.fromkeys(managed.unit for param in params if (managed := managed_by(param)) is not None)
    runtimes = dict.fromkeys(runtime_or_none(unit) for unit in units)
    if None in runtimes:  # nothing has run: there is nothing to go by
        return
    for runtime in runtimes:
        assert runtime is not None
        policies = [policy for unit in runtime.units if (policy := _open(unit)) is not None]
        if policies:
            _choose(runtime, policies[0], optimizer)
    _seen.add(optimizer)


def _open(unit: Unit) -> Offload | None:
    """The policy of `unit`, if it is a budget for which nothing has been chosen."""
    policy = unit.options.offload
    return policy if isinstance(policy, Offload) and policy.budget is not None else None


@dataclass(frozen=True)
class _Needs:
    """Bytes that a rank needs if nothing is away. See [Note: what a budget goes by]."""

    parameters: int
    gradients: int
    states: int
    gathered: int
    whole_gradients: int
    largest: int  # working memory of a step
    adds_up: int  # 1 if a step has several microbatches
    kept_by_unit: tuple[int, ...]  # by forward for backward

    @property
    def kept(self) -> int:
        """By all units."""
        return sum(self.kept_by_unit)

    @property
    def working(self) -> int:
        """What is computed within a unit beyond what it keeps, as far as that can be told."""
        return max(self.kept_by_unit)

    def at_most(self, *, gone: int = 0, buffers: int = 0) -> int:
        """Bytes that are needed at once, with so much of what forward keeps away, and buffers for it."""
        kept = self.kept - gone + min(buffers, gone)
        both = kept + self.gradients if self.adds_up else max(kept, self.gradients)
        passes = self.gathered + self.whole_gradients + self.working + both
        return self.parameters + self.states + max(passes, self.gradients + self.largest)

    def over_all_ranks(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> _Needs:
        """The largest of each number over the ranks that `groups` reach."""
        names = [field.name for field in fields(self)][:-1]
        mine = [*(getattr(self, name) for name in names), *self.kept_by_unit]
        numbers = torch.tensor(mine, dtype=torch.int64, device=device)
        for group in groups:
            collectives_for(group, device).combine(numbers, dist.ReduceOp.MAX, origin=_ORIGIN)
        if isinstance(numbers, FakeTensor):  # a dry run, whose ranks are all like this one
            return self
        most = numbers.tolist()
        return _Needs(**dict(zip(names, most, strict=False)), kept_by_unit=tuple(most[len(names) :]))


def _choose(runtime: Runtime, policy: Offload, optimizer: Optimizer) -> None:
    budget = policy.budget_bytes
    assert budget is not None
    needs = _needs(runtime, optimizer).over_all_ranks(process_groups_along(runtime.units), runtime.units[0].device)
    units = [unit for unit in runtime.units if _open(unit) == policy]
    tiers = [*_states_tiers(policy, units, needs), *_activations_tiers(policy, runtime, units, needs)]
    chosen, least = least_that_fits(needs.at_most(), budget, tiers)
    if least > budget:
        raise _too_small(policy, needs, least)
    fractions: dict[str, dict[str, float]] = {"optimizer": {}, "activations": {}}
    for tier, fraction in chosen:
        fractions[tier.what][tier.where] = fraction
    decided = replace(policy, budget=None, **fractions)  # type: ignore[arg-type]  # the names are those of tiers
    for unit in units:
        unit.offload_as(decided)
    on_disk.choose_portions_anew(units)
    runtime.activations.choose_anew()
    if dist.get_rank() == 0:
        said = [f"{fraction:.0%} of {tier.what} to {tier.where}" for tier, fraction in chosen]
        _log.info(
            "a budget of %d bytes, of which %d are needed if nothing is away, and %d as chosen: %s.",
            budget,
            needs.at_most(),
            least,
            ", ".join(said) or "nothing is away",
        )


def _needs(runtime: Runtime, optimizer: Optimizer) -> _Needs:
    units, placements = runtime.units, runtime.units[0].options.placements
    size = units[0].axes.group_size
    groups = [param_group for unit in units for param_group in unit.param_groups]
    trained = [param.sharded for unit in units for param in unit.params if param.sharded.requires_grad]
    has_lanes = accelerator_for(units[0].device).has_lanes
    each = [local_tensor(param).nbytes for param in trained]
    whole = sorted((unit.unsharded_nbytes for unit in units), reverse=True)
    if keeps_whole := all(unit.keeps_unsharded for unit in units):
        whole = []
    return _Needs(
        parameters=sum(it.plan.rest_nbytes for it in groups) + kept_between_steps(units, size, placements),
        gradients=sum(each),
        states=sum(_values(optimizer, param) * nbytes for param, nbytes in zip(trained, each, strict=True)),
        gathered=0 if keeps_whole else gathered_peak(units, size, placements),
        whole_gradients=sum(whole if runtime.activations.held_whole else whole[:2]),
        largest=2 * (sum(each) if has_lanes else max(each, default=0)),  # of all at once on an accelerator
        adds_up=int(runtime.activations.backwards > 1),
        kept_by_unit=tuple(runtime.activations.most_kept[unit] for unit in units),
    )


def _values(optimizer: Optimizer, param: nn.Parameter) -> int:
    """Values that the optimizer of `param` keeps for each of its own; those of AdamW, if it is another one."""
    group = next((it for it in optimizer.param_groups if any(param is other for other in it["params"])), None)
    if group is None:
        return on_disk.STATES
    if "amsgrad" in group:
        return on_disk.STATES + bool(group["amsgrad"])
    name = type(optimizer).__name__
    if name == "SGD":
        return int(group["momentum"] != 0)
    if name == "RMSprop":
        return 1 + int(group["momentum"] != 0) + int(group["centered"])
    return {"Muon": 1, "Adagrad": 1, "ASGD": 1}.get(name, on_disk.STATES)


def _states_tiers(policy: Offload, units: Sequence[Unit], needs: _Needs) -> list[Tier]:
    if policy.folder is None:
        return []
    sizes = [sum(it.sharded.numel() for it in unit.params if it.sharded.requires_grad) for unit in reversed(units)]
    portion = max(on_disk.PORTION_NBYTES, needs.largest)
    steps, taken = [], 0
    for size in filter(None, sizes):
        taken += size
        nbytes = needs.states * taken // sum(sizes)
        steps.append((taken / sum(sizes), nbytes - min(nbytes, on_disk.BUFFERS * portion)))
    return [Tier(what="optimizer", where="disk", steps=steps)]


def _activations_tiers(policy: Offload, runtime: Runtime, units: Sequence[Unit], needs: _Needs) -> list[Tier]:
    where = policy.activations_tier
    if where == "cpu" and not accelerator_for(units[0].device).has_lanes:
        return []
    ordered = sorted(units, key=lambda unit: unit.state.is_root)
    kept = dict(zip(runtime.units, needs.kept_by_unit, strict=True))
    steps, taken = [], 0
    for number, unit in enumerate(ordered, 1):
        taken += kept[unit]
        freed = needs.at_most() - needs.at_most(gone=taken, buffers=2 * away.WINDOW_BYTES)
        steps.append((number / len(ordered), freed))
    return [Tier(what="activations", where=where, steps=steps)]


def _too_small(policy: Offload, needs: _Needs, least: int) -> ConfigError:
    remedy = "" if policy.folder is not None else ", or name a folder on a disk, where the optimizer's state can be"
    return ConfigError(
        f"Offload(budget={policy.budget!r}): a rank needs {least} bytes with all away that can be, of "
        f"{needs.at_most()} if nothing is: {needs.parameters} of parameters, {needs.gradients} of gradients, "
        f"{needs.states} of states, {needs.gathered} gathered, {needs.kept} kept for backward, {needs.working} to work "
        f"in. Give budget={least}, shard over more ranks{remedy}."
    )
