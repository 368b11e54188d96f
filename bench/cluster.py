"""The cluster demonstration: instances merge for long requests, and drop layers that they have in common in a burst.

    python -m bench.cluster [--devices auto|virtual|gpu] [--rounds N] [--out FOLDER]
    python -m bench.cluster --fail [--out FOLDER]

A server runs several instances of a small model with random weights. While short requests stream, two prompts come that
are longer than the KV pages of one device: for the first, two instances merge, for the second all of them. Afterwards
they split. With `--rounds`, all instances then merge and split by hand this many times, and the time is measured. At
last a burst comes for which the KV pages of all instances do not suffice: instances drop layers, and have all of them
again when it is over. The same burst under the policy static shows what that gains.

With `--fail`, a device of a group of two instances fails instead, while answers stream.

Prints what happens, and writes result.json, dashboard.json (what the dashboard shows) and, if there are Chromium and
playwright, dashboard.png; dashboard-group.json and .png are from the burst. Fails unless every request was answered,
instances merged and split, layers were dropped for more KV pages and restored, and the policy static refuses the long
prompt; with `--fail`, unless all requests went on without the device.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.cluster_parts.dashboard import save_dashboard
from bench.cluster_parts.drops import BURST, dropped_by_hand, served_burst
from bench.cluster_parts.failure import OPTIONS as FAILURE, failed_device, failing_setup
from bench.cluster_parts.load import Load, figures, longest_gap
from bench.cluster_parts.setup import POLICY, Setup
from bench.cluster_parts.watch import Watch, merges_and_splits
from jaxserve.bench.interrupts import signals_as_ctrl_c
from jaxserve.core.errors import JaxserveError

PATIENCE_S = 150.0  # for instances to be as they should be, programs being compiled
PAIR, ALL = 1.4, 0.8  # long prompts: times the tokens of one instance, and of all
QUIET_S = 1.0  # of short requests before the first long prompt
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
    began, setup = time.monotonic(), failing_setup() if options.fail else Setup.of(options.devices)
    more = FAILURE if options.fail else ("--max-tp", str(setup.instances), "--policy", POLICY)
    say(f"starting {setup}; each holds {setup.instance_tokens} tokens, all together {setup.service_tokens}")
    with setup.started(options.compile_cache, options.out / "server.log", *more) as url:
        say(f"{time.monotonic() - began:6.1f} s  ready: {url}/dashboard")
        if options.fail:
            shown = asyncio.run(failed_device(url, began, options.out, say, PATIENCE_S))
        else:
            shown = asyncio.run(_demonstrate(setup, url, began, options, say))
    seconds = time.monotonic() - began
    result = {"setup": asdict(setup), "seconds": seconds, **shown}
    (options.out / "result.json").write_text(json.dumps(result, indent=1))
    (_report_failure if options.fail else _report)(console, result)
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
        say(f"{time.monotonic() - began:6.1f} s  layers are dropped by hand, as soon as the programs are compiled")
        by_hand = await dropped_by_hand(watch, setup, PATIENCE_S)
        say(f"{time.monotonic() - began:6.1f} s  a burst of {BURST * setup.instances} requests")
        drop = await served_burst(watch, load, setup, options.out, PATIENCE_S)
        await asyncio.to_thread(save_dashboard, url, options.out)
        over.set()
        await streaming
        faults = [*load.errors, *drop.pop("faults")]
        faults += [] if by_hand else ["layers were not dropped and restored by hand"]
        faults += [] if merges else ["no instances merged"]
        faults += [] if split and splits else ["instances did not split"]
        refusal = await load.ask(int(PAIR * setup.instance_tokens))
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
        "short": figures(load.short),
        "long": [figures([record]) | {"input_tokens": record.input_tokens} for record in load.long[:-1]],
        "refusal": refusal.error,
        "rounds": rounds,
        **drop,
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


def _report(console: Console, result: dict[str, Any]) -> None:
    rows = [("short", result["short"])]
    rows += [(f"{each['input_tokens']} tokens", each) for each in result["long"]]
    rows += [("burst, layers dropped", result["burst"]), ("burst, static", result["burst_without_drop"])]
    _table(console, f"{result['merges']} merges and {result['splits']} splits", rows)
    pages = result["kv_pages"]
    words = f"KV pages: {pages['before']}, {pages['after_drop']} after the drop, {pages['after_restore']} when"
    console.print(f"{words} all layers are back")
    for number, each in enumerate(result["rounds"], 1):
        words = f"round {number}: merge {each['merge_s'] * 1e3:.0f} ms, split {each['split_s'] * 1e3:.0f} ms"
        console.print(f"{words}, longest gap between tokens {each['longest_gap_s'] * 1e3:.0f} ms")


def _report_failure(console: Console, result: dict[str, Any]) -> None:
    rows = [("during the failure", result["streams"]), ("afterwards", result["afterwards"])]
    _table(console, "; ".join(result["failures"]) or "no failure", rows)
    console.print(f"devices in use: {', '.join(map(str, result['devices']))}")


def _table(console: Console, title: str, rows: list[tuple[str, dict[str, Any]]]) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("requests", "answered", "time to first token: mean", "longest", "longest gap between tokens"):
        table.add_column(column)
    for name, each in rows:
        times = (each["mean_ttft_s"], each["longest_ttft_s"], each["longest_gap_s"])
        texts = ("-" if time is None else f"{time:.2f} s" for time in times)
        table.add_row(name, f"{each['answered']} of {each['requests']}", *texts)
    console.print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--devices",
        choices=("auto", "virtual", "gpu"),
        default="auto",
        help="gpu: the machine's accelerators, two at least; auto: these if there are, or else virtual ones of the CPU",
    )
    parser.add_argument("--fail", action="store_true", help="let a device of a group fail, on virtual devices")
    parser.add_argument("--rounds", type=int, default=0, help="merges and splits of all instances by hand, measured")
    parser.add_argument("--compile-cache", type=Path, help="as of `jaxserve serve`")
    parser.add_argument("--out", type=Path, default=Path("build/demo-cluster"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
