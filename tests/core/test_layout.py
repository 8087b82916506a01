"""Keys, shard images, manifests."""

import dataclasses
import json

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from raycheck.core import layout
from raycheck.core.layout import (
    Chunk,
    Entry,
    Manifest,
    ShardInfo,
    decode_manifest,
    encode_manifest,
    shard_image,
    uncovered,
)
from raycheck.core.lineage import CheckpointRef, GenerationId
from raycheck.core.page import PAGE_BYTES, ControlPage, Plan
from raycheck.errors import CorruptCheckpointError

REF = CheckpointRef(1200, GenerationId(3, "0a1b2c3d"), 12)


@given(st.integers(0, 10**12), st.integers(1, 10**7), st.integers(1, 10**7))
def test_names_of_checkpoints_parse_back(step, number, plan_id):
    """Any step, also one with more digits than are padded."""
    ref = CheckpointRef(step, GenerationId(number, "0a1b2c3d"), plan_id)
    assert layout.parse_checkpoint_name(layout.checkpoint_prefix(ref).removeprefix("checkpoints/")) == ref


@pytest.mark.parametrize(
    "name", ["", "step-12", "x" + layout.checkpoint_prefix(REF), "manifest.json", "../x"]
)
def test_other_names_are_no_checkpoints(name):
    """What is not ours is not touched."""
    assert layout.parse_checkpoint_name(name) is None


def test_claims_and_records_are_told_apart():
    """One prefix holds both."""
    claim, record = (
        key(REF.generation).removeprefix("generations/") for key in (layout.claim_key, layout.record_key)
    )
    assert layout.parse_claim_name(claim) == REF.generation == layout.parse_record_name(record)
    assert layout.parse_claim_name(record) is None
    assert layout.parse_record_name(claim) is None


@given(
    st.lists(
        st.tuples(st.sampled_from([1, 2, 4, 8, 16]), st.lists(st.integers(0, 5), max_size=3)), max_size=12
    )
)
def test_an_image_is_a_valid_file_without_holes(kinds):
    """safetensors itself accepts it, and each tensor is aligned to its item size."""
    names = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64", 16: "complex128"}
    chunks = [
        Chunk(f"t{i}", names[item], item, tuple(shape), (0,) * len(shape), tuple(shape))
        for i, (item, shape) in enumerate(kinds)
    ]
    image = shard_image(chunks, rank=0)
    safetensors.deserialize(image.header + bytes(image.num_bytes - len(image.header)))
    assert len(image.header) % 4096 == 0
    for chunk, entry in zip(chunks, image.entries, strict=True):
        assert (entry.begin - len(image.header)) % chunk.item_bytes == 0
    assert image.num_bytes == len(image.header) + sum(chunk.num_bytes for chunk in chunks)


def test_a_name_twice_is_an_error():
    """One chunk per name and file."""
    chunk = Chunk("w", "uint8", 1, (4,), (0,), (2,))
    with pytest.raises(ValueError, match="two chunks of 'w'"):
        shard_image([chunk, chunk], rank=0)


def manifest():
    shards = tuple(ShardInfo(r, layout.shard_name(r, 2), 100, "0123abcd") for r in range(2))
    return Manifest(REF, 2, "ab" * 16, shards, 1.5, "w1", {"loss": 2.0})


def test_a_manifest_survives_the_store():
    """encode and decode are inverse."""
    assert decode_manifest(encode_manifest(manifest()), REF) == manifest()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", 2),
        ("step", 1199),
        ("shards", []),
        ("shards", [[0, "../../secret", 1, "0123abcd"], [1, "x", 1, "0123abcd"]]),
        (
            "shards",
            [[0, layout.shard_name(0, 2), -1, "0123abcd"], [1, layout.shard_name(1, 2), 1, "0123abcd"]],
        ),
        ("shards", [[0, layout.shard_name(0, 2), 1, None], [1, layout.shard_name(1, 2), 1, None]]),
        ("layout", "../x"),
        ("generation", 7),
        ("metrics", 3),
    ],
)
def test_a_damaged_or_forged_manifest_is_refused(field, value):
    """P1, P2: names outside the checkpoint, missing checksums, another step: none is used."""
    fields = json.loads(encode_manifest(manifest()))
    fields[field] = value
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json"):
        decode_manifest(json.dumps(fields).encode(), REF)


@given(st.binary(max_size=200))
def test_any_bytes_for_a_manifest_raise_one_error(data):
    """No input crashes the reader."""
    with pytest.raises(CorruptCheckpointError):
        decode_manifest(data, REF)


def test_the_page_keeps_words_and_the_newest_records():
    """Two views of one page see the same; the ring forgets the oldest."""
    memory = memoryview(bytearray(PAGE_BYTES))
    worker, agent = ControlPage(memory), ControlPage(memory)
    agent.plan = Plan(3, 2**39)
    agent.is_in_flight = True
    worker.step = 77
    assert worker.plan == (3, 2**39)
    assert worker.is_in_flight
    assert not worker.must_halt
    assert agent.step == 77
    for i in range(300):
        worker.record_step(i / 1000, 0.0, is_overlapped=i % 2 == 1)
    records = agent.records_since(0)
    assert records[-1].number == 299
    assert records[-1].duration_s == pytest.approx(0.299)
    assert records[-1].is_overlapped
    assert 100 < len(records) < 300
    assert [r.number for r in agent.records_since(297)] == [297, 298, 299]
    with pytest.raises(ValueError, match="does not fit"):
        agent.plan = Plan(1, 2**40)


def test_a_layout_that_lacks_or_repeats_a_part_is_told():
    """Before the first commit that uses it: nobody could restore from it."""
    first = Entry("w", "float32", (4, 3), (0, 0), (2, 3), -1, 0, 0, 24)
    second = Entry("w", "float32", (4, 3), (2, 0), (2, 3), -1, 1, 0, 24)
    assert uncovered([first, second]) is None
    assert "w have 6 elements in all, the tensor has 12" in uncovered([first])
    assert "w have 18 elements" in uncovered([first, second, second])
    other = dataclasses.replace(second, dtype="float16")
    assert "float16 [4, 3] on rank 1, elsewhere float32" in uncovered([first, other])
    assert uncovered([Entry("e", "float32", (0, 3), (0, 0), (0, 3), -1, 0, 0, 0)]) is None
