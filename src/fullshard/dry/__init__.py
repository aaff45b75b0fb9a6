"""The engine run dry: the same code on fake tensors, pretended lanes and a pretended group, written on a tape."""

from fullshard.dry.races import Race, races
from fullshard.dry.run import run, taped, world
from fullshard.tape.tape import Tape

__all__ = ["Race", "Tape", "races", "run", "taped", "world"]
