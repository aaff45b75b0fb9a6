"""Low-precision weights and optimizer states of torchao and bitsandbytes: same results as one process, same size."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from shared_ranks import on_ranks, run_ranks
from small_models import Shard, take_step
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import MixedPrecisionPolicy, fully_shard, recording, summon_full_params
from fullshard._compat import dtensor_like
from fullshard.checkpoint import async_save, load, restore_snapshot, save, snapshot
from fullshard.comm.mesh import local_shard
from fullshard.errors import CheckpointError, ConfigError
from fullshard.optim import step_shards
from fullshard.plan.ledger import measure_ledger, predict_ledger, storage_bytes
from fullshard.state.optim_state import full_optim_state_dict, optim_state_dict_to_load, sharded_optim_state_dict
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
    """Return the losses of `STEPS` steps. Call `after(model)` after each step."""
    optimizer = optimizer or torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
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
    """Make each layer with parameters a unit, and the model the root."""
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


@pytest.mark.slow
@needs("torchao")
@on_ranks(2)
def test_torchao_float8_training_matches_single_process_bitwise():
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
            peer = alone.state_dict()[name]
            assert torch.equal(whole, peer._tensor if isinstance(peer, Weight) else peer)
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
    assert sent == [WIDTH * HIDDEN // 2]  # to the other rank: half of a matrix, one byte per element


# -- 4-bit bases ------------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen base plus a trained adapter."""

    def __init__(self, into: int, out: int, base: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.base = base(into, out)
        self.a = nn.Parameter(torch.randn(4, into) / into)
        self.b = nn.Parameter(torch.randn(out, 4) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


class NF4(nn.Module):
    """Quantization as in torchao's recipes."""

    def __init__(self, into: int, out: int) -> None:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        super().__init__()
        weight = to_nf4(torch.randn(out, into) / into**0.5, 64, 64)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def four_bit(into: int, out: int, storage: torch.dtype = torch.uint8) -> nn.Module:
    """Quantize as bitsandbytes does."""
    import bitsandbytes

    layer = bitsandbytes.nn.Linear4bit(
        into, out, bias=False, compute_dtype=torch.float32, quant_type="nf4", quant_storage=storage
    )
    return layer.to("cpu")  # moving the layer quantizes it


def adapted(base: Callable[[int, int], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Adapted(WIDTH, HIDDEN, base), nn.GELU(), Adapted(HIDDEN, WIDTH, base))


def learn_on(base: Callable[[int, int], nn.Module]) -> Any:
    """Return the losses of a second run of `STEPS` steps in one process."""
    model = adapted(base)
    learn(model)
    return learn(model)


@pytest.mark.parametrize("name", [pytest.param(item, marks=needs(item)) for item in ("torchao", "bitsandbytes")])
@on_ranks(2)
def test_adapters_on_4_bit_bases_match_single_process_bitwise(name):
    bases = {"torchao": [NF4], "bitsandbytes": [four_bit, partial(four_bit, storage=torch.bfloat16)]}[name]
    for base in bases:
        expected = learn(adapted(base))
        for strategy in ("zero3", "zero2", "ddp"):
            model = shard_each(adapted(base), partial(fully_shard, strategy=strategy))
            assert_same(learn(model), expected, name=f"{base} {strategy}")
            with summon_full_params(model):  # writes values back, which must not change the codes
                kinds = {type(module.weight).__name__ for module in model.modules() if hasattr(module, "weight")}
            assert kinds == {"NF4Tensor" if base is NF4 else "Params4bit"}
            assert_same(learn(model), learn_on(base))
        model = shard_each(adapted(base), fully_shard)
        learn(model)
        with recording() as record:
            model(inputs(0))
        sent = [event.sent_bytes for event in record.collectives("all_gather") if event.origin.unit == "0"]
        bits = WIDTH * HIDDEN // 2 // 2  # half a byte per element, for half of the matrix
        scales = 2 * WIDTH * HIDDEN // 64 if base is NF4 else 0  # NF4 shards its scales, bitsandbytes replicates them
        assert any(bits <= nbytes <= bits + scales for nbytes in sent), sent


def cannot_be_cut() -> str:
    model = adapted(NF4)
    try:
        fully_shard(model)
    except Exception as error:
        return str(error)
    return ""


@needs("torchao")
def test_nf4_weight_with_indivisible_blocks_is_rejected():
    for stated in run_ranks(3, cannot_be_cut):
        assert (
            "0.base.weight is a NF4Tensor of shape (256, 128), which cannot be sharded by rows over 3 ranks" in stated
        )


def peft_model() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = nn.Sequential(four_bit(WIDTH, HIDDEN), nn.GELU(), four_bit(HIDDEN, WIDTH))
    model.is_loaded_in_4bit = True
    return get_peft_model(model, LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False))


@needs("bitsandbytes")
@on_ranks(2)
def test_peft_saves_and_merges_adapters_on_4_bit_bases():
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    alone, model = peft_model(), peft_model()
    expected = learn(alone)
    fully_shard(model)
    assert_same(learn(model), expected)
    state = {name: value.full_tensor() for name, value in model.state_dict().items() if isinstance(value, DTensor)}
    saved = get_peft_model_state_dict(model, state_dict=state)
    peer = get_peft_model_state_dict(alone)
    assert_same(saved, peer)
    fresh = peft_model()
    set_peft_model_state_dict(fresh, saved)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Merge lora module to 4-bit")
        merged, wanted = fresh.merge_and_unload(), alone.merge_and_unload()
    assert torch.equal(merged(inputs(9)), wanted(inputs(9)))


# -- int8 and MXFP8 ---------------------------------------------------------------------------------------------------


def int8_mixed(weight: Tensor) -> Tensor:
    from torchao.prototype.quantized_training import int8_mixed_precision as library

    config = library.Int8MixedPrecisionTrainingConfig()
    return library.Int8MixedPrecisionTrainingLinearWeight(weight, config)  # type: ignore[no-any-return]


def int8_rounded(weight: Tensor) -> Tensor:
    from torchao.prototype.quantized_training.int8 import Int8QuantizedTrainingLinearWeight as Weight

    return Weight.from_float(weight)  # type: ignore[no-any-return]


def mxfp8(weight: Tensor) -> Tensor:
    """Emulate the kernels with torchao's own functions."""
    from torchao.prototype.moe_training import config
    from torchao.prototype.moe_training.tensor import MXFP8TrainingWeightWrapperTensor as Weight

    recipe = config.MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL
    return Weight(weight, config.MXFP8TrainingOpConfig.from_recipe(recipe))  # type: ignore[no-any-return]


def converted(convert: Callable[[Tensor], Tensor]) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN, bias=False), nn.GELU(), nn.Linear(HIDDEN, WIDTH, bias=False))
    model.bfloat16()
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(convert(layer.weight.detach()))
    return model


def learn_converted(model: Any) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6, foreach=False)
    losses = []
    for step in range(STEPS):
        batch = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()
        losses.append(take_step(optimizer, model(batch).float().square().mean()))
    return losses


@needs("torchao")
@on_ranks(2)
def test_torchao_int8_and_mxfp8_training_matches_single_process_bitwise():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with torch.compiler.set_stance("force_eager"):
        for convert in (int8_mixed, mxfp8, int8_rounded):
            expected = learn_converted(converted(convert))
            for strategy in ("zero3", "zero2"):
                model = shard_each(converted(convert), partial(fully_shard, strategy=strategy, mp_policy=policy))
                with recording() as record:
                    losses = learn_converted(model)
                if convert is int8_rounded:  # each rank rounds with different random numbers
                    losses, expected = losses[:1], expected[:1]
                assert_same(losses, expected, name=f"{convert} {strategy}")
            sent = {event.sent_bytes for event in record.collectives("all_gather") if event.origin.unit == "0"}
            numel = WIDTH * HIDDEN // 2
            assert sent == {numel + HIDDEN if convert is int8_rounded else 2 * numel}  # one bfloat16 scale per row


# -- quantized bases in checkpoints -----------------------------------------------------------------------------------


def int8(into: int, out: int) -> nn.Module:
    """Quantize as torchao does, with a scale per row."""
    layer = nn.Linear(into, out, bias=False)
    layer.weight = nn.Parameter(int8_rounded(layer.weight.detach()), requires_grad=False)
    return layer


def encoded_bases(name: str) -> list[Callable[[int, int], nn.Module]]:
    return {"torchao": [NF4, int8], "bitsandbytes": [four_bit, partial(four_bit, storage=torch.bfloat16)]}[name]


def other_base(base: Callable[[int, int], nn.Module], into: int, out: int) -> nn.Module:
    """Return a base of the same form with other values."""
    with torch.random.fork_rng([]):
        torch.manual_seed(into)
        return base(into, out)


def save_bases(name: str, folder: Path) -> None:
    for number, base in enumerate(encoded_bases(name)):
        model = shard_each(adapted(base), fully_shard)
        assert_same(learn(model), learn(adapted(base)))
        save(folder / str(number), model=model, step=1)


def load_bases(name: str, folder: Path, strategies: Sequence[str]) -> None:
    for number, base in enumerate(encoded_bases(name)):
        alone = adapted(base)
        learn(alone)
        expected = learn(alone)
        for strategy in strategies:
            model = shard_each(adapted(partial(other_base, base)), partial(fully_shard, strategy=strategy))
            load(folder / str(number), model=model)
            assert_same(learn(model), expected, name=f"{base} {strategy}")
        model = adapted(partial(other_base, base))
        load(folder / str(number), model=model)
        assert_same(learn(model), expected, name=f"{base}, not sharded")


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(item, marks=needs(item)) for item in ("torchao", "bitsandbytes")])
def test_quantized_bases_load_from_checkpoint_at_any_world_size(name, tmp_path):
    run_ranks(2, save_bases, name, tmp_path)
    run_ranks(2, load_bases, name, tmp_path, ["ddp", "zero3"])
    run_ranks(4, load_bases, name, tmp_path, ["zero3"])


# -- block-quantized optimizer states ---------------------------------------------------------------------------------

KINDS = {
    "bitsandbytes": ["AdamW8bit", "Lion8bit"],
    "torchao": ["AdamW8bit", "AdamW4bit", "AdamWFp8"],
}
SHAPES = {
    "rows": (10, 1536),  # each row consists of whole blocks
    "several": (15, 800),  # 8 rows are whole blocks: two ranks can shard them, three cannot
    "odd": (100, 100),
    "few": (2, 4096),  # the third rank has no rows
    "one": (1, 8192),
    "vector": (8192,),
    "prime": (4097,),
    "small": (7,),
}


class Values(nn.Module):
    """Parameters of many shapes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))


def encoding(library: str, kind: str, params: Any) -> torch.optim.Optimizer:
    module = importlib.import_module(f"{library}.optim")
    return getattr(module, kind)(params, lr=1e-2)


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    """Take steps with random gradients that are seeded with the number of the step."""
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for param in model.parameters():
            grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            if isinstance(param, DTensor):
                own = local_shard(grad, param.device_mesh, param.placements).contiguous()
                grad = dtensor_like(own, param)
            param.grad = grad
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    values = {name: full_value(param.detach()) for name, param in model.named_parameters()}
    return [values, full_optim_state_dict(model, optimizer, rank0_only=False)]


def full_value(value: Any) -> Any:
    return value.full_tensor().clone() if isinstance(value, DTensor) else value.clone()


def fresh(library: str, kind: str, strategy: str | None = "zero3") -> tuple[nn.Module, torch.optim.Optimizer]:
    model: nn.Module = Values()
    if strategy is None:
        return model, encoding(library, kind, model.parameters())
    block = 128 if kind == "AdamW4bit" else 256
    fully_shard(model, strategy=strategy, shard_alignment=block)
    return model, step_shards(encoding(library, kind, model.parameters()))


def alone_in_blocks(library: str, kind: str, folder: Path) -> list[Any]:
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step
        model, optimizer = fresh(library, kind, None)
        take_steps(model, optimizer, range(3))
        first = whole(model, optimizer)
        save(folder / "plain", model=model, optimizer=optimizer, step=1)
        take_steps(model, optimizer, range(3, 5))
        return [first, whole(model, optimizer)]


def step_in_blocks(library: str, kind: str, folder: Path, expected: list[Any], strategies: Sequence[str]) -> None:
    with torch.compiler.set_stance("force_eager"):
        for saved in sorted(folder.iterdir()):
            model, optimizer = fresh(library, kind)
            load(saved, model=model, optimizer=optimizer)
            assert_same(whole(model, optimizer), expected[0], name=saved.name)
            take_steps(model, optimizer, range(3, 5))
            assert_same(whole(model, optimizer), expected[1], name=f"from {saved.name}")
        for strategy in strategies:
            own = folder / f"{strategy}-{dist.get_world_size()}"
            model, optimizer = fresh(library, kind, strategy)
            take_steps(model, optimizer, range(3))
            assert_same(whole(model, optimizer), expected[0], name=f"{kind} {strategy}")
            pending = async_save(own, model=model, optimizer=optimizer, step=1)
            taken = snapshot(model=model, optimizer=optimizer)
            sharded = copy.deepcopy(sharded_optim_state_dict(model, optimizer))
            take_steps(model, optimizer, range(3, 5))
            assert_same(whole(model, optimizer), expected[1], name=f"{kind} {strategy}, later")
            pending.wait()
            restore_snapshot(taken, model=model, optimizer=optimizer)
            assert_same(whole(model, optimizer), expected[0])
            take_steps(model, optimizer, range(3, 5))
            assert_same(whole(model, optimizer), expected[1], name=f"{kind} {strategy}, from a snapshot")
            for given in (expected[0][1], sharded):
                model, optimizer = fresh(library, kind, strategy)
                model.load_state_dict(expected[0][0])
                optim_state_dict_to_load(model, optimizer, given, load_directly=True, from_first_rank=False)
                take_steps(model, optimizer, range(3, 5))
                assert_same(whole(model, optimizer), expected[1], name=f"{kind} {strategy}, from a state dict")


@pytest.mark.slow
@pytest.mark.parametrize("library", [pytest.param(kind, marks=needs(kind)) for kind in KINDS])
def test_block_quantized_states_match_single_process_and_resume_bitwise(library, tmp_path):
    for kind in KINDS[library]:
        folder = tmp_path / kind
        expected = alone_in_blocks(library, kind, folder)
        first = kind == KINDS[library][0]
        for world in (3, 2) if first else (3,):
            strategies = ["ddp", "zero3"] if first and world == 2 else ["zero3"]
            run_ranks(world, step_in_blocks, library, kind, folder, expected, strategies)


@on_ranks(2)
def test_parameters_indivisible_into_blocks_are_replicated_and_match():
    """Train with gradients of the model, some of which are summed over ranks and unsharded on every rank."""

    def model_of() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, 67), nn.GELU(), nn.Linear(67, WIDTH, bias=False))

    alone = model_of()
    expected = learn(alone)
    for strategy in ("zero3", "zero2", "zero1", "ddp"):
        model = shard_each(model_of(), partial(fully_shard, strategy=strategy, shard_alignment=256))
        assert_same(learn(model), expected, name=strategy)
        assert_same({name: full_value(param.detach()) for name, param in model.named_parameters()}, alone.state_dict())
    copied = copy.deepcopy(shard_each(model_of(), partial(fully_shard, shard_alignment=256)))
    assert_same(learn(copied), expected)
    model = shard_each(model_of(), partial(fully_shard, shard_alignment=256))
    learn(model)
    with recording() as record:
        learn(model)
    sent = [event.sent_bytes for event in record.collectives("all_gather") if event.origin.unit == "2"]
    assert not sum(sent)  # every rank has the whole parameter


def round_at_random(folder: Path, strategy: str) -> list[Any]:
    from torchao.optim import AdamW8bit

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = fully_shard(Values().bfloat16(), shard_alignment=256, strategy=strategy)
        return model, step_shards(AdamW8bit(model.parameters(), lr=1e-2, bf16_stochastic_round=True))

    torch.manual_seed(dist.get_rank())
    with torch.compiler.set_stance("force_eager"):
        model, optimizer = made()
        take_steps(model, optimizer, range(2))
        save(folder / strategy, model=model, optimizer=optimizer, step=1)
        take_steps(model, optimizer, range(2, 4))
        expected = whole(model, optimizer)
        model, optimizer = made()
        load(folder / strategy, model=model, optimizer=optimizer, random_states=False)
        take_steps(model, optimizer, range(2, 4))
        assert_same(whole(model, optimizer), expected)
    return expected


@pytest.mark.slow
@needs("torchao")
def test_stochastic_rounding_is_equal_on_all_ranks_and_resumes_bitwise(tmp_path):
    for strategy in ("zero3", "ddp"):
        first, *others = run_ranks(2, round_at_random, tmp_path, strategy)
        assert_same(others, [first] * len(others))


@needs("bitsandbytes")
@on_ranks(2)
def test_bitsandbytes_overrides_of_parameter_apply_to_its_shards():
    from bitsandbytes.optim import GlobalOptimManager

    model, optimizer = fresh("bitsandbytes", "AdamW8bit")
    manager = GlobalOptimManager.get_instance()
    manager.register_module_override(model, "rows", {"optim_bits": 32})
    try:
        take_steps(model, optimizer, range(1))
        kinds = {name: optimizer.state[param]["state1"].dtype for name, param in model.named_parameters()}
        assert kinds["rows"] == kinds["small"] == torch.float32
        assert {kinds[name] for name in SHAPES if name not in ("rows", "small")} == {torch.uint8}
    finally:
        manager.module_weight_config_triple.clear()


@needs("bitsandbytes")
@on_ranks(2)
def test_loading_block_quantized_states_as_plain_or_vice_versa_raises(tmp_path):
    model, optimizer = fresh("bitsandbytes", "AdamW8bit")
    take_steps(model, optimizer, range(1))
    save(tmp_path / "in-blocks", model=model, optimizer=optimizer, step=1)
    states = full_optim_state_dict(model, optimizer, rank0_only=False)
    plain = torch.optim.AdamW(model.parameters())
    take_steps(model, plain, range(1))
    save(tmp_path / "plain", model=model, optimizer=plain, step=1)
    stated = []
    for path, other in (("in-blocks", plain), ("plain", optimizer)):
        with pytest.raises(CheckpointError) as caught:
            load(tmp_path / path, model=model, optimizer=other)
        stated.append(str(caught.value))
    with pytest.raises(ConfigError) as refused:
        optim_state_dict_to_load(model, plain, states)
    into_plain, into_blocks = stated
    assert "encoded otherwise: the states of rows (bitsandbytes in 8 bits, blocks of 256 in it, plain" in into_plain
    assert "the states of rows (plain in it, bitsandbytes in 8 bits, blocks of 256 in the optimizer)" in into_blocks
    assert "has the states of rows (bitsandbytes in 8 bits" in str(refused.value)


# -- memory -----------------------------------------------------------------------------------------------------------


@needs("torchao")
@on_ranks(2)
def test_ledger_counts_actual_bytes_of_low_precision_values():
    made = {"float8": float8_model, "int8": partial(adapted, int8), "NF4": partial(adapted, NF4)}
    for name, make in made.items():
        model = shard_each(make(), fully_shard)
        optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
        learn(model, optimizer)
        measured = measure_ledger(model, optimizer, lambda model=model: model(inputs(0)).float().square().mean())
        predicted = predict_ledger(model, activations=measured.activations)
        if name == "NF4":  # each rank has the whole table of 16 values and mean, but half of them are counted
            predicted = replace(predicted, parameters=predicted.parameters + 2 * (64 + 4) // 2)
        assert measured == predicted, name

    model, optimizer = fresh("torchao", "AdamW8bit")
    with torch.compiler.set_stance("force_eager"):
        take_steps(model, optimizer, range(1))
    expected = 0
    for name, param in model.named_parameters():
        numel = param.to_local().numel()
        is_encoded = prod(SHAPES[name]) >= 4096 and prod(SHAPES[name]) % 256 == 0
        state = numel + 4 * numel // 256 + 4 * 256 if is_encoded else 4 * numel  # codes, scales, a table
        expected += 2 * state + 4
    assert storage_bytes(value for state in optimizer.state.values() for value in state.values()) == expected
