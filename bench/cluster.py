"""The cluster demonstration: instances merge for long requests, and split when these have ended.

    python -m bench.cluster [--devices auto|virtual|gpu] [--rounds N] [--out FOLDER]

A server runs several instances of a small model with random weights. While short requests stream, two prompts come that
are longer than the KV pages of one device: for the first, two instances merge, for the second all of them. Afterwards
they split. With `--rounds`, all instances then merge and split by hand this many times, and the time is measured.

Prints what happens, and writes result.json, dashboard.json (what the dashboard shows) and, if there are Chromium and
playwright, dashboard.png. Fails unless every request was answered, instances merged and split, and the policy static
refuses the long prompt.
"""

import argparse
import asyncio
import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.cluster_parts.load import Load, longest_gap
from bench.cluster_parts.setup import Setup
from bench.cluster_parts.watch import Watch, merges_and_splits
from jaxserve.bench.interrupts import signals_as_ctrl_c
from jaxserve.bench.record import RequestRecord
from jaxserve.cli.plan_client import PlanClient
from jaxserve.core.errors import JaxserveError

PATIENCE_S = 150.0  # for instances to be as they should be, programs being compiled
PAIR, ALL = 1.4, 0.7  # long prompts: times the tokens of one instance, and of all
QUIET_S = 1.0  # of short requests before the first long prompt
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
REFUSED = 400


def main() -> int:
    """Run the demonstration and return the exit status."""
    options, console = _options(), Console(highlight=False)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        with signals_as_ctrl_c():
            faults = _run(options, lambda line: console.print(line, markup=False, soft_wrap=True), console)
    except JaxserveError as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; the server is stopped")
        return 130
    for fault in faults:
        console.print(f"failed: {fault}", style="red", markup=False)
    return 1 if faults else 0


def _run(options: argparse.Namespace, say: Callable[[str], None], console: Console) -> list[str]:
    """Run the demonstration, write its files, and return what went wrong."""
    began, setup = time.monotonic(), Setup.of(options.devices)
    say(f"starting {setup}; each holds {setup.instance_tokens} tokens, all together {setup.service_tokens}")
    with setup.started(options.compile_cache, options.out / "server.log") as url:
        say(f"{time.monotonic() - began:6.1f} s  ready: {url}/dashboard")
        shown = asyncio.run(_demonstrate(setup, url, began, options, say))
    seconds = time.monotonic() - began
    result = {"setup": asdict(setup), "seconds": seconds, **shown}
    (options.out / "result.json").write_text(json.dumps(result, indent=1))
    _report(console, result)
    say(f"{options.out}/result.json, dashboard.json, server.log, after {seconds:.0f} s")
    return result["faults"]


async def _demonstrate(
    setup: Setup, url: str, began: float, options: argparse.Namespace, say: Callable[[str], None]
) -> dict[str, Any]:
    watch, over = Watch(url, began, say), asyncio.Event()
    async with Load(url, began) as load, asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch.run())
        streaming = tasks.create_task(load.stream(over))
        await asyncio.sleep(QUIET_S)
        for tokens in dict.fromkeys((int(PAIR * setup.instance_tokens), int(ALL * setup.service_tokens))):
            say(f"{time.monotonic() - began:6.1f} s  a prompt of {tokens} tokens")
            await load.ask(tokens)
        alone = lambda status: status["num_instances"] == setup.instances and not status["busy"]  # noqa: E731
        split = await watch.until(alone, PATIENCE_S)
        merges, splits = merges_and_splits(watch.decisions)
        rounds = [await _round(watch, load, setup) for _ in range(options.rounds)]
        await asyncio.to_thread(_save_dashboard, url, options.out)
        over.set()
        await streaming
        faults = list(load.errors)
        faults += [] if merges else ["no instances merged"]
        faults += [] if split and splits else ["instances did not split"]
        refusal = await _refusal(watch, load, int(PAIR * setup.instance_tokens))
        faults += [] if refusal.status == REFUSED else [f"the policy static answered {refusal.status} to a long prompt"]
        say(f"{time.monotonic() - began:6.1f} s  with the policy static: {refusal.error}")
        watching.cancel()
    await watch.close()
    return {
        "merges": merges,
        "splits": splits,
        "faults": faults,
        "events": watch.events,
        "decisions": watch.decisions,
        "short": _figures(load.short),
        "long": [_figures([record]) | {"input_tokens": record.input_tokens} for record in load.long[:-1]],
        "refusal": refusal.error,
        "rounds": rounds,
    }


async def _round(watch: Watch, load: Load, setup: Setup) -> dict[str, float]:
    """Merge all instances by hand and split them again; return the seconds that this took."""
    since, (sum_before, _) = time.monotonic() - load.began, await watch.regroup_seconds()
    names = [state["name"] for state in (await watch.look())["instance_states"]]
    await watch.edit("merge", *names)
    await watch.until(lambda status: status["num_instances"] == 1 and not status["busy"], PATIENCE_S)
    sum_merged, _ = await watch.regroup_seconds()
    await watch.edit("split", (await watch.look())["instances"][0], into=setup.instances)
    await watch.until(lambda status: status["num_instances"] == setup.instances and not status["busy"], PATIENCE_S)
    sum_split, _ = await watch.regroup_seconds()
    return {
        "merge_s": sum_merged - sum_before,
        "split_s": sum_split - sum_merged,
        "longest_gap_s": longest_gap(load.short, since),
    }


async def _refusal(watch: Watch, load: Load, tokens: int) -> RequestRecord:
    """Return the answer to a long prompt without a policy that merges instances."""
    await watch.set_policy("static")
    return await load.ask(tokens)


def _figures(records: list[RequestRecord]) -> dict[str, Any]:
    first = [record.ttft_s for record in records if record.ttft_s is not None]
    return {
        "requests": len(records),
        "answered": sum(record.ok for record in records),
        "longest_ttft_s": max(first, default=None),
        "longest_gap_s": longest_gap(records),
    }


def _save_dashboard(url: str, out: Path) -> None:
    """Write what the dashboard shows, and a picture of it if there is Chromium."""
    with PlanClient(url, None) as client:
        (out / "dashboard.json").write_text(json.dumps(next(client.events()), indent=1))
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is not None and find_spec("playwright") is not None:
        _save_picture(browser, f"{url}/dashboard", out / "dashboard.png")


def _save_picture(browser: str, url: str, file: Path) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        page = chromium.new_page(viewport={"width": 1280, "height": 800})
        page.goto(url)
        page.wait_for_selector("body[data-state=live]")
        page.screenshot(path=file, full_page=True, animations="disabled")
        chromium.close()


def _report(console: Console, result: dict[str, Any]) -> None:
    table = Table(title=f"{result['merges']} merges and {result['splits']} splits", title_justify="left")
    for column in ("requests", "answered", "longest time to first token", "longest gap between tokens"):
        table.add_column(column)
    rows = [("short", result["short"])]
    rows += [(f"{each['input_tokens']} tokens", each) for each in result["long"]]
    for name, figures in rows:
        first, gap = figures["longest_ttft_s"], figures["longest_gap_s"]
        times = ("-" if first is None else f"{first:.2f} s", f"{gap * 1e3:.0f} ms")
        table.add_row(name, f"{figures['answered']} of {figures['requests']}", *times)
    console.print(table)
    for number, each in enumerate(result["rounds"], 1):
        words = f"round {number}: merge {each['merge_s'] * 1e3:.0f} ms, split {each['split_s'] * 1e3:.0f} ms"
        console.print(f"{words}, longest gap between tokens {each['longest_gap_s'] * 1e3:.0f} ms")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--devices",
        choices=("auto", "virtual", "gpu"),
        default="auto",
        help="gpu: the machine's accelerators, two at least; auto: these if there are, or else virtual ones of the CPU",
    )
    parser.add_argument("--rounds", type=int, default=0, help="merges and splits of all instances by hand, measured")
    parser.add_argument("--compile-cache", type=Path, help="as of `jaxserve serve`")
    parser.add_argument("--out", type=Path, default=Path("build/demo-cluster"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
