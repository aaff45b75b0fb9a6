"""Dry runs of the engine: the same code on fake tensors, streams and process groups, recorded in a trace."""

from fullshard.dry.races import Race, races
from fullshard.dry.run import run, taped, world
from fullshard.tape.tape import Allocation, Collective, DiskTransfer, Free, Operation, Recorded, Tape, Waited

__all__ = [
    "Allocation",
    "Collective",
    "DiskTransfer",
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
