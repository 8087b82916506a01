"""Copying out of GPU memory while the GPU goes on: all CUDA calls of a snapshot are here.

The copies are work of the GPU like any other, on a stream of their own: they
begin behind what had been launched at the step boundary, and what must not
overtake them (the optimizer's update) is launched behind them. Nobody on the
host waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

logger = logging.getLogger("raycheck")

Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Sources in device memory, and where each goes in host memory; of one shape and dtype."""

_ROW_BYTES = 4096


class Transfer(Protocol):
    """Copies that have been launched. Its memory must live until it is done."""

    def hold_back(self) -> None:
        """Let what is launched from now on begin only after the copies. Does not block."""

    @property
    def is_done(self) -> bool:
        """Whether all bytes have arrived."""

    def wait(self) -> None:
        """Block this thread, without the interpreter lock, until they have."""

    def held_back_s(self) -> float:
        """Return for how long the device stood still in `hold_back`; called when it is done."""

    def fingerprints(self) -> bytes:
        """Return what was asked for with the copies; called when it is done."""


class Copier(Protocol):
    """Launches copies out of device memory."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in memory that this copies from."""

    def pin(self, address: int, num_bytes: int) -> None:
        """Make host memory fit for fast copies."""

    def unpin(self, address: int) -> None:
        """Undo `pin`, before the memory is given up; nothing if it was not pinned."""

    def launch(self, copies: Copies, to_fingerprint: Sequence[torch.Tensor] = ()) -> Transfer:
        """Copy, and take fingerprints of flat uint8 tensors, behind all that has been launched."""


def fingerprint(data: torch.Tensor) -> torch.Tensor:
    """Return five numbers that tell whether bytes and their order are the same.

    Sums over rows and columns of a table, with and without weights: a few
    reductions that run where the bytes are, exact in 64 bits.

    Args:
        data: uint8, flat.
    """
    num_rows = len(data) // _ROW_BYTES
    table = data[: num_rows * _ROW_BYTES].view(num_rows, _ROW_BYTES)
    rows, columns = table.sum(1, dtype=torch.int64), table.sum(0, dtype=torch.int64)
    rest = data[num_rows * _ROW_BYTES :].to(torch.int64)
    return torch.stack([rows.sum(), _weighted(rows), _weighted(columns), rest.sum(), _weighted(rest)])


def _weighted(values: torch.Tensor) -> torch.Tensor:
    return (values * torch.arange(1, len(values) + 1, device=values.device)).sum()


class CudaTransfer:
    """Copies on CUDA streams, one event for each device."""

    def __init__(
        self,
        done: dict[torch.device, torch.cuda.Event],
        copies: Copies,
        prints: list[torch.Tensor],
    ) -> None:
        self._done = done
        # The allocator must not give the sources' memory to anyone else meanwhile.
        self._copies = copies
        self._prints = prints
        self._held: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def hold_back(self) -> None:
        """Have the current stream of each device wait for the copies."""
        for device, done in self._done.items():
            if done.query():
                continue
            stream = torch.cuda.current_stream(device)
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record(stream)
            stream.wait_event(done)
            after.record(stream)
            self._held.append((before, after))

    @property
    def is_done(self) -> bool:
        """Whether all events have been passed."""
        return all(done.query() for done in self._done.values())

    def wait(self) -> None:
        """Block until all events have been passed."""
        for done in self._done.values():
            done.synchronize()

    def held_back_s(self) -> float:
        """Return the longest wait of any device, from the events around it."""
        longest_s = 0.0
        for before, after in self._held:
            # Copies that were done before the stream came to the wait have held nothing back.
            if before.query():
                after.synchronize()
                longest_s = max(longest_s, before.elapsed_time(after) / 1e3)
        return longest_s

    def fingerprints(self) -> bytes:
        """Return the numbers of all tensors, in their order."""
        return b"".join(numbers.numpy().tobytes() for numbers in self._prints)


class CudaCopier:
    """Copies from CUDA memory on a side stream per device. Used by one thread, except `pin`."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pinned: set[int] = set()

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether it is a CUDA tensor."""
        return tensor.is_cuda

    def pin(self, address: int, num_bytes: int) -> None:
        """Register memory with the driver; without it copies are slower, and no less right."""
        self.unpin(address)
        register: Callable[..., object] = torch.cuda.cudart().cudaHostRegister
        result = register(address, num_bytes, 0)
        if int(getattr(result, "value", result)) != 0:  # type: ignore[call-overload]
            logger.warning(
                "%d MB of host memory could not be pinned (%s): copies from the GPU are slower",
                num_bytes >> 20,
                result,
            )
            return
        self._pinned.add(address)

    def unpin(self, address: int) -> None:
        """Unregister the memory, if it is registered."""
        if address in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)
            self._pinned.remove(address)

    def launch(self, copies: Copies, to_fingerprint: Sequence[torch.Tensor] = ()) -> CudaTransfer:
        """Launch the copies of each device on its side stream."""
        devices = list(dict.fromkeys(tensor.device for tensor, _ in copies))
        devices += [t.device for t in to_fingerprint if t.device not in devices]
        done: dict[torch.device, torch.cuda.Event] = {}
        prints: dict[int, torch.Tensor] = {}
        for device in dict.fromkeys(devices):
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            stream = self._streams[device]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for source, target in copies:
                    if source.device == device:
                        target.copy_(source, non_blocking=True)
                for index, data in enumerate(to_fingerprint):
                    if data.device == device:
                        numbers = torch.empty(5, dtype=torch.int64, pin_memory=True)
                        prints[index] = numbers.copy_(fingerprint(data), non_blocking=True)
            done[device] = torch.cuda.Event()
            done[device].record(stream)
        # The views of what is read belong to the transfer, too.
        kept = [*copies, *((data, data) for data in to_fingerprint)]
        return CudaTransfer(done, kept, [prints[index] for index in sorted(prints)])


def default_copier() -> Copier | None:
    """Return the copier of this machine, if it has a GPU."""
    return CudaCopier() if torch.cuda.is_available() else None
