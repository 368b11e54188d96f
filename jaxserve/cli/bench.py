"""The commands of `jaxserve bench`, which import their implementation only when they run, so that --help is fast."""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxserve.bench.interrupts import signals_as_ctrl_c
from jaxserve.bench.options import (
    ArrivalOptions,
    CalibrateOptions,
    DatasetOptions,
    LoadOptions,
    ResultOptions,
    ServerOptions,
    TraceOptions,
)
from jaxserve.cli.app import App, BenchCommand
from jaxserve.cli.options import OFFLINE, OptionsOf, expand_options
from jaxserve.cli.terminal import configure_logging, exit_with_status
from jaxserve.console.bars import console
from jaxserve.console.progress import progress_bar, start_progress
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.core.extras import require_extra
from jaxserve.core.files import ensure_file

if TYPE_CHECKING:
    from jaxserve.bench.result import Kind, Result

app = App(
    name="bench",
    help="Measure a server under load or the engine alone, and compare results.",
)
OfflineEngine = Annotated[EngineConfig, OptionsOf(EngineConfig, OFFLINE)]


# -- a server over HTTP


@app.command(cls=BenchCommand)
@expand_options
def serve(
    server: ServerOptions,
    load: LoadOptions,
    dataset: DatasetOptions,
    arrivals: ArrivalOptions,
    trace: TraceOptions,
    result: ResultOptions,
) -> None:
    """Send load to any server with OpenAI's API, in an open loop, and report latencies and throughput."""
    _measure("serve", load, result, server, dataset, arrivals, trace)


@app.command(name="trace", cls=BenchCommand)
@expand_options
def replay(
    file: Annotated[Path | None, typer.Argument(help="The trace file, as with --trace.", show_default=False)] = None,
    *,
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompt contents and of the random choices of scaling.")] = 0,
    server: ServerOptions,
    load: LoadOptions,
    trace: TraceOptions,
    result: ResultOptions,
) -> None:
    """Replay a trace of requests with its arrival times and lengths."""
    trace = replace(trace, trace=file) if file else trace
    _measure("trace", load, result, server, DatasetOptions(dataset="trace", seed=seed), ArrivalOptions(), trace)


@app.command(cls=BenchCommand)
@expand_options
def compare(
    results: Annotated[list[Path] | None, typer.Argument(help="Result files to compare.", show_default=False)] = None,
    *,
    run: Annotated[
        list[str] | None,
        typer.Option(
            help="LABEL=ARGS: also measure `jaxserve serve` with these arguments (repeatable).",
            rich_help_panel="Compare",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Runs of each configuration.", rich_help_panel="Compare")] = 2,
    memory_gb: Annotated[
        float | None, typer.Option(help="Memory budget of every configuration in GB.", rich_help_panel="Compare")
    ] = None,
    server: ServerOptions,
    load: LoadOptions,
    dataset: DatasetOptions,
    arrivals: ArrivalOptions,
    trace: TraceOptions,
    result: ResultOptions,
) -> None:
    """Compare results, or run several configurations of the server in turn and compare those."""
    with signals_as_ctrl_c():
        if not run and len(results or ()) < 2:
            raise ConfigError(
                "nothing to compare: give at least two results, or --run LABEL=ARGS for each configuration"
            )
        if run and (path := result.destination()) and path.suffix == ".json":
            raise ConfigError(f"--save-result is {path}, but --run makes several results: give a folder")
        from jaxserve.bench.compare import print_side_by_side
        from jaxserve.bench.result import load as read
        from jaxserve.cli.publish import check_destination, publish

        found = [read(path) for path in results or ()]
        in_turn: Iterable[Result] = ()
        if run:
            _require_client()
            from jaxserve.bench.consistency import check_server
            from jaxserve.bench.run import Experiment, run_in_turn

            check_server(server, load)
            experiment = Experiment(server, load, dataset, arrivals, trace, progress=not result.quiet)
            in_turn = run_in_turn(experiment, _parse_configurations(run), rounds, memory_gb, _command())
        check_destination(result)
        try:
            for measured in in_turn:
                publish(measured, result, load)
                found.append(measured)
        finally:  # compare what was measured, even if a server does not start in a later round
            if len(found) > 1:
                print_side_by_side(found)
    exit_with_status(found)


@app.command()
def report(
    results: Annotated[list[Path], typer.Argument(help="Results of `bench serve` or `bench trace`.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The HTML page; its plots go to a folder next to it.")
    ] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="Title of the page.", show_default=False)] = None,
) -> None:
    """Write a self-contained HTML page about results, and its plots as PNG files."""
    require_extra("bench", "matplotlib", purpose="a report")
    from jaxserve.bench.report import write_report
    from jaxserve.bench.result import load

    ensure_file(out, "--out")
    typer.echo(write_report([load(path) for path in results], out, title=title))


# -- the engine without a server


@app.command()
@expand_options
def throughput(
    *,
    ignore_eos: Annotated[bool, typer.Option(help="Generate the full length, past the end-of-sequence token.")] = True,
    engine: OfflineEngine,
    dataset: DatasetOptions,
    trace: TraceOptions,
    result: ResultOptions,
) -> None:
    """Measure the throughput of the engine with many requests at once."""
    from jaxserve.bench.offline.options import ThroughputOptions
    from jaxserve.bench.vocabulary import Vocabulary
    from jaxserve.bench.workload_builder import build_workload

    engine = _with_local_files(engine)
    source = engine.tokenizer or engine.model
    workload = build_workload(dataset, ArrivalOptions(), trace, Vocabulary.load(source), as_text=False)
    samples = [request.sample for request in workload.requests]
    from jaxserve.bench.offline.throughput import throughput as measure

    options = ThroughputOptions(engine, ignore_eos=ignore_eos, seed=dataset.seed)
    _measure_engine(
        "throughput", lambda step: measure(options, samples, step), len(samples), result, workload.description
    )


@app.command()
@expand_options
def latency(
    *,
    batches: Annotated[str, typer.Option("--batches", "--batch-size", help="Batch sizes, such as 1,8,32.")] = (
        "1,8,32"
    ),
    input_len: Annotated[str, typer.Option(help="Prompt lengths in tokens, such as 128,1024.")] = "128",
    output_len: Annotated[int, typer.Option(help="Answer length in tokens.")] = 128,
    repeats: Annotated[
        int, typer.Option("--repeats", "--num-iters", min=1, help="Measurements of each combination.")
    ] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompts.")] = 0,
    calibration: CalibrateOptions,
    engine: OfflineEngine,
    result: ResultOptions,
) -> None:
    """Measure prefill and decode times by batch size and prompt length."""
    engine = _with_local_files(engine)
    if calibration.calibrate is not None:
        _calibrate(calibration.calibrate, calibration, engine, seed)
        return
    from jaxserve.bench.offline.options import LatencyOptions

    sizes, lengths = _parse_integers(batches, "--batches"), _parse_integers(input_len, "--input-len")
    options = LatencyOptions(engine, sizes, lengths, output_len, repeats, seed)
    from jaxserve.bench.offline.latency import latency as measure

    runs = 2 * repeats + 2  # per combination, including the two that are not counted
    _measure_engine("latency", lambda step: measure(options, step), runs * len(sizes) * len(lengths), result)


@app.command()
@expand_options
def startup(
    *,
    repeats: Annotated[int, typer.Option(min=1, help="Processes to start of each kind.")] = 1,
    server: Annotated[bool, typer.Option(help="Also time `jaxserve serve` until its first token.")] = True,
    engine: OfflineEngine,
    result: ResultOptions,
) -> None:
    """Time the start of fresh processes with an empty and with a warm compilation cache."""
    from jaxserve.bench.offline.options import StartupOptions
    from jaxserve.bench.offline.startup import startup as measure

    options = StartupOptions(_with_local_files(engine), repeats, server)
    _measure_engine("startup", lambda step: measure(options, step), 2 * repeats * (1 + server), result)


# -- helpers


def _require_client() -> None:
    require_extra("bench", "aiohttp", purpose="the load client")


def _measure(kind: "Kind", load: LoadOptions, result: ResultOptions, server: ServerOptions, *workload: Any) -> None:
    """Measure a server under a workload (dataset, arrivals and trace options) and publish the result."""
    with signals_as_ctrl_c():
        load.metrics()  # raises before anything is sent
        _require_client()
        from jaxserve.bench.run import Experiment, run_experiment
        from jaxserve.cli.publish import check_destination, publish

        check_destination(result)
        experiment = Experiment(server, load, *workload)
        experiment = replace(experiment, label=result.label, progress=not result.quiet)
        measured = run_experiment(experiment, kind, _command())
        publish(measured, result, load)
    exit_with_status([measured])


def _measure_engine(
    kind: "Kind",
    measure: "Callable[[Callable[[], None]], Iterable[Result]]",
    steps: int,
    options: ResultOptions,
    workload: Mapping[str, Any] | None = None,
) -> None:
    """Run an offline measurement and publish its rows, including those measured before Ctrl-C."""
    from datetime import datetime

    from jaxserve.bench.environment import describe_environment
    from jaxserve.bench.result import build
    from jaxserve.cli.publish import check_destination, publish

    check_destination(options)
    rows, interrupted = [], False
    with signals_as_ctrl_c(), progress_bar("measurements", steps, shown=not options.quiet) as bar:
        try:
            for row in measure(bar.advance):
                rows.append(row)
        except KeyboardInterrupt:
            interrupted = True
    interrupted |= any(row.pop("interrupted", False) for row in rows)
    measured = build(
        kind,
        date=datetime.now(),
        command=_command(),
        environment=describe_environment(),
        target={"label": options.label},
        workload=workload,
        rows=rows,
        interrupted=interrupted,
    )
    publish(measured, options)
    exit_with_status([measured])


def _with_local_files(engine: EngineConfig) -> EngineConfig:
    """Return the configuration with folders in place of names on a hub, so that downloads are not measured."""
    from jaxserve.checkpoint.local import with_local_files

    configure_logging("warning")
    with signals_as_ctrl_c(), start_progress() as progress:
        return with_local_files(engine, progress)


def _calibrate(path: Path, calibration: CalibrateOptions, engine: EngineConfig, seed: int) -> None:
    """Measure this machine and write a hardware file for the simulator."""
    with signals_as_ctrl_c():
        if path.suffix not in (".yaml", ".yml"):
            raise ConfigError(f"--calibrate is {path}: the hardware file must end in .yaml or .yml")
        _require_client()
        from rich.console import Console

        from jaxserve.bench.offline.calibrate import calibrate, print_calibration, save
        from jaxserve.bench.offline.options import CalibrationOptions

        ensure_file(path, "--calibrate")
        precisions = tuple(calibration.precisions.split(","))
        options = CalibrationOptions(path.stem, engine, precisions, calibration.calibration_seconds, seed)
        with progress_bar("calibrating", keep=False) as bar:
            found = calibrate(options, lambda phase: bar.update(f"calibrating: {phase}", 0, None))
        save(found, path)
        print_calibration(found, Console(highlight=False))
        console.print(f"saved {path}", markup=False, soft_wrap=True)


def _command() -> list[str]:
    return ["jaxserve", *sys.argv[1:]]


def _parse_integers(text: str, option: str) -> tuple[int, ...]:
    """Return the integers of a list such as "1,8,32". Raise `ConfigError` if one is not above 0."""
    parts = text.replace(" ", "").split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"{option} is {text!r}: give integers above 0 with commas, such as 1,8,32")
    return tuple(int(part) for part in parts)


def _parse_configurations(configurations: list[str]) -> dict[str, str]:
    """Return server arguments by label: ["long=MODEL --tp 2"] becomes {"long": "MODEL --tp 2"}."""
    pairs = [text.partition("=") for text in configurations]
    if wrong := [
        text for text, (label, equals, _) in zip(configurations, pairs, strict=True) if not (label and equals)
    ]:
        raise ConfigError(f"--run is {wrong[0]!r}: give LABEL=ARGS, such as long='MODEL --max-num-seqs 64'")
    arguments = {label: args for label, _, args in pairs}
    if len(arguments) < len(pairs):
        doubled = next(label for label in arguments if sum(label == other for other, *_ in pairs) > 1)
        raise ConfigError(f"--run has the label {doubled!r} twice: give each configuration its own")
    return arguments
