"""The look of every plot: sizes, colours, axes that begin at zero, suitable units."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatter, MaxNLocator

from jaxserve.bench.report.series import Floats
from jaxserve.core.numeric import ceil_div

# The palette of Okabe and Ito, and one more colour.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#7a5195")
INK, FAINT = "#333333", "#dddddd"
WIDE = (7.2, 3.4)  # inches; small enough for letters to be readable on a phone
DPI = 150
LONG_NAME = 22  # characters; a legend has two columns instead of four if a name is longer
LEGEND_ROW = 0.19  # inches of height for each further row of the legend
SPREAD_FOR_LOG = 30.0  # latencies get a logarithmic axis if the largest exceeds the median by this factor


@dataclass(frozen=True)
class Unit:
    """A unit of time: its name, and the factor by which seconds are multiplied."""

    factor: float
    name: str


def colour(index: int) -> str:
    """Return the colour of the result with this index."""
    return COLOURS[index % len(COLOURS)]


def unit_of(values: Sequence[Floats]) -> Unit:
    """Return milliseconds, or seconds if the largest latency is ten seconds or more."""
    largest = max((float(np.nanmax(array)) for array in values if np.isfinite(array).any()), default=0.0)
    return Unit(1.0, "s") if largest >= 10 else Unit(1e3, "ms")


def wide_spread(values: Sequence[Floats]) -> bool:
    """Return whether latencies differ so much that a linear axis would hide most of them."""
    together = np.concatenate([array[np.isfinite(array) & (array > 0)] for array in values])
    return len(together) > 0 and float(together.max()) > SPREAD_FOR_LOG * float(np.median(together))


def one_axes(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    """Return a wide figure with one plot."""
    figure, (axes,) = row_of_axes(title, 1)
    label_axes(axes, x, y)
    return figure, axes


def row_of_axes(title: str, count: int) -> tuple[Figure, tuple[Axes, ...]]:
    """Return a wide figure with plots side by side, under one title."""
    figure = Figure(figsize=WIDE, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left", fontweight="bold")
    all_axes = tuple(figure.add_subplot(1, count, index + 1) for index in range(count))
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(INK)
        axes.tick_params(which="both", labelsize=8.5, colors=INK)
        axes.grid(visible=True, color=FAINT, linewidth=0.6)
        axes.set_axisbelow(True)
    return figure, all_axes


def label_axes(axes: Axes, x: str, y: str) -> None:
    """Label both axes; labels contain units."""
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel(y, fontsize=9, color=INK)


def scale_y(axes: Axes, *, log: bool) -> None:
    """Scale the y axis logarithmically with plain numbers, or linearly from zero."""
    if log:
        axes.set_yscale("log")
        plain_numbers(axes.yaxis)
    else:
        axes.set_ylim(bottom=0)


def count_y(axes: Axes) -> None:
    """Scale the y axis linearly from zero with whole numbers."""
    axes.set_ylim(bottom=0, top=max(1.0, axes.get_ylim()[1]))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, steps=[1, 2, 5, 10]))
    plain_numbers(axes.yaxis)


def plain_numbers(axis) -> None:  # type: ignore[no-untyped-def]  # matplotlib.axis.Axis
    """Label an axis with numbers such as 1000 and 0.5 in place of powers of ten."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    # Takes effect only on axes that span less than a power of ten.
    axis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))


def legend(figure: Figure, *all_axes: Axes, min_entries: int = 2) -> None:
    """Add a legend below the plots, where it covers nothing, if it has at least `min_entries` entries."""
    entries = [axes.get_legend_handles_labels() for axes in all_axes]
    handles = [handle for found, _ in entries for handle in found]
    names = [name for _, found in entries for name in found]
    if len(names) < min_entries:
        return
    columns = min(len(names), 4 if max(map(len, names)) < LONG_NAME else 2)
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW * (ceil_div(len(names), columns) - 1))
    figure.legend(
        handles,
        names,
        loc="outside lower left",
        ncols=columns,
        fontsize=8.5,
        frameon=False,
        labelcolor=INK,
    )


def png(figure: Figure) -> bytes:
    """Return the figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
