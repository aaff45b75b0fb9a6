"""Parameter groups of tensor subclasses that define how they are gathered, see `payload.py`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fullshard.comm.transport import Pending
from fullshard.engine.gather import Gather, gather_for
from fullshard.engine.gradients import GradientState
from fullshard.engine.group_buffers import Region, ShardStorage, UnshardedBuffer
from fullshard.engine.group_plan import GroupPlan, PayloadPlan
from fullshard.engine.group_transports import GroupTransports
from fullshard.engine.pack import Pack
from fullshard.engine.param_group import ParamGroup
from fullshard.engine.payload import PayloadParam, PayloadStorage
from fullshard.engine.sharded_param import ShardedParam, Source
from fullshard.engine.validity import Validity
from fullshard.tape.recorder import Origin


class PayloadGroup(ParamGroup):
    """Parameters that are gathered as their payloads, in memory separate from the unit's."""

    params: list[PayloadParam]  # type: ignore[assignment]  # the group's own list

    def __init__(
        self,
        plan: PayloadPlan,
        params: Sequence[PayloadParam],
        transports: GroupTransports,
        state: GradientState,
    ) -> None:
        self._storage = PayloadStorage(plan, params)
        gather = Gather(params, self._storage, transports.gathers, transports.scratch)
        super().__init__(plan, Pack(plan.layout, plan.rank), params, gather, None, transports, state)

    @classmethod
    def of(
        cls, sources: Sequence[Source], plan: GroupPlan, transports: GroupTransports, region: Region | None
    ) -> PayloadGroup:
        assert isinstance(plan, PayloadPlan)
        params = [
            PayloadParam(source, placed, plan) for source, placed in zip(sources, plan.layout.params, strict=True)
        ]
        return cls(plan, params, transports, GradientState())

    def moved(self, plan: GroupPlan, transports: GroupTransports, region: Region | None) -> PayloadGroup:
        assert isinstance(plan, PayloadPlan)
        self.release()
        for param, placed in zip(self.params, plan.layout.params, strict=True):
            param.layout = placed
            param.renew(plan)
        return PayloadGroup(plan, self.params, transports, self.gradients.state)

    def _note_shards(self) -> None:
        """Do nothing, since each parameter keeps its shard."""

    def contained_in(self, region: Region | None) -> None:
        """See `ParamGroup.contained_in`. The storage of the unit contains none of the parameters."""

    def _point_to(self, unsharded: UnshardedBuffer | None) -> None:
        """Do nothing, since the first gather allocates the memory."""

    @property
    def holds_its_shards(self) -> bool:
        return all(param.holds_its_shard for param in self.params)

    def start_gather(self, origin: Origin, *, into_shared: bool) -> Pending:
        """See `ParamGroup.start_gather`. The classes may run collectives first."""
        self.validity.invalidate()
        return self.gather.start(self._storage.prepare().unsharded, origin, into_shared=False)

    def finish_gather(self) -> bool:
        buffer = self._storage.buffer
        assert buffer is not None, "a gather was started"
        self.gather.finish(buffer.unsharded)
        try:
            made = [param.receive(gathered) for param, gathered in zip(self.params, buffer.gathered, strict=True)]
        except BaseException:
            self.gather.note_changed_shards()
            raise
        self.validity.refresh()  # a class may have replaced the tensors that it wraps
        self.validity.validate(self.gather.gathered_versions)
        return any(made)

    def release(self) -> None:
        super().release()
        if self._storage.buffer is not None:
            self._storage.buffer.free()
        for param in self.params:
            param.release()

    @property
    def separate_nbytes(self) -> int:
        return 0 if self._storage.buffer is None else self._storage.buffer.nbytes

    @property
    def present_separate_nbytes(self) -> int:
        own = sum(param.inner_nbytes for param in self.params)
        return own + (0 if self._storage.buffer is None else self._storage.buffer.present_nbytes)


class WholeShards(ShardStorage):
    """Full parameters of tensor subclasses, as separate tensors."""

    def __init__(self, plan: GroupPlan, shards: list[Tensor]) -> None:
        super().__init__(plan)
        self.shards = shards

    def to_send(self, scratch: object, *, changed: bool) -> tuple[list[Tensor], Tensor | None]:
        """See `ShardStorage.to_send`: nothing, since every rank has all values."""
        return [], None


class WholeClassGroup(ParamGroup):
    """Parameters of tensor subclasses if the optimizer is not sharded. Modules use the original tensors."""

    def __init__(
        self, plan: GroupPlan, params: Sequence[ShardedParam], transports: GroupTransports, state: GradientState
    ) -> None:
        storage = WholeShards(plan, [param.local for param in params])
        gather = gather_for(params, storage, transports)
        super().__init__(plan, Pack(plan.layout, plan.rank), params, gather, None, transports, state)
        for param in params:
            param.replace_unsharded(param.local)

    @classmethod
    def of(
        cls, sources: Sequence[Source], plan: GroupPlan, transports: GroupTransports, region: Region | None
    ) -> WholeClassGroup:
        params = []
        for source, placed in zip(sources, plan.layout.params, strict=True):
            local = source.local
            if local.device != plan.memory.device:
                local = local.to(plan.memory.device)
            params.append(ShardedParam(source, placed, local, plan))
            if not source.param.is_meta:
                params[-1].note_initial_values(source.local)
        return cls(plan, params, transports, GradientState())

    def moved(self, plan: GroupPlan, transports: GroupTransports, region: Region | None) -> WholeClassGroup:
        for param, placed in zip(self.params, plan.layout.params, strict=True):
            param.layout = placed
            param.renew_unsharded(plan.contract.compute, plan.device)
        return WholeClassGroup(plan, self.params, transports, self.gradients.state)

    def _new_validity(self) -> Validity:
        """Return a validity that checks nothing: parameters are never freed and share counters with shards."""
        return Validity(())

    def _note_shards(self) -> None:
        self._shards = [param.local for param in self.params]

    def contained_in(self, region: Region | None) -> None:
        """See `ParamGroup.contained_in`. The storage of the unit contains none of the parameters."""

    def _point_to(self, unsharded: UnshardedBuffer | None) -> None:
        """Do nothing, since modules use the original tensors."""

    @property
    def holds_its_shards(self) -> bool:
        return all(param.local is shard for param, shard in zip(self.params, self._shards, strict=True))

    def start_gather(self, origin: Origin, *, into_shared: bool) -> Pending:
        """See `ParamGroup.start_gather`. Nothing is sent, or copied."""
        return Pending()

    def finish_gather(self) -> bool:
        self.gather.note_current()
        self.validity.validate(())
        return False
