"""Import of DeepSpeed's ZeRO checkpoints, stages 1 to 3, as fullshard checkpoints.

DeepSpeed divides a flattened list of parameters into partitions. Stages 1 and 2 divide the entire list into one
partition per rank. Stage 3 divides each parameter into one part per rank, and a rank concatenates its parts. Moments
are divided like the float32 weights. Names and shapes, in the order of the list, are in the files of the model states.

The files are pickles that name classes of DeepSpeed. They are read with `weights_only=True`, with stand-ins for those
few classes: no code from a file is executed, and DeepSpeed is not needed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullshard.checkpoint.container import check_archive, reason_of
from fullshard.checkpoint.contents import MODEL, Contents, put_optimizer
from fullshard.checkpoint.manifest import Progress
from fullshard.checkpoint.plain import plain_copy
from fullshard.checkpoint.random_states import random_states
from fullshard.checkpoint.saving import save_contents
from fullshard.errors import CheckpointError, shown
from fullshard.regular_files import is_plain_name, read_text, reopened

LATEST = "latest"
"""The file that names the newest tag."""

# DeepSpeed's own entries in a states file of the model; all others are the client's.
_OWN = {
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
    "lr_scheduler",
    "data_sampler",
    "random_ltd",
    "skipped_steps",
    "global_steps",
    "global_samples",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
    "ds_config",
    "ds_version",
    "num_experts",
    "csr_tensor_module",
    "sparse_tensor_module_names",
    "universal_checkpoint_info",
    "autoep_layers",
}


def import_deepspeed(folder: Path, out: Path, progress: Progress | None = None) -> Path:
    """Save the contents of a DeepSpeed checkpoint folder as a fullshard checkpoint in `out`, and return its path.

    It runs in a single process, which holds one copy of weights and moments in memory. DeepSpeed does not save random
    states.

    Args:
        folder: The folder of a tag, or the folder above it with the file `latest`.
        out: The folder for fullshard checkpoints.
        progress: See `fullshard.checkpoint.save`.

    Raises:
        CheckpointError: There is no such checkpoint, it is incomplete, or something in it cannot be imported.
    """
    files = _ZeroFiles.find(folder)
    read = files.read()
    steps = read.models[0]["global_steps"]
    return save_contents(out, steps, lambda: _contents(read), progress)


# -- files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Read:
    """The contents of the files."""

    folder: Path
    models: Sequence[Mapping[str, Any]]  # of each rank under stage 3, else one
    optimizers: Sequence[Mapping[str, Any]]  # of each rank

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return int(self.optimizers[0].get("zero_stage", 1))  # one of DeepSpeed's stage 1 optimizers does not save it


@dataclass(frozen=True)
class _ZeroFiles:
    folder: Path
    models: tuple[Path, ...]
    optimizers: tuple[Path, ...]

    @classmethod
    def find(cls, folder: Path) -> _ZeroFiles:
        if (folder / LATEST).exists():
            folder = folder / read_tag(folder)
        models, optimizers = _by_rank(folder, "_model_states.pt"), _by_rank(folder, "_optim_states.pt")
        if not models or not optimizers:
            found = "no" if not models else f"{len(models)} *_model_states.pt and no *_optim_states.pt"
            raise CheckpointError(
                f"{folder}: expected the files of a ZeRO checkpoint of DeepSpeed, found {found}. Pass the folder that "
                "was passed to save_checkpoint, or one of its tags. Stage 0 saves only weights: use load_state_dict."
            )
        odd = [path.name for path in (*models, *optimizers) if "mp_rank_00" not in path.name]
        if odd or any(folder.glob("layer_*")) or any(folder.glob("expert_*")):
            raise CheckpointError(
                f"{folder}: checkpoints of tensor, pipeline or expert parallelism cannot be imported "
                f"({', '.join(odd) or 'files of layers or experts'}). Consolidate it with DeepSpeed's tools."
            )
        return cls(folder, models, optimizers)

    def read(self) -> _Read:
        read = _Read(
            self.folder,
            [_load(path) for path in self.models],
            [_load(path).get("optimizer_state_dict", {}) for path in self.optimizers],
        )
        for path, states in zip(self.optimizers, read.optimizers, strict=True):
            if not isinstance(states, dict):
                raise CheckpointError(
                    f"{path}: expected a dict as optimizer_state_dict, found a {type(states).__name__}."
                )
        count = read.optimizers[0].get("partition_count")
        counts = count if isinstance(count, list) else [count]
        ranks = max((item for item in counts if isinstance(item, int)), default=None)
        if ranks != len(self.optimizers) or len(self.models) not in (1, ranks):
            raise CheckpointError(
                f"{self.folder}: {ranks} ranks have saved it, but it contains {len(self.optimizers)} *_optim_states.pt "
                f"and {len(self.models)} *_model_states.pt. Copy all of its files."
            )
        return read


def read_tag(folder: Path) -> str:
    """Return the tag in the file `latest` of `folder`.

    Raises:
        CheckpointError: the file cannot be read, or its content is not the name of a folder.
    """
    try:
        tag = read_text(folder / LATEST, limit=4096).strip()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / LATEST}: it cannot be read ({error}). Pass the tag instead.") from error
    if not all(map(is_plain_name, tag.split("/"))):
        raise CheckpointError(
            f"{folder / LATEST}: expected the name of a folder in the same folder, found {shown(tag[:80])!r}. Pass "
            "the tag instead."
        )
    return tag


def _by_rank(folder: Path, ending: str) -> tuple[Path, ...]:
    def rank(path: Path) -> int:
        found = re.search(r"zero_pp_rank_(\d+)", path.name)
        return int(found[1]) if found else 0

    return tuple(sorted(folder.glob(f"*{ending}"), key=rank))


def _load(path: Path) -> dict[str, Any]:
    try:
        with _knowing_deepspeeds_classes(), reopened(path) as same:
            check_archive(same, same.stat().st_size)
            loaded = torch.load(same, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise CheckpointError(f"{path}: it cannot be read ({error}). Copy the file again.") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}. Copy the file again.") from None
    except Exception as error:  # damaged bytes can make torch raise any error
        raise CheckpointError(
            f"{path}: it cannot be read without executing code ({reason_of(error)}). Nothing in it was executed. "
            "Save it with plain values in client_state."
        ) from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path}: expected a dict of states, found a {type(loaded).__name__}.")
    return loaded


class _Placeholder:
    """A stand-in for an object of DeepSpeed: its arguments and its state."""

    def __init__(self, *made_with: Any) -> None:
        self.made_with = made_with
        self.had: Mapping[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.had = state if isinstance(state, dict) else {}

    def __int__(self) -> int:
        return int(self.made_with[0])


_CLASSES = (
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


@contextmanager
def _knowing_deepspeeds_classes() -> Iterator[None]:
    """Context manager within which torch loads stand-ins for `_CLASSES`. Each stand-in must be a separate class."""
    placeholders: list[Any] = [(type(name.rpartition(".")[2], (_Placeholder,), {}), name) for name in _CLASSES]
    with torch.serialization.safe_globals(placeholders):
        yield


# -- contents ---------------------------------------------------------------------------------------------------------


def _contents(read: _Read) -> Contents:
    """Return the contents to save."""
    first = read.models[0]
    layout = _PartitionLayout(read.stage, len(read.optimizers), first["param_shapes"], _alignments(read))
    contents = Contents(strategy=f"zero{read.stage}")
    weights = {**_plain_weights(read), **layout.whole(_masters(read))}
    for alias, name in (first.get("shared_params") or {}).items():
        weights.pop(alias, None)
        contents.ties[f"{MODEL}.{alias}"] = f"{MODEL}.{name}"
    for name, value in weights.items():
        contents.put((MODEL, name), value)
    record: dict[str, Any] = {"ties": contents.ties, "model": {}, "extra": _extra(read)}
    record["optimizer"] = put_optimizer(contents, _optimizer(read, layout))
    if first.get("lr_scheduler") is not None:
        record["scheduler"] = first["lr_scheduler"]
    contents.record = plain_copy(record, "the checkpoint's ")
    contents.own = {"random": random_states()}
    return contents


def _plain_weights(read: _Read) -> dict[str, Tensor]:
    """Return buffers unchanged, and frozen weights in float32."""
    first = read.models[0]
    buffers = set(first["buffer_names"])
    found = {}
    for name, value in first["module"].items():
        if name in buffers or value.numel():  # stage 3 saves an empty tensor for a parameter
            found[name] = value if name in buffers else _float(value)
    if read.stage == 3:
        for name, shape in (first.get("frozen_param_shapes") or {}).items():
            parts = [model["frozen_param_fragments"][name].flatten() for model in read.models]
            found[name] = _float(torch.cat(parts)[: math.prod(shape)].view(shape))
    return found


def _float(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


def _masters(read: _Read) -> list[list[Tensor]]:
    """Return the float32 master weights of each rank, by parameter group."""
    key = "fp32_flat_groups" if read.stage == 3 else "single_partition_of_fp32_groups"
    return [list(optimizer[key]) for optimizer in read.optimizers]


def _alignments(read: _Read) -> list[list[int]] | None:
    found: list[list[int]] | None = read.optimizers[0].get("param_alignment_paddings")
    return found


@dataclass(frozen=True)
class _PartitionLayout:
    """The layout of parameters in flat partitions, in elements."""

    stage: int
    ranks: int
    shapes: Sequence[Mapping[str, Sequence[int]]]  # by group, in order
    paddings: Sequence[Sequence[int]] | None  # padding elements after each parameter, by group

    def whole(self, partitions: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
        """Combine the partitions of all ranks, by group, into full parameters by FQN, or states of their shapes."""
        if self.stage == 3:
            return dict(self._of_parts([torch.cat([group.flatten() for group in groups]) for groups in partitions]))
        found: dict[str, Tensor] = {}
        for group in range(len(self.shapes)):
            found |= self._of_list(group, torch.cat([groups[group].flatten() for groups in partitions]))
        return found

    def _of_list(self, group: int, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        start = 0
        for index, (name, shape) in enumerate(self.shapes[group].items()):
            count = math.prod(shape)
            yield name, self._cut(flat, start, count, name).view(tuple(shape))
            start += count + (self.paddings[group][index] if self.paddings else 0)

    def _of_parts(self, flats: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
        start = 0
        for name, shape in ((name, shape) for group in self.shapes for name, shape in group.items()):
            count = math.prod(shape)
            part = -(-count // self.ranks)
            parts = [self._cut(flat, start, part, name) for flat in flats]
            yield name, torch.cat(parts)[:count].view(tuple(shape))
            start += part

    def _cut(self, flat: Tensor, start: int, count: int, name: str) -> Tensor:
        if start + count > flat.numel():
            raise CheckpointError(
                f"{name} ends at element {start + count} of a partition of {flat.numel()} elements. The files are "
                "from different checkpoints: copy the files of one checkpoint."
            )
        return flat[start : start + count].clone()


def _optimizer(read: _Read, layout: _PartitionLayout) -> dict[str, Any]:
    """Return the optimizer state by FQN, in the form of `optim_state_dict`."""
    key = "optimizer_state_dict" if read.stage == 3 else "base_optimizer_state"
    states = [optimizer[key] for optimizer in read.optimizers]
    if not all(isinstance(state, Mapping) and "param_groups" in state for state in states):
        raise CheckpointError(
            f"{read.folder}: its optimizer was saved with elastic_checkpoint, which is not supported. Load it with "
            "DeepSpeed and save it without elastic_checkpoint."
        )
    named: dict[str, dict[str, Any]] = {name: {} for group in layout.shapes for name in group}
    groups = []
    for options in states[0]["param_groups"]:
        kept = {name: value for name, value in options.items() if name not in ("params", "step", "bias_correction")}
        fqns = [name for number in options["params"] for name in layout.shapes[number]]
        groups.append({**kept, "params": fqns})
        if "step" in options:  # DeepSpeed's own Adam counts steps per group
            for fqn in fqns:
                named[fqn]["step"] = _counter(options["step"])
    present = states[0]["state"]
    for name in dict.fromkeys(name for values in present.values() for name in values):
        values = [[state["state"][number][name] for number in range(len(layout.shapes))] for state in states]
        if isinstance(values[0][0], Tensor) and values[0][0].ndim > 0:
            for fqn, whole in _moments(read, layout, values).items():
                named[fqn][name] = whole
        else:
            for number, group in enumerate(layout.shapes):
                for fqn in group:
                    named[fqn][name] = _counter(values[0][number]) if name == "step" else values[0][number]
    return {"state": {fqn: values for fqn, values in named.items() if values}, "param_groups": groups}


def _moments(read: _Read, layout: _PartitionLayout, values: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
    """Return the full states, from states that are divided like the weights. Those of the last rank may be padded."""
    masters = _masters(read)
    for rank, of_rank in enumerate(values):
        for number, value in enumerate(of_rank):
            if value.numel() < masters[rank][number].numel():
                raise CheckpointError(
                    f"{read.folder}: rank {rank} has a state of {value.numel()} elements for "
                    f"{masters[rank][number].numel()} weights. Only states with the size of the weights can be "
                    "imported."
                )
    return layout.whole(values)


def _counter(step: Any) -> Tensor:
    return torch.tensor(float(step))


def _extra(read: _Read) -> dict[str, Any]:
    """Return the counters of the engine and the client state, in the form of `Engine.save_checkpoint`."""
    first = read.models[0]
    microbatches = first.get("ds_config", {}).get("gradient_accumulation_steps", 1)
    engine = {
        "global_steps": first["global_steps"],
        "micro_steps": first["global_steps"] * (microbatches if isinstance(microbatches, int) else 1),
        "global_samples": first.get("global_samples", 0),
        "skipped_steps": first.get("skipped_steps", 0),
    }
    scaler = read.optimizers[0].get("loss_scaler", _Placeholder()).had
    if scaler.get("dynamic"):
        engine["loss_scale"] = {
            "scale": float(scaler["cur_scale"]),
            "patience": scaler["cur_hysteresis"],
            "since_overflow": scaler["cur_iter"] - scaler["last_overflow_iter"] - 1,
        }
    return {"engine": engine, "client_state": {name: item for name, item in first.items() if name not in _OWN}}
