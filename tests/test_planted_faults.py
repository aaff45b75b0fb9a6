"""Faults that are planted in real runs are told by their names, and healthy runs have none: with ranks, collectives,
recorder and reader as in every run. See `benchmarks/planted_faults.py`, which prints the table of docs/report.md.
"""

import pytest
from benchmarks.planted_faults import FAULTS, HEALTHY, PLANTS, answers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def told():
    """What is told of each run. One that shared its cores with something else has causes that nobody planted: it is
    taken once more, by itself.
    """
    found = {it.plant.title: it for it in answers()}
    wrong = [title for title, it in found.items() if not it.is_right]
    again = [it for title in wrong for it in answers(title) if it.plant.title == title]
    return found | {it.plant.title: it for it in again}


@pytest.mark.parametrize("plant", FAULTS, ids=lambda it: it.title)
def test_a_planted_fault_is_told(told, plant):
    """It costs more than whatever else there is."""
    assert told[plant.title].is_right, told[plant.title].findings


@pytest.mark.parametrize("plant", HEALTHY, ids=lambda it: it.title)
def test_a_healthy_run_has_no_cause(told, plant):
    assert told[plant.title].is_right, told[plant.title].findings


def test_there_are_enough_of_both():
    assert len({it.cause for it in FAULTS}) >= 14
    assert len(HEALTHY) >= 14
    assert len({it.title for it in PLANTS}) == len(PLANTS)
