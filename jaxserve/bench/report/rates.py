"""Throughput and latency against the request rate, from results with different rates."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxserve.bench.report.figure import INK, colour, label_axes, legend, plain_numbers, row_of_axes, scale_y, unit_of
from jaxserve.bench.report.series import RatePoint, rate_point, saturation

MIN_RATES = 3  # for a curve
STATISTICS = (("o-", "median"), ("s:", "P99"))
Curves = dict[str, list[RatePoint]]


def throughput_against_rate(results: Sequence[tuple[str, Mapping[str, Any]]]) -> Figure | None:
    """Draw output tokens per second that the server keeps up with and that arrive, and TTFT.

    Every label measured at three rates or more has a curve. If no label was, all results together make one. None if
    there are fewer than three rates.
    """
    curves = _curves(results)
    if not curves:
        return None
    figure, (throughput, latency) = row_of_axes("Throughput and TTFT against the rate of requests", 2)
    _draw_throughput(throughput, curves)
    _draw_latency(latency, curves)
    legend(figure, throughput, latency)
    return figure


def _curves(results: Sequence[tuple[str, Mapping[str, Any]]]) -> Curves:
    """Return points by label, in order of rate, one for each rate; leave out labels with too few rates."""
    points = [(result.get("label"), point) for _, result in results if (point := rate_point(result))]
    by_label: Curves = {}
    for name, point in points:
        by_label.setdefault(str(name), []).append(point)
    curves = {name: _united(found) for name, found in by_label.items()}
    if any(len(curve) >= MIN_RATES for curve in curves.values()):
        return {name: curve for name, curve in curves.items() if len(curve) >= MIN_RATES}
    together = _united([point for _, point in points])
    return {"all results": together} if len(together) >= MIN_RATES else {}


def _united(points: Sequence[RatePoint]) -> list[RatePoint]:
    """Return one point per rate, the median of its repeats; rates within 1 % count as equal."""
    groups: list[list[RatePoint]] = []
    for point in sorted(points, key=lambda point: point.rate):
        if groups and point.rate <= 1.01 * groups[-1][0].rate:
            groups[-1].append(point)
        else:
            groups.append([point])
    return [_median(group) for group in groups]


def _median(points: Sequence[RatePoint]) -> RatePoint:
    fields = RatePoint.__dataclass_fields__
    return RatePoint(**{name: statistics.median(getattr(point, name) for point in points) for name in fields})


def _draw_throughput(axes: Axes, curves: Curves) -> None:
    for index, (name, points) in enumerate(curves.items()):
        rates = [point.rate for point in points]
        offered = [point.rate * point.output_tokens for point in points]
        served = [tokens * point.served for tokens, point in zip(offered, points, strict=True)]
        asked = "asked for" if index == 0 else None
        axes.plot(rates, offered, "--", color="#999999", linewidth=1.2, label=asked, zorder=1)
        axes.plot(
            rates, served, "o-", color=colour(index), linewidth=1.6, markersize=4, label=_curve_label(name, curves)
        )
        if limit := saturation(points):
            height = float(np.interp(limit, rates, served))
            label = f"saturates at {limit:.3g} req/s"
            axes.plot(limit, height, "D", color=colour(index), markersize=7, markeredgecolor=INK, label=label)
    label_axes(axes, "requests per second", "output tokens per second")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    plain_numbers(axes.yaxis)


def _draw_latency(axes: Axes, curves: Curves) -> None:
    latencies = [
        np.array([[point.median_ttft_s, point.p99_ttft_s] for point in points]).T for points in curves.values()
    ]
    unit = unit_of(latencies)
    for style, statistic in STATISTICS:
        axes.plot([], [], style, color=INK, markersize=4, label=f"{statistic} TTFT")
    for index, (points, found) in enumerate(zip(curves.values(), latencies, strict=True)):
        rates = [point.rate for point in points]
        for values, (style, _) in zip(found, STATISTICS, strict=True):
            axes.plot(rates, values * unit.factor, style, color=colour(index), linewidth=1.6, markersize=4)
    label_axes(axes, "requests per second", f"time to first token, {unit.name}")
    axes.set_xlim(left=0)
    scale_y(axes, log=True)


def _curve_label(name: str, curves: Curves) -> str:
    return "kept up with" if len(curves) == 1 else name
