"""Memory by address: what is read without a system call is what one with it reads."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raycheck.state.spans import Peek, Scratch, as_addresses

MEMORY = np.random.default_rng(0).integers(0, 256, 1 << 16, dtype=np.uint8)
PLACES = st.integers(0, len(MEMORY) - 256)


@given(
    pieces=st.lists(st.tuples(PLACES, st.integers(1, 64)), min_size=1, max_size=50), is_aligned=st.booleans()
)
def test_both_ways_read_the_same(pieces, is_aligned):
    """In the order that was asked for; whatever is not made of aligned words is left to the kernel."""
    if is_aligned:
        pieces = [(at // 4 * 4, 4 * num_bytes) for at, num_bytes in pieces]
    starts = as_addresses([MEMORY.ctypes.data + at for at, _ in pieces])
    lengths = as_addresses([num_bytes for _, num_bytes in pieces])
    scratch = Scratch()
    peek = Peek.of(starts, lengths)
    if is_aligned:
        assert peek is not None
    if peek is not None:
        read, target = peek.take(), bytearray(peek.num_bytes + 1)
        # Chunks of single bytes before it leave a place in the arena that is aligned to nothing.
        peek.take(memoryview(target)[1:])
        assert read.tobytes() == bytes(scratch.take(starts, lengths)) == target[1:]
        assert read.tobytes() == b"".join(MEMORY[at : at + num].tobytes() for at, num in pieces)
    scratch.close()


def test_memory_that_is_given_up_is_left_to_the_kernel():
    """A null pointer among them, as a storage without memory has: the kernel answers with an error."""
    alive = MEMORY.ctypes.data
    assert Peek.of(as_addresses([alive, 0]), as_addresses([64, 64])) is None
    assert Peek.of(as_addresses([]), as_addresses([])) is None
