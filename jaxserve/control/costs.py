"""Costs: the time of a step under any plan, as policies see it before they propose one.

A `CostModel` is computed from the rates of some hardware (the simulator's `RooflineModel`), or measured on the machine
that serves (`MeasuredCosts`, filled by `executor.timing`). Measured costs add up:

    step = rest(tokens, rows) + the sum over decoder layers of
           layer[kind, precision](tokens) + per_context[kind] * context + per_prefill[kind] * prefill

The rest is the time of inputs, embedding, head, sampler and host. `context` and `prefill` are those of `StepLoad`.
Where all that a step runs is fused into one program, the step without attention is measured as a whole.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any, Protocol

from jaxserve.control.plan import InstancePlan
from jaxserve.core.errors import ConfigError
from jaxserve.core.step_load import StepLoad

USUAL_ROWS = 4  # decode rows of a server under moderate load


class InstanceCost(Protocol):
    """Step times of one instance under one plan."""

    def seconds(self, load: StepLoad) -> float:
        """Return the time (s) of a step, from the end of the previous step. It is linear in the load's context."""
        ...


class CostModel(Protocol):
    """Step times for any plan."""

    def of(self, instance: InstancePlan) -> InstanceCost:
        """Return the step times of an instance under a plan.

        Raise `ConfigError` for a precision whose costs are unknown.
        """
        ...


@dataclass(frozen=True)
class Curve:
    """A time (s) by a size: linear between measured sizes, beyond the largest as between the last two."""

    points: tuple[tuple[int, float], ...]  # (size, s), the sizes ascending

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)):
            raise ValueError(f"the sizes of a curve are {sizes}: they must ascend, and there must be one")
        if not all(isfinite(seconds) and seconds >= 0 for _, seconds in self.points):
            raise ValueError(f"the points of a curve are {self.points}: no time may be negative or infinite")

    def __call__(self, size: float) -> float:
        """Return the time (s) of a size; at most the smallest measured size costs as much as that one."""
        points = self.points
        if size <= points[0][0] or len(points) == 1:
            return points[0][1]
        index = next((index for index in range(1, len(points)) if size <= points[index][0]), len(points) - 1)
        (before, low), (after, high) = points[index - 1], points[index]
        return max(0.0, low + (high - low) * (size - before) / (after - before))


@dataclass(frozen=True)
class LayerCosts:
    """Measured times of one decoder layer of some kind."""

    by_precision: Mapping[str, Curve]  # s without attention, by tokens
    per_context: float  # s for each token that a decode attends to
    per_prefill: float  # s for each unit of `StepLoad.prefill`


@dataclass(frozen=True)
class MeasuredCosts:
    """A cost model of measured times, on the placements at which they were measured (`CostModel`)."""

    kinds: tuple[str, ...]  # kind of each decoder layer: layers of equal kind and precision take equal times
    layers: Mapping[str, LayerCosts]  # by kind
    rest: Curve  # s of a step without its layers, by rows of the head
    per_token: float  # s of the rest for each token more than there are rows
    # s of steps that only decode, without attention, by rows; by the precisions of all layers, where steps are fused.
    fused: Mapping[tuple[str, ...], Curve] = field(default_factory=dict)

    def of(self, instance: InstancePlan) -> "MeasuredInstance":
        """Return the step times of an instance. Raise `ConfigError` for a precision that was not measured."""
        return MeasuredInstance(self, instance)

    def layer_seconds(self, precision: str, tokens: int) -> float:
        """Return the time (s) of all decoder layers in one precision, without attention."""
        counts = Counter(self.kinds)
        return sum(count * self.layers[kind].by_precision[precision](tokens) for kind, count in counts.items())

    @property
    def plausible(self) -> bool:
        """True if all layers take time. Otherwise the times were measured on a machine that was too busy."""
        curves = [curve for kind in self.layers.values() for curve in kind.by_precision.values()]
        curves += self.fused.values()
        return all(seconds > 0 for curve in curves for _, seconds in curve.points)

    def to_dict(self) -> dict[str, Any]:
        """Return the costs as values for JSON."""
        return {**asdict(self), "fused": [[list(names), asdict(curve)] for names, curve in self.fused.items()]}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "MeasuredCosts":
        """Return the costs that `to_dict` returned, also after they went through JSON.

        Raise `ValueError`, `TypeError`, `KeyError` or `AttributeError` for any other value.
        """
        layers = {
            kind: LayerCosts(
                {precision: _curve(curve) for precision, curve in costs["by_precision"].items()},
                float(costs["per_context"]),
                float(costs["per_prefill"]),
            )
            for kind, costs in value["layers"].items()
        }
        kinds = tuple(value["kinds"])
        if missing := set(kinds) - layers.keys():
            raise ValueError(f"there are no costs of layers of kind {', '.join(sorted(missing))}")
        fused = {tuple(precisions): _curve(curve) for precisions, curve in value["fused"]}
        return cls(kinds, layers, _curve(value["rest"]), float(value["per_token"]), fused)


class MeasuredInstance:
    """Measured step times of one instance under one plan (`InstanceCost`)."""

    def __init__(self, costs: MeasuredCosts, instance: InstancePlan):
        self._costs = costs
        self._layers = Counter(zip(costs.kinds, instance.layer_precisions, strict=True))
        for kind, precision in self._layers:
            if precision not in (known := costs.layers[kind].by_precision):
                raise ConfigError(f"the costs of {precision} layers are unknown: measured were {', '.join(known)}")
        self._fused = costs.fused.get(instance.layer_precisions)
        self._per_context = sum(costs.layers[kind].per_context for kind in costs.kinds)
        self._per_prefill = sum(costs.layers[kind].per_prefill for kind in costs.kinds)
        self._fixed: dict[tuple[int, int], float] = {}  # s, by (tokens, rows), which are as few as step shapes

    def seconds(self, load: StepLoad) -> float:
        """Return the time (s) of a step."""
        fixed = self._fixed.get((load.tokens, load.rows))
        if fixed is None:
            fixed = self._fixed[load.tokens, load.rows] = self._without_attention(load.tokens, load.rows)
        return fixed + self._per_context * load.context + self._per_prefill * load.prefill

    def _without_attention(self, tokens: int, rows: int) -> float:
        costs = self._costs
        if tokens <= rows and self._fused is not None:
            return self._fused(rows)
        layers = sum(
            count * costs.layers[kind].by_precision[precision](tokens)
            for (kind, precision), count in self._layers.items()
        )
        return layers + costs.rest(rows) + costs.per_token * max(0, tokens - rows)


def slow_precisions(costs: MeasuredCosts, full: str, max_rows: int) -> list[str]:
    """Return a sentence for each precision that is not faster than full precision, at few and at many decode rows.

    `full` is full precision, and `max_rows` are the decode rows of the largest step. Where steps are fused, precisions
    that no fused step has in all layers are left out: nothing that is measured tells how fast they are.
    """
    measured = set.intersection(*(set(kind.by_precision) for kind in costs.layers.values()))
    sizes = (min(USUAL_ROWS, max_rows), 1, max_rows)

    def seconds(precision: str, rows: int) -> float:
        fused = costs.fused.get((precision,) * len(costs.kinds))
        return costs.layer_seconds(precision, rows) if fused is None else fused(rows)

    sentences = []
    for precision in sorted(measured - {full}) if full in measured else ():
        if costs.fused and not {(name,) * len(costs.kinds) for name in (precision, full)} <= costs.fused.keys():
            continue
        usual, least, most = (seconds(precision, rows) / max(seconds(full, rows), 1e-9) for rows in sizes)
        if usual >= 1 and most >= 1:
            what = "steps" if costs.fused else "layers"
            sentences.append(
                f"{what} in {precision} take {usual:.2f}x the time of {full} at {sizes[0]} decode rows here "
                f"({least:.2f}x at 1, {most:.2f}x at {max_rows}): adaptation can gain KV pages, but no speed"
            )
    return sentences


def _curve(value: Mapping[str, Any]) -> Curve:
    return Curve(tuple((int(size), float(seconds)) for size, seconds in value["points"]))
