"""Dashboards in a headless browser, and functions that wait for their contents."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# No sandbox, since tests may run as root. The other flags keep Chromium from calling home.
FLAGS = (
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
PATIENCE = 30_000  # ms after which a page counts as failed


@contextmanager
def headless() -> Iterator[Any]:
    """Run the machine's Chromium, or the one at JAXSERVE_TEST_BROWSER. Skip the test if there is none."""
    path = os.environ.get("JAXSERVE_TEST_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("there is no Chromium on this machine")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*FLAGS])
        yield browser
        browser.close()


class Pages:
    """Opens pages, and collects their errors and requests to other servers in `problems`."""

    def __init__(self, browser: Any):
        self._browser = browser
        self._contexts: list[Any] = []
        self.problems: list[str] = []

    def __call__(self, url: str, path: str = "/dashboard", **options: Any) -> Any:
        context = self._browser.new_context(**DESK | options)
        self._contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: request.url.startswith(url) or self.problems.append(request.url))
        page.set_default_timeout(PATIENCE)
        page.goto(f"{url}{path}")
        return page

    def close(self) -> None:
        """Close all pages."""
        while self._contexts:
            self._contexts.pop().close()


def wait_for_state(page: Any, state: str) -> None:
    """Wait until the page is in a state: live, locked, lost or connecting."""
    page.wait_for_selector(f"body[data-state={state}]")


def wait_for_text(page: Any, selector: str, pattern: str) -> None:
    """Wait until an element's text matches a pattern."""
    page.wait_for_function(
        "([selector, pattern]) => new RegExp(pattern).test(document.querySelector(selector).textContent)",
        arg=[selector, pattern],
    )


def precisions(page: Any) -> list[str]:
    """Return the precision that the page shows for each layer."""
    return page.locator(".cell .precision").all_text_contents()


def save_screenshot(page: Any, name: str) -> None:
    """Save a screenshot for people to look at, if JAXSERVE_TEST_SCREENSHOTS names a folder."""
    if folder := os.environ.get("JAXSERVE_TEST_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True, animations="disabled")
