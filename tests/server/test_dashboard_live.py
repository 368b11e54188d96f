"""The dashboard of a real server with the bundled model in a separate process, during a burst."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from bench.morph_parts.measure import MODEL_NAME, started
from bench.morph_parts.systems import ACCURACY, Setup, envelope, systems
from jaxserve.core.bundled import bundled_model_path
from tests.server.chatting import ask, say, wait_for_answer
from tests.server.pages import PHONE, precisions, save_screenshot, wait_for_state, wait_for_text

# The options of tests/bench/test_morph.py, so that both share a compilation cache.
SETUP = Setup(bundled_model_path(), kv_pages=56, max_model_len=448, max_num_seqs=4, prefill_tokens=64)
LAYERS = 8
AT_ONCE = 64  # requests of the burst: more than a fast machine starts within the objective


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Run `jaxserve serve --policy morph` with a budget for full precision and 56 pages, as in the demonstration."""
    with started(systems(SETUP, envelope(SETUP))[ACCURACY]) as url:
        yield url


@contextmanager
def burst(url: str) -> Iterator[None]:
    """Keep requests in flight until the block ends, and check that all of them were answered."""
    over = threading.Event()
    body = {"model": MODEL_NAME, "max_tokens": 200, "ignore_eos": True}

    def ask(number: int) -> None:
        with httpx.Client(base_url=url, timeout=120) as http:
            while not over.is_set():
                http.post("/v1/completions", json=body | {"prompt": [300 + number] * 160}).raise_for_status()

    with ThreadPoolExecutor(AT_ONCE) as threads:
        asked = [threads.submit(ask, number) for number in range(AT_ONCE)]
        try:
            yield
        finally:
            over.set()
    for answer in asked:
        answer.result()


def parts_of_memory(page: Any) -> dict[str, int]:
    """Return the bytes of each part in the legend of the memory bar."""
    names = [text.rsplit(" ", 2)[0] for text in page.locator("#memory-legend li").all_text_contents()]
    sizes = page.locator("#memory-legend data").evaluate_all("all => all.map(node => Number(node.value))")
    return dict(zip(names, sizes, strict=True))


def as_the_ledger_has_it(page: Any, url: str) -> dict[str, int]:
    """Wait until the memory bar agrees with `/admin/ledger`, and return the bytes of its parts."""
    ledger = httpx.get(f"{url}/admin/ledger").json()
    left = page.locator("#memory-legend li", has_text="Left").locator("data")
    page.wait_for_function("([node, value]) => node.value === value", arg=[left.element_handle(), str(ledger["free"])])
    parts, entries = parts_of_memory(page), ledger["entries"]
    assert parts["Weights"] == entries["weights"]
    assert parts["KV used"] + parts["KV free"] + parts["KV rounding"] == entries["kv"]
    assert parts["Other"] == ledger["used"] - entries["weights"] - entries["kv"]
    assert parts["Budget"] == ledger["budget"] == sum(parts.values()) - parts["Budget"]
    return parts


def test_dashboard_of_a_real_server_shows_a_burst_begin_and_end(open_page, url):
    page, phone = open_page(url), open_page(url, **PHONE, color_scheme="dark")
    wait_for_state(page, "live")
    wait_for_state(phone, "live")
    wait_for_text(page, "#policy", "^morph$")
    full = precisions(page)
    assert full == ["bf16"] * LAYERS
    before = as_the_ledger_has_it(page, url)
    assert page.locator(".decision").count() == 0
    assert "SLO 2 s" in page.locator("#plot-ttft").text_content()

    with burst(url):
        # How far the ladder is climbed depends on the machine: two layers may be enough, and some may be in int8.
        page.wait_for_selector(".cell.int4")
        wait_for_text(page, "#moving", "^steady$")
        for precision, height in (("int4", "25%"), ("int8", "50%")):
            swapped = page.locator(f".cell.{precision}")
            heights = {fill.evaluate("node => node.style.height") for fill in swapped.locator(".fill").all()}
            assert heights == ({height} if swapped.count() else set())
            assert set(swapped.locator(".precision").all_text_contents()) <= {precision}
        assert page.locator(".cell.int4").count()
        page.wait_for_function(
            "pages => Number(document.querySelector('#memory-legend .kv-used ~ data').value) > pages",
            arg=before["KV used"] + before["KV free"],  # more pages than before
        )
        wait_for_text(page, "#ttft", r"\d")
        wait_for_text(page, "#tpot", r"\d")
        wait_for_text(page, "#queue", r"4 running.*[1-9]\d* waiting")
        wait_for_text(page, "#log", r"✓ done.*morph.*to int4: [+-].* % loss, KV \d+ → \d+ pages")
        assert parts_of_memory(page)["Weights"] < before["Weights"]
        wait_for_text(phone, "#precisions", r"int4 [1-9]")
        save_screenshot(page, "burst")
        save_screenshot(phone, "burst-phone")

    page.wait_for_function("() => !document.querySelector('.cell.int4, .cell.int8')")
    wait_for_text(page, "#moving", "^steady$")
    assert precisions(page) == full
    assert as_the_ledger_has_it(page, url) == before
    wait_for_text(page, "#queue", "0 running.*0 waiting")
    reasons = page.locator(".decision .reason").all_text_contents()
    assert "to bfloat16" in reasons[0]
    assert "to int4" in reasons[-1]
    assert set(page.locator(".decision .outcome").all_text_contents()) == {"✓ done"}
    save_screenshot(page, "after")
    save_screenshot(phone, "after-phone")

    page.reload()
    wait_for_state(page, "live")
    assert page.locator(".decision .reason").all_text_contents() == reasons
    layers = page.get_by_role("slider", name="Layers by precision")
    layers.focus()
    texts = [""]
    while texts[-1] != (text := layers.get_attribute("aria-valuetext")):
        texts.append(text)
        page.keyboard.press("ArrowLeft")
    assert any("in int4" in text for text in texts), "the burst is in the history"
    assert texts[-1].endswith(f" {LAYERS} in bfloat16"), "and so is the time before it"


def test_chat_page_of_a_real_server_shows_layers_that_change_while_it_answers(open_page, url):
    page = open_page(url, "/")
    page.wait_for_selector("#side-layers .cell")
    assert precisions(page) == ["bf16"] * LAYERS
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Maximum tokens").fill("200")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Use").select_option("text")  # which suits the bundled model
    page.keyboard.press("Escape")
    wait_for_text(page, "#mode", "goes on with your text")
    plan = httpx.get(f"{url}/admin/plan").json()
    (stage,) = plan["instances"][0]["stages"]
    turned = {f"layers.{layer}": "int4" if layer < 3 else "bfloat16" for layer in range(LAYERS)}
    ends = {name: stage["blocks"][name] for name in ("embed", "head")}
    stage["blocks"] = {"embed": ends["embed"], **turned, "head": ends["head"]}

    with burst(url):  # which keeps the answer from ending at once
        say(page, "def add(")
        page.wait_for_selector("#stop:not([hidden])")
        httpx.put(f"{url}/admin/plan", json=plan).raise_for_status()
        wait_for_text(page, "#side-policy", "^manual$")
        page.wait_for_function(
            "() => [...document.querySelectorAll('.cell')].map(cell => cell.matches('.int4')).join() =="
            " 'true,true,true,false,false,false,false,false'"
        )
        wait_for_answer(page)
        wait_for_text(page, "#side-running", r"[1-9]")
        wait_for_text(page, "#side-rate", r"[1-9]")
        save_screenshot(page, "chat-live")
    answer = page.locator(".assistant")
    assert answer.locator(".fault").is_hidden()
    assert len(answer.locator(".plain-text").text_content()) > 50
    assert "cut at the limit of tokens" in answer.locator(".stats").text_content()
    page.get_by_text("Change the plan while it answers").click()
    page.get_by_role("combobox", name="Policy").select_option("morph")
    page.get_by_role("button", name="Set policy").click()
    assert ask(page, "\n\n").locator(".fault").is_hidden()
    page.wait_for_function("() => !document.querySelector('.cell.int4')")
