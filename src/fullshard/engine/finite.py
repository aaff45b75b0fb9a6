"""Checks for NaN and infinite gradients, before gradients are summed over ranks, so that the rank is known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.engine.findings import findings_of_all
from fullshard.engine.unit import Unit
from fullshard.errors import NonFiniteError, named_ranks
from fullshard.tape.recorder import Origin, Phase

_ORIGIN = Origin("finite check", Phase.BACKWARD)

Tally = tuple[str, str, Tensor]
"""FQN of the parameter, name of its unit, and the numbers of NaN and infinite values in its gradient."""
_Finding = tuple[int, str, str, int, int, int]  # the number of a tally, its names, the rank, and its counts


def tally(unit: Unit) -> list[Tally]:
    """Count the non-finite values in the unsharded gradients of `unit` on this rank."""
    found = []
    for param in reversed(unit.params):
        grad = param.unsharded.grad
        if grad is not None:
            grad = grad._local_tensor if isinstance(grad, DTensor) else grad
            values = grad._values() if grad.is_sparse else grad
            fqn = f"{unit.name}.{param.fqn}" if unit.name else param.fqn
            found.append((fqn, unit.name, torch.stack([values.isnan().sum(), values.isinf().sum()])))
    return found


def raise_on_every_rank(tallies: Sequence[Tally], groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
    """Raise on all ranks that `groups` reach, one group after the other, if any rank has counted non-finite values."""
    counts_here = torch.stack([counts for _, _, counts in tallies]) if tallies else torch.zeros(1, 2, device=device)
    anywhere = counts_here.sum().to(torch.float32).reshape(1)
    rank = dist.get_rank()

    def findings() -> list[_Finding]:
        found = [(number, fqn, unit, counts.tolist()) for number, (fqn, unit, counts) in enumerate(tallies)]
        return [(number, fqn, unit, rank, *counts) for number, fqn, unit, counts in found if any(counts)]

    found = findings_of_all(findings, anywhere, groups, _ORIGIN)
    if found is None:
        return
    raise NonFiniteError(_account(sorted(set(found))))


def _account(findings: Iterable[_Finding]) -> str:
    """Return a description of the findings: ranks by parameter, and parameters in the order of their reduction."""
    ranks: dict[tuple[str, str], list[str]] = {}
    for _, fqn, unit, rank, nans, infinities in findings:
        counts = " and ".join(f"{n} {what}" for n, what in ((nans, "NaN"), (infinities, "infinite")) if n)
        ranks.setdefault((fqn, unit), []).append(f"{counts} on {named_ranks([rank])}")
    lines = [f"{fqn} (unit {unit or 'the root'}): {', '.join(where)}" for (fqn, unit), where in ranks.items()]
    shown = lines[:_SHOWN] + ([f"and {len(lines) - _SHOWN} more parameters"] if len(lines) > _SHOWN else [])
    return (
        f"gradients are not finite. {'; '.join(shown)}. The units are listed in the order of backward: check the "
        "first one and the batch of its rank. The gradients have been reduced anyway: call optimizer.zero_grad() "
        "before continuing."
    )


_SHOWN = 8
