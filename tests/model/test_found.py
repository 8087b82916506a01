"""Courses that went wrong once, each on the lowest level that shows it."""

from __future__ import annotations

from raycheck.core import protocol as p
from raycheck.core import restore as voting
from raycheck.core.layout import ShardInfo
from raycheck.core.lineage import CheckpointRef, GenerationId


def shard(rank):
    return ShardInfo(rank, f"s{rank}", 10, "0" * 8)


def machine():
    """A machine of two ranks with plan 1 published."""
    machine = p.CommitProtocol(world_size=2, interval_steps=10, tolerated_failures=None, latency_s=0.1)
    for rank in range(2):
        machine.handle(p.Joined(rank), 0.0)
    (published,) = machine.handle(p.Progress(1, 0.1), 0.0)
    return machine, published.plan


def commits(machine, *events):
    return [
        action
        for event in events
        for action in machine.handle(event, 0.0)
        if isinstance(action, p.WriteCommit)
    ]


def test_a_plan_id_that_is_given_twice_joins_no_two_steps():
    """An order of a lost coordinator arrives late, and its successor has given the id to another step."""
    machine_, plan = machine()
    events = [p.Staged(0, plan.id, 0.0, "", plan.step + 1), p.Durable(plan.id, shard(0), 0.0, plan.step + 1)]
    events += [p.Staged(1, plan.id, 0.0, "", plan.step), p.Durable(plan.id, shard(1), 0.0, plan.step)]
    assert not commits(machine_, *events), "rank 0's shard lies at another step"
    assert commits(
        machine_, p.Staged(0, plan.id, 0.0, "", plan.step), p.Durable(plan.id, shard(0), 0.0, plan.step)
    )


def test_an_agent_lost_during_the_commit_does_not_undo_it():
    """Its shard is durable: that it holds nothing any more fails nothing."""
    machine_, plan = machine()
    events = [p.Staged(r, plan.id, 0.0, "", plan.step) for r in range(2)]
    events += [p.Durable(plan.id, shard(r), 0.0, plan.step) for r in range(2)]
    assert commits(machine_, *events)
    assert machine_.is_committing(plan)
    assert machine_.handle(p.Failed(0, plan.id, "the agent of its node has restarted"), 0.0) == []
    ended = machine_.handle(p.CommitEnded(plan.id), 0.0)[0]
    assert ended.is_committed
    assert machine_.committed_step == plan.step


def test_what_a_commit_may_have_made_visible_is_marked():
    """A commit that ends badly may have written its manifest: its shards must stay; before, they may go."""
    machine_, plan = machine()
    events = [p.Staged(r, plan.id, 0.0, "", plan.step) for r in range(2)]
    commits(machine_, *events, *(p.Durable(plan.id, shard(r), 0.0, plan.step) for r in range(2)))
    assert machine_.handle(p.CommitEnded(plan.id, "no answer"), 0.0)[0].has_commit_begun
    assert machine_.handle(p.CommitEnded(plan.id, "no answer"), 0.0) == []

    machine_, plan = machine()
    machine_.handle(p.Durable(plan.id, shard(1), 0.0, plan.step), 0.0)
    ended = machine_.handle(p.Failed(0, plan.id, "no answer"), 0.0)[0]
    assert not ended.has_commit_begun
    assert ended.num_bytes == 10


def test_a_vote_that_the_record_decided_is_not_held_again():
    """Ranks that train already do not vote: the others would wait for them for ever."""
    ref = CheckpointRef(5, GenerationId(1, "a"), 1)
    vote = voting.RestoreVote.decided(ref, world_size=2)
    assert vote.is_over
    assert vote.ask(1) == [voting.Proceed(ref)]
    assert vote.report(1, ref, "late") == []
    assert voting.RestoreVote.decided(None, world_size=2).ask(0) == [voting.Proceed(None)]
