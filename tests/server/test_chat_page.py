"""The chat page: what people do with it, and what the server is asked for."""

import json

import pytest

from jaxserve.server.settings import ServerSettings
from tests.server.chatting import (
    ANSWER,
    CALL,
    PLAIN,
    TEMPLATE,
    THOUGHT,
    TOOLS,
    ask,
    prompts,
    say,
    talker,
    wait_for_answer,
    wait_for_model,
)
from tests.server.fake import FakeClient
from tests.server.fake_control import CYCLE, FIRST, FakeControl, Time
from tests.server.pages import PHONE, precisions, save_screenshot, wait_for_text
from tests.server.serving import serving


def test_answer_is_shown_as_markdown_with_its_reasoning_and_speed(open_page):
    client = talker(THOUGHT + ANSWER, TEMPLATE, delay=0.001)
    with serving(client) as address:
        page = open_page(address.url, "/")
        wait_for_model(page)
        assert page.title() == "fake · jaxserve"
        answer = ask(page)
        body = answer.locator(".markdown").last
        assert body.locator("h4").text_content() == "Caches"
        assert body.locator("strong, em, p > code").all_text_contents() == ["KV cache", "keys", "values"]
        assert body.locator("ul ul li").text_content() == "in each layer"
        assert body.locator("td").all_text_contents() == ["4", "2 %"]
        code = body.locator("pre code")
        assert code.text_content() == "def grow(pages: int) -> int:\n    return pages + 1  # one more"
        assert code.locator(".of-comment").text_content() == "# one more"
        link = body.get_by_role("link", name="the page")
        assert link.get_attribute("href") == "https://example.org/kv"
        assert "noopener" in link.get_attribute("rel")
        reasoning = answer.locator(".reasoning")
        assert not reasoning.evaluate("node => node.open")
        assert "Thought for" in reasoning.locator("summary").text_content()
        reasoning.locator("summary").click()
        assert reasoning.locator("em").text_content() == "plan"
        assert reasoning.locator("em").is_visible()
        stats = answer.locator(".stats").text_content()
        tokens = len(client.tokenizer.encode(client.script))
        assert " tokens/s · first after " in stats
        assert stats.endswith(f"{tokens} tokens")
        assert page.locator("#said").text_content().startswith("Answer: ## Caches")
        save_screenshot(page, "chat-answer")


def test_conversation_goes_on_and_survives_a_reload(open_page):
    client = talker("Yes.")
    with serving(client) as address:
        page = open_page(address.url, "/")
        ask(page, "One?")
        page.reload()
        wait_for_model(page)
        assert page.locator(".bubble").all_text_contents() == ["One?"]
        ask(page, "Two?")
        assert prompts(client)[-1] == "[user] One?\n[assistant] Yes.\n[user] Two?\n"
        page.get_by_role("button", name="New").click()
        assert page.locator(".message").count() == 0
        ask(page, "Three?")
        assert prompts(client)[-1] == "[user] Three?\n"
        page.get_by_role("button", name="History").click()
        assert page.locator("#history .title").all_text_contents() == ["Three?", "One?"]
        page.get_by_role("button", name="One?", exact=True).click()
        assert page.locator(".bubble").all_text_contents() == ["One?", "Two?"]
        page.get_by_role("button", name="History").click()
        page.get_by_role("button", name="Delete One?").click()
        assert page.locator("#history .title").all_text_contents() == ["Three?"]
        page.keyboard.press("Escape")
        assert page.locator(".message").count() == 0
        assert page.locator("#history").is_hidden()


def test_answer_can_be_stopped_continued_and_generated_again(open_page):
    client = talker("word " * 200, delay=0.005)
    with serving(client) as address:
        page = open_page(address.url, "/")
        say(page, "Go")
        page.wait_for_function("() => document.querySelector('.assistant > .markdown').textContent.length > 20")
        page.keyboard.press("Escape")
        wait_for_answer(page)
        answer = page.locator(".assistant")
        assert "stopped" in answer.locator(".stats").text_content()
        part = answer.locator("> .markdown").text_content()
        assert 20 < len(part) < 990
        client.delay, client.script = 0, "END"
        answer.get_by_role("button", name="Continue").click()
        wait_for_text(page, ".assistant > .markdown", "END$")
        whole = answer.locator("> .markdown").text_content()
        assert whole.replace(" ", "") == part.replace(" ", "") + "END"  # a space at the end is not shown
        wait_for_answer(page)
        answer.get_by_role("button", name="Regenerate").click()
        wait_for_text(page, ".assistant > .markdown", "^END$")
    assert len(client.aborted) == 1


def test_last_message_can_be_edited(open_page):
    client = talker("Fine.")
    with serving(client) as address:
        page = open_page(address.url, "/")
        ask(page, "first")
        ask(page, "secnod")
        edit = page.get_by_role("button", name="Edit").locator("visible=true")
        assert edit.count() == 1
        edit.click()
        assert page.locator("#input").input_value() == "secnod"
        page.keyboard.press("Escape")
        assert page.locator("#input").input_value() == ""
        edit.click()
        ask(page, "second")
        assert page.locator(".bubble").all_text_contents() == ["first", "second"]
        assert prompts(client)[-1] == "[user] first\n[assistant] Fine.\n[user] second\n"


def test_settings_are_sent_and_kept(open_page):
    client = talker("Yes.", TEMPLATE)
    with serving(client) as address:
        page = open_page(address.url, "/")
        wait_for_model(page)
        page.get_by_role("button", name="Settings").click()
        values = {"System prompt": "Be brief.", "Temperature": "0.25", "Top p": "0.5", "Seed": "7"}
        values |= {"Maximum tokens": "3", "Presence penalty": "0.5", "Stop texts, one a line": "a\nb"}
        for label, value in values.items():
            page.get_by_label(label).fill(value)
        page.get_by_label("Thinking").select_option("off")
        page.get_by_label("JSON schema of the answer").fill("{")
        page.get_by_role("button", name="Done").click()
        assert "not valid JSON" in page.locator("#settings-error").text_content()
        page.get_by_label("JSON schema of the answer").fill("")
        page.get_by_label("Temperature").fill("9")
        page.get_by_role("button", name="Done").click()
        assert page.locator("#settings-error").text_content().startswith("Temperature: ")
        page.get_by_label("Temperature").fill("0.25")
        page.get_by_role("button", name="Done").click()
        assert page.locator("#settings").is_hidden()
        page.reload()
        wait_for_model(page)
        answer = ask(page, "Is it?")
        assert "cut at the limit of tokens" in answer.locator(".stats").text_content()
        _, params, *_ = client.seen[-1]
        assert (params.temperature, params.top_p, params.seed, params.max_tokens) == (0.25, 0.5, 7, 3)
        assert (params.presence_penalty, tuple(params.stop)) == (0.5, ("a", "b"))
        assert prompts(client)[-1] == "[system] Be brief.\n[user] Is it?\n[assistant] no thinking"


def test_tool_call_is_shown_and_answered_by_hand(open_page):
    client = talker(CALL, TEMPLATE)
    with serving(client) as address:
        page = open_page(address.url, "/")
        wait_for_model(page)
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Tools").fill(TOOLS)
        page.get_by_label("Thinking").select_option("off")
        page.keyboard.press("Escape")
        answer = ask(page, "Will it rain?")
        assert answer.locator(".call b").text_content() == "weather"
        assert json.loads(answer.locator(".call code").text_content()) == {"city": "Bern", "days": 2}
        assert "\n" in answer.locator(".call code").text_content()
        save_screenshot(page, "chat-call")
        client.script = "Take an umbrella."
        answer.get_by_label("Result of weather").fill('{"rain": true}')
        answer.get_by_role("button", name="Send results").click()
        wait_for_text(page, ".assistant:last-child > .markdown", "umbrella")
        wait_for_answer(page)
        assert page.locator(".result").text_content() == 'Result of weather{"rain": true}'
        assert prompts(client)[-1].endswith('[assistant] weather\n[tool] {"rain": true}\n[assistant] no thinking')
        assert page.locator(".results").locator("visible=true").count() == 0


def test_model_without_chat_template_completes_text(open_page):
    client = talker(" b = 1\n", None)
    with serving(client) as address:
        page = open_page(address.url, "/")
        wait_for_text(page, "#mode", "has no chat template, so it goes on with your text")
        answer = ask(page, "  a,")
        assert answer.locator(".plain-text").text_content() == " b = 1\n"
        ask(page, "")  # goes on
        ask(page, "c")
        assert prompts(client) == ["  a,", "  a, b = 1\n", "  a, b = 1\n b = 1\nc"]
        assert {params.max_tokens for _, params, *_ in client.seen} == {256}
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Use").select_option("chat")
        page.keyboard.press("Escape")
        ask(page, "Hello")
        assert prompts(client)[-1] == "User: Hello\nAssistant:"


def test_model_names_can_be_chosen(open_page):
    client = talker("Yes.")
    with serving(client, ServerSettings(served_model_names=("one", "two"))) as address:
        page = open_page(address.url, "/")
        page.get_by_label("Model", exact=True).select_option("two")
        with page.expect_request("**/v1/chat/completions") as asked:
            ask(page)
        assert asked.value.post_data_json["model"] == "two"


# -- keys, errors


def test_api_key_is_asked_for_and_kept_for_the_tab_only(open_page):
    with serving(talker("Yes."), ServerSettings(api_keys=("schlüssel",), admin_key="admin")) as address:
        page = open_page(address.url, "/")
        page.get_by_label("API key").fill("wrong")
        page.get_by_role("button", name="Use key").click()
        wait_for_text(page, "#key-error", "did not accept")
        page.get_by_label("API key").fill("schlüssel")
        page.keyboard.press("Enter")
        wait_for_model(page)
        assert "Yes." in ask(page).text_content()
        kept = page.evaluate("[JSON.stringify(localStorage), document.cookie, location.href]")
        assert "schl" not in "".join(kept)
        page.reload()
        wait_for_model(page)
        wait_for_text(page, "#side-said", "operators only")
        page.get_by_label("Admin key").fill("admin")
        page.get_by_role("button", name="Show").click()
        page.wait_for_selector("#side-layers .cell")
        page.get_by_role("button", name="Settings").click()
        page.get_by_role("button", name="Forget API key").click()
        wait_for_text(page, "#key-form", "wants a key")


def test_errors_are_shown_in_words_and_can_be_tried_again(open_page):
    client = talker("Yes and no.", capacity=0)
    with serving(client) as address:
        page = open_page(address.url, "/")
        answer = ask(page)
        assert answer.locator(".fault").text_content() == "The queue is full. Try again in a moment."
        client.capacity, client.fail_after = 64, 3
        page.get_by_role("button", name="Try again").click()
        wait_for_text(page, ".fault", "engine failed: a step raised")
        wait_for_answer(page)
        assert page.locator(".assistant > .markdown").text_content() == "Yes"
        client.fail_after = None
        page.get_by_role("button", name="Try again").click()
        wait_for_text(page, ".assistant > .markdown", "Yes and no.")
        assert page.locator(".fault").is_hidden()
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Top k").fill("-1")
        page.get_by_label("Maximum tokens").fill("999999")
        page.keyboard.press("Escape")
        answer = ask(page)
        assert "400000 tokens" in answer.locator(".fault").text_content()


def test_page_waits_for_a_model_that_is_loading_and_for_a_server_that_restarts(open_page):
    with serving(None) as address:
        page = open_page(address.url, "/")
        wait_for_text(page, "#notice", "still loading")
        assert "still loading" in ask(page, "Hello?").locator(".fault").text_content()
    client = talker("word " * 400, delay=0.01)
    with serving(client, port=address.port):
        wait_for_model(page)
        page.get_by_role("button", name="Try again").click()
        page.wait_for_function("() => document.querySelector('.assistant > .markdown').textContent.length > 10")
        client.fail_after, client.failure = 0, ConnectionError()
        wait_for_text(page, ".fault", ".")
    with serving(talker("Here again."), port=address.port):
        page.get_by_role("button", name="Try again").click()
        wait_for_text(page, ".assistant > .markdown", "Here again.")


# -- beside the conversation


def test_layers_change_beside_the_answer(open_page):
    time = Time(CYCLE + FIRST - 5)
    client = talker("word " * 100, control=FakeControl(time), delay=0.05)
    with serving(client) as address:
        page = open_page(address.url, "/")
        say(page, "Go")
        page.wait_for_selector("#side-layers .cell")
        assert set(precisions(page)) == {"bf16"}
        time.value += 25
        wait_for_text(page, "#side-precisions", "int4 10")
        assert precisions(page).count("int4") == 10
        assert page.locator("#side-pages").text_content().endswith("1315 pages, 2.76 GB")
        assert "running" in page.locator("#side-body").text_content()
        assert page.locator("#side-rate").text_content().endswith(" tokens/s")
        client.delay = 0
        wait_for_text(page, "#side-answer", " tokens/s$")


@pytest.mark.parametrize(
    ("client", "settings", "message"),
    [
        (FakeClient(control=FakeControl(Time(80))), ServerSettings(api_keys=("a",)), "--admin-key"),
        (FakeClient(), ServerSettings(), "plan does not change"),
    ],
    ids=["no admin key", "no control plane"],
)
def test_panel_without_data_says_why(open_page, client, settings, message):
    with serving(client, settings) as address:
        page = open_page(address.url, "/")
        wait_for_text(page, "#side-said", message)
        assert page.locator("#side-message a").get_attribute("href") == "dashboard"
        assert page.locator("#side-body").is_hidden()


def test_operator_changes_the_plan_beside_the_answer(open_page):
    control = FakeControl(Time(10))
    with serving(talker(control=control)) as address:
        page = open_page(address.url, "/")
        page.get_by_text("Change the plan while it answers").click()
        layers = page.get_by_role("textbox", name="Layers")
        layers.fill("0-2, 5")
        page.get_by_label("to", exact=True).fill("int8")
        page.get_by_role("button", name="Change plan").click()
        wait_for_text(page, ".plan-answer", "Accepted")
        wait_for_text(page, "#side-precisions", "int8 4")
        assert [i for i, name in enumerate(precisions(page)) if name == "int8"] == [0, 1, 2, 5]
        wait_for_text(page, "#side-policy", "manual")
        page.get_by_label("KV pages").fill("999999")
        page.get_by_role("button", name="Change plan").click()
        wait_for_text(page, ".plan-answer", "instance 0 has 999999 KV pages, at most .* fit")
        layers.fill("77")
        page.get_by_role("button", name="Change plan").click()
        wait_for_text(page, ".plan-answer", "No layer is in")
        page.get_by_label("Policy").select_option("static")
        page.get_by_role("button", name="Set policy").click()
        wait_for_text(page, "#side-policy", "static")


def test_panel_is_folded_on_a_phone_and_shows_the_layers_in_words(open_page):
    with serving(talker("Yes.")) as address:
        page = open_page(address.url, "/", **PHONE)
        wait_for_text(page, "#side-counts", "6 bf16, 10 int4")
        assert page.locator("#side-layers").is_hidden()
        page.locator("#input").tap()
        say(page, "Hello")
        wait_for_answer(page)
        page.get_by_text("Inside the model").tap()
        assert page.locator("#side-layers").is_visible()
        box = page.locator("#composer").bounding_box()
        assert box["y"] + box["height"] <= PHONE["viewport"]["height"]


def test_capabilities_are_what_the_template_shows():
    from starlette.testclient import TestClient

    from jaxserve.server.app import create_app

    found = {}
    for name, template in (("none", None), ("plain", PLAIN), ("all", TEMPLATE)):
        http = TestClient(create_app(talker(template=template), ServerSettings()))
        found[name] = http.get("/v1/models").json()["data"][0]["capabilities"]
    assert found["none"] == ["text"]
    assert found["plain"] == ["text", "chat", "tools"]  # tools are written into messages
    assert found["all"] == ["text", "chat", "tools", "reasoning", "thinking"]
