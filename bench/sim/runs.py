"""Runs, tables and files that the figures of the simulator have in common."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib as mpl

from jaxserve.bench.options import DatasetOptions, TraceOptions
from jaxserve.bench.result import Result
from jaxserve.sim.options import ClusterOptions, FigureOptions
from jaxserve.sim.run import SimExperiment, run_simulation

mpl.use("Agg")
from matplotlib import pyplot as plt  # after the backend is chosen
from matplotlib.figure import Figure


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all scripts take."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--traces", type=Path, help="folder of published traces; default: traces generated with their profiles"
    )
    made.add_argument("--out", type=Path, default=Path("bench/out/sim"), help="folder for the table and the plot")
    return made


def simulated(cluster: ClusterOptions, trace: TraceOptions, *, label: str, slo_s: float) -> Result:
    """Return the result of a simulated trace."""
    figures = FigureOptions(goodput=[f"ttft:{slo_s * 1e3:g}"])
    experiment = SimExperiment(cluster, DatasetOptions(dataset="trace"), trace=trace, figures=figures, label=label)
    return run_simulation(experiment, [sys.executable, *sys.argv])


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def written(out: Path, name: str, text: str, figure: Figure) -> None:
    """Write NAME.md and NAME.png into `out`, and print the text."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text(text + "\n", encoding="utf-8")
    figure.savefig(out / f"{name}.png", dpi=120)
    plt.close(figure)
    print(text)
