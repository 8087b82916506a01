"""A node that is about to go is left with what it alone holds: the rest is stored by those that stay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycheck.core.notice import Notice, ranks_to_spare
from raycheck.core.page import MAX_SPARED_RANKS, PAGE_BYTES, ControlPage, Plan
from raycheck.core.plan import TensorSpec, deal
from raycheck.observe.events import EventLog
from raycheck.runtime import messages
from raycheck.runtime.preempting import Preempting
from tests.runtime import jobs
from tests.runtime.harness import LocalCluster, wait_until

RANKS = st.sets(st.integers(0, MAX_SPARED_RANKS + 100), max_size=20)


@given(RANKS, st.integers(1, 100))
def test_the_page_says_who_is_spared_in_which_plan(ranks, plan_id):
    """And of no other plan; ranks beyond its bits take their share."""
    page = ControlPage(memoryview(bytearray(PAGE_BYTES)))
    page.plan = Plan(plan_id, 7)
    page.record_step(1.5, 0.5, is_overlapped=True)
    page.spare(plan_id, ranks)
    assert page.spared(plan_id) == {rank for rank in ranks if rank < MAX_SPARED_RANKS}
    assert page.spared(plan_id + 1) == frozenset()
    page.spare(plan_id + 1, {3})
    assert (page.spared(plan_id), page.spared(plan_id + 1)) == (frozenset(), {3})
    page.spare(plan_id + 2, ())
    assert (page.spared(plan_id + 1), page.spared(plan_id + 2)) == ({3}, frozenset())
    page.spare(plan_id + 1, ())
    assert page.spared(plan_id + 1) == frozenset(), "the id given again, by a coordinator that has restarted"
    assert page.plan == Plan(plan_id, 7)
    assert [record.duration_s for record in page.records_since(0)] == [1.5]


def test_the_ring_of_records_and_the_spared_ranks_do_not_meet():
    """A full ring changes no bit, and all bits no record."""
    page = ControlPage(memoryview(bytearray(PAGE_BYTES)))
    page.spare(1, {0, MAX_SPARED_RANKS - 1})
    for _ in range(1000):
        page.record_step(2**33, 2**33, is_overlapped=True)
    assert page.spared(1) == {0, MAX_SPARED_RANKS - 1}
    page.spare(2, range(MAX_SPARED_RANKS))
    assert {record.duration_s for record in page.records_since(0)} == {2**33}


@given(st.integers(1, 6), st.sets(st.integers(0, 5)), st.integers(0, 5000))
def test_those_that_stay_are_dealt_everything_evenly(num_ranks, spared, rows):
    """Nobody that is spared gets anything, unless all are."""
    specs = [TensorSpec(f"t{i}", "float32", 4, (rows, 100)) for i in range(5)]
    shares = deal(specs, num_ranks, frozenset(spared))
    sizes = [sum(chunk.num_bytes for chunk in share) for share in shares]
    assert sum(sizes) == sum(spec.num_bytes for spec in specs)
    staying = [rank for rank in range(num_ranks) if rank not in spared] or list(range(num_ranks))
    assert [share for rank, share in enumerate(shares) if rank in staying] == deal(specs, len(staying))
    assert all(sizes[rank] == 0 for rank in range(num_ranks) if rank not in staying)


def test_who_is_spared():
    """The ranks of nodes that go, if others stay and it is known where every rank is."""
    node_of = {0: "a", 1: "a", 2: "b"}
    assert ranks_to_spare({"b"}, node_of, 3) == (2,)
    assert ranks_to_spare({"a", "x"}, node_of, 3) == (0, 1)
    assert ranks_to_spare({"a", "b"}, node_of, 3) == ()
    assert ranks_to_spare({"b"}, {0: "a", 2: "b"}, 3) == ()
    assert ranks_to_spare(set(), node_of, 3) == ()


def test_only_a_failure_ends_the_sparing():
    """A plan that a rank saw too late says nothing of memory: the next one spares the same ranks."""
    orders = []
    preempting = Preempting(events=EventLog(None), lead_s=0.5, ask=lambda: None, tell_all=orders.append)
    preempting.hear(Notice("spot", 600.0, "", "b"), 0.0, "g1")
    for number, has_failed in enumerate([False, False, True, False], start=1):
        plan = Plan(number, 10 * number)
        preempting.publish(plan, float(number), node_of={0: "a", 1: "b"}, world_size=2)
        preempting.ended(plan, is_committed=False, has_failed=has_failed, is_replaced=False)
    assert [order.spared for order in orders] == [(1,), (1,), (1,), ()]


@pytest.fixture
def make_cluster(tmp_path):
    made = []

    def make(name, **settings):
        made.append(
            LocalCluster(
                str(tmp_path / name),
                num_nodes=2,
                interval_steps=FAR,
                keep_last=100,
                telemetry=False,
                **settings,
            )
        )
        return made[-1]

    yield make
    for each in made:
        each.close()


FAR = 10**9
WIDTH = 50_000
STATE_BYTES = 3 * 4 * (8 * WIDTH + WIDTH + WIDTH + 1)


def first_commit(cluster, notice):
    """Train on two nodes, announce something, and return the manifest and the layout that come of it."""
    generation = cluster.start(jobs.train, {"steps": FAR, "width": WIDTH}, world_size=2)
    wait_until(lambda: (cluster.status()["step"] or 0) > 3, "training")
    cluster.coordinator.hear_notice(notice)
    wait_until(cluster.committed_steps, "a checkpoint")
    generation.kill_all()
    (ref,) = (ref for ref in cluster.run_store.attempts() if cluster.run_store.is_committed(ref))
    manifest = cluster.run_store.read_manifest(ref)
    return manifest, cluster.run_store.read_layout(manifest)


def test_a_node_that_goes_stores_only_what_it_alone_holds(make_cluster):
    """And what the two stored restores bit for bit, by both and by one."""
    cluster = make_cluster("run")
    manifest, entries = first_commit(cluster, Notice("spot", 600.0, "", "node1"))
    assert {entry.owner for entry in entries if entry.rank == 1} == {1}
    assert manifest.shards[0].num_bytes > STATE_BYTES
    assert manifest.shards[1].num_bytes < STATE_BYTES // 20
    end = manifest.ref.step + 5
    results = cluster.start(jobs.train, {"steps": end, "width": WIDTH}, world_size=2).results()
    assert [result["restored"] for result in results] == [manifest.ref.step] * 2
    straight = make_cluster("straight").start(jobs.train, {"steps": end, "width": WIDTH}, world_size=2)
    assert [r["digest"] for r in results] == [r["digest"] for r in straight.results()]


def test_what_is_merely_at_risk_stores_its_share(make_cluster):
    """An advice without an end may hold for days."""
    manifest, _ = first_commit(make_cluster("run"), Notice("rebalance", None, "", "node1"))
    assert manifest.shards[1].num_bytes > STATE_BYTES // 3


def test_without_memory_for_larger_shares_all_take_theirs(make_cluster):
    """The attempt fails before anything is stored, and the next is dealt as ever."""
    cluster = make_cluster("run", node_memory_bytes=2 * (STATE_BYTES * 3 // 4))
    manifest, _ = first_commit(cluster, Notice("spot", 600.0, "", "node1"))
    assert manifest.shards[1].num_bytes > STATE_BYTES // 3
    shown = {
        order.plan.id: order.spared
        for order in cluster.orders
        if isinstance(order, messages.PublishPlan) and order.plan.step < FAR
    }
    assert list(shown.values()) == [(1,), ()], "it was tried, and given up"
