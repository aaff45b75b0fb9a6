"""What `benchmarks/published.py` takes for granted of the tapes that it reads, and of the rows."""

from dataclasses import replace

import pytest
import torch

from benchmarks import published
from benchmarks.published import Comparison, Shape, Step, Task, as_in_2023, mpt_rows, second_step, summary
from fullshard.plan.costs import costs_of
from fullshard.plan.timeline import lay_out
from fullshard.tape.tape import Collective, Operation

SHAPE = Shape(width=1024, heads=8, vocab=50368, seq=1024, batch=2, checkpointing=False)
COSTS = costs_of(as_in_2023("a100-80"))


@pytest.fixture(scope="module")
def rows():
    return mpt_rows(published.REDUCE_DTYPES)


def test_a_step_of_few_blocks_predicts_one_of_many():
    task = Task(shape=SHAPE, world=32)
    whole = lay_out(second_step(task, 6, 3), COSTS).end
    assert Step.of(task).seconds(COSTS, 6, 3) == pytest.approx(whole, rel=0.005)


def test_each_microbatch_reduces_and_fsdp1_has_its_copies_there():
    task = Task(shape=SHAPE, world=8)
    entries = second_step(task, 3, 2)
    reduced = [entry for entry in entries if isinstance(entry, Collective) and "reduce_scatter" in entry.name]
    assert len(reduced) == 2 * 4  # three blocks and the root, in each of two
    added = [entry for entry in entries if isinstance(entry, Operation) and entry.name.startswith("fsdp1")]
    assert len(added) == 2 * len(reduced)
    own = second_step(replace(task, is_fsdp1=False), 3, 2)
    assert len(own) == len(entries) - len(added)


def test_checkpointing_costs_a_forward_at_most():
    plain, again = (
        lay_out(second_step(Task(shape=replace(SHAPE, checkpointing=item), world=8), 4, 1), COSTS).end
        for item in (False, True)
    )
    assert plain < again < 4 / 3 * plain


def test_rows_are_those_that_were_published(rows):
    assert len(rows) == 115
    assert {row.set for row in rows} == set(published.REDUCE_DTYPES)
    assert sum(row.calibrates for row in rows) == 22
    for row in rows:
        assert row.measured * row.task.world > 0
        assert row.gpu in published.KERNELS_OF_2023


def test_the_switch_of_a_set_reaches_its_tasks():
    rows = mpt_rows({**published.REDUCE_DTYPES, "h100_2023": torch.bfloat16})
    assert {row.task.reduce_dtype for row in rows if row.set == "h100_2023"} == {torch.bfloat16}


def test_the_summary_of_exact_predictions_is_all_zeros(rows):
    reported = summary([Comparison(row=row, predicted=row.measured) for row in rows])
    assert (reported["mean"], reported["p95"], reported["rank"]) == (0, 0, pytest.approx(1))


def test_models_of_pytorchs_runs_have_the_sizes_that_were_published():
    for run in published.pytorch_runs():
        shape = run.task.shape
        with torch.device("meta"):
            model = published.T5(shape, 1) if isinstance(shape, published.T5Shape) else published.Gpt(shape, 1)
        blocks = run.blocks * sum(param.numel() for param in model.blocks.parameters())
        stated = {"GPT 175B": 175e9, "GPT 1T": 1010e9, "T5 11B": 11.3e9}
        size = next(size for name, size in stated.items() if run.name.startswith(name))
        assert blocks + model.tokens.weight.numel() == pytest.approx(size, rel=0.01)
