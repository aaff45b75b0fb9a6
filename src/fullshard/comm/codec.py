"""Codecs that quantize numbers for communication, with a scale for each block.

A tensor of n elements is divided into blocks of `BLOCK` elements. Its encoding is

    [scale of block 0][scale of block 1]...   [code, code, ... of block 0][... of block 1]...   [padding to 16 bytes]

with a scale in float32, so that the block's largest absolute value becomes the largest code:

    int8    127 steps on both sides of zero     |x - decoded| <= largest / 254
    int4      7 steps, two codes/byte           |x - decoded| <= largest / 14
    fp8     float8_e4m3fn, largest is 448       |x - decoded| <= |x| / 16, or largest / 448 / 1024 near zero

`bf16` has no blocks and no scales. Block-wise scaling of int8 is that of Dettmers et al., 2022 (arXiv:2110.02861). A
block that contains NaN or infinity is decoded as NaN, so values that are not finite do not vanish.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from fullshard.device.accelerator import accelerator_for
from fullshard.device.memory import Pool
from fullshard.layout.group_layout import ALIGNMENT_BYTES
from fullshard.layout.offsets import align

BLOCK = 128
"""Number of elements that share a scale. The scales are 3 % of an int8 message, and 6 % of an int4 message."""

_LEAST_SCALE = torch.finfo(torch.float32).tiny  # division by a smaller scale would lose significant bits
_CPU_PIECE, _PIECE = 1 << 18, 1 << 24  # elements per chunk: fits a core's cache; bounds scratch memory on a GPU


class Codec(ABC):
    """Encodes numbers to bytes and back, row by row. Both directions are deterministic.

    A row of numbers is 1-D and contiguous, in any floating-point dtype. Its encoding starts on a 16-byte boundary.
    """

    keeps_error = True  # True if senders use error feedback

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Return the bytes of `numel` encoded numbers, including padding to the next boundary."""

    @abstractmethod
    def encode(self, values: Tensor, transport: Tensor, scratch: Pool, *, keep_error: bool = False) -> None:
        """Write `values`, of shape (rows, numel), to `transport`, bytes of shape (rows, nbytes(numel)).

        Args:
            values: The numbers. With `keep_error` they are in float32, and are replaced by their quantization error.
            transport: The buffer for the encoding.
            scratch: The pool for temporary memory.
            keep_error: Whether to store the error in `values`, with zeros instead of values that are not finite.
        """

    @abstractmethod
    def decode(self, transport: Tensor, numel: int, out: Tensor, scratch: Pool, *, adds: bool = False) -> None:
        """Write the numbers in `transport`, or add them with `adds`, to `out`.

        Args:
            transport: Rows of encodings, of `numel` numbers each.
            numel: The number of encoded numbers per row.
            out: As many rows. If they are shorter, only the first numbers are decoded.
            scratch: The pool for temporary memory.
            adds: Whether to add in the dtype of `out`, instead of overwriting.
        """


class _Bfloat16(Codec):
    keeps_error = False

    def nbytes(self, numel: int) -> int:
        return align(2 * numel, ALIGNMENT_BYTES)

    def encode(self, values: Tensor, transport: Tensor, scratch: Pool, *, keep_error: bool = False) -> None:
        codes = _numbers(transport, values.shape[1])
        codes.copy_(values)
        if keep_error:
            values.sub_(codes).nan_to_num_(0, 0, 0)

    def decode(self, transport: Tensor, numel: int, out: Tensor, scratch: Pool, *, adds: bool = False) -> None:
        codes = _numbers(transport, out.shape[1])
        if adds:
            out.add_(codes)
        else:
            out.copy_(codes)


def _numbers(transport: Tensor, numel: int) -> Tensor:
    return transport[:, : 2 * numel].view(torch.bfloat16)


class _Blockwise(Codec):
    """Codes that are scaled per block."""

    largest: float  # the code of a block's largest absolute value
    code_nbytes: int  # of a block

    @abstractmethod
    def _write(self, steps: Tensor, codes: Tensor) -> None:
        """Write `steps`, numbers up to `largest` in blocks, to `codes`. May change `steps`."""

    @abstractmethod
    def _read(self, codes: Tensor, steps: Tensor) -> None:
        """Read the rounded numbers from `codes` into `steps`."""

    def nbytes(self, numel: int) -> int:
        return align(_blocks(numel) * (4 + self.code_nbytes), ALIGNMENT_BYTES)

    def encode(self, values: Tensor, transport: Tensor, scratch: Pool, *, keep_error: bool = False) -> None:
        numel = values.shape[1]
        scales, codes = self._fields(transport, numel)
        full, remaining = numel // BLOCK, numel % BLOCK
        if full:
            blocks = values[:, : full * BLOCK].unflatten(1, (full, BLOCK))
            self._encode_blocks(blocks, scales[:, :full], codes[:, :full], scratch, keep_error)
        if remaining:
            last = values.new_zeros(len(values), 1, BLOCK)
            last[:, 0, :remaining] = values[:, full * BLOCK :]
            self._encode_blocks(last, scales[:, full:], codes[:, full:], scratch, keep_error)
            if keep_error:
                values[:, full * BLOCK :] = last[:, 0, :remaining]

    def _encode_blocks(self, blocks: Tensor, scales: Tensor, codes: Tensor, scratch: Pool, keep_error: bool) -> None:
        work = _work_memory(blocks, scratch)
        for rows, columns in _pieces(blocks):
            piece, scale, code = blocks[rows, columns], scales[rows, columns], codes[rows, columns]
            steps = work[: piece.numel()].view(piece.shape)
            steps.copy_(piece).abs_()
            scale.copy_(steps.amax(-1).div_(self.largest).clamp_(min=_LEAST_SCALE))
            scale.add_(scale * 0)  # infinity becomes NaN, so that the whole block is decoded as NaN
            torch.div(piece, scale.unsqueeze(-1), out=steps)
            self._write(steps, code)
            if keep_error:
                self._read(code, steps)
                piece.sub_(steps.mul_(scale.unsqueeze(-1))).nan_to_num_(0, 0, 0)
        scratch.give(work)

    def decode(self, transport: Tensor, numel: int, out: Tensor, scratch: Pool, *, adds: bool = False) -> None:
        scales, codes = self._fields(transport, numel)
        wanted = out.shape[1]
        full, remaining = wanted // BLOCK, wanted % BLOCK
        if full:
            blocks = out[:, : full * BLOCK].unflatten(1, (full, BLOCK))
            self._decode_blocks(scales[:, :full], codes[:, :full], blocks, scratch, adds)
        if remaining:
            last = torch.empty(len(out), 1, BLOCK, dtype=torch.float32, device=out.device)
            end = slice(full, full + 1)
            self._decode_blocks(scales[:, end], codes[:, end], last, scratch, adds=False)
            place, numbers = out[:, full * BLOCK :], last[:, 0, :remaining]
            place.copy_(place + numbers if adds else numbers)

    def _decode_blocks(self, scales: Tensor, codes: Tensor, blocks: Tensor, scratch: Pool, adds: bool) -> None:
        work = _work_memory(blocks, scratch)
        for rows, columns in _pieces(blocks):
            place = blocks[rows, columns]
            steps = work[: place.numel()].view(place.shape)
            self._read(codes[rows, columns], steps)
            steps.mul_(scales[rows, columns].unsqueeze(-1))
            if adds:
                place.add_(steps)
            else:
                place.copy_(steps)
        scratch.give(work)

    def _fields(self, transport: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return views of `transport`: scales, of shape (rows, blocks), and codes, of shape (rows, blocks, bytes)."""
        blocks = _blocks(numel)
        scales, codes = transport[:, : 4 * blocks], transport[:, 4 * blocks : (4 + self.code_nbytes) * blocks]
        return scales.view(torch.float32), codes.unflatten(1, (blocks, self.code_nbytes))


class _Int8(_Blockwise):
    largest = 127.0
    code_nbytes = BLOCK

    def _write(self, steps: Tensor, codes: Tensor) -> None:
        codes.view(torch.int8).copy_(steps.round_())

    def _read(self, codes: Tensor, steps: Tensor) -> None:
        steps.copy_(codes.view(torch.int8))


class _Int4(_Blockwise):
    """Two codes per byte: one of the block's first half in the lower bits, one of its second half in the upper bits."""

    largest = 7.0
    code_nbytes = BLOCK // 2

    def _write(self, steps: Tensor, codes: Tensor) -> None:
        lower, upper = steps.round_().add_(8).chunk(2, dim=-1)
        codes.copy_(lower.add_(upper, alpha=16))

    def _read(self, codes: Tensor, steps: Tensor) -> None:
        lower, upper = steps.chunk(2, dim=-1)
        lower.copy_(codes & 15)
        upper.copy_(codes >> 4)
        steps.sub_(8)


class _Float8(_Blockwise):
    largest = 448.0
    code_nbytes = BLOCK

    def _write(self, steps: Tensor, codes: Tensor) -> None:
        codes.view(torch.float8_e4m3fn).copy_(steps)

    def _read(self, codes: Tensor, steps: Tensor) -> None:
        """Convert by integer operations, because torch's cast is not vectorized on a CPU.

        The bits of a float8_e4m3fn, shifted into the exponent and mantissa of a float16, are its value times 2 ** -8.
        """
        moved = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
        steps.copy_(moved.view(torch.float16)).mul_(256)


_CODECS: dict[str, Codec] = {"bf16": _Bfloat16(), "int8": _Int8(), "int4": _Int4(), "fp8": _Float8()}


def codec_named(name: str) -> Codec:
    """Return the codec of that name: bf16, int8, int4 or fp8."""
    return _CODECS[name]


def _blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _piece_numel(blocks: Tensor) -> int:
    return _PIECE if accelerator_for(blocks.device).has_streams else _CPU_PIECE


def _work_memory(blocks: Tensor, scratch: Pool) -> Tensor:
    return scratch.take(min(blocks.numel(), _piece_numel(blocks)), torch.float32)


def _pieces(blocks: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield slices of rows and columns that divide `blocks` into chunks."""
    rows, columns, _ = blocks.shape
    at_a_time = _piece_numel(blocks) // BLOCK
    if columns <= at_a_time:
        several = at_a_time // columns
        yield from ((slice(row, row + several), slice(columns)) for row in range(0, rows, several))
    else:
        for row in range(rows):
            yield from ((slice(row, row + 1), slice(c, c + at_a_time)) for c in range(0, columns, at_a_time))
