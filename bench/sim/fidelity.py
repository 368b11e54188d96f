"""The simulator compared with the real engine: equal traces on this machine and on its calibration.

    python -m bench.sim.fidelity [--models bundled,160m] [--loads below,near,above] [--hardware FILE] [--rounds N]
        [--out FOLDER]

In each of `--rounds` rounds per model, the machine is calibrated (`jaxserve bench latency --calibrate`), unless
--hardware gives a file. Then three traces of random requests, below, near and above the machine's capacity, are
replayed by `jaxserve bench trace --spawn` and simulated, in reverse order every other round. The capacity is the
simulated throughput when all requests arrive at once.

The speed of a shared machine changes from minute to minute, and near saturation a tenth of a step's time becomes half
of a request's. So each trace is simulated once more on the machine as it was in that run, by fitting the real server's
step log. The remaining error is the simulator's own.

Writes the results of `bench` and `sim` to the folder, and fidelity.md with medians of the rounds side by side.
"""

import argparse
import csv
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench.peers.checkpoints import ensure_checkpoint
from jaxserve.bench.offline.calibrate import calibrate, save as save_hardware
from jaxserve.bench.offline.options import CalibrationOptions
from jaxserve.bench.options import DatasetOptions, TraceOptions
from jaxserve.bench.result import Result, load, save
from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.config import EngineConfig
from jaxserve.engine.step_log import read_log
from jaxserve.sim.cost_model_fit import fit, measured_steps
from jaxserve.sim.hardware import Hardware, load_hardware, to_yaml
from jaxserve.sim.options import ClusterOptions
from jaxserve.sim.run import SimExperiment, run_simulation
from jaxserve.sim.shape import ModelShape

LOADS = {"below": 0.4, "near": 0.8, "above": 2.0}  # share of the machine's capacity in requests/s
FIGURES = {  # key of a result: name in the table
    "mean_ttft_ms": "mean TTFT, ms",
    "p95_ttft_ms": "P95 TTFT, ms",
    "mean_tpot_ms": "mean TPOT, ms",
    "output_throughput": "tokens/s",
}
TOLERATED = 0.1
AT_ONCE = 400  # requests


@dataclass(frozen=True)
class Preset:
    """The request lengths of a model in tokens, each as (median, maximum)."""

    prompt: tuple[int, int]
    answer: tuple[int, int]


PRESETS = {"bundled": Preset((160, 1000), (48, 256)), "160m": Preset((96, 512), (32, 128))}


def main() -> None:
    """Measure, simulate and report."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    lines = [f"Medians of {options.rounds} rounds. Errors over {TOLERATED:.0%} are marked.", ""]
    lines += ["| model | load | figure | real | simulated | error | by its own steps | error |"]
    lines += ["|---|---|---|---:|---:|---:|---:|---:|"]
    for name in options.models.split(","):
        path = bundled_model_path() if name == "bundled" else ensure_checkpoint(name, options.cache_dir)
        lines += _model(name, path, PRESETS[name], options)
    report = "\n".join(lines) + "\n"
    (options.out / "fidelity.md").write_text(report, encoding="utf-8")
    print(report)


def _model(name: str, path: Path, preset: Preset, options: argparse.Namespace) -> list[str]:
    """Return the table's lines of one model."""
    traces: dict[str, Path] = {}
    loads = options.loads.split(",")
    # Results of each round: real, simulated, and simulated with hardware fitted to the run's own steps.
    rounds: dict[str, list[tuple[Result, ...]]] = {label: [] for label in loads}
    for number in range(options.rounds):
        hardware = _hardware(name, number, path, options)
        if not traces:
            traces = _traces(name, preset, _cluster(path, hardware), options)
        for label in loads if number % 2 == 0 else reversed(loads):
            stem = options.out / f"{name}-{label}-{number}"
            file, log, own = (stem.with_name(stem.name + end) for end in (".json", ".steps.jsonl", ".yaml"))
            if not (options.resume and file.exists() and log.exists()):
                _real(path, traces[label], file, log)
            own.write_text(to_yaml(_fitted(path, log, load(file), hardware)))
            simulated = [_simulated(_cluster(path, on), traces[label], f"{name} {label}") for on in (hardware, own)]
            for end, result in zip(("simulated", "simulated-own"), simulated, strict=True):
                save(dict(result), options.out / f"{stem.name}-{end}.json")
            rounds[label].append((load(file), *simulated))
            print(
                f"{name} {label} {number}, real / simulated / by its own steps: {_figures(rounds[label][-1])}",
                flush=True,
            )
    return [line for label in loads for line in _lines(name, label, rounds[label])]


def _hardware(name: str, number: int, path: Path, options: argparse.Namespace) -> Path:
    """Return a hardware file of this machine as it is now."""
    if options.hardware is not None:
        return Path(options.hardware)
    file: Path = options.out / f"{name}-{number}.yaml"
    if not (options.resume and file.exists()):
        asked = CalibrationOptions(name, EngineConfig(model=path), seconds=options.calibration_seconds)
        save_hardware(calibrate(asked), file)
    return file


def _fitted(model: Path, log: Path, result: Result, before: Path) -> Hardware:
    """Return the machine as it was in a run, fitted to its steps and to the mean time outside the engine."""
    recording = read_log(log)
    found = fit(measured_steps(recording), ModelShape.load(model), load_hardware(before)).hardware
    arrivals = sorted(recording.arrivals, key=lambda arrival: arrival.time)[-len(result["ttfts"]) :]  # without warm-ups
    inside = statistics.mean((recording.answers[a.id].first_token or a.time) - a.time for a in arrivals)
    sequences = {(step.instance, step.number): step.sequences for step in recording.steps}
    streams = statistics.mean(sequences.get((arrival.instance, arrival.step), 0) for arrival in arrivals)
    tokens = statistics.mean(arrival.prompt_tokens for arrival in arrivals)
    known = found.overheads
    request = statistics.mean(result["ttfts"]) - inside - known.prompt_token * tokens - known.stream * streams
    return replace(found, overheads=replace(known, request=max(request, 0.0)))


def _cluster(model: Path, hardware: Path) -> ClusterOptions:
    return ClusterOptions(model=str(model), hardware=str(hardware))


def _traces(name: str, preset: Preset, cluster: ClusterOptions, options: argparse.Namespace) -> dict[str, Path]:
    """Write a trace for each load, with as many requests as its duration needs at the capacity of `cluster`."""
    at_once = _trace(options.out / f"{name}-at-once.csv", preset, np.zeros(AT_ONCE))
    capacity = _simulated(cluster, at_once, f"{name} at once")["request_throughput"]
    print(f"{name}: capacity {capacity:.1f} requests/s", flush=True)
    traces = {}
    for label, share in LOADS.items():
        rate = share * capacity
        count = max(20, int(rate * options.seconds))
        arrivals = np.cumsum(np.random.default_rng(1).exponential(1 / rate, count))
        traces[label] = _trace(options.out / f"{name}-{label}.csv", preset, arrivals)
    return traces


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
    experiment = SimExperiment(cluster, DatasetOptions(dataset="trace"), trace=TraceOptions(trace=trace), label=label)
    return run_simulation(experiment, [sys.executable, *sys.argv])


def _real(model: Path, trace: Path, result: Path, log: Path) -> None:
    """Run a server and a client, each in its own process, as a user does."""
    server = ("--spawn", "--serve-args", f"{model} --step-log {log}")
    command = (sys.executable, "-m", "jaxserve.cli.main", "bench", "trace", "--trace", trace, "--ignore-eos", *server)
    ending = ("--num-warmups", "4", "--quiet", "--save-result", result)
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
            error = statistics.median(one / other - 1 for one, other in zip(simulated, real, strict=True))
            cells += [f"{statistics.median(simulated):.2f}", f"{error:+.1%}{' (!)' if abs(error) > TOLERATED else ''}"]
        lines.append(f"| {name} | {label} | {text} | {' | '.join(cells)} |")
    return lines


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="bundled,160m")
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--hardware", type=Path, help="hardware file of this machine; default: calibrate in each round")
    parser.add_argument("--calibration-seconds", type=float, default=30.0)
    parser.add_argument("--seconds", type=float, default=40.0, help="seconds of each trace")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "jaxserve" / "bench")
    parser.add_argument("--out", type=Path, default=Path("bench/out/fidelity"))
    parser.add_argument("--resume", action="store_true", help="skip what has a result")
    return parser.parse_args()


if __name__ == "__main__":
    main()
