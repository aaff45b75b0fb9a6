"""Which units rest on the CPU, of those that were asked for a fraction, see `policy.offload.Home`.

[Note: from the last unit on]
Backward comes to the last unit first. So its gradients are the first on the CPU, with all of backward still to run; and
the next forward needs it last, when all others have computed. Whatever the CPU does for a unit, its copies and its
step, has the most time beside the device's work if the unit is the last. The root is the last to be taken: its forward
is around all others.
"""

from __future__ import annotations

from collections.abc import Sequence

from fullshard.engine.unit import Unit
from fullshard.policy.offload import Home, Offload

__all__ = ["homes_of"]


def homes_of(units: Sequence[Unit]) -> dict[Unit, Home]:
    """The home of each of the units of a root, which are in order. Those that were asked for the same share a fraction.

    Units that a root has settled before stay where they are.
    """
    homes = {unit: unit.home for unit in units}
    policies: list[Offload] = []
    for unit in units:
        policy = unit.options.offload.in_full
        if policy not in policies:
            policies.append(policy)
            alike = [other for other in units if other.options.offload.in_full == policy]
            homes |= _homes(alike, policy)
    return homes


def _homes(units: Sequence[Unit], policy: Offload) -> dict[Unit, Home]:
    stepped = _last(units, {unit: unit.trained_nbytes for unit in units}, policy.cpu_fraction)
    whole = _last(units, {unit: unit.whole_nbytes for unit in units}, policy.parameters.get("cpu", 0.0))
    homes = {}
    for unit in units:
        on_cpu = Home.CPU if unit in whole else Home.STEPPED_ON_CPU if unit in stepped else Home.DEVICE
        is_settled = unit.rests_on_disk or unit.state.runtime is not None
        homes[unit] = unit.home if is_settled else on_cpu
    return homes


def _last(units: Sequence[Unit], nbytes: dict[Unit, int], fraction: float) -> set[Unit]:
    """The last of `units`, of those that rest on no disk, that have at least that fraction of the bytes of all."""
    wanted, taken = fraction * sum(nbytes.values()), 0
    chosen = set()
    for unit in reversed(units):
        if taken < wanted and not unit.rests_on_disk:
            taken += nbytes[unit]
            chosen.add(unit)
    return chosen
