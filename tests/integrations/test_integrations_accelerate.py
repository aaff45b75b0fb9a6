"""An accelerate loop with one changed import has DDP's losses, saves checkpoints and applies its settings."""

import importlib.metadata
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin, ProjectConfiguration
from hf_models import Sentences, llama, names_in
from shared_ranks import on_new_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

from fullshard import ConfigError, MissingLibraryError, Offload, StateError, recording, versions
from fullshard.engine.registry import units_in
from fullshard.integrations.accelerate import TESTED_ACCELERATE, Accelerator, ReportTracker, ShardingPlugin
from fullshard.integrations.plugin import REFUSED, SUPPORTED
from fullshard.report.reading import read_run
from fullshard.testing import assert_same, run_ranks

# transformers accesses storages by a name that torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Set a launcher's variables. Otherwise accelerate would choose the number of threads."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


class Run:
    """Train as accelerate's documentation does, with the given number of microbatches."""

    def __init__(
        self, make: Callable[..., Any], model: nn.Module | None = None, batch: int = 2, **options: Any
    ) -> None:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        self.accelerator = make(gradient_accumulation_steps=2, **options)
        model = model or llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=16)
        loader = DataLoader(Sentences(), batch_size=batch, shuffle=True, generator=torch.Generator().manual_seed(3))
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )

    def train(
        self, start: int = 0, stop: int = 8, max_norm: float = 0.0, epoch: int = 0, *, logs: bool = False
    ) -> list[float]:
        accelerator, losses = self.accelerator, []
        self.loader.set_epoch(epoch)
        for number, batch in enumerate(self.loader):
            if not start <= number < stop:
                continue
            with accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                accelerator.backward(loss)
                if max_norm and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(self.model.parameters(), max_norm)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
            if logs:
                accelerator.log({"loss": losses[-1], "step": number, "text": "no"}, step=100 + number)
        return losses


def ddp(**options: Any) -> Any:
    return accelerate.Accelerator(cpu=True, **options)


def sharded(strategy: str = "zero3", **fields: Any) -> Callable[..., Any]:
    plugin = ShardingPlugin(strategy=strategy, **fields)
    return lambda **options: Accelerator(fsdp_plugin=plugin, **options)


@pytest.mark.slow
@pytest.mark.parametrize("max_norm", [0.0, pytest.param(0.1, marks=pytest.mark.slow)])
@on_new_ranks(2)
def test_accelerate_losses_match_ddp(max_norm):
    ways = {"DDP": ddp, **{strategy: sharded(strategy) for strategy in STRATEGIES}}
    losses = {name: Run(way).train(max_norm=max_norm) for name, way in ways.items()}
    expected = losses.pop("DDP")
    assert len(set(expected)) == len(expected)
    for strategy, actual in losses.items():
        # The norm is summed over shards, so its rounding differs from the norm of unsharded gradients.
        assert actual == (pytest.approx(expected, rel=1e-6) if max_norm else expected), strategy


def statistics_of(make: Callable[..., Any], **options: Any) -> list[Tensor]:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    torch.manual_seed(0)
    accelerator = make(**options)
    model = accelerator.prepare(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    for step in range(3):
        batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + accelerator.process_index))
        accelerator.backward(model(batch).square().mean())
    return list(model.buffers())


def by_adagrad(make: Callable[..., Any]) -> list[Tensor]:
    """Train with a group for biases, as the Trainer of transformers makes it. The model has none."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [], "weight_decay": 0.0}]
    accelerator = make()
    model, optimizer = accelerator.prepare(model, torch.optim.Adagrad(groups, initial_accumulator_value=0.2))
    losses = []
    for step in range(2):
        loss = model(torch.randn(3, 4, generator=torch.Generator().manual_seed(step))).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@on_new_ranks(2)
def test_groups_of_adagrad_without_parameters_train_as_under_ddp():
    assert_same(by_adagrad(sharded()), by_adagrad(ddp))


@pytest.mark.filterwarnings("ignore:.*broadcast_buffers")
@on_new_ranks(2)
def test_batch_norm_statistics_match_ddp():
    for broadcasts in (True, False):
        options = {"kwargs_handlers": [DistributedDataParallelKwargs(broadcast_buffers=broadcasts)]}
        expected = statistics_of(ddp, **options)
        assert_same(statistics_of(sharded(), **options), expected)
    assert_same(statistics_of(sharded("zero2")), statistics_of(ddp))


@pytest.mark.slow
@on_new_ranks(2)
def test_bf16_all_gathers_half_the_bytes_and_fp32_matches_ddp_bitwise():
    in_bf16 = {"mixed_precision": "bf16"}
    expected = Run(ddp, **in_bf16).train()
    exact = Run(sharded(param_dtype=torch.float32), **in_bf16).train()
    half = Run(sharded(), **in_bf16)
    with recording() as record:
        close = half.train()
    gathered = sum(record.sent_bytes(name) for name in ("all_gather",))
    assert {param.dtype for param in half.model.parameters()} == {torch.float32}
    other = Run(sharded(param_dtype=torch.float32), **in_bf16)
    with recording() as record:
        other.train()
    assert 1.9 * gathered < record.sent_bytes("all_gather") < 2.1 * gathered
    assert exact == expected
    assert close == pytest.approx(expected, rel=2e-2)
    assert close != expected


def stopped_and_resumed(folder: str) -> tuple[list[float], list[float], list[str]]:
    whole = Run(sharded())
    expected = whole.train()
    run = Run(sharded(state_dict_type="FULL_STATE_DICT"))
    run.train(stop=4)
    visited = []
    run.accelerator.register_save_state_pre_hook(lambda models, weights, place: visited.extend(models))
    run.accelerator.save_state(folder)
    assert visited == [run.model]
    resumed = Run(sharded("zero2"), model=llama(num_hidden_layers=2))
    for param in resumed.model.parameters():
        param.data.zero_()
    resumed.accelerator.load_state(folder)
    return expected[4:], resumed.train(start=4), sorted(names_in(folder))


def resumed_elsewhere(folder: str) -> list[float]:
    resumed = Run(sharded("zero1"), batch=4)
    resumed.accelerator.load_state(folder)
    return resumed.train(start=4)


@pytest.mark.slow
def test_resumed_accelerate_run_matches_uninterrupted_run(tmp_path):
    for expected, actual, names in run_ranks(2, stopped_and_resumed, str(tmp_path)):
        assert actual == expected
        assert {"fullshard_0", "model_0", "scheduler.bin", "random_states_1.pkl"} <= set(names)
        assert not {"optimizer.bin", "model.safetensors"} & set(names)
    for one_rank in run_ranks(1, resumed_elsewhere, str(tmp_path)):
        assert one_rank == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@on_new_ranks(2)
def test_load_state_skips_an_unfinished_checkpoint(tmp_path):
    options = {"project_config": ProjectConfiguration(project_dir=tmp_path, automatic_checkpoint_naming=True)}
    run = Run(sharded(), **options)
    run.train(stop=2)
    run.accelerator.save_state()
    run.train(start=2, stop=4)
    place = Path(run.accelerator.save_state())
    run.accelerator.wait_for_everyone()
    if run.accelerator.is_main_process:  # as if killed before the save was complete
        (found,) = (place / "fullshard_0").iterdir()
        found.rename(f"{found}.partial-0")
    run.accelerator.wait_for_everyone()
    resumed = Run(sharded(), **options)
    resumed.accelerator.load_state()
    with pytest.raises(Exception, match=r"checkpoint_1"):
        resumed.accelerator.load_state(str(place))
    resumed.accelerator.load_state()
    assert resumed.train(start=2, stop=4) == Run(sharded()).train()[2:4]


@on_new_ranks(2)
def test_from_pretrained_loads_saved_model_with_the_same_logits(tmp_path):
    folder = str(tmp_path)
    run = Run(sharded(), model=llama(tie_word_embeddings=True))
    run.train(stop=2)
    state = run.accelerator.get_state_dict(run.model)
    names = set(state)
    unwrapped = run.accelerator.unwrap_model(run.model)
    unwrapped.save_pretrained(
        folder,
        is_main_process=run.accelerator.is_main_process,
        save_function=run.accelerator.save,
        state_dict=state,
    )
    run.accelerator.save_model(run.model, f"{folder}/by_accelerate")
    run.accelerator.wait_for_everyone()
    ids = Sentences(4).ids
    with torch.no_grad():
        logits = run.model(ids).logits
    opened = LlamaForCausalLM.from_pretrained(folder)
    assert opened.lm_head.weight is opened.model.embed_tokens.weight
    assert type(opened) is LlamaForCausalLM
    assert names_in(f"{folder}/by_accelerate") == {"model.safetensors"}
    assert names == (set() if run.accelerator.process_index else set(opened.state_dict()))
    with torch.no_grad():
        assert_same(logits, opened(ids).logits)


def two_models(make: Callable[..., Any]) -> list[float]:
    """Train a student and its teacher, each with an optimizer, next to a third model that is not trained."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = make()
    models = accelerator.prepare(*(llama(num_hidden_layers=layers) for layers in (1, 2)))
    optimizers = [accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    onlooker = accelerator.prepare_model(llama(), evaluation_mode=True)
    if make is not ddp:
        assert all(units_in(model) for model in (*models, onlooker))
    losses = []
    for batch in accelerator.prepare(DataLoader(Sentences(16), batch_size=2)):
        outputs = [model(**batch) for model in models]
        with torch.no_grad():
            visited = onlooker(**batch).logits
        loss = sum(output.loss + (output.logits - visited).square().mean() for output in outputs)
        accelerator.backward(loss)
        for model, optimizer in zip(models, optimizers, strict=True):
            accelerator.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@on_new_ranks(2)
def test_several_trained_and_evaluated_models_match_ddp():
    assert two_models(ddp) == two_models(sharded())


@on_new_ranks(2)
def test_prepare_broadcasts_weights_of_rank_0():
    """Each rank initializes different weights, as in scripts without a seed. DDP broadcasts those of rank 0."""

    def model() -> nn.Module:
        made = llama()
        with torch.no_grad():
            for param in made.parameters():
                param.add_(0.1 * int(os.environ["RANK"]))
        return made

    assert Run(ddp, model=model()).train() == Run(sharded(), model=model()).train()


@on_new_ranks(2)
def test_cpu_ram_efficient_loading_broadcasts_weights_of_rank_0():
    """Simulate the state of `from_pretrained` on all other ranks under cpu_ram_efficient_loading."""
    expected = Run(ddp, model=llama(tie_word_embeddings=True)).train()
    model = llama(tie_word_embeddings=True)
    if os.environ["RANK"] != "0":
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model.to("meta")
        model.tie_weights()
        for name, buffer in buffers.items():
            owner, _, last = name.rpartition(".")
            model.get_submodule(owner)._buffers[last] = buffer
    run = Run(sharded(cpu_ram_efficient_loading=True), model=model)
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"
    assert run.train() == expected


def units(accelerator_of: Callable[..., Any], **options: Any) -> list[str]:
    run = Run(accelerator_of, **options)
    return [type(unit.modules[0]).__name__ for unit in units_in(run.model)]


@on_new_ranks(2)
def test_plugin_and_environment_settings_select_the_units():
    layers = ["FSDPLlamaForCausalLM", "FSDPLlamaDecoderLayer", "FSDPLlamaDecoderLayer"]
    found: dict[str, Any] = {"plugin": units(sharded())}
    peer = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=3000)
    found["accelerate's plugin"] = units(lambda **options: Accelerator(fsdp_plugin=peer, **options))
    found["one unit"] = units(sharded(auto_wrap_policy="NO_WRAP"))
    os.environ.update(
        ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
        FSDP_TRANSFORMER_CLS_TO_WRAP="LlamaMLP", FSDP_RESHARD_AFTER_FORWARD="false", FSDP_MIN_NUM_PARAMS="100000000",
        FSDP_SHARDING_STRATEGY="FULL_SHARD", FSDP_FORWARD_PREFETCH="false",
    )  # fmt: skip
    run = Run(Accelerator)
    found["environment"] = [type(unit.modules[0]).__name__ for unit in units_in(run.model)]
    found["environment's strategy"] = run.accelerator.sharding.strategy
    assert os.environ.pop("ACCELERATE_USE_FSDP") == "true"
    ignoring = Run(sharded(ignored_modules=r".*embed_tokens"))
    found["ignored"] = [name for name, param in ignoring.model.named_parameters() if type(param) is nn.Parameter]
    prefetching = units_in(Run(sharded(backward_prefetch="BACKWARD_POST", limit_all_gathers=False)).model)
    found["prefetch"] = {(unit.options.backward_prefetch, unit.options.prefetch_depth) for unit in prefetching}
    assert found["plugin"] == layers
    assert found["accelerate's plugin"].count("FSDPLlamaMLP") == 2
    assert found["one unit"] == layers[:1]
    assert found["environment"] == ["FSDPLlamaForCausalLM", "FSDPLlamaMLP", "FSDPLlamaMLP"]
    assert found["environment's strategy"] == "zero2"
    assert found["ignored"] == ["model.embed_tokens.weight"]
    assert found["prefetch"] == {("post", 2)}


def tracked(folder: str, order: str) -> tuple[list[float], list[float]]:
    """Record a run with a tracker, and return its losses and those of a run without one."""
    plain = Run(sharded()).train()
    tracker = ReportTracker(Path(folder) / order)

    def make(**options: Any) -> Any:
        accelerator = sharded()(log_with=tracker, **options)
        if order == "trackers first":
            accelerator.init_trackers("run", {"lr": 1e-2})
            assert tracker.report is None
        return accelerator

    run = Run(make)
    if order == "models first":
        assert tracker.report is None
        run.accelerator.init_trackers("run", {"lr": 1e-2})
    losses = run.train(logs=True)
    tracker.finish()
    return losses, plain


@pytest.mark.parametrize("order", ["trackers first", "models first"])
def test_report_tracker_records_logged_losses(order, tmp_path):
    for losses, plain in run_ranks(2, tracked, str(tmp_path), order):
        assert losses == plain
    run = read_run(tmp_path / order)
    assert len(run.ranks) == 2 and run.steps.tolist() == [3, 4]  # of two microbatches; the first two are not timed
    assert run.settings == {"lr": "0.01"}
    assert run.training["loss"].tolist() == [pytest.approx(losses[number]) for number in (5, 7)]
    assert (tmp_path / order / "report.html").exists()


class Plain(nn.Module):
    """A model from outside transformers, with blocks that can be checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.head = nn.Linear(16, 64)
        self.calls = 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(x)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return type("Output", (), {"loss": loss})


@on_new_ranks(2)
def test_local_sgd_raises():
    accelerator = sharded()(cpu=True)
    model = accelerator.prepare(nn.Linear(8, 8))
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=1) as local_sgd:
        with pytest.raises(StateError, match="LocalSGD, which averages full parameters, cannot be used"):
            local_sgd.step()
        local_sgd.enabled = False
    assert accelerator.reduce(torch.ones(2), "mean").tolist() == [1, 1]


def checkpointed() -> tuple[int, int, bool]:
    counts = []
    losses = []
    for way in (
        ddp,
        sharded(transformer_layer_cls_to_wrap=("Sequential",)),
        sharded(transformer_layer_cls_to_wrap=("Sequential",), activation_checkpointing=True),
    ):
        model = Plain()
        calls: list[int] = []
        model.blocks[0][1].register_forward_hook(lambda *_, calls=calls: calls.append(1))
        losses.append(Run(way, model=model).train())
        counts.append(len(calls))
    return counts[1], counts[2], losses[0] == losses[1] == losses[2]


def test_activation_checkpointing_recomputes_units_of_any_model():
    for once, twice, same in run_ranks(2, checkpointed):
        assert twice == 2 * once == 16
        assert same


@pytest.mark.parametrize(
    ("config", "stated"),
    [
        ({"shard_everything": True}, "unknown key shard_everything"),
        ({"xla": True}, "xla=True is not supported: .*XLA"),
        ({"xla_fsdp_settings": {"compute_dtype": "bfloat16"}}, "xla_fsdp_settings"),
        ({"fsdp_use_orig_params": False}, "never flattened"),
        ({"state_dict_type": "LOCAL_STATE_DICT"}, "not flattened"),
        ({"strategy": "zero4"}, "zero4"),
        ({"strategy": "zero1", "reshard_after_forward": True}, "Leave one of them out"),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP"}, "the minimum number of elements"),
        ({"min_num_params": 100}, "requires auto_wrap_policy=SIZE_BASED_WRAP"),
        (
            {"auto_wrap_policy": "NO_WRAP", "transformer_layer_cls_to_wrap": "A"},
            "requires auto_wrap_policy=TRANSFORMER_BASED_WRAP",
        ),
        ({"auto_wrap_policy": "WRAP"}, "choose one of"),
        ({"cpu_offload": "perhaps"}, "expected true or false"),
        ({"transformer_layer_cls_to_wrap": 3}, "transformer_layer_cls_to_wrap=3: expected names of classes"),
        ({"transformer_layer_cls_to_wrap": [3]}, "expected names of classes"),
        ({"backward_prefetch": "SOON"}, "choose one of BACKWARD_PRE"),
        ({"version": 3}, "expected 1 or 2"),
        ({"sharding_strategy": "MOST"}, "choose one of FULL_SHARD"),
        ({"param_dtype": "int8"}, "choose one of float32"),
        ({"cpu_ram_efficient_loading": True, "sync_module_states": False}, "Set sync_module_states"),
        ({"activation_checkpointing_offload": True}, "needs activation_checkpointing"),
        ({"offload_optimizer": "half"}, "a number from 0 to 1"),
        ({"offload_optimizer": 0.5}, "without a folder"),
        ({"offload_folder": "/nvme"}, "is not used"),
        ({"offload_folder": "/nvme", "offload_activations_cpu": 1}, "is not used"),
        ({"offload_activations": 2, "offload_folder": "/nvme"}, "from 0 to 1"),
        ({"offload_budget": "20GB", "offload_optimizer": 0.5, "offload_folder": "/nvme"}, "chooses the fractions"),
        ({"offload_optimizer": 1, "offload_folder": "/nvme", "cpu_offload": True}, "Leave out one of them"),
        ({"param_init_fn": print}, "param_init_fn"),
    ],
)
def test_unsupported_plugin_values_raise_with_their_key(config, stated):
    with pytest.raises(ConfigError, match=stated):
        ShardingPlugin.from_config(config)


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        ({"fsdp_reshard_after_forward": "true"}, "strategy", "zero3"),
        ({"reshard_after_forward": False}, "strategy", "zero2"),
        ({"version": 1, "reshard_after_forward": "hybrid_shard"}, "strategy", "hsdp"),
        ({"reshard_after_forward": 8}, "reshard_after_forward", 8),
        ({"sharding_strategy": 3}, "strategy", "ddp"),
        ({"strategy": "zero1"}, "strategy", "zero1"),
        ({"fsdp_offload_params": "true"}, "cpu_offload", True),
        (
            {"offload_optimizer": "0.5", "offload_folder": "/nvme"},
            "offload_policy",
            Offload(optimizer={"disk": 0.5}, activations={"disk": 0.0}, folder="/nvme"),
        ),
        ({"transformer_layer_cls_to_wrap": "A, B"}, "transformer_layer_cls_to_wrap", ("A", "B")),
        ({"param_dtype": "bf16"}, "param_dtype", torch.bfloat16),
        ({"xla": False, "xla_fsdp_grad_ckpt": False}, "strategy", "zero3"),
        ({"state_dict_type": "full_state_dict"}, "state_dict_type", "FULL_STATE_DICT"),
    ],
)
def test_plugin_keys_set_their_fields(config, field, value):
    assert getattr(ShardingPlugin.from_config(config), field) == value


@pytest.mark.parametrize(
    ("options", "stated"),
    [
        ({"mixed_precision": "fp8"}, "fp8"),
        ({"parallelism_config": object()}, "parallelism_config"),
    ],
)
def test_accelerator_rejects_options_incompatible_with_sharding(options, stated):
    with pytest.raises(ConfigError, match=stated):
        Accelerator(fsdp_plugin=ShardingPlugin(), **options)


def test_private_accelerate_names_exist_in_the_tested_version():
    """Check the undocumented names of accelerate that `Accelerator` uses, at the tested version."""
    assert importlib.metadata.version("accelerate").startswith(f"{TESTED_ACCELERATE}.")
    assert {"_models", "_optimizers"} <= set(vars(accelerate.Accelerator(cpu=True)))
    assert list(inspect.signature(accelerate.Accelerator.prepare_model).parameters)[1:] == [
        "model",
        "device_placement",
        "evaluation_mode",
    ]


def test_require_raises_for_missing_or_old_library(monkeypatch):
    with pytest.raises(
        MissingLibraryError, match=r"nowhere 1.0 or newer, which is not installed.*fullshard\[nowhere\]"
    ):
        versions.require("nowhere", "1.0", extra="nowhere")
    monkeypatch.setattr(versions, "version", lambda library: "1.9.3rc1")
    versions.require("anything", "1.9", extra="anything")
    with pytest.raises(MissingLibraryError, match=r"1.10 or newer, but found 1.9.3rc1"):
        versions.require("anything", "1.10", extra="anything")


def test_docs_list_every_fsdp_config_key():
    page = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()
    table = page.split("## Keys of `fsdp_config`")[1].split("\n## ")[0]
    reported = {
        name for row in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    assert reported == {*SUPPORTED, *REFUSED}
