"""From step logs to a Hardware on which the simulator's steps take as long as they did.

A step takes, with unknowns in capitals,

    layers of each precision  count * roofline(tokens) * X[precision, tokens]
    head                      roofline(rows) * X[head, rows]
    decode attention          bytes of the context / bandwidth * ATTENTION
    prefill attention         operations / rate * PREFILL
    the rest                  STEP + SEQUENCE * decoding sequences, + HOST if the device had nothing to do before

and the fit is least squares over these, none below 0 (`robust`). A share of the roofline is 1 / X;
where bandwidth and rate are nominal numbers it may be above 1. Steps tell most knots apart, not all: a knot is likely
to be as its neighbour, and one of the head as that of the layers, which weighs as much as one step does.
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
from jaxserve.sim.chunk_cost import ChunkCost
from jaxserve.sim.hardware import Curve, Hardware, Overheads
from jaxserve.sim.shape import ModelShape

HELD_OUT = 5  # every fifth step is not fitted to
LEAST = 1e-3  # of an X: a share of the roofline is at most 1000
FEWEST = 50  # steps
MIN_OUTSIDE_S = 1e-5  # s of a request
ROUNDS = 20
TOLERATED = 3.0  # deviations that count in full
MIN_DEVIATION = 0.01  # relative; below it measurements agree
OVERHEADS = ("step", "sequence", "host")  # unknowns that are seconds; the others are of the roofline
Floats = NDArray[np.float64]
Unknown = tuple[str, int]  # name, and tokens or rows of a knot, or 0


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step and how long it took: from the end of the one before, or from its begin if the device had been idle."""

    load: StepLoad
    layers: Mapping[str, int]  # by precision
    head: str  # precision
    idle: bool
    seconds: float
    chunk: tuple[int, int] | None = None  # prefix and length, if it computed one chunk and nothing else


@dataclass(frozen=True)
class Fit:
    """What came of it. Errors are relative, of the steps that were held out."""

    hardware: Hardware
    steps: int
    held_out: int
    median_error: float
    p90_error: float
    total: float  # all predicted seconds together, over the measured ones
    seen: Mapping[Unknown, int]  # steps behind each knot
    chunk_cost: ChunkCost | None  # KunServe's, of steps with one chunk alone; None if there are too few
    chunk_error: float | None  # its mean


def measured_steps(recording: Recording) -> list[MeasuredStep]:
    """The steps of a log, instance by instance. Raises `ConfigError` where blocks run on several devices."""
    heads = []
    for instance in from_yaml(json.dumps(recording.facts["plan"])).instances:
        if sum(stage.tp for stage in instance.stages) > 1:
            raise ConfigError("steps are fitted on one device: tp and pp must be 1")
        heads.append(instance.precision("head"))
    layers = {(plan.instance, plan.version): plan.layers for plan in recording.plans}
    found: list[MeasuredStep] = []
    for number, head in enumerate(heads):
        steps = sorted((s for s in recording.steps if s.instance == number), key=lambda s: s.number)
        for before, step in zip((None, *steps), steps, strict=False):
            idle = before is None or before.ended <= step.begun
            start = step.begun if before is None else max(before.ended, step.begun)
            known = layers[number, step.version]
            found.append(MeasuredStep(step.load, known, head, idle, step.ended - start, _chunk(step)))
    return found


def _chunk(step: Step) -> tuple[int, int] | None:
    if step.chunks != 1 or step.sequences:
        return None
    return step.prefill // step.prompt_tokens - step.prompt_tokens - 1, step.prompt_tokens


def fit(steps: Sequence[MeasuredStep], shape: ModelShape, nominal: Hardware, kv_dtype: str = "auto") -> Fit:
    """`nominal` with the efficiencies and overheads of the steps; its bandwidth and rates are what shares are of.

    Raises `ConfigError` for too few steps, and for precisions that `nominal` has no rate of.
    """
    if len(steps) < FEWEST:
        raise ConfigError(f"{len(steps)} steps are too few to fit, at least {FEWEST} are needed")
    terms = _Terms(steps, shape, nominal, kv_dtype)
    seconds = np.array([step.seconds for step in steps])
    kept = np.arange(len(steps)) % HELD_OUT > 0
    likely = terms.likely / _typical(terms, seconds)
    found = LEAST * terms.shares + robust(
        terms.columns[kept], np.maximum(seconds - LEAST * terms.columns @ terms.shares, 1e-9)[kept], likely
    )
    predicted = terms.columns @ found
    off = np.abs(predicted / seconds - 1)[~kept]
    hardware = _with(nominal, dict(zip(terms.unknowns, found.tolist(), strict=True)))
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
    """Seconds outside of the engine that a request takes, each token of its prompt, and each answer streamed meanwhile.

    From requests: tokens of the prompt, answers that were being streamed when it came, seconds outside.
    """
    tokens, streams, seconds = np.array(outside, float).T
    columns = np.stack([np.ones(len(seconds)), tokens, streams], axis=1)
    request, token, stream = robust(columns, np.maximum(seconds, MIN_OUTSIDE_S), np.zeros((1, 3))).tolist()
    return request, token, stream


class _Terms:
    """What each unknown is multiplied by, step by step."""

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
        self.likely = self._likely()

    def _likely(self) -> Floats:
        """Differences that are probably small: of neighbouring knots, and of the head's and the layers'."""
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


def _typical(terms: _Terms, seconds: Floats) -> float:
    """One X for all that is of the roofline: what differences are measured against."""
    rooflines = terms.columns @ terms.shares
    return float(np.median(seconds / np.maximum(rooflines, 1e-12)))


def _with(nominal: Hardware, found: Mapping[Unknown, float]) -> Hardware:
    """The hardware with what was found in the place of what it had."""
    knots: dict[str, list[tuple[float, float]]] = {}
    for (name, size), value in found.items():
        knots.setdefault(name, []).append((max(size, 1), value))
    curves = {
        name: Curve(tuple((size, 1 / value) for size, value in values))
        for name, values in knots.items()
        if name not in OVERHEADS
    }
    overheads = Overheads(
        step=found["step", 0],
        sequence=found["sequence", 0],
        host=found["host", 0],
        request=nominal.overheads.request,
        prompt_token=nominal.overheads.prompt_token,
        stream=nominal.overheads.stream,
        compile=nominal.overheads.compile,
    )
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


def robust(columns: Floats, wanted: Floats, likely: Floats) -> Floats:
    """The x >= 0 for which `columns` x is near `wanted` [N], all above 0; relative to what x predicts.

    Relative to the prediction and not to the measurement, or small values would count for more than large ones and
    predictions be too low. Huber's weights: what is further off than `TOLERATED` standard deviations (told from the
    median) counts linearly, so that a step in which the machine did something else does not bend the rest; nearer ones
    count as in least squares, and what is predicted is their mean. `likely` x is to be near 0 too; one row of it
    weighs as much as one measurement.
    """
    weights = 1 / wanted**2
    solution = np.zeros(columns.shape[1])
    for _ in range(ROUNDS):
        weighted = columns * weights[:, None]
        solution = non_negative(weighted.T @ columns + likely.T @ likely, weighted.T @ wanted)
        predicted = np.maximum(columns @ solution, 0.1 * wanted)
        off = np.abs(wanted / predicted - 1)
        limit = TOLERATED * max(1.4826 * float(np.median(off)), MIN_DEVIATION)
        weights = np.minimum(1.0, limit / np.maximum(off, 1e-12)) / predicted**2
    return solution


def non_negative(gram: Floats, moment: Floats) -> Floats:
    """The x >= 0 with the least x' `gram` x / 2 - `moment`' x, by an active set (Bro and de Jong, 1997)."""
    scale = np.sqrt(np.maximum(np.diag(gram), 1e-300))
    gram, moment = gram / np.outer(scale, scale) + 1e-12 * np.eye(len(scale)), moment / scale
    solution, free = np.zeros_like(moment), np.zeros(len(moment), bool)
    enough = 1e-10 * np.abs(moment).max(initial=0.0)
    for _ in range(10 * len(moment)):
        slope = np.where(free, -np.inf, moment - gram @ solution)
        if slope.max(initial=-np.inf) <= enough:
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
