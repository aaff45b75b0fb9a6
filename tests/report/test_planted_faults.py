"""Faults planted in real runs are reported by name, and healthy runs have no cause. Ranks, collectives, recorder and
reader are those of every run. Only planted faults advance the clock. Faults of the machine's cores are planted only
by `benchmarks/planted_faults.py`, which prints the table of docs/report.md.
"""

import pytest

from benchmarks.planted_faults import FAULTS, HEALTHY, PLANTS, answers

MEASURED = [fault for fault in FAULTS if not fault.of_cores]


@pytest.fixture(scope="module")
def reported():
    return {answer.plant.title: answer for answer in answers(pretended_clock=True)}


@pytest.mark.slow
@pytest.mark.parametrize("plant", MEASURED, ids=lambda item: item.title)
def test_planted_fault_is_reported_as_the_main_cause(reported, plant):
    """The planted fault costs more than all other causes."""
    assert reported[plant.title].is_right, reported[plant.title].findings


@pytest.mark.parametrize("plant", HEALTHY, ids=lambda item: item.title)
def test_healthy_real_run_has_no_cause(reported, plant):
    assert reported[plant.title].is_right, reported[plant.title].findings


def test_benchmark_has_enough_faults_and_healthy_runs():
    assert len({fault.cause for fault in FAULTS}) >= 14
    assert len(HEALTHY) >= 14
    assert len({plant.title for plant in PLANTS}) == len(PLANTS)
