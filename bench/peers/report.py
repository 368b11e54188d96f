"""The table: measured figures, ratios, and figures from other sources for orientation."""

import statistics
from collections.abc import Mapping, Sequence

from bench.bandwidth import Bandwidth
from bench.peers.turns import MEMORY_BOUND, OURS, Outcome
from bench.peers.workload import PREFILL_BATCH, CaseLengths

Figures = dict[str, float]  # by case: "decode_1", ..., "prefill", "weights", "memory"

# On a quiet 2-core machine with AVX512-BF16, same shapes: (decode_1, decode_8, decode_32 in ms, prefill in tokens/s).
REPORTED: dict[str, dict[str, dict[str, tuple[float, ...]]]] = {
    "160m": {
        "vLLM-CPU": {"bf16": (8.1, 12.6, 22.8, 2280)},
        "llama.cpp": {"bf16": (6.4, 11.3, 25.1, 2430), "int8": (3.7, 15.9, 41, 1290), "int4": (2.4, 7.5, 20.7, 2050)},
        "transformers": {"bf16": (16.8, 21, 47, 2000)},
    },
    "1.1b": {
        "vLLM-CPU": {"bf16": (60, 83, 218, 211)},
        "llama.cpp": {"bf16": (51, 77, 183, 260), "int8": (28, 106, 296, 135), "int4": (15.3, 52, 151, 258)},
        "transformers": {"bf16": (126, 130, 215, 316)},
    },
}
REPORTED_CASES = ("decode_1", "decode_8", "decode_32", "prefill")
DECIMALS = {"prefill": 0, "weights": 0, "memory": 2}
LABELS = {
    "weights": "weights read per step, MB",
    "memory": "peak resident memory, GB",
}


def summary(outcome: Outcome, lengths: CaseLengths) -> dict:
    """Return, as JSON, medians over rounds, ratios and jaxserve's share of the bandwidth, with all samples."""
    ours = outcome.samples.get(OURS, {})
    return {
        "measured": {name: medians(found) | _facts(outcome.engines[name]) for name, found in outcome.samples.items()},
        "ratios": {name: ratios(ours, found) for name, found in outcome.samples.items() if name != OURS},
        "bandwidth": medians(_transposed(outcome.bandwidths)),
        "share": share(ours.get(MEMORY_BOUND, []), outcome.engines.get(OURS, {}), outcome.bandwidths, lengths),
        "skipped": outcome.skipped,
        "engines": outcome.engines,
        "samples": outcome.samples,
        "bandwidths": outcome.bandwidths,
    }


def medians(samples: Mapping[str, Sequence[float]]) -> Figures:
    """Return the median over rounds of every case."""
    return {case: statistics.median(found) for case, found in samples.items()}


def ratios(ours: Mapping[str, Sequence[float]], theirs: Mapping[str, Sequence[float]]) -> Figures:
    """Return by case the median over rounds of jaxserve's time over the other engine's time in the same round.

    Both take their turns within seconds, so this says more than the ratio of two medians.
    """
    return {
        case: statistics.median(_ratio(case, a, b) for a, b in zip(ours[case], theirs[case], strict=False))
        for case in ours.keys() & theirs.keys()
    }


def share(
    steps: Sequence[float],
    engine: Mapping[str, float],
    bandwidths: Sequence[Mapping[str, float]],
    lengths: CaseLengths,
) -> float | None:
    """Return the share of the memory bandwidth at which a decode step of one sequence reads weights, keys and values.

    `steps` is in ms. The bandwidth was measured right before and right after each step. The result is the median over
    rounds, or None if a figure is missing.
    """
    if not engine:
        return None
    size = 1e6 * (engine["weights"] + engine["token"] * (lengths.decode + lengths.steps / 2))
    rounds = zip(steps, bandwidths[::2], bandwidths[1::2], strict=False)
    shares = [statistics.mean(Bandwidth(**found).share(size, 1e-3 * ms) for found in around) for ms, *around in rounds]
    return statistics.median(shares) if shares else None


def _facts(engine: Mapping[str, float]) -> Figures:
    return {name: engine[name] for name in ("weights", "memory") if name in engine}


def _transposed(entries: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    return {key: [entry[key] for entry in entries] for key in (entries[0] if entries else ())}


def table(model: str, summaries: Mapping[str, dict], lengths: CaseLengths) -> str:
    """Return one Markdown table for a model, with a row per case and precision and a column per engine.

    `summaries` is by precision. In parentheses is the ratio of jaxserve's time to the engine's in the same rounds:
    below 1, jaxserve is faster, in decode and prefill alike. A "-" stands for what was not measured or does not exist.
    """
    peers = list(dict.fromkeys(name for s in summaries.values() for name in s["measured"] if name != OURS))
    elsewhere = REPORTED.get(model, {}) if lengths == CaseLengths() else {}
    reported = {name: found for name, found in elsewhere.items() if found.keys() & summaries.keys()}
    head = ["case", "precision", OURS, "of bandwidth", *peers, *(f"{n}, reported, another machine" for n in reported)]
    lines = [f"### {model}", "", _row(head), _row(["---"] * 2 + ["---:"] * (len(head) - 2))]
    for case in dict.fromkeys(case for s in summaries.values() for found in s["measured"].values() for case in found):
        for precision, s in summaries.items():
            ours = s["measured"].get(OURS, {}).get(case)
            cells = [
                _label(case, lengths),
                precision,
                _number(case, ours),
                _percent(s["share"] if case == MEMORY_BOUND else None),
            ]
            cells += [
                _cell(case, s["measured"].get(name, {}).get(case), ours, s["ratios"].get(name, {}).get(case))
                for name in peers
            ]
            cells += [_cell(case, _reported(found.get(precision), case), ours) for found in reported.values()]
            lines.append(_row(cells))
    return "\n".join([*lines, "", *(line for p, s in summaries.items() for line in _remarks(p, s))])


def agreement(tokens: Mapping[str, Sequence[int]]) -> list[str]:
    """Return lines that say how many first tokens each engine shares with the first engine.

    Engines that compute the same model share most of them.
    """
    (reference, expected), *others = tokens.items() if tokens else [("", [])]
    return [
        f"first tokens equal to {reference}'s: {name} {sum(map(int.__eq__, found, expected))} of {len(expected)}"
        for name, found in others
    ]


def _remarks(precision: str, summary: dict) -> list[str]:
    """Return lines about skipped engines and other facts that the table does not show."""
    lines = []
    if summary["bandwidth"]:
        lines.append("memory is read at {median:.1f} GB/s (best pass {best:.1f})".format(**summary["bandwidth"]))
    lines += [f"{name}: skipped: {reason}" for name, reason in summary["skipped"].items()]
    lines += agreement({name: found["first_tokens"] for name, found in summary["engines"].items()})
    return [f"- {precision}: {line}" for line in lines]


def _reported(values: tuple[float, ...] | None, case: str) -> float | None:
    return values[REPORTED_CASES.index(case)] if values and case in REPORTED_CASES else None


def _cell(case: str, peer: float | None, ours: float | None, ratio: float | None = None) -> str:
    """Return a peer's figure and the ratio to it, by default the ratio of the two figures."""
    if peer is None or ours is None:
        return _number(case, peer)
    return f"{_number(case, peer)} ({_ratio(case, ours, peer) if ratio is None else ratio:.2f}x)"


def _ratio(case: str, ours: float, theirs: float) -> float:
    """Return jaxserve's time over the other engine's time."""
    return theirs / ours if case == "prefill" else ours / theirs


def _label(case: str, lengths: CaseLengths) -> str:
    if case == "prefill":
        return f"prefill {PREFILL_BATCH} x {lengths.prefill}, tokens/s"
    context = "" if lengths == CaseLengths() else f" after {lengths.decode}"
    return LABELS.get(case) or f"decode step{context}, batch {case.removeprefix('decode_')}, ms"


def _number(case: str, value: float | None) -> str:
    return "-" if value is None else f"{value:.{DECIMALS.get(case, 1)}f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
