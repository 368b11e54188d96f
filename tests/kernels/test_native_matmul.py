"""The native product of a few rows against XLA's, and who uses which."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels import matmul
from jaxserve.kernels.native import library, matmul as native


@pytest.fixture(autouse=True)
def built(native_kernels) -> None:
    if library.MATMUL not in library.targets():
        pytest.skip("this machine has no AMX-BF16")


def operands(rows: int, out: int, inner: int) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(rows * out + inner))
    shapes = ((rows, inner), (out, inner))
    x, w = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
    return x, w


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 15, 16, 17, 23, 32])
@pytest.mark.parametrize(
    ("out", "inner"), [(32, 32), (33, 64), (63, 96), (64, 32), (130, 160), (1000, 64), (2048, 768)]
)
def test_it_is_the_product(rows: int, out: int, inner: int) -> None:
    x, w = operands(rows, out, inner)
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    got = np.asarray(jax.jit(native.matmul)(x, w))
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3 * inner**0.5)


def test_a_row_does_not_depend_on_the_others() -> None:
    x, w = operands(32, 100, 256)
    whole = np.asarray(native.matmul(x, w))
    for rows in (1, 4, 17):
        np.testing.assert_array_equal(np.asarray(native.matmul(x[:rows], w)), whole[:rows])


@pytest.mark.parametrize(
    ("rows", "split", "used"), [(1, False, True), (32, False, True), (33, False, False), (4, True, False)]
)
def test_few_rows_on_one_device_take_it(rows: int, split: bool, used: bool) -> None:
    x, w = operands(rows, 64, 64)
    program = jax.jit(lambda x, w: matmul(x, w, split=split)).lower(x, w).compile().as_text()
    assert (library.MATMUL in program) == used
