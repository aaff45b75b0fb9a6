"""Faults that are planted in real runs are told by their names, and healthy runs have none: with ranks, collectives,
recorder and reader as in every run. See `benchmarks/planted_faults.py`, which prints the table of docs/report.md.
"""

import pytest
from benchmarks.planted_faults import FAULTS, HEALTHY, PLANTS, answers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ELSEWHERE = {"oversubscribed cores"}  # a true finding on a machine that others use, too


@pytest.fixture(scope="module")
def told():
    return {it.plant.title: it for it in answers()}


@pytest.mark.parametrize("plant", FAULTS, ids=lambda it: it.title)
def test_a_planted_fault_is_told(told, plant):
    """It costs more than whatever else there is, but for cores that others take."""
    answer = told[plant.title]
    causes = [it.cause for it in answer.findings if it.cause == plant.cause or it.cause not in ELSEWHERE]
    assert causes[:1] == [plant.cause], answer.said
    found = next(it for it in answer.findings if it.cause == plant.cause)
    assert plant.said in found.said


@pytest.mark.parametrize("plant", HEALTHY, ids=lambda it: it.title)
def test_a_healthy_run_has_no_cause(told, plant):
    answer = told[plant.title]
    assert {it.cause for it in answer.findings} <= ELSEWHERE, answer.said


def test_there_are_enough_of_both():
    assert len({it.cause for it in FAULTS}) >= 14
    assert len(HEALTHY) >= 14
    assert len({it.title for it in PLANTS}) == len(PLANTS)
