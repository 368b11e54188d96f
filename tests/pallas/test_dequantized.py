"""Where XLA multiplies on a GPU, one tile of a quantised weight is dequantised at a time."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxserve.core.dequantization import tile_bytes
from jaxserve.kernels import matmul
from jaxserve.quantization import QArray
from jaxserve.quantization.packing import packed_bytes


@pytest.mark.parametrize("bits", [8, 4, 3])
@pytest.mark.parametrize(("outputs", "inner"), [(28672, 4096), (4096, 14336)], ids=["gate and up", "down"])
def test_temporaries_are_one_tile_and_its_products(outputs: int, inner: int, bits: int, compile_for_h200: Callable):
    rows = 512
    numbers = jax.ShapeDtypeStruct((outputs, inner // 128), jnp.bfloat16)
    w = QArray(jax.ShapeDtypeStruct((outputs, packed_bytes(bits, inner)), jnp.uint8), numbers, numbers, bits, inner)
    x = jax.ShapeDtypeStruct((rows, inner), jnp.bfloat16)
    compiled = compile_for_h200(partial(matmul, backend="xla"), x, w)
    tile = tile_bytes(outputs, inner, 2)
    # The scales and zeros of a tile may be copied too, and its products are written before they join the others.
    assert compiled.memory_analysis().temp_size_in_bytes <= 1.05 * tile + rows * outputs * 4
