from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels import matmul
from jaxserve.kernels.backend import uses_pallas
from jaxserve.quantization import QArray
from jaxserve.quantization.packing import packed_bytes
from jaxserve.quantization.rounding import quantize
from pallas_kernels.blocks import HOPPER, MatmulBlocks
from pallas_kernels.quantized_matmul import quantized_matmul, splits_for, supports
from tests.pallas.conftest import lowered


@dataclass(frozen=True)
class ProductShape:
    rows: int = 3
    out: tuple[int, ...] = (128,)
    size: int = 512
    bits: int = 4
    group: int = 128  # 0: one for each output
    symmetric: bool = True
    scales: str = "bfloat16"


SHAPES = {
    "int4": ProductShape(),
    "int4, one row": ProductShape(rows=1),
    "int4, zeros": ProductShape(symmetric=False),
    "int4, groups of 32": ProductShape(group=32, symmetric=False),
    "int4, groups of 64": ProductShape(group=64),
    "int4, one group": ProductShape(group=0),
    "int4, scales in float32": ProductShape(scales="float32", symmetric=False),
    "int4, many rows": ProductShape(rows=130, size=256, symmetric=False),
    **{f"int4, {rows} rows": ProductShape(rows=rows, size=256, symmetric=False) for rows in (8, 16, 64, 65, 256)},
    "int8": ProductShape(bits=8),
    "int8, zeros": ProductShape(bits=8, symmetric=False),
    "int8, groups of 64": ProductShape(bits=8, group=64),
    "int8, one group": ProductShape(bits=8, group=0),
    "int8, scales in float32": ProductShape(bits=8, scales="float32", symmetric=False),
    "outputs of several axes": ProductShape(out=(2, 3, 32)),
    "long, split over programs": ProductShape(out=(64,), size=4096),
    "groups of three units": ProductShape(size=768, group=384),
    "not a whole number of shares": ProductShape(out=(64,), size=128 * 19),
}


def problem(shape, seed=0):
    rng = np.random.default_rng(seed)
    w = rng.normal(size=(*shape.out, shape.size)).astype(np.float32)
    w = quantize(w, shape.bits, group=shape.group, symmetric=shape.symmetric, scale_dtype=jnp.dtype(shape.scales))
    return jnp.asarray(rng.normal(size=(shape.rows, shape.size)), jnp.bfloat16), jax.tree.map(jnp.asarray, w)


def check(shape, **kwargs):
    x, w = problem(shape)
    assert supports(len(x), x.dtype, w)
    wide = np.asarray(w.dequantize(jnp.float32), np.float64).reshape(-1, shape.size)
    answer = np.asarray(x, np.float64) @ wide.T
    out = jax.jit(partial(quantized_matmul, **kwargs))(x, w)
    np.testing.assert_allclose(out, answer, rtol=0, atol=1e-5 * np.abs(x).astype(np.float32).max() * shape.size**0.5)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_gpu_product_equals_that_with_the_dequantised_weight(interpret, shape):
    check(shape, interpret=interpret)


def test_gpu_product_decodes_every_code(interpret):
    """The identity goes through the kernel and is exact for all 16 and all 256 codes."""
    for bits in (4, 8):
        codes = np.arange(64 * 128, dtype=np.int64).reshape(64, 128) % (1 << bits)
        w = quantize(codes - (1 << (bits - 1)), bits, group=0)
        w = replace(jax.tree.map(jnp.asarray, w), scales=jnp.ones((64, 1), jnp.bfloat16))
        out = quantized_matmul(jnp.eye(128, dtype=jnp.bfloat16), w, interpret=interpret)
        np.testing.assert_array_equal(out.T, w.dequantize())


@pytest.mark.parametrize(
    "sizes", [MatmulBlocks(64, 2, 1, 32), MatmulBlocks(64, 3, 2, 64), MatmulBlocks(128, 2, 8, 128)], ids=str
)
def test_gpu_product_does_not_depend_on_block_sizes(interpret, sizes):
    check(ProductShape(size=2048), blocks=replace(HOPPER, few_rows=sizes, many_rows=sizes), interpret=interpret)


def test_small_product_is_split_until_all_cores_have_work():
    assert splits_for(steps=16, wanted=5, weight_bytes=2048, rows=8) == 4  # a fifth share would be empty
    assert splits_for(steps=16, wanted=100, weight_bytes=2048, rows=8) == 8
    assert splits_for(steps=16, wanted=100, weight_bytes=2048, rows=32) == 2  # sums are to be read, too
    assert splits_for(steps=3, wanted=0, weight_bytes=2048, rows=128) == 1


REAL = {
    "one row": ProductShape(rows=1, out=(28672,), size=4096),
    "32 rows, zeros": ProductShape(rows=32, out=(4096,), size=14336, symmetric=False),
    "64 rows, groups of 32": ProductShape(rows=64, out=(8, 6, 128), size=4096, group=32),
    "256 rows": ProductShape(rows=256, out=(4096,), size=4096),
    "int8, one row": ProductShape(rows=1, out=(4096,), size=4096, bits=8),
    "int8, 200 rows": ProductShape(rows=200, out=(4096,), size=4096, bits=8, symmetric=False),
}


def arguments(shape):
    def leaf(width, dtype):
        return jax.ShapeDtypeStruct((*shape.out, width), dtype)

    groups = shape.size // (shape.group or shape.size)
    scales, zeros = leaf(groups, jnp.bfloat16), None if shape.symmetric else leaf(groups, jnp.bfloat16)
    w = QArray(leaf(packed_bytes(shape.bits, shape.size), jnp.uint8), scales, zeros, shape.bits, shape.size)
    return jax.ShapeDtypeStruct((shape.rows, shape.size), jnp.bfloat16), w


@pytest.mark.parametrize("shape", REAL.values(), ids=REAL)
def test_gpu_product_lowers_for_cuda(shape):
    assert "mosaic_gpu" in lowered(quantized_matmul, *arguments(shape))


@pytest.mark.parametrize("shape", REAL.values(), ids=REAL)
def test_gpu_product_compiles_for_h200_without_a_dequantised_copy(compile_for_h200, shape):
    x, w = arguments(shape)
    compiled = compile_for_h200(partial(matmul, backend="pallas"), x, w)
    assert "mosaic_gpu" in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < int(np.prod(w.shape))


def test_product_backend_can_be_forced():
    x, w = arguments(SHAPES["int4"])
    assert "mosaic_gpu" in lowered(partial(matmul, backend="pallas"), x, w)
    assert "mosaic_gpu" not in lowered(partial(matmul, backend="xla"), x, w)


@pytest.mark.parametrize(
    "shape",
    [
        ProductShape(rows=257),
        ProductShape(bits=3),
        ProductShape(out=(60,)),
        ProductShape(size=192, group=64),
        ProductShape(size=768, group=96),
    ],
)
def test_product_of_unsupported_shapes_goes_through_xla(shape):
    x, w = arguments(shape)
    assert not supports(shape.rows, x.dtype, w)
    assert "mosaic_gpu" not in lowered(partial(matmul, backend="pallas"), x, w)


def test_forced_gpu_backend_on_cpu_changes_nothing():
    if uses_pallas("auto"):
        pytest.skip("needs JAX to run on CPU")
    x, w = problem(ProductShape())
    np.testing.assert_array_equal(matmul(x, w, backend="pallas"), matmul(x, w, backend="xla"))
