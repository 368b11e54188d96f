"""A measurement of adaptation: one memory budget, used in full precision, in int4, and by morph in its modes.

    python -m bench.morph [--models bundled,160m] [--traces FOLDER] [--rounds N] [--out FOLDER]

Every system serves every workload in turn, each on its own server. All of this is repeated `--rounds` times, in reverse
order every other time. Before each workload the static engine in full precision is saturated, and the traffic is scaled
to the tokens per second that it generates: the busiest ten seconds request `--peak` times as many. With `--traces`,
72-second windows of published traces are replayed in addition to the synthetic burst.

Writes each run to the folder as a result of `jaxserve bench`, and from all results there report.md and a plot for each
workload. `--resume` skips runs that have a result; `--report-only` runs nothing.
"""

import argparse
import datetime
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.morph_parts.measure import run
from bench.morph_parts.quality import adaptation_figures, profile_of
from bench.morph_parts.report import EXCHANGES, read, write
from bench.morph_parts.steady import measure_plan_changes
from bench.morph_parts.summary import LIGHT, SATURATION
from bench.morph_parts.systems import FULL, NAMES, Envelope, Setup, System, envelope, systems
from bench.morph_parts.timeline import saturated_throughput
from bench.morph_parts.traffic import Prompts, RequestLengths, at_once, peak_demand, with_lengths, with_peak, workload
from bench.peers.checkpoints import VOCAB, ensure_checkpoint
from jaxserve.bench.environment import describe_environment
from jaxserve.bench.result import build, load, save
from jaxserve.bench.traces.formats import load_trace
from jaxserve.bench.traces.scaling import window
from jaxserve.bench.traces.synthetic import synthetic
from jaxserve.bench.traces.trace import Trace
from jaxserve.bench.workload import Workload
from jaxserve.core.bundled import bundled_model_path
from jaxserve.engine.tokenizer import Tokenizer

BUNDLED, DUMMY = "bundled", "160m"
BURST = "burst"
WINDOWS = {  # of the folder that --traces names
    "azure-conv": "win72_azure_conv_1636.csv.gz",
    "azure-all": "win72_azure_all_881.csv.gz",
    "burstgpt": "burstgpt1_72s_744286.csv.gz",
}
SECONDS = 72
LIGHT_SECONDS, LIGHT_SHARE = 20, 0.15  # the share of full precision's capacity
SPECIAL = 2  # token ids at the start of the dummy's vocabulary that stand for no text


@dataclass(frozen=True)
class Preset:
    """The sizes with which a model is served: pages of a third of its layers' bytes, and lengths that fill them."""

    kv_pages: int
    max_model_len: int
    max_num_seqs: int
    lengths: RequestLengths
    at_once: int  # number of simultaneous requests that saturates the engine
    steady_tokens: int = 1800  # per answer while the cost of plan changes is measured


PRESETS = {
    BUNDLED: Preset(56, 544, 16, RequestLengths(288, 96, 360, 168), 320),
    DUMMY: Preset(256, 1024, 32, RequestLengths(128, 256, 384, 512), 64),
}


def main() -> None:
    """Measure what the options ask for, and report."""
    options = _options()
    for name in options.models.split(","):
        out = options.out / name
        setup = _setup(name, options)
        if not options.report_only:
            _measure(name, setup, options, out)
        if results := read(out):
            print(write(results, setup, out, score=options.agreement and name == BUNDLED), flush=True)


def _setup(name: str, options: argparse.Namespace) -> Setup:
    preset = PRESETS[name]
    model = bundled_model_path() if name == BUNDLED else ensure_checkpoint(name, options.cache_dir)
    pages = options.kv_pages or preset.kv_pages
    return Setup(model, pages, preset.max_model_len, preset.max_num_seqs, slo_ttft=options.slo)


def _measure(name: str, setup: Setup, options: argparse.Namespace, out: Path) -> None:
    """Make all runs of one model."""
    room = envelope(setup)
    known = systems(setup, room)
    chosen = [known[system] for system in options.systems.split(",")]
    print(_budget(setup, room, known), flush=True)
    traffic = Traffic(PRESETS[name], _prompts(name, setup), options)
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
    if options.exchange_seconds and not (options.resume and (out / EXCHANGES).exists()):
        found = measure_plan_changes(setup, seconds=options.exchange_seconds, tokens=PRESETS[name].steady_tokens)
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


def _prompts(name: str, setup: Setup) -> Prompts:
    """Return text that the bundled model has not seen, or random tokens for random weights."""
    if name != BUNDLED:
        rng = np.random.default_rng(0)
        return Prompts(rng.integers(SPECIAL, VOCAB, 100_000).tolist(), "random token ids")
    from bench.quantization import texts  # reads the standard library

    _, held_out = texts()
    tokens = Tokenizer.load(setup.model).encode("\n\n".join(document.text for document in held_out))
    return Prompts(tokens, "modules of the standard library that were held out from training")


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
    parser.add_argument("--models", default=f"{BUNDLED},{DUMMY}")
    parser.add_argument("--systems", default=",".join(NAMES))
    parser.add_argument("--workloads", help=f"default: {SATURATION},{LIGHT},{BURST} and, with --traces, the windows")
    parser.add_argument("--traces", type=Path, help=f"folder that contains {', '.join(WINDOWS.values())}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each trace, from its start")
    parser.add_argument(
        "--peak", type=float, default=1.5, help="tokens requested at the peak over full precision's capacity"
    )
    parser.add_argument("--capacity", type=float, help="tokens/s of saturated full precision; default: measured")
    parser.add_argument("--slo", type=float, default=2.0, help="seconds to the first token")
    parser.add_argument("--kv-pages", type=int, help="of the static engine in full precision; default: the model's")
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "jaxserve" / "bench")
    parser.add_argument("--out", type=Path, default=Path("bench/out/morph"))
    parser.add_argument(
        "--exchange-seconds", type=float, default=30, help="for measuring the cost of plan changes; 0: skip"
    )
    parser.add_argument("--agreement", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--report-only", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
