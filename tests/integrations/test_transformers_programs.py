"""Random training programs of transformers models are bitwise equal to plain models with averaged gradients."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from shared_ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from fullshard import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fullshard.testing import assert_same

# transformers, peft and dynamo warn about each other.
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("UserWarning", "FutureWarning")]

RANKS, STEPS, VOCABULARY = 2, 2, 61
DECODER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}
GPT2 = {"n_embd": 16, "n_head": 2, "n_positions": 32, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
OPT = {"hidden_size": 16, "ffn_dim": 24, "num_attention_heads": 2, "word_embed_proj_dim": 16, "dropout": 0.0}
BERT = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "hidden_dropout_prob": 0}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, "dropout_rate": 0, "decoder_start_token_id": 0}
MODELS: dict[str, tuple[Any, str, dict[str, Any]]] = {  # auto class, config key of the layer count, and sizes
    "llama": (AutoModelForCausalLM, "num_hidden_layers", DECODER),
    "qwen2": (AutoModelForCausalLM, "num_hidden_layers", DECODER),
    "gemma2": (AutoModelForCausalLM, "num_hidden_layers", DECODER | {"head_dim": 8}),
    "mixtral": (AutoModelForCausalLM, "num_hidden_layers", DECODER | {"num_local_experts": 3}),
    "gpt2": (AutoModelForCausalLM, "n_layer", GPT2),
    "opt": (AutoModelForCausalLM, "num_hidden_layers", OPT | {"max_position_embeddings": 32}),
    "bert": (AutoModelForSequenceClassification, "num_hidden_layers", BERT | {"attention_probs_dropout_prob": 0}),
    "t5": (AutoModelForSeq2SeqLM, "num_layers", T5 | {"pad_token_id": 0}),
}
HEADS = ("lm_head", "classifier", "gate", "router")


@dataclass(frozen=True, kw_only=True)
class Program:
    """A model, how it is sharded, and how it is trained."""

    seed: int
    model: str
    layers: int
    tied: bool
    adapters: bool  # LoRA on random layers
    frozen: bool  # every third parameter
    checkpointing: str  # "", "reentrant" or "non-reentrant"
    compiled: bool  # each block
    strategy: str
    offloads: bool
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    blocks_per_unit: int
    microbatches: int
    adamw: bool  # otherwise SGD with momentum


program_with = partial(
    st.builds,
    Program,
    seed=st.integers(0, 999),
    model=st.sampled_from(sorted(MODELS)),
    layers=st.integers(1, 3),
    tied=st.booleans(),
    adapters=st.booleans(),
    frozen=st.booleans(),
    checkpointing=st.sampled_from(("", "reentrant", "non-reentrant")),
    strategy=st.sampled_from(("ddp", "zero1", "zero2", "zero3")),
    offloads=st.booleans(),
    param_dtype=st.sampled_from((None, torch.bfloat16)),
    reduce_dtype=st.sampled_from((None, torch.bfloat16, torch.float32)),
    blocks_per_unit=st.integers(1, 2),
    microbatches=st.integers(1, 2),
    adamw=st.booleans(),
)


@settings(deadline=None, max_examples=6, derandomize=True, phases=(Phase.generate,))
@given(program=program_with(compiled=st.just(False)))
def test_sharded_transformers_models_match_plain_training_bitwise(program):
    run_ranks(RANKS, train, program)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(deadline=None, max_examples=2, derandomize=True, phases=(Phase.generate,))
@given(program=program_with(compiled=st.just(True)))
def test_compiled_transformers_models_match_plain_training_bitwise(program):
    run_ranks(RANKS, train, program)


def train(program: Program) -> None:
    """Compare losses and parameters."""
    torch.compiler.reset()
    assert_same(sharded_run(program), plain_run(program))


def sharded_run(program: Program) -> list[Tensor]:
    model: Any = made(program)
    options: dict[str, Any] = {
        "strategy": program.strategy,
        "mp_policy": MixedPrecisionPolicy(param_dtype=program.param_dtype, reduce_dtype=program.reduce_dtype),
    }
    if program.offloads and program.strategy != "ddp":
        options["offload_policy"] = CPUOffloadPolicy()
    blocks = blocks_of(model)
    for first in range(0, len(blocks), program.blocks_per_unit):
        fully_shard(blocks[first : first + program.blocks_per_unit], **options)
    fully_shard(model, **options)
    optimizer, left = optimizer_of(program, model), []
    for step in range(STEPS):
        for number in range(program.microbatches):
            model.set_requires_gradient_sync(number == program.microbatches - 1)
            loss = model(**batch(program, step, number, dist.get_rank())).loss
            loss.backward()
            left.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*left, *(whole(param.detach()) for param in model.parameters())]


def plain_run(program: Program) -> list[Tensor]:
    """Compute the microbatches of all ranks, add gradients in the reduce dtype in rank order, and divide the sum."""
    model: Any = made(program)
    params, optimizer, left = list(model.parameters()), optimizer_of(program, model), []
    reduce_dtype = program.reduce_dtype or program.param_dtype
    for step in range(STEPS):
        stored = [param.data for param in params]
        for param in params:
            param.data = param.data.to(program.param_dtype or param.dtype)
        sums: dict[int, list[Tensor]] = {}
        for rank in range(RANKS):
            of_rank: dict[int, Tensor] = {}
            for number in range(program.microbatches):
                loss = model(**batch(program, step, number, rank)).loss
                loss.backward()
                left += [loss.detach()] if rank == dist.get_rank() else []
                for place, param in enumerate(params):
                    if param.grad is not None:
                        grad, param.grad = param.grad.to(reduce_dtype or param.grad.dtype), None
                        of_rank[place] = of_rank[place] + grad if place in of_rank else grad
            for place, grad in of_rank.items():
                sums.setdefault(place, []).append(grad)
        for place, (param, data) in enumerate(zip(params, stored, strict=True)):
            param.data = data
            if place in sums:
                param.grad = (sum(sums[place][1:], sums[place][0]) / RANKS).to(param.dtype)
        optimizer.step()
        optimizer.zero_grad()
    return [*left, *(param.detach() for param in params)]


def made(program: Program) -> nn.Module:
    kind, layers, sizes = MODELS[program.model]
    more = {layers: program.layers, "vocab_size": VOCABULARY, "tie_word_embeddings": program.tied}
    torch.manual_seed(program.seed)
    model = kind.from_config(AutoConfig.for_model(program.model, **sizes, **more), attn_implementation="eager")
    if program.adapters:
        kinds = {name.rpartition(".")[2] for name, module in model.named_modules() if is_product(module)}
        names = sorted(kinds - set(HEADS))
        chosen = random.Random(program.seed).sample(names, 1 + program.seed % len(names))
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=2, target_modules=chosen, fan_in_fan_out=program.model == "gpt2")
        )
    for place, param in enumerate(model.parameters()):
        param.requires_grad_(param.requires_grad and not (program.frozen and place % 3 == 1))
    if program.checkpointing:
        reentrant = program.checkpointing == "reentrant"
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
    for block in blocks_of(model) if program.compiled else ():
        block.compile(backend="aot_eager")
    return model.train()


def is_product(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def blocks_of(model: nn.Module) -> list[nn.Module]:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inner = {id(child) for blocks in lists for child in blocks.modules() if child is not blocks}
    return [block for blocks in lists if id(blocks) not in inner for block in blocks]


def optimizer_of(program: Program, model: nn.Module) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2) if program.adamw else torch.optim.SGD(trained, lr=0.1, momentum=0.9)


def batch(program: Program, step: int, number: int, rank: int) -> dict[str, Tensor]:
    """Return a batch whose sequence length depends on the microbatch."""
    generator = torch.Generator().manual_seed(program.seed + 100 * step + 10 * number + rank)
    tokens = torch.randint(2, VOCABULARY, (2, 4 + int(torch.randint(3, (), generator=generator))), generator=generator)
    labels = tokens % 2 if program.model == "bert" else tokens
    return {"input_ids": tokens, "labels": labels[:, 0] if program.model == "bert" else labels}


def whole(param: Tensor) -> Tensor:
    return param.full_tensor() if isinstance(param, DTensor) else param
