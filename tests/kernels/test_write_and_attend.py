"""Rotation, writing and attention in one call, compared with separate calls."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jaxserve.kernels import AttentionMeta, HeadNorms, Pool, ProjectedQKV, kv_pool, write_and_attend
from jaxserve.kernels.kv import from_storage
from tests.kernels.problems import Problem, Shape, make_problem
from tests.support.thorough import some

SHAPES = {
    "gqa": Shape(),
    "mha": Shape(K=3, G=1),
    "wide groups": Shape(K=1, G=8),
    "D=16": Shape(D=16),
    "D=80": Shape(D=80),
    "D=96": Shape(D=96, G=2),
    "D=256": Shape(D=256, K=1),
    "page of one token": Shape(S=1, W=50),
    "no decode rows": Shape(B=0),
    "no tiles": Shape(N=0),
    "one row": Shape(B=1, N=0),
    "nothing": Shape(B=0, N=0),
    "many": Shape(B=20, N=5, Q=64, S=16, W=12, K=4),
    "window": Shape(window=5),
    "bf16": Shape(dtype="bfloat16"),
    "bf16 D=80": Shape(dtype="bfloat16", D=80, K=4, G=1),
    "bf16 D=128": Shape(dtype="bfloat16", D=128, N=5, Q=64, S=16),
    "bf16 decode": Shape(dtype="bfloat16", B=9, N=0),
    "int8": Shape(kv_dtype="int8"),
    "int8 bf16": Shape(kv_dtype="int8", dtype="bfloat16"),
    "int8 bf16 D=80": Shape(kv_dtype="int8", dtype="bfloat16", D=80, G=2),
}
SCALE = 0.3
TOLERANCE = {"float32": 3e-5, "bfloat16": 2e-2}


def slots_of(meta: AttentionMeta, page_size: int, tokens: int) -> np.ndarray:
    """Return the pool's slots for a step's tokens, with padding in the null page."""
    slots = []
    for pages, length in zip(meta.decode_pages, meta.decode_lengths, strict=True):
        slots.append(pages[(length - 1) // page_size] * page_size + (length - 1) % page_size if length else 0)
    tile = (tokens - len(slots)) // max(1, len(meta.tile_starts))
    for pages, start, length in zip(meta.tile_pages, meta.tile_starts, meta.tile_lengths, strict=True):
        positions = np.arange(start, start + length)
        slots += [*np.asarray(pages)[positions // page_size] * page_size + positions % page_size]
        slots += [0] * (tile - int(length))
    return np.array(slots, np.int32)


def projected(shape: Shape, tokens: int, normed: bool) -> ProjectedQKV:
    rng = np.random.default_rng(tokens)
    angles = rng.uniform(-np.pi, np.pi, (tokens, shape.D // 2)).astype(np.float32)
    parts = rng.normal(size=(tokens, shape.K, shape.G + 2, shape.D))
    norms = HeadNorms(*(jnp.asarray(rng.normal(1, 0.2, shape.D), shape.dtype) for _ in range(2)), eps=1e-5)
    return ProjectedQKV(jnp.asarray(parts, shape.dtype), jnp.cos(angles), jnp.sin(angles), norms if normed else None)


def rows_at(pool: Pool, slots: np.ndarray, shape: Shape) -> Array:
    """Return keys and values (f32[T, K, 2, D]) at slots."""
    (segment,) = pool
    rows = segment[slots // shape.S, :, :, slots % shape.S]
    return from_storage(rows, shape.D, shape.dtype, jnp.float32)


def problem_of(shape: Shape, normed: bool = False) -> tuple[Problem, ProjectedQKV, np.ndarray]:
    problem = make_problem(shape, seed=3)
    slots = slots_of(problem.meta, shape.S, len(problem.q))
    return problem, projected(shape, len(problem.q), normed), slots


@pytest.mark.parametrize(("name", "normed"), some(product(SHAPES, [False, True]), 9))
def test_write_and_attend_equals_write_then_attend(native_kernels, name, normed):
    shape = SHAPES[name]
    problem, qkv, slots = problem_of(shape, normed)
    arguments = (qkv, problem.pool, jnp.asarray(slots), problem.meta)
    native, xla = (
        jax.jit(partial(write_and_attend, scale=SCALE, window=shape.window, backend=name)) for name in ("native", "xla")
    )
    assert "jaxserve_write_and_attend" in native.lower(*arguments).as_text()
    (out, pool), (expected, expected_pool) = native(*arguments), xla(*arguments)
    as_float = partial(np.asarray, dtype=np.float32)
    np.testing.assert_allclose(as_float(out), as_float(expected), atol=TOLERANCE[shape.dtype])

    own = slots[slots > 0]
    written, expected_rows = rows_at(pool, own, shape), rows_at(expected_pool, own, shape)
    step = 2**-8 if shape.dtype == "bfloat16" else 2**-22  # of the last bit, which a fused multiplication may change
    if shape.kv_dtype == "int8":
        step = 1 / 127  # of the largest number of a row, if the tie is broken the other way
    np.testing.assert_allclose(written, expected_rows, rtol=0, atol=step * np.abs(expected_rows).max(initial=0))
    others = np.ones((len(pool[0]), shape.S), bool)
    others[0] = others[own // shape.S, own % shape.S] = False
    before, after = (np.asarray(p[0]).swapaxes(1, 3)[others].view(np.uint8) for p in (problem.pool, pool))
    np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_write_and_attend_writes_the_pool_in_place(native_kernels, dtype):
    shape = Shape(dtype="bfloat16", kv_dtype=dtype, B=4, N=0)
    _, qkv, slots = problem_of(shape)
    meta = make_problem(shape, seed=3).meta
    pool = jax.eval_shape(lambda: kv_pool(4096, shape.K, shape.S, shape.D, dtype))
    step = jax.jit(partial(write_and_attend, scale=SCALE), donate_argnums=1)
    memory = step.lower(qkv, pool, slots, meta).compile().memory_analysis()
    assert memory.alias_size_in_bytes == pool[0].size * pool[0].dtype.itemsize
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes / 10


def test_write_and_attend_refuses_a_slot_outside_the_pool(native_kernels):
    problem, qkv, slots = problem_of(Shape(B=1, N=0))
    slots[0] = len(problem.pool[0]) * Shape.S
    with pytest.raises(jax.errors.JaxRuntimeError, match="slot"):
        jax.block_until_ready(write_and_attend(qkv, problem.pool, jnp.asarray(slots), problem.meta, scale=SCALE))
