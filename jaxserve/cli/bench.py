"""`jaxserve bench`: the commands. What they do is imported when they run, so that --help is fast."""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxserve.bench.interrupts import ended_as_by_ctrl_c
from jaxserve.bench.options import (
    ArrivalOptions,
    CalibrateOptions,
    DatasetOptions,
    LoadOptions,
    ResultOptions,
    ServerOptions,
    TraceOptions,
)
from jaxserve.cli.options import OFFLINE, OptionsOf, expand_options
from jaxserve.cli.terminal import INTERRUPTED, console
from jaxserve.cli.vllm_spelling import VllmCommand
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.core.files import ensure_file

if TYPE_CHECKING:
    from jaxserve.bench.result import Kind

app = typer.Typer(
    name="bench",
    help="Measure: a server under load, the engine by itself, and results beside each other.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Result = dict[str, Any]
OfflineEngine = Annotated[EngineConfig, OptionsOf(EngineConfig, OFFLINE)]


# -- a server, from outside


@app.command(cls=VllmCommand)
@expand_options
def serve(
    server: ServerOptions,
    load: LoadOptions,
    dataset: DatasetOptions,
    arrivals: ArrivalOptions,
    trace: TraceOptions,
    result: ResultOptions,
) -> None:
    """Load a server that speaks OpenAI's API, open loop, and report latencies and throughput."""
    _measure("serve", server, load, dataset, arrivals, trace, result)


@app.command(name="trace", cls=VllmCommand)
@expand_options
def replay(
    file: Annotated[Path | None, typer.Argument(help="The trace; the same as --trace.", show_default=False)] = None,
    *,
    seed: Annotated[int, typer.Option(min=0, help="Of contents, and of what scaling draws.")] = 0,
    server: ServerOptions,
    load: LoadOptions,
    trace: TraceOptions,
    result: ResultOptions,
) -> None:
    """Replay a trace of requests, at their times and with their lengths."""
    trace = replace(trace, trace=file) if file else trace
    _measure("trace", server, load, DatasetOptions(dataset="trace", seed=seed), ArrivalOptions(), trace, result)


@app.command(cls=VllmCommand)
@expand_options
def compare(
    results: Annotated[list[Path] | None, typer.Argument(help="To put side by side.", show_default=False)] = None,
    *,
    run: Annotated[
        list[str] | None,
        typer.Option(
            help="LABEL=ARGS of `jaxserve serve`: measure this configuration too; repeat it for each.",
            rich_help_panel="Compare",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Runs of each configuration.", rich_help_panel="Compare")] = 2,
    memory_gb: Annotated[
        float | None, typer.Option(help="Memory budget of every configuration.", rich_help_panel="Compare")
    ] = None,
    server: ServerOptions,
    load: LoadOptions,
    dataset: DatasetOptions,
    arrivals: ArrivalOptions,
    trace: TraceOptions,
    result: ResultOptions,
) -> None:
    """Put results side by side, or run several configurations of the server in turn and compare them."""
    with ended_as_by_ctrl_c():
        if not run and len(results or ()) < 2:
            raise ConfigError("give two results or more, or --run LABEL=ARGS for each configuration to measure")
        if run and (path := result.destination()) and path.suffix == ".json":
            raise ConfigError(f"--save-result {path}: several results need a folder, not one file")
        from jaxserve.bench.compare import print_side_by_side
        from jaxserve.bench.consistency import check_server
        from jaxserve.bench.result import load as read
        from jaxserve.bench.run import Experiment, run_in_turn
        from jaxserve.cli.publish import prepare, publish

        found = [read(path) for path in results or ()]
        experiment = Experiment(server, load, dataset, arrivals, trace, progress=not result.quiet)
        if run:
            check_server(server, load)
        prepare(result)
        try:
            for measured in run_in_turn(experiment, _labelled(run or []), rounds, memory_gb, _command()):
                publish(measured, result, load)
                found.append(measured)
        finally:  # also when a server does not start in the third round
            if len(found) > 1:
                print_side_by_side(found)
    _exit(found)


@app.command()
def report(
    results: Annotated[list[Path], typer.Argument(help="Results of `bench serve` or `bench trace`.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page; plots go to a folder beside it.")] = Path(
        "report.html"
    ),
    title: Annotated[str | None, typer.Option(help="Of the page.", show_default=False)] = None,
) -> None:
    """Write one self-contained HTML page, and its plots as PNG files."""
    from jaxserve.bench.report import write_report
    from jaxserve.bench.result import load

    ensure_file(out, "--out")
    typer.echo(write_report([load(path) for path in results], out, title=title))


# -- the engine, from inside


@app.command()
@expand_options
def throughput(
    *,
    ignore_eos: Annotated[bool, typer.Option(help="Answers of the length that was asked for.")] = True,
    engine: OfflineEngine,
    dataset: DatasetOptions,
    trace: TraceOptions,
    result: ResultOptions,
) -> None:
    """Run many requests at once through the engine, to their end."""
    from jaxserve.bench.offline.options import ThroughputOptions
    from jaxserve.bench.vocabulary import Vocabulary
    from jaxserve.bench.workloads import build_workload

    source = engine.tokenizer or engine.model
    workload = build_workload(dataset, ArrivalOptions(), trace, Vocabulary.load(source), as_text=False)
    samples = [request.sample for request in workload.requests]
    from jaxserve.bench.offline.throughput import throughput as measure

    options = ThroughputOptions(engine, ignore_eos=ignore_eos, seed=dataset.seed)
    _rows("throughput", lambda step: measure(options, samples, step), len(samples), result, workload.description)


@app.command()
@expand_options
def latency(
    *,
    batches: Annotated[str, typer.Option("--batches", "--batch-size", help="Sequences at once, such as 1,8,32.")] = (
        "1,8,32"
    ),
    input_len: Annotated[str, typer.Option(help="Prompt tokens, such as 128,1024.")] = "128",
    output_len: Annotated[int, typer.Option(help="Answer tokens.")] = 128,
    repeats: Annotated[int, typer.Option("--repeats", "--num-iters", min=1, help="Measurements of a case.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Of the prompts.")] = 0,
    calibration: CalibrateOptions,
    engine: OfflineEngine,
    result: ResultOptions,
) -> None:
    """Measure prefill and decode by batch and prompt length."""
    if calibration.calibrate is not None:
        _calibrate(calibration.calibrate, calibration, engine, seed)
        return
    from jaxserve.bench.offline.options import LatencyOptions

    sizes, lengths = _numbers(batches, "--batches"), _numbers(input_len, "--input-len")
    options = LatencyOptions(engine, sizes, lengths, output_len, repeats, seed)
    from jaxserve.bench.offline.latency import latency as measure

    runs = 2 * repeats + 2  # of a case, with those that are not counted
    _rows("latency", lambda step: measure(options, step), runs * len(sizes) * len(lengths), result)


@app.command()
@expand_options
def startup(
    *,
    repeats: Annotated[int, typer.Option(min=1, help="Processes of each kind.")] = 1,
    server: Annotated[bool, typer.Option(help="Also `jaxserve serve`, to its first token.")] = True,
    engine: OfflineEngine,
    result: ResultOptions,
) -> None:
    """Start fresh processes, with an empty and with a warm compilation cache, and time their phases."""
    from jaxserve.bench.offline.options import StartupOptions
    from jaxserve.bench.offline.startup import startup as measure

    options = StartupOptions(engine, repeats, server)
    _rows("startup", lambda step: measure(options, step), 2 * repeats * (1 + server), result)


# -- inside


def _measure(
    kind: "Kind",
    server: ServerOptions,
    load: LoadOptions,
    dataset: DatasetOptions,
    arrivals: ArrivalOptions,
    trace: TraceOptions,
    result: ResultOptions,
) -> None:
    with ended_as_by_ctrl_c():
        load.metrics()  # a mistake is told before anything is sent
        from jaxserve.bench.run import Experiment, run_experiment
        from jaxserve.cli.publish import prepare, publish

        prepare(result)

        experiment = Experiment(server, load, dataset, arrivals, trace, result.label, not result.quiet)
        measured = run_experiment(experiment, kind, _command())
        publish(measured, result, load)
    _exit([measured])


def _rows(
    kind: "Kind",
    measure: Callable[[Callable[[], None]], Iterable[Result]],
    steps: int,
    options: ResultOptions,
    workload: Mapping[str, Any] | None = None,
) -> None:
    """Publishes the rows of an offline measurement, also those that Ctrl-C left."""
    from datetime import datetime

    from tqdm import tqdm

    from jaxserve.bench.environment import describe
    from jaxserve.bench.result import build
    from jaxserve.cli.publish import prepare, publish

    prepare(options)
    rows, interrupted = [], False
    with ended_as_by_ctrl_c(), tqdm(total=steps, disable=True if options.quiet else None) as bar:

        def advance() -> None:
            bar.update()

        try:
            for row in measure(advance):
                rows.append(row)
        except KeyboardInterrupt:
            interrupted = True
    interrupted |= any(row.pop("interrupted", False) for row in rows)
    measured = build(
        kind,
        date=datetime.now(),
        command=_command(),
        environment=describe(),
        target={"label": options.label},
        workload=workload,
        rows=rows,
        interrupted=interrupted,
    )
    publish(measured, options)
    _exit([measured])


def _calibrate(path: Path, calibration: CalibrateOptions, engine: EngineConfig, seed: int) -> None:
    """Measures this machine, and writes what the simulator takes."""
    with ended_as_by_ctrl_c():
        if path.suffix not in (".yaml", ".yml"):
            raise ConfigError(f"--calibrate {path}: hardware is a .yaml file")
        from rich.console import Console

        from jaxserve.bench.offline.calibrate import calibrate, print_calibration, save
        from jaxserve.bench.offline.options import CalibrationOptions

        ensure_file(path, "--calibrate")
        precisions = tuple(calibration.precisions.split(","))
        options = CalibrationOptions(path.stem, engine, precisions, calibration.calibration_seconds, seed)
        with console.status("calibrating") as status:
            found = calibrate(options, lambda phase: status.update(f"calibrating: {phase}"))
        save(found, path)
        print_calibration(found, Console(highlight=False))
        console.print(f"saved {path}", markup=False, soft_wrap=True)


def _exit(results: list[Result]) -> None:
    """Sets the exit status: 130 after Ctrl-C, 1 when a server answered nothing."""
    if any(result["interrupted"] for result in results):
        raise typer.Exit(INTERRUPTED)
    if any(result.get("failed") and not result["completed"] for result in results):
        raise typer.Exit(1)


def _command() -> list[str]:
    return ["jaxserve", *sys.argv[1:]]


def _numbers(text: str, option: str) -> tuple[int, ...]:
    """From "1,8,32". Raises `ConfigError`."""
    parts = text.replace(" ", "").split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"{option} {text!r}: give whole numbers above 0, such as 1,8,32")
    return tuple(int(part) for part in parts)


def _labelled(configurations: list[str]) -> dict[str, str]:
    """["long=MODEL --max-model-len 8192"] -> {"long": "MODEL --max-model-len 8192"}. Raises `ConfigError`."""
    pairs = [text.partition("=") for text in configurations]
    if wrong := [
        text for text, (label, equals, _) in zip(configurations, pairs, strict=True) if not (label and equals)
    ]:
        raise ConfigError(f"--run {wrong[0]!r}: a configuration is LABEL=ARGS, such as long='MODEL --max-num-seqs 64'")
    labelled = {label: args for label, _, args in pairs}
    if len(labelled) < len(pairs):
        raise ConfigError("--run: two configurations have the same label")
    return labelled
