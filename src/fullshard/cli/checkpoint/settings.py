"""The options of the subcommands of `fullshard checkpoint`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fullshard.command_line import MaybeStr
from fullshard.errors import ConfigError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """The form of the output."""

    json: bool = False
    """Print JSON instead of tables."""


@dataclass(frozen=True, kw_only=True)
class ShowSettings:
    """The options of `ls`, `inspect`, `verify` and `diff`."""

    output: OutputSettings = field(default_factory=OutputSettings)


@dataclass(frozen=True, kw_only=True)
class FileSettings:
    """The files to write."""

    max_shard_size: str = "5GB"
    """Bytes of tensors in one file, such as 500MB. A larger tensor gets a separate file."""
    dtype: MaybeStr = None
    """Cast floating-point tensors to float32, bfloat16, float16 or float64. Default: no cast."""


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """The options of `export`."""

    files: FileSettings = field(default_factory=FileSettings)
    output: OutputSettings = field(default_factory=OutputSettings)

    def dtype(self) -> torch.dtype | None:
        """The dtype to cast to."""
        name = self.files.dtype
        if name is not None and name not in _DTYPES:
            raise ConfigError(f"--dtype {name}: unknown. Choose one of {', '.join(_DTYPES)}.")
        return None if name is None else _DTYPES[name]
