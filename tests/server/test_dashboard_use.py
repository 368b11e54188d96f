"""Use of the dashboard: touch, keyboard, screen reader, reload, and a changed key."""

import re

from jaxserve.server.settings import ServerSettings
from tests.server.fake import FakeClient
from tests.server.fake_control import CYCLE, DURING, FIRST, FakeControl, Time
from tests.server.pages import PHONE, wait_for_state, wait_for_text
from tests.server.serving import serving

KEY = ServerSettings(admin_key="secret")

ACTIONABLE = "a[href], button, input:not([type=radio]), label:has(input), summary, [tabindex='0']"
SMALL = """selector => [...document.querySelectorAll(selector)].filter(node => {
    const { width, height } = node.getBoundingClientRect();
    return node.checkVisibility() && !node.matches(".skip") && (width < 24 || height < 24);
}).map(node => `${node.outerHTML.slice(0, 60)} ${JSON.stringify(node.getBoundingClientRect())}`)"""

FOCUSED = """() => {
    const node = document.activeElement;
    const shown = node.matches("[type=radio]") ? node.nextElementSibling : node;
    const { outlineStyle, outlineWidth } = getComputedStyle(shown);
    const box = shown.getBoundingClientRect();
    const name = node.ariaLabel ?? [...(node.labels ?? [])].map(l => l.textContent).join() ?? "";
    return {
        name: (name || node.textContent).trim(),
        ring: outlineStyle === "none" ? 0 : parseFloat(outlineWidth),
        seen: box.width > 1 && box.top < innerHeight && box.bottom > 0,
    };
}"""


def in_burst() -> FakeClient:
    return FakeClient(control=FakeControl(Time(DURING)))


# -- by touch


def test_touch_targets_are_large_enough(open_page):
    with serving(in_burst(), KEY) as address:
        page = open_page(address.url, **PHONE)
        wait_for_state(page, "locked")
        assert page.locator(ACTIONABLE).locator("visible=true").count() >= 2
        assert page.evaluate(SMALL, ACTIONABLE) == []
        page.get_by_label("Admin key").fill("secret")
        page.get_by_role("button", name="Connect").tap()
        wait_for_state(page, "live")
        assert page.locator(ACTIONABLE).locator("visible=true").count() >= 12
        assert page.evaluate(SMALL, ACTIONABLE) == []
    wait_for_state(page, "lost")
    assert page.get_by_role("button", name="Retry now").is_visible()
    assert page.evaluate(SMALL, ACTIONABLE) == []


def test_dashboard_can_be_used_by_touch(open_page):
    with serving(in_burst(), KEY) as address:
        page = open_page(address.url, **PHONE)
        wait_for_state(page, "locked")
        page.get_by_label("Admin key").tap()
        page.keyboard.type("secret")
        page.get_by_role("button", name="Connect").tap()
        wait_for_state(page, "live")

        now = page.locator("#ttft").text_content()
        left = page.locator("#plot-ttft").bounding_box()["x"] + 60
        line = page.locator("#plot-ttft line").first  # which is drawn anew, and gone, when it is touched
        line.dispatch_event("pointerdown", {"bubbles": True, "clientX": left})
        assert page.evaluate("document.body.classList.contains('past')")
        page.locator("#ttft-title").dispatch_event("pointerdown", {"bubbles": True})
        assert not page.evaluate("document.body.classList.contains('past')")
        page.locator("#plot-queue").tap(position={"x": 60, "y": 40})  # long ago, on another chart
        page.locator("#plot-ttft").tap(position={"x": 60, "y": 40})
        page.wait_for_function("() => document.body.classList.contains('past')")
        assert page.locator("#ttft").text_content() != now
        moment = page.locator("#connection").text_content()
        assert moment.startswith("At ")
        assert page.locator("#plot-memory .cursor-label").text_content() == moment.removeprefix("At ")
        page.locator("#ttft-title").dispatch_event("pointerdown", {"bubbles": True})  # which need not take the focus
        assert page.locator("#ttft").text_content() == now
        assert page.locator("#connection").text_content() == "Live"

        page.get_by_role("radio", name="1 min").tap()
        assert page.get_by_role("radio", name="1 min").is_checked()
        assert page.locator("#plot-ttft").get_attribute("aria-valuemin") == "-60"
        page.get_by_text("Every entry of the ledger").tap()
        assert page.locator("#ledger").get_by_text("workspace").is_visible()
        page.locator(".decision summary").first.tap()
        assert page.locator(".decision li").first.is_visible()
        page.get_by_role("button", name="Forget key").tap()
        wait_for_state(page, "locked")


# -- by the keyboard


def test_tab_reaches_every_control_with_visible_focus(open_page):
    with serving(in_burst(), KEY) as address:
        page = open_page(address.url)
        wait_for_state(page, "locked")
        page.keyboard.type("secret\n")
        wait_for_state(page, "live")
        page.reload()
        wait_for_state(page, "live")
        found = []
        page.keyboard.press("Tab")
        while page.evaluate("document.activeElement !== document.body"):
            found.append(page.evaluate(FOCUSED))
            assert len(found) < 60, found
            page.keyboard.press("Tab")
        assert [stop for stop in found if stop["ring"] < 2 or not stop["seen"] or not stop["name"]] == []
        names = [stop["name"] for stop in found]
        assert names[:3] == ["Skip to the panels", "15 min", "Forget key"]
        charts = ["Layers by precision", "Time to first token, P95", "Time per output token", "Throughput", "Queue"]
        assert [name.removesuffix(", over time") for name in names[3:9]] == [*charts, "Memory"]
        assert names[9] == "Every entry of the ledger"
        assert [name.split()[0] for name in names[10:16]] == ["Policy", "Set", "Layers", "to", "KV", "Change"]
        assert names[16] == "The latest decisions, newest first"
        assert len([name for name in names[17:] if "transition" in name]) == page.locator(".decision").count()


def test_every_control_works_with_the_keyboard(open_page):
    with serving(in_burst(), KEY) as address:
        page = open_page(address.url)
        wait_for_state(page, "locked")
        page.keyboard.press("Tab")
        page.keyboard.press("Shift+Tab")
        page.keyboard.type("secret")
        page.keyboard.press("Tab")
        page.keyboard.press("Space")  # the button
        wait_for_state(page, "live")
        page.get_by_text("Every entry of the ledger").focus()
        for key, opened in (("Enter", True), ("Space", False)):
            page.keyboard.press(key)
            assert page.locator("#ledger").is_visible() is opened
        page.get_by_role("slider", name="Time to first token").focus()
        page.keyboard.press("PageUp")
        moment = page.locator("#connection").text_content()
        assert moment.startswith("At ")
        page.keyboard.press("Tab")  # to the next chart, at the same moment
        assert page.locator("#connection").text_content() == moment
        assert f"At {page.locator('#plot-tpot').get_attribute('aria-valuetext')}".startswith(moment)
        for _ in range(4):  # over the charts of throughput, queue and memory, and away from charts
            page.keyboard.press("Tab")
        assert page.locator("#connection").text_content() == "Live"
        page.get_by_role("group", name="The latest decisions").focus()
        page.keyboard.press("End")
        page.wait_for_function("() => document.querySelector('.scroll').scrollTop > 0")
        page.get_by_role("button", name="Forget key").focus()
        page.keyboard.press("Enter")
        wait_for_state(page, "locked")


def test_dashboard_has_texts_for_screen_readers(open_page):
    with serving(in_burst()) as address:
        page = open_page(address.url)
        wait_for_state(page, "live")
        page.wait_for_function("() => document.querySelector('#plot-queue').ariaValueText")
        read = page.locator("body").aria_snapshot()
        for part in (
            '- heading "jaxserve" [level=1]',
            '- group "Time shown":',
            '- radio "15 min" [checked]',
            '- region "Layers":',
            '- list "Layers of instance 0":',
            "- listitem: 5 int4",
            '- slider "Queue, over time"',
            '- group "The latest decisions, newest first":',
            "- time:",
        ):
            assert part in read, read
        assert re.search(r'- img "Other 610 MB, Weights 1.60 GB, KV used .*, Left .*, Budget 5 GB"', read)


def test_only_new_decisions_are_announced(open_page):
    time = Time(FIRST - 2)
    with serving(FakeClient(control=FakeControl(time))) as address:
        page = open_page(address.url)
        wait_for_state(page, "live")
        assert page.get_by_role("status").all_text_contents() == ["Live", "", ""]
        time.value = FIRST + 1.4
        wait_for_text(page, "#said", "^morph, failed: layers.10 .*: KV usage")
        page.reload()
        wait_for_state(page, "live")
        assert page.locator(".decision").count() > 0
        assert page.locator("#said").text_content() == ""


# -- over time


def test_reload_shows_fifteen_minutes_of_history(open_page):
    with serving(FakeClient(control=FakeControl(Time(3 * CYCLE + FIRST + 20)))) as address:
        page = open_page(address.url)
        for _ in range(2):
            wait_for_state(page, "live")
            page.get_by_role("slider", name="Time to first token").focus()
            page.keyboard.press("Home")
            assert page.evaluate("document.activeElement.ariaValueNow") == "-899"
            page.reload()


def test_key_that_becomes_invalid_hides_the_panels(open_page):
    with serving(in_burst(), ServerSettings(admin_key="before")) as address:
        page = open_page(address.url)
        wait_for_state(page, "locked")
        page.keyboard.type("before\n")
        wait_for_state(page, "live")
    wait_for_state(page, "lost")
    with serving(in_burst(), ServerSettings(admin_key="after"), port=address.port):
        wait_for_state(page, "locked")
        assert "did not accept" in page.locator("#key-error").text_content()
        assert page.locator("#panels").is_hidden()
        page.keyboard.type("after\n")  # the field has the focus
        wait_for_state(page, "live")
        assert page.locator("#panels").is_visible()
