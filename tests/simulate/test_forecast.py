"""Predictions compared with measurements: the numbers, the named causes, and the run that shows them."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Chain, Layer, chain, inputs
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_runs import QUICK, this_rank

from fullshard import dry, fully_shard, predict_beside
from fullshard.cli import main
from fullshard.errors import ConfigError
from fullshard.plan import background
from fullshard.plan.background import warn_if_too_large
from fullshard.plan.forecast import Forecast, Forecasting, Measured, Row, compare
from fullshard.plan.hardware import hardware
from fullshard.plan.memory_used import memory_for_a_rank
from fullshard.plan.prediction import predict, read_off
from fullshard.testing import run_ranks
from fullshard.train.check import check
from fullshard.train.loop import train
from fullshard.train.options import parse_settings
from fullshard.train.predicting import Machine, comparison_of, forecast_run

FORECAST = Forecast(
    hardware="a machine",
    peak_bytes=900,
    peak_at="backward of layers.0",
    by_state={"activations": 500, "optimizer state": 200},
    needed_bytes=1000,
    limit_bytes=2000,
    step_s=1.0,
    gather_s=0.2,
    reduce_s=0.1,
    exposed_s=0.1,
)


def causes(**measured: Any) -> str:
    return " ".join(compare(FORECAST, Measured(**measured)).causes).lower()


def test_compare_includes_every_number_of_both_forecast_and_run():
    measured = Measured(step_s=1.05, needed_bytes=990, by_state={"activations": 500, "messages": 7}, gather_s=0.2)
    found = {row.name.strip(): round(row.difference, 3) for row in compare(FORECAST, measured).rows}
    assert found == {"memory": -0.01, "activations": 0.0, "step": 0.05, "gathers under way": 0.0}
    assert not compare(FORECAST, measured).causes
    assert not compare(replace(FORECAST, step_s=0.0), Measured(step_s=9.0)).rows  # no machine was described


def test_parts_predicted_as_zero_have_no_relative_error():
    """Parts predicted as zero have no relative error. Large errors are reported as factors."""
    rows = [Row("gathers", "s", 2e-8, 0.05), Row("step", "s", 0.01, 0.07), Row("step", "s", 0.01, 0.5)]
    assert [row.difference_text for row in rows] == ["", "+600.0%", "50 times"]
    (cause,) = compare(replace(FORECAST, gather_s=2e-8), Measured(step_s=9.0, gather_s=8.9)).causes
    assert "instead of 0.0 ms" in cause and not re.search(r"\d{5}", cause)


def test_compare_names_the_cause_of_a_difference():
    assert "input" in causes(step_s=1.5, input_s=0.45)
    assert "slower link" in causes(step_s=1.5, gather_s=0.65, reduce_s=0.1, input_s=0.01)
    assert "reductions" in causes(step_s=1.5, gather_s=0.2, reduce_s=0.55)
    assert "waited for a core" in causes(step_s=1.5, gather_s=0.2, core_s=0.4)
    assert "slower compute" in causes(step_s=1.5, gather_s=0.2, core_s=0.01, input_s=0.01)
    assert "faster than its description" in causes(step_s=0.5)
    assert "20% more memory" in causes(needed_bytes=1200)
    assert causes(step_s=1.09, needed_bytes=1090, input_s=0.09) == ""


def test_too_large_model_warns_with_a_suggestion():
    stated: list[str] = []
    warn_if_too_large(FORECAST, stated.append)
    warn_if_too_large(replace(FORECAST, limit_bytes=999, would_fit=("--strategy zero3",)), stated.append)
    assert len(stated) == 1 and "backward of layers.0" in stated[0] and stated[0].endswith("fit: --strategy zero3.")
    assert memory_for_a_rank(torch.device("cpu"), 4) <= memory_for_a_rank(torch.device("cpu"), 1) / 4


def settings_of(*argv: str) -> Any:
    return parse_settings([*QUICK, *argv])


def machine(memory_bytes: int) -> Machine:
    return Machine(device_type="cpu", device_name="", memory_bytes=memory_bytes, world=2, local_world=2, machines=1)


@pytest.mark.slow
def test_forecast_of_a_run_that_does_not_fit_has_a_suggestion():
    size = "--width", "128", "--layers", "4"
    sharded = forecast_run(settings_of(*size), machine(1 << 40)).needed_bytes
    found = forecast_run(settings_of(*size, "--strategy", "ddp"), machine(sharded))
    assert not found.fits and found.would_fit[0].startswith("--strategy zero3")
    assert not forecast_run(settings_of(), machine(1000)).would_fit


def break_off(*_: object) -> Forecast:
    raise ValueError("a planted error")


def of_script() -> None: ...


@pytest.mark.slow
def test_failed_background_forecast_raises_its_reason():
    with pytest.raises(ConfigError, match=r"nothing could be predicted: .*a planted error"):
        Forecasting(break_off).result()
    function = of_script
    function.__module__ = "__main__"
    with pytest.raises(ConfigError, match=r"of_script is defined in the running script.*to a module"):
        Forecasting(break_off, function)
    with pytest.raises(ConfigError, match="no units"):
        predict_beside(nn.Linear(1, 1), torch.optim.SGD([torch.ones(1)]), chain, inputs)


def make_chain() -> nn.Module:
    return chain(fully_shard)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def train_alongside() -> list[Any]:
    stated: list[Any] = []
    model = make_chain()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    predict_beside(model, optimizer, make_chain, inputs, hardware="h100-80", loss=loss_of, tell=stated.append)
    before = len(stated)
    for step in range(5):
        loss_of(model, inputs(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            assert len(stated) == before
    return [before, *(getattr(item, "title", item) for item in stated)]


def run_and_predict(out: Path) -> None:
    rank = this_rank()
    settings = parse_settings([*QUICK, "--steps", "5", "--out", str(out)])
    train(settings, check(settings, rank.world), rank, predicts=True)


def both(out: Path) -> list[Any]:
    run_and_predict(out)
    return train_alongside()


@pytest.mark.slow
def test_run_records_predictions_alongside_measurements(tmp_path, capsys):
    first, second = run_ranks(2, both, tmp_path / "run")
    assert second == [0] and first[0] == 0 and first[1].startswith("predicted and measured")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = {line["kind"]: line for line in lines}
    predicted, measured = found["forecast"]["by_state"], found["measured"]["by_state"]
    for state in ("parameters at rest", "optimizer state", "gradients that the optimizer sees", "unsharded parameters"):
        assert predicted[state] == measured[state], state
    assert predicted["activations"] == pytest.approx(measured["activations"], rel=0.02)
    assert found["measured"]["step_s"] > 0
    assert {row.name for row in comparison_of(tmp_path / "run").rows} >= {"memory", "  activations"}
    assert main(["plan", "--against", str(tmp_path / "run")]) == 0
    assert "activations" in capsys.readouterr().out
    assert main(["plan", "--against", str(tmp_path / "run"), "--json", "-"]) == 0
    assert {row["name"] for row in json.loads(capsys.readouterr().out)["rows"]} >= {"memory", "  activations"}
    with pytest.raises(ConfigError, match="found no run with a prediction"):
        comparison_of(tmp_path)


class Checkpointed(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def test_predicted_flops_exclude_recomputation():
    def prediction(layer: type[Layer], machine: Any = None) -> Any:
        def make() -> nn.Module:
            return chain(fully_shard, Chain([layer() for _ in range(3)]))

        return predict(make, inputs, hardware=machine or hardware("h100-80"), world=4, loss=loss_of)

    plain, recomputing = prediction(Layer), prediction(Checkpointed)
    assert plain.flops == recomputing.flops > 0
    assert plain.fits and 0 < plain.flops_utilisation < 1
    assert plain.peak.nbytes <= sum(plain.most_by_state.values())
    assert prediction(Layer, replace(hardware("h100-80"), memory_bytes_per_s=1e9)).step_s > plain.step_s
    with pytest.raises(ConfigError, match="a trace of 0 steps"):
        read_off(dry.Tape(), hardware("h100-80"), 1)


def test_names_in_brackets_are_printed_verbatim(capsys):
    """Names in brackets, such as tables of a description, are not markup."""
    background._print("ours.toml: [link] colour: unknown")
    assert capsys.readouterr().out == "ours.toml: [link] colour: unknown\n"
