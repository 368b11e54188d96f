"""The table of all rows with their floors, and jaxserve compared with its peer."""

from collections.abc import Iterable, Iterator, Mapping

from bench.gpu_parts import Row
from bench.gpu_parts.parts import Outcome

UNITS = ((1, "s"), (1e-3, "ms"), (1e-6, "µs"))


def ceilings(outcomes: Mapping[str, Outcome]) -> dict[str, float]:
    """Return what the simplest programs reached: "copy" in bytes/s, and operations/s by dtype."""
    found: dict[str, float] = {}
    for row in outcomes["ceilings"].rows if "ceilings" in outcomes else ():
        if row["case"] == "copy" and "seconds" in row:
            found["copy"] = row["bytes"] / row["seconds"]
        elif "dtype" in row and "seconds" in row:
            found[row["dtype"]] = row["flops"] / row["seconds"]
    return found


def floor(row: Row, limits: Mapping[str, float]) -> tuple[float, str] | None:
    """Return the least seconds that a row could take and what bounds it, or None if that is unknown."""
    if "copy" not in limits or row.get("dtype") not in limits or "bytes" not in row:
        return None
    return max((row["bytes"] / limits["copy"], "memory"), (row["flops"] / limits[row["dtype"]], "arithmetic"))


def reached(row: Row, limits: Mapping[str, float]) -> float | None:
    """Return the share of its ceiling that a row reaches."""
    least = floor(row, limits)
    return least[0] / row["seconds"] if least and row.get("seconds") else None


def with_shares(outcomes: Mapping[str, Outcome]) -> None:
    """Add `of_ceiling` and `bound` to every row that has a floor."""
    limits = ceilings(outcomes)
    for outcome in outcomes.values():
        for row in outcome.rows:
            share, least = reached(row, limits), floor(row, limits)
            if share is not None and least is not None:
                row["of_ceiling"], row["bound"] = float(f"{share:.4g}"), least[1]


def table(outcomes: Mapping[str, Outcome]) -> str:
    """Return Markdown: one line for each row, then what failed, then the comparison with the peer."""
    head = ["part", "case", "through", "time", "GB/s", "TFLOP/s", "tokens/s", "bound", "of its ceiling"]
    lines = [line(head), line(["---"] * 3 + ["---:"] * 4 + ["---", "---:"])]
    for name, outcome in outcomes.items():
        lines += [line(_cells(name, row)) for row in outcome.rows if row["case"] != "first_tokens"]
    troubles = [f"- {name}: {o.status}: {o.why.strip()}" for name, o in outcomes.items() if o.status != "ok"]
    lines += ["", *troubles, "", *peer_comparison(outcomes), "", *agreement(outcomes)]
    return "\n".join(lines).rstrip() + "\n"


def peer_comparison(outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    """Yield a comparison with Transformers where both have a case, with jaxserve's fused tier if it was measured."""
    # Rows of the fused tier come after those of the block tier and replace them.
    ours = dict(_by_case(outcomes, "LLM"))
    theirs = dict(_by_case(outcomes, "transformers"))
    both = [key for key in theirs if key in ours]
    if both:
        yield line(["model", "case", "tier", "jaxserve", "Transformers", "jaxserve is faster by"])
        yield line(["---", "---", "---", "---:", "---:", "---:"])
    for key in both:
        seconds, peer = ours[key]["seconds"], theirs[key]["seconds"]
        yield line([*key, ours[key]["tier"], time(seconds), time(peer), f"{peer / seconds:.2f}x"])


def agreement(outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    """Yield how many first tokens of fixed prompts are equal, where both engines had the same weights."""
    tokens = {
        (row["model"], row["through"]): row["tokens"]
        for outcome in outcomes.values()
        for row in outcome.rows
        if row["case"] == "first_tokens"
    }
    for (model, through), ours in tokens.items():
        theirs = tokens.get((model, "transformers"))
        if through == "LLM" and theirs and _same_weights(outcomes, model):
            equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
            yield f"first tokens equal to Transformers', {model}: {equal} of {len(ours)}"


def time(seconds: float) -> str:
    """Return a time in a suitable unit."""
    factor, unit = next((u for u in UNITS if seconds >= u[0]), UNITS[-1])
    return f"{seconds / factor:.3g} {unit}"


def _same_weights(outcomes: Mapping[str, Outcome], model: str) -> bool:
    """Return whether a checkpoint was written, rather than weights made by each engine."""
    rows = outcomes["checkpoint"].rows if "checkpoint" in outcomes else []
    return any(row["model"] == model and row["case"] == "written" for row in rows)


def _by_case(outcomes: Mapping[str, Outcome], through: str) -> Iterator[tuple[tuple[str, str], Row]]:
    for outcome in outcomes.values():
        for row in outcome.rows:
            if row.get("through") == through and "seconds" in row:
                yield (row["model"], row["case"]), row


def _cells(part: str, row: Row) -> list[str]:
    through = " ".join(row[key] for key in ("op", "through", "tier") if key in row)
    seconds = row.get("seconds")
    case = row["case"] + "".join(f", {row[key]}" for key in ("name", "attention", "error") if row.get(key))
    if seconds is None:
        value = next(
            (f"{row[key]:.3g} {unit}" for key, unit in (("gigabytes", "GB"), ("count", "")) if row.get(key)), ""
        )
        return [part, case, through, value, "", "", "", "", ""]
    tokens = f"{row['tok_s']:,.0f}" if "tok_s" in row else ""
    share = f"{row['of_ceiling']:.1%}" if "of_ceiling" in row else ""
    rates = [_rate(row, "bytes", 1e9), _rate(row, "flops", 1e12)]
    return [part, case, through, time(seconds), *rates, tokens, row.get("bound", ""), share]


def _rate(row: Row, what: str, unit: float) -> str:
    return f"{row[what] / row['seconds'] / unit:.3g}" if row.get(what) else ""


def line(cells: Iterable[str]) -> str:
    """Return a line of a table in Markdown."""
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"
