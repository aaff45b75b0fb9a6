"""The engine run dry: the same code on fake tensors, pretended lanes and a pretended group, written on a tape."""

from fullshard.dry.races import Race, races
from fullshard.dry.run import run, taped, world
from fullshard.tape.tape import Allocation, Collective, Free, Operation, Recorded, Tape, Waited

__all__ = [
    "Allocation",
    "Collective",
    "Free",
    "Operation",
    "Race",
    "Recorded",
    "Tape",
    "Waited",
    "races",
    "run",
    "taped",
    "world",
]
