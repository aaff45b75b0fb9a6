"""Fully sharded data parallel training for PyTorch: parameters, gradients and optimizer state sharded over the ranks.

```python
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
```
"""

from typing import TYPE_CHECKING

from fullshard._lazy import lazy_names
from fullshard.errors import (
    CheckpointError,
    ConfigError,
    DiskError,
    FullshardError,
    LayoutError,
    MissingLibraryError,
    NonFiniteError,
    RankLostError,
    RankMismatchError,
    StateError,
)

if TYPE_CHECKING:
    from fullshard import checkpoint, dry, fsdp1, optim, wrap  # noqa: F401
    from fullshard.fsdp1 import *  # noqa: F403  # its `__all__` is public here, too
    from fullshard.fsdp_module import (
        FSDPModule,
        GradientReductionHandle,
        UnshardHandle,
        fully_shard,
        register_fsdp_forward_method,
        replicate,
        share_comm_ctx,
        take_part,
    )
    from fullshard.graphs import CapturedStep, capture
    from fullshard.liveness.watchdog import set_collective_timeout
    from fullshard.optim.clipping import ShardedGradScaler, clip_grad_norm_
    from fullshard.plan.background import predict_beside
    from fullshard.plan.explain import explain
    from fullshard.policy.meshes import DataParallelMeshDims, FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
    from fullshard.policy.offload import CPUOffloadPolicy, Offload, OffloadPolicy
    from fullshard.policy.precision import MixedPrecisionPolicy
    from fullshard.policy.strategy import Placement, Placements
    from fullshard.policy.switches import (
        check_finite_gradients,
        compare_ranks,
        share_memory_between_ranks,
        share_memory_between_units,
    )
    from fullshard.report.recording import RunReport, report
    from fullshard.state.streaming import stream_weights
    from fullshard.state.summon import summon_full_params
    from fullshard.tape.recorder import recording
else:
    # Import the package `report`, which is empty, and remove it from this namespace. Otherwise a later import of one of
    # its modules would set `fullshard.report` to the package, and hide the function of that name.
    import fullshard.report as _report_package

    del report, _report_package
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "fullshard.fsdp1": [
                "BackwardPrefetch",
                "CPUOffload",
                "FullOptimStateDictConfig",
                "FullStateDictConfig",
                "FullyShardedDataParallel",
                "LocalOptimStateDictConfig",
                "LocalStateDictConfig",
                "MixedPrecision",
                "OptimStateDictConfig",
                "OptimStateKeyType",
                "ShardedOptimStateDictConfig",
                "ShardedStateDictConfig",
                "ShardingStrategy",
                "StateDictConfig",
                "StateDictSettings",
                "StateDictType",
            ],
            "fullshard.fsdp_module": [
                "FSDPModule",
                "GradientReductionHandle",
                "UnshardHandle",
                "fully_shard",
                "register_fsdp_forward_method",
                "replicate",
                "share_comm_ctx",
                "take_part",
            ],
            "fullshard.graphs": ["CapturedStep", "capture"],
            "fullshard.liveness.watchdog": ["set_collective_timeout"],
            "fullshard.optim.clipping": ["ShardedGradScaler", "clip_grad_norm_"],
            "fullshard.plan.background": ["predict_beside"],
            "fullshard.plan.explain": ["explain"],
            "fullshard.policy.meshes": ["DataParallelMeshDims", "FSDPMeshInfo", "HSDPMeshInfo", "ShardPlacementResult"],
            "fullshard.policy.offload": ["CPUOffloadPolicy", "Offload", "OffloadPolicy"],
            "fullshard.policy.precision": ["MixedPrecisionPolicy"],
            "fullshard.policy.strategy": ["Placement", "Placements"],
            "fullshard.policy.switches": [
                "check_finite_gradients",
                "compare_ranks",
                "share_memory_between_ranks",
                "share_memory_between_units",
            ],
            "fullshard.report.recording": ["RunReport", "report"],
            "fullshard.state.streaming": ["stream_weights"],
            "fullshard.state.summon": ["summon_full_params"],
            "fullshard.tape.recorder": ["recording"],
        },
        submodules=("checkpoint", "dry", "fsdp1", "optim", "testing", "wrap"),
    )

__version__ = "0.1.0"

__all__ = [
    "CPUOffloadPolicy",
    "CapturedStep",
    "CheckpointError",
    "ConfigError",
    "DataParallelMeshDims",
    "DiskError",
    "FSDPMeshInfo",
    "FSDPModule",
    "FullshardError",
    "GradientReductionHandle",
    "HSDPMeshInfo",
    "LayoutError",
    "MissingLibraryError",
    "MixedPrecisionPolicy",
    "NonFiniteError",
    "Offload",
    "OffloadPolicy",
    "Placement",
    "Placements",
    "RankLostError",
    "RankMismatchError",
    "RunReport",
    "ShardPlacementResult",
    "ShardedGradScaler",
    "StateError",
    "UnshardHandle",
    "capture",
    "check_finite_gradients",
    "clip_grad_norm_",
    "compare_ranks",
    "explain",
    "fully_shard",
    "predict_beside",
    "recording",
    "register_fsdp_forward_method",
    "replicate",
    "report",
    "set_collective_timeout",
    "share_comm_ctx",
    "share_memory_between_ranks",
    "share_memory_between_units",
    "stream_weights",
    "summon_full_params",
    "take_part",
]
