"""Ceilings: what this device reaches with the simplest programs, for comparison with everything else."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import Array, lax

from bench.gpu_parts import Row
from bench.gpu_parts.sizes import Sizes
from bench.gpu_parts.timing import seconds_per_call, timed_row


def rows(sizes: Sizes) -> Iterator[Row]:
    """Yield the copy bandwidth, counting bytes read and written, and products of square random matrices."""
    device = jax.devices()[0]
    yield {"case": "device", "name": device.device_kind, "platform": device.platform}
    yield timed_row({"case": "copy", "bytes": 2 * sizes.copy_bytes}, lambda: copy(sizes))
    for dtype in (jnp.bfloat16, jnp.int8):
        name = jnp.dtype(dtype).name
        labels = {"case": f"matmul {name}", "flops": 2 * sizes.matmul**3, "dtype": name}
        yield timed_row(labels, lambda dtype=dtype: product(sizes, dtype))


def copy(sizes: Sizes) -> float:
    """Return the seconds of y = x + 1 with a large array, a copy through the cores."""
    x = jnp.arange(sizes.copy_bytes // 4, dtype=jnp.float32)
    add = jax.jit(lambda x: x + 1)
    return seconds_per_call(lambda: add(x), sizes.min_round_s)


def product(sizes: Sizes, dtype: jnp.dtype) -> float:
    """Return the seconds of x @ w.T with sums in float32 or int32. Matrices are random, because zeros are faster."""
    n, name = sizes.matmul, jnp.dtype(dtype).name
    x, w = (random(key, (n, n), dtype) for key in jax.random.split(jax.random.key(0)))
    sums = jnp.int32 if name == "int8" else jnp.float32

    @jax.jit
    def multiply(x: Array, w: Array) -> Array:
        y = lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=sums)
        return y if name == "int8" else y.astype(dtype)

    return seconds_per_call(lambda: multiply(x, w), sizes.min_round_s)


def random(key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """Return numbers as weights and activations have them: normal floats, or all int8 values equally likely."""
    if jnp.dtype(dtype) == jnp.int8:
        return jax.random.randint(key, shape, -128, 128, jnp.int8)
    return jax.random.normal(key, shape, dtype)
