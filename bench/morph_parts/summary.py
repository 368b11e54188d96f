"""Tables from the results of all rounds: the figures of each system under each workload, and the targets."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.morph_parts.systems import ACCURACY, FULL, INT4, INT8, LABELS, NAMES, PERFORMANCE
from bench.morph_parts.timeline import saturated_throughput
from jaxserve.bench.result import Result

SATURATION, LIGHT = "saturation", "light"
NOT_TRACES = (SATURATION, LIGHT)
RESTORED_S = 10.0


@dataclass(frozen=True)
class Cell:
    """The figures of one system under one workload, over all rounds; None stands for not measured."""

    rounds: int
    requests: int
    failed: int
    violations: float | None  # share of the requests without a first token within the objective
    ttft_s: tuple[float, float, float] | None  # P50, P95, P99 over the requests of all rounds
    tpot_ms: tuple[float, float] | None  # median, P99 over the requests of all rounds
    throughput: float | None  # tokens/s in the middle of a run, median of the rounds
    peak_pages: int
    loss: float | None  # relative rise of the cross-entropy
    agreement: float | None
    restored_s: float | None  # the longest; infinite if a run was not restored
    transitions: Mapping[str, int]
    step_ratio: float | None  # median over all intervals with swaps
    swapped: float  # swapped layers, mean over tokens


def cell(results: Sequence[Result]) -> Cell:
    """Return the figures of one system and workload from its rounds."""
    errors = np.concatenate([np.array([bool(e) for e in r["errors"]], bool) for r in results])
    ttfts = np.concatenate([np.array(r["ttfts"], float) for r in results])[~errors]
    objective = results[0]["slo"]["ttft"] / 1e3
    times_per_token = np.concatenate([tpots(r) for r in results])
    throughputs = [value for r in results if (value := saturated_throughput(r)) is not None]
    restored = [np.inf if r["restored_after_s"] is None else r["restored_after_s"] for r in results]
    outcomes = [r["adaptation"]["transitions"] for r in results]
    ratios = [ratio for r in results for ratio in r["adaptation"]["gap_during_swaps_over_before"]]
    return Cell(
        rounds=len(results),
        requests=len(errors),
        failed=int(errors.sum()),
        violations=float((errors.sum() + (ttfts > objective).sum()) / len(errors)) if len(errors) else None,
        ttft_s=_percentiles(ttfts, (50, 95, 99)),
        tpot_ms=_percentiles(times_per_token * 1e3, (50, 99)),
        throughput=float(np.median(throughputs)) if throughputs else None,
        peak_pages=max(r["adaptation"]["peak_kv_pages"] for r in results),
        loss=_mean(r["cross_entropy"] / r["cross_entropy_full"] - 1 for r in results if r["cross_entropy"] is not None),
        agreement=_mean(r["agreement"]["share"] for r in results if r.get("agreement")),
        restored_s=max(restored, default=None),
        transitions={key: sum(o.get(key, 0) for o in outcomes) for key in sorted({k for o in outcomes for k in o})},
        step_ratio=float(np.median(ratios)) if ratios else None,
        swapped=float(np.mean([_swapped(r) for r in results])),
    )


def tpots(result: Result) -> np.ndarray:
    """Return the mean seconds per token after the first, of each complete answer of two tokens or more."""
    rows = zip(result["itls"], result["output_lens"], result["errors"], strict=True)
    return np.array([sum(gaps) / (count - 1) for gaps, count, error in rows if count > 1 and not error])


def _percentiles(values: np.ndarray, which: Sequence[int]) -> Any:
    return tuple(np.percentile(values, which).tolist()) if len(values) else None


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return float(np.mean(found)) if found else None


def _swapped(result: Result) -> float:
    tokens = result["adaptation"]["tokens_by_swapped_layers"]
    total = sum(tokens.values())
    return sum(int(count) * number for count, number in tokens.items()) / total if total else 0.0


Cells = Mapping[str, Mapping[str, Cell]]
"""Cells by workload and system."""


def cells(results: Iterable[Result]) -> dict[str, dict[str, Cell]]:
    """Return the cells of all results of one model."""
    grouped: dict[str, dict[str, list[Result]]] = {}
    for result in results:
        grouped.setdefault(result["traffic"], {}).setdefault(result["system"], []).append(result)
    return {
        traffic: {name: cell(by_system[name]) for name in NAMES if name in by_system}
        for traffic, by_system in grouped.items()
    }


# -- tables

# Functions of a cell, and of the cell of full precision under that workload.
COLUMNS: dict[str, Callable[[Cell, Cell], str]] = {
    "requests": lambda c, _: f"{c.requests}" + (f" ({c.failed} failed)" if c.failed else ""),
    "SLO violated": lambda c, _: text_of(c.violations, "{:.1%}"),
    "TTFT P50 / P95 / P99, s": lambda c, _: " / ".join(f"{v:.2f}" for v in c.ttft_s) if c.ttft_s else "-",
    "TPOT median / P99, ms": lambda c, _: " / ".join(f"{v:.1f}" for v in c.tpot_ms) if c.tpot_ms else "-",
    "peak KV pages": lambda c, full: f"{c.peak_pages} ({c.peak_pages / full.peak_pages:.2f}x)",
    "layers swapped": lambda c, _: f"{c.swapped:.1f}",
    "loss": lambda c, _: text_of(c.loss, "{:+.2%}"),
    "agreement": lambda c, _: text_of(c.agreement, "{:.1%}"),
    "restored after, s": lambda c, _: text_of(c.restored_s, "{:.1f}"),
    "transitions": lambda c, _: ", ".join(f"{n} {k}" for k, n in c.transitions.items()) or "-",
    "gap in swaps": lambda c, _: text_of(c.step_ratio, "{:.2f}x"),
}


def workload_tables(found: Cells) -> str:
    """Return Markdown with a table for each workload."""
    parts = []
    for traffic, by_system in found.items():
        if FULL not in by_system:
            continue
        full, columns = by_system[FULL], dict(COLUMNS)
        if traffic == SATURATION:
            columns = {"tokens/s": _throughput} | columns
        head = f"| {traffic} | {' | '.join(columns)} |\n| --- |{' ---: |' * len(columns)}"
        rows = [
            f"| {LABELS[name]} | {' | '.join(column(c, full) for column in columns.values())} |"
            for name, c in by_system.items()
        ]
        parts.append("\n".join([head, *rows]))
    return "\n\n".join(parts)


def _throughput(c: Cell, full: Cell) -> str:
    if c.throughput is None or not full.throughput:
        return "-"
    return f"{c.throughput:.0f} ({c.throughput / full.throughput:.2f}x)"


def text_of(value: float | None, form: str) -> str:
    """Return a formatted value, or "-" for None."""
    return "-" if value is None else form.format(value)


# -- targets


Lost = Callable[[Cell, Cell], float | None]
"""Returns a system's loss in a trace relative to full precision, as a share."""


@dataclass(frozen=True)
class Verdict:
    """A target, its measured value, and whether that meets it (None: not measured)."""

    target: str
    measured: str
    met: bool | None


MIN_TTFT_RATIO = {ACCURACY: 3.9, INT8: 3.9, PERFORMANCE: 10.0}  # of P95, full precision over the mode
MAX_TPOT_RATIO = {ACCURACY: 1.06, INT8: 1.06, PERFORMANCE: 1.0}  # of the median, the mode over full precision
WITH_QUALITY_TARGETS = (ACCURACY, INT8)


def verdicts(found: Cells) -> list[Verdict]:
    """Return the verdicts on both modes, and on layers in int8 if that was measured."""
    modes = [mode for mode in MIN_TTFT_RATIO if mode != INT8 or any(mode in cells for cells in found.values())]
    traces = [name for name in found if name not in NOT_TRACES and {FULL, *modes} <= found[name].keys()]
    listed = []
    for mode in modes:
        min_ttft_ratio, max_tpot_ratio = MIN_TTFT_RATIO[mode], MAX_TPOT_RATIO[mode]
        words = "below" if mode == PERFORMANCE else "at most"
        longest = max((c[mode].restored_s or 0.0 for c in found.values() if mode in c), default=None)
        listed += [
            _fewer_violations(found, traces, mode),
            _ratio_in_every_trace(
                found, traces, mode, f"P95 TTFT at least {min_ttft_ratio:g}x better", _ttft_ratio, min_ttft_ratio
            ),
            _throughput_verdict(found, mode),
            _ratio_in_every_trace(found, traces, mode, "peak KV capacity at least 1.33x", _pages_ratio, 1.33),
            _ratio_in_every_trace(
                found,
                traces,
                mode,
                f"median TPOT {words} {max_tpot_ratio:g}x",
                _tpot_ratio,
                max_tpot_ratio,
                at_most=True,
            ),
            Verdict(
                f"{LABELS[mode]}: restored within {RESTORED_S:g} s of the end, every time",
                text_of(longest, "at most {:.1f} s"),
                None if longest is None else longest <= RESTORED_S,
            ),
            _no_transitions(found, mode),
        ]
        for what, lost in LOSSES.items() if mode in WITH_QUALITY_TARGETS else ():
            listed += [_loss(found, traces, mode, what, lost), _half_loss(found, traces, mode, what, lost)]
    return listed


def _fewer_violations(found: Cells, traces: Sequence[str], mode: str) -> Verdict:
    def violated(system: str) -> float:
        cells = [found[name][system] for name in traces]
        return sum((c.violations or 0.0) * c.requests for c in cells) / max(sum(c.requests for c in cells), 1)

    target = f"{LABELS[mode]}: SLO violations at least 92 % lower, all traces together"
    before, after = violated(FULL), violated(mode)
    if not before:
        return Verdict(target, "full precision violated no SLO", None)
    lower = 1 - after / before
    return Verdict(target, f"{lower:.1%} lower ({before:.1%} to {after:.1%})", lower >= 0.92)


def _ratio_in_every_trace(
    found: Cells,
    traces: Sequence[str],
    mode: str,
    text: str,
    ratio: Callable[[Cell, Cell], float | None],
    limit: float,
    *,
    at_most: bool = False,
) -> Verdict:
    """Return a verdict on a ratio to full precision that must hold in every trace."""
    ratios = {name: ratio(found[name][mode], found[name][FULL]) for name in traces}
    known = {name: value for name, value in ratios.items() if value is not None}
    met = all(value <= limit if at_most else value >= limit for value in known.values()) if known else None
    values = ", ".join(f"{name} {value:.2f}x" for name, value in known.items())
    return Verdict(f"{LABELS[mode]}: {text}, in every trace", values or "-", met)


def _ttft_ratio(c: Cell, full: Cell) -> float | None:
    return full.ttft_s[1] / c.ttft_s[1] if c.ttft_s and full.ttft_s else None


def _tpot_ratio(c: Cell, full: Cell) -> float | None:
    return c.tpot_ms[0] / full.tpot_ms[0] if c.tpot_ms and full.tpot_ms else None


def _throughput_verdict(found: Cells, mode: str) -> Verdict:
    target = f"{LABELS[mode]}: throughput at saturation at least 1.6x"
    by_system = found.get(SATURATION, {})
    c, full = by_system.get(mode), by_system.get(FULL)
    if c is None or full is None or not c.throughput or not full.throughput:
        return Verdict(target, "-", None)
    ratio = c.throughput / full.throughput
    return Verdict(target, f"{ratio:.2f}x ({full.throughput:.0f} to {c.throughput:.0f} tokens/s)", ratio >= 1.6)


def _pages_ratio(c: Cell, full: Cell) -> float:
    return c.peak_pages / full.peak_pages


def _agreement_lost(c: Cell, full: Cell) -> float | None:
    return None if c.agreement is None or not full.agreement else 1 - c.agreement / full.agreement


LOSSES: Mapping[str, Lost] = {"cross-entropy": lambda c, _: c.loss, "agreement with full precision": _agreement_lost}


def _loss(found: Cells, traces: Sequence[str], mode: str, what: str, lost: Lost) -> Verdict:
    target = f"{LABELS[mode]}: loses at most 2.2 % ({what}), in every trace"
    losses = [value for name in traces if (value := lost(found[name][mode], found[name][FULL])) is not None]
    return Verdict(target, f"at most {max(losses):.2%}" if losses else "-", max(losses) <= 0.022 if losses else None)


def _half_loss(found: Cells, traces: Sequence[str], mode: str, what: str, lost: Lost) -> Verdict:
    target = f"{LABELS[mode]}: loses at most half of static int4 ({what}), in every trace"
    shares = {
        name: mine / static
        for name in traces
        if INT4 in found[name]
        and (mine := lost(found[name][mode], found[name][FULL])) is not None
        and (static := lost(found[name][INT4], found[name][FULL]))
    }
    values = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    return Verdict(target, values or "-", max(shares.values()) <= 0.5 if shares else None)


def _no_transitions(found: Cells, mode: str) -> Verdict:
    target = f"{LABELS[mode]}: no transitions under light load"
    c = found.get(LIGHT, {}).get(mode)
    if c is None:
        return Verdict(target, "-", None)
    count = sum(c.transitions.values())
    return Verdict(target, f"{count} transitions", count == 0)


def verdict_table(listed: Sequence[Verdict]) -> str:
    """Return the verdicts as a table in Markdown."""
    words = {True: "met", False: "**missed**", None: "not measured"}
    rows = [f"| {v.target} | {v.measured} | {words[v.met]} |" for v in listed]
    return "\n".join(["| target | measured | |", "| --- | --- | --- |", *rows])
