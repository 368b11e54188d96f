"""The dashboard's appearance: legible in light and dark, and with models, names and reasons of any size."""

import re

import pytest

from jaxserve.server.settings import ServerSettings
from tests.server.fake import FakeClient
from tests.server.fake_control import BUDGET, FIRST, FakeControl, Time, control_in_burst
from tests.server.pages import DESK, PHONE, TABLET, precisions, save_screenshot, wait_for_state, wait_for_text
from tests.server.serving import serving

KEY = ServerSettings(admin_key="secret")
SCHEMES = ("light", "dark")

# Each visible text of the page: [letters, px, contrast with its background].
TEXTS = """() => {
    const parse = colour => {
        const [r, g, b, alpha] = colour.match(/[\\d.]+/g).map(Number);
        return { rgb: [r, g, b], alpha: alpha ?? 1 };
    };
    const light = ({ rgb }) => {
        const [r, g, b] = rgb.map(v => v / 255).map(v => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = node => {
        for (let at = node; at; at = at.parentElement) {
            const ground = parse(getComputedStyle(at).backgroundColor);
            if (ground.alpha === 1) return ground;
        }
    };
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const node = walker.currentNode.parentElement;
        const text = walker.currentNode.textContent.trim();
        if (!text || !node.checkVisibility() || node.closest(".sr-only, .skip, .tiny .precision, script")) continue;
        const style = getComputedStyle(node);
        const colour = parse(node.closest("svg") ? style.fill : style.color);
        const ground = node.matches(".cursor-label") ? parse(getComputedStyle(document.body).color) : behind(node);
        const [high, low] = [light(colour), light(ground)].sort((a, b) => b - a);
        found.push([text, parseFloat(style.fontSize), (high + 0.05) / (low + 0.05)]);
    }
    return found;
}"""


# -- contrast and motion


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("device", [DESK, PHONE], ids=["desk", "phone"])
def test_dashboard_text_is_legible(open_page, device, scheme):
    control = FakeControl(Time(FIRST + 4))  # above the SLO, and a decision has failed
    status = control.status() | {"busy": True}
    control.status = lambda: status
    with serving(FakeClient(control=control), KEY) as address:
        page = open_page(address.url, color_scheme=scheme, **device)
        wait_for_state(page, "locked")
        page.keyboard.type("wrong\n")
        wait_for_text(page, "#key-error", "not accept")
        seen = page.evaluate(TEXTS)
        page.get_by_label("Admin key").fill("secret")
        page.keyboard.press("Enter")
        wait_for_text(page, "#slo", "above")
        seen += page.evaluate(TEXTS)
        page.get_by_role("slider", name="Queue").focus()
        page.keyboard.press("ArrowLeft")
        seen += page.evaluate(TEXTS)
    wait_for_state(page, "lost")
    seen += page.evaluate(TEXTS)
    assert len(seen) > 200
    texts = {text for text, _, _ in seen}
    assert {"The server did not accept this key.", "✕ failed", "◐ changing to another", "SLO 2 s", "Queue"} <= texts
    assert [(text, size) for text, size, _ in seen if size < 12] == []
    assert [(text, contrast) for text, _, contrast in seen if contrast < 4.5] == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_layer_bars_contrast_with_their_background(open_page, scheme):
    with serving(FakeClient(control=control_in_burst())) as address:
        page = open_page(address.url, color_scheme=scheme, reduced_motion="reduce")
        wait_for_state(page, "live")
        shades = page.evaluate(
            """() => [...document.querySelectorAll(".cell")].slice(0, 4).map(cell => {
                const colour = node => getComputedStyle(node).backgroundColor;
                return [colour(cell.querySelector(".fill")), colour(cell.querySelector(".track"))];
            })"""
        )
        assert len({fill for fill, _ in shades}) == 4
        assert [pair for pair in shades if contrast(*pair) < 3] == []
        heights = [page.locator(".fill").nth(n).evaluate("node => node.style.height") for n in range(4)]
        assert heights == ["100%", "50%", "25%", "18.75%"]


def contrast(*colours: str) -> float:
    """Return the contrast ratio of two colours (WCAG 2.1)."""
    lights = []
    for colour in colours:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        lights.append(0.2126 * red + 0.7152 * green + 0.0722 * blue)
    return (max(lights) + 0.05) / (min(lights) + 0.05)


def test_reduced_motion_disables_animations(open_page):
    time = Time(FIRST - 2)
    with serving(FakeClient(control=FakeControl(time))) as address:
        page = open_page(address.url, reduced_motion="reduce")
        wait_for_state(page, "live")
        time.value = FIRST + 3
        easings = page.wait_for_function(
            "() => document.getAnimations().length && document.getAnimations().map(a => a.effect.getTiming().easing)"
        ).json_value()
        assert set(easings) == {"steps(1)"}  # a static frame that then disappears


# -- layout of any size


@pytest.mark.parametrize("device", [PHONE, TABLET, DESK], ids=["phone", "tablet", "desk"])
def test_header_elements_do_not_overlap(open_page, device):
    note = "queue delay 1766 ms > 100 ms, KV usage 100.0% > 85%, near the SLO (from 1000 ms): no layer is left"
    control = control_in_burst(
        policy="/srv/policies/" + "very-long-name-" * 8, note=note, busy=True, target_version=1234
    )
    names = ServerSettings(admin_key="secret", served_model_names=("meta-llama/" + "Long-Name-" * 12,))
    with serving(FakeClient(control=control), names) as address:
        page = open_page(address.url, **device)
        wait_for_state(page, "locked")
        page.keyboard.type("secret\n")
        wait_for_state(page, "live")
        save_screenshot(page, f"names-{device['viewport']['width']}")
        overlapping = """() => {
            const parts = [...document.querySelectorAll(".brand, .facts, .range, .link, .notice, main")];
            const boxes = parts.map(node => node.getBoundingClientRect()).filter(box => box.width);
            const over = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
            return boxes.flatMap((a, i) => boxes.slice(i + 1).filter(b => over(a, b)).map(b => [a, b]));
        }"""
        assert page.evaluate(overlapping) == []
        assert page.evaluate("document.documentElement.scrollWidth") == device["viewport"]["width"]


def test_page_counts_the_instances_that_it_does_not_show(open_page):
    """A server names at most 16 of a thousand instances, and counts the layers of all."""
    control = control_in_burst(16, 16, num_instances=1000, precisions={"bfloat16": 15990, "int4": 10})
    with serving(FakeClient(control=control)) as address:
        page = open_page(address.url)
        wait_for_state(page, "live")
        assert page.locator("#instances h3").count() == 16
        assert "and 984 more instances" in page.locator("#instances").text_content()
        assert re.sub(r"\s+", " ", page.locator("#precisions").text_content()).strip() == "bfloat16 15990int4 10"
        assert page.locator("#instances").evaluate("node => node.clientHeight") < 1300
        save_screenshot(page, "layers-1000x16")


@pytest.mark.parametrize("device", [DESK, PHONE], ids=["desk", "phone"])
def test_page_shows_where_instances_run_and_how_they_changed(open_page, device):
    control = control_in_burst(3)
    state = {"tp": 1, "running": 2, "waiting": 0, "kv_usage": 0.31, "draining": False}
    states = [
        state | {"name": "4", "devices": [0, 1], "tp": 2, "draining": True},
        *(state | {"name": name, "devices": [int(name)]} for name in ("2", "3")),
    ]
    status, samples = control.status(), control.history()
    names = {"instances": ["4", "2", "3"], "instance_states": states}
    control.status = lambda: status | names
    samples[-1]["waiting_room"] = 2
    merge = {"outcome": "done", "transitions": ["instance 0 and 1 -> 4 (devices 0, 1)"], "reason": "748 tokens"}
    decision = control.decisions(1)[0]
    control.decisions = lambda limit: [decision | merge]
    with serving(FakeClient(control=control)) as address:
        page = open_page(address.url, **device)
        wait_for_state(page, "live")
        heads = page.locator("#instances h3").all_text_contents()
        assert heads[0] == "Instance 4 devices 0, 1 · draining · 2 running, KV 31 %"
        assert heads[1] == "Instance 2 device 2 · 2 running, KV 31 %"
        assert page.locator(".regroup").text_content() == "instance 0 and 1 → 4 (devices 0, 1)"
        assert "2 in the waiting room" in re.sub(r"\s+", " ", page.locator("#queue").text_content())
        save_screenshot(page, f"merged-{device['viewport']['width']}")
        states[0] = state | {"name": "5", "devices": [0]}
        names["instances"] = ["5", "2", "3"]
        samples[-1]["waiting_room"] = 0
        wait_for_text(page, "#instances h3", "Instance 5 device 0")


@pytest.mark.parametrize("device", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize(("instances", "layers"), [(1, 8), (1, 80), (4, 32)])
def test_many_layers_form_rows_of_equal_length(open_page, instances, layers, device):
    with serving(FakeClient(control=control_in_burst(instances, layers))) as address:
        page = open_page(address.url, **device)
        wait_for_state(page, "live")
        save_screenshot(page, f"layers-{instances}x{layers}-{device['viewport']['width']}")
        assert len(precisions(page)) == instances * layers
        rows = page.evaluate(
            """() => [...document.querySelectorAll(".strip")].map(strip => {
                const tops = [...strip.children].map(cell => Math.round(cell.getBoundingClientRect().top));
                return [...new Set(tops)].map(top => tops.filter(other => other === top).length);
            })"""
        )
        for lengths in rows:
            assert sum(lengths) == layers
            assert max(lengths) - lengths[-1] < len(lengths), "as even as the number allows"
        cut = """() => [...document.querySelectorAll(".layer, .strip:not(.tiny) .precision")]
            .filter(node => node.scrollWidth > node.clientWidth).map(node => node.textContent)"""
        assert page.evaluate(cut) == []
        width, height = page.locator("#instances").evaluate("node => [node.clientWidth, node.clientHeight]")
        assert height <= {1: 330, 4: 640}[instances]
        assert page.evaluate("document.documentElement.scrollWidth") == device["viewport"]["width"] > width


def test_long_reason_is_folded_and_can_be_opened(open_page):
    control = control_in_burst()
    parts = [f"instance {n}: queue delay 240 ms > 100 ms: layers 3, 7 to int4, KV 401 -> 461 pages" for n in range(12)]
    decision = control.decisions(1)[0] | {"reason": "; ".join(parts), "outcome": "failed: " + "out of memory " * 60}
    control.decisions = lambda limit: [decision]
    with serving(FakeClient(control=control)) as address:
        page = open_page(address.url)
        wait_for_state(page, "live")
        reason = page.locator(".reason")
        lines = reason.locator(".say").all_text_contents()
        assert lines == [part.replace("->", "→") for part in parts]
        folded = reason.bounding_box()["height"]
        reason.locator("summary").focus()
        page.keyboard.press("Enter")
        assert reason.bounding_box()["height"] > 2 * folded
        assert page.locator(".detail").bounding_box()["height"] < 2 * folded


def test_static_policy_is_shown_without_slo(open_page):
    control = control_in_burst(policy="static", note="", slo_ttft=None)
    control.decisions = lambda limit: []
    with serving(FakeClient(control=control)) as address:
        page = open_page(address.url)
        wait_for_text(page, "#log-empty", "The policy is static")
        assert page.locator("#policy").text_content() == "static"
        assert "SLO" not in page.locator("main").text_content()
        assert page.locator("#note").is_hidden()
        assert page.locator("#ttft").text_content() != "–"


def test_memory_panel_sums_devices_and_ledger_table_shows_one(open_page):
    control = control_in_burst(budget=BUDGET // 2)
    with serving(FakeClient(control=control)) as address:
        page = open_page(address.url)
        wait_for_state(page, "live")
        assert page.locator("#ledger-title").text_content() == "Every entry of the ledger, on the fullest of 2 devices"
        assert page.locator("#memory-legend li").last.text_content() == "Budget 5 GB"


def test_large_budget_does_not_flatten_the_memory_chart(open_page):
    control = control_in_burst(budget=BUDGET * 40)
    samples = control.history()
    for sample in samples:
        sample["budget"] = BUDGET * 40
    with serving(FakeClient(control=control)) as address:
        page = open_page(address.url)
        wait_for_state(page, "live")
        save_screenshot(page, "large-budget")
        parts = {
            name: page.locator(f"#memory-{name} .part").evaluate_all(
                "nodes => nodes.map(n => parseFloat(n.style.width))"
            )
            for name in ("whole", "closer")
        }
        assert sum(parts["whole"]) < 4
        assert 90 < sum(parts["closer"]) <= 100.01
        assert page.locator("#plot-memory .reference").count() == 0
