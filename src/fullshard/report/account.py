"""The account of a run's total time: which part of a step loses time, on which ranks, and in which steps.

[Note: where the time of a run goes]
The time of a step is the work of the rank that finishes last, plus transport, the exposed communication of that rank.
Other ranks wait for it meanwhile. The work is accounted in groups of parts. For each group, the account states

- the time that all ranks lose: input, checkpoints and other code entirely, compute and transport only beyond their
  typical step;
- the time by which one or more particular ranks are late in every step, in some steps, or since some step;
- the time by which the last rank is late, if it is a different rank in each step.

Noise is estimated from the differences between steps. Differences that noise of this size may explain are not a loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]
Steps = NDArray[np.bool_]

GROUPS: Mapping[str, tuple[str, ...]] = {
    "input": ("input",),
    "compute": ("forward", "backward", "optimizer"),
    "checkpoint": ("checkpoint",),
    "other": ("other",),
}
"""The parts of a step by group, without communication."""

_SURE = 4.5  # minimum difference in standard deviations
_MOSTLY = 0.8  # minimum fraction of the slow steps that follow a pattern
_NAMED = 0.75  # minimum fraction of the total delay that is due to the named ranks
_RATIO = 2.0  # minimum ratio of their delay to that of other ranks
_LIKELY = 4.5  # standard deviations of the delay of a rank, if a different rank is late in each step
_NOISE = 0.3  # delays between slow steps below this fraction of the mean delay are noise
_MOST_LOST = 0.3  # minimum fraction of a loss that exceeds the typical step; a smaller one is steady
_NOTABLE = 0.2  # minimum excess of slow steps over the mean
_LEAST = 0.02  # minimum fraction of the total time


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """A description of the steps in which time is lost."""

    kind: str  # "steady", "every" for each n-th step, "random", "since", "until", "between" or "growing"
    slow: Steps  # the steps with a loss; shape (steps,)
    base_s: Seconds  # the seconds of the other steps, by step; shape (steps,). 0 for a steady loss
    period: int = 1  # the number of steps between two losses, for "every"


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Time that is lost for one reason."""

    group: str  # a key of `GROUPS`, or "transport"
    ranks: tuple[int, ...] = ()  # the indices of the late ranks; empty for a loss of all ranks
    in_turn: bool = False  # whether a different rank is late in each step
    seconds: Seconds  # the loss in each step; shape (steps,)
    lost: float  # the loss as a fraction of the total time
    pattern: Pattern  # the steps in which it occurs

    @property
    def each_s(self) -> float:
        """Mean seconds lost per step with a loss."""
        return float(self.seconds[self.pattern.slow].mean()) if self.pattern.slow.any() else 0.0


def find_losses(work: Mapping[str, Seconds], transport: Seconds, step_s: Seconds) -> tuple[Loss, ...]:
    """Return all losses of a run, the largest first.

    Args:
        work: The seconds of each group of `GROUPS`; each of shape (ranks, steps).
        transport: The exposed communication of the rank that finishes last; shape (steps,).
        step_s: The wall time of steps; shape (steps,).
    """
    found = [loss for group, seconds in work.items() for loss in _losses_of_group(group, seconds, work, step_s)]
    excess = pattern_of(transport, _LEAST * float(step_s.sum()))
    if excess.kind != "steady":
        found.append(_loss("transport", transport - excess.base_s, step_s, excess))
    return tuple(sorted((loss for loss in found if loss.lost >= _LEAST), key=lambda loss: -loss.lost))


def _loss(
    group: str,
    seconds: Seconds,
    step_s: Seconds,
    pattern: Pattern,
    *,
    ranks: tuple[int, ...] = (),
    in_turn: bool = False,
) -> Loss:
    lost = float(seconds.sum() / step_s.sum())
    return Loss(group=group, ranks=ranks, in_turn=in_turn, seconds=seconds, lost=lost, pattern=pattern)


def _losses_of_group(group: str, seconds: Seconds, work: Mapping[str, Seconds], step_s: Seconds) -> list[Loss]:
    found, late = list[Loss](), _late_ranks(seconds, float(step_s.mean()))
    others = np.delete(seconds, late, axis=0)
    total = np.sum(list(work.values()), axis=0)
    # Delays in different groups can cancel out, so the last rank must also be late in its total work.
    waited = float((total.max(0) - _lower_quartile(total)).sum() / step_s.sum())
    if late:
        delay = seconds[list(late)].mean(0) - np.median(others, axis=0)
        pattern = _pattern_of_loss(delay)
        is_noise = np.abs(pattern.base_s) < _NOISE * delay.mean()
        found.append(_loss(group, np.where(pattern.slow | ~is_noise, delay, 0.0), step_s, pattern, ranks=late))
    elif len(seconds) > 1:
        delay = _delay_of_last(seconds)
        found.append(_loss(group, delay, step_s, _pattern_of_loss(delay), in_turn=True))
    found = [loss for loss in found if min(loss.lost, waited) >= _LEAST]
    in_turn = any(loss.in_turn for loss in found)
    usual = _lower_quartile(others) if in_turn else others.mean(0) if group != "compute" else _lower_median(others)
    if group != "compute":
        return [*found, _loss(group, usual, step_s, _pattern_of_loss(usual))]
    pattern = pattern_of(usual, _LEAST * float(step_s.sum()))
    excess = [] if pattern.kind == "steady" else [_loss(group, usual - pattern.base_s, step_s, pattern)]
    return [*found, *excess]


def _pattern_of_loss(seconds: Seconds) -> Pattern:
    """Return the steps in which most of a loss occurs."""
    return pattern_of(seconds, _MOST_LOST * float(seconds.sum()))


def _late_ranks(seconds: Seconds, step_s: float) -> tuple[int, ...]:
    """Return the indices of the ranks that are responsible for most of the delay."""
    ranks, steps = seconds.shape
    if ranks < 2:
        return ()
    noise = _noise(seconds)
    delay = seconds - _lower_quartile(seconds)
    low, high = _order_statistic(ranks, (ranks - 1) // 4), _order_statistic(ranks, ranks - 1)
    mean = delay.mean(1) + noise * low
    least = max(_LEAST * step_s, _SURE * noise / np.sqrt(steps), _NAMED * (delay.max(0).mean() - noise * (high - low)))
    # The deviation from the expected delay if a different rank were late in each step.
    deviations = (delay - delay.mean(0)).sum(1) / np.sqrt(delay.var(0).sum() + 1e-30)
    far = np.where(delay > 1.5 * _SURE * noise, delay, 0.0)
    is_sure = (deviations >= _LIKELY) | ((far.sum(1) >= _MOSTLY * far.max(0).sum()) & ((far > 0).sum(1) > 2))
    late = (mean >= least) & is_sure
    if late.any():
        late |= mean >= max(least, _MOSTLY * mean[late].mean())  # ranks with a similar delay
    if late.all() or not late.any() or mean[late].min() < _RATIO * mean[~late].max():
        return ()
    return tuple(int(rank) for rank in np.flatnonzero(late))


def _delay_of_last(seconds: Seconds) -> Seconds:
    """Return the delay of the last rank of each step; 0 for steps in which it may be due to chance."""
    delay = seconds.max(0) - _lower_median(np.sort(seconds, axis=0)[:-1])
    noise, count = _noise(seconds), len(seconds)
    chance = noise * (_order_statistic(count, count - 1) - _order_statistic(count, (count - 2) // 2))
    if np.median(delay) >= _RATIO * chance:
        return np.asarray(delay)
    return np.asarray(np.where(delay > _SURE * noise, delay, 0.0))


def _lower_quartile(seconds: Seconds) -> Seconds:
    """Return the lower quartile over ranks; shape (steps,)."""
    return np.asarray(np.sort(seconds, axis=0)[(len(seconds) - 1) // 4])


def _lower_median(seconds: Seconds) -> Seconds:
    """Return the median over ranks; for an even number of ranks, the lower one. Shape (steps,)."""
    return np.asarray(np.sort(seconds, axis=0)[(len(seconds) - 1) // 2])


def _order_statistic(count: int, index: int) -> float:
    """Return the expected value of the element at `index` of `count` sorted normal values (Blom, 1958)."""
    return NormalDist().inv_cdf((index + 1 - 0.375) / (count + 0.25))


def _noise(series: Seconds) -> float:
    """Return the standard deviation of one or more series without their levels, their trends, and slow steps.

    It is estimated from differences between steps, up to half of which may be outliers.
    """
    count = series.shape[-1]
    quartiles = []
    for lag in (1, 2, 3):
        if count > 3 * lag:
            differences = series[..., lag:] - series[..., :-lag]
            detrended = np.abs(differences - np.median(differences, axis=-1, keepdims=True))
            quartiles.append(float(np.sort(detrended, axis=None)[(detrended.size - 1) // 4]))
    least = 1e-3 * float(np.abs(series).mean()) + 1e-9
    return max(least, min(quartiles, default=0.0) / _QUARTILE * (1 + _FEW / series.size))


_QUARTILE = 0.4506  # of the absolute difference of two normal values
_FEW = 10.0  # corrects the minimum over few values


# -- patterns over steps ----------------------------------------------------------------------------------------------


def pattern_of(series: Seconds, least_s: float) -> Pattern:
    """Return the steps in which a series is larger than usual, by at least `least_s` seconds in total."""
    pattern = _pattern(series)
    is_large = float((series - pattern.base_s).sum()) >= least_s
    return pattern if is_large else _steady(len(series))


def _steady(count: int) -> Pattern:
    return Pattern(kind="steady", slow=np.ones(count, dtype=bool), base_s=np.zeros(count))


def _pattern(series: Seconds) -> Pattern:
    count, noise = len(series), _noise(series)
    if count < 4:
        return _steady(count)
    slow = _larger(series)
    gap = float(series[slow].mean() - series[~slow].mean()) if slow.any() and not slow.all() else 0.0
    if gap >= max(_SURE * noise, _NOTABLE * float(series.mean())):
        span = _longest(slow)
        if _is_mostly(slow, span):
            return _lasting(series, span)
        period = _period(np.flatnonzero(slow))
        kind = "every" if period else "random"
        return Pattern(kind=kind, slow=slow, base_s=np.full(count, series[~slow].mean()), period=period or 1)
    first, gap = _best_split(series)
    span = (np.arange(count) >= first) == (gap > 0)  # the larger of the two parts
    change = abs(float(series[span].mean() - series[~span].mean()))
    deviation = noise * np.sqrt(1 / span.sum() + 1 / (~span).sum())
    is_sure = change >= max(1.2 * _SURE * deviation, _NOTABLE / 2 * float(series.mean()))
    return _lasting(series, span) if is_sure else _steady(count)


def _larger(series: Seconds) -> Steps:
    """Return the larger values, by the threshold that separates two classes best (Otsu, 1979)."""
    order = np.sort(series)
    first, _ = _best_split(order)
    return np.asarray(series > (order[first - 1] + order[first]) / 2)


def _best_split(series: Seconds) -> tuple[int, float]:
    """Return the index that splits `series` into the two parts whose means differ most, and the difference."""
    count = np.arange(1, len(series))
    below = np.cumsum(series)[:-1]
    gaps = (series.sum() - below) / (len(series) - count) - below / count
    best = int(np.argmax(count * (len(series) - count) * gaps**2))
    return best + 1, float(gaps[best])


def _longest(slow: Steps) -> Steps:
    """Return the range of consecutive steps that agrees best with `slow`."""
    score = np.cumsum(np.where(slow, 1, -1))
    before = np.minimum.accumulate(np.concatenate([[0], score[:-1]]))
    stop = int(np.argmax(score - before))
    start = int(np.argmin(np.concatenate([[0], score[: stop + 1]])[: stop + 1]))
    at = np.arange(len(slow))
    return (at >= start) & (at <= stop)


def _is_mostly(slow: Steps, span: Steps) -> bool:
    """Return True if `slow` nearly equals `span`, a range that is too long to be a single event."""
    wrong = int((slow != span).sum())
    return int(span.sum()) > 2 and not span.all() and wrong <= (1 - _MOSTLY) * min(slow.sum(), (~span).sum())


def _lasting(series: Seconds, span: Steps) -> Pattern:
    """Return the pattern of a series that is larger within the range `span`, or that grows."""
    level = np.where(span, series[span].mean(), series[~span].mean())
    at = np.arange(len(series)) - (len(series) - 1) / 2
    slope = float(at @ series / (at @ at))
    line = series.mean() + slope * at
    if span[-1] and slope > 0 and ((series - line) ** 2).sum() < ((series - level) ** 2).sum():
        base_s = np.full(len(series), max(0.0, line[0]))
        return Pattern(kind="growing", slow=np.ones(len(series), dtype=bool), base_s=base_s)
    kind = "since" if span[-1] else "until" if span[0] else "between"
    return Pattern(kind=kind, slow=span, base_s=np.full(len(series), series[~span].mean()))


def _period(places: NDArray[np.int64]) -> int | None:
    """Return the distance between consecutive `places` if it is nearly constant; None otherwise."""
    if len(places) < 3:
        return None
    distances = np.diff(places)
    period = int(np.median(distances))
    return period if period > 1 and (distances == period).mean() >= _MOSTLY else None
