"""Encodings: size by formula, bounded errors, deterministic bytes, and non-finite values that stay non-finite."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fullshard.comm import codec as transport_codec
from fullshard.comm.codec import BLOCK, codec_named
from fullshard.device.memory import Pool

CODECS = pytest.mark.parametrize("name", ["bf16", "int8", "int4", "fp8"])
BLOCKWISE = pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
SCRATCH = Pool(torch.device("cpu"))

numbers = st.builds(
    lambda rows, numel, seed, exponent: (
        torch.randn(rows, numel, generator=torch.Generator().manual_seed(seed))
        * 10.0 ** (exponent + 3 * torch.randn(rows, numel, generator=torch.Generator().manual_seed(seed + 1)))
    ),
    rows=st.integers(1, 3),
    numel=st.integers(1, 3 * BLOCK + 5),
    seed=st.integers(0, 2**20),
    exponent=st.integers(-25, 25),
)


def encode(name: str, values: Tensor, *, keep_error: bool = False) -> Tensor:
    codec = codec_named(name)
    transport = torch.zeros(len(values), codec.nbytes(values.shape[1]), dtype=torch.uint8)
    codec.encode(values, transport, SCRATCH, keep_error=keep_error)
    return transport


def decode(name: str, transport: Tensor, numel: int) -> Tensor:
    out = torch.full((len(transport), numel), torch.nan)
    codec_named(name).decode(transport, numel, out, SCRATCH)
    return out


def largest_of_blocks(values: Tensor) -> Tensor:
    """Return, for each value, the largest absolute value of its block."""
    spread = [block.abs().amax(1, keepdim=True).expand_as(block) for block in values.split(BLOCK, dim=1)]
    return torch.cat(spread, dim=1)


def bound(name: str, values: Tensor) -> Tensor:
    largest = largest_of_blocks(values)
    if name == "bf16":
        return values.abs() / 256
    if name == "fp8":
        return torch.maximum(values.abs() / 16, largest / 448 / 1024)
    return largest / {"int8": 254, "int4": 14}[name]


@CODECS
@given(values=numbers)
@settings(max_examples=60, deadline=None)
def test_decoding_error_is_within_codec_bound(name, values):
    decoded = decode(name, encode(name, values), values.shape[1])
    room = values.abs() * 2**-21 + 2**-126  # rounding of the division, and values too small for a scale
    assert ((values - decoded).abs() <= bound(name, values) + room).all()


@CODECS
@given(values=numbers)
@settings(max_examples=30, deadline=None)
def test_kept_error_equals_encoding_error(name, values):
    lacking = values.clone()
    transport = encode(name, lacking, keep_error=True)
    assert torch.equal(transport, encode(name, values))
    assert torch.equal(lacking, values - decode(name, transport, values.shape[1]))


@CODECS
@given(values=numbers, add=st.booleans())
@settings(max_examples=30, deadline=None)
def test_decode_adds_or_overwrites_and_supports_prefix(name, values, add):
    transport, numel = encode(name, values), values.shape[1]
    some = max(1, numel - 7)
    out = torch.ones(len(values), some)
    codec_named(name).decode(transport, numel, out, SCRATCH, adds=add)
    assert torch.equal(out, decode(name, transport, numel)[:, :some] + (1 if add else 0))


@CODECS
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_values_stay_non_finite_and_are_dropped_from_error(name, wrong):
    values = torch.randn(2, 3 * BLOCK + 40)
    values[0, 200] = values[1, -1] = wrong
    lacking = values.clone()
    decoded = decode(name, encode(name, lacking, keep_error=True), values.shape[1])
    assert not decoded[0, 200].isfinite()
    assert not decoded[1, -1].isfinite()
    assert decoded[0, :BLOCK].isfinite().all()
    assert decoded[1, :BLOCK].isfinite().all()
    assert lacking.isfinite().all()


@BLOCKWISE
def test_encoding_in_chunks_gives_identical_bytes(name, monkeypatch):
    values = torch.randn(3, 5 * BLOCK + 9)
    expected = encode(name, values)
    for blocks_at_a_time in (1, 2, 7):
        monkeypatch.setattr(transport_codec, "_CPU_PIECE", blocks_at_a_time * BLOCK)
        transport = encode(name, values)
        assert torch.equal(transport, expected)
        assert torch.equal(decode(name, transport, values.shape[1]), decode(name, expected, values.shape[1]))


@pytest.mark.parametrize(("name", "of_a_block"), [("int8", 132), ("int4", 68), ("fp8", 132), ("bf16", 256)])
def test_encoded_size_depends_on_number_of_blocks(name, of_a_block):
    codec = codec_named(name)
    for blocks in (1, 3, 8):
        assert codec.nbytes(blocks * BLOCK) == -(-blocks * of_a_block // 16) * 16
    assert codec.nbytes(0) == 0
    assert all(codec.nbytes(numel) % 16 == 0 for numel in range(300))


def test_float8_decoding_matches_torch():
    codes = torch.arange(256, dtype=torch.uint8)
    peer = codes.view(torch.float8_e4m3fn).float()
    own = torch.empty(2, BLOCK)
    codec_named("fp8")._read(codes.view(2, BLOCK), own)
    assert torch.equal(own.view(-1)[peer.isfinite()], peer[peer.isfinite()])


@CODECS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codec_supports_half_precision_values(name, dtype):
    values = torch.randn(2, 300).to(dtype)
    transport = encode(name, values)
    assert torch.equal(transport, encode(name, values.float()))
    out = torch.empty_like(values)
    codec_named(name).decode(transport, 300, out, SCRATCH)
    assert torch.equal(out, decode(name, transport, 300).to(dtype))
