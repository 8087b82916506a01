"""Ranks at different places in the data never make a checkpoint."""

from raycheck.core import protocol as p
from raycheck.core.layout import ShardInfo


def attempt(places):
    """Stage and persist one plan on as many ranks as there are places; return all actions after the plan."""
    machine = p.CommitProtocol(
        world_size=len(places), interval_steps=1, tolerated_failures=None, latency_s=0.1, start_step=0
    )
    events = [*(p.Joined(rank) for rank in range(len(places))), p.Progress(5, 0.1)]
    (publish,) = (action for event in events for action in machine.handle(event, 0.0))
    plan, actions = publish.plan, []
    for rank, place in enumerate(places):
        shard = ShardInfo(rank, f"shard-{rank}", 100, "00000000")
        for event in (
            p.Staged(rank, plan.id, 0.0, "same", plan.step, place=place),
            p.Durable(plan.id, shard, 1.0, plan.step),
        ):
            actions += machine.handle(event, 0.0)
    return machine, actions


def test_ranks_at_one_place_commit():
    """The same text from all, or none at all."""
    for places in (["loader: epoch 1 after 8 items"] * 3, [""] * 3):
        _, actions = attempt(places)
        assert [type(action).__name__ for action in actions] == ["WriteCommit"]


def test_ranks_at_different_places_end_the_attempt_and_are_named():
    """A failed attempt that says which ranks are where, and what to do; the next one is planned as usual."""
    machine, actions = attempt(["a: epoch 0 after 9 items", *["a: epoch 0 after 6 items"] * 11])
    end, publish = actions[:2]
    assert (end.reason, end.is_committed, machine.failures_in_a_row) == ("data", False, 1)
    assert "rank 0 at 'a: epoch 0 after 9 items'" in end.detail
    assert "rank 1, 2, 3, 4, 5, 6, 7, 8, ... at 'a: epoch 0 after 6 items'" in end.detail
    assert "left out" in end.detail
    assert isinstance(publish, p.Publish)
    assert not any(isinstance(action, p.WriteCommit) for action in actions)
