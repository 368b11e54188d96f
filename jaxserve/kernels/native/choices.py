"""Which kernel multiplies how many rows: measured once on each processor, beside the checks of kernels.

The library has rules (`choice.h`), found on the processors that developers had. So that another processor takes what is
fastest there, the variants of the product are timed before the first start: for each precision of the weight, weights
of a small and of a large model, and several numbers of rows (`time_matmul.cc`). Variants take turns and the least time
counts, so that other work on the machine disturbs little. The rules are departed from only where another variant is
clearly faster, also when it is timed again.

Variants round differently, so the choice decides the last bits of results.

- It is kept in a file for each library and processor, like the outcome of the checks, and is not made again while that
  file exists. A choice that cannot be kept is not used: the rules hold then, in every start.
- A row's result may change with the number of other rows where the variant changes. So variants change as rarely as by
  the rules, and once more only where a weight in few bits would otherwise take longer than one in bfloat16.
- Weights in bfloat16, whose results are the reference for all others, keep the rules. They are timed for comparison.
"""

import logging
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import inf, log as logarithm
from pathlib import Path

from jaxserve.kernels.native.build import HERE
from jaxserve.kernels.native.checks import Check
from jaxserve.kernels.native.kept import keep, processor, read

SECONDS = 0.015  # for a product; it is timed at least three times
TOTAL = 2.5  # s after which no further product is timed; the rules hold for those that remain
PATIENCE = 60.0  # s that the process may take on a busy machine
AGAIN = 3  # times that departures from the rules are measured again
CLEARLY = 0.9  # of the usual variant's time
SAME = 1.05  # times of bfloat16's that count as the same
SAME_BITS = ("amxint8", "avx512bf16", "avx2")  # variants that give the same bits for weights in few bits
WHAT = "-times"  # in the names of files
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Timing:
    """The times of the variants of a product of rows in bfloat16 with a weight."""

    index: int  # of the product in the library
    bits: int  # of the weight
    wide: bool  # whether it stands for weights of long rows with large groups, or for all others (choice.h)
    rows: int
    usual: str  # the variant by the rules
    least: dict[str, float]  # s, by variant
    chosen: str  # the variant that serves


def chosen(library: Path, checks: Iterable[Check], identity: str | None = None) -> tuple[Timing, ...]:
    """Return the times of products with the variants that serve, measured now unless they are kept in a file.

    `checks` are those of the library: kernels that are not right are not timed. Nothing is returned if products cannot
    be timed or the choice cannot be kept.
    """
    left_out = [check.name for check in checks if not check.right]
    identity = processor() if identity is None else identity
    if found := _read(library, identity, left_out):
        return found
    _keep(library, identity, left_out, ())
    if not any(read(library, identity, WHAT)):
        log.info("the fastest native CPU kernels are not measured, because no folder can keep the choice")
        return ()
    timings = _timed(library, left_out)
    if not (first := _read(library, identity, left_out)):  # another process may have been faster: all use its choice
        _keep(library, identity, left_out, timings)
    return first or timings


def time_and_keep(library: Path, left_out: Sequence[str], identity: str | None = None) -> tuple[Timing, ...]:
    """Return the times of products, after keeping the choice in place of an earlier one."""
    timings = _timed(library, left_out)
    _keep(library, processor() if identity is None else identity, left_out, timings)
    return timings


def _timed(library: Path, left_out: Sequence[str]) -> tuple[Timing, ...]:
    """Return the times of all products. Those for which the rules are departed from are timed several times."""
    timings = choose(_run(library, left_out))
    for _ in range(AGAIN):
        departures = [timing.index for timing in timings if timing.chosen != timing.usual]
        again = {timing.index: timing.least for timing in _run(library, left_out, departures)} if departures else {}
        timings = choose([_merged(timing, again.get(timing.index, {})) for timing in timings])
    return tuple(timings)


def _merged(timing: Timing, again: Mapping[str, float]) -> Timing:
    return replace(timing, least={name: min(least, again.get(name, least)) for name, least in timing.least.items()})


def choose(timings: Iterable[Timing]) -> list[Timing]:
    """Return the times with the variants that should serve."""
    kinds: dict[tuple[int, bool], list[Timing]] = {}
    for timing in timings:
        kinds.setdefault((timing.bits, timing.wide), []).append(timing)
    full = {(timing.wide, timing.rows): timing.least.get(timing.usual, inf) for timing in kinds.get((16, False), [])}
    full |= {(timing.wide, timing.rows): timing.least.get(timing.usual, inf) for timing in kinds.get((16, True), [])}
    return [
        replace(timing, chosen=timing.usual if timing.bits == 16 else name)
        for of_kind in kinds.values()
        for timing, name in zip(of_kind, _assigned(of_kind, full), strict=True)
    ]


def _assigned(timings: Sequence[Timing], full: Mapping[tuple[bool, int], float]) -> list[str]:
    """Return a variant for each of several numbers of rows. `full` are the times of bfloat16 weights (s)."""
    ascending = sorted(timings, key=lambda timing: timing.rows)

    def slower(names: Sequence[str]) -> int:
        limits = [SAME * full.get((timing.wide, timing.rows), inf) for timing in ascending]
        times = [timing.least.get(name, 0.0) for timing, name in zip(ascending, names, strict=True)]
        return sum(found > limit for found, limit in zip(times, limits, strict=True))

    changes = _changes([timing.usual for timing in ascending])
    few, more = (_cheapest(ascending, most) for most in (changes, changes + 1))
    by_rows = dict(zip((timing.rows for timing in ascending), more if slower(more) < slower(few) else few, strict=True))
    return [by_rows[timing.rows] for timing in timings]


def _cheapest(timings: Sequence[Timing], changes: int) -> list[str]:
    """Return the variants with the least product of times, with at most so many changes of variant.

    Departing from the rules counts as if it took longer.
    """
    best: dict[tuple[str, int], tuple[float, list[str]]] = {}  # by the last variant and the changes so far
    for timing in timings:
        found: dict[tuple[str, int], tuple[float, list[str]]] = {}
        for name, least in timing.least.items():
            cost = logarithm(least) - (logarithm(CLEARLY) if name != timing.usual else 0.0)
            for (last, count), (sum_, names) in best.items() or [((name, 0), (0.0, []))]:
                key = name, count + _changes([last, name])
                if key[1] <= changes and sum_ + cost < found.get(key, (inf, []))[0]:
                    found[key] = sum_ + cost, [*names, name]
        best = found
    return min(best.values(), default=(0.0, [timing.usual for timing in timings]))[1]


def _changes(names: Sequence[str]) -> int:
    """Return how often the rounding of results changes between these variants."""
    rounding = ["integers" if name in SAME_BITS else name for name in names]
    return sum(one != other for one, other in pairwise(rounding))


def _run(library: Path, left_out: Sequence[str], indexes: Sequence[int] = ()) -> list[Timing]:
    """Return the times that a process of its own measures, of all products or of some. It may be none."""
    script = [str(HERE / "times_process.py"), str(library), str(SECONDS), str(TOTAL), "\n".join(left_out)]
    command = [sys.executable, "-I", "-S", *script, *map(str, indexes)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        log.info("native CPU kernels cannot be timed: %s", error)
        return []
    return [timing for line in done.stdout.decode().splitlines() if (timing := _parsed(line)) is not None]


def _parsed(line: str) -> Timing | None:
    """Return the times in a line, None if there are none, because there was too little memory."""
    index, *rest = line.split()
    if not rest:
        return None
    bits, width, rows, usual, *times = rest
    least = dict(zip(times[::2], map(float, times[1::2]), strict=True))
    return Timing(int(index), int(bits), width == "wide", int(rows), usual, least, usual) if usual in least else None


def _read(library: Path, identity: str, left_out: Sequence[str]) -> tuple[Timing, ...]:
    for kept in read(library, identity, WHAT):
        with suppress(KeyError, TypeError):
            if kept["left_out"] == list(left_out):
                return tuple(Timing(**timing) for timing in kept["products"])
    return ()


def _keep(library: Path, identity: str, left_out: Sequence[str], timings: Sequence[Timing]) -> None:
    found = {"left_out": list(left_out), "products": [asdict(timing) for timing in timings]}
    keep(library, identity, found, WHAT)


def table(timings: Sequence[Timing]) -> str:
    """Return the times as a table for people: what serves, beside bfloat16 weights and the other variants."""
    rows = [("weight", "shape", "rows", "variant", "us", "of bfloat16", "others")]
    full = {(timing.wide, timing.rows): timing.least[timing.chosen] for timing in timings if timing.bits == 16}
    for timing in sorted(timings, key=lambda timing: (-timing.bits, timing.wide, timing.rows)):
        seconds, bfloat16 = timing.least[timing.chosen], full.get((timing.wide, timing.rows))
        others = {name: least for name, least in timing.least.items() if name != timing.chosen}
        rows.append(
            (
                "bfloat16" if timing.bits == 16 else f"int{timing.bits}",
                "wide" if timing.wide else "narrow",
                str(timing.rows),
                timing.chosen + (" (measured)" if timing.chosen != timing.usual else ""),
                f"{seconds * 1e6:.1f}",
                f"{seconds / bfloat16:.2f}" if bfloat16 else "",
                ", ".join(f"{name} {least * 1e6:.1f}" for name, least in others.items()),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows) + "\n"
