"""A measurement of adaptation: one memory budget, used in full precision, in int4, and by morph in its modes.

    python -m bench.morph [traces] [--models bundled,160m] [--traces FOLDER] [--rounds N] [--out FOLDER]
    python -m bench.morph rates [--models bundled,160m] [--rates 0.5,1,1.5] [--seconds N] [--lengths 192+96]

Every system serves every workload in turn, each on its own server. All of this is repeated `--rounds` times, in reverse
order every other time. Before each workload the static engine in full precision is saturated, and the traffic is scaled
to the tokens per second that it generates: the busiest ten seconds request `--peak` times as many. With `--traces`,
72-second windows of published traces are replayed in addition to the synthetic burst.

`rates` offers Poisson arrivals at multiples of full precision's capacity, and first at a light load, at which an
adapting system must do nothing. The model `8b` has random weights and is for a GPU. A start of it takes long, so that
each system serves all rates on one server; `--minutes 8 --systems full,morph --rates 0.5,1,1.5 --seconds 15` stays
within 8 minutes where compiled programs are cached, and `--resume` adds the other systems in another call.

Layers in fewer bits are prepared by AWQ, once, in a copy of the checkpoint under `--cache-dir`.

Writes each run to the folder as a result of `jaxserve bench`, and from all results there report.md and a plot for each
workload; for rates, rates.json, rates.md, rates.png and tpot.png in a folder `rates`. `--resume` skips runs that have a
result; `--report-only` runs nothing.
"""

import argparse
import datetime
import math
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bench.morph_parts import rate_report, rates
from bench.morph_parts.measure import run
from bench.morph_parts.prepared import METHOD, is_prepared
from bench.morph_parts.presets import BUNDLED, PRESETS, Preset, prompts_of, setup_of
from bench.morph_parts.quality import adaptation_figures, profile_of
from bench.morph_parts.rates import LIGHT_LOAD, SATURATED, Offered, Sweep, visits
from bench.morph_parts.report import EXCHANGES, add_agreement, read, write
from bench.morph_parts.steady import measure_plan_changes
from bench.morph_parts.summary import LIGHT, SATURATION
from bench.morph_parts.systems import (
    ACCURACY,
    FULL,
    INT4,
    NAMES,
    PERFORMANCE,
    Envelope,
    Setup,
    System,
    planned,
)
from bench.morph_parts.timeline import saturated_throughput
from bench.morph_parts.traffic import Prompts, at_once, peak_demand, with_lengths, with_peak, workload
from jaxserve.bench.environment import describe_environment
from jaxserve.bench.result import build, load, save
from jaxserve.bench.traces.formats import load_trace
from jaxserve.bench.traces.scaling import window
from jaxserve.bench.traces.synthetic import synthetic
from jaxserve.bench.traces.trace import Trace
from jaxserve.bench.workload import Workload

TRACES, RATES = "traces", "rates"  # what is measured
BURST = "burst"
WINDOWS = {  # of the folder that --traces names
    "azure-conv": "win72_azure_conv_1636.csv.gz",
    "azure-all": "win72_azure_all_881.csv.gz",
    "burstgpt": "burstgpt1_72s_744286.csv.gz",
}
SECONDS = 72
LIGHT_SECONDS, LIGHT_SHARE = 20, 0.15  # the share of full precision's capacity
SWEPT = (FULL, INT4, ACCURACY, PERFORMANCE)
SCORED_REQUESTS = 128  # of each run of a sweep


def main() -> int:
    """Measure what the options ask for, report, and return the exit status."""
    options = _options()
    deadline_s = time.monotonic() + 60 * options.minutes if options.minutes else math.inf
    missing = []
    for name in options.models:
        awq = options.method == METHOD and PRESETS[name].shape is None
        setup = setup_of(name, options.cache_dir, awq=awq, slo_ttft=options.slo, kv_pages=options.kv_pages)
        score = options.agreement and name == BUNDLED
        if options.what == RATES:
            missing += _rates(name, setup, options, deadline_s, score=score)
            continue
        out = options.out / name
        if not options.report_only:
            _measure(name, setup, options, out)
        if results := read(out):
            print(write(results, setup, out, score=score), flush=True)
    return 1 if missing else 0


def _rates(name: str, setup: Setup, options: argparse.Namespace, deadline_s: float, *, score: bool) -> list[str]:
    """Make the sweep of one model and report it; return what is missing of it."""
    preset, folder = PRESETS[name], options.out / name / RATES
    missing = []
    if not options.report_only:
        room, known = planned(setup)
        print(_budget(setup, room, known), flush=True)
        chosen = [known[system] for system in options.systems]
        multiples = sorted({LIGHT_LOAD, *options.rates})
        order = visits(known[FULL], chosen, multiples, one_server_each=preset.one_server_each)
        offered = Offered(
            _lengths(preset, options.lengths), prompts_of(name, setup.model), options.seconds, preset.at_once
        )
        for number in range(options.rounds):
            sweep = Sweep(setup, offered, folder, number, options.resume, deadline_s, options.capacity)
            missing += sweep.run(known[FULL], order)
    if results := rates.read(folder):
        if score:
            poisson = [result for result in results if result["multiple"] != SATURATED]
            add_agreement(poisson, setup, requests=SCORED_REQUESTS)
        quantised_by = (
            f"layers prepared by {METHOD.upper()}" if is_prepared(setup.model) else "layers rounded to the nearest"
        )
        print(rate_report.write(results, setup, folder, quantised_by=quantised_by, missing=missing), flush=True)
    return missing


def _lengths(preset: Preset, option: tuple[int, int] | str | None) -> Trace:
    """Return a trace whose lengths requests are drawn from: of one request, or that of the burst."""
    if option == BURST:
        return with_lengths(_burst(SECONDS), preset.lengths)
    prompt, answer = option or preset.fixed_lengths
    return Trace.of("fixed lengths", [0.0], [prompt], [answer])


def _measure(name: str, setup: Setup, options: argparse.Namespace, out: Path) -> None:
    """Make all runs of one model."""
    room, known = planned(setup)
    chosen = [known[system] for system in options.systems]
    print(_budget(setup, room, known), flush=True)
    traffic = Traffic(PRESETS[name], prompts_of(name, setup.model), options)
    for number in range(options.rounds):
        for label in traffic.names:
            if label == SATURATION:
                capacity, load_of = None, traffic.saturation(number)
            else:
                # Measured just before the workload, because the speed of a shared machine changes.
                path = out / f"capacity_{label}_{number}.json"
                capacity = options.capacity or _capacity(known[FULL], setup, traffic.saturation(number), path, options)
                print(f"full precision at saturation: {capacity:.0f} tokens/s", flush=True)
                load_of = traffic.scaled(label, capacity, number)
            for system in chosen if number % 2 == 0 else reversed(chosen):
                path = out / f"{label}-{system.name}-{number}.json"
                if not (options.resume and path.exists()):
                    _run_once(system, setup, load_of, {"traffic": label, "round": number, "capacity": capacity}, path)
    seconds = PRESETS[name].exchange_seconds if options.exchange_seconds is None else options.exchange_seconds
    if seconds and not (options.resume and (out / EXCHANGES).exists()):
        found = measure_plan_changes(setup, seconds=seconds, tokens=PRESETS[name].steady_tokens)
        facts = {"date": datetime.datetime.now(), "command": sys.argv, "environment": describe_environment()}
        save(build("latency", rows=[asdict(change) for change in found], **facts), out / EXCHANGES)


def _run_once(system: System, setup: Setup, load_of: Workload, facts: Mapping[str, Any], path: Path) -> dict[str, Any]:
    measured = run(system, setup, load_of, command=[sys.executable, *sys.argv]) | facts
    measured |= adaptation_figures(measured, profile_of(setup.model))
    save(measured, path)
    ttft, violated = measured["p95_ttft_ms"], measured["slo_violation_rate"]
    print(
        f"{facts['traffic']} {facts['round']} {system.name}: P95 TTFT {(ttft or 0) / 1e3:.2f} s, "
        f"{(violated or 0):.1%} over the SLO, {measured['output_throughput'] or 0:.0f} tokens/s, "
        f"at most {measured['adaptation']['peak_kv_pages']} pages, restored after {measured['restored_after_s']} s",
        flush=True,
    )
    return measured


def _capacity(full: System, setup: Setup, load_of: Workload, path: Path, options: argparse.Namespace) -> float:
    """Return the tokens per second of the static engine in full precision when all requests arrive at once."""
    if options.resume and path.exists():
        measured = load(path)
    else:
        facts = {"traffic": "capacity", "round": 0, "capacity": None}
        measured = _run_once(full, setup, load_of, facts, path)
    found = saturated_throughput(measured)
    assert found is not None, "no request was answered"
    return found


class Traffic:
    """The workloads of a model. Equal options give equal workloads; prompts differ from round to round."""

    def __init__(self, preset: Preset, prompts: Prompts, options: argparse.Namespace):
        self._preset, self._prompts, self._options = preset, prompts, options

    @property
    def names(self) -> list[str]:
        """The names of the workloads that the options ask for."""
        chosen = self._options.workloads.split(",") if self._options.workloads else None
        known = (SATURATION, LIGHT, BURST, *(WINDOWS if self._options.traces else ()))
        return [name for name in known if chosen is None or name in chosen]

    def saturation(self, number: int) -> Workload:
        """Return requests that all arrive at once."""
        trace = with_lengths(_burst(SECONDS), self._preset.lengths)
        return self._of(at_once(trace, self._preset.at_once, np.random.default_rng(1)), number)

    def scaled(self, name: str, capacity: float, number: int) -> Workload:
        """Return traffic scaled to `capacity`, the tokens/s of saturated full precision."""
        if name == LIGHT:
            return self._light(capacity, number)
        trace = _burst(SECONDS) if name == BURST else load_trace(self._options.traces / WINDOWS[name])
        trace = with_lengths(window(trace, 0, self._options.seconds), self._preset.lengths)
        return self._of(with_peak(trace, self._options.peak * capacity, np.random.default_rng(2)), number)

    def _light(self, capacity: float, number: int) -> Workload:
        """Return requests at even distances, too few for any policy to have a reason to act."""
        trace = with_lengths(_burst(SECONDS), self._preset.lengths)
        rate = LIGHT_SHARE * capacity / float(trace.output_tokens.mean())
        count = max(2, int(rate * LIGHT_SECONDS))
        rows = np.arange(count) % len(trace)
        even = trace.changed("even", {"rate": rate}, **trace.taken(rows) | {"arrival_s": np.arange(count) / rate})
        return self._of(even, number)

    def _of(self, trace: Trace, number: int) -> Workload:
        trace = trace.changed("asks_for", {"peak_tokens_per_s": peak_demand(trace)})
        return workload(trace, self._prompts, np.random.default_rng([3, number]))


def _burst(seconds: float) -> Trace:
    return synthetic("azure-burst", seconds, None, np.random.default_rng(0))


def _budget(setup: Setup, room: Envelope, known: Mapping[str, System]) -> str:
    pages = ", ".join(f"{system.label} {system.kv_pages}" for system in known.values())
    return (
        f"{setup.name}: layers {room.full_layers_bytes / 1e6:.1f} MB, "
        f"in int4 {room.quantized_layers_bytes / 1e6:.1f} MB; "
        f"a KV page {room.page_bytes / 1e3:.1f} kB; swap buffer of a layer {room.swap_buffer_bytes / 1e6:.1f} MB\n"
        f"KV pages at the start: {pages}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=(TRACES, RATES), default=TRACES)
    parser.add_argument(
        "--models",
        type=_names(PRESETS),
        default=f"{BUNDLED},160m",
        help=f"of {', '.join(PRESETS)}; default: %(default)s",
    )
    parser.add_argument(
        "--systems", type=_names(NAMES), help=f"of {', '.join(NAMES)}; default: all, for rates {','.join(SWEPT)}"
    )
    parser.add_argument("--rounds", type=int, help="default: 3, for rates 1")
    parser.add_argument("--seconds", type=float, help=f"of arrivals; default: {SECONDS} of a trace, 30 at each rate")
    parser.add_argument("--capacity", type=float, help="tokens/s of saturated full precision; default: measured")
    parser.add_argument("--slo", type=float, default=2.0, help="seconds to the first token")
    parser.add_argument("--kv-pages", type=int, help="of the static engine in full precision; default: the model's")
    parser.add_argument(
        "--method",
        choices=(METHOD, "rtn"),
        default=METHOD,
        help="for layers in fewer bits, where there is a checkpoint",
    )
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "jaxserve" / "bench")
    parser.add_argument("--out", type=Path, default=Path("bench/out/morph"))
    parser.add_argument("--agreement", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--report-only", action="store_true")
    traces = parser.add_argument_group(TRACES)
    traces.add_argument("--workloads", help=f"default: {SATURATION},{LIGHT},{BURST} and, with --traces, the windows")
    traces.add_argument("--traces", type=Path, help=f"folder that contains {', '.join(WINDOWS.values())}")
    traces.add_argument(
        "--peak", type=float, default=1.5, help="tokens requested at the peak over full precision's capacity"
    )
    traces.add_argument(
        "--exchange-seconds", type=float, help="for measuring the cost of plan changes; 0: skip; default: the model's"
    )
    sweep = parser.add_argument_group(RATES)
    sweep.add_argument(
        "--rates",
        type=_multiples,
        default="0.5,0.75,1,1.25,1.5,1.75",
        help="multiples of full precision's capacity; default: %(default)s",
    )
    sweep.add_argument(
        "--lengths",
        type=_request_lengths,
        help=f"tokens of all requests, such as 192+96, or {BURST}: those of its requests; default: the model's",
    )
    sweep.add_argument("--minutes", type=float, help="for all models; what would take longer is left out")
    options = parser.parse_args()
    swept = options.what == RATES
    options.systems = options.systems or (SWEPT if swept else NAMES)
    options.rounds = options.rounds or (1 if swept else 3)
    options.seconds = options.seconds or (30.0 if swept else SECONDS)
    return options


def _names(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a type of an option: names of `known`, separated by commas."""

    def names(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; choose from {', '.join(known)}")
        return found

    return names


def _multiples(text: str) -> tuple[float, ...]:
    found = tuple(map(float, text.split(",")))
    if not all(0 < multiple < math.inf for multiple in found):
        raise argparse.ArgumentTypeError(f"{text}: rates are finite and above 0")
    return found


def _request_lengths(text: str) -> tuple[int, int] | str:
    """Return (prompt, answer) in tokens, or the name of the trace that has lengths of its own."""
    prompt, plus, answer = text.partition("+")
    if text != BURST and not (plus and prompt.isdecimal() and answer.isdecimal() and int(prompt) and int(answer)):
        raise argparse.ArgumentTypeError(f"{text!r} is neither PROMPT+ANSWER, such as 192+96, nor {BURST}")
    return BURST if text == BURST else (int(prompt), int(answer))


if __name__ == "__main__":
    sys.exit(main())
