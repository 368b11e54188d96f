"""Sampling of a row does not depend on what other rows ask for, although much is computed only if one row asks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.native import sampling as native
from jaxserve.sampling import ops as sampler

VOCAB, TOP = 300, 4
ASKS: dict[str, dict[str, float]] = {
    "greedy": {},
    "random": {"temperature": 0.8},
    "random of few": {"temperature": 1.0, "top_k": 5, "top_p": 0.7},
    "penalised": {"repetition": 1.9, "presence": 0.5, "frequency": 0.25},
    "penalised, random": {"temperature": 1.2, "repetition": 1.9},
    "biased": {"bias": 1},
    "logprobs": {"logprobs": 1},
}


def packed(names: list[str]) -> np.ndarray:
    """Return rows with these requests (i32[11, R]), each in the slot of its position in ASKS."""
    rows = []
    for name in names:
        asks, slot = ASKS[name], list(ASKS).index(name)
        row = sampler.idle_row(slot, VOCAB)
        row[sampler.POSITION], row[sampler.SEED], row[sampler.TOP_K] = 7, (slot, 11), asks.get("top_k", VOCAB)
        floats = row[sampler.FLOATS].view(np.float32)
        for i, field in enumerate(sampler.FLOAT_FIELDS):
            floats[i] = asks.get(field, floats[i])
        rows.append(row)
    return np.stack(rows, axis=1)


RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(len(ASKS), VOCAB)).astype(np.float32) * 2
SEEN = RNG.random((len(ASKS) + 1, VOCAB)) < 0.5  # by slot, of which the last one is spare
COUNTS = RNG.integers(0, 3, (len(ASKS) + 1, VOCAB)).astype(np.int32)


FULL = {
    name: jax.jit(partial(sampler.sample_full, implementation=by, top_logprobs=TOP))
    for name, by in {"xla": sampler.XLA, "native": sampler.NATIVE}.items()
}
both = pytest.mark.parametrize("kind", FULL)


def sample(kind: str, names: list[str]) -> tuple[np.ndarray, sampler.Logprobs]:
    if kind == "native" and not native.supported():
        pytest.skip("needs the native library")
    ids, biases = sampler.sparse_biases([], len(names))
    for row, name in enumerate(names):
        if "bias" in ASKS[name]:
            ids[row, 0], biases[row, 0] = 17, 100
    own = [list(ASKS).index(name) for name in names]
    newest, history = jnp.zeros(len(ASKS) + 1, jnp.int32), sampler.History(jnp.asarray(SEEN), jnp.asarray(COUNTS))
    tokens, newest, after, logprobs = FULL[kind](LOGITS[own], packed(names), newest, history, ids, biases)
    np.testing.assert_array_equal(newest[np.array(own)], tokens)
    np.testing.assert_array_equal(after.counts[np.array(own), tokens], COUNTS[own, tokens] + 1)
    return np.asarray(tokens), logprobs


@both
@pytest.mark.parametrize("name", ASKS)
def test_row_samples_the_same_token_alone_and_in_a_batch(name: str, kind: str) -> None:
    together, logprobs = sample(kind, list(ASKS))
    alone, own_logprobs = sample(kind, [name])
    row = list(ASKS).index(name)
    assert alone[0] == together[row]
    if "logprobs" in ASKS[name]:
        for one, all_rows in zip(own_logprobs, logprobs, strict=True):
            np.testing.assert_allclose(one[0], all_rows[row], rtol=1e-6)
        assert own_logprobs.top_ids[0, 0] == alone[0]


@both
def test_penalties_biases_and_greedy_choose_the_expected_tokens(kind: str) -> None:
    tokens = dict(zip(ASKS, sample(kind, list(ASKS))[0], strict=True))
    row, asks = list(ASKS).index("penalised"), ASKS["penalised"]
    repeated = np.where(LOGITS[row] > 0, LOGITS[row] / asks["repetition"], LOGITS[row] * asks["repetition"])
    penalised = np.where(SEEN[row] | (COUNTS[row] > 0), repeated, LOGITS[row])
    penalised -= asks["frequency"] * COUNTS[row] + asks["presence"] * (COUNTS[row] > 0)
    assert tokens["penalised"] == penalised.argmax() != LOGITS[row].argmax()
    assert tokens["biased"] == 17
    assert tokens["greedy"] == LOGITS[list(ASKS).index("greedy")].argmax()
