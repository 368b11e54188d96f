"""Microbatches have equal predicted cost, within their limits, and compute every token once and in order."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from jaxserve.scheduler.chunk_cost import TOKENS, ChunkCost
from jaxserve.scheduler.lookahead import MicrobatchLimits, Portion, lookahead

COST = ChunkCost(a=1e-8, b=2e-5, g=4e-3)
UNLIMITED = MicrobatchLimits(max_sequences=10**6, max_tiles=10**6, tile=1)


def decodes(*prefixes: int) -> list[Portion]:
    return [Portion(f"decode {number}", prefix, 1, decode=True) for number, prefix in enumerate(prefixes)]


def prompts(*lengths: int) -> list[Portion]:
    return [Portion(f"prompt {number}", 0, length) for number, length in enumerate(lengths)]


def added(cost: ChunkCost, batch: list[Portion]) -> float:
    return sum(cost.added(portion.prefix, portion.length) for portion in batch)


def test_costs_of_a_thousand_random_queues_are_within_a_tenth() -> None:
    rng = np.random.default_rng(0)
    for _ in range(1000):
        cost = ChunkCost(a=10 ** rng.uniform(-10, -8), b=10 ** rng.uniform(-5, -4), g=10 ** rng.uniform(-4, -2))
        queue = decodes(*rng.integers(1, 4000, rng.integers(0, 100)))
        queue += prompts(*(10 ** rng.uniform(2, 3.7, rng.integers(1, 12))).astype(int))
        parts = int(rng.integers(2, 9))
        found = lookahead(queue, cost, UNLIMITED, parts)
        costs = [cost.microbatch((portion.prefix, portion.length) for portion in batch) for batch in found]
        assert len(found) == parts
        assert max(costs) <= 1.1 * min(costs), (cost, queue, parts)


def test_later_pieces_of_a_prompt_have_fewer_tokens_since_their_attention_costs_more() -> None:
    found = lookahead(prompts(4096), ChunkCost(a=1e-8, b=1e-5, g=0.0), UNLIMITED, 4)
    lengths = [piece.length for (piece,) in found]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 2 * lengths[-1]
    assert [piece.prefix for (piece,) in found] == [sum(lengths[:number]) for number in range(4)]


def test_microbatches_of_equal_tokens_have_unequal_cost() -> None:
    queue = decodes(3000, 3000) + prompts(100, 4000)
    found = lookahead(queue, TOKENS, UNLIMITED, 3)
    sizes = [sum(portion.length for portion in batch) for batch in found]
    assert max(sizes) - min(sizes) <= 1
    costs = [added(COST, batch) for batch in found]
    assert max(costs) > 1.5 * min(costs)


def test_a_fraction_is_the_share_of_the_last_microbatch() -> None:
    found = lookahead(prompts(2500), TOKENS, UNLIMITED, 2.5)
    assert [piece.length for (piece,) in found] == pytest.approx([1000, 1000, 500], abs=20)
    assert len(lookahead(prompts(2050), TOKENS, UNLIMITED, 2.05)) == 2, "too small to be one by itself"


def test_decodes_are_divided_and_never_cut() -> None:
    found = lookahead(decodes(*[100] * 91), COST, UNLIMITED, 3)
    assert [len(batch) for batch in found] in ([30, 30, 31], [30, 31, 30], [31, 30, 30])


def test_prompts_are_not_cut_into_pieces_that_are_not_worth_a_step() -> None:
    limits = MicrobatchLimits(max_sequences=8, max_tiles=64, tile=16, least=100)
    assert lookahead(prompts(200), TOKENS, limits, 3) == [prompts(200)], "two pieces of 96 or 112 tokens"
    found = lookahead(prompts(500), TOKENS, limits, 3)
    assert [piece.length for (piece,) in found] == [160, 176, 164]


def test_work_that_fits_into_one_step_stays_together_if_one_is_wanted() -> None:
    queue = decodes(5, 6) + prompts(30)
    assert lookahead(queue, COST, UNLIMITED, 1) == [queue]
    assert lookahead([], COST, UNLIMITED, 3) == []


@given(
    st.lists(st.integers(1, 3000), max_size=20),
    st.lists(st.tuples(st.integers(0, 500), st.integers(1, 1000)), max_size=6),
    st.floats(0.2, 7),
    st.builds(
        MicrobatchLimits,
        max_sequences=st.integers(1, 30),
        max_tiles=st.integers(1, 40),
        tile=st.sampled_from([16, 64]),
        least=st.integers(1, 300),
    ),
    st.sampled_from([COST, TOKENS, ChunkCost(1e-6, 1e-5, 1e-3)]),
)
def test_every_token_is_computed_once_in_order_and_within_the_limits(
    prefixes: list[int],
    lengths: list[tuple[int, int]],
    parts: float,
    limits: MicrobatchLimits,
    cost: ChunkCost,
) -> None:
    queue = decodes(*prefixes)
    queue += [Portion(f"prompt {number}", prefix, length) for number, (prefix, length) in enumerate(lengths)]
    found = lookahead(queue, cost, limits, parts)
    assert all(batch and limits.fits(batch) for batch in found)
    flat = [portion for batch in found for portion in batch]
    assert list(dict.fromkeys(portion.sequence for portion in flat)) == [portion.sequence for portion in queue]
    for whole in queue:
        at = whole.prefix
        for piece in (portion for portion in flat if portion.sequence == whole.sequence):
            assert piece.prefix == at
            assert not whole.decode or piece == whole
            at += piece.length
            assert (at - whole.prefix) % limits.tile == 0 or at == whole.prefix + whole.length
        assert at == whole.prefix + whole.length
    for batch in found:
        names = [portion.sequence for portion in batch]
        assert len(set(names)) == len(names)
