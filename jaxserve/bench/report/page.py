"""Writes the report: one HTML page that holds everything it shows, and the same plots as PNG files beside it."""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from jaxserve.bench.report.figure import png
from jaxserve.bench.report.plots import DETAILED, PLOTS, Run
from jaxserve.bench.report.series import Requests
from jaxserve.bench.result import label
from jaxserve.bench.table import cell, columns_of, remarks, sections
from jaxserve.core.errors import ConfigError

RATES = "throughput-against-rate"
MAX_DRAWN = 8  # results that overlay in one plot: there are as many colours
CAPTIONS = {
    RATES: "Left: output tokens per second the server keeps up with, and asked for. A server "
    "saturates at the rate from which on it keeps up with less than 95 % of what arrives: the middle 90 % of the "
    "requests take longer to complete than they took to arrive. Right: median and P99 of TTFT.",
    "ttft-over-time": "Dots are requests; lines are the median and the 95th percentile of stretches of time.",
    "tpot-over-time": "Dots are requests; lines are the median and the 95th percentile of stretches of time.",
    "latency-cdf": "Share of the requests that took no longer.",
    "kv-usage": "Dashed: the size of the pool.",
}
OF_MANY = dict.fromkeys(("ttft-over-time", "tpot-over-time"), "Medians of stretches of time.")


@dataclass(frozen=True)
class Grid:
    """A table of the page: the first column names what the others hold."""

    title: str
    head: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]


def write_report(results: Sequence[Mapping[str, Any]], path: Path, *, title: str | None = None) -> Path:
    """Writes the page to `path` and the plots to the folder `<stem>-plots` beside it; returns `path`.

    Plots without anything to show are left out. Raises ConfigError if there is no result or nothing can be written.
    """
    if not results:
        raise ConfigError("a report needs a result")
    names = _names(results)
    images = draw([Run(name, result, Requests.of(result)) for name, result in zip(names, results, strict=True)])
    page = render(results, names, images, title or _title(results))
    folder = path.with_name(f"{path.stem}-plots")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in PLOTS:  # what an earlier report left and this one does not show would belong to no page
            (folder / f"{name}.png").unlink(missing_ok=True)
        for name, image in images.items():
            (folder / f"{name}.png").write_bytes(image)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the report {path}: {error.strerror or error}") from error
    return path


def draw(runs: Sequence[Run]) -> dict[str, bytes]:
    """PNG files by the names of the plots. Only the curve over rates takes more than `MAX_DRAWN` results."""
    figures = {name: plot(runs if name == RATES else runs[:MAX_DRAWN]) for name, plot in PLOTS.items()}
    return {name: png(figure) for name, figure in figures.items() if figure is not None}


def render(results: Sequence[Mapping[str, Any]], names: Sequence[str], images: Mapping[str, bytes], title: str) -> str:
    """The page, with the images inside."""
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


def _caption(plot: str, count: int) -> str:
    left_out = f"The first {MAX_DRAWN} of {count} results." if count > MAX_DRAWN and plot != RATES else ""
    captions = CAPTIONS if count <= DETAILED else CAPTIONS | OF_MANY
    return " ".join(filter(None, (captions.get(plot), left_out)))


def _names(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Labels; those that occur more than once are told apart by their rates, and then numbered."""
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
    """The kinds and the days of the measurements."""
    kinds = dict.fromkeys(f"bench {result['kind']}" for result in results)
    dates = sorted({_day(result.get("date")) for result in results} - {""})
    days = dates[:1] if len(dates) < 2 else [f"{dates[0]} to {dates[-1]}"]
    return ", ".join([*kinds, *days])


def _day(date: str | None) -> str:
    return datetime.strptime(date, "%Y%m%d-%H%M%S").strftime("%Y-%m-%d %H:%M") if date else ""


def _data_uri(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode("ascii")


def _numbers(results: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Iterable[Grid]:
    """The numbers of the terminal's table: totals with a column per result, then latencies."""
    tables = [{section.title: dict(section.lines) for section in sections(result)} for result in results]
    for title in dict.fromkeys(title for table in tables for title in table):
        rows = dict.fromkeys(name for table in tables for name in table.get(title, {}))
        lines = tuple((row, *(table.get(title, {}).get(row, "-") for table in tables)) for row in rows)
        if lines:
            yield Grid(title, ("", *names), lines)


def _offline(results: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Iterable[Grid]:
    """The rows of offline measurements and comparisons, as they are."""
    for name, result in zip(names, results, strict=True):
        if rows := result.get("rows"):
            columns = tuple(columns_of(rows))
            yield Grid(name, columns, tuple(tuple(cell(row.get(column)) for column in columns) for row in rows))


def _load(result: Mapping[str, Any]) -> dict[str, Any]:
    """What says which load it was."""
    keys = ("backend", "model_id", "tokenizer_id", "request_rate", "burstiness", "max_concurrency", "seed", "slo")
    return {key: result[key] for key in keys if result.get(key) is not None} | dict(result.get("workload") or {})


def _facts(title: str, facts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Grid:
    """One column per result; a single one if they all say the same."""
    texts = [{key: _text(value) for key, value in mapping.items()} for mapping in facts]
    if all(mapping == texts[0] for mapping in texts):
        texts, names = texts[:1], [""]
    keys = dict.fromkeys(key for mapping in texts for key in mapping)
    return Grid(title, ("", *names), tuple((key, *(mapping.get(key, "-") for mapping in texts)) for key in keys))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
