"""Calibration of the cost model: fits a `Hardware` to the measured times of steps.

The time of a step is the sum of these terms, with unknowns in capitals:

    layers of each precision  count * roofline(tokens) * X[precision, tokens]
    head                      roofline(rows) * X[head, rows]
    decode attention          bytes of the context / bandwidth * ATTENTION
    prefill attention         operations / rate * PREFILL
    the rest                  STEP + SEQUENCE * decoding sequences, + HOST if the device was idle before

The fit is least squares over the unknowns, none below 0 (`robust_fit`). A share of the roofline is 1 / X. It may be
above 1, because bandwidth and rate are nominal numbers. Steps determine most knots, but not all. A prior therefore
pulls each knot towards its neighbour, and each knot of the head towards that of the layers, with the weight of one
step.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from jaxserve.control.plan_yaml import from_yaml
from jaxserve.core.errors import ConfigError
from jaxserve.core.step_load import StepLoad
from jaxserve.engine.step_log import Recording, Step
from jaxserve.scheduler.chunk_cost import ChunkCost
from jaxserve.sim.hardware import Curve, Hardware
from jaxserve.sim.shape import ModelShape

HELD_OUT = 5  # every fifth step is held out of the fit
MIN_X = 1e-3  # a share of the roofline is at most 1000
MIN_STEPS = 50
MIN_OUTSIDE_S = 1e-5  # of a request
ROUNDS = 20
MAX_DEVIATIONS = 3.0  # standard deviations up to which errors count as squares
MIN_DEVIATION = 0.01  # relative; the smallest standard deviation that is assumed
OVERHEADS = ("step", "sequence", "host")  # unknowns in seconds; the other unknowns scale a roofline
Floats = NDArray[np.float64]
Unknown = tuple[str, int]  # (name, tokens or rows of the knot; 0 if it has none)


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A recorded step and its time.

    The time counts from the end of the previous step, or from the begin of this one if the device was idle.
    """

    load: StepLoad
    layers: Mapping[str, int]  # number of layers by precision
    head: str  # precision
    idle: bool  # the device was idle before
    seconds: float
    chunk: tuple[int, int] | None = None  # (prefix, length) if the step computed one chunk and nothing else


@dataclass(frozen=True)
class Fit:
    """A fitted hardware, with relative errors of the steps that were held out of the fit."""

    hardware: Hardware
    steps: int
    held_out: int
    median_error: float
    p90_error: float
    total: float  # sum of the predicted times over the sum of the measured ones
    seen: Mapping[Unknown, int]  # number of steps that depend on each unknown
    chunk_cost: ChunkCost | None  # KunServe's model, fitted to steps with one chunk alone; None if there are too few
    chunk_error: float | None  # mean relative error of `chunk_cost`


def measured_steps(recording: Recording) -> list[MeasuredStep]:
    """Return the steps of a step log, instance by instance. Raise `ConfigError` if an instance has several devices."""
    heads = []
    for instance in from_yaml(json.dumps(recording.facts["plan"])).instances:
        if sum(stage.tp for stage in instance.stages) > 1:
            raise ConfigError("the recorded instances have several devices: tp and pp must be 1 for a fit")
        heads.append(instance.precision("head"))
    layers = {(plan.instance, plan.version): plan.layers for plan in recording.plans}
    found: list[MeasuredStep] = []
    for index, head in enumerate(heads):
        steps = sorted((s for s in recording.steps if s.instance == index), key=lambda s: s.number)
        for before, step in zip((None, *steps), steps, strict=False):
            idle = before is None or before.ended <= step.begun
            start = step.begun if before is None else max(before.ended, step.begun)
            precisions = layers[index, step.version]
            found.append(MeasuredStep(step.load, precisions, head, idle, step.ended - start, _chunk(step)))
    return found


def _chunk(step: Step) -> tuple[int, int] | None:
    if step.chunks != 1 or step.sequences:
        return None
    return step.prefill // step.prompt_tokens - step.prompt_tokens - 1, step.prompt_tokens


def fit(steps: Sequence[MeasuredStep], shape: ModelShape, nominal: Hardware, kv_dtype: str = "auto") -> Fit:
    """Fit the efficiencies and overheads of `nominal` to measured steps.

    The fitted efficiencies are shares of the bandwidth and rates of `nominal`. Raise `ConfigError` for fewer than
    `MIN_STEPS` steps, and for a precision that `nominal` has no rate of.
    """
    if len(steps) < MIN_STEPS:
        raise ConfigError(f"{len(steps)} steps are too few to fit: at least {MIN_STEPS} are needed")
    terms = _Terms(steps, shape, nominal, kv_dtype)
    seconds = np.array([step.seconds for step in steps])
    kept = np.arange(len(steps)) % HELD_OUT > 0
    prior = terms.prior / _typical_x(terms, seconds)
    found = MIN_X * terms.shares + robust_fit(
        terms.columns[kept], np.maximum(seconds - MIN_X * terms.columns @ terms.shares, 1e-9)[kept], prior
    )
    predicted = terms.columns @ found
    off = np.abs(predicted / seconds - 1)[~kept]
    hardware = _with_fitted(nominal, dict(zip(terms.unknowns, found.tolist(), strict=True)))
    cost, error = _chunk_cost(steps, hardware.overheads.host)
    return Fit(
        hardware,
        len(steps),
        int((~kept).sum()),
        float(np.median(off)),
        float(np.quantile(off, 0.9)),
        float(predicted[~kept].sum() / seconds[~kept].sum()),
        dict(zip(terms.unknowns, np.count_nonzero(terms.columns, axis=0).tolist(), strict=True)),
        cost,
        error,
    )


def fit_frontend(outside: Sequence[tuple[int, int, float]]) -> tuple[float, float, float]:
    """Fit the time outside of the engine: seconds for each request, each prompt token, and each streamed answer.

    `outside` has for each request its prompt tokens, the answers being streamed at its arrival, and its seconds outside
    of the engine.
    """
    tokens, streams, seconds = np.array(outside, float).T
    columns = np.stack([np.ones(len(seconds)), tokens, streams], axis=1)
    request, token, stream = robust_fit(columns, np.maximum(seconds, MIN_OUTSIDE_S), np.zeros((1, 3))).tolist()
    return request, token, stream


class _Terms:
    """The factors of the unknowns in the time of each step, `columns` [steps, unknowns]."""

    def __init__(self, steps: Sequence[MeasuredStep], shape: ModelShape, hardware: Hardware, kv_dtype: str):
        loads = [step.load for step in steps]
        tokens, rows = np.array([load.tokens for load in loads]), np.array([load.rows for load in loads])
        count = np.array([sum(step.layers.values()) for step in steps])
        named: dict[Unknown, Floats] = {}
        self.precisions = sorted({precision for step in steps for precision in step.layers})
        for precision in self.precisions:
            layers = np.array([step.layers.get(precision, 0) for step in steps])
            for size in sorted(set(tokens[layers > 0].tolist())):
                reading = shape.read_bytes(precision, size) / hardware.bandwidth
                roofline = max(reading, size * shape.layer_ops() / hardware.rate(precision))
                named[precision, size] = layers * (tokens == size) * roofline
        for size in sorted(set(rows.tolist())):
            rooflines = {
                precision: max(
                    shape.head_bytes(precision) / hardware.bandwidth, size * shape.head_ops() / hardware.rate(precision)
                )
                for precision in {step.head for step in steps}
            }
            named["head", size] = np.array([rooflines[step.head] for step in steps]) * (rows == size)
        read = shape.kv_bytes_per_token(1, kv_dtype, hardware.platform) / hardware.bandwidth
        named["attention", 0] = count * [load.context * read for load in loads]
        pair = shape.attention_ops() / hardware.rate(shape.dtype)
        named["prefill", 0] = count * [load.prefill * pair for load in loads]
        named["step", 0] = np.ones(len(steps))
        named["sequence", 0] = np.array([load.sequences for load in loads], float)
        named["host", 0] = np.array([step.idle for step in steps], float)
        self.unknowns = tuple(named)
        self.columns = np.stack(list(named.values()), axis=1)
        self.shares = np.array([name not in OVERHEADS for name, _ in self.unknowns], float)
        self.prior = self._prior()

    def _prior(self) -> Floats:
        """Return rows whose product with the unknowns is probably small.

        These are the differences of neighbouring knots, and of knots of the head from those of the layers.
        """
        pairs: list[tuple[Unknown, Unknown]] = []
        for name in (*self.precisions, "head"):
            pairs += pairwise(self._knots(name))
        for head in self._knots("head"):
            pairs += [(head, min(self._knots(self.precisions[0]), key=lambda knot: abs(knot[1] - head[1])))]
        place = {unknown: index for index, unknown in enumerate(self.unknowns)}
        rows = np.zeros((len(pairs), len(self.unknowns)))
        for row, (one, other) in zip(rows, pairs, strict=True):
            row[place[one]], row[place[other]] = 1.0, -1.0
        return rows

    def _knots(self, name: str) -> list[Unknown]:
        return [unknown for unknown in self.unknowns if unknown[0] == name]


def _typical_x(terms: _Terms, seconds: Floats) -> float:
    """Return the X that explains the median step if all its time is roofline. It scales the prior."""
    rooflines = terms.columns @ terms.shares
    return float(np.median(seconds / np.maximum(rooflines, 1e-12)))


def _with_fitted(nominal: Hardware, found: Mapping[Unknown, float]) -> Hardware:
    """Return the hardware with fitted efficiencies and overheads."""
    knots: dict[str, list[tuple[float, float]]] = {}
    for (name, size), value in found.items():
        knots.setdefault(name, []).append((max(size, 1), value))
    curves = {
        name: Curve(tuple((size, 1 / value) for size, value in values))
        for name, values in knots.items()
        if name not in OVERHEADS
    }
    fitted = {name: found[name, 0] for name in OVERHEADS}
    overheads = replace(nominal.overheads, layer=0.0, **fitted)
    rates = {name: nominal.rate(name) for name in curves if name not in ("attention", "prefill", "head")}
    return replace(nominal, measured=True, rates=rates, efficiency=curves, overheads=overheads)


def _chunk_cost(steps: Iterable[MeasuredStep], host: float) -> tuple[ChunkCost | None, float | None]:
    alone = [step for step in steps if step.chunk is not None]
    chunks = [step.chunk for step in alone if step.chunk is not None]
    seconds = [max(step.seconds - host * step.idle, 1e-9) for step in alone]
    prefixes, lengths = [prefix for prefix, _ in chunks], [length for _, length in chunks]
    try:
        cost = ChunkCost.fit(prefixes, lengths, seconds)
    except ConfigError:
        return None, None
    return cost, cost.error(prefixes, lengths, seconds)


# -- least squares


def robust_fit(columns: Floats, wanted: Floats, prior: Floats) -> Floats:
    """Return the x >= 0 for which `columns` x is near `wanted` [N], whose values are above 0, despite outliers.

    Errors are relative to the prediction. Relative to the measurement, small values would count for more than large
    ones and predictions would be too low. Weights are Huber's: errors beyond `MAX_DEVIATIONS` standard deviations,
    estimated from the median, count linearly, so that steps in which the machine did something else do not distort the
    fit. Smaller errors count as squares, so that the prediction is a mean. `prior` x is pulled to 0; each of its rows
    has the weight of one measurement.
    """
    weights = 1 / wanted**2
    solution = np.zeros(columns.shape[1])
    for _ in range(ROUNDS):
        weighted = columns * weights[:, None]
        solution = non_negative(weighted.T @ columns + prior.T @ prior, weighted.T @ wanted)
        predicted = np.maximum(columns @ solution, 0.1 * wanted)
        off = np.abs(wanted / predicted - 1)
        limit = MAX_DEVIATIONS * max(1.4826 * float(np.median(off)), MIN_DEVIATION)
        weights = np.minimum(1.0, limit / np.maximum(off, 1e-12)) / predicted**2
    return solution


def non_negative(gram: Floats, moment: Floats) -> Floats:
    """Return the x >= 0 that minimizes x' `gram` x / 2 - `moment`' x, by an active set (Bro and de Jong, 1997)."""
    scale = np.sqrt(np.maximum(np.diag(gram), 1e-300))
    gram, moment = gram / np.outer(scale, scale) + 1e-12 * np.eye(len(scale)), moment / scale
    solution, free = np.zeros_like(moment), np.zeros(len(moment), bool)
    tolerance = 1e-10 * np.abs(moment).max(initial=0.0)
    for _ in range(10 * len(moment)):
        slope = np.where(free, -np.inf, moment - gram @ solution)
        if slope.max(initial=-np.inf) <= tolerance:
            break
        free[slope.argmax()] = True
        while True:
            trial = np.zeros_like(solution)
            trial[free] = np.linalg.solve(gram[np.ix_(free, free)], moment[free])
            below = free & (trial <= 0)
            if not below.any():
                break
            step = (solution[below] / (solution[below] - trial[below])).min()
            solution = np.where(free, solution + step * (trial - solution), 0.0)
            free &= solution > 1e-14
        solution = trial
    return solution / scale
