"""The report: one self-contained HTML page, and the same plots as PNG files next to it."""

import base64
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from jaxserve.bench.report.figure import png
from jaxserve.bench.report.plots import DETAILED, PLOTS
from jaxserve.bench.report.runs import PlottedRun
from jaxserve.bench.report.series import Requests
from jaxserve.bench.result import label
from jaxserve.bench.table import cell, columns_of, remarks, sections
from jaxserve.core.errors import ConfigError
from jaxserve.core.files import write_file, writing

HEADLINES = (  # label, key, unit, decimals
    ("output tokens per second", "output_throughput", "", 1),
    ("requests per second", "request_throughput", "", 2),
    ("median TTFT", "median_ttft_ms", "ms", 0),
    ("P99 TTFT", "p99_ttft_ms", "ms", 0),
    ("median TPOT", "median_tpot_ms", "ms", 1),
    ("P99 TPOT", "p99_tpot_ms", "ms", 1),
    ("within the objectives", "slo_attainment", "%", 1),
    ("failed requests", "failed", "", 0),
)
RATES = "throughput-against-rate"
MAX_DRAWN = 8  # results in one plot, as many as there are colours
CAPTIONS = {
    RATES: "Left: output tokens per second that the server keeps up with, and that arrive. A server is saturated "
    "from the rate on at which it keeps up with less than 95 % of what arrives: the middle 90 % of the "
    "requests take longer to complete than they took to arrive. Right: median and P99 of TTFT.",
    "ttft-over-time": "Dots are requests; lines are the median and the 95th percentile within intervals of time.",
    "tpot-over-time": "Dots are requests; lines are the median and the 95th percentile within intervals of time.",
    "latency-cdf": "Share of the requests that took at most this long.",
    "kv-usage": "Dashed: the size of the pool.",
}
CAPTIONS_OF_MANY = dict.fromkeys(("ttft-over-time", "tpot-over-time"), "Medians within intervals of time.")


@dataclass(frozen=True)
class Grid:
    """A table of the page; the first column names what the other columns hold."""

    title: str
    head: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]


def write_report(results: Sequence[Mapping[str, Any]], path: Path, *, title: str | None = None) -> Path:
    """Write the page to `path` and the plots to the folder `<stem>-plots` next to it; return `path`.

    Plots with nothing to show are left out. Raise ConfigError if there are no results or a file cannot be written.
    """
    if not results:
        raise ConfigError("a report needs a result")
    names = _names(results)
    images = draw([PlottedRun(name, result, Requests.of(result)) for name, result in zip(names, results, strict=True)])
    page = render(results, names, images, title or _title(results))
    folder = path.with_name(f"{path.stem}-plots")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # Plots that an earlier report left and this one does not have would belong to no page.
        for name in PLOTS:
            (folder / f"{name}.png").unlink(missing_ok=True)
    for name, image in images.items():
        write_file(folder / f"{name}.png", image)
    write_file(path, page)
    return path


def draw(runs: Sequence[PlottedRun]) -> dict[str, bytes]:
    """Return PNG files by plot name. All plots but the curve over rates take at most `MAX_DRAWN` results."""
    figures = {name: plot(runs if name == RATES else runs[:MAX_DRAWN]) for name, plot in PLOTS.items()}
    return {name: png(figure) for name, figure in figures.items() if figure is not None}


def render(results: Sequence[Mapping[str, Any]], names: Sequence[str], images: Mapping[str, bytes], title: str) -> str:
    """Return the HTML page with the images embedded."""
    environment = Environment(
        loader=PackageLoader("jaxserve.bench.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.jinja").render(
        title=title,
        subtitle=_subtitle(results),
        remarks=[
            f"{name}: {remark}" for name, result in zip(names, results, strict=True) for remark in remarks(result)
        ],
        headlines=[(name, found) for name, result in zip(names, results, strict=True) if (found := _headline(result))],
        plots=[
            {"alt": name.replace("-", " "), "image": _data_uri(image), "caption": _caption(name, len(results))}
            for name, image in images.items()
        ],
        numbers=[*_numbers(results, names), *_offline(results, names)],
        facts=[
            _facts("Load", [_load(result) for result in results], names),
            _facts("Environment", [result.get("environment") or {} for result in results], names),
        ],
        commands=list(zip(names, (result.get("command") or "" for result in results), strict=True)),
    )


def _headline(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the figures by which a result is judged first, as label and value, as far as it has them."""
    found = []
    for figure, key, unit, digits in HEADLINES:
        value = result.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            scaled = 100 * value if unit == "%" else value
            found.append((figure, f"{scaled:,.{digits}f}{f' {unit}' if unit else ''}"))
    return found


def _caption(plot: str, count: int) -> str:
    left_out = f"The first {MAX_DRAWN} of {count} results." if count > MAX_DRAWN and plot != RATES else ""
    captions = CAPTIONS if count <= DETAILED else CAPTIONS | CAPTIONS_OF_MANY
    return " ".join(filter(None, (captions.get(plot), left_out)))


def _names(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return labels, with rates and then numbers added to labels that occur more than once."""
    names = [label(result) for result in results]
    rates = [result.get("request_rate") for result in results]
    names = [
        f"{name}, {rate:g} req/s" if names.count(name) > 1 and isinstance(rate, int | float) else name
        for name, rate in zip(names, rates, strict=True)
    ]
    return [
        f"{name} #{names[: index + 1].count(name)}" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]


def _title(results: Sequence[Mapping[str, Any]]) -> str:
    labels = list(dict.fromkeys(label(result) for result in results))
    more = f" and {len(labels) - MAX_DRAWN} more" if len(labels) > MAX_DRAWN else ""
    return f"jaxserve bench: {', '.join(labels[:MAX_DRAWN])}{more}"


def _subtitle(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the kinds and days of the measurements."""
    kinds = dict.fromkeys("simulated" if result.get("simulated") else f"bench {result['kind']}" for result in results)
    dates = sorted({_day(result.get("date")) for result in results} - {""})
    days = dates[:1] if len(dates) < 2 else [f"{dates[0]} to {dates[-1]}"]
    return ", ".join([*kinds, *days])


def _day(date: str | None) -> str:
    return datetime.strptime(date, "%Y%m%d-%H%M%S").strftime("%Y-%m-%d %H:%M") if date else ""


def _data_uri(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode("ascii")


def _numbers(results: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Iterable[Grid]:
    """Yield the tables of the terminal, totals and latencies, with a column for each result."""
    tables = [{section.title: dict(section.lines) for section in sections(result)} for result in results]
    for title in dict.fromkeys(title for table in tables for title in table):
        rows = dict.fromkeys(name for table in tables for name in table.get(title, {}))
        lines = tuple((row, *(table.get(title, {}).get(row, "-") for table in tables)) for row in rows)
        if lines:
            yield Grid(title, ("", *names), lines)


def _offline(results: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Iterable[Grid]:
    """Yield the rows of offline measurements and comparisons as tables."""
    for name, result in zip(names, results, strict=True):
        if rows := result.get("rows"):
            columns = tuple(columns_of(rows))
            yield Grid(name, columns, tuple(tuple(cell(row.get(column)) for column in columns) for row in rows))


def _load(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that describe the load."""
    keys = ("backend", "model_id", "tokenizer_id", "request_rate", "burstiness", "max_concurrency", "seed", "slo")
    return {key: result[key] for key in keys if result.get(key) is not None} | dict(result.get("workload") or {})


def _facts(title: str, facts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Grid:
    """Return a table with one column per result, or with a single column if all results agree."""
    texts = [{key: _text(value) for key, value in mapping.items()} for mapping in facts]
    if all(mapping == texts[0] for mapping in texts):
        texts, names = texts[:1], [""]
    keys = dict.fromkeys(key for mapping in texts for key in mapping)
    return Grid(title, ("", *names), tuple((key, *(mapping.get(key, "-") for mapping in texts)) for key in keys))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
