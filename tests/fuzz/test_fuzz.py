"""Nothing in a checkpoint or a message can run code, crash or hang a reader, or take memory without end.

A slice of `benchmarks/fuzz.py`, always the same, and each fault that it found.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import logging
import os
import socket
import struct
import tempfile
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from raycheck.config import Settings
from raycheck.core import layout
from raycheck.core.cursor import decode_cursor
from raycheck.core.failure_rate import FailureRate
from raycheck.core.lineage import GenerationId, GenerationRecord
from raycheck.errors import CheckpointMismatchError, ConfigError, CorruptCheckpointError
from raycheck.observe.events import parse_events, read_events
from raycheck.runtime import wire
from raycheck.state.codec import Codec
from raycheck.state.rng import capture_rng, check_rng
from raycheck.store.objects import Store
from raycheck.store.run import RunStore, layout_digest, parse_layout
from raycheck.store.tables import iter_rows
from tests.fuzz import engine, records, sockets, targets
from tests.fuzz.mutate import Mutator, value_spans
from tests.fuzz.sockets import MESSAGES
from tests.fuzz.tables import layout_rows
from tests.fuzz.target import REF, Target, bomb, bomb_file, manifest
from tests.runtime.harness import wait_until

NUM_INPUTS = {"facts": 600, "agent": 600, "layout": 600, "telemetry": 400, "offer": 800, "state": 1200}


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    """Targets log nothing, and one listens to threads: both ends with the test."""
    monkeypatch.setattr(logging.getLogger("raycheck"), "disabled", False)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)


@pytest.mark.parametrize("name", sorted(targets.TARGETS))
@pytest.mark.filterwarnings("ignore")
def test_a_slice_of_every_parser(name, tmp_path):
    """Inputs made from valid ones: each is accepted, or refused with the documented error."""
    outcome = engine.fuzz(name, seed="tests", num_inputs=NUM_INPUTS.get(name, 2000), folder=tmp_path)
    assert outcome.faults == {}, f"inputs are in {tmp_path}"
    assert outcome.accepted > 0, "nothing came through: the inputs are too wild to find anything"
    assert outcome.refused > 0
    assert not os.path.lexists(bomb_file())


def test_the_bomb_would_be_seen():
    """The payload does run where something loads it, and the harness notices."""
    import pickle

    pickle.loads(bomb())
    with pytest.raises(AssertionError, match="executed"):
        targets.watched(lambda data: True, b"")
    os.rmdir(bomb_file())


def test_a_fault_is_told_from_a_refusal(monkeypatch):
    """A parser that raises what it should not is counted, with the place."""

    def parse(data):
        raise OverflowError

    broken = Target("sums", records.sums().mutator, parse)
    monkeypatch.setattr(records, "sums", lambda: broken)
    outcome = engine.fuzz("sums", seed="0", num_inputs=3)
    assert outcome.crashes == 3
    assert next(iter(outcome.faults)).startswith("OverflowError at")


def test_values_of_json_are_found():
    """Numbers, texts, keys and whole containers, also in what is no JSON any more."""
    text = b'{"a": [1, {"b": "x,]"}], "c": null}'
    found = {text[a:b] for a, b in value_spans(text)}
    assert found >= {b"1", b'"x,]"', b'{"b": "x,]"}', b'[1, {"b": "x,]"}]', b"null", b'"a"', text}
    assert value_spans(b"}}{[,") == []


def test_the_same_seed_makes_the_same_inputs():
    """So that a fault is found again."""
    import random

    first, second = (Mutator([b'{"a": 1, "b": [2, 3]}']) for _ in range(2))
    one, other = random.Random("x"), random.Random("x")
    assert [first(one) for _ in range(200)] == [second(other) for _ in range(200)]


class TestManifests:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("created_unix_s", 10**400),
            ("created_unix_s", float("inf")),
            ("world_size", True),
            ("write_id", {"a": 1}),
            ("metrics", [["loss", 1]]),
            ("metrics", {"loss": [1]}),
            ("metrics", {"loss": 10**400}),
            ("accounts", []),
        ],
    )
    def test_fields_of_another_kind(self, field, value):
        """Also a number beyond every float, which is an OverflowError in Python."""
        fields = {**json.loads(layout.encode_manifest(manifest(1))), field: value}
        with pytest.raises(CorruptCheckpointError):
            layout.decode_manifest(json.dumps(fields).encode(), REF)

    @pytest.mark.parametrize(("index", "value"), [(0, False), (2, True), (2, 1.0), (2, 2**70)])
    def test_shards_of_another_kind(self, index, value):
        """False is no rank, and True no size, although they equal 0 and 1."""
        fields = json.loads(layout.encode_manifest(manifest(1)))
        fields["shards"][0][index] = value
        with pytest.raises(CorruptCheckpointError):
            layout.decode_manifest(json.dumps(fields).encode(), REF)

    def test_a_step_that_equals_the_right_one(self):
        """1200.0 is taken, and it is the number of the key that counts."""
        text = layout.encode_manifest(manifest(1)).replace(b'"step": 1200,', b'"step": 1200.0,')
        assert type(layout.decode_manifest(text, REF).ref.step) is int

    def test_a_message_is_short(self):
        """What is damaged may be megabytes; the log is spared."""
        text = layout.encode_manifest(manifest(1)).replace(b'"ab', b'"' + b"x" * 10**6)
        with pytest.raises(CorruptCheckpointError) as caught:
            layout.decode_manifest(text, REF)
        assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "name",
    [
        "step-\u0660000001200-g000003-0a1b2c3d-p000012",
        "step-00000001200-g000003-0a1b2c3d-p000012",
        "step-" + "9" * 5000 + "-g000003-0a1b2c3d-p000012",
        "step-0000001200-g0000003-0a1b2c3d-p000012",
    ],
)
def test_a_checkpoint_has_one_name(name):
    """Digits of other scripts and further zeros would stand for a checkpoint that is elsewhere."""
    assert layout.parse_checkpoint_name(name) is None
    assert layout.parse_record_name("0000003-0a1b2c3d.json") is None
    assert layout.parse_claim_name("00000\u0663-0a1b2c3d.claim.json") is None


class TestRecords:
    @pytest.fixture
    def run(self, tmp_path):
        return RunStore(Store(str(tmp_path / "run")))

    def test_one_without_end_is_left_out(self, run):
        """Brackets that are never closed are a RecursionError in Python."""
        generation = run.claim({})
        for key in (layout.record_key(generation), layout.claim_key(generation), layout.end_key(generation)):
            run.store.put(key, b"[" * 100_000)
        assert run.records() == []
        assert run.claim_facts(generation) == {}
        assert run.end_facts(generation) == {}

    def test_one_under_another_name_is_left_out(self, run):
        """A record says whose it is; a copy under a higher number would be the tip."""
        record = GenerationRecord(GenerationId(1, "aa"), 1, None, ())
        run.write_record(record)
        run.store.put("generations/000009-bb.json", json.dumps(record.to_dict()).encode())
        assert run.records() == [record]

    @pytest.mark.parametrize(
        "change",
        [{"prior_gpu_days_per_failure": 5e-324}, {"gpu_days": 10**400}, {"failures": {"worker": 10**30}}],
    )
    def test_failures_that_no_run_can_have_seen(self, change):
        """They would overflow in the first decision, long after the claim was read."""
        with pytest.raises(ValueError, match="not a failure rate"):
            FailureRate.from_dict({**FailureRate().to_dict(), **change})


class TestTables:
    """Layouts and events, as Parquet."""

    ROWS = layout_rows()
    PLACE = manifest(
        2,
        layout_digest=layout_digest(ROWS),
        shards=tuple(layout.ShardInfo(r, layout.shard_name(r, 2), 8192, "0" * 8) for r in range(2)),
    )

    @staticmethod
    def parquet(rows, schema, **options):
        sink = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), sink, **options)
        return sink.getvalue()

    def layout(self, change=None, repeat=1):
        from raycheck.store.run import _LAYOUT_SCHEMA

        rows = [dict(zip(_LAYOUT_SCHEMA.names, entry.to_row(), strict=True)) for entry in self.ROWS]
        rows[0] |= change or {}
        return self.parquet(rows * repeat, _LAYOUT_SCHEMA, compression="zstd")

    def test_what_was_written_is_read(self):
        """The checks below refuse what is wrong and nothing else."""
        assert parse_layout(self.layout(), self.PLACE) == self.ROWS

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"name": None}, "lacks values"),
            ({"name": "n" * (2 << 20)}, "texts of more than"),
            ({"shape": [None, 3]}, "a shape that is none"),
            ({"shape": [2**40, 3]}, "outside its tensor"),
            ({"offset": [-1, 0]}, "outside its tensor"),
            ({"offset": [0]}, "a shape that is none"),
            ({"global_shape": [2**62, 3]}, "lacks some of its elements|two kinds"),
            ({"num_bytes": 2**63 - 1, "begin": 2**63 - 1}, "outside its shard"),
            ({"num_bytes": 13}, "no elements"),
            ({"num_bytes": 0}, "no size"),
            ({"num_bytes": 12 * 17}, "no size"),
            ({"rank": 2}, "in no shard"),
            ({"owner": 2}, "to no rank"),
            ({"owner": -2}, "to no rank"),
            ({"dtype": "float64"}, "two kinds"),
            ({"name": "model.w1"}, "two kinds|twice"),
        ],
    )
    def test_a_forged_layout(self, change, reason):
        """A digest can be made to agree; boxes that are none cannot."""
        with pytest.raises(CorruptCheckpointError, match=reason):
            parse_layout(self.layout(change), self.PLACE)

    def test_rows_without_end_are_not_kept(self):
        """A few kilobytes that hold one row a million times are refused at the second one."""
        data = self.layout(repeat=20_000)
        with pytest.raises(CorruptCheckpointError, match="twice in one shard"):
            parse_layout(data, self.PLACE)

    def test_more_rows_than_there_may_be(self):
        """Told from the file's end, before any is read."""
        with pytest.raises(ValueError, match="100 rows, 99 are the most"):
            list(
                iter_rows(
                    self.parquet([{"a": "x"}] * 100, pa.schema([("a", pa.string())])),
                    pa.schema([("a", pa.string())]),
                    max_rows=99,
                )
            )

    def test_text_that_is_none(self):
        """Bytes that are no UTF-8 are a UnicodeDecodeError in Python, and no crash."""
        schema = pa.schema([("a", pa.string())])
        data = self.parquet([{"a": "abcdefgh"}], schema, compression="none", use_dictionary=False)
        damaged = data.replace(b"abcdefgh", b"\xff\xfe\xfd\xfcefgh")
        assert damaged != data
        with pytest.raises(ValueError, match=r"table|utf|UTF"):
            list(iter_rows(damaged, schema, max_rows=9))

    @pytest.mark.parametrize(
        "damage",
        [b"", b"PAR1", b"PAR1" + bytes(100) + b"PAR1", bomb()],
        ids=str.split("empty mark marks pickle"),
    )
    def test_no_parquet_at_all(self, damage):
        """One error."""
        with pytest.raises(CorruptCheckpointError):
            parse_layout(damage, self.PLACE)
        with pytest.raises(ValueError, match=r"table|column"):
            parse_events(damage)

    def test_damaged_events_are_left_out_of_a_report(self, tmp_path):
        """The others are still told."""
        from raycheck.observe.events import EventLog

        store = Store(str(tmp_path / "run"))
        log = EventLog(store)
        log.record("commit", "g000001-aa", step=5)
        log.flush()
        store.put("telemetry/events-00000000-000001.parquet", b"PAR1 is what it begins with")
        assert [event["facts"] for event in read_events(store)] == [{"step": 5}]


class TestPlainValues:
    @pytest.mark.parametrize(
        "coded",
        [
            {"!": "timedelta", "v": [10**10, 0, 0]},
            {"!": "float", "v": 10**400},
            {"!": "torch.device", "v": "bogus"},
            {"!": "torch.device", "v": "cuda:99999999999"},
            {"!": "torch.Size", "v": ["a"]},
            {"!": "deque", "v": [], "maxlen": 10**30},
            {"!": "ndarray", "dtype": "(2,", "shape": [1], "v": "AAAA"},
            {"!": "ndarray", "dtype": [["a", "<f4"]], "shape": [1], "v": "AAAAAA=="},
            {"!": "ndarray", "dtype": "<f4,O", "shape": [1], "v": "AAAAAAAAAAAAAAAA"},
            {"!": "ndarray", "dtype": "<f4", "shape": [2**31, 2**31, 2**31], "v": "AAAAAA=="},
            {"!": "tensor", "v": "unknown"},
            {"!": "set", "v": [[1]]},
        ],
    )
    def test_arguments_that_are_none(self, coded):
        """Whatever a type's constructor makes of them, one error comes out."""
        with pytest.raises(CorruptCheckpointError):
            Codec().loads(json.dumps(coded).encode(), {})

    @pytest.mark.parametrize("kind", ["set", "frozenset", "dict", "Counter"])
    def test_keys_of_one_hash(self, kind):
        """Multiples of 2^61 - 1 all have the hash 0: a table of 100,000 would take minutes."""
        keys = [number * (2**61 - 1) for number in range(100_000)]
        value = [[key, 0] for key in keys] if kind in ("dict", "Counter") else keys
        with pytest.raises(CorruptCheckpointError, match="one hash"):
            Codec().loads(json.dumps({"!": kind, "v": value}).encode(), {})

    def test_many_keys_of_a_user(self):
        """Numbers, texts and pairs as they come are no attack."""
        codec = Codec()
        value = {
            "a": {i: i for i in range(5000)},
            "b": {(i, -i) for i in range(5000)},
            "c": {float(i) for i in range(5000)},
        }
        assert codec.loads(codec.to_bytes(codec.encode(value, "x", lambda path, tensor: path)), {}) == value

    @pytest.mark.parametrize("name", ["os.mkdir", "posix.mkdir", "tests.fuzz.target.Bomb", "", None, ["a"]])
    def test_a_payload_does_not_run(self, name):
        """Whatever type it claims to be."""
        coded = {"!": "pickle", "type": name, "v": base64.b64encode(bomb()).decode()}
        with pytest.raises(CorruptCheckpointError):
            Codec((Path,)).loads(json.dumps(coded).encode(), {})
        assert not os.path.lexists(bomb_file())


@pytest.mark.parametrize("position", [-1, 625, 2**31 - 1, 2**70, 1.0])
def test_random_states_that_are_none_are_refused_before_anything_changes(position):
    """NumPy takes any position, and reads outside its table at the next draw."""
    states = capture_rng()
    check_rng(states)
    before = np.random.get_state()[2]
    kind, table, _, *gauss = states["numpy"]
    with pytest.raises(ValueError, match="generator"):
        check_rng({**states, "numpy": (kind, table, position, *gauss)})
    for damaged in (
        {},
        None,
        {**states, "torch": np.zeros(3, np.uint8)},
        {**states, "python": (3, np.zeros(2), None)},
    ):
        with pytest.raises(ValueError):
            check_rng(damaged)
    assert np.random.get_state()[2] == before


@pytest.mark.parametrize(
    "value",
    [np.zeros(2), torch.zeros(2), True, 1.0, None, "1"],
    ids=["array", "tensor", "flag", "float", "none", "text"],
)
def test_a_data_position_of_another_kind(value):
    """An array that is compared gives another array."""
    state = {"format": 1, "length": 9, "seed": 0, "shuffle": False, "epoch": 0, "consumed": 0}
    state |= {"world_size": 1, "batch_size": 1, "global_batch_size": None}
    decode_cursor(state)
    with pytest.raises(CheckpointMismatchError):
        decode_cursor({**state, "format": value})
    with pytest.raises(CheckpointMismatchError):
        decode_cursor({**state, "epoch": 10**4299})


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "9" * 5000, '{"max_overhead": ' + "9" * 400 + "}", "\udcff", "{}x"]
)
def test_settings_that_are_none(text):
    """One error for whatever the variable holds."""
    with pytest.raises(ConfigError):
        Settings.from_json(text)


class TestMessages:
    @pytest.fixture
    def ends(self):
        ours, theirs = socket.socketpair()
        connection = wire.Connection(ours)
        yield connection, theirs
        connection.close()
        theirs.close()

    @pytest.mark.parametrize(
        "body", [b"[]", b"null", b'"x"', b"{}", b'{"op": 1}', b"[" * 50_000, b"9" * 5000, b"\xff"]
    )
    def test_a_body_that_is_none(self, ends, body):
        """It is a ValueError, which the agent logs and hangs up on."""
        connection, theirs = ends
        theirs.sendall(struct.pack("<I", len(body)) + body)
        with pytest.raises(ValueError):
            connection.receive()

    def test_a_descriptor_with_a_damaged_message_does_not_leak(self, ends):
        """The kernel has made it; whoever refuses the message closes it."""
        connection, theirs = ends
        with tempfile.TemporaryFile() as file:
            socket.send_fds(theirs, [struct.pack("<I", 2)], [file.fileno()])
            theirs.sendall(b"[]")
            before = len(os.listdir("/proc/self/fd"))
            with pytest.raises(ValueError, match="none"):
                connection.receive()
            assert len(os.listdir("/proc/self/fd")) == before

    def test_what_workers_say_passes(self):
        """Every message of the session, as it is sent."""
        for message in MESSAGES:
            assert wire.check_fields(json.loads(json.dumps(message))) is not None

    @pytest.mark.parametrize(
        "message",
        [
            {"op": "hello", "generation": [1, "../x"], "rank": 0, "world_size": 1, "has_joined": False},
            {"op": "hello", "generation": [1, "aa"], "rank": True, "world_size": 1, "has_joined": False},
            {"op": "missed"},
            {"op": "missed", "plan_id": -1},
            {
                "op": "staged",
                "plan": [1 << 24, 5],
                "num_bytes": 1,
                "stall_s": 0.0,
                "replica_digest": "",
                "metrics": {},
            },
            {"op": "read", "ref": None, "reads": []},
            {"op": "read", "ref": [5, 1, "aa", 1], "reads": [[0, -1, 5, 0]]},
            {"op": "table", "rows": [[1, 2, 3]]},
            {"op": "report", "ref": [5, 1, "aa"], "error": None, "is_mismatch": False},
            {"op": "unknown"},
        ],
    )
    def test_fields_that_are_none(self, message):
        """They are refused where they come in, and reach no coordinator."""
        with pytest.raises(ValueError, match=message["op"]):
            wire.check_fields(message)


def test_a_worker_that_comes_again_leaves_no_memory_behind():
    """Its snapshot is under way when it dies; its successor's connection takes its place, or its group's."""
    watched = sockets._Watched()
    hello, staged = (next(m for m in MESSAGES if m["op"] == op) for op in ("hello", "staged"))
    held = "/memfd:fuzz"

    def num_held():
        links = []
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                links.append(os.readlink(f"/proc/self/fd/{fd}"))
        return sum(link.startswith(held) for link in links)

    before = num_held()
    try:
        for number in range(1, 21):
            generation = [number // 2 + 1, "aa"]
            watched.hear(
                [json.dumps(each).encode() for each in ({**hello, "generation": generation}, staged)]
            )
        # The last one's, until its attempt ends: descriptor and page.
        wait_until(lambda: num_held() <= before + 2, "the agent to let go of former workers' memory")
        watched.settle()
        wait_until(lambda: num_held() == before, "the agent to let go of the last one's")
    finally:
        watched.agent.close()


@pytest.mark.parametrize("name", ["quint8", "qint32", "quint4x2", "_dynamo", "Tensor", "nn.Module", ""])
def test_a_dtype_that_no_snapshot_has(name):
    """A layout names it: one error, before a tensor is made, and nothing is imported to find out."""
    from raycheck.state.restore import _dtype

    with pytest.raises(CorruptCheckpointError, match="which this torch does not know"):
        _dtype(name)
    assert _dtype("bfloat16") is torch.bfloat16
