"""The table: what was measured here, ratios, and numbers reported elsewhere for orientation."""

import statistics

# Quiet 2-core machine with AVX512-BF16, same shapes, bf16: (decode_1, decode_8, decode_32 in ms, prefill in tokens/s).
REPORTED = {
    "160m": {
        "vLLM-CPU": (8.1, 12.6, 22.8, 2280),
        "llama.cpp": (6.4, 11.3, 25.1, 2430),
        "transformers": (16.8, 21, 47, 2000),
    },
    "1.1b": {
        "vLLM-CPU": (60, 83, 218, 211),
        "llama.cpp": (51, 77, 183, 260),
        "transformers": (126, 130, 215, 316),
    },
}
DECIMALS = {"prefill": 0, "memory": 2}
REPORTED_CASES = ("decode_1", "decode_8", "decode_32", "prefill")


def combine(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The median over rounds of every case."""
    return {case: statistics.median(r[case] for r in rounds) for case in rounds[0]}


def table(model: str, measured: dict[str, dict[str, float]], skipped: dict[str, str]) -> str:
    """One Markdown table per model: a row per case, a column per engine with jaxserve's ratio to it.

    The ratio is of time for time: below 1, jaxserve is the faster one, in decode and prefill alike.
    """
    ours = measured.get("jaxserve")
    peers = [name for name in measured if name != "jaxserve"]
    reported = REPORTED.get(model, {})
    head = ["case", "jaxserve", *peers, *(f"{name}, reported, another machine" for name in reported)]
    lines = [f"### {model}", "", _row(head), _row(["---"] + ["---:"] * (len(head) - 1))]
    for case in next(iter(measured.values()), {}):
        cells = [_label(case), _number(case, ours[case]) if ours else "-"]
        cells += [_cell(case, measured[name][case], ours) for name in peers]
        cells += [_cell(case, _reported(values, case), ours) for values in reported.values()]
        lines.append(_row(cells))
    lines += ["", *(f"{name}: skipped: {reason}" for name, reason in skipped.items())]
    return "\n".join(lines)


def agreement(tokens: dict[str, list[int]]) -> str:
    """How many first tokens each engine shares with the first one: do they compute the same model?"""
    (reference, expected), *others = tokens.items() if tokens else [("", [])]
    return "".join(
        f"first tokens equal to {reference}'s: {name} {sum(map(int.__eq__, found, expected))} of {len(expected)}\n"
        for name, found in others
    )


def _reported(values: tuple[float, ...], case: str) -> float | None:
    return values[REPORTED_CASES.index(case)] if case in REPORTED_CASES else None


def _cell(case: str, peer: float | None, ours: dict[str, float] | None) -> str:
    if peer is None:
        return "-"
    if ours is None:
        return _number(case, peer)
    ratio = peer / ours[case] if case == "prefill" else ours[case] / peer
    return f"{_number(case, peer)} ({ratio:.2f}x)"


def _label(case: str) -> str:
    named = {"prefill": "prefill 4 x 512, tokens/s", "memory": "most resident memory, GB"}
    return named.get(case) or f"decode step, batch {case.removeprefix('decode_')}, ms"


def _number(case: str, value: float) -> str:
    return f"{value:.{DECIMALS.get(case, 1)}f}"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
