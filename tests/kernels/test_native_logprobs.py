"""The native kernel for log-probabilities, compared with XLA's in every instruction set of this machine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.kernels.native.sampling import logprobs
from jaxserve.sampling.ops import Logprobs, logprobs_of

pytestmark = pytest.mark.usefixtures("native_kernels")
XLA = jax.jit(logprobs_of, static_argnames="top")
NATIVE = jax.jit(logprobs, static_argnames=("top", "max_lanes"))
WIDTHS = (16, 8, 4)


def assert_like_xla(logits: np.ndarray, tokens: np.ndarray, top: int) -> None:
    expected = XLA(logits, tokens, top=top)
    for lanes in WIDTHS:
        got = Logprobs(*NATIVE(logits, tokens, top=top, max_lanes=lanes))
        np.testing.assert_array_equal(got.rank, expected.rank)
        np.testing.assert_array_equal(got.top_ids, expected.top_ids)
        np.testing.assert_allclose(got.logprob, expected.logprob, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(got.top_logprobs, expected.top_logprobs, rtol=1e-5, atol=1e-4)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(data=st.data())
def test_native_logprobs_equal_xla_on_every_instruction_set(data: st.DataObject) -> None:
    vocab, top = data.draw(st.sampled_from([(3, 3), (130, 1), (300, 20), (4096, 20), (1000, 0)]), "vocabulary, top")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "numbers"))
    logits = rng.normal(data.draw(st.sampled_from([0, -300, 50])), rng.choice([0.1, 1, 30]), (5, vocab))
    if data.draw(st.booleans(), "with ties"):
        logits = np.round(logits) + 0.0  # not -0, which XLA takes for less than 0
    assert_like_xla(logits.astype(np.float32), rng.integers(0, vocab, 5).astype(np.int32), top)


@pytest.mark.parametrize("order", [1, -1, 0])
def test_native_logprobs_of_sorted_and_constant_rows_equal_xla(order: int) -> None:
    row = order * np.arange(700, dtype=np.float32) / 16
    assert_like_xla(np.stack([row, row]), np.array([0, 699], np.int32), 20)


@pytest.mark.parametrize("token", [-1, 9])
def test_native_logprobs_of_a_token_out_of_range_are_refused(token: int) -> None:
    with pytest.raises(Exception, match=f"token {token} is outside a vocabulary of 9"):
        jax.block_until_ready(NATIVE(np.zeros((1, 9), np.float32), jnp.array([token]), top=2))


@pytest.mark.parametrize("lanes", [16, 8, 4])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_native_logprobs_of_non_finite_logits_are_nan(lanes: int, value: float) -> None:
    logits = np.random.default_rng(0).normal(size=(2, 300)).astype(np.float32)
    logits[0, 299] = value
    logprob, _, _, top = NATIVE(logits, np.array([3, 3], np.int32), top=4, max_lanes=lanes)
    assert np.isnan(top[0]).any()
    assert np.isfinite(logprob[1])
    assert np.isfinite(top[1]).all()
