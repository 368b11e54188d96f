"""The dashboard in a headless browser, and how a test waits for it."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (  # no sandbox: tests may run as root; the others keep it from calling home
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
DESK = {"viewport": {"width": 1280, "height": 800}}
TABLET = {"viewport": {"width": 820, "height": 1180}}
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
PATIENCE = 30_000  # ms; a page that takes so long has failed


@contextmanager
def headless() -> Iterator[Any]:
    """Chromium: the machine's, or what JAXSERVE_TEST_BROWSER names. Skips the test where there is none."""
    path = os.environ.get("JAXSERVE_TEST_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("there is no Chromium on this machine")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*FLAGS])
        yield browser
        browser.close()


class Pages:
    """Opens servers' dashboards; `problems`: what failed in them, or went to another server."""

    def __init__(self, browser: Any):
        self._browser = browser
        self._contexts: list[Any] = []
        self.problems: list[str] = []

    def __call__(self, url: str, **options: Any) -> Any:
        context = self._browser.new_context(**DESK | options)
        self._contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: request.url.startswith(url) or self.problems.append(request.url))
        page.set_default_timeout(PATIENCE)
        page.goto(f"{url}/dashboard")
        return page

    def close(self) -> None:
        """Closes all of them. Mutates."""
        while self._contexts:
            self._contexts.pop().close()


def wait_for_state(page: Any, state: str) -> None:
    """Until the page says that it is live, locked, lost."""
    page.wait_for_selector(f"body[data-state={state}]")


def wait_for_text(page: Any, selector: str, pattern: str) -> None:
    """Until an element's text has the pattern."""
    page.wait_for_function(
        "([selector, pattern]) => new RegExp(pattern).test(document.querySelector(selector).textContent)",
        arg=[selector, pattern],
    )


def precisions(page: Any) -> list[str]:
    """What the layers of the strip are said to be in."""
    return page.locator(".cell .precision").all_text_contents()


def shoot(page: Any, name: str) -> None:
    """Keeps a picture of the page for people to look at, in the folder that JAXSERVE_TEST_SCREENSHOTS names."""
    if folder := os.environ.get("JAXSERVE_TEST_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True, animations="disabled")
