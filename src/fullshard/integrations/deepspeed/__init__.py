"""DeepSpeed training loops with this engine: `from fullshard.integrations import deepspeed`, and the script stays.

engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, training_data=data, config="ds_config.json")
for batch in loader:
    loss = engine(batch)
    engine.backward(loss)
    engine.step()

DeepSpeed itself is not needed. `explain_config` says what each key of a configuration becomes.
"""

from fullshard.integrations.deepspeed.configuration import explain_config
from fullshard.integrations.deepspeed.engine import Engine
from fullshard.integrations.deepspeed.starting import add_config_arguments, init_distributed, initialize

__all__ = ["Engine", "add_config_arguments", "explain_config", "init_distributed", "initialize"]
