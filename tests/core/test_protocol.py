"""The coordinator's state machine: what it does, and what it never does."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycheck.core import protocol as p
from raycheck.core.layout import ShardInfo
from raycheck.core.page import Plan


def machine(world_size=2, **options):
    made = p.CommitProtocol(
        **{
            "world_size": world_size,
            "interval_steps": None,
            "tolerated_failures": None,
            "latency_s": 0.3,
            **options,
        }
    )
    made.interval_s = 10.0
    return made


def shard(rank):
    return ShardInfo(rank, f"shard-{rank}", 100, "00000000")


class Driver:
    """Feeds a machine and keeps the time."""

    def __init__(self, **options):
        self.machine = machine(**options)
        self.now_s = 0.0

    def __call__(self, *events):
        actions = []
        for event in events:
            actions += self.machine.handle(event, self.now_s)
        return actions

    def join(self, step=100, step_s=0.1):
        return self(*(p.Joined(r) for r in range(self.machine.world_size)), p.Progress(step, step_s))

    def published(self):
        """Reach the first plan."""
        (action,) = [a for a in self.join() if isinstance(a, p.Publish)]
        return action.plan

    def stage(self, plan, digests=("x", "x"), ranks=(0, 1)):
        return self(*(p.Staged(r, plan.id, 0.01 * (r + 1), d) for r, d in zip(ranks, digests, strict=True)))

    def persist(self, plan, ranks=(0, 1)):
        return self(*(p.Durable(plan.id, shard(r), 1.0 + r) for r in ranks))


def kinds(actions):
    return [type(action).__name__ for action in actions]


def test_a_checkpoint_from_plan_to_commit():
    """Every rank stages and persists; then and only then is the manifest asked for."""
    run = Driver()
    plan = run.published()
    assert plan.id == 1
    assert plan.step > 100, "beyond the furthest rank"
    assert run.stage(plan) == []
    assert run.machine.is_fully_staged
    assert run.persist(plan, ranks=[0]) == []
    assert run.persist(plan, ranks=[1]) == [p.WriteCommit(plan, (shard(0), shard(1)))]
    (end,) = run(p.CommitEnded(plan.id))
    assert end == p.EndAttempt(
        plan, "committed", "", stall_s=0.02, persist_s=2.0, num_bytes=200, bytes_per_rank=100
    )
    assert run.machine.committed_step == plan.step
    assert run(p.Tick()) == [], "the next one is not due"
    run.now_s = 10.1
    assert kinds(run(p.Progress(200, 0.1))) == ["Publish"]


def test_durable_may_be_heard_before_staged():
    """Messages of different nodes come in any order."""
    run = Driver()
    plan = run.published()
    run.stage(plan, ranks=[0], digests=["x"])
    assert run.persist(plan) == []
    assert kinds(run.stage(plan, ranks=[1], digests=["x"])) == ["WriteCommit"]


def test_a_bad_verdict_on_what_is_durable_ends_the_attempt():
    """A shard may be stored before the verdict on its snapshot; once that is good, a later failure is no loss."""
    run = Driver()
    plan = run.published()
    run.persist(plan)
    run.stage(plan, ranks=[0], digests=["x"])
    assert run(p.Failed(0, plan.id, "the agent has restarted")) == []
    (end,) = [
        a for a in run(p.Failed(1, plan.id, "changed while it was copied")) if isinstance(a, p.EndAttempt)
    ]
    assert (end.reason, end.num_bytes, end.has_commit_begun) == ("failed", 200, False)


def test_the_slowest_ranks_are_named():
    """The longest first, eight at most: what people look for in a large job."""
    run = Driver(world_size=10)
    plan = run.published()
    ranks = range(10)
    run.stage(plan, ranks=ranks, digests="x" * 10)
    run.persist(plan, ranks=ranks)
    (end,) = [a for a in run(p.CommitEnded(plan.id)) if isinstance(a, p.EndAttempt)]
    assert end.slowest_stalls == tuple((r, pytest.approx(0.01 * (r + 1))) for r in range(9, 1, -1))
    assert end.slowest_persists == tuple((r, 1.0 + r) for r in range(9, 1, -1))


def test_repeated_and_late_events_change_nothing():
    """At-least-once delivery: no second commit, no revival of an ended attempt."""
    run = Driver()
    plan = run.published()
    run.stage(plan), run.stage(plan)
    assert kinds(run.persist(plan)) == ["WriteCommit"]
    assert run.persist(plan) == []
    assert kinds(run(p.CommitEnded(plan.id))) == ["EndAttempt"]
    assert run(p.CommitEnded(plan.id)) == []
    assert run.stage(plan) == []
    assert run.persist(plan) == []


def test_a_miss_doubles_the_lead():
    """The attempt ends and the next plan lies further ahead, with a new id."""
    run = Driver()
    plan = run.published()
    end, publish = run(p.Missed(1, plan.id))
    assert end.reason == "missed"
    assert publish.plan.id == 2
    assert publish.plan.step - 100 == 2 * (plan.step - 100)


def test_a_rank_lost_before_staging_ends_the_attempt_at_once():
    """H1: nobody waits for the dead."""
    run = Driver()
    plan = run.published()
    run.stage(plan, ranks=[0], digests=["x"])
    assert kinds(run(p.Lost(1))) == ["EndAttempt"]
    assert run(p.Tick()) == [], "and no plan is made while a rank is missing"


def test_a_rank_lost_after_staging_does_not():
    """Its snapshot outlives it."""
    run = Driver()
    plan = run.published()
    run.stage(plan)
    assert run(p.Lost(1)) == []
    assert kinds(run.persist(plan)) == ["WriteCommit"]


def test_a_rank_that_never_stages_is_named_at_the_deadline():
    """The deadline counts from the moment that a rank was at the step, not before."""
    run = Driver()
    plan = run.published()
    run.now_s = 1000.0
    assert run(p.Tick()) == [], "an evaluation may take long"
    run.stage(plan, ranks=[0], digests=["x"])
    run.now_s = 1009.0
    assert run(p.Tick()) == []
    run.now_s = 1011.0
    (end, *_) = run(p.Tick())
    assert end.reason == "deadline"
    assert "rank 1" in end.detail


def test_replicas_that_differ_are_never_committed():
    """F6: the attempt ends, and from then on each rank keeps its own."""
    run = Driver()
    plan = run.published()
    actions = run.stage(plan, digests=("x", "y"))
    assert kinds(actions) == ["KeepPerRank", "EndAttempt", "Publish"]
    assert actions[1].reason == "replicas"


def test_lasting_failures_stop_training_when_the_user_wants_it():
    """I1: tolerated ones do not; the message says how many."""
    run = Driver(tolerated_failures=1)
    plan = run.published()
    assert kinds(run(p.Failed(0, plan.id, "no space"))) == ["EndAttempt"]
    run.now_s = 20.0
    (publish,) = run(p.Progress(300, 0.1))
    _, halt = run(p.Failed(0, publish.plan.id, "no space"))
    assert isinstance(halt, p.Halt)
    assert "2 saves in a row failed" in halt.reason
    assert "no space" in halt.reason


def test_a_committed_checkpoint_forgives_earlier_failures():
    """Only failures in a row count."""
    run = Driver(tolerated_failures=1)
    for i in range(6):
        run.now_s += 20
        actions = run.join(step=100 * (i + 1))
        plan = next(a for a in actions if isinstance(a, p.Publish)).plan
        if i % 2:
            run.stage(plan), run.persist(plan), run(p.CommitEnded(plan.id))
        else:
            assert kinds(run(p.Failed(0, plan.id, "x"))) == ["EndAttempt"]


def test_a_fenced_commit_halts():
    """What a cut-off generation wrote is not acknowledged."""
    run = Driver()
    plan = run.published()
    run.stage(plan), run.persist(plan)
    end, halt = run(p.CommitEnded(plan.id, "newer", is_fenced=True))
    assert end.reason == "fenced"
    assert halt.is_fenced
    assert run.machine.committed_step is None
    assert run(p.Tick()) == []


def test_a_fixed_interval_plans_its_multiples():
    """interval_steps=40: steps 40, 80, ..."""
    run = Driver(interval_steps=40)
    plan = run.published()
    assert plan.step == 120
    run.stage(plan), run.persist(plan)
    _, publish = run(p.CommitEnded(plan.id))
    assert publish.plan.step == 160


def test_a_save_that_is_asked_for_brings_a_far_plan_forward():
    """The user does not wait for the fixed interval."""
    run = Driver(interval_steps=10_000)
    assert run.published().step == 10_000
    end, publish = run(p.SaveAsked(0, 100))
    assert end.reason == "superseded"
    assert publish.plan.step < 200


def test_ranks_that_wait_together_are_served_where_they_stand():
    """save(block=True) on every rank; one alone gets no plan."""
    run = Driver(interval_steps=10_000)
    run.published()
    assert run(p.SaveAsked(0, 150, is_waiting=True)) == []
    accept, end, publish = run(p.SaveAsked(1, 150, is_waiting=True))
    assert accept == p.AcceptSave(150)
    assert end.reason == "superseded"
    assert publish.plan == Plan(2, 150)


def test_the_end_takes_a_last_checkpoint_once():
    """All ranks closed at one step: plan exactly that, then finish."""
    run = Driver(interval_steps=10_000)
    run.published()
    assert run(p.Closed(0, 500)) == []
    end, publish = run(p.Closed(1, 500))
    assert end.reason == "closing"
    assert publish.plan.step == 500
    run.stage(publish.plan), run.persist(publish.plan)
    assert kinds(run(p.CommitEnded(publish.plan.id))) == ["EndAttempt", "Finish"]
    assert run(p.Closed(1, 500)) == []


def test_the_end_waits_for_what_is_under_way():
    """An attempt that is staged is brought to its end first."""
    run = Driver()
    plan = run.published()
    run.stage(plan)
    assert run(p.Closed(0, 500), p.Closed(1, 500)) == []
    run.persist(plan)
    actions = run(p.CommitEnded(plan.id))
    assert kinds(actions) == ["EndAttempt", "Publish"]
    assert actions[1].plan.step == 500


def test_ranks_that_end_at_different_steps_get_no_last_checkpoint():
    """There is no step that all of them have."""
    run = Driver(interval_steps=10_000)
    run.published()
    actions = run(p.Closed(0, 500), p.Closed(1, 501))
    assert kinds(actions) == ["EndAttempt", "Finish"]
    assert "500" in actions[1].detail


def test_nothing_trained_nothing_saved():
    """A finished run that is started again writes no checkpoint."""
    run = Driver(start_step=500)
    run(p.Joined(0), p.Joined(1))
    assert run(p.Closed(0, 500), p.Closed(1, 500)) == [p.Finish("")]


@pytest.mark.parametrize(
    "event", [p.Joined(2), p.Staged(-1, 0, 0.0, ""), p.Staged(0, 7, 0.0, ""), p.Durable(7, shard(0), 1.0)]
)
def test_an_impossible_event_raises_and_changes_nothing(event):
    """An illegal event leaves the state as it was."""
    run = Driver()
    plan = run.published()
    before = repr([getattr(run.machine, name) for name in vars(run.machine)])
    with pytest.raises(p.ProtocolError):
        run(event)
    assert repr([getattr(run.machine, name) for name in vars(run.machine)]) == before
    assert run.machine.plan == plan


class TestTwoInFlight:
    """Ranks have memory for two snapshots."""

    @pytest.fixture
    def run(self):
        return Driver(max_in_flight=2, interval_steps=10)

    @pytest.fixture
    def first(self, run):
        return run.published()

    @pytest.fixture
    def second(self, run, first):
        """Published once the first is staged by all, while it is still being stored."""
        assert run.stage(first, ranks=[0], digests=["x"]) == []
        (action,) = run.stage(first, ranks=[1], digests=["x"])
        assert run.machine.plans == (first, action.plan)
        assert action.plan.step > first.step
        return action.plan

    def test_no_third_while_both_are_in_flight(self, run, first, second):
        """Its memory is taken."""
        assert run.stage(second) == []
        assert run(p.Progress(second.step + 50, 0.1), p.Tick()) == []
        (end, publish) = [*run.persist(first), *run(p.CommitEnded(first.id))][1:]
        assert end.plan == first
        assert run.machine.plans == (second, publish.plan)

    @pytest.mark.parametrize("is_faster", [False, True])
    def test_each_commits_when_it_is_whole(self, run, first, second, is_faster):
        """The one that was begun later may be faster: the newest step stays the newest."""
        run.stage(second)
        for plan in (second, first) if is_faster else (first, second):
            assert p.WriteCommit(plan, (shard(0), shard(1))) in run.persist(plan)
            assert run.machine.is_committing(plan)
            run(p.CommitEnded(plan.id))
        assert run.machine.committed_step == second.step

    def test_one_that_fails_leaves_the_other(self, run, first, second):
        """Each is an attempt of its own; a failed upload plans nothing anew."""
        (end,) = run(p.Failed(0, first.id, "disk full"))
        assert (end.plan, end.reason) == (first, "failed")
        assert run.machine.plans == (second,)
        run.stage(second)
        assert p.WriteCommit(second, (shard(0), shard(1))) in run.persist(second)

    def test_a_rank_that_is_lost_ends_what_it_has_not_staged(self, run, first, second):
        """The first is the agents' by now."""
        (end,) = run(p.Lost(1))
        assert (end.plan, end.reason) == (second, "lost")
        assert run.persist(first) == [p.WriteCommit(first, (shard(0), shard(1)))]

    def test_the_last_checkpoint_comes_alone(self, run, first, second):
        """It ends the run for all: what is being stored comes first."""
        (end,) = run(p.Closed(0, second.step + 1), p.Closed(1, second.step + 1))
        assert (end.plan, end.reason) == (second, "closing")
        assert run(p.Tick()) == []
        run.persist(first)
        (_, publish) = run(p.CommitEnded(first.id))
        assert publish.plan.step == second.step + 1

    def test_a_fenced_commit_ends_both(self, run, first, second):
        """A newer start owns the run."""
        run.persist(first)
        *ends, halt = run(p.CommitEnded(first.id, "cut off", is_fenced=True))
        assert [end.plan for end in ends] == [first, second]
        assert halt.is_fenced


class Oracle:
    """What must hold whatever happens, kept from the events alone."""

    def __init__(self, world_size, max_in_flight=1):
        self.world_size = world_size
        self.max_in_flight = max_in_flight
        self.staged: dict[int, dict[int, str]] = {}
        self.durable: dict[int, set[int]] = {}
        self.open: list[Plan] = []
        self.asked_to_commit: set[int] = set()
        self.last_id = 0

    def see_event(self, event):
        match event:
            case p.Staged(rank, plan_id, _, digest):
                self.staged.setdefault(plan_id, {})[rank] = digest
            case p.Durable(plan_id, info):
                self.durable.setdefault(plan_id, set()).add(info.rank)

    def see_action(self, action):
        match action:
            case p.Publish(plan):
                assert len(self.open) < self.max_in_flight, "each has memory of its own"
                for before in self.open:
                    assert len(self.staged[before.id]) == self.world_size, "it is staged, or none follows"
                assert plan.id > self.last_id, "ids only grow"
                self.open, self.last_id = [*self.open, plan], plan.id
            case p.WriteCommit(plan, shards):
                assert plan in self.open, "only what is in flight is committed"
                assert plan.id not in self.asked_to_commit, "once"
                assert len(self.durable[plan.id]) == self.world_size == len(shards)
                assert len(self.staged[plan.id]) == self.world_size
                assert len(set(self.staged[plan.id].values())) == 1, "replicas agree"
                assert [info.rank for info in shards] == list(range(self.world_size))
                self.asked_to_commit.add(plan.id)
            case p.EndAttempt(plan, reason):
                assert plan in self.open
                assert reason != "committed" or plan.id in self.asked_to_commit
                self.open = [other for other in self.open if other != plan]


@st.composite
def histories(draw):
    """Events as a lossy, repeating, reordering network brings them, mostly about plans that exist."""
    world_size = draw(st.integers(1, 3))
    rank = st.integers(0, world_size - 1)
    plan_id = st.integers(0, 6)
    event = st.one_of(
        st.builds(p.Joined, rank),
        st.builds(p.Lost, rank),
        st.builds(p.Progress, st.integers(0, 300), st.sampled_from([None, 0.01, 1.0])),
        st.builds(p.SaveAsked, rank, st.integers(0, 300), st.booleans()),
        st.builds(p.Staged, rank, plan_id, st.just(0.1), st.sampled_from(["x", "x", "x", "y"])),
        st.builds(p.Durable, plan_id, st.builds(shard, rank), st.just(1.0)),
        st.builds(p.Missed, rank, plan_id),
        st.builds(p.Failed, rank, plan_id, st.just("why")),
        st.builds(p.CommitEnded, plan_id, st.sampled_from([None, None, "error"]), st.just(False)),
        st.builds(p.Closed, rank, st.sampled_from([200, 200, 201])),
        st.just(p.Tick()),
    )
    return world_size, draw(st.lists(st.tuples(event, st.sampled_from([0.0, 0.1, 30.0])), max_size=60))


@settings(max_examples=400, deadline=None)
@given(histories(), st.integers(1, 3))
def test_no_history_breaks_the_invariants(history, max_in_flight):
    """Commit needs every rank's staged and durable word for one open plan, whatever else arrives."""
    world_size, events = history
    run, oracle = machine(world_size, max_in_flight=max_in_flight), Oracle(world_size, max_in_flight)
    now_s = 0.0
    for rank in range(world_size):
        run.handle(p.Joined(rank), now_s)
    for event, pause_s in events:
        now_s += pause_s
        # Most histories should get far: speak of the present plan where one is open.
        if oracle.open and getattr(event, "plan_id", None) in (1, 2, 3):
            event = dataclasses.replace(event, plan_id=oracle.open[event.plan_id % len(oracle.open)].id)
        oracle_before = oracle.open
        try:
            actions = run.handle(event, now_s)
        except p.ProtocolError:
            assert oracle.open == oracle_before
            continue
        oracle.see_event(event)
        for action in actions:
            oracle.see_action(action)
        assert list(run.plans) == oracle.open
        assert run.plan == (oracle.open[-1] if oracle.open else None)
