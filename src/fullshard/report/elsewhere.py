"""The numbers of a run in other homes: what users name writes them, by its own library.

    report(model, "runs/x", log_to="tensorboard")

Each is an optional extra of this package, and is imported when it is asked for. Only the first rank writes.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from fullshard.errors import ConfigError, MissingLibraryError

__all__ = ["HOMES", "Home", "check_home", "open_home"]


class Home(ABC):
    """Where numbers of steps go."""

    @abstractmethod
    def tell(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write numbers of a step, by name."""

    @abstractmethod
    def close(self) -> None:
        """Write what is left."""


class TensorBoard(Home):
    """Event files in the run's folder."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self._writer = import_module("torch.utils.tensorboard").SummaryWriter(str(folder / "tensorboard"))
        self._writer.add_text("settings", "\n".join(f"    {name}: {value}" for name, value in settings.items()))

    def tell(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB(Home):
    """A run of Weights & Biases: of the project that its own environment variables name, or of `fullshard`."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self._run = import_module("wandb").init(
            project=os.environ.get("WANDB_PROJECT", "fullshard"),
            name=folder.name,
            dir=str(folder),
            config=dict(settings),
        )

    def tell(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({**numbers, "step": step})  # numbers of a step may come later than those of the next

    def close(self) -> None:
        self._run.finish()


class MLflow(Home):
    """A run of MLflow, on the server that its own environment variables name."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self._mlflow = import_module("mlflow")
        self._mlflow.start_run(run_name=folder.name)
        self._mlflow.log_params(dict(settings))

    def tell(self, step: int, numbers: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(numbers), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


_Opens = Callable[[Path, Mapping[str, str]], Home]
HOMES: Mapping[str, _Opens] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def check_home(name: str) -> None:
    """Refuse a home that is not known, or whose library is not there.

    Raises:
        ConfigError: it is not known.
        MissingLibraryError: its library is missing.
    """
    if name not in HOMES:
        raise ConfigError(f"log_to={name!r}: not known. Take one of {', '.join(HOMES)}.")
    if find_spec(name) is None:
        raise MissingLibraryError(
            f"log_to={name!r} needs {name}, and found none. Install it by pip install 'fullshard[{name}]'."
        )


def open_home(name: str, folder: Path, settings: Mapping[str, str]) -> Home:
    """The home of that name for the run in `folder`."""
    return HOMES[name](folder, settings)
