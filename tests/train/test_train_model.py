"""The GPT in plain PyTorch: shapes, causality, initial weights, and weights on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fullshard.checkpoint.exporting import write_safetensors
from fullshard.errors import ConfigError
from fullshard.train.evaluate import sample
from fullshard.train.model import GPT, SIZES, Shape, byte_losses, initialize, rotate, rotation, shape_of
from fullshard.train.settings import ModelSettings, RunSettings, TrainSettings

TINY = Shape(layers=2, heads=2, width=16, table_rows=64, lr=1e-3)


def gpt(seed: int = 0, **options: bool) -> GPT:
    model = initialize(GPT(TINY, **options), seed)
    for block in model.blocks:  # blocks are initialized to the identity; make them affect the output
        for parameter in block.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(seed))
    return model


def text(rows: int = 3, seq: int = 12) -> torch.Tensor:
    return torch.randint(256, (rows, seq), generator=torch.Generator().manual_seed(1))


def test_logits_do_not_depend_on_future_bytes() -> None:
    model, before = gpt(), text()
    after = before.clone()
    after[:, 7:] = (after[:, 7:] + 1) % 256
    assert torch.equal(model(before)[:, :7], model(after)[:, :7])
    assert not torch.equal(model(before)[:, 7:], model(after)[:, 7:])


@pytest.mark.parametrize("seq", [1, 2, 3, 40])
def test_logits_of_prefix_match_full_sequence(seq: int) -> None:
    model, whole = gpt(), text(2, 40)
    torch.testing.assert_close(model(whole[:, :seq]), model(whole)[:, :seq])


def test_initial_weights_depend_only_on_seed() -> None:
    first, again, other = (initialize(GPT(TINY), seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_untrained_model_has_uniform_loss() -> None:
    losses = byte_losses(initialize(GPT(SIZES["small"]), 0)(text(4, 64)), text(4, 64))
    assert losses.shape == (4,)
    assert losses.mean().item() == pytest.approx(torch.tensor(256.0).log().item(), abs=0.3)


def test_rotary_embedding_keeps_norms_and_depends_only_on_distance() -> None:
    query, key = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0)).expand(2, 1, 10, 1, 8)
    turn = rotation(10, 8, query)
    turned_query, turned_key = rotate(query, turn), rotate(key, turn)
    torch.testing.assert_close(turned_query.norm(dim=-1), query.norm(dim=-1))
    scores = torch.einsum("rqhd,rkhd->qk", turned_query, turned_key)
    torch.testing.assert_close(scores[5, 2], scores[9, 6])
    assert not torch.isclose(scores[5, 2], scores[5, 3])


def test_activation_checkpointing_does_not_change_gradients() -> None:
    kept, again = gpt(), gpt(checkpoint_blocks=True)
    for model in (kept, again):
        byte_losses(model(text()), text()).mean().backward()
    for own, peer in zip(kept.parameters(), again.parameters(), strict=True):
        assert torch.equal(own.grad, peer.grad)


def test_explicit_dimensions_override_size() -> None:
    shape = shape_of(ModelSettings(size="nano", layers=5, width=48))
    assert (shape.layers, shape.width, shape.heads) == (5, 48, SIZES["nano"].heads)
    for wrong, words in (({"size": "huge"}, "Choose one of"), ({"layers": 0}, "at least 1"), ({"heads": 3}, "--width")):
        with pytest.raises(ConfigError, match=words):
            shape_of(ModelSettings(**wrong))


@pytest.mark.parametrize("size", SIZES)
def test_every_named_size_is_valid(size: str) -> None:
    shape_of(ModelSettings(size=size))


def test_sampling_is_deterministic_per_seed() -> None:
    settings = TrainSettings(run=RunSettings(sample_bytes=20, prompt="ab"))
    model, device = gpt(), torch.device("cpu")
    first = sample(model, settings, device, seed=1)
    assert len(first) == 20
    assert first == sample(model, settings, device, seed=1) != sample(model, settings, device, seed=2)
    assert model.training


def test_sampling_supports_tiny_temperature_and_rejects_nan_logits() -> None:
    model, device = gpt(), torch.device("cpu")
    coldest, cold = (
        sample(model, TrainSettings(run=RunSettings(sample_bytes=9, temperature=temperature)), device, seed=1)
        for temperature in (1e-320, 1e-9)
    )
    assert coldest == cold
    next(model.parameters()).data.fill_(torch.nan)
    with pytest.raises(ConfigError, match="returned NaN or infinity, so training has diverged"):
        sample(model, TrainSettings(), device, seed=1)


def test_written_weights_load_with_safetensors(tmp_path: Path) -> None:
    state = {
        **gpt().state_dict(),
        "half": torch.arange(3, dtype=torch.bfloat16),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 4),
        "turned": torch.arange(6.0).view(2, 3).T,
    }
    write_safetensors(state, tmp_path / "model.safetensors", {"made by": "a test"})
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == state.keys()
    for name, tensor in state.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"made by": "a test"}
