"""Operations of a call, counted as in a trace: memory read and written, and floating-point operations."""

from __future__ import annotations

from collections.abc import Callable

from fullshard.dry.run import taped
from fullshard.tape.tape import Operation

__all__ = ["counted"]


def counted(call: Callable[[], object]) -> list[Operation]:
    """Return the operations of `call` on real tensors."""
    with taped(streams="cpu", values=True) as tape:
        call()
    return list(tape.of(Operation))
