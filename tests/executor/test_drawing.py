"""XLA's sampler: which tokens top_k and top_p keep, and the cheapest program for what the rows of a step ask for."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.core.request import Request, Sequence
from jaxserve.core.sampling import SamplingParams
from jaxserve.parallel.placement import Placement
from jaxserve.sampling import drawing, ops as sampler
from jaxserve.sampling.device_sampler import DeviceSampler
from jaxserve.sampling.programs import SamplerPrograms
from tests.support.internals import masked_as_on_a_gpu

ROWS, VOCAB = 8, 300


def kept(weights: np.ndarray, k: int, p: float) -> np.ndarray:
    """Return which weights top_k and then top_p keep, by sorting them. Equal weights are kept or dropped together."""
    of_k = weights >= np.sort(weights)[-k]
    weights = np.where(of_k, weights, 0)
    above = np.array([weights[weights > weight].sum() for weight in weights])
    return of_k & ((p >= 1) | (above < p * weights.sum()))


def masked(weights: jax.Array, k: jax.Array, p: jax.Array) -> jax.Array:
    return drawing.top_p_mask(drawing.top_k_mask(weights, k), p)


MASKS = {"CPU": jax.jit(masked), "GPU": jax.jit(masked_as_on_a_gpu)}


@pytest.mark.parametrize("by", MASKS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), smallest=st.integers(0, 12))
def test_masks_keep_what_sorting_keeps(by: str, seed: int, smallest: int) -> None:
    """Weights are powers of two, so that every sum is exact."""
    rng = np.random.default_rng(seed)
    weights = np.exp2(-rng.integers(0, smallest + 1, (ROWS, VOCAB))).astype(np.float32)
    k, p = rng.integers(1, VOCAB + 1, ROWS), rng.integers(1, 65, ROWS) / 64
    result = np.asarray(MASKS[by](weights, jnp.asarray(k, jnp.int32), jnp.asarray(p, jnp.float32)))
    for row in range(ROWS):
        expected = kept(weights[row].astype(np.float64), int(k[row]), float(p[row]))
        np.testing.assert_array_equal(result[row], np.where(expected, weights[row], 0))


def test_row_draws_the_same_token_whether_or_not_its_program_has_masks() -> None:
    rng = np.random.default_rng(0)
    random, with_masks = jax.jit(sampler.sample_random), jax.jit(sampler.sample_masked)
    newest = jnp.zeros(ROWS + 1, jnp.int32)
    for spread in np.linspace(0.1, 10, 20):
        logits = rng.normal(0, spread, (ROWS, 5003)).astype(np.float32)
        packed = np.stack([sampler.idle_row(ROWS, logits.shape[1])] * ROWS, axis=1)
        packed[sampler.SLOT], packed[sampler.SEED] = np.arange(ROWS), rng.integers(-(2**31), 2**31, (2, ROWS))
        floats = packed[sampler.FLOATS].view(np.float32)
        floats[sampler.FLOAT_FIELDS.index("temperature")] = rng.choice([0, 0.7, 1.3], ROWS)
        floats[sampler.FLOAT_FIELDS.index("min_p")] = rng.choice([0, 0.1], ROWS)
        tokens, after = random(logits, packed, newest)
        np.testing.assert_array_equal(after[:-1], tokens)
        floats[0, -1] = 0.5  # the last row's top_p
        beside, _ = with_masks(logits, packed, newest)
        np.testing.assert_array_equal(tokens[:-1], beside[:-1])


def sequence(slot: int, **params: Any) -> Sequence:
    made = Sequence(Request("r", (15,), SamplingParams(max_tokens=20, **params), 0.0), 0, 0, 21)
    made.slot, made.starts = slot, 1
    made.num_computed = 1
    return made


def test_sampler_runs_the_cheapest_program_that_the_rows_of_a_step_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "XLA_ON_CPU", sampler.XLA)
    placement = Placement(tuple(jax.devices()[:2]))
    device = DeviceSampler(SamplerPrograms(placement, slots=4, vocab=VOCAB, max_len=32, top_logprobs=1))
    ran: list[str] = []

    def recorded(name: str) -> Any:
        program = getattr(device.programs, name)
        at = program.at

        def at_and_record(rows: int) -> Any:
            ran.append(name)
            return at(rows)

        return at_and_record

    for name in ("greedy", "random", "masked", "adjusted", "full"):
        monkeypatch.setattr(getattr(device.programs, name), "at", recorded(name))
    logits = jax.device_put(jnp.zeros((4, VOCAB)), placement.sharding())
    greedy, random = partial(sequence, temperature=0), partial(sequence, temperature=1.0)
    steps = [
        ("greedy", [greedy(0), greedy(1, top_k=5, top_p=0.5)]),
        ("random", [greedy(0), random(1)]),
        ("random", [random(0, min_p=0.1), random(1, top_k=VOCAB, top_p=1.0), random(2, top_k=VOCAB + 1)]),
        ("masked", [greedy(0), random(1, top_p=0.9)]),
        ("masked", [random(0), random(1, top_k=3)]),
        ("random", [random(1)]),  # the slot of one that asked for top_k
        ("adjusted", [random(0), random(1, top_p=0.9, frequency_penalty=0.5)]),
        ("full", [random(0), random(1, logprobs=1)]),
    ]
    for _, sequences in steps:
        device.sample(logits, sequences)
    assert ran == [name for name, _ in steps]
    device.close()
