"""Small models of transformers with random weights, and made-up data, for the tests of integrations."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY = 64


def llama(**options: Any) -> LlamaForCausalLM:
    """Build two layers with constant weights. Embeddings are tied on request only."""
    torch.manual_seed(0)
    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    return LlamaForCausalLM(LlamaConfig(**{**config, **options}))


def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    return T5ForConditionalGeneration(config)


def mixtures() -> dict[str, PreTrainedModel]:
    """Mixtures of experts of three kinds, whose files have each expert's matrices by themselves."""
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    deepseek = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    configs = {
        "mixtral": MixtralConfig(**common, num_local_experts=5),
        "qwen3_moe": Qwen3MoeConfig(**common, moe_intermediate_size=24, num_experts=4, head_dim=8),
        "deepseek_v3": DeepseekV3Config(
            **{**common, "num_key_value_heads": 4},
            **deepseek,
            moe_intermediate_size=24,
            n_routed_experts=4,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
        ),
    }
    found = {}
    for name, config in configs.items():
        torch.manual_seed(0)
        found[name] = AutoModelForCausalLM.from_config(config)
    return found


class Sentences(Dataset):
    """Made-up token ids, and themselves as labels."""

    def __init__(self, count: int = 32, length: int = 8) -> None:
        made = torch.Generator().manual_seed(1)
        self.ids = torch.randint(1, VOCABULARY, (count, length), generator=made)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def names_in(folder: str | Path) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}
