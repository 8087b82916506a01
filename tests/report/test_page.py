"""The page and the command, without a browser."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from raycheck.cli import app
from raycheck.core.accounting import account
from raycheck.core.telemetry import Event
from raycheck.observe.report import Run, make_page
from raycheck.observe.report.data import MAX_EVENTS, shown_events
from raycheck.observe.report.figure import linear_ticks, log_ticks, thin, time_ticks
from raycheck.observe.report.texts import bytes_text, event_text, share_text, span_text
from tests.report.conftest import HOSTILE, report_on
from tests.report.made_up import MadeUp
from tests.report.reading import Page


def command(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_the_headline_is_what_the_run_did(made_up, page_of):
    """Checkpoints, failures, restores and steps, as whoever made the run up counted them."""
    run, path = made_up
    page = page_of(path)
    assert page.tile("Checkpoints") == f"{run.committed:,}"
    assert page.tile("Failures") == f"{run.failures:,}"
    assert page.tile("Restores") == f"{run.number - 1:,}"
    assert page.tile("Steps") == f"{run.step:,}"
    assert "within the bound of 3.5 %" in page.text
    resumed = [json.loads(row["facts"]) for row in run.rows if row["kind"] == "resumed"]
    assert page.tile("Steps lost") == f"{sum(f['last_step'] - f['step'] + 1 for f in resumed):,}"


def test_in_json(made_up, folder, tmp_path, monkeypatch):
    """The same account in plain values; no file is written, and one is not asked for at the same time."""
    run, _ = made_up
    monkeypatch.chdir(tmp_path)
    done = command(folder / "made-up", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["reached_step"] == run.step
    assert sum(each["num_checkpoints"] for each in told["generations"]) == run.committed
    assert sum(each["ending"] == "failure" for each in told["generations"]) == told["num_failures"]
    assert told["losses"]["wall_s"] == pytest.approx(
        sum(each["losses"]["wall_s"] for each in told["generations"])
    )
    assert list(tmp_path.iterdir()) == []
    assert command(folder / "made-up", "--json", "--output", "x.html").exit_code == 2


def test_the_page_has_all_sections_and_data(made_up, page_of):
    """Figures in two widths each, a table of ranks, all events, and no sentence about what is missing."""
    run, path = made_up
    page = page_of(path)
    assert page.tags["svg"] == 2 * 5
    data = page.data
    assert [row[1] for row in data["events"]] == [data["kinds"].index(row["kind"]) for row in run.rows]
    assert len(data["attempts"]) == sum(row["kind"] in ("checkpoint", "attempt_failed") for row in run.rows)
    assert "Slow ranks" in page.texts
    assert not [value for _, name, value in page.attributes if (name, value) == ("class", "missing")][
        1:
    ]  # noscript
    assert all(count == 1 for count in page.ids.values()), page.ids


def test_a_real_run(real_run, page_of):
    """Every generation that left a record is there, with what the store's own files say of it."""
    page = page_of(report_on(real_run))
    records = sorted((real_run / "raycheck" / "generations").glob("[0-9]*-*.json"))
    records = [json.loads(path.read_text()) for path in records if path.name.count(".") == 1]
    assert [record["world_size"] for record in records] == [2, 1, 2]
    data = page.data
    assert data["generations"] == [[f"g{r['generation'][0]}", r["world_size"]] for r in records]
    rows = list(
        itertools.chain.from_iterable(
            pq.read_table(path).to_pylist() for path in (real_run / "raycheck" / "telemetry").iterdir()
        )
    )
    assert len(data["events"]) == len(rows)
    committed = [json.loads(row["facts"]) for row in rows if row["kind"] == "checkpoint"]
    assert page.tile("Checkpoints") == str(len(committed))
    assert page.tile("Restores") == "2"
    assert page.tile("Steps") == f"{max(facts['step'] for facts in committed):,}"
    sorts = [sort for _, sort, _ in data["marks"] if sort not in ("restored", "notice")]
    assert sorts == ["resize", "stopped", "finished"]
    for begin, end, _, _ in data["phases"]:
        assert 0 <= begin <= end <= data["length"] + 1e-3


def test_texts_of_the_run_are_harmless(hostile, page_of):
    """Names and reasons that are markup are shown as they are, and nothing of them becomes a tag or an attribute."""
    page = page_of(hostile)
    assert page.tags["img"] == 0
    assert page.tags["script"] == 2
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert "<img src=x onerror=alert(1)>" in page.texts
    assert any(HOSTILE in text for text in page.texts)
    assert any(HOSTILE in row[4] for row in page.data["events"])
    assert any(HOSTILE in attempt[5] for attempt in page.data["attempts"] if not attempt[3])


def test_the_page_needs_nothing_else(made_up, page_of):
    """No address leads out of it, and its own rule lets no script run but its own."""
    page = page_of(made_up[1])
    for _, name, value in page.attributes:
        if name in ("src", "href", "action", "data", "poster", "srcset"):
            assert value.startswith("#"), value
    styles = "".join(page.styles)
    assert "@import" not in styles
    assert not re.findall(r"url\((?!#)", styles)
    rule = next(v for _, name, v in page.attributes if name == "content" and "script-src" in v)
    (script,) = (text for attributes, text in page.scripts if not attributes)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in rule
    assert "default-src 'none'" in rule


@pytest.mark.parametrize(
    ("left_out", "sentence"),
    [
        ("interval", None),
        ("checkpoint", "This telemetry has no measured overhead."),
        ("checkpoint", "This telemetry tells of no bytes."),
        ("checkpoint", "This telemetry does not say which interval was chosen."),
        ("attempt_failed", None),
        ("restored", None),
        ("resumed", "This telemetry does not say how far training was when it failed"),
        ("begun", None),
        ("generation", None),
    ],
)
def test_a_kind_that_is_missing_leaves_its_part_out(made_up, left_out, sentence):
    """With one honest sentence where there is nothing to show, and the rest as before."""
    kinds = {left_out, "interval"} if left_out == "checkpoint" else {left_out}
    events = tuple(
        Event(row["unix_s"], row["kind"], row["generation"], row["writer"], json.loads(row["facts"]))
        for row in made_up[0].rows
        if row["kind"] not in kinds
    )
    page = Page(make_page(Run("gpt", (), events)).decode())
    assert "Timeline" in page.texts
    if sentence:
        assert sentence in page.text


def test_without_telemetry_the_records_are_reported(made_up, folder, page_of):
    """A run that wrote none still shows its generations; the command says so."""
    run = folder / "mute"
    MadeUp(run, 700)
    for path in (run / "raycheck" / "telemetry").iterdir():
        path.unlink()
    done = command(run, "--output", folder / "mute.html")
    assert done.exit_code == 0
    assert "no telemetry" in done.output
    page = page_of(folder / "mute.html")
    assert len(page.data["generations"]) > 1
    assert page.data["events"] == []
    assert "This run has no telemetry" in page.text


def test_a_run_of_nothing_but_a_name():
    """No generations, no events: a page that says so."""
    page = Page(make_page(Run("empty", (), ())).decode())
    assert "No generation of this run has left a record." in page.texts
    assert page.data is None


def test_a_long_run_is_a_small_page(long_run, page_of):
    """20,000 events take less than 5 MB, and the numbers are still those of all of them."""
    run, path = long_run
    assert path.stat().st_size < 5_000_000
    page = page_of(path)
    assert len(page.data["events"]) == 20_000
    assert page.tile("Checkpoints") == f"{run.committed:,}"


def test_of_a_longer_run_the_oldest_common_events_leave_the_table():
    """All rare ones stay."""
    events = [
        Event(float(n), "checkpoint" if n % 10 else "restored", "", "w", {}) for n in range(MAX_EVENTS + 500)
    ]
    shown = shown_events(events)
    assert len(shown) == MAX_EVENTS
    assert shown == sorted(shown, key=lambda e: e.unix_s)
    assert sum(e.kind == "restored" for e in shown) == sum(e.kind == "restored" for e in events)
    assert shown[-1] is events[-1]
    rare = [Event(float(n), "notice", "", "w", {}) for n in range(MAX_EVENTS + 10)]
    assert shown_events(rare) == rare[10:]


@pytest.mark.parametrize("value", ["\ud800", "\x00", "\u2028", 10**400, 1e308, [[[]]], {"a": float("nan")}])
def test_odd_facts_do_not_break_the_page(value):
    """Halves of characters, numbers out of range, lists where a number was meant."""
    names = [
        "step",
        "stall_s",
        "persist_s",
        "num_bytes",
        "cost_s",
        "max_overhead",
        "interval_s",
        "reason",
        "change",
    ]
    kinds = ["checkpoint", "attempt_failed", "interval", "restored", "rejected", "new", "notice", "resumed"]
    facts = {name: value for name in [*names, "parent", "rank_stalls_s", "seconds", "world_size", "keys"]}
    events = tuple(Event(float(n), kind, "g000001-ab", "w", facts) for n, kind in enumerate(kinds))
    page = Page(make_page(Run("\ud800", (), events)).decode("utf-8"))
    assert len(page.data["events"]) == len(kinds)


def test_the_command_says_where_and_what(made_up, tmp_path, monkeypatch):
    """One line; the file is named after the run, whichever of its two folders is given."""
    run, _ = made_up
    monkeypatch.chdir(tmp_path)
    for place in (run.root.parent, run.root):
        done = command(place)
        assert done.exit_code == 0
        assert re.fullmatch(
            rf"made-up-report\.html: {run.number} generations, 400 events, 0\.\d+ MB\n", done.output
        )
        (path,) = tmp_path.iterdir()
        assert path.name == "made-up-report.html"


def test_what_cannot_be_done_is_said(made_up, tmp_path):
    """No run, no folder to write to, options that are none: exit code 2, one line, and no file left behind."""
    for arguments, words in (
        ([tmp_path], "there is no raycheck run"),
        ([made_up[0].root, "--output", tmp_path / "none" / "x.html"], "give a file in a folder that exists"),
        ([made_up[0].root, "--storage-options", "[]"], "must be a JSON object"),
    ):
        done = command(*arguments)
        assert done.exit_code == 2
        assert words in " ".join(done.output.split())
        assert not list(tmp_path.iterdir())


def test_colours_can_be_read():
    """Letters have a contrast of 4.5 with what is behind them, signs and lines 3, in both schemes."""
    page = Page(make_page(Run("colours", (), ())).decode())
    style = "".join(page.styles)
    blocks = re.findall(r":root \{([^}]*)\}", style)[:2]
    assert len(blocks) == 2
    for block in blocks:
        colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", block))
        for ground in ("ground", "raised"):
            for letters in ("ink", "quiet", "focus"):
                assert contrast(colours[letters], colours[ground]) >= 4.5, (letters, ground)
            for sign in ("training", "start", "again", "down", "stall", "persist", "slowdown"):
                assert contrast(colours[sign], colours[ground]) >= 3, (sign, ground)
        assert contrast(colours["ink"], colours["warn-ground"]) >= 4.5


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""
    lights = []
    for colour in (one, other):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(lights) + 0.05) / (min(lights) + 0.05)


@pytest.mark.parametrize("length_s", [0.001, 0.7, 59.0, 3600.0, 86_400.0 * 21, 1e9])
def test_ticks_are_few_and_within(length_s):
    """At least one after 0 for any length that a run has, and no more than asked for."""
    ticks = time_ticks(length_s, 10)
    assert 1 <= len(ticks) <= 12
    assert all(0 <= at <= length_s * 1.0001 for at, _ in ticks)
    assert len({text for _, text in ticks}) == len(ticks)


def test_ticks_of_values_are_round():
    """Linear and logarithmic."""
    assert linear_ticks(0.04) == pytest.approx([0.0, 0.01, 0.02, 0.03, 0.04])
    assert linear_ticks(0.0) == [0.0]
    assert log_ticks(0.9, 30) == pytest.approx([1, 2, 5, 10, 20])
    assert len(log_ticks(1e-9, 1e9)) <= 6


def test_thinned_points_keep_the_extremes():
    """The picture is the same: highest and lowest of every column are there."""
    points = [(float(x), float((x * 7919) % 1000)) for x in range(10_000)]
    kept = thin(points, 0.0, 10_000.0, 100)
    assert len(kept) <= 400
    for column in range(100):
        all_here = [y for x, y in points if int(x / 100) == column]
        kept_here = [y for x, y in kept if int(x / 100) == column]
        assert (min(kept_here), max(kept_here)) == (min(all_here), max(all_here))


def test_numbers_have_units():
    """Three digits, and a unit that suits."""
    assert [bytes_text(n) for n in (None, 0, 999, 1000, 999_600, 64e9, 1e15)] == [
        "–", "0 B", "999 B", "1 kB", "1 MB", "64 GB", "1 PB",
    ]  # fmt: skip
    assert [span_text(s) for s in (0.0021, 5.0, 250.0, 900.0, 9000.0, 12_000.0, 864_000.0)] == [
        "2.1 ms", "5 s", "250 s", "15.0 min", "2.5 h", "3.3 h", "10.0 days",
    ]  # fmt: skip
    assert [share_text(f) for f in (None, 0.0, 0.0312, 0.9051, 0.99996, 1.0)] == [
        "–", "0 %", "3.12 %", "90.5 %", "99.99 %", "100 %",
    ]  # fmt: skip


def test_events_are_worded():
    """A sentence for each kind that is known; the facts themselves of one that is not."""
    texts = {
        "notice": ({"source": "drain", "seconds_left": 90.0, "detail": "n7"}, "drain, 90 s left, n7"),
        "generation": ({"world_size": 1}, "begins on 1 worker"),
        "resumed": (
            {"restart_s": 700.0, "last_step": 1200},
            "first new step, 11.7 min after the last one before, which was step 1,200",
        ),
        "restored": (
            {"parent": [9, "g000012-ab", 3], "source": "memory", "seconds": 0.5, "num_bytes": 2_000_000},
            "all ranks restored it, from g12, out of memory, in 0.5 s, 2 MB",
        ),
        "attempt_failed": ({"reason": "lost", "detail": "rank 1 ended"}, "no checkpoint: lost: rank 1 ended"),
        "swept": ({"keys": 3}, "3 objects that earlier starts left were removed"),
        "new": ({"step": 3, "a": [1], "accounts": {}}, "a [1]"),
    }
    for kind, (facts, text) in texts.items():
        assert event_text(Event(0.0, kind, "", "w", facts)) == text
    assert len(event_text(Event(0.0, "new", "", "w", {"a": "x" * 1000}))) == 400


def test_the_account_of_the_page_is_the_one_of_the_core(made_up, page_of):
    """Phases in the page's data are those of `account`."""
    run, path = made_up
    events = [
        Event(r["unix_s"], r["kind"], r["generation"], r["writer"], json.loads(r["facts"])) for r in run.rows
    ]
    productive_s = account((), events).losses.wall_s
    data = page_of(path).data
    counted_s = sum(end - begin for begin, end, phase, _ in data["phases"] if phase != "stopped")
    assert counted_s == pytest.approx(productive_s, rel=1e-3)
