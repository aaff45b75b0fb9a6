"""Unchanged peft adapters and trl trainers have DDP's losses and save small checkpoints that peft loads."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from hf_models import VOCABULARY, Sentences, llama, names_in
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from shared_ranks import on_new_ranks
from test_integrations_transformers import EVALUATED, SAVED, SHARDED, Script, Watch, Worse, environment
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from transformers import PreTrainedTokenizerFast

from fullshard import summon_full_params
from fullshard.integrations.transformers import Trainer
from fullshard.testing import assert_same, run_ranks

__all__ = ["environment"]  # all tests in this file use this fixture

# The three libraries use deprecated functions of each other and of torch.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]


def adapted(**options: Any) -> PeftModel:
    torch.manual_seed(0)
    model = get_peft_model(llama(**options), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    for name, param in model.named_parameters():
        if "lora_B" in name:  # zero by default, so that lora_A would not learn at first
            torch.nn.init.normal_(param, std=0.1)
    return model


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model(Sentences(4).ids).logits


@pytest.mark.slow
@on_new_ranks(2)
def test_lora_adapters_train_resume_load_and_merge(tmp_path):
    arguments = {**SAVED, "learning_rate": 0.05}
    expected = Script(f"{tmp_path}/ddp", arguments, model=adapted()).run()[0].losses
    arguments = {**arguments, **SHARDED}
    watch, trainer = Script(tmp_path, arguments, model=adapted(), trainer=Trainer).run()
    resumed, _ = Script(tmp_path, arguments, model=adapted(), trainer=Trainer, resume=f"{tmp_path}/checkpoint-2").run()
    trainer.save_model(f"{tmp_path}/saved")
    trainer.accelerator.wait_for_everyone()
    (saved,) = Path(tmp_path, "checkpoint-2", "fullshard").iterdir()
    keys = FileSystemReader(saved).read_metadata().state_dict_metadata
    weights = {key for key in keys if key.startswith("model.")}
    found = {"expected": expected, "losses": watch.losses, "resumed": resumed.losses, "weights": weights}
    opened = PeftModel.from_pretrained(llama(), f"{tmp_path}/saved")
    found |= {"files": names_in(f"{tmp_path}/saved"), "sharded": logits_of(trainer.model), "opened": logits_of(opened)}
    merged = opened.merge_and_unload()
    with summon_full_params(trainer.model):
        trainer.model.merge_adapter()
    found |= {"merged there": logits_of(merged), "merged here": logits_of(trainer.model)}
    with summon_full_params(trainer.model):
        trainer.model.unmerge_adapter()
    assert found["losses"] == pytest.approx(found["expected"], rel=1e-6)
    assert found["resumed"] == found["losses"][2:]
    assert {"adapter_config.json", "adapter_model.safetensors"} <= found["files"]
    assert "model.safetensors" not in found["files"]
    assert_same(found["sharded"], found["opened"])
    assert_same(found["merged there"], found["merged here"])
    assert found["weights"]
    assert all("lora_" in key for key in found["weights"])


def partly_frozen(seed: int) -> PeftModel:
    """Build a model with an adapter of which one half is frozen, and a second adapter that is not active."""
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    base = llama()
    torch.manual_seed(seed)
    model = get_peft_model(base, config)
    model.add_adapter("other", config)
    for name, param in model.named_parameters():
        if "lora_A" in name:
            torch.nn.init.normal_(param, std=0.1)
            param.requires_grad_(False)
    return model


@on_new_ranks(2)
def test_frozen_parameters_of_adapters_are_saved(tmp_path):
    arguments = SAVED | SHARDED | {"fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
    whole, first = Script(tmp_path, arguments, model=partly_frozen(1), trainer=Trainer).run()
    second = Script(tmp_path, arguments, model=partly_frozen(2), trainer=Trainer, resume=f"{tmp_path}/checkpoint-2")
    resumed, trainer = second.run()
    assert resumed.losses == whole.losses[2:]
    for (name, value), param in zip(first.model.named_parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(value.full_tensor(), param.full_tensor()), name


@pytest.mark.slow
@on_new_ranks(2)
def test_prompt_tuning_checkpoints_load_in_peft(tmp_path):
    """peft computes the saved prompts by a forward of the module that holds them."""
    for kind in (PromptTuningConfig, PrefixTuningConfig):
        folder = tmp_path / kind.__name__
        model = get_peft_model(llama(), kind(task_type="CAUSAL_LM", num_virtual_tokens=3))
        _, trainer = Script(str(folder), SAVED | SHARDED, model=model, trainer=Trainer).run()
        trainer.accelerator.wait_for_everyone()
        opened = PeftModel.from_pretrained(llama(), folder / "checkpoint-4")
        assert_same(logits_of(opened), logits_of(trainer.model))


def best_adapter(folder: str, strategy: str) -> tuple[Tensor, Tensor]:
    arguments = {**SHARDED, **SAVED, **EVALUATED, "load_best_model_at_end": True, "fsdp_config": {"strategy": strategy}}
    others = {"eval_dataset": Sentences(10), "callbacks": [Worse()]}
    _, trainer = Script(f"{folder}/{strategy}", arguments, others, model=adapted(), trainer=Trainer).run()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    opened = PeftModel.from_pretrained(llama(), f"{folder}/{strategy}/checkpoint-2")
    return logits_of(trainer.model), logits_of(opened)


@pytest.mark.slow
@on_new_ranks(2)
def test_load_best_model_at_end_loads_the_best_adapter(tmp_path):
    found = [best_adapter(tmp_path, strategy) for strategy in ("zero1", "zero3")]
    for loaded, saved in found:
        assert_same(loaded, saved)


def words() -> PreTrainedTokenizerFast:
    """Return a tokenizer of numbered words."""
    known = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(VOCABULARY - 3))]
    model = tokenizers.models.WordLevel({word: number for number, word in enumerate(known)}, unk_token="<unk>")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def texts(count: int) -> list[str]:
    made = torch.Generator().manual_seed(2)
    numbers = torch.randint(0, VOCABULARY - 3, (count, 6), generator=made)
    return [" ".join(f"w{number}" for number in row) for row in numbers.tolist()]


def trained_by_trl(folder: str) -> dict[str, list[list[float]]]:
    """Return losses under DDP and sharded, of trl's own trainers: `enable()` is the one changed line."""
    import fullshard.integrations.transformers

    fullshard.integrations.transformers.enable()
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    spoken, pairs = {"text": texts(16)}, texts(48)
    preferred = {"prompt": pairs[:16], "chosen": pairs[16:32], "rejected": pairs[32:]}
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    found = {}
    for name, trainer, config, data, more in (
        ("sft", SFTTrainer, SFTConfig, spoken, {}),
        ("sft, adapters", SFTTrainer, SFTConfig, spoken, {"peft_config": lora}),
        ("dpo", DPOTrainer, DPOConfig, preferred, {"ref_model": llama}),
        ("dpo, adapters", DPOTrainer, DPOConfig, preferred, {"peft_config": lora}),
    ):
        losses = []
        for fsdp in ({}, SHARDED):
            AcceleratorState._reset_state()
            GradientState._reset_state()
            args = config(
                output_dir=folder,
                max_steps=3,
                max_length=16,
                per_device_train_batch_size=2,
                learning_rate=1e-2,
                logging_steps=1,
                save_strategy="no",
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                report_to=[],
                disable_tqdm=True,
                ddp_find_unused_parameters=False,
                **fsdp,
            )
            watch = Watch()
            others = {key: value() if key == "ref_model" else value for key, value in more.items()}
            made = trainer(
                model=llama(),
                args=args,
                train_dataset=Dataset.from_dict(data),
                processing_class=words(),
                callbacks=[watch],
                **others,
            )
            made.train()
            assert isinstance(made, Trainer)
            assert ("FSDP" in type(made.model).__name__) == bool(fsdp)
            if "ref_model" in others:
                assert ("FSDP" in type(made.ref_model).__name__) == bool(fsdp)
            losses.append(watch.losses)
        found[name] = losses
    return found


@pytest.mark.slow
def test_trl_trainers_match_ddp_losses(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    for found in run_ranks(2, trained_by_trl, str(tmp_path)):
        assert len(found) == 4
        for name, (expected, actual) in found.items():
            assert len(set(expected)) == 3, name
            assert actual == pytest.approx(expected, rel=1e-6), name
