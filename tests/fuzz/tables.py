"""Targets: what is stored as Parquet."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raycheck.core import layout
from raycheck.core.layout import Entry
from raycheck.core.plan import TensorSpec, plan_reads
from raycheck.errors import CorruptCheckpointError
from raycheck.observe.events import _SCHEMA as EVENTS
from raycheck.observe.events import EventLog, read_events
from raycheck.store.run import _LAYOUT_SCHEMA as LAYOUT
from raycheck.store.run import RunStore, layout_digest, parse_layout
from tests.fuzz.mutate import Mutator
from tests.fuzz.target import OneObject, Target, bomb, check_types, manifest


def layout_rows(num_ranks: int = 2, num_tensors: int = 3) -> list[Entry]:
    """Return the entries of tensors that are dealt to ranks by rows, and of each rank's own values."""
    rows = []
    for rank in range(num_ranks):
        begin = 4096
        for i in range(num_tensors):
            extent = 4 + i
            boxes = (extent * num_ranks, 3), (extent * rank, 0), (extent, 3)
            rows.append(Entry(f"model.w{i}", "float32", *boxes, -1, rank, begin, extent * 12))
            begin += extent * 12
        rows.append(Entry("values", "uint8", (64,), (0,), (64,), rank, rank, begin, 64))
    return rows


def as_table(entries: list[Entry], **change: Any) -> list[dict[str, Any]]:
    """Return entries as rows of a table, the first of them changed."""
    rows = [dict(zip(LAYOUT.names, entry.to_row(), strict=True)) for entry in entries]
    return [{**rows[0], **change}, *rows[1:]]


def parquet(rows: list[dict[str, Any]] | pa.Table, schema: pa.Schema = LAYOUT, **options: Any) -> bytes:
    """Return a Parquet object."""
    sink = io.BytesIO()
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows, schema=schema)
    pq.write_table(table, sink, **{"compression": "zstd", **options})
    return sink.getvalue()


def layouts() -> Target:
    """A layout, as far as the reads that are planned from it."""
    store = OneObject({})
    run = RunStore(store)  # type: ignore[arg-type]
    rows = layout_rows()
    place = manifest(2, layout_digest=layout_digest(rows))
    specs = [TensorSpec(f"model.w{i}", "float32", 4, ((4 + i) * 2, 3)) for i in range(3)]
    wanted = [(spec.rows(0, spec.shape[0]), i << 20) for i, spec in enumerate(specs)]

    def parse(data: bytes) -> bool:
        store.data = data
        # The digest pins honest layouts. A forged one comes with a digest that agrees.
        try:
            entries = parse_layout(data, place)
        except CorruptCheckpointError:
            return False
        with contextlib.suppress(CorruptCheckpointError):
            assert run.read_layout(place) == entries
        for entry in entries:
            check_types(entry)
        with contextlib.suppress(LookupError):
            plan_reads(wanted, entries)
        return True

    return Target("layout", Mutator(_layout_seeds(rows), is_json=False, max_bytes=1 << 18), parse)


def _layout_seeds(rows: list[Entry]) -> list[bytes]:
    table = as_table(rows)
    seeds = [
        parquet(table),
        parquet(table, compression="none", use_dictionary=False),
        parquet(table, compression="snappy", data_page_version="2.0"),
        parquet(table, compression="gzip", write_statistics=False),
        parquet(table * 50, row_group_size=7),
        parquet([]),
        # Few bytes that claim many rows: one value each, repeated.
        parquet(table[:1] * 3_000),
    ]
    for field, values in {
        "name": [None, "../../x", "a\0b", "n" * 100_000],
        "dtype": [None, "O", "_dynamo"],
        "global_shape": [[2**60]],
        "offset": [[], [2**62, 2**62]],
        "shape": [None, [None], [2**40, 2**40], [-1, -1], [1] * 1000, [0, 2**62]],
        "owner": [None],
        "rank": [-1, 2**31 - 1],
        "begin": [2**63 - 1],
        "num_bytes": [-1, 2**63 - 1],
    }.items():
        seeds += [parquet(as_table(rows, **{field: value})) for value in values]
    # Other schemas: missing and further columns, other types, bytes that are no text.
    whole, count = pa.Table.from_pylist(table, schema=LAYOUT), len(table)
    seeds.append(parquet(whole.drop_columns(["name"])))
    seeds.append(parquet(whole.append_column("extra", pa.array([b"\xff" * 10] * count))))
    for name, column in {
        "name": [pa.array([b"\xff\xfe"] * count, pa.binary())],
        "dtype": [pa.array([{"a": 1}] * count)],
        "global_shape": [pa.array([["a"]] * count), pa.array([[[1]]] * count)],
        "begin": [
            pa.array([1.5] * count),
            pa.array([float("nan")] * count),
            pa.array([10**20] * count, pa.decimal128(30)),
        ],
        "num_bytes": [pa.array([1] * count, pa.uint64())],
    }.items():
        seeds += [parquet(whole.set_column(LAYOUT.names.index(name), name, values)) for values in column]
    return [*seeds, bomb(), b"PAR1" + bytes(64) + b"PAR1", b"PAR1PAR1"]


class _Sink:
    """A store that keeps what was written last."""

    data = b""

    def put(self, key: str, data: bytes) -> None:
        self.data = data


def telemetry() -> Target:
    """Events, as a report reads them."""
    store = OneObject({layout.TELEMETRY: ["events-00-000001.parquet"]})

    def parse(data: bytes) -> bool:
        store.data = data
        events = read_events(store)  # type: ignore[arg-type]
        for event in events:
            assert isinstance(event["kind"], str)
            assert isinstance(event["facts"], dict)
            assert isinstance(event["unix_s"], float)
        return bool(events)

    sink = _Sink()
    log = EventLog(sink)  # type: ignore[arg-type]
    for i in range(5):
        log.record("commit", "g000001-ab", step=i, stall_s=0.5, text="x" * i)
    log.flush()
    row = {"unix_s": 1.5, "kind": "commit", "generation": "g", "writer": "w", "facts": '{"step":1}'}
    seeds = [sink.data, bomb(), parquet([row] * 2_000, EVENTS), parquet([], EVENTS)]
    for field, values in {
        "facts": ["{", "[1]", "null", None, "[" * 100_000, "9" * 5000, '{"step":1e999}', '{"a":NaN}'],
        "unix_s": [None, float("nan")],
        "kind": [None],
        "writer": [None],
    }.items():
        seeds += [parquet([{**row, field: value}] * 3, EVENTS) for value in values]
    whole = pa.Table.from_pylist([row] * 3, schema=EVENTS)
    for changed in (
        whole.drop_columns(["facts"]),
        whole.set_column(4, "facts", pa.array([b"\xff"] * 3, pa.binary())),
        whole.set_column(0, "unix_s", pa.array(["a"] * 3)),
        whole.set_column(4, "facts", pa.array([{"a": 1}] * 3)),
    ):
        seeds.append(parquet(changed, compression="none", use_dictionary=False))
    return Target("telemetry", Mutator(seeds, is_json=False, max_bytes=1 << 18), parse)
