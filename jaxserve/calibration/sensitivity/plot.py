"""The plot of a profile: for each precision a row with sensitivity by layer and quality by swapped layers."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jaxserve.bench.report.figure import COLOURS, DPI, FAINT, INK, label_axes, png
from jaxserve.calibration.sensitivity.profile import (
    BACK,
    FRONT,
    LIS,
    MDS,
    RANDOM,
    LayerScores,
    QualityCurve,
    SensitivityProfile,
)

SIZE = (3.35, 2.45)  # inches of one plot
LEGEND = 0.75  # inches below all plots
MARGIN = 0.08  # share of an axis above the lines
ORDERS = {LIS: COLOURS[0], MDS: COLOURS[5], FRONT: COLOURS[1], BACK: COLOURS[2], RANDOM: COLOURS[6]}
NAMES = {LIS: "LIS", MDS: "MDS"}
SCORES = {"LTS": COLOURS[4], "LRS": COLOURS[3], "MDS": COLOURS[5]}
MEASURES = {
    "cross_entropy": "cross-entropy, nats per token",
    "kl": "KL to full precision, nats per token",
    "top1": "top-1 agreement, %",
}


def draw(profile: SensitivityProfile) -> bytes:
    """Draw a profile and return the bytes of a PNG file."""
    rows, columns = len(profile.precisions), 1 + len(MEASURES)
    figure = Figure(figsize=(SIZE[0] * columns, SIZE[1] * rows + LEGEND), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    title = f"{profile.model}: which layers to swap first, and what it costs on held-out text"
    figure.suptitle(title, fontsize=11, color=INK, x=0.005, ha="left", fontweight="bold")
    grid = figure.subplots(rows, columns, squeeze=False)
    for precision, row in zip(profile.precisions, grid, strict=True):
        for axes in row:
            _style(axes)
        _draw_scores(row[0], precision, profile.of(precision))
        for axes, measure in zip(row[1:], MEASURES, strict=True):
            _draw_curves(axes, precision, measure, profile.curves[precision])
    handles, names = map(sum, zip(*(axes.get_legend_handles_labels() for axes in grid[0, :2]), strict=True), ([], []))
    figure.legend(
        handles, names, loc="outside lower left", ncols=len(names), fontsize=8.5, frameon=False, labelcolor=INK
    )
    return png(figure)


def _style(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(labelsize=8, colors=INK)
    axes.grid(visible=True, color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_scores(axes: Axes, precision: str, scores: LayerScores) -> None:
    """Draw the distance of each similarity from 1. The numbers are the positions in the order of swapping."""
    layers = np.arange(len(scores.order))
    lines = {"LTS": scores.lts, "LRS": scores.lrs, "MDS": scores.mds}
    for name, values in lines.items():
        axes.plot(
            layers, 1 - np.array(values), "o-", color=SCORES[name], label=f"1 - {name}", markersize=3, linewidth=1.4
        )
    axes.set_yscale("log")
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top * (top / bottom) ** MARGIN * 1.5)
    for place, layer in enumerate(scores.order):
        axes.annotate(
            str(place + 1), (layer, 0.98), xycoords=("data", "axes fraction"), ha="center", va="top", fontsize=7.5,
            color=COLOURS[0],
        )  # fmt: skip
    axes.set_title(f"{precision}: sensitivity; on top: place in the order", fontsize=9, color=INK, loc="left")
    label_axes(axes, "layer", "distance (log)")


def _draw_curves(axes: Axes, precision: str, measure: str, curves: Mapping[str, tuple[QualityCurve, ...]]) -> None:
    factor = 100.0 if measure == "top1" else 1.0
    for name, colour in ORDERS.items():
        if name not in curves:
            continue
        x, lines = curves[name][0].swapped, factor * np.array([getattr(curve, measure) for curve in curves[name]])
        several = len(lines) > 1
        label = f"{name}, mean and range of {len(lines)}" if several else f"{NAMES.get(name, name)} order"
        axes.plot(x, lines.mean(0), "-" if not several else "--", color=colour, label=label, linewidth=1.5)
        if several:
            axes.fill_between(x, lines.min(0), lines.max(0), color=colour, alpha=0.13, linewidth=0)
    # An offset would push the title up.
    axes.ticklabel_format(axis="y", style="plain", useOffset=False)
    axes.set_title(f"{precision}: {MEASURES[measure]}", fontsize=9, color=INK, loc="left")
    label_axes(axes, "swapped layers", "")
