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
    # Asked for its state, CUDA would begin, which data loaders that fork do not survive.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = [state.numpy() for state in torch.cuda.get_rng_state_all()]
    return states


def check_rng(states: Any) -> None:
    """Check that `restore_rng` can put back these states, changing no generator.

    NumPy takes any position in its table, and reads there at the next draw.

    Raises:
        ValueError: If it cannot.
    """
    try:
        version, words, gauss_next = states["python"]
        random.Random().setstate((version, tuple(words.tolist()), gauss_next))
        kind, table, position, *_ = states["numpy"]
        if kind != "MT19937" or type(position) is not int or not 0 <= position <= 624:
            raise ValueError(f"a position {position!r} in NumPy's generator")
        if table.shape != (624,) or table.dtype != np.uint32:
            raise ValueError("a table that is none of NumPy's generator")
        np.random.RandomState().set_state(states["numpy"])
        torch.Generator().set_state(torch.from_numpy(states["torch"]))
        for state in states.get("cuda", ()):
            if state.dtype != np.uint8 or state.ndim != 1:
                raise ValueError("a state that is none of a CUDA generator")
    except (TypeError, LookupError, AttributeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"no states of random generators: {error!r}") from error


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
