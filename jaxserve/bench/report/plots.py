"""The plots of a report. Each overlays all results, or is None if there is nothing to show."""

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxserve.bench.report import series
from jaxserve.bench.report.figure import (
    INK,
    Unit,
    colour,
    count_y,
    label_axes,
    legend,
    one_axes,
    plain_numbers,
    row_of_axes,
    scale_y,
    unit_of,
    wide_spread,
)
from jaxserve.bench.report.rates import throughput_against_rate
from jaxserve.bench.report.runs import Arrays, PlottedRun, united

TIME = "time after the start of the run, s"
DETAILED = 3  # results for which single requests are drawn; for more, only medians are
PER_POINT = 10  # requests per interval whose percentiles make a point
FAR = 1.5  # objectives beyond this factor of the largest latency are not drawn
GREY, FAILURE = "#bbbbbb", "#cc0000"
STATISTICS = ((50, "-", "median"), (95, ":", "P95"))
LATENCIES = {"ttft": "time to first token", "tpot": "time per output token", "e2el": "end-to-end latency"}


Plot = Callable[[Sequence[PlottedRun]], Figure | None]


def latency_over_time(metric: str) -> Plot:
    """Return a plot of TTFT or TPOT at each request's arrival, with median and 95th percentile per interval."""

    def draw(runs: Sequence[PlottedRun]) -> Figure | None:
        values = [run.requests.metric(metric) for run in runs]
        if not any(np.isfinite(v).any() for v in values):
            return None
        unit, detailed = unit_of(values), len(runs) <= DETAILED
        quantity = LATENCIES[metric] if detailed else f"median {LATENCIES[metric]}"
        figure, axes = one_axes(f"{metric.upper()} over time", "arrival of the request, s", f"{quantity}, {unit.name}")
        last = max(run.requests.arrival_s.max(initial=0) for run in runs)
        width = series.bin_width(last, max(map(len, values)), PER_POINT)
        drawn = united(runs, lambda run: (run.requests.arrival_s, run.requests.metric(metric)))
        for index, run in drawn:
            arrival, found, shade = run.requests.arrival_s, values[index], colour(index)
            if detailed:
                axes.scatter(arrival, found * unit.factor, s=6, color=shade, alpha=0.35, linewidths=0)
            for percentile, style, name in STATISTICS if detailed else STATISTICS[:1]:
                times, points = series.binned(arrival, found, width, percentile)
                label = run.name if not detailed else name if len(runs) == 1 else f"{run.name}: {name}"
                # A line through a single point would be invisible.
                dot = "o" if np.isfinite(points).sum() == 1 else None
                axes.plot(
                    times,
                    points * unit.factor,
                    style,
                    color=shade,
                    linewidth=1.6,
                    marker=dot,
                    markersize=4,
                    label=label,
                )
        scale_y(axes, log=wide_spread(values))
        _finish_time(figure, axes, runs)
        return figure

    return draw


def latency_cdfs(runs: Sequence[PlottedRun]) -> Figure | None:
    """Draw the share of requests within a latency: TTFT, TPOT and E2EL side by side, with any objectives."""
    metrics = [name for name in LATENCIES if any(np.isfinite(run.requests.metric(name)).any() for run in runs)]
    if not metrics:
        return None
    figure, all_axes = row_of_axes("Distribution of latencies", len(metrics))
    for metric, axes in zip(metrics, all_axes, strict=True):
        values = [run.requests.metric(metric) for run in runs]
        unit = unit_of(values)
        for index, run in united(runs, _of_requests(metric)):
            ordered, shares = series.cdf(values[index])
            axes.step(ordered * unit.factor, shares, where="post", color=colour(index), linewidth=1.6, label=run.name)
        _mark_objectives(axes, runs, metric, unit, max(np.nanmax(v, initial=0.0) for v in values))
        label_axes(axes, f"{metric.upper()}, {unit.name}", "share of requests" if axes is all_axes[0] else "")
        axes.set_ylim(0, 1.02)
        if wide_spread(values):
            axes.set_xscale("log")
            plain_numbers(axes.xaxis)
        else:
            axes.set_xlim(left=0)
    legend(figure, all_axes[0])
    return figure


def _of_requests(metric: str) -> Callable[[PlottedRun], Arrays]:
    return lambda run: (run.requests.metric(metric),)


def _mark_objectives(axes: Axes, runs: Sequence[PlottedRun], metric: str, unit: Unit, largest_s: float) -> None:
    """Draw dashed lines at the objectives, except those so far off that they would squeeze the requests."""
    for limit in {slo[metric] / 1e3 for run in runs if metric in (slo := run.result.get("slo") or {})}:
        if limit <= FAR * largest_s:
            at = limit * unit.factor
            axes.axvline(at, color=INK, linestyle="--", linewidth=1)
            axes.annotate("SLO", (at, 0.03), (3, 0), textcoords="offset points", fontsize=8, color=INK)


def arrivals_and_completions(runs: Sequence[PlottedRun]) -> Figure | None:
    """Draw requests per second that arrived, completed and failed."""
    if not any(len(run.requests.arrival_s) for run in runs):
        return None
    figure, axes = one_axes("Arrivals and completions", TIME, "requests per second")
    width = series.bin_width(max(run.end_s for run in runs), max(len(run.requests.end_s) for run in runs))
    _draw_arrivals(axes, runs, width)
    for index, run in united(runs, lambda run: (run.requests.end_s, run.requests.failed.astype(float))):
        requests, prefix = run.requests, f"{run.name}: " if len(runs) > 1 else ""
        edges, completed = series.rate(requests.end_s[~requests.failed], width, run.end_s)
        axes.stairs(completed, edges, color=colour(index), linewidth=1.6, baseline=None, label=f"{prefix}completions")
        if requests.failed.any():
            edges, failed = series.rate(requests.end_s[requests.failed], width, run.end_s)
            axes.stairs(
                failed, edges, color=FAILURE, linewidth=1.4, linestyle=":", baseline=None, label=f"{prefix}failures"
            )
    axes.set_ylim(bottom=0)
    _finish_time(figure, axes, runs)
    return figure


def _draw_arrivals(axes: Axes, runs: Sequence[PlottedRun], width_s: float) -> None:
    """Draw arrivals once in grey if all results share them, else in each result's colour if there are few results."""
    same = all(np.array_equal(run.requests.arrival_s, runs[0].requests.arrival_s) for run in runs)
    for index, run in enumerate(runs[:1] if same else runs if len(runs) <= DETAILED else ()):
        edges, arrived = series.rate(run.requests.arrival_s, width_s, run.end_s)
        shade, alpha, label = (GREY, 0.7, "arrivals") if same else (colour(index), 0.2, f"{run.name}: arrivals")
        axes.stairs(arrived, edges, fill=True, color=shade, alpha=alpha, label=label)


def requests_in_flight(runs: Sequence[PlottedRun]) -> Figure | None:
    """Draw the requests that were sent and have not ended, as the client sees them."""
    if not any(len(run.requests.arrival_s) for run in runs):
        return None
    figure, axes = one_axes("Requests in flight, seen by the client", TIME, "requests")
    for index, run in united(runs, lambda run: (run.requests.start_s, run.requests.end_s)):
        times, counts = series.in_flight(run.requests)
        axes.step(times, counts, where="post", color=colour(index), linewidth=1.2, label=run.name)
    count_y(axes)
    _finish_time(figure, axes, runs)
    return figure


def server_gauge(name: str, title: str, y: str) -> Plot:
    """Return a plot of one of the server's gauges over time."""

    def draw(runs: Sequence[PlottedRun]) -> Figure | None:
        found = [series.server_series(run.result, name) for run in runs]
        if all(values is None for values in found):
            return None
        figure, axes = one_axes(title, TIME, y)
        for index, run in united(runs, lambda run: _over_time(run, name)):
            if (values := found[index]) is not None:
                times = series.server_times(run.result)
                axes.step(
                    times, values, where="post", clip_on=False, color=colour(index), linewidth=1.4, label=run.name
                )
        count_y(axes)
        _finish_time(figure, axes, runs)
        return figure

    return draw


def _over_time(run: PlottedRun, *names: str) -> Arrays:
    """Return the times at which the server was observed and the values of its gauges, for comparing them.

    Of gauges that never change the times do not matter.
    """
    times, values = series.server_times(run.result), [series.server_series(run.result, name) for name in names]
    if all(found is not None and len(found) and (found == found[0]).all() for found in values):
        return (np.zeros(1), *(None if found is None else found[:1] for found in values))
    return (times, *values)


def kv_usage(runs: Sequence[PlottedRun]) -> Figure | None:
    """Draw KV pages in use and in the pool, or the share of the pool if a server does not report pages."""
    used = [series.server_series(run.result, "kv_pages_used") for run in runs]
    total = [series.server_series(run.result, "kv_pages_total") for run in runs]
    if any(values is None for values in (*used, *total)):
        return _kv_share(runs)
    figure, axes = one_axes("KV pages", TIME, "pages")
    for index, run in united(runs, lambda run: _over_time(run, "kv_pages_used", "kv_pages_total")):
        in_use, capacity = used[index], total[index]
        assert in_use is not None
        assert capacity is not None
        times, shade, prefix = series.server_times(run.result), colour(index), f"{run.name}: " if len(runs) > 1 else ""
        axes.step(times, in_use, where="post", clip_on=False, color=shade, linewidth=1.4, label=f"{prefix}in use")
        axes.step(times, capacity, "--", where="post", color=shade, linewidth=1.2, label=f"{prefix}capacity")
    count_y(axes)
    _finish_time(figure, axes, runs)
    return figure


def _kv_share(runs: Sequence[PlottedRun]) -> Figure | None:
    shares = [series.server_series(run.result, "kv_cache_usage_perc") for run in runs]
    if all(share is None for share in shares):
        return None
    figure, axes = one_axes("KV cache in use", TIME, "percent")
    for index, run in united(runs, lambda run: _over_time(run, "kv_cache_usage_perc")):
        if (share := shares[index]) is not None:
            times = series.server_times(run.result)
            axes.step(
                times, 100 * share, where="post", clip_on=False, color=colour(index), linewidth=1.4, label=run.name
            )
    axes.set_ylim(0, 102)
    _finish_time(figure, axes, runs)
    return figure


def layers_by_precision(runs: Sequence[PlottedRun]) -> Figure | None:
    """Draw the decoder layers of each precision, stacked, in one plot for each result that has them."""
    adapting = [
        (run, layers)
        for run in runs
        if (layers := series.server_series_by(run.result, "layers_by_precision", "precision"))
    ]
    if not adapting:
        return None
    names = sorted({name for _, layers in adapting for name in layers})
    figure, all_axes = row_of_axes("Layers by precision", len(adapting))
    for axes, (run, layers) in zip(all_axes, adapting, strict=True):
        times = series.server_times(run.result)
        stacks = [np.nan_to_num(layers.get(name, np.zeros_like(times))) for name in names]
        shades = [colour(index) for index in range(len(names))]
        axes.stackplot(times, stacks, labels=names, colors=shades, step="post", alpha=0.75, linewidth=0)
        label_axes(axes, TIME if len(adapting) == 1 else "time, s", "layers" if axes is all_axes[0] else "")
        if len(adapting) > 1:
            axes.set_title(run.name, fontsize=9, color=INK)
        _mark_plans(axes, [run])
        axes.set_xlim(0, max(run.end_s, times.max(initial=0)))
        count_y(axes)
    legend(figure, all_axes[0], min_entries=1)
    return figure


def _finish_time(figure: Figure, axes: Axes, runs: Sequence[PlottedRun]) -> None:
    """Finish a plot over time: its extent, marks where the plan changed, and the legend."""
    ends = [run.end_s for run in runs] + [series.server_times(run.result).max(initial=0) for run in runs]
    axes.set_xlim(0, max(*ends, 1e-3))
    _mark_plans(axes, runs)
    legend(figure, axes)


def _mark_plans(axes: Axes, runs: Sequence[PlottedRun]) -> None:
    """Draw a vertical line where a new plan came into force, in the result's colour."""
    for index, run in enumerate(runs):
        shade = colour(index) if len(runs) > 1 else INK
        for time, version in series.plan_changes(run.result):
            axes.axvline(time, color=shade, linestyle=(0, (2, 2)), linewidth=1)
            axes.annotate(
                f"plan {version}",
                (time, 1.0),
                (2, -2),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                fontsize=7.5,
                color=shade,
                rotation=90,
                va="top",
                bbox={"color": "white", "alpha": 0.7, "pad": 0.5, "linewidth": 0},
            )


def _rates(runs: Sequence[PlottedRun]) -> Figure | None:
    return throughput_against_rate([(run.name, run.result) for run in runs])


# By the name of the PNG file, in the order of the page.
PLOTS: dict[str, Plot] = {
    "throughput-against-rate": _rates,
    "ttft-over-time": latency_over_time("ttft"),
    "tpot-over-time": latency_over_time("tpot"),
    "latency-cdf": latency_cdfs,
    "arrivals-and-completions": arrivals_and_completions,
    "requests-in-flight": requests_in_flight,
    "running-requests": server_gauge("num_requests_running", "Running requests, reported by the server", "requests"),
    "queue-length": server_gauge("num_requests_waiting", "Queue length, reported by the server", "requests waiting"),
    "kv-usage": kv_usage,
    "layers-by-precision": layers_by_precision,
}
