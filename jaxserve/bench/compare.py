"""Results side by side: medians and spread of repeated runs, and ratios to the first configuration.

Results with the same label are repeats of one configuration. A ratio compares medians. It is marked with ~ if the
ranges of the repeats overlap, so that noise is not read as a difference.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from jaxserve.bench.offline.options import COORDINATES
from jaxserve.bench.result import label
from jaxserve.bench.table import HEADINGS, cell, statistic_keys
from jaxserve.console.tables import print_table
from jaxserve.core.errors import ConfigError

ONLINE = ("serve", "trace")
TOTALS = (
    ("Successful requests", "completed"),
    ("Failed requests", "failed"),
    ("Duration (s)", "duration"),
    ("Requests/s", "request_throughput"),
    ("Goodput (req/s)", "request_goodput"),
    ("SLO attainment", "slo_attainment"),
    ("Output tok/s", "output_throughput"),
    ("Peak output tok/s", "max_output_tokens_per_s"),
    ("Total tok/s", "total_token_throughput"),
)
SAME_LOAD = ("seed", "num_prompts", "request_rate", "burstiness", "max_concurrency", "ignore_eos")
SAME_MACHINE = ("cpu", "cores", "memory", "gpus", "system", "packages", "jaxserve", "commit")
MAX_NOTE_CHARACTERS = 60  # of one value


@dataclass(frozen=True)
class Spread:
    """The median of repeated measurements, and the range that they lie in."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the spread of one or more values."""
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        if self.low == self.high:
            return cell(self.median)
        return f"{cell(self.median)} ({cell(self.low)}..{cell(self.high)})"


@dataclass(frozen=True)
class ComparedFigure:
    """One figure of every configuration; a spread is None where the figure was not measured."""

    name: str
    spreads: tuple[Spread | None, ...]

    def ratio(self, column: int) -> float | None:
        """Return the median in this column over the median in the first, or None if either is missing."""
        first, other = self.spreads[0], self.spreads[column]
        return other.median / first.median if first and other and first.median else None

    def within_spread(self, column: int) -> bool:
        """Return whether the repeats in this column and in the first overlap.

        Single runs say nothing about noise, so the answer for two of them is False.
        """
        first, other = self.spreads[0], self.spreads[column]
        if first is None or other is None or (first.low == first.high and other.low == other.high):
            return False
        return first.low <= other.high and other.low <= first.high


@dataclass(frozen=True)
class Comparison:
    """Configurations in order of appearance, each with its number of runs, and notes on what differs between them."""

    labels: tuple[str, ...]
    runs: tuple[int, ...]
    figures: tuple[ComparedFigure, ...]
    notes: tuple[str, ...]

    def flat(self) -> list[dict[str, Any]]:
        """Return the comparison as rows of a result of kind "compare"."""
        return [self._flat_row(figure) for figure in self.figures]

    def _flat_row(self, figure: ComparedFigure) -> dict[str, Any]:
        flat: dict[str, Any] = {"metric": figure.name}
        for column, (name, spread) in enumerate(zip(self.labels, figure.spreads, strict=True)):
            flat[name] = spread.median if spread else None
            flat[f"{name} min"] = spread.low if spread else None
            flat[f"{name} max"] = spread.high if spread else None
            if column:
                flat[f"{name} ratio"] = figure.ratio(column)
        return flat


def side_by_side(results: Sequence[Mapping[str, Any]]) -> Comparison:
    """Compare results of one kind; `serve` and `trace` count as one kind.

    Raise ConfigError if the kinds differ, or if a result is itself a comparison.
    """
    kinds = {"serve" if result["kind"] in ONLINE else result["kind"] for result in results}
    if len(kinds) != 1 or kinds == {"compare"}:
        names = ", ".join(sorted({result["kind"] for result in results})) or "none"
        raise ConfigError(f"cannot compare results of the kinds {names}: all must be of one kind, not compare")
    groups = _grouped(results)
    figures = _online_figures(groups) if kinds == {"serve"} else _offline_figures(groups)
    return Comparison(
        tuple(groups), tuple(len(group) for group in groups.values()), tuple(figures), tuple(_notes(results, groups))
    )


def print_side_by_side(results: Sequence[Mapping[str, Any]], console: Console | None = None) -> Comparison:
    """Print a column for each configuration, with a ratio after every column but the first, and then the notes.

    Raise ConfigError as `side_by_side`.
    """
    console = console or Console(highlight=False)
    comparison = side_by_side(results)
    columns = [""]
    for index, (name, runs) in enumerate(zip(comparison.labels, comparison.runs, strict=True)):
        columns += [f"{name}, {runs} runs" if runs > 1 else name, *(["ratio"] if index else [])]
    print_table(columns, [_cells(figure) for figure in comparison.figures], console)
    if max(comparison.runs) > 1:
        console.print(
            "median (min..max) of the runs; ~ marks ranges that overlap", style="dim", highlight=False, soft_wrap=True
        )
    for note in comparison.notes:
        console.print(f"Note: {note}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    return comparison


def _cells(figure: ComparedFigure) -> list[str]:
    cells = [figure.name]
    for column, spread in enumerate(figure.spreads):
        cells.append(str(spread) if spread else "-")
        if column:
            ratio = figure.ratio(column)
            cells.append("-" if ratio is None else f"{'~' if figure.within_spread(column) else ''}{ratio:.2f}x")
    return cells


def _grouped(results: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return results by label, or by their position if all have the same label."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        groups.setdefault(label(result), []).append(result)
    if len(groups) == 1:
        ((name, repeats),) = groups.items()
        return {f"{name} #{number}": [result] for number, result in enumerate(repeats, 1)}
    return groups


def _online_figures(groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterable[ComparedFigure]:
    metrics = [
        (f"{name} {short} (ms)", key) for metric, (_, short) in HEADINGS.items() for name, key in statistic_keys(metric)
    ]
    for name, key in (*TOTALS, *metrics):
        spreads = tuple(_spread(result.get(key) for result in repeats) for repeats in groups.values())
        if any(spread is not None for spread in spreads):
            yield ComparedFigure(name, spreads)


def _offline_figures(groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterable[ComparedFigure]:
    """Yield one figure for each measured column of the results' rows; a row's coordinates become part of the name."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for name, repeats in groups.items():
        for row in (row for result in repeats for row in result.get("rows") or ()):
            case = " ".join(f"{key}={value}" for key, value in row.items() if key in COORDINATES)
            for key, value in row.items():
                if key not in COORDINATES:
                    found.setdefault((case, key), {}).setdefault(name, []).append(value)
    for (case, key), values in found.items():
        yield ComparedFigure(f"{case}: {key}" if case else key, tuple(_spread(values.get(name, ())) for name in groups))


def _spread(values: Iterable[Any]) -> Spread | None:
    numbers = [value for value in values if isinstance(value, int | float)]
    return Spread.of(numbers) if numbers else None


def _notes(results: Sequence[Mapping[str, Any]], groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterable[str]:
    yield from _differences("the load", results, SAME_LOAD)
    workloads = [result.get("workload") or {} for result in results]
    others = dict.fromkeys(key for workload in workloads for key in workload if key not in SAME_LOAD)
    yield from _differences("the workload", workloads, others)
    yield from _differences("the machine", [result.get("environment") or {} for result in results], SAME_MACHINE)
    for name, repeats in groups.items():
        if any(result.get("simulated") for result in repeats):
            yield f"{name}: simulated, not measured"
        if any(result.get("interrupted") for result in repeats):
            yield f"{name}: a run was interrupted"
        if any((result.get("client") or {}).get("saturated") for result in repeats):
            yield f"{name}: the client fell behind in a run"


def _differences(what: str, values: Sequence[Mapping[str, Any]], keys: Iterable[str]) -> Iterable[str]:
    for key in keys:
        texts = dict.fromkeys(_short(value.get(key)) for value in values)
        if len(texts) > 1:
            yield f"{what} differs in {key}: {' / '.join(texts)}"


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= MAX_NOTE_CHARACTERS else f"{text[: MAX_NOTE_CHARACTERS - 3]}..."
