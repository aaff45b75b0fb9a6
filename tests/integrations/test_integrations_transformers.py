"""A Trainer script with one changed import has the losses of DDP, for all of its arguments."""

import importlib
import importlib.metadata
import inspect
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
import torch
import transformers
import transformers.core_model_loading as loading
import transformers.trainer
from accelerate.state import AcceleratorState, GradientState
from hf_models import Sentences, llama, mixtures, names_in, t5
from shared_ranks import on_new_ranks
from small_models import whole
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    TrainingArguments,
)

from fullshard import CheckpointError, ConfigError, StateError, fully_shard
from fullshard.engine.registry import units_in
from fullshard.integrations.accelerate import Accelerator
from fullshard.integrations.plugin import ShardingPlugin
from fullshard.integrations.preparing import shard
from fullshard.integrations.transformers import TESTED_TRANSFORMERS, Seq2SeqTrainer, Trainer, from_pretrained
from fullshard.integrations.waiting_weights import read_waiting
from fullshard.plan.ledger import peak_during, storage_bytes
from fullshard.testing import assert_same, run_ranks

pytestmark = [
    # The compiler itself reads the gradients of its inputs.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Passing `fsdp` as a:FutureWarning"),
]

SHARDED = {"fsdp": True}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Set a launcher's variables. Otherwise accelerate would choose the number of threads."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


class Watch(TrainerCallback):
    """A callback that keeps logged losses and evaluations, and counts steps."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.evaluated: list[dict[str, float]] = []
        self.steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        assert others["model"] is not None
        self.steps += 1

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **others: Any) -> None:
        exact = {name: value for name, value in metrics.items() if "runtime" not in name and "per_second" not in name}
        self.evaluated.append(exact)


@dataclass
class Script:
    """A script of four steps. Tests change its settings."""

    folder: str
    arguments: dict[str, Any] = field(default_factory=dict)
    trainer_arguments: dict[str, Any] = field(default_factory=dict)
    model: Any = None
    trainer: type[Any] = transformers.Trainer
    resume: str | bool | None = None

    def run(self) -> tuple[Watch, Any]:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        seq2seq = issubclass(self.trainer, transformers.Seq2SeqTrainer)
        given = {
            "output_dir": self.folder,
            "max_steps": 4,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "ddp_find_unused_parameters": False,
        }
        args = (Seq2SeqTrainingArguments if seq2seq else TrainingArguments)(**{**given, **self.arguments})
        watch = Watch()
        others = {"train_dataset": Sentences(), "callbacks": [watch], **self.trainer_arguments}
        trainer = self.trainer(model=self.model or llama(), args=args, **others)
        trainer.train(resume_from_checkpoint=self.resume)
        return watch, trainer


class Stream(IterableDataset):
    """An iterable of sentences without a length."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        sentences = Sentences()
        return (sentences[index] for index in range(len(sentences)))


def hits(prediction: Any) -> dict[str, float]:
    """Compute a custom metric."""
    chosen = torch.as_tensor(prediction.predictions).argmax(-1)
    return {"hits": (chosen == torch.as_tensor(prediction.label_ids)).float().mean().item()}


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Collate by a custom function: every second row is cut, so that ranks count different numbers of tokens."""
    ids = torch.stack([row["input_ids"] for row in rows])
    labels = ids.clone()
    labels[::2, 5:] = -100
    return {"input_ids": ids, "labels": labels}


def mean_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Compute a custom loss."""
    return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 3}
VARIANTS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "accumulating": {"arguments": {"gradient_accumulation_steps": 3}, "trainer_arguments": {"data_collator": padded}},
    "clipped": {"arguments": {"max_grad_norm": 0.05}},
    "not clipped": {"arguments": {"max_grad_norm": 0.0}},
    "bf16": {"arguments": {"bf16": True}, "config": {"param_dtype": "float32"}},
    "checkpointed": {"arguments": {"gradient_checkpointing": True}},
    "smoothed": {"arguments": {"label_smoothing_factor": 0.1}},
    "evaluated": {
        "arguments": EVALUATED,
        "trainer_arguments": {"eval_dataset": Sentences(10), "compute_metrics": hits},
    },
    "streamed": {"trainer_arguments": {"train_dataset": Stream()}},
    "own loss": {"trainer_arguments": {"compute_loss_func": mean_loss}},
    "other optimizer": {"arguments": {"optim": "adamw_torch_fused", "lr_scheduler_type": "cosine"}},
    "adagrad": {"arguments": {"optim": "adagrad"}},
    "zero1": {"config": {"strategy": "zero1"}, "arguments": {"gradient_accumulation_steps": 2}},
    "zero2": {"config": {"strategy": "zero2"}, "arguments": {"gradient_accumulation_steps": 2}},
    "own checkpointing": {"config": {"activation_checkpointing": True}},
    "offloaded": {"config": {"cpu_offload": True}},
    "on a disk": {"config": {"offload_optimizer": 0.5, "offload_activations": 1, "offload_folder": gettempdir()}},
    "compiled": {"own": {"torch_compile": True, "torch_compile_backend": "aot_eager"}},
}


def both_ways(folder: str, names: list[str]) -> dict[str, list[Any]]:
    """Return the logs and evaluations of a script, under DDP and sharded, for each variant.

    Only the sharded run uses a variant's `own` arguments.
    """
    found = {}
    for name in names:
        variant = dict(VARIANTS[name])
        config = variant.pop("config", {})
        arguments = variant.pop("arguments", {})
        own = {**SHARDED, "fsdp_config": config, **variant.pop("own", {})}
        visited = []
        for trainer, fsdp in ((transformers.Trainer, {}), (Trainer, own)):
            watch, made = Script(folder, {**arguments, **fsdp}, trainer=trainer, **variant).run()
            assert watch.steps == 4
            model = made.accelerator.unwrap_model(made.model, keep_torch_compile=False)
            assert ("FSDP" in type(model).__name__) == (trainer is Trainer)
            visited.append((watch.losses, watch.evaluated))
        found[name] = visited
    return found


def assert_identical(by_variant: dict[str, list[Any]]) -> None:
    for name, (expected, actual) in by_variant.items():
        losses, evaluated = expected
        assert len(set(losses)) == 4, name
        assert actual[0] == pytest.approx(losses, rel=1e-6), name
        assert actual[1] == [pytest.approx(metrics, rel=1e-6) for metrics in evaluated], name


OFTEN = ["accumulating", "evaluated", "zero2"]


@pytest.mark.slow
def test_trainer_losses_and_metrics_match_ddp(tmp_path):
    for found in run_ranks(2, both_ways, str(tmp_path), OFTEN):
        assert_identical(found)


@pytest.mark.slow
@pytest.mark.parametrize("third", [0, 1, 2])
def test_trainer_losses_and_metrics_match_ddp_for_more_arguments(tmp_path, third):
    more = [name for name in VARIANTS if name not in OFTEN]
    for found in run_ranks(2, both_ways, str(tmp_path), more[third::3]):
        assert_identical(found)


def count_words(prediction: Any) -> dict[str, float]:
    return {"sum": float(prediction.predictions[prediction.predictions > 0].sum())}


@pytest.mark.slow
@on_new_ranks(2)
def test_predict_with_generate_matches_ddp(tmp_path):
    """Train a sequence-to-sequence model that generates text: ranks end their sentences at different lengths."""
    visited = []
    generation = GenerationConfig(max_new_tokens=6, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    arguments = {**EVALUATED, "predict_with_generate": True, "generation_config": generation}
    for trainer, fsdp in ((transformers.Seq2SeqTrainer, {}), (Seq2SeqTrainer, SHARDED)):
        others = {"eval_dataset": Sentences(10), "compute_metrics": count_words}
        watch, _ = Script(tmp_path, {**arguments, **fsdp}, others, model=t5(), trainer=trainer).run()
        visited.append([watch.losses, watch.evaluated])
    expected, actual = visited
    assert_identical({"generated": [expected, actual]})
    assert all(metrics["eval_sum"] > 0 for metrics in actual[1])


SAVED = {"save_strategy": "steps", "save_steps": 2}


def stopped_and_resumed(folder: str) -> dict[str, Any]:
    config = {"state_dict_type": "SHARDED_STATE_DICT"}
    saved = {**SHARDED, **SAVED, "gradient_accumulation_steps": 2}
    whole, trainer = Script(folder, {**saved, "fsdp_config": config}, trainer=Trainer).run()
    second = f"{folder}/checkpoint-2"
    names = names_in(second)
    trainer.accelerator.wait_for_everyone()
    if trainer.accelerator.is_main_process:  # as if killed before the last save was complete
        Path(f"{folder}/checkpoint-4/trainer_state.json").write_text('{"best_met')
    trainer.accelerator.wait_for_everyone()
    resumed, _ = Script(folder, {**saved, "fsdp_config": {"strategy": "zero2"}}, trainer=Trainer, resume=True).run()
    return {"whole": whole.losses, "resumed": resumed.losses, "names": names}


def resumed_elsewhere(folder: str, batch: int) -> list[float]:
    arguments = {**SHARDED, "per_device_train_batch_size": batch, "gradient_accumulation_steps": 2}
    return Script(folder, arguments, trainer=Trainer, resume=f"{folder}/checkpoint-2").run()[0].losses


@pytest.mark.slow
@pytest.mark.parametrize(("world", "batch"), [(1, 4), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_resumed_trainer_matches_uninterrupted_run(tmp_path, world, batch):
    folder = str(tmp_path)
    for found in run_ranks(2, stopped_and_resumed, folder):
        assert found["resumed"] == found["whole"][2:]
        assert {"fullshard", "trainer_state.json", "rng_state_1.pth"} <= found["names"]
        assert not {"model.safetensors", "optimizer.pt"} & found["names"]
    for losses in run_ranks(world, resumed_elsewhere, folder, batch):
        assert losses == pytest.approx(found["whole"][2:], rel=1e-5)


@pytest.mark.slow
@on_new_ranks(2)
def test_ddp_checkpoint_resumes_sharded(tmp_path):
    whole, _ = Script(tmp_path, SAVED).run()
    resumed, _ = Script(tmp_path, SHARDED, trainer=Trainer, resume=f"{tmp_path}/checkpoint-2").run()
    expected, actual = whole.losses[2:], resumed.losses
    assert actual == pytest.approx(expected, rel=1e-6)


class Worse(TrainerCallback):
    """Makes the model worse after the second step, so that the best model is not the last one."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        if state.global_step == 3:
            with torch.no_grad():
                for param in model.parameters():
                    if param.requires_grad:
                        param.mul_(9.0)


@pytest.mark.slow
@on_new_ranks(2)
def test_best_model_is_loaded_and_saved_for_from_pretrained(tmp_path):
    found: dict[str, Any] = {}
    for name, more in {"sharded": {}, "only model": {"save_only_model": True}}.items():
        arguments = {**SHARDED, **SAVED, **EVALUATED, "load_best_model_at_end": True, **more}
        others = {"eval_dataset": Sentences(10), "callbacks": [Worse()]}
        _, trainer = Script(f"{tmp_path}/{name}", arguments, others, trainer=Trainer).run()
        assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
        trainer.save_model(f"{tmp_path}/{name}/best")
        trainer.accelerator.wait_for_everyone()
        ids = Sentences(4).ids
        logits = []
        with torch.no_grad():
            logits.append(trainer.model(ids).logits)
            for opened in ("best", "checkpoint-2"):
                logits.append(AutoModelForCausalLM.from_pretrained(f"{tmp_path}/{name}/{opened}")(ids).logits)
        found[name] = logits
        assert json.loads(Path(f"{tmp_path}/{name}/best/config.json").read_text())["architectures"] == [
            "LlamaForCausalLM"
        ]
    for loaded, saved, checkpoint in found.values():
        assert_same(loaded, saved)
        assert_same(loaded, checkpoint)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"fsdp_config": {"wrap_everything": True}}, "unknown key wrap_everything"),
    ({"fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaLayer"]}}, "names LlamaLayer"),
    ({"fsdp_config": {"ignored_modules": "head"}}, "does not match the name of any module"),
    ({"fsdp_config": {"min_num_params": 10}}, "requires auto_wrap_policy=SIZE_BASED_WRAP"),
    ({"save_only_model": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}, "save_only_model saves"),
    ({"optim": "adafactor"}, "optim=adafactor"),
]


@on_new_ranks(2)
def test_unsupported_trainer_arguments_raise_with_their_name(tmp_path):
    found = []
    for arguments, _ in REFUSED:
        with pytest.raises(ConfigError) as refused:
            Script(tmp_path, {**SHARDED, **arguments}, trainer=Trainer).run()
        found.append(str(refused.value))
    assert [stated for (_, stated), message in zip(REFUSED, found, strict=True) if stated not in message] == []


def read_straight(folder: str, weights: str) -> dict[str, Any]:
    """Train from weights that were left on disk. Return the results and the memory needed to load them."""
    losses = []
    for build in (AutoModelForCausalLM.from_pretrained, partial(from_pretrained, AutoModelForCausalLM)):
        watch, _ = Script(folder, SHARDED, model=build(weights), trainer=Trainer).run()
        losses.append(watch.losses)
    model, building = peak_during(lambda: from_pretrained(AutoModelForCausalLM, weights))
    largest = max(param.nbytes for param in model.parameters())
    plugin = ShardingPlugin()
    _, sharding = peak_during(lambda: shard(model, plugin, computes_in=None))
    units = units_in(model)
    stored = storage_bytes(model.parameters(), [unit.slot.storage for unit in units])
    unit = max(sum(4 * param.layout.spec.numel for param in unit.params) for unit in units)
    return {
        "losses": losses,
        "building": building - largest,
        "sharding": sharding - stored - unit,
        "whole": sum(4 * param.numel() for param in model.parameters()),
        "generation": model.generation_config.max_new_tokens,
    }


@pytest.mark.slow
def test_from_pretrained_reads_weights_directly_into_shards(tmp_path):
    """It needs host memory for the shards and one unit. Losses equal those of a model that every rank read in full."""
    weights = str(tmp_path / "weights")
    model = llama(num_hidden_layers=8, tie_word_embeddings=True)
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(weights, max_shard_size="50KB")
    for found in run_ranks(2, read_straight, str(tmp_path), weights):
        plain, straight = found["losses"]
        assert len(set(plain)) == 4
        assert straight == plain
        assert max(found["building"], found["sharding"]) < 8192 < found["whole"] // 20
        assert found["generation"] == 7


def train_mixtures(folder: str, kinds: Sequence[str]) -> dict[str, list[list[float]]]:
    """Return losses of models read in full without sharding, in full and sharded, and directly into shards."""
    losses: dict[str, list[list[float]]] = {}
    for kind in kinds:
        weights = f"{folder}/{kind}"
        before = AutoModelForCausalLM.from_pretrained
        straight = partial(from_pretrained, AutoModelForCausalLM)
        layer = next(name for name in before(weights)._no_split_modules if "Layer" in name)
        ddp = {"max_grad_norm": 0.0}  # the last digits of norms of gradients depend on the processor under DDP
        sharded = {**ddp, **SHARDED, "fsdp_config": {"transformer_layer_cls_to_wrap": [layer]}}
        for arguments, build in ((ddp, before), (sharded, before), (sharded, straight)):
            watch, _ = Script(folder, arguments, model=build(weights), trainer=Trainer).run()
            losses.setdefault(kind, []).append(watch.losses)
        plain, read = before(weights), straight(weights)
        read_waiting(fully_shard(read))
        assert_same({name: whole(value) for name, value in read.state_dict().items()}, dict(plain.state_dict()))
    return losses


@pytest.mark.slow
def test_from_pretrained_reads_expert_models_directly_into_shards(tmp_path):
    """The files store the matrices of each expert separately. The models stack those of a layer."""
    models = mixtures()
    for kind, model in models.items():
        model.save_pretrained(tmp_path / kind, max_shard_size="50KB")
    for found in run_ranks(2, train_mixtures, str(tmp_path), list(models)):
        for kind, (ddp, sharded, straight) in found.items():
            assert len(set(ddp)) == 4, kind
            assert sharded == ddp, kind
            assert straight == ddp, kind


def resume_waiting(folder: str, weights: str) -> list[list[float]]:
    """Return the losses after the second step of a DDP run, sharded: of a materialized model, and of a deferred one."""
    Script(folder, SAVED, model=AutoModelForCausalLM.from_pretrained(weights)).run()
    losses = []
    for build in (AutoModelForCausalLM.from_pretrained, partial(from_pretrained, AutoModelForCausalLM)):
        resumed = {"model": build(weights), "trainer": Trainer, "resume": f"{folder}/checkpoint-2"}
        losses.append(Script(folder, {**SHARDED, "save_strategy": "no"}, **resumed).run()[0].losses)
    return losses


@pytest.mark.slow
def test_model_with_deferred_weights_resumes_from_ddp_checkpoint(tmp_path):
    weights = str(tmp_path / "weights")
    llama().save_pretrained(weights)
    for plain, waiting in run_ranks(2, resume_waiting, str(tmp_path / "run"), weights):
        assert waiting == plain


def test_from_pretrained_raises_if_weights_cannot_be_read_into_shards(tmp_path, monkeypatch):
    llama().save_pretrained(tmp_path / "llama")
    with pytest.raises(ConfigError, match="is not a folder with a config"):
        from_pretrained(AutoModelForCausalLM, tmp_path / "nowhere")
    halved = loading.WeightConverter("attn.qkv", ["q_proj", "k_proj"], operations=[loading.Chunk(dim=0)])
    with monkeypatch.context() as patch:
        mapping = importlib.import_module("transformers.conversion_mapping")
        patch.setattr(mapping, "get_model_conversion_mapping", lambda *_, **__: [halved])
        with pytest.raises(ConfigError, match=r"weights of llama models from the tensors in the files .Chunk."):
            from_pretrained(AutoModelForCausalLM, tmp_path / "llama")
    with pytest.raises(ConfigError, match="no_such_option: unknown values"):
        from_pretrained(AutoModelForCausalLM, tmp_path / "llama", no_such_option=3)
    within = nn.Sequential(from_pretrained(AutoModelForCausalLM, tmp_path / "llama"))
    with pytest.raises(ConfigError, match=r"the weights of 0 \(LlamaForCausalLM\) are loaded from"):
        read_waiting(within)


def test_failed_read_of_deferred_weights_can_be_retried(tmp_path):
    llama().save_pretrained(tmp_path)
    model = from_pretrained(AutoModelForCausalLM, tmp_path)
    hidden = (tmp_path / "model.safetensors").rename(tmp_path / "hidden")
    with pytest.raises(CheckpointError):
        read_waiting(model)
    hidden.rename(tmp_path / "model.safetensors")
    read_waiting(model)
    assert_same(dict(model.state_dict()), dict(llama().state_dict()))


def test_deferred_weights_keep_float32_parameters_of_float16_model(tmp_path):
    t5().half().save_pretrained(tmp_path)
    expected = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    found = from_pretrained(AutoModelForSeq2SeqLM, tmp_path)
    read_waiting(found)
    assert {param.dtype for param in expected.parameters()} == {torch.float16, torch.float32}
    assert_same(dict(found.state_dict()), dict(expected.state_dict()))


def test_deferred_weights_are_read_in_full_without_sharding(tmp_path):
    weights = str(tmp_path / "weights")
    llama().to(torch.bfloat16).save_pretrained(weights)
    accelerated = Accelerator(cpu=True).prepare(from_pretrained(AutoModelForCausalLM, weights))
    assert not any(param.is_meta for param in accelerated.parameters())
    model = from_pretrained(AutoModelForCausalLM, weights)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert all(param.is_meta for param in model.parameters())
    Script(str(tmp_path), {"max_steps": 1, "learning_rate": 0.0}, model=model, trainer=Trainer).run()
    expected = AutoModelForCausalLM.from_pretrained(weights).state_dict()
    assert_same(dict(model.state_dict()), dict(expected))


def test_trainer_without_fsdp_shards_nothing(tmp_path):
    _, trainer = Script(str(tmp_path), trainer=Trainer).run()
    assert trainer.sharding is None
    assert type(trainer.model).__name__ == "LlamaForCausalLM"


def enabled_late() -> str:
    import fullshard.integrations.transformers as integration

    class PeerTrainer(transformers.Trainer):
        """A trainer that another library has derived."""

    with pytest.raises(StateError, match="PeerTrainer was derived from transformers' Trainer before"):
        integration.enable()
    return PeerTrainer.__name__


def enabled_early() -> bool:
    import fullshard.integrations.transformers as integration

    integration.enable()
    integration.enable()
    from transformers import Seq2SeqTrainer as OtherPeerTrainer
    from transformers import Trainer as PeerTrainer

    class Derived(PeerTrainer):
        """A trainer that another library derives afterwards."""

    integration.enable()
    return PeerTrainer is Trainer and OtherPeerTrainer is Seq2SeqTrainer and issubclass(Derived, Trainer)


def test_enable_replaces_later_imports_and_raises_after_subclassing():
    assert run_ranks(1, enabled_early) == [True]
    assert run_ranks(1, enabled_late) == ["PeerTrainer"]


PRIVATE = {
    "_load_best_model": ["self"],
    "_load_from_checkpoint": ["self", "resume_from_checkpoint", "model"],
    "_load_optimizer_and_scheduler": ["self", "checkpoint"],
    "_move_model_to_device": ["self", "model", "device"],
    "_save": ["self", "output_dir", "state_dict"],
    "_save_optimizer_and_scheduler": ["self", "output_dir"],
}


def test_private_transformers_names_exist_in_the_tested_version():
    """The undocumented methods of `Trainer` have the arguments that they had in the versions that were checked."""
    minor_version = ".".join(importlib.metadata.version("transformers").split(".")[:2])
    assert minor_version in (TESTED_TRANSFORMERS, "5.24")
    for name, parameters in PRIVATE.items():
        assert list(inspect.signature(getattr(transformers.Trainer, name)).parameters) == parameters, name
    assert "Accelerator" in vars(transformers.trainer)
    assert "fsdp_plugin_args" in inspect.getsource(TrainingArguments)
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.distributed.fsdp import is_fsdp_managed_module

    assert "add_legacy" in inspect.signature(get_model_conversion_mapping).parameters
    renames = list(inspect.signature(loading.rename_source_key).parameters)
    assert renames[:3] == ["source_key", "weight_renamings", "weight_converters"]
    assert list(inspect.signature(loading.dot_natural_key).parameters) == ["s"]
    assert (loading.MergeModulelist().dim, loading.Concatenate().dim) == (0, 0)
    assert list(inspect.signature(transformers.PreTrainedModel._get_dtype_plan).parameters) == ["self", "dtype"]
    assert callable(transformers.PreTrainedModel._from_config)

    marked = nn.Linear(1, 1)
    marked._is_fsdp_managed_module = True
    assert is_fsdp_managed_module(marked)
