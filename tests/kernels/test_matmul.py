"""Products with weights, compared with numpy."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels import grouped_matmul, matmul
from tests.support.internals import pretend_gpu, ragged_matmul


def normal(*shape: int, seed: int = 0, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def wide(x: jax.Array) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 3, 4, 33])
def test_matmul_contracts_the_last_axis(rows: int, dtype: str):
    x, w = normal(rows, 64, dtype=dtype), normal(2, 3, 5, 64, seed=1, dtype=dtype)
    y = jax.jit(matmul)(x, w)
    assert y.dtype == dtype
    expected = np.einsum("te,kgde->tkgd", wide(x), wide(w))
    np.testing.assert_allclose(wide(y), expected, atol=1e-4, rtol=1e-2 if dtype == "bfloat16" else 1e-5)


@pytest.mark.parametrize("rows", [1, 8])
def test_matmul_contracts_several_axes(rows: int):
    x, w = normal(rows, 2, 3, 8), normal(7, 2, 3, 8, seed=1)
    np.testing.assert_allclose(matmul(x, w, contract=3), np.einsum("tkgd,ekgd->te", x, w), atol=1e-4)


def test_matmul_keeps_float32_sums_when_asked():
    x, w = jnp.ones((4, 4097), jnp.bfloat16), jnp.ones((1, 4097), jnp.bfloat16)
    assert float(matmul(x, w, dtype=jnp.float32)[0, 0]) == 4097, "bfloat16 holds 4096 but not 4097"


@pytest.mark.parametrize("on_gpu", [False, True])
def test_product_on_a_gpu_gives_the_result_type_without_a_conversion(on_gpu: bool, monkeypatch: pytest.MonkeyPatch):
    """Logits and the parts of split products stay float32, because what follows needs them so."""
    pretend_gpu(monkeypatch, on_gpu)
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in [(8, 64), (32, 64)])

    def types(**options) -> list[str]:
        text = jax.jit(partial(matmul, backend="xla", **options)).trace(x, w).lower(lowering_platforms=("cuda",))
        return re.findall(r"stablehlo.dot_general.*-> tensor<8x32x(\w+)>", text.as_text())

    assert types() == ["bf16" if on_gpu else "f32"]
    assert types(dtype=jnp.float32) == ["f32"]
    assert types(all_reduce=lambda y: y) == ["f32"]


@pytest.mark.parametrize(("x", "w", "contract"), [((4, 8), (3, 7), 1), ((4, 2, 8), (3, 8), 2)])
def test_matmul_refuses_axes_that_do_not_match(x: tuple, w: tuple, contract: int):
    with pytest.raises(ValueError, match="cannot contract"):
        matmul(jnp.ones(x), jnp.ones(w), contract=contract)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "sizes", [[0, 0, 5, 0], [1, 1, 1, 1], [0, 17, 0, 3], [300, 0, 1, 211], [8, 16, 8, 0], [0, 0, 0, 1]]
)
def test_grouped_matmul_gives_each_group_its_weight(sizes: list[int], dtype: str):
    rows = sum(sizes)
    x, w = normal(rows, 32, dtype=dtype), normal(4, 6, 2, 32, seed=1, dtype=dtype)
    y = jax.jit(grouped_matmul)(x, w, jnp.array(sizes, jnp.int32))
    assert y.shape == (rows, 6, 2)
    assert y.dtype == dtype
    groups = np.repeat(np.arange(4), sizes)
    expected = np.einsum("re,rite->rit", wide(x), wide(w)[groups])
    np.testing.assert_allclose(wide(y), expected, atol=1e-4, rtol=1e-2 if dtype == "bfloat16" else 1e-5)


def test_grouped_matmul_on_other_platforms_lowers():
    shapes = (
        jax.ShapeDtypeStruct((24, 32), jnp.bfloat16),
        jax.ShapeDtypeStruct((4, 6, 2, 32), jnp.bfloat16),
        jax.ShapeDtypeStruct((4,), jnp.int32),
    )
    assert jax.jit(grouped_matmul).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def test_grouped_matmul_is_the_same_function_on_every_platform():
    x, w, sizes = normal(24, 32), normal(4, 12, 32, seed=1), jnp.array([3, 0, 20, 1], jnp.int32)
    np.testing.assert_allclose(ragged_matmul(x, w, sizes), grouped_matmul(x, w, sizes), atol=1e-4)
