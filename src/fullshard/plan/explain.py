"""A description of a sharded model: units, parameters, dtypes, placements, padding, bytes, order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from torch import nn

from fullshard.amounts import in_bytes
from fullshard.device.accelerator import accelerator_for
from fullshard.device.transfers import STATES
from fullshard.engine.param_group import ParamGroup
from fullshard.engine.placements import placements_of
from fullshard.engine.registry import clean_fqn, units_in
from fullshard.engine.runtime import runtime_or_none
from fullshard.engine.sharded_param import ShardedParam
from fullshard.engine.unit import Unit
from fullshard.errors import ConfigError
from fullshard.plan.ledger import predict_error_feedback, predict_ledger, predict_on_disk, predict_tiers
from fullshard.plan.stored import offloaded_activations, predict_transfers
from fullshard.policy.arguments import check_type
from fullshard.policy.offload import Offload, StatePlacement

_SMALL_UNIT = 1_000_000  # bytes of unsharded parameters below which host overhead outweighs the benefit of a unit


def explain(model: nn.Module) -> str:
    """Return a text that describes a sharded model: the parameters of each unit, their sharding, and the bytes.

    For each unit it lists its parameters by FQN with shape, placement on each mesh axis, communication (in place, or
    packed with other small ones) and padding; the dtypes of storage, compute, communication and reduction; and the
    bytes on this rank. It continues with the order of units in the last forward and backward, including prefetches, and
    with the predicted bytes of this rank by state. Nothing is communicated or executed.

    Args:
        model: A module that `fully_shard` has sharded.

    Raises:
        ConfigError: The model has no units.
    """
    check_type("model", model, nn.Module, "a sharded nn.Module")
    units = units_in(model)
    if not units:
        raise ConfigError(
            f"{type(model).__name__} has no units, so there is nothing to explain. Call fully_shard first."
        )
    names = {module: clean_fqn(name) or "the root" for name, module in model.named_modules()}
    state_placements = placements_of(units)
    each = (line for unit in units for line in _unit(unit, state_placements[unit], names))
    return "\n".join(
        [*_head(units), *offload_lines(units), *_advice(units), *each, *_order(units, names), *_bytes(model)]
    )


def _head(units: Sequence[Unit]) -> Iterator[str]:
    axes, placements = units[0].axes, units[0].options.placements
    names = axes.mesh.mesh_dim_names or [f"axis {i}" for i in range(axes.mesh.ndim)]
    mesh = " x ".join(f"{name} {axes.mesh.size(i)}" for i, name in enumerate(names))
    yield (
        f"{len(units)} units on {units[0].device}; mesh: {mesh}; this is shard {axes.shard_rank} of {axes.shard_world}"
    )
    yield (
        f"parameters {placements.parameters.value} between steps, {placements.parameters_in_step.value} from forward "
        f"to backward; gradients {placements.gradients.value}; optimizer state {placements.optimizer.value}"
        + (f"; groups of {axes.group_size} ranks" if axes.group_size else "")
    )


def _advice(units: Sequence[Unit]) -> Iterator[str]:
    """Yield advice on avoidable costs."""
    small = [unit for unit in units if unit.params and unit.unsharded_nbytes < _SMALL_UNIT]
    if len(small) > 1 and units[0].axes.world > 1:
        yield (
            f"{len(small)} units have less than {in_bytes(_SMALL_UNIT)}. Each unit costs a few tenths of a millisecond "
            "of host time per step, whatever its size. Fewer and larger units are faster: fully_shard([first, "
            "second]) makes one unit of several modules. Use one unit or strategy='ddp' for a model of a few MiB"
        )


def offload_lines(units: Sequence[Unit]) -> Iterator[str]:
    """Yield the placement of offloaded optimizer states and activations."""
    policies: list[Offload] = []
    for unit in units:
        policy = unit.options.offload.in_full
        if policy not in policies:
            policies.append(policy)
    for policy in policies:
        count = sum(unit.options.offload.in_full == policy for unit in units)
        which = "" if len(policies) == 1 and count == len(units) else f" of {count} of {len(units)} units"
        is_alongside = accelerator_for(units[0].device).has_streams
        states_on_cpu = policy.states_on_cpu(alongside=is_alongside)
        on_cpu = {"optimizer's state": states_on_cpu, "parameters": policy.parameters.get("cpu", 0.0)}
        for what, fraction in on_cpu.items():
            if fraction:
                yield f"{fraction:.0%} of the {what}{which} is on the CPU{'' if is_alongside else ', as all is here'}"
        there = sum(unit.shards.is_on_disk for unit in units if unit.options.offload == policy)
        if there:
            yield (
                f"{there} of {count} units are on a disk between uses, in {policy.disk_folder}: their shards, "
                "gradients and optimizer state"
            )
        if policy.budget is not None:
            yield (
                f"a budget of {policy.budget}{which}: everything that can be offloaded is offloaded until the first "
                "optimizer step"
            )
        if policy.disk_fraction and states_on_cpu < 1:
            yield f"{policy.disk_fraction:.0%} of the optimizer state{which} is on a disk, in {policy.disk_folder}"
        computes = "" if is_alongside else ", where the CPU computes,"
        for tier, place in (("disk", f"in {policy.folder}"), ("cpu", f"in the host's memory{computes}")):
            if policy.activations.get(tier):
                share = f"{policy.activations[tier]:.0%} of {which.removeprefix(' of ') or 'all units'}"
                yield f"saved activations of {share} are {place} until backward"


def _unit(unit: Unit, destination: StatePlacement, names: Mapping[nn.Module, str]) -> Iterator[str]:
    numel = sum(param.sharded.numel() for param in unit.params)
    yield ""
    kind, whole = type(unit.module).__name__, in_bytes(unit.unsharded_nbytes)
    yield f"{names[unit.module]}: {kind}, {numel:,} parameters, {whole} whole"
    if destination is not StatePlacement.DEVICE:
        yield f"  its shards, their gradients and the optimizer's state are {destination.value}"
    for other in unit.borrowed:
        lender = names.get(other.module, other.name)
        yield f"  is unsharded together with {lender}, which shares tied weights with it"
    for param_group in unit.param_groups:
        trained = "trained" if param_group.is_trained else "frozen"
        plan = param_group.plan
        shards = plan.layout.shard_numel * plan.contract.stored.itemsize
        yield f"  {plan.contract}; {trained}; {in_bytes(shards)} of shards, {_padding(param_group):.1%} padding"
        for param in param_group.params:
            yield f"    {param.fqn} {tuple(param.sharded.shape)}: {_placed(param)}"


def _placed(param: ShardedParam) -> str:
    mesh = param.dtensor.device_mesh
    placements = [str(placement) for placement in param.dtensor.placements]
    if param.view.process_groups:  # axes that the mesh of the units does not have
        placements = [f"{placed} on {name}" for placed, name in zip(placements, mesh.mesh_dim_names or (), strict=True)]
    local = tuple(param.local.shape)
    return f"{', '.join(placements)}; here {local}, {'in place' if param.layout.in_place else 'packed'}"


def _padding(param_group: ParamGroup) -> float:
    """Return the share of all ranks' shard buffers that is padding."""
    layout = param_group.plan.layout
    held = sum(param_layout.spec.shard_numel(rank) for param_layout in layout.params for rank in range(layout.world))
    total = layout.world * layout.shard_numel
    return 1 - held / total if total else 0.0


def _order(units: Sequence[Unit], names: Mapping[nn.Module, str]) -> Iterator[str]:
    runtime = runtime_or_none(units[0])
    yield ""
    if runtime is None or not runtime.expected.forward_order:
        yield "order: unknown before the first forward, which does not prefetch"
        return
    for name, order in (("forward", runtime.expected.forward_order), ("backward", runtime.expected.backward_order)):
        known = [names.get(runtime.units[n].module, runtime.units[n].name) for n in order]
        yield f"order of {name}: {' > '.join(known) or 'not known yet'}"
    ahead = sorted({unit.options.prefetch_depth for unit in units})
    depth = " or ".join(map(str, ahead))
    yield f"while a unit computes, the next {depth} in this order is gathered if it is not unsharded already"


def _bytes(model: nn.Module) -> Iterator[str]:
    ledger = predict_ledger(model)
    error_feedback = predict_error_feedback(model)
    on_disk = predict_on_disk(model)
    yield ""
    yield "bytes on this rank, by formula, with AdamW and without activations:"
    for state in ("parameters", "gradients", "optimizer_state", "gathered_peak", "total"):
        yield f"  {state.replace('_', ' '):16}{in_bytes(getattr(ledger, state)):>12}"
        if state == "gradients" and error_feedback:
            yield f"    of these    {in_bytes(error_feedback):>16} is quantization error feedback"
        if state == "optimizer_state" and on_disk.nbytes:
            yield f"    of these    {in_bytes(on_disk.buffer_nbytes):>16} are buffers for what is on the disk"
    yield from _offloaded(model)


def _offloaded(model: nn.Module) -> Iterator[str]:
    """Yield lines about states on the CPU and on disk, and traffic per tier. Activations are those offloaded so far."""
    kept = offloaded_activations(model)
    tiers, transfers = predict_tiers(model, activations=kept), predict_transfers(model, activations=kept)
    for tier, name in (("cpu", "on the CPU"), ("disk", "on the disk")):
        if not tiers[tier].total:
            continue
        yield f"  {name:16}{in_bytes(tiers[tier].total):>12}: {_states(asdict(tiers[tier]))}"
        moved = {state: transfers[tier, state] for state in STATES if (tier, state) in transfers}
        for way, each in (
            ("comes", {state: item.arrived for state, item in moved.items()}),
            ("goes there", {state: item.passed for state, item in moved.items()}),
        ):
            stated = _states(each) or "nothing"
            yield f"    {way:14}{in_bytes(sum(each.values())):>12} per step of one microbatch: {stated}"


def _states(nbytes: Mapping[str, int]) -> str:
    return ", ".join(f"{state.replace('_', ' ')} {in_bytes(nbyte)}" for state, nbyte in nbytes.items() if nbyte)
