"""Loading of weights from safetensors files: each rank reads its rows directly into its shards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fullshard.checkpoint.background import checkpoints
from fullshard.checkpoint.contents import model_state, tied_names
from fullshard.checkpoint.fitting import Misfit
from fullshard.checkpoint.manifest import Progress
from fullshard.checkpoint.opening import verify
from fullshard.checkpoint.tensor_files import CHECKSUMS, Merged, TensorFiles, open_tensor_files
from fullshard.checkpoint.together import default_ranks
from fullshard.comm.mesh import local_spans
from fullshard.engine.materialize import allocate
from fullshard.engine.registry import clean_fqn
from fullshard.errors import CheckpointError, ConfigError
from fullshard.state.state_dict import StateDictType, device_of, state_dict_type

_REMEDY = (
    "Pass rename= to map the names in the files to the names in the model, or strict=False to load the tensors that "
    "match."
)


@dataclass(frozen=True)
class Unmatched:
    """Names that only the files or only the model have, as FQNs of the model.

    Args:
        missing: Names that only the model has.
        unexpected: Names that only the files have.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def load_safetensors(
    model: nn.Module,
    path: str | PathLike[str],
    *,
    strict: bool = True,
    dtype: torch.dtype | None = None,
    rename: Callable[[str], str | None] | None = None,
    merge: Callable[[Collection[str]], Mapping[str, Merged]] | None = None,
    progress: Progress | None = None,
) -> Unmatched:
    """Load weights from safetensors files into `model`, in place. Every rank of the default process group must call it.

    Each rank reads its own rows, one tensor at a time, so no rank holds more than its shards and its shard of one
    tensor. Values are cast to the dtype of the parameter. Memory for parameters on the meta device is allocated first,
    unit by unit. Files from `export_safetensors` are verified before anything is read. Other files have no checksums.

    Args:
        model: The model, sharded or not, possibly on the meta device.
        path: A file, an index, or a folder with an index or with one file.
        strict: Whether the names in the files must match those of the model's state dict. A tied weight may be stored
            once, under any of its names; if it is stored under several, the values must be equal.
        dtype: The dtype to cast the floating-point parameters and buffers of the model to first; None keeps theirs.
        rename: Returns the FQN for a name in the files, or None to skip it.
        merge: Receives all names in the files, and returns tensors that combine several of them, such as the experts of
            a layer, as `Merged`s by new names. These are renamed like names in the files. A rank reads only the rows
            that it needs of the parts.
        progress: Called with the bytes that this rank has verified, and their total; then with the bytes of its shards
            that it has read, and their total.

    Returns:
        The names that only the files or only the model have; none if `strict`.

    Raises:
        CheckpointError: The files are missing or damaged, or do not match. The same error is raised on every rank.
            Nothing is overwritten in this case, unless a file could be opened but not be read afterwards.
        ConfigError: An argument is not supported.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(
            f"dtype={dtype}: weights can only be cast to a floating-point dtype. Pass one, such as torch.bfloat16."
        )
    checkpoints.wait()
    ranks, path = default_ranks(), Path(path)
    doing = f"loading {path}"

    def opened() -> TensorFiles:
        files = open_tensor_files(path)
        return files if merge is None else files.with_merged(merge(files.tensors))

    files = ranks.do(doing, opened)
    if files.checksums is not None:
        remedy = f"If it was changed on purpose, delete {CHECKSUMS}."
        verify(files.folder, files.checksums, ranks, doing, remedy, progress)
    reader = ranks.do(doing, lambda: _WeightReader(model, files, rename))
    unmatched = ranks.do(doing, lambda: reader.fit(strict))
    ranks.do(doing, lambda: reader.read(dtype, progress))
    return unmatched


class _WeightReader:
    """Reads this rank's part of a model from files."""

    def __init__(self, model: nn.Module, files: TensorFiles, rename: Callable[[str], str | None] | None) -> None:
        self._model = model
        self._files = files
        self._state = model_state(model)
        self._tied = tied_names(model)
        self._stored = _renamed(files.tensors, rename)
        aliases = _renamed(files.ties, rename)
        self._aliases = {fqn: files.ties[name] for fqn, name in aliases.items() if fqn not in self._stored}
        self._names: dict[str, str] = {}  # the tensor in the files for each tensor in the state

    def fit(self, strict: bool) -> Unmatched:
        """Check that the files match the model. If `strict` is False, return the names that do not match."""
        misfit = Misfit()
        aliases: dict[str, list[str]] = {}
        for alias, first in self._tied.items():
            aliases.setdefault(first, []).append(alias)
        for fqn, value in self._state.items():
            if fqn in self._tied:
                continue
            found = [self._stored.get(item) or self._aliases.get(item) for item in (fqn, *aliases.get(fqn, []))]
            names = list(dict.fromkeys(name for name in found if name is not None))
            if names and isinstance(value, Tensor):
                self._names[fqn] = names[0]
                self._compare(fqn, value, names, misfit)
            else:
                misfit.missing.append(fqn)
        misfit.unexpected += [fqn for fqn in self._stored if fqn not in self._state]
        unmatched = Unmatched()
        if not strict:
            unmatched = Unmatched(tuple(misfit.missing), tuple(misfit.unexpected))
            missing = ((fqn, self._state[fqn]) for fqn in misfit.missing)
            on_meta = [fqn for fqn, value in missing if isinstance(value, Tensor) and value.is_meta]
            misfit.missing = [f"{fqn} (on the meta device, where it has no values either)" for fqn in on_meta]
            misfit.unexpected = []
        misfit.check(str(self._files.path), _REMEDY)
        return unmatched

    def _compare(self, fqn: str, value: Tensor, names: Sequence[str], misfit: Misfit) -> None:
        """Record in `misfit` why `value` cannot be loaded from any of the tensors `names`."""
        stored = self._files.tensors[names[0]]
        placements = value.placements if isinstance(value, DTensor) else ()
        if any(type(placement) not in (Shard, Replicate) for placement in placements):
            raise CheckpointError(
                f"{fqn} has placements {placements}, which do not determine the rows of each rank. Redistribute "
                "it to Shard(dim) or Replicate() first."
            )
        if stored.shape != value.shape:
            misfit.misshapen.append(f"{fqn} ({stored.shape} in it, {tuple(value.shape)} in the model)")
        elif not torch.can_cast(stored.dtype, value.dtype):
            misfit.misshapen.append(f"{fqn} ({stored.dtype} in it, {value.dtype} in the model)")
        elif len(names) > 1 and not self._are_identical(names, value):
            misfit.untied.append(" and ".join(names))

    def _are_identical(self, names: Sequence[str], value: Tensor) -> bool:
        """Return True if this rank's shards of several tensors for one tied weight are bitwise identical."""
        spans = _local_spans(value)
        parts = [
            part.reshape(-1).view(torch.uint8) for _, part in self._files.read({name: (name, spans) for name in names})
        ]
        return all(torch.equal(part, parts[0]) for part in parts[1:])

    @torch.no_grad()
    def read(self, dtype: torch.dtype | None, progress: Progress | None) -> None:
        """Allocate memory for tensors on the meta device, and read all values."""
        if dtype is not None:
            self._model._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
        allocate(self._model, device_of(self._model))
        with state_dict_type(self._model, StateDictType.SHARDED_STATE_DICT):
            state = self._model.state_dict()
            targets = {clean_fqn(name): value for name, value in state.items()}
            wanted = {fqn: (name, _local_spans(targets[fqn])) for fqn, name in self._names.items()}
            total = sum(_local(targets[fqn]).nbytes for fqn in wanted)
            done = 0
            for fqn, part in self._files.read(wanted):
                target = _local(targets[fqn])
                target.copy_(part)
                del part  # before the next part is read
                done += target.nbytes
                if progress is not None:
                    progress(done, total)
            self._model.load_state_dict(state)  # values are in place, but hooks must run and units must be notified


def _renamed(names: Mapping[str, Any], rename: Callable[[str], str | None] | None) -> dict[str, str]:
    """Return the names in the files by their new names."""
    found: dict[str, str] = {}
    for name in names:
        fqn = name if rename is None else rename(name)
        if fqn in found:
            raise CheckpointError(
                f"rename gives {found[fqn]!r} and {name!r} the same name, {fqn!r}. Return different names."
            )
        if fqn is not None:
            found[fqn] = name
    return found


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_spans(tensor: Tensor) -> list[range] | None:
    """Return this rank's range of indices along each dim of `tensor`; None if the rank needs the full tensor."""
    if not isinstance(tensor, DTensor):
        return None
    return local_spans(tensor.shape, tensor.device_mesh, tensor.placements)
