"""Native kernels on pools of several segments, compared with the same kernels on the same pages in one array."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels import kv_write, paged_attention, write_and_attend
from tests.kernels.problems import Problem, Shape, make_problem
from tests.kernels.test_write_and_attend import problem_of

CUTS = {"2": (2,), "4": (4,), "8": (8,), "unequal": (0.02, 0.04, 0.5, 0.9)}
SHAPES = {
    "float32": Shape(window=5, N=5, Q=16),
    "bf16": Shape(dtype="bfloat16"),
    "bf16 decode": Shape(dtype="bfloat16", B=9, N=0, S=16, W=20),
    "bf16 tiles, window": Shape(dtype="bfloat16", B=0, N=4, Q=32, S=16, W=20, window=70),
    "int8 bf16": Shape(kv_dtype="int8", dtype="bfloat16", window=70, S=16, W=20),
}
SCALE = 0.3


def cut(problem: Problem, cuts: tuple[float, ...]) -> Problem:
    """Return the problem with its pool in equal segments, (number,), or cut after these shares of its pages."""
    pool = np.asarray(problem.pool[0])
    if len(cuts) > 1:
        parts = np.split(pool, [int(share * len(pool)) for share in cuts])
    else:
        count = int(cuts[0])
        parts = np.split(np.concatenate([pool, pool[: -len(pool) % count]]), count)
    return replace(problem, pool=tuple(map(jnp.asarray, parts)))


def bits(x) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_native_attention_over_segments_has_the_same_bits(native_kernels, shape, cuts):
    whole = make_problem(shape, 0)
    attention = jax.jit(partial(paged_attention, scale=SCALE, window=shape.window, backend="native"))
    outputs = [attention(problem.q, problem.pool, problem.meta) for problem in (whole, cut(whole, cuts))]
    np.testing.assert_array_equal(*map(bits, outputs))


@pytest.mark.parametrize("lanes", [4, 8])
@pytest.mark.parametrize("name", ["float32", "bf16", "int8 bf16"])
def test_attention_with_fewer_lanes_over_segments_has_the_same_bits(native_kernels, name, lanes):
    whole = make_problem(SHAPES[name], 0)
    attention = partial(native_kernels.paged_attention, scale=SCALE, window=SHAPES[name].window, max_lanes=lanes)
    outputs = [attention(problem.q, problem.pool, problem.meta) for problem in (whole, cut(whole, (8,)))]
    np.testing.assert_array_equal(*map(bits, outputs))


@pytest.mark.parametrize("cuts", [(2,), (8,), CUTS["unequal"]], ids=str)
@pytest.mark.parametrize("name", ["float32", "bf16", "int8 bf16"])
def test_write_and_attend_over_segments_has_the_same_bits(native_kernels, name, cuts):
    shape = SHAPES[name]
    whole, qkv, slots = problem_of(shape, normed=name == "bf16")
    step = jax.jit(partial(write_and_attend, scale=SCALE, window=shape.window, backend="native"))
    (out, (pool,)), (cut_out, segments) = (
        step(qkv, problem.pool, slots, problem.meta) for problem in (whole, cut(whole, cuts))
    )
    np.testing.assert_array_equal(bits(cut_out), bits(out))
    # Without the null page, which the rows of padding write to in any order.
    np.testing.assert_array_equal(bits(np.concatenate(segments)[1 : len(pool)]), bits(pool[1:]))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_steps_write_all_segments_in_place(native_kernels, kv_dtype):
    shape = Shape(dtype="bfloat16", kv_dtype=kv_dtype, B=4, N=0)
    whole, qkv, slots = problem_of(shape)
    (pool,) = whole.pool
    pool = tuple(jax.ShapeDtypeStruct((4096, *pool.shape[1:]), pool.dtype) for _ in range(8))
    k = jax.ShapeDtypeStruct((4, shape.K, shape.D), "bfloat16")
    pool_bytes = sum(segment.size * segment.dtype.itemsize for segment in pool)
    at_once = jax.jit(partial(write_and_attend, scale=SCALE, backend="native"), donate_argnums=1)
    alone = jax.jit(partial(kv_write, backend="native"), donate_argnums=0)
    for lowered in (at_once.lower(qkv, pool, slots, whole.meta), alone.lower(pool, k, k, slots)):
        memory = lowered.compile().memory_analysis()
        assert memory.alias_size_in_bytes == pool_bytes
        assert memory.temp_size_in_bytes < pool_bytes / 100


def test_a_page_beyond_the_last_segment_is_refused(native_kernels):
    problem = cut(make_problem(Shape(B=1, N=0), 0), (4,))
    pages = sum(len(segment) for segment in problem.pool)
    outside = problem.meta._replace(decode_pages=problem.meta.decode_pages.at[0, 0].set(pages))
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"page {pages} is outside a pool of {pages} pages"):
        native_kernels.paged_attention(problem.q, problem.pool, outside, scale=SCALE).block_until_ready()
