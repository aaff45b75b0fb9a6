"""Low-precision weights and states of torchao and bitsandbytes: the numbers of one process, at their own bytes."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from shared_ranks import run_ranks
from small_models import Shard
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import MixedPrecisionPolicy, fully_shard, recording, summon_full_params
from fullshard.engine.registry import units_in
from fullshard.optim import step_shards
from fullshard.testing import assert_same

WIDTH, HIDDEN, STEPS = 128, 256, 3


def needs(library: str) -> pytest.MarkDecorator:
    found = importlib.util.find_spec(library) is not None
    return pytest.mark.skipif(not found, reason=f"{library} is not installed")


def inputs(step: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))


def learn(
    model: Any, optimizer: torch.optim.Optimizer | None = None, after: Callable[[Any], Any] = lambda _: None
) -> list[Tensor]:
    """The losses of some steps; `after(model)` is called behind each."""
    optimizer = optimizer or torch.optim.AdamW([it for it in model.parameters() if it.requires_grad], lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = model(inputs(step)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after(model)
        losses.append(loss.detach())
    return losses


def shard_each(model: nn.Sequential, shard: Shard) -> Any:
    """A unit a layer that has parameters, and one around them."""
    for layer in model:
        if any(True for _ in layer.parameters()):
            shard(layer)
    return shard(model)


# -- float8 -----------------------------------------------------------------------------------------------------------


def float8_model(hidden: int = HIDDEN) -> nn.Sequential:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, hidden, bias=False), nn.GELU(), nn.Linear(hidden, WIDTH))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    return convert_to_float8_training(model, config=config)


def train_in_float8() -> None:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp as scale_ahead
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor as Weight

    alone = float8_model()
    expected = learn(alone)
    for strategy in ("zero3", "zero2", "ddp"):
        model = shard_each(float8_model(), partial(fully_shard, strategy=strategy))
        assert_same(learn(model), expected, name=strategy)
        values = model.state_dict() if strategy == "zero3" else {}
        for name, value in values.items():
            local = value._local_tensor
            assert isinstance(local, Weight) is name.endswith("weight")
            whole = value.full_tensor()
            theirs = alone.state_dict()[name]
            assert torch.equal(whole, theirs._tensor if isinstance(theirs, Weight) else theirs)
    assert_same(learn(shard_each(float8_model(), fully_shard), after=scale_ahead), expected)
    uneven = learn(float8_model(67))
    assert_same(learn(shard_each(float8_model(67), fully_shard)), uneven)
    assert_same(learn(shard_each(float8_model(67), fully_shard), after=scale_ahead), uneven)

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = shard_each(float8_model(), partial(fully_shard, mp_policy=policy))
    learn(model)
    with recording() as record:
        model(inputs(0).bfloat16())
    sent = [event.sent_bytes for event in record.collectives("all_gather") if event.origin.unit == "0"]
    assert sent == [WIDTH * HIDDEN // 2]  # to the one other rank: half of a matrix, a byte an element


@needs("torchao")
def test_torchao_float8_trains_the_bits_of_one_process():
    run_ranks(2, train_in_float8, timeout=120)


# -- 4-bit bases ------------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen base, and beside it what is trained."""

    def __init__(self, into: int, out: int, base: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.base = base(into, out)
        self.a = nn.Parameter(torch.randn(4, into) / into)
        self.b = nn.Parameter(torch.randn(out, 4) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


class NF4(nn.Module):
    """As torchao's recipes have it."""

    def __init__(self, into: int, out: int) -> None:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        super().__init__()
        weight = to_nf4(torch.randn(out, into) / into**0.5, 64, 64)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def four_bit(into: int, out: int, storage: torch.dtype = torch.uint8) -> nn.Module:
    """As bitsandbytes has it."""
    import bitsandbytes

    layer = bitsandbytes.nn.Linear4bit(
        into, out, bias=False, compute_dtype=torch.float32, quant_type="nf4", quant_storage=storage
    )
    return layer.to("cpu")  # which quantises


def adapted(base: Callable[[int, int], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Adapted(WIDTH, HIDDEN, base), nn.GELU(), Adapted(HIDDEN, WIDTH, base))


def adapt(name: str) -> None:
    bases = {"torchao": [NF4], "bitsandbytes": [four_bit, partial(four_bit, storage=torch.bfloat16)]}[name]
    for base in bases:
        expected = learn(adapted(base))
        for strategy in ("zero3", "zero2", "ddp"):
            model = shard_each(adapted(base), partial(fully_shard, strategy=strategy))
            assert_same(learn(model), expected, name=f"{base} {strategy}")
            with summon_full_params(model):  # which writes back, and so leaves codes as they are
                kinds = {type(module.weight).__name__ for module in model.modules() if hasattr(module, "weight")}
            assert kinds == {"NF4Tensor" if base is NF4 else "Params4bit"}
            assert_same(learn(model), learn_on(base))
        model = shard_each(adapted(base), fully_shard)
        learn(model)
        with recording() as record:
            model(inputs(0))
        sent = [event.sent_bytes for event in record.collectives("all_gather") if event.origin.unit == "0"]
        bits = WIDTH * HIDDEN // 2 // 2  # half a byte an element, of half of the matrix
        scales = 2 * WIDTH * HIDDEN // 64 if base is NF4 else 0  # of NF4 they are cut, too; else whole on all ranks
        assert any(bits <= nbytes <= bits + scales for nbytes in sent), sent


def learn_on(base: Callable[[int, int], nn.Module]) -> Any:
    """What a second run of steps gives on one process."""
    model = adapted(base)
    learn(model)
    return learn(model)


@pytest.mark.parametrize("name", [pytest.param(it, marks=needs(it)) for it in ("torchao", "bitsandbytes")])
def test_adapters_on_4_bit_bases_learn_the_bits_of_one_process(name):
    run_ranks(2, adapt, name, timeout=120)


def cannot_be_cut() -> str:
    model = adapted(NF4)
    try:
        fully_shard(model)
    except Exception as error:
        return str(error)
    return ""


@needs("torchao")
def test_nf4_is_cut_where_its_blocks_allow():
    for said in run_ranks(3, cannot_be_cut, timeout=120):
        assert "0.base.weight is a NF4Tensor of shape (256, 128), which cannot be cut into 3 parts" in said


def peft_model() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = nn.Sequential(four_bit(WIDTH, HIDDEN), nn.GELU(), four_bit(HIDDEN, WIDTH))
    model.is_loaded_in_4bit = True
    return get_peft_model(model, LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False))


def adapt_with_peft() -> None:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    alone, model = peft_model(), peft_model()
    expected = learn(alone)
    fully_shard(model)
    assert_same(learn(model), expected)
    state = {name: value.full_tensor() for name, value in model.state_dict().items() if isinstance(value, DTensor)}
    saved = get_peft_model_state_dict(model, state_dict=state)
    theirs = get_peft_model_state_dict(alone)
    assert_same(saved, theirs)
    fresh = peft_model()
    set_peft_model_state_dict(fresh, saved)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Merge lora module to 4-bit")
        merged, wanted = fresh.merge_and_unload(), alone.merge_and_unload()
    assert torch.equal(merged(inputs(9)), wanted(inputs(9)))


@needs("bitsandbytes")
def test_peft_saves_and_merges_adapters_on_4_bit_bases():
    run_ranks(2, adapt_with_peft, timeout=120)


# -- 8-bit states -----------------------------------------------------------------------------------------------------


def eight_bit(name: str, params: Any) -> torch.optim.Optimizer:
    if name == "bitsandbytes":
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(params, lr=1e-2, min_8bit_size=64)
    from torchao.optim import AdamW8bit

    return AdamW8bit(params, lr=1e-2)


def step_in_8_bits(name: str) -> None:
    def model_of() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, HIDDEN, bias=False), nn.GELU(), nn.Linear(HIDDEN, WIDTH, bias=False))

    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step
        alone, model = model_of(), shard_each(model_of(), fully_shard)
        expected = learn(alone, eight_bit(name, alone.parameters()))
        assert units_in(model)[1].params[0].local.numel() % 256 == 0  # whole blocks, and so the same ones
        optimizer = step_shards(eight_bit(name, model.parameters()))
        assert_same(learn(model, optimizer), expected)
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    local = [it._local_tensor if isinstance(it, DTensor) else it for it in states]
    assert max(it.numel() for it in local) == WIDTH * HIDDEN // dist.get_world_size()


@pytest.mark.parametrize("name", [pytest.param(it, marks=needs(it)) for it in ("torchao", "bitsandbytes")])
def test_8_bit_states_are_those_of_one_process_where_shards_are_whole_blocks(name):
    run_ranks(2, step_in_8_bits, name, timeout=120)
