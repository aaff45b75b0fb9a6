"""The states of a rank's random generators: Python, NumPy, torch and the GPU."""

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
    numpy: Any = np.random.get_state(legacy=False)
    inner = {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in numpy["state"].items()
    }
    return {
        "python": [version, torch.tensor(words, device="cpu"), gauss],
        "numpy": {**numpy, "state": inner},
        "torch": torch.get_rng_state(),
        **random_states_of_device(),
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Set the generators of this process to `states`, as returned by `random_states`."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    numpy = states["numpy"]
    inner = {name: value.numpy() if isinstance(value, Tensor) else value for name, value in numpy["state"].items()}
    np.random.set_state({**numpy, "state": inner})
    torch.set_rng_state(states["torch"])
    set_random_states_of_device(states)


def derive_random_states(states: dict[str, Any], rank: int, world: int) -> None:
    """Seed this process deterministically from the `states` of another process, its own `rank`, and `world`.

    This is for a different world size, where not all ranks can continue the saved generators.
    """
    seed = xxh3_64(states["torch"].numpy().tobytes() + f"{rank}/{world}".encode()).intdigest()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)
