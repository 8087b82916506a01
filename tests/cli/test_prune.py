"""``raycheck prune``: what goes, what stays whatever is asked for, and who is asked."""

import dataclasses
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycheck.core.inventory import Found, RunFacts, take_stock
from raycheck.core.layout import MANIFEST, Manifest, ShardInfo, shard_name, sums_name
from raycheck.core.lineage import CheckpointRef, GenerationId, GenerationRecord, record_for
from raycheck.core.pruning import START_GRACE_S, Rules, choose, refusal
from tests.cli.stored import edit, end_unseen, folder_of, generation_file, register, start_another, steps_of

ALL = [(2, 1), (3, 1), (3, 2), (4, 2), (5, 2)]


def test_the_newest_stay_and_what_was_left_behind_goes(raycheck_json, stored):
    """Step 3 of the first start does not count towards those to keep."""
    code, report = raycheck_json("prune", stored, "--keep", 2, "--yes")
    assert code == 0
    assert steps_of(stored) == [(4, 2), (5, 2)]
    assert report["deleted"] == [2, 3, 3]
    assert not any((stored / "raycheck" / "checkpoints").glob("step-0000000002-*")), "nothing is left of it"
    assert len(list((stored / "raycheck" / "generations").iterdir())) == 6, "records are never touched"
    assert raycheck_json("prune", stored, "--keep", 2, "--yes")[1]["deleted"] == []


def test_a_dry_run_deletes_nothing(raycheck, raycheck_json, stored):
    """And says what would go, and why."""
    code, output = raycheck("prune", stored, "--keep", 1, "--dry-run")
    assert code == 0
    assert "4 checkpoints, " in output
    assert "would be deleted" in output
    _, report = raycheck_json("prune", stored, "--keep", 1, "--dry-run")
    assert [c["step"] for c in report["checkpoints"] if c["goes"]] == [2, 3, 3, 4]
    assert steps_of(stored) == ALL


def test_age_is_that_of_the_commit(raycheck_json, stored):
    """Only what is older goes, beyond those to keep."""
    for at in [(2, 1), (4, 2), (5, 2)]:
        edit(folder_of(stored, *at) / "manifest.json", created_unix_s=time.time() - 8 * 86400)
    code, _ = raycheck_json("prune", stored, "--older-than", "7d", "--yes")
    assert code == 0
    assert steps_of(stored) == [(3, 1), (3, 2), (5, 2)], "the newest stays however old it is"


def test_milestones_stay_where_they_are_named(raycheck_json, stored):
    """As the settings of a run name them."""
    raycheck_json("prune", stored, "--keep", 1, "--keep-every-steps", 3, "--yes")
    assert steps_of(stored) == [(3, 2), (5, 2)]


def test_registered_and_damaged_and_incomplete_ones_stay(raycheck_json, stored):
    """They are not counted among those to keep either."""
    register(stored, 5)
    (folder_of(stored, 2, 1) / "shard-00001-of-00002.safetensors").unlink()
    (folder_of(stored, 3, 1) / "manifest.json").unlink()
    code, report = raycheck_json("prune", stored, "--keep", 1, "--yes")
    assert code == 0
    assert report["deleted"] == [3]
    assert steps_of(stored) == [(2, 1), (4, 2), (5, 2)]
    assert folder_of(stored, 3, 1).exists()


def test_while_a_job_may_be_alive_the_newest_two_stay(raycheck_json, raycheck, stored):
    """Unless the user knows that none is."""
    end_unseen(stored)
    code, output = raycheck("prune", stored, "--keep", 1, "--dry-run")
    assert "A job may be alive: the newest 2 stay, not 1" in output
    raycheck_json("prune", stored, "--keep", 1, "--yes")
    assert steps_of(stored) == [(4, 2), (5, 2)]
    code, _ = raycheck_json("prune", stored, "--keep", 1, "--not-running", "--yes")
    assert code == 0
    assert steps_of(stored) == [(5, 2)]


def test_while_a_job_starts_nothing_is_deleted(raycheck, raycheck_json, stored):
    """Exit code 1: it may be restoring any of them. A start that died long ago does not count."""
    start_another(stored, time.time() - 60)
    code, output = raycheck("prune", stored, "--keep", 1, "--yes")
    assert code == 1
    assert "g000003-0000abcd is starting and may be reading any checkpoint" in output
    assert steps_of(stored) == ALL
    start_another(stored, time.time() - START_GRACE_S - 60)
    assert raycheck_json("prune", stored, "--keep", 1, "--yes")[0] == 0
    assert steps_of(stored) == [(4, 2), (5, 2)]


def test_a_start_in_the_middle_ends_it(raycheck, stored, monkeypatch):
    """What has not been deleted by then stays: it is the new start's."""
    from raycheck.store.run import RunStore

    delete = RunStore.delete
    deleted = []

    def delete_and_start(self, ref):
        delete(self, ref)
        deleted.append(ref.step)
        start_another(stored, time.time())

    monkeypatch.setattr(RunStore, "delete", delete_and_start)
    code, output = raycheck("prune", stored, "--keep", 1, "--yes")
    assert deleted == [2]
    assert code == 2
    assert "g000003-0000abcd has started meanwhile" in output
    assert steps_of(stored) == ALL[1:]


def test_what_is_registered_in_the_middle_stays(raycheck, stored, monkeypatch):
    """A running job may hand a checkpoint to Ray Train while others are being deleted."""
    from raycheck.store.run import RunStore

    delete = RunStore.delete

    def delete_and_register(self, ref):
        delete(self, ref)
        register(stored, 4)

    monkeypatch.setattr(RunStore, "delete", delete_and_register)
    code, output = raycheck("prune", stored, "--keep", 1, "--yes")
    assert code == 0
    assert "3 checkpoints" in output
    assert steps_of(stored) == [(4, 2), (5, 2)]


def test_without_records_nothing_is_deleted(raycheck, stored):
    """Exit code 1: nobody can say which count."""
    for path in (stored / "raycheck" / "generations").glob("*.json"):
        if path.name.count(".") == 1:
            path.unlink()
    code, output = raycheck("prune", stored, "--keep", 1, "--yes")
    assert code == 1
    assert "no record in generations/" in output
    assert steps_of(stored) == ALL


def test_what_another_run_wrote_stays(raycheck_json, stored):
    """A checkpoint that was copied here without the claim of its start."""
    generation_file(stored, 1, ".claim").unlink()
    raycheck_json("prune", stored, "--keep", 1, "--yes")
    assert steps_of(stored) == [(2, 1), (3, 1), (5, 2)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--yes"], "give --keep, --older-than or both"),
        (["--keep", "0", "--yes"], "--keep"),
        (["--older-than", "a while", "--yes"], "is not a duration such as 7d"),
        (["--keep", "1"], "there is nobody to ask: give --yes or --dry-run"),
    ],
)
def test_wrong_options_delete_nothing(raycheck, stored, arguments, text):
    """Exit code 2 and a message."""
    code, output = raycheck("prune", stored, *arguments)
    assert code == 2
    assert text in " ".join(output.replace("│", " ").split())
    assert steps_of(stored) == ALL


@pytest.mark.parametrize(("answer", "code", "left"), [("y\n", 0, [(5, 2)]), ("n\n", 1, ALL)])
def test_on_a_terminal_it_asks(raycheck, stored, monkeypatch, answer, code, left):
    """And does nothing without a yes."""
    monkeypatch.setattr("raycheck.cli.prune.is_asked", lambda: True)
    found, output = raycheck("prune", stored, "--keep", 1, input=answer)
    assert "Delete them?" in output
    assert ("nothing was deleted" in output) == (code == 1)
    assert (found, steps_of(stored)) == (code, left)


def test_on_s3(raycheck_json, on_s3, s3_url):
    """Objects that are gone are gone; other runs beside it are not looked at."""
    url, options = on_s3
    other = f"{s3_url.prefix}/gpt2/raycheck/checkpoints/step-0000000001-g000001-ab-p000001/manifest.json"
    s3_url.client.put_object(Bucket=s3_url.bucket, Key=other, Body=b"{}")
    code, report = raycheck_json("prune", url, "--keep", 1, "--yes", *options)
    assert (code, report["deleted"]) == (0, [2, 3, 3, 4])
    listed = s3_url.client.list_objects_v2(Bucket=s3_url.bucket, Prefix=f"{s3_url.prefix}/")["Contents"]
    keys = [entry["Key"] for entry in listed]
    assert other in keys
    assert {key.split("/")[4][:15] for key in keys if "/gpt/raycheck/checkpoints/" in key} == {
        "step-0000000005"
    }


# The decision alone, on runs of any shape.

WORLD = 2


def manifest_of(ref, created_unix_s):
    shards = tuple(ShardInfo(rank, shard_name(rank, WORLD), 8, "00000000") for rank in range(WORLD))
    return Manifest(
        ref=ref, world_size=WORLD, layout_digest="ab", shards=shards, created_unix_s=created_unix_s,
        write_id="x", metrics={},
    )  # fmt: skip


def found_of(ref, created_unix_s, kind):
    manifest = manifest_of(ref, created_unix_s)
    sizes = {
        MANIFEST: 1,
        **{s.name: 8 for s in manifest.shards},
        **{sums_name(s.name): 8 for s in manifest.shards},
    }
    if kind == "incomplete":
        del sizes[MANIFEST]
        return Found(ref=ref, sizes=sizes, manifest=None)
    if kind == "damaged":
        return Found(ref=ref, sizes=sizes, manifest=None, fault="damaged")
    if kind == "short":
        sizes[manifest.shards[0].name] = 7
    return Found(ref=ref, sizes=sizes, manifest=manifest)


@st.composite
def runs(draw):
    """A run of some starts, each from a checkpoint of those before or from nothing, and what is in its store."""
    record: GenerationRecord | None = None
    refs: list[CheckpointRef] = []
    claims = []
    for number in range(1, draw(st.integers(1, 4)) + 1):
        generation = GenerationId(number, f"{number:02x}")
        claims.append(generation)
        candidates = [r for r in refs if record and _counts(record, r)]
        parent = draw(st.sampled_from([None, *candidates]))
        record = record_for(generation, world_size=WORLD, parent=parent, tip_record=record)
        first = parent.step if parent else 0
        steps = draw(st.lists(st.integers(1, 30), max_size=5, unique=True))
        refs += [CheckpointRef(first + step, generation, 1) for step in steps]
    kinds = st.sampled_from(["whole", "whole", "whole", "incomplete", "damaged", "short"])
    found = [found_of(ref, draw(st.floats(0, 1000)), draw(kinds)) for ref in refs]
    if draw(st.booleans()):
        claims.append(GenerationId(9, "09"))
    facts = RunFacts(
        tip=record,
        claims=frozenset(claims) - draw(st.sets(st.sampled_from(claims[:1]))),
        has_ended=draw(st.booleans()),
        layouts=frozenset(["ab"]),
        registered=frozenset(draw(st.sets(st.sampled_from(refs)))) if refs else frozenset(),
    )
    return facts, take_stock(facts, found)


def _counts(record, ref):
    limits = {a.generation: a.left_at_step for a in record.chain}
    return ref.generation == record.generation or ref.step <= limits.get(ref.generation, -1)


rules = st.builds(
    Rules,
    keep=st.integers(1, 4),
    older_than_s=st.none() | st.floats(0, 1000),
    keep_every_steps=st.none() | st.integers(1, 10),
    is_running=st.booleans(),
)


@given(runs(), rules)
def test_what_must_stay_stays(run, given_rules):
    """Whatever the run and the rules."""
    facts, stock = run
    choices = choose(stock, facts, given_rules, now_unix_s=1000.0)
    assert [choice.stored for choice in choices] == stock
    gone = [choice.stored for choice in choices if choice.goes]
    assert all(each.state in ("usable", "fenced") for each in gone)
    assert not any(each.is_registered or each.ref.generation not in facts.claims for each in gone)
    mine = sorted(
        each.ref for each in stock if each.state == "usable" and each.ref.generation in facts.claims
    )
    left = [ref for ref in mine if ref not in {each.ref for each in gone}]
    wanted = (
        max(given_rules.keep, 2)
        if given_rules.is_running and not facts.has_ended and facts.claims
        else (given_rules.keep)
    )
    assert left[-wanted:] == mine[-wanted:]
    if given_rules.older_than_s is not None:
        assert all(1000.0 - each.created_unix_s > given_rules.older_than_s for each in gone)
    usable = [each.ref for each in stock if each.is_usable]
    assert not usable or {each.ref for each in gone} != set(usable)


@given(runs(), rules)
def test_choosing_again_after_the_deletion_finds_nothing_more(run, given_rules):
    """What stays does not depend on what went."""
    facts, stock = run
    choices = choose(stock, facts, given_rules, now_unix_s=1000.0)
    left = [choice.stored for choice in choices if not choice.goes]
    assert not any(choice.goes for choice in choose(left, facts, given_rules, now_unix_s=1000.0))


@given(runs(), rules)
def test_nothing_goes_while_a_start_may_be_reading(run, given_rules):
    """Its claim is newer than the tip, and young or of unknown age."""
    facts, _ = run
    starting = dataclasses.replace(
        facts, has_ended=False, claims=frozenset([*facts.claims, GenerationId(10, "0a")])
    )
    for claimed_unix_s in (None, 900.0):
        refused = refusal(starting, given_rules, claimed_unix_s=claimed_unix_s, now_unix_s=1000.0)
        assert (refused is not None) == given_rules.is_running
    assert refusal(starting, given_rules, claimed_unix_s=-START_GRACE_S, now_unix_s=1000.0) is None


def test_rules_must_keep_something():
    """Zero is refused by name."""
    with pytest.raises(ValueError, match="--keep 0: must be at least 1"):
        Rules(keep=0)
