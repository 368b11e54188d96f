"""Calibration: `jaxserve bench latency --calibrate FILE` writes a file of configs/hardware for this machine.

For each precision a server with a step log is started and loaded over HTTP (`calibration_load`), because on a CPU the
work of server and client next to the engine is part of the duration of its steps. `sim.cost_model_fit` turns the steps
into shares of the roofline. The roofline itself is nominal: measured with numpy on a CPU, and taken from
configs/hardware for a GPU.
"""

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console

from jaxserve.bench.client import Client
from jaxserve.bench.environment import describe_environment
from jaxserve.bench.offline.calibration_load import CalibrationLoad, Limits, LoadRecords, Progress
from jaxserve.bench.offline.options import CalibrationOptions, changed_fields
from jaxserve.bench.options import ServerOptions
from jaxserve.bench.record import RequestRecord
from jaxserve.bench.server import discover, request_target
from jaxserve.bench.spawn import spawned
from jaxserve.console.tables import print_table
from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.errors import ConfigError
from jaxserve.core.files import write_file
from jaxserve.core.machine import processors
from jaxserve.core.model_name import model_name
from jaxserve.core.precision import BITS, parse_precision
from jaxserve.engine.step_log import Recording, read_log
from jaxserve.planning.defaults import dtype_with_quantized
from jaxserve.sim.cost_model_fit import OVERHEADS, Fit, fit, fit_frontend, measured_steps
from jaxserve.sim.hardware import Curve, Hardware, Link, Overheads, hardware_of_gpus, load_hardware, to_yaml
from jaxserve.sim.shape import ModelShape

READY_S = 600.0
COPIED_BYTES = 64 << 20  # more than caches hold
MATRIX_SIZE = 1024  # rows and columns
PASSES = 7
# For each batch of transitions. Calibration makes none. In bench.sim.fidelity, batches of an idle engine took 3 to 6 ms
# longer than their copies.
TRANSITION_S = 3e-3
OUTSIDE = ("request", "prompt_token", "stream")  # overheads outside the engine


def calibrate(options: CalibrationOptions, progress: Progress = lambda phase: None) -> Fit:
    """Measure this machine and fit a hardware file to it, overheads outside the engine included.

    Raise ConfigError for options that cannot be calibrated, and SpawnError if a server does not start.
    """
    engine = options.engine
    if engine.tp * engine.pp * engine.dp > 1:
        raise ConfigError(f"calibration measures one device: tp is {engine.tp}, pp {engine.pp}, dp {engine.dp}")
    if (engine.precision, engine.layer_precision, engine.head_precision) != ("auto", None, "auto"):
        raise ConfigError(
            "calibration takes precisions from --precisions alone: all layers have one, and the head keeps the model's"
        )
    shape = ModelShape.load(engine.model if engine.model is not None else bundled_model_path())
    dtype = dtype_with_quantized(shape.dtype) if engine.dtype == "auto" else engine.dtype
    # Set explicitly, so that all runs use one dtype.
    shape, options = replace(shape, dtype=dtype), replace(options, engine=replace(engine, dtype=dtype))
    precisions = [parse_precision(name, shape.dtype, "precisions") for name in options.precisions]
    nominal = _nominal(options.name, [shape.dtype, *precisions], progress)
    runs: list[tuple[Recording, LoadRecords]] = []
    for precision in dict.fromkeys(precisions):
        runs.append(_run(options, shape, precision, lambda phase, name=precision: progress(f"{name}: {phase}")))
    progress("fitting")
    facts = runs[0][0].facts
    steps = [step for recording, _ in runs for step in measured_steps(recording)]
    found = fit(steps, shape, nominal, "int8" if facts["kv_dtype"] == "int8" else "auto")
    request, token, stream = fit_frontend(
        [
            measured
            for recording, load in runs
            for records, idle in ((load.lone, True), (load.open, False))
            for measured in seconds_outside(records, recording, idle=idle)
        ]
    )
    buckets = facts["buckets"]
    hardware = replace(
        found.hardware,
        source=_source(options, precisions),
        overheads=replace(found.hardware.overheads, request=request, prompt_token=token, stream=stream),
        tile=buckets["tile"],
        prefill_tokens=buckets["max_tiles"] * buckets["tile"],
        max_num_seqs=buckets["max_num_seqs"],
        min_rows=buckets["min_rows"],
    )
    return replace(found, hardware=hardware)


def save(calibration: Fit, path: Path) -> None:
    """Write the hardware file. Raise ConfigError if it cannot be written."""
    write_file(path, to_yaml(calibration.hardware))


def print_calibration(found: Fit, console: Console) -> None:
    """Print the fitted curves, the overheads and the prediction error."""
    hardware = found.hardware
    lines = [
        [name, f"{size:g}", f"{share:.3f}", str(found.seen.get((name, int(size)), found.seen.get((name, 0), 0)))]
        for name, curve in hardware.efficiency.items()
        for size, share in curve.knots
    ]
    print_table(["share of the roofline", "tokens", "share", "steps"], lines, console)
    overheads = [[name, f"{1e6 * getattr(hardware.overheads, name):.2f}"] for name in (*OVERHEADS, *OUTSIDE)]
    print_table(["overhead", "us"], overheads, console)
    console.print(
        f"{found.steps} steps; error on {found.held_out} held-out steps: {found.median_error:.1%} (median), "
        f"{found.p90_error:.1%} (90th percentile), {found.total - 1:+.1%} in total",
        highlight=False,
        soft_wrap=True,
    )
    if found.chunk_cost is not None and found.chunk_error is not None:
        cost = found.chunk_cost
        console.print(
            f"chunks alone, fitted as in KunServe: a {cost.a:.3g}, b {cost.b:.3g}, g {cost.g:.3g} s; "
            f"mean error {found.chunk_error:.1%}",
            highlight=False,
            soft_wrap=True,
        )


# -- a server


def _run(
    options: CalibrationOptions, shape: ModelShape, precision: str, progress: Progress
) -> tuple[Recording, LoadRecords]:
    """Load a server of one precision and return its step log and the client's records."""
    engine = options.engine
    if precision in BITS:
        engine = replace(engine, precision=precision, head_precision=shape.dtype)
    with tempfile.TemporaryDirectory(prefix="jaxserve-") as folder:
        log, file = Path(folder) / "steps.jsonl", Path(folder) / "serve.yaml"
        file.write_text(json.dumps(changed_fields(replace(engine, step_log=str(log)))))  # JSON is YAML
        progress("starting a server")
        with spawned(["--config", str(file)], timeout_s=READY_S) as url:
            records = asyncio.run(_load(url, options, shape, read_log(log), progress))
        return read_log(log), records


async def _load(
    url: str, options: CalibrationOptions, shape: ModelShape, start: Recording, progress: Progress
) -> LoadRecords:
    server = ServerOptions(ignore_eos=True)
    facts, buckets = start.facts, start.facts["buckets"]
    (stage,) = facts["plan"]["instances"][0]["stages"]
    limits = Limits(
        buckets["max_num_seqs"],
        facts["max_model_len"],
        buckets["max_tiles"] * buckets["tile"],
        (stage["kv_pages"] - 1) * facts["page_size"],
        shape.vocab_size,
    )
    async with Client(request_target(url, discover(url, server), server)) as client:
        return await CalibrationLoad(client, limits, options.seconds, options.seed).run(progress)


def seconds_outside(
    records: Sequence[RequestRecord], recording: Recording, *, idle: bool
) -> list[tuple[int, int, float]]:
    """Return the seconds that each request spent outside the engine before its first token.

    Each entry holds the request's prompt tokens, the answers streamed when it arrived, and seconds. The engine's time
    is subtracted: from the request's arrival at the engine (or, if the engine was `idle`, from the start of its first
    step) to the end of the step that made the token. Client and engine read one clock. Requests are matched by length
    and time.
    """
    steps = {(step.instance, step.number): step for step in recording.steps}
    arrivals = sorted(recording.arrivals, key=lambda arrival: arrival.time)
    found = []
    for record in sorted(records, key=lambda record: record.sent_s or 0.0):
        sent, first = record.sent_s or 0.0, record.chunk_times_s[0]
        for arrival in arrivals:
            if arrival.prompt_tokens == record.input_tokens and sent <= arrival.time <= first:
                arrivals.remove(arrival)
                token = recording.answers[arrival.id].first_token
                step = steps[arrival.instance, arrival.step]
                start = step.begun if idle else arrival.time
                if token is not None:
                    found.append((record.input_tokens, step.sequences, first - sent - (token - start)))
                break
    return found


# -- nominal numbers


def _nominal(name: str, precisions: Sequence[str], progress: Progress) -> Hardware:
    """Return nominal hardware figures of this machine. Raise ConfigError for an unknown GPU."""
    gpus = describe_environment().get("gpus")
    if gpus is not None:
        known = load_hardware(hardware_of_gpus(gpus))
        return replace(known, name=name)
    progress("memory and processor")
    bandwidth, rate = _bandwidth(), _rate()
    return Hardware(
        name=name,
        source="",
        measured=True,
        platform="cpu",
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        bandwidth=bandwidth,
        rates=dict.fromkeys(precisions, rate),
        efficiency={name: Curve(((1, 1.0),)) for name in (*precisions, "attention")},
        devices_per_host=1,
        tile=1,
        prefill_tokens=1,
        max_num_seqs=1,
        min_rows=1,
        overheads=Overheads(transition=TRANSITION_S),
        # On a CPU variants of layers are copied within memory.
        links={"pcie": Link(bandwidth / 2, 0.0)},
    )


def _bandwidth() -> float:
    """Return the bytes/s that all cores together read and write while they copy."""
    cores = processors()
    pairs = [(np.ones(COPIED_BYTES // 8), np.ones(COPIED_BYTES // 8)) for _ in range(cores)]
    with ThreadPoolExecutor(cores) as pool:
        return 2 * COPIED_BYTES * cores / _seconds(lambda: list(pool.map(lambda pair: np.copyto(*pair), pairs)))


def _rate() -> float:
    """Return the operations/s of a product of float32 matrices."""
    matrix = np.ones((MATRIX_SIZE, MATRIX_SIZE), np.float32)
    return 2 * MATRIX_SIZE**3 / _seconds(lambda: matrix @ matrix)


def _seconds(function: Callable[[], object]) -> float:
    """Return the median duration of a call."""
    times = []
    for _ in range(PASSES):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return median(times)


def _source(options: CalibrationOptions, precisions: Sequence[str]) -> str:
    """Return the origin of the figures: machine, model, options and versions."""
    here = describe_environment()
    here["cores"] += " cores"
    machine = ", ".join(here[key] for key in ("gpus", "cpu", "cores", "memory", "system") if key in here)
    model = model_name(Path(options.engine.model or bundled_model_path()))
    engine = json.dumps({key: value for key, value in changed_fields(options.engine).items() if key != "model"})
    versions = f"jaxserve {here['jaxserve']} ({here.get('commit', 'no commit')}), {here['packages']}"
    return (
        f"jaxserve bench latency --calibrate on {here['date']}: {machine}; "
        f"model {model} in {' and '.join(precisions)}, options {engine}; {versions}"
    )
