"""`--calibrate`: from measured runs to a hardware file, and what its predictions are worth."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxserve.console.tables import print_table
from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.core.files import write_file
from jaxserve.sim.calibration.base import NOMINAL, base_hardware, with_precisions
from jaxserve.sim.calibration.factors import Factors, names_of
from jaxserve.sim.calibration.fit import Errors, errors_of, fit_factors, with_errors
from jaxserve.sim.calibration.measured import MeasuredRun
from jaxserve.sim.cluster import Cluster, resolve_cluster
from jaxserve.sim.hardware import Hardware, to_yaml
from jaxserve.sim.shape import ModelShape

ADAPTIVE = "the measured server must have had the policy static: a fit needs layers that do not change"


@dataclass(frozen=True)
class Calibration:
    """A fitted hardware, with the errors of each run: of the one that it was fitted to, and then of others."""

    hardware: Hardware
    base: Hardware
    factors: Factors
    errors: tuple[tuple[str, dict[str, Errors]], ...]


def calibrate(
    run: MeasuredRun,
    others: Sequence[MeasuredRun],
    hardware: str | None,
    server: EngineConfig,
    progress: Callable[[], None],
    name: str,
) -> Calibration:
    """Fit a hardware, by default that of the run's machine, to a run of a server with the options `server`.

    The errors in the hardware are those of `others`, which it was not fitted to, if there are any; the largest counts.
    Raise `ConfigError` if the options do not fit together, and `MemoryBudgetError` if the model does not fit.
    """
    if server.policy != "static":
        raise ConfigError(ADAPTIVE)
    base = base_hardware(hardware, run)
    shape = ModelShape.load(server.model if server.model is not None else bundled_model_path())

    def resolve(hardware: Hardware, measured: MeasuredRun = run) -> Cluster:
        pages = measured.kv_pages // server.dp if measured.kv_pages and server.kv_pages is None else server.kv_pages
        return resolve_cluster(replace(server, kv_pages=pages, prefix_caching=False), shape, hardware)

    if base.source == NOMINAL:  # it knows nothing of precisions that were not measured
        plan = resolve(base).memory.plan.instances[0]
        base = with_precisions(base, {shape.dtype, *(block.precision for block in plan.blocks)})
    factors = fit_factors(run, base, resolve, progress)
    fitted = factors.applied(base)
    errors = tuple((each.name, errors_of(resolve(fitted, each), each)) for each in (run, *others))
    worst = {
        metric: max((found[metric] for _, found in errors[1:] or errors), key=lambda each: each.median)
        for metric in errors[0][1]
    }
    source = f"{base.source}; fitted by `jaxserve sim plan --calibrate` to {run.name} ({run.date}), model {shape.name}"
    hardware_found = replace(with_errors(fitted, worst), name=name, source=source)
    return Calibration(hardware_found, base, factors, errors)


def server_options(given: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration of a server whose options were `given`."""
    return EngineConfig(**{name: value for name, value in given.items() if name in EngineConfig.__dataclass_fields__})


def print_errors(found: Calibration, console: Console) -> None:
    """Print the fitted numbers, and the errors of predicted latencies of single requests in each run."""
    rows = found.factors.lines(Factors.of(found.base), host="host" in names_of(found.base))
    print_table(["fitted", found.base.name, found.hardware.name], [list(row) for row in rows], console)
    lines = [
        [name, metric.upper(), f"{each.median:.1%}", f"{each.p95:.1%}", f"{each.bias:+.1%}"]
        for name, errors in found.errors
        for metric, each in errors.items()
    ]
    print_table(["run", "latency", "median error", "P95 of errors", "of the median"], lines, console)
    held_out = "the others were not fitted" if len(found.errors) > 1 else "give a run at another rate with --check"
    text = f"errors of simulated requests; the hardware is fitted to {found.errors[0][0]}, {held_out}"
    console.print(text, markup=False, soft_wrap=True)


def save(found: Calibration, path: Path) -> None:
    """Write the hardware file. Raise `ConfigError` if it cannot be written."""
    write_file(path, to_yaml(found.hardware))
