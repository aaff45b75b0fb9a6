"""The output folder of a run: settings, metrics, samples and weights."""

from __future__ import annotations

import json
import math
import os
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml

from fullshard.errors import ConfigError
from fullshard.regular_files import UNPARSED, open_regular, writing
from fullshard.train.ranks import Rank, do_together
from fullshard.train.settings import TrainSettings

METRICS, SETTINGS, SAMPLES, WEIGHTS = "metrics.jsonl", "settings.yaml", "samples.txt", "model.safetensors"
CHECKPOINTS = "checkpoints"
ANOTHER_OUT = "another --out"
STOPPED = "stopped"  # the kind of the last line of the metrics of a run that was stopped and can be resumed


def check_out(out: Path, *, resumes: bool = False) -> None:
    """Raise an error if the output folder is a file, cannot be created, or holds another run that is not resumed."""
    nearest = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not nearest.is_dir():
        raise ConfigError(f"--out {out}: {nearest} is a file. Choose a folder that does not exist yet.")
    found = [name for name in (METRICS, SETTINGS, WEIGHTS) if (out / name).exists()]
    if found and not resumes:
        raise ConfigError(
            f"--out {out}: the folder holds another run ({found[0]}). Choose another folder, remove it, or resume its "
            "run with --resume auto."
        )


def check_shared(out: Path, rank: Rank) -> None:
    """Raise an error on every rank if not all machines share the output folder, which checkpoints require.

    Raises:
        ConfigError: The first rank cannot write there, or its files are not visible on all machines.
    """
    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name, src=0, device=rank.device)
    probe = out / f"probe-{name[0]}"

    def write_probe() -> None:
        with writing(probe, instead=ANOTHER_OUT):
            out.mkdir(parents=True, exist_ok=True)
            probe.touch()

    do_together(write_probe if rank.leads else lambda: None, rank.world)
    found: list[str | None] = [None] * rank.world
    dist.all_gather_object(found, None if probe.exists() else socket.gethostname())
    if rank.leads:
        probe.unlink()
    missing = {host: index for index, host in reversed(list(enumerate(found))) if host is not None}
    if missing:
        hosts = ", ".join(f"{host} (rank {index})" for host, index in sorted(missing.items()))
        raise ConfigError(
            f"--out {out}: files of rank 0 are not visible on {hosts}, but a checkpoint needs the files of all ranks. "
            "Choose a folder on storage that all machines share, or leave --checkpoint-every out."
        )


def free_folder(settings: TrainSettings, parent: Path = Path("runs")) -> Path:
    """Return the first folder `parent`/size-strategy-number that does not exist yet."""
    name = f"{settings.model.size}-{settings.parallelism.strategy}"
    number = 1
    while (parent / f"{name}-{number}").exists():
        number += 1
    return parent / f"{name}-{number}"


def lines_of(out: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of the metrics in `out`, except for a truncated last line."""
    metrics = out / METRICS
    if not metrics.exists():
        return
    try:
        with open_regular(metrics) as file:
            text = file.read()
    except OSError as error:
        raise ConfigError(f"{metrics}: cannot be read ({error.strerror}). Choose another --out.") from error
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        if line.endswith(b"\n"):
            try:
                found = json.loads(line)
            except UNPARSED as error:
                raise ConfigError(f"{metrics}, line {number}: is not JSON ({error}). Remove that line.") from error
            if not isinstance(found, dict) or not isinstance(found.get("kind"), str):
                raise ConfigError(f'{metrics}, line {number}: is not a JSON object with a "kind". Remove that line.')
            yield found


def has_stopped(out: Path) -> bool:
    """Return True if the run in `out` was stopped and has saved its state."""
    *_, last = ({}, *lines_of(out))
    return last.get("kind") == STOPPED


class RunFolder:
    """The files of a run. With `writes=False`, nothing is written.

    If a file cannot be written, nothing more is written, and `check` raises the error. It is not raised immediately,
    because other ranks wait for the rank that writes.
    """

    def __init__(self, path: Path, *, writes: bool) -> None:
        self.path = path
        self._writes = writes
        self._failure: ConfigError | None = None
        self._write(path, lambda: path.mkdir(parents=True, exist_ok=True))

    def check(self) -> None:
        """Raise the error of the first file that could not be written.

        Raises:
            ConfigError: A file could not be written.
        """
        if self._failure is not None:
            raise self._failure

    @property
    def weights(self) -> Path:
        """The file of the trained weights."""
        return self.path / WEIGHTS

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / CHECKPOINTS

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file that grows during the run."""
        files = [self.path / name for name in (METRICS, SAMPLES)]
        return {file.name: file.stat().st_size if file.exists() else 0 for file in files}

    def truncate(self, sizes: Mapping[str, int]) -> None:
        """Truncate the files to `sizes` bytes each. A resumed run writes the rest again."""
        for name, nbytes in sizes.items():
            file = self.path / name
            if file.exists() and file.stat().st_size > nbytes:
                self._write(file, partial(os.truncate, file, nbytes))

    def write_settings(self, settings: TrainSettings) -> None:
        """Write the settings to a file for `--config`, except `out` and `resume`, which belong to this run only."""
        file = self.path / SETTINGS
        options = {name: value for name, value in settings.as_options().items() if name not in ("out", "resume")}
        text = yaml.safe_dump(options, sort_keys=False, allow_unicode=True)
        self._write(file, lambda: file.write_text(text, encoding="utf-8"))

    def write_line(self, kind: str, values: Mapping[str, Any]) -> None:
        """Add one line of JSON to the metrics: `kind`, then the values."""
        line = json.dumps({"kind": kind, **{k: _plain(v) for k, v in values.items()}}) + "\n"
        self._append(self.path / METRICS, line.encode())

    def write_sample(self, step: int, content: bytes) -> None:
        """Add the bytes of a sample, under a heading with its step."""
        self._append(self.path / SAMPLES, f"===== step {step} =====\n".encode() + content + b"\n")

    def _append(self, path: Path, content: bytes) -> None:
        def append() -> None:
            with path.open("ab") as file:
                file.write(content)

        self._write(path, append)

    def _write(self, path: Path, action: Callable[[], object]) -> None:
        """Call `action` to write the file, and store its error for `check`."""
        if not self._writes or self._failure is not None:
            return
        try:
            with writing(path, instead=ANOTHER_OUT):
                action()
        except ConfigError as error:
            self._failure = error


def _plain(value: Any) -> Any:
    """Return `value` with null for numbers that are not finite, which JSON cannot represent."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
