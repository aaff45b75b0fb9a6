"""A sharded LightningModule trains like under Lightning's DDP strategy, in each step and after a resume."""

import inspect
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from shared_ranks import on_new_ranks
from tests.small_models import Chain, initialize, whole, wholes
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fullshard import CheckpointError, ConfigError, MixedPrecisionPolicy, ShardedGradScaler, recording
from fullshard.engine.registry import units_in
from fullshard.errors import MissingLibraryError
from fullshard.integrations.lightning import FabricFullShardStrategy, FullShardStrategy, _share_overflows
from fullshard.testing import assert_same, run_ranks
from fullshard.versions import require

TESTED_WITH = "2.6.6"


class Module(L.LightningModule):
    """Layers in a network, its own parameter and matrix, and dropout."""

    def __init__(self, rate: float = 0.02, dropout: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = Chain()
        self.scale = nn.Parameter(torch.ones(5))
        self.mix = nn.Linear(5, 5)
        initialize(self)
        self.losses: list[float] = []
        self.validated: list[float] = []

    def loss_of(self, batch: list[Tensor]) -> Tensor:
        inputs, target = batch
        hidden = nn.functional.dropout(inputs, self.hparams["dropout"], self.training)
        return nn.functional.cross_entropy(self.mix(self.net(hidden)) * self.scale, target)

    def training_step(self, batch: list[Tensor], index: int) -> dict[str, Any]:
        loss = self.loss_of(batch)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return {"loss": loss, "index": index}

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        loss = self.loss_of(batch)
        self.validated.append(loss.item())
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["rate"])
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def data(count: int = 32) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 48, generator=generator)
    return DataLoader(TensorDataset(inputs, torch.randint(5, (count,), generator=generator)), batch_size=4)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Lightning's advice on loaders and loggers at every start."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


def trainer(strategy: Any, **options: Any) -> L.Trainer:
    return L.Trainer(
        **{
            "strategy": strategy,
            "accelerator": "cpu",
            "devices": dist.get_world_size(),
            "max_epochs": 2,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            **options,
        }
    )


def fit(strategy: Any, module: L.LightningModule | None = None, ckpt_path: str | None = None, **options: Any) -> Any:
    """Return losses and validation losses of this rank, and the full parameters."""
    with quiet():
        torch.manual_seed(0)
        module = Module() if module is None else module
        trainer(strategy, **options).fit(module, data(), data(8), ckpt_path=ckpt_path)
    return module.losses, module.validated, {name: whole(param) for name, param in module.named_parameters()}


def half_on_cpu() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**20))


# Trainer options, and the relative tolerance of losses: 0, unless a norm is computed from shards.
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "plain": ({}, 0),
    "accumulated": ({"accumulate_grad_batches": 2}, 0),
    "bf16-mixed": ({"precision": "bf16-mixed"}, 0),
    "bf16-true": ({"precision": "bf16-true"}, 0),
    "16-mixed": ({"plugins": half_on_cpu}, 0),
    "clipped by norm": ({"gradient_clip_val": 0.1}, 1e-5),
    "averaged": ({"callbacks": partial(EMAWeightAveraging, decay=0.9)}, 0),
    "averaged from an epoch on": ({"callbacks": partial(StochasticWeightAveraging, 0.01, swa_epoch_start=1)}, 0),
    "clipped by value": ({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, 0),
}


QUICK = ("plain", "accumulated", "averaged")


def fit_cases(cases: tuple[str, ...]) -> dict[str, list[Any]]:
    """Return, per case, the results of DDP and of the sharding strategies."""
    found = {}
    for case in cases:
        options = CASES[case][0]
        made = {name: option() if callable(option) else option for name, option in options.items()}
        found[case] = [fit(DDPStrategy(), **made)]
        for name in ("zero1", "zero2", "zero3") if case == "plain" else ("zero3",):
            again = {
                option: each_option() if callable(each_option) else each_option
                for option, each_option in options.items()
            }
            found[case].append(fit(FullShardStrategy(name), **again))
    return found


@cache
def fitted() -> list[dict[str, list[Any]]]:
    return run_ranks(2, fit_cases, QUICK)


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_lightning_losses_match_ddp(case):
    for rank in fitted() if case in QUICK else run_ranks(2, fit_cases, (case,)):
        expected, *sharded = rank[case]
        assert len(expected[0]) == 8
        assert len(expected[1]) == 2
        for found in sharded:
            if CASES[case][1]:
                assert found[0] == pytest.approx(expected[0], rel=CASES[case][1])
            else:
                assert_same(list(found), list(expected))


# -- units and communication ------------------------------------------------------------------------------------------


class OnMeta(Module):
    """Builds its network in `configure_model`, on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            with torch.device("meta"):
                self.net = Chain()


def look_inside() -> dict[str, Any]:
    """Return units, reductions with two microbatches per step, and results of a module built on the meta device."""
    module, stated = Module(), {}
    with recording() as record:
        fit(FullShardStrategy(), module, accumulate_grad_batches=2, max_epochs=1, limit_val_batches=0)
    stated["units"] = sorted(unit.name for unit in units_in(module))
    names = [event.name for event in record.events if event.origin.unit == "net.layers.0"]
    stated["reductions"] = names.count("reduce_scatter")
    late = OnMeta()
    stated["parameters"] = fit(FullShardStrategy(), late, max_epochs=1)[2]
    again = trainer(FullShardStrategy(), max_epochs=1)
    with quiet():
        stated["metrics"] = [again.validate(late, data(8), verbose=False) for _ in range(2)]
        stated["predicted"] = isinstance(late.net, nn.Module)
    low = Module()
    fit(FullShardStrategy(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), low, max_epochs=1)
    stated["contract"] = {str(unit.options.precision.param_dtype) for unit in units_in(low)}
    return stated


@pytest.mark.slow
def test_modules_become_units_and_gradients_reduce_once_per_step():
    one, other = run_ranks(2, look_inside)
    assert one["units"] == ["", "mix", "net", *(f"net.layers.{i}" for i in range(4))]
    assert one["reductions"] == 2  # four microbatches
    assert_same(one["parameters"], other["parameters"])
    assert all(value.isfinite().all() for value in one["parameters"].values())
    assert one["metrics"][0] == one["metrics"][1] == other["metrics"][0]
    assert one["contract"] == {"torch.bfloat16"}


class Alternating(L.LightningModule):
    """Two networks with an optimizer each, stepped manually, as in adversarial training."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = Chain(), Chain()
        initialize(self)
        self.losses: list[float] = []
        self.validated: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> None:
        inputs, target = batch
        for net, optimizer in zip((self.first, self.second), self.optimizers(), strict=True):
            loss = nn.functional.cross_entropy(net(inputs), target)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.losses.append(loss.item())

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.validated.append(self.first(batch[0]).sum().item())

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), 0.01, momentum=0.9) for net in (self.first, self.second)]


# -- checkpoints ------------------------------------------------------------------------------------------------------


def stop_and_go_on(folder: str, make: Callable[[], Any], strategies: tuple[str, str]) -> Any:
    """Fit two epochs, and one epoch plus a resumed one."""
    whole_way = fit(FullShardStrategy(strategies[0]), make())
    stopped = make()
    saved = {"enable_checkpointing": True, "default_root_dir": folder}
    callbacks = [ModelCheckpoint(folder, filename="{epoch}", save_last=True), EarlyStopping("val_loss", strict=False)]
    if not stopped.automatic_optimization:
        callbacks.pop()
    fit(FullShardStrategy(strategies[0]), stopped, max_epochs=1, callbacks=callbacks, **saved)
    later = make()
    found = fit(FullShardStrategy(strategies[1]), later, ckpt_path=f"{folder}/last.ckpt")
    return whole_way, stopped.losses, found


def stop_all(folder: str) -> Any:
    return [
        stop_and_go_on(f"{folder}/0", partial(Module, dropout=0.1), ("zero3", "zero1")),
        stop_and_go_on(f"{folder}/1", Alternating, ("zero2", "zero2")),
    ]


def resume_alone(folder: str) -> int:
    return len(fit(FullShardStrategy(), Module(), ckpt_path=f"{folder}/0/last.ckpt")[0])


@pytest.mark.slow
def test_resumed_lightning_fit_matches_uninterrupted_fit(tmp_path):
    for rank in run_ranks(2, stop_all, str(tmp_path)):
        for (losses, _, weights), before, (after, _, resumed) in rank:
            assert before + after == losses
            assert_same(resumed, weights)
    assert (tmp_path / "0" / "epoch=0.ckpt").is_dir()
    assert run_ranks(1, resume_alone, str(tmp_path)) == [8]  # with a different number of ranks: all batches of an epoch


def stop_and_average_on(folder: str, strategies: Sequence[Any], averaging: str, resumed: str) -> Any:
    """Fit two epochs of three with the `averaging` callbacks, and resume with the `resumed` callbacks."""
    makes: dict[str, Callable[[], list[Callback]]] = {
        "EMA": lambda: [EMAWeightAveraging(decay=0.9)],
        "late EMA": lambda: [EMAWeightAveraging(update_starting_at_step=1000)],  # the average is what was loaded
        "SWA": lambda: [StochasticWeightAveraging(0.01, swa_epoch_start=1)],
        "both": lambda: [*makes["SWA"](), *makes["EMA"]()],
        "none": list,
    }
    saved = {"enable_checkpointing": True, "default_root_dir": folder}
    keeping = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    fit(strategies[0], max_epochs=2, callbacks=[*makes[averaging](), keeping], **saved)
    return fit(strategies[1], max_epochs=3, callbacks=makes[resumed](), ckpt_path=f"{folder}/epoch=1.ckpt")


@pytest.mark.slow
@on_new_ranks(2)
def test_averages_of_weights_are_saved_and_resumed(tmp_path):
    """Includes averaging that begins in the resumed run, and averages that replace the weights."""
    cases = [("EMA", "EMA"), ("SWA", "SWA"), ("both", "both"), ("none", "late EMA"), ("EMA", "none")]
    for case, (averaging, resumed) in enumerate(cases):
        expected = stop_and_average_on(f"{tmp_path}/{case}/ddp", [DDPStrategy(), DDPStrategy()], averaging, resumed)
        strategies = FullShardStrategy("zero3"), FullShardStrategy("zero1")
        assert_same(list(stop_and_average_on(f"{tmp_path}/{case}/own", strategies, averaging, resumed)), list(expected))
    killed = Path(f"{tmp_path}/0/own/epoch=1.ckpt")  # as if a later save was killed after it wrote the averages
    if dist.get_rank() == 0:
        shutil.move(killed / "fullshard_averages/0/step-000000008", killed / "fullshard_averages/0/step-000000009")
    dist.barrier()
    with pytest.raises(CheckpointError, match="fullshard_averages/0/step-000000008"):
        fit(FullShardStrategy(), callbacks=[EMAWeightAveraging(decay=0.9)], ckpt_path=str(killed))


@pytest.mark.slow
@on_new_ranks(2)
def test_checkpoint_of_lightning_ddp_is_loaded(tmp_path):
    """Resume from a DDP checkpoint, under `FullShardStrategy` and under DDP."""
    options = {"enable_checkpointing": True, "default_root_dir": tmp_path, "max_epochs": 1}
    fit(DDPStrategy(), **options, callbacks=[ModelCheckpoint(tmp_path, filename="ddp")])
    path = f"{tmp_path}/ddp.ckpt"
    peer, own = fit(DDPStrategy(), ckpt_path=path), fit(FullShardStrategy(), ckpt_path=path)
    assert_same(list(own), list(peer))


class Meddling(Module):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {name: item for name, item in checkpoint["state_dict"].items() if "mix" not in name}


class Secretive(Module):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["secret"] = Module


def save_once(folder: str, module: Module) -> None:
    options = {"enable_checkpointing": True, "default_root_dir": folder, "max_epochs": 1}
    fit(FullShardStrategy(), module, **options)


@pytest.mark.slow
@on_new_ranks(2)
def test_unsupported_lightning_options_and_hooks_raise(tmp_path):
    stated = []
    cases: list[tuple[type[Exception], Callable[[], Any]]] = [
        (ConfigError, lambda: FullShardStrategy(find_unused_parameters=True)),
        (ConfigError, lambda: fit(FullShardStrategy(), sync_batchnorm=True)),
        (ConfigError, lambda: save_once(tmp_path, Meddling())),
        (CheckpointError, lambda: save_once(tmp_path, Secretive())),
    ]
    for kind, call in cases:
        with pytest.raises(kind) as raised:
            call()
        stated.append(str(raised.value))
    errors = stated
    for error, stated in zip(
        errors,
        ["find_unused_parameters", "sync_batchnorm", "on_save_checkpoint changed", "secret"],
        strict=True,
    ):
        assert stated in error


# -- Fabric -----------------------------------------------------------------------------------------------------------


class Measured(Chain):
    def mean_square(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float().square().mean()


def run_fabric(
    strategy: Any, folder: str | None = None, resume: bool = False, marked: bool = False, **options: Any
) -> list[float]:
    """Return the losses of six steps of two microbatches. With a folder, save after the third step or resume from it.

    If `marked`, a method of the model other than forward computes the losses.
    """
    with quiet():
        fabric = L.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, **options)
        fabric.launch()
        with fabric.init_module(empty_init=False):
            model = Measured()
        initialize(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        model, optimizer = fabric.setup(model, optimizer)
        model.mark_forward_method("mean_square")
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, 0.9)
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
        if resume:
            assert fabric.load(f"{folder}/run", state) == {}
        losses = []
        for step in range(state["step"], 6):
            for microbatch in range(2):
                generator = torch.Generator().manual_seed(10 * step + 2 * microbatch + fabric.global_rank)
                inputs = torch.randn(4, 48, generator=generator)
                with fabric.no_backward_sync(model, enabled=microbatch == 0):
                    loss = model.mean_square(inputs) if marked else model(inputs).square().mean()
                    fabric.backward(loss)
                losses.append(loss.item())
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if folder is not None and not resume and step == 2:
                fabric.save(f"{folder}/run", {**state, "step": step + 1})
    return losses


def run_fabrics(folder: str) -> Any:
    found = {
        "ddp": run_fabric(FabricDDPStrategy()),
        "ours": run_fabric(FabricFullShardStrategy(), folder),
        "resumed": run_fabric(FabricFullShardStrategy("zero2"), folder, resume=True),
        "bf16": [run_fabric(item(), precision="bf16-mixed") for item in (FabricDDPStrategy, FabricFullShardStrategy)],
        "marked": run_fabric(FabricFullShardStrategy(), marked=True, precision="bf16-mixed"),
    }
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=FabricFullShardStrategy())
    fabric.launch()
    with fabric.init_module(empty_init=True):
        late = Chain()
    found["meta"] = next(late.parameters()).is_meta
    found["made"] = wholes(fabric.setup_module(late).module)
    return found


@pytest.mark.slow
def test_fabric_matches_ddp_losses_and_resumes(tmp_path):
    one, other = run_ranks(2, run_fabrics, str(tmp_path))
    for rank in (one, other):
        assert rank["ours"] == pytest.approx(rank["ddp"], rel=1e-5)
        assert rank["resumed"] == pytest.approx(rank["ours"][6:], rel=1e-5)
        assert rank["bf16"][1] == pytest.approx(rank["bf16"][0], rel=1e-2)
        assert rank["marked"] == rank["bf16"][1]
        assert rank["meta"]
    assert_same(one["made"], other["made"])
    assert all(value.isfinite().all() for value in one["made"].values())


# -- versions ---------------------------------------------------------------------------------------------------------


def test_private_lightning_hooks_exist_in_the_tested_version():
    """Check undocumented names: `_layer_sync` of a strategy, and `_backward_sync_control` of a Fabric strategy."""
    assert FullShardStrategy()._layer_sync is None
    control = FabricDDPStrategy()._backward_sync_control
    assert list(inspect.signature(control.no_backward_sync).parameters) == ["module", "enabled"]
    assert TESTED_WITH == L.__version__, "see that all of this file passes, then say so here"


def test_missing_or_old_lightning_raises():
    for library, oldest, stated in (
        ("no-such-library", "1", "which is not installed"),
        ("lightning", "99.1", f"found {L.__version__}"),
    ):
        with pytest.raises(MissingLibraryError, match=stated):
            require(library, oldest, extra="lightning")


def test_share_overflows_replaces_grad_scaler_with_the_same_settings():
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=7))
    _share_overflows(plugin)
    assert isinstance(plugin.scaler, ShardedGradScaler)
    assert (plugin.scaler.get_scale(), plugin.scaler.get_growth_interval()) == (8.0, 7)
