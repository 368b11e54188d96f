"""/docs: the reference of the API, without other servers."""

import json

from jaxserve.server.settings import ServerSettings
from tests.server.chatting import talker
from tests.server.pages import PHONE, save_screenshot, wait_for_text
from tests.server.serving import serving


def test_reference_shows_every_endpoint_and_sends_a_request(open_page):
    client = talker("Yes.")
    with serving(client) as address:
        page = open_page(address.url, "/docs")
        page.wait_for_selector(".endpoint")
        paths = page.request.get(f"{address.url}/openapi.json").json()["paths"]
        shown = {tuple(text.split()[:2]) for text in page.locator("#contents a").all_text_contents()}  # method and path
        assert shown == {(method.upper(), path) for path, methods in paths.items() for method in methods}
        assert "starting_after" in page.locator(".says code").all_text_contents()
        assert page.locator(".says", has_text="`").count() == 0
        page.get_by_role("link", name="POST /v1/chat/completions").click()
        endpoint = page.locator("#post-v1-chat-completions")
        command = endpoint.locator("pre").first.text_content()
        assert command.startswith(f"curl {address.url}/v1/chat/completions \\\n")
        assert '"model":"fake"' in command
        assert "required" in endpoint.locator("tr", has_text="messages").first.text_content()
        assert endpoint.locator("summary", has_text="Fields of messages").count() == 1
        endpoint.get_by_label("Body").fill(json.dumps({"messages": [{"role": "user", "content": "Hi"}]}))
        endpoint.get_by_role("button", name="Send").click()
        wait_for_text(page, "#post-v1-chat-completions .try", "200 OK")
        answer = json.loads(endpoint.get_by_label("Answer").text_content())
        assert answer["choices"][0]["message"]["content"] == "Yes."
        save_screenshot(page, "reference")


def test_reference_asks_for_the_key_and_fits_a_phone(open_page):
    with serving(talker(), ServerSettings(api_keys=("key",), root_path="/llm")) as address:
        page = open_page(address.url, "/llm/docs#get-v1-models", **PHONE)
        wait_for_text(page, "#notice", "wants an API key")
        page.get_by_label("API key").fill("key")
        page.get_by_role("button", name="Use keys").click()
        page.wait_for_selector("#get-v1-models[open]")
        page.locator("#get-v1-models").get_by_role("button", name="Send").click()
        wait_for_text(page, "#get-v1-models .try", '"fake"')
        assert page.locator("#get-v1-models pre").first.text_content().startswith(f"curl {address.url}/llm/v1/models")
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["viewport"]["width"]
