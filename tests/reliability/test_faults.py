"""Kills and refusals at every point of a checkpoint, on real processes; `benchmarks/faults.py` runs it long."""

from __future__ import annotations

import pytest

from tests.reliability.chaos import KINDS, POINTS, Campaign, ChaosCluster, RestartableServer, applies

WORKER, AGENT, COORDINATOR, ALL, REPLY, REFUSAL, SERVER = KINDS

FAULTS = [
    ("before a plan", COORDINATOR),
    ("planned", AGENT),
    ("planned", WORKER),
    ("staged", WORKER),
    ("staged", COORDINATOR),
    ("uploading", ALL),
    ("uploading", AGENT),
    ("half uploaded", AGENT),
    ("half uploaded", COORDINATOR),
    ("uploaded", REFUSAL),
    ("uploaded", WORKER),
    ("written", COORDINATOR),
    ("written", AGENT),
    ("written", REPLY),
    ("written", ALL),
    ("rotating", COORDINATOR),
    ("rotating", REPLY),
    ("restoring", WORKER),
    ("restoring", COORDINATOR),
    ("verified", AGENT),
    ("verified", ALL),
    ("recording", COORDINATOR),
    ("recording", REFUSAL),
    ("recorded", COORDINATOR),
    ("recorded", WORKER),
]


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    folder = tmp_path_factory.mktemp("campaign")
    cluster = ChaosCluster(str(folder / "run"), None, folder)
    try:
        yield Campaign(cluster)
    finally:
        cluster.close()


def test_every_point_and_kind_is_tried():
    """No point of the list is left out, and each pair makes sense."""
    assert {point for point, _ in FAULTS} == set(POINTS)
    assert {kind for _, kind in FAULTS} == set(KINDS) - {SERVER}
    assert all(applies(point, kind) for point, kind in FAULTS)


@pytest.mark.parametrize(("point", "kind"), FAULTS, ids=lambda text: text.replace(" ", "-"))
def test_no_fault_loses_a_checkpoint(campaign, point, kind):
    """It fired; the run commits again; what restores is, bit for bit, no older than what was acknowledged."""
    outcome = campaign.inflict(point, kind, restarts=False)
    assert outcome.is_well, outcome


def test_a4_the_newest_stays_the_newest_while_another_is_uploaded(campaign):
    """A reader beside the run sees the last acknowledged step, before and after the writers die."""
    seen = []

    def look_and_kill():
        seen.append((campaign.judge_store(), campaign.cluster.newest_ack()))
        KINDS[ALL](campaign.cluster)

    campaign.cluster.arm("half uploaded", look_and_kill)
    assert campaign.cluster.fired.wait(60)
    campaign._repair(ALL)
    ((newest, is_wrong), acknowledged) = seen[0]
    assert not is_wrong
    assert newest == acknowledged == campaign._last_restore[0]


def test_a_killed_s3_server_loses_nothing(tmp_path):
    """It comes back half way through an upload, and at the commit, and the run goes on."""
    server = RestartableServer(tmp_path / "s3")
    try:
        cluster = ChaosCluster(server.url, server.options, tmp_path, server=server)
        try:
            campaign = Campaign(cluster)
            for point in ("uploading", "written"):
                outcome = campaign.inflict(point, SERVER, restarts=point == "written")
                assert outcome.is_well, outcome
        finally:
            cluster.close()
    finally:
        server.kill()
