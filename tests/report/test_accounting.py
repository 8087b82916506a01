"""Where a run's time went: by hand, against a simulation that counts every second, and for any events at all."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycheck.core.accounting import account
from raycheck.core.lineage import GenerationId
from raycheck.core.telemetry import Event, attempts_of, events_of, readings_of
from raycheck.core.time_spent import Losses, RunAccount, Start


def generation(number: int) -> GenerationId:
    return GenerationId(number, f"{number:08x}")


def event(unix_s, kind, number=1, writer="w", **facts) -> Event:
    return Event(unix_s, kind, str(generation(number)), writer, facts)


def saved(unix_s, step, number=1, *, stall_s=1.0, persist_s=2.0, **facts) -> Event:
    facts = {"step": step, "plan_id": 1, "stall_s": stall_s, "persist_s": persist_s, "num_bytes": 10, **facts}
    return event(unix_s, "checkpoint", number, **facts)


def lengths(run: RunAccount) -> list[list[tuple[str, float]]]:
    return [[(span.phase, span.length_s) for span in g.spans] for g in run.generations]


def test_a_failure_by_hand():
    """A checkpoint at 50 s, a failure at 70 s, a restart at 80 s that restores at 90 s and finishes at 190 s."""
    starts = [
        Start(generation=generation(1), claimed_unix_s=1000.0, world_size=2, has_record=True, failures={}),
        Start(
            generation=generation(2), claimed_unix_s=1080.0, world_size=2, has_record=True,
            parent=(40, generation(1)), failures={"worker": 1}, has_ended=True,
        ),
    ]  # fmt: skip
    events = [
        event(1010.0, "restored"),
        saved(1053.0, 40, cost_s=3.0, inside_steps_s=40.0, max_overhead=0.1),
        event(1070.0, "attempt_failed", step=60, reason="lost", detail="rank 1 ended"),
        event(1090.0, "restored", 2, parent=[40, str(generation(1)), 1]),
        saved(1190.0, 150, 2, cost_s=7.0, inside_steps_s=140.0, max_overhead=0.1),
    ]
    run = account(starts, events)
    assert lengths(run) == [
        [("start", 10.0), ("training", 40.0), ("again", 20.0), ("down", 10.0)],
        [("start", 10.0), ("training", 100.0)],
    ]
    first, second = run.generations
    assert (first.ending, first.failure_kinds, second.ending) == ("failure", ("worker",), "finished")
    assert (first.reached_step, first.is_reached_exact, first.left_at_step) == (40, False, 40)
    assert (second.reached_step, second.is_reached_exact) == (150, True)
    # The first generation's 3 s of cost lie in 40 s that count and 20 s that do not.
    assert first.losses.productive_s == pytest.approx(38.0)
    assert first.losses.recompute_s == pytest.approx(19.0)
    assert (first.losses.stall_s, first.losses.slowdown_s) == pytest.approx((1.0, 2.0))
    assert (first.losses.start_s, first.losses.restart_s) == pytest.approx((10.0, 10.0))
    assert (second.losses.start_s, second.losses.restart_s) == pytest.approx((0.0, 10.0))
    assert (second.losses.stall_s, second.losses.slowdown_s) == pytest.approx((1.0, 3.0))
    assert run.losses.wall_s == pytest.approx(190.0)
    assert run.losses.ettr == pytest.approx((38.0 + 96.0) / 190.0)
    assert (run.overhead, run.max_overhead) == pytest.approx((0.05, 0.1))
    assert (run.num_failures, run.reached_step) == (1, 150)


def test_the_first_new_step_tells_what_was_lost_before_it():
    """With it, training that no other event spoke of is work done again, not restart, and steps are exact."""
    starts = [
        Start(generation=generation(1), claimed_unix_s=0.0, has_record=True, failures={}),
        Start(
            generation=generation(2), claimed_unix_s=100.0, has_record=True,
            parent=(40, generation(1)), failures={"node": 1},
        ),
    ]  # fmt: skip
    events = [
        event(10.0, "restored"),
        saved(53.0, 40),
        event(110.0, "restored", 2),
        event(112.0, "resumed", 2, step=41, last_step=75, restart_s=22.0),
    ]
    first, _ = account(starts, events).generations
    assert [(span.phase, span.length_s) for span in first.spans] == [
        ("start", 10.0), ("training", 40.0), ("again", 40.0), ("down", 10.0),
    ]  # fmt: skip
    assert (first.reached_step, first.steps_lost, first.is_reached_exact) == (75, 35, True)
    without = account(starts, events[:-1]).generations[0]
    assert (without.reached_step, without.steps_lost, without.is_reached_exact) == (40, 0, False)
    assert without.spans[-1].length_s == pytest.approx(47.0)


def test_time_between_jobs_is_not_the_runs():
    """After an orderly end the next job's start is a first start."""
    starts = [
        Start(generation=generation(1), claimed_unix_s=0.0, has_record=True, failures={}),
        Start(
            generation=generation(2),
            claimed_unix_s=5000.0,
            has_record=True,
            parent=(9, generation(1)),
            failures={},
        ),
    ]
    events = [
        event(10.0, "restored"),
        saved(53.0, 9),
        event(60.0, "closed"),
        event(5010.0, "restored", 2, writer="x"),
        saved(5060.0, 20, 2, writer="x"),
    ]
    run = account(starts, events)
    assert [g.ending for g in run.generations] == ["stopped", "open"]
    assert run.generations[0].spans[-1] == (60.0, 5000.0, "stopped")
    assert run.losses.wall_s == pytest.approx(120.0)
    assert run.losses.restart_s == 0.0
    assert run.losses.start_s == pytest.approx(20.0)


def test_a_resize_is_no_failure():
    """Another world size, and no failure that the next claim counted."""
    starts = [
        Start(
            generation=generation(1), claimed_unix_s=0.0, world_size=2, has_record=True, failures={"node": 1}
        ),
        Start(
            generation=generation(2), claimed_unix_s=9.0, world_size=1, has_record=True, failures={"node": 1}
        ),
    ]
    assert [g.ending for g in account(starts, []).generations] == ["resize", "open"]


def test_what_was_left_behind_does_not_count():
    """A roll-back past a generation makes all of it work that is lost, and cuts its ancestor where it went on."""
    starts = [
        Start(generation=generation(1), claimed_unix_s=0.0, has_record=True),
        Start(generation=generation(2), claimed_unix_s=100.0, has_record=True, parent=(80, generation(1))),
        Start(generation=generation(3), claimed_unix_s=200.0, has_record=True, parent=(40, generation(1))),
    ]
    events = [
        event(0.0, "restored"), saved(43.0, 40), saved(83.0, 80),
        event(100.0, "restored", 2), saved(183.0, 160, 2), event(200.0, "restored", 3),
    ]  # fmt: skip
    run = account(starts, events)
    assert lengths(run)[:2] == [
        [("training", 40.0), ("again", 43.0), ("down", 17.0)],
        [("again", 83.0), ("down", 17.0)],
    ]
    assert [g.steps_lost for g in run.generations] == [40, 80, 0]


def test_a_step_without_a_checkpoint_event_lies_between_its_neighbours():
    """Its time is read off the line between those that tell."""
    starts = [
        Start(generation=generation(1), claimed_unix_s=0.0, has_record=True),
        Start(generation=generation(2), claimed_unix_s=100.0, has_record=True, parent=(30, generation(1))),
    ]
    events = [
        event(0.0, "restored"),
        event(20.0, "progress", step=20),
        event(60.0, "progress", step=40),
    ]
    assert lengths(account(starts, events))[0] == [("training", 40.0), ("again", 20.0), ("down", 40.0)]


def test_costs_that_add_up_are_dealt_to_generations_and_begin_anew_with_a_writer():
    """One coordinator's two generations, then another's; a measure that falls takes back."""
    starts = [Start(generation=generation(n), claimed_unix_s=100.0 * n, has_record=True) for n in (1, 2, 3)]
    events = [
        event(100.0, "restored", 1), saved(190.0, 9, 1, stall_s=0.0, cost_s=5.0, inside_steps_s=90.0),
        event(200.0, "restored", 2), saved(290.0, 9, 2, stall_s=0.0, cost_s=4.0, inside_steps_s=150.0),
        event(300.0, "restored", 3, writer="x"),
    ]  # fmt: skip
    events.append(
        Event(
            390.0, "checkpoint", str(generation(3)), "x", {"step": 9, "cost_s": 2.0, "inside_steps_s": 90.0}
        )
    )
    run = account(starts, events)
    assert [g.losses.slowdown_s for g in run.generations] == pytest.approx([5.0, 0.0, 2.0])
    assert run.overhead == pytest.approx(6.0 / 240.0)


# A simulation that knows the truth: it goes through a run second by second and keeps its own books.


class Simulated:
    """A run of some generations, in whole seconds, one step each; tells all that telemetry may tell."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock_s = 1_000_000
        self.starts: list[Start] = []
        self.events: list[Event] = []
        self.books = dict.fromkeys(("productive", "stall", "recompute", "restart", "start"), 0)
        self.cost_s = self.inside_s = 0
        self.kept: list[tuple[int, int, GenerationId]] = []
        """Per step that counts: the second in which it was taken, what for, and by whom."""

        self.num_failures = 0
        self.steps_lost = 0

    def run(self, num_generations: int) -> None:
        parent, last = None, None
        for number in range(1, num_generations + 1):
            parent, last = self.one(number, parent, last, is_last=number == num_generations)

    def one(self, number, parent, last, *, is_last):
        mine = generation(number)
        begin_s = self.clock_s
        self.starts.append(
            Start(
                generation=mine, claimed_unix_s=float(begin_s), world_size=2, has_record=True,
                parent=(parent[0], parent[1]) if parent else None, failures={"worker": number - 1}, has_ended=is_last,
            )
        )  # fmt: skip
        self.clock_s += self.random.randint(1, 20)
        self.books["start" if number == 1 else "restart"] += self.clock_s - begin_s
        restored_s = self.clock_s
        step = parent[0] if parent else 0
        facts = {"last_step": last[0], "restart_s": float(restored_s - last[1])} if last else {}
        self.events.append(event(float(restored_s), "resumed", number, step=step, **facts))
        ledger = []  # of this generation: (what each second went for, whether it was before the newest checkpoint)
        newest, cut = None, 0
        for _ in range(self.random.randint(3, 120)):
            if self.random.random() < 0.1:
                stall_s = self.random.randint(1, 3)
                newest, cut = (step, mine), len(ledger)
                ledger += ["stall"] * stall_s
                self.clock_s += stall_s
                self.cost_s += stall_s
                self.inside_s += stall_s
                self.events.append(
                    saved(
                        float(self.clock_s), step, number, stall_s=float(stall_s), persist_s=0.0,
                        cost_s=float(self.cost_s), inside_steps_s=float(self.inside_s), max_overhead=0.5,
                    )
                )  # fmt: skip
            step += 1
            self.clock_s += 1
            self.inside_s += 1
            ledger.append("step")
        self.events.append(
            event(
                float(self.clock_s), "progress", number, step=step,
                cost_s=float(self.cost_s), inside_steps_s=float(self.inside_s),
            )
        )  # fmt: skip
        reached = step
        if is_last:
            cut = len(ledger)
        elif newest is None and parent is not None:
            # Nothing new: the next one goes back to where this one started.
            newest = parent
        self._book(ledger, cut)
        ended_s = self.clock_s
        if not is_last:
            self.steps_lost += reached - (newest[0] if newest else 0)
            self.clock_s += self.random.randint(1, 30)
            self.books["restart"] += self.clock_s - ended_s
        return newest, (reached, ended_s)

    def _book(self, ledger: list[str], cut: int) -> None:
        """Charge each second: costs are costs wherever they fall, spread evenly over what counts and what does not."""
        stall = ledger.count("stall")
        self.books["stall"] += stall
        rest = 1 - stall / len(ledger) if ledger else 0
        self.books["productive"] += cut * rest
        self.books["recompute"] += (len(ledger) - cut) * rest


@pytest.mark.parametrize("seed", range(40))
def test_the_books_of_a_simulation_are_found_again(seed):
    """A simulated run of up to eight generations: every second is where the simulation put it."""
    simulated = Simulated(seed)
    num_generations = 1 + seed % 8
    simulated.run(num_generations)
    run = account(simulated.starts, simulated.events)
    found = run.losses
    assert found.productive_s == pytest.approx(simulated.books["productive"])
    assert found.recompute_s == pytest.approx(simulated.books["recompute"])
    assert found.stall_s == pytest.approx(simulated.books["stall"])
    assert found.slowdown_s == pytest.approx(0.0, abs=1e-6)
    assert found.restart_s == pytest.approx(simulated.books["restart"])
    assert found.start_s == pytest.approx(simulated.books["start"])
    assert sum(g.steps_lost for g in run.generations) == simulated.steps_lost
    assert run.num_failures == num_generations - 1
    assert run.overhead == pytest.approx(simulated.cost_s / simulated.inside_s)


# Whatever the events are.

times = st.one_of(st.integers(0, 60).map(float), st.floats(0, 1e11), st.sampled_from([0.0, 1e11]))
values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 50),
    st.floats(allow_nan=True),
    st.just(10**400),
    st.text(max_size=3),
    st.lists(st.integers(0, 3), max_size=3),
)
names = st.sampled_from(
    ["step", "stall_s", "persist_s", "num_bytes", "cost_s", "inside_steps_s", "max_overhead", "interval_s",
     "seconds", "restart_s", "last_step", "parent", "rank_stalls_s", "reason"]
)  # fmt: skip
kinds = st.sampled_from(
    ["begun", "generation", "restored", "checkpoint", "attempt_failed", "interval", "progress", "resumed",
     "closed", "swept", "anything"]
)  # fmt: skip
any_event = st.builds(
    Event,
    times,
    kinds,
    st.one_of(
        st.integers(1, 4).map(lambda number: str(generation(number))), st.sampled_from(["", "g1", "\ud800"])
    ),
    st.sampled_from(["w", "x"]),
    st.dictionaries(names, values, max_size=5),
)
any_start = st.builds(
    lambda number, claimed, size, has_record, parent, failures, has_ended: Start(
        generation=generation(number), claimed_unix_s=claimed, world_size=size, has_record=has_record,
        parent=parent, failures=failures, has_ended=has_ended,
    ),
    st.integers(1, 5),
    st.none() | times,
    st.none() | st.integers(1, 4),
    st.booleans(),
    st.none() | st.tuples(st.integers(0, 60), st.integers(1, 5).map(generation)),
    st.none() | st.dictionaries(st.sampled_from(["worker", "node"]), st.integers(0, 3)),
    st.booleans(),
)  # fmt: skip


@given(st.lists(any_start, max_size=5), st.lists(any_event, max_size=25))
def test_parts_add_up_whatever_the_events_are(starts, events):
    """Phases follow one another without a gap, and the parts of the losses are the whole of the phases that count."""
    events.sort(key=lambda e: e.unix_s)
    run = account(starts, events)
    spans = [span for g in run.generations for span in g.spans]
    assert all(before.end_unix_s == after.begin_unix_s for before, after in itertools.pairwise(spans))
    assert all(span.length_s >= 0 for span in spans)
    parts = [getattr(run.losses, name) for name in Losses.__slots__]
    assert all(part >= 0 and math.isfinite(part) for part in parts), run.losses
    counted_s = math.fsum(span.length_s for span in spans if span.phase != "stopped")
    assert run.losses.wall_s == pytest.approx(counted_s, rel=1e-9, abs=1e-6)
    for g in run.generations:
        assert g.reached_step >= g.restored_step
        assert g.steps_lost >= 0
    assert run.losses.ettr is None or 0 <= run.losses.ettr <= 1 + 1e-9
    assert run.overhead is None or run.overhead >= 0


@st.composite
def plain_runs(draw):
    """A run in whole seconds, whose checkpoints take no time; writers may speak on after they were cut off."""
    starts, events = [], []
    claimed_s, parent = 0, None
    for number in range(1, draw(st.integers(1, 4)) + 1):
        starts.append(
            Start(
                generation=generation(number), claimed_unix_s=float(claimed_s), has_record=True, parent=parent
            )
        )
        steps = draw(st.sets(st.integers(0, 25), max_size=4))
        for step in steps:
            events.append(saved(float(claimed_s + step), step, number, stall_s=0.0, persist_s=0.0))
        for offset_s in draw(st.lists(st.integers(0, 25), max_size=3)):
            events.append(
                event(float(claimed_s + offset_s), draw(st.sampled_from(["restored", "interval"])), number)
            )
        if steps and draw(st.booleans()):
            parent = draw(st.sampled_from(sorted(steps))), generation(number)
        elif draw(st.booleans()):
            parent = None
        claimed_s += draw(st.integers(1, 30))
    return starts, sorted(events, key=lambda e: e.unix_s)


@given(plain_runs())
def test_phases_are_those_that_a_look_at_each_second_finds(run):
    """Another account asks of each moment by itself: whose it was, and from the definitions what was going on."""
    starts, events = run
    spans = [span for g in account(starts, events).generations for span in g.spans]
    for moment_s in (n + 0.5 for n in range(130)):
        found = [span.phase for span in spans if span.begin_unix_s <= moment_s < span.end_unix_s]
        assert found == look(starts, events, moment_s), moment_s


def look(starts, events, moment_s):
    owner = [s for s in starts if s.claimed_unix_s <= moment_s][-1]
    own = [e for e in events if e.generation == str(owner.generation)]
    if all(e.unix_s < moment_s for e in own):
        return [] if owner is starts[-1] else ["down"]
    restored = [e.unix_s for e in own if e.kind == "restored"]
    checkpoints = {e.facts["step"]: e.unix_s for e in own if e.kind == "checkpoint"}
    if moment_s < restored[0] if restored else not checkpoints:
        return ["start"]
    # From the newest back along the parents: is it this one's turn, and up to where?
    child, until_s = starts[-1], math.inf
    while child is not owner:
        if child.parent is None:
            return ["again"]
        step, parent = child.parent
        child = next(s for s in starts if s.generation == parent)
        until_s = checkpoints.get(step) if child is owner else None
    return ["training" if moment_s < until_s else "again"]


@given(st.lists(any_event, max_size=20))
def test_readings_are_numbers(events):
    """Nothing that is read is negative, infinite or no number, but the cost, which noise may make negative."""
    for attempt in attempts_of(events):
        assert all(0 <= value < math.inf for value in (attempt.stall_s, attempt.persist_s, attempt.num_bytes))
    for reading in readings_of(events):
        for value in (reading.inside_steps_s, reading.interval_s, reading.max_overhead, reading.overhead):
            assert value is None or 0 <= value < math.inf


def test_events_of_no_time_are_left_out():
    """A clock cannot show them."""
    rows = [
        {"unix_s": unix_s, "kind": "x", "generation": "", "writer": "w", "facts": {}}
        for unix_s in (5.0, -1.0, 1e300, 3.0)
    ]
    assert [e.unix_s for e in events_of(rows)] == [3.0, 5.0]
