"""The interface of torch's first FSDP: the wrapper class, and the classes of its arguments and state dict options.

All of these names can also be imported from `fullshard`.
"""

from fullshard.fsdp1.precision import MixedPrecision
from fullshard.fsdp1.wrapper import BackwardPrefetch, FullyShardedDataParallel
from fullshard.policy.offload import CPUOffload
from fullshard.policy.strategy import ShardingStrategy
from fullshard.state.state_dict import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

__all__ = [
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
]
