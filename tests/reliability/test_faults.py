"""Kills and refusals at every point of a checkpoint, on real processes; `benchmarks/faults.py` runs it long."""

from __future__ import annotations

import pytest

from raycheck.runtime import messages
from tests.reliability.chaos import KINDS, POINTS, Campaign, ChaosCluster, RestartableServer, applies

WORKER = "SIGKILL of a worker"
AGENT = "SIGKILL of an agent"
COORDINATOR = "loss of the coordinator"
ALL = "SIGKILL of everything"
REPLY = "lost reply"
REFUSAL = "503 for a while"
DISK = "disk full"
SERVER = "SIGKILL of the S3 server"

LOCAL_FAULTS = [
    ("before a plan", COORDINATOR),
    ("planned", AGENT),
    ("planned", WORKER),
    ("staged", WORKER),
    ("staged", COORDINATOR),
    ("uploading", ALL),
    ("uploading", AGENT),
    ("half uploaded", AGENT),
    ("half uploaded", COORDINATOR),
    ("half uploaded", DISK),
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

NETWORK_FAULTS = [
    ("starting", "stale listings"),
    ("starting", "PUT done, reply lost"),
    ("restoring", "cut within a reply"),
    ("recording", "AccessDenied on writes"),
    ("recorded", "503 SlowDown"),
    ("staged", "cut within a request"),
    ("uploading", "ExpiredToken"),
    ("half uploaded", "slow replies"),
    ("uploaded", "PUT done, reply lost"),
    ("uploaded", "AccessDenied on writes"),
    ("written", "cut within a reply"),
    ("rotating", "503 SlowDown"),
]


def plain(request, folder):
    return ChaosCluster(str(folder / "run"), None, folder)


def overlapping(request, folder):
    """Uploads take longer than the interval, and ranks have memory for two snapshots."""
    return ChaosCluster(str(folder / "run"), None, folder, max_in_flight=2, upload_bytes_per_s=1e5)


def on_s3(request, folder):
    server, proxy = request.getfixturevalue("server"), request.getfixturevalue("module_proxy")
    return ChaosCluster(
        "s3://raycheck-tests/campaign/run",
        {**server.options, "endpoint_url": proxy.endpoint},
        folder,
        proxy=proxy,
        direct_options=server.options,
    )


@pytest.fixture(scope="module")
def campaign(request, tmp_path_factory):
    """A run that goes on from test to test, until another is asked for: two would take each other's processor."""
    folder = tmp_path_factory.mktemp("campaign")
    cluster = request.param(request, folder)
    try:
        yield Campaign(cluster)
    finally:
        cluster.close()


def on(make_cluster):
    """Run a test in the campaign on this kind of cluster."""
    return pytest.mark.parametrize("campaign", [make_cluster], indirect=True, ids=[make_cluster.__name__])


def test_every_point_and_kind_is_tried():
    """No point or kind is left out, and each pair makes sense."""
    assert {point for point, _ in [*LOCAL_FAULTS, *NETWORK_FAULTS]} == set(POINTS)
    assert {kind for _, kind in [*LOCAL_FAULTS, *NETWORK_FAULTS]} == set(KINDS) - {SERVER}
    assert all(applies(point, kind) for point, kind in LOCAL_FAULTS)
    assert all(applies(point, kind, has=("proxy",)) for point, kind in NETWORK_FAULTS)


@on(plain)
@pytest.mark.parametrize(("point", "kind"), LOCAL_FAULTS, ids=lambda text: text.replace(" ", "-"))
def test_no_fault_loses_a_checkpoint(campaign, point, kind):
    """It fired; the run commits again; what restores is, bit for bit, no older than what was acknowledged."""
    outcome = campaign.inflict(point, kind, restarts=False)
    assert outcome.is_well, outcome


OVERLAPPING_FAULTS = [
    ("half uploaded", WORKER),
    ("uploading", COORDINATOR),
    ("half uploaded", AGENT),
    ("written", COORDINATOR),
    ("staged", AGENT),
    ("half uploaded", DISK),
    ("uploaded", REFUSAL),
    ("half uploaded", ALL),
]


@on(overlapping)
@pytest.mark.parametrize(("point", "kind"), OVERLAPPING_FAULTS, ids=lambda text: text.replace(" ", "-"))
def test_no_fault_loses_a_checkpoint_where_two_are_in_flight(campaign, point, kind):
    """The same while one snapshot is stored beside another."""
    outcome = campaign.inflict(point, kind)
    assert outcome.is_well, outcome
    assert num_overlapping(campaign.cluster.orders) > 0


def num_overlapping(orders):
    """Return how many plans were published to a node while another was in flight."""
    found, open_plans = 0, set()
    for order in orders:
        match order:
            case messages.PublishPlan(plan):
                found += bool(open_plans - {plan})
                open_plans.add(plan)
            case messages.AttemptEnded(plan):
                open_plans.discard(plan)
    return found


@on(on_s3)
@pytest.mark.parametrize(("point", "kind"), NETWORK_FAULTS, ids=lambda text: text.replace(" ", "-"))
def test_no_fault_of_the_network_loses_a_checkpoint(campaign, point, kind):
    """The same on S3, where each request may be cut, refused or answered in vain."""
    outcome = campaign.inflict(point, kind, restarts=False)
    assert outcome.is_well, outcome


@on(plain)
def test_a4_the_newest_stays_the_newest_while_another_is_uploaded(campaign):
    """A reader beside the run sees the last acknowledged step, before and after the writers die."""
    seen = []

    def look_and_kill():
        seen.append((campaign.cluster.judge(campaign.expected), campaign.cluster.newest_ack()))
        KINDS[ALL].strike(campaign.cluster)

    campaign.cluster.arm("half uploaded", look_and_kill)
    assert campaign.cluster.fired.wait(60)
    campaign._repair(ALL)
    ((verdict, acknowledged),) = seen
    assert verdict.problems == []
    assert verdict.newest == acknowledged == campaign._restored[0]


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


class TestTheJudge:
    """A judge that finds nothing proves nothing."""

    @pytest.fixture
    def run(self, tmp_path):
        folder = tmp_path / "cluster"
        folder.mkdir()
        cluster = ChaosCluster(str(tmp_path / "run"), None, folder, keep_last=3)
        try:
            campaign = Campaign(cluster)
            cluster.wait_for_ack(2)
            cluster.end_group()
            yield campaign
        finally:
            cluster.close()

    def newest(self, campaign):
        step = campaign.cluster.newest_ack()
        (folder,) = campaign.cluster.checkpoint_folders(step)
        return step, folder

    def test_a_whole_store_is_well(self, run):
        """No problem, and the newest is what was acknowledged last, or later."""
        verdict = run.cluster.judge(run.expected)
        assert verdict.problems == []
        assert verdict.newest >= run.cluster.newest_ack()

    def test_a_missing_shard_is_found(self, run):
        """A manifest without all that it names."""
        step, folder = self.newest(run)
        next(folder.glob("shard-00001*.safetensors")).unlink()
        verdict = run.cluster.judge(run.expected)
        assert any("incomplete" in problem for problem in verdict.problems)
        assert verdict.newest != step

    def test_a_flipped_bit_is_found(self, run):
        """One bit of one parameter."""
        _, folder = self.newest(run)
        shard = next(folder.glob("shard-00000*.safetensors"))
        data = bytearray(shard.read_bytes())
        data[4200] ^= 1
        shard.write_bytes(data)
        assert run.cluster.judge(run.expected).problems

    def test_a_step_under_another_steps_name_is_found(self, run):
        """All sums are right, and the state is that of another step."""
        step, folder = self.newest(run)
        manifest = folder / "manifest.json"
        manifest.write_text(manifest.read_text().replace(f'"step": {step}', f'"step": {step + 6}'))
        assert any("not what it was" in problem for problem in run.cluster.judge(run.expected).problems)

    def test_a_deleted_manifest_is_a_lost_checkpoint(self, run):
        """What was acknowledged is not there any more."""
        while run.cluster.judge(run.expected).newest >= run.cluster.newest_ack():
            max(run.cluster.checkpoint_folders(None)).joinpath("manifest.json").unlink()
        run._problems = []
        run._judge()
        assert "was acknowledged" in run._problems[0]
