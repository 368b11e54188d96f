"""The measures of sensitivity and the greedy order, compared with values computed by hand and brute force."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.calibration.sensitivity.chain import LayerChain, rows_attend
from jaxserve.calibration.sensitivity.curves import curves, orders, points, qualities
from jaxserve.calibration.sensitivity.greedy import rank
from jaxserve.calibration.sensitivity.measures import Measures, cosine
from jaxserve.calibration.sensitivity.profile import BACK, FRONT, LIS, MDS, RANDOM, LayerScores, QualityCurve
from jaxserve.checkpoint import open_checkpoint
from jaxserve.kernels import HeadNorms
from jaxserve.models.dense import forward, restore_block
from tests.support.reference import turned

ROWS = np.random.default_rng(0).integers(0, 500, (3, 25), dtype=np.int32)
TOKENS = ROWS[:, :-1]


@pytest.fixture(scope="module")
def checkpoint(tiny_model):
    return open_checkpoint(tiny_model, "dummy")


@pytest.fixture(scope="module")
def chain(checkpoint):
    return LayerChain(checkpoint, lambda number, precision: checkpoint.variant(f"layers.{number}", precision))


def mixture_logits(checkpoint, precision: str, swapped: set[int]) -> np.ndarray:
    """Return the logits [N, S, V] of the modules themselves, with QArrays in the swapped layers."""
    config = checkpoint.config
    blocks = {}
    for block_id in config.block_ids:
        given = precision if block_id in {f"layers.{number}" for number in swapped} else None
        arrays = checkpoint.variant(block_id, given) if given else checkpoint.block(block_id)
        blocks[block_id] = restore_block(config, block_id, arrays, given)
    return np.stack([forward(config, blocks, jnp.asarray(row)) for row in TOKENS])


def by_hand(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(((a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)).mean())


# -- measures


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1, 0], [0, 2], 0),
        ([1, 1], [1, 0], math.sqrt(0.5)),
        ([3, 4], [6, 8], 1),
        ([3, 4], [-3, -4], -1),
        ([1, 2, 2], [2, 0, 1], 4 / (3 * math.sqrt(5))),
        ([0, 0], [1, 0], 0),
    ],
)
def test_cosine_equals_values_computed_by_hand(a, b, expected):
    assert float(cosine(jnp.array(a, jnp.float32), jnp.array(b, jnp.float32))) == pytest.approx(expected, abs=1e-6)


def test_chain_of_layers_equals_the_model(checkpoint, chain):
    x = chain.embed(TOKENS)
    for number in range(3):
        x = chain.layer(number, "int4" if number == 1 else None)(x)
    expected = mixture_logits(checkpoint, "int4", {1})
    head = restore_block(checkpoint.config, "head", checkpoint.block("head"))
    np.testing.assert_allclose(np.stack([head(row) for row in x]), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norms", [None, HeadNorms(jnp.ones(4), jnp.ones(4), 1e-6)])
def test_chain_keeps_sequences_of_a_batch_apart(norms):
    q, k, v = (jnp.asarray(np.random.default_rng(n).normal(size=(6, 2, 4)), jnp.float32) for n in range(3))
    together = rows_attend(2, 3, None, 4)(replace(turned(q[:, :, None], k, v), norms=norms))
    alone = rows_attend(1, 3, None, 4)(replace(turned(q[3:, :, None], k[3:], v[3:]), norms=norms))
    np.testing.assert_allclose(together[3:], alone, rtol=1e-5)


def test_local_similarities_compare_what_the_full_model_gives_each_layer(chain):
    lts, lrs = Measures(chain, TOKENS, "int3").local()
    x = chain.embed(TOKENS)
    for number in range(3):
        out, swapped = chain.layer(number, None)(x), chain.layer(number, "int3")(x)
        assert lts[number] == pytest.approx(by_hand(np.asarray(out), np.asarray(x)), abs=1e-6)
        assert lrs[number] == pytest.approx(by_hand(np.asarray(out), np.asarray(swapped)), abs=1e-6)
        assert lrs[number] < 1
        x = out


@pytest.mark.parametrize("swapped", [frozenset(), frozenset({1}), frozenset({0, 2})])
def test_degradation_compares_logits_before_and_after_a_swap(checkpoint, chain, swapped):
    candidates = {0, 1, 2} - swapped
    found = Measures(chain, TOKENS, "int3").degradation(swapped, candidates)
    base = mixture_logits(checkpoint, "int3", set(swapped))
    assert found.keys() == candidates
    for candidate, mds in found.items():
        assert mds == pytest.approx(by_hand(base, mixture_logits(checkpoint, "int3", swapped | {candidate})), abs=1e-5)
        assert mds < 0.99999


def test_degradation_at_last_positions_compares_each_sequences_last_logits(checkpoint, chain):
    found = Measures(chain, TOKENS, "int3", positions="last").degradation(frozenset(), [1])
    full, mixed = mixture_logits(checkpoint, "int3", set()), mixture_logits(checkpoint, "int3", {1})
    assert found[1] == pytest.approx(by_hand(full[:, -1], mixed[:, -1]), abs=1e-5)


def test_chain_reads_weights_again_that_it_does_not_keep(checkpoint, chain):
    forgetful = LayerChain(
        checkpoint, lambda number, precision: checkpoint.variant(f"layers.{number}", precision), keep_bytes=0
    )
    for precision in (None, "int4"):
        x = chain.embed(TOKENS)
        np.testing.assert_array_equal(forgetful.layer(0, precision)(x), chain.layer(0, precision)(x))


# -- the greedy order


def brute_force(local, table, weight):
    """Return the order found by measuring every candidate at every choice."""
    order = []
    while len(order) < len(local):
        left = [p for p in range(len(local)) if p not in order]
        order.append(max(left, key=lambda p: local[p] + weight * table(frozenset(order), [p])[p]))
    return tuple(order)


@pytest.mark.parametrize("seed", range(30))
def test_ranking_equals_brute_force(seed):
    rng = np.random.default_rng(seed)
    spread = 10.0 ** rng.integers(-3, 2)  # of the local parts: small ones leave many candidates to be measured
    local = (spread * rng.random(6)).tolist()
    mds: dict[tuple[frozenset[int], int], float] = {}

    def table(swapped, candidates):
        return {p: mds.setdefault((swapped, p), float(rng.random())) for p in candidates}

    found = rank(local, table, 0.5)
    assert tuple(choice.layer for choice in found.choices) == brute_force(local, table, 0.5)
    assert found.first_mds == tuple(mds[frozenset(), p] for p in range(6))
    for place, choice in enumerate(found.choices):
        before = frozenset(c.layer for c in found.choices[:place])
        assert choice.mds == mds[before, choice.layer]
        assert choice.lis == pytest.approx(local[choice.layer] + 0.5 * choice.mds)


def test_ranking_of_a_model_equals_brute_force(chain):
    measures = Measures(chain, TOKENS, "int3")
    found = rank([0.0, 0.0, 0.0], measures.degradation, 1.0)
    assert tuple(choice.layer for choice in found.choices) == brute_force([0.0] * 3, measures.degradation, 1.0)


def test_ranking_does_not_measure_candidates_that_cannot_win():
    asked = []

    def constant(swapped, candidates):
        asked.append((len(swapped), tuple(candidates)))
        return dict.fromkeys(candidates, 0.9)

    found = rank([1.0, 3.0, 2.98, 2.0], constant, 0.5)
    assert [choice.layer for choice in found.choices] == [1, 2, 3, 0]
    assert asked == [(0, (0, 1, 2, 3)), (1, (2,)), (2, (3,)), (3, (0,))]


def test_ranking_prefers_the_lower_layer_between_equals():
    found = rank([1.0] * 4, lambda swapped, candidates: dict.fromkeys(candidates, 1.0), 0.5)
    assert [choice.layer for choice in found.choices] == [0, 1, 2, 3]


# -- curves


def test_qualities_equal_those_of_the_swapped_model(checkpoint, chain):
    found = qualities(chain, ROWS, "int3", [frozenset({0, 2}), frozenset({1})])
    assert found.keys() == {frozenset(), frozenset({1}), frozenset({0, 2})}
    full = log_softmax(mixture_logits(checkpoint, "int3", set()))
    for swapped, (loss, kl, top1) in found.items():
        mixed = log_softmax(mixture_logits(checkpoint, "int3", set(swapped)))
        assert loss == pytest.approx(-np.take_along_axis(mixed, ROWS[:, 1:, None], -1).mean(), rel=1e-5)
        assert kl == pytest.approx((np.exp(full) * (full - mixed)).sum(-1).mean(), abs=1e-6)
        assert top1 == pytest.approx((full.argmax(-1) == mixed.argmax(-1)).mean())
    assert found[frozenset()][1:] == pytest.approx([0, 1])
    assert found[frozenset({1})][1] > 1e-6


def test_qualities_do_not_depend_on_groups_of_sequences(chain, monkeypatch):
    sets = [frozenset({0}), frozenset({0, 1})]
    together = qualities(chain, ROWS, "int3", sets)
    monkeypatch.setattr("jaxserve.calibration.sensitivity.curves.STREAM_BYTES", 2 * 3 * 24 * 64 * 4)
    begun = []
    apart = qualities(chain, ROWS, "int3", sets, lambda what, steps: begun.append(steps) or (lambda: None))
    assert begun == [2 * 3 + 3]
    for swapped, values in together.items():
        np.testing.assert_allclose(apart[swapped], values, rtol=1e-5, atol=1e-7)


def scores(order: Sequence[int]) -> LayerScores:
    """Return scores with an order of LIS, and with an MDS that grows with the layer."""
    mds = tuple(layer / len(order) for layer in range(len(order)))
    return LayerScores(tuple(order), mds, mds, mds, mds, mds)


def test_quality_curves_of_all_orders_meet_at_the_ends(chain):
    compared = orders(scores((1, 0, 2)), seeds=2)
    found = curves(chain, ROWS, "int3", compared, points(3, 17))
    ends = {(c.cross_entropy[0], c.cross_entropy[-1]) for group in found.values() for c in group}
    assert len(ends) == 1
    assert {name: len(group) for name, group in found.items()} == {LIS: 1, MDS: 1, FRONT: 1, BACK: 1, RANDOM: 2}
    single = qualities(chain, ROWS, "int3", [frozenset({1})])[frozenset({1})]
    assert found[LIS][0].kl[1] == single[1]


def test_compared_orders_are_reproducible_permutations():
    compared = orders(scores(range(9)), seeds=3)
    assert compared[MDS] == ((8, 7, 6, 5, 4, 3, 2, 1, 0),)
    assert compared[FRONT] == (tuple(range(9)),)
    assert compared[BACK] == (tuple(range(8, -1, -1)),)
    assert compared == orders(scores(range(9)), seeds=3)
    assert len(set(compared[RANDOM])) == 3
    assert all(sorted(order) == list(range(9)) for order in compared[RANDOM])


def test_curve_points_include_both_ends():
    assert points(8, 17) == tuple(range(9))
    assert points(32, 5) == (0, 8, 16, 24, 32)
    for most in range(2, 40):
        found = points(36, most)
        assert (found[0], found[-1]) == (0, 36)
        assert len(found) == min(most, 37)
        assert all(a < b for a, b in pairwise(found))


def test_curve_area_is_the_mean_height():
    curve = QualityCurve((0, 1, 4), (1.0, 3.0, 3.0), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    assert curve.area("cross_entropy") == pytest.approx((2 * 1 + 3 * 3) / 4)
    assert curve.area("top1") == 1


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)
