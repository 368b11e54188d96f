"""The simulator beside the real engine: the same traces on this machine and on its calibration.

    python -m bench.sim.fidelity [--models bundled,160m] [--loads below,near,above] [--hardware FILE] [--rounds N]
        [--out FOLDER]

For each model, `--rounds` times: the machine is calibrated (`jaxserve bench latency --calibrate`), unless --hardware
gives a file; then three traces of random requests, below, near and above what the machine can do, are replayed by
`jaxserve bench trace --spawn`, backwards every other time, and simulated. What the machine can do is what the simulator
answers when all requests are there at once.

A machine that others share is faster in one minute than in the next, and near saturation a tenth of a step's time is
half of a request's. So each trace is simulated a second time with the machine as it was in that run: the step log of
the real server is fitted. That leaves what the simulator itself makes wrong.

Writes the results of `bench` and `sim` to the folder, and fidelity.md: medians of the rounds, side by side.
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
from jaxserve.sim.fit import fit, measured
from jaxserve.sim.hardware import Hardware, load_hardware, to_yaml
from jaxserve.sim.options import ClusterOptions
from jaxserve.sim.run import SimExperiment, run_simulation
from jaxserve.sim.shape import ModelShape

LOADS = {"below": 0.4, "near": 0.8, "above": 2.0}  # of what the machine can do, in requests/s
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
    """Lengths of a model's requests in tokens: medians, and the most."""

    prompt: tuple[int, int]
    answer: tuple[int, int]


PRESETS = {"bundled": Preset((160, 1000), (48, 256)), "160m": Preset((96, 512), (32, 128))}


def main() -> None:
    """Measures, simulates and reports."""
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
    """The lines of one model."""
    traces: dict[str, Path] = {}
    loads = options.loads.split(",")
    rounds: dict[str, list[tuple[Result, ...]]] = {label: [] for label in loads}  # real, simulated, by its own steps
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
                f"{name} {label} {number}, real / simulated / by its own steps: {_told(rounds[label][-1])}", flush=True
            )
    return [line for label in loads for line in _lines(name, label, rounds[label])]


def _hardware(name: str, number: int, path: Path, options: argparse.Namespace) -> Path:
    """The file of this machine as it is now."""
    if options.hardware is not None:
        return Path(options.hardware)
    file: Path = options.out / f"{name}-{number}.yaml"
    if not (options.resume and file.exists()):
        asked = CalibrationOptions(name, EngineConfig(model=path), seconds=options.calibration_seconds)
        save_hardware(calibrate(asked), file)
    return file


def _fitted(model: Path, log: Path, result: Result, before: Path) -> Hardware:
    """The machine as it was in a run: its steps, and the mean of what requests took outside of the engine."""
    recording = read_log(log)
    found = fit(measured(recording), ModelShape.load(model), load_hardware(before)).hardware
    arrivals = sorted(recording.arrivals, key=lambda arrival: arrival.time)[-len(result["ttfts"]) :]  # not the warm-up
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
    """A file for each load, with as many requests as the time needs of what `cluster` can do."""
    at_once = _trace(options.out / f"{name}-at-once.csv", preset, np.zeros(AT_ONCE))
    most = _simulated(cluster, at_once, f"{name} at once")["request_throughput"]
    print(f"{name}: {most:.1f} requests/s at most", flush=True)
    traces = {}
    for label, share in LOADS.items():
        rate = share * most
        count = max(20, int(rate * options.seconds))
        arrivals = np.cumsum(np.random.default_rng(1).exponential(1 / rate, count))
        traces[label] = _trace(options.out / f"{name}-{label}.csv", preset, arrivals)
    return traces


def _trace(file: Path, preset: Preset, arrivals: Sequence[float]) -> Path:
    """Random lengths at these times, as a file; the same ones for the same number of requests."""
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
    """A server and a client, each in a process of its own, as a user has them."""
    server = ("--spawn", "--serve-args", f"{model} --step-log {log}")
    command = (sys.executable, "-m", "jaxserve.cli.main", "bench", "trace", "--trace", trace, "--ignore-eos", *server)
    ending = ("--num-warmups", "4", "--quiet", "--save-result", result)
    subprocess.run([*map(str, command), *map(str, ending)], stdout=subprocess.DEVNULL, check=True)


def _told(results: Sequence[Result]) -> str:
    return ", ".join(f"{text} {' / '.join(f'{r[key]:.2f}' for r in results)}" for key, text in FIGURES.items())


def _lines(name: str, label: str, rounds: Sequence[Sequence[Result]]) -> list[str]:
    """A line for each figure: medians of the rounds, and of their errors, each in one state of the machine."""
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
    parser.add_argument("--hardware", type=Path, help="file of this machine; default: a calibration in each round")
    parser.add_argument("--calibration-seconds", type=float, default=30.0)
    parser.add_argument("--seconds", type=float, default=40.0, help="of each trace")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "jaxserve" / "bench")
    parser.add_argument("--out", type=Path, default=Path("bench/out/fidelity"))
    parser.add_argument("--resume", action="store_true", help="leave alone what is there already")
    return parser.parse_args()


if __name__ == "__main__":
    main()
