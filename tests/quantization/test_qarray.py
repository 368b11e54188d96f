"""The format of quantised weights: packed codes are unpacked unchanged, and the equation holds."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve.core.errors import ConfigError
from jaxserve.quantization import QArray
from jaxserve.quantization.packing import pack, packed_bytes, unpack
from jaxserve.quantization.qarray import unpacked
from jaxserve.quantization.rounding import quantize

BITS = (8, 4, 3)


@pytest.mark.parametrize("size", [1, 32, 128, 200, 256, 768])
@pytest.mark.parametrize("bits", BITS)
def test_packed_codes_are_unpacked_unchanged(bits, size):
    codes = np.random.default_rng(size).integers(0, 1 << bits, (3, 2, size)).astype(np.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (3, 2, packed_bytes(bits, size))
    assert packed.dtype == np.uint8
    np.testing.assert_array_equal(unpack(packed, bits, size), codes)
    np.testing.assert_array_equal(unpacked(jnp.asarray(packed), bits, size), codes)


def test_int3_weights_take_three_bits_each():
    assert packed_bytes(3, 4096) * 8 == 3 * 4096
    assert quantize(np.ones((4, 4096), np.float32), 3).nbytes * 8 == 4 * 4096 * (3 + 16 / 128)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [0, 32, 128])
@pytest.mark.parametrize("bits", BITS)
def test_dequantised_weights_are_the_nearest(bits, group, symmetric):
    w = np.random.default_rng(0).normal(size=(2, 6, 256)).astype(np.float32)
    q = quantize(w, bits, group=group, symmetric=symmetric)
    assert q.shape == w.shape
    codes = unpack(q.codes, bits, 256).astype(np.float32) - (1 << (bits - 1))
    wide = np.repeat(q.scales.astype(np.float32), q.group, axis=-1)
    zeros = 0 if q.zeros is None else np.repeat(q.zeros.astype(np.float32), q.group, axis=-1)
    expected = wide * (codes - zeros)
    np.testing.assert_array_equal(q.dequantize(), expected)
    inside = (codes > -(1 << (bits - 1))) & (codes < (1 << (bits - 1)) - 1)
    assert inside.mean() > 0.5
    assert np.all(np.abs(expected - w)[inside] <= np.abs(wide)[inside] * 0.5001)


def test_quantised_group_of_zeros_is_exact():
    q = quantize(np.zeros((2, 64), np.float32), 4, symmetric=False)
    np.testing.assert_array_equal(q.dequantize(), np.zeros((2, 64)))


@pytest.mark.parametrize("symmetric", [True, False])
def test_quantised_group_too_small_for_a_scale_is_zero(symmetric):
    w = np.linspace(0, 1e-42, 64, dtype=np.float32)[None]
    np.testing.assert_array_equal(quantize(w, 4, symmetric=symmetric).dequantize(), 0)


def test_qarray_is_a_pytree_of_flat_arrays():
    q = quantize(np.ones((4, 128), np.float32), 4, scale_dtype=np.dtype(np.float32))
    leaves, structure = jax.tree.flatten(q)
    assert [(leaf.shape, str(leaf.dtype)) for leaf in leaves] == [((4, 64), "uint8"), ((4, 1), "float32")]
    again = jax.jit(lambda q: q)(jax.tree.unflatten(structure, leaves))
    assert isinstance(again, QArray)
    assert (again.bits, again.size, again.group) == (4, 128, 128)
    assert quantize(np.ones((4, 128), np.float32), 4).scales.dtype == ml_dtypes.bfloat16


def test_quantisation_to_five_bits_is_refused():
    with pytest.raises(ConfigError, match="8, 4 or 3 bits, not 5"):
        quantize(np.ones((4, 128), np.float32), 5)
