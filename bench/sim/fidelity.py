"""The simulator compared with the real engine: equal traces on this machine and on its calibration.

    python -m bench.sim.fidelity [--models bundled,160m] [--loads below,near,above] [--policy morph] [--hardware FILE]
        [--rounds N] [--out FOLDER]

In each of `--rounds` rounds per model, the machine is calibrated (`jaxserve bench latency --calibrate`), unless
--hardware gives a file. Then three traces of random requests, below, near and above the machine's capacity, are
replayed by `jaxserve bench trace --spawn` and simulated, in reverse order every other round. The capacity is the
simulated throughput when all requests arrive at once.

The speed of a shared machine changes from minute to minute, and near saturation a tenth of a step's time becomes half
of a request's. So each trace is simulated once more on the machine as it was in that run, by fitting the real server's
step log. The remaining error is the simulator's own.

With --policy, both adapt in few KV pages (`Preset.kv_pages`), and by default the load is two bursts, after each of
which layers return to full precision. A second table compares how long transitions take: from the start of a batch
until the memory that it replaced is free.

Writes the results of `bench` and `sim` to the folder, and fidelity.md with medians of the rounds side by side.
"""

import argparse
import csv
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.peers.checkpoints import ensure_checkpoint
from bench.sim.transition_times import Times, real_times, simulated_times, table
from jaxserve.bench.offline.calibrate import calibrate, save as save_hardware
from jaxserve.bench.offline.options import CalibrationOptions
from jaxserve.bench.options import DatasetOptions, TraceOptions
from jaxserve.bench.result import Result, load, save
from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.config import EngineConfig
from jaxserve.engine.step_log import read_log
from jaxserve.planning.spec import STATIC
from jaxserve.sim.cost_model_fit import fit, measured_steps
from jaxserve.sim.hardware import Hardware, load_hardware, to_yaml
from jaxserve.sim.options import ClusterOptions, FigureOptions
from jaxserve.sim.run import SimExperiment, run_simulation
from jaxserve.sim.shape import ModelShape

# Shares of the machine's capacity in requests/s, one after the other for equal times.
LOADS = {"below": (0.4,), "near": (0.8,), "above": (2.0,), "bursts": (0.4, *(2.0, 0.1, 0.1, 0.1) * 2)}
STATIC_LOADS, ADAPTING_LOADS = "below,near,above", "bursts"
ADAPTED = ("int8", "int4")  # precisions that layers may change to
FIGURES = {  # key of a result: name in the table
    "mean_ttft_ms": "mean TTFT, ms",
    "p95_ttft_ms": "P95 TTFT, ms",
    "mean_tpot_ms": "mean TPOT, ms",
    "output_throughput": "tokens/s",
    "slo_violation_rate": "SLO violated, share",
}
SLO = 2.0  # s to the first token
GOODPUT = f"ttft:{SLO * 1e3:g}"
TOLERATED = 0.1
AT_ONCE, MIN_REQUESTS = 400, 20  # requests


@dataclass(frozen=True)
class Preset:
    """What a model serves: lengths of requests in tokens, each as (median, maximum)."""

    prompt: tuple[int, int]
    answer: tuple[int, int]
    kv_pages: int  # at the start, if a policy adapts


PRESETS = {"bundled": Preset((160, 1000), (48, 256), 160), "160m": Preset((96, 512), (32, 128), 96)}


@dataclass(frozen=True)
class Served:
    """A model as both the server and the simulator serve it."""

    name: str
    path: Path
    preset: Preset
    policy: str

    @property
    def adapts(self) -> bool:
        """True if a policy may change the plan."""
        return self.policy != STATIC

    @property
    def precisions(self) -> tuple[str, ...]:
        """The precisions in which steps must be measured."""
        return ("auto", *ADAPTED) if self.adapts else ("auto",)

    @property
    def serve_args(self) -> str:
        """The arguments of `jaxserve serve`."""
        if not self.adapts:
            return str(self.path)
        return f"{self.path} --policy {self.policy} --slo-ttft {SLO:g} --kv-pages {self.preset.kv_pages}"

    def cluster(self, hardware: Path, *, policy: str | None = None) -> ClusterOptions:
        """Return the same in the simulator, by default with the same policy."""
        common = ClusterOptions(model=str(self.path), hardware=str(hardware))
        if not self.adapts:
            return common
        return replace(common, policy=policy or self.policy, slo_ttft=SLO, kv_pages=self.preset.kv_pages)


def main() -> None:
    """Measure, simulate and report."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    figures, transitions = [], []
    for name in options.models.split(","):
        path = bundled_model_path() if name == "bundled" else ensure_checkpoint(name, options.cache_dir)
        rounds = _rounds(Served(name, path, PRESETS[name], options.policy), options)
        for label, runs in rounds.items():
            figures += _lines(name, label, [run.results for run in runs])
            transitions += [f"| {name} | {label} {line}" for line in table([run.times for run in runs])]
    header = ["model", "load", "figure", "real", "simulated", "error", "by its own steps", "error"]
    lines = [f"Medians of {options.rounds} rounds. Errors over {TOLERATED:.0%} are marked.", ""]
    lines += [f"| {' | '.join(header)} |", "|---|---|---|---:|---:|---:|---:|---:|", *figures]
    if transitions:
        lines += ["", "Transitions: how many, and the median of their seconds.", ""]
        lines += ["| model | load | transition | real | simulated | by its own steps |", "|---|---|---|---:|---:|---:|"]
        lines += transitions
    report = "\n".join(lines) + "\n"
    (options.out / "fidelity.md").write_text(report, encoding="utf-8")
    print(report)


@dataclass(frozen=True)
class Run:
    """One trace in one round: real, simulated, and simulated with hardware fitted to the run's own steps."""

    results: tuple[Result, Result, Result]
    times: tuple[Times, ...]  # of transitions, in the same order; () if nothing adapts


def _rounds(served: Served, options: argparse.Namespace) -> dict[str, list[Run]]:
    """Measure and simulate each load in each round."""
    traces: dict[str, Path] = {}
    loads = options.loads.split(",")
    rounds: dict[str, list[Run]] = {label: [] for label in loads}
    for number in range(options.rounds):
        hardware = _hardware(served, number, options)
        if not traces:
            traces = _traces(served, hardware, options)
        for label in loads if number % 2 == 0 else reversed(loads):
            run = _run(served, hardware, traces[label], options.out / f"{served.name}-{label}-{number}", options)
            rounds[label].append(run)
            print(f"{served.name} {label} {number}, real / simulated / by its own steps: {_figures(run.results)}")
            sys.stdout.flush()
    return rounds


def _run(served: Served, hardware: Path, trace: Path, stem: Path, options: argparse.Namespace) -> Run:
    """Replay a trace in a server and in the simulator, and write the results next to `stem`."""
    file, log, own = (stem.with_name(stem.name + end) for end in (".json", ".steps.jsonl", ".yaml"))
    if not (options.resume and file.exists() and log.exists()):
        _real(served, trace, file, log)
    real = load(file)
    own.write_text(to_yaml(_fitted(served.path, log, real, hardware)))
    one, other = (_simulated(served.cluster(on), trace, stem.name) for on in (hardware, own))
    for end, result in (("simulated", one), ("simulated-own", other)):
        save(dict(result), stem.with_name(f"{stem.name}-{end}.json"))
    times = (real_times(read_log(log)), *map(simulated_times, (one, other))) if served.adapts else ()
    return Run((real, one, other), times)


def _hardware(served: Served, number: int, options: argparse.Namespace) -> Path:
    """Return a hardware file of this machine as it is now."""
    if options.hardware is not None:
        return Path(options.hardware)
    file: Path = options.out / f"{served.name}-{number}.yaml"
    if not (options.resume and file.exists()):
        engine, seconds = EngineConfig(model=served.path), options.calibration_seconds
        asked = CalibrationOptions(served.name, engine, precisions=served.precisions, seconds=seconds)
        save_hardware(calibrate(asked), file)
    return file


def _fitted(model: Path, log: Path, result: Result, before: Path) -> Hardware:
    """Return the machine as it was in a run, fitted to its steps and to the mean time outside the engine.

    Precisions that no layer had are those of the hardware `before`.
    """
    recording, nominal = read_log(log), load_hardware(before)
    found = fit(measured_steps(recording), ModelShape.load(model), nominal).hardware
    arrivals = sorted(recording.arrivals, key=lambda arrival: arrival.time)[-len(result["ttfts"]) :]  # without warm-ups
    inside = statistics.mean((recording.answers[a.id].first_token or a.time) - a.time for a in arrivals)
    sequences = {(step.instance, step.number): step.sequences for step in recording.steps}
    streams = statistics.mean(sequences.get((arrival.instance, arrival.step), 0) for arrival in arrivals)
    tokens = statistics.mean(arrival.prompt_tokens for arrival in arrivals)
    known = found.overheads
    request = statistics.mean(result["ttfts"]) - inside - known.prompt_token * tokens - known.stream * streams
    return replace(
        found,
        rates={**nominal.rates, **found.rates},
        efficiency={**nominal.efficiency, **found.efficiency},
        overheads=replace(known, request=max(request, 0.0)),
    )


def _traces(served: Served, hardware: Path, options: argparse.Namespace) -> dict[str, Path]:
    """Write a trace for each load, for the capacity of the machine without a policy."""
    name, preset = served.name, served.preset
    at_once = _trace(options.out / f"{name}-at-once.csv", preset, np.zeros(AT_ONCE))
    cluster = served.cluster(hardware, policy=STATIC)
    capacity = _simulated(cluster, at_once, f"{name} at once")["request_throughput"]
    print(f"{name}: capacity {capacity:.1f} requests/s", flush=True)
    return {
        label: _trace(options.out / f"{name}-{label}.csv", preset, _arrivals(shares, capacity, options.seconds))
        for label, shares in LOADS.items()
    }


def _arrivals(shares: Sequence[float], capacity: float, seconds: float) -> NDArray[np.float64]:
    """Return arrivals (s) at these shares of the capacity (requests/s), one after the other for equal times."""
    rng, each, parts = np.random.default_rng(1), seconds / len(shares), list[NDArray[np.float64]]()
    for number, share in enumerate(shares):
        rate = share * capacity
        arrivals = np.cumsum(rng.exponential(1 / rate, max(MIN_REQUESTS // len(shares), int(rate * each))))
        parts.append(number * each + arrivals)
    return np.sort(np.concatenate(parts))


def _trace(file: Path, preset: Preset, arrivals: Sequence[float]) -> Path:
    """Write a trace with these arrivals and random lengths, which depend on the number of requests alone."""
    rng, count = np.random.default_rng(0), len(arrivals)
    columns = [
        np.clip(median * rng.lognormal(0, 0.8, count), 4, most).astype(int)
        for median, most in (preset.prompt, preset.answer)
    ]
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(("arrival_s", "input_tokens", "output_tokens"))
        writer.writerows(
            (f"{time:.6f}", prompt, answer) for time, prompt, answer in zip(arrivals, *columns, strict=True)
        )
    return file


def _simulated(cluster: ClusterOptions, trace: Path, label: str) -> Result:
    experiment = SimExperiment(
        cluster,
        DatasetOptions(dataset="trace"),
        trace=TraceOptions(trace=trace),
        figures=FigureOptions(goodput=[GOODPUT]),
        label=label,
    )
    return run_simulation(experiment, [sys.executable, *sys.argv])


def _real(served: Served, trace: Path, result: Path, log: Path) -> None:
    """Run a server and a client, each in its own process, as a user does."""
    server = ("--spawn", "--serve-args", f"{served.serve_args} --step-log {log}")
    command = (sys.executable, "-m", "jaxserve.cli.main", "bench", "trace", "--trace", trace, "--ignore-eos", *server)
    ending = ("--num-warmups", "4", "--goodput", GOODPUT, "--quiet", "--save-result", result)
    subprocess.run([*map(str, command), *map(str, ending)], stdout=subprocess.DEVNULL, check=True)


def _figures(results: Sequence[Result]) -> str:
    return ", ".join(f"{text} {' / '.join(f'{r[key]:.2f}' for r in results)}" for key, text in FIGURES.items())


def _lines(name: str, label: str, rounds: Sequence[Sequence[Result]]) -> list[str]:
    """Return a line for each figure: medians over the rounds, and medians of the errors within a round."""
    lines = []
    for key, text in FIGURES.items():
        real, *others = ([result[key] for result in results] for results in zip(*rounds, strict=True))
        cells = [f"{statistics.median(real):.2f} ({min(real):.2f} to {max(real):.2f})"]
        for simulated in others:
            error = statistics.median(_error(*pair) for pair in zip(simulated, real, strict=True))
            cells += [f"{statistics.median(simulated):.2f}", f"{error:+.1%}{' (!)' if abs(error) > TOLERATED else ''}"]
        lines.append(f"| {name} | {label} | {text} | {' | '.join(cells)} |")
    return lines


def _error(simulated: float, real: float) -> float:
    """Return the relative error; 0 if both values are 0."""
    return 0.0 if simulated == real else simulated / real - 1 if real else math.inf


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="bundled,160m")
    parser.add_argument("--policy", default=STATIC, help="of the server and of the simulator")
    parser.add_argument(
        "--loads", help=f"of {','.join(LOADS)}; default: {STATIC_LOADS}, with a policy {ADAPTING_LOADS}"
    )
    parser.add_argument("--hardware", type=Path, help="hardware file of this machine; default: calibrate in each round")
    parser.add_argument("--calibration-seconds", type=float, default=30.0)
    parser.add_argument("--seconds", type=float, default=40.0, help="seconds of each trace")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "jaxserve" / "bench")
    parser.add_argument("--out", type=Path, default=Path("bench/out/fidelity"))
    parser.add_argument("--resume", action="store_true", help="skip what has a result")
    options = parser.parse_args()
    options.loads = options.loads or (STATIC_LOADS if options.policy == STATIC else ADAPTING_LOADS)
    return options


if __name__ == "__main__":
    main()
