"""Rounding with searched scales: never worse than plain rounding, the same however it is divided, finite always."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.checkpoint.rounding import round_block, round_weight
from jaxserve.core.config import ModelConfig
from jaxserve.core.errors import CheckpointError
from jaxserve.kernels import native
from jaxserve.quantization import QArray
from jaxserve.quantization.packing import unpack
from jaxserve.quantization.rounding import quantize
from jaxserve.quantization.scale_search import quantize_by_search

FEW_BITS = pytest.mark.parametrize("bits", [4, 3])
SYMMETRIC = pytest.mark.parametrize("symmetric", [True, False])


def values(q: QArray) -> np.ndarray:
    """Return the weight in float64."""
    codes = unpack(np.asarray(q.codes), q.bits, q.size).astype(np.float64) - (1 << (q.bits - 1))
    scales, zeros = (
        np.repeat(np.asarray(x, np.float64), q.group, axis=-1) if x is not None else 0.0 for x in (q.scales, q.zeros)
    )
    return scales * (codes - zeros)


def errors(w: np.ndarray, q: QArray) -> np.ndarray:
    """Return the sum of squared errors of each group, weighted as the search does for 3 and 4 bits."""
    w = w.astype(np.float64).reshape(*q.scales.shape, q.group)
    off = np.square(values(q).reshape(w.shape) - w)
    if q.bits < 8:
        mean = np.square(w).mean(axis=-1, keepdims=True)
        off *= np.sqrt(1 + np.square(w) / np.where(mean == 0, 1, mean))
    return off.sum(axis=-1)


def assert_equal(a: QArray, b: QArray) -> None:
    assert (a.bits, a.size, a.zeros is None) == (b.bits, b.size, b.zeros is None)
    for x, y in ((a.codes, b.codes), (a.scales, b.scales), (a.zeros, b.zeros)):
        if x is not None:
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def heavy_tailed(rows: int, size: int, seed: int = 0) -> np.ndarray:
    """Return numbers whose distribution is that of a trained weight: normal by input, with single large ones."""
    rng = np.random.default_rng(seed)
    by_input = np.exp(0.4 * rng.standard_normal(size))
    return (0.02 * rng.standard_t(6, (rows, size)) * by_input).astype(np.float32)


WEIGHTS = st.builds(
    lambda seed, rows, groups, group, exponent, zeros: (
        np.where(
            np.random.default_rng(seed).random((rows, groups * group)) < zeros,
            0,
            heavy_tailed(rows, groups * group, seed) * np.float32(2.0**exponent),
        ).astype(np.float32),
        group,
    ),
    seed=st.integers(0, 1000),
    rows=st.integers(1, 5),
    groups=st.integers(1, 4),
    group=st.sampled_from([32, 64, 128, 5, 300]),
    exponent=st.integers(-150, 120),
    zeros=st.sampled_from([0, 0.5, 0.98]),
)


@settings(max_examples=40, deadline=None)
@given(WEIGHTS, st.sampled_from([8, 4, 3]), st.booleans())
def test_search_is_never_worse_than_plain_rounding_and_finite(weight, bits, symmetric):
    w, group = weight
    group = 0 if group in (5, 300) else group
    found, plain = (f(w, bits, group=group, symmetric=symmetric) for f in (quantize_by_search, quantize))
    better, worse = errors(w, found), errors(w, plain)
    assert np.all(better <= worse * (1 + 1e-5))
    assert np.isfinite(values(found).astype(np.float32)).all()
    if bits == 8:
        assert_equal(found, plain)


@settings(max_examples=40, deadline=None)
@given(WEIGHTS, st.sampled_from([8, 4, 3]), st.booleans(), st.booleans())
def test_kernel_equals_the_definition_in_every_bit(weight, bits, symmetric, half):
    w, group = weight
    w = w.astype(ml_dtypes.bfloat16) if half else w
    how = {"group": 0 if group in (5, 300) else group, "symmetric": symmetric}
    assert_equal(native.quantize_by_search(w, bits, **how), quantize_by_search(w, bits, **how))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 100), st.integers(1, 6), st.sampled_from([4, 3]), st.booleans())
def test_rows_have_the_same_codes_however_they_are_divided(seed, split, bits, symmetric):
    w = heavy_tailed(7, 160, seed)
    whole = quantize_by_search(w, bits, group=32, symmetric=symmetric)
    for part, rows in ((w[:split], slice(0, split)), (w[split:], slice(split, None))):
        found = native.quantize_by_search(part, bits, group=32, symmetric=symmetric)
        zeros = None if whole.zeros is None else whole.zeros[rows]
        assert_equal(found, QArray(whole.codes[rows], whole.scales[rows], zeros, bits, 160))


def test_large_weight_is_rounded_in_parts_by_several_threads(monkeypatch):
    monkeypatch.setattr("jaxserve.checkpoint.rounding.CHUNK", 1000)
    w = heavy_tailed(30, 192).reshape(2, 15, 192)
    for symmetric in (True, False):
        assert_equal(
            round_weight(w, 4, group=64, symmetric=symmetric),
            quantize_by_search(w, 4, group=64, symmetric=symmetric),
        )


@FEW_BITS
@SYMMETRIC
@pytest.mark.parametrize("group", [32, 128])
def test_search_removes_much_of_the_error_of_a_trained_weight(bits, symmetric, group):
    w = heavy_tailed(64, 1024)
    found, plain = (
        errors(w, f(w, bits, group=group, symmetric=symmetric)).sum() for f in (quantize_by_search, quantize)
    )
    assert found < 0.95 * plain


@FEW_BITS
@SYMMETRIC
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_extreme_weights_stay_finite(bits, symmetric, dtype):
    w = np.zeros((8, 96), np.float32)
    w[1] = 1e-40  # denormal
    w[2, 7] = 3e38  # a single huge number
    w[3] = -3e38
    w[4] = np.linspace(-3e38, 3e38, 96)
    w[5] = np.where(np.arange(96) % 2, 1e-20, -1e30)
    w[6] = 1e-3
    w[7] = np.linspace(1, 2, 96)  # all of one sign
    w = w.astype(dtype)
    for rounding in (quantize_by_search, native.quantize_by_search):
        q = rounding(w, bits, group=32, symmetric=symmetric)
        found = values(q).astype(np.float32)
        assert np.isfinite(found).all()
        np.testing.assert_array_equal(found[:2], 0)
        np.testing.assert_allclose(found[6], 1e-3, rtol=0.01)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("precision", ["int8", "int4", "int3"])
def test_weight_that_is_not_finite_is_refused_by_name(bad, precision, small_config: ModelConfig):
    from jaxserve.models import abstract_block

    _, variables = abstract_block(small_config, "layers.0")
    arrays = {name: np.ones(v.get_value().shape, ml_dtypes.bfloat16) for name, v in variables.items()}
    arrays["mlp.down"][3, 5] = bad
    with pytest.raises(CheckpointError, match=rf"layers\.0\.mlp\.down holds NaN or infinity: .*{precision}"):
        round_block(small_config, "layers.0", arrays, precision)


@pytest.fixture
def small_config() -> ModelConfig:
    from jaxserve.checkpoint import open_checkpoint
    from jaxserve.core.bundled import bundled_model_path

    return open_checkpoint(bundled_model_path()).config
