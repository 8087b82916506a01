"""Targets: plain values, and what takes them: live objects, loaders, the plan of a restore."""

from __future__ import annotations

import base64
import collections
import contextlib
import datetime
import json
import random
import warnings
from typing import Any

import numpy as np
import torch

from raycheck.core import layout
from raycheck.core.layout import Entry
from raycheck.data.loader import DataLoader
from raycheck.data.sampler import ElasticBatchSampler, ElasticSampler
from raycheck.errors import CheckpointMismatchError, CorruptCheckpointError, StateError
from raycheck.state.codec import Codec
from raycheck.state.restore import Restorer
from raycheck.state.rng import restore_rng
from tests.fuzz.mutate import Mutator, words
from tests.fuzz.target import JSON_NUMBERS, Target, bomb, check_types, manifest
from tests.state.rank import Rank


def values() -> Target:
    """The text of the plain values."""
    codec = Codec()
    tensors = {"model.weight": torch.zeros(2), "optimizer.weight.exp_avg": torch.zeros(2)}

    def parse(data: bytes) -> bool:
        try:
            codec.loads(data, tensors)
        except CorruptCheckpointError:
            return False
        return True

    return Target("values", Mutator(_seeds(codec), snippets=hostile_values()), parse)


def _seeds(codec: Codec) -> list[bytes]:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    valid = [
        {"a": 1, "b": [1.5, None, True, "text"], "c": (1, 2), "d": {1: 2, (1, 2): 3}},
        {"array": array, "scalar": np.float64(3.5), "empty": np.zeros((0, 3)), "text": np.array(["a", "bc"])},
        {
            "s": {1, 2},
            "f": frozenset({"a"}),
            "q": collections.deque([1, 2], 5),
            "k": collections.Counter("aab"),
        },
        {
            "o": collections.OrderedDict(a=1),
            "dtype": torch.float32,
            "size": torch.Size([1, 2]),
            "t": torch.zeros(2),
        },
        {"device": torch.device("cpu"), "bytes": b"abc", "complex": 1 + 2j, "nan": float("nan")},
        {"delta": datetime.timedelta(1, 2, 3), "day": datetime.date(2024, 1, 2), "time": datetime.time(1, 2)},
    ]
    return [
        codec.to_bytes(codec.encode(value, "state", lambda path, tensor: "model.weight")) for value in valid
    ]


def _tagged(tag: Any, value: Any, **fields: Any) -> bytes:
    return json.dumps({"!": tag, "v": value, **fields}).encode()


_ARGUMENTS: dict[str, list[Any]] = {
    "bytes ndarray": [
        "A" * 60000,
        "=",
        "====",
        "A",
        "AA",
        "AAA",
        "\ud800",
        "!!!!",
        "AAAA\nAAAA",
        "é",
        5,
        None,
        [1],
    ],
    "torch.device torch.dtype": [
        *(
            [
                "cuda:99999999999",
                "cuda:-1",
                "cpu",
                "cuda",
                "meta",
                "bogus",
                "cuda:1e9",
                "cpu:0",
                "\x00",
                "mps:x",
                "torch.float32",
                "torch.load",
                "float32",
            ]
        ),
        *("", 5, -1, 2**70, None, [], {}),
    ],
    "torch.Size": [[2**70], [-1], ["a"], 5, "12", None, [1.5], [True], [2**63], {"a": 1}],
    "timedelta": [
        [10**9, 0, 0],
        [10**400, 0, 0],
        [1e400],
        "abc",
        [1] * 8,
        {},
        5,
        [None],
        [-(10**9), 0, 0],
        [1e308, 1, 1],
    ],
    "datetime date time": [
        *(
            [
                "2020-01-01",
                "2020-01-01T00:00:00+99:99",
                "0000-00-00",
                "9999-12-31T23:59:59.999999+23:59",
                "00:00",
            ]
        ),
        *("", 5, None, "\ud800", "1" * 5000),
    ],
    "float complex": [
        "nan",
        "1e999",
        "1" * 5000,
        "1_0",
        10**400,
        None,
        [],
        "(1+2j)",
        "x" * 60000,
        True,
        {"!": 1, "v": 1},
    ],
    "dict OrderedDict Counter": [
        *(
            [[1, 2]],
            [[[1], 2]],
            [[{"!": "tuple", "v": [1, [2]]}, 1]],
            [1],
            [[1]],
            "ab",
            {"ab": 1},
            [["a", "b", "c"]],
        ),
        *(5, [[1, "x"], [1, 2]], [[None, None]], [[1.0, 1], [True, 2]]),
    ],
    "tuple set frozenset deque": [
        *([1, 2], [[1]], "ab", {"a": 1}, 5, None, [{"!": "set", "v": [1]}], [{"!": "float", "v": "nan"}] * 3),
    ],
    "tensor": ["model.weight", "unknown", "", None, [], {}, 5, "../x", "__class__"],
    "! object __reduce__ eval module torch.Tensor torch.load numpy.ndarray": [1],
}
"""By tags, what their types' constructors are given."""

_DTYPES: list[Any] = [
    *(
        [
            "<f4",
            "|O",
            "O",
            "object",
            "O8",
            "<f4,O",
            "V0",
            "S0",
            "U0",
            "V8",
            "<U4",
            "S3",
            "M8[ns]",
            "m8",
            "M8[",
            "?",
            "c16",
            ">i8",
            "V1000000000000",
            "U999999999",
            "(2,3)f4",
        ]
    ),
    *(
        [
            "(1000000,1000000)f4",
            "(1000000,1000000,1000000)f4",
            "i4,,i4",
            "float32",
            "bfloat16",
            "f16",
            "f99",
            "x",
            "(",
            "(2,",
            "1",
            "2f4",
            "\x00",
        ]
    ),
    *(
        "",
        "f4," * 500,
        "a" * 10000,
        "99999999999999999999f4",
        [["a", "<f4"]],
        [["a", "O"]],
        None,
        5,
        True,
        [],
    ),
    *(
        {"names": ["a"], "formats": ["O"], "offsets": [0]},
        {"names": ["a"], "formats": ["<f4"], "itemsize": 2**62},
    ),
]
_SHAPES: list[Any] = [
    *(
        [-1],
        [16, -1],
        [-1, -1],
        [2**62],
        [2**31] * 3,
        [0, 2**62],
        [],
        "abc",
        16,
        None,
        [4, 4.0],
        ["4", 4],
        [2**64],
    ),
    *([-16], [1] * 70, [1] * 32, {"a": 1}, [[4, 4]], [0], True, "16"),
]
_PICKLED: list[Any] = [
    *(
        [
            "posix.mkdir",
            "os.mkdir",
            "builtins.eval",
            "builtins.dict",
            "collections.OrderedDict",
            "tests.fuzz.target.Bomb",
        ]
    ),
    *("numpy.ndarray", "torch.Tensor", "..", "", [], {}, 1, None, True, ["os.mkdir"]),
]


def hostile_values() -> list[bytes]:
    """Return coded values that are none, and payloads that no reader may run."""
    payload, zeros = base64.b64encode(bomb()).decode(), base64.b64encode(bytes(64)).decode()
    made = [_tagged("pickle", payload, type=name) for name in _PICKLED]
    for tags, arguments in _ARGUMENTS.items():
        made += [_tagged(tag, value, dtype="|u1", shape=[-1]) for tag in tags.split() for value in arguments]
    for dtype in _DTYPES:
        made.append(_tagged("ndarray", zeros, dtype=dtype, shape=[16]))
        made.append(_tagged("npscalar", zeros[:11] + "=", dtype=dtype, shape=[]))
    for shape in _SHAPES:
        made += [_tagged("ndarray", data, dtype="<f4", shape=shape) for data in (zeros, "")]
        made.append(_tagged("npscalar", zeros, dtype="<f4", shape=shape))
    made += [
        _tagged("deque", [1, 2, 3], maxlen=most) for most in (0, 2, -1, 10**30, "a", None, 1.5, True, [])
    ]
    made += words(
        '{"!":null,"v":null} {"!":[],"v":[]} {"!":"tuple"} {"!":{"!":"tuple","v":[]},"v":1} {"v":1}'
    )
    nested = b"1"
    for _ in range(300):
        nested = b'{"!":"tuple","v":[' + nested + b"]}"
    made += [nested, b'{"!":"set","v":[' + nested + b"]}", b'{"!":"dict","v":[[' + nested + b",1]]}"]
    # Keys that all have one hash: a table of them takes quadratic time.
    keys = [number * (2**61 - 1) for number in range(1500)]
    made += [_tagged("set", keys), _tagged("dict", [[key, 0] for key in keys])]
    return made + JSON_NUMBERS


class _OnText(Restorer):
    """The end of a restore, given the text of the values."""

    def __init__(self, rank: Rank) -> None:
        self._tree, self._codec, self._targets = rank.tree, rank.codec, rank.live()
        self.unmatched, self.text = [], b""

    def _values(self) -> dict[str, Any]:
        loaded = self._codec.loads(self.text, self._targets, self._wants)
        if not isinstance(loaded, dict) or "rng" not in loaded:
            raise CorruptCheckpointError("stored values are damaged: no generators among them")
        return loaded


def _model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    return model, optimizer


def state() -> Target:
    """Plain values as far as the check of the live objects, and the random generators after it."""
    model, optimizer = _model_and_optimizer()
    rank = Rank(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 3),
        loader=DataLoader(range(100), batch_size=4, shuffle=True, rank=0, world_size=1),
        note=7,
        settings={"lr": 0.1, "names": ["a", "b"]},
        extra=torch.zeros(3),
    )
    shard, entries = rank.save()
    found = next(entry for entry in entries if entry.name == "values")
    text = shard[found.begin : found.begin + found.num_bytes].rstrip()
    restorer = _OnText(rank)

    def parse(data: bytes) -> bool:
        restorer.text, restorer.unmatched = data, []
        try:
            restorer.check()
        except (CorruptCheckpointError, CheckpointMismatchError):
            return False
        restore_rng(restorer._values()["rng"])
        # A generator in a state that is none would read outside its table here.
        random.random()
        np.random.bytes(8)
        torch.rand(1)
        return True

    return Target("state", Mutator([text], snippets=hostile_values()), parse)


def loaders() -> Target:
    """Positions in the data, taken by loader and samplers."""
    warnings.simplefilter("ignore")
    codec = Codec()
    place = {"rank": 0, "world_size": 2}
    takers: list[Any] = [
        DataLoader(range(100), batch_size=4, shuffle=True, **place),  # type: ignore[arg-type]
        ElasticBatchSampler(range(100), 4, **place),
        ElasticSampler(range(100), 4, shuffle=True, seed=3, **place),
    ]
    seeds = []
    for taker, epoch, batches in ((takers[0], 0, 3), (takers[1], 2, 12), (takers[2], 1, 1)):
        taker.set_epoch(epoch)
        taker.advance(batches)
        seeds.append(json.dumps(taker.state_dict()).encode())
    tensors = {"t": torch.zeros(2), "one": torch.tensor(1)}

    def parse(data: bytes) -> bool:
        try:
            saved = codec.loads(data, tensors)
        except CorruptCheckpointError:
            return False
        return any([_takes(taker, saved) for taker in takers])  # all of them, not the first that does

    array = '{"!":"ndarray","dtype":"<i8","shape":[2],"v":"AQAAAAAAAAABAAAAAAAAAA=="}'
    snippets = [
        *JSON_NUMBERS,
        *words(
            f'{array} {{"!":"npscalar","dtype":"<i8","shape":[],"v":"AQAAAAAAAAA="}} {{"!":"float","v":"nan"}}'
        ),
        *words('{"!":"tensor","v":"t"} {"!":"tensor","v":"one"} {"!":"dict","v":[]} 100 101 99 2 -0'),
        *words('{"!":"Counter","v":[["format",1]]} {"!":"OrderedDict","v":[["format",1]]}'),
    ]
    return Target("loader", Mutator(seeds, snippets=snippets), parse)


def _takes(taker: Any, saved: Any) -> bool:
    is_refused = False
    try:
        taker.check_state_dict(saved)
    except CheckpointMismatchError:
        is_refused = True
    before = taker.state_dict()
    with contextlib.suppress(CheckpointMismatchError):
        taker.load_state_dict(saved)
        assert not is_refused, "loaded what the check refused"
        check_types(taker.cursor)
        assert taker.state_dict()["consumed"] == saved["consumed"]
        assert len(taker) >= 0
        taker.load_state_dict(before)
    return not is_refused


def offers() -> Target:
    """The rows of a layout, as far as the reads of a restore into a live state."""
    model, optimizer = _model_and_optimizer()
    live = {"model": model, "optimizer": optimizer, "extra": torch.zeros(4, dtype=torch.float64), "note": 7}
    seeds = []
    for world_size in (1, 2):
        rows = []
        for rank in range(world_size):
            writer = Rank(rank, world_size, **live)
            rows += [entry.to_row() for entry in writer.save()[1]]
            writer.close()
        seeds.append(json.dumps({"rows": rows, "world_size": world_size}).encode())
    reader = Rank(**live)
    # A rank's share of the memory, as the session sets it.
    reader.segment.budget_bytes = 64 << 20

    def parse(data: bytes) -> bool:
        try:
            message = json.loads(data)
            world_size = {1: 1, 2: 2}[message["world_size"]]
            entries = [Entry.from_row(row) for row in message["rows"]]
        except (ValueError, LookupError, TypeError, RecursionError):
            return False  # a message that is none: the agent's table has columns of these types
        place = manifest(world_size)
        shards = tuple(layout.ShardInfo(s.rank, s.name, 1 << 20, s.digest) for s in place.shards)
        try:
            entries = layout.check_entries(entries, manifest(world_size, shards=shards))
            restorer = Restorer(
                reader.tree,
                reader.segment,
                entries,
                saved_world_size=world_size,
                rank=0,
                world_size=1,
                codec=reader.codec,
                has_group=False,
            )
            restorer.plan()
        except (CorruptCheckpointError, CheckpointMismatchError, StateError):
            return False
        return True

    snippets = [
        *JSON_NUMBERS,
        *words(
            "[] [0] [1099511627776] [4611686018427387904,4611686018427387904] [-1,-1] [3,5] [0,0] [1.0,2] [true,5]"
        ),
        *words(
            '"float32" "float64" "uint8" "complex128" "Tensor" "_dynamo" "onnx" "nn.Module" "bool" "quint4x2" "values"'
        ),
        *words(
            '"model.weight" "optimizer.weight.exp_avg" "optimizer.*x" "model._extra_state" "../x" -1 0 1 [null]'
        ),
        *words('["3",5] [1048576,1048576] [65536,65536] "float4_e2m1fn_x2"'),
    ]
    return Target("offer", Mutator(seeds, snippets=snippets), parse)
