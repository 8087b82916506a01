"""Digests that tell whether the ranks hold the same shared tensors."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Iterator

import crc32c
import numpy as np
import numpy.typing as npt
import torch

from raycheck.state.held import HeldMemory
from raycheck.state.live import Acquaintance, Live
from raycheck.state.spans import SMALL_BYTES, Scratch, as_addresses

NUM_SAMPLES = 16
_BATCH_PIECES = 64


@dataclasses.dataclass(slots=True)
class Sample:
    """Bytes of the shared state, in an order that all ranks share."""

    label: str
    """Which part of the state this is: digests of different parts are not comparable."""

    where: npt.NDArray[np.intp]
    """Which of the shared tensors."""

    spans: npt.NDArray[np.int64]
    """Of each of them, address or 0 if it is not flat, first byte and end."""

    flat: npt.NDArray[np.intp]
    held: HeldMemory
    """Of the ``flat`` ones."""

    others: dict[int, torch.Tensor]
    """Aliases of those that are not, taken at the boundary: they survive ``.data =``."""

    def missing(self) -> list[int]:
        """Return which of the shared tensors have given up their memory. For the reading thread, before it reads."""
        return [int(self.flat[position]) for position in self.held.missing()]


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
    ends = np.cumsum(known.shared_bytes)
    begins, total = ends - known.shared_bytes, int(known.shared_bytes.sum())
    low, high, label = 0, total, "all"
    if plan_id & (plan_id - 1):
        part = plan_id % NUM_SAMPLES
        low, high, label = total * part // NUM_SAMPLES, total * (part + 1) // NUM_SAMPLES, f"{part:02d}"
    firsts, lasts = np.maximum(low - begins, 0), np.minimum(high, ends) - begins
    where = np.flatnonzero(firsts < lasts)
    are_flat = known.are_flat[where]
    addresses = np.where(are_flat, known.addresses[where].view(np.int64), 0)
    firsts, lasts, flat = firsts[where], lasts[where], where[are_flat]
    return Sample(
        label,
        where,
        np.stack([addresses, firsts, lasts], axis=1),
        flat,
        HeldMemory(
            list(map(live.tensors.__getitem__, flat.tolist())),
            (addresses + firsts)[are_flat].astype(np.uint64),
            (lasts - firsts)[are_flat].astype(np.uint64),
        ),
        {index: live.tensors[index].detach() for index in where[~are_flat].tolist()},
    )


def take_device_pieces(sample: Sample, owns: Callable[[torch.Tensor], bool]) -> list[torch.Tensor]:
    """Take the pieces in device memory out of a sample; return them as flat bytes, where they are."""
    pieces = []
    for index, (_, first, last) in zip(sample.where.tolist(), sample.spans.tolist(), strict=True):
        tensor = sample.others.get(index)
        if tensor is not None and owns(tensor):
            del sample.others[index]
            pieces.append(_bytes_of(tensor)[first:last])
    if pieces:
        is_left = (sample.spans[:, 0] != 0) | np.isin(sample.where, list(sample.others))
        sample.where, sample.spans = sample.where[is_left], sample.spans[is_left]
    return pieces


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().contiguous().view(-1).view(torch.uint8)


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

    for index, (address, start, end) in zip(sample.where.tolist(), sample.spans.tolist(), strict=True):
        is_small = address and end - start < SMALL_BYTES
        if not is_small or len(small) == _BATCH_PIECES:
            yield from flush()
        if is_small:
            small.append((address + start, end - start))
        elif address:
            yield address + start, end - start
        else:
            plain = _bytes_of(sample.others[index].cpu())
            yield plain.data_ptr() + start, end - start
    yield from flush()
