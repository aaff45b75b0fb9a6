"""Public modules export exactly the documented names, and every name has a docstring."""

import enum
import inspect
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module

import pytest

import fullshard

DOCUMENTED = {
    "fullshard": [
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
    ],
    "fullshard.checkpoint": [
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
    ],
    "fullshard.dry": [
        "Allocation",
        "Collective",
        "DiskTransfer",
        "Free",
        "Operation",
        "Race",
        "Recorded",
        "Tape",
        "Waited",
        "races",
        "run",
        "taped",
        "world",
    ],
    "fullshard.errors": [
        "CheckpointError",
        "ConfigError",
        "DiskError",
        "FullshardError",
        "LayoutError",
        "MissingLibraryError",
        "NonFiniteError",
        "RankLostError",
        "RankMismatchError",
        "StateError",
    ],
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
    "fullshard.integrations.accelerate": [
        "Accelerator",
        "ReportTracker",
        "ShardingPlugin",
        "TESTED_ACCELERATE",
        "plugin_from_config_file",
    ],
    "fullshard.integrations.deepspeed": [
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
    ],
    "fullshard.integrations.lightning": ["FabricFullShardStrategy", "FullShardStrategy", "ReportCallback"],
    "fullshard.integrations.pipelining": ["PipelineStage", "with_actions"],
    "fullshard.integrations.ray": ["restore", "save_and_report"],
    "fullshard.integrations.torchft": ["Replicas"],
    "fullshard.integrations.transformers": [
        "ReportCallback",
        "Seq2SeqTrainer",
        "TESTED_TRANSFORMERS",
        "Trainer",
        "enable",
        "from_pretrained",
    ],
    "fullshard.optim": ["Muon", "step_shards"],
    "fullshard.testing": [
        "Parallelism",
        "ParityReport",
        "ParityRow",
        "RankFailure",
        "RanksFailed",
        "assert_same",
        "check_parity",
        "run_ranks",
    ],
    "fullshard.wrap": [
        "AutoWrapPolicy",
        "CustomPolicy",
        "ModuleWrapPolicy",
        "WrapPolicy",
        "always_wrap_policy",
        "default_auto_wrap_policy",
        "enable_wrap",
        "lambda_auto_wrap_policy",
        "or_policy",
        "size_based_auto_wrap_policy",
        "transformer_auto_wrap_policy",
        "wrap",
        "wrapped_modules",
    ],
}


def public_things(module: str) -> Iterator[tuple[str, object]]:
    """Yield the public functions and classes of `module`, and the public methods that those classes define."""
    for name in DOCUMENTED[module]:
        thing = getattr(import_module(module), name)
        if inspect.isclass(thing) or inspect.isroutine(thing):
            yield name, thing
        if inspect.isclass(thing):
            public = ((attribute, value) for attribute, value in vars(thing).items() if not attribute.startswith("_"))
            yield from (
                (f"{name}.{attribute}", getattr(thing, attribute)) for attribute, value in public if callable(value)
            )


def is_explained(thing: object) -> bool:
    """Return True if `thing` has a handwritten docstring; dataclasses and enums generate one."""
    text = inspect.getdoc(thing) or ""
    made_up = inspect.isclass(thing) and (text.startswith(f"{thing.__name__}(") or text == inspect.getdoc(enum.Enum))
    inherited = inspect.isclass(thing) and "__doc__" not in vars(thing)
    return bool(text) and not made_up and not inherited


@pytest.mark.parametrize("module", DOCUMENTED)
def test_public_names_match_documentation(module):
    assert sorted(import_module(module).__all__) == DOCUMENTED[module]


@pytest.mark.parametrize("module", DOCUMENTED)
def test_public_names_exist_and_have_docstrings(module):
    assert [name for name, thing in public_things(module) if not is_explained(thing)] == []


@pytest.mark.parametrize("module", ["fullshard", "fullshard.optim"])
def test_unknown_names_raise_attribute_error(module):
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'nothing'"):
        _ = import_module(module).nothing


def test_public_modules_are_imported_on_first_access():
    modules = [name for name in DOCUMENTED if name.count(".") == 1]
    script = f"import fullshard\nfor name in {modules}:\n    assert eval(name).__name__ == name"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert {name.partition(".")[2] for name in modules} <= set(dir(fullshard))
