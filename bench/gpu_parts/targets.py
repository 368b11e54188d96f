"""Targets for an H200: shares of what the device reaches in the same run, and ratios; met, missed or not measured.

Rates count the fewest bytes or operations (`costs.py`), as in the table of all rows. Cases are those of the `REAL`
sizes, so a tiny run measures none of them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bench.gpu_parts import Row
from bench.gpu_parts.parts import Outcome
from bench.gpu_parts.sizes import LARGEST
from bench.gpu_parts.table import ceilings, line

FEW_ROWS = (1, 2, 4, 8, 16)
LAYER_ROWS = (1, 16)
WEIGHTS = ("qkv", "o", "gate_up", "down")  # of a layer
ATTENTION = "8b decode, 64 x 4096"
PREFILLS = {"executor": "prefill step, 2048 tokens", "LLM": "prefill, 16 x 512"}
KERNELS, ENGINE = "kernels", "engine:8b"


@dataclass(frozen=True)
class Target:
    """A share, or a speed-up, that is to be reached; `measured` is None if a row is missing."""

    name: str
    least: float
    unit: str  # "%" or "x"
    measured: float | None
    tier: str = ""  # of the engine's row: fused if that was measured

    @property
    def verdict(self) -> str:
        """The verdict: met, missed or not measured."""
        if self.measured is None:
            return "not measured"
        return "met" if self.measured >= self.least else "missed"

    def cells(self) -> list[str]:
        """Return name, target, measured value, tier and verdict for the table."""
        found = "" if self.measured is None else _value(self.measured, self.unit)
        return [self.name, f"at least {_value(self.least, self.unit)}", found, self.tier, self.verdict]


def product_case(weight: str, rows: int, bits: int = 16) -> str:
    """Return the name of a product's case in `kernels.py`."""
    return f"8b {weight}{f' in int{bits}' if bits < 16 else ''}, {rows} rows"


def targets(outcomes: Mapping[str, Outcome]) -> list[Target]:
    """Return all targets, computed from the rows."""
    limits = ceilings(outcomes)
    return [
        *kernel_targets(outcomes, limits.get("copy")),
        *engine_targets(outcomes, limits.get("copy"), limits.get("bfloat16")),
    ]


def kernel_targets(outcomes: Mapping[str, Outcome], copy: float | None) -> Iterator[Target]:
    """Yield the targets of attention and products."""
    yield Target(
        f"paged decode attention, {ATTENTION}, of the copy bandwidth",
        80,
        "%",
        share(_kernels(outcomes, ATTENTION), copy),
    )
    for n in FEW_ROWS:
        case = product_case(LARGEST, n, 4)
        yield Target(f"{case}, of the copy bandwidth", 75, "%", share(_kernels(outcomes, case), copy))
    for n in LAYER_ROWS:
        together = _kernels(outcomes, *(product_case(weight, n, 4) for weight in WEIGHTS))
        name = f"8b, all products of a layer in int4, {n} rows, of the copy bandwidth"
        yield Target(name, 75, "%", share(together, copy))
    for n in FEW_ROWS:
        pair = _kernels(outcomes, product_case(LARGEST, n), product_case(LARGEST, n, 4))
        yield Target(f"{product_case(LARGEST, n, 4)}, beside bfloat16", 3, "x", ratio(*pair) if pair else None)


def engine_targets(outcomes: Mapping[str, Outcome], copy: float | None, bfloat16: float | None) -> Iterator[Target]:
    """Yield the targets of the 8B model: decode at batch 1 and prefill, through the executor and through `LLM`."""
    step = "decode, batch 1"
    int8, int4 = (f"{step}, layers in {precision}" for precision in ("int8", "int4"))
    for case, through in ((step, "executor"), (step, "LLM"), (int8, "executor"), (int4, "executor")):
        row = _engine(outcomes, case, through)
        name = f"8b {case}, {through}, of the copy bandwidth"
        yield Target(name, 80, "%", share([row] if row else [], copy), row["tier"] if row else "")
    quantised = _engine(outcomes, int4, "executor")
    whole = _engine(outcomes, step, "executor", quantised["tier"]) if quantised else None
    both = ratio(whole, quantised) if whole and quantised else None
    yield Target(f"8b {int4}, executor, beside bfloat16", 3, "x", both, whole["tier"] if whole else "")
    for through, case in PREFILLS.items():
        row = _engine(outcomes, case, through)
        reached = 100 * row["flops"] / row["seconds"] / bfloat16 if row and bfloat16 else None
        name = f"8b {case}, {through}, of the bfloat16 products' rate"
        yield Target(name, 55, "%", reached, row["tier"] if row else "")


def share(rows: list[Row], copy: float | None) -> float | None:
    """Return the percentage of the copy bandwidth at which rows together move the bytes that they must."""
    if not rows or not copy:
        return None
    return 100 * sum(row["bytes"] for row in rows) / sum(row["seconds"] for row in rows) / copy


def ratio(slow: Row, fast: Row) -> float:
    """Return how many times as fast as the first row the second is."""
    return slow["seconds"] / fast["seconds"]


def targets_table(outcomes: Mapping[str, Outcome]) -> str:
    """Return Markdown with a line for each target."""
    head = [line(["target", "to be reached", "measured", "tier", ""]), line(["---", "---:", "---:", "---", "---"])]
    return "\n".join(head + [line(target.cells()) for target in targets(outcomes)]) + "\n"


def _kernels(outcomes: Mapping[str, Outcome], *cases: str) -> list[Row]:
    """Return the rows of these cases, or no rows if one is missing."""
    rows = {row["case"]: row for row in _measured(outcomes, KERNELS)}
    return [rows[case] for case in cases] if all(case in rows for case in cases) else []


def _engine(outcomes: Mapping[str, Outcome], case: str, through: str, tier: str | None = None) -> Row | None:
    """Return the row of a tier, by default of the fused tier if it was measured."""
    found = [row for row in _measured(outcomes, ENGINE) if (row["case"], row.get("through")) == (case, through)]
    found.sort(key=lambda row: row["tier"] != "fused")
    return next((row for row in found if tier in (None, row["tier"])), None)


def _measured(outcomes: Mapping[str, Outcome], part: str) -> list[Row]:
    return [row for row in outcomes[part].rows if row.get("seconds")] if part in outcomes else []


def _value(number: float, unit: str) -> str:
    return f"{number:.3g} {unit}" if unit == "%" else f"{number:.3g}{unit}"
