"""The demonstration: a burst arrives, layers turn to int4 and int8, their memory becomes KV pages, and all comes back.

    python -m bench.demo [--mode morph|morph-performance] [--out FOLDER]

Three servers of the bundled model, one after the other, in one memory budget: static in full precision, static in int4,
and one that adapts. The first is saturated for a moment, to see what the machine can do, and the burst asks for more.
Prints what happens while it happens, then the comparison, and writes report.html and result.json.
"""

import argparse
import asyncio
import sys
import sysconfig
import time
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
PROMPT, ANSWER, SPREAD = 288, 96, 0.25  # tokens: means, and the share of them by which lengths differ at most
AT_ONCE = 64  # requests that saturate
TRIES = 3  # at saturating it: at first a server is slower, and what else the machine does comes and goes
CALM, PEAK = 0.15, 1.2  # tokens asked for, over what full precision generates
PHASES = ((2.0, CALM), (11.0, PEAK), (3.0, CALM))  # seconds each
MODULES = ("argparse", "ast", "inspect", "tarfile", "typing", "zipfile")  # prompts are pieces of their text
UNSAVED = ("prompts", "generated_texts")


def main() -> int:
    """Runs it; returns the exit status."""
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
    """Measures the three. Raises `JaxserveError` if a server does not start or answer."""
    known, profile = systems(SETUP, envelope(SETUP)), profile_of(SETUP.model)
    assert profile is not None, "the bundled model has one"
    most = max(system.kv_pages for system in known.values())
    prompts, burst = _prompts(), None
    results: dict[str, dict[str, Any]] = {}
    for name in (FULL, INT4, mode):
        title = f"{LABELS[name]}, {known[name].kv_pages} KV pages"
        screen = Screen(console, title, profile.order(QUANTISED), most, SETUP.slo_ttft)
        with console.status(f"starting the server: {title}") as status, started(known[name]) as url:
            if burst is None:
                status.update("saturating it for a moment: how much can this machine do?")
                capacity = _capacity(url, prompts)
                told = (
                    f"full precision generates {capacity:.0f} tokens/s here; the burst asks for {PEAK:g} times as many"
                )
                console.print(told, highlight=False)
                burst = workload(_burst(capacity), prompts, np.random.default_rng(4))
            status.stop()
            with screen.shown():
                seen = asyncio.run(measure(url, burst, screen.look))
        measured = result(known[name], SETUP, burst, seen, [sys.executable, *sys.argv])
        results[KEYS[name]] = measured | adaptation_figures(measured, profile)
    return results


def _capacity(url: str, prompts: Prompts) -> float:
    """Tokens per second when all requests are there at once: the most of some tries."""
    rng, most = np.random.default_rng(5), 0.0
    for _ in range(TRIES):
        trace = at_once(_lengths(np.zeros(AT_ONCE)), AT_ONCE, rng)
        seen = asyncio.run(measure(url, workload(trace, prompts, rng)))
        found = saturated_throughput(per_request(seen.load.records))
        assert found is not None, "requests were answered"
        most = max(most, found)
    return most


def _burst(capacity: float) -> Trace:
    """Arrivals at the rates of `PHASES`: at random in the burst, evenly before and after."""
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
    """Pieces of modules of the standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = "\n\n".join((folder / f"{name}.py").read_text(encoding="utf-8") for name in MODULES)
    return Prompts(Tokenizer.load(SETUP.model).encode(text), "modules of the standard library")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=(ACCURACY, PERFORMANCE), default=ACCURACY, help="of the adapting server")
    parser.add_argument("--out", type=Path, default=Path("build/demo"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
