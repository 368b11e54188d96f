"""/dashboard: its events, its files, and the page in a browser during a burst."""

import asyncio
import json
import re
from functools import partial

import httpx
import pytest
from starlette.testclient import TestClient

from jaxserve.server.app import create_app
from jaxserve.server.routes.dashboard import DashboardStream
from jaxserve.server.settings import ServerSettings
from jaxserve.server.state import ServerState
from tests.server.fake import FakeClient
from tests.server.fake_control import FIRST, LAST, NOTE, ORDER, FakeControl, Time, int4_layers
from tests.server.pages import precisions, wait_for_state, wait_for_text
from tests.server.serving import serving

BEFORE, AFTER = FIRST - 6, FIRST + 20  # seconds around the begin of the burst
HOSTILE = "<img src=x onerror='document.title=\"owned\"'><b>bold</b>"


# -- the events


def stream_of(control: FakeControl) -> DashboardStream:
    return DashboardStream(ServerState(FakeClient(control=control), ServerSettings()))


def test_first_event_has_the_history_and_later_events_only_new_samples():
    time = Time(1000)
    stream = stream_of(FakeControl(time))
    assert [sample["time"] for sample in stream.event()["samples"]] == list(range(101, 1001))
    time.value += 2
    assert [sample["time"] for sample in stream.event()["samples"]] == [1001, 1002]
    assert stream.event()["samples"] == []


def test_events_have_decisions_only_when_they_changed():
    time = Time(FIRST)
    stream = stream_of(FakeControl(time))
    assert [d["outcome"].split(":")[0] for d in stream.event()["decisions"]] == ["failed"]
    assert "decisions" not in stream.event()
    time.value = FIRST + 1.5
    assert [d["outcome"] for d in stream.event()["decisions"]][1:] == ["started"]
    time.value += 1
    assert [d["outcome"] for d in stream.event()["decisions"]][1:] == ["done"]


def test_events_end_when_the_server_has_drained():
    state = ServerState(FakeClient(control=FakeControl()), ServerSettings())
    state.start_draining()

    async def phases() -> list[str]:
        return [event["phase"] async for event in DashboardStream(state).events()]

    assert asyncio.run(phases()) == ["draining"]


def test_dashboard_events_are_server_sent_events():
    with (
        serving(FakeClient(control=FakeControl())) as address,
        httpx.stream("GET", f"{address.url}/dashboard/events") as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        first = next(answer.iter_lines())
    assert json.loads(first.removeprefix("data: "))["status"]["policy"] == "morph"


# -- the page as it is served


def test_page_and_its_files_need_no_key_and_no_other_server():
    settings = ServerSettings(api_keys=("a",), admin_key="b")
    http = TestClient(create_app(FakeClient(control=FakeControl()), settings))
    page = http.get("/dashboard")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    parts = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    assert len(parts) >= 3
    for part in parts:
        found = http.get(f"/{part}")
        assert found.status_code == 200
        assert found.headers["x-content-type-options"] == "nosniff"
    assert http.get("/dashboard/events").status_code == 401


@pytest.mark.parametrize("name", ["__init__.py", "..%2fapp.py", "%2e%2e/app.py", "nothing.js", ""])
def test_unknown_dashboard_file_returns_404(name):
    http = TestClient(create_app(FakeClient(), ServerSettings()))
    assert http.get(f"/dashboard/{name}", follow_redirects=False).status_code in (307, 404)


def test_page_files_name_no_other_server_and_write_no_markup():
    http = TestClient(create_app(FakeClient(), ServerSettings()))
    names = ("main", "chart", "dom", "format", "layers", "log", "memory", "plan", "requests", "stream")
    pages = ("api", "answer", "chat", "code", "inline", "markdown", "message", "reference", "settings", "side", "store")
    files = [*(f"dashboard/{name}.js" for name in names), *(f"pages/{name}.js" for name in pages)]
    for text in [http.get(f"/{path}").text for path in ("dashboard", "", "docs", *files)]:
        assert set(re.findall(r"https?://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)


# -- the page in a browser


def test_page_shows_a_burst_begin_and_end(open_page):
    time = Time(BEFORE)
    with serving(FakeClient(control=FakeControl(time))) as address:
        page = open_page(address.url)
        wait_for_state(page, "live")
        assert precisions(page) == ["bf16"] * 16
        assert "2 s" in page.locator("#plot-ttft").text_content()
        assert page.locator("#note").is_hidden()

        time.value = FIRST + 4  # TTFT is over the SLO
        wait_for_text(page, "#slo", "above the SLO of 2 s")
        time.value = AFTER
        wait_for_text(page, "#precisions", "int4 10")
        wait_for_text(page, "#note", f"^{re.escape(NOTE)}$")
        assert [i for i, name in enumerate(precisions(page)) if name == "int4"] == sorted(ORDER)
        wait_for_text(page, "#slo", "within the SLO of 2 s")
        assert page.locator(".decision").count() == 5
        assert "failed" in page.locator(".decision").last.text_content()
        assert "KV usage 95 % is above 85 %" in page.locator(".decision").first.text_content()

        time.value = LAST + 1
        wait_for_text(page, "#moving", "changing")
        time.value = LAST + 20
        wait_for_text(page, "#precisions", "^bfloat16 16$")
        wait_for_text(page, "#moving", "steady")
        assert int4_layers(time.value) == 0


def test_memory_panel_shows_bytes_against_the_budget(open_page):
    time = Time(BEFORE)
    with serving(FakeClient(control=FakeControl(time))) as address:
        page = open_page(address.url)
        wait_for_text(page, "#memory-legend", "Weights 2.47 GB")
        time.value = AFTER
        wait_for_text(page, "#memory-legend", "Weights 1.60 GB")
        parts = page.locator("#memory-bar").get_attribute("aria-label").split(", ")
        assert [parts[0], *parts[-3:]] == ["Other 610 MB", "KV rounding 33.6 MB", "Left 1.44 MB", "Budget 5 GB"]
        page.get_by_text("Every entry of the ledger").click()
        assert page.locator("#ledger").get_by_text("workspace").is_visible()


def test_memory_panel_says_what_other_is_and_marks_what_is_left(open_page):
    with serving(FakeClient(control=FakeControl(Time(BEFORE)))) as address:
        page = open_page(address.url)
        wait_for_text(page, "#memory-other", "^Other: runtime 420 MB .*libraries.*, workspace 190 MB .*step")
        assert page.locator("#memory-legend li:not(:has(.swatch))").count() == 0
        shades = page.locator("#memory-legend .swatch").evaluate_all(
            "nodes => nodes.map(node => [getComputedStyle(node).background, getComputedStyle(node).border].join())"
        )
        assert len(set(shades)) == len(shades)


def test_page_shows_throughput_and_how_requests_ended(open_page):
    client = FakeClient(control=FakeControl(Time(AFTER)))
    client.count_rejection("queue_full")
    with serving(client) as address:
        page = open_page(address.url)
        wait_for_text(page, "#throughput", r"1\d{3} generated\s*2\d{3} prompt")
        wait_for_text(page, "#requests", "0 failed .*1 refused")
        assert page.locator("#refusals").text_content() == "Refused: queue full 1"
        assert page.locator("#requests .badge").all_text_contents() == [""] * 4
        client.count_rejection("invalid")
        client.count_rejection("invalid")
        wait_for_text(page, "#requests", "3 refused 2 in the last minute")
        page.get_by_role("slider", name="Throughput").focus()
        page.keyboard.press("ArrowLeft")
        assert re.search(
            r": 1\d{3} generated, 2\d{3} prompt", page.locator("#plot-throughput").get_attribute("aria-valuetext")
        )


def test_operator_changes_the_plan_and_sees_why_another_one_is_refused(open_page):
    control = FakeControl(Time(BEFORE))
    with serving(FakeClient(control=control), ServerSettings(admin_key="admin")) as address:
        page = open_page(address.url)
        page.get_by_label("Admin key").fill("admin")
        page.keyboard.press("Enter")
        wait_for_state(page, "live")
        page.get_by_role("textbox", name="Layers").fill("3, 5-6")
        page.get_by_label("to", exact=True).fill("int4")
        page.get_by_label("KV pages").fill("300")
        page.get_by_role("button", name="Change plan").click()
        wait_for_text(page, ".plan-answer", "^Accepted")
        wait_for_text(page, "#precisions", "int4 3")
        assert [i for i, name in enumerate(precisions(page)) if name == "int4"] == [3, 5, 6]
        assert "kv_pages: 300" in control.asked[-1]
        page.get_by_label("KV pages").fill("1000000")
        page.get_by_role("button", name="Change plan").click()
        wait_for_text(page, ".plan-answer", "has 1000000 KV pages, at most")
        page.get_by_role("combobox", name="Policy").select_option("morph")
        page.get_by_role("button", name="Set policy").click()
        wait_for_text(page, "#policy", "^morph$")


def test_few_layers_of_a_precision_are_visible_in_the_small_chart(open_page):
    control = FakeControl(Time(AFTER))
    samples = [sample | {"precisions": {"bfloat16": 125, "int8": 1}} for sample in control.history()]
    control.history = lambda since=-1: [sample for sample in samples if sample["time"] > since]
    with serving(FakeClient(control=control)) as address:
        page = open_page(address.url)
        wait_for_state(page, "live")
        low, whole = page.evaluate(
            """() => ["int8", "full"].map(name => document.querySelector(`#plot-layers .${name}`).getBBox().height)"""
        )
        assert 4.5 <= low <= 6
        assert whole > 8 * low


def test_page_shows_instances_that_failed_or_exchange(open_page):
    control = FakeControl(Time(AFTER))
    status = control.status()
    (only,) = status["instance_states"]
    control.status = lambda: status
    with serving(FakeClient(control=control)) as address:
        page = open_page(address.url)
        wait_for_state(page, "live")
        assert page.locator("#instances h3").count() == 0
        only["state"] = "failed"
        wait_for_text(page, "#instances", "Instance 0 .*device 0 · ✕ failed, others take its place")
        only["state"] = "exchanging"
        wait_for_text(page, "#instances", "KV pages on their way")


def test_page_asks_for_the_key_and_keeps_it_for_the_tab_only(open_page):
    with serving(FakeClient(control=FakeControl()), ServerSettings(admin_key="schlüssel")) as address:
        page = open_page(address.url)
        wait_for_state(page, "locked")
        assert page.locator("#panels").is_hidden()
        page.keyboard.type("wrong")  # the field has the focus
        page.keyboard.press("Enter")
        wait_for_text(page, "#key-error", "did not accept")
        page.get_by_label("Admin key").fill("schlüssel")
        page.get_by_role("button", name="Connect").click()
        wait_for_state(page, "live")
        assert page.locator("#key-form").is_hidden()
        page.reload()
        wait_for_state(page, "live")
        assert page.evaluate("[localStorage.length, document.cookie, location.search]") == [0, "", ""]
        page.get_by_role("button", name="Forget key").click()
        wait_for_state(page, "locked")
        page.reload()
        wait_for_state(page, "locked")


@pytest.mark.parametrize(
    ("client", "settings", "message"),
    [
        (FakeClient(), ServerSettings(), "no control plane"),
        (FakeClient(control=FakeControl()), ServerSettings(api_keys=("a",)), "--admin-key"),
        (None, ServerSettings(), "still loading"),
    ],
    ids=["no control plane", "no admin key", "loading"],
)
def test_page_without_data_says_why(open_page, client, settings, message):
    with serving(client, settings) as address:
        page = open_page(address.url)
        wait_for_text(page, "#notice", message)
        assert page.locator("#panels").is_hidden()


def test_page_shows_a_lost_connection_and_reconnects(open_page):
    client = partial(FakeClient, control=FakeControl(Time(AFTER)))
    with serving(client()) as address:
        page = open_page(address.url)
        wait_for_state(page, "live")
    wait_for_state(page, "lost")
    assert "Disconnected since" in page.locator("#connection").text_content()
    assert page.locator("#notice").is_visible()
    with serving(client(), port=address.port):
        wait_for_state(page, "live")
        assert page.locator("#notice").is_hidden()
        assert page.locator(".decision").count() == 5


def test_page_shows_text_of_the_server_without_markup(open_page):
    control = FakeControl(Time(AFTER), policy=HOSTILE)
    decision = control.decisions(1)[0] | {"reason": HOSTILE, "policy": HOSTILE, "transitions": [HOSTILE]}
    hostile = [decision | {"outcome": f"failed: {HOSTILE}"}]
    control.decisions = lambda limit: hostile
    status = control.status() | {"layers": [[{"block": HOSTILE, "precision": HOSTILE}]], "ledger": {HOSTILE: 5}}
    control.status = lambda: status
    with serving(FakeClient(control=control), ServerSettings(served_model_names=(HOSTILE,))) as address:
        page = open_page(address.url)
        wait_for_state(page, "live")
        for selector in ("#model", "#policy", ".layer", ".precision", ".reason", ".detail", ".by", "#ledger th"):
            assert HOSTILE in page.locator(selector).first.text_content(), selector
        assert page.locator("body img, body b b").count() == 0
        assert page.title() == f"{HOSTILE} · jaxserve"


def test_decision_log_shows_an_operators_change(open_page):
    control = FakeControl(Time(AFTER))
    reason = "by the operator: policy morph -> static"
    change = {"time": AFTER - 1.0, "policy": "static", "reason": reason, "before_version": 11, "target_version": 11}
    decisions = [*control.decisions(100), change | {"transitions": [], "outcome": "done"}]
    control.decisions = lambda limit: decisions
    with serving(FakeClient(control=control)) as address:
        page = open_page(address.url)
        wait_for_state(page, "live")
        text = page.locator(".decision").first.text_content()
        for part in ("✓ done", "static", reason.replace("->", "→"), "plan 11 → 11"):
            assert part in text
        assert "transition" not in text


def test_charts_can_be_read_with_the_keyboard(open_page):
    with serving(FakeClient(control=FakeControl(Time(AFTER)))) as address:
        page = open_page(address.url)
        wait_for_state(page, "live")
        now = page.locator("#ttft").text_content()
        page.get_by_role("slider", name="Time to first token").focus()
        for _ in range(16):
            page.keyboard.press("ArrowLeft")
        assert page.locator("#ttft").text_content() != now
        text = page.locator("#plot-ttft").get_attribute("aria-valuetext")
        assert re.fullmatch(r"\d\d:\d\d:\d\d: 3\.\d\d s, above the SLO", text)
        assert page.locator("#connection").text_content().startswith("At ")
        page.keyboard.press("Escape")
        assert page.locator("#ttft").text_content() == now
        page.get_by_role("radio", name="15 min").focus()
        page.keyboard.press("ArrowLeft")
        assert page.get_by_role("radio", name="5 min", exact=True).is_checked()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 800), (390, 844), (320, 640)], ids=str)
def test_page_content_stays_inside_its_panels(open_page, size, scheme):
    viewport = {"width": size[0], "height": size[1]}
    with serving(FakeClient(control=FakeControl(Time(1290)), script="")) as address:
        page = open_page(address.url, viewport=viewport, color_scheme=scheme, has_touch=size[0] < 500)
        wait_for_state(page, "live")
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        sticking_out = """() => [...document.querySelectorAll("#panels *:not(svg *)")].filter((node) => {
            const [inner, outer] = [node.getBoundingClientRect(), node.closest(".panel")?.getBoundingClientRect()];
            return outer && inner.width && (inner.right > outer.right + 1 || inner.left < outer.left - 1);
        }).map((node) => node.outerHTML.slice(0, 80))"""
        assert page.evaluate(sticking_out) == []


def test_page_shows_an_engine_without_samples(open_page):
    control = FakeControl(Time(0.5))
    control.history = lambda since: []
    control.decisions = lambda limit: []
    with serving(FakeClient(control=control)) as address:
        page = open_page(address.url)
        wait_for_text(page, "#precisions", "bfloat16 16")
        wait_for_text(page, "#log-empty", "not had to change")
