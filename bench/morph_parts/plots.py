"""One picture per workload: TTFT, precision, KV pages and queue of each system over time."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from bench.morph_parts.systems import ACCURACY, ADAPTING, FULL, INT4, INT8, LABELS, NAMES, PERFORMANCE
from bench.morph_parts.timeline import FULL_BITS, Timeline
from jaxserve.bench.report.figure import DPI, FAINT, INK, label_axes, plain_numbers, png
from jaxserve.bench.report.series import Requests, server_series, server_times
from jaxserve.bench.result import Result

COLOURS = {FULL: "#333333", INT4: "#e69f00", ACCURACY: "#0072b2", INT8: "#cc79a7", PERFORMANCE: "#009e73"}
MARKERS = {FULL: "s", INT4: "^", ACCURACY: "o", INT8: "v", PERFORMANCE: "D"}
SLO = "#cc0000"
SHADES = LinearSegmentedColormap.from_list("bits", ["#b2182b", "#e69f00", "#d9e8f5"])
MIN_BITS, BITS_SHOWN = 4, (16, 12, 8, 6, 4)
WIDTH, MIN_TTFT_S = 8.4, 0.01


def draw(results: Sequence[Result], title: str) -> bytes:
    """Return a PNG of one run of each system under one workload."""
    runs = sorted(results, key=lambda result: NAMES.index(result["system"]))
    heights = [3.0, 0.34 * len(runs) + 0.1, 2.0, 1.5]
    figure = Figure(figsize=(WIDTH, sum(heights) + 1.5), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left", fontweight="bold")
    ttft, layers, pages, queue = figure.subplots(4, 1, sharex=True, height_ratios=heights)
    for axes in (ttft, layers, pages, queue):
        style_axes(axes)
    _ttft(ttft, runs)
    _layers(layers, runs)
    _pages(pages, runs)
    _queue(queue, runs)
    label_axes(queue, "seconds after the start of the load", "requests\nwaiting")
    queue.set_xlim(0, max(_end(run) for run in runs))
    handles, names = ttft.get_legend_handles_labels()
    look = {"fontsize": 8.5, "frameon": False, "labelcolor": INK, "markerscale": 2}
    figure.legend(handles, names, loc="outside lower left", ncols=6, **look)
    return png(figure)


def style_axes(axes: Axes) -> None:
    """Draw axes, ticks and grid as in every plot."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(which="both", labelsize=8.5, colors=INK)
    axes.grid(visible=True, color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)


def _end(run: Result) -> float:
    """Return the time of the last answer, or of the last sample if it is later."""
    return max(float(np.nanmax(Requests.of(run).end_s)), float(server_times(run).max(initial=0)))


def _ttft(axes: Axes, runs: Sequence[Result]) -> None:
    """Draw each request at its arrival, and the objective as a line."""
    for run in runs:
        requests, name = Requests.of(run), run["system"]
        values = np.maximum(requests.ttft_s, MIN_TTFT_S)
        style = {"color": COLOURS[name], "marker": MARKERS[name], "linewidths": 0, "alpha": 0.65}
        axes.scatter(requests.arrival_s, values, s=12, label=LABELS[name], **style)
    objective = runs[0]["slo"]["ttft"] / 1e3
    axes.axhline(objective, color=SLO, linewidth=1.2, linestyle="--", label=f"SLO {objective:g} s")
    axes.set_yscale("log")
    plain_numbers(axes.yaxis)
    label_axes(axes, "", "time to first token, s")


def _layers(axes: Axes, runs: Sequence[Result]) -> None:
    """Draw a strip for each system: the mean bits per weight of its layers."""
    for row, run in enumerate(runs):
        timeline = Timeline.of(run)
        edges, shades = np.append(timeline.time_s, _end(run)), _shade(timeline.bits)
        axes.pcolormesh(edges, [row - 0.4, row + 0.4], shades[None, :], cmap=SHADES, vmin=0, vmax=1, rasterized=True)
    axes.set_yticks(range(len(runs)), [LABELS[run["system"]] for run in runs])
    axes.set_ylim(len(runs) - 0.5, -0.5)
    axes.grid(visible=False)
    keys = [Patch(color=SHADES(_shade(bits)), label=f"{bits} bits") for bits in BITS_SHOWN]
    axes.legend(handles=keys, loc="lower right", bbox_to_anchor=(1, 1), ncols=5, fontsize=8, frameon=False)


def _shade(bits: Any) -> Any:
    """Return a shade from 0 (the fewest bits) to 1, by the logarithm because memory and speed follow ratios."""
    return np.log(bits / MIN_BITS) / np.log(FULL_BITS / MIN_BITS)


def _pages(axes: Axes, runs: Sequence[Result]) -> None:
    """Draw the pool as a line and, for systems that change it, the part in use as an area."""
    for run in runs:
        timeline, name = Timeline.of(run), run["system"]
        times, shade = timeline.time_s, COLOURS[name]
        axes.step(times, timeline.kv_pages, where="post", color=shade, linewidth=1.6)
        if name in ADAPTING:
            axes.fill_between(times, timeline.kv_used, step="post", color=shade, alpha=0.16, linewidth=0)
    axes.set_ylim(bottom=0)
    label_axes(axes, "", "KV pages\n(filled: in use)")


def _queue(axes: Axes, runs: Sequence[Result]) -> None:
    for run in runs:
        waiting = server_series(run, "num_requests_waiting")
        if waiting is not None:
            axes.step(server_times(run), waiting, where="post", color=COLOURS[run["system"]], linewidth=1.3)
    axes.set_ylim(bottom=0)
