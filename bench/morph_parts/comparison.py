"""The end of the demo: a table, a verdict in words, and a page with both, the plot and the decisions."""

import base64
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.table import Column, Table

from bench.morph_parts.plots import draw

Results = Mapping[str, Mapping[str, Any]]
"""Results by the keys of result.json: "static", "int4", "morph"."""

ROWS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "requests over the SLO": lambda r: f"{_or_zero(r['slo_violation_rate']):.1%} of {r['num_prompts']}",
    "TTFT median, s": lambda r: _seconds(r["median_ttft_ms"]),
    "TTFT P95, s": lambda r: _seconds(r["p95_ttft_ms"]),
    "TTFT P99, s": lambda r: _seconds(r["p99_ttft_ms"]),
    "TPOT median, ms": lambda r: "-" if r["median_tpot_ms"] is None else f"{r['median_tpot_ms']:.1f}",
    "KV pages, at most": lambda r: f"{r['adaptation']['peak_kv_pages']}",
    "layers in fewer bits, at most": lambda r: f"{r['adaptation']['most_swapped_layers']}",
    "cross-entropy, nats": lambda r: f"{r['cross_entropy']:.4f} ({_loss(r):+.2%})",
    "transitions": lambda r: ", ".join(f"{n} {k}" for k, n in r["adaptation"]["transitions"].items()) or "-",
    "restored after the last answer": lambda r: _restored(r),
}


def _or_zero(value: float | None) -> float:
    return value or 0.0


def _seconds(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds / 1e3:.2f}"


def _loss(result: Mapping[str, Any]) -> float:
    return float(result["cross_entropy"] / result["cross_entropy_full"] - 1)


def _restored(result: Mapping[str, Any]) -> str:
    if not result["adaptation"]["transitions"]:
        return "-"
    seconds = result["restored_after_s"]
    if seconds is None:
        return "never"
    return "already before" if seconds == 0 else f"{seconds:.1f} s"


def table(results: Results) -> Table:
    """Return the comparison as a table for a terminal."""
    cells = {result["label"]: [text(result) for text in ROWS.values()] for result in results.values()}
    # Minimum widths, so that a narrow terminal cuts labels rather than figures.
    widths = {label: max(map(len, texts)) for label, texts in cells.items()}
    drawn = Table(Column(), *(Column(label, justify="right", min_width=width) for label, width in widths.items()))
    for name, text in ROWS.items():
        drawn.add_row(name, *(text(result) for result in results.values()))
    return drawn


def verdict(results: Results) -> str:
    """Return the outcome in words, whether adaptation helped or not."""
    static, int4, morph = results["static"], results["int4"], results["morph"]
    limit = morph["slo"]["ttft"] / 1e3
    before, after = _or_zero(static["slo_violation_rate"]), _or_zero(morph["slo_violation_rate"])
    pages = morph["adaptation"]["peak_kv_pages"] / static["adaptation"]["peak_kv_pages"]
    ratio = static["p95_ttft_ms"] / morph["p95_ttft_ms"]
    compared = f"{ratio:.1f} times shorter" if ratio >= 1 else f"{1 / ratio:.1f} times longer"
    return (
        f"In the same memory, {after:.1%} instead of {before:.1%} of the requests waited longer than {limit:g} s for "
        f"their first token. P95 TTFT is {compared}, and peak KV capacity is {pages:.2f} times that of full precision. "
        f"Cross-entropy is {_loss(morph):.2%} higher; with static int4 it is {_loss(int4):.2%} higher."
    )


def write_page(results: Results, path: Path) -> Path:
    """Write the self-contained page and return its path."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    image = base64.b64encode(draw(list(results.values()), "The same burst, in the same memory")).decode()
    morph = results["morph"]
    text = environment.get_template("demo.html.jinja").render(
        verdict=verdict(results),
        heads=[result["label"] for result in results.values()],
        rows=[(name, *(text(result) for result in results.values())) for name, text in ROWS.items()],
        image=f"data:image/png;base64,{image}",
        decisions=morph["decisions"],
        environment=morph["environment"],
        command=morph["command"],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
