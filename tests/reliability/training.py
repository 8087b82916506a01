"""The training of the fault tests, and what it must come to.

No test machinery is imported here: a worker process that needs only this
starts in a tenth of the time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import raycheck

_GENERATOR = threading.Lock()
"""Held by who uses the default generator of this process."""

NARROW = 64
_PACE_S = 5.0
_STEPS_AT_A_TIME = 60

WIDE = 1000
"""A width at which a shard of two is 6 MB: S3 takes it in two parts."""


class Bulk(torch.nn.Module):
    """Many parameters and no matrix product: the rounding of one depends on where its operands lie."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(width, width))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Scale all features alike."""
        return features * self.weight.mean()


class Trainer:
    """A small training whose every step is a function of the step before."""

    def __init__(self, width: int = NARROW) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(8, width), torch.nn.Dropout(0.1)]
        if width >= WIDE:
            layers.append(Bulk(width))
        self.model = torch.nn.Sequential(*layers, torch.nn.Linear(width, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self, step: int) -> None:
        """Take the step after ``step``."""
        features = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        self.optimizer.zero_grad()
        self.model(features).square().mean().backward()
        self.optimizer.step()

    def digest(self) -> str:
        """Return a digest of parameters and optimizer state, under the names that they are stored by."""
        return digest(dict(self._tensors()))

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield f"model.{name}", parameter
            for key, value in self.optimizer.state.get(parameter, {}).items():
                yield f"optimizer.model.{name}.{key}", value


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Return a digest of names and bytes."""
    sha = hashlib.blake2b(digest_size=8)
    for name in sorted(tensors):
        sha.update(name.encode())
        sha.update(tensors[name].detach().contiguous().numpy().tobytes())
    return sha.hexdigest()


def train(config: dict[str, Any]) -> None:
    """Train until killed or told to stop; say in a file what was restored."""
    trainer = Trainer(config.get("width", NARROW))
    ckpt = raycheck.attach(model=trainer.model, optimizer=trainer.optimizer)
    path = Path(f"{config['report']}-{config['rank']}")
    pace = Pace(Path(config["report"] + "-pace"), config["rank"], config["world_size"])
    report(path, restored=ckpt.current_step, digest=trainer.digest(), pid=os.getpid())
    while not os.path.exists(config["stop"]):
        pace.keep(ckpt.current_step)
        trainer.step(ckpt.current_step)
        time.sleep(config["step_s"])  # what else a step would do
        ckpt.step()


class Pace:
    """Keeps ranks within a step of each other, as gradients do, without failing when one is killed."""

    def __init__(self, path: Path, rank: int, world_size: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
        os.ftruncate(descriptor, 8 * world_size)
        self._steps = memoryview(mmap.mmap(descriptor, 8 * world_size)).cast("q")
        os.close(descriptor)
        self._rank = rank

    def keep(self, step: int) -> None:
        """Wait until nobody is further behind than this; not for long, since others may be gone."""
        self._steps[self._rank] = step
        end_s = time.monotonic() + _PACE_S
        while min(self._steps) < step - 1 and time.monotonic() < end_s:
            time.sleep(0.01)


def report(path: Path, **facts: Any) -> None:
    """Write facts to a file that appears whole."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(facts))
    temporary.rename(path)


class Expected:
    """What parameters and optimizer state are after each ``every``-th step, without raycheck.

    The default generator is part of the training: it is kept apart from all else here.
    """

    def __init__(self, width: int = NARROW, every: int = 1) -> None:
        self._width = width
        self._every = every
        self._digests: dict[int, str] = {}
        self._trainer: Trainer | None = None
        self._step = 0
        self._rng = torch.get_rng_state()

    def at(self, step: int) -> str:
        """Return the digest after ``step`` steps. Thread-safe."""
        assert step % self._every == 0, f"no digest is kept for step {step}"
        while step not in self._digests:
            # Others may want the generator as well.
            with _GENERATOR, torch.random.fork_rng(), _one_thread():
                self._advance(min(step, self._step + _STEPS_AT_A_TIME))
        return self._digests[step]

    def _advance(self, step: int) -> None:
        if self._trainer is None:
            self._trainer = Trainer(self._width)
            self._digests[0] = self._trainer.digest()
        else:
            torch.set_rng_state(self._rng)
        while self._step < step:
            self._trainer.step(self._step)
            self._step += 1
            if self._step % self._every == 0:
                self._digests[self._step] = self._trainer.digest()
        self._rng = torch.get_rng_state()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """As in the workers: the order of a sum depends on the number of threads."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
