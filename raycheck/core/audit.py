"""Which items each epoch consumed: accounts that loaders keep, and their audit along the lineage.

While a loader works it keeps a `Ledger`: the *runs* it went through without a
jump since its position was last set from a checkpoint, or since it was made.
A run goes from one place (epoch, positions consumed) to another, through whole
epochs between them. Normally there is one run, however long training goes on;
another begins only where the position jumped, by ``set_epoch`` in the middle
of an epoch, say.

A checkpoint carries the account of the generation that wrote it, up to its
step. In the lineage that counts, each generation is left at one checkpoint, so
the accounts of those checkpoints together say what was consumed; steps that
were lost with a failure are in none of them. `audit` puts them together.
Positions stand for items one to one within an epoch, so each position once is
each item once.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from raycheck.core.cursor import FORMAT, Cursor, Dealing, Rest
from raycheck.errors import ConfigError

MAX_RUNS = 64
"""Jumps that a ledger remembers; an account with more is marked as incomplete."""

MAX_EPOCHS = 100_000
"""Epochs that an audit goes through; damaged accounts must not take all memory."""


class Run(NamedTuple):
    """A way through the data without a jump: from ``begin`` in one epoch to ``end`` in another."""

    first_epoch: int
    begin: int
    last_epoch: int
    end: int


class Ledger:
    """The runs of one loader.

    Args:
        start: The position that was set.
    """

    def __init__(self, start: Cursor) -> None:
        self._closed: list[Run] = []
        self._start = start
        self.is_complete = True
        """False once there were too many runs to remember."""

    def move(self, reached: Cursor, to: Cursor) -> None:
        """Note that the position was set to ``to`` after ``reached``. The next epoch's start is no jump."""
        if to == reached or (reached.consumed == reached.length and to == reached.at(reached.epoch + 1)):
            return
        run = self._present(reached)
        if run[:2] != run[2:]:
            self._closed.append(run)
        if len(self._closed) > MAX_RUNS:
            self._closed.pop(0)
            self.is_complete = False
        self._start = to

    def runs(self, reached: Cursor) -> list[Run]:
        """Return the runs up to ``reached``. Of those in which nothing was consumed only the last is there."""
        return [*self._closed, self._present(reached)]

    def _present(self, reached: Cursor) -> Run:
        return Run(self._start.epoch, self._start.consumed, reached.epoch, reached.consumed)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What a loader consumed in one generation, up to a checkpoint."""

    length: int
    seed: int
    shuffle: bool
    dealing: Dealing
    runs: tuple[Run, ...]
    """In the order of time; at least one. The last one's end is the position of the checkpoint."""

    is_complete: bool = True
    """False: there were more runs than these."""


def encode_account(cursor: Cursor, dealing: Dealing, ledger: Ledger) -> dict[str, Any]:
    """Return an account as plain JSON values, some 200 bytes."""
    return {
        "format": FORMAT,
        "length": cursor.length,
        "seed": cursor.seed,
        "shuffle": cursor.shuffle,
        **dataclasses.asdict(dealing),
        "runs": [list(run) for run in ledger.runs(cursor)],
        "is_complete": ledger.is_complete,
    }


def decode_account(fields: Any) -> Account:
    """Read what `encode_account` wrote.

    Raises:
        ValueError: If it is nothing that it writes.
    """
    try:
        if fields["format"] != FORMAT:
            raise ValueError(f"an account of format {fields['format']!r}")
        given = {field.name: fields[field.name] for field in dataclasses.fields(Dealing)}
        account = Account(
            length=fields["length"],
            seed=fields["seed"],
            shuffle=fields["shuffle"],
            dealing=Dealing(**given),
            runs=tuple(Run(*run) for run in fields["runs"]),
            is_complete=fields["is_complete"] is True,
        )
        for run in account.runs:
            # The cursor's own checks: whole numbers, within the length.
            for epoch, consumed in (run[:2], run[2:]):
                Cursor(
                    length=account.length,
                    seed=account.seed,
                    shuffle=account.shuffle,
                    epoch=epoch,
                    consumed=consumed,
                )
            if run[:2] > run[2:]:
                raise ValueError(f"a run that goes backwards: {run}")
        if not account.runs:
            raise ValueError("an account without a position")
    except (KeyError, TypeError, ConfigError) as error:
        raise ValueError(f"not an account of a loader: {error}") from error
    return account


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """The part of one generation that counts."""

    generation: str
    from_step: int
    to_step: int
    """The step of the checkpoint where it was left, or of its newest one."""

    world_size: int
    accounts: Mapping[str, Account] | None
    """By the loader's name in ``attach``. None: nothing is known of them."""


class Piece(NamedTuple):
    """Positions ``begin`` to ``end`` of one epoch, consumed in one generation."""

    begin: int
    end: int
    generation: str
    world_size: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EpochAudit:
    """What became of the items of one epoch."""

    epoch: int
    expected: int
    """Positions from the epoch's start that should have been consumed by now: all, or those so far."""

    pieces: tuple[Piece, ...]
    """In the order of positions."""

    duplicates: tuple[tuple[int, int], ...]
    """Positions consumed more than once, as half-open ranges."""

    gaps: tuple[tuple[int, int], ...]
    """Positions never consumed."""

    num_repeats: int
    """Items that the last step took a second time on purpose, to give each rank a batch."""

    num_dropped: int
    """Items left out on purpose by ``remainder="drop"``."""

    @property
    def is_clean(self) -> bool:
        """Whether each position was consumed once."""
        return not (self.duplicates or self.gaps)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoaderAudit:
    """The audit of one loader."""

    name: str
    length: int
    epochs: tuple[EpochAudit, ...]
    unknown: tuple[str, ...]
    """Why something cannot be told; empty if the whole lineage is known."""

    @property
    def is_clean(self) -> bool:
        """Whether no epoch has duplicates or gaps, as far as is known."""
        return all(epoch.is_clean for epoch in self.epochs)


def audit(stretches: Sequence[Stretch]) -> list[LoaderAudit]:
    """Return what the lineage consumed, per loader in the order of names.

    Args:
        stretches: The generations that count, oldest first, without those
            that left no checkpoint.
    """
    names = sorted({name for stretch in stretches for name in stretch.accounts or ()})
    return [_audit_loader(name, stretches) for name in names]


def _audit_loader(name: str, stretches: Sequence[Stretch]) -> LoaderAudit:
    known: list[tuple[Stretch, Account]] = []
    unknown: list[str] = []
    for stretch in stretches:
        account = (stretch.accounts or {}).get(name)
        what = f"{stretch.generation}, steps {stretch.from_step + 1} to {stretch.to_step}"
        if account is None:
            unknown.append(f"{what}: no account of {name!r} was found")
        elif known and _data_of(account) != _data_of(known[0][1]):
            unknown.append(f"{what}: {name!r} had other data, another seed or order than before")
        elif sum(run.last_epoch - run.first_epoch + 1 for run in account.runs) > MAX_EPOCHS:
            unknown.append(f"{what}: more than {MAX_EPOCHS:,} epochs")
        else:
            if not account.is_complete:
                unknown.append(f"{what}: {name!r} jumped more than {MAX_RUNS} times; the first are forgotten")
            known.append((stretch, account))
    length = known[0][1].length if known else 0
    return LoaderAudit(name=name, length=length, epochs=_epochs(known, length), unknown=tuple(unknown))


def _data_of(account: Account) -> tuple[int, int, bool]:
    return account.length, account.seed, account.shuffle


def _epochs(known: Sequence[tuple[Stretch, Account]], length: int) -> tuple[EpochAudit, ...]:
    pieces: dict[int, list[Piece]] = {}
    repeats: dict[int, int] = {}
    dropped: dict[int, int] = {}
    for stretch, account in known:
        for epoch, begin, end in _walk(account.runs, length):
            pieces.setdefault(epoch, []).append(Piece(begin, end, stretch.generation, stretch.world_size))
            if end == length:
                cursor = Cursor(length=length, seed=account.seed, shuffle=account.shuffle, consumed=begin)
                rest = Rest(cursor, account.dealing)
                repeats[epoch] = repeats.get(epoch, 0) + rest.num_repeats
                dropped[epoch] = dropped.get(epoch, 0) + rest.num_dropped
    if not known:
        return ()
    position = known[-1][1].runs[-1]
    first = min(run.first_epoch for _, account in known for run in account.runs)
    last = max(run.last_epoch for _, account in known for run in account.runs)
    found = []
    for epoch in range(first, min(last + 1, first + MAX_EPOCHS)):
        mine = sorted(pieces.get(epoch, ()))
        so_far = max([position.end, *(piece.end for piece in mine)])
        expected = so_far if epoch == position.last_epoch else length
        if expected or mine:
            duplicates, gaps = _judge(mine, expected)
            found.append(
                EpochAudit(
                    epoch=epoch,
                    expected=expected,
                    pieces=tuple(mine),
                    duplicates=duplicates,
                    gaps=gaps,
                    num_repeats=repeats.get(epoch, 0),
                    num_dropped=dropped.get(epoch, 0),
                )
            )
    return tuple(found)


def _walk(runs: Iterable[Run], length: int) -> Iterable[tuple[int, int, int]]:
    """Yield (epoch, begin, end) of everything that the runs consumed."""
    for run in runs:
        for epoch in range(run.first_epoch, run.last_epoch + 1):
            begin = run.begin if epoch == run.first_epoch else 0
            end = run.end if epoch == run.last_epoch else length
            if begin < end:
                yield epoch, begin, end


def _judge(
    pieces: Sequence[Piece], expected: int
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """Return where pieces overlap, and what none of them covers, as merged half-open ranges."""
    edges = sorted({0, expected, *(edge for piece in pieces for edge in piece[:2])})
    starts, ends = [piece.begin for piece in pieces], sorted(piece.end for piece in pieces)
    duplicates: list[tuple[int, int]] = []
    gaps: list[tuple[int, int]] = []
    depth = num_started = num_ended = 0
    for begin, end in itertools.pairwise(edges):
        while num_started < len(starts) and starts[num_started] <= begin:
            num_started += 1
        while num_ended < len(ends) and ends[num_ended] <= begin:
            num_ended += 1
        depth = num_started - num_ended
        if depth > 1:
            _append(duplicates, begin, end)
        elif depth == 0 and begin < expected:
            _append(gaps, begin, end)
    return tuple(duplicates), tuple(gaps)


def _append(ranges: list[tuple[int, int]], begin: int, end: int) -> None:
    if ranges and ranges[-1][1] == begin:
        begin = ranges.pop()[0]
    ranges.append((begin, end))
