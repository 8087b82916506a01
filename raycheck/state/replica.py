"""Digests that tell whether the ranks hold the same shared tensors."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Iterator

import crc32c
import numpy as np
import torch

from raycheck.state.live import Acquaintance, Live
from raycheck.state.spans import SMALL_BYTES, Scratch, as_addresses

NUM_SAMPLES = 16
_BATCH_PIECES = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """Bytes of the shared state, in an order that all ranks share."""

    label: str
    """Which part of the state this is: digests of different parts are not comparable."""

    pieces: list[tuple[torch.Tensor, int, int, int]]
    """Tensor, its address or 0 if it is not flat, first byte and end."""


def sample_of(live: Live, known: Acquaintance, plan_id: int) -> Sample:
    """Return the part of the shared state whose digest all ranks must agree on.

    A function of the plan alone, so that ranks which missed different plans
    still look at the same bytes: everything at plans 1, 2, 4, 8 and so on, and
    a rotating sixteenth at the others.

    Args:
        live: The tensors; the shared ones come first.
        known: What is known of them.
        plan_id: Counts from 1.
    """
    begins = np.concatenate([[0], np.cumsum(known.shared_bytes)])
    total = int(begins[-1])
    low, high, label = 0, total, "all"
    if plan_id & (plan_id - 1):
        part = plan_id % NUM_SAMPLES
        low, high, label = total * part // NUM_SAMPLES, total * (part + 1) // NUM_SAMPLES, f"{part:02d}"
    first = max(int(np.searchsorted(begins, low, side="right")) - 1, 0)
    last = int(np.searchsorted(begins, high, side="left"))
    pieces = []
    for index in range(first, min(last, live.num_shared)):
        begin, tensor = int(begins[index]), live.tensors[index]
        start, end = max(low - begin, 0), min(high, int(begins[index + 1])) - begin
        if start < end:
            is_flat = tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj()
            # An alias taken at the boundary survives ``.data =``.
            pieces.append((tensor.detach(), tensor.data_ptr() if is_flat else 0, start, end))
    return Sample(label, pieces)


def take_device_pieces(sample: Sample, owns: Callable[[torch.Tensor], bool]) -> list[torch.Tensor]:
    """Take the pieces in device memory out of a sample; return them as flat bytes, where they are."""
    taken = [piece for piece in sample.pieces if owns(piece[0])]
    if taken:
        sample.pieces[:] = [piece for piece in sample.pieces if not owns(piece[0])]
    return [
        tensor.resolve_conj().contiguous().view(-1).view(torch.uint8)[start:end]
        for tensor, _, start, end in taken
    ]


def digest_of(sample: Sample, scratch: Scratch) -> str:
    """Return the digest of a sample. Reads it once, mostly without the interpreter lock."""
    crc = 0
    for address, num_bytes in _joined(sample, scratch):
        # No copy: the checksum reads the memory where it is.
        crc = crc32c.crc32c((ctypes.c_char * num_bytes).from_address(address), crc)
    return f"{sample.label}-{crc:08x}"


def _joined(sample: Sample, scratch: Scratch) -> Iterator[tuple[int, int]]:
    """Yield addresses and lengths: large pieces where they are, neighbouring small ones gathered."""
    small: list[tuple[int, int]] = []

    def flush() -> Iterator[tuple[int, int]]:
        if small:
            addresses, lengths = zip(*small, strict=True)
            taken = np.frombuffer(scratch.take(as_addresses(addresses), as_addresses(lengths)), np.uint8)
            small.clear()
            yield taken.ctypes.data, len(taken)

    for tensor, address, start, end in sample.pieces:
        is_small = address and end - start < SMALL_BYTES
        if not is_small or len(small) == _BATCH_PIECES:
            yield from flush()
        if is_small:
            small.append((address + start, end - start))
        elif address:
            yield address + start, end - start
        else:
            plain = tensor.resolve_conj().cpu().contiguous().view(-1).view(torch.uint8)
            yield plain.data_ptr() + start, end - start
    yield from flush()
