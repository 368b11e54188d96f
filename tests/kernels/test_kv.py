import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels import kv_pool, kv_write, storage_dtype


def test_16_bit_floats_are_stored_as_uint16_on_cpu_only():
    assert storage_dtype("bfloat16", "cpu") == jnp.uint16
    assert storage_dtype("float16", "cpu") == jnp.uint16
    assert storage_dtype("float32", "cpu") == jnp.float32
    assert storage_dtype("bfloat16", "gpu") == jnp.bfloat16
    assert kv_pool(3, 2, 4, 8, jnp.bfloat16, jax.devices("cpu")[0]).dtype == jnp.uint16


def test_a_pool_is_zero_and_page_first():
    pool = kv_pool(5, 2, 4, 8, jnp.float32)
    assert pool.shape == (5, 2, 2, 4, 8)
    assert not pool.any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_token_lands_in_its_slot_and_nothing_else_changes(dtype):
    pages, K, S, D, tokens = 6, 3, 4, 8, 9
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.normal(size=(tokens, K, D)), dtype) for _ in range(2))
    slots = rng.permutation(np.arange(S, pages * S))[:tokens]
    pool = kv_pool(pages, K, S, D, dtype)
    pool = pool.at[:].set(7)
    written = kv_write(pool, k, v, jnp.asarray(slots, jnp.int32))
    expected = np.array(pool)
    for token, slot in enumerate(slots):
        bits = np.stack([np.asarray(k[token]), np.asarray(v[token])], axis=1).view(expected.dtype)
        expected[slot // S, :, :, slot % S] = bits
    np.testing.assert_array_equal(written, expected)


def test_padding_rows_touch_only_the_null_page():
    pool = kv_pool(4, 1, 2, 8, jnp.bfloat16)
    k = jnp.ones((5, 1, 8), jnp.bfloat16)
    written = kv_write(pool, k, k, jnp.zeros(5, jnp.int32))
    assert not written[1:].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_donated_pool_is_written_in_place(dtype):
    pool = jax.eval_shape(lambda: kv_pool(512, 4, 16, 64, dtype))
    k = jax.ShapeDtypeStruct((32, 4, 64), dtype)
    slots = jax.ShapeDtypeStruct((32,), jnp.int32)
    memory = jax.jit(kv_write, donate_argnums=0).lower(pool, k, k, slots).compile().memory_analysis()
    pool_bytes = pool.size * pool.dtype.itemsize
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 10
