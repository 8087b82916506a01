"""``raycheck ls`` and ``raycheck show``."""

import json

import pyarrow.parquet as pq
import pytest

from tests.cli.stored import edit, end_unseen, folder_of, generation_file, register, start_another

SHARD = "shard-00001-of-00002.safetensors"


def states(report):
    return {(c["step"], int(c["generation"][1:7])): c["state"] for c in report["checkpoints"]}


def test_states_of_a_run_that_went_back(raycheck_json, stored):
    """Either folder may be given; the step that was left behind is fenced, and by step, the newest last."""
    for place in (stored, stored / "raycheck", f"{stored}/", f"file://{stored}"):
        code, report = raycheck_json("ls", place)
        assert code == 0
        assert states(report) == {(2, 1): "usable", (3, 1): "fenced", (3, 2): "usable", (4, 2): "usable",
                                  (5, 2): "usable"}  # fmt: skip
    lineage = [checkpoint["lineage"] for checkpoint in report["checkpoints"]]
    assert lineage == ["ancestor", "left behind", "tip", "tip", "tip"]
    assert (report["newest_usable_step"], report["has_ended"]) == (5, True)
    sizes = [
        sum(p.stat().st_size for p in folder_of(stored, *ref).iterdir()) for ref in [(2, 1), (3, 1), (3, 2)]
    ]
    assert [checkpoint["num_bytes"] for checkpoint in report["checkpoints"]][:3] == sizes


def test_what_is_wrong_is_said(raycheck_json, raycheck, stored):
    """A shard cut short, one that is gone, a manifest that is gone, one that is damaged, a registered one."""
    (folder_of(stored, 2, 1) / SHARD).unlink()
    (folder_of(stored, 3) / SHARD).write_bytes(b"short")
    (folder_of(stored, 3, 1) / "manifest.json").unlink()
    (folder_of(stored, 5) / "manifest.json").write_text("{")
    register(stored, 4)
    code, report = raycheck_json("ls", stored)
    assert code == 0
    assert states(report) == {(2, 1): "damaged-size", (3, 1): "incomplete", (3, 2): "damaged-size",
                              (4, 2): "registered", (5, 2): "damaged"}  # fmt: skip
    assert report["newest_usable_step"] == 4
    _, output = raycheck("ls", stored)
    assert f"step 2: {SHARD} is missing" in output
    assert f"step 3: {SHARD} has 5 bytes, " in output
    assert "step 3: no manifest: left over" in output
    assert "the next start restores step 4" in output


def test_a_layout_that_is_gone_makes_its_checkpoints_useless(raycheck_json, stored):
    """Exit code 1: nothing can be restored."""
    for path in (stored / "raycheck" / "layouts").iterdir():
        path.unlink()
    code, report = raycheck_json("ls", stored)
    assert code == 1
    assert set(states(report).values()) == {"damaged-size"}


def test_whether_a_job_is_alive_is_said_as_far_as_it_is_known(raycheck, stored):
    """Ended, killed or running, starting."""
    assert "the job came to its end" in raycheck("ls", stored)[1]
    end_unseen(stored)
    assert "the job is running, or was killed" in raycheck("ls", stored)[1]
    (folder_of(stored, 5) / "manifest.json").unlink()
    assert "step 5: no manifest: being written, or left over" in raycheck("ls", stored)[1]
    start_another(stored, 0)
    assert "g000003-0000abcd is starting" in raycheck("ls", stored)[1]


def test_without_records_nothing_counts(raycheck_json, stored):
    """A copy without generations/ is shown as what it is."""
    for path in (stored / "raycheck" / "generations").iterdir():
        path.unlink()
    code, report = raycheck_json("ls", stored)
    assert code == 1
    assert {c["note"] for c in report["checkpoints"]} == {"no record says which checkpoints count"}


def test_the_list_is_plain_where_it_is_piped(raycheck, stored):
    """One line a checkpoint, no lines drawn, within 80 columns."""
    code, output = raycheck("ls", stored)
    rows = output.splitlines()
    assert code == 0
    assert rows[0].split() == ["step", "age", "size", "generation", "lineage", "state"]
    assert output.isascii()
    assert all(len(row) <= 90 for row in rows)
    assert all(len(row) <= 80 for row in rows[:6])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["TMP/nothing"], "there is no raycheck run in"),
        (["RUN", "--storage-options", "{"], "--storage-options: not valid JSON"),
        (["RUN", "--storage-options", "[]"], "--storage-options: must be a JSON object"),
        (["nosuch://bucket/run"], "has an unknown scheme"),
    ],
)
def test_what_cannot_be_read_is_said(raycheck, stored, tmp_path, arguments, text):
    """Exit code 2, and a message."""
    places = {"TMP/nothing": tmp_path / "nothing", "RUN": stored}
    code, output = raycheck("ls", *(places.get(argument, argument) for argument in arguments))
    assert code == 2
    assert text in output


def test_show_tells_of_a_checkpoint_what_its_layout_and_manifest_say(raycheck_json, stored):
    """Compared with the manifest as JSON and the layout as a table of pyarrow's."""
    code, report = raycheck_json("show", stored, "--step", 4)
    assert code == 0
    manifest = json.loads((folder_of(stored, 4) / "manifest.json").read_text())
    rows = pq.read_table(stored / "raycheck" / "layouts" / f"{manifest['layout']}.parquet").to_pylist()
    rows = [row for row in rows if row["name"] != "values"]
    assert report["num_tensors"] == len({row["name"] for row in rows})
    assert sum(row["num_bytes"] for row in report["dtypes"].values()) == sum(row["num_bytes"] for row in rows)
    assert report["tensors"][0]["name"] in ("model.large", "optimizer.model.large.exp_avg")
    assert report["metrics"] == {"loss": 0.25}
    assert report["loaders"] == {"loader": {"epoch": 0, "consumed": 16, "length": 40}}
    assert report["world_size"] == 2
    own = {tensor["name"]: tensor["num_owners"] for tensor in report["tensors"]}
    assert (own["model.seen"], own["model.large"]) == (2, 0)
    assert {"stall_s", "persist_s", "max_overhead"} <= report["policy"].keys()


def test_show_without_telemetry(raycheck, stored):
    """It is said that nothing is known of the interval."""
    for path in (stored / "raycheck" / "telemetry").iterdir():
        path.unlink()
    code, output = raycheck("show", stored)
    assert code == 0
    assert "nothing is known of it" in output
    assert "loader: epoch 0, 20 of 40 items consumed" in output
    assert "optimizer.model.embed.weight.exp_avg_sq" in output


def test_a_step_that_is_not_there_is_refused_with_those_that_are(raycheck, stored):
    """Exit code 2."""
    code, output = raycheck("show", stored, "--step", 7)
    assert code == 2
    assert "no checkpoint of step 7 in this run; there are 2, 3, 4, 5" in output


def test_of_two_checkpoints_of_a_step_the_one_that_counts_is_shown(raycheck_json, stored):
    """Step 3 was saved by both starts."""
    assert raycheck_json("show", stored, "--step", 3)[1]["generation"].startswith("g000002")
    # Without the second start's record the first is the tip.
    generation_file(stored, 2, "").unlink()
    assert raycheck_json("show", stored, "--step", 3)[1]["generation"].startswith("g000001")


def test_a_damaged_layout_is_damage(raycheck, stored):
    """Exit code 1."""
    manifest = json.loads((folder_of(stored, 5) / "manifest.json").read_text())
    (stored / "raycheck" / "layouts" / f"{manifest['layout']}.parquet").write_bytes(b"no table")
    code, output = raycheck("show", stored)
    assert code == 1
    assert "is damaged" in output


def test_a_forged_manifest_is_damage(raycheck_json, stored):
    """A shard outside of the checkpoint's folder is not followed."""
    manifest = folder_of(stored, 5) / "manifest.json"
    shards = json.loads(manifest.read_text())["shards"]
    shards[0][1] = "../../../secret"
    edit(manifest, shards=shards)
    assert states(raycheck_json("ls", stored)[1])[5, 2] == "damaged"


def test_on_s3(raycheck_json, on_s3):
    """The same through a URL and options."""
    url, options = on_s3
    code, report = raycheck_json("ls", url, *options)
    assert (code, report["newest_usable_step"]) == (0, 5)
    assert raycheck_json("show", url, "--step", 4, *options)[1]["metrics"] == {"loss": 0.25}
