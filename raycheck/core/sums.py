"""Checksums of an object by chunks: the record that stands beside a shard.

    8 bytes  magic
    8 bytes  chunk size in bytes, little endian
    8 bytes  object size in bytes
    4 bytes  CRC32C of chunk 0, then of chunk 1, ...

The digest of an object is the CRC32C of this record: it pins the sizes as well
as every byte, and is all that the manifest needs to hold. The CRC32C here is
plain Python, for a few hundred bytes; data is summed in ``store.checksum``.
"""

from __future__ import annotations

import array
import dataclasses
import functools
import struct
import sys

from raycheck.errors import CorruptCheckpointError

MAGIC = b"RCKSUMS1"
MAX_CHUNK_BYTES = 1 << 30
MAX_OBJECT_BYTES = 1 << 50
_HEADER = struct.Struct("<8sQQ")
_POLYNOMIAL = 0x82F63B78


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkSums:
    """CRC32C of every ``chunk_bytes`` of an object; the last chunk may be shorter."""

    chunk_bytes: int
    size_bytes: int
    sums: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 < self.chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(f"chunk_bytes={self.chunk_bytes}: must be from 1 to {MAX_CHUNK_BYTES}")
        if not 0 < self.size_bytes <= MAX_OBJECT_BYTES:
            raise ValueError(f"size_bytes={self.size_bytes}: must be from 1 to {MAX_OBJECT_BYTES}")
        if len(self.sums) != num_chunks(self.size_bytes, self.chunk_bytes):
            raise ValueError(f"{len(self.sums)} sums for {self.size_bytes} bytes")

    def encode(self) -> bytes:
        """Return the record as bytes, 24 plus 4 per chunk."""
        sums = array.array("I", self.sums)
        if sys.byteorder == "big":
            sums.byteswap()
        return _HEADER.pack(MAGIC, self.chunk_bytes, self.size_bytes) + sums.tobytes()

    @classmethod
    def decode(cls, data: bytes) -> ChunkSums:
        """Return what ``encode`` wrote.

        Bounded: memory and time grow with ``len(data)`` alone, whatever the
        record claims.

        Raises:
            CorruptCheckpointError: If ``data`` is anything else.
        """
        if len(data) < _HEADER.size:
            raise CorruptCheckpointError(f"checksum record of {len(data)} bytes is too short")
        magic, chunk_bytes, size_bytes = _HEADER.unpack_from(data)
        if magic != MAGIC:
            raise CorruptCheckpointError("not a checksum record")
        if not 0 < chunk_bytes <= MAX_CHUNK_BYTES or not 0 < size_bytes <= MAX_OBJECT_BYTES:
            raise CorruptCheckpointError(
                f"checksum record claims chunks of {chunk_bytes} bytes and an object of {size_bytes} bytes"
            )
        expected_bytes = _HEADER.size + 4 * num_chunks(size_bytes, chunk_bytes)
        if len(data) != expected_bytes:
            raise CorruptCheckpointError(
                f"checksum record has {len(data)} bytes, {expected_bytes} are needed for what it claims"
            )
        sums = array.array("I", data[_HEADER.size :])
        if sys.byteorder == "big":
            sums.byteswap()
        return cls(chunk_bytes, size_bytes, tuple(sums))

    def digest(self) -> str:
        """Return the CRC32C of the record as eight hexadecimal digits."""
        return f"{crc32c(self.encode()):08x}"


def num_chunks(size_bytes: int, chunk_bytes: int) -> int:
    """Return how many chunks an object of ``size_bytes`` has."""
    return -(-size_bytes // chunk_bytes)


def crc32c(data: bytes) -> int:
    """Return the CRC32C of a few bytes, in plain Python (about 10 MB/s)."""
    table = _table()
    state = 0xFFFFFFFF
    for byte in data:
        state = table[(state ^ byte) & 0xFF] ^ (state >> 8)
    return state ^ 0xFFFFFFFF


def combine(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC32C of A + B from those of A and B, where B has ``second_bytes``.

    Appending n zero bytes is a linear map of the 32 bits of a CRC, so a part's
    checksum comes from those of its chunks without reading the data again.
    """
    return _apply(_zeros_operator(second_bytes), first) ^ second


@functools.cache
def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (_POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


def _apply(matrix: tuple[int, ...], vector: int) -> int:
    result = 0
    for row in matrix:
        if vector & 1:
            result ^= row
        vector >>= 1
        if not vector:
            break
    return result


def _square(matrix: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(_apply(matrix, row) for row in matrix)


@functools.lru_cache(maxsize=64)
def _zeros_operator(num_bytes: int) -> tuple[int, ...]:
    """Return the map of a CRC over A to the one over A + ``num_bytes`` zeros, before B is added."""
    one_bit = (_POLYNOMIAL, *(1 << bit for bit in range(31)))
    power = _square(_square(_square(one_bit)))
    operator = tuple(1 << bit for bit in range(32))
    while num_bytes:
        if num_bytes & 1:
            operator = tuple(_apply(power, row) for row in operator)
        power = _square(power)
        num_bytes >>= 1
    return operator
