"""The commands of `jaxserve sim`, which import their implementation only when they run, so that --help is fast."""

import json
import shlex
import sys
from dataclasses import replace
from typing import Annotated

import typer

from jaxserve.bench.interrupts import signals_as_ctrl_c
from jaxserve.bench.options import ArrivalOptions, DatasetOptions, ResultOptions, TraceOptions
from jaxserve.cli.app import App, BenchCommand, BenchGroup
from jaxserve.cli.options import Given, OptionsOf, expand_options
from jaxserve.cli.terminal import configure_logging, exit_on_error, exit_with_status
from jaxserve.console.bars import console
from jaxserve.console.progress import progress_bar
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.core.files import ensure_file
from jaxserve.core.options import given_options, options_of
from jaxserve.sim.capacity.options import CLUSTER_OPTIONS, PlanOptions
from jaxserve.sim.options import ClusterOptions, FigureOptions

SERVED = frozenset(field.name for field in options_of(EngineConfig))

app = App(name="sim", cls=BenchGroup, invoke_without_command=True, no_args_is_help=False)


@app.callback()
@expand_options
def sim(
    context: typer.Context,
    *,
    cluster: ClusterOptions,
    dataset: DatasetOptions,
    arrivals: ArrivalOptions,
    trace: TraceOptions,
    figures: FigureOptions,
    result: ResultOptions,
) -> None:
    """Simulate a cluster under load: jaxserve's own scheduler and policies on hardware that you do not have."""
    if context.invoked_subcommand is not None:
        return
    with signals_as_ctrl_c():
        load = figures.load()
        load.metrics()  # raises before anything runs
        from jaxserve.cli.publish import check_destination, publish
        from jaxserve.sim.run import SimExperiment, run_simulation

        check_destination(result)
        experiment = SimExperiment(cluster, dataset, arrivals, trace, figures, result.label, not result.quiet)
        measured = run_simulation(experiment, ["jaxserve", *sys.argv[1:]])
        publish(measured, result, load)
    exit_with_status([measured])


@app.command(cls=BenchCommand)
@expand_options
def plan(
    *,
    search: PlanOptions,
    cluster: Annotated[ClusterOptions, OptionsOf(ClusterOptions, CLUSTER_OPTIONS)],
    dataset: Annotated[Given, OptionsOf(DatasetOptions)],
    arrivals: ArrivalOptions,
    trace: TraceOptions,
) -> None:
    """Find the cheapest devices, degrees, precision and policy that serve a load within objectives.

    With --calibrate, fit the hardware to a run of your own first, and tell how far predictions are off.
    """
    with signals_as_ctrl_c():
        if search.calibrate is not None:
            search = _calibrated(search, cluster)
            if search.goodput is None:
                return
        from rich.console import Console

        from jaxserve.bench.result import save
        from jaxserve.sim.capacity.plan import make_answer
        from jaxserve.sim.capacity.report import as_json, print_answer
        from jaxserve.sim.capacity.serve_options import save_options

        for path, option in ((search.save_plan, "--save-plan"), (search.save_result, "--save-result")):
            if path is not None:
                ensure_file(path, option)
        configure_logging("error")  # not what is remarked on each cluster
        with progress_bar("hardware searched", keep=False) as bar:
            answer = make_answer(search, cluster, dataset, arrivals, trace, bar.update)
        found = as_json(answer, ["jaxserve", *sys.argv[1:]])
        if search.save_result is not None:
            save(found, search.save_result)
        if search.save_plan is not None and answer.plans:
            save_options(answer, answer.plans[0], search.save_plan)
        if search.json:
            typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
        else:
            print_answer(answer, Console(highlight=False), search.save_plan)
    if not answer.plans:
        raise typer.Exit(1)


def _calibrated(search: PlanOptions, cluster: ClusterOptions) -> PlanOptions:
    """Fit a hardware file to a measured run, print its errors, and return the options with this hardware."""
    from rich.console import Console

    from jaxserve.sim.calibration.calibrate import calibrate, print_errors, save, server_options
    from jaxserve.sim.calibration.fit import ROUNDS
    from jaxserve.sim.calibration.measured import MeasuredRun

    path = search.save_hardware
    if path is None and search.goodput is not None:
        raise ConfigError("give a file for the fitted hardware, which the plans refer to (--save-hardware FILE.yaml)")
    if path is not None:
        ensure_file(path, "--save-hardware")
    if search.hardware is not None and len(search.hardware_names()) > 1:
        raise ConfigError(f"--hardware is {search.hardware!r}: a run is of one kind of hardware (--calibrate)")
    assert search.calibrate is not None
    run, others = MeasuredRun.read(search.calibrate), [MeasuredRun.read(each) for each in search.check or ()]
    given = {name: value for name, value in given_options(cluster).items() if name in SERVED}
    server = server_options(given | _serve_options(search.serve_args or run.serve_args or ""))
    with progress_bar("fitting", ROUNDS, unit="rounds", keep=False) as bar:
        name = "fitted" if path is None else path.stem
        found = calibrate(run, others, search.hardware, server, lambda: bar.advance(), name)
    print_errors(found, Console(highlight=False))
    if path is None:
        return search
    save(found, path)
    console.print(f"saved {path}", markup=False, soft_wrap=True)
    prices = search.prices()
    price = None if not prices else f"{path}={prices.get(search.hardware or '') or next(iter(prices.values()))}"
    return replace(search, hardware=str(path), price=price)


def _serve_options(arguments: str) -> Given:
    """Return the options that arguments of `jaxserve serve` give. Raise `ConfigError` if they are not valid."""
    from jaxserve.cli.main import app as root
    from jaxserve.server.options import read_config, resolve

    command = typer.main.get_command(root).commands["serve"]  # type: ignore[attr-defined]
    with exit_on_error():
        values = command.make_context("serve", shlex.split(arguments), resilient_parsing=False).params
    config = values.pop("config", None)
    engine, _ = resolve(read_config(config) if config else {}, values)
    return {name: value for name, value in vars(engine).items() if value != getattr(EngineConfig(), name)}
