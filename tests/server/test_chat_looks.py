"""The chat page's appearance: legible in light and dark, at any size and zoom, by keyboard and for screen readers."""

import pytest

from jaxserve.server.settings import ServerSettings
from tests.server.chatting import (
    ANSWER,
    CALL,
    TEMPLATE,
    THOUGHT,
    TOOLS,
    ask,
    say,
    talker,
    wait_for_answer,
    wait_for_model,
)
from tests.server.pages import DESK, PHONE, save_screenshot, wait_for_text
from tests.server.serving import serving
from tests.server.test_dashboard_looks import TEXTS
from tests.server.test_dashboard_use import ACTIONABLE, FOCUSED, SMALL

ZOOMED = {"viewport": {"width": 640, "height": 400}}  # as a desk at 200 %
NARROW = {"viewport": {"width": 320, "height": 640}}
LONG = "w" * 800 + " " + "lorem ipsum " * 12
TABLE = "\n".join(("|" + "a long head|" * 12, "|" + "-|" * 12, "|" + "cell|" * 12))
WIDE = f"\n\n```python\nx = '{'y' * 500}'\n```\n\n{TABLE}"
STICKING_OUT = """() => {
    const width = document.documentElement.clientWidth;
    return [...document.querySelectorAll("body *:not(svg *)")].filter(node => {
        const box = node.getBoundingClientRect();
        const inside = node.closest("pre, .table, .plot, .sr-only, .skip, .bubble, option");
        return box.width && node.checkVisibility() && box.right > width + 1 && (!inside || inside === node);
    }).map(node => node.outerHTML.slice(0, 90));
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("device", [DESK, PHONE], ids=["desk", "phone"])
def test_chat_text_is_legible(open_page, device, scheme):
    client = talker(THOUGHT + ANSWER, TEMPLATE)
    with serving(client, ServerSettings(admin_key="admin")) as address:
        page = open_page(address.url, "/", color_scheme=scheme, **device)
        wait_for_model(page)
        seen = page.evaluate(TEXTS)
        ask(page)
        page.locator(".reasoning summary").click()
        seen += page.evaluate(TEXTS)
        page.locator("#open-settings").click()
        page.get_by_label("Tools").fill(TOOLS)
        page.get_by_label("JSON schema of the answer").fill("{")
        seen += page.evaluate(TEXTS)
        page.get_by_label("JSON schema of the answer").fill("")
        page.keyboard.press("Escape")
        client.script = f"</think>{CALL}"
        ask(page, LONG)
        client.capacity = 0
        page.get_by_role("button", name="Regenerate").locator("visible=true").click()
        wait_for_text(page, ".assistant:last-child .fault", "queue is full")
        wait_for_answer(page)
        page.locator("#side summary").first.click() if device is PHONE else None
        page.get_by_label("Admin key").fill("admin")
        page.keyboard.press("Enter")
        page.wait_for_selector("#side-layers .cell")
        seen += page.evaluate(TEXTS)
        save_screenshot(page, f"chat-{scheme}-{device['viewport']['width']}")
    assert len(seen) > 100
    assert [(text, size) for text, size, _ in seen if size < 12] == []
    assert [(text, contrast) for text, _, contrast in seen if contrast < 4.5] == []


@pytest.mark.parametrize("device", [DESK, ZOOMED, NARROW], ids=["desk", "zoom", "narrow"])
def test_long_words_code_and_tables_stay_inside_the_page(open_page, device):
    name = "meta-llama/" + "Long-Name-" * 12
    client = talker(LONG + WIDE + f"\n\n> {LONG}\n\n- {LONG}\n\n`{LONG}`")
    with serving(client, ServerSettings(served_model_names=(name,))) as address:
        page = open_page(address.url, "/", **device)
        wait_for_text(page, "#model-name", name)
        ask(page, LONG)
        assert page.evaluate("document.documentElement.scrollWidth") == device["viewport"]["width"]
        assert page.locator("#log").evaluate("node => node.scrollWidth - node.clientWidth") == 0
        assert page.evaluate(STICKING_OUT) == []
        assert page.locator(".assistant pre").evaluate("node => node.scrollWidth > node.clientWidth")
        composer = page.locator("#composer").bounding_box()
        assert composer["y"] + composer["height"] <= device["viewport"]["height"]
        assert page.locator("#log").bounding_box()["height"] > 60
        save_screenshot(page, f"chat-long-{device['viewport']['width']}")
        page.locator("#open-settings").click()
        box = page.locator("#settings").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= device["viewport"]["width"]
        assert page.get_by_role("button", name="Done").is_visible()


def test_text_from_right_to_left_begins_at_the_right(open_page):
    with serving(talker("مرحبا بالعالم\n\n- أول\n\nHello\n\n```\ncode\n```")) as address:
        page = open_page(address.url, "/")
        answer = ask(page, "שלום")
        direction = "nodes => nodes.map(node => getComputedStyle(node).direction)"
        assert page.locator(".bubble").evaluate_all(direction) == ["rtl"]
        assert answer.locator(".markdown p, .markdown li").evaluate_all(direction) == ["rtl", "rtl", "ltr"]
        assert answer.locator("code").evaluate_all(direction) == ["ltr"]


def test_answers_are_announced_once_and_whole(open_page):
    with serving(talker("One two three. " * 20, delay=0.001)) as address:
        page = open_page(address.url, "/")
        wait_for_model(page)
        page.evaluate(
            """() => {
                window.announced = [];
                for (const node of document.querySelectorAll("[role=status], [role=alert], [aria-live=polite]")) {
                    const note = () => node.textContent && window.announced.push(node.textContent);
                    new MutationObserver(note).observe(node, { childList: true, characterData: true, subtree: true });
                }
            }"""
        )
        ask(page)
        page.wait_for_function("() => window.announced.length")
        announced = page.evaluate("window.announced")
        assert announced == [f"Answer: {'One two three. ' * 20} "]
        log = page.get_by_role("log")
        assert log.get_attribute("aria-live") == "off"
        assert log.get_by_role("article").count() == 2


def test_every_control_is_reached_by_tab_with_visible_focus(open_page):
    with serving(talker("Yes.\n\n```py\nx\n```")) as address:
        page = open_page(address.url, "/")
        page.wait_for_selector("#side-layers .cell")
        assert page.evaluate("document.activeElement.id") == "input"
        ask(page)
        page.reload()
        page.wait_for_selector("#side-layers .cell")
        page.locator(".skip").focus()
        found = [page.evaluate(FOCUSED)]
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement === document.body"):
                break
            found.append(page.evaluate(FOCUSED))
        names = [stop["name"] for stop in found]
        assert [stop for stop in found if not stop["name"] or not stop["seen"]] == []
        # The composer shows the focus of its field by its own border.
        assert [stop["name"] for stop in found if stop["ring"] < 2] == ["Message"]
        assert names[1:6] == ["New", "History", "Settings", "Dashboard", "API"]
        assert names[6:] == [
            *("Conversation", "Edit", "Copy", "Copy code", "Code, py", "Copy", "Regenerate", "Message", "Send"),
            *(names[15], "Tokens per second of the server, over time", "Change the plan while it answers"),
        ]


def test_controls_are_large_enough_for_fingers(open_page):
    with serving(talker("Yes.\n\n```py\nx\n```")) as address:
        page = open_page(address.url, "/", **PHONE)
        wait_for_model(page)
        ask(page)
        page.get_by_text("Inside the model").tap()
        page.wait_for_selector("#side-layers .cell")
        assert page.locator(ACTIONABLE).locator("visible=true").count() > 12
        assert page.evaluate(SMALL, ACTIONABLE) == []


def test_reduced_motion_stops_what_moves(open_page):
    with serving(talker("word " * 100, delay=0.02)) as address:
        page = open_page(address.url, "/", reduced_motion="reduce")
        say(page, "Go")
        page.wait_for_selector("#stop:not([hidden])")
        assert page.evaluate("document.getAnimations().length") == 0
        page.keyboard.press("Escape")
        wait_for_answer(page)


def test_enter_sends_and_shift_enter_begins_a_line(open_page):
    client = talker("Yes.")
    with serving(client) as address:
        page = open_page(address.url, "/")
        wait_for_model(page)
        low = page.locator("#input").bounding_box()["height"]
        page.keyboard.type("one")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("two")
        assert page.locator("#input").bounding_box()["height"] > low
        page.keyboard.press("Enter")
        wait_for_answer(page)
        assert page.locator(".bubble").text_content() == "one\ntwo"
        page.keyboard.press("Enter")  # nothing to send
        assert page.locator(".bubble").count() == 1
