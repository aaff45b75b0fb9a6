"""The tensor of a parameter that modules see, and the local tensor in it that the engine communicates.

For a plain parameter both are one tensor. A parameter of tensor parallelism is a `DTensor`, and modules rely on that.
The engine communicates the local tensor, which is sharded, gathered and reduced like a plain parameter of that shape.
So the sharded parameter is split twice, first by tensor parallelism, and then each local tensor on the shard axis:

    original    mesh (tp),                     placements (Shard(0),)
    sharded     mesh (tp, shard),              placements (Shard(0), Shard(0))
                mesh (tp, replicate, shard),   placements (Shard(0), Replicate(), Shard(0))

`DTensor` applies placements from the first axis to the last, so the axes are in the order of the splits. On a mesh of
(shard, tp), the placements would describe other rows if both axes split dim 0.

If the user passes a mesh of all parallelisms and names the engine's axes, a parameter may be a `DTensor` on all axes
that is replicated on the engine's axes. Modules still see such a `DTensor`. The sharded parameter has its other axes
first, and then the engine's:

    original    mesh (shard, cp, tp),          placements (Replicate(), Replicate(), Shard(0))
    sharded     mesh (tp, shard_cp),           placements (Shard(0), Shard(0))
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fullshard._compat import FakeTensor, make_dtensor, set_local_tensor, waited
from fullshard.comm.mesh import Axes, join
from fullshard.errors import ConfigError
from fullshard.layout.shard_spec import ShardSpec

_HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


class ParamView:
    """A plain parameter: modules see the tensor that the engine communicates."""

    changes_grad = False  # whether `local_grad` returns another tensor than it gets

    @property
    def process_groups(self) -> list[dist.ProcessGroup]:
        """The process groups over which the parameter was distributed before the engine sharded it."""
        return []

    @property
    def is_cut(self) -> bool:
        """True if another parallelism has already split the parameter over other ranks."""
        return False

    @property
    def is_opaque(self) -> bool:
        """True if the values are encoded bits, which must not be cast to a different dtype."""
        return False

    def make_sharded(self, shard: Tensor, axes: Axes, spec: ShardSpec, *, sharded: bool) -> DTensor:
        """Return the `DTensor` with local tensor `shard`. It is replicated unless `sharded`."""
        return make_dtensor(shard, axes.mesh, axes.tensor_placements(spec, sharded=sharded), spec.shape)

    def make_unsharded(self, whole: Tensor) -> Tensor:
        """Return the tensor that modules see, around `whole`."""
        return whole

    def make_param(self, whole: Tensor, *, requires_grad: bool) -> nn.Parameter:
        """Return the parameter that modules see, around `whole`."""
        return nn.Parameter(self.make_unsharded(whole), requires_grad=requires_grad)

    def make_summoned(self, whole: Tensor, *, requires_grad: bool) -> nn.Parameter:
        """Return the full parameter for `summon_full_params`: plain, and in separate memory."""
        return nn.Parameter(whole, requires_grad=requires_grad)

    def point_to(self, visited: Tensor, whole: Tensor) -> None:
        """Make `visited`, a result of `make_param`, use the memory of `whole`."""
        visited.data = whole

    def local_grad(self, grad: Tensor) -> Tensor:
        """Return the tensor of a gradient from autograd that the engine reduces."""
        return grad


class TensorParallelView(ParamView):
    """A parameter of tensor parallelism: modules see a `DTensor` placed like `param`. The engine uses the local tensor.

    Args:
        fqn: The name of the parameter, for errors.
        param: the original parameter.
        axes: the axes to shard and replicate its local tensors over.

    Raises:
        ConfigError: `param` is not on other axes of the same mesh, or is placed in a way that cannot be sharded
            further.
    """

    changes_grad = True

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
                f"{found}. To shard it over {axes.mesh} as well, both must be named axes of one mesh. Slice that mesh "
                "for each, as in parallelize_module(module, mesh['tp'], plan) and fully_shard(module, "
                "mesh=mesh['dp']), or list it in ignored_params."
            )
        if any(type(placement) not in (Shard, Replicate) for placement in param.placements):
            raise ConfigError(
                f"{found}. Only parameters placed Shard(dim) or Replicate() can be sharded further. Redistribute it "
                "first, or list it in ignored_params."
            )
        cut = [name for name, placement in zip(names, param.placements, strict=True) if placement.is_shard()]
        if own.intersection(cut):
            raise ConfigError(
                f"{found}, so it is already sharded over {cut}, which dp_mesh_dims={sorted(own)} also names. Place it "
                "Replicate() there, and list only data parallel axes in dp_mesh_dims."
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
        """Return a `DTensor` on the axes of tensor parallelism and then those of the engine."""
        placements = (*self._outer_placements, *axes.tensor_placements(spec, sharded=sharded))
        return make_dtensor(shard, self._mesh, placements, self._found.shape)

    def make_unsharded(self, whole: Tensor) -> DTensor:
        """Return a `DTensor` on the mesh of the original parameter."""
        return make_dtensor(whole, self._found.mesh, self._found.placements, self._found.shape)

    def point_to(self, visited: Tensor, whole: Tensor) -> None:
        """Set an alias of `whole` as the local tensor of `visited`.

        With an alias, all-gathers do not count as changes of tensors that autograd has saved.
        """
        assert isinstance(visited, DTensor)
        set_local_tensor(visited, whole.data)

    def local_grad(self, grad: Tensor) -> Tensor:
        """Return the local tensor of `grad`, redistributed by torch to the placements of the parameter if needed.

        It is not redistributed along the engine's axes, because the reduction sums it over them.
        """
        assert isinstance(grad, DTensor)
        placements = list(grad.placements)
        for axis in self._outer_axes:
            placements[axis] = self._found.placements[axis]
        return waited(grad.redistribute(placements=placements)._local_tensor)


class OwnClassView(ParamView):
    """A parameter of a class derived from `nn.Parameter`: modules see that class, with its original attributes.

    So bitsandbytes' 4-bit weights are gathered as packed bytes, and their kernels see the class that they expect. Every
    rank has all of their metadata, such as the scales of their blocks.
    """

    def __init__(self, param: nn.Parameter) -> None:
        self._type = type(param)
        self._is_opaque = hasattr(param, "quant_state")

    @property
    def is_opaque(self) -> bool:
        return self._is_opaque

    def make_param(self, whole: Tensor, *, requires_grad: bool) -> nn.Parameter:
        param: nn.Parameter = torch.Tensor._make_subclass(self._type, whole, requires_grad)
        return param

    def make_summoned(self, whole: Tensor, *, requires_grad: bool) -> nn.Parameter:
        return self.make_param(whole, requires_grad=requires_grad)


def view_of(fqn: str, param: nn.Parameter, axes: Axes) -> ParamView:
    """Return the view for the class and the placement of `param`."""
    _check_annotations(fqn, param, axes)
    if isinstance(param, DTensor):
        _check_class(fqn, param._local_tensor)
        return TensorParallelView(fqn, param, axes)
    if type(param) in (Tensor, nn.Parameter) or isinstance(param, FakeTensor) or sends_payloads(param):
        return ParamView()
    kind, module = type(param).__name__, type(param).__module__
    if nn.Parameter not in type(param).__mro__:  # isinstance() is true of wrappers, too
        _check_class(fqn, param)
    if module.split(".")[0] == "bitsandbytes" and getattr(param, "quant_state", None) is None:
        raise ConfigError(
            f"{fqn} is a {module}.{kind} without a quant_state: 8-bit weights cannot be sharded, and 4-bit weights "
            "only after they are quantized. Call model.to(device) before fully_shard, or list it in ignored_params."
        )
    kept = [name for name, value in vars(param).items() if isinstance(value, Tensor)]
    if kept:
        raise ConfigError(
            f"{fqn} is a {module}.{kind} with additional tensors ({', '.join(kept)}), which cannot be sharded. List "
            "it in ignored_params, or define fsdp_pre_all_gather and fsdp_post_all_gather on its class."
        )
    return OwnClassView(param)


def _check_annotations(fqn: str, param: nn.Parameter, axes: Axes) -> None:
    """Raise if spmd_types annotates a plain tensor as a shard, or with partial gradients, along another axis."""
    mesh = axes.spmd_mesh
    if mesh is None or not getattr(param, "_local_type", None):  # where spmd_types keeps annotations
        return
    sizes = zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)
    others = [f"{name} ({size})" for name, size in sizes if size > 1 and name not in axes.spmd_names]
    if others:
        raise ConfigError(
            f"{fqn} is a plain tensor whose placement on the axes {', '.join(others)} is annotated by spmd_types. "
            "These annotations are supported for data parallelism only. Make it a DTensor, as torchtitan "
            "does with --parallelism.spmd_backend partial_dtensor."
        )


def _check_class(fqn: str, local: Tensor) -> None:
    """Raise an error if the class of a tensor would be lost.

    Raises:
        ConfigError: The class would be lost, and does not define how a shard is gathered.
    """
    plain = type(local) in (Tensor, nn.Parameter) or isinstance(local, FakeTensor)
    if not (plain or sends_payloads(local)):
        raise ConfigError(
            f"{fqn} is a {type(local).__name__}, a tensor subclass without fsdp_pre_all_gather and "
            "fsdp_post_all_gather, which define what is gathered: sharding would turn it into a plain tensor. Shard "
            "the model before converting its parameters, or list it in ignored_params."
        )


def sends_payloads(local: Tensor) -> bool:
    """Return True if the class of `local` defines how a shard is gathered, with the methods of torch's protocol."""
    return all(hasattr(local, hook) for hook in _HOOKS)


def check_payloads(fqn: str, local: Tensor, axes: Axes, dim: int | None) -> None:
    """Raise an error if torch's all-gather protocol for tensor subclasses is not supported for a parameter.

    Raises:
        ConfigError: The tensor would be sharded along a dim other than 0, or gathered in two levels, or its method has
            different arguments than in torch.
    """
    name = f"{fqn}, a {type(local).__name__} with fsdp_pre_all_gather,"
    count = len(signature(local.fsdp_pre_all_gather).parameters)  # type: ignore[attr-defined]
    if count not in (1, 5):
        raise ConfigError(
            f"{name} has an fsdp_pre_all_gather that takes {count} arguments. Expected (mesh) or (mesh, outer_size, "
            "outer_stride, module, mp_policy)."
        )
    if dim not in (None, 0) or not local.ndim:
        raise ConfigError(
            f"{name} cannot be sharded along dim {dim} of its shape {tuple(local.shape)}. Such tensors support dim 0 "
            "only: return None or Shard(0) for it from shard_placement_fn, or list it in ignored_params."
        )
    if axes.group_size is not None:
        raise ConfigError(
            f"{name} cannot be sharded in groups of {axes.group_size} ranks, which do not know its encoding. Choose a "
            "strategy without groups for its unit, such as 'zero3' or 'hsdp'."
        )
