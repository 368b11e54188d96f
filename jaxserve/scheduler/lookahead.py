"""Lookahead batch formation of KunServe (section 4.3, figures 10 and 11): microbatches of equal predicted cost.

All work that is ready forms one batch, which is halved by its cost, again and again, until there are as many
microbatches as wanted. Prompts are cut between tiles, and only into pieces that are worth a step. The order of the work
stays: a prompt's tokens are computed in order, in one microbatch or in several that follow each other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any

from jaxserve.core.numeric import ceil_div
from jaxserve.scheduler.chunk_cost import ChunkCost

LEAST_REST = 0.1  # of a microbatch; a smaller rest makes the others larger instead of being one by itself
CLOSE = 1.05  # costs within this factor count as equal
ROUNDS = 10  # in which shares are corrected
TRIES = 4  # numbers of microbatches that are tried until each fits into a step


@dataclass(frozen=True, slots=True)
class Portion:
    """Work of one sequence: `length` tokens after `prefix` tokens. A decode has one token and is never cut."""

    sequence: Any
    prefix: int
    length: int
    decode: bool = False


Microbatch = list[Portion]


@dataclass(frozen=True)
class MicrobatchLimits:
    """Limits on the microbatches."""

    max_sequences: int  # decodes of a microbatch
    max_tiles: int  # tiles of prompts in a microbatch
    tile: int  # tokens
    least: int = 1  # tokens of the pieces that a prompt is cut into

    def fits(self, batch: Sequence[Portion]) -> bool:
        """Return whether one step can compute a batch."""
        decodes = sum(portion.decode for portion in batch)
        return decodes <= self.max_sequences and self.tiles(batch) <= self.max_tiles

    def tiles(self, batch: Sequence[Portion]) -> int:
        """Return the tiles of a batch's prompts."""
        return sum(ceil_div(portion.length, self.tile) for portion in batch if not portion.decode)


def lookahead(
    queue: Sequence[Portion], cost: ChunkCost, limits: MicrobatchLimits, parts: float = 1.0
) -> list[Microbatch]:
    """Return the work of `queue`, in order, as microbatches of equal cost.

    There are `parts` of them, or more if they would be too large for a step. A fraction is a last one with that share
    of the others' cost: 2.5 are two and a half. Pieces that cannot be divided finely enough make costs unequal.
    """
    batch = list(queue)
    if not batch:
        return []
    if parts <= 1 and limits.fits(batch):
        return [batch]
    shares = _shares(max(parts, _steps_needed(batch, limits)))
    for _ in range(TRIES):
        found = _divided(batch, cost, limits, shares)
        if all(map(limits.fits, found)):
            return found
        shares = [1.0] * (len(shares) + 1)
    return [step for part in found for step in _cut_to_fit(part, limits)]


def first_piece(prompt: Portion, limits: MicrobatchLimits) -> Portion:
    """Return the smallest piece that a prompt may be cut into, its first tokens, or all of it."""
    least = min(ceil_div(limits.least, limits.tile), limits.max_tiles) * limits.tile
    rest = prompt.length - least
    return prompt if rest < least and prompt.length <= limits.max_tiles * limits.tile else replace(prompt, length=least)


def _divided(batch: Microbatch, cost: ChunkCost, limits: MicrobatchLimits, wanted: Sequence[float]) -> list[Microbatch]:
    """Return a batch in parts whose costs are to each other as `wanted`, as nearly as it can be divided.

    To cut a prompt saves pairs of its attention, so that the parts of the half in which it is cut more often cost less
    than their share. The shares of the halves are then corrected by what came of them.
    """
    shares, best, least = list(wanted), [batch], inf
    for _ in range(ROUNDS):
        parts = _halved(batch, cost, limits, shares)
        costs = [
            sum(cost.added(p.prefix, p.length) for p in part) / each for part, each in zip(parts, wanted, strict=True)
        ]
        unequal = max(costs) / max(min(costs), 1e-12)
        if unequal < least:
            best, least = parts, unequal
        if unequal <= CLOSE or min(costs) == 0:
            break
        mean = sum(costs) / len(costs)
        shares = [share * (mean / each) ** 0.7 for share, each in zip(shares, costs, strict=True)]
    return [part for part in best if part]


def _steps_needed(batch: Sequence[Portion], limits: MicrobatchLimits) -> int:
    decodes = sum(portion.decode for portion in batch)
    return max(ceil_div(decodes, limits.max_sequences), ceil_div(limits.tiles(batch), limits.max_tiles))


def _shares(parts: float) -> list[float]:
    """Return the relative costs of the microbatches."""
    whole = int(parts)
    rest = parts - whole
    return [1.0] * whole + ([rest] if rest >= LEAST_REST else []) or [1.0]


def _halved(batch: Microbatch, cost: ChunkCost, limits: MicrobatchLimits, shares: Sequence[float]) -> list[Microbatch]:
    """Return a batch in parts whose costs are to each other as `shares`."""
    if len(shares) == 1:
        return [batch]
    half = ceil(len(shares) / 2)
    left, right = _split(batch, cost, limits, sum(shares[:half]) / sum(shares))
    return [*_halved(left, cost, limits, shares[:half]), *_halved(right, cost, limits, shares[half:])]


def _split(batch: Microbatch, cost: ChunkCost, limits: MicrobatchLimits, share: float) -> tuple[Microbatch, Microbatch]:
    """Return a batch in two, of which the first has this share of the cost."""
    costs = [cost.added(portion.prefix, portion.length) for portion in batch]
    left = share * sum(costs)
    for index, (portion, whole) in enumerate(zip(batch, costs, strict=True)):
        if whole > left:
            if portion.decode:
                length = round(left / whole)
            else:
                length = _nearest_cut(cost.length(portion.prefix, left), portion.length, limits)
            first, rest = _pieces(portion, length)
            return [*batch[:index], *first], [*rest, *batch[index + 1 :]]
        left -= whole
    return batch, []


def _nearest_cut(wanted: float, length: int, limits: MicrobatchLimits) -> int:
    """Return the number of tokens nearest to `wanted` after which a prompt of `length` tokens may be cut, 0 or all."""
    tile = limits.tile
    least = ceil_div(limits.least, tile) * tile
    most = (length - least) // tile * tile  # of the first piece
    allowed = (0, length) if most < least else (0, min(max(round(wanted / tile) * tile, least), most), length)
    return min(allowed, key=lambda tokens: abs(tokens - wanted))


def _pieces(portion: Portion, length: int) -> tuple[Microbatch, Microbatch]:
    """Return the first tokens of a portion and the others, each of which may be none."""
    if length == 0:
        return [], [portion]
    if length == portion.length:
        return [portion], []
    rest = replace(portion, prefix=portion.prefix + length, length=portion.length - length)
    return [replace(portion, length=length)], [rest]


def _cut_to_fit(batch: Microbatch, limits: MicrobatchLimits) -> Iterator[Microbatch]:
    """Yield a batch in steps, each as large as a step can be."""
    step: Microbatch = []
    for portion in batch:
        rest = [portion]
        while rest:
            (portion,) = rest
            room = limits.max_tiles - limits.tiles(step)
            full = sum(p.decode for p in step) >= limits.max_sequences if portion.decode else room == 0
            if full:
                yield step
                step = []
                continue
            length = portion.length if portion.decode else min(portion.length, room * limits.tile)
            first, rest = _pieces(portion, length)
            step += first
    if step:
        yield step
