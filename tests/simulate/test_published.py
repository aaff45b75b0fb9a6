"""Assumptions of `benchmarks/published.py` about the traces that it reads, and about the published rows."""

from dataclasses import replace

import pytest
import torch

from benchmarks import published
from benchmarks.published import Comparison, Shape, Step, Task, as_in_2023, mpt_rows, second_step, summary
from benchmarks.published_llama import Llama, llama_tape
from fullshard.plan.costs import costs_of
from fullshard.plan.prediction import steps_of
from fullshard.plan.timeline import lay_out
from fullshard.tape.tape import Collective, Operation

SHAPE = Shape(width=1024, heads=8, vocab=50368, seq=1024, batch=2, checkpointing=False)
COSTS = costs_of(as_in_2023("a100-80"))


@pytest.fixture(scope="module")
def rows():
    return mpt_rows(published.REDUCE_DTYPES)


@pytest.mark.slow
def test_step_of_few_blocks_predicts_step_of_many_blocks():
    task = Task(shape=SHAPE, world=32)
    whole = lay_out(second_step(task, 6, 3), COSTS).end
    assert Step.of(task).seconds(COSTS, 6, 3) == pytest.approx(whole, rel=0.005)


def test_each_microbatch_reduce_scatters_and_fsdp1_adds_copies():
    task = Task(shape=SHAPE, world=8)
    entries = second_step(task, 3, 2)
    reduced = [entry for entry in entries if isinstance(entry, Collective) and "reduce_scatter" in entry.name]
    assert len(reduced) == 2 * 4  # three blocks and the root, in each of two microbatches
    added = [entry for entry in entries if isinstance(entry, Operation) and entry.name.startswith("fsdp1")]
    assert len(added) == 2 * len(reduced)
    own = second_step(replace(task, is_fsdp1=False), 3, 2)
    assert len(own) == len(entries) - len(added)


def test_activation_checkpointing_costs_at_most_one_forward():
    plain, again = (
        lay_out(second_step(Task(shape=replace(SHAPE, checkpointing=item), world=8), 4, 1), COSTS).end
        for item in (False, True)
    )
    assert plain < again < 4 / 3 * plain


def test_mpt_rows_have_published_counts_and_gpus(rows):
    assert len(rows) == 115
    assert {row.set for row in rows} == set(published.REDUCE_DTYPES)
    assert sum(row.calibrates for row in rows) == 22
    for row in rows:
        assert row.measured * row.task.world > 0
        assert row.gpu in published.KERNELS_OF_2023


def test_reduce_dtype_of_set_applies_to_its_tasks():
    rows = mpt_rows({**published.REDUCE_DTYPES, "h100_2023": torch.bfloat16})
    assert {row.task.reduce_dtype for row in rows if row.set == "h100_2023"} == {torch.bfloat16}


def test_summary_of_exact_predictions_has_zero_error(rows):
    reported = summary([Comparison(row=row, predicted=row.measured) for row in rows])
    assert (reported["mean"], reported["p95"], reported["rank"]) == (0, 0, pytest.approx(1))


def test_models_of_pytorch_runs_have_published_parameter_counts():
    for run in published.pytorch_runs():
        shape = run.task.shape
        with torch.device("meta"):
            model = published.T5(shape, 1) if isinstance(shape, published.T5Shape) else published.Gpt(shape, 1)
        blocks = run.blocks * sum(param.numel() for param in model.blocks.parameters())
        stated = {"GPT 175B": 175e9, "GPT 1T": 1010e9, "T5 11B": 11.3e9}
        size = next(size for name, size in stated.items() if run.name.startswith(name))
        assert blocks + model.tokens.weight.numel() == pytest.approx(size, rel=0.01)


def test_llama_models_have_published_parameter_counts():
    stated = {"7B": 6.74e9, "13B": 13.02e9, "34B": 33.7e9, "70B": 68.98e9}
    shapes = {name: shape for name, shape, *_ in published.IBM_ROWS}
    for name, shape in {**shapes, "Llama 3.1 8B": published.LLAMA_3_8B}.items():
        with torch.device("meta"):
            model = Llama(replace(shape, blocks=1))
        blocks = shape.blocks * sum(param.numel() for param in model.blocks.parameters())
        others = sum(param.numel() for param in model.parameters()) - blocks // shape.blocks
        assert blocks + others == pytest.approx(stated.get(name, 8.03e9), rel=0.01)


@pytest.mark.parametrize("checkpoints", ["op", 2, None])
def test_small_llama_recomputes_products_per_checkpointing_mode(checkpoints):
    """Checkpointing recomputes matrix products: those that are not saved, or all of a block except the last."""
    shape = replace(
        published.LLAMA_3_8B, blocks=4, width=64, heads=4, kv_heads=2, mlp=96, vocabulary=32, seq=16, batch=1
    )
    kept = replace(shape, checkpoints=None, is_of_torchtitan=False)
    tapes = [llama_tape(each, 2) for each in (kept, replace(shape, checkpoints=checkpoints))]
    products, recomputed = (
        sum(item.name == "aten.mm" for item in tape.entries[steps_of(tape.entries)[1] :] if isinstance(item, Operation))
        for tape in tapes
    )
    assert products == 3 * (7 * 4 + 1)
    assert recomputed - products == {"op": 3 * 4, 2: 6 * 2, None: 0}[checkpoints]
