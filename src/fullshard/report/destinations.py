"""Logging of a run's numbers to other services, using their libraries.

    report(model, "runs/x", log_to="tensorboard")

Each library is an optional extra of this package, and is imported when it is used. Only the first rank writes.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from fullshard.errors import ConfigError, MissingLibraryError


class Destination(ABC):
    """A destination for the numbers of steps."""

    @abstractmethod
    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write numbers of a step, by name."""

    @abstractmethod
    def close(self) -> None:
        """Flush and close."""


class TensorBoard(Destination):
    """Event files in the run's folder."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self._writer = import_module("torch.utils.tensorboard").SummaryWriter(str(folder / "tensorboard"))
        self._writer.add_text("settings", "\n".join(f"    {name}: {value}" for name, value in settings.items()))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB(Destination):
    """A run of Weights & Biases, in the project of `WANDB_PROJECT` or else in `fullshard`."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self._run = import_module("wandb").init(
            project=os.environ.get("WANDB_PROJECT", "fullshard"),
            name=folder.name,
            dir=str(folder),
            config=dict(settings),
        )

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({**numbers, "step": step})  # wandb's own step must not decrease, but numbers may arrive late

    def close(self) -> None:
        self._run.finish()


class MLflow(Destination):
    """A run of MLflow, on the server of its environment variables."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self._mlflow = import_module("mlflow")
        self._mlflow.start_run(run_name=folder.name)
        self._mlflow.log_params(dict(settings))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(numbers), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


DESTINATIONS: Mapping[str, Callable[[Path, Mapping[str, str]], Destination]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
}


def check_destination(name: str) -> None:
    """Raise an error if the destination `name` cannot be used.

    Raises:
        ConfigError: The destination is unknown.
        MissingLibraryError: Its library is not installed.
    """
    if name not in DESTINATIONS:
        raise ConfigError(f"log_to={name!r}: unknown. Expected one of {', '.join(DESTINATIONS)}.")
    if find_spec(name) is None:
        raise MissingLibraryError(
            f"log_to={name!r} needs {name}, which is not installed. Install it with pip install 'fullshard[{name}]'."
        )
