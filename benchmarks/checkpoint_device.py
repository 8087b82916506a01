"""Where the state of a benchmark lies: in host memory, or on a GPU, whose own clock is read as well."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Sequence
from typing import Any

import torch

from raycheck.state.device import Copier, Copies, CudaCopier, CudaTransfer
from raycheck.state.spans import copy_span


class Host:
    """Host memory: a stall is what the training thread is blocked for, and nothing else."""

    name = "cpu"

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None

    def synchronize(self) -> None:
        """Wait for what was launched."""

    def mark(self) -> Any:
        """Return a moment in the order of the device's work, if it has an order of its own."""

    def seconds_between(self, first: Any, second: Any) -> float | None:
        """Return what passed on the device's clock between two marks; None if it has none."""
        return None

    def copier(self) -> Copier | None:
        return None

    def copy_s(self, tensors: Sequence[torch.Tensor]) -> float:
        """Return how long it takes at least to copy all of them to host memory."""
        if self._map is None:
            self._map = mmap.mmap(-1, _num_bytes(tensors))
            self.copy_s(tensors)
        at = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        started_s = time.monotonic()
        for tensor in tensors:
            copy_span(at, tensor.data_ptr(), tensor.nbytes)
            at += tensor.nbytes
        return time.monotonic() - started_s


class Cuda:
    """The first GPU."""

    name = "cuda"

    def __init__(self) -> None:
        self._pinned: torch.Tensor | None = None
        self._copier = _TimedCopier(self)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        second.synchronize()
        return first.elapsed_time(second) / 1e3

    def copier(self) -> _TimedCopier:
        return self._copier

    def copy_s(self, tensors: Sequence[torch.Tensor]) -> float:
        if self._pinned is None:
            self._pinned = torch.empty(_num_bytes(tensors), dtype=torch.uint8, pin_memory=True)
        self.synchronize()
        begin, first = 0, self.mark()
        for tensor in tensors:
            flat = tensor.detach().reshape(-1).view(torch.uint8)
            self._pinned[begin : begin + len(flat)].copy_(flat, non_blocking=True)
            begin += len(flat)
        return self.seconds_between(first, self.mark())


class _TimedCopier(CudaCopier):
    """Ours, with marks around its copies."""

    def __init__(self, device: Cuda) -> None:
        super().__init__()
        self._device = device
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def launch(self, copies: Copies, to_fingerprint: Sequence[torch.Tensor] = ()) -> CudaTransfer:
        first = self._device.mark()
        transfer = super().launch(copies, to_fingerprint)
        for stream in self._streams.values():
            with torch.cuda.stream(stream):
                self._marks.append((first, self._device.mark()))
        return transfer

    def take_copy_s(self) -> float:
        """Return how long the copies since the last call took, of one snapshot: from their launch to their end."""
        marks, self._marks = self._marks, []
        return max((self._device.seconds_between(*each) for each in marks), default=0.0)


def device_named(name: str) -> Host | Cuda:
    return Cuda() if name == "cuda" else Host()


def _num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
