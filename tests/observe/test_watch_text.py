"""What ``raycheck watch`` shows, from values alone."""

import dataclasses
import json

import pytest

from raycheck.core.telemetry import Event
from raycheck.observe.watch import (
    UploadView,
    View,
    is_of_run,
    new_events,
    run_name,
    to_json,
    view_of_events,
    view_of_status,
)
from raycheck.observe.watch_text import changes, plain, rough, screen

NOW_S = 1_760_000_000.0
GENERATION = "g000003-0a1b2c3d"
GB = 10**9


def event(kind, ago_s, generation=GENERATION, writer="w", **facts):
    return Event(NOW_S - ago_s, kind, generation, writer, facts)


def row(each):
    return {name: getattr(each, name) for name in ("unix_s", "kind", "generation", "writer", "facts")}


CHECKPOINT = event("checkpoint", 14.0, step=12_300, stall_s=0.0021, persist_s=5.25, num_bytes=4 * GB)
STATUS = {
    "store_url": "s3://bucket/runs/gpt/raycheck",
    "generation": GENERATION,
    "world_size": 64,
    "phase": "planned",
    "step": 12_345,
    "steps_per_s": 4.02,
    "step_s": 0.249,
    "safe_step": 12_300,
    "safe_age_s": 14.0,
    "at_risk_s": 11.2,
    "at_risk_steps": 45,
    "plan": [17, 12_420],
    "next_in_s": 40.0,
    "interval_s": 62.4,
    "decided_by": "risk",
    "reason": "interval 70 s -> 62.4 s: upload 5.25 s instead of 7.1 s, expected time to failure 3.7 days, "
    "a checkpoint costs 0.21 s",
    "overhead": 0.0041,
    "max_overhead": 0.035,
    "num_checkpoints": 41,
    "failures_in_a_row": 0,
    "uploads": [],
    "events": [row(CHECKPOINT)],
}


def shown(view, width=80):
    return [plain(line) for line in screen(view, width=width)]


def of(**changed):
    return view_of_status({**STATUS, **changed}, NOW_S)


def test_a_running_job_on_a_terminal():
    """All that is known, in this order."""
    *lines, last = shown(of())
    assert lines == [
        "gpt, g3, 64 ranks, planned",
        "step        12,345, 4.02 steps/s, 0.249 s a step without checkpoints",
        "safe        step 12,300, committed 14 s ago",
        "            4 GB, stalled training 2.1 ms, upload 5.25 s",
        "next        step 12,420, in about 19 s",
        "at risk     11 s of training, 45 steps, if the job dies now",
        "interval    62.4 s, decided by risk",
        "            interval 70 s -> 62.4 s: upload 5.25 s instead of 7.1 s, expected",
        "            time to failure 3.7 days, a checkpoint costs 0.21 s",
        "overhead    0.41 % of training, the bound is 3.5 %, 41 checkpoints",
    ]
    assert last.startswith("events        14 s ago  checkpoint step 12,300: 4 GB committed,")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"plan": None, "phase": "training"}, "about step 12,506, in about 40 s"),
        ({"plan": None, "phase": "training", "next_in_s": -3.0}, "about step 12,346, now"),
        ({"plan": None, "phase": "training", "next_in_s": None}, "as soon as steps have been measured"),
        ({"phase": "uploading"}, "step 12,420 is being uploaded"),
        ({"phase": "copying"}, "step 12,420 is being copied"),
        ({"steps_per_s": None}, "step 12,420"),
    ],
)
def test_the_next_checkpoint(changed, expected):
    """Where it is planned, where it will be, and what becomes of it."""
    (line,) = (line for line in shown(of(**changed)) if line.startswith("next"))
    assert line == f"next        {expected}"


def test_a_checkpoint_that_must_be_paid_for_first_says_so():
    """The interval does not tell when the next one comes where the overhead is beyond its bound."""
    lines = shown(of(plan=None, phase="training", next_in_s=300.0))
    at = next(i for i, line in enumerate(lines) if line.startswith("next"))
    assert lines[at] == "next        about step 13,551, in about 5 min"
    assert lines[at + 1].startswith("            later than the interval says, until the overhead is within")


def test_uploads_by_node_the_slowest_first():
    """Eight of them; the others are counted."""
    uploads = [
        {
            "node": f"{n:056x}"[::-1],
            "ranks": [n],
            "num_bytes_done": n * GB,
            "num_bytes": 20 * GB,
            "seconds": 4.0,
        }
        for n in range(12, 0, -1)
    ]
    lines = shown(of(phase="uploading", uploads=uploads))
    at = next(i for i, line in enumerate(lines) if line.startswith("uploads"))
    assert lines[at] == "uploads     10000000  ━─────────────────── 5%  1 GB of 20 GB, 250 MB/s".replace(
        " 5%", "   5%"
    )
    assert lines[at + 8] == "            and 4 nodes further on"


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_line_is_longer_than_the_terminal(width):
    """Whatever the texts are."""
    long = "x" * 300 + " word" * 100
    view = of(
        reason=long, events=[row(event("attempt_failed", 1.0, reason=long, step=1))], failures_in_a_row=3
    )
    lines = shown(view, width)
    assert all(len(line) <= width for line in lines)
    assert any("3 saves in a row failed" in line for line in lines)


def test_a_job_that_has_just_begun():
    """What is not known is left out, and nothing fails: also of a coordinator of another version."""
    begun = {"store_url": "/data/gpt/raycheck", "generation": None, "world_size": 0, "plan": None}
    assert shown(view_of_status(begun, NOW_S)) == [
        "gpt, starting",
        "next        as soon as steps have been measured",
    ]
    assert shown(view_of_status({"step": "x", "overhead": float("nan"), "plan": "?"}, NOW_S))


def test_telemetry_alone_says_what_it_cannot_know():
    """Of the newest start only; a job that is silent for long may be dead."""
    events = [
        event("checkpoint", 900.0, "g000002-0a", step=99_999, cost_s=1.0),
        event("generation", 800.0, world_size=8),
        event("restored", 790.0, step=100, parent=[100, "g000002-0a", 3]),
        event(
            "checkpoint",
            40.0,
            step=300,
            cost_s=1.0,
            inside_steps_s=100.0,
            max_overhead=0.035,
            interval_s=60.0,
        ),
        event("progress", 20.0, step=340, cost_s=1.0, inside_steps_s=110.0),
    ]
    view = view_of_events("/data/gpt/raycheck", events, NOW_S)
    assert (view.step, view.safe_step, view.at_risk_steps, view.world_size) == (340, 300, 40, 8)
    lines = shown(view)
    assert lines[0] == "gpt, g3, 8 ranks, from telemetry alone"
    assert lines[1] == "last heard of 20 s ago: what happened since is not known yet"
    assert "at risk     at least 40 steps, if the job dies now" in lines
    assert "next        not known from telemetry" in lines
    assert "may be dead" in shown(view_of_events("/data/gpt/raycheck", events, NOW_S + 600))[1]
    ended = view_of_events("/data/gpt/raycheck", [*events, event("closed", 10.0)], NOW_S)
    assert ended.is_over
    assert shown(ended)[1] == "the job is over"
    assert shown(view_of_events("/data/gpt/raycheck", [], NOW_S))[1] == "nothing has been told yet"


def test_piped_there_is_a_line_for_each_change():
    """Events once each, plans once each, progress every ten seconds, and else nothing."""
    first = of()
    lines, has_told = changes(None, first, progress_told_unix_s=0.0)
    assert has_told
    assert lines == [
        "08:53:20  gpt, g3, 64 ranks, planned",
        "08:53:06  checkpoint step 12,300: 4 GB committed, stall 2.1 ms, upload 5.25 s",
        "08:53:20  next checkpoint at step 12,420",
        "08:53:20  step 12,345, 4.02 steps/s, overhead 0.41 %, "
        "at risk 11 s of training, 45 steps, if the job dies now",
    ]
    assert changes(first, first, progress_told_unix_s=NOW_S) == ([], False)
    failed = event("attempt_failed", 0.0, step=12_420, reason="lost", detail="rank 3 ended")
    later = dataclasses.replace(
        first, step=12_425, plan_step=12_440, unix_s=NOW_S + 1, events=(CHECKPOINT, failed)
    )
    assert changes(first, later, progress_told_unix_s=NOW_S) == (
        [
            "08:53:20  attempt failed step 12,420: no checkpoint: lost: rank 3 ended",
            "08:53:21  next checkpoint at step 12,440",
        ],
        False,
    )
    much_later = dataclasses.replace(later, unix_s=NOW_S + 11, step=12_470)
    lines, has_told = changes(later, much_later, progress_told_unix_s=NOW_S)
    assert (len(lines), has_told) == (1, True)
    over = dataclasses.replace(much_later, is_over=True)
    assert changes(much_later, over, progress_told_unix_s=NOW_S + 11)[0] == ["08:53:31  the job is over"]


def test_events_are_told_from_each_other_by_who_wrote_them_and_when():
    """A coordinator that has restarted is another writer."""
    before = of()
    again = dataclasses.replace(CHECKPOINT, writer="x")
    now = dataclasses.replace(before, events=(CHECKPOINT, again))
    assert new_events(before, now) == [again]
    assert new_events(None, now) == [CHECKPOINT, again]


def test_rare_events_stay_on_the_screen():
    """However many checkpoints there have been since: first the newest of each kind, then the newest of all."""
    rare = [
        event(kind, 900.0 - n, step=n) for n, kind in enumerate(["begun", "restored", "resumed", "notice"])
    ]
    common = [dataclasses.replace(CHECKPOINT, unix_s=NOW_S - 20 + n) for n in range(10)]
    progress = event("progress", 1.0, step=5)
    for events, kinds in (
        ([*rare, *common, progress], ["checkpoint"] * 2 + ["notice", "resumed", "restored", "begun"]),
        (common, ["checkpoint"] * 6),
    ):
        events = sorted(events, key=lambda each: each.unix_s)
        lines = shown(dataclasses.replace(of(), events=tuple(events)))
        at = next(i for i, line in enumerate(lines) if line.startswith("events"))
        assert [line[24:].split()[0] for line in lines[at:] if line[12:24].strip()] == kinds


def test_json_has_everything():
    """Plain values, with what is derived."""
    fields = json.loads(json.dumps(to_json(of(), new_events(None, of())), allow_nan=False))
    assert {field.name for field in dataclasses.fields(View)} <= set(fields)
    assert (fields["next_step"], fields["events"][0]["step"]) == (12_420, 12_300)
    assert fields["next_snapshot_s"] == pytest.approx(75 / 4.02)


def test_a_run_is_known_by_url_folder_and_name():
    """However it is written."""
    url = "s3://bucket/runs/gpt/raycheck"
    assert run_name(url) == "gpt"
    for run in (
        url,
        "s3://bucket/runs/gpt",
        "s3://bucket/runs/gpt/",
        "gpt",
        "s3://bucket/runs/gpt?scheme=http",
    ):
        assert is_of_run(run, url)
    for run in ("gp", "s3://bucket/runs", "s3://other/runs/gpt", "runs/gpt", "raycheck"):
        assert not is_of_run(run, url)
    assert run_name("/data/raycheck") == "data"


def test_times_are_said_in_passing():
    """In one unit."""
    texts = [rough(s) for s in (None, -1.0, 0.04, 9.94, 9.96, 119.0, 121.0, 7300.0, 200_000.0)]
    assert texts == ["?", "0.0 s", "0.0 s", "9.9 s", "10 s", "119 s", "2 min", "2 h", "2 days"]


def test_an_upload_of_nothing_is_done():
    """An empty shard."""
    upload = UploadView(node="n", ranks=(0,), num_bytes_done=0, num_bytes=0, seconds=0.0)
    line = next(
        line for line in shown(dataclasses.replace(of(), uploads=(upload,))) if line.startswith("uploads")
    )
    assert "100%" in line
