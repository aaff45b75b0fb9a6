"""Save and load sharded runs, with any world size and strategy. A checkpoint is complete or does not exist.

from fullshard.checkpoint import load, save

save("checkpoints", model=model, optimizer=optimizer, step=step, keep=3)
step = load("checkpoints", model=model, optimizer=optimizer).step
"""

from fullshard.checkpoint.background import PendingSave
from fullshard.checkpoint.exporting import export_safetensors
from fullshard.checkpoint.importing import Unmatched, load_safetensors
from fullshard.checkpoint.loading import Restored, latest, load
from fullshard.checkpoint.saving import async_save, save
from fullshard.checkpoint.snapshot import restore_snapshot, snapshot
from fullshard.checkpoint.tensor_files import Merged

__all__ = [
    "Merged",
    "PendingSave",
    "Restored",
    "Unmatched",
    "async_save",
    "export_safetensors",
    "latest",
    "load",
    "load_safetensors",
    "restore_snapshot",
    "save",
    "snapshot",
]
