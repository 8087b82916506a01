"""Targets: the records of a run, and the names that listings give."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

from raycheck.core import layout, lineage
from raycheck.core.audit import Stretch, audit, decode_account
from raycheck.core.failure_rate import FailureRate
from raycheck.core.lineage import Ancestor, CheckpointRef, GenerationId, GenerationRecord
from raycheck.core.sums import ChunkSums
from raycheck.errors import CorruptCheckpointError
from raycheck.runtime.starting import recall_failure_rate
from raycheck.store.run import RunStore
from tests.fuzz.mutate import Mutator, words
from tests.fuzz.target import GENERATION, JSON_NUMBERS, OLDER, REF, OneObject, Target, check_types, manifest


def manifests() -> Target:
    """``manifest.json``."""

    def parse(data: bytes) -> bool:
        try:
            found = layout.decode_manifest(data, REF)
        except CorruptCheckpointError:
            return False
        check_types(found)
        assert found.ref == REF
        assert len(found.shards) == found.world_size
        text = layout.encode_manifest(found)
        assert layout.encode_manifest(layout.decode_manifest(text, REF)) == text
        return True

    seeds = [
        manifest(1),
        manifest(2),
        manifest(8),
        manifest(1, metrics={}),
        manifest(1, metrics={"a": float("nan")}),
    ]
    snippets = [
        *JSON_NUMBERS,
        *words(
            '"shard-00000-of-00001.safetensors" "../shard-00000-of-00001.safetensors" "/shard" "0123abcd" "..%2f"'
        ),
        *words(
            '[0,"shard-00000-of-00001.safetensors",4096,"00000000"] [3,"0a1b2c3d"] [true,"0a1b2c3d"] [3.0,"0a1b2c3d"]'
        ),
        *words('1200.0 12.0 3.0 1e999 {"loss":[1]} {"loss":null} [["a",1]] {"loader":{"format":1}}'),
        *(b'"' + b"ab" * 40 + b'"', b'{"loss":1' + b"0" * 400 + b"}"),
    ]
    return Target("manifest", Mutator([layout.encode_manifest(m) for m in seeds], snippets=snippets), parse)


def records() -> Target:
    """A generation's record, and the lineage that follows from it."""
    store = OneObject({layout.GENERATIONS: [layout.record_key(GENERATION).partition("/")[2]]})
    run = RunStore(store)  # type: ignore[arg-type]

    def parse(data: bytes) -> bool:
        store.data = data
        found = run.records()
        for record in found:
            check_types(record)
            assert record.generation == GENERATION, "a record under another generation's name"
            assert GenerationRecord.from_dict(record.to_dict()) == record
            for ref in lineage.selectable(lineage.tip(found), [OLDER, REF]):
                lineage.record_for(GenerationId(9, "ff"), world_size=1, parent=ref, tip_record=record)
        return bool(found)

    ancestor = Ancestor(GenerationId(1, "aa00"), 500)
    valid = [
        GenerationRecord(GENERATION, 4, None, ()),
        GenerationRecord(GENERATION, 4, OLDER, (ancestor, Ancestor(OLDER.generation, OLDER.step))),
        GenerationRecord(GENERATION, 1, OLDER, (Ancestor(OLDER.generation, OLDER.step),)),
    ]
    snippets = [
        *JSON_NUMBERS,
        *words('[3,"0a1b2c3d"] [4,"0a1b2c3d"] [3,"../x"] ["3","0a"] [1,"aa",true] [[1,"aa",5]] "ab" {"0":1}'),
        *words('[1100,2,"00ff00ff",3] [1100,2,"00ff00ff"] [1100.0,2,3,4] "é" [1,"١",5]'),
    ]
    seeds = [json.dumps(record.to_dict(), indent=1).encode() for record in valid]
    return Target("record", Mutator(seeds, snippets=snippets), parse)


class _Run(RunStore):
    """A run without checkpoints whose last start has ended or not."""

    has_ended = False

    def end_facts(self, generation: GenerationId) -> dict[str, Any] | None:
        return super().end_facts(generation) if self.has_ended else None

    def attempts(self) -> list[CheckpointRef]:
        return []


def facts() -> Target:
    """What claims and ends say, as far as the failure rate and the sweep."""
    claims = [layout.claim_key(GenerationId(n, GENERATION.id)).partition("/")[2] for n in (3, 4)]
    store = OneObject({layout.GENERATIONS: claims})
    store.sweep_uploads = lambda older_than_s: []  # type: ignore[attr-defined]
    run = _Run(store)  # type: ignore[arg-type]
    fresh = FailureRate()

    def parse(data: bytes) -> bool:
        store.data = data
        assert isinstance(run.claim_facts(GENERATION), dict)
        is_recalled = False
        for run.has_ended in (False, True):
            rate = recall_failure_rate(run, fresh)
            if rate is not fresh:
                is_recalled = True
                assert 0 < rate.gpu_days_per_failure < float("inf")
                assert 0 < rate.upper_per_gpu_day() < float("inf")
        run.sweep(GenerationId(4, GENERATION.id), older_than_s=3600.0, now_unix_s=1.7e9)
        return is_recalled

    rate = FailureRate(gpu_days=12.5, failures={"worker": 2, "node": 1}).to_dict()
    claim = {"claimed_unix_s": 1.6e9, "world_size": 8, "resume": "auto", "failure_rate": rate}
    valid = [
        claim,
        {**claim, "resume": 1200, "host": "node-1"},
        {"failure_rate": rate, "ended_unix_s": 1.6e9},
    ]
    snippets = [
        *JSON_NUMBERS,
        *words(
            '1e308 1e-308 5e-324 1e17 {"worker":1e400} {"worker":NaN} {"worker":-1} {"worker":"7"} {"worker":1e17}'
        ),
        *words(
            '{"x":1} {"prior_gpu_days_per_failure":1,"gpu_days":0,"failures":{}} [["worker",1]] "1e400" "nan" "12"'
        ),
        b'{"worker":' + b"9" * 4300 + b"}",
    ]
    return Target("facts", Mutator([json.dumps(each).encode() for each in valid], snippets=snippets), parse)


def accounts() -> Target:
    """What loaders say that they consumed, and the audit of it."""

    def parse(data: bytes) -> bool:
        try:
            account = decode_account(json.loads(data))
        except (ValueError, RecursionError):
            return False
        stretch = Stretch(generation="g1", from_step=0, to_step=5, world_size=1, accounts={"loader": account})
        assert audit([stretch, stretch])
        return True

    text = (
        '{"format": 1, "length": 100, "seed": 3, "shuffle": true, "epoch": 2, "consumed": 32, "world_size": 2,'
        ' "batch_size": 4, "global_batch_size": null, "runs": [[0, 0, 2, 32]], "remainder": "exact",'
        ' "may_split": true, "is_complete": true}'
    )
    snippets = [
        *JSON_NUMBERS,
        *words('[[0,0,0,100],[1,0,2,32]] [[0,0,100000000,32]] "drop" "pad" [0,0,2,32] 2 100'),
    ]
    return Target("accounts", Mutator([text.encode(), *_encoded_accounts()], snippets=snippets), parse)


def _encoded_accounts() -> list[bytes]:
    from raycheck.core.audit import Ledger, encode_account
    from raycheck.core.cursor import Cursor, Dealing

    start = Cursor(length=100, seed=3, shuffle=True)
    jumped = Ledger(start)
    jumped.move(start.at(1, 40), start.at(4))
    reached = (start.at(0, 32), start.at(3, 100), start.at(6, 8))
    dealing = Dealing(world_size=2, batch_size=4)
    ledgers = (Ledger(start), Ledger(start), jumped)
    return [
        json.dumps(encode_account(at, dealing, led)).encode()
        for at, led in zip(reached, ledgers, strict=True)
    ]


def sums() -> Target:
    """The checksums beside a shard."""

    def parse(data: bytes) -> bool:
        try:
            found = ChunkSums.decode(data)
        except CorruptCheckpointError:
            return False
        assert found.encode() == data
        assert len(found.digest()) == 8
        return True

    draw = random.Random(1).randrange
    seeds = [
        ChunkSums(chunk, size, tuple(draw(2**32) for _ in range(-(-size // chunk)))).encode()
        for chunk, size in ((1, 1), (1 << 20, 5), (1 << 20, 10 << 20), (100, 950))
    ]
    # Sizes that claim more, with the length that they need or without.
    seeds += [
        struct.pack("<8sQQ", b"RCKSUMS1", chunk, size) + bytes(4 * min(-(-size // max(chunk, 1)), 64))
        for chunk in (0, 1, 1 << 20, 1 << 30, (1 << 30) + 1, 2**63, 2**64 - 1)
        for size in (0, 1, 64, 1 << 30, 1 << 50, (1 << 50) + 1, 2**64 - 1)
    ]
    return Target("sums", Mutator(seeds, is_json=False, max_bytes=1 << 16), parse)


def names() -> Target:
    """Names in listings: each stands for one thing, whose key is that name."""
    parsers: list[tuple[Callable[[str], Any], Callable[[Any], str], Any]] = [
        (layout.parse_claim_name, layout.claim_key, GENERATION),
        (layout.parse_record_name, layout.record_key, GENERATION),
        (layout.parse_checkpoint_name, layout.checkpoint_prefix, REF),
    ]

    def parse(data: bytes) -> bool:
        # As the calls of an operating system give them.
        name = data.decode("utf-8", "surrogateescape")
        is_found = False
        for read, key_of, _ in parsers:
            parsed = read(name)
            if parsed is not None:
                is_found = True
                assert key_of(parsed).partition("/")[2] == name, (
                    f"{name!r} stands for {parsed}, whose name is another"
                )
        return is_found

    seeds = [key_of(value).partition("/")[2].encode() for _, key_of, value in parsers]
    digits = ["\u0660".encode(), "\uff10".encode(), b"00", b"0" * 5000, b"+0"]
    ends = [b"\n", b"/", b"/..", b"\0", b".json", b" "]
    more = [seed.replace(b"0", digit) for seed in seeds for digit in digits] + [
        s + end for s in seeds for end in ends
    ]
    return Target("names", Mutator(seeds + more, is_json=False, max_bytes=1 << 14), parse)
