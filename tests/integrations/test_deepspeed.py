"""DeepSpeed scripts train with DeepSpeed's results, and every key of the configuration is handled.

`tests/deepspeed_runs.py` records DeepSpeed's results in `tests/data/deepspeed`.
"""

import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_ranks, run_ranks
from tests.deepspeed_runs import (
    CASES,
    MICROBATCH,
    MICROBATCHES,
    PATTERN,
    RECORDED,
    SAVED_AT,
    SCALES,
    SCHEDULES,
    STEPS,
    Block,
    Small,
    adam_of_two_groups,
    config,
    groups_of,
    rates,
    scales,
    small,
    start,
    tokens_of,
    train,
)
from tests.small_models import whole, wholes
from torch import nn

from fullshard import ConfigError, Offload, StateError, explain, recording
from fullshard.cli import main
from fullshard.engine.registry import units_in
from fullshard.errors import CheckpointError
from fullshard.integrations import deepspeed
from fullshard.integrations.deepspeed.configuration import BatchSizes, read
from fullshard.integrations.deepspeed.importing import _knowing_deepspeeds_classes
from fullshard.integrations.deepspeed.keys import KEYS, Handling, table
from fullshard.integrations.deepspeed.loss_scale import LossScale
from fullshard.integrations.deepspeed.schedules import SCHEDULES as OWN
from fullshard.integrations.placing import repeated_layers
from fullshard.testing import assert_same
from fullshard.wrap import wrapped_modules


@cache
def recorded() -> dict[str, Any]:
    return json.loads((RECORDED / "recorded.json").read_text())


# -- results ----------------------------------------------------------------------------------------------------------


def train_every_case() -> dict[str, list[dict[str, float]]]:
    return {name: list(train(start(deepspeed, its), range(STEPS))) for name, its in CASES.items()}


@cache
def own() -> list[dict[str, list[dict[str, float]]]]:
    return run_ranks(2, train_every_case)


def assert_close(own: Any, peer: Any, name: str) -> None:
    """Allow for rounding: of float32, or of 16-bit dtypes after some steps."""
    tolerance = 2e-5 if name in ("unclipped", "clipped_hard") or "_" not in name else 2e-2
    for rank, (local, its) in enumerate(zip(own, peer, strict=True)):
        for step, (one, other) in enumerate(zip(local, its, strict=True)):
            for what in ("loss", "norm", "rate") if "0" not in name else ("loss", "rate"):
                assert one[what] == pytest.approx(other[what], rel=tolerance), (name, rank, step, what)


@pytest.mark.parametrize("name", CASES)
def test_losses_norms_and_rates_match_recorded_deepspeed_runs(name):
    assert_close([rank[name] for rank in own()], recorded()["runs"][name], name)


def test_deepspeed_stages_with_same_reduction_are_bitwise_equal():
    for rank in own():
        assert rank["stage0"] == rank["stage1"]
        assert rank["stage2"] == rank["stage3"]
        assert rank["stage2_bf16"] == rank["stage3_bf16"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed itself is not installed")
def test_recorded_results_match_installed_deepspeed(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    script = Path(__file__).parents[1] / "deepspeed_runs.py"
    subprocess.run([*command, script, tmp_path], env=environment, check=True, capture_output=True, timeout=300)
    peer = json.loads((tmp_path / "recorded.json").read_text())
    for name in CASES:
        assert_close([rank[name] for rank in own()], peer["runs"][name], name)
    assert peer["rates"] == recorded()["rates"]
    assert peer["scales"] == recorded()["scales"]


def train_plainly() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train the same loop in plain PyTorch, on the batches of rank 0, without clipping."""
    model = small()
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.05, betas=(0.9, 0.99))
    losses = []
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            loss = model(tokens_of(step, microbatch, 0))
            (loss / MICROBATCHES).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, wholes(model)


def train_identically(stage: int, **offload_optimizer: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train both ranks on the batches of rank 0, so that the mean of their gradients is exact."""
    its = {key: value for key, value in config(stage, gradient_clipping=0.0).items() if key != "scheduler"}
    if offload_optimizer:
        its["zero_optimization"] = {**its["zero_optimization"], "offload_optimizer": offload_optimizer}
    engine = start(deepspeed, its)
    assert ("is on a disk" in explain(engine.module)) == bool(offload_optimizer)
    losses = []
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            loss = engine(tokens_of(step, microbatch, 0))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses, wholes(engine.module)


@on_ranks(2)
def test_deepspeed_stages_match_plain_pytorch_bitwise(tmp_path):
    on_disk = {"device": "nvme", "nvme_path": tmp_path}
    some = [train_identically(2, ratio=0.5, **on_disk), train_identically(3, **on_disk)]
    plain, *sharded = [train_plainly(), *(train_identically(stage) for stage in (0, 1, 2, 3)), *some]
    for place, item in enumerate(sharded):
        assert_same(item, plain, name=f"stages 0 to 3, 2 and 3 with states on a disk: {place}")


# -- schedules and loss scale -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rate_schedules_match_deepspeed(name):
    cls, arguments = SCHEDULES[name]
    optimizer = adam_of_two_groups()
    found = rates(OWN[cls](optimizer, **arguments), optimizer)
    for local, its in zip(found, recorded()["rates"][name], strict=True):
        assert local == pytest.approx(its, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rate_schedule_resumes_from_state_dict(name):
    cls, arguments = SCHEDULES[name]
    optimizer, again = adam_of_two_groups(), adam_of_two_groups()
    whole_way = OWN[cls](optimizer, **arguments)
    rates(whole_way, optimizer, 5)
    later = OWN[cls](again, **arguments)
    later.load_state_dict(whole_way.state_dict())
    again.load_state_dict(optimizer.state_dict())
    assert rates(later, again) == rates(whole_way, optimizer)


@pytest.mark.parametrize("name", SCALES)
def test_loss_scales_match_deepspeed(name):
    item = SCALES[name]
    scale = LossScale(
        scale=item["scale"],
        adapts=True,
        window=item["window"],
        hysteresis=item["hysteresis"],
        restores_hysteresis=item["restores"],
    )

    def update(overflowed: bool | None = None) -> float:
        if overflowed is not None:
            scale.update(overflowed)
        return scale.scale

    assert scales(update, PATTERN) == recorded()["scales"][name]


def test_overflow_at_the_smallest_loss_scale_raises():
    scale = LossScale(scale=1.0, adapts=True, hysteresis=1)
    with pytest.raises(StateError, match=r"smallest loss scale, 1: training has diverged"):
        scale.update(True)


# -- the engine -------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_deepspeed_engine_reports_counters_and_raises_on_misuse():
    stated: dict[str, Any] = {}
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=small(), config=config(3, steps_per_print=1), training_data=[tokens_of(0, 0, 0)[0]] * 8
    )
    stated["batch"] = next(iter(loader)).shape
    stated["boundaries"], stated["applied"] = [], []
    for microbatch in range(2 * MICROBATCHES):
        stated["boundaries"].append(engine.is_gradient_accumulation_boundary())
        loss = engine(tokens_of(0, microbatch, 0))
        stated["returned"] = (engine.backward(loss) / loss).item()
        engine.step()
        stated["applied"].append(engine.was_step_applied())
    stated["counts"] = (engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps)
    stated["sizes"] = engine.get_batch_info()
    stated["units"] = [unit.name for unit in units_in(engine.module)]
    stated["same"] = (
        engine.optimizer is optimizer,
        engine.lr_scheduler is scheduler,
        engine.module.scale is engine.scale,
    )
    again = partial(deepspeed.initialize, model=engine.module, config=config(3))
    for call in (engine.step, lambda: engine.no_such_thing, again):
        try:
            call()
        except (StateError, AttributeError, ConfigError) as error:
            stated.setdefault("errors", []).append(str(error))
    assert stated["batch"] == (2, 6)
    assert stated["boundaries"] == stated["applied"] == [False, True] * 2
    assert stated["returned"] == pytest.approx(1 / MICROBATCHES)
    assert stated["counts"] == (2, 4, 16, 0)
    assert stated["sizes"] == (8, 2, 2)
    assert stated["units"] == ["", "blocks.0", "blocks.1"]
    assert stated["same"] == (True, True, True)
    without_backward, unknown, twice = stated["errors"]
    assert "engine.step() without engine.backward(loss)" in without_backward
    assert "no_such_thing" in unknown
    assert "is already sharded" in twice


@pytest.mark.slow
@on_ranks(1)
def test_every_step_accumulates_all_its_microbatches(tmp_path):
    """Between microbatches, the test changes the batch size, saves or loads, also in the middle of a step."""
    for seed in range(4):
        choose = random.Random(seed)
        engine, waiting, folder = start(deepspeed, config(choose.choice([1, 3]))), 0, f"{tmp_path}/{seed}"
        engine.save_checkpoint(folder)
        for _ in range(30):
            match choose.choice(["train"] * 6 + ["size", "save", "load", "new"]):
                case "train":
                    engine.backward(engine(tokens_of(0, 0, 0)))
                    engine.step()
                    waiting += 1
                    assert engine.was_step_applied() == (waiting >= engine.gradient_accumulation_steps())
                    waiting = 0 if engine.was_step_applied() else waiting
                case "size":
                    engine.set_train_batch_size(MICROBATCH * choose.randint(1, 4))
                case "save":
                    engine.save_checkpoint(folder)
                case "load":
                    engine.load_checkpoint(folder)
                    waiting = 0
                case "new":
                    engine, waiting = start(deepspeed, config(choose.choice([1, 3]))), 0
                    engine.load_checkpoint(folder)
            assert waiting or all(param.grad is None for param in engine.module.parameters())


@on_ranks(2)
def test_set_gradient_accumulation_boundary_matches_counted_boundaries():
    for stage in (1, 3):
        counted, marked = start(deepspeed, config(stage)), start(deepspeed, config(stage))
        for step in range(2):
            for microbatch in range(MICROBATCHES):
                tokens, is_last = tokens_of(step, microbatch, dist.get_rank()), microbatch == MICROBATCHES - 1
                counted.backward(counted(tokens))
                counted.step()
                marked.set_gradient_accumulation_boundary(is_last)
                marked.backward(marked(tokens))
            marked.step()
        assert marked.global_steps == 2
        for expected, found in zip(counted.module.parameters(), marked.module.parameters(), strict=True):
            assert_same(whole(found), whole(expected))


def count_reductions(stage: int) -> int:
    engine = start(deepspeed, config(stage))
    list(train(engine, range(1)))
    with recording() as record:
        list(train(engine, range(1, 2)))
    return sum(
        event.name in ("reduce_scatter", "all_reduce") for event in record.events if event.origin.unit == "blocks.0"
    )


@on_ranks(2)
def test_stages_without_sharded_gradients_reduce_once_per_step():
    counts = [count_reductions(stage) for stage in (0, 1, 2, 3)]
    assert counts[0] == counts[1] == counts[2] // MICROBATCHES == counts[3] // MICROBATCHES > 0


def differ_by_rank() -> dict[str, torch.Tensor]:
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        on_meta = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    for model in (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), on_meta):
        deepspeed.initialize(model=model, config={"train_batch_size": 2})
    return {name: whole(value) for name, value in on_meta.state_dict().items()}


def test_initialize_broadcasts_values_of_rank_0():
    one, other = run_ranks(2, differ_by_rank)
    assert_same(one, other)
    assert all(value.isfinite().all() and value.any() for value in one.values())


@on_ranks(2)
def test_gradient_allreduce_op_sum_sums_gradients():
    grads = []
    for operation in ("mean", "sum"):
        model = nn.Linear(2, 2, bias=False)
        nn.init.ones_(model.weight)
        its = {"train_batch_size": 2, "gradient_allreduce_op": operation, "zero_optimization": {"stage": 2}}
        engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.0), config=its)
        engine.backward(engine(torch.ones(1, 2)).sum())
        grads.append(whole(model.weight.grad))
    mean, total = grads
    assert_same(total, 2 * mean)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def save_halfway(folder: str, stage: int) -> list[dict[str, float]]:
    """Save a checkpoint halfway and return the results of the remaining steps."""
    engine = start(deepspeed, config(stage, fp16={"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2}))
    list(train(engine, range(SAVED_AT)))
    engine.save_checkpoint(folder, client_state={"epoch": 7})
    return list(train(engine, range(SAVED_AT, STEPS)))


def go_on(folder: str, stage: int) -> tuple[list[dict[str, float]], str, dict[str, Any], int]:
    engine = start(deepspeed, config(stage, fp16={"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2}))
    path, client_state = engine.load_checkpoint(folder)
    return list(train(engine, range(SAVED_AT, STEPS))), path, client_state, engine.global_steps


def save_and_go_on(folder: str, saved: int, loaded: int) -> Any:
    return save_halfway(folder, saved), go_on(folder, loaded)


@pytest.mark.parametrize(("saved", "loaded"), [(3, 3), (3, 2), (1, 1)])
def test_resumed_deepspeed_engine_matches_uninterrupted_run(tmp_path, saved, loaded):
    for expected, (numbers, path, client_state, steps) in run_ranks(2, save_and_go_on, str(tmp_path), saved, loaded):
        assert numbers == expected
        assert client_state == {"epoch": 7}
        assert Path(path).parent.parent == tmp_path
        assert steps == STEPS
    assert (tmp_path / "latest").read_text() == f"global_step{SAVED_AT}"
    for numbers, *_ in run_ranks(1, go_on, str(tmp_path), 3):  # with a different number of ranks
        assert len(numbers) == STEPS - SAVED_AT


IMPORTED = [name for name in CASES if name[-1:] in "123" or "bf16" in name]


def go_on_from_deepspeeds(folder: str, case: str, stage: int) -> Any:
    options = {"bf16": {"enabled": True}} if "bf16" in case else {}
    engine = start(deepspeed, config(stage, **options))
    _, client_state = engine.load_checkpoint(folder)
    weights = wholes(engine.module)
    return list(train(engine, range(SAVED_AT, STEPS))), (client_state, engine.global_samples), weights


def go_on_at_two_stages(folder: str) -> Any:
    """Resume each recorded run at its own stage, and at another."""
    runs = {}
    for case in IMPORTED:
        stage = int(case[len("stage")])
        other = 1 if stage == 3 else 3
        runs[case] = [go_on_from_deepspeeds(f"{folder}/{case}", case, item) for item in (stage, other)]
    return runs


@pytest.mark.slow
def test_imported_deepspeed_checkpoints_resume_with_deepspeed_results(tmp_path, capsys):
    """The results are those of DeepSpeed, also under another stage."""
    for case in IMPORTED:
        out = tmp_path / case
        assert main(["checkpoint", "import-deepspeed", str(RECORDED / case), str(out)]) == 0
        assert str(out / "step-000000003") in capsys.readouterr().out
    ranks = run_ranks(2, go_on_at_two_stages, str(tmp_path))
    for case in IMPORTED:
        for which in (0, 1):
            numbers = [rank[case][which][0] for rank in ranks]
            assert_close(numbers, [item[SAVED_AT:] for item in recorded()["runs"][case]], case)
        for rank in ranks:
            (_, reported, weights), (_, _, others) = rank[case]
            assert reported == ({"epoch": 7}, 8 * STEPS)
            assert_same(others, weights)


@pytest.mark.parametrize("file", [f"zero_pp_rank_1_mp_rank_00_{which}_states.pt" for which in ("model", "optim")])
def test_no_code_of_a_deepspeed_checkpoint_is_executed(tmp_path, file, capsys):
    shutil.copytree(RECORDED / "stage3", tmp_path / "in")
    torch.save({"optimizer_state_dict": Mischief()}, tmp_path / "in" / file)
    assert main(["checkpoint", "import-deepspeed", str(tmp_path / "in"), str(tmp_path / "out")]) == 2
    stated = capsys.readouterr().err
    assert file in stated
    assert "mkdir" in stated
    assert "Nothing in it was executed" in stated
    assert not Path("mischief").exists()
    assert not (tmp_path / "out").exists()


class Mischief:
    def __reduce__(self) -> Any:
        return os.mkdir, ("mischief",)


@pytest.mark.parametrize(
    ("missing", "stated"),
    [
        ("*_optim_states.pt", "no *_optim_states.pt"),
        ("zero_pp_rank_1*_optim*", "2 ranks have saved it"),
        ("*", "found no"),
    ],
)
def test_an_incomplete_deepspeed_checkpoint_is_reported(tmp_path, missing, stated, capsys):
    shutil.copytree(RECORDED / "stage2", tmp_path / "in")
    for path in (tmp_path / "in").glob(missing):
        path.unlink()
    assert main(["checkpoint", "import-deepspeed", str(tmp_path / "in"), str(tmp_path / "out")]) == 2
    assert stated in capsys.readouterr().err


def test_import_converts_deepspeed_adam_step_counters_per_parameter(tmp_path, capsys):
    """DeepSpeed's kernel counts steps per parameter group, torch's per parameter."""
    shutil.copytree(RECORDED / "stage1", tmp_path / "in")
    for path in (tmp_path / "in").glob("*_optim_states.pt"):
        with _knowing_deepspeeds_classes():
            inner = torch.load(path, weights_only=True)["optimizer_state_dict"]
        for values in inner["base_optimizer_state"]["state"].values():
            del values["step"]
        for group in inner["base_optimizer_state"]["param_groups"]:
            group |= {"step": 3, "bias_correction": True}
        left_out = ("loss_scaler", "zero_stage", "param_slice_mappings")  # they contain DeepSpeed objects
        kept = {name: item for name, item in inner.items() if name not in left_out}
        torch.save({"optimizer_state_dict": {**kept, "zero_stage": 1}}, path)
    for name, folder in (("a", tmp_path / "in"), ("b", RECORDED / "stage1")):
        assert main(["checkpoint", "import-deepspeed", str(folder), str(tmp_path / name)]) == 0
    capsys.readouterr()
    assert main(["checkpoint", "diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0


@on_ranks(2)
def test_engine_rejects_invalid_checkpoint_folders_and_tags(tmp_path):
    engine = start(deepspeed, config(2))
    found = engine.load_checkpoint(tmp_path)
    (Path(tmp_path) / "tag").mkdir(exist_ok=True)
    (Path(tmp_path) / "tag" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    errors = []
    for tag in ("tag", "other"):
        with pytest.raises(CheckpointError) as raised:
            engine.load_checkpoint(tmp_path, tag=tag)
        errors.append(str(raised.value))
    with pytest.raises(CheckpointError) as raised:
        engine.save_checkpoint(tmp_path, tag=f"rank{dist.get_rank()}")
    errors = [*errors, str(raised.value)]
    assert found == (None, None)
    for error, stated in zip(
        errors, ("import-deepspeed", "no checkpoint", "different tags: rank0, rank1"), strict=True
    ):
        assert stated in error


def save_weights(folder: str) -> dict[str, torch.Tensor]:
    model = small()
    model.frozen_too = model.frozen  # tied
    engine = deepspeed.initialize(model=model, config=config(3, bf16={"enabled": True}))[0]
    engine.save_16bit_model(folder, exclude_frozen_parameters=True)
    return wholes(engine.module)


def test_save_16bit_model_writes_full_weights(tmp_path):
    wanted, _ = run_ranks(2, save_weights, str(tmp_path))
    found = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert found.keys() == {name for name in wanted if not name.startswith("frozen")}
    for name, value in found.items():
        assert_same(value, wanted[name].bfloat16() if name != "scale" else wanted[name])


# -- the configuration ------------------------------------------------------------------------------------------------

PLAIN = {"train_batch_size": 4}


@pytest.mark.parametrize(
    ("added", "stated"),
    [
        ({"gradient_cliping": 1.0}, "unknown key 'gradient_cliping'. Did you mean gradient_clipping"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage=4"),
        ({"zero_optimization": {"stages": 2}}, "unknown key 'zero_optimization.stages'"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "with nvme_path=None"),
        (
            {
                "zero_optimization": {
                    "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
                    "offload_param": {"device": "cpu"},
                }
            },
            "offload_param.device='cpu' with nvme_path=/nvme: both must use one folder",
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "tape"}}},
            "offload_param.device='tape' is not supported",
        ),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 1.3}}}, "from 0 to 1"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "all-gathers then communicate bfloat16"),
        ({"gradient_clipping": "auto"}, "which only a trainer around DeepSpeed can replace"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "optimizer.params has the value 'auto'"),
        ({"wall_clock_breakdown": True}, "Use torch.profiler"),
        ({"tensorboard": {"enabled": True}}, "Log from the script"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both set"),
        ({"train_micro_batch_size_per_gpu": 3}, "4 is not 3 x 0 x 2 ranks"),
        ({"gradient_clipping": -1}, "expected a number of 0 or more"),
        ({"communication_data_type": "fp8"}, "'fp8' in the DeepSpeed configuration is not a dtype"),
        ({"zero_optimization": {"zero_hpz_partition_size": 2, "stage": 2}}, "stage 3. Leave it out"),
        ({"gradient_allreduce_op": "max"}, "choose mean or sum"),
        ({"pipeline": {"stages": 2}}, "Pipeline parallelism is not supported"),
    ],
)
def test_unsupported_deepspeed_values_raise_with_their_key(added, stated):
    with pytest.raises(ConfigError) as raised:
        read({**PLAIN, **added}, world=2)
    assert stated in str(raised.value)


@pytest.mark.parametrize(
    "key", [key for key in KEYS.values() if key.handling is Handling.REJECTED], ids=attrgetter("path")
)
def test_rejected_keys_accept_only_values_without_effect(key):
    for value in key.idle:
        read(nested(key.path, value), world=2)
    with pytest.raises(ConfigError) as raised:
        read(nested(key.path, "something"), world=2)
    assert key.path in str(raised.value)
    assert key.stated in str(raised.value)


@pytest.mark.parametrize(
    "key", [key for key in KEYS.values() if key.handling is Handling.IGNORED], ids=attrgetter("path")
)
def test_ignored_keys_change_nothing(key):
    assert read(nested(key.path.replace("*", "anything"), 12345), world=2) == read(PLAIN, world=2)


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return {**PLAIN, **value}


def test_supported_keys_are_read():
    found = read(
        {
            **PLAIN,
            "bfloat16": {"enabled": True, "check_grad_overflow": False},
            "communication_data_type": "fp32",
            "gradient_clipping": 0,
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "cpu", "pin_memory": False},
                "offload_optimizer": None,
                "zero_hpz_partition_size": 2,
                "prefetch_bucket_size": 5,
            },
            "wandb": {"enabled": False, "project": "mine"},
            "steps_per_print": 10,
        },
        world=2,
    )
    assert (found.strategy, found.dtype, found.communication) == ("zero3", torch.bfloat16, torch.float32)
    assert (found.clips_to, found.together, found.steps_per_print) == (0.0, 2, 10)
    assert not found.skips_overflows
    assert found.offload == Offload(parameters={"cpu": 1}, pin_memory=False)
    twin_flow = {"device": "cpu", "ratio": 0.3}
    found = read({**PLAIN, "zero_optimization": {"stage": 2, "offload_optimizer": twin_flow}}, world=2)
    assert found.offload == Offload(optimizer={"cpu": 0.3})
    on_disk = {"device": "nvme", "nvme_path": "/nvme", "ratio": 0.3, "pipeline_read": True}
    found = read({**PLAIN, "zero_optimization": {"stage": 2, "offload_optimizer": on_disk}}, world=2)
    assert found.offload == Offload(optimizer={"disk": 0.3}, folder="/nvme")
    both = {"stage": 3, "offload_optimizer": on_disk, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}}
    found = read({**PLAIN, "zero_optimization": both}, world=2)
    assert found.offload == Offload(optimizer={"disk": 0.3}, parameters={"disk": 1}, folder="/nvme")
    assert read(PLAIN, world=2).clips_to == 1.0  # as DeepSpeed does


def test_deepspeed_config_file_is_read_like_a_dict(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CASES["stage2_bf16"]))
    assert read(path, world=2) == read(CASES["stage2_bf16"], world=2)
    path.write_text("{ stage: 2 }")
    with pytest.raises(ConfigError, match="is not JSON"):
        read(path, world=2)
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "none.json", world=2)


def test_missing_batch_sizes_are_derived():
    for given in ((8, 2, 2), (8, 2, None), (8, None, 2), (None, 2, 2)):
        assert BatchSizes.resolve(*given, world=2) == BatchSizes(8, 2, 2)
    assert BatchSizes.resolve(8, None, None, world=2) == BatchSizes(8, 4, 1)
    for wrong in ((None, None, 2), (0, 1, 1), (True, 1, 1)):
        with pytest.raises(ConfigError):
            BatchSizes.resolve(*wrong, world=2)


def test_explain_config_reports_the_handling_of_keys():
    reported = deepspeed.explain_config(CASES["stage2"]).splitlines()
    assert reported[0].startswith("train_micro_batch_size_per_gpu = 2: supported. ")
    assert any(
        line.startswith("zero_optimization.stage3_param_persistence_threshold = 0: ignored. ") for line in reported
    )
    assert reported[-1].startswith("gradient_clipping is not set, so 1.0 is used")


def test_docs_list_every_deepspeed_key():
    text = (Path(__file__).parents[2] / "docs" / "deepspeed.md").read_text()
    found = re.findall(r"^\| (.*) \| (supported|ignored|rejected) \| (.*) \|$", text, re.MULTILINE)
    assert found == table()


def make(part: dict[str, Any], **arguments: Any) -> str:
    _, optimizer, *_ = deepspeed.initialize(model=small(), config={**PLAIN, **part}, **arguments)
    return repr(optimizer)


@on_ranks(1)
def test_config_creates_optimizers_and_schedulers_or_raises():
    made = [
        make({"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}),  # decoupled, without weight decay
        make({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.5}}}),
        make({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}),
        make({}, optimizer=partial(torch.optim.RMSprop, lr=0.5)),
        make({"optimizer": {"type": "Adagrad", "params": {"lr": 0.1}}}),
    ]
    for part in (
        {"optimizer": {"type": "Lamb"}},
        {"optimizer": {"type": "NoSuch"}},
        {"optimizer": {"type": "SGD", "params": {"beta": 1}}},
        {"optimizer": {"type": "SGD", "params": {"lr": 1}}, "scheduler": {"type": "NoSuch"}},
        {"scheduler": {"type": "WarmupLR"}},
    ):
        with pytest.raises(ConfigError) as raised:
            make(part)
        made.append(str(raised.value))
    for found, stated in zip(
        made,
        [
            "AdamW",
            "Adam (",
            "momentum: 0.9",
            "RMSprop",
            "Adagrad",
            "Pass one of your own",
            "'NoSuch' is unknown",
            "optimizer.params of SGD",
            "scheduler.type='NoSuch'",
            "there is no optimizer",
        ],
        strict=True,
    ):
        assert stated in found
    assert "weight_decay: 0.0" in made[0]
    assert "weight_decay: 0.5" in made[1]


# -- units ------------------------------------------------------------------------------------------------------------


def units(model: nn.Module) -> list[str]:
    chosen = wrapped_modules(model, repeated_layers(model))
    return [name for name, module in model.named_modules() if module in chosen]


class Quantizer(nn.Module):
    """Has parameters, and methods other than a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Linear(2, 2)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.codes(x)


def test_repeated_layers_become_units():
    assert units(Small()) == ["blocks.0", "blocks.1"]
    stages = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Block(), Block()), nn.ModuleList([Block()]))
    assert units(stages) == ["1.0", "1.1"]
    assert units(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == ["0", "2"]
    named = nn.Sequential(nn.Sequential(Block(), nn.Linear(2, 2)))
    named._no_split_modules = ["Block"]
    assert units(named) == ["0.0"]
    named = nn.Sequential(Quantizer(), nn.Sequential(Block(), Block()))
    named._no_split_modules = ["Quantizer"]  # has no forward, like a class that Mimi lists
    assert units(named) == ["1.0", "1.1"]
    named._no_split_modules = ["Quantizer", "Block"]
    assert units(named) == ["1.0", "1.1"]


def test_initialize_rejects_arguments_without_counterpart():
    for arguments in ({"mpu": 1}, {"model": None}, {"distributed_port": 5}):
        with pytest.raises(ConfigError):
            deepspeed.initialize(**{"model": small(), "config": PLAIN, **arguments})
    with pytest.raises(ConfigError, match="only dist_backend and timeout"):
        deepspeed.init_distributed(auto_mpi_discovery=True)
