import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels import kv_pool, kv_write, page_bytes, storage_dtype
from jaxserve.kernels.kv import from_storage, to_storage
from tests.kernels.problems import stored


def test_kv_of_16_bit_floats_is_stored_as_uint16_on_cpu_only():
    assert storage_dtype("bfloat16", "cpu") == jnp.uint16
    assert storage_dtype("float16", "cpu") == jnp.uint16
    assert storage_dtype("float32", "cpu") == jnp.float32
    assert storage_dtype("bfloat16", "gpu") == jnp.bfloat16
    assert kv_pool(3, 2, 4, 8, jnp.bfloat16, jax.devices("cpu")[0])[0].dtype == jnp.uint16


def test_new_pool_is_zero_and_page_first():
    (pool,) = kv_pool(5, 2, 4, 8, jnp.float32)
    assert pool.shape == (5, 2, 2, 4, 8)
    assert not pool.any()


@pytest.mark.parametrize(
    ("written", "dtype"),
    [("float32",) * 2, ("bfloat16",) * 2, ("float16",) * 2, ("float32", "int8"), ("bfloat16", "int8")],
)
@pytest.mark.parametrize("sizes", [(6,), (2, 1, 3)])
def test_kv_write_changes_exactly_the_given_slots(written, dtype, sizes):
    pages, K, S, D, tokens = 6, 3, 4, 8, 9
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.normal(size=(tokens, K, D)), written) for _ in range(2))
    slots = rng.permutation(np.arange(S, pages * S))[:tokens]
    pool = tuple(segment.at[:].set(7) for size in sizes for segment in kv_pool(size, K, S, D, dtype))
    written = kv_write(pool, k, v, jnp.asarray(slots, jnp.int32))
    expected = np.concatenate(pool)
    for token, slot in enumerate(slots):
        kv = np.stack([k[token], v[token]], axis=1).astype(np.float32)
        expected[slot // S, :, :, slot % S] = stored(kv, jnp.dtype(dtype))[0]
    np.testing.assert_array_equal(np.concatenate(written), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_kv_write_of_padding_changes_only_the_null_page(dtype):
    pool = kv_pool(4, 1, 2, 8, dtype)
    k = jnp.ones((5, 1, 8), jnp.bfloat16)
    (written,) = kv_write(pool, k, k, jnp.zeros(5, jnp.int32))
    assert not written[1:].any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [8, 20, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("tokens", [1, 40])
def test_native_kv_write_stores_the_nearest_int8_codes(native_kernels, dtype, head_dim, tokens):
    pages, K, S = 12, 2, 4
    rng = np.random.default_rng(head_dim)
    spread = np.logspace(-6, 6, tokens)[:, None, None, None]
    kv = jnp.asarray(rng.normal(size=(tokens, K, 2, head_dim)) * spread, dtype).at[0, 0].set(0)
    slots = rng.permutation(np.arange(S, pages * S))[:tokens]
    (pool,) = kv_pool(pages, K, S, head_dim, "int8")
    (written,) = native_kernels.kv_write((pool,), kv, jnp.asarray(slots, jnp.int32))
    expected = np.zeros_like(pool)
    expected[slots // S, :, :, slots % S] = stored(np.asarray(kv, np.float32), jnp.dtype("int8"))[0]
    np.testing.assert_array_equal(written, expected)


@pytest.mark.parametrize("slot", [-1, 12])
def test_kv_write_to_a_slot_outside_the_pool_is_refused(native_kernels, slot):
    pool, kv = kv_pool(3, 1, 4, 8, "int8"), jnp.ones((1, 1, 2, 8))
    with pytest.raises(jax.errors.JaxRuntimeError, match="slot"):
        jax.block_until_ready(native_kernels.kv_write(pool, kv, jnp.array([slot])))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("sizes", [(512,), (256, 128, 128)])
def test_kv_write_to_a_donated_pool_is_in_place(dtype, sizes):
    pool = jax.eval_shape(lambda: tuple(segment for size in sizes for segment in kv_pool(size, 4, 16, 64, dtype)))
    k = jax.ShapeDtypeStruct((32, 4, 64), "float32" if dtype == "float32" else "bfloat16")
    slots = jax.ShapeDtypeStruct((32,), jnp.int32)
    memory = jax.jit(kv_write, donate_argnums=0).lower(pool, k, k, slots).compile().memory_analysis()
    pool_bytes = sum(segment.size * segment.dtype.itemsize for segment in pool)
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 10


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_page_bytes_add_up_to_the_pools_bytes(dtype):
    assert kv_pool(5, 2, 4, 8, dtype)[0].nbytes == 5 * page_bytes(2, 4, 8, dtype, "cpu")


def test_int8_rows_on_gpu_are_padded_to_whole_copies():
    assert page_bytes(4, 16, 64, "int8", "gpu") == 4 * 2 * 16 * 80
    assert page_bytes(4, 16, 80, "int8", "gpu") == 4 * 2 * 16 * 96
    assert page_bytes(4, 16, 64, "bfloat16", "gpu") == 4 * 2 * 16 * 128


@pytest.mark.parametrize("row", [12, 16])
def test_padding_after_an_int8_scale_is_not_read(row):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 8)), jnp.float32)
    rows = to_storage(x, jnp.int8, row)
    assert rows.shape == (5, row)
    filled = rows.at[:, 12:].set(99)
    np.testing.assert_array_equal(*(from_storage(r, 8, jnp.float32, jnp.float32) for r in (rows, filled)))


def test_int8_page_takes_one_byte_per_number_and_four_per_scale():
    assert page_bytes(4, 16, 64, "int8", "cpu") == 4 * 2 * 16 * (64 + 4)
    assert page_bytes(4, 16, 128, "bfloat16", "cpu") / page_bytes(4, 16, 128, "int8", "cpu") > 1.93


def test_int8_codes_are_the_nearest_and_the_largest_number_is_exact():
    x = np.random.default_rng(0).normal(size=(50, 3, 64)).astype(np.float32) * np.logspace(-20, 20, 50)[:, None, None]
    x = jnp.asarray(x, jnp.float32)
    back = from_storage(to_storage(x, jnp.int8, 68), 64, jnp.float32, jnp.float32)
    largest = jnp.abs(x).max(-1, keepdims=True)
    assert (jnp.abs(back - x) <= largest / 127 * 0.5001).all()
    np.testing.assert_allclose(jnp.abs(back).max(-1, keepdims=True), largest, rtol=1e-6)


@pytest.mark.parametrize("value", [0.0, 1e-37, 1e-40])
def test_int8_rows_of_zeros_and_tiny_numbers_stay_tiny(value):
    back = from_storage(to_storage(jnp.full((2, 8), value, jnp.float32), jnp.int8, 12), 8, jnp.float32, jnp.float32)
    assert (jnp.abs(back) <= 2 * value).all()


@pytest.mark.parametrize("backend", ["auto", "xla"])
@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
def test_int8_rows_with_non_finite_numbers_are_not_finite(value, backend):
    x = jnp.ones((2, 1, 8)).at[0, 0, 3].set(value)
    (pool,) = kv_write(kv_pool(1, 1, 2, 8, "int8"), x, x, jnp.arange(2), backend=backend)
    back = from_storage(pool, 8, jnp.float32, jnp.float32)
    assert not jnp.isfinite(back[:, :, :, 0]).any()
    assert (back[:, :, :, 1] == 1).all()
