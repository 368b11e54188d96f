"""The report on a sweep over request rates: rates.json, and from that document alone tables and plots."""

import datetime
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.morph_parts.rate_plots import draw_rates, draw_tpot
from bench.morph_parts.rate_points import QUANTILES, LightLoad, Point, Sustained, light_load, points, sustained
from bench.morph_parts.rates import SATURATED, load_name
from bench.morph_parts.summary import text_of
from bench.morph_parts.systems import LABELS, Setup
from jaxserve.bench.environment import describe_environment
from jaxserve.bench.result import Result, build, load, save

RATES = "rates.json"
TOKENS = ("total_input_tokens", "total_output_tokens")


def write(results: Sequence[Result], setup: Setup, folder: Path, *, quantised_by: str, missing: Sequence[str]) -> str:
    """Write rates.json, rates.md and the plots into the folder, and return the report."""
    save(document(results, setup, quantised_by=quantised_by, missing=missing), folder / RATES)
    saved = load(folder / RATES)
    text = report(saved)
    (folder / "rates.md").write_text(text, encoding="utf-8")
    found, slo_s = points_of(saved), saved["slo"]["ttft"] / 1e3
    (folder / "rates.png").write_bytes(draw_rates(found, slo_s, f"{setup.name}: Poisson arrivals"))
    (folder / "tpot.png").write_bytes(draw_tpot(found, f"{setup.name}: time per output token"))
    return text


def document(
    results: Sequence[Result], setup: Setup, *, quantised_by: str, missing: Sequence[str] = ()
) -> dict[str, Any]:
    """Return all figures of a sweep as one result of the bench, without the requests.

    `quantised_by` says how layers get fewer bits, and `missing` lists runs without a result.
    """
    found = points(results)
    facts = {
        "model_id": setup.name,
        "slo": {"ttft": setup.slo_ttft * 1e3},
        "served": {"kv_pages": setup.kv_pages, "max_num_seqs": setup.max_num_seqs, "prefill": setup.prefill_tokens},
        "quantised_by": quantised_by,
        "capacity": sorted({result["capacity"] for result in results if result["multiple"] != SATURATED}),
        "lengths": _lengths(results),
        "quantiles": QUANTILES,
        "sustained": [asdict(system) for system in sustained(found, setup.slo_ttft)],
        "light_load": [asdict(check) | {"is_unharmed": check.is_unharmed} for check in light_load(results)],
        "missing": list(missing),
        "warnings": [_name(result) + warning for result in results if (warning := result["client"].get("warning"))],
    }
    made = {"date": datetime.datetime.now(), "command": sys.argv, "environment": describe_environment()}
    return build("trace", target=facts, rows=[asdict(point) for point in found], **made)


def _lengths(results: Sequence[Result]) -> list[float]:
    """Return the mean tokens of the prompts and of the answers of all complete requests."""
    complete = sum(result["completed"] for result in results)
    return [sum(result[name] for result in results) / max(complete, 1) for name in TOKENS]


def _name(result: Result) -> str:
    return f"{load_name(result['multiple'])}, {result['label']}: "


def points_of(saved: Mapping[str, Any]) -> list[Point]:
    """Return the points in a document."""
    return [Point(**row) for row in saved["rows"]]


# -- the tables

COLUMNS: dict[str, Callable[[Point], str]] = {
    "load": lambda p: f"{p.multiple:g}x ({p.rate:.1f}/s)",
    "system": lambda p: LABELS[p.system],
    "requests": lambda p: f"{p.requests}" + (f" ({p.failed} failed)" if p.failed else ""),
    "SLO violated": lambda p: text_of(p.violations, "{:.1%}"),
    "TTFT P50 / P95, s": lambda p: _joined((p.ttft_p50_s, p.ttft_p95_s), "{:.2f}"),
    "TPOT mean / P50 / P95 / P99, ms": lambda p: _joined(
        (p.tpot_mean_ms, p.tpot_p50_ms, p.tpot_p95_ms, p.tpot_p99_ms), "{:.1f}"
    ),
    "queueing mean / P95, ms": lambda p: _joined((p.queue_mean_ms, p.queue_p95_ms), "{:.0f}"),
    "tokens/s": lambda p: text_of(p.tokens_per_s, "{:.0f}"),
    "preempted": lambda p: f"{p.preemptions}",
    "KV use mean / max": lambda p: _joined((p.kv_used_mean, p.kv_used_max), "{:.0%}"),
    "peak KV pages": lambda p: f"{p.peak_kv_pages}",
    "swaps (decisions)": lambda p: (
        f"{p.swaps} ({p.decisions})" + (f", {p.failed_transitions} failed" if p.failed_transitions else "")
    ),
    "layers swapped": lambda p: f"{p.swapped_layers:.1f}",
    "loss": lambda p: text_of(p.loss, "{:+.2%}"),
    "agreement": lambda p: text_of(p.agreement, "{:.1%}"),
    "restored after, s": lambda p: text_of(p.restored_s, "{:.1f}"),
}


def report(saved: Mapping[str, Any]) -> str:
    """Return the report on a document of `document` in Markdown."""
    prompt, answer = saved["lengths"]
    capacity = ", ".join(f"{tokens:.0f}" for tokens in saved["capacity"]) or "unknown"
    parts = [
        f"# {saved['model_id']}: request rates",
        f"Full precision at saturation: {capacity} tokens/s. Prompts have {prompt:.0f} and answers {answer:.0f} tokens "
        f"on average. SLO: {saved['slo']['ttft'] / 1e3:g} s to the first token. Fewer bits: {saved['quantised_by']}.",
        point_table(points_of(saved)),
        sustained_table([Sustained(**row) for row in saved["sustained"]]),
    ]
    if checks := saved["light_load"]:
        known = [{key: value for key, value in check.items() if key != "is_unharmed"} for check in checks]
        parts.append(light_table([LightLoad(**check) for check in known]))
    for title, lines in (("Not measured", saved["missing"]), ("The client fell behind", saved["warnings"])):
        if lines:
            parts.append("\n".join([f"{title}:\n", *(f"- {line}" for line in lines)]))
    parts.append("\n".join(f"- {key}: {value}" for key, value in saved["environment"].items()))
    return "\n\n".join(parts) + "\n"


def point_table(found: Sequence[Point]) -> str:
    """Return Markdown with a row per rate and system."""
    return _table(list(COLUMNS), [[column(point) for column in COLUMNS.values()] for point in found])


def sustained_table(found: Sequence[Sustained]) -> str:
    """Return Markdown with the load that each system sustains."""
    return _table(
        ["system", "load up to which P95 TTFT meets the SLO"],
        [[LABELS[system.system], _load(system)] for system in found],
    )


def _load(system: Sustained) -> str:
    if system.multiple is None:
        return "none of those measured"
    return f"{system.multiple:.2f}x" if system.is_exceeded else f"at least {system.multiple:.2f}x"


def light_table(found: Sequence[LightLoad]) -> str:
    """Return Markdown with the check at light load."""
    return _table(
        ["light load", "transitions", "answers as full precision's", "unharmed", "first reason"],
        [
            [
                LABELS[c.system],
                f"{c.transitions}",
                f"{c.identical} of {c.answers}",
                "yes" if c.is_unharmed else "**no**",
                c.reason or "-",
            ]
            for c in found
        ],
    )


def _joined(values: Sequence[float | None], form: str) -> str:
    return " / ".join(text_of(value, form) for value in values)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
