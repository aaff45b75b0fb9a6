"""Faults planted in real runs are reported by their names, and healthy runs have none: with ranks, collectives,
recorder and reader as in every run, on a clock that only planted faults advance. What the machine's own
cores do is planted by `benchmarks/planted_faults.py` alone, which prints the table of docs/report.md.
"""

import pytest

from benchmarks.planted_faults import FAULTS, HEALTHY, PLANTS, answers

MEASURED = [fault for fault in FAULTS if not fault.of_cores]


@pytest.fixture(scope="module")
def reported():
    return {answer.plant.title: answer for answer in answers(pretended_clock=True)}


@pytest.mark.slow
@pytest.mark.parametrize("plant", MEASURED, ids=lambda item: item.title)
def test_a_planted_fault_is_reported(reported, plant):
    """It costs more than all other causes."""
    assert reported[plant.title].is_right, reported[plant.title].findings


@pytest.mark.parametrize("plant", HEALTHY, ids=lambda item: item.title)
def test_a_healthy_run_has_no_cause(reported, plant):
    assert reported[plant.title].is_right, reported[plant.title].findings


def test_there_are_enough_of_both():
    assert len({fault.cause for fault in FAULTS}) >= 14
    assert len(HEALTHY) >= 14
    assert len({plant.title for plant in PLANTS}) == len(PLANTS)
