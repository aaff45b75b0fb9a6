"""Random faults are found with their cause, ranks, steps and size: a sample of `benchmarks/report_faults.py`."""

import pytest

from benchmarks.report_faults import KINDS, evaluate


@pytest.fixture(scope="module")
def numbers():
    confusion = evaluate(seed=0, planted=100, healthy=50)
    assert {item.planted.kind.title for item in confusion.planted} == {kind.title for kind in KINDS}
    return confusion.numbers


@pytest.mark.parametrize(
    ("wrong", "most"), [("unnoticed", 0.05), ("wrong cause", 0.05), ("wrong steps", 0.05), ("false alarms", 0.02)]
)
def test_rates_of_wrong_answers_are_below_their_limits(numbers, wrong, most):
    assert numbers[wrong] <= most


def test_reported_lost_time_matches_the_planted_fault(numbers):
    assert numbers["error within 10 %"] >= 0.95
    assert numbers["median error"] <= 0.01
