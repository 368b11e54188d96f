"""The chat page when something tries to break it: hostile texts, endless ones, several tabs, the end of the page."""

import json
from dataclasses import replace

import pytest

from jaxserve.server.settings import ServerSettings
from tests.server.chatting import ask, say, talker, wait_for_answer, wait_for_model
from tests.server.fake_control import DURING, FakeControl, Time
from tests.server.pages import wait_for_state, wait_for_text
from tests.server.serving import serving

HOSTILE = "<img src=x onerror='document.title=\"owned\"'><script>document.title='owned'</script><b>bold</b>"
LINKS = """[a](javascript:document.title='owned') [b](data:text/html,x) [c](//evil.example/x) [d](vbscript:x)
![e](https://evil.example/pixel.png) <a href="https://evil.example">f</a> [g](https://example.org/"onmouseover="x)
[h][1] <https://example.org/h>

[1]: javascript:document.title='owned'"""

# What takes other renderers quadratic or exponential time, or too deep a stack.
TORTURE = {
    "emphasis": "*a **b _c __d " * 8000,
    "stars": "*" * 100_000 + "x",
    "brackets": "[" * 100_000,
    "links": "[a](" * 25_000,
    "link text": "[" + "a" * 100_000 + "](b",
    "backticks": " ".join("`" * n for n in range(1, 400)) + "`a`" * 20_000,
    "quotes": ">" * 50_000 + " deep",
    "lists": "\n".join("  " * n + "- x" for n in range(300)),
    "many items": "- x\n" * 20_000,
    "table": "|a|b|\n|-|-|\n" + "|x|y|\n" * 10_000,
    "wide table": "|" * 50_000 + "\n" + "|-" * 50_000,
    "rules": "- " * 50_000 + "x",
    "spaces": "#" + " " * 100_000 + "x",
    "fences": "```\n~~~\n" * 10_000,
    "breaks": "<br>" * 50_000,
    "strings": '```js\n"' + "\\" * 50_000 + "\n```",
    "bold": "**a** " * 20_000,
    "surrogates": "\ud83d" * 1000 + "\u202e\u0000\ufeff",
}
RENDER = """async (texts) => {
    const { Markdown } = await import(new URL("pages/markdown.js", location.href));
    const found = {};
    for (const [name, text] of Object.entries(texts)) {
        const host = document.createElement("div");
        new Markdown(host).show(text);
        found[name] = host.textContent.length;
    }
    return found;
}"""
# Shows a text in pieces, and whether the result equals that of the whole text.
IN_PIECES = """async ([text, sizes]) => {
    const { Markdown } = await import(new URL("pages/markdown.js", location.href));
    const [whole, grown] = [document.createElement("div"), document.createElement("div")];
    new Markdown(whole).show(text);
    const markdown = new Markdown(grown);
    let at = 0;
    for (let i = 0; at < text.length; i += 1) markdown.show(text.slice(0, (at += sizes[i % sizes.length])));
    return [whole.innerHTML, grown.innerHTML];
}"""
MIXED = """Text *with* a
second line

1. one
2. two

   more of two
- other

~~~py
def f():
    return `x`

~~~
> quote
> - in it

| a | b |
|---|:-:|
| 1 | 2 \\| 3 |

````
```
inner
```
````
# Title #
***both*** __init__ snake_case_name 2*3*4 \\*no\\* `` a ` b `` ~~gone~~

```js
let open = 1"""


# -- hostile texts


def test_text_of_the_model_never_becomes_markup(open_page):
    forms = ("</think>{}", "# {}", "- {}", "> {}", "|{}|x|\n|-|-|\n|{}|y|", "```{}\n{}\n```", "")
    script = "\n\n".join(form.replace("{}", HOSTILE) for form in forms)
    with serving(talker(script + LINKS), ServerSettings(served_model_names=(HOSTILE,))) as address:
        page = open_page(address.url, "/")
        answer = ask(page, HOSTILE)
        assert answer.locator("img, script, b, iframe, [onerror], [onmouseover]").count() == 0
        assert answer.text_content().count(HOSTILE) >= 5
        assert page.locator(".bubble").text_content() == HOSTILE
        assert page.locator("#model-name").text_content() == HOSTILE
        assert page.title() == f"{HOSTILE} · jaxserve"
        links = answer.locator("a").evaluate_all("nodes => nodes.map(node => node.href)")
        assert {link.partition(":")[0] for link in links} <= {"https"}
        assert len(links) >= 3
        page.reload()
        page.get_by_role("button", name="History").click()
        assert page.locator("#history .title").text_content() == HOSTILE[:80]
        assert page.locator("#history img").count() == 0


def test_calls_results_errors_and_the_plan_are_text(open_page):
    control = FakeControl(Time(DURING), policy=HOSTILE)
    status = control.status() | {"layers": [[{"block": HOSTILE, "precision": HOSTILE}]], "note": HOSTILE}
    control.status = lambda: status | {"policies": [HOSTILE]}
    client = talker("x", control=control, fail_after=0, failure=ValueError(HOSTILE))
    with serving(client) as address:
        page = open_page(address.url, "/")
        wait_for_text(page, "#side-policy", "onerror")
        call = {"id": HOSTILE, "name": HOSTILE, "arguments": HOSTILE}
        message = {"role": "assistant", "content": HOSTILE, "reasoning": HOSTILE, "calls": [call], "stats": {}}
        messages = [{"role": "user", "content": "x"}, message | {"state": "stopped", "error": HOSTILE}]
        kept = {"id": "x", "mode": "chat", "changed": 9e15, "messages": messages}
        page.evaluate("kept => localStorage.setItem('jaxserve-chat-x', JSON.stringify(kept))", kept)
        page.evaluate("sessionStorage.setItem('jaxserve-chat', 'x')")
        page.reload()
        wait_for_text(page, "#side-policy", "onerror")
        for selector in (
            ".call b",
            ".call code",
            ".fault",
            ".reasoning p",
            ".layer",
            "#side-note",
            "#side-plan option",
        ):
            assert HOSTILE in page.locator(selector).first.text_content(), selector
        assert page.locator("main img, .side img").count() == 0
        assert page.title() == "fake · jaxserve"


def test_rubbish_in_the_browsers_storage_is_ignored(open_page):
    with serving(talker("Yes.")) as address:
        page = open_page(address.url, "/")
        rubbish = ["{", "null", "[]", '{"id": 3}', '{"id": "a", "messages": [1]}', '{"id": "b", "messages": {}}']
        page.evaluate(
            "texts => texts.forEach((text, i) => localStorage.setItem(`jaxserve-chat-${i}`, text))", [*rubbish, ""]
        )
        page.evaluate('localStorage.setItem(\'jaxserve-settings\', \'{"temperature": {}, "tools": "{"}\')')
        page.reload()
        wait_for_model(page)
        assert page.locator(".message").count() == 0
        page.get_by_role("button", name="Settings").click()
        page.get_by_role("button", name="Reset").click()
        page.get_by_role("button", name="Done").click()
        assert "Yes." in ask(page).text_content()


# -- endless texts


def test_odd_texts_are_rendered_in_one_pass(open_page):
    with serving(talker("x")) as address:
        page = open_page(address.url, "/")
        lengths = page.evaluate(RENDER, TORTURE)
        assert lengths["stars"] == 100_001
        assert lengths["bold"] == 40_000 - 1
        assert lengths["brackets"] == 100_000
        assert set(lengths) == set(TORTURE)


@pytest.mark.parametrize("sizes", [[1], [2, 5, 1], [17]], ids=str)
def test_text_that_grows_is_rendered_as_the_whole_text(open_page, sizes):
    with serving(talker("x")) as address:
        page = open_page(address.url, "/")
        for end in (len(MIXED), MIXED.index("second"), MIXED.index("`x`")):
            whole, grown = page.evaluate(IN_PIECES, [MIXED[:end], sizes])
            assert grown == whole
        assert "<em>both</em>" in whole or "snake_case_name" in page.evaluate(IN_PIECES, [MIXED, [3]])[0]


def test_long_answer_is_appended_and_what_is_complete_stays(open_page):
    script = "Begin.\n\n" + "word " * 200 + "\n\n```\n" + "x = 1\n" * 15_000
    client = talker(script)
    client._steps = in_large_steps(client)
    with serving(client) as address:
        page = open_page(address.url, "/")
        say(page, "Go")
        page.wait_for_selector(".assistant pre")
        page.evaluate(
            """() => [document.querySelector(".assistant > .markdown p"), document.querySelector(".assistant pre")]
                .forEach(node => (node.mine = true))"""
        )
        wait_for_answer(page)
        assert page.locator(".assistant pre").text_content().count("x = 1") == 15_000
        kept = "() => ['p', 'pre'].map(name => document.querySelector(`.assistant > .markdown ${name}`).mine)"
        assert page.evaluate(kept) == [True, True]
        log = page.locator("#log").evaluate("node => node.scrollHeight - node.scrollTop - node.clientHeight")
        assert log < 2, "the log follows the answer"
        page.reload()
        wait_for_model(page)
        assert page.locator(".assistant pre").text_content().count("x = 1") == 15_000


def in_large_steps(client):
    """Return `_steps` of a client with some hundred characters in each event, as many tokens at once."""
    steps = type(client)._steps

    async def merged(*args, **kwargs):
        count = 0
        async for output in steps(client, *args, **kwargs):
            text = (merged.text if count else "") + output.outputs[0].text
            count += 1
            if count % 300 and not output.finished:
                merged.text = text
                continue
            merged.text = ""
            (answer,) = output.outputs
            yield replace(output, outputs=(replace(answer, text=text),))

    merged.text = ""
    return merged


# -- tabs, and the end of the page


def test_two_tabs_show_the_same_conversation(open_page):
    with serving(talker("Yes.")) as address:
        page = open_page(address.url, "/")
        ask(page, "One?")
        other = page.context.new_page()
        other.goto(f"{address.url}/")
        wait_for_model(other)
        assert other.locator(".bubble").all_text_contents() == ["One?"]
        ask(other, "Two?")
        page.wait_for_function("() => document.querySelectorAll('.assistant').length === 2")
        ask(page, "Three?")
        other.wait_for_function("() => document.querySelectorAll('.assistant').length === 3")
        assert other.locator(".bubble").all_text_contents() == ["One?", "Two?", "Three?"]


def test_reload_in_the_middle_of_an_answer_keeps_what_has_come(open_page):
    client = talker("word " * 300, delay=0.01)
    with serving(client) as address:
        page = open_page(address.url, "/")
        say(page, "Go")
        page.wait_for_function("() => document.querySelector('.assistant > .markdown')?.textContent.length > 20")
        page.reload()
        wait_for_model(page)
        assert "The page was closed before this answer was complete." in page.locator(".fault").text_content()
        assert page.locator(".assistant > .markdown").text_content().startswith("word word")
        client.delay, client.script = 0, "All of it."
        page.get_by_role("button", name="Try again").click()
        wait_for_text(page, ".assistant > .markdown", "^All of it.$")
    assert len(client.aborted) == 1, "the request of the page that was closed has ended"


def test_new_conversation_ends_the_answer_in_progress(open_page):
    client = talker("word " * 300, delay=0.01)
    with serving(client) as address:
        page = open_page(address.url, "/")
        say(page, "Go")
        page.wait_for_function("() => document.querySelector('.assistant > .markdown')?.textContent.length > 5")
        page.get_by_role("button", name="New").click()
        assert page.locator(".message").count() == 0
        client.delay, client.script = 0, "Next."
        assert "Next." in ask(page, "Again").text_content()
        page.get_by_role("button", name="History").click()
        page.get_by_role("button", name="Go", exact=True).click()
        assert "stopped" in page.locator(".stats").text_content()


def test_conversation_that_is_too_large_to_keep_goes_on(open_page):
    with serving(talker("Yes.")) as address:
        page = open_page(address.url, "/")
        wait_for_model(page)
        old = json.dumps({"id": "old", "mode": "chat", "changed": 1, "messages": [{"role": "user", "content": "old"}]})
        page.evaluate("text => localStorage.setItem('jaxserve-chat-old', text)", old)
        page.evaluate("localStorage.setItem('other', 'x'.repeat(5 * 1024 * 1024 - 2000))")
        answer = ask(page, "y" * 3000)
        assert "Yes." in answer.text_content()
        assert page.locator("#unsaved").is_visible()
        assert page.evaluate("localStorage.getItem('jaxserve-chat-old')") is None, "it made room"
        page.evaluate("localStorage.removeItem('other')")
        ask(page, "Now?")
        assert page.locator("#unsaved").is_hidden()


def test_dashboard_reads_the_key_that_the_chat_page_was_given(open_page):
    with serving(talker("Yes."), ServerSettings(admin_key="admin")) as address:
        page = open_page(address.url, "/")
        page.get_by_label("Admin key").fill("admin")
        page.keyboard.press("Enter")
        page.wait_for_selector("#side-layers .cell")
        page.get_by_role("link", name="Dashboard").first.click()
        wait_for_state(page, "live")
