"""The tensor that modules see of a parameter, and the one in it that the engine moves.

Of a plain parameter both are one tensor. A parameter that tensor parallelism has placed is a `DTensor`, and modules
rely on that. The engine moves the local tensor in it, which is cut, gathered and reduced as a plain parameter of that
shape would be. So at rest the parameter is cut twice, first as it was found, then each part on the shard axis:

    as it was found    mesh (tp),                     placements (Shard(0),)
    at rest            mesh (tp, shard),              placements (Shard(0), Shard(0))
                       mesh (tp, replicate, shard),   placements (Shard(0), Replicate(), Shard(0))

`DTensor` reads placements from the first axis to the last, so the axes are in the order in which they cut. On a mesh of
(shard, tp) rows that are cut on both would not lie where their placements say.

Where the engine was given all axes of a mesh and told which are its own, a parameter may be a `DTensor` on all of them,
whole on the engine's. Modules go on to see it so; at rest its other axes come first, and then the engine's:

    as it was found    mesh (shard, cp, tp),          placements (Replicate(), Replicate(), Shard(0))
    at rest            mesh (tp, shard_cp),           placements (Shard(0), Shard(0))
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
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
        """The groups that the parameter was placed on before the engine came."""
        return []

    @property
    def is_cut(self) -> bool:
        """True if the engine has a part of the parameter only: others have been given to other ranks."""
        return False

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
        found = f"{fqn} is already a DTensor placed {param.placements} on mesh {param.device_mesh}"
        own = axes.spmd_names if param.device_mesh == axes.spmd_mesh else frozenset()
        names: Sequence[str] = param.device_mesh.mesh_dim_names or [""] * param.device_mesh.ndim
        self._outer_axes = [axis for axis, name in enumerate(names) if name not in own]
        mesh: DeviceMesh | None = axes.mesh
        if self._outer_axes:
            outer = param.device_mesh[tuple(names[axis] for axis in self._outer_axes)] if own else param.device_mesh
            mesh = join(outer, axes.mesh)
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
        cut = [name for name, placement in zip(names, param.placements, strict=True) if placement.is_shard()]
        if own.intersection(cut):
            raise ConfigError(
                f"{found}, and so is cut on {cut} already, over which it is to be sharded here: dp_mesh_dims names "
                f"{sorted(own)}. Place it Replicate() there, and name in dp_mesh_dims only axes of data parallelism."
            )
        self._found = param._spec
        self._mesh = mesh
        self._outer_placements = tuple(param.placements[axis] for axis in self._outer_axes)

    @property
    def process_groups(self) -> list[dist.ProcessGroup]:
        """The groups of tensor parallelism."""
        return [self._found.mesh.get_group(axis) for axis in self._outer_axes]

    @property
    def is_cut(self) -> bool:
        return any(placement.is_shard() for placement in self._outer_placements)

    def make_sharded(self, shard: Tensor, axes: Axes, spec: ShardSpec, *, sharded: bool) -> DTensor:
        """A `DTensor` on the axes of tensor parallelism and then those of the engine."""
        placements = (*self._outer_placements, *axes.tensor_placements(spec, sharded=sharded))
        return make_dtensor(shard, self._mesh, placements, self._found.shape)

    def make_unsharded(self, whole: Tensor) -> DTensor:
        """A `DTensor` on the mesh on which it was found."""
        return make_dtensor(whole, self._found.mesh, self._found.placements, self._found.shape)

    def point_to(self, seen: Tensor, whole: Tensor) -> None:
        """Let `seen` have `whole` as its local tensor: an alias, so that no gather counts as a change of what autograd
        has saved.
        """
        assert isinstance(seen, DTensor)
        set_local_tensor(seen, whole.data)

    def local_grad(self, grad: Tensor) -> Tensor:
        """The local tensor of `grad`, placed as the parameter is: a collective of torch's where it is not.

        Along the engine's own axes it stays as autograd left it, which is this rank's share of the sum that is taken.
        """
        assert isinstance(grad, DTensor)
        placements = list(grad.placements)
        for axis in self._outer_axes:
            placements[axis] = self._found.placements[axis]
        return waited(grad.redistribute(placements=placements)._local_tensor)


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
