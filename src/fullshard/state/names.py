"""Names that this package adds to the states of optimizers."""

from __future__ import annotations

OWN = "_fullshard_own"  # marks tensors in optimizer states that are local to a rank and do not have the shard's shape
FORM = "blocks"  # the name of the state that describes the encoding of other states
CODES, SCALE = ".codes", ".scale"  # suffixes of the components of an encoded state


def is_part(name: str) -> bool:
    """Return True if a state of this name is a component of an encoded state."""
    return name.endswith((CODES, SCALE))
