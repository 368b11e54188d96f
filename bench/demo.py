"""The demonstration: in a burst, layers change to fewer bits, their memory becomes KV pages, and later all is restored.

    python -m bench.demo [--mode morph|morph-performance] [--out FOLDER]

Three servers of the bundled model run one after another in one memory budget: static in full precision, static in
int4, and adapting. The first is saturated briefly to measure the machine's capacity, and the burst exceeds it.
Prints events as they happen, then the comparison, and writes report.html and result.json.
"""

import argparse
import asyncio
import inspect
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from bench.morph_parts.comparison import table, verdict, write_page
from bench.morph_parts.live import Screen
from bench.morph_parts.measure import measure, result, started
from bench.morph_parts.quality import adaptation_figures, profile_of
from bench.morph_parts.systems import ACCURACY, FULL, INT4, LABELS, PERFORMANCE, QUANTISED, Setup, envelope, systems
from bench.morph_parts.timeline import saturated_throughput
from bench.morph_parts.traffic import Prompts, at_once, workload
from jaxserve.bench.interrupts import signals_as_ctrl_c
from jaxserve.bench.result import per_request, save
from jaxserve.bench.traces.trace import Trace
from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.errors import JaxserveError
from jaxserve.engine.tokenizer import Tokenizer

KEYS = {FULL: "static", INT4: "int4", ACCURACY: "morph", PERFORMANCE: "morph"}  # of result.json
SETUP = Setup(bundled_model_path(), kv_pages=56, max_model_len=512, max_num_seqs=4, prefill_tokens=128)
PROMPT, ANSWER, SPREAD = 288, 96, 0.25  # mean tokens, and the largest relative deviation from them
AT_ONCE = 64  # requests that saturate a server
TRIES = 3  # saturations; a new server is slower, and the machine's other load varies
CALM, PEAK = 0.15, 1.2  # requested tokens over the capacity of full precision
PHASES = ((2.0, CALM), (11.0, PEAK), (3.0, CALM))  # seconds each
MODULES = ("argparse", "ast", "inspect", "tarfile", "typing", "zipfile")  # the text that prompts are cut from
UNSAVED = ("prompts", "generated_texts")


def main() -> int:
    """Run the demonstration and return the exit status."""
    options = _options()
    console, began = Console(), time.monotonic()
    try:
        with signals_as_ctrl_c():
            results = _run(console, options.mode)
    except JaxserveError as error:
        console.print(f"error: {error}", style="red", highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; the server is stopped")
        return 130
    for measured in results.values():
        for key in UNSAVED:
            measured.pop(key)
    save(results, options.out / "result.json")
    page = write_page(results, options.out / "report.html")
    console.print(table(results))
    console.print(verdict(results), highlight=False)
    console.print(f"{page} and result.json, after {time.monotonic() - began:.0f} s", highlight=False)
    return 0


def _run(console: Console, mode: str) -> dict[str, dict[str, Any]]:
    """Measure the three servers. Raise JaxserveError if a server does not start or answer."""
    known, profile = systems(SETUP, envelope(SETUP)), profile_of(SETUP.model)
    assert profile is not None, "the bundled model has a profile"
    max_pages = max(system.kv_pages for system in known.values())
    prompts, burst = _prompts(), None
    results: dict[str, dict[str, Any]] = {}
    for name in (FULL, INT4, mode):
        title = f"{LABELS[name]}, {known[name].kv_pages} KV pages"
        screen = Screen(console, title, profile.order(QUANTISED), max_pages, SETUP.slo_ttft)
        with console.status(f"starting the server: {title}") as status, started(known[name]) as url:
            if burst is None:
                status.update("saturating the server to measure its capacity")
                capacity = _capacity(url, prompts)
                message = (
                    f"full precision generates {capacity:.0f} tokens/s here; the burst requests {PEAK:g} times that"
                )
                console.print(message, highlight=False)
                burst = workload(_burst(capacity), prompts, np.random.default_rng(4))
            status.stop()
            with screen.shown():
                seen = asyncio.run(measure(url, burst, screen.look))
        measured = result(known[name], SETUP, burst, seen, [sys.executable, *sys.argv])
        results[KEYS[name]] = measured | adaptation_figures(measured, profile)
    return results


def _capacity(url: str, prompts: Prompts) -> float:
    """Return the tokens per second when all requests arrive at once, the best of several tries."""
    rng, best = np.random.default_rng(5), 0.0
    for _ in range(TRIES):
        trace = at_once(_lengths(np.zeros(AT_ONCE)), AT_ONCE, rng)
        seen = asyncio.run(measure(url, workload(trace, prompts, rng)))
        found = saturated_throughput(per_request(seen.load.records))
        assert found is not None, "no request was answered"
        best = max(best, found)
    return best


def _burst(capacity: float) -> Trace:
    """Return arrivals at the rates of `PHASES`, random within the burst and evenly spaced before and after it."""
    rng = np.random.default_rng(6)
    arrivals, begin = [], 0.0
    for seconds, share in PHASES:
        count = max(1, round(share * capacity / ANSWER * seconds))
        places = rng.uniform(0, 1, count) if share == PEAK else np.arange(count) / count
        arrivals.append(begin + seconds * places)
        begin += seconds
    return _lengths(np.sort(np.concatenate(arrivals)))


def _lengths(arrivals: np.ndarray) -> Trace:
    rng = np.random.default_rng(7)
    prompts, answers = (np.rint(mean * rng.uniform(1 - SPREAD, 1 + SPREAD, len(arrivals))) for mean in (PROMPT, ANSWER))
    facts = {"operation": "phases", "seconds_and_load": PHASES, "requests": len(arrivals)}
    return Trace.of("demo", arrivals, prompts, answers, history=(facts,))


def _prompts() -> Prompts:
    """Return prompts cut from modules of the standard library."""
    text = "\n\n".join(inspect.getsource(import_module(name)) for name in MODULES)
    return Prompts(Tokenizer.load(SETUP.model).encode(text), "modules of the standard library")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--mode", choices=(ACCURACY, PERFORMANCE), default=ACCURACY, help="policy of the adapting server"
    )
    parser.add_argument("--out", type=Path, default=Path("build/demo"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
