"""Unmodified models of the transformers library, sharded by layer class, train as if they were not sharded."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_ranks, run_ranks
from small_models import (
    ONE_AXIS,
    Shard,
    Trace,
    adamw,
    agree_with_plain,
    leave,
    momentum,
    my_part,
    take_step,
    whole_grads,
    wholes,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer
from transformers.models.t5.modeling_t5 import T5Block

from fullshard import FullyShardedDataParallel, fully_shard, register_fsdp_forward_method
from fullshard._dry_compat import storage_watch
from fullshard.engine.registry import units_in
from fullshard.testing import assert_same
from fullshard.wrap import transformer_auto_wrap_policy

# transformers prefers another name for it, which older versions do not have.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")

VOCABULARY, STEPS = 131, 3


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    """Tied embeddings and default dropout."""
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=64, n_layer=4, n_head=4, bos_token_id=1, eos_token_id=2
    )
    return GPT2LMHeadModel(config)


def t5() -> nn.Module:
    """Two stacks share one embedding. All layers use the position bias of the first layers and the encoder output."""
    config = T5Config(
        vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=96, num_layers=3, num_heads=4, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config)


def mixtral() -> nn.Module:
    """Build a model with four experts, two of them per token, and a loss that balances them."""
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
    )
    return MixtralForCausalLM(config)


@dataclass(frozen=True)
class Recipe:
    """A model and the class of its layers."""

    build: Callable[[], Any]
    layer: type[nn.Module]

    def model(self, shard: Shard, mode: str = "as it comes") -> Any:
        """Make each layer a unit and the model the root, always with the same weights."""
        torch.manual_seed(0)
        model = self.build()
        if mode != "as it comes":
            reentrant = mode == "reentrant checkpoints"
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={self.layer})
        return shard(model, auto_wrap_policy=policy)


RECIPES = {
    "llama": Recipe(llama, LlamaDecoderLayer),
    "gpt2": Recipe(gpt2, GPT2Block),
    "t5": Recipe(t5, T5Block),
    "mixtral": Recipe(mixtral, MixtralDecoderLayer),
}


def tokens(step: int) -> Tensor:
    """Return the tokens of one step for all ranks: 12 sequences, which 1, 2 and 3 ranks can share."""
    return torch.randint(1, VOCABULARY, (12, 10), generator=torch.Generator().manual_seed(1000 + step))


def loss_of(model: Any, ids: Tensor, seed: int) -> Tensor:
    torch.manual_seed(seed)  # of the dropout
    return model(input_ids=ids, labels=ids).loss


def learn(model: Any, optimizer: torch.optim.Optimizer, backward: Callable[[int], Tensor]) -> Trace:
    """Train three steps; `backward(step)` leaves the gradients in `model` and returns the loss."""
    trace = Trace()
    for step in range(STEPS):
        trace.losses.append(backward(step))
        if step == STEPS - 1:
            trace.grads = whole_grads(model)
        optimizer.step()
        optimizer.zero_grad()
    trace.params = wholes(model)
    return trace


def on_my_part(model: Any, step: int) -> Tensor:
    loss = loss_of(model, my_part(tokens(step)), step)
    loss.backward()
    return loss.detach()


def on_all_parts(model: Any, step: int) -> Tensor:
    """Compute the parts of all ranks, in order, and return this rank's loss."""
    parts = tokens(step).chunk(dist.get_world_size())
    losses = [loss_of(model, part, step) for part in parts]
    (torch.stack(losses).sum() / len(parts)).backward()
    return losses[dist.get_rank()].detach()


# -- training ---------------------------------------------------------------------------------------------------------


def on_axes(strategy: str, shape: tuple[int, int], model: Any, **options: Any) -> Any:
    return fully_shard(model, strategy=strategy, mesh=init_device_mesh("cpu", shape), **options)


STRATEGIES: dict[str, Shard] = {
    **{strategy: partial(fully_shard, strategy=strategy) for strategy in ONE_AXIS},
    "hsdp": partial(on_axes, "hsdp", (2, 1)),
    "hsdp_zero2": partial(on_axes, "hsdp_zero2", (1, 2)),
    "the wrapper": FullyShardedDataParallel,
}
# Checkpointing changes bits: transformers then keeps no cache, and reentrant checkpoints lose auxiliary losses.
MODES = {
    "as it comes": tuple(STRATEGIES),
    "checkpoints": ("zero3", "the wrapper"),
    "reentrant checkpoints": ("zero3", "the wrapper"),
}
Traces = dict[tuple[str, str, str], Trace]  # by model, mode and strategy


def train_all(*strategies: str) -> Traces:
    """Train each model in each mode, without sharding and under the `strategies` of the mode. Return the traces."""
    traces = {}
    for (name, recipe), (mode, tried) in product(RECIPES.items(), MODES.items()):
        plain = recipe.model(leave, mode)
        peer = plain if dist.get_world_size() == 1 else DistributedDataParallel(plain)
        traces[name, mode, "plain"] = learn(plain, adamw(plain), partial(on_my_part, peer))
        for strategy in (strategy for strategy in tried if strategy in strategies):
            model = recipe.model(STRATEGIES[strategy], mode)
            traces[name, mode, strategy] = learn(model, adamw(model), partial(on_my_part, model))
    return traces


@cache
def traces(world: int) -> list[Traces]:
    return run_ranks(world, train_all, *(STRATEGIES if world == 2 else ("zero3",)))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.slow
def test_sharded_transformers_match_plain_pytorch_and_ddp_bitwise(name, world):
    """Compare with plain PyTorch on one rank, and with `DistributedDataParallel` on two."""
    for rank, of_rank in enumerate(traces(world)):
        for model, mode, strategy in of_rank:
            if model == name:
                actual, expected = of_rank[name, mode, strategy], of_rank[name, mode, "plain"]
                assert_same(actual.numbers, expected.numbers, name=f"rank {rank}, {mode}, {strategy}: ")


def train_on_three(name: str) -> tuple[Trace, Trace, Trace]:
    recipe = RECIPES[name]
    results = []
    for strategy in ("zero3", "ddp"):
        model = recipe.model(partial(fully_shard, strategy=strategy))
        results.append(learn(model, momentum(model), partial(on_my_part, model)))
    alone = recipe.model(leave)
    results.append(learn(alone, momentum(alone), partial(on_all_parts, alone)))
    return tuple(results)


@pytest.mark.slow
@on_ranks(3)
def test_three_ranks_match_one_process_within_rounding():
    """Three ranks cannot share all rows evenly and sum in a different order. The strategies are bitwise equal."""
    of_rank = {name: train_on_three(name) for name in RECIPES}
    for name, (zero3, ddp, alone) in of_rank.items():
        assert_same(zero3.numbers, ddp.numbers, name=f"{name}: ")
        torch.testing.assert_close(zero3.numbers, alone.numbers, rtol=1e-3, atol=1e-4)


# -- memory -----------------------------------------------------------------------------------------------------------


def memory_of_a_step(model: Any) -> tuple[int, int]:
    """Return the bytes that forward keeps for backward, and the peak bytes of a step."""
    for step in range(2):
        loss_of(model, tokens(0), step).backward()
        model.zero_grad()
    with storage_watch(every_operation=True) as watch:
        loss = loss_of(model, tokens(0), 2)
        kept = watch.live_bytes()
        loss.backward()
    return kept, watch.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name == "t5" else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES]
)
@on_ranks(2)
def test_activation_checkpointing_saves_the_same_memory_with_sharding(name):
    """Forward keeps no additional bytes. Backward also has unsharded gradients of at most two units."""
    gc.disable()
    recipe = RECIPES[name]
    plain, plain_peak = memory_of_a_step(recipe.model(leave))
    for mode in ("checkpoints", "reentrant checkpoints"):
        less, less_peak = memory_of_a_step(recipe.model(leave, mode))
        sharded = recipe.model(fully_shard, mode)
        kept, peak = memory_of_a_step(sharded)
        two_units = 2 * max(unit.unsharded_nbytes for unit in units_in(sharded))
        assert less < plain / 2
        assert kept == less
        assert peak <= less_peak + two_units < plain_peak


# -- generation -------------------------------------------------------------------------------------------------------

HOW = ({}, {"do_sample": True}, {"num_beams": 3})


def generate(model: Any, **options: Any) -> list[Tensor]:
    """Return the tokens generated from a prompt in several ways, with the model in eval mode."""
    torch.manual_seed(7)
    model.eval()
    found = [model.generate(tokens(20)[:2, :4], pad_token_id=0, max_new_tokens=6, **how, **options) for how in HOW]
    model.train()
    return found


def generate_between_steps(name: str, shard: Shard) -> list[Any]:
    model = RECIPES[name].model(shard)
    register_fsdp_forward_method(model, "generate")
    optimizer, left = adamw(model), []
    for step in range(2):
        left += [generate(model), loss_of(model, tokens(step), step)]
        take_step(optimizer, left[-1])
    return [*left, wholes(model)]


@pytest.mark.slow
@on_ranks(2)
def test_generate_between_steps_matches_plain_pytorch():
    for name in RECIPES:
        agree_with_plain(partial(generate_between_steps, name), "zero1", "zero3")


def generate_as_long_as_it_takes() -> tuple[Tensor, Tensor]:
    plain, sharded = (RECIPES["llama"].model(shard) for shard in (leave, FullyShardedDataParallel))
    rank = dist.get_rank()
    options = {"input_ids": tokens(20)[:2, : 4 + rank], "max_new_tokens": 3 + 4 * rank, "pad_token_id": 0}
    return sharded.generate(**options, synced_gpus=True), plain.generate(**options)


def test_ranks_generate_texts_of_different_lengths():
    """Finished ranks continue to all-gather with the others if `synced_gpus` is set."""
    results = run_ranks(2, generate_as_long_as_it_takes)
    for sharded, plain in results:
        assert_same(sharded, plain)
    assert results[0][0].shape != results[1][0].shape


@on_ranks(2)
def test_layerdrop_runs_all_layers_on_every_rank():
    """Each rank would drop different layers unless transformers detects that all ranks must run all layers."""
    config = Wav2Vec2Config(
        vocab_size=16,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(16, 16),
        conv_stride=(5, 4),
        conv_kernel=(10, 5),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        layerdrop=0.5,
        mask_time_prob=0.0,
    )
    torch.manual_seed(0)
    model = Wav2Vec2ForCTC(config)
    for layer in model.wav2vec2.encoder.layers:
        fully_shard(layer)
    fully_shard(model)
    torch.manual_seed(dist.get_rank())
    for _ in range(STEPS):
        model(torch.randn(2, 800), labels=torch.randint(1, 15, (2, 4))).loss.backward()
        model.zero_grad()
