"""The account of a run's total time: which part of a step loses time, on which ranks, and in which steps.

[Note: where the time of a run goes]
The time of a step is the work of the rank that finishes last, plus transport, the exposed communication of that rank.
Other ranks wait for it meanwhile. The work is accounted in groups of parts. For each group, the account states
- the time that all ranks lose: input, checkpoints and other code entirely, compute and transport only beyond their
  typical step;
- the time by which one or more particular ranks are late in every step, in some steps, or since some step;
- the time by which the last rank is late, if it is a different rank in each step.
Noise is measured by the differences between steps. Differences that noise of that size may explain are not a loss.
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

_SURE = 4.5  # standard deviations
_MOSTLY = 0.8  # of the slow steps follow a pattern
_NAMED = 0.75  # minimum share of all lateness of ranks that are named
_RATIO = 2.0  # minimum ratio of their lateness to that of other ranks
_LIKELY = 4.5  # standard deviations of a sum of ranks that take turns
_NOISE = 0.3  # of the mean lateness: lateness of less between slow steps is none
_MOST_LOST = 0.3  # of a loss is beyond the usual, or it is steady
_NOTABLE = 0.2  # minimum excess of slow steps over the mean
_LEAST = 0.02  # of the time: smaller losses are not accounted


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """The steps in which time is lost."""

    kind: str  # "steady", "every" for each n-th step, "random", "since", "until", "between" or "growing"
    slow: Steps  # the steps with a loss; shape (steps,)
    base_s: Seconds  # the seconds of the other steps, by step; shape (steps,). 0 for a steady loss
    period: int = 1  # the number of steps between two losses, for "every"


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Time that is lost for one reason."""

    group: str  # a key of `GROUPS`, or "transport"
    ranks: tuple[int, ...] = ()  # the indices of the ranks that are behind; empty for a loss of all ranks
    in_turn: bool = False  # whether another rank is behind in each step
    seconds: Seconds  # the loss in each step; shape (steps,)
    lost: float  # the loss as a fraction of the total time
    pattern: Pattern  # the steps in which it occurs

    @property
    def each_s(self) -> float:
        """Seconds lost in each step that has a loss: the mean."""
        return float(self.seconds[self.pattern.slow].mean()) if self.pattern.slow.any() else 0.0


def find_losses(work: Mapping[str, Seconds], transport: Seconds, step_s: Seconds) -> tuple[Loss, ...]:
    """Return all losses of a run, the largest first.

    Args:
        work: The seconds of each group of `GROUPS`; each of shape (ranks, steps).
        transport: The exposed communication of the rank that finishes last; shape (steps,).
        step_s: The wall time of steps; shape (steps,).
    """
    found = [loss for group, seconds in work.items() for loss in _of_group(group, seconds, work, step_s)]
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


def _of_group(group: str, seconds: Seconds, work: Mapping[str, Seconds], step_s: Seconds) -> list[Loss]:
    found, late = list[Loss](), _late_ranks(seconds, float(step_s.mean()))
    others = np.delete(seconds, late, axis=0)
    own = np.sum(list(work.values()), axis=0)
    waited = float((own.max(0) - _of_most(own)).sum() / step_s.sum())  # losses of ranks in different parts overlap
    if late:
        behind = seconds[list(late)].mean(0) - np.median(others, axis=0)
        pattern = _pattern_of_loss(behind)
        is_noise = np.abs(pattern.base_s) < _NOISE * behind.mean()
        found.append(_loss(group, np.where(pattern.slow | ~is_noise, behind, 0.0), step_s, pattern, ranks=late))
    elif len(seconds) > 1:
        behind = _behind_in_turn(seconds)
        found.append(_loss(group, behind, step_s, _pattern_of_loss(behind), in_turn=True))
    found = [loss for loss in found if min(loss.lost, waited) >= _LEAST]
    in_turn = any(loss.in_turn for loss in found)
    usual = _of_most(others) if in_turn else others.mean(0) if group != "compute" else _median(others)
    if group != "compute":
        return [*found, _loss(group, usual, step_s, _pattern_of_loss(usual))]
    pattern = pattern_of(usual, _LEAST * float(step_s.sum()))
    excess = [] if pattern.kind == "steady" else [_loss(group, usual - pattern.base_s, step_s, pattern)]
    return [*found, *excess]


def _pattern_of_loss(seconds: Seconds) -> Pattern:
    """Return the steps with most of a loss."""
    return pattern_of(seconds, _MOST_LOST * float(seconds.sum()))


def _late_ranks(seconds: Seconds, step_s: float) -> tuple[int, ...]:
    """Return the ranks that take longer than most, each for most of the time that any rank does."""
    ranks, steps = seconds.shape
    if ranks < 2:
        return ()
    noise = _noise(seconds)
    behind = seconds - _of_most(seconds)
    low, high = _expected(ranks, _place_of_most(ranks)), _expected(ranks, ranks - 1)
    mean = behind.mean(1) + noise * low
    least = max(_LEAST * step_s, _SURE * noise / np.sqrt(steps), _NAMED * (behind.max(0).mean() - noise * (high - low)))
    deviations = (behind - behind.mean(0)).sum(1) / np.sqrt(behind.var(0).sum() + 1e-30)  # if ranks took turns
    far = np.where(behind > 1.5 * _SURE * noise, behind, 0.0)
    is_sure = (deviations >= _LIKELY) | ((far.sum(1) >= _MOSTLY * far.max(0).sum()) & ((far > 0).sum(1) > 2))
    late = (mean >= least) & is_sure
    if late.any():
        late |= mean >= max(least, _MOSTLY * mean[late].mean())  # those that are as late as a sure one
    if late.all() or not late.any() or mean[late].min() < _RATIO * mean[~late].max():
        return ()
    return tuple(int(rank) for rank in np.flatnonzero(late))


def _behind_in_turn(seconds: Seconds) -> Seconds:
    """Return the delay of the last rank of each step; 0 for steps in which it may be due to chance."""
    last, at = seconds.argmax(0), np.arange(seconds.shape[1])
    behind = seconds[last, at] - _median(np.sort(seconds, axis=0)[:-1])
    noise, count = _noise(seconds), len(seconds)
    chance = noise * (_expected(count, count - 1) - _expected(count, (count - 2) // 2))
    if np.median(behind) >= _RATIO * chance:
        return np.asarray(behind)
    return np.asarray(np.where(behind > _SURE * noise, behind, 0.0))


def _of_most(seconds: Seconds) -> Seconds:
    """Return the minimum over three of four ranks, or over both of two; shape (steps,)."""
    return np.asarray(np.sort(seconds, axis=0)[_place_of_most(len(seconds))])


def _median(seconds: Seconds) -> Seconds:
    """Return the median over ranks, the lower one of two; shape (steps,)."""
    return np.asarray(np.sort(seconds, axis=0)[(len(seconds) - 1) // 2])


def _place_of_most(ranks: int) -> int:
    return (ranks - 1) // 4


def _expected(count: int, place: int) -> float:
    """Return the expected value of the element at `place` of `count` sorted normal values (Blom, 1958)."""
    return NormalDist().inv_cdf((place + 1 - 0.375) / (count + 0.25))


def _noise(series: Seconds) -> float:
    """Return the standard deviation of one or more series without their levels, their trends, and slow steps.

    It is estimated from differences between steps. Up to half of these may be larger for other reasons.
    """
    count = series.shape[-1]
    quartiles = [_quartile_of_differences(series, lag) for lag in (1, 2, 3) if count > 3 * lag]
    least = 1e-3 * float(np.abs(series).mean()) + 1e-9
    return max(least, min(quartiles, default=0.0) / _QUARTILE * (1 + _FEW / series.size))


_QUARTILE = 0.4506  # of the absolute difference of two normal values
_FEW = 10.0  # corrects the minimum over few values


def _quartile_of_differences(series: Seconds, lag: int) -> float:
    differences = series[..., lag:] - series[..., :-lag]
    beyond = np.sort(np.abs(differences - np.median(differences, axis=-1, keepdims=True)), axis=None)  # beyond a trend
    return float(beyond[(beyond.size - 1) // 4])


# -- in which steps ---------------------------------------------------------------------------------------------------


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
    span = _changed(series)
    change = abs(float(series[span].mean() - series[~span].mean()))
    deviation = noise * np.sqrt(1 / span.sum() + 1 / (~span).sum())
    is_sure = change >= max(1.2 * _SURE * deviation, _NOTABLE / 2 * float(series.mean()))
    return _lasting(series, span) if is_sure else _steady(count)


def _larger(series: Seconds) -> Steps:
    """Return the larger values, by the threshold that separates two classes best (Otsu, 1979)."""
    order = np.sort(series)
    count = np.arange(1, len(order))
    below = np.cumsum(order)[:-1]
    gaps = (order.sum() - below) / (len(order) - count) - below / count
    best = int(np.argmax(count * (len(order) - count) * gaps**2))
    return np.asarray(series > (order[best] + order[best + 1]) / 2)


def _longest(slow: Steps) -> Steps:
    """Return the range of consecutive steps that agrees best with `slow`."""
    score = np.cumsum(np.where(slow, 1, -1))
    before = np.minimum.accumulate(np.concatenate([[0], score[:-1]]))
    stop = int(np.argmax(score - before))
    start = int(np.argmin(np.concatenate([[0], score[: stop + 1]])[: stop + 1]))
    at = np.arange(len(slow))
    return (at >= start) & (at <= stop)


def _is_mostly(slow: Steps, span: Steps) -> bool:
    """Return whether `slow` is nearly that range, which is long enough not to be a single event."""
    wrong = int((slow != span).sum())
    return int(span.sum()) > 2 and not span.all() and wrong <= (1 - _MOSTLY) * min(slow.sum(), (~span).sum())


def _changed(series: Seconds) -> Steps:
    """Return the larger of the two parts into which a change of level splits the series."""
    count = np.arange(1, len(series))
    below = np.cumsum(series)[:-1]
    gaps = (series.sum() - below) / (len(series) - count) - below / count
    best = int(np.argmax(count * (len(series) - count) * gaps**2))
    later = np.arange(len(series)) > best
    return later if gaps[best] > 0 else ~later


def _lasting(series: Seconds, span: Steps) -> Pattern:
    """Return the pattern of a series that is larger within a range of steps, or that grows."""
    level = np.where(span, series[span].mean(), series[~span].mean())
    at = np.arange(len(series)) - (len(series) - 1) / 2
    slope = float(at @ series / (at @ at))
    line = series.mean() + slope * at
    if span[-1] and slope > 0 and ((series - line) ** 2).sum() < ((series - level) ** 2).sum():
        return Pattern(
            kind="growing", slow=np.ones(len(series), dtype=bool), base_s=np.full(len(series), max(0.0, line[0]))
        )
    kind = "since" if span[-1] else "until" if span[0] else "between"
    return Pattern(kind=kind, slow=span, base_s=np.full(len(series), series[~span].mean()))


def _period(places: NDArray[np.int64]) -> int | None:
    """Return the number of steps from one of `places` to the next, if it is nearly always the same."""
    if len(places) < 3:
        return None
    distances = np.diff(places)
    period = int(np.median(distances))
    return period if period > 1 and (distances == period).mean() >= _MOSTLY else None
