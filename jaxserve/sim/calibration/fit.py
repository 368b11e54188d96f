"""The fit of a hardware's factors to a measured run, and the errors of simulated latencies.

The run's requests are simulated with the arrivals and lengths that it had, and the factors are changed until the
latencies of single requests are those that were measured: least squares of the logarithms of simulated over measured
TTFT, TPOT and E2EL, by Levenberg and Marquardt's method with differences for derivatives. Large errors count linearly,
so that the fit follows the median. A weak pull holds factors that the run does not determine where the file has them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from jaxserve.sim.build import build_simulation
from jaxserve.sim.calibration.factors import Factors, from_logs, names_of, to_logs
from jaxserve.sim.calibration.measured import MeasuredRun
from jaxserve.sim.cluster import Cluster
from jaxserve.sim.hardware import LATENCIES, Hardware
from jaxserve.sim.request_columns import Floats, RequestColumns
from jaxserve.sim.workload import SimWorkload

MAX_REQUESTS = 400  # the first of a run, to which the hardware is fitted
ROUNDS = 30
DIFFERENCE = 0.1  # of a logarithm, for derivatives
PULL = 0.01  # weight of the file's own factors, as that of a share of a request's error
LARGE = 0.1  # logarithm from which on errors count linearly
MAX_CHANGE = 1.5  # of a logarithm in one round
FIRST_DAMPING = 0.1
ENOUGH = 1e-3  # relative decrease of the loss below which the fit ends
UNANSWERED = 3.0  # logarithm that stands for a simulated request without an answer


@dataclass(frozen=True)
class Errors:
    """Relative errors of simulated latencies of single requests."""

    median: float
    p95: float
    bias: float  # of the median latency: above 0 if simulated ones are too long


def simulated_latencies(cluster: Cluster, workload: SimWorkload) -> dict[str, Floats]:
    """Return the latencies (s) of each request; NaN for requests without an answer, and TPOTs of one token."""
    columns = RequestColumns(workload.trace)
    for answered in build_simulation(cluster, detailed=False, interval=0.0).simulation.run(workload.requests()):
        columns.take(answered)
    gaps = columns.output_tokens - 1
    tpot = np.divide(columns.last_s - columns.first_s, gaps, out=np.full(len(gaps), np.nan), where=gaps > 0)
    ttft, whole = columns.first_s - columns.arrival_s, columns.last_s - columns.arrival_s
    return dict(zip(LATENCIES, (ttft, tpot, whole), strict=True))


def errors_of(cluster: Cluster, run: MeasuredRun) -> dict[str, Errors]:
    """Return the errors of a simulation of a run, by metric."""
    simulated, found = simulated_latencies(cluster, run.workload), {}
    for name, measured in run.latencies.items():
        known = ~np.isnan(measured)
        seen = np.where(np.isnan(simulated[name]), np.inf, simulated[name])[known]
        off = np.abs(seen / measured[known] - 1)
        bias = float(np.median(seen) / np.median(measured[known]) - 1)
        found[name] = Errors(float(np.median(off)), float(np.percentile(off, 95)), bias)
    return found


def fit_factors(
    run: MeasuredRun, hardware: Hardware, resolve: Callable[[Hardware], Cluster], progress: Callable[[], None]
) -> Factors:
    """Return the factors with which the simulated run is most like the measured one.

    `resolve` returns the server's cluster on a hardware. `progress` is called after each round.
    """
    part = _first(run, MAX_REQUESTS)
    names = names_of(hardware)
    start = to_logs(Factors.of(hardware), names)

    def residuals(logs: Floats) -> Floats:
        simulated = simulated_latencies(resolve(from_logs(logs, names).applied(hardware)), part.workload)
        return np.concatenate([_logs(simulated[name], part.latencies[name]) for name in LATENCIES])

    logs, damping = start, FIRST_DAMPING
    current = residuals(logs)
    for _ in range(ROUNDS):
        progress()
        steps = DIFFERENCE * np.eye(len(logs))
        slopes = np.stack([residuals(logs + step) - residuals(logs - step) for step in steps]) / (2 * DIFFERENCE)
        weights = 1 / np.maximum(np.abs(current), LARGE)
        before = _loss(current, logs - start)
        for _ in range(4):
            system = (slopes * weights) @ slopes.T + (PULL / LARGE) * np.eye(len(logs))
            system += damping * np.diag(np.diag(system))
            change = np.linalg.solve(system, -(slopes * weights) @ current - (PULL / LARGE) * (logs - start))
            trial = logs + np.clip(change, -MAX_CHANGE, MAX_CHANGE)
            tried = residuals(trial)
            if _loss(tried, trial - start) < before:
                break
            damping *= 4
        else:
            break
        logs, current, damping = trial, tried, damping / 8
        if before - _loss(current, logs - start) < ENOUGH * before:
            break
    return from_logs(logs, names)


def with_errors(hardware: Hardware, errors: Mapping[str, Errors]) -> Hardware:
    """Return the hardware with the median errors that its predictions were found to have."""
    return replace(hardware, measured=True, errors={name: round(each.median, 4) for name, each in errors.items()})


def _first(run: MeasuredRun, count: int) -> MeasuredRun:
    trace = run.workload.trace
    if len(trace) <= count:
        return run
    part = trace.changed("first", {"requests": count}, **trace.taken(np.arange(count)))
    latencies = {name: values[:count] for name, values in run.latencies.items()}
    return replace(run, workload=replace(run.workload, trace=part), latencies=latencies)


def _logs(simulated: Floats, measured: Floats) -> Floats:
    known = ~np.isnan(measured)
    with np.errstate(divide="ignore"):
        return np.nan_to_num(np.log(simulated[known] / measured[known]), nan=UNANSWERED, posinf=UNANSWERED)


def _loss(residuals: Floats, change: Floats) -> float:
    """Return the sum of Huber's losses of errors, and of the pull."""
    size = np.abs(residuals)
    huber = np.where(size <= LARGE, size**2 / LARGE, 2 * size - LARGE)
    return float(huber.sum() + PULL / LARGE * (change**2).sum())
