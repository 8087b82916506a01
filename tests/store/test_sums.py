"""Checksum records: exact, compact, and safe to read from anywhere."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycheck.core import sums as core_sums
from raycheck.core.sums import MAGIC, ChunkSums, combine
from raycheck.errors import CorruptCheckpointError
from raycheck.store.checksum import checksum, join_sums, sum_chunks, sums_of


@given(st.binary(max_size=300))
def test_plain_and_fast_checksums_agree(data):
    """The few bytes summed in Python have the sum that the library gives."""
    assert core_sums.crc32c(data) == checksum(data)


def test_known_value():
    """The check value of the CRC32C definition."""
    assert checksum(b"123456789") == 0xE3069283


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_sums_of_pieces_combine(first, second):
    """The sum of a whole follows from those of its pieces."""
    assert combine(checksum(first), checksum(second), len(second)) == checksum(first + second)


@given(st.binary(min_size=1, max_size=500), st.integers(1, 100))
def test_chunks_join_to_the_sum_of_the_part(data, chunk_bytes):
    """A part's sum follows from its chunks'."""
    sums = sum_chunks(data, chunk_bytes)
    assert join_sums(sums, chunk_bytes=chunk_bytes, size_bytes=len(data)) == checksum(data)


@given(st.binary(min_size=1, max_size=500), st.integers(1, 100))
def test_records_round_trip(data, chunk_bytes):
    """What is decoded is what was encoded, and the digest stays."""
    sums = sums_of(data, chunk_bytes)
    encoded = sums.encode()
    assert ChunkSums.decode(encoded) == sums
    assert len(encoded) == 24 + 4 * len(sums.sums)
    assert sums.digest() == f"{checksum(encoded):08x}"


@given(st.binary(max_size=100))
def test_any_other_bytes_are_refused(data):
    """Malformed input is a corrupt checkpoint, never a crash."""
    for candidate in (data, MAGIC + data):
        try:
            decoded = ChunkSums.decode(candidate)
        except CorruptCheckpointError:
            continue
        assert decoded.encode() == candidate


@given(st.data())
def test_a_damaged_record_is_refused_or_has_another_digest(data):
    """No change of a record goes unseen."""
    sums = sums_of(b"some data in chunks", 4)
    encoded = bytearray(sums.encode())
    position = data.draw(st.integers(0, len(encoded) - 1))
    encoded[position] ^= data.draw(st.integers(1, 255))
    try:
        decoded = ChunkSums.decode(bytes(encoded))
    except CorruptCheckpointError:
        return
    assert decoded.digest() != sums.digest()


@pytest.mark.parametrize(
    ("chunk_bytes", "size_bytes"),
    [(0, 1), (1, 0), (1, 1 << 49), (1 << 31, 5), (2**64 - 1, 2**64 - 1), (1, 2**64 - 1)],
)
def test_huge_claims_cost_nothing(chunk_bytes, size_bytes):
    """A record that claims terabytes is refused by its length."""
    record = struct.pack("<8sQQ", MAGIC, chunk_bytes, size_bytes) + bytes(4)
    with pytest.raises(CorruptCheckpointError):
        ChunkSums.decode(record)
