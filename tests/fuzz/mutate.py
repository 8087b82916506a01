"""Mutation of inputs: knows JSON and binary records, nothing of the parsers."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

MAX_INPUT_BYTES = 1 << 20
_POOL_SIZE = 400
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}:,]|[^\s\[\]{}:,"]+')


def words(text: str) -> list[bytes]:
    """Return the parts of a text between its spaces, as inputs have them."""
    return [word.encode() for word in text.split()]


NUMBERS = [
    *words("0 -1 1 2 7 255 65536 -0 0.0 0.5 1.0 1e3 -2.5 1e308 1e400 -1e400 NaN Infinity -Infinity"),
    *(
        str(sign * 2**power + more).encode()
        for power in (31, 53, 61, 63, 64)
        for sign in (1, -1)
        for more in (0, -1)
    ),
    *(b"1" + b"0" * 30, b"1" + b"0" * 400, b"9" * 4300, b"9" * 4301, b"9" * 20000),
    *words("0x10 1_000 01 1e -"),
]
TEXTS = [
    *words(
        r'"" "a" "\u0000" "\ud800" "\udfff\ud800" "é" "١" ".." "../../x" "/etc/passwd" "a/../../b" "a\\b" "C:\\x"'
    ),
    *words(r'"s3://b/k" "~" "0" "-1" "nan" "1e999" "True" "None" "%s%n" "{0.__class__}" "__class__"'),
    *(
        b'"\xff"',
        b'"' + b"x" * 300 + b'"',
        b'"' + b"A" * 70000 + b'"',
        b'"unterminated',
        b"'single'",
        b'"\\x"',
        b'"\\u12"',
    ),
]
OTHERS = [
    *words('null true false [] {} [null] [[]] {"":0} {"a":{}} [1,2] [0,0,0] {"a":1,"a":2} [-1] [1e400] [""]'),
    *words('["a","b","c"] undefined ,'),
    *(b"", b"[" * 50 + b"]" * 50, b'{"a":' * 50 + b"0" + b"}" * 50, b"[" + b"0," * 300 + b"0]"),
]
HEAVY = [
    b"[" * 100_000,
    b"[" * 100_000 + b"]" * 100_000,
    b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    b"9" * 900_000,
    b'"' + b"\\u0041" * 100_000 + b'"',
    b"[" + b"[]," * 200_000 + b"[]]",
]
"""Whatever takes a parser long: drawn rarely, so that the other inputs get their time."""

_INTERESTING = [0, 1, 2, 3, 4, 7, 8, 16, 127, 128, 255, 256, 4095, 4096, 65535, 65536, 2**31 - 1, 2**31]
_INTERESTING += [2**32 - 1, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


def value_spans(text: bytes) -> list[tuple[int, int]]:
    """Return where the values and keys of a JSON text lie; of any other text, what looks like them."""
    spans, begun = [], []
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token in b"[{":
            begun.append(match.start())
        elif token in b"]}":
            if begun:
                spans.append((begun.pop(), match.end()))
        elif token not in b":,":
            spans.append(match.span())
    return spans


class Mutator:
    """Makes inputs from seeds. What a parser accepted may become a seed, so that changes add up.

    Args:
        seeds: Valid inputs.
        snippets: Values worth putting into these inputs in particular, for JSON.
        is_json: Whether to work on values as well as on bytes.
        max_bytes: No input is longer.
    """

    def __init__(
        self,
        seeds: Sequence[bytes],
        *,
        snippets: Sequence[bytes] = (),
        is_json: bool = True,
        max_bytes: int = MAX_INPUT_BYTES,
    ) -> None:
        self._seeds = list(seeds)
        self._num_given = len(self._seeds)
        self._longest_given = max(map(len, self._seeds))
        self._snippets = list(snippets) or NUMBERS
        self._is_json = is_json
        self._max_bytes = max_bytes
        self._spans: dict[bytes, list[tuple[int, int]]] = {}

    def __call__(self, rng: random.Random) -> bytes:
        seeds = self._seeds
        # The given seeds stay as likely as all those that were found together.
        limit = self._num_given if rng.random() < 0.5 else len(seeds)
        seed = seeds[int(rng.random() * limit)]
        if self._is_json and rng.random() < 0.8:
            data = self._change_values(seed, rng)
        else:
            data = self._change_bytes(seed, rng)
        return data[: self._max_bytes]

    def keep(self, data: bytes, rng: random.Random) -> None:
        """Take an accepted input among the seeds, in the place of another found one when there are many."""
        # What is put into values makes inputs longer and longer, and slower.
        if len(data) > self._longest_given + 256:
            return
        if len(self._seeds) < self._num_given + _POOL_SIZE:
            self._seeds.append(data)
        else:
            at = self._num_given + int(rng.random() * _POOL_SIZE)
            self._spans.pop(self._seeds[at], None)
            self._seeds[at] = data

    def _spans_of(self, seed: bytes) -> list[tuple[int, int]]:
        spans = self._spans.get(seed)
        if spans is None:
            spans = self._spans[seed] = value_spans(seed)
        return spans

    def _change_values(self, seed: bytes, rng: random.Random) -> bytes:
        spans = self._spans_of(seed)
        if not spans:
            return self._change_bytes(seed, rng)
        draw = rng.random
        count = 1 if draw() < 0.6 else 2 + int(draw() * 3)
        # From the right, so that what is on the left keeps its place.
        chosen = sorted((spans[int(draw() * len(spans))] for _ in range(count)), reverse=True)
        before = len(seed) + 1
        data = seed
        for begin, end in chosen:
            if end > before:
                continue
            data = data[:begin] + self._replacement(seed, begin, end, rng) + data[end:]
            before = begin
        return data

    def _replacement(self, seed: bytes, begin: int, end: int, rng: random.Random) -> bytes:
        kind, draw = rng.random(), rng.random
        if kind < 0.35:
            return _pick(self._snippets, rng)
        if kind < 0.50:
            return _pick(NUMBERS, rng)
        if kind < 0.58:
            return _pick(TEXTS, rng)
        if kind < 0.68:
            return _pick(OTHERS, rng)
        if kind < 0.6802:
            return _pick(HEAVY, rng)
        if kind < 0.84:
            # A value of the same or another seed in this one's place.
            other = seed if draw() < 0.5 else _pick(self._seeds, rng)
            spans = self._spans_of(other) or [(0, len(other))]
            first, last = spans[int(draw() * len(spans))]
            return other[first:last]
        own = seed[begin:end]
        if kind < 0.89:
            return b""
        if kind < 0.94:
            return own + b"," + own
        if kind < 0.97:
            depth = 1 + int(draw() * 4)
            return b"[" * depth + own + b"]" * depth
        return b'{"!":' + own + b',"v":' + own + b"}"

    def _change_bytes(self, seed: bytes, rng: random.Random) -> bytes:
        data = bytearray(seed)
        for _ in range(1 if rng.random() < 0.5 else 2 + int(rng.random() * 6)):
            _BYTE_CHANGES[int(rng.random() * len(_BYTE_CHANGES))](data, rng)
        if rng.random() < 0.05:
            other = _pick(self._seeds, rng)
            cut = int(rng.random() * (len(data) + 1))
            data[cut:] = other[int(rng.random() * (len(other) + 1)) :]
        return bytes(data)


def _pick(values: Sequence[bytes], rng: random.Random) -> bytes:
    return values[int(rng.random() * len(values))]


def _flip(data: bytearray, rng: random.Random) -> None:
    if data:
        data[int(rng.random() * len(data))] ^= 1 << int(rng.random() * 8)


def _set(data: bytearray, rng: random.Random) -> None:
    if data:
        data[int(rng.random() * len(data))] = int(rng.random() * 256)


def _set_number(data: bytearray, rng: random.Random) -> None:
    width = (1, 2, 4, 8)[int(rng.random() * 4)]
    if len(data) < width:
        return
    at = int(rng.random() * (len(data) - width + 1))
    if rng.random() < 0.5:
        at -= at % width
    number = _INTERESTING[int(rng.random() * len(_INTERESTING))] + int(rng.random() * 3) - 1
    data[at : at + width] = (number % (1 << (8 * width))).to_bytes(width, "little")


def _insert(data: bytearray, rng: random.Random) -> None:
    at = int(rng.random() * (len(data) + 1))
    data[at:at] = rng.randbytes(1 + int(rng.random() * 8))


def _remove(data: bytearray, rng: random.Random) -> None:
    at = int(rng.random() * (len(data) + 1))
    del data[at : at + 1 + int(rng.random() * 16)]


def _cut(data: bytearray, rng: random.Random) -> None:
    del data[int(rng.random() * (len(data) + 1)) :]


def _repeat(data: bytearray, rng: random.Random) -> None:
    at = int(rng.random() * (len(data) + 1))
    piece = data[at : at + 1 + int(rng.random() * 64)]
    data[at:at] = piece * (1 + int(rng.random() * 4))


def _move(data: bytearray, rng: random.Random) -> None:
    source, target = (int(rng.random() * (len(data) + 1)) for _ in range(2))
    piece = data[source : source + 1 + int(rng.random() * 32)]
    data[target : target + len(piece)] = piece


_BYTE_CHANGES: list[Callable[[bytearray, random.Random], None]] = [
    *(_flip, _flip, _set, _set_number, _set_number, _insert, _remove, _cut, _repeat, _move)
]
