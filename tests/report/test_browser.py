"""The page in a real Chromium: that it works, by mouse, fingers and keys, and that nothing in it complains."""

from __future__ import annotations

import contextlib
import re

import pytest

LAPTOP, PHONE = (1280, 800), (390, 844)
_INTERACTIVE = {"button", "link", "textbox", "searchbox", "combobox", "image", "region", "group", "table"}


@contextlib.contextmanager
def opened(browser, path, size=LAPTOP, **options):
    """Open a report; fail if anything is logged, fails or is fetched but the file itself."""
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **options)
    page = context.new_page()
    complaints, requests = [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: (complaints.append("a dialog"), dialog.dismiss()))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    try:
        yield page
        assert complaints == []
        assert requests == [path.as_uri()]
    finally:
        context.close()


def ticks(page):
    return page.locator("#timeline-view text.tick").all_text_contents()


def wait_for_other_ticks(page, before):
    page.wait_for_function(
        "before => JSON.stringify([...document.querySelectorAll('#timeline-view text.tick')]"
        ".map(e => e.textContent)) !== JSON.stringify(before)",
        arg=before,
    )
    return ticks(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_it_fits(browser, made_up, size, scheme):
    """The page is as wide as the window and no wider, in both schemes; the scheme is the reader's."""
    with opened(browser, made_up[1], size, color_scheme=scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == size[0]
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground)[:3])) > 3 * 128) == (scheme == "light")
        # One of the two figures of each kind is shown, and not wider than the window.
        shown = [box["width"] for svg in page.locator("main svg").all() if (box := svg.bounding_box())]
        assert len(shown) == 5 + 1
        assert all(200 < width <= size[0] for width in shown)


def test_texts_of_the_run_run_nothing(browser, hostile):
    """Markup in names and reasons: no dialog, no request, no element of it, also after filtering and selecting."""
    with opened(browser, hostile) as page:
        page.fill("#events-text", "onerror")
        page.focus("#timeline-view")
        page.keyboard.press("n")
        assert page.locator("#events-table tbody tr").count() > 0
        assert page.locator("img").count() == 0
        assert "<img" in page.locator("#events-table tbody tr").first.inner_text()
        assert "<img" in page.locator("h1").inner_text()


def test_keys_zoom_move_and_go_through_events(browser, made_up):
    """+ and - zoom, arrows move, Home shows all, N and P tell of one event after the other."""
    with opened(browser, made_up[1]) as page:
        page.focus("#timeline-view")
        everything = ticks(page)
        page.keyboard.press("+")
        once = wait_for_other_ticks(page, everything)
        page.keyboard.press("+")
        twice = wait_for_other_ticks(page, once)
        assert "0" in everything
        page.keyboard.press("ArrowRight")
        assert wait_for_other_ticks(page, twice)
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("-")
        page.keyboard.press("-")
        page.wait_for_function("() => document.querySelector('[data-do=out]').disabled")
        assert ticks(page) == everything
        page.keyboard.press("n")
        first = page.locator("#timeline-readout").inner_text()
        page.keyboard.press("n")
        second = page.locator("#timeline-readout").inner_text()
        page.keyboard.press("p")
        assert first == page.locator("#timeline-readout").inner_text() != second
        assert re.fullmatch(
            r"[\d a-z.]+: step [\d,]+ (committed|given up), [\d.]+ s after its snapshot began.*", first
        )
        page.keyboard.press("+")
        page.keyboard.press("Home")
        page.wait_for_function("() => document.querySelector('[data-do=all]').disabled")
        # Keys of the browser's own are left to it.
        page.keyboard.press("Control+ArrowRight")
        assert ticks(page) == everything


def test_everything_can_be_reached_by_tab_and_is_seen_to_be(browser, made_up):
    """Tab goes through all that can be used, and each has a visible outline while it has the focus."""
    with opened(browser, made_up[1]) as page:
        reached = []
        for _ in range(60):
            page.keyboard.press("Tab")
            found = page.evaluate(
                "() => { const e = document.activeElement, s = getComputedStyle(e);"
                " return [e.id || e.dataset.do || e.textContent.slice(0, 20) || e.tagName, s.outlineStyle,"
                " parseFloat(s.outlineWidth)] }"
            )
            if page.evaluate("document.activeElement === document.body"):
                break
            reached.append(found)
        names = [name for name, _, _ in reached]
        for wanted in ("timeline-view", "in", "events-text", "events-kind", "events-on", "Timeline"):
            assert wanted in names, names
        without = [name for name, style, width in reached if style == "none" or width < 1]
        assert without == []


def test_mouse_wheel_and_buttons(browser, made_up):
    """Ctrl and wheel zooms at the pointer, dragging moves, a plain wheel is the page's, buttons do the same."""
    with opened(browser, made_up[1]) as page:
        page.locator("#timeline-view").scroll_into_view_if_needed()
        box = page.locator("#timeline-view").bounding_box()
        page.mouse.move(box["x"] + 600, box["y"] + 100)
        everything = ticks(page)
        page.keyboard.down("Control")
        page.mouse.wheel(0, -400)
        page.keyboard.up("Control")
        zoomed = wait_for_other_ticks(page, everything)
        page.mouse.down()
        page.mouse.move(box["x"] + 100, box["y"] + 100, steps=4)
        page.mouse.up()
        assert wait_for_other_ticks(page, zoomed)
        page.get_by_role("button", name="Show all").click()
        page.wait_for_function("() => document.querySelector('[data-do=all]').disabled")
        assert ticks(page) == everything
        page.get_by_role("button", name="Zoom in").click()
        wait_for_other_ticks(page, everything)
        page.evaluate("scrollTo(0, 0)")
        page.mouse.move(box["x"] + 600, 500)
        page.mouse.wheel(0, 300)
        page.wait_for_function("() => scrollY > 0")


def test_two_fingers_zoom_and_one_moves(browser, made_up):
    """Touches as a phone sends them."""
    with opened(browser, made_up[1], PHONE, has_touch=True, is_mobile=True) as page:
        page.locator("#timeline-view").scroll_into_view_if_needed()
        box = page.locator("#timeline-view").bounding_box()
        y = box["y"] + 100
        session = page.context.new_cdp_session(page)

        def touch(kind, *xs):
            points = [{"x": x, "y": y, "id": number} for number, x in enumerate(xs)]
            session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

        before = ticks(page)
        touch("touchStart", 180, 220)
        for spread in range(10, 110, 10):
            touch("touchMove", 180 - spread, 220 + spread)
        touch("touchEnd")
        zoomed = wait_for_other_ticks(page, before)
        touch("touchStart", 300)
        for x in range(290, 60, -20):
            touch("touchMove", x)
        touch("touchEnd")
        assert wait_for_other_ticks(page, zoomed)
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE[0]
        assert page.evaluate("visualViewport.scale") == 1


def test_the_filter_and_the_pages_of_the_table(browser, made_up):
    """By text, by kind, both; a page holds 100 rows; what fits is counted."""
    run, path = made_up
    with opened(browser, path) as page:
        rows, count = page.locator("#events-table tbody tr"), page.locator("#events-count")
        assert count.inner_text() == "1 to 100 of 400"
        page.get_by_role("button", name="Later").last.click()
        assert count.inner_text() == "101 to 200 of 400"
        page.get_by_label("Kind").select_option(label="attempt failed")
        num_failed = sum(row["kind"] == "attempt_failed" for row in run.rows)
        assert num_failed
        assert rows.count() == num_failed
        assert count.inner_text() == f"1 to {num_failed} of {num_failed}"
        page.get_by_label("Kind").select_option(label="all")
        page.get_by_label("Text").fill("RESTORED")
        assert rows.count() == sum(row["kind"] == "restored" for row in run.rows)
        assert all("restored" in text for text in rows.all_inner_texts())
        page.get_by_label("Text").fill("nothing has this")
        assert (rows.count(), count.inner_text()) == (0, "no event fits")
        page.get_by_label("Text").press("Enter")
        page.get_by_label("Text").fill("")
        assert rows.count() == 100


def test_what_can_be_used_has_a_name(browser, made_up):
    """In the tree that assistive programs read: buttons, links, fields, figures, tables' regions."""
    with opened(browser, made_up[1]) as page:
        session = page.context.new_cdp_session(page)
        nodes = session.send("Accessibility.getFullAXTree")["nodes"]
        found = {}
        for node in nodes:
            role = node.get("role", {}).get("value")
            if not node["ignored"] and role in _INTERACTIVE:
                name = node.get("name", {}).get("value", "")
                assert name or role == "table", node
                found.setdefault(role, []).append(name)
        assert {"button", "link", "searchbox", "combobox", "image", "region", "group"} <= set(found), found
        assert "Timeline of the run" in found["group"]
        assert len(found["image"]) >= 5


def test_a_long_run_zooms_down_to_single_events(browser, long_run):
    """20,000 events: bars at first, and signs of single attempts once few are left; the drawing stays small."""
    with opened(browser, long_run[1]) as page:
        assert page.locator("#timeline-view .is-commit.bar").count() == 1
        page.focus("#timeline-view")
        for _ in range(8):
            page.keyboard.press("+")
        page.wait_for_function("() => !document.querySelector('#timeline-view .is-commit.bar')")
        assert page.locator("#timeline-view .is-commit").count() == 1
        assert page.locator("#timeline-view svg *").count() < 300


def test_without_scripts_the_numbers_are_there(browser, made_up):
    """The drawing and the list of events are missing, and that is said."""
    with opened(browser, made_up[1], java_script_enabled=False) as page:
        assert page.get_by_text("need JavaScript").is_visible()
        assert page.locator("#timeline table tbody tr").count() == made_up[0].number
        assert not page.locator("#timeline-tools").is_visible()


def test_it_prints(browser, made_up):
    """On white, without what cannot be used on paper, and nothing cut off at the side."""
    with opened(browser, made_up[1], color_scheme="dark") as page:
        assert page.pdf(format="A4").startswith(b"%PDF")
        page.emulate_media(media="print", color_scheme="dark")
        page.set_viewport_size({"width": 700, "height": 900})
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert not page.locator("#events-tools").is_visible()
        assert not page.locator("nav").is_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == 700
