"""Explanations of slow ranks or steps by hardware counters: lower clocks, other processes, swapping, idle GPUs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fullshard.amounts import in_bytes
from fullshard.report.account import Loss
from fullshard.report.figures import RunFigures, percent

Cells = NDArray[np.bool_]
Values = NDArray[np.float64]

_SLOWER = 0.95  # maximum ratio of a reduced clock to the usual clock; equal devices differ by less at the same work
SWAPPED = 1e6  # minimum bytes/s; a host that swaps out idle pages is below it
_MORE = 2.0  # minimum ratio to other ranks or steps
_CORES = 0.5  # minimum cores that other processes use
_IDLE = 0.9  # maximum ratio to the usual utilization
_ERRORS = 10.0  # minimum retransmitted packets per second; a few are normal
_MANY = 10.0  # minimum ratio of retransmitted packets to those of other hosts
_SLOW_LINK = 0.6  # maximum ratio to the speed of other hosts' links
_REPAIR = "Check cable, port and driver there, or remove that host from the run."


@dataclass(frozen=True)
class HardwareReason:
    """Why ranks are slow: a sentence with the measured values, and a recommended change."""

    stated: str
    change: str


def reason_of(figures: RunFigures, loss: Loss) -> HardwareReason | None:
    """Return the reason for a loss according to the counters, or None.

    Slow ranks are compared with the other ranks in the same steps. If all ranks are slow, slow steps are compared with
    the other steps.
    """
    slow = _cells(figures, loss)
    if not slow.any() or slow.all():
        return None
    others = ~slow & slow.any(0, keepdims=True)
    usual = others if others.any() else ~slow
    for reason in (_swapping, _clocks, _other_processes, _idle):
        found = reason(figures, slow, usual)
        if found is not None:
            return found
    return None


def _cells(figures: RunFigures, loss: Loss) -> Cells:
    """Return the ranks and steps in which time is lost."""
    shape, steps = figures.computes.shape, loss.pattern.slow
    if loss.pattern.kind == "growing":
        steps = np.arange(shape[1]) >= shape[1] // 2
    ranks = np.ones(shape, dtype=bool)
    if loss.in_turn:
        ranks = np.arange(shape[0])[:, None] == figures.of_group(loss.group).argmax(0)
        steps = loss.seconds > 0
    elif loss.ranks:
        ranks = np.isin(np.arange(shape[0]), loss.ranks)[:, None]
    return np.asarray(ranks & steps)


def _means(values: Values | None, slow: Cells, usual: Cells) -> tuple[float, float]:
    """Return the means of known values in slow and in usual ranks and steps; NaN if there are none."""
    if values is None:
        return float("nan"), float("nan")
    known = np.isfinite(values)
    slow_mean, usual_mean = (
        float(values[cells & known].mean()) if (cells & known).any() else float("nan") for cells in (slow, usual)
    )
    return slow_mean, usual_mean


def _where(figures: RunFigures, slow: Cells) -> str:
    hosts = {figures.run.ranks[int(place)].host for place in np.flatnonzero(slow.any(1))}
    return hosts.pop() if len(hosts) == 1 else "their hosts"


def _swapping(figures: RunFigures, slow: Cells, usual: Cells) -> HardwareReason | None:
    here, elsewhere = _means(figures.counter("swapped in", "swapped out"), slow, usual)
    return swaps(_where(figures, slow), here) if here >= max(SWAPPED, _MORE * elsewhere) else None


def swaps(where: str, bytes_per_s: float) -> HardwareReason:
    """Return a reason: the host swaps at this rate."""
    change = "Free memory there: end other programs, use fewer loader workers, or offload less to the CPU."
    return HardwareReason(f"Meanwhile {where} swaps {in_bytes(bytes_per_s)}/s.", change)


def _clocks(figures: RunFigures, slow: Cells, usual: Cells) -> HardwareReason | None:
    here, elsewhere = _means(figures.counter("GPU clock"), slow, usual)
    return slowed_by(figures, slow, elsewhere) if here <= _SLOWER * elsewhere else None


def slowed_by(figures: RunFigures, slow: Cells, usual_hz: float) -> HardwareReason:
    """Return a reason: the clock of the GPUs is lower than `usual_hz`."""

    def mean(name: str) -> float:
        return _means(figures.counter(name), slow, slow)[0]

    measured = [(mean("GPU temperature"), "°C"), (mean("GPU power"), "W")]
    at = " and ".join(f"{value:.0f} {unit}" for value, unit in measured if np.isfinite(value))
    stated = f"The GPU clock there is {mean('GPU clock') / 1e9:.2f} instead of {usual_hz / 1e9:.2f} GHz"
    stated += f", at {at}" if at else ""
    if mean("GPU slowed by heat or supply") >= 1 / 2:
        change = "Check fans, airflow and power cables: the hardware reduces the clock because of heat or power supply."
    elif mean("GPU at its power limit") >= 1 / 2:
        change = "Raise the power limit (`nvidia-smi -pl`), or check why this GPU needs more power for the same work."
    else:
        change = "Reset the clocks (`nvidia-smi -rac`, `nvidia-smi -rgc`); `nvidia-smi -q -d CLOCK` shows them."
    return HardwareReason(f"{stated}.", change)


def _idle(figures: RunFigures, slow: Cells, usual: Cells) -> HardwareReason | None:
    here, elsewhere = _means(figures.counter("GPU utilization"), slow, usual)
    if not here <= _IDLE * elsewhere:
        return None
    stated = f"The GPUs run kernels for {percent(here)} of the time there instead of {percent(elsewhere)}."
    change = "The host is slower there: look for garbage collection, recompilation, and other programs."
    return HardwareReason(stated, change)


def slow_link_of(figures: RunFigures) -> HardwareReason | None:
    """Return a reason if the link of a rank or host is slower or less reliable than other links; else None."""
    rates = 1e9 * np.array(figures.run.links_gb_s)
    if len(rates) == len(figures.run.ranks) > 1:
        usual = np.array([np.median(np.delete(rates, place)) for place in range(len(rates))])
        slowest = int(np.argmin(rates / usual))
        if rates[slowest] < usual[slowest] / 2:
            return _slow_link(figures.ranks_text((slowest,)), rates[slowest], usual[slowest])
    links, errors = figures.counter("network link"), figures.counter("network errors")
    hosts = figures.hosts()
    for host, ranks in hosts.items() if len(hosts) > 1 else ():
        here = np.isin(np.arange(len(figures.run.ranks)), ranks)[:, None] & np.ones_like(figures.computes, dtype=bool)
        speed, usual_speed = _means(links, here, ~here)
        if speed <= _SLOW_LINK * usual_speed:
            return _slow_link(host, speed, usual_speed)
        lost, usual_lost = _means(errors, here, ~here)
        if lost >= max(_ERRORS, _MANY * usual_lost):
            stated = f"{host} repeats {lost:.0f} packets per second, other hosts {usual_lost:.0f}."
            return HardwareReason(stated, _REPAIR)
    return None


def _slow_link(where: str, bytes_per_s: float, usual: float) -> HardwareReason:
    stated = f"The link of {where} reaches {in_bytes(bytes_per_s)}/s, other links {in_bytes(usual)}/s."
    return HardwareReason(stated, _REPAIR)


def _other_processes(figures: RunFigures, slow: Cells, usual: Cells) -> HardwareReason | None:
    here, elsewhere = _means(figures.other_cores, slow, usual)
    waits, waits_elsewhere = _means(figures.starved, slow, usual)
    if not (here >= max(_CORES, _MORE * elsewhere) and waits >= _MORE * waits_elsewhere):
        return None
    part = waits / max(float(figures.computes[slow].mean()), 1e-9)
    where = _where(figures, slow)
    stated = f"Other processes use {here:.1f} cores of {where}, and none is free for {percent(part)} of compute."
    return HardwareReason(stated, f"End other programs on {where}, or pin ranks to cores.")
