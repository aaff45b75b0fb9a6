"""The tensor that modules see of a parameter, and the one in it that the engine moves.

Of a plain parameter both are one tensor. A parameter that tensor parallelism has placed is a `DTensor`, and modules
rely on that. The engine moves the local tensor in it, which is cut, gathered and reduced as a plain parameter of that
shape would be. So at rest the parameter is cut twice, first as it was found, then each part on the shard axis:

    as it was found    mesh (tp),                     placements (Shard(0),)
    at rest            mesh (tp, shard),              placements (Shard(0), Shard(0))
                       mesh (tp, replicate, shard),   placements (Shard(0), Replicate(), Shard(0))

`DTensor` reads placements from the first axis to the last, so the axes are in the order in which they cut. On a mesh of
(shard, tp) rows that are cut on both would not lie where their placements say.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from fullshard._compat import holds_tensors, make_dtensor, set_local_tensor, waited
from fullshard.comm.mesh import Axes, join
from fullshard.errors import ConfigError
from fullshard.layout.shard_spec import ShardSpec

__all__ = ["ParamView", "TensorParallelView", "view_of"]


class ParamView:
    """A plain parameter: modules see the tensor that the engine moves."""

    @property
    def process_groups(self) -> list[dist.ProcessGroup]:
        """The groups that the parameter was cut over before the engine came."""
        return []

    def make_sharded(self, shard: Tensor, axes: Axes, spec: ShardSpec, *, sharded: bool) -> DTensor:
        """The sharded parameter around `shard`, this rank's part; the whole, if not `sharded`."""
        return make_dtensor(shard, axes.mesh, axes.tensor_placements(spec, sharded=sharded), spec.shape)

    def make_unsharded(self, whole: Tensor) -> Tensor:
        """The tensor that modules see, around `whole`."""
        return whole

    def point_to(self, seen: Tensor, whole: Tensor) -> None:
        """Let `seen`, which `make_unsharded` gave, have its values in `whole` from now on."""
        seen.data = whole

    def local_grad(self, grad: Tensor) -> Tensor:
        """The tensor that the engine reduces, of the gradient that autograd has left."""
        return grad


class TensorParallelView(ParamView):
    """A parameter of tensor parallelism: modules see a `DTensor` placed as `param` is, the engine moves the local one.

    Args:
        fqn: the parameter's name, for errors.
        param: as it was found.
        axes: what its local tensors are to be sharded and replicated over.

    Raises:
        ConfigError: `param` is not on other axes of the same mesh, or placed in a way that cannot be cut further.
    """

    def __init__(self, fqn: str, param: DTensor, axes: Axes) -> None:
        mesh = join(param.device_mesh, axes.mesh)
        found = f"{fqn} is already a DTensor placed {param.placements} on mesh {param.device_mesh}"
        if mesh is None:
            raise ConfigError(
                f"{found}. To be sharded over {axes.mesh} as well, both must be axes of one mesh, with names. Slice it "
                "for each, as in parallelize_module(module, mesh['tp'], plan) and fully_shard(module, mesh=mesh['dp']),"
                " or list it in ignored_params."
            )
        if any(type(placement) not in (Shard, Replicate) for placement in param.placements):
            raise ConfigError(
                f"{found}. Only what is placed Shard(dim) or Replicate() can be sharded further. Redistribute it "
                "first, or list it in ignored_params."
            )
        self._found = param._spec
        self._mesh = mesh

    @property
    def process_groups(self) -> list[dist.ProcessGroup]:
        """The groups of tensor parallelism."""
        return self._found.mesh.get_all_groups()

    def make_sharded(self, shard: Tensor, axes: Axes, spec: ShardSpec, *, sharded: bool) -> DTensor:
        """A `DTensor` on the axes of tensor parallelism and then those of the engine."""
        placements = (*self._found.placements, *axes.tensor_placements(spec, sharded=sharded))
        return make_dtensor(shard, self._mesh, placements, self._found.shape)

    def make_unsharded(self, whole: Tensor) -> DTensor:
        """A `DTensor` on the mesh of tensor parallelism."""
        return make_dtensor(whole, self._found.mesh, self._found.placements, self._found.shape)

    def point_to(self, seen: Tensor, whole: Tensor) -> None:
        """Let `seen` have `whole` as its local tensor: an alias, so that no gather counts as a change of what autograd
        has saved.
        """
        assert isinstance(seen, DTensor)
        set_local_tensor(seen, whole.data)

    def local_grad(self, grad: Tensor) -> Tensor:
        """The local tensor of `grad`, placed as the parameter is: a collective of torch's where it is not."""
        assert isinstance(grad, DTensor)
        return waited(grad.redistribute(placements=self._found.placements)._local_tensor)


def view_of(fqn: str, param: Tensor, axes: Axes) -> ParamView:
    """The view of `param`."""
    if isinstance(param, DTensor):
        return TensorParallelView(fqn, param, axes)
    if holds_tensors(param):
        raise ConfigError(
            f"{fqn} is a {type(param).__name__}, a tensor subclass that holds other tensors: sharded, it would be a "
            "plain tensor. Shard the model before its parameters are converted, or list it in ignored_params."
        )
    return ParamView()
