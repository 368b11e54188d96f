"""Products with quantised weights that XLA dequantises tile by tile, compared with dequantising them whole.

Operands are whole numbers times powers of two, so that float32 sums are exact in any order.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from jaxserve.core import dequantization
from jaxserve.core.dequantization import MAX_TILE_BYTES, OUTPUTS_UNIT, outputs_by_tile, tile_bytes
from jaxserve.kernels import grouped_matmul, matmul
from jaxserve.quantization import QArray
from jaxserve.quantization.packing import packed_bytes


def product(multiply, *operands) -> np.ndarray:
    return np.asarray(jax.jit(partial(multiply, backend="xla"))(*operands))


def weight(*shape: int, bits: int, group: int, zeros: bool = False, numbers: str = "bfloat16") -> QArray:
    *out, inner = shape
    rng = np.random.default_rng([*shape, bits])
    codes = rng.integers(0, 256, (*out, packed_bytes(bits, inner)), np.uint8)
    scales = jnp.asarray(rng.choice([-0.5, 1, 2], (*out, inner // group)), numbers)
    offsets = jnp.asarray(rng.integers(-4, 4, scales.shape), numbers) if zeros else None
    return QArray(codes, scales, offsets, bits, inner)


def rows_of(count: int, inner: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(count).integers(-3, 4, (count, inner)), dtype)


def use_tiles(monkeypatch: pytest.MonkeyPatch, outputs: int, inner: int, dtype: str) -> None:
    monkeypatch.setattr(dequantization, "MAX_TILE_BYTES", outputs * inner * jnp.dtype(dtype).itemsize)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("bits", "inner", "kwargs"),
    [
        (8, 320, {"group": 320}),
        (8, 320, {"group": 80, "zeros": True}),
        (4, 384, {"group": 24, "zeros": True}),
        (4, 256, {"group": 128, "numbers": "float32"}),
        (3, 512, {"group": 128, "zeros": True}),
        (3, 256, {"group": 32}),
    ],
    ids=str,
)
# Tiles that divide the outputs, and a last tile that begins earlier; one row takes another path on CPU.
@pytest.mark.parametrize(("outputs", "rows"), [(256, 33), (451, 1)])
def test_tiles_give_the_bits_of_the_whole_weight(
    outputs: int, rows: int, bits: int, inner: int, kwargs: dict, dtype: str, monkeypatch: pytest.MonkeyPatch
):
    w, x = weight(outputs, inner, bits=bits, **kwargs), rows_of(rows, inner, dtype)
    residual = rows_of(rows, outputs, dtype)

    def multiply(x, w, residual, backend):
        return matmul(x, w, residual=residual, backend=backend)

    whole = product(multiply, x, w, residual)
    use_tiles(monkeypatch, 200, inner, dtype)
    assert outputs_by_tile(outputs, inner, jnp.dtype(dtype).itemsize) == 128
    np.testing.assert_array_equal(product(multiply, x, w, residual), whole)


def test_experts_are_dequantised_in_tiles_too(monkeypatch: pytest.MonkeyPatch):
    x, w, sizes = rows_of(40, 256), weight(3, 2, 150, 256, bits=4, group=32), jnp.array([7, 0, 33], jnp.int32)
    whole = product(grouped_matmul, x, w, sizes)
    use_tiles(monkeypatch, 128, 256, "float32")
    np.testing.assert_array_equal(product(grouped_matmul, x, w, sizes), whole)


def test_products_take_temporary_memory_for_one_tile():
    outputs, inner, rows = 14336, 4096, 8
    codes = jax.ShapeDtypeStruct((outputs, packed_bytes(8, inner)), jnp.uint8)
    w = QArray(codes, jax.ShapeDtypeStruct((outputs, inner // 128), jnp.bfloat16), None, 8, inner)
    x = jax.ShapeDtypeStruct((rows, inner), jnp.bfloat16)
    compiled = jax.jit(partial(matmul, backend="xla")).lower(x, w).compile()
    tile, result = tile_bytes(outputs, inner, 2), rows * outputs * 4
    assert tile <= compiled.memory_analysis().temp_size_in_bytes < 1.1 * tile + 3 * result
    assert 3 * tile < outputs * inner * 2


@given(st.integers(1, 200_000), st.integers(1, 100_000), st.sampled_from([2, 4]))
def test_tiles_are_few_and_within_the_limit(outputs: int, inputs: int, itemsize: int):
    tile = outputs_by_tile(outputs, inputs, itemsize)
    assert 1 <= tile <= outputs
    assert tile == outputs or tile % OUTPUTS_UNIT == 0
    unit = OUTPUTS_UNIT * inputs * itemsize
    assert tile_bytes(outputs, inputs, itemsize) <= max(MAX_TILE_BYTES, unit)
    count = -(-outputs // tile)
    assert (count - 1) * max(MAX_TILE_BYTES - unit, unit) <= outputs * inputs * itemsize, "no more than are needed"
