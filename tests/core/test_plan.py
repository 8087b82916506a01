"""Planning who writes and reads which bytes."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycheck.core import plan as planning
from raycheck.core.layout import Chunk, shard_image
from raycheck.core.plan import TensorSpec, deal, plan_reads

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@st.composite
def spec_lists(draw):
    return [
        TensorSpec(f"t{i}", f"int{8 * size}", size, draw(shapes))
        for i, size in enumerate(draw(st.lists(st.sampled_from([1, 2, 4, 8]), max_size=8)))
    ]


@pytest.fixture(autouse=True)
def _small_split(monkeypatch):
    monkeypatch.setattr(planning, "SPLIT_ABOVE_BYTES", 16)


def filled(spec: TensorSpec) -> np.ndarray:
    count = math.prod(spec.shape)
    seed = sum(spec.name.encode())
    return (np.arange(seed, seed + count) % 120).astype(spec.dtype).reshape(spec.shape)


def box(array: np.ndarray, chunk: Chunk) -> np.ndarray:
    return array[tuple(slice(o, o + n) for o, n in zip(chunk.offset, chunk.shape, strict=True))]


def write(specs, num_ranks):
    """Write all shards in memory as ranks would, from the formulas alone."""
    files, entries = [], []
    for rank, share in enumerate(deal(specs, num_ranks)):
        image = shard_image(share, rank=rank)
        data = bytearray(image.num_bytes)
        data[: len(image.header)] = image.header
        by_name = {spec.name: spec for spec in specs}
        for chunk, entry in zip(share, image.entries, strict=True):
            value = box(filled(by_name[chunk.name]), chunk).tobytes()
            data[entry.begin : entry.begin + entry.num_bytes] = value
        files.append(bytes(data))
        entries += image.entries
    return files, entries


@settings(max_examples=150, deadline=None)
@given(spec_lists(), st.integers(1, 5), st.integers(1, 5))
def test_what_one_world_size_wrote_any_other_reads(specs, num_writers, num_readers):
    """Dealing and reading are inverse at any pair of world sizes."""
    files, entries = write(specs, num_writers)
    by_name = {spec.name: spec for spec in specs}
    seen = 0
    for share in deal(specs, num_readers):
        places, end = [], 0
        for chunk in share:
            places.append((chunk, end))
            end += chunk.num_bytes
        memory = bytearray(end)
        for read in plan_reads(places, entries):
            memory[read.destination : read.destination + read.num_bytes] = files[read.rank][
                read.source : read.source + read.num_bytes
            ]
        for chunk, begin in places:
            want = box(filled(by_name[chunk.name]), chunk).tobytes()
            assert bytes(memory[begin : begin + chunk.num_bytes]) == want
        seen += end
    assert seen == sum(spec.num_bytes for spec in specs)


def test_the_deal_is_even():
    """No rank writes more than its part and one row."""
    specs = [TensorSpec(f"t{i}", "float32", 4, (1000, 10)) for i in range(7)]
    sizes = [sum(chunk.num_bytes for chunk in share) for share in deal(specs, 4)]
    assert max(sizes) - min(sizes) <= 2 * 40


def test_boxes_of_two_dimensions_overlap_by_runs():
    """A column block is read row by row out of row blocks."""
    array = np.arange(24, dtype=np.int8).reshape(4, 6)
    top = shard_image([Chunk("w", "int8", 1, (4, 6), (0, 0), (2, 6))], rank=0)
    bottom = shard_image([Chunk("w", "int8", 1, (4, 6), (2, 0), (2, 6))], rank=1)
    files = [bytes(image.header) + array[r : r + 2].tobytes() for image, r in ((top, 0), (bottom, 2))]
    want = Chunk("w", "int8", 1, (4, 6), (1, 2), (2, 3))
    memory = bytearray(6)
    for read in plan_reads([(want, 0)], top.entries + bottom.entries):
        memory[read.destination : read.destination + read.num_bytes] = files[read.rank][
            read.source : read.source + read.num_bytes
        ]
    assert bytes(memory) == array[1:3, 2:5].tobytes()


def test_a_missing_box_is_named():
    """What the layout does not cover is an error that names the tensor."""
    image = shard_image([Chunk("w", "int8", 1, (4,), (0,), (2,))], rank=0)
    with pytest.raises(LookupError, match="w"):
        plan_reads([(Chunk("w", "int8", 1, (4,), (0,), (4,)), 0)], image.entries)
