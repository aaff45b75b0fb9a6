"""Optimizer states that are encoded in blocks of elements, as by the 8-bit optimizers of bitsandbytes and torchao.

Each block has a scale, so the encoding depends on where blocks begin: at multiples of the block size in a parameter, in
memory order. A rank whose shard consists of whole blocks has a subset of the blocks that a single process has. The size
of the full parameter also determines whether the state is encoded.

In state dicts and checkpoints such a state is two tensors, sharded along the parameter's rows like the parameter:

    exp_avg.codes    of the parameter's shape; with several codes per byte, in the layout of the scales
    exp_avg.scale    one row for each slice of rows that consists of whole blocks, with the scales of this slice

The entry `blocks` names the encoding. These states can only be loaded into optimizers of the same kind.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from math import gcd, prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard._compat import make_dtensor
from fullshard.engine.managed import managed_by
from fullshard.errors import ConfigError
from fullshard.state.names import CODES, FORM, SCALE

_NESTED = "__bnb_optimizer_quant_state__"  # bitsandbytes' state dicts have tensors in a dict of this name


def encoding_of(optimizer: Optimizer) -> BlockStates | None:
    """Return the encoding of the states of `optimizer`; None if no states are encoded in blocks."""
    torchao, bitsandbytes = sys.modules.get("torchao.optim.adam"), sys.modules.get("bitsandbytes.optim.optimizer")
    if torchao is not None and isinstance(optimizer, torchao._AdamBase) and type(optimizer.block_size) is int:
        return _Torchao(optimizer)
    if bitsandbytes is not None and isinstance(optimizer, bitsandbytes.Optimizer8bit):
        return _Bitsandbytes(optimizer)
    return None


class BlockStates:
    """The encoding of one optimizer's states."""

    draws: bool = False  # true if steps draw random numbers

    def __init__(self, optimizer: Any, block: int) -> None:
        self._optimizer = optimizer
        self.block = block

    # -- methods of each library --------------------------------------------------------------------------------------

    def encodes(self, param: nn.Parameter) -> bool:
        """Return True if the states of the full parameter `param` are encoded."""
        raise NotImplementedError

    def _describe(self) -> str:
        """Return a description of the encoding."""
        raise NotImplementedError

    @property
    def _block_codes(self) -> int:
        """The number of elements in the tensor of the codes of one block."""
        return self.block

    def _unpack(self, name: str, values: Mapping[str, Any], local: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return codes and scales of the state `name`; None if that state is not encoded."""
        raise NotImplementedError

    def _put_together(self, name: str, codes: Tensor, scale: Tensor, param: nn.Parameter) -> dict[str, Any]:
        """Return the state `name` in the optimizer's form for `param`, from flat codes and scales of this rank."""
        raise NotImplementedError

    def deciding_by_wholes(self, params: Mapping[int, nn.Parameter]) -> AbstractContextManager[None]:
        """Return a context within which the optimizer creates states for shards in the form of those for full
        parameters.
        """
        raise NotImplementedError

    # -- shards -------------------------------------------------------------------------------------------------------

    def check(self, params: Iterable[Any]) -> None:
        """Raise if shards do not consist of whole blocks."""
        for param in params:
            managed = managed_by(param)
            if managed is None or not self.encodes(param):
                continue
            group = next(
                param_group
                for param_group in managed.unit.param_groups
                if any(known is managed.param for known in param_group.params)
            )
            spec = managed.param.layout.spec
            if group.plan.shards_optimizer and not spec.consists_of_blocks(self.block):
                raise ConfigError(
                    f"{type(self._optimizer).__name__} encodes states in blocks of {self.block} elements, but shards "
                    f"of {managed.param.fqn} {spec.shape} have {spec.part_numel} on {spec.world} ranks: blocks, and "
                    "so values, would depend on the number of ranks and could not be saved. Shard the model with "
                    f"fully_shard(..., shard_alignment={self.block}), or configure the optimizer not to encode "
                    "parameters of this size."
                )

    # -- the form of state dicts --------------------------------------------------------------------------------------

    def form(self, param: nn.Parameter) -> str | None:
        """Describe the encoding of the states of `param`; None if they are not encoded."""
        return self._describe() if self.encodes(param) else None

    def separate(self, values: Mapping[str, Any], param: nn.Parameter) -> dict[str, Any]:
        """Return the state `values` of `param` in the form of state dicts."""
        values = {**values, **values.get(_NESTED, {})}
        values.pop(_NESTED, None)
        if not self.encodes(param) or not _is_cut_once(param):
            return values
        cut = _Cut(param, self.block)
        found: dict[str, Any] = {FORM: self._describe()}
        for name, value in values.items():
            parts = self._unpack(name, values, _local(param))
            if parts is not None:
                found |= {name + CODES: cut.codes(parts[0], self._block_codes), name + SCALE: cut.scale(parts[1])}
            elif not self._follows(name):
                found[name] = value
        return found

    def _follows(self, name: str) -> bool:
        """Return True if the state `name` can be computed from the other states."""
        return False

    def together(self, values: Mapping[str, Any], param: nn.Parameter) -> dict[str, Any]:
        """Return the state of `param` in the optimizer's form: the inverse of `separate`."""
        if FORM not in values:
            return dict(values)
        found: dict[str, Any] = {}
        for name, value in values.items():
            base = name.removesuffix(CODES)
            if base != name:
                codes, scale = (_local(item).reshape(-1) for item in (value, values[base + SCALE]))
                found |= self._put_together(base, codes, scale, param)
            elif name != FORM and not name.endswith(SCALE):
                found[name] = value
        return found


class _Torchao(BlockStates):
    """States of torchao: a state is a tensor subclass around codes, scales and a table of values."""

    _STATES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    _LEAST = 4096  # elements; the states of smaller parameters are not encoded

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, optimizer.block_size)
        self.draws = optimizer.bf16_stochastic_round

    @cached_property
    def _one_block(self) -> Any:
        return self._optimizer._subclass_zeros(torch.empty(self.block), True, self.block)

    @property
    def _block_codes(self) -> int:
        return self._one_block.codes.numel()  # type: ignore[no-any-return]

    def encodes(self, param: nn.Parameter) -> bool:
        numel = _numel(param)
        return numel >= self._LEAST and numel % self.block == 0

    def _describe(self) -> str:
        return f"torchao {type(self._one_block).__name__}, blocks of {self.block}"

    def _unpack(self, name: str, values: Mapping[str, Any], local: Tensor) -> tuple[Tensor, Tensor] | None:
        if name not in self._STATES:
            return None
        if not local.numel():  # its states are plain zeros
            codes, scale = self._one_block.codes[:0], self._one_block.scale[:0]
            return codes.to(local.device), scale.to(local.device)
        encoded = _local(values[name])
        return encoded.codes, encoded.scale

    def _put_together(self, name: str, codes: Tensor, scale: Tensor, param: nn.Parameter) -> dict[str, Any]:
        local = _local(param)
        if not local.numel():
            state = torch.zeros_like(local)
        else:
            state = self._optimizer._subclass_zeros(local, name == self._STATES[0], self.block)
            state.codes.view(-1).copy_(codes)
            state.scale.copy_(scale)
        return {name: _like(state, param)}

    @contextmanager
    def deciding_by_wholes(self, params: Mapping[int, nn.Parameter]) -> Iterator[None]:
        optimizer = self._optimizer

        def new_buffer(shard: Tensor, signed: bool) -> Tensor:
            param = params.get(id(shard))
            if param is None:
                return type(optimizer)._new_buffer(optimizer, shard, signed)  # type: ignore[no-any-return]
            if self.encodes(param) and shard.numel():
                return optimizer._subclass_zeros(shard, signed, self.block)  # type: ignore[no-any-return]
            return torch.zeros_like(shard)

        with _replacing(optimizer, "_new_buffer", new_buffer):
            yield


class _Bitsandbytes(BlockStates):
    """States of bitsandbytes: codes, scales and tables of values are separate states."""

    _BLOCK = 256
    _TABLES: ClassVar = {"state1": ("absmax1", "qmap1", "dynamic"), "state2": ("absmax2", "qmap2", "udynamic")}

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, self._BLOCK)

    def _config(self, param: nn.Parameter) -> dict[str, Any]:
        """Return the user's configuration for `param`, from any of the library's interfaces."""
        args, manager = self._optimizer.args, self._optimizer.mng
        config = {"optim_bits": args.optim_bits, "min_8bit_size": args.min_8bit_size}
        for module, name, override in manager.module_weight_config_triple:
            if getattr(module, name) is param:
                config.update(override)
        config.update(manager.pid2config.get(id(param), {}))
        return config

    def encodes(self, param: nn.Parameter) -> bool:
        config = self._config(param)
        return config["optim_bits"] == 8 and _numel(param) >= config["min_8bit_size"]  # type: ignore[no-any-return]

    def _describe(self) -> str:
        return f"bitsandbytes in 8 bits, blocks of {self.block}"

    def _unpack(self, name: str, values: Mapping[str, Any], local: Tensor) -> tuple[Tensor, Tensor] | None:
        if name not in self._TABLES:
            return None
        return _local(values[name]), _local(values[self._TABLES[name][0]])

    def _follows(self, name: str) -> bool:
        return any(name in (scale, table) for scale, table, _ in self._TABLES.values())

    def _put_together(self, name: str, codes: Tensor, scale: Tensor, param: nn.Parameter) -> dict[str, Any]:
        local, (absmax, table, kind) = _local(param), self._TABLES[name]
        if kind not in self._optimizer.name2qmap:
            self._optimizer.fill_qmap()
        return {
            name: _like(codes.view(local.shape), param),
            absmax: scale[: -(-local.numel() // self.block)],
            table: self._optimizer.name2qmap[kind].to(local.device),
        }

    @contextmanager
    def deciding_by_wholes(self, params: Mapping[int, nn.Parameter]) -> Iterator[None]:
        optimizer = self._optimizer

        def get_config(gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
            config: dict[str, Any] = type(optimizer).get_config(optimizer, gindex, pindex, group)
            param = params.get(id(optimizer.param_groups[gindex]["params"][pindex]))
            if param is not None:
                config |= self._config(param)
                config["min_8bit_size"] = 0 if self.encodes(param) else sys.maxsize
            return config

        with _replacing(optimizer, "get_config", get_config):
            yield


@contextmanager
def _replacing(optimizer: Any, name: str, method: Any) -> Iterator[None]:
    """Return a context that replaces the method `name` of `optimizer` by `method`."""
    vars(optimizer)[name] = method
    try:
        yield
    finally:
        del vars(optimizer)[name]


def _numel(param: nn.Parameter) -> int:
    """Return the number of elements to shard. With tensor parallelism, this is the size of the local tensor."""
    managed = managed_by(param)
    return param.numel() if managed is None else managed.param.layout.spec.numel


def _local(tensor: Any) -> Any:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _like(local: Tensor, param: nn.Parameter) -> Tensor:
    """Return `local` as a `DTensor` with the placements of `param`."""
    if not isinstance(param, DTensor):
        return local
    return make_dtensor(local, param.device_mesh, tuple(param.placements), tuple(param.shape))


def _is_cut_once(param: nn.Parameter) -> bool:
    """Return True if the shards on the shard axis make up the full `param`. With tensor parallelism, they do not."""
    managed = managed_by(param)
    return managed is None or (managed.param.layout.spec.shape == tuple(param.shape) and not managed.param.view.is_cut)


class _Cut:
    """The division of a parameter into slices of rows that are whole blocks.

    In a tensor of R rows of C elements, k = block / gcd(block, C) rows are whole blocks. A shard of whole blocks has a
    multiple of k rows, except for the last one. So the ceil(R / k) slices are sharded by the rule of `DTensor`, as the
    R rows are. (Rows are those of the first dim with several elements.)
    """

    def __init__(self, param: nn.Parameter, block: int) -> None:
        self._param = param
        self._local = _local(param)
        self._dim = next((dim for dim, size in enumerate(param.shape) if size != 1), 0)
        row_numel = prod(param.shape[self._dim + 1 :])
        self._block = block
        self._rows = block // gcd(block, row_numel)  # of a slice
        self._blocks = self._rows * row_numel // block  # of a slice

    def codes(self, codes: Tensor, in_block: int) -> Tensor:
        """Return this rank's `codes`, `in_block` elements per block, as a `DTensor` of the codes of all ranks."""
        if in_block == self._block:
            return self._placed(codes.view(self._local.shape), tuple(self._param.shape))
        return self._by_regions(codes, self._blocks * in_block)

    def scale(self, scale: Tensor) -> Tensor:
        """Return this rank's scales, one per block, as a `DTensor` of the scales of all ranks."""
        return self._by_regions(scale, self._blocks)

    def _by_regions(self, part: Tensor, width: int) -> Tensor:
        shape, local_shape = (
            (*item.shape[: self._dim], -(-item.shape[self._dim] // self._rows), width)
            for item in (self._param, self._local)
        )
        lacking = prod(local_shape) - part.numel()  # if the last block is shorter
        return self._placed((torch.cat([part, part.new_zeros(lacking)]) if lacking else part).view(local_shape), shape)

    def _placed(self, local: Tensor, shape: tuple[int, ...]) -> Tensor:
        if not isinstance(self._param, DTensor):
            return local
        return make_dtensor(local, self._param.device_mesh, tuple(self._param.placements), shape)
