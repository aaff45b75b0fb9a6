"""DeepSpeed training loops with this engine: `from fullshard.integrations import deepspeed`, and the rest of the script
stays the same.

engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, training_data=data, config="ds_config.json")
for batch in loader:
    loss = engine(batch)
    engine.backward(loss)
    engine.step()

DeepSpeed itself is not needed. `explain_config` describes the effect of each key of a configuration.
"""

from typing import Any

from fullshard.integrations.deepspeed import accelerator, checkpointing, comm, ops, utils, zero
from fullshard.integrations.deepspeed.accelerator import get_accelerator
from fullshard.integrations.deepspeed.configuration import explain_config
from fullshard.integrations.deepspeed.engine import Engine
from fullshard.integrations.deepspeed.names import DeepSpeedConfig, OnDevice
from fullshard.integrations.deepspeed.refused import missing
from fullshard.integrations.deepspeed.starting import add_config_arguments, init_distributed, initialize

__version__ = "0.19.8"  # of DeepSpeed: the version that names and numbers are compared with

DeepSpeedEngine = Engine

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedEngine",
    "Engine",
    "OnDevice",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "explain_config",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "ops",
    "utils",
    "zero",
]


def __getattr__(name: str) -> Any:
    raise missing("deepspeed", name)
