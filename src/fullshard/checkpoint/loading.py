"""Loading of a run with any number of ranks and any strategy. A run is loaded completely or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.checkpoint.background import checkpoints
from fullshard.checkpoint.contents import RECORD, HasState, key_of_rank, model_state, tied_names
from fullshard.checkpoint.encoded import names_alongside, restore_descriptions
from fullshard.checkpoint.fitting import fit_model, fit_optimizer
from fullshard.checkpoint.folder import entries
from fullshard.checkpoint.manifest import Progress
from fullshard.checkpoint.opening import Opened, open_checkpoint
from fullshard.checkpoint.plain import are_same, filled, keys_in
from fullshard.checkpoint.random_states import derive_random_states, set_random_states
from fullshard.checkpoint.saved import Saved, saved_by_fullshard, saved_by_torch
from fullshard.checkpoint.together import default_ranks
from fullshard.engine.materialize import allocate
from fullshard.engine.registry import clean_fqn
from fullshard.errors import CheckpointError
from fullshard.state.optim_state import StateTemplate, params_by_fqn
from fullshard.state.state_dict import StateDictType, device_of, state_dict_type


@dataclass(frozen=True)
class Restored:
    """The data of a loaded checkpoint. All fields except `path` are None if another tool has written it.

    Args:
        path: The checkpoint.
        step: The number of completed steps.
        extra: The `extra` that was saved.
        world: The number of ranks that saved it.
        strategy: The strategy when it was saved.
        versions: The versions of libraries when it was saved, by name.
    """

    path: Path
    step: int | None = None
    extra: Any = None
    world: int | None = None  # the number of ranks that saved it
    strategy: str | None = None
    versions: Mapping[str, str] | None = None


def latest(folder: str | PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint in `folder`, possibly damaged; None if there is none.

    Args:
        folder: A folder of checkpoints.
    """
    found = entries(Path(folder))
    return found[0].path if found else None


def load(
    checkpoint: str | PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: HasState | None = None,
    data: HasState | None = None,
    random_states: bool = True,
    progress: Progress | None = None,
) -> Restored:
    """Restore a run from a checkpoint. Every rank of the default process group must call it.

    World size, strategy and wrap policy may differ from those of the save. Tied weights may be untied. With the same
    number of ranks, later losses are bitwise equal. All files are verified first. No code in them is executed.

    Checkpoints of `torch.distributed.checkpoint` are supported if they contain a model and an optimizer in the form of
    `get_state_dict`. Their values are verified as they are read, with the checksums that torch.save has written.

    Args:
        checkpoint: A checkpoint, or a folder of checkpoints. For a folder, the newest intact one is loaded, and a
            warning is logged for each newer one that is damaged.
        model: The model, sharded or not. Memory for parameters on the meta device is allocated first.
        optimizer: An optimizer of parameters of `model`. Its parameter groups may differ.
        scheduler: An object with `load_state_dict()`.
        data: The position in the data: an object with `load_state_dict()`. With the same number of ranks, each rank
            gets its own state.
        random_states: Whether to restore random generators. With a different number of ranks, they get new seeds
            derived from the checkpoint, the world size and the rank.
        progress: Called with the bytes that this rank has verified, and their total; then with the elements that it has
            read, and their total.

    Raises:
        CheckpointError: The checkpoint is missing or damaged, or does not match. The same error is raised on every
            rank. Nothing is overwritten in this case, unless a file could be verified but not be read afterwards.
    """
    checkpoints.wait()
    ranks = default_ranks()
    opened = open_checkpoint(Path(checkpoint), ranks, progress)
    doing, manifest = opened.doing, opened.manifest
    reader = ranks.do(doing, lambda: _CheckpointReader(model, optimizer, scheduler, data))
    if manifest is None:
        saved = saved_by_torch(opened, reader.state, reader.params)
        own: dict[str, Any] = {}
    else:
        record, own = _read_records(opened, manifest.world, data is not None)
        saved = ranks.do(doing, lambda: saved_by_fullshard(opened, record))
    saved = saved.renamed(reader.tied)
    keys = ranks.do(doing, lambda: reader.fit(opened, saved, own))
    targets = ranks.do(doing, lambda: reader.targets(opened, saved, keys))
    opened.read(targets, progress)
    ranks.do(doing, lambda: reader.restore(saved, own, keys, targets))
    if manifest is None:
        return Restored(opened.path)
    if random_states and manifest.world == ranks.world:
        set_random_states(own["random"])
    elif random_states:
        derive_random_states(own["random"], ranks.index, ranks.world)
    extra = saved.remaining["extra"]
    return Restored(opened.path, manifest.step, extra, manifest.world, manifest.strategy, manifest.versions)


def _read_records(opened: Opened, world: int, wants_data: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values that all `world` ranks of the save share, and the values of this rank.

    If the number of ranks has changed, each rank gets the values of the first rank.

    Raises:
        CheckpointError: `data` is requested and the number of ranks has changed, but the ranks had different positions.
    """
    ranks = opened.ranks
    if world == ranks.world:
        record, own = opened.records(RECORD, key_of_rank(ranks.index))
        return record, own
    record, first, *others = opened.records(RECORD, *map(key_of_rank, range(world if wants_data else 1)))
    for rank, other in enumerate(others, 1):
        if not are_same(other.get("data"), first.get("data")):
            raise CheckpointError(
                f"{opened.doing}: {world} ranks saved it, and ranks 0 and {rank} had different positions in the data, "
                f"which cannot be divided over {ranks.world}. Pass data=None and set the position from your own values "
                "in extra, or load with the same number of ranks."
            )
    return record, {name: value for name, value in first.items() if name != "plain"}


@dataclass(eq=False)
class _CheckpointReader:
    """The objects on this rank into which a checkpoint is loaded."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    scheduler: HasState | None
    data: HasState | None

    def __post_init__(self) -> None:
        self.state = model_state(self.model, in_parts=True)
        self.tied = tied_names(self.model)
        self.params = {} if self.optimizer is None else params_by_fqn(self.model, self.optimizer)

    @property
    def template(self) -> StateTemplate | None:
        """The expected form of the optimizer's states; None without an optimizer."""
        return None if self.optimizer is None else StateTemplate(self.optimizer, self.params)

    def fit(self, opened: Opened, saved: Saved, own: Mapping[str, Any]) -> dict[str, str]:
        """Check that the checkpoint fits, and return the keys of the model's tensors by FQN."""
        keys, misfit = fit_model(saved, opened, self.state, self.tied)
        if self.template is not None:
            misfit += fit_optimizer(saved, opened, self.template)
        if self.scheduler is not None and "scheduler" not in saved.remaining:
            misfit.absent.append("scheduler")
        if self.data is not None and "data" not in own:
            misfit.absent.append("data position")
        misfit.check()
        return keys

    def targets(self, opened: Opened, saved: Saved, keys: Mapping[str, str]) -> dict[str, Tensor]:
        """Return the tensors to load into, by key: if possible, those of the model and the optimizer."""
        allocate(self.model, device_of(self.model))
        self.state = model_state(self.model, in_parts=True)
        sizes = opened.sizes()
        targets: dict[str, Tensor] = {}
        for fqn, key in keys.items():
            value = self.state[fqn]
            fits = value.shape == sizes[key]
            targets[key] = value if fits else torch.empty(sizes[key], dtype=value.dtype, device=value.device)
        return targets | self._optimizer_targets(opened, saved)

    def _optimizer_targets(self, opened: Opened, saved: Saved) -> dict[str, Tensor]:
        template, sizes = self.template, opened.sizes()
        if template is None:
            return {}
        states = [(fqn, name, child) for fqn, (_, of_fqn) in saved.states.items() for name, child in of_fqn]
        template.note_counters((fqn, name) for fqn, name, (kind, key) in states if kind == "tensor" and not sizes[key])
        template.make_room(
            {(fqn, name): (sizes[key], opened.dtype(key)) for fqn, name, (kind, key) in states if kind == "tensor"}
        )
        targets: dict[str, Tensor] = {}
        for fqn, name, child in states:
            for key in keys_in(child):
                targets[key] = template.destination(fqn, name, sizes[key], opened.dtype(key))
        for group in saved.groups or ():
            for key in keys_in(group.options):
                targets[key] = torch.empty(sizes[key], dtype=opened.dtype(key), device="cpu")
        return targets

    def restore(
        self, saved: Saved, own: Mapping[str, Any], keys: Mapping[str, str], targets: dict[str, Tensor]
    ) -> None:
        """Restore the model, optimizer, scheduler and data position from the values in `targets`."""
        for key, value in own.get("plain", {}).items():
            if key in targets:
                targets[key].copy_(value)
        self._restore_model(saved, keys, targets)
        template = self.template
        if template is not None and self.optimizer is not None:
            state = {
                fqn: {name: filled(child, targets.__getitem__) for name, child in of_fqn}
                for fqn, (_, of_fqn) in saved.states.items()
            }
            groups = [
                {**filled(group.options, targets.__getitem__), "params": group.fqns} for group in saved.groups or ()
            ]
            self.optimizer.load_state_dict(template.numbered({"state": state, "param_groups": groups}))
        if self.scheduler is not None:
            self.scheduler.load_state_dict(saved.remaining["scheduler"])
        if self.data is not None:
            self.data.load_state_dict(own["data"])

    def _restore_model(self, saved: Saved, keys: Mapping[str, str], targets: Mapping[str, Tensor]) -> None:
        """Load `targets` as a state dict.

        Most values are in place already, but hooks must run, and units must be notified of changed shards.
        """
        with state_dict_type(self.model, StateDictType.SHARDED_STATE_DICT):
            values: dict[str, Any] = {}
            alongside: dict[str, Any] = {}
            prefixes = names_alongside(self.model)
            for name, present in self.model.state_dict().items():
                fqn = self.tied.get(clean_fqn(name), clean_fqn(name))
                if prefixes and clean_fqn(name).startswith(prefixes):
                    alongside[clean_fqn(name)] = targets[keys[fqn]]
                elif fqn in keys:
                    values[name] = targets[keys[fqn]]
                else:
                    values[name] = saved.values.get(fqn, present)  # or an encoded weight, read as its parts
            self.model.load_state_dict(values)
            restore_descriptions(self.model, alongside)
