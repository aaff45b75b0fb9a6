"""Replicas that can join and leave: a replicate axis of torchft. The loss of a replica costs a step, but no restart.

    model, optimizer = make_sharded_model()         # over the ranks of this replica
    replicas = Replicas(model, optimizer)           # finds the others through the lighthouse
    while replicas.step < steps:
        replicas.begin_step()                       # choose the replicas; those that missed steps get the state
        loss_of(model, batch(replicas.step, replicas.index, replicas.count)).backward()
        if replicas.should_commit():                # else the step is abandoned, and done again
            optimizer.step()
        optimizer.zero_grad()

A replica is a separate world: a process group of its ranks, started by a separate launcher, for example torchrun. Its
model is sharded over these ranks. Replicas share torchft's `Manager` and lighthouse. Gradients are averaged over all
replicas of the step, at the point where HSDP sums over its replicate axis. If any rank of a replica is lost, the
replica ends and is restarted; the others abandon the current step and continue without it. When it returns, it receives
the state of another replica: each rank receives that of its counterpart.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.checkpoint.contents import HasState
from fullshard.checkpoint.snapshot import restore_snapshot, snapshot
from fullshard.comm.routes import collectives_for
from fullshard.engine.registry import units_in
from fullshard.errors import ConfigError, StateError
from fullshard.fsdp_module import FSDPModule
from fullshard.liveness.rank_progress import here
from fullshard.tape.recorder import Origin, Phase
from fullshard.versions import require

require("torchft", "0.2", extra="torchft")

from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL  # noqa: E402

__all__ = ["Replicas"]


class Replicas:
    """This replica and its connection to others. Each of its ranks creates one and calls all methods in the same order.

    Args:
        model: The model, sharded over the ranks of this replica by any strategy, including the root module. Replicas
            must have the same model, strategy and number of ranks. At the first step all receive the weights of one of
            them.
        optimizer: An optimizer of parameters of `model`.
        scheduler: An object with `state_dict()` and `load_state_dict()`. Its state is transferred between replicas,
            too.
        name: A unique name of this replica.
        lighthouse: The address, such as `"http://host:29510"`. If None, `TORCHFT_LIGHTHOUSE` of the environment.
        min_replicas: The minimum number of replicas to commit a step.
        timeout_s: The timeout in seconds of a reduction over replicas, a transfer of state or a request to the
            lighthouse. A replica that exceeds it is treated as lost.

    Raises:
        ConfigError: `model` is not sharded, or the lighthouse address is missing.
        StateError: The process group does not exist, or the lighthouse does not answer.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        name: str,
        scheduler: HasState | None = None,
        lighthouse: str | None = None,
        min_replicas: int = 1,
        timeout_s: float = 60.0,
    ) -> None:
        lighthouse = lighthouse or os.environ.get("TORCHFT_LIGHTHOUSE")
        if not isinstance(model, FSDPModule):
            raise ConfigError(
                f"Replicas({type(model).__name__}) is not sharded, so its gradients would not be summed over "
                "replicas. Call fully_shard on its inner modules first and on the model last."
            )
        if not lighthouse:
            raise ConfigError(
                "Replicas(lighthouse=None): no lighthouse is given. Start one with torchft_lighthouse --min_replicas "
                "1, and pass its address, or set TORCHFT_LIGHTHOUSE to it."
            )
        if not dist.is_initialized():
            raise StateError(
                "Replicas needs a process group of this replica's ranks, and there is none. Call torch.distributed."
                "init_process_group() first, under a launcher for each replica."
            )
        self._model = model
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._units = units_in(model)
        self._device = self._units[0].device
        self._manager = self._join(name, lighthouse, min_replicas, timedelta(seconds=timeout_s))
        self._manager.register_state_dict_fn("fullshard", self._restore, self._snapshot)
        for unit in self._units:
            cast(FSDPModule, unit.module).set_all_reduce_hook(self._sum_over_replicas)

    def _join(self, name: str, lighthouse: str, min_replicas: int, timeout: timedelta) -> Manager:
        store = dist.PrefixStore("fullshard torchft", dist.distributed_c10d._get_default_store())
        rank = dist.get_rank()
        if rank == 0:
            own = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            self._store = own  # for the life of this replica
            store.set("address", f"{socket.gethostname()} {own.port}")
        with here.waiting("address of the first rank's store"):
            host, port = store.get("address").decode().split()
        self._group = ProcessGroupGloo(timeout) if self._device.type == "cpu" else ProcessGroupNCCL(timeout)
        try:
            return Manager(
                pg=self._group,
                load_state_dict=None,
                state_dict=None,
                min_replica_size=min_replicas,
                use_async_quorum=False,  # the state of another replica must arrive before forward
                timeout=timeout,
                quorum_timeout=timeout,
                connect_timeout=timeout,
                rank=rank,
                world_size=dist.get_world_size(),
                store_addr=host,
                store_port=int(port),
                lighthouse_addr=lighthouse,
                replica_id=name,
            )
        except Exception as error:
            raise StateError(
                f"Replicas(lighthouse={lighthouse!r}): replica {name!r} could not join: {error}. Check that the "
                "lighthouse runs and can be reached from this host."
            ) from error

    @property
    def step(self) -> int:
        """The number of steps committed so far, by this replica or by the one whose state it has received."""
        return int(self._manager.current_step())

    @property
    def count(self) -> int:
        """The number of replicas in the current step."""
        return int(self._manager.num_participants())

    @property
    def index(self) -> int:
        """The index of this replica among those of the current step."""
        index = self._manager.participating_rank()
        assert index is not None, "replicas have the newest state before a step begins"
        return int(index)

    def begin_step(self) -> None:
        """Find the replicas of the next step, and receive their state if needed.

        It returns once all running replicas have called it, or once those that have not are considered lost. At that
        point `count` and `index` can change, and also `step` if this replica has missed steps.

        Raises:
            StateError: The lighthouse does not answer, or too few replicas joined in time.
        """
        try:
            self._manager.start_quorum()
        except Exception as error:
            raise StateError(
                f"begin_step of step {self.step}: no quorum of replicas: {error}. Check that the lighthouse runs, and "
                "that at least as many replicas run as it requires."
            ) from error

    def should_commit(self) -> bool:
        """Return whether to take the optimizer step. If not, the step is abandoned.

        Gradients are averaged over all replicas. Call it after the step's backward. It returns False if any rank of
        this replica has lost another replica in the meantime. Then all ranks of this replica drop their gradients, and
        `begin_step` begins the same step again. If other replicas had completed all reductions by then, they have taken
        the step, and this replica receives their state.
        """
        if self._manager.should_commit():
            return True
        self._model.abandon_step()
        self._agree_on_step()
        return False

    def close(self) -> None:
        """Leave the other replicas, between steps."""
        dist.barrier()  # the rank that serves this replica must not leave before the others are ready
        self._manager.shutdown(wait=False)

    def _sum_over_replicas(self, sums: Tensor) -> None:
        """Replace the sums of this replica by the mean over replicas. Values are undefined once a replica is lost.

        A rank that detects a loss closes its connections, because others in a ring may wait for this rank.
        """
        with here.waiting("all_reduce over replicas"):
            self._manager.allreduce(sums).wait()
        if self._manager.errored() is not None:
            self._group.abort(errored=False)

    def _snapshot(self) -> dict[str, Any]:
        return snapshot(model=self._model, optimizer=self._optimizer, scheduler=self._scheduler)

    def _restore(self, taken: Mapping[str, Any]) -> None:
        restore_snapshot(taken, model=self._model, optimizer=self._optimizer, scheduler=self._scheduler)

    def _agree_on_step(self) -> None:
        """Set the lowest step of all ranks, so that all ranks receive a newer state if only some have received one."""
        world = collectives_for(dist.distributed_c10d._get_default_group(), self._device)
        steps = world.gather_objects(self.step, origin=Origin("replicas", Phase.IDLE))
        self._manager.load_state_dict({**self._manager.state_dict(), "step": min(steps)})
