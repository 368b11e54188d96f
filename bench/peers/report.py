"""The table: what was measured here, ratios, and numbers reported elsewhere for orientation."""

import statistics
from collections.abc import Mapping, Sequence

from bench.bandwidth import Bandwidth
from bench.peers.turns import OURS, Outcome

Results = dict[str, float]  # by case: "decode_1", ..., "prefill", "weights", "memory"

# Quiet 2-core machine with AVX512-BF16, same shapes: (decode_1, decode_8, decode_32 in ms, prefill in tokens/s).
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
MEMORY_BOUND = "decode_1"  # the case whose share of the bandwidth is told
DECIMALS = {"prefill": 0, "weights": 0, "memory": 2}
LABELS = {
    "prefill": "prefill 4 x 512, tokens/s",
    "weights": "weights that a step reads, MB",
    "memory": "most resident memory, GB",
}


def summary(outcome: Outcome) -> dict:
    """The medians over rounds, the bandwidth and jaxserve's share of it, as JSON, with all that they come from."""
    measured = {name: combine([answer["results"] for answer in found]) for name, found in outcome.rounds.items()}
    bandwidth = combine(outcome.bandwidth) if outcome.bandwidth else None
    return {
        "measured": measured,
        "bandwidth": bandwidth,
        "share": share(measured.get(OURS, {}), bandwidth),
        "skipped": outcome.skipped,
        "packages": {name: found[0]["packages"] for name, found in outcome.rounds.items()},
        "rounds": outcome.rounds,
        "bandwidths": outcome.bandwidth,
    }


def combine(rounds: Sequence[Mapping[str, float]]) -> Results:
    """The median over rounds of every case."""
    return {case: statistics.median(r[case] for r in rounds) for case in rounds[0]}


def share(results: Results, bandwidth: Mapping[str, float] | None) -> float | None:
    """The part of the memory's bandwidth at which a decode step of one sequence reads the weights, if both are known.

    Keys and values, of some 100 tokens, are not counted.
    """
    if bandwidth is None or MEMORY_BOUND not in results:
        return None
    return Bandwidth(**bandwidth).share(1e6 * results["weights"], 1e-3 * results[MEMORY_BOUND])


def table(model: str, summaries: Mapping[str, dict]) -> str:
    """One Markdown table per model: a row per case and precision, a column per engine with jaxserve's ratio to it.

    `summaries` by precision. The ratio is of time for time: below 1, jaxserve is the faster one, in decode and prefill
    alike. A "-" is what was not measured, or does not exist.
    """
    peers = list(dict.fromkeys(name for s in summaries.values() for name in s["measured"] if name != OURS))
    reported = {name: found for name, found in REPORTED.get(model, {}).items() if found.keys() & summaries.keys()}
    head = ["case", "precision", OURS, "of bandwidth", *peers, *(f"{n}, reported, another machine" for n in reported)]
    lines = [f"### {model}", "", _row(head), _row(["---"] * 2 + ["---:"] * (len(head) - 2))]
    for case in dict.fromkeys(case for s in summaries.values() for found in s["measured"].values() for case in found):
        for precision, s in summaries.items():
            ours = s["measured"].get(OURS, {}).get(case)
            cells = [
                _label(case),
                precision,
                _number(case, ours),
                _percent(s["share"] if case == MEMORY_BOUND else None),
            ]
            cells += [_cell(case, s["measured"].get(name, {}).get(case), ours) for name in peers]
            cells += [_cell(case, _reported(found.get(precision), case), ours) for found in reported.values()]
            lines.append(_row(cells))
    return "\n".join([*lines, "", *(line for p, s in summaries.items() for line in _remarks(p, s))])


def agreement(tokens: Mapping[str, Sequence[int]]) -> list[str]:
    """How many first tokens each engine shares with the first one: do they compute the same model?"""
    (reference, expected), *others = tokens.items() if tokens else [("", [])]
    return [
        f"first tokens equal to {reference}'s: {name} {sum(map(int.__eq__, found, expected))} of {len(expected)}"
        for name, found in others
    ]


def _remarks(precision: str, summary: dict) -> list[str]:
    """What does not fit into the table."""
    lines = []
    if summary["bandwidth"]:
        lines.append("memory is read at {median:.1f} GB/s (best pass {best:.1f})".format(**summary["bandwidth"]))
    lines += [f"{name}: skipped: {reason}" for name, reason in summary["skipped"].items()]
    lines += agreement({name: found[0]["first_tokens"] for name, found in summary["rounds"].items()})
    return [f"- {precision}: {line}" for line in lines]


def _reported(values: tuple[float, ...] | None, case: str) -> float | None:
    return values[REPORTED_CASES.index(case)] if values and case in REPORTED_CASES else None


def _cell(case: str, peer: float | None, ours: float | None) -> str:
    if peer is None or ours is None:
        return _number(case, peer)
    ratio = peer / ours if case == "prefill" else ours / peer
    return f"{_number(case, peer)} ({ratio:.2f}x)"


def _label(case: str) -> str:
    return LABELS.get(case) or f"decode step, batch {case.removeprefix('decode_')}, ms"


def _number(case: str, value: float | None) -> str:
    return "-" if value is None else f"{value:.{DECIMALS.get(case, 1)}f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
