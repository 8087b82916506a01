"""The random generators of this process: per rank, never shared."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def capture_rng() -> dict[str, Any]:
    """Return the states of the Python, NumPy, torch CPU and CUDA generators as plain values."""
    version, words, gauss_next = random.getstate()
    states: dict[str, Any] = {
        # As an array: a third of the size of 625 numbers in text.
        "python": (version, np.array(words, dtype=np.uint32), gauss_next),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state().numpy(),
    }
    if torch.cuda.is_available() and torch.cuda.device_count():
        states["cuda"] = [state.numpy() for state in torch.cuda.get_rng_state_all()]
    return states


def restore_rng(states: dict[str, Any]) -> None:
    """Put back what `capture_rng` returned.

    Raises:
        ValueError, TypeError, RuntimeError: If a state does not fit; a
            generator is never left out silently.
    """
    version, words, gauss_next = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss_next))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(torch.from_numpy(states["torch"]))
    if "cuda" in states and torch.cuda.is_available():
        for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(torch.from_numpy(state), device)


def seed_rng(*parts: object) -> None:
    """Seed all generators from ``parts``: for a rank that the checkpoint has no state for.

    Distinct parts give distinct streams, and the same parts the same one.
    """
    digest = hashlib.sha256(repr(parts).encode()).digest()
    seed = int.from_bytes(digest[:8], "little")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
