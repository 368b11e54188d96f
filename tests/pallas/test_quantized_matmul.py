import os
import subprocess
import sys
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
from pallas_kernels.blocks import HOPPER, MatmulBlocks, blocks_for
from pallas_kernels.quantized_matmul import quantized_matmul, splits_for, supports
from tests.pallas.conftest import lowered
from tests.support.thorough import some


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


SIZES = [
    MatmulBlocks(64, 32, 2, 1, 32),
    MatmulBlocks(64, 128, 3, 2, 64),
    MatmulBlocks(128, 64, 2, 8, 128),
    MatmulBlocks(128, 64, 2, 1, 32, warpgroups=2),
    MatmulBlocks(256, 32, 3, 2, 32, warpgroups=2),
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("rows", [3, 70])
def test_gpu_product_does_not_depend_on_block_sizes(interpret, sizes, rows):
    shape = ProductShape(rows, out=(256,), size=2048 if rows < 32 else 512)
    blocks = replace(HOPPER, few_rows=sizes, many_rows=sizes, shared={4: sizes, 8: sizes})
    check(shape, blocks=blocks, interpret=interpret)


@pytest.mark.parametrize("rows", [33, 64, 65, 130, 300, 512])
@pytest.mark.parametrize("bits", [4, 8])
def test_gpu_product_is_right_with_the_block_sizes_of_an_h200(interpret, rows, bits):
    check(ProductShape(rows, size=512, bits=bits), blocks=blocks_for("NVIDIA H200"), interpret=interpret)


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
    "128 rows, outputs of one warpgroup": ProductShape(rows=128, out=(64 * 9,), size=4096),
    "1,024 rows, zeros": ProductShape(rows=1024, out=(4096,), size=14336, symmetric=False),
    "int8, 512 rows": ProductShape(rows=512, out=(28672,), size=4096, bits=8),
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


SPILLS = """
import sys
from functools import partial
from tests.pallas.test_quantized_matmul import ProductShape, arguments
from pallas_kernels.blocks import blocks_for
from pallas_kernels.quantized_matmul import quantized_matmul
from pallas_kernels.targets import compile_for

shape = ProductShape(rows=int(sys.argv[2]), out=(4096,), size=4096, bits=int(sys.argv[1]))
compile_for("h200", partial(quantized_matmul, blocks=blocks_for("NVIDIA H200")), *arguments(shape))
"""


@pytest.mark.parametrize(("bits", "rows"), some([(4, 512), (8, 512), (4, 8), (8, 8), (4, 64), (8, 128)], 2))
def test_gpu_product_keeps_its_numbers_in_registers(compile_for_h200, bits, rows):
    """ptxas reports what it spills, if Mosaic asks for it in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-c", SPILLS, str(bits), str(rows)],
        env=os.environ | {"MOSAIC_GPU_DUMP_PTXAS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "0 bytes spill stores, 0 bytes spill loads" in run.stdout + run.stderr


def test_product_backend_can_be_forced():
    x, w = arguments(SHAPES["int4"])
    assert "mosaic_gpu" in lowered(partial(matmul, backend="pallas"), x, w)
    assert "mosaic_gpu" not in lowered(partial(matmul, backend="xla"), x, w)


@pytest.mark.parametrize(
    "shape",
    [
        ProductShape(rows=1025),
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
