"""What the dashboard of the demonstrated server shows: its data, and a picture if there is Chromium."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

from jaxserve.cli.plan_client import PlanClient

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def save_dashboard(url: str, folder: Path, name: str = "dashboard") -> None:
    """Write what the dashboard of a server shows now, and a picture of it if there are Chromium and playwright."""
    with PlanClient(url, None) as client:
        (folder / f"{name}.json").write_text(json.dumps(next(client.events()), indent=1))
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is not None and find_spec("playwright") is not None:
        _save_picture(browser, f"{url}/dashboard", folder / f"{name}.png")


def _save_picture(browser: str, url: str, file: Path) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        page = chromium.new_page(viewport={"width": 1280, "height": 800})
        page.goto(url)
        page.wait_for_selector("body[data-state=live]")
        page.screenshot(path=file, full_page=True, animations="disabled")
        chromium.close()
