"""How objects are cut: every byte once, within the limits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycheck.store.backend import PartLimits
from raycheck.store.spans import Read, plan_parts, plan_windows

MIB = 1 << 20


@given(
    size_bytes=st.integers(1, 3000),
    chunk_bytes=st.integers(1, 50),
    default=st.integers(1, 100),
    least=st.integers(1, 100),
    max_parts=st.integers(1, 40),
)
def test_parts_cover_every_byte_once(size_bytes, chunk_bytes, default, least, max_parts):
    """Parts are in order, without gaps, within the limits, and hold whole chunks."""
    limits = PartLimits(min_part_bytes=least, max_parts=max_parts, default_part_bytes=default)
    parts = plan_parts(size_bytes, chunk_bytes=chunk_bytes, limits=limits)
    assert [part.number for part in parts] == list(range(len(parts)))
    assert [part.offset for part in parts] == [sum(p.length for p in parts[:n]) for n in range(len(parts))]
    assert sum(part.length for part in parts) == size_bytes
    assert len(parts) <= max_parts
    assert all(part.length >= least for part in parts[:-1])
    assert all(part.offset % chunk_bytes == 0 for part in parts)


@pytest.mark.parametrize(
    ("size_bytes", "num_parts", "part_bytes"),
    [(1, 1, 1), (16 * MIB, 1, 16 * MIB), (1 << 30, 64, 16 * MIB), (5 << 40, 9930, 528 * MIB)],
)
def test_parts_of_real_sizes(size_bytes, num_parts, part_bytes):
    """16 MiB parts until 10,000 of them are not enough."""
    parts = plan_parts(size_bytes, chunk_bytes=8 * MIB, limits=PartLimits())
    assert len(parts) <= 10_000
    assert (len(parts), parts[0].length) == (num_parts, part_bytes)


reads_of_300 = st.lists(
    st.tuples(st.integers(0, 300), st.integers(0, 80)).map(
        lambda pair: Read(pair[0], min(pair[1], 300 - pair[0]), 1000 + pair[0])
    ),
    max_size=12,
)


@given(reads=reads_of_300, chunk_bytes=st.integers(1, 70), window_bytes=st.integers(1, 150))
def test_windows_serve_every_read_and_fetch_nothing_twice(reads, chunk_bytes, window_bytes):
    """An oracle that marks bytes one by one agrees."""
    windows = plan_windows(reads, size_bytes=300, chunk_bytes=chunk_bytes, window_bytes=window_bytes)
    wanted_chunks = {
        b // chunk_bytes for r in reads for b in range(r.source_offset, r.source_offset + r.length)
    }
    fetched = [b for w in windows for b in range(w.offset, w.offset + w.length)]
    assert len(fetched) == len(set(fetched))
    assert {b // chunk_bytes for b in fetched} == wanted_chunks
    assert all(
        b in set(fetched)
        for c in wanted_chunks
        for b in range(c * chunk_bytes, min(300, (c + 1) * chunk_bytes))
    )
    assert all(w.length <= max(window_bytes, chunk_bytes) for w in windows)

    served = sorted(
        (b, read.destination_offset + b - read.source_offset)
        for window in windows
        for read in window.reads
        for b in range(read.source_offset, read.source_offset + read.length)
    )
    assert served == sorted(
        (b, r.destination_offset + b - r.source_offset)
        for r in reads
        for b in range(r.source_offset, r.source_offset + r.length)
    )
    for window in windows:
        for read in window.reads:
            assert window.offset <= read.source_offset
            assert read.source_offset + read.length <= window.offset + window.length


@pytest.mark.parametrize("read", [Read(5, 6, 0), Read(-1, 2, 0), Read(0, 1, -1), Read(11, 1, 0)])
def test_a_read_outside_the_object_is_refused(read):
    """Reads come from stored layouts: they are checked."""
    with pytest.raises(ValueError, match="outside"):
        plan_windows([read], size_bytes=10, chunk_bytes=4, window_bytes=8)
