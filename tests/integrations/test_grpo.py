"""trl's GRPO on a sharded model: a separate engine generates text, with weights from `stream_weights`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from hf_models import llama
from test_integrations_adapters import pytestmark as warnings_of_libraries
from test_integrations_adapters import texts, words
from test_integrations_transformers import SHARDED, environment
from torch import Tensor, nn

from fullshard import stream_weights
from fullshard.testing import run_ranks

__all__ = ["environment"]  # the test in this file uses this fixture
pytestmark = [*warnings_of_libraries, pytest.mark.slow]

STEPS, LENGTH = 3, 6


class Engine:
    """A plain copy of the model that generates text, in place of an inference engine.

    Args:
        is_sharded: Whether the trainer's model is sharded. If so, weights are streamed; otherwise they are copied.
    """

    def __init__(self, is_sharded: bool) -> None:
        self._model, self._is_sharded = llama(), is_sharded
        self.written: list[list[int]] = []

    def update(self, model: nn.Module) -> None:
        own = self._model.state_dict()
        if self._is_sharded:
            for name, weight in stream_weights(model, bucket_bytes=4096):
                own.pop(name).copy_(weight)
            assert set(own) <= {"lm_head.weight"}  # tied in some models
        else:
            self._model.load_state_dict(getattr(model, "module", model).state_dict())

    @torch.no_grad()
    def write(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Generate completions, as trl's `rollout_func`."""
        self.update(trainer.model)
        found: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for number, prompt in enumerate(prompts):
            ids = words()(prompt)["input_ids"]
            generator = torch.Generator().manual_seed(100 * trainer.state.global_step + number)
            text, likely = list(ids), []
            for _ in range(LENGTH):
                chances = self._model(torch.tensor([text])).logits[0, -1].log_softmax(-1)
                text.append(int(torch.multinomial(chances.exp(), 1, generator=generator)))
                likely.append(float(chances[text[-1]]))
            found["prompt_ids"].append(ids)
            found["completion_ids"].append(text[len(ids) :])
            found["logprobs"].append(likely)
        self.written += found["completion_ids"]
        return found


def even_words(completions: list[str], **_: Any) -> list[float]:
    """Compute a reward."""
    return [
        sum(word.startswith("w") and int(word[1:]) % 2 == 0 for word in completion.split()) / LENGTH
        for completion in completions
    ]


def trained(folder: str) -> list[tuple[list[list[int]], dict[str, Tensor]]]:
    """Return the generated texts and the final weights, under DDP and sharded."""
    import fullshard.integrations.transformers

    fullshard.integrations.transformers.enable()
    from trl import GRPOConfig, GRPOTrainer

    found = []
    for fsdp in ({}, SHARDED):
        AcceleratorState._reset_state()
        GradientState._reset_state()
        engine = Engine(is_sharded=bool(fsdp))
        trainer = GRPOTrainer(
            model=llama(),
            reward_funcs=even_words,
            rollout_func=engine.write,
            args=GRPOConfig(
                output_dir=folder,
                max_steps=STEPS,
                num_generations=4,
                per_device_train_batch_size=4,
                max_completion_length=LENGTH,
                learning_rate=1e-2,
                save_strategy="no",
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                report_to=[],
                disable_tqdm=True,
                ddp_find_unused_parameters=False,
                **fsdp,
            ),
            train_dataset=Dataset.from_dict({"prompt": texts(16)}),
            processing_class=words(),
        )
        trainer.train()
        engine.update(trainer.model)
        found.append((engine.written, engine._model.state_dict()))
    return found


def test_grpo_completions_and_final_weights_match_ddp(tmp_path, monkeypatch):
    """Each rollout uses the weights of its step, so completions and final weights match DDP."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    first = llama().state_dict()
    for (expected, peer), (actual, own) in run_ranks(2, trained, str(tmp_path)):
        assert actual == expected
        assert len(actual) == 4 * STEPS
        for name, weight in own.items():
            torch.testing.assert_close(weight, peer[name], rtol=1e-4, atol=1e-6)
        assert any(not torch.equal(weight, first[name]) for name, weight in own.items())
