"""``raycheck audit`` on stores that were written by hand."""

import json

import pytest
from typer.testing import CliRunner

from raycheck.cli import app
from raycheck.core.audit import Ledger, encode_account
from raycheck.core.cursor import Cursor, Dealing
from raycheck.core.layout import Manifest, ShardInfo, shard_name
from raycheck.core.lineage import CheckpointRef, GenerationId, record_for, tip
from raycheck.observe.events import EventLog
from raycheck.store.objects import Store
from raycheck.store.run import RunStore

LENGTH = 20


def audit(*arguments):
    done = CliRunner().invoke(app, ["audit", *map(str, arguments)])
    return done.exit_code, done.output


def audit_json(*arguments):
    code, output = audit(*arguments, "--json")
    return code, json.loads(output)


class Writer:
    """Writes what a run leaves in its store, of any history."""

    def __init__(self, url, options=None):
        self.run_store = RunStore(Store(url, options))
        self.events = EventLog(self.run_store.store)
        self.generation = None
        self.number = 0

    def start(self, parent=None, world_size=2):
        """Start a generation that restored ``parent``."""
        self.number += 1
        claim = GenerationId(self.number, f"{self.number:08x}")
        self.run_store.store.put(f"generations/{self.number:06d}-{claim.id}.claim.json", b"{}")
        record = record_for(
            claim, world_size=world_size, parent=parent, tip_record=tip(self.run_store.records())
        )
        self.run_store.write_record(record)
        self.generation, self.world_size = claim, world_size
        accounts = self.run_store.read_manifest(parent).accounts if parent else {}
        fields = [parent.step, str(parent.generation), parent.plan_id] if parent else None
        self.events.record("restored", str(claim), parent=fields, parent_accounts=accounts)

    def checkpoint(self, step, *runs, told=True, there=True):
        """Commit a checkpoint with an account of these runs; return its ref."""
        cursor = Cursor(length=LENGTH, epoch=runs[-1][2], consumed=runs[-1][3])
        dealing = Dealing(world_size=self.world_size, batch_size=2)
        account = {**encode_account(cursor, dealing, Ledger(cursor)), "runs": [list(run) for run in runs]}
        ref = CheckpointRef(step, self.generation, 1)
        if told:
            facts = {"step": step, "plan_id": 1, "accounts": {"loader": account}}
            self.events.record("checkpoint", str(self.generation), **facts)
        shards = tuple(
            ShardInfo(rank, shard_name(rank, self.world_size), 8, "00000000")
            for rank in range(self.world_size)
        )
        manifest = Manifest(
            ref=ref, world_size=self.world_size, layout_digest="0" * 32, shards=shards, created_unix_s=0.0,
            write_id="x", metrics={}, accounts={"loader": account},
        )  # fmt: skip
        if there:
            self.run_store.write_manifest(manifest)
        return ref


@pytest.fixture
def writer(tmp_path):
    return Writer(tmp_path / "run" / "raycheck")


def test_a_clean_run_of_three_generations(writer, tmp_path):
    """Exit code 0, whether the run's folder or raycheck's own in it is given; lost checkpoints do not count."""
    writer.start()
    parent = writer.checkpoint(3, (0, 0, 0, 12))
    writer.checkpoint(4, (0, 0, 0, 16), there=False)
    writer.start(parent, world_size=1)
    parent = writer.checkpoint(9, (0, 12, 1, 4))
    writer.start(parent)
    writer.checkpoint(13, (1, 4, 1, 20))
    writer.events.flush()
    for place in (tmp_path / "run", tmp_path / "run" / "raycheck", f"{tmp_path}/run/"):
        code, report = audit_json(place)
        assert code == 0, report
        assert report["verdict"] == "every item was consumed exactly once"
    (loader,) = report["loaders"]
    assert [[piece[:2] for piece in epoch["pieces"]] for epoch in loader["epochs"]] == [
        [[0, 12], [12, 20]],
        [[0, 4], [4, 20]],
    ]
    code, output = audit(tmp_path / "run")
    assert code == 0
    assert "every item was consumed exactly once" in output


def test_duplicates_and_gaps_are_shown_with_their_positions(writer, tmp_path):
    """Exit code 1: a loader that was not restored, and an epoch that was cut short."""
    writer.start()
    parent = writer.checkpoint(3, (0, 0, 0, 12))
    writer.start(parent)
    writer.checkpoint(9, (0, 8, 0, 16), (1, 0, 1, 4))
    writer.events.flush()
    code, report = audit_json(tmp_path / "run")
    assert code == 1
    first = report["loaders"][0]["epochs"][0]
    assert (first["duplicates"], first["gaps"]) == ([[8, 12]], [[16, 20]])
    code, output = audit(tmp_path / "run")
    assert code == 1
    assert "4 items consumed twice: positions 8-12" in output
    assert "4 items consumed never: positions 16-20" in output


def test_without_telemetry_the_manifests_tell(writer, tmp_path):
    """A coordinator that was killed before it wrote its telemetry takes nothing along."""
    writer.start()
    parent = writer.checkpoint(3, (0, 0, 0, 12), told=False)
    writer.start(parent)
    writer.checkpoint(5, (0, 12, 0, 20), told=False)
    code, report = audit_json(tmp_path / "run")
    assert code == 0, report


def test_what_the_next_start_noted_stands_in_for_a_manifest_that_is_rotated_away(writer, tmp_path):
    """The event of a checkpoint was lost and its manifest deleted since."""
    writer.start()
    parent = writer.checkpoint(3, (0, 0, 0, 12), told=False)
    writer.start(parent)
    writer.checkpoint(5, (0, 12, 0, 20))
    writer.events.flush()
    writer.run_store.delete(parent)
    assert audit_json(tmp_path / "run")[0] == 0


def test_what_nothing_tells_of_is_said(writer, tmp_path):
    """Exit code 2 with the generation that is missing."""
    writer.start()
    parent = writer.checkpoint(3, (0, 0, 0, 12), told=False)
    writer.start(parent)
    writer.checkpoint(5, (0, 12, 0, 20), told=False)
    writer.run_store.delete(parent)
    code, report = audit_json(tmp_path / "run")
    assert code == 2, "the gap where the unknown generation was is none that is proven"
    assert report["loaders"][0]["epochs"][0]["gaps"] == [[0, 12]]
    assert "g000001-00000001, steps 1 to 3: no account" in report["unknown"][0]


@pytest.mark.parametrize("damage", [{"runs": [[0, 0, 0, 10**9]]}, {"length": "many"}, 7, [[]]])
def test_a_damaged_account_is_unknown(writer, tmp_path, damage):
    """Exit code 2, no traceback."""
    writer.start()
    ref = writer.checkpoint(3, (0, 0, 0, 12), told=False)
    path = tmp_path / "run" / "raycheck" / "checkpoints" / "step-0000000003-g000001-00000001-p000001"
    fields = json.loads((path / "manifest.json").read_text())
    account = fields["accounts"]["loader"]
    fields["accounts"]["loader"] = {**account, **damage} if isinstance(damage, dict) else damage
    (path / "manifest.json").write_text(json.dumps(fields))
    code, report = audit_json(tmp_path / "run")
    assert code == 2, report
    assert f"step {ref.step}" in report["unknown"][0]


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        ("checkpoint", {"accounts": {}}),
        ("checkpoint", {"step": "x", "plan_id": 1, "accounts": {}}),
        ("restored", {"parent": [1]}),
        ("restored", {"parent": [3, "g", 1]}),
    ],
)
def test_a_damaged_event_is_unknown(writer, tmp_path, kind, facts):
    """Exit code 2, no traceback: the rest is still shown."""
    writer.start()
    writer.checkpoint(3, (0, 0, 0, 12))
    writer.events.record(kind, "g000009-00000009", **facts)
    writer.events.flush()
    code, report = audit_json(tmp_path / "run")
    assert code == 2, report
    assert "cannot be read" in report["unknown"][0]
    assert report["loaders"][0]["epochs"][0]["expected"] == 12


@pytest.mark.parametrize(
    "arguments", [["{tmp}/nothing"], ["{tmp}", "--storage-options", "3"], ["nosuch://x/y"]]
)
def test_what_cannot_be_read_is_unknown(tmp_path, arguments):
    """No run there, wrong options, no such kind of store: exit code 2."""
    code, output = audit(*(argument.format(tmp=tmp_path) for argument in arguments))
    assert code == 2, output


def test_on_s3(s3_url):
    """The same through the run's URL and options."""
    writer = Writer(f"{s3_url.url}/raycheck", s3_url.options)
    writer.start()
    writer.checkpoint(5, (0, 0, 0, 20))
    writer.events.flush()
    code, report = audit_json(s3_url.url, "--storage-options", json.dumps(s3_url.options))
    assert code == 0, report
