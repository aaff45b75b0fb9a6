"""`check_parity` and `fullshard parity` accept equal training and name the first difference otherwise."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from shared_ranks import on_new_ranks
from small_models import Chain, batch, chain, inputs, leave, loss_of, small_gpt
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import fullshard
from fullshard import ConfigError
from fullshard.cli import main
from fullshard.comm import pairwise, shared_memory
from fullshard.testing import Parallelism, ParityReport, ParityRow, RanksFailed, assert_same, check_parity
from fullshard.testing.parity.batches import BatchArgument, argument_of
from fullshard.testing.parity.cases import NOT_SHARDED, Case, cases_of
from fullshard.testing.parity.command import shown
from fullshard.testing.parity.difference import Compared, Difference, Kind, ParityFinding, Tolerance
from fullshard.testing.parity.plain import train_plain
from fullshard.testing.parity.recipe import Recipe
from fullshard.testing.parity.trace import Trace
from fullshard.wrap import ModuleWrapPolicy

WIDTH, CLASSES = 40, 7


class Layer(nn.Module):
    """Dropout, and a norm that keeps separate averages on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 128)
        self.norm = nn.BatchNorm1d(128)
        self.down = nn.Linear(128, WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.norm(self.up(x)))))


class Net(nn.Module):
    """Tied, frozen and unused parameters, and a forward that depends on a buffer, which each call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.layers[2].up.requires_grad_(False)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, given: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        x = self.embedding(given) * (1 + self.calls / 10)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), target)


class LowNet(nn.Module):
    """For low precision: layers without averages, which torch keeps in float32, and a layer that is given float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(3))

    def forward(self, x: Tensor) -> SimpleNamespace:
        for layer in self.layers:
            x = layer(x.float())
        return SimpleNamespace(loss=x.square().mean())


def make_batch(number: int) -> tuple[Tensor, Tensor]:
    """Drawn from the usual generator, as a user's may be."""
    return torch.randint(CLASSES, (6,)), torch.randint(CLASSES, (6,))


def make_inputs(number: int) -> dict[str, Tensor]:
    return {"x": torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))}


BY_LAYER = ModuleWrapPolicy({Layer})
QUICK = {"steps": 2, "auto_wrap_policy": BY_LAYER}


# -- equal ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_strategy_matches_plain_training_bitwise():
    report = check_parity(Net, make_batch, ranks=2, accumulate=2, **QUICK)
    assert [row.title for row in report.rows] == [
        "ddp, 2 ranks",
        "zero1, 2 ranks",
        "zero2, 2 ranks",
        "zero3, 2 ranks",
        "hsdp, 2 ranks in 2 replicas",
        "hsdp_zero2, 2 ranks in 2 replicas",
    ]
    assert report.is_bit_for_bit, report
    assert report.is_equal
    report.raise_if_different()


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        ((1, 3), {"accumulate": 2}),
        ((3,), {"accumulate": 2, "reduce_each": True, "optimizer": "sgd", "clip": 0}),
        ((4,), {"strategies": ["hsdp"]}),
    ],
    ids=str,
)
@pytest.mark.slow
def test_one_three_and_four_ranks_match_plain_training_bitwise(ranks, options):
    report = check_parity(Net, make_batch, ranks=ranks, **{"strategies": ["zero3"], **QUICK, "steps": 5, **options})
    assert report.is_bit_for_bit, report


@pytest.mark.parametrize(
    ("ranks", "strategy", "dtype", "reduce_dtype"),
    [(3, "zero3", torch.bfloat16, None), (2, "zero1", torch.float16, torch.float16)],
    ids=str,
)
def test_mixed_precision_matches_plain_training_bitwise(ranks, strategy, dtype, reduce_dtype):
    report = check_parity(
        LowNet,
        make_inputs,
        ranks=ranks,
        strategies=[strategy],
        steps=2,
        accumulate=2,
        dtype=dtype,
        reduce_dtype=reduce_dtype,
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
    )
    assert report.is_bit_for_bit, report


def make_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([param for param in model.parameters() if param.requires_grad], lr=0.01, amsgrad=True)


def two_sequences(number: int) -> Tensor:
    return batch(number, 2)


def test_check_parity_accepts_custom_loss_and_optimizer():
    report = check_parity(
        small_gpt, two_sequences, loss_of, ranks=2, strategies=["zero2"], optimizer=make_adam, steps=2
    )
    assert report.is_bit_for_bit, report


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "options"), [(3, {}), (4, {"accumulate": 3})], ids=str)
def test_all_strategies_match_plain_bitwise_on_three_and_four_ranks(ranks, options):
    report = check_parity(small_gpt, two_sequences, loss_of, ranks=ranks, steps=3, **options)
    assert report.is_bit_for_bit, report


# -- the plain reference ----------------------------------------------------------------------------------------------


def one_loop(recipe: Recipe, ranks: int) -> list[Any]:
    """Train one plain model on every microbatch, in a simple loop."""
    torch.manual_seed(recipe.seed)
    model = LowNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    left: list[Any] = []
    microbatches = ranks * recipe.accumulate
    for step in range(recipe.steps):
        for number in range(step * microbatches, (step + 1) * microbatches):
            loss = model(**make_inputs(number)).loss
            (loss / recipe.accumulate).backward()
            left.append(loss.detach())
        for param in model.parameters():
            assert param.grad is not None
            param.grad /= ranks
        if recipe.clip:
            left.append(torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip))
        optimizer.step()
        optimizer.zero_grad()
        left.append({name: param.detach().clone() for name, param in model.named_parameters()})
    return left


def traced(recipe: Recipe, ranks: int, trace: Trace) -> list[Any]:
    train_plain(recipe, ranks, ranks, trace)
    left: list[Any] = []
    for step in (trace.read(number) for number in range(1, recipe.steps + 1)):
        left += step.losses.values()
        left += [step.norm] if recipe.clip else []
        left.append(step.parameters)
    return left


@on_new_ranks(1)
def test_plain_reference_matches_simple_training_loop_bitwise(tmp_path):
    # Several ranks take the norm part by part, a loop takes it of the whole: other bits, both true.
    for ranks, accumulate, clip in ((1, 1, 0.1), (1, 3, 0.1), (1, 1, 0), (3, 1, 0)):
        recipe = Recipe(make_model=LowNet, make_batch=make_inputs, steps=3, accumulate=accumulate, clip=clip)
        name = f"{ranks} ranks, {accumulate} microbatches, clipped to {clip}"
        assert_same(traced(recipe, ranks, Trace(tmp_path)), one_loop(recipe, ranks), name=name)


# -- different --------------------------------------------------------------------------------------------------------


class ReadsItsRank(Net):
    def forward(self, given: Tensor, target: Tensor) -> Tensor:
        return super().forward(given, target) + dist.get_rank() * self.layers[1].down.bias.sum()


class IsNeverTheSame(Net):
    def forward(self, given: Tensor, target: Tensor) -> Tensor:
        noise = int.from_bytes(os.urandom(4), "little") / 2**32
        return super().forward(given, target) + noise * self.layers[1].norm.weight.sum()


def never_begins_the_same() -> nn.Module:
    model = Net()
    generator = torch.Generator()
    generator.seed()
    nn.init.normal_(model.layers[2].up.bias, generator=generator)
    return model


def with_broken_engine(engine: Any, attribute: str, broken: Callable[..., Any]) -> nn.Module:
    """Return a model that breaks the engine of the process that builds it."""
    setattr(engine, attribute, broken)
    return Net()


def adds_in_another_order() -> nn.Module:
    right = pairwise.sum_in_rank_order
    return with_broken_engine(
        shared_memory, "sum_in_rank_order", lambda out, terms, divisor: right(out, list(reversed(terms)), divisor)
    )


def does_not_divide() -> nn.Module:
    return with_broken_engine(pairwise, "divide", lambda tensors, divisor: None)


def writes_to_a_weight_before_the_third_call() -> nn.Module:
    model, calls = Net(), []

    def spoil(module: nn.Module, args: Any) -> None:
        calls.append(1)
        if len(calls) == 3 and dist.get_world_size() > 1:
            with torch.no_grad():
                module.down.weight[0, 0] += 1e-4

    model.layers[0].register_forward_pre_hook(spoil)
    return model


@pytest.mark.parametrize(
    ("make_model", "ranks", "first"),
    [
        (ReadsItsRank, 2, "gradient of layers.1.down.bias, step 1, rank 0"),
        (IsNeverTheSame, 1, "gradient of layers.1.norm.weight, step 1, rank 0"),
        (never_begins_the_same, 2, "layers.2.up.bias, before step 1, rank 0"),
        (does_not_divide, 2, "gradient of embedding.weight, step 1, rank 0"),
    ],
)
def test_report_names_first_difference(make_model, ranks, first):
    report = check_parity(make_model, make_batch, ranks=ranks, strategies=["zero2"], **QUICK)
    [row] = report.rows
    assert str(row.first) == first
    assert not row.is_equal
    assert not row.is_bit_for_bit
    with pytest.raises(AssertionError, match=first):
        report.raise_if_different()


@pytest.mark.slow
def test_report_states_step_of_late_difference():
    report = check_parity(
        writes_to_a_weight_before_the_third_call,
        make_batch,
        ranks=2,
        strategies=["ddp"],
        steps=4,
        auto_wrap_policy=BY_LAYER,
    )
    [row] = report.rows
    assert row.first is not None
    assert row.first.step == 3
    assert 0 < row.loss.largest < 1e-2


@pytest.mark.slow
def test_different_summation_order_is_detected_and_within_tolerance():
    report = check_parity(
        adds_in_another_order, make_batch, ranks=3, strategies=["zero3"], rtol=1e-3, atol=1e-4, **QUICK
    )
    assert 0 < report.rows[0].gradient.largest < 1e-5
    assert report.is_equal
    assert not report.is_bit_for_bit
    assert "All 1 agree with the plain process within atol 0.0001 and rtol 0.001." in str(report)


class RefusesToBeSharded(Net):
    def forward(self, given: Tensor, target: Tensor) -> Tensor:
        if not isinstance(self.unused, nn.Parameter) or type(self) is not RefusesToBeSharded:
            raise ValueError("not like this")
        return super().forward(given, target)


def test_failed_ranks_become_rows_and_report_shows_cause_once():
    report = check_parity(RefusesToBeSharded, make_batch, ranks=2, strategies=["ddp", "zero3"], **QUICK)
    assert [row.failure.splitlines()[0] for row in report.rows] == ["ValueError: not like this"] * 2
    assert not report.is_equal
    assert str(report).count("Traceback") == 1
    assert "ddp, 2 ranks; zero3, 2 ranks: ValueError: not like this" in str(report)


class FailsAnyway(Net):
    def forward(self, given: Tensor, target: Tensor) -> Tensor:
        raise ValueError("never")


def test_failing_plain_training_raises():
    with pytest.raises(RanksFailed, match="ValueError: never"):
        check_parity(FailsAnyway, make_batch, ranks=2, **QUICK)


def make_rows(rows: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, WIDTH)}


def make_one() -> dict[str, Tensor]:
    return {"x": torch.randn(3, WIDTH)}


def make_no_rows(number: int) -> dict[str, Tensor]:
    return {"x": torch.randn(0, WIDTH)}


def test_batch_function_may_take_number_of_rows():
    for make, rows in ((make_rows, 5), (make_one, 3), (make_inputs, 4)):
        recipe = Recipe(make_model=LowNet, make_batch=make, rows=5)
        drawn = [recipe._batch(number)["x"] for number in (0, 1, 0)]
        assert [len(batch) for batch in drawn] == [rows] * 3
        assert_same(drawn[0], drawn[2])
        assert not torch.equal(drawn[0], drawn[1])
    report = check_parity(LowNet, make_rows, ranks=2, strategies=["zero3"], **QUICK)
    assert report.is_bit_for_bit, report
    with pytest.raises(ConfigError, match=r"make_no_rows\(0\) returned a tensor of shape \(0, 40\), which has no rows"):
        check_parity(LowNet, make_no_rows, ranks=2, **QUICK)


@pytest.mark.parametrize(
    ("sizes", "argument"),
    [
        (lambda value: [(value, 7)], BatchArgument.ROWS),
        (lambda value: [(2 * value, 7), (3,)], BatchArgument.ROWS),
        (lambda value: [(4, 7)], BatchArgument.NUMBER),
        (lambda value: [(4, 5 + value)], BatchArgument.NUMBER),  # sequences of other lengths
        (lambda value: [(1 + value, 7)], BatchArgument.NUMBER),
        (lambda value: [(3, 7)] * (1 + value), BatchArgument.NUMBER),
        (lambda value: [((4, 7), (5, 7))[value - 1]], BatchArgument.NUMBER),  # there are only two
        (lambda: [(4, 7)], BatchArgument.NOTHING),
    ],
)
def test_batch_function_argument_is_inferred_from_tensor_shapes(sizes, argument):
    made = (lambda: sizes()) if argument is BatchArgument.NOTHING else lambda value: [*map(torch.zeros, sizes(value))]
    assert argument_of(made) is argument


class Diverges(LowNet):
    """Its loss is not a number, or its gradient is infinite."""

    loss_factor, gradient_factor = float("nan"), 1.0

    def forward(self, x: Tensor) -> SimpleNamespace:
        loss = super().forward(x).loss * self.loss_factor
        if self.gradient_factor != 1:
            loss.register_hook(lambda grad: grad * self.gradient_factor)
        return SimpleNamespace(loss=loss)


class DivergesInBackward(Diverges):
    loss_factor, gradient_factor = 1.0, float("inf")


@pytest.mark.parametrize(
    ("model", "stated"), [(Diverges, "the loss of microbatch 0"), (DivergesInBackward, "the gradient of")]
)
def test_non_finite_plain_training_raises(model, stated, capsys):
    with pytest.raises(ConfigError, match=f"plain training gives {stated}.* = (nan|inf|-inf) in step 1"):
        check_parity(model, make_inputs, ranks=2, strategies=["zero3"], **QUICK)
    argv = ["--model", f"{__file__}:{model.__name__}", "--batch", f"{__file__}:make_inputs", "--ranks", "2"]
    assert main(["parity", *argv, "--strategies", "zero3"]) == 2
    assert stated in capsys.readouterr().err


# -- the parts --------------------------------------------------------------------------------------------------------


def test_cases_select_applicable_strategies_grouped_by_mesh():
    assert [str(case) for case in cases_of((3, 2), ("hsdp", "ddp"), 1)] == [
        "hsdp, 3 ranks",
        "ddp, 3 ranks",
        "hsdp, 2 ranks",
        "ddp, 2 ranks",
    ]
    by_ranks = [[case.strategy for case in cases_of((ranks,), None, 2)] for ranks in (1, 2, 3, 4)]
    one_axis = ["ddp", "zero1", "zero2", "zero3"]
    assert by_ranks == [one_axis, [*one_axis, "hsdp", "hsdp_zero2"], one_axis, [*one_axis, "hsdp", "hsdp_zero2"]]
    assert cases_of((4,), ("hsdp",), 2) == [Case("hsdp", 4, 2)]
    assert Case("hsdp", 6, 2).shards == 3


EXACT = Tolerance()


@given(st.lists(st.floats(width=32), min_size=1), st.floats(0, 1))
def test_tensor_has_no_difference_from_its_clone(values, atol):
    tensor = torch.tensor(values)
    for tolerance in (EXACT, Tolerance(atol, atol)):
        assert Difference.between(tensor, tensor.clone(), tolerance) == Difference()


@given(st.floats(-100, 100, width=32), st.floats(2**-10, 1, width=32))
def test_difference_is_tolerated_only_within_tolerance(value, gap):
    one = torch.tensor([0.0, value], dtype=torch.float64)
    other = one + torch.tensor([0.0, gap], dtype=torch.float64)
    gap = (other - one)[1].item()  # what is left of it by rounding
    assert Difference.between(other, one, EXACT) == Difference(gap, False, False)
    assert Difference.between(other, one, Tolerance(atol=gap)).is_tolerated
    assert not Difference.between(other, one, Tolerance(atol=gap * 0.99)).is_tolerated
    relative = gap / abs(value) if value else 1e9  # of nothing, no part is enough
    assert Difference.between(other, one, Tolerance(rtol=relative * 1.01)).is_tolerated == (value != 0)
    assert not Difference.between(other, one, Tolerance(rtol=relative * 0.99)).is_tolerated


@pytest.mark.parametrize(
    ("actual", "largest"),
    [
        (None, math.inf),
        (torch.ones(3), math.inf),
        (torch.ones(2).double(), math.inf),
        (torch.tensor([1.0, math.nan]), math.inf),
        (torch.tensor([1.0, -math.inf]), math.inf),
        (torch.tensor([1.0, 1.5]), 0.5),
    ],
    ids=str,
)
def test_incompatible_shapes_dtypes_and_nan_differ_infinitely(actual, largest):
    difference = Difference.between(actual, torch.ones(2), Tolerance(atol=0.1))
    assert difference == Difference(largest, False, False)


def test_relative_tolerance_does_not_apply_to_infinity():
    infinite = torch.tensor([torch.inf])
    assert not Difference.between(torch.ones(1), infinite, Tolerance(rtol=0.5)).is_tolerated
    assert Difference.between(infinite, infinite, Tolerance(rtol=0.5)) == Difference()


def test_negative_zero_is_not_bitwise_equal_to_zero():
    zero = torch.zeros(1)
    assert Difference.between(-zero, zero, EXACT) == Difference(0.0, False, False)
    assert Difference.between(-zero, zero, Tolerance(atol=1e-9)) == Difference(0.0, False, True)
    assert Difference.between(None, None, EXACT) == Difference()


def test_first_difference_prefers_untolerated_then_parameter_then_earliest():
    compared = Compared(rank=0, tolerance=Tolerance(atol=1.0))
    zero = torch.zeros(1)
    for kind, name, step, gap in [
        (Kind.LOSS, "0", 1, 2.0),
        (Kind.GRADIENT, "a", 1, 0.5),
        (Kind.GRADIENT, "b", 2, 2.0),
        (Kind.GRADIENT, "c", 2, 0.0),
        (Kind.PARAMETER, "a", 2, 2.0),
    ]:
        compared.add(kind, name, step, zero + gap, zero)
    assert str(compared.first) == "gradient of b, step 2, rank 0"
    assert compared.differences[Kind.GRADIENT] == Difference(2.0, False, False)
    other = Compared(rank=1, tolerance=compared.tolerance)
    other.add(Kind.GRADIENT, "c", 1, None, zero)
    assert str(ParityFinding.first([compared.first, other.first])) == "gradient of c, step 1, rank 1"


@pytest.mark.parametrize("terminal", [True, False])
def test_command_shows_each_row_immediately(terminal):
    cases = cases_of((2,), ("zero1", "zero3"), 2)
    bare = ParityRow.of(Case(NOT_SHARDED, 2, 1), [])  # on meshes of several axes, not one of the cases
    rows = [bare, ParityRow.of(cases[0], []), ParityRow.failed(cases[1], "ValueError: no")]
    console = Console(file=io.StringIO(), force_terminal=terminal, width=60)
    assert list(shown(iter(rows), cases, console)) == rows
    stated = re.sub(r"\x1b\[[\d?;]*\w", "", console.file.getvalue())
    if terminal:
        assert "0/2 zero1, 2 ranks" in stated and "2/2 zero3, 2 ranks" in stated and "3/2" not in stated
    else:
        assert stated == f"{bare}\nzero1, 2 ranks: the same bits\nzero3, 2 ranks: failed\n"


def test_row_states_that_difference_is_within_tolerance():
    case, compared = Case("ddp", 2, 1), Compared(rank=0, tolerance=Tolerance(atol=1.0))
    compared.add(Kind.LOSS, "0", 1, torch.ones(()), torch.zeros(()))
    assert str(ParityRow.of(case, [compared])) == "ddp, 2 ranks: within the tolerance"


# -- the command ------------------------------------------------------------------------------------------------------

HERE = ["--batch", f"{__file__}:make_batch", "--ranks", "2", "--steps", "2", "--wrap", "Layer"]


@pytest.mark.slow
def test_parity_command_writes_table_and_json_if_equal(tmp_path, capsys):
    path = tmp_path / "parity.json"
    argv = ["--model", f"{__file__}:Net", "--strategies", "zero1,hsdp", "--json", str(path)]
    assert main(["parity", *HERE, *argv]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("zero1, 2 ranks: the same bits\nhsdp, 2 ranks in 2 replicas: the same bits\n")
    rows = [line.split() for line in out.splitlines() if "yes" in line]
    assert rows == [["zero1", "2", "0", "0", "0", "0", "yes"], ["hsdp", "2", "x", "1", "0", "0", "0", "0", "yes"]]
    assert out.endswith("All 2 agree with the plain process bit for bit.\n")
    result = json.loads(path.read_text())
    assert result["equal"]
    assert result["options"]["strategies"] == "zero1,hsdp"
    assert [row["strategy"] for row in result["rows"]] == ["zero1", "hsdp"]
    assert result["rows"][0]["parameter"] == 0


def test_parity_command_names_parameter_and_exits_with_1_if_different(tmp_path, capsys):
    path = tmp_path / "parity.json"
    argv = ["--model", f"{__file__}:ReadsItsRank", "--strategies", "zero2", "--json", str(path)]
    assert main(["parity", *HERE, *argv]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    assert re.search(r"^ zero2 +2 .* no +gradient of layers.1.down.bias, step 1, rank 0", out, re.MULTILINE)
    assert out.endswith("1 of 1 do not agree with the plain process.\n")
    [row] = json.loads(path.read_text())["rows"]
    assert row["first"] == {"kind": "gradient", "name": "layers.1.down.bias", "step": 1, "rank": 0}
    assert row["loss"] > 0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model", "nowhere:make_model"], "no such module in"),
        (["--model", "os:make_model"], "there is no make_model in os"),
        (["--model", "builtins:dict"], "dict returned a dict. It must return the model"),
        (["--model", "{here}:Net", "--wrap", "Block"], "no module below Net is a Block"),
        (["--model", "{here}:Layer", "--batch", "{here}:make_inputs", "--wrap", "Linear"], "is of shape (4, 40)"),
        (["--model", "torch.nn:Flatten"], "without trained parameters"),
        (["--model", "{here}:Net", "--ranks", "0"], "at least one rank"),
        (["--model", "{here}:Net", "--ranks", "two"], "must be whole numbers"),
        (["--model", "{here}:Net", "--strategies", "zero4"], "'zero4' is not a strategy"),
        (["--model", "{here}:Net", "--steps", "0"], "steps=0: must be at least 1"),
        (["--model", "{here}:Net", "--stpes", "3"], "Did you mean steps"),
        (["--model", "{here}:Net", "--timeout", "-1"], "positive number of seconds"),
        ([], "--model is missing"),
    ],
)
def test_parity_command_prints_one_line_and_exits_with_2_on_bad_input(argv, words, capsys):
    assert main(["parity", *HERE, *(item.format(here=__file__) for item in argv)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fullshard: ")
    assert err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model", "{here}:make_inputs"], "TypeError: make_inputs() missing 1 required positional argument"),
        (["--model", "{here}:Net", "--batch", "{here}:make_inputs"], "unexpected keyword argument 'x'"),
    ],
)
def test_parity_command_exits_with_2_and_traceback_if_plain_training_fails(argv, words, capsys):
    assert main(["parity", *HERE, *(item.format(here=__file__) for item in argv)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fullshard: plain training fails, so sharded training cannot be compared with it. ")
    assert words in err
    assert "Traceback" in err


def test_parity_command_help_lists_options(capsys):
    with pytest.raises(SystemExit) as end:
        main(["parity", "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    for option in ("--model", "--batch", "--loss", "--wrap", "--ranks", "--strategies", "--accumulate", "--json"):
        assert option in out


MODULE = """
import torch
from torch import nn

def make_model():
    return nn.Linear(4, 1)

def make_batch(number):
    return torch.randn(3, 4)

def loss(model, batch):
    return model(batch).square().mean()
"""


@pytest.mark.slow
def test_parity_command_imports_modules_from_working_directory(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    argv = ["--model", "mine:make_model", "--batch", "mine:make_batch", "--loss", "mine:loss", "--ranks", "2"]
    ended = subprocess.run(
        [sys.executable, "-m", "fullshard.cli", "parity", *argv, "--strategies", "zero3"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(fullshard.__file__).parent.parent), "PYTHONSAFEPATH": "1"},
        timeout=300,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.endswith("All 1 agree with the plain process bit for bit.\n")


def test_parity_docs_show_actual_table():
    page = (Path(__file__).parents[2] / "docs" / "parity.md").read_text()
    report = ParityReport(tuple(ParityRow.of(case, []) for case in cases_of((2, 3), None, 2)), EXACT)
    table = "\n".join(line.rstrip() for line in str(report).splitlines())
    assert f"```\n{table}\n```" in page


# -- with tensor parallelism ------------------------------------------------------------------------------------------


def tp_plan(model: nn.Module) -> dict[str, Any]:
    return {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def perceptrons() -> nn.Module:
    return chain(leave, Chain())


@pytest.mark.slow
def test_strategies_match_tensor_parallelism_without_sharding_bitwise():
    """Tensor parallelism alone matches plain training within rounding, and the report states the difference."""
    report = check_parity(
        perceptrons,
        inputs,
        square,
        ranks=2,
        parallelism=Parallelism(tp=2, tp_plan=tp_plan),
        strategies=["zero3", "hsdp"],
        steps=2,
    )
    assert [(row.strategy, row.replicas) for row in report.rows] == [
        ("none", 1),
        ("zero3", 1),
        ("none", 2),
        ("hsdp", 2),
    ]
    assert [row.is_bit_for_bit for row in report.rows if row.strategy != "none"] == [True, True], str(report)
    assert report.is_equal, str(report)
    assert "2 agree bit for bit with unsharded training on the same ranks" in report.stated
