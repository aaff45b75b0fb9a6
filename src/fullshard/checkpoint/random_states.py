"""The states of a rank's random generators: those of Python, NumPy, torch and its GPU."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64

from fullshard.device.current import random_states_of_device, set_random_states_of_device


def random_states() -> dict[str, Any]:
    """Return the states of this process, as plain values and tensors."""
    version, words, gauss = random.getstate()
    numpys: Any = np.random.get_state(legacy=False)
    states = {
        "python": [version, torch.tensor(words, device="cpu"), gauss],
        "numpy": {**numpys, "state": {name: _as_tensor(numpy) for name, numpy in numpys["state"].items()}},
        "torch": torch.get_rng_state(),
    }
    return {**states, **random_states_of_device()}


def put_random_states(states: dict[str, Any]) -> None:
    """Set this process's generators to `states`, which `random_states` returned."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    numpys = states["numpy"]
    np.random.set_state({**numpys, "state": {name: _as_array(numpy) for name, numpy in numpys["state"].items()}})
    torch.set_rng_state(states["torch"])
    set_random_states_of_device(states)


def _as_tensor(value: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _as_array(value: Any) -> Any:
    return value.numpy() if isinstance(value, Tensor) else value


def derive_random_states(states: dict[str, Any], rank: int, world: int) -> None:
    """Seed this process from another process's `states`, deterministically by rank and world size.

    It is for a different world size, where the ranks cannot all continue the saved generators.
    """
    seed = xxh3_64(states["torch"].numpy().tobytes() + f"{rank}/{world}".encode()).intdigest()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)
