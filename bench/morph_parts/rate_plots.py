"""The pictures of a sweep: P95 TTFT and violations by rate, and the distribution of TPOT at each rate."""

from collections.abc import Callable, Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.morph_parts.plots import COLOURS, MARKERS, MIN_TTFT_S, SLO, WIDTH, style_axes
from bench.morph_parts.rate_points import QUANTILES, Point
from bench.morph_parts.systems import LABELS
from jaxserve.bench.report.figure import DPI, INK, label_axes, plain_numbers, png

PANEL_HEIGHT, MAX_COLUMNS = 2.6, 3
LINE = {"linewidth": 1.6, "markersize": 5}


def draw_rates(found: Sequence[Point], slo_s: float, title: str) -> bytes:
    """Return a PNG of P95 TTFT, with the objective, and of the share of requests that missed it, by load."""
    figure = _figure(title, 1)
    latency, violations = figure.subplots(1, 2)
    _curves(latency, found, lambda point: point.ttft_p95_s and max(point.ttft_p95_s, MIN_TTFT_S))
    latency.axhline(slo_s, color=SLO, linewidth=1.2, linestyle="--", label=f"SLO {slo_s:g} s")
    latency.set_yscale("log")
    plain_numbers(latency.yaxis)
    _curves(violations, found, lambda point: None if point.violations is None else 100 * point.violations)
    violations.set_ylim(bottom=0)
    for axes, y in ((latency, "P95 time to first token, s"), (violations, "requests over the SLO, %")):
        style_axes(axes)
        label_axes(axes, "load, multiples of full precision's capacity", y)
    _legend(figure, latency)
    return png(figure)


def draw_tpot(found: Sequence[Point], title: str) -> bytes:
    """Return a PNG with a panel per rate: the share of answers up to each time per output token."""
    multiples = list(dict.fromkeys(point.multiple for point in found))
    columns = min(MAX_COLUMNS, max(len(multiples), 1))
    rows = max(1, -(-len(multiples) // columns))
    figure = _figure(title, rows)
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axes, multiple in zip(panels.flat, multiples, strict=False):
        style_axes(axes)
        for point in found:
            if point.multiple == multiple and point.tpot_cdf_ms:
                axes.plot(point.tpot_cdf_ms, QUANTILES, color=COLOURS[point.system], label=LABELS[point.system])
        axes.set_title(f"{multiple:g}x", fontsize=9, color=INK)
        axes.set_xlim(left=0)
        axes.set_ylim(0, 1)
        label_axes(axes, "ms per token", "")
    for axes in panels.flat[len(multiples) :]:
        axes.set_visible(False)
    for axes in panels[:, 0]:
        axes.set_ylabel("share of answers", fontsize=9, color=INK)
    _legend(figure, figure.axes[0])
    return png(figure)


def _figure(title: str, rows: int) -> Figure:
    figure = Figure(figsize=(WIDTH, PANEL_HEIGHT * rows + 1), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left", fontweight="bold")
    return figure


def _curves(axes: Axes, found: Iterable[Point], value: Callable[[Point], float | None]) -> None:
    """Draw a line per system through its points that have a value."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for point in found:
        if (height := value(point)) is not None:
            curves.setdefault(point.system, []).append((point.multiple, height))
    for name, places in curves.items():
        loads, heights = zip(*places, strict=True)
        axes.plot(loads, heights, color=COLOURS[name], marker=MARKERS[name], label=LABELS[name], **LINE)
    axes.set_xlim(left=0)


def _legend(figure: Figure, axes: Axes) -> None:
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower left", ncols=5, fontsize=8.5, frameon=False, labelcolor=INK)
