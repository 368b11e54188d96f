"""The commands of `jaxserve sim`, which import their implementation only when they run, so that --help is fast."""

import sys

import typer

from jaxserve.bench.interrupts import signals_as_ctrl_c
from jaxserve.bench.options import ArrivalOptions, DatasetOptions, ResultOptions, TraceOptions
from jaxserve.cli.app import App, BenchGroup
from jaxserve.cli.options import expand_options
from jaxserve.cli.terminal import exit_with_status
from jaxserve.sim.options import ClusterOptions, FigureOptions

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
