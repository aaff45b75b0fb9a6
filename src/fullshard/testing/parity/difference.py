"""Differences between the results of a rank and those of the plain process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from math import inf, isfinite

from torch import Tensor

from fullshard.errors import ConfigError
from fullshard.testing.same import differing, gaps


class Kind(Enum):
    """The kinds of results that are compared in every step."""

    LOSS = "loss"
    GRADIENT = "gradient"
    GRADIENT_NORM = "gradient norm"
    PARAMETER = "parameter"


@dataclass(frozen=True)
class Tolerance:
    """The allowed difference of an element: `atol + rtol * abs(expected) + of_largest * max(abs(expected))`."""

    atol: float = 0.0
    rtol: float = 0.0
    of_largest: float = 0.0

    def __post_init__(self) -> None:
        for name in ("atol", "rtol", "of_largest"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 0.")

    @property
    def is_bit_for_bit(self) -> bool:
        """True if all bits must be identical, including the sign of zeros."""
        return self.atol == self.rtol == self.of_largest == 0


@dataclass(frozen=True)
class Difference:
    """The difference between tensors. By default there is none."""

    largest: float = 0.0  # of an element; infinite for NaN, and for a missing tensor or a different shape or dtype
    is_bit_for_bit: bool = True
    is_tolerated: bool = True

    @classmethod
    def between(cls, actual: Tensor | None, expected: Tensor | None, tolerance: Tolerance) -> Difference:
        """Return the difference of two tensors. Either may be missing."""
        if actual is None and expected is None:
            return cls()
        if actual is None or expected is None or (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
            return cls(inf, is_bit_for_bit=False, is_tolerated=False)
        differs = differing(actual, expected)
        if not differs.any():
            return cls()
        gap = gaps(actual, expected, differs)
        largest = float(gap.max())
        sizes = expected.abs().to(gap.dtype)
        allowed = tolerance.atol + tolerance.rtol * sizes + tolerance.of_largest * sizes.max()
        is_tolerated = not tolerance.is_bit_for_bit and isfinite(largest) and bool((gap <= allowed).all())
        return cls(largest, is_bit_for_bit=False, is_tolerated=is_tolerated)

    def __or__(self, other: Difference) -> Difference:
        """Return the larger difference. The flags are True only if both are."""
        return Difference(
            max(self.largest, other.largest),
            self.is_bit_for_bit and other.is_bit_for_bit,
            self.is_tolerated and other.is_tolerated,
        )


NO_DIFFERENCE = Difference()


@dataclass(frozen=True)
class ParityFinding:
    """A difference found in the comparison."""

    kind: Kind
    name: str  # the parameter's FQN, or the number of the microbatch of a loss
    step: int  # counts from 1; 0 is before the first step
    rank: int
    place: int  # index in the order of the rank's comparisons
    difference: Difference

    def __str__(self) -> str:
        name = {
            Kind.PARAMETER: self.name,
            Kind.GRADIENT: f"gradient of {self.name}",
            Kind.LOSS: f"loss of microbatch {self.name}",
        }.get(self.kind, self.kind.value)
        return f"{name}, {f'step {self.step}' if self.step else 'before step 1'}, rank {self.rank}"

    @property
    def _order(self) -> tuple[bool, bool, int, int, int]:
        """The sort key: differences beyond the tolerance first, then parameters and gradients, then the earliest."""
        is_of_parameter = self.kind in (Kind.GRADIENT, Kind.PARAMETER)
        return (self.difference.is_tolerated, not is_of_parameter, self.step, self.place, self.rank)

    def as_dict(self) -> dict[str, str | int]:
        """Return the finding for JSON."""
        return {"kind": self.kind.value, "name": self.name, "step": self.step, "rank": self.rank}

    @staticmethod
    def first(findings: Iterable[ParityFinding]) -> ParityFinding | None:
        """Return the most important finding, or None."""
        return min(findings, key=lambda finding: finding._order, default=None)


@dataclass
class Compared:
    """All comparisons of one rank so far."""

    rank: int
    tolerance: Tolerance
    differences: dict[Kind, Difference] = field(default_factory=lambda: dict.fromkeys(Kind, NO_DIFFERENCE))
    first: ParityFinding | None = None
    _count: int = 0

    def add(self, kind: Kind, name: str, step: int, actual: Tensor | None, expected: Tensor | None) -> None:
        """Compare two tensors. Call it in the order of the model within one step."""
        difference = Difference.between(actual, expected, self.tolerance)
        self.differences[kind] |= difference
        self._count += 1
        if not difference.is_bit_for_bit:
            finding = ParityFinding(kind, name, step, self.rank, self._count, difference)
            self.first = ParityFinding.first([finding] if self.first is None else [self.first, finding])
