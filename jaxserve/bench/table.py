"""The figures at the end of a run, in the form of `vllm bench serve`, and tables of offline measurements.

The figures are one on a line, under the labels that scripts look for.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from jaxserve.bench.metrics import PERCENTILES
from jaxserve.bench.options import METRICS
from jaxserve.console.tables import print_table

HEADINGS = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
    "queue": ("Time in the Server's Queue", "queue"),
}
TOTALS = (  # label, key, decimals
    ("Successful requests", "completed", 0),
    ("Failed requests", "failed", 0),
    ("Maximum request concurrency", "max_concurrency", 0),
    ("Request rate configured (RPS)", "request_rate", 2),
    ("Benchmark duration (s)", "duration", 2),
    ("Total input tokens", "total_input_tokens", 0),
    ("Total generated tokens", "total_output_tokens", 0),
    ("Request throughput (req/s)", "request_throughput", 2),
    ("Request goodput (req/s)", "request_goodput", 2),
    ("SLO attainment", "slo_attainment", 4),
    ("Output token throughput (tok/s)", "output_throughput", 2),
    ("Peak output token throughput (tok/s)", "max_output_tokens_per_s", 2),
    ("Peak concurrent requests", "max_concurrent_requests", 0),
    ("Total token throughput (tok/s)", "total_token_throughput", 2),
)
WIDTH, VALUE_WIDTH = 54, 12  # characters
MAX_REASONS = 5


@dataclass(frozen=True)
class Section:
    """A heading and its lines of label and value."""

    title: str
    lines: tuple[tuple[str, str], ...]


def sections(
    result: Mapping[str, Any], metrics: Sequence[str] = METRICS, percentiles: Sequence[float] = PERCENTILES
) -> list[Section]:
    """Return the totals and one section per metric, leaving out what the result has no value for."""
    totals = tuple((name, _number(result[key], digits)) for name, key, digits in TOTALS if _is_number(result.get(key)))
    found = [Section(f"{'Simulated ' if result.get('simulated') else ''}Serving Benchmark Result", totals)]
    for metric in metrics:
        title, short = HEADINGS[metric]
        lines = tuple(
            (f"{name} {short} (ms)", _number(result[key], 2))
            for name, key in statistic_keys(metric, percentiles)
            if _is_number(result.get(key))
        )
        if lines:
            found.append(Section(title, lines))
    return found


def statistic_keys(metric: str, percentiles: Iterable[float] = PERCENTILES) -> list[tuple[str, str]]:
    """Return name and key of a metric's statistics: ("Mean", "mean_ttft_ms"), ..., ("P99", "p99_ttft_ms"), ..."""
    pairs = [("Mean", "mean"), ("Median", "median")]
    pairs += [(f"P{percentile:g}", f"p{percentile:g}") for percentile in percentiles]
    return [(name, f"{key}_{metric}_ms") for name, key in [*pairs, ("Max", "max")]]


def remarks(result: Mapping[str, Any]) -> list[str]:
    """Return remarks that qualify the figures, such as a simulation, failures by reason, and a client that was late."""
    lines = []
    if result.get("simulated"):
        lines.append(f"simulated on {result.get('hardware') or 'unknown hardware'}: predicted, not measured")
    if reason := result.get("idle_policy"):
        lines.append(reason)
    reasons = Counter(error for error in result.get("errors") or () if error)
    for reason, count in reasons.most_common(MAX_REASONS):
        lines.append(f"{count} failed: {reason}")
    if len(reasons) > MAX_REASONS:
        lines.append(f"and {len(reasons) - MAX_REASONS} other reasons")
    if result.get("interrupted"):
        unfinished = f"{result.get('unfinished') or 0} unfinished requests are not counted"
        lines.append(f"interrupted: {'the remaining rows are missing' if 'rows' in result else unfinished}")
    client = result.get("client") or {}
    if client.get("saturated"):
        lines.append(client.get("warning") or "the client fell behind")
    return lines


def print_result(
    result: Mapping[str, Any],
    *,
    metrics: Sequence[str] = METRICS,
    percentiles: Sequence[float] = PERCENTILES,
    console: Console | None = None,
) -> None:
    """Print a result's rows if it has any, else its totals and latencies, and then the remarks."""
    console = console or Console(highlight=False)
    if "rows" in result:
        print_rows(result["rows"], console)
    else:
        _print_sections(sections(result, metrics, percentiles), console)
    for remark in remarks(result):
        console.print(remark, style="yellow", markup=False, highlight=False, soft_wrap=True)


def print_rows(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print flat dicts as a table, with a column for each key in order of appearance; print nothing if empty."""
    columns = columns_of(rows)
    if columns:
        print_table(columns, [[cell(row.get(column)) for column in columns] for row in rows], console)


def columns_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return all keys of the rows, in order of appearance."""
    return list(dict.fromkeys(key for row in rows for key in row))


def cell(value: Any) -> str:
    """Return a value as a table shows it: floats with 2 decimals, small floats with 3 digits, and "-" for None."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if 0 < abs(value) < 0.1 else f"{value:.2f}"
    return str(value)


def _print_sections(found: Sequence[Section], console: Console) -> None:
    for section in found:
        _write(f" {section.title} ".center(WIDTH, "=" if section is found[0] else "-"), console, style="bold")
        for name, value in section.lines:
            _write(f"{name + ':':<{WIDTH - VALUE_WIDTH}}{value:>{VALUE_WIDTH}}", console)
    _write("=" * WIDTH, console, style="bold")


def _write(line: str, console: Console, style: str = "") -> None:
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: float, decimals: int) -> str:
    return f"{value:.{decimals}f}"
